"""What a run shows while it computes: how far it is, how fast, and how long it will still take."""

import os
import shutil
import sys
import time
from collections import Counter
from contextlib import contextmanager

import jax
from tqdm import tqdm

MINUTE = 60  # seconds between two lines where there is no terminal


class Progress:
    """Progress bars over tokens, which show tokens/s and the time left. All move together.

    Where there is no terminal, an inner batch that moves the first bar prints a line, one a minute
    at most.
    """

    def __init__(self, inner_tokens):
        """inner_tokens: tokens in an inner batch."""
        self.inner_tokens = inner_tokens
        self.bars = []
        self.titles = []
        self.read = Counter()  # {stage of the work: inner batches that it has read}
        self.stage = None  # the one that the last bar shows
        self.compiling_since = None  # when the newest inner batch was read, if its stage was new

    @contextmanager
    def bar(self, title, batches, done=0):
        """Shows a bar for so many inner batches, of which some are done, within the context.

        batches: None if nobody knows how many; then there is no time left to show.
        """
        on_terminal = sys.stderr.isatty()
        if jax.process_index() > 0 or (self.bars and not on_terminal):
            yield  # another process shows the bar; or the bar around this one says enough
            return
        options = terminal_look() if on_terminal else line_look(batches)
        options["total"] = None if batches is None else batches * self.inner_tokens
        options["initial"] = done * self.inner_tokens
        with tqdm(desc=title, leave=False, unit="tok", unit_scale=True, **options) as bar:
            if self.bars:
                self.bars[-1].set_description_str(self.titles[-1], refresh=False)
            self.bars.append(bar)
            self.titles.append(title)
            self.stage = None
            try:
                yield
            finally:
                self.bars.pop()
                self.titles.pop()
                self.stage = None

    def advance(self, stage):
        """Moves every bar by one inner batch, which a stage of the work reads."""
        self.show(stage)
        for bar in self.bars:
            bar.update(self.inner_tokens)

    def show(self, stage):
        """Says on the last bar which stage of the work reads an inner batch.

        Its first inner batch must wait for its program to be compiled, which says nothing about the
        time that the others will take. So the clocks leave out what passes until the next inner
        batch, of whatever stage.
        """
        now = time.time()
        if self.compiling_since is not None:
            for bar in self.bars:
                pause = now - max(self.compiling_since, bar.start_t)
                bar.start_t += pause
                bar.last_print_t += pause
        self.read[stage] += 1
        number = self.read[stage]
        self.compiling_since = now if number == 1 else None
        if self.bars and (number <= 2 or stage != self.stage):
            what = f"{stage}, compiling" if number == 1 else stage
            text = f"{self.titles[-1]}, {what}"
            self.bars[-1].set_description_str(text, refresh=sys.stderr.isatty())
        self.stage = stage

    def reach(self, batches):
        """Moves the first bar to so many inner batches, where a step has read fewer than it may."""
        for bar in self.bars[:1]:  # other processes than the first have none
            bar.update(batches * self.inner_tokens - bar.n)

    def write(self, line):
        """Prints a line above the bars."""
        tqdm.write(line)


def terminal_look():
    """The options of a bar on a terminal."""
    # Ctrl-C writes ^C behind the bar. There must be room, or a new line begins.
    return {"ncols": terminal_width() - 6}


def line_look(batches):
    """The options of a bar that is printed line by line; batches: as `Progress.bar` takes them."""
    line = "{desc}: {percentage:.0f}% of {total_fmt} tokens, {rate_fmt}, {remaining} left"
    if batches is None:
        line = "{desc}: {n_fmt} tokens, {rate_fmt}"
    return {
        "bar_format": line,
        "file": Lines(),
        "delay": MINUTE,
        "mininterval": MINUTE,
        "miniters": 1,  # or tqdm would show the bar at other times, too
    }


def terminal_width():
    """Columns of the terminal that standard error is."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # a stream that only passes for a terminal
        columns = 0
    return columns or shutil.get_terminal_size().columns


class Lines:
    """A file for bars where there is no terminal: a bar becomes a line whenever it is shown."""

    def write(self, text):
        text = text.strip("\r\n ")
        if text:
            print(text, file=sys.stderr)

    def flush(self):
        """Does nothing, as standard error writes every line at once."""
