"""The numbers in the sentences on `5m` are what the logs give."""

import numpy as np
import pandas as pd
from logs import FAMILY
from sentences import (
    extremes,
    find_group,
    groups_of,
    losses_of,
    range_of,
    ratios_of,
    runs_of,
    steps_by_seed,
    sum_of_steps,
    table_of,
    the_run_of,
    was_refused,
    words_of,
    words_of_results,
)

import comparison
import pages


def test_gauss_newton_at_5m_is_as_far_as_is_said():
    """From the baseline, and from its own best setting; with the step sizes it takes."""
    asked, groups = groups_of("results/5m-grids.jsonl")
    (rival,) = comparison.find_best_baselines(groups).values()
    assert rival.method == "soap"
    best = groups[groups.method == "gn"].iloc[0]
    usual = {"schedule": "global cosine", "inner": "muon", "damping": 0.0}
    gn = find_group(groups, "gn", lr=0.01, line_search=5, **usual)
    rates = {}  # {steps: the learning rates that need so many}
    for group in groups[groups.method == "gn"].itertuples():
        if group.setting["line_search"]:
            (steps,) = comparison.count_steps_to_loss_of(asked, rival, group).values()
            rates.setdefault(steps, set()).add(group.setting["lr"])
    words = words_of_results()
    assert {*rates} == {4, 5, 6, 20} and rates[4] == {0.006} and rates[20] == {0.03}
    assert f"but one need {25 / 6:.1f} to {25 / 4:.1f} times" in words
    quick = find_group(groups, "gn", lr=0.006)
    assert f"and ends {quick.loss - best.loss:.3f} higher than the best setting" in words
    many = find_group(groups, "gn", lr=0.01, line_search=10)
    assert f"({many.loss:.3f} with them, {gn.loss:.3f} without)" in words

    def step_sizes(group):
        return asked.table[asked.table.run == group.runs[0]].alpha.iloc[1:]

    assert set(step_sizes(gn).iloc[:21].round(2)) == {0.25, 0.35}
    assert (step_sizes(gn).iloc[21:] > 0.36).all()
    starts = asked.table.val_loss[asked.table.step == 0]
    assert f"the losses after it are {starts.min():.4f} to {starts.max():.4f}." in words
    assert "Five machines were used" in words and starts.nunique() == 5
    is_small = step_sizes(find_group(groups, "gn", lr=0.02)) < 0.25
    assert [*is_small.index[is_small] - is_small.index[0] + 1] == [*range(4, 13)]
    refused = (step_sizes(find_group(groups, "gn", lr=0.03)) == 0).sum()
    assert f"{refused} of the 25 steps are refused" in words


def test_what_helps_gauss_newton_and_prox_linear_at_5m_is_as_is_said():
    asked, groups = groups_of("results/5m-grids.jsonl")
    (rival,) = comparison.find_best_baselines(groups).values()
    falling = {"schedule": "global cosine"}
    words = words_of_results()

    other = find_group(groups, "gn_prox", schedule="constant+inner cosine", average=0.99)
    without = find_group(groups, "gn_prox", lr=0.01, average=0.0)
    prox = find_group(groups, "gn_prox", lr=0.01, average=0.99, **falling)
    ends = f"with an average of 0.99 it ends at {prox.loss:.3f}, and at {other.loss:.3f} with"
    assert ends in words
    assert f"Without the average it ends as low ({without.loss:.3f}), but needs 9" in words
    assert comparison.count_steps_to_loss_of(asked, rival, prox) == {0: 5}
    assert comparison.count_steps_to_loss_of(asked, rival, without) == {0: 9}

    free = groups[[setting.get("line_search") == 0 for setting in groups.setting]]
    free = free[free.method == "gn"]
    assert len(free) == 3 and all(losses_of(asked, run).max() > 200 for run in free.itertuples())
    assert f"of each run, and ends at {free.loss.min():.1f} to {free.loss.max():.1f}." in words

    inner = {"schedule": "constant+inner cosine", "lr": 0.01}
    restart, no_restart = (
        find_group(groups, "gn", restart=flag, **inner) for flag in (True, False)
    )
    assert f"ends {restart.loss - no_restart.loss:.3f} higher, and damping" in words
    same = {"line_search": 5, "inner": "muon"} | falling
    damped, plain = (find_group(groups, "gn", lr=0.01, damping=d, **same) for d in (0.0001, 0.0))
    assert f"damping 0.0001 {damped.loss - plain.loss:.3f} higher." in words
    same = {"line_search": 5, "lr": 0.003} | falling
    adamw, muon = (find_group(groups, "gn", inner=name, **same) for name in ("adamw", "muon"))
    assert "makes no difference that counts at learning rate 0.003" in words
    assert abs(muon.loss - adamw.loss) < spread_of_gauss_newton()


def spread_of_gauss_newton():
    """The distance between the lowest and the highest seed of Gauss-Newton at 5m."""
    _, groups = groups_of("results/5m.jsonl")
    gn = groups.set_index("method").loc["gn"]
    return gn.highest - gn.lowest


