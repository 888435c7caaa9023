"""Strict mode for every test, and the small models that they share.

Warnings are errors (see pyproject.toml), so is a shape that NumPy would promote, and a connection to anywhere; a test
that has checked nothing fails; there are four devices, as on a machine with four GPUs.
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

AS_A_USER = os.environ | {"JAX_PLATFORMS": "cpu"}  # the environment of a command that a test starts
if jax.__version_info__[:2] == (0, 10):  # programs compile three times as fast; a later XLA has no such switch
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"
os.environ["NPROC"] = "16"  # threads of XLA: a device that waits for another keeps one
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_compilation_cache", False)  # no test writes compiled programs, or runs older ones
jax.config.update("jax_disable_most_optimizations", True)  # nearly all the time of these tests is compilation
jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("here", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("here")

TOY = model.Config(vocab_size=11, context=5, d_model=8, d_ff=12, n_layers=2, n_heads=4, n_kv_heads=4, head_chunk=4)
VARIANTS = {
    "paper": TOY,
    "textbook": dataclasses.replace(TOY, mlp="swiglu", qk_norm=False),
    "grouped": dataclasses.replace(TOY, n_kv_heads=2),
}


CHECKS = []  # what the running test has checked


def pytest_assertion_pass(item, lineno, orig, expl):
    CHECKS.append(orig)


def counted(check):
    """`check`, noted in CHECKS."""

    @functools.wraps(check)
    def wrapper(*args, **options):
        CHECKS.append(check.__name__)
        return check(*args, **options)

    return wrapper


for owner, name in ((np.testing, "assert_allclose"), (np.testing, "assert_array_equal"), (pytest, "raises")):
    setattr(owner, name, counted(getattr(owner, name)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that ends well has checked something: no loop over nothing is a proof."""
    CHECKS.clear()
    result = yield
    if not CHECKS:
        pytest.fail("this test has checked nothing")
    return result


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(self, address):
        raise OSError(f"a test wants to connect to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs():
    """Are freed after each file: a process can map just so many, and ends with a segmentation fault beyond them."""
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
    """Parameters at the scales of model.init, every norm and bias moved away from one and zero, so that no derivative
    is trivially right. Drawn by NumPy: nothing to compile."""
    rng, kind = np.random.default_rng(seed), jnp.zeros(()).dtype

    def draw(path, a):
        name, noise = path[-1].key, rng.normal(size=a.shape)
        if name in (*model.MATRICES, "head"):
            return jnp.asarray(noise / a.shape[-2] ** 0.5, kind)
        return jnp.asarray(noise if name == "embedding" else 0.1 * noise + (not name.endswith("bias")), kind)

    shapes = jax.eval_shape(functools.partial(model.init, config), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def random_tokens(config, size, seed=0):
    """int32 [size, context + 1]."""
    shape = (size, config.context + 1)
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape).astype(np.int32)


def many(network, size=2):
    """Two functions k -> inner batch: the batch and fresh tokens."""
    return (lambda k: random_tokens(network, size, k)), (lambda k: random_tokens(network, size, 100 + k))


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, tokens):
    """The model's logits the plain way, [B, T, V]: what the chunked code never holds."""
    return model.hidden(config, params, tokens[:, :-1]) @ params["head"]


def kept(tree):
    """A copy: a step writes its result where its state lay."""
    return jax.tree.map(jnp.copy, tree)


def assert_same(a, b):
    """Two trees are bitwise equal."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


# ---- runs by the command line ---------------------------------------------------------------------------------------

SMALL = ["--model", "tiny", "--d-model", "8", "--d-ff", "8", "--n-layers", "1", "--n-heads", "2", "--n-kv-heads", "2"]
SMALL += "--context 16 --batch 192 --inner-batch 4 --tokens 2k --eval-tokens 640 --eval-every 1 --steps 3".split()
SEARCH = ("gn", "layerwise_gn")  # the methods with a line search by default


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory with a short English-looking text in it."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dogs"]
    lines = [" ".join(rng.choice(words, 9)) + "\n" + "\n" * (i % 50 == 49) for i in range(3000)]
    Path("text.txt").write_text("".join(lines))
    return tmp_path


def run(*flags):
    return train.main([*SMALL, "--data", "text.txt", *flags])


def rows(out):
    return [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]


def everything(out):
    with np.load(Path(out, "checkpoint.npz"), allow_pickle=False) as arrays:
        return dict(arrays)


def without_time(rows):
    return [{k: v for k, v in row.items() if k not in ("seconds", "input_wait")} for row in rows]
