"""Draws the paper's figures from runs: `python plot.py runs/*` writes into figures/.

Each figure is written as PNG and as SVG, if there are runs for it:

    loss          validation loss against outer steps and against tokens
    loss_to_3.25  the same of runs to the target loss 3.25 (Figure 1)
    costs         validation loss against the seconds and the energy that the outer steps took, if
                  all were measured, and on devices of one kind; costs_to_3.25 likewise
    methods       Gauss-Newton beside each of its two variants (Figure 3)
    batch         last loss of the runs that are at their end, and outer steps to a target loss,
                  against batch (Figures 2 and 6)
    schedules     learning rates (Figure 4)
    settings_gn   learning rates and losses of the settings of one method, side by side
    step_sizes    the step sizes that the line search chose (Figure 5)

The tables are printed, and written as tables.md: see tables.py. comparison.py reads the runs, and
tells which of them can be compared and which setting is the best. Which runs are shown:

- A folder of run folders, such as a grid's, stands for the runs in it. So does a file of packed
  runs (experiments.py). Where only such files are given, `python plot.py results/*.jsonl` also
  renews what the pages of this project show of them (pages.py).
- A run that has no row yet or is damaged, and what is no run, is left out, and a line says so.
- Runs with different networks, texts, tokenizers or evaluations have figures of their own, in a
  folder for each task, such as figures/45m-c4-gpt2. Where all runs have one task, there is none.
- Runs without --target-loss are compared at one number of tokens: the one that most methods have,
  of equals the largest. Runs of other lengths are in the tables only, and a line says so.
- Runs with --target-loss have figures of their own, one set for each target. `--target LOSS`
  replaces these by one set, for that loss. It takes all runs, but for those that stopped at a
  larger one.
- Runs that differ only in their seed are a group. A curve is the mean over a group, and its band
  reaches from the smallest value to the largest. Steps that a run of the group lacks are left out.
  So where seeds take different numbers of steps to a target, a curve ends with the first of them,
  maybe above the target; the label has the mean of their steps.
- A group with a run that diverged is never shown.
- Of each method and batch, the best group is shown. Figures such as `settings_gn` show the best 14
  groups of one method, at the batch that has most of them.
- Where batch is not an axis, one batch is shown: the largest of those that most methods have.
  A method without runs at that batch is shown at its own largest batch, which its label names.
"""

import itertools
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import matplotlib
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib import rcParams, ticker
from matplotlib.figure import Figure
from scipy.optimize import isotonic_regression

import baselines
import gn
import pages
from comparison import (
    choose_tokens,
    compare_at_tokens,
    compare_to_targets,
    find_differences,
    keep_best,
    keep_groups,
    label_groups,
    read_runs,
    say_left_out,
    split_tasks,
    summarize_groups,
)
from recipe import METHODS
from runtime import files, flags
from runtime.command import BadInput, blaming_input, command, say
from tables import format_count, format_number, tabulate

# The looks of the methods, in the order of METHODS. The colours are Okabe and Ito's, which people
# with any colour vision can tell apart.
COLORS = ["#0072B2", "#56B4E9", "#009E73", "#000000", "#D55E00", "#CC79A7", "#E69F00"]
DOTTED = (0, (1, 1))
DASHED_TWICE_DOTTED = (0, (5, 1, 1, 1, 1, 1))
LONG_DASHED = (0, (7, 2))
LINES = ["-", "--", "-.", DOTTED, DASHED_TWICE_DOTTED, LONG_DASHED, "-"]
MARKERS = ["o", "s", "^", "v", "D", "P", "X"]
CYCLE = cycler(color=COLORS) + cycler(linestyle=LINES) + cycler(marker=MARKERS)

matplotlib.rcdefaults()  # whatever a person's matplotlibrc has
rcParams["font.size"] = 8
rcParams["axes.spines.top"] = False
rcParams["axes.spines.right"] = False
rcParams["svg.hashsalt"] = "plot"  # equal runs give equal files

