"""The in-context algorithms against plain numpy, and what the paper says about them that needs no statistics."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope import mesa_attention
from mesascope.tasks import Dynamics, FewShot, Stacked
from mesascope.theory.solvers import (
    DeltaRule,
    GradientDescent,
    GradientStep,
    KernelRegression,
    MesaOptimizer,
    NearestNeighbor,
    NewtonSchulz,
    Ridge,
    StackedGradientSteps,
    autoregressive,
    chebyshev_coefficients,
    few_shot,
    line_search,
    loss,
    loss_by_time,
    nearest_step,
    recall,
    tune,
)
from tests.theory import oracles

N, T = 4, 11
ETAS = (0.1, 0.05, 0.2)
PHI = np.random.default_rng(3).standard_normal((N, N))
ALPHAS, BETAS = (0.9, 1.7, 1.3), (0.0, 0.4, 0.6)


def sequences(batch=3, n=N, length=T, seed=0):
    sample = Dynamics.linear(state_dim=n, length=length, state_noise=0.1).sample(jax.random.key(seed), batch)
    return sample.observations.astype(jnp.float64)


# Compiled once for each kind of algorithm: contexts have the same shapes almost everywhere.
apply = jax.jit(lambda algorithm, context: algorithm(context))
by_step = jax.jit(lambda algorithm, context: algorithm.by_step(context))
mean_loss, mean_loss_by_time = jax.jit(loss), jax.jit(loss_by_time)


def close(actual, expected, tolerance=1e-10):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=tolerance)


ALGORITHMS = {
    "ridge": (Ridge(50.0), oracles.ridge(50.0)),
    "gradient step": (GradientStep(0.1), oracles.gradient_descent([0.1], np.zeros((N, N)))),
    "gradient step from Φ_0": (GradientStep(0.1, PHI), oracles.gradient_descent([0.1], PHI)),
    "gradient descent": (GradientDescent(ETAS, PHI), oracles.gradient_descent(ETAS, PHI)),
    "normalized": (
        MesaOptimizer(ALPHAS, BETAS, 50.0, normalized=True),
        oracles.learned_iteration(ALPHAS, BETAS, 50.0),
    ),
    "fixed": (MesaOptimizer(ALPHAS, BETAS, 50.0, 0.1), oracles.richardson(ALPHAS, BETAS, 50.0, 0.1)),
    "Newton–Schulz": (NewtonSchulz(50.0, steps=4), oracles.newton_schulz(50.0, 4)),
    "kernel": (KernelRegression(2.0), oracles.kernel_regression(2.0)),
    "nearest neighbor": (NearestNeighbor(), oracles.nearest_neighbor),
}


@pytest.mark.parametrize("newest_pair", [True, False])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_predictions_are_those_of_numpy(name, newest_pair):
    algorithm, oracle = ALGORITHMS[name]
    s = sequences()
    predictions = apply(algorithm, autoregressive(s, newest_pair=newest_pair))
    close(predictions, oracles.at_every_step(oracle, s, newest_pair=newest_pair))


@pytest.mark.parametrize("name", ["normalized", "kernel"])
def test_features_may_be_stacked(name):
    algorithm, oracle = ALGORITHMS[name]
    s = sequences(n=2)
    z = Stacked(k=2)(s).tokens
    expected = oracles.at_every_step(oracle, s, features=np.pad(z, ((0, 0), (0, 1), (0, 0))))
    close(apply(algorithm, autoregressive(s, features=z)), expected)


def test_features_may_be_those_of_the_generator():
    """Without noise, least squares on MLP*(s_t) finds W* and on s_t it does not."""
    task = Dynamics.nonlinear(state_dim=N, length=T, state_noise=0.0)
    trajectories = jax.tree.map(lambda a: a.astype(jnp.float64), task.sample(jax.random.key(0), 3))
    raw = autoregressive(trajectories.observations)
    features = autoregressive(trajectories.observations, features=trajectories.features[:, :-1])
    late = [np.abs(apply(Ridge(1e8), c) - c.targets)[:, -1].max() for c in (raw, features)]
    assert late[1] < 1e-4 < 1e-2 < late[0]


def test_stacked_steps_are_biased():
    """The first of them is a step of gradient descent, and no later one is; both against numpy."""
    s = sequences()
    context = autoregressive(s)
    stacked = by_step(StackedGradientSteps(ETAS), context)
    descent = by_step(GradientDescent(ETAS), context)
    for count in range(len(ETAS) + 1):
        close(stacked[count], oracles.stacked_gradient_steps(s, ETAS[:count]))
        expected = oracles.at_every_step(oracles.gradient_descent(ETAS[:count], np.zeros((N, N))), s)
        close(descent[count], expected)
    close(stacked[:2], np.asarray(descent[:2]))
    assert np.abs(stacked[2] - descent[2])[:, 3:].max() > 1e-3


def test_no_algorithm_sees_the_future():
    s = sequences()
    changed = s.at[:, 6:].add(1.0)
    for algorithm, _ in ALGORITHMS.values():
        before, after = (apply(algorithm, autoregressive(x)) for x in (s, changed))
        assert (before[:, :6] == after[:, :6]).all()
        assert (before[:, 6:] != after[:, 6:]).any()


def test_one_preconditioned_gradient_step_is_least_squares():
    """-∇L(0) for inputs H⁻¹x: one step of rate 1 on that loss, from zero, at every t."""
    s = np.asarray(sequences())
    lam = 50.0

    def predict(x, y, query):
        h = np.linalg.inv(x.T @ x + np.eye(N) / lam)
        return sum((np.outer(b, h @ a) for a, b in zip(x, y, strict=True)), np.zeros((N, N))) @ query

    close(apply(Ridge(lam), autoregressive(jnp.asarray(s))), oracles.at_every_step(predict, s))


def test_mesa_attention_is_recursive_least_squares_is_ridge():
    """The Sherman–Morrison recursion of the paper, in numpy, on pairs (s_{t-1}, s_t)."""
    three = sequences()
    lam, now = 50.0, np.asarray(three)[0, :-1]
    past = np.concatenate([0 * now[:1], now[:-1]])
    R, VK, out = lam * np.eye(N), np.zeros((N, N)), []
    for k, v, q in zip(past, now, now, strict=True):
        R = R - np.outer(R @ k, R @ k) / (1 + k @ R @ k)
        VK = VK + np.outer(v, k)
        out.append(VK @ R @ q)
    layer = jax.jit(mesa_attention)(*map(jnp.asarray, (now, past, now)), lam)
    close(layer, np.stack(out))
    close(apply(Ridge(lam), autoregressive(three))[0], np.stack(out))


def test_proposition_2_converges_at_the_chebyshev_rate():
    """To least squares, with the error below 2ρˡ/(1+ρ²ˡ) after every number of steps; Richardson is slower."""
    context, lam, steps = autoregressive(sequences()), 5.0, 40
    grams = np.cumsum(np.einsum("bti,btj->btij", context.keys, context.keys), 1) + np.eye(N) / lam
    spectrum = np.linalg.eigvalsh(grams)
    low, high = spectrum.min(), spectrum.max()
    optimizer = MesaOptimizer.chebyshev(low, high, steps=steps, lam=lam)
    exact = np.linalg.solve(grams, np.asarray(context.queries)[..., None])[..., 0]
    iterates = float(optimizer.eta) * np.asarray(
        jax.jit(lambda a, c: a.preconditioned(c))(optimizer, context)
    )
    errors = np.linalg.norm(iterates - exact, axis=-1)
    rho = (np.sqrt(high / low) - 1) / (np.sqrt(high / low) + 1)
    count = np.arange(steps + 1)[:, None, None]
    bound = 2 * rho**count / (1 + rho ** (2 * count)) * errors[0]
    assert (errors <= bound * (1 + 1e-9) + 1e-12).all()
    # The bound is attained up to a factor somewhere: the test would notice a slower rate.
    assert (errors[-1] / (bound[-1] + 1e-300)).max() > 0.05
    ridge = np.asarray(apply(Ridge(lam), context))
    gaps = [np.abs(optimizer.predict(context, x / optimizer.eta) - ridge).max() for x in iterates[::10]]
    assert all(b < 0.5 * a for a, b in itertools.pairwise(gaps))
    richardson = MesaOptimizer(np.ones(steps), np.zeros(steps), lam, optimizer.eta)
    assert np.abs(apply(richardson, context) - ridge).max() > 10 * gaps[-1]


def test_proposition_2_without_momentum_is_gradient_descent():
    context = autoregressive(sequences())
    optimizer = MesaOptimizer(np.ones(4), np.zeros(4), 1e30, 0.07)
    close(apply(optimizer, context), np.asarray(apply(GradientDescent([0.07] * 5), context)))


def test_newton_schulz_is_a_neumann_series_of_2_to_the_k_terms():
    context = autoregressive(sequences(batch=1))
    h = np.cumsum(np.einsum("bti,btj->btij", context.keys, context.keys), 1) + np.eye(N) / 50
    m = np.eye(N) - h / np.trace(h, axis1=-2, axis2=-1)[..., None, None]
    series = sum(np.linalg.matrix_power(m, j) for j in range(2**5))
    x = np.einsum("btij,btj->bti", series, context.queries) / np.trace(h, axis1=-2, axis2=-1)[..., None]
    b = np.cumsum(np.einsum("bti,btj->btij", context.values, context.keys), 1)
    close(apply(NewtonSchulz(50.0, steps=5), context), np.einsum("btij,btj->bti", b, x))


def test_nearest_neighbor_is_the_limit_of_the_kernel():
    context = autoregressive(sequences())
    limit = np.asarray(apply(NearestNeighbor(), context))
    gaps = [np.abs(apply(KernelRegression(beta), context) - limit).max() for beta in (1.0, 1e6)]
    assert gaps[0] > 0.1
    assert gaps[1] < 1e-10


def test_few_shot_contexts():
    """True pairs only: ridge on them in numpy, at every x. All pairs: those of the interleaved sequence."""
    task = FewShot.preset(dim=N, length=T)
    regression = task.sample(jax.random.key(0), 3)
    prompt = jax.tree.map(lambda a: a if a.dtype == bool else a.astype(jnp.float64), task.prompt(regression))
    true = np.asarray(apply(Ridge(50.0), few_shot(prompt, task.layout, true_pairs_only=True)))
    x, y = (np.asarray(a, np.float64)[:, 0] for a in regression[:2])
    for b, i in np.ndindex(3, 6):
        close(true[b, 2 * i], oracles.ridge(50.0)(x[b, :i], y[b, :i], x[b, i]))
    tokens = np.asarray(prompt.tokens)
    for newest_pair in (True, False):
        all_pairs = apply(Ridge(50.0), few_shot(prompt, task.layout, newest_pair=newest_pair))
        extended = np.concatenate([tokens, tokens[:, :1]], 1)
        close(all_pairs, oracles.at_every_step(oracles.ridge(50.0), extended, newest_pair=newest_pair))
        dropped = few_shot(prompt, task.layout, true_pairs_only=True, newest_pair=newest_pair)
        assert int(dropped.present.sum()) == 5
    by_time = np.asarray(mean_loss_by_time(NearestNeighbor(), few_shot(prompt, task.layout)))
    assert (by_time[1::2] == 0).all()
    assert (by_time[::2] > 0).all()


def test_recall_asks_after_all_is_written():
    rng = np.random.default_rng(0)
    keys, values = (jnp.asarray(rng.standard_normal((5, 6))) for _ in range(2))
    context = recall(keys, values)
    assert (context.targets[5:] == values).all()
    assert not context.keys[5:].any()
    phi = np.zeros((6, 6))
    for k, v in zip(np.asarray(keys), np.asarray(values), strict=True):
        phi = phi + 0.1 * np.outer(v - phi @ k, k)
    close(apply(DeltaRule(0.1), context)[5:], np.asarray(keys) @ phi.T)


def test_line_search_finds_the_valley():
    context = autoregressive(sequences(batch=32))
    rate, found = line_search(GradientStep, context, 1e-3, 10.0, rounds=6)
    # The loss is a parabola in the rate.
    ends = [float(mean_loss(GradientStep(x), context)) for x in (0.0, 0.1, 0.2)]
    curvature, slope = (ends[2] - 2 * ends[1] + ends[0]) / 0.02, (4 * ends[1] - 3 * ends[0] - ends[2]) / 0.2
    best = -slope / (2 * curvature)
    assert abs(rate / best - 1) < 0.01
    assert found < float(mean_loss(GradientStep(0.9 * best), context))
    with pytest.raises(ValueError, match="0 < low < high"):
        line_search(GradientStep, context, 1.0, 0.1)


def test_the_nearest_gradient_step():
    """Found again in its own predictions; and of others', no step beside it is nearer."""
    context = autoregressive(sequences(batch=40))
    found = nearest_step(context, apply(GradientStep(0.07, 0.3 * PHI), context), rounds=200)
    close(found.eta, 0.07, 1e-8)
    close(found.phi_0, 0.3 * PHI, 1e-8)
    others = apply(Ridge(50.0), context)
    found = nearest_step(context, others, rounds=200)

    def apart(eta, phi_0):
        return float(jnp.sum((apply(GradientStep(eta, phi_0), context) - others) ** 2))

    least = apart(found.eta, found.phi_0)
    for sign in (-1, 1):
        assert apart(found.eta + sign * 1e-3, found.phi_0) > least
        assert apart(found.eta, found.phi_0 + sign * 1e-3 * PHI) > least
        assert apart(found.eta + 1e-3, found.phi_0 + sign * 1e-3 * PHI) > least
    assert least < apart(0.0, np.zeros((N, N)))


