"""Maps from past observations to the next one, against least squares over whole trajectories, filters and sampling."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.tasks import Stacked
from mesascope.theory.latent import System
from mesascope.training import AdamW, WarmupCosine, optimize


def system(state_dim=6, obs_dim=2, *, orthogonal=True, noise=(0.1, 0.1), seed=0) -> System:
    """As the task draws them; or with singular values of W between .7 and 1.3."""
    rng = np.random.default_rng(seed)
    w, _ = np.linalg.qr(rng.standard_normal((state_dim, state_dim)))
    if not orthogonal:
        v, _ = np.linalg.qr(rng.standard_normal((state_dim, state_dim)))
        w = w * np.linspace(0.7, 1.3, state_dim) @ v
    c = 0.5 * rng.standard_normal((obs_dim, state_dim))
    return System(jnp.asarray(w), jnp.asarray(c), *noise)


def numpy_of(s: System):
    return np.asarray(s.transition), np.asarray(s.readout), float(s.state_noise), float(s.observation_noise)


def simulate(s: System, first, state_noises, observation_noises):
    """States and observations, by the recursion itself."""
    w, c, *_ = numpy_of(s)
    states = [first]
    for noise in state_noises:
        states.append(w @ states[-1] + noise)
    return np.array(states), np.array(states) @ c.T + observation_noises


def rollout(s: System, steps: int, *, seed=1):
    rng = np.random.default_rng(seed)
    (n_s, n_h), (_, _, sigma_h, sigma_s) = s.readout.shape, numpy_of(s)
    noises = sigma_h * rng.standard_normal((steps - 1, n_h)), sigma_s * rng.standard_normal((steps, n_s))
    return simulate(s, rng.standard_normal(n_h), *noises)


def newest_first(observations):
    """z of the whole array."""
    return observations[::-1].ravel()


def close(actual, expected, tolerance=1e-10):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error < tolerance, error


@pytest.mark.parametrize("k", [1, 2, 4])
def test_stacks_are_the_observability_matrix_times_a_state(k):
    s = system(noise=(0.0, 0.0), orthogonal=False)
    states, observations = rollout(s, 12)
    stacks = Stacked(k=k)(jnp.asarray(observations)[None]).tokens[0]
    expected = states[: 11 - k + 1] @ np.asarray(s.observability(k)).T
    close(stacks[k - 1 :], expected, 1e-12)


@pytest.mark.parametrize(("state_dim", "obs_dim", "enough"), [(15, 5, 3), (7, 3, 3), (6, 2, 3), (4, 4, 1)])
def test_a_transition_of_stacks_exists_if_they_are_as_wide_as_the_state(state_dim, obs_dim, enough):
    """k n_s ≥ n_h, in all of twenty draws; and where it fails, no other map does better."""
    for seed in range(20):
        s = system(state_dim, obs_dim, seed=seed)
        w = np.asarray(s.transition)
        for k in range(1, enough + 2):
            o = np.asarray(s.observability(k))
            phi = np.asarray(s.minimum_norm_map(k))
            misfit = np.linalg.norm(phi @ o - o @ w) / np.linalg.norm(o @ w)
            best = np.linalg.lstsq(o.T, (o @ w).T, rcond=None)[0].T
            close(phi, best)
            if k < enough:
                assert misfit > 0.05
                hidden = np.eye(state_dim) - np.linalg.pinv(o) @ o
                expected = np.linalg.norm(o[:obs_dim] @ w @ hidden) / np.linalg.norm(o @ w)
                assert abs(misfit - expected) < 1e-10
            else:
                assert misfit < 1e-10


@pytest.mark.parametrize("k", [3, 4, 5])
def test_least_squares_without_noise_finds_the_minimum_norm_map(k):
    s = system(noise=(0.0, 0.0))
    _, observations = rollout(s, 80)
    z = np.array([newest_first(observations[t - k : t]) for t in range(k, 81)])
    fitted = np.linalg.lstsq(z[:-1], z[1:], rcond=1e-10)[0].T
    close(s.minimum_norm_map(k), fitted, 1e-9)


def trajectory_least_squares(s: System, observations):
    """The last state of the most likely trajectory: unknown are all states, known the equations they satisfy."""
    w, c, sigma_h, sigma_s = numpy_of(s)
    (n_s, n), k = c.shape, len(observations)
    rows = np.zeros((k * n_s + (k - 1) * n, k * n))
    right = np.zeros(len(rows))
    for i in range(k):
        at = slice(i * n_s, (i + 1) * n_s)
        rows[at, i * n : (i + 1) * n], right[at] = c / sigma_s, observations[i] / sigma_s
    for i in range(k - 1):
        at = slice(k * n_s + i * n, k * n_s + (i + 1) * n)
        rows[at, i * n : (i + 1) * n], rows[at, (i + 1) * n : (i + 2) * n] = w / sigma_h, -np.eye(n) / sigma_h
    return np.linalg.lstsq(rows, right, rcond=None)[0][-n:]


def generalized_least_squares(s: System, observations):
    """Regress z on the newest state, with the covariance of what is left: simulated backwards from a unit noise."""
    w, c, sigma_h, sigma_s = numpy_of(s)
    (n_s, n), k = c.shape, len(observations)

    def backwards(state, noises):
        """Observations of the states that lead to this one, oldest first."""
        states = [state]
        for noise in noises:
            states.append(np.linalg.solve(w, states[-1] - noise))
        return (np.array(states[::-1]) @ c.T).ravel()

    nothing = np.zeros((k - 1, n))
    design = np.array([backwards(unit, nothing) for unit in np.eye(n)]).T
    covariance = sigma_s**2 * np.eye(k * n_s)
    for unit in np.eye((k - 1) * n):
        effect = backwards(np.zeros(n), unit.reshape(k - 1, n))
        covariance += sigma_h**2 * np.outer(effect, effect)
    weighted = np.linalg.solve(covariance, design)
    return np.linalg.solve(weighted.T @ design, weighted.T @ observations.ravel())


def diffuse_kalman(s: System, observations):
    """The filtered state, from no information at all: precisions instead of covariances."""
    w, c, sigma_h, sigma_s = numpy_of(s)
    n = len(w)
    precision, information = np.zeros((n, n)), np.zeros(n)
    for i, observation in enumerate(observations):
        if i:
            moved = np.linalg.solve(w.T, np.linalg.solve(w.T, precision.T).T)
            lost = moved @ np.linalg.inv(moved + np.eye(n) / sigma_h**2)
            precision = moved - lost @ moved
            information = (np.eye(n) - lost) @ np.linalg.solve(w.T, information)
        precision = precision + c.T @ c / sigma_s**2
        information = information + c.T @ observation / sigma_s**2
    return np.linalg.solve(precision, information)


ORACLES = (trajectory_least_squares, generalized_least_squares, diffuse_kalman)


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("noise", [(0.1, 0.1), (0.3, 0.05), (0.02, 0.2)])
def test_the_most_likely_state(oracle, orthogonal, noise):
    for k, obs_dim in ((3, 2), (5, 2), (4, 3)):
        s = system(obs_dim=obs_dim, orthogonal=orthogonal, noise=noise)
        _, observations = rollout(s, k)
        state = oracle(s, observations)
        z = newest_first(observations)
        close(s.state_map(k) @ z, state)
        w, c, *_ = numpy_of(s)
        close(s.next_map(k) @ z, c @ w @ state)


def test_the_system_of_equations():
    """Its size, and that the paper's assumption of equal variances makes them drop out."""
    k, n_h, n_s = 4, 6, 2
    size = k * n_h + 2 * k * n_s
    s = system(noise=(0.01, 0.01), orthogonal=False)
    assert s.lagrangian(k).shape == (size, size)
    close(s.state_map(k), s._replace(state_noise=1.0, observation_noise=1.0).state_map(k))


