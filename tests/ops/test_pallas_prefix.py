"""The kernels for wide heads that walk many legs at once: against the definition, and in float32.

Without a GPU they are interpreted; `pytest -m gpu` compiles them.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope import mesa_attention
from mesascope.bench import errors, exact64, in_groups, relative_error, sequences
from mesascope.ops import kernels, pallas, pallas_chunks, pallas_prefix, pallas_states
from tests.helpers import assert_close, draw
from tests.ops import tensor_cores
from tests.ops.test_accuracy import CELLS, CLASSICAL, FLOOR, FUSED, NAMES, OURS, assert_within_bound
from tests.ops.test_finite import KINDS, hostile
from tests.ops.test_pallas import assert_equal_to_the_definition, sequence

slow = partial(pytest.param, marks=pytest.mark.slow)
SUMS = [pytest.param(False, id=""), pytest.param(True, id="sums in 16 bits")]


@pytest.fixture(autouse=True)
def traced_afresh():
    """Programs that others traced with other constants of these modules are not used again."""
    from mesascope.bench import _compiled

    _compiled.cache_clear()
    yield
    _compiled.cache_clear()


def take_at_once(chunks, monkeypatch):
    """So many chunks at most, or as many as by default."""
    if chunks is not None:
        monkeypatch.setattr(pallas_chunks, "_ABREAST", dict.fromkeys(pallas_chunks._ABREAST, chunks))


def test_the_plan_names_them_where_they_apply():
    assert pallas.plan(sequence(50, 64), False).prefix
    assert pallas.plan(sequence(50, 33), True).prefix
    for other in (
        sequence(50, 20), sequence(50, 64, decays=True), sequence(50, 64, runs=True), sequence(50, 64, state=True),
    ):  # fmt: skip
        assert not pallas.plan(other, False).prefix


@pytest.mark.parametrize(
    ("batch", "time", "expected"),
    [(1, 1, (1, 1)), (384, 1024, (4, 4)), (5000, 1024, (1, 16)), (384, 300, (3, 2)), (8, 65_536, (171, 6))],
)
def test_a_sequence_is_cut_into_legs(batch, time, expected):
    """As many as keep the device busy, and none of them empty."""
    shape = kernels.Shape(batch, time, 64, 64, jnp.float32)
    assert pallas_chunks.legs(shape) == expected
    assert time <= pallas_chunks.chunks(shape) * pallas_chunks.CHUNK


@pytest.mark.parametrize(
    ("time", "key", "value", "features"),
    [
        (70, 40, 33, {"beta": True}),
        slow(1, 64, 64, {}),
        slow(130, 33, 64, {}),
        slow(100, 64, 5, {"beta": True}),
        slow(65, 20, 100, {"beta": True}),
        slow(70, 100, 20, {"beta": True}),
        slow(64, 128, 64, {}),
        slow(64, 96, 64, {}),
        slow(70, 150, 40, {}),
        slow(130, 192, 20, {"beta": True}),
    ],
)
def test_equals_the_definition(time, key, value, features):
    """Outputs, the final state, and all gradients of both. From keys of 96 on the twin is `chunked`, held to the
    definition elsewhere."""
    assert_equal_with_state(time, key, value, features)


def assert_equal_with_state(time, key, value, features):
    twin = "reference" if key < 96 else "chunked"  # the definition may hang where keys are wide (`Reference`)
    a = draw(lead=(2,), time=time, key=key, value=value, **features)

    @partial(jax.jit, static_argnums=1)
    def outcome(a, method):
        def final(a):
            out, state = mesa_attention(**a, method=method, return_state=True)
            return out, state.covariance, state.weights

        results, pull = jax.vjp(final, a)
        return results, pull(jax.tree.map(jnp.cos, results))

    assert_close(outcome(a, "pallas"), outcome(a, twin), scale=10)


@pytest.mark.parametrize(
    ("abreast", "unrolled", "key"),
    [(4, 8, 40), slow(4, 1, 40), slow(2, 8, 40), slow(4, 8, 130), slow(2, 1, 130)],
    ids=["two legs", "as a loop", "one leg", "wide keys", "wide keys, one leg"],
)
def test_chunks_of_a_leg_are_walked(abreast, unrolled, key, monkeypatch):
    """Three of four chunks where there are two legs: the last is beyond the end."""
    take_at_once(abreast, monkeypatch)
    monkeypatch.setattr(pallas_prefix, "_UNROLLED", unrolled)
    assert_equal_with_state(170, key, 33, {"beta": True})


@pytest.mark.parametrize(("time", "key"), [(40, 33), slow(130, 64)])
def test_never_nan(time, key):
    weights = np.random.default_rng(0).integers(0, 2, (4, time)) if time == 40 else np.ones((4, time))
    op = partial(mesa_attention, method="pallas", beta=jnp.asarray(weights, jnp.float32))

    @jax.jit
    def outcome(q, k, v, lam, g):
        out, pull = jax.vjp(op, q, k, v, lam)
        return out, pull(g)

    for kind in KINDS:
        for seed, (lam, size) in enumerate([(1e-4, 1e3), (1e5, 1e3), (1e5, 1.0), (1.0, 1e-3)]):
            results = outcome(*hostile(kind, seed, time=time, key=key, lam=lam, size=size))
            finite = jax.tree.map(lambda a: bool(jnp.all(jnp.isfinite(a))), results)
            assert all(jax.tree.leaves(finite)), (kind, lam, size, finite)


@pytest.mark.parametrize("together", [1, slow(3)])
def test_where_heads_are_few_time_is_cut_into_stretches(together, monkeypatch):
    """Whose sums are as those of one."""
    monkeypatch.setattr(pallas_states, "_PROGRAMS", 12 // together)
    assert_equal_to_the_definition(300, 40, {"beta": True})


@pytest.mark.slow
@pytest.mark.parametrize("abreast", [None, 32, 16], ids=["", "two legs", "one leg"])
@pytest.mark.parametrize(("time", "width"), [(63, 64), (300, 64), (100, 128)])
def test_at_most_four_times_the_classical_error(time, width, abreast, monkeypatch):
    take_at_once(abreast, monkeypatch)
    for kind, lam in CELLS:
        assert_within_bound(kind, lam, time, width, FUSED)


def test_a_leg_begins_as_exactly_as_chunks_follow_each_other():
    """Where earlier keys do not fill their space, R is large across them, and Φ must not notice."""
    assert_within_bound("gaussian", 1e3, 100, 128, FUSED)


def test_weights_of_pairs_cost_no_digits():
    """A pair of weight β is one with √β of its key and of its value."""
    q, k, v, g = sequences(4, 100, 128, value=32, kind="gaussian")
    beta = np.random.default_rng(1).uniform(size=k.shape[:2]).astype(np.float32)
    root = np.sqrt(beta.astype(np.float64))[..., None]

    @jax.jit
    def outcome(q, k, v, lam):
        op = partial(mesa_attention, method="pallas", beta=jnp.asarray(beta))
        out, pull = jax.vjp(op, q, k, v, lam)
        return out, *pull(jnp.asarray(g))

    out, q_bar, *pairs_bar, lam_bar = exact64(q, root * k, root * v, 1e3, g)
    exact = out, q_bar, *(root * a for a in pairs_bar), lam_bar
    scaled = (root * k).astype(np.float32), (root * v).astype(np.float32)
    classical = errors(CLASSICAL, (q, *scaled, g), 1e3)
    ours = outcome(*(jnp.asarray(a) for a in (q, k, v)), jnp.full((4, 1), 1e3, jnp.float32))
    for name, a, b, base in zip(NAMES, ours, exact, classical, strict=True):
        error = relative_error(np.asarray(a, np.float64), b)
        bound = FLOOR if name in ("output", "∂q") else max(4 * base, FLOOR)
        assert error <= bound, f"{name}: {error:.1e}, classical {base:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("abreast", [None, 16], ids=["", "one leg"])
@pytest.mark.parametrize(("time", "width"), [(63, 64), (300, 64), (100, 128)])
def test_at_most_four_times_the_classical_error_with_products_as_tensor_cores_make_them(
    time, width, abreast, monkeypatch
):
    with tensor_cores.in_place_of_ours(monkeypatch):
        test_at_most_four_times_the_classical_error(time, width, abreast, monkeypatch)


@pytest.mark.parametrize("abreast", [None, slow(2)], ids=["", "one leg"])
@pytest.mark.parametrize(
    ("time", "width"), [(70, 40), slow(130, 64), slow(300, 64), slow(100, 128), slow(300, 384)]
)
@pytest.mark.parametrize("sums", SUMS)
def test_bfloat16_loses_little_more_than_its_outputs_do(time, width, abreast, sums, monkeypatch):
    """Rounding these alone costs 1.7e-3. In between, products that are not multiplied further have 16 digits."""
    monkeypatch.setattr(pallas_states, "_SUMS_IN_16_BITS", sums)
    take_at_once(abreast, monkeypatch)
    assert_bfloat16_is_close(time, width)


@pytest.mark.slow
@pytest.mark.parametrize("abreast", [None, 2], ids=["", "one leg"])
@pytest.mark.parametrize(("time", "width"), [(130, 64), (100, 128), (300, 384)])
@pytest.mark.parametrize("sums", SUMS)
def test_bfloat16_with_products_as_tensor_cores_make_them(time, width, abreast, sums, monkeypatch):
    monkeypatch.setattr(pallas_states, "_SUMS_IN_16_BITS", sums)
    take_at_once(abreast, monkeypatch)
    with tensor_cores.in_place_of_ours(monkeypatch):
        assert_bfloat16_is_close(time, width)


@pytest.mark.parametrize("sums", SUMS)
def test_nothing_of_16_bits_is_multiplied_in_float64(sums, monkeypatch):
    """Triton does it wrongly, which no interpreter shows. So no kernel that is given such multiplies so."""
    monkeypatch.setattr(pallas_states, "_SUMS_IN_16_BITS", sums)
    array = jax.ShapeDtypeStruct((2, 130, 64), jnp.bfloat16)

    def outcome(q, k, v, g):
        out, pull = jax.vjp(lambda *a: mesa_attention(*a, 1.0, method="pallas"), q, k, v)
        return out, pull(g)

    program = jax.make_jaxpr(outcome)(*[array] * 4)
    called = [e for e in equations(program.jaxpr) if e.primitive.name == "pallas_call"]
    of_16_bits = [e for e in called if any(a.aval.dtype.itemsize == 2 for a in e.invars)]
    assert len(of_16_bits) == (12 if sums else 8) < len(called)
    for kernel in of_16_bits:
        products = [e for e in equations(kernel.params["jaxpr"]) if e.primitive.name == "dot_general"]
        assert all(a.aval.dtype != jnp.float64 for e in products for a in e.invars)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.gpu
@pytest.mark.parametrize("abreast", [None, 2, 8])
@pytest.mark.parametrize(("time", "width"), [(130, 64), (1024, 64), (1024, 128), (300, 384)])
@pytest.mark.parametrize("sums", SUMS)
def test_bfloat16_on_a_gpu(time, width, abreast, sums, monkeypatch):
    monkeypatch.setattr(pallas_states, "_SUMS_IN_16_BITS", sums)
    take_at_once(abreast, monkeypatch)
    assert jax.default_backend() == "gpu"
    assert_bfloat16_is_close(time, width)


@pytest.mark.parametrize("sums", SUMS)
def test_bfloat16_with_weights_of_pairs(sums, monkeypatch):
    """Whose gradients come from those of the pairs before they are rounded."""
    monkeypatch.setattr(pallas_states, "_SUMS_IN_16_BITS", sums)
    q, k, v, g = (jnp.asarray(a, jnp.bfloat16) for a in sequences(2, 70, 40))
    beta = jnp.asarray(np.random.default_rng(1).uniform(size=(2, 70)), jnp.float32)

    @partial(jax.jit, static_argnums=0)
    def outcome(method, arrays, beta, g):
        out, pull = jax.vjp(lambda a, beta: mesa_attention(*a, 1.0, beta=beta, method=method), arrays, beta)
        return out, *pull(g)

    exact = outcome(
        "chunked",
        tuple(a.astype(jnp.float64) for a in (q, k, v)),
        beta.astype(jnp.float64),
        g.astype(jnp.float64),
    )
    for a, b in zip(
        jax.tree.leaves(outcome("pallas", (q, k, v), beta, g)), jax.tree.leaves(exact), strict=True
    ):
        assert relative_error(np.asarray(a, np.float64), np.asarray(b)) <= 2e-3


def assert_bfloat16_is_close(time, width):
    @jax.jit
    def outcome(q, k, v, lam, g):
        out, pull = jax.vjp(partial(mesa_attention, method="pallas"), q, k, v, lam)
        return out, *pull(g)

    for kind, lam in CELLS:
        if lam <= 10:
            arrays = sequences(2, time, width, value=min(width, 128), kind=kind)
            inputs = [jnp.asarray(a, jnp.bfloat16) for a in arrays]
            q, k, v, g = (np.asarray(a, np.float64) for a in inputs)
            results = outcome(*inputs[:3], jnp.full((2, 1), lam, jnp.float32), inputs[3])
            assert all(a.dtype == jnp.bfloat16 for a in results[:4])
            for name, a, b in zip(NAMES, results, in_groups(OURS, q, k, v, lam, g), strict=True):
                error = relative_error(np.asarray(a, np.float64), b)
                assert error <= 4e-3, f"{kind} λ={lam} {name}: {error:.1e}"


@pytest.mark.gpu
@pytest.mark.parametrize("abreast", [16, 64, None])
@pytest.mark.parametrize(("time", "width"), [(63, 64), (1024, 64), (100, 128), (1024, 128), (1024, 384)])
def test_the_same_on_a_gpu(time, width, abreast, monkeypatch):
    """Sixteen sequences in one leg each, in four, and in as many as there are chunks."""
    assert jax.default_backend() == "gpu"
    take_at_once(abreast, monkeypatch)
    for kind, lam in CELLS:
        assert_within_bound(kind, lam, time, width, FUSED)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [{}, {"beta": True}], ids=["plain", "weights"])
@pytest.mark.parametrize("abreast", [2, 4])
@pytest.mark.parametrize(
    ("time", "width", "value"),
    [
        (1, 64, 64), (150, 40, 40), (200, 64, 64), (200, 96, 96), (200, 100, 100), (200, 130, 128), (200, 160, 128),
        (100, 100, 5), (70, 40, 33), (65, 20, 100),
    ],
)  # fmt: skip
def test_compiled_kernels_equal_the_definition(time, width, value, features, abreast, monkeypatch):
    assert jax.default_backend() == "gpu"
    take_at_once(abreast, monkeypatch)
    assert_equal_to_the_definition(time, width, features, value)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="jax asks the GPU what it is")
@pytest.mark.parametrize(("width", "six"), [(64, ()), (100, pallas_chunks.SIX)])
def test_they_can_be_lowered_for_a_gpu(width, six, monkeypatch):
    """No operation in them is unknown to the compiler of kernels, for which there need not be a GPU."""
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(pallas_chunks, "SIX", six)
    assert len(lowered(width)) == 18


def lowered(width):
    """The kernels of outputs, final state and all gradients, as they are handed to XLA."""
    array, beta = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 100, width), (2, 100)))

    def outcome(q, k, v, g, beta):
        def op(q, k, v, beta):
            out, state = mesa_attention(q, k, v, 1.0, beta=beta, method="pallas", return_state=True)
            return out, state.weights

        results, pull = jax.vjp(op, q, k, v, beta)
        return pull((g, results[1]))

    program = jax.jit(outcome).trace(*[array] * 4, beta).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"xla\.gpu\.triton\(.*? ir = (\".*?[^\\]\")", program)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="jax asks the GPU what it is")
def test_float64_within_them_needs_none_outside(monkeypatch):
    """Sums and factors are in float64 whether or not jax has it elsewhere."""
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    programs = {}
    for enabled in (True, False):
        with jax.enable_x64(enabled):
            programs[enabled] = lowered(64)[:9]
    assert len(programs[True]) == 9
    assert programs[True] == programs[False]


def test_three_thirds_of_a_number():
    """They are the number, and what six products leave out of a product is about a rounding of float32."""
    rng = np.random.default_rng(0)
    a = (rng.standard_normal(10**5) * 10.0 ** rng.uniform(-20, 20, 10**5)).astype(np.float32)
    thirds = kernels.parts_of(jnp.asarray(a), 3)
    assert all(x.dtype == jnp.bfloat16 for x in thirds)
    high, middle, low = (np.asarray(x, np.float64) for x in thirds)
    np.testing.assert_array_equal(high + middle + low, a.astype(np.float64))
    left_out = 2 * np.abs(middle * low) + low**2
    assert np.max(left_out / np.square(a, dtype=np.float64)) <= 2**-23
