"""For GPUs: fast forms of functions that `model.py`, `gn.py` and `gn_prox.py` state in plain JAX.

Nobody has to read this folder to understand the methods. A kernel computes what the plain function computes, and
`tests/kernels` holds the two against each other.
"""

from functools import wraps

import jax


def on_gpu(kernel):
    """A decorator: on a GPU, `kernel` takes the place of the function.

    The kernel gets the same arguments. It returns NotImplemented where it does not suit them (another dtype, say);
    then the plain function runs. It also runs where a call names an argument that the kernel does not know.
    """

    def decorate(plain):
        @wraps(plain)
        def chosen(*args, **options):
            result = NotImplemented
            if jax.default_backend() == "gpu" and not options:
                result = kernel(*args)
            if result is NotImplemented:
                result = plain(*args, **options)
            return result

        return chosen

    return decorate
