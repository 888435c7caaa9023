"""The identities of Gauss-Newton, in float64, for any small network, θ, change δ and tokens.

    f(θ): logits z [n, V] of a batch;  J = ∂f/∂θ;  ℓ: the loss of z, convex;  L(θ) = ℓ(f(θ))
    g = ∇ℓ(z),  H = ∇²ℓ(z);            ∇L = Jᵀ g;       G = Jᵀ H J            (Appendix A and B)
    L2(δ) = ℓ(z) + g·Jδ + ½ Jδ·H Jδ;   L1(δ) = ℓ(z + Jδ)                      (Algorithms 1 and 2)

One side of an identity is what the methods compute. The other side is what they compute at another
place, or is written here: with the logits of the whole batch, H in closed form, and nothing but
jax.jvp, jax.vjp and jax.grad.

Hypothesis draws the network by its number, and a seed from which all else is drawn. To try more
networks, raise NETWORKS, or add to FEW, those of the tests that compile for long. The last part
gives gn.py a network that is no LLaMA.
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import copied, logits, random_params, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from trees import add, flat

import gn
import gn_cg
import gn_prox
import layerwise_gn
import model
import optimizers
from line_search import line_search
from runtime import flags

NETWORKS = 4
FEW = [0, 3]  # numbers of networks: one of one layer, and one of two


@pytest.fixture(autouse=True, scope="module")
def in_float64():
    with jax.enable_x64(True):
        yield


# ---- what an identity is tried on ----------------------------------------------------------------


@lru_cache
def random_network(number):
    """Network `number`: one or two layers, 4 to 16 wide, and any choice of the rest."""
    rng = np.random.default_rng(number)
    heads = int(rng.choice([1, 2, 4]))
    return model.Config(
        vocab_size=int(rng.integers(5, 41)),
        context=int(rng.integers(2, 9)),
        d_model=int(rng.choice([d for d in range(4, 17) if d % (2 * heads) == 0])),
        d_ff=int(rng.integers(4, 17)),
        n_layers=1 + number // 2 % 2,
        n_heads=heads,
        n_kv_heads=int(rng.choice([n for n in (1, 2, 4) if heads % n == 0])),
        mlp=("gelu", "swiglu")[number % 2],
        qk_norm=number % 4 in (0, 3),
        head_chunk=int(rng.integers(1, 13)),
    )


def test_networks_are_of_every_kind():
    networks = [random_network(number) for number in range(NETWORKS)]
    assert {network.n_layers for network in networks} == {1, 2}
    assert {network.mlp for network in networks} == {"gelu", "swiglu"}
    assert {network.qk_norm for network in networks} == {True, False}
    assert len({network.n_heads // network.n_kv_heads for network in networks}) > 1
    assert all(4 <= network.d_model <= 16 for network in networks)


class Case(NamedTuple):
    """What an identity is tried on."""

    loss: str  # the name of ℓ
    number: int  # of the network
    seed: int  # of all that follows
    network: model.Config
    theta: dict  # θ, where the network is linearized
    delta: dict  # δ, a change of it
    other: dict  # another change, ε
    tokens: np.ndarray  # int32 [B, T+1]

    def __repr__(self):
        return f"case({self.loss!r}, {self.number}, {self.seed})"


@lru_cache(maxsize=50)
def case(loss, number, seed):
    network = random_network(number)
    theta = random_params(network, seed)
    vector, unravel = ravel_pytree(theta)
    delta, other = np.random.default_rng(seed).normal(size=(2, vector.size)) * 0.3
    tokens = random_tokens(network, 2 + number % 2, seed)
    return Case(loss, number, seed, network, theta, unravel(delta), unravel(other), tokens)


SEEDS = st.integers(0, 2**32 - 1)


def cases(networks=range(NETWORKS), losses=("cross-entropy",)):
    return st.builds(case, st.sampled_from(losses), st.sampled_from(networks), SEEDS)


# The method holds for any convex loss.
EITHER_LOSS = cases(losses=("cross-entropy", "squared error"))


def zero(c):
    return jax.tree.map(jnp.zeros_like, c.theta)


def ones(c):
    return jax.tree.map(jnp.ones_like, c.theta)


def same(a, b, tolerance=1e-9, size=0.0):
    """a = b up to rounding; if these are differences of large vectors, `size` is their norm."""
    a, b = flat(a), flat(b)
    assert a.shape == b.shape
    assert np.linalg.norm(a - b) <= tolerance * (np.linalg.norm(b) + size + 1e-3)


# ---- the project's side --------------------------------------------------------------------------


def squared_error(z, y):
    """Another convex loss: ½ |z - onehot(y)|², summed over tokens."""
    return jnp.sum((z - jax.nn.one_hot(y, z.shape[-1], dtype=z.dtype)) ** 2) / 2


LOSSES = {"cross-entropy": model.cross_entropy, "squared error": squared_error}
OBJECTIVES = {"quadratic": gn.quadratic, "exact": gn_prox.exact, "curvature": gn_cg.curvature}
CHOICES = list(itertools.product(OBJECTIVES, LOSSES))


@partial(jax.jit, static_argnames=("network", "method"))
def computed(network, theta, delta, tokens, choice, method=gn):
    """L(θ), the value of an objective at δ, and its gradient there.

    choice: the place of the objective and its loss in CHOICES, so that one program serves them all.
    """
    branches = [partial(OBJECTIVES[name], loss=LOSSES[loss]) for name, loss in CHOICES]

    def objective(z, v, y):
        return jax.lax.switch(choice, branches, z, v, y)

    return method.value_and_grad(theta, delta, tokens, gn.Config(network, 1, 1), objective)


def results(c, delta, objective="quadratic", method=gn, tokens=None):
    """What `computed` gives for a case."""
    tokens = c.tokens if tokens is None else tokens
    return computed(c.network, c.theta, delta, tokens, CHOICES.index((objective, c.loss)), method)


def value_and_grad(c, delta, objective="quadratic", method=gn):
    """The value of the objective at δ and its gradient, [P]."""
    _, value, grad = results(c, delta, objective, method)
    return float(value), flat(grad)


def value_of(c, delta, objective="quadratic"):
    return value_and_grad(c, delta, objective)[0]


def grad_of(c, delta, objective="quadratic"):
    return value_and_grad(c, delta, objective)[1]


def G_times(c, v):
    """G v, as conjugate gradients see it."""
    return grad_of(c, v, "curvature")


# ---- the textbook's side -------------------------------------------------------------------------


class Textbook(NamedTuple):
    """What the identities say, from the logits of the whole batch; means over tokens."""

    L: jax.Array  # L(θ)
    grad_L: dict  # Jᵀ g
    G_v: dict  # Jᵀ H J v, with H in closed form
    G_v_by_differentiation: dict  # Jᵀ H J v, with H v = (d/ds) ∇ℓ(z + s J v)
    L1: jax.Array  # ℓ(z + J δ)
    grad_L1: dict  # Jᵀ ∇ℓ(z + J δ)
    hessian_v: dict  # ∇²L v
    residual_part: dict  # Σ_i g_i ∇²f_i v


@partial(jax.jit, static_argnums=0)
def textbook(network, theta, delta, v, tokens, squared):
    """squared: whether ℓ is the squared error."""
    y = tokens[:, 1:].reshape(-1)
    onehot = jnp.eye(network.vocab_size)[y]

    def f(theta):
        return logits(network, theta, tokens).reshape(len(y), -1)

    def ell(z):
        return jnp.where(squared, squared_error(z, y), model.cross_entropy(z, y)) / len(y)

    z, push = jax.linearize(f, theta)
    pull = jax.vmap(jax.linear_transpose(push, theta))
    delta_and_v = jax.tree.map(lambda a, b: jnp.stack([a, b]), delta, v)
    J_delta, Jv = jax.vmap(push)(delta_and_v)

    p = jax.nn.softmax(z)
    g_closed = jnp.where(squared, z, p) - onehot
    H_of_cross_entropy = p * Jv - p * jnp.sum(p * Jv, axis=-1, keepdims=True)  # (diag(p) - p pᵀ) Jv
    Hv_closed = jnp.where(squared, Jv, H_of_cross_entropy)
    _, Hv = jax.jvp(jax.grad(ell), (z,), (Jv,))
    g_at_delta = jax.grad(ell)(z + J_delta)
    cotangents = jnp.stack([g_closed / len(y), Hv_closed / len(y), Hv, g_at_delta])
    (pulled,) = pull(cotangents)
    grad_L, G_v, G_v_by_differentiation, grad_L1 = (
        jax.tree.map(lambda a, i=i: a[i], pulled) for i in range(4)
    )

    def gradients(theta):
        """∇L, and the same with g held still: Jᵀ g, of which only J changes."""
        z, pullback = jax.vjp(f, theta)
        g = jax.grad(ell)(z)
        (grad,) = jax.vmap(pullback)(jnp.stack([g, jax.lax.stop_gradient(g)]))
        return grad

    _, changes = jax.jvp(gradients, (theta,), (v,))
    hessian_v = jax.tree.map(lambda a: a[0], changes)
    residual_part = jax.tree.map(lambda a: a[1], changes)
    L, L1 = ell(z), ell(z + J_delta)
    return Textbook(L, grad_L, G_v, G_v_by_differentiation, L1, grad_L1, hessian_v, residual_part)


def expected(c, v=None):
    v = c.other if v is None else v
    return textbook(c.network, c.theta, c.delta, v, c.tokens, c.loss == "squared error")


# ---- G -------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(c=EITHER_LOSS)
def test_curvature_is_symmetric_and_positive_semidefinite(c):
    """u·G v = v·G u and v·G v ≥ 0, since G = Jᵀ H J and H is so."""
    u, v = flat(c.delta), flat(c.other)
    Gu, Gv = G_times(c, c.delta), G_times(c, c.other)
    size = np.linalg.norm(u) * np.linalg.norm(Gv)
    assert abs(u @ Gv - v @ Gu) <= 1e-10 * size
    assert v @ Gv >= 0
    assert u @ Gu >= 0
    assert np.isclose(value_of(c, c.other, "curvature"), v @ Gv / 2, rtol=1e-9)


@settings(max_examples=40)
@given(c=EITHER_LOSS)
def test_curvature_is_the_hessian_of_the_linearized_networks_loss(c):
    """G v = Jᵀ H J v, with H written down and by differentiating ℓ twice."""
    Gv = G_times(c, c.other)
    same(Gv, expected(c).G_v)
    same(Gv, expected(c).G_v_by_differentiation)


@settings(max_examples=40)
@given(c=EITHER_LOSS)
def test_hessian_minus_curvature_is_the_networks_own_weighted_by_the_residual(c):
    """∇²L v - G v = Σ_i g_i ∇²f_i v: what Gauss-Newton leaves out of Newton (Section 2)."""
    Gv = G_times(c, c.other)
    rest = flat(expected(c).residual_part)
    size = np.linalg.norm(Gv)
    same(flat(expected(c).hessian_v) - Gv, rest, size=size)
    assert np.linalg.norm(rest) > 1e-6 * size  # else this would not tell G from the Hessian


@settings(max_examples=40)
@given(c=EITHER_LOSS)
def test_for_a_network_linear_in_its_parameters_it_is_the_hessian(c):
    """f is linear in the head: the head's block of G is that of ∇²L. Elsewhere they differ."""
    v = zero(c) | {"head": c.other["head"]}
    _, _, Gv = results(c, v, "curvature")
    hessian_v = expected(c, v).hessian_v
    same(Gv["head"], hessian_v["head"])
    assert np.linalg.norm(flat(Gv["blocks"]) - flat(hessian_v["blocks"])) > 1e-9


