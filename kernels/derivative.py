"""A function with a derivative written by hand, in both directions.

JAX derives the pushforward and the pullback of plain operations by itself. It cannot do so for a
kernel, and where it can, another way may take less memory. `jax.custom_jvp` lets a function bring
its own pushforward. JAX makes a pullback by transposing a pushforward, so the pushforward must say
what its transpose is: `linear_call` does.
"""

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, linear_call


def with_derivative(f, prepare, push, pull):
    """The function f of arrays x, with this derivative:

        out, residuals = prepare(*x)    what f returns, and a tree of arrays for the next two
        push(residuals, *dx)            the pushforward: the change of `out` with changes dx of x
        pull(residuals, u)              the pullback, its transpose: a tuple, one array for each x

    jax.jvp and jax.linearize use push, jax.vjp and jax.linear_transpose use pull. The transpose of
    pull is push again. There is no derivative of a derivative, and no jax.vmap of one.
    """

    @jax.custom_jvp
    def differentiable(*x):
        return f(*x)

    def jvp(x, dx):
        out, residuals = prepare(*x)
        # JAX transposes linear_call in all its arguments: it must not see those that do not move.
        moving = {i: d for i, d in enumerate(dx) if not isinstance(d, SymbolicZero)}

        def push_moving(residuals, changes):
            full = []
            for i, d in enumerate(dx):
                zero = jnp.zeros(d.shape, d.dtype)
                full.append(changes.get(i, zero))
            return push(residuals, *full)

        def pull_moving(residuals, u):
            bars = pull(residuals, u)
            return {i: bars[i] for i in moving}

        return out, linear_call(push_moving, pull_moving, residuals, moving)

    differentiable.defjvp(jvp, symbolic_zeros=True)
    return differentiable
