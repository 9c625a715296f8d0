"""What must hold for every input (hypothesis)."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesascope import linear_attention, mesa_step
from mesascope import mesa_attention as eager
from mesascope.ops.methods import Chunked, Prefix
from tests.helpers import assert_close, draw

mesa_attention = jax.jit(eager, static_argnames=("method", "regularizer", "return_state"))

# A few shapes only: each new one compiles. Everything else is free.
shapes = st.sampled_from([(1, 3), (5, 2), (12, 4)])
methods = st.sampled_from(["recursive", "chunked", "prefix", "pallas"])
seeds = st.integers(0, 2**31)
few = settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def tail(a, start, stop=None):
    """The arguments from `start` on; λ has no time."""
    return {n: x if n == "lam" else x[:, start:stop] for n, x in a.items()}


@few
@given(shapes, methods, seeds, st.data())
def test_causality(shape, method, seed, data):
    """Changing the future changes nothing before it, and does change something after it."""
    time, key = shape
    a = draw(time=time, key=key, seed=seed, log_decay=0.2)
    t = data.draw(st.integers(0, time - 1))
    out = mesa_attention(**a, method=method)
    changed = dict(a)
    for name in ("queries", "keys", "values"):
        changed[name] = a[name].at[:, t:].add(1.0)
    after = mesa_attention(**changed, method=method)
    assert np.array_equal(out[:, :t], after[:, :t]) or np.allclose(out[:, :t], after[:, :t], atol=1e-12)
    assert not np.allclose(out[:, t:], after[:, t:], atol=1e-6)


@few
@given(seeds, st.sampled_from([1, 2, 3, 5, 7, 12, 40]), st.sampled_from([Chunked, Prefix]))
def test_chunk_size_does_not_matter(seed, size, method):
    a = draw(time=12, seed=seed, beta=True, segments=True, log_decay=0.2)
    assert_close(mesa_attention(**a, method=method(chunk_size=size)), mesa_attention(**a, method="recursive"))


@few
@given(seeds, st.integers(1, 11), methods, st.booleans())
def test_split_and_carry_equals_the_whole(seed, cut, method, constant):
    a = draw(time=12, seed=seed, beta=True, log_decay=0.2)
    options = {"method": "cg" if constant else method, "regularizer": "constant" if constant else "decayed"}
    out, final = mesa_attention(**a, **options, return_state=True)
    first, state = mesa_attention(**tail(a, 0, cut), **options, return_state=True)
    second, end = mesa_attention(**tail(a, cut), **options, state=state, return_state=True)
    assert_close(jnp.concatenate([first, second], 1), out)
    assert_close(end, final)


@few
@given(seeds, st.integers(1, 11))
def test_prefill_then_step(seed, cut):
    a = draw(time=12, seed=seed, beta=True, log_decay=0.2)
    out, final = mesa_attention(**a, return_state=True)
    _, state = mesa_attention(**tail(a, 0, cut), return_state=True)
    for t in range(cut, 12):
        state, o = mesa_step(
            state, a["queries"][:, t], a["keys"][:, t], a["values"][:, t],
            log_decay=a["log_decay"][:, t], beta=a["beta"][:, t],
        )  # fmt: skip
        assert_close(o, out[:, t])
    assert_close(state.covariance, final.covariance)
    assert_close(state.weights, final.weights)


@few
@given(shapes, methods, seeds)
def test_rotating_keys_and_queries_together(shape, method, seed):
    time, key = shape
    a = draw(time=time, key=key, seed=seed)
    a["lam"] = a["lam"][..., :1]
    q, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((key, key)))
    rotated = a | {n: a[n] @ q for n in ("queries", "keys")}
    assert_close(mesa_attention(**rotated, method=method), mesa_attention(**a, method=method))


@few
@given(methods, seeds)
def test_order_of_past_pairs_is_irrelevant_without_decay(method, seed):
    a = draw(time=12, seed=seed, beta=True)
    order = np.r_[np.random.default_rng(seed).permutation(11), 11]
    shuffled = a | {n: a[n][:, order] for n in ("keys", "values", "beta")}
    out, other = (mesa_attention(**x, method=method) for x in (a, shuffled))
    assert_close(other[:, -1], out[:, -1])


@few
@given(methods, seeds, st.floats(0.1, 10))
def test_scaling_all_weights_is_scaling_lam(method, seed, scale):
    """β·c with λ/c leaves the minimizer where it was."""
    a = draw(time=12, seed=seed, beta=True)
    scaled = a | {"beta": a["beta"] * scale, "lam": a["lam"] / scale}
    assert_close(mesa_attention(**scaled, method=method), mesa_attention(**a, method=method))


@few
@given(methods, seeds)
def test_small_lam_is_linear_attention(method, seed):
    a = draw(time=12, seed=seed)
    a["lam"] = 1e-10 * jnp.ones((3, 1))
    limit = linear_attention(a["queries"], a["keys"], a["values"])
    assert_close(mesa_attention(**a, method=method) / 1e-10, limit, scale=10)


@few
@given(methods, seeds)
def test_enough_noiseless_pairs_recover_the_teacher(method, seed):
    a = draw(time=12, key=4, value=3, seed=seed)
    teacher = np.random.default_rng(seed + 1).standard_normal((4, 3))
    a["values"], a["lam"] = a["keys"] @ teacher, 1e8
    out = mesa_attention(**a, method=method)
    expected = a["queries"] @ teacher
    assert float(jnp.max(jnp.abs((out - expected)[:, 8:]))) < 1e-3
    assert float(jnp.max(jnp.abs((out - expected)[:, 0]))) > 1e-2


@few
@given(methods, seeds)
def test_segments_equal_separate_calls(method, seed):
    a = draw(time=12, seed=seed, beta=True, log_decay=0.2)
    ids = jnp.asarray([0] * 5 + [1] * 1 + [0] * 6)  # an id used again must not join two segments
    whole = mesa_attention(**a, segment_ids=ids, method=method)
    parts = [mesa_attention(**tail(a, i, j), method=method) for i, j in ((0, 5), (5, 6), (6, 12))]
    assert_close(whole, jnp.concatenate(parts, 1))