# ---- the objective of Gauss-Newton ---------------------------------------------------------------


@settings(max_examples=40)
@given(c=EITHER_LOSS, scale=st.sampled_from([1e-3, 1, 30]))
def test_gradient_is_that_of_the_loss_plus_curvature_times_delta(c, scale):
    """∇L2(δ) = ∇L + G δ, and L2(δ) = L + ∇L·δ + ½ δ·G δ, for a δ of any size."""
    c = c._replace(delta=jax.tree.map(lambda a: scale * a, c.delta))
    value, grad = value_and_grad(c, c.delta)
    true = expected(c, v=c.delta)
    d = flat(c.delta)
    same(grad, add(true.grad_L, true.G_v))
    same(value, true.L + flat(true.grad_L) @ d + d @ flat(true.G_v) / 2)


@settings(max_examples=40)
@given(c=EITHER_LOSS)
def test_value_is_exactly_quadratic_along_any_line(c):
    """φ(s) = L2(δ + s ε): no third difference; φ' = ε·∇L2(δ) and φ'' = ε·G ε by differences."""
    phi = {s: value_of(c, add(c.delta, c.other, s)) for s in (-1, 0, 1, 2)}
    rounding = 1e-10 * max(abs(value) for value in phi.values())
    e = flat(c.other)
    assert abs(phi[2] - 3 * phi[1] + 3 * phi[0] - phi[-1]) <= rounding
    slope = (phi[1] - phi[-1]) / 2
    assert abs(slope - e @ grad_of(c, c.delta)) <= rounding
    second = phi[1] - 2 * phi[0] + phi[-1]
    assert abs(second - e @ G_times(c, c.other)) <= rounding


