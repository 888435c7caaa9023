"""Trains a LLaMA: `python train.py --method gn --model tiny`. `--help` lists every flag.

The flags are the fields of three dataclasses: `Config` here, model.Config, and the method's own. A run is: tokenize
the corpus once; warm up with AdamW on the first 5% of the tokens, shared by all methods (Section 5); then outer steps
of the method, each evaluated on held-out text, logged and saved. Every batch is a function of seed and step, so a run
that is stopped and started again with the same command goes on as if nothing had happened.
"""

import argparse
import dataclasses
import hashlib
import inspect
import json
import math
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

import baselines
import checkpoint
import data
import gn
import model

METHODS = {"gn": (gn, gn.Config), "adamw": (baselines, baselines.AdamW), "muon": (baselines, baselines.Muon)}
DERIVED = ("model", "inner_steps", "outer_steps")  # fields of a method's Config that are not flags


@dataclass(frozen=True)
class Config:
    """A run. None = the default of the model: see DEFAULTS."""

    method: str = "gn"  # gn | adamw | muon
    model: str = "45m"  # tiny | 45m | 150m: the preset of the network (Appendix D)
    data: str = None  # stdlib (the Python standard library's source), c4, or the path of a .txt file
    tokenizer: str = None  # bytes | gpt2
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
        if not 0 < self.warmup_lr < math.inf:
            raise ValueError(f"warmup_lr is {self.warmup_lr}; it must be a positive number")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0")


PAPER = {"data": "c4", "tokenizer": "gpt2", "batch": 4_000_000, "eval_tokens": 100 * 128 * 1024}
DEFAULTS = {  # of the flags, by model
    "tiny": {"data": "stdlib", "tokenizer": "bytes", "batch": 32_768, "inner_batch": 8, "eval_tokens": 131_072},
    "45m": {**PAPER, "inner_batch": 32},
    "150m": {**PAPER, "inner_batch": 128},
}


