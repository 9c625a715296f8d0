"""Causal softmax attention with its gradient in closed form."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

HIGHEST = jax.lax.Precision.HIGHEST


@jax.custom_vjp
def causal_softmax(
    queries: Float[Array, "*batch time key"],
    keys: Float[Array, "*batch time key"],
    values: Float[Array, "*batch time value"],
) -> Float[Array, "*batch time value"]:
    r"""$o_t = \sum_{i\le t} p_{ti} v_i / \sum_{i\le t} p_{ti}$ with $p_{ti} = e^{q_t^\top k_i/\sqrt d - m_t}$.

    $m_t$ is the largest exponent of row t. Outputs are divided by the sums instead of the $T \times T$ weights, and
    with $\hat o_t = \bar o_t / \sum_i p_{ti}$ the gradient takes one pass over them:
    $\bar s_{ti} = p_{ti}(\hat o_t^\top v_i - \hat o_t^\top o_t)$.
    """
    return _forward(queries, keys, values)[0]


def _forward(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    time = q.shape[-2]
    q = q * (1 / math.sqrt(q.shape[-1]))
    s = jnp.einsum("...td,...id->...ti", q, k, precision=HIGHEST)
    s = jnp.where(jnp.tril(jnp.ones((time, time), bool)), s, -jnp.inf)
    p = jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True)))
    total = jnp.sum(p, -1, keepdims=True)
    out = jnp.einsum("...ti,...iv->...tv", p, v, precision=HIGHEST) / total
    return out, (q, k, v, p, total, out)


def _backward(saved: tuple[Array, ...], out_bar: Array) -> tuple[Array, Array, Array]:
    q, k, v, p, total, out = saved
    pulled = out_bar / total
    offset = jnp.sum(pulled * out, -1, keepdims=True)
    s_bar = p * (jnp.einsum("...tv,...iv->...ti", pulled, v, precision=HIGHEST) - offset)
    v_bar = jnp.einsum("...ti,...tv->...iv", p, pulled, precision=HIGHEST)
    q_bar = jnp.einsum("...ti,...id->...td", s_bar, k, precision=HIGHEST) * (1 / math.sqrt(q.shape[-1]))
    k_bar = jnp.einsum("...ti,...td->...id", s_bar, q, precision=HIGHEST)
    return q_bar, k_bar, v_bar


causal_softmax.defvjp(_forward, _backward)
