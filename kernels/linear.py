"""A linear function that brings its own transpose, where JAX cannot derive one, or not the fast one.

`linear(f, transpose, residuals, *x)` is f(residuals, *x), linear in the x, whose transpose is transpose(residuals, *u),
whose transpose is f again. With a jax.custom_jvp around it a function gets a pushforward and a pullback by hand:
jax.jvp and jax.linearize meet the one, jax.vjp and jax.linear_transpose the other, jax.vmap goes over a stack of x.
`remade` uses it so that a pullback, and only that, computes again what it needs.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def linear(f, transpose, residuals, *x):
    """f(residuals, *x), a tuple of arrays. residuals: a tree of arrays; transpose(residuals, *u): a tuple like x."""
    leaves, tree = jax.tree.flatten(residuals)
    return linear_p.bind(*leaves, *x, f=f, transpose=transpose, tree=tree)


def remade(f):
    """f(*x), one array, whose pullback makes anew from x all that it needs; its pushforward takes what is there.

    For a pullback it is jax.checkpoint, so that nothing but x waits for it in memory; a pushforward comes at once.
    """

    @jax.custom_jvp
    def same(*x):
        return f(*x)

    @same.defjvp
    def same_jvp(x, d):
        out, push = jax.linearize(f, *x)
        back = lambda residuals, u: jax.vjp(f, *jax.lax.optimization_barrier(residuals[0]))[1](u)
        return out, linear(lambda residuals, *d: (residuals[1](*d),), back, (x, push), *d)[0]

    return same


linear_p = Primitive("linear_with_transpose")  # (the residuals' leaves, x..) -> f(residuals, *x)
linear_p.multiple_results = True


def call(*args, f, transpose, tree):
    """What linear_p computes."""
    n = tree.num_leaves
    return f(jax.tree.unflatten(tree, args[:n]), *args[n:])


def shapes(*args, **params):
    """Of what it returns."""
    return [jax.core.ShapedArray(a.shape, a.dtype) for a in jax.eval_shape(partial(call, **params), *args)]


def transposed(u, *args, f, transpose, tree):
    """The same primitive with f and transpose exchanged; nothing for the residuals."""
    n = tree.num_leaves
    back = linear_p.bind(*args[:n], *map(ad.instantiate_zeros, u), f=transpose, transpose=f, tree=tree)
    return [None] * n + list(back)


def pushed(primals, tangents, **params):
    """A derivative of the function itself, for second ones: as JAX derives it."""
    return jax.jvp(partial(call, **params), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def batched(args, dims, **params):
    """One after another: each fills the device."""
    stacked = [jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True) if d is not None]

    def one(part):
        part = iter(part)
        return linear_p.bind(*(a if d is None else next(part) for a, d in zip(args, dims, strict=True)), **params)

    out = jax.lax.map(one, stacked)
    return out, [0] * len(out)


linear_p.def_impl(call)
linear_p.def_abstract_eval(shapes)
mlir.register_lowering(linear_p, mlir.lower_fun(call, multiple_results=True))
ad.primitive_jvps[linear_p] = pushed
ad.primitive_transposes[linear_p] = transposed
batching.primitive_batchers[linear_p] = batched
