"""bench.py measures what it says: its rows, its clock, its count of operations, and what it refuses."""

import dataclasses
import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import random_params, random_tokens

import bench
import gn
import gn_prox
import layerwise_gn
import model

SMALL = model.Config(vocab_size=256, context=8, d_model=8, d_ff=8, n_layers=1, n_heads=2, n_kv_heads=2)
NAMES = ["forward, one line-search evaluation", "gradient, added up"]
NAMES += [f"{name}: {what}" for name in bench.BASELINES for what in ("optimizer update", "whole step, 1 inner batch")]
NAMES += ["gn: inner step", "gn: line search, 2 inner batches x 6", "gn: outer step, 2 inner steps"]
NAMES += ["gn_prox: inner step", "gn_prox: outer step, 2 inner steps"]
NAMES += ["layerwise_gn: inner step", "layerwise_gn: line search, 2 inner batches x 11"]
NAMES += ["layerwise_gn: outer step, 2 inner steps"]
RATE = 1e9  # operations a second


@pytest.fixture
def main(monkeypatch, tmp_path):
    """bench.main at toy size in an empty folder; the large product is not measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(model.PRESETS, "tiny", SMALL)
    monkeypatch.setattr(bench, "matmul_rate", lambda dtype, devices: RATE)
    monkeypatch.setenv("XLA_FLAGS", "")  # bench.main adds to it
    flags = "--vocab-size 11 --inner-batch 1 --repeat 1 --inner-steps 2".split()
    return lambda *more: bench.main([*flags, *more])


def table(text):
    """The lines below the header."""
    first, header, *lines = text.splitlines()
    assert first.startswith("tiny, float32, inner batches of ") and "one large product: 0.0 TFLOP/s" in first
    assert header.split()[0] == "ms"
    return lines


def test_every_row_is_measured_and_the_file_holds_the_table(main, capsys):
    """Names, tokens and operations a second of each row; one device. A second run does not touch the file."""
    assert main("--json", "out.json") == 0
    text = Path("out.json").read_text()
    done, (out, err) = json.loads(text), capsys.readouterr()
    rows = done["rows"]
    assert [row["name"] for row in rows] == NAMES and not err
    assert table(out) == [bench.line(row) for row in rows]
    for row, line in zip(rows, table(out), strict=True):
        name, ms = row["name"], row["ms"]
        assert 0 < ms["min"] <= ms["median"] <= ms["max"] < 1e3 * row["first_s"]
        assert line.startswith(name) and f"{ms['median']:.2f} (" in line
        tokens = 0 if "optimizer" in name else 16 if "2 inner" in name else 8
        assert (row["tokens_per_s"] is None) == (tokens == 0)
        assert np.isclose((row["tokens_per_s"] or 0) * ms["median"] / 1e3, tokens)
        assert (row["share"] is None) == ("optimizer" in name or "outer" in name)
        assert (row["peak_gib"] is None) == any(word in name for word in ("whole", "outer", "search,"))
        assert row["peak_gib"] is None or 0 < row["peak_gib"] < 0.01
    assert (done["devices"], done["matmul_rate"], done["jax"], done["repeat"]) == (1, RATE, jax.__version__, 1)
    assert main("--json", "out.json") == 2 and Path("out.json").read_text() == text
    assert capsys.readouterr() == ("", "bench.py: --json out.json exists\n")


def test_rows_selects(main, capsys):
    """By words of which one must be in a row's name, on two devices; min <= median <= max of three repetitions."""
    assert main("--rows", "forward,adamw: opt", "--inner-batch", "2", "--repeat", "3", "--json", "out.json") == 0
    done, (out, _) = json.loads(Path("out.json").read_text()), capsys.readouterr()
    assert [row["name"] for row in done["rows"]] == ["forward, one line-search evaluation", "adamw: optimizer update"]
    assert len(table(out)) == 2 and done["devices"] == 2
    for row in done["rows"]:
        assert 0 < row["ms"]["min"] < row["ms"]["median"] < row["ms"]["max"]


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--model", "big"], "model is 'big'; valid: tiny, 45m, 150m"),
        (["--dtype", "float16"], "dtype is 'float16'; valid: float32, bfloat16"),
        (["--reps", "3"], "unknown flag '--reps'; valid with this method: --model, "),
        (["--inner-batch", "many"], "--inner-batch is 'many'; it must be a whole number such as 32, 400k or 1.2m"),
        (["--inner-batch", "-1"], "inner_batch is -1; it must be at least 0"),
        (["--vocab-size", "-1"], "vocab_size is -1; it must be at least 0"),
        (["--inner-steps", "0"], "inner_steps is 0; it must be at least 1"),
        (["--repeat", "0"], "repeat is 0; it must be at least 1"),
        (["--json", "."], "--json . exists"),
    ],
)
def test_bad_input_is_one_line_and_status_2(main, capsys, monkeypatch, flags, line):
    """Before anything is measured."""
    monkeypatch.setattr(bench, "matmul_rate", None)
    monkeypatch.setattr(bench, "measure", None)
    assert main(*flags) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"bench.py: {line}") and err.count("\n") == 1 and err.endswith("\n")


