"""The command line, the run folder, and runs that are stopped and go on, all through `train.main`, as a user would."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import AS_A_USER, assert_same

import baselines
import checkpoint
import data
import flags
import gn
import model
import report
import train

SMALL = ["--model", "tiny", "--d-model", "8", "--d-ff", "8", "--n-layers", "1", "--n-heads", "2", "--n-kv-heads", "2"]
SMALL += "--context 16 --batch 192 --inner-batch 4 --tokens 2k --eval-tokens 640 --eval-every 1 --steps 3".split()
SEARCH = ("gn", "layerwise_gn")  # the methods with a line search by default


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory with a short English-looking text in it."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dogs"]
    lines = [" ".join(rng.choice(words, 9)) + "\n" + "\n" * (i % 50 == 49) for i in range(3000)]
    Path("text.txt").write_text("".join(lines))
    return tmp_path


def run(*flags):
    return train.main([*SMALL, "--data", "text.txt", *flags])


def rows(out):
    return [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]


def everything(out):
    with np.load(Path(out, "checkpoint.npz"), allow_pickle=False) as arrays:
        return dict(arrays)


def without_time(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.mark.parametrize("method", list(train.METHODS))
def test_a_run_leaves_its_log_its_config_and_its_state(here, capsys, method):
    """Rows 0..3 with the fixed names; tokens counted, line search included; the table and the summary are printed."""
    assert run("--method", method, "--out", "r") == 0
    log, fresh = rows("r"), 192 if method in SEARCH else 0
    assert [row["step"] for row in log] == [0, 1, 2, 3]
    names = {"step", "tokens", "tokens_line_search", "train_loss", "val_loss", "val_bpb", "lr", "alpha", "seconds"}
    assert all(names <= set(row) for row in log)
    warm = round(0.05 * 2000 / 64) * 64
    assert [row["tokens"] for row in log] == [warm + t * (192 + fresh) for t in range(4)]
    assert [row["tokens_line_search"] for row in log] == [t * fresh for t in range(4)]
    assert log[0]["lr"] is None and log[0]["alpha"] is None and all(row["lr"] > 0 for row in log[1:])
    assert all((row["alpha"] is not None) == (method in SEARCH) for row in log[1:])
    meta = data.prepare("text.txt", data.tokenizer("bytes"), 16).meta
    for row in log:
        bits = row["val_loss"] / np.log(2) * meta["val_tokens"] / meta["val_bytes"]
        np.testing.assert_allclose(row["val_bpb"], bits)
    config = json.loads(Path("r/config.json").read_text())
    assert (
        config["config"]["method"] == method
        and config["config"]["batch"] == 192
        and config["about"]["jax"] == jax.__version__
    )
    assert everything("r")[".t"] == 3
    out = capsys.readouterr().out
    assert report.HEADER in out and f"{log[3]['val_loss']:.4f}" in out and "bits a byte" in out


def test_evaluation_is_the_mean_over_held_out_windows(here):
    """val_loss of the last row = the loss of the saved weight average over the same windows, in one large batch."""
    assert run("--method", "adamw", "--out", "r") == 0
    config = train.configure([*SMALL, "--data", "text.txt", "--method", "adamw", "--out", "r"])
    corpus = data.prepare("text.txt", config.tokenizer, 16)
    state = baselines.init(model.init(config.settings.model, jax.random.key(0)), config.settings)
    state = checkpoint.load(Path("r/checkpoint.npz"), state)
    batch = data.batch(corpus.val, 16, 40, 0, 0)
    np.testing.assert_allclose(
        rows("r")[3]["val_loss"], model.loss(config.settings.model, state.average, batch), rtol=1e-5
    )
    assert abs(model.loss(config.settings.model, state.params, batch) - rows("r")[3]["val_loss"]) > 1e-4


def test_training_reads_the_batches_that_its_place_says(here, monkeypatch):
    """Warm-up, then each step its own inner batches and its own fresh ones: in order, none twice, none left out."""
    read, original = [], data.batch
    monkeypatch.setattr(data, "batch", lambda tokens, *place: read.append(place) or original(tokens, *place))
    assert run("--method", "gn", "--out", "r", "--seed", "5") == 0
    assert read == [(16, 4, 5, index) for index in range(2 + 3 * 6)]


def test_a_finished_run_is_not_run_again(here, capsys):
    assert run("--method", "muon", "--out", "r") == 0
    before, table = Path("r/checkpoint.npz").stat().st_mtime_ns, capsys.readouterr().out.split("train_loss")[1]
    assert run("--method", "muon", "--out", "r") == 0
    assert Path("r/checkpoint.npz").stat().st_mtime_ns == before
    assert capsys.readouterr().out.split("train_loss")[1] == table


def test_warm_up_is_shared_by_methods_and_not_by_seeds(here):
    for more in (["--method", "gn"], ["--method", "muon"], ["--method", "gn", "--lr", "0.05"]):
        assert run(*more) == 0
    assert len(list(Path("data").glob("warmup-*.npz"))) == 1
    first = [rows(out)[0]["val_loss"] for out in Path("runs").iterdir()]
    assert len(first) == 3 and len(set(first)) == 1
    assert run("--method", "gn", "--seed", "1") == 0
    assert len(list(Path("data").glob("warmup-*.npz"))) == 2


def test_a_damaged_warm_up_is_made_again(here, capsys):
    assert run("--method", "gn", "--out", "a") == 0
    (path,) = Path("data").glob("warmup-*.npz")
    path.write_bytes(path.read_bytes()[:100])
    assert run("--method", "gn", "--out", "b") == 0
    assert "made again" in capsys.readouterr().err
    assert_same(everything("a"), everything("b"))


@pytest.mark.parametrize("method", list(train.METHODS))
def test_a_run_that_is_stopped_anywhere_goes_on_bitwise(here, monkeypatch, method):
    """SIGTERM after the n-th batch, n all over a run: status 143; the same command then ends in the same state."""
    assert run("--method", method, "--out", "whole") == 0
    batches, original = 3 * (6 if method in SEARCH else 3), data.batch
    for n in range(0, batches, 4):
        count = iter(range(10_000))

        def counted(*place, n=n, count=count):
            if next(count) == n:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*place)

        monkeypatch.setattr(data, "batch", counted)
        assert run("--method", method, "--out", f"stopped{n}") == 143
        monkeypatch.setattr(data, "batch", original)
        assert run("--method", method, "--out", f"stopped{n}") == 0
        assert_same(everything(f"stopped{n}"), everything("whole"))
        assert without_time(rows(f"stopped{n}")) == without_time(rows("whole"))


@pytest.mark.parametrize("module, name", [(data, "write"), (data, "batch"), (train, "evaluate"), (checkpoint, "save")])
def test_a_signal_outside_of_steps_ends_the_run_too(here, monkeypatch, capsys, module, name):
    """While the corpus is tokenized, in the warm-up, in an evaluation, while saving: one line, nothing broken."""
    original = getattr(module, name)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda *args: os.kill(os.getpid(), signal.SIGINT) or original(*args))
        assert run("--method", "gn", "--out", "r") == 130
    err = capsys.readouterr().err
    assert "stopped; nothing to save yet" in err and err.count("\n") == 1
    assert not list(here.glob("**/*draft*"))
    assert run("--method", "gn", "--out", "r") == 0


def test_a_signal_in_an_evaluation_does_not_lose_the_step_before(here, monkeypatch):
    """The inner steps that were done are saved: only the line search is made again."""
    assert run("--method", "gn", "--out", "whole") == 0
    original, count = train.evaluate, iter(range(9))
    with monkeypatch.context() as patch:
        stop = lambda *args: (next(count) == 2 and os.kill(os.getpid(), signal.SIGINT)) or original(*args)
        patch.setattr(train, "evaluate", stop)
        assert run("--method", "gn", "--out", "r") == 130
    assert (everything("r")[".t"], everything("r")[".k"]) == (1, 3)
    assert run("--method", "gn", "--out", "r") == 0
    assert_same(everything("r"), everything("whole"))
    assert without_time(rows("r")) == without_time(rows("whole"))


def test_resuming_does_not_need_the_warm_up(here, monkeypatch):
    """From a checkpoint the warm-up is not made again, though its cache is gone."""
    assert run("--method", "gn", "--out", "r") == 0
    for path in Path("data").glob("warmup-*"):
        path.unlink()
    monkeypatch.setattr(train, "warm_up", None)
    assert run("--method", "gn", "--out", "r") == 0


def test_other_code_is_another_run(here, monkeypatch, capsys):
    """The default folder's name depends on the code; in a folder that is named, a change of the code is said."""
    assert run("--method", "adamw") == 0 and run("--method", "adamw", "--out", "r") == 0
    monkeypatch.setattr(checkpoint, "code", lambda *modules: "changed")
    assert run("--method", "adamw") == 0
    assert len(list(Path("runs").iterdir())) == 2
    capsys.readouterr()
    assert run("--method", "adamw", "--out", "r") == 0
    assert "r was begun with other code" in capsys.readouterr().err


