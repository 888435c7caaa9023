"""Layerwise Gauss-Newton takes the gradient g + blockdiag(G) δ, one block a layer.

The same argument as in test_gn.py. The dense G loses its blocks between layers, which are found
here by name; what layerwise_gn.py computes is compared with that, at twelve layers too.
"""

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOY, random_params, random_tokens
from test_gn import (
    ONE,
    assert_update_is_by_hand,
    dense,
    equations,
    hand_settings,
    quadratic_model,
    sizes,
)
from trees import change_of, close, flat

import gn
import gn_prox
import layerwise_gn
import model

TWELVE = model.Config(
    vocab_size=6,
    context=3,
    d_model=4,
    d_ff=4,
    n_layers=12,
    n_heads=2,
    n_kv_heads=1,
    mlp="swiglu",
    qk_norm=False,
    head_chunk=4,
)
VALUE_AND_GRAD = jax.jit(layerwise_gn.value_and_grad)


def config_of(network, **changes):
    sizes = {"network": network, "inner_steps": 2, "outer_steps": 3}
    return layerwise_gn.Config(**sizes | changes)


def layer_of_each_parameter(params):
    """[P]: the number of the layer, 0 to L + 1, that each parameter is in by Section 6.3."""
    L = len(params["blocks"]["wq"])

    def number_rows(a):
        rows = jnp.arange(1.0, L + 1).reshape(L, *[1] * (a.ndim - 1))
        return jnp.broadcast_to(rows, a.shape)

    numbers = {
        "embedding": jnp.full_like(params["embedding"], 0),
        "blocks": jax.tree.map(number_rows, params["blocks"]),
        "final_norm": jnp.full_like(params["final_norm"], L),
        "head": jnp.full_like(params["head"], L + 1),
    }
    return flat(numbers)


def diagonal_blocks(G, params):
    """G without the blocks that tie one layer to another."""
    number = layer_of_each_parameter(params)
    return np.where(number[:, None] == number[None], G, 0)


# ---- the gradient --------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [TOY, TWELVE], ids=["two layers", "twelve layers"])
def test_gradient_is_g_plus_the_diagonal_blocks_of_G_times_delta(network, float64):
    """∇ = g + blockdiag(G) δ and its value, to 1e-10."""
    params, tokens = random_params(network), random_tokens(network, 3)
    true = dense(network, params, tokens)
    blocks = diagonal_blocks(true.G, params)
    delta = change_of(params)
    d = flat(delta)
    loss, value, grad = VALUE_AND_GRAD(params, delta, tokens, config_of(network))
    close(grad, true.g + blocks @ d, 1e-10)
    close(value, true.loss + true.g @ d + d @ blocks @ d / 2, 1e-10)
    close(loss, true.loss, 1e-12)
    # else this could not tell it from full Gauss-Newton
    assert np.linalg.norm((true.G - blocks) @ d) > 0.1 * np.linalg.norm(flat(grad))


def test_fault_1_layer_1_does_not_take_layers_10_and_11_with_it(float64):
    """A layer's gradient moves with its own δ only: layers are not chosen by the start of a name.

    δ in one layer alone leaves the gradients of all other layers as they are at δ = 0.
    """
    params, tokens = random_params(TWELVE), random_tokens(TWELVE, 3)
    number = layer_of_each_parameter(params)
    assert set(number) == set(range(14))
    _, unravel = jax.flatten_util.ravel_pytree(params)
    change = flat(change_of(params))

    def gradient(d):
        return flat(VALUE_AND_GRAD(params, unravel(d), tokens, config_of(TWELVE))[2])

    still = gradient(np.zeros_like(change))
    for layer in (0, 1, 10, 12, 13):
        moved = gradient(np.where(number == layer, change, 0))
        assert set(number[np.abs(moved - still) > 1e-12]) == {layer}


# ---- the outer step ------------------------------------------------------------------------------


def layer_norms(grad):
    """|gradient| of each of the L + 2 layers."""
    number = layer_of_each_parameter(grad)
    g = flat(grad)
    return np.array([np.linalg.norm(g[number == layer]) for layer in range(int(number.max()) + 1)])


def clipped_by_hand(grad, limit):
    """The gradient, each layer scaled down to the norm `limit`; a limit of 0 clips nothing."""
    factors = np.minimum(1, (limit or np.inf) / layer_norms(grad))
    number = layer_of_each_parameter(grad).astype(int)
    vector, unravel = jax.flatten_util.ravel_pytree(grad)
    return unravel(vector * factors[number])


def test_update_is_the_outer_step_written_out_with_the_diagonal_blocks(float64):
    """Two outer steps with g + blockdiag(G) δ, and a search of ten step sizes."""
    config = hand_settings(layerwise_gn.Config)
    assert config.line_search == 10

    def value_and_grad(theta0, delta, tokens):
        true = dense(ONE, theta0, tokens)
        blocks = diagonal_blocks(true.G, theta0)
        return quadratic_model(true._replace(G=blocks), delta)

    clipped = partial(clipped_by_hand, limit=config.clip)
    assert_update_is_by_hand(layerwise_gn, config, value_and_grad, clipped)


