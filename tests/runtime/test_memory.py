"""Micro-batches: the same step in less memory, and the largest of them that fit."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SMALL, TOY, batches_and_fresh, random_params, rows, run
from hypothesis import given
from hypothesis import strategies as st

import gn
import model
import recipe
import train
from runtime import flags, memory, parallel, report


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("most", "seen"), [(0, 10), (1, 1), (2, 2), (3, 2), (4, 2), (7, 5), (10, 10), (13, 10)]
)
def test_a_mean_over_parts_is_the_mean(float64, devices, most, seen):
    """In as few equal parts as there can be; on each of two devices too, with its own rows."""
    heights = []

    def f(x, tokens):
        heights.append(len(tokens))
        return {"value": x * tokens.mean(), "grad": tokens.mean(axis=0)}

    tokens = np.random.default_rng(0).normal(size=(10 * devices, 3))
    with jax.set_mesh(parallel.mesh(devices)):
        found = jax.jit(parallel.mean(f, most))(2.0, tokens)
    assert set(heights) == {seen}
    assert_close(found, {"value": 2 * tokens.mean(), "grad": tokens.mean(axis=0)}, rtol=1e-12)


@pytest.mark.parametrize("name", recipe.METHODS)
def test_a_step_in_micro_batches_is_the_same_step(float64, name):
    """Two outer steps of each method, line search included: states and metrics."""
    changes = {"soap": {"largest": 8}, "gn_cg": {"damping": 0.1, "cg_steps": 3}}.get(name, {})
    method = recipe.METHODS[name]

    def steps(micro_batch):
        config = method.Config(TOY, 2, 3, micro_batch=micro_batch, **changes)
        state = method.module.init(random_params(TOY), config)
        for _ in range(2):
            state, metrics = method.module.update(state, *batches_and_fresh(TOY, 4), config)
        return state, metrics

    assert_close(steps(1), steps(0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", recipe.METHODS)
def test_a_smaller_micro_batch_needs_less_memory(name):
    """By the compiler's own figures of the program that `lower` returns."""
    method = recipe.METHODS[name]
    network = replace(TOY, context=64, d_model=32, d_ff=128)
    tokens = jax.ShapeDtypeStruct((16, network.context + 1), jnp.int32)
    needed = {}
    for size in (1, 16):
        config = method.Config(network, 2, 3, micro_batch=size)
        state = jax.eval_shape(lambda c=config: method.module.init(random_params(network), c))
        needed[size], arguments = memory.usage(method.module.lower(state, tokens, config))
        bytes_of_params = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state.params))
        assert arguments >= bytes_of_params / 2**20
    assert needed[1] < needed[16] / 2


@pytest.mark.parametrize("name", ["gn_prox", "layerwise_gn"])
def test_the_program_is_that_of_the_method(name):
    """Those that take gn.py's inner steps have another gradient there."""
    method = recipe.METHODS[name]
    config = method.Config(TOY, 2, 3)
    state = jax.eval_shape(lambda: method.module.init(random_params(TOY), config))
    tokens = jax.ShapeDtypeStruct((2, TOY.context + 1), jnp.int32)

    @flags.traced
    @dataclass(frozen=True)
    class Plain(method.Config):
        value_and_grad = gn.Config.value_and_grad

    own = method.module.lower(state, tokens, config).as_text()
    assert own != gn.lower(state, tokens, Plain(TOY, 2, 3)).as_text()


def program(arguments, results, in_place, between):
    """What the compiler says of a program that needs so many MiB."""
    analysis = SimpleNamespace(
        argument_size_in_bytes=arguments * 2**20,
        output_size_in_bytes=results * 2**20,
        alias_size_in_bytes=in_place * 2**20,
        temp_size_in_bytes=between * 2**20,
    )
    compiled = SimpleNamespace(memory_analysis=lambda: analysis)
    return SimpleNamespace(compile=lambda: compiled)


@pytest.mark.parametrize(
    ("statistics", "limit"),
    [(None, None), ({}, None), ({"bytes_in_use": 3 * 2**20, "bytes_limit": 5 * 2**20}, 5)],
)
def test_memory_is_what_jax_may_use_of_a_device(monkeypatch, statistics, limit):
    device = SimpleNamespace(memory_stats=lambda: statistics)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert memory.available() == limit


def test_results_in_the_place_of_arguments_need_no_memory_of_their_own():
    assert memory.usage(program(100, 90, 80, 1000)) == (1110, 100)  # MiB