class GradientDescent:
    """Its inner step shows the gradient: θ - lr ∇."""

    def optimizer(self, lr):
        return optax.sgd(lr)


@flags.traced
@dataclass(frozen=True)
class Full(GradientDescent, gn.Config):
    pass


@flags.traced
@dataclass(frozen=True)
class Prox(GradientDescent, gn_prox.Config):
    pass


@flags.traced
@dataclass(frozen=True)
class Layerwise(GradientDescent, layerwise_gn.Config):
    pass


METHODS = {"full": Full, "prox": Prox, "layerwise": Layerwise}


def damped(c, theta, method, damping):
    """The loss that an inner step of a method at θ reports, and the gradient that it descends."""
    config = method(c.network, 1, 1, lr=1.0, damping=damping)
    state = gn.init(c.theta, config)._replace(theta=copied(theta))
    after = gn.inner_step(state, c.tokens, config)
    return float(after.inner_losses[0]), flat(theta) - flat(after.theta)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=5)
@given(seed=SEEDS)
def test_fault_4_damping_acts_alike_on_the_loss_and_on_its_gradient(method, seed):
    """λ adds ½ λ |δ|² to the loss and λ δ to the gradient, with one sign in all three methods.

    And the two belong together: (φ(h) - φ(-h)) / 2h = ε·∇, φ(s) being the loss at δ + s ε.
    """
    c = case("cross-entropy", 0, seed)
    step_at = partial(damped, c, method=METHODS[method])
    theta = add(c.theta, c.delta)
    value, grad = step_at(theta, damping=0.0)
    damped_value, damped_grad = step_at(theta, damping=0.1)
    d = flat(c.delta)
    found = (damped_value - value, damped_grad - grad)
    same(found, (0.05 * d @ d, 0.1 * d), size=abs(value))

    h = 1e-4
    above, _ = step_at(add(theta, c.other, h), damping=0.1)
    below, _ = step_at(add(theta, c.other, -h), damping=0.1)
    slope = flat(c.other) @ damped_grad
    assert abs((above - below) / (2 * h) - slope) <= 1e-6 * np.linalg.norm(damped_grad)


