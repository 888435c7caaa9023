"""What a run is made of: its method, its flags with their defaults, and the sizes that follow.

`configure_grid` makes Runs of the words of a command line, and train.py trains them. The flags are
the fields of three dataclasses: Config in this file, model.Config, and the Config of the method.
Their defaults depend on the model, and on what was found to be good for the method there.

An outer step, which is one update of a method, reads a batch. People give its size in tokens. It is
cut into whole inner batches, which are what the model computes on: --inner-batch sequences of
--context tokens each.

To add a method, add its file to METHODS.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

import baselines
import gn
import gn_cg
import gn_prox
import layerwise_gn
import model
from kernels import choice
from runtime import files, flags, parallel
from text.tokenizer import Tokenizer, tokenizer

# ---- methods, flags and their defaults -----------------------------------------------------------


class Method(NamedTuple):
    """A way to train, such as the one that README.md adds.

    Its module has init(params, config), which returns the first State, and update(state, batches,
    fresh, config, watch), which takes an outer step as gn.update does. Its Config is a frozen
    dataclass under @flags.traced, with `inner_steps` and `outer_steps`, which are filled in, and
    `fresh_batches`, which says how many inner batches a line search may read. Its State has
    `params`; `average`, the weights to evaluate in place of these, or None; and `t` and `k`, how
    many outer and inner steps are done.

    A method may have more. In its module, `lower` returns its largest program before it is
    compiled, so that memory can be planned. In its Config, `check` raises ValueError for a bad
    value, `depends_on_length` says whether the learning rate depends on the length of the run,
    `loop_steps` how many inner batches a step reads if it reads some again, and `micro_batch` is
    filled in. In its State,
    `searched` counts the inner batches that line searches have read.
    """

    module: Any  # its file
    Config: type  # its settings
    title: str


METHODS = {
    "gn": Method(gn, gn.Config, "Gauss-Newton"),
    "gn_prox": Method(gn_prox, gn_prox.Config, "GN-prox-linear"),
    "layerwise_gn": Method(layerwise_gn, layerwise_gn.Config, "layerwise GN"),
    "gn_cg": Method(gn_cg, gn_cg.Config, "Gauss-Newton by CG"),
    "adamw": Method(baselines, baselines.AdamW, "AdamW"),
    "muon": Method(baselines, baselines.Muon, "Muon"),
    "soap": Method(baselines, baselines.SOAP, "SOAP"),
}

# The fields of a method's Config that are no flags. `configure_method` fills them in, but for
# `model`, the module with the functions of the network, which keeps its default.
DERIVED = ("model", "network", "inner_steps", "outer_steps", "inner_tokens", "micro_batch")


@dataclass(frozen=True)
class Config:
    """A run. The defaults that go with a model are in DEFAULTS; others are worked out."""

    # the method that trains
    method: str = "gn"
    # the network and the defaults that go with it (Appendix E)
    model: str = "45m"
    # c4 (streamed) | stdlib (Python's own source) | a file or folder of .txt .jsonl .json .parquet,
    # or the first three with .gz
    data: str = None
    # bytes | gpt2 (cut to --vocab-size ids; 0 = 32000, Section 5) | t5 (the paper's authors') | the
    # path of a .json file of the package tokenizers
    tokenizer: str = None
    # tokens in a batch, which an outer step reads; line search not included (Appendix H: 400k to
    # 120m)
    batch: int = None
    # tokens of the run, warm-up and line search not included; where --steps is given, that counts.
    # About 20 per parameter, as at 45m (Appendix G) and at 150m (Section 6.1.2)
    tokens: int = None
    # outer steps; where it is not given, tokens / batch. With --target-loss and neither --steps nor
    # --tokens, a run ends at the target only; its learning rate must not depend on the length then
    steps: int = None
    # sequences in an inner batch, b_inner (Section 5: 32 at 45m, 128 at 150m)
    inner_batch: int = None
    # sequences of it that a device computes on at once, at most; default: as many as its memory
    # holds. It changes no result, but for rounding
    micro_batch: int = None
    eval_tokens: int = None  # held-out tokens that an evaluation reads, at most
    # outer steps from one evaluation and save to the next; default: --eval-tokens / batch, but at
    # least 1
    eval_every: int = None
    save_every: float = 10.0  # minutes from one save to the next at most, also inside outer steps
    # nats per token: stop at the first evaluation at or below this loss (Section 6.1.1)
    target_loss: float = None
    # tokens of the AdamW warm-up; 0 = none; default: one per parameter, which is 5% of the 20 per
    # parameter of a compute-optimal run (Section 5), however long this run is
    warmup_tokens: int = None
    # peak learning rate of the warm-up, after a linear rise over its first tenth
    warmup_lr: float = 0.002
    # true = spread matrices, optimizer state and gradient over the devices, to save memory
    shard: bool = False
    seed: int = 0  # of the parameters and of the order of the data
    # folder of the run, or of a grid's runs; default: runs/ and a name made of the flags
    out: str = None

    def check(self):
        """Raises ValueError if a field has a bad value."""
        counts = ("batch", "tokens", "steps", "inner_batch", "eval_tokens", "eval_every")
        flags.check_range(self, (*counts, "micro_batch"), least=1)
        flags.check_range(self, ("warmup_lr", "target_loss", "save_every"), above=0)
        flags.check_range(self, ("warmup_tokens",), least=0)
        flags.check_range(self, ("seed",), least=0, below=2**32)


PAPER = {
    "data": "c4",
    "tokenizer": "gpt2",
    "batch": 4_000_000,
    "eval_tokens": 1_310_720,  # a tenth of the paper's
}
LAPTOP = {
    "data": "stdlib",
    "tokenizer": "bytes",
    "batch": 131_072,
    "eval_tokens": 65_536,
    "steps": 10,  # 1.3m tokens, 10 per parameter: half of what the other models get
}
DEFAULTS = {  # of flags, for each model; each has either steps or tokens
    "tiny": LAPTOP | {"inner_batch": 8},
    "5m": PAPER | {"inner_batch": 32, "tokens": 100_000_000},
    "45m": PAPER | {"inner_batch": 32, "tokens": 900_000_000},
    "150m": PAPER | {"inner_batch": 128, "tokens": 3_000_000_000},
}
# Of flags, for each model and method: what the grids in docs/tuning.md have shown to be better than
# the general defaults. Warm-ups are numbers of steps: as fractions of a short run, they would let
# the learning rate rise too fast.
TUNED = {
    "5m": {
        "gn_prox": {"average": 0.99},
        "adamw": {"lr": 0.001, "schedule": "constant", "warmup_steps": 5},
        "muon": {"lr": 0.02, "schedule": "constant", "warmup_steps": 5, "average": 0.4},
        "soap": {"lr": 0.005, "schedule": "constant", "warmup_steps": 5, "average": 0.4},
    },
    "tiny": {
        "gn": {"lr": 0.02, "schedule": "global cosine"},
        "gn_prox": {"lr": 0.015, "average": 0.99},
        "layerwise_gn": {"lr": 0.03, "schedule": "global cosine"},
        "adamw": {
            "lr": 0.015,
            "schedule": "constant",
            "warmup_steps": 10,
            "b2": 0.99,
            "average": 0.3,
        },
        "muon": {
            "lr": 0.06,
            "schedule": "constant",
            "warmup_steps": 6,
            "momentum": 0.9,
            "average": 0.4,
        },
        "soap": {
            "lr": 0.03,
            "schedule": "constant",
            "warmup_steps": 10,
            "b2": 0.7,
            "average": 0.3,
        },
    },
}


# ---- a run ---------------------------------------------------------------------------------------

# The largest int32. A run counts its inner batches in int32, so it has at most so many. A run that
# has no length, as it ends at its target, tells its method that it has so many outer steps.
NO_END = 2**31 - 1

HOME = "runs"  # the folder in which a run has one of its own, where --out is not given


class Run(NamedTuple):
    """Everything that a command line says, and what follows from it."""

    config: Config  # sizes filled in, but for micro_batch, which train.py finds for `settings`
    method: Method
    settings: Any  # the Config of the method
    network: model.Config
    mesh: jax.sharding.Mesh  # the devices
    tokenizer: Tokenizer
    parameters: int  # how many the network has
    values: dict  # {flag: value} of all flags, those that were worked out, too
    given: dict  # {flag: value} of those on the command line, but for the folder
    length_reason: str | None  # why its learning rate depends on its length: "--warmup 0.2"

    @property
    def inner_tokens(self):
        """Tokens in an inner batch."""
        return self.config.inner_batch * self.network.context

    @property
    def warmup_batches(self):
        """Inner batches that the warm-up reads, one per step."""
        return self.config.warmup_tokens // self.inner_tokens

    @property
    def batches_per_step(self):
        """Different inner batches that an outer step has: its batch and those for line search.

        The next step begins behind them, even if the line search reads fewer.
        """
        return self.settings.inner_steps + self.settings.fresh_batches

    @property
    def micro_batch(self):
        """Sequences that a device computes on at once, at most; 0 = all that it has."""
        return getattr(self.settings, "micro_batch", 0)

    @property
    def reads_per_step(self):
        """Inner batches that an outer step reads at most, counted anew in each pass."""
        loop_steps = getattr(self.settings, "loop_steps", self.settings.inner_steps)
        return loop_steps + self.settings.fresh_batches

    @property
    def last_step(self):
        """Outer steps at most: --steps, or as many as 2^31 - 1 inner batches are enough for."""
        if self.config.steps is not None:
            return self.config.steps
        return max(1, (NO_END - self.warmup_batches) // self.batches_per_step)

    @property
    def total_batches(self):
        """Inner batches that the whole run reads at most."""
        return self.warmup_batches + self.last_step * self.batches_per_step


# ---- from the words of a command line to a run ---------------------------------------------------


def configure_grid(argv, about=""):
    """The runs of a command line, which is a grid if a flag has commas. Raises ValueError.

    about: what --help says before it lists the flags.
    """
    lines = flags.expand(argv)
    home = None
    if len(lines) > 1:
        home = flags.peek(lines[0], "out", HOME)
    return in_order([configure(line, home, about) for line in lines])


def in_order(runs):
    """The runs in the order in which they are trained, each of them once.

    Runs of one folder are one run at several lengths. They follow one another, the shortest first,
    so that each finds what the one before it has trained.
    """
    by_folder = {}
    for run in runs:
        by_length = by_folder.setdefault(run.config.out, {})
        by_length[run.last_step] = run
    ordered = []
    for by_length in by_folder.values():
        ordered += [by_length[length] for length in sorted(by_length)]
    return ordered


def configure(argv, home=None, about=""):
    """The Run of a command line, all sizes worked out. Writes nothing. Raises ValueError.

    home: a folder; if it is given, the run's folder is in it and has a name made of the flags.
    about: what --help says before it lists the flags.
    """
    values, given = parse(argv, about)
    config = Config(**pick(values, Config))
    config.check()

    chosen = tokenizer(config.tokenizer, values["vocab_size"])
    values["vocab_size"] = chosen.vocab_size
    config = replace(config, tokenizer=chosen.flag)  # a file with its digest, which sample.py needs
    network = model.Config(**pick(values, model.Config))
    network.check()
    parameters = model.size(network)
    config = work_out(config, network, parameters)

    method = METHODS[config.method]
    settings = configure_method(method.Config, config, network, values)
    length_reason = why_length_counts(settings)
    if config.steps is None and length_reason:
        reason = f"the learning rate depends on the length of the run ({length_reason})"
        raise ValueError(f"--target-loss needs --steps or --tokens beside it, as {reason}")
    values |= flags.values_of(config)
    values |= flags.values_of(settings, DERIVED)

    if home or not config.out:
        config = replace(config, out=f"{home or HOME}/{name_of(values, length_reason)}")
    values["out"] = config.out

    run = Run(
        config=config,
        method=method,
        settings=settings,
        network=network,
        mesh=parallel.mesh(config.inner_batch, config.shard),
        tokenizer=chosen,
        parameters=parameters,
        values=values,
        given={name: value for name, value in given.items() if name != "out"},
        length_reason=length_reason,
    )
    if run.total_batches > NO_END:
        required = "they must be below 2^31: raise --inner-batch"
        raise ValueError(f"the run reads {run.total_batches} inner batches; {required}")
    return run


def parse(argv, about=""):
    """{flag: value} of all flags, and of those that the command line has. Raises ValueError.

    about: what --help says before it lists the flags.
    """
    method = flags.peek(argv, "method", Config.method, METHODS)
    preset = flags.peek(argv, "model", Config.model, model.PRESETS)
    fields = valid_flags(method)
    tuned = TUNED.get(preset, {}).get(method, {})

    # A default comes from the field, unless one of the next lines has another.
    values = {name: flag.default for name, flag in fields.items()}
    # The sizes of the model.
    values |= flags.values_of(model.PRESETS[preset])
    # The text and the batch that go with the model.
    values |= DEFAULTS[preset]
    # What was tuned for this method on this model.
    values |= tuned
    # What is fast on this machine.
    values["dtype"] = choice.default_dtype()

    groups, others = flag_groups(method), flags_of_others(method)
    shown = f"The defaults are those of --method {method} --model {preset}."
    given = flags.parse(argv, groups, values, f"{about}\n{shown}", others, MEANT)
    # A preset's vocab_size belongs to its own tokenizer. 0 = the usual one of the tokenizer given.
    if given.get("tokenizer", values["tokenizer"]) != values["tokenizer"]:
        values["vocab_size"] = 0
    # Warm-up and average were tuned with one schedule and one line search. Where either is given,
    # even the tuned one, they have the defaults of a model that was not tuned.
    if given.keys() & {"schedule", "line_search", "alphas"}:
        for name in tuned.keys() & {"warmup_steps", "average"}:
            values[name] = fields[name].default
    if "warmup" in given and "warmup_steps" in values:
        values["warmup_steps"] = 0  # steps would count in place of the fraction
    values |= given
    if given.get("line_search") == 0 and given.get("alphas"):
        raise ValueError("line_search 0 is no search, but alphas has step sizes for one")
    if given.get("warmup") and given.get("warmup_steps"):
        raise ValueError("warmup and warmup_steps are two ways to say one thing: give one of them")

    # The model's default length counts only where nothing that is given says when the run ends.
    if "tokens" in given and "steps" not in given:
        values["steps"] = None
    elif "target_loss" in given and "steps" not in given:
        values |= {"steps": None, "tokens": None}
    return values, given


# What people mean who forget a flag, or who know other programs.
MEANT = {
    **{name: f"--method {name}" for name in METHODS},
    **{name: f"--model {name}" for name in model.PRESETS},
    **{name: f"--data {name}" for name in ("c4", "stdlib")},
    "--learning-rate": "--lr",
    "--optimizer": "--method",
    "--epochs": "--tokens",
    "--iters": "--steps",
    "--warmup-fraction": "--warmup-tokens",
}


def flag_groups(method):
    """{title: {name: Flag}}: every flag that is valid with a method, as --help groups them."""
    of_run = flags.fields_of(Config)
    for name, choices in (("method", METHODS), ("model", model.PRESETS)):
        listed = " | ".join(choices)
        explained = f"{listed}: {of_run[name].help}"
        of_run[name] = of_run[name]._replace(help=explained)
    of_method = flags.fields_of(METHODS[method].Config, DERIVED)
    return {"a run": of_run, method: of_method, "the network": flags.fields_of(model.Config)}


def valid_flags(method):
    """{name: Flag}: every flag that is valid with a method."""
    valid = {}
    for group in flag_groups(method).values():
        valid |= group
    return valid


def flags_of_others(method):
    """{other method: {name: Flag}}: the flags that are valid with it, but not with this method."""
    valid = valid_flags(method)
    groups = {}
    for other in METHODS:
        groups[other] = flags.fields_of(METHODS[other].Config, DERIVED)
        for name in groups[other].keys() & valid.keys():
            del groups[other][name]
    return groups


def pick(values, cls, derived=()):
    """{field: value}: of some values, those of the fields of a dataclass that are not derived."""
    return {name: values[name] for name in flags.fields_of(cls, derived)}


def work_out(config, network, parameters):
    """The Config with batch and warm-up in whole inner batches, and with what was left out.

    Left out may be steps, warm-up and eval_every. parameters: of the network. Raises ValueError if
    the batch is shorter than a sequence.
    """
    if config.batch < network.context:
        fewer = f"fewer than one sequence of context {network.context}"
        raise ValueError(f"batch is {config.batch} tokens, {fewer}")
    inner_tokens = config.inner_batch * network.context
    batch = max(1, round(config.batch / inner_tokens)) * inner_tokens
    steps, tokens = config.steps, config.tokens
    if steps:
        tokens = None  # the steps count
    elif tokens:
        steps = max(1, round(tokens / batch))
    warmup_tokens = config.warmup_tokens
    if warmup_tokens is None:
        warmup_tokens = parameters  # 5% of 20 per parameter
    warmup_tokens = round(warmup_tokens / inner_tokens) * inner_tokens
    eval_every = config.eval_every or max(1, config.eval_tokens // batch)
    sizes = {"batch": batch, "warmup_tokens": warmup_tokens, "eval_every": eval_every}
    return replace(config, **sizes, steps=steps, tokens=tokens)


def configure_method(cls, config, network, values):
    """The settings of a method, of class cls. Raises ValueError if one of its values is bad."""
    inner_tokens = config.inner_batch * network.context
    sizes = {
        "network": network,
        "inner_steps": config.batch // inner_tokens,
        "outer_steps": NO_END if config.steps is None else config.steps,
        "inner_tokens": inner_tokens,
        "micro_batch": config.micro_batch or 0,
    }
    has = flags.fields_of(cls)
    sizes = {name: value for name, value in sizes.items() if name in has}
    settings = cls(**sizes, **pick(values, cls, DERIVED))
    if hasattr(settings, "check"):
        settings.check()
    return settings


def why_length_counts(settings):
    """Why a method's learning rate depends on the length of the run, such as "--warmup 0.2".

    None if it does not: then a finished run can be lengthened.
    """
    if not hasattr(settings, "depends_on_length"):
        return "the method's Config has no depends_on_length"
    if not settings.depends_on_length:
        return None
    # It is the warm-up of the learning rate if without it nothing depends on the length.
    warmup = getattr(settings, "warmup", 0)
    if warmup and not replace(settings, warmup=0.0).depends_on_length:
        return f"--warmup {warmup}"
    if hasattr(settings, "schedule"):
        return f"--schedule {settings.schedule}"
    return "the method's Config says so"


# ---- which flags tell runs apart -----------------------------------------------------------------

# Flags in which two commands for one run may always differ. `tokens` is among them because it
# becomes `steps`; the last two change no number, but for rounding. `steps` may differ, too, where
# no learning rate depends on the length of the run.
MAY_DIFFER = ("out", "tokens", "micro_batch", "save_every")


def flags_that_may_differ(length_reason):
    """The flags in which two commands for one run may differ; length_reason: as in a Run."""
    return MAY_DIFFER if length_reason else (*MAY_DIFFER, "steps")


def name_of(values, length_reason):
    """The name of a run's folder: what people look for first, and a digest of the flags.

    A flag that has its field's default does not count, so a flag that is new changes no name.
    """
    fields = valid_flags(values["method"])
    changed = {}
    for name in values.keys() - {*flags_that_may_differ(length_reason)}:
        if values[name] != fields[name].default:
            changed[name] = values[name]
    words = [values["method"], values["model"], str(values["batch"])]
    if "lr" in values:
        words.append(f"lr{values['lr']}")
    words.append(f"seed{values['seed']}")
    words.append(files.digest(sorted(changed.items()))[:6])
    return "-".join(words)


def defaults_of(run):
    """{flag: value} to assume of flags that a saved run lacks, as they are newer than it."""
    defaults = {}
    for name, flag in valid_flags(run.config.method).items():
        defaults[name] = flag.default
        if flag.default is None and name not in run.given:
            # It was worked out from other flags. If those are equal in both runs, so is this one.
            defaults[name] = run.values[name]
    return defaults
