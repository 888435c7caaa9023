"""The energy that NVIDIA's GPUs use, as they count it themselves."""

from functools import cache, partial

import jax


def joules():
    """Joules that the devices of this process have used since their driver was loaded.

    None if that is not known: they are no NVIDIA GPUs, the package nvidia-ml-py is missing, or the
    machine has other GPUs than those of this process, which would count, too.
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
        count = pynvml.nvmlDeviceGetCount()
        if count != jax.local_device_count():
            return []
        devices = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
    except pynvml.NVMLError:
        return []
    return [partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, device) for device in devices]
