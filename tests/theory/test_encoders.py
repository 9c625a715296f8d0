"""Regression on stacked and on encoded observations: exact at every step, differentiable, never worse than copying."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.tasks import Dynamics, Readout
from mesascope.theory import encoders
from mesascope.theory.encoders import (
    Encoder,
    compare_encoders,
    copying,
    leading,
    optimize_encoder,
    overlap,
    with_best_lam,
)
from mesascope.theory.latent import System
from tests.test_examples import load

pytestmark = pytest.mark.usefixtures("standard_promotion")


PAPER = Dynamics.partially_observed()
SMALL = Dynamics.partially_observed(state_dim=4, readout=Readout(obs_dim=2, std=0.5), length=20)


@pytest.fixture(scope="module")
def paper():
    """Sequences of the paper's task, with what they came from."""
    return jax.jit(lambda key: PAPER.sample(key, 128))(jax.random.key(0))


@pytest.fixture(scope="module")
def small():
    return jax.jit(lambda key: SMALL.sample(key, 512).observations)(jax.random.key(0))


losses = jax.jit(lambda encoder, observations: encoder.losses(observations))
predictions = jax.jit(lambda encoder, observations: encoder.predictions(observations))


def per_sequence(encoder, observations):
    return np.asarray(losses(encoder, observations), np.float64).mean(1)


def last(k, *, obs_dim, width):
    """Copies the last k observations. Rows of zeros change nothing, and one shape is compiled once."""
    return jnp.diag((jnp.arange(width) < k * obs_dim).astype(jnp.float32))


def interval(x):
    """Mean and five standard errors."""
    return x.mean(), 5 * x.std(ddof=1) / np.sqrt(len(x))


def ridge(matrix, lam, s, padded_weight=1.0):
    """One regression per step, in numpy."""
    k, out = matrix.shape[1] // s.shape[-1], []
    for sequence in s:
        padded = np.concatenate([np.zeros((k - 1, s.shape[-1])), sequence])
        codes = np.array([matrix @ padded[t : t + k][::-1].ravel() for t in range(len(sequence) - 1)])
        row = []
        for t in range(len(codes)):
            x, y = codes[:t], sequence[1 : t + 1]
            weighted = x * np.where(np.arange(t) < k - 1, padded_weight, 1.0)[:, None]
            phi = np.linalg.solve(weighted.T @ x + np.eye(len(matrix)) / lam, weighted.T @ y).T
            row.append(phi @ codes[t])
        out.append(row)
    return np.array(out)


def test_predictions_are_ridge_regressions(small):
    s = small[:3].astype(jnp.float64)
    matrix = np.random.default_rng(0).standard_normal((3, 6))
    for weight in (1.0, 0.3, 0.0):
        encoder = Encoder(jnp.asarray(matrix), jnp.asarray(5.0), jnp.asarray(weight))
        expected = ridge(matrix, 5.0, np.asarray(s), weight)
        assert np.abs(np.asarray(predictions(encoder, s)) - expected).max() < 1e-10


def test_without_noise_enough_observations_predict_perfectly():
    """Two times two is the state's width; one observation is not enough, however long the sequence.

    Nor are two, if the pair that begins with zeros counts.
    """
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(8):
        w, _ = np.linalg.qr(rng.standard_normal((4, 4)))
        c, h, s = rng.standard_normal((2, 4)), rng.standard_normal(4), []
        for _ in range(41):
            s.append(c @ h)
            h = w @ h
        sequences.append(s)
    s = jnp.asarray(np.array(sequences))

    def late_losses(k, padded_weight):
        matrix = last(k, obs_dim=2, width=6).astype(jnp.float64)
        encoder = Encoder(matrix, jnp.asarray(1e9), jnp.asarray(padded_weight))
        return np.asarray(losses(encoder, s))[:, -5:].mean(1)

    assert late_losses(1, 0.0).min() > 1e-3
    assert late_losses(2, 0.0).max() < 1e-12
    assert late_losses(3, 0.0).max() < 1e-12
    assert late_losses(2, 1.0).min() > 1e-6


