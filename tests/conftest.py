"""Strict mode for every test, and the small models that they share. Warnings are errors: see pyproject.toml."""

import dataclasses
from functools import partial

import hypothesis
import jax
import numpy as np
import pytest

import model

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("here", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("here")

TOY = model.Config(vocab_size=11, context=5, d_model=8, d_ff=12, n_layers=2, n_heads=4, n_kv_heads=4, head_chunk=4)
VARIANTS = {
    "paper": TOY,
    "textbook": dataclasses.replace(TOY, mlp="swiglu", qk_norm=False),
    "grouped": dataclasses.replace(TOY, n_kv_heads=2),
}


@pytest.fixture(autouse=True, scope="module")
def compiled_programs():
    """Are freed after each file: a process can map just so many, and ends with a segmentation fault beyond them."""
    yield
    jax.clear_caches()


@pytest.fixture
def float64():
    """Everything in this test is float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=VARIANTS)
def toy(request):
    """A model small enough for its Jacobian to be written down, in each variant."""
    return VARIANTS[request.param]


def random_params(config, seed=0):
    """Parameters with every norm and bias moved away from one and zero, so that no derivative is trivially right."""
    params = model.init(config, jax.random.key(seed))
    leaves, shape = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(shape, [a + 0.1 * rng.normal(size=a.shape).astype(a.dtype) for a in leaves])


def random_tokens(config, size, seed=0):
    """int32 [size, context + 1]."""
    shape = (size, config.context + 1)
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape).astype(np.int32)


def many(network, size=2):
    """Two functions k -> inner batch: the batch and fresh tokens."""
    return (lambda k: random_tokens(network, size, k)), (lambda k: random_tokens(network, size, 100 + k))


@partial(jax.jit, static_argnums=0)
def logits(config, params, tokens):
    """The model's logits the plain way, [B, T, V]: what the chunked code never holds."""
    return model.hidden(config, params, tokens[:, :-1]) @ params["head"]


def assert_same(a, b):
    """Two trees are bitwise equal."""
    jax.tree.map(np.testing.assert_array_equal, a, b)
