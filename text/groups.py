"""The text of a corpus as a sequence of groups of files, each tokenized when it is needed.

A corpus may be larger than what a run reads of it: C4 has 1,024 files of 160M tokens each. So a
corpus is not tokenized as a whole. Its files are taken in order, and a group ends with the file
that brings it to GROUP bytes. A run begins as soon as the first group is tokenized. While it reads
a group, another process, the maker, tokenizes the next one.

Which files make a group depends on nothing but the files. So runs of any length read the same
groups in the same order.

Validation reads the files that are held out. If there are none, it reads the held-out documents of
the first group, or of the first groups that have a window of them; those of later groups are not
read by anyone.
"""

import hashlib
import io
import multiprocessing
import os
import shutil
import threading
import time
from contextlib import redirect_stderr, suppress
from pathlib import Path

from runtime.command import BadInput
from runtime.cores import available_cores
from runtime.files import digest, locked
from text import documents, formats, token_files
from text.token_files import Holdout, are_finished, ids_of, intact_counts_of, make_shards
from text.tokenizer import tokenizer as tokenizer_of_flag
from text.workers import Workers, begin, starting_processes

# Bytes. Validation reads the held-out documents of the first group. So a corpus of which exactly 5%
# is held out (token_files.SMALL) must be one group.
GROUP = token_files.SMALL
NAME_BYTES = 100  # of a text's name that are used: a file's name has 255 at most
PAUSE = 0.2  # seconds from one look at what another process makes to the next


def make(corpus, tokenizer, context, need, folder, read_at_most, makes_groups):
    """The token files of a corpus, made as far as they are needed now: (train, val, meta).

    train: a Text; val: the ids of validation. meta describes what is made. For each side it has
    counts, such as "train_files", "train_documents", "train_tokens" and "train_bytes", and the
    sha256; "documents" are those of both sides, and "later_files" are not made yet. A file that has
    documents on both sides is a training file. Arguments and errors are those of `data.prepare`.
    """
    text = Text(corpus, tokenizer, context, folder, read_at_most, makes_groups)
    was_begun = any(text.home.glob("*.json")) or any(text.home.glob("*.progress"))
    try:
        validation = text.make_first(need)
        meta = text.describe(validation)
        text.check_length(meta)
    except ValueError:
        if not was_begun:
            with locked(text.home / "lock"):
                # What is finished stays: another process may read it by now.
                if not any(text.home.glob("*.json")):
                    remove(text.home)
        raise
    return text, ids_of(text.home, validation, "val", tokenizer.vocab_size), meta


def remove(home):
    """Removes a folder, and the one that it is in if that is then empty."""
    shutil.rmtree(home, ignore_errors=True)
    with suppress(OSError):
        os.rmdir(home.parent)


# ---- which files are where -----------------------------------------------------------------------


def in_order(sources):
    """The sources in the order of their shards: those that are held out come first."""
    return sorted(sources, key=lambda source: not source.held_out)


def divide(sources):
    """The groups: lists of the numbers of their shards, in order. What is held out is in none."""
    groups = []
    size = GROUP  # bytes of the last group: the first source begins a group
    for number, source in enumerate(sources):
        if source.held_out:
            continue
        if size >= GROUP:
            groups.append([])
            size = 0
        groups[-1].append(number)
        size += source.size
    return groups


def folder_name(corpus, sources, tokenizer):
    """A name for the folder of token files.

    It is another one if the files, the tokenizer, HELD_OUT or PIECE is another. An edit of SMALL,
    or of the code that makes ids, does not change it: then remove the folder.
    """
    text = [[source.name, source.stamp, source.held_out] for source in sources]
    shape = [token_files.HELD_OUT, formats.PIECE]
    key = digest([text, tokenizer.name, tokenizer.vocab_size, *shape])
    return f"{short_name(corpus)}-{tokenizer.name}-{key[:12]}"


def short_name(corpus):
    """The name of a corpus without its ending, NAME_BYTES long at most, in whole characters."""
    name = Path(os.path.abspath(corpus)).stem  # that of ".", which has none, is its folder's
    # The file system's encoding need not be UTF-8, and the result must be a name there, too.
    whole_characters = os.fsencode(name)[:NAME_BYTES].decode(errors="ignore")
    return os.fsdecode(whole_characters.encode())