def test_it_takes_so_many_steps_at_5m_to_the_target():
    table = comparison.read_runs([pages.ROOT / "results/5m-target.jsonl"])
    (asked,) = comparison.compare_to_targets(table, 3.21)
    groups = comparison.summarize_groups(asked)
    steps = groups.drop_duplicates("method").set_index("method").steps_to_target
    words = words_of_results()
    assert f"is below it after {steps.gn:.0f} steps of a run of 10" in words
    assert f"and prox-linear after {steps.gn_prox:.0f}," in words
    assert f"SOAP needs {steps.soap:.0f} steps" in words
    assert f"and Muon {steps.muon:.0f} at" in words
    ratios = f"{steps.soap / steps.gn:.1f} and {steps.muon / steps.gn:.1f} times as many"
    assert ratios in words
    tokens = groups.drop_duplicates("method").set_index("method").tokens
    assert "63.4m tokens" in words and "They read the text about 4 times" in words
    assert round(tokens.soap / 63.4e6) == round(tokens.muon / 63.4e6) == 4
    losses = {}
    for group in groups[groups.method == "gn"].itertuples():
        losses[group.setting["inner_epochs"]] = group.loss
    assert f"ends at {losses[2]:.3f} with it and at {losses[1]:.3f} without" in words
    seeds = f"three seeds of Gauss-Newton differ by {spread_of_gauss_newton():.3f}"
    assert f"{seeds} (the section above)" in words


def test_it_takes_so_many_steps_of_12m_tokens_to_the_target():
    """At each seed, in their order; with the seconds and joules of the steps.

    Of Gauss-Newton, the setting that fails at none.
    """
    steps, seconds, kilojoules = {}, {}, {}
    for method in ("gn", "gn_prox", "layerwise_gn", "muon", "soap"):
        flags = {"lr": 0.003, "b2": 0.999} if method == "gn" else {}
        seeds = [1, 2, 3, 4, 5, 6] if method == "gn" else [1, 2, 3]
        steps[method] = steps_by_seed("results/5m-12m.jsonl", seeds, 3.21, method=method, **flags)
        runs = runs_of("results/5m-12m.jsonl", method=method, **flags)
        seconds[method] = [sum_of_steps(run, "seconds") for run in runs]
        kilojoules[method] = [sum_of_steps(run, "joules") / 1000 for run in runs]
    assert steps["gn_prox"] == [5, 5, 5]
    assert {*steps["gn"][:3]} == {8, 9} and steps["gn"][3:] == [8, 8, 8]

    words = words_of_results()
    prox_to_soap = ratios_of(steps["gn_prox"], steps["soap"])
    prox_to_muon = ratios_of(steps["gn_prox"], steps["muon"])
    assert f"{prox_to_soap} times fewer than SOAP, and {prox_to_muon} times fewer than" in words
    assert f"5, one seed | {prox_to_soap} |" in words
    gn_to_soap = ratios_of(steps["gn"][:3], steps["soap"])
    gn_to_muon = ratios_of(steps["gn"][:3], steps["muon"])
    assert f"{gn_to_soap} times fewer than SOAP, and {gn_to_muon} times fewer than" in words
    assert f"5, one seed | {gn_to_soap} |" in words
    assert f"| full Gauss-Newton | Muon | 16 | - | - | {gn_to_muon} |" in words
    assert f"where full Gauss-Newton needs {np.mean(steps['gn'][:3]):.2f} steps on average" in words
    for name in ("soap", "muon"):  # the other three seeds are within these ranges
        ratios = [many / few for few, many in zip(steps["gn"][:3], steps[name], strict=True)]
        assert min(ratios) <= min(steps[name]) / 8 and max(steps[name]) / 8 <= max(ratios)

    assert max(seconds["gn"] + seconds["gn_prox"]) < min(seconds["soap"] + seconds["muon"])
    assert max(kilojoules["gn"] + kilojoules["gn_prox"]) < min(kilojoules["soap"])
    assert 0.9 < np.mean(seconds["layerwise_gn"]) / np.mean(seconds["soap"]) < 1  # "hardly less"
    assert 1 < np.mean(kilojoules["layerwise_gn"]) / np.mean(kilojoules["soap"]) < 1.1

    assert "about 133m tokens" in words
    often = {name: [] for name in steps}
    for run in runs_of("results/5m-12m.jsonl"):
        times = run["rows"][-1]["tokens"] / 133e6
        often[run["config"]["method"]].append(times)
    assert "SOAP and Muon read the text more than 4 and more than 6 times" in words
    assert min(often["soap"]) > 4 and min(often["muon"]) > 6
    assert max(often["gn"] + often["gn_prox"] + often["layerwise_gn"]) < 1  # "none of it twice"


