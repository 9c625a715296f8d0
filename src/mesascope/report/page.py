"""One static page from computed figures: everything inlined, nothing requested.

Text, tables and legends are written here as HTML, so that they can be read, searched and printed before any script has
run. `page.js` draws the panels from the numbers that the page carries, and makes it answer.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from mesascope import experiments, released, runs, store
from mesascope.experiments import results
from mesascope.experiments.lab import SCALES, Lab, Scale
from mesascope.experiments.reproduce import Outcome
from mesascope.presets import PRESETS
from mesascope.report.data import panel_data, to_json
from mesascope.report.section import Figure, heading, origin_of, section, together
from mesascope.report.table import SIGNS, anchor, claims_table, sign
from mesascope.untrusted import parse_json

_SCALES = {
    "smoke": "Preset <b>smoke</b>: nothing was trained. The page shows that everything runs; its numbers mean nothing.",
    "quick": "Preset <b>quick</b>: models were trained here for a part of their steps. Claims about models at the end "
    "of their training cannot be tested.",
    "released": "Preset <b>released</b>: figures were recomputed here from one trained model of each kind; other seeds "
    "and training curves are stored arrays of the five training seeds.",
    "paper": "Preset <b>paper</b>: every model was trained at the paper’s scale, with five training seeds.",
}

_MODELS = """<section class="models" id="models" aria-labelledby="models-title">
<h2 id="models-title">Models</h2>
<p class="note">Configurations of the models behind the figures, and digests of their weights.</p>
{}
</section>"""


def write_page(
    outcomes: Sequence[Outcome], path: Path, *, scale: Scale, differences: Sequence[str] | None = None
) -> Path:
    """Write the page, and the arrays behind each figure beside it: `SCALE/arrays/FIGURE.npz` and `.json`.

    The same outcomes make the same bytes. Links lead to files beside the page, where they are there.

    Args:
        differences: sentences on claims that are not as committed; None where that was not looked at.
    """
    folder = path.parent / scale.name
    for outcome in outcomes:
        name, result = outcome.experiment.id, outcome.result
        results.write(folder / "arrays" / name, result.arrays, {"pieces": dict(result.about)})
    claims = [claim for outcome in outcomes for claim in outcome.claims]
    shown = together(outcomes)
    script, models = _resource("page.js"), _models(outcomes, scale)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    fills = {
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "css": _resource("page.css"),
        "js": script,
        "jump": "".join(_jump(figure) for figure in shown),
        "scale": _SCALES[scale.name],
        "tally": _tally(claims),
        "differences": _differences(differences),
        "provenance": _provenance(outcomes, scale),
        "verdicts": _verdict_filter(claims),
        "figures": "".join(f"<option>{escape(o.experiment.id)}</option>" for o in outcomes),
        "count": str(len(claims)),
        "claims": claims_table(claims),
        "contents": "".join(_contents(figure) for figure in shown),
        "missing": _missing(outcomes),
        "sections": "".join(section(figure, path.parent, scale, models) for figure in shown),
        "models": _MODELS.format("".join(models.values())) if models else "",
        "data": to_json({figure.name: [panel_data(p) for p in figure.panels] for figure in shown}),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: fills[found[1]], _resource("page.html"))
    store.write(path, page.encode())
    return path


def _resource(name: str) -> str:
    return files("mesascope.report").joinpath(name).read_text(encoding="utf-8")


# The head of the page.


def _tally(claims: Sequence[Mapping[str, Any]]) -> str:
    words = {
        "holds": "hold",
        "fails": "fail",
        "not testable at this preset": "not testable at this preset",
    }
    counts = {verdict: sum(claim["verdict"] == verdict for claim in claims) for verdict in SIGNS}
    return "".join(
        f'<div class="tally {anchor(verdict)}"><dt>{words[verdict]}</dt><dd>{count}</dd></div>'
        for verdict, count in counts.items()
    )


def _differences(differences: Sequence[str] | None) -> str:
    if differences is None:
        return ""
    if not differences:
        return (
            '<p class="agree">Verdicts and numbers agree with all that are committed to the repository.</p>'
        )
    what = (
        "One number or verdict is" if len(differences) == 1 else f"{len(differences)} numbers or verdicts are"
    )
    items = "".join(f"<li>{escape(line)}</li>" for line in differences)
    title = f"<p><b>{what} not as committed to the repository.</b></p>"
    return f'<div class="differ" role="alert">{title}<ul>{items}</ul></div>'


def _provenance(outcomes: Sequence[Outcome], scale: Scale) -> str:
    """What made the numbers; where pieces were made with different things, all of them."""
    made: dict[str, list[Mapping[str, Any]]] = {"recomputed": [], "stored": []}
    seconds = 0.0
    for outcome in outcomes:
        for piece, about in outcome.result.about.items():
            origin = origin_of(outcome, piece)
            seconds += about["seconds"] if origin == "recomputed" else 0.0
            made[origin] += [about["made"]] if "made" in about else []

    def all_of(origin: str, tell: Callable[[Mapping[str, Any]], str]) -> str:
        return "; ".join(escape(answer) for answer in dict.fromkeys(map(tell, made[origin])))

    rows = {
        "seeds": "five training seeds" if scale.seeds is None else f"{scale.seeds} per model recomputed",
        "recomputed": all_of("recomputed", lambda m: f"{m['started'][:10]}, on {m['device']}"),
        "stored": all_of("stored", lambda m: f"{m['started'][:10]}, on {m['device']}"),
        "program": all_of("recomputed", _program),
        "libraries": all_of(
            "recomputed",
            lambda m: ", ".join([f"Python {m['python']}", *map(" ".join, m["libraries"].items())]),
        ),
        "time": f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds",
    }
    return "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in rows.items() if text)


def _program(made: Mapping[str, Any]) -> str:
    commit = made["git"] and f", commit {made['git'][:10]}{'+' if made['git'].endswith('+') else ''}"
    return f"mesascope {made['mesascope']}{commit or ''}, source {made['source']}"


def _verdict_filter(claims: Sequence[Mapping[str, Any]]) -> str:
    names = {"holds": "hold", "fails": "fail", "not testable at this preset": "not testable"}
    buttons = [f'<button type="button" data-verdict="" aria-pressed="true">all <b>{len(claims)}</b></button>']
    for verdict, name in names.items():
        count = sum(claim["verdict"] == verdict for claim in claims)
        buttons.append(
            f'<button type="button" data-verdict="{verdict}" aria-pressed="false">'
            f'<i aria-hidden="true">{SIGNS[verdict]}</i> {name} <b>{count}</b></button>'
        )
    return "".join(buttons)


def _missing(outcomes: Sequence[Outcome]) -> str:
    shown = {outcome.experiment.id for outcome in outcomes}
    missing = [name for name in experiments.names() if name not in shown]
    if not missing:
        return ""
    return (
        f'<p class="missing">Not on this page: {escape(", ".join(missing))}. '
        "<code>mesascope list</code> shows what there is.</p>"
    )


def _jump(figure: Figure) -> str:
    name = figure.name
    worst = [
        v
        for v in ("fails", "not testable at this preset", "holds")
        if any(c["verdict"] == v for c in figure.claims)
    ]
    state = anchor(worst[0]) if worst else ""
    return f'<a href="#{anchor(name)}" class="{state}">{escape(name)}</a>'


def _contents(figure: Figure) -> str:
    return (
        f'<li><a class="name" href="#{anchor(figure.name)}">{escape(heading(figure.name))}</a>'
        f'<span class="shows">{escape(figure.experiment.shows)}</span>'
        f'<span class="signs">{"".join(sign(claim) for claim in figure.claims)}</span></li>'
    )


# The foot: every model.


def _models(outcomes: Sequence[Outcome], scale: Scale) -> dict[str, str]:
    """By the names that pieces know their models by: digest and configuration of each."""
    digests: dict[str, str] = {}
    for outcome in outcomes:
        for about in outcome.result.about.values():
            digests |= about.get("inputs", {})
    configs = _configs(digests, scale)
    return {
        name: f'<details id="{anchor("model", name)}"><summary><code>{escape(name)}</code> '
        f"<small>sha256 {escape(digests[name][:16])}</small></summary>"
        f"<pre>{escape(json.dumps(config, indent=1, ensure_ascii=False))}</pre></details>"
        for name, config in configs.items()
    }


def _configs(names: Iterable[str], scale: Scale) -> dict[str, Any]:
    """Of released models, from their files; of trained ones, from the preset that gives a run this very name."""
    names = sorted(names)
    trained = {}
    if any(name.startswith("runs/") for name in names):
        for lab in (Lab(SCALES["paper"]), Lab(scale)):
            for preset in PRESETS:
                for config in (lab.config(preset), lab.as_written().config(preset)):
                    trained[f"runs/{runs.path_of(config).name}"] = config
    found = {}
    for name in names:
        path = released.weights_path(name.removeprefix("released/"))
        if name in trained:
            found[name] = store.to_dict(trained[name])
        elif name.startswith("released/") and path.exists():
            found[name] = parse_json(store.read_metadata(path).get("config", "null"), path)
    return found