def test_ctrl_c_ends_a_real_process_cleanly(here):
    """python train.py, SIGINT while it trains: exit status 130, no traceback, and a checkpoint that can be read."""
    command = [
        sys.executable,
        str(Path(train.__file__)),
        *SMALL,
        "--data",
        "text.txt",
        "--method",
        "gn",
        "--out",
        "r",
        "--steps",
        "100000",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=AS_A_USER)
    while process.poll() is None and not (Path("r/log.jsonl").exists() and len(rows("r")) > 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "the same command goes on" in err
    assert everything("r")[".t"] >= 2


def test_target_loss_stops_the_run(here, capsys):
    assert run("--method", "gn", "--out", "whole", "--steps", "4") == 0
    losses = [row["val_loss"] for row in rows("whole")]
    assert losses[3] < losses[1]
    assert run("--method", "gn", "--out", "r", "--steps", "4", "--target-loss", str(losses[1] + 1e-6)) == 0
    assert [row["val_loss"] for row in rows("r")] == losses[:2]
    tokens = rows("r")[1]["tokens"]
    assert f"{losses[1] + 1e-6} reached after 1 outer steps, {tokens:,} tokens" in capsys.readouterr().out
    assert run("--method", "gn", "--out", "s", "--steps", "1", "--target-loss", "0.01") == 0
    assert "target loss 0.01 not reached" in capsys.readouterr().out


def test_reading_the_corpus_more_than_once_is_said(here, capsys):
    assert run("--method", "gn", "--out", "a") == 0
    assert "the corpus" not in capsys.readouterr().out
    assert run("--method", "gn", "--out", "b", "--batch", "19200", "--steps", "5", "--inner-batch", "300") == 0
    assert "the run reads 192," in capsys.readouterr().out


def test_what_is_not_finite_is_null_in_the_log(here, monkeypatch):
    """A refused step may have an inner loss of NaN, which JSON has not."""
    original = gn.update

    def update(*args):
        state, metrics = original(*args)
        return state, metrics | {"inner_loss": jnp.nan * metrics["inner_loss"]}

    monkeypatch.setattr(gn, "update", update)
    assert run("--method", "gn", "--out", "r") == 0
    assert "NaN" not in Path("r/log.jsonl").read_text() and rows("r")[1]["inner_loss"] is None


def test_a_diverging_warm_up_is_not_kept(here, capsys):
    assert run("--method", "gn", "--out", "r", "--warmup-lr", "1e38", "--tokens", "20k") == 1
    assert "try a smaller --warmup-lr" in capsys.readouterr().err
    assert not list(Path("data").glob("warmup-*"))


def test_a_diverging_run_ends_with_its_last_good_checkpoint_and_says_so_ever_after(here, capsys, monkeypatch):
    assert run("--method", "adamw", "--out", "r", "--lr", "1e30", "--steps", "9") == 1
    first = capsys.readouterr().err
    assert "try a smaller --lr" in first and first.count("\n") == 1
    assert all(np.isfinite(a).all() for name, a in everything("r").items() if name.startswith(".params"))
    *good, last = rows("r")
    assert all(np.isfinite(row["val_loss"]) for row in good) and last["val_loss"] is None and last["diverged"] in first
    assert last["step"] == good[-1]["step"] + 1
    monkeypatch.setattr(train, "train", None)
    assert run("--method", "adamw", "--out", "r", "--lr", "1e30", "--steps", "9") == 1
    assert last["diverged"] in capsys.readouterr().err


GRID = ["--method", "muon,soap", "--lr", "0.01,1e30", "--schedule=cosine", "--average", "0"]


def test_a_grid_is_every_combination_one_after_another(here, capsys, monkeypatch):
    """Four runs, each as it would be alone; two diverge, are recorded, and the others go on; a table sorted by loss."""
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
                run("--method", method, "--lr", "0.01", "--schedule", "cosine", "--average", "0", "--out", method) == 0
            )
            assert without_time(rows(method)) == without_time(log)
    table = [line.split() for line in out.split("val_loss")[-1].splitlines()[1:]]
    finals = sorted((log[-1]["val_loss"], method, str(lr)) for (method, lr), log in logs.items() if lr < 1)
    assert [(f"{loss:.4f}", method, lr) for loss, method, lr in finals] == [(r[0], r[3], r[4]) for r in table[:2]]
    assert [row[0] for row in table[2:]] == ["diverged"] * 2
    capsys.readouterr()
    monkeypatch.setattr(train, "outer_step", None)  # nothing is trained again
    monkeypatch.setattr(train, "warm_up", None)
    assert run(*GRID) == 0
    assert [line.split() for line in capsys.readouterr().out.split("val_loss")[-1].splitlines()[1:]] == table


