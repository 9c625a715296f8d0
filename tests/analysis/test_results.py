"""Means, intervals and messages that all tools share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mesascope.analysis.results import (
    Estimate,
    Running,
    batches,
    house_style,
    reader,
    stack,
    student_t,
    unstack,
)


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 8, 30])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_student_t(level, dof):
    np.testing.assert_allclose(student_t(level, dof), stats.t.ppf(0.5 + level / 2, dof), rtol=1e-5)


def test_running_is_the_mean_of_all_batches():
    rng = np.random.default_rng(0)
    samples = rng.standard_normal((3, 50, 2, 4))
    running = Running()
    for start, stop in ((0, 7), (7, 30), (30, 50)):
        running.add(samples[:, start:stop])
    estimate = running.estimate("target", "time")
    assert estimate.axes == ("seed", "target", "time")
    np.testing.assert_allclose(estimate.values, samples.mean(1), atol=1e-12)
    expected = stats.sem(samples.mean(0), axis=0)
    np.testing.assert_allclose(estimate.sequences_error, expected, rtol=1e-10)


def test_running_counts_what_is_kept():
    rng = np.random.default_rng(0)
    samples, keep = rng.standard_normal((2, 60, 3)), rng.uniform(size=(60, 3)) < 0.7
    running = Running()
    for part in (slice(0, 11), slice(11, 60)):
        running.add(samples[:, part], keep[part])
    estimate = running.estimate("time")
    for t in range(3):
        kept = samples[:, keep[:, t], t]
        np.testing.assert_allclose(estimate.values[:, t], kept.mean(1), atol=1e-12)
        np.testing.assert_allclose(estimate.sequences_error[t], stats.sem(kept.mean(0)), rtol=1e-10)


@pytest.mark.parametrize("seeds", [1, 5])
def test_intervals_cover_the_truth(seeds):
    """With effects of seeds and of sequences that all seeds share."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(1000):
        of_seed = rng.standard_normal((seeds, 1)) if seeds > 1 else np.zeros((1, 1))
        samples = of_seed + 3 * rng.standard_normal(40) + rng.standard_normal((seeds, 40))
        running = Running()
        running.add(samples)
        low, high = running.estimate().interval(0.95)
        covered += low <= 0 <= high
    # A binomial's three standard deviations below 95%.
    assert covered >= 950 - 21
    assert covered < 1000


def test_parts_of_an_estimate():
    values = np.arange(24.0).reshape(2, 3, 4)
    estimate = Estimate(values=values, sequences_error=values[0], axes=("seed", "layer", "time"))
    assert estimate[1].axes == ("seed", "time")
    np.testing.assert_array_equal(estimate[:, -1].values, values[:, :, -1])
    assert estimate[:, -1].axes == ("seed", "layer")
    with pytest.raises(TypeError, match="integers and slices"):
        estimate[[0, 1]]
    with pytest.raises(ValueError, match="axes"):
        Estimate(values=values, sequences_error=values[0], axes=("layer", "time", "seed"))


def test_batches_are_even():
    assert batches(10, 4) == [4, 3, 3]
    assert sum(batches(8192, 256)) == 8192
    with pytest.raises(ValueError, match="at least 2"):
        batches(1, 4)


def test_seeds_that_do_not_match():
    models = [{"w": jnp.ones((2, 2))}, {"w": jnp.zeros((2, 2))}]
    assert len(unstack(stack(models))) == 2
    with pytest.raises(ValueError, match="model 1 is built differently"):
        stack([models[0], {"w": jnp.ones((2, 3))}])
    with pytest.raises(ValueError, match="leading axes of 2, 3"):
        unstack({"a": jnp.ones(2), "b": jnp.ones((3, 2))})
    with pytest.raises(ValueError, match="seed axis"):
        unstack({"a": jnp.ones(())})


def test_unknown_paths_name_the_nearest():
    def activations(model, tokens):
        return {f"blocks.{i}.resid_post": tokens for i in range(3)} | {"embedded": tokens}

    read = reader(activations, ("blocks.1.resid_pots",))
    with pytest.raises(KeyError, match=r"nearest are: blocks\.1\.resid_post"):
        read({}, jnp.ones((1, 2, 3)))


def test_house_style_comes_with_the_package():
    mpl = pytest.importorskip("matplotlib")
    with house_style():
        assert mpl.rcParams["image.cmap"] == "cividis"
        colors = mpl.rcParams["axes.prop_cycle"].by_key()["color"]
    assert len(set(colors)) == 8
    assert mpl.rcParams["image.cmap"] != "cividis"


def test_reading_is_compiled_once():
    traced = []

    def activations(model, tokens):
        traced.append(1)
        return {"a": model["w"] * tokens}

    for w in range(3):
        reader(activations, ("a",))({"w": jnp.full((), float(w))}, jnp.ones((2, 3)))
    assert len(traced) == 1
    jax.clear_caches()
