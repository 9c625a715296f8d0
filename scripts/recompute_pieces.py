"""Compute pieces of published figures, all else of which stays as it is published, and publish the figures.

    python scripts/recompute_pieces.py fig4/mesa_optimizer fig7/partial_stacked --runs runs
    python scripts/recompute_pieces.py si-tokens/full-mesa --made report    # what `reproduce --preset paper` made

At paper scale: of algorithms and data, and of models that are trained again where they are not among the runs. Pieces
that were made on another machine, with `--out report`, are taken as they are.
"""

import shutil
import tempfile
from pathlib import Path

import tyro
from rich.console import Console

from mesascope import experiments, released
from mesascope.experiments import results
from mesascope.experiments.lab import SCALES, Lab, tuned_folder
from mesascope.experiments.reproduce import compute_piece, piece_path, publish, redraw


def main(names: tyro.conf.Positional[list[str]], runs: Path = Path("runs"), made: Path | None = None) -> None:
    """FIGURE/PIECE …"""
    console, scale = Console(), SCALES["paper"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        lab = Lab(scale, runs=runs, console=console)
        tuned = tuned_folder(runs, scale.name).path
        tuned.mkdir(parents=True, exist_ok=True)
        for path in (released.directory() / "tuned").iterdir():
            if not (tuned / path.name).exists():
                shutil.copy(path, tuned)
        again = [name.split("/") for name in names]
        for figure in dict.fromkeys(figure for figure, _ in again):
            published = released.directory() / "arrays" / figure
            arrays, about = (
                results.read(published) if results.files(published)[0].exists() else ({}, {"pieces": {}})
            )
            for piece, of in about["pieces"].items():
                if [figure, piece] not in again:
                    part = {name: arrays[name] for name in of["arrays"]}
                    results.write(piece_path(figure, piece, out / scale.name), part, of)
        for figure, piece in again:
            there = None if made is None else piece_path(figure, piece, made / scale.name)
            if there is not None:
                arrays, about = results.read(there)
                results.write(piece_path(figure, piece, out / scale.name), arrays, about)
                continue
            _, about = compute_piece(experiments.experiment(figure), piece, lab, out / scale.name)
            console.print(f"{figure}/{piece}: {about['seconds']:.0f} s", highlight=False)
        figures = list(dict.fromkeys(figure for figure, _ in again))
        outcomes = redraw(figures, scale=scale, out=out, console=console)
        publish(outcomes, released.directory(), runs)


if __name__ == "__main__":
    tyro.cli(main)