# ---- the training text ---------------------------------------------------------------------------


class Text:
    """The training ids of a corpus: text[i] is group i, one array (token_files.Joined).

    Who asks for a group that is not tokenized yet waits for it. Raises BadInput if a file of the
    group is not what its name says, and OSError for a failure of the machine.
    """

    def __init__(self, corpus, tokenizer, context, folder, read_at_most, makes_groups):
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.context = context
        self.read_at_most = read_at_most  # tokens; what lies behind them is not made
        self.makes_groups = makes_groups  # whether this process starts Makers, or waits for others'
        self.sources = in_order(documents.sources(corpus))
        self.home = Path(folder) / folder_name(corpus, self.sources, tokenizer)
        self.groups = divide(self.sources)
        self.holdout = Holdout(self.sources)
        self.counts = {}  # {number of a shard: its counts}
        self.arrays = {}  # {number of a group: its ids}
        self.hashes = {}  # {number of a group that was asked for: its hash_of}
        self.makers = {}  # {number of a group: the last Maker that worked on it}
        self.closed = False
        self.reading = threading.Lock()  # the runs of a grid share a text: one thread at a time
        self.starting = threading.Lock()  # so that nothing starts while the text is closed

    def __len__(self):
        return len(self.groups)

    def __getitem__(self, group):
        with self.reading:
            if group not in self.arrays:
                self.wait_for(group)
            if group not in self.hashes:
                self.hashes[group] = self.hash_of(self.groups[group], "train")
                self.look_ahead(group + 1)
        return self.arrays[group]

    def add(self, group, counts):
        """Takes a group that is made; counts: those of its shards."""
        shards = self.groups[group]
        self.counts |= zip(shards, counts, strict=True)
        self.arrays[group] = ids_of(self.home, shards, "train", self.tokenizer.vocab_size)

    # ---- what is made before a run ----

    def make_first(self, need):
        """Makes, in this process, what is needed at once. Returns the shards that validation reads.

        That is all files that are held out, and groups until each side has a window, and training
        has `need` tokens in windows.
        """
        held_out = [n for n, source in enumerate(self.sources) if source.held_out]
        with Workers(self.tokenizer, available_cores()) as workers:
            self.counts |= zip(held_out, self.make_here(held_out, workers), strict=True)
            validation = held_out
            for group, shards in enumerate(self.groups):
                lacks_validation = not held_out and not self.has_window(validation)
                if not lacks_validation and self.tokens_in_windows() >= max(need, 1):
                    break
                self.add(group, self.make_here(shards, workers))
                if lacks_validation:
                    validation = validation + shards
        return validation

    def make_here(self, shards, workers):
        """Makes shards in this process, and shows how far it is. Returns their counts."""
        return make_shards(self.sources, shards, self.home, workers, self.holdout, shown=True)

    def tokens_in_windows(self):
        """How many tokens the windows of all groups made so far predict."""
        total = 0
        for ids in self.arrays.values():
            windows = (len(ids) - 1) // self.context  # as data.py has it
            total += windows * self.context
        return total

    def has_window(self, validation):
        """Whether these shards have a window of held-out documents."""
        return sum(self.counts[n]["val_tokens"] for n in validation) > self.context

    def describe(self, validation):
        """What is made, of both sides; validation: the shards that validation reads."""
        shards = {"val": validation, "train": []}
        for group in self.arrays:
            shards["train"] += self.groups[group]

        meta = {"documents": 0, "sha256": {}}
        for side, numbers in shards.items():
            for unit in ("documents", "tokens", "bytes"):
                name = f"{side}_{unit}"
                meta[name] = sum(self.counts[n][name] for n in numbers)
            meta["documents"] += meta[f"{side}_documents"]
            meta["sha256"][side] = self.hash_of(numbers, side)

        meta["train_files"] = sum(self.sources[n].files for n in shards["train"])
        whole_files = [n for n in validation if self.sources[n].held_out]
        meta["val_files"] = sum(self.sources[n].files for n in whole_files)
        all_files = sum(source.files for source in self.sources if not source.held_out)
        meta["later_files"] = all_files - meta["train_files"]
        return meta

    def hash_of(self, shards, side):
        """The sha256 of the checksums that shards have on one side."""
        checksums = "".join(self.counts[n]["sha256"][side] for n in shards)
        return hashlib.sha256(checksums.encode()).hexdigest()

    def check_length(self, meta):
        """Raises ValueError if a side of the corpus is shorter than one window."""
        count = meta["documents"]
        if not count:
            raise ValueError(f"data {self.corpus}: it is empty")
        is_short = {
            "train": self.tokens_in_windows() == 0,
            "val": meta["val_tokens"] <= self.context,
        }
        for side, name in (("train", "training"), ("val", "validation")):
            if is_short[side]:
                have = f"{meta[f'{side}_tokens']} {name} tokens in {count} documents"
                need = f"a window of context {self.context} + 1; give a longer text"
                raise ValueError(f"data {self.corpus}: {have} are too few for {need}")

    # ---- what is made while a run reads ----

    def look_ahead(self, group):
        """Has a group made by another process, if it will be read and is not made yet."""
        cannot = self.closed or not self.makes_groups
        if cannot or group == len(self.groups) or group in self.arrays:
            return
        is_read = self.tokens_in_windows() < self.read_at_most
        if is_read and not are_finished(self.home, self.groups[group]):
            self.start_maker(group)

    def start_maker(self, group):
        """Starts a Maker of a group, unless one works on it. Raises OSError if this is closed."""
        with self.starting:
            if self.closed:
                raise OSError("the text was closed")
            maker = self.makers.get(group)
            if maker is None or not maker.process.is_alive():
                self.makers[group] = Maker(self, self.groups[group])

    def wait_for(self, group):
        """Waits until a group is made, by a Maker or by the process that makes groups."""
        shards = self.groups[group]
        counts = intact_counts_of(self.home, shards)
        while counts is None:
            if self.makes_groups:
                self.start_maker(group)
                self.makers[group].wait()
            elif self.closed:
                raise OSError("the text was closed")
            else:
                time.sleep(PAUSE)
            counts = intact_counts_of(self.home, shards)
        self.makers.pop(group, None)
        self.add(group, counts)

    def close(self):
        """Ends the processes that still make groups. What they have done is kept."""
        with self.starting:
            self.closed = True
        for maker in list(self.makers.values()):
            maker.stop()


