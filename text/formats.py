"""How the documents of one file are read: .txt, .jsonl, .json, .parquet, and the gzipped forms.

A reader is a function of a path that yields documents. It raises ValueError if the file is not what
its name says: one line, with the place in the file. Text is UTF-8. A byte order mark, with which
some programs begin a file, is no part of the text.
"""

import codecs
import gzip
import io
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

PIECE = 4096  # characters of a .txt file after which the next empty line ends a document
LONGEST = 4 * PIECE  # characters after which the next end of a line, or of PIECE more, ends it
BLOCK = 2**20  # bytes of a file that are unzipped at a time
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # byte order marks; UTF-32 begins like them
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


# ---- .txt, .py -----------------------------------------------------------------------------------


def text(path):
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
                    yield from tidy("".join(document))
                    document = []
                    size = 0
    except DAMAGE as error:
        raise ValueError(f"data {path}: damaged after line {number - 1}: {error}") from None
    except UnicodeDecodeError as error:
        where = f"{error.reason} in UTF-8 at {wrong_byte(path)}"
        raise ValueError(f"data {path}: not text: {where}") from None
    yield from tidy("".join(document))


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


def objects(path):
    """C4's format: each line is a JSON object whose "text" is a document."""
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        yield from document_of(row, path, f"line {number}")


def objects_or_array(path):
    """A .json file: lines as in C4's format, or one JSON object, or one array of objects.

    An array is held in memory. Lines are not.
    """
    if begins_with_object(path):
        yield from objects(path)
        return
    content = b"\n".join(line for _, line in numbered_lines(path))
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"data {path}: no JSON: {error}") from None
    if not isinstance(rows, list):
        rows = [rows]
    for number, row in enumerate(rows, 1):
        yield from document_of(row, path, f"item {number}")


def begins_with_object(path):
    """Whether the first line that is not blank is a whole JSON object; true if there is none."""
    for _, line in numbered_lines(path):
        start = line.lstrip()
        if start.startswith(b"{"):
            try:
                return isinstance(json.loads(start), dict)
            except (ValueError, RecursionError):
                return False
        if start:
            return False
    return True


def document_of(row, path, where):
    """A list of the document that a row holds, or of none if it is blank."""
    try:
        return tidy(row["text"])
    except (KeyError, TypeError):
        what = 'no JSON object with a string "text"'
        raise ValueError(f"data {path}: {where} is {what}") from None


def numbered_lines(path):
    """(number, line) for the lines of a file, from 1 on, in bytes, without their ends."""
    number = 0
    try:
        with opened(path) as file:
            for line in lines(file):
                number += 1
                yield number, line
    except DAMAGE as error:
        raise ValueError(f"data {path}: damaged after line {number}: {error}") from None


def lines(file):
    """The lines of an open file, in bytes, without their ends."""
    unfinished = []  # what was read of a line whose end was not
    for block in blocks(file):
        first, *others = block.split(b"\n")
        unfinished.append(first)
        if others:  # so `first` ends a line, and the last of `others` begins one
            yield b"".join(unfinished)
            yield from others[:-1]
            unfinished = others[-1:]
    yield b"".join(unfinished)


def blocks(file):
    """The file in blocks of bytes. While one is in use, a thread unzips the next."""
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(file.read, BLOCK)
        while block := ahead.result():
            ahead = thread.submit(file.read, BLOCK)
            yield block


# ---- .parquet ------------------------------------------------------------------------------------


def table(path):
    """A Parquet file: each value of its column "text" is a document."""
    import pyarrow.parquet  # here, as most runs need none of it

    number = 0  # of the row
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1000, columns=["text"]):
                for value in batch["text"].to_pylist():
                    number += 1
                    yield from tidy(value)
    except TypeError as error:
        reason = f"row {number}: {error}"
    except (pyarrow.ArrowException, KeyError, UnicodeDecodeError, OSError) as error:
        if getattr(error, "errno", None):
            raise  # the machine failed to read; pyarrow's own OSErrors have no number
        reason = str(error).partition("\n")[0]
        if number:
            reason = f"after row {number}: {reason}"
    else:
        return
    what = 'no Parquet file with a column "text" of strings'
    raise ValueError(f"data {path}: {what}: {reason}")


# ---- all of them ---------------------------------------------------------------------------------


def tidy(value):
    """A list of one document, or of none if it is blank. Raises TypeError if it is no str.

    What UTF-8 cannot hold becomes "?", and the zero byte, which may end a document, a blank.
    """
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise TypeError(f"text is {kind}")
    document = value.encode("utf-8", "replace").decode().replace("\0", " ")
    return [document] if document.strip() else []


READERS = {
    ".txt": text,
    ".jsonl": objects,
    ".json": objects_or_array,
    ".parquet": table,
    ".txt.gz": text,
    ".jsonl.gz": objects,
    ".json.gz": objects_or_array,
}


def reader(path):
    """The function that reads a file of this name, or None."""
    for suffix, read in READERS.items():
        if path.name.lower().endswith(suffix):
            return read
    return None
