"""Documents come as they are in their files, in order; what is no such file is said in one line."""

import gzip
import io
import json
import pickle
import threading

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_text import documents_of

from text import documents, formats

BOM = b"\xef\xbb\xbf"


def read(path):
    (source,) = documents.sources(str(path))
    return list(source.read())


def packed(name, content):
    """The content of a file of this name."""
    return gzip.compress(content) if name.endswith(".gz") else content


def test_a_python_file_is_one_document_and_a_text_file_is_cut(tmp_path):
    """A text at the next empty line after PIECE characters; a module is held out whole."""
    text_of = "".join(documents_of(5))
    for name, count in (("a.py", 1), ("a.txt", 5)):
        (tmp_path / name).write_text(text_of)
        found = list(formats.documents(formats.plain_text(tmp_path / name)))
        assert len(found) == count and "".join(found) == text_of


def test_every_format_gives_the_same_documents(tmp_path):
    """Blank ones are left out."""
    texts = ["one\ntwo", "é中", " \n ", "a\0b", "\ud800"]
    rows = [{"url": "x", "text": text} for text in texts]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    array = json.dumps(rows, indent=1)
    for name in ("a.json.gz", "a.jsonl.gz", "a.jsonl", "a.json"):
        (tmp_path / name).write_bytes(packed(name, lines.encode()))
    for name in ("b.json", "b.JSON.gz"):
        (tmp_path / name).write_bytes(packed(name, array.encode()))
    (tmp_path / "c.json").write_text("\n" + json.dumps(rows))
    valid = [t.encode("utf-8", "replace").decode() for t in texts]
    pyarrow.parquet.write_table(
        pyarrow.table({"n": [1] * 5, "text": valid}), tmp_path / "d.parquet"
    )
    expected = ["one\ntwo", "é中", "a b", "?"]
    for path in tmp_path.iterdir():
        assert read(path) == expected, path


def test_a_json_file_may_be_one_object(tmp_path):
    """On one line or on several; of nothing, it has no documents."""
    for indent in (None, 1):
        (tmp_path / "a.json").write_text(json.dumps({"text": "one"}, indent=indent))
        assert read(tmp_path / "a.json") == ["one"]
    (tmp_path / "a.json").write_text("\n")
    assert read(tmp_path / "a.json") == []


MARKED = {
    "a.txt": b"one",
    "a.txt.gz": b"one",
    "a.jsonl": b'{"text": "one"}\n',
    "a.jsonl.gz": b'{"text": "one"}\n',
    "a.json": b'{"text": "one"}\n',
    "b.json": b'[{"text":\n"one"}]',
    "a.json.gz": b'{"text": "one"}\n',
}


@pytest.mark.parametrize("name", MARKED)
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    """With one or without, the documents are the same; one alone is no document."""
    for content, expected in ((MARKED[name], ["one"]), (b"", [])):
        for mark in (b"", BOM):
            (tmp_path / name).write_bytes(packed(name, mark + content))
            assert read(tmp_path / name) == expected


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("name", MARKED)
def test_a_file_in_utf_16_is_said_to_be_that(tmp_path, name, encoding):
    content = ("\ufeff" + MARKED[name].decode()).encode(encoding)
    (tmp_path / name).write_bytes(packed(name, content))
    with pytest.raises(ValueError, match="it begins as UTF-16 or UTF-32 does"):
        read(tmp_path / name)


