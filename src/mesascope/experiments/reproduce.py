"""`mesascope reproduce`: compute what is missing, draw it, hold it to the claims."""

import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mesascope import experiments, mirror, provenance, released, store
from mesascope.experiments import results
from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import ENOUGH, differences
from mesascope.experiments.lab import (
    SCALES,
    Lab,
    NoTextError,
    NotReleasedError,
    OutOfTimeError,
    Scale,
    tuned_folder,
)
from mesascope.experiments.panels import Curves, Drawing, Maps, Origin, Panel, draw
from mesascope.experiments.results import Arrays, Result
from mesascope.untrusted import StoreError, check

MAPPINGS = 30_000
STYLES = {"holds": "green", "fails": "red", "not testable at this preset": "dim"}


class NothingStoredError(StoreError):
    """A figure of which neither models nor arrays come with the repository."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """A figure that has been computed."""

    experiment: Experiment
    result: Result
    panels: tuple[Panel, ...]
    claims: tuple[dict[str, Any], ...]


def reproduce(
    names: Sequence[str] = (),
    *,
    scale: Scale = SCALES["released"],
    out: Path = Path("report"),
    run_directory: str | Path = "runs",
    data: Path | None = None,
    fresh: bool = False,
    max_minutes: float | None = None,
    console: Console,
) -> list[Outcome]:
    """Compute figures, as far as they are not there yet; draw them; print and write their claims.

    Args:
        names: of figures; none for all (at the scale "released": all that are). FIGURE/PIECE is one piece of a figure
            that is drawn in parts: of its others, those that are there are drawn too.
        out: directory of what is made; each scale has its own folder in it.
        run_directory: where trained models are kept: a directory or a URL.
        data: folder of a prepared corpus, for language models.
        fresh: compute finished pieces again (trained models stay).
        max_minutes: stop cleanly after so many.

    Raises:
        OutOfTimeError: what was finished is kept, and the same call goes on.
    """
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    lab = Lab(scale, runs=run_directory, data=data, deadline=deadline, console=console)
    folder = out / scale.name
    outcomes = []
    asked = asked_for(names)
    left_out = [name for name in asked if scale.from_released and not names and not _stored(name)[0]]
    for name, pieces in asked.items():
        if name in left_out:
            continue
        experiment = experiments.experiment(name)
        began = time.monotonic()
        console.print(f"[bold]{name}[/] {escape(experiment.shows)}", highlight=False)
        result = compute(experiment, lab, folder, pieces, fresh=fresh)
        outcomes.append(_outcome(experiment, result, scale))
        draw_to(outcomes[-1], folder / "figures")
        console.print(f"  {time.monotonic() - began:.0f} s", style="dim", highlight=False)
    found = [claim for outcome in outcomes for claim in outcome.claims]
    store.write_json(folder / "claims.json", found)
    print_claims(found, console)
    if left_out:
        console.print(
            f"left out, for the repository has no results of them: {', '.join(left_out)}. "
            "`--preset quick` or `--preset paper` computes them.",
            style="dim", markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    return outcomes


def asked_for(names: Sequence[str]) -> dict[str, list[str]]:
    """Figures, and which of their pieces; all, where none is named."""
    found: dict[str, list[str]] = {}
    for name in names or experiments.names():
        figure, _, piece = experiments.figure_of(name).partition("/")
        pieces = found.setdefault(figure, [])
        if piece:
            experiment = experiments.experiment(figure)
            if not experiment.in_parts or piece not in experiment.pieces:
                there = (
                    ", ".join(experiment.pieces) if experiment.in_parts else "none: it is computed as a whole"
                )
                raise ValueError(f"{name}: there is no such piece. {figure} has {there}.")
            pieces.append(piece)
    return found


def compute(
    experiment: Experiment, lab: Lab, folder: Path, pieces: Sequence[str] = (), *, fresh: bool = False
) -> Result:
    """All arrays of a figure: kept pieces, new ones, and where models are not released, stored ones.

    Args:
        pieces: those to compute, if not all are; of the others, kept ones are read.
    """
    stored, stored_about = _stored(experiment.id) if lab.scale.from_released else ({}, {})
    new: Arrays = {}
    old: Arrays = {}
    about = {}
    for name in experiment.pieces:
        if pieces and name not in pieces and not is_kept(experiment, name, lab, folder):
            continue
        try:
            found, about[name] = compute_piece(experiment, name, lab, folder, fresh=fresh)
            new |= found
        except NoTextError:
            raise NothingStoredError(
                f"{experiment.id}: language models need text. `mesascope lm prepare` makes a folder of it, "
                f"`mesascope reproduce {experiment.id} --preset {lab.scale.name} --data FOLDER` reads it."
            ) from None
        except NotReleasedError as missing:
            part = stored_about.get("pieces", {}).get(name)
            if part is None and experiment.in_parts and stored:
                continue
            if part is None:
                raise NothingStoredError(
                    f"{experiment.id}: the repository has neither {missing} nor the arrays of the piece {name!r}. "
                    "`--preset quick` or `--preset paper` computes them."
                ) from None
            old |= {n: stored[n] for n in part["arrays"]}
            about[name] = part
    old |= {n: stored[n] for n in new if n in stored}
    arrays, origin = results.spliced(old, new)
    return Result(figure=experiment.id, arrays=arrays, origin=origin, about=about)


def compute_piece(
    experiment: Experiment, name: str, lab: Lab, folder: Path, *, fresh: bool = False
) -> tuple[Arrays, dict[str, Any]]:
    """The arrays of one piece, kept or new, and how they were made."""
    path = piece_path(experiment.id, name, folder)
    if not fresh and (found := _kept(path, lab)) is not None:
        return found
    lab.check_time()
    forget_programs()
    lab.inputs = {}
    began = time.monotonic()
    arrays = experiment.pieces[name](lab)
    about = {
        "arrays": list(arrays),
        **lab.about(),
        "seconds": round(time.monotonic() - began, 1),
        "made": provenance.made_with() | {"figures": provenance.source_hash(provenance.OF_FIGURES)},
    }
    results.write(path, arrays, about)
    return arrays, about


def forget_programs(most: int = MAPPINGS) -> None:
    """Drop all compiled programs if this process has more mappings of memory than these: each program takes some, and
    where Linux allows no more (65,530, as a rule) XLA aborts. What is needed again is compiled again."""
    try:
        mappings = Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:  # not Linux, which counts them
        return
    if mappings > most:
        jax.clear_caches()
        gc.collect()


def is_kept(experiment: Experiment, name: str, lab: Lab, folder: Path) -> bool:
    """Whether a piece was finished before, at this scale and from these very models."""
    return _kept(piece_path(experiment.id, name, folder), lab) is not None


def piece_path(figure: str, name: str, folder: Path) -> Path:
    """Of a piece's arrays, but for how the files end."""
    figure, name = experiments.experiment(figure).shared.get(name, (figure, name))
    return folder / "pieces" / figure / name


