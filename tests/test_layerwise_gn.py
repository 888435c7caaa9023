"""Layerwise Gauss-Newton: the full matrices' diagonal blocks, one block a layer, each written down in full."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOY, VARIANTS, many, random_params, random_tokens
from jax.flatten_util import ravel_pytree
from test_gn import close, dense, equations, sizes

import gn
import layerwise_gn
import model

TWELVE = dataclasses.replace(TOY, vocab_size=6, context=3, d_model=4, d_ff=4, n_heads=2, n_kv_heads=2, n_layers=12)


def config_of(network, **changes):
    return layerwise_gn.Config(**{"model": network, "inner_steps": 2, "outer_steps": 3} | changes)


@partial(jax.jit, static_argnames="config")
def compiled(params, delta, tokens, config):
    objective = layerwise_gn.OBJECTIVES[config.objective]
    return gn.value_and_grad(objective, layerwise_gn.linearized, params, delta, tokens, config)


def value_and_grad(network, params, delta, tokens, **changes):
    """Of the layerwise objective: (loss, value), gradient [P]."""
    values, grad = compiled(params, delta, tokens, config_of(network, **changes))
    return values, ravel_pytree(grad)[0]


def layer_numbers(params):
    """[P]: the layer that each parameter is in by Section 6.3, written down by its name: 0 .. L + 1."""
    L = len(params["blocks"]["wq"])
    number = {"embedding": 0, "final_norm": L, "head": L + 1}
    of = lambda name, a: jnp.full_like(a, number[name])
    rows = lambda a: jnp.broadcast_to(jnp.arange(1.0, L + 1).reshape(-1, *[1] * (a.ndim - 1)), a.shape)
    blocks = {name: rows(a) for name, a in params["blocks"].items()}
    numbers = {name: blocks if name == "blocks" else of(name, a) for name, a in params.items()}
    return np.asarray(ravel_pytree(numbers)[0])


@pytest.mark.parametrize("network", [*VARIANTS.values(), TWELVE], ids=[*VARIANTS, "twelve layers"])
def test_gradient_is_g_plus_the_diagonal_blocks_of_G_times_delta(network, float64):
    """∇ = g + blockdiag(G) δ + λ δ and its value, to 1e-10, at twelve layers too: layer 1 is not 1, 10 and 11."""
    params, tokens = random_params(network), random_tokens(network, 3)
    loss, g, G = dense(network, params, tokens)
    number = layer_numbers(params)
    assert len(set(number)) == network.n_layers + 2
    blocks = np.where(number[:, None] == number[None], G, 0)
    flat, unravel = ravel_pytree(params)
    delta = np.random.default_rng(1).normal(size=flat.shape) * 0.3
    (at, value), grad = value_and_grad(network, params, unravel(delta), tokens, damping=0.1)
    close(grad, g + blocks @ delta + 0.1 * delta, 1e-10)
    close(value, loss + g @ delta + delta @ blocks @ delta / 2 + 0.05 * delta @ delta, 1e-10)
    close(at, loss, 1e-12)
    assert np.linalg.norm((G - blocks) @ delta) > 0.1 * np.linalg.norm(grad)  # else this could not tell it from GN


def test_fault_1_layer_1_does_not_take_layers_10_and_11_with_it(float64):
    """Layers are chosen by number, never by the beginning of a name: a layer's gradient moves with its own δ only.

    δ in block 1 of 12 leaves every other layer's gradient bitwise as it is at δ = 0, blocks 10 and 11 included.
    """
    params, tokens = random_params(TWELVE), random_tokens(TWELVE, 3)
    number, (flat, unravel) = layer_numbers(params), ravel_pytree(params)
    zero, full = np.zeros(flat.size), np.random.default_rng(1).normal(size=flat.shape)
    _, still = value_and_grad(TWELVE, params, unravel(zero), tokens, damping=0.1)
    for layer in (0, 1, 10, 12, 13):
        _, grad = value_and_grad(TWELVE, params, unravel(np.where(number == layer, full, 0)), tokens, damping=0.1)
        moved = {int(n) for n in number[np.asarray(abs(grad - still) > 1e-12)]}
        assert moved == {layer}


def test_split_is_a_partition_and_merge_its_inverse():
    """Every parameter below the head in exactly one layer, at twelve layers; merged they are what they were."""
    params = random_params(TWELVE)
    layers = layerwise_gn.split(params)
    assert len(layers) == 13 and [len(p) for p in layers] == [1] + 11 * [12] + [13]
    assert sum(a.size for a in jax.tree.leaves(layers)) + params["head"].size == model.size(TWELVE)
    merged = layerwise_gn.merge(layers)
    jax.tree.map(np.testing.assert_array_equal, merged, {k: a for k, a in params.items() if k != "head"})


def test_one_stack_of_streams_and_no_logits_of_a_batch():
    """No array is larger than the stack [L + 1, B, T, D]: no stream's logits, no second axis of layers."""
    network = dataclasses.replace(TWELVE, vocab_size=500, context=16, d_ff=8, head_chunk=4)
    params, tokens = random_params(network), random_tokens(network, 32)
    state = layerwise_gn.init(params, config_of(network))
    step = lambda s: gn.inner_step(s, tokens, config_of(network), gn.quadratic, layerwise_gn.linearized)
    stack = 13 * 32 * 16 * network.d_model
    assert max(sizes(jax.make_jaxpr(step)(state).jaxpr)) <= stack < 32 * 16 * network.vocab_size / 5


