"""A section of the page: a figure, what is said and seen, its panels and where they come from."""

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from mesascope.experiments.base import AS_WRITTEN, Experiment
from mesascope.experiments.lab import Scale
from mesascope.experiments.panels import Curves, Drawing, Line, Maps, Panel
from mesascope.experiments.reproduce import Outcome
from mesascope.report.data import color, own_variant, to_json
from mesascope.report.table import anchor, badge, number, sign, summary, threshold, with_interval


def heading(name: str) -> str:
    """ "fig4" as people say it."""
    if found := re.fullmatch(r"fig(\d+)(\w*)", name):
        return f"Figure {found[1]}{found[2].upper()}"
    if name.startswith("si-"):
        return f"SI, {name.removeprefix('si-').replace('-', ' ')}"
    return name


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What one section shows.

    Attributes:
        parts: a figure, and the same with models as the paper's text has them, as far as there are both.
        panels: of all parts; curves of one letter are together, so that the reader can change over.
    """

    parts: tuple[Outcome, ...]
    panels: tuple[Panel, ...]

    @property
    def experiment(self) -> Experiment:
        return self.parts[0].experiment

    @property
    def name(self) -> str:
        return self.experiment.id

    @property
    def claims(self) -> list[dict[str, Any]]:
        return [claim for part in self.parts for claim in part.claims]


def together(outcomes: Sequence[Outcome]) -> list[Figure]:
    """Sections in the order of the outcomes."""
    parts: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        parts.setdefault(outcome.experiment.id.removesuffix(AS_WRITTEN), []).append(outcome)
    return [Figure(parts=tuple(of), panels=_joined(of)) for of in parts.values()]


def _joined(parts: Sequence[Outcome]) -> tuple[Panel, ...]:
    panels = [_only(panel) if len(parts) == 1 else panel for panel in parts[0].panels]
    for panel in (panel for part in parts[1:] for panel in part.panels):
        places = [i for i, there in enumerate(panels) if there.letter == panel.letter]
        there = panels[places[0]] if places else None
        if isinstance(panel, Curves) and isinstance(there, Curves):
            panels[places[0]] = replace(there, lines=(*there.lines, *panel.lines))
        else:
            panels.append(panel)
    return tuple(panels)


def _only(panel: Panel) -> Panel:
    """Where there is nothing to change over to."""
    if not isinstance(panel, Curves) or any(line.variant == "as_run" for line in panel.lines):
        return panel
    return replace(panel, lines=tuple(replace(line, variant="as_run") for line in panel.lines))


def section(figure: Figure, root: Path, scale: Scale, models: Mapping[str, str]) -> str:
    experiment, claims, name = figure.experiment, figure.claims, figure.name
    panels = "".join(_panel(name, i, panel, claims) for i, panel in enumerate(figure.panels))
    failed = [claim for claim in claims if claim["verdict"] == "fails"]
    others = "".join(f'<span id="{anchor(part.experiment.id)}"></span>' for part in figure.parts[1:])
    return f"""
<section class="figure" id="{anchor(name)}" data-figure="{escape(name)}" aria-labelledby="{anchor(name, "title")}">
<header><p class="eyebrow">{escape(heading(name))}</p>
<h2 id="{anchor(name, "title")}">{escape(experiment.shows)}</h2>{others}</header>
<div class="prose"><div><h3>What the paper says</h3><p>{escape(experiment.says)}</p></div>
<div><h3>What we see</h3><p class="summary">{summary(claims)}</p>{_list(failed)}</div></div>
{_controls(figure.panels)}
<div class="panels" data-count="{min(len(figure.panels), 7)}">{panels}</div>
{_numbers(claims)}
{"".join(_made(part, root, scale, models) for part in figure.parts)}
</section>"""


def _made(outcome: Outcome, root: Path, scale: Scale, models: Mapping[str, str]) -> str:
    """How to compute it, its files, and what it was made from."""
    name = outcome.experiment.id
    minutes = outcome.experiment.minutes.get(scale.name)
    time = f'<span class="minutes">about {number(minutes)} min</span>' if minutes else ""
    command = f"mesascope reproduce {name} --preset {scale.name}"
    return f"""<footer><p class="command"><code>{escape(command)}</code>{time}</p>
