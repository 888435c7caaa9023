"""An experiment is made in pieces, none of its runs twice, and its file has them all."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import AS_A_USER, COMMAND, run, without_time
from logs import Run

import data
import experiments
import recipe
import train
from runtime import packed
from text.tokenizer import tokenizer

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
    alone = packed.shorten(packed.pack("r"))
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


def test_commands_beside_each_other_train_each_run_once(two_rates, capsys, monkeypatch):
    """One passes over what another trains now, and over what it has trained since."""
    first, second = experiments.jobs_of("two-rates")
    same_text = recipe.configure([*first.words, "--data", str(Path("text.txt").absolute())])
    with experiments.claimed("two-rates", first._replace(run=same_text)) as is_mine:
        assert is_mine
        assert experiments.main(["two-rates"]) == 0
    assert packed_rates() == [0.02]
    assert "missing runs: 1; if no other command trains them" in capsys.readouterr().out

    of_the_other = packed.read(FILE)
    FILE.unlink()
    original = train.main

    def train_beside_another(words):
        assert words == first.words
        packed.add(FILE, of_the_other)
        return original(words)

    monkeypatch.setattr(train, "main", train_beside_another)
    assert experiments.main(["two-rates"]) == 0
    assert packed_rates() == [0.02, 0.01]
    assert capsys.readouterr().out.endswith(f"{FILE} has all runs\n")


def test_a_run_at_two_lengths_is_packed_at_each(two_rates, monkeypatch):
    """The shorter first, as both have one folder. Meanwhile, no other command trains in there.

    And again where the file is lost: from that folder, which now has the longer run.
    """
    commands = "--method adamw --lr 0.01 --schedule constant --warmup 0 --steps 2,1"
    lengths = experiments.EXPERIMENTS["two-rates"]._replace(commands=commands)
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"lengths": lengths})
    short, long = experiments.jobs_of("lengths")
    with experiments.claimed("lengths", short), experiments.claimed("lengths", long) as is_mine:
        assert not is_mine
    assert experiments.main(["lengths"]) == 0
    file = experiments.results_of("lengths")
    made = packed.read(file)
    assert [run["rows"][-1]["step"] for run in made] == [1, 2]
    file.unlink()
    assert experiments.main(["lengths"]) == 0  # from the folder, which has the longer run
    assert packed.read(file) == made


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
        made = Run(Path(words[-1]).parent, "adamw", lr=0.01).cut(3)  # of 9
        made.diverge()
        Path(made.folder).rename(words[-1])
        return 1

    Path("runs/two-rates").mkdir(parents=True)
    monkeypatch.setattr(train, "main", diverge)
    monkeypatch.setattr(experiments, "check_text", lambda *args: None)  # it has read none
    assert experiments.main(["two-rates"]) == 0
    assert packed_rates() == [0.01, 0.02]
    assert "diverged" in packed.read(FILE)[0]["rows"][-1]


def test_a_run_has_ended_at_its_steps_or_its_target(tmp_path):
    for target, cut, ended in ((None, 9, True), (None, 8, False), (3.0, 8, False), (3.2, 8, True)):
        run = packed.pack(Run(tmp_path, target_loss=target).cut(cut).folder)
        assert len(run["rows"]) == cut
        assert experiments.has_ended(run) == ended, (target, cut)
    assert not experiments.has_ended(packed.pack(Run(tmp_path).cut(0).folder))


def test_a_failure_that_is_no_divergence_ends_an_experiment(two_rates, monkeypatch):
    """Such as a full disk; and what is in the folder of a refused run is not taken for it."""
    (job, *_) = experiments.jobs_of("two-rates")
    for status, rows in ((1, 0), (1, 2), (2, 9)):
        monkeypatch.setattr(train, "main", lambda words, status=status: status)
        Path("runs/two-rates").mkdir(parents=True, exist_ok=True)
        made = Run(Path("runs/two-rates"), "adamw", lr=0.01).cut(rows)
        assert len(made.losses) == rows
        Path(made.folder).rename(job.run.config.out)
        assert experiments.main(["two-rates"]) == status
        assert not FILE.exists()
        shutil.rmtree(job.run.config.out)


def test_a_run_on_another_text_is_refused_before_it_is_trained(two_rates, capsys):
    """The file stays as it is."""
    assert run("--method", "adamw", "--lr", "0.01", "--out", "r") == 0
    Path("other.txt").write_text(Path("text.txt").read_text()[::-1])
    packed.add(FILE, [packed.pack("r")])
    before = FILE.read_bytes()
    assert experiments.main(["two-rates", "--data", "other.txt"]) == 2
    assert "reads another text than the runs in results/two-rates.jsonl" in capsys.readouterr().err
    assert FILE.read_bytes() == before
    assert not [*Path("runs/two-rates").glob("*/log.jsonl")]


def test_runs_on_several_texts_are_not_mixed(two_rates, monkeypatch, capsys):
    """Also if another command adds the first run of all, on another text, while one is trained."""
    assert run("--method", "adamw", "--lr", "0.01", "--out", "r") == 0
    other = packed.pack("r")
    other["config"]["corpus"]["val"] = "of another text"
    original = train.main

    def train_beside_another(words):
        packed.add(FILE, [other])
        return original(words)

    monkeypatch.setattr(train, "main", train_beside_another)
    assert experiments.main(["two-rates"]) == 2
    assert "reads another text than the runs in results/two-rates.jsonl" in capsys.readouterr().err
    assert packed.read(FILE) == [packed.shorten(other)]


def test_another_text_is_refused_also_where_no_run_is_missing(two_rates, capsys):
    assert experiments.main(["two-rates"]) == 0
    Path("other.txt").write_text(200 * "Another text, which has other words.\n\n")
    assert experiments.main(["two-rates", "--data", "other.txt"]) == 2
    assert "other.txt reads another text than the runs in" in capsys.readouterr().err
    assert experiments.main(["two-rates", "--data", "text.txt"]) == 0


def test_a_run_that_is_older_than_a_flag_is_not_made_again(two_rates):
    (job, *_) = experiments.jobs_of("two-rates")
    config = {name: value for name, value in job.run.values.items() if name != "clip"}
    assert experiments.is_same({"config": config}, job.run)
    assert not experiments.is_same({"config": config | {"lr": 0.5}}, job.run)
    assert experiments.is_same({"config": config | {"micro_batch": 2, "data": "b"}}, job.run)
    del config["eval_every"]
    worked_out = job.run._replace(given={})  # as if --eval-every had not been given
    assert experiments.is_same({"config": config}, worked_out)


def test_time_that_is_up_ends_the_command(tmp_path, monkeypatch):
    """train.py saves its run. The status is 0, as all went as was asked."""
    monkeypatch.chdir(tmp_path)
    data.prepare("stdlib", tokenizer("bytes"), 1)  # so that the time is up within a run
    command = [sys.executable, ROOT / "experiments.py", "tiny", "--minutes", "0.05"]
    pipes = {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=tmp_path, env=AS_A_USER, timeout=120, **pipes)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("stopped; the same command goes on from here\n")
    assert "missing runs: 18; if no other command trains them, give this one again" in done.stdout


def test_runs_of_ones_own_are_packed_once(tmp_path, capsys):
    home = tmp_path / "runs"
    home.mkdir()
    runs = [Run(home), Run(home, "muon", data="/some/where/text"), Run(home, "soap").cut(0)]
    file = tmp_path / "mine.jsonl"
    words = ["--pack", str(file), *[run.folder for run in runs]]
    assert experiments.main(words) == 0
    first, second = file.read_text().splitlines()
    assert json.loads(second)["config"]["data"] == "text"
    assert packed.read(file)[0]["rows"][0] == {"step": 0, "tokens": 1000, "val_loss": 5.0}
    said = capsys.readouterr()
    assert said.out == f"{file}: 2 runs were added, 0 were there already\n"
    assert said.err == f"{runs[2].folder} has no row yet\n"
    Path(runs[2].folder, "config.json").write_text("[]")
    runs[2].write(runs[1].rows())
    assert experiments.main(words) == 0
    assert file.read_text().splitlines() == [first, second]
    said = capsys.readouterr()
    assert said.out == f"{file}: 0 runs were added, 2 were there already\n"
    assert said.err.startswith(f"{runs[2].folder} cannot be read: ")


def test_a_damaged_file_is_said_and_kept(two_rates, capsys):
    for line in (
        "{}",
        '{"config": {}, "about": {}, "columns": []}',
        '{"config": {}, "about": {}, "columns": {"step": 1}}',
        '{"config": [], "about": 1, "columns": {}}',
        '{"config": {}, "about": {}, "columns": {"a": [1]}}',
        '{"config": {}, "about": {}, "columns": {"step": [1]}}',
    ):
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(line)
        assert experiments.main(["two-rates"]) == 2
        assert f"{FILE}:1 is no packed run" in capsys.readouterr().err
        assert FILE.read_text() == line


@pytest.mark.parametrize(
    "words, says",
    [
        (["huge"], "name is 'huge'; valid: tiny, tiny-variants"),
        (["tiny", "--mintes", "3"], "unrecognized arguments: --mintes"),
        (["--mintes", "3"], "unrecognized arguments: --mintes"),
        (["tiny", "--minutes", "-1"], "minutes is -1.0; it must be at least 0"),
        (["tiny", "--data", "nowhere"], "nowhere"),
        (["--pack", "x.jsonl", "nowhere"], "nowhere does not exist"),
        (["--pack", "x.jsonl"], "--pack takes a file and the folders of runs"),
        (["--minutes", "9"], "--data and --minutes need the name of an experiment"),
    ],
)
def test_bad_input_is_said_in_one_line(here, capsys, words, says):
    assert experiments.main(words) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


# ---- the experiments of this project -------------------------------------------------------------


def stand_in(flag, vocab_size):
    """The tokenizer of bytes in place of GPT-2's, with as many ids: that one needs a network."""
    if flag != "gpt2":
        return tokenizer(flag, vocab_size)
    return tokenizer("bytes")._replace(name=flag, flag=flag, vocab_size=vocab_size or 32_000)


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_the_commands_of_an_experiment_are_valid_and_its_file_holds_nothing_else(
    name, here, monkeypatch
):
    monkeypatch.setattr(recipe, "tokenizer", stand_in)
    assert "--dtype" in experiments.EXPERIMENTS[name].common  # else a machine would decide it
    jobs = experiments.jobs_of(name)
    for saved in packed.read(ROOT / experiments.results_of(name)):
        found = [job for job in jobs if experiments.is_same(saved, job.run)]
        assert len(found) == 1, saved["config"]


