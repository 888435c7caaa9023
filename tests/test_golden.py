"""Golden numbers: one outer step of each method (of SOAP two) on the tiny preset, in float64.

They are kept in golden.json. They prove nothing about what is right; they show that something has
changed. If it was meant to, renew them with

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

import model  # noqa: E402
import optimizers  # noqa: E402
import recipe  # noqa: E402

GOLDEN = Path(__file__).with_name("golden.json")
SMALLER = ["--model", "tiny", "--batch", "2048", "--inner-batch", "4", "--steps", "5"]
STEPS = {"soap": 2}  # its first gradient makes its first basis only
MORE = {
    # The eigenvectors of a longer side's factor, whose rank is lower, are not unique.
    "soap": ["--largest", "64"],
    # Many steps of conjugate gradients magnify rounding.
    "gn_cg": ["--cg-steps", "10"],
}


def tokens(index):
    """Inner batch `index`, int32 [4, 129]. A byte depends on the one before, to be learned."""
    rng = np.random.default_rng(index)
    columns = [rng.integers(0, 256, 4)]
    for _ in range(128):
        columns.append((5 * columns[-1] + 3 * rng.integers(0, 3, 4)) % 256)
    return np.stack(columns, axis=1).astype(np.int32)


def numbers(method):
    """What outer steps of the method come to, with its tuned settings for `tiny`."""
    run = recipe.configure([*SMALLER, "--method", method, *MORE.get(method, [])])
    settings = run.settings
    N = settings.inner_steps
    state = run.method.module.init(random_params(settings.network), settings)
    for t in range(STEPS.get(method, 1)):
        first = 2 * N * t

        def batches(k, first=first):
            return tokens(first + k)

        def fresh(k, first=first):
            return tokens(first + N + k)

        state, metrics = run.method.module.update(state, batches, fresh, settings)

    loss = jax.jit(model.loss, static_argnums=0)
    found = {name: metrics.get(name) for name in ("train_loss", "inner_loss", "lr", "alpha")}
    found["loss after"] = loss(settings.network, optimizers.weights(state), tokens(1000))
    found["|embedding|"] = jnp.linalg.norm(state.params["embedding"].ravel())
    found["|w_up|"] = jnp.linalg.norm(state.params["blocks"]["w_up"].ravel())
    return {name: None if x is None else float(x) for name, x in found.items()}


@pytest.mark.parametrize("method", list(recipe.METHODS))
def test_numbers_are_the_golden_ones(float64, method):
    """To 1e-6, on which jax 0.10.0 to 0.12.0 agree; nothing here is drawn by JAX."""
    golden = json.loads(GOLDEN.read_text())[method]
    found = numbers(method)
    assert found.keys() == golden.keys()
    for name, value in golden.items():
        told = f"{name} of {method} is {found[name]}, it was {value}"
        expected = value if value is None else pytest.approx(value, rel=1e-6)
        assert found[name] == expected, f"{told}; if this is meant: python tests/test_golden.py"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    with jax.enable_x64(True):
        everything = {method: numbers(method) for method in recipe.METHODS}
    GOLDEN.write_text(json.dumps(everything, indent=1) + "\n")
    print(GOLDEN.read_text())
