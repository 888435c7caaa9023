"""GN-prox-linear (Algorithm 2): the model is linearized, the loss stays exact.

    L1(θ_t + δ) = ℓ(z + v),     v = J δ            (Section 6.2)
    ∇L1 = Jᵀ ∇ℓ(z + v)

It is convex in δ as ℓ is in the logits, but not quadratic, so this is no second-order method: what it gains over
Gauss-Newton is what the loss's higher-order terms are worth. Its gradient differs from Gauss-Newton's by O(|δ|²).

All the rest is gn.py. The defaults differ: the learning rate falls once over the whole run, there is no line search,
and what is evaluated is the average of the weights over inner steps.
"""

from dataclasses import dataclass

import jax

import gn
from gn import init  # noqa: F401  the same State
from kernels.cross_entropy import cross_entropy, fused, usable


@dataclass(frozen=True)
class Config(gn.Config):
    """Settings of GN-prox-linear: those of Gauss-Newton, with other defaults."""

    schedule: str = gn.SCHEDULES[1]  # Section 6.2; also constant+inner cosine, global+inner cosine, constant
    inner: str = "muon"  # muon | adamw: inner optimizer (Section 5.1)
    line_search: int = 0  # step sizes α = 2^(-i/2) tried on a fresh batch; 0 = no line search, α = 1 (Section 6.2)

    def __post_init__(self):
        super().__post_init__()
        if self.inner == "cg":
            raise ValueError("inner is 'cg', which solves quadratic problems; valid with this objective: muon, adamw")


def exact(z, v, y, ell=cross_entropy):
    """ℓ(z), and for each change of the logits L1 = ℓ(z + v) and its gradient; arguments as gn.quadratic."""
    if ell is cross_entropy and usable(z):
        return fused("exact", z, y, v)
    loss = lambda z: ell(z, y)
    return loss(z), *jax.lax.map(lambda v: jax.value_and_grad(loss)(z + v), v.astype(z.dtype))


def update(state, batches, fresh, config, watch=lambda state: None):
    """One outer step of Algorithm 2; arguments, State and metrics as gn.update's, inner_loss being L1."""
    return gn.update(state, batches, fresh, config, watch, exact)
