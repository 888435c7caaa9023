"""The tables that plot.py prints and writes, from made-up logs."""

from types import SimpleNamespace

import numpy as np
import pytest
from logs import Run

import tables
from comparison import compare_at_tokens, compare_to_targets, read_runs


def read_tables(comparisons):
    """{title: lines}, each line a dict {column: cell}, of the Markdown of some Comparisons."""
    found = {}
    for title, text in tables.tabulate(comparisons):
        header, rule, *rows = text.splitlines()
        assert len({len(line) for line in (header, rule, *rows)}) == 1  # columns are aligned
        assert set(rule) <= set("|-: ")
        columns = split_cells(header)
        found[title] = [dict(zip(columns, split_cells(row), strict=True)) for row in rows]
    return found


def split_cells(line):
    assert line.startswith("| ") and line.endswith(" |")
    return [cell.strip() for cell in line[1:-1].split("|")]


def end_at(run, step, loss=2.9):
    """Makes a run come to a loss at a step, its first evaluation after the warm-up."""
    rows = [{"step": 0, "tokens": 1000, "val_loss": 4.0}]
    rows += [{"step": step, "tokens": 1000 + 5000 * step, "val_loss": loss}]
    run.write(rows)
    return run


def test_iteration_complexity_is_the_papers_ratio_to_gauss_newton(tmp_path):
    """54, 78 and 292 steps at batches of their own: 1.44 and 5.41 times as many (Section 6.1.1).

    They are those of seed 0; Gauss-Newton has no other.
    """
    runs = []
    steps = {"gn": (8192, 54), "layerwise_gn": (4096, 78), "soap": (8192, 292), "adamw": (2048, 9)}
    for method, (batch, step) in steps.items():
        run = Run(tmp_path, method, batch, target_loss=3.0, steps=400, lr=0.1)
        runs.append(end_at(run, step, loss=3.5 if method == "adamw" else 2.9))
    worse = end_at(Run(tmp_path, "gn", 8192, target_loss=3.0, steps=400, lr=0.2, seed=0), 60)
    second = end_at(Run(tmp_path, "soap", 8192, target_loss=3.0, steps=400, lr=0.1, seed=1), 293)
    table = read_runs([run.folder for run in (*runs, worse, second)])
    found = read_tables(compare_to_targets(table))

    assert [*found] == ["Steps to loss 3", "Settings of Gauss-Newton to loss 3, batch 8.19k"]
    lines = found["Steps to loss 3"]
    assert [line["method"] for line in lines] == ["Gauss-Newton", "layerwise GN", "AdamW", "SOAP"]
    assert [line["steps / GN's"] for line in lines] == ["1", "1.44", "-", "5.41"]
    assert [line["steps"] for line in lines] == ["54", "78", "unfinished", "292.5"]
    assert [line["of each seed"] for line in lines] == ["54", "78", "-", "292, 293"]
    assert [line["setting"] for line in lines] == ["lr 0.1", "-", "-", "-"]
    assert [line["tokens read"] for line in lines] == ["271k", "391k", "-", "1.46m"]
    assert [line["batch"] for line in lines] == ["8.19k", "4.1k", "2.05k", "8.19k"]
    settings = found["Settings of Gauss-Newton to loss 3, batch 8.19k"]
    assert [line["setting"] for line in settings] == ["lr 0.1", "lr 0.2"]
    assert [line["steps"] for line in settings] == ["54", "60"]


