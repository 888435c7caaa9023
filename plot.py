"""Draws the paper's figures from run folders: `python plot.py runs/*` writes into figures/.

Each figure is written as PNG and as SVG, if there are runs for it:

    loss        validation loss against outer steps and against tokens (Figure 1)
    methods     Gauss-Newton beside each of its two variants (Figure 3)
    batch       final loss, and outer steps to a target loss, against batch (Figures 2 and 5)
    schedules   learning rates (Appendix D)
    step_sizes  the step sizes that the line search chose (Appendix D)

Which runs are shown:

- A folder of run folders, such as a grid's, stands for the runs in it.
- What has no row yet, and what is no run, is left out, and a line says so.
- Runs that differ only in their seed are a group. A curve is the mean over a group, and its band
  reaches from the smallest value to the largest. Steps that a run of the group lacks are left out.
- A group with a run that diverged is never shown.
- Of each method and batch, the group with the smallest mean final loss is shown. A group whose
  runs are all unfinished is shown only if there is no other.
- Where batch is not an axis, one batch is shown: the largest of those that most methods have.
  A method without runs at that batch is shown at its own largest batch, which its label names.

All runs are read into one pandas table, whose columns `read_run` explains.
"""

import itertools
import json
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
from runtime import checkpoint, files, flags
from runtime.command import blaming_input, command
from train import METHODS

# The looks of the methods, in the order of METHODS. The colours are Okabe and Ito's, which people
# with any colour vision can tell apart.
COLORS = ["#0072B2", "#56B4E9", "#009E73", "#000000", "#D55E00", "#CC79A7", "#E69F00"]
DOTTED = (0, (1, 1))
DASHED_TWICE_DOTTED = (0, (5, 1, 1, 1, 1, 1))
LONG_DASHED = (0, (7, 2))
LINES = ["-", "--", "-.", DOTTED, DASHED_TWICE_DOTTED, LONG_DASHED, "-"]
MARKERS = ["o", "s", "^", "v", "D", "P", "X"]
CYCLE = cycler(color=COLORS) + cycler(linestyle=LINES) + cycler(marker=MARKERS)
LOOKS = dict(zip(METHODS, itertools.cycle(CYCLE), strict=False))

matplotlib.rcdefaults()  # whatever a person's matplotlibrc has
rcParams["font.size"] = 8
rcParams["axes.spines.top"] = False
rcParams["axes.spines.right"] = False
rcParams["svg.hashsalt"] = "plot"  # equal runs give equal files

MEASURED = ["step", "tokens", "val_loss", "alpha"]  # the columns of a log that figures show
STATISTICS = ["mean", "min", "max"]  # of the runs of a group: a curve and its band
NETWORK = ["model", "vocab_size", "context", "d_model", "d_ff", "n_layers", "n_heads", "n_kv_heads"]
NETWORK += ["mlp", "qk_norm"]
SAME = [*NETWORK, "tokenizer", "held_out", "eval_tokens"]  # or losses cannot be compared


# ---- tables --------------------------------------------------------------------------------------


def read_run(folder):
    """The flags of a run, a dict, and its rows, a list of dicts: one for each evaluation.

    A row holds what was measured there (see MEASURED; NaN for what was not) and every flag except
    `tokens`, as a row's tokens are those read so far. These are added to the flags:

    title           of the method
    place           of the method in METHODS
    inner_steps     inner batches in a batch
    inner_tokens    tokens in an inner batch
    outer_steps     outer steps of the whole run
    has_inner_loop  whether the method takes an optimizer step on every inner batch
    held_out        the hash of the text that evaluations read
    group           a text that is equal for runs that differ only in their seed
    run             a text that is equal for runs that do not differ

    Flags that the method does not have are filled in, and `data` becomes the hash of the text.
    """
    run = {"schedule": None} | checkpoint.read_config(folder)["config"]
    run["title"] = METHODS[run["method"]].title
    run["place"] = list(METHODS).index(run["method"])
    run["inner_tokens"] = run["inner_batch"] * run["context"]
    run["inner_steps"] = max(1, round(run["batch"] / run["inner_tokens"]))
    run["outer_steps"] = int(run["steps"])
    run["has_inner_loop"] = "inner_warmup" in run
    run["warmup"] = float(run.get("warmup", 0))
    run["warmup_steps"] = int(run.get("warmup_steps", 0))
    run["inner_warmup"] = float(run.get("inner_warmup", 0))
    run["target_loss"] = float(run.get("target_loss") or 0)

    # Neither the name of the text nor that of the folder matters, if the text is the same.
    run["data"] = run.get("corpus", run["data"])
    run["held_out"] = run["corpus"]["val"] if "corpus" in run else run["data"]
    run["out"] = None
    run["group"] = json.dumps(run | {"seed": None}, sort_keys=True)
    run["run"] = json.dumps(run, sort_keys=True)

    log = pd.DataFrame(checkpoint.read_log(folder), columns=MEASURED, dtype=float)
    return run, [run | measured for measured in log.to_dict("records")]


