"""Trains a LLaMA: `python train.py --method gn --model tiny`. `--help` lists every flag.

The flags are the fields of three dataclasses: `Config` here, model.Config, and the method's own. A run is: tokenize
the corpus once; warm up with AdamW on the first 5% of the tokens, shared by all methods (Section 5); then outer steps
of the method, each evaluated on held-out text, logged and saved. Every batch is a function of seed and step, so a run
that is stopped and started again with the same command goes on as if nothing had happened.
"""

import dataclasses
import math
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

import baselines
import checkpoint
import data
import flags
import gn
import model

METHODS = {"gn": (gn, gn.Config), "adamw": (baselines, baselines.AdamW), "muon": (baselines, baselines.Muon)}
DERIVED = ("model", "inner_steps", "outer_steps")  # fields of a method's Config that are not flags


@dataclass(frozen=True)
class Config:
    """A run. None = the default of the model: see DEFAULTS."""

    method: str = "gn"  # gn | adamw | muon
    model: str = "45m"  # tiny | 45m | 150m: the preset of the network (Appendix E)
    data: str = None  # stdlib (the source of Python's standard library) or the path of a .txt file; c4 is to come
    tokenizer: str = None  # bytes; gpt2 is to come
    batch: int = None  # tokens in a batch, i.e. an outer step, line search not included; 400k, 1.2m, 40m are understood
    tokens: int = None  # tokens of the run, warm-up and line search not included; default 20 a parameter (Section 5)
    steps: int = None  # outer steps; default tokens / batch
    inner_batch: int = None  # sequences in an inner batch, b_inner (Section 5: 32 at 45m, 128 at 150m)
    eval_tokens: int = None  # held-out tokens that an evaluation reads, at most
    target_loss: float = None  # nats a token: stop at the first evaluation at or below it (Section 6.1.1)
    warmup_fraction: float = 0.05  # tokens of the AdamW warm-up, over --tokens (Section 5)
    warmup_lr: float = 0.002  # peak learning rate of the warm-up, after a linear rise over its first tenth
    seed: int = 0  # of the parameters and of the order of the data
    out: str = None  # folder of the run; default runs/ and a name made of the settings

    def __post_init__(self):
        for name in ("batch", "tokens", "steps", "inner_batch", "eval_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.warmup_fraction <= 1:
            raise ValueError(f"warmup_fraction is {self.warmup_fraction}; it must be between 0 and 1")
        for name in ("warmup_lr", "target_loss"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a positive number")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; it must be at least 0 and below 2^32")


TINY = {"data": "stdlib", "tokenizer": "bytes", "inner_batch": 8, "eval_tokens": 65_536}
PAPER = {"data": "c4", "tokenizer": "gpt2", "batch": 4_000_000, "eval_tokens": 10 * 128 * 1024}  # the paper: ten times
DEFAULTS = {  # of the flags, by model
    "tiny": {**TINY, "batch": 131_072, "steps": 10},  # half of 20 tokens a parameter, unless --tokens is given
    "45m": {**PAPER, "inner_batch": 32},
    "150m": {**PAPER, "inner_batch": 128},
}
TUNED = {  # of the flags, by model and method: the best of the grids in README.md
    ("tiny", "gn"): {"schedule": "global cosine"},
    ("tiny", "muon"): {"lr": 0.07, "schedule": "constant", "warmup": 0.3, "momentum": 0.9},
    ("tiny", "adamw"): {"lr": 0.01, "schedule": "constant", "warmup": 0.3},
}


class Run(NamedTuple):
    """Everything that a command line says, and what follows from it."""

    config: Config
    method: Any  # the module: init and update
    settings: Any  # the method's Config, sizes filled in
    tokenizer: data.Tokenizer
    parameters: int  # how many the model has
    values: dict  # of every flag

    @property
    def inner_tokens(self):
        """Tokens in an inner batch."""
        return self.config.inner_batch * self.settings.model.context

    @property
    def warmup_batches(self):
        """Inner batches that the warm-up reads, one a step."""
        return round(self.config.warmup_fraction * self.config.tokens / self.inner_tokens)

    @property
    def step_batches(self):
        """Inner batches that an outer step reads, line search included."""
        return self.settings.inner_steps + self.settings.fresh_batches


# ---- the command line ----------------------------------------------------------------------------------------------


def parse(argv):
    """The command line as {flag: value}, defaults filled in. Raises ValueError for what is not valid."""
    method = flags.peek(argv, "method", Config.method, METHODS)
    preset = flags.peek(argv, "model", Config.model, model.PRESETS)
    fields = flags.fields_of(Config) | flags.fields_of(METHODS[method][1], DERIVED) | flags.fields_of(model.Config)
    values = {name: default for name, (_, default, _) in fields.items()} | dataclasses.asdict(model.PRESETS[preset])
    values |= {**DEFAULTS[preset], **TUNED.get((preset, method), {}), "vocab_size": 0}
    given = flags.parse(argv, fields, values, __doc__.split("\n")[0])
    if "tokens" in given:
        values["steps"] = None
    return values | given


def configure(argv):
    """The Run of a command line, sizes worked out. Raises ValueError for what is not valid; writes nothing."""
    values = parse(argv)
    pick = lambda cls: {name: values[name] for name in flags.fields_of(cls, DERIVED if cls is not Config else ())}
    config = Config(**pick(Config))
    data.files(config.data)
    tokenizer = data.tokenizer(config.tokenizer, values["vocab_size"])
    network = model.Config(**pick(model.Config) | {"vocab_size": tokenizer.vocab_size})
    if config.batch < network.context:
        raise ValueError(f"batch is {config.batch} tokens, fewer than one sequence of context {network.context}")
    parameters = model.size(network)
    tokens = config.tokens or 20 * parameters
    inner_steps = max(1, round(config.batch / (config.inner_batch * network.context)))
    batch = inner_steps * config.inner_batch * network.context
    steps = config.steps or max(1, round(tokens / batch))
    method, cls = METHODS[config.method]
    settings = cls(network, inner_steps, steps, **pick(cls))
    values |= {"vocab_size": tokenizer.vocab_size, "batch": batch, "tokens": tokens, "steps": steps, "out": None}
    digest = checkpoint.digest(values, checkpoint.code())[:6]
    name = f"{config.method}-{config.model}-{batch}-lr{settings.lr}-seed{config.seed}-{digest}"
    values["out"] = config.out or f"runs/{name}"
    return Run(Config(**pick(Config)), method, settings, tokenizer, parameters, values)


# ---- training ------------------------------------------------------------------------------------------------------


class Stop(Exception):
    """A signal asked the run to end."""


class Live:
    """What goes on around a step: batches are read, bars move, the newest state is at hand, a signal ends it."""

    def __init__(self, run):
        self.run = run
        self.corpus = self.signal = self.state = None
        self.training, self.bars = False, []

    def caught(self, number, frame):
        """Signal handler. While training the run ends at the next `check`: raising here could hit JAX anywhere."""
        again, self.signal = self.signal, number
        if again or not self.training:
            raise Stop

    def check(self):
        """Raises Stop where a signal came."""
        if self.signal:
            raise Stop

    def read(self, first):
        """The function k -> training batch number first + k, int32 [B, T+1]."""

        def batch(k):
            self.check()
            for bar in self.bars:
                bar.update(self.run.inner_tokens)
            config, context = self.run.config, self.run.settings.model.context
            return data.batch(self.corpus.train, context, config.inner_batch, config.seed, first + k)

        return batch

    def watch(self, state):
        """Called with the state after each inner step; waits for the one before, so that just one is in flight."""
        if self.state is not None:
            jax.block_until_ready(self.state.k)
        self.state = state

    @contextmanager
    def bar(self, title, batches, done=0):
        """A bar over the tokens of so many inner batches, with tokens/s and time left."""
        inner = self.run.inner_tokens
        form = dict(unit="tok", unit_scale=True, leave=False, disable=None)
        with tqdm(total=batches * inner, initial=done * inner, desc=title, **form) as bar:
            self.bars.append(bar)
            try:
                yield
            finally:
                self.bars.remove(bar)


def warm_up(run, live):
    """(θ_0, last loss): AdamW, one inner batch a step, on the first tokens; made once for all runs that share it.

    Raises FloatingPointError where the loss is not finite.
    """
    config, network, steps = run.config, run.settings.model, run.warmup_batches
    made = {"params": model.init(network, jax.random.key(config.seed)), "loss": jnp.full((), jnp.nan)}
    if not steps:
        return made["params"], None
    settings = baselines.AdamW(network, 1, steps, lr=config.warmup_lr, schedule="constant", warmup=0.1)
    machine = [jax.__version__, jax.devices()[0].device_kind]
    code = checkpoint.code("model", "attention", "baselines", "data")
    key = checkpoint.digest(repr(settings), config.inner_batch, config.seed, live.corpus.meta["sha256"], machine, code)
    path = Path("data") / f"warmup-{key[:12]}.npz"
    if path.exists():
        try:
            made = checkpoint.load(path, made)
            return made["params"], made["loss"]
        except ValueError as error:
            print(f"{error}; the warm-up is made again", file=sys.stderr)
    state = baselines.init(made["params"], settings)
    with live.bar("warm-up", steps):
        for i in range(steps):
            state, metrics = baselines.update(state, live.read(i), None, settings, live.watch)
    made = {"params": state.params, "loss": metrics["train_loss"]}
    if not all(jnp.isfinite(a).all() for a in jax.tree.leaves(made)):
        raise FloatingPointError("the warm-up diverged; try a smaller --warmup-lr")
    checkpoint.save(path, made)
    return made["params"], made["loss"]


loss = jax.jit(model.loss, static_argnums=0)


def evaluate(run, live, params):
    """Mean loss (nats a token) on held-out windows, the same ones at every step, for every seed and inner batch."""
    context, size = run.settings.model.context, run.config.inner_batch
    windows = max(1, min(run.config.eval_tokens // context, data.windows(live.corpus.val, context)))
    total = 0.0
    for i in range(0, windows, size):
        live.check()
        rows = data.sequences(live.corpus.val, context, 0, range(i, min(i + size, windows)))
        total += loss(run.settings.model, params, rows) * len(rows)
    return float(total) / windows


def log_row(run, live, params, t, metrics):
    """What log.jsonl holds of outer step t. Raises FloatingPointError where the validation loss is not finite."""
    value, meta = evaluate(run, live, params), live.corpus.meta
    if not math.isfinite(value):
        kept = "the checkpoint before it is kept; try a smaller --lr"
        raise FloatingPointError(f"the loss is {value} at outer step {t}; {kept}")
    bits = value / math.log(2) * meta["val_tokens"] / meta["val_bytes"]
    tokens = (run.warmup_batches + t * run.step_batches) * run.inner_tokens
    row = {"step": t, "tokens": tokens, "tokens_line_search": t * run.settings.fresh_batches * run.inner_tokens}
    row |= {"train_loss": metrics.get("train_loss"), "val_loss": value, "val_bpb": bits}
    row |= {name: metrics.get(name) for name in ("lr", "alpha", "inner_loss", "seconds")}
    row = {name: float(x) if isinstance(x, jax.Array) else x for name, x in row.items()}
    return {name: x if x is None or math.isfinite(x) else None for name, x in row.items()}


def train(run, state, rows, live):
    """From state, or the warm-up where it is None, to the last outer step or the target loss; the log's rows.

    Raises Stop where a signal came, after saving the newest state.
    """
    config, folder, metrics = run.config, Path(run.config.out), {}
    live.training = True
    if state is None:
        start = time.perf_counter()
        params, metrics["train_loss"] = warm_up(run, live)
        metrics["seconds"] = time.perf_counter() - start
        state = run.method.init(params, run.settings)
    live.state, t0 = None, int(state.t)
    print(HEADER, *map(table_row, rows), sep="\n")
    try:
        with live.bar(config.method, config.steps * run.step_batches, t0 * run.step_batches):
            for t in range(t0, config.steps + 1):
                if not rows or rows[-1]["step"] < t:
                    rows.append(log_row(run, live, state.params, t, metrics))
                    checkpoint.write_log(folder, rows)
                    checkpoint.save(folder / "checkpoint.npz", state)
                    live.state = None
                    tqdm.write(table_row(rows[-1]))
                if t == config.steps or (config.target_loss and rows[-1]["val_loss"] <= config.target_loss):
                    return rows
                state, metrics = outer_step(run, state, t, live)
    except Stop:
        if live.state is not None:
            checkpoint.save(folder / "checkpoint.npz", live.state)
        raise


def outer_step(run, state, t, live):
    """The state after outer step t of the method, and its metrics with the seconds it took."""
    start, first = time.perf_counter(), run.warmup_batches + t * run.step_batches
    batches, fresh = live.read(first), live.read(first + run.settings.inner_steps)
    with live.bar(f"step {t + 1}", run.step_batches):
        state, metrics = run.method.update(state, batches, fresh, run.settings, live.watch)
        jax.block_until_ready(state)
    return state, metrics | {"seconds": time.perf_counter() - start}


def resume(run):
    """The state and the log's rows that the run's folder holds, or None and []. Raises ValueError where damaged."""
    path = Path(run.config.out) / "checkpoint.npz"
    if not path.exists():
        return None, []
    init = lambda: run.method.init(model.init(run.settings.model, jax.random.key(0)), run.settings)
    state = checkpoint.load(path, jax.eval_shape(init))
    return state, [row for row in checkpoint.read_log(path.parent) if row["step"] <= int(state.t)]


# ---- what is printed -----------------------------------------------------------------------------------------------

COLUMNS = {"step": (5, "d"), "tokens": (13, ",d"), "train_loss": (11, ".4f"), "val_loss": (9, ".4f")}  # width, format
COLUMNS |= {"val_bpb": (8, ".4f"), "lr": (9, ".2g"), "alpha": (6, ".3f"), "seconds": (8, ".1f")}
HEADER = " ".join(f"{name:>{width}}" for name, (width, _) in COLUMNS.items())


def table_row(row):
    """A row of the table; - where the method has no such number."""
    cells = ("-" if row[name] is None else format(row[name], form) for name, (_, form) in COLUMNS.items())
    return " ".join(cell.rjust(width) for cell, (width, _) in zip(cells, COLUMNS.values(), strict=True))


def report(run, corpus):
    """Says what is about to run."""
    config, network = run.config, run.settings.model
    print(" ".join(f"{name}={value}" for name, value in run.values.items()))
    device = jax.devices()[0].device_kind
    tokens = corpus.meta["train_tokens"]
    inner = f"{run.settings.inner_steps} x {config.inner_batch} x {network.context}"
    print(f"{run.parameters:,} parameters on {device}; {tokens:,} training tokens in {config.data}")
    print(f"{config.steps} outer steps of {config.batch:,} tokens: {inner} (inner batches, sequences, positions)")
    batches = run.warmup_batches + config.steps * run.step_batches
    epochs = batches * config.inner_batch / data.windows(corpus.train, network.context)
    if epochs > 1:
        print(f"the run reads {batches * run.inner_tokens:,} tokens: the corpus {epochs:.1f} times")


def summary(run, rows):
    """Says what the run came to."""
    last, seconds = rows[-1], sum(row["seconds"] or 0 for row in rows)
    loss, bits, tokens, search = (last[name] for name in ("val_loss", "val_bpb", "tokens", "tokens_line_search"))
    print(f"validation loss {loss:.4f}, {bits:.4f} bits a byte, after {last['step']} outer steps")
    print(f"{tokens:,} tokens, {search:,} of them for line search; {seconds:.0f} s, evaluation not included")
    refused = sum(row["alpha"] == 0 for row in rows)
    if refused:
        print(f"{refused} steps were refused, as no step size lowered the loss: try a smaller --lr")
    if run.config.target_loss:
        reached = "reached" if last["val_loss"] <= run.config.target_loss else "not reached"
        print(f"target loss {run.config.target_loss} {reached}")
    print(f"{run.config.out}: config.json, log.jsonl, checkpoint.npz")


def main(argv=None):
    """Runs the command line. Exit status: 0; 2 for bad input; 1 for a failure; 128 + a signal that ended it.

    No traceback for any of these: one line on standard error.
    """
    live, handlers = Live(None), {}
    try:
        handlers = {number: signal.signal(number, live.caught) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            run = live.run = configure(sys.argv[1:] if argv is None else argv)
            folder, about = Path(run.config.out), run.values | {"out": None}
            checkpoint.check_folder(folder, about)
            corpus = live.corpus = data.prepare(run.config.data, run.tokenizer, run.settings.model.context)
            state, rows = resume(run)
            checkpoint.open_folder(folder, about | {"corpus": corpus.meta["sha256"]})
        except ValueError as error:
            print(f"train.py: {error}", file=sys.stderr)
            return 2
        report(run, corpus)
        summary(run, train(run, state, rows, live))
    except (FloatingPointError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except Stop:
        kept = live.run and (Path(live.run.config.out) / "checkpoint.npz").exists()
        print("stopped;", "the same command goes on from here" if kept else "nothing to save yet", file=sys.stderr)
        return 128 + live.signal
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
