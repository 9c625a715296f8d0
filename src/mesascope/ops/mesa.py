"""The mesa operation: the contract that all methods share."""

from functools import partial
from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float

from mesascope.ops.chunked import Plan, Sequence, default_chunk_size, well_conditioned, whitened
from mesascope.ops.factor import inverse_cholesky, matmul, transpose
from mesascope.ops.gradients import broadcasting
from mesascope.ops.iterative import chebyshev, conjugate_gradients, neumann
from mesascope.ops.linear import delta_chunked, linear_chunked
from mesascope.ops.methods import (
    Chebyshev,
    Chunked,
    ConjugateGradients,
    Method,
    Neumann,
    Pallas,
    Prefix,
    Recursive,
    Reference,
    resolve,
)
from mesascope.ops.recursive import reverse_time_solve, sherman_morrison
from mesascope.ops.reference import solve_each_step
from mesascope.ops.solve import Path, information, solve_exactly, solve_then_attend, square_root
from mesascope.ops.validate import Inputs, channel_lam, floating, prepare, require

Regularizer = Literal["decayed", "constant"]


class MesaState(NamedTuple):
    r"""What least squares remembers: $R = F F^\top = H^{-1}$ as a square root, and $\Phi = S R$.

    The square root cannot lose positive definiteness, however long decoding goes on. Any $F$ with
    $F F^\top = R$ is the same state; operations depend on it (and differentiate it) through $R$ only.
    """

    factor: Float[Array, "*batch key key"]
    weights: Float[Array, "*batch value key"]

    @property
    def covariance(self) -> Float[Array, "*batch key key"]:
        """$R$, the inverse of the regularized Gram matrix."""
        return matmul(self.factor, transpose(self.factor))


class GramState(NamedTuple):
    r"""The state for `regularizer="constant"` with decay: $H$ and $S$ without the regularizer.

    There is no recursion for $(H + \Lambda)^{-1}$ when $H$ decays and $\Lambda$ does not, so a decoding step
    costs one $d \times d$ factorization.
    """

    gram: Float[Array, "*batch key key"]
    moment: Float[Array, "*batch value key"]
    ridge: Float[Array, "*batch key"]


State = MesaState | GramState


@overload
def mesa_attention(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    lam: ArrayLike,
    *,
    log_decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    regularizer: Regularizer = "decayed",
    segment_ids: ArrayLike | None = None,
    state: State | None = None,
    method: str | Method = "auto",
    return_state: Literal[False] = False,
) -> Array: ...


@overload
def mesa_attention(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    lam: ArrayLike,
    *,
    log_decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    regularizer: Regularizer = "decayed",
    segment_ids: ArrayLike | None = None,
    state: State | None = None,
    method: str | Method = "auto",
    return_state: Literal[True],
) -> tuple[Array, State]: ...


