"""The LLaMA that the paper trains (Section 5, Appendix E), as functions of a nested dict of arrays.

    h = embedding[x];   for each block:  h += Wo attention(norm(h)),  h += Wdown gelu(Wup norm(h));   z = norm(h) head

The per-layer matrices are stacked on a leading axis L; a weight is (in, out). The logits z are never held for a whole
batch: the head and the loss see `head_chunk` tokens at a time.

Axes: B sequences, T positions, D model width, H heads, G key-value heads, K width of a head, F MLP width, V vocabulary,
L layers.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from kernels import cross_entropy
from kernels.attention import attention
from kernels.heads import heads, wide
from kernels.linear import remade


@dataclass(frozen=True)
class Config:
    """The network. Raises ValueError where the sizes do not fit together."""

    vocab_size: int = 32_000  # ids in the vocabulary, V; 0 = as many as the tokenizer has
    context: int = 1024  # positions in a sequence, T
    d_model: int = 512  # width of the residual stream, D
    d_ff: int = 2048  # width of the MLP, F
    n_layers: int = 4  # blocks, L
    n_heads: int = 8  # attention heads, H; each is d_model / n_heads wide
    n_kv_heads: int = 8  # key-value heads, G; fewer than n_heads = grouped-query attention
    mlp: str = "gelu"  # gelu (two matrices, tanh form) | swiglu (three, gated: the textbook LLaMA)
    qk_norm: bool = True  # LayerNorm on queries and keys before the rotation; false = the textbook LLaMA
    dtype: str = "float32"  # float32 | bfloat16 (on a GPU the default): of matrix products; all else stays float32
    head_chunk: int = 4096  # tokens at most whose logits are held at a time: lower it when memory runs out

    def __post_init__(self):
        for name, value in vars(self).items():
            if name != "vocab_size" and type(value) is int and not 1 <= value < 2**31:
                raise ValueError(f"{name} is {value}; it must be at least 1 and below 2^31")
        if self.d_model % self.n_heads or self.d_model // self.n_heads % 2:
            raise ValueError(f"d_model {self.d_model} over n_heads {self.n_heads} must be an even whole number")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")
        for name, valid in (("mlp", ("gelu", "swiglu")), ("dtype", ("float32", "bfloat16"))):
            if getattr(self, name) not in valid:
                raise ValueError(f"{name} is {getattr(self, name)!r}; valid: {', '.join(valid)}")


PRESETS = {  # Appendix E; `tiny` is for a CPU
    "tiny": Config(context=128, d_model=64, d_ff=256, n_layers=2, n_heads=4, n_kv_heads=4),
    "45m": Config(),
    "150m": Config(d_model=768, d_ff=3072, n_layers=12, n_heads=16, n_kv_heads=16),
}

MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")  # of a block, [L, in, out]; its others are norms


def init(config, key):
    """Random parameters, float32: embedding with std 1, matrices with std 1/sqrt(in), norms at one, biases at zero."""
    V, D, F, L = config.vocab_size, config.d_model, config.d_ff, config.n_layers
    kv = config.n_kv_heads * D // config.n_heads
    matrices = {"wq": (D, D), "wk": (D, kv), "wv": (D, kv), "wo": (D, D), "w_up": (D, F), "w_down": (F, D)}
    if config.mlp == "swiglu":
        matrices["w_gate"] = (D, F)
    keys = iter(jax.random.split(key, 2 + len(matrices)))
    blocks = {name: jax.random.normal(next(keys), (L, *s)) / s[0] ** 0.5 for name, s in matrices.items()}
    blocks |= {"attention_norm": jnp.ones((L, D)), "mlp_norm": jnp.ones((L, D))}
    if config.qk_norm:
        blocks |= {"q_scale": jnp.ones((L, D)), "q_bias": jnp.zeros((L, D))}
        blocks |= {"k_scale": jnp.ones((L, kv)), "k_bias": jnp.zeros((L, kv))}
    embedding, head = jax.random.normal(next(keys), (V, D)), jax.random.normal(next(keys), (D, V)) / D**0.5
    return {"embedding": embedding, "blocks": blocks, "final_norm": jnp.ones(D), "head": head}


def size(config):
    """How many parameters the model has."""
    return sum(a.size for a in jax.tree.leaves(jax.eval_shape(partial(init, config), jax.random.key(0))))


def rms_norm(x, scale):
    """x / rms(x) * scale, over the last axis of x [B, T, D]; scale [D]."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale[None, None]


def rounded(config, *arrays):
    """The arrays as a matrix product reads them: in bfloat16 where `dtype` says so, else as they are."""
    return [a.astype(jnp.bfloat16) if config.dtype == "bfloat16" else a for a in arrays]


