"""The kernels on a GPU, against the plain functions in float32: `python tests/kernels/on_gpu.py`.

Prints a line for each check, as soon as it is known: the relative error |a - exact| / |exact|, and
what it may be. Ends with status 0; 1 where a check has failed; 2, with one line, where there is no
GPU. The tests beside this file check the same kernels step by step on any machine. Here is what a
compiler for GPUs makes of them, and cuDNN.
"""

import argparse
import contextlib
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the project's modules lie two folders up

import baselines  # noqa: E402
import gn  # noqa: E402
import gn_prox  # noqa: E402
import kernels  # noqa: E402
import layerwise_gn  # noqa: E402
import model  # noqa: E402
import optimizers  # noqa: E402
from kernels import attention, choice  # noqa: E402
from kernels.attention import attention_kernel  # noqa: E402
from kernels.cross_entropy import (  # noqa: E402
    cross_entropy_kernel,
    exact_kernel,
    loss_and_gradient_kernel,
    quadratic_kernel,
)
from kernels.heads import queries_keys_values_kernel  # noqa: E402
from kernels.mlp import mlp_kernel  # noqa: E402
from kernels.orthogonal import orthonormalize, product_of_thirds  # noqa: E402

METHODS = {"gn": gn, "gn_prox": gn_prox, "layerwise_gn": layerwise_gn}


# ---- comparing -----------------------------------------------------------------------------------


def normal(seed, dtype, *shapes):
    """Standard normal arrays."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


def in_float32(tree):
    """A tree with all its arrays in float32."""
    return jax.tree.map(lambda a: a.astype(jnp.float32), tree)


@contextlib.contextmanager
def without_kernels():
    """Functions that are traced here are the plain ones, their products as exact as float32 is."""
    chosen = kernels.takes_over
    kernels.takes_over = lambda kernel: False
    try:
        with jax.default_matmul_precision("highest"):
            yield
    finally:
        kernels.takes_over = chosen


def compared(name, got, exact, bound):
    """A check: (name, error, bound). Where the exact array is 0 but for rounding, both must be."""
    got = np.asarray(got).astype(np.float64)
    exact = np.asarray(exact).astype(np.float64)
    if abs(exact).max() < 1e-3:
        largest = max(abs(got).max(), abs(exact).max())
        return f"{name} (zero)", float(largest), 1e-3
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    return name, float(error), bound


@partial(jax.jit, static_argnums=0)
def derivatives(f, x, dx, u):
    """f(*x), its pushforward of dx and its pullback of u, which has the dtype of f."""
    value, change = jax.jvp(f, x, dx)
    _, pull = jax.vjp(f, *x)
    u = jax.tree.map(lambda a, like: a.astype(like.dtype), u, value)
    return {"value": value, "pushforward": change, "pullback": pull(u)}


def derivative_checks(name, kernel, plain, x, seed, bound):
    """The kernel's derivatives at x against the plain function's of the same in float32."""
    like_u = jax.eval_shape(kernel, *x)
    dx = random_like(seed, x)
    u = random_like(seed + 1, like_u)
    got = derivatives(kernel, x, dx, u)
    with without_kernels():
        exact = derivatives(plain, *in_float32((x, dx, u)))
    for what in got:
        arrays = jax.tree_util.tree_leaves_with_path(got[what])
        exact_arrays = jax.tree.leaves(exact[what])
        for (path, a), b in zip(arrays, exact_arrays, strict=True):
            yield compared(f"{name} {what} {jax.tree_util.keystr(path)}", a, b, bound)


def random_like(seed, tree):
    """A tree of standard normal arrays with the shapes and dtypes of another."""
    leaves, structure = jax.tree.flatten(tree)
    made = [normal(seed + i, a.dtype, a.shape)[0] for i, a in enumerate(leaves)]
    return jax.tree.unflatten(structure, made)


# ---- the checks ----------------------------------------------------------------------------------


def attention_checks(widths=(16, 48, 128), contexts=(1, 77, 1024)):
    """Value, pushforward and pullback in bfloat16: many contexts, and many widths of a head."""
    plain = model.attention.__wrapped__
    sizes = [(64, T, 4, 2) for T in contexts]
    sizes += [(K, contexts[-1], 4, 4) for K in widths]
    for K, T, n_heads, n_kv_heads in sizes:
        q_shape = (2, T, n_heads, K)
        k_shape = (2, T, n_kv_heads, K)
        x = tuple(normal(T, jnp.bfloat16, q_shape, k_shape, k_shape))
        name = f"attention K {K} T {T} heads {n_heads}/{n_kv_heads}"
        yield from derivative_checks(name, attention_kernel, plain, x, T + 1, 0.006)


def block_inputs(network, names):
    """A block's parameters of these names, in float32, and x [2, T, D]."""
    params = model.init(network, jax.random.key(0))
    p = {name: a[0] for name, a in params["blocks"].items() if name in names}
    (x,) = normal(1, jnp.float32, (2, network.context, network.d_model))
    return p, x


