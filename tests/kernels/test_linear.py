"""A linear function with a transpose of its own goes through every transformation, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.linear import linear, remade


@pytest.fixture(autouse=True, scope="module")
def in_float64():
    with jax.enable_x64(True):
        yield


JIT = pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "no jit"])
same = partial(jax.tree.map, partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12))
rng = np.random.default_rng(0)
A, B, SCALE = rng.normal(size=(3, 4)), rng.normal(size=(3, 2)), np.float64(3)
X, Y, U = rng.normal(size=4), rng.normal(size=2), rng.normal(size=3)  # x, y, and a cotangent of the first result


def f(residuals, x, y):
    """(s (A x + B y), s x): two arguments, two results."""
    (a, b), s = residuals["ab"], residuals["s"]
    return s * (a @ x + b @ y), s * x


def back(residuals, u, w):
    """The transpose of f."""
    (a, b), s = residuals["ab"], residuals["s"]
    return s * (a.T @ u + w), s * (b.T @ u)


def of(a=A, b=B, s=SCALE, back=back):
    """x, y -> f; the residuals are a tree."""
    return lambda x, y: tuple(linear(f, back, {"ab": (a, b), "s": s}, x, y))


def matrix():
    """Of f, written down: [7, 6]."""
    return SCALE * np.block([[A, B], [np.eye(4), np.zeros((4, 2))]])


@JIT
def test_value_and_pushforwards(jit):
    """f, by jvp and by linearize: the matrix, whatever the point."""
    x, y = X, Y
    dx, dy = rng.normal(size=4), rng.normal(size=2)
    full = lambda x, y: tuple(np.split(matrix() @ np.concatenate([x, y]), [3]))
    same(jit(of())(x, y), full(x, y))
    same(jit(partial(jax.jvp, of()))((x, y), (dx, dy)), (full(x, y), full(dx, dy)))
    same(jit(lambda x, y, *d: jax.linearize(of(), x, y)[1](*d))(x, y, dx, dy), full(dx, dy))
    same(jit(lambda x, dx: jax.jvp(lambda x: of()(x, Y), (x,), (dx,)))(x, dx)[1], full(dx, 0 * Y))


@JIT
def test_transposes(jit):
    """By linear_transpose and by vjp: the matrix's; of one result alone too, the cotangent of the other being zero."""
    w = rng.normal(size=4)
    full = lambda u, w: tuple(np.split(matrix().T @ np.concatenate([u, w]), [4]))
    same(jit(lambda *u: jax.linear_transpose(of(), X, Y)(u))(U, w), full(U, w))
    same(jit(lambda *u: jax.vjp(of(), X, Y)[1](u))(U, w), full(U, w))
    same(jit(lambda u: jax.linear_transpose(lambda *x: of()(*x)[0], X, Y)(u))(U), full(U, 0 * w))


@JIT
def test_transposed_twice_it_is_itself(jit):
    once = jax.linear_transpose(of(), X, Y)
    same(jit(lambda x, y: jax.linear_transpose(once, (U, X))((x, y))[0])(X, Y), of()(X, Y))


def around(back):
    """What `linear` is for: a function whose pushforward is f at any point, and whose pullback is then `back`."""

    @jax.custom_jvp
    def function(x, y):
        return f({"ab": (A, B), "s": SCALE}, x, y)

    function.defjvp(lambda at, d: (function(*at), of(back=back)(*d)))
    return function


