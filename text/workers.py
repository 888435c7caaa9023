"""Many processes that tokenize: chunks of documents in, ids out, in the same order.

Tokenizing keeps a core busy, and the threads of one process get in each other's way. So a large
text is tokenized by a pool of processes, the workers, one for each core. Each is a new Python
("spawn"), not a copy of this one ("fork"), which would not survive JAX's threads. Four things make
it small, and end it in time:

- A worker imports this file, its work and the tokenizer, but not the program that runs. Left alone,
  Python would have each worker of `python train.py` import train.py, and so JAX. So an empty module
  stands in for the program while a worker starts.
- NumPy starts no threads in a worker.
- Ctrl-C reaches all processes of a terminal. Workers do not hear it; their parent ends them.
- A thread in each worker waits until the parent ends, by kill -9 too, and then ends the worker.
"""

import multiprocessing
import os
import signal
import sys
import threading
import types
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache


class Workers:
    """A pool of `processes` workers. They start when first needed, and end with the context."""

    def __init__(self, tokenizer, processes):
        self.tokenizer = tokenizer
        self.processes = processes
        self.pool = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def map(self, work, chunks):
        """Yields work(tokenizer, chunk) for each chunk, in order.

        The function, the chunks and what it makes of them must be such that pickle can send them.
        A few chunks are held at a time, so that memory does not grow with the text. Raises what the
        work raises, and OSError if a worker is killed, as a machine does whose memory is full.
        """
        waiting = deque()
        try:
            for chunk in chunks:
                waiting.append(self.submit(work, chunk))
                if len(waiting) > 2 * self.processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            reason = "a process that tokenizes has ended; is the memory full?"
            raise OSError(reason) from None

    def submit(self, work, chunk):
        """A future of the work on a chunk. The pool starts a worker if none is idle."""
        flag, vocab_size = self.tokenizer.flag_here, self.tokenizer.vocab_size
        if self.pool is None:
            spawn = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(self.processes, spawn, initializer=begin)
        with starting_processes():
            return self.pool.submit(do_in_worker, work, flag, vocab_size, chunk)


@contextmanager
def starting_processes():
    """A process that starts in this block does not import the program, and is deaf to Ctrl-C."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with ctrl_c_blocked():
            yield
    finally:
        sys.modules["__main__"] = program


@contextmanager
def ctrl_c_blocked():
    """A new process inherits that Ctrl-C is blocked. In this one, it is only delayed."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows, where Ctrl-C reaches all processes
        yield
        return
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)


# ---- in a worker ---------------------------------------------------------------------------------


def begin():
    """What a worker, or a Maker (groups.py), does first."""
    # NumPy reads this when it is imported. A worker imports NumPy later, with its first chunk. A
    # Maker has imported it already: there it is for the Maker's own workers.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent():
    """Ends this process when its parent has ended, in whatever way."""
    multiprocessing.parent_process().join()
    os._exit(1)


def do_in_worker(work, flag, vocab_size, chunk):
    """The work on a chunk, with the tokenizer of this flag and size."""
    return work(tokenizer_of_worker(flag, vocab_size), chunk)


@lru_cache(maxsize=1)
def tokenizer_of_worker(flag, vocab_size):
    """The tokenizer, made once."""
    from text.tokenizer import tokenizer  # not above, as it imports NumPy

    return tokenizer(flag, vocab_size)
