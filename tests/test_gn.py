"""The proof that gn.py descends L2, whose minimum is at the Gauss-Newton step, δ = -G⁻¹ g.

The argument, in the order of this file. The network is so small that every matrix fits on a page.

1. The definition. J, the Jacobian of all logits, is written down by differentiating the plain
   network in every parameter. H = diag(p) - p pᵀ is written down from the softmax p. G is the mean
   of Jᵀ H J over tokens, and g the gradient of the mean loss.
2. The gradient. What gn.py computes at θ_t + δ is g + G δ, to 1e-10. It is zero where a dense solve
   has the Gauss-Newton step.
3. The inner loop. An inner step is a step of Muon or AdamW along that gradient, and many of them
   approach the minimum that a dense solve finds.
4. The move. θ_{t+1} is where α says. (That α is the best of a grid on fresh tokens is shown in
   test_line_search.py.)
5. The whole. Two outer steps written out with the dense g and G end where `gn.update` ends; so do
   those that pass twice over the batch, and those that restart.
6. The learning rates are those of Appendix D.
7. The program. It holds no large array, repeats and resumes bit for bit, and compiles once.

test_gn_cg.py shows that gn_cg.py solves for this step, with damping and without; test_bfloat16.py
shows what rounding costs.
Tests named test_fault_N guard against fault N of docs/faults.md.
"""

import dataclasses
import inspect
import math
import os
import subprocess
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    TOY,
    assert_same,
    batches_and_fresh,
    copied,
    logits,
    random_params,
    random_tokens,
)
from jax.flatten_util import ravel_pytree
from trees import add, change_of, close, flat

import gn
import model
import optimizers
import recipe
from line_search import loss_at
from runtime import flags

ONE = dataclasses.replace(TOY, n_layers=1)  # for what compiles long: whole steps
GRID = [2 ** (-i / 2) for i in range(5)]  # the step sizes of Appendix D
LOSS = jax.jit(model.loss, static_argnums=0)
LOSS_GRAD = jax.jit(jax.grad(model.loss, argnums=1), static_argnums=0)
VALUE_AND_GRAD = jax.jit(gn.value_and_grad, static_argnames="objective")


def config_of(network, cls=gn.Config, **changes):
    return cls(**{"network": network, "inner_steps": 2, "outer_steps": 3} | changes)


# ---- 1. the definition ---------------------------------------------------------------------------


class Dense(NamedTuple):
    """Of the mean loss over tokens: value, gradient g [P], and Gauss-Newton matrix G [P, P]."""

    loss: float
    g: np.ndarray
    G: np.ndarray


@partial(jax.jit, static_argnums=0)
def logits_and_jacobian(network, params, tokens):
    """The logits z at each of n tokens, [n, V], and J = ∂z/∂θ in full, [n, V, P]."""
    vector, unravel = ravel_pytree(params)

    def f(vector):
        return logits(network, unravel(vector), tokens).reshape(-1, network.vocab_size)

    return f(vector), jax.jacfwd(f)(vector)


def softmax(z):
    return np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)


def dense(network, params, tokens):
    """The definition, one token at a time: g = Σ Jᵀ (p - onehot(y)) / n and G = Σ Jᵀ H J / n."""
    z, J = logits_and_jacobian(network, params, tokens)
    y = tokens[:, 1:].reshape(-1)
    loss, g, G = 0.0, 0.0, 0.0
    for p_i, J_i, y_i in zip(softmax(np.asarray(z)), np.asarray(J), y, strict=True):
        onehot = np.eye(network.vocab_size)[y_i]
        H_i = np.diag(p_i) - np.outer(p_i, p_i)
        loss += -np.log(p_i[y_i])
        g += J_i.T @ (p_i - onehot)
        G += J_i.T @ H_i @ J_i
    return Dense(loss / len(y), g / len(y), G / len(y))


def test_H_is_the_hessian_of_cross_entropy_and_positive_semidefinite(float64):
    """∇ℓ = p - onehot(y) and ∇²ℓ = diag(p) - p pᵀ, with no eigenvalue below zero."""
    z = 3 * np.random.default_rng(0).normal(size=11)
    y = 4

    def ell(z):
        return model.cross_entropy(z[None], jnp.array([y]))

    p = softmax(z)
    close(jax.jit(jax.grad(ell))(z), p - np.eye(11)[y], 1e-12)
    H = jax.jit(jax.hessian(ell))(z)
    close(H, np.diag(p) - np.outer(p, p), 1e-12)
    assert np.linalg.eigvalsh(H).min() > -1e-14


