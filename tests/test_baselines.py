"""AdamW against a loop in NumPy, Muon against its definition, accumulation, schedules, the weight average."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TOY, VARIANTS, assert_same, kept, random_params, random_tokens

import baselines
import model
import soap

ALL = (baselines.AdamW, baselines.Muon, baselines.SOAP)
TWELVE = model.Config(vocab_size=7, context=4, d_model=8, d_ff=8, n_layers=12, n_heads=2, n_kv_heads=2)


GRAD = jax.jit(model.value_and_grad, static_argnums=0)


def config_of(cls, **changes):
    return cls(**{"model": TOY, "inner_steps": 3, "outer_steps": 4} | changes)


@pytest.mark.parametrize("network", [*VARIANTS.values(), TWELVE], ids=[*VARIANTS, "twelve layers"])
def test_every_parameter_is_in_exactly_one_group(network):
    """The optimizer's own state says so: each parameter has moments in Muon or in Adam, never in both or neither."""
    params = model.init(network, jax.random.key(0))
    state = baselines.muon(0.1, 0.95, 0.0, 1.0).init(params).inner_states
    adam = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state["adamw"])}
    muon = {jax.tree_util.keystr(path) for path, a in jax.tree_util.tree_leaves_with_path(state["muon"]) if a.ndim}
    for path, a in jax.tree_util.tree_leaves_with_path(params):
        key = jax.tree_util.keystr(path)
        moments = sum(k.endswith(key) and (".mu" in k or ".nu" in k) for k in adam)
        assert moments == (0 if a.ndim == 3 else 2), key
        assert sum(k.endswith(key) for k in muon) == (a.ndim == 3), key
    assert len(muon) == sum(a.ndim == 3 for a in jax.tree.leaves(params))


@pytest.mark.parametrize("cls", [baselines.AdamW, baselines.Muon])
def test_accumulated_batches_are_one_large_batch(cls, float64):
    """k inner batches are one batch k times as large (not tested of SOAP: its first basis is not unique)."""
    params, tokens = random_params(TOY), random_tokens(TOY, 6)
    parts = np.split(tokens, 3)
    many, one = config_of(cls, clip=0.0), config_of(cls, clip=0.0, inner_steps=1)  # clipped, sums would pass for means
    a, ma = baselines.update(baselines.init(params, many), lambda k: parts[k], None, many)
    b, mb = baselines.update(baselines.init(params, one), lambda k: tokens, None, one)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-11), a, b)
    np.testing.assert_allclose(ma["train_loss"], mb["train_loss"], rtol=1e-12)


def test_adamw_is_the_loop_in_numpy(float64):
    """θ -= lr (m̂ / (sqrt(v̂) + ε) + w θ), w on matrices only, over three steps whose gradient is clipped as a whole."""
    params = random_params(TOY)
    config = config_of(baselines.AdamW, inner_steps=1, lr=0.01, weight_decay=0.1, b1=0.8, b2=0.9, clip=0.5)
    state = baselines.init(params, config)
    theta = {jax.tree_util.keystr(p): np.array(a) for p, a in jax.tree_util.tree_leaves_with_path(params)}
    m, v = ({name: np.zeros_like(a) for name, a in theta.items()} for _ in range(2))
    for t in range(3):
        tokens = random_tokens(TOY, 4, t)
        grad = GRAD(TOY, state.params, tokens)[1]
        grad = {jax.tree_util.keystr(p): np.array(a) for p, a in jax.tree_util.tree_leaves_with_path(grad)}
        norm = np.sqrt(sum((g**2).sum() for g in grad.values()))
        assert norm > 0.5
        lr = 0.01 * (1 + np.cos(np.pi * t / 4)) / 2
        for name, g in grad.items():
            g = g * 0.5 / norm
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.9 * v[name] + 0.1 * g**2
            step = m[name] / (1 - 0.8 ** (t + 1)) / (np.sqrt(v[name] / (1 - 0.9 ** (t + 1))) + 1e-8)
            decay = 0.1 if any(f"'{w}'" in name for w in (*model.MATRICES, "embedding", "head")) else 0.0
            theta[name] = theta[name] - lr * (step + decay * theta[name])
        state, _ = baselines.update(state, lambda k: tokens, None, config)  # noqa: B023
    for p, a in jax.tree_util.tree_leaves_with_path(state.params):
        np.testing.assert_allclose(a, theta[jax.tree_util.keystr(p)], rtol=1e-6, atol=1e-8)


def newton_schulz(m):
    """Five steps of X <- a X + (b A + c A²) X, A = X Xᵀ, from m / |m|, rows no more than columns."""
    x = m / np.linalg.norm(m)
    if x.shape[0] > x.shape[1]:
        return newton_schulz(m.T).T
    for _ in range(5):
        A = x @ x.T
        x = 3.4445 * x + (-4.7750 * A + 2.0315 * A @ A) @ x
    return x