def test_what_the_noise_matrices_are():
    """The paper's words (F shifted by l blocks) and its display (which begins with C W⁻¹) are two things.

    Only the display is right; for orthogonal W, whose inverse makes white noise white noise, the words do no harm.
    """
    k, n_s = 5, 2
    for orthogonal in (True, False):
        s = system(orthogonal=orthogonal)
        w, c, sigma_h, sigma_s = numpy_of(s)
        back = np.linalg.inv(w)
        f = np.concatenate([c @ np.linalg.matrix_power(back, j) for j in range(k)])

        def estimate(first, f=f, sigma_h=sigma_h, sigma_s=sigma_s):
            covariance = sigma_s**2 * np.eye(k * n_s)
            for l in range(1, k):
                shifted = np.concatenate([np.zeros((l * n_s, 6)), (f @ first)[: (k - l) * n_s]])
                covariance += sigma_h**2 * shifted @ shifted.T
            weighted = np.linalg.solve(covariance, f)
            return np.linalg.solve(weighted.T @ f, weighted.T)

        close(s.state_map(k), estimate(back))
        difference = np.abs(np.asarray(s.state_map(k)) - estimate(np.eye(6))).max()
        assert difference < 1e-10 if orthogonal else difference > 1e-2


def test_the_companion_matrix():
    s = system(orthogonal=False)
    k, n_s = 5, 2
    _, observations = rollout(s, k)
    moved = np.asarray(s.companion(k)) @ newest_first(observations)
    assert np.array_equal(moved[n_s:], newest_first(observations)[:-n_s])
    w, c, *_ = numpy_of(s)
    close(moved[:n_s], c @ w @ diffuse_kalman(s, observations))
    # As many numbers as unknowns: noise cannot be averaged out, and both maps are the only one there is.
    close(s.companion(3), s.minimum_norm_map(3))


