"""How many cores there are to use."""

import os


def available_cores():
    """The cores that this process may use; on Linux, it heeds limits such as taskset's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
