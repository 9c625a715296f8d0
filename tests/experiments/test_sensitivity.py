"""Sensitivities over training: claims and panels on planted numbers, and the order of steps and seeds."""

import jax
import numpy as np
import pytest

from mesascope.experiments import experiment
from mesascope.experiments.lab import SCALES, Lab, Trained
from mesascope.experiments.sensitivity import POSITIONS, TASKS, over_training
from mesascope.presets import preset
from mesascope.training import Trainer, with_train
from tests.experiments.planted import flips, planted


def concentrates(lags, on=1.0, off=0.02):
    """Spread evenly at first; at the end on so many tokens."""
    values = np.full((5, 3, len(POSITIONS), 50), 0.1)
    values[:, -1] = off
    for i, position in enumerate(POSITIONS):
        values[:, -1, i, max(0, position - 1 - lags) : position] = on
        values[:, :, i, position:] = 0
    return values


GOOD = {}
for prefix, kinds, lag, _ in TASKS.values():
    for kind in kinds:
        GOOD[f"{prefix}-{kind}"] = concentrates(lag, off=0.3 if kind == "full-mesa" else 0.02)
        GOOD[f"{prefix}-{kind}_steps"] = np.array([0, 100, 3000])


def test_claims():
    flips("si-sensitivity", GOOD, {})
    for i, (prefix, _, lag, factor) in enumerate(TASKS.values(), start=1):
        name = f"{prefix}-hybrid-mesa"
        flips("si-sensitivity", GOOD, {name: concentrates(lag, off=1.1 / factor)}, f"si-sens-{i}")
        always = np.repeat(GOOD[name][:, -1:], 3, 1)
        flips("si-sensitivity", GOOD, {name: always}, f"si-sens-{i}-rise")
    short = concentrates(2)
    flips("si-sensitivity", GOOD, {"sensitivity-partial-softmax-7": short}, "si-sens-2", "si-sens-2-rise")
    same = {"sensitivity-full-mesa": GOOD["sensitivity-softmax-7"]}
    flips("si-sensitivity", GOOD, same, "si-sens-fullmesa")


def test_panels():
    panels = experiment("si-sensitivity").panels(planted("si-sensitivity", GOOD))
    assert [panel.letter for panel in panels] == list("ABCDEFG")
    last = panels[0].lines[-1]
    assert last.label == "step 3000"
    assert last.y[0, :3] == pytest.approx([1, 1, 0.02])


@pytest.mark.slow
def test_steps_and_seeds_are_not_mixed_up():
    """Layer 1 of zeros passes tokens through the embedding alone: the sensitivity to t is that of the embedding."""
    config = with_train(preset("sensitivity-softmax-7"), seeds=2)
    start = Trainer(config).start().models
    zeros = jax.tree.map(lambda leaf: 0 * leaf, start.layers)
    object.__setattr__(start, "layers", zeros)

    class Kept(Lab):
        def trained(self, name, variant="as_run"):
            found = Trained(config, start, None)
            found.kept = lambda: {  # pyright: ignore
                step: jax.tree.map(lambda leaf, s=scale: s * leaf, start)
                for step, scale in ((0, 1.0), (100, 2.0), (200, 5.0))
            }
            return found

    arrays = over_training(Kept(SCALES["smoke"]), name="any")
    found = arrays["any"].values
    assert arrays["any_steps"].values.tolist() == [0, 100, 200]
    assert found.shape == (2, 3, len(POSITIONS), 50)
    norms = np.linalg.norm(np.asarray(start.embed), axis=1).mean(-1)
    for position, at in zip(POSITIONS, np.moveaxis(found, 2, 0), strict=True):
        expected = np.zeros((2, 3, 50))
        expected[..., position - 1] = np.outer(norms, [1, 2, 5])
        assert at == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_claims_wait_for_the_models_of_their_task():
    of_full = {
        name: values for name, values in GOOD.items() if "partial" not in name and "nonlinear" not in name
    }
    result = planted("si-sensitivity", of_full)
    figure = experiment("si-sensitivity")
    assert [claim.id for claim in figure.claims(result)] == [
        "si-sens-1",
        "si-sens-1-rise",
        "si-sens-fullmesa",
    ]
    assert [panel.letter for panel in figure.panels(result)] == list("ABC")
