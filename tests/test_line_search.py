"""The line search takes the step size with the smallest true loss on fresh tokens.

What it measures is compared with the loss of the plain network at each point of the line. The guard
refuses a step that helps nowhere, or is not finite.
"""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SMALL, TOY, assert_same, batches_and_fresh, random_params
from hypothesis import given
from hypothesis import strategies as st
from test_gn import GRID, LOSS, LOSS_GRAD, config_of, losses_by_hand
from trees import add, close

import gn
import recipe
from line_search import between, line_search, race, still_running


def test_between_is_the_line_from_theta_t_to_theta(float64):
    """θ_t + α (θ - θ_t); θ_t itself at α = 0, even where θ is not a number."""
    a, b = random_params(TOY), random_params(TOY, 1)
    expected = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, a, b)
    close(between(a, b, 0.25), expected, 1e-12)
    nowhere = jax.tree.map(lambda b: b * jnp.nan, b)
    assert_same(between(a, nowhere, 0.0), a)


def test_line_search_takes_the_best_of_its_grid_over_all_fresh_batches(float64):
    """α is the argmin over 2^(-i/2) of the mean loss, for steps of every length."""
    params, (_, fresh) = random_params(TOY), batches_and_fresh(TOY)
    config = config_of(TOY, guard=False)
    grad = LOSS_GRAD(TOY, params, fresh(0))  # helps the first fresh batch more than the second
    found = set()
    misled = set()  # the fresh batches that alone would have chosen another α
    for length in (0.2, 0.8, 1.3, 1.6, 2.0, 2.5, 4.0):
        theta = add(params, grad, -length)
        losses = losses_by_hand(params, theta, fresh)
        best = int(np.argmin(losses.sum(axis=0)))
        alpha, measured, _ = line_search(params, theta, fresh, config)
        assert math.isclose(alpha, GRID[best])
        names = ["loss_at_1", "loss_at_0.7071", "loss_at_0.5", "loss_at_0.3536", "loss_at_0.25"]
        assert list(measured) == ["alpha", *names]
        close(list(measured.values()), [alpha, *losses.mean(axis=0)], 1e-12)
        found.add(best)
        misled |= {k for k in range(2) if np.argmin(losses[k]) != best}
    assert len(found) > 2  # else the lengths would not test the choice
    assert misled == {0, 1}  # nor that it is made over all batches


def test_a_line_search_may_read_less_than_a_batch(float64):
    """line_search_tokens: about so many, at least one inner batch. 0: as many as the batch has."""

    def make(tokens, **more):
        sizes = {"inner_steps": 8, "inner_tokens": 10, "line_search_tokens": tokens}
        return config_of(TOY, **sizes, **more)

    assert [make(n).fresh_batches for n in (0, 1, 14, 16, 80, 200)] == [8, 1, 1, 2, 8, 20]
    assert make(16, line_search=0).fresh_batches == 0
    with pytest.raises(ValueError, match="line_search_tokens needs inner_tokens"):
        _ = config_of(TOY, line_search_tokens=100).fresh_batches

    params, (_, fresh) = random_params(TOY), batches_and_fresh(TOY)
    theta = add(params, LOSS_GRAD(TOY, params, fresh(0)), -1.6)
    read = []

    def noted(k):
        read.append(k)
        return fresh(k)

    alpha, _, _ = line_search(params, theta, noted, make(20, guard=False))
    assert read == [0, 1]
    best = np.argmin(losses_by_hand(params, theta, fresh).sum(axis=0))
    assert math.isclose(alpha, GRID[best])


def test_the_flag_counts_tokens():
    """An inner batch of the command has 4 · 16 = 64 tokens, so 130 tokens are two of them."""
    for method in ("gn", "gn_cg"):
        argv = [*SMALL, "--method", method, "--data", "text.txt", "--line-search-tokens", "130"]
        assert recipe.configure(argv).settings.fresh_batches == 2


def test_guard_refuses_a_step_that_does_not_lower_the_loss(float64):
    """Uphill, no better, or with weights that are not finite: α = 0. Without the guard it moves."""
    params, (_, fresh) = random_params(TOY), batches_and_fresh(TOY)

    at_theta_t = (LOSS(TOY, params, fresh(0)) + LOSS(TOY, params, fresh(1))) / 2

    def search(theta, **changes):
        config = config_of(TOY, race=False, **changes)
        alpha, measured, _ = line_search(params, theta, fresh, config)
        if "loss_at_0" in measured:
            close(measured["loss_at_0"], at_theta_t, 1e-12)
        racing = dataclasses.replace(config, race=True)
        assert line_search(params, theta, fresh, racing)[0] == alpha
        return alpha

    uphill = params
    for k in range(2):
        uphill = add(uphill, LOSS_GRAD(TOY, params, fresh(k)))
    nowhere = jax.tree.map(lambda a: a * jnp.nan, params)
    infinite = params | {"head": params["head"].at[0, 0].set(jnp.inf)}
    overflows = params | {"head": 1e308 * params["head"]}
    assert np.isnan(LOSS(TOY, overflows, fresh(0)))
    for theta in (uphill, nowhere, infinite, overflows, params):
        assert search(theta) == 0
    assert search(uphill, guard=False) == 0.25


