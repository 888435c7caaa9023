"""The commands of docs/paper.md do what the paper did, and cost what the page says.

Every number below was typed from the paper (Section 5, 6, Appendix D, E, F, H), none from the code.
"""

import math
import re
import shlex
from functools import cache, cached_property
from pathlib import Path

import pytest

import model
import recipe
import train
from runtime import flags
from text.tokenizer import tokenizer

ROOT = Path(train.__file__).parent
K, M, B = 10**3, 10**6, 10**9

# Appendix E and Section 5. The paper writes 45M and 150M parameters; its code has these numbers.
PARAMETERS = {"45m": 45_363_712, "150m": 134_142_720}
INNER_BATCH = {"45m": 32, "150m": 128}  # sequences
CONTEXT = 1024
MODELS = {
    "45m": {"d_model": 512, "d_ff": 2048, "n_layers": 4, "n_heads": 8, "n_kv_heads": 8},
    "150m": {"d_model": 768, "d_ff": 3072, "n_layers": 12, "n_heads": 16, "n_kv_heads": 16},
}

# The batches of Appendix H and Section 6.1.1 in whole inner batches, N.
N = {
    "45m": {400 * K: 12, 1.2 * M: 37, 4 * M: 122, 12 * M: 366, 40 * M: 1221, 32768: 1},
    "150m": {
        1.2 * M: 9,
        4 * M: 31,
        12 * M: 92,
        40 * M: 305,
        120 * M: 916,
        240 * M: 1831,
        131072: 1,
    },
}
FIVE = {
    "45m": [400 * K, 1.2 * M, 4 * M, 12 * M, 40 * M],
    "150m": [1.2 * M, 4 * M, 12 * M, 40 * M, 120 * M],
}
TOKENS = {"45m": 900 * M, "150m": 3 * B}  # Appendix G, Section 6.1.2

# What a method has in every command that does not name it below: Section 5 and 6, Appendix H.
GAUSS_NEWTON = {
    "inner": "muon",
    "momentum": 0.95,
    "weight_decay": 0.001,  # "optimizer weight decay"
    "damping": 0.0,  # "loss weight decay"; "inner loop weight decay" of the 150M model
    "parameter_weight_decay": 0.0,
    "warmup": 0.0,  # "global warmup fraction"
    "inner_warmup": 0.0,
    "line_search": 5,
    "restart": False,  # "the pre-linesearch parameters from the previous step"
    "inner_epochs": 1,
    "alphas": "",
}
BASELINE = {"warmup": 0.0, "warmup_steps": 0, "average": 0.0, "weight_decay": 0.0}
METHODS = {
    "gn": GAUSS_NEWTON,
    "gn_prox": GAUSS_NEWTON | {"line_search": 0},  # "line search was not necessary"
    "layerwise_gn": GAUSS_NEWTON | {"line_search": 10, "objective": "quadratic"},
    "adamw": BASELINE | {"b1": 0.9},
    "muon": BASELINE,
    "soap": BASELINE | {"frequency": 1},  # "preconditioning frequency"
}

# What the paper does not fix, and why no number is expected.
OPEN = {
    "out": "the name of a folder",
    "seed": "the paper does not say how many seeds it has",
    "shard": "how memory is used; the result is the same",
    "save_every": "how often a run is saved",
    "eval_every": "the paper does not say how often it evaluates",
    "eval_tokens": "only in the authors' code, where there are ten times as many",
    "warmup_lr": "the learning rate of the common warm-up is not printed",
    "clip": "only in the authors' code, which has 1",
    "guard": "not in the paper: docs/differences.md",
    "race": "not in the paper: docs/differences.md",
    "line_search_tokens": "the paper does not say how many tokens its line search reads",
    "b2": "of AdamW and SOAP it is in Appendix H; of Gauss-Newton's inner optimizer it is not",
    "largest": "of SOAP: which matrices it rotates is not in the paper",
    "mlp": "the paper says `LLaMA-based`; its authors' code has GELU",
    "qk_norm": "only in the authors' code",
    "dtype": "what is fast on this machine",
    "head_chunk": "how memory is used; the result is the same",
    "micro_batch": "how memory is used; the result is the same",
}

COSINE, CONSTANT = {"schedule": "cosine"}, {"schedule": "constant"}
INNER_COSINE = {"schedule": "constant+inner cosine"}
GLOBAL = {"schedule": "global cosine"}
TWO = {"schedule": ["constant+inner cosine", "global cosine"]}  # Appendix H
THREE = {"schedule": ["global cosine", "global+inner cosine", "constant+inner cosine"]}  # App. D


