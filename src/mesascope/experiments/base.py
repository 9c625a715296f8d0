"""An experiment: pieces that compute arrays, panels that show them, claims that they are held to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mesascope.experiments.claims import Claim
from mesascope.experiments.lab import Lab
from mesascope.experiments.panels import Panel
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
    in_parts: bool = False
