"""Layerwise Gauss-Newton (Section 6.3): each layer is linearized alone, so G loses its blocks between layers.

    L2(θ_t + δ) = ℓ(z) + Σ_l (g·v_l + ½ v_l·H v_l),     v_l = J_l δ_l,    J_l: the columns of J of layer l
    ∇_l L2 = J_lᵀ(g + H v_l),     all together:     ∇L2 = ∇L(θ_t) + blockdiag(G) δ

The layers are the embedding, each block (the final norm with the last), and the head. They share one forward pass.
The change that δ_l makes is a stream of its own: it starts at layer l and is pushed up to the logits, and its cotangent
is pulled back as far as layer l, no further. A stream costs a layer that it only passes one product a weight and token
each way; the layer's own costs two. For the paper's 12 blocks that comes to 4.1 gradients of gn.py, where 14 products
with the whole model would be 14.

All the rest is gn.py. Muon and Adam treat each array for itself, so one inner iterate and one optimizer serve all
layers; only clipping, which is by the norm of an optimizer group, looks across them.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

import gn
import model
from gn import init  # noqa: F401  the same State
from gn_prox import exact
from model import product, rounded

OBJECTIVES = {"quadratic": gn.quadratic, "exact": exact}


@dataclass(frozen=True)
class Config(gn.Config):
    """Settings of layerwise Gauss-Newton: those of Gauss-Newton, and the objective of a layer."""

    line_search: int = 10  # step sizes α = 2^(-i/2) tried on a fresh batch (Appendix D); 0 = no line search, α = 1
    objective: str = "quadratic"  # quadratic | exact: the loss on each linearized layer, expanded (Section 6.3) or not

    def __post_init__(self):
        super().__post_init__()
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective is {self.objective!r}; valid: {', '.join(OBJECTIVES)}")
        if self.inner == "cg" and self.objective == "exact":
            raise ValueError("inner is 'cg', which solves quadratic problems; valid with objective exact: muon, adamw")


def split(params):
    """Parameters below the head as a list of layers, from the embedding up; a block's arrays are without axis L."""
    blocks = zip(*(jnp.unstack(a) for a in params["blocks"].values()), strict=True)
    blocks = [dict(zip(params["blocks"], p, strict=True)) for p in blocks]
    return [{"embedding": params["embedding"]}, *blocks[:-1], blocks[-1] | {"final_norm": params["final_norm"]}]


def merge(layers):
    """Parameters below the head from a list of layers: the inverse of `split`."""
    (embedding, *blocks) = layers
    stacked = {name: jnp.stack([p[name] for p in blocks]) for name in blocks[0] if name != "final_norm"}
    return {**embedding, "blocks": stacked, "final_norm": blocks[-1]["final_norm"]}


def layer(config, p, h):
    """One layer: int32 ids [B, T] or [B, T, D] -> [B, T, D]."""
    if "embedding" in p:
        return model.embed(p, h)
    h = model.block(config, {name: a for name, a in p.items() if name != "final_norm"}, h)  # one trace for all
    return model.rms_norm(h, p["final_norm"]) if "final_norm" in p else h


def transpose(f, like):
    """The transpose of a linear function of arrays shaped as `like`."""
    return lambda u: jax.linear_transpose(f, like)(u)[0]


def each(f, streams, n):
    """The first n streams through f, in place: there is one stack of them in memory, whatever L."""
    return jax.lax.fori_loop(0, n, lambda i, s: s.at[i].set(f(s[i])), streams) if n else streams


def push(config, theta0, delta, x):
    """Each layer's δ_l pushed up to the head: hidden states [B, T, D], streams [L+1, B, T, D], and the way back.

    x: int32 ids [B, T]. Stream l is the change that δ_l alone makes. The way back has for each layer its two pullbacks:
    of a change of its output to its own parameters, and to its input (None for ids, which do not change).
    """
    (p, *above), (dp, *deltas) = split(theta0), split(delta)
    part = lambda both, side: lambda u: both(u)[side]  # of a pullback to (parameters, input)
    h, both = jax.vjp(lambda p: layer(config, p, x), p)
    pulls = [(part(both, 0), None)]
    streams = jnp.zeros((len(above) + 1, *h.shape), h.dtype).at[0].set(transpose(pulls[0][0], h)(dp))
    for i, (p, dp) in enumerate(zip(above, deltas, strict=True), 1):
        h, both = jax.vjp(partial(layer, config), p, h)
        pulls.append((part(both, 0), part(both, 1)))
        own, through = (transpose(pull, h) for pull in pulls[-1])
        streams = each(through, streams, i).at[i].set(own(dp))
    return h, streams, pulls


def pull(pulls, streams):
    """The gradient of what is below the head, each layer from its own stream; streams: cotangents [L+1, B, T, D]."""
    grads = [None] * len(pulls)
    for i, (to_p, to_below) in reversed(list(enumerate(pulls))):
        grads[i] = to_p(streams[i])  # a stream ends where it began
        streams = each(to_below, streams, i)
    return merge(grads)


def linearized(objective, theta0, delta, tokens, config):
    """The sum of the layers' objectives at θ_t + δ: (loss at θ_t, value), gradient; sums over tokens.

    tokens: int32 [B, T+1]. value: the loss at θ_t and what each layer's objective is above it.
    """
    x, y, network = tokens[:, :-1], tokens[:, 1:], config.model
    h, streams, pulls = push(network, theta0, delta, x)
    flat = lambda a: a.reshape(a.shape[0], -1, a.shape[-1])  # [L+1, B T, D]
    w, dw = rounded(network, theta0["head"], delta["head"])  # [D, V]

    def chunk(carry, part):
        (loss, value), w_bar, streams, i = carry
        h, y = part  # [c, D], [c]
        z, own = model.head(network, h, w), product(network, h, dw)  # [c, V]
        mine = jax.lax.dynamic_slice_in_dim(streams, i * len(y), len(y), axis=1)  # [L+1, c, D]
        at_theta0, below, u = objective(z, product(network, mine, w), y)  # u: [L+1, c, V]
        _, head, (u_head,) = objective(z, own[None], y)
        streams = jax.lax.dynamic_update_slice_in_dim(streams, product(network, u, w.T, h.dtype), i * len(y), axis=1)
        value += at_theta0 + jnp.sum(below - at_theta0) + jnp.sum(head - at_theta0)
        return ((loss + at_theta0, value), w_bar + product(network, h.T, u_head, h.dtype), streams, i + 1), None

    zero = jnp.zeros((), h.dtype)
    start = ((zero, zero), jnp.zeros_like(theta0["head"]), flat(streams), 0)
    (values, w_bar, streams, _), _ = model.scan_tokens(network, chunk, start, h, y)
    return values, {**pull(pulls, streams.reshape(-1, *h.shape)), "head": w_bar}


def update(state, batches, fresh, config, watch=lambda state: None):
    """One outer step; arguments, State and metrics as gn.update's, inner_loss being the sum over layers above."""
    return gn.update(state, batches, fresh, config, watch, OBJECTIVES[config.objective], linearized)
