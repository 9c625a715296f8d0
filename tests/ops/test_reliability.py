"""No NaN, no wrong precision, no recompilation, and errors that help."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope import (
    MesaState,
    delta_attention,
    intention,
    linear_attention,
    mesa_attention,
    mesa_init,
    mesa_step,
)
from mesascope.ops.factor import (
    unit_lower_inverse,
)
from mesascope.ops.methods import NAMED, Chunked, Recursive
from tests.helpers import assert_close, draw


def test_unit_lower_inverse():
    rng = np.random.default_rng(0)
    lower = jnp.asarray(np.tril(rng.standard_normal((2, 21, 21)), -1) / 3)
    eye = jnp.broadcast_to(jnp.eye(21), lower.shape)
    assert_close(jax.jit(unit_lower_inverse)(lower), jnp.linalg.inv(eye + lower))
    grads = [
        jax.jit(jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x)))))(lower)
        for f in (unit_lower_inverse, lambda x: jnp.linalg.inv(eye + x))
    ]
    assert_close(grads[0], jnp.tril(grads[1], -1))


def equations(jaxpr):
    """Every equation, in every inner program."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def program(method, time=40, key=8, **features):
    a = draw(time=time, key=key, dtype=np.float32, **features)
    ids = a.pop("segment_ids", None)

    def run(a):
        return mesa_attention(**a, segment_ids=ids, method=method)

    return jax.make_jaxpr(lambda a: jax.vjp(run, a)[1](a["values"]))(a)


@pytest.mark.parametrize(
    "method", [*(m for m in NAMED if m != "reference"), Recursive(backward="reverse_time")], ids=str
)
def test_every_product_is_in_full_precision(method):
    """On a GPU the default would be TF32, which ruins least squares; a CPU would not show it."""
    # (Narrow keys need none in the kernels.)
    found = program(method, key=40 if method == "pallas" else 8)
    dots = [e for e in equations(found.jaxpr) if e.primitive.name == "dot_general"]
    assert len(dots) >= 3
    for dot in dots:
        assert dot.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2, dot


@pytest.mark.parametrize(
    "op",
    [
        linear_attention,
        lambda q, k, v: delta_attention(q, k, v, jnp.ones(q.shape[:-1], q.dtype)),
        lambda q, k, v: intention(q, k, v, 1.0),
    ],
)
def test_every_product_of_the_other_ops_too(op):
    a = draw(dtype=np.float32)
    found = jax.make_jaxpr(jax.grad(lambda *x: jnp.sum(op(*x)), argnums=(0, 1, 2)))(
        a["queries"], a["keys"], a["values"]
    )
    dots = [e for e in equations(found.jaxpr) if e.primitive.name == "dot_general"]
    assert dots
    assert all(d.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2 for d in dots)


def loops(jaxpr):
    return [e for e in equations(jaxpr.jaxpr) if e.primitive.name in ("scan", "while")]


def test_prefix_has_no_loop():
    """Neither forward nor backward; `chunked` has, so the test can tell."""
    assert not loops(program("prefix", time=64, log_decay=0.1, segments=True, beta=True))
    assert loops(program("chunked", time=64))


@pytest.mark.parametrize("method", ["chunked", "prefix", "pallas", "cg"])
def test_one_trace_per_shape(method):
    traces = 0

    @jax.jit
    def run(a):
        nonlocal traces
        traces += 1
        return jax.grad(lambda a: jnp.sum(mesa_attention(**a, method=method)))(a)

    for seed in range(3):
        run(draw(seed=seed))
    assert traces == 1
    run(draw(time=14))
    assert traces == 2


def test_vmap_of_grad():
    a = draw()

    def loss(a, method):
        return jnp.sum(jnp.sin(mesa_attention(**a, method=method)))

    expected = jax.jit(jax.grad(lambda a: loss(a, "reference")))(a)
    for method in ("chunked", "pallas"):
        assert_close(jax.jit(jax.vmap(jax.grad(partial(loss, method=method))))(a), expected)
    with_decay = draw(log_decay=3.0)
    mapped = jax.jit(jax.vmap(jax.grad(lambda a: loss(a, "chunked"))))(with_decay)
    assert_close(mapped, jax.jit(jax.grad(lambda a: loss(a, "reference")))(with_decay), scale=100)


@pytest.mark.parametrize("method", ["chunked", "prefix", "pallas", "reference"])
def test_double_differentiation(method):
    a = draw(lead=(), time=7, key=3, value=2)
    direction = draw(lead=(), time=7, key=3, value=2, seed=1)

    @jax.jit
    def slope(a):
        gradient = jax.grad(lambda a: jnp.sum(jnp.sin(mesa_attention(**a, method=method))))(a)
        return sum(jnp.vdot(gradient[n], direction[n]) for n in gradient)

    def numeric(name, index, h=1e-5):
        return (
            slope(a | {name: a[name].at[index].add(h)}) - slope(a | {name: a[name].at[index].add(-h)})
        ) / (2 * h)

    second = jax.jit(jax.grad(slope))(a)
    for name, index in (("keys", (2, 1)), ("values", (3, 0)), ("queries", (6, 2)), ("lam", (1,))):
        assert abs(float(second[name][index]) - float(numeric(name, index))) < 1e-6, name


def test_double_differentiation_with_decay_raises_clearly():
    a = draw(lead=(), time=7, key=3, value=2, log_decay=0.1)

    @partial(jax.jit, static_argnums=1)
    def slope(a, method):
        return jax.grad(lambda a: jnp.sum(jnp.sin(mesa_attention(**a, method=method))))(a)["keys"].sum()

    with pytest.raises(NotImplementedError, match=r"log_decay.*'prefix'"):
        jax.grad(slope)(a, "chunked")
    second = [jax.jit(jax.grad(slope), static_argnums=1)(a, m) for m in ("prefix", "pallas", "reference")]
    assert_close(second[0], second[2])
    assert_close(second[1], second[2])