def test_it_takes_so_many_steps_from_a_lower_loss():
    file = "results/5m-12m-late.jsonl"
    steps = {}
    for method in ("gn", "layerwise_gn", "soap", "muon"):
        steps[method] = steps_by_seed(file, [1, 2, 3], 3.1, method=method)
    planned_6, planned_4 = (
        steps_by_seed(file, [1, 2, 3], 3.1, method="gn_prox", steps=planned) for planned in (6, 4)
    )
    assert steps["gn"] == [4, 5, 4] and steps["layerwise_gn"] == [5, 5, 5]
    assert planned_6 == [4, 4, 4] and planned_4 == [3, 3, 3]
    words = words_of_results()
    layerwise = f"{np.mean(steps['layerwise_gn']) / np.mean(steps['gn']):.2f}"
    assert f"needs 4 or 5**, {layerwise} times as many" in words
    to_soap = ratios_of(steps["gn"], steps["soap"])
    to_muon = ratios_of(steps["gn"], steps["muon"])
    assert f"needs {to_soap} times fewer steps than SOAP**, and {to_muon} times fewer" in words
    prox_to_soap = ratios_of(planned_6, steps["soap"])
    layerwise_to_soap = ratios_of(steps["layerwise_gn"], steps["soap"])
    assert f"with 6 planned steps needs {prox_to_soap} times fewer than SOAP, and the" in words
    assert f"the layerwise form {layerwise_to_soap} times." in words

    def to_gauss_newton(prox, gn):
        return np.array(prox) / np.array(gn)

    at_6, at_4 = (to_gauss_newton(planned, steps["gn"]) for planned in (planned_6, planned_4))
    assert (at_6.min(), at_6.max()) == (0.8, 1)
    assert "planned**, 0.8 to 1 times as many as full Gauss-Newton at the same seed" in words
    assert f"planned it needs 3, {extremes(at_4)} times as many: a difference" in words
    higher = "results/5m-12m.jsonl"
    prox = steps_by_seed(higher, [1, 2, 3], 3.21, method="gn_prox")
    of_gn = steps_by_seed(higher, [*range(1, 7)], 3.21, method="gn", lr=0.003, b2=0.999)
    ratios = to_gauss_newton(prox, of_gn[:3])
    assert f"From the higher loss, prox-linear needed {extremes(ratios)} times as many" in words

    lower = [run["rows"][0]["val_loss"] for run in runs_of(file)]
    higher = [run["rows"][0]["val_loss"] for run in runs_of("results/5m-12m.jsonl")]
    starts = f"{min(lower):.2f} to {max(lower):.2f} in place of {min(higher):.2f} to"
    assert f"the runs start from {starts} {max(higher):.2f}." in words
    file = "results/5m-12m-start.jsonl"
    assert steps_by_seed(file, [0, 0], 3.21, method="gn") == [2, 2]
    assert steps_by_seed(file, [0], 3.21, method="gn_prox") == [3]


def test_a_step_of_12m_tokens_takes_as_long_as_is_said():
    """Medians over all steps but the first of each run, which compiles."""
    medians = {}
    for method in ("gn", "soap", "muon"):
        runs = runs_of("results/5m-12m.jsonl", method=method)
        seconds = [row["seconds"] for run in runs for row in run["rows"][2:]]
        medians[method] = np.median(seconds)
    to_soap, to_muon = (medians["gn"] / medians[name] for name in ("soap", "muon"))
    (words,) = words_of("README.md")
    assert f"takes {to_soap:.1f} to {to_muon:.1f} times as long there as one of SOAP" in words


def test_layerwise_takes_so_many_steps_of_12m_tokens():
    file = "results/5m-12m.jsonl"
    seeds = [1, 2, 3]
    layerwise = steps_by_seed(file, seeds, 3.21, method="layerwise_gn")
    assert layerwise == [10, 10, 10]
    gn = steps_by_seed(file, [*range(1, 7)], 3.21, method="gn", lr=0.003, b2=0.999)
    soap = steps_by_seed(file, seeds, 3.21, method="soap")
    to_gn = extremes([many / few for many, few in zip(layerwise, gn[:3], strict=True)])
    assert max(gn) < 10  # so the difference counts
    words = words_of_results()
    assert f"needs 10 at every seed**: {to_gn} times as many as full" in words
    assert f"and {ratios_of(layerwise, soap)} times fewer than SOAP. The paper has 1.4" in words
    assert f"| layerwise | SOAP | 3.4 | 4 | 5 | {ratios_of(layerwise, soap)} |" in words
    assert f"it is {to_gn} on `5m` at 12m (at a learning rate that" in words
    apart = [many - few for many, few in zip(layerwise, gn[:3], strict=True)]
    assert "at two of the three seeds it is one step" in words
    assert sorted(apart) == [1, 1, 2]
    tried = runs_of("results/5m-12m-grids.jsonl", method="layerwise_gn")
    assert f"| layerwise | {len(tried)} | learning rate |" in words
    ends = {run["config"]["lr"]: run["rows"][-1] for run in tried}
    assert ends[0.006]["step"] == ends[0.01]["step"] == 9
    lower = ends[0.006]["val_loss"] - ends[0.01]["val_loss"]
    assert f"as many steps with seed 0, 9, and ended {lower:.3f} lower." in words


def test_so_many_settings_of_gauss_newton_were_tried_at_12m_tokens():
    runs = runs_of("results/5m-12m-grids.jsonl", method="gn")
    reached = [run["rows"][-1]["step"] for run in runs if run["rows"][-1]["val_loss"] <= 3.21]
    best = min(reached)
    assert reached.count(best) == 10
    words = words_of_results()
    assert f"| full Gauss-Newton | {len(runs)} | learning rate, schedule," in words
    of_prox = runs_of("results/5m-12m-grids.jsonl", method="gn_prox")
    assert f"| prox-linear | {len(of_prox)} | learning rate, average," in words
    assert "| SOAP, Muon | 5 each | learning rate, schedule |" in words
    assert f"ten settings need {best} steps, and none needs fewer" in words


