"""Which runs are compared, and which setting of a method is the best."""

import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from logs import Run

import comparison
import recipe
from comparison import (
    Comparison,
    compare_at_tokens,
    compare_to_targets,
    find_usual,
    keep_best,
    label_groups,
    read_runs,
    summarize_groups,
)
from runtime import packed


def read(*runs):
    return read_runs([run.folder for run in runs])


def best_folders(asked):
    """The folders of the runs that are shown of a Comparison, in order."""
    return [*dict.fromkeys(keep_best(asked).source)]


def folders(*runs):
    return [run.folder for run in runs]


# ---- the best setting ----------------------------------------------------------------------------


def test_with_a_target_the_fewest_steps_win_over_a_smaller_loss(tmp_path):
    """100 steps to 3.249 against 200 steps to 3.240."""
    runs = []
    for step, loss in ((100, 3.249), (200, 3.240)):
        run = Run(tmp_path, "soap", target_loss=3.25, steps=400, lr=step / 1000)
        rows = [{"step": 0, "tokens": 0, "val_loss": 4.0}]
        rows += [{"step": step, "tokens": 4096 * step, "val_loss": loss}]
        run.write(rows)
        runs.append(run)
    (asked,) = compare_to_targets(read(*runs))
    assert best_folders(asked) == folders(runs[0])
    assert [*summarize_groups(asked).steps_to_target] == [100, 200]
    assert best_folders(asked._replace(target=None)) == folders(runs[1])


def test_of_equal_steps_the_fewest_tokens_win_and_then_the_smallest_loss(tmp_path):
    """Tokens with those of line searches."""
    runs = [Run(tmp_path, speed=0.5, target_loss=3.0, lr=lr) for lr in (0.1, 0.2, 0.3)]
    for run, shift in zip(runs, ((700, 0), (300, 0), (300, -0.001)), strict=True):
        rows = run.rows()
        rows[-1]["tokens"] += shift[0]
        rows[-1]["val_loss"] = 2.9 + shift[1]
        run.write([rows[0] | {"val_loss": 5.0}, rows[-1]])
    (asked,) = compare_to_targets(read(*runs))
    assert [*summarize_groups(asked).loss] == pytest.approx([2.899, 2.9, 2.9])
    assert best_folders(asked) == folders(runs[2])


def test_groups_that_do_not_come_to_the_target_come_last(tmp_path):
    """All seeds must come there; but for those that did not, the loss decides."""
    there = [Run(tmp_path, speed=0.4, target_loss=3.3, seed=seed) for seed in (0, 1)]
    half = [Run(tmp_path, speed=0.9, target_loss=3.3, seed=seed) for seed in (0, 200)]
    never = [Run(tmp_path, speed=speed, target_loss=3.3) for speed in (0.1, 0.2)]
    (asked,) = compare_to_targets(read(*never, *half, *there))
    groups = summarize_groups(asked)
    assert [*groups.reached] == [True, False, False, False]
    assert [*groups.setting.map(lambda setting: setting["lr"])] == [0.4, 0.9, 0.2, 0.1]
    assert groups.steps_of_runs.iloc[1][0] == 2 and np.isnan(groups.steps_of_runs.iloc[1][1])


def test_without_a_target_the_smallest_mean_final_loss_wins(tmp_path):
    """Not that of the best seed."""
    even = [Run(tmp_path, speed=0.5, seed=seed) for seed in (0, 1)]
    lucky = [Run(tmp_path, speed=0.51, seed=seed) for seed in (0, 30)]
    assert lucky[0].losses[-1] < even[0].losses[-1]
    (asked,) = compare_at_tokens(read(*lucky, *even))
    assert best_folders(asked) == folders(*even)
    groups = summarize_groups(asked)
    last = [run.losses[-1] for run in even]
    assert groups.loss.iloc[0] == pytest.approx(np.mean(last))
    assert [groups.lowest.iloc[0], groups.highest.iloc[0]] == pytest.approx(last)


