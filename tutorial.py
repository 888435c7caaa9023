"""Gauss-Newton on a network so small that its matrix G can be written down and inverted.

For readers who know gradient descent and a little JAX. `python tutorial.py` takes less than a
minute. It prints what the sections below compute, and draws figures/tutorial.png.

Near the parameters θ_t, the loss L of a network is close to a quadratic function of the step δ,

    m(δ) = L(θ_t) + grad·δ + ½ δ·C δ,    grad = ∇L(θ_t)

where the matrix C says how the loss curves. The gradient of m, grad + C δ, is zero at
δ = -C⁻¹ grad. Three methods take this step. They differ in C:

    gradient descent    C = I           its step is -grad
    Newton              C = ∇²L + λI    the Hessian ∇²L: all second derivatives of the loss
    Gauss-Newton        C = G + λI      G: a part of the Hessian that never curves downwards

λ is a small number. Section 2 explains G and λ. In the code, `theta` is θ_t, as one vector. (In
gn.py, `theta` is θ_t + δ, and θ_t is `theta0`.)
"""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure

import gn
import model
from runtime import files, flags
from runtime.command import blaming_input, command

DAMPING = 0.03  # λ
SEED = 97  # of the first parameters, chosen because Newton's method fails there (section 6)
# the three methods, each with its color and marker in the picture
LOOKS = {"gradient": ("black", "v"), "Newton": ("#D55E00", "D"), "Gauss-Newton": ("#0072B2", "o")}

# ---- 1. A network and its data -------------------------------------------------------------------
#
# The network gives a point x of the plane a score for each class, called a logit. The three logits
# are z = tanh(x w + b) head. The probabilities of the classes are p = softmax(z). The loss is
# cross-entropy: -log p[y], where y is the right class.


class MLP:
    """The network, as the five functions that gn.py asks for; the class is used like a module.

    A batch is a pair: points [n, 2] and their classes [n]. `network` would hold the sizes of the
    network; here it is None. The head is the last matrix, hidden is all before it.
    """

    @staticmethod
    def inputs_and_labels(batch):
        return batch

    @staticmethod
    def hidden(network, params, x):
        return jnp.tanh(x @ params["w"] + params["b"][None])  # [n, 3 hidden units]

    @staticmethod
    def head_both_ways(network, theta0, delta):
        w, dw = theta0["head"], delta["head"]

        def both_ways(h, dh):  # the hidden units and their change, [n, 3 hidden units]
            def pull(u):  # [n, 3 classes]; from logits to hidden units and head (see section 3)
                return u @ w.T, {"head": h.T @ u}

            return h @ w, dh @ w + h @ dw, pull  # the logits, their change, the way back

        return both_ways

    @staticmethod
    def over_tokens(network, f, *arrays):
        return f(*arrays)  # all points at once; model.py takes a few tokens at a time

    @staticmethod
    def loss(network, params, batch):
        x, y = batch
        z = MLP.hidden(network, params, x) @ params["head"]
        return model.cross_entropy(z, y) / len(y)


# gn.value_and_grad reads the first two only; the others have no default.
CONFIG = gn.Config(network=None, model=MLP, inner_steps=1, outer_steps=1)


def make_batch():
    """12 points on a circle. Their classes are 0, 0, 1, 1, 2, 2, and the same again."""
    angle = 2 * jnp.pi * jnp.arange(12) / 12
    points = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    return points, jnp.arange(12) // 2 % 3


def init(seed):
    """Random parameters of the MLP."""
    rng = np.random.default_rng(seed)
    shapes = {"w": (2, 3), "b": (3,), "head": (3, 3)}
    return {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}


def functions_of_theta(config, params, batch):
    """θ, all P parameters in one vector, and three functions of it: as_params, logits, loss.

    as_params(θ) are the params again; logits(θ) are [n, V], for n labels and V classes; loss(θ) is
    the mean loss.
    """
    x, y = config.model.inputs_and_labels(batch)
    theta, as_params = ravel_pytree(params)

    def logits(theta):
        params = as_params(theta)
        h = config.model.hidden(config.network, params, x)
        return (h @ params["head"]).reshape(y.size, -1)

    def loss(theta):
        return config.model.loss(config.network, as_params(theta), batch)

    return theta, as_params, jax.jit(logits), jax.jit(loss)


# ---- 2. G, written down --------------------------------------------------------------------------
#
# The loss curves for two reasons: the logits curve as θ changes, and the loss curves as the logits
# change. Gauss-Newton keeps only the second. It replaces the logits by z + J δ, which do not curve;
# the Jacobian J = ∂z/∂θ of a point has one row for each of its logits. Then the second derivatives
# of the loss are
#
#     G = mean over the points of Jᵀ H J,    H = ∂²loss/∂z² = diag(p) - p pᵀ
#
# For a change v of the logits, v·Hv is the variance of v under p, which is never negative. So
# neither is δ·Gδ: G never curves downwards. The Hessian may. It is G plus the mean over the points
# of the curvature ∇²z of the logits, each weighted by its residual p - onehot(y), which says how
# wrong that logit is.
#
# G has no inverse. Along a direction of θ that adds the same number to all logits, no probability
# changes, so G is zero there. Adding λ to every curvature mends this, and makes the step shorter.