class Run(NamedTuple):
    """Everything that a command line says, and what follows from it."""

    config: Config
    method: Any  # the module: init and update
    settings: Any  # the method's Config, sizes filled in
    tokenizer: data.Tokenizer
    parameters: int  # how many the model has
    flags: dict  # every flag and its value

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


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, through ValueError."""

    def error(self, message):
        raise ValueError(message)


def flags_of(cls):
    """The fields of a dataclass that are flags, each with its comment, which is its help."""
    comments = dict(re.findall(r"^    (\w+): .*?#\s*(.*)$", inspect.getsource(cls), re.M))
    derived = DERIVED if cls is not Config else ()
    return {f.name: (f, comments.get(f.name, "")) for f in dataclasses.fields(cls) if f.name not in derived}


def count(text):
    """A whole number, with or without a suffix: 400k, 1.2m, 3b."""
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([kmb]?)", text.strip().lower().replace("_", "").replace(",", ""))
    if not match:
        raise ValueError(text)
    value = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[match[2]]
    if abs(value - round(value)) > 1e-6:
        raise ValueError(text)
    return round(value)


def boolean(text):
    return {"true": True, "false": False}[text.lower()]


KINDS = {  # of flags: how a text becomes a value, and what to say where it does not
    int: (count, "a whole number such as 32, 400k or 1.2m"),
    float: (float, "a number"),
    bool: (boolean, "true or false"),
    str: (str, "a text"),
}


def parse(argv):
    """The command line as {flag: value}, defaults filled in. Raises ValueError for what is not valid."""
    first = Parser(add_help=False, allow_abbrev=False)
    for name in ("method", "model"):
        first.add_argument(f"--{name}", default=getattr(Config, name))
    known = first.parse_known_args(argv)[0]
    for name, valid in (("method", METHODS), ("model", model.PRESETS)):
        if getattr(known, name) not in valid:
            raise ValueError(f"{name} is {getattr(known, name)!r}; valid: {', '.join(valid)}")
    fields = {**flags_of(Config), **flags_of(METHODS[known.method][1]), **flags_of(model.Config)}
    preset = dataclasses.asdict(model.PRESETS[known.model])
    defaults = {name: preset.get(name, field.default) for name, (field, _) in fields.items()}
    defaults |= {**DEFAULTS[known.model], "vocab_size": 0}
    parser = Parser(prog="train.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    flag = lambda name: "--" + name.replace("_", "-")
    for name, (field, comment) in fields.items():
        shown = "" if defaults[name] is None else f" [default {defaults[name]}]"
        parser.add_argument(flag(name), metavar=field.type.__name__, help=(comment + shown).replace("%", "%%"))
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        valid = ", ".join(map(flag, fields))
        raise ValueError(f"unknown flag {unknown[0]}; valid with --method {known.method}: {valid}")
    for name, text in vars(given).items():
        if text is not None:
            convert, what = KINDS[fields[name][0].type]
            try:
                defaults[name] = convert(text)
            except (ValueError, KeyError, OverflowError):
                raise ValueError(f"{flag(name)} is {text!r}; it must be {what}") from None
    return defaults


def configure(argv):
    """The Run of a command line, sizes worked out. Raises ValueError for what is not valid; writes nothing."""
    flags = parse(argv)
    pick = lambda cls: {name: flags[name] for name in flags_of(cls)}
    config = Config(**pick(Config))
    data.files(config.data)
    tokenizer = data.tokenizer(config.tokenizer, flags["vocab_size"])
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
    flags |= {"vocab_size": tokenizer.vocab_size, "batch": batch, "tokens": tokens, "steps": steps, "out": None}
    digest = hashlib.sha256(json.dumps(flags).encode()).hexdigest()[:6]
    name = f"{config.method}-{config.model}-{batch}-lr{settings.lr}-seed{config.seed}-{digest}"
    flags["out"] = config.out or f"runs/{name}"
    return Run(Config(**pick(Config)), method, settings, tokenizer, parameters, flags)


# ---- training ------------------------------------------------------------------------------------------------------


class Stop(Exception):
    """A signal asked the run to end."""


class Live:
    """What goes on around a step: batches are read, bars move, the newest state is at hand, a signal ends it."""

    def __init__(self, run, corpus):
        self.run, self.corpus = run, corpus
        self.signal = self.state = self.bar = None

    def caught(self, number, frame):
        """Signal handler: the first signal ends the run after the inner step at hand, a second one at once."""
        if self.signal:
            sys.exit(128 + number)
        self.signal = number

    def read(self, first):
        """The function k -> training batch number first + k, int32 [B, T+1]."""

        def batch(k):
            if self.signal:
                raise Stop
            self.bar.update(self.run.inner_tokens)
            config, context = self.run.config, self.run.settings.model.context
            return data.batch(self.corpus.train, context, config.inner_batch, config.seed, first + k)

        return batch

    def watch(self, state):
        """Called with the state after each inner step; waits for the one before, so that just one is in flight."""
        if self.state is not None:
            jax.block_until_ready(self.state.k)
        self.state = state

    def tokens(self, title, batches):
        """Starts a bar over the tokens of so many inner batches, with tokens/s and time left."""
        self.state = None
        total = batches * self.run.inner_tokens
        self.bar = tqdm(total=total, desc=title, unit="tok", unit_scale=True, leave=False, disable=None)
        return self.bar


def warm_up(run, live):
    """(θ_0, last loss): AdamW, one inner batch a step, on the first tokens; made once for all runs that share it."""
    config, network, steps = run.config, run.settings.model, run.warmup_batches
    made = {"params": model.init(network, jax.random.key(config.seed)), "loss": jnp.full((), jnp.nan)}
    if not steps:
        return made["params"], None
    settings = baselines.AdamW(network, 1, steps, lr=config.warmup_lr, schedule="constant", warmup=0.1)
    code = [(Path(__file__).parent / f"{name}.py").read_text() for name in ("model", "attention", "baselines", "data")]
    machine = [jax.__version__, jax.devices()[0].device_kind]
    what = [repr(settings), config.inner_batch, config.seed, live.corpus.meta["sha256"], code, machine]
    path = Path("data") / f"warmup-{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]}.npz"
    if path.exists():
        try:
            made = checkpoint.load(path, made)
            return made["params"], made["loss"]
        except ValueError as error:
            print(f"{error}; the warm-up is made again", file=sys.stderr)
    state = baselines.init(made["params"], settings)
    with live.tokens("warm-up", steps):
        for i in range(steps):
            state, metrics = baselines.update(state, live.read(i), None, settings, live.watch)
    checkpoint.save(path, {"params": state.params, "loss": metrics["train_loss"]})
    return state.params, metrics["train_loss"]


loss = jax.jit(model.loss, static_argnums=0)


def evaluate(run, corpus, params):
    """Mean loss (nats a token) on held-out windows, the same ones at every step and for every seed."""
    network = run.settings.model
    windows = data.windows(corpus.val, network.context)
    size = min(run.config.inner_batch, windows)
    count = max(1, min(run.config.eval_tokens // network.context, windows) // size)
    total = sum(loss(network, params, data.batch(corpus.val, network.context, size, 0, i)) for i in range(count))
    return float(total) / count


def log_row(run, corpus, params, t, metrics):
    """What log.jsonl holds of outer step t. Raises FloatingPointError where the loss is not finite."""
    value = evaluate(run, corpus, params)
    if not math.isfinite(value):
        kept = "the checkpoint before it is kept; try a smaller --lr"
        raise FloatingPointError(f"the loss is {value} at outer step {t}; {kept}")
    bits = value / math.log(2) * corpus.meta["val_tokens"] / corpus.meta["val_bytes"]
    tokens = (run.warmup_batches + t * run.step_batches) * run.inner_tokens
    row = {"step": t, "tokens": tokens, "tokens_line_search": t * run.settings.fresh_batches * run.inner_tokens}
    row |= {"train_loss": metrics.get("train_loss"), "val_loss": value, "val_bpb": bits}
    row |= {name: metrics.get(name) for name in ("lr", "alpha", "inner_loss", "seconds")}
    return {name: float(x) if isinstance(x, jax.Array) else x for name, x in row.items()}


def train(run, corpus, live):
    """From the newest checkpoint, or the warm-up, to the last outer step or the target loss; returns the log's rows."""
    config, settings, folder = run.config, run.settings, Path(run.config.out)
    start = time.perf_counter()
    params, warm_loss = warm_up(run, live)
    metrics = {"train_loss": warm_loss, "seconds": time.perf_counter() - start}
    state = run.method.init(params, settings)
    if (folder / "checkpoint.npz").exists():
        state = checkpoint.load(folder / "checkpoint.npz", state)
    rows = [row for row in checkpoint.read_log(folder) if row["step"] <= int(state.t)]
    print(HEADER, *map(table_row, rows), sep="\n")
    outer_bar = tqdm(total=config.steps, initial=int(state.t), desc=config.method, unit="step", disable=None)
    for t in range(int(state.t), config.steps + 1):
        if not rows or rows[-1]["step"] < t:
            rows.append(log_row(run, corpus, state.params, t, metrics))
            checkpoint.write_log(folder, rows)
            checkpoint.save(folder / "checkpoint.npz", state)
            tqdm.write(table_row(rows[-1]))
        if t == config.steps or (config.target_loss and rows[-1]["val_loss"] <= config.target_loss):
            break
        start, first = time.perf_counter(), run.warmup_batches + t * run.step_batches
        try:
            with live.tokens(f"step {t + 1}", run.step_batches):
                batches, fresh = live.read(first), live.read(first + settings.inner_steps)
                state, metrics = run.method.update(state, batches, fresh, settings, live.watch)
                jax.block_until_ready(state)
        except Stop:
            if live.state is not None:
                checkpoint.save(folder / "checkpoint.npz", live.state)
            raise
        metrics["seconds"] = time.perf_counter() - start
        outer_bar.update()
    outer_bar.close()
    return rows


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
    print(" ".join(f"{name}={value}" for name, value in run.flags.items()))
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
    old = {}
    try:
        run = configure(sys.argv[1:] if argv is None else argv)
        corpus = data.prepare(run.config.data, run.tokenizer, run.settings.model.context)
        live = Live(run, corpus)
        old = {number: signal.signal(number, live.caught) for number in (signal.SIGINT, signal.SIGTERM)}
        checkpoint.open_folder(run.config.out, run.flags | {"out": None, "corpus": corpus.meta["sha256"]})
        report(run, corpus)
        summary(run, train(run, corpus, live))
    except ValueError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except (FloatingPointError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except Stop:
        print(f"stopped; the same command goes on from what {run.config.out} holds", file=sys.stderr)
        return 128 + live.signal
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
