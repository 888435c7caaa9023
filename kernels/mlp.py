"""The MLP: what lies between its products is computed again in the pullback, not kept for it.

Nothing here is written in Pallas. The products are XLA's, and so is what lies between them; it is
[B, T, F], the largest arrays of a block. Between the value and the pullback only the first products
wait in memory.
"""

import jax
import jax.numpy as jnp

from kernels import suits, wide
from kernels.derivative import with_derivative


def mlp_kernel(network, p, x):
    """model.mlp on a GPU, in bfloat16."""
    if not suits(network.dtype, jnp.bfloat16):
        return NotImplemented
    dtype = jnp.dtype(network.dtype)
    x = x.astype(dtype)
    inputs = [p["w_down"], x @ p["w_up"].astype(dtype)]
    if network.mlp == "swiglu":
        inputs.append(x @ p["w_gate"].astype(dtype))
    return recomputed_in_pullback(activate_and_project)(*inputs)


def activate_and_project(w_down, up, gate=None):
    """What the MLP does with its first products, [B, T, F] -> [B, T, D]."""
    dtype = up.dtype
    up = wide(up)
    if gate is None:
        # GELU in its tanh form, x (1 + tanh a) / 2, is x σ(2a). XLA's sigmoid is faster than tanh.
        a2 = (8 / jnp.pi) ** 0.5 * (up + 0.044715 * up**3)
        active = up * jax.nn.sigmoid(a2)
    else:
        active = up * jax.nn.silu(wide(gate))
    return active.astype(dtype) @ w_down.astype(dtype)


def recomputed_in_pullback(f):
    """f(*x), one array, whose pullback computes from x again all that it needs.

    For a pullback this is what jax.checkpoint does: nothing but x waits for it in memory. A
    pushforward comes at once, while what it needs is still there, so it computes nothing again.
    """

    def prepare(*x):
        out, f_push = jax.linearize(f, *x)
        return out, (x, f_push)

    def push(residuals, *dx):
        _, f_push = residuals
        return f_push(*dx)

    def pull(residuals, u):
        x, _ = residuals
        # Without the barrier the compiler would see that it has computed all this, and keep it.
        x = jax.lax.optimization_barrier(x)
        _, f_pull = jax.vjp(f, *x)
        return f_pull(u)

    return with_derivative(f, prepare, push, pull)
