"""Layerwise Gauss-Newton (Section 6.3): the network is linearized in one layer's weights at a time.

    L2(θ_t + δ) = ℓ(z) + Σ_l (g·v_l + ½ v_l·H v_l),     v_l = J_l δ_l,   J_l: layer l's columns of J
    ∇_l L2 = J_lᵀ(g + H v_l);     all layers together:  ∇L2 = ∇L(θ_t) + blockdiag(G) δ

Each term of the sum has the change of one layer's weights alone. So G loses what ties one layer to
another, and only its diagonal blocks are left, one for each layer. The layers are the embedding,
each transformer block (the last one with the final norm), and the head.

Full Gauss-Newton pushes one change up through the network. Here each layer's change δ_l makes a
stream of its own: it starts at layer l, passes all layers above, and meets the loss alone; its
cotangent passes back down to layer l and ends there. All streams share one forward pass. On the way
up, and again on the way down, a layer costs one multiply-add per weight and token for each stream
that passes it, and about two for the stream that starts in it. For the model `150m` this comes
to about 4 times the multiply-adds of gn.py's gradient; layer by layer, each with a forward pass of
its own, it would be nearly 7 times. (On a GPU, an inner step takes 5.3 times as long.)

With `--objective exact` each layer keeps the exact loss, as in gn_prox.py: the terms of the sum are
ℓ(z + v_l) - ℓ(z). What is said of L2 below holds for it, too.

All the rest is gn.py. Muon treats each matrix by itself, and Adam each number, so one inner iterate
and one optimizer serve all layers. Only clipping must know them: as if each layer were trained
alone, its gradient is clipped by its own norm.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import optax

import gn
import gn_prox
import model
import optimizers
from gn import init, lower, update  # noqa: F401  as there; inner_loss is the L2 above
from model import product, rounded
from runtime.flags import check_choice, traced

OBJECTIVES = {"quadratic": gn.quadratic, "exact": gn_prox.exact}


@traced
@dataclass(frozen=True)
class Config(gn.Config):
    """Settings of layerwise Gauss-Newton: those of Gauss-Newton, and the objective of a layer.

    The network is model.py, as `split` must know its layers.
    """

    # how many α = 2^(-i/2) are tried: more than in gn.py, as the paper needs smaller ones here
    # (Section 6.3, Appendix D); 0 = no search, α = 1
    line_search: int = 10
    # quadratic | exact: a layer's loss is expanded as in gn.py (Section 6.3), or kept exact
    objective: str = "quadratic"
    clip: float = 1.0  # largest gradient norm of a layer; 0 = no limit

    def value_and_grad(self, theta0, delta, tokens):
        """As gn.py's, of the L2 above."""
        return value_and_grad(theta0, delta, tokens, self)

    def optimizer(self, lr):
        """gn.py's inner optimizer, after each layer's gradient is clipped by itself."""
        unclipped = gn.Config.optimizer(replace(self, clip=0.0), lr)
        return optax.chain(clip_layers(self.clip), unclipped)

    def __post_init__(self):
        super().__post_init__()
        if self.model is not model:
            raise ValueError("layerwise_gn.py knows the layers of model.py only")

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
        if name != "final_norm":  # blocks[0] has it if there is only one block
            stacked[name] = jnp.stack([p[name] for p in blocks])
    return {**embedding, "blocks": stacked, "final_norm": blocks[-1]["final_norm"]}


def layer(network, p, inputs):
    """The output of a layer with parameters p, [B, T, D].

    inputs: int32 ids [B, T] for the embedding, the output of the layer below for all others.
    """
    if "embedding" in p:
        return p["embedding"][inputs]
    h = model.block(network, p, inputs)
    if "final_norm" in p:
        h = model.rms_norm(h, p["final_norm"])
    return h


def clip_layers(limit):
    """Scales each layer's gradient down to the norm `limit`; 0 = never."""
    clip = optimizers.clip_by_norm(limit)

    def clip_layer(grad):
        clipped, _ = clip.update(grad, clip.init(grad))
        return clipped

    def clip_all(grad, params):
        below_head = [clip_layer(of_layer) for of_layer in split(grad)]
        return merge(below_head) | {"head": clip_layer(grad["head"])}

    return optax.stateless(clip_all)


def transpose(f, like):
    """The transpose of f, a linear function of one array that has the shape of `like`."""

    def transposed(a):
        (result,) = jax.linear_transpose(f, like)(a)
        return result

    return transposed


