"""The same bits whatever the machine makes of the last digit: of contracting systems, and of what they are made of."""

import hashlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import ndtri

from mesascope.tasks import Contracting, Dynamics, steady

DIGESTS = {
    "as_run": "3386cbb129a86adc",
    "as_written": "b12126b97b46c356",
}


def digest(variant):
    drawn = Dynamics.contracting(variant).sample(jax.random.key(7), 256)
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in drawn if a is not None)).hexdigest()[:16]


@pytest.mark.parametrize("variant", DIGESTS)
def test_contracting_sequences_are_these_bytes(variant):
    """On every machine, with every version of JAX."""
    assert digest(variant) == DIGESTS[variant]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", DIGESTS)
def test_contracting_sequences_are_these_bytes_on_a_gpu(variant):
    assert jax.default_backend() == "gpu"
    assert digest(variant) == DIGESTS[variant]


@pytest.mark.parametrize("flags", ["--xla_cpu_max_isa=SSE4_2", "--xla_cpu_max_isa=AVX2"])
def test_instructions_of_the_processor_make_no_difference(flags):
    """SSE4.2 cannot contract a product and a sum. (Elsewhere than on x86 the flag does nothing.)"""
    program = "from tests.tasks.test_steady import DIGESTS, digest; print(*map(digest, DIGESTS))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    assert done.stdout.split() == list(DIGESTS.values()), done.stderr


@pytest.mark.parametrize("variant", DIGESTS)
def test_size_of_the_batch_and_other_axes_make_no_difference(variant):
    task, keys = Dynamics.contracting(variant, length=20), jax.random.split(jax.random.key(1), 2)
    few, many = task.sample(keys[0], 3), task.sample(keys[0], 50)
    beside = jax.jit(jax.vmap(lambda key: task.sample(key, 3)))(keys)
    for a, b, c in zip(few, many, beside, strict=True):
        if a is not None:
            np.testing.assert_array_equal(a, b[:3])
            np.testing.assert_array_equal(a, c[0])


def test_whether_float64_is_enabled_makes_no_difference():
    task, key = Dynamics.contracting(length=20), jax.random.key(2)
    with jax.enable_x64(True):
        one = task.sample(key, 5)
    with jax.enable_x64(False):
        two = task.sample(key, 5)
    for a, b in zip(one, two, strict=True):
        if a is not None:
            assert a.dtype == b.dtype == jnp.float32
            np.testing.assert_array_equal(a, b)


def test_numbers_are_those_of_jax_but_for_rounding():
    key, shape = jax.random.key(3), (10_000,)
    ours, theirs = (np.asarray(a, np.float64) for a in (
        steady.normal(shape, key=key), jax.random.normal(key, shape, jnp.float32)))  # fmt: skip
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    low = np.nextafter(np.float32(-1), np.float32(0))
    drawn = np.asarray(jax.random.uniform(key, shape, jnp.float32, low, 1.0), np.float64)
    # (erf⁻¹(x) √2 is the normal quantile of (1 + x) / 2, which knows x near 1 less well than near -1.)
    exact = np.where(drawn > 0, -1, 1) * ndtri((1 - np.abs(drawn)) / 2)
    np.testing.assert_allclose(ours, exact, rtol=6e-8)
    ours = np.asarray(steady.uniform(shape, 0.3, 0.9, key=key))
    np.testing.assert_allclose(ours, jax.random.uniform(key, shape, jnp.float32, 0.3, 0.9), rtol=3e-7)
    assert ours.min() >= np.float32(0.3)
    assert ours.max() <= np.float32(0.9)


@pytest.mark.parametrize("dim", [1, 2, 10, 25])
def test_similar_matrices(dim):
    """Against LAPACK in float64, also where rows have to change places and M can hardly be inverted."""
    rng = np.random.default_rng(dim)
    basis = rng.standard_normal((300, dim, dim)).astype(np.float32)
    if dim > 1:
        basis[0] = np.eye(dim)[::-1]
        basis[1, -1] = basis[1, 0] + 1e-4 * basis[1, -1]
    eigenvalues = rng.uniform(0.3, 0.9, (300, dim)).astype(np.float32)
    found = np.asarray(steady.similar(jnp.asarray(basis), jnp.asarray(eigenvalues)), np.float64)
    wide = basis.astype(np.float64)
    expected = np.swapaxes(
        np.linalg.solve(np.swapaxes(wide, 1, 2), np.swapaxes(wide * eigenvalues[:, None], 1, 2)), 1, 2
    )
    size = np.abs(expected).max((1, 2), keepdims=True)
    assert (np.abs(found - expected) <= 6e-8 * np.abs(expected) + 1e-9 * size).all()


@pytest.mark.parametrize("clip", [None, 0.7])
def test_every_step_is_rounded_once(clip):
    """To the last bit, in numpy: a product of two float32 numbers has no rounding in float64."""
    rng = np.random.default_rng(0)
    w, first = (
        rng.standard_normal((4, 6, 6)).astype(np.float32),
        rng.standard_normal((4, 6)).astype(np.float32),
    )
    noise = rng.standard_normal((9, 6, 4)).astype(np.float32)
    found = steady.roll_out(*map(jnp.asarray, (w, first, noise)), std=0.01, clip=clip)
    for i in range(4):
        h = first[i].astype(np.float64)
        for t in range(9):
            total = np.float64(np.float32(0.01)) * noise[t, :, i]
            for j in range(6):
                total = total + w[i, :, j].astype(np.float64) * h[j]
            h = (
                np.float32(total)
                if clip is None
                else np.clip(np.float32(total), -np.float32(clip), np.float32(clip))
            )
            np.testing.assert_array_equal(found[i, t + 1], h)
            h = h.astype(np.float64)
    np.testing.assert_array_equal(found[:, 0], first)


def test_with_a_nonlinearity_they_are_drawn_too():
    assert np.isfinite(
        Dynamics.nonlinear(transition=Contracting(), length=5).sample(jax.random.key(0), 3).states
    ).all()
