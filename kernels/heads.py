"""Queries, keys and values: one product makes all three, one kernel norms and rotates them.

What the kernel computes for the queries of one position, and with other norms for the keys:

    n = (x - mean) / std ∘ scale + bias          over all heads (QK-norm)
    y[i]       = n[i] cos a - n[i + K/2] sin a   in each head, a = t / 10000^(2i/K) at position t
    y[i + K/2] = n[i] sin a + n[i + K/2] cos a

This is little arithmetic on much memory. XLA goes over the memory several times, with float32
arrays in between. The kernel goes over it once: it holds what belongs to a position in registers,
and does there what `norm_and_rotate` says, or its pushforward, or its pullback. JAX derives both
inside the kernel.

A rotation mixes the two halves of a head. So here a head's width is two axes: an array of rows is
[B, T, heads, 2, K/2], and in registers a row is a pair of tiles [heads, K/2], one for each half.
The rows of queries, keys and values lie one after another in the `joint` array, along its axis of
heads.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import kernels
from kernels import suits, wide
from kernels.derivative import with_derivative

ROWS = 4  # positions that a program goes through, one after another
ROWS_SUMMED = 16  # the same where it also sums up the norms' gradients: fewer sums are left to add
WARPS = 2


def queries_keys_values_kernel(network, p, x):
    """model.queries_keys_values on a GPU, in bfloat16."""
    if not suits(network.dtype, jnp.bfloat16):
        return NotImplemented
    dtype = jnp.dtype(network.dtype)
    B, T, D = x.shape
    K = D // network.n_heads
    w = jnp.concatenate([p["wq"], p["wk"], p["wv"]], axis=1).astype(dtype)
    joint = x.astype(dtype) @ w
    norms = []
    if network.qk_norm:
        norms = [p["q_scale"], p["q_bias"], p["k_scale"], p["k_bias"]]
    head_counts = (network.n_heads, network.n_kv_heads, network.n_kv_heads)
    norms = [in_halves(a, K) for a in norms]
    q, k, v = split_heads(head_counts, in_halves(joint, K), *norms)
    by_heads = (B, T, -1, K)
    return q.reshape(by_heads), k.reshape(by_heads), v.reshape(by_heads)


def in_halves(a, K):
    """[.., heads K] as [.., heads, 2, K/2]."""
    return a.reshape(*a.shape[:-1], -1, 2, K // 2)


def split_heads(head_counts, joint, *norms):
    """Queries, keys and values [B, T, its heads, 2, K/2] of the joint array.

    head_counts: how many heads each of the three has; norms: scale and bias of the queries, then of
    the keys, [its heads, 2, K/2], or nothing.
    """

    def value(joint, *norms):
        rows, _ = launch(value_of_row, head_counts, [joint], [], by_kind(norms))
        return rows

    def prepare(*inputs):
        return value(*inputs), inputs

    def push(inputs, d_joint, *d_norms):
        joint, *norms = inputs
        all_norms = by_kind(norms, d_norms)
        changes, _ = launch(change_of_row, head_counts, [joint, d_joint], [], all_norms)
        return changes

    def pull(inputs, u):
        joint, *norms = inputs
        (joint_bar,), sums = launch(cotangent_of_row, head_counts, [joint], u, by_kind(norms))
        norms_bar = [jnp.sum(a, axis=(0, 1)) for a in jax.tree.leaves(sums)]  # over the programs
        return joint_bar, *norms_bar

    return with_derivative(value, prepare, push, pull)(joint, *norms)


def by_kind(*norms):
    """Lists of scales and biases, split into those of queries, of keys, and of values: none."""
    queries = []
    keys = []
    for arrays in norms:
        queries.extend(arrays[:2])
        keys.extend(arrays[2:])
    return [queries, keys, []]


def angles(T, half, dtype):
    """cos and sin of the angles by which rows are rotated, each [T, K/2]."""
    positions_per_radian = 10_000.0 ** (jnp.arange(half) / half)  # [K/2]
    angle = jnp.arange(T)[:, None] / positions_per_radian[None]
    return [jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)]


# ---- what is done with one row, in registers -----------------------------------------------------


def norm_and_rotate(turn, size, inside, x, scale_and_bias):
    """A row y of queries or keys from a row x; turn: cos and sin, [1, K/2].

    scale_and_bias: two pairs, or nothing. A tile may be larger than what it holds: size counts the
    numbers of the row, and `inside` is 1 where they are and 0 elsewhere.
    """

    def total(pair):
        return jnp.sum(pair[0] + pair[1], axis=(-2, -1), keepdims=True)

    if scale_and_bias:
        scale, bias = scale_and_bias
        mean = total(x) / size
        x = [(a - mean) * inside for a in x]
        variance = total([a * a for a in x]) / size
        over_std = jax.lax.rsqrt(variance + 1e-6)
        x = [a * over_std for a in x]
        x = [a * s + shift for a, s, shift in zip(x, scale, bias, strict=True)]
    first, second = x
    cos, sin = turn
    return [first * cos - second * sin, first * sin + second * cos]


def unchanged(x, norms):
    """What is done with a row of values."""
    return x


# Each takes f, a function of a row and its norms as above; rows; and norms. Each returns a row, and
# a list of what is to be summed up over rows.


def value_of_row(f, rows, norms):
    """f of the row."""
    (x,) = rows
    return f(x, norms), []


def change_of_row(f, rows, norms):
    """The pushforward of f at a row x and norms; their changes stand behind them in the lists."""
    x, dx = rows
    n = len(norms) // 2
    norms, d_norms = norms[:n], norms[n:]
    _, dy = jax.jvp(f, (x, norms), (dx, d_norms))
    return dy, []


def cotangent_of_row(f, rows, norms):
    """The pullback of f at a row x and norms, of u; the norms' cotangents are to be summed up."""
    x, u = rows
    _, pull = jax.vjp(f, x, norms)
    x_bar, norms_bar = pull(u)
    return x_bar, norms_bar


