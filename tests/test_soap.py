"""SOAP against its paper, written out for one matrix, and against Adam.

Tests named test_fault_N guard against fault N of docs/faults.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TOY, random_params
from test_optimizers import assert_allclose, random_like, steps_of

import kernels
import optimizers
import soap
from kernels import orthogonal

B1, B2 = 0.8, 0.7


def transcription(grads, frequency, largest, first):
    """SOAP of one matrix as published (Algorithm 3 of Vyas et al. and its code), without -lr.

    first: the bases after the first gradient. They are not unique for a matrix that is not square,
    as its factor of the longer side has a null space. They are checked to be eigenvectors.
    """
    m, v = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    factors = []
    Q = []
    for F, q in zip([grads[0] @ grads[0].T, grads[0].T @ grads[0]], first, strict=True):
        rotates = len(F) <= largest
        F = (1 - B2) * F
        q = np.asarray(q) if rotates else np.eye(len(F))
        np.testing.assert_allclose(q.T @ q, np.eye(len(q)), atol=1e-12)
        if rotates:
            eigenvalues = np.linalg.eigvalsh(F)[::-1]
            np.testing.assert_allclose(q.T @ F @ q, np.diag(eigenvalues), atol=1e-12)
        factors.append(F if rotates else None)
        Q.append(q)

    steps = [np.zeros_like(m)]  # the first gradient makes the bases only
    for n, g in enumerate(grads[1:], 1):
        rotated = Q[0].T @ g @ Q[1]
        m = B1 * m + (1 - B1) * rotated
        v = B2 * v + (1 - B2) * rotated**2
        adam = m / (np.sqrt(v) + 1e-8) * np.sqrt(1 - B2**n) / (1 - B1**n)
        steps.append(Q[0] @ adam @ Q[1].T)

        m = Q[0] @ m @ Q[1].T  # in the parameter's own coordinates while the basis turns
        for side, new in enumerate([g @ g.T, g.T @ g]):
            if factors[side] is None:
                continue
            factors[side] = B2 * factors[side] + (1 - B2) * new
            if n % frequency == 0:
                F, q = factors[side], Q[side]
                order = np.argsort(-np.diag(q.T @ F @ q))
                v = v[order] if side == 0 else v[:, order]
                Q[side] = np.linalg.qr(F @ q[:, order])[0]
        m = Q[0].T @ m @ Q[1]
    return steps


def run_soap(grads, frequency=1, largest=10_000):
    """The steps of scale_by_soap for gradients of one matrix, its first bases, its last state."""
    rule = soap.scale_by_soap(B1, B2, frequency, largest)
    params = {"embedding": grads[0], "blocks": {}, "final_norm": np.ones(3), "head": np.eye(2)}

    def tree(g):
        return jax.tree.map(jnp.asarray, params | {"embedding": g})

    state = rule.init(tree(grads[0]))
    update = jax.jit(rule.update)
    steps, states = [], []
    for g in grads:
        step, state = update(tree(g), state)
        steps.append(np.asarray(step["embedding"]))
        states.append(state[1]["embedding"])
    return steps, states[0].Q, states[-1]


@pytest.mark.parametrize("largest", [10_000, 4])
@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (7, 3)])
def test_soap_is_the_transcription(float64, shape, frequency, largest):
    """Eight steps, over several refreshes, with and without a side that keeps the identity."""
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=shape) * rng.uniform(0.1, 3) for _ in range(8)]
    steps, first, _ = run_soap(grads, frequency, largest)
    expected = transcription(grads, frequency, largest, first)
    assert not steps[0].any()
    assert all(step.any() for step in steps[1:])
    np.testing.assert_allclose(steps, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("flipped", [False, True], ids=["as they are", "flipped"])
@pytest.mark.parametrize("shape", [(4, 4), (3, 7)])
def test_soap_is_the_transcription_with_the_bases_that_a_gpu_makes(
    float64, monkeypatch, shape, flipped
):
    """By Gram-Schmidt's method in halves, whatever the signs of its columns are."""

    def make_orthonormal(A):
        signs = (-1.0) ** np.arange(A.shape[-1]) if flipped else np.ones(A.shape[-1])
        return orthogonal.orthonormalize(A) * signs[None, None]

    monkeypatch.setattr(soap, "orthonormal_columns", make_orthonormal)
    monkeypatch.setattr(orthogonal, "LEAF", 2)
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=shape) for _ in range(8)]
    steps, first, _ = run_soap(grads)
    expected = transcription(grads, 1, 10_000, first)
    np.testing.assert_allclose(steps, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_gram_schmidt_takes_the_place_of_the_decomposition_on_a_gpu(monkeypatch, on_a_gpu):
    monkeypatch.setattr(kernels, "INTERPRET", on_a_gpu)
    program = jax.make_jaxpr(lambda A: soap.orthonormal_columns(A))(jnp.ones((2, 3, 3)))
    assert ("cholesky" in str(program)) == on_a_gpu


def test_soap_without_any_side_that_rotates_is_adam(float64):
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=(4, 6)) for _ in range(4)]
    steps, _, _ = run_soap(grads, largest=1)
    adam, _ = steps_of(optax.scale_by_adam(B1, B2), grads[0], grads[1:])
    np.testing.assert_allclose(steps[1:], adam, rtol=1e-6)


