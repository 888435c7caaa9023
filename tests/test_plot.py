"""The figures: which are drawn of which runs, that they show the numbers of the logs, and what is refused."""

import json

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import plot

ALL = {"gn": 5, "gn_prox": 0, "layerwise_gn": 10, "adamw": 0, "muon": 0, "soap": 0}  # step sizes of the line search


def make_run(path, method="gn", batch=4096, speed=0.5, seed=0, steps=8, every=1, diverge=False, **more):
    """A run folder whose loss at step t is 2 + 3 (1 + t)^-speed + seed / 100; returns the folder's name, the losses."""
    folder = path / f"{method}-{batch}-{speed}-{seed}-{len([*path.iterdir()])}"
    folder.mkdir()
    flags = dict(method=method, model="tiny", data="stdlib", tokenizer="bytes", batch=batch, inner_batch=8, context=128)
    flags |= dict(steps=steps, lr=speed, warmup=0.0, seed=seed, out=None)
    flags["schedule"] = "global cosine" if "gn" in method else "cosine"
    if "gn" in method:
        flags["inner_warmup"] = 0.0
    (folder / "config.json").write_text(json.dumps({"config": flags | more, "about": {}}))
    losses = {t: 2 + 3 * (1 + t) ** -speed + seed / 100 for t in range(0, steps + 1, every)}
    rows = [{"step": t, "tokens": 1000 + t * batch, "val_loss": loss, "alpha": None} for t, loss in losses.items()]
    for row in rows[1:]:
        row["alpha"] = [1.0, 0.5, 0.0][row["step"] % 3] if ALL[method] else None
    if diverge:  # as train.py records it
        rows[-1] = {"step": steps, "val_loss": None, "diverged": "the loss is nan"}
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder), [*losses.values()]


def curves(ax):
    """{label: (x, y)} of what is drawn."""
    return {line.get_label(): line.get_data() for line in ax.lines}


def figures(*folders, target=None):
    return plot.draw(plot.keep_best(plot.read_runs([folder for folder, _ in folders])), target)


def test_steps_to_the_target_are_each_seeds_own(tmp_path):
    """Runs that --target-loss ended at different steps: the mean of their steps, not where their mean loss is."""
    runs = [make_run(tmp_path, batch=batch, steps=20, seed=seed) for batch in (4096, 8192) for seed in (0, 1)]
    firsts = []
    for folder, losses in runs[:2]:
        log = (tmp_path / folder / "log.jsonl").read_text().splitlines(keepends=True)
        firsts.append(next(t for t, loss in enumerate(losses) if loss <= 3.0))
        (tmp_path / folder / "log.jsonl").write_text("".join(log[: firsts[-1] + 1]))
    assert firsts[0] < firsts[1]
    x, y = curves(figures(*runs, target=3.0)["batch"].axes[1])["Gauss-Newton"]
    assert x[0] == 4096 and y[0] == np.mean(firsts)


