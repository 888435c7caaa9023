"""AdamW against its formula, Muon against its definition and optax.

Tests named test_fault_N guard against fault N of docs/faults.md.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TOY, VARIANTS, assert_same, random_params

import model
import optimizers
import soap

TWELVE = dataclasses.replace(TOY, n_layers=12)


def random_like(params, seed):
    """A tree of gradients."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), params)


def steps_of(optimizer, params, grads):
    """The steps that an optimizer makes of one gradient after another, and its last state."""
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    steps = []
    for grad in grads:
        step, state = update(grad, state, params)
        steps.append(step)
    return steps, state


def assert_allclose(a, b, rtol=1e-6, atol=1e-8):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), a, b)


# ---- which parameters are treated alike ----------------------------------------------------------

MATRIX_NAMES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


@pytest.mark.parametrize("network", [*VARIANTS.values(), TWELVE], ids=[*VARIANTS, "twelve layers"])
def test_every_parameter_is_in_exactly_one_group(network):
    """Matrices inside the blocks, vectors, embedding, head; also where there are twelve blocks.

    The optimizer's own state says so too: each parameter has moments in one of them, not in two.
    """
    params = random_params(network)
    groups = optimizers.groups(params)
    inside = groups.pop("blocks")
    expected = {k: "matrices" if k in MATRIX_NAMES else "vectors" for k in params["blocks"]}
    assert inside == expected
    assert groups == {"embedding": "embedding", "final_norm": "vectors", "head": "head"}

    def numbers(state):
        """How many, counters aside."""
        return sum(a.size for a in jax.tree.leaves(state) if a.ndim)

    _, rules = optimizers.muon(0.1, 0.95, 0.0, 1.0).init(params)
    sizes = {name: numbers(state) for name, state in rules.inner_states.items()}
    matrices = sum(a.size for name, a in params["blocks"].items() if name in MATRIX_NAMES)
    ends = {name: params[name].size for name in ("embedding", "head")}
    vectors = model.size(network) - matrices - sum(ends.values())
    ends = {name: 2 * size for name, size in ends.items()}
    assert sizes == {"matrices": matrices, "vectors": 2 * vectors, **ends}


def test_norms_of_a_step_are_those_of_the_groups(float64):
    """|θ - θ_t| over the numbers of each group; together they are |θ - θ_t|."""
    params, theta = random_params(TOY), random_params(TOY, 1)
    found = optimizers.norms_of_step(params, theta)
    squares = {}
    groups = optimizers.groups(params)

    def count(a, b, group):
        name = f"norm_{group}"
        squares[name] = squares.get(name, 0) + np.sum((np.asarray(b) - np.asarray(a)) ** 2)

    jax.tree.map(count, params, theta, groups)
    assert found.keys() == squares.keys()
    assert found.keys() == {"norm_matrices", "norm_vectors", "norm_embedding", "norm_head"}
    for name, square in squares.items():
        np.testing.assert_allclose(found[name], square**0.5, rtol=1e-12)


@pytest.mark.parametrize("network", [*VARIANTS.values(), TWELVE], ids=[*VARIANTS, "twelve layers"])
def test_weight_decay_reaches_matrices_only(network):
    """Embedding, head and the matrices inside the blocks; no norm and no bias."""
    params = random_params(network)
    found = optimizers.is_matrix(params)
    assert found.pop("blocks") == {name: name in MATRIX_NAMES for name in params["blocks"]}
    assert found == {"embedding": True, "final_norm": False, "head": True}


@pytest.mark.parametrize(
    "optimizer",
    [
        optimizers.muon(0.1, 0.95, 0.5, 1.0),
        optimizers.adamw(0.1, 0.9, 0.99, 0.5, 1.0),
        soap.soap(0.1, 0.9, 0.99, 0.5, 1.0, 1, 10_000),
    ],
    ids=["muon", "adamw", "soap"],
)
def test_without_a_gradient_matrices_shrink_by_lr_times_weight_decay(optimizer, float64):
    params = random_params(TOY)
    zero = jax.tree.map(jnp.zeros_like, params)
    steps, _ = steps_of(optimizer, params, [zero, zero])  # SOAP's first never makes a step
    matrices = optimizers.is_matrix(params)
    expected = jax.tree.map(lambda a, decays: -0.05 * a * decays, params, matrices)
    for step in steps:
        assert_allclose(step, expected, rtol=1e-9, atol=1e-12)


def test_scale_matrices_leaves_norms():
    params = random_params(TOY)
    matrices = optimizers.is_matrix(params)
    expected = jax.tree.map(lambda a, scales: a / 2 if scales else a, params, matrices)
    assert_same(optimizers.scale_matrices(params, 0.5), expected)


# ---- AdamW and Muon ------------------------------------------------------------------------------