def test_what_most_settings_have_is_said_once_below_the_tables(tmp_path):
    """Also below that of the best settings, where each method has values of its own."""
    rates = [{}, {"lr": 0.2}, {"lr": 0.3}, {"lr": 0.4}]
    others = [{"momentum": 0.9}, {"restart": True}]
    settings = [{"lr": 0.1, "momentum": 0.95, "restart": False} | more for more in rates + others]
    runs = [Run(tmp_path, "gn", **setting) for setting in settings]
    runs += [Run(tmp_path, "muon", lr=0.1, momentum=momentum) for momentum in (0.8, 0.9)]
    table = read_runs([run.folder for run in runs])
    found = dict(tables.tabulate(compare_at_tokens(table)))
    usual = "momentum 0.95, restart false."
    settings, sentence = found["Settings of Gauss-Newton after 32.8k tokens, batch 4.1k"].split(
        "\n\n"
    )
    assert sentence == f"Unless a line says otherwise: {usual}\n"
    assert "| lr 0.3 " in settings and "| lr 0.1, momentum 0.9 " in settings
    best, sentence = found["Losses after 32.8k tokens, batch 4.1k"].split("\n\n")
    assert sentence == f"Unless a line says otherwise: Gauss-Newton has {usual}\n"
    assert "| momentum 0.9 " in best or "| momentum 0.8 " in best
    assert "\n\n" not in found["Settings of Muon after 32.8k tokens, batch 4.1k"]


def test_ratios_are_to_the_fewest_steps_of_gauss_newton_at_any_batch(tmp_path):
    runs = []
    for method, batch, step in (("gn", 4096, 20), ("gn", 8192, 10), ("muon", 8192, 30)):
        runs.append(end_at(Run(tmp_path, method, batch, target_loss=3.0, steps=400), step))
    table = read_runs([run.folder for run in runs])
    lines = read_tables(compare_to_targets(table))["Steps to loss 3"]
    assert [line["steps / GN's"] for line in lines] == ["2", "1", "3"]


def test_no_steps_at_all_divide_nothing():
    """At the only seed of both, the reference is at the target before its first step."""
    group = SimpleNamespace(reached=True, seeds=[1], steps_of_runs=[3])
    reference = SimpleNamespace(seeds=[0, 1], steps_of_runs=[4, 0])
    assert np.isnan(tables.divide_steps(group, reference))


def test_a_run_that_ends_before_its_target_has_not_reached_it(tmp_path):
    runs = [Run(tmp_path, speed=0.5, target_loss=2.5, seed=seed) for seed in (0, 1)]
    runs += [Run(tmp_path, "muon", speed=0.9, target_loss=2.5, seed=seed) for seed in (0, 30)]
    table = read_runs([run.folder for run in runs])
    lines = read_tables(compare_to_targets(table))["Steps to loss 2.5, batch 4.1k"]
    assert [line["steps"] for line in lines] == ["not reached", "not reached"]
    assert [line["of each seed"] for line in lines] == ["-, -", "7, -"]
    assert "steps / GN's" not in lines[0]  # as it would say nothing in any line


def test_final_losses_have_the_mean_and_the_extremes_over_seeds(tmp_path):
    runs = [Run(tmp_path, seed=seed, lr=0.1) for seed in (0, 3)] + [Run(tmp_path, "muon")]
    runs += [Run(tmp_path, "adamw").diverge(), Run(tmp_path, "soap").cut(4)]
    table = read_runs([run.folder for run in runs])
    found = read_tables(compare_at_tokens(table))
    assert [*found] == ["Losses after 32.8k tokens, batch 4.1k"]
    gn, adamw, muon, soap = found["Losses after 32.8k tokens, batch 4.1k"]
    first, second = (run.losses[-1] for run in runs[:2])
    assert gn == {
        "method": "Gauss-Newton",
        "loss": f"{(first + second) / 2:.4f}",
        "lowest": f"{first:.4f}",
        "highest": f"{second:.4f}",
        "seeds": "2",
        "steps to Muon's loss": "8",
        "times fewer": "1",
        "outer steps": "8",
        "tokens read": "33.8k",
    }
    assert [muon["loss"], muon["lowest"]] == [f"{first:.4f}", "-"]
    assert [adamw["loss"], adamw["lowest"]] == ["diverged", "-"]
    assert soap["loss"] == f"{runs[-1].losses[-1]:.4f} at step 3, unfinished"