def test_a_grid_in_a_folder_of_its_own_and_stopped_goes_on(here, monkeypatch, capsys):
    """--out is the folder of the runs' folders; SIGTERM in the second member: the same command finishes the rest."""
    original, count = data.batch, iter(range(10_000))
    stop = lambda *place: (next(count) == 2 + 3 * 3 + 4 and os.kill(os.getpid(), signal.SIGTERM)) or original(*place)
    monkeypatch.setattr(data, "batch", stop)
    assert run("--method", "muon", "--lr", "0.01,0.02", "--out", "grid") == 143
    assert "the same command goes on" in capsys.readouterr().err
    assert run("--method", "muon", "--lr", "0.01,0.02", "--out", "grid") == 0
    assert len(list(Path("grid").iterdir())) == 2
    assert run("--method", "muon", "--lr", "0.02", "--out", "alone") == 0
    (second,) = Path("grid").glob("*lr0.02*")
    assert_same(everything(second), everything("alone"))


def test_a_grid_with_a_bad_member_is_refused_before_anything_runs(here, capsys):
    before = set(here.rglob("*"))
    assert run("--method", "muon", "--lr", "0.01,-1") == 2
    assert "lr is -1.0" in capsys.readouterr().err and set(here.rglob("*")) == before
    assert run("--method", "muon", "--lr", "0.01,,0.02") == 2
    assert "--lr is ''" in capsys.readouterr().err


