"""For GPUs: fast forms of functions that the methods and the model state in plain JAX.

Nobody has to read this folder to understand the methods. A *kernel* is here whatever takes the
place of a plain function: it takes the same arguments and computes the same, and `tests/kernels`
holds the two against each other. What is mostly gained is memory traffic: plain operations write
large arrays between them and read them again. A kernel does not.

Most kernels are written in Pallas, JAX's language for GPU programs, which Triton compiles.
attention.py also calls cuDNN, and mlp.py and orthogonal.py are JAX, arranged for a GPU. Words:

    program     one run of the kernel's function; a GPU runs hundreds of them at the same time
    grid        how many programs there are, by axes; `pl.program_id(axis)` says which one this is
    reference   an argument of the kernel: an array in memory; indexing reads it or writes to it
    BlockSpec   which block of an array a program's reference shows; None stands for an axis of
                which the program sees one index, and which its reference does not have
    tile        what a program holds in registers at a time; its sides are powers of two, and a mask
                says which of its entries lie inside the array

Read in this order: cross_entropy.py, derivative.py, mlp.py, attention.py, heads.py, choice.py,
orthogonal.py.
"""

import re
from functools import wraps

import jax
import jax.numpy as jnp

INTERPRET = False  # tests set it: kernels run on a CPU too, as plain operations, in any precision
passed = set()  # kernels that choice.py has tried with success on a card new to them


def capabilities():
    """The compute capabilities of NVIDIA's GPUs here, such as {(9, 0)}; else an empty set."""
    found = set()
    for device in jax.devices():
        # A GPU of AMD has a text such as "gfx90a" there, a CPU or TPU nothing.
        match = re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))
        if match:
            major, minor = match.groups()
            found.add((int(major), int(minor)))
    return found


def capable():
    """Whether the devices are GPUs that multiply in bfloat16, and that Triton compiles for."""
    cards = capabilities()
    return bool(cards) and min(cards) >= (8, 0)


def tried():
    """Whether all devices are of capability 9.0, as the H200, which the kernels were tried on."""
    return capabilities() == {(9, 0)}


def takes_over(kernel):
    """Whether a kernel takes the place of its function."""
    return INTERPRET or tried() or kernel in passed


def on_gpu(kernel):
    """A decorator: on a GPU that can run it, `kernel` takes the place of the function.

    The kernel gets the same arguments. It returns NotImplemented where they do not suit it, because
    of their dtype for instance; then the plain function runs. The plain function also runs where a
    call names an argument, as the kernel does not know these.
    """

    def decorate(plain):
        @wraps(plain)
        def chosen(*args, **options):
            result = NotImplemented
            if takes_over(kernel) and not options:
                result = kernel(*args)
            if result is NotImplemented:
                result = plain(*args, **options)
            return result

        return chosen

    return decorate


def suits(dtype, wanted):
    """Whether a kernel for arrays of dtype `wanted` takes those of `dtype`."""
    return INTERPRET or jnp.dtype(dtype) == wanted


def wide(x):
    """x in float32 or wider, for all that is not a matrix product of rounded factors."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
