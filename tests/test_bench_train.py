"""The benchmark of training measures what it says."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mesascope import bench_train
from mesascope.bench_train import against_torch, flops_per_step, host_share, step_milliseconds
from mesascope.presets import preset
from tests.test_training import tiny

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Clock:
    """Time passes only while somebody trains: so many seconds for each step of a seed, and the first step is slow."""

    def __init__(self):
        self.now, self.order = 0.0, []

    def trainer(self, config):
        seeds, first = config.train.seeds, [7.0]

        def advance(state, steps):
            self.now += 0.003 * seeds * steps + (first.pop() if first else 0.0)
            self.order.append(seeds)
            return SimpleNamespace(state=state + steps)

        return SimpleNamespace(start=lambda: 0, advance=advance)


def test_what_is_measured(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(bench_train, "over_the_cores", clock.trainer)
    monkeypatch.setattr(bench_train, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    measured = step_milliseconds({"one": tiny(seeds=1), "two": tiny(seeds=2)}, repeats=3)
    np.testing.assert_allclose(measured["one"], [3.0] * 3)
    np.testing.assert_allclose(measured["two"], [6.0] * 3)
    assert clock.order[-6:] == [1, 2] * 3
    timing = {"host_share": 0.25, "seconds": 1.0}
    monkeypatch.setattr(bench_train, "fit", lambda config, runs: SimpleNamespace(timing=timing))
    assert host_share(tiny()) == 0.25


def test_steps_and_shares():
    one, two = tiny(seeds=1), tiny(seeds=2)
    measured = step_milliseconds({"one": one, "two": two}, repeats=2)
    assert {name: samples.shape for name, samples in measured.items()} == {"one": (2,), "two": (2,)}
    # Counted by hand: 2 sequences of 4 tokens; queries, keys, values 8 → 2 each and output 2 → 8, each with its
    # gradients (those for the tokens themselves are not needed); the attention map and its use 4 × 4 × 2, with theirs.
    projections = 2 * 4 * (3 * 8 * 2) * 2 + 2 * 4 * (2 * 8) * 3
    attention = 2 * 2 * (4 * 4 * 2) * 3
    assert flops_per_step(one) == 2 * (projections + attention)
    assert flops_per_step(two) == 2 * flops_per_step(one)


def test_operations_do_not_depend_on_the_device(monkeypatch):
    """Kernels that a GPU would take are not counted, but what they compute is."""
    config = preset("hybrid-mesa")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=2, seeds=1))
    here = flops_per_step(config)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert flops_per_step(config) == here
    assert jax.default_backend() == "gpu"


@pytest.mark.parametrize("variant", ["as_run", "as_written"])
def test_pytorch_makes_the_same_steps(variant):
    """An oracle that shares no code: the model, its gradient and AdamW, by the losses of two steps."""
    torch = pytest.importorskip("torch")
    config = preset("softmax-3", variant)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=4))
    compared = against_torch(config, repeats=1)
    assert compared["losses_apart"] < 1e-5
    assert np.isfinite(compared["ratio"])
    assert torch.backends.cuda.matmul.allow_tf32 == config.model.tf32
