"""One search for a learning rate, with the same budget for every model that is compared."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mesascope import provenance, store
from mesascope.experiments.lab import Lab, OutOfTimeError
from mesascope.language import LanguageConfig, with_rate
from mesascope.runs import DivergedError, Run, RunError, fit, path_of
from mesascope.training import WarmupCosine

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
FURTHER = 2
"""While the best is the first or the last, rates beyond it are tried, so many at most: one rule for every model."""
PART = 0.1
"""Each rate is tried for a tenth of the steps, its schedule shortened to that, with one seed that is not used again."""
WARMUP = 0.25
"""Of these steps at most are for warming up; else as many as in the whole training."""
SEED = 1000
HALVINGS = 3
"""So often the best rate may be halved, if the whole training diverges."""
SAVE_SECONDS = 300.0
"""Between checkpoints, which for a language model may be gigabytes."""


def train_at_best(lab: Lab, config: LanguageConfig) -> tuple[Run, dict[float, float]]:
    """Trained at the best rate, or at half of it, a quarter, … where it diverges; and the losses of the rates tried. At
    the scale "smoke", where no rate matters, none is.

    Raises:
        OutOfTimeError: the same call goes on.
    """
    losses = {config.train.optimizer.rate.peak: math.nan}
    if lab.scale.name != "smoke":
        losses = search_rates(
            config, data=lab.data, runs=lab.runs, deadline=lab.deadline, console=lab.console
        )
        config = with_rate(config, best(losses))
    for halving in range(HALVINGS + 1):
        lab.check_time()
        try:
            run = fit_once(
                config, data=lab.data, runs=lab.runs, max_minutes=lab.minutes_left, console=lab.console
            )
        except DivergedError:
            if halving == HALVINGS:
                raise
            config = with_rate(config, config.train.optimizer.rate.peak / 2)
            continue
        if not run.finished:
            raise OutOfTimeError(f"stopped while training {config.name}.")
        lab.used(run)
        return run, losses
    raise AssertionError


def fit_once(config: LanguageConfig, *, runs: str | Path, **options: Any) -> Run:
    """`runs.fit` without keeping weights. What has diverged is known to, and not trained again by the same source."""
    mark = path_of(config, runs) / "diverged.json"
    known = {"source": provenance.source_hash()}
    if mark.exists() and store.read_json(mark) == known:
        raise DivergedError(f"{config.name} has diverged before ({mark}).")
    try:
        return fit(config, runs=runs, save_seconds=SAVE_SECONDS, weights=False, **options)
    except DivergedError:
        store.write_json(mark, known)
        raise


def search_rates(
    config: LanguageConfig,
    *,
    rates: Sequence[float] = RATES,
    part: float = PART,
    data: str | Path | None = None,
    runs: str | Path = "runs",
    deadline: float | None = None,
    console: Console | None = None,
) -> dict[float, float]:
    """The loss after a short training with each rate, on sequences that come next in training; infinite where that
    diverged. What models are compared on has no part in it.

    Args:
        rates: from the smallest to the largest.
        part: of the steps.
        deadline: when to stop, by `time.monotonic`.

    Raises:
        OutOfTimeError: one has not been finished; the same call goes on.
    """

    def loss(rate: float) -> float:
        left = None if deadline is None else (deadline - time.monotonic()) / 60
        if left is not None and left <= 0:
            raise OutOfTimeError(f"stopped before trying the rate {rate:g} for {config.name}.")
        trial = trial_of(config, rate, part)
        try:
            run = fit_once(trial, data=data, runs=runs, max_minutes=left, console=console)
        except DivergedError:
            return math.inf
        if not run.finished:
            raise OutOfTimeError(f"stopped while trying the rate {rate:g} for {config.name}.")
        return run.result["loss"][0]

    found = {rate: loss(rate) for rate in rates}
    for _ in range(FURTHER):
        if (further := beyond(found)) is not None:
            found[further] = loss(further)
    if beyond(found) is not None and console is not None:
        console.print(
            f"{config.name}: the best rate tried is {best(found):g}, at the edge: a better one may lie beyond.",
            style="yellow",
            highlight=False,
        )
    return dict(sorted(found.items()))


def trial_of(config: LanguageConfig, rate: float, part: float = PART) -> LanguageConfig:
    """The short training that tries a rate."""
    steps = max(2, round(part * config.train.steps))
    schedule = config.train.optimizer.rate
    whole = schedule.warmup if isinstance(schedule, WarmupCosine) else 0
    trial = with_rate(config, rate, steps=steps, warmup=max(1, min(whole, int(WARMUP * steps))))
    train = replace(trial.train, seeds=1, first_seed=SEED)
    return replace(trial, name=f"{config.name}-rate", train=train, measured_on="train")


def beyond(losses: Mapping[float, float]) -> float | None:
    """The next rate, as far from the best as its neighbour, if that is the smallest or the largest; else None."""
    rates = sorted(losses)
    rate = min(rates, key=lambda r: losses[r])
    if len(rates) < 2 or rate not in (rates[0], rates[-1]) or not math.isfinite(losses[rate]):
        return None
    return float(f"{rate * rate / (rates[1] if rate == rates[0] else rates[-2]):.1g}")


def best(losses: Mapping[float, float]) -> float:
    """The rate with the lowest loss."""
    rate = min(losses, key=lambda r: losses[r])
    if not math.isfinite(losses[rate]):
        raise RunError(f"training diverged at every rate tried: {', '.join(f'{r:g}' for r in losses)}.")
    return rate
