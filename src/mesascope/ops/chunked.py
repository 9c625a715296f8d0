r"""The mesa-layer exactly and in parallel: whitened keys, innovations, and a square-root state.

With $R = F F^\top$ the inverse Gram matrix and $\Phi$ the weights at the start of a chunk, and
$B = K F$, $A = I + B B^\top = G G^\top$:

    M̃ = G⁻¹ B        M = M̃ Fᵀ            whitened keys
    E = G⁻¹ (V - K Φᵀ)                    normalized innovations
    O = Q Φᵀ + tril(Q Mᵀ) E               one causal linear attention
    F ← F - Mᵀ (I+G)⁻¹ B,   Φ ← Φ + Eᵀ M

The update of F (Andrews' form of Potter's square-root filter) satisfies
$F_{new} F_{new}^\top = R - M^\top M$ exactly and cannot lose positive definiteness. Forgetting factors and
weights of pairs enter as $w_i = \sqrt{\beta_i} e^{-c_i/2}$ on keys and values. README.md beside this file has the
derivation; the gradients below are its closed forms, and nothing is differentiated through a factorization.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mesascope.ops.chunks import (
    Chunks,
    describe,
    join,
    keep,
    recurrence,
    scan_chunks,
    split,
    sum_to_end,
)
from mesascope.ops.factor import at_most_one, lower_blocks, matmul, platform_whitening, transpose, whitening
from mesascope.ops.gradients import with_closed_form


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


_TIMED = ("queries", "keys", "values", "log_decay", "beta", "runs")


class _Saved(NamedTuple):
    """Per chunk: Mᵀ, E, G⁻ᵀ and the state [F | Φᵀ] it started from.

    Transposed where that spares later products a transposed left operand, which is slow on CPUs; F and Φᵀ
    side by side because K meets both.
    """

    mt: Float[Array, "batch chunk key size"]
    e: Float[Array, "batch chunk size value"]
    g_inverse_t: Float[Array, "batch chunk size size"]
    state: Float[Array, "batch chunk key key+value"]

    @property
    def factor(self) -> Float[Array, "batch chunk key key"]:
        return self.state[..., : self.state.shape[-2]]

    @property
    def weights_t(self) -> Float[Array, "batch chunk key value"]:
        return self.state[..., self.state.shape[-2] :]


def default_chunk_size(time: int, key: int, decays: bool) -> int:
    """Chunks hardly longer than the keys are wide (the error grows beyond that), evenly filled.

    Forgetting narrows what a chunk may span; a GPU prefers fewer, larger ones.
    """
    longest = 16 if decays else 64 if jax.default_backend() == "gpu" else 32
    longest = max(1, min(key + key // 4, longest, time))
    return -(-time // -(-time // longest))


# Beyond this R_ii |k|² (in float32) one more pair cannot be told from rounding error.
_CONDITION = {"float32": 4e6, "float64": 1e15}


def largest_covariance(keys: Array, beta: Array | None) -> Float[Array, " batch"]:
    """A bound for the entries of R beyond which the regularizer is too weak to matter in this precision."""
    energy = jnp.sum(keys * keys, -1)
    energy = jnp.max(energy if beta is None else beta * energy, -1)
    limit = _CONDITION[str(keys.dtype)]
    return jax.lax.stop_gradient(jnp.minimum(limit / jnp.maximum(energy, 1e-30), 1e30))


def well_conditioned(seq: Sequence) -> Sequence:
    """Bound λ and the incoming state where 1/R would drown in rounding errors; elsewhere change nothing."""
    largest = largest_covariance(seq.keys, seq.beta)
    factor = seq.factor
    if factor is not None:
        size = jnp.max(jnp.sum(factor * factor, -1), -1)
        shrink = jnp.sqrt(jnp.minimum(largest / jnp.maximum(size, 1e-30), 1))
        factor = jax.lax.stop_gradient(shrink)[:, None, None] * factor
    return seq._replace(lam=jnp.minimum(seq.lam, largest[:, None]), factor=factor)


def _pair_weights(beta: Array | None, at: Chunks) -> Array | None:
    """w, [batch, chunk, size, 1]."""
    if beta is None and at.decay is None:
        return None
    w = jnp.ones((1, 1, 1)) if at.decay is None else jnp.exp(-0.5 * at.decay)
    return (w if beta is None else w.astype(beta.dtype) * jnp.sqrt(beta))[..., None]


def _scaled(w: Array | None, array: Array) -> Array:
    return array if w is None else w * array


def _start(seq: Sequence) -> tuple[Array, Array]:
    """The state [F | Φᵀ] of a fresh run, [diag √λ | 0], and the one that the sequence begins with."""
    batch, _, d = seq.keys.shape
    factor = jnp.sqrt(seq.lam)[..., None] * jnp.eye(d, dtype=seq.keys.dtype)
    fresh = jnp.concatenate([factor, jnp.zeros((batch, d, seq.values.shape[-1]), factor.dtype)], -1)
    if seq.factor is not None and seq.weights is not None:
        return fresh, jnp.concatenate([seq.factor, transpose(seq.weights)], -1)
    return fresh, fresh


def _parts(state: Array) -> tuple[Array, Array]:
    """F and Φ."""
    d = state.shape[-2]
    return state[..., :d], transpose(state[..., d:])


def _whiten(
    k: Array, v: Array, w: Array | None, at: Chunks, state: Array, lam: Array, whiten: Callable
) -> tuple[Array, Array, Array, Array]:
    """Mᵀ, E, G⁻ᵀ of one chunk (or of many, batched) that starts from [F | Φᵀ], and [-(I+G)⁻¹B | E]."""
    d = k.shape[-1]
    applied = matmul(k, state)
    b, innovation = applied[..., :d], v - applied[..., d:]
    if at.carried is not None:
        b = jnp.where(at.carried[..., None], b, k * jnp.sqrt(lam)[..., None, :])
        innovation = jnp.where(at.carried[..., None], innovation, v)
    b, innovation = _scaled(w, b), _scaled(w, innovation)
    together = None if at.carried is None else at.causal | transpose(at.causal)
    g_inverse, one_plus_g_inverse, white = _white_rows(b, together, whiten)
    e = matmul(g_inverse, innovation)
    minus_n = matmul(one_plus_g_inverse, white) - white  # (I+G)⁻¹ B, as (I+G)⁻¹ G = I - (I+G)⁻¹
    mt = matmul(state[..., :d], transpose(white))
    if at.carried is not None:
        mt = jnp.where(at.carried[..., None, :], mt, transpose(white) * jnp.sqrt(lam)[..., None])
    return mt, e, transpose(g_inverse), jnp.concatenate([minus_n, e], -1)


_ROWS_AT_ONCE = 16  # and no more than keys are wide: fewer are more accurate, more are faster


def _white_rows(b: Array, together: Array | None, whiten: Callable) -> tuple[Array, Array, Array]:
    """G⁻¹, (I+G)⁻¹ and M̃ = G⁻¹B for I + BBᵀ = GGᵀ, with less cancellation than a factorization in one go.

    Where keys repeat themselves, pivots of I + BBᵀ are small differences of large numbers. So the later half
    of the rows is first projected, B₂ ← B₂(I - M̃₁ᵀN₁), and only then squared: the error grows with the
    largest |B|, not with its square.

    Args:
        together: which rows belong to the same run; others do not meet.
    """
    n = b.shape[-2]
    if n <= min(_ROWS_AT_ONCE, b.shape[-1]):
        gram = matmul(b, transpose(b))
        gram = gram if together is None else jnp.where(together, gram, 0.0)
        _, g_inverse, one_plus_g_inverse = whiten(gram + jnp.eye(n, dtype=b.dtype))
        return g_inverse, one_plus_g_inverse, at_most_one(matmul(g_inverse, b))
    half = -(-n // 2)
    first, last = slice(0, half), slice(half, n)

    def meeting(products: Array) -> Array:
        return products if together is None else jnp.where(together[..., last, first], products, 0.0)

    parts = [None if together is None else together[..., s, s] for s in (first, last)]
    i1, j1, m1 = _white_rows(b[..., first, :], parts[0], whiten)
    n1 = m1 - matmul(j1, m1)
    g21 = meeting(matmul(b[..., last, :], transpose(m1)))
    i2, j2, m2 = _white_rows(b[..., last, :] - matmul(g21, n1), parts[1], whiten)
    m2 = m2 - matmul(meeting(matmul(m2, transpose(n1))), m1)  # back to the coordinates of B
    return (
        lower_blocks(i1, at_most_one(-matmul(i2, matmul(g21, i1))), i2),
        lower_blocks(j1, at_most_one(-matmul(j2, matmul(g21, j1))), j2),
        jnp.concatenate([m1, at_most_one(m2)], -2),
    )


def _advance(
    at: Chunks, state: Array, lost: Array, fresh: Array, mt: Array, change: Array
) -> tuple[Array, Array]:
    """The state that the chunk hands on, and what rounding lost of it (added back with the next change)."""
    if at.through is not None and at.last is not None:
        state = jnp.where(at.through[..., None, None], state, fresh)
        lost = jnp.where(at.through[..., None, None], lost, 0.0)
        mt = jnp.where(at.last[..., None, :], mt, 0.0)
    change = matmul(mt, change) + lost
    new = state + change
    lost = change - (new - state)
    if at.total is not None:
        growth = jnp.exp(-0.5 * at.total)[..., None, None]
        growth = jnp.where(jnp.arange(new.shape[-1]) < new.shape[-2], growth, 1.0)
        new, lost = new * growth, lost * growth
    return new, lost


def _per_chunk(at: Chunks) -> Chunks:
    """Without the fields that all chunks share, which a loop over chunks must not slice."""
    return at if at.carried is not None else at._replace(causal=None)


def _attend(q: Array, at: Chunks, saved: _Saved) -> Array:
    """O = Q Φᵀ + tril(Q Mᵀ) E."""
    past = keep(at.carried, matmul(q, saved.weights_t))
    return past + matmul(jnp.where(at.causal, matmul(q, saved.mt), 0.0), saved.e)


def _walk(
    seq: Sequence, q: Array, k: Array, v: Array, w: Array | None, at: Chunks
) -> tuple[Array, _Saved, Array]:
    """The loop over chunks: outputs, what the backward pass needs, and the final [F | Φᵀ]."""
    fresh, start = _start(seq)

    def body(carry, x):
        state, lost = carry
        q, k, v, w, here = x
        here = here if at.carried is not None else here._replace(causal=at.causal)
        mt, e, g_inverse_t, change = _whiten(k, v, w, here, state, seq.lam, platform_whitening)
        saved = _Saved(mt, e, g_inverse_t, state)
        return _advance(here, state, lost, fresh, mt, change), (_attend(q, here, saved), saved)

    carry = (start, jnp.zeros_like(start))
    (state, _), (out, saved) = scan_chunks(body, carry, (q, k, v, w, _per_chunk(at)))
    return out, saved, state


def _jump(
    seq: Sequence, q: Array, k: Array, v: Array, w: Array | None, at: Chunks
) -> tuple[Array, _Saved, Array]:
    """All chunks at once: boundary states from prefix sums of the information H = R⁻¹ and S = ΦH."""
    d = k.shape[-1]
    eye = jnp.eye(d, dtype=k.dtype)
    scale = jnp.sqrt(seq.lam)
    # In units where R_0 = I: keys k·√λ and H ≥ I for every fresh run.
    kn = keep(at.last, _scaled(w, k) * scale[:, None, None, :])
    total = 1.0 if at.total is None else jnp.exp(at.total)[..., None, None]
    gram, moment = matmul(transpose(kn), kn), matmul(transpose(_scaled(w, v)), kn)
    if at.through is not None:
        gram = gram + jnp.where(at.through[..., None, None], 0.0, eye)
    h0 = jnp.broadcast_to(eye, (k.shape[0], d, d))
    s0 = jnp.zeros((k.shape[0], v.shape[-1], d), k.dtype)
    if seq.factor is not None and seq.weights is not None:
        inverse = jnp.linalg.inv(seq.factor) * scale[:, None, :]
        h0 = matmul(transpose(inverse), inverse)
        s0 = matmul(seq.weights / scale[:, None, :], h0)
    h, h_final = recurrence(at.step(k), total * gram, h0, False, True)
    s, s_final = recurrence(at.step(k), total * moment, s0, False, True)
    h, s = (jnp.concatenate([a, b[:, None]], 1) for a, b in ((h, h_final), (s, s_final)))
    # `whitening` wants a matrix ≥ I. A fresh H is; one that decayed, or came in, is scaled to be so nearly.
    low = jnp.min(jnp.diagonal(h, axis1=-2, axis2=-1), -1)[..., None, None]
    floor = jnp.ones_like(low) if at.total is None and seq.factor is None else low * jnp.finfo(k.dtype).eps
    _, inverse, _ = whitening(h / floor)
    root = transpose(inverse) / jnp.sqrt(floor)
    weights_t = matmul(matmul(root, transpose(root)), transpose(s)) * scale[:, None, :, None]
    states = jnp.concatenate([scale[:, None, :, None] * root, weights_t], -1)
    before = states[:, :-1]
    mt, e, g_inverse_t, _ = _whiten(k, v, w, at, before, seq.lam[:, None], whitening)
    saved = _Saved(mt, e, g_inverse_t, before)
    return _attend(q, at, saved), saved, states[:, -1]


def _forward(seq: Sequence, size: int, parallel: bool) -> tuple[Array, Array, _Saved]:
    """Outputs, the final [F | Φᵀ], and what the backward pass needs."""
    time = seq.queries.shape[1]
    q, k, v = (split(a, size) for a in (seq.queries, seq.keys, seq.values))
    at = describe(seq.log_decay, seq.runs, size)
    w = _pair_weights(None if seq.beta is None else split(seq.beta, size), at)
    out, saved, state = (_jump if parallel else _walk)(seq, q, k, v, w, at)
    return join(out, time), state, saved


class _Adjoint(NamedTuple):
    """Gradient with respect to what lies behind a point in time.

    Attributes:
        moment: $P = \\sum_t \\zeta_t x_t \\bar o_t^\\top$ over the tokens ahead, $x_t = R_t q_t$.
        gram: $W = \\sum_t \\zeta_t (x_t z_t^\\top + z_t x_t^\\top)$, $z_t = \\Phi_t^\\top \\bar o_t$.
        covariance: $\\bar R$, kept only where a state came in.
        weights: $\\bar\\Phi$, likewise.
    """

    moment: Float[Array, "batch key value"]
    gram: Float[Array, "batch key key"]
    covariance: Float[Array, "batch key key"] | None
    weights: Float[Array, "batch value key"] | None


def _backward(
    seq: Sequence, saved: _Saved, size: int, parallel: bool, cotangent: Array, ahead: _Adjoint
) -> tuple[Sequence, _Adjoint]:
    """Gradients of everything but the state (and of log_decay: the summand only), and the adjoint before."""
    time = seq.queries.shape[1]
    at = describe(seq.log_decay, seq.runs, size)
    beta = None if seq.beta is None else split(seq.beta, size)
    chunk = _Chunk(
        *(split(a, size) for a in (seq.queries, seq.keys, seq.values, cotangent)),
        beta=beta,
        w=_pair_weights(beta, at),
        at=at,
        saved=saved,
    )
    start = (ahead.gram, ahead.moment)

    def all_at_once(chunk: _Chunk, start: tuple[Array, Array]):
        near = _duals(chunk, seq.lam[:, None])
        step = at.step(chunk.k)
        grams, gram = recurrence(step, near.gram, start[0], True, True)
        moments, moment = recurrence(step, near.moment, start[1], True, True)
        return (gram, moment), _chunk_gradients(chunk, near, grams, moments)

    def one_by_one(chunk: _Chunk, start: tuple[Array, Array]):
        def body(later, x):
            here, step = x
            here = here if at.carried is not None else here._replace(at=here.at._replace(causal=at.causal))
            near = _duals(here, seq.lam)
            gram, moment = (step[:, None, None] * a for a in later)
            return (gram + near.gram, moment + near.moment), _chunk_gradients(here, near, *later)

        scanned = (chunk._replace(at=_per_chunk(at)), at.step(chunk.k))
        return scan_chunks(body, start, scanned, reverse=True)

    if parallel or size < 8:  # many short chunks: a tree of sums rounds better than a chain
        (gram, moment), gradients = all_at_once(chunk, start)
    else:  # on a CPU one chunk at a time stays in cache; a GPU wants them all
        (gram, moment), gradients = jax.lax.platform_dependent(
            chunk, start, cpu=one_by_one, default=all_at_once
        )
    covariance_bar = weights_bar = None
    if ahead.covariance is not None and ahead.weights is not None:
        covariance_bar, weights_bar = _state_walk(ahead.covariance, ahead.weights, chunk)
    timed = {n: join(a, time) for n in _TIMED if (a := getattr(gradients, n)) is not None}
    rest = gradients._replace(**timed, lam=jnp.sum(gradients.lam, 1) / seq.lam**2)
    return rest, _Adjoint(moment, gram, covariance_bar, weights_bar)


class _Chunk(NamedTuple):
    """Everything the backward pass knows about one chunk (or all of them, with a leading axis)."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array | None
    w: Array | None
    at: Chunks
    saved: _Saved


