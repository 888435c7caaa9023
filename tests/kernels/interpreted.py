"""What the tests of this folder share: kernels on a CPU in float64, and derivatives."""

from contextlib import contextmanager
from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl

import kernels


@contextmanager
def interpreted():
    """Kernels take the place of their functions, step by step as plain operations, in float64.

    Pallas' masked store wants all its indices in one integer type. Constants are int64 here, so the
    numbers of programs must be too.
    """
    program_id = pl.program_id

    def as_constants_are(axis):
        return program_id(axis).astype(int)

    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(pl, "program_id", as_constants_are)
        patch.setattr(kernels, "INTERPRET", True)
        yield patch


@partial(jax.jit, static_argnums=0)
def derivatives(f, x, dx, u):
    """f(*x), its pushforward of dx and its pullback of u.

    The pushforward is also the transpose of the pullback, as layerwise_gn.py wants it.
    """
    value, push = jax.linearize(f, *x)
    _, pull = jax.vjp(f, *x)
    (transposed,) = jax.linear_transpose(pull, u)(dx)
    return {"value": [value], "pushforward": [push(*dx), transposed], "pullback": [pull(u)]}


def close(got, expected, tolerance):
    """Two trees are equal, to a tolerance times the largest number of each array."""

    def check(a, b):
        scale = abs(np.asarray(b)).max() + 1e-300
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)

    jax.tree.map(check, got, expected)


def random_like(rng, tree):
    """A tree of standard normal arrays with the shapes and dtypes of another."""
    return jax.tree.map(lambda a: rng.normal(size=a.shape).astype(a.dtype), tree)


def check_derivatives(kernel, plain, x, tolerance):
    """The kernel's value and derivatives at x are those of the plain function."""
    rng = np.random.default_rng(1)
    dx = random_like(rng, x)
    u = random_like(rng, jax.eval_shape(plain, *x))
    expected = derivatives(plain, x, dx, u)
    for name, results in derivatives(kernel, x, dx, u).items():
        for got in results:
            close(got, expected[name][0], tolerance)
