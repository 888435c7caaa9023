"""A trained run continues a text; what is no run is said."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import everything, run

import sample


def test_a_run_continues_a_text(here, capsys):
    """The text first, commas and all; another seed, other words; nothing is written."""
    assert run("--method", "muon", "--out", "r", "--steps", "1") == 0
    before = {p.name: p.stat().st_mtime_ns for p in Path("r").iterdir()}
    capsys.readouterr()
    said = {}
    for seed in ("0", "0", "1"):
        assert sample.main(["--out", "r", "the cat, sat", "--seed", seed]) == 0
        out = capsys.readouterr().out
        assert out.startswith("the cat, sat") and len(out) > 20
        assert said.setdefault(seed, out) == out
    assert said["0"] != said["1"]
    assert {p.name: p.stat().st_mtime_ns for p in Path("r").iterdir()} == before


@pytest.mark.parametrize("average, field", [("0", ".params"), ("0.9", ".average")])
def test_the_weights_are_those_that_were_evaluated(here, average, field):
    assert run("--method", "muon", "--out", "r", "--average", average) == 0
    network, params, tok = sample.read("r")
    assert (network.context, network.vocab_size, tok.name) == (16, 256, "bytes")
    for name in ("head", "embedding"):
        np.testing.assert_array_equal(params[name], everything("r")[f"{field}['{name}']"])


def test_a_confident_model_says_what_it_learnt(here, monkeypatch):
    """It repeats its one letter to the end, or it ends the document and is not asked again."""
    assert run("--method", "muon", "--out", "r", "--steps", "1") == 0
    end = sample.read("r")[2].end_of_text
    for wanted, times, text in (
        (ord("x"), sample.LENGTH, "ab" + "x" * sample.LENGTH),
        (end, 1, "ab"),
    ):
        asked = []

        def draw(*args, wanted=wanted, asked=asked):
            asked.append(args)
            return wanted

        monkeypatch.setattr(sample, "draw", draw)
        assert sample.generate(*sample.read("r"), "ab") == text
        assert len(asked) == times


@pytest.mark.parametrize("content", [None, "{}", '{"config": {}}', "no JSON"])
def test_what_is_no_run_is_said(here, capsys, content):
    Path("r").mkdir()
    if content is not None:
        Path("r/config.json").write_text(content)
    for words, says in (
        (["a", "--out", "r"], "r holds no run to sample from"),
        (["a", "--out", "nowhere"], "nowhere holds no run to sample from"),
        (["a"], "required: --out"),
        (["--out", "r"], "required: text"),
        (["a", "b", "--out", "r"], "unrecognized arguments: b"),
        (["a", "--out", "r", "--seed", "5b"], "seed is 5000000000; it must be at least 0"),
        (["a", "--out", "r", "--seed", "x"], "invalid count value: 'x'"),
        (["a\udcff", "--out", "r"], "invalid utf8 value"),
    ):
        assert sample.main(words) == 2
        out, err = capsys.readouterr()
        assert out == "" and says in err and err.count("\n") == 1 and err.startswith("sample.py: ")


def test_a_tokenizer_that_is_gone_is_named(here, capsys):
    """The run itself is whole."""
    assert run("--method", "muon", "--out", "r") == 0
    config = json.loads(Path("r/config.json").read_text())
    config["config"]["tokenizer"] = "gone"
    Path("r/config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert sample.main(["a", "--out", "r"]) == 2
    assert capsys.readouterr().err.startswith("sample.py: tokenizer is 'gone'; valid: bytes, ")


def test_a_run_whose_settings_are_not_of_its_arrays_is_said(here, capsys):
    assert run("--method", "muon", "--out", "r", "--steps", "1") == 0
    config = json.loads(Path("r/config.json").read_text())
    config["config"]["d_ff"] = 16
    Path("r/config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert sample.main(["a", "--out", "r"]) == 2
    said = "its arrays are not of the sizes that config.json says: .average['blocks']['w_down'] is "
    assert said in capsys.readouterr().err


def test_what_a_run_lacks_is_named(here, capsys):
    """A flag, as in a run of an older version, or an array."""
    assert run("--method", "muon", "--out", "r", "--steps", "1") == 0
    capsys.readouterr()
    path = Path("r/checkpoint.npz")
    arrays = dict(np.load(path))
    del arrays[".average['head']"], arrays[".params['head']"]
    np.savez(path, **arrays)
    assert sample.main(["a", "--out", "r"]) == 2
    assert ".params['head'] is missing there" in capsys.readouterr().err
    config = json.loads(Path("r/config.json").read_text())
    del config["config"]["mlp"]
    Path("r/config.json").write_text(json.dumps(config))
    assert sample.main(["a", "--out", "r"]) == 2
    assert "its config.json has no mlp" in capsys.readouterr().err


def test_a_run_of_numbers_of_another_width_is_said_with_its_cause(here, capsys):
    assert run("--method", "muon", "--out", "r", "--steps", "1") == 0
    capsys.readouterr()
    with jax.enable_x64(True):
        assert sample.main(["a", "--out", "r"]) == 2
    err = capsys.readouterr().err
    assert (
        "is float32 [1, 8] there, float64 [1, 8] here (was JAX_ENABLE_X64 another one then?)" in err
    )
