"""How the documents of one file are read: .txt, .jsonl, .json, .parquet, and the gzipped forms.

A reader is a function of a path that yields chunks. A chunk is a list of documents, or it is Lines,
which parses its documents when they are asked for. So another process can do the parsing: a chunk
is sent there as it is. Read again, a file has the same documents, in the same order.

A document raises ValueError, as a reader does, if the file is not what its name says: one line,
with the place in the file. Text is UTF-8. A byte order mark, with which some programs begin a file,
is no part of the text.
"""

import codecs
import gzip
import io
import json
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from pathlib import Path

PIECE = 4096  # characters of a .txt file after which the next empty line ends a document
LONGEST = 4 * PIECE  # a longer document ends with its line, or, in a longer line, with a PIECE
CHUNK = 64  # documents in a list
BLOCK = 2**18  # bytes of a file that are unzipped at a time
AHEAD = 8  # blocks that wait to be used, so that the thread that unzips has always something to do
UNZIPPING = ThreadPoolExecutor(1)  # the thread that unzips; it starts when first needed
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # byte order marks; UTF-32-LE has the first
DAMAGE = (gzip.BadGzipFile, EOFError, zlib.error)  # what a damaged .gz file raises


@contextmanager
def opened(path):
    """The bytes of a file behind its byte order mark, unzipped if its name ends in .gz."""
    unzip = gzip.open if path.suffix.lower() == ".gz" else open
    with unzip(path, "rb") as file:
        start = file.read(3)
        if start.startswith(UTF_16):
            raise ValueError(f"data {path}: not text in UTF-8: it begins as UTF-16 or UTF-32 does")
        file.seek(3 if start == codecs.BOM_UTF8 else 0)
        yield file


def documents(chunks):
    """The documents of chunks, one after another."""
    for chunk in chunks:
        yield from chunk


def lists(texts):
    """Documents in lists of CHUNK; the last may be shorter."""
    while chunk := list(islice(texts, CHUNK)):
        yield chunk


def in_lists(read):
    """A decorator of a function of a path that yields documents: it becomes a reader."""

    @wraps(read)
    def read_lists(path):
        return lists(read(path))

    return read_lists


# ---- .txt, .py -----------------------------------------------------------------------------------


@in_lists
def plain_text(path):
    """A .py file is one document. A .txt file is cut: see PIECE and LONGEST."""
    is_cut = path.suffix != ".py"
    document = []
    size = 0
    number = 1  # of the line
    try:
        with opened(path) as file:
            characters = io.TextIOWrapper(file, encoding="utf-8")
            for line in iter(partial(characters.readline, PIECE), ""):
                if "\0" in line:
                    raise ValueError(f"data {path}: not text: line {number} holds a zero byte")
                number += line.endswith("\n")
                document.append(line)
                size += len(line)
                between_paragraphs = size >= PIECE and not line.strip()
                if is_cut and (between_paragraphs or size >= LONGEST):
                    yield from documents_in("".join(document))
                    document = []
                    size = 0
    except DAMAGE as error:
        raise ValueError(f"data {path}: damaged after line {number - 1}: {error}") from None
    except UnicodeDecodeError as error:
        where = f"{error.reason} in UTF-8 at {wrong_byte(path)}"
        raise ValueError(f"data {path}: not text: {where}") from None
    yield from documents_in("".join(document))


def wrong_byte(path):
    """Where the first byte of a file, unzipped, is that is not UTF-8, counted from 0."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with opened(path) as file:
        place = file.tell()
        while True:
            try:
                block = file.read(BLOCK)
            except DAMAGE:  # reading in smaller pieces came to the wrong byte before that
                return f"a byte after number {place}"
            unfinished, _ = decoder.getstate()  # bytes of a character that began in the last block
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return f"byte {place - len(unfinished) + error.start}"
            place += len(block)
            if not block:  # the file has changed since it was read
                return f"byte {place}"


# ---- .jsonl, .json -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lines:
    """Whole lines of a file in C4's format: each is a JSON object whose "text" is a document."""

    path: Path
    first: int  # the number of the first line
    content: bytes  # the lines, without the end of the last one

    def __iter__(self):
        """Its documents, parsed one after another."""
        for number, line in enumerate(self.content.split(b"\n"), self.first):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = f"line {number} is no JSON object: {error}"
                raise ValueError(f"data {self.path}: {reason}") from None
            yield from documents_in_row(row, self.path, f"line {number}")


