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
    # Two models do twice the arithmetic, and a matrix product alone is 2·(4 tokens)·8·2 per sequence and projection.
    assert flops_per_step(two) == pytest.approx(2 * flops_per_step(one), rel=0.05)
    assert flops_per_step(one) > 3 * 2 * 2 * (4 * 8 * 2) * 4


@pytest.mark.parametrize("variant", ["as_run", "as_written"])
def test_pytorch_makes_the_same_steps(variant):
    """An oracle that shares no code: the model, its gradient and AdamW, by the losses of two steps."""
    pytest.importorskip("torch")
    config = preset("softmax-3", variant)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=4))
    compared = against_torch(config, repeats=1)
    assert compared["losses_apart"] < 1e-5
    assert np.isfinite(compared["ratio"])
