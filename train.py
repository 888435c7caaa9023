"""Trains a LLaMA: `python train.py --method gn --model tiny`. `--help` lists every flag.

The flags are the fields of three dataclasses: `Config` here, model.Config, and the method's own. A run is: tokenize
the corpus once; warm up with AdamW on the first 5% of the tokens, shared by all methods (Section 5); then outer steps
of the method, evaluated on held-out text, logged and saved. Every batch is a function of seed and step, so a run
that is stopped and started again with the same command goes on as if nothing had happened. Commas between the values of
a flag make a grid: a run for each combination, one after another.
"""

import dataclasses
import math
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

import baselines
import data
import gn
import gn_cg
import gn_prox
import layerwise_gn
import model
import optimizers
from runtime import checkpoint, files, flags, parallel, report
from runtime.live import Live, Stop
from sample import generate
from text.tokenizer import Tokenizer, tokenizer

METHODS = {method.__name__: (method, method.Config) for method in (gn, gn_prox, layerwise_gn, gn_cg)}
METHODS |= {cls.__name__.lower(): (baselines, cls) for cls in (baselines.AdamW, baselines.Muon, baselines.SOAP)}
DERIVED = ("network", "model", "inner_steps", "outer_steps", "inner_tokens")  # fields of a method's Config that are not flags
WARMUP_CODE = "attention baselines cross_entropy data documents files flags heads linear mlp model optimizers parallel tokenizer"
loss = jax.jit(lambda network, *args: parallel.mean(partial(model.loss, network))(*args), static_argnums=0)


@dataclass(frozen=True)
class Config:
    """A run. None = the default of the model: see DEFAULTS."""

    method: str = "gn"  # gn (Algorithm 1) | gn_prox (Algorithm 2) | layerwise_gn (Section 6.3) | adamw | muon | soap
    model: str = "45m"  # tiny | 45m | 150m: the preset of the network (Appendix E)
    data: str = None  # c4 (streamed) | stdlib (Python's own source) | a file or folder: .txt .jsonl .json.gz .parquet
    tokenizer: str = None  # bytes | gpt2 (cut to --vocab-size ids; 0 = 32000, Section 5)
    batch: int = None  # tokens in a batch, i.e. an outer step, line search not included (Appendix H: 400k to 120m)
    tokens: int = None  # tokens of the run, warm-up and line search not included; default 20 a parameter (Section 5)
    steps: int = None  # outer steps; else tokens / batch
    inner_batch: int = None  # sequences in an inner batch, b_inner (Section 5: 32 at 45m, 128 at 150m)
    eval_tokens: int = None  # held-out tokens that an evaluation reads, at most
    eval_every: int = None  # outer steps between two evaluations and saves; default: as many as read --eval-tokens
    save_every: float = 10.0  # minutes at most between two saves, also inside an outer step
    target_loss: float = None  # nats a token: stop at the first evaluation at or below it (Section 6.1.1)
    warmup_fraction: float = 0.05  # tokens of the AdamW warm-up, over --tokens (Section 5)
    warmup_lr: float = 0.002  # peak learning rate of the warm-up, after a linear rise over its first tenth
    shard: bool = False  # true = spread matrices, optimizer state and gradient over the devices, to save memory
    seed: int = 0  # of the parameters and of the order of the data
    out: str = None  # folder of the run, or of a grid's runs; default: runs/ and a name made of the settings
    generate: str = None  # a text: instead of training, prints what the model of the run in --out goes on with

    def __post_init__(self):
        given = {name: value for name, value in vars(self).items() if value is not None}
        for name in given.keys() & {"batch", "tokens", "steps", "inner_batch", "eval_tokens", "eval_every"}:
            if given[name] < 1:
                raise ValueError(f"{name} is {given[name]}; it must be at least 1")
        for name in given.keys() & {"warmup_lr", "target_loss", "save_every"}:
            if not 0 < given[name] < math.inf:
                raise ValueError(f"{name} is {given[name]}; it must be a positive number")
        if not 0 <= self.warmup_fraction <= 1:
            raise ValueError(f"warmup_fraction is {self.warmup_fraction}; it must be between 0 and 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; it must be at least 0 and below 2^32")


