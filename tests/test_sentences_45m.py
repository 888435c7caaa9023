"""The numbers in the sentences on `45m` are what the logs give."""

import numpy as np
from sentences import (
    extremes,
    range_of,
    ratios_of,
    runs_of,
    steps_by_seed,
    sum_of_steps,
    the_run_of,
    words_of,
)

SEEDS = [1, 2, 3]


def test_it_takes_so_many_steps_at_45m_to_the_target():
    """At each seed, in their order."""
    steps = {}
    for method in ("gn", "gn_prox", "soap"):
        steps[method] = steps_by_seed("results/45m.jsonl", SEEDS, 4.1, method=method)
    gn, prox = steps["gn"], steps["gn_prox"]
    assert {*gn} == {10, 11} and {*prox} == {7, 8}
    words, readme = words_of("RESULTS.md", "README.md")
    to_target = "needs 10 or 11 steps to a loss of 4.1, prox-linear 7 or 8"
    assert f"{to_target}, and SOAP {range_of(steps['soap'])}." in readme
    to_soap = ratios_of(gn, steps["soap"])
    assert f"needs 10 or 11 steps**, {to_soap} times fewer than SOAP" in words
    assert f"| full Gauss-Newton | SOAP | 5.4 | 4 | 3.6 to 4.2 | 5.7 to 6.5 | {to_soap} |" in words
    to_soap = ratios_of(prox, steps["soap"])
    assert f"**Prox-linear needs 7 or 8**, {to_soap} times fewer." in words
    assert f"| 10.2 to 10.4 | {to_soap} |" in words
    assert "on `45m` it needs 7 or 8 steps in place of 10 or 11 |" in words
    assert max(prox) < min(gn)  # so the difference counts
    to_gn = extremes(np.array(prox) / np.array(gn))
    assert f"Prox-linear needs {to_gn} times as many steps as full Gauss-Newton" in words

    starts = [run["rows"][0]["val_loss"] for run in runs_of("results/45m.jsonl")]
    assert f"the runs start from {min(starts):.2f} to {max(starts):.2f}." in words
    for run in runs_of("results/45m.jsonl"):
        assert run["rows"][-1]["tokens"] < 184e6  # "reads any of it twice"


def test_the_settings_at_45m_do_as_is_said():
    """One run of each, with seed 0."""
    file = "results/45m-grids.jsonl"
    (words,) = words_of("RESULTS.md")

    def steps_of(method, lr):
        run = the_run_of(file, method=method, lr=lr, schedule="constant")
        assert run["rows"][-1]["val_loss"] <= 4.1
        return run["rows"][-1]["step"]

    muon = [steps_of("muon", lr) for lr in (0.01, 0.02, 0.03)]
    soap = [steps_of("soap", lr) for lr in (0.003, 0.005, 0.008)]
    assert f"SOAP needs {soap[0]}, {soap[1]} and {soap[2]} steps at 0.003" in words
    assert f"and Muon {muon[0]}, {muon[1]} and {muon[2]} at 0.01" in words
    gn = the_run_of(file, method="gn", lr=0.01, line_search=5, steps=12)["rows"]
    ratio = f"{muon[2] / gn[-1]['step']:.1f}"
    assert f"Muon needs {muon[2]} steps**, {ratio} times as many as full Gauss-Newton" in words
    assert f"| full Gauss-Newton | Muon | 16 | - | - | 7.8 to 9.0 | {ratio}, one seed |" in words
    read = the_run_of(file, method="muon", lr=0.03)["rows"][-1]["tokens"]
    assert read > 184e6  # "read some of the text twice"

    falling, steady = [], []
    for method, lr, steps in (("soap", 0.005, 30), ("muon", 0.02, 40)):
        falls = the_run_of(file, method=method, lr=lr, schedule="cosine")["rows"]
        stays = the_run_of(file, method=method, lr=lr, schedule="constant")["rows"]
        assert falls[-1]["step"] == stays[steps]["step"] == steps
        falling.append(f"{falls[-1]['val_loss']:.3f}")
        steady.append(f"{stays[steps]['val_loss']:.3f}")
    ends = f"ends at {falling[0]}, and Muon planned for 40 at {falling[1]}."
    assert f"SOAP planned for 30 steps {ends}" in words
    assert f"without it, they are at {steady[0]} and {steady[1]}." in words

    assert f"{len(runs_of(file, method='gn'))} of full Gauss-Newton were tried, 4 of" in words
    tried = [len(runs_of(file, method=method)) for method in ("gn_prox", "soap", "muon")]
    assert f"{tried[0]} of prox-linear, {tried[1]} of SOAP, {tried[2]} of Muon" in words

    layerwise = the_run_of(file, method="layerwise_gn", lr=0.01)["rows"]
    assert f"is at {layerwise[12]['val_loss']:.3f} after its 12 steps." in words
    pairs = zip(layerwise[1:], gn[1:], strict=False)
    is_ahead = [one["val_loss"] < other["val_loss"] for one, other in pairs]
    assert "For the first seven steps, it is ahead" in words
    assert is_ahead == 7 * [True] + (len(gn) - 8) * [False]


