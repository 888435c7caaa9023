"""A baseline's step: the mean gradient of a batch, its optimizer, the learning rate, the average.

The update rules themselves are tested in test_optimizers.py and test_soap.py.
"""

import dataclasses
import inspect
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOY, assert_same, batches_and_fresh, copied, random_params, random_tokens
from test_gn import half_cosine, sizes
from trees import add, close, flat

import baselines
import optimizers
import recipe
import soap

ALL = (baselines.AdamW, baselines.Muon, baselines.SOAP)
UNIQUE = {baselines.SOAP: {"largest": 8}}  # a longer side's first basis is not unique
VALUE_AND_GRAD = jax.jit(baselines.value_and_grad, static_argnums=2)


def config_of(cls, **changes):
    return cls(**{"network": TOY, "inner_steps": 2, "outer_steps": 4} | changes)


def update_twice(config, batches):
    """The State after two batches, SOAP's first making no step, and the metrics of the second."""
    state = baselines.init(random_params(TOY), config)
    state, _ = baselines.update(state, batches, None, config)
    return baselines.update(state, batches, None, config)


# ---- the gradient of a batch ---------------------------------------------------------------------


def test_gradient_has_no_array_of_the_logits_of_a_batch():
    """Nothing as large as [B, T, V] is ever made. (What it computes is tested in test_model.py.)"""
    network = dataclasses.replace(TOY, vocab_size=10_000, head_chunk=2)
    params, tokens = random_params(network), random_tokens(network, 16)
    gradient = partial(baselines.value_and_grad, tokens=tokens, network=network)
    largest = max(sizes(jax.make_jaxpr(gradient)(params).jaxpr))
    assert largest <= TOY.d_model * 10_000 < 16 * TOY.context * 10_000 / 8


@pytest.mark.parametrize("cls", [baselines.AdamW, baselines.Muon])
def test_accumulated_inner_batches_are_one_large_batch(cls, float64):
    """(Not tested of SOAP, whose first basis is not unique.)"""
    tokens = random_tokens(TOY, 6)
    parts = np.split(tokens, 2)
    # Clipped, sums would pass for means.
    several = config_of(cls, clip=0.0)
    single = dataclasses.replace(several, inner_steps=1)
    expected, expected_metrics = update_twice(single, lambda k: tokens)
    found, metrics = update_twice(several, lambda k: parts[k])
    close(found, expected, 1e-8)  # the moments too, as Adam's step does not see a factor
    assert math.isclose(metrics["train_loss"], expected_metrics["train_loss"], rel_tol=1e-10)


# ---- the step ------------------------------------------------------------------------------------

SETTINGS = {"lr": 0.1, "weight_decay": 0.3, "clip": 0.2, "b1": 0.6, "b2": 0.8}
OPTIMIZERS = {
    baselines.AdamW: lambda lr: optimizers.adamw(lr, 0.6, 0.8, 0.3, 0.2),
    baselines.Muon: lambda lr: optimizers.muon(lr, 0.7, 0.3, 0.2, b2=0.95),
    baselines.SOAP: lambda lr: soap.soap(lr, 0.6, 0.8, 0.3, 0.2, 2, 8),
}


@pytest.mark.parametrize("cls", ALL)
def test_update_is_the_step_written_out(cls, float64):
    """Three batches: the mean gradient, lr(t), the optimizer with each setting in its place."""
    names = {field.name for field in dataclasses.fields(cls)}
    settings = SETTINGS | {"momentum": 0.7, "frequency": 2, "largest": 8}
    config = config_of(cls, **{name: v for name, v in settings.items() if name in names})
    make = OPTIMIZERS[cls]

    @jax.jit
    def step(theta, opt, grad, lr):
        move, opt = make(lr).update(grad, opt, theta)
        return add(theta, move), opt

    batches, _ = batches_and_fresh(TOY)
    theta = random_params(TOY)
    opt = make(0.0).init(theta)
    state = baselines.init(theta, config)
    for t in range(3):
        before = state
        state, metrics = baselines.update(before, batches, None, config)
        assert all(a.is_deleted() for a in jax.tree.leaves(before.params))  # as it says
        results = [VALUE_AND_GRAD(theta, batches(k), TOY) for k in range(2)]
        (loss_0, grad_0), (loss_1, grad_1) = results
        grad = jax.tree.map(lambda a, b: (a + b) / 2, grad_0, grad_1)
        lr = 0.1 * half_cosine(t / 4)
        theta, opt = step(theta, opt, grad, lr)
        close(state.params, theta, 1e-6)
        assert math.isclose(metrics["train_loss"], (loss_0 + loss_1) / 2, rel_tol=1e-6)
        assert math.isclose(metrics["lr"], lr, rel_tol=1e-6)
        assert (int(state.t), int(state.k)) == (t + 1, 0)


