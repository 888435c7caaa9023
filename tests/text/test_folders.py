"""Of a folder, what a person would call its text is read, and each file of it once."""

import gzip
import json
from pathlib import Path, PurePath

import pytest
from conftest import SMALL

import data
import train
from runtime import packed
from text import documents, folders


def write(path, content="text"):
    """A file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def names(folder):
    """The names of the sources of a folder, in order."""
    return [source.name for source in documents.sources(str(folder))]


def test_of_a_folder_files_are_read_and_held_out_where_others_are_left(tmp_path):
    """Not folders named like files, nor links to nothing; never are all files held out."""
    (tmp_path / "x.txt").mkdir()
    (tmp_path / "x.txt" / "c4-validation.txt").write_text("one")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    (source,) = documents.sources(str(tmp_path))
    assert list(source.read()) == ["one"] and not source.held_out
    (source,) = documents.sources(str(tmp_path / "x.txt" / "c4-validation.txt"))
    assert not source.held_out
    (tmp_path / "c.txt").write_text("two")
    found = [(source.name, source.held_out) for source in documents.sources(str(tmp_path))]
    assert found == [("c.txt", False), ("x.txt/c4-validation.txt", True)]


def test_files_come_in_the_order_of_their_names(tmp_path):
    for name in ("b.txt", "a/c.txt", "a.txt", "C.TXT", "a-b/x.jsonl"):
        write(tmp_path / name, '{"text": "a"}')
    assert names(tmp_path) == ["C.TXT", "a/c.txt", "a-b/x.jsonl", "a.txt", "b.txt"]


def test_hidden_files_and_packages_of_other_programs_are_not_read(tmp_path, capsys):
    """Nor counted. The folder itself may be hidden."""
    folder = tmp_path / ".cache"
    write(folder / "a.txt")
    for name in (".a.txt", ".git/b.txt", ".ipynb_checkpoints/a.txt", "node_modules/x/c.txt"):
        write(folder / name)
    write(folder / "venv" / "lib" / "site-packages" / "top_level.txt")
    write(folder / "__pycache__" / "a.pyc")
    assert names(folder) == ["a.txt"]
    assert capsys.readouterr().err == ""


def test_what_is_left_out_is_said_once(tmp_path, capsys):
    """How many of which ending; of one that is alone, the name."""
    for name in ("LICENSE.txt", "a.jsonl.zst", "b.jsonl.zst", "c.pdf", "d/README", "d/lock"):
        write(tmp_path / name)
    write(tmp_path / "package.json", '{"name": "x"}')
    write(tmp_path / "d" / "bench.json", '[{"name": "x"}]')
    write(tmp_path / "d" / "broken.json", "{")
    write(tmp_path / "d" / "e.json", '[{"text": "x"}]')
    (tmp_path / "gone.txt").symlink_to("nowhere")
    for _ in range(2):
        assert names(tmp_path) == ["LICENSE.txt", "d/e.json"]
    said = capsys.readouterr().err
    shown = "3 .json, 2 .zst, c.pdf, README, gone.txt"
    assert said == f"data {tmp_path}: left out, as they hold no text known here: {shown}\n"


def test_a_folder_without_text_says_what_it_has(tmp_path):
    for name in "abcdefgh":
        write(tmp_path / f"a.{name}")
    with pytest.raises(ValueError, match="it has a.a, a.b, a.c, a.d, a.e, a.f, ..$"):
        names(tmp_path)


def test_settings_of_other_programs_are_left_out_also_when_they_are_gzipped(tmp_path):
    for name, content in (("meta.json.gz", b'{"name": 1}'), ("b.json.gz", b'{"text": "b"}')):
        (tmp_path / name).write_bytes(gzip.compress(content))
    write(tmp_path / "a.txt")
    assert names(tmp_path) == ["a.txt", "b.json.gz"]


def test_a_json_file_that_is_damaged_behind_its_beginning_is_said(tmp_path):
    write(tmp_path / "a.txt")
    write(tmp_path / "b.json", '{"text": "a"}\n{"text"')
    with pytest.raises(ValueError, match="b.json: line 2"):
        [list(source.read()) for source in documents.sources(str(tmp_path))]


# ---- links ---------------------------------------------------------------------------------------


def test_links_are_followed_and_each_file_is_read_once(tmp_path):
    """By its own name if it is in the folder. Links in a circle end."""
    write(tmp_path / "elsewhere" / "a.txt")
    write(tmp_path / "elsewhere" / "deep" / "b.txt")
    write(tmp_path / "blobs" / "1234")
    folder = tmp_path / "corpus"
    write(folder / "z" / "own.txt")
    links = {
        "first": "../elsewhere",
        "second": "../elsewhere",  # to what the first leads to
        "third.txt": "../elsewhere/a.txt",  # and so does this
        "a.txt": "z/own.txt",
        "z/up": "..",
        "self": "self",
        "blob.txt": "../blobs/1234",
        "blobs": "../blobs",  # where it has no ending
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    assert names(folder) == ["blob.txt", "first/a.txt", "first/deep/b.txt", "z/own.txt"]
    assert len(folders.files_in(folder)) == 5  # these, and what "self" does not lead to
    (tmp_path / "linked").symlink_to("corpus")
    assert names(tmp_path / "linked") == names(folder)


def test_a_link_with_an_ending_to_a_file_without_one_is_read(tmp_path):
    """So Hugging Face's cache keeps its files."""
    write(tmp_path / "blobs" / "1234", "one")
    write(tmp_path / "snapshots" / "1" / "x.md")
    (tmp_path / "snapshots" / "1" / "a.txt").symlink_to("../../blobs/1234")
    assert names(tmp_path) == ["snapshots/1/a.txt"]


