"""Where documents come from: text, files in C4's format, or C4 itself.

A document is a str. A source is one file, or one of C4's, and gives the same documents in the same order whenever it
is read, so that one number says how far a reader has come.
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

PIECE = 4096  # characters after which a plain text file is cut at the next empty line; at four times that, anywhere
BLOCK = 2**20  # bytes of a file that are unzipped at a time
C4 = {"train": 1024, "validation": 8}  # files of allenai/c4, en; of the latter, of 20M tokens each, one is used
PAUSES = (1, 2, 5, 10, 30, 60, 120, 300, 300, 300)  # seconds before the next attempt, after failures in a row
MISTAKES = (TypeError, AttributeError, NameError, LookupError, ImportError)  # what is no failure of a network


class Source(NamedTuple):
    """A sequence of documents."""

    name: str
    size: int  # bytes on disk; 0 for C4's, which are not here
    stamp: list  # something else where a file has changed
    read: Callable  # () -> its documents
    held_out: bool  # whether all of it is for validation


def sources(corpus):
    """The sources of a corpus, in order. Raises ValueError where there are none.

    stdlib: the .py files of the running Python's standard library, without tests. c4: the English part of C4, streamed.
    Otherwise the path of a file, or of a folder of files, of those that READERS has. If some files of a folder have
    "validation" in their name, as C4's do, they are held out.
    """
    if corpus == "stdlib":
        return [of_files("stdlib", library(Path(sysconfig.get_path("stdlib"))), text)]
    if corpus == "c4":
        names = [f"c4-validation.00000-of-{C4['validation']:05}.json.gz"]
        names += [f"c4-train.{i:05}-of-{C4['train']:05}.json.gz" for i in range(C4["train"])]
        return [Source(n, 0, [], partial(patient, partial(stream, n)), "validation" in n) for n in names]
    path, valid = Path(corpus), ", ".join(READERS)
    if not (corpus and flags.exists(corpus)):
        raise ValueError(f"data is {corpus!r}; valid: stdlib, c4, or the path of a file or folder that is there")
    found = [p for p in sorted(path.rglob("*")) if p.is_file()] if path.is_dir() else [path]
    found = {str(p.relative_to(path)) if path.is_dir() else p.name: p for p in found if reader(p)}
    if not found:
        raise ValueError(f"data {corpus}: valid are a file, or a folder with files, that end in {valid}")
    some = {name for name, p in found.items() if "validation" in p.name}
    return [of_files(name, [p], reader(p), name in some and len(some) < len(found)) for name, p in found.items()]


def of_files(name, paths, read, held_out=False):
    """The source that reads these files one after another."""
    stats = [p.stat() for p in paths]
    stamp = [(str(p), s.st_size, s.st_mtime_ns) for p, s in zip(paths, stats, strict=True)]

    def every():
        for path in paths:
            with files.named(path):
                yield from read(path)

    return Source(name, sum(s.st_size for s in stats), stamp, every, held_out)


@lru_cache(maxsize=1)
def library(root):
    """The .py files below the folder of a standard library, in order. Raises ValueError where there are none."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    found = [p for p in sorted(root.rglob("*.py")) if skip.isdisjoint(p.relative_to(root).parts)]
    found = [p for p in found if not p.name.startswith("_sysconfigdata")]  # written by the build, not by a person
    if not found:
        raise ValueError(f"data stdlib: no .py files in {root}; give the path of a .txt file")
    return found


# ---- the documents of one file ---------------------------------------------------------------------------------------
# Each raises ValueError where the file is not what its name says.


def text(path):
    """A .py file is one document, a .txt file is cut into some: see PIECE."""
    part, size, cut = [], 0, path.suffix == ".txt"
    try:
        with open(path, encoding="utf-8") as f:
            for line in iter(lambda: f.readline(PIECE), ""):
                if "\0" in line:
                    raise ValueError(f"data {path}: not text: it holds a zero byte")
                part.append(line)
                size += len(line)
                if cut and (size >= PIECE and not line.strip() or size >= 4 * PIECE):
                    if "".join(part).strip():
                        yield "".join(part)
                    part, size = [], 0
    except UnicodeDecodeError as error:
        raise ValueError(f"data {path}: not text: {error.reason} in UTF-8 at byte {error.start}") from None
    if "".join(part).strip():
        yield "".join(part)


def objects(path):
    """The "text" of each line, a JSON object, of a file that may be gzipped: C4's format."""
    number = 0
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as f:
            for number, line in enumerate(lines(f), 1):  # noqa: B007  it is in the message
                if line.strip():
                    yield from tidy(json.loads(line)["text"])
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"data {path}: damaged after line {number}: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f'data {path}: line {number} is no JSON object with a string "text"') from None


def lines(f):
    """The lines of an open file, in bytes; a thread unzips the next ones meanwhile, outside of Python's lock."""
    with ThreadPoolExecutor(1) as thread:
        ahead, parts = thread.submit(f.read, BLOCK), []
        while block := ahead.result():
            ahead = thread.submit(f.read, BLOCK)
            end, *others = block.split(b"\n")
            parts.append(end)
            if others:
                yield b"".join(parts)
                yield from others[:-1]
                parts = others[-1:]
        yield b"".join(parts)


def table(path):
    """The column "text" of a Parquet file."""
    import pyarrow.parquet  # here, as most runs need none of it

    try:
        with pyarrow.parquet.ParquetFile(path) as f:
            for batch in f.iter_batches(1000, columns=["text"]):
                for value in batch["text"].to_pylist():
                    yield from tidy(value)
    except (pyarrow.ArrowException, KeyError, TypeError, UnicodeDecodeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f'data {path}: no Parquet file with a column "text" of strings: {reason}') from None


def tidy(value):
    """A text without what UTF-8 or a text file cannot hold; nothing where it is blank. Raises TypeError for no str."""
    if not isinstance(value, str):
        raise TypeError(f"text is {type(value).__name__}")
    value = value.encode("utf-8", "replace").decode().replace("\0", " ")
    return [value] if value.strip() else []


READERS = {".txt": text, ".jsonl": objects, ".jsonl.gz": objects, ".json.gz": objects, ".parquet": table}


def reader(path):
    """The function that reads a file of this name, or None."""
    return next((read for suffix, read in READERS.items() if path.name.endswith(suffix)), None)


# ---- C4 over a network -----------------------------------------------------------------------------------------------


def stream(name):
    """The documents of one of C4's files, from Hugging Face."""
    import datasets  # here, as most runs need none of it

    rows = datasets.load_dataset("allenai/c4", data_files={"train": f"en/{name}"}, split="train", streaming=True)
    for row in rows:
        yield from tidy(row["text"])


def patient(read, pauses=PAUSES):
    """The documents of read(), which is begun again where it was after a failure of the network.

    Raises OSError where one more attempt than there are pauses has brought nothing.
    """
    done = failures = 0
    while True:
        try:
            for document in islice(read(), done, None):
                yield document
                done, failures = done + 1, 0
            return
        except MISTAKES:
            raise
        except Exception as error:  # of many libraries: connection, 403, rate limit, a stream that ends early
            reason = str(error).partition("\n")[0] or type(error).__name__
            if failures == len(pauses):
                raise OSError(f"data c4: {reason} (attempt {failures + 1}, the last)") from None
            print(f"data c4: {reason}; trying again in {pauses[failures]} s", file=sys.stderr)
            time.sleep(pauses[failures])
            failures += 1
