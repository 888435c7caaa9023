"""Attention's three derivatives agree with each other and with finite differences, in float64."""

import jax
import numpy as np
import pytest

from attention import attention


def random_inputs(seed, T=6, H=4, G=2, K=4):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(2, T, n, K)) for n in (H, G, G))


@pytest.mark.parametrize("G", [1, 2, 4])
def test_value_is_softmax_of_scores(float64, G):
    """o[t] = Σ_s≤t softmax(q[t]·k[s] / sqrt(K)) v[s], query head h with key-value head h // (H / G)."""
    q, k, v = random_inputs(0, G=G)
    out = attention(q, k, v)
    for t in range(6):
        for h in range(4):
            g = h // (4 // G)
            weight = np.exp(np.einsum("bk,bsk->bs", q[:, t, h], k[:, : t + 1, g]) / 2)
            expected = np.einsum("bs,bsk->bk", weight / weight.sum(1, keepdims=True), v[:, : t + 1, g])
            np.testing.assert_allclose(out[:, t, h], expected, rtol=1e-12)


def test_pushforward_pullback_and_differences_agree(float64):
    """<J d, u> = <d, Jᵀ u>, and J d = (o(x + εd) - o(x - εd)) / 2ε."""
    x, d, u = random_inputs(1), random_inputs(2), random_inputs(3)[0]
    out, push = jax.linearize(attention, *x)
    Jd, pull = push(*d), jax.vjp(attention, *x)[1]
    np.testing.assert_allclose(np.vdot(Jd, u), sum(np.vdot(a, b) for a, b in zip(d, pull(u), strict=True)), rtol=1e-12)
    shifted = [attention(*(a + e * b for a, b in zip(x, d, strict=True))) for e in (1e-6, -1e-6)]
    np.testing.assert_allclose(Jd, (shifted[0] - shifted[1]) / 2e-6, rtol=1e-6, atol=1e-8)
    transposed = jax.linear_transpose(push, *x)(u)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), transposed, pull(u))


def test_gradient_of_a_position_on_later_ones_is_exactly_zero(float64):
    """∂ o[t] / ∂ k[s], v[s] = 0 for s > t."""
    q, k, v = random_inputs(4)
    for t in range(6):
        dk, dv = jax.grad(lambda k, v: attention(q, k, v)[:, t].sum(), (0, 1))(k, v)  # noqa: B023
        assert not dk[:, t + 1 :].any() and not dv[:, t + 1 :].any()
        assert dv[:, : t + 1].all()
