"""Token files hold every document once, on one side; nothing stops their making for good."""

import hashlib
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_text import documents_of, write_c4, write_text

import data
from runtime import files
from runtime.cores import available_cores
from text import documents, formats, groups, token_files
from text.workers import Workers

BYTES = data.tokenizer("bytes")
SHARD = [
    "00000.json",
    "00000.train.bin",
    "00000.val.bin",
    "lock",
]  # the files of one finished shard


def write_txt_file(folder, documents):
    return write_text(folder / "a.txt", documents)


def write_c4_file(folder, documents):
    """In C4's format, of which a chunk is Lines."""
    write_c4(folder / "a.json.gz", documents)
    return str(folder / "a.json.gz")


WRITERS = {"txt": write_txt_file, "c4": write_c4_file}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def decoded(tokens):
    """The documents that an array of ids holds, each of which ends with end-of-text."""
    *found, rest = BYTES.decode(tokens[:]).split("\0")
    assert rest == ""
    return found


# ---- which documents, and where ------------------------------------------------------------------


def test_every_document_is_on_one_side_whole_and_in_order(tmp_path):
    """One that occurs twice is on one side only."""
    texts = documents_of(40)
    texts += texts[:10]
    path = write_text(tmp_path / "a.txt", texts)
    corpus = data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    train, val = decoded(corpus.train[0]), decoded(corpus.val)
    assert sorted(train + val) == sorted(texts)
    assert not set(train) & set(val)
    assert len(set(val)) == 2  # 5% of 40
    assert train == [text for text in texts if text in train]
    meta = corpus.meta
    assert meta["documents"] == 50
    assert (meta["train_documents"], meta["val_documents"]) == (len(train), len(val))
    assert (meta["train_files"], meta["val_files"]) == (1, 0)
    assert (meta["train_tokens"], meta["val_tokens"]) == (len(corpus.train[0]), len(corpus.val))
    assert meta["val_bytes"] == len(corpus.val) - len(val)


def test_where_no_file_is_held_out_documents_are(tmp_path, monkeypatch):
    """5% of a small corpus exactly; of a large one those with small hashes, whatever others do."""
    texts = documents_of(60)
    for i in range(2):
        write_c4(tmp_path / "c" / f"{i}.json.gz", texts[30 * i : 30 * i + 30])

    def held_out():
        corpus = data.prepare(str(tmp_path / "c"), BYTES, 64, folder=tmp_path / "data")
        return decoded(corpus.val)

    assert len(held_out()) == 3
    monkeypatch.setattr(token_files, "SMALL", 100)
    monkeypatch.setattr(token_files, "HELD_OUT", 0.2)
    found = set(held_out())
    assert 3 < len(found) < 30
    (tmp_path / "c" / "1.json.gz").unlink()
    assert set(held_out()) == found & set(texts[:30])


def test_text_without_line_breaks_is_cut_into_documents(tmp_path):
    """A file of one long line still has documents to hold out."""
    line = "".join(documents_of(60)).replace("\n", " ")
    path = write_text(tmp_path / "a.txt", [line])
    corpus = data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    assert corpus.meta["documents"] >= 14
    pieces = decoded(corpus.train[0]) + decoded(corpus.val)
    assert sum(map(len, pieces)) == len(line) and all(piece in line for piece in pieces)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_many_processes_write_what_one_does(tmp_path, monkeypatch, write):
    """They are asked where a source is large, unless its ids are its bytes."""
    path = write(tmp_path, documents_of(40))
    other = BYTES._replace(name="other")
    asked = []

    class BytesWorkers(Workers):
        def map(self, work, chunks):
            asked.append(self.processes)
            with Workers(BYTES, 2) as workers:
                yield from workers.map(work, chunks)

    monkeypatch.setattr(groups, "Workers", BytesWorkers)
    data.prepare(path, other, 64, folder=tmp_path / "small")
    monkeypatch.setattr(token_files, "LARGE", 1000)
    one = data.prepare(path, BYTES, 64, folder=tmp_path / "one")
    assert asked == []
    many = data.prepare(path, other, 64, folder=tmp_path / "many")
    assert asked == 2 * [available_cores()]  # to hash the documents, and to tokenize them
    assert many.meta == one.meta
    np.testing.assert_array_equal(many.train[0][:], one.train[0][:])


# ---- made once, resumed, mended ------------------------------------------------------------------


