"""The figures: which are drawn of which runs, and that they show the numbers of the logs."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import AS_A_USER
from logs import METHODS, SEARCHES, Run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import comparison
import plot
import recipe


def draw(*runs, target=None):
    """{name: Figure} of runs of one task."""
    table = comparison.read_runs([run.folder for run in runs])
    at_tokens = comparison.choose_tokens(comparison.compare_at_tokens(table))
    return plot.draw_figures(at_tokens, comparison.compare_to_targets(table, target))


def curves(ax):
    """{label: (x, y)} of what is drawn."""
    return {line.get_label(): line.get_data() for line in ax.lines}


def first_step(run, target):
    """The first evaluation whose loss is at or below target."""
    return next(i for i, loss in enumerate(run.losses) if loss <= target)


# ---- which runs are shown ------------------------------------------------------------------------


def test_a_curve_is_the_mean_over_seeds_and_its_band_reaches_to_the_extremes(tmp_path):
    """Against steps, and against tokens: the mean of them, as a race reads more with one seed."""
    runs = [Run(tmp_path, seed=seed) for seed in (0, 1, 5)]
    for run, more in zip(runs, (0, 100, 500), strict=True):
        run.write([row | {"tokens": row["tokens"] + more * row["step"]} for row in run.rows()])
    expected = np.array([run.losses for run in runs])
    steps = np.arange(9)
    tokens = 1000 + 4096 * steps + 200 * steps
    for ax, x in zip(draw(*runs)["loss"].axes, (steps, tokens), strict=True):
        np.testing.assert_array_equal(curves(ax)["Gauss-Newton"][0], x)
        np.testing.assert_allclose(curves(ax)["Gauss-Newton"][1], expected.mean(0), rtol=1e-12)
        band = ax.collections[0].get_paths()[0].vertices
        for i, value in enumerate(x):
            y = band[band[:, 0] == value, 1]
            np.testing.assert_allclose(y.min(), expected[:, i].min(), rtol=1e-12)
            np.testing.assert_allclose(y.max(), expected[:, i].max(), rtol=1e-12)


def test_costs_are_those_of_the_steps_so_far(tmp_path):
    """A mean over seeds; what came before the first step, the warm-up, does not count."""

    def spend(run, **cost):
        warm_up = dict.fromkeys(cost, 1e9)
        costs = [warm_up, *8 * [cost]]
        run.write([row | more for row, more in zip(run.rows(), costs, strict=True)])
        return run

    runs = [spend(Run(tmp_path, seed=seed), seconds=2.0 * seed, joules=500.0) for seed in (1, 2)]
    for ax, step in zip(draw(*runs)["costs"].axes, (3.0, 500.0), strict=True):
        x, y = curves(ax)["Gauss-Newton"]
        np.testing.assert_allclose(x, step * np.arange(9))
        np.testing.assert_allclose(y, np.add(runs[0].losses, runs[1].losses) / 2)

    muon = spend(Run(tmp_path, "muon"), seconds=1.0)
    assert len(draw(*runs, muon)["costs"].axes) == 1  # the energy of one method is not known
    elsewhere = spend(Run(tmp_path, "soap").on("cpu"), seconds=1.0, joules=1.0)
    assert "costs" not in draw(*runs, elsewhere)


def test_a_curve_ends_where_the_first_of_its_seeds_ends(tmp_path):
    runs = [Run(tmp_path, seed=0).cut(7), Run(tmp_path, seed=1).cut(5)]
    x, y = curves(draw(*runs)["loss"].axes[0])["Gauss-Newton"]
    np.testing.assert_allclose(y, np.add(runs[0].losses[:5], runs[1].losses) / 2)


def test_the_best_group_is_shown_if_no_run_of_it_diverged(tmp_path):
    """A run that has not begun its log is nothing yet."""
    best = Run(tmp_path, speed=0.7)
    diverged = Run(tmp_path, speed=0.9, seed=1).diverge()
    others = [Run(tmp_path, speed=0.4), Run(tmp_path, speed=0.9), diverged]
    others += [Run(tmp_path, speed=0.8).cut(0)]
    x, y = curves(draw(*others, best)["loss"].axes[0])["Gauss-Newton"]
    np.testing.assert_allclose(y, best.losses)
    assert draw(diverged) == {}


def test_the_batch_is_the_largest_that_most_methods_have(tmp_path):
    """Or a method's own largest, which its label then names."""
    gn = [Run(tmp_path, "gn", batch) for batch in (2048, 4096, 8192)]
    adamw = [Run(tmp_path, "adamw", batch, speed=batch / 1e5) for batch in (2048, 4096)]
    soap = [Run(tmp_path, "soap", batch) for batch in (16384, 1024)]
    ax = draw(*gn, *adamw, *soap)["loss"].axes[0]
    assert [*curves(ax)] == [
        "Gauss-Newton,\nbatch 4.1k",
        "AdamW,\nbatch 4.1k",
        "SOAP,\nbatch 16.4k",
    ]
    np.testing.assert_allclose(curves(ax)["AdamW,\nbatch 4.1k"][1], adamw[1].losses)
    assert [*curves(draw(gn[1], adamw[1])["loss"].axes[0])] == ["Gauss-Newton", "AdamW"]


