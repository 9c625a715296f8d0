"""Few-shot regression: a model that is least squares has its curve, and prompts that can be solved for are found."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.analysis.few_shot import (
    Curve,
    Vectors,
    control_curve,
    controls,
    early_ascent,
    gain,
    plot_curves,
    regression_curve,
    tune_eos,
    tune_prefix,
)
from mesascope.analysis.results import stack
from mesascope.tasks import FewShot
from mesascope.theory.constructions import key_shift
from mesascope.theory.solvers import NewtonSchulz

N, LAM = 4, 100.0
TASK = FewShot(dim=N, length=32)
SIZE = dict(sequences=96, batch_size=48)
KEY = jax.random.key(5)


def scale(model, tokens):
    """A model that is one number."""
    return model * tokens


@pytest.fixture(scope="module")
def curves():
    """A mesa-layer that binds every pair of consecutive tokens, and the controls."""
    model = stack([key_shift(N, LAM).model])
    found = {"model": regression_curve(model, TASK, key=KEY, **SIZE)}
    return found | controls(TASK, lam=LAM, key=KEY, **SIZE)


def test_planted_least_squares(curves):
    """The model that is autoregressive least squares has the control's errors, sequence by sequence."""
    model, control = curves["model"], curves["least squares"]
    assert model.losses.shape == (1, 96, 16)
    assert list(model.pair) == list(range(1, 17))
    np.testing.assert_allclose(model.losses, control.losses, rtol=1e-2, atol=1e-3)
    assert plot_curves(curves) is not None


def test_controls_against_numpy(curves):
    """Every sequence by itself, one solve per pair, from the tokens themselves."""
    regression = TASK.sample(jax.random.split(KEY, 2)[0], 48)
    for b in range(3):
        tokens = np.asarray(TASK.prompt(regression).tokens[b], np.float64)
        for i in (0, 1, 5, 15):
            t = 2 * i
            sides = {"least squares": slice(0, None), "least squares, true pairs": slice(0, None, 2)}
            for name, chosen in sides.items():
                k, v = tokens[:t][chosen], tokens[1 : t + 1][chosen]
                phi = np.linalg.solve(k.T @ k + np.eye(N) / LAM, k.T @ v).T
                error = 0.5 * np.sum((tokens[t + 1] - phi @ tokens[t]) ** 2)
                np.testing.assert_allclose(curves[name].losses[0, b, i], error, rtol=2e-2, atol=1e-3)


def test_early_ascent(curves):
    """Spurious pairs make errors rise first; without them, and for a model that always says zero, they do not."""
    found = early_ascent(curves["least squares"])
    assert found.present
    assert 2 <= found.pair <= 8
    assert early_ascent(curves["model"]).rise.low > 0
    assert not early_ascent(curves["least squares, true pairs"]).present
    nothing = regression_curve(jnp.zeros(2, jnp.float32), TASK, predict=scale, key=KEY, **SIZE)
    assert not early_ascent(nothing).present
    assert found.plot() is not None


def test_two_tasks_in_a_row():
    """A learner that forgets nothing is misled by the first task when the second begins."""
    both = FewShot(dim=N, length=48, switch=24)
    curve = control_curve(NewtonSchulz(LAM, steps=16), both, true_pairs_only=True, key=KEY, **SIZE)
    assert list(curve.task) == [0] * 12 + [1] * 12
    assert list(curve.pair) == [*range(1, 13)] * 2
    loss = curve.loss.mean
    assert loss[11] < 0.1 * loss[0]
    assert loss[12] > loss[0]
    assert loss[-1] < loss[12]
    assert curve.plot() is not None


def test_pairs_are_the_same_whatever_stands_between_them():
    """A model that repeats its input pays ½‖y - x‖², with EOS and prefix as without."""
    echo = jnp.ones(1, jnp.float32)
    plain = regression_curve(echo, TASK, predict=scale, key=KEY, **SIZE)
    dressed = FewShot(dim=N, length=32, eos=True, prefix=2)
    vectors = Vectors(jnp.zeros((1, N), jnp.float32), jnp.ones((1, 2, N), jnp.float32))
    shown = regression_curve(echo, dressed, predict=scale, vectors=vectors, key=KEY, **SIZE)
    np.testing.assert_allclose(shown.losses, plain.losses[..., : shown.losses.shape[-1]], rtol=1e-6)


