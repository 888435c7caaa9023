"""The identities of Gauss-Newton, for any small network, weights θ, change δ and tokens, in float64.

    f(θ): logits z [n, V] of a batch;  J = ∂f/∂θ;  ℓ: the loss of z, convex;  L(θ) = ℓ(f(θ))
    g = ∇ℓ(z),  H = ∇²ℓ(z);            ∇L = Jᵀ g;       G = Jᵀ H J                            (Appendix A and B)
    L2(δ) = ℓ(z) + g·Jδ + ½ Jδ·H Jδ;   L1(δ) = ℓ(z + Jδ)                                     (Algorithms 1 and 2)

One side of an identity is what gn.py, gn_prox.py and layerwise_gn.py compute; the other is that at another place, or
is written here, with the logits of the whole batch, H in closed form, and nothing but jax.jvp, jax.vjp and jax.grad.
Hypothesis draws the network by its number, and the seed of everything else; to try more networks, raise NETWORKS.
"""

from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import kept, logits, random_params, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

import gn
import gn_prox
import layerwise_gn
import model
from kernels.cross_entropy import cross_entropy

NETWORKS = 8


@pytest.fixture(autouse=True, scope="module")
def in_float64():
    with jax.enable_x64(True):
        yield


@lru_cache
def random_network(number):
    """Network `number`: 1 to 3 layers, 4 to 16 wide, grouped-query or not, both MLPs, with and without qk_norm."""
    rng = np.random.default_rng(number)
    heads = int(rng.choice([1, 2, 4]))
    return model.Config(
        vocab_size=int(rng.integers(5, 41)),
        context=int(rng.integers(2, 9)),
        d_model=2 * heads * int(rng.integers(-(-2 // heads), 8 // heads + 1)),
        d_ff=int(rng.integers(4, 17)),
        n_layers=1 + number % 3,
        n_heads=heads,
        n_kv_heads=int(rng.choice([n for n in (1, 2, 4) if heads % n == 0])),
        mlp=("gelu", "swiglu")[number % 2],
        qk_norm=number % 4 < 2,
        head_chunk=int(rng.integers(1, 13)),
    )


def test_networks_are_of_every_kind():
    networks = [random_network(number) for number in range(NETWORKS)]
    for name, kinds in {"n_layers": {1, 2, 3}, "mlp": {"gelu", "swiglu"}, "qk_norm": {True, False}}.items():
        assert {getattr(network, name) for network in networks} == kinds
    assert len({network.n_heads // network.n_kv_heads for network in networks}) > 1
    assert all(4 <= network.d_model <= 16 for network in networks)


class Case(NamedTuple):
    """What an identity is tried on."""

    loss: str  # the name of ℓ
    number: int  # of the network
    seed: int  # of the rest
    network: model.Config
    theta: dict  # θ, where the network is linearized
    delta: dict  # δ, a change of it
    other: dict  # another change
    tokens: np.ndarray  # int32 [B, T+1]

    def __repr__(self):
        return f"case({self.loss!r}, {self.number}, {self.seed})"


def case(loss, number, seed):
    network = random_network(number)
    theta = random_params(network, seed)
    flat, unravel = ravel_pytree(theta)
    delta, other = np.random.default_rng(seed).normal(size=(2, flat.size)) * 0.3
    tokens = random_tokens(network, 2 + number % 2, seed)
    return Case(loss, number, seed, network, theta, unravel(delta), unravel(other), tokens)


def cases(networks=NETWORKS, loss="cross-entropy"):
    return st.builds(case, st.just(loss), st.integers(0, networks - 1), st.integers(0, 2**32 - 1))


EITHER_LOSS = st.one_of(cases(), cases(3, "squared error"))  # the method holds for any convex loss


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0])


def plus(a, b, scale=1.0):
    """a + scale b."""
    return jax.tree.map(lambda a, b: a + scale * b, a, b)


def same(a, b, tolerance=1e-9, size=0.0):
    """a = b, up to rounding of numbers as large as they are, or of a norm `size` where both are differences of such."""
    a, b = flat(a), flat(b)
    assert np.linalg.norm(a - b) <= tolerance * (np.linalg.norm(b) + size + 1e-3)


# ---- the project's side ---------------------------------------------------------------------------------------------


def squared(z, y):
    """Another convex loss: ½ |z - onehot(y)|², summed over tokens."""
    return jnp.sum((z - jax.nn.one_hot(y, z.shape[-1], dtype=z.dtype)) ** 2) / 2


LOSSES = {"cross-entropy": cross_entropy, "squared error": squared}
QUADRATIC = {name: partial(gn.quadratic, ell=ell) for name, ell in LOSSES.items()}
CURVATURE = {name: partial(gn.curvature, ell=ell) for name, ell in LOSSES.items()}
EXACT = {name: partial(gn_prox.exact, ell=ell) for name, ell in LOSSES.items()}


@partial(jax.jit, static_argnames=("network", "objective", "linearized", "damping"))
def computed(network, theta, delta, tokens, objective, linearized=gn.linearized, damping=0.0):
    """(L(θ), value of the objective at δ), gradient there."""
    config = gn.Config(network, 1, 1, damping=damping)
    return gn.value_and_grad(objective, linearized, theta, delta, tokens, config)


def zero(c):
    return jax.tree.map(jnp.zeros_like, c.theta)


def value_and_grad(c, delta, objective=QUADRATIC, **more):
    (_, value), grad = computed(c.network, c.theta, delta, c.tokens, objective[c.loss], **more)
    return float(value), flat(grad)


def G(c, v):
    """G v, as conjugate gradients see it."""
    return value_and_grad(c, v, CURVATURE)[1]


# ---- the textbook's side --------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("network", "loss"))
def textbook(network, theta, delta, v, tokens, loss):
    """What the identities say, from the logits of the whole batch, per token."""
    y, n = tokens[:, 1:].reshape(-1), tokens[:, 1:].size
    f = lambda theta: logits(network, theta, tokens).reshape(n, -1)
    ell, onehot = lambda z: LOSSES[loss](z, y) / n, jnp.eye(network.vocab_size)[y]
    (z, Jv), pull = jax.jvp(f, (theta,), (v,)), jax.vjp(f, theta)[1]
    p = jax.nn.softmax(z)
    g, Hv = {
        "cross-entropy": (p - onehot, p * Jv - p * jnp.sum(p * Jv, -1, keepdims=True)),  # (diag(p) - p pᵀ) Jv
        "squared error": (z - onehot, Jv),
    }[loss]
    L, linear = lambda theta: ell(f(theta)), lambda delta: ell(z + jax.jvp(f, (theta,), (delta,))[1])
    along = lambda gradient, at: jax.jvp(gradient, (at,), (v,))[1]
    zero = jax.tree.map(jnp.zeros_like, theta)
    return {
        "L": L(theta),
        "∇L": pull(g / n)[0],
        "Gv": pull(Hv / n)[0],
        "∇²L v": along(jax.grad(L), theta),
        "∇² of the linearized model's loss, v": along(jax.grad(linear), zero),
        "∇²f v, weighted by g": along(lambda theta: jax.vjp(f, theta)[1](g / n)[0], theta),
        "L1": linear(delta),
        "∇L1": jax.grad(linear)(delta),
    }


def expected(c):
    return textbook(c.network, c.theta, c.delta, c.other, c.tokens, c.loss)


# ---- G --------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(c=EITHER_LOSS)
def test_curvature_is_symmetric_and_positive_semidefinite(c):
    """u·G v = v·G u and v·G v ≥ 0, since G = Jᵀ H J and H is so."""
    u, v, Gu, Gv = flat(c.delta), flat(c.other), G(c, c.delta), G(c, c.other)
    assert abs(u @ Gv - v @ Gu) <= 1e-10 * np.linalg.norm(u) * np.linalg.norm(Gv)
    assert v @ Gv >= 0 and u @ Gu >= 0
    assert np.isclose(value_and_grad(c, c.other, CURVATURE)[0], v @ Gv / 2, rtol=1e-9)


@settings(max_examples=40)
@given(c=EITHER_LOSS)
def test_curvature_is_the_hessian_of_the_linearized_models_loss(c):
    """G v = ∇²_δ ℓ(f(θ) + J δ) v at δ = 0, and = Jᵀ H J v with H written down."""
    want, v = expected(c), G(c, c.other)
    same(v, want["Gv"])
    same(v, want["∇² of the linearized model's loss, v"])


@settings(max_examples=40)
@given(c=EITHER_LOSS)
def test_hessian_minus_curvature_is_the_models_own_weighted_by_the_residual(c):
    """∇²L v - G v = Σ_i g_i ∇²f_i v: what Gauss-Newton leaves out of Newton (Section 2)."""
    want, v = expected(c), G(c, c.other)
    rest = flat(want["∇²f v, weighted by g"])
    same(flat(want["∇²L v"]) - v, rest, size=np.linalg.norm(v))
    assert np.linalg.norm(rest) > 1e-6 * np.linalg.norm(v)  # else this would not tell G from the Hessian


@settings(max_examples=40)
@given(c=EITHER_LOSS)
def test_for_a_model_linear_in_its_parameters_it_is_the_hessian(c):
    """In the head alone f is linear: the head's block of G is that of ∇²L; between head and blocks they differ."""
    c = c._replace(other=zero(c) | {"head": c.other["head"]})
    want, got = expected(c), computed(c.network, c.theta, c.other, c.tokens, CURVATURE[c.loss])[1]
    same(got["head"], want["∇²L v"]["head"])
    assert np.linalg.norm(flat(got["blocks"]) - flat(want["∇²L v"]["blocks"])) > 1e-9


# ---- the objective of Gauss-Newton ----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(c=EITHER_LOSS)
def test_gradient_is_that_of_the_loss_plus_curvature_times_delta(c):
    """∇L2(δ) = ∇L + G δ, and L2(δ) = L + ∇L·δ + ½ δ·G δ."""
    c = c._replace(other=c.delta)
    value, grad = value_and_grad(c, c.delta, QUADRATIC)
    want, delta = expected(c), flat(c.delta)
    same(grad, plus(want["∇L"], want["Gv"]))
    same(value, want["L"] + flat(want["∇L"]) @ delta + delta @ flat(want["Gv"]) / 2)


@settings(max_examples=20)
@given(c=cases(), a=st.floats(-3, 3), b=st.floats(-3, 3))
def test_gradient_is_affine_in_delta(c, a, b):
    """∇L2(a δ + b ε) - ∇L = a (∇L2(δ) - ∇L) + b (∇L2(ε) - ∇L)."""
    grad = lambda delta: value_and_grad(c, delta)[1]
    g, one, two = grad(zero(c)), grad(c.delta), grad(c.other)
    mixed = grad(jax.tree.map(lambda d, e: a * d + b * e, c.delta, c.other))
    same(mixed - g, a * (one - g) + b * (two - g), size=np.linalg.norm(g))


@settings(max_examples=40)
@given(c=EITHER_LOSS)
def test_loss_is_exactly_quadratic_along_any_line(c):
    """φ(s) = L2(δ + s ε) has no third difference, its central difference is ε·∇L2(δ), and its second ε·G ε."""
    phi = {s: value_and_grad(c, plus(c.delta, c.other, s))[0] for s in (-1, 0, 1, 2)}
    size, e, grad = max(map(abs, phi.values())), flat(c.other), value_and_grad(c, c.delta)[1]
    assert abs(phi[2] - 3 * phi[1] + 3 * phi[0] - phi[-1]) <= 1e-10 * size
    assert abs((phi[1] - phi[-1]) / 2 - e @ grad) <= 1e-10 * size
    assert abs(phi[1] - 2 * phi[0] + phi[-1] - e @ G(c, c.other)) <= 1e-10 * size


OBJECTIVES = {"quadratic": QUADRATIC, "exact": EXACT}
METHODS = {"full": (QUADRATIC, gn.linearized), "prox": (EXACT, gn.linearized)}
METHODS["layerwise"] = QUADRATIC, layerwise_gn.linearized


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_fault_4_damping_acts_alike_on_the_loss_and_on_its_gradient(method, seed):
    """λ adds ½ λ |δ|² to the loss and λ δ to the gradient, with one sign in all three methods; the two belong together:

    (φ(h) - φ(-h)) / 2h = ε·∇, φ(s) the loss at δ + s ε.
    """
    c = case("cross-entropy", 3, seed)
    objective, linearized = METHODS[method]
    at = lambda delta, damping: value_and_grad(c, delta, objective, linearized=linearized, damping=damping)
    (value, grad), (damped, pulled), d = at(c.delta, 0.0), at(c.delta, 0.1), flat(c.delta)
    same((damped - value, pulled - grad), (0.05 * d @ d, 0.1 * d), size=abs(value))
    ends = [at(plus(c.delta, c.other, h), 0.1)[0] for h in (1e-4, -1e-4)]
    assert abs((ends[0] - ends[1]) / 2e-4 - flat(c.other) @ pulled) <= 1e-6 * np.linalg.norm(pulled)


@pytest.mark.parametrize("linearized", [gn.linearized, layerwise_gn.linearized], ids=["full", "layerwise"])
@settings(max_examples=10)
@given(c=cases(2), order=st.permutations(range(3)))
def test_order_of_sequences_does_not_matter(linearized, c, order):
    """A batch is a set: loss, value and gradient are the same for its sequences in any order."""
    size = len(c.tokens)
    results = [
        computed(c.network, c.theta, c.delta, tokens, QUADRATIC[c.loss], linearized)
        for tokens in (c.tokens, c.tokens[[i for i in order if i < size]])
    ]
    same(*results, tolerance=1e-11)


@settings(max_examples=6)
@given(c=cases(1))
def test_a_batch_repeated_twice_gives_the_same_step(c):
    """Means, not sums: losses, gradient, and the inner optimizer's step are those of the batch once."""
    twice = c._replace(tokens=np.concatenate([c.tokens, c.tokens]))
    one, two = (computed(c.network, c.theta, c.delta, case.tokens, QUADRATIC[c.loss]) for case in (c, twice))
    same(one, two, tolerance=1e-11)
    config = gn.Config(c.network, 1, 1)
    state = gn.init(c.theta, config)._replace(theta=plus(c.theta, c.delta))
    one, two = (gn.inner_step(kept(state), case.tokens, config) for case in (c, twice))
    same(one.theta, two.theta, tolerance=1e-7)  # the fifth power of a matrix, five times over, is between them
    assert np.abs(flat(one.theta) - flat(state.theta)).max() > 1e-4


@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(max_examples=20)
@given(c=cases(), scale=st.floats(0.1, 10))
def test_a_constant_added_to_all_logits_of_a_token_changes_nothing(objective, c, scale):
    """softmax does not see it: the head + w 1ᵀ adds h·w to every logit, and so does its tangent. Any w, for θ and δ."""
    w = scale * np.random.default_rng(0).normal(size=(c.network.d_model, 1))
    shifted = lambda tree: tree | {"head": tree["head"] + w}
    other = c._replace(theta=shifted(c.theta))
    one, two = (value_and_grad(*at, OBJECTIVES[objective]) for at in ((c, c.delta), (other, shifted(c.delta))))
    same(two, one, tolerance=1e-9 * scale)


# ---- GN-prox-linear -------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(c=EITHER_LOSS)
def test_prox_is_the_loss_of_the_linearized_model(c):
    """L1(δ) = ℓ(f(θ) + J δ) and its gradient, δ of any size."""
    want = expected(c)
    same(value_and_grad(c, c.delta, EXACT), (want["L1"], flat(want["∇L1"])))


@settings(max_examples=20)
@given(c=EITHER_LOSS, scale=st.floats(0.01, 10))
def test_prox_is_convex_along_any_line(c, scale):
    """φ(s) = L1(δ + s ε): φ(½) ≤ ½ φ(0) + ½ φ(1), and its slope rises: ε·(∇L1(δ + ε) - ∇L1(δ)) ≥ 0."""
    ends = [plus(c.delta, c.other, scale * s) for s in (0, 0.5, 1)]
    (a, g0), (middle, _), (b, g1) = (value_and_grad(c, delta, EXACT) for delta in ends)
    assert middle <= (a + b) / 2 + 1e-12 * (a + b)
    slopes = flat(c.other) @ g0, flat(c.other) @ g1
    assert slopes[1] - slopes[0] >= -1e-12 * sum(map(abs, slopes))


@settings(max_examples=10)
@given(c=cases(2, "squared error"))
def test_prox_of_a_quadratic_loss_is_gauss_newton(c):
    """Where ℓ is itself quadratic, nothing is expanded: L1 = L2 and ∇L1 = ∇L2 at every δ."""
    same(value_and_grad(c, c.delta, EXACT), value_and_grad(c, c.delta, QUADRATIC))


def mixed(z, y, share):
    """A convex loss between the two: quadratic where share is 0."""
    return squared(z, y) + share * cross_entropy(z, y)


SHARES = (0.1, 0.01)
MIXED = {s: [partial(f, ell=partial(mixed, share=s)) for f in (gn.quadratic, gn_prox.exact)] for s in SHARES}


def minimizer(c, objective, damping):
    """δ where the gradient of the objective is zero, by Newton's method with the curvature there, all columns of it."""
    size = flat(c.theta).size
    unravel = ravel_pytree(c.theta)[1]
    f = lambda d: ravel_pytree(computed(c.network, c.theta, unravel(d), c.tokens, objective, damping=damping)[1])[0]
    derivatives = jax.jit(lambda d: (f(d), jax.jacfwd(f)(d)))
    delta = np.zeros(size)
    for _ in range(20):
        grad, hessian = map(np.asarray, derivatives(delta))
        if np.linalg.norm(grad) < 1e-11:
            return delta
        delta = delta - np.linalg.solve(hessian, grad)
    raise AssertionError(f"Newton's method ended at a gradient of {np.linalg.norm(grad)}")


def test_minimizers_of_prox_and_gauss_newton_meet_as_the_loss_becomes_quadratic():
    """ℓ = ½|z - y|² + s cross-entropy: they are O(s) apart."""
    c, apart = case("cross-entropy", 3, 0), []
    for share in SHARES:
        one, two = (minimizer(c, objective, 0.01) for objective in MIXED[share])
        apart.append(np.linalg.norm(one - two) / np.linalg.norm(one))
    assert 5 < apart[0] / apart[1] < 20 and apart[1] > 1e-9


# ---- layerwise, conjugate gradients, line search ---------------------------------------------------------------------


def layers(tree):
    """The tree with zeros outside of layer l, for each l: embedding, blocks (final norm with the last), head."""
    nothing = jax.tree.map(jnp.zeros_like, tree)
    L = len(tree["blocks"]["wq"])
    yield nothing | {"embedding": tree["embedding"]}
    for i in range(L):
        blocks = jax.tree.map(lambda a, i=i: jnp.zeros_like(a).at[i].set(a[i]), tree["blocks"])
        yield nothing | {"blocks": blocks} | ({"final_norm": tree["final_norm"]} if i == L - 1 else {})
    yield nothing | {"head": tree["head"]}


@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(max_examples=10)
@given(c=cases(3))
def test_layerwise_is_the_diagonal_blocks(objective, c):
    """Layer l's gradient is the full method's at δ_l alone, so ∇ = ∇L + blockdiag(G) δ; what they add to L adds up."""
    value, grad = value_and_grad(c, c.delta, OBJECTIVES[objective], linearized=layerwise_gn.linearized)
    loss, _ = value_and_grad(c, zero(c), OBJECTIVES[objective])
    total, parts, mine = loss, 0.0, list(layers(jax.tree.map(jnp.ones_like, c.theta)))
    for where, delta in zip(mine, layers(c.delta), strict=True):
        one, full = value_and_grad(c, delta, OBJECTIVES[objective])
        parts, total = parts + flat(where) * full, total + one - loss
    same(flat(mine[0]) + sum(map(flat, mine[1:])), np.ones_like(grad))  # every parameter is in one layer
    same((value, grad), (total, parts))


@settings(max_examples=4)
@given(seed=st.integers(0, 2**32 - 1), damping=st.sampled_from([0.05, 1.0]))
def test_conjugate_gradients_solve_what_a_dense_solve_does(seed, damping):
    """δ = -(G + λ)⁻¹ ∇L on the whole batch, G written out a column a time from its products."""
    c = case("cross-entropy", 3, seed)
    config = gn.Config(c.network, 1, 1, inner="cg", cg_steps=2000, damping=damping)
    unravel = ravel_pytree(c.theta)[1]
    product = lambda v: computed(c.network, c.theta, v, c.tokens, CURVATURE[c.loss])[1]
    column = lambda e: ravel_pytree(product(unravel(e)))[0]
    eye = np.eye(flat(c.theta).size)
    matrix, g = jax.jit(jax.vmap(column))(eye), value_and_grad(c, zero(c))[1]
    state = gn.solve(gn.init(c.theta, config), c.tokens[None], config)
    same(flat(state.theta) - flat(c.theta), -np.linalg.solve(matrix + damping * eye, g), tolerance=1e-7)


@settings(max_examples=20)
@given(c=cases(), length=st.floats(0.01, 10), guard=st.booleans(), bad=st.sampled_from([None, np.nan, np.inf]))
def test_line_search_is_never_worse_than_its_grid_and_guarded_stays_finite(c, length, guard, bad):
    """L(θ + α s) is the least over α = 2^(-i/2) and, guarded, α = 0, which it is where a weight is not finite.

    Unguarded, as in the paper, there is then nothing to choose by, and the whole step is taken.
    """
    config = gn.Config(c.network, 1, 1, guard=guard)
    end = plus(c.theta, c.delta, length)
    if bad is not None:
        end["head"] = end["head"].at[0, 0].set(bad)
    alpha = float(gn.line_search(c.theta, end, lambda k: c.tokens, config))
    grid = [2 ** (-i / 2) for i in range(5)]
    at = lambda a: expected(c._replace(theta=gn.move(c.theta, end, a)))["L"]
    if bad is not None:
        assert alpha == (0 if guard else 1)
        same(gn.move(c.theta, end, 0.0), c.theta, 0.0)
    else:
        assert alpha in [0.0] * guard + grid
        assert at(alpha) <= min(at(a) for a in [0.0] * guard + grid) + 1e-12