def product(config, x, w, out=None):
    """x @ w, rounded as `dtype` says; `out`: the dtype of the result, by default that of the rounded factors."""
    return jnp.matmul(*rounded(config, x, w), preferred_element_type=out)


def embed(params, x):
    """int32 ids [B, T] -> [B, T, D]."""
    return params["embedding"][x]


def down(config, w, up, gate=None):
    """What the MLP does with its first product(s), [B, T, F] -> [B, T, D]."""
    up = wide(up)  # without a gate: GELU in its tanh form, x (1 + tanh a) / 2 = x σ(2a)
    gelu = lambda: jax.nn.sigmoid((8 / jnp.pi) ** 0.5 * (up + 0.044715 * up**3))
    return product(config, up * (gelu() if gate is None else jax.nn.silu(wide(gate))), w)


@partial(jax.jit, static_argnums=0)  # traced once for all layers
def block(config, p, h):
    """One transformer block, parameters p without the axis L: [B, T, D] -> [B, T, D]."""
    (B, T, D), H, G, K = h.shape, config.n_heads, config.n_kv_heads, config.d_model // config.n_heads
    split = lambda x: x.reshape(*x.shape[:-1], -1, 2, K // 2)  # into heads, and each in two halves
    w = jnp.concatenate([p["wq"], p["wk"], p["wv"]], axis=1)  # one larger product is faster than three
    norms = ("q_scale", "q_bias", "k_scale", "k_bias") if config.qk_norm else ()
    x = split(product(config, rms_norm(h, p["attention_norm"]), w))
    q, k, v = (a.reshape(B, T, -1, K) for a in heads((H, G, G), x, *(split(p[name]) for name in norms)))
    h = h + product(config, attention(q, k, v).reshape(B, T, D), p["wo"])
    m = rms_norm(h, p["mlp_norm"])
    gate = [product(config, m, p["w_gate"])] if config.mlp == "swiglu" else []
    return h + remade(partial(down, config))(p["w_down"], product(config, m, p["w_up"]), *gate)


def hidden(config, params, x):
    """int32 ids [B, T] -> what the head reads, [B, T, D]: everything below the head, final norm included."""
    h = embed(params, x)
    for p in zip(*(jnp.unstack(a) for a in params["blocks"].values()), strict=True):
        h = block(config, dict(zip(params["blocks"], p, strict=True)), h)
    return rms_norm(h, params["final_norm"])


def head(config, h, w):
    """Logits, summed in float32 also where their factors are rounded: [.., D], [D, V] -> [.., V]."""
    return product(config, h, w, h.dtype)


def scan_tokens(config, f, carry, *arrays):
    """lax.scan of f over the tokens of arrays [B, T, ..], at most `head_chunk` of them at a time.

    f(carry, chunk) -> (carry, out), chunk a tuple of [c, ..]. Returns the last carry and the outs as [B T, ..].
    """
    tokens = arrays[0].shape[0] * arrays[0].shape[1]
    chunks = next(n for n in range(-(-tokens // config.head_chunk), tokens + 1) if tokens % n == 0)
    carry, out = jax.lax.scan(f, carry, tuple(a.reshape(chunks, -1, *a.shape[2:]) for a in arrays))
    return carry, jax.tree.map(lambda a: a.reshape(tokens, *a.shape[2:]), out)


def loss(config, params, tokens):
    """Mean cross-entropy (nats a token) of predicting tokens[:, 1:] from the ids before; tokens: int32 [B, T+1]."""
    x, y = tokens[:, :-1], tokens[:, 1:]
    h, (w,) = hidden(config, params, x), rounded(config, params["head"])
    add = lambda total, part: (total + cross_entropy.value(head(config, part[0], w), part[1]), None)
    return scan_tokens(config, add, jnp.zeros((), h.dtype), h, y)[0] / y.size


def value_and_grad(config, params, tokens):
    """`loss` and its gradient, the logits a chunk at a time; tokens: int32 [B, T+1]."""
    x, y = tokens[:, :-1], tokens[:, 1:]
    (h, pull), (w,) = jax.vjp(lambda p: hidden(config, p, x), params), rounded(config, params["head"])

    def chunk(carry, part):
        h, y = part  # [c, D], [c]
        value, u = cross_entropy.gradient(head(config, h, w), y, config.dtype)  # ∇ℓ(z), [c, V]
        return (carry[0] + value, carry[1] + product(config, h.T, u, h.dtype)), product(config, u, w.T, h.dtype)

    (total, w_bar), h_bar = scan_tokens(config, chunk, (jnp.zeros((), h.dtype), jnp.zeros_like(params["head"])), h, y)
    (grad,) = pull(h_bar.reshape(h.shape))
    return total / y.size, jax.tree.map(lambda a: a / y.size, {**grad, "head": w_bar})
