"""Full Gauss-Newton (Algorithm 1): minimize a quadratic model of the loss, then search along the step.

At the present parameters θ_t the network f is replaced by its linearization, and the loss ℓ by its
second-order expansion in the logits z. With δ = θ - θ_t, z = f(θ_t) and J = ∂f/∂θ at θ_t:

    L2(θ_t + δ) = ℓ(z) + g·v + ½ v·Hv,     v = J δ,  g = ∇ℓ(z),  H = ∇²ℓ(z)      (Section 4.3)
    ∇L2 = Jᵀ(g + H v) = ∇L(θ_t) + G δ,     G = Jᵀ H J                            (Appendix B)

Its minimum is at δ = -G⁻¹ ∇L(θ_t), the Gauss-Newton update. G stands for the Hessian of the loss, which
is G + Σᵢ gᵢ ∇²fᵢ: G leaves out the curvature of the network itself, each output's weighted by its
residual gᵢ. For cross-entropy g = p - onehot(y) and H = diag(p) - p pᵀ, with p = softmax(z). This H is
positive semi-definite, so G is too, and L2 is convex; a quadratic model with the Hessian need not be.

Neither J nor G is ever formed. JAX gives two functions instead:

    the pushforward δ -> J δ:      `jax.linearize(f, θ_t)` returns f(θ_t) and the pushforward
    the pullback    u -> Jᵀ u:     `jax.linear_transpose(pushforward, ..)` returns the pullback

u is called a cotangent: an array like z, as v is a change of z.

An outer step reads a batch, in N inner batches. It takes N steps of Muon on L2, each on its own inner
batch. The mean of the inner batches' L2 is the batch's L2, so this is stochastic gradient descent on
one convex quadratic. It approaches -G⁻¹ ∇L of the batch as steps are added and the learning rate falls.

gn_prox.py replaces `quadratic` and layerwise_gn.py `value_and_grad`; all else is as here.

| paper                               | here                | what                                    |
| θ_t, θ, δ                           | theta0, theta, delta| trees of parameters                     |
| f(θ_t), J δ                         | z, v                | [c, V], for c tokens                    |
| ∇ℓ(z), ∇²ℓ(z) v, their sum          | g, Hv, u            | the same                                |
| what the head reads                 | h, dh, h_bar        | [B, T, D]: value, change, cotangent     |
| outer and inner step                | t, k                |                                         |
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import model
import optimizers
from kernels import on_gpu
from kernels.cross_entropy import quadratic_kernel
from optimizers import cosine, progress, rise
from runtime import parallel
from runtime.flags import check_choice, check_range, traced

SCHEDULES = {  # how the learning rate falls, by how far the run and the outer step are, from 0 to 1
    "constant+inner cosine": lambda run, inner: cosine(inner),
    "global cosine": lambda run, inner: cosine(run),
    "global+inner cosine": lambda run, inner: cosine(run) * cosine(inner),
    "constant": lambda run, inner: 1.0,
}

INNER_OPTIMIZERS = {  # optax transformations; lr: of one inner step, c: the Config
    "muon": lambda lr, c: optimizers.muon(lr, c.momentum, c.weight_decay, c.clip, c.network.dtype),
    "adamw": lambda lr, c: optimizers.adamw(lr, c.momentum, 0.999, c.weight_decay, c.clip),
}


@traced
@dataclass(frozen=True)
class LineSearch:
    """The sizes of a run, which train.py fills in, and the settings of a line search."""

    network: model.Config
    inner_steps: int  # inner batches in a batch, N
    outer_steps: int  # outer steps of the run
    inner_tokens: int = 0  # tokens in an inner batch
    model: Any = model  # the module that defines the network, model.py or another with its functions
    line_search: int = 5  # step sizes α = 2^(-i/2) tried on fresh tokens (Appendix D); 0 = α is 1
    # about how many fresh tokens a line search reads; 0 = as many as the batch has (Algorithm 1)
    line_search_tokens: int = 0
    guard: bool = True  # refuse a step when no step size beats θ_t; false = as in the paper

    @property
    def fresh_batches(self):
        """Inner batches of fresh tokens that an outer step's line search reads."""
        if not self.line_search:
            return 0
        if not self.line_search_tokens:
            return self.inner_steps
        return max(1, round(self.line_search_tokens / self.inner_tokens))

    def check(self):
        """Raises ValueError where a setting is out of its range."""
        check_range(self, ["line_search", "line_search_tokens"], least=0)


