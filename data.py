"""Text to batches: documents -> token ids in flat files -> batch = f(seed, index).

A corpus is a sequence of documents (documents.py). Each is tokenized once, followed by end-of-text, into flat uint16
files, for each source one of training and one of held-out documents, of which a batch reads what it needs. The
held-out 5% are the documents whose hash is smallest, so a document that occurs twice cannot be on both sides; C4 has
some of its own. A window is T+1 consecutive ids; windows overlap in one id, so that every id but the first is predicted
once an epoch. Nothing here has a state: batch `index` of seed `seed` is the same whoever asks, and whenever.

`python data.py c4 --tokens 2b` makes the files before a run asks for them.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from runtime import flags
from runtime.files import UNREADABLE, digest, locked, named, write_file
from text import documents
from text.tokenizer import cores, encoders, tokenizer

HELD_OUT = 0.05  # fraction of the documents that only validation reads
SMALL = 2**28  # bytes of a corpus that is read twice, so that it is this fraction exactly
LARGE = 2**22  # bytes of a source for which it pays to start processes
CHUNK = 64  # documents that are tokenized at a time
SAVE_SECONDS = 10  # from one record of what is done to the next


class Corpus(NamedTuple):
    """A tokenized corpus."""

    train: "Joined"  # uint16 ids
    val: "Joined"  # uint16 ids of the held-out documents
    meta: dict  # counts of documents, tokens and bytes, and the sha256 of both sides


class Joined:
    """Files of uint16 ids below vocab_size one behind another, as an array of which slices can be read.

    No file stays open. A slice raises OSError where a file ends early or has an id that is none.
    """

    def __init__(self, paths, vocab_size):
        ends = np.cumsum([Path(path).stat().st_size // 2 for path in paths]).tolist()
        self.parts, self.vocab_size = list(zip(paths, [0, *ends[:-1]], ends, strict=True)), vocab_size

    def __len__(self):
        return self.parts[-1][2] if self.parts else 0

    def __getitem__(self, where):
        start, stop, _ = where.indices(len(self))
        cut = [(path, max(start, a) - a, min(stop, b) - a) for path, a, b in self.parts]
        some = [self.read(path, i, j - i) for path, i, j in cut if i < j]
        return np.concatenate(some) if some else np.empty(0, np.uint16)

    def read(self, path, start, n):
        ids = np.fromfile(path, np.uint16, n, offset=2 * start)
        if len(ids) < n or ids.max() >= self.vocab_size:
            what = f"it ends early or holds an id that is none of {self.vocab_size}"
            raise OSError(f"{path} is damaged: {what}; remove it, and the same command makes it again")
        return ids


def prepare(corpus, tok, context, need=float("inf"), folder="data"):
    """The corpus as token files in `folder`, of as many of its sources as hold `need` training tokens, if it has them,
    and a window of validation.

    What is not there yet is made; where that was interrupted, it goes on. Of two processes one waits for the other.
    Raises ValueError where the corpus is missing, empty, not text, or shorter than a window of `context` + 1 tokens on
    either side; then nothing is left behind, unless it was there before.
    """
    found = documents.sources(corpus)
    about = [[[s.name, s.stamp] for s in found], tok.name, tok.vocab_size, HELD_OUT, documents.PIECE]
    key = digest(about)[:12]
    home, shards = Path(folder) / f"{Path(corpus).stem}-{tok.name}-{key}", []
    with locked(home / "lock"), encoders(tok, cores()) as encoded:
        new, read_all = not any(home.glob("*.json")) and not any(home.glob("*.progress")), False
        try:
            held_out, have = rule(found), 0
            for i, source in enumerate(sorted(found, key=lambda s: not s.held_out)):
                if source.held_out or have < need or sum(s["val_tokens"] for s in shards) <= context:
                    shards.append(shard(source, tok, encoded, held_out, home / f"{i:05}", have, need))
                    have += shards[-1]["train_tokens"]
            read_all = True
            meta = {name: sum(s[name] for s in shards) for name in shards[0] if name != "sha256"}
            check(corpus, meta, context)
        except ValueError:
            if new and (read_all or not shards):  # what a later bad file follows stays
                shutil.rmtree(home, ignore_errors=True)
                with suppress(OSError):
                    os.rmdir(folder)  # where it is empty
            raise
    hashes = {side: "".join(s["sha256"][side] for s in shards) for side in ("train", "val")}
    sides = (Joined([home / f"{i:05}.{side}.bin" for i in range(len(shards))], tok.vocab_size) for side in hashes)
    return Corpus(*sides, meta | {"sha256": {k: hashlib.sha256(v.encode()).hexdigest() for k, v in hashes.items()}})


def rule(found):
    """Of a text, whether it is held out.

    No text is where whole sources are. Otherwise the 5% with the smallest hashes: exactly, and at least one, of a
    corpus below SMALL bytes; of a larger one those below 5% of all hashes, for which nobody must have seen them all.
    """
    of = lambda text: hashlib.sha256(text.encode()).digest()[:8]

    @lru_cache(maxsize=1)  # asked for when the first text comes: not where all is done
    def largest():
        if any(source.held_out for source in found):
            return b""
        if sum(source.size for source in found) > SMALL:
            return int(HELD_OUT * 2**64).to_bytes(8, "big")
        digests = sorted({of(text) for source in found for text in source.read()})
        return digests[max(1, round(HELD_OUT * len(digests))) - 1] if len(digests) > 1 else b""

    return lambda text: largest() != b"" and of(text) <= largest()


def shard(source, tok, encoded, held_out, path, have, need):
    """The counts of one source's token files, path.train.bin and path.val.bin, which are made where they are not."""
    done, progress = Path(f"{path}.json"), Path(f"{path}.progress")
    if done.exists():
        progress.unlink(missing_ok=True)  # or damaged bytes would count as done; a kill may have left it
        meta = read(done)
        if meta and all(checksum(f"{path}.{side}.bin") == meta["sha256"][side] for side in ("train", "val")):
            return meta
        print(f"{path}: a token file is damaged; it is made again", file=sys.stderr)
        done.unlink()
    meta = write(source, tok, encoded, held_out, path, have, need)
    meta["sha256"] = {side: checksum(f"{path}.{side}.bin") for side in ("train", "val")}
    record(done, meta)
    progress.unlink()
    return meta


