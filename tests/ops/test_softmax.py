"""Softmax attention's closed-form gradient against autodiff of the textbook formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.models import Block, FeedForward, ModelConfig, Positions, Transformer
from mesascope.ops import softmax
from mesascope.ops.softmax import (
    causal_softmax,
    causal_softmax_joined,
    fused_softmax,
    fused_softmax_joined,
    plain_softmax,
    plain_softmax_joined,
)
from tests.helpers import assert_close


def textbook(q, k, v):
    time, d = q.shape[-2:]
    logits = jnp.einsum("...td,...id->...ti", q, k, precision="highest") / np.sqrt(d).astype(q.dtype)
    weights = jax.nn.softmax(jnp.where(np.tri(time, dtype=bool), logits, -jnp.inf), -1)
    return jnp.einsum("...ti,...iv->...tv", weights, v, precision="highest")


@pytest.mark.parametrize("op", [plain_softmax, fused_softmax], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize(
    ("lead", "time", "scale"), [((), 1, 1.0), ((2, 3), 7, 1.0), ((2,), 50, 30.0), ((2,), 150, 3.0)]
)
def test_values_and_gradients(lead, time, scale, dtype, op):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k = (scale * jax.random.normal(x, (*lead, time, 4), dtype) for x in keys[:2])
    v, g = (jax.random.normal(x, (*lead, time, 5), dtype) for x in keys[2:])
    q64, k64, v64, g64 = (a.astype(jnp.float64) for a in (q, k, v, g))
    expected, pull = jax.vjp(textbook, q64, k64, v64)
    out, ours = jax.vjp(jax.jit(op), q, k, v)
    # Exponents of size s are rounded by ε·s.
    assert_close(out, expected, scale=scale)
    for name, a, b in zip("qkv", ours(g), pull(g64), strict=True):
        assert_close(a, b, scale=5 * scale, name=name)
        assert a.dtype == dtype


@pytest.mark.parametrize("op", [plain_softmax, fused_softmax], ids=["plain", "fused"])
@pytest.mark.parametrize("time", [30, 150])
def test_documents(time, op):
    """Each is as if it were alone: values and gradients."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, g = (jax.random.normal(x, (2, 3, time, 4), jnp.float64) for x in keys)
    cuts = np.array([[0, 7, 20], [0, time // 2, time - 2]])
    starts = jnp.asarray(np.stack([c[np.searchsorted(c, np.arange(time), side="right") - 1] for c in cuts]))[
        :, None
    ]
    out, pull = jax.vjp(jax.jit(lambda q, k, v: op(q, k, v, starts)), q, k, v)
    got = pull(g)
    for row, cut in enumerate(cuts):
        for low, high in zip(cut, [*cut[1:], time], strict=True):
            here = np.s_[row, :, low:high]
            expected, alone = jax.vjp(textbook, q[here], k[here], v[here])
            assert_close(out[here], expected)
            for a, b in zip(got, alone(g[here]), strict=True):
                assert_close(a[here], b)


@pytest.mark.parametrize("op", [plain_softmax, fused_softmax], ids=["plain", "fused"])
@pytest.mark.parametrize("time", [30, 150])
def test_bfloat16_is_summed_up_in_float32(time, op):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, g = (jax.random.normal(x, (2, time, 16), jnp.bfloat16) for x in keys)
    out, pull = jax.vjp(jax.jit(op), q, k, v)
    expected, exact = jax.vjp(textbook, *(a.astype(jnp.float64) for a in (q, k, v)))
    pairs = zip((out, *pull(g)), (expected, *exact(g.astype(jnp.float64))), strict=True)
    for a, b in pairs:
        assert a.dtype == jnp.bfloat16
        # A few roundings to eight bits, which sums do not add to.
        assert np.linalg.norm(np.asarray(a, np.float64) - b) <= 2**-7 * np.linalg.norm(b)


@pytest.mark.parametrize("op", [plain_softmax, fused_softmax], ids=["plain", "fused"])
def test_under_vmap_and_with_enormous_logits(op):
    q, k, v = (1e3 * jax.random.normal(jax.random.key(i), (3, 2, 6, 4)) for i in range(3))
    slope = jax.jit(jax.vmap(jax.grad(lambda q, k, v: jnp.sum(op(q, k, v) ** 2), (0, 1, 2))))
    for leaf in slope(q, k, v):
        assert np.isfinite(leaf).all()
    assert_close(jax.vmap(op)(q, k, v), op(q, k, v))


@pytest.mark.parametrize("time", [5, 70])
def test_second_derivatives_of_the_kernel_are_those_of_the_formula(time):
    q, k, v = (jax.random.normal(jax.random.key(i), (2, time, 3)) for i in range(3))

    def curvature(op):
        slope = jax.grad(lambda q, k, v: jnp.sum(jnp.sin(op(q, k, v))), (0, 1, 2))
        return jax.jit(jax.grad(lambda *a: sum(jnp.sum(jnp.cos(b)) for b in slope(*a)), (0, 1, 2)))(q, k, v)

    for ours, expected in zip(curvature(fused_softmax), curvature(textbook), strict=True):
        assert_close(ours, expected)


def apart(joined, heads):
    """Queries, keys and values by head, of what one matrix product leaves."""
    *lead, time, width = joined.shape
    parts = jnp.split(joined.reshape(*lead, time, 3 * heads, width // (3 * heads)), 3, -2)
    return [jnp.swapaxes(part, -2, -3) for part in parts]


def by_head(joined, heads, starts=None):
    out = plain_softmax(*apart(joined, heads), None if starts is None else starts[:, None])
    return jnp.swapaxes(out, -2, -3).reshape(*joined.shape[:-1], -1)


def documents_of(batch, time):
    return jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32) // 13 * 13, (batch, time))


@pytest.mark.parametrize("op", [plain_softmax_joined, fused_softmax_joined], ids=["plain", "fused"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("time", "heads", "width"), [(1, 1, 3), (50, 3, 5), (150, 2, 4)])
def test_joined_is_head_by_head(time, heads, width, documents, op):
    """Values, gradients, and gradients of gradients."""
    keys = jax.random.split(jax.random.key(0), 2)
    joined = jax.random.normal(keys[0], (2, time, 3 * heads * width), jnp.float64)
    g = jax.random.normal(keys[1], (2, time, heads * width), jnp.float64)
    starts = documents_of(2, time) if documents else None
    out, pull = jax.vjp(jax.jit(lambda a: op(a, heads, starts)), joined)
    expected, alone = jax.vjp(lambda a: by_head(a, heads, starts), joined)
    assert_close(out, expected)
    assert_close(pull(g)[0], alone(g)[0])
    if time == 50:

        def curvature(op):
            slope = jax.grad(lambda a: jnp.sum(jnp.sin(op(a))))
            return jax.jit(jax.grad(lambda a: jnp.sum(jnp.cos(slope(a)))))(joined)

        assert_close(
            curvature(lambda a: op(a, heads, starts)), curvature(lambda a: by_head(a, heads, starts))
        )


@pytest.mark.parametrize("documents", [False, True])
def test_joined_without_kernels(documents):
    joined, starts = jax.random.normal(jax.random.key(0), (2, 30, 3 * 2 * 4)), documents_of(2, 30)
    starts = starts if documents else None
    assert_close(causal_softmax_joined(joined, 2, starts), by_head(joined, 2, starts))


def test_a_model_whose_kernels_read_in_place(monkeypatch):
    """The same predictions and gradients, of layers with and without positions beside their keys."""
    blocks = (Block(heads=2, key_dim=4), Block(heads=2, key_dim=4, mlp=FeedForward(hidden=8)))
    config = ModelConfig(
        token_dim=3, output_dim=3, model_dim=8, positions=Positions(at="keys", dim=4), blocks=blocks
    )
    model, tokens = (
        Transformer(config, key=jax.random.key(0)),
        jax.random.normal(jax.random.key(1), (2, 70, 3), jnp.float32),
    )
    outcome = jax.value_and_grad(lambda model: jnp.sum(jnp.sin(model(tokens))))
    expected = outcome(model)
    monkeypatch.setattr(softmax, "has_kernels", lambda: True)
    monkeypatch.setattr(softmax, "IN_PLACE", True)
    assert "pallas_call" in str(jax.make_jaxpr(model)(tokens))
    ours = jax.jit(outcome)(model)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, scale=5)


@pytest.mark.parametrize("time", [20, 70])
def test_joined_under_vmap(time):
    joined = jax.random.normal(jax.random.key(0), (3, 2, time, 3 * 2 * 4))
    slope = jax.jit(jax.vmap(jax.grad(lambda a: jnp.sum(fused_softmax_joined(a, 2) ** 2))))
    assert_close(slope(joined), jax.grad(lambda a: jnp.sum(by_head(a, 2) ** 2))(joined))


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("time", "heads", "width"), [(50, 4, 20), (64, 2, 64), (224, 4, 20), (1000, 3, 64)])
def test_the_compiled_joined_kernel_is_exact(time, heads, width, documents):
    joined = jax.random.normal(jax.random.key(0), (8, time, 3 * heads * width), jnp.float32)
    starts = documents_of(8, time) if documents else None

    def outcome(op):
        return jax.jit(jax.value_and_grad(lambda a: jnp.sum(jnp.sin(op(a, heads, starts)))))(joined)

    assert_close(outcome(fused_softmax_joined), outcome(plain_softmax_joined))


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("time", "width"), [(50, 20), (64, 64), (224, 20), (1000, 64)])
def test_the_compiled_kernel_is_exact(time, width, documents):
    assert jax.default_backend() == "gpu"
    q, k, v = (jax.random.normal(jax.random.key(i), (8, time, width), jnp.float32) for i in range(3))
    starts = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32) // 40 * 40, (8, time)) if documents else None

    def outcome(op):
        loss = lambda q, k, v: jnp.sum(jnp.sin(op(q, k, v, starts)))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)

    assert_close(outcome(fused_softmax), outcome(plain_softmax))


@pytest.mark.gpu
def test_the_compiled_kernel_takes_bfloat16():
    q, k, v = (jax.random.normal(jax.random.key(i), (8, 1000, 64), jnp.bfloat16) for i in range(3))
    loss = lambda op: lambda q, k, v: jnp.sum(op(q, k, v).astype(jnp.float32) ** 2)  # noqa: E731
    ours, theirs = (jax.jit(jax.grad(loss(op), (0, 1, 2)))(q, k, v) for op in (fused_softmax, plain_softmax))
    for a, b in zip(ours, theirs, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) <= 2**-6 * np.linalg.norm(b)


@pytest.mark.gpu
def test_the_compiled_kernel_is_chosen():
    q = jnp.ones((8, 50, 20), jnp.float32)
    assert "pallas_call" in str(jax.make_jaxpr(causal_softmax)(q, q, q))
