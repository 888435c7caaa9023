"""Conjugate gradients solve for the Gauss-Newton step itself: δ = -(G + λI)⁻¹ g of the whole batch.

A dense solve with the G of test_gn.py says what δ is, with damping and without; for the
block-diagonal G, that of test_layerwise_gn.py. Then the step is searched along, taken, and a run
stopped in it resumes.
"""

import math

import jax
import numpy as np
import pytest
from conftest import assert_same, batches_and_fresh, random_params
from test_gn import GRID, ONE, dense, losses_by_hand, norms_by_hand
from test_layerwise_gn import diagonal_blocks
from trees import close, flat

import gn_cg
import layerwise_gn


def config_of(**changes):
    sizes = {"network": ONE, "inner_steps": 2, "outer_steps": 3}
    return gn_cg.Config(**sizes | {"cg_steps": 3000} | changes)


def dense_of_batch(params, batches):
    return dense(ONE, params, np.concatenate([batches(0), batches(1)]))


def dense_step(g, G, damping):
    """The shortest δ with (G + λI) δ = -g, [P].

    Without damping there are many such δ, as G has no inverse. Conjugate gradients that start at
    zero come to the shortest: they never leave the range of G.
    """
    step, *_ = np.linalg.lstsq(G + damping * np.eye(len(g)), -g, rcond=1e-10)
    return step


@pytest.mark.parametrize("damping", [1.0, 1e-3, 0.0])
def test_update_is_the_dense_solve(float64, damping):
    """θ_{t+1} = θ_t - α (G + λI)⁻¹ g, α being the best of the grid or 0; and what is logged."""
    config = config_of(damping=damping)
    params, (batches, fresh) = random_params(ONE), batches_and_fresh(ONE)
    true = dense_of_batch(params, batches)
    step = dense_step(true.g, true.G, damping)
    solved = []

    def watch(state):
        solved.append(flat(state.theta) - flat(params))

    before = gn_cg.init(params, config)
    state, metrics = gn_cg.update(before, batches, fresh, config, watch)
    close(solved, [step], 1e-6)
    assert not any(a.is_deleted() for a in jax.tree.leaves(before))  # as it says

    _, unravel = jax.flatten_util.ravel_pytree(params)
    theta = unravel(flat(params) + step)
    losses = losses_by_hand(params, theta, fresh, grid=[0.0, *GRID], network=ONE).sum(axis=0)
    alpha = [0.0, *GRID][int(np.argmin(losses))]
    # Hardly damped, the step fits its four sequences only, and is refused.
    assert (alpha > 0) == (damping == 1)
    assert math.isclose(metrics["alpha"], alpha, rel_tol=1e-12)
    names = [f"loss_at_{a:.4g}" for a in [0.0, *GRID]]
    close([metrics[name] for name in names], losses / 2, 1e-6)
    for name, norm in norms_by_hand(unravel(step)).items():
        assert math.isclose(metrics[name], norm, rel_tol=1e-6), name
    close(state.params, flat(params) + alpha * step, 1e-6)
    assert_same(state.theta, state.params)  # the next step starts there
    assert (int(state.t), int(state.k)) == (1, 0)

    quadratic = true.g @ step + step @ true.G @ step / 2 + damping * step @ step / 2
    close(metrics["train_loss"], true.loss, 1e-10)
    close(metrics["inner_loss"], true.loss + quadratic, 1e-8)


def test_solves_with_the_diagonal_blocks_for_layerwise(float64):
    """With layerwise_gn's gradient: δ = -(blockdiag(G) + λI)⁻¹ g."""
    config = config_of(damping=0.1)
    params, (batches, _) = random_params(ONE), batches_and_fresh(ONE)
    start = gn_cg.init(params, config)
    state = gn_cg.solve(start, batches, config, layerwise_gn.value_and_grad)
    true = dense_of_batch(params, batches)
    step = dense_step(true.g, diagonal_blocks(true.G, params), 0.1)
    close(flat(state.theta) - flat(params), step, 1e-6)


def test_one_step_of_conjugate_gradients_is_steepest_descent(float64):
    """cg_steps = 1: δ = -(g·g / g·(G + λI) g) g."""
    config = config_of(cg_steps=1, damping=0.1, line_search=0)
    params, (batches, _) = random_params(ONE), batches_and_fresh(ONE)
    state = gn_cg.solve(gn_cg.init(params, config), batches, config)
    _, g, G = dense_of_batch(params, batches)
    step = -(g @ g) / (g @ G @ g + 0.1 * g @ g) * g
    close(flat(state.theta) - flat(params), step, 1e-8)


def test_without_line_search_the_step_is_taken_whole_and_a_stopped_one_resumes_bitwise(float64):
    """The State after the solve is all there is: the batch is not read again, nor solved for."""
    config = config_of(cg_steps=1, damping=0.1, line_search=0)
    params, (batches, _) = random_params(ONE), batches_and_fresh(ONE)
    seen = []
    whole = gn_cg.update(gn_cg.init(params, config), batches, None, config, seen.append)
    state, metrics = whole
    passes = 3  # for g, for one product, for the value
    assert [int(inside.k) for inside in seen] == [passes * 2]
    assert_same(gn_cg.update(seen[0], None, None, config), whole)
    close(state.params, seen[0].theta, 1e-15)
    norms = {"norm_matrices", "norm_vectors", "norm_embedding", "norm_head"}
    assert metrics.keys() == {"train_loss", "inner_loss", *norms}
    assert state.average is None


def test_it_has_no_learning_rate_that_depends_on_the_length_of_a_run():
    assert not config_of().depends_on_length


@pytest.mark.parametrize(
    "bad", [{"damping": -0.1}, {"cg_steps": 0}, {"line_search": -1}, {"alphas": "all"}]
)
def test_bad_settings_are_refused(bad):
    config_of().check()
    with pytest.raises(ValueError, match=next(iter(bad))):
        config_of(**bad).check()
