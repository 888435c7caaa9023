"""The figures: which are drawn of which runs, that they show the logs' numbers, what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import AS_A_USER
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import plot
import train

FAMILY = ["gn", "gn_prox", "layerwise_gn"]
SEARCHES = ["gn", "layerwise_gn"]  # the methods with a line search
METHODS = [*FAMILY, "adamw", "muon", "soap"]


class Run:
    """A run folder, whose loss at step t is 2 + 3 (1 + t)^-speed + seed / 100.

    folder: its name; losses: one for each evaluation.
    """

    def __init__(self, path, method="gn", batch=4096, speed=0.5, seed=0, steps=8, every=1, **more):
        number = len(list(path.iterdir()))
        folder = path / f"{method}-{batch}-{number}"
        folder.mkdir()
        flags = {"method": method, "model": "tiny", "data": "stdlib", "tokenizer": "bytes"}
        flags |= {"batch": batch, "inner_batch": 8, "context": 128, "steps": steps, "out": None}
        flags |= {"lr": speed, "warmup": 0.0, "seed": seed, "schedule": "cosine"}
        if method in FAMILY:
            flags |= {"schedule": "global cosine", "inner_warmup": 0.0}
        text = json.dumps({"config": flags | more, "about": {}})
        (folder / "config.json").write_text(text)

        rows = []
        for t in range(0, steps + 1, every):
            loss = 2 + 3 * (1 + t) ** -speed + seed / 100
            row = {"step": t, "tokens": 1000 + t * batch, "val_loss": loss, "alpha": None}
            if method in SEARCHES and t > 0:
                row["alpha"] = [1.0, 0.5, 0.0][t % 3]
            rows.append(row)
        self.folder = str(folder)
        self.losses = [row["val_loss"] for row in rows]
        self.write(rows)

    def write(self, rows):
        lines = [json.dumps(row) + "\n" for row in rows]
        Path(self.folder, "log.jsonl").write_text("".join(lines))

    def rows(self):
        lines = Path(self.folder, "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def cut(self, evaluations):
        """Ends the run early."""
        self.write(self.rows()[:evaluations])
        self.losses = self.losses[:evaluations]
        return self

    def diverge(self):
        """Ends the run as train.py records that the loss was no number."""
        *rows, last = self.rows()
        self.write([*rows, {"step": last["step"], "val_loss": None, "diverged": "the loss is nan"}])
        return self


def draw(*runs, target=None):
    table = plot.read_runs([run.folder for run in runs])
    return plot.draw(plot.keep_best(table), target)


def curves(ax):
    """{label: (x, y)} of what is drawn."""
    return {line.get_label(): line.get_data() for line in ax.lines}


def first_step(run, target):
    """The first evaluation whose loss is at or below target."""
    return next(i for i, loss in enumerate(run.losses) if loss <= target)


# ---- which runs are shown ------------------------------------------------------------------------


def test_a_curve_is_the_mean_over_seeds_and_its_band_reaches_to_the_extremes(tmp_path):
    """At the steps that all seeds have, here those of an unfinished one; against tokens too."""
    runs = [Run(tmp_path, seed=seed) for seed in (0, 1)]
    runs += [Run(tmp_path, seed=5).cut(7)]
    expected = np.array([run.losses[:7] for run in runs])
    steps = np.arange(7)
    tokens = 1000 + 4096 * steps
    for ax, x in zip(draw(*runs)["loss"].axes, (steps, tokens), strict=True):
        np.testing.assert_array_equal(curves(ax)["Gauss-Newton"][0], x)
        np.testing.assert_allclose(curves(ax)["Gauss-Newton"][1], expected.mean(0), rtol=1e-12)
        band = ax.collections[0].get_paths()[0].vertices
        for i, value in enumerate(x):
            y = band[band[:, 0] == value, 1]
            np.testing.assert_allclose(y.min(), expected[:, i].min(), rtol=1e-12)
            np.testing.assert_allclose(y.max(), expected[:, i].max(), rtol=1e-12)


def test_the_group_with_the_smallest_loss_is_shown_if_no_run_of_it_diverged(tmp_path):
    """A run that has not begun its log is nothing yet."""
    best = Run(tmp_path, speed=0.7)
    diverged = Run(tmp_path, speed=0.9, seed=1).diverge()
    others = [Run(tmp_path, speed=0.4), Run(tmp_path, speed=0.9), diverged]
    others += [Run(tmp_path, speed=0.8).cut(0)]
    x, y = curves(draw(*others, best)["loss"].axes[0])["Gauss-Newton"]
    np.testing.assert_allclose(y, best.losses)
    for runs in ([diverged], others[-1:]):
        with pytest.raises(ValueError, match="none of these runs"):
            draw(*runs)


def test_an_unfinished_run_is_shown_only_if_there_is_no_other(tmp_path):
    done = Run(tmp_path, speed=0.4)
    better = Run(tmp_path, speed=0.9).cut(8)
    reached = Run(tmp_path, speed=0.6, target_loss=2.9).cut(8)  # --target-loss ended it
    cases = [([done, better], done), ([better], better), ([done, reached], reached)]
    for runs, shown in cases:
        x, y = curves(draw(*runs)["loss"].axes[0])["Gauss-Newton"]
        np.testing.assert_allclose(y, shown.losses)


def test_a_run_that_is_given_twice_counts_once(tmp_path):
    """As it stands in the later folder."""
    runs = [Run(tmp_path, seed=0), Run(tmp_path, seed=1), Run(tmp_path, seed=1).cut(5)]
    x, y = curves(draw(*runs)["loss"].axes[0])["Gauss-Newton"]
    expected = np.add(runs[0].losses[:5], runs[1].losses[:5]) / 2
    np.testing.assert_allclose(y, expected)


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
    runs = [Run(tmp_path), Run(tmp_path, "adamw"), Run(tmp_path, "muon", steps=100)]
    assert draw(*runs[:2])["loss"].axes[0].get_xscale() == "linear"
    ax = draw(*runs)["loss"].axes[0]
    assert ax.get_xscale() == "log" and ax.get_xlim()[0] > 0.1


def test_final_loss_and_steps_to_the_target_against_batch(tmp_path):
    """A step counts where its loss was measured, never between; the dotted line is as it says."""
    gn = [Run(tmp_path, "gn", 2048, speed=0.9, steps=12, every=2)]
    gn += [Run(tmp_path, "gn", 4096, speed=0.7, steps=12, every=2)]
    gn += [Run(tmp_path, "gn", 8192, speed=0.1, steps=12, every=2)]
    muon = [Run(tmp_path, "muon", 2048, speed=0.7, steps=12)]
    muon += [Run(tmp_path, "muon", 8192, speed=0.6, steps=12)]
    left, right = draw(*gn, *muon, target=2.6)["batch"].axes
    final = curves(left)
    steps = curves(right)
    np.testing.assert_array_equal(final["Gauss-Newton"][0], [2048, 4096, 8192])
    np.testing.assert_allclose(final["Gauss-Newton"][1], [run.losses[-1] for run in gn])
    np.testing.assert_array_equal(final["Muon"][0], [2048, 8192])
    np.testing.assert_allclose(final["Muon"][1], [run.losses[-1] for run in muon])

    assert [2 * first_step(run, 2.6) for run in gn[:2]] == [6, 10]
    assert first_step(muon[0], 2.6) == 9
    np.testing.assert_array_equal(steps["Gauss-Newton"], [[2048, 4096], [6, 10]])
    np.testing.assert_array_equal(steps["Muon"], [[2048], [9]])
    np.testing.assert_allclose(steps["optimal scaling"], [[2048, 8192], [6, 1.5]])

    by_default = curves(draw(*gn, *muon)["batch"].axes[1])
    assert {"Gauss-Newton", "Muon"} <= {*by_default}


def test_steps_to_the_target_are_each_seeds_own(tmp_path):
    """The mean of their steps, not where their mean loss is; nothing if a seed does not come there.

    Here --target-loss ended the runs of the smaller batch, at different steps.
    """
    small = [Run(tmp_path, batch=4096, steps=20, seed=seed) for seed in (0, 1)]
    large = [Run(tmp_path, batch=8192, steps=20, seed=seed) for seed in (0, 60)]
    steps = [first_step(run, 3.0) for run in small]
    assert steps[0] < steps[1] and min(large[1].losses) > 3.0
    for run, step in zip(small, steps, strict=True):
        run.cut(step + 1)
    drawn = curves(draw(*small, *large, target=3.0)["batch"].axes[1])
    np.testing.assert_array_equal(drawn["Gauss-Newton"], [[4096], [np.mean(steps)]])


def test_muon_is_a_bound_where_its_batch_is_the_inner_batch_of_gauss_newton(tmp_path):
    """A Muon run with a large batch that is read as one inner batch is a point of Muon's curve."""
    runs = [Run(tmp_path, "gn", batch) for batch in (4096, 8192)]
    muon = [Run(tmp_path, "muon", batch, inner_batch=batch // 128) for batch in (1024, 4096, 8192)]
    drawn = curves(draw(*runs, *muon)["batch"].axes[0])
    np.testing.assert_array_equal(drawn["Muon"][0], [4096, 8192])
    np.testing.assert_array_equal(drawn["Muon at the\ninner batch"][0], [4096, 8192])
    np.testing.assert_allclose(drawn["Muon at the\ninner batch"][1], muon[0].losses[-1])


def test_gauss_newton_beside_its_variants(tmp_path):
    """Against steps, or against batch where one of them has several."""
    runs = [Run(tmp_path, method) for method in METHODS]
    axes = draw(*runs)["methods"].axes
    assert {*curves(axes[0])} == {"Gauss-Newton", "layerwise GN"}
    assert {*curves(axes[1])} == {"Gauss-Newton", "GN-prox-linear"}
    assert axes[0].get_xlabel() == "outer steps"
    several = draw(*runs, Run(tmp_path, "gn", 8192))["methods"].axes
    assert several[0].get_xlabel() == "batch (tokens)"


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


def test_step_sizes_are_those_of_the_line_search_and_crosses_are_refused_ones(tmp_path):
    axes = draw(*[Run(tmp_path, method) for method in METHODS])["step_sizes"].axes
    assert len(axes) == len(SEARCHES)
    drawn = curves(axes[0])
    np.testing.assert_array_equal(drawn["Gauss-Newton"][0], [1, 3, 4, 6, 7])
    np.testing.assert_array_equal(drawn["Gauss-Newton"][1], [0.5, 1, 0.5, 1, 0.5])
    np.testing.assert_array_equal(drawn["refused"][0], [2, 5, 8])
    assert max(drawn["refused"][1]) < 0.5


def test_every_method_has_a_look_of_its_own():
    looks = [str(plot.LOOKS[method]) for method in train.METHODS]
    assert len({*looks}) == len(looks)


def test_numbers_are_written_as_the_flags_take_them():
    numbers = [0, 0.25, 1, 999.6, 131_072, 999_600, 1.2e6, 3e9]
    written = ["0", "1/4", "1", "1k", "131k", "1m", "1.2m", "3b"]
    assert [plot.format_count(number) for number in numbers] == written


@pytest.mark.parametrize("gap", [0.0, 0.02])
def test_labels_never_overlap_and_stay_in_the_picture(tmp_path, gap):
    """However near the curves end to each other, and where batches make labels of two lines."""
    runs = []
    for i, method in enumerate(METHODS):
        runs.append(Run(tmp_path, method, 1024 * (2 + i), speed=0.5 + gap * i))
        if i % 2:
            runs.append(Run(tmp_path, method, 32768, speed=0.6 + gap * i))
    for figure in draw(*runs).values():
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
    assert sorted(out.iterdir()) == paths
    assert capsys.readouterr().out.split() == [str(path) for path in paths]

    written = [path.read_bytes() for path in paths]
    assert all(content.startswith(b"\x89PNG") for content in written[::2])
    assert all(content.startswith(b"<?xml") for content in written[1::2])
    assert plot.main(arguments) == 0
    assert [path.read_bytes() for path in paths] == written


def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys):
    """Exit status 2; the line names what is wrong."""
    good = Run(tmp_path).folder
    larger_batch = Run(tmp_path, batch=8192).folder
    other_model = Run(tmp_path, "adamw", model="45m", d_model=512).folder
    unknown_method = Run(tmp_path, "sgd").folder
    broken_config = Run(tmp_path).folder
    Path(broken_config, "config.json").write_text('{"config": ')
    broken_log = Run(tmp_path).folder
    Path(broken_log, "log.jsonl").write_text('{"step": 0, "tok')

    cases = [
        ([], "runs"),
        ([good, "--frobnicate", "1"], "--frobnicate"),
        ([good, "--target", "low"], "--target"),
        ([str(tmp_path / "none")], "none"),
        ([str(tmp_path)], str(tmp_path)),
        ([good, other_model], "model, d_model"),
        ([good, broken_config], broken_config),
        ([unknown_method], "sgd"),
        ([broken_log], broken_log),
        ([good, larger_batch, "--target", "0.1"], "0.1"),
    ]
    for arguments, named in cases:
        assert plot.main([*arguments, "--out", str(tmp_path / "out")]) == 2, arguments
        printed = capsys.readouterr()
        assert named in printed.err and printed.err.count("\n") == 1 and not printed.out
        assert not (tmp_path / "out").exists()


def test_a_picture_that_cannot_be_written_is_a_failure_of_the_machine(
    tmp_path, capsys, monkeypatch
):
    """Exit status 1, and one line, before any run is read."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").touch()
    run = Run(tmp_path / "runs")
    monkeypatch.setattr(plot, "read_runs", None)
    assert plot.main([run.folder, "--out", str(tmp_path / "file")]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("plot.py: ") and printed.err.count("\n") == 1


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
    assert {*plot.read_runs([tmp_path / "runs"]).run} == {
        *plot.read_runs(r.folder for r in runs).run
    }
    assert capsys.readouterr().err.splitlines() == said[1:]

    assert plot.main([str(begun[1]), "--out", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"1 run has no row yet: {begun[1]}",
        "plot.py: none of these runs has a loss to show",
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
    assert len(names) == 6
    for name in names:
        content = (tmp_path / "plain" / name).read_bytes()
        assert (tmp_path / "strange" / name).read_bytes() == content


def test_a_seed_that_has_just_begun_neither_stops_the_figures_nor_spoils_its_group(tmp_path):
    """Its loss at step 0 does not count where another seed is finished."""
    finished = [Run(tmp_path, lr=lr, speed=speed) for lr, speed in ((0.1, 0.5), (0.2, 0.3))]
    begun = Run(tmp_path, lr=0.1, speed=0.5, seed=1)
    begun.cut(1)
    table = plot.keep_best(plot.read_runs([r.folder for r in (*finished, begun)]))
    assert set(table.lr) == {0.1}
    assert "loss" in plot.draw(table)


def test_runs_that_have_just_begun_are_drawn_without_steps_to_a_target(tmp_path):
    """But a target that is given, and that no run comes to, is refused."""
    begun = [Run(tmp_path, batch=batch) for batch in (4096, 8192)]
    for run in begun:
        run.cut(1)
    table = plot.keep_best(plot.read_runs([run.folder for run in begun]))
    figures = plot.draw(table)
    assert len(figures["batch"].axes) == 1
    with pytest.raises(ValueError, match="no run takes a step to come to the target loss 2.5"):
        plot.draw(table, 2.5)


def test_runs_with_one_held_out_text_are_compared(tmp_path):
    """Though one has more training text than the other, as it is longer."""
    sides = ({"train": "a", "val": "v"}, {"train": "b", "val": "v"}, {"train": "b", "val": "w"})
    runs = [
        Run(tmp_path, method, corpus=side).folder
        for method, side in zip(("gn", "muon", "soap"), sides, strict=True)
    ]
    assert plot.read_runs(runs[:2]).method.nunique() == 2
    with pytest.raises(ValueError, match="they differ in held_out"):
        plot.read_runs(runs)