def test_prepared_once_and_made_again_when_the_text_changes(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    home = tmp_path / "data"
    first = data.prepare(write_text(path, documents_of(10)), BYTES, 64, folder=home)
    for side, ids in (("train", first.train[0]), ("val", first.val)):
        of_shard = hashlib.sha256(ids[:].tobytes()).hexdigest()
        of_side = hashlib.sha256(of_shard.encode()).hexdigest()
        assert first.meta["sha256"][side] == of_side
    with monkeypatch.context() as patch:
        patch.setattr(token_files, "tokenize", None)  # it would fail if it were called
        assert data.prepare(str(path), BYTES, 64, folder=home).meta == first.meta
    longer = data.prepare(write_text(path, documents_of(11)), BYTES, 64, folder=home)
    assert longer.meta["documents"] == 11
    write_text(path, documents_of(11, seed=1))  # as long as before
    os.utime(path, ns=(1, 1))
    assert len(names(home)) == 2
    last = data.prepare(str(path), BYTES, 64, folder=home)
    assert len(names(home)) == 3 and last.meta["sha256"] != longer.meta["sha256"]


def test_a_checksum_is_computed_once_in_a_process_until_the_file_changes(tmp_path, monkeypatch):
    path = write_text(tmp_path / "a.txt", documents_of(10))
    data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    computed = []
    checksum = token_files.checksum_of_version.__wrapped__

    @cache
    def counting(path, size, time):
        computed.append(Path(path).name)
        return checksum(path, size, time)

    monkeypatch.setattr(token_files, "checksum_of_version", counting)
    for _ in range(3):
        data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    assert sorted(computed) == ["00000.train.bin", "00000.val.bin"]
    (file,) = (tmp_path / "data").glob("*/*.train.bin")
    os.utime(file, ns=(1, 1))
    data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    assert computed[2:] == ["00000.train.bin"]


def test_a_file_that_is_now_held_out_is_prepared_again(tmp_path):
    """Though no file has changed: what decides is whether others are left to train on."""
    write_c4(tmp_path / "c" / "test.json.gz", documents_of(30))
    first = data.prepare(str(tmp_path / "c"), BYTES, 64, folder=tmp_path / "data")
    assert len(decoded(first.train[0])) == 28
    with pytest.MonkeyPatch.context() as patch:
        sources = documents.sources(str(tmp_path / "c"))
        patch.setattr(documents, "sources", lambda corpus: [sources[0]._replace(held_out=True)])
        with pytest.raises(ValueError, match="0 training tokens in 30 documents"):
            data.prepare(str(tmp_path / "c"), BYTES, 64, folder=tmp_path / "data")


NAMES = {
    "文" * 80 + ".txt": "文" * 33,
    "é" * 120 + ".txt": "é" * 50,
    "a" * 240 + ".txt": "a" * 100,
    "wiki text.txt": "wiki text",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_long_name_is_cut_in_bytes_between_characters(tmp_path, name):
    path = write_text(tmp_path / name, documents_of(4))
    data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    (home,) = names(tmp_path / "data")
    assert home.rpartition("-bytes-")[0] == NAMES[name]


def test_a_folder_without_a_name_goes_by_its_own(tmp_path, monkeypatch):
    """Such as "." and "..", where "-bytes-" would begin like a flag."""
    write_c4(tmp_path / "books" / "a.json.gz", documents_of(4))
    monkeypatch.chdir(tmp_path / "books")
    for corpus in (".", "../books/", str(tmp_path / "books")):
        assert groups.short_name(corpus) == "books"
    assert groups.short_name("c4") == "c4"


def interrupted(chunks, stops):
    """The same chunks; before each document of `stops`, by number, the process is stopped once."""

    def documents(chunk, first):
        for number, document in enumerate(chunk, first):
            if number in stops:
                stops.remove(number)
                raise KeyboardInterrupt
            yield document

    def interrupted_chunks():
        first = 0
        for chunk in chunks():
            yield documents(chunk, first)
            first += len(list(chunk))

    return interrupted_chunks


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("damage", [None, "files cut short", "counts lost"])
def test_interrupted_anywhere_it_goes_on_and_ends_the_same(tmp_path, monkeypatch, damage, write):
    """Token files are bitwise those of one go; what was written but not counted is rewritten."""
    monkeypatch.setattr(formats, "CHUNK", 3)
    monkeypatch.setattr(formats, "BLOCK", 3 * 4800)  # three documents and a part of another
    monkeypatch.setattr(token_files, "SAVE_SECONDS", 0)
    path = write(tmp_path, documents_of(40))
    expected = data.prepare(path, BYTES, 64, folder=tmp_path / "whole")

    (source,) = documents.sources(path)
    stops = [0, 7, 8, 20, 39]
    stopped = source._replace(chunks=interrupted(source.chunks, stops))
    holdout = token_files.Holdout([source])  # which reads the source too, and is not stopped
    monkeypatch.setattr(documents, "sources", lambda corpus: [stopped])
    monkeypatch.setattr(groups, "Holdout", lambda sources: holdout)
    counted = []
    while stops:
        with pytest.raises(KeyboardInterrupt):
            data.prepare(path, BYTES, 64, folder=tmp_path / "parts")
        (home,) = (tmp_path / "parts").iterdir()
        for record in home.glob("*.progress"):
            counted.append(token_files.count_documents(token_files.read_counts(record)))
        if damage == "files cut short" and len(stops) == 2:
            os.truncate(home / "00000.train.bin", 10)
        if damage == "counts lost" and len(stops) == 2:
            (home / "00000.progress").unlink()
    got = data.prepare(path, BYTES, 64, folder=tmp_path / "parts")
    if damage is None:
        assert counted == [6, 6, 18, 39]
    assert got.meta == expected.meta
    np.testing.assert_array_equal(got.train[0][:], expected.train[0][:])
    np.testing.assert_array_equal(got.val[:], expected.val[:])
    assert names(home) == SHARD


@given(st.lists(st.lists(st.text(max_size=2), max_size=4)), st.integers(0, 20))
def test_chunks_are_skipped_by_documents(chunks, count):
    """Wherever an earlier process ended: it may have cut the source into other chunks."""
    found = token_files.skip(iter(chunks), count)
    assert sum(found, []) == sum(chunks, [])[count:]


DAMAGES = ["flipped", "shorter", "gone", "flipped, and counted", "counts"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_token_file_is_made_again(tmp_path, capsys, damage):
    """With a warning; the same as it was."""
    path = write_text(tmp_path / "a.txt", documents_of(10))
    first = data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    (file,) = (tmp_path / "data").glob("*/*.train.bin")
    whole = file.read_bytes()
    counts = file.parent / "00000.json"
    if damage == "gone":
        file.unlink()
    elif damage == "shorter":
        os.truncate(file, len(whole) - 2)
    elif damage == "counts":
        counts.write_text("{")
    else:
        file.write_bytes(whole[:1001] + bytes([whole[1001] ^ 1]) + whole[1002:])
    if "counted" in damage:  # a kill came before the counts of progress were removed
        counts.with_suffix(".progress").write_text(counts.read_text())
    again = data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    assert "damaged; it is made again" in capsys.readouterr().err
    assert file.read_bytes() == whole and again.meta == first.meta
    assert names(file.parent) == SHARD


def test_progress_that_a_kill_left_beside_a_finished_shard_does_no_harm(tmp_path):
    path = write_text(tmp_path / "a.txt", documents_of(10))
    first = data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    (done,) = (tmp_path / "data").glob("*/*.json")
    done.with_suffix(".progress").write_text(done.read_text())
    assert data.prepare(path, BYTES, 64, folder=tmp_path / "data").meta == first.meta
    (done.parent / "00000.train.bin").unlink()
    assert data.prepare(path, BYTES, 64, folder=tmp_path / "data").meta == first.meta
    assert names(done.parent) == SHARD


def test_counts_with_any_bit_changed_or_cut_short_anywhere_are_none(tmp_path):
    """Or they are those that were written: a changed blank or letter case may mean the same."""
    path = tmp_path / "counts"
    counts = {"documents": 12, "train_tokens": 345, "sha256": {"train": "ab"}}
    token_files.write_counts(path, counts)
    whole = path.read_bytes()
    assert token_files.read_counts(path) == counts
    refused = 0
    for place, byte in enumerate(whole):
        changed = [bytes([byte ^ 1 << bit]) for bit in range(8)]
        damaged = [whole[:place] + other + whole[place + 1 :] for other in changed]
        for content in [whole[:place], *damaged]:
            path.write_bytes(content)
            found = token_files.read_counts(path)
            assert found in (None, counts)
            refused += found is None
    assert refused > 8 * len(whole)
    assert token_files.read_counts(tmp_path / "none") is None


# ---- bad text ------------------------------------------------------------------------------------


BAD = {
    "a picture": (b"\x89PNG\r\n\x1a\n", "not text: invalid"),
    "a zero byte": (b"abc\0def" * 1000, "zero byte"),
    "another encoding": ("é".encode("latin-1") * 100, "not text"),
}
SHORT = {
    "nothing": (b"", "it is empty"),
    "blanks": (b" \n\n \n", "it is empty"),
    "a line": (
        b"one short line\n",
        "too few for a window of context 6000 [+] 1; give a longer text$",
    ),
}


@pytest.mark.parametrize("content, says", BAD.values(), ids=BAD)
def test_bad_text_is_refused_and_leaves_nothing_behind(tmp_path, content, says):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        data.prepare(str(path), BYTES, 6000, folder=tmp_path / "data")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content, says", SHORT.values(), ids=SHORT)
def test_text_that_is_too_short_is_refused_and_its_files_stay(tmp_path, content, says):
    """Another process, for which it is long enough, may read them by now."""
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ValueError, match=says):
            data.prepare(str(path), BYTES, 6000, folder=tmp_path / "data")
        assert len(list((tmp_path / "data").glob("*/00000.json"))) == 1


def test_finished_shards_of_a_large_corpus_stay_when_a_later_file_is_bad(tmp_path, monkeypatch):
    write_c4(tmp_path / "c" / "0.json.gz", documents_of(30))
    (tmp_path / "c" / "1.jsonl").write_text("no JSON")
    monkeypatch.setattr(token_files, "SMALL", 100)
    with pytest.raises(ValueError, match="line 1 is no JSON object"):
        data.prepare(str(tmp_path / "c"), BYTES, 64, folder=tmp_path / "data")
    assert len(list((tmp_path / "data").glob("*/00000.json"))) == 1


def test_what_was_there_before_outlives_a_flag_that_makes_no_sense(tmp_path):
    path = write_text(tmp_path / "a.txt", documents_of(10))
    data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="too few"):
        data.prepare(path, BYTES, 10**6, folder=tmp_path / "data")
    assert sorted(tmp_path.rglob("*")) == before


# ---- reading -------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=4), st.data())
def test_joined_files_are_sliced_as_one_array(contents, draw):
    whole = np.concatenate([np.array(content, np.uint16) for content in contents])
    start, stop = (draw.draw(st.integers(0, len(whole))) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(i)) for i in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            np.array(content, np.uint16).tofile(path)
        joined = token_files.Joined(paths, 10)
        assert len(joined) == len(whole)
        np.testing.assert_array_equal(joined[start:stop], whole[start:stop])
        np.testing.assert_array_equal(joined[start:], whole[start:])


@pytest.mark.parametrize("damage", ["an id too large", "cut short", "gone"])
def test_a_token_file_that_is_damaged_while_it_is_read_is_said(tmp_path, damage):
    """In its last file, and only where the damage is read."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        np.arange(8, dtype=np.uint16).tofile(path)
    joined = token_files.Joined(paths, 8)
    if damage == "an id too large":
        np.array([*range(7), 8], np.uint16).tofile(paths[1])
    elif damage == "cut short":
        os.truncate(paths[1], 15)
    else:
        paths[1].unlink()
    np.testing.assert_array_equal(joined[2:8], range(2, 8))
    with pytest.raises(OSError, match=str(paths[1])):
        joined[2:16]


# ---- what it stands on: runtime/files.py ---------------------------------------------------------


def test_a_draft_that_a_kill_left_is_written_over(tmp_path):
    """Though it is longer than what is written now; nothing is left beside the file."""
    (tmp_path / "a.draft").write_bytes(b"x" * 100)
    files.write_file(tmp_path / "a", lambda file: file.write(b"new"))
    assert (tmp_path / "a").read_bytes() == b"new" and names(tmp_path) == ["a"]


def test_of_two_processes_one_waits_for_the_other(tmp_path):
    events = []

    def hold(name):
        with files.locked(tmp_path / "lock"):
            events.append(f"{name} in")
            time.sleep(0.1)
            events.append(f"{name} out")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(hold, "ab"))
    assert events in (["a in", "a out", "b in", "b out"], ["b in", "b out", "a in", "a out"])


def test_a_lock_that_was_removed_is_none(tmp_path):
    """Who waited for it takes the new one."""
    path = tmp_path / "d" / "lock"
    with files.locked(path):
        path.unlink()
        with files.locked(path, wait=False), pytest.raises(BlockingIOError):
            files.locked(path, wait=False).__enter__()