def test_an_unfinished_run_counts_only_if_there_is_no_other(tmp_path):
    """Of a group and of a setting; a run at its target is finished."""
    done = Run(tmp_path, speed=0.4)
    better = Run(tmp_path, speed=0.9).cut(8)
    seed = Run(tmp_path, speed=0.4, seed=1).cut(1)
    for runs, shown in (([done, better, seed], done), ([better], better)):
        (asked,) = compare_at_tokens(read(*runs))
        assert best_folders(asked) == folders(shown)
    reached = Run(tmp_path, speed=0.6, target_loss=2.9).cut(8)
    running = Run(tmp_path, speed=0.9, target_loss=2.9, seed=3).cut(2)
    (asked,) = compare_to_targets(read(running, reached))
    assert [*summarize_groups(asked).finished] == [True, False]


def test_a_run_until_its_target_has_no_length(tmp_path):
    """config.json has no number of steps; the run is finished when it is there."""
    run = Run(tmp_path, speed=0.9, target_loss=2.5)
    path = Path(run.folder, "config.json")
    path.write_text(path.read_text().replace('"steps": 8', '"steps": null'))
    table = read(run)
    assert table.length.isna().all() and set(table.outer_steps) == {8}
    (asked,) = compare_to_targets(table)
    assert summarize_groups(asked).finished.all()
    (asked,) = compare_to_targets(read(run.cut(3)))
    assert not summarize_groups(asked).finished.any()


def test_a_group_with_a_run_that_diverged_is_the_last(tmp_path):
    """Also if the run came to the target before."""
    diverged = [Run(tmp_path, speed=0.9), Run(tmp_path, speed=0.9, seed=1).diverge()]
    other = Run(tmp_path, speed=0.1)
    table = read(*diverged, other)
    for asked in (*compare_at_tokens(table), *compare_to_targets(table, 4.0)):
        assert best_folders(asked) == folders(other)
        groups = summarize_groups(asked)
        assert [*groups.diverged] == [False, True]
        assert not groups.reached.iloc[1]


# ---- comparisons ---------------------------------------------------------------------------------


def test_runs_of_different_lengths_never_compete(tmp_path):
    """Nor do runs with and without a target. 400 steps do not replace 75."""
    short, long = Run(tmp_path, steps=75), Run(tmp_path, steps=400)
    target = Run(tmp_path, steps=75, target_loss=2.1, speed=0.9)
    table = read(short, long, target)
    at_tokens = compare_at_tokens(table)
    assert [asked.tokens for asked in at_tokens] == [75 * 4096, 400 * 4096]
    assert [best_folders(asked) for asked in at_tokens] == [folders(short), folders(long)]
    (asked,) = compare_to_targets(table)
    assert best_folders(asked) == folders(target)


def test_runs_to_a_target_compete_whatever_their_length(tmp_path):
    """Each target is a comparison; one that is given takes all runs that do not stop before it."""
    runs = [Run(tmp_path, speed=1 / n, steps=10 * n, target_loss=2.9) for n in (2, 3)]
    other = Run(tmp_path, steps=50, target_loss=2.6)
    fixed = Run(tmp_path, speed=0.9)
    table = read(*runs, other, fixed)
    assert [asked.target for asked in compare_to_targets(table)] == [2.9, 2.6]
    assert best_folders(compare_to_targets(table)[0]) == folders(runs[0])
    (asked,) = compare_to_targets(table, 2.7)
    assert {*asked.table.source} == {other.folder, fixed.folder}
    assert best_folders(asked) == folders(fixed)
    assert keep_best(asked).val_loss.min() <= 2.7 < sorted(keep_best(asked).val_loss)[1]


@given(st.integers(1, 2**40), st.integers(1, 2**32))
def test_runs_that_were_asked_for_one_number_of_tokens_have_one_length(tokens, batch):
    """Whatever their batches, to which train.py rounds; other runs have what their steps read."""
    steps = max(1, round(tokens / batch))
    assert comparison.find_length({"steps": steps, "batch": batch, "tokens": tokens}) == tokens
    asked_for_steps = {"steps": steps, "batch": batch, "tokens": None}
    assert comparison.find_length(asked_for_steps) == steps * batch


# ---- tasks and groups ----------------------------------------------------------------------------