def test_muon_orthogonalizes_each_layers_matrix_and_scales_it_by_its_shape(float64):
    """The first update of a stacked [L, in, out] matrix is -lr sqrt(max(1, out/in)) NS(gradient), a layer at a time.

    Its singular values over that scale are near one.
    """
    network = model.Config(vocab_size=7, context=4, d_model=8, d_ff=32, n_layers=3, n_heads=2, n_kv_heads=1)
    params = random_params(network)
    grad = jax.tree.map(lambda a: jnp.asarray(np.random.default_rng(a.size).normal(size=a.shape)), params)
    optimizer = baselines.muon(0.5, 0.95, 0.0, 0.0)
    step, _ = jax.jit(optimizer.update)(grad, optimizer.init(params), params)
    shapes = set()
    for name in model.MATRICES:
        if name in params["blocks"]:
            rows, columns = params["blocks"][name].shape[1:]
            shapes.add((rows, columns))
            scale = -0.5 * max(1, columns / rows) ** 0.5
            for layer in range(3):
                got = np.asarray(step["blocks"][name][layer]) / scale
                np.testing.assert_allclose(
                    got, newton_schulz(np.asarray(grad["blocks"][name][layer])), rtol=1e-6, atol=1e-9
                )
                singular = np.linalg.svd(got, compute_uv=False)
                assert 0.5 < singular.min() and singular.max() < 1.3
    assert shapes == {(8, 8), (8, 4), (8, 32), (32, 8)}


def test_a_step_is_compiled_once_for_every_update_and_learning_rate():
    """Whether a run begins, goes on or has another lr; and what update returns is known without waiting for it."""
    sizes, state = [], baselines.init(random_params(TOY), config_of(baselines.AdamW))
    for t, lr in enumerate((0.011, 0.011, 0.022)):
        config = config_of(baselines.AdamW, lr=lr, b2=0.97)  # settings of its own: nothing is compiled yet
        state, metrics = baselines.update(state, lambda k, t=t: random_tokens(TOY, 2, 10 * t + k), None, config)
        sizes.append((baselines.accumulate._cache_size(), baselines.finish._cache_size()))
        assert isinstance(state.k, np.int32) and np.isclose(metrics["lr"], baselines.learning_rate(t, config))
    assert sizes[0] == sizes[1] == sizes[2]


def test_newton_schulz_rounds_as_dtype_says_and_momentum_does_not():
    """With dtype bfloat16 the singular values stay in Newton-Schulz's band; the momentum is float32's, bitwise."""
    params, found = random_params(dataclasses.replace(TOY, d_model=64, d_ff=192)), {}
    for dtype in ("float32", "bfloat16"):
        optimizer = config_of(baselines.Muon, model=dataclasses.replace(TOY, dtype=dtype)).optimizer(1.0)
        step, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)
        found[dtype] = step["blocks"]["w_up"][1], state.inner_states["muon"]
        assert {a.dtype for a in jax.tree.leaves(step)} == {jnp.dtype(jnp.float32)}
    (exact, momentum), (rounded, same) = found["float32"], found["bfloat16"]
    assert_same(momentum, same)
    values, others = (np.linalg.svd(a, compute_uv=False) / 3**0.5 for a in (exact, rounded))  # both: sqrt(out/in)
    assert 0.6 < values.min() and values.max() < 1.25 and 1e-3 < abs(values - others).max()
    assert abs(values.min() - others.min()) < 0.03 and abs(values.max() - others.max()) < 0.03  # the band is the same


def test_muon_on_a_stack_is_optaxs_muon_on_each_matrix(float64):
    """Three updates with momentum and weight decay: layer l of [L, in, out] moves as a matrix does in optax."""
    params = random_params(TOY)
    ours = config_of(baselines.Muon, momentum=0.8, weight_decay=0.1, clip=0.0).optimizer(0.5)
    theirs = optax.contrib.muon(0.5, beta=0.8, weight_decay=0.1)
    alone = lambda tree: {f"{name}{i}": tree["blocks"][name][i] for name in ("wq", "w_up", "w_down") for i in range(2)}
    states, updates = [ours.init(params), theirs.init(alone(params))], [jax.jit(o.update) for o in (ours, theirs)]
    for n in range(3):
        grad = jax.tree.map(lambda a, n=n: jax.random.normal(jax.random.key(n), a.shape), params)
        step, states[0] = updates[0](grad, states[0], params)
        expected, states[1] = updates[1](alone(grad), states[1], alone(params))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), alone(step), expected)
    assert {a.ndim for a in jax.tree.leaves(expected)} == {2}