def test_soap_of_a_stack_is_that_of_each_of_its_matrices(float64):
    """[L, m, n] moves as L matrices [m, n] would: no layer sees another's basis."""
    grads = list(np.random.default_rng(1).normal(size=(5, 3, 4, 6)))
    steps, first, _ = run_soap(grads)
    for layer in range(3):
        alone = [g[layer] for g in grads]
        expected = transcription(alone, 1, 10_000, [q[layer] for q in first])
        np.testing.assert_allclose([s[layer] for s in steps], expected, rtol=1e-7, atol=1e-9)


def test_soaps_norms_get_adam(float64):
    """A norm's step is m̂ / (√v̂ + ε), from its second gradient on."""
    params = random_params(TOY)
    grads = [random_like(params, n) for n in range(4)]
    steps, _ = steps_of(soap.scale_by_soap(B1, B2, 1, 10_000), params, grads)
    adam, _ = steps_of(optax.scale_by_adam(B1, B2), params, grads[1:])
    assert not np.any(steps[0]["final_norm"])
    for found, expected in zip(steps[1:], adam, strict=True):
        np.testing.assert_allclose(found["final_norm"], expected["final_norm"], rtol=1e-6)


def test_soaps_basis_stays_orthogonal_in_float32():
    """After thirty refreshes QᵀQ is the identity to 1e-5, also where the factors have rank one."""
    rng = np.random.default_rng(3)
    columns, rows = rng.normal(size=(30, 12, 1)), rng.normal(size=(30, 1, 6))
    _, _, state = run_soap(list((columns * rows).astype(np.float32)))
    for Q in state.Q:
        np.testing.assert_allclose(Q.T @ Q, np.eye(len(Q)), atol=1e-5)


@pytest.mark.parametrize("frequency", [1, 10])
def test_fault_9_the_second_moment_is_not_frozen_between_refreshes(float64, frequency):
    """It follows every gradient, so that the root mean square of a step stays near one.

    (Frozen, steps were seen to reach 486 times the learning rate.)
    """
    rng = np.random.default_rng(4)
    sizes = [0.01] * 16 + [100.0] * 24
    steps, _, _ = run_soap([rng.normal(size=(6, 5)) * size for size in sizes], frequency)
    assert max(np.sqrt(np.mean(step**2)) for step in steps) < 2


def test_every_matrix_has_its_two_bases_and_no_norm_has_one():
    """Embedding and head have bases too, of each side that is no longer than the largest."""
    rule = soap.scale_by_soap(0.9, 0.9, 1, largest=8)
    params = random_params(TOY)
    _, states = rule.init(params)

    def shapes(state):
        return [None if Q is None else Q.shape for Q in state.Q]

    assert shapes(states["embedding"]) == [None, (8, 8)]
    assert shapes(states["head"]) == [(8, 8), None]
    assert shapes(states["final_norm"]) == [None, None]
    assert shapes(states["blocks"]["wq"]) == [(2, 8, 8), (2, 8, 8)]
    assert shapes(states["blocks"]["w_up"]) == [(2, 8, 8), None]
    assert shapes(states["blocks"]["q_bias"]) == [None, None]


def test_soap_is_clipped_decays_and_has_its_settings_in_their_places(float64):
    """soap.soap: a clip, scale_by_soap, the decay of matrices, then -lr."""
    params = random_params(TOY)
    grads = [random_like(params, n) for n in range(4)]
    ours, _ = steps_of(soap.soap(0.1, 0.6, 0.8, 0.2, 0.5, 2, 9), params, grads)
    by_hand = optax.chain(
        optax.clip_by_global_norm(0.5),
        soap.scale_by_soap(0.6, 0.8, 2, 9),
        optax.add_decayed_weights(0.2, optimizers.is_matrix),
        optax.scale(-0.1),
    )
    expected, _ = steps_of(by_hand, params, grads)
    assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)
