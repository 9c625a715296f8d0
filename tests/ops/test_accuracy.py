"""Float32 errors of the default method against float64: at most 4× those of the classical recursion.

The classical float32 recursion (Sherman–Morrison, o = S_t(R_t q_t)) and autodiff through it set the scale; the
floor is 2e-6. Errors are over whole sequences and 16 draws. Float64 is dense solves in numpy; where those would
take hours, it is the library in float64, which is compared with them below.
"""

import itertools
import random

import jax
import numpy as np
import pytest

from mesascope.bench import errors, exact64, in_groups, relative_error, sequences
from mesascope.ops.methods import Pallas

OPTIMIZED = True

KINDS = ("gaussian", "unit", "dynamics", "deficient")
LAMS = (1e-2, 1.0, 10.0, 1e3)
TIMES = (1, 2, 63, 64, 100, 1024, 4096)
WIDTHS = (1, 20, 64, 128, 384)
FLOOR = 2e-6
NAMES = ("output", "∂q", "∂k", "∂v", "∂λ")
OURS, PREFIX, FUSED, CLASSICAL = (
    "mesa, chunked",
    "mesa, prefix",
    "mesa, fused kernels",
    "autodiff of the scan",
)


def exact(inputs, lam):
    q, k, v, g = inputs
    if k.shape[1] * k.shape[2] ** 2 <= 100 * 64**2 and jax.default_backend() == "cpu":
        return exact64(q, k, v, lam, g)
    return in_groups(OURS, *(a.astype(np.float64) for a in (q, k, v)), lam, g.astype(np.float64))


def assert_within_bound(kind, lam, time, width, op=OURS):
    inputs = sequences(16, time, width, value=min(width, 128) if op == FUSED else None, kind=kind)
    truth = exact(inputs, lam)
    ours = errors(op, inputs, lam, truth)
    # The classical recursion is slow: asked only where the floor does not settle it (NaN included).
    if not all(error <= FLOOR for error in ours):
        classical = errors(CLASSICAL, inputs, lam, truth)
        for name, error, base in zip(NAMES, ours, classical, strict=True):
            # The classical recursion's gradient can be NaN; then its worst finite error is the measure.
            base = np.nanmax(classical) if np.isnan(base) else base
            assert error <= max(4 * base, FLOOR), f"{kind} λ={lam} {name}: {error:.1e}, classical {base:.1e}"
    if kind == "unit" and lam <= 10:
        assert max(ours) <= 1e-5, ours


CELLS = list(itertools.product(KINDS, LAMS))
SHAPES = list(itertools.product(TIMES, WIDTHS))
# The fast tier: two corners in full, and a random sample of the shapes that take seconds.
CORNERS = {(1, 1): CELLS, (100, 20): CELLS}
_rng = random.Random(0)
_affordable = [s for s in SHAPES if s[0] * s[1] ** 2 <= 1024 * 64**2 and s not in CORNERS]
SAMPLE = {shape: _rng.sample(CELLS, 5) for shape in sorted(_rng.sample(_affordable, 5))}


@pytest.mark.parametrize("shape", [*CORNERS, *SAMPLE], ids=str)
def test_at_most_four_times_the_classical_error_in_a_sample(shape):
    for kind, lam in (CORNERS | SAMPLE)[shape]:
        assert_within_bound(kind, lam, *shape)


@pytest.mark.parametrize("shape", [(100, 20), pytest.param((1024, 64), marks=pytest.mark.slow)], ids=str)
def test_the_same_without_a_loop_over_chunks(shape):
    for kind, lam in CELLS:
        assert_within_bound(kind, lam, *shape, PREFIX)


# Every case of a shape in one test: a shape compiles once.
@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(("time", "width"), SHAPES)
def test_at_most_four_times_the_classical_error(time, width):
    for kind, lam in CELLS:
        assert_within_bound(kind, lam, time, width)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("time", "width", "op"),
    [(*s, op) for op in (OURS, FUSED) for s in SHAPES if op == OURS or s[1] <= Pallas.WIDEST],
)
def test_the_same_on_a_gpu_with_default_matmul_settings(time, width, op):
    assert jax.default_backend() == "gpu"
    for kind, lam in CELLS:
        assert_within_bound(kind, lam, time, width, op)


@pytest.mark.parametrize(
    ("time", "width"), [(1, 5), (100, 20), pytest.param(1024, 64, marks=pytest.mark.slow)]
)
def test_float64(time, width):
    for kind, lam in itertools.product(KINDS, (1e-2, 1e3)):
        q, k, v, g = sequences(2, time, width, kind=kind)
        truth = exact64(q, k, v, lam, g)
        got = in_groups(OURS, *(a.astype(np.float64) for a in (q, k, v)), lam, g.astype(np.float64))
        for name, a, b in zip(NAMES, got, truth, strict=True):
            assert relative_error(a, b) <= 1e-9, f"{kind} λ={lam} {name}"


def test_the_yardstick_can_tell():
    """Sanity of the measure: the classical scan's own error is there and grows with λ."""
    inputs = sequences(16, 100, 20, kind="gaussian")
    low, high = (errors(CLASSICAL, inputs, lam)[0] for lam in (1.0, 1e3))
    assert 1e-8 < low < 1e-4 < high < 1e-1
