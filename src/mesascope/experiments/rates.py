"""One search for a learning rate, with the same budget for every model that is compared."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mesascope.experiments.lab import OutOfTimeError
from mesascope.language import LanguageConfig, with_rate
from mesascope.runs import DivergedError, RunError, fit

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
PART = 0.1
"""Each rate is tried for a tenth of the steps, its schedule shortened to that, with one seed that is not used again."""
SEED = 1000
SAVE_SECONDS = 300.0
"""Between checkpoints, which for a language model may be gigabytes."""


def search_rates(
    config: LanguageConfig,
    *,
    rates: Sequence[float] = RATES,
    part: float = PART,
    data: str | Path | None = None,
    runs: str | Path = "runs",
    max_minutes: float | None = None,
    console: Console | None = None,
) -> dict[float, float]:
    """The held-out loss after a short training with each rate; infinite where that diverged.

    Args:
        part: of the steps.
        max_minutes: for each.

    Raises:
        OutOfTimeError: one has not been finished; the same call goes on.
    """
    found = {}
    for rate in rates:
        trial = with_rate(config, rate, steps=max(2, round(part * config.train.steps)))
        train = replace(trial.train, seeds=1, first_seed=SEED)
        trial = replace(trial, name=f"{config.name}-rate", train=train)
        try:
            run = fit(
                trial,
                data=data,
                runs=runs,
                max_minutes=max_minutes,
                save_seconds=SAVE_SECONDS,
                console=console,
            )
        except DivergedError:
            found[rate] = math.inf
            continue
        if not run.finished:
            raise OutOfTimeError(f"stopped while trying the rate {rate:g} for {config.name}.")
        found[rate] = run.result["loss"][0]
    return found


def best(losses: dict[float, float]) -> float:
    """The rate with the lowest loss."""
    rate = min(losses, key=lambda r: losses[r])
    if not math.isfinite(losses[rate]):
        raise RunError(f"training diverged at every rate tried: {', '.join(f'{r:g}' for r in losses)}.")
    return rate
