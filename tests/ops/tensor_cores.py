"""Products as the tensor cores of a GPU make them, for interpreted kernels.

Of float32: three products of TF32, eleven digits each. Of bfloat16: eight digits. A sum takes eight or sixteen terms at
a time, and what does not fit in float32 is cut off.
"""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax import lax

from mesascope.ops import kernels, pallas_chunks, pallas_states


def dot(a, b, contract=(1, 0), *, bits=24, six=False):
    """In the place of `kernels.dot`; needs float64 outside of kernels too."""
    assert jnp.result_type(float) == jnp.float64
    if a.dtype == jnp.float64:
        return kernels._product(a, b, contract, lax.Precision.HIGHEST)
    a, b = (a.T if contract[0] == 0 else a), (b if contract[1] == 0 else b.T)
    if bits < 24 or six or jnp.bfloat16 in (a.dtype, b.dtype):
        count, terms = 3 if bits == 24 else 2, 16
        parts = [kernels.parts_of(x, count) for x in (a, b)]
    else:
        count, terms = 2, 8
        parts = [_tf32(x) for x in (a, b)]
    sum = jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
    for order in reversed(range(count)):
        for i, x in enumerate(parts[0]):
            if 0 <= order - i < len(parts[1]):
                sum = _added(sum, x, parts[1][order - i], terms)
    return sum


def _tf32(x):
    high = kernels._rounded(x, 13)
    return high, kernels._rounded(x - high, 13)


def _added(sum, a, b, terms):
    for first in range(0, a.shape[1], terms):
        some = slice(first, first + terms)
        met = jnp.matmul(a[:, some].astype(float), b[some].astype(float), precision=lax.Precision.HIGHEST)
        sum = _cut(sum.astype(float) + met)
    return sum


def _cut(x):
    """Float32, towards zero."""
    near = x.astype(jnp.float32)
    return jnp.where(
        jnp.abs(near.astype(float)) > jnp.abs(x), jnp.nextafter(near, jnp.zeros_like(near)), near
    )


@contextmanager
def in_place_of_ours(monkeypatch):
    """All products in kernels that are traced within."""
    jax.clear_caches()
    with monkeypatch.context() as patch:
        for module in (kernels, pallas_chunks, pallas_states):
            patch.setattr(module, "dot", dot)
        yield
    jax.clear_caches()
