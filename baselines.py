"""The baselines, AdamW, Muon and SOAP: one optimizer step a batch (Section 5, Appendix H).

    AdamW:  θ - lr m / sqrt(v)                          elementwise moments m, v
    Muon:   θ - lr sqrt(max(1, out/in)) NS(m)           NS: Newton-Schulz, m = U S Vᵀ -> about U Vᵀ
    SOAP:   θ - lr Q_L (m / sqrt(v)) Q_Rᵀ               Adam in the eigenbasis Q of Shampoo's factors GGᵀ and GᵀG

A batch is `inner_steps` inner batches whose gradients are averaged, so its size is not limited by memory. AdamW is
optax's, and so is Muon but for its momentum, which stays in float32. Muon takes the matrices inside the blocks, AdamW
the embedding, the head and the norms. Gauss-Newton uses the same Muon as its inner optimizer.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import model
from runtime import parallel
from soap import scale_by_soap


@dataclass(frozen=True)
class Config:
    """What every baseline has. The first three fields are filled in by train.py."""

    model: model.Config
    inner_steps: int  # inner batches in a batch, N
    outer_steps: int  # optimizer steps of the run
    lr: float = 0.003  # peak learning rate, per update (Appendix H: AdamW 0.001 to 0.03, Muon and SOAP 0.01 to 0.3)
    schedule: str = "cosine"  # cosine | constant, over the run's steps (Appendix H; constant goes with --average)
    warmup: float = 0.0  # fraction of the steps over which the learning rate rises linearly (Appendix H: 0 or 0.1)
    weight_decay: float = 0.0  # decay of every matrix, times lr, per update (Appendix H: 0 to 0.1, AdamW only)
    average: float = 0.0  # decay τ of the weight average, per update, evaluated in place of θ (Appendix H: 0.3 to 0.99)
    clip: float = 1.0  # largest gradient norm of an optimizer group; 0 = off

    fresh_batches = 0  # inner batches that a line search reads: none

    def __post_init__(self):
        check(self, ("cosine", "constant"))


@dataclass(frozen=True)
class AdamW(Config):
    """Settings of the AdamW baseline."""

    weight_decay: float = 0.001  # decay of every matrix, times lr, per update (Appendix H: 0 to 0.1)
    b1: float = 0.9  # decay of the first moment, per update (Appendix H)
    b2: float = 0.95  # decay of the second moment, per update (Appendix H: 0.95, 0.99 or 0.999)

    def optimizer(self, lr):
        return adamw(lr, self.b1, self.b2, self.weight_decay, self.clip)


@dataclass(frozen=True)
class Muon(Config):
    """Settings of the Muon baseline."""

    lr: float = 0.03  # peak learning rate, per update (Appendix H: 0.01 to 0.3)
    momentum: float = 0.95  # decay of the momentum, per update (Appendix H: 0.9, 0.95 or 0.99)

    def optimizer(self, lr):
        return muon(lr, self.momentum, self.weight_decay, self.clip, self.model.dtype)


@dataclass(frozen=True)
class SOAP(Config):
    """Settings of the SOAP baseline."""

    lr: float = 0.03  # peak learning rate, per update (Appendix H: 0.01, 0.03 or 0.1)
    b1: float = 0.9  # decay of the first moment, per update (Appendix H: 0.7 to 0.95)
    b2: float = 0.9  # decay of the second moment and of Shampoo's factors, per update (Appendix H: 0.7 to 0.95)
    frequency: int = 1  # updates from one refresh of the eigenbasis to the next (Appendix H: 1)
    largest: int = 10_000  # a side of a matrix longer than this keeps the identity as its basis

    def optimizer(self, lr):
        return soap(lr, self.b1, self.b2, self.weight_decay, self.clip, self.frequency, self.largest)


def check(config, schedules):
    """Raises ValueError where a setting that every method has is out of its range."""
    if not 0 < config.lr < float("inf"):
        raise ValueError(f"lr is {config.lr}; it must be a positive number")
    if config.schedule not in schedules:
        raise ValueError(f"schedule is {config.schedule!r}; valid: {', '.join(schedules)}")
    for name in ("b1", "b2", "momentum", "warmup", "inner_warmup", "average", "parameter_weight_decay"):
        if not 0 <= getattr(config, name, 0) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 0 and below 1")
    for name in ("weight_decay", "damping", "clip", "line_search", "line_search_tokens"):
        if not 0 <= getattr(config, name, 0) < float("inf"):
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 0")
    for name in ("frequency", "largest", "cg_steps"):
        if not 1 <= getattr(config, name, 1) < 2**31:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 1 and below 2^31")


def groups(params):
    """Which optimizer group each parameter is in: `muon`, the matrices of the blocks, or `adamw`, everything else."""
    blocks = {k: "muon" if k in model.MATRICES else "adamw" for k in params["blocks"]}
    return {**jax.tree.map(lambda _: "adamw", params), "blocks": blocks}


def is_matrix(params):
    """True for every matrix (embedding and head too), False for norms and biases: what weight decay reaches."""
    blocks = {k: k in model.MATRICES for k in params["blocks"]}
    return {**jax.tree.map(lambda _: False, params), "embedding": True, "head": True, "blocks": blocks}


def clipping(limit):
    """Scales a group's gradient down to norm `limit`; 0 = off."""
    return optax.clip_by_global_norm(limit) if limit > 0 else optax.identity()