@broadcasting
def mesa_attention(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    lam: ArrayLike,
    *,
    log_decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    regularizer: Regularizer = "decayed",
    segment_ids: ArrayLike | None = None,
    state: State | None = None,
    method: str | Method = "auto",
    return_state: bool = False,
) -> Array | tuple[Array, State]:
    r"""Apply to each query the ridge regression fitted to all pairs so far, the newest included.

    $$o_t = \Phi_t q_t, \qquad
      \Phi_t = \arg\min_\Phi \tfrac12\sum_{i\le t}\zeta_{it}\beta_i\lVert v_i - \Phi k_i\rVert^2
               + \tfrac12\,\zeta_{0t}\,\mathrm{tr}\,\Phi\,\mathrm{diag}(1/\lambda)\,\Phi^\top,
      \qquad \zeta_{it} = \prod_{i<j\le t}\gamma_j$$

    Equivalently $o_t = S_t H_t^{-1} q_t$ with $H_t = \gamma_t H_{t-1} + \beta_t k_t k_t^\top$ and
    $S_t = \gamma_t S_{t-1} + \beta_t v_t k_t^\top$, from $H_0 = \mathrm{diag}(1/\lambda)$, $S_0 = 0$.
    As $\lambda \to 0$, $o_t/\lambda$ tends to linear attention.

    Args:
        queries: `[..., time, key]`. Leading axes (seed, batch, head, …) are arbitrary and broadcast.
        keys: `[..., time, key]`.
        values: `[..., time, value]`.
        lam: λ > 0: a number, `[..., 1]` or `[..., key]`; the last axis is the key channel.
        log_decay: $\log\gamma_t \le 0$, `[..., time]`: forgetting factors.
        beta: $\beta_t \ge 0$, `[..., time]`: weight of a pair; 0 skips it.
        regularizer: `"decayed"` (the paper: the penalty fades with γ like a pair) or `"constant"` (MesaNet: it
            does not). They differ only with `log_decay`.
        segment_ids: `[..., time]` integers; the state starts afresh wherever they change.
        state: where an earlier call stopped; it continues into the first segment. (A `GramState` is
            regularized by `lam`, so pass the λ it began with.)
        method: `"auto"`, `"chunked"`, `"prefix"`, `"pallas"`, `"recursive"`, `"reference"`, `"cg"`, `"neumann"`,
            `"chebyshev"`, or one of the dataclasses in `mesascope.methods`, for options.
        return_state: also return the state after the last pair.

    Returns:
        `[..., time, value]` in the dtype of the inputs (computed in float32 for bfloat16), and the state.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or sign, or the method cannot do what is
            asked.

    Note:
        Where $\lambda\lVert k\rVert^2$ exceeds 1e6 (in float32; 5e14 in float64) the regularizer is lost in
        rounding errors; the whitening methods lower $\lambda$ to that. With the decayed regularizer, directions
        that no key excites grow as $\lambda / \prod\gamma$: once that passes 1e38 the exact answer overflows
        float32, and so does this. Long before, where $k^\top R k > $ 2e6, the whitening methods weight a pair less.
    """
    if regularizer not in ("decayed", "constant"):
        raise ValueError(f"regularizer: expected 'decayed' or 'constant', got {regularizer!r}.")
    constant = regularizer == "constant" and (log_decay is not None or isinstance(state, GramState))
    wanted = GramState if constant else MesaState
    if state is not None and not isinstance(state, wanted):
        raise TypeError(
            f"state: expected a {wanted.__name__} for regularizer={regularizer!r} "
            f"{'with' if log_decay is not None else 'without'} log_decay, got {type(state).__name__}. "
            "GramState goes with the constant regularizer, MesaState with everything else."
        )
    parts = None if state is None else {n: a for n, a in state._asdict().items() if n != "ridge"}
    inputs = prepare(queries, keys, values, lam, log_decay, beta, segment_ids, parts)
    plain = log_decay is None and segment_ids is None and state is None
    kernels_apply = Pallas.is_fastest(
        inputs.keys.shape[-1], inputs.values.shape[-1], inputs.keys.dtype, plain=plain
    )
    chosen = resolve(method, whitening_applies=not constant, kernels_apply=kernels_apply)
    _check_method(chosen, inputs, constant, plain)
    if isinstance(chosen, Chunked | Prefix | Pallas):
        out, flat_state = _whitening_method(chosen, inputs, return_state)
    else:
        out, flat_state = _solving_method(chosen, inputs, constant, return_state)
    out = out.reshape(*inputs.leading, *out.shape[1:]).astype(inputs.out_dtype)
    if not return_state:
        return out
    assert flat_state is not None
    return out, type(flat_state)(*(a.reshape(*inputs.leading, *a.shape[1:]) for a in flat_state))


