"""Put trained models into `results/weights`, one seed of each, and say how large they are.

python scripts/release.py linear-1 softmax-7 [--runs runs] [--seed 0] [--half]
"""

from dataclasses import dataclass

import tyro

from mesascope import released
from mesascope.runs import find


@dataclass(frozen=True, kw_only=True)
class Release:
    """Which models, and from where."""

    names: tyro.conf.Positional[tuple[str, ...]]
    """Names of runs."""
    runs: str = "runs"
    """Directory of runs, or a URL."""
    seed: int = 0
    """Which of the trained models."""
    half: bool = False
    """As bfloat16."""


def main(options: Release) -> None:
    for name in options.names:
        run = find(name, runs=options.runs)
        path = released.weights_path(run.config.name)
        released.write_model(
            path, run.models(), run.config, made=run.provenance, seed=options.seed, half=options.half
        )
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(tyro.cli(Release))
