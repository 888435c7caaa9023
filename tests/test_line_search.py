"""The line search takes the step size with the smallest true loss on fresh tokens.

What it measures is compared with the loss of the plain network at each point of the line. The guard
refuses a step that helps nowhere, or is not finite.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOY, assert_same, many, random_params
from test_gn import GRID, LOSS, LOSS_GRAD, add, close, config_of, losses_by_hand

from line_search import between, line_search


def test_between_is_the_line_from_theta_t_to_theta(float64):
    """θ_t + α (θ - θ_t); θ_t itself at α = 0, even where θ is not a number."""
    a, b = random_params(TOY), random_params(TOY, 1)
    expected = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, a, b)
    close(between(a, b, 0.25), expected, 1e-12)
    nowhere = jax.tree.map(lambda b: b * jnp.nan, b)
    assert_same(between(a, nowhere, 0.0), a)


def test_line_search_takes_the_best_of_its_grid_over_all_fresh_batches(float64):
    """α is the argmin over 2^(-i/2) of the mean loss, for steps of every length."""
    params, (_, fresh) = random_params(TOY), many(TOY)
    config = config_of(TOY, guard=False)
    grad = LOSS_GRAD(TOY, params, fresh(0))  # helps the first fresh batch more than the second
    found = set()
    misled = set()  # the fresh batches that alone would have chosen another α
    for length in (0.2, 0.8, 1.3, 1.6, 2.0, 2.5, 4.0):
        theta = add(params, grad, -length)
        losses = losses_by_hand(params, theta, fresh)
        best = int(np.argmin(losses.sum(axis=0)))
        alpha, measured = line_search(params, theta, fresh, config)
        assert math.isclose(alpha, GRID[best])
        names = ["loss_at_1", "loss_at_0.7071", "loss_at_0.5", "loss_at_0.3536", "loss_at_0.25"]
        assert list(measured) == names
        close(list(measured.values()), losses.mean(axis=0), 1e-12)
        found.add(best)
        misled |= {k for k in range(2) if np.argmin(losses[k]) != best}
    assert len(found) > 2  # else the lengths would not test the choice
    assert misled == {0, 1}  # nor that it is made over all batches


def test_a_line_search_may_read_less_than_a_batch(float64):
    """line_search_tokens: about so many, at least one inner batch. 0: as many as the batch has."""

    def make(tokens, **more):
        sizes = {"inner_steps": 8, "inner_tokens": 10, "line_search_tokens": tokens}
        return config_of(TOY, **sizes, **more)

    assert [make(n).fresh_batches for n in (0, 1, 14, 16, 80, 200)] == [8, 1, 1, 2, 8, 20]
    assert make(16, line_search=0).fresh_batches == 0
    with pytest.raises(ValueError, match="line_search_tokens needs inner_tokens"):
        _ = config_of(TOY, line_search_tokens=100).fresh_batches

    params, (_, fresh) = random_params(TOY), many(TOY)
    theta = add(params, LOSS_GRAD(TOY, params, fresh(0)), -1.6)
    read = []

    def noted(k):
        read.append(k)
        return fresh(k)

    alpha, _ = line_search(params, theta, noted, make(20, guard=False))
    assert read == [0, 1]
    best = np.argmin(losses_by_hand(params, theta, fresh).sum(axis=0))
    assert math.isclose(alpha, GRID[best])


def test_guard_refuses_a_step_that_does_not_lower_the_loss(float64):
    """Uphill, no better, or with weights that are not finite: α = 0. Without the guard it moves."""
    params, (_, fresh) = random_params(TOY), many(TOY)

    at_theta_t = (LOSS(TOY, params, fresh(0)) + LOSS(TOY, params, fresh(1))) / 2

    def search(theta, **changes):
        alpha, measured = line_search(params, theta, fresh, config_of(TOY, **changes))
        if "loss_at_0" in measured:
            close(measured["loss_at_0"], at_theta_t, 1e-12)
        return float(alpha)

    uphill = params
    for k in range(2):
        uphill = add(uphill, LOSS_GRAD(TOY, params, fresh(k)))
    nowhere = jax.tree.map(lambda a: a * jnp.nan, params)
    infinite = params | {"head": params["head"].at[0, 0].set(jnp.inf)}
    overflows = params | {"head": 1e308 * params["head"]}
    assert np.isnan(LOSS(TOY, overflows, fresh(0)))
    for theta in (uphill, nowhere, infinite, overflows, params):
        assert search(theta) == 0
    assert search(uphill, guard=False) == 0.25


def test_guard_refuses_infinite_weights_that_the_fresh_tokens_do_not_read(float64):
    """An infinite embedding of an id that does not occur leaves the loss finite; still α = 0."""
    params, (_, fresh) = random_params(TOY), many(TOY)

    def without_10(k):
        return fresh(k) % 10

    downhill = add(params, LOSS_GRAD(TOY, params, without_10(0)), -0.1)
    infinite = downhill | {"embedding": downhill["embedding"].at[10, 0].set(jnp.inf)}
    assert np.isfinite(LOSS(TOY, infinite, without_10(0)))
    alpha, _ = line_search(params, downhill, without_10, config_of(TOY))
    assert alpha > 0
    alpha, _ = line_search(params, infinite, without_10, config_of(TOY))
    assert alpha == 0


def test_other_step_sizes_may_be_tried(float64):
    """alphas: in the order given, the first of equals counts, and the guard goes before them."""
    params, (_, fresh) = random_params(TOY), many(TOY)
    theta = add(params, LOSS_GRAD(TOY, params, fresh(0)), -0.5)
    config = config_of(TOY, alphas="3 0.05  1.5")
    assert (config.line_search, config.fresh_batches, config.average) == (3, 2, 0.0)
    alpha, measured = line_search(params, theta, fresh, config)
    assert list(measured) == ["loss_at_0", "loss_at_3", "loss_at_0.05", "loss_at_1.5"]
    losses = losses_by_hand(params, theta, fresh, [0.0, 3.0, 0.05, 1.5]).mean(axis=0)
    close(list(measured.values()), losses, 1e-12)
    assert alpha == [0.0, 3.0, 0.05, 1.5][int(np.argmin(losses))] > 0
    alpha, _ = line_search(params, params, fresh, config_of(TOY, alphas="2 1", guard=False))
    assert alpha == 2


@pytest.mark.parametrize(
    "alphas", [" ", "1 half", "1;0.5", "1 0", "-1", "1 nan", "inf", "0.5 0.50001"]
)
def test_bad_step_sizes_are_refused(alphas):
    config_of(TOY, alphas="1 0.5 0.25").check()
    with pytest.raises(ValueError, match="^alphas is '.*'; .*$"):
        config_of(TOY, alphas=alphas).check()
