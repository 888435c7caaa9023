"""What a run does, prints and refuses, all through `train.main`, as a user would."""

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import AS_A_USER, SEARCH, SMALL, assert_same, everything, rows, run, without_time

import baselines
import data
import gn
import gn_cg
import model
import plot
import recipe
import sample
import train
from line_search import line_search
from runtime import checkpoint, command, files, flags, report
from text import tokenizer


@pytest.mark.parametrize("method", ["gn", "gn_cg"])
def test_tokens_are_those_that_were_read(here, method, monkeypatch):
    """A line search that ends early counts with what it has read until then, in every row."""
    searched = []

    def noted(*args):
        alpha, losses, read = line_search(*args)
        searched.append(read)
        return alpha, losses, read

    for module in (gn, gn_cg):
        monkeypatch.setattr(module, "line_search", noted)
    many = ["--batch", "1280", "--steps", "2", "--alphas", "1 0.1"]  # 20 inner batches
    if method == "gn_cg":
        many += ["--cg-steps", "3"]
    assert run("--method", method, "--out", "r", *many) == 0
    assert 8 <= min(searched) < 20
    tokens = [0, 64 * searched[0], 64 * sum(searched)]
    log = rows("r")
    assert [row["tokens_line_search"] for row in log] == tokens
    assert [row["tokens"] for row in log] == [128 + t * 1280 + tokens[t] for t in range(3)]
    assert run("--method", method, "--out", "whole", *many, "--race", "false") == 0
    assert rows("whole")[-1]["tokens_line_search"] == 2 * 1280
    assert [row["alpha"] for row in rows("whole")] == [row["alpha"] for row in log]


@pytest.mark.parametrize("method", list(recipe.METHODS))
def test_a_run_leaves_its_log_its_config_and_its_state(here, capsys, method):
    """Rows 0..3 with the fixed names, tokens counted; the table and the summary are printed."""
    assert run("--method", method, "--out", "r") == 0
    log, fresh = rows("r"), 192 if method in SEARCH else 0
    assert [row["step"] for row in log] == [0, 1, 2, 3]
    names = {
        "step",
        "tokens",
        "tokens_line_search",
        "train_loss",
        "val_loss",
        "val_bpb",
        "lr",
        "alpha",
        "seconds",
    }
    assert all(names <= set(row) for row in log)
    assert [row["tokens"] for row in log] == [128 + t * (192 + fresh) for t in range(4)]
    assert [row["tokens_line_search"] for row in log] == [t * fresh for t in range(4)]
    assert log[0]["lr"] is None
    assert log[0]["alpha"] is None
    has_lr = method != "gn_cg"
    assert all((row["lr"] is not None) == has_lr for row in log[1:])
    assert all((row["alpha"] is not None) == (method in SEARCH) for row in log[1:])
    meta = data.prepare("text.txt", data.tokenizer("bytes"), 16).meta
    for row in log:
        bits = row["val_loss"] / np.log(2) * meta["val_tokens"] / meta["val_bytes"]
        np.testing.assert_allclose(row["val_bpb"], bits)
    config = json.loads(Path("r/config.json").read_text())
    said = {"method": method, "model": "tiny", "batch": 192, "d_model": 8, "data": "text.txt"}
    assert said.items() <= config["config"].items()
    assert config["about"]["jax"] == jax.__version__
    assert everything("r")[".t"] == 3
    out = capsys.readouterr().out
    assert report.header() in out and f"{log[3]['val_loss']:.4f}" in out and "bits a byte" in out
    assert f"{log[3]['tokens']:,} tokens, {3 * fresh:,} of them for line search" in out


def test_evaluation_is_the_mean_over_held_out_windows(here):
    """val_loss is the loss of the saved weight average over the same windows in one large batch.

    Of 38 windows the last inner batch has two.
    """
    flags = ["--method", "adamw", "--out", "r", "--eval-tokens", "608"]
    assert run(*flags) == 0
    config = recipe.configure([*SMALL, "--data", "text.txt", *flags])
    corpus = data.prepare("text.txt", config.tokenizer, 16)
    state = baselines.init(model.init(config.network, jax.random.key(0)), config.settings)
    state = checkpoint.load(Path("r/checkpoint.npz"), state)
    windows = data.batch([corpus.val], 16, 38, 0, 0)

    def loss(params):
        return train.mean_loss(config.network, params, windows)

    np.testing.assert_allclose(rows("r")[3]["val_loss"], loss(state.average), rtol=1e-5)
    assert abs(loss(state.params) - rows("r")[3]["val_loss"]) > 1e-4


