"""Draws the paper's figures from run folders: `python plot.py runs/*` writes PNG and SVG files into figures/.

Loss against steps and tokens (Figure 1); final loss, and steps to a target loss, against batch (Figures 2 and 5);
Gauss-Newton against its two variants (Figure 3); learning rates and line search step sizes (Appendix D).
Runs that differ in their seed only are a group: its mean, and a band from smallest to largest, at the steps all have.
Of each method and batch the group with the smallest mean final loss is shown, an unfinished one for want of others,
never one that diverged. Where batch is not an axis, it is the largest that most methods have, else a method's largest.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from matplotlib import rcParams, ticker
from matplotlib.figure import Figure

import baselines
import gn
from runtime import checkpoint, files, flags

METHODS = {  # name, colour (Okabe and Ito's, which the colour-blind tell apart), line, marker
    "gn": ("Gauss-Newton", "#0072B2", "-", "o"),
    "gn_prox": ("GN-prox-linear", "#56B4E9", "--", "s"),
    "layerwise_gn": ("layerwise GN", "#009E73", "-.", "^"),
    "adamw": ("AdamW", "#000000", (0, (1, 1)), "v"),
    "muon": ("Muon", "#D55E00", (0, (5, 1, 1, 1, 1, 1)), "D"),
    "soap": ("SOAP", "#CC79A7", (0, (7, 2)), "P"),
}
FAMILY = {"gn", "gn_prox", "layerwise_gn"}  # of Gauss-Newton; the others are baselines
SAME = "model vocab_size context d_model d_ff n_layers n_heads n_kv_heads mlp qk_norm tokenizer data eval_tokens"
rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "plot"})


def gather(folders):
    """{(method, batch): the best group: flags; R logs; common steps, tokens [S], losses, alphas [R, S]; finals [R]}."""
    groups, best, first, columns = defaultdict(dict), {}, {}, ("step", "tokens", "val_loss", "alpha")
    for folder in map(Path, folders):
        try:
            run = {"warmup": 0.0, "inner_warmup": 0.0} | json.loads((folder / "config.json").read_text())["config"]
            inner_steps = max(1, round(run["batch"] / (run["inner_batch"] * run["context"])))
            run |= {"inner_steps": inner_steps, "outer_steps": int(run["steps"]), "name": METHODS[run["method"]][0]}
            run |= {"data": run.get("corpus", run["data"]), "out": None}  # the text by its hash, if known
            run["target_loss"] = float(run.get("target_loss") or 0)
            if rows := [[*map(row.get, columns)] for row in checkpoint.read_log(folder)]:  # null becomes NaN
                groups[json.dumps(run | {"seed": None}, sort_keys=True)][run["seed"]] = np.array(rows, float)
        except files.UNREADABLE as error:
            raise ValueError(f"{folder} is not a run that can be read: {error!r}") from None
        first = first or run
        if differ := [name for name in SAME.split() if run.get(name) != first.get(name)]:
            raise ValueError(f"{folder} and {folders[0]} cannot be compared: they differ in {', '.join(differ)}")
    for text, seeds in groups.items():
        run, logs, last = json.loads(text), [*seeds.values()], np.array([rows[-1] for rows in seeds.values()])
        if np.isfinite(np.concatenate(logs)[:, 2]).all():  # none of them diverged
            common = [*set.intersection(*(set(rows[:, 0]) for rows in logs))]
            steps, tokens, losses, alphas = np.stack([rows[np.isin(rows[:, 0], common)].T for rows in logs], 1)
            run |= dict(logs=logs, steps=steps[0], tokens=tokens[0], losses=losses, alphas=alphas, finals=last[:, 2])
            done = (last[:, 0] >= run["outer_steps"]) | (last[:, 2] <= run["target_loss"])
            group, key = SimpleNamespace(**run, rank=(not done.any(), last[:, 2].mean())), (run["method"], run["batch"])
            best[key] = min(best.get(key, group), group, key=lambda group: group.rank)
    if not best:
        raise ValueError("none of these runs has a loss to show")
    return {(m, b): best[m, b] for m in METHODS for b in sorted(b for method, b in best if method == m)}


def human(number, _=None):
    """A count as the flags take it: 400k, 1.2m, 3b; below one, a fraction."""
    power = sum(number >= 0.9995 * size for size in (1e3, 1e6, 1e9))
    return f"1/{1 / number:.3g}" if 0 < number < 1 else f"{number / 1000**power:.3g}" + ("", "k", "m", "b")[power]


def curve(ax, method, x, values, **changes):
    """Draws the mean of values, an array over runs for each x, and the band from smallest to largest."""
    if len(x):
        look = dict(zip(("label", "color", "ls", "marker"), METHODS[method], strict=True)) | changes
        mean, low, high = np.transpose([(v.mean(), v.min(), v.max()) for v in values])
        ax.plot(x, mean, **{"markevery": 0.12 if len(x) > 8 else 1, "lw": 1.2, "ms": 3.5} | look)
        ax.fill_between(x, low, high, fc=look["color"], alpha=0.2, lw=0, visible=bool((low < high).any()))


def draw_losses(ax, groups, x):
    """Validation loss against x, steps or tokens; labels name the batch where it is not the same."""
    sizes, ends = {group.batch for group in groups}, [getattr(group, x)[-1] for group in groups]
    for group in groups:
        label = group.name + (f",\nbatch {human(group.batch)}" if len(sizes) > 1 else "")
        curve(ax, group.method, getattr(group, x), group.losses.T, label=label)
    ax.set(xlabel={"steps": "outer steps", "tokens": "tokens read"}[x], ylabel="validation loss (nats a token)")
    ax.set_xscale("log" if max(ends) > 5 * min(ends) > 0 else "linear")  # on a logarithmic axis step 0 is not shown


def draw_batches(ax, best, bounds=(), target=None):
    """Final loss, or the first step whose loss is at or below target where all seeds have one, against batch."""
    first = lambda rows: min(rows[(rows[:, 2] <= target) & (rows[:, 0] > 0), 0], default=np.inf)
    value = lambda group: group.finals if target is None else np.array([first(rows) for rows in group.logs])
    for method in dict.fromkeys(method for method, _ in best):
        points = {b: v for (m, b), group in best.items() if m == method and np.isfinite(v := value(group)).all()}
        curve(ax, method, [*points], [*points.values()])
    if not ax.lines:
        raise ValueError(f"no run takes a step to come to the target loss {target}")
    ends = np.array([f(batch for _, batch in best) for f in (min, max)])
    ax.set(xlabel="batch (tokens)", ylabel="final validation loss (nats a token)", xscale="log")
    for group in bounds:
        ax.plot(ends, [group.finals.mean()] * 2, ":", color="grey", label="Muon at the\ninner batch")
    if target is not None:  # dotted: steps as 1 / batch, from the group that came there with the fewest tokens
        fewest = min((line.get_xdata() * line.get_ydata()).min() for line in ax.lines)
        ax.plot(np.minimum(ends, fewest), np.maximum(fewest / ends, 1), ":", color="grey", label="optimal scaling")
        ax.set(ylabel=f"outer steps to loss {target:.4g}", yscale="log")


def draw_schedules(ax, groups):
    """The learning rate of every inner step as a share of its peak; one curve a schedule."""
    for group in {(group.schedule, group.warmup, group.inner_warmup): group for group in groups[::-1]}.values():
        t, k = np.divmod(np.arange(group.outer_steps * group.inner_steps), group.inner_steps)
        rate = gn.learning_rate(t, k, group) if group.method in FAMILY else baselines.learning_rate(t, group)
        rises = [f"{x.replace('_', ' ')} {vars(group)[x]:g}" for x in ("warmup", "inner_warmup") if vars(group)[x]]
        label, values = ",\n".join([group.schedule.replace("+", "+\n"), *rises]), np.asarray(rate)[:, None] / group.lr
        curve(ax, group.method, t + k / group.inner_steps, values, label=label, marker="")
    ax.set(xlabel="outer steps", ylabel="learning rate / its peak", ylim=(-0.05, 1.05))


def draw_step_sizes(ax, group):
    """The α that the line search chose, in every run's log; crosses at the bottom are steps that it refused."""
    step, alpha = np.repeat(group.steps, len(group.alphas)), group.alphas.T.ravel()
    bottom = 0.6 * alpha[alpha > 0].min(initial=1)
    for at, y, look in ((alpha > 0, alpha, {}), (alpha == 0, alpha + bottom, dict(label="refused", marker="x"))):
        curve(ax, group.method, step[at], y[at], ls="", markevery=1, **look)
    ax.set_yscale("log", base=2)
    ax.set(xlabel="outer steps", ylabel="step size α", ylim=(0.8 * bottom, 1.2))


