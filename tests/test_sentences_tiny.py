"""The numbers in the sentences on `tiny` are what the logs give."""

import numpy as np
import pandas as pd
from logs import FAMILY
from sentences import (
    extremes,
    find_group,
    groups_of,
    range_of,
    runs_of,
    the_run_of,
    was_refused,
    words_of,
    words_of_results,
)

import comparison
import pages
from runtime import packed


def test_it_takes_so_many_times_fewer_steps_than_the_best_baseline():
    """At each seed; the best baseline is SOAP."""
    asked, groups = groups_of("results/tiny.jsonl")
    (rival,) = comparison.find_best_baselines(groups).values()
    assert rival.method == "soap"
    its_steps = comparison.count_steps_to_loss_of(asked, rival, rival)
    ratios = []
    for group in groups.itertuples():
        if group.method in FAMILY:
            steps = comparison.count_steps_to_loss_of(asked, rival, group)
            ratios += [its_steps[seed] / steps[seed] for seed in (0, 1, 2)]
    for words in (*words_of("README.md"), words_of_results()):
        assert f"{min(ratios):.2g} to {max(ratios):.2g} times fewer steps" in words


def test_variants_of_gauss_newton_end_as_near_to_it_as_is_said():
    """Prox-linear within the range of the seeds, layerwise not, which is as fast."""
    asked, groups = groups_of("results/tiny.jsonl")
    (rival,) = comparison.find_best_baselines(groups).values()
    for method in ("gn", "layerwise_gn"):
        (group,) = groups[groups.method == method].itertuples()
        steps = comparison.count_steps_to_loss_of(asked, rival, group)
        assert {20 / number for number in steps.values()} == {4}
    assert not any(was_refused(run) for run in packed.read(pages.ROOT / "results/tiny.jsonl"))
    gn, prox, layerwise = (groups[groups.method == method].iloc[0] for method in FAMILY)
    assert prox.lowest < gn.highest and gn.lowest < prox.highest
    assert layerwise.lowest > gn.highest
    words = words_of_results()
    assert f"ends {layerwise.loss - gn.loss:.3f} higher, which counts as a difference" in words


def test_the_runs_on_another_machine_end_as_near_as_is_said():
    """The mean over the seeds; there were variants of Gauss-Newton, too."""
    _, here = groups_of("results/tiny.jsonl")
    table = comparison.read_runs([pages.ROOT / "results/tiny-h200.jsonl"])
    table = table[(table.outer_steps == 20) & (table.inner_epochs == 1)]
    table = table[table.restart != True]  # noqa: E712  the baselines have none
    (asked,) = comparison.compare_at_tokens(table)
    there = comparison.summarize_groups(asked).set_index("method").loss
    differences = (here.set_index("method").loss - there).abs()
    assert len(differences) == 6
    assert differences[FAMILY].max() <= 0.0003
    assert differences.max() <= 0.003
    words = words_of_results()
    assert "at most 0.0003 with the three Gauss-Newton methods, and by at most 0.003" in words


def test_where_an_inner_loop_starts_and_how_often_it_reads_matters_as_is_said():
    _, groups = groups_of("results/tiny-variants.jsonl")
    losses = {}
    for group in groups.itertuples():
        losses[group.setting["restart"], group.setting["inner_epochs"]] = group.loss
    (words,) = words_of("README.md")
    widest = (groups.highest - groups.lowest).max()
    assert f"is {losses[True, 1]:.3f} instead of {losses[False, 1]:.3f}: the paper's" in words
    assert f"it is {losses[False, 2]:.3f}, and with both changes {losses[True, 2]:.3f}." in words
    assert f"No two seeds of a variant differ by more than {widest:.3f}" in words
    words = words_of_results()
    costs = [f"{losses[True, n] - losses[False, n]:.3f}" for n in (1, 2)]
    assert f"costs {costs[0]} with one pass and {costs[1]} with two." in words
    gains = [f"{losses[restart, 1] - losses[restart, 2]:.3f}" for restart in (False, True)]
    assert f"gains {gains[0]} without a restart and {gains[1]} with one." in words