def record(path, meta):
    """Writes counts, with a hash of what they are."""
    write_file(path, lambda f: f.write(json.dumps(meta | {"check": digest(meta)}).encode()))


def read(path):
    """The counts that were recorded; None where there are none, or others than were written."""
    with suppress(*UNREADABLE):
        meta = dict(json.loads(path.read_text()))
        return meta if meta.pop("check", None) == digest(meta) else None


def checksum(path):
    """The sha256 of a file; None where there is none."""
    with suppress(FileNotFoundError), open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write(source, tok, encoded, held_out, path, have, need):
    """Tokenizes a source, going on where an earlier call was interrupted. Returns the counts of what it wrote."""
    progress, sides = Path(f"{path}.progress"), {side: Path(f"{path}.{side}.bin") for side in ("train", "val")}
    meta = {"documents": 0} | {f"{side}_{unit}": 0 for side in sides for unit in ("tokens", "bytes")}
    meta = read(progress) or meta
    size = lambda side: sides[side].stat().st_size if sides[side].exists() else 0
    if any(size(side) < 2 * meta[f"{side}_tokens"] for side in sides):  # what was counted is not all there
        meta = dict.fromkeys(meta, 0)
    texts, saved = islice(source.read(), meta["documents"], None), time.monotonic()
    with named(path), ExitStack() as stack:
        out = {side: stack.enter_context(open(file, "ab")) for side, file in sides.items()}
        total = None if need == float("inf") else need
        bar = stack.enter_context(tqdm(desc=source.name, unit=" tokens", unit_scale=True, total=total, disable=None))
        for side, f in out.items():
            f.truncate(2 * meta[f"{side}_tokens"])
        chunks = iter(lambda: list(islice(texts, CHUNK)), [])
        alone = tok.name == "bytes" or 0 < source.size < LARGE
        work = ((chunk, map(tok.encode, chunk)) for chunk in chunks) if alone else encoded(chunks)
        for chunk, chunk_ids in stack.enter_context(closing(work)):
            for text, ids in zip(chunk, chunk_ids, strict=True):
                side = "val" if source.held_out or held_out(text) else "train"
                out[side].write(ids.tobytes() + np.uint16(tok.end_of_text).tobytes())
                meta[f"{side}_tokens"] += len(ids) + 1
                meta[f"{side}_bytes"] += len(text.encode())
            meta["documents"] += len(chunk)
            bar.n = have + meta["train_tokens"]
            bar.refresh()
            if time.monotonic() - saved > SAVE_SECONDS:
                keep(out, progress, meta)
                saved = time.monotonic()
        keep(out, progress, meta)
    return meta