@pytest.mark.parametrize("limit", [0.0, 0.7, 1e9])
@pytest.mark.parametrize("network", [TOY, TWELVE], ids=["two layers", "twelve layers"])
def test_each_layers_gradient_is_clipped_by_its_own_norm(network, limit, float64):
    """Layer by layer as `layer_of_each_parameter` says. A limit of 0 clips nothing."""
    grad = change_of(random_params(network), 0.1)
    grad["blocks"] = jax.tree.map(lambda a: a.at[-1].multiply(0.01), grad["blocks"])
    clip = layerwise_gn.clip_layers(limit)
    clipped, _ = clip.update(grad, clip.init(grad))
    norms = layer_norms(grad)
    assert norms.min() < 0.7 < norms.max()  # one of the limits clips some of them
    close(clipped, clipped_by_hand(grad, limit), 1e-12)


@pytest.mark.parametrize("inner", ["muon", "adamw"])
def test_the_inner_optimizer_is_gauss_newtons_after_the_clip_of_layers(inner, float64):
    """It sees the clipped gradient, and clips no more by itself."""
    params = random_params(ONE)
    grad = change_of(params)
    config = hand_settings(layerwise_gn.Config, inner=inner)
    assert config.clip == 0.2 < layer_norms(grad).min()
    clip = layerwise_gn.clip_layers(0.2)
    clipped, _ = clip.update(grad, clip.init(grad))
    plain = hand_settings(gn.Config, inner=inner, clip=0.0).optimizer(0.05)
    expected, _ = plain.update(clipped, plain.init(params), params)
    rule = config.optimizer(0.05)
    found, _ = rule.update(grad, rule.init(params), params)
    close(found, expected, 1e-12)


def test_the_objective_is_the_one_that_the_settings_name(float64):
    """ "quadratic", the default, is that of gn.py; "exact" is that of gn_prox.py."""
    params, tokens = random_params(ONE), random_tokens(ONE, 2)
    delta = change_of(params)
    gradients = []
    for name, objective in (("quadratic", gn.quadratic), ("exact", gn_prox.exact)):
        found = VALUE_AND_GRAD(params, delta, tokens, config_of(ONE, objective=name))
        with_it = jax.jit(partial(layerwise_gn.value_and_grad, objective=objective))
        close(found, with_it(params, delta, tokens, config_of(ONE)), 1e-12)
        gradients.append(flat(found[2]))
    quadratic, exact = gradients
    assert np.linalg.norm(quadratic - exact) > 1e-3 * np.linalg.norm(exact)
    close(VALUE_AND_GRAD(params, delta, tokens, config_of(ONE))[2], quadratic, 1e-12)


def test_bad_objective_is_refused():
    config_of(TOY).check()
    with pytest.raises(ValueError, match="objective is 'cubic'; valid: quadratic, exact"):
        config_of(TOY, objective="cubic").check()


def test_a_network_of_ones_own_is_refused():
    """As its layers are not known."""
    with pytest.raises(ValueError, match="knows the layers of model.py only"):
        config_of(TOY, model=SimpleNamespace())


# ---- what it costs -------------------------------------------------------------------------------


def test_one_stack_of_streams_and_no_logits_of_a_batch():
    """No array is larger than the stack [L + 1, B, T, D]: no logits, no second such axis."""
    network = dataclasses.replace(TWELVE, vocab_size=500, context=16, d_ff=8)
    config = config_of(network)
    tokens = random_tokens(network, 32)

    def step(state):
        return gn.inner_step(state, tokens, config)

    state = layerwise_gn.init(random_params(network), config)
    stack = 13 * 32 * 16 * network.d_model
    assert max(sizes(jax.make_jaxpr(step)(state).jaxpr)) <= stack < 32 * 16 * 500 / 5


def trips(jaxpr):
    """How often each loop in a jaxpr runs."""
    return [eqn.params["length"] for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]


def test_work_is_one_forward_and_what_lies_above_each_layer():
    """A weight's products: 1 for all streams, 2 + 2 for the layer's own, 1 + 1 for one that passes.

    By the compiler's count of operations, in which a loop's body counts once: 7 where Gauss-Newton
    has 5. (8 would be a second forward pass.) The loops of block l run over the streams from below.
    """
    sizes = {"n_layers": 3, "d_model": 128, "d_ff": 512, "n_heads": 1, "n_kv_heads": 1}
    network = dataclasses.replace(TOY, context=2, head_chunk=128, **sizes)
    params, tokens = random_params(network), random_tokens(network, 64)

    def operations(value_and_grad):
        program = jax.jit(value_and_grad).lower(params, params, tokens, config_of(network))
        return program.cost_analysis()["flops"]

    full = operations(gn.value_and_grad)
    assert 1.3 < operations(layerwise_gn.value_and_grad) / full < 1.5

    trace = jax.make_jaxpr(layerwise_gn.value_and_grad)
    jaxpr = trace(params, params, tokens, config_of(network)).jaxpr
    chunks_of_the_head = [1]
    assert sorted(trips(jaxpr)) == sorted(chunks_of_the_head + 2 * [1, 2, 3])