def heads_checks(sizes=((16, 4, 2, 77), (48, 16, 16, 1024), (64, 6, 3, 9))):
    """The same of queries, keys and values, with QK-norm and without."""
    names = ("wq", "wk", "wv", "q_scale", "q_bias", "k_scale", "k_bias")
    for K, n_heads, n_kv_heads, T in sizes:
        for qk_norm in (True, False):
            widths = {"d_model": n_heads * K, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
            network = model.Config(
                context=T, n_layers=1, qk_norm=qk_norm, dtype="bfloat16", **widths
            )
            kernel = partial(queries_keys_values_kernel, network)
            exact = replace(network, dtype="float32")
            plain = partial(model.queries_keys_values.__wrapped__, exact)
            name = f"heads K {K} heads {n_heads}/{n_kv_heads} norms {qk_norm}"
            x = block_inputs(network, names)
            yield from derivative_checks(name, kernel, plain, x, K, 0.006)


def mlp_checks(sizes=((512, 2048, 1024), (24, 40, 9))):
    """The same of both MLPs."""
    for D, F, T in sizes:
        for kind in ("gelu", "swiglu"):
            network = model.Config(
                d_model=D, d_ff=F, n_layers=1, context=T, mlp=kind, dtype="bfloat16"
            )
            kernel = partial(mlp_kernel, network)
            plain = partial(model.mlp.__wrapped__, replace(network, dtype="float32"))
            x = block_inputs(network, ("w_up", "w_gate", "w_down"))
            yield from derivative_checks(f"mlp {kind} D {D} F {F}", kernel, plain, x, D, 0.01)


def loss_functions(v_dtype):
    """{name: (kernel, plain function)}, of logits z, labels y, changes v [S, c, V] in v_dtype."""
    loss = model.cross_entropy.__wrapped__
    quadratic = partial(gn.quadratic.__wrapped__, loss=loss)
    exact = partial(gn_prox.exact.__wrapped__, loss=loss)
    network = model.Config(dtype=jnp.dtype(v_dtype).name)

    def stacked(objective):
        return jax.vmap(objective, in_axes=(None, 0, None))

    return {
        "loss": (lambda z, v, y: cross_entropy_kernel(z, y), lambda z, v, y: loss(z, y)),
        "gradient": (
            lambda z, v, y: loss_and_gradient_kernel(network, z, y),
            lambda z, v, y: jax.value_and_grad(loss)(z, y),
        ),
        "quadratic": (stacked(quadratic_kernel), stacked(quadratic)),
        "exact": (stacked(exact_kernel), stacked(exact)),
        "one quadratic": (
            lambda z, v, y: quadratic_kernel(z, v[0], y),
            lambda z, v, y: quadratic(z, v[0], y),
        ),
    }


def cross_entropy_checks(sizes=(11, 32_000, 50_257)):
    """All kernels of the loss, of float32 logits with changes in float32 and bfloat16."""
    for V in sizes:
        c, S = 64, 3
        z, v = normal(V, jnp.float32, (c, V), (S, c, V))
        z = 3 * z
        y = jax.random.randint(jax.random.key(1), (c,), 0, V)
        y = y.at[0].set(0)
        y = y.at[1].set(V - 1)
        for dtype in (jnp.float32, jnp.bfloat16):
            change = v.astype(dtype)
            for name, (kernel, plain) in loss_functions(dtype).items():
                got = jax.tree.leaves(jax.jit(kernel)(z, change, y))
                with without_kernels():
                    exact = jax.tree.leaves(jax.jit(plain)(z, change.astype(jnp.float32), y))
                for i, (a, b) in enumerate(zip(got, exact, strict=True)):
                    bound = 0.003 if a.dtype == jnp.bfloat16 else 1e-5
                    title = f"cross-entropy V {V} {name} {jnp.dtype(dtype).name} {i}"
                    yield compared(title, a, b, bound)


def muon_checks(network):
    """How far rounding moves the ends of the band of Muon's singular values, over √(out/in)."""
    params = jax.jit(partial(model.init, network))(jax.random.key(3))
    steps = []
    for dtype in ("float32", "bfloat16"):
        optimizer = optimizers.muon(1.0, 0.95, 0.0, 0.0, dtype)
        step, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
        steps.append(step["blocks"])
    for name in ("wq", "w_up", "w_down"):
        exact, rounded = (np.linalg.svd(step[name][0], compute_uv=False) for step in steps)
        n_in, n_out = params["blocks"][name].shape[1:]
        for end in (np.min, np.max):
            change = abs(end(exact) - end(rounded)) / max(1, n_out / n_in) ** 0.5
            yield f"Muon's singular values: {name}, {end.__name__}", float(change), 0.03


def soap_checks(sizes=((3, 768), (2, 2048))):
    """SOAP's product, and its orthonormal columns Q of A = Q R, where A's rank is nearly lower."""
    for n, d in sizes:
        a, b = normal(d, jnp.float32, (n, d, d), (n, d, d))
        exact = np.matmul(np.asarray(a, np.float64), np.asarray(b, np.float64))
        yield compared(f"SOAP's product d {d}", jax.jit(product_of_thirds)(a, b), exact, 1e-5)

        A = a * jnp.logspace(0, -6, d)[None, :, None]
        Q = np.asarray(jax.jit(orthonormalize)(A), np.float64)
        departure = np.abs(Q.mT @ Q - np.eye(d)).max()
        yield f"SOAP's columns d {d}: orthonormal", float(departure), 1e-5
        R = np.triu(Q.mT @ np.asarray(A, np.float64))
        yield compared(f"SOAP's columns d {d}: A = Q R", Q @ R, A, 1e-5)


def gradient_of(network, name):
    """(params, delta, tokens) -> gradient, of the loss or of a method's objective at θ_t + δ."""

    def gradient(params, delta, tokens):
        if name == "loss":
            _, grad = baselines.value_and_grad(params, tokens, network)
        else:
            config = METHODS[name].Config(network, inner_steps=2, outer_steps=3)
            *_, grad = config.value_and_grad(params, delta, tokens)
        return grad

    return jax.jit(gradient)


def gradient_checks(network, batch, names=("loss", *METHODS)):
    """Whole gradients in bfloat16, each matrix for itself with that of all layers."""
    make = jax.jit(partial(model.init, network))
    params = make(jax.random.key(0))
    delta = jax.tree.map(lambda a: 0.1 * a, make(jax.random.key(1)))
    shape = (batch, network.context + 1)
    tokens = jax.random.randint(jax.random.key(2), shape, 0, network.vocab_size)
    for name in names:
        rounded = gradient_of(replace(network, dtype="bfloat16"), name)(params, delta, tokens)
        with without_kernels():
            exact = gradient_of(replace(network, dtype="float32"), name)(params, delta, tokens)
        rounded |= rounded["blocks"]
        exact |= exact["blocks"]
        for matrix in ("embedding", "head", *model.MATRICES):
            if matrix in exact:
                title = f"gradient of {name}: {matrix}"
                yield compared(title, rounded[matrix], exact[matrix], 0.012)


@contextlib.contextmanager
def on_a_new_card():
    """No kernel was ever tried on a card like this one; compiled programs are forgotten."""
    known = kernels.tried
    kernels.tried = lambda: False
    jax.clear_caches()
    try:
        yield
    finally:
        kernels.tried = known
        kernels.passed.clear()
        jax.clear_caches()


def greedy_pushforward(q, k, v, o, lse, dq, dk, dv):
    """In place of attention's: a kernel whose factors need more shared memory than a card has."""

    def kernel(a, out):
        tile = a[...]
        out[...] = jnp.dot(tile, tile.T, preferred_element_type=jnp.float32)

    square = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((256, 256), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=2),
        interpret=kernels.INTERPRET,
        name="greedy",
    )
    total = jnp.sum(square(jnp.ones((256, 1024), jnp.bfloat16)))
    return o + total.astype(o.dtype)


