"""Makes the experiments of RESULTS.md: `python experiments.py tiny` trains what is missing of one.

An experiment is a list of commands of train.py, many of them grids. Its runs are made one after
another. A run that has come to its end, or has diverged, is added to the file results/NAME.jsonl,
and a run that this file has is not made again. So an experiment can be made in pieces: the same
command goes on where the last one stopped, and on another machine if it has that file.

    python experiments.py                           lists the experiments and what is missing
    python experiments.py tiny                      makes what is missing of one
    python experiments.py small --data TEXT --minutes 9         stops, and saves, after 9 minutes
    python experiments.py --pack results/my.jsonl runs/*        packs runs that train.py made

`python plot.py results/*` draws them all, and writes the figures and tables of the pages anew.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import jax

import comparison
import train
from runtime import flags, packed, parallel
from runtime.command import blaming_input, command, say


class Experiment(NamedTuple):
    """Runs that answer a question."""

    question: str
    common: str  # flags of all its commands
    commands: str  # the other flags of train.py: a line for each run or grid


TINY = "--model tiny --steps 20 --dtype float32"
TINY_GRIDS = """
--method gn --schedule 'global cosine' --lr 0.003,0.01,0.015,0.02,0.03
--method gn --schedule 'constant+inner cosine' --lr 0.003,0.01,0.03
--method gn --schedule 'global+inner cosine' --lr 0.01
--method gn --schedule 'global cosine' --lr 0.02 --momentum 0.9 --damping 0,0.001
--method gn --schedule 'global cosine' --lr 0.003,0.01 --inner adamw
--method gn_prox --schedule 'global cosine' --average 0.99 --lr 0.01,0.015,0.02,0.03
--method gn_prox --schedule 'global cosine' --average 0,0.999 --lr 0.01
--method gn_prox --schedule 'constant+inner cosine' --average 0.99 --lr 0.01,0.02
--method layerwise_gn --schedule 'global cosine' --lr 0.003,0.01,0.015,0.02,0.03,0.05
--method layerwise_gn --schedule 'constant+inner cosine' --lr 0.003,0.01
--method layerwise_gn --schedule 'global cosine' --lr 0.01 --objective exact
--method soap --schedule constant --b2 0.7 --warmup-steps 10 --average 0.3 --lr 0.02,0.03,0.05
--method soap --schedule constant --b2 0.7 --warmup-steps 6 --average 0.3 --lr 0.02,0.04
--method soap --schedule constant --b2 0.7 --warmup-steps 6 --average 0,0.5 --lr 0.01,0.03
--method soap --schedule constant --b2 0.9 --warmup-steps 6 --lr 0.01,0.03,0.1
--method soap --schedule constant,cosine --b2 0.9 --lr 0.01,0.03
--method soap --schedule constant --b1 0.95 --b2 0.9 --warmup-steps 10 --average 0.3 --lr 0.02,0.03
--method muon --schedule constant --momentum 0.9 --warmup-steps 6 --average 0.4 --lr 0.05,0.06,0.07
--method muon --schedule constant --momentum 0.9 --warmup-steps 6 --average 0.4 --lr 0.08,0.1,0.15
--method muon --schedule constant --momentum 0.9 --warmup-steps 6 --lr 0.05,0.07,0.1
--method muon --schedule constant --momentum 0.9 --warmup-steps 10 --average 0.4 --lr 0.06,0.08
--method muon --schedule constant --momentum 0.95 --warmup-steps 6 --average 0.3 --lr 0.07,0.1
--method muon --schedule cosine --momentum 0.9 --warmup-steps 6 --lr 0.07,0.1,0.15
--method adamw --schedule constant --b2 0.99 --warmup-steps 10 --average 0.3 --lr 0.01,0.015
--method adamw --schedule constant --b2 0.99 --warmup-steps 10 --lr 0.005,0.01,0.015,0.02
--method adamw --schedule constant --b2 0.99 --warmup-steps 14 --lr 0.005,0.01,0.015
--method adamw --schedule constant --b2 0.95 --warmup-steps 6 --average 0,0.5 --lr 0.01,0.03
--method adamw --schedule cosine --b2 0.95 --warmup-steps 6 --lr 0.01,0.03
"""

EXPERIMENTS = {
    "tiny": Experiment(
        "How many steps does each method need, at the best settings of tiny-grids?",
        TINY,
        "--method gn,gn_prox,layerwise_gn,soap,muon,adamw --seed 0,1,2",
    ),
    "tiny-variants": Experiment(
        "Where should an inner loop start, and is one pass over a batch enough (Section 5.1)?",
        TINY,
        "--method gn --restart false,true --inner-epochs 1,2 --seed 0,1,2",
    ),
    "tiny-grids": Experiment("What is the best setting of each method?", TINY, TINY_GRIDS),
}

# Flags that do not decide whether a run of the file is the one that is asked for. The file says
# which text a run has read; on another machine, the path of the same text is another one.
IGNORED = ("out", "data", "tokens", "micro_batch", "save_every")


# ---- what there is to do -------------------------------------------------------------------------


def results_of(name):
    """The file of an experiment."""
    return Path(f"results/{name}.jsonl")


def runs_of(name, data=None):
    """The runs of an experiment: {folder: (words, run)}, words being the command line of train.py.

    data: the text that they read, if another than their commands name. Raises ValueError if a
    command is not valid.
    """
    experiment = EXPERIMENTS[name]
    home = f"runs/{name}"
    found = {}
    for line in experiment.commands.strip().splitlines():
        words = shlex.split(f"{experiment.common} {line}")
        if data:
            words += ["--data", data]
        for one in flags.expand(words):
            run = train.configure(one, home)
            found[run.config.out] = ([*one, "--out", run.config.out], run)
    return found


def missing(name, data=None):
    """The command lines of the runs that the file of an experiment does not have."""
    done = packed.read(results_of(name))
    lines = []
    for words, run in runs_of(name, data).values():
        if not any(is_of(saved, run) for saved in done):
            lines.append(words)
    return lines


def is_of(saved, run):
    """Whether a packed run has the flags of a Run."""
    asked = json.loads(json.dumps(run.values))  # as JSON has it
    then = saved["config"]
    return all(then.get(name) == asked[name] for name in asked if name not in IGNORED)


# ---- doing it ------------------------------------------------------------------------------------


def make(name, data, minutes):
    """Makes the missing runs of an experiment. Returns the exit status of the last one."""
    lines = missing(name, data)
    if minutes:
        stop_after(60 * minutes)
    for number, words in enumerate(lines, 1):
        jax.clear_caches()  # a process on a CPU can map only so many compiled programs
        folder = words[-1]
        print(f"\n==== {name}: run {number} of {len(lines)} that are missing: {folder}")
        status = train.main(words)
        run = packed.pack(folder)
        if has_ended(run):
            packed.add(results_of(name), [run])
        elif status:
            return status
    print(f"{name}: {results_of(name)} has all its runs")
    return 0


def has_ended(run):
    """Whether a packed run is at its end, has come to its target, or has diverged."""
    if not run["rows"]:
        return False
    last = run["rows"][-1]
    if "diverged" in last or last["step"] == run["config"]["steps"]:
        return True
    return last["val_loss"] <= (run["config"]["target_loss"] or 0)


def stop_after(seconds):
    """Sends this process SIGTERM after a time, at which train.py saves its run and stops."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True  # it does not keep the process alive
    timer.start()


