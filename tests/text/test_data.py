"""What a run reads is a function of its seed and its step, validation stays unseen, and nothing stops preparation."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import data
from runtime import files
from text import documents, tokenizer

BYTES = data.tokenizer("bytes")


def write_text(path, documents):
    path.write_text("".join(documents))
    return str(path)


def text(n, seed=0):
    """n documents of a bit more than 4096 characters, no two lines alike, each ending with an empty line."""
    rng = np.random.default_rng(seed)
    line = lambda: " ".join(f"{w:08x}" for w in rng.integers(0, 2**32, 8)) + "\n"
    return ["".join(line() for _ in range(65)) + "\n" for _ in range(n)]


def test_every_document_is_on_one_side_whole_and_in_order(tmp_path):
    """The two files hold all documents, each followed by end-of-text; one that occurs twice is on one side only."""
    docs = text(40)
    docs += docs[:10]
    corpus = data.prepare(write_text(tmp_path / "a.txt", docs), BYTES, 64, folder=tmp_path / "data")
    sides = [BYTES.decode(side[:]).split("\0")[:-1] for side in (corpus.train, corpus.val)]
    assert sorted(sides[0] + sides[1]) == sorted(docs)
    assert not set(sides[0]) & set(sides[1])
    assert len(set(sides[1])) == 2  # 5% of 40
    assert sides[0] == [d for d in docs if d in sides[0]]
    meta = corpus.meta
    assert (meta["train_tokens"], meta["val_tokens"]) == (len(corpus.train), len(corpus.val))
    assert meta["val_bytes"] == len(corpus.val) - len(sides[1]) and meta["documents"] == 50


def test_validation_documents_never_appear_in_training_batches(tmp_path):
    """No line of a held-out document is in any window of a whole epoch."""
    corpus = data.prepare(write_text(tmp_path / "a.txt", text(30)), BYTES, 64, folder=tmp_path / "data")
    n = data.windows(corpus.train, 64)
    seen = "".join(BYTES.decode(data.batch(corpus.train, 64, 1, 0, i)[0]) for i in range(n))
    for piece in BYTES.decode(corpus.val[:]).replace("\0", " ").split():
        assert piece not in seen


@given(n=st.integers(12, 200), context=st.integers(2, 8), size=st.integers(1, 7), seed=st.integers(0, 99))
def test_an_epoch_reads_every_window_once_and_the_next_in_another_order(n, context, size, seed):
    """Targets of an epoch are every id but the first, once each, up to the last window; epochs differ in order."""
    tokens = np.arange(n, dtype=np.uint16)
    windows = data.windows(tokens, context)
    rows = [row for i in range(-(-2 * windows // size)) for row in data.batch(tokens, context, size, seed, i)]
    epochs = rows[:windows], rows[windows : 2 * windows]
    for epoch in epochs:
        assert sorted(y for row in epoch for y in row[1:]) == list(range(1, windows * context + 1))
        assert all((np.diff(row) == 1).all() and row.shape == (context + 1,) for row in epoch)
    if windows > 8:
        assert [r[0] for r in epochs[0]] != [r[0] for r in epochs[1]]


def test_batches_are_a_function_of_seed_and_index():
    tokens = np.arange(10_000, dtype=np.uint16)
    batch = lambda seed, index: data.batch(tokens, 16, 4, seed, index)
    late = batch(1, 1000)  # asked for out of order
    for i in range(3):
        batch(2, i)
    np.testing.assert_array_equal(batch(1, 1000), late)
    assert late.dtype == np.int32 and late.shape == (4, 17)
    assert (batch(1, 0) != batch(2, 0)).any()
    np.testing.assert_array_equal(np.concatenate([batch(1, 0), batch(1, 1)]), data.batch(tokens, 16, 8, 1, 0))


def folders(path):
    return sorted(p.name for p in path.iterdir())


def test_prepared_once_and_made_again_when_the_text_changes(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    first = data.prepare(write_text(path, text(10)), BYTES, 64, folder=tmp_path / "data")
    for side, ids in (("train", first.train), ("val", first.val)):
        each = hashlib.sha256(ids[:].tobytes()).hexdigest()
        assert first.meta["sha256"][side] == hashlib.sha256(each.encode()).hexdigest()  # of one shard
    with monkeypatch.context() as patch:
        patch.setattr(data, "write", None)  # read, not made again
        assert data.prepare(str(path), BYTES, 64, folder=tmp_path / "data").meta == first.meta
    assert data.prepare(write_text(path, text(11)), BYTES, 64, folder=tmp_path / "data").meta["documents"] == 11
    write_text(path, text(11, seed=1))  # as long as before
    os.utime(path, ns=(1, 1))
    assert len(folders(tmp_path / "data")) == 2
    last = data.prepare(str(path), BYTES, 64, folder=tmp_path / "data")
    assert len(folders(tmp_path / "data")) == 3 and last.meta["sha256"] != first.meta["sha256"]


@pytest.mark.parametrize("damage", ["flipped", "shorter", "gone", "flipped, and counted", "counts"])
def test_a_damaged_token_file_is_made_again(tmp_path, capsys, damage):
    """With a warning; the same as it was."""
    path = write_text(tmp_path / "a.txt", text(10))
    first = data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    (file,) = (tmp_path / "data").glob("*/*.train.bin")
    whole = file.read_bytes()
    if damage == "gone":
        file.unlink()
    elif damage == "counts":
        (file.parent / "00000.json").write_text("{")
    else:
        if "counted" in damage:  # a kill came before what was counted on the way was removed
            (file.parent / "00000.progress").write_text((file.parent / "00000.json").read_text())
        file.write_bytes(whole[:-2] if damage == "shorter" else whole[:1001] + bytes([whole[1001] ^ 1]) + whole[1002:])
    again = data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    assert "damaged; it is made again" in capsys.readouterr().err
    assert file.read_bytes() == whole and again.meta == first.meta


def test_counts_that_a_kill_left_beside_finished_files_go(tmp_path):
    path = write_text(tmp_path / "a.txt", text(10))
    first = data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    (done,) = (tmp_path / "data").glob("*/*.json")
    done.with_suffix(".progress").write_text(done.read_text())
    assert data.prepare(path, BYTES, 64, folder=tmp_path / "data").meta == first.meta
    assert folders(done.parent) == ["00000.json", "00000.train.bin", "00000.val.bin", "lock"]


def lines(folder, name, texts):
    """A file in C4's format."""
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / name, "wt") as f:
        f.write("".join(json.dumps({"text": t, "url": "x"}) + "\n" for t in texts))


