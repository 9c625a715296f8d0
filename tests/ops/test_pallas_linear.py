"""Causal linear attention as one kernel, against the same sums in chunks by XLA, in float64."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope import linear_attention
from mesascope.bench import relative_error, sequences
from mesascope.ops import kernels, methods
from mesascope.ops.linear import linear_chunked
from mesascope.ops.pallas_linear import linear_fused

SIZES = [(1, 5, 3), (50, 20, 20), (130, 64, 33), (70, 100, 128), (65, 20, 100)]  # time, keys, values


def outcome(op, arrays, cotangent):
    out, pull = jax.vjp(op, *arrays)
    return out, *pull(cotangent)


def in_chunks(q, k, v):
    return linear_chunked(q, k, v)[0]


def assert_within_rounding_errors(time, key, value, bound):
    *arrays, g = sequences(3, time, key, value=value, kind="gaussian")
    found = jax.jit(partial(outcome, linear_fused))(arrays, g)
    exact = jax.jit(partial(outcome, in_chunks))(*jax.tree.map(lambda a: a.astype(np.float64), (arrays, g)))
    for a, b in zip(found, exact, strict=True):
        assert relative_error(np.asarray(a, np.float64), np.asarray(b)) <= bound


@pytest.mark.parametrize(("time", "key", "value"), SIZES)
def test_outputs_and_gradients_are_those_of_chunks(time, key, value):
    assert_within_rounding_errors(time, key, value, 1e-6)


def test_one_seed_after_the_other():
    q, k, v, _ = (a.reshape(2, 2, *a.shape[1:]) for a in sequences(4, 70, 20))
    for a, b in zip(jax.vmap(linear_fused)(q, k, v), map(in_chunks, q, k, v), strict=True):
        assert relative_error(np.asarray(a), np.asarray(b)) <= 1e-6


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="jax asks the GPU what it is")
def test_forward_and_backward_are_four_kernels_on_a_gpu(monkeypatch):
    """No operation in them is unknown to the compiler of kernels; what is not plain, and few heads, are left to XLA."""
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(methods, "has_kernels", lambda: True)
    monkeypatch.setattr(methods, "TRIED", True)

    def count(heads, **given):
        arrays = [jax.ShapeDtypeStruct((heads, 100, 64), jnp.float32)] * 3
        run = jax.jit(lambda q, k, v, g: outcome(partial(linear_attention, **given), (q, k, v), g))
        program = run.trace(*arrays, arrays[2]).lower(lowering_platforms=("cuda",)).as_text()
        return len(re.findall(r"xla\.gpu\.triton\(", program))

    assert count(64) == 4
    assert count(63) == 0
    assert count(64, log_decay=jnp.zeros((64, 100), jnp.float32)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("time", "key", "value"), [*SIZES, (1024, 64, 64), (2048, 128, 128)])
def test_the_same_on_a_gpu(time, key, value):
    assert jax.default_backend() == "gpu"
    assert_within_rounding_errors(time, key, value, 2e-6)