# ---- held out ------------------------------------------------------------------------------------

HELD_OUT = """validation.txt valid.txt val.txt test.txt TEST.txt my_val.jsonl TinyStories-valid.txt
c4-validation.00000-of-00008.json.gz validation-00000-of-00001-b42a775f407cee45.parquet
wiki.valid.tokens.txt test.en.txt val_000001.parquet test2017.jsonl hub/validation/0000.parquet
hub/test/0000.parquet test/deep/a.txt data.test/a.txt shard-val-3-of-7.json.gz"""
TRAINED_ON = """cross-validation-lectures.txt latest.txt contest.jsonl validated.txt values.txt
test-driven-development.txt testing.txt interval.txt train/a.txt validity/a.txt Valentine.txt
c4-train.00000-of-01024.json.gz a.parquet 0000.parquet of.txt"""


def test_held_out_is_what_is_named_so_as_a_word():
    for name in HELD_OUT.split():
        assert folders.is_held_out(PurePath(name)), name
    for name in TRAINED_ON.split():
        assert not folders.is_held_out(PurePath(name)), name


def test_both_validation_and_test_are_never_trained_on(tmp_path):
    """As a data set comes from a hub. The folder's own name does not count."""
    hub = tmp_path / "test"
    for split in ("train", "validation", "test"):
        rows = [json.dumps({"text": f"{split} {i}"}) + "\n" for i in range(20)]
        write(hub / split / "0000.jsonl", "".join(rows))
    corpus = data.prepare(str(hub), data.tokenizer("bytes"), 4, folder=tmp_path / "data")
    text = data.tokenizer("bytes").decode(corpus.train[0][:])
    assert text.count("train") == 20 and "validation" not in text and "test" not in text
    assert (corpus.meta["train_files"], corpus.meta["val_files"]) == (1, 2)
    assert (corpus.meta["train_documents"], corpus.meta["val_documents"]) == (20, 40)


# ---- what this project itself writes -------------------------------------------------------------


def test_our_own_output_is_not_read_as_text(here, capsys):
    """A run below a grid's folder, token files, a run that has only begun, compiled programs."""
    flags = ["--method", "muon", "--data", ".", "--steps", "1", "--out", "grid/run"]
    for _ in range(2):
        assert train.main([*SMALL, *flags]) == 0
    write(Path("begun", "lock"), "")
    write(Path("begun", "config.json.draft"), "{")
    write(Path("data", "compiled", "machine", "jit_step-1234-cache"))
    assert list(here.glob("data/*/00000.json")) and list(here.glob("grid/*/log.jsonl"))
    assert names(".") == ["text.txt"]
    assert "left out" not in capsys.readouterr().err


def test_a_model_beside_its_text_is_no_run(tmp_path):
    """Its config.json has other fields."""
    write(tmp_path / "config.json", '{"model_type": "llama"}')
    write(tmp_path / "a.txt")
    assert names(tmp_path) == ["a.txt"]


def test_packed_runs_are_not_read(tmp_path):
    """A line of theirs begins as runtime/packed.py says."""
    assert folders.PACKED_RUN == packed.START
    write(tmp_path / "a.txt")
    write(tmp_path / "b.jsonl", '{"text": "a"}\n')
    packed.add(tmp_path / "c.jsonl", [{"config": {}, "about": {}, "rows": [{"step": 0}]}])
    assert names(tmp_path) == ["a.txt", "b.jsonl"]
