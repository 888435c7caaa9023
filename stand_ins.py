"""Trains with Gauss-Newton, and logs how wrong the stand-ins for the loss are.

    python stand_ins.py --model tiny        any flags of train.py; the method is gn

Gauss-Newton replaces the loss L twice. The network is linearized, which leaves L1 (gn_prox.py).
Then the loss is expanded to second order in the logits, which leaves L2 (gn.py). An inner loop
lowers L2. Where L is far from L2, the step may go too far. At the end of each inner loop, before
the line search, this program measures all three on fresh tokens, on the way from θ_t to θ (or to
the running mean of θ, if --average is given):

    L2, L1 and L at θ_t + α (θ - θ_t),     α = 1 and ½

L1 - L2 is the error of the expansion, and L - L1 that of the linearization. The tokens are the
first that the line search may read. The steps are those of `train.py --method gn`. Each row of
log.jsonl but the first also has quadratic_at_1 (L2, without damping), linearized_at_1 (L1),
true_at_1 (L), and the same at 0.5.
"""

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import gn
import gn_prox
import recipe
import train
from gn import init, lower  # noqa: F401  both are as there
from line_search import between
from runtime import checkpoint, flags, parallel
from runtime.command import blaming_input, command
from runtime.flags import traced

ALPHAS = (1.0, 0.5)
# The folder of the runs. They are not among those of train.py: one of the same flags would be taken
# for one that was measured.
HOME = "runs_of_stand_ins"
MOST_BATCHES = 8  # at most so many inner batches are read to measure


@traced
@dataclass(frozen=True)
class Config(gn.Config):
    """Settings of Gauss-Newton. A line search is required: what is measured needs its tokens."""

    def check(self):
        super().check()
        if not self.line_search:
            why = "the stand-ins are measured on the tokens of the line search"
            raise ValueError(f"{why}; line_search is 0")


@parallel.jit
def losses_at(theta0, point, tokens, config):
    """L2, L1 and L at a point, means in nats per token.

    theta0: θ_t; point: weights between θ_t and θ; tokens: int32 [B, T+1].
    """

    def losses(theta0, point, tokens):
        delta = jax.tree.map(jnp.subtract, point, theta0)
        _, L2, _ = gn.value_and_grad(theta0, delta, tokens, config)
        _, L1, _ = gn.value_and_grad(theta0, delta, tokens, config, gn_prox.exact)
        return L2, L1, config.model.loss(config.network, point, tokens)

    return parallel.mean(losses, config.micro_batch)(theta0, point, tokens)


def measure(theta0, theta, fresh, config):
    """{name: mean over fresh tokens}: "linearized_at_0.5" is L1 half the way to θ.

    theta: θ, or its running mean, as of gn.destination.
    fresh(k), k < fresh_batches: inner batches, int32 [B, T+1].
    """
    batches = [fresh(k) for k in range(min(MOST_BATCHES, config.fresh_batches))]
    measured = {}
    for alpha in ALPHAS:
        point = between(theta0, theta, alpha)
        losses = [losses_at(theta0, point, tokens, config) for tokens in batches]
        means = jnp.mean(jnp.array(losses), axis=0)
        for name, mean in zip(("quadratic", "linearized", "true"), means, strict=True):
            measured[f"{name}_at_{alpha:.4g}"] = mean
    return measured


def update(state, batches, fresh, config, watch=lambda state: None):
    """One outer step of gn.py, with the numbers of `measure` among its metrics."""
    state = gn.inner_loop(state, batches, config, watch)
    measured = measure(state.params, gn.destination(state), fresh, config)
    # The inner loop is done, so gn.update only searches and moves. After the move, θ_t is gone.
    state, metrics = gn.update(state, batches, fresh, config, watch)
    return state, metrics | measured


def check_folder(folder):
    """Raises ValueError if a folder has a run whose rows lack what `measure` would add to them."""
    rows = checkpoint.read_log(folder)[1:]  # the first is of the warm-up
    if rows and not {"true_at_1", "diverged"} & rows[0].keys():
        what = f"{folder} has a run of train.py, which measured nothing"
        raise ValueError(f"{what}; give another --out")


@command
def main(words):
    """Runs the command line of train.py, with this file in the place of gn.py."""
    if {"-h", "--help"} & {*words}:
        print(f"{__doc__}\nThe rest is the help of train.py.\n")
    with blaming_input():
        flags.peek(words, "method", "gn", valid=["gn"])  # raises ValueError for another
        check_folder(flags.peek(words, "out", HOME))
    plain, home = recipe.METHODS["gn"], recipe.HOME
    recipe.METHODS["gn"] = plain._replace(module=sys.modules[__name__], Config=Config)
    recipe.HOME = HOME
    try:
        return train.train_all([*words, "--method", "gn"])
    finally:
        recipe.METHODS["gn"], recipe.HOME = plain, home


if __name__ == "__main__":
    sys.exit(main())