def is_run(path):
    """Whether a path is the folder of a run, maybe one that is damaged or has only begun."""
    named = any((path / name).exists() for name in ("config.json", "log.jsonl"))
    return named or checkpoint.is_unborn(path)


def find_runs(paths):
    """The folders of runs. A folder that is none stands for the runs in it.

    What else is no run is left out, and a line says so. Raises ValueError if a path does not exist.
    """
    folders, others = [], []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        found = [path]
        if path.is_dir() and not is_run(path):
            found = sorted(path.iterdir())
        found = [folder for folder in found if is_run(folder)]
        folders += found
        if not found:
            others.append(path)
    say_left_out(others, "is no run", "are no runs")
    return folders


def has_row(folder):
    """Whether a run has been evaluated yet."""
    log = folder / "log.jsonl"
    return log.exists() and log.stat().st_size > 0


def read_runs(paths):
    """The table of all rows of all runs; of two equal runs, the later one counts.

    A line says which runs have no row yet. Raises ValueError if a run cannot be read, or if two
    cannot be compared.
    """
    folders = find_runs(paths)
    rowless = [folder for folder in folders if not has_row(folder)]
    say_left_out(rowless, "run has no row yet", "runs have no row yet")

    runs = {}
    rows = {}
    for folder in folders:
        if folder in rowless:
            continue
        try:
            run, log = read_run(folder)
        except files.UNREADABLE as error:
            raise ValueError(f"{folder} is not a run that can be read: {error!r}") from None
        runs[folder] = run
        rows[run["run"]] = log
    check_comparable(runs)
    return pd.DataFrame(itertools.chain.from_iterable(rows.values()))


def check_comparable(runs):
    """Raises ValueError if the losses of {folder: flags} are not of one network and text."""
    for folder, run in runs.items():
        first_folder, first = next(iter(runs.items()))
        differ = [name for name in SAME if run.get(name) != first.get(name)]
        if differ:
            pair = f"{folder} and {first_folder}"
            raise ValueError(f"{pair} cannot be compared: they differ in {', '.join(differ)}")


def say_left_out(paths, one, several):
    """Says on standard error which paths are left out and why, if there are any."""
    if paths:
        why = one if len(paths) == 1 else several
        print(f"{len(paths)} {why}: {', '.join(map(str, paths))}", file=sys.stderr)


def drop_diverged(table):
    """The rows of groups without a run that diverged; such a run has a row without a loss."""
    finite = np.isfinite(table.val_loss)
    return table[finite.groupby(table.group).transform("all")]


def keep_best(table):
    """The rows of the best group of each method and batch, in the order of METHODS and by batch.

    Raises ValueError if no group is left.
    """
    if len(table):
        table = drop_diverged(table)
    if table.empty:
        raise ValueError("none of these runs has a loss to show")

    # One row for each group: whether a run of it is finished, and the mean final loss. Where one is
    # finished, those that are not do not count.
    last = table.groupby("run", sort=False).tail(1)
    done = (last.step >= last.outer_steps) | (last.val_loss <= last.target_loss)
    last = last.assign(done=done)
    last = last[last.done | ~last.groupby("group").done.transform("any")]
    groups = last.groupby("group", sort=False)
    ranking = groups.agg({"method": "first", "batch": "first", "done": "any", "val_loss": "mean"})

    # Finished groups first, then by loss; of each method and batch the first one is kept.
    ranking = ranking.sort_values(["done", "val_loss"], ascending=[False, True], kind="stable")
    best = ranking.drop_duplicates(["method", "batch"])

    table = table[table.group.isin(best.index)]
    return table.sort_values(["place", "batch"], kind="stable")


def keep_one_batch(table):
    """The rows of one batch of each method, to compare methods at.

    It is the largest of the batches that most methods have. A method that has no run there keeps
    its own largest batch.
    """
    methods = table.groupby("batch").method.nunique()
    shared = methods.index[methods == methods.max()].max()
    largest = table.groupby("method").batch.transform("max")
    has_shared = (table.batch == shared).groupby(table.method).transform("any")
    return table[table.batch == largest.mask(has_shared, shared)]