# ---- 2. the gradient -----------------------------------------------------------------------------


def test_gradient_is_g_plus_G_delta_and_value_is_the_quadratic(toy, float64):
    """∇L2(θ_t + δ) = g + G δ and L2(θ_t + δ) = L(θ_t) + g·δ + ½ δ·G δ."""
    params, tokens = random_params(toy), random_tokens(toy, 3)
    delta = change_of(params)
    loss, value, grad = VALUE_AND_GRAD(params, delta, tokens, config_of(toy))
    true = dense(toy, params, tokens)
    d = flat(delta)
    close(grad, true.g + true.G @ d, 1e-10)
    close(value, true.loss + true.g @ d + d @ true.G @ d / 2, 1e-10)
    close(loss, true.loss, 1e-10)


def test_gradient_is_zero_at_the_gauss_newton_step_of_a_dense_solve(float64):
    """∇L2 + λ δ = 0 at δ = -(G + λI)⁻¹ g, and without λ at a solution of G δ = -g.

    G has no inverse here: it is a sum over fewer logits than there are parameters. But a solution
    exists. For each token p - onehot(y) sums to zero, and the vectors that do are the range of H.
    So g = JᵀH w for some w, and the range of JᵀH is that of G = JᵀH J.
    """
    params, tokens = random_params(ONE), random_tokens(ONE, 3)
    true = dense(ONE, params, tokens)
    _, unravel = ravel_pytree(params)
    assert np.linalg.matrix_rank(true.G) < len(true.g)
    for damping in (0.0, 0.1):
        M = true.G + damping * np.eye(len(true.g))
        step, *_ = np.linalg.lstsq(M, -true.g, rcond=1e-10)
        _, _, grad = VALUE_AND_GRAD(params, unravel(step), tokens, config_of(ONE))
        rest = flat(grad) + damping * step
        assert np.linalg.norm(rest) < 1e-9 * np.linalg.norm(true.g)


def test_gradient_at_zero_is_the_ordinary_gradient(toy, float64):
    """∇L2(θ_t) = ∇L(θ_t), by backpropagation through the plain network; both values are L(θ_t)."""
    params, tokens = random_params(toy), random_tokens(toy, 3)

    @jax.jit
    @jax.value_and_grad
    def plain(params):
        log_p = jax.nn.log_softmax(logits(toy, params, tokens))
        return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))

    zero = jax.tree.map(jnp.zeros_like, params)
    loss, value, grad = VALUE_AND_GRAD(params, zero, tokens, config_of(toy))
    true_loss, true_grad = plain(params)
    close(grad, true_grad, 1e-12)
    close((loss, value), (true_loss, true_loss), 1e-12)


def test_chunks_of_the_head_change_nothing(float64):
    """The same to 1e-12, however many tokens go through the head at a time."""
    params, tokens = random_params(TOY), random_tokens(TOY, 3)
    delta = change_of(params)
    expected = VALUE_AND_GRAD(params, delta, tokens, config_of(TOY))
    for chunk in (1, 1000):
        network = dataclasses.replace(TOY, head_chunk=chunk)
        close(VALUE_AND_GRAD(params, delta, tokens, config_of(network)), expected, 1e-12)


def test_mean_over_inner_batches_is_that_of_the_batch(float64):
    """Losses and gradient of a batch of 9 sequences are the means over its 3 inner batches."""
    params, tokens = random_params(TOY), random_tokens(TOY, 9)
    delta = change_of(params)
    parts = [VALUE_AND_GRAD(params, delta, rows, config_of(TOY)) for rows in np.split(tokens, 3)]
    mean = jax.tree.map(lambda a, b, c: (a + b + c) / 3, *parts)
    close(VALUE_AND_GRAD(params, delta, tokens, config_of(TOY)), mean, 1e-12)


# ---- 3. the inner loop ---------------------------------------------------------------------------


BY_HAND = {"momentum": 0.8, "b2": 0.7, "weight_decay": 0.3, "clip": 0.2, "lr": 0.2}


def by_hand_optimizer(inner, lr, clip=BY_HAND["clip"]):
    """The inner optimizer of the settings BY_HAND."""
    momentum, b2, decay = BY_HAND["momentum"], BY_HAND["b2"], BY_HAND["weight_decay"]
    if inner == "muon":
        return optimizers.muon(lr, momentum, decay, clip, b2=b2)
    return optimizers.adamw(lr, 0.9, b2, decay, clip)


