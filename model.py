"""The LLaMA that the paper trains (Section 5, Appendix E), in plain JAX.

    h = embedding[x]
    for each block:   h = h + attention(norm(h)) wo
                      h = h + mlp(norm(h))
    h = norm(h)
    z = h head                         the logits: a score for every word of the vocabulary
    ℓ(z, y) = log Σ exp(z) - z[y]      the loss: cross-entropy, where y is the right word

The parameters are a nested dict of float32 arrays. A weight is (in, out), so a layer is `x @ w`;
the weights of all blocks are stacked on a leading axis L. The logits of a whole batch are too large
to hold, so `hidden` ends below the head, and `over_tokens` applies the head to a few at a time.

`@on_gpu(kernel)` lets a kernel replace a function on some GPUs. It computes the same, faster.

Axes: B sequences, T positions, D model width, K width of an attention head, F width of the MLP, V
vocabulary, L layers, c tokens of a chunk. The one called "the head" is the last matrix, [D, V].
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from kernels import on_gpu
from kernels.attention import attention_kernel
from kernels.cross_entropy import cross_entropy_kernel
from kernels.heads import queries_keys_values_kernel
from kernels.mlp import mlp_kernel
from runtime import parallel
from runtime.flags import check_choice, check_range


@dataclass(frozen=True)
class Config:
    """The sizes of the network."""

    vocab_size: int = 32_000  # ids in the vocabulary, V; 0 = as many as the tokenizer has
    context: int = 1024  # positions in a sequence, T
    d_model: int = 512  # width of the residual stream, D
    d_ff: int = 2048  # width of the MLP, F
    n_layers: int = 4  # blocks, L
    n_heads: int = 8  # attention heads; each is K = d_model / n_heads wide
    n_kv_heads: int = 8  # heads of keys and values; fewer than n_heads = grouped-query attention
    mlp: str = "gelu"  # gelu (two matrices, authors' code) | swiglu (three: the usual LLaMA)
    # LayerNorm on queries and keys, over all heads together (authors' code); false = usual LLaMA
    qk_norm: bool = True
    # float32 | bfloat16: type of the factors of matrix products; by default a run takes bfloat16
    # where that is faster
    dtype: str = "float32"
    head_chunk: int = 4096  # the most tokens whose logits are held at once; fewer = less memory

    def check(self):
        """Raises ValueError where a size is out of its range, or two sizes do not fit together."""
        sizes = ("context", "d_model", "d_ff", "n_layers", "n_heads", "n_kv_heads", "head_chunk")
        check_range(self, sizes, least=1, below=2**31)
        check_choice(self, "mlp", ("gelu", "swiglu"))
        check_choice(self, "dtype", ("float32", "bfloat16"))
        D, heads, kv_heads = self.d_model, self.n_heads, self.n_kv_heads
        if D % (2 * heads):
            raise ValueError(f"d_model {D} over n_heads {heads} must be an even whole number")
        if heads % kv_heads:
            raise ValueError(f"n_heads {heads} must be a multiple of n_kv_heads {kv_heads}")


# The sizes of Appendix E, and two smaller ones. `tiny` is for a CPU and reads bytes. `5m` is for a
# small corpus: its 20 tokens per parameter are 100m tokens.
PRESETS = {
    "tiny": Config(
        vocab_size=256, context=128, d_model=64, d_ff=256, n_layers=2, n_heads=4, n_kv_heads=4
    ),
    "5m": Config(
        vocab_size=2048, context=512, d_model=256, d_ff=1024, n_layers=5, n_heads=4, n_kv_heads=4
    ),
    "45m": Config(),
    "150m": Config(d_model=768, d_ff=3072, n_layers=12, n_heads=16, n_kv_heads=16),
}

# The matrices of a block; its other arrays are of norms. The optimizers treat the two differently.
MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


def init(config, key):
    """Random parameters, float32: embedding with std 1, matrices with std 1/√in, norms at one."""
    V, L = config.vocab_size, config.n_layers
    D, F = config.d_model, config.d_ff
    D_kv = config.n_kv_heads * D // config.n_heads  # width of all keys, and of all values
    sizes = {
        "wq": (D, D),
        "wk": (D, D_kv),
        "wv": (D, D_kv),
        "wo": (D, D),
        "w_up": (D, F),
        "w_down": (F, D),
    }
    if config.mlp == "swiglu":
        sizes["w_gate"] = (D, F)
    keys = iter(jax.random.split(key, len(sizes) + 2))  # one each, and embedding and head

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    blocks = {}
    for name, (n_in, n_out) in sizes.items():
        blocks[name] = normal(L, n_in, n_out) / n_in**0.5
    blocks["attention_norm"] = jnp.ones((L, D))
    blocks["mlp_norm"] = jnp.ones((L, D))
    if config.qk_norm:
        blocks["q_scale"] = jnp.ones((L, D))
        blocks["q_bias"] = jnp.zeros((L, D))
        blocks["k_scale"] = jnp.ones((L, D_kv))
        blocks["k_bias"] = jnp.zeros((L, D_kv))
    return {
        "embedding": normal(V, D),
        "blocks": blocks,
        "final_norm": jnp.ones(D),
        "head": normal(D, V) / D**0.5,
    }


def shapes(config):
    """What `init` returns, with the shape and the dtype of each array in its place."""
    return jax.eval_shape(partial(init, config), jax.random.key(0))


def size(config):
    """How many parameters the network has."""
    return sum(a.size for a in jax.tree.leaves(shapes(config)))


def rms_norm(x, scale):
    """x over its root mean square, times scale; x: [B, T, D], scale: [D]."""
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6) * scale[None, None]


def layer_norm(x, scale, bias):
    """x less its mean, over its standard deviation, times scale, plus bias; shapes as above."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return rms_norm(x - mean, scale) + bias[None, None]


