"""What the tests of numbers in sentences read: the words of pages, and the runs behind them."""

import numpy as np

import comparison
import pages
from runtime import packed


def words_of(*names):
    """The text of pages in one line each."""
    return [" ".join((pages.ROOT / name).read_text(encoding="utf-8").split()) for name in names]


def words_of_results():
    """The text of RESULTS.md, and of the pages on each model behind it, in one line."""
    of_models = [f"docs/results-{model}.md" for model in ("tiny", "5m", "45m")]
    return " ".join(words_of("RESULTS.md", *of_models))


def groups_of(file):
    """The Comparison of a file whose runs are all of one length, and its groups, the best first."""
    (asked,) = comparison.compare_at_tokens(comparison.read_runs([pages.ROOT / file]))
    return asked, comparison.summarize_groups(asked)


def find_group(groups, method, **flags):
    """The group of a setting."""
    flags |= {"method": method}
    (found,) = groups[[flags.items() <= setting.items() for setting in groups.setting]].itertuples()
    return found


def losses_of(asked, group):
    """The losses of the only run of a group."""
    (run,) = group.runs
    return asked.table[asked.table.run == run].val_loss


def runs_of(file, **flags):
    """The packed runs of a file that have some flags."""
    runs = packed.read(pages.ROOT / file)
    return [run for run in runs if flags.items() <= run["config"].items()]


def the_run_of(file, **flags):
    """The only packed run of a file that has some flags."""
    (run,) = runs_of(file, **flags)
    return run


def steps_by_seed(file, seeds, target, **flags):
    """The steps of the runs with some flags to a target, which all reach, in the order of seeds."""
    runs = sorted(runs_of(file, **flags), key=lambda run: run["config"]["seed"])
    assert [run["config"]["seed"] for run in runs] == seeds
    assert all(run["rows"][-1]["val_loss"] <= target for run in runs)
    return [run["rows"][-1]["step"] for run in runs]


def table_of(rows, columns):
    """The rows of a log as lines of a table, one for each of columns: {what it is called: name}."""
    lines = []
    for words, name in columns.items():
        cells = [f"{row[name]:.2f}" for row in rows]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def was_refused(run):
    """Whether a step of a run was refused."""
    return any(row.get("alpha") == 0 for row in run["rows"])


def sum_of_steps(run, name):
    """The sum of a column over all outer steps of a run, without the warm-up."""
    return sum(row[name] for row in run["rows"][1:])


def ratios_of(fewer, more):
    """How many times fewer steps there are, at each seed: a text with the range of the ratios."""
    ratios = [many / few for few, many in zip(fewer, more, strict=True)]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def range_of(numbers):
    return f"{min(numbers):.0f} to {max(numbers):.0f}"


def extremes(numbers):
    """The smallest and the largest of some numbers, as the page says them."""
    numbers = np.asarray(numbers)
    return f"{numbers.min():.2f} to {numbers.max():.2f}"
