"""The baselines, AdamW and Muon: one optimizer step a batch (Section 5, Appendix H).

    AdamW:  θ - lr m / sqrt(v)                          elementwise moments m, v
    Muon:   θ - lr sqrt(max(1, out/in)) NS(m)           NS: Newton-Schulz, m = U S Vᵀ -> about U Vᵀ

A batch is `inner_steps` inner batches whose gradients are averaged, so its size is not limited by memory. The
optimizers are optax's. Muon takes the matrices inside the blocks, AdamW the embedding, the head and the norms.
Gauss-Newton uses the same Muon as its inner optimizer.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import model


@dataclass(frozen=True)
class AdamW:
    """Settings of the AdamW baseline. The first three fields are filled in by train.py."""

    model: model.Config
    inner_steps: int  # inner batches in a batch, N
    outer_steps: int  # optimizer steps of the run
    lr: float = 0.003  # peak learning rate, per update (Appendix H: 0.001 to 0.03)
    schedule: str = "cosine"  # cosine | constant, over the run's steps
    warmup: float = 0.0  # linear rise of the learning rate over this fraction of the steps (Appendix H: 0 or 0.1)
    b1: float = 0.9  # decay of the first moment, per update
    b2: float = 0.95  # decay of the second moment, per update
    weight_decay: float = 0.001  # decay of every matrix, times lr, per update
    clip: float = 1.0  # largest gradient norm of an optimizer group; 0 = off

    fresh_batches = 0  # inner batches that a line search reads: none

    def __post_init__(self):
        check(self, ("cosine", "constant"))

    def optimizer(self, lr):
        return adamw(lr, self.b1, self.b2, self.weight_decay, self.clip)


@dataclass(frozen=True)
class Muon:
    """Settings of the Muon baseline. The first three fields are filled in by train.py."""

    model: model.Config
    inner_steps: int  # inner batches in a batch, N
    outer_steps: int  # optimizer steps of the run
    lr: float = 0.03  # peak learning rate, per update (Appendix H: 0.01 to 0.3)
    schedule: str = "cosine"  # cosine | constant, over the run's steps
    warmup: float = 0.0  # linear rise of the learning rate over this fraction of the steps (Appendix H: 0 or 0.1)
    momentum: float = 0.95  # decay of the momentum, per update
    weight_decay: float = 0.0  # decay of every matrix, times lr, per update
    clip: float = 1.0  # largest gradient norm of an optimizer group; 0 = off

    fresh_batches = 0  # inner batches that a line search reads: none

    def __post_init__(self):
        check(self, ("cosine", "constant"))

    def optimizer(self, lr):
        return muon(lr, self.momentum, self.weight_decay, self.clip)


def check(config, schedules):
    """Raises ValueError where a setting that every method has is out of its range."""
    if not 0 < config.lr < float("inf"):
        raise ValueError(f"lr is {config.lr}; it must be a positive number")
    if config.schedule not in schedules:
        raise ValueError(f"schedule is {config.schedule!r}; valid: {', '.join(schedules)}")
    for name in ("b1", "b2", "momentum"):
        if not 0 <= getattr(config, name, 0) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 0 and below 1")
    if not 0 <= getattr(config, "warmup", 0) <= 1:
        raise ValueError(f"warmup is {config.warmup}; it must be between 0 and 1")
    for name in ("weight_decay", "clip"):
        if not 0 <= getattr(config, name) < float("inf"):
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 0")


def groups(params):
    """Which optimizer group each parameter is in: `muon`, the matrices of the blocks, or `adamw`, everything else."""
    labels = jax.tree.map(lambda _: "adamw", params)
    labels["blocks"] = {k: "muon" if k in model.MATRICES else "adamw" for k in params["blocks"]}
    return labels


def is_matrix(params):
    """True for every matrix (embedding and head too), False for norms and biases: what weight decay reaches."""
    norms = jax.tree.map(lambda _: False, params)
    blocks = {k: k in model.MATRICES for k in params["blocks"]}
    return {**norms, "embedding": True, "head": True, "blocks": blocks}


def clipping(limit):
    """Scales a group's gradient down to norm `limit`; 0 = off."""
    return optax.clip_by_global_norm(limit) if limit > 0 else optax.identity()


def adamw(lr, b1, b2, weight_decay, clip):
    """AdamW on everything, as an optax transformation; lr may be traced."""
    return optax.chain(clipping(clip), optax.adamw(lr, b1, b2, weight_decay=weight_decay, mask=is_matrix))


def muon(lr, momentum, weight_decay, clip):
    """Muon on the stacked matrices [L, in, out], AdamW on the rest, as an optax transformation; lr may be traced."""
    stacked = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)  # by default optax sends them to Adam
    dimensions = lambda params: jax.tree.map(lambda _: stacked, params)
    matrices = optax.contrib.muon(
        lr, beta=momentum, weight_decay=weight_decay, muon_weight_dimension_numbers=dimensions
    )
    matrices = optax.chain(clipping(clip), matrices)
    return optax.partition({"muon": matrices, "adamw": adamw(lr, 0.9, 0.999, weight_decay, clip)}, groups)


def cosine(x):
    """Half a cosine: 1 at x = 0, 0 at x = 1."""
    return (1 + jnp.cos(jnp.pi * x)) / 2


class State(NamedTuple):
    """Where a baseline is: before inner batch k of batch t."""

    params: Any  # the weights to evaluate
    opt: Any  # state of the optimizer
    t: jax.Array  # optimizer steps done
    k: jax.Array  # inner batches accumulated of the current one
    loss: jax.Array  # sum over them of the loss
    grad: Any  # sum over them of the gradient


def init(params, config):
    """State at the first step from parameters params."""
    count, zero = jnp.zeros((), jnp.int32), jnp.zeros((), params["head"].dtype)
    grad = jax.tree.map(jnp.zeros_like, params)
    return State(params, config.optimizer(0.0).init(params), count, count, zero, grad)


@partial(jax.jit, static_argnames="config")
def accumulate(state, tokens, config):
    """Adds loss and gradient of one inner batch, int32 [B, T+1]."""
    loss, grad = model.value_and_grad(config.model, state.params, tokens)
    return state._replace(k=state.k + 1, loss=state.loss + loss, grad=jax.tree.map(jnp.add, state.grad, grad))


def learning_rate(t, config):
    """Learning rate of optimizer step t: a linear rise, then constant or half a cosine over the whole run."""
    rise = jnp.minimum(1, (t + 1) / max(1, config.warmup * config.outer_steps))
    return config.lr * rise * (cosine(t / config.outer_steps) if config.schedule == "cosine" else 1)


@partial(jax.jit, static_argnames="config")
def finish(state, config):
    """The optimizer step, on the mean gradient of the batch."""
    grad = jax.tree.map(lambda g: g / config.inner_steps, state.grad)
    step, opt = config.optimizer(learning_rate(state.t, config)).update(grad, state.opt, state.params)
    return init(optax.apply_updates(state.params, step), config)._replace(opt=opt, t=state.t + 1)


def update(state, batches, fresh, config, watch=lambda state: None):
    """One optimizer step on a batch: the mean over its inner batches of loss and gradient.

    batches(k): the k-th inner batch, int32 [B, T+1], k < inner_steps; fresh is not read. watch(state):
    called after each. Returns the next State and metrics: train_loss, before the step (nats a token); lr.
    """
    for k in range(int(state.k), config.inner_steps):
        state = accumulate(state, batches(k), config)
        watch(state)
    return finish(state, config), {"train_loss": state.loss / config.inner_steps, "lr": learning_rate(state.t, config)}
