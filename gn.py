"""Full Gauss-Newton (Algorithm 1): minimize a quadratic model of the loss with Muon, then search along the step.

At θ_t the network is replaced by its linearization and the loss by its second-order expansion in the logits z:

    L2(θ_t + δ) = ℓ(z) + g·v + ½ v·Hv,     v = J δ,  g = ∇ℓ(z),  H = ∇²ℓ(z)        (Section 4.3, Appendix A)
    ∇L2 = Jᵀ(g + H v) = ∇L(θ_t) + G δ,      G = Jᵀ H J                              (Appendix B)

Its minimizer is θ_t - G⁻¹ ∇L(θ_t), the Gauss-Newton update. Neither G nor J is formed: v is a pushforward (jvp), Jᵀ u a
pullback, and the logits are seen a chunk of tokens at a time. An outer step takes N inner steps on L2, each on its own
inner batch, then θ_{t+1} = θ_t + α (θ - θ_t). The next inner loop starts from θ, not from θ_{t+1} (Section 5.1).

gn_prox.py and layerwise_gn.py are this file with one thing changed: the first passes another `objective` to `update`,
which keeps the loss exact, the second another `linearized`, which drops the blocks of G between layers.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import baselines
import model
from baselines import averaged, cosine, rise
from kernels.cross_entropy import cross_entropy, fused, usable
from runtime import parallel

SCHEDULES = ("constant+inner cosine", "global cosine", "global+inner cosine", "constant")


@dataclass(frozen=True)
class Config:
    """Settings of Gauss-Newton. The first four fields are filled in by train.py."""

    model: model.Config
    inner_steps: int  # inner batches in a batch, N
    outer_steps: int  # outer steps of the run
    inner_tokens: int = 0  # tokens in an inner batch
    lr: float = 0.01  # peak learning rate of the inner optimizer, per inner step (Appendix H: 0.001 to 0.1)
    schedule: str = SCHEDULES[0]  # constant+inner cosine | global cosine | global+inner cosine | constant (Appendix D)
    warmup: float = 0.0  # fraction of the run over which the learning rate rises linearly (Appendix H: 0 or 0.2)
    inner_warmup: float = 0.0  # the same of each outer step's inner steps (Appendix H: 0.2 with constant+inner cosine)
    inner: str = "muon"  # muon | adamw | cg: inner optimizer (Section 5.1); cg solves (G + damping) δ = -g on the batch
    cg_steps: int = 100  # conjugate gradient steps at most in an outer step, with inner cg
    momentum: float = 0.95  # decay of Muon's momentum or AdamW's first moment, per inner step (Appendix H)
    weight_decay: float = 0.001  # decay of every matrix, times lr, per inner step (Appendix H: 0 or 0.001)
    damping: float = 0.0  # λ of ½ λ |θ - θ_t|² in the inner loss (Appendix H, loss weight decay: 0 to 0.1)
    parameter_weight_decay: float = 0.0  # decay of every matrix of θ_t, per outer step (Appendix H: 0 to 0.1)
    average: float = None  # weight average's decay τ, per inner step (Appendix H); default 0.999, but 0 if line_search
    clip: float = 1.0  # largest gradient norm of an optimizer group, per inner step; 0 = off
    line_search: int = 5  # step sizes α = 2^(-i/2) tried on a fresh batch (Appendix D); 0 = no line search, α = 1
    line_search_tokens: int = 0  # fresh tokens that a line search reads, about; 0 = as many as the batch (Algorithm 1)
    guard: bool = True  # refuse a step when no step size beats θ_t on the fresh batch; false = as the paper

    def __post_init__(self):
        if self.average is None:
            object.__setattr__(self, "average", 0.999 if self.averages_inner_steps else 0.0)
        baselines.check(self, SCHEDULES)
        if self.inner not in ("muon", "adamw", "cg"):
            raise ValueError(f"inner is {self.inner!r}; valid: muon, adamw, cg")

    @property
    def averages_inner_steps(self):
        """Whether the average is over θ; with a line search or cg it is over θ_t, which counts as its N inner steps."""
        return not self.line_search and self.inner != "cg"

    @property
    def fresh_batches(self):
        """Inner batches of fresh tokens that an outer step's line search reads."""
        some = max(1, round(self.line_search_tokens / max(1, self.inner_tokens)))
        return (some if self.line_search_tokens else self.inner_steps) if self.line_search else 0