def test_a_folder_is_read_file_by_file_and_only_as_far_as_needed(tmp_path):
    """Held-out files first; then others until there are `need` tokens; all of them as one array."""
    texts = text(12)
    for i in range(3):
        lines(tmp_path / "c", f"c4-train.{i}.json.gz", texts[4 * i : 4 * i + 4])
    lines(tmp_path / "c", "c4-validation.0.json.gz", text(2, seed=5))
    join = lambda texts: "".join(t + "\0" for t in texts)
    for need, count in ((1, 1), (len(join(texts[:4])), 1), (len(join(texts[:4])) + 1, 2), (float("inf"), 3)):
        corpus = data.prepare(str(tmp_path / "c"), BYTES, 64, need, tmp_path / "data")
        assert BYTES.decode(corpus.train[:]) == join(texts[: 4 * count])
        assert BYTES.decode(corpus.val[:]) == join(text(2, seed=5))
        assert corpus.meta["documents"] == 4 * count + 2
    assert len(folders(tmp_path / "data")) == 1
    ids = data.batch(corpus.train, 64, 3, 0, 0)
    assert ids.dtype == np.int32 and ids.shape == (3, 65)


def test_where_no_file_is_held_out_documents_are(tmp_path, monkeypatch):
    """5% of a small corpus exactly, at least one; of a large one each with a small hash, whichever others are there."""
    texts = text(60)
    for i in range(2):
        lines(tmp_path / "c", f"{i}.json.gz", texts[30 * i : 30 * i + 30])
    held_out = lambda name: BYTES.decode(data.prepare(str(tmp_path / name), BYTES, 64, folder=tmp_path / "d").val[:])
    assert held_out("c").count("\0") == 3
    monkeypatch.setattr(data, "SMALL", 100)
    monkeypatch.setattr(data, "HELD_OUT", 0.2)
    some = set(held_out("c").split("\0")) - {""}
    assert 3 < len(some) < 30
    (tmp_path / "c" / "1.json.gz").unlink()
    assert set(held_out("c").split("\0")) - {""} == some & set(texts[:30])


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=4), st.data())
def test_joined_files_are_sliced_as_one_array(parts, draw):
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(i)) for i in range(len(parts))]
        for path, part in zip(paths, parts, strict=True):
            np.array(part, np.uint16).tofile(path)
        whole, joined = np.concatenate([np.array(part, np.uint16) for part in parts]), data.Joined(paths, 10)
        start, stop = (draw.draw(st.integers(0, len(whole))) for _ in range(2))
        assert len(joined) == len(whole)
        np.testing.assert_array_equal(joined[start:stop], whole[start:stop])
        np.testing.assert_array_equal(joined[start:], whole[start:])


