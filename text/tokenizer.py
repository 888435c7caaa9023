"""Text to token ids and back; many texts by many processes of this file."""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import tiktoken

END = "<|endoftext|>"
PIECE = 100_000  # characters at a time: GPT-2's pattern cannot take a million blanks


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
    gpt2: the first V - 1 merges of GPT-2's vocabulary, which are a vocabulary too, and end-of-text; by default 32,000.
    """
    if name == "bytes":
        if vocab_size not in (0, 256):
            raise ValueError(f"vocab_size is {vocab_size}; tokenizer bytes has 256 ids")
        encode = lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
        return Tokenizer(name, 256, 0, encode, lambda ids: bytes(int(i) for i in ids).decode(errors="replace"))
    if name != "gpt2":
        raise ValueError(f"tokenizer is {name!r}; valid: bytes, gpt2")
    size = vocab_size or 32_000
    if not 257 <= size <= 50_257:
        raise ValueError(f"vocab_size is {size}; tokenizer gpt2 has 257 to 50257 ids")
    whole = gpt2()
    ranks = {piece: rank for piece, rank in whole._mergeable_ranks.items() if rank < size - 1}
    cut = tiktoken.Encoding("cut", pat_str=whole._pat_str, mergeable_ranks=ranks, special_tokens={END: size - 1})
    pieces = lambda text: [text[i : i + PIECE] for i in range(0, max(1, len(text)), PIECE)]
    ids = lambda text: [cut.encode_to_numpy(piece, disallowed_special=()) for piece in pieces(text)]
    encode = lambda text: np.concatenate(ids(text)).astype(np.uint16)
    return Tokenizer(name, size, size - 1, encode, lambda ids: cut.decode([int(i) for i in ids]))


@lru_cache(maxsize=1)
def gpt2():
    """GPT-2's vocabulary, which tiktoken fetches once. Raises ValueError where it cannot."""
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0][:100]
        remedy = "without a network, set TIKTOKEN_CACHE_DIR to a folder in which tiktoken has it"
        raise ValueError(f"tokenizer gpt2: its vocabulary cannot be fetched ({reason}); {remedy}") from None


def cores():
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@contextmanager
def encoders(tok, processes):
    """A function: chunks, each a list of texts -> (texts, the ids of each) for each, in order, a few held at a time.

    By so many processes, as threads get in each other's way. They start when it is first called, and end with the
    block, or this process, however that ends. It raises OSError where one of them is killed.
    """
    command, free, threads = [sys.executable, __file__, tok.name, str(tok.vocab_size)], SimpleQueue(), []

    def ask(chunk):
        process = free.get()
        try:
            pickle.dump(chunk, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise OSError(f"a process that tokenizes has ended, status {process.wait()}; is the memory full?") from None
        finally:
            free.put(process)

    def encoded(chunks):
        if not threads:
            for _ in range(processes):
                free.put(stack.enter_context(running(command)))
            threads.append(stack.enter_context(ThreadPoolExecutor(processes)))  # each waits for one process
        ahead = deque()
        for chunk in chunks:
            ahead.append((chunk, threads[0].submit(ask, chunk)))
            if len(ahead) > 2 * processes:
                chunk, ids = ahead.popleft()
                yield chunk, ids.result()
        yield from ((chunk, ids.result()) for chunk, ids in ahead)

    with ExitStack() as stack:
        yield encoded


@contextmanager
def running(command):
    """The process of a command, fed and read by pipes, in a group of its own, as Ctrl-C is not for it. It then ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # or NumPy would start a thread for each core
    process = subprocess.Popen(command, env=environment, **pipes, process_group=0)
    try:
        yield process
    finally:
        with suppress(BrokenPipeError):  # of what one that was killed has not read
            process.stdin.close()
        process.stdout.close()
        process.wait()


def serve(tok):
    """Until stdin ends: reads a list of texts, writes the list of their ids."""
    while sys.stdin.buffer.peek(1):
        ids = [tok.encode(text) for text in pickle.load(sys.stdin.buffer)]
        pickle.dump(ids, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(tokenizer(sys.argv[1], int(sys.argv[2])))
