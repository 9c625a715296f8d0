"""One file for each figure of the paper, and for what goes beyond it."""

import dataclasses
import importlib
import json
from functools import cache
from importlib.resources import files

from mesascope.experiments.base import AS_WRITTEN, Experiment, as_written
from mesascope.store import unknown

# Figure by figure, and the file that has it.
_FILES = {
    "fig1": "fig1",
    "fig2": "fig2",
    "fig3": "fig3",
    "fig4": "fig4",
    "fig5": "fig5",
    "fig6": "fig6",
    "fig7": "fig7",
    "fig8": "fig8",
    "si-weights": "fig3",
    "si-attention": "fig3",
    "si-contracting": "teachers",
    "si-fixed-teacher": "teachers",
    "si-sensitivity": "sensitivity",
    "si-tokens": "fig2",
    "si-partial": "fig6",
    "si-nonlinear": "fig6",
    "si-distilled": "fig5",
    "si-noise": "fig5",
    "si-icl-mesa": "fig8",
    "lm-keyshift": "language",
    "lm-two-layers": "language",
    "lm-four-layers": "language",
    "lm-attention": "language",
    "recall": "recall",
}


_WRITTEN = ("fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "fig8")
"""Also with models as the paper's text has them: "fig7-as-written"."""


def names() -> list[str]:
    """The figures there are."""
    return [name for figure in _FILES for name in (figure, figure + AS_WRITTEN)[: 1 + (figure in _WRITTEN)]]


def experiment(name: str) -> Experiment:
    """A figure by its id."""
    if name not in names():
        raise ValueError(unknown("figure", name, names()))
    figure = name.removesuffix(AS_WRITTEN)
    module = importlib.import_module(f"mesascope.experiments.{_FILES[figure]}")
    found = module.EXPERIMENTS[figure]
    return dataclasses.replace(
        found if name == figure else as_written(found), minutes=minutes().get(name, {})
    )


def figure_of(name: str) -> str:
    """The figure that a panel belongs to, which is computed as a whole: "fig7" for "fig7b"; else the name itself."""
    return name[:-1] if name[:-1] in names() and name[-1].isalpha() else name


@cache
def minutes() -> dict[str, dict[str, float]]:
    """How long figures take, and "all" of them, by preset: two CPU cores, "paper" on one H200."""
    path = files("mesascope.experiments") / "minutes.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}
