"""The numbers of panels, as the page carries them."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mesascope.experiments.panels import Drawing, Line, Maps, Panel


def to_json(content: Any) -> str:
    """JSON that may stand inside a script element: no tag can end it."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def rounded(values: Any, digits: int = 5) -> Any:
    """Nested lists of numbers with so many digits; what is not finite is None."""
    values = np.asarray(values, np.float64)
    if values.ndim:
        return (
            [rounded(row, digits) for row in values]
            if values.ndim > 1
            else [_short(v, digits) for v in values]
        )
    return _short(float(values), digits)


def _short(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def panel_data(panel: Panel) -> dict[str, Any]:
    """What `page.js` draws a panel from. A hundred curves often have one x: it is there once."""
    if isinstance(panel, Drawing):
        return {}
    about = {"title": panel.title, "xlabel": panel.xlabel, "ylabel": panel.ylabel}
    if isinstance(panel, Maps):
        # Three digits are more than colors show, and maps are what makes a page large; files beside it have them all.
        maps = [[label, rounded(values, 3)] for label, values in panel.maps.items()]
        return about | {"maps": maps, "diverging": panel.diverging}
    grids: dict[bytes, int] = {}
    lines, xs = [], []
    twins = own_variant(panel.lines)
    for line, twin in zip(panel.lines, twins, strict=True):
        x = np.asarray(line.x, np.float64)
        if x.tobytes() not in grids:
            grids[x.tobytes()] = len(xs)
            xs.append(rounded(x, 7))
        lines.append(
            {
                "label": line.label,
                "x": grids[x.tobytes()],
                "y": rounded(line.y),
                "color": color(line),
                "dashed": line.dashed,
                "markers": line.markers,
                "variant": line.variant if twin else None,
            }
        )
    return about | {
        "xs": xs,
        "lines": lines,
        "log_x": panel.log_x,
        "log_y": panel.log_y,
        "y_max": panel.y_max,
        "ticks": None if panel.x_ticks is None else [[float(x), text] for x, text in panel.x_ticks.items()],
    }


def own_variant(lines: Sequence[Line]) -> list[bool]:
    """Which lines belong to one variant alone: those as written, and those that have a twin as written.

    Others, such as an algorithm's, are the same for both, and stay when the reader changes over.
    """

    def plain(line: Line) -> str:
        return re.sub(r"\W*\bas[ _](run|written)\b\W*", "", line.label)

    written = {plain(line) for line in lines if line.variant == "as_written"}
    return [line.variant == "as_written" or plain(line) in written for line in lines]


def color(line: Line) -> str:
    """The kind's color as the theme has it, paler for a smaller shade."""
    part = round(100 * (0.25 + 0.75 * min(1.0, max(0.0, line.shade))))
    full = f"var(--{line.kind})"
    return full if part == 100 else f"color-mix(in srgb, {full} {part}%, var(--pale))"