def hand_settings(config_class, **changes):
    """Two outer steps of two inner ones, without the guard: no step is refused."""
    settings = {"schedule": "global+inner cosine", "average": 0.0, "guard": False}
    settings |= BY_HAND | changes
    return config_class(ONE, 2, 2, **settings)


@partial(jax.jit, static_argnames="inner")
def descend(theta, opt, grad, lr, inner="muon", clip=BY_HAND["clip"]):
    """θ and the optimizer's state after one step."""
    step, opt = by_hand_optimizer(inner, lr, clip).update(grad, opt, theta)
    return add(theta, step), opt


@pytest.mark.parametrize("inner", ["muon", "adamw"])
def test_an_inner_step_descends_along_g_plus_G_delta(inner, float64):
    """From θ it takes the optimizer's step on g + (G + λI)(θ - θ_t), g and G being those of θ_t."""
    config = hand_settings(gn.Config, inner=inner, damping=0.1)
    params, tokens = random_params(ONE), random_tokens(ONE, 2)
    delta = change_of(params)
    before = gn.init(params, config)._replace(theta=add(params, delta))
    after = gn.inner_step(copied(before), tokens, config)

    true = dense(ONE, params, tokens)
    M = true.G + 0.1 * np.eye(len(true.g))
    d = flat(delta)
    _, unravel = ravel_pytree(params)
    theta, opt = descend(before.theta, before.opt, unravel(true.g + M @ d), config.lr, inner)
    close(after.theta, theta, 1e-8)
    close(after.opt, opt, 1e-8)
    assert_same(after.params, params)
    close(after.losses, [true.loss, 0.0], 1e-10)
    close(after.inner_losses, [true.loss + true.g @ d + d @ M @ d / 2, 0.0], 1e-10)
    assert int(after.k) == 1


def test_the_inner_loop_approaches_the_minimum_that_a_dense_solve_finds(float64):
    """400 Muon steps on one batch have 99.9% of the depth of the minimum, at -(G + λI)⁻¹ g."""
    params, batch = random_params(ONE), random_tokens(ONE, 8)
    no_search = {"line_search": 0, "average": 0.0}
    config = config_of(ONE, inner_steps=400, weight_decay=0.0, damping=0.1, lr=0.03, **no_search)
    state, _ = gn.update(gn.init(params, config), lambda k: batch, None, config)

    true = dense(ONE, params, batch)
    M = true.G + 0.1 * np.eye(len(true.g))

    def depth(step):
        return -(true.g @ step + step @ M @ step / 2)

    deepest = depth(-np.linalg.solve(M, true.g))
    assert 0.999 * deepest < depth(flat(state.params) - flat(params)) <= deepest


# ---- 4. the move ---------------------------------------------------------------------------------


def inside_an_outer_step(params, config, seed=1):
    """A State with an inner iterate and a momentum such as inner steps leave."""
    state = gn.init(params, config)
    opt = jax.tree.map(jnp.ones_like, state.opt)
    theta = add(params, change_of(params, seed=seed))
    mean = None
    if state.theta_mean is not None:
        mean = add(params, change_of(params, seed=seed + 10))
    return state._replace(
        theta=theta,
        theta_mean=mean,
        opt=opt,
        k=jnp.int32(2),
        losses=state.losses + 5,
        inner_losses=state.inner_losses + 7,
    )


def test_a_move_changes_theta_t_and_the_inner_iterate_goes_on(float64):
    """θ_{t+1} = θ_t + α (θ - θ_t), while θ and its momentum stay as they are (Section 5.1)."""
    config = config_of(TOY)
    before = inside_an_outer_step(random_params(TOY), config)
    after = gn.move(before, 0.25, config)
    step = add(before.theta, before.params, -1)
    close(after.params, add(before.params, step, 0.25), 1e-15)
    assert_same((after.theta, after.opt), (before.theta, before.opt))
    assert (after.t, after.k) == (1, 0)
    assert not any(after.losses) and not any(after.inner_losses)


@pytest.mark.parametrize("average", [0.0, 0.6])
def test_a_restart_begins_at_theta_t_with_an_optimizer_that_has_seen_nothing(float64, average):
    """With --restart true, the next inner loop starts from θ_{t+1}, as a new run would.

    θ_{t+1} has decayed as it does without a restart.
    """
    config = config_of(TOY, restart=True, parameter_weight_decay=0.1, average=average)
    before = inside_an_outer_step(random_params(TOY), config)
    after = gn.move(before, 0.25, config)
    kept_on = config_of(TOY, parameter_weight_decay=0.1, average=average)
    plain = gn.move(before, 0.25, kept_on)
    assert_same(after.params, plain.params)
    assert_same(after, gn.init(after.params, config)._replace(t=jnp.int32(1)))


