"""Products and orthonormal columns for SOAP, out of what a GPU is fast at: large matrix products.

A GPU decomposes A = Q R slowly: one column after another, one matrix after another. Here Q comes
from Gram-Schmidt's method by halves, for a whole stack of matrices at once:

    A = [A₁ A₂];    Q₁: from A₁;    Q₂: from A₂ - Q₁ (Q₁ᵀ A₂), what A₂ has outside of Q₁'s span
    Q = [Q₁ Q₂]

The halves are halved again, down to a few columns X. Their Gram matrix is Xᵀ X = C Cᵀ (Cholesky),
and X C⁻ᵀ is orthonormal. All steps together are A = Q R, where R is upper triangular with a
positive diagonal. There is only one such Q. Where `jnp.linalg.qr` gives R a negative number there,
a column of its Q has the other sign. SOAP does not mind, as it uses each column twice, or squares
it.

Rounding spoils Q where columns are nearly dependent. In SOAP they are (soap.py): A is F Q₀, a
factor F times its last eigenvectors Q₀, sorted by eigenvalue. As soon as F changes a little, the
columns of small eigenvalues turn towards those of large ones. But the columns of the result are
further from dependent than those of A. So the method is applied to its own result, again and again
(block Gram-Schmidt with shifted Cholesky QR, repeated). Two to four passes are usual; five were
needed for a rank of 3 in 48 dimensions.
"""

import jax
import jax.numpy as jnp
from jax.lax.linalg import triangular_solve

PASSES = 6  # the most of them
LEAF = 256  # the most columns that Cholesky makes orthonormal at once
FEW = 16  # so few columns go to Cholesky wherever they begin


def product_of_thirds(a, b):
    """soap.full_product on a GPU.

    A float32 has 24 binary digits. So it is the sum of three bfloat16, of 8 digits each, which GPUs
    are fast at. Of the nine products of such thirds, the six largest are enough. On an H200, with
    the relative error:

        sides                six products             one in float32
        3072, 24 matrices    14.3 ms, error 3e-6      26.9 ms, error 1e-6
        768, 122 matrices     2.4 ms, error 8e-7       2.6 ms, error 5e-7
    """
    precision = "highest"
    if a.dtype == jnp.float32:
        precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6
    return jnp.matmul(a, b, precision=precision)


def orthonormalize(A):
    """Q of A = Q R for each matrix of a stack [n, d, d]; the signs of its columns may be others.

    Where the result of Gram-Schmidt is not orthonormal (with a column of zeros it is NaN), that
    matrix is decomposed by `jnp.linalg.qr` instead.
    """

    def goes_on(state):
        passes, departure_before, _ = state
        return (passes < PASSES) & jnp.any(departure_before > 0.1)  # False for NaN

    def one_more(state):
        passes, _, Q = state
        # Where columns were orthonormal to one digit before a pass, all digits are right after it.
        departure_before = departure_from_orthonormal(Q)
        return passes + 1, departure_before, gram_schmidt(Q, departure_before)

    far = jnp.full(len(A), jnp.inf, A.dtype)
    scaled = A / jnp.max(jnp.abs(A), axis=-2, keepdims=True)  # or squares may be 0 or infinite
    _, _, Q = jax.lax.while_loop(goes_on, one_more, (0, far, unit_columns(scaled)))
    bound = 8 * jnp.finfo(A.dtype).eps * A.shape[-1] ** 0.5  # as rounding of d numbers adds up
    good = departure_from_orthonormal(Q) < bound  # False for NaN

    def decompose_others():
        return jax.lax.map(keep_or_decompose, (good, Q, A))  # one by one

    return jax.lax.cond(jnp.all(good), lambda: Q, decompose_others)


def keep_or_decompose(one_matrix):
    """Q if that is good, otherwise that of A = Q R; one_matrix: (good, Q, A)."""
    good, Q, A = one_matrix
    return jax.lax.cond(good, lambda: Q, lambda: jnp.linalg.qr(A)[0])


def departure_from_orthonormal(Q):
    """max |E z|, E = Qᵀ Q - I, over eight z of random signs; of each Q of a stack [n, d, d].

    An entry of E z is a sum of ± Eᵢⱼ, so for at least half of the z it is as large as any of them.
    E itself would cost a whole product.
    """
    z = jax.random.rademacher(jax.random.key(0), (Q.shape[-1], 8), Q.dtype)
    z = jnp.broadcast_to(z, (len(Q), *z.shape))
    Qz = jnp.matmul(Q, z, precision="highest")
    change = jnp.matmul(Q.mT, Qz, precision="highest") - z
    return jnp.max(jnp.abs(change), axis=(1, 2))


def gram_schmidt(A, departure, start=0):
    """One pass: columns that span what those of A [n, d, k] do, orthonormal up to rounding.

    departure: that of the whole matrices, of which A has k columns, [n]; start: the number of the
    first of these. SOAP sorts the columns by eigenvalue, and Cholesky is only exact where these
    differ little. They fall like a power of the column's number: from column i to 2 i by about the
    same factor for every i. So k columns that begin at column k or later are alike enough.
    """
    k = A.shape[-1]
    are_alike = k <= start or k <= FEW
    if k <= LEAF and are_alike:
        return cholesky_qr(A, departure)
    left, right = jnp.split(A, [k // 2], axis=-1)
    left = gram_schmidt(left, departure, start)
    right = right - product_of_thirds(left, product_of_thirds(left.mT, right))
    right = gram_schmidt(right, departure, start + k // 2)
    return jnp.concatenate([left, right], axis=-1)


def cholesky_qr(X, departure):
    """Q of X = Q R by Cholesky's decomposition, for a few columns; NaN where that fails."""
    X = unit_columns(X)  # again: what is left of some may be short
    gram = jnp.matmul(X.mT, X, precision="highest")
    eye = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
    # Rounding may make its smallest eigenvalue negative. So a little is added to the diagonal: less
    # where the columns are nearly orthonormal, so that the last pass is exact.
    rounding = gram.shape[-1] * jnp.finfo(gram.dtype).eps
    shift = jnp.minimum(departure, 3) * rounding
    C = jnp.linalg.cholesky(gram + shift[:, None, None] * eye, symmetrize_input=False)
    C_inverse = triangular_solve(C, eye, left_side=True, lower=True)  # a product with it is fast
    return unit_columns(jnp.matmul(X, C_inverse.mT, precision="highest"))


def unit_columns(X):
    """The columns of X, each divided by its norm."""
    return X / jnp.linalg.norm(X, axis=-2, keepdims=True)
