"""Figure 1: the drawing, claims and panels on planted numbers."""

import xml.etree.ElementTree as ET

import numpy as np

from mesascope.experiments import experiment
from mesascope.experiments.panels import Curves, Drawing
from tests.experiments.planted import flips, planted

LEAST_SQUARES = 1.6 * np.exp(-np.arange(50) / 8) + 0.02
GOOD = {
    "by_layer": LEAST_SQUARES * np.geomspace(4, 1.02, 13)[:, None],
    "least_squares": LEAST_SQUARES,
    "distance": 1e-12,
    "distance_mesa": 1e-12,
}


def test_claims():
    flips("fig1", GOOD, {})
    flips("fig1", GOOD, {"distance": 1e-3}, "fig1-1")
    flips("fig1", GOOD, {"distance_mesa": 1e-3}, "fig1-2")
    flips("fig1", GOOD, {"by_layer": 1.2 * GOOD["by_layer"]}, "fig1-3")
    flips("fig1", GOOD, {"by_layer": GOOD["by_layer"][-1] * np.ones((13, 1))}, "fig1-3")


def test_the_drawing_is_whole_and_asks_for_nothing_from_outside():
    drawing, curves = experiment("fig1").panels(planted("fig1", GOOD))
    assert isinstance(drawing, Drawing)
    assert isinstance(curves, Curves)
    root = ET.fromstring(drawing.svg)
    left, top, width, height = map(float, root.get("viewBox", "").split())
    for node in root.iter():
        assert not any("href" in name for name in node.attrib)
        for name, start, size in (("x", left, width), ("y", top, height)):
            if name in node.attrib:
                assert start <= float(node.attrib[name]) <= start + size
    assert "http" not in drawing.svg.replace("http://www.w3.org/2000/svg", "")