STATISTICS = ["mean", "min", "max"]  # of the runs of a group: a curve and its band
# The columns that tell the curve of a schedule from others.
SCHEDULE_COLUMNS = ["has_inner_loop", "schedule", "warmup", "warmup_steps", "inner_warmup"]
# The first line of tables.md, by which a folder is known as one whose files may be replaced.
MADE_BY = "<!-- plot.py writes this file and the pictures beside it -->"
MOST_SETTINGS = 14  # that one panel shows
MOST_POINTS = 100_000  # of the curve of a schedule

# Inches.
LEFT_OF_AXES = 0.72  # enough for a rate such as 0.00025
BELOW_AXES = 0.44
ABOVE_AXES = 0.16
AXES_WIDTH = 1.8
AXES_HEIGHT = 2.0  # at least
LABEL_ROOM = 0.99  # to the right of the axes, at least
LETTER_WIDTH = 0.075
LINE_HEIGHT = 0.145


# ---- rows of a table -----------------------------------------------------------------------------


def keep_one_batch(table):
    """The rows of one batch of each method, to compare methods at.

    It is the largest of the batches that most methods have. A method that has no run there keeps
    its own largest batch.
    """
    shared = most_common_batch(table.groupby("batch").method.nunique())
    largest = table.groupby("method").batch.transform("max")
    has_shared = (table.batch == shared).groupby(table.method).transform("any")
    return table[table.batch == largest.mask(has_shared, shared)]


def most_common_batch(counts):
    """The batch with the highest count, of equals the largest; counts: a Series by batch."""
    return counts.index[counts == counts.max()].max()


def keep_common_steps(table):
    """The rows at steps that all runs of their group have."""
    runs = table.groupby("group").run.transform("nunique")
    runs_with_step = table.groupby(["group", "step"]).run.transform("nunique")
    return table[runs_with_step == runs]


def keep_ended(table):
    """The rows of the runs that have taken all of their steps."""
    is_end = table.step >= table.outer_steps
    return table[is_end.groupby(table.run).transform("any")]


def find_final_losses(table):
    """The last loss of each run: a Series by method, batch and run."""
    return table.groupby(["method", "batch", "run"], sort=False).val_loss.last()


def find_steps_to_target(table, target):
    """The first step after which the loss is at or below target: a Series by method, batch, run.

    A step counts only if the loss was measured there. Step 0 does not, as no step was taken; the
    tables have it as 0. Groups with a run that has no such step are left out.
    """
    reached = table[(table.step > 0) & (table.val_loss <= target)]
    not_there = table[~table.run.isin(reached.run)]
    reached = reached[~reached.group.isin(not_there.group)]
    return reached.groupby(["method", "batch", "run"], sort=False).step.first()


def choose_target(table):
    """The smallest loss that every method comes to, at one batch at least, with all its seeds."""
    worst = find_final_losses(table).groupby(["method", "batch"]).max()
    return worst.groupby("method").min().max()


# ---- panels: each function draws on one pair of axes ---------------------------------------------


def draw_curve(ax, curve, **look):
    """Draws a curve and its band; curve: a table indexed by x, with the columns of STATISTICS."""
    is_crowded = len(curve) > 8
    spacing = 0.12 if is_crowded else 1  # a marker at each such share of the diagonal, or at all
    ax.plot(curve.index, curve["mean"], markevery=spacing, linewidth=1.2, markersize=3.5, **look)
    if (curve["min"] < curve["max"]).any():
        band = {"facecolor": look["color"], "alpha": 0.2, "linewidth": 0}
        ax.fill_between(curve.index, curve["min"], curve["max"], **band)


XLABELS = {
    "step": "outer steps",
    "tokens": "tokens read",
    "seconds_so_far": "seconds of all steps",
    "joules_so_far": "energy of all steps (J)",
}


