"""Causal softmax attention with its gradient in closed form, and as one fused GPU kernel where sequences are short."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mesascope.ops.gradients import with_closed_form
from mesascope.ops.methods import has_kernels

HIGHEST = jax.lax.Precision.HIGHEST
_LONGEST, _WIDEST = 64, 64  # what one program of the fused kernel takes


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
    time, width = queries.shape[-2], max(queries.shape[-1], values.shape[-1])
    fits = time <= _LONGEST and width <= _WIDEST and queries.dtype == jnp.float32
    if fits and has_kernels():
        return fused_softmax(queries, keys, values)
    return plain_softmax(queries, keys, values)


def _plain(q: Array, k: Array, v: Array) -> Array:
    return _plain_forward(q, k, v)[0]


def _plain_forward(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    time = q.shape[-2]
    q = q * (1 / math.sqrt(q.shape[-1]))
    s = jnp.einsum("...td,...id->...ti", q, k, precision=HIGHEST)
    s = jnp.where(jnp.tril(jnp.ones((time, time), bool)), s, -jnp.inf)
    p = jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True)))
    total = jnp.sum(p, -1, keepdims=True)
    out = jnp.einsum("...ti,...iv->...tv", p, v, precision=HIGHEST) / total
    return out, (q, k, v, p, total, out)


def _plain_backward(saved: tuple[Array, ...], out_bar: Array) -> tuple[Array, Array, Array]:
    q, k, v, p, total, out = saved
    pulled = out_bar / total
    offset = jnp.sum(pulled * out, -1, keepdims=True)
    s_bar = p * (jnp.einsum("...tv,...iv->...ti", pulled, v, precision=HIGHEST) - offset)
    v_bar = jnp.einsum("...ti,...tv->...iv", p, pulled, precision=HIGHEST)
    q_bar = jnp.einsum("...ti,...id->...td", s_bar, k, precision=HIGHEST) * (1 / math.sqrt(q.shape[-1]))
    k_bar = jnp.einsum("...ti,...td->...id", s_bar, q, precision=HIGHEST)
    return q_bar, k_bar, v_bar


plain_softmax = with_closed_form(_plain, _plain_forward, _plain_backward)


def _fused(q: Array, k: Array, v: Array) -> Array:
    return remembering(q, k, v)[0]


def _heads(q: Array, k: Array, v: Array) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The leading axes, and the arrays with one of them."""
    leading = jnp.broadcast_shapes(*(a.shape[:-2] for a in (q, k, v)))
    flat = (jnp.broadcast_to(a, (*leading, *a.shape[-2:])).reshape(-1, *a.shape[-2:]) for a in (q, k, v))
    return leading, dict(zip("qkv", flat, strict=True))


