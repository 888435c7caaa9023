"""Layerwise Gauss-Newton (Section 6.3): each layer is linearized alone.

    L2(θ_t + δ) = ℓ(z) + Σ_l (g·v_l + ½ v_l·H v_l),     v_l = J_l δ_l,   J_l: layer l's columns of J
    ∇_l L2 = J_lᵀ(g + H v_l);     all layers together:  ∇L2 = ∇L(θ_t) + blockdiag(G) δ

So G loses the blocks that tie one layer to another. The layers are the embedding, each block (the
last one with the final norm), and the head.

Full Gauss-Newton pushes one change up through the network. Here each layer's change δ_l makes a
stream of its own: it starts at layer l, passes all layers above, and meets the loss alone; its
cotangent passes back down to layer l and ends there. All streams share one forward pass. A layer
multiplies by its weights once for a stream that only passes, and twice for its own, each way. With
12 blocks that costs as much as 4.1 gradients of gn.py; running each layer separately would cost 14.

All the rest is gn.py. Muon and Adam treat each array by itself, so one inner iterate and one optimizer
serve all layers. Only clipping looks across them, by the norm of an optimizer group.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

import gn
import gn_prox
import model
from gn import init  # noqa: F401  the same State
from model import product, rounded
from runtime.flags import check_choice, traced

OBJECTIVES = {"quadratic": gn.quadratic, "exact": gn_prox.exact}


@traced
@dataclass(frozen=True)
class Config(gn.Config):
    """Settings of layerwise Gauss-Newton: those of Gauss-Newton, and the objective of a layer."""

    line_search: int = 10  # step sizes α = 2^(-i/2) tried on fresh tokens (Appendix D); 0 = α is 1
    # quadratic | exact: each layer's loss is expanded as in gn.py (Section 6.3), or as in gn_prox.py
    objective: str = "quadratic"

    def check(self):
        super().check()
        check_choice(self, "objective", OBJECTIVES)


# ---- the layers below the head -------------------------------------------------------------------


def split(params):
    """The parameters below the head as a list of layers, the lowest first."""
    layers = [{"embedding": params["embedding"]}, *model.unstack(params["blocks"])]
    layers[-1]["final_norm"] = params["final_norm"]
    return layers


def merge(layers):
    """The parameters below the head from a list of layers: the inverse of `split`."""
    embedding, *blocks = layers
    stacked = {}
    for name in blocks[0]:
        if name != "final_norm":
            stacked[name] = jnp.stack([p[name] for p in blocks])
    return {**embedding, "blocks": stacked, "final_norm": blocks[-1]["final_norm"]}


def layer(network, p, h):
    """One layer with parameters p: int32 ids [B, T] or [B, T, D] -> [B, T, D]."""
    if "embedding" in p:
        return p["embedding"][h]
    weights = {name: a for name, a in p.items() if name != "final_norm"}
    h = model.block(network, weights, h)
    if "final_norm" in p:
        h = model.rms_norm(h, p["final_norm"])
    return h


def pullbacks(network, p, h):
    """The layer's output at its input h, and its two pullbacks: to its parameters, to its input."""
    out, pull = jax.vjp(partial(layer, network), p, h)

    def to_params(u):
        return pull(u)[0]

    def to_input(u):
        return pull(u)[1]

    return out, to_params, to_input


def transpose(f, like):
    """The transpose of a linear function of arrays such as `like`."""

    def transposed(u):
        (result,) = jax.linear_transpose(f, like)(u)
        return result

    return transposed


def through(f, streams, n):
    """The stack of streams with f of each of the first n in its place."""

    def replace_one(i, streams):
        return streams.at[i].set(f(streams[i]))

    return jax.lax.fori_loop(0, n, replace_one, streams)


# ---- the objective -------------------------------------------------------------------------------


def value_and_grad(theta0, delta, tokens, config, objective=None):
    """The loss at θ_t, the sum of the layers' objectives at θ_t + δ, and its gradient.

    tokens: int32 [B, T+1]; objective: by default what config.objective names. The second number is
    the loss at θ_t plus what each layer's objective adds to it. All are means over tokens.
    """
    network = config.network
    objective = objective or OBJECTIVES[config.objective]
    x, y = model.inputs_and_labels(tokens)

    h, streams, pulls = up(network, theta0, delta, x)
    h_bar, (loss, value, head_grad) = across(network, objective, theta0, delta, h, streams, y)
    grad = down(pulls, h_bar) | head_grad
    return jax.tree.map(lambda total: total / y.size, (loss, value, grad))


def up(network, theta0, delta, x):
    """What the head reads, [B, T, D], its change with each layer's δ_l, and the layers' pullbacks.

    The changes are one stack of streams, [L+1, B, T, D]. The transpose of a pullback is a pushforward,
    since (Jᵀ)ᵀ = J: so one `jax.vjp` of a layer gives all four linear maps that are needed of it.
    """
    h = x
    pulls = []
    for l, (p, dp) in enumerate(zip(split(theta0), split(delta), strict=True)):
        h_below = h
        h, to_params, to_input = pullbacks(network, p, h_below)
        if l == 0:
            streams = jnp.zeros((network.n_layers + 1, *h.shape), h.dtype)
        else:
            streams = through(transpose(to_input, h), streams, l)
        own = transpose(to_params, h)
        streams = streams.at[l].set(own(dp))
        pulls.append((to_params, to_input))
    return h, streams, pulls


def across(network, objective, theta0, delta, h, streams, y):
    """The cotangents of the streams, [L+1, B, T, D]; loss, value and the head's gradient, as sums.

    The head is the last layer: its own stream starts and ends here.
    """
    w = rounded(network, theta0["head"])
    dw = rounded(network, delta["head"])
    objective_of_each = jax.vmap(objective, in_axes=(None, 0, None))

    def of_chunk(h, streams, y):
        streams = jnp.swapaxes(streams, 0, 1)  # [L+1, c, D]
        z = model.head(network, h, w)
        losses, values, u = objective_of_each(z, product(network, streams, w), y)
        loss, head_value, head_u = objective(z, product(network, h, dw), y)
        value = loss + jnp.sum(values - losses) + (head_value - loss)
        h_bar = product(network, u, w.T, h.dtype)
        head_grad = product(network, h.T, head_u, h.dtype)
        return jnp.swapaxes(h_bar, 0, 1), (loss, value, {"head": head_grad})

    streams = jnp.moveaxis(streams, 0, 2)  # [B, T, L+1, D]
    h_bar, sums = model.over_tokens(network, of_chunk, h, streams, y)
    return jnp.moveaxis(h_bar, 2, 0), sums


def down(pulls, streams):
    """The gradient below the head: each stream of cotangents is pulled back to its own layer."""
    grads = [None] * len(pulls)
    for l, (to_params, to_input) in reversed(list(enumerate(pulls))):
        grads[l] = to_params(streams[l])  # a stream ends where it began
        if l > 0:
            streams = through(to_input, streams, l)
    return merge(grads)


def update(state, batches, fresh, config, watch=lambda state: None):
    """One outer step; arguments and results as gn.update's, inner_loss being the sum over layers."""
    return gn.update(state, batches, fresh, config, watch, value_and_grad)
