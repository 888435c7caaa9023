"""Gauss-Newton by conjugate gradients: the minimum of L2 with damping, for small models.

    δ = -(G + λI)⁻¹ grad,     G = Jᵀ H J and grad = ∇L(θ_t), both of the whole batch

(L2, J and H: see gn.py. λ is the damping.)

gn.py approaches this step with an optimizer that sees the batch in parts. Conjugate gradients solve
for it: they need nothing but products G δ, each of which reads the whole batch. With enough steps
they come as near to the solution as rounding allows. Only a small model can afford that. This file
is for experiments, and for the tests of gn.py.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gn
import model
import optimizers
from line_search import BaseConfig, between, line_search
from runtime import parallel
from runtime.flags import check_range, traced


@traced
@dataclass(frozen=True)
class Config(BaseConfig):
    """Settings of the solver and of the line search after it."""

    damping: float = 0.1  # λ in (G + λI) δ = -grad
    cg_steps: int = 100  # conjugate gradient steps at most, each a product with G on the batch

    depends_on_length = False  # there is no learning rate

    @property
    def loop_steps(self):
        """Inner batches that a solve reads at most: for grad, for each product, for the value."""
        return (1 + self.cg_steps + 1) * self.inner_steps

    def check(self):
        super().check()
        check_range(self, ["damping"], least=0)
        check_range(self, ["cg_steps"], least=1, below=2**31)


class State(NamedTuple):
    """Where the method is: before the solve of outer step t, or after it."""

    params: Any  # θ_t
    theta: Any  # θ_t + δ
    average: None  # there is no weight average
    t: jax.Array  # outer steps done
    searched: jax.Array  # inner batches that all line searches until now have read
    k: jax.Array  # 0 before the solve; after it, how many inner batches it may have read at most
    loss: jax.Array  # the loss at θ_t
    inner_loss: jax.Array  # L2 at θ_t + δ, damping included


def init(params, config):
    """State at the first outer step, from the parameters that training starts with."""
    theta = jax.tree.map(jnp.copy, params)
    t, searched, k = jnp.zeros(3, jnp.int32)
    loss, inner_loss = jnp.zeros(2, jax.tree.leaves(params)[0].dtype)
    return State(
        params=jax.tree.map(jnp.copy, params),
        theta=theta,
        average=None,
        t=t,
        searched=searched,
        k=k,
        loss=loss,
        inner_loss=inner_loss,
    )


def curvature(z, v, y, loss=model.cross_entropy):
    """gn.quadratic without its constant and its linear part: 0, ½ v·Hv, H v."""
    v = v.astype(z.dtype)
    gradient = jax.grad(partial(loss, y=y))
    _, Hv = jax.jvp(gradient, (z,), (v,))
    zero = jnp.zeros((), z.dtype)
    return zero, jnp.vdot(v, Hv) / 2, Hv


def solve(state, batches, config, value_and_grad=gn.value_and_grad):
    """The State with θ = θ_t - (G + λI)⁻¹ grad; batches(k): inner batch k of N, int32 [B, T+1].

    value_and_grad: gn.py's, or another method's, whose G it then is.
    """
    theta0 = state.params

    def mean(objective, delta):
        """loss, value and gradient of an objective at θ_t + δ, means over the batch."""
        total = None
        for k in range(config.inner_steps):
            result = measure(theta0, delta, batches(k), config, objective, value_and_grad)
            # JAX returns before it has computed. This waits for batch k - 1, so that the loop keeps
            # step with the device: `batches` is where a signal can stop a run.
            jax.block_until_ready(total)
            total = result if total is None else add(total, result)
        return optax.tree.scale(1 / config.inner_steps, total)

    def damped_product(delta):
        """(G + λI) δ."""
        _, _, G_delta = mean(curvature, delta)
        return optax.tree.add_scale(G_delta, config.damping, delta)

    zero = optax.tree.zeros_like(theta0)
    loss, _, grad = mean(gn.quadratic, zero)
    minus_grad = optax.tree.scale(-1, grad)
    delta = conjugate_gradients(damped_product, minus_grad, config.cg_steps)
    _, inner_loss, _ = mean(gn.quadratic, delta)
    inner_loss += config.damping / 2 * optax.tree.norm(delta, squared=True)
    theta = optax.tree.add(theta0, delta)
    k = state.k + config.loop_steps
    return state._replace(theta=theta, k=k, loss=loss, inner_loss=inner_loss)


@partial(parallel.jit, static_argnames=("objective", "value_and_grad"))
def measure(theta0, delta, tokens, config, objective, value_and_grad):
    """loss, value and gradient of an objective at θ_t + δ, means over tokens, int32 [B, T+1]."""
    f = partial(value_and_grad, config=config, objective=objective)
    return parallel.mean(f, config.micro_batch)(theta0, delta, tokens)


def lower(state, tokens, config):
    """The program of `measure`, which needs the most memory, before it is compiled."""
    # Only shapes and types matter here, so θ may stand for δ.
    return measure.lower(state.params, state.theta, tokens, config, gn.quadratic, gn.value_and_grad)


@parallel.jit
def add(total, result):
    """The sum of two trees of arrays, as one program: array by array, a solve takes 15% longer."""
    return optax.tree.add(total, result)


def conjugate_gradients(product, b, steps):
    """x with A x = b, nearly, where A is symmetric and x·Ax is never negative.

    product: x -> A x. Each step goes to the minimum of ½ x·Ax - b·x along a direction p. This is
    the downhill direction r = b - A x, changed so that p·A p' = 0 for every earlier direction p':
    so no step undoes what another has done (Hestenes and Stiefel, 1952). It ends after `steps`
    steps, or when |r| is below 1e-10 |b|. jax.scipy.sparse.linalg.cg does the same in one compiled
    program, which may run for minutes, and which Ctrl-C does not stop.
    """
    x = optax.tree.zeros_like(b)
    r = p = b
    enough = 1e-20 * optax.tree.vdot(b, b)
    for _ in range(steps):
        if optax.tree.vdot(r, r) <= enough:
            break
        x, r, p = conjugate_step(x, r, p, product(p))
    return x


@parallel.jit
def conjugate_step(x, r, p, Ap):
    """x, r and p after a step of conjugate gradients."""
    before = optax.tree.vdot(r, r)
    length = before / optax.tree.vdot(p, Ap)
    x = optax.tree.add_scale(x, length, p)
    r = optax.tree.add_scale(r, -length, Ap)
    p = optax.tree.add_scale(r, optax.tree.vdot(r, r) / before, p)
    return x, r, p


def update(state, batches, fresh, config, watch=lambda state: None):
    """One outer step: solve for δ on the whole batch, search along it, move.

    Arguments and metrics as gn.update's, without those of inner steps. The next step starts from
    θ_{t+1}. The State that is given is not deleted.
    """
    if state.k == 0:
        state = solve(state, batches, config)
        watch(state)

    metrics = {"train_loss": state.loss, "inner_loss": state.inner_loss}
    metrics |= optimizers.norms_of_step(state.params, state.theta)
    alpha, searched, read = line_search(state.params, state.theta, fresh, config)
    params = between(state.params, state.theta, alpha)
    after = init(params, config)._replace(t=state.t + 1, searched=state.searched + read)
    return after, metrics | searched