@pytest.mark.parametrize("durations, calls", [([9, 0.05], 4), ([9, 7], 1)])
def test_seconds_are_of_one_call(monkeypatch, durations, calls):
    """The first call, with its compilation, is not counted; a repetition is about 0.2 s of calls, at least one."""
    clock, left, states = [0.0], [*durations, *calls * [1, 2, 3]], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def step(state):
        clock[0] += left.pop(0)
        states.append(state)
        return state + 1, None

    times = bench.seconds(3, step, 0)
    expected = np.reshape(calls * [1, 2, 3], (3, calls)).mean(axis=1)
    np.testing.assert_allclose(times, expected)
    assert not left and states == [*range(2 + 3 * calls)]  # each call goes on from the last


def test_rate_is_of_one_product_times_devices(monkeypatch):
    """2 n³ operations, n = 2048 on a CPU, in the median time, on each device."""
    seen = lambda repeat, step, a: seen_shapes.append((a.shape, a.dtype)) or np.array([1.0, 2.0, 8.0])
    seen_shapes = []
    monkeypatch.setattr(bench, "seconds", seen)
    assert bench.matmul_rate("bfloat16", 3) == 2 * 2048**3 * 3 / 2
    assert seen_shapes == [((2048, 2048), "bfloat16")]


WIDE = model.Config(vocab_size=3072, context=4, d_model=256, d_ff=512, n_layers=2, n_heads=2, n_kv_heads=1)


def rows(network, size):
    """{name: row} of one device, and the batch."""
    batch = random_tokens(network, size)
    config = bench.Config(inner_steps=2)
    mesh = bench.parallel.mesh(1)
    return {row.name: row for row in bench.rows(config, network, mesh, 2 * [batch])}, batch


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", ["forward", "gradient", "gn", "gn_prox", "layerwise_gn"])
def test_operations_are_what_the_compiler_counts(name, mlp):
    """Of a forward pass, a gradient, an inner gradient, to 4%, where products are nearly all; and no fewer.

    The compiler counts the body of a loop once. In layerwise_gn loops go over the l streams that pass block l, so that
    its count has one for each block where there are (L + 1) / 2, each with two products.
    """
    network = dataclasses.replace(WIDE, mlp=mlp)
    table, batch = rows(network, 32)
    args = random_params(network), random_params(network, 1), batch
    title = {"forward": "forward, one line-search evaluation", "gradient": "gradient, added up"}
    row = table[title.get(name, f"{name}: inner step")]
    if name == "forward":
        compute = lambda p, d, t: model.loss(network, p, t)
    elif name == "gradient":
        compute = lambda p, d, t: model.value_and_grad(network, p, t)
    else:
        objective = gn_prox.exact if name == "gn_prox" else gn.quadratic
        linearized = layerwise_gn.linearized if name == "layerwise_gn" else gn.linearized
        config = gn.Config(network, 2, 3)
        compute = lambda p, d, t: gn.value_and_grad(objective, linearized, p, d, t, config)
    counted = jax.jit(compute).lower(*args).compile().cost_analysis()["flops"]
    block, head, attention = row.products
    block -= (network.n_layers - 1) * (name == "layerwise_gn")
    of = lambda *products: bench.operations(network, row._replace(products=products))
    expected = of(block, head, attention)
    assert 0.99 < counted / expected < 1.04
    assert row.tokens == 32 * 4
    assert min(of(block + 1, head, attention), of(block, head + 1, attention)) > 1.05 * expected  # a product more shows
