"""How fast is it here? `python bench.py --model tiny`: a row for each method's inner step, the optimizers' updates, a
line search and whole outer steps.

Milliseconds are of one call, median (smallest, largest) over repetitions, of several calls where one is short. The
share of the matmul rate is the products that the mathematics of the step asks for, a second, over the rate that one
large product reaches on the same devices. Memory is what the compiler reserves: arguments, results and all between.
`first` is the first call, compilation included, or its retrieval from disk.
"""

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import baselines
import gn
import gn_prox
import layerwise_gn
import model
from runtime import checkpoint, flags, parallel

METHODS = {  # module, objective, linearized
    "gn": (gn, gn.quadratic, gn.linearized),
    "gn_prox": (gn_prox, gn_prox.exact, gn.linearized),
    "layerwise_gn": (layerwise_gn, gn.quadratic, layerwise_gn.linearized),
}
BASELINES = {cls.__name__.lower(): cls for cls in (baselines.AdamW, baselines.Muon, baselines.SOAP)}


@dataclass(frozen=True)
class Config:
    """What is measured."""

    model: str = "tiny"  # tiny | 45m | 150m: the preset of the network
    rows: str = ""  # only rows whose name holds one of these words, between commas; default all
    inner_batch: int = 0  # sequences in an inner batch; default 8 for tiny, else 32
    inner_steps: int = 8  # inner batches in the outer steps
    dtype: str = ""  # float32 | bfloat16; default bfloat16 on a GPU
    vocab_size: int = 0  # ids; default 256 for tiny, else 32000
    repeat: int = 10  # repetitions
    json: str = ""  # file for the same numbers as data


class Row(NamedTuple):
    """One thing to measure: f(state, *args), which returns the next state, or something else to be thrown away."""

    name: str
    f: object  # compiled, or a function that calls what is
    args: tuple
    start: object  # makes the first state
    tokens: int = 0  # that a call reads
    products: tuple = (0, 0, 0)  # a weight of the blocks, of the head, and of attention's kind, for each token


def setup(config):
    """The network, the mesh, and two inner batches on the devices. Raises ValueError for what is not valid."""
    if config.model not in model.PRESETS:
        raise ValueError(f"model is {config.model!r}; valid: {', '.join(model.PRESETS)}")
    for name, least in (("inner_batch", 0), ("vocab_size", 0), ("inner_steps", 1), ("repeat", 1)):
        if getattr(config, name) < least:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least {least}")
    tiny, gpu = config.model == "tiny", jax.default_backend() == "gpu"
    changes = {"vocab_size": config.vocab_size or (256 if tiny else 32_000)}
    changes["dtype"] = config.dtype or ("bfloat16" if gpu else "float32")
    network = model.Config(**vars(model.PRESETS[config.model]) | changes)
    size = config.inner_batch or (8 if tiny else 32)
    mesh, rng = parallel.mesh(size), np.random.default_rng(0)
    draw = lambda: rng.integers(0, network.vocab_size, (size, network.context + 1)).astype(np.int32)
    return network, mesh, [parallel.put(mesh, draw(), parallel.rows) for _ in range(2)]


def rows(config, network, mesh, batches):
    """Every row. The first state is random parameters; θ is moved a little from them, so that there is a δ."""
    L, N, tokens = network.n_layers, config.inner_steps, batches[0][:, 1:].size
    draw = lambda: parallel.put(mesh, jax.jit(partial(model.init, network))(jax.random.key(0)))
    first = lambda method, settings: parallel.jit(method.init, static_argnums=1)(draw(), settings)
    batch, forward = lambda k: batches[k % 2], jax.jit(lambda p, t: gn.losses(p, p, jnp.ones(1), t, network))
    yield Row("forward, one line-search evaluation", forward, batches[:1], draw, tokens, (1, 1, 2))
    for name, cls in BASELINES.items():
        settings = cls(network, 1, 100)
        made = partial(first, baselines, settings)
        if cls is baselines.AdamW:
            args = batches[0], cls(network, N, 100)
            yield Row("gradient, added up", baselines.accumulate, args, made, tokens, (3, 3, 7))
        yield Row(f"{name}: optimizer update", baselines.finish, (settings,), made)
        whole = lambda *args: baselines.update(*args)[0]
        yield Row(f"{name}: whole step, 1 inner batch", whole, (batch, None, settings), made, tokens, (3, 3, 7))
    full, layerwise = (5, 5, 12), (L + 6, 2 * L + 5, 7 + 5 * (L + 2))
    for name, (method, objective, linearized) in METHODS.items():
        settings = method.Config(network, N, 100)
        made = lambda method=method, settings=settings: moved(first(method, settings))
        args, products = (batches[0], settings, objective, linearized), layerwise if method is layerwise_gn else full
        yield Row(f"{name}: inner step", gn.inner_step, args, made, tokens, products)
        if settings.line_search:
            search = lambda state, *args: gn.line_search(state.params, state.theta, *args)
            count = settings.line_search + settings.guard
            title = f"{name}: line search, {N} inner batches x {count}"
            yield Row(title, search, (batch, settings), made, N * tokens, (count, count, 2 * count))
        outer = lambda *args, update=method.update: update(*args)[0]
        yield Row(f"{name}: outer step, {N} inner steps", outer, (batch, batch, settings), made, N * tokens)


