"""The command line: every flag with its help, grids by commas, counts with suffixes."""

import math
from dataclasses import dataclass

import pytest

import gn_prox
import model
import recipe
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
    """Every combination, each once. Existing paths and the folder of --out are not split."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.txt").touch()
    assert flags.expand(line.split()) == [line.split() for line in lines]


def help_of(capsys, *words):
    """What --help prints, in one line of single blanks."""
    with pytest.raises(SystemExit) as end:
        train.main([*words, "--help"])
    assert end.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_names_every_flag_of_every_method_once(capsys):
    """Also those that this method does not have, below the name of one that has them."""
    out = help_of(capsys)
    configs = [method.Config for method in recipe.METHODS.values()]
    for cls in (recipe.Config, model.Config, *configs):
        for name, flag in flags.fields_of(cls, recipe.DERIVED if cls in configs else ()).items():
            assert out.count(f" {flags.flag_of(name)} {flag.kind.__name__} ") == 1, name
    assert out.index("flags of soap: --frequency") > out.index("flags of gn: --line-search")


def test_help_shows_the_defaults_of_the_method_and_the_model_that_it_is_given(capsys):
    default = help_of(capsys)
    assert "The defaults are those of --method gn --model 45m." in default
    assert "width of the residual stream, D [default 512]" in default
    prox = help_of(capsys, "--model", "tiny", "--method", "gn_prox")
    assert "[default 0.99]" in prox  # of the average, whose help names that of other models, too
    tiny = help_of(capsys, "--model", "tiny", "--method", "muon")
    assert "The defaults are those of --method muon --model tiny." in tiny
    assert "width of the residual stream, D [default 64]" in tiny


def test_words_that_other_programs_know_lead_to_ours():
    """Each is answered with a flag that there is."""
    known = [flags.flag_of(name) for name in recipe.valid_flags("gn")]
    for word, meant in recipe.MEANT.items():
        assert meant.split()[0] in known, word


@pytest.mark.parametrize("method", list(recipe.METHODS))
def test_every_flag_of_every_method_has_a_help(method):
    """Inherited fields keep their comment, unless they have one of their own."""
    assert "Section 6.2" in flags.fields_of(gn_prox.Config)["schedule"][2]
    fields = flags.fields_of(recipe.METHODS[method].Config, recipe.DERIVED)
    assert all(comment for _, _, comment in fields.values()), fields
    if method != "gn_cg":  # which has no inner optimizer
        assert {"lr", "schedule", "warmup", "weight_decay", "average", "clip"} <= set(fields)


def test_no_two_configs_share_a_flag():
    for method in recipe.METHODS.values():
        own = flags.fields_of(method.Config, recipe.DERIVED)
        names = [*flags.fields_of(recipe.Config), *own, *flags.fields_of(model.Config)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "text, value",
    [("400k", 400_000), ("1.2m", 1_200_000), ("3b", 3_000_000_000), ("32", 32), ("1_000", 1000)],
)
def test_counts(text, value):
    assert flags.count(text) == value


@pytest.mark.parametrize("text, value", [("true", True), ("False", False)])
def test_booleans(text, value):
    run = recipe.configure(["--model", "tiny", "--guard", text, "--qk-norm", text])
    assert run.settings.guard is value and run.network.qk_norm is value


@dataclass(frozen=True)
class Above:
    """A Config whose fields have comments of all kinds."""

    first: int = 1  # behind it
    # above it,
    # in two lines
    second: float = 2.0
    # above it
    third: float = None  # and behind it

    # a heading, which belongs to no field

    fourth: int = 4


@dataclass(frozen=True)
class Below(Above):
    """The same, but for one."""

    # another one
    second: float = 3.0
    first: int = 2


def test_the_help_of_a_field_is_the_comment_above_it_and_behind_it():
    helps = {name: flag.help for name, flag in flags.fields_of(Above).items()}
    assert helps == {
        "first": "behind it",
        "second": "above it, in two lines",
        "third": "above it and behind it",
        "fourth": "",
    }
    below = flags.fields_of(Below, derived=("third",))
    assert {name: flag.help for name, flag in below.items()} == {
        "first": "behind it",
        "second": "another one",
        "fourth": "",
    }
    assert flags.values_of(Below(), derived=("third",)) == {"first": 2, "second": 3.0, "fourth": 4}


@pytest.mark.parametrize(
    "value, limits, required",
    [
        (0.0, {"above": 0}, "a positive number"),
        (math.inf, {"above": 0}, "finite"),
        (math.nan, {"least": 0}, "finite"),
        (1.0, {"least": 0, "below": 1}, "at least 0 and below 1"),
        (-1.0, {"above": 0}, "a positive number"),
        (2**31, {"least": 1, "below": 2**31}, r"at least 1 and below 2\^31"),
        (1.5, {"least": 0, "most": 1}, "at least 0 and at most 1"),
    ],
)
def test_values_out_of_range_are_refused(value, limits, required):
    with pytest.raises(ValueError, match=f"second is {value}; it must be {required}$"):
        flags.check_range(Above(second=value), ["second"], **limits)


def test_values_in_range_and_fields_without_a_value_are_not():
    flags.check_range(Above(first=0), ["first"], least=0, most=0)
    flags.check_range(Above(), ["third", "no_such_field"], above=0)
    flags.check_choice(Above(), "first", (1, 2))
    with pytest.raises(ValueError, match="first is 3; valid: 1, 2"):
        flags.check_choice(Above(first=3), "first", (1, 2))