class State(NamedTuple):
    """Where Gauss-Newton is: before inner step k of outer step t."""

    params: Any  # θ_t
    theta: Any  # θ, the inner iterate
    average: Any  # the weight average, which is evaluated in place of θ_t; None where config.average is 0
    opt: Any  # state of the inner optimizer
    t: jax.Array  # outer steps done
    k: jax.Array  # inner steps done of the current one
    loss: jax.Array  # sum over its inner batches of the loss at θ_t
    inner_loss: jax.Array  # sum over its inner batches of L2 at the inner iterate


def optimizer(lr, config):
    """The inner optimizer, an optax transformation; lr may be traced."""
    if config.inner == "adamw":
        return baselines.adamw(lr, config.momentum, 0.999, config.weight_decay, config.clip)
    return baselines.muon(lr, config.momentum, config.weight_decay, config.clip, config.model.dtype)


def init(params, config):
    """State at the first outer step from parameters θ_0."""
    copy, n, zero = partial(jax.tree.map, jnp.copy), jnp.zeros((), jnp.int32), jnp.zeros((), params["head"].dtype)
    average = copy(params) if config.average else None  # copies: a step writes its result where its state lay
    return State(copy(params), copy(params), average, optimizer(0.0, config).init(params), n, n + 0, zero, zero + 0)


def learning_rate(t, k, config):
    """Learning rate of inner step k of outer step t (Appendix D): a pure function, so nothing is unrolled or stored."""
    T, N = config.outer_steps, config.inner_steps
    inner = cosine(k / N, config.inner_warmup)
    whole = cosine((t + k / N) / T, config.warmup)
    falls = (inner, whole, whole * inner, 1)  # in the order of SCHEDULES
    rises = rise(t * N + k, config.warmup * T * N) * rise(k, config.inner_warmup * N)
    return config.lr * rises * falls[SCHEDULES.index(config.schedule)]


def quadratic(z, v, y, ell=cross_entropy):
    """ℓ(z), and for each change v of the logits L2, [S], and its gradient g + H v, [S, c, V].

    z: logits f(θ_t), [c, V]; v: J δ, [S, c, V]; y: labels, int32 [c]; ell: ℓ(z, y), a sum over c, convex in z.
    """
    if ell is cross_entropy and usable(z):
        return fused("quadratic", z, y, v)
    loss, (g, H) = ell(z, y), jax.linearize(jax.grad(lambda z: ell(z, y)), z)  # g = ∇ℓ(z),  H: v -> ∇²ℓ(z) v
    at = lambda v, Hv: (loss + jnp.vdot(g, v) + jnp.vdot(v, Hv) / 2, g + Hv)
    return loss, *jax.lax.map(lambda v: at(v, H(v)), v.astype(z.dtype))


def curvature(z, v, y, ell=cross_entropy):
    """`quadratic` without its constant and its linear part: 0, ½ v·Hv, H v."""
    _, H = jax.linearize(jax.grad(lambda z: ell(z, y)), z)
    return jnp.zeros((), z.dtype), *jax.lax.map(lambda v: (jnp.vdot(v, H(v)) / 2, H(v)), v.astype(z.dtype))


