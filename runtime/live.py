"""What goes on around a step: batches are read, bars move, the newest state is saved, a signal ends the run."""

import math
import time

import jax

from runtime import parallel


class Stop(BaseException):  # or an "except Exception" of a library would swallow it
    """A signal asked the run to end."""


class Live:
    """What goes on around a step: batches are read, bars move, the newest state is at hand, a signal ends it."""

    def __init__(self, run):
        self.run, self.training, self.bars, self.signal = run, False, [], 0
        self.saved, self.every, self.due = 0.0, math.inf, False  # last save, seconds between two, if it is time
        self.corpus = self.state = self.step = self.ahead = self.write = None

    def caught(self, number, frame):
        """Signal handler. In training, where raising could hit JAX, or where others wait, the next `check` ends it."""
        again, self.signal = self.signal, number
        if again:
            self.state = None  # its memory may be the next step's already
        if again or not (self.training or jax.process_count() > 1):
            raise Stop

    def check(self):
        """Raises Stop where a signal came, and notes if it is time to save: all processes ask at the same places."""
        due = time.monotonic() - self.saved >= self.every
        signal, self.due = divmod(parallel.largest(2 * self.signal + due), 2)
        if signal:
            self.signal = signal
            raise Stop

    def read(self, first):
        """The function k -> training batch number first + k, int32 [B, T+1]."""

        def batch(k):
            self.check()
            for bar in self.bars:
                bar.update(self.run.inner_tokens)
            return self.ahead(first + k)

        return batch

    def watch(self, state):
        """Called with the state after each inner step: keeps it, for a signal, and saves it where that is due.

        Waits for the step before, so that just one is in flight.
        """
        jax.block_until_ready(self.step)
        self.step = state.k + 0  # a copy, as the next step takes over the memory of the state
        self.state = state
        if self.due:
            self.save(state)

    def save(self, state):
        """Writes the state: `write` says where to."""
        self.write(state)
        self.state, self.saved = None, time.monotonic()
