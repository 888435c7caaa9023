"""Full Gauss-Newton (Algorithm 1): minimize a quadratic stand-in for the loss, then line search.

Around the current parameters θ_t the network f is replaced by its linearization, and the loss ℓ by
its second-order expansion in the logits. With δ = θ - θ_t, z = f(θ_t), and J = ∂f/∂θ at θ_t:

    L2(θ_t + δ) = ℓ(z) + g·v + ½ v·Hv,     v = J δ,  g = ∇ℓ(z),  H = ∇²ℓ(z)      (Section 4.3)
    ∇L2 = Jᵀ(g + H v) = ∇L(θ_t) + G δ,     G = Jᵀ H J                            (Appendix B)

Here L(θ) = ℓ(f(θ)). L2 is smallest where ∇L2 = 0, at δ = -G⁻¹ ∇L(θ_t): the Gauss-Newton update.
(Strictly, G has no inverse: a δ that adds the same number to all logits of each token changes no
probability, and L2 is flat along it. Any δ with ∇L2 = 0 will do.)

Newton's method has the Hessian of L in place of G. It is G + Σᵢ gᵢ ∇²fᵢ, a sum over the logits: G
leaves out the curvature of the network itself. G has no negative curvature, because H has none:
for one token H = diag(p) - p pᵀ, where p = softmax(z), and v·Hv is the variance of v under p.

Neither J nor G is ever formed. JAX gives us functions that multiply by J and by Jᵀ:
    `jax.linearize(f, θ_t)` returns f(θ_t) and the pushforward, δ -> J δ;
    `jax.linear_transpose(pushforward, θ_t)` returns the pullback, u -> Jᵀ u (θ_t tells the shapes).
What is pulled back is called a cotangent: u for the logits, h_bar for the layer below them.

An outer step reads one batch, in N inner batches, and takes a step of Muon on L2 for each. The mean
of the inner batches' L2 is the batch's L2. So all inner steps follow noisy gradients of the same
quadratic and move δ towards its minimum; N and the learning rate decide how near it comes.
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
from line_search import BaseConfig, between, line_search
from optimizers import cosine, progress, rise
from runtime import parallel
from runtime.flags import check_choice, check_range, traced

SCHEDULES = {  # factor of lr; run, inner: progress of run and inner loop after warm-up, 0 to 1
    "constant+inner cosine": lambda run, inner: cosine(inner),
    "global cosine": lambda run, inner: cosine(run),
    "global+inner cosine": lambda run, inner: cosine(run) * cosine(inner),
    "constant": lambda run, inner: 1.0,
}


@traced  # jax.jit takes the floats as inputs; all other fields are constants of the program
@dataclass(frozen=True)
class Config(BaseConfig):
    """Settings of Gauss-Newton. "App. H" gives the values that the paper tried.

    BaseConfig in line_search.py adds the settings of the line search; `network`, the sizes;
    `model`, the module of the network's functions; inner_steps N, outer_steps and micro_batch.
    """

    # peak learning rate of the inner optimizer (App. H: 0.001 to 0.1); default: 0.01, and
    # 0.01 √(122 / n) for an inner loop of n > 122 steps
    lr: float = None
    # constant+inner cosine | global cosine | global+inner cosine | constant (Appendix D)
    schedule: str = "constant+inner cosine"
    warmup: float = 0.0  # fraction of the run in which lr rises linearly (App. H: 0 or 0.2)
    inner_warmup: float = 0.0  # the same, of each outer step's inner steps (App. H: 0 or 0.2)
    inner: str = "muon"  # muon | adamw: the inner optimizer (Section 5.1)
    momentum: float = 0.95  # decay of Muon's running mean of gradients, per inner step (App. H)
    # decay of the running mean of g², per inner step, in AdamW and in what Muon leaves to Adam
    b2: float = 0.999
    inner_epochs: int = 1  # how often an outer step reads its batch, in the same order
    # true = start each inner loop from θ_{t+1}, with a new optimizer (Section 5.1: better not)
    restart: bool = False
    weight_decay: float = 0.001  # of every matrix, times lr, per inner step (App. H: 0 or 0.001)
    damping: float = 0.0  # λ of ½ λ |δ|², added to L2 (App. H, "loss weight decay": 0 to 0.1)
    parameter_weight_decay: float = 0.0  # of every matrix, per outer step (App. H: 0 to 0.1)
    # decay τ of a running mean of θ, per inner step; 0 = no mean; default: 0 with a line search,
    # 0.999 without. Without one, the mean is evaluated in place of θ (App. H: 0.9 to 0.999). With
    # one, the search goes to the mean; this covers about 1 / (1 - τ) inner steps, which should be
    # fewer than an outer step has
    average: float = None
    # largest gradient norm; 0 = no limit. With Muon there are two norms, each with this limit: that
    # of embedding and head, and that of all the rest
    clip: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        # A copy by `replace` keeps what the two become here.
        if self.lr is None:
            # 0.01, the paper's, is good for 122 inner steps, which are 4m tokens on 45m. A longer
            # loop goes too far with it: the best rates fall about so (docs/tuning.md).
            times_longer = max(1.0, self.loop_steps / 122)
            two_digits = f"{0.01 / times_longer**0.5:.2g}"
            object.__setattr__(self, "lr", float(two_digits))
        if self.average is None:
            object.__setattr__(self, "average", 0.0 if self.line_search else 0.999)

    @property
    def loop_steps(self):
        """How many inner steps an outer step takes: one for each inner batch, in each pass."""
        return self.inner_epochs * self.inner_steps

    @property
    def depends_on_length(self):
        """Whether the learning rate depends on how many outer steps the run has."""
        return self.schedule.startswith("global") or self.warmup > 0

    def value_and_grad(self, theta0, delta, tokens):
        """What an inner step lowers, and its gradient. Other methods have another in its place."""
        return value_and_grad(theta0, delta, tokens, self)

    def optimizer(self, lr):
        """The inner optimizer, an optax transformation; lr: of this inner step."""
        if self.inner == "adamw":
            return optimizers.adamw(lr, 0.9, self.b2, self.weight_decay, self.clip)
        dtype = self.network.dtype
        return optimizers.muon(lr, self.momentum, self.weight_decay, self.clip, dtype, self.b2)

    def check(self):
        super().check()
        check_choice(self, "schedule", SCHEDULES)
        check_choice(self, "inner", ("muon", "adamw"))
        check_range(self, ["lr"], above=0)
        check_range(self, ["weight_decay", "damping", "clip"], least=0)
        check_range(self, ["inner_epochs"], least=1, most=1000)
        decays = ["momentum", "b2", "average", "parameter_weight_decay"]
        check_range(self, [*decays, "warmup", "inner_warmup"], least=0, below=1)


class State(NamedTuple):
    """Where Gauss-Newton is: before inner step k of outer step t."""

    params: Any  # θ_t; in functions below: theta0
    theta: Any  # θ, the inner iterate
    # The running mean of θ is one of these two, and the other is None. With τ = 0 both are None.
    average: Any  # without a line search: it is evaluated in place of θ_t
    theta_mean: Any  # with a line search: the search goes to it, in place of θ
    opt: Any  # state of the inner optimizer
    t: jax.Array  # outer steps done
    searched: jax.Array  # inner batches that all line searches until now have read
    k: jax.Array  # inner steps done of the current outer step
    losses: jax.Array  # ℓ at θ_t on the tokens of each inner step, [loop_steps]; 0 at those to come
    inner_losses: jax.Array  # L2, with damping, at the θ before each inner step; as `losses`


def init(params, config):
    """State at the first outer step. It holds copies of params, as `inner_step` overwrites it."""
    mean = jax.tree.map(jnp.copy, params) if config.average else None
    t, searched, k = jnp.zeros(3, jnp.int32)  # arrays of their own, as each is overwritten
    dtype = jax.tree.leaves(params)[0].dtype
    losses, inner_losses = jnp.zeros((2, config.loop_steps), dtype)
    return State(
        params=jax.tree.map(jnp.copy, params),
        theta=jax.tree.map(jnp.copy, params),
        average=None if config.line_search else mean,
        theta_mean=mean if config.line_search else None,
        opt=config.optimizer(0.0).init(params),  # the same for any lr
        t=t,
        searched=searched,
        k=k,
        losses=losses,
        inner_losses=inner_losses,
    )


@on_gpu(quadratic_kernel)
def quadratic(z, v, y, loss=model.cross_entropy):
    """ℓ at θ_t and L2 at θ_t + δ, summed over c tokens; and L2's gradient in v, g + H v, [c, V].

    z: f(θ_t), [c, V]; v: J δ, [c, V]; y: labels, int32 [c]; loss(z, y): a sum over tokens.
    """
    v = v.astype(z.dtype)  # jvp wants the type of z; a matrix product may give a shorter one
    ell = loss(z, y)
    gradient = jax.grad(partial(loss, y=y))
    g, Hv = jax.jvp(gradient, (z,), (v,))  # ∇ℓ(z), and its change when z changes by v
    L2 = ell + jnp.vdot(g, v) + jnp.vdot(v, Hv) / 2
    return ell, L2, g + Hv


def value_and_grad(theta0, delta, tokens, config, objective=quadratic):
    """ℓ at θ_t, L2 at θ_t + δ, and the gradient of L2 in the parameters: means over tokens.

    tokens: int32 ids [B, T+1]; objective: `quadratic`, or gn_prox.py's.
    """
    network = config.network  # the sizes; config.model has the functions
    x, y = config.model.inputs_and_labels(tokens)

    # Up: linearize the network below its head, h [B, T, D], and push δ through it.
    h, push = jax.linearize(lambda params: config.model.hidden(network, params, x), theta0)
    dh = push(delta)

    # Across: the head and the loss, a few tokens at a time.
    head_both_ways = config.model.head_both_ways(network, theta0, delta)

    def across(h, dh, y):
        z, v, pull_head = head_both_ways(h, dh)  # z = f(θ_t), v = J δ
        ell, L2, u = objective(z, v, y)  # u = g + H v
        h_bar, head_grad = pull_head(u)
        return h_bar, (ell, L2, head_grad)

    h_bar, (ell, L2, head_grad) = config.model.over_tokens(network, across, h, dh, y)

    # Down: pull h_bar back through the same map. With the head's part, this is Jᵀ u.
    (grad,) = jax.linear_transpose(push, theta0)(h_bar)
    grad = grad | head_grad  # replaces the head's zeros, as `hidden` does not read the head
    return jax.tree.map(lambda total: total / y.size, (ell, L2, grad))


def learning_rate(t, k, config):
    """Learning rate of inner step k of outer step t (Appendix D)."""
    n = config.loop_steps
    run = progress((t + k / n) / config.outer_steps, config.warmup)
    inner = progress(k / n, config.inner_warmup)
    fall = SCHEDULES[config.schedule](run, inner)
    # linear, to 1 over the warm-up
    run_rise = rise(t * n + k, config.warmup * config.outer_steps * n)
    inner_rise = rise(k, config.inner_warmup * n)
    return config.lr * run_rise * inner_rise * fall


@partial(parallel.jit, donate_argnames="state")
def inner_step(state, tokens, config):
    """The State after one step of the inner optimizer on an inner batch, int32 [B, T+1].

    The state is donated: its memory goes to the result, and it cannot be used again. On one device,
    parallel.jit is jax.jit, and parallel.mean(f, n) is f, computed on at most n sequences at a time
    (0: all). On several, each computes f on its share of the tokens, and the mean is taken.
    """
    delta = jax.tree.map(jnp.subtract, state.theta, state.params)
    mean_value_and_grad = parallel.mean(config.value_and_grad, config.micro_batch)
    ell, L2, grad = mean_value_and_grad(state.params, delta, tokens)

    # Damping adds ½ λ |δ|² to L2, and λ δ to its gradient.
    L2 += config.damping / 2 * optax.tree.norm(delta, squared=True)
    grad = jax.tree.map(lambda g, d: g + config.damping * d, grad, delta)

    lr = learning_rate(state.t, state.k, config)
    step, opt = config.optimizer(lr).update(grad, state.opt, state.theta)
    theta = optax.apply_updates(state.theta, step)
    return state._replace(
        theta=theta,
        average=optimizers.update_average(state.average, theta, config.average),
        theta_mean=optimizers.update_average(state.theta_mean, theta, config.average),
        opt=opt,
        k=state.k + 1,
        losses=state.losses.at[state.k].set(ell),
        inner_losses=state.inner_losses.at[state.k].set(L2),
    )


def lower(state, tokens, config):
    """The program of `inner_step` before it is compiled; train.py asks what memory a run needs."""
    return inner_step.lower(state, tokens, config)


def inner_loop(state, batches, config, watch):
    """The State after all inner steps of an outer step; the arguments are those of `update`."""
    for k in range(int(state.k), config.loop_steps):  # a stopped run resumes inside the loop
        state = inner_step(state, batches(k % config.inner_steps), config)
        watch(state)
    return state


def destination(state):
    """Where a step with α = 1 leads: to θ, or to its running mean if the search goes there."""
    return state.theta if state.theta_mean is None else state.theta_mean


@parallel.jit
def move(state, alpha, config):
    """The State at the start of the next outer step, at θ_{t+1} = θ_t + α (destination - θ_t).

    α only decides where the network is linearized next. The inner loop goes on from θ, not from
    θ_{t+1} (Section 5.1). Its optimizer keeps its state, as in the authors' code, and the mean of θ
    goes on. After a refused step (α = 0), and always with config.restart, it starts from θ_{t+1},
    with a new optimizer state and a new theta_mean. Unless the step was refused, every matrix is
    then multiplied by 1 - config.parameter_weight_decay.
    """
    params = between(state.params, destination(state), alpha)
    going_on = state._replace(
        params=params,
        t=state.t + 1,
        k=jnp.zeros_like(state.k),
        losses=jnp.zeros_like(state.losses),
        inner_losses=jnp.zeros_like(state.inner_losses),
    )
    begun_anew = going_on._replace(
        theta=params,
        theta_mean=None if state.theta_mean is None else params,
        opt=config.optimizer(0.0).init(params),
    )
    refused = alpha == 0
    restart = refused | config.restart
    after = jax.tree.map(partial(jnp.where, restart), begun_anew, going_on)

    # θ and its mean shrink, too. Otherwise the next move towards them would undo the decay.
    keep = jnp.where(refused, 1, 1 - config.parameter_weight_decay)
    return after._replace(
        params=optimizers.scale_matrices(after.params, keep),
        theta=optimizers.scale_matrices(after.theta, keep),
        theta_mean=optimizers.scale_matrices(after.theta_mean, keep),
    )


def update(state, batches, fresh, config, watch=lambda state: None):
    """One outer step of Algorithm 1: minimize L2 over a batch, search along the step, move.

    batches(k), k < inner_steps: inner batches, int32 [B, T+1]; fresh(k), k < fresh_batches: those
    of the line search; watch(state): called after each inner step, with a state that the next one
    deletes. Returns the next State, and metrics, losses in nats per token:
        train_loss, inner_loss: ℓ at θ_t, and L2 with damping at θ; means over all inner steps
        inner_loss_first, inner_loss_last: L2 at the first and the last inner step
        lr: of the first inner step
        norm_matrices, ..: ‖destination - θ_t‖ of each group of optimizers.py
        alpha (0: refused), loss_at_1, ..: see line_search.py; only if line_search > 0
    An update deletes the state it is given. To keep one, copy it: jax.tree.map(jnp.copy, state).
    """
    state = inner_loop(state, batches, config, watch)
    metrics = {
        "train_loss": jnp.mean(state.losses),
        "inner_loss": jnp.mean(state.inner_losses),
        "inner_loss_first": state.inner_losses[0],
        "inner_loss_last": state.inner_losses[-1],
        "lr": learning_rate(state.t, 0, config),
    }
    metrics |= optimizers.norms_of_step(state.params, destination(state))
    alpha, searched, read = line_search(state.params, destination(state), fresh, config)
    state = state._replace(searched=state.searched + read)
    return move(state, alpha, config), metrics | searched