# ---- what the figures show -----------------------------------------------------------------------


def test_steps_are_logarithmic_where_methods_take_very_different_ones(tmp_path):
    runs = [Run(tmp_path), Run(tmp_path, "adamw"), Run(tmp_path, "muon", steps=100, batch=256)]
    assert draw(*runs[:2], target=2)["loss_to_2"].axes[0].get_xscale() == "linear"
    ax = draw(*runs, target=2)["loss_to_2"].axes[0]
    assert ax.get_xscale() == "log" and ax.get_xlim()[0] > 0.1


def test_final_loss_and_steps_to_the_target_against_batch(tmp_path):
    """A step counts where its loss was measured, never between; the dotted line is as it says."""
    gn = [Run(tmp_path, "gn", 2048, speed=0.7, every=2)]
    gn += [Run(tmp_path, "gn", 4096, speed=0.9, every=2)]
    gn += [Run(tmp_path, "gn", 8192, speed=0.1, every=2)]
    muon = [Run(tmp_path, "muon", 2048, speed=0.6), Run(tmp_path, "muon", 8192)]
    left, right = draw(*gn, *muon, target=2.6)["batch"].axes
    final = curves(left)
    steps = curves(right)
    np.testing.assert_array_equal(final["Gauss-Newton"][0], [2048, 4096, 8192])
    np.testing.assert_allclose(final["Gauss-Newton"][1], [run.losses[-1] for run in gn])
    np.testing.assert_array_equal(final["Muon"][0], [2048, 8192])
    np.testing.assert_allclose(final["Muon"][1], [run.losses[-1] for run in muon])

    assert [2 * first_step(run, 2.6) for run in gn[:2]] == [10, 6]
    assert first_step(muon[0], 2.6) == 14
    np.testing.assert_array_equal(steps["Gauss-Newton"], [[2048, 4096], [10, 6]])
    np.testing.assert_array_equal(steps["Muon"], [[2048], [14]])
    np.testing.assert_allclose(steps["optimal scaling"], [[2048, 8192], [10, 2.5]])

    by_default = curves(draw(*gn, *muon)["batch"].axes[1])
    assert {"Gauss-Newton", "Muon"} <= {*by_default}


def test_steps_to_the_target_are_each_seeds_own(tmp_path):
    """The mean of their steps, not where their mean loss is; nothing if a seed does not come there.

    Here --target-loss ended the runs of the smaller batch, at different steps.
    """
    target = {"steps": 20, "target_loss": 3.0}
    small = [Run(tmp_path, batch=4096, seed=seed, **target) for seed in (0, 1)]
    large = [Run(tmp_path, batch=8192, seed=seed, **target) for seed in (0, 60)]
    steps = [first_step(run, 3.0) for run in small]
    assert steps[0] < steps[1] and min(large[1].losses) > 3.0
    for run, step in zip(small, steps, strict=True):
        run.cut(step + 1)
    drawn = curves(draw(*small, *large)["batch"].axes[0])
    np.testing.assert_array_equal(drawn["Gauss-Newton"], [[4096], [np.mean(steps)]])