def command(method, name, *settings, **more):
    """What is expected of a command: a list stands for a grid. Values: numbers of the paper."""
    values = {"method": method, "model": name, "target_loss": None, "steps": None, "tokens": None}
    for group in (*settings, more):
        values |= group
    return values


def fixed(method, name, *settings, **more):
    """The same for a fixed number of tokens over the five batches."""
    over_batches = {"tokens": TOKENS[name], "batch": FIVE[name]}
    return command(method, name, over_batches, *settings, **more)


# One learning rate and so on where the paper prints only a grid: each is a member of that grid.
ADAMW = {"lr": 0.003, "b2": 0.95}
MUON = {"lr": 0.03, "momentum": 0.95}
SOAP = {"lr": 0.03, "b1": 0.9, "b2": 0.9}
ONE = {"lr": 0.01}
TO_325 = {"target_loss": 3.25}  # Section 6.1.1
TO_34 = {"target_loss": 3.4, "batch": FIVE["150m"][:4]}  # Section 6.1.2: "through 40M"
TO_4 = {"target_loss": 4.0, "batch": FIVE["45m"]}  # the target at 45M is not printed
AT_4M = {"batch": 4 * M, "tokens": TOKENS["45m"]}  # of section 8 of the page: not printed

EXPECTED = {
    # Section 6.1.1, Figure 1. AdamW's steps are not printed; those of 1f are a limit.
    "1a": command("gn", "150m", TO_325, INNER_COSINE, ONE, batch=240 * M),
    "1b": command("layerwise_gn", "150m", TO_325, INNER_COSINE, ONE, batch=120 * M),
    "1c": command("soap", "150m", TO_325, COSINE, SOAP, batch=240 * M, steps=292),
    "1d": command("muon", "150m", TO_325, COSINE, MUON, batch=40 * M, steps=16 * 54),
    "1e": command(
        "adamw", "150m", TO_325, COSINE, ADAMW, batch=40 * M, steps=1728, weight_decay=0.001
    ),
    "1f": command(
        "gn", "150m", TO_325, INNER_COSINE, batch=240 * M, steps=2 * 54, lr=[0.003, 0.03]
    ),
    "1g": command("soap", "150m", TO_325, COSINE, SOAP, batch=240 * M, steps=292, lr=[0.01, 0.1]),
    # Figures 2 and 6, left
    "2a": fixed("gn", "45m", TWO, ONE),
    "2b": fixed("gn_prox", "45m", GLOBAL, ONE),
    "2c": fixed("adamw", "45m", COSINE, ADAMW),
    "2d": fixed("muon", "45m", COSINE, MUON),
    "2e": fixed("soap", "45m", COSINE, SOAP),
    "2f": fixed("gn", "150m", TWO, ONE),
    "2g": fixed("adamw", "150m", COSINE, ADAMW, weight_decay=0.001),
    "2h": fixed("muon", "150m", COSINE, MUON),
    "2i": fixed("soap", "150m", COSINE, SOAP),
    # Figures 2 and 6, right: "only the constant+EWA learning rate schedule was used". The tokens
    # are a limit.
    "3a": command("gn", "150m", TO_34, INNER_COSINE, ONE, tokens=10 * B),
    "3b": command(
        "adamw",
        "150m",
        TO_34,
        CONSTANT,
        ADAMW,
        tokens=40 * B,
        average=[0.9, 0.99],
        weight_decay=0.001,
    ),
    "3c": command("muon", "150m", TO_34, CONSTANT, MUON, tokens=40 * B, average=[0.7, 0.9]),
    "3d": command("soap", "150m", TO_34, CONSTANT, SOAP, tokens=40 * B, average=[0.7, 0.9]),
    "3e": command("gn", "45m", TO_4, INNER_COSINE, ONE, tokens=3 * B),
    "3f": command("adamw", "45m", TO_4, CONSTANT, ADAMW, tokens=12 * B, average=[0.9, 0.99]),
    "3g": command("muon", "45m", TO_4, CONSTANT, MUON, tokens=12 * B, average=[0.5, 0.7]),
    "3h": command("soap", "45m", TO_4, CONSTANT, SOAP, tokens=12 * B, average=[0.7, 0.8]),
    # Figure 3
    "4a": fixed("layerwise_gn", "150m", INNER_COSINE, ONE, batch=FIVE["150m"][2:]),
    "4b": fixed("gn_prox", "150m", GLOBAL, ONE),
    # Figure 4
    "5a": fixed("gn", "45m", THREE, ONE, batch=[400 * K, 4 * M, 40 * M]),
    "5b": fixed("gn_prox", "45m", THREE, ONE, batch=[400 * K, 4 * M, 40 * M]),
    # Section 5: 32k and 128k
    "6a": fixed("muon", "45m", COSINE, MUON, batch=32 * 1024, lr=[0.03, 0.1]),
    "6b": fixed("muon", "150m", COSINE, MUON, batch=128 * 1024, lr=[0.01, 0.03, 0.1]),
}