def test_guard_refuses_infinite_weights_that_the_fresh_tokens_do_not_read(float64):
    """An infinite embedding of an id that does not occur leaves the loss finite; still α = 0."""
    params, (_, fresh) = random_params(TOY), batches_and_fresh(TOY)

    def without_10(k):
        return fresh(k) % 10

    downhill = add(params, LOSS_GRAD(TOY, params, without_10(0)), -0.1)
    infinite = downhill | {"embedding": downhill["embedding"].at[10, 0].set(jnp.inf)}
    assert np.isfinite(LOSS(TOY, infinite, without_10(0)))
    alpha, _, _ = line_search(params, downhill, without_10, config_of(TOY))
    assert alpha > 0
    alpha, _, _ = line_search(params, infinite, without_10, config_of(TOY))
    assert alpha == 0


def test_other_step_sizes_may_be_tried(float64):
    """alphas: in the order given, the first of equals counts, and the guard goes before them."""
    params, (_, fresh) = random_params(TOY), batches_and_fresh(TOY)
    theta = add(params, LOSS_GRAD(TOY, params, fresh(0)), -0.5)
    config = config_of(TOY, alphas="3 0.05  1.5")
    assert (config.line_search, config.fresh_batches, config.average) == (3, 2, 0.0)
    alpha, measured, _ = line_search(params, theta, fresh, config)
    assert measured.pop("alpha") == alpha
    assert list(measured) == ["loss_at_0", "loss_at_3", "loss_at_0.05", "loss_at_1.5"]
    losses = losses_by_hand(params, theta, fresh, [0.0, 3.0, 0.05, 1.5]).mean(axis=0)
    close(list(measured.values()), losses, 1e-12)
    assert alpha == [0.0, 3.0, 0.05, 1.5][int(np.argmin(losses))] > 0
    alpha, _, _ = line_search(params, params, fresh, config_of(TOY, alphas="2 1", guard=False))
    assert alpha == 2


@pytest.mark.parametrize(
    "alphas", [" ", "1 half", "1;0.5", "1 0", "-1", "1 nan", "inf", "0.5 0.50001"]
)
def test_bad_step_sizes_are_refused(alphas):
    config_of(TOY, alphas="1 0.5 0.25").check()
    with pytest.raises(ValueError, match="^alphas is '.*'; .*$"):
        config_of(TOY, alphas=alphas).check()


# ---- the race ------------------------------------------------------------------------------------


class Line:
    """A model whose loss at θ is the token in column θ, so that a test can say every loss.

    θ_t = 0 and θ = 1: at the step size α the loss is the token in column 4 α, in 1/1000 nats.
    """

    @staticmethod
    def loss(network, params, tokens):
        column = jnp.round(4 * params["theta"]).astype(int)
        return tokens[0, column] / 1000


def search(losses, **changes):
    """α, the losses, and the numbers of the batches that were read.

    losses: [n, 4], at α = 0, 1, 0.5 and 0.25. They are given in this order.
    """
    settings = {"model": Line, "alphas": "1 0.5 0.25", **changes}
    config = gn.Config(TOY, inner_steps=len(losses), outer_steps=1, **settings)
    theta0, theta = {"theta": jnp.zeros(())}, {"theta": jnp.ones(())}
    asked = []

    def fresh(k):
        asked.append(k)
        at_0, at_1, at_half, at_quarter = np.round(1000 * losses[k])
        return jnp.array([[at_0, at_quarter, at_half, 0, at_1]])

    alpha, measured, read = line_search(theta0, theta, fresh, config)
    assert asked == list(range(read))
    assert measured.pop("alpha") == alpha
    return alpha, list(measured.values()), read


def draw(n, means, noise, common=0.0):
    """Losses [n, means]: noise of each, and noise that all of a batch have in common."""
    rng = np.random.default_rng(0)
    own = noise * rng.standard_normal((n, len(means)))
    shared = common * rng.standard_normal((n, 1))
    return np.array(means) + own + shared


def test_the_race_ends_when_one_step_size_is_left(float64):
    """It reads no further batch then, whatever noise the losses of a batch have in common."""
    losses = draw(100, [3.9, 3.5, 3.0, 3.2], noise=0.01, common=1.0)
    alpha, _, read = search(losses)
    assert (alpha, read) == (0.5, 8)
    alpha, measured, read = search(losses, race=False)
    assert (alpha, read) == (0.5, 100)
    close(measured, losses.mean(axis=0), 1e-3)


@pytest.mark.parametrize("behind, stays", [(0.0398, True), (0.03995, False)])
def test_a_step_size_drops_out_that_is_behind_by_4_standard_errors(behind, stays):
    """By 4 of them less 0.0001: here they are 0.04."""
    swing = 0.01 * 7**0.5  # of 8 differences that swing by it, the standard error is 0.01
    best = np.full(8, 3.0)
    other = best + behind + swing * np.array(4 * [1, -1])
    running = still_running(np.column_stack([best, other]), [0, 1])
    assert (1 in running) == stays


