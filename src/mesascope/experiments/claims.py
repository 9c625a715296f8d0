"""Claims of the paper as numbers with thresholds, and what becomes of them.

The thresholds were written down before there were results. A claim holds when the mean over training seeds meets them
all and at least four of five seeds do. One that fails is a finding, and is published as such.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from mesascope.analysis.results import student_t

ENOUGH = 0.8
"""Of the seeds must meet a threshold."""
ROUNDING = 1e-6
"""Of a number or its threshold: what another machine may make of it, where an interval has no width."""
Verdict = Literal["holds", "fails", "not testable at this preset"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Check:
    """One number and its threshold.

    Attributes:
        values: by seed; a single one for what has no seeds.
    """

    what: str
    values: Float[np.ndarray, " seed"]
    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self):
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"{self.what}: expected at_most or at_least.")

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

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
        authors: that number, from what the authors stored, where they did.
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
    authors: float | None = None
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
            "authors": self.authors,
            "distance": None if not self.authors else _number(first.mean / self.authors - 1),
            "checks": [
                {
                    "what": check.what,
                    "at_most": check.at_most,
                    "at_least": check.at_least,
                    "ours": _number(check.mean),
                    "interval": _interval(check),
                    "by_seed": [_number(v) for v in check.values],
                }
                for check in self.checks
            ],
        }


def differences(
    found: Sequence[Mapping[str, Any]], committed: Sequence[Mapping[str, Any]], *, tolerance: float = 0.02
) -> list[str]:
    """Where claims differ from the committed ones: another verdict, or a number that has left its interval.

    Args:
        tolerance: relative, for numbers without an interval.
    """
    before, lines = {claim["id"]: claim for claim in committed}, []
    for claim in found:
        then = before.get(claim["id"])
        if then is None or claim["verdict"] == "not testable at this preset":
            continue
        if then["verdict"] != claim["verdict"]:
            lines.append(f"{claim['id']}: {claim['verdict']}, committed is: {then['verdict']}.")
        if len(claim["checks"]) != len(then["checks"]):
            numbers = f"{len(claim['checks'])} numbers, committed are {len(then['checks'])}"
            lines.append(f"{claim['id']}: {numbers}: it is about other models.")
            continue
        for now, was in zip(claim["checks"], then["checks"], strict=True):
            value, old = now["ours"], was["ours"]
            if value is None or old is None:
                if value is not old:
                    lines.append(f"{claim['id']}: {now['what']} is {value}, committed is {old}.")
                continue
            limit = was["at_least"] if was["at_most"] is None else was["at_most"]
            rounding = ROUNDING * max(abs(old), abs(limit))
            room = tolerance * abs(old)
            low, high = was["interval"] or (old - room, old + room)
            low, high = low - rounding, high + rounding
            if not low <= value <= high:
                lines.append(
                    f"{claim['id']}: {now['what']} is {value:.4g}, outside of {low:.4g} to {high:.4g}."
                )
    return lines


def _number(value: Any) -> float | None:
    """JSON has no NaN."""
    return float(value) if np.isfinite(value) else None


def _interval(check: Check) -> list[float] | None:
    interval = check.interval()
    return None if interval is None or not np.isfinite(interval).all() else [float(end) for end in interval]
