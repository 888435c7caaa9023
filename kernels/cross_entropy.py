"""Cross-entropy and what Gauss-Newton needs of it, row by row of the logits.

For one token: z [V] its logits, y its label, v [V] a change of z, and p = softmax(z),

    ℓ = log Σ exp(z) - z[y]       the loss
    g = p - 1_y                   its gradient; 1_y is 1 at the label and 0 elsewhere
    H v = p ∘ (v - p·v)           its curvature times v

Logits are the largest arrays of a step, so time is how often they are read. Plain operations read z
and v about four times to make ℓ, g·v, ½ v·Hv and g + H v. A kernel reads them twice. A program
first adds up a row, tile by tile: Σ e^z, Σ e^z v and Σ e^z v². Then it goes over the row again and
writes g + H v.
"""

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import kernels
from kernels import suits

TILE = 4096  # columns of a row that a program sees at a time
WARPS = 8  # groups of 32 threads that share a program's work


# ---- what takes the place of a function ----------------------------------------------------------


def cross_entropy_kernel(z, y):
    """model.cross_entropy on a GPU, of float32 logits."""
    if not suits(z.dtype, jnp.float32):
        return NotImplemented
    return differentiable_loss(z, y)


@jax.custom_jvp
def differentiable_loss(z, y):
    """The loss by the kernel, its derivatives of any order by plain operations."""
    (losses,) = for_rows(loss_of_row, z, y, [per_row(z)])
    return jnp.sum(losses)


@differentiable_loss.defjvp
def differentiable_loss_jvp(primals, tangents):
    z, y = primals
    dz, _ = tangents
    g = jax.nn.softmax(z) - jax.nn.one_hot(y, z.shape[1], dtype=z.dtype)
    return differentiable_loss(z, y), jnp.vdot(g, dz)


def loss_and_gradient_kernel(network, z, y):
    """baselines.loss_and_gradient on a GPU, of float32 logits."""
    if not suits(z.dtype, jnp.float32):
        return NotImplemented
    g_like = jax.ShapeDtypeStruct(z.shape, jnp.dtype(network.dtype))
    losses, g = for_rows(gradient_of_row, z, y, [per_row(z), g_like])
    return jnp.sum(losses), g


def quadratic_kernel(z, v, y):
    """gn.quadratic on a GPU, of float32 logits. g + H v has the dtype and the memory of v."""
    if not suits(z.dtype, jnp.float32):
        return NotImplemented
    return quadratic_of_change(z, v, y)


def exact_kernel(z, v, y):
    """gn_prox.exact on a GPU, of float32 logits. ∇ℓ(z + v) has the dtype and the memory of v."""
    if not suits(z.dtype, jnp.float32):
        return NotImplemented
    return exact_of_change(z, v, y)


# ---- the programs: one row each ------------------------------------------------------------------
# Arguments are references: z, v, and the result g or u show a row, [V]; y and the others a number.


def loss_of_row(z, y, loss):
    """ℓ."""
    loss[...] = log_sum_exp_of_row(z) - z[y[...]]


def gradient_of_row(z, y, loss, g):
    """ℓ and g = p - 1_y."""
    lse = log_sum_exp_of_row(z)
    label = y[...]
    loss[...] = lse - z[label]

    def probabilities(j):
        return jnp.exp(read(z, j, -jnp.inf) - lse)

    write_less_one(g, label, probabilities)


def quadratic_of_row(z, y, v, loss, value, u):
    """ℓ, ℓ + g·v + ½ v·Hv, and u = g + H v = p ∘ (1 + v - p·v) - 1_y."""

    def gather(j, sums):
        vj = read(v, j, 0).astype(z.dtype)
        return add_tile(sums, read(z, j, -jnp.inf), vj, vj * vj)

    sums = jax.lax.fori_loop(0, tiles(z), gather, no_sums(z, 3))
    lse = log_sum_exp(sums)
    _, total, total_v, total_vv = sums
    mean = total_v / total  # p·v
    mean_square = total_vv / total  # p·v²
    label = y[...]
    ell = lse - z[label]
    slope = mean - v[label].astype(z.dtype)  # g·v
    curvature = mean_square - mean * mean  # v·Hv
    loss[...] = ell
    value[...] = ell + slope + curvature / 2

    def probabilities_and_change(j):
        p = jnp.exp(read(z, j, -jnp.inf) - lse)
        return p * (1 + read(v, j, 0).astype(z.dtype) - mean)

    write_less_one(u, label, probabilities_and_change)


def exact_of_row(z, y, v, loss, value, u):
    """ℓ(z), ℓ(z + v), and u = ∇ℓ(z + v)."""

    def gather(j, sums):
        of_z, of_changed = sums
        zj = read(z, j, -jnp.inf)
        vj = read(v, j, 0).astype(z.dtype)
        return add_tile(of_z, zj), add_tile(of_changed, zj + vj)

    zero = no_sums(z, 1)
    of_z, of_changed = jax.lax.fori_loop(0, tiles(z), gather, (zero, zero))
    lse = log_sum_exp(of_changed)
    label = y[...]
    loss[...] = log_sum_exp(of_z) - z[label]
    value[...] = lse - z[label] - v[label].astype(z.dtype)

    def probabilities(j):
        changed = read(z, j, -jnp.inf) + read(v, j, 0).astype(z.dtype)
        return jnp.exp(changed - lse)

    write_less_one(u, label, probabilities)


# ---- what they share -----------------------------------------------------------------------------