def test_more_passes_do_as_is_said_at_12m_tokens():
    """With seed 0."""
    file = "results/5m-12m-grids.jsonl"
    words = words_of_results()

    def ends(method, **flags):
        return the_run_of(file, method=method, **flags)["rows"]

    gn = {"schedule": "constant+inner cosine", "b2": 0.999, "average": 0.0}
    three = [ends("gn", **gn, lr=0.003, inner_epochs=passes)[-1] for passes in (1, 2)]
    assert [last["step"] for last in three] == [7, 7]
    assert all(last["val_loss"] <= 3.21 for last in three)
    lower = three[0]["val_loss"] - three[1]["val_loss"]
    assert f"with two passes, as it does with one, and ends {lower:.3f} lower;" in words
    one, two = (ends("gn", **gn, lr=0.002, inner_epochs=passes)[-1] for passes in (1, 2))
    assert one["step"] == two["step"] == 8
    said = f"it ends at {two['val_loss']:.3f} after 8 steps in place of {one['val_loss']:.3f}."
    assert said in words

    prox = {"average": 0.99, "steps": 4}
    six = [ends("gn_prox", **prox, lr=0.006, inner_epochs=passes) for passes in (1, 2, 3)]
    last = [f"{rows[-1]['val_loss']:.3f}" for rows in six]
    said = f"ends at {last[0]} with one pass, {last[1]} with two and {last[2]} with three."
    assert f"At 0.006 it {said}" in words
    first = "{:.2f}, {:.2f} and {:.2f}".format(*(rows[1]["val_loss"] for rows in six))
    assert f"raises the loss: from {six[0][0]['val_loss']:.2f} to {first}." in words
    low = ends("gn_prox", **prox, lr=0.003)[-1]["val_loss"]
    assert f"At 0.003 with two passes it ends at {low:.3f}, the lowest of these plans;" in words
    plans = runs_of(file, method="gn_prox", steps=4)
    assert low == min(run["rows"][-1]["val_loss"] for run in plans) > 3.21


def test_the_settings_of_soap_and_muon_do_as_is_said_at_12m_tokens():
    """With seed 0: three learning rates that stay, and two runs in which the best one falls."""
    file = "results/5m-12m-grids.jsonl"
    words = words_of_results()
    steps = {}
    for method, rates in (("soap", (0.003, 0.005, 0.01)), ("muon", (0.02, 0.03, 0.045))):
        steps[method] = []
        for lr in rates:
            last = the_run_of(file, method=method, lr=lr, schedule="constant")["rows"][-1]
            assert last["val_loss"] <= 3.21
            steps[method].append(last["step"])
        assert min(steps[method]) == steps[method][1]  # "the middle one is the best"
    soap, muon = ("{}, {} and {}".format(*steps[method]) for method in ("soap", "muon"))
    assert f"SOAP needs {soap} steps at 0.003, 0.005 and 0.01, and Muon {muon} at" in words

    ends = {}
    for method, lr in (("soap", 0.005), ("muon", 0.03)):
        assert len(runs_of(file, method=method)) == 5
        stays = the_run_of(file, method=method, lr=lr, schedule="constant")["rows"][-1]
        assert stays["val_loss"] <= 3.21
        falls = runs_of(file, method=method, schedule="cosine", average=0.0)
        longest = max(falls, key=lambda run: run["config"]["steps"])["rows"][-1]
        assert longest["step"] >= stays["step"]
        ends[method] = (longest["step"], f"{longest['val_loss']:.3f}", stays["step"])
    planned, loss, steps = ends["soap"]
    of_soap = f"SOAP planned for {planned} steps ends at {loss}, where it is below 3.21 after"
    assert f"{of_soap} {steps} with a learning rate that stays" in words
    gn = the_run_of("results/5m-batches.jsonl", method="gn", lr=0.005, batch=11_993_088)["rows"]
    assert gn[-1]["step"] == 8 and gn[-2]["val_loss"] > 3.21 >= gn[-1]["val_loss"]
    assert "it needs 8 at learning rate 0.005" in words
    planned, loss, steps = ends["muon"]
    assert f"Muon planned for {planned} ends at {loss}, where {steps} are enough." in words


def test_a_run_made_again_on_another_machine_is_as_different_as_is_said():
    flags = {"lr": 0.003, "b2": 0.999, "average": 0.0, "schedule": "constant+inner cosine"}
    first = the_run_of("results/5m-12m-grids.jsonl", method="gn", **flags, inner_epochs=1)
    again = the_run_of("results/5m-12m-stand-ins.jsonl", lr=0.003, warmup_tokens=4_980_736)
    assert first["config"] == again["config"]
    first, again = first["rows"], again["rows"]
    words = words_of_results()
    assert first[-1]["step"] == 7 and first[-1]["val_loss"] <= 3.21
    warmup = f"{again[0]['val_loss']:.3f} in place of {first[0]['val_loss']:.3f}"
    assert f"that ended at {warmup}, it was still at {again[8]['val_loss']:.3f} after" in words
    assert first[4]["loss_at_1"] > 31 and again[4]["loss_at_1"] > 31
    assert first[4]["alpha"] == 0.25 and again[4]["alpha"] == 0


def errors_at_5m(at="1", **flags):
    """L1 - L2 and L - L1 after each inner loop of a run of 5m-12m-stand-ins."""
    log = pd.DataFrame(the_run_of("results/5m-12m-stand-ins.jsonl", **flags)["rows"][1:])
    log = log.set_index("step")
    linearized = log[f"linearized_at_{at}"]
    return linearized - log[f"quadratic_at_{at}"], log[f"true_at_{at}"] - linearized