PAPER = {"data": "c4", "tokenizer": "gpt2", "batch": 4_000_000, "eval_tokens": 10 * 128 * 1024}  # the paper: ten times
DEFAULTS = {  # of the flags, by model
    "tiny": {"data": "stdlib", "tokenizer": "bytes", "batch": 131_072, "inner_batch": 8, "eval_tokens": 65_536}
    | {"steps": 10},  # half of 20 tokens a parameter, unless --tokens is given
    "45m": {**PAPER, "inner_batch": 32},
    "150m": {**PAPER, "inner_batch": 128},
}
TUNED = {  # of the flags, by model and method: the best of the grids in README.md
    ("tiny", "gn"): {"lr": 0.02, "schedule": "global cosine"},
    ("tiny", "gn_prox"): {"lr": 0.015, "average": 0.99},
    ("tiny", "layerwise_gn"): {"lr": 0.03, "schedule": "global cosine"},
    ("tiny", "adamw"): {"lr": 0.015, "schedule": "constant", "warmup": 0.5, "b2": 0.99, "average": 0.3},
    ("tiny", "muon"): {"lr": 0.06, "schedule": "constant", "warmup": 0.3, "momentum": 0.9, "average": 0.4},
    ("tiny", "soap"): {"lr": 0.03, "schedule": "constant", "warmup": 0.5, "b2": 0.7, "average": 0.3},
}


class Run(NamedTuple):
    """Everything that a command line says, and what follows from it."""

    config: Config
    method: Any  # the module: init and update
    settings: Any  # the method's Config, sizes filled in
    mesh: jax.sharding.Mesh  # the devices
    tokenizer: Tokenizer
    parameters: int  # how many the model has
    values: dict  # of every flag

    @property
    def inner_tokens(self):
        """Tokens in an inner batch."""
        return self.config.inner_batch * self.settings.network.context

    @property
    def warmup_batches(self):
        """Inner batches that the warm-up reads, one a step."""
        return round(self.config.warmup_fraction * self.config.tokens / self.inner_tokens)

    @property
    def step_batches(self):
        """Inner batches that an outer step reads, line search included."""
        return self.settings.inner_steps + self.settings.fresh_batches

    @property
    def batches(self):
        """Inner batches that the whole run reads."""
        return self.warmup_batches + self.config.steps * self.step_batches


# ---- the command line ----------------------------------------------------------------------------------------------


def parse(argv):
    """The command line as {flag: value}, defaults filled in. Raises ValueError for what is not valid."""
    method = flags.peek(argv, "method", Config.method, METHODS)
    preset = flags.peek(argv, "model", Config.model, model.PRESETS)
    fields = flags.fields_of(Config) | flags.fields_of(METHODS[method][1], DERIVED) | flags.fields_of(model.Config)
    values = {name: default for name, (_, default, _) in fields.items()} | dataclasses.asdict(model.PRESETS[preset])
    values |= {**DEFAULTS[preset], **(tuned := TUNED.get((preset, method), {})), "vocab_size": 0}
    values["dtype"] = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    given = flags.parse(argv, fields, values, __doc__)
    if "tokens" in given:
        values["steps"] = None
    if {"schedule", "line_search"} & given.keys():  # what goes with the tuned ones goes with them
        values |= {name: fields[name][1] for name in ("warmup", "average") if name in tuned}
    return values | given


