"""Figure 3, attention maps and weights: planted numbers, planted weights and planted attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.analysis.circuits import Products
from mesascope.experiments import experiment
from mesascope.experiments.fig3 import _together, one_layer, sheet, softmax_layers
from mesascope.experiments.lab import SCALES, Lab, Trained
from mesascope.presets import preset
from mesascope.theory.constructions import proposition_1
from mesascope.training import Trainer, with_train
from tests.experiments.planted import flips, planted

ATTENTION = {
    "_maps": np.eye(50) * np.ones((4, 1, 1)),
    "_by_lag": np.array([[0.1, 0.85], [0.9, 0.05], [0.2, 0.2], [0.3, 0.3]]) * np.ones((5, 1, 1)),
    "_std": np.array([0.02, 0.02, 0.4, 0.4]) * np.ones((5, 1)),
    "_entry_std": np.array([0.03, 0.03, 0.4, 0.4]) * np.ones((5, 1)),
}
SOFTMAX = {f"softmax-7{name}": of for name, of in ATTENTION.items()}
HYBRID = {f"hybrid-mesa{name}": of for name, of in ATTENTION.items()}
WEIGHTS = {
    "read": np.ones((2, 30, 30)), "write": np.ones((2, 30, 30)),
    "read_proposition_1": np.eye(30), "write_proposition_1": np.eye(30),
    **{f"{kind}_share_{name}": np.full(5, 0.95) for kind in ("read", "write") for name in ("proposition_1", "scalars")},
    "objective": np.eye(2)[::-1] * np.array([1.0, 0.01])[:, None, None] * np.ones((5, 1, 1, 1)),
    "objective_share": np.full(5, 0.99), "together_share": np.full(5, 0.98),
}  # fmt: skip
LAYERS = {
    f"{name}_{kind}": value
    for name in ("six", "seven")
    for kind, value in (
        ("read", np.ones((6, 4, 20, 20))), ("write", np.ones((6, 4, 10, 20))),
        ("read_share", np.full((5, 6), 0.95)), ("write_share", np.full((5, 6), 0.95)),
    )
}  # fmt: skip


def test_claims():
    good = SOFTMAX | WEIGHTS
    flips("fig3", good, {})
    elsewhere = SOFTMAX["softmax-7_by_lag"].copy()
    elsewhere[:, 0] = 0.1
    flips("fig3", good, {"softmax-7_by_lag": elsewhere}, "fig3a-1", "fig3a-1-single")
    flips("fig3", good, {"softmax-7_std": 10 * SOFTMAX["softmax-7_std"]}, "fig3a-1")
    flips("fig3", good, {"softmax-7_entry_std": 10 * SOFTMAX["softmax-7_entry_std"]}, "fig3a-1-single")
    flips("fig3", good, {"read_share_proposition_1": np.full(5, 0.85)}, "fig3b-1")
    flips("fig3", good, {"write_share_scalars": np.full(5, 0.85)}, "fig3b-1-scalars")
    flips("fig3", good, {"together_share": np.full(5, 0.85)}, "fig3b-1-together")


def test_what_heads_have_in_common_and_what_cancels_is_not_the_layer():
    """Against the tensor itself, which is the same however its heads are mixed."""
    rng = np.random.default_rng(0)
    read, write = rng.standard_normal((2, 1, 1, 3, 8, 8))
    tensor = np.einsum("hab,hcd->abcd", write[0, 0], read[0, 0])
    mix = rng.standard_normal((3, 3))
    mixed = np.einsum("hk,slkab->slhab", mix, read), np.einsum("hk,slkab->slhab", np.linalg.inv(mix).T, write)
    # Multiples of the identity: written from slot 2 to slot 0, read by keys in slot 3 and queries in slot 2.
    scalar = np.einsum("iikk->", tensor.reshape(4, 2, 4, 2, 4, 2, 4, 2)[0, :, 2, :, 3, :, 2, :]) / 4
    for of in ((read, write), mixed):
        share = _together(Products(*map(jnp.asarray, of)), 2)
        np.testing.assert_allclose(share, [[4 * scalar**2 / np.sum(tensor**2)]], rtol=1e-4)


def test_claims_of_the_supplements():
    flips("si-attention", SOFTMAX | HYBRID, {})
    flips("si-attention", SOFTMAX | HYBRID, {"hybrid-mesa_std": np.full((5, 4), 0.2)}, "si-attention-2")
    good = WEIGHTS | LAYERS
    flips("si-weights", good, {})
    flips("si-weights", good, {"objective_share": np.full(5, 0.8)}, "si-weights-2")
    flips("si-weights", good, {"six_write_share": np.full((5, 6), 0.8)}, "si-weights-3")
    flips("si-weights", good, {"seven_read_share": np.full((5, 6), 0.4)}, "si-weights-4")


def test_panels():
    a, read, write = experiment("fig3").panels(planted("fig3", SOFTMAX | WEIGHTS))
    assert list(a.maps) == [
        "head 1: 0.10 on t, 0.85 on t-1",
        "head 2: 0.90 on t, 0.05 on t-1",
        "mean of all heads",
    ]
    assert len(read.maps) == len(write.maps) == 3
    assert len(experiment("si-attention").panels(planted("si-attention", SOFTMAX | HYBRID))) == 2
    panels = experiment("si-weights").panels(planted("si-weights", WEIGHTS | LAYERS))
    assert [panel.letter for panel in panels] == list("ABCDE")
    now, before = panels[2].lines
    assert now.y[0].tolist() == [0, 1, 1, 0]
    assert before.y[0] == pytest.approx([0, 0.01, 0.01, 0])
    assert "layer 2" in panels[4].maps
    assert "layer 8" not in panels[4].maps


def test_sheets():
    read, write = np.array([[[2.0, 0], [0, 4]], [[1, 0], [0, 0]]]), np.array([[[0, -3.0]], [[0, 0]]])
    expected = [[0.5, 0, 0, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, -1, 0, 0, 0]]
    assert sheet(read, write).tolist() == expected


class Planted(Lab):
    """Models that were made by hand."""

    def __init__(self, config, models):
        super().__init__(SCALES["smoke"])
        self.found = Trained(config, models, None)

    def trained(self, name, variant="as_run"):
        return self.found


@pytest.mark.slow
def test_a_layer_that_is_proposition_1_is_found_to_be():
    config = with_train(preset("linear-1"), seeds=2)
    built = proposition_1(10, 0.03).model.layers[0]
    models = Trainer(config).start().models
    # Tokens there have three slots, [Φs, s_t, s_{t-1}], here four, and two heads of 20 where there is one of 10.
    rows = np.r_[0:10, 20:40]

    def wide(name):
        small = np.asarray(getattr(built, name))
        large = np.zeros((40, 40), np.float32)
        if name == "output":
            large[:10, rows] = -small
        else:
            large[rows, :10] = -small if name == "queries" else small
        return jnp.asarray(np.stack([large, large]))

    layer = jax.tree.map(lambda leaf: leaf, models.layers[0])
    for name in ("queries", "keys", "values", "output"):
        object.__setattr__(layer, name, wide(name))
    object.__setattr__(models, "layers", (layer,))
    found = {name: of.values for name, of in one_layer(Planted(config, models)).items()}
    assert found["objective_share"] == pytest.approx(1)
    for kind in ("read", "write"):
        assert found[f"{kind}_share_proposition_1"] == pytest.approx(1)
        assert found[kind][0] == pytest.approx(found[f"{kind}_proposition_1"], abs=1e-6)


@pytest.mark.slow
def test_weights_are_read_through_the_tokens_that_are_bound():
    """An untrained model is far from it; with identities planted behind what layer 1 binds, they are found."""
    config = with_train(preset("softmax-7"), seeds=2)
    lab = Planted(config, Trainer(config).start().models)
    before = softmax_layers(lab)
    assert before["seven_read"].values.shape == (6, 4, 20, 20)
    assert before["seven_write"].values.shape == (6, 4, 10, 20)
    assert before["seven_read_share"].values.max() < 0.3
    models = lab.found.models
    embed = np.asarray(models.embed)
    # E times its pseudoinverse is the identity: keys and queries read the slot of s_t.
    inverse = np.linalg.pinv(embed)
    layer = jax.tree.map(lambda leaf: leaf, models.layers[1])
    for name in ("queries", "keys"):
        of = np.zeros((2, 40, 80), np.float32)
        for head in range(4):
            of[:, :, 20 * head : 20 * head + 10] = inverse
        object.__setattr__(layer, name, jnp.asarray(of))
    # Layer 1 adds nothing, so that only s_t is bound.
    first = jax.tree.map(lambda leaf: leaf, models.layers[0])
    object.__setattr__(first, "output", jnp.zeros_like(first.output))
    object.__setattr__(models, "layers", (first, layer, *models.layers[2:]))
    after = softmax_layers(lab)
    assert after["seven_read_share"].values[:, 0] == pytest.approx(1, abs=1e-4)
    expected = np.zeros((20, 20))
    expected[:10, :10] = np.eye(10)
    assert after["seven_read"].values[0, 0] == pytest.approx(expected, abs=1e-4)