def test_the_stand_ins_are_as_wrong_at_5m_as_is_said():
    """A table of the usual setting, and the errors of the others."""
    short, long = {"warmup_tokens": 4_980_736}, {"warmup_tokens": 20_004_864}
    rows = the_run_of("results/5m-12m-stand-ins.jsonl", lr=0.003, **short)["rows"][1:]
    text = (pages.ROOT / "docs/results-5m.md").read_text(encoding="utf-8")
    words = words_of_results()
    columns = {
        "L before it": "loss_at_0",
        "L2 at its end": "quadratic_at_1",
        "L1 at its end": "linearized_at_1",
        "L at its end": "true_at_1",
    }
    assert table_of(rows, columns) in text

    expansion, network = errors_at_5m(lr=0.003, **short)
    both = [f"{errors[4]:.1f} and {errors[5]:.1f}" for errors in (expansion, network)]
    assert f"There L1 - L2 is {both[0]} nats, and L - L1 is {both[1]}." in words
    expansion, network = errors_at_5m("0.5", lr=0.003, **short)
    both = [f"{errors[4]:.1f} and {errors[5]:.1f}" for errors in (expansion, network)]
    assert f"Half the way to θ, L1 - L2 is {both[0]}, and L - L1 is {both[1]}." in words

    expansion, network = errors_at_5m(lr=0.006, **short)
    both = [f"{errors.min():.1f} to {errors.max():.1f}" for errors in (expansion, network)]
    assert f"At 0.006, L1 - L2 is {both[0]} nats, and L - L1 is {both[1]} and the" in words
    assert "the larger one in four of seven inner loops" in words
    assert (network.abs() > expansion.abs()).sum() == 4 and len(network) == 7
    expansion, network = errors_at_5m(lr=0.01, **short)
    rows = the_run_of("results/5m-12m-stand-ins.jsonl", lr=0.01)["rows"][1:]
    refused = [row["alpha"] == 0 for row in rows]
    assert refused == [False] + 7 * [True]
    both = [range_of(errors.loc[2:]) for errors in (expansion, network)]
    assert f"in these inner loops L1 - L2 is {both[0]}, and L - L1 is {both[1]}." in words

    largest = {}
    for lr in (0.003, 0.006):
        errors = pd.concat(errors_at_5m(lr=lr, **long))
        largest[lr] = f"{errors.abs().max():.2f}"
    at_both = f"at most {largest[0.003]} nats at 0.003, and at most {largest[0.006]} at 0.006,"
    assert at_both in words
    first, _ = the_run_of("results/5m-12m-stand-ins.jsonl", lr=0.006, **long)["rows"][1:]
    loop = f"at an L of {first['true_at_1']:.2f}, from {first['loss_at_0']:.2f}."
    assert f"where the first loop still ends {loop}" in words
    times = []
    for lr in (0.006, 0.01):
        expansion, network = errors_at_5m("0.5", lr=lr, **short)
        times.append((int((expansion.abs() > network.abs()).sum()), len(network)))
    assert "errs more in six of seven loops at 0.006, and in five of eight at 0.01." in words
    assert times == [(6, 7), (5, 8)]


def test_a_step_of_12m_tokens_leads_as_far_as_is_said():
    """The runs with seed 0 first, then those with other seeds."""
    file = "results/5m-12m-grids.jsonl"
    inner_cosine = {"method": "gn", "schedule": "constant+inner cosine", "line_search": 5}
    words = words_of_results()

    usual = {"momentum": 0.95, "b2": 0.999, "inner_batch": 32, "restart": False, "average": 0.0}
    usual |= {"lr": 0.006, "inner_warmup": 0.0, "inner_epochs": 1} | inner_cosine
    damped, plain = (the_run_of(file, **usual, damping=damping) for damping in (0.0001, 0.0))
    with_it, without = (run["rows"][3]["val_loss"] for run in (damped, plain))
    assert f"after three steps the loss is {with_it:.3f} ({without:.3f} without)" in words
    with_it, without = damped["rows"][8]["val_loss"], plain["rows"][7]["val_loss"]
    assert f"after eight it is {with_it:.3f} ({without:.3f} after seven without)" in words
    prox = {"method": "gn_prox", "lr": 0.006, "b2": 0.999, "inner_epochs": 1}
    planned_5, planned_4 = (the_run_of(file, **prox, steps=steps) for steps in (5, 4))
    ends = [run["rows"][-1]["val_loss"] for run in (planned_5, planned_4)]
    assert f"its runs with seed 0 end at {ends[0]:.3f} and {ends[1]:.3f}." in words
    quick = [run for run in runs_of(file, method="gn") if run["rows"][-1]["step"] == 7]
    assert len(quick) == 10 and not any(was_refused(run) for run in quick)

    file_of_grids, file = file, "results/5m-12m.jsonl"
    steady = runs_of(file, method="gn", lr=0.003, b2=0.999)
    seven = [
        *steady,
        the_run_of(file_of_grids, **usual | {"lr": 0.003}, damping=0.0),
    ]
    assert len(seven) == 7 and not any(was_refused(run) for run in seven)
    first_two = [row["loss_at_1"] for run in seven for row in run["rows"][1:3]]
    assert f"true loss is {min(first_two):.1f} to {max(first_two):.1f}. The worst" in words
    later = [row for run in seven for row in run["rows"][3:]]
    worst = max(later, key=lambda row: row["loss_at_1"])
    assert f"losses below 3.5: one of them ends at {worst['loss_at_1']:.0f}." in words
    starts = []
    for run in seven:
        worst = max(run["rows"][3:], key=lambda row: row["loss_at_1"])
        starts.append(worst["loss_at_0"])
    assert sum(start < 3.5 for start in starts) == 6
    restart = the_run_of(file_of_grids, method="gn", restart=True)["rows"]
    ends = [row["loss_at_1"] for row in restart[1:] if row["loss_at_1"] > 6]
    assert f"six of eight inner loops end at {range_of(ends)}, and the last three" in words
    assert len(ends) == 6 and len(restart) == 1 + 8
    assert [row["alpha"] == 0 for row in restart[1:]] == 5 * [False] + 3 * [True]
    mean = {"average": 0.97}
    for seeds, flags in (([2], {"damping": 1e-05}), ([4], {"b2": 0.95}), ([2, 3], mean)):
        runs = runs_of(file, method="gn", **flags)
        failed = [run["config"]["seed"] for run in runs if run["rows"][-1]["val_loss"] > 3.21]
        assert len(runs) == 3 and failed == seeds
    alphas = [row["alpha"] for row in the_run_of(file, method="gn", seed=3, **mean)["rows"][1:]]
    assert "at seed 3, all steps but the first are refused" in words
    assert alphas[0] > 0 and not any(alphas[1:])


