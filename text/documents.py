"""Where documents come from: text files, files in C4's format, or C4 itself.

A document is a str: an article, a module of source code, a few paragraphs of a book. A source is a
file of them. It gives the same documents in the same order whenever it is read, so that one number,
how many documents were read, says where to go on. A corpus is a list of sources:

    stdlib     the source code of Python's standard library, which every machine has
    c4         the paper's corpus, English pages of the web, streamed from Hugging Face
    a path     a file or a folder of files: .txt, .jsonl, .jsonl.gz, .json.gz, .parquet
"""

import gzip
import json
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from runtime import files, flags

PIECE = 4096  # characters of a .txt file after which the next empty line ends a document
LONGEST = 4 * PIECE  # characters after which a document ends at any line
BLOCK = 2**20  # bytes of a file that are unzipped at a time
C4_TRAIN = 1024  # files of training text in C4 (allenai/c4, en)
C4_VALIDATION = 8  # files of validation text; one is used, 20M tokens
PAUSES = (1, 2, 5, 10, 30, 60, 120, 300, 300, 300)  # seconds of waiting after failures in a row
MISTAKES = (TypeError, AttributeError, NameError, LookupError, ImportError)  # no network's failure


class Source(NamedTuple):
    """A sequence of documents that can be read again and again."""

    name: str
    size: int  # bytes on disk; 0 for C4's files, which are not here
    stamp: list  # names, sizes and times of the files: it differs if a file has changed
    read: Callable  # () -> its documents, one after another
    held_out: bool  # whether all of it is for validation


def sources(corpus):
    """The sources of a corpus, in a fixed order. Raises ValueError if there are none."""
    if corpus == "stdlib":
        paths = library(Path(sysconfig.get_path("stdlib")))
        return [source_of_files("stdlib", paths, text)]
    if corpus == "c4":
        return c4()
    return files_below(corpus)


@lru_cache(maxsize=1)
def library(root):
    """The .py files of a standard library, in order, without tests and installed packages.

    Raises ValueError if there are none.
    """
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    found = []
    for path in sorted(root.rglob("*.py")):
        written_by_build = path.name.startswith("_sysconfigdata")
        if skipped.isdisjoint(path.relative_to(root).parts) and not written_by_build:
            found.append(path)
    if not found:
        raise ValueError(f"data stdlib: no .py files in {root}; give the path of a .txt file")
    return found


def files_below(corpus):
    """A source for each readable file of a folder, or for one file.

    If some but not all files have "validation" in their names, as C4's do, those are held out.
    """
    path = Path(corpus)
    if not (corpus and flags.exists(corpus)):
        valid = "stdlib, c4, or the path of a file or folder that is there"
        raise ValueError(f"data is {corpus!r}; valid: {valid}")
    inside = sorted(path.rglob("*")) if path.is_dir() else [path]
    readable = [p for p in inside if p.is_file() and reader(p)]
    if not readable:
        valid = f"a file, or a folder with files, that end in {', '.join(READERS)}"
        raise ValueError(f"data {corpus}: valid are {valid}")
    validation = [p for p in readable if "validation" in p.name]
    if len(validation) == len(readable):  # nothing would be left to train on
        validation = []
    found = []
    for p in readable:
        name = str(p.relative_to(path)) if path.is_dir() else p.name
        found.append(source_of_files(name, [p], reader(p), p in validation))
    return found


def source_of_files(name, paths, read, held_out=False):
    """The source that reads these files one after another, by read(path)."""
    stamp = []
    size = 0
    for path in paths:
        stat = path.stat()
        stamp.append((str(path), stat.st_size, stat.st_mtime_ns))
        size += stat.st_size

    def read_all():
        for path in paths:
            with files.named(path):
                yield from read(path)

    return Source(name, size, stamp, read_all, held_out)


# ---- the documents of one file -------------------------------------------------------------------
# Each reader raises ValueError, in one line, if the file is not what its name says.