def test_the_inner_loops_at_45m_go_as_far_as_is_said():
    """At three seeds, and with more step sizes with seed 0."""
    (words,) = words_of("RESULTS.md")
    quarters, first = [], []
    for run in runs_of("results/45m.jsonl", method="gn"):
        alphas = [row["alpha"] for row in run["rows"][1:]]
        quarters.append(next(i for i, alpha in enumerate(alphas) if alpha != 0.25))
        first.append(run["rows"][1]["loss_at_1"])
    assert {*quarters} == {5, 6}
    assert "In the first five or six steps of each run, the line search chooses 0.25" in words
    assert f"At the end of the first inner loop, at θ, the loss is {range_of(first)}." in words

    file = "results/45m-grids.jsonl"
    five = the_run_of(file, method="gn", lr=0.01, line_search=5, steps=12)["rows"]
    ten = the_run_of(file, method="gn", lr=0.01, line_search=10)["rows"]
    assert round(ten[1]["alpha"], 2) == 0.18 and ten[-1]["step"] == 10
    lower = five[3]["val_loss"] - ten[3]["val_loss"]
    assert "the line search takes 0.18 at first" in words
    assert f"{lower:.2f} lower after three steps, but the run needs 10 steps as before." in words
    larger = the_run_of(file, method="gn", lr=0.015)["rows"]
    assert larger[1]["alpha"] == 0.125 and larger[-1]["step"] == 11
    assert "it takes 0.125 at first, and the run needs 11." in words


def test_the_first_inner_loop_at_45m_lowers_the_quadratic_as_is_said():
    """Means over all inner steps of the first outer step."""
    (words,) = words_of("RESULTS.md")

    def first_means(file, **flags):
        return [run["rows"][1]["inner_loss"] for run in runs_of(f"results/{file}.jsonl", **flags)]

    setting = {"method": "gn", "lr": 0.01, "schedule": "global cosine"}
    means = first_means("45m", **setting) + first_means("45m-grids", **setting)
    assert f"its values are {extremes(means)} on average" in words
    starts = [run["rows"][0]["val_loss"] for run in runs_of("results/45m.jsonl")]
    assert f"where the loss at the start is {extremes(starts)}." in words
    (of_six,) = first_means("45m-grids", method="gn", lr=0.006)
    (of_three,) = first_means("45m-grids", method="gn", lr=0.003)
    assert f"With 0.006 they are {of_six:.2f}, and with 0.003" in words
    assert f"`constant+inner cosine` {of_three:.2f}." in words

    slow = the_run_of("results/45m-grids.jsonl", method="gn", lr=0.003)["rows"][1:]
    highest = max(row["loss_at_1"] for row in slow)
    assert f"the loss at θ is at most {highest:.1f}, and the line search takes half" in words
    alphas = [round(row["alpha"], 2) for row in slow]
    assert alphas == 9 * [0.5] + 5 * [0.35] and slow[-1]["val_loss"] > 4.1

    small = {"method": "gn", "lr": 0.003, "b2": 0.999}
    starts = [run["rows"][0]["val_loss"] for run in runs_of("results/5m-12m.jsonl", **small)]
    of_5m = f"is {extremes(first_means('5m-12m', **small))} on average, and the loss at the start"
    assert f"the quadratic {of_5m} {extremes(starts)}." in words
    prox = first_means("45m", method="gn_prox") + first_means(
        "45m-grids", method="gn_prox", lr=0.01
    )
    assert f"no better in its first loop ({extremes(prox)})." in words


