"""Triangular factors of small matrices, and rows made orthonormal.

On CPUs everything here is array operations: batched LAPACK calls are slow for sizes like 32, and under jax 0.10
two of them running at once can deadlock. On GPUs the vendor's batched routines are faster.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from mesascope.ops.gradients import with_closed_form

_BASE = 32  # columns eliminated one by one; larger sizes are assembled from these by matrix products


def matmul(a: Array, b: Array) -> Array:
    """Matrix product in the full precision of its inputs (a GPU's default for float32 would be TF32)."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def transpose(a: Array) -> Array:
    return jnp.swapaxes(a, -1, -2)


def _diagonal(a: Array) -> Array:
    return jnp.diagonal(a, axis1=-2, axis2=-1)


def orthonormal_rows(
    b: Float[Array, "*batch n d"], together: Bool[Array, "*batch n n"] | None = None
) -> tuple[Float[Array, "*batch n n"], Float[Array, "*batch n d"]]:
    r"""$G^{-1}$ and $G^{-1}B$ for $I + BB^\top = GG^\top$, more accurate than the factorization alone.

    $G^{-1}[I\,|\,B]$ has orthonormal rows. A Cholesky factorization of $I + BB^\top$ delivers them with an error of
    $\varepsilon\lVert B\rVert^2$. Normalizing the rows, and one round of Gram–Schmidt in matrix products, leaves its
    square (and $\varepsilon\lVert B\rVert$, to which B itself is known). With overlaps $I + c + c^\top$, that round
    multiplies by $(I + c)^{-1}$ and leaves $I - (I+c)^{-1}cc^\top(I+c)^{-\top} \preceq I$: never longer than one.
    Where c is not small (float32: 40 rows of rank 3 and length 500) one round is not enough; the rows stay short.

    Args:
        together: which rows belong to the same run; others do not meet.
    """
    eye = jnp.eye(b.shape[-2], dtype=b.dtype)

    def meeting(products: Array) -> Array:
        return products if together is None else jnp.where(together, products, 0)

    inverse = inverse_cholesky(eye + meeting(matmul(b, transpose(b))))
    rows = matmul(inverse, b)
    products = matmul(inverse, transpose(inverse)) + meeting(matmul(rows, transpose(rows)))
    scale = 1 / jnp.sqrt(_diagonal(products))
    overlap = jnp.tril(scale[..., :, None] * products * scale[..., None, :], -1)
    step = lower_inverse(eye + overlap) * scale[..., None, :]
    # Entries of orthonormal rows are at most one; so keep them, whatever rounding did.
    return jnp.clip(matmul(step, inverse), -1, 1), jnp.clip(matmul(step, rows), -1, 1)


def inverse_cholesky(matrix: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    r"""$G^{-1}$ for $A = GG^\top \ge I$, finite for every finite A.

    In exact arithmetic no pivot falls below one. Where rounding errors come near that, the diagonal is raised by
    more than they may amount to, so that none does in floating point either.
    """
    if matrix.shape[-1] == 1:
        return 1 / jnp.sqrt(matrix)
    ways = dict(cuda=_library_inverse, rocm=_library_inverse, default=_eliminated_inverse)
    return lax.platform_dependent(_raised(matrix), **ways)


def _raised(matrix: Array) -> Array:
    n = matrix.shape[-1]
    rounding = jnp.finfo(matrix.dtype).eps * _diagonal(matrix)
    shift = 2 * rounding * jnp.minimum(8 * rounding, 1) ** 2 * (1 + n / 2 * jnp.minimum(rounding, 1))
    return matrix + shift[..., None] * jnp.eye(n, dtype=matrix.dtype)


def _library_inverse(matrix: Array) -> Array:
    return _library_lower_inverse(lax.linalg.cholesky(matrix, symmetrize_input=False))


def _eliminated_inverse(matrix: Array) -> Array:
    n = matrix.shape[-1]
    size = -(-n // -(-n // _BASE))
    columns = _eliminate(matrix[..., :size])
    first = _batch_first(_substitute([column[: size - j] for j, column in enumerate(columns)]), matrix)
    if size == n:
        return first
    side = _batch_first(jnp.stack([column[size - j :] for j, column in enumerate(columns)], 1), matrix)
    last = _eliminated_inverse(matrix[..., size:, size:] - matmul(side, transpose(side)))
    return _lower_blocks(first, -matmul(last, matmul(side, first)), last)


def _lower_blocks(top: Array, side: Array, bottom: Array) -> Array:
    """[[top, 0], [side, bottom]]"""
    corner = jnp.zeros((*top.shape[:-1], bottom.shape[-1]), top.dtype)
    return jnp.concatenate([jnp.concatenate([top, corner], -1), jnp.concatenate([side, bottom], -1)], -2)


def _batch_last(a: Array) -> Array:
    """[..., n, m] → [n, m, batch]: elimination then works on long contiguous vectors."""
    return jnp.moveaxis(a.reshape(-1, *a.shape[-2:]), 0, -1)


def _batch_first(a: Array, like: Array) -> Array:
    return jnp.moveaxis(a, -1, 0).reshape(*like.shape[:-2], *a.shape[:2])


def _eliminate(panel: Float[Array, "*batch n m"]) -> list[Float[Array, "rest batch"]]:
    """The first m columns of the factor G of an n × n matrix, from its first m columns; each from its diagonal on."""
    rest = _batch_last(panel)
    columns = []
    for _ in range(panel.shape[-1]):
        root = jnp.sqrt(jnp.maximum(rest[0, 0], 1))
        # (Division: rsqrt is rounded less well, and errors add up over time.)
        # XLA fuses into this column all that earlier ones take from it, and stops at the entry set in place.
        column = (rest[:, 0] / root).at[0].set(root)
        columns.append(column)
        rest = rest[1:, 1:] - column[1:, None] * column[None, 1 : rest.shape[1]]
    return columns


def _substitute(columns: list[Float[Array, "rest batch"]]) -> Float[Array, "n n batch"]:
    """The inverse of the lower triangular matrix with these columns, each from its diagonal on."""
    n = len(columns)
    rows, rest = [], jnp.zeros((n, 0, columns[0].shape[-1]), columns[0].dtype)
    for j, column in enumerate(columns):
        row = jnp.concatenate([rest[0], jnp.ones_like(column[:1])]) / column[0]
        rows.append(jnp.pad(row, ((0, n - j - 1), (0, 0))))
        rest = jnp.pad(rest[1:], ((0, 0), (0, 1), (0, 0))) - column[1:, None] * row
    return jnp.stack(rows)


def lower_inverse(lower: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """The inverse of a lower triangular matrix (what stands above its diagonal is ignored)."""
    ways = dict(cuda=_library_lower_inverse, rocm=_library_lower_inverse, default=_substituted_lower_inverse)
    return lax.platform_dependent(lower, **ways)


def _library_lower_inverse(lower: Array) -> Array:
    eye = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    return lax.linalg.triangular_solve(lower, eye, left_side=True, lower=True)


def _substituted_lower_inverse(lower: Array) -> Array:
    """All diagonal blocks at once by forward substitution, then joined pair by pair."""
    n = lower.shape[-1]
    joins = max(0, -(-n // _BASE) - 1).bit_length()
    size = -(-n // 2**joins)
    whole = jnp.pad(lower, [(0, 0)] * (lower.ndim - 2) + [(0, size * 2**joins - n)] * 2)
    whole = whole + jnp.diag((jnp.arange(whole.shape[-1]) >= n).astype(lower.dtype))

    def blocks(below: int, step: int, size: int) -> Array:
        """Every `step`-th block of `size` on the diagonal, or `below` it, along a new leading axis."""
        corners = range(0, whole.shape[-1], step * size)
        return jnp.stack([whole[..., i + below : i + below + size, i : i + size] for i in corners])

    corner = blocks(0, 1, size)
    columns = _batch_last(corner)
    inverse = _batch_first(_substitute([columns[j:, j] for j in range(size)]), corner)
    for _ in range(joins):
        size = inverse.shape[-1]
        # One batch axis: with several, CPUs take a slower kernel.
        top, bottom, side = (
            a.reshape(-1, size, size) for a in (inverse[0::2], inverse[1::2], blocks(size, 2, size))
        )
        joined = _lower_blocks(top, -matmul(bottom, matmul(side, top)), bottom)
        inverse = joined.reshape(-1, *lower.shape[:-2], 2 * size, 2 * size)
    return inverse[0, ..., :n, :n]


def _unit_lower_inverse(strict: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    r"""$(I + L)^{-1}$ for a strictly lower triangular $L$ (what stands above is ignored)."""
    return lower_inverse(jnp.eye(strict.shape[-1], dtype=strict.dtype) + jnp.tril(strict, -1))


def _unit_forward(strict: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(strict)
    return inverse, inverse


def _unit_backward(inverse: Array, bar: Array) -> tuple[Array]:
    left = transpose(inverse)
    return (-jnp.tril(matmul(left, matmul(bar, left)), -1),)


unit_lower_inverse = with_closed_form(_unit_lower_inverse, _unit_forward, _unit_backward)
