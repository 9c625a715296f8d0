"""One dense solve per time step: the definition, slow and obviously right."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mesascope.ops.solve import Path


def solve_each_step(path: Path, rhs: Float[Array, "batch time key"]) -> Float[Array, "batch time key"]:
    """Accumulate H_t and solve (H_t + diag ridge) x_t = b_t, for t = 1, 2, …"""
    eye = jnp.eye(rhs.shape[-1], dtype=rhs.dtype)

    def step(h: Array, inputs: dict[str, Array]) -> tuple[Array, Array]:
        k, b = inputs["key"], inputs["rhs"]
        if "restart" in inputs:
            h = jnp.where(inputs["restart"][:, None, None], path.fresh[..., None] * eye, h)
        if "log_decay" in inputs:
            h = jnp.exp(inputs["log_decay"])[:, None, None] * h
        pair = k[:, :, None] * k[:, None, :]
        h = h + (pair if "beta" not in inputs else inputs["beta"][:, None, None] * pair)
        return h, jnp.linalg.solve(h + path.ridge[..., None] * eye, b[..., None])[..., 0]

    with jax.default_matmul_precision("highest"):
        _, x = jax.lax.scan(step, path.initial, time_major(path, rhs))
    return jnp.moveaxis(x, 0, 1)


def time_major(path: Path, rhs: Array) -> dict[str, Array]:
    """What happens at each step, as a scan over time takes it."""
    inputs = {"key": path.keys, "rhs": rhs}
    if path.log_decay is not None:
        inputs["log_decay"] = path.log_decay
    if path.beta is not None:
        inputs["beta"] = path.beta
    if path.runs is not None:
        inputs["restart"] = jnp.pad(path.runs[:, 1:] != path.runs[:, :-1], ((0, 0), (1, 0)))
    return {name: jnp.moveaxis(array, 1, 0) for name, array in inputs.items()}
