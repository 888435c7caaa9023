"""Documents come as they are in their files, in order; what is no such file is said in one line."""

import gzip
import io
import json
import os
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_text import documents_of

from runtime import command
from text import documents

SAMPLE = Path(__file__).resolve().parents[3] / "shared" / "corpus" / "c4-sample"


def read(corpus):
    return [document for source in documents.sources(str(corpus)) for document in source.read()]


def test_stdlib_is_real_text_on_every_machine():
    """Some hundred files, all text, none of them tests or other people's packages."""
    (source,) = documents.sources("stdlib")
    paths = [Path(path) for path, *_ in source.stamp]
    assert len(paths) > 300 and any(p.name == "argparse.py" for p in paths)
    root = next(p for p in paths if p.name == "argparse.py").parent
    folders = {folder for path in paths for folder in path.relative_to(root).parts}
    assert not folders & {"site-packages", "test", "tests"}
    assert sum(map(len, source.read())) > 5_000_000 and not source.held_out


def test_a_python_file_is_one_document_and_a_text_file_is_cut(tmp_path):
    """A text at the next empty line after PIECE characters; a module is held out whole."""
    text_of = "".join(documents_of(5))
    for name, count in (("a.py", 1), ("a.txt", 5)):
        (tmp_path / name).write_text(text_of)
        found = list(documents.text(tmp_path / name))
        assert len(found) == count and "".join(found) == text_of


def test_what_a_build_wrote_is_no_source(tmp_path):
    for name in ("_sysconfigdata_x.py", "a.py", "b.pyc"):
        (tmp_path / name).touch()
    assert [path.name for path in documents.library(tmp_path)] == ["a.py"]


def test_a_python_without_source_is_said(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").touch()  # tests are not read
    with pytest.raises(ValueError, match="no .py files"):
        documents.library(tmp_path)


def test_every_format_gives_the_same_documents(tmp_path):
    """Blank ones are left out. A folder's files come in the order of their names."""
    texts = ["one\ntwo", "é中", " \n ", "a\0b", "\ud800"]
    rows = "".join(json.dumps({"url": "x", "text": t}) + "\n" for t in texts)
    for name in ("b.json.gz", "a.jsonl.gz"):
        with gzip.open(tmp_path / name, "wt") as f:
            f.write(rows)
    (tmp_path / "c.jsonl").write_text(rows + "\n")
    valid = [t.encode("utf-8", "replace").decode() for t in texts]
    pyarrow.parquet.write_table(
        pyarrow.table({"n": [1] * 5, "text": valid}), tmp_path / "d.parquet"
    )
    (tmp_path / "notes.md").write_text("not one of them")
    expected = ["one\ntwo", "é中", "a b", "?"]
    for name in ("b.json.gz", "a.jsonl.gz", "c.jsonl", "d.parquet"):
        assert read(tmp_path / name) == expected
    assert [s.name for s in documents.sources(str(tmp_path))] == [
        "a.jsonl.gz",
        "b.json.gz",
        "c.jsonl",
        "d.parquet",
    ]
    assert read(tmp_path) == 4 * expected


def test_a_files_stamp_changes_with_it(tmp_path):
    """Also where it is as long as before."""
    (tmp_path / "a.txt").write_text("one")
    stamps = [documents.sources(str(tmp_path / "a.txt"))[0].stamp]
    for text_of, time in (("two", 1), ("three", 1)):
        (tmp_path / "a.txt").write_text(text_of)
        os.utime(tmp_path / "a.txt", ns=(time, time))
        stamps.append(documents.sources(str(tmp_path / "a.txt"))[0].stamp)
    assert len({str(stamp) for stamp in stamps}) == 3


@pytest.mark.skipif(not SAMPLE.exists(), reason="no sample of C4 beside the repository")
def test_documents_of_c4():
    """Files as C4 is distributed: 1,320 documents, the validation file held out."""
    assert len(read(SAMPLE)) == 1320
    assert [s.held_out for s in documents.sources(str(SAMPLE))] == [False, False, True]


@given(st.lists(st.binary(max_size=5)), st.integers(1, 8))
def test_lines_are_those_of_the_file_wherever_its_blocks_end(parts, size):
    content = b"\n".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "BLOCK", size)
        assert list(documents.lines(io.BytesIO(content))) == content.split(b"\n")


