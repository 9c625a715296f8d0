"""Tolerances, inputs and oracles. The oracles are numpy and scipy: they share no code with the library."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2e-2}


def assert_close(actual: Any, expected: Any, *, scale: float = 1.0, name: str = "") -> None:
    """Relative to the largest entry, with a tolerance that is a property of the dtype."""
    flat_actual, tree_actual = jax.tree.flatten(actual)
    flat_expected, tree_expected = jax.tree.flatten(expected)
    assert tree_actual == tree_expected, f"{name}: {tree_actual} is not {tree_expected}"
    for i, (a, b) in enumerate(zip(flat_actual, flat_expected, strict=True)):
        dtypes = [str(x.dtype) for x in (a, b) if str(getattr(x, "dtype", "")) in TOLERANCE]
        tolerance = scale * max(TOLERANCE[d] for d in dtypes)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, f"{name}[{i}]: {a.shape} is not {b.shape}"
        error = np.max(np.abs(a - b), initial=0) / max(np.max(np.abs(b), initial=0), 1e-30)
        assert error <= tolerance, f"{name}[{i}]: error {error:.1e} exceeds {tolerance:.0e}"


def draw(
    *,
    lead: tuple[int, ...] = (3,),
    time: int = 13,
    key: int = 4,
    value: int = 3,
    log_decay: float = 0.0,
    beta: bool = False,
    segments: bool = False,
    seed: int = 0,
    dtype: Any = np.float64,
) -> dict[str, Any]:
    """Arguments of `mesa_attention`, by name. Every third beta is zero."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((*lead, *shape)), dtype)

    arguments: dict[str, Any] = {
        "queries": normal(time, key),
        "keys": normal(time, key),
        "values": normal(time, value),
        "lam": jnp.asarray(rng.uniform(0.5, 2, (*lead, key)), dtype),
    }
    if log_decay:
        arguments["log_decay"] = jnp.asarray(-rng.uniform(0, log_decay, (*lead, time)), dtype)
    if beta:
        weights = rng.uniform(0.2, 2, (*lead, time))
        weights[..., ::3] = 0
        arguments["beta"] = jnp.asarray(weights, dtype)
    if segments:
        arguments["segment_ids"] = jnp.asarray(np.cumsum(rng.uniform(size=(*lead, time)) < 0.25, -1))
    return arguments


def rls(arguments: dict[str, Any], *, constant: bool = False) -> np.ndarray:
    """Classical recursive least squares in numpy: information form, one sequence and one step at a time."""
    a = {n: np.asarray(x, np.int64 if n == "segment_ids" else np.float64) for n, x in arguments.items()}
    q, k, v, lam = (a[n] for n in ("queries", "keys", "values", "lam"))
    out = np.empty(v.shape)
    for i in np.ndindex(k.shape[:-2]):
        for t in range(k.shape[-2]):
            new = t == 0 or ("segment_ids" in a and a["segment_ids"][i][t] != a["segment_ids"][i][t - 1])
            if new:
                h = np.zeros((k.shape[-1],) * 2) if constant else np.diag(1 / lam[i])
                s = np.zeros((v.shape[-1], k.shape[-1]))
            gamma = np.exp(a["log_decay"][i][t]) if "log_decay" in a else 1.0
            beta = a["beta"][i][t] if "beta" in a else 1.0
            h = gamma * h + beta * np.outer(k[i][t], k[i][t])
            s = gamma * s + beta * np.outer(v[i][t], k[i][t])
            ridge = np.diag(1 / lam[i]) if constant else 0.0
            out[i][t] = s @ np.linalg.solve(h + ridge, q[i][t])
    return out