def test_a_list_says_once_why_runs_are_not_counted(monkeypatch, capsys):
    """Where GPT-2's vocabulary is not on this machine, for example."""

    def jobs_of(name):
        if name.startswith("5m"):
            raise ValueError("no vocabulary")
        return []

    monkeypatch.setattr(experiments, "jobs_of", jobs_of)
    experiments.list_experiments()
    out, err = capsys.readouterr()
    names = [*experiments.EXPERIMENTS]
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines] == names
    of_5m = [name for name in names if name.startswith("5m")]
    assert sum("runs not counted" in line for line in lines) == len(of_5m)
    assert err == f"not counted: {', '.join(of_5m)}: no vocabulary\n"


def test_a_file_that_has_no_runs_is_refused_before_anything_is_made(tmp_path, capsys):
    home = tmp_path / "runs"
    home.mkdir()
    file = tmp_path / "text.jsonl"
    file.write_text("my own\n")
    assert experiments.main(["--pack", str(file), Run(home).folder]) == 2
    assert capsys.readouterr().err == f"experiments.py: {file}:1 is no packed run\n"
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "text.jsonl"}


def test_a_pack_that_nothing_could_read_or_that_has_no_run_is_not_made(tmp_path, capsys):
    """plot.py reads packed runs from files named .jsonl only."""
    home = tmp_path / "runs"
    home.mkdir()
    run = Run(home)
    assert experiments.main(["--pack", str(tmp_path / "mine"), run.folder]) == 2
    assert "the name must end in .jsonl" in capsys.readouterr().err
    for damaged in ("3\n", '{"step": 0}\n'):
        Path(run.folder, "log.jsonl").write_text(damaged)
        assert experiments.main(["--pack", str(tmp_path / "mine.jsonl"), run.folder]) == 2
        unread, none = capsys.readouterr().err.splitlines()
        assert unread.startswith(f"{run.folder} cannot be read: ")
        assert none == f"experiments.py: there is no run to add to {tmp_path / 'mine.jsonl'}"
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
