"""Means, intervals and messages that all tools share."""

import dataclasses
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mesascope.analysis.binding import attention_maps, sensitivity
from mesascope.analysis.few_shot import regression_curve, tune_eos, tune_prefix
from mesascope.analysis.interventions import ablate, effects, replace, solver_from
from mesascope.analysis.linearize import Site, linearize
from mesascope.analysis.probes import Batch, probe
from mesascope.analysis.results import (
    Estimate,
    Result,
    Running,
    batches,
    house_style,
    join,
    reader,
    stack,
    student_t,
    unstack,
)
from mesascope.analysis.scores import distance, in_context_score
from mesascope.tasks import Examples, FewShot


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


@pytest.mark.parametrize(("seed_std", "sequence_std"), [(1.0, 0.0), (0.0, 1.0), (0.3, 1.0)])
def test_intervals_cover_the_truth(seed_std, sequence_std):
    """About 95 of 100, whether models or the sequences that they share differ more. (Binomial, 4 σ.)"""
    rng, trials = np.random.default_rng(1), 1000
    seeds = seed_std * rng.standard_normal((5, 1, trials))
    sequences = sequence_std * rng.standard_normal((1, 40, trials))
    found = Estimate.of(3 + seeds + sequences + rng.standard_normal((5, 40, trials)), "trial")
    held = np.mean((found.low <= 3) & (found.high >= 3))
    assert 0.95 - 4 * np.sqrt(0.95 * 0.05 / trials) <= held <= 0.995
    for wrong in (found.above(3), found.below(3)):
        assert np.mean(wrong) <= 0.01 + 4 * np.sqrt(0.01 * 0.99 / trials)


def test_one_model_has_the_usual_interval():
    x = np.random.default_rng(0).standard_normal((1, 30))
    expected = stats.t.interval(0.9, 29, x.mean(), stats.sem(x[0]))
    np.testing.assert_allclose(Estimate.of(x).interval(0.9), expected, rtol=1e-5)
    # A mean that is large beside its spread.
    np.testing.assert_allclose(Estimate.of(x + 1e6).sequences_error, stats.sem(x[0]), rtol=1e-5)


def test_ratios_cover_the_truth():
    rng, trials = np.random.default_rng(2), 1000
    common = rng.uniform(0.5, 1.5, (5, 40, trials))
    found = Estimate.ratio(2 * common + 0.1 * rng.standard_normal(common.shape), common, "trial")
    held = np.mean((found.low <= 2) & (found.high >= 2))
    assert held > 0.95 - 4 * np.sqrt(0.95 * 0.05 / trials)
    assert np.mean(found.high - found.low) < 0.1, "paired: what both have in common cancels"
    np.testing.assert_allclose(Estimate.ratio(3 * common, common, "trial").values, 3)


def test_parts_of_an_estimate():
    values = np.arange(24.0).reshape(2, 3, 4)
    estimate = Estimate(values=values, sequences_error=values[0], sequences=9, axes=("seed", "layer", "time"))
    assert estimate[1].axes == ("seed", "time")
    np.testing.assert_array_equal(estimate[:, -1].values, values[:, :, -1])
    assert estimate[:, -1].axes == ("seed", "layer")
    with pytest.raises(TypeError, match="integers and slices"):
        estimate[[0, 1]]
    with pytest.raises(ValueError, match="axes"):
        Estimate(values=values, sequences_error=values[0], sequences=9, axes=("layer", "time", "seed"))
    with pytest.raises(ValueError, match="seed and sequence"):
        Estimate.of(np.zeros(3))
    with pytest.raises(ValueError, match="level"):
        estimate.interval(1.5)
    # Weights depend on no sequences; one model has no interval then.
    weights = Estimate.over_seeds(np.ones((1, 2)), "entry")
    np.testing.assert_array_equal(weights.interval(), np.ones((2, 2)))
    joined = join([estimate[0], estimate[2]], "layer")
    np.testing.assert_array_equal(joined.values, values[:, ::2])
    assert joined.axes == estimate.axes


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