def test_fault_2_layerwise_runs_as_a_command(here):
    """In a process of its own, as a user starts it: status 0, a table, nothing on stderr."""
    methods = ["layerwise_gn", "adamw"]
    flags = ["--data", "text.txt", "--method", ",".join(methods)]
    flags += ["--steps", "1", "--out", "r"]
    command = [sys.executable, train.__file__, *SMALL, *flags]
    quick = AS_A_USER | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=quick)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(report.header()) == len(methods)
    assert done.stdout.count("after 1 outer steps") == len(methods)
    assert not done.stderr


def test_fault_6_every_evaluation_reads_the_same_windows_and_no_others(here, monkeypatch):
    """The first --eval-tokens, all of them, at each of four evaluations, whatever the seed."""
    read, original = [], data.sequences
    monkeypatch.setattr(
        data, "sequences", lambda text, *a: read.append((len(text[0]), a)) or original(text, *a)
    )
    assert run("--method", "muon", "--out", "r", "--seed", "7") == 0
    held_out = data.prepare("text.txt", data.tokenizer("bytes"), 16).meta["val_tokens"]
    evaluations = [
        (context, seed, list(numbers)) for n, (context, seed, numbers) in read if n == held_out
    ]
    expected = [(16, 0, [*range(i, i + 4)]) for i in range(0, 40, 4)]
    assert evaluations == 4 * expected


def test_training_reads_the_batches_that_its_place_says(here, monkeypatch):
    """Warm-up, then for each step its inner batches and its fresh ones: in order, each once."""
    read, original = [], data.batch
    monkeypatch.setattr(
        data, "batch", lambda tokens, *place: read.append(place) or original(tokens, *place)
    )
    assert run("--method", "gn", "--out", "r", "--seed", "5") == 0
    assert read == [(16, 4, 5, index) for index in range(2 + 3 * 6)]


def test_warm_up_is_shared_by_methods_and_not_by_seeds(here):
    for more in (["--method", "gn"], ["--method", "muon"], ["--method", "gn", "--lr", "0.05"]):
        assert run(*more) == 0
    assert len(list(Path("data").glob("warmup-*.npz"))) == 1
    first = [rows(out)[0]["val_loss"] for out in Path("runs").iterdir()]
    assert len(first) == 3 and len(set(first)) == 1
    assert run("--method", "gn", "--seed", "1") == 0
    assert len(list(Path("data").glob("warmup-*.npz"))) == 2


def test_target_loss_stops_the_run(here, capsys):
    assert run("--method", "gn", "--out", "whole", "--steps", "4") == 0
    losses = [row["val_loss"] for row in rows("whole")]
    assert losses[3] < losses[1]
    assert (
        run("--method", "gn", "--out", "r", "--steps", "4", "--target-loss", str(losses[1] + 1e-6))
        == 0
    )
    assert [row["val_loss"] for row in rows("r")] == losses[:2]
    tokens = rows("r")[1]["tokens"]
    assert (
        f"{losses[1] + 1e-6} reached after 1 outer steps, {tokens:,} tokens"
        in capsys.readouterr().out
    )
    assert run("--method", "gn", "--out", "s", "--steps", "1", "--target-loss", "0.01") == 0
    assert "target loss 0.01 not reached" in capsys.readouterr().out


