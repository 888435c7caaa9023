"""Which forms run here: kernels where the cards can run them, plain JAX everywhere else.

    devices                                 dtype       kernels
    NVIDIA, capability 9.0 (H100, H200)     bfloat16    all: on an H200 they were tried
    NVIDIA, capability 8.0 and later        bfloat16    those that pass `choose`
    NVIDIA, before 8.0 (T4, V100)           float32     none
    TPU                                     bfloat16    none
    CPU, GPUs that are not NVIDIA's         float32     none

The compute capability is NVIDIA's number for what a card can do. From 8.0 on (Ampere, 2020) a card
multiplies in bfloat16, and Triton compiles for it. The table is a choice of what is sure to work:
--dtype takes another dtype, and some GPUs of others compute in bfloat16, too.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp

import kernels
from kernels.attention import WIDEST_HEAD, attention_kernel
from kernels.cross_entropy import (
    cross_entropy_kernel,
    exact_kernel,
    loss_and_gradient_kernel,
    quadratic_kernel,
)
from kernels.heads import queries_keys_values_kernel
from kernels.mlp import mlp_kernel
from kernels.orthogonal import orthonormalize, product_of_thirds
from runtime import parallel

NAMES = {  # of all kernels, for people
    queries_keys_values_kernel: "queries, keys and values",
    attention_kernel: "attention",
    mlp_kernel: "the MLP",
    cross_entropy_kernel: "cross-entropy",
    loss_and_gradient_kernel: "cross-entropy with its gradient",
    quadratic_kernel: "the quadratic objective",
    exact_kernel: "the exact objective",
    product_of_thirds: "SOAP's products",
    orthonormalize: "SOAP's orthonormal columns",
}
# These run whatever network.dtype says, as logits and SOAP's matrices are float32.
FOR_ANY_DTYPE = (
    cross_entropy_kernel,
    loss_and_gradient_kernel,
    quadratic_kernel,
    exact_kernel,
    product_of_thirds,
    orthonormalize,
)


def default_dtype():
    """The dtype for the factors of matrix products that all devices here are sure to be fast in."""
    platforms = {device.platform for device in jax.devices()}
    if kernels.capable() or platforms == {"tpu"}:
        return "bfloat16"
    return "float32"


def choose(network, params):
    """On a card that the kernels were not tried on, tries each of them once, for this network.

    params: its parameters, or their shapes (model.shapes). A kernel that fails is left out from now
    on. Then a line on stderr says so. Call it before a step is compiled: what is compiled keeps its
    form. Where it is not called, such a card runs plain JAX.
    """
    kernels.passed.clear()
    if kernels.tried() or not kernels.capable():
        return
    failed = []
    for kernel, f, shapes in trials(network, params):
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        reason = ""
        try:
            jax.block_until_ready(jax.jit(f)(*zeros))
        except Exception as error:  # of Pallas, of a compiler, of cuDNN or of the driver
            reason = str(error).partition("\n")[0] or type(error).__name__
        if parallel.in_any(bool(reason)):
            reason = reason or "it fails in another process"
            failed.append(f"{NAMES[kernel]} ({reason[:200]})")
        else:
            kernels.passed.add(kernel)
    if failed and jax.process_index() == 0:
        card = jax.devices()[0].device_kind
        print(f"kernels: {card} runs plain JAX in place of {'; '.join(failed)}", file=sys.stderr)


def forms(network):
    """What runs here, in a few words."""
    used = []
    for kernel, name in NAMES.items():
        if kernels.takes_over(kernel) and suits_network(kernel, network):
            used.append(name)
    if not used:
        return "plain JAX"
    left_out = [name for name in NAMES.values() if name not in used]
    if left_out:
        return f"GPU kernels, but plain JAX for {'; '.join(left_out)}"
    return "GPU kernels"


def suits_network(kernel, network):
    """Whether a kernel takes the arrays of this network."""
    if kernel is attention_kernel and network.d_model // network.n_heads > WIDEST_HEAD:
        return False
    return kernel in FOR_ANY_DTYPE or network.dtype == "bfloat16" or kernels.INTERPRET


# ---- what is tried -------------------------------------------------------------------------------


def trials(network, params):
    """For each kernel a function of arrays to compile and run, and the shapes of these arrays.

    The tiles of a program, and so the memory that it needs on the card, depend on the network. How
    many programs there are is no matter: one sequence and eight tokens will do.
    """
    block = {}
    for name, stacked in params["blocks"].items():
        block[name] = jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)
    dtype = params["head"].dtype
    x = jax.ShapeDtypeStruct((1, network.context, network.d_model), dtype)
    for kernel in (queries_keys_values_kernel, mlp_kernel):
        yield kernel, partial(derivatives, partial(kernel, network)), (block, x)

    width = network.d_model // network.n_heads
    qkv = []
    for count in (network.n_heads, network.n_kv_heads, network.n_kv_heads):
        shape = (1, network.context, count, width)
        qkv.append(jax.ShapeDtypeStruct(shape, jnp.dtype(network.dtype)))
    yield attention_kernel, partial(derivatives, attention_kernel), qkv

    z = jax.ShapeDtypeStruct((8, network.vocab_size), dtype)
    v = jax.ShapeDtypeStruct(z.shape, jnp.dtype(network.dtype))
    streams = jax.ShapeDtypeStruct((network.n_layers + 1, *z.shape), v.dtype)
    y = jax.ShapeDtypeStruct((8,), jnp.int32)
    yield cross_entropy_kernel, cross_entropy_kernel, (z, y)
    yield loss_and_gradient_kernel, partial(loss_and_gradient_kernel, network), (z, y)
    for kernel in (quadratic_kernel, exact_kernel):
        yield kernel, partial(one_and_stacked, kernel), (z, v, streams, y)

    square = jax.ShapeDtypeStruct((1, network.d_model, network.d_model), dtype)
    yield product_of_thirds, product_of_thirds, (square, square)
    yield orthonormalize, orthonormalize, (square,)


def derivatives(kernel, *x):
    """kernel(*x), its pushforward and its pullback; nothing where x does not suit the kernel."""
    value = kernel(*x)
    if value is NotImplemented:
        return ()
    _, push = jax.linearize(kernel, *x)
    _, pull = jax.vjp(kernel, *x)
    return value, push(*x), pull(value)


def one_and_stacked(objective, z, v, streams, y):
    """An objective of one change, as gn.py calls it, and of a stack, as layerwise_gn.py does."""
    of_stack = jax.vmap(objective, in_axes=(None, 0, None))
    return objective(z, v, y), of_stack(z, streams, y)