def test_a_grid_of_which_all_diverge_is_a_failure(here, capsys):
    assert run("--method", "adamw", "--lr", "1e30,1e31") == 1
    assert capsys.readouterr().err.count("try a smaller --lr") == 2


@pytest.mark.parametrize(
    "line, lines",
    [
        ("--lr 1,2 --seed 3", ["--lr 1 --seed 3", "--lr 2 --seed 3"]),
        ("--lr=1,2 --seed 3,4", ["--lr=1 --seed 3", "--lr=1 --seed 4", "--lr=2 --seed 3", "--lr=2 --seed 4"]),
        ("--out a,b --lr 1,1", ["--out a,b --lr 1"]),
        ("--out=a,b", ["--out=a,b"]),
        ("", [""]),
    ],
)
def test_expand(line, lines):
    assert flags.expand(line.split()) == [line.split() for line in lines]


def test_evaluations_are_as_far_apart_as_flags_say(here):
    """--eval-every 2 of 5 steps: rows 0, 2, 4 and the last, by default they read no more than training does."""
    assert run("--method", "muon", "--out", "r", "--steps", "5", "--eval-every", "2") == 0
    assert run("--method", "muon", "--out", "s", "--steps", "5") == 0
    some, every = rows("r"), {row["step"]: row for row in rows("s")}
    assert [row["step"] for row in some] == [0, 2, 4, 5] and list(every) == [0, 1, 2, 3, 4, 5]
    for row in some:
        assert row["val_loss"] == every[row["step"]]["val_loss"] and row["tokens"] == every[row["step"]]["tokens"]
    assert_same(everything("r"), everything("s"))
    line = "--model tiny --method muon --batch 1024 --eval-tokens 65536 --data text.txt".split()
    assert train.configure(line).values["eval_every"] == 64
    assert train.configure([*line, "--batch", "131072"]).values["eval_every"] == 1


