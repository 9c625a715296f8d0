"""The decoding step as one kernel, against the same formulas as array operations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope import mesa_init, mesa_step
from mesascope.bench import relative_error
from mesascope.ops import kernels, methods
from mesascope.ops.mesa import _fused_step, _plain_step
from tests.helpers import assert_close


def arguments(key, value, dtype, *, gates, heads=3):
    rng = np.random.default_rng(key + value)
    shapes = ((heads, key, key), (heads, value, key), (heads, key), (heads, key), (heads, value))
    arrays = [rng.standard_normal(shape) for shape in shapes]
    arrays += [rng.uniform(0.5, 1, (heads, 1)), rng.uniform(0, 2, (heads, 1))] if gates else [np.ones(1)] * 2
    return [jnp.asarray(a, dtype) for a in arrays]


@pytest.mark.parametrize("gates", [False, True], ids=["", "gates"])
@pytest.mark.parametrize(("key", "value"), [(1, 1), (5, 3), (20, 20), (64, 33), (100, 128)])
def test_equals_the_formulas(key, value, gates):
    """The state, the output, and every gradient; also one head after the other."""
    given = arguments(key, value, jnp.float64, gates=gates)

    @jax.jit
    def outcome(*given):
        results, pull = jax.vjp(_fused_step, *given)
        return results, pull(jax.tree.map(jnp.cos, results))

    results, pull = jax.vjp(_plain_step, *given)
    assert_close(outcome(*given), (results, pull(jax.tree.map(jnp.cos, results))))
    if gates:
        assert_close(jax.vmap(_fused_step)(*given), results)


def test_leading_axes_broadcast():
    given = arguments(5, 3, jnp.float64, gates=True)
    given[2] = given[2][0]
    given[5] = given[5][:, None]  # [3, 1, 1] beside [3, ...]: two leading axes
    assert_close(_fused_step(*given), _plain_step(*given))


def test_many_steps_stay_finite():
    """Repeated keys and a huge λ."""
    keys = jnp.asarray(np.random.default_rng(0).standard_normal((5, 1, 8)), jnp.float32)
    state = mesa_init(1e5, 8, key_dim=8)
    one = jnp.ones((1, 1), jnp.float32)

    def step(state, t):
        k = keys[t % 5]
        factor, weights, out = _fused_step(*state, keys[(t + 1) % 5], k, 1e3 * k, one, one)
        return (factor, weights), out

    start = tuple(a[None] for a in state)
    (factor, _), out = jax.lax.scan(step, start, jnp.arange(2000))
    assert np.isfinite(out).all()
    assert np.isfinite(factor).all()


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="jax asks the GPU what it is")
def test_a_step_is_one_kernel_on_a_gpu(monkeypatch):
    """No operation in it is unknown to the compiler of kernels, for which there need not be a GPU."""
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(methods, "has_kernels", lambda: True)
    state = mesa_init(jnp.ones((4, 64), jnp.float32), 64)
    q = k = v = jnp.ones((4, 64), jnp.float32)
    program = jax.jit(mesa_step).trace(state, q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"xla\.gpu\.triton\(", program)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("key", "value"), [(1, 1), (20, 20), (64, 64), (100, 128)])
def test_the_same_on_a_gpu(key, value):
    """At most four times the rounding errors of the array operations."""
    assert jax.default_backend() == "gpu"
    given = arguments(key, value, jnp.float64, gates=True, heads=200)
    truth = jax.jit(_plain_step)(*given)
    given = [a.astype(jnp.float32) for a in given]
    fused, plain = (jax.jit(step)(*given) for step in (_fused_step, _plain_step))
    for a, b, exact in zip(fused, plain, truth, strict=True):
        error, base = (relative_error(np.asarray(x, np.float64), np.asarray(exact)) for x in (a, b))
        assert error <= max(4 * base, 1e-6)