# ---- the grid ------------------------------------------------------------------------------------


def launch(of_row, head_counts, joint_arrays, cotangents, norms):
    """What `of_row` makes of each row of queries, keys and values, and what it sums up.

    joint_arrays: the joint array; for a pushforward its change, too. cotangents: nothing, or, for a
    pullback, an array for each of the three kinds. `of_row` gets a row of all joint arrays and of
    the array of its kind. norms: for each kind, arrays [heads, 2, K/2]. Returns the rows: an array
    for each kind, or, of a pullback, one joint array. Then for each kind a list of sums like its
    norms, [programs, B, heads, 2, K/2], or nothing.
    """
    B, T, n_joint, _, half = joint_arrays[0].shape
    dtype = joint_arrays[0].dtype
    sums_dtype = wide(joint_arrays[0]).dtype
    n_rows = ROWS_SUMMED if cotangents else ROWS
    broad = pl.next_power_of_2(half)
    tall = [pl.next_power_of_2(n) for n in head_counts]
    grid = (pl.cdiv(T, n_rows), B)

    angle_block = pl.BlockSpec((n_rows, broad), lambda i, b: (i, 0))
    # So many heads that the tile of each kind, from its first head on, lies inside the block.
    joint_block = block_of_rows(n_rows, sum(tall), broad)
    blocks = [block_of_rows(n_rows, n, broad) for n in tall]
    if cotangents:
        made = [jax.ShapeDtypeStruct((B, T, n_joint, 2, half), dtype)]
        made_blocks = [joint_block]
        summed = norms
    else:
        made = [jax.ShapeDtypeStruct((B, T, n, 2, half), dtype) for n in head_counts]
        made_blocks = blocks
        summed = [[], [], []]

    def one_for_each_program(a):
        return jax.ShapeDtypeStruct((*grid, *a.shape), sums_dtype)

    sums = jax.tree.map(one_for_each_program, summed)

    return pl.pallas_call(
        partial(positions, of_row, head_counts, T, half),
        grid=grid,
        in_specs=[
            [angle_block, angle_block],
            [joint_block] * len(joint_arrays),
            blocks[: len(cotangents)],
            jax.tree.map(block_of_norm, norms),
        ],
        out_specs=(made_blocks, jax.tree.map(block_of_sum, summed)),
        out_shape=(made, sums),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=2),
        interpret=kernels.INTERPRET,
        name=f"heads_{of_row.__name__}",
    )(angles(T, half, sums_dtype), joint_arrays, list(cotangents), norms)


def block_of_rows(n_rows, n_heads, broad):
    """`n_rows` positions of one sequence."""
    return pl.BlockSpec((None, n_rows, n_heads, 2, broad), lambda i, b: (b, i, 0, 0, 0))


