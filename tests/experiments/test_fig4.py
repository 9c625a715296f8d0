"""Figure 4: how far predictions are from those of one gradient step."""

import dataclasses

import jax
import numpy as np
import pytest

from mesascope import released
from mesascope.experiments import results
from mesascope.experiments.fig4 import fitted
from mesascope.experiments.lab import SCALES, Lab
from tests.experiments.planted import verdicts


def published(**planted):
    """Figure 4's arrays, and these in place of some of them."""
    arrays, _ = results.read(released.directory() / "arrays" / "fig4")
    near = {"fitted_distance": np.full(5, 0.09**2), "fitted_distance_of_hybrid": np.full(5, 0.31**2)}
    near |= {"distance_to_gd": np.full(5, 0.09**2), "distance_of_hybrid": np.full(5, 0.81**2)}
    return {name: array.values for name, array in arrays.items()} | near | planted


@pytest.mark.parametrize(
    ("planted", "fails"),
    [
        ({}, set()),
        ({"fitted_distance": np.full(5, 0.11**2)}, {"fig4c-2"}),
        ({"fitted_distance_of_hybrid": np.full(5, 0.29**2)}, {"fig4c-2"}),
        ({"fitted_distance_of_hybrid": np.full(1, 0.29**2)}, {"fig4c-2"}),
        ({"distance_to_gd": np.full(5, 0.11**2)}, {"fig4c-2-tuned"}),
        ({"distance_of_hybrid": np.full(5, 0.5**2)}, {"fig4c-2-squared"}),
    ],
    ids=["near", "far", "control near", "one control", "far from the tuned step", "squares"],
)
def test_distance_claims(planted, fails):
    found = verdicts("fig4", published(**planted))
    assert {name for name, verdict in found.items() if "c-2" in name and verdict == "fails"} == fails


@pytest.mark.slow
def test_released_models_are_fitted_in_seconds(standard_promotion):
    """The gradient step nearest to linear-1's predictions is near them, and nearer than the control."""
    scale = dataclasses.replace(SCALES["released"], sequences=256)
    with jax.enable_x64(False):
        one, hybrid = fitted("linear-1")(Lab(scale)), fitted("hybrid-mesa", "_of_hybrid")(Lab(scale))
    assert one["fitted_distance"].values.shape == (1,)
    assert np.sqrt(one["fitted_distance"].values[0]) < 0.13
    assert abs(one["fitted_rate"].values[0] - 0.0322) < 0.001
    assert np.sqrt(hybrid["fitted_distance_of_hybrid"].values[0]) > 0.5
