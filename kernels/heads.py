"""Queries, keys and values from one product: split into heads, the first two normalized (QK-norm) and rotated.

    n = (x - mean) / std ∘ scale + bias,   over all heads of a position
    y[i], y[i + K/2] = n[i] cos a - n[i + K/2] sin a,  n[i] sin a + n[i + K/2] cos a;   a = t / 10000^(2i/K)

That is little arithmetic on much memory. XLA goes over it several times, with float32 arrays in between. `fused` goes
once: a kernel holds what belongs to a position in registers, and does there what `row` says, or its pushforward, or
its pullback, which JAX derives inside the kernel.

Both halves of a head are needed at once, so here its width is two axes, [.., 2, K/2], and a row a pair of [H, K/2].
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels.linear import linear

ROWS, SUMMED = 4, 16  # positions that a program goes through; the same where it also sums the norms' gradients
WARPS = 2


def queries_keys_values_kernel(network, p, x):
    """model.queries_keys_values on a GPU, in bfloat16: one product for all three, then one kernel."""
    if network.dtype != "bfloat16":
        return NotImplemented
    (B, T, _), H, G = x.shape, network.n_heads, network.n_kv_heads
    K = network.d_model // H
    split = lambda a: a.reshape(*a.shape[:-1], -1, 2, K // 2)
    w = jnp.concatenate([p["wq"], p["wk"], p["wv"]], axis=1).astype(jnp.bfloat16)
    names = ("q_scale", "q_bias", "k_scale", "k_bias") if network.qk_norm else ()
    made = fused((H, G, G), False, split(x.astype(jnp.bfloat16) @ w), *(split(p[name]) for name in names))
    return tuple(a.reshape(B, T, -1, K) for a in made)


def row(turn, size, inside, x, *norm):
    """A pair of [.., H, K/2] from the pair x and the pairs scale and bias, if any.

    turn: cos and sin, [.., 1, K/2]; size: numbers in the pair that count; inside: 1 where they are, beyond them 0.
    """
    total = lambda pair: jnp.sum(pair[0] + pair[1], axis=(-2, -1), keepdims=True)
    if norm:
        mean = total(x) / size
        x = [(a - mean) * inside for a in x]
        over_std = jax.lax.rsqrt(total([a * a for a in x]) / size + 1e-6)
        x = [a * over_std * scale + bias for a, scale, bias in zip(x, *norm, strict=True)]
    (a, b), (cos, sin) = x, turn
    return [a * cos - b * sin, a * sin + b * cos]


def turns(T, half, dtype):
    """cos and sin of the angles, [T, K/2]."""
    angle = jnp.arange(T)[:, None] / 10_000.0 ** (jnp.arange(half)[None] / half)
    return [f(angle).astype(dtype) for f in (jnp.cos, jnp.sin)]


def wide(a):
    """a, which may be rounded, in at least float32."""
    return a.astype(jnp.promote_types(a.dtype, jnp.float32))


def halves(a):
    """[.., 2, K/2] as a pair of [.., K/2]."""
    return [wide(a[..., i, :]) for i in (0, 1)]


@partial(jax.checkpoint, static_argnums=0)
def plain(counts, x, *norms):
    """`heads` in XLA operations. A derivative makes anew what it wants of what lies inside: it takes less memory."""
    (H, G, _), T, half = counts, x.shape[1], x.shape[-1]
    q, k, v = x[:, :, :H], x[:, :, H : H + G], x[:, :, H + G :]
    turn, norms = [a[None, :, None] for a in turns(T, half, wide(x).dtype)], [a[None, None] for a in norms]
    turned = [row(turn, 2 * half * n, 1, *map(halves, a)) for n, a in ((H, (q, *norms[:2])), (G, (k, *norms[2:])))]
    return *(jnp.stack(pair, axis=-2).astype(x.dtype) for pair in turned), v


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def fused(counts, interpret, x, *norms):
    """`heads` by a kernel. interpret: its steps as XLA operations, for a CPU."""
    return tuple(launch(value, counts, interpret, [x], [], of_parts(norms))[0])


@fused.defjvp
def fused_jvp(counts, interpret, at, d):
    def push(at, dx, *dnorms):
        return launch(tangent, counts, interpret, [at[0], dx], [], of_parts(at[1:], dnorms))[0]

    def back(at, *u):
        (x_bar,), norms_bar = launch(cotangent, counts, interpret, [at[0]], u, of_parts(at[1:]), sums=True)
        return x_bar, *norms_bar

    return fused(counts, interpret, *at), tuple(linear(push, back, at, *d))


def of_parts(*norms):
    """Those of q, of k and of v, which has none."""
    return [[a for arrays in norms for a in arrays[i : i + 2]] for i in (0, 2, 4)]


# ---- the kernel ------------------------------------------------------------------------------------------------------
# What it does with a row of q, k or v, f being `row` or, for v, nothing: each makes a row, and rows to be summed up.


def value(f, x, *norm):
    return f(x, *norm), []


def tangent(f, x, dx, *norms):
    n = len(norms) // 2
    return jax.jvp(f, (x, *norms[:n]), (dx, *norms[n:]))[1], []


def cotangent(f, x, u, *norm):
    x_bar, *norm_bar = jax.vjp(f, x, *norm)[1](u)
    return x_bar, norm_bar


def launch(g, counts, interpret, whole, parts, norms, sums=False):
    """What g makes of each row, as q, k, v or, where parts are given, in one array like x; and what it sums up.

    whole: arrays like x; parts: none, or three arrays like q, k, v; norms: for each of the three arrays [its heads, 2,
    K/2]; sums: whether g sums up something like each of these.
    """
    (B, T, _, _, half), rows = whole[0].shape, SUMMED if sums else ROWS
    tall, broad = [pl.next_power_of_2(n) for n in counts], pl.next_power_of_2(half)  # a tile's sides are powers of two
    of_rows = lambda n: pl.BlockSpec((None, rows, n, 2, broad), lambda i, b: (b, i, 0, 0, 0))
    of_norm = lambda n: pl.BlockSpec((n, 2, broad), lambda i, b: (0, 0, 0))
    of_sum = lambda n: pl.BlockSpec((None, None, n, 2, broad), lambda i, b: (i, b, 0, 0, 0))
    angle, joint, split = pl.BlockSpec((rows, broad), lambda i, b: (i, 0)), of_rows(sum(tall)), [*map(of_rows, tall)]
    row_like = lambda n: jax.ShapeDtypeStruct((B, T, n, 2, half), whole[0].dtype)
    out = [(row_like(sum(counts)), joint)] if parts else [*zip(map(row_like, counts), split, strict=True)]
    number, turn = len(out), turns(T, half, wide(whole[0]).dtype)
    for n, padded, arrays in zip(counts, tall, norms, strict=True):
        like_sum = jax.ShapeDtypeStruct((pl.cdiv(T, rows), B, n, 2, half), turn[0].dtype)
        out += [(like_sum, of_sum(padded)) for _ in arrays if sums]
    results = pl.pallas_call(
        partial(positions, g, counts, T, half),
        grid=(pl.cdiv(T, rows), B),
        in_specs=[
            [angle, angle],
            [joint] * len(whole),
            split[: len(parts)],
            [[of_norm(n)] * len(arrays) for n, arrays in zip(tall, norms, strict=True)],
        ],
        out_specs=[spec for _, spec in out],
        out_shape=[shape for shape, _ in out],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=2),
        interpret=interpret,
        name=f"heads_{g.__name__}",
    )(turn, whole, list(parts), norms)
    return results[:number], [jnp.sum(a, axis=(0, 1)) for a in results[number:]]


def positions(g, counts, T, half, turn, whole, parts, norms, *results):
    """The kernel: some positions of one sequence. References to [rows, heads, 2, K/2]; turn's to [rows, K/2]."""
    number = 1 if parts else 3
    sums = iter(results[number:])
    for i, heads in enumerate(counts):
        first = sum(counts[:i])  # of this part's heads in x
        rows = [(ref, first) for ref in whole] + [(ref, 0) for ref in parts[i : i + 1]]
        out = (results[0], first) if parts else (results[i], 0)
        own = [next(sums) for _ in norms[i]] if results[number:] else []
        rows_left = jnp.minimum(turn[0].shape[0], T - turn[0].shape[0] * pl.program_id(0))
        one_part(g, heads, half, rows_left, turn if i < 2 else None, rows, norms[i], out, own)