def test_muons_momentum_is_nesterovs(float64):
    """Three updates: m <- b m + (1 - b) g, then NS(b m̂ + (1 - b) ĝ), each without its bias; b is the config's."""
    params = {**random_params(TOY)}
    optimizer = config_of(baselines.Muon, momentum=0.7, clip=0.0, weight_decay=0.0).optimizer(0.5)
    state, m, update = optimizer.init(params), 0.0, jax.jit(optimizer.update)
    for n in range(3):
        rng = np.random.default_rng(n)
        grad = jax.tree.map(lambda a, rng=rng: jnp.asarray(rng.normal(size=a.shape)), params)
        step, state = update(grad, state, params)
        g = np.asarray(grad["blocks"]["w_up"][1])
        m = 0.7 * m + 0.3 * g
        ahead = 0.7 * m / (1 - 0.7 ** (n + 2)) + 0.3 * g / (
            1 - 0.7 ** (n + 1)
        )  # both without their bias, as optax has them
        expected = -0.5 * (12 / 8) ** 0.5 * newton_schulz(ahead)
        np.testing.assert_allclose(step["blocks"]["w_up"][1], expected, rtol=1e-5, atol=1e-8)


def test_muons_other_group_is_adam(float64):
    """Embedding, head and norms: Adam (0.9, 0.999) at the same lr, over two updates."""
    params = random_params(TOY)
    optimizer = config_of(baselines.Muon, clip=0.0).optimizer(0.5)
    state, m, v, update = optimizer.init(params), 0.0, 0.0, jax.jit(optimizer.update)
    for n in (1, 2):
        grad = jax.tree.map(lambda a, n=n: jnp.full_like(a, n - 3.0), params)
        step, state = update(grad, state, params)
        m, v = 0.9 * m + 0.1 * (n - 3.0), 0.999 * v + 0.001 * (n - 3.0) ** 2
        expected = -0.5 * m / (1 - 0.9**n) / np.sqrt(v / (1 - 0.999**n))
        for name in ("embedding", "head", "final_norm"):
            np.testing.assert_allclose(step[name], expected, rtol=1e-6)


def test_soaps_settings_arrive():
    """config.optimizer: clip, SOAP, decay of matrices, lr, each field in its place; others where they are changed."""
    params, is_matrix = random_params(TOY), baselines.is_matrix
    grads = [jax.tree.map(lambda a, n=n: jax.random.normal(jax.random.key(n), a.shape), params) for n in range(4)]

    @partial(jax.jit, static_argnums=0)
    def last(make):
        optimizer = make()
        state = optimizer.init(params)
        for grad in grads:
            step, state = optimizer.update(grad, state, params)
        return step

    given = dict(lr=0.1, b1=0.6, b2=0.8, weight_decay=0.2, clip=0.5, frequency=2, largest=9)
    ours = last(lambda: config_of(baselines.SOAP, **given).optimizer(0.1))
    adam, decay = soap.scale_by_soap(0.6, 0.8, 2, 9, is_matrix), optax.add_decayed_weights(0.2, is_matrix)
    by_hand = last(lambda: optax.chain(optax.clip_by_global_norm(0.5), adam, decay, optax.scale(-0.1)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, by_hand)
    for swapped in (dict(b1=0.8, b2=0.6), dict(frequency=1)):
        other = last(lambda swapped=swapped: config_of(baselines.SOAP, **given | swapped).optimizer(0.1))
        assert not np.allclose(ours["blocks"]["w_up"], other["blocks"]["w_up"])


@pytest.mark.parametrize("cls", ALL)
def test_fault_5_clip_0_does_not_zero_the_update(cls, float64):
    """It is off: gradients stay as they are, the same as with a limit that is never reached."""
    params = random_params(TOY)
    grads = [jax.tree.map(lambda a, n=n: jax.random.normal(jax.random.key(n), a.shape), params) for n in range(2)]

    @partial(jax.jit, static_argnums=0)
    def moved(clip):  # by two updates, as SOAP's first one makes none
        optimizer = config_of(cls, clip=clip).optimizer(0.1)
        state = optimizer.init(params)
        for grad in grads:
            step, state = optimizer.update(grad, state, params)
        return step

    off, high, low = moved(0.0), moved(1e9), moved(1e-9)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), off, high)
    assert min(abs(a).max() for a in jax.tree.leaves(off)) > 0
    assert not np.allclose(off["head"], low["head"])


