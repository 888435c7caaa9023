"""What a run prints: what it will do, a row per evaluation, how it ended; a grid's table."""

import shutil
import sys
from pathlib import Path

import jax

COLUMNS = {  # of the table: a log row's number, the width of its column, its format
    "step": (5, "d"),
    "tokens": (13, ",d"),
    "train_loss": (11, ".4f"),
    "val_loss": (9, ".4f"),
    "val_bpb": (8, ".4f"),
    "lr": (9, ".2g"),
    "alpha": (6, ".3f"),
    "seconds": (8, ".1f"),
}


FIRST = ("method", "model")  # flags that the first line of a run tells


def header():
    """The first line of the table."""
    return " ".join(name.rjust(width) for name, (width, _) in COLUMNS.items())


def table_row(row):
    """A log row as a line of the table. "-" stands for a number that the method does not have."""
    cells = []
    for name, (width, form) in COLUMNS.items():
        value = row.get(name)
        text = "-" if value is None else format(value, form)
        cells.append(text.rjust(width))
    return " ".join(cells)


# ---- before and after a run ----------------------------------------------------------------------


def opening(run, forms, text, windows, state):
    """Prints what a run is about to do.

    forms: whether kernels run, in words; text: its text, in words; windows: how many of them
    training has. state: where an earlier command has stopped, None if there was none.
    """
    config, context = run.config, run.network.context
    devices = describe_devices(run, forms)
    print(f"{run.title} on {config.model}: {run.parameters:,} parameters, {devices}")
    print(f"text {config.data}, {text}")

    inner = f"{run.settings.inner_steps} inner batches of {config.inner_batch} x {context}"
    print(f"{config.steps} outer steps of {config.batch:,} tokens: {inner} (sequences, positions)")
    asked = run.given.get("batch", config.batch)
    if asked != config.batch:
        whole = f"as a batch is cut into whole inner batches, of {run.inner_tokens:,} tokens each"
        print(f"--batch {asked:,} became {config.batch:,}, {whole}")
    steps = f"{run.warmup_batches * run.inner_tokens:,} tokens, {run.warmup_batches} steps of AdamW"
    print(f"warm-up: {steps}, made once for all runs with this model, text and seed")

    line_search = config.steps * run.settings.fresh_batches * run.inner_tokens
    whole_run = (
        f"{run.batches * run.inner_tokens:,} tokens, {line_search:,} of them for line search"
    )
    times = run.batches * config.inner_batch / windows
    share = f"{times:.1f} times the text" if times > 1 else f"{times:.2%} of the text"
    print(f"it will read {whole_run}: {share}")
    given = [flag_and_value(*item) for item in run.given.items() if item[0] not in FIRST]
    if given:
        print("other than the defaults:", *given)
    print(f"{config.out}: {describe_state(state, config.steps)}")


def describe_devices(run, forms):
    """The type of numbers, the devices, how many of these are idle, and whether kernels run."""
    kind = jax.devices()[0].device_kind
    devices = f"{run.network.dtype} on {run.mesh.size} x {kind}, {forms}"
    idle = jax.device_count() - run.mesh.size
    if idle:
        reason = f"they do not divide an inner batch of {run.config.inner_batch} sequences"
        devices += f" ({idle} idle: {reason})"
    return devices


def describe_state(state, steps):
    """Where an earlier command has stopped."""
    if state is None:
        return "a new run"
    if state.t == steps:
        return "finished by an earlier command"
    return f"resumes in outer step {state.t + 1}"


def flag_and_value(name, value):
    """A flag as it is given, such as --inner-batch 8."""
    return f"--{name.replace('_', '-')} {value}"


def time_left(seconds):
    """How long a run will still take, as a line: "about 2 h 5 min to go"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"about {hours} h {minutes} min to go"
    if minutes:
        return f"about {minutes} min {rest} s to go"
    return f"about {rest} s to go"


def summary(run, rows):
    """Prints how the run ended."""
    last = rows[-1]
    seconds = sum(row.get("seconds") or 0 for row in rows)
    refused = sum(row.get("refused") or 0 for row in rows)

    loss = f"validation loss {last['val_loss']:.4f}, {last['val_bpb']:.4f} bits a byte"
    print(f"{loss}, after {last['step']} outer steps")
    tokens = f"{last['tokens']:,} tokens, {last['tokens_line_search']:,} of them for line search"
    print(f"{tokens}; {seconds:.0f} s, evaluation not included")
    if refused:
        reason = "as no step size lowered the loss"
        print(f"{refused} steps were refused, {reason}: try a smaller --lr")
    target = run.config.target_loss
    if target and last["val_loss"] > target:
        print(f"target loss {target} not reached")
    elif target:
        steps = f"{last['step']} outer steps, {last['tokens']:,} tokens"
        print(f"target loss {target} reached after {steps}")  # Section 6.1.1


def next_commands(folder, runs):
    """Prints what can be done now: with the run in a folder, and with runs, by their pattern."""
    print(f"figures:  python plot.py {runs}")
    print(f'a sample: python sample.py --out {folder} "Once upon a time"')


# ---- the table of a grid -------------------------------------------------------------------------


def grid(runs, results):
    """Prints the runs of a grid, the smallest last validation loss first.

    results: of each run, the rows of its log, or a word that says why it has none. The flags that
    the grid varies have a column.
    """
    varied = {}  # in order, each once
    for run in runs:
        varied |= dict.fromkeys(run.given)
    varied = [name for name in varied if len({run.given.get(name) for run in runs}) > 1]

    lines = []
    for run, result in zip(runs, results, strict=True):
        if isinstance(result, str):
            order = float("inf")
            line = {"val_loss": result, "step": "-", "tokens": "-"}
        else:
            last = result[-1]
            order = last["val_loss"]
            line = {"val_loss": f"{order:.4f}", "step": str(last["step"])}
            line["tokens"] = f"{last['tokens']:,}"
        line |= {name: str(run.given.get(name, "-")) for name in varied}
        line["folder"] = run.config.out
        lines.append((order, line))
    lines.sort(key=lambda line: line[0])
    lines = [line for _, line in lines]

    print()
    print_table([dict(zip(lines[0], lines[0], strict=True)), *lines])
    print()
    best = lines[0]["folder"]
    next_commands(best, f"{Path(best).parent}/*")


def print_table(lines):
    """Prints dicts as the lines of a table. If the terminal is narrow, without two columns."""
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else float("inf")
    widths = {name: max(len(line[name]) for line in lines) for name in lines[0]}
    for name in ("tokens", "step"):
        if sum(widths.values()) + 2 * len(widths) > room:
            del widths[name]
    for line in lines:
        cells = [line[name].rjust(width) for name, width in widths.items() if name != "folder"]
        print(*cells, line["folder"], sep="  ")