def redraw(names: Sequence[str], *, scale: Scale, out: Path, console: Console) -> list[Outcome]:
    """Draw figures again from what was computed, and compute nothing."""
    outcomes = []
    for name in dict.fromkeys(map(experiments.figure_of, names or experiments.names())):
        experiment = experiments.experiment(name)
        stored, stored_about = _stored(name) if scale.from_released else ({}, {})
        arrays, about = {}, dict(stored_about.get("pieces", {}))
        for piece in experiment.pieces:
            path = piece_path(name, piece, out / scale.name)
            if results.files(path)[1].exists():
                new, about[piece] = results.read(path)
                arrays |= new
        whole, origin = results.spliced(stored, arrays)
        if missing := [piece for piece in experiment.pieces if piece not in about]:
            told = (
                f"{name} has not been computed, or not all of it ({', '.join(missing)} missing): "
                f"mesascope reproduce {name} --preset {scale.name}"
            )
            if not (experiment.in_parts and about):
                raise StoreError(told)
            console.print(told, style="yellow", markup=False, highlight=False, soft_wrap=True)
        result = Result(figure=name, arrays=whole, origin=origin, about=about)
        outcomes.append(_outcome(experiment, result, scale))
        for path in draw_to(outcomes[-1], out / scale.name / "figures"):
            console.print(str(path), highlight=False)
    return outcomes


