"""Softmax attention's closed-form gradient against autodiff of the textbook formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.ops.softmax import causal_softmax
from tests.helpers import assert_close


def textbook(q, k, v):
    time, d = q.shape[-2:]
    logits = jnp.einsum("...td,...id->...ti", q, k, precision="highest") / np.sqrt(d).astype(q.dtype)
    weights = jax.nn.softmax(jnp.where(np.tri(time, dtype=bool), logits, -jnp.inf), -1)
    return jnp.einsum("...ti,...iv->...tv", weights, v, precision="highest")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize(("lead", "time", "scale"), [((), 1, 1.0), ((2, 3), 7, 1.0), ((2,), 50, 30.0)])
def test_values_and_gradients(lead, time, scale, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k = (scale * jax.random.normal(x, (*lead, time, 4), dtype) for x in keys[:2])
    v, g = (jax.random.normal(x, (*lead, time, 5), dtype) for x in keys[2:])
    q64, k64, v64, g64 = (a.astype(jnp.float64) for a in (q, k, v, g))
    expected, pull = jax.vjp(textbook, q64, k64, v64)
    out, ours = jax.vjp(causal_softmax, q, k, v)
    # Exponents of size s are rounded by ε·s.
    assert_close(out, expected, scale=scale)
    for name, a, b in zip("qkv", ours(g), pull(g64), strict=True):
        assert_close(a, b, scale=5 * scale, name=name)
        assert a.dtype == dtype


def test_under_vmap_and_with_enormous_logits():
    q, k, v = (1e3 * jax.random.normal(jax.random.key(i), (3, 2, 6, 4)) for i in range(3))
    slope = jax.vmap(jax.grad(lambda q, k, v: jnp.sum(causal_softmax(q, k, v) ** 2), (0, 1, 2)))
    for leaf in slope(q, k, v):
        assert np.isfinite(leaf).all()
    assert_close(jax.vmap(causal_softmax)(q, k, v), causal_softmax(q, k, v))