class _Near(NamedTuple):
    """Dual variables within a chunk, and what the chunk adds to the adjoint of the state before it."""

    x: Array  # rows e^{c_t} R_t q_t
    z: Array  # rows Φ_tᵀ ō_t
    alpha: Array  # [i, t]: w_i k_iᵀ x_t
    rho: Array  # [i, t]: w_i ō_tᵀ (v_i - Φ_t k_i)
    gram: Array
    moment: Array


def _duals(chunk: _Chunk, lam: Array) -> _Near:
    q, g, at = chunk.q, chunk.g, chunk.at
    mt, e, g_inverse_t = chunk.saved[:3]
    factor = chunk.saved.factor
    qm = jnp.where(at.causal, matmul(q, mt), 0.0)
    ge = jnp.where(at.causal, matmul(g, transpose(e)), 0.0)
    x = matmul(matmul(q, factor), transpose(factor))
    if at.carried is not None:
        x = jnp.where(at.carried[..., None], x, q * lam[..., None, :])
    x = x - matmul(qm, transpose(mt))
    z = keep(at.carried, matmul(g, transpose(chunk.saved.weights_t))) + matmul(ge, transpose(mt))
    before = transpose(keep(at.carried, x))
    gram = matmul(before, z)
    alpha, rho = matmul(g_inverse_t, transpose(qm)), matmul(g_inverse_t, transpose(ge))
    return _Near(x, z, alpha, rho, gram + transpose(gram), matmul(before, g))