<p class="files">{_files(name, outcome, root, scale)}</p>
<details><summary>How it was made</summary>{_pieces(outcome, models)}</details></footer>"""


def _numbers(claims: Sequence[Mapping[str, Any]]) -> str:
    """Of all claims, below the panels, for who asks."""
    if not claims:
        return ""
    what = "The claim" if len(claims) == 1 else f"All {len(claims)} claims"
    return f'<details class="numbers"><summary>{what} in numbers</summary>{_list(claims)}</details>'


def _list(claims: Sequence[Mapping[str, Any]]) -> str:
    items = "".join(f"<li>{_seen(claim)}</li>" for claim in claims)
    return f'<ul class="seen">{items}</ul>' if claims else ""


def _seen(claim: Mapping[str, Any]) -> str:
    numbers = "; ".join(_said(check) for check in claim["checks"])
    return (
        f'<a href="#{anchor("claim", claim["id"])}">{escape(claim["id"])}</a> {badge(claim["verdict"])} '
        f"<span>{escape(claim['claim'].rstrip('.'))}: {numbers}.</span>"
    )


def _said(check: Mapping[str, Any]) -> str:
    return (
        f"{escape(check['what'])} {with_interval(check['ours'], check['interval'])}, "
        f'<span class="limit">threshold&nbsp;{threshold(check).replace(" ", "&nbsp;")}</span>'
    )


def _controls(panels: Sequence[Panel]) -> str:
    """What the reader can change about all curves of a figure."""
    lines = [line for panel in panels if isinstance(panel, Curves) for line in panel.lines]
    groups = ""
    if any(len(line.y) > 1 for line in lines):
        groups += _choice("seeds", "seeds", {"mean": "mean and range", "each": "each one"})
    if any(line.variant == "as_written" for line in lines):
        names = {"as_run": "as run", "as_written": "as written", "both": "both"}
        groups += _choice("variant", "models trained", names)
    return f'<div class="controls">{groups}</div>' if groups else ""


def _choice(name: str, title: str, options: Mapping[str, str]) -> str:
    buttons = "".join(
        f'<button type="button" data-{name}="{value}" aria-pressed="{"true" if i == 0 else "false"}">{text}</button>'
        for i, (value, text) in enumerate(options.items())
    )
    return f'<div class="choice" role="group" aria-label="{title}"><span>{title}</span>{buttons}</div>'


def letters(panels: str) -> set[str]:
    """Of the panels that a claim is about: of "A", "A, C", "A–D"."""
    found = set()
    for part in panels.upper().split(","):
        first, _, last = part.strip().partition("–")
        if first:
            found |= {chr(code) for code in range(ord(first), ord(last or first) + 1)}
    return found


def _panel(figure: str, i: int, panel: Panel, claims: Sequence[Mapping[str, Any]]) -> str:
    mine = "".join(sign(claim) for claim in claims if panel.letter.upper() in letters(str(claim["panel"])))
    letter = f'<b class="letter">{escape(panel.letter)}</b>' if panel.letter else ""
    title = f'<span class="title">{escape(panel.title)}</span>'
    caption = f'<figcaption>{letter}{title}<span class="signs">{mine}</span></figcaption>'
    if isinstance(panel, Drawing):
        kind, body = "drawing", _drawing(panel)
    elif isinstance(panel, Maps):
        kind, body = "maps", _maps(figure, i, panel)
    else:
        kind, body = "curves", _curves(panel)
    return f'<figure class="panel {kind}" id="{anchor(figure, str(i))}" data-panel="{i}">{caption}{body}</figure>'


def _drawing(panel: Drawing) -> str:
    """As an image: its styles and names cannot meet those of the page. It brings its own background."""
    content = base64.b64encode(panel.svg.encode()).decode()
    return f'<img class="sheet" alt="{escape(panel.title)}" src="data:image/svg+xml;base64,{content}">'


def _curves(panel: Curves) -> str:
    seeds = any(len(line.y) > 1 for line in panel.lines)
    label = escape(
        f"{panel.title}: {panel.ylabel} by {panel.xlabel}, {len(panel.lines)} curves. "
        "Left and right arrows read values, up and down change the curve."
    )
    twins = own_variant(panel.lines)
    rows = "".join(
        _key(i, line, twin, seeds) for i, (line, twin) in enumerate(zip(panel.lines, twins, strict=True))
    )
    more = '<th scope="col" class="range">range</th>' if seeds else ""
    return (
        f'<div class="plot" tabindex="0" role="group" aria-roledescription="chart" aria-label="{label}"></div>'
        f'<output class="hidden" aria-live="polite"></output>'
        f'<table class="key"><thead><tr><th scope="col" class="at">at the end</th>'
        f'<th scope="col" class="y">{"mean" if seeds else "value"}</th>{more}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _key(i: int, line: Line, twin: bool, seeds: bool) -> str:
    stroke = color(line)
    dash = "dashed" if line.dashed else line.variant
    dot = '<circle cx="13" cy="6" r="2.4" class="point"/>' if line.markers else ""
    swatch = (
        f'<svg class="swatch" width="26" height="12" aria-hidden="true" style="--c:{stroke}">'
        f'<line class="{dash}" x1="1" x2="25" y1="6" y2="6"/>{dot}</svg>'
    )
    variant = ""
    if twin:
        variant = f'<span class="tag variant">{"as run" if line.variant == "as_run" else "as written"}</span>'
    hide = (
        ' data-variant="as_written" hidden'
        if line.variant == "as_written"
        else (' data-variant="as_run"' if twin else "")
    )
    more = '<td class="range"></td>' if seeds else ""
    return (
        f'<tr data-line="{i}"{hide}><th scope="row"><button type="button" aria-pressed="true" '
        f'title="show or hide this curve">{swatch}<span class="name">{escape(line.label)} {variant}'
        f"{_origin_tag(line.origin)}</span></button></th>"
        f'<td class="y"></td>{more}</tr>'
    )


def _maps(figure: str, i: int, panel: Maps) -> str:
    labels = list(panel.maps)
    shape = np.shape(next(iter(panel.maps.values())))
    label = escape(
        f"{panel.title}: {len(labels)} maps of {shape[0]} rows and {shape[1]} columns. Arrows read single values."
    )
    name = anchor(figure, str(i), "slider")
    tools = f'<p class="which"><output>{escape(labels[0])}</output>{_origin_tag(panel.origin)}</p>'
    if len(labels) > 1:
        tools = (
            f'<div class="slide"><label class="hidden" for="{name}">which map of {escape(panel.title)}</label>'
            f'<input type="range" id="{name}" min="0" max="{len(labels) - 1}" value="0" step="1" '
            f'aria-valuetext="{escape(labels[0])}"></div>{tools}'
            f'<div class="thumbs" aria-hidden="true">{"<canvas></canvas>" * len(labels)}</div>'
            '<label class="same"><input type="checkbox"> one color scale for all</label>'
        )
    return (
        f'<div class="plot map" tabindex="0" role="group" aria-roledescription="map" aria-label="{label}"></div>'
        f'<output class="hidden live" aria-live="polite"></output><div class="tools">{tools}</div>'
    )


# Where numbers come from.


def _origin_tag(origin: str) -> str:
    return f'<span class="tag origin {origin}"><i aria-hidden="true"></i>{origin}</span>'


def origin_of(outcome: Outcome, piece: str) -> str:
    """Whether a piece was computed again; one of which nothing is known was not."""
    origin = outcome.result.origin
    computed = any(
        origin.get(name, "stored") != "stored" for name in outcome.result.about[piece].get("arrays", ())
    )
    return "recomputed" if computed else "stored"


def _files(name: str, outcome: Outcome, root: Path, scale: Scale) -> str:
    """Links to what lies beside the page, where it does."""

    def links(title: str, paths: Iterable[str]) -> str:
        there = [path for path in paths if (root / path).exists()]
        made = ", ".join(f'<a href="{escape(path)}">{escape(Path(path).name)}</a>' for path in there)
        return f"<span><b>{title}</b> {made}</span>" if there else ""

    stem = f"{scale.name}/pieces/{name}/"
    pieces = [f"{stem}{piece}.{kind}" for piece in outcome.experiment.pieces for kind in ("npz", "json")]
    return "".join(
        [
            links("arrays as drawn", [f"{scale.name}/arrays/{name}.{kind}" for kind in ("npz", "json")]),
            links("recomputed pieces", pieces),
            links("figure", [f"{scale.name}/figures/{name}.{kind}" for kind in ("png", "pdf", "svg")]),
        ]
    )


def _pieces(outcome: Outcome, models: Mapping[str, str]) -> str:
    rows = ""
    for piece, about in outcome.result.about.items():
        origin, made = origin_of(outcome, piece), about.get("made", {})
        inputs = ", ".join(
            f'<a href="#{anchor("model", name)}">{escape(name)}</a>' if name in models else escape(name)
            for name in about.get("inputs", {})
        )
        arrays = ", ".join(
            f"{escape(n)} <small>{escape(_shape(outcome, n))}</small>" for n in about.get("arrays", ())
        )
        seconds = f"{number(about['seconds'])} s" if "seconds" in about else "–"
        where = ", ".join(str(made[k]) for k in ("device", "started") if made.get(k))
        rows += (
            f'<tr><th scope="row">{escape(piece)}</th><td>{_origin_tag(origin)}</td><td>{arrays}</td>'
            f"<td>{inputs or '–'}</td><td>{seconds}</td><td>{escape(where)}</td></tr>"
        )
    scales = {to_json(a["scale"]): a["scale"] for a in outcome.result.about.values() if a.get("scale")}
    config = "".join(
        f"<pre>{escape(json.dumps(s, indent=1, ensure_ascii=False))}</pre>" for s in scales.values()
    )
    heads = "".join(f'<th scope="col">{h}</th>' for h in ("piece", "", "arrays", "models", "time", "made"))
    return (
        f'<div class="scroll"><table class="pieces"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"<h4>Scale</h4>{config}"
    )


def _shape(outcome: Outcome, name: str) -> str:
    if name not in outcome.result:
        return ""
    array = outcome.result.arrays[name]
    return "×".join(f"{n} {axis}" for n, axis in zip(array.values.shape, array.axes, strict=True))
