r"""Numbers and sequences that are the same bits on every machine, for systems that make much of the last digit.

$$W^* = M\,\mathrm{diag}(e)\,M^{-1}, \qquad h_{t+1} = \mathrm{clip}(W^* h_t + \epsilon_t)$$

Where M can hardly be inverted W* is large, and clipped states of two sequences that differ in the last digit of
float32 part within a few steps. And last digits do differ: machines have their own ways to invert, to sum up, to make
normal numbers, and to contract a product and a sum. So everything here is computed in float64 and rounded to float32
**once**: where two machines agree to a part in 10¹⁵ they then get another float32 number once in 10⁸.

The roll-out is exact beyond that. W*, h and ε are float32 numbers, whose products float64 holds without rounding, and
are summed in a given order: nothing is left to the machine.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray


def uniform(shape: tuple[int, ...], low: float, high: float, *, key: PRNGKeyArray) -> Array:
    """`jax.random.uniform` in float32, but for rounding."""
    unit = jax.random.uniform(key, shape, jnp.float32)
    low32, width = np.float32(low), np.float32(high) - np.float32(low)
    with jax.enable_x64(True):
        return (jnp.float64(low32) + jnp.float64(width) * unit.astype(jnp.float64)).astype(jnp.float32)


def normal(shape: tuple[int, ...], *, key: PRNGKeyArray) -> Array:
    """`jax.random.normal` in float32, but for rounding."""
    # What it is made of, exactly: twice a multiple of 2⁻²³, less one; and no infinity.
    drawn = jax.random.uniform(key, shape, jnp.float32, np.nextafter(np.float32(-1), np.float32(0)), 1.0)
    with jax.enable_x64(True):
        return (jnp.float64(2**0.5) * lax.erf_inv(drawn.astype(jnp.float64))).astype(jnp.float32)


def similar(
    basis: Float[Array, "batch state state"], eigenvalues: Float[Array, "batch state"]
) -> Float[Array, "batch state state"]:
    r"""$M\,\mathrm{diag}(e)\,M^{-1}$, by elimination: $M^\top W^\top = \mathrm{diag}(e) M^\top$ is solved for $W^\top$.

    Without LAPACK, which several devices of one CPU may not call at the same time.
    """
    n = basis.shape[-1]
    with jax.enable_x64(True):
        turned = jnp.transpose(basis, (2, 1, 0)).astype(jnp.float64)  # the batch last: long rows for a CPU
        right = jnp.transpose(eigenvalues, (1, 0)).astype(jnp.float64)[:, None] * turned
        rows = jnp.arange(n, dtype=jnp.int32)[:, None]

        def eliminate(j: Array, rest: Array) -> Array:
            column = lax.dynamic_index_in_dim(rest, j, 1, keepdims=False)
            # The largest entry on or below the diagonal; its row changes place with row j. (argmax is compiled
            # after the setting of float64 is left, and then fails.)
            size = jnp.where(rows >= j, jnp.abs(column), -1.0)
            chosen = rows == jnp.min(jnp.where(size == jnp.max(size, 0), rows, n), 0)
            row = jnp.sum(jnp.where(chosen[:, None], rest, 0.0), 0)
            replaced = lax.dynamic_index_in_dim(rest, j, 0, keepdims=False)
            replaced_entry = lax.dynamic_index_in_dim(column, j, 0)
            rest = jnp.where(chosen[:, None], replaced, rest)
            column = jnp.where(chosen, replaced_entry, column)
            row = row / lax.dynamic_index_in_dim(row, j, 0)
            return jnp.where((rows == j)[:, None], row, rest - column[:, None] * row)

        solved = lax.fori_loop(np.int32(0), np.int32(n), eliminate, jnp.concatenate([turned, right], 1))
        return jnp.transpose(solved[:, n:], (2, 1, 0)).astype(jnp.float32)


def roll_out(
    transition: Float[Array, "batch state state"],
    first: Float[Array, "batch state"],
    noise: Float[Array, "time state batch"],
    *,
    std: float,
    clip: float | None,
) -> Float[Array, "batch time+1 state"]:
    r"""All states, the first included.

    Args:
        noise: of unit variance.
        std: what it is multiplied by.
        clip: states go on from what is within this.
    """
    with jax.enable_x64(True):
        columns = jnp.transpose(transition, (2, 1, 0)).astype(jnp.float64)
        scale = jnp.float64(np.float32(std))
        limit = float(np.float32(clip or 0))

        def step(h: Array, noise: Array) -> tuple[Array, Array]:
            total = scale * noise.astype(jnp.float64)
            for j, column in enumerate(columns):
                total = total + column * h[j]
            # A conversion to float32 and back XLA may leave out.
            h = lax.reduce_precision(total, 8, 23)
            h = h if clip is None else jnp.clip(h, -limit, limit)
            return h, h.astype(jnp.float32)

        # (Unrolled it takes five times as long on a CPU: steps are fused, and computed several times over.)
        _, later = lax.scan(step, first.T.astype(jnp.float64), noise)
    return jnp.transpose(jnp.concatenate([first.T[None], later]), (2, 0, 1))