def draw_losses(ax, table, x, target=None):
    """Validation loss against x, one of XLABELS, for a table with one batch of each method.

    target: a loss, drawn as a dotted line; the labels then tell how many steps were taken to it.
    """
    steps = {}
    if target is not None:
        steps = find_steps_to_target(table, target).groupby("method").mean()
    table = keep_common_steps(table)
    batches_differ = table.batch.nunique() > 1
    for method, rows in table.groupby("method", sort=False):
        label = METHODS[method].title
        if batches_differ:
            label += f",\nbatch {format_count(rows.batch.iloc[0])}"
        if method in steps:
            unit = "step" if steps[method] == 1 else "steps"
            label += f",\n{format_number(steps[method])} {unit}"
        at_step = rows.groupby("step")
        curve = at_step.val_loss.agg(STATISTICS)
        curve.index = at_step[x].mean()  # line searches may read fewer tokens at one seed
        draw_curve(ax, curve, label=label, **LOOKS[method])

    ax.set(xlabel=XLABELS[x], ylabel="validation loss (nats per token)")
    ends = table.groupby("method")[x].max()
    if ends.max() > 5 * ends.min() > 0:
        ax.set_xscale("log")  # step 0 is then not shown
    if target is not None:
        draw_target(ax, table[x], target)


def draw_target(ax, x, target):
    """A dotted line at the target loss, as far as the values x reach."""
    if ax.get_xscale() == "log":
        x = x[x > 0]
    ends = [x.min(), x.max()]
    ax.plot(ends, [target, target], ":", color="grey", label=f"target {target:g}")


def draw_settings(ax, table, labels, target=None):
    """Validation loss against outer steps for each group; labels: {group: label}, in order."""
    table = keep_common_steps(table)
    for group, look in zip(labels, make_looks(), strict=False):
        rows = table[table.group == group]
        curve = rows.groupby("step").val_loss.agg(STATISTICS)
        draw_curve(ax, curve, label=labels[group], **look)
    ax.set(xlabel="outer steps", ylabel="validation loss (nats per token)")
    if target is not None:
        draw_target(ax, table.step, target)


def make_looks():
    """Looks for curves that are not of several methods, without end.

    The first 49 differ in colour, line or marker.
    """
    for turn in itertools.count():
        for number, look in enumerate(CYCLE):
            other = (number + turn) % len(LINES)
            yield look | {"linestyle": LINES[other], "marker": MARKERS[other]}


LOOKS = dict(zip(METHODS, make_looks(), strict=False))


def draw_against_batch(ax, values):
    """A curve for each method; values: a Series by method, batch and run."""
    points = values.groupby(["method", "batch"], sort=False).agg(STATISTICS)
    for method, curve in points.groupby("method", sort=False):
        curve = curve.droplevel("method")
        draw_curve(ax, curve, label=METHODS[method].title, **LOOKS[method])
    ax.set(xlabel="batch (tokens)", xscale="log")


def draw_final_losses(ax, table, bounds=None):
    """Final loss against batch; bounds: rows of Muon at the inner batch, drawn as dotted lines."""
    draw_against_batch(ax, find_final_losses(table))
    ax.set(ylabel="final validation loss (nats per token)")
    if bounds is None:
        return
    ends = [table.batch.min(), table.batch.max()]
    for batch, loss in find_final_losses(bounds).groupby("batch").mean().items():
        label = f"Muon at the\ninner batch {format_count(batch)}"
        ax.plot(ends, [loss, loss], ":", color="grey", label=label)


def draw_steps_to_target(ax, table, target):
    """Outer steps to the target loss against batch, and what optimal scaling would make of them.

    Scaling is optimal where twice the batch takes half the steps. The dotted line shows it from
    the group that came to the target with the fewest tokens. There must be one.
    """
    steps = find_steps_to_target(table, target)
    draw_against_batch(ax, steps)
    ax.set(ylabel=f"outer steps to loss {target:.4g}", yscale="log")

    mean = steps.groupby(["method", "batch"]).mean()
    fewest_tokens = (mean * mean.index.get_level_values("batch")).min()
    batch = np.array([table.batch.min(), table.batch.max()])
    x = np.minimum(batch, fewest_tokens)
    y = np.maximum(fewest_tokens / batch, 1)  # it ends where one step is enough
    ax.plot(x, y, ":", color="grey", label="optimal scaling")