# Appendix H, without the values in parentheses.
ADAMW_45M = {"lr": [0.001, 0.003, 0.01, 0.03], "weight_decay": 0.0, "b2": [0.95, 0.99, 0.999]}
MUON_45M = {"lr": [0.03, 0.1], "momentum": [0.9, 0.95, 0.99]}
SOAP_45M = {"lr": [0.01, 0.03], "b1": [0.7, 0.8, 0.9], "b2": [0.7, 0.8, 0.9]}
GN_45M = {"lr": [0.003, 0.01, 0.03], "damping": [0.0, 0.01], "line_search": [5, 0]}
ADAMW_150M = {"lr": [0.001, 0.003, 0.01], "weight_decay": [0.001, 0.1], "b2": [0.95, 0.99]}
MUON_150M = {"lr": [0.01, 0.03, 0.1], "momentum": [0.9, 0.95, 0.99]}
SOAP_150M = {"lr": [0.01, 0.03, 0.1], "b1": 0.9, "b2": [0.7, 0.9, 0.95]}
GN_150M = {"lr": [0.003, 0.01, 0.03, 0.1], "damping": [0.0, 0.01, 0.1], "line_search": [5, 0]}
# "Inner loop warmup applies only to the constant+inner cosine schedule."
INNER_WARMUP = INNER_COSINE | {"inner_warmup": [0.0, 0.2]}

EXPECTED |= {
    "7a": fixed("adamw", "45m", COSINE, ADAMW_45M),
    "7b": fixed("adamw", "45m", CONSTANT, ADAMW_45M, average=[0.9, 0.99]),
    "7c": fixed("muon", "45m", COSINE, MUON_45M),
    "7d": fixed("muon", "45m", CONSTANT, MUON_45M, average=[0.5, 0.7]),
    "7e": fixed("soap", "45m", COSINE, SOAP_45M),
    "7f": fixed("soap", "45m", CONSTANT, SOAP_45M, average=[0.7, 0.8]),
    "7g": fixed("gn", "45m", TWO, GN_45M),
    "7h": fixed("gn_prox", "45m", TWO, GN_45M),
    "7i": fixed("adamw", "150m", COSINE, ADAMW_150M),
    "7j": fixed("muon", "150m", COSINE, MUON_150M),
    "7k": fixed("muon", "150m", CONSTANT, MUON_150M, average=[0.7, 0.9], batch=FIVE["150m"][2:]),
    "7l": fixed("soap", "150m", COSINE, SOAP_150M),
    "7m": fixed("gn", "150m", INNER_WARMUP, GN_150M),
    "7n": fixed("gn", "150m", GLOBAL, GN_150M),
    "7o": fixed("gn_prox", "150m", INNER_WARMUP, GN_150M),
    "7p": fixed("gn_prox", "150m", GLOBAL, GN_150M),
    # Section 5.1: the sizes and the values that are not in Appendix H are not printed.
    "8a": command("gn", "45m", AT_4M, INNER_COSINE, ONE, line_search=[5, 0]),
    "8b": command("gn", "45m", AT_4M, INNER_COSINE, ONE, restart=[False, True]),
    "8c": command(
        "gn", "45m", AT_4M, INNER_COSINE, inner="adamw", lr=[0.001, 0.003, 0.01], b2=[0.99, 0.999]
    ),
    "8d": command("gn", "45m", AT_4M, INNER_COSINE, ONE, inner_epochs=[1, 2]),
    "8e": command("gn", "45m", AT_4M, INNER_COSINE, ONE, damping=[0.0, 0.01, 0.1]),
}


# ---- the page ------------------------------------------------------------------------------------


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def commands_of(page):
    """[(label, words)] of the `python train.py` lines in a page's code blocks.

    label: the comment in the line above, or "".
    """
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE):
        label = ""
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("python train.py"):
                found.append((label, shlex.split(line, comments=True)[2:]))
            label = line.removeprefix("# ")
    return found