@pytest.mark.parametrize("average", [0.0, 0.6])
def test_a_refused_step_leaves_nothing_behind(float64, average):
    """α = 0: θ_t stays exactly, undecayed; the next loop starts from it, without momentum."""
    config = config_of(TOY, parameter_weight_decay=0.1, average=average)
    params = random_params(TOY)
    after = gn.move(inside_an_outer_step(params, config), jnp.zeros(()), config)
    assert_same(after, gn.init(params, config)._replace(t=jnp.int32(1)))


def test_parameter_weight_decay_shrinks_matrices_once_an_outer_step(float64):
    """θ_{t+1}, θ and its mean are (1 - w) times what they would be, on matrices; norms stay."""
    config = config_of(TOY, parameter_weight_decay=0.1, average=0.6)
    before = inside_an_outer_step(random_params(TOY), config)
    plain = gn.move(before, 0.25, config_of(TOY, average=0.6))
    decayed = gn.move(before, 0.25, config)

    def check(a, b, is_matrix):
        np.testing.assert_allclose(b, 0.9 * a if is_matrix else a, rtol=1e-12)

    matrices = optimizers.is_matrix(before.params)
    jax.tree.map(check, plain.params, decayed.params, matrices)
    jax.tree.map(check, plain.theta, decayed.theta, matrices)
    jax.tree.map(check, plain.theta_mean, decayed.theta_mean, matrices)


def test_fault_7_with_a_line_search_the_average_is_the_mean_of_the_inner_iterates(float64):
    """After n inner steps, of all outer steps: τ^n θ_0 + (1 - τ) Σ τ^(n-i) θ_i.

    The search goes there. What is evaluated is θ_{t+1}. The next loop starts from θ all the same.
    """
    config = config_of(TOY, Bowl, average=0.6)
    theta0 = expected = random_params(TOY)
    state = gn.init(theta0, config)
    for seed in (1, 2):
        for k in range(config.inner_steps):
            state = gn.inner_step(state, random_tokens(TOY, seed + 10 * k), config)
            expected = add(jax.tree.map(lambda a: 0.6 * a, expected), state.theta, 0.4)
        close(state.theta_mean, expected, 1e-12)
        theta, mean = copied(state.theta), copied(state.theta_mean)
        state = gn.move(state, 0.5, config)
        close(state.params, add(theta0, add(mean, theta0, -1), 0.5), 1e-12)
        theta0 = copied(state.params)
        assert_same(state.theta, theta)
        assert state.average is None and optimizers.weights(state) is state.params


def test_by_default_there_is_no_average_with_a_line_search():
    state = gn.init(few_params(), config_of(TOY))
    assert state.average is None and state.theta_mean is None
    assert optimizers.weights(state) is state.params


def test_without_line_search_the_step_is_taken_whole():
    """line_search = 0: θ_{t+1} = θ, nothing fresh is read, and there is no α in the metrics."""
    config = config_of(TOY, line_search=0, average=0.0)
    before = inside_an_outer_step(random_params(TOY), config)
    theta = copied(before.theta)
    after, metrics = gn.update(before, None, None, config)
    close(after.params, theta, 1e-6)
    assert "alpha" not in metrics
    assert config.fresh_batches == 0


# ---- 5. two whole outer steps --------------------------------------------------------------------


def losses_by_hand(theta0, theta, fresh, grid=GRID, network=TOY):
    """The loss at each step size of the grid on each of two fresh batches: [2, grid]."""
    points = [add(theta0, add(theta, theta0, -1), alpha) for alpha in grid]
    rows = []
    for k in range(2):
        rows.append([float(LOSS(network, point, fresh(k))) for point in points])
    return np.array(rows)


def half_cosine(x):
    return 0.5 + 0.5 * math.cos(math.pi * x)


