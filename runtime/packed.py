"""Runs packed into one file, in which results are kept: a line for each run.

    {"config": {..}, "about": {..}, "rows": [{..}, ..]}

config and about are what config.json of the run's folder holds; of the path of a text, its name is
kept. rows are those of its log.jsonl; a number that a row lacks, null in the log, is left out.
"""

import json
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
    rows = []
    for row in checkpoint.read_log(folder):
        rows.append({name: value for name, value in row.items() if value is not None})
    if not rows:
        return {"config": {}, "about": {}, "rows": []}
    saved = checkpoint.read_config(folder)
    config = saved["config"] | {"data": Path(saved["config"]["data"]).name}
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
        dict(run["config"]), dict(run["about"]), list(run["rows"])
    except files.UNREADABLE:
        raise ValueError(f"{place} is no packed run") from None
    return run


def add(path, runs):
    """Adds runs to a file behind those that it has, and makes the file if there is none.

    Raises ValueError if what the file has is damaged.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with files.locked(f"{path}.lock"):
        text = "".join(json.dumps(run) + "\n" for run in [*read(path), *runs])
        files.write_file(path, lambda file: file.write(text.encode()))