def block_of_norm(a):
    """A scale or a bias [heads, 2, K/2], whole."""
    tall = pl.next_power_of_2(a.shape[0])
    broad = pl.next_power_of_2(a.shape[2])
    return pl.BlockSpec((tall, 2, broad), lambda i, b: (0, 0, 0))


def block_of_sum(a):
    """A program's own sum of arrays like a."""
    tall = pl.next_power_of_2(a.shape[0])
    broad = pl.next_power_of_2(a.shape[2])
    return pl.BlockSpec((None, None, tall, 2, broad), lambda i, b: (i, b, 0, 0, 0))


# ---- the kernel ----------------------------------------------------------------------------------


class Heads(NamedTuple):
    """The heads of one kind in a reference to [rows, heads, 2, K/2] or to [heads, 2, K/2]."""

    ref: Any
    first: int  # index of the first of them
    count: int
    half: int  # K/2

    @property
    def tile(self):
        """The shape of a tile that holds a half of each head."""
        return pl.next_power_of_2(self.count), self.ref.shape[-1]

    def inside(self):
        """A mask of the tile: which of its entries are there."""
        tall, broad = self.tile
        row = jnp.arange(tall) < self.count
        column = jnp.arange(broad) < self.half
        return row[:, None] & column[None]

    def place(self, side, *row):
        """Where the first (side 0) or second halves of a row lie: [heads, 1, K/2]."""
        tall, _ = self.tile
        rows_of_heads = pl.ds(self.first, tall)
        one_side = pl.ds(side, 1)
        return self.ref.at[*row, rows_of_heads, one_side, :]

    def load(self, *row):
        """A row, as a pair; no row is named where the reference has none."""
        mask = self.inside()[:, None]
        pair = []
        for side in (0, 1):
            a = triton.load(self.place(side, *row), mask=mask, other=0)
            pair.append(wide(jnp.squeeze(a, axis=1)))
        return pair

    def store(self, pair, *row):
        """Writes a row."""
        mask = self.inside()[:, None]
        for side in (0, 1):
            a = pair[side].astype(self.ref.dtype)
            triton.store(self.place(side, *row), a[:, None], mask=mask)


def positions(of_row, head_counts, T, half, turn, joint_arrays, cotangents, norms, made, sums):
    """The kernel: n_rows positions of one sequence; all arguments from `turn` on are references."""
    n_rows = turn[0].shape[0]
    rows_left = jnp.minimum(n_rows, T - n_rows * pl.program_id(0))
    turns = [turn, turn, None]  # queries and keys are rotated, values are not
    for kind, count in enumerate(head_counts):
        first = sum(head_counts[:kind])
        inputs = [Heads(ref, first, count, half) for ref in joint_arrays]
        if cotangents:
            inputs.append(Heads(cotangents[kind], 0, count, half))
            output = Heads(made[0], first, count, half)
        else:
            output = Heads(made[kind], 0, count, half)
        kind_norms = [Heads(ref, 0, count, half) for ref in norms[kind]]
        kind_sums = [Heads(ref, 0, count, half) for ref in sums[kind]]
        rows_of_kind(of_row, rows_left, turns[kind], inputs, kind_norms, output, kind_sums)


def rows_of_kind(of_row, rows_left, turn, inputs, norms, output, sums):
    """What a program does with its rows of queries, of keys or of values, one row after another."""
    norm_pairs = [norm.load() for norm in norms]

    def position(r, totals):
        f = unchanged
        if turn:
            f = norm_and_rotate_at(r, turn, output)
        rows = [heads.load(r) for heads in inputs]
        made, more = of_row(f, rows, norm_pairs)
        output.store(made, r)
        return jax.tree.map(jnp.add, totals, more)

    zero = jax.tree.map(jnp.zeros_like, norm_pairs[: len(sums)])
    totals = jax.lax.fori_loop(0, rows_left, position, zero)
    for total, heads in zip(totals, sums, strict=True):
        heads.store(total)


def norm_and_rotate_at(r, turn, heads):
    """`norm_and_rotate` as a function of a row and its norms, at the program's r-th position."""
    column = jnp.arange(heads.tile[1]) < heads.half
    cos_and_sin = []
    for ref in turn:
        cos_and_sin.append(triton.load(ref.at[r, :], mask=column, other=0)[None])
    size = 2 * heads.count * heads.half
    inside = heads.inside().astype(cos_and_sin[0].dtype)
    return partial(norm_and_rotate, cos_and_sin, size, inside)
