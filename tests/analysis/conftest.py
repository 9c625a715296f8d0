"""Figures are drawn without a screen, and closed after each test."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _close_figures(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