@pytest.mark.parametrize("method", [gn, layerwise_gn], ids=["full", "layerwise"])
@settings(max_examples=10)
@given(c=cases(FEW), order=st.permutations(range(3)))
def test_order_of_sequences_does_not_matter(method, c, order):
    """A batch is a set: loss, value and gradient are the same for its sequences in any order."""
    order = [i for i in order if i < len(c.tokens)]
    in_order = results(c, c.delta, method=method)
    shuffled = results(c, c.delta, method=method, tokens=c.tokens[order])
    same(shuffled, in_order, tolerance=1e-11)


@settings(max_examples=6)
@given(c=cases([0]))
def test_a_batch_repeated_twice_gives_the_same_step(c):
    """Means, not sums: losses, gradient and the inner optimizer's step are those of the batch."""
    twice = np.concatenate([c.tokens, c.tokens])
    same(results(c, c.delta, tokens=twice), results(c, c.delta), tolerance=1e-11)

    config = gn.Config(c.network, 1, 1)
    state = gn.init(c.theta, config)._replace(theta=add(c.theta, c.delta))
    once = gn.inner_step(copied(state), c.tokens, config)
    again = gn.inner_step(copied(state), twice, config)
    # Newton-Schulz is between them, which takes the fifth power of a matrix five times over.
    same(again.theta, once.theta, tolerance=1e-7)
    assert np.abs(flat(once.theta) - flat(state.theta)).max() > 1e-4


