"""The MLP that computes again in its pullback, and the derivative by hand that it stands on."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import check_derivatives, close, interpreted

import kernels
import model
from kernels import mlp
from kernels.derivative import with_derivative

B, T, D, F = 2, 3, 4, 5
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True, scope="module")
def on_a_cpu():
    with interpreted():
        yield


def random_inputs(network):
    """The block's parameters that the function reads, and x, [B, T, D]."""
    p = {"w_up": rng.normal(size=(D, F)), "w_down": rng.normal(size=(F, D))}
    if network.mlp == "swiglu":
        p["w_gate"] = rng.normal(size=(D, F))
    return p, rng.normal(size=(B, T, D))


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_value_and_derivatives_are_those_of_the_plain_function(kind):
    network = model.Config(mlp=kind, dtype="float64")
    plain = partial(model.mlp.__wrapped__, network)
    check_derivatives(partial(mlp.mlp_kernel, network), plain, random_inputs(network), 1e-12)


def test_the_kernel_takes_bfloat16(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", False)
    network = model.Config(dtype="float32")
    assert mlp.mlp_kernel(network, *random_inputs(network)) is NotImplemented


def test_only_the_pullback_computes_again():
    """How often a sine is in a program; a barrier keeps the compiler from taking two for one."""
    x = rng.normal(size=4)
    f = mlp.recomputed_in_pullback(lambda x: jnp.exp(jnp.sin(x)))

    def counts(g):
        program = jax.jit(g).lower(x).as_text()
        words = ("sine", "optimization_barrier")
        return [program.count(f"stablehlo.{word} ") for word in words]

    assert counts(f) == [1, 0]
    assert counts(lambda x: jax.jvp(f, (x,), (x,))) == [1, 0]
    assert counts(lambda x: jax.vjp(f, x)[1](x)) == [2, 1]


# ---- a derivative written by hand ----------------------------------------------------------------


def cubes(x, w):
    """w x³; x: [4], w: [3, 4]."""
    return w @ x**3


def push(residuals, dx, dw):
    x, w = residuals
    return w @ (3 * x**2 * dx) + dw @ x**3


def pull(residuals, u):
    x, w = residuals
    return 3 * x**2 * (w.T @ u), jnp.outer(u, x**3)


def by_hand(push=push, pull=pull):
    return with_derivative(cubes, lambda *x: (cubes(*x), x), push, pull)


X = (rng.normal(size=4), rng.normal(size=(3, 4)))


def test_a_derivative_by_hand_goes_both_ways():
    """By jvp, linearize and the transposed pullback; by vjp and the transposed pushforward."""
    f = by_hand()
    check_derivatives(f, cubes, X, 1e-12)
    dx = (rng.normal(size=4), rng.normal(size=(3, 4)))
    u = rng.normal(size=3)
    close(jax.jvp(f, X, dx), (cubes(*X), push(X, *dx)), 1e-12)
    _, linear = jax.linearize(f, *X)
    close(jax.linear_transpose(linear, *X)(u), pull(X, u), 1e-12)


@pytest.mark.parametrize("i", [0, 1])
def test_a_derivative_by_hand_in_one_argument_alone(i):
    """The other one stays: JAX cannot transpose in what is no variable."""

    def in_one(f):
        def g(a):
            inputs = list(X)
            inputs[i] = a
            return f(*inputs)

        return g

    check_derivatives(in_one(by_hand()), in_one(cubes), (X[i],), 1e-12)


def test_the_given_directions_are_the_ones_used():
    """A pullback ten times too large comes out so; its transpose is the pushforward again."""

    def large(residuals, u):
        return tuple(10 * bar for bar in pull(residuals, u))

    f = by_hand(pull=large)
    dx = (rng.normal(size=4), rng.normal(size=(3, 4)))
    u = rng.normal(size=3)
    _, vjp = jax.vjp(f, *X)
    close(vjp(u), large(X, u), 1e-12)
    (transposed,) = jax.linear_transpose(vjp, u)(dx)
    close(transposed, push(X, *dx), 1e-12)
