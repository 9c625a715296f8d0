"""The benchmark of training measures what it says."""

import dataclasses

import numpy as np
import pytest

from mesascope.bench_train import against_torch, flops_per_step, host_share, step_milliseconds
from mesascope.presets import preset
from tests.test_training import tiny

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_steps_and_shares():
    one, two = tiny(seeds=1), tiny(seeds=2)
    measured = step_milliseconds({"one": one, "two": two}, repeats=2)
    assert {name: len(samples) for name, samples in measured.items()} == {"one": 2, "two": 2}
    assert all((samples > 0).all() for samples in measured.values())
    assert 0 <= host_share(two) <= 1
    # Counted by hand: 2 sequences of 4 tokens; queries, keys, values 8 → 2 each and output 2 → 8, each with its
    # gradients (those for the tokens themselves are not needed); the attention map and its use 4 × 4 × 2, with theirs.
    projections = 2 * 4 * (3 * 8 * 2) * 2 + 2 * 4 * (2 * 8) * 3
    attention = 2 * 2 * (4 * 4 * 2) * 3
    assert flops_per_step(one) == 2 * (projections + attention)
    assert flops_per_step(two) == 2 * flops_per_step(one)


@pytest.mark.parametrize("variant", ["as_run", "as_written"])
def test_pytorch_makes_the_same_steps(variant):
    """An oracle that shares no code: the model, its gradient and AdamW, by the losses of two steps."""
    pytest.importorskip("torch")
    config = preset("softmax-3", variant)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=4))
    compared = against_torch(config, repeats=1)
    assert compared["losses_apart"] < 1e-5
    assert np.isfinite(compared["ratio"])
