"""Verdicts, and what counts as a difference from the committed ones."""

import json

import numpy as np
import pytest

from mesascope.experiments.claims import Check, Claim, differences


def claim(*checks, **more):
    return Claim(
        id="x-1", figure="x", panel="A", claim="it is small", source="Fig. 0", checks=tuple(checks), **more
    )


def small(*values, bound=1.0, **more):
    return Check(what="size", values=np.array(values), at_most=bound, **more)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.5, 0.6, 0.7, 0.8, 0.9), "holds"),
        ((0.5, 0.6, 0.7, 0.8, 1.1), "holds"),  # four of five, and the mean
        ((0.5, 0.6, 0.7, 1.1, 1.1), "fails"),  # the mean, but three of five
        ((0.9, 0.9, 0.9, 0.9, 1.9), "fails"),  # four of five, but not the mean
        ((0.5, 0.5, 0.5, 0.5, np.nan), "fails"),
        ((1.0,), "holds"),
    ],
)
def test_the_mean_and_four_of_five(values, verdict):
    assert claim(small(*values)).verdict(trained=True) == verdict


def test_all_checks_must_be_met_by_the_same_seeds():
    first, second = small(2, 0, 0, 0, 0), small(0, 2, 0, 0, 0)
    assert claim(first).verdict(trained=True) == claim(second).verdict(trained=True) == "holds"
    assert claim(first, second).verdict(trained=True) == "fails"
    large = Check(what="size", values=np.array([3.0]), at_least=2.0)
    assert claim(small(0, 0, 0, 0, 0), large).verdict(trained=True) == "holds"


def test_what_is_not_trained_cannot_be_tested():
    assert claim(small(0.5)).verdict(trained=False) == "not testable at this preset"
    assert claim(small(0.5), needs="nothing").verdict(trained=False) == "holds"


def test_as_json():
    found = json.loads(
        json.dumps(claim(small(1.0, 2.0, 3.0, bound=2.5, authors=1.6)).to_dict(trained=True), allow_nan=False)
    )
    assert {
        "id",
        "figure",
        "panel",
        "claim",
        "source",
        "expected",
        "ours",
        "interval",
        "verdict",
    } <= found.keys()
    assert found["expected"] == "size ≤ 2.5"
    assert found["ours"] == 2.0
    # Student's 97.5% quantile with two degrees of freedom is 4.3027.
    np.testing.assert_allclose(found["interval"], 2 + np.array([-1, 1]) * 4.3027 / np.sqrt(3), rtol=1e-4)
    np.testing.assert_allclose(found["distance"], 0.25)
    gap = Check(what="|loss over theirs - 1|", values=np.array([0.03]), at_most=0.1, authors=0.001)
    np.testing.assert_allclose(gap.distance, 0.029)
    assert small(1.0).distance is None
    assert claim(small(np.nan)).to_dict(trained=True)["ours"] is None
    with pytest.raises(ValueError, match="expected at_most or at_least"):
        Check(what="size", values=np.ones(1))


def test_differences():
    committed = [claim(small(1.0, 1.1, 0.9, 1.0, 1.0, bound=2.0)).to_dict(trained=True)]
    low, high = committed[0]["interval"]

    def found(*values):
        return differences([claim(small(*values, bound=2.0)).to_dict(trained=True)], committed)

    assert found(1.0) == found(low) == found(high) == []
    assert "outside of" in found(high + 0.01)[0]
    assert "fails, committed is: holds" in found(3.0)[0]
    assert "is None" in found(np.nan)[-1]
    untested = differences([claim(small(1.0, bound=2.0)).to_dict(trained=False)], committed)
    assert "not testable at this preset, committed is: holds" in untested[0]
    # A single model has one percent of room, of its number or of the threshold; and any what rounding may do.
    single = [claim(small(1.0, bound=2.0)).to_dict(trained=True)]
    assert differences([claim(small(1.019, bound=2.0)).to_dict(trained=True)], single) == []
    assert differences([claim(small(1.021, bound=2.0)).to_dict(trained=True)], single)
    narrow = [claim(small(1.0, 1.0, 1.0, bound=2.0)).to_dict(trained=True)]
    assert differences([claim(small(1.000001, bound=2.0)).to_dict(trained=True)], narrow) == []
    assert differences([claim(small(1.0001, bound=2.0)).to_dict(trained=True)], narrow)
    # One model of five, where the mean stays in its interval.
    moved = [claim(small(1.05, 1.1, 0.9, 1.0, 1.0, bound=2.0)).to_dict(trained=True)]
    assert differences(moved, committed) == ["x-1: size of one model is 1.05, committed is 1."]
    assert differences(moved, committed, same_models=False) == []
    assert differences([], committed) == []
    assert differences([], committed, whole=["x"]) == ["x-1: it is committed, and not made any more."]
    nothing = [claim(small(1e-14)).to_dict(trained=True)]
    assert differences([claim(small(3e-14)).to_dict(trained=True)], nothing) == []
