"""What a run reads is a function of its seed and its step, and validation stays unseen."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import data

BYTES = data.tokenizer("bytes")


def write_text(path, documents):
    path.write_text("".join(documents))
    return str(path)


def text(n, seed=0):
    """n documents of a bit more than 4096 characters, no two lines alike, each ending with an empty line."""
    rng = np.random.default_rng(seed)
    line = lambda: " ".join(f"{w:08x}" for w in rng.integers(0, 2**32, 8)) + "\n"
    return ["".join(line() for _ in range(65)) + "\n" for _ in range(n)]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_bytes_decode_what_they_encode(s):
    ids = BYTES.encode(s)
    assert BYTES.decode(ids) == s and ids.dtype == np.uint16
    assert BYTES.end_of_text not in ids


def test_every_document_is_on_one_side_whole_and_in_order(tmp_path):
    """The two files hold all documents, each followed by end-of-text; one that occurs twice is on one side only."""
    docs = text(40)
    docs += docs[:10]
    corpus = data.prepare(write_text(tmp_path / "a.txt", docs), BYTES, 64, tmp_path / "data")
    sides = [BYTES.decode(side).split("\0")[:-1] for side in (corpus.train, corpus.val)]
    assert sorted(sides[0] + sides[1]) == sorted(docs)
    assert not set(sides[0]) & set(sides[1])
    assert len(set(sides[1])) == 2  # 5% of 40
    assert sides[0] == [d for d in docs if d in sides[0]]
    meta = corpus.meta
    assert (meta["train_tokens"], meta["val_tokens"]) == (len(corpus.train), len(corpus.val))
    assert meta["val_bytes"] == len(corpus.val) - len(sides[1]) and meta["documents"] == 40


def test_validation_documents_never_appear_in_training_batches(tmp_path):
    """No line of a held-out document is in any window of a whole epoch."""
    corpus = data.prepare(write_text(tmp_path / "a.txt", text(30)), BYTES, 64, tmp_path / "data")
    n = data.windows(corpus.train, 64)
    seen = "".join(BYTES.decode(data.batch(corpus.train, 64, 1, 0, i)[0]) for i in range(n))
    for piece in BYTES.decode(corpus.val).replace("\0", " ").split():
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


def test_prepared_once_and_made_again_when_the_text_changes(tmp_path):
    path = tmp_path / "a.txt"
    first = data.prepare(write_text(path, text(10)), BYTES, 64, tmp_path / "data").meta
    (home,) = (tmp_path / "data").iterdir()
    marked = {**first, "documents": 77}
    (home / "meta.json").write_text(json.dumps(marked))
    assert data.prepare(str(path), BYTES, 64, tmp_path / "data").meta == marked  # read, not made again
    assert data.prepare(write_text(path, text(11)), BYTES, 64, tmp_path / "data").meta["documents"] == 11
    write_text(path, text(11, seed=1))  # as long as before
    os.utime(path, ns=(1, 1))
    assert len(list((tmp_path / "data").iterdir())) == 2
    last = data.prepare(str(path), BYTES, 64, tmp_path / "data")
    assert len(list((tmp_path / "data").iterdir())) == 3
    for side, ids in (("train", last.train), ("val", last.val)):
        assert last.meta["sha256"][side] == hashlib.sha256(ids.tobytes()).hexdigest()


def test_stdlib_is_real_text_on_every_machine():
    """Some hundred files, all text, none of them tests or other people's packages."""
    paths = data.files("stdlib")
    assert len(paths) > 300 and any(p.name == "argparse.py" for p in paths)
    root = next(p for p in paths if p.name == "argparse.py").parent
    assert not any({"site-packages", "test", "tests"} & set(p.relative_to(root).parts) for p in paths)
    total = sum(len(document) for document in data.documents(paths))
    assert total > 5_000_000


def test_a_python_file_is_one_document_and_a_text_file_is_cut(tmp_path):
    """A module is held out whole or not at all; a text at the next empty line after DOCUMENT characters."""
    text_of = "".join(text(5))
    for name, count in (("a.py", 1), ("a.txt", 5)):
        (tmp_path / name).write_text(text_of)
        found = list(data.documents([tmp_path / name]))
        assert len(found) == count and "".join(found) == text_of


def test_what_a_build_wrote_is_no_source(tmp_path):
    for name in ("_sysconfigdata_x.py", "a.py", "b.pyc"):
        (tmp_path / name).touch()
    assert [path.name for path in data.library(tmp_path)] == ["a.py"]


def test_a_python_without_source_is_said(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").touch()  # tests are not read
    with pytest.raises(ValueError, match="no .py files"):
        data.library(tmp_path)


def test_two_processes_that_prepare_the_same_corpus(tmp_path, monkeypatch):
    """The slower one finds the folder there, reads it and leaves no draft; an error of another kind is raised."""
    path, replace = write_text(tmp_path / "a.txt", text(10)), os.replace

    def beaten(draft, home):
        shutil.copytree(draft, home)
        replace(draft, home)  # fails, as home is not empty

    monkeypatch.setattr(os, "replace", beaten)
    corpus = data.prepare(path, BYTES, 64, tmp_path / "data")
    assert corpus.meta["documents"] == 10 and len(list((tmp_path / "data").iterdir())) == 1

    def broken(draft, home):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        data.prepare(path, BYTES, 65, tmp_path / "other")
    assert not (tmp_path / "other").exists()


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
        data.prepare(str(path), BYTES, 6000, tmp_path / "data")
    assert list(tmp_path.iterdir()) == [path]


def test_either_side_may_be_too_short():
    meta = {"documents": 2, "train_tokens": 65, "val_tokens": 65}
    data.check("a.txt", meta, 64)
    for side, name in (("train", "training"), ("val", "validation")):
        with pytest.raises(ValueError, match=f"64 {name} tokens in 2 documents are too few"):
            data.check("a.txt", {**meta, f"{side}_tokens": 64}, 64)


@pytest.mark.parametrize(
    "name, says", [("no/such.txt", "no such file"), ("a.pdf", "valid: stdlib"), ("", "valid: stdlib"), ("c4", "c4")]
)
def test_bad_names_are_refused(name, says):
    with pytest.raises(ValueError, match=says):
        data.files(name)


def test_text_without_line_breaks_is_cut_into_documents(tmp_path):
    """A file of one long line still has documents to hold out."""
    line = "".join(text(60)).replace("\n", " ")
    corpus = data.prepare(write_text(tmp_path / "a.txt", [line]), BYTES, 64, tmp_path / "data")
    assert corpus.meta["documents"] >= 14
    pieces = [p for side in (corpus.train, corpus.val) for p in BYTES.decode(side).split("\0")[:-1]]
    assert sum(map(len, pieces)) == len(line) and all(p in line for p in pieces)


@pytest.mark.parametrize("bad", [("gpt2", 0), ("words", 0), ("bytes", 300)])
def test_bad_tokenizers_are_refused(bad):
    with pytest.raises(ValueError, match="bytes"):
        data.tokenizer(*bad)
