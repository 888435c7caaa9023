"""A run reads a text of many files: it starts with the first, and comes to the same end always."""

import json
import os
import signal
from pathlib import Path

import pytest
from conftest import assert_same, everything, rows, run, without_time

import data
from text import groups

CONTEXT = 16  # of the model in conftest.py


def write_file(name, documents, seed):
    """A file in C4's format, of documents of about 60 bytes."""
    lines = []
    for i in range(documents):
        text = f"{seed} {i} {i * i * seed} the cat sat on mat {i % 7}\n" * 2
        lines.append(json.dumps({"text": text, "url": "x"}) + "\n")
    Path("c", name).write_text("".join(lines))


@pytest.fixture
def eight_files(here, monkeypatch):
    """A folder of eight files in C4's format, each a group, and one that is held out."""
    monkeypatch.setattr(groups, "GROUP", 1)
    Path("c").mkdir()
    for number in range(8):
        write_file(f"c4-train.{number}.jsonl", 12 + number % 3, number + 1)
    write_file("c4-validation.0.jsonl", 30, 99)


def train_on_files(out, steps, *flags):
    line = ["--data", "./c", "--method", "gn", "--schedule", "constant+inner cosine"]
    return run(*line, "--out", out, "--steps", str(steps), *flags)


def tokenized():
    """The numbers of the shards that are made: 0 is that of validation."""
    return sorted(int(path.stem) for path in Path("data").glob("c-*/*.json"))


def test_training_starts_when_the_first_file_is_tokenized(eight_files, monkeypatch):
    """And no file is tokenized that is not read: a step reads 384 tokens, a file 680 or more."""
    original, seen = data.batch, []

    def batch(*place):
        seen.append(tokenized())
        return original(*place)

    monkeypatch.setattr(data, "batch", batch)
    assert train_on_files("r", 3) == 0
    assert seen[0] == [0, 1]
    last_read = max(int(group) for group in json.loads(Path("r/text.json").read_text()))
    assert last_read == 1
    assert tokenized() in ([0, 1, 2], [0, 1, 2, 3])  # the next may have been finished


def test_a_lengthened_run_is_that_of_one_go(eight_files):
    """Ten steps and ten more; the text is read more than once."""
    assert train_on_files("whole", 20) == 0
    assert len(json.loads(Path("whole/text.json").read_text())) == 8
    for path in Path("data").glob("c-*/*"):
        path.unlink()
    for steps in (10, 20):
        assert train_on_files("r", steps) == 0
    assert_same(everything("r"), everything("whole"))
    assert without_time(rows("r")) == without_time(rows("whole"))
    assert Path("r/text.json").read_text() == Path("whole/text.json").read_text()


def test_runs_of_any_length_batch_and_method_read_the_same_text(eight_files, monkeypatch):
    """Batch i of one is batch i of all, as far as the shorter goes; all start from one θ_0."""
    original, read = data.batch, {}

    def batch(*place):
        found = original(*place)
        read.setdefault(place[-1], []).append(found)
        return found

    monkeypatch.setattr(data, "batch", batch)
    starts = []
    assert train_on_files("r0", 4) == 0
    assert train_on_files("r1", 6) == 0
    assert train_on_files("r2", 3, "--batch", "128") == 0
    assert run("--data", "./c", "--method", "muon", "--steps", "5", "--out", "r3") == 0
    for number in range(4):
        starts.append(rows(f"r{number}")[0]["val_loss"])
    assert len(set(starts)) == 1
    assert len(read[4]) == 4  # runs
    for batches in read.values():
        for other in batches[1:]:
            assert_same(batches[0], other)


def test_a_later_file_that_has_changed_is_said(eight_files, capsys):
    """The first file, by which the run is known, has not."""
    assert train_on_files("r", 8) == 0
    assert "2" in json.loads(Path("r/text.json").read_text())
    before = everything("r")
    write_file("c4-train.2.jsonl", 13, 77)
    assert train_on_files("r", 9) == 2
    said = capsys.readouterr().err
    assert "train.py: r: part 2 of the text is not what it was when this run read it" in said
    assert_same(everything("r"), before)


def test_damaged_hashes_of_the_text_are_one_line(eight_files, capsys):
    assert train_on_files("r", 3) == 0
    for damaged in ('{"0": "ab', "[1]"):
        Path("r/text.json").write_text(damaged)
        before = everything("r")
        capsys.readouterr()
        assert train_on_files("r", 4) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("train.py: r/text.json cannot be read: ")
        assert_same(everything("r"), before)


def test_a_bad_file_in_the_middle_of_a_run_is_said_and_the_run_goes_on_when_it_is_mended(
    eight_files, capsys
):
    Path("c/c4-train.2.jsonl").write_text("no JSON\n")
    assert train_on_files("r", 12) == 2
    said = capsys.readouterr().err
    assert "c4-train.2.jsonl: line 1 is no JSON object" in said and said.count("\n") == 1
    write_file("c4-train.2.jsonl", 14, 3)
    assert train_on_files("r", 12) == 0
    assert train_on_files("whole", 12) == 0
    assert_same(everything("r"), everything("whole"))


def test_ctrl_c_is_heard_while_a_run_waits_for_text(eight_files, capsys, monkeypatch):
    """The maker may wait for a network for many minutes."""
    original = groups.Text.wait_for

    def wait_for(text, group):
        os.kill(os.getpid(), signal.SIGINT)
        while not text.closed:
            groups.time.sleep(0.1)
        original(text, group)

    with monkeypatch.context() as patch:
        patch.setattr(groups.Text, "wait_for", wait_for)
        assert train_on_files("r", 12) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    assert train_on_files("r", 12) == 0
    assert train_on_files("whole", 12) == 0
    assert_same(everything("r"), everything("whole"))
