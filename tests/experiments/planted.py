"""Results with planted numbers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mesascope.experiments import experiment
from mesascope.experiments.results import Named, Result


def planted(figure: str, arrays: Mapping[str, Any]) -> Result:
    named = {
        name: Named(np.asarray(values, float), ("axis",) * np.ndim(values)) for name, values in arrays.items()
    }
    return Result(figure=figure, arrays=named, origin=dict.fromkeys(named, "stored"))


def verdicts(figure: str, arrays: Mapping[str, Any]) -> dict[str, str]:
    claims = experiment(figure).claims(planted(figure, arrays))
    assert len({claim.id for claim in claims}) == len(claims)
    return {claim.id: claim.verdict(trained=True) for claim in claims}


def flips(figure: str, good: Mapping[str, Any], bad: Mapping[str, Any], *ids: str) -> None:
    """All claims hold for `good`; with `bad` in their place, these fail and no others."""
    found = verdicts(figure, {**good, **bad})
    assert {name for name, verdict in found.items() if verdict == "fails"} == set(ids)
