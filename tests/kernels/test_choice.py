"""Which dtype and which kernels a device gets, with stand-ins for the devices."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from conftest import TOY
from interpreted import interpreted

import kernels
import model
from kernels import attention, choice, cross_entropy


def device(platform, capability=None):
    """A device as JAX shows it; a CPU and a TPU have no compute capability."""
    named = {"platform": platform, "device_kind": f"{platform} {capability}"}
    if capability:
        named["compute_capability"] = capability
    return SimpleNamespace(**named)


@pytest.fixture
def devices(monkeypatch):
    """A function that makes JAX show these devices; no kernel has passed yet."""
    monkeypatch.setattr(kernels, "passed", set())

    def show(*devices):
        monkeypatch.setattr(jax, "devices", lambda: list(devices))

    return show


BFLOAT16 = replace(TOY, dtype="bfloat16")
CPU, TPU = device("cpu"), device("tpu")
T4, A100, H200, B200 = (device("gpu", number) for number in ("7.5", "8.0", "9.0", "10.0"))
MI300 = device("gpu", "gfx942")


@pytest.mark.parametrize(
    "shown, dtype, capable, forms",
    [
        ([CPU], "float32", False, "plain JAX"),
        ([TPU, TPU], "bfloat16", False, "plain JAX"),
        ([T4], "float32", False, "plain JAX"),
        ([A100], "bfloat16", True, "plain JAX"),  # until `choose` has tried them
        ([H200, H200], "bfloat16", True, "GPU kernels"),
        ([B200], "bfloat16", True, "plain JAX"),
        ([MI300], "float32", False, "plain JAX"),
        ([H200, B200], "bfloat16", True, "plain JAX"),
        ([T4, A100], "float32", False, "plain JAX"),
    ],
)
def test_dtype_and_kernels_are_what_all_devices_can_do(devices, shown, dtype, capable, forms):
    devices(*shown)
    assert choice.default_dtype() == dtype
    assert kernels.capable() == capable
    assert choice.forms(BFLOAT16) == forms
    for kernel in choice.NAMES:
        assert kernels.takes_over(kernel) == (forms == "GPU kernels")


def test_in_float32_only_the_kernels_for_any_dtype_are_named(devices):
    for_bfloat16 = "queries, keys and values; attention; the MLP"
    devices(H200)
    assert choice.forms(TOY) == f"GPU kernels, but plain JAX for {for_bfloat16}"
    devices(A100)
    kernels.passed.add(attention.attention_kernel)  # which float32 does not suit
    assert choice.forms(TOY) == "plain JAX"


def test_attention_is_not_named_for_heads_that_its_kernel_does_not_take(devices):
    devices(H200)
    wide = replace(BFLOAT16, d_model=512, n_heads=2)
    assert choice.forms(wide) == "GPU kernels, but plain JAX for attention"


def test_the_kernels_for_any_dtype_are_those_that_take_float32():
    """In float32, a trial of any other kernel makes nothing, as its plain function runs."""
    takes_float32 = set()
    for kernel, f, shapes in choice.trials(TOY, model.shapes(TOY)):
        if jax.tree.leaves(jax.eval_shape(f, *shapes)):
            takes_float32.add(kernel)
    assert takes_float32 == {*choice.FOR_ANY_DTYPE}


@pytest.mark.parametrize("shown", [CPU, TPU, T4, H200, MI300])
def test_nothing_is_tried_where_it_is_known(devices, monkeypatch, shown, capsys):
    devices(shown)
    monkeypatch.setattr(choice, "trials", None)
    choice.choose(TOY, None)
    assert not capsys.readouterr().err


def test_every_kernel_in_use_is_tried():
    """What `on_gpu` puts in the place of a function, anywhere in the project."""
    root = Path(__file__).parents[2]
    in_use = set()
    for path in root.glob("*.py"):
        in_use |= set(re.findall(r"^@on_gpu\((\w+)\)", path.read_text(encoding="utf-8"), re.M))
    assert {kernel.__name__ for kernel in choice.NAMES} == in_use
    assert {kernel for kernel, _, _ in choice.trials(TOY, model.shapes(TOY))} == {*choice.NAMES}


def choose_on_an_a100(devices):
    """Tries the kernels step by step on a CPU, in place of an A100."""
    devices(A100)
    with interpreted():
        choice.choose(replace(TOY, dtype="float64"), model.shapes(TOY))


def test_kernels_that_pass_are_used(devices, capsys):
    choose_on_an_a100(devices)
    assert not capsys.readouterr().err
    assert choice.forms(BFLOAT16) == "GPU kernels"
    assert all(map(kernels.takes_over, choice.NAMES))


def test_what_was_left_out_is_named(devices):
    devices(A100)
    kernels.passed.update(choice.NAMES)
    kernels.passed.remove(attention.attention_kernel)
    assert choice.forms(BFLOAT16) == "GPU kernels, but plain JAX for attention"


@pytest.fixture
def two_trials(monkeypatch):
    """Only attention and cross-entropy are tried, to be quicker."""
    trials = choice.trials
    two = attention.attention_kernel, cross_entropy.cross_entropy_kernel

    def of_two(network, params):
        return [trial for trial in trials(network, params) if trial[0] in two]

    monkeypatch.setattr(choice, "trials", of_two)


def test_a_kernel_that_fails_is_left_out_with_one_line(devices, two_trials, monkeypatch, capsys):
    def fail(*arrays):
        raise RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded\nmore")

    monkeypatch.setattr(attention, "pushforward", fail)
    choose_on_an_a100(devices)
    assert capsys.readouterr().err == (
        "kernels: gpu 8.0 runs plain JAX in place of attention"
        " (RESOURCE_EXHAUSTED: Shared memory size limit exceeded)\n"
    )
    assert kernels.passed == {cross_entropy.cross_entropy_kernel}
    assert not kernels.takes_over(attention.attention_kernel)
    assert kernels.takes_over(cross_entropy.cross_entropy_kernel)
    devices(H200)
    assert kernels.takes_over(attention.attention_kernel)


def test_the_pullback_is_tried_too(devices, two_trials, monkeypatch, capsys):
    """That of attention is by cuDNN on a GPU. Here it fails alone."""
    derivative = attention.with_derivative

    def with_bad_pull(value, prepare, push, pull):
        return derivative(value, prepare, push, lambda residuals, u: 1 / 0)

    monkeypatch.setattr(attention, "with_derivative", with_bad_pull)
    choose_on_an_a100(devices)
    assert "attention (division by zero)" in capsys.readouterr().err
