"""What a figure shows, as data: curves and maps. One renderer draws them on paper, another on the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float

from mesascope.analysis.results import house_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Origin = Literal["recomputed", "one seed recomputed", "stored"]

# One color for each kind of thing, in all figures; people with any color vision can tell them apart.
COLORS = {
    "softmax": "#0072B2",
    "mesa": "#D55E00",
    "linear": "#009E73",
    "theory": "#E69F00",
    "features": "#56B4E9",
    "compressed": "#000000",
    "control": "#777777",
    "other": "#CC79A7",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """A curve, one for each seed.

    Attributes:
        y: by seed and x; a single row for what has no seeds.
        kind: which of `COLORS`.
        shade: from 0 (pale) to 1 (full): depth, or how much of something.
        origin: whether these numbers were computed just now or come with the repository.
        variant: "as_written" for models trained as the paper's text has it.
    """

    label: str
    x: Float[np.ndarray, " x"]
    y: Float[np.ndarray, "seed x"]
    kind: str = "other"
    shade: float = 1.0
    dashed: bool = False
    markers: bool = False
    origin: Origin = "recomputed"
    variant: Literal["as_run", "as_written"] = "as_run"

    def __post_init__(self):
        if self.kind not in COLORS:
            raise ValueError(f"kind: expected one of {', '.join(COLORS)}, got {self.kind!r}.")
        if np.ndim(self.y) != 2 or np.shape(self.y)[1:] != np.shape(self.x):
            raise ValueError(
                f"{self.label}: expected y by seed and x {np.shape(self.x)}, got {np.shape(self.y)}."
            )


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A panel of curves."""

    letter: str
    title: str
    xlabel: str
    ylabel: str
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False
    x_ticks: Mapping[float, str] | None = None
    y_max: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Maps:
    """A panel of matrices, such as attention maps or weight products.

    Attributes:
        maps: by label; rows run downwards. On the page a slider goes through them.
        diverging: colors around zero instead of from zero.
    """

    letter: str
    title: str
    maps: Mapping[str, Float[np.ndarray, "row column"]]
    xlabel: str = ""
    ylabel: str = ""
    diverging: bool = False
    origin: Origin = "recomputed"


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A panel that is drawn by hand: a diagram. `svg` is shown on the page."""

    letter: str
    title: str
    svg: str


Panel = Curves | Maps | Drawing


MOST_INSIDE = 4
"""Entries of a legend within the axes."""


def draw(panels: Sequence[Curves | Maps], *, columns: int = 3) -> "Figure":
    """All panels on one sheet, in the house style."""
    with house_style():
        import matplotlib.pyplot as plt

        tiles = [tile for panel in panels for tile in _tiles(panel)]
        columns = min(columns, len(tiles))
        rows = -(-len(tiles) // columns)
        longest = max((len(tile.lines) for tile in tiles if isinstance(tile, Curves)), default=0)
        height = 3.4 if longest <= MOST_INSIDE else 3.7 + 0.08 * longest
        figure, axes = plt.subplots(rows, columns, figsize=(4.4 * columns, height * rows), squeeze=False)
        for ax in axes.flat[len(tiles) :]:
            ax.set_axis_off()
        for tile, ax in zip(tiles, axes.flat, strict=False):
            _curves(tile, ax) if isinstance(tile, Curves) else _map(figure, tile, ax)
        return figure


def _tiles(panel: Curves | Maps) -> list[Any]:
    """Panels as they are laid out: a map for each matrix."""
    if isinstance(panel, Curves):
        return [panel]
    return [(panel, label, values) for label, values in panel.maps.items()]


def _curves(panel: Curves, ax: "Axes") -> None:
    for line in panel.lines:
        color = blend(COLORS[line.kind], line.shade)
        style: dict[str, Any] = dict(
            color=color, linestyle="--" if line.dashed else "-", marker="o" if line.markers else None, ms=3
        )
        ax.plot(line.x, np.mean(line.y, 0), label=line.label, **style)
        if len(line.y) > 1:
            ax.fill_between(
                line.x, np.min(line.y, 0), np.max(line.y, 0), color=color, alpha=0.18, linewidth=0
            )
    ax.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=f"{panel.letter}  {panel.title}".strip())
    if panel.log_x:
        ax.set_xscale("log")
    if panel.log_y:
        ax.set_yscale("log")
    elif panel.y_max is not None:
        ax.set_ylim(0, panel.y_max)
    else:
        ax.set_ylim(bottom=min(0, ax.get_ylim()[0]))
    if panel.x_ticks is not None:
        ax.set_xticks(list(panel.x_ticks), list(panel.x_ticks.values()))
        ax.set_xticks([], minor=True)
    # A long legend would cover the curves.
    below: Any = dict(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
    ax.legend(fontsize="x-small", **(below if len(panel.lines) > MOST_INSIDE else {}))


def _map(figure: "Figure", tile: tuple[Maps, str, np.ndarray], ax: "Axes") -> None:
    panel, label, values = tile
    top = float(np.max(np.abs(values))) or 1.0
    scale: dict[str, Any] = (
        dict(cmap="RdBu_r", vmin=-top, vmax=top) if panel.diverging else dict(vmin=0, vmax=top)
    )
    image = ax.imshow(values, interpolation="nearest", **scale)
    ax.grid(visible=False)
    ax.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=f"{panel.letter}  {label}".strip())
    figure.colorbar(image, ax=ax, shrink=0.8)


def blend(color: str, shade: float) -> str:
    """The color mixed with white: all of it for shade 1, a quarter for 0."""
    part = 0.25 + 0.75 * float(np.clip(shade, 0, 1))
    channels = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - part * (255 - channel)):02x}" for channel in channels)