def publish(outcomes: Sequence[Outcome], directory: Path, run_directory: str | Path) -> None:
    """Into `results/`: arrays, what was tuned for them, figures and claims. Claims of other figures stay; all
    are in the order of the figures.

    What was tuned for models is published for those that are released, the first of each; of others, stored arrays
    serve.

    Raises:
        StoreError: weights are released that are not of the run that something was tuned for.
    """
    for outcome in outcomes:
        for scale, name in _tuned_for(outcome.result):
            path = tuned_folder(run_directory, scale).fetch(f"{name}.safetensors")
            about = json.loads(store.read_metadata(path)["about"])
            arrays = store.read_named(path)
            if about["by_seed"]:
                about["weights"] = about.get("weights") or _weights_of(
                    about["models"], directory, run_directory
                )
                if not about["weights"]:
                    continue
                arrays = {n: a[:1] for n, a in arrays.items()}
            store.write_arrays(directory / "tuned" / path.name, arrays, about=json.dumps(about))
        about = {"pieces": dict(outcome.result.about)}
        results.write(directory / "arrays" / outcome.experiment.id, outcome.result.arrays, about)
        draw_to(outcome, directory / "figures")
    path = directory / "claims.json"
    figures = {outcome.experiment.id for outcome in outcomes}
    there = [claim for claim in read_claims(path) if claim["figure"] not in figures]
    there += [claim for outcome in outcomes for claim in outcome.claims]
    order = [*experiments.names(), *(claim["figure"] for claim in there)]
    store.write_json(path, sorted(there, key=lambda claim: order.index(claim["figure"])))


def _weights_of(
    trained: Mapping[str, str], directory: Path, run_directory: str | Path
) -> dict[str, str] | None:
    """Digests of the released weights of trained models, by name; None if some are not released."""
    found = {}
    for run in (name.removeprefix("runs/") for name in trained if name.startswith("runs/")):
        name = run.rpartition("-")[0]
        path = directory / "weights" / f"{name}.safetensors"
        if not path.exists():
            return None
        there = store.read_named(path)
        models = store.read_named(mirror.at(run_directory, run).fetch("weights.safetensors"))
        # Weights may be released at half the precision.
        if there.keys() != models.keys() or not all(
            np.array_equal(leaf, models[at][:1].astype(leaf.dtype)) for at, leaf in there.items()
        ):
            raise StoreError(
                f"{path} is not the first model of {run}, for which something was tuned that is to be published: "
                f"release that first (python scripts/release.py {name})."
            )
        found[name] = store.read_metadata(path)["sha256"]
    return found


def _tuned_for(result: Result) -> list[tuple[str, str]]:
    """Scales and names of what was tuned here, not released."""
    return sorted(
        {
            (about["scale"]["name"], name.removeprefix("tuned/"))
            for about in result.about.values()
            for name in about["inputs"]
            if name.startswith("tuned/") and not about["scale"]["from_released"]
        }
    )


def of_the_repository(name: str) -> Outcome:
    """A figure as the arrays that come with the repository have it, and its claims.

    Raises:
        StoreError: there are none.
    """
    result = _as_stored(name, *results.read(released.directory() / "arrays" / name))
    return _outcome(experiments.experiment(name), result, SCALES["paper"])


def against_committed(outcomes: Sequence[Outcome], *, same_models: bool = True) -> list[str] | None:
    """Where the claims are not what the repository says; None if it says nothing about any of them."""
    committed = read_claims(released.directory() / "claims.json")
    found = [claim for outcome in outcomes for claim in outcome.claims]
    if not {claim["id"] for claim in found} & {claim["id"] for claim in committed}:
        return None
    all_there = [o for o in outcomes if not o.experiment.pieces.keys() - o.result.about.keys()]
    return differences(
        found,
        committed,
        whole=[outcome.experiment.id for outcome in all_there],
        same_models=same_models,
    )


def read_claims(path: Path) -> list[dict[str, Any]]:
    """Claims as `claims.json` has them."""
    number = (float, None)
    one = {"what": str, "ours": number, "interval": ([float], None), "at_most": number, "at_least": number,
           "by_seed": [number]}  # fmt: skip
    form = [{"id": str, "figure": str, "verdict": str, "checks": [one]}]
    return check(store.read_json(path), form, path) if path.exists() else []


