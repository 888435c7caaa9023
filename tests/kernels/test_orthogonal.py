"""Orthonormal columns by Gram-Schmidt's method in halves, and the products that it is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
import soap
from kernels import orthogonal


@pytest.fixture
def small_leaves(monkeypatch):
    """Halves of halves, also of the small matrices here."""
    monkeypatch.setattr(orthogonal, "LEAF", 6)
    monkeypatch.setattr(orthogonal, "FEW", 2)


def compiled():
    """orthonormalize, compiled with the module's constants as they are now."""

    def orthonormalize(A):
        return orthogonal.orthonormalize(A)

    return jax.jit(orthonormalize)


def error(Q):
    """max |QᵀQ - I| in float64."""
    Q = np.asarray(Q, np.float64)
    return abs(Q.mT @ Q - np.eye(Q.shape[-1])).max()


@settings(max_examples=10)
@given(n=st.integers(1, 3), d=st.integers(1, 11), leaf=st.integers(1, 4), seed=st.integers(0, 99))
def test_Q_is_that_of_the_decomposition_but_for_signs(n, d, leaf, seed):
    """NumPy's Q R, in float64; each column of ours has a positive product with that of A."""
    A = np.random.default_rng(seed).normal(size=(n, d, d))
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(orthogonal, "LEAF", leaf)
        patch.setattr(orthogonal, "FEW", 1)
        Q = np.asarray(compiled()(A))
    expected, R = np.linalg.qr(A)
    signs = np.sign(np.diagonal(R, axis1=1, axis2=2))
    np.testing.assert_allclose(Q, expected * signs[:, None], atol=1e-12 * np.linalg.cond(A).max())


def residual(Q, A):
    """The largest |a - Q r| / |a| over columns a of A and r of R, QᵀA's upper triangle; float64."""
    Q = np.asarray(Q, np.float64)
    A = np.asarray(A, np.float64)
    R = np.triu(Q.mT @ A)
    return np.max(np.linalg.norm(A - Q @ R, axis=1) / np.linalg.norm(A, axis=1))


def columns_of_power_iteration(power, rank):
    """F Q, [5, 48, 48], at five updates of SOAP from its first on, the largest eigenvalue first.

    F: the running mean of g gᵀ in float32, for gradients of this rank whose rows fall by a power.
    """
    d = 48
    rng = np.random.default_rng(0)
    turn, _ = np.linalg.qr(rng.normal(size=(d, d)))
    rows = np.arange(1, d + 1)[:, None] ** -power
    F = np.zeros((d, d), np.float32)
    Q = None
    products = []
    for _ in range(6):
        g = (turn @ (rows * rng.normal(size=(d, rank)))).astype(np.float32)
        F = np.float32(0.9) * F + np.float32(0.1) * g @ g.T
        if Q is None:
            Q = np.linalg.eigh(F)[1][:, ::-1]
            continue
        FQ = F @ Q
        FQ = FQ[:, np.argsort(-np.sum(Q * FQ, axis=0))]
        products.append(FQ)
        Q = np.linalg.qr(FQ)[0]
    return np.stack(products)


@pytest.mark.parametrize(
    "power, rank, passes",
    [(1.0, 48, 3), (2.5, 48, 4), (4.0, 48, 4), (1.0, 10, 4), (2.5, 3, 5)],
)
def test_in_float32_Q_is_as_good_as_that_of_the_decomposition(
    small_leaves, monkeypatch, power, rank, passes
):
    """Also where F's condition is beyond float32, and where its rank is low; in few passes.

    Good: its columns are orthonormal, and A is Q R with the upper triangle of R = QᵀA alone.
    """

    def give_up(matrix):
        _, Q, _ = matrix
        return 0 * Q

    monkeypatch.setattr(orthogonal, "keep_or_decompose", give_up)
    monkeypatch.setattr(orthogonal, "PASSES", passes)
    FQ = columns_of_power_iteration(power, rank)
    Q = np.asarray(compiled()(FQ))
    decomposed = np.asarray(jnp.linalg.qr(FQ)[0])
    assert error(Q) < 1.5 * error(decomposed)
    assert residual(Q, FQ) < 1.5 * residual(decomposed, FQ)


def test_condition_numbers_here_are_beyond_those_of_cholesky():
    """That is, the test above is one: F Q's columns, of norm one, are dependent to many digits."""
    FQ = columns_of_power_iteration(2.5, 48).astype(np.float64)
    unit = FQ / np.linalg.norm(FQ, axis=1, keepdims=True)
    assert np.linalg.cond(unit).max() > 1e5


@pytest.mark.parametrize(
    "kind", ["zero", "a zero column", "rank one", "two columns", "equal rows", "tiny", "huge"]
)
def test_a_degenerate_matrix_gets_the_decomposition_and_spoils_no_other(small_leaves, kind):
    A = np.random.default_rng(1).normal(size=(3, 16, 16)).astype(np.float32)
    bad = A[1].copy()
    bad = {
        "zero": 0 * bad,
        "a zero column": bad * (np.arange(16) != 5),
        "rank one": np.ones_like(bad),
        "two columns": np.repeat(bad[:, :2], 8, axis=1),
        "equal rows": np.repeat(bad[:2], 8, axis=0),
        "tiny": 1e-30 * bad,
        "huge": 1e30 * bad,
    }[kind]
    run = compiled()
    alone = np.asarray(run(A[[0, 0, 2]]))
    A[1] = bad
    Q = np.asarray(run(A))
    assert error(Q) < 3e-6
    np.testing.assert_allclose(Q[[0, 2]], alone[[0, 2]], atol=1e-5)
    expected, R = np.linalg.qr(bad)
    sure = abs(np.diag(R)) > 1e-3 * abs(R).max()
    sure = np.cumprod(sure).astype(bool)
    np.testing.assert_allclose(abs(Q[1][:, sure]), abs(expected[:, sure]), atol=1e-4)


def test_a_matrix_with_nan_stays_its_own_affair(small_leaves):
    A = np.random.default_rng(1).normal(size=(2, 16, 16)).astype(np.float32)
    A[1, 3, 4] = np.nan
    Q = np.asarray(compiled()(A))
    assert error(Q[0]) < 3e-6
    assert np.isnan(Q[1]).any()


def test_the_departure_shows_any_two_columns_that_are_not_orthogonal():
    Q = np.repeat(np.linalg.qr(np.random.default_rng(2).normal(size=(1, 9, 9)))[0], 3, axis=0)
    Q[1, :, 7] += 0.25 * Q[1, :, 2]
    Q[2, :, 3] *= 1.25
    found = orthogonal.departure_from_orthonormal(Q.astype(np.float32))
    assert found[0] < 1e-5
    assert found[1] > 0.24
    assert found[2] > 0.24


@pytest.mark.parametrize(
    "dtype, passed, precision",
    [
        ("float32", {orthogonal.product_of_thirds}, "BF16_BF16_F32_X6"),
        ("float32", set(), "HIGHEST"),
        ("float64", {orthogonal.product_of_thirds}, "HIGHEST"),
    ],
)
def test_products_round_no_factor(monkeypatch, dtype, passed, precision):
    """What is asked of the compiler; a CPU computes the same for all of them."""
    monkeypatch.setattr(kernels, "passed", passed)
    a = np.random.default_rng(3).normal(size=(2, 20, 20)).astype(dtype)
    with jax.enable_x64(True):
        program = jax.make_jaxpr(lambda a, b: soap.full_product(a, b))(a, a)  # traced anew
        assert precision in str(program)
        found = soap.full_product(a, a)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, a @ a, atol=1e-5)
