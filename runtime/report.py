"""What a run prints: what it is about to do, a row an evaluation, what it came to; and the table of a grid."""

from contextlib import contextmanager

import jax
from tqdm import tqdm

import data

COLUMNS = {"step": (5, "d"), "tokens": (13, ",d"), "train_loss": (11, ".4f"), "val_loss": (9, ".4f")}  # width, format
COLUMNS |= {"val_bpb": (8, ".4f"), "lr": (9, ".2g"), "alpha": (6, ".3f"), "seconds": (8, ".1f")}
HEADER = " ".join(f"{name:>{width}}" for name, (width, _) in COLUMNS.items())


def table_row(row):
    """A row of the table; - where the method has no such number."""
    cells = ("-" if row[name] is None else format(row[name], form) for name, (_, form) in COLUMNS.items())
    return " ".join(cell.rjust(width) for cell, (width, _) in zip(cells, COLUMNS.values(), strict=True))


def opening(run, corpus):
    """Says what is about to run."""
    config, network = run.config, run.settings.network
    print(" ".join(f"{name}={value}" for name, value in run.values.items()))
    used, idle = run.mesh.size, jax.device_count() - run.mesh.size
    device = f"{used} x {jax.devices()[0].device_kind}"
    device += f" ({idle} idle: they do not divide an inner batch of {config.inner_batch} sequences)" if idle else ""
    tokens = corpus.meta["train_tokens"]
    inner = f"{run.settings.inner_steps} x {config.inner_batch} x {network.context}"
    print(f"{run.parameters:,} parameters on {device}; {tokens:,} training tokens in {config.data}")
    print(f"{config.steps} outer steps of {config.batch:,} tokens: {inner} (inner batches, sequences, positions)")
    epochs = run.batches * config.inner_batch / data.windows(corpus.train, network.context)
    if epochs > 1:
        print(f"the run reads {run.batches * run.inner_tokens:,} tokens: the corpus {epochs:.1f} times")


@contextmanager
def bar(live, title, batches, done=0):
    """A bar over the tokens of so many inner batches, with tokens/s and time left; in the first process only."""
    inner, silent = live.run.inner_tokens, jax.process_index() > 0 or None  # None: where stderr is no terminal
    form = dict(unit="tok", unit_scale=True, leave=False, disable=silent)
    with tqdm(total=batches * inner, initial=done * inner, desc=title, **form) as shown:
        live.bars.append(shown)
        try:
            yield
        finally:
            live.bars.remove(shown)


def summary(run, rows):
    """Says what the run came to."""
    last, seconds = rows[-1], sum(row["seconds"] or 0 for row in rows)
    loss, bits, tokens, search = (last[name] for name in ("val_loss", "val_bpb", "tokens", "tokens_line_search"))
    print(f"validation loss {loss:.4f}, {bits:.4f} bits a byte, after {last['step']} outer steps")
    print(f"{tokens:,} tokens, {search:,} of them for line search; {seconds:.0f} s, evaluation not included")
    print(f"{sum(row['input_wait'] for row in rows) / max(seconds, 1e-9):.1%} of that time was spent waiting for input")
    refused = sum(row["refused"] or 0 for row in rows)
    if refused:
        print(f"{refused} steps were refused, as no step size lowered the loss: try a smaller --lr")
    if run.config.target_loss:
        print(f"target loss {run.config.target_loss} {reached(run, rows)}")
    print(f"{run.config.out}: config.json, log.jsonl, checkpoint.npz")


def reached(run, rows):
    """Whether the target loss was reached, and after how much (Section 6.1.1)."""
    last = rows[-1]
    if last["val_loss"] > run.config.target_loss:
        return "not reached"
    return f"reached after {last['step']} outer steps, {last['tokens']:,} tokens"


def grid(runs, results):
    """The runs of a grid by their last validation loss, with the flags in which they differ; results: rows, or None."""
    names = dict.fromkeys(name for run in runs for name in run.values if name != "out")
    differ = [name for name in names if len({run.values.get(name) for run in runs}) > 1]
    last = lambda rows: rows[-1]["val_loss"] if rows else float("inf")
    end = lambda row: [f"{row['val_loss']:.4f}", str(row["step"]), f"{row['tokens']:,}"]
    table = [["val_loss", "step", "tokens", *differ, "folder"]]
    for run, rows in sorted(zip(runs, results, strict=True), key=lambda pair: last(pair[1])):
        cells = end(rows[-1]) if rows else ["diverged", "-", "-"]
        table.append([*cells, *(str(run.values.get(name, "-")) for name in differ), run.config.out])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print()
    for *cells, folder in table:
        print(*(cell.rjust(width) for cell, width in zip(cells, widths, strict=False)), folder, sep="  ")