def rotate(x):
    """Rotary positions: at position t, turns the pair x[i], x[i + K/2] by t / 10000^(2i/K) radians.

    x: [B, T, heads, K]. A query times a key then knows their positions by the difference only.
    """
    T, half = x.shape[1], x.shape[3] // 2
    positions_per_radian = 10_000.0 ** (jnp.arange(half) / half)  # [K/2]
    angle = jnp.arange(T)[:, None] / positions_per_radian[None]  # [T, K/2]
    angle = angle[None, :, None].astype(x.dtype)  # [1, T, 1, K/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x, 2, axis=-1)
    a_turned = a * cos - b * sin
    b_turned = a * sin + b * cos
    return jnp.concatenate([a_turned, b_turned], axis=-1)


def rounded(config, x):
    """x as a matrix product reads it: in bfloat16 where `dtype` says so, else as it is."""
    return x.astype(jnp.bfloat16) if config.dtype == "bfloat16" else x


def wide(x):
    """x in float32 or wider, for all that is not a matrix product of rounded factors."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def product(config, x, w, dtype=None):
    """x @ w, both rounded; the result has the dtype of the rounded factors, or `dtype`."""
    x, w = rounded(config, x), rounded(config, w)
    return jnp.matmul(x, w, preferred_element_type=dtype)


@on_gpu(queries_keys_values_kernel)
def queries_keys_values(config, p, x):
    """Queries [B, T, n_heads, K], keys and values [B, T, n_kv_heads, K] of x [B, T, D].

    p: the parameters of one block.
    """
    q = wide(product(config, x, p["wq"]))
    k = wide(product(config, x, p["wk"]))
    v = product(config, x, p["wv"])
    if config.qk_norm:
        q = layer_norm(q, p["q_scale"], p["q_bias"])
        k = layer_norm(k, p["k_scale"], p["k_bias"])
    B, T, D = x.shape
    heads = (B, T, -1, D // config.n_heads)
    q = rotate(q.reshape(heads)).astype(v.dtype)
    k = rotate(k.reshape(heads)).astype(v.dtype)
    return q, k, v.reshape(heads)


@on_gpu(attention_kernel)
def attention(q, k, v):
    """Causal attention: at each position a weighted mean of the values up to there, by heads.

    q: [B, T, n_heads, K]; k, v: [B, T, n_kv_heads, K], a head of which serves n_heads / n_kv_heads
    neighbouring heads of q. Returns [B, T, n_heads, K] in the dtype of v.
    """
    T, K = q.shape[1], q.shape[3]
    shared_by = q.shape[2] // k.shape[2]
    k = jnp.repeat(k, shared_by, axis=2)
    v = jnp.repeat(v, shared_by, axis=2)
    # q and k are rounded already, but their product is to be summed up in float32.
    scores = jnp.einsum("bthk,bshk->bhts", wide(q), wide(k)) / K**0.5
    t = jnp.arange(T)
    causal = t[:, None] >= t[None]  # [T, T]: position t reads s where s <= t
    scores = jnp.where(causal[None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


@on_gpu(mlp_kernel)
def mlp(config, p, x):
    """gelu(x w_up) w_down, or SwiGLU's (silu(x w_gate) ∘ x w_up) w_down; x: [B, T, D]."""
    up = wide(product(config, x, p["w_up"]))  # [B, T, F]
    if config.mlp == "gelu":
        active = jax.nn.gelu(up)  # in its tanh form
    else:
        gate = wide(product(config, x, p["w_gate"]))
        active = jax.nn.silu(gate) * up
    return product(config, active, p["w_down"])