def _check_method(method: Method, inputs: Inputs, constant: bool, plain: bool) -> None:
    if constant and isinstance(method, Chunked | Prefix | Pallas | Recursive):
        raise ValueError(
            f"method {type(method).__name__} needs the regularizer to decay with the pairs: with a constant "
            "regularizer and log_decay there is no recursion for the inverse. Use method='cg' or 'reference'."
        )
    if isinstance(method, Recursive) and method.backward == "reverse_time":
        given = [n for n, a in (("beta", inputs.beta), ("segment_ids", inputs.runs)) if a is not None]
        if given:
            raise ValueError(
                f"Recursive(backward='reverse_time') takes no {given[0]}: the reversed recursion divides by "
                "it. Use method='recursive' (closed-form backward) or 'chunked'."
            )
    if isinstance(method, Pallas):
        Pallas.check(inputs.keys.shape[-1], inputs.values.shape[-1], inputs.keys.dtype, plain=plain)
    size = getattr(method, "chunk_size", None)
    if size is not None and size < 1:
        raise ValueError(f"chunk_size: expected at least 1, got {size}.")


def _whitening_method(
    method: Chunked | Prefix | Pallas, inputs: Inputs, want_state: bool
) -> tuple[Array, MesaState | None]:
    state = inputs.state or {"factor": None, "weights": None}
    sequence = Sequence(
        inputs.queries, inputs.keys, inputs.values, inputs.lam,
        inputs.log_decay, inputs.beta, inputs.runs, **state,
    )  # fmt: skip
    sequence = well_conditioned(sequence)
    if isinstance(method, Pallas):
        from mesascope.ops import pallas  # its compiler is not everywhere

        out, final = pallas.fused(
            pallas.plan(sequence, want_state, inputs.out_dtype == jnp.bfloat16), sequence
        )
    else:
        time, d = inputs.keys.shape[1:]
        parallel = isinstance(method, Prefix)
        size = method.chunk_size or default_chunk_size(time, d, inputs.log_decay is not None, parallel)
        out, final = whitened(Plan(min(size, time), parallel, want_state), sequence)
    return out, None if final is None else MesaState(*final)


def _solving_method(
    method: Method, inputs: Inputs, constant: bool, want_state: bool
) -> tuple[Array, State | None]:
    q, k, v = inputs.queries, inputs.keys, inputs.values
    penalty = 1 / inputs.lam
    zero = jnp.zeros_like(penalty)
    eye = jnp.eye(k.shape[-1], dtype=k.dtype)
    fresh = zero if constant else penalty
    if inputs.state is None:
        gram, moment = fresh[..., None] * eye, jnp.zeros((*k.shape[:1], v.shape[-1], k.shape[-1]), k.dtype)
    else:
        gram, moment = inputs.state.values() if constant else information(**inputs.state)
    path = Path(k, inputs.log_decay, inputs.beta, inputs.runs, gram, fresh, penalty if constant else zero)
    match method:
        case Reference():
            outputs = solve_exactly(solve_each_step, path, q, v, moment)
        case Recursive(backward="reverse_time"):
            solver = lambda p, b: reverse_time_solve(jnp.linalg.inv(p.initial), p.keys, b, p.log_decay)  # noqa: E731
            outputs = solve_then_attend(solver, path, q, v, moment)
        case Recursive():
            outputs = solve_exactly(sherman_morrison, path, q, v, moment)
        case ConjugateGradients(tolerance=tolerance, max_steps=max_steps):
            if tolerance is None:
                tolerance = 1e-12 if k.dtype == jnp.float64 else 1e-6
            steps = 2 * k.shape[-1] + 20 if max_steps is None else max_steps
            solver = partial(conjugate_gradients, tolerance=tolerance, max_steps=steps)
            outputs = solve_exactly(solver, path, q, v, moment)
        case Neumann(steps=steps, precompute=precompute):
            solver = partial(neumann, steps=steps, precompute=precompute)
            outputs = solve_then_attend(solver, path, q, v, moment)
        case Chebyshev(steps=steps, precompute=precompute):
            solver = partial(chebyshev, steps=steps, precompute=precompute)
            outputs = solve_then_attend(solver, path, q, v, moment)
        case _:
            raise AssertionError(method)
    if not want_state:
        return outputs.out, None
    if constant:
        return outputs.out, GramState(outputs.gram, outputs.moment, penalty)
    return outputs.out, MesaState(*square_root(outputs.gram, outputs.moment))


