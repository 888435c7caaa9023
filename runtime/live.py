"""What keeps a run alive between its steps: it hears signals, and it saves its newest state.

Both happen at safe points, which a run passes before every inner batch that it reads. There, no
step is in the middle of overwriting the memory of the state.
"""

import signal
import time
from contextlib import contextmanager

import jax

from runtime import command, parallel
from runtime.command import Stop


class Signals:
    """A context in which SIGINT (Ctrl-C) and SIGTERM raise Stop.

    Within `deferred`, a first signal is only noted: the next safe point saves the newest state and
    raises Stop. A second signal raises Stop at once: what came since the last save is lost. A
    signal that this process was started to ignore stays ignored.

    Contexts may be nested, as experiments.py has one around those of train.py. If a signal comes
    after the last safe point of the inner one, that ends as usual and passes the signal to the
    outer one. If the inner one ends with an error, the signal is forgotten.
    """

    innermost = None  # the context that hears the signals now

    def __init__(self):
        self.number = 0  # of the last signal that came; 0: none did
        self.defers = False  # whether a first signal is left to the next safe point
        self.replaced = {}  # the handlers from before

    def __enter__(self):
        self.outer = Signals.innermost
        Signals.innermost = self
        # One process alone must not stop, or the others would wait for it.
        self.defers = jax.process_count() > 1
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # see command.noting_ctrl_c
                self.replaced[number] = signal.signal(number, self.receive)
        return self

    def __exit__(self, kind, error, traceback):
        command.raised.clear()
        for number, handler in self.replaced.items():
            signal.signal(number, handler)
        Signals.innermost = self.outer
        came_too_late = self.number != 0 and error is None  # after the last safe point
        if came_too_late and self.outer:  # else the command is about to end anyway
            self.outer.receive(self.number, None)

    def receive(self, number, frame):
        """The handler of both signals."""
        first = self.number == 0
        self.number = number
        if not (first and self.defers):
            command.raise_noted(Stop(number))

    @contextmanager
    def deferred(self):
        """Within it, a first signal waits for the next safe point."""
        before = self.defers
        self.defers = True
        try:
            yield
        finally:
            self.defers = before


class Saver:
    """Knows the newest state of a run, and when to save it.

    It is saved when `minutes` have passed since the last save. Between outer steps it is saved more
    often, as long as a save takes at most SHARE of the time since the last one. On an H200, a state
    of 0.9 GB takes about 2 s, and a step of Muon as long.
    """

    SHARE = 1 / 20  # of a run's time that may go into saves between outer steps

    def __init__(self, write, minutes):
        """write(state): puts a state on disk; minutes: the longest time between two saves."""
        self.write = write
        self.interval = 60 * minutes  # in seconds
        self.saved_at = time.monotonic()  # when the last save was
        self.took = 0.0  # seconds of the last save
        self.newest = None  # the newest state, if it is newer than what is on disk
        self.in_flight = None  # a number that the step in flight computes

    def watch(self, state):
        """Notes the state after an inner step.

        Waits until the step before is done, so that never more than one is in flight.
        """
        jax.block_until_ready(self.in_flight)
        self.in_flight = state.k + 0  # a copy: the next step takes over the memory of the state
        self.newest = state

    def is_due(self):
        """Whether the last save is so long ago that it is time for the next."""
        return time.monotonic() - self.saved_at >= self.interval

    def after_outer_step(self, state):
        """Notes the state between two outer steps, and saves it if that costs little time."""
        self.newest = state
        waited = time.monotonic() - self.saved_at
        if parallel.in_any(self.took <= self.SHARE * waited):
            self.save()

    def save(self):
        """Writes the newest state, unless the disk has it."""
        if self.newest is None:
            return
        start = time.monotonic()
        self.write(self.newest)
        self.newest = None
        self.saved_at = time.monotonic()
        self.took = self.saved_at - start


def safe_point(signals, saver):
    """Saves the newest state if it is time to, or if a signal came; then raises Stop if one did.

    All processes of a run must come here together, and all do what one of them has to do.
    """
    number, due = parallel.largest([signals.number, saver.is_due()])
    if number or due:
        saver.save()
    if number:
        raise Stop(int(number))