def test_a_task_is_one_network_text_tokenizer_and_evaluation(tmp_path):
    """The text that evaluations read; not its name, nor how much more is there to train on."""
    corpora = [{"train": train, "val": val} for train, val in ("av", "bv", "bw")]
    runs = [Run(tmp_path, corpus=corpora[0]), Run(tmp_path, "muon", corpus=corpora[1], data="x")]
    assert read(*runs).task.nunique() == 1
    others = [Run(tmp_path, corpus=corpora[2])]
    changes = {"d_model": 9, "tokenizer": "gpt2", "eval_tokens": 7, "model": "45m", "qk_norm": 0}
    others += [Run(tmp_path, corpus=corpora[0], **{name: changes[name]}) for name in changes]
    for i, other in enumerate(others, 2):
        runs.append(other)
        assert read(*runs).task.nunique() == i


def test_a_group_is_equal_but_for_the_seed_and_for_what_changes_no_run(tmp_path):
    runs = [Run(tmp_path), Run(tmp_path, seed=1), Run(tmp_path, seed=2, eval_every=3)]
    runs += [Run(tmp_path, seed=3, save_every=1.0, out="else")]
    runs += [Run(tmp_path, seed=4, micro_batch=2)]
    assert read(*runs).group.nunique() == 1 and read(*runs).run.nunique() == 5
    for changed in ({"lr": 0.4}, {"batch": 8192}, {"steps": 9}, {"target_loss": 2.0}):
        other = Run(tmp_path, **changed)
        assert read(*runs, other).group.nunique() == 2


def test_schedules_of_a_method_of_ones_own_are_settings_though_none_can_be_drawn(tmp_path):
    table = read(Run(tmp_path, schedule="linear"), Run(tmp_path, schedule="steps", seed=1))
    assert table.run.nunique() == table.group.nunique() == 2
    assert table.schedule.isna().all()


def test_a_run_that_is_older_than_a_flag_has_its_default(tmp_path):
    """The default of the field; runs that name it group with those that do not."""
    for method in recipe.METHODS:
        fields = recipe.valid_flags(method)
        names = [name for name in fields if name not in ("tokens", "steps", "method", "batch")]
        old = Run(tmp_path, method)
        path = Path(old.folder, "config.json")
        config = json.loads(path.read_text())["config"]
        newer = {name: fields[name].default for name in names if name not in config}
        assert len(newer) > 20
        new = Run(tmp_path, method, seed=1, **newer)
        assert read(old, new).group.nunique() == 1


def test_a_run_that_is_there_twice_counts_once(tmp_path, capsys):
    """As it stands in the later folder, and a line says so."""
    runs = [Run(tmp_path, seed=0), Run(tmp_path, seed=1), Run(tmp_path, seed=1).cut(5)]
    table = read(*runs)
    assert {*table.source} == {runs[0].folder, runs[2].folder}
    assert capsys.readouterr().err == f"1 run is there again, later: {runs[1].folder}\n"


def test_packed_runs_are_read_as_their_folders_are(tmp_path):
    """All but where they are; a path says nothing of a text. A damaged line is left out."""
    home = tmp_path / "runs"
    home.mkdir()
    runs = [Run(home), Run(home, "muon", data="/some/where/stdlib"), Run(home, "soap").diverge()]
    file = tmp_path / "kept" / "all.jsonl"
    packed.add(file, [packed.pack(run.folder) for run in runs[:2]])
    packed.add(file, [packed.pack(runs[2].folder)])
    expected = read(*runs).drop(columns=["source", "data"])
    for path in (file, file.parent):
        table = read_runs([path])
        assert [*table.source.unique()] == [f"{file}:{number}" for number in (1, 2, 3)]
        assert {*table.data} == {"stdlib"}
        pd.testing.assert_frame_equal(table.drop(columns=["source", "data"]), expected)


def test_a_damaged_line_of_packed_runs_is_left_out(tmp_path, capsys):
    runs = [Run(tmp_path), Run(tmp_path, "muon"), Run(tmp_path, "soap").cut(0)]
    file = tmp_path / "all.jsonl"
    packed.add(file, [packed.pack(run.folder) for run in runs])
    lines = file.read_text().splitlines()
    ragged = lines[0].replace('"step":[0,', '"step":[')  # a column with a row too few
    assert ragged != lines[0]
    text = "\n".join([lines[0], lines[1][:-9], lines[2], "[]", ragged])
    file.write_bytes(text.encode() + b"\n\xff")  # no UTF-8
    assert {*read_runs([file]).method} == {"gn"}
    assert capsys.readouterr().err.splitlines() == [
        f"1 run has no row yet: {file}:3",
        f"4 runs cannot be read: {file}:2 ({file}:2 is no packed run), "
        f"{file}:4 ({file}:4 is no packed run), {file}:5 ({file}:5 is no packed run), "
        f"{file}:6 ({file}:6 is no packed run)",
    ]
    with pytest.raises(ValueError, match="all.jsonl:2 is no packed run"):
        packed.add(file, [])
    assert file.read_bytes().splitlines()[0] == lines[0].encode()  # what is there is not lost


