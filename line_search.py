"""The line search of Algorithm 1: how far to go from θ_t towards θ.

    θ_{t+1} = θ_t + α (θ - θ_t)

θ_t is where an outer step starts, and θ is what a method has found: nearly the minimum of a
stand-in for the loss. The stand-in is right near θ_t only. So a few step sizes α are tried on the
true loss, and the best is taken (Appendix D). The losses are measured on *fresh*
tokens, which the method has not read. On tokens that it has read, the step may do better than on
text in general.

The *guard*: θ_t itself, α = 0, is tried too. It is the best where no step size lowers the loss, and
then the step is refused.

The *race*: in the authors' code, every α reads as many fresh tokens as the batch has. But
most α fall behind at once, and a few tokens show it. All α read the same inner batches, the parts
that a batch is read in. So for an α and the best one so far, we take the differences
d = loss(α) - loss(best), one for each of the n inner batches until now, with their mean and its
standard error, sd(d) / √n. From 8 of them on, an α drops out if

    mean(d) - 4 sd(d) / √n > -TIE,

that is, if even 4 standard errors in its favour would not put it more than TIE = 0.0001 nats ahead
of the best one. The search ends when one α is left. Without TIE, two equally good α would run to
the end. An α with a loss that is not finite drops out at once.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import model
from runtime import parallel
from runtime.flags import check_range

# inner batches before an α may drop out: of fewer differences, the standard error is not reliable
FIRST_LOOK = 8
ERRORS = 4  # how many standard errors the race asks for
TIE = 1e-4  # nats per token that do not matter


@dataclass(frozen=True)
class BaseConfig:
    """Settings of every method with a line search; recipe.py fills in the sizes."""

    network: model.Config  # sizes of the network
    inner_steps: int  # inner batches in a batch, N: the inner steps of one pass over it
    outer_steps: int  # outer steps of the run
    inner_tokens: int = 0  # tokens in an inner batch
    micro_batch: int = 0  # sequences that a device computes on at once, at most; 0 = all
    model: Any = model  # the module of the network's functions: model.py, or one of your own
    line_search: int = 5  # how many α = 2^(-i/2) are tried (Appendix D); 0 = no search, α = 1
    # the α that are tried in place of those, separated by spaces, such as "1 0.5 0.25"
    alphas: str = ""
    # fresh tokens that a search reads at most, to the nearest number of whole inner batches, at
    # least one; 0 = as many as a batch has
    line_search_tokens: int = 0
    # drop an α once it is known to be behind; false = never, as in the authors' code
    race: bool = True
    guard: bool = True  # refuse a step when no step size beats θ_t; false = as in the paper

    def __post_init__(self):
        if self.alphas:  # line_search becomes their number; a copy with alphas="" keeps that
            object.__setattr__(self, "line_search", len(self.alphas.split()))

    @property
    def step_sizes(self):
        """The α that are tried, floats; with the guard 0 is the first, so that θ_t wins a tie."""
        sizes = [2 ** (-i / 2) for i in range(self.line_search)]
        if self.alphas:
            sizes = numbers(self.alphas)
        if self.guard:
            sizes = [0.0, *sizes]
        return sizes

    @property
    def fresh_batches(self):
        """How many inner batches of fresh tokens the line search of an outer step reads at most."""
        if not self.line_search:
            return 0
        if not self.line_search_tokens:
            return self.inner_steps
        if not self.inner_tokens:
            raise ValueError("line_search_tokens needs inner_tokens, those of an inner batch")
        return max(1, round(self.line_search_tokens / self.inner_tokens))

    def check(self):
        """Raises ValueError where a setting is out of its range."""
        check_range(self, ["line_search", "line_search_tokens"], least=0)
        if self.alphas:
            check_alphas(self.alphas)


def numbers(text):
    """The numbers of a text, separated by spaces. Raises ValueError if a word is not a number."""
    return [float(word) for word in text.split()]


def check_alphas(text):
    """Raises ValueError unless a text is a list of different positive numbers."""
    required = "positive numbers separated by spaces, such as 1 0.5 0.25"
    try:
        sizes = numbers(text)
    except ValueError:
        sizes = []
    bad = [size for size in sizes if not 0 < size < math.inf]
    if bad or not sizes:
        raise ValueError(f"alphas is {text!r}; it must be {required}")
    names = {name_of(size) for size in sizes}
    if len(names) < len(sizes):
        raise ValueError(f"alphas is {text!r}; two of them are the same to four digits")


def name_of(alpha):
    """What the log calls the loss at a step size."""
    return f"loss_at_{alpha:.4g}"


def between(theta0, theta, alpha):
    """θ_t + α (θ - θ_t); exactly θ_t at α = 0, even where θ is not finite."""

    def point(a, b):
        return jnp.where(alpha == 0, a, a + alpha * (b - a))

    return jax.tree.map(point, theta0, theta)


@parallel.jit
def loss_at(theta0, theta, alpha, tokens, config):
    """The mean loss at θ_t + α (θ - θ_t), in nats per token; tokens: int32 [B, T+1].

    inf if it is not finite, or if α > 0 and θ is not finite: the loss alone may not show that, as
    the tokens do not read all rows of the embedding.
    """
    mean_loss = parallel.mean(partial(config.model.loss, config.network), config.micro_batch)
    loss = mean_loss(between(theta0, theta, alpha), tokens)
    is_finite = [jnp.isfinite(a).all() for a in jax.tree.leaves(theta)]
    theta_is_finite = jnp.array(is_finite).all()
    is_valid = jnp.isfinite(loss) & (theta_is_finite | (alpha == 0))
    return jnp.where(is_valid, loss, jnp.inf)


def line_search(theta0, theta, fresh, config):
    """The best step size, metrics, and how many inner batches were read; without a search 1, {}, 0.

    The best is that with the smallest mean loss of those that the race has not dropped. With the
    guard it is 0 unless another one beats θ_t. The metrics are the best as alpha, and the mean
    losses in nats per token, such as loss_at_0.5, that at α = 0.5; of those that were dropped they
    are an `estimate`. fresh(k), k < fresh_batches: an inner batch of fresh tokens, int32 [B, T+1].
    """
    if not config.line_search:
        return 1.0, {}, 0
    alphas = config.step_sizes

    def measure(k, running):
        tokens = fresh(k)
        losses = [loss_at(theta0, theta, alphas[i], tokens, config) for i in running]
        return jax.device_get(losses)

    losses, best = race(measure, config.fresh_batches, len(alphas), config.race)
    names = [name_of(alpha) for alpha in alphas]
    by_name = dict(zip(names, estimate(losses, best), strict=True))
    alpha = alphas[best]
    return alpha, {"alpha": alpha} | by_name, len(losses)


def race(measure, n_batches, n_alphas, drops):
    """The losses that were measured, [n, A], nan where none was; and the column of the best α.

    measure(k, running): the losses on inner batch k < n_batches, one for each of the columns
    `running`, those whose α have not dropped out; drops: whether an α may drop out at all.
    """
    losses = np.full((n_batches, n_alphas), np.nan)
    running = list(range(n_alphas))
    for k in range(n_batches):
        losses[k, running] = measure(k, running)
        if drops:
            running = still_running(losses[: k + 1], running)
            if len(running) == 1:
                break
    losses = losses[: k + 1]
    means = losses[:, running].mean(axis=0)
    return losses, running[means.argmin()]  # the first of equals: θ_t stays


def still_running(losses, running):
    """Those of the columns `running` whose α may still be the best.

    losses: [n, A], a row for each inner batch so far, a column for each α. If none of those that
    run is finite, it is the first column of all: θ_t, where there is a guard.
    """
    finite = [i for i in running if np.isfinite(losses[:, i]).all()]
    if not finite:
        return [0]
    n = len(losses)
    if n < FIRST_LOOK:
        return finite
    of_finite = losses[:, finite]
    best = of_finite.mean(axis=0).argmin()
    behind = of_finite - of_finite[:, [best]]  # the differences d, [n, finite]
    error = behind.std(axis=0, ddof=1) / math.sqrt(n)
    stays = behind.mean(axis=0) + TIE <= ERRORS * error
    stays[best] = True
    return [i for i, may_win in zip(finite, stays, strict=True) if may_win]


def estimate(losses, best):
    """The mean loss at each α over all inner batches that were read, [A]; inf where one was.

    losses: [n, A], nan where none was measured; best: the column of the best α. An α that dropped
    out has the best one's mean, plus how far it was behind while both ran. (It may have been ahead:
    the best of a race need not be the best of its first batches.)
    """
    was_measured = ~np.isnan(losses)
    both_were = was_measured & was_measured[:, [best]]
    with np.errstate(invalid="ignore"):  # inf - inf, where no α is any good
        behind = losses - losses[:, [best]]
        mean_behind = behind.sum(axis=0, where=both_were) / both_were.sum(axis=0)
    mean = losses[was_measured[:, best], best].mean() + mean_behind
    return np.where(np.isinf(losses).any(axis=0), np.inf, mean)
