"""The claim of the project: the update is the Gauss-Newton update.

Everything is compared with matrices written down in full, in float64: the Jacobian J of the logits in the parameters by
forward-mode differentiation of the plain model, the curvature of cross-entropy from its closed form, G = Jᵀ ∇²ℓ J, and
a dense solve.
"""

import dataclasses
import math
import os
import subprocess
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOY, VARIANTS, assert_same, kept, logits, many, random_params, random_tokens
from jax.flatten_util import ravel_pytree

import baselines
import gn
import gn_prox
import layerwise_gn
import model

GRID = [2 ** (-i / 2) for i in range(5)]  # the step sizes of Appendix D


def config_of(network, **changes):
    return gn.Config(**{"model": network, "inner_steps": 2, "outer_steps": 3} | changes)


@partial(jax.jit, static_argnames="config")
def value_and_grad(params, delta, tokens, config):
    """Of the quadratic at δ: (loss, L2), gradient."""
    return gn.value_and_grad(gn.quadratic, gn.linearized, params, delta, tokens, config)


def dense(network, params, tokens):
    """(loss, gradient [P], G [P, P]) by the textbook: J, p - onehot(y), and diag(p) - p pᵀ, a token at a time."""
    flat, unravel = ravel_pytree(params)
    f = lambda flat: logits(network, unravel(flat), tokens).reshape(-1, network.vocab_size)  # [n, V]
    z, J = map(np.asarray, jax.jit(lambda flat: (f(flat), jax.jacfwd(f)(flat)))(flat))  # [n, V], [n, V, P]
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    y = np.eye(network.vocab_size)[tokens[:, 1:].reshape(-1)]
    loss, grad, G = 0.0, 0.0, 0.0
    for i in range(len(z)):
        loss -= np.log(p[i] @ y[i])
        grad += J[i].T @ (p[i] - y[i])
        G += J[i].T @ (np.diag(p[i]) - np.outer(p[i], p[i])) @ J[i]
    return loss / len(z), grad / len(z), G / len(z)


def close(a, b, tolerance):
    """|a - b| <= tolerance |b|, in the norm over everything."""
    a, b = ravel_pytree(a)[0], ravel_pytree(b)[0]
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), np.linalg.norm(a - b) / np.linalg.norm(b)


def test_gradient_is_g_plus_G_delta_and_loss_is_the_quadratic(toy, float64):
    """∇L2(θ_t + δ) = g + G δ + λ δ and L2 = L(θ_t) + g·δ + ½ δ·G δ + ½ λ |δ|², with G written down in full."""
    params, tokens = random_params(toy), random_tokens(toy, 3)
    loss, g, G = dense(toy, params, tokens)
    flat, unravel = ravel_pytree(params)
    delta = np.random.default_rng(1).normal(size=flat.shape) * 0.3
    (at, value), grad = value_and_grad(params, unravel(delta), tokens, config_of(toy, damping=0.1))
    close(grad, g + G @ delta + 0.1 * delta, 1e-10)
    close(value, loss + g @ delta + delta @ G @ delta / 2 + 0.1 * delta @ delta / 2, 1e-10)
    close(at, loss, 1e-10)


def test_gradient_at_zero_is_the_ordinary_gradient(toy, float64):
    """∇L2(θ_t) = ∇L(θ_t), and both values are L(θ_t)."""
    params, tokens = random_params(toy), random_tokens(toy, 3)
    zero = jax.tree.map(jnp.zeros_like, params)
    values, grad = value_and_grad(params, zero, tokens, config_of(toy, damping=0.1))

    @jax.value_and_grad
    def plain(params):
        z = jax.nn.log_softmax(logits(toy, params, tokens))
        return -jnp.mean(jnp.take_along_axis(z, tokens[:, 1:, None], axis=-1))

    value, ordinary = jax.jit(plain)(params)
    close(grad, ordinary, 1e-12)
    close(values, jnp.full(2, value), 1e-12)


LOSS = jax.jit(partial(model.loss, TOY))
LOSS_GRAD = jax.jit(jax.grad(partial(model.loss, TOY)))


