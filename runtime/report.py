"""What a run prints: what it will do, a row per evaluation, how it ended; a grid's table."""

import shlex
import shutil
import sys
from pathlib import Path

import jax

from runtime import memory
from runtime.flags import flag_of

COLUMNS = {  # of the table: {name in a log row: (width of its column, format)}
    "step": (5, "d"),
    "tokens": (13, ",d"),
    "train_loss": (11, ".4f"),
    "val_loss": (9, ".4f"),
    "val_bpb": (8, ".4f"),
    "lr": (9, ".2g"),
    "alpha": (6, ".3f"),
    "seconds": (8, ".1f"),
}

IN_FIRST_LINE = ("method", "model")  # flags that the first line of a run tells
READ = "tokens read"  # a column of a grid's table; no flag has a blank in its name


def header():
    """The first line of the table."""
    return " ".join(name.rjust(width) for name, (width, _) in COLUMNS.items())


def table_row(row):
    """A log row as a line of the table. "-" stands for a number that the method does not have."""
    cells = []
    for name, (width, spec) in COLUMNS.items():
        value = row.get(name)
        text = "-" if value is None else format(value, spec)
        cells.append(text.rjust(width))
    return " ".join(cells)


# ---- before and after a run ----------------------------------------------------------------------


def print_opening(run, kernels, memory_needed, text, tokens_in_text, begun):
    """Prints what a run is about to do.

    kernels, text, begun: in words, which kernels run, what the text has, and what an earlier
    command has done of the run. memory_needed: MiB of a device that an inner batch needs; None if
    that is not known. tokens_in_text: those of all windows; None if not all are tokenized yet.
    """
    config, context = run.config, run.network.context
    devices = describe_devices(run, kernels)
    method = run.method.title
    print(f"{method} on {config.model}: {run.parameters:,} parameters, {devices}")
    print(f"text {config.data}, {text}")

    inner = f"{run.settings.inner_steps} inner batches of {config.inner_batch} x {context}"
    print(f"{describe_length(config)}: {inner} (sequences, positions)")
    if memory_needed is not None:
        print(describe_memory(run, memory_needed))
    if run.length_reason:
        other = "another number of steps is another run, as the learning rate depends on it"
        print(f"{other}: {run.length_reason}")
    for line in changes(run):
        print(line)
    if run.warmup_batches:
        tokens = run.warmup_batches * run.inner_tokens
        steps = f"{run.warmup_batches} steps of AdamW"
        print(f"warm-up: {tokens:,} tokens, {steps}, made once and kept in data/ for other runs")

    print(describe_reading(run, tokens_in_text))
    given = []
    for name, value in run.given.items():
        if name not in IN_FIRST_LINE:
            given.append(f"{flag_of(name)} {value}")
    if given:
        print("flags given:", *given)
    print(f"{config.out}: {begun}")


def describe_memory(run, needed):
    """How much of an inner batch a device computes on at once, and the memory for that."""
    share = run.config.inner_batch // run.mesh.size
    at_once = f"{run.micro_batch} of {share} sequences at once on each device"
    gib = f"{needed / 2**10:.1f} of {memory.available() / 2**10:.1f} GiB"
    return f"memory: {at_once}, which takes {gib}"


def describe_length(config):
    """How many outer steps there will be, of how many tokens."""
    size = f"of {config.batch:,} tokens"
    if config.steps is None:
        return f"outer steps {size} until the loss is {config.target_loss}"
    return f"{config.steps} outer steps {size}"


def goal(run):
    """Where a run ends, such as "to 20"."""
    if run.config.steps is None:
        return f"until the loss is {run.config.target_loss}"
    return f"to {run.config.steps}"


# Why a flag has another value than was given.
REASONS = {
    "batch": "a batch is cut into whole inner batches, of {inner_tokens:,} tokens each",
    "warmup_tokens": "a warm-up reads whole inner batches, of {inner_tokens:,} tokens each",
    "tokens": "--steps says how long the run is",
    "tokenizer": "the digest of its file is part of it",
    "vocab_size": "the tokenizer has so many ids",
    "line_search": "--alphas has the step sizes",
}


def changes(run):
    """A line for each flag that came out with another value than was given."""
    lines = []
    for name, asked in run.given.items():
        value = run.values[name]
        if value == asked:
            continue
        reason = REASONS.get(name, "other flags decide").format(inner_tokens=run.inner_tokens)
        became = "has no effect" if value is None else f"became {readable(value)}"
        given = f"{flag_of(name)} {readable(asked)}"
        lines.append(f"{given} {became}, as {reason}")
    return lines


