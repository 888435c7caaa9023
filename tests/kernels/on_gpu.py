"""The kernels on a GPU, against plain XLA operations in float32: `python tests/kernels/on_gpu.py --model 45m`.

A line for each check, as soon as it is known: the relative error |a - exact| / |exact|, and what it may be. Status 0; 1
where a check has failed; 2, with one line, where there is no GPU. tests/test_attention.py, test_heads.py and
test_cross_entropy.py check the same kernels step by step on any machine; here are what a compiler for GPUs makes of
them, and cuDNN.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import baselines  # noqa: E402
import gn  # noqa: E402
import gn_prox  # noqa: E402
import layerwise_gn  # noqa: E402
import model  # noqa: E402
from kernels import (
    attention,  # noqa: E402  the project's modules lie one folder up
    cross_entropy,  # noqa: E402
    heads,  # noqa: E402
)

METHODS = {  # objective, linearized
    "gn": (gn.quadratic, gn.linearized),
    "gn_prox": (gn_prox.exact, gn.linearized),
    "layerwise_gn": (gn.quadratic, layerwise_gn.linearized),
}
NAMES = {1: ["loss"], 2: ["loss", "gradient"], 3: ["loss", "values", "gradients"]}  # of cross_entropy.fused's results
single = partial(jax.tree.map, lambda a: a.astype(jnp.float32))


def normal(seed, dtype, *shapes):
    """Standard normal arrays."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


def error(got, exact):
    """|got - exact| / |exact|, in the norm over an array."""
    got, exact = (np.asarray(a).astype(np.float64) for a in (got, exact))
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def compared(name, got, exact, bound):
    """A check. Where the exact array is zero but for rounding, both must be below 1e-3, absolutely."""
    largest = [float(abs(np.asarray(a).astype(np.float64)).max()) for a in (got, exact)]
    if largest[1] < 1e-3:
        return f"{name} (zero)", max(largest), 1e-3
    return name, error(got, exact), bound


@partial(jax.jit, static_argnums=0)
def derivatives(f, at, d, u):
    """f at a point, its pushforward of d and its pullback of u, each a tuple."""
    (out, Jd), bar = jax.jvp(f, at, d), jax.vjp(f, *at)[1](u)
    return {"value": out, "pushforward": Jd, "pullback": bar}


def of_kernel(name, fused, plain, at, d, u, bound):
    """The kernel's derivatives against those of the plain operations in float32, as (name, error, bound)."""
    got = derivatives(fused, at, d, u)
    with jax.default_matmul_precision("highest"):
        exact = derivatives(plain, *single((at, d, u)))
    for what in got:
        for i, (a, b) in enumerate(zip(*map(jax.tree.leaves, (got[what], exact[what])), strict=True)):
            yield compared(f"{name} {what} {i}", a, b, bound if a.dtype == jnp.bfloat16 else 1e-5)


def attention_checks(fused=attention.fused, widths=(16, 48, 128), contexts=(1, 77, 1024)):
    """Value, pushforward and pullback in bfloat16 of `fused`, as `of_kernel`: many contexts, and many widths."""
    sizes = [(64, T, 4, 2) for T in contexts] + [(K, contexts[-1], 4, 4) for K in widths]
    for K, T, H, G in sizes:
        q, k = (2, T, H, K), (2, T, G, K)
        x = normal(T, jnp.bfloat16, q, k, k, q, k, k, q)
        name, plain = f"attention K {K} T {T} heads {H}/{G}", lambda *at: attention.plain(*at)[0]
        yield from of_kernel(name, fused, plain, tuple(x[:3]), tuple(x[3:6]), x[6], 0.006)