def test_forward_mode_raises_clearly():
    a = draw()
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda q: mesa_attention(q, a["keys"], a["values"], 1.0), (a["queries"],), (a["queries"],))


def test_bfloat16_is_accumulated_in_float32():
    a = draw(time=60, dtype=np.float32)
    low = {n: x.astype(jnp.bfloat16) for n, x in a.items()}
    run = jax.jit(mesa_attention, static_argnames="return_state")
    out, state = run(**low, return_state=True)
    assert out.dtype == jnp.bfloat16
    assert state.factor.dtype == jnp.float32
    same_numbers = {n: x.astype(jnp.float32) for n, x in low.items()}
    assert_close(out, run(**same_numbers).astype(jnp.bfloat16), scale=0.5)


GRAM_ARGUMENTS = {"regularizer": "constant", "log_decay": np.zeros(5)}
NO_TIME = {"queries": np.ones((0, 4)), "keys": np.ones((0, 4)), "values": np.ones((0, 3))}
NARROW = MesaState(jnp.eye(3), jnp.ones((3, 3)))
SQUARE_ROOT = MesaState(jnp.eye(4), jnp.ones((3, 4)))
REVERSED = Recursive(backward="reverse_time")
WIDE, WIDEST = np.ones((5, 129)), np.ones((5, 385))
BAD = {
    "queries differ": ({"queries": np.ones((5, 3))}, ValueError, r"queries: .*\[\.\.\., 5, 4\].*\(5, 3\)"),
    "values differ": ({"values": np.ones((6, 3))}, ValueError, r"values: .*time = 5.*\(6, 3\)"),
    "no time": (NO_TIME, ValueError, "keys: .*at least one"),
    "integers": ({"keys": np.ones((5, 4), int)}, TypeError, "keys: .*int64"),
    "a vector": ({"keys": np.ones(4)}, ValueError, r"keys: .*\[\.\.\., time, key\].*\(4,\)"),
    "lam zero": ({"lam": 0.0}, ValueError, "lam: .*> 0.*0.0"),
    "lam negative somewhere": ({"lam": np.array([1.0, 1, -2, 1])}, ValueError, r"lam: .*-2"),
    "lam without channels": ({"lam": np.ones(3)}, ValueError, r"lam: .*\[\.\.\., 4\].*\(3,\)"),
    "lam of integers": ({"lam": np.ones(4, int)}, TypeError, "lam: .*int64"),
    "positive log_decay": ({"log_decay": np.full(5, 0.1)}, ValueError, "log_decay: .*0.1"),
    "log_decay too short": ({"log_decay": np.zeros(4)}, ValueError, r"log_decay: .*5.*\(4,\)"),
    "negative beta": ({"beta": np.full(5, -1.0)}, ValueError, "beta: .*-1"),
    "float segments": ({"segment_ids": np.zeros(5)}, TypeError, "segment_ids: .*float64"),
    "leading axes": (
        {"queries": np.ones((2, 5, 4)), "keys": np.ones((3, 5, 4))},
        ValueError,
        r"leading axes.*queries \(2,\).*keys \(3,\)",
    ),
    "unknown method": ({"method": "fast"}, ValueError, "method: .*'chunked'.*'fast'"),
    "unknown regularizer": ({"regularizer": "none"}, ValueError, "regularizer: .*'none'"),
    "chunk size": ({"method": Chunked(chunk_size=0)}, ValueError, "chunk_size: .*0"),
    "kernels of wide keys that forget": (
        {"keys": WIDE, "queries": WIDE, "log_decay": np.zeros(5), "method": "pallas"},
        ValueError,
        "128.*129.*'chunked'",
    ),
    "kernels of the widest keys": (
        {"keys": WIDEST, "queries": WIDEST, "method": "pallas"},
        ValueError,
        "384.*385.*'chunked'",
    ),
    "whitening a constant": (GRAM_ARGUMENTS | {"method": "chunked"}, ValueError, "constant.*method='cg'"),
    "reversing beta": ({"method": REVERSED, "beta": np.ones(5)}, ValueError, "reverse_time.*beta.*chunked"),
    "a narrow state": ({"state": NARROW}, ValueError, r"state \(factor\): .*4, 4.*\(3, 3\)"),
    "the wrong state": (GRAM_ARGUMENTS | {"state": SQUARE_ROOT}, TypeError, "state: .*GramState.*MesaState"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    change, kind, message = BAD[case]
    good = dict(queries=np.ones((5, 4)), keys=np.ones((5, 4)), values=np.ones((5, 3)), lam=1.0)
    with pytest.raises(kind) as caught:
        mesa_attention(**(good | change))
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)


def test_bad_steps_are_named():
    state = mesa_init(1.0, 3, key_dim=4)
    good = (jnp.ones(4), jnp.ones(4), jnp.ones(3))
    with pytest.raises(ValueError, match=r"value: .*3.*4"):
        mesa_step(state, good[0], good[1], jnp.ones(4))
    with pytest.raises(TypeError, match="state: "):
        mesa_step((1, 2), *good)
    with pytest.raises(ValueError, match="log_decay"):
        mesa_step(state, *good, log_decay=0.5)
    with pytest.raises(ValueError, match="key_dim"):
        mesa_init(1.0, 3)
    with pytest.raises(ValueError, match="lam"):
        mesa_init(-1.0, 3, key_dim=4)
