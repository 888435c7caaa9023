"""Products and orthonormal columns for SOAP, out of what a GPU is fast at: large matrix products.

A GPU decomposes A = Q R slowly: one column after another, one matrix after another. Here Q comes
from Gram-Schmidt's method by halves, for a whole stack of matrices at once:

    A = [A₁ A₂]     Q₁ of A₁;  then what A₂ has outside of Q₁'s span:  A₂ - Q₁ (Q₁ᵀ A₂);  Q₂ of that

The halves are halved again, down to a few columns X, whose Gram matrix Xᵀ X = L Lᵀ (Cholesky) gives
X L⁻ᵀ, which is orthonormal. Like R's in A = Q R, all these factors are upper triangular with a
positive diagonal, so that this Q is the one of A = Q R, but for the signs of columns.

Rounding spoils Q where columns are nearly dependent. In SOAP they are: a column of F Q that belongs
to a small eigenvalue points into the directions of large ones as soon as these turn a little.
But the columns of the result are further from dependent than A's. So the method is repeated on its
own result: two or three passes are enough, even where A's rank is low up to rounding.
"""

import jax
import jax.numpy as jnp
from jax.lax.linalg import triangular_solve

import kernels

PASSES = 6  # the most of them; two or three are usual
LEAF = 256  # the most columns that Cholesky makes orthonormal at once
FEW = 16  # as many of them may belong to eigenvalues of any size


def product(a, b):
    """a b in float32, with no factor rounded, as it is on a GPU otherwise.

    A GPU is fast at products of bfloat16 factors, which have 8 binary digits. Three of these make a
    float32, and the six largest products of such thirds a product of float32. On an H200 this takes
    half the time of a product in float32 for sides of 3072 (14.3 against 26.9 ms for 24 of them),
    and 0.9 of it for sides of 768. The relative error is 3e-6 and 8e-7 there, against 1e-6 and
    5e-7: tensor cores cut sums off where others round.
    """
    precision = "highest"
    if a.dtype == jnp.float32 and kernels.capable():
        precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6
    return jnp.matmul(a, b, precision=precision)


def orthonormalize(A):
    """Q of A = Q R for each matrix of a stack [n, d, d]; the signs of its columns may be others.

    A matrix whose result is not orthonormal is decomposed by itself, as where columns are zero.
    """

    def goes_on(state):
        passes, departure, _ = state
        return (passes < PASSES) & jnp.any(departure > 0.1)

    def one_more(state):
        passes, _, Q = state
        # Where columns were orthonormal to one digit before a pass, all digits are right after it.
        departure = departure_from_orthonormal(Q)
        return passes + 1, departure, gram_schmidt(Q, departure)

    far = jnp.full(len(A), jnp.inf, A.dtype)
    scaled = A / jnp.max(jnp.abs(A), axis=-2, keepdims=True)  # so that squares are not too small
    _, _, Q = jax.lax.while_loop(goes_on, one_more, (0, far, unit_columns(scaled)))
    bound = 8 * jnp.finfo(A.dtype).eps * A.shape[-1] ** 0.5
    good = departure_from_orthonormal(Q) < bound  # False for NaN

    def decompose_others():
        return jax.lax.map(keep_or_decompose, (good, Q, A))

    return jax.lax.cond(jnp.all(good), lambda: Q, decompose_others)


def keep_or_decompose(matrix):
    """Q where it is good, otherwise that of the decomposition A = Q R; (good, Q, A) of one."""
    good, Q, A = matrix
    return jax.lax.cond(good, lambda: Q, lambda: jnp.linalg.qr(A)[0])


def departure_from_orthonormal(Q):
    """The largest entry of Qᵀ Q z - z for eight z of random signs, for each of a stack [n, d, d].

    It shows what max |Qᵀ Q - I| would, for less than one product of matrices.
    """
    z = jax.random.rademacher(jax.random.key(0), (Q.shape[-1], 8), Q.dtype)
    z = jnp.broadcast_to(z, (len(Q), *z.shape))
    Qz = jnp.matmul(Q, z, precision="highest")
    change = jnp.matmul(Q.mT, Qz, precision="highest") - z
    return jnp.max(jnp.abs(change), axis=(1, 2))


def gram_schmidt(A, departure, start=0):
    """One pass: columns that span what those of A [n, d, k] do, orthonormal up to rounding.

    departure: from orthonormal, of the whole matrices, [n]; start: index of A's first column there.
    Cholesky wants eigenvalues of like size. They fall fastest at first: over columns k to 2 k about
    as far as over k / 2 to k. So the first columns are halved on until they are few.
    """
    k = A.shape[-1]
    if k <= LEAF and (k <= FEW or k <= start):
        return cholesky_qr(A, departure)
    left, right = jnp.split(A, [k // 2], axis=-1)
    left = gram_schmidt(left, departure, start)
    right = right - product(left, product(left.mT, right))
    right = gram_schmidt(right, departure, start + k // 2)
    return jnp.concatenate([left, right], axis=-1)


def cholesky_qr(X, departure):
    """Q of X = Q R by Cholesky's decomposition, for a few columns."""
    X = unit_columns(X)
    G = jnp.matmul(X.mT, X, precision="highest")
    eye = jnp.broadcast_to(jnp.eye(G.shape[-1], dtype=G.dtype), G.shape)
    # As much more as rounding may have taken away, lest G's smallest eigenvalue be negative.
    lost = jnp.minimum(departure, 3) * G.shape[-1] * jnp.finfo(G.dtype).eps
    L = jnp.linalg.cholesky(G + lost[:, None, None] * eye, symmetrize_input=False)
    L_inverse = triangular_solve(L, eye, left_side=True, lower=True)
    return unit_columns(jnp.matmul(X, L_inverse.mT, precision="highest"))


def unit_columns(X):
    """The columns of X, each divided by its norm."""
    return X / jnp.linalg.norm(X, axis=-2, keepdims=True)
