"""Runs packed into one file, in which results are kept: a line for each run.

    {"config": {..}, "about": {..}, "rows": [{..}, ..]}

config and about are what config.json of the run's folder holds. Of the text's path only the last
part is kept. rows are those of its log.jsonl: numbers with six digits, and none that are null.
"""

import json
import os
from pathlib import Path

from runtime import checkpoint, files

START = b'{"config": '  # of each line


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
    return {"config": config, "about": saved["about"], "rows": rows}


def read(path):
    """The runs of a file, a list; none if there is no such file. Raises ValueError if damaged."""
    path = Path(path)
    if not path.exists():
        return []
    return [parse(line, place) for place, line in lines(path)]


def lines(path):
    """The lines of a file and their places in it, such as "results/tiny.jsonl:3"."""
    content = Path(path).read_text(encoding="utf-8").splitlines()
    return [(f"{path}:{number}", line) for number, line in enumerate(content, 1)]


def parse(line, place):
    """The run of a line. Raises ValueError if it is none."""
    try:
        run = json.loads(line)
        rows = run["rows"]
        parts = [run["config"], run["about"], *rows]
        is_run = isinstance(rows, list) and {type(part) for part in parts} == {dict}
    except files.UNREADABLE:
        is_run = False
    if not is_run:
        raise ValueError(f"{place} is no packed run")
    return run


def add(path, runs):
    """Adds runs to a file behind those that it has, and makes the file if there is none.

    Runs that it has are not added again. Returns how many were added. Raises ValueError if what the
    file has is damaged.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with files.locked(f"{path}.lock"):
        kept = read(path)
        before = len(kept)
        for run in map(shorten, runs):
            if run not in kept:
                kept.append(run)
        text = "".join(json.dumps(run) + "\n" for run in kept)
        files.write_file(path, lambda file: file.write(text.encode()))
    return len(kept) - before


def shorten(run):
    """A run without the nulls in its rows, and with six digits of each number."""
    rows = []
    for row in run["rows"]:
        numbers = {}
        for name, value in row.items():
            if value is not None:
                numbers[name] = shorten_number(value)
        rows.append(numbers)
    return run | {"rows": rows}


def shorten_number(value):
    """Six digits of a number that is not whole; anything else as it is."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
