"""What users may have set for their own code must not reach into ours."""

import jax
import jax.numpy as jnp
import pytest

from mesascope import (
    MesaLayer,
    delta_attention,
    intention,
    linear_attention,
    mesa_attention,
    mesa_init,
    mesa_step,
)  # fmt: skip
from tests.helpers import draw

METHODS = ("reference", "recursive", "chunked", "prefix", "pallas", "neumann", "chebyshev", "cg")


@pytest.fixture
def forbidden():
    with jax.numpy_rank_promotion("raise"):
        with pytest.raises(ValueError, match="rank"):
            jnp.ones((2, 3)) + jnp.ones(3)
        yield


def trace_gradients(op, arguments):
    """What is forbidden is noticed when tracing: nothing needs to be compiled."""
    floats = {n: a for n, a in arguments.items() if jnp.issubdtype(a.dtype, jnp.floating)}
    traced = jax.eval_shape(jax.grad(lambda floats: jnp.sum(op(**arguments | floats) ** 2)), floats)
    assert jax.tree.map(jnp.shape, traced) == jax.tree.map(jnp.shape, floats)


@pytest.mark.usefixtures("forbidden")
@pytest.mark.parametrize("method", METHODS)
def test_methods_where_broadcasting_of_ranks_is_forbidden(method):
    gated = draw(lead=(2,), log_decay=0.1, beta=True, segments=True)
    plain = draw(lead=(2,))
    for arguments in (plain, gated):
        trace_gradients(lambda **a: mesa_attention(**a, method=method), arguments)


@pytest.mark.usefixtures("forbidden")
def test_other_operations_where_it_is_forbidden():
    a = draw(lead=(2,), log_decay=0.1)
    qkv = {n: a[n] for n in ("queries", "keys", "values")}
    trace_gradients(linear_attention, qkv | {"log_decay": a["log_decay"]})
    trace_gradients(delta_attention, qkv | {"beta": jax.nn.sigmoid(a["log_decay"])})
    trace_gradients(intention, qkv | {"lam": a["lam"]})
    _, state = mesa_attention(**a, return_state=True)
    first = {n: x[:, 0] for n, x in a.items() if n not in ("lam", "queries", "keys", "values")}
    mesa_step(state, *(qkv[n][:, 0] for n in qkv), **first)
    _, out = mesa_step(mesa_init(a["lam"], 3), *(qkv[n][:, 0] for n in qkv))
    assert out.shape == (2, 3)


@pytest.mark.usefixtures("forbidden")
def test_the_layer_where_it_is_forbidden():
    layer = MesaLayer(8, heads=2, decay_init=0.9, beta_init=0.5, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (6, 8), jnp.float32)
    traced = jax.eval_shape(jax.grad(lambda layer: jnp.sum(layer(x) ** 2)), layer)
    assert jax.tree.map(jnp.shape, traced) == jax.tree.map(jnp.shape, layer)
    _, out = layer.step(layer.init_state(), x[0])
    assert out.shape == (8,)