def readable(value):
    """A flag's value as a text: 4,000,000 for a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:,}" if is_number else str(value)


def describe_reading(run, tokens_in_text):
    """How much a run will read; tokens_in_text: as `print_opening` takes it."""
    fresh = run.settings.fresh_batches * run.inner_tokens  # per outer step, for the line search
    is_race = getattr(run.settings, "race", False)  # a method of your own may have no such flag
    may_stop_early = fresh > 0 and is_race
    at_most = "at most " if may_stop_early else ""
    if run.config.steps is None:
        tokens = run.batches_per_step * run.inner_tokens
        return f"each step will read {at_most}{tokens:,} tokens, {fresh:,} of them for line search"
    tokens = run.total_batches * run.inner_tokens
    line_search = run.config.steps * fresh
    read = f"it will read {at_most}{tokens:,} tokens, {line_search:,} of them for line search"
    if tokens_in_text is None:
        return read
    times = tokens / tokens_in_text
    share = f"{times:.1f} times the text" if times > 1 else f"{times:.2%} of the text"
    return f"{read}: {share}"


def describe_devices(run, kernels):
    """The type of numbers, the devices, how many of these are idle, and whether kernels run."""
    kind = jax.devices()[0].device_kind
    devices = f"{run.network.dtype} on {run.mesh.size} x {kind}, {kernels}"
    idle = jax.device_count() - run.mesh.size
    if idle:
        reason = f"they do not divide an inner batch of {run.config.inner_batch} sequences"
        devices += f" ({idle} idle: {reason})"
    return devices


def smaller_steps(run):
    """The flag that makes the steps of a run smaller, as advice."""
    if "lr" in run.values:
        return "a smaller --lr"
    return "a larger --damping"


def time_left(seconds):
    """How long a run will still take, as a line: "about 2 h 5 min to go"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"about {hours} h {minutes} min to go"
    if minutes:
        return f"about {minutes} min {rest} s to go"
    return f"about {rest} s to go"


def print_summary(run, rows):
    """Prints how the run ended."""
    last = rows[-1]
    seconds = sum(row.get("seconds") or 0 for row in rows)
    refused = sum(row.get("refused") or 0 for row in rows)

    loss = f"validation loss {last['val_loss']:.4f}, {last['val_bpb']:.4f} bits a byte"
    print(f"{loss}, after {last['step']} outer steps")
    tokens = f"{last['tokens']:,} tokens, {last['tokens_line_search']:,} of them for line search"
    print(f"{tokens}; {seconds:.0f} s, evaluation not included")
    if refused:
        advice = f"try {smaller_steps(run)}, or a longer warm-up (--warmup-tokens)"
        print(f"refused steps, where no step size lowered the loss: {refused}; {advice}")
    target = run.config.target_loss
    if target and last["val_loss"] > target:
        print(f"target loss {target} not reached")
    elif target:
        steps = f"{last['step']} outer steps, {last['tokens']:,} tokens"
        print(f"target loss {target} reached after {steps}")  # Section 6.1.1


def print_next_commands(folder, runs):
    """Prints what can be done now. folder: of a run; runs: folders, quoted for a shell."""
    print(f"figures:  python plot.py {runs}")
    print(f'a sample: python sample.py --out {shlex.quote(folder)} "Once upon a time"')


# ---- the table of a grid -------------------------------------------------------------------------


def print_grid(runs, results):
    """Prints the runs of a grid, the best first: see `rank`.

    results: of each run, the rows of its log, or a word that says why it has none. The flags that
    the grid varies have a column.
    """
    given = runs[0].given  # each run has these, as they come from one command line
    varied = []
    for name in given:
        values = {run.given[name] for run in runs}
        if len(values) > 1:
            varied.append(name)

    lines = []
    ranked = sorted(zip(runs, results, strict=True), key=lambda pair: rank(*pair))
    for run, result in ranked:
        if isinstance(result, str):
            line = {"val_loss": result, "step": "-", READ: "-"}
        else:
            last = result[-1]
            line = {"val_loss": f"{last['val_loss']:.4f}", "step": str(last["step"])}
            line[READ] = f"{last['tokens']:,}"
        line |= {name: str(run.values[name]) for name in varied}
        line["folder"] = run.config.out
        lines.append(line)

    print()
    names = {name: name for name in lines[0]}
    print_table([names, *lines])
    print()
    if not all(isinstance(result, str) for result in results):
        best = lines[0]["folder"]
        print_next_commands(best, f"{shlex.quote(str(Path(best).parent))}/*")


def rank(run, result):
    """Where a run stands in the table of its grid; a smaller tuple comes first.

    First come the runs that have come to their target loss, those with the fewest steps before the
    others, of equals those that have read the fewest tokens. Then come runs with a loss, the
    smallest first, and last those without.
    """
    if isinstance(result, str):
        return (2,)
    last = result[-1]
    target = run.config.target_loss
    if target and last["val_loss"] <= target:
        return (0, last["step"], last["tokens"], last["val_loss"])
    return (1, last["val_loss"])


def print_table(lines):
    """Prints dicts as the lines of a table.

    If the terminal is narrow, the tokens are left out, and if that is not enough, the steps.
    """
    widths = {}
    for name in lines[0]:
        widths[name] = max(len(line[name]) for line in lines)

    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else float("inf")
    for name in (READ, "step"):
        gaps = 2 * (len(widths) - 1)
        if sum(widths.values()) + gaps > room:
            del widths[name]

    widths["folder"] = 0  # the last column needs no padding
    for line in lines:
        cells = [line[name].rjust(width) for name, width in widths.items()]
        print(*cells, sep="  ")