def objects(path):
    """A file in C4's format, as Lines."""
    number = 1  # of the line that comes next
    try:
        with opened(path) as file:
            for content in blocks_of_lines(file):
                yield Lines(path, number, content)
                number += content.count(b"\n") + 1
    except DAMAGE as error:
        raise ValueError(f"data {path}: damaged after line {number - 1}: {error}") from None


def objects_or_array(path):
    """A .json file: lines as in C4's format, or one JSON object, or one array of objects."""
    return objects(path) if begins_with_object(path) else array(path)


@in_lists
def array(path):
    """A file of one JSON object, or of one array of objects. It is held in memory."""
    content = b"\n".join(lines.content for lines in objects(path))
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"data {path}: no JSON: {error}") from None
    if not isinstance(rows, list):
        rows = [rows]
    for number, row in enumerate(rows, 1):
        yield from documents_in_row(row, path, f"item {number}")


def begins_with_object(path):
    """Whether the first line that is not blank is a whole JSON object; true if there is none."""
    for lines in objects(path):
        for line in lines.content.split(b"\n"):
            start = line.lstrip()
            if start.startswith(b"{"):
                try:
                    return isinstance(json.loads(start), dict)
                except (ValueError, RecursionError):
                    return False
            if start:
                return False
    return True


def documents_in_row(row, path, where):
    """A list of the document that a row holds, or of none if it is blank."""
    try:
        return documents_in(row["text"])
    except (KeyError, TypeError):
        what = 'no JSON object with a string "text"'
        raise ValueError(f"data {path}: {where} is {what}") from None


def blocks_of_lines(file):
    """An open file in blocks of bytes that are whole lines, without the end of the last one."""
    unfinished = []  # what was read of a line whose end was not
    for block in blocks(file):
        lines, end, rest = block.rpartition(b"\n")
        if end:
            yield b"".join([*unfinished, lines])
            unfinished = []
        unfinished.append(rest)
    yield b"".join(unfinished)


def blocks(file):
    """The file in blocks of bytes. While one is in use, a thread unzips the next AHEAD.

    The thread does not end with the file. To wait for its end would be unsafe: a generator that is
    dropped before the end of its file may be closed at any moment, such as while a thread starts.
    """
    ahead = deque()
    for _ in range(AHEAD):
        ahead.append(UNZIPPING.submit(file.read, BLOCK))
    while block := ahead.popleft().result():
        ahead.append(UNZIPPING.submit(file.read, BLOCK))
        yield block


# ---- .parquet ------------------------------------------------------------------------------------


@in_lists
def table(path):
    """A Parquet file: each value of its column "text" is a document."""
    import pyarrow.parquet  # here, as most runs need none of it

    number = 0  # of the row
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1000, columns=["text"]):
                for value in batch["text"].to_pylist():
                    number += 1
                    yield from documents_in(value)
    except TypeError as error:
        raise no_table(path, f"row {number}: {error}") from None
    except (pyarrow.ArrowException, KeyError, UnicodeDecodeError, OSError) as error:
        if getattr(error, "errno", None):
            raise  # the machine failed to read; pyarrow's own OSErrors have no number
        where = f"after row {number}: " if number else ""
        reason = str(error).partition("\n")[0]
        raise no_table(path, where + reason) from None


def no_table(path, reason):
    """The ValueError that says why a Parquet file cannot be read."""
    what = 'no Parquet file with a column "text" of strings'
    return ValueError(f"data {path}: {what}: {reason}")


# ---- all of them ---------------------------------------------------------------------------------


def documents_in(value):
    """A list of one document, or of none if it is blank. Raises TypeError if it is no str.

    What UTF-8 cannot hold becomes "?", and the zero byte, which may end a document, a blank.
    """
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise TypeError(f"text is {kind}")
    document = value.encode("utf-8", "replace").decode().replace("\0", " ")
    return [document] if document.strip() else []


READERS = {
    ".txt": plain_text,
    ".jsonl": objects,
    ".json": objects_or_array,
    ".parquet": table,
    ".txt.gz": plain_text,
    ".jsonl.gz": objects,
    ".json.gz": objects_or_array,
}


def reader(path):
    """The function that reads a file of this name, or None."""
    for suffix, read in READERS.items():
        if path.name.lower().endswith(suffix):
            return read
    return None