@traced
@dataclass(frozen=True)
class Config(LineSearch):
    """Settings of Gauss-Newton."""

    lr: float = 0.01  # peak learning rate of the inner optimizer, per inner step (App. H: 0.001-0.1)
    # constant+inner cosine | global cosine | global+inner cosine | constant (Appendix D)
    schedule: str = "constant+inner cosine"
    warmup: float = 0.0  # fraction of the run in which lr rises linearly (Appendix H: 0 or 0.2)
    inner_warmup: float = 0.0  # the same, of each outer step's inner steps (Appendix H: 0 or 0.2)
    inner: str = "muon"  # muon | adamw: the inner optimizer (Section 5.1)
    momentum: float = 0.95  # decay of its running mean of gradients, per inner step (Appendix H)
    weight_decay: float = 0.001  # decay of every matrix, times lr, per inner step (App. H: 0, 0.001)
    damping: float = 0.0  # λ of ½ λ |θ - θ_t|², added to L2 (Appendix H, loss weight decay: 0-0.1)
    parameter_weight_decay: float = 0.0  # decay of every matrix, per outer step (App. H: 0 to 0.1)
    # decay τ of the weight average, per inner step (Appendix H); default 0.999, but 0 (no average)
    # with a line search
    average: float = None
    clip: float = 1.0  # largest gradient norm of an optimizer group, per inner step; 0 = any

    def __post_init__(self):
        if self.average is None:
            object.__setattr__(self, "average", 0.0 if self.line_search else 0.999)

    def check(self):
        super().check()
        check_choice(self, "schedule", SCHEDULES)
        check_choice(self, "inner", INNER_OPTIMIZERS)
        check_range(self, ["lr"], above=0)
        check_range(self, ["weight_decay", "damping", "clip"], least=0)
        fractions = ["momentum", "warmup", "inner_warmup", "average", "parameter_weight_decay"]
        check_range(self, fractions, least=0, below=1)


class State(NamedTuple):
    """Where Gauss-Newton is: before inner step k of outer step t."""

    params: Any  # θ_t
    theta: Any  # θ, the inner iterate
    average: Any  # the weight average, evaluated in place of θ_t; None where config.average is 0
    opt: Any  # state of the inner optimizer
    t: jax.Array  # outer steps done
    k: jax.Array  # inner steps done of the current outer step
    loss: jax.Array  # sum over these of the loss at θ_t
    inner_loss: jax.Array  # sum over these of L2 at the inner iterate


def inner_optimizer(lr, config):
    """The optax transformation that minimizes L2."""
    return INNER_OPTIMIZERS[config.inner](lr, config)


def init(params, config):
    """State at the first outer step, from parameters θ_0.

    No two of its arrays share memory: `inner_step` writes its result where its state lay.
    """
    theta = jax.tree.map(jnp.copy, params)
    average = jax.tree.map(jnp.copy, params) if config.average else None
    opt = inner_optimizer(0.0, config).init(params)
    t, k = jnp.zeros((2,), jnp.int32)
    loss, inner_loss = jnp.zeros((2,), params["head"].dtype)
    return State(jax.tree.map(jnp.copy, params), theta, average, opt, t, k, loss, inner_loss)


# ---- the objective -------------------------------------------------------------------------------


