"""How fast is it here? `python bench.py --model tiny` prints a row for each step of training.

The rows are the inner step, the line search and a whole outer step of each Gauss-Newton method (but
gn_cg, whose steps are of no fixed length), the updates and steps of the baselines, and a forward
pass. A row shows
  ms        milliseconds of one call: the median, and the smallest and largest, over repetitions
  tokens/s  tokens that a call reads (an outer step: without its line search), over the median
  share     the rate of the matrix products that the maths asks for, over the rate of one large
            product on the same devices
  GiB       memory that the compiler reserves on a device: arguments, results and all between
  first, s  seconds of the first call, with its compilation
"""

import json
import re
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import baselines
import gn
import model
from kernels import choice
from recipe import METHODS
from runtime import checkpoint, files, flags, memory, parallel
from runtime.command import blaming_input, check_stopped, command


@dataclass(frozen=True)
class Config:
    """What is measured."""

    model: str = "tiny"  # tiny | 5m | 45m | 150m: the preset of the network
    # words, or beginnings of words, between commas: only rows that have one, such as "gn: inner";
    # default: all
    rows: str = ""
    inner_batch: int = None  # sequences in an inner batch; default 8 for tiny, else 32
    inner_steps: int = 8  # inner batches in the outer steps
    dtype: str = ""  # float32 | bfloat16; default: what suits the devices
    vocab_size: int = None  # ids; default: those of the preset
    repeat: int = 10  # repetitions
    json: str = ""  # file for the same numbers as data

    def check(self):
        """Raises ValueError where a field has a bad value."""
        flags.check_choice(self, "model", model.PRESETS)
        counts = ["inner_batch", "inner_steps", "vocab_size", "repeat"]
        flags.check_range(self, counts, least=1)
        if self.json and Path(self.json).exists():
            raise ValueError(f"--json {self.json} exists")
        if self.json:
            files.check_writable(Path(self.json).parent)  # now, not when all is measured


class Products(NamedTuple):
    """Multiply-adds per token: per weight of the blocks, per weight of the head, of attention.

    The unit of attention is one of its two products, q kᵀ or p v, in a forward pass. A change on
    its way up takes five units, and so does a cotangent on its way down: two for each of the two
    products, and one to compute q kᵀ again.
    """

    block: int
    head: int
    attention: int


# A matrix takes one product forward, and two for a change or for a cotangent: that of its input,
# and its own.
FORWARD = Products(block=1, head=1, attention=2)
BACKPROPAGATION = Products(block=1 + 2, head=1 + 2, attention=2 + 5)
GAUSS_NEWTON = Products(block=1 + 2 + 2, head=1 + 2 + 2, attention=2 + 5 + 5)


def layerwise_products(network):
    """Those of layerwise Gauss-Newton.

    A stream is the change of one layer on its way up to the loss, and its cotangent on the way
    back. Per weight, a block takes 1 for the forward pass; for the stream that starts in it, 2 up
    and 2 down; and for each stream that passes it, which are (L + 1) / 2 on average, 1 up and 1
    down. The head takes 1 for the forward pass, 2 for each of the L + 1 streams that pass it, and 2
    for its own. Attention takes 2 for the forward pass, and 5 up and 5 down for each stream.
    """
    L = network.n_layers
    passing = (L + 1) / 2  # on average
    block = 1 + 2 * (2 + passing)
    head = 1 + 2 * (L + 1) + 2
    attention = 2 + 2 * 5 * (1 + passing)
    return Products(block, head, attention)


class Row(NamedTuple):
    """One thing to measure: f(state, *args)."""

    name: str
    f: Any  # compiled, or a function that calls compiled ones
    args: tuple
    start: Any  # makes the first state
    tokens: int = 0  # that a call reads
    products: Products = Products(0, 0, 0)
    returns_state: bool = True  # the next one; else f returns a result, and the state stays


def set_up(config):
    """The settings with sizes filled in, the network, the mesh of devices, and two inner batches.

    Raises ValueError for a bad setting.
    """
    config.check()
    is_tiny = config.model == "tiny"
    dtype = config.dtype or choice.default_dtype()
    preset = model.PRESETS[config.model]
    vocab_size = config.vocab_size or preset.vocab_size
    network = replace(preset, vocab_size=vocab_size, dtype=dtype)
    network.check()

    size = config.inner_batch or (8 if is_tiny else 32)
    mesh = parallel.mesh(size)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(2):
        tokens = rng.integers(0, network.vocab_size, (size, network.context + 1))
        batches.append(parallel.put(mesh, tokens.astype(np.int32), parallel.rows))
    return replace(config, inner_batch=size), network, mesh, batches


# ---- the rows ------------------------------------------------------------------------------------