def linearized(objective, theta0, delta, tokens, config):
    """(loss at θ_t, value), gradient of the objective at θ_t + δ, the model linearized: sums over tokens, [B, T+1]."""
    x, y, network, product = tokens[:, :-1], tokens[:, 1:], config.model, partial(model.product, config.model)
    h, push = jax.linearize(lambda p: model.hidden(network, p, x), theta0)  # push: δ -> J δ, below the head
    w, both = model.rounded(network, theta0["head"], jnp.concatenate([theta0["head"], delta["head"]]))  # w: [D, V]

    def chunk(total, part):
        h, dh, y = part  # [c, D], [c, D], [c]
        z, v = model.head(network, h, w), product(jnp.concatenate([dh, h], 1), both)  # v = J δ = dh w + h dw
        loss, (value,), (u,) = objective(z, v[None], y)
        total = jax.tree.map(jnp.add, total, ((loss, value), product(h.T, u, h.dtype)))
        return total, product(u, w.T, h.dtype)  # Jᵀ u, the head's part

    start = (2 * (jnp.zeros((), h.dtype),), jnp.zeros_like(theta0["head"]))
    (values, w_bar), h_bar = model.scan_tokens(network, chunk, start, h, push(delta), y)
    return values, {**jax.linear_transpose(push, theta0)(h_bar.reshape(h.shape))[0], "head": w_bar}  # pull: dh -> Jᵀ dh


def value_and_grad(objective, linearized, theta0, delta, tokens, config):
    """(loss at θ_t, value), gradient of the inner loss at θ_t + δ: means a token, plus the damping ½ λ |δ|²."""
    (loss, value), grad = linearized(objective, theta0, delta, tokens, config)
    size = tokens[:, 1:].size
    grad = jax.tree.map(lambda a, d: a / size + config.damping * d, grad, delta)
    value = value / size + config.damping / 2 * sum(jnp.vdot(d, d) for d in jax.tree.leaves(delta))
    return (loss / size, value), grad


@partial(parallel.jit, static_argnames=("config", "objective", "linearized"), donate_argnames="state")
def inner_step(state, tokens, config, objective=quadratic, linearized=linearized, lr=1.0):
    """One step of the inner optimizer on one inner batch, int32 [B, T+1]; lr: a factor of config's learning rate."""
    delta = jax.tree.map(jnp.subtract, state.theta, state.params)
    at = parallel.mean(partial(value_and_grad, objective, linearized, config=config))
    (loss, value), grad = at(state.params, delta, tokens)
    descend = optimizer(lr * learning_rate(state.t, state.k, config), config)
    step, opt = descend.update(grad, state.opt, state.theta)
    theta = jax.tree.map(jnp.add, state.theta, step)
    average = averaged(state.average, theta, config.average) if config.averages_inner_steps else state.average
    sums = {"loss": state.loss + loss, "inner_loss": state.inner_loss + value}
    return state._replace(theta=theta, average=average, opt=opt, k=state.k + 1, **sums)


@partial(parallel.jit, static_argnames=("config", "linearized"), donate_argnames="state")
def solve(state, tokens, config, linearized=linearized):
    """θ = θ_t - (G + λI)⁻¹ ∇L(θ_t) by conjugate gradients from δ = 0; tokens: int32 [N, B, T+1], the whole batch."""
    N, zero = tokens.shape[0], jax.tree.map(jnp.zeros_like, state.params)

    def mean(objective, delta):  # of the objective's values and gradient over the inner batches
        at = parallel.mean(partial(value_and_grad, objective, linearized, config=config))
        add = lambda total, part: (jax.tree.map(jnp.add, total, at(state.params, delta, part)), None)
        start = (2 * (jnp.zeros_like(state.loss),), zero)
        return jax.tree.map(lambda a: a / N, jax.lax.scan(add, start, tokens)[0])

    (loss, _), grad = mean(quadratic, zero)
    times, minus = lambda delta: mean(curvature, delta)[1], jax.tree.map(jnp.negative, grad)  # (G + λI) δ, -g
    delta, _ = jax.scipy.sparse.linalg.cg(times, minus, tol=1e-10, maxiter=config.cg_steps)
    (_, value), _ = mean(quadratic, delta)
    theta = jax.tree.map(jnp.add, state.params, delta)
    return state._replace(theta=theta, k=state.k + N, loss=N * loss, inner_loss=N * value)