def moved(state):
    """The state with an inner iterate that is not θ_t."""
    return state._replace(theta=jax.tree.map(lambda a: 1.001 * a, state.theta))


def seconds(repeat, step, state):
    """Seconds a call of step, state -> (state, anything): one number a repetition, each of about 0.2 s."""
    state, _ = jax.block_until_ready(step(state))
    start = time.perf_counter()
    state, _ = jax.block_until_ready(step(state))
    calls = max(1, round(0.2 / (time.perf_counter() - start)))
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(calls):
            state, out = step(state)
        jax.block_until_ready((state, out))
        times.append((time.perf_counter() - start) / calls)
    return np.array(times)


def matmul_rate(dtype, devices):
    """Multiplications and additions a second of a large square product, on all devices."""
    n = 8192 if jax.default_backend() == "gpu" else 2048
    a = jax.random.normal(jax.random.key(0), (n, n), dtype)
    times = seconds(10, jax.jit(lambda a: (a @ a / n**0.5, 0)), a)
    return 2 * n**3 * devices / np.median(times)


def operations(network, row):
    """Multiplications and additions of a step's products, those that its mathematics asks for."""
    D, L, T = network.d_model, network.n_layers, network.context
    matrices = jax.eval_shape(partial(model.init, network), jax.random.key(0))["blocks"]
    weights = (sum(a.size for k, a in matrices.items() if k in model.MATRICES), D * network.vocab_size, L * T / 2 * D)
    return 2 * row.tokens * np.dot(row.products, weights)


def measure(config, network, rate, row):
    """The numbers of a row."""
    state, peak, start = jax.block_until_ready(row.start()), None, time.perf_counter()
    if hasattr(row.f, "lower"):
        memory = row.f.lower(state, *row.args).compile().memory_analysis()
        kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        peak = (kept + memory.temp_size_in_bytes) / 2**30

    def step(state):
        out = row.f(state, *row.args)
        return (out if type(out) is type(state) else state), out

    state, _ = jax.block_until_ready(step(state))
    first, times = time.perf_counter() - start, seconds(config.repeat, step, state)
    ms = {name: float(1e3 * f(times)) for name, f in (("median", np.median), ("min", np.min), ("max", np.max))}
    speed = row.tokens / np.median(times) or None
    share = operations(network, row) / np.median(times) / rate or None
    return {"name": row.name, "ms": ms, "tokens_per_s": speed, "share": share, "peak_gib": peak, "first_s": first}


def line(result):
    """A row of the table."""
    show = lambda value, form: "-" if value is None else format(value, form)
    ms = result["ms"]
    text = f"{result['name']:44} {ms['median']:9.2f} ({ms['min']:8.2f} {ms['max']:8.2f})"
    text += f" {show(result['tokens_per_s'], ',.0f'):>11} {show(result['share'], '.0%'):>6}"
    return text + f" {show(result['peak_gib'], '.2f'):>7} {result['first_s']:8.1f}"


def main(argv=None):
    """Runs the command line. Status 0, or 2 with one line said of bad input."""
    try:
        parallel.start()
        fields = flags.fields_of(Config)
        given = flags.parse(sys.argv[1:] if argv is None else argv, fields, vars(Config()), __doc__)
        config = Config(**given)
        if config.json and Path(config.json).exists():
            raise ValueError(f"--json {config.json} exists")
        network, mesh, batches = setup(config)
    except ValueError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    rate, device = matmul_rate(network.dtype, mesh.size), jax.devices()[0].device_kind
    about = f"{config.model}, {network.dtype}, inner batches of {len(batches[0])} x {network.context}, {mesh.size} x "
    print(f"{about}{device}, jax {jax.__version__}; one large product: {rate / 1e12:.1f} TFLOP/s")
    print(f"{'':44} {'ms':>9} ({'min':>8} {'max':>8}) {'tokens/s':>11} {'share':>6} {'GiB':>7} {'first, s':>8}")
    results, words = [], [word for word in config.rows.split(",") if word]
    with jax.set_mesh(mesh):
        for row in rows(config, network, mesh, batches):
            if not words or any(word in row.name for word in words):
                results.append(measure(config, network, rate, row))
                print(line(results[-1]), flush=True)
    if not results:
        print(f"bench.py: no row holds {' or '.join(words)}", file=sys.stderr)
        return 2
    if config.json:
        about = {"device": device, "devices": mesh.size, "jax": jax.__version__, "commit": checkpoint.commit()}
        text = json.dumps({**vars(config), **about, "matmul_rate": rate, "rows": results}, indent=1)
        checkpoint.write_file(config.json, lambda f: f.write(text.encode()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
