"""The update rules AdamW and Muon as optax transformations; learning rates and averages over time.

    AdamW:  θ - lr m / √v                     m, v: running means of the gradient g and of g²
    Muon:   θ - lr √max(1, out/in) U Vᵀ       U S Vᵀ: Nesterov momentum of a matrix's gradient

Each rule also subtracts lr · weight_decay · θ from every matrix: the W of AdamW. Bias corrections
are left out here, and so is the 1e-8 that is added to √v. A third rule, SOAP, is in soap.py.

An optax transformation is a pair of functions. `init(params)` returns its state;
`update(grads, state, params)` returns the step, to be added to the parameters, and the next state.
`optax.chain` applies several in a row.

The baselines use these rules on the loss (baselines.py), Gauss-Newton uses Muon or AdamW on L2
(gn.py). Numbers such as lr may be traced: one compiled program serves all values.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax

import model
from runtime import parallel

# ---- which parameters are treated alike ----------------------------------------------------------


ENDS = ("embedding", "head")  # the first and the last matrix, which are in no block


def map_names(f, params):
    """The tree of f(name) for each parameter, by its own name in the nested dict."""
    return jax.tree_util.tree_map_with_path(lambda path, _: f(path[-1].key), params)


def groups(params):
    """The group of each parameter: "embedding", "head", "matrices" (of blocks) or "vectors".

    The vectors are the norms and biases, and whatever has another name in a network of your own.
    """

    def group(name):
        if name in ENDS:
            return name
        return "matrices" if name in model.MATRICES else "vectors"

    return map_names(group, params)


def is_matrix(params):
    """True for every matrix: the groups embedding, head and "matrices"; False for the vectors."""
    return jax.tree.map(lambda group: group != "vectors", groups(params))


@parallel.jit
def norms_of_step(theta0, theta):
    """‖θ - θ_t‖ over each group of parameters: {"norm_matrices": number, ..}."""
    delta = jax.tree.map(jnp.subtract, theta, theta0)
    group_of_each = jax.tree.leaves(groups(delta))
    arrays = {}
    for group, a in zip(group_of_each, jax.tree.leaves(delta), strict=True):
        arrays.setdefault(group, []).append(a)
    return {f"norm_{group}": optax.tree.norm(members) for group, members in arrays.items()}


# ---- AdamW and Muon ------------------------------------------------------------------------------


def clip_by_norm(limit):
    """Scales a gradient down to the norm `limit`, over all its arrays; 0 = never."""
    return optax.clip_by_global_norm(jnp.where(limit > 0, limit, jnp.inf))


def clip_ends_apart(limit):
    """Scales two gradients down, each by its own norm: embedding with head, and all the rest."""

    def clipped_with(name):
        return "ends" if name in ENDS else "rest"

    clip = clip_by_norm(limit)
    return optax.partition({"ends": clip, "rest": clip}, partial(map_names, clipped_with))


def adamw(lr, b1, b2, weight_decay, clip):
    """AdamW on all parameters; b1, b2: decays of the running means m and v."""
    rule = optax.adamw(lr, b1, b2, weight_decay=weight_decay, mask=is_matrix)
    return optax.chain(clip_by_norm(clip), rule)


def muon(lr, momentum, weight_decay, clip, dtype="float32", b2=0.999):
    """Muon on the matrices inside the blocks, Adam on the rest.

    dtype: of the products in Muon; b2: decay of Adam's v. As in the paper's code, norms and biases
    get Adam with Nesterov momentum, embedding and head get AdamW.

    For the blocks, optax.contrib.muon does the same. It is taken apart here so that only
    Newton-Schulz is rounded to bfloat16, and so that devices share its work
    (docs/performance.md).
    """
    matrices = optax.chain(
        nesterov(momentum),
        orthogonalize(dtype),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(lr),
    )
    vectors = optax.nadam(lr, 0.9, b2)
    ends = optax.adamw(lr, 0.9, b2, weight_decay=weight_decay)
    rules = {"matrices": matrices, "vectors": vectors, "embedding": ends, "head": ends}
    return optax.chain(clip_ends_apart(clip), optax.partition(rules, groups))


def nesterov(b):
    """Nesterov momentum: b m / (1 - b^(t+1)) + (1 - b) g / (1 - b^t) at update t = 1, 2, ...

    m is the running mean of the gradient g, with decay b. It starts at zero, which is divided out.
    """

    def update(g, state, params=None):
        t = state.count + 1
        m = optax.tree.update_moment(g, state.ema, b, 1)
        g_unbiased = optax.tree.bias_correction(g, b, t)
        m_unbiased = optax.tree.bias_correction(m, b, t + 1)
        ahead = optax.tree.update_moment(g_unbiased, m_unbiased, b, 1)
        return ahead, optax.EmaState(t, m)

    return optax.GradientTransformation(optax.ema(b).init, update)


def orthogonalize(dtype):
    """Turns each matrix U S Vᵀ of a tree of stacks [L, in, out] into about √max(1, out/in) U Vᵀ.

    Newton-Schulz needs no decomposition for that. A matrix A is divided by its Frobenius norm, so
    that no singular value is above 1. Then five times A <- c1 A + c2 (A Aᵀ) A + c3 (A Aᵀ)² A, with
    c1, c2, c3 = 3.4445, -4.775, 2.0315, brings those of 0.01 or more to between 0.68 and 1.14. Here
    it is optax's Muon: with lr -1 and no momentum, only this and the factor √max(1, out/in) is left
    of it.
    """
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    rule = optax.contrib.muon(
        -1.0, beta=0.0, nesterov=False, muon_weight_dimension_numbers=lambda _: axes
    )

    def of_stack(matrices):
        state = rule.init(matrices)
        step, _ = rule.update(matrices, state, matrices)
        return step

    def update(momentum, params):
        rounded = momentum
        if dtype == "bfloat16":
            rounded = optax.tree.cast(momentum, jnp.bfloat16)
        steps = in_stacks(of_stack, rounded)
        return optax.tree.cast_like(steps, momentum)

    return optax.stateless(update)


def in_stacks(f, tree):
    """f of every matrix of a tree. f gets all matrices of one shape as one stack [n, in, out].

    The tree's arrays are matrices, or stacks of them. Devices share the matrices of a stack, so f
    must treat each for itself.
    """
    stacks = join_by_shape(tree)
    results = jax.tree.map(parallel.shared(f), stacks)
    # Joining only moves numbers, so its transpose is its inverse: it takes the stacks apart.
    (results,) = jax.linear_transpose(join_by_shape, tree)(results)
    return results


def join_by_shape(tree):
    """{(in, out): [n, in, out]}: all matrices of one shape in one stack, which is quicker."""
    stacks = {}
    for a in jax.tree.leaves(tree):
        shape = a.shape[-2:]
        stacks.setdefault(shape, []).append(a.reshape(-1, *shape))
    return {shape: jnp.concatenate(arrays) for shape, arrays in stacks.items()}


# ---- learning rates and averages over time -------------------------------------------------------


def progress(x, start=0.0):
    """How far x is on its way from `start` to 1: 0 before, 1 after."""
    return jnp.clip((x - start) / (1 - start), 0, 1)


def cosine(x):
    """Half a cosine: 1 at x = 0, 0 at x = 1."""
    return (1 + jnp.cos(jnp.pi * x)) / 2


def rise(step, steps):
    """A linear rise over `steps` steps, the first of which is step 0: 1 from step steps - 1 on."""
    return jnp.minimum(1, (step + 1) / jnp.maximum(1, steps))


def update_average(average, params, tau):
    """The weight average after one more step, τ average + (1 - τ) params; None if there is none."""
    if average is None:
        return None
    return optax.incremental_update(params, average, 1 - tau)


def weights(state):
    """The weights to evaluate, of any method's State: the average where there is one."""
    return state.params if state.average is None else state.average


def scale_matrices(params, factor):
    """The parameters with every matrix times a factor."""

    def scale(a, matrix):
        return factor * a if matrix else a

    return jax.tree.map(scale, params, is_matrix(params))
