"""The kernels for wide heads that take every chunk at once: against the definition and against float64.

No method takes them yet (`pallas.PREFIX`): here they are interpreted, or compiled under `pytest -m gpu`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from mesascope import mesa_attention
from mesascope.ops import pallas
from tests.helpers import assert_close, draw


@pytest.fixture(autouse=True)
def prefix(monkeypatch):
    monkeypatch.setattr(pallas, "PREFIX", True)


@partial(jax.jit, static_argnums=1)
def outcome(a, method):
    def final(a):
        out, state = mesa_attention(**a, method=method, return_state=True)
        return out, state.covariance, state.weights

    results, pull = jax.vjp(final, a)
    return results, pull(jax.tree.map(jnp.cos, results))


@pytest.mark.parametrize(("time", "key", "value", "beta"), [(70, 40, 33, True), (130, 33, 64, False)])
def test_equals_the_definition(time, key, value, beta):
    a = draw(lead=(2,), time=time, key=key, value=value, beta=beta)
    assert_close(outcome(a, "pallas"), outcome(a, "reference"), scale=10)