def test_too_few_observations_are_named():
    with pytest.raises(ValueError, match="expected at least 3"):
        system().state_map(2)


def moments(s: System, k: int, state_covariance):
    """Second moment of (z, s_{t+1}), by sending every unit of randomness through the recursion."""
    (n_s, n), (_, _, sigma_h, sigma_s) = s.readout.shape, numpy_of(s)
    root = np.linalg.cholesky(state_covariance)
    sources = []
    for unit in np.eye(n):
        sources.append((root @ unit, np.zeros((k, n)), np.zeros((k + 1, n_s))))
    for unit in np.eye(k * n):
        sources.append((np.zeros(n), sigma_h * unit.reshape(k, n), np.zeros((k + 1, n_s))))
    for unit in np.eye((k + 1) * n_s):
        sources.append((np.zeros(n), np.zeros((k, n)), sigma_s * unit.reshape(k + 1, n_s)))
    effects = []
    for source in sources:
        _, observations = simulate(s, *source)
        effects.append(np.concatenate([newest_first(observations[:k]), observations[k]]))
    return np.array(effects).T @ np.array(effects)


def test_what_regression_converges_to():
    """The best linear prediction; and maximum likelihood in the limit of large states, at the rate noise / states."""
    s, k = system(orthogonal=False, noise=(0.2, 0.1)), 4
    m = k * 2
    differences = []
    for size in (1.0, 1e2, 1e4):
        covariance = size * np.eye(6)
        second = moments(s, k, covariance)
        expected = np.linalg.solve(second[:m, :m], second[:m, m:]).T
        actual = s.regression_map(k, jnp.asarray(covariance))
        close(actual, expected)
        differences.append(np.abs(np.asarray(actual - s.next_map(k))).max())
    assert differences[0] > 1e-3
    assert 80 < differences[1] / differences[2] < 120
    assert differences[1] < differences[0] / 20


def test_least_squares_converges_in_a_long_sequence():
    """One orthogonal system, ever more of it: the regression on z tends to C W U."""
    s, k = system(noise=(0.1, 0.1)), 4
    _, observations = rollout(s, 100_000)
    z = np.concatenate([observations[k - 1 - j : len(observations) - 1 - j] for j in range(k)], 1)
    target = np.asarray(s.next_map(k))
    errors = []
    for length in (100, 1000, 10_000, len(z)):
        fitted = np.linalg.lstsq(z[:length], observations[k : k + length], rcond=None)[0].T
        errors.append(np.linalg.norm(fitted - target) / np.linalg.norm(target))
    assert all(late < early / 2 for early, late in itertools.pairwise(errors)), errors
    assert errors[-1] < 0.01