def keep(out, progress, meta):
    """What was written is on disk before it is counted."""
    for f in out.values():
        f.flush()
        os.fsync(f.fileno())
    record(progress, meta)


def check(corpus, meta, context):
    """Raises ValueError where a side of the corpus is shorter than one window."""
    if not meta["documents"]:
        raise ValueError(f"data {corpus}: it is empty")
    for side, name in (("train", "training"), ("val", "validation")):
        if meta[f"{side}_tokens"] < context + 1:
            have = f"{meta[f'{side}_tokens']} {name} tokens in {meta['documents']} documents"
            need = f"a window of context {context} + 1; give a longer text or a smaller --context"
            raise ValueError(f"data {corpus}: {have} are too few for {need}")


def windows(tokens, context):
    """How many windows of context + 1 ids there are in tokens [n]."""
    return (len(tokens) - 1) // context


@lru_cache(maxsize=4)
def order(n, seed, epoch):
    """The permutation of n windows that an epoch of a seed reads: 4 n bytes, all that grows with the corpus."""
    numbers = np.arange(n, dtype=np.uint32)
    np.random.default_rng((seed, epoch)).shuffle(numbers)
    return numbers


def sequences(tokens, context, seed, numbers):
    """The sequences of these numbers, int32 [n, context + 1]: a pure function of its arguments."""
    n = windows(tokens, context)
    places = [divmod(number, n) for number in numbers]  # (epoch, place in it)
    starts = [int(order(n, seed, epoch)[place]) * context for epoch, place in places]
    return np.stack([tokens[s : s + context + 1] for s in starts]).astype(np.int32)


def batch(tokens, context, size, seed, index):
    """Batch number `index` of `size` sequences, int32 [size, context + 1]."""
    return sequences(tokens, context, seed, range(index * size, (index + 1) * size))


class Ahead:
    """index -> read(index), index < end, called in order: a thread reads the next one while the caller is at work."""

    def __init__(self, read, end):
        self.read, self.end, self.thread, self.next = read, end, ThreadPoolExecutor(1), {}
        self.waited = 0.0  # seconds that callers waited

    def __call__(self, index):
        start = time.perf_counter()
        this = self.next.get(index) or self.thread.submit(self.read, index)
        self.next = {i: self.thread.submit(self.read, i) for i in [index + 1] if i < self.end}
        batch = this.result()
        self.waited += time.perf_counter() - start
        return batch


@dataclass(frozen=True)
class Config:
    """What to prepare."""

    tokens: int = 2_000_000_000  # training tokens at least, if the corpus has them: sources are taken whole
    tokenizer: str = "gpt2"  # bytes | gpt2
    vocab_size: int = 0  # ids; default 256 for bytes, 32000 for gpt2

    def __post_init__(self):
        if self.tokens < 1:
            raise ValueError(f"tokens is {self.tokens}; it must be at least 1")


def main(argv=None):
    """Runs the command line. Status 0, or 2 with one line said of bad input, or 1 of a failure of the machine."""
    corpus, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if corpus.startswith("-"):
        corpus, words = "", [corpus, *words]
    try:
        config = Config(**flags.parse(words, flags.fields_of(Config), vars(Config()), __doc__))
        made = prepare(corpus, tokenizer(config.tokenizer, config.vocab_size), 1, config.tokens)
    except (ValueError, OSError) as error:
        print(f"data.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("data.py: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    train, val = (f"{made.meta[f'{side}_tokens']:,}" for side in ("train", "val"))
    print(f"{made.meta['documents']:,} documents: {train} tokens to train on, {val} held out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