def test_the_opening_lines_say_what_will_be_done(here, capsys):
    """Sizes as they came out, what is read, and the flags that were given; nothing else."""
    assert run("--method", "gn", "--out", "r", "--batch", "200", "--lr", "0.03") == 0
    out = capsys.readouterr().out
    lines = out[: out.index(report.header())].splitlines()
    assert lines[0].startswith("Gauss-Newton on tiny: 4,536 parameters, float32 on 4 x cpu")
    meta = data.prepare("text.txt", data.tokenizer("bytes"), 16).meta
    assert lines[1] == f"text text.txt, {data.describe(meta)}"
    assert lines[2] == (
        "3 outer steps of 192 tokens: 3 inner batches of 4 x 16 (sequences, positions)"
    )
    assert lines[3] == (
        "another number of steps is another run, as the learning rate depends on it: "
        "--schedule global cosine"
    )
    assert lines[4].startswith("--batch 200 became 192, as a batch is cut into whole inner batches")
    assert lines[5].startswith("warm-up: 128 tokens, 2 steps of AdamW, made once")
    assert lines[6].startswith("it will read at most 1,280 tokens, 576 of them for line search")
    given = lines[7].removeprefix("flags given: ")
    assert "--lr 0.03" in given and "--batch 200" in given and "--clip" not in given
    assert lines[8:] == ["r: a new run"]


def test_reading_the_text_more_than_once_is_said(here, capsys):
    large = ["--batch", "19200", "--steps", "5", "--inner-batch", "300"]
    assert run("--method", "gn", "--out", "b", *large) == 0
    assert "it will read at most 192,000 tokens, 96,000 of them for line search: 2." in (
        capsys.readouterr().out
    )


def test_a_run_says_whether_it_is_new_resumed_or_finished(here, capsys, monkeypatch):
    """And a run that is finished does not say how it could be trained on."""
    original = baselines.update

    def update(state, *rest):
        if state.t == 2:
            raise command.Stop(15)
        return original(state, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "update", update)
        assert run("--method", "muon", "--out", "r") == 143
    assert "r: a new run\n" in capsys.readouterr().out
    assert run("--method", "muon", "--out", "r") == 0
    out = capsys.readouterr().out
    assert "r: resumes in outer step 3\n" in out
    assert run("--method", "muon", "--out", "r") == 0
    out = capsys.readouterr().out
    assert "r: finished by an earlier command\n" in out
    assert out.endswith(
        'figures:  python plot.py r\na sample: python sample.py --out r "Once upon a time"\n'
    )


def test_a_run_that_came_to_its_target_is_finished(here, capsys):
    target = ["--target-loss", "9", "--out", "r"]
    for said in ("a new run", "finished by an earlier command"):
        assert run("--method", "muon", *target) == 0
        assert f"r: {said}\n" in capsys.readouterr().out


def test_a_run_that_was_stopped_in_its_warm_up_says_so(here, capsys):
    original, calls = baselines.update, []

    def update(*args):
        calls.append(args)
        if len(calls) == 3:
            raise command.Stop(15)
        return original(*args)

    line = ["--method", "muon", "--out", "r", "--save-every", "1e-9", "--warmup-tokens", "1024"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "update", update)
        assert run(*line) == 143
    assert "r: a new run\n" in capsys.readouterr().out
    assert run(*line) == 0
    assert "r: resumes in its warm-up\n" in capsys.readouterr().out


def test_a_signal_while_a_warm_up_waits_for_text_saves_it(here, capsys, monkeypatch):
    """However long it is until the next save."""
    read, stop_if_asked = data.batch, train.Session.stop_if_asked
    may_read = threading.Event()

    def batch(tokens, context, size, seed, index):
        if index == 2:
            may_read.wait(60)
        return read(tokens, context, size, seed, index)

    def signal_and_stop(session):
        os.kill(os.getpid(), signal.SIGTERM)
        stop_if_asked(session)

    monkeypatch.setattr(data, "batch", batch)
    monkeypatch.setattr(train.Session, "stop_if_asked", signal_and_stop)
    line = ["--method", "muon", "--out", "r", "--warmup-tokens", "1024"]
    assert run(*line) == 143
    may_read.set()
    assert Path("r/warmup.npz").exists()
    assert run(*line) == 0
    assert "r: resumes in its warm-up\n" in capsys.readouterr().out


