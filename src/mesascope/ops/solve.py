r"""The mesa-layer as "solve, then attend": $x_t = H_t^{-1} q_t$ by any solver, then $o_t = S_t x_t$.

One forward and one closed-form backward for every method that can only solve: `reference`, `recursive` and
`cg` (the chunked methods have their own, faster and more accurate). All sums over the past or the future are
causal linear attentions, in time order for the forward and against it for the backward pass. With
$z_t = H_t^{-1} S_t^\top \bar o_t$, $\zeta_{it} = \prod_{i<j\le t}\gamma_j$, $\alpha_{it} = x_t^\top k_i$ and
$\rho_{it} = \bar o_t^\top v_i - z_t^\top k_i$:

    ∂q_t = z_t     ∂v_i = β_i Σ_{t≥i} ζ_it ō_t α_it     ∂k_i = β_i Σ_{t≥i} ζ_it (x_t ρ_it - z_t α_it)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mesascope.ops.chunks import decay_since_start, sum_to_end
from mesascope.ops.factor import matmul, transpose
from mesascope.ops.gradients import with_closed_form
from mesascope.ops.linear import linear_chunked, reverse_time


class Path(NamedTuple):
    r"""The matrices of every time step, unformed.

    $$H_t = \gamma_t H_{t-1} + \beta_t k_t k_t^\top, \qquad \text{to be solved: } H_t + \mathrm{diag}(\text{ridge})$$

    Attributes:
        initial: $H_0$ of the first run.
        fresh: diagonal that later runs start from ($1/\lambda$ decayed, 0 constant).
        ridge: diagonal added at every step (0 decayed, $1/\lambda$ constant).
    """

    keys: Float[Array, "batch time key"]
    log_decay: Float[Array, "batch time"] | None
    beta: Float[Array, "batch time"] | None
    runs: Int[Array, "batch time"] | None
    initial: Float[Array, "batch key key"]
    fresh: Float[Array, "batch key"]
    ridge: Float[Array, "batch key"]

    def weighted(self, array: Array) -> Array:
        return array if self.beta is None else self.beta[..., None] * array

    def attend(self, queries: Array, keys: Array, values: Array, initial: Array) -> tuple[Array, Array]:
        return linear_chunked(queries, keys, values, self.log_decay, self.runs, initial)

    def remaining(self) -> tuple[Array, Array | None]:
        """What is left at t of the matrix its run began with; whether that run is the first."""
        if self.log_decay is None:
            left = jnp.ones(self.keys.shape[:2], self.keys.dtype)
        else:
            left = jnp.exp(decay_since_start(self.log_decay, self.runs))
        return left, None if self.runs is None else self.runs == 0

    def apply(self, x: Float[Array, "batch time key"]) -> Float[Array, "batch time key"]:
        """(H_t + diag ridge) x_t for every t, without forming H_t."""
        out, _ = self.attend(x, self.keys, self.weighted(self.keys), self.initial)
        out = out + self.ridge[:, None] * x
        left, first = self.remaining()
        if first is not None:
            out = out + jnp.where(first[..., None], 0.0, left[..., None] * self.fresh[:, None] * x)
        return out

    def bounds(self) -> tuple[Float[Array, "batch time"], Float[Array, "batch time"]]:
        """Numbers below and above all eigenvalues of H_t + diag ridge: cheap, causal, differentiable."""
        left, first = self.remaining()
        energy = self.weighted(jnp.sum(self.keys**2, -1, keepdims=True))
        one = jnp.ones_like(energy)
        trace = self.attend(one, one, energy, jnp.zeros_like(energy[:, :1]))[0][..., 0]
        start = self.initial + self.ridge[..., None] * jnp.eye(self.keys.shape[-1], dtype=energy.dtype)
        low = 1 / jnp.trace(jnp.linalg.inv(start), axis1=-2, axis2=-1)[:, None]
        high = jnp.trace(self.initial, axis1=-2, axis2=-1)[:, None]
        ridge = jnp.min(self.ridge, -1)[:, None]
        if first is not None:
            low = jnp.where(first, low, jnp.min(self.fresh, -1)[:, None] + ridge)
            high = jnp.where(first, high, jnp.max(self.fresh, -1)[:, None])
        return jnp.maximum(ridge, left * low), jnp.max(self.ridge, -1)[:, None] + left * high + trace

    def final(self) -> Float[Array, "batch key key"]:
        """H at the end."""
        _, h = self.attend(self.keys, self.keys, self.weighted(self.keys), self.initial)
        left, first = self.remaining()
        if first is not None:
            diagonal = jnp.where(first[:, -1:], 0.0, left[:, -1:] * self.fresh)
            h = h + diagonal[..., None] * jnp.eye(h.shape[-1], dtype=h.dtype)
        return h


Solver = Callable[[Path, Float[Array, "batch time key"]], Float[Array, "batch time key"]]


class Outputs(NamedTuple):
    out: Float[Array, "batch time value"]
    gram: Float[Array, "batch key key"]  # H at the end
    moment: Float[Array, "batch value key"]  # S at the end


def solve_then_attend(solver: Solver, path: Path, queries: Array, values: Array, moment: Array) -> Outputs:
    """$o_t = S_t x_t$ with $x_t$ from the solver, differentiated as the program it is."""
    x = solver(path, queries)
    out, final_moment = path.attend(x, path.keys, path.weighted(values), moment)
    return Outputs(out, path.final(), final_moment)


def _solve_exactly(solver: Solver, path: Path, queries: Array, values: Array, moment: Array) -> Outputs:
    """The same for a solver that is exact (to its tolerance), with the gradient of the exact solution."""
    return _forward(solver, path, queries, values, moment)[0]


def _forward(solver: Solver, path: Path, queries: Array, values: Array, moment: Array):
    x = solver(path, queries)
    out, final_moment = path.attend(x, path.keys, path.weighted(values), moment)
    outputs = Outputs(out, path.final(), final_moment)
    return outputs, (path, values, moment, x, outputs)


def _backward(solver: Solver, residuals, cotangents: Outputs):
    path, values, moment, x, outputs = residuals
    out_bar, gram_bar, moment_bar = cotangents
    k, v = path.keys, values
    gram_bar = 0.5 * (gram_bar + transpose(gram_bar))
    pulled, _ = path.attend(out_bar, v, path.weighted(k), transpose(moment))
    z = solver(path, pulled)

    log_decay, runs = reverse_time(path.log_decay, path.runs)

    def ahead(queries: Array, keys: Array, values: Array, initial: Array) -> tuple[Array, Array]:
        q, k, v = (jnp.flip(a, 1) for a in (queries, keys, values))
        out, behind = linear_chunked(q, k, v, log_decay, runs, initial)
        if path.log_decay is not None:
            behind = jnp.exp(path.log_decay[:, 0])[:, None, None] * behind
        return jnp.flip(out, 1), behind

    v_unit, moment_0 = ahead(k, x, out_bar, moment_bar)
    k_values, _ = ahead(v, out_bar, x, transpose(moment_bar))
    k_xz, gram_xz = ahead(k, z, x, -gram_bar)
    k_zx, gram_zx = ahead(k, x, z, -gram_bar)
    k_unit = k_values - k_xz - k_zx
    k_bar, v_bar = path.weighted(k_unit), path.weighted(v_unit)
    beta_bar = None
    if path.beta is not None:
        beta_bar = 0.5 * (jnp.sum(k * k_unit, -1) + jnp.sum(v * v_unit, -1))

    left, first = path.remaining()
    fresh_bar = jnp.zeros_like(path.fresh)
    if first is not None:
        fresh_bar = -jnp.sum(jnp.where(first[..., None], 0.0, left[..., None] * x * z), 1)
        at_end = left[:, -1:] * jnp.diagonal(gram_bar, axis1=-2, axis2=-1)
        fresh_bar = fresh_bar + jnp.where(first[:, -1:], 0.0, at_end)
    decay_bar = None
    if path.log_decay is not None:
        pairs = jnp.sum(k * k_bar, -1) + jnp.sum(v * v_bar, -1)
        direct = jnp.sum(z * path.ridge[:, None] * x, -1)
        end = jnp.sum(gram_bar * outputs.gram, (-1, -2)) + jnp.sum(moment_bar * outputs.moment, (-1, -2))
        decay_bar = sum_to_end(direct - 0.5 * pairs, path.runs, end)
    path_bar = Path(
        keys=k_bar,
        log_decay=decay_bar,
        beta=beta_bar,
        runs=None,
        initial=-0.5 * (gram_xz + gram_zx),
        fresh=fresh_bar,
        ridge=-jnp.sum(x * z, 1),
    )
    return path_bar, z, v_bar, moment_0


solve_exactly = with_closed_form(_solve_exactly, _forward, _backward, static=(0,))


def information(
    factor: Float[Array, "batch key key"], weights: Float[Array, "batch value key"]
) -> tuple[Float[Array, "batch key key"], Float[Array, "batch value key"]]:
    """(H, S) from (F, Φ): H = (F Fᵀ)⁻¹, S = Φ H."""
    inverse = jnp.linalg.inv(factor)
    gram = matmul(transpose(inverse), inverse)
    return gram, matmul(weights, gram)


def square_root(
    gram: Float[Array, "batch key key"], moment: Float[Array, "batch value key"]
) -> tuple[Float[Array, "batch key key"], Float[Array, "batch value key"]]:
    """(F, Φ) from (H, S)."""
    covariance = jnp.linalg.inv(gram)
    return jnp.linalg.cholesky(covariance), matmul(moment, covariance)
