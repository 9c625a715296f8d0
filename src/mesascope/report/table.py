"""Claims as HTML: numbers with as many digits as they deserve, the table, and a gauge that shows them at a glance."""

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Claim = Mapping[str, Any]

# A verdict is a sign and a word, never only a color.
SIGNS = {"holds": "✓", "fails": "✕", "not testable at this preset": "–"}
_CLASSES = {"holds": "holds", "fails": "fails", "not testable at this preset": "untested"}
_WORDS = {"holds": "holds", "fails": "fails", "not testable at this preset": "not testable"}
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, *, decimals: int | None = None) -> str:
    """For people: four digits that count, or so many decimals."""
    if value is None:
        return "–"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPTS)}".replace("-", "−")
    if decimals is None:
        decimals = 3 - math.floor(math.log10(abs(value))) if value else 0
        text = f"{value:.{max(0, decimals)}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = f"{value:.{decimals}f}"
    return text.replace("-", "−")


def with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    """The mean and its interval as HTML, to the decimals that the interval's width leaves meaningful."""
    if value is None or interval is None:
        return f'<span class="value">{number(value)}</span>'
    half = (interval[1] - interval[0]) / 2
    decimals = min(5, max(0, 1 - math.floor(math.log10(half)))) if half > 0 else None
    low, high = (number(end, decimals=decimals) for end in interval)
    mean = number(value, decimals=decimals)
    return f'<span class="value">{mean}</span> <span class="interval">({low}&nbsp;to&nbsp;{high})</span>'


def threshold(check: Mapping[str, Any]) -> str:
    """The bound of a check: "≤ 1.02"."""
    bound = check["at_most"]
    return f"≤ {number(bound)}" if bound is not None else f"≥ {number(check['at_least'])}"


def anchor(*words: str) -> str:
    """A name that a link can point to."""
    return "-".join(re.sub(r"[^A-Za-z0-9_.-]+", "-", word) for word in words)


def badge(verdict: str) -> str:
    """A verdict as sign and word."""
    mark = f'<i aria-hidden="true">{SIGNS[verdict]}</i>'
    return f'<span class="verdict {_CLASSES[verdict]}">{mark} {_WORDS[verdict]}</span>'


def sign(claim: Claim) -> str:
    """A verdict as a small square that leads to the claim."""
    verdict = claim["verdict"]
    label = escape(f"{claim['id']}: {verdict}. {claim['claim']}")
    return (
        f'<a class="sign {_CLASSES[verdict]}" href="#{anchor("claim", claim["id"])}" title="{label}" '
        f'aria-label="{label}">{SIGNS[verdict]}</a>'
    )


def summary(claims: Sequence[Claim]) -> str:
    """ "3 of 4 claims hold; 1 fails." """
    if not claims:
        return "No claims are made about this figure."
    count = {verdict: sum(claim["verdict"] == verdict for claim in claims) for verdict in SIGNS}
    holds, fails, untested = count.values()
    if untested == len(claims):
        what = "The claim cannot" if untested == 1 else f"None of its {untested} claims can"
        return f"{what} be tested at this preset."
    total = holds + fails
    if fails == 0:
        text = "The claim holds" if total == 1 else f"All {total} claims hold"
    elif holds == 0:
        text = "The claim fails" if total == 1 else f"All {total} claims fail"
    else:
        text = f"{holds} of {total} claims {_verb('hold', holds)}; {fails} {_verb('fail', fails)}"
    return f"{text}." if not untested else f"{text}; {untested} more cannot be tested at this preset."


def _verb(verb: str, count: int) -> str:
    return f"{verb}s" if count == 1 else verb