def test_line_ends_of_every_system_are_one(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert read(tmp_path / "a.txt") == ["one\ntwo\nthree\n"]


@given(st.lists(st.binary(max_size=5)), st.integers(1, 8))
def test_blocks_of_lines_are_the_file_and_end_where_lines_end(lines, size):
    """Each has a line that ends behind byte `size`, or it is the last."""
    content = b"\n".join(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "BLOCK", size)
        found = list(formats.blocks_of_lines(io.BytesIO(content)))
    assert b"\n".join(found) == content
    longest = max(map(len, content.split(b"\n")))
    assert all(len(block) < size + longest for block in found)


@pytest.mark.parametrize("size", [1, 20, 100, 2**18])
def test_lines_give_their_documents_in_another_process_too(tmp_path, monkeypatch, size):
    """Wherever blocks end, and the number of a bad line is that in the file."""
    monkeypatch.setattr(formats, "BLOCK", size)
    texts = [f"text {i}" for i in range(30)]
    rows = [json.dumps({"text": text}) + "\n" * (i % 3 + 1) for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    chunks = [pickle.loads(pickle.dumps(chunk)) for chunk in formats.objects(tmp_path / "a.jsonl")]
    assert list(formats.documents(chunks)) == texts
    assert (len(chunks) > 5) == (size < 2**18)
    (tmp_path / "a.jsonl").write_text("".join([*rows, "3"]))
    *chunks, last = formats.objects(tmp_path / "a.jsonl")
    assert list(formats.documents(chunks)) == (texts if chunks else [])
    with pytest.raises(ValueError, match="line 61 is no JSON object"):
        list(last)


GZIP = gzip.compress(b'{"text": "a"}\n' * 1000)
BAD = {
    "cut short": ("a.json.gz", GZIP[:-20], "damaged after line .*end-of-stream"),
    "flipped": ("a.json.gz", GZIP[:-6] + b"\xff" + GZIP[-5:], "damaged after line"),
    "not gzipped": ("a.json.gz", b'{"text": "a"}\n', "damaged after line 0"),
    "other bytes": ("a.jsonl", b'{"text": "\xff"}\n', "line 1 is no JSON object: 'utf-8'"),
    "no JSON": ("a.jsonl", b'{"text": "a"}\n{"text"\n', "line 2 is no JSON object: "),
    "a number": ("a.jsonl", b'{"text": 3}\n', "line 1 is no JSON object"),
    "null": ("a.jsonl", b'{"text": null}\n', "line 1 is no JSON object"),
    "a list": ("a.jsonl", b"[1]\n", "line 1 is no JSON object"),
    "no text": ("a.jsonl", b'{"content": "a"}\n', "line 1 is no JSON object"),
    "too deep": ("a.jsonl", b"[" * 100_000 + b"\n", "line 1 is no JSON object"),
    "settings": ("a.json", b'{"dtype": "float32"}', "line 1 is no JSON object"),
    "settings on lines": ("a.json", b'{\n"dtype": "float32"}', "item 1 is no JSON object"),
    "an array of others": ("a.json", b'[{"text": "a"}, {"text": null}]', "item 2 is no JSON"),
    "a number alone": ("a.json", b"3", "item 1 is no JSON object"),
    "half an array": ("a.json", b'[{"text": "a"},\n', "no JSON: .*line 2 column 1"),
    "an array in other bytes": ("a.json", b'["\xff"]', "no JSON: .*position 2"),
    "no UTF-8 and cut short": (
        "a.txt.gz",
        gzip.compress(b"one\n\xff" + bytes(range(1, 100)) * 1000)[:-9],
        "invalid start byte in UTF-8 at a byte after number 0",
    ),
    "text cut short": ("a.txt.gz", gzip.compress(b"a\n" * 1000)[:-9], "damaged after line 1000"),
    "text not gzipped": ("a.txt.gz", b"one\n", "damaged after line 0"),
    "no Parquet": ("a.parquet", b"PAR1", "no Parquet file"),
    "empty Parquet": ("a.parquet", b"", "no Parquet file"),
    "zero byte": ("a.txt", b"a\0b", "line 1 holds a zero byte"),
    "zero byte later": ("a.txt", b"a\n" * 10_000 + b"\0", "line 10001 holds a zero byte"),
    "no UTF-8": ("a.txt", b"a\xff\xfe", "invalid start byte in UTF-8 at byte 1"),
    "no UTF-8 later": ("a.txt", b"a\n" * 10_000 + b"\xff", "in UTF-8 at byte 20000"),
    "no UTF-8 after a mark": ("a.txt", BOM + b"ab\xff", "in UTF-8 at byte 5"),
    "half a character": ("a.txt", b"a" * 9000 + b"\xe4\xb8", "unexpected end .* at byte 9000"),
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


def test_a_row_of_a_table_without_text_is_named(tmp_path):
    """The first row is row 1. Rows before it are documents."""
    texts = [f"text {i}" for i in range(1500)]
    texts[1233] = None
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: .*row 1234: text is null"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_wrong_byte_is_found_wherever_blocks_end(tmp_path, monkeypatch, size):
    monkeypatch.setattr(formats, "BLOCK", size)
    (tmp_path / "a.txt").write_bytes("é中a".encode() + b"\xb8")
    assert formats.wrong_byte(tmp_path / "a.txt") == "byte 6"


def test_blank_pieces_are_no_documents(tmp_path):
    (tmp_path / "a.txt").write_text("\n" * 50_000 + "word")
    assert [d.strip() for d in read(tmp_path / "a.txt")] == ["word"]


class Stuck(io.BytesIO):
    """A file whose first block comes at once, and its second when it may."""

    def __init__(self):
        super().__init__(b"x" * 2 * formats.BLOCK)
        self.may_go_on = threading.Event()

    def read(self, size):
        if self.tell():
            self.may_go_on.wait(60)
        return super().read(size)


def test_a_reader_that_is_dropped_waits_for_no_thread():
    """Python may drop it while it starts a thread, and whoever waits for a thread then hangs."""
    file = Stuck()
    blocks = formats.blocks(file)
    next(blocks)
    closing = threading.Thread(target=blocks.close)
    closing.start()
    closing.join(10)
    is_waiting = closing.is_alive()
    file.may_go_on.set()
    closing.join()
    assert not is_waiting
