"""Reads runs into one table, and finds which runs can be compared and which setting is best.

    task        what a loss is measured on: the network, the held-out text, the tokenizer, and how
                many held-out tokens are read. Losses of different tasks are never compared.
    comparison  runs of one task that answer one question. There are two kinds of question: which
                loss does a method come to after so many tokens? How many steps does it take to a
                target loss?
    group       runs that differ only in their seed: one setting of a method.

A run with --target-loss answers the second kind of question, any other run the first. The tokens
of a run are those of its outer steps as planned, `steps` times `batch`, without the warm-up and the
line search. Where --tokens was given in place of --steps, they are just that number. So a run of
25 batches of 120m and one of 75 batches of 40m both have 3b, although batches are rounded.

The best setting of a method and batch is found within one comparison. With a target loss, it is the
group that takes the fewest steps to it, a mean over seeds; of equals the one that reads the fewest
tokens, then the one with the smallest last loss. Without a target it is the group with the smallest
mean final loss. Three kinds of groups come after all others, in this order:

- groups with a run that does not come to the target;
- groups whose runs are all unfinished (of other groups, unfinished runs do not count);
- groups with a run that diverged.

Runs to a target compete whatever their planned length is: where the learning rate depends on the
length, it is a setting like others.
"""

import itertools
import json
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

import baselines
import gn
from recipe import METHODS, valid_flags
from runtime import checkpoint, files, packed
from runtime.command import say

# The columns of a log that are read.
MEASURED = ["step", "tokens", "tokens_line_search", "val_loss", "alpha", "seconds", "joules"]
NETWORK = ["model", "vocab_size", "context", "d_model", "d_ff", "n_layers", "n_heads", "n_kv_heads"]
NETWORK += ["mlp", "qk_norm"]
TASK = [*NETWORK, "tokenizer", "held_out", "eval_tokens"]  # or losses cannot be compared
# Flags that are no part of a setting. The text of a run is there as its hash, "data".
UNCOUNTED = ["out", "tokens", "eval_every", "save_every", "micro_batch", "corpus"]
USUAL_SHARE = 0.75  # the share of settings that must have a value to make it usual
SCHEDULES = {*gn.SCHEDULES, *baselines.SCHEDULES}


# ---- from files to a table -----------------------------------------------------------------------


def read_runs(paths):
    """The table of all runs: a row for each evaluation of each run, whose columns `read_run` tells.

    paths: of run folders, of folders that hold some, of files with packed runs. Says on standard
    error what is left out and why. Of two equal runs, the later counts. Raises ValueError if a path
    does not exist, if there is no run at all, or if none can be read.
    """
    rowless = []
    unreadable = []
    repeated = []
    logs = {}  # the rows of each run
    for source, unpack in find_runs(paths):
        try:
            run = unpack()
            if not run["rows"]:
                rowless.append(source)
                continue
            rows = read_run(run, source)
        except files.UNREADABLE as error:
            unreadable.append(f"{source} ({describe(error)})")
            continue
        run_hash = rows[0]["run"]
        if run_hash in logs:
            repeated.append(logs[run_hash][0]["source"])
        logs[run_hash] = rows

    say_left_out(rowless, "run has no row yet", "runs have no row yet")
    say_left_out(unreadable, "run cannot be read", "runs cannot be read")
    say_left_out(repeated, "run is there again, later", "runs are there again, later")
    if unreadable and not (logs or rowless):
        raise ValueError("there is no run that can be read")
    return pd.DataFrame(itertools.chain.from_iterable(logs.values()))


def find_runs(paths):
    """The runs of some paths, a list of (source, unpack).

    A source is the folder of a run, or its file and line, such as "results/tiny.jsonl:3". unpack()
    returns what packed.pack does, and raises one of files.UNREADABLE if this one run is damaged. A
    path that holds no run is named on standard error. Raises ValueError if a path does not exist,
    or if there is no run at all.
    """
    runs = []
    others = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        found = runs_of(path)
        if path.is_dir() and not found:
            for member in sorted(path.iterdir()):
                found += runs_of(member)
        runs += found
        if not found:
            others.append(path)
    if not runs:
        raise ValueError(f"there is no run in {', '.join(map(str, others))}")
    say_left_out(others, "is no run", "are no runs")
    return runs