def label(ax):
    """Writes ticks, and the label of each curve right of the axes, moved up or down so little that none overlaps."""
    ax.xaxis.set(major_locator=ticker.MaxNLocator(4, integer=True, steps=[1, 2, 5, 10]), major_formatter=human)
    for axis in (axis for axis in (ax.xaxis, ax.yaxis) if axis.get_scale() == "log"):
        (low, high), base = axis.get_view_interval(), axis.get_transform().base
        ticks = ticker.LogLocator(base, (1, 2, 5) if base == 10 and high < 60 * low else (1,))
        axis.set(major_locator=ticks, minor_locator=ticker.NullLocator(), major_formatter=human)
    lines = sorted(ax.lines, key=lambda line: line.get_ydata()[-1])
    scale, n, ends = 72 / ax.figure.dpi, range(len(lines)), [line.get_xydata()[-1] for line in lines]
    wanted = ax.transData.transform(ends)[:, 1] * scale  # points
    heights = np.array([10 + 10 * line.get_label().count("\n") for line in lines])
    stacked = heights.cumsum() - heights / 2  # where they would stand, one on the other
    gaps = wanted - stacked  # must not fall: the nearest such sequence is made of means of stretches of it
    gaps = [max(min(gaps[j : k + 1].mean() for k in n[i:]) for j in n[: i + 1]) for i in n]
    moves = np.clip(gaps, ax.bbox.y0 * scale, ax.bbox.y1 * scale - heights.sum()) + stacked - wanted
    look = dict(textcoords=("axes fraction", "offset points"), va="center", annotation_clip=False)
    thin = dict(arrowstyle="-", linewidth=0.4, linestyle=(0, (1, 4)), relpos=(0, 0.5))
    for line, end, move, color in zip(lines, ends, moves, (line.get_color() for line in lines), strict=True):
        ax.annotate(line.get_label(), end, (1.03, move), arrowprops=thin | {"color": color}, color=color, **look)


