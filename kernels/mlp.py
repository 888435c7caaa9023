"""The MLP on a GPU: what lies between its products is computed again in the pullback, not kept."""

import jax
import jax.numpy as jnp

from kernels.linear import remade


def mlp_kernel(network, p, x):
    """model.mlp in bfloat16."""
    if network.dtype != "bfloat16":
        return NotImplemented
    x = x.astype(jnp.bfloat16)
    names = ("w_up", "w_gate") if network.mlp == "swiglu" else ("w_up",)
    return remade(down)(p["w_down"], *(x @ p[name].astype(jnp.bfloat16) for name in names))


def down(w_down, up, gate=None):
    """What the MLP does with its first products, [B, T, F] -> [B, T, D]."""
    up = up.astype(jnp.float32)
    if gate is None:  # GELU in its tanh form, x (1 + tanh a) / 2 = x σ(2a)
        active = up * jax.nn.sigmoid((8 / jnp.pi) ** 0.5 * (up + 0.044715 * up**3))
    else:
        active = up * jax.nn.silu(gate.astype(jnp.float32))
    return active.astype(jnp.bfloat16) @ w_down.astype(jnp.bfloat16)
