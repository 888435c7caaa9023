"""bench.py measures what it says: its rows, its clock, its count of operations; what it refuses."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import random_params, random_tokens

import baselines
import bench
import gn
import model
from recipe import METHODS
from runtime import parallel

SMALL = model.Config(
    vocab_size=256, context=8, d_model=8, d_ff=8, n_layers=1, n_heads=2, n_kv_heads=2
)
NAMES = [
    "forward, one line-search evaluation",
    "gn: inner step",
    "gn: line search, 2 inner batches x 6",
    "gn: outer step, 2 inner steps",
    "gn_prox: inner step",
    "gn_prox: outer step, 2 inner steps",
    "layerwise_gn: inner step",
    "layerwise_gn: line search, 2 inner batches x 11",
    "layerwise_gn: outer step, 2 inner steps",
    "gradient, added up",
    "adamw: optimizer update",
    "adamw: whole step, 1 inner batch",
    "muon: optimizer update",
    "muon: whole step, 1 inner batch",
    "soap: optimizer update",
    "soap: whole step, 1 inner batch",
]
RATE = 1e9  # operations a second


@pytest.fixture
def main(monkeypatch, tmp_path):
    """bench.main at toy size in an empty folder; the large product is not measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(model.PRESETS, "tiny", SMALL)
    monkeypatch.setattr(bench, "matmul_rate", lambda dtype, devices: RATE)
    monkeypatch.setenv("XLA_FLAGS", "")  # bench.main adds to it
    flags = ["--vocab-size", "11", "--inner-batch", "1", "--repeat", "1", "--inner-steps", "2"]
    return lambda *more: bench.main([*flags, *more])


def table(text):
    """The lines below the header."""
    first, header, *lines = text.splitlines()
    assert first.startswith("tiny, float32, plain JAX, inner batches of ")
    assert "one large product: 0.0 TFLOP/s" in first
    assert header.split()[0] == "ms"
    return lines


def test_every_row_is_measured_and_the_file_holds_the_table(main, capsys):
    """Names, tokens and operations per second of each row. A second run does not touch the file."""
    assert main("--json", "out.json") == 0
    text = Path("out.json").read_text()
    done = json.loads(text)
    out, err = capsys.readouterr()
    rows = done["rows"]
    assert [row["name"] for row in rows] == NAMES
    assert not err
    assert table(out) == [bench.line(row) for row in rows]
    for row in rows:
        name, ms = row["name"], row["ms"]
        assert 0 < ms["min"] <= ms["median"] <= ms["max"]
        assert ms["median"] < 1e3 * row["first_s"]
        tokens = 16 if "2 inner" in name else 8
        if "optimizer" in name:
            tokens = 0
        assert (row["tokens_per_s"] is None) == (tokens == 0)
        assert np.isclose((row["tokens_per_s"] or 0) * ms["median"] / 1e3, tokens)
        assert (row["share"] is None) == ("optimizer" in name or "outer" in name)
        is_compiled = not any(word in name for word in ("whole", "outer", "search,"))
        assert (row["peak_gib"] is not None) == is_compiled
        assert row["peak_gib"] is None or 0 < row["peak_gib"] < 0.01
    assert (done["devices"], done["matmul_rate"]) == (1, RATE)
    assert (done["jax"], done["repeat"]) == (jax.__version__, 1)

    assert main("--json", "out.json") == 2
    assert Path("out.json").read_text() == text
    assert capsys.readouterr() == ("", "bench.py: --json out.json exists\n")


def test_rows_selects(main, capsys):
    """By what a row's name must have where a word begins: not layerwise_gn's; on two devices."""
    flags = ["--inner-batch", "2", "--repeat", "3", "--json", "out.json"]
    assert main("--rows", "forward,adamw: opt,gn: inner", *flags) == 0
    done = json.loads(Path("out.json").read_text())
    names = [row["name"] for row in done["rows"]]
    forward = "forward, one line-search evaluation"
    assert names == [forward, "gn: inner step", "adamw: optimizer update"]
    assert len(table(capsys.readouterr().out)) == 3
    assert done["devices"] == 2
    for row in done["rows"]:
        assert 0 < row["ms"]["min"] < row["ms"]["median"] < row["ms"]["max"]


def test_the_large_product_has_the_same_factors_in_each_call(monkeypatch):
    """Powers of a matrix are soon no numbers any more, with which a card may be faster."""

    def seconds(repeat, step, state):
        once, product = step(state)
        assert once is state and np.isfinite(product).all()
        return np.array([2.0])

    monkeypatch.setattr(bench, "seconds", seconds)
    assert bench.matmul_rate("float32", 3) == 2 * 2048**3 * 3 / 2


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--model", "big"], "model is 'big'; valid: tiny, 5m, 45m, 150m"),
        (["--dtype", "float16"], "dtype is 'float16'; valid: float32, bfloat16"),
        (["--reps", "3"], "unknown flag '--reps'; did you mean --repeat?"),
        (["--inner-batch", "many"], "--inner-batch is 'many'; it must be a whole number up to "),
        (["--inner-batch", "-1"], "inner_batch is -1; it must be at least 1"),
        (["--vocab-size", "-1"], "vocab_size is -1; it must be at least 1"),
        (["--inner-steps", "0"], "inner_steps is 0; it must be at least 1"),
        (["--repeat", "0"], "repeat is 0; it must be at least 1"),
        (["--json", "."], "--json . exists"),
        (["--rows", "forwards,gnu"], "no row has forwards or gnu"),
    ],
)
def test_bad_input_is_one_line_and_status_2(main, capsys, monkeypatch, flags, line):
    """Before anything is measured."""
    monkeypatch.setattr(bench, "matmul_rate", None)
    monkeypatch.setattr(bench, "measure", None)
    assert main(*flags) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"bench.py: {line}")
    assert err.count("\n") == 1
    assert err.endswith("\n")


