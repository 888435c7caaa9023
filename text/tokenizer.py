"""How text becomes token ids, and ids become text again.

A vocabulary is a numbered list of V pieces of text. A tokenizer cuts a text into pieces of its
vocabulary and writes each as its number, its id. These are the tokenizers:

`bytes` has the 256 values of a byte. Any text in UTF-8 is a sequence of them, about one a letter.

`gpt2` is byte-pair encoding: it starts from the bytes, and again and again merges two neighbours
into one piece, first the pair that comes first in a list of merges. OpenAI made that list by always
merging the most frequent pair of a large text. So its beginning is a smaller vocabulary of the same
kind, and V can be any number from 257 to 50,257. An English word is often one piece.

`t5` is the tokenizer of the T5 models, which the paper's authors used. It has 32,000 pieces, each
with a probability, and cuts a text into the most probable pieces. It forgets some of the text: any
white space becomes one blank, and a character that it does not know becomes the id of "unknown".

`FILE.json` is any vocabulary in the format of Hugging Face's package `tokenizers`. `t5` is such a
file, too, and these two need that package.

One id of V is no text: it follows each document and says that the document has ended.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken

# GPT-2's pattern, which cuts a text into words, numbers, other signs, blanks, and endings like 's.
# The group holds all that needs no look at what follows. So written, tiktoken takes less time.
PATTERN = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s"
END = "<|endoftext|>"  # tiktoken's name for the id that ends a document
ENCODED_AT_ONCE = 100_000  # characters encoded at a time: GPT-2's pattern fails on a million blanks
T5 = ("google-t5/t5-base", "tokenizer.json")  # a repository on Hugging Face, and a file of it
ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]")  # in other files
MOST = 2**16  # ids that fit into the 16 bits of a token file
DIGITS = 12  # of the digest of a file, which stand for its content


class Tokenizer(NamedTuple):
    """A vocabulary, and the two functions between text and ids."""

    name: str  # with vocab_size, says which vocabulary it is; fit for the name of a folder
    flag: str  # with vocab_size, makes it again, or fails if its file has changed
    flag_here: str  # the same for a process of this machine, which then needs no network
    vocab_size: int  # ids, V
    end_of_text: int  # the id that follows each document
    encode: Callable  # str -> uint16 [n]
    decode: Callable  # ids [n] -> str


def tokenizer(flag, vocab_size=0):
    """The tokenizer of --tokenizer bytes | gpt2 | t5 | FILE.json, with `vocab_size` ids.

    0 stands for the usual number: 256 for bytes, 32,000 for gpt2, and for a file all ids that its
    text can have, which are 32,000 for t5. A digest may follow a file, as in a.json#0123456789ab:
    then the file must be the one with this digest. Raises ValueError for another name, for a number
    that the tokenizer cannot have, for a file that is missing, damaged or another one, and where a
    vocabulary or the package that reads it is out of reach.
    """
    if flag == "bytes":
        return bytes_tokenizer(vocab_size or 256)
    if flag == "gpt2":
        return gpt2_tokenizer(vocab_size or 32_000)
    source, expected = split_digest(flag)
    if source == "t5" or source.endswith(".json"):
        return file_tokenizer(source, expected, vocab_size)
    raise ValueError(f"tokenizer is {flag!r}; valid: bytes, gpt2, t5, or the path of a .json file")


@lru_cache(maxsize=1)
def bytes_tokenizer(vocab_size):
    """The values of UTF-8's bytes. The zero byte does not occur in text; it ends a document."""
    if vocab_size != 256:
        raise ValueError(f"vocab_size is {vocab_size}; tokenizer bytes has 256 ids")

    def encode(text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(ids):
        return np.asarray(ids, np.uint8).tobytes().decode(errors="replace")

    return Tokenizer("bytes", "bytes", "bytes", vocab_size, 0, encode, decode)


def gpt2_tokenizer(vocab_size):
    """GPT-2's bytes and first merges, `vocab_size` - 1 pieces. The last id ends a document."""
    if not 257 <= vocab_size <= 50_257:
        raise ValueError(f"vocab_size is {vocab_size}; tokenizer gpt2 has 257 to 50257 ids")
    return first_pieces(gpt2(), vocab_size)


@lru_cache(maxsize=8)  # it takes a while, and every run of a grid asks for the same one
def first_pieces(whole, vocab_size):
    """The tokenizer with the first pieces of a whole vocabulary."""
    end = vocab_size - 1
    numbered = whole._mergeable_ranks.items()
    pieces = {piece: number for piece, number in numbered if number < end}
    vocabulary = tiktoken.Encoding(
        "cut", pat_str=PATTERN, mergeable_ranks=pieces, special_tokens={END: end}
    )

    def encode(text):
        starts = range(0, max(1, len(text)), ENCODED_AT_ONCE)
        parts = [text[start : start + ENCODED_AT_ONCE] for start in starts]
        # Nothing is special in a text: one that contains "<|endoftext|>" does not end there.
        ids = [vocabulary.encode_to_numpy(part, disallowed_special=()) for part in parts]
        return np.concatenate(ids).astype(np.uint16)

    def decode(ids):
        return vocabulary.decode(np.asarray(ids, int).tolist())

    return Tokenizer("gpt2", "gpt2", "gpt2", vocab_size, end, encode, decode)


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


# ---- files of the package `tokenizers` -----------------------------------------------------------


def split_digest(flag):
    """A file, and the digest that follows it after a "#", or "" if there is none."""
    found = re.fullmatch(rf"(.*)#([0-9a-f]{{{DIGITS}}})", flag, re.DOTALL)
    return found.groups() if found else (flag, "")


def file_tokenizer(source, expected, vocab_size):
    """The tokenizer of a file: source is t5 or a path, expected the digest that it must have."""
    tokenizers_package(source)  # before anything is downloaded for it
    path = t5_file() if source == "t5" else source
    if not os.path.isfile(path):
        raise ValueError(f"tokenizer {path}: there is no such file")
    content = Path(path).read_bytes()
    digest = digest_of(content)
    if expected and digest != expected:
        change = f"it has the digest {digest}, and {expected} is asked for"
        raise ValueError(f"tokenizer {source} is not the same file any more: {change}")
    return read_tokenizer(source, path, content, vocab_size)


def digest_of(content):
    """A text that stands for the content of a file."""
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def tokenizers_package(source):
    """The package `tokenizers`. Raises ValueError if it is not installed."""
    # A token file is made by many processes, so each of them needs one thread.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers  # here, as only such a file needs it
    except ImportError:
        remedy = "pip install tokenizers"
        raise ValueError(f"tokenizer {source} needs the package tokenizers: {remedy}") from None
    return tokenizers


@lru_cache(maxsize=8)  # it takes a while, and every run of a grid asks for the same one
def read_tokenizer(source, path, content, vocab_size):
    """The tokenizer that the bytes of a file describe. source: as the user says it; path: its path.

    The file names pieces that are no text, such as "</s>", and the package would find them in a
    text. So a text is encoded by a copy of the vocabulary in which these pieces are hidden.
    """
    whole = parse(source, content)
    ids = whole.get_vocab()  # {piece: id}
    end = find_end(source, ids)
    hidden = {end}
    for token in whole.get_added_tokens_decoder().values():
        if token.special:
            hidden.add(token.content)

    spec = json.loads(content)
    used = [ids[end], unknown_id(spec["model"], ids)]
    used += [number for piece, number in ids.items() if piece not in hidden]
    vocab_size = checked_size(source, vocab_size, least=max(used) + 1)
    copy = json.dumps(hide(spec, hidden))
    vocabulary = parse(source, copy.encode())

    def encode(text):
        ids = []
        for piece in cut_at_blanks(text):
            (found,) = vocabulary.encode_batch_fast([piece])
            ids.append(np.array(found.ids, np.uint16))
        return np.concatenate(ids)

    def decode(ids):
        return whole.decode(np.asarray(ids, int).tolist(), skip_special_tokens=False)

    digest = digest_of(content)
    return Tokenizer(
        name=f"{Path(source).stem[:20]}-{digest}",
        flag=f"{source}#{digest}",
        flag_here=f"{path}#{digest}",
        vocab_size=vocab_size,
        end_of_text=ids[end],
        encode=encode,
        decode=decode,
    )


def parse(source, content):
    """The package's own tokenizer of a file's bytes. Raises ValueError if they are not for it."""
    try:
        return tokenizers_package(source).Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises nothing more special
        reason = str(error).partition("\n")[0][:100]
        what = "it is no vocabulary that the package tokenizers can read"
        raise ValueError(f"tokenizer {source}: {what} ({reason})") from None


def find_end(source, pieces):
    """The piece that ends a document: the first of ENDS that is there."""
    for end in ENDS:
        if end in pieces:
            return end
    raise ValueError(f"tokenizer {source}: it has no piece that ends a document: {', '.join(ENDS)}")


def unknown_id(model, ids):
    """The id of text that a model has no piece for; -1 if it has none."""
    if model.get("unk_id") is not None:  # of T5's kind of model
        return model["unk_id"]
    return ids.get(model.get("unk_token"), -1)


def checked_size(source, vocab_size, least):
    """V, which is `least` if it is not given. Raises ValueError if it cannot be."""
    if least > MOST:
        raise ValueError(f"tokenizer {source} has {least} ids; valid are {MOST} at most")
    if vocab_size and not least <= vocab_size <= MOST:
        valid = f"tokenizer {source} has {least} ids, and up to {MOST} are valid"
        raise ValueError(f"vocab_size is {vocab_size}; {valid}")
    return vocab_size or least


def hide(spec, hidden):
    """A file's content in which no text has a hidden piece, and nothing is added to or cut off.

    Ids stay as they are. Only the hidden pieces get other names, which occur in no text.
    """
    key = hashlib.sha256(json.dumps(spec).encode()).hexdigest()
    names = {piece: f"{key}:{number}" for number, piece in enumerate(sorted(hidden))}

    def renamed(piece):
        return names.get(piece, piece)

    added_tokens = []
    for token in spec.get("added_tokens", []):
        added_tokens.append(token | {"content": renamed(token["content"])})

    model = dict(spec["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {renamed(piece): number for piece, number in vocab.items()}
    else:
        model["vocab"] = [[renamed(piece), score] for piece, score in vocab]
    if "unk_token" in model:
        model["unk_token"] = renamed(model["unk_token"])
    if "dropout" in model:
        model["dropout"] = None  # or a text would have other ids each time

    switched_off = {"truncation": None, "padding": None, "post_processor": None}
    return spec | switched_off | {"model": model, "added_tokens": added_tokens}


def cut_at_blanks(text):
    """The pieces of ENCODED_AT_ONCE characters at most that a text consists of.

    All but the first begin with a blank, unless there is none. The package takes 400 bytes of
    memory for a character, so a text of any length must not be encoded in one piece.
    """
    pieces = []
    start = 0
    while len(text) - start > ENCODED_AT_ONCE:
        blank = text.rfind(" ", start + 1, start + ENCODED_AT_ONCE)
        stop = blank if blank > start else start + ENCODED_AT_ONCE
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


def t5_file():
    """The path of T5's vocabulary, which is downloaded once. Raises ValueError if it cannot be."""
    import huggingface_hub  # here, as only t5 needs it
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return huggingface_hub.hf_hub_download(*T5, local_files_only=True)
    except LocalEntryNotFoundError:
        pass  # not downloaded yet
    from text.documents import NoNetwork, find_network  # here, as only this download needs them

    try:
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            raise NoNetwork("HF_HUB_OFFLINE is set")
        find_network(huggingface_hub.constants.ENDPOINT)
        return huggingface_hub.hf_hub_download(*T5)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0][:100]
    what = f"tokenizer t5: its vocabulary cannot be fetched ({reason})"
    cache = "without a network, set HF_HOME to a folder in which huggingface_hub has it"
    others = f"or give {T5[1]} of {T5[0]} by --tokenizer FILE.json"
    raise ValueError(f"{what}; {cache}, {others}")