def test_chunks_do_not_change_anything(float64):
    """Loss and gradient do not depend on how many tokens go through the head at a time, a divisor of B T or not."""
    params, tokens = random_params(TOY), random_tokens(TOY, 3)
    delta = random_params(TOY, seed=1)
    of = lambda chunk: config_of(dataclasses.replace(TOY, head_chunk=chunk), damping=0.1)
    results = [value_and_grad(params, delta, tokens, of(chunk)) for chunk in (1, TOY.head_chunk, 7, 1000)]
    for other in results[1:]:
        close(other, results[0], 1e-12)


def equations(jaxpr):
    """Every equation in a jaxpr, and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(param, "eqns"):
                yield from equations(getattr(param, "jaxpr", param))


def sizes(jaxpr):
    """The number of elements of every array in a jaxpr."""
    return [math.prod(v.aval.shape) for eqn in equations(jaxpr) for v in eqn.outvars]


@pytest.mark.parametrize("what", ["gn", "line search", "baseline"])
def test_no_array_holds_the_logits_of_a_batch(what):
    """Nothing as large as [B, T, V] is ever made, by the inner step, the line search or the baselines' gradient."""
    network = dataclasses.replace(TOY, vocab_size=10_000, head_chunk=2)
    params, tokens = random_params(network), random_tokens(network, 16)
    compute = {
        "gn": lambda p: gn.inner_step(gn.init(p, config_of(network)), tokens, config_of(network)),
        "line search": lambda p: gn.losses(p, p, jnp.ones(2), tokens, network),
        "baseline": lambda p: model.value_and_grad(network, p, tokens),
    }[what]
    largest = max(sizes(jax.make_jaxpr(compute)(params).jaxpr))
    assert largest <= 10_000 * 2 * TOY.d_model < 16 * TOY.context * 10_000 / 4  # w and dw, one above the other


@pytest.mark.parametrize("name, damping", [("textbook", 1.0), ("paper", 1e-3)])
def test_cg_update_is_the_dense_solve(float64, name, damping):
    """One `update` with inner cg is θ_t - α (G + λI)⁻¹ g on the whole batch, α the best of the grid or 0."""
    toy = VARIANTS[name]
    params, (batches, fresh) = random_params(toy), many(toy)
    config = config_of(toy, inner="cg", cg_steps=3000, damping=damping)
    loss, g, G = dense(toy, params, np.concatenate([batches(0), batches(1)]))
    flat, unravel = ravel_pytree(params)
    step = -np.linalg.solve(G + damping * np.eye(len(g)), g)
    solved = gn.solve(gn.init(params, config), jnp.stack([batches(0), batches(1)]), config)
    close(ravel_pytree(solved.theta)[0] - flat, step, 1e-6)

    at = jax.jit(lambda flat: sum(model.loss(toy, unravel(flat), fresh(k)) for k in range(2)) / 2)
    there, here = [at(flat + a * step) for a in GRID], at(flat)
    alpha = GRID[int(np.argmin(there))] if min(there) < here else 0.0
    assert (alpha > 0) == (damping == 1)  # hardly damped, the step fits its four sequences only, and is refused
    state, metrics = gn.update(gn.init(params, config), batches, fresh, config)
    assert math.isclose(metrics["alpha"], alpha, rel_tol=1e-12)
    close(state.params, flat + alpha * step, 1e-6)
    close(metrics["train_loss"], loss, 1e-10)
    close(metrics["inner_loss"], loss + g @ step + step @ G @ step / 2 + damping * step @ step / 2, 1e-8)


def test_one_step_of_conjugate_gradients_is_steepest_descent(float64):
    """--cg-steps 1: δ = -(g·g / g·(G + λI) g) g."""
    params, (batches, _) = random_params(TOY), many(TOY)
    config = config_of(TOY, inner="cg", cg_steps=1, damping=0.1)
    state = gn.solve(gn.init(params, config), jnp.stack([batches(0), batches(1)]), config)
    _, g, G = dense(TOY, params, np.concatenate([batches(0), batches(1)]))
    step = -(g @ g) / (g @ G @ g + 0.1 * g @ g) * g
    close(ravel_pytree(state.theta)[0] - ravel_pytree(params)[0], step, 1e-8)