def test_stopped_between_evaluations_it_goes_on_bitwise(here, monkeypatch):
    original, count = data.batch, iter(range(10_000))
    assert run("--method", "muon", "--out", "whole", "--steps", "5", "--eval-every", "3") == 0
    for n in (2 + 3, 2 + 4, 2 + 10):
        count = iter(range(10_000))
        stop = lambda *p, n=n, count=count: (next(count) == n and os.kill(os.getpid(), signal.SIGTERM)) or original(*p)
        monkeypatch.setattr(data, "batch", stop)
        assert run("--method", "muon", "--out", f"r{n}", "--steps", "5", "--eval-every", "3") == 143
        monkeypatch.setattr(data, "batch", original)
        assert run("--method", "muon", "--out", f"r{n}", "--steps", "5", "--eval-every", "3") == 0
        assert_same(everything(f"r{n}"), everything("whole"))
        assert without_time(rows(f"r{n}")) == without_time(rows("whole"))


def test_a_signal_after_a_member_diverged_does_not_save_that_member_for_the_next(here, monkeypatch):
    """SIGTERM in the warm-up of the second member of a grid, the first having diverged inside its steps."""
    original, count = data.batch, iter(range(10_000))
    stop = lambda *place: (
        (place[3] == 1 and next(count) == 1 and os.kill(os.getpid(), signal.SIGTERM)) or original(*place)
    )
    monkeypatch.setattr(data, "batch", stop)
    assert run("--method", "muon", "--lr", "1e30", "--seed", "0,1", "--out", "grid") == 143
    (second,) = Path("grid").glob("*seed1*")
    assert not (second / "checkpoint.npz").exists()
    assert run("--method", "muon", "--lr", "0.01", "--seed", "1", "--out", "r") == 0


@pytest.mark.parametrize("every", ["1", "4"])
def test_refused_steps_are_counted_between_evaluations_too(here, capsys, every):
    """At this lr the line search refuses steps; the summary says how many, whatever --eval-every is."""
    assert run("--method", "gn", "--out", "r", "--steps", "8", "--lr", "3", "--eval-every", every) == 0
    refused = sum(row["refused"] or 0 for row in rows("r"))
    assert f"{refused} steps were refused" in capsys.readouterr().out and refused > 1
    if every == "1":
        assert refused == sum(row["alpha"] == 0 for row in rows("r"))


