"""Attention's value, its three derivatives and its causality, in float64.

Of both implementations: plain XLA operations, which a CPU runs, and the kernel for a GPU, its steps as XLA operations.
"""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import AS_A_USER
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from test_gn import equations

from kernels import attention

BOTH = {"plain": attention.attention, "kernel": partial(attention.fused, interpret=True)}
TILE = 16  # in place of attention.TILE: small contexts cross its edges


@pytest.fixture(autouse=True, scope="module")
def in_float64_and_small_tiles():
    """JAX's masked store wants its indices in one integer type, and in float64 mode constants are int64."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        number = pl.program_id
        patch.setattr(pl, "program_id", lambda axis: number(axis).astype(int))
        patch.setattr(attention, "TILE", TILE)
        yield


each = pytest.mark.parametrize("which", BOTH)
SMALL = [(1, 1, 1, 2), (5, 2, 2, 4), (7, 1, 3, 6), (8, 3, 1, 16)]  # T, G, H / G, K
TILES = [(TILE, 1, 2, 6), (TILE + 1, 2, 2, 4), (2 * TILE, 1, 1, 16), (3 * TILE - 5, 2, 1, 48)]


def triples(rng, T, G, repeat, K):
    """Three triples (q [2, T, H, K], k, v [2, T, G, K]): a point, a tangent and (its first) a cotangent."""
    return [tuple(rng.normal(size=(2, T, heads, K)) for heads in (G * repeat, G, G)) for _ in range(3)]


@st.composite
def inputs(draw):
    shape = draw(st.sampled_from(SMALL + TILES))
    return triples(np.random.default_rng(draw(st.integers(0, 2**32 - 1))), *shape)


value = jax.jit(lambda which, *at: BOTH[which](*at), static_argnums=0)


@partial(jax.jit, static_argnums=0)
def derivatives(which, at, d, u):
    """o, J d by jvp and by linearize, Jᵀ u by vjp and by the transpose of linearize."""
    f = BOTH[which]
    (out, Jd), pull, push = jax.jvp(f, at, d), jax.vjp(f, *at)[1], jax.linearize(f, *at)[1]
    return out, (Jd, push(*d)), (pull(u), jax.linear_transpose(push, *at)(u))


@each
@given(x=inputs())
def test_value_is_softmax_of_scores(which, x):
    """o[t] = Σ_s≤t softmax(q[t]·k[s] / sqrt(K)) v[s], query head h with key-value head h // (H / G)."""
    q, k, v = x[0]
    out, (_, T, H, K) = value(which, q, k, v), q.shape
    for t in range(T):
        for h in range(H):
            g = h // (H // k.shape[2])
            weight = np.exp(np.einsum("bk,bsk->bs", q[:, t, h], k[:, : t + 1, g]) / K**0.5)
            expected = np.einsum("bs,bsk->bk", weight / weight.sum(1, keepdims=True), v[:, : t + 1, g])
            np.testing.assert_allclose(out[:, t, h], expected, rtol=1e-9, atol=1e-12)


@each
@given(x=inputs())
def test_pushforward_pullback_and_differences_agree(which, x):
    """<J d, u> = <d, Jᵀ u>, and J d = (o(x + εd) - o(x - εd)) / 2ε; each derivative by both of JAX's ways to it."""
    at, d, (u, _, _) = x
    out, (Jd, pushed), (pulled, transposed) = derivatives(which, at, d, u)
    size = np.vdot(np.abs(Jd), np.abs(u))  # of the terms of the product
    assert abs(np.vdot(Jd, u) - sum(np.vdot(a, b) for a, b in zip(d, pulled, strict=True))) <= 1e-12 * size
    shifted = [value(which, *(a + e * b for a, b in zip(at, d, strict=True))) for e in (1e-6, -1e-6)]
    np.testing.assert_allclose(Jd, (shifted[0] - shifted[1]) / 2e-6, rtol=1e-6, atol=1e-7)
    for one, two in ((out, value(which, *at)), (Jd, pushed), *zip(pulled, transposed, strict=True)):
        np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-13)


@each
@settings(max_examples=20)
@given(x=inputs())
def test_gradient_of_a_position_on_later_ones_is_exactly_zero(which, x):
    """∂ o[t] / ∂ k[s], v[s] = 0 for s > t, and not for s <= t: pulled back from t, and pushed from later ones."""
    at, d, (u, _, _) = x
    T = u.shape[1]
    for t in set(range(T)) & {*range(8), TILE - 1, TILE, 2 * TILE - 1, 2 * TILE, T - 1}:
        place = np.arange(T)[None, :, None, None]
        later, own = tuple((place > t) * a for a in d), (place == t) * u
        _, (change, _), ((_, bar_k, bar_v), _) = derivatives(which, at, later, own)
        assert not bar_k[:, t + 1 :].any() and not bar_v[:, t + 1 :].any() and not change[:, : t + 1].any()
        assert bar_v[:, : t + 1].all() and (change[:, t + 1 :] != 0).all()


@each
@settings(max_examples=10)
@given(x=inputs())
def test_huge_scores_stay_finite(which, x):
    """softmax subtracts the maximum: scores of 1e8 give a finite value and finite derivatives."""
    (q, k, v), d, (u, _, _) = x
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(derivatives(which, (1e4 * q, 1e4 * k, v), d, u)))


