"""Float32 errors of the default method against float64: at most 4× those of the classical recursion.

The classical float32 recursion (Sherman–Morrison, o = S_t(R_t q_t)) and autodiff through it set the scale; the
floor is 2e-6. Errors are over whole sequences and at least 16 draws.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from mesascope import mesa_attention
from mesascope.bench import OPS, classical_scan, errors, exact64, relative_error, sequences, with_gradients

KINDS = ("gaussian", "unit", "dynamics", "deficient")
LAMS = (1e-2, 1.0, 10.0, 1e3)
TIMES = (1, 2, 63, 64, 100, 1024, 4096)
WIDTHS = (1, 20, 64, 128, 384)
NAMES = ("output", "∂q", "∂k", "∂v", "∂λ")


def grid():
    """Corners and a seeded sample of the affordable part run always; the whole grid is `slow`."""
    rng = np.random.default_rng(0)
    for kind, lam, time, width in itertools.product(KINDS, LAMS, TIMES, WIDTHS):
        cost = time * width**2
        corner = (time, width) in ((1, 1), (64, 64), (100, 20)) and lam in (1e-2, 1e3)
        sampled = cost <= 1024 * 20**2 and rng.uniform() < 0.08
        fast = (corner or sampled) and cost <= 1024 * 20**2
        yield pytest.param(kind, lam, time, width, marks=() if fast else pytest.mark.slow)


def check(kind, lam, time, width, draws=16):
    ours = errors(OPS["mesa, chunked"], kind, draws, time, width, lam)
    classical = errors(OPS["autodiff of the scan"], kind, draws, time, width, lam)
    for name, error, base in zip(NAMES, ours, classical, strict=True):
        assert error <= max(4 * base, 2e-6), f"{name}: {error:.1e}, classical {base:.1e}"
    if kind == "unit" and lam <= 10:
        assert max(ours) <= 1e-5, ours


@pytest.mark.parametrize(("kind", "lam", "time", "width"), list(grid()))
def test_at_most_four_times_the_classical_error(kind, lam, time, width):
    check(kind, lam, time, width)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "lam"), list(itertools.product(KINDS, LAMS)))
def test_the_same_on_a_gpu_with_default_matmul_settings(kind, lam):
    check(kind, lam, 1024, 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lam", [1e-2, 1e3])
def test_float64(kind, lam):
    q, k, v, g = sequences(2, 100, 20, kind=kind)
    exact = exact64(q, k, v, lam, g)
    wide = [jnp.asarray(a, jnp.float64) for a in (q, k, v, np.full((2, 1), lam), g)]
    got = with_gradients(lambda *a: mesa_attention(*a, method="chunked"))(*wide)
    for name, a, b in zip(NAMES, got, exact, strict=True):
        assert relative_error(a, b) <= 1e-9, name


def test_the_yardstick_can_tell():
    """Sanity of the measure: the classical scan's own error is there and grows with λ."""
    low, high = (errors(classical_scan, "gaussian", 16, 100, 20, lam)[0] for lam in (1.0, 1e3))
    assert 1e-8 < low < 1e-4 < high < 1e-1
