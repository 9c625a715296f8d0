"""What the repository says is what its arrays give."""

import json

import pytest

from mesascope import experiments, released
from mesascope.experiments import results
from mesascope.experiments.lab import SCALES
from mesascope.experiments.reproduce import _outcome, read_claims
from mesascope.experiments.results import Result

FIGURES = sorted(path.stem for path in (released.directory() / "arrays").glob("*.json"))


@pytest.mark.parametrize("figure", FIGURES)
def test_claims_are_those_of_the_arrays(figure):
    """In their order too, and with nothing left over from claims that are no longer made."""
    arrays, about = results.read(released.directory() / "arrays" / figure)
    origin = dict.fromkeys(arrays, "stored")
    result = Result(figure=figure, arrays=arrays, origin=origin, about=about["pieces"])  # pyright: ignore[reportArgumentType]
    found = _outcome(experiments.experiment(figure), result, SCALES["paper"]).claims
    committed = [
        claim for claim in read_claims(released.directory() / "claims.json") if claim["figure"] == figure
    ]
    assert json.loads(json.dumps(list(found))) == committed


def test_every_claim_has_its_arrays():
    assert {claim["figure"] for claim in read_claims(released.directory() / "claims.json")} <= set(FIGURES)
