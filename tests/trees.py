"""Arithmetic with trees of arrays, such as parameters, for tests."""

import jax
import numpy as np
from jax.flatten_util import ravel_pytree


def flat(tree):
    """All numbers of a tree in one array, [P]."""
    return np.asarray(ravel_pytree(tree)[0])


def add(a, b, scale=1.0):
    """a + scale b."""
    return jax.tree.map(lambda a, b: a + scale * b, a, b)


def close(a, b, tolerance):
    """|a - b| <= tolerance |b|, in the norm over everything."""
    a, b = flat(a), flat(b)
    assert a.shape == b.shape
    difference = np.linalg.norm(a - b)
    assert difference <= tolerance * np.linalg.norm(b), difference / np.linalg.norm(b)


def change_of(params, scale=0.3, seed=1):
    """A random δ, a tree like params, every number about as large as `scale`."""
    vector, unravel = ravel_pytree(params)
    return unravel(scale * np.random.default_rng(seed).normal(size=vector.shape))