def test_a_file_that_cannot_be_made_ends_it_before_anything_is_measured(main, capsys, monkeypatch):
    """Exit status 2 and one line."""
    monkeypatch.setattr(bench, "matmul_rate", None)
    Path("file").touch()
    assert main("--json", "file/a.json") == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("bench.py: ") and "file" in err and err.count("\n") == 1


@pytest.mark.parametrize("measured", [0, 2])
def test_ctrl_c_loses_no_row(main, capsys, monkeypatch, measured):
    """The file, in a new folder, has the rows so far. Where there are none, no file is left."""
    original = bench.measure
    left = measured * [original]

    def measure(*args):
        if not left:
            raise KeyboardInterrupt
        return left.pop()(*args)

    monkeypatch.setattr(bench, "measure", measure)
    path = Path("new/folder/a.json")
    assert main("--json", str(path), "--rows", "optimizer") == 130
    out, err = capsys.readouterr()
    if measured:
        names = [row["name"] for row in json.loads(path.read_text())["rows"]]
        assert names == ["adamw: optimizer update", "muon: optimizer update"]
        assert err == f"bench.py: stopped; 2 of 3 rows are in {path}\n"
        assert len(table(out)) == 2
    else:
        assert err == "bench.py: stopped\n"
        assert not path.parent.exists()


def test_ctrl_c_that_a_library_catches_ends_it_after_the_row(main, capsys, monkeypatch):
    """JAX has "except:" in places, which take it for a failure of their own."""
    original = bench.measure

    def measure(*args):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            return original(*args)

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "seconds", lambda *args: np.ones(1))
    before = signal.getsignal(signal.SIGINT)
    assert main("--json", "a.json", "--rows", "optimizer") == 130
    assert capsys.readouterr().err == "bench.py: stopped; 1 of 3 rows are in a.json\n"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("durations, calls", [([9, 0.05], 4), ([9, 7], 1)])
def test_seconds_are_of_one_call(monkeypatch, durations, calls):
    """The first call, with its compilation, does not count; a repetition takes about 0.2 s."""
    clock = [0.0]
    left = [*durations, *calls * [1, 2, 3]]
    states = []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def step(state):
        clock[0] += left.pop(0)
        states.append(state)
        return state + 1, None

    times = bench.seconds(3, step, 0)
    expected = np.reshape(calls * [1, 2, 3], (3, calls)).mean(axis=1)
    np.testing.assert_allclose(times, expected)
    assert not left
    assert states == [*range(2 + 3 * calls)]  # each call starts from the state of the last


def test_rate_is_of_one_product_times_devices(monkeypatch):
    """2 n³ operations, n = 2048 on a CPU, in the median time, on each device."""
    seen = []

    def seconds(repeat, step, a):
        seen.append((a.shape, a.dtype))
        return np.array([1.0, 2.0, 8.0])

    monkeypatch.setattr(bench, "seconds", seconds)
    assert bench.matmul_rate("bfloat16", 3) == 2 * 2048**3 * 3 / 2
    assert seen == [((2048, 2048), "bfloat16")]


WIDE = model.Config(
    vocab_size=3072, context=4, d_model=256, d_ff=512, n_layers=2, n_heads=2, n_kv_heads=1
)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", ["forward", "gradient", "gn", "gn_prox", "layerwise_gn"])
def test_operations_are_what_the_compiler_counts(name, mlp):
    """Of a forward pass, a gradient and an inner gradient, to 4%: nearly all are products.

    The compiler counts the body of a loop once. In layerwise_gn loops go over the l streams that
    pass block l, so it counts one of them for each block, where there are (L + 1) / 2 on average,
    with two products each.
    """
    network = dataclasses.replace(WIDE, mlp=mlp)
    batch = random_tokens(network, 32)
    config = bench.Config(inner_steps=2)
    table = {row.name: row for row in bench.rows(config, network, parallel.mesh(1), 2 * [batch])}
    titles = {
        "forward": "forward, one line-search evaluation",
        "gradient": "gradient, added up",
    }
    row = table[titles.get(name, f"{name}: inner step")]
    params, delta = random_params(network), random_params(network, 1)

    def compute(params, delta, tokens):
        if name == "forward":
            return model.loss(network, params, tokens)
        if name == "gradient":
            return baselines.value_and_grad(params, tokens, network)
        method = METHODS[name]
        return method.Config(network, 2, 3).value_and_grad(params, delta, tokens)

    lowered = jax.jit(compute).lower(params, delta, batch)
    counted = lowered.compile().cost_analysis()["flops"]
    products = row.products
    if name == "layerwise_gn":
        products = products._replace(block=products.block - (network.n_layers - 1))

    def operations(products):
        return bench.operations(network, row._replace(products=products))

    expected = operations(products)
    assert 0.99 < counted / expected < 1.04
    assert row.tokens == 32 * 4
    # One product more would show.
    assert operations(products._replace(block=products.block + 1)) > 1.05 * expected
    assert operations(products._replace(head=products.head + 1)) > 1.05 * expected


def test_gn_is_measured_with_its_own_settings():
    """The inner step's Config is the method's, with as many inner steps as were asked for."""
    batch = random_tokens(SMALL, 2)
    config = bench.Config(inner_steps=3)
    rows = {row.name: row for row in bench.rows(config, SMALL, parallel.mesh(1), 2 * [batch])}
    _, settings = rows["gn: inner step"].args
    assert settings == gn.Config(SMALL, 3, 100)
