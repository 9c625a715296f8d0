"""Every method against `reference`: outputs, final states, every gradient."""

import random
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope import GramState, MesaState
from mesascope import mesa_attention as eager
from mesascope.ops import methods
from mesascope.ops.methods import Chebyshev, Chunked, ConjugateGradients, Neumann, Pallas, Prefix, Recursive
from tests.helpers import assert_close, draw

# One compilation instead of one for each operation.
mesa_attention = jax.jit(eager, static_argnames=("method", "regularizer", "return_state"))

# One table of everything registered, each put through the same checks.
METHODS = {
    "recursive": Recursive(),
    "reverse-time": Recursive(backward="reverse_time"),
    "chunked": Chunked(),
    "chunked-5": Chunked(chunk_size=5),
    "chunked-1": Chunked(chunk_size=1),
    "pallas": Pallas(),
    "prefix": Prefix(),
    "prefix-5": Prefix(chunk_size=5),
    "cg": ConjugateGradients(),
    "chebyshev": Chebyshev(steps=600),
    "chebyshev-precomputed": Chebyshev(steps=600, precompute=True),
    "neumann": Neumann(steps=3000),
    "neumann-precomputed": Neumann(steps=3000, precompute=True),
}
FEATURES = {
    "plain": {},
    "decay": {"log_decay": 0.3},
    "beta": {"beta": True},
    "segments": {"segments": True},
    "everything": {"log_decay": 0.3, "beta": True, "segments": True},
}


def initial_state(a, constant):
    rng = np.random.default_rng(5)
    lead, (value, key) = a["keys"].shape[:-2], (a["values"].shape[-1], a["keys"].shape[-1])
    root = jnp.asarray(rng.standard_normal((*lead, key, key)))
    weights = jnp.asarray(rng.standard_normal((*lead, value, key)))
    if constant:
        return GramState(root @ jnp.swapaxes(root, -1, -2), weights, 1 / a["lam"])
    return MesaState(0.3 * root + jnp.eye(key), weights)


def outcome(arguments, state, method, regularizer="decayed"):
    """Output, final state and all gradients of a function of both."""
    ids = arguments.get("segment_ids")

    def loss(differentiable, state):
        out, final = mesa_attention(
            **differentiable, segment_ids=ids, state=state, method=method, regularizer=regularizer,
            return_state=True,
        )  # fmt: skip
        matrix = final.covariance if isinstance(final, MesaState) else final.gram
        total = jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(matrix)) + jnp.sum(jnp.cos(final[1]))
        return total, (out, matrix, final[1])

    differentiable = {n: x for n, x in arguments.items() if n != "segment_ids"}
    argnums = (0,) if state is None else (0, 1)
    gradients, values = jax.jit(jax.grad(loss, argnums=argnums, has_aux=True))(differentiable, state)
    if state is not None and isinstance(state, GramState):
        gram = gradients[1].gram  # a symmetric matrix: only the symmetric part of its gradient means anything
        gradients = (gradients[0], gradients[1]._replace(gram=(gram + jnp.swapaxes(gram, -1, -2)) / 2))
    return values, gradients


def cases():
    """The whole grid. In the fast tier: every method with everything at once, and a random sample of the rest."""
    grid = [(m, f) for m in METHODS for f in FEATURES if m != "reverse-time" or f in ("plain", "decay")]
    sample = random.Random(0).sample(grid, 12)
    for name, feature in grid:
        fast = feature == "everything" or (name, feature) in (("reverse-time", "decay"), *sample)
        yield pytest.param(name, feature, marks=() if fast else pytest.mark.slow)


@cache
def problem(feature):
    """Inputs, and what `reference` makes of them."""
    a = draw(**FEATURES[feature])
    state = initial_state(a, constant=False) if feature in ("decay", "everything") else None
    return a, state, outcome(a, state, "reference")


@pytest.mark.parametrize(("name", "feature"), list(cases()))
def test_method_equals_reference(name, feature):
    a, state, expected = problem(feature)
    assert_close(outcome(a, state, METHODS[name]), expected, name=f"{name} {feature}")


@pytest.mark.parametrize("name", ["cg", "chebyshev", "neumann"])
def test_constant_regularizer_equals_reference(name):
    a = draw(log_decay=0.5, beta=True, segments=True)
    state = initial_state(a, constant=True)
    assert_close(outcome(a, state, METHODS[name], "constant"), outcome(a, state, "reference", "constant"))