def keep_common_steps(table):
    """The rows at steps that all runs of their group have."""
    runs = table.groupby("group").run.transform("nunique")
    runs_with_step = table.groupby(["group", "step"]).run.transform("nunique")
    return table[runs_with_step == runs]


def find_final_losses(table):
    """The last loss of each run: a Series by method, batch and run."""
    return table.groupby(["method", "batch", "run"], sort=False).val_loss.last()


def find_steps_to_target(table, target):
    """The first step after which the loss is at or below target: a Series by method, batch, run.

    A step counts only if the loss was measured there. Groups with a run that has no such step are
    left out.
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


def draw_curve(ax, method, curve, **look):
    """Draws a curve and its band; curve: a table indexed by x, with the columns of STATISTICS."""
    look = LOOKS[method] | {"linewidth": 1.2, "markersize": 3.5} | look
    crowded = len(curve) > 8
    ax.plot(curve.index, curve["mean"], markevery=0.12 if crowded else 1, **look)
    if (curve["min"] < curve["max"]).any():
        band = {"facecolor": look["color"], "alpha": 0.2, "linewidth": 0}
        ax.fill_between(curve.index, curve["min"], curve["max"], **band)


def draw_losses(ax, table, x):
    """Validation loss against x, "step" or "tokens", for a table with one batch of each method."""
    table = keep_common_steps(table)
    batches_differ = table.batch.nunique() > 1
    for method, rows in table.groupby("method", sort=False):
        label = rows.title.iloc[0]
        if batches_differ:
            label += f",\nbatch {format_count(rows.batch.iloc[0])}"
        draw_curve(ax, method, rows.groupby(x).val_loss.agg(STATISTICS), label=label)

    xlabel = {"step": "outer steps", "tokens": "tokens read"}[x]
    ax.set(xlabel=xlabel, ylabel="validation loss (nats a token)")
    ends = table.groupby("method")[x].max()
    if ends.max() > 5 * ends.min() > 0:
        ax.set_xscale("log")  # step 0 is then not shown


def draw_against_batch(ax, values):
    """A curve for each method; values: a Series by method, batch and run."""
    points = values.groupby(["method", "batch"], sort=False).agg(STATISTICS)
    for method, curve in points.groupby("method", sort=False):
        draw_curve(ax, method, curve.droplevel("method"), label=METHODS[method].title)
    ax.set(xlabel="batch (tokens)", xscale="log")


def draw_final_losses(ax, table, bounds=None):
    """Final loss against batch; bounds: rows of Muon at the inner batch, drawn as dotted lines."""
    draw_against_batch(ax, find_final_losses(table))
    ax.set(ylabel="final validation loss (nats a token)")
    if bounds is None:
        return
    ends = [table.batch.min(), table.batch.max()]
    for loss in find_final_losses(bounds).groupby("batch").mean():
        ax.plot(ends, [loss, loss], ":", color="grey", label="Muon at the\ninner batch")


def draw_steps_to_target(ax, table, target):
    """Outer steps to the target loss against batch, and what optimal scaling would make of them.

    Scaling is optimal where twice the batch takes half the steps. The dotted line shows it from
    the group that came to the target with the fewest tokens. Raises ValueError if none did.
    """
    steps = find_steps_to_target(table, target)
    if steps.empty:
        raise ValueError(f"no run takes a step to come to the target loss {target}")
    draw_against_batch(ax, steps)
    ax.set(ylabel=f"outer steps to loss {target:.4g}", yscale="log")

    mean = steps.groupby(["method", "batch"]).mean()
    fewest_tokens = (mean * mean.index.get_level_values("batch")).min()
    batch = np.array([table.batch.min(), table.batch.max()])
    x = np.minimum(batch, fewest_tokens)
    y = np.maximum(fewest_tokens / batch, 1)  # it ends where one step is enough
    ax.plot(x, y, ":", color="grey", label="optimal scaling")


def compute_schedule(run):
    """The learning rate of every inner step as a share of its peak: a table like a curve's.

    run: a row of the table.
    """
    settings = SimpleNamespace(
        lr=1.0,  # so that rates are shares of their peak
        inner_steps=run.inner_steps,
        outer_steps=run.outer_steps,
        schedule=run.schedule,
        warmup=run.warmup,
        warmup_steps=run.warmup_steps,
        inner_warmup=run.inner_warmup,
    )
    inner_step = np.arange(run.outer_steps * run.inner_steps)
    t, k = np.divmod(inner_step, run.inner_steps)
    if run.has_inner_loop:
        rate = gn.learning_rate(t, k, settings)
    else:
        rate = baselines.learning_rate(t, settings)
    rate = pd.Series(np.asarray(rate), index=inner_step / run.inner_steps)
    return pd.DataFrame(dict.fromkeys(STATISTICS, rate))


def draw_schedules(ax, runs):
    """One curve for each schedule; runs: a table with a row for each."""
    for run in runs.itertuples():
        label = run.schedule.replace("+", "+\n")
        if run.warmup_steps:
            label += f",\nwarmup {run.warmup_steps} steps"
        elif run.warmup:
            label += f",\nwarmup {run.warmup:g}"
        if run.inner_warmup:
            label += f",\ninner warmup {run.inner_warmup:g}"
        draw_curve(ax, run.method, compute_schedule(run), label=label, marker="")
    ax.set(xlabel="outer steps", ylabel="learning rate / its peak", ylim=(-0.05, 1.05))


def draw_step_sizes(ax, rows):
    """The step size α of every run of a group; crosses at the bottom are steps refused, α = 0."""
    rows = keep_common_steps(rows).sort_values("step", kind="stable")
    accepted = rows[rows.alpha > 0]
    refused = rows[rows.alpha == 0]
    bottom = 0.6 * min([1.0, *accepted.alpha])

    method = rows.method.iloc[0]
    look = LOOKS[method] | {"linestyle": "", "markersize": 3.5}
    if len(accepted):
        ax.plot(accepted.step, accepted.alpha, **look, label=METHODS[method].title)
    if len(refused):
        look["marker"] = "x"
        ax.plot(refused.step, refused.alpha + bottom, **look, label="refused")
    ax.set_yscale("log", base=2)
    ax.set(xlabel="outer steps", ylabel="step size α", ylim=(0.8 * bottom, 1.2))


# ---- ticks and labels ----------------------------------------------------------------------------


def format_count(number, position=None):
    """A count as the flags take it, such as 400k, 1.2m or 3b; a number below one as a fraction.

    position: unused; matplotlib gives it to whatever writes its ticks.
    """
    if 0 < number < 1:
        return f"1/{1 / number:.3g}"
    for size, suffix in ((1e9, "b"), (1e6, "m"), (1e3, "k")):
        if number >= 0.9995 * size:  # or three digits would round it to "1e+03"
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


def set_ticks(ax):
    """Gives the axes a few ticks, at round numbers."""
    whole = ticker.MaxNLocator(4, integer=True, steps=[1, 2, 5, 10])
    ax.xaxis.set(major_locator=whole, major_formatter=format_count)
    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() == "log":
            set_log_ticks(axis)


def set_log_ticks(axis):
    """Ticks at powers of the axis's base; at 1, 2, 5, 10, 20, .. where tens would be too few."""
    base = axis.get_transform().base
    low, high = axis.get_view_interval()
    few = base == 10 and high < 60 * low
    locator = ticker.LogLocator(base, subs=(1, 2, 5) if few else (1,))
    axis.set(
        major_locator=locator, minor_locator=ticker.NullLocator(), major_formatter=format_count
    )