def gauge(check: Mapping[str, Any], authors: float | None, verdict: str) -> str:
    """Where the number lies: the side of the threshold that is allowed, seeds, mean with interval, the authors' value.

    Drawn on a logarithmic axis where the numbers span more than a factor of twenty.
    """
    upper = check["at_most"] is not None
    bound = check["at_most"] if upper else check["at_least"]
    seeds = [v for v in check["by_seed"] if v is not None]
    points = [bound, *seeds, *(check["interval"] or ()), *([authors] if authors is not None else [])]
    if check["ours"] is None:
        return ""
    state = "untested"
    if _CLASSES[verdict] != state:
        state = "holds" if (check["ours"] <= bound if upper else check["ours"] >= bound) else "fails"
    log = min(points) > 0 and max(points) / min(points) > 20
    axis = [math.log(p) if log else p for p in points]
    low, high = min(axis), max(axis)
    pad = 0.18 * (high - low) or abs(low) * 0.1 or 1.0
    low, high = low - pad, high + pad
    width, height = 120, 18

    def at(value: float) -> float:
        part = ((math.log(value) if log else value) - low) / (high - low)
        return round(width * min(1.0, max(0.0, part)), 1)

    middle = height / 2
    left, right = (0.0, at(bound)) if upper else (at(bound), width)
    parts = [
        f'<rect class="allowed" x="{left}" y="3" width="{right - left:.1f}" height="{height - 6}"/>',
        f'<line class="axis" x1="0" x2="{width}" y1="{middle}" y2="{middle}"/>',
        f'<line class="bound" x1="{at(bound)}" x2="{at(bound)}" y1="1" y2="{height - 1}"/>',
    ]
    parts += [f'<circle class="seed" cx="{at(v)}" cy="{middle}" r="1.6"/>' for v in seeds if len(seeds) > 1]
    if check["interval"]:
        x1, x2 = (at(end) for end in check["interval"])
        parts.append(f'<line class="spread" x1="{x1}" x2="{x2}" y1="{middle}" y2="{middle}"/>')
    parts.append(f'<circle class="mean" cx="{at(check["ours"])}" cy="{middle}" r="3.4"/>')
    if authors is not None:
        x = at(authors)
        parts.append(f'<path class="authors" d="M{x} {middle - 4}l4 4-4 4-4-4z"/>')
    label = f"{check['what']}: {number(check['ours'])}, threshold {threshold(check)}"
    if authors is not None:
        label += f", authors {number(authors)}"
    return (
        f'<svg class="gauge {state}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def claims_table(claims: Sequence[Claim]) -> str:
    """All claims; one body of the table for each, so that they can be shown and hidden."""
    return "".join(_claim_rows(claim) for claim in claims)


def _claim_rows(claim: Claim) -> str:
    checks, figure, verdict = claim["checks"], claim["figure"], claim["verdict"]
    registered = "registered" if claim["registered"] else "added later"
    words = " ".join(
        [claim["id"], claim["claim"], claim["source"], verdict, registered, *(c["what"] for c in checks)]
    )
    span = f' rowspan="{len(checks)}"' if len(checks) > 1 else ""
    rows = []
    for i, check in enumerate(checks):
        authors = check["authors"]
        cells = [
            f'<td class="what"><span>{escape(check["what"])}</span> '
            f'<b class="bound">{threshold(check)}</b></td>',
            f'<td class="authors">{number(authors) if authors is not None else ""}{_distance(check)}</td>',
            f'<td class="ours">{with_interval(check["ours"], check["interval"])}</td>',
            f'<td class="gauge-cell">{gauge(check, authors, verdict)}</td>',
        ]
        if i == 0:
            link = f'<a href="#{anchor(figure)}">{escape(claim["id"])}</a>'
            title = "its threshold was not written down before there were results"
            later = "" if claim["registered"] else f'<span class="source" title="{title}">added later</span>'
            first = (
                f'<th scope="rowgroup" class="id"{span}>{link}{later}</th><td class="statement"{span}>'
                f'{escape(claim["claim"])}<span class="source">{escape(claim["source"])}</span></td>'
            )
            cells = [first, *cells, f'<td class="verdict-cell"{span}>{badge(verdict)}</td>']
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<tbody class="claim" id="{anchor("claim", claim["id"])}" data-verdict="{escape(verdict)}" '
        f'data-figure="{escape(figure)}" data-text="{escape(words.lower())}">{"".join(rows)}</tbody>'
    )


def _distance(check: Mapping[str, Any]) -> str:
    distance = check["distance"]
    if distance is None:
        return ""
    if "- 1|" in check["what"]:  # a difference of gaps
        text = f"{100 * distance:+.1f}".replace("-", "−")
        title = "ours less the authors’ value, in percent of the loss"
        return f'<span class="distance" title="{title}">{text} points</span>'
    digits = 1 if abs(distance) < 0.1 else 0
    text = f"{distance:+.{digits}%}".replace("-", "−").replace("%", " %")
    if abs(distance) >= 2:
        text = f"× {number(1 + distance)}"
    return f'<span class="distance" title="ours relative to the authors’ value">{text}</span>'
