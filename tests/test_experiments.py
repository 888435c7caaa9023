"""An experiment is made in pieces, none of its runs twice, and its file has them all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import AS_A_USER, COMMAND, run, without_time
from logs import Run

import experiments
import train
from runtime import packed

ROOT = Path(train.__file__).parent
FILE = Path("results/two-rates.jsonl")


@pytest.fixture
def two_rates(here, monkeypatch):
    """An experiment of two runs of AdamW."""
    commands = "--method adamw --lr 0.01,0.02"
    small = experiments.Experiment("Which rate?", f"{COMMAND} --data text.txt", commands)
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"two-rates": small})


def packed_rates():
    return [run["config"]["lr"] for run in packed.read(FILE)]


def test_an_experiment_makes_what_its_file_lacks(two_rates, capsys):
    """Each run is as train.py makes it. Without folders, as on another machine, the file counts."""
    assert experiments.main(["two-rates"]) == 0
    assert packed_rates() == [0.01, 0.02]
    assert run("--method", "adamw", "--lr", "0.02", "--out", "r") == 0
    alone = packed.pack("r")
    _, saved = packed.read(FILE)
    assert without_time(saved["rows"]) == without_time(alone["rows"])
    assert saved["config"] == alone["config"] and saved["about"] == alone["about"]

    before = FILE.read_bytes()
    for folder in Path("runs/two-rates").iterdir():
        folder.rename(f"moved-{folder.name}")
    assert experiments.main(["two-rates"]) == 0
    assert FILE.read_bytes() == before and not [*Path("runs/two-rates").iterdir()]
    capsys.readouterr()
    assert experiments.main([]) == 0
    assert capsys.readouterr().out == "two-rates: 2 of 2 runs. Which rate?\n"

    FILE.write_text(before.decode().splitlines()[1] + "\n")
    assert experiments.main(["two-rates"]) == 0
    assert packed_rates() == [0.02, 0.01]


def test_a_run_that_stops_is_not_packed_and_goes_on_later(two_rates, monkeypatch):
    """The others are kept. What comes after it is not begun."""
    original = train.main

    def stop(words):
        if "0.02" in words:
            assert original([*words, "--steps", "1"]) == 0  # has a row, but is not at its end
            return 143
        return original(words)

    monkeypatch.setattr(train, "main", stop)
    monkeypatch.setattr(experiments, "has_ended", lambda run: run["rows"][-1]["step"] == 3)
    assert experiments.main(["two-rates"]) == 143
    assert packed_rates() == [0.01]
    monkeypatch.setattr(train, "main", original)
    assert experiments.main(["two-rates"]) == 0
    assert packed_rates() == [0.01, 0.02]


def test_a_run_that_diverges_is_packed_and_the_next_one_made(two_rates, monkeypatch):
    original = train.main

    def diverge(words):
        if "0.01" not in words:
            return original(words)
        Run(Path(words[-1]).parent, "adamw", lr=0.01).diverge()
        (made,) = Path(words[-1]).parent.iterdir()
        made.rename(words[-1])
        return 1

    Path("runs/two-rates").mkdir(parents=True)
    monkeypatch.setattr(train, "main", diverge)
    assert experiments.main(["two-rates"]) == 0
    assert packed_rates() == [0.01, 0.02]
    assert "diverged" in packed.read(FILE)[0]["rows"][-1]


def test_a_run_has_ended_at_its_steps_or_its_target(tmp_path):
    for flags, cut, ended in (
        ({}, 9, True),
        ({}, 8, False),
        ({"target_loss": 3.0}, 8, False),
        ({"target_loss": 3.0}, 9, True),
        ({"target_loss": 3.2}, 8, True),
    ):
        run = packed.pack(Run(tmp_path, **{"target_loss": None} | flags).cut(cut).folder)
        assert len(run["rows"]) == cut
        assert experiments.has_ended(run) == ended, (flags, cut)
    assert not experiments.has_ended(packed.pack(Run(tmp_path).cut(0).folder))


def test_time_that_is_up_ends_the_command(tmp_path):
    """As kill does: train.py saves its run."""
    command = [sys.executable, ROOT / "experiments.py", "tiny", "--minutes", "0.05"]
    done = subprocess.run(command, cwd=tmp_path, env=AS_A_USER, capture_output=True, timeout=120)
    assert done.returncode in (143, -15)  # the signal may come before train.py hears it


def test_runs_of_ones_own_are_packed_once(tmp_path, capsys):
    home = tmp_path / "runs"
    home.mkdir()
    runs = [Run(home), Run(home, "muon", data="/some/where/text"), Run(home, "soap").cut(0)]
    file = tmp_path / "mine.jsonl"
    words = ["--pack", str(file), *[run.folder for run in runs]]
    assert experiments.main(words) == 0
    first, second = file.read_text().splitlines()
    assert json.loads(second)["config"]["data"] == "text"
    assert json.loads(first)["rows"][0] == {"step": 0, "tokens": 1000, "val_loss": 5.0}
    assert capsys.readouterr().out == f"{file}: 2 runs were added to 0\n"
    assert experiments.main(words) == 0
    assert file.read_text().splitlines() == [first, second]
    assert capsys.readouterr().err.count("is there already") == 2


@pytest.mark.parametrize(
    "words, says",
    [
        (["huge"], "invalid choice: 'huge'"),
        (["tiny", "--minutes", "-1"], "minutes is -1.0; it must be at least 0"),
        (["tiny", "--data", "nowhere"], "nowhere"),
        (["--pack", "x.jsonl", "nowhere"], "nowhere does not exist"),
    ],
)
def test_bad_input_is_said_in_one_line(here, capsys, words, says):
    assert experiments.main(words) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


# ---- the experiments of this project -------------------------------------------------------------


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_the_commands_of_an_experiment_are_valid_and_its_file_holds_nothing_else(name, here):
    runs = experiments.runs_of(name)
    for saved in packed.read(ROOT / experiments.results_of(name)):
        found = [run for _, run in runs.values() if experiments.is_of(saved, run)]
        assert len(found) == 1, saved["config"]
