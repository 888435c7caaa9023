"""What a run reads is a function of its seed and its step, and validation stays unseen."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import AS_A_USER
from hypothesis import given
from hypothesis import strategies as st
from sample_text import documents_of, write_c4, write_text

import data
from text import encoding, formats, token_files

BYTES = data.tokenizer("bytes")


def test_the_example_in_the_header_of_data_py():
    """Two documents, their ids, and two windows that share one id."""
    ids = [[*BYTES.encode(document), BYTES.end_of_text] for document in ("a cat", "a dog")]
    tokens = np.concatenate(ids)
    assert tokens.tolist() == [97, 32, 99, 97, 116, 0, 97, 32, 100, 111, 103, 0]
    assert data.windows(tokens, 4) == 2
    rows = data.batch([tokens], 4, 2, seed=0, index=0).tolist()
    assert sorted(rows) == [[97, 32, 99, 97, 116], [116, 0, 97, 32, 100]]


@given(
    n=st.integers(12, 200),
    context=st.integers(2, 8),
    size=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_an_epoch_reads_every_window_once_and_the_next_in_another_order(n, context, size, seed):
    """What an epoch predicts is every id but the first, once, up to the last window's end.

    Behind that there are fewer ids than a window predicts.
    """
    tokens = np.arange(n, dtype=np.uint16)
    windows = data.windows(tokens, context)
    assert 0 <= n - 1 - windows * context < context
    batches = -(-2 * windows // size)
    rows = np.concatenate([data.batch([tokens], context, size, seed, i) for i in range(batches)])
    assert rows.shape == (batches * size, context + 1)
    assert (np.diff(rows) == 1).all()
    first, second = rows[:windows], rows[windows : 2 * windows]
    for epoch in (first, second):
        assert sorted(epoch[:, 1:].ravel()) == list(range(1, windows * context + 1))
    if windows > 8:
        assert (first[:, 0] != second[:, 0]).any()


def test_batches_are_a_function_of_seed_and_index():
    """In whatever order they are asked for; two small ones are a large one."""
    tokens = np.arange(10_000, dtype=np.uint16)

    def batch(seed, index):
        return data.batch([tokens], 16, 4, seed, index)

    late = batch(1, 1000)
    for index in range(3):
        batch(2, index)
    np.testing.assert_array_equal(batch(1, 1000), late)
    assert late.dtype == np.int32
    assert (batch(1, 0) != batch(2, 0)).any()
    two = np.concatenate([batch(1, 0), batch(1, 1)])
    np.testing.assert_array_equal(two, data.batch([tokens], 16, 8, 1, 0))


def test_validation_documents_never_appear_in_training_batches(tmp_path):
    """No word of a held-out document, all of which differ, is in any window of a whole epoch."""
    path = write_text(tmp_path / "a.txt", documents_of(30))
    corpus = data.prepare(path, BYTES, 64, folder=tmp_path / "data")
    epoch = data.batch(corpus.train, 64, data.windows(corpus.train[0], 64), seed=0, index=0)
    seen = "".join(BYTES.decode(row) for row in epoch)
    held_out = BYTES.decode(corpus.val[:]).replace("\0", " ").split()
    assert len(held_out) >= 65 * 8
    assert [word for word in held_out if word in seen] == []


# ---- the command ---------------------------------------------------------------------------------


REFUSED = {
    "no tokens": (["a.txt", "--tokens", "0"], "tokens is 0"),
    "no such file": (["nowhere"], "is there"),
    "an unknown flag": (["a.txt", "--x", "1"], "unknown"),
    "no file": (["--tokens", "1"], "the corpus comes first"),
    "no name": ([""], "data is ''"),
}


@pytest.mark.parametrize("words, says", REFUSED.values(), ids=REFUSED)
def test_the_command_refuses_bad_input(tmp_path, monkeypatch, capsys, words, says):
    """One line, status 2, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    write_text(Path("a.txt"), documents_of(4))
    assert data.main([*words, "--tokenizer", "bytes"]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_the_command_refuses_a_short_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a")
    assert data.main(["a.txt", "--tokenizer", "bytes"]) == 2
    said = capsys.readouterr().err
    assert (
        said.endswith("a window of context 1 + 1; give a longer text\n") and said.count("\n") == 1
    )


STOPS = {OSError("disk gone"): (1, "disk gone"), KeyboardInterrupt(): (130, "goes on from here")}


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: type(stop).__name__)
def test_the_command_says_in_one_line_what_stopped_it(tmp_path, monkeypatch, capsys, stop):
    def fail(*args):
        raise stop

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(token_files, "tokenize", fail)
    status, says = STOPS[stop]
    path = write_text(tmp_path / "a.txt", documents_of(4))
    assert data.main([path, "--tokenizer", "bytes"]) == status
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