def heads_checks(interpret=False, sizes=((16, 4, 2, 77), (48, 16, 16, 1024), (64, 6, 3, 9))):
    """The same of queries, keys and values made from one product, with QK-norm and without."""
    for K, H, G, T in sizes:
        counts, rows = (H, G, G), [(2, T, n, 2, K // 2) for n in (H + 2 * G, H + 2 * G, H, G, G)]
        x, dx, *u = normal(K, jnp.bfloat16, *rows)
        for norms in (0, 4):
            at, d = (normal(i, jnp.float32, *[(n, 2, K // 2) for n in (H, H, G, G)[:norms]]) for i in (1, 2))
            f = partial(heads.fused, counts, interpret), partial(heads.plain, counts)
            yield from of_kernel(f"heads K {K} H {H} norms {norms}", *f, (x, *at), (dx, *d), tuple(u), 0.003)


def cross_entropy_checks(fused=cross_entropy.fused, sizes=(11, 32_000, 50_257)):
    """All kinds of `fused`, of float32 logits with changes in float32 and bfloat16, as (name, error, bound)."""
    plain = cross_entropy.cross_entropy

    @jax.jit
    def exact(z, y, v):
        ell = lambda z: plain(z, y)
        loss, g = jax.value_and_grad(ell)(z)
        Hv = [jax.jvp(jax.grad(ell), (z,), (one,))[1] for one in v]
        at = [loss + jnp.vdot(g, one) + jnp.vdot(one, h) / 2 for one, h in zip(v, Hv, strict=True)]
        there = [jax.value_and_grad(ell)(z + one) for one in v]
        stack = lambda rows: jax.tree.map(lambda *a: jnp.stack(a), *rows)
        quadratic = (loss, jnp.stack(at), jnp.stack([g + h for h in Hv]))
        return {"value": (loss,), "gradient": (loss, g), "quadratic": quadratic, "exact": (loss, *stack(there))}

    for V in sizes:
        c, S = 64, 3
        z, v = normal(V, jnp.float32, (c, V), (S, c, V))
        y = jax.random.randint(jax.random.key(1), (c,), 0, V).at[0].set(0).at[1].set(V - 1)
        for dtype in (jnp.float32, jnp.bfloat16):
            change = v.astype(dtype)
            for kind, expected in exact(3 * z, y, single(change)).items():
                options = {"v": change} if kind in ("quadratic", "exact") else {}
                got = jax.jit(partial(fused, kind, dtype=dtype))(3 * z, y, **options)
                for name, a, b in zip(NAMES[len(got)], got, expected, strict=True):
                    bound = 0.003 if a.dtype == jnp.bfloat16 else 1e-5
                    yield compared(f"cross-entropy V {V} {kind} {jnp.dtype(dtype).name}: {name}", a, b, bound)


def muon_checks(network):
    """How far rounding moves the ends of the band of Muon's singular values, (name, change / sqrt(out/in), bound)."""
    grad, steps = jax.jit(partial(model.init, network))(jax.random.key(3)), []
    for dtype in ("float32", "bfloat16"):
        optimizer = baselines.muon(1.0, 0.95, 0.0, 0.0, dtype)
        steps.append(jax.jit(optimizer.update)(grad, optimizer.init(grad), grad)[0]["blocks"])
    for name in ("wq", "w_up", "w_down"):
        exact, rounded = (np.linalg.svd(step[name][0], compute_uv=False) for step in steps)
        rows, columns = grad["blocks"][name].shape[1:]
        for end in (np.min, np.max):
            change = abs(end(exact) - end(rounded)) / max(1, columns / rows) ** 0.5
            yield f"Muon's singular values: {name}, {end.__name__}", float(change), 0.03


@contextlib.contextmanager
def in_plain_operations():
    """No kernel of cross-entropy in what is traced here."""
    modules, usable = (cross_entropy, gn, gn_prox), cross_entropy.usable
    for module in modules:
        module.usable = lambda z: False
    try:
        yield
    finally:
        for module in modules:
            module.usable = usable


def gradients(network, name):
    """(params, delta, tokens) -> gradient, of the loss or of a method's inner objective at θ_t + δ."""
    if name == "loss":
        return lambda params, delta, tokens: model.value_and_grad(network, params, tokens)[1]
    return lambda *args: gn.value_and_grad(*METHODS[name], *args, gn.Config(network, 2, 3))[1]


def gradient_checks(network, batch, names=("loss", *METHODS)):
    """Whole gradients in bfloat16, each matrix for itself with that of all layers, as (name, error, bound)."""
    make = jax.jit(partial(model.init, network))
    params, delta = make(jax.random.key(0)), jax.tree.map(lambda a: 0.1 * a, make(jax.random.key(1)))
    tokens = jax.random.randint(jax.random.key(2), (batch, network.context + 1), 0, network.vocab_size)
    for name in names:
        rounded = jax.jit(gradients(replace(network, dtype="bfloat16"), name))(params, delta, tokens)
        with in_plain_operations(), jax.default_matmul_precision("highest"):
            exact = jax.jit(gradients(replace(network, dtype="float32"), name))(params, delta, tokens)
        for matrix in ("embedding", "head", *(m for m in model.MATRICES if m in exact["blocks"])):
            of = lambda tree, m=matrix: tree["blocks"][m] if m in tree["blocks"] else tree[m]
            yield f"gradient of {name}: {matrix}", error(of(rounded), of(exact)), 0.012


def report(checks):
    """Prints a line for each check, as soon as it is known. Returns how many there were, and how many failed."""
    count = failed = 0
    for name, found, bound in checks:
        bad = not found <= bound  # NaN is bad
        count, failed = count + 1, failed + bad
        print(f"{name:64} {found:9.2e}  <= {bound:g}{'  FAILED' if bad else ''}", flush=True)
    return count, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="45m", choices=model.PRESETS, help="the network of the whole gradients")
    parser.add_argument("--batch", default=4, type=int, help="its sequences of random tokens")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"  # compiles sooner
    if jax.default_backend() != "gpu":
        print(f"on_gpu.py: no GPU: the default backend of JAX is {jax.default_backend()}", file=sys.stderr)
        return 2
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    network = model.PRESETS[args.model]
    kernels = attention_checks(), heads_checks(), cross_entropy_checks()
    parts = *kernels, muon_checks(network), gradient_checks(network, args.batch)
    counts = [report(part) for part in parts]
    total, failed = map(sum, zip(*counts, strict=True))
    print(f"{failed} of {total} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