@each
def test_scores_of_bfloat16_inputs_are_float32(which):
    """Rounded to bfloat16, scores of this size would change the value by 0.02 and more."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        q, k, v = (jnp.asarray(scale * rng.normal(size=(2, 8, 2, 16)), jnp.bfloat16) for scale in (4, 4, 1))
        exact = value("plain", *(a.astype(jnp.float32) for a in (q, k, v)))
        np.testing.assert_allclose(value(which, q, k, v).astype(jnp.float32), exact, atol=0.016)


@each
@pytest.mark.parametrize("shape", [SMALL[1], TILES[1]])
def test_a_stack_of_changes_is_one_after_another(which, shape):
    """jax.vmap of the pushforward and of the pullback, and of both once more, over [3, ..] and over [2, 3, ..]."""
    at, _, _ = triples(np.random.default_rng(0), *shape)
    rng = np.random.default_rng(1)
    d, u = tuple(rng.normal(size=(2, 3, *a.shape)) for a in at), rng.normal(size=(2, 3, *at[0].shape))

    @jax.jit
    def stacked(at, d, u):
        push = jax.linearize(BOTH[which], *at)[1]
        pull = jax.vjp(BOTH[which], *at)[1]
        once = jax.vmap(push)(*(a[0] for a in d)), jax.vmap(pull)(u[0])
        return *once, jax.vmap(jax.vmap(push))(*d), jax.vmap(jax.vmap(pull))(u)

    pushed, pulled, pushed_twice, pulled_twice = stacked(at, d, u)
    same = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13)
    for i in range(2):
        for n in range(3):
            _, (change, _), (bars, _) = derivatives(which, at, tuple(a[i, n] for a in d), u[i, n])
            same(pushed_twice[i, n], change)
            jax.tree.map(lambda a, bar, at=(i, n): same(a[at], bar), pulled_twice, bars)
            if i == 0:
                same(pushed[n], change)
                jax.tree.map(lambda a, bar, at=n: same(a[at], bar), pulled, bars)


@each
@settings(max_examples=20)
@given(x=inputs())
def test_transposed_twice_it_is_the_pushforward(which, x):
    """(Jᵀ)ᵀ d = J d."""
    at, d, (u, _, _) = x
    np.testing.assert_allclose(twice(which, at, d, u), derivatives(which, at, d, u)[1][0], rtol=1e-12, atol=1e-13)


@partial(jax.jit, static_argnums=0)
def twice(which, at, d, u):
    back = jax.linear_transpose(jax.linearize(BOTH[which], *at)[1], *at)
    return jax.linear_transpose(back, u)(d)[0]


def outside(jaxpr):
    """Every equation that is in no kernel."""
    for eqn in jaxpr.eqns:
        yield eqn
        for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(param, "eqns") and eqn.primitive.name != "pallas_call":
                yield from outside(getattr(param, "jaxpr", param))


def test_pushforward_writes_no_scores():
    """Outside of the kernel nothing is as large as [T, T], inside of it nothing larger than a tile; in XLA it is."""
    T, K = 8 * TILE, 4
    at, d, (o, _, _) = triples(np.random.default_rng(0), T, 1, 1, K)
    largest = lambda eqns: max(v.aval.size for eqn in eqns for v in eqn.outvars)
    kernel = jax.make_jaxpr(partial(attention.pushforward, interpret=True))(*at, o, o[..., 0], *d).jaxpr
    plain = jax.make_jaxpr(partial(jax.jvp, attention.attention))(at, d).jaxpr
    assert largest(outside(kernel)) == 2 * T * K < 2 * T * T == largest(outside(plain))
    (call,) = [eqn for eqn in outside(kernel) if eqn.primitive.name == "pallas_call"]
    assert largest(equations(call.params["jaxpr"])) == TILE * TILE


@jax.jit
def changes(at, d):
    """J d in float32; in bfloat16 by plain operations; by the kernel, its log-sum-exp exact, off, or rounded."""
    single = partial(jax.tree.map, lambda a: a.astype(jnp.float32))
    _, exact = jax.jvp(attention.attention, single(at), single(d))
    plain, kernel = (jax.jvp(f, at, d)[1] for f in BOTH.values())
    o, lse = attention.plain(*at)
    off = [lse + 1 / 64, lse - 1 / 64, lse.astype(jnp.bfloat16)]
    return single((exact, plain, kernel, *(attention.pushforward(*at, o, a, *d, interpret=True) for a in off)))


@pytest.mark.parametrize("shape", [(TILE, 1, 1, 16), (3 * TILE - 5, 2, 2, 48)])
@pytest.mark.parametrize("scale, bound", [(1, 1.2), (4, 2)])
def test_bfloat16_costs_the_kernel_hardly_more_than_plain_operations(shape, scale, bound):
    """|J d - exact|, also where the log-sum-exp is off by 1/64, or rounded, as cuDNN may return it.

    The kernel divides by sums of its own; without that an error of 1/64 in the log-sum-exp is one of 1/64 in J d. It
    subtracts the rounded value times r, plain operations r before anything is rounded: with large scores a difference.
    """
    for seed in range(3):
        at, d, _ = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), triples(np.random.default_rng(seed), *shape))
        exact, *others = map(np.asarray, changes((scale * at[0], *at[1:]), d))
        plain, *errors = (np.linalg.norm(Jd - exact) / np.linalg.norm(exact) for Jd in others)
        assert 1e-4 < plain < 0.01 and max(errors) < bound * plain, (plain, errors)


SCRIPT = [sys.executable, str(Path(__file__).parent / "on_gpu.py")]


@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="no nvidia-smi on the PATH: no GPU to check the kernels on")
def test_kernels_on_a_gpu():
    """The script's checks, at its defaults; what fails is a line of its output."""
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(SCRIPT, capture_output=True, text=True, env=env)
    if done.returncode == 2:
        pytest.skip(f"nvidia-smi is on the PATH, but JAX is one for a CPU: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_gpu_the_script_says_so():
    done = subprocess.run(SCRIPT, capture_output=True, text=True, env=AS_A_USER)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "on_gpu.py: no GPU: the default backend of JAX is cpu\n"