@pytest.mark.parametrize("objective", ["quadratic", "exact"])
@settings(max_examples=20)
@given(c=cases(), scale=st.floats(0.1, 10))
def test_a_constant_added_to_all_logits_of_a_token_changes_nothing(objective, c, scale):
    """softmax does not see it.

    w is added to every column of the head, and of its change. So all logits of a token grow by one
    number, and so do all their changes.
    """
    w = scale * np.random.default_rng(0).normal(size=(c.network.d_model, 1))
    theta = c.theta | {"head": c.theta["head"] + w}
    delta = c.delta | {"head": c.delta["head"] + w}
    shifted = value_and_grad(c._replace(theta=theta), delta, objective)
    same(shifted, value_and_grad(c, c.delta, objective), tolerance=1e-9 * scale)


# ---- GN-prox-linear ------------------------------------------------------------------------------


@settings(max_examples=40)
@given(c=EITHER_LOSS, scale=st.sampled_from([1e-3, 1, 30]))
def test_prox_is_the_loss_of_the_linearized_network(c, scale):
    """L1(δ) = ℓ(f(θ) + J δ) and its gradient, for a δ of any size."""
    c = c._replace(delta=jax.tree.map(lambda a: scale * a, c.delta))
    true = expected(c)
    same(value_and_grad(c, c.delta, "exact"), (true.L1, flat(true.grad_L1)))


@settings(max_examples=20)
@given(c=EITHER_LOSS, scale=st.floats(0.01, 10))
def test_prox_is_convex_along_any_line(c, scale):
    """φ(s) = L1(δ + s ε): φ(½) ≤ ½ φ(0) + ½ φ(1), and its slope rises: φ'(1) ≥ φ'(0)."""
    middle, end = (add(c.delta, c.other, scale * s) for s in (0.5, 1))
    phi_0, grad_0 = value_and_grad(c, c.delta, "exact")
    phi_half, _ = value_and_grad(c, middle, "exact")
    phi_1, grad_1 = value_and_grad(c, end, "exact")
    assert phi_half <= (phi_0 + phi_1) / 2 + 1e-12 * (phi_0 + phi_1)
    slope_0, slope_1 = flat(c.other) @ grad_0, flat(c.other) @ grad_1
    assert slope_1 - slope_0 >= -1e-12 * (abs(slope_0) + abs(slope_1))


@settings(max_examples=10)
@given(c=cases(losses=("squared error",)))
def test_prox_of_a_quadratic_loss_is_gauss_newton(c):
    """Where ℓ is itself quadratic, nothing is expanded: L1 = L2 and ∇L1 = ∇L2 at every δ."""
    same(value_and_grad(c, c.delta, "exact"), value_and_grad(c, c.delta))


