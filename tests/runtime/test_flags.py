"""The command line: every flag with its help, grids by commas, counts with suffixes."""

import pytest

import gn
import model
import train
from runtime import flags


@pytest.mark.parametrize(
    "line, lines",
    [
        ("--lr 1,2 --seed 3", ["--lr 1 --seed 3", "--lr 2 --seed 3"]),
        (
            "--lr=1,2 --seed 3,4",
            ["--lr=1 --seed 3", "--lr=1 --seed 4", "--lr=2 --seed 3", "--lr=2 --seed 4"],
        ),
        ("--out a,b --lr 1,1", ["--out a,b --lr 1"]),
        ("--out=a,b", ["--out=a,b"]),
        ("", [""]),
        ("--data a,b.txt --lr 1,2", ["--data a,b.txt --lr 1", "--data a,b.txt --lr 2"]),
    ],
)
def test_expand(tmp_path, monkeypatch, line, lines):
    """Every combination, each once; a path that exists is one value, commas and all, and so is the folder of --out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.txt").touch()
    assert flags.expand(line.split()) == [line.split() for line in lines]


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
    fields = flags.fields_of(train.METHODS[method].Config, train.DERIVED)
    assert all(comment for _, _, comment in fields.values()), fields
    assert {"lr", "schedule", "warmup", "weight_decay", "average", "clip"} <= set(fields)


def test_no_two_configs_share_a_flag():
    for method in train.METHODS.values():
        own = flags.fields_of(method.Config, train.DERIVED)
        names = [*flags.fields_of(train.Config), *own, *flags.fields_of(model.Config)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "text, value",
    [("400k", 400_000), ("1.2m", 1_200_000), ("3b", 3_000_000_000), ("32", 32), ("1_000", 1000)],
)
def test_counts(text, value):
    assert flags.count(text) == value


@pytest.mark.parametrize("text, value", [("true", True), ("False", False)])
def test_booleans(text, value):
    run = train.configure(["--model", "tiny", "--guard", text, "--qk-norm", text])
    assert run.settings.guard is value and run.network.qk_norm is value
