r"""Iterative solvers for all time steps at once; every iteration is one causal linear attention.

`neumann` and `chebyshev` are fixed polynomials in $H_t$ applied to $q_t$: what a stack of linear
self-attention layers can compute. `conjugate_gradients` adapts to the data and runs to a tolerance.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mesascope.ops.factor import matmul
from mesascope.ops.reference import time_major
from mesascope.ops.solve import Path


def _formed(path: Path) -> Float[Array, "batch time key key"]:
    """All H_t + diag ridge, held in memory."""
    eye = jnp.eye(path.keys.shape[-1], dtype=path.keys.dtype)

    def step(h: Array, inputs: dict[str, Array]) -> tuple[Array, Array]:
        if "restart" in inputs:
            h = jnp.where(inputs["restart"][:, None, None], path.fresh[..., None] * eye, h)
        if "log_decay" in inputs:
            h = jnp.exp(inputs["log_decay"])[:, None, None] * h
        k = inputs["key"]
        left = k if "beta" not in inputs else inputs["beta"][:, None] * k
        h = h + left[:, :, None] * k[:, None, :]
        return h, h + path.ridge[..., None] * eye

    _, h = jax.lax.scan(step, path.initial, time_major(path, path.keys))
    return jnp.moveaxis(h, 0, 1)


def _operator(path: Path, precompute: bool):
    if not precompute:
        return path.apply
    formed = _formed(path)
    return lambda x: matmul(formed, x[..., None])[..., 0]


def neumann(
    path: Path, rhs: Float[Array, "batch time key"], *, steps: int, precompute: bool
) -> Float[Array, "batch time key"]:
    r"""The truncated series $\tilde x = \frac1s\sum_{j=0}^{K}(I - H/s)^j\, b$ with $s \ge \lVert H\rVert$.

    The series converges only for $\lVert H/s\rVert \le 1$; $s_t$ is the trace of the positive definite $H_t$.
    """
    apply = _operator(path, precompute)
    scale = path.bounds()[1][..., None]

    def step(x: Array, _: None) -> tuple[Array, None]:
        return x + (rhs - apply(x)) / scale, None

    return jax.lax.scan(step, rhs / scale, None, length=steps)[0]


def chebyshev(
    path: Path, rhs: Float[Array, "batch time key"], *, steps: int, precompute: bool
) -> Float[Array, "batch time key"]:
    r"""Chebyshev iteration on the interval that the ridge (below) and the trace (above) guarantee."""
    apply = _operator(path, precompute)
    low, high = (b[..., None] for b in path.bounds())
    centre, half = (high + low) / 2, (high - low) / 2

    def step(carry, _):
        x, change, rate = carry
        new_rate = 1 / (2 * centre / half - rate)
        change = new_rate * rate * change + 2 * new_rate / half * (rhs - apply(x))
        return (x + change, change, new_rate), None

    first = rhs / centre
    return jax.lax.scan(step, (first, first, half / centre), None, length=steps)[0][0]


def conjugate_gradients(
    path: Path, rhs: Float[Array, "batch time key"], *, tolerance: float, max_steps: int
) -> Float[Array, "batch time key"]:
    r"""Conjugate gradients for every t at once, until $\lVert b - Hx\rVert \le$ tolerance $\cdot\lVert b\rVert$."""
    limit = tolerance**2 * jnp.sum(rhs * rhs, -1)

    def going(carry):
        step, _, _, _, energy = carry
        return (step < max_steps) & jnp.any(energy > limit)

    def step(carry):
        count, x, residual, direction, energy = carry
        applied = path.apply(direction)
        curvature = jnp.sum(direction * applied, -1)
        active = (energy > limit) & (curvature > 0)
        rate = jnp.where(active, energy / jnp.where(active, curvature, 1.0), 0.0)[..., None]
        x, residual = x + rate * direction, residual - rate * applied
        new_energy = jnp.where(active, jnp.sum(residual * residual, -1), 0.0)
        ratio = jnp.where(active, new_energy / jnp.where(active, energy, 1.0), 0.0)[..., None]
        return count + 1, x, residual, residual + ratio * direction, new_energy

    start = (0, jnp.zeros_like(rhs), rhs, rhs, jnp.sum(rhs * rhs, -1))
    return jax.lax.while_loop(going, step, start)[1]
