"""stand_ins.py takes the steps of Gauss-Newton, and what it logs beside them is true.

L2 and L1 are written down with the Jacobian in full, as in test_gn.py and test_gn_prox.py; L is the
loss of the plain network.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import (
    SMALL,
    TOY,
    assert_same,
    batches_and_fresh,
    logits,
    random_params,
    rows,
    run,
    without_time,
)
from test_gn import dense
from test_gn_prox import explicit_value_and_grad
from trees import add, change_of, close, flat

import gn
import recipe
import stand_ins

SIZES = {"inner_steps": 2, "outer_steps": 3}
THREE_BATCHES = {"inner_tokens": 1, "line_search_tokens": 3}  # of fresh tokens


def test_the_three_losses_are_those_of_the_definition(float64):
    """On the way to θ, at α = 1 and ½; means over the tokens of all three batches."""
    params = random_params(TOY)
    _, fresh = batches_and_fresh(TOY)
    delta = change_of(params, scale=0.05)
    config = stand_ins.Config(TOY, **SIZES, **THREE_BATCHES)
    measured = stand_ins.measure(params, add(params, delta), fresh, config)
    for alpha in (1, 0.5):
        d = jax.tree.map(lambda a, alpha=alpha: alpha * a, delta)
        L2, L1, L = [], [], []
        for tokens in map(fresh, range(3)):
            there = dense(TOY, params, tokens)
            L2.append(there.loss + there.g @ flat(d) + flat(d) @ there.G @ flat(d) / 2)
            L1.append(explicit_value_and_grad(TOY, params, d, tokens)[1])
            log_p = jax.nn.log_softmax(logits(TOY, add(params, d), tokens))
            of_labels = np.take_along_axis(np.asarray(log_p), tokens[:, 1:, None], axis=-1)
            L.append(-of_labels.mean())
        for name, losses in (("quadratic", L2), ("linearized", L1), ("true", L)):
            close(measured[f"{name}_at_{alpha}"], np.mean(losses), 1e-10)
    assert len(measured) == 6


def test_it_takes_the_steps_of_gauss_newton():
    """Bit for bit, with the same metrics and six more."""
    params = random_params(TOY)
    config = stand_ins.Config(TOY, **SIZES, **THREE_BATCHES)
    plain = gn.Config(TOY, **SIZES, **THREE_BATCHES)
    batches, fresh = batches_and_fresh(TOY)
    state, metrics = stand_ins.update(stand_ins.init(params, config), batches, fresh, config)
    same, known = gn.update(gn.init(params, plain), batches, fresh, plain)
    assert_same(state, same)
    more = {name: metrics.pop(name) for name in [*metrics] if name not in known}
    assert_same(metrics, known)
    assert len(more) == 6 and all(np.isfinite(value) for value in more.values())


def test_it_trains_as_train_py_does(here):
    """Its rows have more, and are the same otherwise."""
    assert stand_ins.main([*SMALL, "--data", "text.txt", "--out", "measured"]) == 0
    assert recipe.METHODS["gn"].module is gn  # as before
    assert run("--out", "plain") == 0
    _, *measured = without_time(rows("measured"))  # the row of the warm-up has nothing more
    _, *plain = without_time(rows("plain"))
    for more, row in zip(measured, plain, strict=True):
        assert {name: more.pop(name) for name in row} == row
        assert [*more] == [
            f"{name}_at_{alpha}"
            for alpha in (1, 0.5)
            for name in ("quadratic", "linearized", "true")
        ]


def test_a_run_of_train_py_with_the_same_flags_is_not_taken_for_its_own(here):
    """Each has its folder."""
    assert run("--steps", "1") == 0
    assert stand_ins.main([*SMALL, "--data", "text.txt", "--steps", "1"]) == 0
    (log,) = Path("runs_of_stand_ins").glob("*/log.jsonl")
    assert "true_at_1" in log.read_text()
    assert recipe.HOME == "runs"


def test_a_run_that_train_py_has_made_is_not_taken_for_one_that_was_measured(here, capsys):
    """It would be finished by an earlier command, and nothing would be measured."""
    assert run("--steps", "1", "--out", "r") == 0
    before = Path("r/log.jsonl").read_text()
    assert stand_ins.main([*SMALL, "--data", "text.txt", "--steps", "1", "--out", "r"]) == 2
    assert "r has a run of train.py, which measured nothing" in capsys.readouterr().err
    assert Path("r/log.jsonl").read_text() == before


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--method", "soap"], "method is 'soap'; valid: gn"),
        (["--line-search", "0"], "the stand-ins are measured on the tokens of the line search"),
        (["--momentum", "2"], "momentum is 2.0"),
    ],
)
def test_bad_input_is_said_in_one_line(here, capsys, flags, says):
    assert stand_ins.main([*SMALL, "--data", "text.txt", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stand_ins.py: ")
    assert says in error and error.count("\n") == 1
