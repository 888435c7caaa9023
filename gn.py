"""Full Gauss-Newton (Algorithm 1): minimize a quadratic model of the loss with Muon, then search along the step.

At θ_t the network is replaced by its linearization and the loss by its second-order expansion in the logits z:

    L2(θ_t + δ) = ℓ(z) + g·v + ½ v·Hv,     v = J δ,  g = ∇ℓ(z),  H = ∇²ℓ(z)        (Section 4.3, Appendix A)
    ∇L2 = Jᵀ(g + H v) = ∇L(θ_t) + G δ,      G = Jᵀ H J                              (Appendix B)

Its minimizer is θ_t - G⁻¹ ∇L(θ_t), the Gauss-Newton update. Neither G nor J is formed: v is a pushforward (jvp), Jᵀ u a
pullback, and the logits are seen a chunk of tokens at a time. An outer step takes N inner steps on L2, each on its own
inner batch, then θ_{t+1} = θ_t + α (θ - θ_t). The next inner loop starts from θ, not from θ_{t+1} (Section 5.1).

What this file leaves out: gn_prox.py keeps the loss exact, layerwise_gn.py drops the blocks of G between layers.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import baselines
import model
from baselines import cosine

SCHEDULES = ("constant+inner cosine", "global cosine", "global+inner cosine", "constant")


@dataclass(frozen=True)
class Config:
    """Settings of Gauss-Newton. The first three fields are filled in by train.py."""

    model: model.Config
    inner_steps: int  # inner batches in a batch, N
    outer_steps: int  # outer steps of the run
    lr: float = 0.01  # peak learning rate of the inner optimizer, per inner step (Appendix H: 0.001 to 0.1)
    schedule: str = "constant+inner cosine"  # or constant, global cosine, global+inner cosine: Appendix D
    inner: str = "muon"  # muon | cg: inner optimizer; cg solves (G + damping) δ = -g on the whole batch
    cg_steps: int = 100  # conjugate gradient steps at most in an outer step, with inner cg
    momentum: float = 0.95  # decay of Muon's momentum, per inner step (Appendix H)
    weight_decay: float = 0.001  # decay of every matrix, Muon's too, times lr, per inner step (Appendix H: 0, 0.001)
    damping: float = 0.0  # λ of ½ λ |θ - θ_t|² in the inner loss (Appendix H, loss weight decay: 0 to 0.1)
    clip: float = 1.0  # largest gradient norm of an optimizer group; 0 = off
    line_search: int = 5  # step sizes α = 2^(-i/2) tried on a fresh batch (Appendix D); 0 = no line search, α = 1
    guard: bool = True  # refuse a step when no step size beats θ_t on the fresh batch; false = as the paper

    def __post_init__(self):
        baselines.check(self, SCHEDULES)
        if self.inner not in ("muon", "cg"):
            raise ValueError(f"inner is {self.inner!r}; valid: muon, cg")
        if not 0 <= self.damping < float("inf") or self.line_search < 0 or self.cg_steps < 1:
            raise ValueError("damping and line_search must be at least 0, cg_steps at least 1")

    @property
    def fresh_batches(self):
        """Inner batches of fresh tokens that an outer step's line search reads."""
        return self.inner_steps if self.line_search else 0


class State(NamedTuple):
    """Where Gauss-Newton is: before inner step k of outer step t."""

    params: Any  # θ_t, the weights to evaluate
    theta: Any  # θ, the inner iterate
    opt: Any  # state of the inner optimizer
    t: jax.Array  # outer steps done
    k: jax.Array  # inner steps done of the current one
    loss: jax.Array  # sum over its inner batches of the loss at θ_t
    inner_loss: jax.Array  # sum over its inner batches of L2 at the inner iterate


def optimizer(lr, config):
    """The inner optimizer, an optax transformation; lr may be traced."""
    return baselines.muon(lr, config.momentum, config.weight_decay, config.clip)


def init(params, config):
    """State at the first outer step from parameters θ_0."""
    count, total = jnp.zeros((), jnp.int32), jnp.zeros((), params["head"].dtype)
    return State(params, params, optimizer(0.0, config).init(params), count, count, total, total)


