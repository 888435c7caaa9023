"""How text becomes token ids, and ids become text again.

A vocabulary is a numbered list of V pieces of text. A tokenizer cuts a text into pieces of its
vocabulary and writes each as its number, its id. There are two:

`bytes` has the 256 values of a byte. Any text in UTF-8 is a sequence of them, about one a letter.

`gpt2` is byte-pair encoding: it starts from the bytes, and again and again merges two neighbours
into one piece, first the pair that comes first in a list of merges. OpenAI made that list by always
merging the most frequent pair of a large text. So its beginning is a smaller vocabulary of the same
kind, and V can be any number from 257 to 50,257. An English word is often one piece.

One id of V is no text: it follows each document and says that the document has ended.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import tiktoken

END = "<|endoftext|>"  # tiktoken's name for the id that ends a document
PIECE = 100_000  # characters encoded at a time: GPT-2's pattern fails on a million blanks


class Tokenizer(NamedTuple):
    """A vocabulary, and the two functions between text and ids."""

    name: str
    vocab_size: int  # ids, V
    end_of_text: int  # the id that follows each document
    encode: Callable  # str -> uint16 [n]
    decode: Callable  # ids [n] -> str


def tokenizer(name, vocab_size=0):
    """The tokenizer called `name`, bytes or gpt2, with `vocab_size` ids.

    0 stands for the usual number: 256 for bytes, 32,000 for gpt2. Raises ValueError for another
    name, for a number that the tokenizer cannot have, and where gpt2's vocabulary is out of reach.
    """
    if name == "bytes":
        return bytes_tokenizer(vocab_size or 256)
    if name == "gpt2":
        return gpt2_tokenizer(vocab_size or 32_000)
    raise ValueError(f"tokenizer is {name!r}; valid: bytes, gpt2")


@lru_cache(maxsize=1)
def bytes_tokenizer(vocab_size):
    """The values of UTF-8's bytes. The zero byte does not occur in text; it ends a document."""
    if vocab_size != 256:
        raise ValueError(f"vocab_size is {vocab_size}; tokenizer bytes has 256 ids")

    def encode(text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(ids):
        return np.asarray(ids, np.uint8).tobytes().decode(errors="replace")

    return Tokenizer("bytes", vocab_size, end_of_text=0, encode=encode, decode=decode)


def gpt2_tokenizer(vocab_size):
    """GPT-2's bytes and first merges, `vocab_size` - 1 pieces. The last id ends a document."""
    if not 257 <= vocab_size <= 50_257:
        raise ValueError(f"vocab_size is {vocab_size}; tokenizer gpt2 has 257 to 50257 ids")
    return cut(gpt2(), vocab_size)


@lru_cache(maxsize=8)  # it takes a while, and every run of a grid asks for the same one
def cut(whole, vocab_size):
    """The tokenizer with the first pieces of a whole vocabulary."""
    end = vocab_size - 1
    numbered = whole._mergeable_ranks.items()
    pieces = {piece: number for piece, number in numbered if number < end}
    vocabulary = tiktoken.Encoding(
        "cut", pat_str=whole._pat_str, mergeable_ranks=pieces, special_tokens={END: end}
    )

    def encode(text):
        starts = range(0, max(1, len(text)), PIECE)
        parts = [text[start : start + PIECE] for start in starts]
        # Nothing is special in a text: one that contains "<|endoftext|>" does not end there.
        ids = [vocabulary.encode_to_numpy(part, disallowed_special=()) for part in parts]
        return np.concatenate(ids).astype(np.uint16)

    def decode(ids):
        return vocabulary.decode(np.asarray(ids, int).tolist())

    return Tokenizer("gpt2", vocab_size, end_of_text=end, encode=encode, decode=decode)


@lru_cache(maxsize=1)
def gpt2():
    """GPT-2's whole vocabulary, which tiktoken downloads once. Raises ValueError if it cannot."""
    import requests  # here, as it is only for its errors; tiktoken needs it

    try:
        return tiktoken.get_encoding("gpt2")
    except (requests.exceptions.ConnectionError, requests.exceptions.Timeout):
        reason = "no connection to its server"
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0][:100]
    remedy = "without a network, set TIKTOKEN_CACHE_DIR to a folder in which tiktoken has it"
    others = "train.py --model tiny and --tokenizer bytes need no network"
    what = f"tokenizer gpt2: its vocabulary cannot be fetched ({reason})"
    raise ValueError(f"{what}; {remedy}; {others}")
