"""How much of an inner batch fits into the memory of a device at once.

A device computes on its sequences of an inner batch by *micro-batches*, one after another, and
takes the mean of the results (`mean` in parallel.py). The larger a micro-batch is, the better is a
device used; but backpropagation keeps the activations of a whole micro-batch. How much memory a
program needs is known when it is compiled.
"""

import jax

from runtime.parallel import largest_divisor

SHARE = 0.9  # of a device's memory that a program may need: what is free is not in one piece


def available():
    """MiB of a device that JAX may use; None if a device here does not say, as a CPU does not."""
    limits = []
    for device in jax.local_devices():
        statistics = device.memory_stats() or {}
        if "bytes_limit" not in statistics:
            return None
        limits.append(statistics["bytes_limit"] // 2**20)
    return min(limits)


def usage(lowered):
    """MiB that a program needs on a device, and how many of them are its arguments."""
    memory = lowered.compile().memory_analysis()
    arguments = memory.argument_size_in_bytes
    # Results that overwrite donated arguments take no memory of their own.
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    needed = arguments + results + memory.temp_size_in_bytes
    return needed / 2**20, arguments / 2**20


def find_micro_batch(sequences, lower, limit):
    """The size of the largest micro-batches that fit into SHARE of `limit` MiB, and what they need.

    sequences: of an inner batch on a device; the size divides it. lower(size): the program with
    micro-batches of this size, before it is compiled. If none fits, the size is 1.
    """
    room = SHARE * limit
    size = sequences
    needed, arguments = usage(lower(size))
    while needed > room and size > 1:
        # Beyond its arguments, a program needs some memory in any case, and some per sequence. The
        # guess counts all of it as per sequence. So it may be too large, and the loop goes on, but
        # no size that fits is skipped.
        per_sequence = max(needed - arguments, 1) / size
        guess = int((room - arguments) / per_sequence)
        size = largest_divisor(sequences, max(1, min(guess, size - 1)))
        needed, arguments = usage(lower(size))
    return size, needed