def text(path):
    """A .py file is one document. A .txt file is cut: see PIECE and LONGEST."""
    is_cut = path.suffix == ".txt"
    document = []
    size = 0
    try:
        with open(path, encoding="utf-8") as file:
            for line in iter(partial(file.readline, PIECE), ""):
                if "\0" in line:
                    raise ValueError(f"data {path}: not text: it holds a zero byte")
                document.append(line)
                size += len(line)
                between_paragraphs = size >= PIECE and not line.strip()
                if is_cut and (between_paragraphs or size >= LONGEST):
                    yield from tidy("".join(document))
                    document = []
                    size = 0
    except UnicodeDecodeError as error:
        where = f"{error.reason} in UTF-8 at byte {error.start}"
        raise ValueError(f"data {path}: not text: {where}") from None
    yield from tidy("".join(document))


def objects(path):
    """C4's format, gzipped or not: each line is a JSON object whose "text" is a document."""
    unzip = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with unzip(path, "rb") as file:
            for line in lines(file):
                number += 1
                if line.strip():
                    yield from tidy(json.loads(line)["text"])
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"data {path}: damaged after line {number}: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        what = 'no JSON object with a string "text"'
        raise ValueError(f"data {path}: line {number} is {what}") from None


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


def table(path):
    """A Parquet file: each value of its column "text" is a document."""
    import pyarrow.parquet  # here, as most runs need none of it

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1000, columns=["text"]):
                for value in batch["text"].to_pylist():
                    yield from tidy(value)
    except (pyarrow.ArrowException, KeyError, TypeError, UnicodeDecodeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        what = 'no Parquet file with a column "text" of strings'
        raise ValueError(f"data {path}: {what}: {reason}") from None


def tidy(value):
    """A list of one document, or of none if it is blank. Raises TypeError if it is no str.

    What UTF-8 cannot hold becomes "?", and the zero byte, which may end a document, a blank.
    """
    if not isinstance(value, str):
        raise TypeError(f"text is {type(value).__name__}")
    document = value.encode("utf-8", "replace").decode().replace("\0", " ")
    return [document] if document.strip() else []


READERS = {
    ".txt": text,
    ".jsonl": objects,
    ".jsonl.gz": objects,
    ".json.gz": objects,
    ".parquet": table,
}


def reader(path):
    """The function that reads a file of this name, or None."""
    for suffix, read in READERS.items():
        if path.name.endswith(suffix):
            return read
    return None


# ---- C4 over a network ---------------------------------------------------------------------------


def c4():
    """The files of C4's English text, each a source: one of validation, then all of training."""
    names = [f"c4-validation.00000-of-{C4_VALIDATION:05}.json.gz"]
    for number in range(C4_TRAIN):
        names.append(f"c4-train.{number:05}-of-{C4_TRAIN:05}.json.gz")
    found = []
    for name in names:
        read = partial(patient, partial(stream, name))
        found.append(Source(name, 0, [], read, held_out="validation" in name))
    return found


def stream(name):
    """The documents of one of C4's files, from Hugging Face."""
    import datasets  # here, as most runs need none of it

    file = {"train": f"en/{name}"}
    rows = datasets.load_dataset("allenai/c4", data_files=file, split="train", streaming=True)
    for row in rows:
        yield from tidy(row["text"])


def patient(read, pauses=PAUSES):
    """The documents of read(). After a failure of the network, it goes on where it was.

    It waits after each failure, longer after each in a row. Raises OSError if one more attempt than
    there are pauses has brought nothing.
    """
    done = 0
    failures = 0
    while True:
        try:
            for document in islice(read(), done, None):
                yield document
                done += 1
                failures = 0
            return
        except MISTAKES:
            raise
        except Exception as error:  # of many libraries: no connection, 403, 429, an early end
            reason = str(error).partition("\n")[0] or type(error).__name__
            if failures == len(pauses):
                attempt = f"attempt {failures + 1}, the last"
                raise OSError(f"data c4: {reason} ({attempt})") from None
            pause = pauses[failures]
            print(f"data c4: {reason}; trying again in {pause} s", file=sys.stderr)
            time.sleep(pause)
            failures += 1