def test_the_runs_at_45m_with_12m_tokens_do_as_is_said():
    """With seed 0."""
    file = "results/45m-12m-grids.jsonl"
    (words,) = words_of("RESULTS.md")
    assert steps_by_seed(file, [0, 0], 4.1, method="gn_prox") == [4, 4]
    at_4m = the_run_of("results/45m-grids.jsonl", method="gn_prox", lr=0.01, steps=12)
    assert at_4m["rows"][-1]["step"] == 7
    costs = {costs_of(run) for run in runs_of(file, method="gn_prox")}
    (at_12m,) = costs  # of both runs, as they are rounded
    assert f"each of the two runs takes {at_12m}; the one with batches" in words
    assert f"with batches of 4m and 0.01 takes {costs_of(at_4m)}." in words
    slower = the_run_of("results/45m-grids.jsonl", method="gn_prox", lr=0.006)
    assert slower["rows"][-1]["step"] == 8 and "it needs 8 and 7." in words

    gn = the_run_of(file, method="gn")["rows"]
    assert [row["alpha"] == 0 for row in gn[1:]] == 5 * [True] + 4 * [False]
    assert f"and the run ends at {gn[-1]['val_loss']:.3f}." in words
    small = the_run_of("results/45m-grids.jsonl", method="gn", lr=0.01, line_search=5, steps=12)
    at_theta = [f"{rows[1]['loss_at_1']:.0f}" for rows in (gn, small["rows"])]
    ends = f"is {at_theta[0]}, where it is {at_theta[1]} with batches of 4m."
    assert f"the loss at θ {ends}" in words
    farther = gn[1]["norm_matrices"] / small["rows"][1]["norm_matrices"]
    assert f"the weight matrices are {farther:.1f} times as far from their start" in words
    quarter, start = gn[1]["loss_at_0.25"], gn[1]["loss_at_0"]
    assert f"it is still {quarter:.1f}, where the start has {start:.1f}." in words
    (tuning,) = words_of("docs/tuning.md")
    assert f"9 planned steps it ends at {gn[-1]['val_loss']:.3f}, above the target." in tuning
    layerwise = the_run_of("results/45m-grids.jsonl", method="layerwise_gn")["rows"]
    assert f"it ends at {layerwise[-1]['val_loss']:.3f}, just above the target." in tuning


def costs_of(run):
    """The seconds, the energy and the tokens of a run, as the page says them."""
    seconds = sum_of_steps(run, "seconds")
    kilojoules = sum_of_steps(run, "joules") / 1000
    tokens = run["rows"][-1]["tokens"] / 1e6
    return f"{seconds:.0f} s and {kilojoules:.0f} kJ, and reads {tokens:.0f}m tokens"


def test_a_run_at_45m_takes_as_much_time_and_energy_as_is_said():
    costs, seconds, of_a_step = {}, {}, {}
    for method in ("gn", "gn_prox", "soap"):
        runs = runs_of("results/45m.jsonl", method=method)
        seconds[method] = [sum_of_steps(run, "seconds") for run in runs]
        kilojoules = [sum_of_steps(run, "joules") / 1000 for run in runs]
        costs[method] = f"{range_of(seconds[method])} s and {range_of(kilojoules)} kJ"
        of_a_step[method] = np.median([row["seconds"] for run in runs for row in run["rows"][2:]])
    (words,) = words_of("RESULTS.md")
    of_gn = f"full Gauss-Newton takes {costs['gn']}, prox-linear {costs['gn_prox']}"
    assert f"{of_gn}, SOAP {costs['soap']}." in words
    gn, prox, soap = (f"{number:.1f}" for number in of_a_step.values())
    assert f"A step takes {gn}, {prox} and {soap} s, in this order." in words
    of_both = f"{range_of(seconds['gn'])} s against {range_of(seconds['soap'])} s, with"
    assert f"on `45m` {of_both} batches of 4m only |" in words
    assert round(np.mean(seconds["soap"]) / np.mean(seconds["gn"])) == 2  # "about half"
    assert round(np.mean(seconds["soap"]) / np.mean(seconds["gn_prox"])) == 3  # "a third"
