from functools import cache, partial

import jax
import numpy as np
import pytest

from mesascope.tasks import AssociativeRecall


@cache
def compiled(task, batch_size):
    return jax.jit(partial(task.sample, batch_size=batch_size))


def sample(task, batch_size, seed=0):
    return compiled(task, batch_size)(jax.random.key(seed))


@pytest.mark.parametrize(
    "task",
    [
        AssociativeRecall(),
        AssociativeRecall(vocabulary=34, pairs=16, length=64, filler="blank"),
        AssociativeRecall(vocabulary=101, pairs=3, length=25, power=1.0),
    ],
    ids=["default", "full", "odd"],
)
def test_sequences_token_by_token(task):
    """Read as a person would: pairs into a dictionary, then every answer looked up."""
    passages = sample(task, 20)
    tokens, targets, predicts, segments = map(np.asarray, passages)
    assert tokens.shape == (20, task.length)
    assert {a.dtype for a in (tokens, targets, segments)} == {np.dtype("int32")}
    assert not segments.any()
    for row, wanted, asked in zip(tokens, targets, predicts, strict=True):
        pairs = dict(row[: 2 * task.pairs].reshape(-1, 2).tolist())
        assert len(pairs) == len(set(pairs.values())) == task.pairs
        assert min(pairs) >= 1
        assert max(pairs) < task.vocabulary // 2 <= min(pairs.values())
        assert max(pairs.values()) < task.vocabulary
        assert not asked[: 2 * task.pairs].any()
        assert not (np.flatnonzero(asked) % 2).any()
        assert sorted(row[asked].tolist()) == sorted(pairs)
        assert [pairs[k] for k in row[asked].tolist()] == wanted[asked].tolist()
        rest = row[2 * task.pairs :][~asked[2 * task.pairs :]]
        if task.filler == "blank":
            assert not rest.any()
        elif rest.size > 20:
            assert np.unique(rest).size > 10
    again = sample(task, 20)
    assert all(np.array_equal(a, b) for a, b in zip(passages, again, strict=True))
    assert not np.array_equal(sample(task, 20, seed=1).tokens, tokens)


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_gaps(power):
    """First and second gaps against their probabilities, summed up by hand."""
    task, draws = AssociativeRecall(vocabulary=64, pairs=2, length=20, power=power), 20_000
    tokens, _, predicts, _ = map(np.asarray, sample(task, draws))
    p = np.arange(1, 9) ** (power - 1.0)
    p /= p.sum()
    second = [sum(p[j] * p[i] / (1 - p[j]) for j in range(8) if j != i) for i in range(8)]
    for pair, expected in enumerate([p, second]):
        at = np.argmax(predicts & (tokens == tokens[:, 2 * pair, None]), 1)
        seen = np.bincount((at - 4) // 2, minlength=8) / draws
        assert np.abs(seen - expected).max() < 5 * np.sqrt(0.25 / draws)


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match=r"pairs: expected 1 to 16, .* of the 64 tokens; got 17"):
        AssociativeRecall(pairs=17)
    with pytest.raises(ValueError, match=r"vocabulary: expected at least 18.*got 16"):
        AssociativeRecall(vocabulary=16)
    with pytest.raises(ValueError, match="filler: expected 'random' or 'blank', got 'noise'"):
        AssociativeRecall(filler="noise")  # pyright: ignore[reportArgumentType]