@partial(jax.jit, static_argnames="logits")
def gauss_newton_matrix(logits, theta):
    """G, [P, P]."""
    J = jax.jacfwd(logits)(theta)  # [n, V, P]
    p = jax.nn.softmax(logits(theta))  # [n, V]
    p_pT = p[:, :, None] * p[:, None, :]
    H = jax.vmap(jnp.diag)(p) - p_pT  # [n, V, V]
    return jnp.einsum("nap,nab,nbq->pq", J, H, J) / len(p)


# ---- 3. The same step from products alone --------------------------------------------------------
#
# With a million parameters, G has 10¹² entries. But the product G δ = Jᵀ (H (J δ)) / n needs no
# matrix; here, J and H are those of all n points at once. In place of J, JAX gives two functions.
# Each costs no more than a few runs of the network:
#
#     the pushforward    δ -> J δ     how the logits change when θ changes by a small δ
#     the pullback       u -> Jᵀ u    from an array like z, called a cotangent, back to parameters;
#                                     from residuals / n it makes the gradient of the loss
#
# The method of conjugate gradients solves C δ = -grad in steps. Each needs one product with C.


def make_product(logits, theta):
    """The function δ -> (G + λI) δ."""
    z, push = jax.linearize(logits, theta)
    pull = jax.linear_transpose(push, theta)
    p = jax.nn.softmax(z)

    @jax.jit
    def product(delta):
        v = push(delta)  # J δ
        Hv = p * v - p * jnp.sum(p * v, axis=1, keepdims=True)  # (diag(p) - p pᵀ) v
        (G_delta,) = pull(Hv / len(z))
        return G_delta + DAMPING * delta

    return product


# ---- 4. The same step from gradients -------------------------------------------------------------
#
# The gradient of m is grad + C δ. Gradient steps on m lead to the same δ, though slowly where m
# curves little. gn.py works like this, with Muon in place of plain gradient steps. Each of its
# steps reads only a part of the data; a conjugate gradient step must read all of it.


def descend(product, grad, lr, steps):
    """δ after each of so many gradient steps on m, a list."""
    deltas = []
    delta = jnp.zeros_like(grad)
    for _ in range(steps):
        delta -= lr * (grad + product(delta))
        deltas.append(delta)
    return deltas


# ---- 5. A line search ----------------------------------------------------------------------------
#
# m is close to the loss only near θ_t. So try α δ for several α, and keep the best.

ALPHAS = np.array([0, *2.0 ** np.arange(-8, 5)])  # 0 (no step), 1/256, 1/128, .. 8, 16
SHOWN = np.linspace(0, 1.2, 61)  # the α of the picture


@partial(jax.jit, static_argnames="loss")
def losses_along(loss, theta, delta, alphas):
    """The loss at θ_t + α δ, for each α of alphas."""
    return jax.lax.map(lambda alpha: loss(theta + alpha * delta), alphas)


def line_search(loss, theta, delta):
    """The α of ALPHAS where the loss at θ_t + α δ is smallest."""
    return ALPHAS[jnp.argmin(losses_along(loss, theta, delta, ALPHAS))]


# ---- 6. Gradient descent, Newton, Gauss-Newton ---------------------------------------------------
#
# If the Hessian has a negative eigenvalue, the loss curves downwards along its eigenvector. If the
# eigenvalue is below -λ, Newton's m has no minimum: Newton goes to a saddle or a maximum of it, and
# may even go uphill. Gauss-Newton cannot: the slope of the loss along its step,
# grad·δ = -grad·C⁻¹ grad, is negative wherever grad is not zero.


class Step(NamedTuple):
    """The step of a method at θ_t."""

    C: jax.Array
    delta: jax.Array
    slope: jax.Array  # grad·δ, of the loss along δ


@partial(jax.jit, static_argnames=("method", "logits", "loss"))
def compute_step(method, logits, loss, theta):
    """The Step of a method at θ_t."""
    grad = jax.grad(loss)(theta)
    identity = jnp.eye(len(theta))
    if method == "gradient":
        C = identity
    elif method == "Newton":
        C = jax.hessian(loss)(theta) + DAMPING * identity
    else:
        C = gauss_newton_matrix(logits, theta) + DAMPING * identity
    delta = -jnp.linalg.solve(C, grad)
    return Step(C, delta, grad @ delta)


