"""Layers made linear: nothing is lost where they are linear already, and much where they are sharp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.analysis.intervals import single
from mesascope.analysis.linearize import (
    LinearLayer,
    Recorded,
    Site,
    attend,
    best_write,
    layer_sites,
    linearize,
    swap,
)
from mesascope.models import Block, Linear, ModelConfig, Positions, Softmax, Transformer
from mesascope.tasks import Constructed, Dynamics
from mesascope.theory.constructions import induction_head

OPTIMIZED = True

N, T = 2, 6
TASK, TOKENS = Dynamics.linear(state_dim=N, length=T), Constructed(slots=4)


def sample(key, batch):
    return TOKENS(TASK.sample(key, batch).observations)


def models(seeds=2, layers=2, mixer=None, std=0.3, **more):
    block = Block(mixer=mixer or Linear(), heads=1, key_dim=4)
    config = ModelConfig(token_dim=4 * N, output_dim=N, blocks=(block,) * layers, init_std=std, **more)
    return jax.vmap(lambda key: Transformer(config, key=key))(jax.random.split(jax.random.key(3), seeds))


@pytest.fixture(scope="module")
def linear():
    return linearize(
        Transformer.trace, models(), layer_sites(models()), sample,
        heads=1, key_dim=4, steps=600, batch_size=32, test_sequences=64, key=jax.random.key(0),
    )  # fmt: skip


def test_a_linear_layer_costs_nothing(linear):
    """Ratio 1.00, from a random start and with no rate given."""
    np.testing.assert_allclose(linear.ratio.mean, 1, atol=0.005)
    assert linear.residual.shape == linear.rate.shape == (2, 2)
    assert linear.loss.shape == (2, 64)
    assert linear.swapped.shape == (2, 64, 2)
    assert np.max(linear.residual) < 1e-2
    assert linear.plot() is not None


def test_the_products_are_found(linear):
    """The distilled layer is the layer: not its matrices, but what it computes on other inputs."""
    teacher = models()
    x = 0.5 * jax.random.normal(jax.random.key(9), (5, T, 4 * N), jnp.float32)
    for i, layer in enumerate(teacher.layers):
        mine = jax.tree.map(lambda a, i=i: a[0, i], linear.layers)
        true = LinearLayer(layer.queries[0], layer.keys[0], layer.values[0], layer.output[0])
        if i:  # The first layer reads tokens that repeat themselves, so that others of its products would do as well.
            wanted, found = (attend(a, 1, Recorded(x, x, x)) for a in (true, mine))
            assert jnp.sum((found - wanted) ** 2) < 0.05 * jnp.sum(wanted**2)


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
        expected = teacher(tokens)
        for site, layer in zip(layer_sites(teacher), teacher.layers, strict=True):
            same = LinearLayer(layer.queries, layer.keys, layer.values, layer.output)
            found, _ = teacher.trace(tokens, edit=swap(site, teacher, same, 1))
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_sharp_layer_is_reported():
    """Matching by content: no linear attention does it, and the closed form says that no tuning would help."""
    built = induction_head(N, 20.0, sharpness=30.0, codes=8)
    task = Dynamics.linear(state_dim=N, length=10)

    def prompts(key, batch):
        observations = task.sample(key, batch).observations
        return TOKENS(observations)._replace(
            tokens=built.tokens(observations[:, :-1])[:, 1:], targets=observations[:, 1:]
        )

    found = linearize(
        Transformer.trace, single(built.model), layer_sites(built.model)[1:], prompts,
        heads=1, key_dim=8, steps=400, batch_size=32, test_sequences=64, key=jax.random.key(0),
    )  # fmt: skip
    assert found.ratio.low[0] > 1.1
    assert found.least[0, 0] > 0.1
    assert found.residual[0, 0] > 0.1


def test_bad_input():
    kinds = dict(sample=sample, steps=20, batch_size=4, test_sequences=4, key=jax.random.key(0))
    with pytest.raises(KeyError, match=r"blocks.1.mixer.out.*nearest are: .*blocks.0.mixer.out"):
        linearize(
            Transformer.trace,
            models(layers=1),
            [Site(input="embedded", output="blocks.1.mixer.out")],
            **kinds,
        )
    uneven = {"a": jnp.ones((2, 1)), "b": jnp.ones((3, 1))}
    with pytest.raises(ValueError, match="same seed axis"):
        linearize(Transformer.trace, uneven, [Site(input="", output="")], **kinds)
    with pytest.raises(ValueError, match="sites"):
        linearize(Transformer.trace, models(2, 1), [], **kinds)
    with pytest.raises(ValueError, match="key_inputs"):
        layer_sites(models(layers=1, mixer=Softmax(), positions=Positions(at="keys", dim=4)))