def map_first(f, streams, n):
    """The stacked streams, with f applied to each of the first n."""
    if n == 0:  # at the embedding, whose inputs are ids: f has no meaning there
        return streams

    def apply(i, streams):
        return streams.at[i].set(f(streams[i]))

    return jax.lax.fori_loop(0, n, apply, streams)


# ---- the objective -------------------------------------------------------------------------------


def value_and_grad(theta0, delta, tokens, config, objective=None):
    """ℓ at θ_t, the L2 above at θ_t + δ, and the gradient of L2: means over tokens.

    tokens: int32 ids [B, T+1]; objective: by default what config.objective names.
    """
    network = config.network
    objective = objective or OBJECTIVES[config.objective]
    x, y = model.inputs_and_labels(tokens)

    h, streams, pullbacks = up(network, theta0, delta, x)
    cotangents, sums = across(network, objective, theta0, delta, h, streams, y)
    ell, L2, head_grad = sums
    grad = down(pullbacks, cotangents) | head_grad
    return jax.tree.map(lambda total: total / y.size, (ell, L2, grad))


def linear_maps(network, p, inputs):
    """The output of a layer, and its linear maps at its parameters p and its inputs.

    from_params, from_input: a change of the parameters, or of the inputs -> that of the output
    to_params, to_input: a cotangent of the output -> that of the parameters, or of the inputs
    (from_input and to_input have no meaning for the embedding, whose inputs are ids)
    """
    output, pull = jax.vjp(partial(layer, network), p, inputs)

    def to_params(u):
        return pull(u)[0]

    def to_input(u):
        return pull(u)[1]

    # The transpose of a pullback is a pushforward: (Jᵀ)ᵀ = J. So one vjp gives all four maps.
    from_params = transpose(to_params, output)
    from_input = transpose(to_input, output)
    return output, from_params, from_input, to_params, to_input


def up(network, theta0, delta, x):
    """What the head reads, h [B, T, D]; how each layer's δ_l alone changes it; and the pullbacks.

    The changes are streams, stacked, [L+1, B, T, D]: that of the embedding, and those of the L
    blocks; `across` makes that of the head. Each layer, the lowest first, has a pair of pullbacks:
    from its output to its parameters, and from its output to its input.
    """
    shape = (network.n_layers + 1, *x.shape, network.d_model)
    streams = jnp.zeros(shape, theta0["embedding"].dtype)
    pullbacks = []
    inputs = x  # of the next layer: ids for the embedding, h for all others
    layers = zip(split(theta0), split(delta), strict=True)
    for i, (p, dp) in enumerate(layers):
        inputs, from_params, from_input, to_params, to_input = linear_maps(network, p, inputs)
        streams = map_first(from_input, streams, i)
        streams = streams.at[i].set(from_params(dp))
        pullbacks.append((to_params, to_input))
    return inputs, streams, pullbacks


def across(network, objective, theta0, delta, h, streams, y):
    """The cotangents of the streams, [L+1, B, T, D]; the sums of ℓ, L2 and the head's gradient.

    The head is the last layer: the stream of its own change starts and ends here.
    """
    w = rounded(network, theta0["head"])  # here, once, and not for each chunk of tokens
    dw = rounded(network, delta["head"])
    for_each_stream = jax.vmap(objective, in_axes=(None, 0, None))

    # `over_tokens` cuts arrays [B, T, ..], so the streams go in and come out one by one.
    def of_chunk(h, y, *streams):
        streams = jnp.stack(streams)  # [L+1, c, D]
        z = model.head(network, h, w)
        v = product(network, streams, w)
        v_head = product(network, h, dw)
        _, L2s, u = for_each_stream(z, v, y)
        ell, L2_head, u_head = objective(z, v_head, y)
        L2 = L2_head + jnp.sum(L2s - ell)  # each of them contains ℓ, which counts once
        h_bar = product(network, u, w.T, h.dtype)
        w_bar = product(network, h.T, u_head, h.dtype)
        return jnp.unstack(h_bar), (ell, L2, {"head": w_bar})

    one_by_one = jnp.unstack(streams)
    h_bars, sums = model.over_tokens(network, of_chunk, h, y, *one_by_one)
    return jnp.stack(h_bars), sums


def down(pullbacks, cotangents):
    """The gradient below the head: each stream of cotangents is pulled back to its own layer."""
    grads = [None] * len(pullbacks)
    for i in reversed(range(len(pullbacks))):
        to_params, to_input = pullbacks[i]
        grads[i] = to_params(cotangents[i])  # a stream ends where it began
        cotangents = map_first(to_input, cotangents, i)
    return merge(grads)
