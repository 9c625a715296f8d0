"""Contracting systems and the fixed teacher: claims and panels on planted numbers."""

import numpy as np
import pytest

from mesascope.analysis.circuits import Products
from mesascope.experiments import experiment, teachers
from mesascope.experiments.panels import Maps
from tests.experiments.planted import flips, planted

CURVE = 1.7 * np.exp(-np.arange(1, 51) / 8) + 0.05
MODELS = dict(zip(teachers.NAMES, (1.0, 0.6, 0.4, 0.3, 0.2), strict=True))
DEPTH = np.linspace(1.0, 0.1, 7)


def arrays(scale: float, share: float, probed: np.ndarray) -> dict[str, np.ndarray]:
    errors = np.tile(probed[None, :, None], (5, 1, 50))
    found = {name: np.outer(np.full(5, scale * size), CURVE) for name, size in MODELS.items()}
    for name in ("next", "preconditioned", "exact"):
        found |= {name: errors, f"{name}_untrained": np.ones((7, 50))}
    return found | {
        "gd": CURVE, "proposition_2": 0.3 * CURVE,
        "newton_schulz": 0.29 * CURVE, "share": np.full((5, 2), share),
        "read": np.ones((5, 2, 40, 40)), "write": np.ones((5, 2, 40, 40)),
    }  # fmt: skip


CONTRACTING = arrays(1.02, 0.95, DEPTH)
FIXED = arrays(0.1, 0.4, np.linspace(1.0, 0.9, 7))


@pytest.mark.parametrize(
    ("name", "factor", "ids"),
    [
        ("gd", 1.2, ("si-contracting-1",)),
        ("proposition_2", 1.3, ("si-contracting-2",)),
        ("newton_schulz", 1.3, ("si-contracting-2-as-run",)),
        ("mesa-1", 2.0, ("si-contracting-2b",)),
        ("share", 0.9, ("si-contracting-4",)),
    ],
)
def test_contracting_claims(name, factor, ids):
    flips("si-contracting", CONTRACTING, {})
    flips("si-contracting", CONTRACTING, {name: factor * CONTRACTING[name]}, *ids)


def test_preconditioning_must_appear():
    flips("si-contracting", CONTRACTING, {"preconditioned": np.ones((5, 7, 50))}, "si-contracting-3")


@pytest.mark.parametrize(
    ("bad", "ids"),
    [
        ({}, ()),
        ({"linear-1": 5 * FIXED["linear-1"]}, ("si-fixed-1",)),
        ({"proposition_2": 0.1 * CURVE * 0.3}, ("si-fixed-1b",)),
        ({"preconditioned": CONTRACTING["preconditioned"]}, ("si-fixed-2",)),
        ({"share": CONTRACTING["share"]}, ("si-fixed-3",)),
    ],
    ids=["good", "one layer", "depth", "probes", "weights"],
)
def test_fixed_claims(bad, ids):
    flips("si-fixed-teacher", FIXED, bad, *ids)


@pytest.mark.parametrize("figure", ["si-contracting", "si-fixed-teacher"])
def test_panels(figure):
    shown = experiment(figure).panels(planted(figure, CONTRACTING))
    assert [panel.letter for panel in shown] == ["A", "B", "C", "D"]
    weights = shown[-1]
    assert isinstance(weights, Maps)
    assert {matrix.shape for matrix in weights.maps.values()} == {(30, 30)}


def test_share_is_of_the_energy_of_all_heads():
    """A head of Proposition 1, and one that is none, a third as large in squares."""
    eye = np.eye(10)
    read, write = np.zeros((2, 1, 1, 2, 40, 40))
    read[..., 0, 30:, 20:30] = write[..., 0, :10, 20:30] = np.sqrt(3) * eye
    read[..., 1, 20:30, 20:30] = write[..., 1, :10, 30:] = eye
    share = teachers.expected_share(Products(read, write), 10)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(share, [[0.75, 0.75]])