def compute_schedule(run):
    """The learning rate of every inner step as a share of its peak: a Series by outer step.

    run: a row of the table.
    """
    settings = SimpleNamespace(
        lr=1.0,  # so that rates are shares of their peak
        inner_steps=run.inner_steps,
        loop_steps=run.inner_steps * run.inner_epochs,
        outer_steps=max(1, run.outer_steps),
        schedule=run.schedule,
        warmup=run.warmup,
        warmup_steps=run.warmup_steps,
        inner_warmup=run.inner_warmup,
    )
    count = settings.outer_steps * settings.loop_steps
    inner_step = np.arange(0, count, math.ceil(count / MOST_POINTS))
    t, k = np.divmod(inner_step, settings.loop_steps)
    if run.has_inner_loop:
        rate = gn.learning_rate(t, k, settings)
    else:
        rate = baselines.learning_rate(t, settings)
    return pd.Series(np.asarray(rate), index=inner_step / settings.loop_steps)


def draw_rate(ax, rate, **look):
    """Draws learning rates, a Series by outer step, as a line without markers."""
    look |= {"linewidth": 1.2, "marker": ""}
    ax.plot(rate.index, rate, **look)


def draw_schedules(ax, runs):
    """One curve for each schedule; runs: a table with a row for each."""
    for run, look in zip(runs.itertuples(), make_looks(), strict=False):
        label = run.schedule.replace("+", "+\n")
        if run.warmup_steps:
            label += f",\nwarmup {run.warmup_steps:.0f} steps"
        elif run.warmup:
            label += f",\nwarmup {run.warmup:g}"
        if run.inner_warmup:
            label += f",\ninner warmup {run.inner_warmup:g}"
        draw_rate(ax, compute_schedule(run), label=label, **look)
    ax.set(xlabel="outer steps", ylabel="learning rate / its peak", ylim=(-0.05, 1.05))


def draw_rates_of_settings(ax, runs, labels):
    """The learning rate of each setting; runs: a row of each group; labels: as `draw_settings`."""
    runs = runs.set_index("group", drop=False)
    for (group, label), look in zip(labels.items(), make_looks(), strict=False):
        run = runs.loc[group]
        rate = run.lr * compute_schedule(run)
        draw_rate(ax, rate, label=label, **look)
    ax.set(xlabel="outer steps", ylabel="learning rate")
    ax.yaxis.set_major_formatter("{x:.3g}")  # no more digits than there is room for


def draw_step_sizes(ax, rows):
    """The step size α of every run of a group; crosses at the bottom are steps refused, α = 0."""
    rows = rows.sort_values("step")  # so that the label points to the last
    accepted = rows[rows.alpha > 0]
    refused = rows[rows.alpha == 0]
    bottom = 0.6 * min([1.0, *accepted.alpha])

    method = rows.method.iloc[0]
    look = LOOKS[method] | {"linestyle": "", "markersize": 3.5}
    if len(accepted):
        ax.plot(accepted.step, accepted.alpha, **look, label=METHODS[method].title)
    if len(refused):
        look["marker"] = "x"
        ax.plot(refused.step, np.full(len(refused), bottom), **look, label="refused")
    ax.set_yscale("log", base=2)
    top = 1.2 * max([1.0, *accepted.alpha])
    ax.set(xlabel="outer steps", ylabel="step size α", ylim=(0.8 * bottom, top))


# ---- ticks and labels ----------------------------------------------------------------------------