@JIT
def test_the_given_transpose_is_used(jit):
    """One that is ten times too large comes out ten times too large, from the transpose, vjp and grad; f does not."""
    tenfold = lambda tree: jax.tree.map(lambda a: 10 * a, tree)
    large = lambda *args: tenfold(back(*args))
    wrong, right = of(back=large), f({"ab": (A, B), "s": SCALE}, X, Y)
    expected = tuple(np.split(matrix().T @ np.concatenate([U, X]), [4]))
    same(jit(jax.linear_transpose(wrong, X, Y))((U, X)), tenfold(expected))
    for function, times in ((around(large), tenfold), (around(back), lambda tree: tree)):
        same(jit(lambda u, g=function: jax.vjp(g, X, Y)[1](u))((U, X)), times(expected))
        total = lambda x, y, g=function: sum(jnp.vdot(a, u) for a, u in zip(g(x, y), (U, X), strict=True))
        same(jit(jax.grad(total, (0, 1)))(X, Y), times(expected))
        same(jit(jax.linear_transpose(jax.linearize(function, X, Y)[1], X, Y))((U, X)), times(expected))
        same(jit(jax.linearize(function, X, Y)[1])(X, Y), right)
    twice = jax.linear_transpose(jax.linear_transpose(wrong, X, Y), (U, X))
    same(jit(twice)((X, Y))[0], right)  # f itself again, not ten times ten


def one_by_one(g, *stacks):
    """[g(*stacks[0]), ..] along first axes, stacked."""
    return jax.tree.map(lambda *a: np.stack(a), *[g(*args) for args in zip(*stacks, strict=True)])


@JIT
def test_stacks_of_arguments_and_of_residuals(jit):
    """jax.vmap over x, along any axis, alone or with y, over residuals, over all, and twice, is one after another."""
    xs, ys, As = rng.normal(size=(5, 4)), rng.normal(size=(5, 2)), rng.normal(size=(5, 3, 4))
    same(jit(jax.vmap(of()))(xs, ys), one_by_one(of(), xs, ys))
    alone = one_by_one(lambda x: of()(x, Y), xs)
    same(jit(jax.vmap(of(), (0, None)))(xs, Y), alone)
    same(jit(jax.vmap(of(), (1, None)))(xs.T, Y), alone)
    same(jit(jax.vmap(of(), (0, None), out_axes=1))(xs, Y), jax.tree.map(np.transpose, alone))
    same(jit(jax.vmap(lambda a: of(a)(X, Y)))(As), one_by_one(lambda a: of(a)(X, Y), As))
    both = one_by_one(lambda a, x: of(a)(x, Y), As, xs)
    same(jit(jax.vmap(lambda a, x: of(a)(x, Y)))(As, xs), both)
    same(jit(jax.vmap(lambda a, x: of(a)(x, Y), (2, 1)))(np.moveaxis(As, 0, 2), xs.T), both)
    grid = jit(jax.vmap(lambda x: jax.vmap(lambda y: of()(x, y))(ys)))(xs)
    same(grid, one_by_one(lambda x: one_by_one(lambda y: of()(x, y), ys), xs))


@JIT
def test_stacks_of_changes_and_of_cotangents(jit):
    """jax.vmap of the pushforward, of the pullback, and the derivatives of jax.vmap."""
    xs, ys, us = rng.normal(size=(5, 4)), rng.normal(size=(5, 2)), rng.normal(size=(5, 3))
    push, pull = jax.linearize(of(), X, Y)[1], lambda u: jax.vjp(lambda *x: of()(*x)[0], X, Y)[1](u)
    same(jit(jax.vmap(push))(xs, ys), one_by_one(push, xs, ys))
    same(jit(jax.vmap(pull))(us), one_by_one(pull, us))
    stacked = lambda xs, ys: jax.vmap(of())(xs, ys)[0]
    same(jit(lambda u: jax.vjp(stacked, xs, ys)[1](u))(us), one_by_one(pull, us))
    same(jit(lambda *d: jax.jvp(stacked, (xs, ys), d)[1])(0 * xs, ys), one_by_one(of(), 0 * xs, ys)[0])


@jax.custom_jvp
def cubes(x, w):
    """w x³, its derivative by `linear`."""
    return w @ x**3