def configure(argv, home=None):
    """The Run of a command line, sizes worked out; in a folder in `home`, if given, whose name is made of the settings.

    Raises ValueError for what is not valid; writes nothing.
    """
    values = parse(argv)
    pick = lambda cls: {name: values[name] for name in flags.fields_of(cls, DERIVED if cls is not Config else ())}
    config = Config(**pick(Config))
    ids = tokenizer(config.tokenizer, values["vocab_size"])
    network = model.Config(**pick(model.Config) | {"vocab_size": ids.vocab_size})
    network.check()
    if config.batch < network.context:
        raise ValueError(f"batch is {config.batch} tokens, fewer than one sequence of context {network.context}")
    parameters = model.size(network)
    tokens = config.tokens or 20 * parameters
    inner_tokens = config.inner_batch * network.context
    inner_steps = max(1, round(config.batch / inner_tokens))
    batch = inner_steps * inner_tokens
    steps = config.steps or max(1, round(tokens / batch))
    method, cls = METHODS[config.method]
    searches = {"inner_tokens": inner_tokens} if issubclass(cls, gn.LineSearch) else {}
    settings = cls(network, inner_steps, steps, **searches, **pick(cls))
    settings.check()
    values |= {"vocab_size": ids.vocab_size, "batch": batch, "tokens": tokens, "steps": steps, "out": None}
    values["eval_every"] = config.eval_every or max(1, config.eval_tokens // batch)
    values |= {name: getattr(settings, name) for name in pick(cls)}
    digest = files.digest(values, checkpoint.code())[:6]
    name = f"{config.method}-{config.model}-{batch}-lr{getattr(settings, 'lr', '')}-seed{config.seed}-{digest}"
    values["out"] = f"{home or 'runs'}/{name}" if home or not config.out else config.out
    mesh = parallel.mesh(config.inner_batch, config.shard)
    run = Run(Config(**pick(Config)), method, settings, mesh, ids, parameters, values)
    if run.batches >= 2**31:
        raise ValueError(f"the run reads {run.batches} inner batches; they must be below 2^31: raise --inner-batch")
    return run


# ---- training ------------------------------------------------------------------------------------------------------


def warm_up(run, live):
    """(θ_0, last loss): AdamW, one inner batch a step, on the first tokens; made once for all runs that share it.

    One that is stopped or lost goes on like any part of a run. Raises FloatingPointError where the loss is not finite.
    """
    config, network, steps = run.config, run.settings.network, run.warmup_batches
    made = {"params": model.init(network, jax.random.key(config.seed)), "loss": jnp.full((), jnp.nan)}
    made = parallel.put(run.mesh, made)
    if not steps:
        return made["params"], None
    settings = baselines.AdamW(network, 1, steps, lr=config.warmup_lr, schedule="constant", warmup=0.1)
    about = [jax.__version__, jax.devices()[0].device_kind, checkpoint.code(*WARMUP_CODE.split())]
    key = files.digest(repr(settings), config.inner_batch, config.seed, live.corpus.meta["sha256"], about)
    path, part = Path("data") / f"warmup-{key[:12]}.npz", Path(config.out) / "warmup.npz"
    if (found := earlier(run, path, made)) is None:
        state = parallel.jit(baselines.init, static_argnums=1)(made["params"], settings)
        state = (earlier(run, part, {key: state}) or {key: state})[key]  # by its key: one of other code is not taken
        live.write = lambda state: checkpoint.save(part, {key: state})
        with report.bar(live, "warm-up", steps, int(state.t)):
            for i in range(int(state.t), steps):
                state, metrics = baselines.update(state, live.read(i), None, settings, live.watch)
        live.state, found = None, {"params": state.params, "loss": metrics["train_loss"]}
        if not all(jnp.isfinite(a).all() for a in jax.tree.leaves(found)):
            checkpoint.remove(part)
            raise FloatingPointError("the warm-up diverged; try a smaller --warmup-lr")
        checkpoint.save(path, found)
    checkpoint.remove(part)
    return found["params"], found["loss"]


def earlier(run, path, like):
    """What an earlier run has left of a warm-up; None where there is none, or it is damaged, which is said."""
    found = None
    if path.exists():
        try:
            found = checkpoint.load(path, like)
        except ValueError as error:
            print(f"{error}; the warm-up is made again", file=sys.stderr)
    return None if parallel.largest(found is None) else parallel.put(run.mesh, found)


def evaluate(run, live, params):
    """Mean loss (nats a token) on held-out windows, the same ones at every step, for every seed and inner batch."""
    context, size = run.settings.network.context, run.config.inner_batch
    windows = max(1, min(run.config.eval_tokens // context, data.windows(live.corpus.val, context)))
    total = 0.0
    for i in range(0, windows, size):
        live.check()
        rows = data.sequences(live.corpus.val, context, 0, range(i, min(i + size, windows)))
        total += loss(run.settings.network, params, parallel.put(run.mesh, rows, parallel.rows)) * len(rows)
    return float(total) / windows


def log_row(run, live, params, t, metrics):
    """What log.jsonl holds of outer step t. Raises FloatingPointError where the validation loss is not finite."""
    value, meta = evaluate(run, live, params), live.corpus.meta
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss is {value} at outer step {t}; the last save is kept; try a smaller --lr")
    bits = value / math.log(2) * meta["val_tokens"] / meta["val_bytes"]
    tokens = (run.warmup_batches + t * run.step_batches) * run.inner_tokens
    row = {"step": t, "tokens": tokens, "tokens_line_search": t * run.settings.fresh_batches * run.inner_tokens}
    row |= {"train_loss": metrics.get("train_loss"), "val_loss": value, "val_bpb": bits}
    row |= {name: metrics.get(name) for name in ("lr", "alpha", "inner_loss", "seconds", "refused")}
    row["input_wait"] = live.ahead.waited
    row = {name: float(x) if isinstance(x, jax.Array) else x for name, x in row.items()}
    return {name: x if x is None or math.isfinite(x) else None for name, x in row.items()}


def train(run, state, rows, live):
    """From state, or the warm-up where it is None, to the last outer step or the target loss; the log's rows.

    Raises Stop where a signal came, having saved the newest state; FloatingPointError where a loss is not finite.
    """
    config, folder, metrics = run.config, Path(run.config.out), {}
    live.training, live.state, t = True, None, 0
    try:
        if state is None:
            start = time.perf_counter()
            params, metrics["train_loss"] = warm_up(run, live)
            metrics["seconds"] = time.perf_counter() - start
            state = parallel.jit(run.method.init, static_argnums=1)(params, run.settings)
        t0, live.write = int(state.t), partial(checkpoint.save_state, config.out)
        print(report.HEADER, *map(report.table_row, rows), sep="\n")
        with report.bar(live, config.method, config.steps * run.step_batches, t0 * run.step_batches):
            for t in range(t0, config.steps + 1):
                due = t % config.eval_every == 0 or t == config.steps
                if due and (not rows or rows[-1]["step"] < t):
                    rows.append(log_row(run, live, optimizers.weights(state), t, metrics))
                    checkpoint.write_log(folder, rows)
                    live.save(state)
                    live.ahead.waited, metrics = 0.0, {}
                    tqdm.write(report.table_row(rows[-1]))
                if t == config.steps or (config.target_loss and rows and rows[-1]["val_loss"] <= config.target_loss):
                    return rows
                state, new = outer_step(run, state, t, live)
                metrics = new | {name: new[name] + metrics.get(name, 0) for name in ("seconds", "refused")}
    except Stop:
        if live.state is not None:
            live.save(live.state)
        raise
    except FloatingPointError as error:
        checkpoint.write_log(folder, [*rows, {"step": t, "val_loss": None, "diverged": str(error)}])
        raise
    finally:
        live.training = False


def outer_step(run, state, t, live):
    """The state after outer step t of the method, and its metrics with the seconds it took."""
    start, first = time.perf_counter(), run.warmup_batches + t * run.step_batches
    batches, fresh = live.read(first), live.read(first + run.settings.inner_steps)
    with report.bar(live, f"step {t + 1}", run.step_batches):
        state, metrics = run.method.update(state, batches, fresh, run.settings, live.watch)
        jax.block_until_ready(state)
    return state, metrics | {"seconds": time.perf_counter() - start, "refused": int(metrics.get("alpha") == 0)}


def execute(run, corpus, live):
    """Starts a run or goes on with it; the rows of its log at the end."""
    config, init = run.config, lambda: run.method.init(model.init(run.settings.network, jax.random.key(0)), run.settings)
    state, rows = checkpoint.resume(config.out, init)
    batch = partial(data.batch, corpus.train, run.settings.network.context, config.inner_batch, config.seed)
    read = lambda index: parallel.put(run.mesh, batch(index), parallel.rows)
    live.run, live.corpus, live.ahead = run, corpus, data.Ahead(read, run.batches)
    live.saved, live.every = time.monotonic(), 60 * config.save_every
    parallel.wait()  # or another process would find the folder half made
    checkpoint.open_folder(config.out, run.values | {"out": None, "corpus": corpus.meta["sha256"]})
    report.opening(run, corpus)
    with jax.set_mesh(run.mesh):
        rows = train(run, parallel.put(run.mesh, state), rows, live)
    report.summary(run, rows)
    return rows


def execute_all(runs, corpora, live):
    """The runs one after another, and their table; of those that diverge that is said. True if not all did."""
    results = []
    for i, (run, corpus) in enumerate(zip(runs, corpora, strict=True)):
        if len(runs) > 1:
            print(f"\n---- run {i + 1} of {len(runs)}: {run.config.out}")
            jax.clear_caches()  # or the compiled programs of all runs stay, until a CPU process can map no more
        try:
            results.append(execute(run, corpus, live))
        except FloatingPointError as error:
            print(f"train.py: {error}", file=sys.stderr)
            results.append(None)
    if len(runs) > 1:
        report.grid(runs, results)
    return any(results)


def main(argv=None):
    """Runs the command line. Status, with one line said: 0; 2 bad input; 1 a failure; 128 + a signal that ended it."""
    live, handlers, runs, held = Live(None), {}, [], ExitStack()
    try:
        try:
            parallel.start()  # which sets a handler of its own
            checkpoint.keep_programs("data/compiled")
            handlers = {number: signal.signal(number, live.caught) for number in (signal.SIGINT, signal.SIGTERM)}
            lines = flags.expand(sys.argv[1:] if argv is None else argv)
            if (values := parse(lines[0]))["generate"] is not None:
                print(generate(values["out"], values["generate"], values["seed"]))
                return 0
            home = flags.peek(lines[0], "out", "runs") if len(lines) > 1 else None
            runs = list({run.values["out"]: run for run in (configure(line, home) for line in lines)}.values())
            for run in runs:
                checkpoint.check_folder(run.config.out, run.values | {"out": None})
            need = lambda r: r.inner_tokens * (r.warmup_batches + 2 * r.config.steps * r.settings.inner_steps)
            about = lambda r: (r.config.data, r.tokenizer, r.settings.network.context, need(r))  # the same for any method
            corpora = parallel.first(lambda: [data.prepare(*about(run)) for run in runs])
            for run, corpus in zip(runs, corpora, strict=True):
                held.enter_context(checkpoint.alone(run.config.out))
                said = run.values | {"out": None, "corpus": corpus.meta["sha256"]}
                checkpoint.check_folder(run.config.out, said)  # again: it is the only one now
        except ValueError as error:
            print(f"train.py: {error}", file=sys.stderr)
            return 2
        return 0 if execute_all(runs, corpora, live) else 1
    except OSError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        what = "lower --inner-batch or --head-chunk, or on several devices give --shard true"
        print(f"train.py: the device is out of memory; {what}", file=sys.stderr)
        return 1
    except Stop:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 128 + live.signal
    finally:
        held.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
