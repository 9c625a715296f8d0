"""In-context scores and distances between predictions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.analysis.results import stack
from mesascope.analysis.scores import distance, in_context_score
from mesascope.models import Transformer
from mesascope.tasks import Dynamics, Examples
from mesascope.theory.constructions import proposition_2
from mesascope.theory.solvers import GradientStep, Ridge, autoregressive, chebyshev_coefficients

N, T, STEPS, LAM = 2, 10, 5, 1.0
TASK = Dynamics.linear(state_dim=N, length=T)
LOW, HIGH = 1 / LAM, 2 * T + 1 / LAM
ETA = 2 / (LOW + HIGH)
BUILT = proposition_2(
    N, STEPS, *chebyshev_coefficients(ETA * LOW, ETA * HIGH, STEPS), LAM, ETA, dtype=jnp.float64
)
draw = jax.jit(TASK.sample, static_argnums=1)


def observations(key, batch_size):
    return draw(key, batch_size).observations.astype(jnp.float64)


def examples(key, batch_size):
    s = observations(key, batch_size)
    return Examples(s[:, :-1], s[:, 1:], jnp.ones(T, bool))


def predict(model, s):
    return model(BUILT.tokens(s[:, :-1]))


def losses(model, batch):
    return 0.5 * jnp.sum((model(BUILT.tokens(batch.tokens)) - batch.targets) ** 2, -1)


def chance(batch):
    return 0.5 * jnp.sum(batch.targets**2, -1)


@partial(jax.jit, static_argnums=1)
def untrained(first: int, count: int):
    """Random weights in the place of Proposition 2's."""
    seeds = first + jnp.arange(count)
    models = jax.vmap(lambda seed: Transformer(BUILT.model.config, key=jax.random.key(seed)))(seeds)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), models)


SOLVERS = dict(
    algorithm=lambda s: Ridge(LAM)(autoregressive(s)), control=lambda s: GradientStep(0.1)(autoregressive(s))
)


def test_built_model_is_least_squares():
    found = distance(
        stack([BUILT.model]), observations, predict=predict, sequences=64, key=jax.random.key(0), **SOLVERS
    )
    assert np.isnan(found.model.mean[0])  # nothing to predict from yet
    assert found.equal[1:].all(), found.model.mean
    assert np.all(found.control.mean[2:] > 0.05)


def test_other_models_are_not_least_squares():
    found = distance(
        untrained(0, 3), observations, predict=predict, sequences=64, key=jax.random.key(0), **SOLVERS
    )
    assert not found.equal.any()
    # An algorithm that the control equals as well says nothing, however near the model is.
    same = SOLVERS | dict(control=SOLVERS["algorithm"])
    found = distance(
        stack([BUILT.model]), observations, predict=predict, sequences=64, key=jax.random.key(0), **same
    )
    assert not found.equal.any()


def test_distance_is_what_numpy_says():
    drawn = []

    def recorded(key, batch_size):
        drawn.append(observations(key, batch_size))
        return drawn[-1]

    found = distance(
        untrained(0, 2),
        recorded,
        predict=predict,
        sequences=30,
        batch_size=16,
        key=jax.random.key(0),
        **SOLVERS,
    )
    s = jnp.concatenate(drawn)
    assert len(s) == 30
    wanted, other = (np.asarray(jax.jit(SOLVERS[name])(s)) for name in ("algorithm", "control"))
    for seed in range(2):
        model = jax.tree.map(lambda leaf, i=seed: leaf[i], untrained(0, 2))
        f = np.asarray(jax.jit(predict)(model, s))
        expected = np.sum((f - wanted) ** 2, (0, 2))[1:] / np.sum(wanted**2, (0, 2))[1:]
        np.testing.assert_allclose(found.model.values[seed, 1:], expected, rtol=1e-10)
    expected = np.sum((other - wanted) ** 2, (0, 2))[1:] / np.sum(wanted**2, (0, 2))[1:]
    np.testing.assert_allclose(found.control.mean[1:], expected, rtol=1e-10)


def test_built_model_learns_in_context():
    found = in_context_score(
        stack([BUILT.model]), examples, losses=losses, chance=chance, sequences=128, key=jax.random.key(0)
    )
    assert found.learns
    assert found.early == slice(0, 1)
    np.testing.assert_allclose(found.score.mean, found.loss.mean[-1] - found.loss.mean[0])
    assert found.score.mean < -0.2


def test_language_models_need_only_losses():
    """Cross-entropy of a model that knows nothing but how often it has seen each of two words."""

    def words(key, batch_size):
        coin, flips = jax.random.split(key)
        p = jax.random.uniform(coin, (batch_size, 1), jnp.float64)
        return (jax.random.uniform(flips, (batch_size, 40), jnp.float64) < p).astype(jnp.float64)

    def cross_entropy(model, x):
        seen = jnp.cumsum(x, 1) - x
        p = (seen + model["prior"]) / (jnp.arange(40, dtype=jnp.float64) + 2 * model["prior"])
        return -jnp.where(x > 0, jnp.log(p), jnp.log(1 - p))

    models = stack([{"prior": jnp.full((), x, jnp.float64)} for x in (0.8, 1.0, 1.2)])
    found = in_context_score(
        models,
        words,
        losses=cross_entropy,
        chance=lambda x: jnp.full(x.shape, np.log(2)),
        early=slice(0, 5),
        late=slice(30, 40),
        sequences=512,
        key=jax.random.key(0),
    )
    assert found.learns
    np.testing.assert_allclose(found.loss.mean[0], np.log(2), rtol=1e-6)
    # Expected entropy of a coin with uniform bias is 1/2.
    assert 0.45 < found.loss.mean[-10:].mean() < 0.56


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": losses, "chance": chance, "early": slice(90, 99)}, "none of the 10 positions"),
        ({"losses": lambda m, batch: jnp.sum(batch.tokens), "chance": chance}, "losses: expected shape"),
        ({"losses": losses}, "chance: expected with `losses`"),
    ],
)
def test_bad_losses(changes, message):
    with pytest.raises(ValueError, match=message):
        in_context_score(untrained(0, 2), examples, key=jax.random.key(0), **changes)


@pytest.mark.parametrize("name", ["predict", "control"])
def test_bad_predictions(name):
    wrong = {"predict": lambda model, s: s, "control": lambda s: s}[name]
    arguments = SOLVERS | {"predict": predict} | {name: wrong}
    with pytest.raises(ValueError, match=f"{name}: expected predictions of shape"):
        distance(untrained(0, 2), observations, sequences=16, key=jax.random.key(0), **arguments)


def test_plots():
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    arguments = dict(sequences=16, key=jax.random.key(0))
    assert (
        in_context_score(untrained(0, 2), examples, losses=losses, chance=chance, **arguments)
        .plot()
        .get_xlabel()
        == "position"
    )
    found = distance(untrained(0, 2), observations, predict=predict, **SOLVERS, **arguments)
    assert found.plot().get_yscale() == "log"
    plt.close("all")