# ---- the maker -----------------------------------------------------------------------------------


class Maker:
    """A process that makes the shards of a group, and ends."""

    def __init__(self, text, shards):
        tokenizer = text.tokenizer.flag_here, text.tokenizer.vocab_size
        job = (text.corpus, tokenizer, text.home, shards, text.holdout.largest)
        spawn = multiprocessing.get_context("spawn")  # workers.py says why
        self.pipe, theirs = spawn.Pipe(duplex=False)
        self.process = spawn.Process(target=make_in_process, args=(theirs, *job))
        with starting_processes():
            self.process.start()
        theirs.close()

    def wait(self):
        """Waits until the process has ended, and raises the error that it met."""
        try:
            error = self.pipe.recv()
        except EOFError:
            raise OSError("the process that tokenizes has ended; is the memory full?") from None
        finally:
            self.process.join()
        if isinstance(error, ValueError):
            raise BadInput(error)
        if error:
            raise error

    def stop(self):
        """Ends it as kill -9 does, which costs seconds of its work."""
        self.process.kill()
        self.process.join()


def make_in_process(pipe, corpus, tokenizer, home, shards, largest):
    """What the process does: it makes shards, then sends None, or the error that it met."""
    begin()
    give_way()
    error = None
    try:
        with redirect_stderr(io.StringIO()):  # what is left out was said by the first process
            # The run may have begun long ago: a network that is gone now is waited for.
            sources = in_order(documents.sources(corpus, first_pauses=documents.PAUSES))
        tokenizer = tokenizer_of_flag(*tokenizer)
        if folder_name(corpus, sources, tokenizer) != home.name:
            raise ValueError(f"data {corpus}: its files have changed while they were read")
        with Workers(tokenizer, max(1, available_cores() // 2)) as workers:
            make_shards(sources, shards, home, workers, Holdout(sources, largest))
    except (ValueError, OSError) as reason:
        error = reason
    pipe.send(error)


def give_way():
    """Lets other processes, such as the one that trains, have the cores first."""
    if hasattr(os, "nice"):
        os.nice(10)
