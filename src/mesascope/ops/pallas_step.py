"""A decoding step of the mesa operation as one GPU kernel, which reads the state once and writes it once.

One program has a head's matrices in registers. The formulas are those of `mesa.mesa_step`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mesascope.ops.gradients import with_closed_form
from mesascope.ops.kernels import call, indices, load, load_vector, padded, store, store_vector

Step = Callable[..., tuple[Array, Array, Array]]


def _step(refs: dict[str, Any]) -> None:
    """F and Φ after a pair, and the output."""
    key, value = refs["factor"].shape[-1], refs["weights"].shape[-2]
    rows, lines = indices(padded(key)), indices(padded(value))
    gamma, beta = refs["gamma"][0], refs["beta"][0]
    k, q = load_vector(refs["k"], rows, key), load_vector(refs["q"], rows, key)

    factor = load(refs["factor"], rows, rows, (key, key))
    b = jnp.sum(factor * k[:, None], 0)
    reach = jnp.sum(factor * b[None, :], 1)
    s = gamma + beta * jnp.sum(b * b)
    scale = 1 / jnp.sqrt(gamma)
    taken = beta / (s + jnp.sqrt(gamma * s)) * reach
    store(refs["new_factor"], rows, rows, (key, key), scale * (factor - taken[:, None] * b[None, :]))

    weights = load(refs["weights"], lines, rows, (value, key))
    surprise = load_vector(refs["v"], lines, value) - jnp.sum(weights * k[None, :], 1)
    weights = weights + surprise[:, None] * (beta / s * reach)[None, :]
    store(refs["new_weights"], lines, rows, (value, key), weights)
    store_vector(refs["new_out"], lines, value, jnp.sum(weights * q[None, :], 1))


def fused_step(
    plain: Step,
    factor: Float[Array, "batch key key"],
    weights: Float[Array, "batch value key"],
    q: Float[Array, "batch key"],
    k: Float[Array, "batch key"],
    v: Float[Array, "batch value"],
    gamma: Float[Array, "batch 1"],
    beta: Float[Array, "batch 1"],
) -> tuple[Float[Array, "batch key key"], Float[Array, "batch value key"], Float[Array, "batch value"]]:
    """The state after a pair, and the output.

    Args:
        plain: the same as array operations, whose gradient is taken.
    """
    widest = max(padded(factor.shape[-1]), padded(weights.shape[-2]))

    def kernel(*arrays: Array) -> tuple[Array, Array, Array]:
        names = ("factor", "weights", "q", "k", "v", "gamma", "beta")
        given: dict[str, Array | None] = dict(zip(names, arrays, strict=True))
        outputs = {
            name: jax.ShapeDtypeStruct(like.shape, v.dtype)
            for name, like in dict(factor=factor, weights=weights, out=v).items()
        }
        in_place = dict(factor="factor", weights="weights")
        found = call(_step, given, outputs, warps=8 if widest > 64 else 4, in_place=in_place)
        return found["factor"], found["weights"], found["out"]

    def forward(*arrays: Array) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
        return kernel(*arrays), arrays

    def backward(arrays: tuple[Array, ...], bars: tuple[Array, ...]) -> tuple[Array, ...]:
        return jax.vjp(plain, *arrays)[1](bars)

    return with_closed_form(kernel, forward, backward)(factor, weights, q, k, v, gamma, beta)
