"""Kills runs (kill -9) and resumes them: every end must be bitwise that of a run left alone.

    python tests/runtime/kill.py       a kill at each moment that counts, one after another: before
                                       every rename, link, removal and sync of a file
    python tests/runtime/kill.py 20    20 kills at random moments

The text is eight files in C4's format, each a group of its own, which are tokenized while a run
reads them. The exit status is 1 if an end is another one.
"""

import gzip
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "--model tiny --d-model 16 --d-ff 32 --n-layers 1 --n-heads 2 --n-kv-heads 2 --context 16"
BATCHES = "--batch 2048 --inner-batch 4 --warmup-tokens 2k --steps 8 --data ./c4 --seed 1"
SAVES = "--eval-tokens 640 --eval-every 3 --save-every 0.0001"  # after nearly every inner step
FLAGS = f"{NETWORK} {BATCHES} {SAVES}".split()
# Of a flag that is given twice, the last one counts.
SHORT = "--steps 1 --warmup-tokens 128 --batch 192"
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}


def command(method, out):
    """The words of a training command that is left alone."""
    return [sys.executable, __file__, "at", "0", "--method", method, *FLAGS, "--out", out]


def finish(words):
    """Runs a command to its end."""
    return subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT)


def write_text():
    """Eight files of training documents, and one of validation."""
    Path("c4").mkdir()
    for number in range(9):
        lines = []
        for i in range(100):
            i += 100 * number
            text = f"{i} {i * i} the cat sat on mat {i % 7}\n" * 3
            lines.append(json.dumps({"text": text, "url": "x"}) + "\n")
        name = f"c4-train.{number}.json.gz" if number < 8 else "c4-validation.0.json.gz"
        with gzip.open(Path("c4", name), "wt", encoding="utf-8") as file:
            file.write("".join(lines))


def forget_data():
    """Removes token files and warm-ups, but no compiled programs: each run makes its own."""
    for path in Path("data").glob("[!c]*"):
        path.unlink()
    for path in Path("data").glob("c4-*"):
        shutil.rmtree(path)


def end(out):
    """The final arrays of a run, and its log without times."""
    with np.load(Path(out) / "checkpoint.npz", allow_pickle=False) as arrays:
        arrays = {name: arrays[name].tobytes() for name in arrays}
    rows = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    for row in rows:
        del row["seconds"], row["input_wait"]
    return arrays, rows


def ends_right(done, out, expected):
    """Whether a finished command left the expected end, and no draft of a file."""
    no_drafts = not list(Path(".").rglob("*.draft"))
    return done.returncode == 0 and end(out) == expected and no_drafts


def alone(method):
    """The end of a run that is left alone."""
    forget_data()
    done = finish(command(method, f"alone-{method}"))
    assert done.returncode == 0, done.stderr
    return end(f"alone-{method}")


def survive(kills, methods=("gn", "muon", "layerwise_gn", "gn_prox"), seed=0):
    """Kills at random moments. For each: (whether it hit, files left, if the end is right).

    Each comes up to a second after a file appears. Works in the current folder, which should be
    empty.
    """
    rng = random.Random(seed)
    write_text()
    expected = {method: alone(method) for method in methods[:kills]}
    seen = []
    for i, method in zip(range(kills), itertools.cycle(methods), strict=False):
        out = f"{method}-{i}"
        forget_data()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command(method, out), env=ENVIRONMENT, **quiet)
        awaited = ("checkpoint.npz", "warmup.npz", "checkpoint.previous.npz")[i % 3]
        while process.poll() is None and not Path(out, awaited).exists():
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 1))
        process.kill()
        hit = process.wait() < 0
        left = sorted(path.name for path in Path(out).glob("*"))

        done = finish(command(method, out))
        right = ends_right(done, out, expected[method])
        seen.append((hit, left, right))
        when = f"killed after {awaited}" if hit else "done before it was killed"
        show(f"{method:13} {when}, left {', '.join(left) or 'nothing'}", done, right)
    return seen


def show(what, done, right):
    """Prints how a resumed run ended."""
    how = "the same end" if right else done.stderr or "ANOTHER END"
    print(f"{what}: {how}", flush=True)


def die_at(point, words):
    """Runs train.py's main, and kills it before its change number `point` of what is on disk.

    Point 0: not at all; prints how many changes it made.
    """
    count = itertools.count(1)

    def counted(original):
        def change(*args, **options):
            if next(count) == point:
                os.kill(os.getpid(), 9)
            return original(*args, **options)

        return change

    for name in ("replace", "link", "unlink", "fsync"):
        setattr(os, name, counted(getattr(os, name)))
    sys.path.insert(0, str(ROOT))
    import train
    from text import groups

    groups.GROUP = 1  # byte: every file is a group

    status = train.main(words)
    print(next(count) - 1)
    return status


def points(every=1):
    """Kills at every so many-th point. For each: (whether it hit, if the end is right).

    Works in the current folder, which should be empty.
    """
    write_text()

    def resume(point, out):
        words = [sys.executable, __file__, "at", str(point), "--method", "muon", *FLAGS]
        return finish([*words, *SHORT.split(), "--out", out])

    def start(point, out):
        """From nothing but compiled programs."""
        forget_data()
        return resume(point, out)

    start(0, "first")
    number = int(start(0, "alone").stdout.split()[-1])
    expected = end("alone")
    seen = []
    for point in range(1, number + 1, every):
        out = f"at-{point}"
        hit = start(point, out).returncode == -9
        done = resume(0, out)
        right = ends_right(done, out, expected)
        seen.append((hit, right))
        show(f"point {point:3} of {number}", done, right)
    return seen


def main(words):
    if words[:1] == ["at"]:
        return die_at(int(words[1]), words[2:])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        seen = survive(int(words[0])) if words else points()
        os.chdir(ROOT)
    wrong = sum(not right for *_, right in seen)
    print(f"{len(seen)} kills, {wrong} runs that did not end as one that was left alone")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
