"""Memory of preparing a text and of training on it, at two sizes of it: `python tests/text/memory.py`.

Commands whose largest memory is printed, each a process of its own: data.py, and train.py (tiny, two steps) with five
seeds, on a text of 60 MB and on one of 240 MB, in C4's format.
"""

import gzip
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from text import documents  # noqa: E402  the project's modules lie one folder up

FLAGS = "--method gn --model tiny --steps 2 --tokens 1m --tokenizer bytes"


def write(path, megabytes):
    """A file in C4's format: the words of the standard library, lines in random order."""
    rng, lines = (
        random.Random(0),
        "".join(documents.sources("stdlib")[0].read()).splitlines(keepends=True),
    )
    with gzip.open(path, "wt", compresslevel=1) as f:
        for _ in range(megabytes * 1000):
            text = "".join(itertools.islice(iter(lambda: rng.choice(lines), ""), 25))
            f.write(json.dumps({"text": text}) + "\n")


def peak(*command):
    """MiB that a command and its largest child needed."""
    process = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return usage.ru_maxrss / 2 ** (10 if sys.platform == "linux" else 20)


def main():
    """Prints the table."""
    print("megabytes of text   MiB of data.py   MiB of train.py")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for megabytes in (1, 60, 240):
            path = f"{megabytes}.json.gz"
            write(path, megabytes)
            if (
                megabytes == 1
            ):  # it compiles; the others find the programs, or the first would need more
                peak(ROOT / "train.py", *FLAGS.split(), "--data", path)
                continue
            size = sum(len(text) for text in documents.sources(path)[0].read()) / 1e6
            prepared = peak(ROOT / "data.py", path, "--tokenizer", "bytes")
            trained = sorted(
                peak(ROOT / "train.py", *FLAGS.split(), "--data", path, "--seed", seed)
                for seed in range(5)
            )
            print(
                f"{size:17.0f} {prepared:16.1f}   {', '.join(f'{x:.0f}' for x in trained)}",
                flush=True,
            )
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