def runs_of(path):
    """The run of a folder, or those packed into a file, as `find_runs` returns them."""
    found = []
    if packed.is_packed(path):
        for source, line in packed.places_and_lines(path):
            found.append((source, partial(packed.parse, line, source)))
    elif is_run(path):
        found.append((str(path), partial(packed.pack, path)))
    return found


def is_run(path):
    """Whether a path is the folder of a run, maybe one that is damaged or has only begun."""
    try:
        named = any((path / name).exists() for name in ("config.json", "log.jsonl"))
        return named or checkpoint.is_unborn(path)
    except PermissionError:
        return True  # reading it will say so


def describe(error):
    """An error in words, with its type where the words alone say little."""
    if isinstance(error, ValueError | OSError):
        return str(error)
    return repr(error)


def say_left_out(names, one, several):
    """Says on standard error what is left out and why, if there is anything; at most ten names."""
    names = [*map(str, names)]
    if not names:
        return
    why = one if len(names) == 1 else several
    named = ", ".join(names[:10])
    if len(names) > 10:
        named += f" and {len(names) - 10} more"
    say(f"{len(names)} {why}: {named}")


# ---- one run -------------------------------------------------------------------------------------


def read_run(run, source):
    """The rows of a run, a list of dicts: one for each evaluation.

    run: as packed.pack returns it; source: as `find_runs` names it.

    A row holds what was measured there (see MEASURED; NaN for what was not) and every flag except
    `tokens`, as a row's tokens are those read so far. These are added to the flags:

    method_rank     where the method is in METHODS
    inner_steps     inner batches in a batch
    inner_tokens    tokens in an inner batch
    inner_epochs    how often an outer step reads its batch
    outer_steps     outer steps of the whole run; of a run until its target those done so far
    has_inner_loop  whether the method takes an optimizer step on every inner batch
    length          tokens of the run, as planned; NaN for a run until its target
    text            the name of the text
    held_out        the hash of the text that evaluations read
    setting         the flags that make a setting, a dict
    task            a hash, equal for runs whose losses can be compared
    group           a hash, equal for runs that differ only in their seed
    run             a hash, equal for runs that do not differ
    target_loss     0 for a run without one
    device          that the run was made on, such as "gpu: NVIDIA H200"
    source          the folder of the run, or its file and line

    Flags that the run's config.json lacks are filled in, as it may be older than they are. Raises
    one of files.UNREADABLE if the run is damaged.
    """
    log = pd.DataFrame(run["rows"], columns=MEASURED, dtype=float)
    if not log.step.ge(0).all():
        raise ValueError("a row has no step")
    flags = fill_in(run["config"])
    flags |= work_out(flags, steps_done=int(log.step.max()))
    if flags.get("schedule") not in SCHEDULES:
        flags["schedule"] = None  # of a method of one's own; `setting` keeps its name
    flags["device"] = run["about"].get("device", "-")
    flags["source"] = source
    return [flags | measured for measured in log.to_dict("records")]


def fill_in(config):
    """The flags of a run, with the defaults of those that its config.json lacks.

    Raises ValueError if a number that is needed makes no sense.
    """
    method = config["method"]
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}")
    defaults = {name: flag.default for name, flag in valid_flags(method).items()}
    flags = defaults | config
    for name in ("batch", "inner_batch", "context"):
        flags[name] = check_count(name, flags[name])
    if flags["steps"] is not None:
        flags["steps"] = check_count("steps", flags["steps"])
    for name in ("lr", "warmup", "inner_warmup", "warmup_steps", "target_loss"):
        flags[name] = check_number(name, flags.get(name) or 0)  # 0: it has none, such as no target
    flags["seed"] = int(flags["seed"])
    return flags


def check_count(name, value):
    """The value as an int. Raises ValueError if it is not whole, not positive, or too large.

    From 2**53 on, a float does not hold every whole number.
    """
    count = int(value)
    if count != value or not 0 < count < 2**53:
        raise ValueError(f"{name} is {value!r}")
    return count


def check_number(name, value):
    """The value as a float. Raises ValueError if it is negative or not finite."""
    number = float(value)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{name} is {value!r}")
    return number