def test_the_commands_that_a_run_ends_with_are_valid(here, capsys):
    """plot.py and sample.py, as printed by a run and by a grid; also where a folder has a blank."""
    for line in (["--out", "my run"], ["--lr", "0.01,0.02"]):
        assert run("--method", "muon", *line) == 0
        *_, figures, sampled = capsys.readouterr().out.splitlines()
        (runs,) = shlex.split(figures.removeprefix("figures:  python plot.py "))
        assert plot.main([str(path) for path in Path().glob(runs)]) == 0
        assert sample.main(shlex.split(sampled.removeprefix("a sample: python sample.py "))) == 0
        capsys.readouterr()


def test_how_long_a_run_will_take_is_said_after_its_second_step(here, capsys, monkeypatch):
    """Twelve steps of 100 s each: ten are left after the second."""
    original, clock = train.outer_step, [0.0]

    def outer_step(*args):
        clock[0] += 100
        return original(*args)

    monkeypatch.setattr(train, "outer_step", outer_step)
    monkeypatch.setattr(train.time, "perf_counter", lambda: clock[0])
    assert run("--method", "muon", "--out", "r", "--steps", "12") == 0
    assert capsys.readouterr().out.count("\nabout 16 min 40 s to go\n") == 1


def test_a_grid_holds_a_folder_only_while_it_works_there(here, capsys):
    """What others hold, it leaves to them. So a grid may be shared by two terminals."""
    line = ["--method", "muon", "--seed", "0,1,2", "--out", "g"]
    folders = [
        recipe.configure([*SMALL, "--data", "text.txt", *member], "g").config.out
        for member in flags.expand(line)
    ]
    original, seen = train.execute, []

    def execute(run, *rest):
        seen.append([Path(folder).exists() for folder in folders])
        return original(run, *rest)

    with pytest.MonkeyPatch.context() as patch, checkpoint.alone(folders[1]):
        patch.setattr(train, "execute", execute)
        assert run(*line) == 0
    out, err = capsys.readouterr()
    assert seen == [[True, True, False], [True, True, True]]
    assert err == f"train.py: {folders[1]} is in use by another command, and is left to it\n"
    assert [line.split()[0] for line in out.splitlines() if line.endswith(folders[1])][-1] == "in"
    assert run(*line) == 0 and len(rows(folders[1])) == 4


def test_of_two_runs_one_makes_the_warm_up_and_the_other_waits_for_it(here, monkeypatch):
    """Or they would not start from the same bits on a GPU. Ctrl-C ends the waiting."""
    assert run("--method", "adamw", "--out", "a") == 0
    (path,) = Path("data").glob("warmup-*.npz")
    made = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(train, "make_warm_up", None)  # it would fail

    def run_beside_another(then):
        """The status of a run that finds its warm-up in the making; then() is called as it says."""

        def say(text, **options):
            print(text, **options)
            if text == "waits for another run, which makes the same warm-up":
                then()

        monkeypatch.setattr(train, "print", say, raising=False)
        return run("--method", "muon", "--out", "b")

    with ExitStack() as other_run:
        other_run.enter_context(files.locked(path.with_suffix(".lock")))
        assert run_beside_another(lambda: os.kill(os.getpid(), signal.SIGINT)) == 130

        def finish():
            path.write_bytes(made)
            other_run.close()

        assert run_beside_another(finish) == 0
    assert rows("a")[0]["val_loss"] == rows("b")[0]["val_loss"]


def test_a_warm_up_belongs_to_its_text(here):
    """Another text of the same name has another warm-up."""
    for out in ("a", "b"):
        assert run("--method", "gn", "--out", out) == 0
        Path("text.txt").write_text(Path("text.txt").read_text()[::-1])
    assert len(list(Path("data").glob("warmup-*.npz"))) == 2


def test_the_warm_up_is_adamw_on_single_inner_batches(here, monkeypatch):
    """Section 5: at a constant learning rate, here after a linear rise over the first tenth."""
    seen, original = [], baselines.init
    monkeypatch.setattr(
        baselines, "init", lambda params, config: seen.append(config) or original(params, config)
    )
    assert run("--method", "gn", "--out", "r") == 0
    assert type(seen[0]) is baselines.AdamW and (seen[0].inner_steps, seen[0].outer_steps) == (1, 2)
    assert (seen[0].lr, seen[0].schedule, seen[0].warmup) == (0.002, "constant", 0.1)


