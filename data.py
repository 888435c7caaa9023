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

A large corpus is cut into groups of files, each with an array and windows of its own. A group is
tokenized when a run comes near it (text/groups.py). A small corpus, below 268 MB, is one group.

An epoch reads all windows: one group after another, and the windows of a group in a random order.
The next epoch has the groups, and their windows, in another order. Sequences are the windows in the
order in which they are read, and a batch is B sequences, int32 [B, T + 1]. With two groups of 4 and
2 windows, and with B = 2:

    epoch             0             1
    group             0       1     1   0
    sequence          0 1 2 3 4 5   6 7 8 ...
    batch             0   1   2     3   ...

Nothing here has a state. Batch `index` of seed `seed` is the same whoever asks, and whenever. So a
run that is stopped and started again, or spread over several devices, reads the same batches, and a
longer run begins with the batches of a shorter one.

`python data.py c4 --tokens 2b` tokenizes a corpus before a run asks for it.
"""

import signal
import sys
import time
from concurrent import futures
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from runtime import flags
from runtime.command import Stop, blaming_input, command
from text import groups, token_files
from text.tokenizer import tokenizer

# ---- documents -> ids ----------------------------------------------------------------------------


class Corpus(NamedTuple):
    """A tokenized corpus. Ids are on disk; a slice such as `val[a:b]` reads some of them."""

    train: groups.Text  # ids to train on: train[i] is the array of group i, uint16 [n]
    val: token_files.Joined  # ids of documents that are never trained on: 5%, or whole files
    meta: dict  # the counts and the sha256 of each side: see groups.make


def prepare(
    corpus, tok, context, need=float("inf"), folder="data", read_at_most=0, makes_groups=True
):
    """The corpus, tokenized into files below `folder` as far as it is needed at once.

    The ids of a document are tok.encode(document), then tok.end_of_text.

    corpus: stdlib (the source code of Python's standard library), c4, or the path of a file or
    folder (text/documents.py). Its groups are taken in order, until their windows of `context` + 1
    have `need` tokens. Later groups are tokenized by another process while the caller reads: until
    there are `read_at_most` tokens, or until the caller ends that with `train.close()`.
    makes_groups: whether this process has them made; if not, it waits until another one has.

    What was tokenized before, by the same path, is not tokenized again. What was interrupted goes
    on where it was (text/token_files.py). If two processes ask at once, one waits for the other.
    Raises ValueError if the corpus is missing, empty or not text, or if either side is shorter than
    a window. If it fails before a file is finished, it removes what it has made. What was there
    before is always kept. Raises OSError for a failure of the machine.
    """
    return Corpus(*groups.make(corpus, tok, context, need, folder, read_at_most, makes_groups))


def describe(meta):
    """What a corpus has on each side, in words. meta: that of a Corpus."""
    return f"to train on: {describe_side(meta, 'train')}; held out: {describe_side(meta, 'val')}"


def describe_side(meta, side):
    """Its files, documents and tokens. Documents may be held out without whole files."""
    files = meta[f"{side}_files"]
    documents = amount(meta[f"{side}_documents"], "document")
    tokens = amount(meta[f"{side}_tokens"], "token")
    if files:
        described = f"{amount(files, 'file')}, {documents}, {tokens}"
    else:
        described = f"{documents} of the same files, {tokens}"
    later = meta["later_files"]
    if side == "train" and later:
        described += f" (and {amount(later, 'file')}, tokenized when needed)"
    return described


def amount(count, noun):
    """A count and its noun: 1 file, 2,000 files."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


# ---- ids -> windows ------------------------------------------------------------------------------


def windows(tokens, context):
    """How many windows of context + 1 ids there are in tokens [n]."""
    return (len(tokens) - 1) // context


@lru_cache(maxsize=4)
def order(n, seed, epoch, group=0):
    """The order in which an epoch reads n windows: a permutation of 0 .. n - 1, uint32 [n].

    Of the memory that training needs, only this grows with a group: 4 bytes per window, for each of
    four orders at most.
    """
    numbers = np.arange(n, dtype=np.uint32)
    np.random.default_rng((seed, epoch, group)).shuffle(numbers)
    return numbers


@lru_cache(maxsize=2)
def order_of_groups(n, seed, epoch):
    """The order in which an epoch reads n groups: the first one as they are, others at random."""
    numbers = np.arange(n)
    if epoch > 0:
        np.random.default_rng((seed, epoch, n)).shuffle(numbers)
    return numbers.tolist()


def find(text, context, seed, number):
    """Where sequence `number` is: its epoch, its group, and its place in the order of the windows.

    text: a sequence of arrays of ids, one for each group. No group behind the sequence is touched
    in the first epoch.
    """
    before = 0  # windows in the groups that are passed
    for group in range(len(text)):
        n = windows(text[group], context)
        if number < before + n:
            return 0, group, number - before
        before += n
    epoch, number = divmod(number, before)
    for group in order_of_groups(len(text), seed, epoch):
        n = windows(text[group], context)
        if number < n:
            break
        number -= n
    return epoch, group, number


# ---- windows -> batches --------------------------------------------------------------------------


def sequences(text, context, seed, numbers):
    """The sequences of these numbers, int32 [len(numbers), context + 1]; text: as for `find`."""
    found = []
    for number in numbers:
        epoch, group, place = find(text, context, seed, number)
        ids = text[group]
        start = int(order(windows(ids, context), seed, epoch, group)[place]) * context
        found.append(ids[start : start + context + 1])
    return np.stack(found).astype(np.int32)


def batch(text, context, size, seed, index):
    """Batch number `index` of `size` sequences, int32 [size, context + 1]; text: as for `find`."""
    return sequences(text, context, seed, range(index * size, (index + 1) * size))


class Ahead:
    """Reads batches before they are asked for: ahead(index) is read(index), for index < end.

    While the caller works with a batch, a thread reads the one after it. If another one is asked
    for, as after a line search that ended early, that was read for nothing. While the caller waits,
    `check` is called every second, which may raise.
    """

    def __init__(self, read, end):
        self.read = read
        self.end = end
        self.thread = futures.ThreadPoolExecutor(1)
        self.pending = {}  # {index: future of the batch}, of one batch at most
        self.waited = 0.0  # seconds that the caller waited

    def __call__(self, index, check=lambda: None):
        start = time.perf_counter()
        asked = self.pending.get(index) or self.thread.submit(self.read, index)
        self.pending = {}
        following = index + 1
        if following < self.end:
            self.pending[following] = self.thread.submit(self.read, following)
        while not futures.wait([asked], timeout=1).done:
            check()
        self.waited += time.perf_counter() - start
        return asked.result()


# ---- the command ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """What to prepare."""

    tokens: int = 2_000_000_000  # training tokens at least, as far as the corpus has them
    # bytes | gpt2 | t5 | the path of a .json file of the package tokenizers
    tokenizer: str = "gpt2"
    # ids; default 256 for bytes, 32000 for gpt2 and t5, for a .json file all that text can have
    vocab_size: int = 0

    def check(self):
        """Raises ValueError if a field has a bad value."""
        flags.check_range(self, ["tokens"], least=1)


ABOUT = "Tokenizes a corpus before a run asks for it: python data.py CORPUS --tokens 2b"


@command
def main(words):
    """Runs the command line."""
    if not words or "--help" in words or "-h" in words:
        corpus, words = "", ["--help"]
    else:
        corpus, *words = words
    with blaming_input():
        if corpus.startswith("-"):
            raise ValueError("the corpus comes first: python data.py CORPUS --tokens 2b")
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