def outer_steps_by_hand(params, config, value_and_grad, clipped=None):
    """θ_2, and the metrics of both steps: Algorithm 1 written out, on two inner batches.

    value_and_grad(theta0, delta, tokens): the objective; clipped(grad): its clipped gradient, if
    that is not left to the optimizer. The settings are BY_HAND and global+inner cosine; of config
    only line search, average, passes and restart are read.
    """
    batches, fresh = batches_and_fresh(ONE)
    loop_steps = 2 * config.inner_epochs
    theta0, theta, mean = params, params, params
    opt = by_hand_optimizer("muon", 0.0).init(params)
    rows = []
    for t in range(2):
        losses, values = [], []
        for k in range(loop_steps):
            loss, value, grad = value_and_grad(theta0, add(theta, theta0, -1), batches(k % 2))
            progress = (t + k / loop_steps) / 2
            lr = BY_HAND["lr"] * half_cosine(progress) * half_cosine(k / loop_steps)
            if clipped:
                theta, opt = descend(theta, opt, clipped(grad), lr, clip=0.0)
            else:
                theta, opt = descend(theta, opt, grad, lr)
            # The search goes to the mean; with τ = 0 it is θ itself.
            tau = config.average if config.line_search else 0.0
            mean = add(jax.tree.map(partial(jnp.multiply, tau), mean), theta, 1 - tau)
            losses.append(float(loss))
            values.append(float(value))
        row = {"train_loss": np.mean(losses), "inner_loss": np.mean(values)}
        row |= {"inner_loss_first": values[0], "inner_loss_last": values[-1]}
        row |= norms_by_hand(add(mean, theta0, -1))
        row["lr"] = BY_HAND["lr"] * half_cosine(t / 2)
        theta0, of_search = searched_by_hand(theta0, mean, fresh, config)
        if t == 0 and config.line_search:
            assert of_search["alpha"] < 1  # else θ_{t+1} would be where the loop ended
        if config.restart:
            theta, mean = theta0, theta0
            opt = by_hand_optimizer("muon", 0.0).init(params)
        rows.append(row | of_search)
    return theta0, rows


def norms_by_hand(delta):
    """{metric: |δ|} over the matrices of blocks, over norms and biases, over embedding and head."""
    blocks = delta["blocks"]
    matrices = [blocks[name] for name in ("wq", "wk", "wv", "wo", "w_up", "w_down")]
    vectors = [delta["final_norm"], blocks["attention_norm"], blocks["mlp_norm"]]
    vectors += [blocks[name] for name in ("q_scale", "q_bias", "k_scale", "k_bias")]
    assert len(matrices) + len(vectors) == len(blocks) + 1
    return {
        "norm_matrices": np.linalg.norm(flat(matrices)),
        "norm_vectors": np.linalg.norm(flat(vectors)),
        "norm_embedding": np.linalg.norm(delta["embedding"]),
        "norm_head": np.linalg.norm(delta["head"]),
    }


def searched_by_hand(theta0, theta, fresh, config):
    """θ_{t+1}, and the metrics of the line search."""
    if not config.line_search:
        return theta, {}
    assert not config.guard  # what a refused step does is tested above
    grid = [2 ** (-i / 2) for i in range(config.line_search)]
    on_fresh = losses_by_hand(theta0, theta, fresh, grid=grid, network=ONE).mean(axis=0)
    alpha = grid[int(np.argmin(on_fresh))]
    row = {f"loss_at_{a:.4g}": loss for a, loss in zip(grid, on_fresh, strict=True)}
    return add(theta0, add(theta, theta0, -1), alpha), row | {"alpha": alpha}


def quadratic_model(true, delta):
    """The loss, L + g·δ + ½ δ·G δ, and the tree g + G δ."""
    d, unravel = ravel_pytree(delta)
    value = true.loss + true.g @ d + d @ true.G @ d / 2
    return true.loss, value, unravel(true.g + true.G @ d)


def assert_update_is_by_hand(method, config, value_and_grad, clipped=None):
    """Two updates of a method end at θ_2, with the metrics, of `outer_steps_by_hand`."""
    params, (batches, fresh) = random_params(ONE), batches_and_fresh(ONE)
    expected, rows = outer_steps_by_hand(params, config, value_and_grad, clipped)
    state = method.init(params, config)
    for row in rows:
        state, metrics = method.update(state, batches, fresh, config)
        assert metrics.keys() == row.keys()
        for name in row:
            assert math.isclose(metrics[name], row[name], rel_tol=1e-6), name
    close(state.params, expected, 1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"inner_epochs": 2},
        {"restart": True},
        {"average": 0.6},
        {"average": 0.6, "restart": True},
    ],
    ids=["plain", "epochs", "restart", "average", "average restart"],
)
def test_update_is_algorithm_1_written_out_with_the_dense_matrix(float64, changes):
    """Two outer steps with g + G δ from step 1 of the argument: same θ_2, losses, lr and α.

    Once as by default, once with two passes over the batch, once with a restart, and twice with a
    line search that goes to the mean of the inner iterates, the second time with a restart.
    """

    def value_and_grad(theta0, delta, tokens):
        return quadratic_model(dense(ONE, theta0, tokens), delta)

    assert_update_is_by_hand(gn, hand_settings(gn.Config, **changes), value_and_grad)


