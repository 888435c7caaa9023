"""The kernels of cross-entropy, step by step on a CPU, against the plain functions."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreted import close, interpreted

import baselines
import gn
import gn_prox
import kernels
import model
from kernels import cross_entropy

TILE = 4  # in place of cross_entropy.TILE: a small row has several tiles
NETWORK = model.Config(dtype="float64")
plain_loss = model.cross_entropy.__wrapped__


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    with interpreted() as patch:
        patch.setattr(cross_entropy, "TILE", TILE)
        yield


SHAPES = [(1, 1, 1), (2, 3, TILE - 1), (3, 1, TILE), (2, 3, 3 * TILE + 2)]  # S, c, V
SCALES = [0.1, 3.0, 1e4]  # of logits, and of their changes


@st.composite
def problems(draw):
    """Logits [c, V], changes of them [S, c, V], and labels [c], also in the end columns."""
    S, c, V = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    labels = st.sampled_from([0, V - 1, V // 2])
    y = np.array([draw(labels) for _ in range(c)], np.int32)
    z = draw(st.sampled_from(SCALES)) * rng.normal(size=(c, V))
    v = draw(st.sampled_from(SCALES)) * rng.normal(size=(S, c, V))
    return z, v, y


over_changes = partial(jax.vmap, in_axes=(None, 0, None))  # as layerwise_gn.py calls it


@jax.jit
def by_kernels(z, v, y):
    return {
        "loss": cross_entropy.cross_entropy_kernel(z, y),
        "gradient": cross_entropy.loss_and_gradient_kernel(NETWORK, z, y),
        "quadratic": over_changes(cross_entropy.quadratic_kernel)(z, v, y),
        "exact": over_changes(cross_entropy.exact_kernel)(z, v, y),
    }


@jax.jit
def by_plain_functions(z, v, y):
    quadratic = partial(gn.quadratic.__wrapped__, loss=plain_loss)
    exact = partial(gn_prox.exact.__wrapped__, loss=plain_loss)
    return {
        "loss": plain_loss(z, y),
        "gradient": jax.value_and_grad(plain_loss)(z, y),
        "quadratic": over_changes(quadratic)(z, v, y),
        "exact": over_changes(exact)(z, v, y),
    }


@given(problem=problems())
def test_every_kernel_is_its_plain_function(problem):
    """For rows shorter and longer than a tile, logits of every size, and stacks of changes."""
    z, v, _ = problem
    size = max(abs(z).max(), abs(v).max(), 1)
    got = by_kernels(*problem)
    for name, expected in by_plain_functions(*problem).items():
        tolerance = 1e-12 * (size**2 if "quadratic" in name else size)
        for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(expected), strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("kernel", [cross_entropy.quadratic_kernel, cross_entropy.exact_kernel])
def test_one_change_is_a_stack_of_one(kernel):
    z, v = np.random.default_rng(0).normal(size=(2, 3, TILE + 1))
    y = np.array([0, TILE, 1], np.int32)
    stacked = jax.jit(over_changes(kernel))(z, v[None], y)
    close(jax.jit(kernel)(z, v, y), jax.tree.map(lambda a: a[0], stacked), 1e-12)


def test_the_loss_by_hand():
    """-log p[y] of two rows, p = (1/6, 1/3, 1/2, 0, 0) and five times 1/5: log 2 + log 5."""
    z = np.array([[0, math.log(2), math.log(3), -np.inf, -np.inf], 5 * [7.0]])
    y = np.array([2, 0], np.int32)
    found = cross_entropy.cross_entropy_kernel(z, y)
    also_found, _ = cross_entropy.loss_and_gradient_kernel(NETWORK, z, y)
    np.testing.assert_allclose([found, also_found], math.log(2) + math.log(5), rtol=1e-12)


def test_the_loss_has_its_first_and_second_derivatives():
    rng = np.random.default_rng(0)
    z, dz = rng.normal(size=(2, 4, 2 * TILE + 1))
    y = np.array([0, 2 * TILE, 3, 3], np.int32)

    def all_derivatives(loss):
        def of_z(z):
            return loss(z, y)

        first = jax.jvp(of_z, (z,), (dz,)), jax.value_and_grad(of_z)(z)
        return first, jax.jvp(jax.grad(of_z), (z,), (dz,))

    all_derivatives = jax.jit(all_derivatives, static_argnums=0)
    close(all_derivatives(cross_entropy.cross_entropy_kernel), all_derivatives(plain_loss), 1e-12)


@pytest.mark.parametrize("scale", SCALES)
def test_changes_in_bfloat16_give_gradients_in_bfloat16(scale):
    """They are rounded once, at the end: what a float32 change gives, or its neighbour."""
    S, c, V = SHAPES[-1]
    rng = np.random.default_rng(0)
    z = np.float32(scale * rng.normal(size=(c, V)))
    v = jnp.asarray(scale * rng.normal(size=(S, c, V)), jnp.bfloat16)
    y = np.array([0, V - 1, 3], np.int32)
    low = by_kernels_in_bfloat16(z, v, y)
    high = by_kernels(z, v.astype(jnp.float32), y)
    for name, (*numbers, u) in low.items():
        *exact_numbers, exact_u = high[name]
        assert u.dtype == jnp.bfloat16
        exact_u = np.float32(exact_u)
        distance = abs(np.float32(u) - exact_u)
        assert (distance <= abs(exact_u) / 128 + 1e-30).all()
        for a, b in zip(numbers, exact_numbers, strict=True):
            assert a.dtype == np.float32
            np.testing.assert_allclose(a, b, rtol=1e-5)


@jax.jit
def by_kernels_in_bfloat16(z, v, y):
    network = model.Config(dtype="bfloat16")
    return {
        "gradient": cross_entropy.loss_and_gradient_kernel(network, z, y),
        "quadratic": over_changes(cross_entropy.quadratic_kernel)(z, v, y),
        "exact": over_changes(cross_entropy.exact_kernel)(z, v, y),
    }


@pytest.mark.parametrize("kernel", [cross_entropy.quadratic_kernel, cross_entropy.exact_kernel])
def test_a_stack_of_changes_is_one_call_that_reads_a_row_of_logits_for_all(kernel):
    """The first axis of the grid, which runs fastest, goes over the changes. z is not copied."""
    S, c, V = 3, 2, 5
    z = np.zeros((c, V))
    v = np.zeros((S, c, V))
    program = jax.make_jaxpr(over_changes(kernel))(z, v, np.zeros(c, np.int32))
    (call,) = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "pallas_call"]
    assert call.params["grid_mapping"].grid == (S, c)
    assert not call.params["grid_mapping"].vmapped_dims
    assert [a.aval.shape for a in call.invars] == [(c, V), (c,), (S, c, V)]


def equations(jaxpr):
    """All equations of a program, but for those inside a kernel."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "pallas_call":
            for inner in jax.tree.leaves(list(eqn.params.values())):
                if hasattr(inner, "jaxpr"):
                    yield from equations(inner.jaxpr)


