"""Runs packed into one file, in which results are kept: a line for each run.

    {"config": {..}, "about": {..}, "columns": {"step": [0, 1, ..], "val_loss": [2.37, 2.29, ..]}}

config and about are what config.json of the run's folder holds, but for what `shorten` leaves out.
Of the text's path only the last part is kept. columns are the rows of its log.jsonl, with fewer
digits of each number, as `shorten` says. Each name stands there once, and not in every row, which
halves the file. What a row lacks is null.
"""

import itertools
import json
import os
from pathlib import Path

from runtime import checkpoint, files

START = b'{"config":'  # of each line

# Numbers of a row that follow from others: the learning rate from the flags, and the bits per byte
# from val_loss, by a factor that is the same for all runs on a text.
IMPLIED = ("lr", "val_bpb")
USUALLY_ZERO = ("refused", "input_wait")

# What `about` says of JAX's own settings where nobody has changed one.
USUAL_SETTINGS = {
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
}

# How many digits are kept of numbers whose names begin so. No more are ever shown of them.
DIGITS = {"seconds": 3, "joules": 3, "norm_": 3, "train_loss": 5, "inner_loss": 5, "loss_at_": 5}
DIGITS_OF_OTHERS = 6


def is_packed(path):
    """Whether a file looks as if it had packed runs."""
    path = Path(path)
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(START)) == START


def pack(folder):
    """The run of a folder, {"config": .., "about": .., "rows": ..}.

    A run that has no row yet, and so maybe no config.json, has all three empty. Raises one of
    files.UNREADABLE if the run is damaged.
    """
    rows = checkpoint.read_log(folder)
    if not rows:
        return {"config": {}, "about": {}, "rows": []}
    saved = checkpoint.read_config(folder)
    text = Path(os.path.abspath(saved["config"]["data"])).name
    config = saved["config"] | {"data": text}
    return checked({"config": config, "about": saved["about"], "rows": rows})


def checked(run):
    """The run. Raises ValueError if it has not what every run has."""
    if not (isinstance(run["config"], dict) and isinstance(run["about"], dict)):
        raise ValueError("config and about must be dicts")
    for row in run["rows"]:
        if not isinstance(row, dict) or "step" not in row:
            raise ValueError("a row has no step")
        if not row.keys() & {"val_loss", "diverged"}:
            raise ValueError("a row has no loss")
    return run


def read(path):
    """The runs of a file; an empty list if there is no such file. Raises ValueError if damaged."""
    path = Path(path)
    if not path.exists():
        return []
    return [parse(line, place) for place, line in places_and_lines(path)]


def places_and_lines(path):
    """A list of (place, line) of a file; a place is such as "results/tiny.jsonl:3"."""
    content = Path(path).read_bytes().splitlines()
    return [(f"{path}:{number}", line) for number, line in enumerate(content, 1)]


def parse(line, place):
    """The run of a line. Raises ValueError if it is none."""
    try:
        saved = json.loads(line)
        rows = rows_of(saved["columns"])
        return checked({"config": saved["config"], "about": saved["about"], "rows": rows})
    except files.UNREADABLE:
        raise ValueError(f"{place} is no packed run") from None


def rows_of(columns):
    """The rows of a log, [{name: number}], from {name: its numbers in all rows, or null}."""
    rows = []
    for numbers in zip(*columns.values(), strict=True):
        row = dict(zip(columns, numbers, strict=True))
        rows.append({name: number for name, number in row.items() if number is not None})
    return rows


def columns_of(rows):
    """The inverse of `rows_of`."""
    names = dict.fromkeys(itertools.chain.from_iterable(rows))  # in order, each once
    return {name: [row.get(name) for row in rows] for name in names}


def add(path, runs):
    """Adds runs to a file after those that it has, and makes the file if there is none.

    Runs that it has are not added again. Returns how many were added. Raises ValueError if what the
    file has is damaged.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with files.locked(f"{path}.lock"):
        kept = [shorten(run) for run in read(path)]
        before = len(kept)
        for run in map(shorten, runs):
            if run not in kept:
                kept.append(run)
        text = "".join(map(format_line, kept))
        files.write_text(path, text)
    return len(kept) - before


def format_line(run):
    """The line of a run, as `parse` reads it."""
    saved = {"config": run["config"], "about": run["about"], "columns": columns_of(run["rows"])}
    return json.dumps(saved, separators=(",", ":")) + "\n"  # without spaces, a tenth shorter


def shorten(run):
    """A run without what it need not say, and with fewer digits of its numbers.

    Numbers keep as many digits as DIGITS says; `input_wait` is rounded to a tenth of a second. Then
    nulls are left out, numbers that are IMPLIED, and a zero of those that are USUALLY_ZERO. Of
    `about`, the USUAL_SETTINGS are left out.
    """
    about = dict(run["about"])
    if about.get("jax_settings") == USUAL_SETTINGS:
        del about["jax_settings"]
    rows = []
    for row in run["rows"]:
        kept = {}
        for name, value in row.items():
            short = shorten_number(name, value)
            if must_be_kept(name, short):
                kept[name] = short
        rows.append(kept)
    return run | {"about": about, "rows": rows}


def must_be_kept(name, value):
    """Whether a number of a row says what nothing else does."""
    if name in USUALLY_ZERO:
        return bool(value)
    return value is not None and name not in IMPLIED


def shorten_number(name, value):
    """A number of a row with fewer digits if it is not whole; anything else as it is."""
    if not isinstance(value, float):
        return value
    if name == "input_wait":
        return round(value, 1)
    digits = DIGITS_OF_OTHERS
    for beginning, fewer in DIGITS.items():
        if name.startswith(beginning):
            digits = fewer
    return float(f"{value:.{digits}g}")