def test_prox_linear_is_ahead_only_where_its_learning_rate_falls():
    words = words_of_results()
    _, groups = groups_of("results/5m-grids.jsonl")
    inner = {"schedule": "constant+inner cosine", "lr": 0.01}
    prox = find_group(groups, "gn_prox", **inner)
    gn = find_group(groups, "gn", restart=False, **inner)
    assert f"it ends {prox.loss - gn.loss:.2f} above full Gauss-Newton" in words
    assert "Prox-linear is behind for the first three steps" in words
    for seed in (1, 2, 3):
        prox, gn = (
            [
                row["val_loss"]
                for row in the_run_of("results/5m-12m.jsonl", **flags, seed=seed)["rows"]
            ]
            for flags in ({"method": "gn_prox"}, {"method": "gn", "lr": 0.003})
        )
        assert all(a > b for a, b in zip(prox[1:4], gn[1:4], strict=True)) and prox[4] < gn[4]
    for file in ("results/5m-grids.jsonl", "results/5m-12m-grids.jsonl"):
        best = {}
        for method in ("gn", "gn_prox"):
            runs = runs_of(file, method=method, schedule="global cosine")
            six = [run for run in runs if run["config"]["steps"] in (6, 25)]
            best[method] = min(run["rows"][-1]["val_loss"] for run in six)
        assert best["gn_prox"] < best["gn"]


def test_nothing_but_the_loss_differs_where_gauss_newton_diverges():
    """And its quadratic falls below zero, where the loss cannot follow."""
    file = "results/5m-grids.jsonl"
    flags = {"lr": 0.01, "average": 0.99, "schedule": "global cosine"}
    gn = the_run_of(file, method="gn", line_search=0, **flags)
    prox = the_run_of(file, method="gn_prox", **flags)
    assert gn["config"] | {"method": "gn_prox"} == prox["config"]
    words = words_of_results()
    assert f"Prox-linear ends at {prox['rows'][-1]['val_loss']:.3f}. With full" in words
    second = gn["rows"][2]
    quadratic = f"the quadratic is {second['inner_loss_last']:.1f} on the last inner batch"
    assert f"{quadratic} of the second outer step" in words
    losses = f"is {second['val_loss']:.0f} after this step, and {gn['rows'][7]['val_loss']:,.0f}"
    assert f"The validation loss {losses} after the seventh." in words


def test_six_methods_at_5m_end_as_is_said():
    """At three seeds on which nothing was chosen, with the seconds of their steps."""
    asked, groups = groups_of("results/5m.jsonl")
    (rival,) = comparison.find_best_baselines(groups).values()
    assert rival.method == "soap" and len(groups) == 6
    ratios = {}
    for group in groups[groups.method.isin(FAMILY)].itertuples():
        steps = comparison.count_steps_to_loss_of(asked, rival, group)
        assert {*steps} == {1, 2, 3}
        ratios[group.method] = [25 / number for number in steps.values()]
    groups = groups.set_index("method")
    loss = groups.loss
    words = words_of_results()
    ends = [loss.soap - loss.layerwise_gn, loss.soap - loss.gn_prox]
    assert f"methods end {extremes(ends)} below SOAP**, and reach its last loss in" in words
    least, most = min(ratios["gn_prox"]), max(ratios["layerwise_gn"])
    assert f"in {least:.1f} to {most:.0f} times fewer steps." in words
    of_gn = f"{min(ratios['gn']):.1f} to {max(ratios['gn']):.1f}"
    assert f"| full Gauss-Newton | SOAP | 5.4 | 4 | {of_gn}; [at 0.01]" in words
    assert f"| prox-linear | SOAP | - | 3.3 to 4 | {least:.1f}; [with an average]" in words
    assert {*ratios["layerwise_gn"]} == {5} and "| layerwise | SOAP | 3.4 | 4 | 5 |" in words
    assert min(ratios["layerwise_gn"]) > max(ratios["gn"])  # "fewer on `5m` at 4m"
    assert groups.highest.gn_prox < groups.lowest.gn  # both differences count
    assert groups.highest.gn < groups.lowest.layerwise_gn
    assert f"**Prox-linear ends {loss.gn - loss.gn_prox:.3f} below full Gauss-Newton**" in words
    assert f"ends {loss.layerwise_gn - loss.gn:.3f} above full Gauss-Newton**" in words
    lower = f"{loss.gn - loss.gn_prox:.3f} lower"
    assert f"On `5m` at 4m it is slower at first, and ends {lower}." in words

    curves = asked.table.groupby(["method", "step"]).val_loss.mean()
    start, first = curves.gn_prox[0], curves.gn_prox[1]
    assert f"its first step raises the loss from {start:.1f} to {first:.1f}, and" in words
    behind = curves.gn_prox[curves.gn_prox > curves.gn].index.max()
    assert f"passes full Gauss-Newton after about {behind + 1:.0f} steps" in words

    seconds = asked.table[asked.table.step > 0].groupby("method").seconds.median()
    assert f"takes {seconds.gn / seconds.soap:.1f} times as long as one of SOAP" in words
    assert f"the layerwise form {seconds.layerwise_gn / seconds.soap:.1f} times." in words