def _chunk_gradients(chunk: _Chunk, near: _Near, gram: Array, moment: Array) -> Sequence:
    """Gradients with respect to a chunk's inputs, given the adjoint (W, P) of the state after it."""
    q, k, v, g, beta, w, at, _ = chunk
    x, z, alpha, rho = near.x, near.z, near.alpha, near.rho
    unit = None if at.decay is None else jnp.exp(-0.5 * at.decay)[..., None]
    if beta is not None and w is not None:
        # Where the pair has no weight, neither have its dual variables: take them from their definition.
        safe = jnp.where(w > 0, w, 1.0)
        ahead = transpose(at.causal)
        direct_alpha = jnp.where(ahead, matmul(k, transpose(x)), 0.0)
        direct_rho = jnp.where(ahead, matmul(v, transpose(g)) - matmul(k, transpose(z)), 0.0)
        alpha = _scaled(unit, jnp.where(w > 0, alpha / safe, direct_alpha))
        rho = _scaled(unit, jnp.where(w > 0, rho / safe, direct_rho))
    k_bar = _scaled(unit, matmul(rho, x) - matmul(alpha, z))
    v_bar = _scaled(unit, matmul(alpha, g))
    later_k = keep(at.last, matmul(v, transpose(moment)) - matmul(k, gram))
    later_v = keep(at.last, matmul(k, moment))
    if at.decay is not None:
        to_end = jnp.exp(at.decay[..., -1:] - at.decay)[..., None]
        later_v, later_k = to_end * later_v, to_end * later_k
    k_bar, v_bar = k_bar + later_k, v_bar + later_v
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
    q, g, wk, at = chunk.q, chunk.g, _scaled(chunk.w, chunk.k), chunk.at
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