def train(logits, loss, theta, method):
    """The loss before and after each of 15 steps of a method, each with a line search."""
    losses = [loss(theta)]
    for _ in range(15):
        delta = compute_step(method, logits, loss, theta).delta
        theta += line_search(loss, theta, delta) * delta
        losses.append(loss(theta))
    return losses


# ---- 7. The same through gn.py -------------------------------------------------------------------
#
# gn.value_and_grad returns the loss at θ_t; m(δ) without λ, which is called L2 there; and the
# gradient of L2, grad + G δ. It goes up the network (v = J δ), across the loss
# (u = residuals + H v), and down again (Jᵀ u), and divides by the number of points.


def errors_of_gn(config, params, batch):
    """The relative errors of gn.value_and_grad in m(δ), grad and G δ, against the formulas."""
    theta, as_params, logits, loss = functions_of_theta(config, params, batch)
    delta = np.random.default_rng(1).normal(size=theta.shape) / 10

    @jax.jit
    def written_down():
        value, grad = jax.value_and_grad(loss)(theta)
        G_delta = gauss_newton_matrix(logits, theta) @ delta
        return value + grad @ delta + delta @ G_delta / 2, grad, G_delta

    @jax.jit
    def by_gn(delta):
        _, m, m_grad = gn.value_and_grad(params, as_params(delta), batch, config)
        return m, ravel_pytree(m_grad)[0]

    m, grad, G_delta = written_down()
    _, grad_by_gn = by_gn(0 * delta)
    m_by_gn, sum_by_gn = by_gn(delta)
    G_delta_by_gn = sum_by_gn - grad_by_gn
    return distance(m_by_gn, m), distance(grad_by_gn, grad), distance(G_delta_by_gn, G_delta)


def distance(a, b):
    """|a - b| / |b|."""
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def make_llama():
    """The config, random parameters and a batch of a LLaMA of one block."""
    sizes = {"vocab_size": 11, "context": 5, "d_model": 8, "d_ff": 16}
    network = model.Config(**sizes, n_layers=1, n_heads=2, n_kv_heads=2)
    rng = np.random.default_rng(0)
    shapes = model.shapes(network)
    params = jax.tree.map(lambda a: rng.normal(size=a.shape) / 2, shapes)
    tokens = rng.integers(network.vocab_size, size=(2, network.context + 1))
    return gn.Config(network=network, inner_steps=1, outer_steps=1), params, tokens


# ---- 8. A network of your own --------------------------------------------------------------------

OWN_NETWORK = """
8. For a network of your own, write the five functions of MLP, and give what holds them to
   gn.Config as `model`. Its parameters must be a dict. `hidden` must not read "head".
   Then gn.value_and_grad works. gn.update trains the network if `network` has a dtype: Muon takes
   the parameters that are named as in model.MATRICES, AdamW those named embedding and head, and
   Adam with Nesterov momentum all others."""


# ---- the lesson, printed and drawn ---------------------------------------------------------------


def teach_one_step(logits, loss, theta):
    """Prints sections 1 to 5.

    Returns how far conjugate gradients end from δ, in lengths of δ, and {step: how far gradient
    descent on m is after that step}.
    """
    P = len(theta)
    print(f"1. A network of {P} parameters. Its loss is {loss(theta):.4f};")
    print(f"   with equal probabilities for the 3 classes it would be log 3 = {np.log(3):.4f}.")

    curvatures = jnp.linalg.eigvalsh(gauss_newton_matrix(logits, theta))
    zeros = jnp.sum(curvatures < 1e-12)
    delta = compute_step("Gauss-Newton", logits, loss, theta).delta
    print(f"\n2. G is {P} x {P}. The largest of its eigenvalues is {curvatures[-1]:.4f};")
    print(f"   {zeros} are zero but for rounding.")
    print(f"   With λ = {DAMPING}, the step δ has length {jnp.linalg.norm(delta):.4f}.")

    grad = jax.grad(loss)(theta)
    product = make_product(logits, theta)
    by_products, _ = jax.scipy.sparse.linalg.cg(product, -grad, tol=1e-14, maxiter=100)
    cg_distance = distance(by_products, delta)
    print("\n3. Conjugate gradients find this δ from pushforwards and pullbacks alone,")
    print(f"   to within {cg_distance:.0e} of its length.")

    print("\n4. Gradient steps on m(δ) approach it. The distance left, in lengths of δ:")
    deltas = descend(product, grad, lr=1 / (curvatures[-1] + DAMPING), steps=1000)
    distances = {step: distance(deltas[step - 1], delta) for step in (1, 10, 100, 1000)}
    for step, left in distances.items():
        print(f"   {left:.0e} after step {step}")

    alpha = line_search(loss, theta, delta)
    end = loss(theta + alpha * delta)
    print(f"\n5. The line search takes α = {alpha:g}. There the loss is {end:.4f}.")
    return cg_distance, distances


