"""The tables of a task's runs, in Markdown that can also be read as it is.

    Steps to loss 3.25       of the best settings, and their ratio to Gauss-Newton's fewest at any
                             batch, over common seeds (Section 6.1.1)
    Losses after 3b tokens   final losses of the best settings (Section 6.1.2), and their steps to
                             the last loss of the best baseline at the same batch and seed
    Costs of a step ..       of the runs of that table
    Settings of AdamW ..     all settings that were tried, the best first (Appendix H), where a
                             batch has several

A setting is named by the flags in which the runs of its method differ; "-" if there are none. A
value that most settings of a method have is not named in the lines, but once, in a sentence below
the table. The loss of a setting is the mean over seeds. The batch is in the title if all lines have
one. Columns that say nothing are left out.
comparison.py tells which runs are compared, and which setting of a method and batch is the best.
"""

import numpy as np

from comparison import (
    count_steps_to_loss_of,
    describe_flag,
    find_best_baselines,
    find_usual,
    label_groups,
    measure_cost,
    summarize_groups,
)
from recipe import METHODS

IN_WORDS = {"method", "setting", "device"}  # columns whose cells start at the left
NOTHING = "-"
USUAL = "Unless a line says otherwise:"  # how the sentence on usual values begins


def tabulate(comparisons):
    """The tables of some Comparisons in Markdown, a list of (title, table)."""
    tables = []
    for comparison in comparisons:
        groups = summarize_groups(comparison)
        usual = {}
        for method, of_method in groups.groupby("method"):
            usual[method] = find_usual([*of_method.setting])
        groups["label"] = label_groups(groups, usual)
        best = groups.drop_duplicates(["method", "batch"])
        best = best.sort_values(["method_rank", "batch"])
        tables.append(tabulate_best(best, comparison, find_best_baselines(groups), usual))
        if comparison.target is None and comparison.table.seconds.notna().any():
            tables.append(tabulate_costs(best, comparison))
        for _, of_method in groups.groupby("method_rank"):
            if of_method.batch.duplicated().any():
                tables.append(tabulate_settings(of_method, comparison, usual))
    return tables


def tabulate_best(best, comparison, baselines, usual):
    """The table of the best settings.

    best: rows of `summarize_groups`; baselines: `find_best_baselines`; usual: {method: its
    `find_usual`}.
    """
    reference = find_reference(best)
    lines = []
    for group in best.itertuples():
        line = {"method": title_of(group), "batch": format_count(group.batch)}
        line["setting"] = group.label
        if comparison.target is None:
            line |= describe_loss(group)
            line |= describe_steps_to_baseline(group, comparison, baselines)
            line["outer steps"] = format_number(group.step)
            line["tokens read"] = format_count(group.tokens)
        else:
            line |= describe_steps(group)
            line["steps / GN's"] = format_number(divide_steps(group, reference))
        lines.append(line)
    quantity = "Losses" if comparison.target is None else "Steps"
    parts = []
    for group in best.drop_duplicates("method").itertuples():
        if usual[group.method]:
            parts.append(f"{title_of(group)} has {describe_flags(usual[group.method])}")
    title, table = finish_table(f"{quantity} {describe_question(comparison)}", lines)
    return title, table + describe_usual(parts)


def tabulate_costs(best, comparison):
    """The table of what a step costs."""
    lines = []
    for group in best.itertuples():
        cost = measure_cost(comparison, group)
        line = {"method": title_of(group), "batch": format_count(group.batch)}
        line["seconds"] = format_digits(cost["seconds"])
        line["kJ"] = format_digits(cost["joules"] / 1000)
        line["tokens read"] = format_count(cost["tokens"])
        line["by line search"] = format_share(cost["of_line_search"])
        line["device"] = cost["device"]
        lines.append(line)
    return finish_table(f"Costs of a step, {describe_question(comparison)}", lines)


def tabulate_settings(groups, comparison, usual):
    """The table of all settings of a method, the best of each batch first.

    usual: as `tabulate_best` takes it.
    """
    lines = []
    for group in groups.sort_values("batch", kind="stable").itertuples():
        line = {"batch": format_count(group.batch), "setting": group.label}
        if comparison.target is not None:
            line |= describe_steps(group)
        lines.append(line | describe_loss(group))
    method = groups.method.iloc[0]
    name = f"Settings of {METHODS[method].title} {describe_question(comparison)}"
    title, table = finish_table(name, lines)
    parts = []
    if usual[method]:
        parts = [describe_flags(usual[method])]
    return title, table + describe_usual(parts)


def title_of(group):
    """The name of a group's method in the tables."""
    return METHODS[group.method].title


def describe_flags(values):
    """Flags and their values in words; values: {name: value}."""
    return ", ".join(describe_flag(name, value) for name, value in values.items())


def describe_usual(parts):
    """The sentence on usual values below a table; none if it has no parts."""
    return f"\n{USUAL} {'; '.join(parts)}.\n" if parts else ""


def finish_table(title, lines):
    """(title, the table in Markdown). A batch that all lines share moves to the title.

    It is removed from the lines, and so are columns that are "-" in every line.
    """
    batches = {line["batch"] for line in lines}
    if len(batches) == 1:
        title += f", batch {batches.pop()}"
        drop(lines, "batch")
    for name in [*lines[0]]:
        if all(line[name] == NOTHING for line in lines):
            drop(lines, name)
    return title, format_table(lines)


