"""Text to batches: documents -> token ids in flat files -> batch = f(seed, index).

A corpus is a sequence of documents. Each is tokenized once, followed by end-of-text, into data/<name>/train.bin or
val.bin, flat uint16 files that training reads through a memory map. The held-out 5% are the documents whose hash is
smallest, so a document that occurs twice cannot be on both sides. A window is T+1 consecutive ids; windows overlap in
one id, so that every id but the first is predicted once an epoch. Nothing here has a state: batch `index` of seed
`seed` is the same whoever asks, and whenever.
"""

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

HELD_OUT = 0.05  # fraction of the documents that only validation reads
DOCUMENT = 4096  # characters after which a plain text file is cut at the next empty line; at four times that, anywhere


class Tokenizer(NamedTuple):
    """Ids of a text and back."""

    name: str
    vocab_size: int  # ids, V
    end_of_text: int  # the id that follows each document
    encode: Callable  # str -> uint16 [n]
    decode: Callable  # ids [n] -> str


def tokenizer(name, vocab_size=0):
    """The tokenizer called `name`, with `vocab_size` ids (0 = its default). Raises ValueError where there is none such.

    bytes: the 256 values of a UTF-8 byte. Value 0 does not occur in text and stands for end-of-text.
    """
    if name == "gpt2":
        raise ValueError("tokenizer gpt2 is not there yet; valid: bytes")
    if name != "bytes":
        raise ValueError(f"tokenizer is {name!r}; valid: bytes")
    if vocab_size not in (0, 256):
        raise ValueError(f"vocab_size is {vocab_size}; tokenizer bytes has 256 ids")
    encode = lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
    return Tokenizer(name, 256, 0, encode, lambda ids: bytes(int(i) for i in ids).decode(errors="replace"))


def files(corpus):
    """The files of a corpus, in order. Raises ValueError where there are none.

    stdlib: the .py files of the running Python's standard library, without tests. Otherwise a path to a .txt file.
    """
    if corpus == "c4":
        raise ValueError("data c4 is not there yet; valid: --model tiny, or --data FILE.txt --tokenizer bytes")
    if corpus != "stdlib":
        path = Path(corpus)
        if path.suffix != ".txt":
            raise ValueError(f"data is {corpus!r}; valid: stdlib, or the path of a .txt file")
        if not path.is_file():
            raise ValueError(f"data {corpus}: there is no such file")
        return [path]
    return library(Path(sysconfig.get_path("stdlib")))


@lru_cache(maxsize=1)
def library(root):
    """The .py files below the folder of a standard library, in order. Raises ValueError where there are none."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    found = [p for p in sorted(root.rglob("*.py")) if skip.isdisjoint(p.relative_to(root).parts)]
    found = [p for p in found if not p.name.startswith("_sysconfigdata")]  # written by the build, not by a person
    if not found:
        raise ValueError(f"data stdlib: no .py files in {root}; give the path of a .txt file")
    return found


def documents(paths):
    """The documents of the files, one str at a time: a .py file is one, a .txt file is cut into some: see DOCUMENT.

    Raises ValueError where a file is not text.
    """
    for path in paths:
        part, size, cut = [], 0, path.suffix == ".txt"
        try:
            with open(path, encoding="utf-8") as f:
                for line in iter(lambda: f.readline(DOCUMENT), ""):
                    if "\0" in line:
                        raise ValueError(f"data {path}: not text: it holds a zero byte")
                    part.append(line)
                    size += len(line)
                    if cut and (size >= DOCUMENT and not line.strip() or size >= 4 * DOCUMENT):
                        yield "".join(part)
                        part, size = [], 0
        except UnicodeDecodeError as error:
            raise ValueError(f"data {path}: not text: {error.reason} in UTF-8 at byte {error.start}") from None
        if "".join(part).strip():
            yield "".join(part)


class Corpus(NamedTuple):
    """A tokenized corpus."""

    train: np.ndarray  # uint16 ids, memory-mapped
    val: np.ndarray  # uint16 ids of the held-out documents, memory-mapped
    meta: dict  # counts of documents, tokens and bytes, and the sha256 of the two files


def prepare(corpus, tok, context, folder="data"):
    """The corpus as token files in `folder`, made at the first call and found again later.

    Raises ValueError where the corpus is missing, empty, not text, or shorter than a window of `context` + 1 tokens on
    either side; then nothing is left behind.
    """
    paths = files(corpus)
    stats = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    key = hashlib.sha256(json.dumps([stats, tok.name, tok.vocab_size, HELD_OUT, DOCUMENT]).encode()).hexdigest()[:12]
    home = Path(folder) / f"{Path(corpus).stem}-{tok.name}-{key}"
    if not home.exists():
        os.makedirs(folder, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder))
        try:
            check(corpus, write(paths, tok, draft), context)
            try:
                os.replace(draft, home)
            except OSError:
                if not home.exists():  # where it does, another process was faster
                    raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            with suppress(OSError):
                os.rmdir(folder)  # where it is empty
    meta = json.loads((home / "meta.json").read_text())
    check(corpus, meta, context)
    return Corpus(*(np.memmap(home / f"{side}.bin", np.uint16, "r") for side in ("train", "val")), meta)


def write(paths, tok, home):
    """Tokenizes the documents of `paths` into home/train.bin and val.bin; returns the counts of meta.json."""
    digest = lambda text: hashlib.sha256(text.encode()).digest()[:8]
    digests = sorted({digest(text) for text in documents(paths)})
    held_out = set(digests[: max(1, round(HELD_OUT * len(digests)))]) if len(digests) > 1 else set()
    meta = {"documents": len(digests)}
    hashes = {side: hashlib.sha256() for side in ("train", "val")}
    meta |= {f"{side}_{unit}": 0 for side in hashes for unit in ("tokens", "bytes")}
    with open(home / "train.bin", "wb") as train, open(home / "val.bin", "wb") as val:
        for text in documents(paths):
            side, out = ("val", val) if digest(text) in held_out else ("train", train)
            ids = np.append(tok.encode(text), np.uint16(tok.end_of_text)).tobytes()
            out.write(ids)
            hashes[side].update(ids)
            meta[f"{side}_tokens"] += len(ids) // 2
            meta[f"{side}_bytes"] += len(text.encode())
    meta["sha256"] = {side: h.hexdigest() for side, h in hashes.items()}
    (home / "meta.json").write_text(json.dumps(meta, indent=1))
    return meta


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
    """The permutation of n windows that epoch `epoch` of seed `seed` reads."""
    return np.random.default_rng((seed, epoch)).permutation(n)


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
