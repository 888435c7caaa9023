"""Token files: a corpus is tokenized once, into flat files of ids of which a run reads slices.

Each source of a corpus becomes a shard: a file of ids for training, one for validation, and a
record of their counts and checksums. An id takes 16 bits; after each document comes end-of-text.

    data/c4-gpt2-3fd308961059/   corpus, tokenizer, and a hash (groups.folder_name)
        lock                     held by the process that works here
        00000.train.bin          ids of the first source's training documents
        00000.val.bin            ids of its validation documents
        00000.json               their counts and checksums: this shard is finished
        00001.train.bin
        00001.val.bin
        00001.progress           counts of what is on disk so far: this shard is being written

Nothing is counted before it is on disk. So an interruption, kill -9 included, costs seconds of
tokenizing: the next process cuts the files to what was counted, skips as many documents of the
source, and goes on from there. A shard whose checksums are wrong is made again.

A corpus may bring whole files of validation documents, as C4 does. Training reads none of these
files; but a text that is in one of them and in another file, too, is on both sides. Otherwise the
validation documents are those with the smallest hashes, 5% of all different ones. A hash depends on
nothing but the text, so then a document that occurs twice is on one side.

Which shards are made, and when, is decided in groups.py.
"""

import hashlib
import json
import os
import sys
import time
from contextlib import closing, suppress
from functools import cache, partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from runtime.command import check_stopped
from runtime.files import UNREADABLE, digest, locked, named, write_text
from text.encoding import ALL, NONE, SIDES, encode, hashes

COUNTS = (  # of a shard, for each side
    "train_documents",
    "train_tokens",
    "train_bytes",
    "val_documents",
    "val_tokens",
    "val_bytes",
)
HELD_OUT = 0.05  # fraction of the documents that only validation reads
SMALL = 2**28  # bytes; of a smaller corpus exactly this fraction is held out, so it is read twice
LARGE = 2**22  # bytes of a source from which on it pays to start processes
SAVE_SECONDS = 10  # from one record of progress to the next


# ---- shards --------------------------------------------------------------------------------------


def make_shards(sources, numbers, home, workers, holdout, shown=False):
    """Makes the shards of these numbers that are not there. Returns the counts of all, a list.

    home: their folder; sources: all of the corpus; holdout: the documents that are held out; shown:
    whether a bar shows the progress, where there is a terminal. This function waits while another
    process works in that folder.
    """
    found = intact_counts_of(home, numbers)
    if found is not None:  # there is nothing to wait for
        return found
    made = []
    with locked(home / "lock"):
        for number in numbers:
            path = shard_path(home, number)
            counts = intact_counts_or_reset(path)
            if counts is None:
                counts = tokenize(sources[number], path, workers, holdout, shown)
                record_finished(path, counts)
            made.append(counts)
    return made


def intact_counts_of(home, numbers):
    """The counts of these shards, a list; None if not all are finished and as they were written."""
    found = [intact_counts(shard_path(home, number)) for number in numbers]
    return None if None in found else found


def are_finished(home, numbers):
    """Whether these shards are finished. They may have been damaged since."""
    return all(Path(f"{shard_path(home, number)}.json").exists() for number in numbers)


def shard_path(home, number):
    """The path of a shard, to which the endings of its files are added."""
    return home / f"{number:05}"


def ids_of(home, numbers, side, vocab_size):
    """The ids that these shards have on one side, as one array."""
    paths = [f"{shard_path(home, number)}.{side}.bin" for number in numbers]
    return Joined(paths, vocab_size)


def intact_counts_or_reset(path):
    """What `intact_counts` returns.

    If a shard is damaged, says so, and removes its record, so that it is made again.
    """
    done = Path(f"{path}.json")
    if not done.exists():
        return None
    # A kill may have left counts of progress. If the files are damaged, they are no longer true.
    Path(f"{path}.progress").unlink(missing_ok=True)
    counts = intact_counts(path)
    if counts is None:
        print(f"{path}: a token file is damaged; it is made again", file=sys.stderr)
        done.unlink()
    return counts


def intact_counts(path):
    """The counts of a shard, or None if it is not finished or is damaged."""
    counts = read_counts(Path(f"{path}.json"))
    if counts and checksums(path) == counts["sha256"]:
        return counts
    return None


def record_finished(path, counts):
    """Records that a shard is finished; adds its checksums to the counts."""
    counts["sha256"] = checksums(path)
    write_counts(Path(f"{path}.json"), counts)
    Path(f"{path}.progress").unlink()


def tokenize(source, path, workers, holdout, shown):
    """Tokenizes a source, or the rest of it, into the files of a shard; returns their counts."""
    counts = counts_so_far(path)
    largest = ALL if source.held_out else holdout.find(workers)
    with (
        named(path),
        open(f"{path}.train.bin", "ab") as train,
        open(f"{path}.val.bin", "ab") as val,
        closing(source.chunks()) as chunks,
        progress_bar(source.name, count_tokens(counts), shown) as bar,
    ):
        files = {"train": train, "val": val}
        for side in SIDES:
            files[side].truncate(2 * counts[f"{side}_tokens"])
        unread = skip(chunks, count_documents(counts))
        saved = time.monotonic()
        for encoded in map_chunks(partial(encode, largest=largest), unread, source.size, workers):
            check_stopped()
            for side in SIDES:
                files[side].write(encoded[side].ids)
                counts[f"{side}_documents"] += encoded[side].documents
                counts[f"{side}_tokens"] += len(encoded[side].ids)
                counts[f"{side}_bytes"] += encoded[side].size
            bar.update(count_tokens(counts) - bar.n)
            if time.monotonic() - saved > SAVE_SECONDS:
                save_progress(path, files, counts)
                saved = time.monotonic()
        save_progress(path, files, counts)
    return counts