class Comparison(NamedTuple):
    """What section 6 finds of a method."""

    slope: jax.Array  # grad·δ, of its first step
    curve: jax.Array  # the loss at θ_t + α δ, for each α of SHOWN
    parabola: jax.Array  # m there
    losses: list  # before and after each step in training


def teach_comparison(logits, loss, theta):
    """Prints section 6. Returns {method: a Comparison}."""
    lowest = jnp.linalg.eigvalsh(jax.hessian(loss)(theta))[0]
    print(f"\n6. The smallest eigenvalue of the Hessian is {lowest:.4f}. The three steps compared:")
    print("                  slope     loss     α of the      loss after")
    print("                 grad·δ  at θ_t+δ  line search  15 such steps")
    results = {}
    for method in LOOKS:
        C, delta, slope = compute_step(method, logits, loss, theta)
        curve = losses_along(loss, theta, delta, SHOWN)
        curvature = delta @ C @ delta
        parabola = curve[0] + slope * SHOWN + curvature / 2 * SHOWN**2
        losses = train(logits, loss, theta, method)
        alpha = line_search(loss, theta, delta)
        end = loss(theta + delta)
        print(f"   {method:12}{slope:9.4f}{end:10.4f}{alpha:13g}{losses[-1]:15.4f}")
        results[method] = Comparison(slope, curve, parabola, losses)
    return results


def count_uphill(logits, loss):
    """{method: how many of its steps lead uphill, of one from each of 100 random θ_t}."""
    uphill = dict.fromkeys(LOOKS, 0)
    for seed in range(100):
        theta, _ = ravel_pytree(init(seed))
        for method in LOOKS:
            uphill[method] += int(compute_step(method, logits, loss, theta).slope > 0)
    return uphill


def draw(results):
    """The picture of section 6: the loss along the first steps, and in training."""
    figure = Figure((9, 3.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, (color, marker) in LOOKS.items():
        found = results[method]
        at_one = [list(SHOWN).index(1)]
        left.plot(SHOWN, found.curve, color=color, marker=marker, markevery=at_one)
        left.plot(SHOWN, found.parabola, "--", color=color)
        right.plot(found.losses, color=color, marker=marker, label=method)
    left.axvline(1, color="lightgrey", zorder=0)
    left.set(title="Along the first step (dashed: m)")
    left.set(xlabel="α", ylabel="loss at θ_t + α δ")
    right.set(title="Training", xlabel="steps, each with a line search", ylabel="loss", ylim=0)
    right.legend(frameon=False)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def teach(out):
    """The whole lesson; the picture goes into the folder `out`. Returns what the tests check."""
    theta, _, logits, loss = functions_of_theta(CONFIG, init(SEED), make_batch())
    one_step = teach_one_step(logits, loss, theta)

    comparison = teach_comparison(logits, loss, theta)
    uphill = count_uphill(logits, loss)
    newton, gauss_newton = uphill["Newton"], uphill["Gauss-Newton"]
    print("   A positive slope leads uphill. We chose this θ_t to show it: of the steps from 100")
    print(f"   random θ_t, {newton} of Newton and {gauss_newton} of Gauss-Newton lead uphill.")
    path = out / "tutorial.png"
    out.mkdir(parents=True, exist_ok=True)
    draw(comparison).savefig(path)
    print(f"   {path} shows the loss along the three steps, and in training.")

    print("\n7. Relative errors of gn.value_and_grad, against the formulas for m(δ), grad and G δ:")
    errors = {"MLP": errors_of_gn(CONFIG, init(SEED), make_batch())}
    errors["LLaMA"] = errors_of_gn(*make_llama())
    for name, (value, grad, G_delta) in errors.items():
        print(f"   {name:6} m(δ) {value:.0e}, grad {grad:.0e}, G δ {G_delta:.0e}")

    print(OWN_NETWORK)
    return one_step, comparison, uphill, errors


ABOUT = "Gauss-Newton on a network so small that its matrix G can be written down and inverted"


@command
def main(words):
    """Runs the command line."""
    parser = flags.Parser(description=ABOUT)
    out_help = "folder of the picture [default figures]"
    parser.add_argument("--out", type=Path, default="figures", help=out_help)
    with blaming_input():
        options = parser.parse_args(words)
    files.check_writable(options.out)  # now, not when all is computed
    # A CPU is fast enough, and every CPU computes in 64 bits.
    jax.config.update("jax_platforms", "cpu")
    # The programs are small: optimizing them takes longer than it saves.
    jax.config.update("jax_disable_most_optimizations", True)
    # Numbers of 64 bits, to see that what is equal is so to 14 digits.
    with jax.enable_x64(True):
        teach(options.out)


if __name__ == "__main__":
    sys.exit(main())
