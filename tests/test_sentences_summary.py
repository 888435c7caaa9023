"""The tables of steps and of seconds in RESULTS.md are what the logs give."""

import pytest
from sentences import groups_of, range_of, runs_of, steps_by_seed, sum_of_steps, words_of_results

import comparison

FIVE_M = {"lr": 0.003, "b2": 0.999}  # the setting of full Gauss-Newton at 12m that fails at no seed
PLAIN = {"average": 0.0, "inner_epochs": 1}  # on 45m at 4m: a line search to θ, and one pass
LOWER = "docs/results-5m.md#steps-of-12m-tokens-from-a-lower-loss"
TO_TARGETS = {  # the row of a table: the file, the target, and flags of the methods that need some
    "`5m`, 12m, 3.21": ("5m-12m", 3.21, {"gn": FIVE_M}),
    f"`5m`, 12m, 3.1, [from a lower loss]({LOWER})": (
        "5m-12m-late",
        3.1,
        {"gn_prox": {"steps": 6}},
    ),
    "`45m`, 4m, 4.1": ("45m", 4.1, {"gn": PLAIN}),
    "`45m`, 12m, 4.1": ("45m-12m", 4.1, {}),
    "`45m`, 40m, 4.1, two seeds": (
        "45m-40m",
        4.1,
        {"gn": {"schedule": "global cosine"}, "gn_prox": {"lr": 0.003, "steps": 4}},
    ),
}
METHODS = ("gn", "gn_prox", "layerwise_gn", "soap", "muon")


def span(numbers):
    """The different numbers of some, as a cell has them: 5; 5 or 6; 5 to 7."""
    low, high = int(min(numbers)), int(max(numbers))
    if low == high:
        return f"{low}"
    return f"{low} or {high}" if high == low + 1 else f"{low} to {high}"


def cells_of(row, number_of):
    """The cells of a row: what `number_of` makes of the runs of each method, over the seeds."""
    file, target, flags_of = TO_TARGETS[row]
    cells = []
    for method in METHODS:
        flags = flags_of.get(method, {}) | {"method": method}
        runs = runs_of(f"results/{file}.jsonl", **flags)
        assert all(run["rows"][-1]["val_loss"] <= target for run in runs)
        cell = number_of(runs) if runs else "-"
        must_say_so = len(runs) == 1 and not row.endswith("one seed")
        cells.append(f"{cell}, one seed" if must_say_so else cell)
    return " | ".join(cells)


@pytest.mark.parametrize("row", TO_TARGETS)
def test_so_many_steps_are_needed_to_a_target(row):
    words = words_of_results()
    cells = cells_of(row, lambda runs: span([run["rows"][-1]["step"] for run in runs]))
    assert f"| {row} | {cells} |" in words


@pytest.mark.parametrize("row", TO_TARGETS)
def test_the_steps_take_so_many_seconds_and_kilojoules(row):
    words = words_of_results()

    def range_of_sums(runs, name, unit):
        sums = [sum_of_steps(run, name) / unit for run in runs]
        low, high = range_of(sums).split(" to ")
        return low if low == high else f"{low} to {high}"

    def costs(runs):
        return f"{range_of_sums(runs, 'seconds', 1)} ({range_of_sums(runs, 'joules', 1000)})"

    name = row.replace(f"]({LOWER})", "").replace("[", "")
    assert f"| {name} | {cells_of(row, costs)} |" in words


@pytest.mark.parametrize("row, file", [("`tiny`, 131k", "tiny"), ("`5m`, 4m", "5m")])
def test_so_many_steps_are_needed_to_the_last_loss_of_soap(row, file):
    asked, groups = groups_of(f"results/{file}.jsonl")
    (best,) = comparison.find_best_baselines(groups).values()
    assert best.method == "soap"
    cells = []
    for method in ("gn", "gn_prox", "layerwise_gn", "soap"):
        (group,) = groups[groups.method == method].itertuples()
        steps = comparison.count_steps_to_loss_of(asked, best, group)
        assert len(steps) == 3
        cells.append(span(steps.values()))
    words = words_of_results()
    assert f"| {row}, SOAP's last | {' | '.join(cells)} | - |" in words


