r"""The paper's own way: Sherman–Morrison, one time step after the other.

$$R_t = \frac1{\gamma_t}\Big(R_{t-1}
        - \frac{\beta_t R_{t-1}k_t k_t^\top R_{t-1}}{\gamma_t + \beta_t k_t^\top R_{t-1} k_t}\Big)$$
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mesascope.ops.factor import matmul
from mesascope.ops.gradients import with_closed_form
from mesascope.ops.reference import time_major
from mesascope.ops.solve import Path


def _times(matrix: Array, vector: Array) -> Array:
    return matmul(matrix, vector[..., None])[..., 0]


def _update(r: Array, k: Array, log_decay: Array | None, beta: Array | None) -> Array:
    gamma = 1.0 if log_decay is None else jnp.exp(log_decay)[:, None, None]
    rk = _times(r, k)
    gain = rk if beta is None else beta[:, None] * rk
    return (r - rk[:, :, None] * gain[:, None, :] / (gamma + jnp.sum(k * gain, -1)[:, None, None])) / gamma


def sherman_morrison(path: Path, rhs: Float[Array, "batch time key"]) -> Float[Array, "batch time key"]:
    """x_t = R_t b_t by the recursion."""
    eye = jnp.eye(rhs.shape[-1], dtype=rhs.dtype)

    def step(r: Array, inputs: dict[str, Array]) -> tuple[Array, Array]:
        if "restart" in inputs:
            r = jnp.where(inputs["restart"][:, None, None], eye / path.fresh[..., None], r)
        r = _update(r, inputs["key"], inputs.get("log_decay"), inputs.get("beta"))
        return r, _times(r, inputs["rhs"])

    _, x = jax.lax.scan(step, jnp.linalg.inv(path.initial), time_major(path, rhs))
    return jnp.moveaxis(x, 0, 1)


def _reverse_time_solve(
    covariance: Float[Array, "batch key key"],
    keys: Float[Array, "batch time key"],
    queries: Float[Array, "batch time key"],
    log_decay: Float[Array, "batch time"] | None,
) -> Float[Array, "batch time key"]:
    r"""$R_t q_t$ whose backward pass stores only $R_T$ and runs the recursion in reverse (the paper's).

    $$R_{t-1} = \gamma_t\Big(R_t - \frac{R_t k_t k_t^\top R_t}{k_t^\top R_t k_t - 1}\Big)$$

    The subtraction $k_t^\top R_t k_t - 1$ cancels when the pair dominated the step: in float32 the
    gradients are fine for $\lambda\lVert k\rVert^2$ up to about 10 and meaningless at 1000.
    """
    return _reverse_forward(covariance, keys, queries, log_decay)[0]


def _reverse_forward(covariance, keys, queries, log_decay):
    def step(r, inputs):
        k, q, g = inputs
        r = _update(r, k, g, None)
        return r, _times(r, q)

    inputs = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (keys, queries, log_decay))
    r, x = jax.lax.scan(step, covariance, inputs)
    return jnp.moveaxis(x, 0, 1), (r, inputs)


def _reverse_backward(residuals, cotangent):
    r, inputs = residuals

    def step(carry, x):
        r, r_bar = carry
        (k, q, g), x_bar = x
        rk = _times(r, k)
        before = r - rk[:, :, None] * rk[:, None, :] / (jnp.sum(k * rk, -1) - 1)[:, None, None]
        before = before if g is None else before * jnp.exp(g)[:, None, None]

        def forward(before, k, q, g):
            after = _update(before, k, g, None)
            return after, _times(after, q)

        _, pull = jax.vjp(forward, before, k, q, g)
        before_bar, *rest = pull((r_bar, x_bar))
        return (before, before_bar), tuple(rest)

    moved = jnp.moveaxis(cotangent, 1, 0)
    (_, r_bar), gradients = jax.lax.scan(step, (r, jnp.zeros_like(r)), (inputs, moved), reverse=True)
    return r_bar, *jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), gradients)


reverse_time_solve = with_closed_form(_reverse_time_solve, _reverse_forward, _reverse_backward)