HEBREW = "".join(f"שלום {number}\n" for number in range(3000))
ASCII_ONLY = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("name", ["a.txt", "é中.txt", "a.jsonl"])
def test_text_is_utf_8_whatever_the_shell_says(tmp_path, name):
    """In the text and in its name; in a locale that knows ASCII alone too."""
    content = HEBREW
    if name == "a.jsonl":
        rows = [{"text": line} for line in HEBREW.splitlines()]
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / name).write_text(content, encoding="utf-8")
    command = [sys.executable, data.__file__, name, "--tokenizer", "bytes"]
    environment = AS_A_USER | ASCII_ONLY
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (home,) = (tmp_path / "data").iterdir()
    assert home.name.startswith(Path(name).stem + "-bytes-")
    ids = np.concatenate([np.fromfile(path, np.uint16) for path in home.glob("*.bin")])
    assert sorted(BYTES.decode(ids).replace("\0", "\n").split()) == sorted(HEBREW.split())


def test_a_corpus_is_described_by_files_documents_and_tokens_of_each_side():
    meta = {
        "train_files": 1200,
        "train_documents": 1,
        "train_tokens": 3_000_000,
        "val_files": 1,
        "val_documents": 2,
        "val_tokens": 17,
        "later_files": 0,
    }
    train = "to train on: 1,200 files, 1 document, 3,000,000 tokens"
    assert data.describe(meta) == f"{train}; held out: 1 file, 2 documents, 17 tokens"
    meta["val_files"] = 0
    assert data.describe(meta) == f"{train}; held out: 2 documents of the same files, 17 tokens"
    meta["later_files"] = 1
    later = "(and 1 file, tokenized when needed)"
    assert data.describe(meta).startswith(f"{train} {later}; held out")


def test_ctrl_c_that_a_library_catches_ends_it_at_the_next_documents(tmp_path, monkeypatch, capsys):
    """What was read until then is kept."""
    original, calls = encoding.hash_of, []

    def hash_of(text):
        calls.append(text)
        if len(calls) == 12 + 3:  # the first pass over the text only chooses what is held out
            with contextlib.suppress(BaseException):
                os.kill(os.getpid(), signal.SIGINT)
        return original(text)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(encoding, "hash_of", hash_of)
    monkeypatch.setattr(formats, "CHUNK", 4)
    path = write_text(tmp_path / "a.txt", documents_of(12))
    assert data.main([path, "--tokenizer", "bytes"]) == 130
    assert len(calls) == 12 + 4
    assert "stopped; the same command goes on from here" in capsys.readouterr().err


def test_a_process_that_is_killed_leaves_what_the_next_one_goes_on_with(tmp_path):
    """Killed at several moments, it ends with the files of one that was left alone."""
    for number in range(40):
        write_c4(tmp_path / "c" / f"{number:02}.json.gz", documents_of(50, seed=number))

    def start(name):
        (tmp_path / name).mkdir(exist_ok=True)
        command = [sys.executable, data.__file__, "../c", "--tokenizer", "bytes"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=tmp_path / name, **pipes)

    def hashes(name):
        paths = (tmp_path / name).glob("data/*/*.*")
        return {path.name: token_files.checksum(path) for path in paths}

    for seconds in (0.3, 0.5, 0.7, 0.9):
        process = start("killed")
        time.sleep(seconds)
        process.kill()
        process.communicate()
    for name in ("killed", "alone"):
        process = start(name)
        said, _ = process.communicate()
        assert process.returncode == 0, said
    assert len(hashes("alone")) == 120
    assert hashes("killed") == hashes("alone")
