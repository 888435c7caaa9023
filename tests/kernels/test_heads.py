"""Queries, keys and values from one product: the equations in complex numbers, and all derivatives, in float64.

Of both implementations: plain XLA operations, which a CPU runs, and the kernel for a GPU, its steps as XLA operations.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import on_gpu
import pytest
from conftest import TOY, random_params, random_tokens
from jax.experimental import pallas as pl

import gn
import model
from kernels import attention, heads


@pytest.fixture(autouse=True, scope="module")
def in_float64_and_few_rows():
    """JAX's masked store wants its indices in one integer type, and in float64 mode constants are int64."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        number = pl.program_id
        patch.setattr(pl, "program_id", lambda axis: number(axis).astype(int))
        patch.setattr(heads, "SUMMED", 3)
        yield


BOTH = {"plain": heads.plain, "kernel": lambda counts, *at: heads.fused(counts, True, *at)}
each = pytest.mark.parametrize("which", BOTH)
SIZES = [(1, 1, 1, 2), (4, 2, 2, 1), (5, 3, 3, 3), (9, 4, 1, 2), (7, 6, 3, 4)]  # T, H, G, K/2


def draw(T, H, G, half, norms):
    """A point, a tangent, a cotangent: (x, q's scale and bias, k's), the same, (q, k, v)."""
    rng, like = np.random.default_rng(T), [(n, 2, half) for n in (H, H, G, G) if norms]
    at, d = ((rng.normal(size=(2, T, H + 2 * G, 2, half)), *(rng.normal(size=s) for s in like)) for _ in range(2))
    return at, d, tuple(rng.normal(size=(2, T, n, 2, half)) for n in (H, G, G))


def oracle(counts, x, *norms):
    """A head is K/2 complex numbers, its first half their real parts: position t turns number i by t 10000^(-2i/K)."""
    (H, G, _), T, half = counts, x.shape[1], x.shape[-1]
    turn = np.exp(1j * np.arange(T)[:, None] * 10_000.0 ** (-np.arange(half) / half))  # [T, K/2]
    parts = []
    for i, part in enumerate((x[:, :, :H], x[:, :, H : H + G])):
        if norms:
            flat = part.reshape(*part.shape[:2], -1)
            flat = flat - flat.mean(-1, keepdims=True)
            flat = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + 1e-6)
            part = flat.reshape(part.shape) * norms[2 * i] + norms[2 * i + 1]
        turned = (part[..., 0, :] + 1j * part[..., 1, :]) * turn[None, :, None]
        parts.append(np.stack([turned.real, turned.imag], axis=-2))
    return *parts, x[:, :, H + G :]


def check_derivatives(f, oracle, at, d, u):
    """f, a tuple, is the oracle; jvp and linearize its central difference; vjp and linear_transpose their transpose."""
    out, Jd = jax.jit(partial(jax.jvp, f))(at, d)
    apart = lambda sign: oracle(*(a + sign * 1e-6 * b for a, b in zip(at, d, strict=True)))
    for got, exact in zip(out, oracle(*at), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-9, atol=1e-11)
    for got, plus, minus in zip(Jd, apart(1), apart(-1), strict=True):
        np.testing.assert_allclose(got, (plus - minus) / 2e-6, rtol=1e-6, atol=1e-6 * (1 + abs(got).max()))
    bar = jax.jit(lambda at, u: jax.vjp(f, *at)[1](u))(at, u)
    sides = [sum(np.vdot(a, b) for a, b in zip(*pair, strict=True)) for pair in ((u, Jd), (bar, d))]
    np.testing.assert_allclose(*sides, rtol=1e-9, atol=1e-9)

    @jax.jit
    def again(at, d, u):
        push = jax.linearize(f, *at)[1]
        return push(*d), jax.linear_transpose(push, *at)(u), jax.vmap(push)(*(jnp.stack([a, 2 * a]) for a in d))

    pushed, pulled, stack = again(at, d, u)
    close = partial(jax.tree.map, partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9))
    close((pushed, pulled), (Jd, bar))
    close(stack, tuple(np.stack([a, 2 * a]) for a in Jd))


