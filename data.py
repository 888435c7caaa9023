"""How text becomes batches: documents -> ids -> windows -> batch = f(seed, index).

A corpus is a sequence of documents. A tokenizer cuts a document into pieces, the tokens, and writes
each as a number, its id. One more id, end-of-text, follows each document. The ids of all documents,
one behind another, are one long array; validation documents, which are never trained on, have an
array of their own. With one id per byte, the documents "a cat" and "a dog" become

    ids             97 32 99 97 116 0 97 32 100 111 103 0

A window is T + 1 consecutive ids. The model reads the first T, and predicts the last T, each from
the ids before it. The next window begins with the last id of this one. So in the windows every id
but the very first is predicted once. Behind the last window there may be ids, fewer than T, that
are in no window and are never predicted. With T = 4 these are three, 111 103 0:

    window 0        97 32 99 97 116
    window 1                    116 0 97 32 100

An epoch reads all n windows in a random order; the next epoch reads them in another one. Sequences
are the windows in the order in which they are read, and a batch is B sequences, int32 [B, T + 1].
With n = 6 and B = 2:

    epoch             0             1
    sequence          0 1 2 3 4 5   6 7 8 ...
    batch             0   1   2     3   ...

Nothing here has a state. Batch `index` of seed `seed` is the same whoever asks, and whenever. So a
run that is stopped and started again, or spread over several devices, reads the same batches.

`python data.py c4 --tokens 2b` tokenizes a corpus before a run asks for it.
"""

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from runtime import flags
from runtime.command import Stop, blaming_input, command
from text import token_files
from text.tokenizer import tokenizer

# ---- documents -> ids ----------------------------------------------------------------------------


class Corpus(NamedTuple):
    """A tokenized corpus. Its ids are on disk; a slice such as `train[a:b]` reads some of them."""

    train: token_files.Joined  # ids to train on, uint16 [n]
    val: token_files.Joined  # ids of documents that are never trained on: 5%, or whole files
    meta: dict  # the counts and the sha256 of each side: see token_files.make


def prepare(corpus, tok, context, need=float("inf"), folder="data"):
    """The corpus, tokenized into files below `folder`.

    The ids of a document are tok.encode(document), then tok.end_of_text.

    corpus: stdlib (the source code of Python's standard library), c4, or the path of a file or
    folder (text/documents.py). Its files are taken whole, in order, until there are `need` training
    tokens and a window of `context` + 1 validation tokens. C4 has a thousand files.

    What was tokenized before is not tokenized again. What was interrupted goes on where it was
    (text/token_files.py). If two processes ask at once, one waits for the other. Raises ValueError
    if the corpus is missing, empty or not text, or if either side is shorter than a window; then
    only files that were finished before are kept. Raises OSError for a failure of the machine.
    """
    return Corpus(*token_files.make(corpus, tok, context, need, folder))


def describe(meta):
    """What a corpus has on each side, in words. meta: that of a Corpus."""
    return f"to train on: {describe_side(meta, 'train')}; held out: {describe_side(meta, 'val')}"


def describe_side(meta, side):
    """Its files, documents and tokens. Documents may be held out without whole files."""
    files = meta[f"{side}_files"]
    where = amount(files, "file") if files else "of the same files"
    documents = amount(meta[f"{side}_documents"], "document")
    tokens = amount(meta[f"{side}_tokens"], "token")
    return f"{where}, {documents}, {tokens}"


def amount(count, noun):
    """A count and its noun: 1 file, 2,000 files."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


# ---- ids -> windows ------------------------------------------------------------------------------


def windows(tokens, context):
    """How many windows of context + 1 ids there are in tokens [n]."""
    return (len(tokens) - 1) // context


@lru_cache(maxsize=4)
def order(n, seed, epoch):
    """The order in which an epoch reads its n windows: a permutation of 0 .. n - 1, uint32 [n].

    Of the memory that training needs, only this grows with the corpus: 4 bytes per window, for each
    of four orders at most.
    """
    numbers = np.arange(n, dtype=np.uint32)
    np.random.default_rng((seed, epoch)).shuffle(numbers)
    return numbers


# ---- windows -> batches --------------------------------------------------------------------------


def sequences(tokens, context, seed, numbers):
    """The sequences of these numbers, int32 [len(numbers), context + 1]."""
    n = windows(tokens, context)
    found = []
    for number in numbers:
        epoch, place = divmod(number, n)
        start = int(order(n, seed, epoch)[place]) * context
        found.append(tokens[start : start + context + 1])
    return np.stack(found).astype(np.int32)


def batch(tokens, context, size, seed, index):
    """Batch number `index` of `size` sequences, int32 [size, context + 1]."""
    return sequences(tokens, context, seed, range(index * size, (index + 1) * size))


class Ahead:
    """Reads batches before they are asked for: ahead(index) is read(index), for index < end.

    Batches are asked for in order. While the caller works with one, a thread reads the next.
    """

    def __init__(self, read, end):
        self.read = read
        self.end = end
        self.thread = ThreadPoolExecutor(1)
        self.pending = {}  # {index: future of the batch}, of one batch at most
        self.waited = 0.0  # seconds that the caller waited

    def __call__(self, index):
        start = time.perf_counter()
        asked = self.pending.get(index) or self.thread.submit(self.read, index)
        self.pending = {}
        following = index + 1
        if following < self.end:
            self.pending[following] = self.thread.submit(self.read, following)
        batch = asked.result()
        self.waited += time.perf_counter() - start
        return batch


# ---- the command ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """What to prepare."""

    tokens: int = 2_000_000_000  # training tokens at least, as far as the corpus has them
    # bytes | gpt2 | t5 | the path of a .json file of the package tokenizers
    tokenizer: str = "gpt2"
    # ids; default 256 for bytes, 32000 for gpt2 and t5, as many as a .json file has
    vocab_size: int = 0

    def check(self):
        """Raises ValueError if a field has a bad value."""
        flags.check_range(self, ["tokens"], least=1)


ABOUT = "Tokenizes a corpus before a run asks for it: python data.py CORPUS --tokens 2b"


@command
def main(words):
    """Runs the command line."""
    words = words or ["--help"]
    corpus = ""
    if not words[0].startswith("-"):
        corpus = words.pop(0)
    with blaming_input():
        fields = flags.fields_of(Config)
        usage = "%(prog)s CORPUS"
        given = flags.parse(words, {"data.py": fields}, vars(Config()), ABOUT, usage=usage)
        config = Config(**given)
        config.check()
        tok = tokenizer(config.tokenizer, config.vocab_size)
        try:
            meta = prepare(corpus, tok, 1, config.tokens).meta
        except KeyboardInterrupt:
            raise Stop(signal.SIGINT) from None
    print(describe(meta))


if __name__ == "__main__":
    sys.exit(main())