@on_gpu(quadratic_kernel)
def quadratic(z, v, y, loss=model.cross_entropy):
    """The loss, its expansion L2 at the change v of the logits, and L2's gradient g + H v there.

    z: logits f(θ_t), [c, V]; v: J δ, [c, V]; y: labels, int32 [c]; loss(z, y): a sum over the c
    tokens, convex in z. Returns two numbers and [c, V].
    """
    v = v.astype(z.dtype)  # it may be rounded
    ell = loss(z, y)
    g, Hv = jax.jvp(jax.grad(partial(loss, y=y)), (z,), (v,))  # ∇ℓ(z), and its change with z
    return ell, ell + jnp.vdot(g, v) + jnp.vdot(v, Hv) / 2, g + Hv


def value_and_grad(theta0, delta, tokens, config, objective=quadratic):
    """The loss at θ_t, the objective at θ_t + δ, and the objective's gradient in the parameters.

    tokens: int32 [B, T+1]. All three are means over the tokens to predict.
    """
    model, network = config.model, config.network
    x, y = model.inputs_and_labels(tokens)

    # Up: linearize the network at θ_t, below the head, and push δ through it.
    h, push = jax.linearize(lambda params: model.hidden(network, params, x), theta0)
    dh = push(delta)

    # Across: the head and the loss, a few tokens at a time.
    head_both_ways = model.head_both_ways(network, theta0, delta)

    def across(h, dh, y):
        z, v, pull_head = head_both_ways(h, dh)  # z = f(θ_t), v = J δ
        loss, value, u = objective(z, v, y)  # u = g + H v
        h_bar, head_grad = pull_head(u)
        return h_bar, (loss, value, head_grad)

    h_bar, (loss, value, head_grad) = model.over_tokens(network, across, h, dh, y)

    # Down: pull the cotangent back through the same linear map, Jᵀ u.
    (grad,) = jax.linear_transpose(push, theta0)(h_bar)
    grad = grad | head_grad
    return jax.tree.map(lambda total: total / y.size, (loss, value, grad))


# ---- the inner loop ------------------------------------------------------------------------------


def learning_rate(t, k, config):
    """Learning rate of inner step k of outer step t (Appendix D): a pure function of both."""
    T, N = config.outer_steps, config.inner_steps
    run = progress((t + k / N) / T, config.warmup)
    inner = progress(k / N, config.inner_warmup)
    fall = SCHEDULES[config.schedule](run, inner)
    run_rise = rise(t * N + k, config.warmup * T * N)
    inner_rise = rise(k, config.inner_warmup * N)
    return config.lr * run_rise * inner_rise * fall


@partial(parallel.jit, static_argnames="value_and_grad", donate_argnames="state")
def inner_step(state, tokens, config, value_and_grad=value_and_grad):
    """The State after one step of the inner optimizer on one inner batch, int32 [B, T+1].

    "donate" gives the memory of the argument to the result: the old state cannot be used again.
    """
    delta = jax.tree.map(jnp.subtract, state.theta, state.params)
    mean = parallel.mean(partial(value_and_grad, config=config))  # over the devices
    loss, value, grad = mean(state.params, delta, tokens)

    # The damping ½ λ |δ|², whose gradient is λ δ.
    value += config.damping / 2 * optax.tree.norm(delta, squared=True)
    grad = jax.tree.map(lambda g, d: g + config.damping * d, grad, delta)

    optimizer = inner_optimizer(learning_rate(state.t, state.k, config), config)
    step, opt = optimizer.update(grad, state.opt, state.theta)
    theta = optax.apply_updates(state.theta, step)
    average = state.average
    if not config.line_search:
        average = optimizers.update_average(average, theta, config.average)
    return State(
        params=state.params,
        theta=theta,
        average=average,
        opt=opt,
        t=state.t,
        k=state.k + 1,
        loss=state.loss + loss,
        inner_loss=state.inner_loss + value,
    )


# ---- the line search and the move ----------------------------------------------------------------


def between(theta0, theta, alpha):
    """θ_t + α (θ - θ_t); exactly θ_t at α = 0, even where θ is not finite."""

    def of_array(a, b):
        return jnp.where(alpha == 0, a, a + alpha * (b - a))

    return jax.tree.map(of_array, theta0, theta)