def test_muon_inner_loop_lowers_the_quadratic(float64):
    """The inner loop minimizes L2: repeated on one batch it comes close to the minimum that the dense solve gives."""
    params, batch = random_params(TOY), random_tokens(TOY, 8)
    config = config_of(TOY, inner_steps=400, lr=0.03, weight_decay=0.0, damping=0.1)
    state, metrics = gn.update(gn.init(params, config), lambda k: batch, lambda k: batch, config)
    loss, g, G = dense(TOY, params, batch)
    step = ravel_pytree(state.theta)[0] - ravel_pytree(params)[0]
    M = G + 0.1 * np.eye(len(g))
    value = lambda step: g @ step + step @ M @ step / 2
    best = value(-np.linalg.solve(M, g))
    assert best <= value(step) < 0.99 * best < 0


def test_next_inner_loop_starts_before_the_line_search(float64):
    """θ_{t+1} = θ_t + α (θ - θ_t), and the inner iterate and its momentum go on from θ (Section 5.1)."""
    params, (batches, fresh) = random_params(TOY), many(TOY)
    config = config_of(TOY, lr=0.02)
    state, metrics = gn.update(gn.init(params, config), batches, fresh, config)
    alpha = float(metrics["alpha"])
    assert alpha > 0
    close(state.params, jax.tree.map(lambda a, b: a + alpha * (b - a), params, state.theta), 1e-12)
    by_hand = gn.init(params, config)
    for k in range(2):
        by_hand = gn.inner_step(by_hand, batches(k), config)
    assert (int(state.t), int(state.k), float(state.loss)) == (1, 0, 0.0)
    by_hand = kept(state._replace(theta=by_hand.theta, opt=by_hand.opt))
    state, metrics = gn.update(state, batches, fresh, config)
    assert float(metrics["alpha"]) > 0
    for k in range(2):
        by_hand = gn.inner_step(by_hand, batches(k), config)
    assert_same(state.theta, by_hand.theta)
    assert_same(state.opt, by_hand.opt)


def search(theta, config, params=None):
    params = random_params(TOY) if params is None else params
    return float(gn.line_search(params, theta, many(TOY)[1], config))


def test_line_search_takes_the_best_of_its_grid(float64):
    """α is the argmin over 2^(-i/2) of the mean loss over all fresh batches, for steps of every length."""
    params, fresh = random_params(TOY), many(TOY)[1]
    grad = LOSS_GRAD(params, fresh(0))  # good for the first fresh batch more than for the second
    seen, alone = set(), set()
    for length in (0.2, 0.5, 0.8, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0):
        theta = jax.tree.map(lambda a, g, n=length: a - n * g, params, grad)
        each = np.array([[LOSS(gn.move(params, theta, a), fresh(k)) for a in GRID] for k in range(2)])
        best = GRID[int(np.argmin(each.sum(axis=0)))]
        assert math.isclose(search(theta, config_of(TOY, guard=False)), best)
        seen.add(best)
        alone |= {(k, best != GRID[int(np.argmin(each[k]))]) for k in range(2)}
    assert len(seen) > 2 and {(0, True), (1, True)} <= alone  # else the lengths do not test the choice over all batches


def test_move_is_the_line_from_theta_t_to_theta(float64):
    """move = θ_t + α (θ - θ_t), θ_t itself at α = 0 whatever θ is, θ at α = 1."""
    a, b = random_params(TOY), random_params(TOY, 1)
    close(gn.move(a, b, 0.25), jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, a, b), 1e-12)
    assert_same(gn.move(a, jax.tree.map(lambda b: b * jnp.nan, b), 0.0), a)