def test_muon_is_a_bound_where_its_batch_is_the_inner_batch_of_gauss_newton(tmp_path):
    """A Muon run with a large batch that is read as one inner batch is a point of Muon's curve.

    No steps of a bound are drawn, to the targets of the runs neither.
    """
    runs = [Run(tmp_path, "gn", batch) for batch in (4096, 8192)]
    muon = [Run(tmp_path, "muon", batch, inner_batch=batch // 128) for batch in (1024, 4096, 8192)]
    drawn = curves(draw(*runs, *muon)["batch"].axes[0])
    np.testing.assert_array_equal(drawn["Muon"][0], [4096, 8192])
    label = "Muon at the\ninner batch 1.02k"
    np.testing.assert_array_equal(drawn[label][0], [4096, 8192])
    np.testing.assert_allclose(drawn[label][1], muon[0].losses[-1])
    _, to_target = draw(*runs, *muon, target=3.5)["batch"].axes
    np.testing.assert_array_equal(curves(to_target)["Muon"][0], [4096, 8192])


def test_gauss_newton_beside_its_variants(tmp_path):
    """Against steps, or against batch where one of them has several."""
    runs = [Run(tmp_path, method) for method in METHODS]
    axes = draw(*runs)["methods"].axes
    assert len(axes) == 2
    assert {*curves(axes[0])} == {"Gauss-Newton", "layerwise GN"}
    assert {*curves(axes[1])} == {"Gauss-Newton", "GN-prox-linear"}
    assert axes[0].get_xlabel() == "outer steps"
    several = draw(*runs, Run(tmp_path, "gn", 8192))["methods"].axes
    assert several[0].get_xlabel() == "batch (tokens)"
    unfinished = Run(tmp_path, "layerwise_gn", speed=0.1).cut(3)
    gn = [Run(tmp_path, "gn", batch) for batch in (2048, 4096, 8192)]
    (ax,) = draw(*gn, unfinished)["methods"].axes
    assert ax.get_xlabel() == "outer steps"  # as it has no final loss
    assert {*curves(ax)} == {"Gauss-Newton", "layerwise GN"}


def test_schedules_show_the_rate_of_each_inner_step(tmp_path):
    """One curve for each schedule, however many methods have it."""
    runs = [Run(tmp_path, method, lr=0.3) for method in METHODS]
    runs[0] = Run(tmp_path, "gn", warmup=0.25, inner_warmup=0.5)
    family, others = [curves(ax) for ax in draw(*runs)["schedules"].axes]
    assert [*family] == ["global cosine,\nwarmup 0.25,\ninner warmup 0.5", "global cosine"]
    assert [*others] == ["cosine"]
    x = np.arange(32) / 4  # eight steps of four inner batches
    half_cosine = (1 + np.cos(np.pi * x / 8)) / 2
    np.testing.assert_allclose(family["global cosine"], [x, half_cosine], atol=1e-6)
    half_cosine = (1 + np.cos(np.pi * np.floor(x) / 8)) / 2
    np.testing.assert_allclose(others["cosine"], [x, half_cosine], atol=1e-6)


def test_two_schedules_of_one_method_have_different_looks(tmp_path):
    runs = [Run(tmp_path, "adamw"), Run(tmp_path, "adamw", schedule="constant", target_loss=2.9)]
    (ax,) = draw(*runs)["schedules"].axes
    assert len({line.get_color() for line in ax.lines}) == len(ax.lines) == 2


def test_step_sizes_are_those_of_the_line_search_and_crosses_are_refused_ones(tmp_path):
    axes = draw(*[Run(tmp_path, method) for method in METHODS])["step_sizes"].axes
    assert len(axes) == len(SEARCHES)
    drawn = curves(axes[0])
    np.testing.assert_array_equal(drawn["Gauss-Newton"][0], [1, 3, 4, 6, 7])
    np.testing.assert_array_equal(drawn["Gauss-Newton"][1], [0.5, 1, 0.5, 1, 0.5])
    np.testing.assert_array_equal(drawn["refused"][0], [2, 5, 8])
    assert max(drawn["refused"][1]) < 0.5


def test_ticks_of_steps_are_whole_numbers_where_there_is_one_step(tmp_path):
    (ax,) = draw(Run(tmp_path, steps=1))["step_sizes"].axes
    low, high = ax.get_xlim()
    ticks = [tick for tick in ax.get_xticks() if low <= tick <= high]
    assert ticks == [1]


def test_one_step_to_a_target_is_no_steps(tmp_path):
    run = Run(tmp_path, speed=0.8, target_loss=4.0)
    assert first_step(run, 4.0) == 1
    assert "Gauss-Newton,\n1 step" in curves(draw(run)["loss_to_4"].axes[0])


def test_a_logarithmic_axis_has_several_ticks(tmp_path):
    """Also where its values are 50 times apart."""
    gn = [Run(tmp_path, batch=4096, steps=1, speed=9.0), Run(tmp_path, batch=8192, speed=9.0)]
    soap = [Run(tmp_path, "soap", batch, steps=60, speed=0.6) for batch in (4096, 8192)]
    ax = draw(*gn, *soap, target=2.3)["batch"].axes[-1]
    low, high = ax.get_ylim()
    assert 60 < high / low < 200
    assert sum(low <= tick <= high for tick in ax.get_yticks()) >= 5


@pytest.mark.parametrize("lr", [0.0003, 0.001, 0.00125, 3.0])
def test_nothing_is_cut_off_at_the_edge_of_a_figure(tmp_path, lr):
    """However many digits the learning rates have."""
    runs = [Run(tmp_path, speed=speed, lr=speed * lr) for speed in (0.5, 1.0)]
    for figure in draw(*runs).values():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        for ax in figure.axes:
            box = ax.yaxis.get_tightbbox(canvas.get_renderer())
            assert box.x0 >= 0 and box.y0 >= 0 and box.y1 <= figure.bbox.y1


def test_runs_to_a_target_have_a_figure_for_each_target(tmp_path):
    """Figure 1: the target is a dotted line, and labels tell the mean of the steps to it."""
    fixed = Run(tmp_path, speed=0.4)
    gn = [Run(tmp_path, speed=0.8, target_loss=2.8, steps=99, seed=seed) for seed in (0, 9)]
    steps = [first_step(run, 2.8) for run in gn]
    assert steps == [5, 6]
    for run, step in zip(gn, steps, strict=True):
        run.cut(step + 1)
    soap = Run(tmp_path, "soap", 8192, target_loss=2.8, steps=9)
    other = Run(tmp_path, "soap", target_loss=2.5, steps=40)

    figures = draw(fixed, *gn, soap, other)
    assert {"loss", "loss_to_2.8", "loss_to_2.5"} <= {*figures}
    assert [*curves(figures["loss"].axes[0])] == ["Gauss-Newton"]
    for ax, last in zip(figures["loss_to_2.8"].axes, (9, 74728), strict=True):
        drawn = curves(ax)
        labels = ["Gauss-Newton,\nbatch 4.1k,\n5.5 steps", "SOAP,\nbatch 8.19k", "target 2.8"]
        assert [*drawn] == labels
        assert len(drawn[labels[0]][0]) == 6  # to step 5, which both seeds have
        np.testing.assert_array_equal(drawn["target 2.8"][1], [2.8, 2.8])
        assert max(drawn["target 2.8"][0]) == last
    assert "SOAP,\n35 steps" in curves(figures["loss_to_2.5"].axes[0])


def test_a_target_that_is_given_takes_the_runs_of_every_length_up_to_it(tmp_path):
    """But for those that stopped before it; figures of fixed tokens stay as they are."""
    runs = [Run(tmp_path, speed=0.8), Run(tmp_path, "muon", speed=0.9, steps=4)]
    runs += [Run(tmp_path, "soap", target_loss=2.5, steps=40)]
    stopped = Run(tmp_path, "adamw", target_loss=3.4, steps=40)
    figures = draw(*runs, stopped, target=3.0)
    assert {name for name in figures if name.startswith("loss")} == {"loss", "loss_to_3"}
    drawn = curves(figures["loss_to_3"].axes[0])
    for run, title in zip(runs, ("Gauss-Newton", "Muon", "SOAP"), strict=True):
        step = first_step(run, 3.0)
        x, y = drawn[f"{title},\n{step} steps"]
        np.testing.assert_array_equal(x, np.arange(step + 1))
        np.testing.assert_allclose(y, run.losses[: step + 1])
    assert len(drawn) == 4


def test_of_several_lengths_the_one_that_most_methods_have_is_shown(tmp_path):
    """Of equals the longest: here 75 steps against 400 of another comparison."""
    short = [Run(tmp_path, method, steps=75) for method in ("gn", "muon")]
    long = Run(tmp_path, "gn", steps=400)
    x, y = curves(draw(*short, long)["loss"].axes[0])["Gauss-Newton"]
    assert len(x) == 76
    x, y = curves(draw(short[0], long)["loss"].axes[0])["Gauss-Newton"]
    assert len(x) == 401


def test_settings_of_one_method_side_by_side(tmp_path):
    """Figure 4: rates, absolute, and losses, under the flags in which they differ."""
    schedules = ["global cosine", "global+inner cosine", "constant+inner cosine", "constant"]
    runs = []
    for i, schedule in enumerate(schedules):
        for seed in (0, 1):
            runs.append(Run(tmp_path, speed=0.5 + i / 10, seed=seed, schedule=schedule, lr=0.3))
    runs += [Run(tmp_path, lr=0.3, schedule="constant", batch=8192), Run(tmp_path, "muon")]
    figures = draw(*runs)
    assert [name for name in figures if name.startswith("settings")] == ["settings_gn"]
    rates, losses = map(curves, figures["settings_gn"].axes)
    labels = [f"schedule {schedule}" for schedule in schedules]
    assert {*rates} == {*losses} == {*labels}
    x = np.arange(32) / 4
    half_cosine = 0.3 * (1 + np.cos(np.pi * x / 8)) / 2
    np.testing.assert_allclose(rates[labels[0]], [x, half_cosine], atol=1e-6)
    np.testing.assert_allclose(rates[labels[3]], [x, np.full(32, 0.3)], atol=1e-6)
    for i, label in enumerate(labels):
        pair = runs[2 * i : 2 * i + 2]
        np.testing.assert_allclose(losses[label][1], np.mean([run.losses for run in pair], 0))


def test_any_number_of_settings_have_different_looks_and_the_best_are_shown(tmp_path, capsys):
    """Where only the learning rate differs, the labels are that; no rates without a schedule."""
    runs = [Run(tmp_path, "adamw", speed=0.1 + i / 100, schedule=None) for i in range(16)]
    (ax,) = draw(*runs)["settings_adamw"].axes
    assert [*curves(ax)] == [f"lr {0.25 - i / 100:g}" for i in range(14)]
    looks = {(line.get_color(), str(line._dash_pattern), line.get_marker()) for line in ax.lines}
    assert len(looks) == 14
    assert "the best 14 of 16 settings of AdamW are drawn" in capsys.readouterr().err


def test_every_method_has_a_look_of_its_own():
    looks = [str(plot.LOOKS[method]) for method in recipe.METHODS]
    assert len({*looks}) == len(looks)


def test_numbers_are_written_as_the_flags_take_them():
    """A step size on an axis is a fraction."""
    numbers = [0, 1, 999.6, 131_072, 999_600, 1.2e6, 3e9]
    written = ["0", "1", "1k", "131k", "1m", "1.2m", "3b"]
    assert [plot.format_count(number) for number in numbers] == written
    assert [plot.format_tick(number, None) for number in numbers] == written
    assert plot.format_tick(0.25, None) == "1/4"


@pytest.mark.parametrize("gap", [0.0, 0.02])
def test_labels_never_overlap_and_stay_in_the_picture(tmp_path, gap):
    """However near the curves end to each other, and where batches make labels of two lines."""
    runs = []
    for i, method in enumerate(recipe.METHODS):
        runs.append(Run(tmp_path, method, 1024 * (2 + i), speed=0.5 + gap * i, tokens=32768))
        runs.append(Run(tmp_path, method, 1024 * (2 + i), speed=0.4 + gap * i, tokens=32768))
        if i % 2:
            runs.append(Run(tmp_path, method, 32768, speed=0.6 + gap * i))
    figures = draw(*runs, target=3)
    assert {"loss", "loss_to_3", "settings_gn", "batch", "methods_to_3"} <= {*figures}
    for figure in figures.values():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        texts = [text for ax in figure.axes for text in ax.texts]
        boxes = [Text.get_window_extent(text, canvas.get_renderer()) for text in texts]
        assert len(boxes) == sum(len(ax.lines) for ax in figure.axes)
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:i])
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
            assert box.y0 >= 0 and box.y1 <= figure.bbox.y1