def test_muon_clips_each_group_by_its_own_norm(float64):
    """A large gradient of the embedding does not shrink the matrices' part; one of theirs comes down to norm 1."""
    params = random_params(TOY)
    grad = jax.tree.map(lambda a: 1e-3 * jnp.ones_like(a), params)
    large = {**grad, "embedding": 1e6 * grad["embedding"]}
    larger = {**grad, "blocks": jax.tree.map(lambda a: 1e6 * a, grad["blocks"])}
    optimizer = baselines.muon(0.1, 0.95, 0.0, 1.0)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    momentum = [update(g, state, params)[1].inner_states["muon"] for g in (grad, large, larger)]
    assert_same(*momentum[:2])
    leaves = [a for a in jax.tree.leaves(momentum[2]) if a.ndim == 3]
    np.testing.assert_allclose(np.sqrt(sum((a**2).sum() for a in leaves)), 1 - 0.95, rtol=1e-9)


def test_weight_decay_reaches_matrices_only(float64):
    """With no gradient the matrices shrink by 1 - lr w, embedding and head included, and the norms stay."""
    params = random_params(TOY)
    zero = jax.tree.map(jnp.zeros_like, params)
    ours = baselines.soap(0.1, 0.9, 0.99, 0.5, 1.0, 1, 10_000)
    for optimizer in (baselines.muon(0.1, 0.95, 0.5, 1.0), baselines.adamw(0.1, 0.9, 0.99, 0.5, 1.0), ours):
        step, _ = jax.jit(optimizer.update)(zero, optimizer.init(params), params)
        for path, a in jax.tree_util.tree_leaves_with_path(params):
            name = path[-1].key
            expected = -0.05 * a if name in (*model.MATRICES, "embedding", "head") else 0 * a
            got = step["blocks"][name] if name in step["blocks"] else step[name]
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_schedules_at_their_first_and_last_step():
    """A linear rise to lr over its fraction, then constant, or half a cosine over the rest that ends above 0."""
    rate = lambda **c: [
        float(baselines.learning_rate(jnp.int32(t), config_of(baselines.AdamW, outer_steps=10, lr=2.0, **c)))
        for t in range(10)
    ]
    np.testing.assert_allclose(rate(schedule="constant"), [2] * 10, rtol=1e-6)
    np.testing.assert_allclose(rate(schedule="constant", warmup=0.5), [0.4, 0.8, 1.2, 1.6, 2, 2, 2, 2, 2, 2], rtol=1e-6)
    np.testing.assert_allclose(rate(), 1 + np.cos(np.pi * np.arange(10) / 10), rtol=1e-5)
    fall = 1 + np.cos(np.pi * np.arange(8) / 8)
    np.testing.assert_allclose(rate(warmup=0.2), [1, 2, *fall], rtol=1e-5)


@pytest.mark.parametrize("cls", ALL)
def test_fault_7_a_baselines_average_is_over_updates_not_inner_batches(cls, float64):
    """After n optimizer steps of several inner batches: τⁿ θ_0 + (1 - τ) Σ τⁿ⁻ⁱ θ_i, evaluated; θ goes on without."""
    more = {"largest": 8} if cls is baselines.SOAP else {}  # a longer side's basis is not unique
    on, off, tau = config_of(cls, average=0.6, **more), config_of(cls, **more), 0.6
    batches = lambda t: lambda k: random_tokens(TOY, 2, 10 * t + k)
    state, plain = baselines.init(random_params(TOY), on), baselines.init(random_params(TOY), off)
    thetas = [kept(state.params)]
    for t in range(3):
        state, _ = baselines.update(state, batches(t), None, on)
        plain, _ = baselines.update(plain, batches(t), None, off)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), state.params, plain.params)
        assert baselines.weights(plain) is plain.params
        thetas.append(kept(state.params))
    closed = lambda *a: tau**3 * a[0] + (1 - tau) * sum(tau ** (3 - i) * a[i] for i in (1, 2, 3))
    expected = jax.tree.map(closed, *thetas)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), baselines.weights(state), expected)


@pytest.mark.parametrize("cls", ALL)
def test_same_batches_twice_and_stopped_in_between_are_bitwise_the_same(cls):
    config, seen, batches = config_of(cls), [], lambda k: random_tokens(TOY, 2, k)
    start, watch = baselines.init(random_params(TOY), config), lambda state: seen.append(kept(state))
    whole = baselines.update(start, batches, None, config, watch)
    assert [int(state.k) for state in seen] == [1, 2, 3]
    for state in (baselines.init(random_params(TOY), config), *seen):
        assert_same(baselines.update(state, batches, None, config), whole)


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": 0.0},
        {"schedule": "linear"},
        {"clip": -1.0},
        {"weight_decay": -0.1},
        {"warmup": 1.0},
        {"b1": 1.0},
        {"b2": 1.0},
        {"average": 1.0},
    ],
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        config_of(baselines.AdamW, **bad)


@pytest.mark.parametrize("name", ["frequency", "largest"])
def test_soaps_bad_settings_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        config_of(baselines.SOAP, **{name: 0})
