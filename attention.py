"""Exact causal attention, differentiable in all three directions.

    s = q kᵀ / sqrt(K),  s[i, j] = -inf for j > i;   p = softmax(s);   o = p v

Gauss-Newton asks for more than backpropagation does: the value (primal), the change of the value with the
inputs (pushforward, J v) and the change of the inputs with the value (pullback, Jᵀ u). Written in plain XLA operations,
as here, it has all of them.
"""

import jax
import jax.numpy as jnp


def attention(q, k, v):
    """Causal softmax attention with grouped-query heads.

    q: [B, T, H, K]; k, v: [B, T, G, K], where G divides H and query head h reads key-value head h // (H / G).
    Returns [B, T, H, K] in the dtype of v. Scores and softmax are at least float32.
    """
    B, T, H, K = q.shape
    G = k.shape[2]
    q = q.reshape(B, T, G, H // G, K)
    s = jnp.einsum("btgrk,bsgk->bgrts", q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
    causal = jnp.arange(T)[:, None] >= jnp.arange(T)[None]  # [T, T]: position t reads s <= t
    p = jax.nn.softmax(jnp.where(causal[None, None, None], s / K**0.5, -jnp.inf), axis=-1)
    return jnp.einsum("bgrts,bsgk->btgrk", p.astype(v.dtype), v).reshape(B, T, H, K)