class Plan(NamedTuple):
    """How to run: tokens per chunk, all chunks at once or a loop, whether the final state is wanted."""

    size: int
    parallel: bool
    want_state: bool


# In-chunk weights e^{-c} lose digits as they grow: beyond this a stretch is walked token by token.
_GROWTH = {"float32": 30.0, "float64": 1e6}
_BLOCK = 128  # tokens over which that choice is made


def _too_fast(log_decay: Array, size: int) -> Array:
    chunk_decay = jnp.sum(split(log_decay, size), -1)
    return jnp.any(-chunk_decay > jnp.log(_GROWTH[str(log_decay.dtype)]))


def _at_safe_size(seq: Sequence, size: int, run: Callable, *args):
    """`run(size, seq, *args)`, or with chunks of one token where the decay within a chunk is too strong."""
    assert seq.log_decay is not None
    too_fast = _too_fast(seq.log_decay, size)
    return jax.lax.cond(too_fast, partial(run, 1), partial(run, size), seq, *args)


def _block_forward(size: int, seq: Sequence) -> tuple[Array, Array]:
    return _forward(seq, size, parallel=False)[:2]


def _block_backward(size: int, seq: Sequence, cotangent: Array, ahead: _Adjoint):
    saved = _forward(seq, size, parallel=False)[2]
    return _backward(seq, saved, size, False, cotangent, ahead)


