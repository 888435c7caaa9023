"""The choice between a function and its kernel, whole gradients by kernels, a script for a GPU."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import on_gpu
import pytest
from conftest import AS_A_USER, TOY, random_params, random_tokens
from interpreted import close, interpreted

import baselines
import gn
import gn_prox
import kernels
import layerwise_gn
import model
from kernels import attention, choice

OTHER = {"n_kv_heads": 2, "mlp": "swiglu", "qk_norm": False}


# ---- the choice ----------------------------------------------------------------------------------


def kernel_of_floats(x, y):
    return "kernel" if isinstance(x, float) else NotImplemented


@kernels.on_gpu(kernel_of_floats)
def plain(x, y, option=None):
    """The plain function."""
    return "plain"


@pytest.mark.parametrize("interpret", [False, True])
def test_the_kernel_is_chosen_where_it_suits(monkeypatch, interpret):
    """On a CPU never; elsewhere unless it says NotImplemented or an option is given."""
    monkeypatch.setattr(kernels, "INTERPRET", interpret)
    assert plain(1.0, 2) == ("kernel" if interpret else "plain")
    assert plain(1, 2) == "plain"
    assert plain(1.0, 2, option=3) == "plain"


def test_it_runs_on_a_gpu_and_looks_like_the_plain_function(monkeypatch):
    monkeypatch.setattr(kernels, "tried", lambda: True)
    assert plain(1.0, 2) == "kernel"
    assert plain.__name__ == "plain"
    assert plain.__doc__ == "The plain function."


# ---- whole gradients -----------------------------------------------------------------------------


def value_and_grad(network, name):
    """(params, delta, tokens) -> what a method's function of the same name returns."""
    methods = {"gn": gn, "gn_prox": gn_prox, "layerwise_gn": layerwise_gn}

    def f(params, delta, tokens):
        if name == "baselines":
            return baselines.value_and_grad(params, tokens, network)
        config = methods[name].Config(network, inner_steps=1, outer_steps=2)
        return config.value_and_grad(params, delta, tokens)

    return f


NAMES = {  # the kernels that a method's gradient calls, besides that of queries, keys and values
    "gn": ("attention_pushforward", "cross_entropy_quadratic_of_row"),
    "gn_prox": ("attention_pushforward", "cross_entropy_exact_of_row"),
    "layerwise_gn": ("attention_pushforward", "cross_entropy_quadratic_of_row"),
    "baselines": ("cross_entropy_gradient_of_row",),
}


@pytest.mark.parametrize(
    "name, changes",
    [("gn", {}), ("gn", OTHER), ("gn_prox", {}), ("layerwise_gn", {}), ("baselines", {})],
)
def test_a_whole_gradient_with_every_kernel_is_the_plain_one(name, changes):
    """In float64, but for what stands in for cuDNN: see test_attention.py."""
    network = replace(TOY, n_layers=1, dtype="float64", **changes)
    with jax.enable_x64(True):
        inputs = random_params(network), random_params(network, 1), random_tokens(network, 2)
        model.block.clear_cache()
        expected = jax.jit(value_and_grad(network, name))(*inputs)
    model.block.clear_cache()
    try:
        with interpreted():
            f = value_and_grad(network, name)
            program = str(jax.make_jaxpr(f)(*inputs))
            got = jax.jit(f)(*inputs)
    finally:
        model.block.clear_cache()
    for kernel in ("heads_value_of_row", *NAMES[name]):
        assert f"name={kernel}" in program
    close(got, expected, 1e-5)


# ---- the script ----------------------------------------------------------------------------------


@pytest.fixture
def in_float32():
    with interpreted(), jax.enable_x64(False):
        yield


@pytest.mark.parametrize(
    "checks",
    [
        partial(on_gpu.attention_checks, widths=(16,), contexts=(9,)),
        partial(on_gpu.heads_checks, sizes=((6, 3, 3, 9),)),
        partial(on_gpu.mlp_checks, sizes=((24, 40, 9),)),
        partial(on_gpu.cross_entropy_checks, sizes=(11,)),
    ],
    ids=["attention", "heads", "mlp", "cross-entropy"],
)
def test_the_checks_for_a_gpu_pass_step_by_step(in_float32, checks):
    count, failed = on_gpu.report(checks())
    assert count >= 10
    assert failed == 0


def test_soaps_checks_for_a_gpu_pass_here():
    count, failed = on_gpu.report(on_gpu.soap_checks(sizes=((2, 48),)))
    assert (count, failed) == (3, 0)


def test_the_check_of_whole_gradients_runs_step_by_step(in_float32):
    """The bounds are those of a real size: a toy's numbers are fewer, so rounding weighs more."""
    network = replace(TOY, n_layers=1)
    model.block.clear_cache()
    try:
        found = list(on_gpu.gradient_checks(network, 2, names=("loss", "gn")))
    finally:
        model.block.clear_cache()
    assert len(found) == 16
    for name, error, _ in found:
        assert 0 < error < 0.1, name


def test_the_check_of_the_choice_sees_what_is_left_out(in_float32, monkeypatch):
    """On a CPU nothing is tried, so every kernel counts as left out. Then all is as it was."""
    monkeypatch.setattr(on_gpu, "gradient_checks", lambda *args, **options: [])
    pushforward = attention.pushforward
    found = list(on_gpu.choice_checks(TOY, 2))
    assert len(found) == len(choice.NAMES) + 1
    assert {(error, bound) for _, error, bound in found} == {(1.0, 0)}
    assert attention.pushforward is pushforward
    assert not kernels.passed and not kernels.tried()


def test_the_greedy_kernel_computes_something(in_float32):
    o = np.zeros((1, 2, 1, 4), np.float32)
    found = on_gpu.greedy_pushforward(*[o] * 8)
    assert (found == 256 * 256 * 1024).all()


def test_a_check_that_fails_is_counted_and_so_is_nan(capsys):
    assert on_gpu.report([("a", 1.0, 2.0), ("b", 3.0, 2.0), ("c", float("nan"), 2.0)]) == (3, 2)
    assert capsys.readouterr().out.count("FAILED") == 2


def test_a_difference_is_an_error():
    _, error, bound = on_gpu.compared("x", np.array([1.0, 1.0]), np.array([1.0, 2.0]), 0.1)
    assert error > bound


SCRIPT = [sys.executable, str(Path(__file__).parent / "on_gpu.py")]


@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="no nvidia-smi: no GPU to check on")
def test_kernels_on_a_gpu():
    """The script's checks, at its defaults; what fails is a line of its output."""
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # others may use the GPU, too
    done = subprocess.run(SCRIPT, capture_output=True, text=True, env=env)
    if done.returncode == 2:
        pytest.skip(f"nvidia-smi is on the PATH, but JAX is one for a CPU: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_gpu_the_script_says_so():
    done = subprocess.run(SCRIPT, capture_output=True, text=True, env=AS_A_USER)
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr == "on_gpu.py: no GPU: the default backend of JAX is cpu\n"