def draw_to(outcome: Outcome, folder: Path) -> list[Path]:
    """The figure as PNG and PDF; a drawing as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    drawn = [panel for panel in outcome.panels if isinstance(panel, Curves | Maps)]
    for panel in outcome.panels:
        if isinstance(panel, Drawing):
            paths.append(folder / f"{outcome.experiment.id}.svg")
            store.write(paths[-1], panel.svg.encode())
    if drawn:
        import matplotlib.pyplot as plt

        figure = draw(drawn)
        for kind in ("png", "pdf"):
            paths.append(folder / f"{outcome.experiment.id}.{kind}")
            # No date, so that the same numbers make the same bytes.
            figure.savefig(paths[-1], metadata={"CreationDate": None} if kind == "pdf" else None, dpi=120)
        plt.close(figure)
    return paths


def print_claims(claims: Sequence[dict[str, Any]], console: Console) -> None:
    """The table of claims, each with the first of its numbers; and all numbers that are not as claimed."""
    table = Table(title="claims", box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("", overflow="fold", max_width=14)
    table.add_column("claim", ratio=3)
    table.add_column("ours (interval over seeds)", ratio=2)
    table.add_column("verdict", max_width=12)
    for claim in claims:
        ours = "–" if claim["ours"] is None else f"{claim['ours']:.4g}"
        if claim["interval"]:
            ours += f" ({claim['interval'][0]:.4g} to {claim['interval'][1]:.4g})"
        threshold, *others = [_threshold(number) for number in claim["checks"]]
        ours += f", expected {threshold}"
        if others:
            ours += f" and {len(others)} more"
        if claim["authors"] is not None:
            ours += f", authors {claim['authors']:.4g}"
        said = f"{escape(claim['claim'])} [dim]({escape(claim['source'])})[/]"
        verdict = f"[{STYLES[claim['verdict']]}]{claim['verdict']}[/]"
        table.add_row(claim["id"], said, escape(ours), verdict)
    console.print(table)
    for claim in claims:
        if claim["verdict"] == "fails":
            for line in _misses(claim):
                console.print(f"[red]{claim['id']}[/] {escape(line)}", highlight=False)


def _threshold(number: Mapping[str, Any]) -> str:
    return f"≥ {number['at_least']:g}" if number["at_most"] is None else f"≤ {number['at_most']:g}"


def _misses(claim: Mapping[str, Any]) -> list[str]:
    """Numbers that do not meet their thresholds: in the mean or for too many seeds; if there is none, for any seed."""

    def met(number: Mapping[str, Any], value: float | None) -> bool:
        if value is None:
            return False
        return value >= number["at_least"] if number["at_most"] is None else value <= number["at_most"]

    missed, partly = [], []
    for number in claim["checks"]:
        seeds = [met(number, value) for value in number["by_seed"]]
        value = "not a number" if number["ours"] is None else f"{number['ours']:.4g}"
        several = f" (met by {sum(seeds)} of {len(seeds)} seeds)" if len(seeds) > 1 else ""
        line = f"{number['what']}: {value}, expected {_threshold(number)}{several}"
        if not met(number, number["ours"]) or sum(seeds) < ENOUGH * len(seeds):
            missed.append(line)
        elif not all(seeds):
            partly.append(line)
    return missed or partly


def _outcome(experiment: Experiment, result: Result, scale: Scale) -> Outcome:
    claims = tuple(claim.to_dict(trained=scale.trained) for claim in experiment.claims(result))
    return Outcome(
        experiment=experiment, result=result, panels=tuple(experiment.panels(result)), claims=claims
    )


def _stored(name: str) -> tuple[Arrays, dict[str, Any]]:
    path = released.directory() / "arrays" / name
    return results.read(path) if results.files(path)[1].exists() else ({}, {})


def _as_stored(figure: str, arrays: Arrays, about: Mapping[str, Any]) -> Result:
    origin: dict[str, Origin] = dict.fromkeys(arrays, "stored")
    return Result(figure=figure, arrays=arrays, origin=origin, about=about.get("pieces", {}))


def _kept(path: Path, lab: Lab) -> tuple[Arrays, dict[str, Any]] | None:
    """A piece that was finished before, at this scale and from these very models."""
    if not results.files(path)[1].exists():
        return None
    try:
        arrays, about = results.read(path)
    except StoreError as damaged:
        if lab.console is not None:
            lab.console.print(f"{escape(str(damaged))} It is computed again.", highlight=False)
        return None
    return (arrays, about) if lab.still_holds(about) else None


__all__ = ["OutOfTimeError", "Outcome", "against_committed", "publish", "redraw", "reproduce"]
