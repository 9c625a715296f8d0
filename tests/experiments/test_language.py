"""Figures of language models: claims and panels on planted numbers."""

import io

import numpy as np
import pytest
from rich.console import Console

from mesascope.experiments import experiment
from mesascope.experiments.lab import SCALES, Lab, NotReleasedError
from mesascope.experiments.language import KEY_SHIFT, MIXERS
from mesascope.experiments.panels import Curves, Maps
from mesascope.experiments.reproduce import reproduce
from mesascope.store import StoreError
from tests.experiments.planted import flips, planted, verdicts

SEEDS = np.array([-0.003, 0.0, 0.003])


def model(name, loss, score, **others):
    curve = loss + np.outer(np.ones(3), [2.0, 1.0, 0.0])
    arrays = dict(
        tokens=[0, 1e6, 2e6], loss=curve, in_context=score - np.outer(np.ones(3), [1.0, 0.1, 0.0]),
        final_loss=loss + SEEDS, final_in_context=score + SEEDS, by_position=np.full((3, 40), loss),
        rates=[[1e-3, 3e-3], [loss, loss + 1]], at=[50, 500],
    )  # fmt: skip
    return {f"{name}_{what}": np.asarray(values, float) for what, values in (arrays | others).items()}


LOSSES = {"softmax": 4.0, "linear": 4.3, "mesa": 4.02, "delta": 4.1, "mesa-forget": 4.0}
LAYERS = {k: v for name, loss in LOSSES.items() for k, v in model(name, loss, loss - 4.5).items()}
KEYS = model("softmax", 4.2, -0.5)
for nu in range(4):
    KEYS |= model(f"mesa-nu{nu}", 4.4 - 0.05 * nu, -0.4 - 0.03 * nu)
    KEYS |= model(f"linear-nu{nu}", 4.6 - 0.05 * nu, -0.2 - 0.03 * nu)
MASS = np.zeros((3, 4, 32))
MASS[:, :, 0], MASS[:, 1, 2] = 0.3, 0.7
COPYING = {f"{d}-{m}_offsets": MASS for d in ("two", "four") for m in ("softmax", "linear", "mesa")}
COPYING["maps"] = np.tile(np.eye(8, k=-1), (4, 1, 1))


def test_good_numbers_hold():
    for figure, good in (
        ("lm-keyshift", KEYS), ("lm-two-layers", LAYERS), ("lm-four-layers", LAYERS), ("lm-attention", COPYING),
    ):  # fmt: skip
        flips(figure, good, {})


@pytest.mark.parametrize(
    ("name", "by", "ids"),
    [
        ("mesa-nu1_final_loss", 0.3, ("lm-1",)),
        ("mesa-nu2_final_in_context", 0.3, ("lm-2",)),
        ("linear-nu3_final_loss", 0.2, ("lm-3",)),
        ("softmax_final_in_context", -0.2, ("lm-6",)),
    ],
)
def test_key_shift_claims(name, by, ids):
    flips("lm-keyshift", KEYS, {name: KEYS[name] + by}, *ids)


def test_layers_claims():
    worse = {"mesa_final_loss": LAYERS["mesa_final_loss"] + 0.4}
    flips("lm-two-layers", LAYERS, worse, "lm-1-two-layers", "lm-4")
    flips("lm-four-layers", LAYERS, worse, "lm-1-four-layers", "lm-5")
    flips("lm-two-layers", LAYERS, {"mesa_final_loss": LAYERS["mesa_final_loss"] + 0.1}, "lm-4")
    score = {"mesa_final_in_context": LAYERS["linear_final_in_context"] + 0.01}
    flips("lm-two-layers", LAYERS, score, "lm-2-two-layers")


def test_an_interval_that_holds_zero_is_no_difference():
    """Lower on average, and by two seeds of three even clearly."""
    noisy = LAYERS["linear_final_loss"] + np.array([-0.3, -0.3, 0.25])
    assert verdicts("lm-two-layers", LAYERS | {"mesa_final_loss": noisy})["lm-1-two-layers"] == "fails"
    one = {
        name: values[:1] if values.ndim and len(values) == 3 else values for name, values in LAYERS.items()
    }
    assert verdicts("lm-two-layers", one)["lm-1-two-layers"] == "fails"


def test_a_head_that_looks_at_its_own_token_copies_nothing():
    own = np.zeros_like(MASS)
    own[..., 0] = 0.9
    flips("lm-attention", COPYING, {"four-mesa_offsets": own}, "lm-7")


def test_panels():
    for figure, arrays, kinds in (("lm-keyshift", KEYS, KEY_SHIFT), ("lm-four-layers", LAYERS, MIXERS)):
        panels = experiment(figure).panels(planted(figure, arrays))
        assert [panel.letter for panel in panels] == ["A", "B", "C"]
        assert all(len(panel.lines) == len(kinds) for panel in panels)
        assert panels[1].ylabel == "loss at token 500 minus token 50"
        np.testing.assert_allclose(panels[2].lines[0].y, arrays["softmax_by_position"])
    maps, *curves = experiment("lm-attention").panels(planted("lm-attention", COPYING))
    assert isinstance(maps, Maps)
    assert len(maps.maps) == 4
    assert all(isinstance(panel, Curves) for panel in curves)
    assert curves[0].lines[0].y[:, 2].tolist() == [0.7] * 3


def test_without_text(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(StoreError, match=r"lm-two-layers: language models need text.*--preset quick --data"):
        reproduce(
            ["lm-two-layers"], scale=SCALES["quick"], out=tmp_path, run_directory=tmp_path, console=console
        )
    with pytest.raises(NotReleasedError):
        experiment("recall").pieces["mesa"](Lab(SCALES["released"]))


def test_recall_claims():
    sizes = np.array([4.0, 8.0])
    good = {f"{m}_key_dims": sizes for m in ("softmax", "linear", "delta", "mesa")}
    good |= {f"{m}_accuracy": np.full((2, 2), a) for m, a in
             (("softmax", 1.0), ("linear", 0.5), ("delta", 0.7), ("mesa", 0.8))}  # fmt: skip
    flips("recall", good, {})
    flips("recall", good, {"mesa_accuracy": good["mesa_accuracy"] - 0.5}, "recall-1")
    (panel,) = experiment("recall").panels(planted("recall", good))
    assert [line.label for line in panel.lines] == ["softmax", "linear", "delta", "mesa"]
