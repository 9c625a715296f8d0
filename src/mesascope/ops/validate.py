"""Turning what users pass into what the methods take, with errors that say what was wrong."""

from typing import Any, NamedTuple

import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from mesascope.ops.chunks import run_numbers


def floating(name: str, value: ArrayLike, expected: str, rank: int) -> Array:
    """An array of floats with at least `rank` axes, or an error that names the argument."""
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name}: expected a floating-point array {expected}, got dtype {array.dtype}.")
    if array.ndim < rank:
        raise ValueError(f"{name}: expected shape {expected}, got {array.shape}.")
    return array


def concrete(value: Any) -> np.ndarray | None:
    """The numbers, where they are known while tracing."""
    return None if isinstance(value, jax.core.Tracer) else np.asarray(value)


def require(name: str, value: Any, holds: Any, expected: str) -> None:
    """Check the values of an argument where they are known."""
    known = concrete(value)
    if known is not None and known.size and not bool(np.all(holds(known.astype(np.float64)))):
        worst = known[~holds(known.astype(np.float64))].ravel()[0]
        raise ValueError(f"{name}: expected {expected}, got {worst}.")


class Inputs(NamedTuple):
    """Flat, broadcast and cast: `batch` is the product of all leading axes."""

    queries: Array
    keys: Array
    values: Array
    lam: Array
    log_decay: Array | None
    beta: Array | None
    runs: Array | None
    state: dict[str, Array] | None
    leading: tuple[int, ...]
    out_dtype: Any


def prepare(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    lam: ArrayLike | None = None,
    log_decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    state: dict[str, Array] | None = None,
) -> Inputs:
    """Check everything and bring it to [batch, time, dim]."""
    q = floating("queries", queries, "[..., time, key]", 2)
    k = floating("keys", keys, "[..., time, key]", 2)
    v = floating("values", values, "[..., time, value]", 2)
    time, d = k.shape[-2:]
    if time == 0:
        raise ValueError(f"keys: expected at least one time step, got shape {k.shape}.")
    if q.shape[-2:] != (time, d):
        raise ValueError(f"queries: expected [..., time, key] = [..., {time}, {d}] like keys, got {q.shape}.")
    if v.shape[-2] != time:
        raise ValueError(f"values: expected [..., time, value] with time = {time} like keys, got {v.shape}.")
    out_dtype = jnp.result_type(q.dtype, k.dtype, v.dtype) if q.dtype == k.dtype == v.dtype else jnp.float32
    if jnp.float64 in (q.dtype, k.dtype, v.dtype):
        out_dtype = jnp.dtype(jnp.float64)
    dtype = jnp.float64 if out_dtype == jnp.float64 else jnp.float32

    shapes = {"queries": q.shape[:-2], "keys": k.shape[:-2], "values": v.shape[:-2]}
    ridge = jnp.ones((1,), dtype) if lam is None else channel_lam(lam, d, dtype)
    shapes["lam"] = ridge.shape[:-1]
    gates = {}
    for name, gate in (("log_decay", log_decay), ("beta", beta)):
        if gate is None:
            continue
        gate = floating(name, gate, f"[..., time] = [..., {time}]", 1)
        if gate.shape[-1] != time:
            raise ValueError(f"{name}: expected [..., time] = [..., {time}], got {gate.shape}.")
        gates[name], shapes[name] = gate, gate.shape[:-1]
    if "log_decay" in gates:
        require("log_decay", gates["log_decay"], lambda g: g <= 0, "logarithms of factors in (0, 1], so ≤ 0")
    if "beta" in gates:
        require("beta", gates["beta"], lambda b: b >= 0, "weights ≥ 0")
    runs = None
    if segment_ids is not None:
        ids = jnp.asarray(segment_ids)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(f"segment_ids: expected an integer array [..., time], got dtype {ids.dtype}.")
        if ids.ndim < 1 or ids.shape[-1] != time:
            raise ValueError(f"segment_ids: expected [..., time] = [..., {time}], got {ids.shape}.")
        runs, shapes["segment_ids"] = ids, ids.shape[:-1]
    if state is not None:
        for name, part in state.items():
            rows = d if name in ("factor", "gram") else v.shape[-1]
            if part.shape[-2:] != (rows, d):
                raise ValueError(f"state ({name}): expected [..., {rows}, {d}], got {part.shape}.")
            shapes[f"state ({name})"] = part.shape[:-2]
    try:
        leading = jnp.broadcast_shapes(*shapes.values())
    except ValueError:
        told = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"leading axes do not broadcast: {told}.") from None
    batch = int(np.prod(leading))

    def flat(array: Array, rank: int, cast: Any = dtype) -> Array:
        tail = array.shape[array.ndim - rank :]
        return jnp.broadcast_to(array.astype(cast), (*leading, *tail)).reshape(batch, *tail)

    return Inputs(
        queries=flat(q, 2),
        keys=flat(k, 2),
        values=flat(v, 2),
        lam=flat(jnp.broadcast_to(ridge, (*ridge.shape[:-1], d)), 1),
        log_decay=flat(gates["log_decay"], 1) if "log_decay" in gates else None,
        beta=flat(gates["beta"], 1) if "beta" in gates else None,
        runs=None if runs is None else run_numbers(flat(runs, 1, jnp.int32)),
        state=None if state is None else {name: flat(part, 2) for name, part in state.items()},
        leading=leading,
        out_dtype=out_dtype,
    )


def channel_lam(lam: ArrayLike, key_dim: int | None, dtype: Any) -> Array:
    """λ as [..., 1] or [..., key], positive where known."""
    if isinstance(lam, bool) or (
        not isinstance(lam, int | float) and not jnp.issubdtype(jnp.asarray(lam).dtype, jnp.floating)
    ):
        kind = type(lam).__name__ if isinstance(lam, bool) else jnp.asarray(lam).dtype
        raise TypeError(f"lam: expected a number or a floating-point array, got {kind}.")
    require("lam", lam, lambda x: x > 0, "λ > 0 (the ridge penalty is 1/λ)")
    array = jnp.asarray(lam, dtype)
    array = array[None] if array.ndim == 0 else array
    if key_dim is not None and array.shape[-1] not in (1, key_dim):
        raise ValueError(
            f"lam: expected a number, [..., 1] or [..., key] = [..., {key_dim}], got shape {array.shape}; "
            "the last axis is the key channel (for one λ per head add a trailing axis: lam[..., None])."
        )
    return array