def move(theta0, theta, alpha):
    """θ_t + α (θ - θ_t); exactly θ_t at α = 0, even where θ is not finite."""
    return jax.tree.map(lambda a, b: jnp.where(alpha == 0, a, a + alpha * (b - a)), theta0, theta)


@partial(jax.jit, static_argnames="network")
def losses(theta0, theta, alphas, tokens, network):
    """Loss at θ_t + α (θ - θ_t) for each of alphas [A] on an inner batch: [A]; infinite if a weight is not finite."""
    finite = jnp.array([jnp.isfinite(a).all() for a in jax.tree.leaves(theta)]).all()
    at = lambda alpha: parallel.mean(partial(model.loss, network))(move(theta0, theta, alpha), tokens)
    return jax.lax.map(lambda alpha: jnp.where((alpha == 0) | finite, at(alpha), jnp.inf), alphas)


def line_search(theta0, theta, fresh, config):
    """The α of 2^(-i/2), i < line_search, of the smallest loss on the fresh tokens fresh(k), k < fresh_batches.

    0 where the guard refuses them all. A loss counts as infinite if it or a weight is not finite.
    """
    # guarded, θ_t comes first: argmin takes it unless another is below it
    alphas = jnp.concatenate([jnp.zeros(int(config.guard)), 2.0 ** (-jnp.arange(config.line_search) / 2)])
    total = jnp.zeros_like(alphas)
    for k in range(config.fresh_batches):
        part = losses(theta0, theta, alphas, fresh(k), config.model)
        total = jax.block_until_ready(total) + part  # waits for the batch before: never more than one is in flight
    return alphas[jnp.argmin(jnp.where(jnp.isfinite(total), total, jnp.inf))]


@partial(parallel.jit, static_argnames="config")
def finish(state, alpha, config):
    """The state at the next outer step: θ_{t+1} = θ_t + α (θ - θ_t); θ and its momentum stay unless α = 0.

    Unless refused, a step then shrinks every matrix by 1 - parameter_weight_decay, of θ too, or the next would undo it.
    """
    fresh = init(state.params, config)
    theta, opt = jax.tree.map(partial(jnp.where, alpha == 0), (fresh.theta, fresh.opt), (state.theta, state.opt))
    params, keep = move(state.params, state.theta, alpha), jnp.where(alpha == 0, 1, 1 - config.parameter_weight_decay)
    shrink = lambda tree: jax.tree.map(lambda a, matrix: keep * a if matrix else a, tree, baselines.is_matrix(tree))
    params, theta = shrink(params), shrink(theta)
    average, tau = state.average, config.average**config.inner_steps
    average = average if config.averages_inner_steps else averaged(average, params, tau)
    return fresh._replace(params=params, theta=theta, average=average, opt=opt, t=state.t + 1)


def update(state, batches, fresh, config, watch=lambda state: None, objective=quadratic, linearized=linearized):
    """One outer step of Algorithm 1: minimize L2 over a batch, line search on fresh tokens, move.

    batches(k), k < inner_steps, and fresh(k), k < fresh_batches: the k-th inner batch, int32 [B, T+1]. watch(state):
    called after each inner step. Returns the next State and metrics: train_loss (at θ_t) and inner_loss (L2), means a
    token over the batch, in nats; lr of the first inner step; alpha, 0 where the step was refused.
    """
    N, unit = config.inner_steps, replace(config, lr=1.0)  # so that one compiled step serves every learning rate
    for k in range(int(state.k), 1 if config.inner == "cg" else N):
        if config.inner == "cg":
            state = solve(state, jnp.stack([batches(k) for k in range(N)]), config, linearized)
        else:
            state = inner_step(state, batches(k), unit, objective, linearized, config.lr)
        watch(state)
    alpha = line_search(state.params, state.theta, fresh, config) if config.line_search else None
    lr = None if config.inner == "cg" else learning_rate(state.t, 0, config)
    metrics = {"train_loss": state.loss / N, "inner_loss": state.inner_loss / N, "lr": lr, "alpha": alpha}
    return finish(state, 1.0 if alpha is None else alpha, unit), metrics