# ---- 6. the learning rates -----------------------------------------------------------------------

# first and last inner step of three outer ones
PLACES = [(0, 0), (0, 3), (1, 0), (1, 3), (2, 0), (2, 3)]


def rates(**changes):
    """lr(t, k) at PLACES, for 4 inner and 3 outer steps, over its peak.

    t and k are traced, as in a run.
    """
    config = config_of(TOY, inner_steps=4, lr=0.5, **changes)
    t, k = jnp.array(PLACES).T
    return np.asarray(jax.jit(gn.learning_rate)(t, k, config)) / 0.5


def test_schedules():
    """Appendix D: lr(t, k) of the four schedules. None is 0 at an inner step, the last included."""
    run = np.array([half_cosine((4 * t + k) / 12) for t, k in PLACES])
    inner = np.array([half_cosine(k / 4) for _, k in PLACES])
    expected = {
        "constant": np.ones(6),
        "constant+inner cosine": inner,
        "global cosine": run,
        "global+inner cosine": run * inner,
    }
    assert expected.keys() == gn.SCHEDULES.keys()
    for schedule, values in expected.items():
        np.testing.assert_allclose(rates(schedule=schedule), values, rtol=1e-5)
        assert min(values) > 0
    assert config_of(TOY).schedule == "constant+inner cosine"


def test_warm_up_fractions():
    """Linear rises over the run's first inner steps, or each outer step's; then the cosine."""
    steps = [4 * t + k for t, k in PLACES]
    rise = np.array([min(1, (s + 1) / 6) for s in steps])
    fall = np.array([half_cosine(max(0, (s - 6) / 6)) for s in steps])
    inner = [1 / 2, half_cosine(1 / 2)] * 3
    for found, expected in (
        (rates(schedule="constant", warmup=0.5), rise),
        (rates(schedule="global cosine", warmup=0.5), rise * fall),
        (rates(schedule="constant+inner cosine", inner_warmup=0.5), inner),
        (rates(schedule="constant", inner_warmup=0.5), [1 / 2, 1] * 3),
        (rates(schedule="constant", warmup=0.5, inner_warmup=0.5), rise * np.array([1 / 2, 1] * 3)),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_learning_rate_of_a_long_loop_is_less_by_default():
    """0.01 up to 122 inner steps, then 1/√ of their number, over all passes; or what is given."""
    for inner_steps, passes, lr in ((1, 1, 0.01), (122, 1, 0.01), (488, 1, 0.005), (244, 2, 0.005)):
        config = config_of(TOY, inner_steps=inner_steps, inner_epochs=passes)
        assert config.lr == lr
        assert dataclasses.replace(config, inner_steps=1).lr == lr
        assert config_of(TOY, inner_steps=inner_steps, lr=0.3).lr == 0.3


def test_with_more_passes_the_learning_rate_falls_over_all_of_them():
    """Two passes over two inner batches have the learning rates of one pass over four."""
    warm = {"warmup": 0.5, "inner_warmup": 0.5}
    for changes in ({"schedule": "global+inner cosine", **warm}, warm):
        config = config_of(TOY, inner_steps=2, inner_epochs=2, lr=0.5, **changes)
        lr = [float(gn.learning_rate(t, k, config)) / 0.5 for t, k in PLACES]
        np.testing.assert_allclose(lr, rates(**changes), rtol=1e-5)


def test_what_depends_on_the_length_of_the_run():
    """The same lr for 3 outer steps, for 30, and where no end is known: or the property says so."""
    cases = [{"schedule": schedule} for schedule in gn.SCHEDULES]
    cases += [{"warmup": 0.2}, {"inner_warmup": 0.2}]
    depends = []
    for changes in cases:

        def lr(outer_steps, changes=changes):
            config = config_of(TOY, outer_steps=outer_steps, **changes)
            return [float(gn.learning_rate(t, k, config)) for t, k in [(0, 0), (1, 1), (2, 1)]]

        config = config_of(TOY, **changes)
        depends.append(config.depends_on_length)
        assert (lr(3) == lr(30)) != config.depends_on_length
        assert config.depends_on_length or lr(3) == lr(recipe.NO_END)
    assert depends == [False, True, True, False, True, False]


def test_fault_3_no_inner_cycle_is_skipped_and_no_outer_step_has_lr_0():
    """global+inner cosine: every outer step begins at the global cosine and falls from there."""
    config = config_of(TOY, schedule="global+inner cosine", inner_steps=4, outer_steps=5, lr=1.0)
    lr = np.array([[gn.learning_rate(t, k, config) for k in range(4)] for t in range(5)])
    np.testing.assert_allclose(lr[:, 0], [half_cosine(t / 5) for t in range(5)], rtol=1e-5)
    assert (np.diff(lr, axis=1) < 0).all()
    assert lr.min() > 0


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -1.0},
        {"lr": math.nan},
        {"schedule": "cosin"},
        {"inner": "sgd"},
        {"damping": -1.0},
        {"clip": -1.0},
        {"weight_decay": -1.0},
        {"warmup": 1.0},
        {"inner_warmup": 1.0},
        {"momentum": 1.0},
        {"average": 1.0},
        {"parameter_weight_decay": -0.1},
        {"line_search": -1},
        {"line_search_tokens": -1},
        {"inner_epochs": 0},
        {"b2": 1.0},
    ],
)
def test_bad_settings_are_refused(bad):
    config_of(TOY).check()
    with pytest.raises(ValueError, match=next(iter(bad))):
        config_of(TOY, **bad).check()


