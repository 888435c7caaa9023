"""The baselines AdamW, Muon and SOAP: one step of an optimizer per batch (Section 5, Appendix H).

    θ_{t+1} = θ_t + step(g),     g: the mean of ∇L(θ_t) over the N inner batches of a batch

Gauss-Newton takes an inner step for each inner batch. Here their gradients are averaged for one
step, so memory limits the size of an inner batch, and not that of a batch. The rules, which make
the step, are in optimizers.py and soap.py.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import model
import optimizers
import soap
from kernels import on_gpu
from kernels.cross_entropy import loss_and_gradient_kernel
from model import product, rounded
from optimizers import cosine, progress, rise
from runtime import parallel
from runtime.flags import check_choice, check_range, traced

SCHEDULES = {  # how the learning rate falls, by how far the run is, from 0 to 1
    "cosine": cosine,
    "constant": lambda run: 1.0,
}


@traced
@dataclass(frozen=True)
class Config:
    """What every baseline has. The first four fields are filled in by recipe.py."""

    network: model.Config
    inner_steps: int  # inner batches in a batch, N; named as in gn.py
    outer_steps: int  # optimizer steps of the run
    micro_batch: int = 0  # sequences that a device computes on at once, at most; 0 = all
    lr: float = 0.003  # peak learning rate, per update (Appendix H: 0.001 to 0.03 for AdamW)
    schedule: str = "cosine"  # cosine | constant, over the run (App. H: constant with --average)
    # fraction of the run in which lr rises linearly (Appendix H: 0, for AdamW also 0.1)
    warmup: float = 0.0
    warmup_steps: int = 0  # the same as a number of updates, in place of --warmup; 0 = use --warmup
    # decay of every matrix, times lr, per update (Appendix H: 0, for AdamW up to 0.1)
    weight_decay: float = 0.0
    # decay τ of the weight average, per update, evaluated in place of θ (Appendix H: 0.3 to 0.99);
    # 0 = no average
    average: float = 0.0
    # largest gradient norm; 0 = no limit. With Muon there are two norms, each with this limit: that
    # of embedding and head, and that of all the rest
    clip: float = 1.0

    fresh_batches = 0  # inner batches that a line search reads: there is none

    @property
    def depends_on_length(self):
        """Whether the learning rate depends on how many steps the run has."""
        warms_up_by_length = self.warmup > 0 and not self.warmup_steps
        return self.schedule == "cosine" or warms_up_by_length

    def check(self):
        """Raises ValueError where a setting is out of its range."""
        check_choice(self, "schedule", SCHEDULES)
        check_range(self, ["lr"], above=0)
        check_range(self, ["weight_decay", "clip"], least=0)
        check_range(self, ["warmup", "average"], least=0, below=1)
        check_range(self, ["warmup_steps"], least=0, below=2**31)


@traced
@dataclass(frozen=True)
class AdamW(Config):
    """Settings of the AdamW baseline."""

    weight_decay: float = 0.001  # decay of every matrix, times lr, per update (App. H: 0 to 0.1)
    b1: float = 0.9  # decay of the running mean of g, per update (Appendix H)
    b2: float = 0.95  # decay of that of g², per update (Appendix H: 0.95, 0.99 or 0.999)

    def optimizer(self, lr):
        return optimizers.adamw(lr, self.b1, self.b2, self.weight_decay, self.clip)

    def check(self):
        super().check()
        check_range(self, ["b1", "b2"], least=0, below=1)


@traced
@dataclass(frozen=True)
class Muon(Config):
    """Settings of the Muon baseline."""

    lr: float = 0.03  # peak learning rate, per update (Appendix H: 0.01 to 0.3)
    momentum: float = 0.95  # decay of the momentum, per update (Appendix H: 0.9, 0.95 or 0.99)

    def optimizer(self, lr):
        dtype = self.network.dtype
        return optimizers.muon(lr, self.momentum, self.weight_decay, self.clip, dtype, b2=0.95)

    def check(self):
        super().check()
        check_range(self, ["momentum"], least=0, below=1)


@traced
@dataclass(frozen=True)
class SOAP(Config):
    """Settings of the SOAP baseline."""

    lr: float = 0.03  # peak learning rate, per update (Appendix H: 0.01, 0.03 or 0.1)
    b1: float = 0.9  # decay of the running mean of g, per update (Appendix H: 0.7 to 0.95)
    # decay of the running mean of g² in the eigenbasis, and of Shampoo's factors, per update
    # (Appendix H: 0.7 to 0.95)
    b2: float = 0.9
    frequency: int = 1  # updates from one refresh of the eigenvectors to the next (Appendix H: 1)
    largest: int = 10_000  # a side of a matrix that is longer than this is not rotated

    def optimizer(self, lr):
        return soap.soap(
            lr, self.b1, self.b2, self.weight_decay, self.clip, self.frequency, self.largest
        )

    def check(self):
        super().check()
        check_range(self, ["b1", "b2"], least=0, below=1)
        check_range(self, ["frequency", "largest"], least=1, below=2**31)


class State(NamedTuple):
    """Where a baseline is: before inner batch k of batch t."""

    params: Any  # the weights θ
    average: Any  # their average, evaluated in place of θ; None where config.average is 0
    opt: Any  # state of the optimizer
    t: jax.Array  # optimizer steps done
    k: jax.Array  # inner batches added up of the current batch
    loss: jax.Array  # sum of the loss over these inner batches
    grad: Any  # sum of the gradient over them


def init(params, config):
    """State at the first step, from copies of the parameters, as `accumulate` overwrites them."""
    average = jax.tree.map(jnp.copy, params) if config.average else None
    opt = config.optimizer(0.0).init(params)
    t, k = jnp.zeros(2, jnp.int32)
    return State(
        params=jax.tree.map(jnp.copy, params),
        average=average,
        opt=opt,
        t=t,
        k=k,
        loss=jnp.zeros((), params["head"].dtype),
        grad=jax.tree.map(jnp.zeros_like, params),
    )


@on_gpu(loss_and_gradient_kernel)
def loss_and_gradient(network, z, y):
    """The cross-entropy, summed over c tokens, and its gradient in the logits z [c, V].

    The gradient is rounded for the products to come.
    """
    loss, g = jax.value_and_grad(model.cross_entropy)(z, y)
    return loss, rounded(network, g)


def value_and_grad(params, tokens, network):
    """The mean loss of int32 ids [B, T+1], and its gradient, by backpropagation.

    As in gn.py, the head and the loss see a few tokens at a time; there is no change to push up.
    """
    x, y = model.inputs_and_labels(tokens)
    h, pull = jax.vjp(lambda params: model.hidden(network, params, x), params)
    w = rounded(network, params["head"])  # once, not for each chunk of tokens

    def across(h, y):
        loss, g = loss_and_gradient(network, model.head(network, h, w), y)
        h_bar = product(network, g, w.T, h.dtype)
        w_bar = product(network, h.T, g, h.dtype)
        return h_bar, (loss, {"head": w_bar})

    h_bar, (loss, head_grad) = model.over_tokens(network, across, h, y)
    (grad,) = pull(h_bar)
    grad = grad | head_grad  # replaces the head's zeros, as `hidden` does not read the head
    return jax.tree.map(lambda total: total / y.size, (loss, grad))


@partial(parallel.jit, donate_argnames="state")
def accumulate(state, tokens, config):
    """The State with the loss and gradient of one more inner batch, int32 [B, T+1], added."""
    f = partial(value_and_grad, network=config.network)
    mean = parallel.mean(f, config.micro_batch)  # over the devices
    loss, grad = mean(state.params, tokens)
    grad = jax.tree.map(jnp.add, state.grad, grad)
    return state._replace(k=state.k + 1, loss=state.loss + loss, grad=grad)


def lower(state, tokens, config):
    """The program of `accumulate` before it is compiled; train.py asks what memory a run needs."""
    return accumulate.lower(state, tokens, config)


def learning_rate(t, config):
    """Learning rate of optimizer step t: a linear rise, then as the schedule says."""
    warmup_steps = config.warmup * config.outer_steps
    if config.warmup_steps:
        warmup_steps = float(config.warmup_steps)
    # The fall starts after the warm-up. If that fills the run, 0.999 avoids a division by zero.
    start = jnp.minimum(warmup_steps / config.outer_steps, 0.999)
    run = progress(t / config.outer_steps, start)
    fall = SCHEDULES[config.schedule](run)
    return config.lr * rise(t, warmup_steps) * fall


@parallel.jit
def finish(state, config):
    """The State after the optimizer's step on the mean gradient of the batch."""
    grad = jax.tree.map(lambda total: total / config.inner_steps, state.grad)
    optimizer = config.optimizer(learning_rate(state.t, config))
    step, opt = optimizer.update(grad, state.opt, state.params)
    params = optax.apply_updates(state.params, step)
    average = optimizers.update_average(state.average, params, config.average)
    return State(
        params=params,
        average=average,
        opt=opt,
        t=state.t + 1,
        k=jnp.zeros_like(state.k),
        loss=jnp.zeros_like(state.loss),
        grad=jax.tree.map(jnp.zeros_like, state.grad),
    )


def update(state, batches, fresh, config, watch=lambda state: None):
    """One optimizer step on a batch: on the mean over its inner batches of the gradient.

    batches(k): the k-th inner batch, int32 [B, T+1], k < inner_steps; fresh is not read;
    watch(state) is called after each inner batch. Returns the next State, and metrics: train_loss,
    before the step, in nats per token, and lr. Like gn.update it deletes the state it is given.
    """
    for k in range(int(state.k), config.inner_steps):
        # k is a NumPy number in every call: if it were an array of JAX in some, `accumulate` would
        # be compiled twice.
        state = state._replace(k=np.int32(k))
        state = accumulate(state, batches(k), config)
        watch(state)
    loss = state.loss / config.inner_steps
    metrics = {"train_loss": loss, "lr": learning_rate(state.t, config)}
    # The next update asks for int(state.k). A NumPy number need not wait for the device.
    return finish(state, config)._replace(k=np.int32(0)), metrics