def test_the_layerwise_form_of_45m_is_no_slower_than_is_said():
    """At the same seeds. Ranges that overlap are no difference."""
    gn = steps_by_seed("results/45m.jsonl", [1, 2, 3], 4.1, method="gn", **PLAIN)
    layerwise = steps_by_seed("results/45m.jsonl", [1, 2, 3], 4.1, method="layerwise_gn")
    ratios = [many / few for many, few in zip(layerwise, gn, strict=True)]
    assert min(layerwise) <= max(gn)
    words = words_of_results()
    said = f"{min(ratios):.1f} to {max(ratios):.1f}"
    assert f"{said} on `45m` at 4m, which is no difference." in words
    assert f"needs 10 or 11 steps**, {said} times as many as full Gauss-Newton, which is" in words
    assert {*gn} == {*layerwise} == {10, 11}


def test_the_summary_is_true_of_all_of_these():
    """The extremes of the ratios, at the same seeds."""

    def steps_of(row, method):
        file, target, flags_of = TO_TARGETS[row]
        runs = runs_of(f"results/{file}.jsonl", **flags_of.get(method, {}), method=method)
        return {run["config"]["seed"]: run["rows"][-1]["step"] for run in runs}

    def ratios(row, more, fewer):
        more, fewer = steps_of(row, more), steps_of(row, fewer)
        return [more[seed] / fewer[seed] for seed in more.keys() & fewer.keys()]

    to_soap, to_muon, of_layerwise = [], [], []
    for row in TO_TARGETS:
        for method in ("gn", "gn_prox", "layerwise_gn"):
            to_soap += ratios(row, "soap", method)
        to_muon += ratios(row, "muon", "gn")
        of_layerwise += ratios(row, "layerwise_gn", "gn")
    of_prox = []
    rows_of_45m = ("`45m`, 4m, 4.1", "`45m`, 12m, 4.1", "`45m`, 40m, 4.1, two seeds")
    for row in ("`5m`, 12m, 3.21", *rows_of_45m):
        of_prox += ratios(row, "gn_prox", "gn")
    words = words_of_results()
    of_gn = [ratio for row in TO_TARGETS for ratio in ratios(row, "soap", "gn")]
    said = f"{min(of_gn):.1f} to {max(of_gn):.1f} times fewer steps to a loss than SOAP, the best"
    assert f"full Gauss-Newton needs {said}" in words
    assert f"With its two variants it is 2.8 to {max(to_soap):.1f}." in words
    of_45m = [ratio for row in rows_of_45m for ratio in ratios(row, "muon", "gn")]
    assert f"{max(to_muon):.1f}, and {min(of_45m):.1f} to {max(of_45m):.1f} on `45m`." in words
    assert min(to_soap) > 2.8  # what is said is of `5m` at 4m, in a table of its section
    assert f"at most {max(of_layerwise):.2f} times as many as full Gauss-Newton to" in words
    assert f"needs {min(of_prox):.2f} to {max(of_prox):.2f} times as many steps as" in words
    assert f"It is at most {max(to_muon):.1f}, and" in words


def test_full_gauss_newton_is_at_the_last_loss_of_the_layerwise_form_as_early_as_is_said():
    """How many times fewer steps it needs, at each seed."""
    said = {}
    for file in ("tiny", "5m"):
        full, layerwise = (
            {
                run["config"]["seed"]: run["rows"]
                for run in runs_of(f"results/{file}.jsonl", method=m)
            }
            for m in ("gn", "layerwise_gn")
        )
        ratios = []
        for seed, rows in layerwise.items():
            last = rows[-1]
            reached = [row["step"] for row in full[seed] if row["val_loss"] <= last["val_loss"]]
            ratios.append(last["step"] / min(reached))
        assert len(ratios) == 3
        said[file] = sorted({f"{ratio:.2f}" for ratio in ratios})
    assert said == {"tiny": ["1.25", "1.33"], "5m": ["1.25"]}
    words = words_of_results()
    assert "needs 1.25 to 1.33 times fewer on `tiny` and 1.25 on `5m`." in words
    assert "1.25 to 1.33 times as many to its own last loss on `tiny` and on `5m` at 4m" in words