def test_a_larger_batch_costs_as_much_at_5m_as_is_said():
    """Each loss is that of the better learning rate; the spread of seeds is known at 4m."""
    asked, groups = groups_of("results/5m-batches.jsonl")
    best = groups.drop_duplicates(["method", "batch"])
    losses = best.pivot(index="method", columns="batch", values="loss")
    bound, at_400k, at_1200k, at_4m, at_12m = (losses[batch] for batch in sorted(losses))
    words = words_of_results()
    rises = (at_4m - at_400k).map("{:.3f}".format)
    of_baselines = f"the loss of SOAP rises by {rises.soap}, that of Muon by {rises.muon}, that of"
    assert f"{of_baselines} full Gauss-Newton by {rises.gn} and that of" in words
    assert f"that of prox-linear by {rises.gn_prox}." in words
    rises = (at_12m - at_400k).map("{:.3f}".format)
    said = f"{rises.soap}, {rises.muon}, {rises.gn} and {rises.gn_prox}"
    assert f"From 400k to 12m, these are {said}." in words
    for group in best.itertuples():
        of_both = groups[(groups.method == group.method) & (groups.batch == group.batch)]
        is_larger = group.setting["lr"] == max(setting["lr"] for setting in of_both.setting)
        assert is_larger == (group.batch < 5e6 or group.method == "muon")
    rises = at_1200k - at_400k
    shown = rises.map("{:.3f}".format)
    assert f"ends {shown.gn} higher and prox-linear {shown.gn_prox}, which is no" in words
    assert f"SOAP ends {shown.soap} higher, and Muon {shown.muon}." in words
    _, of_seeds = groups_of("results/5m.jsonl")
    of_seeds = of_seeds.set_index("method")
    spread = of_seeds.highest - of_seeds.lowest
    for method in ("gn", "gn_prox"):
        assert rises[method] < spread[method]
    for method in ("soap", "muon"):
        assert rises[method] > spread[method]

    target = at_400k.muon
    assert "the steps to Muon's last loss at 400k" in words
    for larger in (at_1200k, at_4m, at_12m):
        assert larger.soap > target and larger.muon > target
    steps = []
    for group in best[best.method == "gn"].sort_values("batch").itertuples():
        flags = {"method": "gn", "batch": group.batch, "lr": group.setting["lr"]}
        rows = the_run_of("results/5m-batches.jsonl", **flags)["rows"]
        steps += [next((row["step"] for row in rows if row["val_loss"] <= target), None)]
    assert steps.pop() is None  # with 12m, it does not come so far
    assert f"needs {steps[0]} steps of 400k tokens, {steps[1]} of 1.2m, and {steps[2]} of" in words
    assert f"3 times as large takes {steps[0] / steps[1]:.1f} times fewer steps, close" in words
    said = f"{steps[0] / steps[1]:.1f} times fewer to a loss of {target:.1f}, and 2.4 times to 3.21"
    assert said in words  # for the 2.4, see the next test
    assert f"3.3 times as large again takes only {steps[1] / steps[2]:.1f} times fewer." in words

    gains = {}
    rivals = comparison.find_best_baselines(groups)
    for group in best[best.method.isin(["gn", "gn_prox"])].sort_values("batch").itertuples():
        rival = rivals[group.batch]
        assert rival.method == ("soap" if group.batch < 5e6 else "muon")
        (its_steps,) = comparison.count_steps_to_loss_of(asked, rival, rival).values()
        (steps,) = comparison.count_steps_to_loss_of(asked, rival, group).values()
        gains.setdefault(group.method, []).append(f"{its_steps / steps:.1f}".removesuffix(".0"))
    first, second, third, _ = gains["gn"]
    assert f"it needs {first}, {second} and {third} times fewer steps" in words
    assert f"it is least: {first} at 400k on `5m`, and" in words
    assert f"[at 0.01](docs/results-5m.md#larger-batches) {third}, one seed |" in words
    first, second, third, _ = gains["gn_prox"]
    assert f"and prox-linear {first}, {second} and {third} times." in words
    assert f"[with an average](docs/results-5m.md#larger-batches) {third}, one seed |" in words
    assert (gains["gn"][3], gains["gn_prox"][3]) == ("8", "4")  # one and two steps of eight

    (muon,) = best[(best.batch == best.batch.min())].itertuples()
    flags = {"batch": muon.batch, "lr": muon.setting["lr"]}
    its_steps = the_run_of("results/5m-batches.jsonl", **flags)["rows"][-1]["step"]
    assert f"it comes to {bound.muon:.3f} after {its_steps:,} steps" in words
    above = (at_400k - bound.muon).map("{:.3f}".format)
    fewer = f"with {its_steps / 254:.0f} times fewer steps"
    assert f"ends {above.gn_prox} above it, {fewer}, and full Gauss-Newton {above.gn}." in words


