"""Exact causal attention, differentiable in all three directions.

    s = q kᵀ / sqrt(K),  s[i, j] = -inf for j > i;   p = softmax(s);   o = p v

Gauss-Newton asks for more than backpropagation does: the value (primal), the change of the value with the
inputs (pushforward, J v) and the change of the inputs with the value (pullback, Jᵀ u). Written in plain XLA operations
it has all of them, and writes s, p and their changes to memory, [B, H, T, T]. In bfloat16 on a GPU `fused` writes none
of them. Its value and pullback are cuDNN's, which know no pushforward. That is a kernel here:

    ds = (dq kᵀ + q dkᵀ) / sqrt(K);   do = (p ∘ ds) v + p dv - r ∘ o,    r = the row sums of p ∘ ds

A tile of p is made anew from a tile of s and each row's log-sum-exp, which the value's kernel leaves: p = exp(s - lse).
So a tile takes five products (q kᵀ, dq kᵀ, q dkᵀ, (p ∘ ds) v, p dv), and only tiles on and below the diagonal are seen.
That log-sum-exp comes rounded to bfloat16, so it only bounds the scores: a row is divided by its own sum.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels.linear import linear

LOG2_E = 1 / math.log(2)
TILE = 64  # queries, and keys, that a program of the kernel sees at a time


def attention_kernel(q, k, v):
    """model.attention on a GPU, in bfloat16, for heads up to 128 wide."""
    if q.dtype != jnp.bfloat16 or q.shape[3] > 128:
        return NotImplemented
    return fused(q, k, v)


def plain(q, k, v):
    """The value, and the log-sum-exp of each row of scores [B, T, H], in plain XLA operations."""
    B, T, H, K = q.shape
    G = k.shape[2]
    q = q.reshape(B, T, G, H // G, K)
    s = jnp.einsum("btgrk,bsgk->bgrts", q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
    causal = jnp.arange(T)[:, None] >= jnp.arange(T)[None]  # [T, T]: position t reads s <= t
    s = jnp.where(causal[None, None, None], s / K**0.5, -jnp.inf)
    o = jnp.einsum("bgrts,bsgk->btgrk", jax.nn.softmax(s, axis=-1).astype(v.dtype), v).reshape(B, T, H, K)
    return o, jax.nn.logsumexp(s, axis=-1).reshape(B, H, T).swapaxes(1, 2)


def cudnn(q, k, v):
    """What `plain` returns, by cuDNN, which wants T and K to be multiples of 8: zeros behind them change nothing."""
    T, K = q.shape[1], q.shape[3]
    q, k, v = (jnp.pad(a, [(0, 0), (0, -T % 8), (0, 0), (0, -K % 8)]) for a in (q, k, v))
    options = dict(is_causal=True, scale=K**-0.5, implementation="cudnn", return_residual=True)
    o, lse = jax.nn.dot_product_attention(q, k, v, **options)
    return o[:, :T, :, :K], lse[:, :T]


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def fused(q, k, v, interpret=False):
    """`attention` without scores in memory. interpret: the kernel's steps as XLA operations, for a CPU."""
    return (plain if interpret else cudnn)(q, k, v)[0]


@fused.defjvp
def fused_jvp(interpret, at, d):
    (o, lse), pull = jax.vjp(plain if interpret else cudnn, *at)  # `pull` is a tree of what cuDNN's pullback reads
    push = lambda residuals, dq, dk, dv: (pushforward(*residuals[0], dq, dk, dv, interpret=interpret),)
    back = lambda residuals, u: residuals[1]((u, jnp.zeros_like(residuals[0][4])))  # the log-sum-exp goes nowhere
    return o, linear(push, back, ((*at, o, lse), pull), *d)[0]


# ---- the pushforward's kernel ----------------------------------------------------------------------------------------


def pushforward(q, k, v, o, lse, dq, dk, dv, interpret=False):
    """do [B, T, H, K] for the changes dq [B, T, H, K] and dk, dv [B, T, G, K]; lse: [B, T, H] of the scores' rows."""
    (B, T, H, K), group = q.shape, q.shape[2] // k.shape[2]
    width = max(16, pl.next_power_of_2(K))  # a tile's sides are powers of two
    block = (None, T, None, width)  # all positions of one head of one sequence
    query = pl.BlockSpec(block, lambda i, h, b: (b, 0, h, 0))
    key = pl.BlockSpec(block, lambda i, h, b: (b, 0, h // group, 0))
    row = pl.BlockSpec((None, T, None), lambda i, h, b: (b, 0, h))
    return pl.pallas_call(
        partial(pushforward_tile, K),
        grid=(pl.cdiv(T, TILE), H, B),
        in_specs=[query, key, key, query, row, query, key, key],
        out_specs=query,
        out_shape=jax.ShapeDtypeStruct(q.shape, v.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="attention_pushforward",
    )(q, k, v, o, lse, dq, dk, dv)


def pushforward_tile(K, q, k, v, o, lse, dq, dk, dv, do):
    """The kernel: TILE queries of one head of one sequence. References to [T, width], K wide inside, but lse, [T]."""
    T, width = q.shape
    i = pl.num_programs(0) - 1 - pl.program_id(0)  # the longest rows first
    column = jnp.arange(width) < K

    def at(ref, j):  # rows j TILE.. of ref, and which of them are there
        rows = pl.ds(j * TILE, TILE)
        inside = j * TILE + jnp.arange(TILE) < T
        if len(ref.shape) == 1:
            return ref.at[rows], inside
        return ref.at[rows, :], inside[:, None] & column[None]

    def load(ref, j):
        place, inside = at(ref, j)
        whole = T % TILE == 0 and width == K
        return triton.load(place) if whole else triton.load(place, mask=inside, other=0)

    sums = jnp.promote_types(q.dtype, jnp.float32)
    dot = partial(jnp.dot, preferred_element_type=sums)
    Q, dQ, scale = load(q, i), load(dq, i), K**-0.5
    bound = load(lse, i)[:, None].astype(sums) * LOG2_E  # in bfloat16 the factor too would be rounded, by 0.2%

    def tile(j, carry, diagonal):
        total, r, n = carry
        Kj, dKj, Vj, dVj = (load(ref, j) for ref in (k, dk, v, dv))
        p = jnp.exp2(dot(Q, Kj.T) * (scale * LOG2_E) - bound)  # e^(s - lse), one operation less
        if diagonal:
            p = jnp.where(jnp.arange(TILE)[:, None] >= jnp.arange(TILE)[None], p, 0)
        w = (p * (dot(dQ, Kj.T) + dot(Q, dKj.T)) * scale).astype(Vj.dtype)  # p ∘ ds
        total += dot(w, Vj) + dot(p.astype(Vj.dtype), dVj)
        return total, r + jnp.sum(w.astype(sums), axis=1), n + jnp.sum(p, axis=1)

    carry = jnp.zeros((TILE, width), sums), jnp.zeros(TILE, sums), jnp.zeros(TILE, sums)
    carry = jax.lax.fori_loop(0, i, partial(tile, diagonal=False), carry)
    total, r, n = tile(i, carry, diagonal=True)
    place, inside = at(do, i)
    triton.store(place, ((total - r[:, None] * load(o, i)) / n[:, None]).astype(do.dtype), mask=inside)
