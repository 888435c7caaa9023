"""GN-prox-linear: the gradient of the explicit convex objective, and how it differs from Gauss-Newton's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOY, kept, logits, many, random_params, random_tokens
from jax.flatten_util import ravel_pytree
from test_gn import close

import baselines
import gn
import gn_prox


def config_of(network, **changes):
    return gn_prox.Config(**{"model": network, "inner_steps": 2, "outer_steps": 3} | changes)


@partial(jax.jit, static_argnames=("objective", "config"))
def value_and_grad(objective, params, delta, tokens, config):
    return gn.value_and_grad(objective, gn.linearized, params, delta, tokens, config)


def random_delta(params, scale, seed=1):
    flat, unravel = ravel_pytree(params)
    return unravel(scale * np.random.default_rng(seed).normal(size=flat.shape))


def explicit(network, params, tokens, delta, damping):
    """ℓ(z + Jδ) + ½ λ|δ|², J written down in full by forward-mode differentiation of the plain model."""
    flat, unravel = ravel_pytree(params)
    f = lambda flat: logits(network, unravel(flat), tokens).reshape(-1, network.vocab_size)  # [n, V]
    z, J = jax.jit(lambda flat: (f(flat), jax.jacfwd(f)(flat)))(flat)
    p = jax.nn.log_softmax(z + J @ delta)
    return -jnp.mean(p[jnp.arange(len(z)), tokens[:, 1:].reshape(-1)]) + damping / 2 * delta @ delta


def test_gradient_is_that_of_the_explicit_convex_objective(toy, float64):
    """Value and gradient at θ_t + δ, δ of any size, to 1e-10, damping included."""
    params, tokens = random_params(toy), random_tokens(toy, 3)
    delta = random_delta(params, 0.3)
    flat = ravel_pytree(delta)[0]
    (_, value), grad = value_and_grad(gn_prox.exact, params, delta, tokens, config_of(toy, damping=0.1))
    expected = jax.jit(jax.value_and_grad(lambda d: explicit(toy, params, tokens, d, 0.1)))(flat)
    close((value, ravel_pytree(grad)[0]), expected, 1e-10)


def test_gradient_meets_gauss_newtons_as_delta_shrinks(float64):
    """∇L1 - ∇L2 = O(|δ|²): a tenth of δ makes it a hundredth; at δ = 0 they are equal."""
    params, tokens, config = random_params(TOY), random_tokens(TOY, 3), config_of(TOY)
    both = []
    for scale in (1e-2, 1e-3, 0.0):
        delta = random_delta(params, scale)
        one, two = (value_and_grad(f, params, delta, tokens, config)[1] for f in (gn_prox.exact, gn.quadratic))
        both.append(np.linalg.norm(ravel_pytree(one)[0] - ravel_pytree(two)[0]))
    assert 90 < both[0] / both[1] < 110 and both[2] < 1e-15 < both[1]


def test_update_takes_the_whole_step_and_averages_the_inner_iterates(float64):
    """Algorithm 2 with its defaults: no line search, θ_{t+1} = θ, and the average over inner steps is evaluated.

    Closed form: τⁿ θ_0 + (1 - τ) Σ τⁿ⁻ⁱ θ_i over all n inner steps of two outer ones.
    """
    config, iterates = config_of(TOY, average=0.7), []
    assert config_of(TOY).average == 0.999 and config_of(TOY).schedule == "global cosine"
    state = gn_prox.init(random_params(TOY), config)
    iterates.append(kept(state.theta))
    for _ in range(2):
        state, metrics = gn_prox.update(state, many(TOY)[0], None, config, lambda s: iterates.append(kept(s.theta)))
        assert metrics["alpha"] is None
        close(state.params, state.theta, 1e-15)
    closed = lambda *a: 0.7**4 * a[0] + 0.3 * sum(0.7 ** (4 - i) * a[i] for i in range(1, 5))
    close(baselines.weights(state), jax.tree.map(closed, *iterates), 1e-12)
    assert len(iterates) == 5


def test_update_descends_the_exact_objective(float64):
    """The inner loss that is logged is L1 of the inner batches at the iterates, and falls on a batch that repeats."""
    batch, config = random_tokens(TOY, 8), config_of(TOY, inner_steps=60, lr=0.03, weight_decay=0.0)
    params = random_params(TOY)
    state, metrics = gn_prox.update(gn_prox.init(params, config), lambda k: batch, None, config)
    delta = jax.tree.map(jnp.subtract, state.theta, params)
    (loss, value), _ = value_and_grad(gn_prox.exact, params, delta, batch, config)
    assert value < metrics["inner_loss"] < loss and abs(metrics["train_loss"] - loss) < 1e-12


def test_line_search_comes_by_flag_without_the_average():
    """Appendix H: a run with a line search averages no weights, unless told to. No cg: nothing is quadratic."""
    config = config_of(TOY, line_search=5)
    assert config.average == 0.0 and config.fresh_batches == 2
    state, metrics = gn_prox.update(gn_prox.init(random_params(TOY), config), *many(TOY), config)
    assert metrics["alpha"] is not None and baselines.weights(state) is state.params
    with pytest.raises(ValueError, match="valid with this objective: muon, adamw"):
        config_of(TOY, inner="cg")
