"""Attention's value, its three derivatives, its causality, and rotary positions, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import model
from attention import attention


@pytest.fixture(autouse=True, scope="module")
def in_float64():
    with jax.enable_x64(True):
        yield


SHAPES = [(1, 1, 1, 2), (5, 2, 2, 4), (7, 1, 3, 6), (8, 3, 1, 16)]  # T, G, H / G, K


@st.composite
def inputs(draw):
    """Three triples (q [2, T, H, K], k, v [2, T, G, K]): a point, a tangent and (its first) a cotangent."""
    T, G, repeat, K = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return [tuple(rng.normal(size=(2, T, heads, K)) for heads in (G * repeat, G, G)) for _ in range(3)]


value, rotate = jax.jit(attention), jax.jit(model.rotate)


@jax.jit
def derivatives(at, d, u):
    """o, J d by jvp and by linearize, Jᵀ u by vjp and by the transpose of linearize."""
    (out, Jd), pull, push = jax.jvp(attention, at, d), jax.vjp(attention, *at)[1], jax.linearize(attention, *at)[1]
    return out, (Jd, push(*d)), (pull(u), jax.linear_transpose(push, *at)(u))


@given(x=inputs())
def test_value_is_softmax_of_scores(x):
    """o[t] = Σ_s≤t softmax(q[t]·k[s] / sqrt(K)) v[s], query head h with key-value head h // (H / G)."""
    q, k, v = x[0]
    out, (_, T, H, K) = value(q, k, v), q.shape
    for t in range(T):
        for h in range(H):
            g = h // (H // k.shape[2])
            weight = np.exp(np.einsum("bk,bsk->bs", q[:, t, h], k[:, : t + 1, g]) / K**0.5)
            expected = np.einsum("bs,bsk->bk", weight / weight.sum(1, keepdims=True), v[:, : t + 1, g])
            np.testing.assert_allclose(out[:, t, h], expected, rtol=1e-9, atol=1e-12)


@given(x=inputs())
def test_pushforward_pullback_and_differences_agree(x):
    """<J d, u> = <d, Jᵀ u>, and J d = (o(x + εd) - o(x - εd)) / 2ε; each derivative by both of JAX's ways to it."""
    at, d, (u, _, _) = x
    out, (Jd, pushed), (pulled, transposed) = derivatives(at, d, u)
    size = np.vdot(np.abs(Jd), np.abs(u))  # of the terms of the product
    assert abs(np.vdot(Jd, u) - sum(np.vdot(a, b) for a, b in zip(d, pulled, strict=True))) <= 1e-12 * size
    shifted = [value(*(a + e * b for a, b in zip(at, d, strict=True))) for e in (1e-6, -1e-6)]
    np.testing.assert_allclose(Jd, (shifted[0] - shifted[1]) / 2e-6, rtol=1e-6, atol=1e-7)
    for one, two in ((out, value(*at)), (Jd, pushed), *zip(pulled, transposed, strict=True)):
        np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-13)


@settings(max_examples=20)
@given(x=inputs())
def test_gradient_of_a_position_on_later_ones_is_exactly_zero(x):
    """∂ o[t] / ∂ k[s], v[s] = 0 for s > t, and not for s <= t: pulled back from t, and pushed from later ones."""
    at, d, (u, _, _) = x
    for t in range(u.shape[1]):
        place = np.arange(u.shape[1])[None, :, None, None]
        _, (change, _), ((_, bar_k, bar_v), _) = derivatives(at, tuple((place > t) * a for a in d), (place == t) * u)
        assert not bar_k[:, t + 1 :].any() and not bar_v[:, t + 1 :].any() and not change[:, : t + 1].any()
        assert bar_v[:, : t + 1].all() and (change[:, t + 1 :] != 0).all()


@settings(max_examples=10)
@given(x=inputs())
def test_huge_scores_stay_finite(x):
    """softmax subtracts the maximum: scores of 1e8 give a finite value and finite derivatives."""
    (q, k, v), d, (u, _, _) = x
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(derivatives((1e4 * q, 1e4 * k, v), d, u)))


def test_scores_of_bfloat16_inputs_are_float32():
    """Rounded to bfloat16, scores of this size would change the value by 0.02 and more."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        q, k, v = (jnp.asarray(scale * rng.normal(size=(2, 8, 2, 16)), jnp.bfloat16) for scale in (4, 4, 1))
        exact = value(*(a.astype(jnp.float32) for a in (q, k, v)))
        np.testing.assert_allclose(value(q, k, v).astype(jnp.float32), exact, atol=0.016)


@given(T=st.sampled_from([2, 5, 12]), half=st.sampled_from([1, 3, 8]), seed=st.integers(0, 2**32 - 1))
def test_rotary_scores_depend_on_relative_position_only(T, half, seed):
    """One query and one key at all positions: score[t, s] is one number along a diagonal t - s; |rotate(x)| = |x|."""
    q, k = np.random.default_rng(seed).normal(size=(2, 2 * half))
    at_all = lambda a: np.asarray(rotate(np.broadcast_to(a, (1, T, 1, 2 * half))))[0, :, 0]  # [T, K]
    scores = at_all(q) @ at_all(k).T
    for offset in range(1 - T, T):
        diagonal = np.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-12)
    np.testing.assert_allclose(scores[0, 0], q @ k, atol=1e-12)  # position 0 does not turn
    assert abs(scores[0, 1:] - scores[0, 0]).max() > 1e-9  # and the others do
    np.testing.assert_allclose((at_all(q) ** 2).sum(-1), q @ q, rtol=1e-12)


def test_rotary_angles_are_the_papers():
    """Pair (i, i + K/2) at position t turns by t / 10000^(2i/K)."""
    x = np.random.default_rng(0).normal(size=(1, 5, 1, 6))
    turned = np.asarray(rotate(x))[0, :, 0]
    for t in range(5):
        for i in range(3):
            angle = t / 10_000 ** (2 * i / 6)
            pair = (x[0, t, 0, i] + 1j * x[0, t, 0, i + 3]) * np.exp(1j * angle)
            np.testing.assert_allclose(turned[t, [i, i + 3]], [pair.real, pair.imag], rtol=1e-12)