def adamw(lr, b1, b2, weight_decay, clip):
    """AdamW on everything, as an optax transformation; lr may be traced."""
    return optax.chain(clipping(clip), optax.adamw(lr, b1, b2, weight_decay=weight_decay, mask=is_matrix))


def muon(lr, momentum, weight_decay, clip, dtype="float32"):
    """Muon on the stacked matrices [L, in, out], AdamW on the rest, as an optax transformation; lr may be traced.

    dtype: what Newton-Schulz computes in. Momentum, weight decay and lr are applied around it, in float32.
    """
    stacked = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)  # by default optax sends them to Adam
    step = optax.contrib.muon(-1.0, beta=0.0, nesterov=False, muon_weight_dimension_numbers=lambda _: stacked)
    after = optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(lr)
    matrices = optax.chain(clipping(clip), nesterov(momentum), by_shape(step, dtype), *after)
    return optax.partition({"muon": matrices, "adamw": adamw(lr, 0.9, 0.999, weight_decay, clip)}, groups)


def nesterov(decay):
    """b m / (1 - b^(t+1)) + (1 - b) g / (1 - b^t) at update t = 1, 2, ..; m: the moving average of g, b: its decay."""

    def update(grads, state, params=None):
        m, t = optax.tree.update_moment(grads, state.ema, decay, 1), state.count + 1
        without_bias = partial(optax.tree.bias_correction, decay=decay)
        ahead = optax.tree.update_moment(without_bias(grads, count=t), without_bias(m, count=t + 1), decay, 1)
        return ahead, optax.EmaState(t, m)

    return optax.GradientTransformation(optax.ema(decay).init, update)


def by_shape(transform, dtype):
    """transform in `dtype`, given all [L, in, out] of a tree that have the same in and out as one [n, in, out].

    It must treat each matrix for itself, and keep no state. A few large batches are faster, and devices share them.
    """

    def join(tree):
        same = {}
        for a in jax.tree.leaves(tree):
            same.setdefault(a.shape[1:], []).append(a)
        return {shape: jnp.concatenate(arrays) for shape, arrays in same.items()}

    def update(grads, params):
        rounded = optax.tree.cast(grads, jnp.bfloat16 if dtype == "bfloat16" else None)
        steps = jax.tree.map(parallel.shared(lambda a: transform.update(a, transform.init(a), a)[0]), join(rounded))
        (steps,) = jax.linear_transpose(join, rounded)(steps)  # the transpose of joining is taking apart
        return optax.tree.cast_like(steps, grads)

    return optax.stateless(update)


