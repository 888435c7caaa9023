"""Turns documents into token ids, a chunk of documents at a time (formats.py).

A document is on one of two sides, for training or for validation; its hash decides which.

Nearly all the time of preparing a text goes into this work. It depends on no other chunk, so many
processes can share it (workers.py). The process that shares it out only cuts the file into chunks,
and writes down what comes back.
"""

import hashlib
from typing import NamedTuple

import numpy as np

SIDES = ("train", "val")
# What the largest hash may be that is held out for validation:
ALL = b"\xff" * 8  # no hash is larger
NONE = b""  # every hash is larger


class Encoded(NamedTuple):
    """The documents that a chunk has on one side."""

    documents: int  # how many
    size: int  # bytes of their text in UTF-8
    ids: np.ndarray  # uint16 [n]; end-of-text follows each document


def encode(tokenizer, chunk, largest):
    """{side: Encoded} of a chunk. Held out are documents whose hash is `largest` at most."""
    texts = {side: [] for side in SIDES}
    for text in chunk:
        side = "val" if hash_of(text) <= largest else "train"
        texts[side].append(text)
    return {side: encode_texts(tokenizer, texts[side]) for side in SIDES}


def encode_texts(tokenizer, texts):
    """A list of texts as Encoded."""
    end_of_text = np.array([tokenizer.end_of_text], np.uint16)
    size = 0
    ids = [np.empty(0, np.uint16)]  # so that no texts give no ids
    for text in texts:
        size += len(text.encode())
        ids += [tokenizer.encode(text), end_of_text]
    return Encoded(len(texts), size, np.concatenate(ids))


def hashes(_, chunk):
    """The hashes of a chunk's documents, a set. Workers pass a tokenizer, which is not needed."""
    return set(map(hash_of, chunk))


def hash_of(text):
    """8 bytes that depend on the whole text and on nothing else."""
    return hashlib.sha256(text.encode()).digest()[:8]