def work_out(flags, steps_done):
    """What follows from the flags of a run: see `read_run`."""
    inner_tokens = flags["inner_batch"] * flags["context"]
    worked_out = {
        "method_rank": list(METHODS).index(flags["method"]),
        "inner_tokens": inner_tokens,
        "inner_steps": max(1, round(flags["batch"] / inner_tokens)),
        "inner_epochs": check_count("inner_epochs", flags.get("inner_epochs", 1)),
        "outer_steps": flags["steps"] or steps_done,
        "has_inner_loop": "inner" in flags,  # only those methods have --inner, the inner optimizer
        "length": find_length(flags),
        "text": Path(flags["data"]).name,
        "held_out": held_out_of(flags),
    }

    task = [(flags | worked_out).get(name) for name in TASK]
    # Neither the name of the text nor that of the folder matters, if the text is the same.
    setting = {name: value for name, value in flags.items() if name not in UNCOUNTED}
    setting["data"] = files.digest(flags["corpus"])[:6]
    worked_out["setting"] = setting
    worked_out["task"] = files.digest(task)
    worked_out["group"] = files.digest(sorted((setting | {"seed": None}).items()))
    worked_out["run"] = files.digest(sorted(setting.items()))
    return worked_out


def held_out_of(flags):
    """The hash of the text that the evaluations of a run read."""
    return flags["corpus"]["val"]


def find_length(flags):
    """The tokens of a run's outer steps, as planned; NaN if it runs until its target."""
    if flags["steps"] is None:
        return float("nan")
    # A run has `tokens` only where its steps follow from them.
    return float(flags["tokens"] or flags["steps"] * flags["batch"])


# ---- comparisons ---------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Runs of one task that answer one question."""

    table: pd.DataFrame  # all their rows
    tokens: float | None = None  # they read so many tokens; None: they run to the target
    target: float | None = None  # a loss; None: they read so many tokens


def split_tasks(table):
    """{name: rows} of the tasks in a table. A name is made of the model, the text, the tokenizer.

    Where that does not tell two tasks apart, the later ones get a number.
    """
    tasks = {}
    for _, rows in table.groupby("task", sort=False):
        first = rows.iloc[0]
        name = f"{first.model}-{first.text}-{Path(str(first.tokenizer)).stem}"
        name = re.sub(r"[^\w.-]", "_", name)
        free, number = name, 1
        while free in tasks:
            number += 1
            free = f"{name}-{number}"
        tasks[free] = rows
    return tasks


def find_differences(table):
    """The flags in which the tasks of a table differ."""
    flags = table.drop_duplicates("task")[TASK].astype(str)
    return [name for name in TASK if flags[name].nunique() > 1]


def compare_at_tokens(table):
    """The Comparisons of runs without a target loss, the shortest first."""
    without_target = table[table.target_loss == 0].groupby("length")
    return [Comparison(rows, tokens=length) for length, rows in without_target]


def compare_to_targets(table, target=None):
    """The Comparisons of runs to a target loss, the largest loss first.

    If a target is given, there is one Comparison, of all runs that do not stop before it.
    """
    if target is not None:
        rows = table[table.target_loss <= target]  # also those without a target, which have 0
        return [Comparison(rows, target=target)] if len(rows) else []
    to_own_target = table[table.target_loss > 0].groupby("target_loss")
    return [Comparison(rows, target=loss) for loss, rows in to_own_target][::-1]


def choose_tokens(comparisons):
    """Of Comparisons at fixed tokens, the one that most methods have; of equals the longest.

    Methods with a run at its end count first, then those with any run that has not diverged. None
    if there is nothing to choose from.
    """

    def rank(comparison):
        best = keep_best(comparison)
        has_ended = best.step >= best.outer_steps
        return best.method[has_ended].nunique(), best.method.nunique(), comparison.tokens

    return max(comparisons, key=rank, default=None)


# ---- the best setting ----------------------------------------------------------------------------