def learning_rate(t, k, config):
    """Learning rate of inner step k of outer step t (Appendix D): a pure function, so nothing is unrolled or stored."""
    inner = cosine(k / config.inner_steps)
    whole = cosine((t + k / config.inner_steps) / config.outer_steps)
    return config.lr * {
        "constant": jnp.ones_like(inner),
        "constant+inner cosine": inner,
        "global cosine": whole,
        "global+inner cosine": whole * inner,
    }[config.schedule]


def quadratic(head, w0, dw, h, dh, y, linear=1.0):
    """L2 summed over c tokens, and its pullback to the hidden states and the head.

    h, dh: hidden states and their change J δ, [c, D]; w0, dw: the head and its change, [D, V]; y: labels, int32 [c].
    Returns (ℓ(z), L2), h_bar [c, D], w_bar [D, V]. With linear = 0 only the curvature stays: ½ v·Hv and Jᵀ H v.
    """
    z, v = jax.jvp(head, (h, w0), (dh, dw))  # z = f(θ_t),  v = J δ, [c, V]
    g, Hv = jax.jvp(jax.grad(lambda z: model.cross_entropy(z, y)), (z,), (v,))  # g = ∇ℓ(z),  Hv = ∇²ℓ(z) v
    h_bar, w_bar = jax.vjp(head, h, w0)[1](linear * g + Hv)  # Jᵀ(g + Hv), the head's part
    loss = model.cross_entropy(z, y)
    return (loss, linear * (loss + jnp.vdot(g, v)) + jnp.vdot(v, Hv) / 2), h_bar, w_bar


def value_and_grad(objective, theta0, delta, tokens, config):
    """Loss at θ_t, and value and gradient at θ_t + δ of an objective on the model linearized at θ_t, as means a token.

    tokens: int32 [B, T+1]. Returns (loss, value), gradient. The damping ½ λ |δ|² is in value and gradient.
    """
    x, y = tokens[:, :-1], tokens[:, 1:]
    head = partial(model.head, config.model)
    h, push = jax.linearize(lambda p: model.hidden(config.model, p, x), theta0)  # push: δ -> J δ, below the head

    def chunk(total, part):  # part: h [c, D], dh [c, D], y [c]
        values, h_bar, w_bar = objective(head, theta0["head"], delta["head"], *part)
        return jax.tree.map(jnp.add, total, (values, w_bar)), h_bar

    zero = jnp.zeros((), h.dtype)
    start = ((zero, zero), jnp.zeros_like(theta0["head"]))
    ((loss, value), w_bar), h_bar = model.scan_tokens(config.model, chunk, start, h, push(delta), y)
    (grad,) = jax.linear_transpose(push, theta0)(h_bar.reshape(h.shape))  # pull: dh -> Jᵀ dh
    grad = jax.tree.map(lambda a, d: a / y.size + config.damping * d, {**grad, "head": w_bar}, delta)
    value = value / y.size + config.damping / 2 * sum(jnp.vdot(d, d) for d in jax.tree.leaves(delta))
    return (loss / y.size, value), grad


@partial(jax.jit, static_argnames="config")
def inner_step(state, tokens, config):
    """One step of the inner optimizer on L2, on one inner batch; tokens: int32 [B, T+1]."""
    delta = jax.tree.map(jnp.subtract, state.theta, state.params)
    (loss, value), grad = value_and_grad(quadratic, state.params, delta, tokens, config)
    descend = optimizer(learning_rate(state.t, state.k, config), config)
    step, opt = descend.update(grad, state.opt, state.theta)
    return state._replace(
        theta=jax.tree.map(jnp.add, state.theta, step),
        opt=opt,
        k=state.k + 1,
        loss=state.loss + loss,
        inner_loss=state.inner_loss + value,
    )


