"""SOAP (Vyas et al. 2024; a baseline of Section 5): Adam in the eigenbasis of Shampoo's factors.

    L <- b2 L + (1 - b2) GGᵀ,   R <- b2 R + (1 - b2) GᵀG        Shampoo's factors of a gradient G [m, n]
    Q_L, Q_R: their eigenvectors, refreshed by a step of power iteration: Q <- QR(L Q)
    g = Q_Lᵀ G Q_R;   m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g²;   θ <- θ - lr Q_L (m / sqrt(v)) Q_Rᵀ
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Rotated(NamedTuple):
    """SOAP's state of one parameter, [m, n] or a stack [L, m, n]. None: that side keeps the identity."""

    m: jax.Array  # first moment, in the eigenbasis
    v: jax.Array  # second moment, in the eigenbasis
    factors: tuple  # Shampoo's (GGᵀ [.., m, m], GᵀG [.., n, n]), running means
    Q: tuple  # their eigenvectors (Q_L, Q_R), in columns by falling eigenvalue


product = partial(jnp.matmul, precision="highest")  # full float32 also on a GPU, or Q loses its orthogonality


def each(f, a):
    """f of a matrix, or of each of a stack: one by one, for batches of LAPACK calls hang on a CPU of few cores."""
    return f(a) if a.ndim == 2 else jax.lax.map(f, a)


def rotate(x, Q):
    """Q_Lᵀ x Q_R; its inverse is `rotate` with the transposes."""
    left, right = Q
    x = x if left is None else product(left.mT, x)
    return x if right is None else product(x, right)


def power_iteration(Q, v, factors):
    """One step of it, Q <- QR(F Q), columns by falling eigenvalue; v is reordered as the columns are."""
    Q = list(Q)
    for side, F in enumerate(factors):
        if F is not None:
            FQ = product(F, Q[side])
            order = jnp.argsort(-jnp.sum(Q[side] * FQ, axis=-2), axis=-1)  # by diag QᵀFQ, the eigenvalues, [.., d]
            Q[side] = each(lambda A: jnp.linalg.qr(A)[0], jnp.take_along_axis(FQ, order[..., None, :], axis=-1))
            v = jnp.take_along_axis(v, jnp.expand_dims(order, -1 - side), axis=side - 2)
    return tuple(Q), v


def step(b1, b2, frequency, n, G, s):
    """SOAP's update of one parameter, without -lr, and its next state; G is gradient number n = 0, 1, ..

    As in its authors' code, gradient 0 gives the first basis and no step, and no gradient is rotated by a basis that it
    had a part in.
    """
    back = lambda x: rotate(x, jax.tree.map(jnp.matrix_transpose, s.Q))
    g = rotate(G, s.Q)
    m, v = (jnp.where(n == 0, 0, a) for a in (b1 * s.m + (1 - b1) * g, b2 * s.v + (1 - b2) * g * g))
    unbiased = jnp.sqrt(1 - b2**n) / (1 - b1 ** jnp.maximum(n, 1))
    move = unbiased * back(m / (jnp.sqrt(v) + 1e-8))
    gram = lambda side: product(G, G.mT) if side == 0 else product(G.mT, G)
    factors = tuple(F if F is None else b2 * F + (1 - b2) * gram(side) for side, F in enumerate(s.factors))
    falling = lambda F: jnp.linalg.eigh(F)[1][:, ::-1]
    eigenvectors = lambda: (jax.tree.map(partial(each, falling), factors), v)
    refresh = lambda: jax.lax.cond(n % frequency == 0, lambda: power_iteration(s.Q, v, factors), lambda: (s.Q, v))
    Q, v = jax.lax.cond(n == 0, eigenvectors, refresh)
    return move, Rotated(rotate(back(m), Q), v, factors, Q)  # the first moment is carried into the new basis


def scale_by_soap(b1, b2, frequency, largest, matrices):
    """SOAP without learning rate, as an optax transformation.

    b1, b2: decay of the first moment, and of the second moment and the factors, per update; frequency: updates between
    two refreshes of the bases; largest: a longer side keeps the identity; matrices(params): a tree, True where a
    parameter is a matrix, [m, n] or a stack of them, each of which has its own bases, and False where it gets Adam.
    """

    def start(a, matrix):
        sides = a.shape[-2:] if matrix else (largest + 1, largest + 1)
        eye = lambda d: jnp.broadcast_to(jnp.eye(d, dtype=a.dtype), (*a.shape[:-2], d, d))
        Q = tuple(eye(d) if d <= largest else None for d in sides)
        return Rotated(jnp.zeros_like(a), jnp.zeros_like(a), jax.tree.map(jnp.zeros_like, Q), Q)

    def init(params):
        return jnp.zeros((), jnp.int32), jax.tree.map(start, params, matrices(params))

    def update(grads, state, params=None):
        n, states = state
        pairs = jax.tree.map(partial(step, b1, b2, frequency, n), grads, states)
        moves, states = (jax.tree.map(lambda _, pair, i=i: pair[i], grads, pairs) for i in (0, 1))
        return moves, (n + 1, states)

    return optax.GradientTransformation(init, update)
