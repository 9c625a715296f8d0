"""Claims of the paper as numbers with thresholds, and what becomes of them.

The thresholds of those in `registered` were written down before there were results. A claim holds when the mean over
training seeds meets them all and at least four of five seeds do. One that fails is a finding, and is published as such.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from mesascope.analysis.results import student_t
from mesascope.experiments.registered import REGISTERED

ENOUGH = 0.8
"""Of the seeds must meet a threshold."""
ROUNDING = 1e-6
"""Of a number or its threshold: what another machine may make of it, where an interval has no width."""
SAME = 0.01
"""Of a number or its threshold, if that is larger: how far another machine may be off for the same model."""
Verdict = Literal["holds", "fails", "not testable at this preset"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Check:
    """One number and its threshold.

    Attributes:
        values: by seed; a single one for what has no seeds.
        authors: the number that follows from what the authors stored, where they did.
    """

    what: str
    values: Float[np.ndarray, " seed"]
    at_most: float | None = None
    at_least: float | None = None
    authors: float | None = None

    def __post_init__(self):
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"{self.what}: expected at_most or at_least.")

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def distance(self) -> float | None:
        """From the authors' number, as a part of it; of gaps |a / b - 1|, which may themselves be near zero, the
        difference."""
        if self.authors is None:
            return None
        return _number(self.mean - self.authors if "- 1|" in self.what else self.mean / self.authors - 1)

    def meets(self, value: Any) -> Any:
        """Whether numbers are within the threshold; what is not a number is not."""
        return value <= self.at_most if self.at_most is not None else value >= self.at_least

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Of the mean over training seeds, by Student's distribution; None for a single number."""
        n = len(self.values)
        if n < 2:
            return None
        half = student_t(level, n - 1) * float(np.std(self.values, ddof=1)) / math.sqrt(n)
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        sign, bound = ("≤", self.at_most) if self.at_most is not None else ("≥", self.at_least)
        return f"{self.what} {sign} {bound:g}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """A statement of the paper, in our words.

    Attributes:
        source: where in the paper.
        checks: all must be met. The first is the number that tables show.
        needs: "trained": says something about models at the end of their training, so that a shorter one cannot test
            it; "nothing": about algorithms and data.
        seeds: as many models of each kind it takes at least to test it.
        missing: what it speaks of too and nobody has measured yet: so long it is not tested.
    """

    id: str
    figure: str
    panel: str
    claim: str
    source: str
    checks: tuple[Check, ...]
    needs: Literal["trained", "nothing"] = "trained"
    seeds: int = 1
    missing: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        return "; ".join(str(check) for check in self.checks)

    def verdict(self, *, trained: bool) -> Verdict:
        """With models trained to the end or not."""
        seeds = max(len(check.values) for check in self.checks)
        if (self.needs == "trained" and not trained) or seeds < self.seeds or self.missing:
            return "not testable at this preset"
        met = np.all([np.broadcast_to(check.meets(check.values), (seeds,)) for check in self.checks], 0)
        mean = all(check.meets(check.mean) for check in self.checks)
        return "holds" if mean and met.sum() >= math.ceil(ENOUGH * seeds) else "fails"

    def to_dict(self, *, trained: bool) -> dict[str, Any]:
        """As `claims.json` has it."""
        first = self.checks[0]
        return {
            "id": self.id,
            "figure": self.figure,
            "panel": self.panel,
            "claim": self.claim + (f" (not measured yet: {', '.join(self.missing)})" if self.missing else ""),
            "source": self.source,
            "expected": self.expected,
            "ours": _number(first.mean),
            "interval": _interval(first),
            "verdict": self.verdict(trained=trained),
            "registered": self.id in set().union(*REGISTERED.values()),
            "authors": first.authors,
            "distance": first.distance,
            "checks": [
                {
                    "what": check.what,
                    "at_most": check.at_most,
                    "at_least": check.at_least,
                    "authors": check.authors,
                    "distance": check.distance,
                    "ours": _number(check.mean),
                    "interval": _interval(check),
                    "by_seed": [_number(v) for v in check.values],
                }
                for check in self.checks
            ],
        }


def differences(
    found: Sequence[Mapping[str, Any]],
    committed: Sequence[Mapping[str, Any]],
    *,
    whole: Collection[str] = (),
    same_models: bool = True,
) -> list[str]:
    """Where claims differ from the committed ones: another verdict, a mean that has left its interval, or a number of
    one model that is not what it was.

    Args:
        same_models: whether they are about the very models of the committed ones, not about such as were trained anew.
        whole: figures of which all is there, so that no committed claim may be missing.
    """
    before, lines = {claim["id"]: claim for claim in committed}, []
    there = {claim["id"] for claim in found}
    for name, then in before.items():
        if then["figure"] in whole and name not in there:
            lines.append(f"{name}: it is committed, and not made any more.")
    for claim in found:
        name, then = claim["id"], before.get(claim["id"])
        if then is None:
            continue
        if then["verdict"] != claim["verdict"]:
            lines.append(f"{name}: {claim['verdict']}, committed is: {then['verdict']}.")
        if len(claim["checks"]) != len(then["checks"]):
            numbers = f"{len(claim['checks'])} numbers, committed are {len(then['checks'])}"
            lines.append(f"{name}: {numbers}: it is about other models.")
            continue
        for now, was in zip(claim["checks"], then["checks"], strict=True):
            lines += [f"{name}: {now['what']} {line}" for line in _moved(now, was, same_models)]
    return lines


def _moved(now: Mapping[str, Any], was: Mapping[str, Any], same_models: bool) -> list[str]:
    """What is not as it was in a number: the mean, and those of single models where these are the same."""
    value, old = now["ours"], was["ours"]
    if value is None or old is None:
        return [] if value is old else [f"is {value}, committed is {old}."]
    limit = was["at_least"] if was["at_most"] is None else was["at_most"]
    if was["interval"] is not None:
        rounding = ROUNDING * max(abs(old), abs(limit))
        low, high = was["interval"][0] - rounding, was["interval"][1] + rounding
        if not low <= value <= high:
            return [f"is {value:.4g}, outside of {low:.4g} to {high:.4g}."]
    if was["interval"] is not None and not (same_models and len(now["by_seed"]) == len(was["by_seed"])):
        return []
    pairs = zip(now["by_seed"], was["by_seed"], strict=False)
    far = [(a, b) for a, b in pairs if a is None or b is None or abs(a - b) > SAME * max(abs(b), abs(limit))]
    return [f"of one model is {_told(a)}, committed is {_told(b)}." for a, b in far if a is not b][:1]


def _told(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.4g}"


def _number(value: Any) -> float | None:
    """JSON has no NaN."""
    return float(value) if np.isfinite(value) else None


def _interval(check: Check) -> list[float] | None:
    interval = check.interval()
    return None if interval is None or not np.isfinite(interval).all() else [float(end) for end in interval]
