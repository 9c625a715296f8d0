"""The fused kernels where they differ from the other methods: which kernel runs, and float32 on hostile input.

Outputs, states and gradients are compared with `reference` in test_methods.py, like those of every method. Wide heads
walk by blocks here; test_pallas_prefix.py has the kernels that take all chunks at once. On a CPU the kernels are
interpreted; `pytest -m gpu` compiles them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope import mesa_attention
from mesascope.bench import relative_error
from mesascope.ops import pallas, pallas_prefix
from mesascope.ops.sequence import Sequence
from tests.helpers import assert_close, draw
from tests.ops.test_accuracy import CELLS, FUSED, assert_within_bound
from tests.ops.test_finite import KINDS, hostile


@pytest.fixture(autouse=True)
def by_blocks(monkeypatch):
    monkeypatch.setattr(pallas_prefix, "applies", lambda seq: False)


def sequence(time, width, *, decays=False, runs=False, state=False):
    array = partial(jnp.zeros, dtype=jnp.float32)
    return Sequence(
        *(array((2, time, width)) for _ in range(3)), array((2, width)),
        array((2, time)) if decays else None, None, jnp.zeros((2, time), jnp.int32) if runs else None,
        array((2, width, width)) if state else None, array((2, width, width)) if state else None,
    )  # fmt: skip


def test_the_plan_names_the_kernels():
    narrow, wide = sequence(50, 20), sequence(50, 64)
    assert pallas.plan(narrow, False) == pallas.Plan(want_state=False, blocks=False, blocks_back=False)
    assert pallas.plan(wide, False) == pallas.Plan(want_state=False, blocks=True, blocks_back=True)
    assert not pallas.plan(sequence(50, 64, decays=True), False).blocks
    assert not pallas.plan(sequence(50, 64, runs=True), False).blocks
    assert pallas.plan(sequence(200, 20), False).blocks_back
    assert pallas.plan(sequence(50, 20, decays=True), False).blocks_back
    assert not pallas.plan(sequence(50, 64, state=True), False).blocks_back


@pytest.mark.parametrize(
    ("time", "key", "value", "features"),
    [
        (40, 20, 7, {"beta": True}),  # narrow and short: token by token both ways
        (40, 40, 33, {"beta": True}),  # wide: by blocks both ways
        pytest.param(140, 5, 3, {"log_decay": 0.1}, marks=pytest.mark.slow),  # long: blocks back
        pytest.param(40, 40, 3, {"log_decay": 0.1}, marks=pytest.mark.slow),  # tokens, then blocks back
        pytest.param(40, 3, 40, {"segments": True}, marks=pytest.mark.slow),  # states stored for the way back
    ],
)
def test_every_kernel_equals_the_definition(time, key, value, features):
    a = draw(lead=(2,), time=time, key=key, value=value, **features)
    fixed = {"segment_ids": a.pop("segment_ids")} if "segment_ids" in a else {}

    @partial(jax.jit, static_argnums=1)
    def outcome(a, method):
        out, pull = jax.vjp(lambda a: mesa_attention(**a, **fixed, method=method), a)
        return out, pull(jnp.cos(out))

    assert_close(outcome(a, "pallas"), outcome(a, "reference"), scale=10)


@pytest.mark.parametrize("strength", [5.0, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("time", [30, pytest.param(140, marks=pytest.mark.slow)])
def test_strong_decay_needs_no_other_way(strength, time):
    """Nothing in the kernels grows with the decay: e^-5 a step is as good as none."""
    a = draw(lead=(2,), time=time, key=2, value=2, log_decay=strength)

    @partial(jax.jit, static_argnums=1)
    def outcome(a, method):
        out, pull = jax.vjp(lambda a: mesa_attention(**a, method=method), a)
        return out, pull(jnp.cos(out))

    assert_close(outcome(a, "pallas"), outcome(a, "reference"), scale=1e3)


@pytest.mark.parametrize(("time", "key"), [(33, 20), pytest.param(70, 40, marks=pytest.mark.slow)])
def test_never_nan(time, key):
    beta = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, time)), jnp.float32)

    @jax.jit
    def outcome(q, k, v, lam, g, beta):
        out, pull = jax.vjp(partial(mesa_attention, method="pallas"), q, k, v, lam)
        weighted, pull_weighted = jax.vjp(partial(mesa_attention, method="pallas", beta=beta), q, k, v, lam)
        return out, pull(g), weighted, pull_weighted(g)

    for kind in KINDS:
        for seed, (lam, size) in enumerate([(1e-4, 1e3), (1e5, 1e3), (1e5, 1.0), (1.0, 1e-3)]):
            inputs = hostile(kind, seed, time=time, key=key, lam=lam, size=size)
            finite = jax.tree.map(lambda a: bool(jnp.all(jnp.isfinite(a))), outcome(*inputs, beta))
            assert all(jax.tree.leaves(finite)), (kind, lam, size, finite)


@pytest.mark.parametrize(
    ("time", "width"),
    [
        (50, 20),
        pytest.param(100, 1, marks=pytest.mark.slow),
        pytest.param(100, 64, marks=pytest.mark.slow),
        pytest.param(512, 20, marks=pytest.mark.slow),
    ],
)
def test_at_most_four_times_the_classical_error(time, width):
    """Interpreted; test_accuracy.py has every shape for the compiled kernels."""
    for kind, lam in CELLS:
        assert_within_bound(kind, lam, time, width, FUSED)


def assert_equal_to_the_definition(time, width, features, value=None):
    """Outputs, states and gradients in float32, against dense solves in float64."""
    value = min(width, 128) if value is None else value
    a = draw(lead=(3,), time=time, key=width, value=value, dtype=np.float32, **features)
    fixed = {"segment_ids": a.pop("segment_ids")} if "segment_ids" in a else {}

    @partial(jax.jit, static_argnums=1)
    def outcome(a, method):
        (out, state), pull = jax.vjp(
            lambda a: mesa_attention(**a, **fixed, method=method, return_state=True), a
        )
        return out, state.covariance, state.weights, pull((jnp.cos(out), jax.tree.map(jnp.ones_like, state)))

    exact = outcome({n: x.astype(jnp.float64) for n, x in a.items()}, "reference")
    assert_close(outcome(a, "pallas"), exact, scale=10)


FEATURES = pytest.mark.parametrize(
    "features", [{}, {"log_decay": 0.1, "beta": True}, {"segments": True}], ids=["plain", "gated", "segments"]
)


@pytest.mark.slow
@FEATURES
@pytest.mark.parametrize(("time", "width"), [(50, 20), (200, 20), (150, 64)])
def test_single_precision_equals_the_definition(time, width, features):
    assert_equal_to_the_definition(time, width, features)


@pytest.mark.gpu
@FEATURES
@pytest.mark.parametrize(("time", "width"), [(50, 20), (200, 20), (150, 64)])
def test_compiled_kernels_equal_the_definition(time, width, features):
    assert jax.default_backend() == "gpu"
    assert_equal_to_the_definition(time, width, features)


def test_half_precision_is_computed_in_single():
    a = draw(dtype=jnp.bfloat16)
    out = mesa_attention(**a, method="pallas")
    assert out.dtype == jnp.bfloat16
    exact = mesa_attention(**{n: x.astype(jnp.float64) for n, x in a.items()}, method="reference")
    assert relative_error(out, np.asarray(exact)) <= 4e-3