# ---- the command line ----------------------------------------------------------------------------

SETS = [
    (["gn"], [4096], ["loss", "schedules", "step_sizes"]),
    (["adamw", "muon"], [4096], ["loss", "schedules"]),
    (["gn", "adamw"], [4096, 8192], ["batch", "loss", "schedules", "step_sizes"]),
    (METHODS, [4096], ["loss", "methods", "schedules", "step_sizes"]),
]


@pytest.mark.parametrize("methods, batches, names", SETS)
def test_figures_are_drawn_where_there_are_runs_for_them(tmp_path, methods, batches, names):
    runs = [Run(tmp_path, method, batch) for method in methods for batch in batches]
    assert sorted(draw(*runs)) == names


def test_files_are_written_and_their_paths_printed(tmp_path, capsys):
    """PNG and SVG, and nothing else; the same bytes again."""
    runs = [Run(tmp_path, "gn"), Run(tmp_path, "gn", seed=1), Run(tmp_path, "adamw")]
    out = tmp_path / "out"
    arguments = [run.folder for run in runs] + ["--out", str(out)]
    assert plot.main(arguments) == 0
    names = ["loss", "schedules", "step_sizes"]
    paths = [out / f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    tables = out / "tables.md"
    assert sorted(out.iterdir()) == [*paths, tables]
    printed = capsys.readouterr().out
    assert printed.startswith(tables.read_text())
    assert sorted(printed.split()[-7:]) == [str(path) for path in [*paths, tables]]

    written = [path.read_bytes() for path in paths]
    assert all(content.startswith(b"\x89PNG") for content in written[::2])
    assert all(content.startswith(b"<?xml") for content in written[1::2])
    assert plot.main(arguments) == 0
    assert [path.read_bytes() for path in paths] == written


def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys):
    """Exit status 2; the line names what is wrong."""
    good = Run(tmp_path).folder
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    cases = [
        ([], "runs"),
        ([good, "--frobnicate", "1"], "--frobnicate"),
        ([good, "--target", "low"], "--target"),
        ([good, "--target", "nan"], "target is nan"),
        ([good, str(tmp_path / "none")], "none"),
        ([str(tmp_path / "notes.txt")], "notes.txt"),
        ([str(tmp_path / "empty" / "..") + "/notes.txt"], "notes.txt"),
    ]
    for arguments, named in cases:
        assert plot.main([*arguments, "--out", str(tmp_path / "out")]) == 2, arguments
        printed = capsys.readouterr()
        assert named in printed.err and printed.err.count("\n") == 1 and not printed.out
        assert not (tmp_path / "out").exists()