@pytest.mark.parametrize("damage", ["an id too large", "cut short", "gone"])
def test_a_token_file_that_is_damaged_while_it_is_read_is_said(tmp_path, damage):
    """In its last file, and only where the damage is read."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        np.arange(8, dtype=np.uint16).tofile(path)
    joined = data.Joined(paths, 8)
    if damage == "an id too large":
        np.array([*range(7), 8], np.uint16).tofile(paths[1])
    elif damage == "cut short":
        os.truncate(paths[1], 15)
    else:
        paths[1].unlink()
    np.testing.assert_array_equal(joined[2:8], range(2, 8))
    with pytest.raises(OSError, match=str(paths[1])):
        joined[2:16]


def interrupted(read, after):
    """The same documents; before the one of each number in `after` the process is stopped, once."""

    def documents():
        for i, document in enumerate(read()):
            if i in after:
                after.remove(i)
                raise KeyboardInterrupt
            yield document

    return documents


@pytest.mark.parametrize("damage", [None, "draft", "progress"])
def test_interrupted_anywhere_it_goes_on_and_no_document_is_lost_or_twice(tmp_path, monkeypatch, damage):
    """Token files bitwise those of one go; what was written but not counted is written again."""
    monkeypatch.setattr(data, "CHUNK", 3)
    monkeypatch.setattr(data, "SAVE_SECONDS", 0)
    path = write_text(tmp_path / "a.txt", text(40))
    expected = data.prepare(path, BYTES, 64, folder=tmp_path / "whole")
    (source,) = documents.sources(path)
    stops = [0, 7, 8, 20, 39]
    stopped = source._replace(read=interrupted(source.read, stops))
    monkeypatch.setattr(documents, "sources", lambda corpus: [stopped])
    monkeypatch.setattr(data, "rule", lambda found, rule=data.rule: rule([source]))  # which reads it too
    begun = []
    while stops:
        with pytest.raises(KeyboardInterrupt):
            data.prepare(path, BYTES, 64, folder=tmp_path / "parts")
        (home,) = (tmp_path / "parts").iterdir()
        begun += [json.loads(p.read_text())["documents"] for p in home.glob("*.progress")]
        if damage == "draft" and len(stops) == 2:
            os.truncate(home / "00000.train.bin", 10)
        if damage == "progress" and len(stops) == 2:
            (home / "00000.progress").unlink()
    got = data.prepare(path, BYTES, 64, folder=tmp_path / "parts")
    assert begun == [6, 6, 18, 39] if damage is None else len(begun) >= 3
    assert got.meta == expected.meta
    np.testing.assert_array_equal(got.train[:], expected.train[:])
    assert folders(home) == ["00000.json", "00000.train.bin", "00000.val.bin", "lock"]


def test_a_process_that_is_killed_leaves_what_the_next_one_goes_on_with(tmp_path):
    """`python data.py`, killed at some moments; the last one's files are those of one that was left alone."""
    for i in range(40):
        lines(tmp_path / "c", f"{i:02}.json.gz", text(50, seed=i))
    command = [sys.executable, str(Path(data.__file__)), "../c", "--tokenizer", "bytes"]
    for name in ("killed", "alone"):
        (tmp_path / name).mkdir()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    start = lambda name: subprocess.Popen(command, cwd=tmp_path / name, **pipes)
    for wait in (0.3, 0.5, 0.7, 0.9):
        process = start("killed")
        time.sleep(wait)
        process.kill()
        process.communicate()
    for name in ("killed", "alone"):
        process = start(name)
        said, _ = process.communicate()
        assert process.returncode == 0, said
    hashes = [
        {p.name: data.checksum(p) for p in (tmp_path / name).glob("data/*/*.*")} for name in ("killed", "alone")
    ]
    assert len(hashes[1]) == 120 and hashes[0] == hashes[1]


def test_a_draft_that_a_kill_left_is_written_over(tmp_path):
    """Longer than what is written now; nothing of it is in the file, and nothing is left beside it."""
    (tmp_path / "a.draft").write_bytes(b"x" * 100)
    files.write_file(tmp_path / "a", lambda f: f.write(b"new"))
    assert (tmp_path / "a").read_bytes() == b"new" and folders(tmp_path) == ["a"]