def _blocks(seq: Sequence) -> dict[str, Array]:
    """The fields that depend on time as [batch, block, _BLOCK, ...], runs counted from the inherited one."""
    size = min(_BLOCK, seq.queries.shape[1])
    cut = {n: split(a, size, mode="edge" if n == "runs" else "constant")
           for n in _TIMED if (a := getattr(seq, n)) is not None}  # fmt: skip
    if (runs := cut.get("runs")) is not None:
        cut["runs"] = runs - jnp.pad(runs[:, :-1, -1:], ((0, 0), (1, 0), (0, 0)))
    return cut


def _run(plan: Plan, seq: Sequence) -> tuple[Array, Array, Any]:
    """Outputs, the final [F | Φᵀ], and what the backward pass needs."""
    if seq.log_decay is None or plan.parallel:
        return _forward(seq, plan.size, plan.parallel)

    def body(state, timed):
        factor, weights = _parts(state)
        block = seq._replace(**timed, factor=factor, weights=weights)
        out, after = _at_safe_size(block, plan.size, _block_forward)
        return after, (out, state)

    state, (out, before) = scan_chunks(body, _start(seq)[1], _blocks(seq))
    return join(out, seq.queries.shape[1]), state, before


def _run_backward(
    plan: Plan, seq: Sequence, saved: Any, cotangent: Array, ahead: _Adjoint
) -> tuple[Sequence, _Adjoint]:
    if seq.log_decay is None or plan.parallel:
        return _backward(seq, saved, plan.size, plan.parallel, cotangent, ahead)
    timed = _blocks(seq)

    def body(ahead, x):
        timed, cotangent, state = x
        factor, weights = _parts(state)
        block = seq._replace(**timed, factor=factor, weights=weights)
        gradients, behind = _at_safe_size(block, plan.size, _block_backward, cotangent, ahead)
        return behind, gradients

    inputs = (timed, split(cotangent, timed["queries"].shape[2]), saved)
    behind, gradients = scan_chunks(body, ahead, inputs, reverse=True)
    time = seq.queries.shape[1]
    joined = {n: join(getattr(gradients, n), time) for n in timed if n != "runs"}
    return gradients._replace(**joined, lam=jnp.sum(gradients.lam, 1)), behind