def test_a_folder_is_drawn_though_it_has_runs_that_cannot_be(tmp_path, capsys):
    """Damaged ones, one of an unknown method, one that diverged: a line for each kind; status 0."""
    (tmp_path / "runs").mkdir()
    Run(tmp_path / "runs")
    unknown_method = Run(tmp_path / "runs", "sgd").folder
    broken_config = Run(tmp_path / "runs").folder
    Path(broken_config, "config.json").write_text('{"config": ')
    broken_log = Run(tmp_path / "runs").folder
    Path(broken_log, "log.jsonl").write_text('{"step": 0, "tok')
    no_batch = Run(tmp_path / "runs", "muon", batch=1024)
    path = Path(no_batch.folder, "config.json")
    path.write_text(path.read_text().replace('"batch": 1024', '"batch": -3'))
    diverged = Run(tmp_path / "runs", "muon").diverge().folder
    arguments = [str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert plot.main(arguments) == 0
    unreadable, gone_wrong = capsys.readouterr().err.splitlines()
    assert unreadable.startswith("4 runs cannot be read: ")
    for folder in (unknown_method, broken_config, broken_log, no_batch.folder):
        assert f"{folder} (" in unreadable
    assert "no method 'sgd'" in unreadable and "batch is -3" in unreadable
    why = "diverged, or another seed of it; it is in the tables only"
    assert gone_wrong == f"1 run {why}: {diverged}"
    assert (tmp_path / "out" / "loss.png").exists()

    alone = [broken_log, "--out", str(tmp_path / "alone")]
    assert plot.main(alone) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "plot.py: there is no run that can be read" and len(said) == 2
    assert not (tmp_path / "alone").exists()
    assert plot.main([diverged, "--out", str(tmp_path / "diverged")]) == 0
    assert [path.name for path in (tmp_path / "diverged").iterdir()] == ["tables.md"]
    assert "diverged" in (tmp_path / "diverged" / "tables.md").read_text()


def test_each_kind_of_runs_has_its_folder(tmp_path, capsys):
    """It has the name of model, text, tokenizer, and if need be a number; what differs is said."""
    (tmp_path / "runs").mkdir()
    runs = [Run(tmp_path / "runs"), Run(tmp_path / "runs", "muon")]
    runs += [Run(tmp_path / "runs", model="45m", d_model=64, data="c4", tokenizer="gpt2")]
    runs += [Run(tmp_path / "runs", eval_tokens=5), Run(tmp_path / "runs", eval_tokens=6)]
    runs += [Run(tmp_path / "runs", tokenizer="dir/words.json", data="a/b c.txt")]
    runs += [Run(tmp_path / "runs", tokenizer=name) for name in ("t-2.json", "t.json", "a/t.json")]
    folders = [run.folder for run in runs]
    assert plot.main([*folders, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.err == (
        "8 kinds of runs, which differ in model, d_model, tokenizer, held_out, eval_tokens, "
        "have a folder each\n"
    )
    names = ["45m-c4-gpt2", "tiny-b_c.txt-words"]
    names += ["tiny-stdlib-bytes", "tiny-stdlib-bytes-2", "tiny-stdlib-bytes-3"]
    names += ["tiny-stdlib-t", "tiny-stdlib-t-2", "tiny-stdlib-t-3"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    for name in names:
        assert (tmp_path / "out" / name / "loss.png").exists()
        assert f"# {name}\n" in printed.out


def test_a_picture_that_cannot_be_written_is_bad_input(tmp_path, capsys, monkeypatch):
    """Exit status 2, and one line, before any run is read."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").touch()
    run = Run(tmp_path / "runs")
    monkeypatch.setattr(comparison, "read_runs", None)
    assert plot.main([run.folder, "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"plot.py: {tmp_path / 'file'}: Not a directory\n"
    assert plot.main([run.folder, "--out", ""]) == 2
    assert capsys.readouterr().err == "plot.py: --out is empty\n"


@pytest.mark.parametrize("name", ["tables.md", "loss.png", "notes.svg"])
def test_only_what_it_has_written_itself_is_replaced(tmp_path, capsys, name):
    """A folder with a person's own pictures or tables is refused, and stays as it is."""
    (tmp_path / "runs").mkdir()
    run, out = Run(tmp_path / "runs"), tmp_path / "out"
    for _ in range(2):
        assert plot.main([run.folder, "--out", str(out)]) == 0
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / name).write_text("my own")
    capsys.readouterr()
    assert plot.main([run.folder, "--out", str(mine)]) == 2
    assert capsys.readouterr().err.startswith(f"plot.py: {mine} has {name}, which may not be of")
    assert [path.name for path in mine.iterdir()] == [name]
    assert (mine / name).read_text() == "my own"


def test_pictures_of_an_earlier_call_are_kept_and_named(tmp_path, capsys):
    """They may be of other runs; nobody should take them for pictures of these."""
    out = ["--out", str(tmp_path / "figures")]
    batches = [Run(tmp_path, batch=batch).folder for batch in (4096, 8192)]
    assert plot.main([*batches, *out]) == 0
    assert (tmp_path / "figures" / "batch.png").exists()
    capsys.readouterr()
    assert plot.main([batches[0], *out]) == 0
    pictures = ", ".join(f"{tmp_path}/figures/batch.{kind}" for kind in ("png", "svg"))
    assert f"2 pictures were there before: {pictures}\n" in capsys.readouterr().err
    assert (tmp_path / "figures" / "batch.png").exists()


def test_a_run_that_cannot_be_entered_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    (tmp_path / "runs").mkdir()
    first, second = Run(tmp_path / "runs"), Run(tmp_path / "runs", "muon")
    original = Path.exists

    def exists(path, **options):
        if path.parent == Path(second.folder):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, **options)

    monkeypatch.setattr(Path, "exists", exists)
    Path(second.folder, "log.jsonl").unlink()  # nor can it be read
    Path(second.folder, "log.jsonl").mkdir()
    assert plot.main([first.folder, second.folder, "--out", str(tmp_path / "out")]) == 0
    assert f"1 run cannot be read: {second.folder}" in capsys.readouterr().err


def test_a_longer_run_that_has_not_ended_hides_no_run_at_its_end(tmp_path):
    (tmp_path / "runs").mkdir()
    ended = Run(tmp_path / "runs")
    Run(tmp_path / "runs", steps=1000).cut(1)
    at_tokens = comparison.compare_at_tokens(comparison.read_runs([str(tmp_path / "runs")]))
    assert len(at_tokens) == 2
    chosen = comparison.choose_tokens(at_tokens)
    assert {*chosen.table.source} == {ended.folder}


def begin_runs(path):
    """The folders of runs that ended at each moment before their first row."""
    folders = [path / name for name in ("begun-0", "begun-1", "begun-2", "begun-3")]
    for folder in folders:
        folder.mkdir()
    for folder in folders[1:]:
        (folder / "lock").touch()
    (folders[2] / "config.json.draft").write_text('{"conf')
    (folders[3] / "config.json").write_text("{}")
    (folders[3] / "warmup.npz").touch()
    return folders


def test_what_has_no_row_yet_or_is_no_run_is_left_out_and_said(tmp_path, capsys):
    """`plot.py runs/*` after a grid was interrupted, with a note and other pictures beside it."""
    (tmp_path / "runs").mkdir()
    runs = [Run(tmp_path / "runs"), Run(tmp_path / "runs", "adamw")]
    begun = begin_runs(tmp_path / "runs")
    (tmp_path / "runs" / "notes.txt").touch()
    (tmp_path / "runs" / "pictures").mkdir()
    (tmp_path / "runs" / "pictures" / "loss.png").touch()
    paths = sorted((tmp_path / "runs").iterdir())
    assert plot.main([*map(str, paths), "--out", str(tmp_path / "out")]) == 0
    others = f"{tmp_path}/runs/notes.txt, {tmp_path}/runs/pictures"
    said = [
        f"2 are no runs: {others}",
        f"4 runs have no row yet: {', '.join(map(str, begun))}",
    ]
    assert capsys.readouterr().err.splitlines() == said

    # One folder below is the same as all that it holds, but for what is no run there.
    below = comparison.read_runs([tmp_path / "runs"])
    assert {*below.run} == {*comparison.read_runs(r.folder for r in runs).run}
    assert capsys.readouterr().err.splitlines() == said[1:]

    assert plot.main([str(begun[1]), "--out", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"1 run has no row yet: {begun[1]}",
        "plot.py: there is nothing to draw yet",
    ]
    assert not (tmp_path / "none").exists()


def test_figures_are_the_same_whatever_the_shell_says(tmp_path):
    """A person's matplotlibrc, a locale without UTF-8, a platform of JAX that is not there, -OO."""
    run = Run(tmp_path)
    path = Path(run.folder, "config.json")
    config = json.loads(path.read_text())
    config["config"]["data"] = "größe.txt"
    path.write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    (tmp_path / "matplotlibrc").write_text("text.usetex: true\nlines.color: red\nfont.size: 30\n")
    strange = {
        "MATPLOTLIBRC": str(tmp_path / "matplotlibrc"),
        "MPLBACKEND": "module://not_there",
        "JAX_PLATFORMS": "cuda",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    command = [sys.executable, "-OO", plot.__file__, run.folder, "--out", str(tmp_path / "strange")]
    done = subprocess.run(command, env=AS_A_USER | strange, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert plot.main([run.folder, "--out", str(tmp_path / "plain")]) == 0
    names = [path.name for path in (tmp_path / "plain").iterdir()]
    assert len(names) == 7
    for name in names:
        content = (tmp_path / "plain" / name).read_bytes()
        assert (tmp_path / "strange" / name).read_bytes() == content


def test_runs_that_have_just_begun_have_no_final_loss_and_no_costs(tmp_path):
    """Nor steps to a target that none of them comes to."""
    begun = [Run(tmp_path, batch=batch).cut(1) for batch in (4096, 8192)]
    for run in begun:
        run.write([row | {"seconds": 9.0} for row in run.rows()])
    assert {*draw(*begun)} & {"batch", "costs"} == set()
    assert "batch" not in draw(*begun, target=2.5)
    ended = [Run(tmp_path, "soap", batch) for batch in (4096, 8192)]
    assert {*curves(draw(*begun, *ended)["batch"].axes[0])} == {"SOAP"}


@pytest.mark.parametrize("steps", [3, plot.MOST_POINTS, 2 * plot.MOST_POINTS - 1])
def test_the_curve_of_a_schedule_has_so_many_points_at_most(steps):
    """And a short run has one for each step."""
    run = {"inner_steps": 1, "inner_epochs": 1, "outer_steps": steps, "has_inner_loop": False}
    run |= {"schedule": "cosine", "warmup": 0.0, "warmup_steps": 0, "inner_warmup": 0.0}
    rate = plot.compute_schedule(SimpleNamespace(**run))
    assert min(steps, plot.MOST_POINTS) / 2 <= len(rate) <= plot.MOST_POINTS
    assert steps > plot.MOST_POINTS or len(rate) == steps
