"""What the cross-entropy needs to know of a row of logits, from one pass over it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mesascope.ops.methods import has_kernels

_ROWS, _COLUMNS, _WARPS = 4, 1024, 4  # of a program's tile
_LEAST = 8192
"""Entries of a row from which on reading it once instead of three times is worth a kernel."""


def log_sum_and_entry(
    rows: Float[Array, "*batch entry"], entry: Int[Array, "*batch"], count: int
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    r"""$\log\sum_{i<n} e^{x_i}$ and $x_j$ of every row.

    Without a kernel rows are read three times: for the largest entry, for the sum and for the one entry, which is not
    gathered, since its gradient would be scattered.

    Args:
        entry: j.
        count: n; what is beyond is not looked at.
    """
    fused = has_kernels() and rows.dtype == jnp.float32 and rows.shape[-1] >= _LEAST
    return (_fused if fused else _plain)(rows, entry, count)


def _plain(rows: Array, entry: Array, count: int) -> tuple[Array, Array]:
    place = jax.lax.broadcasted_iota(jnp.int32, rows.shape, rows.ndim - 1)
    log_sum = jax.nn.logsumexp(jnp.where(place < count, rows, -jnp.inf), -1)
    return log_sum, jnp.sum(jnp.where(place == entry.astype(jnp.int32)[..., None], rows, 0), -1)


def _fused(rows: Array, entry: Array, count: int) -> tuple[Array, Array]:
    from mesascope.ops import kernels  # its compiler is not everywhere

    *leading, width = rows.shape
    flat = rows.reshape(1, -1, width)
    height = flat.shape[1]
    steps = -(-count // _COLUMNS)

    def kernel(refs: dict[str, Any], block: Any) -> None:
        lines = block * _ROWS + kernels.indices(_ROWS)
        wanted = kernels.load_vector(refs["entry"], lines, height, 0)

        def visit(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, total, found = carry
            places = i * _COLUMNS + kernels.indices(_COLUMNS)
            x = kernels.load(refs["rows"], lines, places, (height, count))
            found = found + jnp.sum(jnp.where(places[None, :] == wanted[:, None], x, 0.0), 1)
            x = jnp.where(places[None, :] < count, x, -jnp.inf)
            new = jnp.maximum(largest, jnp.max(x, 1))
            return new, jnp.exp(largest - new) * total + jnp.sum(jnp.exp(x - new[:, None]), 1), found

        nothing = jnp.zeros((_ROWS,), jnp.float32)
        lowest = nothing + float(jnp.finfo(jnp.float32).min)  # finite: what is subtracted from it is no NaN
        largest, total, found = kernels.loop(steps, visit, (lowest, nothing, nothing))
        kernels.store_vector(refs["new_log_sum"], lines, height, largest + jnp.log(total))
        kernels.store_vector(refs["new_entry"], lines, height, found)

    one = jax.ShapeDtypeStruct((1, height), jnp.float32)
    found = kernels.call_by_block(
        kernel,
        dict(rows=flat, entry=entry.astype(jnp.int32).reshape(1, -1)),
        dict(log_sum=one, entry=one),
        blocks=-(-height // _ROWS),
        warps=_WARPS,
    )
    return found["log_sum"].reshape(leading), found["entry"].reshape(leading)