@pytest.mark.usefixtures("standard_promotion")
def test_tuning_lowers_the_loss_of_every_number():
    """λ, η, α, β and Φ_0 all move, to a lower loss on other sequences."""
    held_out = autoregressive(sequences(batch=64, seed=9))

    def sample(key):
        return autoregressive(Dynamics.linear(state_dim=N, length=T).sample(key, 32).observations)

    starts = [
        MesaOptimizer(np.ones(2), np.zeros(2), 10.0, 0.05),
        GradientStep(0.01, 0.3 * np.eye(N)),
    ]
    for start in starts:
        tuned, losses = tune(start, sample, steps=60, rate=5e-2, key=jax.random.key(0))
        assert losses.shape == (60,)
        assert float(mean_loss(tuned, held_out)) < 0.95 * float(mean_loss(start, held_out))
        for before, after in zip(jax.tree.leaves(start), jax.tree.leaves(tuned), strict=True):
            assert (np.asarray(before) != np.asarray(after)).any()


def test_errors_say_what_was_expected():
    s = sequences()
    with pytest.raises(ValueError, match="features: expected one for each of the 11"):
        autoregressive(s, features=s)
    with pytest.raises(ValueError, match="one of each per step"):
        MesaOptimizer(np.ones(3), np.zeros(2))
    with pytest.raises(ValueError, match="0 < low < high"):
        chebyshev_coefficients(2.0, 1.0, 3)
