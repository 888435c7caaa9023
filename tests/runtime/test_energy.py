"""Energy is counted where it is known whose it is."""

import sys
import types

import jax
import pytest
from conftest import rows, run

from runtime import energy


class Counters(types.ModuleType):
    """A pynvml of a machine with some GPUs, whose counters have risen at each reading."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpus, has_counter=True, kinds=1):
        super().__init__("pynvml")
        self.millijoules = [1000.0 * number for number in range(gpus)]
        self.has_counter = has_counter
        self.kinds = kinds

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return len(self.millijoules)

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetName(self, number):
        return f"kind {number % self.kinds}"

    def nvmlDeviceGetTotalEnergyConsumption(self, number):
        if not self.has_counter:
            raise self.NVMLError
        self.millijoules[number] += 500
        return self.millijoules[number]


@pytest.fixture
def four_gpus(monkeypatch):
    """JAX has four devices in these tests, and says that they are GPUs."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    energy.find_counters.cache_clear()
    yield
    energy.find_counters.cache_clear()


def test_energy_is_the_sum_over_all_gpus_in_joules(four_gpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Counters(4))
    assert energy.joules() == 6 + 4 * 0.5
    assert energy.joules() == 6 + 8 * 0.5


def test_energy_is_that_of_the_visible_gpus(four_gpus, monkeypatch):
    """Another process may use the others. The counters start at 0, 1, .. joules."""
    monkeypatch.setitem(sys.modules, "pynvml", Counters(8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3,4,7")
    assert energy.joules() == 1 + 3 + 4 + 7 + 4 * 0.5


@pytest.mark.parametrize("visible", ["1", "0,1,2,3,4", "GPU-1,GPU-2,GPU-3,GPU-4", ""])
def test_energy_of_gpus_that_are_not_those_of_jax_is_not_known(four_gpus, monkeypatch, visible):
    monkeypatch.setitem(sys.modules, "pynvml", Counters(8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert energy.joules() is None


def test_energy_of_some_gpus_of_several_kinds_is_not_known(four_gpus, monkeypatch):
    """CUDA and the counters number them in different orders. All of them are known."""
    monkeypatch.setitem(sys.modules, "pynvml", Counters(8, kinds=2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert energy.joules() is None
    energy.find_counters.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", Counters(4, kinds=2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert energy.joules() is not None


@pytest.mark.parametrize("library", [None, Counters(8), Counters(4, has_counter=False)])
def test_energy_that_is_not_known_is_none(four_gpus, monkeypatch, library):
    """Without the package, with GPUs of others on the machine, with cards that do not count."""
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert energy.joules() is None


def test_a_cpu_has_none(monkeypatch):
    energy.find_counters.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", Counters(4))
    assert energy.joules() is None
    energy.find_counters.cache_clear()


def test_a_row_has_the_energy_of_its_steps(here, monkeypatch):
    """Of all steps since the row before; where it is not known, the row does not have it."""
    spent = iter(range(0, 1000, 7))
    monkeypatch.setattr(energy, "joules", lambda: next(spent))
    assert run("--method", "adamw", "--out", "r", "--steps", "4", "--eval-every", "2") == 0
    assert [row["joules"] for row in rows("r")] == [7, 14, 14]
    monkeypatch.setattr(energy, "joules", lambda: None)
    assert run("--method", "adamw", "--out", "none") == 0
    assert not any("joules" in row for row in rows("none"))