def draw(best, target=None):
    """{name: Figure}; target: a loss, by default the smallest that every method comes to. Raises ValueError."""
    batches = [batch for _, batch in best]
    shared = max(batches, key=lambda batch: (batches.count(batch), batch))
    shown = {method: best.get((method, shared), group) for (method, _), group in best.items()}
    panels = {"loss": [(draw_losses, [*shown.values()], x) for x in ("steps", "tokens")], "methods": []}
    if len({*batches}) > 1:
        inner = {g.inner_batch * g.context for g in best.values() if g.method in FAMILY}
        bounds = [best.pop(key) for key in [*best] if key[0] == "muon" and key[1] in inner]  # Section 5
        reached = [min(g.finals.max() for (m, _), g in best.items() if m == method) for method, _ in best]
        panels["batch"] = [(draw_batches, best, bounds), (draw_batches, best, [], target or max(reached))]
    for pair in [("gn", other) for other in ("layerwise_gn", "gn_prox") if {"gn", other} <= {*shown}]:
        two = {key: group for key, group in best.items() if key[0] in pair}
        panels["methods"] += [(draw_batches, two) if len(two) > 2 else (draw_losses, [*map(shown.get, pair)], "steps")]
    families = [[group for m, group in shown.items() if (m in FAMILY) == ours] for ours in (True, False)]
    panels["schedules"] = [(draw_schedules, groups) for groups in families if groups]
    panels["step_sizes"] = [(draw_step_sizes, g) for g in shown.values() if np.isfinite(g.alphas).any()]
    figures = {name: Figure((3.4 * len(row), 2.6), dpi=200) for name, row in panels.items() if row}
    for name, figure in figures.items():
        for i, (fill, *arguments) in enumerate(row := panels[name]):  # the right quarter of each is for labels
            ax = figure.add_axes(((i + 0.18) / len(row), 0.17, 0.53 / len(row), 0.77))
            fill(ax, *arguments)
            label(ax)
    return figures


def main(argv=None):
    """Runs the command line. Exit status: 0; 2 for bad input, 1 where a picture cannot be written."""
    parser = flags.Parser(usage="plot.py RUN ... [--out FOLDER] [--target LOSS]", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--out", type=Path, default="figures", help="folder of the pictures [default figures]")
    parser.add_argument("--target", type=float, help="a loss [default: the smallest that every method reaches]")
    try:
        options = parser.parse_args(argv)
        figures = draw(gather(options.runs), options.target)
        options.out.mkdir(parents=True, exist_ok=True)
        for path in [options.out / f"{name}.{kind}" for name in figures for kind in ("png", "svg")]:
            figures[path.stem].savefig(path, metadata={"Date": None})  # equal runs give equal files
            print(path)
    except (ValueError, OSError) as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