def test_adamw_is_its_formula(float64):
    """θ -= lr (m̂ / (√v̂ + ε) + w θ), w on matrices only; gradients are clipped as a whole."""
    params = random_params(TOY)
    grads = [random_like(params, n) for n in range(3)]
    steps, _ = steps_of(optimizers.adamw(0.1, 0.8, 0.9, 0.3, 0.5), params, grads)
    m = v = jax.tree.map(jnp.zeros_like, params)
    for n, (grad, found) in enumerate(zip(grads, steps, strict=True), 1):
        norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grad)))
        grad = jax.tree.map(lambda g, norm=norm: 0.5 * g / norm, grad)
        m = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, m, grad)
        v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, v, grad)

        def step(theta, m, v, decays, n=n):
            adam = m / (1 - 0.8**n) / (np.sqrt(v / (1 - 0.9**n)) + 1e-8)
            return -0.1 * (adam + 0.3 * decays * theta)

        assert_allclose(found, jax.tree.map(step, params, m, v, optimizers.is_matrix(params)))


def newton_schulz(m):
    """Five steps of x <- a x + (b A + c A²) x, A = x xᵀ, from m / |m|, a wide or square matrix."""
    x = m / np.linalg.norm(m)
    if x.shape[0] > x.shape[1]:
        return newton_schulz(m.T).T
    for _ in range(5):
        A = x @ x.T
        x = 3.4445 * x + (-4.7750 * A + 2.0315 * A @ A) @ x
    return x


def test_muon_orthogonalizes_each_layers_matrix_and_scales_it_by_its_shape(float64):
    """The first step of [L, in, out] is -lr √max(1, out/in) NS(gradient), each layer by itself.

    Its singular values over that scale are near one.
    """
    network = dataclasses.replace(TOY, d_ff=32, n_layers=3, n_heads=2, n_kv_heads=1)
    params = random_params(network)
    grad = random_like(params, 0)
    (step,), _ = steps_of(optimizers.muon(0.5, 0.95, 0.0, 0.0), params, [grad])
    shapes = set()
    for name in model.MATRICES:
        if name not in params["blocks"]:
            continue
        rows, columns = params["blocks"][name].shape[1:]
        shapes.add((rows, columns))
        scale = -0.5 * max(1, columns / rows) ** 0.5
        for layer in range(3):
            found = np.asarray(step["blocks"][name][layer]) / scale
            expected = newton_schulz(np.asarray(grad["blocks"][name][layer]))
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
            singular = np.linalg.svd(found, compute_uv=False)
            assert 0.5 < singular.min() < singular.max() < 1.3
    assert shapes == {(8, 8), (8, 4), (8, 32), (32, 8)}


def test_muons_momentum_is_nesterovs(float64):
    """m <- b m + (1 - b) g, then NS(b m̂ + (1 - b) ĝ), each without its bias, for three steps."""
    params = random_params(TOY)
    grads = [random_like(params, n) for n in range(3)]
    steps, _ = steps_of(optimizers.muon(0.5, 0.7, 0.0, 0.0), params, grads)
    m = 0.0
    for n, (grad, step) in enumerate(zip(grads, steps, strict=True), 1):
        g = np.asarray(grad["blocks"]["w_up"][1])
        m = 0.7 * m + 0.3 * g
        ahead = 0.7 * m / (1 - 0.7 ** (n + 1)) + 0.3 * g / (1 - 0.7**n)
        expected = -0.5 * (12 / 8) ** 0.5 * newton_schulz(ahead)
        np.testing.assert_allclose(step["blocks"]["w_up"][1], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("b2", [0.999, 0.95])
def test_under_a_constant_gradient_norms_move_as_adam_with_nesterov_momentum(float64, b2):
    """(0.9 m̂ + 0.1 ĝ) / √v̂ is 1.474, 1.157, 1.078 at steps 1, 2, 3; embedding and head: 1, 1, 1."""
    params = random_params(TOY)
    grad = jax.tree.map(jnp.ones_like, params)
    steps, _ = steps_of(optimizers.muon(0.5, 0.95, 0.0, 0.0, b2=b2), params, 3 * [grad])
    for n, step in enumerate(steps, 1):
        lookahead = 0.9 * (1 - 0.9**n) / (1 - 0.9 ** (n + 1)) + 0.1 / (1 - 0.9**n)
        np.testing.assert_allclose(lookahead, [1.474, 1.157, 1.078][n - 1], atol=5e-4)
        for vector in (step["final_norm"], step["blocks"]["q_bias"], step["blocks"]["mlp_norm"]):
            np.testing.assert_allclose(vector, -0.5 * lookahead, rtol=1e-6)
        for name in ("embedding", "head"):
            np.testing.assert_allclose(step[name], -0.5, rtol=1e-6)


def blocks_alone(tree):
    """The blocks of a tree and the final norm as optax wants them: matrices 2-D, vectors 1-D."""
    layers = model.unstack(tree["blocks"])
    named = {f"layer {i}": layer for i, layer in enumerate(layers)}
    return named | {"final_norm": tree["final_norm"]}


def ends_alone(tree):
    return {name: tree[name] for name in ("embedding", "head")}


@pytest.mark.parametrize(
    "network, b2, clip",
    [(TOY, 0.999, 0.5), (TOY, 0.95, 1e9), (TWELVE, 0.95, 0.5)],
    ids=["two layers", "without clip", "twelve layers"],
)
def test_muon_is_what_the_papers_code_makes_of_optax(float64, network, b2, clip):
    """Blocks and final norm: optax.contrib.muon after a clip; embedding and head: AdamW after one.

    With Adam's b2, for three steps. Theirs has every matrix and vector of a layer by itself. The
    weight decay of matrices is ours.
    """
    params = random_params(network)
    grads = [random_like(params, n) for n in range(3)]
    ours, _ = steps_of(optimizers.muon(0.5, 0.8, 0.1, clip, b2=b2), params, grads)
    muon = optax.contrib.muon(0.5, beta=0.8, weight_decay=0.1, adam_b1=0.9, adam_b2=b2)
    adamw = optax.adamw(0.5, 0.9, b2, weight_decay=0.1)
    for alone, rule in ((blocks_alone, muon), (ends_alone, adamw)):
        rule = optax.chain(optax.clip_by_global_norm(clip), rule)
        theirs, _ = steps_of(rule, alone(params), [alone(grad) for grad in grads])
        assert_allclose([alone(step) for step in ours], theirs)


def test_newton_schulz_rounds_as_dtype_says_and_momentum_does_not():
    """In bfloat16 the singular values stay in Newton-Schulz's band; the momentum is float32's."""
    params = random_params(dataclasses.replace(TOY, d_model=64, d_ff=192))
    singular, momentum = {}, {}
    for dtype in ("float32", "bfloat16"):
        rule = optimizers.muon(1.0, 0.95, 0.0, 1.0, dtype)
        (step,), state = steps_of(rule, params, [params])
        assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(step))
        scaled = step["blocks"]["w_up"][1] / 3**0.5  # √(out/in)
        singular[dtype] = np.linalg.svd(scaled, compute_uv=False)
        momentum[dtype] = state[1].inner_states["matrices"]
    assert_same(momentum["float32"], momentum["bfloat16"])
    exact, rounded = singular["float32"], singular["bfloat16"]
    assert 0.6 < exact.min() < exact.max() < 1.25
    assert abs(exact - rounded).max() > 1e-3
    # 0.02 where products are summed up in float32, as not every processor does.
    assert abs(exact.min() - rounded.min()) < 0.1
    assert abs(exact.max() - rounded.max()) < 0.1


