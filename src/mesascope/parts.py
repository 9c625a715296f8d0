"""What layers of a Transformer are made of, apart from their mixers: products, norms, features, codes of positions."""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mesascope.ops.gradients import with_closed_form


def wide(dtype: DTypeLike) -> jnp.dtype:
    """What is computed in more than bfloat16 has this dtype."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _product(x: Array, matrix: Array, precision: jax.lax.Precision, out: jnp.dtype) -> Array:
    return jnp.matmul(x, matrix.astype(x.dtype), precision=precision, preferred_element_type=out)


def _product_forward(
    x: Array, matrix: Array, precision: jax.lax.Precision, out: jnp.dtype
) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, matrix, precision, out), (x, matrix)


def _product_backward(
    precision: jax.lax.Precision, out: jnp.dtype, saved: tuple[Array, Array], bar: Array
) -> tuple[Array, Array]:
    x, matrix = saved
    bar = bar.astype(x.dtype)
    rows, columns = x.reshape(-1, x.shape[-1]), bar.reshape(-1, bar.shape[-1])
    # Sums over all tokens of a batch are not rounded to bfloat16.
    sums = jnp.einsum("ri,ro->io", rows, columns, precision=precision, preferred_element_type=wide(x.dtype))
    return (
        jnp.einsum("...o,io->...i", bar, matrix.astype(x.dtype), precision=precision),
        sums.astype(matrix.dtype),
    )


# What JAX derives is the gradient's transpose, and XLA's CPU backend then copies the whole batch transposed.
matmul = with_closed_form(_product, _product_forward, _product_backward, static=(2, 3))
"""`matmul(x, matrix, precision, out)`: products in the dtype of x, summed up in the dtype `out`."""


# Added to λ: where an optimizer drives λ to zero the layer ends as (small) linear attention, not as 1/0.
LAM_FLOOR = 1e-15


def positive_lam(raw: Float[Array, "*head"]) -> Float[Array, "*head"]:
    r"""$\lambda = \mathrm{softplus}$ of a parameter, and a little more."""
    return jax.nn.softplus(raw) + LAM_FLOOR


def inverse_softplus(y: float) -> float:
    return y + math.log(-math.expm1(-y))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    # By erf, not by erfc as in jax.nn: several times faster, and as accurate where it matters (absolutely).
    "gelu": lambda x: 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def positions(
    time: int, dim: int, *, start: Int[Array, ""] | None = None, dtype: DTypeLike = jnp.float32
) -> Float[Array, "time dim"]:
    """Sinusoidal codes of `time` positions from `start` (0) on: sine in even columns, cosine in odd ones."""
    column = jnp.arange(dim)
    rate = jnp.exp(-math.log(10000.0) / dim * (column - column % 2).astype(dtype))
    position = jnp.arange(time, dtype=jnp.int32) + (0 if start is None else start)
    angle = position.astype(dtype)[:, None] * rate
    return jnp.where(column % 2 == 0, jnp.sin(angle), jnp.cos(angle))


def dpfp(x: Float[Array, "*batch key"], nu: int) -> Float[Array, "*batch 2*nu*key"]:
    r"""$\phi(x)$: products of $r = \mathrm{relu}([x, -x])$ with itself rolled by 1 to ν places."""
    r = jax.nn.relu(jnp.concatenate([x, -x], -1))
    return jnp.concatenate([r * jnp.roll(r, i, -1) for i in range(1, nu + 1)], -1)


def split_heads(x: Float[Array, "*batch time heads*key"], heads: int) -> Float[Array, "*batch head time key"]:
    return jnp.swapaxes(x.reshape(*x.shape[:-1], heads, -1), -2, -3)


def join_heads(x: Float[Array, "*batch head time key"]) -> Float[Array, "*batch time heads*key"]:
    x = jnp.swapaxes(x, -2, -3)
    return x.reshape(*x.shape[:-2], -1)


def beside_codes(x: Array, codes: Array) -> Array:
    return jnp.concatenate([x, jnp.broadcast_to(codes, (*x.shape[:-1], codes.shape[-1]))], -1)


def layer_norm(x: Array, scale: Array | None) -> Array:
    """Mean zero and variance one over the last axis, times the scale; x itself where there is none."""
    if scale is None:
        return x
    precise = wide(x.dtype)
    return (scale.astype(precise) * _standardized(x.astype(precise))).astype(x.dtype)


def _standardized(x: Array) -> Array:
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def normalized(x: Array, by: Literal["l2", "sum", "layer_norm"]) -> Array:
    """Scaled by the Euclidean norm, by the sum, or to mean zero and variance one, over the last axis."""
    if by == "layer_norm":
        return _standardized(x)
    if by == "sum":
        return x / (jnp.sum(x, -1, keepdims=True) + 1e-6)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, -1, keepdims=True), 1e-12))
