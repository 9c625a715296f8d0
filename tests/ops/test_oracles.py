"""Against oracles that share no code with the library: scipy, numpy, the paper's implicit derivation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from mesascope import delta_attention, intention, linear_attention, mesa_init, mesa_step
from mesascope import mesa_attention as eager
from tests.helpers import assert_close, draw, rls

# One compilation instead of one for each operation.
mesa_attention = jax.jit(eager, static_argnames=("method", "regularizer", "return_state"))

EXACT = ("reference", "recursive", "chunked", "prefix", "pallas", "cg")


@pytest.mark.parametrize("method", EXACT)
def test_scipy_solves_the_stacked_ridge_problem(method):
    """Φ_t is the least-squares solution of [K_t; diag(λ)^(-1/2)] Φᵀ = [V_t; 0]."""
    a = draw(lead=(), time=9, key=4)
    out = mesa_attention(**a, method=method)
    for t in range(9):
        rows = np.vstack([a["keys"][: t + 1], np.diag(np.asarray(a["lam"]) ** -0.5)])
        targets = np.vstack([a["values"][: t + 1], np.zeros((4, 3))])
        phi_t, *_ = scipy.linalg.lstsq(rows, targets)
        assert_close(out[t], np.asarray(a["queries"])[t] @ phi_t, name=f"t={t}")


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize(
    "features",
    [{}, {"log_decay": 0.4}, {"log_decay": 0.4, "beta": True, "segments": True, "time": 33}],
    ids=["plain", "decay", "everything"],
)
def test_classical_recursive_least_squares(method, features):
    a = draw(**features)
    assert_close(mesa_attention(**a, method=method), rls(a))


@pytest.mark.parametrize("method", ["reference", "cg"])
def test_constant_regularizer(method):
    a = draw(log_decay=5.0, beta=True, segments=True, time=21)
    assert_close(mesa_attention(**a, method=method, regularizer="constant"), rls(a, constant=True))


@pytest.mark.parametrize("method", EXACT)
def test_gradients_by_the_implicit_function_theorem(method):
    """dφ_t/dθ = -R_t d²L/(dθ dφ) (the paper's second derivation), summed over time and rows in numpy."""
    a = draw(lead=(), time=8, key=3, value=2, log_decay=0.3)
    q, k, v, lam, g = (np.asarray(a[n]) for n in ("queries", "keys", "values", "lam", "log_decay"))
    cotangent = np.random.default_rng(1).standard_normal((8, 2))
    expected = {n: np.zeros_like(x) for n, x in (("keys", k), ("values", v), ("queries", q), ("lam", lam))}
    for t in range(8):
        mask = np.array([np.exp(g[i + 1 : t + 1].sum()) for i in range(t + 1)])
        start = np.exp(g[: t + 1].sum())
        hessian = (mask[:, None] * k[: t + 1]).T @ k[: t + 1] + np.diag(start / lam)
        phi = np.linalg.solve(hessian, (mask[:, None] * k[: t + 1]).T @ v[: t + 1])  # key × value
        expected["queries"][t] = phi @ cotangent[t]
        for row in range(2):
            adjoint = -np.linalg.solve(hessian, q[t]) * cotangent[t, row]  # -R_t q_t ō
            residual = k[: t + 1] @ phi[:, row] - v[: t + 1, row]
            for i in range(t + 1):
                # dL/dφ = Σ M (φᵀk - v) k + M_0 φ/λ, differentiated by k_i, v_i, λ
                cross_k = mask[i] * (np.outer(k[i], phi[:, row]) + residual[i] * np.eye(3))
                expected["keys"][i] += cross_k.T @ adjoint
                expected["values"][i, row] += -mask[i] * k[i] @ adjoint
            expected["lam"] += -start * phi[:, row] / lam**2 * adjoint
    got = jax.grad(
        lambda x: jnp.vdot(cotangent, mesa_attention(**x, log_decay=a["log_decay"], method=method))
    )({n: a[n] for n in expected})
    assert_close(got, {n: jnp.asarray(x) for n, x in expected.items()})


def test_intention_is_the_last_step_for_every_query():
    a = draw(lead=(2,), time=11)
    rows = np.concatenate([a["keys"], np.stack([np.diag(x**-0.5) for x in np.asarray(a["lam"])])], 1)
    targets = np.concatenate([a["values"], np.zeros((2, 4, 3))], 1)
    expected = [
        np.asarray(q) @ scipy.linalg.lstsq(r, y)[0]
        for q, r, y in zip(a["queries"], rows, targets, strict=True)
    ]
    assert_close(intention(**a), jnp.asarray(np.stack(expected)))
    assert_close(intention(**a)[:, -1], mesa_attention(**a, method="reference")[:, -1])


def test_intention_gradients():
    a = draw(lead=(), time=6, beta=True)

    def dense(queries, keys, values, lam, beta):
        weighted = beta[:, None] * keys
        phi = jnp.linalg.solve(weighted.T @ keys + jnp.diag(1 / lam), weighted.T @ values)
        return jnp.sum(jnp.sin(queries @ phi))

    got = jax.grad(lambda a: jnp.sum(jnp.sin(intention(**a))))(a)
    assert_close(got, jax.grad(lambda a: dense(**a))(a))


def over_time(step):
    """A loop over time steps of one sequence."""

    def loop(a, state):
        state, out = jax.lax.scan(step, state, a)
        return out, state

    return loop


def linear_step(s, x):
    s = jnp.exp(x["log_decay"]) * s + x["beta"] * jnp.outer(x["values"], x["keys"])
    return s, s @ x["queries"]


def delta_step(phi, x):
    phi = jnp.exp(x["log_decay"]) * phi
    phi = phi + x["beta"] * jnp.outer(x["values"] - phi @ x["keys"], x["keys"])
    return phi, phi @ x["queries"]


@pytest.mark.parametrize(
    ("op", "loop"),
    [(linear_attention, over_time(linear_step)), (delta_attention, over_time(delta_step))],
    ids=["linear", "delta"],
)
@pytest.mark.parametrize("time", [1, 2, 63, 100])
def test_linear_attention_and_the_delta_rule(op, loop, time):
    """Values, final state and every gradient against the loop over time."""
    a = draw(lead=(), time=time, log_decay=0.2, beta=True)
    a["keys"] = a["keys"] / 4
    del a["lam"]
    state = jnp.asarray(np.random.default_rng(2).standard_normal((3, 4)))

    def both(f):
        def inner(a, state):
            out, final = f(a, state)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final)), (out, final)

        return jax.jit(jax.grad(inner, argnums=(0, 1), has_aux=True))(a, state)

    assert_close(both(lambda a, s: op(**a, state=s, return_state=True)), both(loop))


@pytest.mark.parametrize("op", [linear_attention, delta_attention])
def test_linear_ops_restart_at_segments(op):
    a = draw(lead=(), time=70, log_decay=0.2, beta=True)
    a["keys"] = a["keys"] / 4
    del a["lam"]
    compiled = jax.jit(op)
    whole = compiled(**a, segment_ids=jnp.asarray([0] * 30 + [1] * 40))
    parts = [compiled(**{n: x[s] for n, x in a.items()}) for s in (slice(0, 30), slice(30, 70))]
    assert_close(whole, jnp.concatenate(parts))


@pytest.mark.parametrize("regularizer", ["decayed", "constant"])
def test_decoding_step_by_step(regularizer):
    a = draw(lead=(2,), time=17, log_decay=0.5, beta=True)
    state = mesa_init(a["lam"], 3, regularizer=regularizer, dtype=jnp.float64)
    out = []
    for t in range(17):
        state, o = mesa_step(
            state, a["queries"][:, t], a["keys"][:, t], a["values"][:, t],
            log_decay=a["log_decay"][:, t], beta=a["beta"][:, t],
        )  # fmt: skip
        out.append(o)
    assert_close(jnp.stack(out, 1), rls(a, constant=regularizer == "constant"))