def test_gradient_of_the_bilevel_objective(small):
    s = small[:3].astype(jnp.float64)
    rng = np.random.default_rng(0)
    matrix, direction = rng.standard_normal((2, 3, 6))
    step = 1e-5

    def loss(matrix, log_lam):
        return jnp.mean(Encoder(matrix, jnp.exp(log_lam)).losses(s))

    def loss_in_numpy(matrix, log_lam):
        return (
            0.5 * ((ridge(matrix, np.exp(log_lam), np.asarray(s)) - np.asarray(s)[:, 1:]) ** 2).sum(-1).mean()
        )

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(jnp.asarray(matrix), jnp.asarray(0.3))
    assert abs(value - loss_in_numpy(matrix, 0.3)) < 1e-10
    by_matrix = (
        loss_in_numpy(matrix + step * direction, 0.3) - loss_in_numpy(matrix - step * direction, 0.3)
    ) / (2 * step)
    by_lam = (loss_in_numpy(matrix, 0.3 + step) - loss_in_numpy(matrix, 0.3 - step)) / (2 * step)
    assert abs(np.sum(np.asarray(gradients[0]) * direction) - by_matrix) < 1e-7 * abs(by_matrix)
    assert abs(gradients[1] - by_lam) < 1e-7 * max(abs(by_lam), 1e-2)


def test_more_observations_predict_better(paper):
    """On the paper's task; differences beyond five standard errors."""
    s, lam = paper.observations, jnp.full((), 0.3, jnp.float32)
    found = [per_sequence(Encoder(last(k, obs_dim=5, width=25), lam), s) for k in (1, 2, 3, 5)]
    for fewer, more in itertools.pairwise(found):
        gain, error = interval(fewer - more)
        assert gain > error


def test_best_lam_does_not_depend_on_scale(small):
    s, matrix = small, copying(2, 2, k=6)
    one, scaled = with_best_lam(matrix, s), with_best_lam(10 * matrix, s)
    assert abs(scaled.lam * 100 / one.lam - 1) < 1e-5
    assert abs(per_sequence(one, s).mean() / per_sequence(scaled, s).mean() - 1) < 1e-4
    mean = per_sequence(one, s).mean()
    for factor in (0.01, 0.5, 2.0, 100.0):
        assert per_sequence(one._replace(lam=factor * one.lam), s).mean() > mean


def test_an_optimized_encoder_beats_copying():
    """Two numbers for four of state, six observations to choose from."""
    start = copying(2, 2, k=6)
    found = optimize_encoder(SMALL, start, steps=100, batch_size=32, validation=512, key=jax.random.key(0))
    comparison = compare_encoders(
        found.matrix, found.matrix, SMALL, sequences=512, random_encoders=2, key=jax.random.key(1)
    )
    gain, error = comparison.mean_and_error("copying", minus="given")
    assert gain > 2 * error, (gain, error)
    assert comparison.overlaps["given"] > 0.999
    assert comparison.overlaps["copying"] > 0.7 > 0.4 > comparison.overlaps["random"]
    worse, error = comparison.mean_and_error("random", minus="copying")
    assert worse > 3 * error


def test_never_worse_than_its_start(monkeypatch):
    """Where optimization ends in something worse, the start is kept: here in an encoder that cannot see the present."""
    good, bad = copying(2, 2, k=6), copying(2, 2, k=6)[:, ::-1]
    for start in (good, bad):
        other = bad if start is good else good
        monkeypatch.setattr(encoders, "optimize", lambda *_, other=other, **__: ((other, None), None))
        found = optimize_encoder(SMALL, start, steps=1, validation=512, key=jax.random.key(0))
        assert np.array_equal(found.matrix, good)


