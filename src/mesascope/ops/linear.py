"""Causal linear attention with forgetting factors, and the delta rule: chunk-parallel, linear in time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mesascope.ops.chunks import Chunks, describe, join, keep, recurrence, split
from mesascope.ops.factor import matmul, transpose, unit_lower_inverse

CHUNK = 64


def linear_chunked(
    queries: Float[Array, "batch time key"],
    keys: Float[Array, "batch time key"],
    values: Float[Array, "batch time value"],
    log_decay: Float[Array, "batch time"] | None = None,
    runs: Int[Array, "batch time"] | None = None,
    initial: Float[Array, "batch value key"] | None = None,
    chunk_size: int = CHUNK,
) -> tuple[Float[Array, "batch time value"], Float[Array, "batch value key"]]:
    r"""$o_t = S_t q_t$ with $S_t = \gamma_t S_{t-1} + v_t k_t^\top$; returns all $o_t$ and the last $S$."""
    time = queries.shape[1]
    size = min(chunk_size, time)
    q, k, v = (split(a, size) for a in (queries, keys, values))
    at = describe(log_decay, runs, size)
    decayed_keys = k if at.decay is None else k * jnp.exp(at.decay[..., -1:] - at.decay)[..., None]
    added = matmul(transpose(v), keep(at.last, decayed_keys))
    out = matmul(matmul(q, transpose(k)) * attenuation(at, q.dtype), v)
    if initial is None and k.shape[1] == 1:
        return join(out, time), added[:, 0]
    if initial is None:
        initial = jnp.zeros((k.shape[0], v.shape[-1], k.shape[-1]), k.dtype)
    before, final = recurrence(at.step(k), added, initial)
    reach = q if at.decay is None else q * jnp.exp(at.decay)[..., None]
    out = out + matmul(keep(at.carried, reach), transpose(before))
    return join(out, time), final


def attenuation(at: Chunks, dtype: jnp.dtype) -> Float[Array, "... size size"]:
    r"""$\zeta_{ti} = e^{c_t - c_i}$ for what token t may see, and 0 for the rest."""
    if at.decay is None:
        return at.causal.astype(dtype)
    difference = at.decay[..., :, None] - at.decay[..., None, :]
    return jnp.where(at.causal, jnp.exp(jnp.where(at.causal, difference, 0.0)), 0.0)


def reverse_time(
    log_decay: Float[Array, "batch time"] | None, runs: Int[Array, "batch time"] | None
) -> tuple[Array | None, Array | None]:
    r"""Decay and runs for the same sequence read backwards, so that the attenuation between any two
    tokens, $\prod_{i<j\le t}\gamma_j$, stays what it was."""
    if log_decay is not None:
        log_decay = jnp.flip(jnp.pad(log_decay[:, 1:], ((0, 0), (0, 1))), 1)
    if runs is not None:
        runs = jnp.flip(runs[:, -1:] - runs, 1)
    return log_decay, runs


def delta_chunked(
    queries: Float[Array, "batch time key"],
    keys: Float[Array, "batch time key"],
    values: Float[Array, "batch time value"],
    beta: Float[Array, "batch time"],
    log_decay: Float[Array, "batch time"] | None = None,
    runs: Int[Array, "batch time"] | None = None,
    initial: Float[Array, "batch value key"] | None = None,
    chunk_size: int = CHUNK,
) -> tuple[Float[Array, "batch time value"], Float[Array, "batch value key"]]:
    r"""Delta-Net: $\Phi_t = \gamma_t\Phi_{t-1} + \beta_t (v_t - \gamma_t\Phi_{t-1} k_t) k_t^\top$, $o_t = \Phi_t q_t$.

    One gradient step per token on $\tfrac12\lVert v_t - \Phi k_t\rVert^2$ with rate $\beta_t$. Within a chunk
    the innovations $u_t = v_t - \gamma_t\Phi_{t-1}k_t$ solve a unit triangular system,
    $(I + \mathrm{stril}(K K^\top \odot \zeta)\,\mathrm{diag}\beta)\,U = V - e^{c} K \Phi^\top$.
    """
    time = queries.shape[1]
    size = min(chunk_size, time)
    q, k, v = (split(a, size) for a in (queries, keys, values))
    b = split(beta, size)[..., None]
    at = describe(log_decay, runs, size)
    if initial is None:
        initial = jnp.zeros((k.shape[0], v.shape[-1], k.shape[-1]), k.dtype)
    zeta = attenuation(at, q.dtype)
    reach = 1.0 if at.decay is None else jnp.exp(at.decay)[..., None]
    k_in, q_in = keep(at.carried, k * reach), keep(at.carried, q * reach)
    strictly = jnp.tril(matmul(k, transpose(k)) * zeta, -1) * transpose(b)
    # Independent of the carried Φ, so all chunks at once: U = (I + strictly)⁻¹ (V - K_in Φᵀ) = U_v - U_k Φᵀ.
    solved = matmul(unit_lower_inverse(strictly), jnp.concatenate([v, k_in], -1))
    u_v, u_k = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    attention = matmul(q, transpose(k)) * zeta * transpose(b)
    to_end = k * b if at.decay is None else k * b * jnp.exp(at.decay[..., -1:] - at.decay)[..., None]
    to_end = keep(at.last, to_end)

    def body(phi: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        u_v, u_k, to_end, factor = x
        u = u_v - matmul(u_k, transpose(phi))
        return factor[:, None, None] * phi + matmul(transpose(u), to_end), phi

    leading = (jnp.moveaxis(a, 1, 0) for a in (u_v, u_k, to_end, at.step(k)))
    final, before = jax.lax.scan(body, initial, tuple(leading))
    before = jnp.moveaxis(before, 0, 1)
    u = u_v - matmul(u_k, transpose(before))
    out = matmul(q_in, transpose(before)) + matmul(attention, u)
    return join(out, time), final
