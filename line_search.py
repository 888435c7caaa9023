"""The line search of Algorithm 1: how far to go from θ_t towards θ.

    θ_{t+1} = θ_t + α (θ - θ_t)

θ_t is where an outer step starts, and θ - θ_t the step that a method has found for it. That step is
the best one for a model of the loss, which is only right near θ_t. So a few step sizes α are tried
on the true loss, and the best is taken (Appendix D). The losses are measured on *fresh* tokens:
those that the method has not read, as the step may fit the others better than text in general.

The *guard*: θ_t itself, α = 0, is tried too. It is the best where no step size lowers the loss, and
then the step is refused.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import model
from runtime import parallel
from runtime.flags import check_range, traced


@traced  # jax.jit takes the floats as inputs; all other fields are constants of the program
@dataclass(frozen=True)
class BaseConfig:
    """Of every method with a line search: sizes, filled in by train.py; the search's settings."""

    network: model.Config  # sizes of the network
    inner_steps: int  # inner batches in a batch, N
    outer_steps: int  # outer steps of the run
    inner_tokens: int = 0  # tokens in an inner batch
    model: Any = model  # the module of the network's functions: model.py, or one of your own
    line_search: int = 5  # how many α = 2^(-i/2) are tried (Appendix D); 0 = no search, α = 1
    # the α that are tried in place of those, between blanks, such as "1 0.5 0.25"
    alphas: str = ""
    line_search_tokens: int = 0  # about how many fresh tokens; 0 = as many as a batch (Algorithm 1)
    guard: bool = True  # refuse a step when no step size beats θ_t; false = as in the paper

    def __post_init__(self):
        if self.alphas:
            object.__setattr__(self, "line_search", len(self.alphas.split()))

    @property
    def step_sizes(self):
        """The α that are tried, as a list of floats."""
        sizes = [2 ** (-i / 2) for i in range(self.line_search)]
        if self.alphas:
            sizes = numbers(self.alphas)
        if self.guard:
            sizes = [0.0, *sizes]
        return sizes

    @property
    def fresh_batches(self):
        """How many inner batches of fresh tokens the line search of an outer step reads."""
        if self.line_search and self.line_search_tokens:
            if not self.inner_tokens:
                raise ValueError("line_search_tokens needs inner_tokens, those of an inner batch")
            return max(1, round(self.line_search_tokens / self.inner_tokens))
        return self.inner_steps if self.line_search else 0

    def check(self):
        """Raises ValueError where a setting is out of its range."""
        check_range(self, ["line_search", "line_search_tokens"], least=0)
        if self.alphas:
            check_alphas(self.alphas)


def numbers(text):
    """The numbers of a text, between blanks. Raises ValueError if a word is none."""
    return [float(word) for word in text.split()]


def check_alphas(text):
    """Raises ValueError if a text is no list of different positive numbers between blanks."""
    required = "positive numbers between blanks, such as 1 0.5 0.25"
    sizes = []
    with suppress(ValueError):
        sizes = numbers(text)
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
    point = jax.tree.map(lambda a, b: a + alpha * (b - a), theta0, theta)
    return jax.tree.map(lambda a, p: jnp.where(alpha == 0, a, p), theta0, point)


@parallel.jit
def losses(theta0, theta, alphas, tokens, config):
    """The loss at θ_t + α (θ - θ_t), for each α of alphas [A]; inf if α > 0 and θ is not finite."""
    # The loss alone may not show a bad θ: these tokens do not read all rows of the embedding.
    is_finite = [jnp.isfinite(a).all() for a in jax.tree.leaves(theta)]
    all_finite = jnp.array(is_finite).all()
    mean_loss = parallel.mean(partial(config.model.loss, config.network))

    def loss_at(alpha):
        loss = mean_loss(between(theta0, theta, alpha), tokens)
        return jnp.where(all_finite | (alpha == 0), loss, jnp.inf)

    return jax.lax.map(loss_at, alphas)


def line_search(theta0, theta, fresh, config):
    """The step size with the smallest loss, and the loss at every step size that was tried.

    fresh(k), k < fresh_batches: an inner batch of fresh tokens, int32 [B, T+1]. The losses are
    {name: mean in nats per token}, where loss_at_0.5 is that at α = 0.5. A loss that is not finite
    is never the smallest. With the guard, α is 0 unless another step size beats θ_t.
    """
    alphas = jnp.array(config.step_sizes)
    total = jnp.zeros_like(alphas)
    for k in range(config.fresh_batches):
        batch_losses = losses(theta0, theta, alphas, fresh(k), config)
        jax.block_until_ready(total)  # waits for batch k - 1; else Python would queue all of them
        total = total + batch_losses

    means = total / config.fresh_batches
    comparable = jnp.where(jnp.isfinite(means), means, jnp.inf)
    alpha = alphas[jnp.argmin(comparable)]  # the first of equals: θ_t stays
    names = [name_of(size) for size in config.step_sizes]
    return alpha, dict(zip(names, means, strict=True))