def test_overlap():
    rng = np.random.default_rng(0)
    a, b, mix = rng.standard_normal((3, 20)), rng.standard_normal((3, 20)), rng.standard_normal((3, 3))
    measure = jax.jit(overlap)
    assert abs(measure(a, mix @ a) - 1) < 1e-10
    assert abs(measure(a, b) - measure(b, a)) < 1e-12
    assert measure(np.eye(3, 20), np.eye(20)[5:8]) < 1e-12
    assert abs(measure(np.eye(3, 20), np.eye(20)[2:5]) - 1 / 3) < 1e-12
    # A repeated row adds nothing, and the smaller space is all that is asked for.
    assert abs(measure(np.concatenate([a, a]), a) - 1) < 1e-10
    x = np.array([measure(a, rng.standard_normal((6, 20))) for _ in range(200)])
    assert abs(x.mean() - 6 / 20) < 5 * x.std() / np.sqrt(len(x))
    # The leading directions of an encoding with a little noise in every row.
    wide = rng.standard_normal((6, 3)) @ a + 1e-6 * rng.standard_normal((6, 20))
    main = leading(jnp.asarray(wide), 3)
    assert abs(measure(main, a) - 1) < 1e-9
    assert measure(wide, b) > measure(main, b) + 0.05


def test_comparing_encoders():
    """A rotated and scaled copy of the reference is told to be the same, a random one is not."""
    rng = np.random.default_rng(0)
    reference = jnp.asarray(rng.standard_normal((2, 12)), jnp.float32)
    rotation, _ = np.linalg.qr(rng.standard_normal((2, 2)))
    given = jnp.asarray(7 * rotation, jnp.float32) @ reference
    comparison = compare_encoders(given, reference, SMALL, sequences=512, key=jax.random.key(0))
    assert abs(comparison.overlaps["given"] - 1) < 1e-5
    assert abs(comparison.overlaps["random"] - 2 / 12) < 0.15
    gap, _ = comparison.mean_and_error("given", minus="reference")
    assert abs(gap) < 1e-4
    mean, error = comparison.mean_and_error("random")
    assert 0 < error < 0.1 * mean
    assert set(comparison.losses) == set(comparison.overlaps) == {"given", "reference", "copying", "random"}
    with pytest.raises(ValueError, match="shape"):
        compare_encoders(given[:1], reference, SMALL, key=jax.random.key(0))


def test_mistakes_are_named(small):
    with pytest.raises(ValueError, match="multiple of 2 columns"):
        Encoder(jnp.eye(3, dtype=jnp.float32), jnp.ones((), jnp.float32)).predictions(small)
    with pytest.raises(ValueError, match="between 1 and the 10 numbers"):
        copying(5, 11, k=2)


def kalman_losses(drawn):
    """Of whoever is told W and C, by sequence and time."""
    covariance = jnp.eye(15, dtype=jnp.float32) / 3  # uniform in [-1, 1]

    @jax.jit
    @jax.vmap
    def predictions(w, c, s):
        return System(w, c, PAPER.state_noise, PAPER.observation_noise).kalman_predictions(s[:-1], covariance)

    errors = predictions(drawn.transition, drawn.readout, drawn.observations) - drawn.observations[:, 1:]
    return 0.5 * np.sum(np.asarray(errors, np.float64) ** 2, -1)


def test_whoever_knows_the_system_predicts_best(paper):
    """The Kalman filter is below any regression, on average over time and in the end; and close to the noise."""
    known = kalman_losses(paper)
    encoder = Encoder(last(5, obs_dim=5, width=25), jnp.full((), 0.3, jnp.float32))
    learned = np.asarray(losses(encoder, paper.observations), np.float64)
    for times in (slice(None), slice(-10, None)):
        gain, error = interval((learned - known)[:, times].mean(1))
        assert gain > error
    least = 0.5 * (0.01**2 * np.sum(np.asarray(paper.readout) ** 2, (1, 2)) + 5 * 0.01**2)
    excess, error = interval(known[:, -10:].mean(1) - least)
    assert error < excess < 1e-2


def test_latent_states(capsys):
    """The example runs. Pairs that contain zeros cost accuracy late in a sequence; knowing the system is best."""
    module = load("latent_states")
    assert capsys.readouterr().out == "", "importing an example must not run it"
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        results = module.main(ks=(4,), sequences=64)
    late = {name: losses[:, -10:].mean() for name, losses in results.items()}
    assert late["k =  4, all pairs"] > late["k =  4, no padded pairs"] > late["Kalman filter"]
    assert "Kalman filter" in capsys.readouterr().out
