"""A trained run goes on with a text; what is no run is said."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import everything, run

import sample
import train


def test_a_run_goes_on_with_a_text(here, capsys):
    """The text first, commas and all; another seed, other words; nothing is written."""
    assert run("--method", "muon", "--out", "r") == 0
    before = {p.name: p.stat().st_mtime_ns for p in Path("r").iterdir()}
    capsys.readouterr()
    said = {}
    for seed in ("0", "0", "1"):
        assert train.main(["--generate", "the cat, sat", "--out", "r", "--seed", seed]) == 0
        out = capsys.readouterr().out
        assert out.startswith("the cat, sat") and len(out) > 20 and said.setdefault(seed, out) == out
    assert said["0"] != said["1"]
    assert {p.name: p.stat().st_mtime_ns for p in Path("r").iterdir()} == before


@pytest.mark.parametrize("average, part", [("0", ".params"), ("0.9", ".average")])
def test_the_weights_are_those_that_were_evaluated(here, average, part):
    assert run("--method", "muon", "--out", "r", "--average", average) == 0
    network, params, tok = sample.read("r")
    assert (network.context, network.vocab_size, tok.name) == (16, 256, "bytes")
    for name in ("head", "embedding"):
        np.testing.assert_array_equal(params[name], everything("r")[f"{part}['{name}']"])


def test_a_confident_model_says_what_it_learnt(here, monkeypatch):
    """One that has no doubt: it says the same letter to the end, or ends the document there, and is not asked again."""
    assert run("--method", "muon", "--out", "r", "--steps", "1") == 0
    end = sample.read("r")[2].end_of_text
    for wanted, times in ((ord("x"), sample.LENGTH), (end, 1)):
        asked = []
        monkeypatch.setattr(sample, "following", lambda *args, w=wanted, asked=asked: asked.append(args) or w)
        assert sample.generate("r", "ab") == "ab" + "x" * times * (wanted != end)
        assert len(asked) == times


@pytest.mark.parametrize("content", [None, "{}", '{"config": {}}', "no JSON", json.dumps({"config": {"context": "x"}})])
def test_what_is_no_run_is_said(here, capsys, content):
    Path("r").mkdir()
    if content is not None:
        Path("r/config.json").write_text(content)
    for flags in (["--out", "r"], ["--out", "nowhere"], []):
        assert train.main(["--generate", "a", *flags]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert ("holds no run to generate from" if flags else "generate needs --out") in err


def test_a_run_whose_settings_are_not_of_its_arrays_is_said(here, capsys):
    assert run("--method", "muon", "--out", "r", "--steps", "1") == 0
    text = Path("r/config.json").read_text()
    Path("r/config.json").write_text(text.replace('"d_ff": 8', '"d_ff": 16'))
    capsys.readouterr()
    assert train.main(["--generate", "a", "--out", "r"]) == 2
    assert "its arrays are not of the sizes that config.json says" in capsys.readouterr().err


def test_a_seed_that_is_none_is_said(here, capsys):
    assert train.main(["--generate", "a", "--out", "r", "--seed", "5b"]) == 2
    assert "seed is 5000000000; it must be at least 0" in capsys.readouterr().err
