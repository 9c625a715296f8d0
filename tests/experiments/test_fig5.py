"""Figure 5, its sweep over noise and the distilled layer: claims and panels on planted numbers."""

import numpy as np
import pytest

from mesascope.analysis.circuits import Products
from mesascope.experiments import experiment, fig5
from mesascope.experiments.panels import Curves, Maps
from tests.experiments.planted import flips, planted

SEEDS = 5
RATIOS = {n: np.tile([3.0, *[1.1 + 0.5 / n] * 6], (SEEDS, 1)) for n in fig5.DIMENSIONS}
SCALING = {
    "ridge": [0.025, 0.023, 0.022, 0.0215, 0.0214, 0.0214],
    "ridge_dropped": [0.032, 0.028, 0.025, 0.023, 0.022, 0.022],
    "kernel": [0.077, 0.078, 0.081, 0.09, 0.1, 0.113],
    "zero": [0.17] * 6,
}
FIG5 = {**{f"ratio_{n}": ratio for n, ratio in RATIOS.items()}, **SCALING}
NOISE = {f"{name}_{noise:g}": values for noise in fig5.NOISES for name, values in SCALING.items()}


def changed(array, index, value):
    array = np.array(array, float)
    array[index] = value
    return array


@pytest.mark.parametrize(
    ("bad", "ids"),
    [
        ({}, ()),
        ({"ratio_60": changed(RATIOS[60], (slice(2), 3), 1.3)}, ("fig5a-1",)),
        ({"ratio_60": changed(RATIOS[60], (0, 3), 1.3)}, ()),
        ({"ratio_4": changed(RATIOS[4], (slice(None), slice(1, None)), 1.0)}, ("fig5a-2",)),
        ({"ratio_10": changed(RATIOS[10], (slice(None), 0), 1.4)}, ("fig5a-3",)),
        ({"ridge": changed(SCALING["ridge"], -1, 0.026)}, ("fig5b-1",)),
        ({"ridge_dropped": changed(SCALING["ridge_dropped"], -1, 0.033)}, ("fig5b-1-as-run",)),
        ({"kernel": changed(SCALING["kernel"], -1, 0.09)}, ("fig5b-2", "fig5b-2-as-run")),
        ({"ridge": changed(SCALING["ridge"], 2, 0.09)}, ("fig5b-2",)),
    ],
    ids=["good", "two seeds", "one seed", "trend", "first layer", "ridge", "dropped", "kernel", "above"],
)
def test_claims(bad, ids):
    flips("fig5", FIG5, bad, *ids)


def test_noise_claims_name_the_level():
    flips("si-noise", NOISE, {})
    worse = {"ridge_0.1": changed(SCALING["ridge"], -1, 0.03)}
    flips("si-noise", NOISE, worse, "si-noise-1", "si-noise-1c", "si-noise-1-relative")
    # Larger because the states are: not a larger share of them.
    larger = worse | {"zero_0.1": changed(SCALING["zero"], -1, 0.3)}
    flips("si-noise", NOISE, larger, "si-noise-1", "si-noise-1c")


def test_panels():
    replaced, scaling = experiment("fig5").panels(planted("fig5", FIG5))
    assert isinstance(replaced, Curves)
    assert [line.label for line in replaced.lines] == [f"layer {i}" for i in range(1, 8)]
    np.testing.assert_allclose(replaced.lines[0].y, 3.0)
    assert isinstance(scaling, Curves)
    assert len(scaling.lines) == 3
    assert len(experiment("si-noise").panels(planted("si-noise", NOISE))) == len(fig5.NOISES)


def test_what_there_is_can_be_published():
    """Panel A of the dimensions that there are; its claims speak of all."""
    some = {name: FIG5[name] for name in ("ratio_4", "ratio_6", *SCALING)}
    replaced, scaling = experiment("fig5").panels(planted("fig5", some))
    assert isinstance(replaced, Curves)
    assert isinstance(scaling, Curves)
    assert [list(line.x) for line in replaced.lines] == [[4, 6]] * 7
    of_b = ["fig5b-1", "fig5b-1-as-run", "fig5b-2", "fig5b-2-as-run"]
    assert [claim.id for claim in experiment("fig5").claims(planted("fig5", some))] == of_b
    only = {"ratio_4": FIG5["ratio_4"]}
    assert [panel.letter for panel in experiment("fig5").panels(planted("fig5", only))] == ["A"]
    assert experiment("fig5").claims(planted("fig5", only)) == []


def test_distilled_weights():
    good = {"cosine": np.full((SEEDS, 2, 2), 0.95), "left": np.full((SEEDS, 2), 0.3)}
    good["cosine_reached"] = good["cosine"]
    flips("si-distilled", good, {})
    flips("si-distilled", good, {"cosine": changed(good["cosine"], (..., 1, 0), 0.7)}, "si-distil-1")
    flips("si-distilled", good, {"left": changed(good["left"], (..., 1), 0.7)}, "si-distil-2")
    square = {f"{a}_{b}": np.ones((SEEDS, 2, 8, 8)) for a in ("softmax", "linear") for b in fig5.PAIRS}
    shown = experiment("si-distilled").panels(planted("si-distilled", square))
    assert all(isinstance(panel, Maps) and len(panel.maps) == 4 for panel in shown)


def test_products_are_compared_where_inputs_reach():
    """Weights that differ only where inputs never go, and in the sign of both products, are the same."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((1, 50, 4, 3))
    inputs = np.concatenate([0 * inputs, inputs, inputs], -1)
    reached = fig5._directions(inputs)[:, None, None]
    assert np.linalg.matrix_rank(reached[0, 0, 0]) == 3
    read, write, noise, other = (rng.standard_normal((1, 1, 1, 9, 9)) for _ in range(4))
    unseen = np.eye(9) - reached
    theirs = Products(read, write)  # pyright: ignore[reportArgumentType]
    ours = Products(-(read + noise @ unseen), -(write + other @ unseen))  # pyright: ignore[reportArgumentType]
    assert np.all(fig5._cosines(theirs, ours) < 0.95)
    similar = fig5._cosines(fig5._between(theirs, reached), fig5._between(ours, reached))
    np.testing.assert_allclose(similar, 1.0)
