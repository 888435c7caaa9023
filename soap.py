"""SOAP (Vyas et al. 2024): Adam in the eigenbases of Shampoo's factors, as an optax transformation.

    θ - lr Q_L (m' / √v) Q_Rᵀ,     m' = Q_Lᵀ m Q_R,     g' = Q_Lᵀ g Q_R

    g: the gradient of a matrix, [rows, cols];   m, v: running means of g, and of g'²
    L, R: running means of g gᵀ and of gᵀ g, Shampoo's factors (in the code left, right)
    Q_L, Q_R: their eigenvectors. m' and g' are m and g in the eigenbasis
    F: one of the factors; side 0 of a matrix is that of L, its rows, and side 1 that of R

Q_L and Q_R are refreshed by a step of power iteration: the next Q_L is the orthogonal factor of the
QR decomposition of L Q_L. Bias corrections are left out of the formula, and so is the 1e-8 that is
added to √v. Like the other rules (optimizers.py), SOAP also subtracts lr · weight_decay · θ.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from kernels import on_gpu
from kernels.orthogonal import orthonormalize, product_of_thirds
from optimizers import clip_by_norm, in_stacks, is_matrix


class SoapState(NamedTuple):
    """SOAP's state of one parameter, [rows, cols] or a stack [n, rows, cols].

    None in place of a factor and its eigenvectors: that side is not rotated.
    """

    momentum: jax.Array  # m, the running mean of g
    v: jax.Array  # running mean of g'², in the eigenbasis
    factors: tuple  # (L, R)
    Q: tuple  # (Q_L, Q_R), eigenvectors in columns, the largest eigenvalue first


def soap(lr, b1, b2, weight_decay, clip, frequency, largest):
    """SOAP on every matrix, each layer's by itself, and Adam on the rest.

    The first update only decays the matrices and makes the first eigenvectors: see `soap_step`.
    """
    return optax.chain(
        clip_by_norm(clip),
        scale_by_soap(b1, b2, frequency, largest),
        optax.add_decayed_weights(weight_decay, mask=is_matrix),
        optax.scale_by_learning_rate(lr),
    )


def scale_by_soap(b1, b2, frequency, largest):
    """SOAP without a learning rate.

    frequency: updates from one refresh of the eigenvectors to the next (the name is SOAP's);
    largest: a side of a matrix that is longer than this is not rotated.
    """

    def identity(a, d):
        """The first eigenvectors of a side of length d; None if it is not rotated."""
        if d > largest:
            return None
        stack = (*a.shape[:-2], d, d)
        return jnp.broadcast_to(jnp.eye(d, dtype=a.dtype), stack)

    def start(a, rotates):
        Q = (None, None)
        if rotates:
            rows, cols = a.shape[-2:]
            Q = (identity(a, rows), identity(a, cols))
        factors = jax.tree.map(jnp.zeros_like, Q)
        m = jnp.zeros_like(a)
        v = jnp.zeros_like(a)
        return SoapState(m, v, factors, Q)

    def init(params):
        count = jnp.zeros((), jnp.int32)
        return count, jax.tree.map(start, params, is_matrix(params))

    def update(grads, state, params=None):
        n, states = state
        grads, tree = jax.tree.flatten(grads)
        states = tree.flatten_up_to(states)
        steps = []
        for i, g in enumerate(grads):
            step, states[i] = soap_step(b1, b2, n, g, states[i])
            steps.append(step)
        states = refresh(frequency, n, states)
        return tree.unflatten(steps), (n + 1, tree.unflatten(states))

    return optax.GradientTransformation(init, update)


def soap_step(b1, b2, n, g, state):
    """SOAP's step of one parameter, without -lr, and its state before its eigenvectors' refresh.

    g: gradient n = 0, 1, ... As in its authors' code, gradient 0 makes the first eigenvectors and
    no step, and no gradient is rotated by eigenvectors that it had a part in.
    """
    rotated = rotate(g, state.Q)
    m = optax.tree.update_moment(g, state.momentum, b1, 1)
    v = optax.tree.update_moment(rotated, state.v, b2, 2)  # of its square
    m = jnp.where(n == 0, 0, m)  # gradient 0 makes eigenvectors only
    v = jnp.where(n == 0, 0, v)
    # How much all gradients until now weigh in m and v. maximum: no division by zero at n = 0.
    m_weight = 1 - b1 ** jnp.maximum(n, 1)
    v_weight = 1 - b2**n
    in_eigenbasis = rotate(m, state.Q) / (jnp.sqrt(v) + 1e-8)
    step = rotate_back(in_eigenbasis, state.Q)
    step = step * (jnp.sqrt(v_weight) / m_weight)

    left, right = state.factors
    if left is not None:
        left = optax.tree.update_moment(full_product(g, g.mT), left, b2, 1)
    if right is not None:
        right = optax.tree.update_moment(full_product(g.mT, g), right, b2, 1)
    return step, SoapState(m, v, (left, right), state.Q)


@on_gpu(product_of_thirds)
def full_product(a, b):
    """a b, with no factor rounded. (By default a GPU rounds float32 factors to fewer digits.)"""
    return jnp.matmul(a, b, precision="highest")


def rotate(x, Q):
    """Q_Lᵀ x Q_R."""
    Q_L, Q_R = Q
    if Q_L is not None:
        x = full_product(Q_L.mT, x)
    if Q_R is not None:
        x = full_product(x, Q_R)
    return x


def rotate_back(x, Q):
    """Q_L x Q_Rᵀ."""
    return rotate(x, jax.tree.map(jnp.matrix_transpose, Q))


def refresh(frequency, n, states):
    """The states of all parameters after gradient n, with eigenvectors for the next gradient.

    All parameters at once, so that matrices of one size are treated as one stack.
    """
    vs = [state.v for state in states]

    def decompose():
        return in_stacks(eigenvectors, [state.factors for state in states]), vs

    def iterate():
        return power_iteration(states)

    def keep():
        return [state.Q for state in states], vs

    case = jnp.where(n == 0, 0, jnp.where(n % frequency == 0, 1, 2))
    Qs, vs = jax.lax.switch(case, [decompose, iterate, keep])
    refreshed = []
    for state, Q, v in zip(states, Qs, vs, strict=True):
        refreshed.append(state._replace(Q=Q, v=v))
    return refreshed


def power_iteration(states):
    """One step on each side of each parameter: Q <- QR(F Q); lists of the new Q, and of v."""
    products = []
    vs = []
    for state in states:
        FQ, v = multiply_and_sort(state)
        products.append(FQ)
        vs.append(v)
    return in_stacks(orthonormal_columns, products), vs


def multiply_and_sort(state):
    """F Q of both sides of one parameter, the largest eigenvalue first; v in the same order.

    v belongs to the eigenvectors, so it moves with them.
    """
    FQ = [None, None]
    v = state.v
    for side, F in enumerate(state.factors):
        if F is not None:
            Q = state.Q[side]
            unsorted = full_product(F, Q)
            eigenvalues = jnp.sum(Q * unsorted, axis=-2)  # diag(Qᵀ F Q), [.., d]
            largest_first = jnp.argsort(-eigenvalues, axis=-1)
            of_columns = largest_first[..., None, :]
            FQ[side] = jnp.take_along_axis(unsorted, of_columns, axis=-1)
            if side == 0:
                v = jnp.take_along_axis(v, largest_first[..., :, None], axis=-2)
            else:
                v = jnp.take_along_axis(v, of_columns, axis=-1)
    return tuple(FQ), v


@on_gpu(orthonormalize)
def orthonormal_columns(A):
    """Q of the decomposition A = Q R of each matrix of a stack [n, d, d]."""

    def of_one(A):
        Q, _ = jnp.linalg.qr(A)
        return Q

    return jax.lax.map(of_one, A)  # LAPACK in batches hangs on a CPU with few cores


def eigenvectors(F):
    """The eigenvectors of each F of a stack [n, d, d], in columns, the largest eigenvalue first."""

    def of_one(F):
        _, columns = jnp.linalg.eigh(F)  # the smallest eigenvalue first
        return columns[:, ::-1]

    return jax.lax.map(of_one, F)
