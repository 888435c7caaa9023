"""Runs that are killed (-9) and gone on with: at random moments, `python tests/runtime/kill.py 20`, or, `python tests/runtime/kill.py`,
at each of the moments that count, one after another: before every rename, link, removal and sync of a file.

Each ends, in every array bitwise, where a run ends that was left alone. Status 1 where one does not.
"""

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
FLAGS = "--model tiny --d-model 16 --d-ff 32 --n-layers 1 --n-heads 2 --n-kv-heads 2 --context 16 --batch 2048 --seed 1"
FLAGS += " --inner-batch 4 --tokens 40k --eval-tokens 640 --eval-every 3 --steps 8 --save-every 0.0001 --data text.txt"


def command(method, out):
    """Saves after nearly every inner step, so that a kill often comes while one is written."""
    return [
        sys.executable,
        str(ROOT / "train.py"),
        "--method",
        method,
        *FLAGS.split(),
        "--out",
        out,
    ]


def write_text():
    lines = (
        f"{i} {i * i} the cat sat on mat {i % 7}\n" + "\n" * (i % 50 == 49) for i in range(4000)
    )
    Path("text.txt").write_text("".join(lines))


def end(out):
    """The final arrays, and the log without times."""
    with np.load(Path(out) / "checkpoint.npz", allow_pickle=False) as arrays:
        arrays = {name: arrays[name].tobytes() for name in arrays}
    rows = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    return arrays, [
        {k: v for k, v in row.items() if k not in ("seconds", "input_wait")} for row in rows
    ]


def survive(kills, methods=("gn", "muon", "layerwise_gn", "gn_prox"), seed=0):
    """Of each kill: (method, seconds after which it came, whether it hit, files that are left, if the end is right).

    In the current folder, which should be an empty one.
    """
    rng, alone, seen, env = random.Random(seed), {}, [], os.environ | {"JAX_PLATFORMS": "cpu"}
    write_text()

    def forget():  # or all but the first run would find the warm-up made
        for path in Path("data").glob("warmup-*"):
            path.unlink()

    finish = lambda method, out: subprocess.run(
        command(method, out), capture_output=True, text=True, env=env
    )
    for i in range(kills):
        method = methods[i % len(methods)]
        if method not in alone:
            for name in (
                f"first-{method}",
                f"alone-{method}",
            ):  # the first one fills the cache of compiled programs
                forget()
                start = time.monotonic()
                done = finish(method, name)
                assert done.returncode == 0, done.stderr
            alone[method] = end(f"alone-{method}"), time.monotonic() - start
        expected, usual = alone[method]
        out = f"{method}-{i}"
        forget()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command(method, out), env=env, **quiet)
        wait = rng.uniform(0.4, 0.98) * usual
        time.sleep(wait)
        process.kill()
        hit = process.wait() < 0
        left = sorted(path.name for path in Path(out).glob("*")) if Path(out).exists() else []
        done = finish(method, out)
        right = (
            done.returncode == 0 and end(out) == expected and not list(Path(".").rglob("*.draft"))
        )
        seen.append((method, wait, hit, left, right))
        how = "the same end" if right else done.stderr or "ANOTHER END"
        when = f"killed after {wait:4.1f} s" if hit else "done before it was killed"
        print(f"{method:13} {when}, left {', '.join(left) or 'nothing'}: {how}", flush=True)
    return seen


def die_at(point, words):
    """train.py's main, killed before its change number `point` of what is on disk; 0: prints how many it makes."""
    count = itertools.count(1)

    def counted(original):
        return lambda *args, **options: (
            next(count) == point and os.kill(os.getpid(), 9) or original(*args, **options)
        )

    for name in ("replace", "link", "unlink", "fsync"):
        setattr(os, name, counted(getattr(os, name)))
    sys.path.insert(0, str(ROOT))
    import train

    status = train.main(words)
    print(next(count) - 1)
    return status


def points(every=1):
    """Of a kill at every so many-th point: (point, whether it hit, if the end is right). In an empty current folder."""
    write_text()
    seen, env = [], os.environ | {"JAX_PLATFORMS": "cpu"}
    flags = [
        *FLAGS.split(),
        *"--steps 1 --tokens 2k --batch 192".split(),
    ]  # of a flag given twice the last one counts

    def start(point, out):
        """From nothing but compiled programs."""
        for path in Path("data").glob("[!c]*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return go_on(point, out)

    def go_on(point, out):
        words = [
            sys.executable,
            __file__,
            "at",
            str(point),
            "--method",
            "muon",
            *flags,
            "--out",
            out,
        ]
        return subprocess.run(words, capture_output=True, text=True, env=env)

    start(0, "first")
    number = int(start(0, "alone").stdout.split()[-1])
    expected = end("alone")
    for point in range(1, number + 1, every):
        hit = start(point, f"at-{point}").returncode == -9
        done = go_on(0, f"at-{point}")
        right = (
            done.returncode == 0
            and end(f"at-{point}") == expected
            and not list(Path(".").rglob("*.draft"))
        )
        seen.append((point, hit, right))
        print(
            f"point {point:3} of {number}: {'the same end' if right else done.stderr or 'ANOTHER END'}",
            flush=True,
        )
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