# ---- 7. the program ------------------------------------------------------------------------------


def equations(jaxpr):
    """Every equation in a jaxpr, and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=has_equations):
            if has_equations(param):
                yield from equations(getattr(param, "jaxpr", param))


def has_equations(x):
    return hasattr(x, "eqns")


def sizes(jaxpr):
    """The number of elements of every array in a jaxpr."""
    return [math.prod(v.aval.shape) for eqn in equations(jaxpr) for v in eqn.outvars]


@pytest.mark.parametrize("what", ["inner step", "line search"])
def test_no_array_holds_the_logits_of_a_batch(what):
    """Nothing as large as [B, T, V] is ever made."""
    network = dataclasses.replace(TOY, vocab_size=10_000, head_chunk=2)
    params, tokens = random_params(network), random_tokens(network, 16)
    config = config_of(network)

    def compute(params):
        if what == "inner step":
            return gn.inner_step(gn.init(params, config), tokens, config)
        return loss_at(params, params, jnp.ones(()), tokens, config)

    largest = max(sizes(jax.make_jaxpr(compute)(params).jaxpr))
    head_and_its_change = 2 * TOY.d_model * 10_000
    assert largest <= head_and_its_change < 16 * TOY.context * 10_000 / 4


def test_stopped_inside_an_outer_step_it_resumes_bitwise(float64):
    """A State is all there is: from the one after any inner step, update ends at the same place."""
    config = hand_settings(gn.Config, inner_epochs=2)
    seen = []

    def watch(state):
        seen.append(copied(state))

    whole = gn.update(gn.init(random_params(ONE), config), *batches_and_fresh(ONE), config, watch)
    assert [int(state.k) for state in seen] == [1, 2, 3, 4]
    for state in seen:
        assert_same(gn.update(state, *batches_and_fresh(ONE), config), whole)


@pytest.mark.parametrize("restart", [False, True])
def test_a_step_takes_over_the_memory_of_its_state_and_of_nothing_else(float64, restart):
    """Donated: no array of the state before is left. The parameters are still the caller's."""
    config, params = hand_settings(gn.Config, restart=restart), random_params(ONE)
    batches, fresh = batches_and_fresh(ONE)
    state = gn.init(params, config)
    after = gn.inner_step(state, batches(0), config)
    assert all(a.is_deleted() for a in jax.tree.leaves(state))
    assert not any(a.is_deleted() for a in jax.tree.leaves(after))
    assert_same(params, random_params(ONE))
    moved, _ = gn.update(copied(after), batches, fresh, config)
    # Two arrays in one place could not be donated.
    for result in (gn.init(params, config), after, moved):
        pointers = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(result)]
        assert len(set(pointers)) == len(pointers)
    gn.update(after, batches, fresh, config)
    assert any(a.is_deleted() for a in jax.tree.leaves(after))  # as update's docstring says


@flags.traced
@dataclass(frozen=True)
class Bowl(gn.Config):
    """An objective that costs nothing to compile: its gradient is θ. The two losses are made up."""

    def value_and_grad(self, theta0, delta, tokens):
        theta = add(theta0, delta)
        return jnp.sum(theta0["head"]), jnp.sum(theta["head"]), theta