def test_of_two_processes_one_waits_for_the_other(tmp_path):
    """The lock is the kernel's: it goes with its holder."""
    events = []

    def hold(name):
        with data.locked(tmp_path / "lock"):
            events.append(f"{name} in")
            time.sleep(0.1)
            events.append(f"{name} out")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(hold, "ab"))
    assert events in (["a in", "a out", "b in", "b out"], ["b in", "b out", "a in", "a out"])


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "it is empty"),
        (b" \n\n \n", "it is empty"),
        (b"\x89PNG\r\n\x1a\n", "not text: invalid"),
        (b"abc\0def" * 1000, "zero byte"),
        ("é".encode("latin-1") * 100, "not text"),
        (b"one short line\n", "too few"),
    ],
)
def test_bad_text_is_refused_and_leaves_nothing_behind(tmp_path, content, says):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        data.prepare(str(path), BYTES, 6000, folder=tmp_path / "data")
    assert list(tmp_path.iterdir()) == [path]


def test_of_a_large_corpus_finished_shards_stay_when_a_later_file_is_bad(tmp_path):
    lines(tmp_path / "c", "0.json.gz", text(30))
    (tmp_path / "c" / "1.jsonl").write_text("no JSON")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "SMALL", 100)
        with pytest.raises(ValueError, match="line 1 is no JSON object"):
            data.prepare(str(tmp_path / "c"), BYTES, 64, folder=tmp_path / "data")
    assert len(list((tmp_path / "data").glob("*/00000.json"))) == 1


def test_what_was_there_before_outlives_a_flag_that_makes_no_sense(tmp_path):
    path = write_text(tmp_path / "a.txt", text(10))
    data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="too few"):
        data.prepare(path, BYTES, 10**6, folder=tmp_path / "data")
    assert sorted(tmp_path.rglob("*")) == before


def test_files_are_read_until_there_is_a_window_of_validation_too(tmp_path):
    for i in range(40):
        (tmp_path / "c").mkdir(exist_ok=True)
        write_text(tmp_path / "c" / f"{i:02}.txt", text(1, seed=i))
    corpus = data.prepare(str(tmp_path / "c"), BYTES, 64, 10, tmp_path / "data")
    assert len(corpus.val) > 64 and corpus.meta["documents"] < 40


def test_a_lock_that_was_removed_is_none(tmp_path):
    """Who waited for it takes the new one."""
    with data.locked(tmp_path / "d" / "lock"):
        (tmp_path / "d" / "lock").unlink()
        with data.locked(tmp_path / "d" / "lock", wait=False), pytest.raises(BlockingIOError):
            with data.locked(tmp_path / "d" / "lock", wait=False):
                raise AssertionError("two hold it")


REFUSED = [(["a.txt", "--tokens", "0"], "tokens is 0"), (["nowhere"], "is there"), (["a.txt", "--x", "1"], "unknown")]


@pytest.mark.parametrize("words, says", REFUSED)
def test_the_command_refuses_bad_input(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    write_text(Path("a.txt"), text(4))
    assert data.main([*words, "--tokenizer", "bytes"]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and list(tmp_path.iterdir()) == [tmp_path / "a.txt"]


def test_either_side_may_be_too_short():
    meta = {"documents": 2, "train_tokens": 65, "val_tokens": 65}
    data.check("a.txt", meta, 64)
    for side, name in (("train", "training"), ("val", "validation")):
        with pytest.raises(ValueError, match=f"64 {name} tokens in 2 documents are too few"):
            data.check("a.txt", {**meta, f"{side}_tokens": 64}, 64)


def test_text_without_line_breaks_is_cut_into_documents(tmp_path):
    """A file of one long line still has documents to hold out."""
    line = "".join(text(60)).replace("\n", " ")
    corpus = data.prepare(write_text(tmp_path / "a.txt", [line]), BYTES, 64, folder=tmp_path / "data")
    assert corpus.meta["documents"] >= 14
    pieces = [p for side in (corpus.train, corpus.val) for p in BYTES.decode(side[:]).split("\0")[:-1]]
    assert sum(map(len, pieces)) == len(line) and all(p in line for p in pieces)


def test_many_processes_write_what_one_does(tmp_path, monkeypatch):
    """Of a source that is large; a text of bytes needs none."""
    asked, path = [], write_text(tmp_path / "a.txt", text(40))

    @contextmanager
    def encoders(tok, processes):
        with tokenizer.encoders(BYTES, 2) as encoded:
            yield lambda chunks: asked.append(processes) or encoded(chunks)

    monkeypatch.setattr(data, "encoders", encoders)
    data.prepare(path, BYTES._replace(name="other"), 64, folder=tmp_path / "small")
    monkeypatch.setattr(data, "LARGE", 1000)
    one = data.prepare(path, BYTES, 64, folder=tmp_path / "one")
    assert asked == []
    many = data.prepare(path, BYTES._replace(name="other"), 64, folder=tmp_path / "many")
    assert asked == [tokenizer.cores()] and many.meta == one.meta
    np.testing.assert_array_equal(many.train[:], one.train[:])