@each
@pytest.mark.parametrize("norms", [True, False], ids=["QK-norm", "no norm"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_all_derivatives(which, norms, size):
    T, H, G, half = size
    at, d, u = draw(T, H, G, half, norms)
    check_derivatives(partial(BOTH[which], (H, G, G)), partial(oracle, (H, G, G)), at, d, u)


@each
@pytest.mark.parametrize("T, half", [(2, 1), (5, 3), (9, 4)])
def test_rotary_scores_depend_on_relative_position_only(which, T, half):
    """One query and one key at all positions: score[t, s] is one number along a diagonal t - s; lengths stay."""
    q, k, v = np.random.default_rng(T).normal(size=(3, 1, 2, half))
    x = np.broadcast_to(np.stack([q, k, v], axis=1), (1, T, 3, 2, half))
    q_at, k_at, _ = (np.asarray(a)[0].reshape(T, -1) for a in BOTH[which]((1, 1, 1), x))  # [T, K]
    scores = q_at @ k_at.T
    for offset in range(1 - T, T):
        diagonal = np.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-12)
    np.testing.assert_allclose(scores[0, 0], np.vdot(q, k), atol=1e-12)  # position 0 does not turn
    assert abs(scores[0, 1:] - scores[0, 0]).max() > 1e-9  # and the others do
    np.testing.assert_allclose((q_at**2).sum(-1), np.vdot(q, q), rtol=1e-12)


@pytest.mark.parametrize("norms", [True, False], ids=["QK-norm", "no norm"])
def test_the_kernel_computes_in_float32_and_rounds_once(norms):
    """Of bfloat16 rows: what comes out is rounded once, and the norms' gradients are float32's."""
    at, d, u = draw(9, 3, 3, 3, norms)
    low = lambda tree: tuple(jnp.asarray(a, jnp.bfloat16 if a.ndim > 3 else jnp.float32) for a in tree)
    at, d, u = low(at), low(d), low(u)
    f, plain = (partial(BOTH[which], (3, 3, 3)) for which in ("kernel", "plain"))
    single = partial(jax.tree.map, lambda a: a.astype(jnp.float32))
    for derivative in (lambda f, at, d, u: jax.jvp(f, at, d), lambda f, at, d, u: jax.vjp(f, *at)[1](u)):
        got, exact = derivative(f, at, d, u), derivative(plain, *single((at, d, u)))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
            assert a.dtype == (jnp.bfloat16 if a.ndim > 3 else jnp.float32)
            np.testing.assert_allclose(single(a), b, rtol=2.0**-8 if a.ndim > 3 else 1e-5, atol=1e-5)


def test_the_checks_for_a_gpu_pass_step_by_step():
    total, failed = on_gpu.report(on_gpu.heads_checks(True, ((16, 4, 2, 5), (6, 3, 3, 9))))
    assert total == 36 and failed == 0


OTHER = {"n_kv_heads": 2, "mlp": "swiglu", "qk_norm": False}


@pytest.mark.parametrize("changes", [{}, OTHER], ids=["paper", "textbook"])
def test_a_whole_gradient_with_every_kernel_is_the_plain_one(changes, monkeypatch):
    """Gauss-Newton's, with the kernels for a GPU below the head, in float64."""
    settings = gn.Config(replace(TOY, context=6, **changes), 1, 2)
    params, delta = random_params(settings.model), random_params(settings.model, 1)
    tokens = random_tokens(settings.model, 2)
    gradient = lambda: gn.linearized(gn.quadratic, params, delta, tokens, settings)
    plain, traced = gradient(), []

    def kernel(name, f):
        monkeypatch.setattr(model, name, lambda *args: traced.append(name) or f(*args))

    kernel("heads", BOTH["kernel"])
    kernel("attention", partial(attention.fused, interpret=True))
    model.block.clear_cache()
    try:
        fused = gradient()
    finally:
        model.block.clear_cache()
    assert set(traced) == {"heads", "attention"}
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-10), fused, plain)
