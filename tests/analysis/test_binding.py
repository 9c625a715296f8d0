"""Attention maps and sensitivities, of a layer that copies by construction and of models that do not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.analysis.binding import attention_maps, sensitivity
from mesascope.analysis.results import stack
from mesascope.models import Block, Linear, ModelConfig, Positions, Transformer
from mesascope.theory.constructions import copying

N, T = 3, 9
COPY = copying(N, 2, 12.0, dtype=jnp.float64)
MAP, STREAM = "blocks.0.mixer.attention", "blocks.0.resid_post"


def sample(key, batch_size):
    return jax.random.normal(key, (batch_size, T, N), jnp.float64)


def copied(model, observations):
    """Without the zeros that come before the first observation."""
    seen = model.trace(COPY.tokens(observations))[1]
    return {MAP: seen[MAP][..., 1:, 1:], STREAM: seen[STREAM][..., 1:, :]}


def trace(model, tokens):
    return model.trace(tokens)[1]


CONFIG = ModelConfig(
    token_dim=N, output_dim=N, model_dim=6, blocks=(Block(heads=2, key_dim=3), Block(heads=2, key_dim=3)),
    positions=Positions(dim=6),
)  # fmt: skip


@partial(jax.jit, static_argnums=(1, 2))
def fresh(first: int, count: int, config: ModelConfig = CONFIG):
    seeds = first + jnp.arange(count)
    models = jax.vmap(lambda seed: Transformer(config, key=jax.random.key(seed)))(seeds)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), models)


def test_copying_layer_attends_to_the_previous_token():
    found = attention_maps(
        stack([COPY.model]), sample, activations=copied, sequences=64, batch_size=24, key=jax.random.key(0)
    )
    assert found.best.axes == ("seed", "path", "lag")
    # What goes astray falls as 2 exp(-sharpness); the first token has only the zeros before it to look at.
    assert np.all(found.best.mean[0, 1] > 1 - 3 * np.exp(-12))
    assert found.binds[0]
    assert not found.attends[0, 0]
    assert "blocks.0.mixer.attention: binds t and t-1" in found.verdict()
    assert found.maps.shape == (1, 1, COPY.model.config.blocks[0].heads, T, T)
    np.testing.assert_allclose(found.maps[0, 0, 0, np.arange(1, T), np.arange(T - 1)], 1, atol=1e-4)


def test_averages_are_those_of_all_sequences():
    drawn = []

    def recorded(key, batch_size):
        drawn.append(sample(key, batch_size))
        return drawn[-1]

    models = fresh(0, 3)
    paths = (MAP, "blocks.1.mixer.attention")
    found = attention_maps(models, recorded, paths=paths, sequences=50, batch_size=20, key=jax.random.key(1))
    everything = np.concatenate(drawn)
    run = jax.jit(lambda model, tokens: {path: model.trace(tokens)[1][path] for path in paths})
    for seed in range(3):
        model = jax.tree.map(lambda leaf, s=seed: leaf[s], models)
        seen = run(model, everything)
        for i, path in enumerate(paths):
            a = np.asarray(seen[path])
            np.testing.assert_allclose(found.maps[seed, i], a.mean(0), atol=1e-12)
            for lag in range(4):
                share = np.mean([a[:, :, t, t - lag] for t in range(lag, T)], (0, 1))
                np.testing.assert_allclose(found.shares[seed, i, :, lag], share, atol=1e-12)
    np.testing.assert_allclose(found.best.values, found.shares.max(2))
    np.testing.assert_allclose(found.uniform[1], np.mean([1 / (t + 1) for t in range(1, T)]))


def test_untrained_models_do_not_bind():
    bound = [
        attention_maps(fresh(3 * k, 3), sample, sequences=32, key=jax.random.key(k)).binds for k in range(100)
    ]
    assert np.mean(bound) <= 0.01


def test_linear_attention_counts_by_its_size():
    config = ModelConfig(token_dim=N, output_dim=N, blocks=(Block(mixer=Linear(), heads=2, key_dim=3),))
    models = fresh(0, 2, config)
    found = attention_maps(models, sample, lags=T, sequences=40, key=jax.random.key(0))
    assert np.all(found.shares >= 0)
    assert np.any(found.maps < 0)
    assert np.all(found.shares[..., 0] <= 1)


def test_sensitivity_is_the_derivative():
    """Central differences, in float64."""
    models = fresh(0, 2)
    times = (0, 3, -1)
    found = sensitivity(models, sample, times=times, sequences=4, batch_size=2, key=jax.random.key(0))
    assert found.times == (0, 3, T - 1)
    inputs = np.concatenate([sample(jax.random.fold_in(jax.random.key(0), i), 2) for i in range(2)])
    step = 1e-5
    units = step * np.eye(T * N).reshape(T * N, T, N)
    for seed in range(2):
        model = jax.tree.map(lambda leaf, s=seed: leaf[s], models)
        run = jax.jit(lambda x, m=model: m.trace(x)[1][STREAM])
        norms, by_entry = [], []
        for x in inputs:
            jacobian = (np.asarray(run(x + units)) - np.asarray(run(x - units))) / (2 * step)
            jacobian = jacobian.reshape(T, N, T, -1)[:, :, list(times)]
            norms.append(np.sqrt(np.sum(jacobian**2, (1, 3))).T)
            by_entry.append(np.sqrt(np.sum(jacobian**2, 1)).mean(-1).T)
        np.testing.assert_allclose(found.frobenius.values[seed], np.mean(norms, 0), rtol=1e-7, atol=1e-10)
        np.testing.assert_allclose(found.by_entry.values[seed], np.mean(by_entry, 0), rtol=1e-7, atol=1e-10)
    # Nothing depends on what comes later.
    assert not found.frobenius.values[:, 1, 4:].any()


def test_copying_layer_is_sensitive_to_two_tokens():
    found = sensitivity(
        stack([COPY.model]), sample, activations=copied, times=[1, 5], sequences=8, key=jax.random.key(0)
    )
    # s_t and s_{t-1} stand side by side: each has an identity as Jacobian.
    np.testing.assert_allclose(found.frobenius.mean[1, 4:6], np.sqrt(N), rtol=1e-3)
    np.testing.assert_allclose(found.shares.mean[1, 4:6], 0.5, atol=1e-3)
    assert found.binds
    untrained = sensitivity(fresh(0, 3), sample, times=[5], sequences=8, key=jax.random.key(0))
    assert not untrained.binds
    assert untrained.shares.mean[0, 5] > 0.9
    assert untrained.shares.mean[0, 4] < 0.05


@pytest.mark.parametrize(
    ("tool", "changes", "error", "message"),
    [
        (attention_maps, {"paths": [STREAM]}, ValueError, "expected attention"),
        (attention_maps, {"lags": 1}, ValueError, "at least 2"),
        (sensitivity, {"path": MAP}, ValueError, "expected shape"),
        (sensitivity, {"times": [T]}, ValueError, "9 positions"),
    ],
)
def test_bad_input(tool, changes, error, message):
    with pytest.raises(error, match=message):
        tool(fresh(0, 2), sample, key=jax.random.key(0), **changes)


def test_plots():
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    maps = attention_maps(fresh(0, 2), sample, sequences=8, key=jax.random.key(0))
    assert len(maps.plot().images) == 2
    with pytest.raises(KeyError, match="nearest"):
        maps.plot("blocks.0.mixer.attn")
    found = sensitivity(fresh(0, 2), sample, times=[1, 5], sequences=4, key=jax.random.key(0))
    assert [len(line.get_xdata()) for line in found.plot().lines] == [2, 6]
    plt.close("all")