def choice_checks(network, batch):
    """On a card new to them all kernels pass; one that does not is left out; the numbers are right.

    A check that something is so has the error 0 or 1, and the bound 0.
    """
    network = replace(network, dtype="bfloat16")
    with on_a_new_card():
        choice.choose(network, model.shapes(network))
        for kernel, name in choice.NAMES.items():
            yield f"tried: {name}", float(kernel not in kernels.passed), 0
        yield from gradient_checks(network, batch, names=("gn",))
    pushforward = attention.pushforward
    attention.pushforward = greedy_pushforward
    try:
        with on_a_new_card():
            choice.choose(network, model.shapes(network))  # says so on stderr
            left_out = {*choice.NAMES} - kernels.passed
            yield "too greedy: attention alone left out", float(left_out != {attention_kernel}), 0
            yield from gradient_checks(network, batch, names=("gn",))
    finally:
        attention.pushforward = pushforward


# ---- the command ---------------------------------------------------------------------------------


def report(checks):
    """Prints a line for each check, at once. Returns how many there were, and how many failed."""
    count = 0
    failed = 0
    for name, found, bound in checks:
        bad = not found <= bound  # NaN is bad
        count += 1
        failed += bad
        mark = "  FAILED" if bad else ""
        print(f"{name:64} {found:9.2e}  <= {bound:g}{mark}", flush=True)
    return count, failed


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "the network of the whole gradients"
    parser.add_argument("--model", default="45m", choices=model.PRESETS, help=text)
    parser.add_argument("--batch", default=4, type=int, help="its sequences of random tokens")
    args = parser.parse_args()
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = flags + " --xla_gpu_autotune_level=0"  # compiles sooner
    backend = jax.default_backend()
    if backend != "gpu":
        print(f"on_gpu.py: no GPU: the default backend of JAX is {backend}", file=sys.stderr)
        return 2
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    network = model.PRESETS[args.model]
    total = 0
    total_failed = 0
    for checks in (
        attention_checks(),
        heads_checks(),
        mlp_checks(),
        cross_entropy_checks(),
        muon_checks(network),
        soap_checks(),
        gradient_checks(network, args.batch),
        choice_checks(network, args.batch),
    ):
        count, failed = report(checks)
        total += count
        total_failed += failed
    print(f"{total_failed} of {total} checks failed")
    return 1 if total_failed else 0


if __name__ == "__main__":
    sys.exit(main())