def summarize_runs(comparison):
    """A table with a row for each run: the columns of its last row, and these:

    diverged          whether a loss was no number
    loss              the last loss
    steps_to_target   the step of the first evaluation with a loss at or below the target; NaN if
                      there is none, or if the run diverged
    tokens_to_target  tokens read by then; NaN like steps_to_target
    finished          whether nothing more is to come: the run is at its end or target, or diverged
    """
    table = comparison.table
    target = -np.inf if comparison.target is None else comparison.target
    finite = np.isfinite(table.val_loss).groupby(table.run).all()
    reached = table[table.val_loss <= target].groupby("run").first()

    runs = table.groupby("run", sort=False).tail(1).set_index("run")
    runs["diverged"] = ~finite
    runs["loss"] = runs.val_loss
    runs["steps_to_target"] = reached.step.reindex(runs.index).mask(runs.diverged)
    runs["tokens_to_target"] = reached.tokens.reindex(runs.index).mask(runs.diverged)
    at_end = runs.step.ge(runs.outer_steps) & runs.length.notna()
    runs["finished"] = at_end | runs.steps_to_target.notna() | runs.diverged
    return runs


def summarize_groups(comparison):
    """A table with a row for each group, the best first.

    Its columns are method, method_rank, batch, setting, and these:

    diverged, reached        whether a run diverged; whether all come to the target
    finished                 whether runs are finished; if so, only finished runs of it count
    loss, lowest, highest    final loss: the mean over runs, and the extremes
    step                     the last step, of the run that has come furthest
    tokens                   read by the last step, the mean over runs
    steps_to_target, tokens_to_target
                             means over runs of what `summarize_runs` tells; NaN if a run lacks it
    runs, seeds, steps_of_runs
                             lists with an element for each run, in the order of the seeds: run,
                             seed, and steps_to_target
    """
    runs = summarize_runs(comparison).reset_index()
    has_finished = runs.groupby("group").finished.transform("any")
    runs = runs[runs.finished | ~has_finished].sort_values("seed", kind="stable")
    groups = runs.groupby("group", sort=False).agg(
        method=("method", "first"),
        method_rank=("method_rank", "first"),
        batch=("batch", "first"),
        setting=("setting", "first"),
        diverged=("diverged", "any"),
        finished=("finished", "any"),
        loss=("loss", "mean"),
        lowest=("loss", "min"),
        highest=("loss", "max"),
        step=("step", "max"),
        tokens=("tokens", "mean"),
        steps_to_target=("steps_to_target", mean_of_all),
        tokens_to_target=("tokens_to_target", mean_of_all),
        runs=("run", list),
        seeds=("seed", list),
        steps_of_runs=("steps_to_target", list),
    )
    groups["reached"] = groups.steps_to_target.notna()

    # Without a target, all groups are equal in reached, steps_to_target and tokens_to_target.
    is_ascending = {
        "diverged": True,
        "finished": False,
        "reached": False,
        "steps_to_target": True,
        "tokens_to_target": True,
        "loss": True,
    }
    return groups.sort_values([*is_ascending], ascending=[*is_ascending.values()])


def mean_of_all(values):
    """The mean of values; NaN if one of them is."""
    return values.mean(skipna=False)


def keep_best(comparison):
    """The rows of the best group of each method and batch, in the order of METHODS and by batch.

    Groups that diverged, and unfinished runs beside finished ones, have no rows in it.
    """
    groups = summarize_groups(comparison)
    best = groups[~groups.diverged].drop_duplicates(["method", "batch"])
    return keep_groups(comparison, best)


def keep_groups(comparison, groups):
    """The rows of the runs that some groups list in `runs`, in the order of METHODS and by batch.

    With a target, the rows after it is reached are left out.
    """
    table = comparison.table
    table = table[table.run.isin(groups.runs.explode())]
    if comparison.target is not None:
        reached = (table.val_loss <= comparison.target).astype(int)
        reached_before = reached.groupby(table.run).cumsum() - reached
        table = table[reached_before == 0]
    return table.sort_values(["method_rank", "batch"])  # by several columns, a sort is stable


# ---- what a step is worth, and what it costs -----------------------------------------------------


def find_best_baselines(groups):
    """{batch: the best group of AdamW, Muon and SOAP there}; groups: the best come first."""
    found = {}
    for group in groups.itertuples():
        is_baseline = METHODS[group.method].module is baselines
        if is_baseline and group.finished and not group.diverged:
            found.setdefault(group.batch, group)
    return found