@partial(jax.jit, static_argnums=0)  # so that JAX traces it once, and not once for each layer
def block(config, p, h):
    """One transformer block; p: its parameters, without the axis L; h: [B, T, D] -> [B, T, D]."""
    x = rms_norm(h, p["attention_norm"])
    q, k, v = queries_keys_values(config, p, x)
    o = attention(q, k, v).reshape(h.shape)
    h = h + product(config, o, p["wo"])
    return h + mlp(config, p, rms_norm(h, p["mlp_norm"]))


def unstack(blocks):
    """The parameters of all blocks, arrays [L, ..], as a list of L dicts."""
    n_layers = len(blocks["wq"])
    unstacked = {name: jnp.unstack(a) for name, a in blocks.items()}
    return [{name: arrays[i] for name, arrays in unstacked.items()} for i in range(n_layers)]


def hidden(config, params, x):
    """The network below the head: int32 ids [B, T] -> [B, T, D]."""
    h = params["embedding"][x]
    for p in unstack(params["blocks"]):
        h = block(config, p, h)
    return rms_norm(h, params["final_norm"])


def inputs_and_labels(tokens):
    """Of int32 ids [B, T+1], those that the network reads and those that it predicts: [B, T]."""
    return tokens[:, :-1], tokens[:, 1:]


def head(config, h, w):
    """The logits, [.., D] @ [D, V]; summed up in float32 also where the factors are rounded."""
    return product(config, h, w, h.dtype)


def head_both_ways(config, theta0, delta):
    """The head linearized: a function of h and its change dh, both [c, D], that returns

    z = h w                [c, V], the logits;
    v = dh w + h dw        [c, V], their change (the pushforward);
    pull                   u [c, V] -> h_bar = u wᵀ [c, D] and the head's gradient w_bar = hᵀ u.

    `pull` is the pullback. h_bar and w_bar are cotangents: the gradients in h and in w.
    """
    w = rounded(config, theta0["head"])  # here, once, and not for each chunk of tokens
    dw = rounded(config, delta["head"])
    w_and_dw = jnp.concatenate([w, dw])  # [2 D, V]: [dh, h] times this is v, in one product

    def both_ways(h, dh):
        def pull(u):
            h_bar = product(config, u, w.T, h.dtype)
            w_bar = product(config, h.T, u, h.dtype)
            return h_bar, {"head": w_bar}

        z = head(config, h, w)
        dh_and_h = jnp.concatenate([dh, h], axis=1)
        v = product(config, dh_and_h, w_and_dw)  # may stay rounded, as it is only a change
        return z, v, pull

    return both_ways


def over_tokens(config, f, *arrays):
    """Applies f to all tokens of arrays [B, T, ..], to at most `head_chunk` tokens at a time.

    f takes chunks [c, ..] of the arrays and returns two trees: outs [c, ..], and sums over tokens.
    Returns the outs of all chunks, joined to [B, T, ..], and the sums added up.
    """
    B, T = arrays[0].shape[:2]
    c = parallel.largest_divisor(B * T, config.head_chunk)  # so that all chunks are of one size

    def cut(a):
        return a.reshape(-1, c, *a.shape[2:])

    def join(a):
        return a.reshape(B, T, *a.shape[2:])

    def add(total, chunk):
        out, sums = f(*chunk)
        return jax.tree.map(jnp.add, total, sums), out

    chunks = [cut(a) for a in arrays]
    first_chunk = [a[0] for a in chunks]
    _, sums = jax.eval_shape(f, *first_chunk)
    zero = jax.tree.map(jnp.zeros_like, sums)
    total, outs = jax.lax.scan(add, zero, chunks)
    return jax.tree.map(join, outs), total


@on_gpu(cross_entropy_kernel)
def cross_entropy(z, y):
    """-log softmax(z)[y], summed over tokens, in nats; z: logits [c, V], y: labels, int32 [c]."""
    words = jnp.arange(z.shape[1])
    is_label = y[:, None] == words[None]  # [c, V]
    z_of_label = jnp.sum(jnp.where(is_label, z, 0), axis=1)
    return jnp.sum(jax.nn.logsumexp(z, axis=1) - z_of_label)


def loss(config, params, tokens):
    """The mean loss, in nats per token, of int32 ids [B, T+1], each predicted from those before."""
    x, y = inputs_and_labels(tokens)
    h = hidden(config, params, x)
    w = rounded(config, params["head"])

    def chunk_loss(h, y):
        no_outs = ()
        return no_outs, cross_entropy(head(config, h, w), y)

    _, total = over_tokens(config, chunk_loss, h, y)
    return total / y.size
