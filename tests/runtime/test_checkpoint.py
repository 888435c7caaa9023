"""Runs that are stopped or damaged resume and end bitwise the same; nothing is half written."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import kill
import numpy as np
import pytest
from conftest import AS_A_USER, SEARCH, SMALL, assert_same, everything, rows, run, without_time

import baselines
import data
import recipe
import train
from runtime import checkpoint, command, files, live
from text import token_files


@contextmanager
def signal_at(call, module=data.Ahead, name="__call__", number=signal.SIGTERM):
    """Within it, a signal comes with that call of module.name, counted from 0."""
    original, seen = getattr(module, name), []

    def counted(*args, **options):
        seen.append(args)
        if len(seen) == call + 1:
            os.kill(os.getpid(), number)
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, counted)
        yield seen


def assert_same_run(one, two):
    """The same final state, every array bitwise, and the same log but for the time it took."""
    assert_same(everything(one), everything(two))
    assert without_time(rows(one)) == without_time(rows(two))


@pytest.mark.parametrize("method", list(recipe.METHODS))
def test_fault_8_a_run_that_is_stopped_anywhere_goes_on_bitwise(here, method):
    """SIGTERM at the n-th batch, for n all over a run: status 143. The same command then resumes.

    Its end is the same: inner iterate, momentum, place in the schedule and in the data, sums and
    averages are all in the checkpoint.
    """
    assert run("--method", method, "--out", "whole") == 0
    for n in range(0, 3 * (6 if method in SEARCH else 3), 4):
        with signal_at(n):
            assert run("--method", method, "--out", f"stopped{n}") == 143
        assert run("--method", method, "--out", f"stopped{n}") == 0
        assert_same_run(f"stopped{n}", "whole")


def test_fault_8_a_resumed_run_reads_no_batch_again_and_counts_its_tokens(here):
    """Stopped in its second outer step: both commands together read each batch once, in order."""
    with signal_at(2 + 3 + 1) as before:
        assert run("--method", "muon", "--out", "r") == 143
    with signal_at(-1) as after:
        assert run("--method", "muon", "--out", "r") == 0
    assert [index for _, index, _ in before + after] == list(range(2 + 3 * 3))
    assert len(before) == 2 + 3 + 2
    assert [row["tokens"] for row in rows("r")] == [128 + 192 * t for t in range(4)]


def forget_warm_ups():
    for path in Path("data").glob("warmup-*.npz"):
        path.unlink()


@pytest.mark.parametrize("n", [0, 3, 6])
def test_a_warm_up_that_is_stopped_goes_on_bitwise(here, n):
    """SIGTERM at batch n of its 8: the next command begins with batch n + 1."""
    flags = ["--method", "muon", "--warmup-tokens", "512"]
    assert run(*flags, "--out", "whole") == 0
    forget_warm_ups()
    with signal_at(n) as before:
        assert run(*flags, "--out", "r") == 143
    assert Path("r/warmup.npz").exists() and not Path("r/checkpoint.npz").exists()
    Path("r/warmup.npz.draft").touch()  # as of a kill in the next save
    with signal_at(-1) as after:
        assert run(*flags, "--out", "r") == 0
    assert [index for _, index, _ in before + after] == list(range(8 + 3 * 3))
    assert_same_run("r", "whole")
    assert not list(Path("r").glob("warmup*"))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_warm_up_is_saved_when_minutes_have_passed(here, capsys, damaged):
    """With --save-every almost nothing, a crash loses no step, unless what it left is damaged."""
    flags = ["--method", "muon", "--warmup-tokens", "512", "--save-every", "1e-9"]
    original = data.batch
    assert run(*flags, "--out", "whole") == 0
    forget_warm_ups()

    def batch(*place):
        if place[-1] == 5:
            raise OSError("the machine is gone")
        return original(*place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "batch", batch)
        assert run(*flags, "--out", "r") == 1
    if damaged:
        damage(Path("r/warmup.npz"))
    with signal_at(-1) as after:
        assert run(*flags, "--out", "r") == 0
    assert after[0][1] == (0 if damaged else 5)
    assert ("r/warmup.npz cannot be read" in capsys.readouterr().err) == damaged
    assert_same_run("r", "whole")


def test_fault_8_a_checkpoint_rounds_nothing(tmp_path):
    """Float32 with all its bits, and infinities; integers and keys as they are."""
    bits = np.random.default_rng(0).integers(0, 2**31, 10_000, dtype=np.int32)
    tree = {
        "x": jnp.asarray(bits.view(np.float32)),
        "t": jnp.int32(2**31 - 1),
        "inf": jnp.full(2, -jnp.inf),
    }
    checkpoint.save(tmp_path / "a.npz", tree)
    again = checkpoint.load(tmp_path / "a.npz", jax.eval_shape(lambda: tree))
    np.testing.assert_array_equal(np.asarray(again["x"]).view(np.int32), bits)
    assert_same({k: tree[k] for k in ("t", "inf")}, {k: again[k] for k in ("t", "inf")})
    assert all(again[k].dtype == tree[k].dtype for k in tree)


MEANS = [("muon", ".average", ".params"), ("gn", ".theta_mean", ".theta")]


@pytest.mark.parametrize("method, mean, of", MEANS)
def test_fault_7_the_average_is_in_every_save_and_goes_on_after_a_resume(here, method, mean, of):
    """It is neither left out of the last save nor made anew from the loaded weights."""
    flags = ["--method", method, "--average", "0.9"]
    assert run(*flags, "--out", "whole") == 0
    with signal_at(2 + 3 + 1):
        assert run(*flags, "--out", "r") == 143
    halfway = everything("r")
    assert run(*flags, "--out", "r") == 0
    for arrays in (halfway, everything("r")):
        assert np.abs(arrays[f"{mean}['head']"] - arrays[f"{of}['head']"]).max() > 1e-3
    assert_same_run("r", "whole")


OUTSIDE = [
    (token_files, "tokenize"),
    (data.Ahead, "__call__"),
    (train, "evaluate"),
    (checkpoint, "save"),
]


@pytest.mark.parametrize("module, name", OUTSIDE)
def test_a_signal_outside_of_steps_ends_the_run_too(here, capsys, module, name):
    """While the text is tokenized, in the warm-up, in an evaluation, while saving: one line."""
    with signal_at(0, module, name, signal.SIGINT):
        assert run("--method", "gn", "--out", "r") == 130
    err = capsys.readouterr().err
    assert "stopped; the same command goes on from here" in err and err.count("\n") == 1
    assert not list(here.glob("**/*draft*")) and not Path("r/checkpoint.npz").exists()
    assert run("--method", "gn", "--out", "r") == 0


def test_a_signal_in_an_evaluation_does_not_lose_the_step_before(here):
    """The inner steps that were done are saved: only the line search is made again."""
    assert run("--method", "gn", "--out", "whole") == 0
    with signal_at(2, train, "evaluate", signal.SIGINT):
        assert run("--method", "gn", "--out", "r") == 130
    assert (everything("r")[".t"], everything("r")[".k"]) == (1, 3)
    assert run("--method", "gn", "--out", "r") == 0
    assert_same_run("r", "whole")


def test_a_signal_right_after_a_save_leaves_that_save(here):
    """It is newer than the state after the last inner step, which must not be written over it."""
    original = checkpoint.save

    def save(path, tree, **options):
        original(path, tree, **options)
        if path.name == "checkpoint.next.npz" and int(tree.t) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        assert run("--method", "gn", "--out", "r") == 143
    assert (everything("r")[".t"], everything("r")[".k"]) == (1, 0)


def test_stopped_between_evaluations_it_goes_on_bitwise(here):
    flags = ["--method", "muon", "--steps", "5", "--eval-every", "3"]
    assert run(*flags, "--out", "whole") == 0
    for n in (2 + 3, 2 + 4, 2 + 10):
        with signal_at(n):
            assert run(*flags, "--out", f"r{n}") == 143
        assert run(*flags, "--out", f"r{n}") == 0
        assert_same_run(f"r{n}", "whole")


def test_a_grid_in_a_folder_of_its_own_and_stopped_goes_on(here, capsys):
    """--out is the folder of the runs' folders. After SIGTERM the same command does the rest."""
    with signal_at(2 + 3 * 3 + 4):
        assert run("--method", "muon", "--lr", "0.01,0.02", "--out", "grid") == 143
    assert "the same command goes on" in capsys.readouterr().err
    assert run("--method", "muon", "--lr", "0.01,0.02", "--out", "grid") == 0
    assert len(list(Path("grid").iterdir())) == 2
    assert run("--method", "muon", "--lr", "0.02", "--out", "alone") == 0
    (second,) = Path("grid").glob("*lr0.02*")
    assert_same_run(second, "alone")


