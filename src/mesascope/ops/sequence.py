"""What the whitening methods pass around: a sequence, the weights of its pairs, what a chunk leaves behind."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mesascope.ops.chunks import Chunks


class Sequence(NamedTuple):
    """What the exact methods take: flat batch, one floating dtype, a state in square-root form."""

    queries: Float[Array, "batch time key"]
    keys: Float[Array, "batch time key"]
    values: Float[Array, "batch time value"]
    lam: Float[Array, "batch key"]
    log_decay: Float[Array, "batch time"] | None
    beta: Float[Array, "batch time"] | None
    runs: Int[Array, "batch time"] | None
    factor: Float[Array, "batch key key"] | None
    weights: Float[Array, "batch value key"] | None


TIMED = ("queries", "keys", "values", "log_decay", "beta", "runs")


class State(NamedTuple):
    """The square root F of R = F Fᵀ, and Φᵀ (transposed like F, because K meets both)."""

    factor: Float[Array, "*batch key key"]
    weights_t: Float[Array, "*batch key value"]


class Saved(NamedTuple):
    """Per chunk: Mᵀ, E, G⁻ᵀ, and the state it started from unless that is to be rebuilt from the state after it.

    (Where no run ends: R = R' + MᵀM, Φ = Φ' - EᵀM.)
    Transposed where that spares later products a transposed left operand, which is slow on CPUs.
    """

    mt: Float[Array, "batch chunk key size"]
    e: Float[Array, "batch chunk size value"]
    g_inverse_t: Float[Array, "batch chunk size size"]
    before: State | None


def pair_weights(beta: Array | None, at: Chunks) -> Array | None:
    """w, [batch, chunk, size, 1]."""
    if beta is None and at.decay is None:
        return None
    w = jnp.ones((1, 1, 1)) if at.decay is None else jnp.exp(-0.5 * at.decay)
    return (w if beta is None else w.astype(beta.dtype) * jnp.sqrt(beta))[..., None]


def scaled(w: Array | None, array: Array) -> Array:
    return array if w is None else w * array


def per_chunk(at: Chunks) -> Chunks:
    """Without the fields that all chunks share, which a loop over chunks must not slice."""
    return at if at.carried is not None else at._replace(causal=None)
