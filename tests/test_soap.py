"""SOAP against a transcription in NumPy, float64, and the faults that other ports of it are known for."""

import ast
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOY, random_params

import baselines
import soap

B1, B2 = 0.8, 0.7


def transcription(grads, frequency, largest, first):
    """SOAP as published (Algorithm 3 of Vyas et al. and its code), a matrix at a time: the updates without -lr.

    first: the bases after the first gradient, which for a matrix that is not square are not unique: its factor of the
    longer side has a null space. They are checked to be eigenvectors.
    """
    m = v = GG = Q = None
    out = []
    for n, G in enumerate(grads):
        sides = [G @ G.T, G.T @ G]
        if n == 0:  # the first gradient is used for the basis only
            GG = [(1 - B2) * S if len(S) <= largest else None for S in sides]
            Q = [np.eye(len(S)) if q is None else np.asarray(q) for q, S in zip(first, sides, strict=True)]
            for q, F in zip(Q, GG, strict=True):
                np.testing.assert_allclose(q.T @ q, np.eye(len(q)), atol=1e-12)
                if F is not None:
                    np.testing.assert_allclose(q.T @ F @ q, np.diag(np.linalg.eigvalsh(F)[::-1]), atol=1e-12)
            m, v = np.zeros_like(G), np.zeros_like(G)
            out.append(np.zeros_like(G))
            continue
        rotated = Q[0].T @ G @ Q[1]
        m = B1 * m + (1 - B1) * rotated
        v = B2 * v + (1 - B2) * rotated**2
        adam = m / (np.sqrt(v) + 1e-8) * np.sqrt(1 - B2**n) / (1 - B1**n)
        out.append(Q[0] @ adam @ Q[1].T)
        m = Q[0] @ m @ Q[1].T  # back in the parameter's own coordinates while the basis turns
        GG = [F if F is None else B2 * F + (1 - B2) * S for F, S in zip(GG, sides, strict=True)]
        if n % frequency == 0:
            for side in range(2):
                if GG[side] is not None:
                    order = np.argsort(-np.diag(Q[side].T @ GG[side] @ Q[side]))
                    v = v[order] if side == 0 else v[:, order]
                    Q[side] = np.linalg.qr(GG[side] @ Q[side][:, order])[0]
        m = Q[0].T @ m @ Q[1]
    return out


def run(grads, frequency=1, largest=10_000, matrix=True):
    """The updates that soap.py makes of a list of gradients of one parameter, its first bases, and its last state."""
    optimizer = soap.scale_by_soap(B1, B2, frequency, largest, lambda params: matrix)
    state, moves, states, step = optimizer.init(grads[0]), [], [], jax.jit(optimizer.update)
    for G in grads:
        move, state = step(jnp.asarray(G), state)
        moves.append(np.asarray(move))
        states.append(state[1])
    return moves, states[0].Q, states[-1]


@pytest.mark.parametrize("largest", [10_000, 4])
@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (7, 3)])
def test_updates_are_those_of_the_transcription(float64, shape, frequency, largest):
    """Eight updates, over several refreshes, square and not, with and without a side that keeps the identity."""
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=shape) * rng.uniform(0.1, 3) for _ in range(8)]
    moves, first, _ = run(grads, frequency, largest)
    expected = transcription(grads, frequency, largest, first)
    assert not moves[0].any() and all(move.any() for move in moves[1:])
    np.testing.assert_allclose(moves, expected, rtol=1e-7, atol=1e-9)


def test_a_stack_is_each_of_its_matrices_alone(float64):
    """[L, m, n] moves as L matrices [m, n] would: no layer sees another's basis."""
    grads = list(np.random.default_rng(1).normal(size=(5, 3, 4, 6)))
    moves, first, _ = run(grads)
    for layer in range(3):
        expected = transcription([G[layer] for G in grads], 1, 10_000, [q[layer] for q in first])
        np.testing.assert_allclose([move[layer] for move in moves], expected, rtol=1e-7, atol=1e-9)


def test_what_is_no_matrix_gets_adam(float64):
    """A norm's update is m̂ / (sqrt(v̂) + ε) elementwise, from its second gradient on."""
    grads = list(np.random.default_rng(2).normal(size=(4, 5)))
    moves, _, _ = run(grads, matrix=False)
    m = v = np.zeros(5)
    for n, (G, move) in enumerate(zip(grads[1:], moves[1:], strict=True), 1):
        m, v = B1 * m + (1 - B1) * G, B2 * v + (1 - B2) * G**2
        np.testing.assert_allclose(move, m / (1 - B1**n) / (np.sqrt(v / (1 - B2**n)) + 1e-8), rtol=1e-6)


def test_the_basis_stays_orthogonal_in_float32():
    """After thirty refreshes QᵀQ is the identity to 1e-5, also where the factors have rank one."""
    rng = np.random.default_rng(3)
    grads = [(rng.normal(size=(12, 1)) * rng.normal(size=(1, 6))).astype(np.float32) for _ in range(30)]
    _, _, state = run(grads)
    for Q in state.Q:
        np.testing.assert_allclose(Q.T @ Q, np.eye(len(Q)), atol=1e-5)


@pytest.mark.parametrize("frequency", [1, 10])
def test_fault_9_the_second_moment_is_not_frozen_between_refreshes(float64, frequency):
    """It follows every gradient, so that the rms of an update stays near one.

    (Frozen, updates were seen to reach 486 times the learning rate.)
    """
    rng = np.random.default_rng(4)
    moves, _, _ = run([rng.normal(size=(6, 5)) * (100.0 if n > 15 else 0.01) for n in range(40)], frequency)
    assert max(np.sqrt(np.mean(move**2)) for move in moves) < 2


def test_fault_9_every_import_is_in_the_standard_library_here_or_in_the_requirements():
    """SOAP too is a file of this project: after `pip install -r requirements.txt` nothing is missing."""
    root = Path(soap.__file__).parent
    lines = (root / "requirements.txt").read_text().split()
    required = {re.split("[>=<]", line)[0] for line in lines}
    own = {path.stem for path in root.glob("*.py")}
    for path in root.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in (name.split(".")[0] for name in names):
                assert name in required | own | set(sys.stdlib_module_names), f"{path.name} imports {name}"


def test_every_matrix_has_its_two_bases_and_no_norm_has_one():
    """By the optimizer's own state, on the model: embedding and head have bases too, up to the largest side."""
    params = random_params(TOY)
    state = next(s for s in baselines.soap(0.1, 0.9, 0.9, 0.0, 1.0, 1, 8).init(params) if isinstance(s, tuple) and s)[1]
    shapes = jax.tree.map(lambda a, s: [None if Q is None else Q.shape for Q in s.Q], params, state)
    assert (
        shapes["embedding"] == [None, (8, 8)]
        and shapes["head"] == [(8, 8), None]
        and shapes["final_norm"] == [None] * 2
    )
    assert shapes["blocks"]["wq"] == [(2, 8, 8)] * 2 and shapes["blocks"]["w_up"] == [(2, 8, 8), None]
    assert shapes["blocks"]["q_bias"] == [None] * 2