def test_no_other_argument_is_stacked():
    z = np.zeros((2, 3, 5))
    y = np.zeros(3, np.int32)
    with pytest.raises(NotImplementedError, match="only the changes"):
        jax.vmap(cross_entropy.quadratic_kernel, in_axes=(0, 0, None))(z, z, y)


@pytest.mark.parametrize("objective", [gn.quadratic, gn_prox.exact])
def test_another_loss_is_never_the_kernels(objective):
    """Half of the squares: the kernel knows cross-entropy only."""
    z, v = np.random.default_rng(0).normal(size=(2, 3, 5))
    y = np.zeros(3, np.int32)

    def half_squares(z, y):
        return jnp.sum(z * z) / 2

    loss, value, u = objective(z, v, y, loss=half_squares)
    np.testing.assert_allclose(loss, (z * z).sum() / 2, rtol=1e-12)
    np.testing.assert_allclose(value, ((z + v) ** 2).sum() / 2, rtol=1e-12)
    np.testing.assert_allclose(u, z + v, rtol=1e-12)


def test_the_kernels_take_float32(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", False)
    y = np.zeros(1, np.int32)
    for dtype in (np.float64, jnp.bfloat16):
        z = np.zeros((1, 2), dtype)
        assert cross_entropy.cross_entropy_kernel(z, y) is NotImplemented
        assert cross_entropy.loss_and_gradient_kernel(NETWORK, z, y) is NotImplemented
        assert cross_entropy.quadratic_kernel(z, z, y) is NotImplemented
        assert cross_entropy.exact_kernel(z, z, y) is NotImplemented


def test_the_plain_loss_and_gradient_is_the_kernels():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4, 2 * TILE + 1))
    y = np.array([0, 2 * TILE, 3, 3], np.int32)
    expected = baselines.loss_and_gradient.__wrapped__(NETWORK, z, y)
    close(cross_entropy.loss_and_gradient_kernel(NETWORK, z, y), expected, 1e-12)
