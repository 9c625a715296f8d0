"""Layers made linear: nothing is lost where they are linear already, and much where they are sharp."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.analysis import linearize as linearize_module
from mesascope.analysis.linearize import (
    FURTHER,
    LOWER,
    RATES,
    LinearLayer,
    Recorded,
    Site,
    attend,
    best_write,
    layer_sites,
    linearize,
    swap,
)
from mesascope.analysis.results import stack
from mesascope.models import Block, Linear, ModelConfig, Positions, Softmax, Transformer
from mesascope.tasks import Constructed, Examples
from mesascope.theory.constructions import copying_then_mesa, gradient_descent

N, T = 2, 8
TOKENS = Constructed(slots=4)


def rotations(key, batch, time=T):
    """Points on circles, each turning at its own speed: quick to draw and to compile."""
    speed, start, noise = jax.random.split(key, 3)
    angle = jax.random.uniform(speed, (batch, 1), jnp.float32, -3, 3) * jnp.arange(
        time + 1, dtype=jnp.float32
    )
    angle = angle + jax.random.uniform(start, (batch, 1), jnp.float32, -3, 3)
    points = jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)
    return points + 0.1 * jax.random.normal(noise, points.shape, jnp.float32)


def sample(key, batch):
    return TOKENS(rotations(key, batch))


def models(seeds=2, layers=2, mixer=None, std=0.3, **more):
    block = Block(mixer=mixer or Linear(), heads=1, key_dim=4)
    config = ModelConfig(token_dim=4 * N, output_dim=N, blocks=(block,) * layers, init_std=std, **more)
    return jax.vmap(lambda key: Transformer(config, key=key))(jax.random.split(jax.random.key(3), seeds))


def test_a_linear_layer_costs_nothing():
    """Ratio 1.00 for both layers of both models, from random starts; rates that lead nowhere are not chosen."""
    both = [gradient_descent(N, etas).model for etas in ((0.1, 0.1), (0.2, 0.15))]
    planted = jax.tree.map(lambda *a: jnp.stack(a), *both)
    found = linearize(
        planted, sample, layer_sites(planted),
        heads=4, key_dim=4, steps=500, batch_size=32, rates=(1e-7, *RATES, 100.0), test_sequences=64,
        key=jax.random.key(0),
    )  # fmt: skip
    np.testing.assert_allclose(found.ratio.mean, 1, atol=0.005)
    assert np.all(np.isin(found.rate, RATES))
    # Of one model: two say little about others.
    one = {name: getattr(found, name)[:1] for name in ("loss", "swapped", "removed")}
    assert dataclasses.replace(found, **one).linear.all()
    assert found.residual.shape == found.rate.shape == (2, 2)
    assert found.loss.shape == (2, 64)
    assert found.swapped.shape == (2, 64, 2)
    assert np.max(found.residual) < 1e-3
    assert np.max(found.least) < 1e-3
    assert found.plot() is not None


@pytest.mark.slow
def test_rates_beyond_those_given_are_tried_where_the_best_is_at_the_end():
    """Far too small ones: every step up is a better one, as long as there are any."""
    planted = stack([gradient_descent(N, (0.1,)).model])
    few = dict(heads=1, key_dim=4, steps=20, pilot=1.0, batch_size=16, test_sequences=16)
    found = linearize(planted, sample, layer_sites(planted), rates=(1e-6, 1e-5), **few, key=jax.random.key(0))
    assert found.rate.item() == pytest.approx(1e-5 * 10**FURTHER)
    alone = linearize(planted, sample, layer_sites(planted), rates=(1e-6,), **few, key=jax.random.key(0))
    assert alone.rate.item() == pytest.approx(1e-6)


def test_closed_form_is_exact():
    """With the queries and keys of a linear layer the best values and outputs are its own, up to rounding."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))  # noqa: E731
    teacher = LinearLayer(draw(7, 6), draw(7, 6), draw(5, 6), draw(6, 5))
    inputs, beside = draw(40, T, 5), draw(40, T, 2)
    recorded = Recorded(jnp.concatenate([inputs, beside], -1), inputs, inputs)
    recorded = recorded._replace(outputs=attend(teacher, 2, recorded))
    solved = best_write(teacher.queries, teacher.keys, recorded, heads=2, ridge=1e-13)
    np.testing.assert_allclose(attend(solved, 2, recorded), recorded.outputs, atol=1e-7)
    # By numpy: least squares on the same features, built with loops.
    q, k = (np.asarray(recorded.key_inputs @ w).reshape(40, T, 2, 3) for w in teacher[:2])
    features = np.zeros((40, T, 2, 5))
    for t in range(T):
        for i in range(t + 1):
            features[:, t] += np.einsum("bhd,bhd,bn->bhn", q[:, t], k[:, i], np.asarray(inputs[:, i]))
    noisy = recorded._replace(outputs=recorded.outputs + draw(40, T, 5))
    expected = np.linalg.lstsq(features.reshape(-1, 10), np.asarray(noisy.outputs).reshape(-1, 5))[0]
    found = best_write(teacher.queries, teacher.keys, noisy, heads=2, ridge=1e-13)
    np.testing.assert_allclose(found.output, expected, atol=1e-7)


