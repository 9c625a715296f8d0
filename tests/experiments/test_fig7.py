"""Figure 7: claims and panels on planted numbers."""

import numpy as np
import pytest

from mesascope.experiments import experiment
from mesascope.experiments.common import CONTROLS as FORMS
from mesascope.experiments.panels import Curves
from tests.experiments.planted import flips, planted

TIME = np.arange(1, 51)
CURVE = 1.7 * np.exp(-TIME / 6) + 0.01
MODELS = {
    "full_softmax-3": 1.4, "full_softmax-7": 1.1, "full_softmax-12": 1.02, "full_hybrid-mesa": 1.0,
    "partial_softmax-7": 1.1, "partial_hybrid-mesa": 1.0, "nonlinear_softmax-7": 1.1, "nonlinear_hybrid-mesa": 1.0,
}  # fmt: skip
CONTROLS = {
    "full_proposition_2": 1.05, "full_least_squares": 0.9, "partial_raw": 10.0, "partial_stacked": 1.2,
    "nonlinear_raw": 2.5, "nonlinear_features": 1.0,
}  # fmt: skip
GOOD = {
    **{name: np.outer(scale * np.linspace(0.999, 1.001, 5), CURVE) for name, scale in MODELS.items()},
    **{f"{name}_{form}": scale * CURVE for name, scale in CONTROLS.items() for form in FORMS},
}


@pytest.mark.parametrize(
    ("name", "factor", "ids"),
    [
        ("full_hybrid-mesa", 1.3, ("fig7a-1", "fig7a-2")),
        ("full_softmax-3", 0.5, ("fig7a-2",)),
        ("full_softmax-12", 1.2, ("fig7a-2",)),
        ("full_proposition_2_best", 0.8, ("fig7a-3",)),
        ("full_proposition_2_released", 0.8, ("fig7a-3-as-run",)),
        ("full_proposition_2_all_pairs", 0.8, ("fig7a-3-as-run-all-pairs",)),
        ("partial_raw_best", 0.5, ("fig7b-1",)),
        ("partial_stacked_best", 0.7, ("fig7b-2",)),
        ("partial_stacked_released", 1.2, ("fig7b-2-hybrid-as-run",)),
        ("nonlinear_features_best", 2.0, ("fig7c-1",)),
        ("nonlinear_raw_released", 0.5, ("fig7c-1-as-run",)),
        ("nonlinear_hybrid-mesa", 1.5, ("fig7c-1", "fig7c-1-as-run", "fig7c-1-as-run-all-pairs")),
    ],
)
def test_claims(name, factor, ids):
    flips("fig7", GOOD, {})
    flips("fig7", GOOD, {name: factor * GOOD[name]}, *ids)


def test_late_losses_count():
    late = GOOD["full_hybrid-mesa"].copy()
    late[:, -1] *= 2
    flips("fig7", GOOD, {"full_hybrid-mesa": late}, "fig7a-1")
    late = GOOD["partial_hybrid-mesa"].copy()
    late[:, -1] *= 2
    flips("fig7", GOOD, {"partial_hybrid-mesa": late}, "fig7b-1")


def test_panels_show_the_control_with_and_without_the_newest_pair():
    for panel in experiment("fig7").panels(planted("fig7", GOOD)):
        assert isinstance(panel, Curves)
        labels = [line.label for line in panel.lines]
        assert sum("newest pair left out" in label for label in labels) == 1
        assert sum("all pairs" in label for label in labels) == 1
        assert all(len(line.x) == 50 for line in panel.lines)