def place_labels(wanted, heights, low, high):
    """Heights for the middles of labels, as near to the wanted ones as no two labels overlap.

    wanted: where each label would be best, rising. low, high: of the room for all of them.
    """
    stacked = np.cumsum(heights) - heights / 2  # with each label upon the one before
    # No two overlap if the distance to the stack never falls from one label to the next.
    distance = isotonic_regression(wanted - stacked).x
    return stacked + np.clip(distance, low, high - np.sum(heights))


def label_curves(ax):
    """Writes the label of each curve to the right of the axes, with a thin line to its end."""
    ax.autoscale_view()  # now, as transData needs the limits; otherwise drawing the figure does it
    lines = sorted(ax.lines, key=find_last_y)
    ends = [line.get_xydata()[-1] for line in lines]
    labels = [line.get_label() for line in lines]

    points = 72 / ax.figure.dpi  # in a pixel
    wanted = ax.transData.transform(ends)[:, 1] * points
    heights = np.array([10.0 * len(label.splitlines()) for label in labels])
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


def find_last_y(line):
    """Where a line ends."""
    return line.get_ydata()[-1]


# ---- figures: each function returns a list of panels, from left to right -------------------------


def plan_losses(shown):
    """Loss against outer steps, and against tokens."""
    return [partial(draw_losses, table=shown, x=x) for x in ("step", "tokens")]


