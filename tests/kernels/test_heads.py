"""The kernel of queries, keys and values, step by step on a CPU, against the plain function."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import check_derivatives, interpreted

import kernels
import model
from kernels import heads

SIZES = [(1, 1, 1, 2), (5, 3, 3, 6), (9, 4, 2, 8)]  # T, n_heads, n_kv_heads, K
plain = model.queries_keys_values.__wrapped__


@pytest.fixture(autouse=True, scope="module")
def few_rows():
    with interpreted() as patch:
        patch.setattr(heads, "ROWS_SUMMED", 3)
        yield


def network_of(size, **changes):
    T, n_heads, n_kv_heads, K = size
    widths = {"d_model": n_heads * K, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return model.Config(context=T, n_layers=1, vocab_size=2, d_ff=2, **widths, **changes)


def random_inputs(network, seed=0):
    """The block's parameters that the function reads, and x, [2, T, D]."""
    rng = np.random.default_rng(seed)
    D = network.d_model
    params = jax.eval_shape(partial(model.init, network), jax.random.key(0))
    p = {}
    for name, stacked in params["blocks"].items():
        if name in ("wq", "wk", "wv") or name.startswith(("q_", "k_")):
            p[name] = rng.normal(size=stacked.shape[1:])
    return p, rng.normal(size=(2, network.context, D))


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_value_and_derivatives_are_those_of_the_plain_function(size, qk_norm):
    network = network_of(size, qk_norm=qk_norm, dtype="float64")
    kernel = partial(heads.queries_keys_values_kernel, network)
    check_derivatives(kernel, partial(plain, network), random_inputs(network), 1e-10)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_bfloat16_costs_the_kernel_no_more_than_the_plain_function(qk_norm):
    """It computes in float32 and rounds once, as the plain function does on the same machine."""
    network = network_of(SIZES[1], qk_norm=qk_norm, dtype="bfloat16")
    x = jax.tree.map(jnp.float32, random_inputs(network))
    exact = jax.jit(partial(plain, replace(network, dtype="float32")))(*x)
    by_plain = jax.jit(partial(plain, network))(*x)
    by_kernel = jax.jit(partial(heads.queries_keys_values_kernel, network))(*x)
    for a, b, c in zip(exact, by_plain, by_kernel, strict=True):
        assert b.dtype == c.dtype == jnp.bfloat16
        plain_error = np.linalg.norm(np.float32(b) - a)
        error = np.linalg.norm(np.float32(c) - a)
        assert 0 < error < 1.2 * plain_error


def test_the_kernel_takes_bfloat16(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", False)
    network = network_of(SIZES[0], dtype="float32")
    result = heads.queries_keys_values_kernel(network, *random_inputs(network))
    assert result is NotImplemented
