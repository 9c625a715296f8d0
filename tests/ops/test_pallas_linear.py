"""Causal linear attention and the delta rule as kernels, against the same in chunks by XLA, in float64."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope import delta_attention, linear_attention
from mesascope.bench import relative_error, sequences
from mesascope.ops import kernels, methods
from mesascope.ops.linear import delta_chunked, linear_chunked
from mesascope.ops.pallas_linear import innovations_fused, linear_fused

SIZES = [(1, 5, 3), (50, 20, 20), (130, 64, 33), (70, 100, 128), (65, 20, 100)]  # time, keys, values


def outcome(op, arrays, cotangent):
    out, pull = jax.vjp(op, *arrays)
    return out, *pull(cotangent)


def linear_in_chunks(q, k, v):
    return linear_chunked(q, k, v)[0]


def delta_fused(q, k, v, beta):
    weighted = beta[..., None] * k
    return linear_fused(q, weighted, innovations_fused(k, weighted, v))


def delta_in_chunks(q, k, v, beta):
    return delta_chunked(q, k, v, beta)[0]


def given(heads, time, key, value, name):
    """Arguments, and a cotangent; for the delta rule, rates of which some overshoot and some are zero."""
    q, k, v, g = sequences(heads, time, key, value=value, kind="gaussian")
    if name == "linear":
        return (q, k, v), g
    beta = np.random.default_rng(0).uniform(-0.3, 1.8, (heads, time)).clip(0).astype(np.float32)
    return (q, k / np.linalg.norm(k, axis=-1, keepdims=True), v, beta), g


OPS = {"linear": (linear_fused, linear_in_chunks), "delta": (delta_fused, delta_in_chunks)}


def assert_within_rounding_errors(name, time, key, value, bound):
    fused, in_chunks = OPS[name]
    arrays, g = given(3, time, key, value, name)
    found = jax.jit(partial(outcome, fused))(arrays, g)
    exact = jax.jit(partial(outcome, in_chunks))(*jax.tree.map(lambda a: a.astype(np.float64), (arrays, g)))
    for a, b in zip(found, exact, strict=True):
        assert relative_error(np.asarray(a, np.float64), np.asarray(b)) <= bound


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("time", "key", "value"), SIZES)
def test_outputs_and_gradients_are_those_of_chunks(name, time, key, value):
    assert_within_rounding_errors(name, time, key, value, 1e-6)


@pytest.mark.parametrize("name", OPS)
def test_one_seed_after_the_other(name):
    fused, in_chunks = OPS[name]
    arrays = [a.reshape(2, 2, *a.shape[1:]) for a in given(4, 70, 20, 20, name)[0]]
    for a, b in zip(jax.vmap(fused)(*arrays), map(in_chunks, *arrays), strict=True):
        assert relative_error(np.asarray(a), np.asarray(b)) <= 1e-6


@pytest.mark.parametrize("name", OPS)
def test_second_derivatives(name):
    arrays, g = jax.tree.map(lambda a: a.astype(np.float64), given(2, 70, 5, 3, name))

    def slope(op, arrays):
        return sum(
            jnp.sum(jnp.sin(a)) for a in jax.grad(lambda arrays: jnp.sum(g * op(*arrays) ** 2))(arrays)
        )

    for a, b in zip(*(jax.jit(jax.grad(partial(slope, op)))(arrays) for op in OPS[name]), strict=True):
        assert relative_error(np.asarray(a), np.asarray(b)) <= 1e-12


def test_the_delta_rule_learns_a_pair_that_comes_again():
    """With rate one and a key of unit norm nothing is left of a value that was there before."""
    k = np.tile(np.eye(3, dtype=np.float32)[0], (1, 40, 1))
    v = np.ones((1, 40, 5), np.float32)
    left = np.asarray(innovations_fused(k, k, v))
    np.testing.assert_allclose(left[:, 0], 1.0)
    np.testing.assert_allclose(left[:, 1:], 0.0, atol=1e-6)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="jax asks the GPU what it is")
def test_forward_and_backward_are_a_few_kernels_on_a_gpu(monkeypatch):
    """No operation in them is unknown to the compiler of kernels; what is not plain, and few heads, are left to XLA."""
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(methods, "has_kernels", lambda: True)

    def count(op, heads, **options):
        width = jax.ShapeDtypeStruct((heads, 100, 64), jnp.float32)
        arrays = [width] * 3 + [jax.ShapeDtypeStruct((heads, 100), jnp.float32)] * (op is delta_attention)
        run = jax.jit(lambda arrays, g: outcome(partial(op, **options), arrays, g))
        program = run.trace(arrays, width).lower(lowering_platforms=("cuda",)).as_text()
        return len(re.findall(r"xla\.gpu\.triton\(", program))

    for op, kernels_of_op, enough in ((linear_attention, 4, 256), (delta_attention, 9, 64)):
        assert count(op, enough) == kernels_of_op
        assert count(op, enough - 1) == 0
        assert count(op, enough, log_decay=jnp.zeros((enough, 100), jnp.float32)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("time", "key", "value"), [*SIZES, (1024, 64, 64), (2048, 128, 128)])
def test_the_same_on_a_gpu(name, time, key, value):
    assert jax.default_backend() == "gpu"
    assert_within_rounding_errors(name, time, key, value, 2e-6)
