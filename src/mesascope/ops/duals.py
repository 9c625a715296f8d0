r"""The backward pass of the whitening methods: dual variables within chunks, suffix sums across them.

With $x_t = R_t q_t$ and $z_t = \Phi_t^\top \bar o_t$, every gradient is a sum over later tokens of products of these
with the dual variables $\alpha_{it} = k_i^\top x_t$ and $\rho_{it} = \bar o_t^\top (v_i - \Phi_t k_i)$; README.md
beside this file has the formulas. Nothing here depends on the order in which chunks are visited but the sums.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mesascope.ops.chunks import Chunks, describe, join, keep, recurrence, scan_chunks, split
from mesascope.ops.factor import matmul, transpose
from mesascope.ops.sequence import TIMED, Saved, Sequence, State, pair_weights, per_chunk, scaled


class Adjoint(NamedTuple):
    """Gradient with respect to what lies behind a point in time.

    Attributes:
        gram: $W = \\sum_t \\zeta_t (x_t z_t^\\top + z_t x_t^\\top)$ over the tokens ahead.
        moment: $P = \\sum_t \\zeta_t x_t \\bar o_t^\\top$.
        covariance: $\\bar R$, kept only where a state came in.
        weights: $\\bar\\Phi$, likewise.
    """

    gram: Float[Array, "batch key key"]
    moment: Float[Array, "batch key value"]
    covariance: Float[Array, "batch key key"] | None
    weights: Float[Array, "batch value key"] | None


def backward(
    seq: Sequence, saved: Saved, after: State, size: int, parallel: bool, cotangent: Array, ahead: Adjoint
) -> tuple[Sequence, Adjoint]:
    """Gradients of everything but the state (and of log_decay: the summand only), and the adjoint before."""
    time = seq.queries.shape[1]
    at = describe(seq.log_decay, seq.runs, size)
    beta = None if seq.beta is None else split(seq.beta, size)
    chunk = _Chunk(
        *(split(a, size) for a in (seq.queries, seq.keys, seq.values, cotangent)),
        beta=beta,
        w=pair_weights(beta, at),
        at=at,
        saved=saved,
    )
    walk = _Walk(_squared(after.factor), after.weights_t, ahead.gram, ahead.moment)
    step = at.step(chunk.k)

    def all_at_once(chunk: _Chunk, step: Array, walk: _Walk) -> tuple[Array, Array, Sequence]:
        if saved.before is None:
            explained, learned = matmul(saved.mt, transpose(saved.mt)), matmul(saved.mt, saved.e)
            r, _ = recurrence(step, explained, walk.r, True, True)
            phi_t, _ = recurrence(jnp.ones_like(step), -learned, walk.phi_t, True, True)
            walk = walk._replace(r=r, phi_t=phi_t)
        near = _duals(chunk, *_start(chunk, step, walk), seq.lam[:, None])
        gram, gram_behind = recurrence(step, near.gram, ahead.gram, True, True)
        moment, moment_behind = recurrence(step, near.moment, ahead.moment, True, True)
        return gram_behind, moment_behind, _chunk_gradients(chunk, near, gram, moment)

    def one_by_one(chunk: _Chunk, step: Array, walk: _Walk) -> tuple[Array, Array, Sequence]:
        def body(walk, x):
            here, step = x
            here = here if at.carried is not None else here._replace(at=here.at._replace(causal=at.causal))
            r, phi_t = _start(here, step, walk)
            near = _duals(here, r, phi_t, seq.lam)
            gradients = _chunk_gradients(here, near, walk.gram, walk.moment)
            step = step[:, None, None]
            return _Walk(r, phi_t, step * walk.gram + near.gram, step * walk.moment + near.moment), gradients

        chunks = chunk._replace(at=per_chunk(at)), step
        walk, gradients = scan_chunks(body, walk, chunks, reverse=True)
        return walk.gram, walk.moment, gradients

    if parallel or size < 8:  # many short chunks: a tree of sums rounds better than a chain
        gram, moment, gradients = all_at_once(chunk, step, walk)
    else:  # on a CPU one chunk at a time stays in cache; a GPU wants them all
        ways = dict(cpu=one_by_one, default=all_at_once)
        gram, moment, gradients = jax.lax.platform_dependent(chunk, step, walk, **ways)
    covariance_bar = weights_bar = None
    if ahead.covariance is not None and ahead.weights is not None:
        covariance_bar, weights_bar = _state_walk(ahead.covariance, ahead.weights, chunk)
    timed = {n: join(a, time) for n in TIMED if (a := getattr(gradients, n)) is not None}
    rest = gradients._replace(**timed, lam=jnp.sum(gradients.lam, 1) / seq.lam**2)
    return rest, Adjoint(gram, moment, covariance_bar, weights_bar)


class _Chunk(NamedTuple):
    """Everything the backward pass knows about one chunk (or all of them, with a leading axis)."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array | None
    w: Array | None
    at: Chunks
    saved: Saved