OFFSETS = jnp.asarray(np.random.default_rng(1).standard_normal((2, N)), jnp.float32)


def test_planted_eos():
    """A model that predicts the previous token plus c: the best EOS is -c, for every model its own."""

    def predict(offset, tokens):
        return jnp.pad(tokens, ((0, 0), (1, 0), (0, 0)))[:, :-1] + offset

    task = FewShot(dim=N, length=32, eos=True)
    tuned = tune_eos(OFFSETS, task, predict=predict, steps=400, rate=3e-2, key=KEY)
    np.testing.assert_allclose(tuned.vectors.eos, -OFFSETS, atol=0.1)
    assert tuned.losses[:, -50:].mean() < tuned.losses[:, :5].mean()
    better = regression_curve(OFFSETS, task, predict=predict, vectors=tuned.vectors, key=KEY, **SIZE)
    worse = regression_curve(OFFSETS, task, predict=predict, vectors=Vectors(eos=OFFSETS), key=KEY, **SIZE)
    # Of one model: two say little about others.
    better, worse = (dataclasses.replace(c, losses=c.losses[:1]) for c in (better, worse))
    found = gain(worse, better)
    assert found.helps
    assert not gain(better, worse).helps
    assert not gain(better, better).helps
    np.testing.assert_allclose(found.total.mean, better.losses.mean() - worse.losses.mean())
    assert found.plot().get_xlabel() == "pair"
    assert tuned.plot() is not None


@pytest.mark.parametrize("eos", [False, True])
def test_planted_prefix(eos):
    """A model that predicts the first token plus c: one vector of the prefix is -c, and the others stay."""

    def predict(offset, tokens):
        return jnp.broadcast_to(tokens[:, :1] + offset, tokens.shape)

    task = FewShot(dim=N, length=32, eos=eos, prefix=3)
    given = jnp.zeros((2, N), jnp.float32) if eos else None
    how = dict(predict=predict, eos=given, rate=3e-2, key=KEY, batch_size=64)
    tuned = tune_prefix(OFFSETS, task, steps=400, **how)
    start = tune_prefix(OFFSETS, task, steps=1, **how)
    np.testing.assert_allclose(tuned.vectors.prefix[:, 0], -OFFSETS, atol=0.1)
    np.testing.assert_array_equal(tuned.vectors.prefix[:, 1:], start.vectors.prefix[:, 1:])
    assert tuned.vectors.eos is given


def test_bad_input():
    model = jnp.ones(2, jnp.float32)
    eos = FewShot(dim=N, length=12, eos=True)
    with pytest.raises(ValueError, match=r"vectors.eos: the prompts have one, got none"):
        regression_curve(model, eos, predict=scale, key=KEY)
    with pytest.raises(ValueError, match="tuned for 3 models, but there are 2"):
        regression_curve(model, eos, predict=scale, vectors=Vectors(eos=jnp.ones((3, N))), key=KEY)
    with pytest.raises(ValueError, match="predictions for every token"):
        regression_curve(model, TASK, predict=lambda m, tokens: m * tokens[:, :3], key=KEY)
    with pytest.raises(ValueError, match="with EOS and without a prefix"):
        tune_eos(model, TASK, predict=scale, key=KEY)
    with pytest.raises(ValueError, match="with a prefix"):
        tune_prefix(model, eos, predict=scale, key=KEY)
    curves = [Curve(losses=np.ones((k, 4, 5)), pair=np.arange(5), task=np.zeros(5, int)) for k in (2, 3)]
    with pytest.raises(ValueError, match="the same seeds"):
        gain(*curves)
    with pytest.raises(ValueError, match="at least 4 sequences"):
        early_ascent(Curve(losses=np.ones((1, 2, 5)), pair=np.arange(5), task=np.zeros(5, int)))
    with pytest.raises(ValueError, match="2 early pairs, got 4 and 1"):
        early_ascent(Curve(losses=np.ones((1, 4, 5)), pair=np.arange(5), task=np.arange(5)))
