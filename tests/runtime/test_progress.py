"""What a person sees while a run computes: on a terminal, through a pipe, after Ctrl-C."""

import io
import os
import re
import signal
import sys
from types import SimpleNamespace

import pytest
from conftest import rows, run

import gn_cg
from runtime import live, progress


class Terminal(io.StringIO):
    """A stream that passes for a terminal."""

    def isatty(self):
        return True


def open_terminal(monkeypatch):
    """From here to the end of the test, standard error is a terminal, 100 columns wide."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)  # no fixture, as pytest sets it before each test
    monkeypatch.setenv("COLUMNS", "100")
    return stream


def set_clock(monkeypatch, now):
    """A clock that stands still: `now` of what is returned is the time, in seconds."""
    clock = SimpleNamespace(now=now)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    monkeypatch.setattr(progress.time, "time", lambda: clock.now)
    return clock


def screens(stream):
    """What was drawn, a bar each."""
    return re.split(r"[\r\n]|\x1b\[A", stream.getvalue())


def test_a_bar_says_what_is_done_now_and_that_it_compiles(here, monkeypatch):
    """The first inner batch of a stage waits for the compiler, in the first step only."""
    terminal = open_terminal(monkeypatch)
    assert run("--method", "gn", "--out", "r", "--steps", "2") == 0
    drawn = screens(terminal)
    for title in ("warm-up, gradients", "gn, evaluation", "step 1, inner batches"):
        assert any(bar.startswith(f"{title}, compiling:") for bar in drawn), title
        assert any(bar.startswith(f"{title}:") for bar in drawn), title
    assert any(bar.startswith("step 1, line search, compiling:") for bar in drawn)
    assert any(bar.startswith("step 2, line search:") for bar in drawn)
    assert not any(bar.startswith("step 2") and "compiling" in bar for bar in drawn)
    assert max(map(len, drawn)) <= 94  # there is room for what Ctrl-C writes


def test_the_clock_of_a_bar_does_not_count_the_compilation(monkeypatch):
    """100 s of compilation and then a second for each inner batch are 1 s an inner batch."""
    open_terminal(monkeypatch)
    clock = set_clock(monkeypatch, 0.0)
    shown = progress.Progress(inner_tokens=64)
    with shown.bar("step 1", 10):
        shown.advance("inner batches")
        clock.now += 100
        for _ in range(5):
            shown.advance("inner batches")
            clock.now += 1
        (bar,) = shown.bars
        assert bar.n == 6 * 64
        assert bar.format_dict["elapsed"] == pytest.approx(5)


def test_a_stage_that_comes_between_takes_no_time_of_another(monkeypatch):
    """An evaluation of one inner batch, between many inner batches of a second each."""
    open_terminal(monkeypatch)
    clock = set_clock(monkeypatch, 0.0)
    shown = progress.Progress(inner_tokens=64)
    with shown.bar("gn", None):
        for _ in range(2):
            shown.show("evaluation")  # the first time, it is compiled
            clock.now += 100
            for number in range(10):
                shown.advance("inner batches")
                clock.now += 50 if number == 0 else 1
        (bar,) = shown.bars
        # The compilations are left out, and nothing else.
        assert bar.format_dict["elapsed"] == pytest.approx(9 + 100 + 50 + 9)


def test_a_resumed_bar_begins_where_the_run_was_stopped(here, monkeypatch):
    """Stopped in its second step, after two of its three inner batches."""
    terminal = open_terminal(monkeypatch)
    original, points = live.safe_point, []

    def stop(signals, saver):
        points.append(saver.newest)
        if saver.newest is not None and int(saver.newest.t) == 1 and int(saver.newest.k) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        original(signals, saver)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "safe_point", stop)
        assert run("--method", "muon", "--out", "r") == 130
    stopped = "\r\033[Ktrain.py: stopped; the same command goes on from here\n"
    assert terminal.getvalue().endswith(stopped)

    begun = []

    class Recorded(progress.tqdm):
        def __init__(self, **options):
            begun.append((options["desc"], options["initial"], options["total"]))
            super().__init__(**options)

    monkeypatch.setattr(progress, "tqdm", Recorded)
    assert run("--method", "muon", "--out", "r") == 0
    inner = 4 * 16
    assert begun[0] == ("muon", (3 + 2) * inner, 9 * inner)
    assert begun[1] == ("step 2", 2 * inner, 3 * inner)


def test_without_a_terminal_a_long_run_says_a_line_every_minute(here, capsys, monkeypatch):
    """Here every tenth of a millisecond. A short run says nothing."""
    assert run("--method", "muon", "--out", "short") == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "MINUTE", 1e-4)
    assert run("--method", "muon", "--out", "long") == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(
        line.startswith("muon, inner batches: ") and line.endswith(" left") for line in lines
    )
    assert not any(line.startswith("step") for line in lines)
    assert all("\r" not in line for line in lines)


def test_a_line_comes_every_minute_and_not_more_often(monkeypatch, capsys):
    """Without a terminal, at an inner batch a second; tqdm would look after ten seconds, too."""
    clock = set_clock(monkeypatch, 1000.0)
    shown = progress.Progress(inner_tokens=64)
    with shown.bar("gn", 1000):
        for _ in range(200):
            shown.advance("inner batches")
            clock.now += 1
            for bar in shown.bars:
                if bar.miniters > 1 and clock.now - bar.last_print_t >= bar.maxinterval:
                    bar.refresh()  # as tqdm's own thread does
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3


def test_a_bar_without_an_end_says_how_much_was_read(monkeypatch, capsys):
    """As of a run that ends at its target."""
    now = 1000.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    shown = progress.Progress(inner_tokens=64)
    with shown.bar("gn", None):
        for _ in range(100):
            shown.advance("inner batches")
            now += 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"gn, inner batches: \d[.\d]*k tokens, [.\d]+tok/s", line)


def test_conjugate_gradients_that_end_early_move_the_bar_to_the_end_of_their_step(
    here, monkeypatch
):
    """A solve with a large damping needs fewer passes than it may take."""
    open_terminal(monkeypatch)
    positions, original = [], progress.Progress.reach

    def reach(self, batches):
        before = self.bars[0].n
        original(self, batches)
        positions.append((before < self.bars[0].n, self.bars[0].n))

    monkeypatch.setattr(progress.Progress, "reach", reach)
    line = ["--method", "gn_cg", "--damping", "1000", "--steps", "2", "--out", "r"]
    assert run(*line) == 0
    step = ((100 + 2) * 3 + 3) * 64
    assert positions == [(True, step), (True, 2 * step)]


def test_conjugate_gradients_hear_a_signal_at_every_inner_batch(here, monkeypatch):
    """The run then resumes before its solve, and ends as it would have."""
    line = ["--method", "gn_cg", "--damping", "1", "--cg-steps", "5", "--steps", "1"]
    assert run(*line, "--out", "whole") == 0
    original, calls = gn_cg.measure, []

    def measure(*args):
        calls.append(args)
        if len(calls) == 7:  # in the second of seven passes over three inner batches
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gn_cg, "measure", measure)
        assert run(*line, "--out", "r") == 143
    assert len(calls) == 7
    assert run(*line, "--out", "r") == 0
    assert rows("r")[-1]["val_loss"] == rows("whole")[-1]["val_loss"]