def test_conjugate_gradients_are_not_lost_to_a_signal(here, monkeypatch):
    """Killed in the evaluation after its third step, the first one: the third solve is in the checkpoint."""
    cg = ["--method", "gn", "--inner", "cg", "--steps", "3", "--eval-every", "3", "--cg-steps", "3", "--damping", "1"]
    assert run(*cg, "--out", "whole") == 0
    original, count = train.evaluate, iter(range(9))
    with monkeypatch.context() as patch:
        stop = lambda *args: (next(count) == 1 and os.kill(os.getpid(), signal.SIGINT)) or original(*args)
        patch.setattr(train, "evaluate", stop)
        assert run(*cg, "--out", "r") == 130
    assert (everything("r")[".t"], everything("r")[".k"]) == (2, 3)
    assert run(*cg, "--out", "r") == 0
    assert_same(everything("r"), everything("whole"))


def test_what_is_saved_as_config_is_what_is_run(here):
    """Defaults that depend on other settings are in config.json as they came out, and tuned ones go with their like."""
    value = lambda name, *line: train.configure(["--model", "tiny", *line]).values[name]
    assert value("average", "--method", "gn_prox") == 0.99 and value("average", "--method", "gn") == 0
    assert value("average", "--method", "gn_prox", "--line-search", "5") == 0
    assert value("average", "--method", "muon") == 0.4 and value("warmup", "--method", "muon") == 0.3
    assert value("average", "--method", "muon", "--schedule", "cosine") == 0
    assert value("warmup", "--method", "muon", "--schedule", "cosine", "--warmup", "0.2") == 0.2
    assert value("steps") == 10 and value("steps", "--tokens", "2m") == 15


def test_a_log_ahead_of_its_checkpoint_is_cut_back(here, monkeypatch):
    """A crash between the log and the checkpoint of a step: the same command makes the step and its row again, once."""
    assert run("--method", "muon", "--out", "whole") == 0
    original = checkpoint.save

    def save(path, tree):
        if path.name == "checkpoint.npz" and int(tree.t) == 2:
            raise OSError("disk full")
        original(path, tree)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        assert run("--method", "muon", "--out", "r") == 1
    assert len(rows("r")) == 3 and everything("r")[".t"] == 1
    assert run("--method", "muon", "--out", "r") == 0
    assert without_time(rows("r")) == without_time(rows("whole"))
    assert_same(everything("r"), everything("whole"))


def test_a_signal_in_the_warm_up_leaves_no_checkpoint_of_it(here, monkeypatch):
    original, count = data.batch, iter(range(10_000))
    stop = lambda *place: (next(count) == 1 and os.kill(os.getpid(), signal.SIGTERM)) or original(*place)
    monkeypatch.setattr(data, "batch", stop)
    assert run("--method", "gn", "--out", "r") == 143
    assert not Path("r/checkpoint.npz").exists()


