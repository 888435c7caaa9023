"""Runs that are killed (-9) at random moments, saving included, and gone on with: `python tests/kill.py 20`.

Each ends, in every array bitwise, where a run ends that was left alone. Status 1 where one does not.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FLAGS = "--model tiny --d-model 16 --d-ff 32 --n-layers 1 --n-heads 2 --n-kv-heads 2 --context 16 --batch 2048 --seed 1"
FLAGS += " --inner-batch 4 --tokens 40k --eval-tokens 640 --eval-every 3 --steps 8 --save-every 0.0001 --data text.txt"


def command(method, out):
    """Saves after nearly every inner step, so that a kill often comes while one is written."""
    return [sys.executable, str(ROOT / "train.py"), "--method", method, *FLAGS.split(), "--out", out]


def end(out):
    """The final arrays, and the log without times."""
    with np.load(Path(out) / "checkpoint.npz", allow_pickle=False) as arrays:
        arrays = {name: arrays[name].tobytes() for name in arrays}
    rows = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    return arrays, [{k: v for k, v in row.items() if k not in ("seconds", "input_wait")} for row in rows]


def survive(kills, methods=("gn", "muon", "layerwise_gn", "gn_prox"), seed=0):
    """Of each kill: (method, seconds after which it came, whether it hit, files that are left, if the end is right).

    In the current folder, which should be an empty one.
    """
    rng, alone, seen, env = random.Random(seed), {}, [], os.environ | {"JAX_PLATFORMS": "cpu"}
    lines = (f"{i} {i * i} the cat sat on mat {i % 7}\n" + "\n" * (i % 50 == 49) for i in range(4000))
    Path("text.txt").write_text("".join(lines))

    def forget():  # or all but the first run would find the warm-up made
        for path in Path("data").glob("warmup-*"):
            path.unlink()

    finish = lambda method, out: subprocess.run(command(method, out), capture_output=True, text=True, env=env)
    for i in range(kills):
        method = methods[i % len(methods)]
        if method not in alone:
            for name in (f"first-{method}", f"alone-{method}"):  # the first one fills the cache of compiled programs
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
        right = done.returncode == 0 and end(out) == expected and not list(Path(".").rglob("*.draft"))
        seen.append((method, wait, hit, left, right))
        how = "the same end" if right else done.stderr or "ANOTHER END"
        when = f"killed after {wait:4.1f} s" if hit else "done before it was killed"
        print(f"{method:13} {when}, left {', '.join(left) or 'nothing'}: {how}", flush=True)
    return seen


def main(kills):
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        seen = survive(kills)
        os.chdir(ROOT)
    wrong = sum(not right for *_, right in seen)
    print(f"{kills} kills, {wrong} runs that did not end as one that was left alone")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