def test_guard_refuses_what_does_not_lower_the_loss(float64):
    """Uphill or non-finite: α = 0, θ_t stays exactly, iterate and momentum restart from it. Unguarded it moves."""
    params, (batches, fresh) = random_params(TOY), many(TOY)
    config = config_of(TOY)
    uphill = jax.tree.map(lambda a, g, h: a + g + h, params, *(LOSS_GRAD(params, fresh(k)) for k in range(2)))
    broken = jax.tree.map(lambda a: a * jnp.nan, params)
    half = {**params, "head": params["head"].at[0, 0].set(jnp.inf)}
    for theta in (uphill, broken, half):
        assert search(theta, config, params) == 0
    assert search(params, config, params) == 0  # no better: refused too
    assert search(uphill, dataclasses.replace(config, guard=False), params) == 0.25
    unseen = lambda k: fresh(k) % 10  # id 10 is not in it, so an infinite embedding of that leaves the loss finite
    downhill = jax.tree.map(lambda a, g: a - 0.1 * g, params, LOSS_GRAD(params, unseen(0)))
    assert gn.line_search(params, downhill, unseen, config) > 0
    lost = {**downhill, "embedding": downhill["embedding"].at[10, 0].set(jnp.inf)}
    assert np.isfinite(LOSS(lost, unseen(0))) and gn.line_search(params, lost, unseen, config) == 0
    for theta in (uphill, broken):
        state = gn.inner_step(gn.init(params, config), batches(0), config)._replace(theta=theta)
        state = gn.finish(state, jnp.zeros(()), dataclasses.replace(config, parameter_weight_decay=0.1))
        assert_same(state, gn.init(params, config)._replace(t=jnp.ones((), jnp.int32)))


def test_micro_batches(float64):
    """The mean over k inner batches, of losses and gradient, is that of one batch k times as large."""
    params, delta, tokens = random_params(TOY), random_params(TOY, 1), random_tokens(TOY, 9)
    at = lambda tokens: value_and_grad(params, delta, tokens, config_of(TOY, damping=0.1))
    mean = jax.tree.map(lambda *a: sum(a) / 3, *map(at, np.split(tokens, 3)))
    close(at(tokens), mean, 1e-12)


def test_same_batches_twice_give_bitwise_the_same_state():
    """Nothing random is left in an outer step."""
    config = config_of(TOY, inner_steps=3)
    one, two = (gn.update(gn.init(random_params(TOY), config), *many(TOY), config) for _ in range(2))
    assert_same(one, two)


def test_stopped_inside_an_outer_step_it_goes_on_bitwise():
    """A State is all there is: from the one after any inner step, update ends where it would have ended."""
    config, seen = config_of(TOY, inner_steps=3), []
    whole = gn.update(gn.init(random_params(TOY), config), *many(TOY), config, lambda s: seen.append(kept(s)))
    assert [int(state.k) for state in seen] == [1, 2, 3]
    for state in seen:
        assert_same(gn.update(state, *many(TOY), config), whole)


def test_without_line_search_the_step_is_taken_whole():
    """line_search = 0: θ_{t+1} = θ, nothing fresh is read, and the log has no α."""
    config = config_of(TOY, line_search=0)
    state, metrics = gn.update(gn.init(random_params(TOY), config), many(TOY)[0], None, config)
    close(state.params, state.theta, 1e-6)
    assert metrics["alpha"] is None and config.fresh_batches == 0


def half(x):
    return 0.5 + 0.5 * math.cos(math.pi * x)


PLACES = [
    (0, 0),
    (0, 3),
    (1, 0),
    (1, 3),
    (2, 0),
    (2, 3),
]  # first and last inner step of the first two and the last of 3


def rates(**changes):
    """lr(t, k) at PLACES, N = 4, with its peak at 0.5, over 0.5."""
    config = config_of(TOY, inner_steps=4, lr=0.5, **changes)
    at = jax.jit(partial(gn.learning_rate, config=config))  # t and k are traced: one program for the whole run
    return np.array([float(at(jnp.int32(t), jnp.int32(k))) for t, k in PLACES]) / 0.5


def test_schedules():
    """Appendix D: lr(t, k) of the four schedules, none of which spends an inner step at lr 0, the last one included."""
    expected = {
        "constant": [1] * 6,
        "constant+inner cosine": [1, half(3 / 4)] * 3,
        "global cosine": [half((4 * t + k) / 12) for t, k in PLACES],
        "global+inner cosine": [half((4 * t + k) / 12) * half(k / 4) for t, k in PLACES],
    }
    assert set(expected) == set(gn.SCHEDULES)
    for schedule, values in expected.items():
        got = rates(schedule=schedule)
        np.testing.assert_allclose(got, values, rtol=1e-5)
        assert min(got) > 0


