"""An experiment: pieces that compute arrays, panels that show them, claims that they are held to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from mesascope.experiments.claims import Claim
from mesascope.experiments.lab import Lab
from mesascope.experiments.panels import Curves, Panel
from mesascope.experiments.results import Arrays, Result


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A figure of the paper.

    Attributes:
        id: "fig4", "si-contracting".
        shows: what it shows, in a line.
        says: what the paper says, in a paragraph of our own.
        pieces: by name, what computes its arrays. A finished piece is kept: a piece is what is lost when a process is
            killed, so none should take more than a few minutes besides training.
        panels: what to show of the arrays.
        claims: what they are held to.
        minutes: by scale, how long it takes; see `experiments.minutes`.
        needs_text: its models are trained on a prepared corpus.
        shared: of its pieces those that are another figure's too, by name: that figure and the piece's name there.
        in_parts: panels and claims take what there is: it can be drawn and published before all pieces are computed.
    """

    id: str
    shows: str
    says: str
    pieces: Mapping[str, Callable[[Lab], Arrays]]
    panels: Callable[[Result], list[Panel]]
    claims: Callable[[Result], list[Claim]]
    minutes: Mapping[str, float] = field(default_factory=dict)
    needs_text: bool = False
    shared: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    in_parts: bool = False


AS_WRITTEN = "-as-written"
"""Ends the id of a figure, and of its claims, whose tasks, models and training are as the paper's text has them."""


def as_written(figure: Experiment) -> Experiment:
    """The same figure, with everything that is trained as the text has it: whether its conclusions survive.

    The authors' numbers and their controls belong to what was run, and are not looked at.
    """
    name = figure.id + AS_WRITTEN

    def compute(piece: Callable[[Lab], Arrays], lab: Lab) -> Arrays:
        return piece(lab.as_written())

    def panels(result: Result) -> list[Panel]:
        return [
            replace(panel, lines=tuple(replace(line, variant="as_written") for line in panel.lines))
            if isinstance(panel, Curves)
            else replace(panel, title=f"{panel.title}, as written")
            for panel in figure.panels(result)
        ]

    def claims(result: Result) -> list[Claim]:
        return [
            replace(
                claim,
                id=claim.id + AS_WRITTEN,
                figure=name,
                checks=tuple(replace(check, authors=None) for check in claim.checks),
            )
            for claim in figure.claims(result)
            if "-as-run" not in claim.id
        ]

    return replace(
        figure,
        id=name,
        shows=f"{figure.shows}; models as the paper's text has them",
        pieces={piece: partial(compute, of) for piece, of in figure.pieces.items()},
        shared={piece: (of + AS_WRITTEN, there) for piece, (of, there) in figure.shared.items()},
        panels=panels,
        claims=claims,
    )
