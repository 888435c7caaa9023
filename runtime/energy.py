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
    if not counters:
        return None
    try:
        return sum(read() for read in counters) / 1000
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
        indices = visible_gpus(pynvml)
        if len(indices) != jax.local_device_count():
            return []
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
    except (pynvml.NVMLError, ValueError):  # a GPU may be named by a text instead of a number
        return []
    return [partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, device) for device in devices]


def visible_gpus(pynvml):
    """The numbers of those of a machine's GPUs that CUDA shows to this process; none if unknown.

    If the machine has GPUs of several kinds, CUDA may number them in another order than pynvml.
    Raises ValueError if CUDA_VISIBLE_DEVICES has other names than numbers.
    """
    everything = range(pynvml.nvmlDeviceGetCount())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [*everything]
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, everything)
    kinds = {pynvml.nvmlDeviceGetName(handle) for handle in handles}
    if len(kinds) > 1:
        return []
    return [int(name) for name in visible.split(",")]
