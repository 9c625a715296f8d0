"""Finite numbers whatever the input, and the factorizations that see to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope import mesa_attention, mesa_init, mesa_step
from mesascope.ops.factor import (
    _library_inverse,
    _library_lower_inverse,
    _raised,
    inverse_cholesky,
    lower_inverse,
    matmul,
    orthonormal_rows,
)
from tests.helpers import assert_close

OPTIMIZED = True


def hostile(kind, seed, *, time, key, lam, size):
    """Inputs of magnitude up to `size` that break naive float32 least squares."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((4, time, key))
    if kind == "zero":
        k[:] = 0
    elif kind == "repeated":
        k[:] = k[:, :1]
    elif kind == "deficient":
        k[..., key // 2 :] = k[..., : key - key // 2]
    elif kind == "signs":
        k = np.sign(k)
    elif kind == "mixed scales":
        k *= 10.0 ** rng.uniform(-6, 0, (4, time, 1))
    k = size * k / max(np.abs(k).max(), 1)
    q, v, g = (size * np.clip(rng.standard_normal((4, time, key)) / 4, -1, 1) for _ in range(3))
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v, np.full((4, 1), lam), g)]


@jax.jit
def outcome(q, k, v, lam, g, beta=None, log_decay=None):
    def op(q, k, v, lam, beta, log_decay):
        out, state = mesa_attention(q, k, v, lam, beta=beta, log_decay=log_decay, return_state=True)
        return out, state

    (out, state), pull = jax.vjp(op, q, k, v, lam, beta, log_decay)
    return out, state, pull((g, jax.tree.map(jnp.zeros_like, state)))


KINDS = ("gaussian", "zero", "repeated", "deficient", "signs", "mixed scales")


@pytest.mark.parametrize(("time", "key"), [(1, 5), (70, 33), pytest.param(300, 64, marks=pytest.mark.slow)])
def test_never_nan(time, key):
    """|inputs| ≤ 1e3, 1e-4 ≤ λ ≤ 1e5 (not known when tracing), any rank, with and without pairs of weight 0."""
    beta = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, time)), jnp.float32)
    for kind in KINDS:
        for seed, (lam, size) in enumerate(
            (lam, size) for lam in (1e-4, 1e-2, 1.0, 1e2, 1e5) for size in (1e-3, 1.0, 30.0, 1e3)
        ):
            inputs = hostile(kind, seed, time=time, key=key, lam=lam, size=size)
            for weights in (None, beta):
                for leaf in jax.tree.leaves(outcome(*inputs, weights)):
                    assert np.isfinite(leaf).all(), (
                        f"{kind} keys, λ={lam}, magnitude {size}, {weights is None}"
                    )


def test_never_nan_when_decoding():
    """Thousands of steps with repeated keys and a huge λ: plain downdating of R goes negative here."""
    rng = np.random.default_rng(0)
    k = jnp.asarray(np.repeat(rng.standard_normal((5, 1, 8)), 1, 1), jnp.float32)
    state = mesa_init(1e5, 8, key_dim=8)

    def step(state, t):
        state, out = mesa_step(state, k[t % 5, 0], 1e3 * k[t % 5, 0], k[(t + 1) % 5, 0])
        return state, out

    state, out = jax.lax.scan(step, state, jnp.arange(4000))
    assert np.isfinite(out).all()
    assert np.linalg.eigvalsh(np.asarray(state.covariance, np.float64)).min() > -1e-3


@pytest.mark.parametrize("strength", [0.1, 1.0, 5.0])
def test_never_nan_with_decay(strength):
    """Constant regularizer: any decay to -5. Decayed: wherever the float64 reference stays below 1e30."""
    rng = np.random.default_rng(1)
    for kind in ("gaussian", "repeated", "zero"):
        q, k, v, lam, g = hostile(kind, 3, time=40, key=2, lam=10.0, size=3.0)
        decay = jnp.asarray(-strength * rng.uniform(0.5, 1, (4, 40)), jnp.float32)
        out, pull = jax.vjp(
            lambda *a: mesa_attention(*a[:4], log_decay=a[4], regularizer="constant"), q, k, v, lam, decay
        )
        for leaf in jax.tree.leaves((out, pull(g))):
            assert np.isfinite(leaf).all(), f"constant, {kind}"
        wide = [x.astype(jnp.float64) for x in (q, k, v, lam, decay)]
        exact, state = mesa_attention(*wide[:4], log_decay=wide[4], method="reference", return_state=True)
        grown = 10.0 * np.exp(-np.asarray(decay, np.float64).sum(-1)).max() if kind != "gaussian" else 0
        if max(np.abs(exact).max(), np.abs(state.covariance).max(), grown) < 1e30:
            for leaf in jax.tree.leaves(outcome(q, k, v, lam, g, None, decay)):
                assert np.isfinite(leaf).all(), f"decayed, {kind}"