def _canonical(factor: Array) -> Array:
    """The lower triangular F with the same F Fᵀ and a positive diagonal: a function of R alone."""
    lower = transpose(jnp.linalg.qr(transpose(factor), mode="r"))
    diagonal = jnp.diagonal(lower, axis1=-2, axis2=-1)
    return lower * jnp.where(diagonal < 0, -1.0, 1.0)[..., None, :]


def _whitened(plan: Plan, seq: Sequence) -> tuple[Array, tuple[Array, Array] | None]:
    """Outputs at every time, and the final state (F, Φ) if the plan wants it."""
    return _whitened_forward(plan, seq)[0]


def _whitened_forward(plan: Plan, seq: Sequence):
    out, final, saved = _run(plan, seq)
    if not plan.want_state:
        return (out, None), (seq, saved, None)
    factor, weights = _parts(final)
    state = (_canonical(factor), weights)
    return (out, state), (seq, saved, state)


def _whitened_backward(plan: Plan, residuals, cotangents):
    seq, saved, state = residuals
    out_bar, state_bar = cotangents
    batch, _, d = seq.keys.shape
    dtype = seq.keys.dtype
    moment = jnp.zeros((batch, d, seq.values.shape[-1]), dtype)
    gram = covariance_bar = jnp.zeros((batch, d, d), dtype)
    weights_bar = jnp.zeros_like(transpose(moment))
    scaling = jnp.zeros((batch,), dtype)
    if state is not None:
        factor, weights = state
        factor_bar, weights_bar = state_bar
        # Adjoint of the Cholesky factor: R̄ = ½ F⁻ᵀ (P + Pᵀ) F⁻¹, P the lower half of Fᵀ F̄.
        lower = jnp.tril(matmul(transpose(factor), factor_bar))
        lower = lower - 0.5 * lower * jnp.eye(d, dtype=dtype)
        both = lower + transpose(lower)
        scaling = jnp.trace(lower, axis1=-2, axis2=-1)  # ⟨R̄, R⟩
        covariance = matmul(factor, transpose(factor))
        moment = matmul(covariance, transpose(weights_bar))
        gram = matmul(moment, weights)
        gram = gram + transpose(gram) + matmul(matmul(factor, both), transpose(factor))
        if seq.factor is not None:
            inverse = jax.lax.linalg.triangular_solve(
                factor, jnp.broadcast_to(jnp.eye(d, dtype=dtype), factor.shape), left_side=True, lower=True
            )
            covariance_bar = 0.5 * matmul(matmul(transpose(inverse), both), inverse)
    carries = seq.factor is not None
    ahead = _Adjoint(moment, gram, covariance_bar if carries else None, weights_bar if carries else None)
    gradients, behind = _run_backward(plan, seq, saved, out_bar, ahead)
    if gradients.log_decay is not None:
        decay_bar = sum_to_end(-0.5 * gradients.log_decay, seq.runs, -scaling)
        gradients = gradients._replace(log_decay=decay_bar)
    if seq.factor is not None and behind.covariance is not None:
        gradients = gradients._replace(
            factor=2 * matmul(behind.covariance, seq.factor), weights=behind.weights
        )
    else:
        start = 0.5 * jnp.diagonal(behind.gram, axis1=-2, axis2=-1)
        gradients = gradients._replace(lam=gradients.lam + start / seq.lam**2)
    return (gradients,)


whitened = with_closed_form(_whitened, _whitened_forward, _whitened_backward, static=(0,))
