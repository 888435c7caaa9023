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
        run = the_run_of(file, method=method, lr=lr)
        assert run["rows"][-1]["val_loss"] <= 4.1
        return run["rows"][-1]["step"]

    muon = [steps_of("muon", lr) for lr in (0.01, 0.02)]
    soap = [steps_of("soap", lr) for lr in (0.003, 0.005)]
    assert f"SOAP {soap[0]} and {soap[1]}, Muon {muon[0]} and {muon[1]}." in words
    flags = {"lr": 0.01, "schedule": "global cosine", "line_search": 5}
    gn = the_run_of(file, method="gn", **flags)["rows"]
    ratio = f"{muon[1] / gn[-1]['step']:.1f}"
    assert f"Muon needs {muon[1]} steps**, {ratio} times as many as full Gauss-Newton" in words
    assert f"| full Gauss-Newton | Muon | 16 | - | - | 7.8 to 9.0 | {ratio}, one seed |" in words

    layerwise = the_run_of(file, method="layerwise_gn", lr=0.01)["rows"]
    assert f"is at {layerwise[12]['val_loss']:.3f} after its 12 steps." in words
    pairs = zip(layerwise[1:], gn[1:], strict=False)
    is_ahead = [one["val_loss"] < other["val_loss"] for one, other in pairs]
    assert "For the first seven steps, it is ahead" in words
    assert is_ahead == 7 * [True] + (len(gn) - 8) * [False]


def test_the_inner_loops_at_45m_go_as_far_as_is_said():
    """At three seeds, and at a smaller learning rate with seed 0."""
    (words,) = words_of("RESULTS.md")
    quarters, first = [], []
    for run in runs_of("results/45m.jsonl", method="gn"):
        alphas = [row["alpha"] for row in run["rows"][1:]]
        quarters.append(next(i for i, alpha in enumerate(alphas) if alpha != 0.25))
        first.append(run["rows"][1]["loss_at_1"])
    assert {*quarters} == {5, 6}
    assert "In the first five or six steps of each run, the line search chooses 0.25" in words
    assert f"At the end of the first inner loop, at θ, the loss is {range_of(first)}." in words

    slow = the_run_of("results/45m-grids.jsonl", method="gn", lr=0.003)["rows"][1:]
    highest = max(row["loss_at_1"] for row in slow)
    assert f"it is at most {highest:.1f} there, and the line search takes half" in words
    assert [row["alpha"] for row in slow[:9]] == 9 * [0.5]


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
    of_both = f"{range_of(seconds['gn'])} s against {range_of(seconds['soap'])} s |"
    assert f"on `45m` {of_both}" in words
    assert round(np.mean(seconds["soap"]) / np.mean(seconds["gn"])) == 2  # "about half"
    assert round(np.mean(seconds["soap"]) / np.mean(seconds["gn_prox"])) == 3  # "a third"
