"""GN-prox-linear takes the gradient of ℓ(z + J δ), where J and z are those of θ_t.

The same argument as in test_gn.py. The convex objective is written down with J in full, what
gn_prox.py computes is its value and gradient, and two outer steps by hand end where `update` ends.
One thing is new: the weights that are evaluated are an average over all inner steps.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOY, batches_and_fresh, copied, random_params, random_tokens
from jax.flatten_util import ravel_pytree
from test_gn import ONE, assert_update_is_by_hand, hand_settings, logits_and_jacobian
from trees import add, change_of, close, flat

import gn
import gn_prox
import optimizers

VALUE_AND_GRAD = jax.jit(gn_prox.Config.value_and_grad)


def config_of(network, **changes):
    return gn_prox.Config(**{"network": network, "inner_steps": 2, "outer_steps": 3} | changes)


@jax.jit
def explicit(z, J, y, d):
    """The mean of ℓ(z + J δ) over n tokens; z: [n, V], J: [n, V, P], y: [n], d: δ as [P]."""
    log_p = jax.nn.log_softmax(z + J @ d)
    return -jnp.mean(log_p[jnp.arange(len(y)), y])


def explicit_value_and_grad(network, theta0, delta, tokens):
    """The loss at θ_t, L1 at θ_t + δ, and its gradient, a tree."""
    z, J = logits_and_jacobian(network, theta0, tokens)
    y = tokens[:, 1:].reshape(-1)
    d, unravel = ravel_pytree(delta)
    loss = explicit(z, J, y, 0 * d)
    value, grad = jax.value_and_grad(explicit, argnums=3)(z, J, y, d)
    return loss, value, unravel(grad)


def test_gradient_is_that_of_the_explicit_convex_objective(float64):
    """ℓ(z + J δ) and its gradient in δ, for a small δ and a large one, to 1e-10."""
    params, tokens = random_params(TOY), random_tokens(TOY, 3)
    for scale in (1e-3, 0.3, 10):
        delta = change_of(params, scale)
        found = VALUE_AND_GRAD(config_of(TOY), params, delta, tokens)
        for a, b in zip(found, explicit_value_and_grad(TOY, params, delta, tokens), strict=True):
            close(a, b, 1e-10)


def test_gradient_meets_gauss_newtons_as_delta_shrinks(float64):
    """∇L1 - ∇L2 = O(|δ|²): a tenth of δ makes it a hundredth; at δ = 0 they are equal."""
    params, tokens, config = random_params(TOY), random_tokens(TOY, 3), config_of(TOY)
    full = jax.jit(gn.value_and_grad)
    differences = []
    for scale in (1e-2, 1e-3, 0.0):
        delta = change_of(params, scale)
        _, _, prox = VALUE_AND_GRAD(config, params, delta, tokens)
        _, _, quadratic = full(params, delta, tokens, config)
        differences.append(np.linalg.norm(flat(prox) - flat(quadratic)))
    large, small, none = differences
    assert 90 < large / small < 110
    assert none < 1e-15 < small


def test_update_is_algorithm_2_written_out(float64):
    """Two outer steps on the explicit objective, without a line search: same θ_2, losses and lr."""
    config = hand_settings(gn_prox.Config)
    assert_update_is_by_hand(gn_prox, config, partial(explicit_value_and_grad, ONE))


@pytest.mark.parametrize("restart", [False, True])
def test_what_is_evaluated_is_the_average_of_the_inner_iterates(float64, restart):
    """After n inner steps, of two outer ones: τⁿ θ_0 + (1 - τ) Σ τⁿ⁻ⁱ θ_i. A restart keeps it."""
    config = hand_settings(gn_prox.Config, average=0.7, restart=restart)
    batches, _ = batches_and_fresh(ONE)
    state = gn_prox.init(random_params(ONE), config)
    iterates = [copied(state.theta)]

    def watch(state):
        iterates.append(copied(state.theta))

    for _ in range(2):
        state, _ = gn_prox.update(state, batches, None, config, watch)
    n = len(iterates) - 1
    assert n == 4
    expected = jax.tree.map(lambda a: 0.7**n * a, iterates[0])
    for i in range(1, n + 1):
        expected = add(expected, iterates[i], 0.3 * 0.7 ** (n - i))
    close(optimizers.weights(state), expected, 1e-12)


def test_defaults_are_the_papers():
    """Section 6.2 and Appendix H: one fall over the run, no line search, and else no average."""
    config = config_of(TOY)
    assert config.schedule == "global cosine"
    assert (config.line_search, config.average, config.fresh_batches) == (0, 0.999, 0)
    searching = config_of(TOY, line_search=5)
    assert (searching.average, searching.fresh_batches) == (0.0, 2)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="damping is -1"):
        config_of(TOY, damping=-1.0).check()