def count_steps_to_loss_of(comparison, baseline, group):
    """{seed: steps of a group's run to the last loss of the baseline's run with the same seed}.

    NaN for a run that does not come there. Seeds that one of the two lacks are left out.
    """
    goals = {}
    for rows in rows_of_runs(comparison, baseline):
        goals[rows.seed.iloc[0]] = rows.val_loss.iloc[-1]
    steps = {}
    for rows in rows_of_runs(comparison, group):
        seed = rows.seed.iloc[0]
        if seed in goals:
            steps[seed] = rows.step[rows.val_loss <= goals[seed]].min()
    return steps


def measure_cost(comparison, group):
    """What an outer step of a group costs, a dict; NaN where the logs do not tell.

    seconds         the median over the rows of its runs. A row after a resumption has only the time
                    since then; of a few such rows, the median does not change much
    joules          of the GPUs, likewise
    tokens          read in a step, a mean
    of_line_search  the share of them that the line search read
    device          of the first run

    Seconds and joules leave out the rows that tell of a run's first step, which compiles.
    """
    rows = pd.concat(rows_of_runs(comparison, group))
    device = rows.device.iloc[0]
    rows = rows[np.isfinite(rows.val_loss)]  # the last row of a run that diverged counts nothing
    changes = rows.groupby("run")[["step", "tokens", "tokens_line_search"]].diff()
    total = changes.sum(min_count=1)
    step_before = rows.step - changes.step  # that of the row before
    warm = rows[step_before >= 1]  # rows that do not tell of the first step of their run
    steps = changes.step[warm.index]
    return {
        "seconds": (warm.seconds / steps).median(),
        "joules": (warm.joules / steps).median(),
        "tokens": total.tokens / total.step,
        "of_line_search": total.tokens_line_search / total.tokens,
        "device": device,
    }


def rows_of_runs(comparison, group):
    """The rows of each run of a group that counts, a list of tables, by seed."""
    return [comparison.table[comparison.table.run == run] for run in group.runs]


# ---- the names of settings -----------------------------------------------------------------------


def label_groups(groups, usual=None):
    """A label for each row of a table with one row for each group: what tells it from others.

    It names the flags in which the groups of its method differ: "lr 0.01, schedule constant". It is
    "-" if they differ in nothing but their batch.

    usual: {method: {name: value}}, values that are not named; see `find_usual`. The label of a
    group that has all of them is "all as usual".
    """
    labels = pd.Series("-", index=groups.index)
    for method, of_method in groups.groupby("method"):
        names = find_varied([*of_method.setting])
        if not names:
            continue
        unnamed = (usual or {}).get(method, {})
        for group, setting in of_method.setting.items():
            words = []
            for name in names:
                value = setting.get(name)
                if name not in unnamed or json.dumps(value) != json.dumps(unnamed[name]):
                    words.append(describe_flag(name, value))
            labels[group] = ", ".join(words) or "all as usual"
    return labels


def find_usual(settings):
    """{name: value} of the flags that differ between settings, but have one value in most of them.

    Most are USUAL_SHARE or more. So of fewer than four settings, no value is usual.
    """
    usual = {}
    for name in find_varied(settings):
        # As JSON, because 1, 1.0 and True are equal in Python, and are several settings here.
        texts = [json.dumps(setting.get(name)) for setting in settings]
        text = max(texts, key=texts.count)
        if texts.count(text) >= USUAL_SHARE * len(texts) and text != "null":
            usual[name] = json.loads(text)
    return usual


def describe_flag(name, value):
    """A flag and its value in words, such as "inner batch 32"."""
    return f"{name.replace('_', ' ')} {format_value(value)}"


def find_varied(settings):
    """The flags in which settings, a list of dicts, differ, without the batch and the seed.

    The number of steps is one of them only if it differs for one batch, as it depends on that.
    """
    names = dict.fromkeys(itertools.chain.from_iterable(settings))
    varied = []
    for name in names:
        values = {json.dumps(setting.get(name)) for setting in settings}
        if len(values) > 1 and name not in ("batch", "steps", "seed"):
            varied.append(name)
    batches = {setting["batch"] for setting in settings}
    lengths = {(setting["batch"], setting["steps"]) for setting in settings}
    if len(lengths) > len(batches):
        varied.append("steps")
    return varied


def format_value(value):
    """The value of a flag in a few letters."""
    if value in ("", None):  # it was not given, such as --alphas, or did not exist yet
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