def plan_methods(table, shown):
    """Gauss-Newton beside its variants: against batch if one has several, else against steps."""
    panels = []
    for variant in ("layerwise_gn", "gn_prox"):
        pair = {"gn", variant}
        if not pair <= set(table.method):
            continue
        rows = table[table.method.isin(pair)]
        if rows.group.nunique() > 2:
            panels.append(partial(draw_final_losses, table=rows))
        else:
            rows = shown[shown.method.isin(pair)]
            panels.append(partial(draw_losses, table=rows, x="step"))
    return panels


def plan_batches(table, target):
    """Final loss, and steps to the target loss, against batch; nothing where all have one batch.

    Where no target is given and no run takes a step to one, there is no panel of steps.
    """
    # Muon whose batch is an inner batch of Gauss-Newton is a bound, not a point (Section 5).
    inner_batches = table.inner_tokens[table.has_inner_loop]
    is_bound = (table.method == "muon") & table.batch.isin(inner_batches)
    bounds = table[is_bound]
    table = table[~is_bound]
    if table.batch.nunique() < 2:
        return []
    panels = [partial(draw_final_losses, table=table, bounds=bounds)]
    chosen = choose_target(table) if target is None else target
    if target is not None or len(find_steps_to_target(table, chosen)):
        panels.append(partial(draw_steps_to_target, table=table, target=chosen))
    return panels


def plan_schedules(shown):
    """The schedules of the methods with an inner loop, and those of the others."""
    settings = ["has_inner_loop", "schedule", "warmup", "warmup_steps", "inner_warmup"]
    runs = shown.dropna(subset="schedule").drop_duplicates(settings)
    with_inner_loop = runs[runs.has_inner_loop]
    others = runs[~runs.has_inner_loop]
    return [partial(draw_schedules, runs=side) for side in (with_inner_loop, others) if len(side)]


def plan_step_sizes(shown):
    """One panel for each method with a line search."""
    panels = []
    for _, rows in shown.groupby("method", sort=False):
        if keep_common_steps(rows).alpha.notna().any():
            panels.append(partial(draw_step_sizes, rows=rows))
    return panels


def draw_figure(panels):
    """A Figure of panels side by side."""
    width = 1 / len(panels)
    figure = Figure((3.4 * len(panels), 2.6), dpi=200)
    for i, draw_panel in enumerate(panels):
        left = (i + 0.18) * width
        ax = figure.add_axes((left, 0.17, 0.53 * width, 0.77))  # the right quarter is for labels
        draw_panel(ax)
        set_ticks(ax)
        label_curves(ax)
    return figure


def draw(table, target=None):
    """{name: Figure} of a table from keep_best.

    target: a loss; by default the smallest that every method comes to. Raises ValueError if no
    run comes to it.
    """
    shown = keep_one_batch(table)
    figures = {
        "loss": plan_losses(shown),
        "methods": plan_methods(table, shown),
        "batch": plan_batches(table, target),
        "schedules": plan_schedules(shown),
        "step_sizes": plan_step_sizes(shown),
    }
    return {name: draw_figure(panels) for name, panels in figures.items() if panels}


# ---- the command line ----------------------------------------------------------------------------


ABOUT = "Draws the paper's figures from run folders: python plot.py runs/* writes into figures/"


def parse(argv):
    """The command line: runs, out and target. Raises ValueError for what is not valid."""
    usage = "plot.py RUN ... [--out FOLDER] [--target LOSS]"
    parser = flags.Parser(usage=usage, description=ABOUT)
    out_help = "folder of the pictures [default figures]"
    target_help = "a loss [default: the smallest that every method reaches]"
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--out", type=Path, default="figures", help=out_help)
    parser.add_argument("--target", type=float, help=target_help)
    return parser.parse_args(argv)


def save(figures, folder):
    """Writes each figure as PNG and as SVG, and prints the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            metadata = {"Date": None}  # equal runs give equal files
            files.write_file(path, partial(figure.savefig, format=kind, metadata=metadata))
            print(path)


@command
def main(words):
    """Runs the command line."""
    with blaming_input():
        options = parse(words)
        files.check_writable(options.out)  # now, not when all is drawn
        jax.config.update("jax_platforms", "cpu")  # a run may have the others
        table = keep_best(read_runs(options.runs))
        figures = draw(table, options.target)
    save(figures, options.out)


if __name__ == "__main__":
    sys.exit(main())
