"""GN-prox-linear (Algorithm 2): the network is linearized, the loss stays exact.

    L1(θ_t + δ) = ℓ(z + v),     v = J δ,  z = f(θ_t)            (Section 6.2)
    ∇L1 = Jᵀ u,                 u = ∇ℓ(z + v)

Gauss-Newton makes two replacements, of the network and then of the loss. L1 has only the first, and
L2 has both. (L1 is not the L1 norm.) L1 is convex in δ, because ℓ is convex in the logits, but it
is not quadratic. So this is no second-order method. The paper takes it to measure what Gauss-Newton
loses by dropping the terms of ℓ beyond the second order. Its gradient differs from Gauss-Newton's
by O(|δ|²).

All the rest is gn.py. The defaults differ: the learning rate falls once over the whole run, there
is no line search, and the running mean of θ is evaluated in its place.
"""

from dataclasses import dataclass

import jax

import gn
import model
from gn import init, lower, update  # noqa: F401  as there; inner_loss is L1
from kernels import on_gpu
from kernels.cross_entropy import exact_kernel
from runtime.flags import traced


@traced
@dataclass(frozen=True)
class Config(gn.Config):
    """Settings of GN-prox-linear: those of Gauss-Newton, with other defaults."""

    # global cosine | constant+inner cosine | global+inner cosine | constant (Section 6.2)
    schedule: str = "global cosine"
    line_search: int = 0  # how many α = 2^(-i/2) are tried; 0 = no search, α = 1 (Section 6.2)

    def value_and_grad(self, theta0, delta, tokens):
        """ℓ at θ_t, L1 at θ_t + δ, and the gradient of L1 in the parameters: means over tokens."""
        return gn.value_and_grad(theta0, delta, tokens, self, exact)


@on_gpu(exact_kernel)
def exact(z, v, y, loss=model.cross_entropy):
    """ℓ at θ_t and L1 at θ_t + δ, summed over c tokens; and L1's gradient in v, ∇ℓ(z + v), [c, V].

    z: f(θ_t), [c, V]; v: J δ, [c, V]; y: labels, int32 [c]; loss(z, y): a sum over tokens.
    """
    L1, u = jax.value_and_grad(loss)(z + v, y)
    return loss(z, y), L1, u