@partial(jax.jit, static_argnames=("network", "objective"))
def gradient_and_curvature(network, theta, d, tokens, share, objective):
    """Gradient [P] and Hessian [P, P] in δ of an objective, the loss being almost quadratic."""
    _, unravel = ravel_pytree(theta)

    def almost_quadratic(z, y):
        return squared_error(z, y) + share * model.cross_entropy(z, y)

    def gradient(d):
        config = gn.Config(network, 1, 1)
        of_loss = partial(objective, loss=almost_quadratic)
        _, _, grad = gn.value_and_grad(theta, unravel(d), tokens, config, of_loss)
        return ravel_pytree(grad)[0] + 0.01 * d

    return gradient(d), jax.jacfwd(gradient)(d)


def minimizer(c, objective, share):
    """δ where the gradient is zero, by Newton's method, [P]."""
    d = np.zeros(flat(c.theta).size)
    for _ in range(20):
        grad, hessian = gradient_and_curvature(c.network, c.theta, d, c.tokens, share, objective)
        if np.linalg.norm(grad) < 1e-11:
            return d
        d = d - np.linalg.solve(hessian, grad)
    raise AssertionError(f"Newton's method ended at a gradient of {np.linalg.norm(grad)}")


def test_minimizers_of_prox_and_gauss_newton_meet_as_the_loss_becomes_quadratic():
    """ℓ = ½|z - y|² + s cross-entropy: the two minimizers are O(s) apart."""
    c = case("cross-entropy", 0, 0)
    apart = []
    for share in (0.1, 0.01):
        prox = minimizer(c, gn_prox.exact, share)
        full = minimizer(c, gn.quadratic, share)
        apart.append(np.linalg.norm(full - prox) / np.linalg.norm(full))
    far, near = apart
    assert 5 < far / near < 20
    assert near > 1e-9


# ---- layerwise, line search ----------------------------------------------------------------------


def layers(tree):
    """For each layer the tree with zeros outside of it: embedding, blocks, head.

    The final norm goes with the last block.
    """
    nothing = jax.tree.map(jnp.zeros_like, tree)
    yield nothing | {"embedding": tree["embedding"]}
    L = len(tree["blocks"]["wq"])
    for i in range(L):
        blocks = jax.tree.map(lambda a, i=i: jnp.zeros_like(a).at[i].set(a[i]), tree["blocks"])
        layer = nothing | {"blocks": blocks}
        if i == L - 1:
            layer["final_norm"] = tree["final_norm"]
        yield layer
    yield nothing | {"head": tree["head"]}


@pytest.mark.parametrize("objective", ["quadratic", "exact"])
@settings(max_examples=10)
@given(c=cases(FEW))
def test_layerwise_is_the_diagonal_blocks(objective, c):
    """Layer l's gradient is the full method's at δ_l alone, and what the layers add to L adds up.

    For the quadratic, the gradient is ∇L + blockdiag(G) δ.
    """
    total = loss = value_of(c, zero(c), objective)
    grad, members = 0.0, 0.0
    for is_in_layer, delta_l in zip(layers(ones(c)), layers(c.delta), strict=True):
        value_l, grad_l = value_and_grad(c, delta_l, objective)
        total += value_l - loss
        grad += flat(is_in_layer) * grad_l
        members += flat(is_in_layer)
    same(members, np.ones_like(members))  # every parameter is in one layer
    same(value_and_grad(c, c.delta, objective, layerwise_gn), (total, grad))