def test_a_larger_batch_takes_as_much_time_as_is_said():
    """The seconds of the steps to 3.21, at the better learning rate: a table, and sentences."""
    _, groups = groups_of("results/5m-batches.jsonl")
    seconds, first, cells = {}, {}, {}
    for group in groups.drop_duplicates(["method", "batch"]).itertuples():
        flags = {"method": group.method, "batch": group.batch, "lr": group.setting["lr"]}
        _, *rows = the_run_of("results/5m-batches.jsonl", **flags)["rows"]
        first[group.method, group.batch] = [row["seconds"] for row in rows[:2]]
        cells[group.method, group.batch] = "not reached"
        reached = [row["val_loss"] <= 3.21 for row in rows]
        if any(reached):
            until = rows[: reached.index(True) + 1]
            total = sum(row["seconds"] for row in until)
            seconds[group.method, group.batch] = total
            cells[group.method, group.batch] = f"{total:.0f} ({until[-1]['step']})"

    text = (pages.ROOT / "docs/results-5m.md").read_text(encoding="utf-8")
    names = {"gn": "Gauss-Newton", "gn_prox": "GN-prox-linear", "muon": "Muon", "soap": "SOAP"}
    batches = (393_216, 1_196_032, 3_997_696, 11_993_088)
    for method, name in names.items():
        line = " | ".join(cells[method, batch] for batch in batches)
        assert f"| {name} | {line} |" in text
        of_method = {batch: seconds[key, batch] for key, batch in seconds if key == method}
        assert min(of_method, key=of_method.get) == batches[0]  # "take the least time"

    words = words_of_results()
    of_ten = {name: first[name, batches[0]] for name in names}
    ten, next_ten = (
        "{:.1f}, {:.1f}, {:.1f} and {:.1f} s".format(*[pair[i] for pair in of_ten.values()])
        for i in (0, 1)
    )
    said = f"the first ten steps take {ten}, in the order of the table, and the next ten"
    assert f"{said} {next_ten}." in words
    bound = the_run_of("results/5m-batches.jsonl", method="muon", batch=16_384, lr=0.01)["rows"]
    until = [row["seconds"] for row in bound[1:6]]
    said = f"Muon takes {sum(until[:4]):.0f} to {sum(until):.0f} s: its loss is measured after"
    assert f"{said} every 250th step, and is {bound[4]['val_loss']:.3f} after 1,000." in words
    assert round(seconds["muon", batches[0]] / seconds["gn_prox", batches[0]]) == 2  # "half"
    gn, muon, soap = (f"{seconds[method, batches[0]]:.0f} s" for method in ("gn", "muon", "soap"))
    prox = f"{seconds['gn_prox', batches[0]]:.0f}"
    numbers = [text.removesuffix(" s") for text in (gn, prox, soap, muon)]
    row = "3.21, one seed | {} | {} | - | {} | {} |".format(*numbers)
    assert row in words
    to_3_21 = {}
    for method, name in (("gn", "full Gauss-Newton"), ("gn_prox", "prox-linear")):
        to_3_21[name] = [cells[method, batch].partition("(")[2][:-1] for batch in batches]
    said = [f"{name} goes from {steps[1]} steps to {steps[3]}" for name, steps in to_3_21.items()]
    assert said[0] in words and said[1].replace("goes ", "").replace(" steps", "") in words
    at_400k, at_1200k, *_ = map(int, to_3_21["full Gauss-Newton"])
    assert f"and {at_400k / at_1200k:.1f} times to 3.21 (one seed)." in words
    soap_at_1m = cells["soap", batches[1]].partition("(")[2][:-1]
    muon_at_1m = cells["muon", batches[1]].partition("(")[2][:-1]
    grids = "results/5m-12m-grids.jsonl"
    at_12m = []
    for method in ("soap", "muon"):
        runs = runs_of(grids, method=method, schedule="constant")
        at_12m.append(min(run["rows"][-1]["step"] for run in runs))
    said = f"SOAP goes from {soap_at_1m} to {at_12m[0]} and Muon from {muon_at_1m} to {at_12m[1]}."
    assert said in words
    (readme,) = words_of("README.md")
    assert f"Gauss-Newton {gn}, Muon {muon}, prox-linear {prox} s and SOAP {soap} (one" in readme


def test_float32_makes_as_little_difference_as_is_said():
    file = "results/5m-12m-dtypes.jsonl"
    words = words_of_results()

    def in_both(**flags):
        return [the_run_of(file, dtype=dtype, **flags)["rows"] for dtype in ("bfloat16", "float32")]

    def distance(one, other):
        return max(abs(a["val_loss"] - b["val_loss"]) for a, b in zip(one, other, strict=True))

    half, single = in_both(method="gn", lr=0.003)
    assert half[-1]["step"] == single[-1]["step"] == 8
    assert f"stay within {distance(half, single):.3f} of each other, and both need 8" in words
    again = the_run_of("results/5m-12m.jsonl", method="gn", lr=0.003, b2=0.999, seed=1)["rows"]
    assert f"its last loss is {half[-1]['val_loss'] - again[-1]['val_loss']:.3f} above" in words
    seconds = [np.median([row["seconds"] for row in rows[2:]]) for rows in (single, half)]
    assert f"takes {seconds[0] / seconds[1]:.1f} times as long in float32" in words
    half, single = in_both(method="gn", lr=0.006)
    assert [row["alpha"] == 0 for row in half[1:]].index(True) == 3
    assert half[-1]["step"] == single[-1]["step"] + 1
    lower = max(a["val_loss"] - b["val_loss"] for a, b in zip(half[4:], single[4:], strict=False))
    assert f"float32 is up to {lower:.3f} lower after that" in words
    similar = runs_of("results/5m-12m.jsonl", method="gn", damping=1e-05)
    ends = [run["rows"][-1]["val_loss"] for run in similar]
    assert f"({min(ends):.3f} to {max(ends):.3f}, with damping 1e-05)" in words
    half, single = in_both(method="gn_prox")
    assert half[-1]["step"] == single[-1]["step"] == 5
    assert f"and their losses stay within {distance(half, single):.3f}." in words