def test_a_step_size_that_drops_out_is_compared_with_the_best_where_both_ran(float64):
    """Its loss is the best one's mean over all batches, plus the mean difference until then."""
    losses = draw(200, [3.9, 3.5, 3.0, 3.01], noise=0.03, common=1.0)
    alpha, measured, read = search(losses)
    assert alpha == 0.5
    assert 8 < read < 200
    ran = losses[:read]
    behind = losses[:8] - losses[:8, [2]]
    best = ran[:, 2].mean()
    until_first_look = best + behind.mean(axis=0)
    close(measured[:3], [until_first_look[0], until_first_look[1], best], 1e-3)
    close(measured[3], ran[:, 3].mean(), 1e-3)


def test_a_race_that_knows_nothing_reads_everything_and_takes_the_best(float64):
    losses = draw(40, [3.0, 3.0, 3.0, 3.0], noise=1.0)
    alpha, measured, read = search(losses)
    assert read == 40
    assert alpha == [0, 1, 0.5, 0.25][losses.mean(axis=0).argmin()]
    close(measured, losses.mean(axis=0), 1e-3)


def test_equals_do_not_race_to_the_end(float64):
    """All the same, and θ_t among them: it stays, and the search ends at the first look."""
    alpha, _, read = search(np.full((40, 4), 3.0))
    assert (alpha, read) == (0, 8)


def test_a_race_in_which_no_loss_is_finite_keeps_theta_t(float64):
    losses = np.full((40, 4), np.inf)
    for flags, expected in (({}, (0, 1)), ({"guard": False}, (1, 1)), ({"race": False}, (0, 40))):
        alpha, _, read = search(losses, **flags)
        assert (alpha, read) == expected


def test_theta_t_comes_back_when_those_that_beat_it_become_infinite(float64):
    """It dropped out after 8 batches, and so did α = 1; at the 10th, the other two break."""
    losses = draw(20, [3.9, 3.5, 3.0, 3.0], noise=0.01)
    losses[9, 2:] = np.inf
    alpha, measured, read = search(losses)
    assert (alpha, read) == (0, 10)
    assert np.isfinite(measured[:2]).all() and np.isinf(measured[2:]).all()


losses_of_a_race = st.integers(1, 30).flatmap(
    lambda n: st.lists(st.lists(st.floats(-10, 10), min_size=n, max_size=n), min_size=1, max_size=5)
)


@given(losses_of_a_race, st.floats(-100, 100), st.sampled_from([np.inf, np.nan]), st.data())
def test_who_stays_in_the_race(columns, shift, bad, data):
    """The best stays, and who may still be ahead of it; after 8 batches all others drop out.

    It may be if its mean difference from the best, less 4 standard errors, is at most -0.0001.
    Who is not finite is out at once. What all losses of a batch have in common changes nothing.
    """
    losses = np.array(columns).T
    n, count = losses.shape
    everyone = list(range(count))
    stay = still_running(losses, everyone)
    best = int(losses.mean(axis=0).argmin())
    for i in everyone:
        may_win = n < 8 or i == best
        if not may_win:
            behind = losses[:, i] - losses[:, best]
            error = behind.std(ddof=1) / n**0.5
            may_win = behind.mean() + 1e-4 <= 4 * error
        assert (i in stay) == may_win

    rounded = np.round(losses, 1)  # exact enough that no comparison tips over
    of_each_batch = np.round(shift) * np.arange(n)[:, None]
    assert still_running(rounded + of_each_batch, everyone) == still_running(rounded, everyone)
    broken = losses.copy()
    out = data.draw(st.integers(0, count - 1))
    broken[data.draw(st.integers(0, n - 1)), out] = bad
    if count > 1:
        assert out not in still_running(broken, everyone)


# ---- recorded line searches ----------------------------------------------------------------------

RECORDS = Path(__file__).parent.parent / "results" / "searches-45m-h200.npz"


def race_over(losses):
    """The column that a race over recorded losses chooses, and how many of them it looks at."""
    measured, best = race(lambda k, running: losses[k, running], *losses.shape, drops=True)
    return best, np.isfinite(measured).sum()


def test_on_recorded_searches_the_race_chooses_what_the_whole_search_does():
    """In at least 98% of random orders; in the others, one whose loss is within 0.001 of it.

    It needs less than an eighth of the evaluations.
    34 searches of a 45m model on an H200: the loss of each of 122 inner batches at 6 step sizes.
    """
    rng = np.random.default_rng(0)
    same, evaluations, whole = [], 0, 0
    with np.load(RECORDS) as records:
        searches = [records[name] for name in records.files if name != "alphas"]
    assert len(searches) == 34
    for losses in searches:
        means = losses.mean(axis=0)
        for _ in range(20):
            shuffled = rng.permutation(losses)
            best, looks = race_over(shuffled)
            evaluations += looks
            assert means[best] - means.min() < 1e-3
            same.append(best == means.argmin())
            whole += losses.size
    assert np.mean(same) >= 0.98
    assert evaluations < whole / 8