def test_a_diverging_warm_up_is_not_kept(here, capsys):
    line = ["--method", "gn", "--out", "r", "--warmup-tokens", "1024"]
    assert run(*line, "--warmup-lr", "1e38") == 1
    assert "try a smaller --warmup-lr" in capsys.readouterr().err
    assert not list(Path("data").glob("warmup-*.npz"))


def test_a_diverging_run_ends_with_its_last_good_checkpoint_and_says_so_ever_after(
    here, capsys, monkeypatch
):
    assert run("--method", "adamw", "--out", "r", "--lr", "1e30", "--steps", "9") == 1
    first = capsys.readouterr().err
    assert "try a smaller --lr" in first and first.count("\n") == 1
    assert all(
        np.isfinite(a).all() for name, a in everything("r").items() if name.startswith(".params")
    )
    *good, last = rows("r")
    assert (
        all(np.isfinite(row["val_loss"]) for row in good)
        and last["val_loss"] is None
        and last["diverged"] in first
    )
    assert last["step"] == good[-1]["step"] + 1
    monkeypatch.setattr(train, "train", None)
    assert run("--method", "adamw", "--out", "r", "--lr", "1e30", "--steps", "9") == 1
    assert last["diverged"] in capsys.readouterr().err


GRID = ["--method", "muon,adamw", "--lr", "0.01,1e30", "--schedule=cosine", "--average", "0"]


def table_of_grid(out):
    """The words of each line of the table of a grid, without its header."""
    table = out.split("val_loss")[-1].split("\n\n")[0]
    return [line.split() for line in table.splitlines()[1:]]


def test_a_grid_is_every_combination_one_after_another(here, capsys, monkeypatch):
    """Each is as it would be alone. Two diverge, which is recorded. A table is sorted by loss."""
    assert run(*GRID) == 0
    out, err = capsys.readouterr()
    assert err.count("try a smaller --lr") == 2 and "---- run 4 of 4" in out
    logs = {
        (config["method"], config["lr"]): rows(folder)
        for folder in Path("runs").iterdir()
        for config in [json.loads((folder / "config.json").read_text())["config"]]
    }
    assert len(logs) == 4
    for (method, lr), log in logs.items():
        assert ("diverged" in log[-1]) == (lr == 1e30)
        if lr == 0.01:
            assert (
                run(
                    "--method",
                    method,
                    "--lr",
                    "0.01",
                    "--schedule",
                    "cosine",
                    "--average",
                    "0",
                    "--out",
                    method,
                )
                == 0
            )
            assert without_time(rows(method)) == without_time(log)
    table = table_of_grid(out)
    finals = sorted(
        (log[-1]["val_loss"], method, str(lr)) for (method, lr), log in logs.items() if lr < 1
    )
    assert [(f"{loss:.4f}", method, lr) for loss, method, lr in finals] == [
        (r[0], r[3], r[4]) for r in table[:2]
    ]
    assert [row[0] for row in table[2:]] == ["diverged"] * 2
    capsys.readouterr()
    monkeypatch.setattr(train, "outer_step", None)  # nothing is trained again
    monkeypatch.setattr(train, "warm_up", None)
    assert run(*GRID) == 0
    assert table_of_grid(capsys.readouterr().out) == table


def test_a_grid_over_another_text_is_refused_before_anything_runs(here, capsys, monkeypatch):
    line = ["--method", "muon", "--seed", "0,1"]
    assert run(*line) == 0
    Path("text.txt").write_text(Path("text.txt").read_text()[::-1])
    monkeypatch.setattr(train, "execute", None)
    capsys.readouterr()
    assert run(*line) == 2
    assert "holds another run (its text was another one)" in capsys.readouterr().err


def test_a_failure_of_the_machine_ends_one_run_of_a_grid(here, capsys):
    """As a lack of memory does, where a grid is over sizes. --batch has a column of its own."""
    original = train.execute

    def execute(run, *rest):
        if run.config.batch == 128:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB")
        return original(run, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "execute", execute)
        assert run("--method", "muon", "--batch", "128,192") == 0
    out, err = capsys.readouterr()
    assert err.startswith("train.py: the device is out of memory; for train.py, lower ")
    done, failed = table_of_grid(out)
    assert done[1:4] == ["3", f"{rows(done[4])[-1]['tokens']:,}", "192"]
    assert failed[:4] == ["failed", "-", "-", "128"]