def _remembering(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Outputs, and the logarithm of each row's sum of exponentials."""
    from mesascope.ops import kernels  # its compiler is not everywhere

    leading, heads = _heads(q, k, v)
    (batch, time, _), dv = heads["q"].shape, v.shape[-1]

    def kernel(refs: dict[str, Any]) -> None:
        tokens, _, _, v, s = _scores(kernels, refs, time)
        largest = jnp.max(s, 1)
        p = jnp.exp(s - largest[:, None])
        total = jnp.sum(p, 1)
        columns = kernels.indices(kernels.padded(dv))
        kernels.store(refs["new_out"], tokens, columns, (time, dv), kernels.dot(p, v) / total[:, None])
        kernels.store_vector(refs["new_log_sum"], tokens, time, largest + jnp.log(total))

    outputs = dict(
        out=jax.ShapeDtypeStruct((batch, time, dv), q.dtype),
        log_sum=jax.ShapeDtypeStruct((batch, time), q.dtype),
    )
    results = kernels.call(kernel, heads, outputs, warps=4)
    return results["out"].reshape(*leading, time, dv), results["log_sum"].reshape(*leading, time)


def _scores(kernels: Any, refs: dict[str, Any], time: int) -> tuple[Array, ...]:
    """Token numbers, queries, keys, values and masked exponents of one head."""
    d, dv = refs["q"].shape[-1], refs["v"].shape[-1]
    tokens = kernels.indices(kernels.padded(time))
    rows, columns = kernels.indices(kernels.padded(d)), kernels.indices(kernels.padded(dv))
    q, k = (kernels.load(refs[name], tokens, rows, (time, d)) for name in "qk")
    v = kernels.load(refs["v"], tokens, columns, (time, dv))
    q = q * (1 / math.sqrt(d))
    visible = tokens[:, None] >= tokens[None, :]
    return tokens, q, k, v, jnp.where(visible, kernels.dot(q, k, (1, 1)), -jnp.inf)


def _gradients(q: Array, k: Array, v: Array, log_sum: Array, out_bar: Array) -> tuple[Array, Array, Array]:
    from mesascope.ops import kernels

    leading, heads = _heads(q, k, v)
    (batch, time, d), dv = heads["q"].shape, v.shape[-1]

    def kernel(refs: dict[str, Any]) -> None:
        tokens, q, k, v, s = _scores(kernels, refs, time)
        rows, columns = kernels.indices(kernels.padded(d)), kernels.indices(kernels.padded(dv))
        bar = kernels.load(refs["bar"], tokens, columns, (time, dv))
        p = jnp.exp(s - kernels.load_vector(refs["log_sum"], tokens, time)[:, None])
        p_bar = kernels.dot(bar, v, (1, 1))
        s_bar = p * (p_bar - jnp.sum(p * p_bar, 1)[:, None])
        q_bar = kernels.dot(s_bar, k) * (1 / math.sqrt(d))
        kernels.store(refs["new_q"], tokens, rows, (time, d), q_bar)
        kernels.store(refs["new_k"], tokens, rows, (time, d), kernels.dot(s_bar, q, (0, 0)))
        kernels.store(refs["new_v"], tokens, columns, (time, dv), kernels.dot(p, bar, (0, 0)))

    inputs = heads | dict(bar=out_bar.reshape(batch, time, dv), log_sum=log_sum.reshape(batch, time))
    outputs = {name: jax.ShapeDtypeStruct(heads[name].shape, q.dtype) for name in "qkv"}
    results = kernels.call(kernel, inputs, outputs, warps=4)
    q_bar, k_bar, v_bar = (results[name].reshape(*leading, *results[name].shape[1:]) for name in "qkv")
    return q_bar, k_bar, v_bar


def _fused_forward(q: Array, k: Array, v: Array):
    out, log_sum = remembering(q, k, v)
    return out, (q, k, v, log_sum)


# Second derivatives are left to XLA, with respect to the inputs and not by way of what was saved of them.


def _pull(q: Array, k: Array, v: Array, out_bar: Array) -> tuple[Array, Array, Array]:
    return jax.vjp(plain_softmax, q, k, v)[1](out_bar)


def _gradients_backward(saved, bars):
    q, k, v, log_sum, out_bar = saved
    q_bar, k_bar, v_bar, out_bar_bar = jax.vjp(_pull, q, k, v, out_bar)[1](bars)
    return q_bar, k_bar, v_bar, jnp.zeros_like(log_sum), out_bar_bar


def _remembering_forward(q: Array, k: Array, v: Array):
    return _remembering(q, k, v), (q, k, v)


def _remembering_backward(saved, bars):
    q, k, v = saved
    return _pull(q, k, v, bars[0])


def _gradients_forward(q: Array, k: Array, v: Array, log_sum: Array, out_bar: Array):
    return _gradients(q, k, v, log_sum, out_bar), (q, k, v, log_sum, out_bar)


def _fused_backward(saved, out_bar: Array):
    q, k, v, log_sum = saved
    return gradients_of(q, k, v, log_sum, out_bar)


remembering = with_closed_form(_remembering, _remembering_forward, _remembering_backward)
gradients_of = with_closed_form(_gradients, _gradients_forward, _gradients_backward)
fused_softmax = with_closed_form(_fused, _fused_forward, _fused_backward)