@pytest.mark.parametrize("cls", ALL)
def test_fault_5_clip_0_does_not_zero_the_update(cls, float64):
    """It is off: gradients stay as they are, the same as with a limit that is never reached."""
    params = random_params(TOY)

    @jax.jit
    def moved(config):
        """By two updates, as SOAP's first one makes none."""
        optimizer = config.optimizer(0.1)
        _, state = optimizer.update(params, optimizer.init(params), params)
        step, _ = optimizer.update(params, state, params)
        return step

    off, high, low = (moved(config_of(cls, clip=limit)) for limit in (0.0, 1e9, 1e-9))
    close(off, high, 1e-12)
    assert min(abs(a).max() for a in jax.tree.leaves(off)) > 0
    assert not np.allclose(off["head"], low["head"])


def test_schedules_at_their_first_and_last_step():
    """A linear rise to lr, then constant, or half a cosine over the rest that ends above 0."""

    def rates(**changes):
        config = config_of(baselines.AdamW, outer_steps=10, lr=2.0, **changes)
        return [float(baselines.learning_rate(jnp.int32(t), config)) for t in range(10)]

    rise = [0.4, 0.8, 1.2, 1.6, 2, 2, 2, 2, 2, 2]
    cosine = 1 + np.cos(np.pi * np.arange(10) / 10)
    shorter = 1 + np.cos(np.pi * np.arange(8) / 8)
    for found, expected in (
        (rates(schedule="constant"), [2] * 10),
        (rates(schedule="constant", warmup=0.5), rise),
        (rates(), cosine),
        (rates(warmup=0.2), [1, 2, *shorter]),
        (rates(warmup_steps=2), [1, 2, *shorter]),
        (rates(schedule="constant", warmup=0.1, warmup_steps=5), rise),
        (rates(warmup_steps=20), np.arange(1, 11) / 10),  # it never comes to lr, nor falls
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_depends_on_the_length_of_the_run():
    """The same lr for 10 updates, for 100, and where no end is known: or the property says so."""
    depends = []
    for changes in (
        {"schedule": "constant"},
        {"schedule": "cosine"},
        {"schedule": "constant", "warmup": 0.3},
        {"schedule": "constant", "warmup_steps": 3},
        {"schedule": "constant", "warmup": 0.3, "warmup_steps": 3},
    ):

        def lr(outer_steps, changes=changes):
            config = config_of(baselines.AdamW, outer_steps=outer_steps, **changes)
            return [float(baselines.learning_rate(t, config)) for t in range(10)]

        config = config_of(baselines.AdamW, **changes)
        depends.append(config.depends_on_length)
        assert (lr(10) == lr(100)) != config.depends_on_length
        assert config.depends_on_length or lr(10) == lr(recipe.NO_END)
    assert depends == [False, True, True, False, False]


@pytest.mark.parametrize("cls", ALL)
def test_fault_7_a_baselines_average_is_over_updates_not_inner_batches(cls, float64):
    """After n steps: τⁿ θ_0 + (1 - τ) Σ τⁿ⁻ⁱ θ_i. It is evaluated, and θ goes on without it."""
    unique = UNIQUE.get(cls, {})
    config, plain_config = config_of(cls, average=0.6, **unique), config_of(cls, **unique)
    batches, _ = batches_and_fresh(TOY)
    state = baselines.init(random_params(TOY), config)
    plain = baselines.init(random_params(TOY), plain_config)
    assert plain.average is None
    thetas = [copied(state.params)]
    for _ in range(3):
        state, _ = baselines.update(state, batches, None, config)
        plain, _ = baselines.update(plain, batches, None, plain_config)
        close(state.params, plain.params, 1e-6)
        assert optimizers.weights(plain) is plain.params
        thetas.append(copied(state.params))
    expected = jax.tree.map(lambda a: 0.6**3 * a, thetas[0])
    for i in (1, 2, 3):
        expected = add(expected, thetas[i], 0.4 * 0.6 ** (3 - i))
    close(optimizers.weights(state), expected, 1e-10)


# ---- the program ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", ALL)
def test_same_batches_twice_and_stopped_in_between_are_bitwise_the_same(cls):
    config = config_of(cls)
    batches, _ = batches_and_fresh(TOY)
    seen = []

    def watch(state):
        seen.append(copied(state))

    def start():
        return baselines.init(random_params(TOY), config)

    whole = baselines.update(start(), batches, None, config, watch)
    assert [int(state.k) for state in seen] == [1, 2]
    for state in (start(), *seen):
        assert_same(baselines.update(state, batches, None, config), whole)


def test_one_compiled_step_serves_every_update_and_every_float(monkeypatch):
    """Whether a run begins, goes on or has other floats. And `update` waits for no device."""
    traces = []
    original = baselines.value_and_grad

    def value_and_grad(*args, **named):
        traces.append("gradient")
        return original(*args, **named)

    def optimizer(self, lr):
        traces.append("optimizer")
        return optimizers.adamw(lr, self.b1, self.b2, self.weight_decay, self.clip)

    monkeypatch.setattr(baselines, "value_and_grad", value_and_grad)
    first = config_of(baselines.AdamW, outer_steps=5, average=0.5)
    state = baselines.init(random_params(TOY), first)
    monkeypatch.setattr(baselines.AdamW, "optimizer", optimizer)
    floats = [field.name for field in dataclasses.fields(first) if field.type is float]
    assert set(floats) >= {"lr", "warmup", "weight_decay", "average", "clip", "b1", "b2"}
    second = dataclasses.replace(first, **{name: getattr(first, name) / 2 for name in floats})
    batches, _ = batches_and_fresh(TOY)
    for config in (first, first, second):
        state, _ = baselines.update(state, batches, None, config)
        assert isinstance(state.k, np.int32)
    assert sorted(traces) == ["gradient", "optimizer"]


FLOATS = {
    "lr": 0.02,
    "warmup": 0.9,
    "weight_decay": 0.1,
    "average": 0.9,
    "clip": 0.1,
    "b1": 0.8,
    "b2": 0.5,
    "momentum": 0.5,
}


@pytest.mark.parametrize("cls", ALL)
def test_a_traced_float_does_what_a_static_one_does(cls, float64):
    """Each float as an argument of the compiled program, or as a constant of it: the same state.

    A state that another value would have changed too.
    """
    params = random_params(TOY)
    params = params | {"blocks": {"wq": params["blocks"]["wq"]}}
    settings = {"average": 0.5, "warmup": 0.7, "weight_decay": 0.3, "clip": 0.2}
    base = config_of(cls, **settings, **UNIQUE.get(cls, {}))

    def steps(config, finish):
        state = baselines.init(params, config)
        for seed in range(3):
            rng = np.random.default_rng(seed)
            grad = jax.tree.map(lambda a, rng=rng: jnp.asarray(rng.normal(size=a.shape)), params)
            state = finish(state._replace(grad=grad), config)
        return state

    before = steps(base, baselines.finish)
    for field in dataclasses.fields(cls):
        if field.type is float:
            config = dataclasses.replace(base, **{field.name: FLOATS[field.name]})
            traced = steps(config, baselines.finish)
            close(traced, steps(config, inspect.unwrap(baselines.finish)), 1e-9)
            assert np.abs(flat(traced) - flat(before)).max() > 1e-5, field.name


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls, bad",
    [
        (baselines.AdamW, {"lr": 0.0}),
        (baselines.AdamW, {"schedule": "linear"}),
        (baselines.AdamW, {"clip": -1.0}),
        (baselines.AdamW, {"weight_decay": -0.1}),
        (baselines.AdamW, {"warmup": 1.0}),
        (baselines.AdamW, {"b1": 1.0}),
        (baselines.AdamW, {"b2": 1.0}),
        (baselines.AdamW, {"average": 1.0}),
        (baselines.Muon, {"momentum": 1.0}),
        (baselines.SOAP, {"frequency": 0}),
        (baselines.SOAP, {"largest": 0}),
    ],
)
def test_bad_settings_are_refused(cls, bad):
    config_of(cls).check()
    with pytest.raises(ValueError, match=next(iter(bad))):
        config_of(cls, **bad).check()
