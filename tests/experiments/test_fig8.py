"""Figure 8 and the same for the hybrid model: claims and panels on planted numbers."""

import dataclasses

import numpy as np
import pytest

from mesascope.analysis.few_shot import _curve
from mesascope.experiments import experiment, fig8
from mesascope.experiments.panels import Curves
from mesascope.tasks.few_shot import FewShot
from tests.experiments.planted import flips, planted

PAIR = np.arange(fig8.SHOWN)
FALLING = 1.7 * np.exp(-PAIR / 20) + 0.3
SECOND = np.concatenate([FALLING[: fig8.BOTH[0]], FALLING[: fig8.BOTH[1]]])
SCALES = {"base": 1.0, "eos": 0.8, "prefix": 0.7}
GOOD = {
    **{name: np.outer(np.full(5, scale), FALLING) for name, scale in SCALES.items()},
    **{f"two_{name}": np.outer(np.full(5, scale), SECOND) for name, scale in SCALES.items()},
    **{f"{name}_rise": np.tile([0.1, 0.2, 0.3], (5, 1)) for name in SCALES},
    **{f"{name}_rise": [0.1, 0.2, 0.3] for name in fig8.CONTROLS},
    "true_pairs_rise": [-0.3, -0.2, -0.1],
    **dict.fromkeys(fig8.CONTROLS, FALLING),
    **{f"two_{name}": SECOND for name in fig8.CONTROLS},
}
FLAT = np.tile([-0.1, 0.1, 0.3], (5, 1))


@pytest.mark.parametrize("figure", ["fig8", "si-icl-mesa"])
def test_claims(figure):
    ids = [claim.id for claim in experiment(figure).claims(planted(figure, GOOD))]
    falls, rises, rises_as_run, eos, prefix, second, *_ = ids
    flips(figure, GOOD, {})
    flips(figure, GOOD, {"base": GOOD["base"] + 3}, falls)
    flips(figure, GOOD, {"base_rise": FLAT}, rises, rises_as_run)
    flips(figure, GOOD, {"least_squares_rise": FLAT[0]}, rises)
    flips(figure, GOOD, {"true_pairs_rise": [0.1, 0.2, 0.3]}, rises, rises_as_run)
    flips(figure, GOOD, {"eos": GOOD["eos"] * 1.2}, eos)
    flips(figure, GOOD, {"prefix": GOOD["prefix"] * 1.2}, prefix)
    flips(figure, GOOD, {"two_base": GOOD["two_base"] + 3}, second)
    assert {"fig8": "fig8b-1", "si-icl-mesa": "si-icl-mesa-5"}[figure] == second


def test_panels():
    one, two = experiment("fig8").panels(planted("fig8", GOOD))
    assert isinstance(one, Curves)
    assert isinstance(two, Curves)
    assert [len(line.x) for line in one.lines] == [fig8.SHOWN] * 6
    assert [len(line.x) for line in two.lines] == [sum(fig8.BOTH)] * 6


@pytest.mark.parametrize("prompt", fig8.PROMPTS)
def test_prompts_have_room_for_what_is_shown(prompt):
    for task, shown in (
        (fig8.tasks()[prompt], fig8.SHOWN),
        (fig8.tasks(switch=fig8.SWITCH)[prompt], sum(fig8.BOTH)),
    ):
        layout = task.layout
        curve = _curve(task, np.zeros((2, 3, int(layout.predicts.sum()))))
        assert fig8._by_pair(curve).shape == (2, shown)


def test_rise_is_measured_on_other_sequences_than_the_peak():
    """Two models: one whose error is highest at pair 3, and one whose error falls."""
    rng = np.random.default_rng(0)
    mean = np.array([[1.0, 1.2, 1.5, 1.1, 0.8], [1.0, 0.8, 0.6, 0.5, 0.4]])
    noise = 0.1 * rng.standard_normal((2, 400, 5))
    noise -= noise.mean(1, keepdims=True)
    task = dataclasses.replace(FewShot.preset(), length=10)
    low, middle, high = fig8._rise(_curve(task, mean[:, None] + noise)).T
    np.testing.assert_allclose(middle, [0.5, -0.2], atol=0.05)
    # 1.96 standard errors of a difference of two numbers with deviation 0.1, from 200 sequences.
    np.testing.assert_allclose(high - low, 2 * 1.96 * 0.1 * np.sqrt(2 / 200), rtol=0.15)