def test_swapping_a_layer_for_itself_changes_nothing():
    """Masked inputs, normalized ones and positional codes reach the linear layer as they reach its model's."""
    for more in (dict(masked=2), dict(layer_norm=True), dict(positions=Positions(dim=6))):
        teacher = jax.tree.map(lambda a: a[0], models(1, **more))
        tokens = sample(jax.random.key(0), 3).tokens

        @jax.jit
        def both(teacher, tokens=tokens):
            swapped = []
            for site, layer in zip(layer_sites(teacher), teacher.layers, strict=True):
                same = LinearLayer(layer.queries, layer.keys, layer.values, layer.output)
                swapped.append(teacher.trace(tokens, edit=swap(site, teacher, same, 1))[0])
            return teacher(tokens), swapped

        expected, swapped = both(teacher)
        assert len(swapped) == 2
        for found in swapped:
            np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_a_layer_that_copies_is_reported():
    """Each token takes its predecessor: a map of full rank, which heads narrower than the sequence is long cannot have.
    The closed form says the same: it is not the tuning of values and outputs."""
    built = copying_then_mesa(N, 1, 100.0, sharpness=20.0, codes=8)

    def observations(key, batch):
        s = rotations(key, batch, 12)
        seen = built.tokens(s[:, :-1])
        return Examples(seen, jnp.pad(s[:, 1:], ((0, 0), (1, 0), (0, 0))), jnp.arange(seen.shape[1]) > 0)

    found = linearize(
        stack([built.model]), observations, layer_sites(built.model)[:1],
        heads=1, key_dim=2, steps=300, batch_size=32, test_sequences=64, key=jax.random.key(0),
    )  # fmt: skip
    assert found.ratio.low[0] > 2
    assert not found.linear[0]
    assert found.least[0, 0] > 0.1
    assert found.residual[0, 0] > 0.1


def test_bad_input():
    kinds = dict(sample=sample, steps=20, batch_size=4, test_sequences=4, key=jax.random.key(0))
    site = Site(input="embedded", output="blocks.0.mixer.out")
    with pytest.raises(ValueError, match="40 heads of outputs 8 wide"):
        linearize(models(layers=1), sites=[site], heads=40, **kinds)
    with pytest.raises(ValueError, match="sites"):
        linearize(models(2, 1), sites=[], **kinds)
    with pytest.raises(ValueError, match="key_inputs"):
        layer_sites(models(layers=1, mixer=Softmax(), positions=Positions(at="keys", dim=4)))


def test_a_rate_that_leads_astray_is_lowered():
    """Of the given rate and those below it, each layer gets the one that leads furthest; and no other is tried where
    a few steps with the given one were no better."""
    planted = models()
    record = linearize_module._recorder(planted, layer_sites(planted), Transformer.trace)
    key = jax.random.key(4)
    normal = jax.random.split(key, 4)
    shapes = [(4 * N, 4)] * 3 + [(4, 4 * N)]
    layers = LinearLayer(
        *(0.3 * jax.random.normal(k, (2, 2, *s), jnp.float32) for k, s in zip(normal, shapes, strict=True))
    )

    def draw(key):
        return record(sample(key, 8).tokens)

    def descend(rates):
        one = jax.tree.map(lambda a: a[None], layers)
        found, late = linearize_module._descend(one, rates[None], draw, 1, 30, key)
        return jax.tree.map(lambda a: a[0], found), late[0]

    given = np.full((2, 2), 1.0)
    rates = [given / 3**i for i in range(LOWER + 1)]
    tried = [descend(jnp.asarray(rate, jnp.float32)) for rate in rates]
    late = np.stack([losses for _, losses in tried])
    assert (late.argmin(0) > 0).any(), "the given rate is too high somewhere"

    surely = lambda reached: linearize_module._descend_surely(layers, given, reached, draw, 1, 30, key)  # noqa: E731
    best, used = surely(np.zeros((2, 2)))
    np.testing.assert_allclose(used, np.choose(late.argmin(0), rates))
    for at in np.ndindex(2, 2):
        expected = tried[late.argmin(0)[at]][0]
        np.testing.assert_array_equal(best.queries[at], expected.queries[at])
    assert (surely(np.full((2, 2), np.inf))[1] == given).all()