def counts_so_far(path):
    """The counts of what an earlier process left of a shard; zeros if not all of it is there."""
    nothing = dict.fromkeys(COUNTS, 0)
    counts = read_counts(Path(f"{path}.progress")) or nothing
    for side in SIDES:
        file = Path(f"{path}.{side}.bin")
        size = file.stat().st_size if file.exists() else 0
        if size < 2 * counts[f"{side}_tokens"]:
            return nothing
    return counts


def save_progress(path, files, counts):
    """Records progress, once all that it counts is on disk."""
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    write_counts(Path(f"{path}.progress"), counts)


def count_documents(counts):
    """The documents of both sides."""
    return counts["train_documents"] + counts["val_documents"]


def count_tokens(counts):
    """The tokens of both sides."""
    return counts["train_tokens"] + counts["val_tokens"]


def skip(chunks, count):
    """The chunks without their first `count` documents."""
    for chunk in chunks:
        if count:
            documents = list(chunk)
            chunk = documents[count:]
            count -= len(documents) - len(chunk)
        if chunk:
            yield chunk


def map_chunks(work, chunks, size, workers):
    """Yields work(tokenizer, chunk) for each chunk, in order; many processes share the work.

    size: bytes of the source. Where tokenizing is quick, or the text small, this process does it.
    """
    if workers.tokenizer.name == "bytes" or size < LARGE:
        return (work(workers.tokenizer, chunk) for chunk in chunks)
    return workers.map(work, chunks)


def progress_bar(name, start, shown):
    """A bar of the tokens of a source, from `start` on, where there is a terminal."""
    disable = None if shown else True  # None: where standard error is no terminal
    return tqdm(desc=name, initial=start, unit=" tokens", unit_scale=True, disable=disable)


# ---- validation ----------------------------------------------------------------------------------


class Holdout:
    """The set of documents that are held out by their hashes.

    It is empty if whole sources are held out. Of a corpus below SMALL bytes it is exactly the 5%
    with the smallest hashes, one at least if there are two documents; this takes a pass over the
    whole corpus. Of a larger one it is the documents whose hash is below 5% of all possible hashes.
    """

    def __init__(self, sources, largest=None):
        """largest: what `find` returns, where another process has found it."""
        self.sources = sources
        self.largest = largest

    def find(self, workers):
        """The largest hash that is held out, 8 bytes, or NONE.

        It is found once, when the first shard is made: not where all shards are finished.
        """
        if self.largest is None:
            self.largest = self.compute(workers)
        return self.largest

    def compute(self, workers):
        """What `find` returns."""
        if any(source.held_out for source in self.sources):
            return NONE
        if sum(source.size for source in self.sources) > SMALL:
            return int(HELD_OUT * 2**64).to_bytes(8, "big")
        found = set()
        for source in self.sources:
            with closing(source.chunks()) as chunks:
                for of_chunk in map_chunks(hashes, chunks, source.size, workers):
                    found |= of_chunk
        if len(found) < 2:
            return NONE
        count = max(1, round(HELD_OUT * len(found)))
        return sorted(found)[count - 1]


# ---- records -------------------------------------------------------------------------------------


def write_counts(path, counts):
    """Writes counts, with a hash of them."""
    write_text(path, json.dumps(counts | {"check": digest(counts)}))


def read_counts(path):
    """The counts that were recorded; None if there are none, or others than were written."""
    with suppress(*UNREADABLE):
        counts = dict(json.loads(path.read_text(encoding="utf-8")))
        if counts.pop("check", None) == digest(counts):
            return counts
    return None


def checksums(path):
    """The sha256 of each file of a shard; None for one that is not there."""
    return {side: checksum(f"{path}.{side}.bin") for side in SIDES}


def checksum(path):
    """The sha256 of a file, computed once in a process as long as the file does not change."""
    with suppress(FileNotFoundError):
        stat = os.stat(path)
        return checksum_of_version(path, stat.st_size, stat.st_mtime_ns)
    return None


@cache
def checksum_of_version(path, size, time):
    """The sha256 of a file, which has this size and time."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- reading -------------------------------------------------------------------------------------


class Joined:
    """Files of ids one behind another, as one array of which slices are read: `joined[a:b]`.

    A slice is read from disk, uint16 [b - a]; nothing is kept in memory and no file stays open. It
    raises OSError if a file ends early, or holds a number that is no id: vocab_size or larger.
    """

    def __init__(self, paths, vocab_size):
        lengths = [Path(path).stat().st_size // 2 for path in paths]
        self.paths = paths
        self.ends = np.cumsum(lengths, dtype=int)  # places in the array
        self.starts = self.ends - lengths
        self.vocab_size = vocab_size

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, where):
        start, stop, _ = where.indices(len(self))
        found = [np.empty(0, np.uint16)]
        while start < stop:
            number = np.searchsorted(self.ends, start, side="right")  # of the file that has `start`
            end = min(stop, self.ends[number])
            first = start - self.starts[number]
            found.append(self.read(self.paths[number], first, end - start))
            start = end
        return np.concatenate(found)

    def read(self, path, start, count):
        """`count` ids of one file."""
        ids = np.fromfile(path, np.uint16, count, offset=2 * start)
        if len(ids) < count or ids.max() >= self.vocab_size:
            what = f"it ends early or holds an id that is none of {self.vocab_size}"
            remedy = "remove it, and the same command makes it again"
            raise OSError(f"{path} is damaged: {what}; {remedy}")
        return ids
