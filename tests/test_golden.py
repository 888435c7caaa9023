"""Golden numbers: one outer step of each method (of SOAP two) on the tiny preset, in float64, kept in golden.json.

They prove nothing about what is right; they show that something has changed. If it was meant to, renew them with

    python tests/test_golden.py

and say in the commit why.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from conftest import random_params  # noqa: E402

import baselines  # noqa: E402
import train  # noqa: E402

GOLDEN = Path(__file__).with_name("golden.json")
SMALLER = "--model tiny --batch 2048 --inner-batch 4 --steps 5".split()
STEPS = {"soap": 2}  # its first gradient makes its first basis only
MORE = {"soap": ["--largest", "64"]}  # of a longer side's factor, whose rank is lower, the eigenvectors are not unique


def tokens(index):
    """Batch `index`, int32 [4, 129]: a byte depends on the one before, so that there is something to learn."""
    rng = np.random.default_rng(index)
    rows = [rng.integers(0, 256, 4)]
    for _ in range(128):
        rows.append((5 * rows[-1] + 3 * rng.integers(0, 3, 4)) % 256)
    return np.stack(rows, axis=1).astype(np.int32)


def numbers(method):
    """What outer steps of the method come to, from the same weights, with its tuned settings for `tiny`."""
    run = train.configure([*SMALLER, "--method", method, *MORE.get(method, [])])
    state, N = run.method.init(random_params(run.settings.model), run.settings), run.settings.inner_steps
    for t in range(STEPS.get(method, 1)):
        batches, fresh = (lambda k, first=first: tokens(first + k) for first in (2 * N * t, 2 * N * t + N))
        state, metrics = run.method.update(state, batches, fresh, run.settings)
    found = {name: metrics.get(name) for name in ("train_loss", "inner_loss", "lr", "alpha")}
    found["loss after"] = train.loss(run.settings.model, baselines.weights(state), tokens(1000))
    for name, a in (("embedding", state.params["embedding"]), ("w_up", state.params["blocks"]["w_up"])):
        found[f"|{name}|"] = jnp.linalg.norm(a.reshape(-1))
    return {name: None if x is None else float(x) for name, x in found.items()}


@pytest.mark.parametrize("method", list(train.METHODS))
def test_numbers_are_the_golden_ones(float64, method):
    """To 1e-6, on which jax 0.10.0 to 0.12.0 agree; nothing here is drawn by JAX."""
    golden = json.loads(GOLDEN.read_text())[method]
    found = numbers(method)
    assert found.keys() == golden.keys()
    for name, value in golden.items():
        told = f"{name} of {method} is {found[name]}, it was {value}; if this is meant: python tests/test_golden.py"
        assert found[name] == (value if value is None else pytest.approx(value, rel=1e-6)), told


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    with jax.enable_x64(True):
        everything = {method: numbers(method) for method in train.METHODS}
    GOLDEN.write_text(json.dumps(everything, indent=1) + "\n")
    print(GOLDEN.read_text())