def tiles(row):
    """How many tiles a row has; the last one may reach beyond it."""
    return pl.cdiv(row.shape[0], TILE)


def columns(j):
    """The columns of tile j, [TILE]."""
    return j * TILE + jnp.arange(TILE)


def inside(row, j):
    """A mask of tile j, [TILE]: which columns the row has."""
    return columns(j) < row.shape[0]


def place(row, j):
    """Tile j in memory."""
    return row.at[pl.ds(j * TILE, TILE)]


def read(row, j, beyond):
    """Tile j of a row, [TILE]; what lies beyond the row is `beyond`."""
    return triton.load(place(row, j), mask=inside(row, j), other=beyond)


def no_sums(row, n):
    """The sums of no tile, as `add_tile` has them: the largest number yet, -∞, then n zeros."""
    zero = jnp.zeros((), row.dtype)
    return (zero - jnp.inf, *[zero] * n)


def add_tile(sums, t, *factors):
    """(m, Σ e^(t-m), Σ e^(t-m) f, ..) of a row, with the t and the factors f of one more tile.

    m is the largest t so far: so e^(t-m) does not overflow. Where m grows, the sums shrink with it.
    """
    m_before, *sums_before = sums
    m = jnp.maximum(m_before, jnp.max(t))
    e = jnp.exp(t - m)
    shrink = jnp.exp(m_before - m)
    result = [m]
    for before, f in zip(sums_before, (1.0, *factors), strict=True):
        result.append(shrink * before + jnp.sum(e * f))
    return tuple(result)


def log_sum_exp(sums):
    """log Σ e^t from the sums of a whole row."""
    m, total, *_ = sums
    return m + jnp.log(total)


def log_sum_exp_of_row(z):
    """log Σ e^z, reading the row once."""

    def gather(j, sums):
        return add_tile(sums, read(z, j, -jnp.inf))

    sums = jax.lax.fori_loop(0, tiles(z), gather, no_sums(z, 1))
    return log_sum_exp(sums)


def write_less_one(row, label, values):
    """Writes values(j), [TILE], to each tile j of a row, less 1 at the label."""
    n = tiles(row)

    def write(i, _):
        j = n - 1 - i  # backwards: what was read last may still be in the cache
        one = jnp.where(columns(j) == label, 1.0, 0.0)
        u = (values(j) - one).astype(row.dtype)
        triton.store(place(row, j), u, mask=inside(row, j))

    jax.lax.fori_loop(0, n, write, None)


# ---- the grids -----------------------------------------------------------------------------------


def per_row(z, *stack):
    """The shape of an array with a number for each row of z, or one for each in a stack."""
    return jax.ShapeDtypeStruct((*stack, z.shape[0]), z.dtype)


def pallas_options(kernel):
    """What all calls have in common."""
    return {
        "compiler_params": triton.CompilerParams(num_warps=WARPS, num_stages=2),
        "interpret": kernels.INTERPRET,
        "name": f"cross_entropy_{kernel.__name__}",
    }


def for_rows(kernel, z, y, out):
    """The kernel's results, shaped as `out` says, for all rows of z [c, V] with labels y [c]."""
    c, V = z.shape
    row = pl.BlockSpec((None, V), lambda i: (i, 0))
    number = pl.BlockSpec((None,), lambda i: (i,))
    return pl.pallas_call(
        kernel,
        grid=(c,),
        in_specs=[row, number],
        out_specs=[row if a.shape == z.shape else number for a in out],
        out_shape=out,
        **pallas_options(kernel),
    )(z, y)


def for_rows_and_changes(kernel, z, v, y):
    """The kernel's results for all rows of z [c, V] and of a stack of changes v [S, c, V].

    Returns the losses and the values, each summed over rows, [S], and u [S, c, V].
    """
    S, c, V = v.shape
    row = pl.BlockSpec((None, V), lambda s, i: (i, 0))
    label = pl.BlockSpec((None,), lambda s, i: (i,))
    change = pl.BlockSpec((None, None, V), lambda s, i: (s, i, 0))
    number = pl.BlockSpec((None, None), lambda s, i: (s, i))
    losses, values, u = pl.pallas_call(
        kernel,
        grid=(S, c),  # the first axis runs fastest: all changes of a row find it in the cache
        in_specs=[row, label, change],
        out_specs=[number, number, change],
        out_shape=[per_row(z, S), per_row(z, S), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        input_output_aliases={2: 2},  # u lies where v lay
        **pallas_options(kernel),
    )(z, y, v)
    return jnp.sum(losses, axis=1), jnp.sum(values, axis=1), u


def for_a_change(kernel):
    """The kernel as a function of z [c, V], one change v [c, V] and y [c]; of a stack by jax.vmap.

    By itself Pallas would add a slowest axis to the grid. Programs would go through all rows for
    the first change, then through all rows for the second, and read z from memory each time.
    """

    @custom_vmap
    def of_change(z, v, y):
        loss, value, u = for_rows_and_changes(kernel, z, v[None], y)
        return loss[0], value[0], u[0]

    @of_change.def_vmap
    def of_stack(size, stacked, z, v, y):
        if stacked != [False, True, False]:
            raise NotImplementedError("only the changes of the logits can be stacked by jax.vmap")
        return for_rows_and_changes(kernel, z, v, y), (True, True, True)

    return of_change


quadratic_of_change = for_a_change(quadratic_of_row)
exact_of_change = for_a_change(exact_of_row)