ODD_SIZES = [
    (1, 1, 1),
    (2, 3, 2),
    (63, 20, 5),
    pytest.param(64, 33, 7, marks=pytest.mark.slow),
    pytest.param(100, 64, 64, marks=pytest.mark.slow),
    pytest.param(129, 7, 120, marks=pytest.mark.slow),
    pytest.param(129, 7, 130, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", ["chunked", "prefix", "pallas"])
@pytest.mark.parametrize(("time", "key", "value"), ODD_SIZES)
def test_odd_sizes(name, time, key, value):
    if name == "pallas" and value > Pallas.WIDEST:
        with pytest.raises(ValueError, match="'chunked'"):
            eager(np.ones((time, key)), np.ones((time, key)), np.ones((time, value)), 1.0, method="pallas")
        return
    a = draw(lead=(2,), time=time, key=key, value=value, log_decay=0.05, beta=True)
    assert_close(outcome(a, None, METHODS[name]), outcome(a, None, "reference"), scale=10)


def test_wide_keys():
    """384 channels: DPFP features of 64."""
    a = draw(lead=(), time=40, key=384, value=8)
    assert_close(outcome(a, None, "chunked"), outcome(a, None, "reference"), scale=10)


@pytest.mark.parametrize("strength", [1.0, 5.0])
def test_strong_decay_walks_token_by_token(strength):
    """Beyond a few e-folds per chunk the whitened weights would lose all digits (and then overflow)."""
    a = draw(lead=(2,), time=40, key=2, value=2, log_decay=strength, beta=False, segments=True)
    assert_close(outcome(a, None, "chunked"), outcome(a, None, "reference"), scale=1e3)


def test_channel_and_scalar_lam_agree():
    a = draw()
    a["lam"] = a["lam"][..., :1]
    wide = a | {"lam": jnp.broadcast_to(a["lam"], (3, 4))}
    assert_close(mesa_attention(**a), mesa_attention(**wide))
    assert_close(mesa_attention(**(a | {"lam": 0.7})), mesa_attention(**(a | {"lam": jnp.full((3, 4), 0.7)})))


def test_leading_axes_broadcast():
    """One set of keys, two seeds of queries, three heads' λ."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(s)) for s in ((2, 1, 9, 4), (9, 4), (3, 9, 5)))
    lam = jnp.asarray([0.5, 1.0, 2.0])[:, None]
    out = mesa_attention(q, k, v, lam)
    assert out.shape == (2, 3, 9, 5)
    assert_close(out[1, 2], mesa_attention(q[1, 0], k, v[2], 2.0))


def test_neumann_and_chebyshev_are_truncations():
    """Few steps are far from the solution, more are nearer, and Chebyshev is nearer than Neumann."""
    a = draw(time=20)
    exact = mesa_attention(**a, method="reference")

    def error(method):
        return float(jnp.linalg.norm(mesa_attention(**a, method=method) - exact) / jnp.linalg.norm(exact))

    neumann = [error(Neumann(steps=n)) for n in (2, 8, 32, 128)]
    chebyshev = [error(Chebyshev(steps=n)) for n in (2, 8, 32, 128)]
    assert neumann[0] > neumann[1] > neumann[2] > neumann[3] > 1e-6
    assert chebyshev[0] > chebyshev[1] > chebyshev[2] > chebyshev[3]
    assert chebyshev[2] < neumann[2]
    assert chebyshev[3] < neumann[3] / 10


def test_cg_stops_at_its_tolerance():
    a = draw(time=20)
    exact = mesa_attention(**a, method="reference")
    loose, tight = (mesa_attention(**a, method=ConjugateGradients(tolerance=t)) for t in (1e-2, 1e-10))
    one = mesa_attention(**a, method=ConjugateGradients(max_steps=1))
    norms = [float(jnp.linalg.norm(x - exact)) for x in (one, loose, tight)]
    assert norms[0] > norms[1] > 1e-8 > norms[2]


def test_auto_takes_what_was_measured(monkeypatch):
    settle = partial(methods.resolve, "auto", whitening_applies=True)
    assert settle(kernels_apply=False) == Chunked()
    assert settle(kernels_apply=True) == Pallas()

    fastest = partial(Pallas.is_fastest, dtype=jnp.float32)
    assert not fastest(64, 64, plain=True)
    monkeypatch.setattr(methods, "has_kernels", lambda: True)
    assert fastest(384, 128, plain=True)
    assert not fastest(385, 64, plain=True)
    assert not fastest(64, 129, plain=True)
    assert fastest(64, 64, plain=False)
    assert not fastest(65, 64, plain=False)
    assert not Pallas.is_fastest(64, 64, jnp.float64, plain=True)
