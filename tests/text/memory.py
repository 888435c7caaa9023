"""Memory of preparing a text and of training on it: `python tests/text/memory.py`.

It does not grow with the text. For a text of 60 MB and one of 240 MB, in C4's format, the largest
memory of two commands is printed: of data.py, and of train.py (tiny, two steps), with five seeds.
"""

import gzip
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from text import documents  # noqa: E402  it is found below ROOT

FLAGS = "--method gn --model tiny --steps 2 --warmup-tokens 50k --tokenizer bytes"


def write(path, megabytes):
    """A file in C4's format: lines of the standard library in random order, 25 a document."""
    rng = random.Random(0)
    (source,) = documents.sources("stdlib")
    lines = "".join(source.read()).splitlines(keepends=True)
    with gzip.open(path, "wt", compresslevel=1, encoding="utf-8") as file:
        for _ in range(megabytes * 1000):
            text = "".join(rng.choices(lines, k=25))
            file.write(json.dumps({"text": text}) + "\n")


def write_in_process(path, megabytes):
    """Writes the file, and leaves this process small: `peak` is never less than what it has."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(write, (path, megabytes))


def peak(*command):
    """MiB that a command and its largest child needed."""
    words = [sys.executable, *map(str, command)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    unit = 2**10 if sys.platform == "linux" else 2**20
    return usage.ru_maxrss / unit


def peak_of_training(path, seed):
    return peak(ROOT / "train.py", *FLAGS.split(), "--data", path, "--seed", seed)


def main():
    """Prints the table."""
    print("megabytes of text   MiB of data.py   MiB of train.py")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_in_process("1.json.gz", 1)
        peak_of_training("1.json.gz", 0)  # it compiles; or the first below would need more
        for megabytes in (60, 240):
            path = f"{megabytes}.json.gz"
            write_in_process(path, megabytes)
            (source,) = documents.sources(path)
            size = sum(map(len, source.read())) / 1e6
            prepared = peak(ROOT / "data.py", path, "--tokenizer", "bytes")
            trained = sorted(peak_of_training(path, seed) for seed in range(5))
            shown = ", ".join(f"{mib:.0f}" for mib in trained)
            print(f"{size:17.0f} {prepared:16.1f}   {shown}", flush=True)
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