def test_fault_3_no_inner_cycle_is_skipped_and_no_outer_step_has_lr_0():
    """global+inner cosine: each outer step begins at the global cosine and falls from there, the last one too."""
    config = config_of(TOY, schedule="global+inner cosine", inner_steps=4, outer_steps=5, lr=1.0)
    lr = np.array([[gn.learning_rate(t, k, config) for k in range(4)] for t in range(5)])
    np.testing.assert_allclose(lr[:, 0], [half(t / 5) for t in range(5)], rtol=1e-5)
    assert (np.diff(lr, axis=1) < 0).all() and lr.min() > 0


def test_fault_10_no_command_is_run_and_nothing_called_back_inside_a_compiled_step(monkeypatch):
    """Tracing a step starts no process (its answer would be a constant), and what is traced never leaves the device."""
    for owner, name in ((subprocess, "Popen"), (os, "system"), (os, "popen"), (os, "posix_spawn")):
        monkeypatch.setattr(owner, name, None)
    config, tokens = config_of(TOY, lr=0.012), random_tokens(TOY, 2)  # a config of its own: nothing is traced yet
    step = lambda s: gn.finish(gn.inner_step(s, tokens, config), jnp.ones(()), config)
    jaxpr = jax.make_jaxpr(step)(gn.init(random_params(TOY), config)).jaxpr
    names = {eqn.primitive.name for eqn in equations(jaxpr)}
    assert "dot_general" in names and not [name for name in names if "callback" in name or "feed" in name]


def test_fault_11_a_step_is_compiled_once_and_does_not_grow_with_the_run(monkeypatch):
    """The schedule is a function of t and k: no program is made again at a later step, none is larger in a long run."""
    traced, original = [], model.hidden
    monkeypatch.setattr(model, "hidden", lambda *args: traced.append(1) or original(*args))
    config, after = config_of(TOY, outer_steps=4, lr=0.011), []
    state = gn.init(random_params(TOY), config)
    for _ in range(3):
        state, _ = gn.update(state, *many(TOY), config)
        after.append(len(traced))
    assert after[0] == after[2] > 0
    of = lambda steps: dataclasses.replace(config, outer_steps=steps, schedule="global+inner cosine")
    program = lambda c: jax.make_jaxpr(lambda s: gn.inner_step(s, many(TOY)[0](0), c))(state).jaxpr
    count = lambda c: len(list(equations(program(c))))
    assert count(of(2)) == count(of(20_000))


def test_one_compiled_step_serves_every_learning_rate(float64):
    """The lr is an argument of the compiled step, and the lr it is: θ moves twice as far at twice the lr, at first."""
    make = lambda lr: config_of(TOY, lr=lr, inner_steps=1, weight_decay=0.0, line_search=0, momentum=0.9)
    moved = {}
    for lr in (0.001, 0.002):
        before = gn.inner_step._cache_size()
        state, metrics = gn.update(gn.init(random_params(TOY), make(lr)), *many(TOY), make(lr))
        moved[lr] = gn.inner_step._cache_size() - before, state.theta
        assert math.isclose(metrics["lr"], lr, rel_tol=1e-6)
    assert [moved[lr][0] for lr in moved] == [1, 0]
    step = lambda lr: jax.tree.map(jnp.subtract, moved[lr][1], random_params(TOY))
    close(step(0.002), jax.tree.map(lambda a: 2 * a, step(0.001)), 1e-9)


def test_a_step_takes_over_the_memory_of_its_state_and_of_nothing_else():
    """Donated: no array of the state before is left. The parameters that a run began with are the caller's."""
    config, params = config_of(TOY), random_params(TOY)
    state = gn.init(params, config)
    after = gn.inner_step(state, many(TOY)[0](0), config)
    gone = lambda tree: {a.is_deleted() for a in jax.tree.leaves(tree)}
    assert gone(state) == {True} and gone(after) == {False}
    assert_same(params, random_params(TOY))
    pointers = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(gn.init(params, config))]
    assert len(set(pointers)) == len(pointers)


