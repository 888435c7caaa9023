"""Where documents come from: text files, files in C4's format, or C4 itself.

A document is a str: an article, a module of source code, a few paragraphs of a book. A source is a
file of them. It gives the same documents in the same order whenever it is read, so that one number,
how many documents were read, says where to go on. A corpus is a list of sources:

    stdlib     the source code of Python's standard library, which every machine has
    c4         the paper's corpus, English pages of the web, streamed from Hugging Face
    a path     a file (text/formats.py), or a folder of files (text/folders.py)
"""

import os
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from runtime import files
from text import folders, formats
from text.formats import READERS, documents_in, plain_text, reader

C4_TRAIN = 1024  # files of training text in C4 (allenai/c4, en)
C4_VALIDATION = 8  # files of validation text; one is used, 20M tokens
C4_BYTES = 320_000_000  # in a file of training text, zipped, about
PAUSES = (1, 2, 5, 10, 30, 60, 120, 300, 300, 300)  # seconds of waiting after failures in a row
FIRST_PAUSES = (1, 2)  # where there has not been a network yet
MISTAKES = (TypeError, AttributeError, NameError, LookupError, ImportError)  # no network's failure


class Source(NamedTuple):
    """A sequence of documents that can be read again and again."""

    name: str
    files: int  # how many it reads one after another
    size: int  # bytes on disk; of C4's files, which are not here, about
    stamp: list  # names, sizes and times of the files: it differs if one of these has changed
    chunks: Callable  # () -> its documents in chunks (text/formats.py), one after another
    held_out: bool  # whether all of it is for validation

    def read(self):
        """Its documents, one after another."""
        return formats.documents(self.chunks())


def sources(corpus, first_pauses=FIRST_PAUSES):
    """The sources of a corpus, in a fixed order. Raises ValueError if there are none.

    first_pauses: of C4, see `patient`.
    """
    if corpus == "stdlib":
        paths = stdlib_files(Path(sysconfig.get_path("stdlib")))
        return [source_of_files("stdlib", paths, plain_text)]
    if corpus == "c4":
        return c4(first_pauses)
    return files_below(corpus)


@lru_cache(maxsize=1)
def stdlib_files(root):
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
    """A source for each file of text in a folder, or for one file.

    Files whose names, or whose folders' names, say so are held out, unless all files are such.
    """
    path = Path(corpus)
    if not os.path.exists(corpus):  # false also of what cannot be a path
        valid = "stdlib, c4, or the path of a file or folder that is there"
        raise ValueError(f"data is {corpus!r}; valid: {valid}")
    if path.is_dir():
        return files_of_folder(path)
    if not (path.is_file() and reader(path)):
        raise nothing_readable(path)
    return [source_of_files(path.name, [path], reader(path))]


def files_of_folder(folder):
    """A source for each file of text in a folder. One line says what is left out."""
    readable, left_out = folders.texts(folder)
    others = folders.kinds(left_out)
    if not readable:
        raise nothing_readable(folder, f"; it has {others}" if others else "")
    if others:
        folders.say_once(f"data {folder}: left out, as they hold no text known here: {others}")
    validation = {p for p in readable if folders.is_held_out(p.relative_to(folder))}
    if len(validation) == len(readable):  # nothing would be left to train on
        validation = set()
    found = []
    for p in readable:
        name = str(p.relative_to(folder))
        found.append(source_of_files(name, [p], reader(p), p in validation))
    return found


def nothing_readable(path, others=""):
    """The ValueError that says which files can be read."""
    valid = f"a file, or a folder with files, that end in {', '.join(READERS)}"
    return ValueError(f"data {path}: valid are {valid}{others}")


def source_of_files(name, paths, read, held_out=False):
    """The source that reads these files one after another, each by its reader read(path)."""
    stamp = []
    size = 0
    for path in paths:
        stat = path.stat()
        stamp.append((str(path), stat.st_size, stat.st_mtime_ns))
        size += stat.st_size

    def chunks():
        for path in paths:
            with files.named(path):
                yield from read(path)

    return Source(name, len(paths), size, stamp, chunks, held_out)


# ---- C4 over a network ---------------------------------------------------------------------------


class NoNetwork(OSError):
    """There is nothing that answers."""


def c4(first_pauses=FIRST_PAUSES):
    """The files of C4's English text, each a source: one of validation, then all of training."""
    names = [f"c4-validation.00000-of-{C4_VALIDATION:05}.json.gz"]
    for number in range(C4_TRAIN):
        names.append(f"c4-train.{number:05}-of-{C4_TRAIN:05}.json.gz")
    found = []
    for name in names:
        chunks = partial(chunks_of_c4, name, first_pauses)
        found.append(Source(name, 1, C4_BYTES, [], chunks, held_out="validation" in name))
    return found


def chunks_of_c4(name, first_pauses):
    """The chunks of one of C4's files."""
    return formats.lists(patient(partial(stream, name), first_pauses=first_pauses))


def stream(name):
    """The documents of one of C4's files, from Hugging Face."""
    import datasets  # here, as most runs need none of it

    if datasets.config.HF_HUB_OFFLINE:
        raise NoNetwork("HF_HUB_OFFLINE is set")
    find_network(datasets.config.HF_ENDPOINT)
    file = {"train": f"en/{name}"}
    rows = datasets.load_dataset("allenai/c4", data_files=file, split="train", streaming=True)
    for row in rows:
        yield from documents_in(row["text"])


@lru_cache(maxsize=1)  # once it has succeeded: an error is not cached
def find_network(address):
    """Raises NoNetwork if nothing answers at an address.

    Hugging Face's library would take half a minute to find out, or minutes.
    """
    import requests

    try:
        requests.head(address, timeout=10)
    except requests.exceptions.SSLError:
        pass  # something is there
    except (requests.exceptions.ConnectionError, requests.exceptions.Timeout):
        raise NoNetwork(f"no connection to {address}") from None
    except requests.exceptions.RequestException:
        pass  # such as a proxy that this library does not know


def patient(read, pauses=PAUSES, first_pauses=FIRST_PAUSES):
    """The documents of read(). After a failure of the network, it goes on where it was.

    It waits after each failure, longer after each in a row. Raises OSError if one more attempt than
    there are pauses has brought nothing. Where there is no network from the start, it waits only
    for `first_pauses`.
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
        except NoNetwork as error:
            reason = str(error)
            limits = first_pauses
            remedy = "; without a network, train.py works with --data stdlib or --data PATH"
        except Exception as error:  # of many libraries: no connection, 403, 429, an early end
            reason = str(error).partition("\n")[0] or type(error).__name__
            limits = pauses
            remedy = ""
        if failures >= len(limits):
            attempt = f"attempt {failures + 1}, the last"
            raise OSError(f"data c4: {reason} ({attempt}){remedy}")
        pause = limits[failures]
        print(f"data c4: {reason}; trying again in {pause} s", file=sys.stderr)
        time.sleep(pause)
        failures += 1
