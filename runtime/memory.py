"""How much of an inner batch fits into the memory of a device at once.

A device computes on its sequences of an inner batch by *micro-batches*, one after another, and adds
up the results (`mean` in parallel.py). The larger a micro-batch is, the better is a device used;
but all that a gradient keeps of it is in memory at once. How much memory a program needs is known
when it is compiled.
"""

import jax

SHARE = 0.9  # of a device's memory that a program may need: what is free is not in one piece


def available():
    """Bytes of a device that JAX may use; None if the device does not say, as a CPU."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit")


def usage(lowered):
    """Bytes that a program needs on a device, and how many of them are its arguments."""
    memory = lowered.compile().memory_analysis()
    arguments = memory.argument_size_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes  # not those in their place
    return arguments + results + memory.temp_size_in_bytes, arguments


def find_micro_batch(sequences, lower, limit):
    """The size of the largest micro-batches that fit into `limit` bytes; what the program needs.

    sequences: of an inner batch on a device; the size divides it. lower(size): the program with
    micro-batches of this size, lowered. If none fits, the size is 1.
    """
    room = SHARE * limit
    size = sequences
    needed, arguments = usage(lower(size))
    while needed > room and size > 1:
        # A guess, which skips sizes that are far too large: the rest grows with the size.
        per_sequence = (needed - arguments) / size
        guess = int((room - arguments) / per_sequence)
        most = max(1, min(guess, size - 1))
        size = max(n for n in range(1, most + 1) if sequences % n == 0)
        needed, arguments = usage(lower(size))
    return size, needed