@broadcasting
def mesa_init(
    lam: ArrayLike,
    value_dim: int,
    *,
    key_dim: int | None = None,
    regularizer: Regularizer = "decayed",
    dtype: DTypeLike = jnp.float32,
) -> State:
    """The state before the first pair.

    Args:
        lam: λ as `[..., key]`; or a number or `[..., 1]`, with `key_dim` to say how wide keys are.
        value_dim: width of the values.
        key_dim: width of the keys, where `lam` does not tell.
        regularizer: `"constant"` gives the state for decoding with `log_decay` and a constant regularizer.
    """
    if regularizer not in ("decayed", "constant"):
        raise ValueError(f"regularizer: expected 'decayed' or 'constant', got {regularizer!r}.")
    lam = channel_lam(lam, key_dim, dtype)
    if key_dim is None:
        if lam.shape[-1] == 1:
            raise ValueError(
                f"key_dim: expected the width of the keys, which lam (shape {jnp.shape(lam)}) does not tell."
            )
        key_dim = lam.shape[-1]
    lam = jnp.broadcast_to(lam, (*lam.shape[:-1], key_dim))
    moment = jnp.zeros((*lam.shape[:-1], value_dim, key_dim), dtype)
    if regularizer == "constant":
        return GramState(jnp.zeros((*lam.shape, key_dim), dtype), moment, 1 / lam)
    return MesaState(jnp.sqrt(lam)[..., None] * jnp.eye(key_dim, dtype=dtype), moment)


@broadcasting
def mesa_step(
    state: State,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    log_decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
) -> tuple[State, Array]:
    r"""One more pair, and its output: constant memory, $O(d^2)$ work for a `MesaState`.

    With $b = F^\top k$, $s = \gamma + \beta\, b^\top b$ and the gain $g = \beta F b / s$:

    $$\Phi \leftarrow \Phi + (v - \Phi k) g^\top, \qquad
      F \leftarrow \gamma^{-1/2}\Big(F - \frac{\beta}{s + \sqrt{\gamma s}}\, F b\, b^\top\Big), \qquad o = \Phi q$$

    Args:
        state: from `mesa_init`, `mesa_attention(..., return_state=True)` or an earlier step.
        query: `[..., key]`.
        key: `[..., key]`.
        value: `[..., value]`.
        log_decay: `[...]`.
        beta: `[...]`.

    Returns:
        The state after the pair, and $o$, `[..., value]`.
    """
    if not isinstance(state, MesaState | GramState):
        raise TypeError(f"state: expected a MesaState or GramState, got {type(state).__name__}.")
    memory = state.weights if isinstance(state, MesaState) else state.moment
    value_dim, d = memory.shape[-2:]
    dtype = memory.dtype
    q, k, v = (
        floating(name, array, f"[..., {width}]", 1)
        for name, array, width in (("query", query, d), ("key", key, d), ("value", value, value_dim))
    )
    for name, array, width in (("query", q, d), ("key", k, d), ("value", v, value_dim)):
        if array.shape[-1] != width:
            raise ValueError(f"{name}: expected [..., {width}] to fit the state, got {array.shape}.")
    out_dtype = v.dtype
    q, k, v = (a.astype(dtype) for a in (q, k, v))
    gamma = weight = jnp.ones((1,), dtype)
    if log_decay is not None:
        require("log_decay", log_decay, lambda g: g <= 0, "logarithms of factors in (0, 1], so ≤ 0")
        gamma = jnp.exp(jnp.asarray(log_decay, dtype))[..., None]
    if beta is not None:
        require("beta", beta, lambda b: b >= 0, "weights ≥ 0")
        weight = jnp.asarray(beta, dtype)[..., None]
    if isinstance(state, GramState):
        gamma, weight, q, k, v = (a[..., None] for a in (gamma, weight, q, k, v))
        gram = gamma * state.gram + weight * k * transpose(k)
        moment = gamma * state.moment + weight * v * transpose(k)
        out = matmul(moment, _ridge_solve(gram, state.ridge, q))
        return GramState(gram, moment, state.ridge), out[..., 0].astype(out_dtype)
    step = _fused_step if Pallas.steps(d, value_dim, dtype) else _plain_step
    factor, weights, out = step(*state, q, k, v, gamma, weight)
    return MesaState(factor, weights), out.astype(out_dtype)