@given(
    sequences=st.integers(1, 200),
    state=st.integers(0, 100_000),
    constant=st.just(0) | st.integers(1, 500),
    per_sequence=st.integers(1, 100),
    free=st.integers(-500, 10_000),
)
def test_the_largest_micro_batch_that_fits(sequences, state, constant, per_sequence, free):
    """Of those that divide the inner batch; 1 if none does. Few programs are compiled for that."""
    room = max(1, state + free)
    compiled = []

    def lower(size):
        assert size not in compiled
        compiled.append(size)
        return program(state, state, state, constant + per_sequence * size)

    def needed(size):
        return state + constant + per_sequence * size

    size, found = memory.find_micro_batch(sequences, lower, room / memory.SHARE)
    assert found == needed(size)
    assert sequences % size == 0
    fits = found <= room * (1 + 1e-9)
    assert fits or size == 1
    larger = [n for n in range(size + 1, sequences + 1) if sequences % n == 0]
    assert not [n for n in larger if needed(n) <= room * (1 - 1e-9)]
    assert len(set(compiled)) == len(compiled)
    if constant == 0:
        assert len(compiled) <= 2


def test_a_run_takes_micro_batches_that_fit(here, capsys, monkeypatch):
    """Where there is next to no memory, one sequence at a time. The run is the same one."""
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    assert run("--out", "whole") == 0
    assert "memory:" not in capsys.readouterr().out  # a CPU does not say what it has
    monkeypatch.setattr(memory, "available", lambda: 10**12)
    assert run("--out", "large") == 0
    assert "memory: 4 of 4 sequences at once on each device, which" in capsys.readouterr().out

    needed = []
    original = memory.usage

    def noted(lowered):
        needed.append(original(lowered))
        return tuple(1000 * mib for mib in needed[-1])  # as if the model were larger

    monkeypatch.setattr(memory, "usage", noted)
    monkeypatch.setattr(memory, "available", lambda: 1)
    assert run("--out", "small") == 0
    assert "memory: 1 of 4 sequences at once on each device, which" in capsys.readouterr().out
    assert needed[-1] < needed[0]
    losses = [[row["val_loss"] for row in rows(out)] for out in ("whole", "small")]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert run("--out", "small", "--micro-batch", "2") == 0
    said = capsys.readouterr().out
    assert "--micro-batch 2" in said and "memory:" not in said


@pytest.mark.parametrize("method", ["gn", "gn_cg"])
def test_no_program_of_a_run_computes_on_more_sequences(here, monkeypatch, method):
    """Warm-up, training, line search and evaluation, on one device with four sequences."""
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    jax.clear_caches()  # or what was traced before is not traced again
    seen = set()
    original = model.inputs_and_labels

    def noted(tokens):
        seen.add(len(tokens))
        return original(tokens)

    monkeypatch.setattr(model, "inputs_and_labels", noted)
    assert run("--method", method, "--steps", "1", "--micro-batch", "2") == 0
    assert seen == {2}


def small_run(*flags):
    return recipe.configure([*SMALL, "--data", "text.txt", *flags])


def init_of(planned):
    return lambda: gn.init(random_params(planned.network), planned.settings)


@pytest.fixture
def gibibytes(monkeypatch):
    """A device may use 3.5 GiB, and a sequence takes one, whatever the network."""

    def lower(state, tokens, config):
        return config.micro_batch

    monkeypatch.setattr(gn, "lower", lower)
    monkeypatch.setattr(memory, "usage", lambda size: (size * 2**10, 0))
    monkeypatch.setattr(memory, "available", lambda: 7 * 2**9)


@pytest.mark.parametrize(("devices", "size", "share"), [(1, 3, 6), (2, 3, 3), (3, 2, 2)])
def test_a_device_holds_sequences_of_its_own_share(gibibytes, monkeypatch, devices, size, share):
    """Six sequences on all devices together."""
    monkeypatch.setattr(jax, "local_device_count", lambda: devices)
    planned = small_run("--inner-batch", "6")
    fitted, needed = train.fit_memory(planned, init_of(planned))
    assert (fitted.micro_batch, needed) == (size, size * 2**10)
    at_once = f"memory: {size} of {share} sequences at once on each device"
    assert report.describe_memory(fitted, needed) == f"{at_once}, which takes {size}.0 of 3.5 GiB"


def test_all_processes_take_what_fits_into_each(gibibytes, monkeypatch):
    """Else they would compile different programs, and wait for each other without end."""
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.setattr(parallel, "largest", lambda number: max(number, -1))  # another has 1 MiB
    planned = small_run("--inner-batch", "6")
    fitted, _ = train.fit_memory(planned, init_of(planned))
    assert fitted.micro_batch == 1


def test_a_method_that_does_not_say_what_it_needs_is_left_as_it_is(gibibytes):
    """One of your own, without the function `lower`, or with a Config without micro_batch."""
    planned = small_run()
    method = recipe.Method(SimpleNamespace(init=gn.init), gn.Config, "without lower")
    for own in ({"method": method}, {"settings": SimpleNamespace()}):
        changed = planned._replace(**own)
        assert train.fit_memory(changed, init_of(planned)) == (changed, None)


def test_no_sequence_at_all_is_refused(here, capsys):
    assert run("--micro-batch", "0") == 2
    assert "micro_batch" in capsys.readouterr().err