def trace(model, tokens, edit=None):
    return tokens, {f"blocks.{i}.resid_post": tokens for i in range(3)} | {"embedded": tokens}


def activations(model, tokens):
    return trace(model, tokens)[1]


def tokens(key, batch_size):
    return jnp.ones((batch_size, 5, 2), jnp.float64)


def examples(key, batch_size):
    return Examples(tokens(key, batch_size), tokens(key, batch_size), jnp.ones(5, bool))


def targets(key, batch_size):
    return Batch(tokens(key, batch_size), {"itself": tokens(key, batch_size)})


PROMPTS = FewShot(dim=2, length=12)
# What each tool is asked, of models and of a path.
TOOLS = {
    "probe": lambda m, path, **a: probe(m, targets, untrained=m, activations=activations, paths=[path], **a),
    "attention_maps": lambda m, path, **a: attention_maps(
        m, tokens, activations=activations, paths=[path], **a
    ),
    "sensitivity": lambda m, path, **a: sensitivity(m, tokens, activations=activations, path=path, **a),
    "linearize": lambda m, path, **a: linearize(
        m, examples, [Site(input="embedded", output=path)], trace=trace, **a
    ),
    "effects": lambda m, path, **a: effects(m, examples, {"none": ablate(path)}, trace=trace, **a),
    "replace": lambda m, path, **a: effects(
        m,
        examples,
        {"theory": replace("embedded", lambda seen, e: seen[path], reads=[path])},
        trace=trace,
        **a,
    ),
    "solver_from": lambda m, path, **a: solver_from(m, examples, [path], trace=trace, **a),
}
OTHERS = {
    "in_context_score": lambda m, **a: in_context_score(m, examples, **a),
    "distance": lambda m, **a: distance(
        m, tokens, predict=lambda m, x: x, algorithm=lambda x: x, control=lambda x: -x, **a
    ),
    "regression_curve": lambda m, **a: regression_curve(m, PROMPTS, predict=lambda m, x: x, **a),
    "tune_eos": lambda m, **a: tune_eos(m, FewShot(dim=2, length=12, eos=True), predict=lambda m, x: x, **a),
    "tune_prefix": lambda m, **a: tune_prefix(
        m, FewShot(dim=2, length=12, prefix=2), predict=lambda m, x: x, **a
    ),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_unknown_paths_name_the_nearest(tool):
    models = {"w": jnp.ones((2, 3), jnp.float64)}
    with pytest.raises(KeyError, match=r"no 'blocks\.1\.resid_pots'.*nearest are: .*blocks\.1\.resid_post"):
        TOOLS[tool](models, "blocks.1.resid_pots", key=jax.random.key(0))


@pytest.mark.parametrize("tool", [*TOOLS, *OTHERS])
def test_every_tool_asks_for_one_seed_axis(tool):
    uneven = {"a": jnp.ones((2, 1)), "b": jnp.ones((3, 1))}
    run = OTHERS.get(tool) or (lambda models, **a: TOOLS[tool](models, "embedded", **a))
    with pytest.raises(ValueError, match=r"one seed axis.*leading axes of 2, 3"):
        run(uneven, key=jax.random.key(0))


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


def test_all_results_are_alike():
    """Frozen, nothing but names, arrays with named axes and parts of the same kind, and a plot that needs nothing."""
    importlib.import_module("mesascope.analysis.circuits")
    found = Result.__subclasses__()
    assert len(found) == 16
    for kind in found:
        assert kind.__dataclass_params__.frozen, kind
        for field in dataclasses.fields(kind):
            if "ndarray" in str(field.type) and "Mapping" not in str(field.type):
                assert field.type.dim_str.split(), f"{kind.__name__}.{field.name} has no names of axes"
        parameters = inspect.signature(kind.plot).parameters
        assert parameters["ax"].kind is inspect.Parameter.KEYWORD_ONLY, kind
        for parameter in list(parameters.values())[1:]:
            optional = parameter.kind is inspect.Parameter.VAR_KEYWORD
            assert optional or parameter.default is not inspect.Parameter.empty, (kind, parameter)