GZIP = gzip.compress(b'{"text": "a"}\n' * 1000)
BAD = {
    "cut short": ("a.json.gz", GZIP[:-20], "damaged after line .*end-of-stream"),
    "flipped": ("a.json.gz", GZIP[:-6] + b"\xff" + GZIP[-5:], "damaged after line"),
    "not gzipped": ("a.json.gz", b'{"text": "a"}\n', "damaged after line 0"),
    "other bytes": ("a.jsonl", b'{"text": "\xff"}\n', "line 1 is no JSON object"),
    "no JSON": ("a.jsonl", b'{"text": "a"}\n{"text"\n', "line 2 is no JSON object"),
    "a number": ("a.jsonl", b'{"text": 3}\n', "line 1 is no JSON object"),
    "null": ("a.jsonl", b'{"text": null}\n', "line 1 is no JSON object"),
    "a list": ("a.jsonl", b"[1]\n", "line 1 is no JSON object"),
    "no text": ("a.jsonl", b'{"content": "a"}\n', "line 1 is no JSON object"),
    "too deep": ("a.jsonl", b"[" * 100_000 + b"\n", "line 1 is no JSON object"),
    "no Parquet": ("a.parquet", b"PAR1", "no Parquet file"),
    "empty Parquet": ("a.parquet", b"", "no Parquet file"),
    "zero byte": ("a.txt", b"a\0b", "zero byte"),
    "no UTF-8": ("a.txt", b"\xff\xfe", "not text"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_such_file_is_said(tmp_path, case):
    name, content, says = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=says) as error:
        read(tmp_path / name)
    assert "\n" not in str(error.value) and str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize("columns", [{"body": ["a"]}, {"text": [3]}])
def test_a_table_without_texts_is_said(tmp_path, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    says = 'no Parquet file with a column "text" of strings'
    with pytest.raises(ValueError, match=says) as error:
        read(tmp_path / "a.parquet")
    assert "\n" not in str(error.value)


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


def test_blank_pieces_are_no_documents(tmp_path):
    (tmp_path / "a.txt").write_text("\n" * 50_000 + "word")
    assert [d.strip() for d in read(tmp_path / "a.txt")] == ["word"]


def test_names_of_nothing_are_refused(tmp_path):
    (tmp_path / "a.pdf").touch()
    (tmp_path / "empty").mkdir()
    missing = ["no/such.txt", "", "x" * 5000]
    unreadable = [tmp_path / "a.pdf", tmp_path / "empty"]
    for names, says in ((missing, "that is there"), (unreadable, "end in .txt")):
        for name in names:
            with pytest.raises(ValueError, match=says):
                documents.sources(str(name))


# ---- C4 over a network ---------------------------------------------------------------------------


class Hub:
    """In place of Hugging Face: every file has ten documents.

    The next attempts fail as `failures` says, each (documents that come before, error).
    """

    def __init__(self, failures):
        self.failures = failures
        self.attempts = 0

    def load_dataset(self, path, data_files, split, streaming):
        assert (path, split, streaming) == ("allenai/c4", "train", True)
        self.attempts += 1
        stop, error = self.failures.pop(0) if self.failures else (10, None)
        for i in range(stop):
            yield {"text": f"{data_files['train']} {i}"}
        if error:
            raise error


@pytest.fixture
def pauses(monkeypatch):
    """How long was waited."""
    found = []
    monkeypatch.setattr(documents.time, "sleep", found.append)
    return found


def test_c4_is_streamed_and_goes_on_after_failures(monkeypatch, pauses, capsys):
    """No document is lost or comes twice. Pauses grow while nothing comes, and begin anew then."""
    refused, forbidden = (0, ConnectionError("refused")), (0, OSError("403"))
    cut, limited = (4, EOFError()), (4, TimeoutError("429\nmore"))
    hub = Hub([refused, forbidden, cut, limited])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    validation, first, *others = documents.sources("c4")
    assert validation.held_out and not first.held_out and len(others) == 1023
    assert list(first.read()) == [f"en/c4-train.00000-of-01024.json.gz {i}" for i in range(10)]
    assert pauses == [1, 2, 1, 2] and hub.attempts == 5
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "data c4: refused; trying again in 1 s"
    assert said[3] == "data c4: 429; trying again in 2 s"


def test_c4_gives_up_in_the_end(monkeypatch, pauses):
    hub = Hub([(0, ConnectionError("no route"))] * 99)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(OSError, match="data c4: no route .attempt 11, the last"):
        next(documents.sources("c4")[0].read())
    assert pauses == list(documents.PAUSES)


@pytest.mark.parametrize("error", [command.Stop(2), TypeError()])
def test_neither_a_signal_nor_a_mistake_is_a_failure_of_the_network(pauses, error):
    def read():
        raise error
        yield

    with pytest.raises(type(error)):
        list(documents.patient(read))
    assert pauses == []
