"""What the repository says is what its arrays give."""

import json

import pytest

from mesascope import released
from mesascope.experiments.reproduce import of_the_repository, read_claims

FIGURES = sorted(path.stem for path in (released.directory() / "arrays").glob("*.json"))


@pytest.mark.parametrize("figure", FIGURES)
def test_claims_are_those_of_the_arrays(figure):
    """In their order too, and with nothing left over from claims that are no longer made."""
    found = of_the_repository(figure).claims
    committed = [
        claim for claim in read_claims(released.directory() / "claims.json") if claim["figure"] == figure
    ]
    assert json.loads(json.dumps(list(found))) == committed


def test_every_claim_has_its_arrays():
    assert {claim["figure"] for claim in read_claims(released.directory() / "claims.json")} <= set(FIGURES)