def rows(config, network, mesh, batches):
    """Every row: a forward pass, then those of the methods in the order of METHODS."""

    def make_params():
        """Random parameters on the devices."""
        make = jax.jit(partial(model.init, network))
        return parallel.put(mesh, make(jax.random.key(0)))

    yield forward_row(network, make_params, batches[0])
    for name, method in METHODS.items():
        length = 100  # outer steps; any number would do
        settings = method.Config(network, config.inner_steps, length)
        start = partial(first_state, method.module, settings, make_params)
        if isinstance(settings, baselines.Config):
            yield from baseline_rows(name, settings, start, batches)
        elif isinstance(settings, gn.Config):
            yield from gauss_newton_rows(name, method.module, settings, start, batches)


def first_state(module, settings, make_params):
    """A method's first state. An inner iterate θ is moved a little, so that there is a change δ."""
    state = parallel.jit(module.init, static_argnums=1)(make_params(), settings)
    if hasattr(state, "theta"):
        theta = jax.tree.map(lambda a: 1.001 * a, state.theta)
        state = state._replace(theta=theta)
    return state


def forward_row(network, make_params, tokens):
    """One evaluation of the loss, as the line search and the evaluation take."""
    mean_loss = jax.jit(parallel.mean(partial(model.loss, network)))
    name = "forward, one line-search evaluation"
    size = tokens[:, 1:].size
    return Row(name, mean_loss, (tokens,), make_params, size, FORWARD, returns_state=False)


def baseline_rows(name, settings, start, batches):
    """The gradient (once, since all baselines have the same), the update, and a whole step."""
    tokens = batches[0][:, 1:].size
    one = replace(settings, inner_steps=1)

    def whole(state, batch):
        state, _ = baselines.update(state, lambda k: batch, None, one)
        return state

    if name == "adamw":
        args = (batches[0], settings)
        gradient = baselines.accumulate
        yield Row("gradient, added up", gradient, args, start, tokens, BACKPROPAGATION)
    yield Row(f"{name}: optimizer update", baselines.finish, (one,), start)
    title = f"{name}: whole step, 1 inner batch"
    yield Row(title, whole, (batches[0],), start, tokens, BACKPROPAGATION)


def gauss_newton_rows(name, module, settings, start, batches):
    """The inner step, the line search if there is one, and the outer step."""
    N = settings.inner_steps
    tokens = batches[0][:, 1:].size

    def batch(k):
        return batches[k % 2]

    def search(state):
        return gn.line_search(state.params, state.theta, batch, replace(settings, race=False))

    def outer(state):
        state, _ = module.update(state, batch, batch, settings)
        return state

    products = GAUSS_NEWTON
    if name == "layerwise_gn":
        products = layerwise_products(settings.network)
    args = (batches[0], settings)
    yield Row(f"{name}: inner step", gn.inner_step, args, start, tokens, products)
    if settings.line_search:
        n = len(settings.step_sizes)  # θ_t among them
        title = f"{name}: line search, {N} inner batches x {n}"
        products = Products(n, n, 2 * n)
        yield Row(title, search, (), start, N * tokens, products, returns_state=False)
    yield Row(f"{name}: outer step, {N} inner steps", outer, (), start, N * tokens)


# ---- the clock -----------------------------------------------------------------------------------


def seconds(repeat, step, state):
    """Seconds of one call of step(state): a number for each repetition.

    step returns the next state and any result. A repetition is as many calls as take about 0.2 s.
    """
    state, _ = jax.block_until_ready(step(state))
    start = time.perf_counter()
    state, _ = jax.block_until_ready(step(state))
    calls = max(1, round(0.2 / (time.perf_counter() - start)))
    calls = int(parallel.largest(calls))  # all processes must make the same number
    times = []
    for _ in range(repeat):
        check_stopped()
        start = time.perf_counter()
        for _ in range(calls):
            state, out = step(state)
        jax.block_until_ready((state, out))
        times.append((time.perf_counter() - start) / calls)
    return np.array(times)


def matmul_rate(dtype, devices):
    """Multiplications and additions per second of one large square product, on all devices."""
    n = 2048 if jax.default_backend() == "cpu" else 8192
    a = jax.random.normal(jax.random.key(0), (n, n), dtype)
    multiply = jax.jit(lambda a: a @ a)
    # The factors stay the same: powers of a would soon be no numbers any more.
    times = seconds(10, lambda a: (a, multiply(a)), a)
    return 2 * n**3 * devices / np.median(times)


def operations(network, row):
    """Multiplications and additions that the mathematics of a row asks for."""
    D, L, T = network.d_model, network.n_layers, network.context
    params = model.shapes(network)
    matrices = [a.size for name, a in params["blocks"].items() if name in model.MATRICES]
    attention = L * T / 2 * D  # causal: half of the scores
    weights = (sum(matrices), D * network.vocab_size, attention)
    return 2 * row.tokens * np.dot(row.products, weights)