def library(matrix):
    """What a GPU runs."""
    return _library_inverse(_raised(matrix))


@pytest.mark.parametrize("factor", [inverse_cholesky, library])
def test_inverse_cholesky(factor):
    rng = np.random.default_rng(0)
    for n in (1, 5, 17, 50):
        b = rng.standard_normal((3, n, n))
        a = np.eye(n) + b @ np.swapaxes(b, 1, 2)
        assert_close(jax.jit(factor)(jnp.asarray(a)), np.linalg.inv(np.linalg.cholesky(a)))


@pytest.mark.parametrize("factor", [inverse_cholesky, library])
@pytest.mark.parametrize("scale", [1e4, 1e8, 1e13])
def test_inverse_cholesky_survives_what_rounding_made_indefinite(factor, scale):
    rng = np.random.default_rng(0)
    for rank in (1, 3, 40):
        b = rng.standard_normal((64, 40, rank)).astype(np.float32) * np.float32(np.sqrt(scale))
        a = (np.eye(40, dtype=np.float32) + b @ np.swapaxes(b, 1, 2)).astype(np.float32)
        inverse = jax.jit(factor)(jnp.asarray(a))
        assert np.isfinite(inverse).all()
        assert np.abs(inverse).max() <= 2


@pytest.mark.parametrize("rank", [3, 40])
def test_orthonormal_rows(rank):
    """Where plain Cholesky is far from orthonormal, the square of its error is left; and a factor of I + BBᵀ."""
    rng = np.random.default_rng(0)
    b = (rng.standard_normal((16, 40, rank)) @ rng.standard_normal((16, rank, 64))).astype(np.float32)
    b *= 150 / np.linalg.norm(b, axis=-1, keepdims=True)
    inverse, rows = (np.asarray(a, np.float64) for a in jax.jit(orthonormal_rows)(jnp.asarray(b)))
    wide = b.astype(np.float64)
    exact = np.linalg.inv(np.linalg.cholesky(np.eye(40) + wide @ np.swapaxes(wide, 1, 2)))
    plain = jax.jit(lambda b: inverse_cholesky(jnp.eye(40, dtype=b.dtype) + matmul(b, b.mT)))(jnp.asarray(b))

    def overlaps(inverse, rows):
        return inverse @ np.swapaxes(inverse, 1, 2) + rows @ np.swapaxes(rows, 1, 2) - np.eye(40)

    plain = np.asarray(plain, np.float64)
    first = np.tril(overlaps(plain, plain @ wide), -1)
    assert 1e-4 < np.abs(first).max() < 5e-2
    # What is left of overlaps c + cᵀ has entries of about the rows of c squared.
    assert np.abs(overlaps(inverse, rows)).max() < 1.5 * (first**2).sum(-1).max() + 1e-6
    assert np.abs(inverse - exact).max() < 1e-2 * np.abs(exact).max()
    assert np.array_equal(inverse, np.tril(inverse))


@pytest.mark.parametrize("size", [1e2, 1e3, 1e4])
def test_orthonormal_rows_never_grow(size):
    """Whatever rounding does, I - M̃ᵀM̃ stays positive: the state shrinks with every pair."""
    rng = np.random.default_rng(0)
    for rank in (1, 3, 40):
        b = rng.standard_normal((16, 40, rank)) @ rng.standard_normal((16, rank, 64))
        b *= size / np.linalg.norm(b, axis=-1, keepdims=True)
        inverse, rows = (
            np.asarray(a, np.float64) for a in jax.jit(orthonormal_rows)(jnp.asarray(b, jnp.float32))
        )
        gram = inverse @ np.swapaxes(inverse, 1, 2) + rows @ np.swapaxes(rows, 1, 2)
        assert np.linalg.eigvalsh(gram).max() < 1 + 1e-5


@pytest.mark.parametrize("n", [1, 8, 21, 50])
def test_lower_inverse(n):
    rng = np.random.default_rng(0)
    lower = rng.standard_normal((2, n, n)) / np.sqrt(n) + 2 * np.eye(n)
    for inverse in (lower_inverse, _library_lower_inverse):
        assert_close(jax.jit(inverse)(jnp.asarray(lower)), np.linalg.inv(np.tril(lower)))
