"""The lesson: what it says of its numbers is true of them, and its picture is there."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

import gn
import tutorial


@pytest.fixture(scope="module")
def lesson(tmp_path_factory):
    """What `teach` returns, computed once for this file."""
    folder = tmp_path_factory.mktemp("lesson") / "new" / "folder"
    with jax.enable_x64(True):
        results = tutorial.teach(folder)
    return jax.device_get(results), folder


def test_conjugate_gradients_and_descent_reach_the_step(lesson):
    """The same δ three ways: by a solver, from products, and ever nearer by gradient steps."""
    (of_cg, of_steps), *_ = lesson[0]
    assert of_cg < 1e-12
    assert of_steps[1] > of_steps[10] > of_steps[100] > of_steps[1000]
    assert of_steps[1] > 0.1 and of_steps[1000] < 1e-10


def test_newton_fails_where_gauss_newton_does_not(lesson):
    """Newton's step goes uphill and is refused for good; the others lower the loss,
    Gauss-Newton the most."""
    _, comparison, uphill, _ = lesson[0]
    one = list(tutorial.SHOWN).index(1)
    for method, (slope, curve, parabola, losses) in comparison.items():
        fails = method == "Newton"
        start, end = curve[0], curve[one]
        assert (slope > 0) == (end > start) == (parabola[one] > start) == fails
        assert (losses[-1] == losses[0]) == fails
    assert comparison["Gauss-Newton"][-1][-1] < comparison["gradient"][-1][-1]
    assert uphill["Newton"] > 0
    assert uphill["Gauss-Newton"] == uphill["gradient"] == 0


def test_gn_computes_what_is_written_down(lesson):
    """The value, the gradient and G δ, of both networks."""
    *_, errors = lesson[0]
    assert {*errors} == {"MLP", "LLaMA"}
    for name, distances in errors.items():
        assert max(distances) < 1e-12, name


def test_the_model_is_flat_at_the_step(lesson):
    """The dashed curves of the picture: each has its extreme at α = 1."""
    _, comparison, *_ = lesson[0]
    one = list(tutorial.SHOWN).index(1)
    for method, (slope, _, parabola, _) in comparison.items():
        best = parabola.argmax() if slope > 0 else parabola.argmin()
        assert best == one, method


def test_the_picture_is_there(lesson):
    assert (lesson[1] / "tutorial.png").read_bytes().startswith(b"\x89PNG")


def test_the_command(capsys, tmp_path, monkeypatch):
    """It passes the folder on and computes in float64; what is wrong ends it with one line."""
    seen = []

    def teach(out):
        seen.append((out, jax.numpy.zeros(()).dtype))

    monkeypatch.setattr(tutorial, "teach", teach)
    assert tutorial.main(["--out", str(tmp_path)]) == 0
    assert seen == [(tmp_path, "float64")]
    for wrong in (["--oat", "x"], ["x"], ["--out"]):
        assert tutorial.main(wrong) == 2
        assert re.fullmatch(r"tutorial\.py: .+\n", capsys.readouterr().err)


def test_a_folder_that_cannot_be_is_one_line(capsys, tmp_path, monkeypatch):
    """Before anything is computed."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(tutorial, "teach", None)
    assert tutorial.main(["--out", str(tmp_path / "file")]) == 1
    assert re.fullmatch(r"tutorial\.py: .+\n", capsys.readouterr().err)


@dataclass(frozen=True)
class Sizes:
    """All that gn.py reads of the sizes of a network."""

    dtype: str = "float32"


@pytest.mark.parametrize("inner", ["muon", "adamw"])
def test_a_whole_outer_step_trains_a_network_of_ones_own(inner):
    """The MLP has no matrix that Muon knows by name, so AdamW moves it under either name."""
    config = gn.Config(Sizes(), inner_steps=30, outer_steps=2, model=tutorial.MLP, inner=inner)
    batch = tutorial.make_batch()
    params = jax.tree.map(jnp.float32, tutorial.init(1))
    before = tutorial.MLP.loss(None, params, batch)
    state, metrics = gn.update(gn.init(params, config), lambda k: batch, lambda k: batch, config)
    assert metrics["alpha"] > 0
    assert tutorial.MLP.loss(None, state.params, batch) < before - 0.005