def _plain_step(
    factor: Array, weights: Array, q: Array, k: Array, v: Array, gamma: Array, beta: Array
) -> tuple[Array, Array, Array]:
    """The formulas of `mesa_step`; γ and β are [..., 1]."""
    q, k, v, gamma, beta = (a[..., None] for a in (q, k, v, gamma, beta))
    b = matmul(transpose(factor), k)
    s = gamma + beta * jnp.sum(b * b, -2, keepdims=True)
    fb = matmul(factor, b)
    weights = weights + (v - matmul(weights, k)) * transpose(beta * fb / s)
    factor = (factor - beta / (s + jnp.sqrt(gamma * s)) * fb * transpose(b)) / jnp.sqrt(gamma)
    return factor, weights, matmul(weights, q)[..., 0]


def _fused_step(*arrays: Array) -> tuple[Array, Array, Array]:
    """The same in one kernel, one program per head."""
    from mesascope.ops import pallas_step  # its compiler is not everywhere

    ranks = (2, 2, 1, 1, 1, 1, 1)
    leading = jnp.broadcast_shapes(*(a.shape[: a.ndim - rank] for a, rank in zip(arrays, ranks, strict=True)))
    flat = (
        jnp.broadcast_to(a, (*leading, *a.shape[a.ndim - rank :])).reshape(-1, *a.shape[a.ndim - rank :])
        for a, rank in zip(arrays, ranks, strict=True)
    )
    factor, weights, out = (
        a.reshape(*leading, *a.shape[1:]) for a in pallas_step.fused_step(_plain_step, *flat)
    )
    return factor, weights, out


def _ridge_solve(gram: Array, ridge: Array, rhs: Array) -> Array:
    """(gram + diag ridge)⁻¹ rhs for a positive semidefinite gram."""
    scale = 1 / jnp.sqrt(ridge)[..., None]
    eye = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    inverse = inverse_cholesky(eye + scale * gram * transpose(scale))
    return scale * matmul(transpose(inverse), matmul(inverse, scale * rhs))


@broadcasting
def intention(
    queries: ArrayLike, keys: ArrayLike, values: ArrayLike, lam: ArrayLike, *, beta: ArrayLike | None = None
) -> Array:
    r"""The mesa operation without time: every query meets the regression on *all* pairs.

    $$o_t = V^\top B K \big(K^\top B K + \mathrm{diag}(1/\lambda)\big)^{-1} q_t, \qquad B = \mathrm{diag}(\beta)$$

    Args:
        queries: `[..., queries, key]`; their number need not be that of the pairs.
        keys: `[..., pairs, key]`.
        values: `[..., pairs, value]`.
        lam: λ > 0: a number, `[..., 1]` or `[..., key]`.
        beta: weights of the pairs, `[..., pairs]`.

    Returns:
        `[..., queries, value]`.
    """
    q = floating("queries", queries, "[..., queries, key]", 2)
    if q.shape[-1] != jnp.shape(keys)[-1]:
        raise ValueError(f"queries: expected [..., {jnp.shape(keys)[-1]}] like keys, got {q.shape}.")
    inputs = prepare(keys, keys, values, lam, beta=beta)
    k, v = (a.reshape(*inputs.leading, *a.shape[1:]) for a in (inputs.keys, inputs.values))
    penalty = 1 / inputs.lam.reshape(*inputs.leading, -1)
    wk = k if inputs.beta is None else inputs.beta.reshape(*inputs.leading, -1, 1) * k
    gram, moment = matmul(transpose(wk), k), matmul(transpose(v), wk)
    leading = jnp.broadcast_shapes(inputs.leading, q.shape[:-2])
    rhs = jnp.broadcast_to(transpose(q).astype(k.dtype), (*leading, q.shape[-1], q.shape[-2]))
    gram, penalty = (jnp.broadcast_to(a, (*leading, *a.shape[-n:])) for a, n in ((gram, 2), (penalty, 1)))
    # Implicit differentiation: the gradient solves with the same matrix instead of walking back through it.
    x = jax.lax.custom_linear_solve(
        lambda x: matmul(gram, x) + penalty[..., None] * x,
        rhs,
        lambda _, b: _ridge_solve(gram, penalty, b),
        symmetric=True,
    )
    return transpose(matmul(moment, x)).astype(inputs.out_dtype)