def drop(lines, name):
    """Removes a column from lines."""
    for line in lines:
        del line[name]


def describe_question(comparison):
    """What the runs of a Comparison answer, in words."""
    if comparison.target is None:
        return f"after {format_count(comparison.tokens)} tokens"
    return f"to loss {comparison.target:g}"


def find_reference(best):
    """The group of Gauss-Newton with the fewest steps to the target, at any batch; None if none."""
    groups = best[(best.method == "gn") & (best.steps_to_target > 0)]
    return min(groups.itertuples(), key=lambda group: group.steps_to_target, default=None)


def divide_steps(group, reference):
    """A group's steps to the target by those of a reference, at the seeds of both; NaN if none."""
    if reference is None or not group.reached:
        return np.nan
    steps = dict(zip(group.seeds, group.steps_of_runs, strict=True))
    of_reference = dict(zip(reference.seeds, reference.steps_of_runs, strict=True))
    seeds = steps.keys() & of_reference.keys()
    if not seeds:
        return np.nan
    total = sum(steps[seed] for seed in seeds)
    total_of_reference = sum(of_reference[seed] for seed in seeds)
    if total_of_reference == 0:  # a target that its runs are at before their first step
        return np.nan
    return total / total_of_reference


# ---- cells ---------------------------------------------------------------------------------------


def describe_loss(group):
    """Cells on the final loss of a group: its mean over seeds, its extremes, how many seeds."""
    cells = {"loss": "diverged", "lowest": NOTHING, "highest": NOTHING}
    cells["seeds"] = str(len(group.runs))
    if group.diverged:
        return cells
    cells["loss"] = f"{group.loss:.4f}"
    if not group.finished:
        cells["loss"] += f" at step {group.step:.0f}, unfinished"
    if len(group.runs) > 1:
        cells["lowest"] = f"{group.lowest:.4f}"
        cells["highest"] = f"{group.highest:.4f}"
    return cells


def describe_steps_to_baseline(group, comparison, baselines):
    """Cells on the steps of a group to the last loss of the best baseline at its batch.

    baselines: {batch: the best baseline}. No cells if there is none at all.
    """
    if not baselines:
        return {}
    titles = {title_of(baseline) for baseline in baselines.values()}
    name = titles.pop() if len(titles) == 1 else "the best baseline"
    column = f"steps to {name}'s loss"
    cells = {column: NOTHING, "times fewer": NOTHING}
    baseline = baselines.get(group.batch)
    if baseline is None or group.diverged or not group.finished:
        return cells
    steps = count_steps_to_loss_of(comparison, baseline, group)
    steps_of_baseline = count_steps_to_loss_of(comparison, baseline, baseline)
    if not steps:
        return cells
    cells[column] = ", ".join(map(format_number, steps.values()))
    if np.isnan([*steps.values()]).all():
        cells[column] = "not reached"
    total = sum(steps.values())
    if total > 0:
        cells["times fewer"] = format_number(sum(steps_of_baseline[seed] for seed in steps) / total)
    return cells


def describe_steps(group):
    """Cells on the steps of a group to the target: the mean, those of each seed, tokens read."""
    cells = {"steps": NOTHING, "of each seed": NOTHING, "tokens read": NOTHING}
    if group.diverged:
        cells["steps"] = "diverged"
    elif not group.finished:
        cells["steps"] = "unfinished"
    else:
        if group.reached:
            cells["steps"] = format_number(group.steps_to_target)
            cells["tokens read"] = format_count(group.tokens_to_target)
        else:
            cells["steps"] = "not reached"
        cells["of each seed"] = ", ".join(map(format_number, group.steps_of_runs))
    return cells


def format_number(number):
    """A number with up to two decimals; "-" for one that is missing."""
    if np.isnan(number):
        return NOTHING
    return f"{number:.2f}".rstrip("0").rstrip(".")


def format_count(number):
    """A count as the flags take it, such as 400k, 1.2m or 3b; "-" for one that is missing."""
    if np.isnan(number):
        return NOTHING
    for size, suffix in ((1e9, "b"), (1e6, "m"), (1e3, "k")):
        if number >= 0.9995 * size:  # or three digits would round it to "1e+03"
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


def format_digits(number):
    """A number with three digits; "-" for one that is missing."""
    return NOTHING if np.isnan(number) else f"{number:.3g}"


def format_share(number):
    """A share in percent; "-" for one that is missing."""
    return NOTHING if np.isnan(number) else f"{100 * number:.0f}%"


# ---- Markdown ------------------------------------------------------------------------------------


def format_table(lines):
    """A table in Markdown; lines: dicts of texts, {column: cell}."""
    header = list(lines[0])
    body = [list(line.values()) for line in lines]
    widths = [max(map(len, cells)) for cells in zip(header, *body, strict=True)]
    is_left = [name in IN_WORDS for name in header]

    def format_row(cells):
        padded = []
        for cell, width, left in zip(cells, widths, is_left, strict=True):
            padded.append(cell.ljust(width) if left else cell.rjust(width))
        return f"| {' | '.join(padded)} |"

    rule = []
    for width, left in zip(widths, is_left, strict=True):
        rule.append("-" * width if left else "-" * (width - 1) + ":")
    return "\n".join(map(format_row, [header, rule, *body])) + "\n"