def trips(jaxpr):
    """How often each loop in a jaxpr runs."""
    return [eqn.params["length"] for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]


def test_work_is_one_forward_and_what_lies_above_each_layer():
    """Products a weight, a stream: 1 forward for all, 2 + 2 for the layer's own, 1 + 1 for each that passes it.

    By the compiler's count of operations, in which a loop's body counts once: 7 where Gauss-Newton has 5. (8 would be a
    second forward pass.) And the loops of block l run over the l streams from below, there and back.
    """
    network = dataclasses.replace(TOY, n_layers=6, d_model=128, d_ff=512, n_heads=1, n_kv_heads=1, context=2)
    params, tokens = random_params(network), random_tokens(network, 64)
    network = dataclasses.replace(network, head_chunk=128)
    step = lambda f: jax.jit(lambda p, d, t: gn.value_and_grad(gn.quadratic, f, p, d, t, config_of(network)))
    ours, full = (step(f).lower(params, params, tokens) for f in (layerwise_gn.linearized, gn.linearized))
    flops = [lowered.compile().cost_analysis()["flops"] for lowered in (ours, full)]
    assert 1.3 < flops[0] / flops[1] < 1.5
    jaxpr = jax.make_jaxpr(step(layerwise_gn.linearized))(params, params, tokens).jaxpr
    head = [1, 7, 1]  # 1 chunk of tokens; its 7 streams, and the head's own
    assert sorted(trips(jaxpr)) == sorted(head + 2 * [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("objective", ["quadratic", "exact"])
def test_update_searches_ten_step_sizes_along_the_merged_step(float64, objective):
    """θ_{t+1} = θ_t + α (θ - θ_t), α the best of 2^(-i/2), i < 10, on all fresh batches."""
    params, (batches, fresh) = random_params(TOY), many(TOY)
    config = config_of(TOY, lr=1.0, objective=objective)
    state, metrics = layerwise_gn.update(layerwise_gn.init(params, config), batches, fresh, config)
    at = lambda a: sum(model.loss(TOY, gn.move(params, state.theta, a), fresh(k)) for k in range(2))
    losses = [float(at(2 ** (-i / 2))) for i in range(10)]
    assert math.isclose(metrics["alpha"], 2 ** (-np.argmin(losses) / 2)) and np.argmin(losses) > 4
    close(state.params, gn.move(params, state.theta, metrics["alpha"]), 1e-12)


def test_cg_solves_with_the_diagonal_blocks(float64):
    """--inner cg: δ = -(blockdiag(G) + λI)⁻¹ g, against a dense solve; refused where the objective is not quadratic."""
    params, (batches, _) = random_params(TOY), many(TOY)
    config = config_of(TOY, inner="cg", cg_steps=3000, damping=0.1, line_search=0)
    state, _ = layerwise_gn.update(layerwise_gn.init(params, config), batches, None, config)
    _, g, G = dense(TOY, params, np.concatenate([batches(0), batches(1)]))
    number = layer_numbers(params)
    blocks = np.where(number[:, None] == number[None], G, 0)
    expected = -np.linalg.solve(blocks + 0.1 * np.eye(len(g)), g)
    close(ravel_pytree(state.params)[0] - ravel_pytree(params)[0], expected, 1e-6)
    with pytest.raises(ValueError, match="solves quadratic problems"):
        config_of(TOY, inner="cg", objective="exact")


def test_bad_objective_is_refused():
    with pytest.raises(ValueError, match="objective is 'cubic'; valid: quadratic, exact"):
        config_of(TOY, objective="cubic")