def test_a_line_search_may_read_less_than_a_batch(float64):
    """line_search_tokens: about so many, at least one inner batch; α is the best on those. 0: as many as the batch."""
    make = lambda tokens, **more: config_of(TOY, inner_steps=8, inner_tokens=10, line_search_tokens=tokens, **more)
    assert [make(n).fresh_batches for n in (0, 1, 14, 16, 80, 200)] == [8, 1, 1, 2, 8, 20]
    assert make(16, line_search=0).fresh_batches == 0
    params, read = random_params(TOY), []
    theta = jax.tree.map(lambda a, g: a - 1.6 * g, params, LOSS_GRAD(params, many(TOY)[1](0)))
    fresh = lambda k: read.append(k) or many(TOY)[1](k)
    alpha = float(gn.line_search(params, theta, fresh, make(20, guard=False)))
    assert read == [0, 1]
    total = [sum(LOSS(gn.move(params, theta, a), many(TOY)[1](k)) for k in range(2)) for a in GRID]
    assert math.isclose(alpha, GRID[int(np.argmin(total))])


@pytest.mark.parametrize("name", ["gn", "gn_prox", "layerwise_gn"])
def test_bfloat16_gradients_are_within_0_012_of_float32(name):
    """Of every matrix, relative, at a width and context where rounding averages out; nothing stored is rounded."""
    _, cls, objective, linearized = HAND[name]
    network = model.Config(vocab_size=64, context=64, d_model=64, d_ff=256, n_layers=2, n_heads=2, n_kv_heads=2)
    params, tokens = random_params(network), random_tokens(network, 8)
    delta = jax.tree.map(lambda a: 0.02 * a, random_params(network, 1))
    at = lambda network: jax.jit(
        lambda p, d, t: gn.value_and_grad(objective, linearized, p, d, t, cls(network, 1, 1))
    )(params, delta, tokens)
    (_, exact), (_, rounded) = at(network), at(dataclasses.replace(network, dtype="bfloat16"))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(rounded), strict=True):
        if a.ndim >= 2 and path[-1].key in (*model.MATRICES, "embedding", "head"):
            assert b.dtype == jnp.float32 and 0 < jnp.linalg.norm(a - b) < 0.012 * jnp.linalg.norm(a), path


def test_warm_up_fractions():
    """Linear rises: of the whole run over its first inner steps, of each outer step over its own; then the cosine."""
    s = [4 * t + k for t, k in PLACES]
    rise, fall = [min(1, (i + 1) / 6) for i in s], [half(max(0, (i - 6) / 6)) for i in s]
    np.testing.assert_allclose(rates(schedule="constant", warmup=0.5), rise, rtol=1e-5)
    np.testing.assert_allclose(rates(schedule="global cosine", warmup=0.5), np.multiply(rise, fall), rtol=1e-5)
    inner = rates(schedule="constant+inner cosine", inner_warmup=0.5)
    np.testing.assert_allclose(inner, [1 / 2, half(1 / 2)] * 3, rtol=1e-5)


@pytest.mark.parametrize("tau", [0.0, 0.6])
def test_fault_7_an_average_over_outer_steps_still_forgets_the_start(float64, tau):
    """With a line search it is over the θ_t of n outer steps, each of which counts as its N inner ones: decay τ^N.

    It is evaluated and does not steer. τ = 0: there is none.
    """
    config, thetas = config_of(TOY, average=tau), [random_params(TOY)]
    state, plain = gn.init(thetas[0], config), gn.init(thetas[0], config_of(TOY))
    for _ in range(3):
        state, _ = gn.update(state, *many(TOY), config)
        plain, _ = gn.update(plain, *many(TOY), config_of(TOY))
        thetas.append(kept(state.params))
        assert_same(state.params, plain.params)
    decay = tau**2
    closed = lambda *a: decay**3 * a[0] + (1 - decay) * sum(decay ** (3 - i) * a[i] for i in (1, 2, 3))
    close(baselines.weights(state), jax.tree.map(closed, *thetas) if tau else state.params, 1e-12)
    assert (state.average is None) == (tau == 0)