def test_steps_are_counted_to_the_best_baseline_of_the_same_batch_and_seed(tmp_path):
    """Its last loss is 2 + 3 / 9^0.5 + seed / 100; with a speed of 0.7, Gauss-Newton is there when
    (1 + t)^0.7 is above 3, at step 4. Each seed has a goal of its own."""
    runs = []
    for seed in (0, 1):
        runs.append(Run(tmp_path, "soap", 4096, speed=0.5, seed=seed))
        runs.append(Run(tmp_path, "adamw", 4096, speed=0.4, seed=seed))
        runs.append(Run(tmp_path, "gn", 4096, speed=0.7, seed=seed))
    runs.append(Run(tmp_path, "muon", 8192, speed=0.4))
    runs.append(Run(tmp_path, "gn", 8192, speed=0.8))
    runs.append(Run(tmp_path, "gn", 2048, speed=0.8))
    table = read_runs([run.folder for run in runs])
    column = "steps to the best baseline's loss"
    found = {}
    for line in read_tables(compare_at_tokens(table))["Losses after 32.8k tokens"]:
        found[line["method"], line["batch"]] = (line[column], line["times fewer"])
    assert found == {
        ("Gauss-Newton", "2.05k"): ("-", "-"),
        ("Gauss-Newton", "4.1k"): ("4, 4", "2"),
        ("SOAP", "4.1k"): ("8, 8", "1"),
        ("AdamW", "4.1k"): ("not reached", "-"),
        ("Gauss-Newton", "8.19k"): ("2", "2"),
        ("Muon", "8.19k"): ("4", "1"),
    }


def test_costs_are_of_one_step_once_the_program_is_compiled(tmp_path):
    """The median of seconds; of each row, the steps since the row before."""
    run = Run(tmp_path, steps=8, every=2)
    rows = []
    for row, seconds in zip(run.rows(), (9, 9, 4, 6, 14), strict=True):
        searched = 1024 * row["step"]
        more = {"seconds": seconds, "tokens_line_search": searched}
        rows.append(row | more | {"tokens": row["tokens"] + searched})
    run.write(rows)
    title = "Costs of a step, after 32.8k tokens, batch 4.1k"
    (line,) = read_tables(compare_at_tokens(read_runs([run.folder])))[title]
    assert line == {
        "method": "Gauss-Newton",
        "seconds": "3",
        "tokens read": "5.12k",
        "by line search": "20%",
    }


def test_a_grid_has_all_settings_of_each_batch_the_best_first(tmp_path):
    runs = []
    for batch in (8192, 4096):
        for lr, speed in ((0.1, 0.3), (0.2, 0.6), (0.3, 0.5)):
            runs.append(Run(tmp_path, "soap", batch, speed=speed, lr=lr))
    runs.append(Run(tmp_path, "soap", 4096, lr=0.9).diverge())
    table = read_runs([run.folder for run in runs])
    lines = read_tables(compare_at_tokens(table))["Settings of SOAP after 32.8k tokens"]
    assert [line["batch"] for line in lines] == ["4.1k"] * 4 + ["8.19k"] * 3
    order = ["lr 0.2", "lr 0.3", "lr 0.1"]
    assert [line["setting"] for line in lines] == [*order, "lr 0.9", *order]
    assert [line["loss"] for line in lines].count("diverged") == 1


def test_a_method_with_one_setting_for_each_batch_has_no_table_of_settings(tmp_path):
    """Muon at the inner batch has a learning rate of its own; that table would say nothing new."""
    runs = [Run(tmp_path, "muon", batch, lr=batch / 1e5) for batch in (1024, 8192)]
    table = read_runs([run.folder for run in runs])
    found = read_tables(compare_at_tokens(table))
    assert [*found] == ["Losses after 32.8k tokens"]
    (lines,) = found.values()
    assert [line["setting"] for line in lines] == ["lr 0.01024", "lr 0.08192"]


def test_the_tokens_of_a_run_that_diverged_at_once_are_not_known(tmp_path):
    """Its last row has none."""
    table = read_runs([Run(tmp_path).diverge().folder, Run(tmp_path, "muon").folder])
    (lines,) = read_tables(compare_at_tokens(table)).values()
    assert [line["tokens read"] for line in lines] == ["-", "33.8k"]


@pytest.mark.parametrize(
    "number, text", [(54.0, "54"), (5.5, "5.5"), (16 / 3, "5.33"), (120, "120"), (1e4, "10000")]
)
def test_numbers_are_short(number, text):
    assert tables.format_number(number) == text
