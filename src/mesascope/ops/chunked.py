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
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from mesascope.ops.chunks import Chunks, describe, join, keep, recurrence, scan_chunks, split, sum_to_end
from mesascope.ops.duals import Adjoint, backward
from mesascope.ops.factor import inverse_cholesky, lower_inverse, matmul, orthonormal_rows, transpose
from mesascope.ops.gradients import with_closed_form
from mesascope.ops.sequence import TIMED, Saved, Sequence, State, pair_weights, per_chunk, scaled


def default_chunk_size(time: int, key: int, decays: bool, parallel: bool) -> int:
    """About as many tokens as keys are wide, on a GPU more; evenly filled; fewer where forgetting narrows them."""
    if decays:
        longest = 16
    elif parallel:
        longest = min(max(2 * key, 16), 128)
    else:
        longest = 64 if jax.default_backend() == "gpu" else min(max(key, 16), 32)
    # Where many pairs meet in few channels, above all in one, ∂k loses digits.
    longest = min(longest, 4 * key if key > 1 else 2)
    whole = [size for size in range(-(-longest // 2), longest + 1) if time % size == 0]  # no padding
    return max(whole, default=-(-time // -(-time // longest)))


def _largest_energy(dtype: Any) -> float:
    """Beyond this kᵀRk (1e6 in float32) a second pair like the first cannot be told from rounding errors."""
    return 1 / (8 * float(jnp.finfo(dtype).eps))


def largest_covariance(keys: Array, beta: Array | None) -> Float[Array, " batch"]:
    """A bound for the entries of R beyond which the regularizer is too weak to matter in this precision."""
    energy = jnp.sum(keys * keys, -1)
    energy = jnp.max(energy if beta is None else beta * energy, -1)
    limit = _largest_energy(keys.dtype)
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


def _start(seq: Sequence) -> tuple[State, State]:
    """The state of a fresh run, (diag √λ, 0), and the one that the sequence begins with."""
    batch, _, d = seq.keys.shape
    factor = jnp.sqrt(seq.lam)[..., None] * jnp.eye(d, dtype=seq.keys.dtype)
    fresh = State(factor, jnp.zeros((batch, d, seq.values.shape[-1]), factor.dtype))
    if seq.factor is not None and seq.weights is not None:
        return fresh, State(seq.factor, transpose(seq.weights))
    return fresh, fresh


def _whiten(
    k: Array, v: Array, w: Array | None, at: Chunks, state: State, lam: Array
) -> tuple[Array, Array, Array, Array]:
    """Mᵀ, E, G⁻ᵀ of one chunk (or of many, batched) that starts from a state, and (I+G)⁻¹B."""
    b, innovation = matmul(k, state.factor), v - matmul(k, state.weights_t)
    if at.carried is not None:
        b = jnp.where(at.carried[..., None], b, k * jnp.sqrt(lam)[..., None, :])
        innovation = jnp.where(at.carried[..., None], innovation, v)
    b, innovation = scaled(w, b), scaled(w, innovation)
    if at.decay is not None and k.shape[-2] > 1:
        # R grows where nothing excites it. What then comes first would drown the rest of its chunk.
        energy = jnp.sum(b * b, -1, keepdims=True)
        less = jnp.sqrt(jnp.minimum(2 * _largest_energy(k.dtype) / jnp.maximum(energy, 1), 1))
        b, innovation = less * b, less * innovation
    together = None if at.carried is None else at.causal | transpose(at.causal)
    g_inverse, white = orthonormal_rows(b, together)
    e = matmul(g_inverse, innovation)
    eye = jnp.eye(k.shape[-2], dtype=k.dtype)
    n = matmul(lower_inverse(eye + g_inverse), white)  # (I+G)⁻¹B = (I+G⁻¹)⁻¹G⁻¹B
    mt = matmul(state.factor, transpose(white))
    if at.carried is not None:
        mt = jnp.where(at.carried[..., None, :], mt, transpose(white) * jnp.sqrt(lam)[..., None])
    return mt, e, transpose(g_inverse), n


def _advance(at: Chunks, state: State, fresh: State, mt: Array, e: Array, n: Array) -> State:
    """The state that the chunk hands on."""
    if at.through is not None and at.last is not None:
        through = at.through[..., None, None]
        state = State(*(jnp.where(through, a, b) for a, b in zip(state, fresh, strict=True)))
        mt = jnp.where(at.last[..., None, :], mt, 0.0)
    factor, weights_t = state.factor - matmul(mt, n), state.weights_t + matmul(mt, e)
    if at.total is not None:
        factor = factor * jnp.exp(-0.5 * at.total)[..., None, None]
    return State(factor, weights_t)


def _attend(q: Array, at: Chunks, weights_t: Array, mt: Array, e: Array) -> Array:
    """O = Q Φᵀ + tril(Q Mᵀ) E."""
    return keep(at.carried, matmul(q, weights_t)) + matmul(jnp.where(at.causal, matmul(q, mt), 0.0), e)


def _stores_states(at: Chunks) -> bool:
    """Where no run ends, the states between chunks can be rebuilt: cheaper on a CPU, not on a GPU."""
    return at.carried is not None or jax.default_backend() != "cpu"


def _walk(
    seq: Sequence, q: Array, k: Array, v: Array, w: Array | None, at: Chunks
) -> tuple[Array, State, Saved]:
    """The loop over chunks: outputs, the final state, and what the backward pass needs."""
    fresh, start = _start(seq)

    def walk(attend_at_once: bool, q: Array, *chunks: Any) -> tuple[Array, State, Saved]:
        def body(state, x):
            q, k, v, w, here = x
            here = here if at.carried is not None else here._replace(causal=at.causal)
            mt, e, g_inverse_t, n = _whiten(k, v, w, here, state, seq.lam)
            out = state.weights_t if attend_at_once else _attend(q, here, state.weights_t, mt, e)
            before = state if _stores_states(at) else None
            return _advance(here, state, fresh, mt, e, n), (out, mt, e, g_inverse_t, before)

        after, (out, *saved) = scan_chunks(body, start, (q, *chunks))
        return _attend(q, at, out, *saved[:2]) if attend_at_once else out, after, Saved(*saved)

    # On a CPU a chunk stays in cache; a GPU wants them all at once.
    ways = dict(cpu=partial(walk, False), default=partial(walk, True))
    return jax.lax.platform_dependent(q, k, v, w, per_chunk(at), **ways)


def _jump(
    seq: Sequence, q: Array, k: Array, v: Array, w: Array | None, at: Chunks
) -> tuple[Array, State, Saved]:
    """All chunks at once."""
    before, final = _boundary_states(seq, k, v, w, at)
    mt, e, g_inverse_t, _ = _whiten(k, v, w, at, before, seq.lam[:, None])
    saved = Saved(mt, e, g_inverse_t, before if _stores_states(at) else None)
    return _attend(q, at, before.weights_t, mt, e), final, saved


def _boundary_states(seq: Sequence, k: Array, v: Array, w: Array | None, at: Chunks) -> tuple[State, State]:
    """The states before all chunks, and after the last, from prefix sums of the information H = R⁻¹ and S = ΦH.

    Such sums know H to ε‖H‖, and so its inverse to ε times its condition number, where a walk with square roots would
    know it to the root of that. Hence float64, even where a user has not enabled it, for this step alone.
    """
    dtype = k.dtype
    with jax.enable_x64(True):
        seq, k, v, w, at = (cast(a, jnp.float64) for a in (seq, k, v, w, at))
        d = k.shape[-1]
        eye = jnp.eye(d, dtype=k.dtype)
        scale = jnp.sqrt(seq.lam)
        # In units where R_0 = I: keys k·√λ and H ≥ I for every fresh run.
        kn = keep(at.last, scaled(w, k) * scale[:, None, None, :])
        total = 1.0 if at.total is None else jnp.exp(at.total)[..., None, None]
        gram, moment = matmul(transpose(kn), kn), matmul(transpose(scaled(w, v)), kn)
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
        contains_prior = at.total is None and seq.factor is None
        states = cast(state_of(h, s, scale[:, None], contains_prior=contains_prior), dtype)
    return State(*(a[:, :-1] for a in states)), State(*(a[:, -1] for a in states))


def state_of(h: Array, s: Array, scale: Array, *, contains_prior: bool) -> State:
    """The state with the information H and S, both in units of `scale` = √λ, where diag(1/λ) is the identity.

    Args:
        contains_prior: whether H is sure to be at least the identity.
    """
    # `inverse_cholesky` wants a matrix ≥ I. A fresh H is; one that decayed, or came in, is scaled to be so nearly.
    low = jnp.min(jnp.diagonal(h, axis1=-2, axis2=-1), -1)[..., None, None]
    floor = jnp.ones_like(low) if contains_prior else low * jnp.finfo(h.dtype).eps
    root = transpose(inverse_cholesky(h / floor)) / jnp.sqrt(floor)
    weights_t = matmul(matmul(root, transpose(root)), transpose(s)) * scale[..., None]
    return State(scale[..., None] * root, weights_t)


def cast(tree: Any, dtype: Any) -> Any:
    """All that is floating to one dtype."""
    return jax.tree.map(
        lambda a: jax.lax.convert_element_type(a, dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
    )


def _forward(seq: Sequence, size: int, parallel: bool) -> tuple[Array, State, Saved]:
    """Outputs, the final state, and what the backward pass needs."""
    time = seq.queries.shape[1]
    q, k, v = (split(a, size) for a in (seq.queries, seq.keys, seq.values))
    at = describe(seq.log_decay, seq.runs, size)
    w = pair_weights(None if seq.beta is None else split(seq.beta, size), at)
    out, state, saved = (_jump if parallel else _walk)(seq, q, k, v, w, at)
    return join(out, time), state, saved


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


def _block_forward(size: int, seq: Sequence) -> tuple[Array, State]:
    return _forward(seq, size, parallel=False)[:2]


def _block_backward(size: int, seq: Sequence, cotangent: Array, ahead: Adjoint):
    _, after, saved = _forward(seq, size, parallel=False)
    return backward(seq, saved, after, size, False, cotangent, ahead)


def _blocks(seq: Sequence) -> dict[str, Array]:
    """The fields that depend on time as [batch, block, _BLOCK, ...], runs counted from the inherited one."""
    size = min(_BLOCK, seq.queries.shape[1])
    cut = {n: split(a, size, mode="edge" if n == "runs" else "constant")
           for n in TIMED if (a := getattr(seq, n)) is not None}  # fmt: skip
    if (runs := cut.get("runs")) is not None:
        cut["runs"] = runs - jnp.pad(runs[:, :-1, -1:], ((0, 0), (1, 0), (0, 0)))
    return cut


def _run(plan: Plan, seq: Sequence) -> tuple[Array, State, Any]:
    """Outputs, the final state, and what the backward pass needs."""
    if seq.log_decay is None or plan.parallel:
        return _forward(seq, plan.size, plan.parallel)
    return _flat_under_vmap(partial(_run_blocks, plan))(seq)


def _run_backward(
    plan: Plan, seq: Sequence, saved: Any, after: State, cotangent: Array, ahead: Adjoint
) -> tuple[Sequence, Adjoint]:
    if seq.log_decay is None or plan.parallel:
        return backward(seq, saved, after, plan.size, plan.parallel, cotangent, ahead)
    return _flat_under_vmap(partial(_run_blocks_backward, plan))(seq, saved, cotangent, ahead)


def _flat_under_vmap(function: Callable) -> Callable:
    """Under `vmap`, fold the mapped axis into the batch that is there anyway.

    Mapping over the choice of chunk size would make it a choice per sequence, and so run both.
    """
    folded = custom_vmap(function)

    @folded.def_vmap
    def _(axis_size, is_mapped, *arguments):
        def fold(a: Array, mapped: bool) -> Array:
            a = a if mapped else jnp.broadcast_to(a, (axis_size, *a.shape))
            return a.reshape(-1, *a.shape[2:])

        results = folded(*jax.tree.map(fold, arguments, tuple(is_mapped)))
        return (
            jax.tree.map(lambda a: a.reshape(axis_size, -1, *a.shape[1:]), results),
            jax.tree.map(lambda _: True, results),
        )

    def not_twice(*_):
        raise NotImplementedError(
            "second derivatives with log_decay: not for method 'chunked'. Use 'prefix' or 'reference'."
        )

    return with_closed_form(folded, lambda *arguments: (folded(*arguments), ()), not_twice)


def _run_blocks(plan: Plan, seq: Sequence) -> tuple[Array, State, State]:
    def body(state, timed):
        block = seq._replace(**timed, factor=state.factor, weights=transpose(state.weights_t))
        out, after = _at_safe_size(block, plan.size, _block_forward)
        return after, (out, state)

    state, (out, before) = scan_chunks(body, _start(seq)[1], _blocks(seq))
    return join(out, seq.queries.shape[1]), state, before


def _run_blocks_backward(
    plan: Plan, seq: Sequence, before: State, cotangent: Array, ahead: Adjoint
) -> tuple[Sequence, Adjoint]:
    timed = _blocks(seq)

    def body(ahead, x):
        timed, cotangent, state = x
        block = seq._replace(**timed, factor=state.factor, weights=transpose(state.weights_t))
        gradients, behind = _at_safe_size(block, plan.size, _block_backward, cotangent, ahead)
        return behind, gradients

    inputs = (timed, split(cotangent, timed["queries"].shape[2]), before)
    behind, gradients = scan_chunks(body, ahead, inputs, reverse=True)
    time = seq.queries.shape[1]
    joined = {n: join(getattr(gradients, n), time) for n in timed if n != "runs"}
    return gradients._replace(**joined, lam=jnp.sum(gradients.lam, 1)), behind


def canonical(factor: Array) -> Array:
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
        return (out, None), (seq, saved, final, None)
    state = (canonical(final.factor), transpose(final.weights_t))
    return (out, state), (seq, saved, final, state)


def final_adjoint(
    seq: Sequence, state: tuple[Array, Array] | None, state_bar: tuple[Array, Array] | None
) -> tuple[Adjoint, Array]:
    """The adjoint at the end of the sequence, from the cotangent of the final (F, Φ); and ⟨R̄, R⟩ there."""
    batch, _, d = seq.keys.shape
    dtype = seq.keys.dtype
    gram, moment = jnp.zeros((batch, d, d), dtype), jnp.zeros((batch, d, seq.values.shape[-1]), dtype)
    covariance_bar = jnp.zeros((batch, d, d), dtype)
    weights_bar = jnp.zeros((batch, seq.values.shape[-1], d), dtype)
    scaling = jnp.zeros((batch,), dtype)
    if state is not None and state_bar is not None:
        factor, weights = state
        factor_bar, weights_bar = state_bar
        # Adjoint of the Cholesky factor: R̄ = ½ F⁻ᵀ (P + Pᵀ) F⁻¹, P the lower half of Fᵀ F̄.
        lower = jnp.tril(matmul(transpose(factor), factor_bar))
        lower = lower - 0.5 * lower * jnp.eye(d, dtype=dtype)
        both = lower + transpose(lower)
        scaling = jnp.trace(lower, axis1=-2, axis2=-1)
        covariance = matmul(factor, transpose(factor))
        moment = matmul(covariance, transpose(weights_bar))
        gram = matmul(moment, weights)
        gram = gram + transpose(gram) + matmul(matmul(factor, both), transpose(factor))
        if seq.factor is not None:
            inverse = jax.lax.linalg.triangular_solve(
                factor, jnp.broadcast_to(jnp.eye(d, dtype=dtype), factor.shape), left_side=True, lower=True
            )
            covariance_bar = 0.5 * matmul(matmul(transpose(inverse), both), inverse)
    if seq.factor is None:
        return Adjoint(gram, moment, None, None), scaling
    return Adjoint(gram, moment, covariance_bar, weights_bar), scaling


def _whitened_backward(plan: Plan, residuals, cotangents):
    seq, saved, final, state = residuals
    out_bar, state_bar = cotangents
    ahead, scaling = final_adjoint(seq, state, state_bar)
    gradients, behind = _run_backward(plan, seq, saved, final, out_bar, ahead)
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