def test_tiny_needs_its_line_search_as_is_said():
    """At the best learning rate with one; at a smaller one, it does without, and ends higher."""
    asked, groups = groups_of("results/tiny-line-search.jsonl")
    words = words_of_results()
    usual = find_group(groups, "gn", line_search=5)
    rows = asked.table
    for group in groups.itertuples():
        losses = rows[rows.run.isin(group.runs)].groupby("run").val_loss
        highest, start = losses.max(), losses.first()
        setting = group.setting
        if setting["line_search"] == 0 and setting["lr"] == 0.02:
            assert len(highest) == 3 and (highest > 170).all()
        elif setting["lr"] < 0.01:
            assert (highest <= start).all()
    best = groups[[setting["line_search"] == 0 for setting in groups.setting]].iloc[0]
    assert best.setting["lr"] == 0.006 and best.setting["average"] == 0.99
    ends = f"allows 0.02, which ends at {usual.loss:.3f}, in place of 0.006, which ends at"
    assert f"{ends} {best.loss:.3f}." in words
    slow = {"lr": 0.003, "seed": 0, "schedule": "global cosine", "inner": "muon"}
    with_it, without = (
        the_run_of(f"results/{name}.jsonl", method="gn", **slow)["rows"][-1]["val_loss"]
        for name in ("tiny-grids", "tiny-line-search")
    )
    assert f"is {with_it:.3f} with a line search (`tiny-grids`), and {without:.3f} without" in words


def test_a_line_search_to_the_mean_of_inner_iterates_does_as_is_said():
    """At three seeds, but for learning rate 0.06 and other decays, which have seed 0."""
    file = "results/tiny-average.jsonl"
    words = words_of_results()

    def losses_of(lr, average, step):
        """At seeds 0, 1 and 2, or at 0 alone."""
        runs = sorted(runs_of(file, lr=lr, average=average), key=lambda run: run["config"]["seed"])
        return np.array([run["rows"][step]["val_loss"] for run in runs])

    def lower_by(lr, step):
        without, with_mean = losses_of(lr, 0.0, step), losses_of(lr, 0.97, step)
        assert max(with_mean) < min(without)  # so the difference counts
        return without - with_mean

    for step in range(1, 21):
        for lr in (0.02, 0.03):
            assert (losses_of(lr, 0.97, step) < losses_of(lr, 0.0, step)).all()  # "is ahead"
    assert (
        f"the loss after 10 steps is {extremes(lower_by(0.02, 10))} lower at the same seed" in words
    )
    ends = lower_by(0.02, 20)
    assert f"and the last one {min(ends):.3f} to {max(ends):.3f}." in words

    def steps_to(target, **flags):
        found = set()
        for run in runs_of(file, **flags):
            losses = [row["val_loss"] for row in run["rows"]]
            found.add(next(step for step, loss in enumerate(losses) if loss <= target))
        return found

    assert "It comes to 1.6 in 10 steps, where it needs 11 or 12 without." in words
    assert steps_to(1.6, lr=0.02, average=0.97) == {10}
    assert steps_to(1.6, lr=0.02, average=0.0) == {11, 12}
    assert "At 0.03 it needs 10 or 11, and 13 without." in words
    assert steps_to(1.6, lr=0.03, average=0.97) == {10, 11}
    assert steps_to(1.6, lr=0.03, average=0.0) == {13}

    without = losses_of(0.03, 0.0, 20)[0]
    decays = [losses_of(0.03, average, 20)[0] for average in (0.9, 0.97, 0.99)]
    of_decays = f"are {min(decays):.3f} to {max(decays):.3f}, and {without:.3f} without a mean."
    assert f"the last losses with 0.9, 0.97 and 0.99 {of_decays}" in words
    gains = [losses_of(0.02, 0.0, 20)[0] - losses_of(0.02, tau, 20)[0] for tau in (0.97, 0.99)]
    assert 0.4 < gains[1] / gains[0] < 0.6  # "half of the gain"
    (without,) = losses_of(0.06, 0.0, 20)
    below, above = without - losses_of(0.06, 0.9, 20)[0], losses_of(0.06, 0.97, 20)[0] - without
    assert f"ends {below:.3f} below the one without a mean" in words
    (middle,) = losses_of(0.06, 0.0, 10) - losses_of(0.06, 0.97, 10)
    assert f"{above:.3f} above it, though it is {middle:.3f} lower after 10 steps." in words


