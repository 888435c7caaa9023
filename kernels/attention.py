"""Causal attention, with a kernel for its pushforward.

For each head, where q, k and v are [T, K] and o is the value:

    s = q kᵀ / √K,   s[i, j] = -∞ for j > i;     p = softmax(s);     o = p v

Plain operations write s, p and their changes to memory, [B, heads, T, T]. Here none is written. The
value and the pullback come from cuDNN, NVIDIA's library, which has no pushforward. So that is a
kernel:

    ds = (dq kᵀ + q dkᵀ) / √K
    do = (p ∘ ds) v + p dv - r ∘ o,     r = Σ_j (p ∘ ds), a number for each row

It goes over s in tiles, on and below the diagonal only. A tile of p is computed again from a tile
of s and the log-sum-exp of each row, which cuDNN returns with the value: p = exp(s - lse). So a
tile takes five products: q kᵀ, dq kᵀ, q dkᵀ, (p ∘ ds) v and p dv.

cuDNN's log-sum-exp arrives rounded to bfloat16, so these p do not sum to 1. The kernel takes it for
a bound, which keeps exp from overflowing, and divides each row by its own sum, n.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import kernels
from kernels import suits
from kernels.derivative import with_derivative

LOG2_E = 1 / math.log(2)
TILE = 64  # queries, and keys, that a program sees at a time
WIDEST_HEAD = 128  # wider ones were not tried


def attention_kernel(q, k, v):
    """model.attention on a GPU, in bfloat16, for heads at most WIDEST_HEAD wide."""
    if not suits(q.dtype, jnp.bfloat16) or q.shape[3] > WIDEST_HEAD:
        return NotImplemented
    return with_derivative(value, prepare, push, pull)(q, k, v)


def value(q, k, v):
    """What model.attention returns."""
    o, _ = value_and_lse(q, k, v)
    return o


def prepare(q, k, v):
    """The value, and what its derivative needs."""
    (o, lse), cudnn_pull = jax.vjp(value_and_lse, q, k, v)
    return o, (q, k, v, o, lse, cudnn_pull)


def push(residuals, dq, dk, dv):
    """The pushforward, by the kernel."""
    *arrays, _ = residuals
    return pushforward(*arrays, dq, dk, dv)


def pull(residuals, u):
    """The pullback, by cuDNN."""
    *_, lse, cudnn_pull = residuals
    return cudnn_pull((u, jnp.zeros_like(lse)))  # no cotangent comes back to the log-sum-exp


def value_and_lse(q, k, v):
    """The value, and the log-sum-exp of each row of scores, [B, T, n_heads], by cuDNN.

    cuDNN wants T and K to be multiples of 8: zeros behind them change nothing. In tests on a CPU
    JAX's plain operations stand in for it.
    """
    T, K = q.shape[1], q.shape[3]
    padding = [(0, 0), (0, -T % 8), (0, 0), (0, -K % 8)]
    o, lse = jax.nn.dot_product_attention(
        jnp.pad(q, padding),
        jnp.pad(k, padding),
        jnp.pad(v, padding),
        is_causal=True,
        scale=K**-0.5,
        implementation="xla" if kernels.INTERPRET else "cudnn",
        return_residual=True,
    )
    return o[:, :T, :, :K], lse[:, :T]


# ---- the pushforward's kernel --------------------------------------------------------------------


def pushforward(q, k, v, o, lse, dq, dk, dv):
    """do, [B, T, n_heads, K]: the change of o with q, k and v; lse: [B, T, n_heads]."""
    B, T, n_heads, K = q.shape
    shared_by = n_heads // k.shape[2]  # heads of q that read a head of k and v
    width = max(16, pl.next_power_of_2(K))
    block = (None, T, None, width)  # all positions of one head of one sequence
    query = pl.BlockSpec(block, lambda i, h, b: (b, 0, h, 0))
    key = pl.BlockSpec(block, lambda i, h, b: (b, 0, h // shared_by, 0))
    row = pl.BlockSpec((None, T, None), lambda i, h, b: (b, 0, h))
    return pl.pallas_call(
        partial(pushforward_of_tile, K),
        grid=(pl.cdiv(T, TILE), n_heads, B),
        in_specs=[query, key, key, query, row, query, key, key],
        out_specs=query,
        out_shape=jax.ShapeDtypeStruct(q.shape, v.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=kernels.INTERPRET,
        name="attention_pushforward",
    )(q, k, v, o, lse, dq, dk, dv)


def pushforward_of_tile(K, q, k, v, o, lse, dq, dk, dv, do):
    """The kernel: TILE queries of one head of one sequence, against all keys up to them.

    References: lse to [T], all others to [T, width], of which K columns lie inside the arrays.
    """
    i = pl.num_programs(0) - 1 - pl.program_id(0)  # the longest rows first
    sums_dtype = jnp.promote_types(q.dtype, jnp.float32)
    dot = partial(jnp.dot, preferred_element_type=sums_dtype)
    scale = K**-0.5
    qi = load(q, i, K)
    dqi = load(dq, i, K)
    # Made wide first: in bfloat16, LOG2_E itself would be rounded, by 0.2%.
    bound = load(lse, i, K)[:, None].astype(sums_dtype) * LOG2_E

    def add_tile(j, sums, on_diagonal):
        total, r, n = sums
        kj = load(k, j, K)
        dkj = load(dk, j, K)
        vj = load(v, j, K)
        dvj = load(dv, j, K)
        p = jnp.exp2(dot(qi, kj.T) * (scale * LOG2_E) - bound)  # e^(s - lse), one operation less
        if on_diagonal:
            causal = jnp.arange(TILE)[:, None] >= jnp.arange(TILE)[None]
            p = jnp.where(causal, p, 0)
        ds = (dot(dqi, kj.T) + dot(qi, dkj.T)) * scale
        p_ds = (p * ds).astype(vj.dtype)
        total += dot(p_ds, vj) + dot(p.astype(vj.dtype), dvj)
        r += jnp.sum(p_ds.astype(sums_dtype), axis=1)
        n += jnp.sum(p, axis=1)
        return total, r, n

    zero = jnp.zeros(TILE, sums_dtype)  # a number for each row
    sums = jnp.zeros((TILE, q.shape[1]), sums_dtype), zero, zero
    sums = jax.lax.fori_loop(0, i, partial(add_tile, on_diagonal=False), sums)
    total, r, n = add_tile(i, sums, on_diagonal=True)
    result = (total - r[:, None] * load(o, i, K)) / n[:, None]
    place, inside = tile_of(do, i, K)
    triton.store(place, result.astype(do.dtype), mask=inside)


def tile_of(ref, i, K):
    """The place of rows i * TILE to (i + 1) * TILE in a reference to [T, width] or [T], and a mask.

    The mask is true for the entries that lie inside the array.
    """
    rows = pl.ds(i * TILE, TILE)
    row_inside = i * TILE + jnp.arange(TILE) < ref.shape[0]
    if len(ref.shape) == 1:
        return ref.at[rows], row_inside
    column_inside = jnp.arange(ref.shape[1]) < K
    return ref.at[rows, :], row_inside[:, None] & column_inside[None]


def load(ref, i, K):
    """Rows i * TILE to (i + 1) * TILE of a reference, with zeros outside the array."""
    place, inside = tile_of(ref, i, K)
    whole_rows = len(ref.shape) == 1 or ref.shape[1] == K
    if whole_rows and ref.shape[0] % TILE == 0:
        return triton.load(place)
    return triton.load(place, mask=inside, other=0)