@jax.jit
def losses(theta0, theta, alphas, tokens, config):
    """The loss at θ_t + α (θ - θ_t) on an inner batch, for each α of alphas [A]: [A].

    It is infinite where a weight is not finite.
    """
    finite = jnp.array([jnp.isfinite(a).all() for a in jax.tree.leaves(theta)]).all()
    mean_loss = parallel.mean(partial(config.model.loss, config.network))

    def loss_at(alpha):
        loss = mean_loss(between(theta0, theta, alpha), tokens)
        return jnp.where(finite | (alpha == 0), loss, jnp.inf)

    return jax.lax.map(loss_at, alphas)


def line_search(theta0, theta, fresh, config):
    """The step size α of the smallest loss on the fresh tokens: 2^(-i/2), i < line_search.

    With the guard it is 0 where none is better than θ_t. fresh(k): an inner batch, int32 [B, T+1],
    for k < fresh_batches. A loss that is not finite counts as infinite.
    """
    alphas = 2.0 ** (-jnp.arange(config.line_search) / 2)
    if config.guard:
        alphas = jnp.concatenate([jnp.zeros(1), alphas])  # first, so that a tie refuses the step
    total = jnp.zeros_like(alphas)
    for k in range(config.fresh_batches):
        more = losses(theta0, theta, alphas, fresh(k), config)
        total = jax.block_until_ready(total) + more  # waits for the batch before: one is in flight
    total = jnp.where(jnp.isfinite(total), total, jnp.inf)
    return alphas[jnp.argmin(total)]


@parallel.jit
def move(state, alpha, config):
    """The State at the next outer step, at θ_{t+1} = θ_t + α (θ - θ_t).

    The next inner loop goes on from θ with its momentum, not from θ_{t+1}: Section 5.1 found that this
    helps. θ is where the inner optimizer stands, and its momentum belongs there; α only says how far
    the weights that count may follow. A refused step (α = 0) is different: its θ is bad, so the next
    loop starts from θ_t without momentum.
    """
    params = between(state.params, state.theta, alpha)
    no_momentum = inner_optimizer(0.0, config).init(params)
    refused = alpha == 0

    def where_refused(new, old):
        return jax.tree.map(partial(jnp.where, refused), new, old)

    theta = where_refused(params, state.theta)
    opt = where_refused(no_momentum, state.opt)

    # Both decay, or the next step would undo it.
    keep = jnp.where(refused, 1, 1 - config.parameter_weight_decay)
    params = optimizers.scale_matrices(params, keep)
    theta = optimizers.scale_matrices(theta, keep)

    average = state.average
    if config.line_search:  # of θ_t then, and an outer step counts as its N inner steps
        average = optimizers.update_average(average, params, config.average**config.inner_steps)
    zero = jnp.zeros_like(state.loss)
    return State(params, theta, average, opt, state.t + 1, jnp.zeros_like(state.k), zero, zero)


def update(state, batches, fresh, config, watch=lambda state: None, value_and_grad=value_and_grad):
    """One outer step of Algorithm 1: minimize L2 over a batch, search along the step, move.

    batches(k), k < inner_steps, and fresh(k), k < fresh_batches: the k-th inner batch, int32
    [B, T+1]; watch(state) is called after each inner step. Returns the next State, and metrics:
    train_loss (at θ_t) and inner_loss (L2), in nats per token, means over the batch; lr of the first
    inner step; alpha of the line search, 0 where the step was refused.
    """
    N = config.inner_steps
    for k in range(int(state.k), N):  # a resumed run may begin inside
        state = inner_step(state, batches(k), config, value_and_grad)
        watch(state)

    metrics = {"train_loss": state.loss / N, "inner_loss": state.inner_loss / N}
    metrics["lr"] = learning_rate(state.t, 0, config)
    alpha = 1.0
    if config.line_search:
        alpha = line_search(state.params, state.theta, fresh, config)
        metrics["alpha"] = alpha
    return move(state, alpha, config), metrics