def set_ticks(ax):
    """Gives the x axis a few ticks, at round numbers, and so the y axis if it is logarithmic."""
    whole = ticker.MaxNLocator(4, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    ax.xaxis.set(major_locator=whole, major_formatter=format_tick)
    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() == "log":
            set_log_ticks(axis)


def set_log_ticks(axis):
    """Ticks at powers of the axis's base; at 1, 2, 5, 10, 20, .. where tens would be too few."""
    base = axis.get_transform().base
    low, high = axis.get_view_interval()
    few = base == 10 and high < 200 * low
    locator = ticker.LogLocator(base, subs=(1, 2, 5) if few else (1,))
    axis.set(major_locator=locator, minor_locator=ticker.NullLocator(), major_formatter=format_tick)


def format_tick(value, position):
    """The label of a tick; a step size is a fraction, such as 1/4. matplotlib gives position."""
    return f"1/{1 / value:.3g}" if 0 < value < 1 else format_count(value)


def place_labels(wanted, heights, low, high):
    """Heights for the middles of labels, as near to the wanted ones as they can be with no overlap.

    wanted: where each label would be best, rising. low, high: of the room for all of them.
    """
    stacked = np.cumsum(heights) - heights / 2  # with each label upon the one before
    # No two overlap if the distance to the stack never falls from one label to the next.
    distance = isotonic_regression(wanted - stacked).x
    return stacked + np.clip(distance, low, high - np.sum(heights))


def label_curves(ax):
    """Writes the label of each curve to the right of the axes, with a thin line to its end."""
    ax.autoscale_view()  # now, as transData needs the limits; otherwise drawing the figure does it
    lines = sorted(ax.lines, key=lambda line: line.get_ydata()[-1])
    ends = [line.get_xydata()[-1] for line in lines]
    labels = [line.get_label() for line in lines]

    points = 72 / ax.figure.dpi  # in a pixel
    wanted = ax.transData.transform(ends)[:, 1] * points
    heights = np.array([72 * LINE_HEIGHT * len(label.splitlines()) for label in labels])
    places = place_labels(wanted, heights, ax.bbox.y0 * points, ax.bbox.y1 * points)

    thin = {"arrowstyle": "-", "linewidth": 0.4, "linestyle": (0, (1, 4)), "relpos": (0, 0.5)}
    for line, end, move in zip(lines, ends, places - wanted, strict=True):
        color = line.get_color()
        ax.annotate(
            line.get_label(),
            xy=end,
            xytext=(1.03, move),
            textcoords=("axes fraction", "offset points"),
            arrowprops=thin | {"color": color},
            color=color,
            va="center",
            annotation_clip=False,
        )


def lay_out(figure):
    """Makes a figure as large as its panels and their labels need, and puts the panels in place."""
    height = AXES_HEIGHT
    rooms = []
    for ax in figure.axes:
        labels = "\n".join(line.get_label() for line in ax.lines)
        label_lines = labels.split("\n")
        height = max(height, LINE_HEIGHT * len(label_lines))
        rooms.append(max(LABEL_ROOM, LETTER_WIDTH * max(map(len, label_lines))))

    total_width = sum(LEFT_OF_AXES + AXES_WIDTH + room for room in rooms)
    total_height = BELOW_AXES + height + ABOVE_AXES
    figure.set_size_inches(total_width, total_height)
    left = 0
    for ax, room in zip(figure.axes, rooms, strict=True):
        left += LEFT_OF_AXES
        corner = (left / total_width, BELOW_AXES / total_height)
        ax.set_position((*corner, AXES_WIDTH / total_width, height / total_height))
        left += AXES_WIDTH + room


# ---- which panels a figure has -------------------------------------------------------------------

# A panel is a function of axes, which draws on them. Each function returns the panels of a figure,
# from left to right. best: the rows of the best group of each method and batch; at_one_batch: those
# of them that `keep_one_batch` keeps.


def plan_losses(at_one_batch, target):
    """Loss against outer steps, and against tokens."""
    draw = partial(draw_losses, table=at_one_batch, target=target)
    return [partial(draw, x=x) for x in ("step", "tokens")]


def plan_costs(at_one_batch, target):
    """Loss against seconds, and against joules: those of all outer steps, without the warm-up.

    The first row of a log after a resumption has only what was used since then. So a run that was
    resumed is shown as if it had cost less than it did.
    """
    if at_one_batch.device.nunique() > 1:
        return []
    panels = []
    is_step = at_one_batch.step > 0
    for name in ("seconds", "joules"):
        of_steps = at_one_batch[name].where(is_step, 0)  # the row of step 0 has the warm-up's
        if is_step.any() and of_steps.notna().all():
            x = f"{name}_so_far"
            rows = at_one_batch.assign(**{x: of_steps.groupby(at_one_batch.run).cumsum()})
            panels.append(partial(draw_losses, table=rows, x=x, target=target))
    return panels


def plan_methods(best, at_one_batch, target):
    """Gauss-Newton beside its variants: against batch if one has several, else against steps.

    With a target it is always against steps.
    """
    panels = []
    for variant in ("layerwise_gn", "gn_prox"):
        pair = {"gn", variant}
        if not pair <= set(best.method):
            continue
        ended = keep_ended(best[best.method.isin(pair)])
        both_have_ended = ended.method.nunique() == 2
        if target is None and both_have_ended and ended.group.nunique() > 2:
            panels.append(partial(draw_final_losses, table=ended))
        else:
            rows = at_one_batch[at_one_batch.method.isin(pair)]
            panels.append(partial(draw_losses, table=rows, x="step", target=target))
    return panels


def plan_batches(best_at_tokens, best_to_targets):
    """Final loss, and steps to each target, against batch; nothing where all have one batch.

    best_at_tokens: `best` of the runs of one length, None if there is none; best_to_targets:
    {target: `best` of the runs to it}. Where there is no target, it is the smallest loss that every
    method comes to in the runs of one length.
    """
    panels = []
    to_targets = {target: split_bounds(best)[0] for target, best in best_to_targets.items()}
    if best_at_tokens is not None:
        points, bounds = split_bounds(keep_ended(best_at_tokens))
        if points.batch.nunique() > 1:
            panels.append(partial(draw_final_losses, table=points, bounds=bounds))
            if not to_targets:
                to_targets = {choose_target(points): points}
    for target, points in to_targets.items():
        takes_steps = len(find_steps_to_target(points, target)) > 0
        if points.batch.nunique() > 1 and takes_steps:
            panels.append(partial(draw_steps_to_target, table=points, target=target))
    return panels


def split_bounds(table):
    """The rows of a table but for those of bounds, and those of bounds.

    Muon whose batch is an inner batch of Gauss-Newton is a bound, not a point (Section 5): it takes
    as many steps as all inner loops together, each on the true loss and not on a stand-in for it.
    """
    inner_batches = table.inner_tokens[table.has_inner_loop]
    is_bound = (table.method == "muon") & table.batch.isin(inner_batches)
    return table[~is_bound], table[is_bound]


def plan_schedules(at_one_batch):
    """The schedules of the methods with an inner loop, and those of the others.

    Of runs of different lengths with one schedule, the first is drawn.
    """
    runs = at_one_batch.dropna(subset="schedule").drop_duplicates(SCHEDULE_COLUMNS)
    with_inner_loop = runs[runs.has_inner_loop]
    others = runs[~runs.has_inner_loop]
    return [partial(draw_schedules, runs=side) for side in (with_inner_loop, others) if len(side)]


def plan_settings(comparison, groups):
    """Learning rates, if they differ, and losses of the settings of one method.

    groups: those of the method, as `summarize_groups` tells them.
    """
    groups = choose_settings(groups)
    if len(groups) < 2:
        return []
    rows = keep_groups(comparison, groups)
    labels = label_groups(groups).str.replace(", ", ",\n").to_dict()
    panels = [partial(draw_settings, table=rows, labels=labels, target=comparison.target)]
    runs = rows.drop_duplicates("group")  # a row of each group
    if runs.schedule.notna().all() and len(runs.drop_duplicates([*SCHEDULE_COLUMNS, "lr"])) > 1:
        panels.insert(0, partial(draw_rates_of_settings, runs=runs, labels=labels))
    return panels


def choose_settings(groups):
    """The best MOST_SETTINGS groups of a method that did not diverge, at their most common batch.

    Says on standard error if there are more.
    """
    groups = groups[~groups.diverged]
    if groups.empty:
        return groups
    groups = groups[groups.batch == most_common_batch(groups.groupby("batch").size())]
    if len(groups) > MOST_SETTINGS:
        title = METHODS[groups.method.iloc[0]].title
        say(f"the best {MOST_SETTINGS} of {len(groups)} settings of {title} are drawn")
    return groups.head(MOST_SETTINGS)


def plan_step_sizes(at_one_batch):
    """One panel for each method with a line search."""
    panels = []
    for _, rows in at_one_batch.groupby("method", sort=False):
        if rows.alpha.notna().any():
            panels.append(partial(draw_step_sizes, rows=rows))
    return panels


def plan_comparison(comparison, best, at_one_batch):
    """{name: panels} of the figures of a Comparison; a target is in the name."""
    target = comparison.target
    plans = {
        "loss": plan_losses(at_one_batch, target),
        "costs": plan_costs(at_one_batch, target),
        "methods": plan_methods(best, at_one_batch, target),
        "step_sizes": plan_step_sizes(at_one_batch),
    }
    for method, groups in summarize_groups(comparison).groupby("method"):
        plans[f"settings_{method}"] = plan_settings(comparison, groups)
    ending = "" if target is None else f"_to_{target:g}"
    return {f"{name}{ending}": panels for name, panels in plans.items()}


# ---- figures -------------------------------------------------------------------------------------


def draw_figures(at_tokens, to_targets):
    """{name: Figure} of the runs of one task.

    at_tokens: a Comparison at fixed tokens, or None; to_targets: a list of Comparisons to a target.
    """
    plans = {}
    shown = []  # the rows at one batch of each Comparison
    best_at_tokens = None
    best_to_targets = {}
    comparisons = to_targets if at_tokens is None else [at_tokens, *to_targets]
    for comparison in comparisons:
        best = keep_best(comparison)
        if best.empty:
            continue
        if comparison.target is None:
            best_at_tokens = best
        else:
            best_to_targets[comparison.target] = best
        at_one_batch = keep_one_batch(best)
        shown.append(at_one_batch)
        plans |= plan_comparison(comparison, best, at_one_batch)
    if shown:
        plans["schedules"] = plan_schedules(pd.concat(shown))
    plans["batch"] = plan_batches(best_at_tokens, best_to_targets)
    return {name: draw_figure(panels) for name, panels in plans.items() if panels}


def draw_figure(panels):
    """A Figure of panels side by side."""
    figure = Figure(dpi=200)
    for draw_panel in panels:
        draw_panel(figure.add_axes((0, 0, 1, 1)))
    lay_out(figure)
    for ax in figure.axes:
        set_ticks(ax)
        label_curves(ax)
    return figure


# ---- the command line ----------------------------------------------------------------------------


ABOUT = """Draws the paper's figures from runs: python plot.py runs/* writes into figures/. Given
only files of results/, it also renews the pages of this project."""


def parse(argv):
    """The command line: runs, out and target. Raises ValueError for what is not valid."""
    usage = "plot.py RUN ... [--out FOLDER] [--target LOSS]"
    parser = flags.Parser(usage=usage, description=ABOUT)
    out_help = "folder of the figures and tables [default figures]"
    target_help = "a loss to count the steps to, also of runs without --target-loss"
    parser.add_argument("runs", nargs="+", help="folders of runs, or files of packed runs")
    parser.add_argument("--out", default="figures", help=out_help)
    parser.add_argument("--target", type=float, help=target_help)
    options = parser.parse_args(argv)
    flags.check_range(options, ["target"], above=0)
    if not options.out:
        raise ValueError("--out is empty")
    options.out = Path(options.out)
    return options


def say_not_drawn(table, at_tokens, chosen, target):
    """Says on standard error which lengths are not drawn, and which runs stopped or diverged."""
    if len(at_tokens) > 1:
        others = [format_count(other.tokens) for other in at_tokens if other is not chosen]
        reason = f"figures show the runs of {format_count(chosen.tokens)} tokens"
        say(f"{reason}; those of {', '.join(others)} are in the tables only")
    runs = table.drop_duplicates("run")
    if target is not None:
        say_left_out(
            runs.source[runs.target_loss > target],
            f"run stopped at a target of its own before loss {target:g}",
            f"runs stopped at targets of their own before loss {target:g}",
        )
    diverged = table.group[~np.isfinite(table.val_loss)]
    say_left_out(
        table.source[table.group.isin(diverged)].unique(),
        "run diverged, or another seed of it; it is in the tables only",
        "runs diverged, or another seed of theirs; they are in the tables only",
    )


def draw_task(name, table, target, folder):
    """Draws the runs of a task, and prints its tables and the paths of what it writes."""
    at_tokens = compare_at_tokens(table)
    to_targets = compare_to_targets(table, target)
    chosen = choose_tokens(at_tokens)
    say_not_drawn(table, at_tokens, chosen, target)
    tables = format_page(name, tabulate([*to_targets, *at_tokens]))
    print(tables)
    save(draw_figures(chosen, to_targets), tables, folder)


def format_page(name, tables):
    """The tables of a task, a list of (title, table), as a page."""
    parts = [f"{MADE_BY}\n\n# {name}\n"]
    for title, table in tables:
        parts.append(f"## {title}\n\n{table}")
    return "\n".join(parts)


def check_own(folder):
    """Raises ValueError if a folder has pictures or tables that this program did not write."""
    tables = folder / "tables.md"
    is_own = tables.exists() and tables.read_bytes().startswith(MADE_BY.encode())
    others = [path for path in folder.glob("*") if path.suffix in (".png", ".svg", ".md")]
    if others and not is_own:
        what = f"{folder} has {others[0].name}, which may not be of plot.py"
        raise ValueError(f"{what}; give another --out, or move it away")


def save(figures, tables, folder):
    """Writes the tables, and each figure as PNG and as SVG, and prints the paths.

    Says which pictures the folder had before and keeps: they may be of other runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    older = {path for path in folder.iterdir() if path.suffix in (".png", ".svg")}
    write_text(folder / "tables.md", tables)
    for name, figure in figures.items():
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            write_picture(path, figure)
            older.discard(path)
    say_left_out(sorted(older), "picture was there before", "pictures were there before")


def write_text(path, text):
    """Writes a file, and prints its path."""
    files.write_text(path, text)
    print(path)


def write_picture(path, figure):
    """Writes a figure in the format that the path ends in, and prints the path."""
    metadata = {"Date": None}  # equal runs give equal files
    form = path.suffix.removeprefix(".")
    files.write_file(path, partial(figure.savefig, format=form, metadata=metadata))
    print(path)


# ---- the pages of this project -------------------------------------------------------------------


def renew_pages(paths):
    """Replaces what the pages show of the files of packed runs among some paths: see pages.py.

    Where a folder is among the paths, somebody compares runs of their own, and no page changes.
    Raises BadInput if a page asks for what a file does not give.
    """
    if any(Path(path).is_dir() for path in paths):
        return
    given = {Path(path).resolve() for path in paths}
    tables = {}
    figures = {}
    for file in pages.shown_files():
        if (pages.ROOT / file).resolve() in given:
            tables[file], figures[file] = tables_and_figures(pages.ROOT / file)

    texts = {}
    pictures = {}
    for page in pages.all_pages():
        before = page.read_text(encoding="utf-8")
        text = pages.renew(before, tables)
        if text != before:
            texts[page] = text
        for mark in pages.find_marks(text):
            if mark.picture and mark.file in figures:
                pictures[page.parent / mark.picture] = pages.look_up(figures, mark)
    # Only now, when no page asks for what is not there.
    for page, text in texts.items():
        write_text(page, text)
    for path, figure in pictures.items():
        write_picture(path, figure)


def tables_and_figures(file):
    """The tables and the figures of one file of packed runs: {title: table}, {name: Figure}.

    Raises BadInput if its runs cannot all be compared, or if two tables have one title.
    """
    with blaming_input():
        table = read_runs([file])
    if table.empty or table.task.nunique() > 1:
        raise BadInput(f"{file} must have runs of one network, text, tokenizer and evaluation")
    at_tokens = compare_at_tokens(table)
    to_targets = compare_to_targets(table)
    figures = draw_figures(choose_tokens(at_tokens), to_targets)
    tables = tabulate([*to_targets, *at_tokens])
    titles = [title for title, _ in tables]
    if len({*titles}) < len(titles):
        raise BadInput(f"{file} gives two tables of one title: {'; '.join(titles)}")
    return dict(tables), figures


@command
def main(words):
    """Runs the command line."""
    with blaming_input():
        options = parse(words)
        files.check_writable(options.out)  # now, not when all is drawn
        jax.config.update("jax_platforms", "cpu")  # the GPUs may be busy with a run
        table = read_runs(options.runs)
    if table.empty:
        say("plot.py: there is nothing to draw yet")
        return
    tasks = split_tasks(table)
    folders = dict.fromkeys(tasks, options.out)
    if len(tasks) > 1:
        folders = {name: options.out / name for name in tasks}
        differ = ", ".join(find_differences(table))
        say(f"{len(tasks)} kinds of runs, which differ in {differ}, have a folder each")
    with blaming_input():
        for folder in folders.values():
            check_own(folder)
    for name, rows in tasks.items():
        draw_task(name, rows, options.target, folders[name])
    renew_pages(options.runs)


if __name__ == "__main__":
    sys.exit(main())
