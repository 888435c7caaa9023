"""The energy that NVIDIA's GPUs use, as they count it themselves."""

import os
from functools import cache, partial

import jax


def joules():
    """Joules that the devices of this process have used since their driver was loaded.

    None if that is not known: they are no NVIDIA GPUs, the package nvidia-ml-py is missing, or it
    is not clear which of the machine's GPUs are those of this process.
    """
    counters = find_counters()
    try:
        return sum(read() for read in counters) / 1000 if counters else None
    except Exception:  # no failure of a counter is worth a run
        return None


@cache
def find_counters():
    """A function for each GPU of this process, which reads its counter in millijoules."""
    if jax.default_backend() != "gpu" or jax.process_count() > 1:
        return []
    try:
        import pynvml  # of nvidia-ml-py
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        names = visible_gpus(pynvml.nvmlDeviceGetCount())
        if len(names) != jax.local_device_count():
            return []
        devices = [pynvml.nvmlDeviceGetHandleByIndex(int(name)) for name in names]
    except (pynvml.NVMLError, ValueError):  # a GPU may have a name that is no number
        return []
    return [partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, device) for device in devices]


def visible_gpus(count):
    """The numbers, as strings, of those of a machine's GPUs that CUDA shows to this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(count)] if visible is None else visible.split(",")
