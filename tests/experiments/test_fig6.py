"""Figure 6 and its versions for other tasks: claims and panels on planted numbers."""

import numpy as np
import pytest

from mesascope.experiments import experiment
from mesascope.experiments.common import CONTROLS
from tests.experiments.planted import flips, planted

TIME = np.arange(1, 51)
SPREAD = np.linspace(0.999, 1.001, 5)
PROBES = {
    "next": np.multiply.outer(SPREAD, np.outer(np.geomspace(1, 0.01, 8), np.ones(50))),
    "preconditioned": np.multiply.outer(SPREAD, np.outer(np.linspace(1, 0.3, 8), np.ones(50))),
    "exact": np.multiply.outer(SPREAD, np.outer(np.linspace(1, 0.3, 8), np.ones(50))),
    "next_untrained": np.ones((8, 50)),
    "preconditioned_untrained": np.ones((8, 50)),
}


def curves(layers):
    of = {}
    for n in layers:
        curve = 1.7 * np.exp(-TIME * n / 40) + 0.01
        of[f"softmax-{n}"] = np.outer(SPREAD, curve)
        of |= {f"proposition_2_{n}_{form}": curve for form in CONTROLS}
    return of


GOOD = PROBES | curves((3, 7, 12))
TASKS = {"si-partial": "si-partial", "si-nonlinear": "si-nonlin"}


def late(curve, factor):
    """Wrong at one context length only, which hardly changes the mean."""
    return np.where(TIME == 30, factor, 1) * curve


@pytest.mark.parametrize("n", [3, 7, 12])
def test_claims(n):
    claim = "fig6c-12" if n == 12 else "fig6c-1"
    flips("fig6", GOOD, {})
    best = GOOD[f"proposition_2_{n}_best"]
    flips("fig6", GOOD, {f"proposition_2_{n}_best": 0.88 * best}, claim)
    flips("fig6", GOOD, {f"proposition_2_{n}_best": late(best, 0.7)}, claim)
    flips("fig6", GOOD, {f"proposition_2_{n}_released": 0.88 * best}, f"{claim}-as-run")
    flips("fig6", GOOD, {f"proposition_2_{n}_all_pairs": 0.88 * best}, f"{claim}-as-run-all-pairs")


def test_claims_about_probes():
    flat = np.ones((5, 8, 50))
    flips("fig6", GOOD, {"next": flat}, "fig6a-1")
    flips("fig6", GOOD, {"preconditioned": flat}, "fig6b-1")
    flips("fig6", GOOD, {"exact": flat}, "fig6b-1-exact")


@pytest.mark.parametrize(("figure", "prefix"), TASKS.items())
def test_other_tasks(figure, prefix):
    good = PROBES | curves((7,))
    best = good["proposition_2_7_best"]
    flips(figure, good, {})
    flips(figure, good, {"next": np.ones((5, 8, 50))}, f"{prefix}-1")
    flips(figure, good, {"preconditioned": np.ones((5, 8, 50))}, f"{prefix}-2")
    flips(figure, good, {"proposition_2_7_best": 0.88 * best})
    flips(figure, good, {"proposition_2_7_best": 0.7 * best}, f"{prefix}-3")
    flips(figure, good, {"proposition_2_7_released": late(best, 0.7)}, f"{prefix}-3-as-run")


def test_panels():
    panels = experiment("fig6").panels(planted("fig6", GOOD))
    assert [panel.letter for panel in panels] == ["A", "B", "C"]
    assert [len(panel.lines) for panel in panels] == [9, 10, 12]
    for figure in TASKS:
        *_, c = experiment(figure).panels(planted(figure, PROBES | curves((7,))))
        assert [line.kind for line in c.lines] == ["softmax", "theory", "control", "features"]