def test_a_grid_without_a_run_says_no_commands(here, capsys):
    assert run("--method", "adamw", "--lr", "1e30,1e31") == 1
    assert "sample.py" not in capsys.readouterr().out


def test_a_grid_with_a_bad_member_is_refused_before_anything_runs(here, capsys):
    before = set(here.rglob("*"))
    assert run("--method", "muon", "--lr", "0.01,-1") == 2
    assert "lr is -1.0" in capsys.readouterr().err and set(here.rglob("*")) == before
    assert run("--method", "muon", "--lr", "0.01,,0.02") == 2
    assert "--lr is ''" in capsys.readouterr().err


def test_a_grid_of_which_all_diverge_is_a_failure(here, capsys):
    assert run("--method", "adamw", "--lr", "1e30,1e31") == 1
    assert capsys.readouterr().err.count("try a smaller --lr") == 2


def test_evaluations_are_as_far_apart_as_flags_say(here):
    """Of 5 steps, 0, 2, 4 and the last. By default evaluations read no more than training."""
    assert run("--method", "muon", "--out", "r", "--steps", "5", "--eval-every", "2") == 0
    assert run("--method", "muon", "--out", "s", "--steps", "5") == 0
    some, every = rows("r"), {row["step"]: row for row in rows("s")}
    assert [row["step"] for row in some] == [0, 2, 4, 5] and list(every) == [0, 1, 2, 3, 4, 5]
    for row in some:
        assert (
            row["val_loss"] == every[row["step"]]["val_loss"]
            and row["tokens"] == every[row["step"]]["tokens"]
        )
    assert_same(everything("r"), everything("s"))
    line = ["--model", "tiny", "--eval-tokens", "65536", "--data", "text.txt"]
    assert recipe.configure([*line, "--batch", "1024"]).values["eval_every"] == 64
    assert recipe.configure([*line, "--batch", "131072"]).values["eval_every"] == 1


@pytest.mark.parametrize("every", ["1", "4"])
def test_refused_steps_are_counted_between_evaluations_too(here, capsys, every):
    """At this lr the line search refuses steps, and the summary says how many."""
    assert (
        run("--method", "gn", "--out", "r", "--steps", "8", "--lr", "3", "--eval-every", every) == 0
    )
    refused = sum(row["refused"] or 0 for row in rows("r"))
    said = f"refused steps, where no step size lowered the loss: {refused}; try a smaller --lr"
    assert said in capsys.readouterr().out and refused > 1
    if every == "1":
        assert refused == sum(row["alpha"] == 0 for row in rows("r"))


@pytest.mark.parametrize(
    "line, tie",
    [
        (["--method", "gn"], "--schedule global cosine"),
        (["--method", "gn", "--schedule", "constant", "--warmup", "0.2"], "--warmup 0.2"),
        (["--method", "soap", "--schedule", "cosine", "--warmup", "0.1"], "--schedule cosine"),
    ],
)
def test_a_target_alone_ends_no_run_whose_learning_rate_needs_a_length(here, capsys, line, tie):
    assert train.main(["--model", "tiny", "--target-loss", "2", *line]) == 2
    assert capsys.readouterr().err == (
        "train.py: --target-loss needs --steps or --tokens beside it, as the learning rate "
        f"depends on the length of the run ({tie})\n"
    )


def test_runs_of_other_lengths_batches_and_methods_start_from_the_same_weights(here, monkeypatch):
    """Bit for bit, though each of them makes its warm-up anew here."""
    starts, original = [], train.warm_up

    def warm_up(session):
        params, train_loss = original(session)
        starts.append(jax.tree.map(np.array, params))
        return params, train_loss

    monkeypatch.setattr(train, "warm_up", warm_up)
    muon = ["--method", "muon"]
    lines = [muon, [*muon, "--steps", "1"], [*muon, "--batch", "64"], ["--method", "gn_prox"]]
    for number, line in enumerate(lines):
        for path in Path("data").glob("warmup-*"):
            path.unlink()
        assert run(*line, "--out", f"r{number}") == 0
    assert len(starts) == len(lines)
    for start in starts[1:]:
        assert_same(start, starts[0])


