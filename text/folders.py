"""Which files of a folder are text, and which of them are held out.

Read is every file with a known ending, in the folder and in the folders below it. Links are
followed, and a file to which several names lead is read once. Not read are

- hidden files and folders, whose names begin with a dot, and packages of other programs;
- what this project itself writes: runs, also packed ones, token files, compiled programs;
- .json files without documents: many programs keep their settings in such files;
- files with other endings. One line names the files of the last two kinds, or counts them.
"""

import json
import os
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from runtime.files import UNREADABLE
from text import formats
from text.formats import reader

PACKAGES = {"__pycache__", "node_modules", "site-packages"}  # folders of other programs
# Files of this project in its own folders. The last two are JAX's compiled programs.
OWN = re.compile(r"lock|warmup.*\.(npz|lock)|.*\.draft|.*-cache|.*-atime")
PACKED_RUN = b'{"config":'  # what runtime/packed.py begins a line with
HELD_OUT_WORDS = {"validation", "valid", "val", "test"}
SHOWN = 6  # kinds of files that are named


def texts(folder):
    """The paths of a folder's files that are text, in order, and of those that were left out."""
    found = []
    left_out = []
    for path in sorted(map(Path, files_in(folder).values())):
        if is_text(path):
            found.append(path)
        elif not OWN.fullmatch(path.name):
            left_out.append(path)
    return found, left_out


def files_in(folder):
    """{real path: path} of all files below a folder that are not hidden, not packages, not ours.

    Links are followed at the end, so a file that lies below the folder goes by its own name there.
    """
    found = {}
    entered = set()
    folders = [str(folder)]
    links = []
    while folders or links:
        if folders:
            path = folders.pop()
            real = os.path.realpath(path)
            if real not in entered:
                entered.add(real)
                enter(path, real, found, folders, links)
            continue
        path = links.pop(0)
        if os.path.isdir(path):
            folders.append(path)
            continue
        add(found, os.path.realpath(path), path)
    return found


def add(found, real, path):
    """Adds a file to {real path: path}, unless it is there by a name that can be read.

    A link may have an ending where the file itself has none, as in Hugging Face's cache.
    """
    if real not in found or not reader(Path(found[real])):
        found[real] = path


def enter(folder, real, found, folders, links):
    """Adds what lies in a folder, whose real path is `real`, to what was found."""
    with os.scandir(folder) as entries:
        entries = sorted(entries, key=name_of)
    if is_own(folder, set(map(name_of, entries))):
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in PACKAGES:
            continue
        if entry.is_symlink():
            links.append(entry.path)
        elif entry.is_dir():
            folders.append(entry.path)
        elif entry.is_file():
            add(found, os.path.join(real, entry.name), entry.path)


def name_of(entry):
    """The name of an entry of a folder."""
    return entry.name


def is_own(folder, names):
    """Whether a folder with these names in it is that of a run of this project, or of token files.

    A run that has only begun has neither of these files: it holds only what OWN names.
    """
    if "00000.train.bin" in names:
        return True
    if "config.json" in names:
        with suppress(*UNREADABLE):
            config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
            return {"config", "about"} <= set(config)
    return False


def is_text(path):
    """Whether a file of a folder holds documents, as far as its name and its beginning say."""
    read = reader(path)
    if not (read and path.is_file()):  # a link may lead to nothing
        return False
    if path.suffix == ".jsonl" and begins_with(path, PACKED_RUN):
        return False
    if not path.name.lower().endswith((".json", ".json.gz")):
        return True
    stat = path.stat()
    return has_document(path, stat.st_size, stat.st_mtime_ns)


def begins_with(path, start):
    """Whether a file begins with some bytes."""
    with open(path, "rb") as file:
        return file.read(len(start)) == start


@cache
def has_document(path, size, time):
    """Whether the first document of a file, of this size and time, can be read."""
    try:
        chunks = reader(path)(path)
        next(formats.documents(chunks), None)
    except ValueError:
        return False
    return True


def is_held_out(path):
    """Whether a file, or a folder on its path, is named validation, valid, val or test.

    It is if its name, or a part of the name before a dot, ends with that word. Digits at its end
    do not count, and neither do words with a digit in them, such as a hash. So held out are
    test/a.txt, my_val.jsonl, test_mp3s.txt and c4-validation.00000-of-00008.json.gz, but not
    cross-validation-lectures.txt.
    """
    for name in path.parts:
        if not HELD_OUT_WORDS.isdisjoint(map(last_word, name.lower().split("."))):
            return True
    return False


def last_word(text):
    """The last word of a text, without the digits at its end. A number is no word, nor is "of"."""
    for word in reversed(re.split(r"[\W_]+", text)):
        letters = word.rstrip("0123456789")
        if letters.isalpha() and letters != "of":
            return letters
    return ""


def kinds(paths):
    """Files in a few words: how many have which ending. Of one that is alone, its name."""
    by_ending = {}
    for path in paths:
        by_ending.setdefault(path.suffix or "without an ending", []).append(path.name)
    words = []
    for ending, names in sorted(by_ending.items(), key=count_of, reverse=True):
        if len(names) == 1:
            words += names
        else:
            words.append(f"{len(names):,} {ending}")
    if len(words) > SHOWN:
        words[SHOWN:] = [".."]
    return ", ".join(words)


def count_of(item):
    """How many names there are in (ending, names)."""
    return len(item[1])


@cache
def say_once(line):
    """Prints a line to standard error, the first time only."""
    print(line, file=sys.stderr)
