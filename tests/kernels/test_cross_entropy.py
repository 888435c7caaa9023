"""The kernel of cross-entropy, its steps as XLA operations, against JAX's derivatives of the plain formula."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOY, random_params, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

import gn
import gn_prox
import layerwise_gn
import model
from kernels import cross_entropy

TILE = 4  # in place of cross_entropy.TILE: a small row has several tiles
KERNEL = partial(cross_entropy.fused, interpret=True)
plain = cross_entropy.cross_entropy


@pytest.fixture(autouse=True, scope="module")
def in_float64_and_small_tiles():
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(cross_entropy, "TILE", TILE)
        yield


SHAPES = [(1, 1, 1), (2, 3, 2), (1, 2, TILE - 1), (3, 1, TILE)]  # S, c, V
SHAPES += [(1, 4, TILE + 1), (2, 2, 2 * TILE), (1, 3, 3 * TILE + 2)]
KINDS = ("value", "gradient", "quadratic", "exact")
SCALES = [0.1, 3.0, 1e4]  # of logits, and of their changes


@st.composite
def problems(draw):
    """Logits [c, V], labels [c], among them the first and the last column, and changes of the logits [S, c, V]."""
    S, c, V = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    y = np.array([draw(st.sampled_from([0, V - 1, V // 2])) for _ in range(c)], np.int32)
    z, v = draw(st.sampled_from(SCALES)) * rng.normal(size=(c, V)), rng.normal(size=(S, c, V))
    return z, y, draw(st.sampled_from(SCALES)) * v


@jax.jit
def by_kernel(z, y, v):
    kinds = [KERNEL("value", z, y), KERNEL("gradient", z, y, dtype=z.dtype)]
    return *kinds, KERNEL("quadratic", z, y, v), KERNEL("exact", z, y, v)


@jax.jit
def by_formula(z, y, v):
    """ℓ;  ℓ, g;  ℓ, ℓ + g·v + ½ v·Hv, g + Hv for each v;  ℓ, ℓ(z + v), ∇ℓ(z + v) for each v; all by JAX."""
    ell = lambda z: plain(z, y)
    loss, g = jax.value_and_grad(ell)(z)
    quadratic, exact = [], []
    for one in v:
        _, Hv = jax.jvp(jax.grad(ell), (z,), (one,))
        quadratic.append((loss + jnp.vdot(g, one) + jnp.vdot(one, Hv) / 2, g + Hv))
        exact.append(jax.value_and_grad(ell)(z + one))
    stack = lambda rows: jax.tree.map(lambda *a: jnp.stack(a), *rows)
    return (loss,), (loss, g), (loss, *stack(quadratic)), (loss, *stack(exact))


@given(x=problems())
def test_every_kind_is_its_formula(x):
    """Value, gradient, quadratic and exact, for rows shorter and longer than a tile, logits of every size."""
    z, y, v = x
    size = max(abs(z).max(), abs(v).max(), 1)
    for kind, got, expected in zip(KINDS, by_kernel(*x), by_formula(*x), strict=True):
        assert len(got) == len(expected) and all(np.isfinite(a).all() for a in got)
        error = 1e-12 * (size**2 if kind == "quadratic" else size)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=error, err_msg=kind)


def test_value_by_hand():
    """-log p[y] of two rows, p = (1/6, 1/3, 1/2) and five times 1/5: log 2 + log 5."""
    z, y = np.array([[0, math.log(2), math.log(3), -np.inf, -np.inf], 5 * [7.0]]), np.array([2, 0], np.int32)
    for value in (KERNEL("value", z, y)[0], KERNEL("gradient", z, y)[0], plain(z, y)):
        np.testing.assert_allclose(value, math.log(2) + math.log(5), rtol=1e-12)


@settings(max_examples=20)
@given(x=problems())
def test_changes_in_bfloat16_give_gradients_in_bfloat16(x):
    """Rounded once, at the end: what a float32 v gives, to the last bit or its neighbour; the values stay float32."""
    z, y, v = np.float32(x[0]), x[1], jnp.asarray(x[2], jnp.bfloat16)
    got, exact = narrow(z, y, v), by_kernel(z, y, v.astype(jnp.float32))
    for one, other in zip(got, exact[1:], strict=True):
        assert one[-1].dtype == jnp.bfloat16 and {a.dtype for a in one[:-1]} == {np.dtype(np.float32)}
        bound = abs(np.asarray(other[-1])) / 128 + 1e-30
        assert (abs(np.asarray(one[-1].astype(jnp.float32) - other[-1])) <= bound).all()
        for a, b in zip(one[:-1], other[:-1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


@jax.jit
def narrow(z, y, v):
    return KERNEL("gradient", z, y, dtype=v.dtype), KERNEL("quadratic", z, y, v), KERNEL("exact", z, y, v)


class Use:
    """Whether the kernel is the way to go, in all modules that ask, and the kinds that were called."""

    def __init__(self, patch, usable):
        self.kinds = []
        for module in (cross_entropy, gn, gn_prox):
            patch.setattr(module, "usable", lambda z: usable)
            patch.setattr(module, "fused", self.fused)

    def fused(self, kind, *args, **named):
        self.kinds.append(kind)
        return KERNEL(kind, *args, **named)


@pytest.mark.parametrize("usable", [False, True])
def test_value_has_the_derivatives_of_cross_entropy(monkeypatch, usable):
    """First and second, by jvp, grad and jvp of grad; the kernel, where it is used, gives the value."""
    use, rng = Use(monkeypatch, usable), np.random.default_rng(0)
    z, d, e = rng.normal(size=(3, 4, 2 * TILE + 1))
    y = np.array([0, 2 * TILE, 3, 3], np.int32)

    def everything(f):
        g = lambda z: f(z, y)
        return g(z), jax.jvp(g, (z,), (d,)), jax.value_and_grad(g)(z), jax.jvp(jax.grad(g), (z,), (e,))

    ours = everything(cross_entropy.value)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14), ours, everything(plain))
    assert use.kinds == (["value"] if usable else [])


@pytest.mark.parametrize("usable", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.bfloat16])
def test_gradient_is_value_and_grad(monkeypatch, usable, dtype):
    """On a CPU exactly, whatever dtype is asked for; by the kernel in that dtype."""
    use, rng = Use(monkeypatch, usable), np.random.default_rng(0)
    z, y = rng.normal(size=(4, 2 * TILE + 1)), np.array([0, 2 * TILE, 3, 3], np.int32)
    (value, g), (expected, exact) = cross_entropy.gradient(z, y, dtype), jax.value_and_grad(plain)(z, y)
    tolerance = {False: 0, True: 1e-12 if dtype == jnp.float64 else 2**-8}[usable]
    np.testing.assert_allclose(value, expected, rtol=1e-12 if usable else 0)
    np.testing.assert_allclose(np.asarray(g, np.float64), exact, rtol=tolerance, atol=1e-14 if usable else 0)
    assert g.dtype == (dtype if usable else np.float64) and use.kinds == (["gradient"] if usable else [])


def test_usable_means_float32_on_a_gpu(monkeypatch):
    zeros = [np.zeros((1, 2), dtype) for dtype in (np.float32, np.float64, jnp.bfloat16)]
    assert [cross_entropy.usable(z) for z in zeros] == [False] * 3
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [cross_entropy.usable(z) for z in zeros] == [True, False, False]


METHODS = {  # the objective, the linearization, and the kinds of the kernel
    "gn": (gn.quadratic, gn.linearized, {"quadratic"}),
    "gn_prox": (gn_prox.exact, gn.linearized, {"exact"}),
    "layerwise_gn": (gn.quadratic, layerwise_gn.linearized, {"quadratic"}),
    "layerwise_gn exact": (gn_prox.exact, layerwise_gn.linearized, {"exact"}),
}


@pytest.mark.parametrize("name", METHODS)
def test_each_method_takes_the_kernel_where_it_is_usable(name):
    """Losses and gradient of the inner objective are those of the plain path; each chunk goes through the kernel."""
    objective, linearized, kinds = METHODS[name]
    config = gn.Config(TOY, 2, 3, damping=0.1)
    args = random_params(TOY), random_params(TOY, 1), random_tokens(TOY, 2)
    results = []
    for usable in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            use = Use(patch, usable)
            results.append(jax.jit(lambda *a: gn.value_and_grad(objective, linearized, *a, config))(*args))
            assert set(use.kinds) == (kinds if usable else set())
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11), *results)


@pytest.mark.parametrize("what, kind", [(model.loss, "value"), (model.value_and_grad, "gradient")])
def test_the_model_takes_the_kernel_where_it_is_usable(what, kind):
    """The loss, and the loss and its gradient; the kernel's gradient of the logits is rounded to the model's dtype."""
    params, tokens, results = random_params(TOY), random_tokens(TOY, 2), []
    for usable in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            use = Use(patch, usable)
            results.append(jax.jit(lambda *a: what(TOY, *a))(params, tokens))
            assert set(use.kinds) == ({kind} if usable else set())
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *results)


@pytest.mark.parametrize("objective", [gn.quadratic, gn_prox.exact])
def test_another_loss_is_never_the_kernels(monkeypatch, objective):
    """Squared error with ell given: the kernel knows cross-entropy only."""
    use, rng = Use(monkeypatch, True), np.random.default_rng(0)
    z, v = rng.normal(size=(2, 3, 5))
    loss, (value,), (u,) = objective(z, v[None], np.zeros(3, np.int32), lambda z, y: jnp.sum(z * z) / 2)
    np.testing.assert_allclose((loss, value), ((z * z).sum() / 2, ((z + v) ** 2).sum() / 2), rtol=1e-12)
    np.testing.assert_allclose(u, z + v, rtol=1e-12)
    assert not use.kinds