@partial(jax.jit, static_argnames="config")
def solve(state, tokens, config):
    """θ = θ_t - (G + λI)⁻¹ ∇L(θ_t) by conjugate gradients from δ = 0; tokens: int32 [N, B, T+1], the whole batch."""

    N, zero = tokens.shape[0], jax.tree.map(jnp.zeros_like, state.params)

    def mean(objective, delta):  # of the objective's values and gradient over the inner batches
        of = lambda part: value_and_grad(objective, state.params, delta, part, config)
        add = lambda total, part: (jax.tree.map(jnp.add, total, of(part)), None)
        start = (2 * (jnp.zeros_like(state.loss),), zero)
        return jax.tree.map(lambda a: a / N, jax.lax.scan(add, start, tokens)[0])

    (loss, _), grad = mean(quadratic, zero)
    product = lambda delta: mean(partial(quadratic, linear=0.0), delta)[1]  # (G + λI) δ
    minus_grad = jax.tree.map(jnp.negative, grad)
    delta, _ = jax.scipy.sparse.linalg.cg(product, minus_grad, tol=1e-10, maxiter=config.cg_steps)
    (_, value), _ = mean(quadratic, delta)
    theta = jax.tree.map(jnp.add, state.params, delta)
    return state._replace(theta=theta, k=state.k + N, loss=N * loss, inner_loss=N * value)


def move(theta0, theta, alpha):
    """θ_t + α (θ - θ_t); exactly θ_t at α = 0, even where θ is not finite."""
    return jax.tree.map(lambda a, b: jnp.where(alpha == 0, a, a + alpha * (b - a)), theta0, theta)


@partial(jax.jit, static_argnames="config")
def losses(theta0, theta, alphas, tokens, config):
    """Loss at θ_t + α (θ - θ_t) for each of alphas [A] on one inner batch: [A]."""
    return jax.lax.map(lambda alpha: model.loss(config.model, move(theta0, theta, alpha), tokens), alphas)


def line_search(theta0, theta, fresh, config):
    """The α of 2^(-i/2), i < line_search, with the smallest loss on fresh tokens; 0 where the guard refuses them all.

    fresh(k): the k-th inner batch of fresh tokens, int32 [B, T+1]. A loss that is not finite counts as infinite.
    """
    alphas = 2.0 ** (-jnp.arange(config.line_search) / 2)
    if config.guard:
        alphas = jnp.concatenate([jnp.zeros(1), alphas])  # θ_t first: argmin takes it unless another is below it
    total = jnp.zeros_like(alphas)
    for k in range(config.inner_steps):
        part = losses(theta0, theta, alphas, fresh(k), config)
        total = jax.block_until_ready(total) + part  # waits for the batch before: never more than one is in flight
    return alphas[jnp.argmin(jnp.where(jnp.isfinite(total), total, jnp.inf))]


@partial(jax.jit, static_argnames="config")
def finish(state, alpha, config):
    """The state at the next outer step: θ_{t+1} = θ_t + α (θ - θ_t); θ and its momentum stay unless α = 0."""
    fresh = init(state.params, config)
    theta, opt = jax.tree.map(partial(jnp.where, alpha == 0), (fresh.theta, fresh.opt), (state.theta, state.opt))
    return fresh._replace(params=move(state.params, state.theta, alpha), theta=theta, opt=opt, t=state.t + 1)


def update(state, batches, fresh, config, watch=lambda state: None):
    """One outer step of Algorithm 1: minimize L2 over a batch, line search on fresh tokens, move.

    batches(k), fresh(k): the k-th inner batch, int32 [B, T+1], k < inner_steps. watch(state): called after each inner
    step. Returns the next State and metrics: train_loss (at θ_t) and inner_loss (L2), means over the batch in nats a
    token; lr of the first inner step; alpha, 0 where the step was refused.
    """
    N = config.inner_steps
    if config.inner == "cg":
        state = solve(state, jnp.stack([batches(k) for k in range(N)]), config)
    else:
        for k in range(int(state.k), N):
            state = inner_step(state, batches(k), config)
            watch(state)
    alpha = line_search(state.params, state.theta, fresh, config) if config.line_search else 1.0
    lr = None if config.inner == "cg" else learning_rate(state.t, 0, config)
    metrics = {"train_loss": state.loss / N, "inner_loss": state.inner_loss / N, "lr": lr}
    metrics["alpha"] = alpha if config.line_search else None
    return finish(state, alpha, config), metrics
