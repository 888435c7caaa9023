"""A log is laid out in columns, and comes back as it was."""

import ast
import subprocess
import sys
from pathlib import Path

from conftest import AS_A_USER
from hypothesis import given
from hypothesis import strategies as st

from runtime import packed

ROOT = Path(__file__).parents[2]

NAMES = ["tokens", "alpha", "loss_at_0.25", "diverged"]  # what a row may have besides the other two
NUMBERS = st.one_of(st.integers(0, 10**9), st.floats(allow_nan=False), st.booleans())
OF_ALL_ROWS = st.fixed_dictionaries({"step": NUMBERS, "val_loss": NUMBERS})
OF_SOME_ROWS = st.dictionaries(st.sampled_from(NAMES), NUMBERS)
ROWS = st.lists(st.builds(lambda a, b: a | b, OF_ALL_ROWS, OF_SOME_ROWS))


@given(ROWS)
def test_a_line_holds_the_rows_of_a_log(rows):
    """Rows have different columns: there is no step size before the first line search."""
    run = {"config": {"lr": 0.1}, "about": {"device": "cpu"}, "rows": rows}
    assert packed.parse(packed.format_line(run), "here") == run
    assert len({len(column) for column in packed.columns_of(rows).values()}) <= 1


def test_a_packed_run_has_fewer_digits_of_its_numbers():
    """What is whole keeps all of its digits, and a null goes."""
    row = {"tokens": 104_923_136, "val_loss": 3.21000498, "loss_at_0.25": 12.345678}
    row |= {"seconds": 13.814938, "alpha": None}
    packed_run = packed.shorten({"config": {}, "about": {}, "rows": [row]})
    kept = {"tokens": 104_923_136, "val_loss": 3.21, "loss_at_0.25": 12.346, "seconds": 13.8}
    assert packed_run["rows"] == [kept]
    assert packed.shorten(packed_run) == packed_run


def test_a_packed_run_does_not_say_what_its_rows_need_not_say():
    """The learning rate, the bits per byte, that no step was refused, and that none waited."""
    rows = [{"refused": 0, "input_wait": 0.0357, "val_bpb": 1.5}]
    rows += [{"refused": 2, "input_wait": 12.3456, "lr": 0.1}]
    packed_run = packed.shorten({"config": {}, "about": {}, "rows": rows})
    assert packed_run["rows"] == [{}, {"refused": 2, "input_wait": 12.3}]


def test_a_packed_run_says_which_settings_of_jax_were_changed():
    """The others are those that JAX has by itself, in a new process."""
    script = "from runtime import checkpoint; print(checkpoint.jax_settings())"
    command = [sys.executable, "-c", script]
    usual = subprocess.run(command, env=AS_A_USER, cwd=ROOT, capture_output=True, text=True)
    assert ast.literal_eval(usual.stdout) == packed.USUAL_SETTINGS
    changed = packed.USUAL_SETTINGS | {"jax_enable_x64": True}
    for settings, kept in ((packed.USUAL_SETTINGS, {}), (changed, {"jax_settings": changed})):
        run = {"config": {}, "about": {"jax_settings": settings}, "rows": []}
        assert packed.shorten(run)["about"] == kept


def test_a_run_of_a_file_that_has_more_digits_is_not_added_again(tmp_path):
    run = {"config": {}, "about": {}, "rows": [{"step": 0, "val_loss": 2.0, "seconds": 13.814938}]}
    file = tmp_path / "old.jsonl"
    file.write_text(packed.format_line(run), encoding="utf-8")
    assert packed.add(file, [run]) == 0
    assert packed.read(file) == [packed.shorten(run)]