def test_new_metrics_in_a_log_change_nothing(tmp_path):
    plain, rich = Run(tmp_path), Run(tmp_path, seed=1)
    more = {"loss_at_1": 2.0, "loss_at_0.7071": 2.1, "norm_head": 0.3, "inner_loss_first": None}
    rich.write([row | more for row in rich.rows()])
    (asked,) = compare_at_tokens(read(plain, rich))
    assert best_folders(asked) == folders(plain, rich)


# ---- names ---------------------------------------------------------------------------------------


def test_a_setting_is_named_by_the_flags_in_which_its_method_differs(tmp_path):
    """Neither by seed and batch, nor by steps that differ as the batch does."""
    runs = [Run(tmp_path, lr=lr, seed=seed) for lr in (0.01, 0.02) for seed in (0, 1)]
    runs += [Run(tmp_path, lr=0.01, schedule="constant", batch=8192)]
    runs += [Run(tmp_path, "muon", lr=0.5), Run(tmp_path, "muon", lr=0.5, batch=8192)]
    (asked,) = compare_at_tokens(read(*runs))
    groups = summarize_groups(asked)
    labels = label_groups(groups)
    assert sorted(labels[groups.method == "gn"]) == [
        "lr 0.01, schedule constant",
        "lr 0.01, schedule global cosine",
        "lr 0.02, schedule global cosine",
    ]
    assert {*labels[groups.method == "muon"]} == {"-"}

    runs = [Run(tmp_path, steps=steps, guard=guard) for steps, guard in ((8, True), (9, False))]
    groups = summarize_groups(Comparison(read(*runs), target=3.0))
    assert sorted(label_groups(groups)) == ["guard false, steps 9", "guard true, steps 8"]


def read_settings(path, *settings):
    """The groups of runs that differ in a few flags."""
    same = {"lr": 0.1, "momentum": 0.95, "restart": False}
    (asked,) = compare_at_tokens(read(*[Run(path, **same | flags) for flags in settings]))
    return summarize_groups(asked)


def test_a_value_of_most_settings_is_usual(tmp_path):
    """Three of four are most, two are not; a flag that most lack has no usual value."""
    settings = [{}, {"lr": 0.2}, {"restart": True}, {"restart": True, "momentum": 0.9, "old": 1}]
    settings[0] |= {"old": ""}
    groups = read_settings(tmp_path, *settings)
    usual = find_usual([*groups.setting])
    assert usual == {"lr": 0.1, "momentum": 0.95}
    assert sorted(label_groups(groups, {"gn": usual})) == [
        "lr 0.2, restart false, old none",
        "momentum 0.9, restart true, old 1",
        "restart false, old none",
        "restart true, old none",
    ]
    full = label_groups(groups)
    assert all("lr 0." in label and "momentum 0.9" in label for label in full)


def test_a_setting_may_be_usual_in_everything(tmp_path):
    groups = read_settings(tmp_path, {}, {"lr": 0.2}, {"momentum": 0.9}, {"restart": True})
    labels = label_groups(groups, {"gn": find_usual([*groups.setting])})
    assert sorted(labels) == ["all as usual", "lr 0.2", "momentum 0.9", "restart true"]


def test_values_that_are_equal_only_in_python_are_two(tmp_path):
    """As they make two groups: 0 and False, 1 and 1.0."""
    settings = [{"flag": value} for value in (0, False, 1, 1.0)]
    groups = read_settings(tmp_path, *settings)
    assert find_usual([*groups.setting]) == {} and len(groups) == 4
    labels = label_groups(groups, {"gn": {"flag": 1}})
    assert sorted(labels) == ["all as usual", "flag 0", "flag 1", "flag false"]
