"""Attention's kernel, step by step on a CPU, against the plain function.

Here plain operations stand in for cuDNN. Their softmax is in float32, so value and pullback are
too.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import check_derivatives, close, derivatives, interpreted, random_like

import kernels
import model
from kernels import attention

TILE = 16  # in place of attention.TILE: small contexts cross its edges
SIZES = [  # T, n_kv_heads, n_heads / n_kv_heads, K
    (1, 1, 1, 2),
    (5, 2, 2, 4),
    (TILE, 1, 2, 6),
    (TILE + 1, 2, 2, 16),
    (2 * TILE, 1, 1, 16),
    (3 * TILE - 5, 2, 1, 48),
]
plain = model.attention.__wrapped__
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    with interpreted() as patch:
        patch.setattr(attention, "TILE", TILE)
        yield


def random_inputs(size, seed=0):
    """q [2, T, n_heads, K], k and v [2, T, n_kv_heads, K]."""
    T, n_kv_heads, shared_by, K = size
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(2, T, n_kv_heads * shared_by, K))
    k, v = rng.normal(size=(2, 2, T, n_kv_heads, K))
    return q, k, v


@sizes
def test_value_and_derivatives_are_those_of_the_plain_function(size):
    check_derivatives(attention.attention_kernel, plain, random_inputs(size), 1e-5)


@sizes
@pytest.mark.parametrize("error", [0, 1 / 64])
def test_the_pushforward_is_exact_even_if_the_log_sum_exp_is_not(size, error):
    """It divides each row by its own sum."""
    x = random_inputs(size)
    dx = random_inputs(size, 1)
    o, expected = jax.jvp(plain, x, dx)
    q, k, _ = x
    k = np.repeat(k, size[2], axis=2)
    scores = np.einsum("bthk,bshk->bths", q, k) / size[3] ** 0.5
    scores = np.where(np.tri(size[0], dtype=bool)[None, :, None], scores, -np.inf)
    lse = np.logaddexp.reduce(scores, axis=-1) + error
    got = jax.jit(attention.pushforward)(*x, o, lse, *dx)
    close(got, expected, 1e-12)


@pytest.mark.parametrize("size", [SIZES[1], SIZES[-1]], ids=str)
def test_no_position_reads_a_later_one(size):
    """A change of later keys and values changes nothing; their cotangents are 0; both exactly."""
    x = random_inputs(size)
    dx = random_inputs(size, 1)
    u = random_inputs(size, 2)[0]
    T = size[0]
    place = np.arange(T)[None, :, None, None]
    for t in {0, 3, TILE - 1, TILE, T - 1} & set(range(T)):
        later = tuple((place > t) * a for a in dx)
        found = derivatives(attention.attention_kernel, x, later, (place == t) * u)
        for change in found["pushforward"]:
            assert not change[:, : t + 1].any()
            assert (change[:, t + 1 :] != 0).all()
        for _, k_bar, v_bar in found["pullback"]:
            assert not k_bar[:, t + 1 :].any()
            assert not v_bar[:, t + 1 :].any()
            assert v_bar[:, : t + 1].all()


def test_huge_scores_stay_finite():
    """A row's largest score, or a bound on it, is subtracted: scores of 1e8 give finite results."""
    size = SIZES[3]
    q, k, v = random_inputs(size)
    x = (1e4 * q, 1e4 * k, v)
    dx = random_inputs(size, 1)
    found = derivatives(attention.attention_kernel, x, dx, random_inputs(size, 2)[0])
    for a in jax.tree.leaves(found):
        assert np.isfinite(a).all()


def test_the_pushforward_writes_no_scores():
    """Nothing in its program is [T, T]; the plain function's has it."""
    T = 8 * TILE
    x = random_inputs((T, 1, 1, 4))

    def has_scores(f):
        program = str(jax.make_jaxpr(lambda x, dx: jax.jvp(f, x, dx))(x, x))
        return bool(re.search(rf"\b{T},{T}\]", program))

    q, k, v = x
    lse = q[..., 0]
    kernel = str(jax.make_jaxpr(attention.pushforward)(q, k, v, v, lse, q, k, v))
    assert has_scores(plain)
    assert not re.search(rf"\b{T},{T}\]", kernel)
    assert f"{TILE},{TILE}]" in kernel


def in_bfloat16(tree):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), tree)


def in_float32(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float32), tree)


@jax.jit
def rounded_changes(x, dx):
    """J d in float32; in bfloat16 by the plain function and by the kernel, as float32."""
    _, exact = jax.jvp(plain, in_float32(x), in_float32(dx))
    _, by_plain = jax.jvp(plain, x, dx)
    _, by_kernel = jax.jvp(attention.attention_kernel, x, dx)
    return exact, *in_float32((by_plain, by_kernel))


@pytest.mark.parametrize("size", [SIZES[4], (3 * TILE - 5, 2, 2, 48)], ids=str)
@pytest.mark.parametrize("scale, bound", [(1, 1.2), (4, 2)])
def test_bfloat16_costs_the_kernel_hardly_more_than_the_plain_function(size, scale, bound):
    """The kernel subtracts r times the rounded value, the plain function before it rounds anything:
    with large scores that makes a difference."""
    for seed in range(3):
        q, k, v = in_bfloat16(random_inputs(size, seed))
        dx = in_bfloat16(random_inputs(size, 10 + seed))
        exact, by_plain, by_kernel = rounded_changes((scale * q, k, v), dx)
        plain_error = np.linalg.norm(by_plain - exact) / np.linalg.norm(exact)
        error = np.linalg.norm(by_kernel - exact) / np.linalg.norm(exact)
        assert plain_error > 1e-4
        assert error < bound * plain_error


def test_the_kernel_takes_bfloat16_and_heads_up_to_128_wide(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", False)
    narrow = in_float32(random_inputs(SIZES[0]))
    assert attention.attention_kernel(*narrow) is NotImplemented
    broad = in_bfloat16(random_like(np.random.default_rng(0), [np.zeros((1, 1, 1, 130))] * 3))
    assert attention.attention_kernel(*broad) is NotImplemented