def peak_gib(f, *args):
    """GiB that the compiler reserves for f on a device, or None where f is no compiled function."""
    if not hasattr(f, "lower"):
        return None
    needed, _ = memory.usage(f.lower(*args))  # MiB
    return needed / 2**10


def measure(config, network, rate, row):
    """The numbers of a row."""
    state = jax.block_until_ready(row.start())
    start = time.perf_counter()
    peak = peak_gib(row.f, state, *row.args)  # this compiles the program of the first call

    def step(state):
        out = row.f(state, *row.args)
        return (out if row.returns_state else state), out

    state, _ = jax.block_until_ready(step(state))
    first = time.perf_counter() - start
    times = seconds(config.repeat, step, state)
    median = np.median(times)
    return {
        "name": row.name,
        "ms": {
            "median": float(1e3 * median),
            "min": float(1e3 * times.min()),
            "max": float(1e3 * times.max()),
        },
        "tokens_per_s": row.tokens / median or None,
        "share": operations(network, row) / median / rate or None,
        "peak_gib": peak,
        "first_s": first,
    }


# ---- the table -----------------------------------------------------------------------------------

HEADER = (
    f"{'':50} {'ms':>9} ({'min':>8} {'max':>8})"
    f" {'tokens/s':>11} {'share':>6} {'GiB':>7} {'first, s':>8}"
)


def line(result):
    """A row of the table."""

    def show(value, form):
        return "-" if value is None else format(value, form)

    ms = result["ms"]
    tokens = show(result["tokens_per_s"], ",.0f")
    share = show(result["share"], ".0%")
    peak = show(result["peak_gib"], ".2f")
    return (
        f"{result['name']:50} {ms['median']:9.2f} ({ms['min']:8.2f} {ms['max']:8.2f})"
        f" {tokens:>11} {share:>6} {peak:>7} {result['first_s']:8.1f}"
    )


def opening(about):
    """What is measured and where, in one line."""
    size = f"inner batches of {about['inner_batch']} x {about['context']}"
    devices = f"{about['devices']} x {about['device']}"
    parts = [about["model"], about["dtype"], about["forms"], size, devices, f"jax {about['jax']}"]
    rate = f"{about['matmul_rate'] / 1e12:.1f} TFLOP/s"
    return f"{', '.join(parts)}; one large product: {rate}"


def find_rows(config, network, mesh, batches):
    """The rows that are asked for. Raises ValueError if there are none."""
    names = [name for name in config.rows.split(",") if name] or [""]
    at_a_word = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, names))})")
    there = []
    chosen = []
    for row in rows(config, network, mesh, batches):
        there.append(row.name)
        if at_a_word.search(row.name):
            chosen.append(row)
    if not chosen:
        raise ValueError(f"no row has {' or '.join(names)}; the rows are {'; '.join(there)}")
    return chosen


def describe(config, network, mesh, rate):
    """What the file says besides the rows: the settings as they came out, and the machine."""
    about = {
        "context": network.context,
        "dtype": network.dtype,
        "vocab_size": network.vocab_size,
        "device": jax.devices()[0].device_kind,
        "devices": mesh.size,
        "forms": choice.forms(network),
        "jax": jax.__version__,
        "commit": checkpoint.commit(),
        "matmul_rate": rate,
    }
    return vars(config) | about


def run(config, network, mesh, chosen):
    """Measures and prints the chosen rows.

    What was measured is in the file after each row, so that nothing is lost where it is stopped.
    """
    choice.choose(network, model.shapes(network))
    results = []
    with jax.set_mesh(mesh):
        rate = matmul_rate(network.dtype, mesh.size)
        about = describe(config, network, mesh, rate)
        print(opening(about), HEADER, sep="\n")
        try:
            for row in chosen:
                result = measure(config, network, rate, row)
                if config.json:
                    write(config.json, about | {"rows": [*results, result]})
                results.append(result)
                check_stopped()
                print(line(result))
        except KeyboardInterrupt:
            if config.json and results:
                what = f"{len(results)} of {len(chosen)} rows are in {config.json}"
                raise KeyboardInterrupt(f"stopped; {what}") from None
            raise


def write(path, data):
    """Writes data as JSON, into a folder that need not be there."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    checkpoint.write_text(path, json.dumps(data, indent=1))


@command
def main(words):
    """Runs the command line."""
    with blaming_input():
        parallel.start()
        fields = flags.fields_of(Config)
        config = Config(**flags.parse(words, {"bench.py": fields}, vars(Config()), __doc__))
        config, network, mesh, batches = set_up(config)
        chosen = find_rows(config, network, mesh, batches)
    run(config, network, mesh, chosen)


if __name__ == "__main__":
    sys.exit(main())
