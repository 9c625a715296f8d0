import numpy as np
import pytest

from mesascope.tasks import Constructed, Stacked, Standard

S = np.random.default_rng(0).standard_normal((2, 6, 3)).astype(np.float32)  # T = 5


def past(t):
    return S[:, t] if t >= 0 else np.zeros_like(S[:, 0])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (Standard(), lambda t: [past(t)]),
        (Constructed(slots=3), lambda t: [0 * past(t), past(t), past(t - 1)]),
        (Constructed(), lambda t: [0 * past(t), past(t), past(t), past(t - 1)]),
        (Stacked(k=1), lambda t: [past(t)]),
        (Stacked(k=4), lambda t: [past(t - i) for i in range(4)]),
        (Stacked(k=9), lambda t: [past(t - i) for i in range(9)]),
    ],
    ids=["standard", "three slots", "four slots", "stacked-1", "stacked-4", "stacked-9"],
)
def test_tokens(tokens, expected):
    examples = tokens(S)
    assert examples.tokens.shape == (2, 5, tokens.width(3))
    for t in range(5):
        assert np.array_equal(examples.tokens[:, t], np.concatenate(expected(t), -1))
    assert np.array_equal(examples.targets, S[:, 1:])
    assert examples.predicts.all()


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="slots: expected 3 or 4, got 5"):
        Constructed(slots=5)
    with pytest.raises(ValueError, match="k: expected at least 1, got 0"):
        Stacked(k=0)
