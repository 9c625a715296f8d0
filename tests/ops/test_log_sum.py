"""One pass over rows of logits, and the three that it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from mesascope.ops.log_sum import _fused, _plain, log_sum_and_entry
from tests.helpers import assert_close


@pytest.mark.parametrize(
    ("height", "width", "count"), [(1, 1, 1), (6, 1030, 1025), (3, 2048, 2048), (5, 100, 63)]
)
@pytest.mark.parametrize("size", [1.0, 1e3])
def test_both_are_the_definition(height, width, count, size):
    rows = np.float32(size) * np.asarray(
        jax.random.normal(jax.random.key(0), (2, height, width), jnp.float32)
    )
    entry = np.asarray(jax.random.randint(jax.random.key(1), (2, height), 0, count))
    expected = logsumexp(rows[..., :count].astype(np.float64), -1)
    for way in (_fused, _plain):
        log_sum, found = way(jnp.asarray(rows), jnp.asarray(entry), count)
        assert_close(log_sum, expected.astype(np.float32))
        np.testing.assert_array_equal(found, np.take_along_axis(rows, entry[..., None], -1)[..., 0])


def test_what_lies_beyond_is_not_looked_at():
    rows = jnp.array([[0.0, 1.0, jnp.nan, jnp.inf]], jnp.float32)
    log_sum, _ = _fused(rows, jnp.array([1]), 2)
    assert_close(log_sum, np.log1p(np.exp(np.ones(1, np.float32))))


@pytest.mark.gpu
def test_on_a_gpu():
    rows = 5 * jax.random.normal(jax.random.key(0), (4, 1000, 50304), jnp.float32)
    entry = jax.random.randint(jax.random.key(1), (4, 1000), 0, 50257)
    with jax.numpy_dtype_promotion("standard"):
        for a, b in zip(log_sum_and_entry(rows, entry, 50257), _plain(rows, entry, 50257), strict=True):
            assert_close(a, b)
