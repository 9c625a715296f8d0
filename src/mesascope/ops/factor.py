"""Triangular factors of small matrices `A ≥ I`, in array operations only.

Every matrix that the exact methods factor has the form `A = I + (positive semidefinite)`. That is worth
knowing: in exact arithmetic no pivot can fall below one, so a pivot that does is rounding error, and putting
it back to one keeps the factorization alive where LAPACK would return NaN. It also lets us avoid LAPACK:
batched calls of it on a CPU are slow for sizes like 32, and under jax 0.10 two of them running at once can
deadlock.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mesascope.ops.gradients import with_closed_form

_BASE = 8  # columns eliminated one by one; larger sizes are assembled from these by matrix products


def matmul(a: Array, b: Array) -> Array:
    """Matrix product in the full precision of its inputs (a GPU's default for float32 would be TF32)."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def transpose(a: Array) -> Array:
    return jnp.swapaxes(a, -1, -2)


def whitening(matrix: Float[Array, "*batch n n"], noise: Array | None = None) -> tuple[Array, Array, Array]:
    r"""Factor $A = G G^\top \ge I$ and invert two triangles.

    Args:
        noise: for each row, how far rounding may have moved the diagonal; by default what squaring may. A
            pivot that exceeds one by less than that is taken for one: its row repeats earlier ones.

    Returns:
        $G$ (lower triangular), $G^{-1}$ and $(I+G)^{-1}$. Finite for every finite input: where rounding
        has made $A$ indefinite, pivots are put back to one, and columns and inverses to the size that
        $A - I \succeq 0$ allows.
    """
    n = matrix.shape[-1]
    rounding = 16 * jnp.finfo(matrix.dtype).eps * jnp.diagonal(matrix, axis1=-2, axis2=-1)
    noise = rounding if noise is None else noise
    if n <= _BASE:
        return _eliminate(matrix, noise)
    half = -(-(n // 2) // _BASE) * _BASE
    g11, i11, j11 = whitening(matrix[..., :half, :half], noise[..., :half])
    g21 = matmul(matrix[..., half:, :half], transpose(i11))
    a22 = matrix[..., half:, half:]
    # What A - I ⪰ 0 allows: |row of G21|² ≤ A_ii - 1, and nothing below a pivot of one.
    excess = jnp.maximum(jnp.diagonal(a22, axis1=-2, axis2=-1) - 1, 0)
    below = 1 - 1 / jnp.diagonal(g11, axis1=-2, axis2=-1) ** 2
    bound = lax.stop_gradient(jnp.sqrt(excess)[..., :, None] * jnp.sqrt(jnp.maximum(below, 0))[..., None, :])
    g21 = jnp.clip(g21, -bound, bound)
    norm = jnp.sum(g21 * g21, axis=-1)
    too_long = jnp.sqrt(jnp.where(norm > excess, excess / jnp.where(norm > 0, norm, 1), 1))
    g21 = g21 * lax.stop_gradient(too_long)[..., None]
    g22, i22, j22 = whitening(a22 - matmul(g21, transpose(g21)), noise[..., half:])
    return (
        lower_blocks(g11, g21, g22),
        lower_blocks(i11, at_most_one(-matmul(i22, matmul(g21, i11))), i22),
        lower_blocks(j11, at_most_one(-matmul(j22, matmul(g21, j11))), j22),
    )


def at_most_one(entries: Array) -> Array:
    """Entries of G⁻¹, (I+G)⁻¹ and G⁻¹B cannot exceed one when GGᵀ = I + BBᵀ; in float32 they might."""
    return jnp.clip(entries, -1, 1)


def lower_blocks(top: Array, side: Array, bottom: Array) -> Array:
    """[[top, 0], [side, bottom]]"""
    corner = jnp.zeros((*top.shape[:-1], bottom.shape[-1]), top.dtype)
    return jnp.concatenate([jnp.concatenate([top, corner], -1), jnp.concatenate([side, bottom], -1)], -2)


def _eliminate(matrix: Array, noise: Array) -> tuple[Array, Array, Array]:
    """Row elimination of [A | I | I] to [Gᵀ | G⁻¹ | (I+G)⁻¹], one column at a time."""
    n = matrix.shape[-1]
    eye = jnp.broadcast_to(jnp.eye(n, dtype=matrix.dtype), matrix.shape)
    work = jnp.concatenate([matrix, eye, eye], -1)
    excess = jnp.diagonal(matrix, axis1=-2, axis2=-1) - 1  # diagonal of the Schur complement, less one
    column = jnp.arange(3 * n)
    rows = []
    for j in range(n):
        pivot_excess = jnp.where(excess[..., j] > noise[..., j], excess[..., j], 0)
        inverse = 1 / jnp.sqrt(1 + pivot_excess)  # rsqrt is rounded less well, and errors add up over time
        scale = jnp.where(column < 2 * n, inverse[..., None], (inverse / (1 + inverse))[..., None])
        row = work[..., j, :] * scale
        bound = jnp.sqrt(jnp.maximum(excess, 0)) * (jnp.sqrt(pivot_excess) * inverse)[..., None]
        bound = lax.stop_gradient(bound)
        later = jnp.where(jnp.arange(n) > j, jnp.clip(row[..., :n], -bound, bound), 0)
        pivot = jnp.where(jnp.arange(n) == j, (1 / inverse)[..., None], later)
        row = jnp.concatenate([pivot, at_most_one(row[..., n:])], -1)
        rows.append(row)
        if j + 1 < n:
            excess = excess - later * later
            # Without the barrier XLA fuses the steps into one kernel that recomputes them all.
            work, excess = lax.optimization_barrier((work - later[..., :, None] * row[..., None, :], excess))
    out = jnp.stack(rows, -2)
    return transpose(out[..., :n]), out[..., n : 2 * n], out[..., 2 * n :]


def _unit_lower_inverse(strict: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    r"""$(I + L)^{-1}$ for a strictly lower triangular $L$ (what stands above is ignored)."""
    n = strict.shape[-1]
    if n > _BASE:
        half = -(-(n // 2) // _BASE) * _BASE
        top = unit_lower_inverse(strict[..., :half, :half])
        bottom = unit_lower_inverse(strict[..., half:, half:])
        return lower_blocks(top, -matmul(bottom, matmul(strict[..., half:, :half], top)), bottom)
    rest = jnp.broadcast_to(jnp.eye(n, dtype=strict.dtype), strict.shape)
    lower = jnp.tril(strict, -1)
    rows = []
    for j in range(n):
        rows.append(rest[..., j, :])
        rest = jax.lax.optimization_barrier(rest - lower[..., :, j, None] * rest[..., j, None, :])
    return jnp.stack(rows, -2)


def _unit_forward(strict: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(strict)
    return inverse, inverse


def _unit_backward(inverse: Array, bar: Array) -> tuple[Array]:
    left = transpose(inverse)
    return (-jnp.tril(matmul(left, matmul(bar, left)), -1),)


unit_lower_inverse = with_closed_form(_unit_lower_inverse, _unit_forward, _unit_backward)


def library_whitening(matrix: Float[Array, "*batch n n"]) -> tuple[Array, Array, Array]:
    """The same through the platform's Cholesky and triangular solve, for GPUs.

    A matrix that the library finds indefinite, or so large that its pivots may be rounding errors, is factored
    again with its diagonal raised by as much; both are done in one batched call, so there is no branch.
    """
    n = matrix.shape[-1]
    eye = jnp.eye(n, dtype=matrix.dtype)
    diagonal = jnp.diagonal(matrix, axis1=-2, axis2=-1)
    noise = 8 * n * jnp.finfo(matrix.dtype).eps * jnp.max(diagonal, -1)[..., None, None]
    raised = matrix + noise * eye
    both = lax.linalg.cholesky(jnp.stack([matrix, raised]), symmetrize_input=False)
    trusted = jnp.all(jnp.isfinite(both[0]), (-1, -2), keepdims=True) & (noise < 8)
    g = jnp.where(trusted, both[0], both[1])
    inverses = lax.linalg.triangular_solve(
        jnp.stack([g, g + eye]), jnp.broadcast_to(eye, (2, *g.shape)), left_side=True, lower=True
    )
    return g, at_most_one(inverses[0]), at_most_one(inverses[1])


def platform_whitening(matrix: Float[Array, "*batch n n"]) -> tuple[Array, Array, Array]:
    """`whitening` by whichever implementation suits the device that runs it."""
    if matrix.shape[-1] == 1:
        return whitening(matrix)
    return jax.lax.platform_dependent(
        matrix, cuda=library_whitening, rocm=library_whitening, default=whitening
    )