def errors_of_stand_ins(at="1", **flags):
    """L - L1 and L1 - L2 of each run of tiny-stand-ins with some flags: rows by step, columns."""
    network, loss = [], []
    for run in runs_of("results/tiny-stand-ins.jsonl", **flags):
        log = pd.DataFrame(run["rows"]).set_index("step")
        network.append(log[f"true_at_{at}"] - log[f"linearized_at_{at}"])
        loss.append(log[f"linearized_at_{at}"] - log[f"quadratic_at_{at}"])
    assert len(network) == 3
    return pd.concat(network, axis=1).loc[1:], pd.concat(loss, axis=1).loc[1:]


def test_the_stand_ins_are_as_wrong_on_tiny_as_is_said():
    """At θ and half the way to it, with a line search."""
    network, loss = errors_of_stand_ins(alphas="")
    words = words_of_results()
    of_both = f"L - L1 is {extremes(network.loc[1])} nats, and L1 - L2 is {extremes(loss.loc[1])}."
    assert of_both in words
    assert (loss.loc[1].to_numpy() > network.loc[1].to_numpy()).sum() == 2
    of_both = f"L - L1 is {extremes(network.loc[2:8])} nats, and L1 - L2 is"
    assert f"In steps 2 to 8, {of_both} {extremes(loss.loc[2:8])}." in words
    half = [abs(errors).max().max() for errors in errors_of_stand_ins("0.5", alphas="")]
    assert f"L - L1 is at most {half[0]:.2f} nats, and L1 - L2 at most {half[1]:.2f}." in words
    for run in runs_of("results/tiny-stand-ins.jsonl", alphas=""):
        assert [round(row["alpha"], 2) for row in run["rows"][1:]].count(0.35) in (14, 15)
    assert "0.35 of the way in 14 or 15 of the 20 steps" in words


def test_whole_steps_on_tiny_fail_by_the_expansion_of_the_loss():
    network, loss = errors_of_stand_ins(alphas="1")
    words = words_of_results()
    assert f"In the second step, L1 - L2 is {extremes(loss.loc[2])} nats. In the fourth" in words
    fourth = [run["rows"][4] for run in runs_of("results/tiny-stand-ins.jsonl", alphas="1")]
    assert all(row["quadratic_at_1"] < 0 for row in fourth)
    assert f"and L is {range_of([row['true_at_1'] for row in fourth])}. The linearization" in words
    assert "in steps 4 to 8, L is below L1 at every seed" in words
    assert (network.loc[4:8] < 0).all(axis=None)