def pack(path, folders):
    """Adds the runs of some folders to a file, but for those that it has."""
    added = []
    done = packed.read(path)
    for place, unpack in comparison.find_runs(folders):
        run = unpack()
        if not run["rows"]:
            say(f"{place} has no row yet")
        elif run in done:
            say(f"{place} is there already")
        else:
            added.append(run)
    packed.add(path, added)
    print(f"{path}: {len(added)} runs were added to {len(done)}")


def show():
    """Lists the experiments, with what they ask and how many of their runs are missing."""
    for name, experiment in EXPERIMENTS.items():
        runs = len(runs_of(name))
        print(f"{name}: {runs - len(missing(name))} of {runs} runs. {experiment.question}")


# ---- the command line ----------------------------------------------------------------------------


def parse(words):
    """The command line. Raises ValueError for what is not valid."""
    usage = "experiments.py [NAME [--data PATH] [--minutes M]] [--pack FILE RUN ...]"
    form = argparse.RawDescriptionHelpFormatter
    parser = flags.Parser(usage=usage, description=__doc__, formatter_class=form)
    parser.add_argument("name", nargs="?", choices=EXPERIMENTS, help="an experiment")
    parser.add_argument("--data", help="the text, where an experiment reads one of your own")
    parser.add_argument("--minutes", type=float, help="stop after so many; 0 = never [default 0]")
    parser.add_argument("--pack", nargs="+", metavar=("FILE", "RUN"), help="add runs to a file")
    options = parser.parse_args(words)
    if options.minutes is not None:
        flags.check_range(options, ["minutes"], least=0)
    return options


@command
def main(words):
    """Runs the command line."""
    with blaming_input():
        options = parse(words)
        if options.pack:
            file, *folders = options.pack
            pack(file, folders)
            return 0
        parallel.start()  # before train.py asks JAX for devices
        if not options.name:
            show()
            return 0
    return make(options.name, options.data, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