def test_a_signal_after_a_member_diverged_does_not_save_that_member_for_the_next(here):
    """SIGTERM in the warm-up of the second member of a grid, after the first has diverged."""
    with signal_at(-1) as first:
        assert run("--method", "muon", "--lr", "1e30", "--out", "first") == 1
    with signal_at(len(first) + 1):
        assert run("--method", "muon", "--lr", "1e30", "--seed", "3,4", "--out", "grid") == 143
    (second,) = Path("grid").glob("*seed4*")
    assert not (second / "checkpoint.npz").exists()
    assert run("--method", "muon", "--lr", "0.01", "--seed", "4", "--out", "r") == 0


def test_a_log_ahead_of_its_checkpoint_is_cut_back(here):
    """A crash between the log and the checkpoint of a step: the step and its row are made again.

    What the row says then counts no more: on a GPU, the step made again may come to another loss.
    """
    assert run("--method", "muon", "--out", "whole") == 0
    original = checkpoint.save

    def save(path, tree, **options):
        if path.name == "checkpoint.next.npz" and int(tree.t) == 2:
            raise OSError("disk full")
        original(path, tree, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        assert run("--method", "muon", "--out", "r") == 1
    *before, last = rows("r")
    assert len(before) == 2 and everything("r")[".t"] == 1
    checkpoint.write_log("r", [*before, last | {"val_loss": 9.0}])
    assert run("--method", "muon", "--out", "r") == 0
    assert_same_run("r", "whole")


def test_ctrl_c_ends_a_real_process_cleanly(here):
    """SIGINT to `python train.py`: status 130, no traceback, a checkpoint that can be read."""
    flags = ["--data", "text.txt", "--method", "gn", "--out", "r", "--steps", "100000"]
    command = [sys.executable, train.__file__, *SMALL, *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=AS_A_USER
    )
    end = time.monotonic() + 300
    while process.poll() is None and not (Path("r/log.jsonl").exists() and len(rows("r")) > 2):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "the same command goes on" in err
    assert everything("r")[".t"] >= 2


def test_a_signal_ends_a_program_at_once_and_a_run_at_its_next_safe_point():
    """There the newest state is saved, once. The handlers from before are back afterwards."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    saved = []
    saver = live.Saver(saved.append, minutes=60)
    with live.Signals() as signals, signals.deferred():
        saver.newest = "a state"
        live.safe_point(signals, saver)
        assert saved == []
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(command.Stop):
            live.safe_point(signals, saver)
        assert saved == ["a state"] and saver.newest is None
        with pytest.raises(command.Stop):
            live.safe_point(signals, saver)
        assert saved == ["a state"] and signals.number == signal.SIGTERM
    with live.Signals(), pytest.raises(command.Stop):
        os.kill(os.getpid(), signal.SIGINT)
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_a_signal_after_the_last_safe_point_of_a_run_is_for_what_goes_on_after_it():
    """As experiments.py does, which would start the next run. A run alone just comes to its end."""
    with live.Signals(), pytest.raises(command.Stop), live.Signals() as signals, signals.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
    with live.Signals() as signals, signals.deferred():
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_signal_ends_a_run_without_a_save(here, capsys, monkeypatch):
    """It may come while a step overwrites the memory of the state, which must then not be saved."""
    original, steps = baselines.accumulate, []

    def accumulate(*args):
        steps.append(args)
        if len(steps) == 2 + 3 + 2:  # in the second outer step
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(baselines, "accumulate", accumulate)
        assert run("--method", "muon", "--out", "r") == 130
    assert len(steps) == 2 + 3 + 2
    assert (everything("r")[".t"], everything("r")[".k"]) == (1, 0)
    err = capsys.readouterr().err
    assert "stopped; the same command goes on from here" in err and err.count("\n") == 1
    assert run("--method", "muon", "--out", "r") == 0


def test_a_log_has_no_number_that_json_has_not(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.write_log(tmp_path, [{"val_loss": float("nan")}])
    assert not list(tmp_path.iterdir())


def test_a_finished_run_is_not_run_again(here, capsys):
    assert run("--method", "muon", "--out", "r") == 0
    before, table = (
        Path("r/checkpoint.npz").stat().st_mtime_ns,
        capsys.readouterr().out.split("train_loss")[1],
    )
    assert run("--method", "muon", "--out", "r") == 0
    assert Path("r/checkpoint.npz").stat().st_mtime_ns == before
    assert capsys.readouterr().out.split("train_loss")[1] == table


def test_resuming_does_not_need_the_warm_up(here, monkeypatch):
    """From a checkpoint the warm-up is not made again, though its cache is gone."""
    assert run("--method", "gn", "--out", "r") == 0
    for path in Path("data").glob("warmup-*"):
        path.unlink()
    monkeypatch.setattr(train, "warm_up", None)
    assert run("--method", "gn", "--out", "r") == 0


def test_a_damaged_warm_up_is_made_again(here, capsys):
    assert run("--method", "gn", "--out", "a") == 0
    (path,) = Path("data").glob("warmup-*.npz")
    path.write_bytes(path.read_bytes()[:100])
    assert run("--method", "gn", "--out", "b") == 0
    assert "made again" in capsys.readouterr().err
    assert_same_run("a", "b")


def damage(path):
    """One bit, in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_after_a_damaged_checkpoint_the_one_before_is_taken(here, capsys):
    """With a warning, and the same end; the damaged one is put aside."""
    assert run("--method", "gn", "--out", "whole") == 0
    assert run("--method", "gn", "--out", "r") == 0
    assert {p.name for p in Path("r").glob("*.npz")} == {
        "checkpoint.npz",
        "checkpoint.previous.npz",
    }
    damage(Path("r/checkpoint.npz"))
    damaged = Path("r/checkpoint.npz").read_bytes()
    capsys.readouterr()
    assert run("--method", "gn", "--out", "r") == 0
    err = capsys.readouterr().err
    assert (
        "r/checkpoint.npz cannot be read" in err and "resuming from the one before, step 2" in err
    )
    assert Path("r/checkpoint.damaged.npz").read_bytes() == damaged
    assert_same_run("r", "whole")


def test_whatever_is_damaged_in_a_checkpoint_is_said_or_harmless(tmp_path):
    """A byte changed or an end missing: ValueError in one line, or the arrays are as they were."""
    tree, path, said = (
        {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "t": np.int32(3)},
        tmp_path / "a.npz",
        0,
    )
    checkpoint.save(path, tree)
    whole = path.read_bytes()
    places = range(len(whole))
    flipped = [
        whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
        for at in places
        for bit in (1, 8, 128)
    ]
    for content in (*flipped, *(whole[:at] for at in places)):
        path.write_bytes(content)
        try:
            assert_same(checkpoint.load(path, tree), tree)
        except ValueError as error:
            said += 1
            assert str(error).startswith(str(path)) and "\n" not in str(error)
    assert said > 1000


@pytest.mark.parametrize("lost", ["checkpoint.npz", "checkpoint.previous.npz"])
def test_one_checkpoint_is_enough(here, lost):
    """A kill between the renamings of a save leaves the older one alone."""
    assert run("--method", "muon", "--out", "whole") == 0
    assert run("--method", "muon", "--out", "r") == 0
    Path("r", lost).unlink()
    assert run("--method", "muon", "--out", "r") == 0
    assert_same_run("r", "whole")


def test_damaged_checkpoints_end_the_run_and_are_kept(here, capsys):
    assert run("--method", "muon", "--out", "r") == 0
    for name in ("checkpoint.npz", "checkpoint.previous.npz"):
        damage(Path("r", name))
    before = {p.name: p.read_bytes() for p in Path("r").iterdir()}
    capsys.readouterr()
    assert run("--method", "muon", "--out", "r") == 1
    err = capsys.readouterr().err
    assert err.count("cannot be read") == 2 and err.count("\n") == 1
    assert {p.name: p.read_bytes() for p in Path("r").iterdir()} == before


def test_a_save_that_reads_back_wrong_leaves_the_one_before(here, capsys, monkeypatch):
    assert run("--method", "muon", "--out", "r", "--eval-every", "3") == 0
    before = everything("r")
    monkeypatch.setattr("zipfile.ZipFile.testzip", lambda self: "a.npy")
    with pytest.raises(OSError, match="what was written is not what is read"):
        checkpoint.save_state("r", {"t": jnp.int32(1)})
    assert_same(everything("r"), before)
    assert not list(Path("r").glob("*draft*"))


def test_whatever_is_damaged_in_a_draft_is_noticed(tmp_path):
    """Cut short, as by a full disk, or with a bit that flipped: unless it is read as it was."""
    path = tmp_path / "a.npz"
    checkpoint.save(path, {"x": jnp.arange(20), "y": jnp.zeros(3)})
    whole = checkpoint.read_arrays(path)
    content = path.read_bytes()
    assert not checkpoint.is_damaged(path, whole)
    path.write_bytes(content[:-30])
    assert checkpoint.is_damaged(path, whole)
    for bit in range(0, 8 * len(content), 7):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        if not checkpoint.is_damaged(path, whole):
            assert_same(checkpoint.read_arrays(path), whole)


def test_numbers_that_a_checkpoint_cannot_hold_are_refused_when_they_are_saved(tmp_path):
    """As a state of a method of one's own may have them."""
    with pytest.raises(TypeError, match="'x'.* is bfloat16, which .npz cannot hold"):
        checkpoint.save(tmp_path / "a.npz", {"x": jnp.zeros(2, jnp.bfloat16)})
    assert not list(tmp_path.iterdir())


@contextmanager
def full_disk(size):
    """Within it, a write beyond the first `size` bytes of a file fails, as on a full disk."""
    resource = pytest.importorskip("resource")  # which Windows does not have
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_on_a_full_disk_a_run_ends_with_one_line_and_goes_on_when_there_is_room(here, capsys):
    """In the warm-up, at the first save, while the text is tokenized: the file is named."""
    flags = ["--method", "gn", "--save-every", "1e-9"]
    assert run(*flags, "--out", "whole") == 0
    (warm_up,) = Path("data").glob("warmup-*.npz")
    aside = warm_up.rename("aside.npz")
    for name, size in (
        ("r/warmup.npz", 20_000),
        ("r/checkpoint.next.npz", 20_000),
        ("data/text-bytes-", 100_000),
    ):
        if "checkpoint" in name:
            shutil.copy(aside, warm_up)
        if "text" in name:
            shutil.rmtree("data")
        capsys.readouterr()
        with full_disk(size):
            assert run(*flags, "--out", "r") == 1
        err = capsys.readouterr().err
        assert err.startswith("train.py: [Errno 27]") and f"'{name}" in err and err.count("\n") == 1
    assert run(*flags, "--out", "r") == 0
    assert_same_run("r", "whole")
    assert not list(here.rglob("*draft*"))


def test_when_a_state_is_saved(here, monkeypatch):
    """With --save-every almost nothing, after each inner step; with an hour, between outer steps.

    There it is saved if that costs little time, and at the end.
    """
    original, saved = checkpoint.save_state, []
    monkeypatch.setattr(
        checkpoint, "save_state", lambda f, s: saved.append((int(s.t), int(s.k))) or original(f, s)
    )
    assert run("--method", "gn", "--out", "often", "--save-every", "1e-9") == 0
    inner = [(t, k) for t in range(3) for k in (1, 2, 3)]
    assert saved == sorted([*inner, *((t, 0) for t in range(4))])
    saved.clear()
    assert run("--method", "gn", "--out", "seldom", "--save-every", "60") == 0
    assert saved == [(t, 0) for t in range(4)]
    saved.clear()
    monkeypatch.setattr(live.Saver, "SHARE", 0)  # as if a save took for ever
    assert run("--method", "gn", "--out", "twice", "--save-every", "60") == 0
    assert saved == [(0, 0), (3, 0)]
    saved.clear()
    assert run("--method", "gn", "--out", "twice", "--save-every", "60") == 0
    assert not saved  # the disk has it
    assert_same_run("often", "seldom")
    assert_same_run("often", "twice")


def test_saves_between_outer_steps_take_a_twentieth_of_the_time(monkeypatch):
    """A save takes 2 s here, and an outer step 3 s: one save in 14 steps."""
    now, saved = 0.0, []

    def write(state):
        nonlocal now
        now += 2
        saved.append(state)

    monkeypatch.setattr(live.time, "monotonic", lambda: now)
    saver = live.Saver(write, minutes=60)
    for t in range(40):
        saver.after_outer_step(t)
        assert saver.newest in (t, None)  # for a signal that comes in the next outer step
        now += 3
    assert saved == [0, 14, 28]
    saver.save()
    saver.save()
    assert saved == [0, 14, 28, 39]


@pytest.mark.parametrize("method", list(recipe.METHODS))
def test_a_signal_after_a_row_that_is_not_saved_loses_nothing(here, monkeypatch, method):
    """Before the first inner batch of an outer step, the newest state is that of the row."""
    monkeypatch.setattr(live.Saver, "SHARE", 0)
    assert run("--method", method, "--out", "whole") == 0
    with signal_at(2, checkpoint, "write_log"):  # of the row of step 2
        assert run("--method", method, "--out", "r") == 143
    state = everything("r")
    assert (state[".t"], state[".k"]) == (2, 0)
    assert run("--method", method, "--out", "r") == 0
    assert_same_run("r", "whole")


def test_a_folder_that_is_in_use_is_refused(here, capsys):
    """By a lock that goes with its holder: a dead run keeps none."""
    checkpoint.check_free("r")
    assert not Path("r").exists()
    with checkpoint.alone("r"):
        assert run("--method", "muon", "--out", "r") == 2
        with pytest.raises(checkpoint.InUse, match="r is in use by another run; give another"):
            checkpoint.check_free("r")
    checkpoint.check_free("r")
    err = capsys.readouterr().err
    assert "r is in use by another run; give another --out" in err and err.count("\n") == 1
    assert [path.name for path in Path("r").iterdir()] == ["lock"]
    assert run("--method", "muon", "--out", "r") == 0
    code = """
from runtime import checkpoint
with checkpoint.alone("r"):
    print("held", flush=True)
    input()
"""
    environment = AS_A_USER | {"PYTHONPATH": str(Path(train.__file__).parent)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes)
    assert holder.stdout.readline() == b"held\n"
    assert run("--method", "muon", "--out", "r") == 2
    holder.kill()
    holder.communicate()
    assert run("--method", "muon", "--out", "r") == 0


def test_out_of_memory_says_which_flags_lower_it(here, capsys, monkeypatch):
    def full(*args):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."
        )

    monkeypatch.setattr(train, "outer_step", full)
    assert run("--method", "muon", "--out", "r") == 1
    err = capsys.readouterr().err
    assert "lower --micro-batch, --inner-batch or --head-chunk" in err and err.count("\n") == 1

    def other(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(train, "outer_step", other)
    with pytest.raises(jax.errors.JaxRuntimeError):
        run("--method", "muon", "--out", "s")


def test_killed_at_random_moments_runs_end_the_same(here, monkeypatch):
    """Two of the twenty kills of `python tests/runtime/kill.py 20`."""
    seen = kill.survive(2, ("gn",), seed=1)
    assert len(seen) == 2 and all(right for *_, right in seen), seen
    assert any(hit and "checkpoint.npz" in left for hit, left, _ in seen), seen


def test_killed_where_it_counts_runs_end_the_same(here):
    """At some of the places of `kill.py`: before a rename, link, removal or sync."""
    seen = kill.points(every=24)
    assert len(seen) >= 2 and all(hit and right for hit, right in seen), seen


def test_a_kill_while_a_run_is_begun_leaves_no_folder_that_is_refused(here):
    """Before its config.json has its name."""
    Path("r").mkdir()
    Path("r/config.json.draft").write_text("half")
    assert run("--method", "muon", "--out", "r") == 0
    assert not list(Path("r").glob("*.draft"))


def test_a_folder_that_is_removed_meanwhile_is_not_half_made_again(here, capsys, monkeypatch):
    original = checkpoint.write_log
    monkeypatch.setattr(
        checkpoint, "write_log", lambda *args: shutil.rmtree("r") or original(*args)
    )
    assert run("--method", "muon", "--out", "r") == 1
    assert "r/log.jsonl" in capsys.readouterr().err and not Path("r").exists()


def test_a_run_and_a_warm_up_resume_when_the_code_has_changed(here, monkeypatch, capsys):
    """Both are found again, one line says so, and the end is the same."""
    assert run("--method", "muon", "--warmup-tokens", "512", "--out", "whole") == 0
    (warm_up,) = Path("data").glob("warmup-*.npz")
    warm_up.unlink()
    original = checkpoint.CODE
    with monkeypatch.context() as patch, signal_at(3):
        patch.setattr(checkpoint, "CODE", "0" * 64)
        assert run("--method", "muon", "--warmup-tokens", "512") == 143
    assert checkpoint.CODE == original == checkpoint.hash_of_code()
    capsys.readouterr()
    with signal_at(-1) as after:
        assert run("--method", "muon", "--warmup-tokens", "512") == 0
    (folder,) = Path("runs").iterdir()
    said = f"{folder} was begun with other code than the present one\n"
    assert after[0][1] == 4 and capsys.readouterr().err == said
    assert_same_run(folder, "whole")

    # The warm-up was begun with the code of before: a run that takes it now says that.
    assert run("--method", "muon", "--warmup-tokens", "512", "--out", "r") == 0
    said = f"{warm_up} was begun with other code than the present one\n"
    assert capsys.readouterr().err == said
    assert_same_run("r", "whole")


def test_a_warm_up_of_other_arrays_is_made_again(here, capsys):
    """One whose file has been exchanged, or whose arrays the code has changed since."""
    assert run("--method", "muon", "--out", "a") == 0
    (path,) = Path("data").glob("warmup-*.npz")
    checkpoint.save(path, {"params": np.zeros(3)})
    capsys.readouterr()
    assert run("--method", "muon", "--out", "b") == 0
    err = capsys.readouterr().err
    assert err.startswith(f"{path} holds other arrays than this run has: ['code'] is missing there")
    assert err.endswith("; the warm-up is made again\n")
    assert_same_run("a", "b")


def test_a_flag_that_is_newer_than_a_run_counts_as_its_default(here, capsys):
    """So a run is not lost when a field is added to a Config; another value is another run."""
    assert run("--method", "muon", "--out", "r") == 0
    config = json.loads(Path("r/config.json").read_text())
    del config["config"]["clip"]
    Path("r/config.json").write_text(json.dumps(config))
    assert run("--method", "muon", "--out", "r") == 0
    capsys.readouterr()
    assert run("--method", "muon", "--out", "r", "--clip", "2") == 2
    assert "r holds another run (clip 1.0 -> 2.0)" in capsys.readouterr().err


def test_a_newer_flag_that_is_worked_out_from_others_does_not_lose_a_run_either(here):
    """As --tokenizer is, which depends on --model; unless it is given."""
    assert run("--method", "muon", "--out", "r") == 0
    config = json.loads(Path("r/config.json").read_text())
    assert config["config"].pop("tokenizer") == "bytes"
    Path("r/config.json").write_text(json.dumps(config))
    assert run("--method", "muon", "--out", "r") == 0
    assert run("--method", "muon", "--out", "r", "--tokenizer", "bytes") == 2


# ---- the length of a run ----

MUON = ["--method", "muon"]
FREE = {  # runs whose learning rate does not depend on their length
    "muon": MUON,
    "gn": ["--method", "gn", "--schedule", "constant+inner cosine"],
    "prox": ["--method", "gn_prox", "--schedule", "constant"],
    "cg": ["--method", "gn_cg", "--cg-steps", "2"],
}


def saved_config(out):
    """The flags that config.json of a run's folder has."""
    return checkpoint.read_config(out)["config"]


@pytest.mark.parametrize("name", FREE)
def test_a_run_that_is_lengthened_equals_one_in_one_go(here, capsys, name):
    """Its old end has a row of its own: 2 is not among the steps of evaluation."""
    line = [*FREE[name], "--eval-every", "3"]
    assert run(*line, "--steps", "5", "--out", "whole") == 0
    assert run(*line, "--steps", "2", "--out", "r") == 0
    assert saved_config("r")["steps"] == 2
    capsys.readouterr()
    assert run(*line, "--steps", "5", "--out", "r") == 0
    assert "r: finished at 2 steps by an earlier command; goes on to 5\n" in capsys.readouterr().out
    assert_same(everything("r"), everything("whole"))
    assert [row["step"] for row in rows("r")] == [0, 2, 3, 5]
    assert without_time(row for row in rows("r") if row["step"] != 2) == without_time(rows("whole"))
    assert saved_config("r") == saved_config("whole")


def test_a_command_for_fewer_steps_than_a_run_has_changes_nothing(here, capsys):
    """It shows the rows up to there; the longer command then finds all as it was."""
    assert run(*MUON, "--steps", "2", "--out", "short") == 0
    summary = re.search("validation loss .*", capsys.readouterr().out)[0]
    assert run(*MUON, "--steps", "4", "--out", "r") == 0
    before = {path.name: path.read_bytes() for path in Path("r").iterdir()}
    capsys.readouterr()
    assert run(*MUON, "--steps", "2", "--out", "r") == 0
    out = capsys.readouterr().out
    assert "r: has 4 steps already; these are its rows up to step 2\n" in out
    assert summary in out and "after 2 outer steps" in summary
    assert {path.name: path.read_bytes() for path in Path("r").iterdir()} == before


@pytest.mark.parametrize("steps", ["2", "4", "6"])
def test_a_run_that_has_lost_its_log_or_its_states_is_not_trained_again(here, capsys, steps):
    """Whether it would now be shorter, as long, or longer. The folder stays as it is."""
    assert run(*MUON, "--steps", "4", "--out", "whole") == 0
    for lost, why in (
        ("log.jsonl", "has lost its rows"),
        ("checkpoint*", "checkpoint.npz is gone"),
    ):
        shutil.rmtree("r", ignore_errors=True)
        shutil.copytree("whole", "r")
        for path in Path("r").glob(lost):
            path.unlink()
        before = {path.name: path.read_bytes() for path in Path("r").iterdir()}
        capsys.readouterr()
        assert run(*MUON, "--steps", steps, "--out", "r") == 1
        err = capsys.readouterr().err
        assert why in err and "another --out starts a new run" in err and err.count("\n") == 1
        assert {path.name: path.read_bytes() for path in Path("r").iterdir()} == before


def test_what_is_damaged_is_named(here, capsys):
    """A config.json; and two checkpoints that are no .npz files at all."""
    assert run(*MUON, "--steps", "2", "--out", "r") == 0
    config = Path("r/config.json").read_text()
    Path("r/config.json").write_text("{")
    capsys.readouterr()
    assert run(*MUON, "--steps", "2", "--out", "r") == 2
    assert "r is a run whose config.json is missing or damaged; give" in capsys.readouterr().err
    Path("r/config.json").write_text(config)
    for path in checkpoint.state_files("r"):
        path.write_text("x")
    assert run(*MUON, "--steps", "2", "--out", "r") == 1
    err = capsys.readouterr().err
    assert err.count("cannot be read: it is no .npz file;") == 2
    assert err.endswith("; another --out starts a new run\n")


def test_a_run_that_was_stopped_beyond_the_steps_now_asked_keeps_its_inner_steps(here, capsys):
    """Stopped inside its third step, asked for two; then for four, as at first."""
    assert run(*MUON, "--steps", "4", "--eval-every", "3", "--out", "whole") == 0
    line = [*MUON, "--eval-every", "3", "--out", "r"]
    with signal_at(2 * 3 + 1):
        assert run(*line, "--steps", "4") == 143
    stopped = everything("r")
    assert (stopped[".t"], stopped[".k"]) == (2, 2)
    capsys.readouterr()
    assert run(*line, "--steps", "2") == 0
    assert "r: has 2 steps already" in capsys.readouterr().out
    assert_same(everything("r"), stopped)
    assert run(*line, "--steps", "4") == 0
    assert_same_run("r", "whole")


def test_a_run_that_diverged_later_than_the_steps_now_asked(here, capsys):
    """Its rows up to there are good."""
    assert run(*MUON, "--steps", "2", "--out", "r") == 0
    log = rows("r")
    diverged = {"step": 3, "val_loss": None, "diverged": "the loss is nan at outer step 3"}
    checkpoint.write_log("r", [*log, diverged])
    assert run(*MUON, "--steps", "3", "--out", "r") == 1
    assert run(*MUON, "--steps", "2", "--out", "r") == 0
    assert rows("r")[-1] == diverged
    with pytest.raises(FloatingPointError):
        checkpoint.check_log("r", [*log, diverged | {"step": "3"}], 2)


def test_a_length_that_the_learning_rate_depends_on_is_part_of_the_run(here, capsys):
    """The line says which flag makes it so; with --tokens for --steps, it is the same length."""
    for flag, value in (("--schedule", "cosine"), ("--warmup", "0.5")):
        out = flag[2:]
        line = [*MUON, flag, value, "--out", out]
        assert run(*line, "--steps", "2") == 0
        assert f"as the learning rate depends on it: {flag} {value}\n" in capsys.readouterr().out
        assert run(*line, "--steps", "3") == 2
        err = capsys.readouterr().err
        reason = f"(steps 2 -> 3, on which the learning rate depends: {flag} {value})"
        assert f"{out} holds another run {reason}; give another --out" in err
    line = [word for word in SMALL if word not in ("--steps", "3")]
    line += [*MUON, "--schedule", "cosine", "--data", "text.txt", "--out", "schedule"]
    assert train.main([*line, "--tokens", "384"]) == 0


def test_a_run_until_its_target_is_stopped_and_resumed(here, capsys):
    """It has no number of steps; a command with one may go on from its end."""
    assert run(*MUON, "--steps", "6", "--out", "whole") == 0
    losses = [row["val_loss"] for row in rows("whole")]
    target = losses[4] + 1e-6
    assert min(losses[:4]) > target
    line = [word for word in SMALL if word not in ("--steps", "3")]
    line += [*MUON, "--data", "text.txt", "--out", "r", "--target-loss", str(target)]
    with signal_at(2 * 3 + 1):
        assert train.main(line) == 143
    capsys.readouterr()
    assert train.main(line) == 0
    out = capsys.readouterr().out
    assert f"outer steps of 192 tokens until the loss is {target}: 3 inner batches" in out
    assert "each step will read 192 tokens, 0 of them for line search\n" in out
    assert "r: resumes in outer step 3\n" in out
    assert f"target loss {target} reached after 4 outer steps" in out
    assert without_time(rows("r")) == without_time(rows("whole")[:5])
    assert saved_config("r")["steps"] is saved_config("r")["tokens"] is None
    assert train.main(line) == 0
    assert "r: finished by an earlier command\n" in capsys.readouterr().out

    low = [word if word != str(target) else "0.01" for word in line]
    assert train.main([*low, "--steps", "2", "--out", "s"]) == 0
    assert "target loss 0.01 not reached" in capsys.readouterr().out
    with signal_at(4):
        assert train.main([*low, "--out", "s"]) == 143
    said = "s: finished at 2 steps by an earlier command; goes on until the loss is 0.01\n"
    assert said in capsys.readouterr().out
    assert saved_config("s")["steps"] is None


def test_a_run_does_not_go_on_with_another_text(here, capsys):
    """The corpus is part of what a run is: with an edited text, its folder is another run's."""
    with signal_at(2 + 3 + 1):
        assert run("--method", "muon", "--out", "r") == 143
    before = everything("r")
    Path("text.txt").write_text(Path("text.txt").read_text()[::-1])
    capsys.readouterr()
    assert run("--method", "muon", "--out", "r") == 2
    err = capsys.readouterr().err
    assert "r holds another run (its text was another one);" in err and err.count("\n") == 1
    assert_same(everything("r"), before)


def test_the_hash_of_the_code_is_of_what_the_files_say(tmp_path, monkeypatch):
    """In every folder, but for the files that only show."""
    monkeypatch.setattr(checkpoint, "ROOT", tmp_path)
    (tmp_path / "runtime").mkdir()
    for name in ("gn", "plot", "runtime/flags", "runtime/report"):
        (tmp_path / f"{name}.py").write_text("1")
    hashes = [checkpoint.hash_of_code()]
    for name in ("gn", "runtime/flags"):
        (tmp_path / f"{name}.py").write_text("2")
        hashes.append(checkpoint.hash_of_code())
    assert len(set(hashes)) == 3
    for name in ("plot", "runtime/report"):
        (tmp_path / f"{name}.py").write_text("2")
        assert checkpoint.hash_of_code() == hashes[-1]


def test_another_run_in_the_folder_is_refused_by_name(here, capsys):
    assert run("--method", "adamw", "--out", "r") == 0
    before = everything("r")
    capsys.readouterr()
    assert run("--method", "adamw", "--out", "r", "--lr", "0.5", "--seed", "3") == 2
    err = capsys.readouterr().err
    assert "seed 0 -> 3" in err and "lr 0.015 -> 0.5" in err and err.count("\n") == 1
    assert_same(everything("r"), before)


def test_outside_of_a_checkout_there_is_no_commit(monkeypatch):
    """config.json then holds null for it."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert checkpoint.commit() is None


def test_the_commit_is_never_one_of_another_repository(tmp_path, monkeypatch):
    """Neither of one that variables name, as in a git hook, nor of one that the code lies in."""

    def git(*words):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    git("-c", "user.name=a", "-c", "user.email=b", "commit", "--allow-empty", "-m", "another")
    monkeypatch.setattr(checkpoint, "ROOT", tmp_path)
    its_own = checkpoint.commit()
    assert re.fullmatch("[0-9a-f]{40}", its_own)

    (tmp_path / "code").mkdir()
    monkeypatch.setattr(checkpoint, "ROOT", tmp_path / "code")
    assert checkpoint.commit() is None
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert checkpoint.commit() is None


def test_a_file_that_two_runs_write_is_written_by_one_at_a_time(tmp_path, monkeypatch):
    """Two threads, each with a draft of the same name: both files are whole."""
    drafts = []
    original = files.write_file

    def slow(path, write, check=None):
        drafts.append("begin")
        time.sleep(0.2)
        original(path, write, check)
        drafts.append("end")

    monkeypatch.setattr(files, "write_file", slow)
    path = tmp_path / "a.npz"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda x: checkpoint.save(path, {"x": x}, shared=True), np.arange(2)))
    assert drafts == ["begin", "end"] * 2


def test_a_resume_under_other_settings_of_jax_says_so(here, capsys):
    """The numbers may differ from there on; an older run, which kept no record, says nothing."""
    assert run("--method", "muon", "--out", "r", "--steps", "1") == 0
    path = Path("r/config.json")
    whole = json.loads(path.read_text())
    assert whole["about"]["jax_settings"] == checkpoint.jax_settings()

    for settings, said in (
        ({"jax_default_prng_impl": "rbg"}, "jax_default_prng_impl rbg -> threefry2x32"),
        (None, ""),
    ):
        about = dict(whole["about"], jax_settings=settings)
        if settings is None:
            del about["jax_settings"]
        path.write_text(json.dumps(whole | {"about": about}))
        capsys.readouterr()
        assert run("--method", "muon", "--out", "r", "--steps", "1") == 0
        err = capsys.readouterr().err
        assert err == (said and f"r was begun with other settings of JAX: {said}\n")


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.npz"
    checkpoint.save(path, {"x": jnp.arange(3)})

    def broken(f):
        f.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.write_file(path, broken)
    assert list(tmp_path.iterdir()) == [path]
    assert_same(checkpoint.load(path, {"x": jnp.zeros(3, jnp.int32)}), {"x": np.arange(3)})


X, Y = jnp.zeros(3, jnp.int32), jnp.zeros(1)


@pytest.mark.parametrize(
    "like, difference",
    [
        ({"y": X}, "['y'] is missing there, int32 [3] here"),
        ({"x": jnp.zeros(4, jnp.int32)}, "['x'] is int32 [3] there, int32 [4] here"),
        ({"x": jnp.zeros(3)}, "['x'] is int32 [3] there, float32 [3] here"),
        ({"x": X, "y": Y}, "['y'] is missing there, float32 [1] here"),
        ({}, "['x'] is int32 [3] there, missing here"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused(tmp_path, like, difference):
    """It says of the first array that differs what is there and what was expected."""
    checkpoint.save(tmp_path / "a.npz", {"x": jnp.arange(3)})
    with pytest.raises(ValueError) as error:
        checkpoint.load(tmp_path / "a.npz", like)
    assert str(error.value).endswith(f"other arrays than this run has: {difference}")


def test_a_checkpoint_of_the_other_width_names_its_cause(tmp_path):
    """A run that is resumed under another JAX_ENABLE_X64."""
    with jax.enable_x64(True):
        checkpoint.save(tmp_path / "a.npz", {"x": jnp.zeros(3)})
    with pytest.raises(ValueError) as error:
        checkpoint.load(tmp_path / "a.npz", {"x": jnp.zeros(3)})
    cause = "['x'] is float64 [3] there, float32 [3] here (was JAX_ENABLE_X64 another one then?)"
    assert str(error.value).endswith(cause)