def soap(lr, b1, b2, weight_decay, clip, frequency, largest):
    """SOAP on every matrix, each layer's for itself, Adam on the rest, as an optax transformation; lr may be traced."""
    decay = optax.add_decayed_weights(weight_decay, mask=is_matrix)
    adam = scale_by_soap(b1, b2, frequency, largest, is_matrix)
    return optax.chain(clipping(clip), adam, decay, optax.scale_by_learning_rate(lr))


def cosine(x, start=0.0):
    """Half a cosine: 1 up to x = start, 0 at x = 1."""
    return (1 + jnp.cos(jnp.pi * jnp.clip((x - start) / (1 - start), 0, 1))) / 2


def rise(step, steps):
    """A linear rise over so many steps, the first of which is step 0: 1 from step steps - 1 on."""
    return jnp.minimum(1, (step + 1) / max(1, steps))


def averaged(average, params, tau):
    """The weight average after one more step, τ average + (1 - τ) params; None where there is none."""
    return None if average is None else optax.incremental_update(params, average, 1 - tau)


def weights(state):
    """The weights to evaluate, of any method's State: the average where there is one."""
    return state.params if state.average is None else state.average


class State(NamedTuple):
    """Where a baseline is: before inner batch k of batch t."""

    params: Any  # the weights θ
    average: Any  # their average, which is evaluated in place of θ; None where config.average is 0
    opt: Any  # state of the optimizer
    t: jax.Array  # optimizer steps done
    k: jax.Array  # inner batches accumulated of the current one
    loss: jax.Array  # sum over them of the loss
    grad: Any  # sum over them of the gradient


def init(params, config):
    """State at the first step from parameters params."""
    count, zero = jnp.zeros((), jnp.int32), jnp.zeros((), params["head"].dtype)
    grad = jax.tree.map(jnp.zeros_like, params)
    copy = partial(jax.tree.map, jnp.copy)  # a step writes its result where its state lay
    average = copy(params) if config.average else None
    return State(copy(params), average, config.optimizer(0.0).init(params), count, count + 0, zero, grad)


@partial(parallel.jit, static_argnames="config", donate_argnames="state")
def accumulate(state, tokens, config):
    """Adds loss and gradient of one inner batch, int32 [B, T+1]."""
    loss, grad = parallel.mean(partial(model.value_and_grad, config.model))(state.params, tokens)
    return state._replace(k=state.k + 1, loss=state.loss + loss, grad=jax.tree.map(jnp.add, state.grad, grad))


def learning_rate(t, config):
    """Learning rate of optimizer step t: a linear rise, then constant or half a cosine over the rest of the run."""
    fall = cosine(t / config.outer_steps, config.warmup) if config.schedule == "cosine" else 1
    return config.lr * rise(t, config.warmup * config.outer_steps) * fall


@partial(parallel.jit, static_argnames="config")
def finish(state, config, lr=1.0):
    """The optimizer step, on the mean gradient of the batch; lr: a factor of config's learning rate."""
    grad = jax.tree.map(lambda g: g / config.inner_steps, state.grad)
    step, opt = config.optimizer(lr * learning_rate(state.t, config)).update(grad, state.opt, state.params)
    params = optax.apply_updates(state.params, step)
    average = averaged(state.average, params, config.average)
    return State(params, average, opt, state.t + 1, *jax.tree.map(jnp.zeros_like, (state.k, state.loss, state.grad)))


def update(state, batches, fresh, config, watch=lambda state: None):
    """One optimizer step on a batch: the mean over its inner batches of loss and gradient.

    batches(k): the k-th inner batch, int32 [B, T+1], k < inner_steps; fresh is not read. watch(state):
    called after each. Returns the next State and metrics: train_loss, before the step (nats a token); lr.
    """
    unit = replace(config, lr=1.0)  # so that one compiled step serves every learning rate
    for k in range(int(state.k), config.inner_steps):
        state = accumulate(state._replace(k=np.int32(k)), batches(k), unit)  # always from here: compiled once
        watch(state)
    metrics = {"train_loss": state.loss / config.inner_steps, "lr": learning_rate(state.t, config)}
    state = finish(state, unit, config.lr)._replace(k=np.int32(0))  # from here: the next update need not wait for it
    return state, metrics