def arrays_by_name(tree):
    """{name: array} of a tree of parameters."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {path[-1].key: np.asarray(a) for path, a in named}


def clipped_together(clip, params):
    """{name: names of the arrays that a clip scales down when that array's gradient is large}."""
    together = {}
    for large in arrays_by_name(params):

        def number(name, large=large):
            return 1e3 if name == large else 1e-3

        grad = jax.tree.map(jnp.full_like, params, optimizers.map_names(number, params))
        clipped, _ = clip.update(grad, clip.init(params))
        before, after = arrays_by_name(grad), arrays_by_name(clipped)
        together[large] = {name for name in before if np.all(after[name] < before[name])}
        kept = {name for name in before if np.all(after[name] == before[name])}
        assert kept | together[large] == set(before)
        norm = np.sqrt(sum((after[name] ** 2).sum() for name in together[large]))
        np.testing.assert_allclose(norm, 1, rtol=1e-5)
    return together


@pytest.mark.parametrize("network", [TOY, TWELVE], ids=["two layers", "twelve layers"])
def test_muon_clips_embedding_with_head_and_the_blocks_with_every_norm(network):
    """A large gradient shrinks those of its part, to norm 1, and no others; each is in one part."""
    params = random_params(network)
    found = clipped_together(optimizers.clip_ends_apart(1.0), params)
    ends = {"embedding", "head"}
    blocks = {*params["blocks"], "final_norm"}
    assert found == dict.fromkeys(ends, ends) | dict.fromkeys(blocks, blocks)


def test_adamw_and_soap_clip_all_parameters_together():
    params = random_params(TOY)
    names = set(arrays_by_name(params))
    found = clipped_together(optimizers.clip_by_norm(1.0), params)
    assert found == dict.fromkeys(names, names)


# ---- learning rates and averages over time -------------------------------------------------------


def test_a_rise_ends_at_its_last_step_and_never_begins_at_zero():
    np.testing.assert_allclose(
        [optimizers.rise(s, 4) for s in range(6)], [0.25, 0.5, 0.75, 1, 1, 1]
    )
    np.testing.assert_allclose([optimizers.rise(s, 0.0) for s in range(3)], [1, 1, 1])


def test_a_cosine_falls_from_its_start_to_the_end():
    x = np.array([0.0, 0.2, 0.6, 1.0, 1.5])
    progress = optimizers.progress(x, 0.2)
    np.testing.assert_allclose(progress, [0, 0, 0.5, 1, 1], atol=1e-7)
    np.testing.assert_allclose(optimizers.cosine(progress), [1, 1, 0.5, 0, 0], atol=1e-7)


def test_an_average_moves_by_one_minus_tau():
    old, new = {"a": jnp.ones(2)}, {"a": jnp.zeros(2)}
    np.testing.assert_allclose(optimizers.update_average(old, new, 0.9)["a"], [0.9, 0.9])
    assert optimizers.update_average(None, new, 0.9) is None