def test_loss_of_regression_on_an_encoding():
    """Against dense moments; and its excess over the full stack's is the paper's objective."""
    s, k = system(orthogonal=False, noise=(0.2, 0.1)), 4
    m = k * 2
    covariance = np.diag(np.linspace(0.5, 2, 6))
    second = moments(s, k, covariance)
    zz, zs, ss = second[:m, :m], second[:m, m:], second[m:, m:]
    encoder = np.random.default_rng(0).standard_normal((3, m))
    code = encoder @ zz @ encoder.T
    expected = 0.5 * np.trace(ss - zs.T @ encoder.T @ np.linalg.solve(code, encoder @ zs))
    actual = s.regression_loss(jnp.asarray(encoder), jnp.asarray(covariance))
    assert abs(actual - expected) < 1e-12
    full = s.regression_loss(jnp.eye(m), jnp.asarray(covariance))
    from_all, from_code = np.linalg.solve(zz, zs).T, np.linalg.solve(code, encoder @ zs).T @ encoder
    apart = from_all - from_code
    assert abs((actual - full) - 0.5 * np.trace(apart @ zz @ apart.T)) < 1e-10
    # Any basis of the same row space is the same encoding.
    mixed = np.random.default_rng(1).standard_normal((3, 3)) @ encoder
    assert abs(s.regression_loss(jnp.asarray(mixed), jnp.asarray(covariance)) - expected) < 1e-10


def test_kalman_predictions():
    """Against conditioning in the joint distribution of all observations."""
    s, time = system(orthogonal=False, noise=(0.2, 0.1)), 7
    covariance = np.diag(np.linspace(0.5, 2, 6))
    _, observations = rollout(s, time)
    predictions = jax.jit(lambda o, c: s.kalman_predictions(o, c))(
        jnp.asarray(observations), jnp.asarray(covariance)
    )
    for t in range(1, time + 1):
        second = moments(s, t, covariance)
        m = 2 * t
        expected = second[m:, :m] @ np.linalg.solve(second[:m, :m], newest_first(observations[:t]))
        close(predictions[t - 1], expected)
    # With nothing known about the first state it forgets that something was: maximum likelihood.
    vague = s.kalman_predictions(jnp.asarray(observations), 1e6 * jnp.eye(6))
    close(vague[-1], s.next_map(time) @ newest_first(observations), 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_an_encoder_for_learners_who_know_the_system():
    """The paper's bilevel problem to the letter: regression is given the moments of each of many teachers."""

    def teachers(key, count=64):
        w_key, c_key = jax.random.split(key)
        w = jax.random.orthogonal(w_key, 6, (count,), jnp.float64)
        return w, 0.5 * jax.random.normal(c_key, (count, 2, 6), jnp.float64)

    def losses(encoder, batch):
        covariance = jnp.eye(6) / 3
        return jax.vmap(lambda w, c: System(w, c, 0.01, 0.01).regression_loss(encoder, covariance))(*batch)

    start = jnp.eye(4, 12)
    rate = WarmupCosine(peak=2e-2, warmup=0, end=300, floor=0.0)
    found, _ = optimize(
        lambda encoder, batch: jnp.mean(losses(encoder, batch)),
        start,
        teachers,
        steps=300,
        optimizer=AdamW(rate=rate, weight_decay=0.0, clip=None),
        key=jax.random.key(0),
    )
    held_out = teachers(jax.random.key(1), 2000)
    gain = np.asarray(losses(start, held_out) - losses(found, held_out))
    print(f"copying {losses(start, held_out).mean():.4f}, optimized {losses(found, held_out).mean():.4f}")
    assert gain.mean() > 5 * gain.std() / np.sqrt(len(gain))
