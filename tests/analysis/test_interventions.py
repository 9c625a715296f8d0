"""Interventions on models whose algorithm is known: each does what theory says, and nothing where nothing depends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.analysis.interventions import ablate, effects, patch, replace, solver_from
from mesascope.analysis.results import stack
from mesascope.tasks import Constructed, Dynamics, Examples
from mesascope.theory.constructions import copying_then_mesa, gradient_descent
from mesascope.theory.solvers import GradientDescent, autoregressive

N, T, ETAS = 3, 8, (0.1, 0.2)
TASK, TOKENS = Dynamics.linear(state_dim=N, length=T), Constructed(slots=4)
SIZE = dict(sequences=16, batch_size=16)
KEY = jax.random.key(2)
BUILT = gradient_descent(N, ETAS, dtype=jnp.float64)


# Always the same sequences, in float64: drawn once, or rounding would depend on how the drawing is compiled.
DATA = np.asarray(TASK.sample(jax.random.key(1), 16).observations, np.float64)


def sample(key, batch):
    return TOKENS(jnp.asarray(DATA[:batch]))


def second_layer(seen, examples):
    """What theory says of it: one more step, from the queries that the first layer left."""
    stream = seen["blocks.0.resid_post"]
    _, u, now, before = jnp.split(stream, 4, -1)
    scores = jnp.tril(u @ jnp.swapaxes(before, -1, -2))
    nothing = jnp.zeros_like(u)
    return ETAS[1] * jnp.concatenate([scores @ now, -scores @ before, nothing, nothing], -1)


NAMES = ("queries", "keys", "values")


def first_head(seen, examples):
    """Linear attention, with all pairs side by side."""
    q, k, v = (seen[f"blocks.1.mixer.{name}"][:, 0] for name in NAMES)
    return jnp.tril(q @ jnp.swapaxes(k, -1, -2)) @ v


@pytest.fixture(scope="module")
def found():
    cases = {
        "predict in layer 2": ablate("blocks.1.mixer.heads", head=0),
        "contract in layer 2": ablate("blocks.1.mixer.heads", head=-1),
        "layer 2": ablate("blocks.1.mixer.out"),
        "theory": replace("blocks.1.mixer.out", second_layer, reads=["blocks.0.resid_post"]),
        "wrong theory": replace(
            "blocks.1.mixer.out", lambda seen, e: -second_layer(seen, e), reads=["blocks.0.resid_post"]
        ),
        "theory of a head": replace(
            "blocks.1.mixer.heads", first_head, reads=[f"blocks.1.mixer.{n}" for n in NAMES], head=0
        ),
        "another's first layer": patch("blocks.0.mixer.out"),
        "another's head": patch("blocks.0.mixer.heads", head=0),
        "mean": ablate("blocks.1.mixer.out", to="mean"),
    }
    return effects(stack([BUILT.model]), sample, cases, key=KEY, **SIZE)


def test_effects_are_those_of_the_algorithm(found):
    """Without the last step, losses and predictions are those of one step of gradient descent."""
    at = {name: i for i, name in enumerate(found.names)}
    s = jnp.asarray(DATA)
    targets = DATA[:, 1:]
    _, one, two = np.asarray(jax.jit(lambda s: GradientDescent(ETAS).by_step(autoregressive(s)))(s))
    for name in ("predict in layer 2", "layer 2"):
        expected = 0.5 * np.mean(np.sum((one - targets) ** 2, -1), -1)
        np.testing.assert_allclose(found.edited[0, :, at[name]], expected, rtol=1e-10)
        # Nothing is predicted from the first token.
        far = np.sum((one - two) ** 2, (0, 2))[1:] / np.sum(two**2, (0, 2))[1:]
        np.testing.assert_allclose(found.distance.mean[at[name]], [np.nan, *far], rtol=1e-10)
    assert np.nanmax(found.distance.mean[at["contract in layer 2"]]) == 0


def test_theory_takes_a_layers_place(found):
    distance = dict(zip(found.names, np.nanmean(found.distance.mean, -1), strict=True))
    assert distance["theory"] < 1e-20
    assert distance["theory of a head"] < 1e-20
    for name in ("wrong theory", "another's first layer", "another's head", "mean"):
        assert distance[name] > 0.05
    difference = found.difference
    assert abs(difference.mean[found.names.index("theory")]) < 1e-12
    assert difference.low[found.names.index("another's first layer")] > 0
    assert not found.harmful[found.names.index("theory")]
    assert found.harmful[found.names.index("another's first layer")]
    assert found.plot() is not None


def padded(key, batch):
    """Observations after one token of zeros, as the model that copies reads them."""
    s = TASK.sample(key, batch).observations
    tokens = jnp.pad(s[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return Examples(tokens, jnp.pad(s[:, 1:], ((0, 0), (1, 0), (0, 0))), jnp.arange(T + 1) > 0)


def test_solver_goes_on_from_where_pairs_are_bound():
    """After the layer that copies, least squares predicts what the model does; before it, there are no pairs."""
    built = copying_then_mesa(N, 1, 10.0, sharpness=25.0, codes=8)
    found = solver_from(
        stack([built.model]), padded, ["embedded", "blocks.0.resid_post"],
        lams=(1.0, 10.0, 100.0), sequences=64, batch_size=32, key=KEY,
    )  # fmt: skip
    before, after = np.nanmean(found.distance.mean, -1)
    assert found.unexplained[0, 0, 1] > 0.8
    assert found.unexplained[0, 1].max() < 1e-3
    assert before > 0.5
    # The distance is zero where the tool chose the model's own λ.
    assert after < 0.1
    assert np.nanmean(found.control.mean[1]) > 5 * after
    loss = found.swapped.mean((0, 1))
    assert loss[0] > 1.5 * loss[1]
    np.testing.assert_allclose(loss[1], found.solver.mean(), rtol=0.02)
    assert found.plot() is not None


def test_bad_input():
    model = stack([BUILT.model])

    def run(case):
        return effects(model, sample, {"case": case}, key=KEY, **SIZE)

    with pytest.raises(ValueError, match="has 2, counted from 0, got 2"):
        run(ablate("blocks.1.mixer.heads", head=2))
    with pytest.raises(ValueError, match="has 2, counted from 0, got -3"):
        run(patch("blocks.1.mixer.heads", head=-3))
    with pytest.raises(ValueError, match="has 0, counted from 0, got 0"):
        run(patch("blocks.1.mixer.out", head=0))
    with pytest.raises(ValueError, match="come after"):
        run(replace("blocks.0.mixer.out", lambda seen, e: seen, reads=["predictions"]))
    with pytest.raises(ValueError, match="has shape"):
        run(replace("blocks.0.mixer.out", lambda seen, e: seen["embedded"][0], reads=["embedded"]))
    with pytest.raises(ValueError, match="'zero' or 'mean'"):
        ablate("embedded", to="one")
    with pytest.raises(ValueError, match="at least one"):
        effects(model, sample, {}, key=KEY)
    with pytest.raises(ValueError, match="observation: expected s_t"):
        solver_from(model, sample, ["embedded"], key=KEY, **SIZE)
    where = dict(observation=lambda e: e.tokens[..., N : 2 * N])
    with pytest.raises(ValueError, match="need at least 24, got 16"):
        solver_from(model, sample, ["embedded"], key=KEY, **SIZE, **where)