def rows_of(page):
    """The rows of the page's tables, as lists of texts."""
    lines = [line for line in read(page).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@cache
def paper_commands():
    """{label: words} of docs/paper.md."""
    return dict(commands_of("docs/paper.md"))


@cache
def table():
    """{label: (runs, length of a run, GPU-hours)} of docs/paper.md, as texts."""
    rows = rows_of("docs/paper.md")
    return {row[0]: tuple(row[2:]) for row in rows if re.fullmatch(r"\d[a-z]", row[0])}


def stand_in(flag, vocab_size=0):
    """The tokenizer of bytes in place of T5's, with as many ids: T5's file needs a network."""
    assert flag == "t5"
    return tokenizer("bytes")._replace(name="t5", flag="t5", vocab_size=vocab_size or 32_000)


@cache
def members(label):
    """The runs of a command of the page, as train.py resolves them."""
    size = cache(model.size)  # which is most of the time that a command takes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "tokenizer", stand_in)
        patch.setattr(model, "size", size)
        return [recipe.configure(line) for line in flags.expand(paper_commands()[label])]


def test_the_page_has_every_experiment_once():
    labels = [label for label, _ in commands_of("docs/paper.md")]
    assert labels == list(EXPECTED) == list(table())


# ---- what a command does -------------------------------------------------------------------------


def values_expected(label):
    """{flag: list of its values} of a command, of everything that the paper fixes."""
    wanted = dict(EXPECTED[label])
    method, name = wanted["method"], wanted["model"]
    inner_tokens = INNER_BATCH[name] * CONTEXT
    values = {
        "data": "c4",
        "tokenizer": "t5",  # the losses of the paper are nats per token of T5
        "vocab_size": 32_000,
        "context": CONTEXT,
        "inner_batch": INNER_BATCH[name],
        # "5% of the Chinchilla-optimal number of tokens"
        "warmup_tokens": round(0.05 * 20 * PARAMETERS[name] / inner_tokens) * inner_tokens,
    }
    values |= MODELS[name] | METHODS[method] | wanted
    values = {flag: as_list(value) for flag, value in values.items()}
    values["batch"] = [N[name][size] * inner_tokens for size in values["batch"]]
    return values


def as_list(value):
    return value if isinstance(value, list) else [value]


def check_length(run, expected):
    """Steps are tokens over whole batches, unless the command says them or has no end."""
    (steps,), (tokens,) = expected["steps"], expected["tokens"]
    if tokens:
        steps = round(tokens / run.config.batch)
    assert run.config.steps == steps


def check_search(run):
    """Appendix D: the step sizes. Appendix H: no line search, and only then an average."""
    settings = run.settings
    count = settings.line_search
    tried = [alpha for alpha in settings.step_sizes if alpha > 0]
    assert tried == pytest.approx([2 ** (-i / 2) for i in range(count)])
    assert settings.average == (0.0 if count else 0.999)


@pytest.mark.parametrize("label", EXPECTED)
def test_a_command_does_what_the_paper_did(label):
    """Every flag has the paper's value, or is listed as open; a grid is complete."""
    expected = values_expected(label)
    runs = members(label)
    ignored = {"steps", *([] if "average" in expected else ["average"])}  # checked in each run
    for flag in runs[0].values.keys() - ignored:
        if flag in expected:
            assert {run.values[flag] for run in runs} == set(expected[flag]), flag
        else:
            assert flag in OPEN, f"{flag} is neither expected nor listed as open"
    assert expected.keys() <= runs[0].values.keys()

    grid = [flag for flag, values in expected.items() if len(values) > 1]
    product = math.prod(len(expected[flag]) for flag in grid)
    chosen = {tuple(run.values[flag] for flag in grid) for run in runs}
    assert len(runs) == len(chosen) == product
    assert len({run.config.out for run in runs}) == product  # each in a folder of its own
    for run in runs:
        check_length(run, expected)
        if hasattr(run.settings, "step_sizes"):
            check_search(run)


@pytest.mark.parametrize("label", EXPECTED)
def test_a_command_says_its_batch_its_schedule_and_its_length(label):
    words = set(paper_commands()[label])
    assert {"--model", "--batch", "--schedule", "--tokenizer"} <= words
    assert words & {"--tokens", "--steps", "--target-loss"}


def test_sizes_of_the_papers_runs():
    """4M tokens at 45M are 122 inner batches; steps of the Chinchilla-optimal runs."""
    assert [run.settings.inner_steps for run in members("2c")] == [12, 37, 122, 366, 1221]
    assert [run.config.steps for run in members("2c")] == [2289, 742, 225, 75, 22]
    assert [run.config.steps for run in members("2g")] == [2543, 738, 249, 75, 25]
    assert {run.parameters for run in members("2c")} == {PARAMETERS["45m"]}
    assert {run.parameters for run in members("2g")} == {PARAMETERS["150m"]}
    (headline,) = members("1a")
    assert headline.config.steps is None  # until the loss is 3.25, however long that takes
    assert headline.settings.inner_steps == 1831


@pytest.mark.parametrize("page", ["README.md", "docs/usage.md"])
def test_commands_of_other_pages(page):
    """They are valid; those of the paper's models are commands of docs/paper.md."""
    found = commands_of(page)
    assert found
    for _, words in found:
        name = flags.peek(words, "model", "45m")
        if name in MODELS:
            assert words in paper_commands().values()
        else:
            assert all(recipe.configure(line) for line in flags.expand(words))


# ---- what a command costs ------------------------------------------------------------------------

ROWS = {  # the first column of the page's table of measurements
    "gn": "inner step of Gauss-Newton",
    "gn_prox": "inner step of GN-prox-linear",
    "layerwise_gn": "inner step of layerwise Gauss-Newton",
    "gradient": "gradient of a baseline",
    "forward": "forward pass",
    "adamw": "update of AdamW",
    "muon": "update of Muon",
    "soap": "update of SOAP",
    "race": "inner batches of 32 x 1024 that a candidate reads in a line search",
}


class Cost:
    """Seconds of a model on one H200, by the page's table of measurements."""

    def __init__(self, name):
        column = ["45m", "150m"].index(name) + 1
        rows = {row[0]: row for row in rows_of("docs/paper.md") if len(row) == 3}
        # All in milliseconds, but for the line search.
        self.ms = {what: float(rows[title][column]) for what, title in ROWS.items()}
        self.share = INNER_BATCH[name] / 32  # the rows are of 32 sequences

    @cached_property
    def evaluation(self):
        return 1_310_720 / (32 * 1024) * self.ms["forward"] / 1000

    def step(self, run):
        """Seconds of an outer step."""
        method, settings = run.config.method, run.settings
        inner_batches = settings.inner_steps * self.share
        if method in ("adamw", "muon", "soap"):
            return (inner_batches * self.ms["gradient"] + self.ms[method]) / 1000
        loop = settings.inner_epochs * inner_batches * self.ms[method]
        candidates = settings.line_search + 1 if settings.line_search else 0  # and θ_t
        fresh = min(inner_batches, self.ms["race"] * self.share)
        return (loop + candidates * fresh * self.ms["forward"]) / 1000

    def hours(self, run, length):
        """GPU-hours of a run of a length such as "54 steps" or "3b tokens"."""
        number, unit = length.split()
        steps = flags.count(number)
        if unit == "tokens":
            steps = max(1, round(steps / run.config.batch))
        evaluations = steps // max(1, 1_310_720 // run.config.batch) + 1
        return (steps * self.step(run) + evaluations * self.evaluation) / 3600


def two_digits(hours):
    """1531.2 -> 1,500."""
    return f"{float(f'{hours:.2g}'):,g}"


def cost_of(label):
    """The row of a command in the page's table, as it should be."""
    runs = members(label)
    _, length, _ = table()[label]
    cost = Cost(EXPECTED[label]["model"])
    hours = sum(cost.hours(run, length) for run in runs)
    return str(len(runs)), length, two_digits(hours)


@pytest.mark.parametrize("label", EXPECTED)
def test_the_cost_that_the_page_says(label):
    """The number of runs and the GPU-hours follow from the command and the measurements."""
    assert table()[label] == cost_of(label)


# Section 6.1.1: the number of steps to 3.25. Muon has 16 times Gauss-Newton's; AdamW's is ours.
PAPERS_STEPS = {"1a": 54, "1b": 78, "1c": 292, "1d": 864, "1e": 1728, "1f": 108, "1g": 292}


@pytest.mark.parametrize("label", EXPECTED)
def test_the_length_that_the_page_says(label):
    """The paper's steps, its tokens, or 1b tokens where a run with a target has no known length."""
    expected = EXPECTED[label]
    length = table()[label][1]
    if label in PAPERS_STEPS:
        assert length == f"{PAPERS_STEPS[label]} steps"
    elif expected["target_loss"]:
        assert length == "1b tokens"
    else:
        assert length == {900 * M: "900m tokens", 3 * B: "3b tokens"}[expected["tokens"]]


def test_the_measurements_are_those_of_the_page_on_speed():
    """docs/performance.md has every number of the page's table of measurements."""
    performance = read("docs/performance.md")
    for row in rows_of("docs/paper.md"):
        if row[0] in ROWS.values():
            for number in row[1:]:
                assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", performance), row
