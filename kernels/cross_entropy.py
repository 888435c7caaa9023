"""Cross-entropy and what Gauss-Newton needs of it, row by row of the logits z, y being the labels.

    ℓ = log Σ exp(z) - z[y],     g = ∇ℓ = p - 1_y,     ∇²ℓ v = p ∘ (v - p·v),     p = softmax(z)

Logits are the largest arrays of a step, so on a GPU its time is how often they are read. Written in XLA operations, ℓ,
g·v, ½ v·Hv and g + Hv take about four passes over z and v. `fused` takes two: a program of its kernel sums up one row
(Σ e^z, Σ e^z v, Σ e^z v², by a running maximum), then reads it again and writes g + Hv.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

TILE = 4096  # columns of a row that a program of the kernel sees at a time
WARPS = 8


@jax.custom_jvp
def value(z, y):
    """The loss by the kernel, which reads z once."""
    return fused("value", z, y)[0]


@value.defjvp
def value_jvp(primals, tangents):
    z, y = primals
    g = jax.nn.softmax(z) - jax.nn.one_hot(y, z.shape[1], dtype=z.dtype)
    return value(z, y), jnp.vdot(g, tangents[0])


def cross_entropy_kernel(z, y):
    """model.cross_entropy."""
    return value(z, y) if z.dtype == jnp.float32 else NotImplemented


def loss_and_gradient_kernel(network, z, y):
    """baselines.loss_and_gradient."""
    return fused("gradient", z, y, dtype=jnp.dtype(network.dtype)) if z.dtype == jnp.float32 else NotImplemented


def quadratic_kernel(z, v, y):
    """gn.quadratic."""
    if z.dtype != jnp.float32:
        return NotImplemented
    loss, value, u = fused("quadratic", z, y, v[None])
    return loss, value[0], u[0]


def exact_kernel(z, v, y):
    """gn_prox.exact."""
    if z.dtype != jnp.float32:
        return NotImplemented
    loss, value, u = fused("exact", z, y, v[None])
    return loss, value[0], u[0]


def fused(kind, z, y, v=None, dtype=jnp.float32, interpret=False):
    """ℓ summed over tokens and, but for "value", a function's gradient at each change of the logits.

    z: [c, V] float32; y: int32 [c]; v: [S, c, V], changes of z, each for itself. Returns
      "value":      (ℓ(z),)
      "gradient":   ℓ(z), ∇ℓ(z) [c, V] in `dtype`
      "quadratic":  ℓ(z), ℓ + g·v + ½ v·Hv [S], g + Hv [S, c, V] in the dtype of v
      "exact":      ℓ(z), ℓ(z + v) [S], ∇ℓ(z + v) [S, c, V] in the dtype of v
    """
    (c, V), S = z.shape, 1 if v is None else len(v)
    row = pl.BlockSpec((None, V), lambda s, i: (i, 0))
    change = pl.BlockSpec((None, None, V), lambda s, i: (s, i, 0))
    number = pl.BlockSpec((None, None), lambda s, i: (s, i))
    per_row = jax.ShapeDtypeStruct((S, c), z.dtype)
    like_v = jax.ShapeDtypeStruct((S, c, V), dtype if v is None else v.dtype)
    out = {"value": [per_row], "gradient": [per_row, like_v]}.get(kind, [per_row, per_row, like_v])
    loss, *rest = pl.pallas_call(
        partial(one_row, kind, V),
        grid=(S, c),  # all changes of a row one after another: it may stay in the cache
        in_specs=[row, pl.BlockSpec((None,), lambda s, i: (i,))] + [change] * (v is not None),
        out_specs=[change if len(a.shape) == 3 else number for a in out],
        out_shape=out,
        input_output_aliases={} if v is None else {2: 2},  # the result lies where v lay
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=2),
        interpret=interpret,
        name=f"cross_entropy_{kind}",
    )(z, y, *(() if v is None else (v,)))
    loss = jnp.sum(loss[0])
    if kind in ("value", "gradient"):
        return (loss, *(u[0] for u in rest))
    return loss, jnp.sum(rest[0], axis=1), rest[1]


def add(sums, t, *factors):
    """(m, Σ e^(t-m), Σ e^(t-m) f, ..) of a row, m being the largest t yet, with the t and f of one more tile."""
    m = jnp.maximum(sums[0], jnp.max(t))
    e, old = jnp.exp(t - m), jnp.exp(sums[0] - m)
    return m, *(old * s + jnp.sum(e * f) for s, f in zip(sums[1:], (1.0, *factors), strict=True))


def one_row(kind, V, z, y, *refs):
    """The kernel: one row of z and one change of it. All arguments are references: z, v, u [V], the others a number."""
    v, loss, *out = refs if kind in ("quadratic", "exact") else (None, *refs)
    tiles, zero = pl.cdiv(V, TILE), jnp.zeros((), z.dtype)

    def tile(j):
        """Columns j TILE.. of z and of v, beyond the row -inf and 0; where they are, and which are in the row."""
        place = pl.ds(j * TILE, TILE)
        inside = j * TILE + jnp.arange(TILE) < V
        zj = triton.load(z.at[place], mask=inside, other=-jnp.inf)
        vj = zero if v is None else triton.load(v.at[place], mask=inside, other=0).astype(z.dtype)
        return zj, vj, place, inside

    def gather(j, carry):
        zj, vj, *_ = tile(j)
        if kind == "quadratic":
            return (add(carry[0], zj, vj, vj * vj),)
        return tuple(add(sums, t) for sums, t in zip(carry, (zj, zj + vj), strict=False))

    sums = (zero - jnp.inf, *(3 if kind == "quadratic" else 1) * (zero,))
    carry = jax.lax.fori_loop(0, tiles, gather, (sums,) * (2 if kind == "exact" else 1))
    lse = [m + jnp.log(s) for m, s, *_ in carry]  # of z, and of z + v where the loss is to be exact
    label, mean = y[...], zero
    loss[...] = lse[0] - z[label]
    if kind == "value":
        return
    if kind == "quadratic":
        _, s, a, b = carry[0]
        mean, square = a / s, b / s  # p·v, p·v²
        out[0][...] = loss[...] + mean - v[label].astype(z.dtype) + (square - mean * mean) / 2
    if kind == "exact":
        out[0][...] = lse[1] - z[label] - v[label].astype(z.dtype)

    def write(i, _):
        j = tiles - 1 - i  # what was read last may be in the cache still
        zj, vj, place, inside = tile(j)
        p = jnp.exp((zj + vj if kind == "exact" else zj) - lse[-1])
        p = p * (1 + vj - mean) if kind == "quadratic" else p
        u = p - jnp.where(j * TILE + jnp.arange(TILE) == label, 1.0, 0.0)
        triton.store(out[-1].at[place], u.astype(out[-1].dtype), mask=inside)

    jax.lax.fori_loop(0, tiles, write, None)