@broadcasting
def linear_attention(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    *,
    log_decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    state: ArrayLike | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""Causal linear attention with forgetting: $o_t = S_t q_t$, $S_t = \gamma_t S_{t-1} + \beta_t v_t k_t^\top$.

    Arguments as in `mesa_attention`; the state is $S$, `[..., value, key]`. On a GPU many long sequences that are plain
    are taken by kernels, where arrays that are sharded need `jax.shard_map` (see `methods.Pallas`).
    """
    inputs = prepare(queries, keys, values, None, log_decay, beta, segment_ids, _matrix_state(state))
    k = inputs.keys if inputs.beta is None else inputs.beta[..., None] * inputs.keys
    heads, time, key = k.shape
    initial = None if inputs.state is None else inputs.state["matrix"]
    plain = inputs.log_decay is None and inputs.runs is None and initial is None and not return_state
    if plain and Pallas.attends(heads, time, key, inputs.values.shape[-1], k.dtype):
        from mesascope.ops.pallas_linear import linear_fused

        out = linear_fused(inputs.queries, k, inputs.values)
        return out.reshape(*inputs.leading, *out.shape[1:]).astype(inputs.out_dtype)
    out, final = linear_chunked(inputs.queries, k, inputs.values, inputs.log_decay, inputs.runs, initial)
    return _finish(inputs, out, final, return_state)


@broadcasting
def delta_attention(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    beta: ArrayLike,
    *,
    log_decay: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    state: ArrayLike | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""Delta-Net's rule: one gradient step of rate $\beta_t$ per pair, then $o_t = \Phi_t q_t$.

    $$\Phi_t = \gamma_t \Phi_{t-1} + \beta_t (v_t - \gamma_t \Phi_{t-1} k_t) k_t^\top$$

    Arguments as in `mesa_attention`; the state is $\Phi$, `[..., value, key]`. Stable for
    $\beta_t\lVert k_t\rVert^2 < 2$. Kernels as for `linear_attention`, of 64 sequences and more.
    """
    inputs = prepare(queries, keys, values, None, log_decay, beta, segment_ids, _matrix_state(state))
    assert inputs.beta is not None
    q, k, v = inputs.queries, inputs.keys, inputs.values
    initial = None if inputs.state is None else inputs.state["matrix"]
    plain = inputs.log_decay is None and inputs.runs is None and initial is None and not return_state
    if plain and Pallas.corrects(len(k), k.shape[-1], v.shape[-1], k.dtype):
        from mesascope.ops.pallas_linear import innovations_fused, linear_fused

        weighted = inputs.beta[..., None] * k
        out = linear_fused(q, weighted, innovations_fused(k, weighted, v))
        return out.reshape(*inputs.leading, *out.shape[1:]).astype(inputs.out_dtype)
    out, final = delta_chunked(q, k, v, inputs.beta, inputs.log_decay, inputs.runs, initial)
    return _finish(inputs, out, final, return_state)


def _matrix_state(state: ArrayLike | None) -> dict[str, Array] | None:
    return None if state is None else {"matrix": floating("state", state, "[..., value, key]", 2)}


def _finish(inputs: Inputs, out: Array, final: Array, return_state: bool) -> Array | tuple[Array, Array]:
    out = out.reshape(*inputs.leading, *out.shape[1:]).astype(inputs.out_dtype)
    return (out, final.reshape(*inputs.leading, *final.shape[1:])) if return_state else out
