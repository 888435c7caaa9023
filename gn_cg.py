"""Gauss-Newton by conjugate gradients: the minimum of the quadratic model itself, for small models.

    δ = -(G + λI)⁻¹ g,     G = Jᵀ H J and g = ∇L(θ_t), both of the whole batch

gn.py approaches this step with an optimizer that sees the batch in parts. Conjugate gradients solve
for it: they need nothing but products G δ, each of which reads the whole batch. That is exact, and
too expensive for a model of any size; this file is for experiments, and for the tests of gn.py.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gn
import model
from runtime import parallel
from runtime.flags import check_range, traced


@traced
@dataclass(frozen=True)
class Config(gn.BaseConfig):
    """Settings of the solver and of the line search after it."""

    damping: float = 0.1  # λ in (G + λI) δ = -g
    cg_steps: int = 100  # conjugate gradient steps at most, each a product with G on the batch

    def check(self):
        super().check()
        check_range(self, ["damping"], least=0)
        check_range(self, ["cg_steps"], least=1, below=2**31)


class State(NamedTuple):
    """Where the method is: k inner batches of outer step t are solved for, all of them or none."""

    params: Any  # θ_t
    theta: Any  # θ_t + δ
    average: None  # there is no weight average
    t: jax.Array  # outer steps done
    k: jax.Array  # inner batches of the current outer step that δ is solved for
    loss: jax.Array  # the loss at θ_t
    inner_loss: jax.Array  # the quadratic model at θ_t + δ, damping included


def init(params, config):
    """State at the first outer step, from parameters θ_0."""
    theta = jax.tree.map(jnp.copy, params)
    t, k = jnp.zeros(2, jnp.int32)
    loss, inner_loss = jnp.zeros(2, jax.tree.leaves(params)[0].dtype)
    params = jax.tree.map(jnp.copy, params)
    return State(params, theta, None, t, k, loss, inner_loss)


def curvature(z, v, y, loss=model.cross_entropy):
    """gn.quadratic without its constant and its linear part: 0, ½ v·Hv, H v."""
    v = v.astype(z.dtype)
    gradient = jax.grad(partial(loss, y=y))
    _, Hv = jax.jvp(gradient, (z,), (v,))
    zero = jnp.zeros((), z.dtype)
    return zero, jnp.vdot(v, Hv) / 2, Hv


@partial(parallel.jit, static_argnames="value_and_grad")
def solve(state, batch, config, value_and_grad=gn.value_and_grad):
    """The State with θ = θ_t - (G + λI)⁻¹ g; batch: N inner batches, int32 [N, B, T+1]."""
    theta0 = state.params
    zero = jax.tree.map(jnp.zeros_like, theta0)

    def mean(objective, delta):
        """loss, value and gradient of an objective at θ_t + δ, means over the batch."""
        of_inner_batch = parallel.mean(partial(value_and_grad, config=config, objective=objective))

        def add(total, tokens):
            result = of_inner_batch(theta0, delta, tokens)
            return jax.tree.map(jnp.add, total, result), None

        no_loss = jnp.zeros_like(state.loss)
        start = (no_loss, no_loss, zero)
        total, _ = jax.lax.scan(add, start, batch)
        return jax.tree.map(lambda a: a / len(batch), total)

    def damped_product(delta):
        """(G + λI) δ."""
        _, _, G_delta = mean(curvature, delta)
        return jax.tree.map(lambda a, d: a + config.damping * d, G_delta, delta)

    loss, _, g = mean(gn.quadratic, zero)
    minus_g = jax.tree.map(jnp.negative, g)
    delta, _ = jax.scipy.sparse.linalg.cg(
        damped_product, minus_g, tol=1e-10, maxiter=config.cg_steps
    )
    _, inner_loss, _ = mean(gn.quadratic, delta)
    inner_loss += config.damping / 2 * optax.tree.norm(delta, squared=True)
    theta = jax.tree.map(jnp.add, theta0, delta)
    k = state.k + len(batch)
    return state._replace(theta=theta, k=k, loss=loss, inner_loss=inner_loss)


def update(state, batches, fresh, config, watch=lambda state: None):
    """One outer step: solve for δ on the whole batch, search along it, move.

    Arguments and metrics as gn.update's, without lr. The next step starts from θ_{t+1}.
    The state that is given stays.
    """
    if state.k == 0:
        batch = jnp.stack([batches(k) for k in range(config.inner_steps)])
        state = solve(state, batch, config)
        watch(state)

    metrics = {"train_loss": state.loss, "inner_loss": state.inner_loss}
    alpha = 1.0
    if config.line_search:
        alpha = gn.line_search(state.params, state.theta, fresh, config)
        metrics["alpha"] = alpha
    params = gn.between(state.params, state.theta, alpha)
    return init(params, config)._replace(t=state.t + 1), metrics