class _Walk(NamedTuple):
    """What the walk back knows at a point in time: R and Φᵀ there, and W and P of what lies ahead."""

    r: Array
    phi_t: Array
    gram: Array
    moment: Array


def _start(chunk: _Chunk, step: Array, after: _Walk) -> tuple[Array, Array]:
    """R and Φᵀ at the start of a chunk."""
    mt, e, _, before = chunk.saved
    if before is not None:
        return _squared(before.factor), before.weights_t
    return step[..., None, None] * after.r + matmul(mt, transpose(mt)), after.phi_t - matmul(mt, e)


def _squared(factor: Array) -> Array:
    """F Fᵀ, what the diagonal alone gives added last: where λ is small that is nearly everything."""
    diagonal = jnp.diagonal(factor, axis1=-2, axis2=-1)
    eye = jnp.eye(factor.shape[-1], dtype=factor.dtype)
    rest = factor * (1 - eye)
    cross = rest * diagonal[..., None, :]
    return (
        matmul(rest, transpose(rest)) + cross + transpose(cross) + eye * (diagonal * diagonal)[..., None, :]
    )


class _Near(NamedTuple):
    """Dual variables within a chunk, and what the chunk adds to the adjoint of the state before it."""

    x: Array  # rows e^{c_t} R_t q_t
    z: Array  # rows Φ_tᵀ ō_t
    alpha: Array  # [i, t]: w_i k_iᵀ x_t
    rho: Array  # [i, t]: w_i ō_tᵀ (v_i - Φ_t k_i)
    gram: Array
    moment: Array


def _duals(chunk: _Chunk, r: Array, phi_t: Array, lam: Array) -> _Near:
    q, g, at = chunk.q, chunk.g, chunk.at
    mt, e, g_inverse_t = chunk.saved[:3]
    qm = jnp.where(at.causal, matmul(q, mt), 0.0)
    ge = jnp.where(at.causal, matmul(g, transpose(e)), 0.0)
    x = matmul(q, r)
    if at.carried is not None:
        x = jnp.where(at.carried[..., None], x, q * lam[..., None, :])
    x = x - matmul(qm, transpose(mt))
    z = keep(at.carried, matmul(g, transpose(phi_t))) + matmul(ge, transpose(mt))
    # A transposed left operand takes a slow kernel on CPUs: transpose first.
    xt = jax.lax.optimization_barrier(transpose(keep(at.carried, x)))
    gram = matmul(xt, z)
    alpha, rho = matmul(g_inverse_t, transpose(qm)), matmul(g_inverse_t, transpose(ge))
    return _Near(x, z, alpha, rho, gram + transpose(gram), matmul(xt, g))