def one_part(g, heads, half, rows_left, turn, rows, norms, out, sums):
    """What the kernel does with q, k or v; rows, out: a reference, and which of its heads is the first of the part."""
    tall, broad = pl.next_power_of_2(heads), out[0].shape[-1]
    column = jnp.arange(broad) < half
    inside = (jnp.arange(tall) < heads)[:, None] & column[None]
    place = lambda i, ref, first, *at: ref.at[*at, pl.ds(first, tall), pl.ds(i, 1), :]

    def load(*at):
        read = lambda i: triton.load(place(i, *at), mask=inside[:, None], other=0)
        return [wide(jnp.squeeze(read(i), axis=1)) for i in (0, 1)]

    def store(pair, ref, *at):
        for i in (0, 1):
            triton.store(place(i, ref, *at), pair[i].astype(ref.dtype)[:, None], mask=inside[:, None])

    fixed = [load(ref, 0) for ref in norms]

    def position(r, totals):
        f = lambda x: x
        if turn:
            angle = [triton.load(ref.at[r, :], mask=column, other=0)[None] for ref in turn]
            f = partial(row, angle, 2 * heads * half, inside.astype(angle[0].dtype))
        made, more = g(f, *(load(*ref, r) for ref in rows), *fixed)
        store(made, *out, r)
        return jax.tree.map(jnp.add, totals, more)

    zero = jax.tree.map(jnp.zeros_like, fixed[: len(sums)])
    for pair, ref in zip(jax.lax.fori_loop(0, rows_left, position, zero), sums, strict=True):
        store(pair, ref, 0)
