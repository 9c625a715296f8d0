"""Confidence intervals against scipy and against how often they hold the truth."""

import numpy as np
import pytest
import scipy.stats

from mesascope.analysis.intervals import interval, ratio_interval, seeds_of, single, student


def test_student_quantiles():
    freedom = np.array([1.0, 2.0, 4.0, 7.5, 100.0])
    np.testing.assert_allclose(student(0.975, freedom), scipy.stats.t.ppf(0.975, freedom), rtol=1e-8)


def test_one_model_is_the_usual_interval():
    x = np.random.default_rng(0).standard_normal((1, 30))
    low, high = scipy.stats.t.interval(0.9, 29, x.mean(), scipy.stats.sem(x[0]))
    found = interval(x, level=0.9)
    np.testing.assert_allclose([found.low, found.high], [low, high], rtol=1e-9)


@pytest.mark.parametrize(("seed_std", "sequence_std"), [(1.0, 0.0), (0.0, 1.0), (0.3, 1.0)])
def test_coverage(seed_std, sequence_std):
    """About 95 of 100 intervals hold the mean, whether models or sequences differ more. (Binomial, ± 4 σ.)"""
    rng, trials = np.random.default_rng(1), 1000
    seeds = seed_std * rng.standard_normal((5, 1, trials))
    sequences = sequence_std * rng.standard_normal((1, 40, trials))
    found = interval(3 + seeds + sequences + rng.standard_normal((5, 40, trials)))
    held = np.mean((found.low <= 3) & (found.high >= 3))
    assert 0.95 - 4 * np.sqrt(0.95 * 0.05 / trials) <= held <= 0.99


def test_coverage_of_a_ratio():
    rng, trials = np.random.default_rng(2), 1000
    common = rng.uniform(0.5, 1.5, (5, 40, trials))
    found = ratio_interval(2 * common + 0.1 * rng.standard_normal(common.shape), common)
    held = np.mean((found.low <= 2) & (found.high >= 2))
    assert held > 0.95 - 4 * np.sqrt(0.95 * 0.05 / trials)
    assert np.mean(found.high - found.low) < 0.1, "paired: what both have in common cancels"


def test_bad_input():
    with pytest.raises(ValueError, match=r"lengths \[2, 3\]"):
        seeds_of({"a": np.zeros((2, 4)), "b": np.zeros((3, 4))})
    with pytest.raises(ValueError, match="seed and sequence"):
        interval(np.zeros(3))
    with pytest.raises(ValueError, match="level"):
        interval(np.zeros((2, 3)), level=1.5)
    assert seeds_of(single({"a": np.zeros(4)})) == 1
