"""Strict mode for every test, and the small models that they share.

A warning is an error, and so are shapes that NumPy would promote and a connection to anywhere.
There are four devices, as on a machine with four GPUs.
"""

import dataclasses
import functools
import json
import os
import socket
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import model
import train
from runtime import live

# The environment of a command that a test starts.
AS_A_USER = os.environ | {"JAX_PLATFORMS": "cpu"}
# Programs compile three times as fast. A later XLA has no such switch.
if jax.__version_info__[:2] == (0, 10):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"
    )
os.environ["NPROC"] = "16"  # threads of XLA; a device that waits for another keeps one
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
# No test writes compiled programs, or runs older ones.
jax.config.update("jax_enable_compilation_cache", False)
# Nearly all the time of these tests is compilation.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("here", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("here")

TOY = model.Config(
    vocab_size=11,
    context=5,
    d_model=8,
    d_ff=12,
    n_layers=2,
    n_heads=4,
    n_kv_heads=4,
    head_chunk=4,
)
VARIANTS = {
    "paper": TOY,
    "textbook": dataclasses.replace(TOY, mlp="swiglu", qk_norm=False),
    "grouped": dataclasses.replace(TOY, n_kv_heads=2),
}


# What a test makes of a warning; a later line comes first. pyproject.toml does not say it, because
# it would count before and between the tests, too, where the plugins of others speak.
WARNINGS = (
    "error",
    # A library's next deprecation must not fail anyone's tests.
    "default::DeprecationWarning",
    "default::PendingDeprecationWarning",
    "default::FutureWarning",
    # Of pytest and its plugins, but for two that tell of our faults.
    "default::pytest.PytestWarning",
    "error::pytest.PytestUnraisableExceptionWarning",
    "error::pytest.PytestUnhandledThreadExceptionWarning",
)


def pytest_collection_modifyitems(items):
    """Makes warnings errors inside each test."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings(*WARNINGS))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """No test connects to anywhere."""

    def refuse(self, address):
        raise OSError(f"a test wants to connect to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs():
    """They are freed after each file: a process that maps too many of them crashes."""
    yield
    jax.clear_caches()


@pytest.fixture
def float64():
    """Everything in this test is float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=VARIANTS)
def toy(request):
    """A model small enough for its Jacobian to be written down, in each variant."""
    return VARIANTS[request.param]


def random_params(config, seed=0):
    """Parameters at the scales of model.init, drawn by NumPy, so that nothing has to be compiled.

    Every norm is moved away from one and every bias from zero, so that no derivative is trivially
    right.
    """
    rng = np.random.default_rng(seed)
    dtype = jnp.zeros(()).dtype

    def draw(path, a):
        name = path[-1].key
        noise = rng.normal(size=a.shape)
        if name in (*model.MATRICES, "head"):
            noise = noise / a.shape[-2] ** 0.5
        elif name.endswith("bias"):
            noise = 0.1 * noise
        elif name != "embedding":
            noise = 0.1 * noise + 1
        return jnp.asarray(noise, dtype)

    return jax.tree_util.tree_map_with_path(draw, model.shapes(config))


def random_tokens(config, size, seed=0):
    """int32 [size, context + 1]."""
    shape = (size, config.context + 1)
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape).astype(np.int32)


def batches_and_fresh(network, size=2):
    """Two functions k -> inner batch: the batch and fresh tokens."""

    def batches(k):
        return random_tokens(network, size, k)

    def fresh(k):
        return random_tokens(network, size, 100 + k)

    return batches, fresh


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, tokens):
    """The model's logits the plain way, [B, T, V]: what the chunked code never holds."""
    return model.hidden(config, params, tokens[:, :-1]) @ params["head"]


def copied(tree):
    """A copy: a step writes its result where its state lay."""
    return jax.tree.map(jnp.copy, tree)


def assert_same(a, b):
    """Two trees are bitwise equal."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


# ---- runs by the command line ----

COMMAND = """--model tiny --d-model 8 --d-ff 8 --n-layers 1 --n-heads 2 --n-kv-heads 2 --context 16
--batch 192 --inner-batch 4 --warmup-tokens 128 --eval-tokens 640 --eval-every 1 --steps 3"""
SMALL = COMMAND.split()  # of a small model
SEARCH = ("gn", "layerwise_gn", "gn_cg")  # the methods with a line search by default


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory with a short English-looking text in it.

    A run saves its state with each row of its log there, however long that takes.
    """
    monkeypatch.setattr(live.Saver, "SHARE", 1e9)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dogs"]
    lines = [" ".join(rng.choice(words, 9)) + "\n" + "\n" * (i % 50 == 49) for i in range(3000)]
    Path("text.txt").write_text("".join(lines))
    return tmp_path


def run(*flags):
    """The status of a training command of a small model."""
    return train.main([*SMALL, "--data", "text.txt", *flags])


def rows(out):
    """The rows of a run's log."""
    return [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]


def everything(out):
    """The arrays of a run's checkpoint."""
    with np.load(Path(out, "checkpoint.npz"), allow_pickle=False) as arrays:
        return dict(arrays)


def without_time(rows):
    """The rows of a log without the numbers that are different each time."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "input_wait")} for row in rows]