def few_params():
    """Parameters of which each kind occurs once: enough for an optimizer."""
    params = random_params(TOY)
    blocks = {"w_up": params["blocks"]["w_up"]}
    return params | {"blocks": blocks}


# Every setting that is a float, at two values, each of which matters to the steps below.
FLOATS = {
    "lr": (0.05, 0.02),
    "warmup": (0.5, 0.7),
    "inner_warmup": (0.6, 0.9),
    "momentum": (0.8, 0.5),
    "b2": (0.9, 0.5),
    "weight_decay": (0.3, 0.1),
    "damping": (0.1, 0.3),
    "parameter_weight_decay": (0.05, 0.1),
    "average": (0.5, 0.9),
    "clip": (0.2, 0.1),
}


def test_one_compiled_step_serves_every_float_of_the_settings():
    """Another value of any float traces, and so compiles, nothing again. Another schedule does."""
    assert FLOATS.keys() == {f.name for f in dataclasses.fields(gn.Config) if f.type is float}
    traces = []

    @flags.traced
    @dataclass(frozen=True)
    class Counted(Bowl):
        def value_and_grad(self, *args):
            traces.append(1)
            return super().value_and_grad(*args)

    def step(config):
        state = gn.init(few_params(), config)
        return gn.inner_step(state, random_tokens(TOY, 2), config)

    first = config_of(TOY, Counted, **{name: one for name, (one, _) in FLOATS.items()})
    second = config_of(TOY, Counted, **{name: other for name, (_, other) in FLOATS.items()})
    step(first)
    step(second)
    assert len(traces) == 1
    step(dataclasses.replace(first, schedule="constant"))
    assert len(traces) == 2


def test_a_traced_float_does_what_a_static_one_does(float64):
    """Each float as an argument of the compiled program, or as a constant of it: the same state.

    A state that another value would have changed too.
    """
    tokens = random_tokens(TOY, 2)

    def outer_step(config, inner_step, move):
        state = gn.init(few_params(), config)
        for _ in range(2):
            state = inner_step(state, tokens, config)
        return move(state, 0.7, config)

    plain = inspect.unwrap(gn.inner_step), inspect.unwrap(gn.move)  # their floats are Python's
    base = config_of(TOY, Bowl, **{name: one for name, (one, _) in FLOATS.items()})
    before = outer_step(base, gn.inner_step, gn.move)
    for name, (_, other) in FLOATS.items():
        config = dataclasses.replace(base, **{name: other})
        traced = outer_step(config, gn.inner_step, gn.move)
        close(traced, outer_step(config, *plain), 1e-9)
        assert np.abs(flat(traced) - flat(before)).max() > 1e-4, name


def test_fault_10_no_command_is_run_and_nothing_called_back_inside_a_compiled_step(monkeypatch):
    """Tracing a step starts no process, whose answer would be constant; no step calls the host."""
    for owner, name in (
        (subprocess, "Popen"),
        (os, "system"),
        (os, "popen"),
        (os, "posix_spawn"),
    ):
        monkeypatch.setattr(owner, name, None)
    config = config_of(TOY, outer_steps=77)  # a config of its own: nothing is traced yet
    tokens = random_tokens(TOY, 2)

    def outer_step(state):
        return gn.move(gn.inner_step(state, tokens, config), jnp.ones(()), config)

    jaxpr = jax.make_jaxpr(outer_step)(gn.init(random_params(TOY), config)).jaxpr
    names = {eqn.primitive.name for eqn in equations(jaxpr)}
    assert "dot_general" in names
    assert not [name for name in names if "callback" in name or "feed" in name]


def test_fault_11_a_step_is_compiled_once_and_does_not_grow_with_the_run():
    """The schedule is a function of t and k: a later step compiles nothing, a long run no more."""
    traces = []

    @flags.traced
    @dataclass(frozen=True)
    class Counted(Bowl):
        def value_and_grad(self, *args):
            traces.append(1)
            return super().value_and_grad(*args)

    config = config_of(TOY, Counted, schedule="global+inner cosine", line_search=0, average=0.0)
    state = gn.init(few_params(), config)
    for _ in range(3):
        state, _ = gn.update(state, *batches_and_fresh(TOY), config)
    assert len(traces) == 1

    def length(outer_steps):
        longer = dataclasses.replace(config, outer_steps=outer_steps)
        step = partial(gn.inner_step, tokens=random_tokens(TOY, 2), config=longer)
        start = gn.init(random_params(TOY), longer)
        return len(list(equations(jax.make_jaxpr(step)(start).jaxpr)))

    assert length(2) == length(20_000)