@settings(max_examples=20)
@given(
    c=cases(FEW),
    length=st.floats(0.01, 10),
    guard=st.booleans(),
    bad=st.sampled_from([None, np.nan, np.inf]),
)
def test_line_search_is_never_worse_than_its_grid_and_guarded_stays_finite(c, length, guard, bad):
    """L(θ + α s) is the least over α = 2^(-i/2) and, guarded, α = 0.

    Where a weight is not finite, the guard takes α = 0. Unguarded, as in the paper, there is then
    nothing to choose by, and the whole step is taken.
    """
    config = gn.Config(c.network, 1, 1, guard=guard)
    end = add(c.theta, c.delta, length)
    if bad is not None:
        end["head"] = end["head"].at[0, 0].set(bad)
    alpha, metrics, _ = line_search(c.theta, end, lambda k: c.tokens, config)
    assert metrics.pop("alpha") == alpha
    if bad is not None:
        assert alpha == (0 if guard else 1)
        return

    def loss_at(alpha):
        point = add(c.theta, add(end, c.theta, -1), alpha)
        return expected(c._replace(theta=point)).L

    grid = [2 ** (-i / 2) for i in range(5)]
    if guard:
        grid = [0.0, *grid]
    assert float(alpha) in grid
    true_losses = [loss_at(a) for a in grid]
    same(list(metrics.values()), true_losses, tolerance=1e-10)
    assert loss_at(alpha) <= min(true_losses) + 1e-12


@settings(max_examples=20)
@given(c=cases(FEW), limit=st.floats(1e-3, 10))
def test_a_clip_shortens_each_part_to_the_limit_and_does_nothing_twice(c, limit):
    """A part keeps its direction and gets the length min(norm, limit). Then it stays as it is.

    The parts are the layers, or embedding with head and the rest, or everything.
    """
    nothing = jax.tree.map(jnp.zeros_like, c.theta)
    ends = c.delta | {"blocks": nothing["blocks"], "final_norm": nothing["final_norm"]}
    inside = add(c.delta, ends, -1)
    each_layer = [jax.tree.map(jnp.multiply, layer, c.delta) for layer in layers(ones(c))]
    for make, parts in (
        (layerwise_gn.clip_layers, each_layer),
        (optimizers.clip_ends_apart, [ends, inside]),
        (optimizers.clip_by_norm, [c.delta]),
    ):
        rule = make(limit)
        clipped, state = rule.update(c.delta, rule.init(c.delta))
        shortened = 0.0
        for part in map(flat, parts):
            shortened += part * min(1, limit / np.linalg.norm(part))
        same(clipped, shortened, tolerance=1e-12)
        again, _ = rule.update(clipped, state)
        same(again, clipped, tolerance=1e-12)


# ---- a network that is no LLaMA ------------------------------------------------------------------


class Perceptron:
    """One hidden layer with biases: whole numbers [B, 3] in, a choice of 4 out.

    The class stands for a module: its functions are called on the class itself. They are all that
    gn.py asks of the module that provides a network, and of its sizes it asks for a `dtype`.
    """

    def inputs_and_labels(points):
        """Of rows (x_1, x_2, x_3, y): x [B, 3] and y [B]."""
        return points[:, :-1] / 10, points[:, -1]

    def hidden(network, params, x):
        return jnp.tanh(x @ params["weight"] + params["bias"][None])

    def output(params, h):
        return h @ params["head"] + params["head_bias"][None]

    def head_both_ways(network, theta0, delta):
        def both_ways(h, dh):
            z, v = jax.jvp(Perceptron.output, (theta0, h), (delta, dh))
            _, pullback = jax.vjp(Perceptron.output, theta0, h)

            def pull(u):
                grad, h_bar = pullback(u)
                return h_bar, {name: grad[name] for name in ("head", "head_bias")}

            return z, v, pull

        return both_ways

    def over_tokens(network, f, *arrays):
        """All points at once."""
        return f(*arrays)

    def loss(network, params, points):
        x, y = Perceptron.inputs_and_labels(points)
        z = Perceptron.output(params, Perceptron.hidden(network, params, x))
        return model.cross_entropy(z, y) / len(y)


class Sizes(NamedTuple):
    dtype: str = "float32"


def perceptron_case(seed):
    """Random parameters, a change δ, and two inner batches of points, [2, 6, 4]."""
    rng = np.random.default_rng(seed)
    shapes = {"weight": (3, 5), "bias": (5,), "head": (5, 4), "head_bias": (4,)}
    theta = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    delta = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    x = rng.integers(-20, 21, (2, 6, 3))
    y = rng.integers(0, 4, (2, 6, 1))
    return theta, delta, np.concatenate([x, y], axis=2)