BAD = {
    "unknown flag": (
        ["--learning-rate", "1"],
        "unknown flag --learning-rate; valid with this method: --method, --model",
    ),
    "flag of another method": (
        ["--method", "adamw", "--damping", "1"],
        "unknown flag --damping; valid with this method: --method, --model",
    ),
    "abbreviated flag": (["--stepz", "1"], "unknown flag --stepz"),
    "stray word": (["hello"], "unknown flag hello"),
    "flag without value": (["--lr"], "expected one argument"),
    "unknown method": (["--method", "sgd"], "method is 'sgd'; valid: gn, gn_prox, layerwise_gn, adamw, muon, soap"),
    "unknown model": (["--model", "7b"], "model is '7b'; valid: tiny, 45m, 150m"),
    "unknown tokenizer": (["--tokenizer", "words"], "tokenizer is 'words'; valid: bytes"),
    "unknown corpus": (["--data", "wiki"], "valid: stdlib"),
    "missing file": (["--data", "nowhere.txt"], "nowhere.txt: there is no such file"),
    "empty file": (["--data", "empty.txt"], "it is empty"),
    "not text": (["--data", "picture.txt"], "not text"),
    "context beyond the corpus": (["--context", "100000", "--batch", "1m"], "too few for a window of context 100000"),
    "batch below a sequence": (["--batch", "15"], "batch is 15 tokens, fewer than one sequence of context 16"),
    "heads": (["--n-heads", "3"], "d_model 8 over n_heads 3"),
    "negative lr": (["--lr", "-0.1"], "lr is -0.1; it must be a positive number"),
    "lr that is no number": (["--lr", "fast"], "--lr is 'fast'; it must be a number"),
    "infinite lr": (["--lr", "inf"], "lr is inf"),
    "eval every": (["--eval-every", "0"], "eval_every is 0; it must be at least 1"),
    "objective": (["--method", "layerwise_gn", "--objective", "cubic"], "valid: quadratic, exact"),
    "inner": (["--inner", "sgd"], "inner is 'sgd'; valid: muon, adamw, cg"),
    "cg of what is not quadratic": (["--method", "gn_prox", "--inner", "cg"], "valid with this objective: muon, adamw"),
    "average": (["--average", "1"], "average is 1.0; it must be at least 0 and below 1"),
    "frequency": (["--method", "soap", "--frequency", "0"], "frequency is 0; it must be at least 1"),
    "no steps": (["--steps", "0"], "steps is 0; it must be at least 1"),
    "half a step": (["--steps", "1.5"], "--steps is '1.5'; it must be a whole number"),
    "tokens": (["--tokens=-5k"], "tokens is -5000"),
    "count": (["--batch", "4x"], "--batch is '4x'; it must be a whole number such as"),
    "boolean": (["--guard", "maybe"], "--guard is 'maybe'; it must be true or false"),
    "schedule": (["--schedule", "linear"], "valid: constant+inner cosine, global cosine"),
    "dtype": (["--dtype", "float16"], "valid: float32, bfloat16"),
    "seed": (["--seed", "-1"], "seed is -1"),
    "seed of 33 bits": (["--seed", "4294967296"], "seed is 4294967296"),
    "damping": (["--damping", "nan"], "damping"),
    "target": (["--target-loss", "0"], "target_loss is 0.0; it must be a positive number"),
    "target that is no number": (["--target-loss", "nan"], "target_loss is nan"),
    "vocabulary": (["--vocab-size", "300"], "tokenizer bytes has 256 ids"),
    "warm-up": (["--warmup-fraction", "2"], "warmup_fraction is 2.0"),
    "a folder that is no run": (["--out", "."], "is there and is not a run"),
    "a file as folder": (["--out", "text.txt"], "is there and is not a run"),
    "a folder of another program": (["--out", "other"], "is there and is not a run"),
}