@cubes.defjvp
def cubes_jvp(at, d):
    push = lambda residuals, dx, dw: (residuals[1] @ (3 * residuals[0] ** 2 * dx) + dw @ residuals[0] ** 3,)
    pull = lambda residuals, u: (3 * residuals[0] ** 2 * (residuals[1].T @ u), jnp.outer(u, residuals[0] ** 3))
    return cubes(*at), linear(push, pull, at, *d)[0]


@JIT
def test_first_and_second_derivatives_of_a_function_with_it_are_jaxs_own(jit):
    """Of w x³, in both arguments: forward over forward, forward over reverse, by linearize, and by vmap (hessian)."""
    plain = lambda x, w: w @ x**3
    at, d, e = [(rng.normal(size=4), rng.normal(size=(3, 4))) for _ in range(3)]
    push = lambda f: lambda *x: jax.jvp(f, x, d)[1]
    grad = lambda f: jax.grad(lambda *x: U @ f(*x) ** 2, (0, 1))
    for second in (
        lambda f: push(f)(*at),
        lambda f: grad(f)(*at),
        lambda f: jax.jvp(push(f), at, e)[1],
        lambda f: jax.jvp(grad(f), at, e)[1],
        lambda f: jax.linearize(grad(f), *at)[1](*e),
        lambda f: jax.jacfwd(jax.jacfwd(f))(*at),
    ):
        same(jit(lambda s=second: s(cubes))(), second(plain))


def test_residuals_are_as_they_are():
    """Of several dtypes, none, and whole numbers; a result's shape and dtype are f's."""
    gather = lambda residuals, x: (x.astype(jnp.float32)[residuals],)
    scatter = lambda residuals, u: (jnp.zeros(4, X.dtype).at[residuals].add(u),)
    take = lambda x: linear(gather, scatter, np.array([3, 0, 3]), x)[0]
    assert jax.eval_shape(take, X) == jax.ShapeDtypeStruct((3,), jnp.float32)
    same(jax.jit(take)(X), X[[3, 0, 3]].astype(np.float32))
    same(jax.linear_transpose(take, X)(np.float32([1, 2, 4])), ([2.0, 0, 0, 5],))
    same(linear(lambda _, x: (2 * x,), lambda _, u: (2 * u,), (), X)[0], 2 * X)


@JIT
def test_remade_changes_no_derivative(jit):
    """Of sin(w x): by jvp, linearize, vjp, linear_transpose and vmap, transposed twice, and of the gradient."""
    f, at, d = lambda w, x: jnp.sin(w @ x), (A, X), (2 * A, rng.normal(size=4))
    total = lambda f: jax.grad(lambda x: f(A, x) @ U)
    for g in (
        lambda f: f(*at),
        lambda f: jax.jvp(f, at, d),
        lambda f: jax.linearize(f, *at)[1](*d),
        lambda f: jax.vjp(f, *at)[1](U),
        lambda f: jax.linear_transpose(jax.linearize(f, *at)[1], *at)(U),
        lambda f: jax.linear_transpose(jax.vjp(f, *at)[1], U)(d),
        lambda f: jax.vmap(jax.linearize(f, *at)[1])(*(np.stack([a, 3 * a]) for a in d)),
        lambda f: total(f)(X),
        lambda f: jax.jvp(total(f), (X,), (d[1],)),
    ):
        same(jit(lambda g=g: g(remade(f)))(), g(f))


def test_remade_computes_again_in_the_pullback_only():
    """How often the sine stands in a program; a barrier keeps a compiler from taking two for one."""
    f = remade(lambda x: jnp.exp(jnp.sin(x)))
    program = lambda g: jax.jit(g).lower(X).as_text()
    count = lambda g: [program(g).count(f"stablehlo.{word} ") for word in ("sine", "optimization_barrier")]
    assert count(f) == count(lambda x: jax.jvp(f, (x,), (x,))) == [1, 0]
    assert count(lambda x: jax.vjp(f, x)[1](x)) == [2, 1]