@jax.jit
def perceptron_dense(theta, points):
    """The loss, g [P] and G [P, P] of the perceptron, written down in full, and G once more.

    Then it is the Hessian of the loss of the linearized network.
    """
    x, y = Perceptron.inputs_and_labels(points)
    vector, unravel = ravel_pytree(theta)

    def f(vector):
        params = unravel(vector)
        return Perceptron.output(params, Perceptron.hidden(None, params, x))

    z = f(vector)
    J = jax.jacfwd(f)(vector)  # [B, 4, P]
    p = jax.nn.softmax(z)
    g = jnp.einsum("bvp,bv->p", J, p - jnp.eye(4)[y])
    H = jax.vmap(lambda p: jnp.diag(p) - jnp.outer(p, p))(p)
    G = jnp.einsum("bvp,bvw,bwq->pq", J, H, J)

    def linearized(d):
        return model.cross_entropy(z + J @ d, y) / len(y)

    same_G = jax.hessian(linearized)(jnp.zeros_like(vector))
    return Perceptron.loss(None, theta, points), g / len(y), G / len(y), same_G


@settings(max_examples=20)
@given(seed=SEEDS)
def test_gradient_of_another_network_is_g_plus_G_delta(seed):
    """To rounding, for any parameters, any δ and any points."""
    theta, delta, (points, _) = perceptron_case(seed)
    config = gn.Config(Sizes(), 1, 1, model=Perceptron)
    loss, value, grad = jax.jit(gn.value_and_grad)(theta, delta, points, config)
    true_loss, g, G, same_G = perceptron_dense(theta, points)
    same(G, same_G, tolerance=1e-10)
    d = flat(delta)
    same(grad, g + G @ d, tolerance=1e-10)
    same((loss, value), (true_loss, true_loss + g @ d + d @ G @ d / 2), tolerance=1e-10)


@settings(max_examples=5)
@given(seed=SEEDS)
def test_an_outer_step_of_another_network_is_two_inner_ones_by_hand(seed):
    """gn.py asks no more of a network than the functions of `Perceptron`: it trains like any other.

    Without a line search, θ_{t+1} is the θ after two steps of the inner optimizer on g + G δ.
    """
    theta0, _, points = perceptron_case(seed)
    config = gn.Config(Sizes(), 2, 1, model=Perceptron, lr=0.02, line_search=0, average=0.0)
    vector, unravel = ravel_pytree(theta0)
    theta, opt = theta0, config.optimizer(0.0).init(theta0)
    for k in range(2):
        _, g, G, _ = perceptron_dense(theta0, points[k])
        lr = gn.learning_rate(0, k, config)
        grad = unravel(g + G @ (flat(theta) - vector))
        step, opt = config.optimizer(lr).update(grad, opt, theta)
        theta = add(theta, step)

    after, _ = gn.update(gn.init(theta0, config), points.__getitem__, None, config)
    same(after.params, theta, tolerance=1e-7)


@settings(max_examples=10)
@given(seed=SEEDS, damping=st.floats(0.05, 1))
def test_conjugate_gradients_on_another_network_are_the_dense_solve(seed, damping):
    """A whole step, solved for on two inner batches, searched along, taken: θ - α (G + λI)⁻¹ ∇L."""
    theta, _, points = perceptron_case(seed)
    config = gn_cg.Config(Sizes(), 2, 1, model=Perceptron, damping=damping, cg_steps=500)
    start = gn_cg.init(theta, config)
    state, metrics = gn_cg.update(start, points.__getitem__, points.__getitem__, config)
    _, g, G, _ = perceptron_dense(theta, points.reshape(12, 4))
    step = -np.linalg.solve(G + damping * np.eye(len(g)), g)
    assert metrics["alpha"] > 0
    same(flat(state.params) - flat(theta), metrics["alpha"] * step, tolerance=1e-7)