def test_muon_at_the_inner_batch_is_so_by_its_batch(tmp_path):
    """A large-batch Muon run with one large inner batch is a point of Muon's curve, not the bound of Section 5."""
    runs = [make_run(tmp_path, "gn", batch) for batch in (4096, 8192)]
    runs += [make_run(tmp_path, "muon", batch, inner_batch=batch // 128) for batch in (1024, 4096, 8192)]
    drawn = curves(figures(*runs)["batch"].axes[0])
    assert list(drawn["Muon"][0]) == [4096, 8192] and "Muon at the\ninner batch" in drawn


def test_an_unfinished_run_is_shown_for_want_of_others_only(tmp_path):
    done, better = make_run(tmp_path, speed=0.4), make_run(tmp_path, speed=0.9, steps=8)
    path = tmp_path / better[0] / "log.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    for runs, losses in ([done, better], done[1]), ([better], better[1][:8]):
        np.testing.assert_allclose(curves(figures(*runs)["loss"].axes[0])["Gauss-Newton"][1], losses)


SETS = [(["gn"], [4096], "loss schedules step_sizes"), (["adamw", "muon"], [4096], "loss schedules")]
SETS += [(["gn", "adamw"], [4096, 8192], "batch loss schedules step_sizes")]
SETS += [(ALL, [4096], "loss methods schedules step_sizes")]


@pytest.mark.parametrize("methods, batches, names", SETS)
def test_figures_are_written_where_there_are_runs_for_them(tmp_path, capsys, methods, batches, names):
    """PNG and SVG, and their paths are printed; nothing but these files; the same bytes again."""
    (tmp_path / "runs").mkdir()
    runs = [make_run(tmp_path / "runs", m, b)[0] for m in methods for b in batches]
    assert plot.main([*runs, "--out", str(tmp_path / "out")]) == 0
    paths = [tmp_path / "out" / f"{name}.{kind}" for name in names.split() for kind in ("png", "svg")]
    assert sorted((tmp_path / "out").iterdir()) == paths
    assert sorted(capsys.readouterr().out.split()) == [str(path) for path in paths]
    first = [path.read_bytes() for path in paths]
    assert all(b[:4] == (b"\x89PNG" if p.suffix == ".png" else b"<?xm") for p, b in zip(paths, first, strict=True))
    assert plot.main([*runs, "--out", str(tmp_path / "out")]) == 0
    assert [path.read_bytes() for path in paths] == first


def test_a_curve_is_the_mean_over_seeds_of_the_best_learning_rate_that_did_not_diverge(tmp_path):
    """With its band; an unfinished seed shortens both; against tokens too; a run without rows is nothing yet."""
    runs = [make_run(tmp_path, speed=0.4), make_run(tmp_path, speed=0.9, diverge=True)]
    runs += [make_run(tmp_path, speed=0.7, seed=seed, steps=8) for seed in (0, 1)]
    short, losses = make_run(tmp_path, speed=0.7, seed=5)
    log = (tmp_path / short / "log.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / short / "log.jsonl").write_text("".join(log[:7]))
    empty = make_run(tmp_path, speed=0.8)
    (tmp_path / empty[0] / "log.jsonl").unlink()
    figure = figures(*runs, (short, losses), empty)["loss"]
    expected = np.array([runs[2][1], runs[3][1], losses])[:, :7]
    for ax, x in zip(figure.axes, (np.arange(7), 1000 + 4096 * np.arange(7)), strict=True):
        np.testing.assert_array_equal(curves(ax)["Gauss-Newton"][0], x)
        np.testing.assert_allclose(curves(ax)["Gauss-Newton"][1], expected.mean(0), rtol=1e-12)
        band = ax.collections[0].get_paths()[0].vertices
        for i, value in enumerate(x):
            ys = band[band[:, 0] == value, 1]
            np.testing.assert_allclose([ys.min(), ys.max()], [expected[:, i].min(), expected[:, i].max()], rtol=1e-12)
    with pytest.raises(ValueError, match="none of these runs"):
        figures(runs[1])


def test_the_batch_is_the_largest_that_most_methods_have(tmp_path):
    """Or a method's own largest, which its label then names."""
    sizes = {"gn": [2048, 4096, 8192], "adamw": [2048, 4096], "soap": [16384, 1024]}
    runs = [make_run(tmp_path, m, b, speed=b / 1e5) for m in sizes for b in sizes[m]]
    ax = figures(*runs)["loss"].axes[0]
    lines = curves(ax)
    assert ax.get_xscale() == "linear"
    assert [*lines] == ["Gauss-Newton,\nbatch 4.1k", "AdamW,\nbatch 4.1k", "SOAP,\nbatch 16.4k"]
    np.testing.assert_allclose(lines["AdamW,\nbatch 4.1k"][1], runs[4][1])
    assert [*curves(figures(runs[1], runs[4])["loss"].axes[0])] == ["Gauss-Newton", "AdamW"]
    far = figures(runs[1], make_run(tmp_path, "muon", steps=100))["loss"].axes[0]
    assert far.get_xscale() == "log" and far.get_xlim()[0] > 0.1


def test_final_loss_and_steps_to_the_target_against_batch(tmp_path):
    """A step counts where its loss was measured, never between; the dotted lines are where the caption says."""
    runs = [make_run(tmp_path, "gn", b, speed=s, steps=12, every=2) for b, s in ((2048, 0.9), (4096, 0.7), (8192, 0.1))]
    runs += [make_run(tmp_path, "muon", b, speed=s, steps=12) for b, s in ((1024, 1.5), (2048, 0.7), (8192, 0.6))]
    left, right = figures(*runs, target=2.6)["batch"].axes
    np.testing.assert_allclose(curves(left)["Gauss-Newton"], [[2048, 4096, 8192], [r[1][-1] for r in runs[:3]]])
    np.testing.assert_allclose(curves(left)["Muon"], [[2048, 8192], [runs[4][1][-1], runs[5][1][-1]]])
    np.testing.assert_allclose(curves(left)["Muon at the\ninner batch"][1], runs[3][1][-1])
    first = lambda run, every: every * next(i for i, loss in enumerate(run[1]) if loss <= 2.6)
    assert [first(runs[0], 2), first(runs[1], 2), first(runs[4], 1)] == [6, 10, 9]
    np.testing.assert_array_equal(curves(right)["Gauss-Newton"], [[2048, 4096], [6, 10]])
    np.testing.assert_array_equal(curves(right)["Muon"], [[2048], [9]])
    np.testing.assert_allclose(curves(right)["optimal scaling"], [[2048, 8192], [6, 1.5]])
    reached = curves(figures(*runs)["batch"].axes[1])  # by default every method has a step count
    assert {"Gauss-Newton", "Muon"} <= {*reached} and reached["Muon"][1][-1] <= 12


def test_variants_schedules_and_step_sizes(tmp_path):
    """Gauss-Newton beside each variant; the rate of each inner step; α, and crosses where it is 0."""
    runs = [make_run(tmp_path, method, 4096, lr=0.3, line_search=n) for method, n in ALL.items()]
    drawn = figures(*runs)
    beside = [{*curves(ax)} - {"Gauss-Newton"} for ax in drawn["methods"].axes]
    assert beside == [{"layerwise GN"}, {"GN-prox-linear"}]
    many = figures(*runs, make_run(tmp_path, "gn", 8192))
    assert [drawn["methods"].axes[0].get_xlabel(), many["methods"].axes[0].get_xlabel()] == [
        "outer steps",
        "batch (tokens)",
    ]
    family, others = [curves(ax) for ax in drawn["schedules"].axes]
    assert [*family] == ["global cosine"] and [*others] == ["cosine"]
    x, t = np.arange(32) / 4, np.arange(32) // 4  # eight steps of four inner batches
    np.testing.assert_allclose(family["global cosine"], [x, (1 + np.cos(np.pi * x / 8)) / 2], atol=1e-6)
    np.testing.assert_allclose(others["cosine"], [x, (1 + np.cos(np.pi * t / 8)) / 2], atol=1e-6)
    assert len(drawn["step_sizes"].axes) == 2
    alphas = curves(drawn["step_sizes"].axes[0])
    np.testing.assert_array_equal(alphas["Gauss-Newton"], [[1, 3, 4, 6, 7], [0.5, 1, 0.5, 1, 0.5]])
    np.testing.assert_array_equal(alphas["refused"][0], [2, 5, 8])
    assert max(alphas["refused"][1]) < 0.5


@pytest.mark.parametrize("gap", [0.0, 1e-4, 0.02, 0.5])
def test_labels_never_overlap_and_stay_in_the_picture(tmp_path, gap):
    """However near the curves end to each other, and where batches make labels of two lines."""
    runs = [make_run(tmp_path, m, 1024 * (2 + i), speed=0.5 + gap * i) for i, m in enumerate(ALL)]
    runs += [make_run(tmp_path, m, 32768, speed=0.6 + gap * i) for i, m in enumerate(ALL) if i % 2]
    for figure in figures(*runs).values():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        boxes = [Text.get_window_extent(text, canvas.get_renderer()) for ax in figure.axes for text in ax.texts]
        assert len(boxes) == sum(len(ax.lines) for ax in figure.axes)
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        assert all(0 <= b.x0 and b.x1 <= figure.bbox.x1 and 0 <= b.y0 and b.y1 <= figure.bbox.y1 for b in boxes)


def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys):
    """Exit status 2; the line names what is wrong."""
    (good, _), (other, _) = make_run(tmp_path), make_run(tmp_path, "adamw", model="45m", d_model=512)
    (broken, _), (strange, _), (cut, _) = make_run(tmp_path), make_run(tmp_path, method="muon"), make_run(tmp_path)
    (tmp_path / broken / "config.json").write_text('{"config": ')
    text = (tmp_path / strange / "config.json").read_text()
    (tmp_path / strange / "config.json").write_text(text.replace('"muon"', '"sgd"'))
    (tmp_path / cut / "log.jsonl").write_text('{"step": 0, "tok')
    cases = [([], "runs"), ([good, "--frobnicate", "1"], "--frobnicate"), ([good, "--target", "low"], "--target")]
    cases += [([str(tmp_path / "none")], "none"), ([str(tmp_path)], str(tmp_path)), ([good, other], "model, d_model")]
    cases += [([good, broken], broken), ([strange], "sgd"), ([cut], cut)]
    second, _ = make_run(tmp_path, batch=8192)
    cases += [([good, second, "--target", "0.1"], "0.1")]
    for arguments, named in cases:
        assert plot.main([*arguments, "--out", str(tmp_path / "out")]) == 2, arguments
        printed = capsys.readouterr()
        assert named in printed.err and printed.err.count("\n") == 1 and not printed.out
        assert not (tmp_path / "out").exists()