@pytest.mark.parametrize("flags, says", BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_status_2_and_nothing_written(here, capsys, flags, says):
    Path("empty.txt").touch()
    Path("picture.txt").write_bytes(b"\x89PNG\r\n\x1a\n" * 100)
    Path("other").mkdir()
    Path("other/config.json").write_text('{"architectures": []}')
    listing = lambda: {p: p.is_dir() or p.stat().st_mtime_ns for p in here.rglob("*")}
    before = listing()
    assert run(*flags) == 2
    out, err = capsys.readouterr()
    assert says in err and err.count("\n") == 1 and out == ""
    assert listing() == before


def test_the_papers_defaults_say_that_c4_is_not_there_yet(here, capsys):
    assert train.main([]) == 2
    assert "data c4 is not there yet" in capsys.readouterr().err


def test_another_run_in_the_folder_is_refused_by_name(here, capsys):
    assert run("--method", "adamw", "--out", "r") == 0
    before = everything("r")
    capsys.readouterr()
    assert run("--method", "adamw", "--out", "r", "--lr", "0.5", "--seed", "3") == 2
    err = capsys.readouterr().err
    assert "seed 0 -> 3" in err and "lr 0.015 -> 0.5" in err and err.count("\n") == 1
    assert_same(everything("r"), before)


def test_a_folder_that_cannot_be_written_is_status_1(here, capsys):
    Path("file").write_text("x")
    assert run("--method", "gn", "--out", "file/r") == 1
    err = capsys.readouterr().err
    assert "file/r" in err and err.count("\n") == 1


def test_help_names_every_flag_with_its_meaning(capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    for cls in (train.Config, gn.Config, model.Config):
        for name in flags.fields_of(cls, train.DERIVED if cls is gn.Config else ()):
            assert f"--{name.replace('_', '-')} " in out, name


@pytest.mark.parametrize("method", list(train.METHODS))
def test_every_flag_of_every_method_has_a_help(method):
    """Fields that a Config has from another one keep its comment, unless they have one of their own."""
    assert "Section 6.2" in flags.fields_of(train.gn_prox.Config)["schedule"][2]
    fields = flags.fields_of(train.METHODS[method][1], train.DERIVED)
    assert all(comment for _, _, comment in fields.values()), fields
    assert {"lr", "schedule", "warmup", "weight_decay", "average", "clip"} <= set(fields)


def test_no_two_configs_share_a_flag():
    for _, cls in train.METHODS.values():
        own = flags.fields_of(cls, train.DERIVED)
        names = [*flags.fields_of(train.Config), *own, *flags.fields_of(model.Config)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "text, value", [("400k", 400_000), ("1.2m", 1_200_000), ("3b", 3_000_000_000), ("32", 32), ("1_000", 1000)]
)
def test_counts(text, value):
    assert flags.count(text) == value


def test_the_paper_sizes():
    """Section 5 at 4M tokens, 32 x 1024 an inner batch: N = 122 inner steps, the exact batch, the number of steps."""
    r = train.configure(
        ["--model", "45m", "--data", "stdlib", "--tokenizer", "bytes", "--batch", "4m", "--tokens", "900m"]
    )
    assert (r.settings.inner_steps, r.config.batch, r.config.steps) == (122, 122 * 32 * 1024, 225)
    assert r.warmup_batches == round(45_000_000 / 32768)


def test_the_readmes_commands_are_valid(capsys):
    """Each `python train.py ..` line of the README, on a corpus that every machine has: its runs, the paper's sizes."""
    text = (Path(train.__file__).parent / "README.md").read_text()
    lines = [line.split("#")[0].split()[2:] for line in text.splitlines() if line.startswith("python train.py")]
    runs = [
        [train.configure([*member, "--data", "stdlib", "--tokenizer", "bytes"]) for member in flags.expand(line)]
        for line in lines
    ]
    assert [len(members) for members in runs] == [1, 1, 5, 1, 27]
    assert runs[0][0].config.target_loss == 3.25 and runs[0][0].settings.line_search == 5
    assert runs[1][0].settings.inner_steps == 305 and runs[1][0].settings.line_search == 10  # 40m / (128 x 1024)
    assert [run.config.steps for run in runs[2]] == [2543, 738, 249, 75, 25]  # 3b / batch
    assert runs[3][0].settings.inner_steps == 1


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


@pytest.mark.parametrize(
    "like",
    [
        {"y": jnp.zeros(3, jnp.int32)},
        {"x": jnp.zeros(4, jnp.int32)},
        {"x": jnp.zeros(3)},
        {"x": jnp.zeros(3, jnp.int32), "y": jnp.zeros(1)},
    ],
)
def test_a_checkpoint_of_another_shape_is_refused(tmp_path, like):
    checkpoint.save(tmp_path / "a.npz", {"x": jnp.arange(3)})
    with pytest.raises(ValueError, match="other arrays"):
        checkpoint.load(tmp_path / "a.npz", like)