def _chunk_gradients(chunk: _Chunk, near: _Near, gram: Array, moment: Array) -> Sequence:
    """Gradients with respect to a chunk's inputs, given the sums W and P over what comes after it."""
    q, k, v, g, beta, w, at, _ = chunk
    x, z, alpha, rho = near[:4]
    unit = None if at.decay is None else jnp.exp(-0.5 * at.decay)[..., None]
    if beta is not None and w is not None:
        # Where the pair has no weight, neither have its dual variables: take them from their definition.
        safe = jnp.where(w > 0, w, 1.0)
        ahead = transpose(at.causal)
        direct_alpha = jnp.where(ahead, matmul(k, transpose(x)), 0.0)
        direct_rho = jnp.where(ahead, matmul(v, transpose(g)) - matmul(k, transpose(z)), 0.0)
        alpha = scaled(unit, jnp.where(w > 0, alpha / safe, direct_alpha))
        rho = scaled(unit, jnp.where(w > 0, rho / safe, direct_rho))
    later_k = keep(at.last, matmul(v, transpose(moment)) - matmul(k, gram))
    later_v = keep(at.last, matmul(k, moment))
    if at.decay is not None:
        to_end = jnp.exp(at.decay[..., -1:] - at.decay)[..., None]
        later_v, later_k = to_end * later_v, to_end * later_k
    k_bar = scaled(unit, matmul(rho, x) - matmul(alpha, z)) + later_k
    v_bar = scaled(unit, matmul(alpha, g)) + later_v
    beta_bar = None
    if beta is not None:
        beta_bar = 0.5 * (jnp.sum(k * k_bar, -1) + jnp.sum(v * v_bar, -1))
        k_bar, v_bar = beta[..., None] * k_bar, beta[..., None] * v_bar
    decay_bar = None if at.decay is None else jnp.sum(k * k_bar, -1) + jnp.sum(v * v_bar, -1)

    # λ enters where a run starts afresh within the chunk.
    lam_bar = jnp.zeros_like(q[..., 0, :])
    if at.carried is not None and at.through is not None:
        ends = 0.5 * jnp.diagonal(gram, axis1=-2, axis2=-1)
        ends = ends if at.total is None else ends * jnp.exp(at.total)[..., None]
        lam_bar = jnp.sum(jnp.where(at.carried[..., None], 0.0, x * z), -2)
        lam_bar = lam_bar + jnp.where(at.through[..., None], 0.0, ends)
    return Sequence(z, k_bar, v_bar, lam_bar, decay_bar, beta_bar, runs=None, factor=None, weights=None)


def _state_walk(covariance_bar: Array, weights_bar: Array, chunk: _Chunk) -> tuple[Array, Array]:
    """R̄ and Φ̄ at the start, walking back over chunks. Only the inherited run depends on them."""
    q, g, wk, at = chunk.q, chunk.g, scaled(chunk.w, chunk.k), chunk.at
    m, e, g_inverse_t = transpose(chunk.saved.mt), chunk.saved.e, chunk.saved.g_inverse_t
    alive = jnp.ones(q.shape[:2], bool)
    if at.carried is not None and at.through is not None:
        alive = jnp.cumprod(at.through, axis=1).astype(bool)
        begins = jnp.pad(alive[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        q, g, wk, m, e = (keep(at.carried & begins[..., None], a) for a in (q, g, wk, m, e))
    growth = jnp.where(alive, 1.0 if at.total is None else jnp.exp(-at.total), 0.0)
    causal = jnp.broadcast_to(at.causal, g_inverse_t.shape)
    eye = jnp.eye(q.shape[-1], dtype=q.dtype)

    def body(adjoint, inputs):
        r_bar, phi_bar = adjoint
        q, g, wk, m, e, back, causal, growth, alive = inputs
        r_bar = growth[:, None, None].astype(q.dtype) * r_bar
        phi_bar = jnp.where(alive[:, None, None], phi_bar, 0.0)
        gm, ge = matmul(back, m), matmul(back, e)
        alpha = matmul(back, transpose(jnp.where(causal, matmul(q, transpose(m)), 0.0)))
        rho = matmul(back, transpose(jnp.where(causal, matmul(g, transpose(e)), 0.0)))
        v_bar = matmul(alpha, g) + matmul(gm, transpose(phi_bar))
        j = eye - matmul(transpose(wk), gm)
        r_bar = (
            matmul(matmul(j, r_bar), transpose(j))
            + matmul(transpose(wk), matmul(rho, q - matmul(transpose(alpha), wk)))
            + matmul(matmul(transpose(wk), ge), matmul(phi_bar, transpose(j)))
        )
        phi_bar = phi_bar + matmul(transpose(g), q) - matmul(transpose(v_bar), wk)
        return (0.5 * (r_bar + transpose(r_bar)), phi_bar), ()

    inputs = (q, g, wk, m, e, g_inverse_t, causal, growth, alive)
    (r_bar, phi_bar), _ = scan_chunks(body, (covariance_bar, weights_bar), inputs, reverse=True)
    return r_bar, phi_bar
