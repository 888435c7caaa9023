"""What a run prints: what it will do, a row per evaluation, how it ended; a grid's table."""

from contextlib import contextmanager

import jax
from tqdm import tqdm

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


def opening(run, train_tokens, windows):
    """Prints what is about to run. train_tokens, windows: how many the training text has."""
    config, context = run.config, run.network.context
    print(" ".join(f"{name}={value}" for name, value in run.values.items()))

    device = f"{run.mesh.size} x {jax.devices()[0].device_kind}"
    idle = jax.device_count() - run.mesh.size
    if idle:
        reason = f"they do not divide an inner batch of {config.inner_batch} sequences"
        device += f" ({idle} idle: {reason})"
    corpus = f"{train_tokens:,} training tokens in {config.data}"
    print(f"{run.parameters:,} parameters on {device}; {corpus}")

    shape = f"{run.settings.inner_steps} x {config.inner_batch} x {context}"
    units = "inner batches, sequences, positions"
    print(f"{config.steps} outer steps of {config.batch:,} tokens: {shape} ({units})")

    epochs = run.batches * config.inner_batch / windows
    if epochs > 1:
        read = run.batches * run.inner_tokens
        print(f"the run reads {read:,} tokens: the corpus {epochs:.1f} times")


class Progress:
    """Progress bars over tokens, which show tokens/s and the time left. All move together."""

    def __init__(self, inner_tokens):
        """inner_tokens: tokens in an inner batch."""
        self.inner_tokens = inner_tokens
        self.bars = []

    @contextmanager
    def bar(self, title, batches, done=0):
        """Shows a bar for so many inner batches, of which some are done, within the context."""
        with tqdm(
            desc=title,
            total=batches * self.inner_tokens,
            initial=done * self.inner_tokens,
            unit="tok",
            unit_scale=True,
            leave=False,
            disable=jax.process_index() > 0 or None,  # None: only if stderr is no terminal
        ) as bar:
            self.bars.append(bar)
            try:
                yield
            finally:
                self.bars.remove(bar)

    def advance(self):
        """Moves every bar by one inner batch."""
        for bar in self.bars:
            bar.update(self.inner_tokens)

    def write(self, line):
        """Prints a line above the bars."""
        tqdm.write(line)


def summary(run, rows):
    """Prints how the run ended."""
    last = rows[-1]
    seconds = sum(row.get("seconds") or 0 for row in rows)
    waited = sum(row["input_wait"] for row in rows) / max(seconds, 1e-9)
    refused = sum(row.get("refused") or 0 for row in rows)

    loss = f"validation loss {last['val_loss']:.4f}, {last['val_bpb']:.4f} bits a byte"
    print(f"{loss}, after {last['step']} outer steps")
    tokens = f"{last['tokens']:,} tokens, {last['tokens_line_search']:,} of them for line search"
    print(f"{tokens}; {seconds:.0f} s, evaluation not included")
    print(f"{waited:.1%} of that time was spent waiting for input")
    if refused:
        reason = "as no step size lowered the loss"
        print(f"{refused} steps were refused, {reason}: try a smaller --lr")
    target = run.config.target_loss
    if target and last["val_loss"] > target:
        print(f"target loss {target} not reached")
    elif target:
        steps = f"{last['step']} outer steps, {last['tokens']:,} tokens"
        print(f"target loss {target} reached after {steps}")  # Section 6.1.1
    print(f"{run.config.out}: config.json, log.jsonl, checkpoint.npz")


def grid(runs, results):
    """Prints the runs of a grid, the smallest last validation loss first.

    results: the log rows of each run, or None if it diverged. Flags that differ have a column.
    """
    names = {}  # in order, each once
    for run in runs:
        names |= dict.fromkeys(run.values)
    del names["out"]
    differing = [name for name in names if len({run.values.get(name) for run in runs}) > 1]

    lines = []
    for run, rows in zip(runs, results, strict=True):
        loss = float("inf")
        cells = ["diverged", "-", "-"]
        if rows:
            last = rows[-1]
            loss = last["val_loss"]
            cells = [f"{loss:.4f}", str(last["step"]), f"{last['tokens']:,}"]
        cells += [str(run.values.get(name, "-")) for name in differing]
        lines.append((loss, cells, run.config.out))
    lines.sort(key=lambda line: line[0])

    table = [["val_loss", "step", "tokens", *differing], *(cells for _, cells, _ in lines)]
    folders = ["folder", *(folder for _, _, folder in lines)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print()
    for cells, folder in zip(table, folders, strict=True):
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        print(*aligned, folder, sep="  ")