def test_with_cg_the_average_is_over_outer_steps_too(float64):
    """Without a line search as well, as there are no inner steps: τ^N θ_0 + (1 - τ^N) θ_1; by default there is none."""
    config, params = config_of(TOY, inner="cg", cg_steps=3, damping=1.0, line_search=0, average=0.6), random_params(TOY)
    assert dataclasses.replace(config, average=None).average == 0
    state, _ = gn.update(gn.init(params, config), many(TOY)[0], None, config)
    close(state.average, jax.tree.map(lambda a, b: 0.36 * a + 0.64 * b, params, state.params), 1e-12)


def test_parameter_weight_decay_shrinks_matrices_once_an_outer_step(float64):
    """θ_{t+1} is (1 - w) times what it would be, on matrices; so is θ, else the next step would undo it; norms stay."""
    params = random_params(TOY)
    plain, decayed = (
        gn.update(gn.init(params, c), *many(TOY), c)[0]
        for c in (config_of(TOY), config_of(TOY, parameter_weight_decay=0.1))
    )
    for a, b in ((plain.params, decayed.params), (plain.theta, decayed.theta)):
        for name in ("embedding", "head"):
            close(b[name], 0.9 * a[name], 1e-12)
        for name in a["blocks"]:
            close(b["blocks"][name], (0.9 if name in model.MATRICES else 1) * a["blocks"][name], 1e-12)
        assert_same(a["final_norm"], b["final_norm"])


HAND = {
    "gn": (gn, gn.Config, gn.quadratic, gn.linearized),
    "gn_prox": (gn_prox, gn_prox.Config, gn_prox.exact, gn.linearized),
    "layerwise_gn": (layerwise_gn, layerwise_gn.Config, gn.quadratic, layerwise_gn.linearized),
    "layerwise_gn exact": (layerwise_gn, layerwise_gn.Config, gn_prox.exact, layerwise_gn.linearized),
}


@pytest.mark.parametrize("name, inner", [("gn", "adamw"), *((name, "muon") for name in HAND)])
def test_update_is_the_loop_written_out(float64, name, inner):
    """Two outer steps of each method, by hand: its gradient at θ, lr(t, k), its optimizer, and what is logged."""
    method, cls, objective, linearized = HAND[name]
    exact = {"objective": "exact"} if "exact" in name else {}
    common = dict(lr=0.05, schedule="global+inner cosine", momentum=0.8, weight_decay=0.3, clip=0.2, inner=inner)
    config = cls(TOY, 2, 2, line_search=0, average=0.0, **common, **exact)
    params, (batches, _) = random_params(TOY), many(TOY)
    state, theta0, theta = method.init(params, config), params, params
    muon = lambda lr: baselines.muon(lr, 0.8, 0.3, 0.2)
    adamw = lambda lr: baselines.adamw(lr, 0.8, 0.999, 0.3, 0.2)
    by_hand = muon if inner == "muon" else adamw
    opt = by_hand(0.0).init(params)
    at = jax.jit(lambda p, d, t: gn.value_and_grad(objective, linearized, p, d, t, config))

    @jax.jit
    def descend(theta, opt, grad, lr):
        step, opt = by_hand(lr).update(grad, opt, theta)
        return jax.tree.map(jnp.add, theta, step), opt

    for t in range(2):
        state, metrics = method.update(state, batches, None, config)
        seen = np.zeros(2)
        for k in range(2):
            values, grad = at(theta0, jax.tree.map(jnp.subtract, theta, theta0), batches(k))
            seen += np.array(values) / 2
            lr = 0.05 * half((2 * t + k) / 4) * half(k / 2)
            theta, opt = descend(theta, opt, grad, lr)
        theta0 = theta
        close(state.params, theta, 1e-6)
        assert math.isclose(metrics["lr"], 0.05 * half(t / 2), rel_tol=1e-6)
        close((metrics["train_loss"], metrics["inner_loss"]), (seen[0], seen[1]), 1e-6)


@pytest.mark.parametrize(
    "bad",
    [{"lr": -1.0}, {"lr": math.nan}, {"schedule": "cosin"}, {"inner": "sgd"}, {"damping": -1.0}, {"inner_warmup": 1.0}]
    + [{"momentum": 1.0}, {"average": 1.0}, {"parameter_weight_decay": -0.1}, {"cg_steps": 0}, {"line_search": -1}]
    + [{"line_search_tokens": -1}],
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        config_of(TOY, **bad)