def test_flags_that_came_out_with_another_value_are_said(here, capsys):
    line = ["--warmup-tokens", "130", "--tokens", "9k", "--vocab-size", "0", "--lr", "0.010"]
    assert run("--method", "muon", "--out", "r", "--steps", "1", *line) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if ", as " in line] == [
        "--tokens 9,000 has no effect, as --steps says how long the run is",
        "--warmup-tokens 130 became 128, as a warm-up reads whole inner batches, of 64 tokens each",
        "--vocab-size 0 became 256, as the tokenizer has so many ids",
    ]


def test_a_grid_over_lengths_is_one_run_that_grows(here, capsys, monkeypatch):
    """The shortest comes first, so that each length has its row, as it would have alone."""
    line = ["--method", "muon", "--eval-every", "3"]
    assert run(*line, "--steps", "2", "--out", "short") == 0
    calls, original = [], baselines.update
    monkeypatch.setattr(baselines, "update", lambda *a: calls.append(int(a[0].t)) or original(*a))
    assert run(*line, "--steps", "4,2", "--out", "g") == 0
    assert calls == [0, 1, 2, 3]
    (folder,) = Path("g").iterdir()
    assert [row["step"] for row in rows(folder)] == [0, 2, 3, 4]
    table = table_of_grid(capsys.readouterr().out)
    assert sorted([row[1], row[3]] for row in table) == [["2", "2"], ["4", "4"]]
    short = rows("short")[-1]
    assert f"{short['val_loss']:.4f}" in [row[0] for row in table if row[1] == "2"]

    assert run(*line, "--steps", "4,2", "--out", "g") == 0
    assert table_of_grid(capsys.readouterr().out) == table
    assert calls == [0, 1, 2, 3]


def test_every_number_of_a_method_is_in_the_log(here, monkeypatch):
    """Also one that only this method knows; null if it is not finite, which JSON cannot say."""
    original = gn.update

    def update(*args):
        state, metrics = original(*args)
        return state, metrics | {"inner_loss": jnp.nan, "step_norm": jnp.float32(2.5), "tries": 3}

    monkeypatch.setattr(gn, "update", update)
    assert run("--method", "gn", "--out", "r") == 0
    row = rows("r")[1]
    assert row["inner_loss"] is None and row["step_norm"] == 2.5 and row["tries"] == 3
    assert run("--method", "gn", "--out", "r") == 0


def test_without_a_vocabulary_the_papers_defaults_say_how_to_get_it(here, capsys, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(here))
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    tokenizer.gpt2.cache_clear()
    assert train.main([]) == 2
    err = capsys.readouterr().err
    assert "set TIKTOKEN_CACHE_DIR to a folder" in err and err.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_bad_input(here, capsys):
    """Also data/, of which JAX would warn once more for each program that it cannot keep."""
    for path, out in (("file", ["--out", "file/r"]), ("data", [])):
        Path(path).write_text("x")
        assert run("--method", "gn", *out) == 2
        assert capsys.readouterr().err == f"train.py: {here}/{path}: Not a directory\n"


def test_the_method_of_the_readme_can_be_added(here, monkeypatch):
    """Its file is made of the README's lines; it trains, is resumed, and takes micro-batches."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    _, block = text.split("```python\n", 1)
    Path("sgd.py").write_text(block.partition("```")[0])
    spec = importlib.util.spec_from_file_location("sgd", "sgd.py")
    sgd = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sgd", sgd)  # its dataclass asks for its module
    spec.loader.exec_module(sgd)
    monkeypatch.setitem(recipe.METHODS, "sgd", recipe.Method(sgd, sgd.Config, "SGD"))
    assert run("--method", "sgd", "--lr", "0.5", "--out", "r") == 0
    losses = [row["val_loss"] for row in rows("r")]
    assert losses == sorted(losses, reverse=True)
    assert run("--method", "sgd", "--lr", "0.5", "--out", "m", "--micro-batch", "1") == 0
    np.testing.assert_allclose([row["val_loss"] for row in rows("m")], losses, rtol=1e-5)