def test_a_larger_batch_costs_as_much_as_is_said():
    """Each loss is that of the better learning rate; the batches are 16k to 262k."""
    asked, groups = groups_of("results/tiny-batches.jsonl")
    best = groups.drop_duplicates(["method", "batch"])
    losses = best.pivot(index="method", columns="batch", values="loss")
    rises = (losses[262_144] - losses[32_768]).map("{:.3f}".format)
    words = words_of_results()
    assert f"full Gauss-Newton rises by {rises.gn}, that of prox-linear by {rises.gn_prox}" in words
    assert f"that of layerwise by {rises.layerwise_gn}. The losses" in words
    assert f"AdamW rise by {rises.soap}, {rises.muon} and {rises.adamw}." in words

    of_seeds, shorter = {}, []
    for run in runs_of("results/tiny-batch-seeds.jsonl"):
        config = run["config"]
        if config["method"] == "muon" and config["warmup_steps"] == 4:
            shorter.append(run["rows"][-1]["val_loss"])
            continue
        by_seed = of_seeds.setdefault(config["method"], {}).setdefault(config["batch"], {})
        by_seed[config["seed"]] = run["rows"][-1]["val_loss"]
    said = []
    for method in ("gn", "gn_prox", "layerwise_gn", "soap", "muon", "adamw"):
        small, large = (of_seeds[method][batch] for batch in (32_768, 262_144))
        assert {*small} == {*large} == {1, 2, 3}
        of_method = [large[seed] - small[seed] for seed in small]
        said.append(f"{min(of_method):.3f} to {max(of_method):.3f}")
    gn, prox, layerwise, soap, muon, adamw = said
    assert f"these rises are {gn}, {prox} and {layerwise}, and {soap}, {muon} and {adamw}." in words

    at_262k = groups[groups.batch == 262_144]
    usual, better = (
        find_group(at_262k, "muon", lr=0.06, warmup_steps=steps).loss for steps in (6, 4)
    )
    assert f"only Muon's loss gets lower, by {usual - better:.3f} with 4 steps" in words
    for method, tuned in (("soap", 0.03), ("adamw", 0.015), ("muon", 0.06)):
        settings = at_262k[at_262k.method == method]
        assert len(settings) == 6
        assert settings.iloc[0].setting["lr"] == tuned
        assert settings.iloc[0].setting["warmup_steps"] == (4 if method == "muon" else 10)
    assert min(shorter) < max(of_seeds["muon"][262_144].values())  # "makes no difference"
    assert max(shorter) > min(of_seeds["muon"][262_144].values())

    ratios = []
    rivals = comparison.find_best_baselines(groups)
    for group in best[best.method == "gn"].sort_values("batch").itertuples():
        rival = rivals[group.batch]
        (its_steps,) = comparison.count_steps_to_loss_of(asked, rival, rival).values()
        (steps,) = comparison.count_steps_to_loss_of(asked, rival, group).values()
        ratios.append(f"{its_steps / steps:.1f}".removesuffix(".0"))
    first, *rest = ratios
    assert f"{first} times fewer steps at 16k, and {', '.join(rest[:-1])} and {rest[-1]}" in words
    rival = rivals[16_384].method.title()
    assert f"and on `tiny` at 16k it is {first} over {rival}, which is the best" in words

    of_262k = groups[(groups.method == "gn") & (groups.batch == 262_144)].itertuples()
    rival = rivals[262_144]
    steps = [comparison.count_steps_to_loss_of(asked, rival, group)[0] for group in of_262k]
    assert "3 of 10 steps at the better learning rate, and 2 at the other" in words
    assert steps == [3, 2]

    bound = losses[1024].muon
    assert f"comes to {bound:.3f} after 2,560 steps" in words
    gn, prox = (losses.loc[method].min() - bound for method in ("gn", "gn_prox"))
    assert f"full Gauss-Newton ends {gn:.3f} above it, and prox-linear {prox:.3f}." in words
    smallest = losses[16_384].map("({:.3f})".format)
    assert f"full Gauss-Newton {smallest.gn} is behind prox-linear {smallest.gn_prox}" in words
    assert f"and layerwise {smallest.layerwise_gn}." in words


def test_an_average_makes_prox_linear_as_fast_as_is_said():
    steps = {}
    for run in runs_of("results/tiny-grids.jsonl", method="gn_prox", lr=0.01):
        if run["config"]["schedule"] == "global cosine":
            reached = [row["step"] for row in run["rows"] if row["val_loss"] <= 1.9]
            steps[run["config"]["average"]] = reached[0]
    (words,) = words_of("docs/tuning.md")
    assert f"it needs {steps[0.99]} steps to reach 1.9, and {steps[0]} steps without" in words
    assert f"With the paper's τ 0.999 it needs {steps[0.999]} steps" in words
