"""The training engine against plain numpy, and the promises of running many seeds as one program."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mesascope import training
from mesascope.presets import preset
from mesascope.training import AdamW, Config, Constant, Trainer, WarmupCosine, optimize
from tests.helpers import assert_close

pytestmark = pytest.mark.usefixtures("standard_promotion")


def tiny(**train) -> Config:
    """Two-dimensional sequences of four tokens and one head: seconds to compile, milliseconds to run."""
    config = preset("linear-1")
    (block,) = config.model.blocks
    block = dataclasses.replace(block, heads=1, key_dim=2)
    model = dataclasses.replace(
        config.model, token_dim=8, output_dim=2, masked=4, blocks=(block,), init_std=0.3
    )
    sizes = dict(
        batch_size=2, seeds=2, eval_every=5, eval_batches=2, eval_batch_size=4, final_sequences=8, steps=12
    )
    return dataclasses.replace(
        config,
        name="tiny",
        task=dataclasses.replace(config.task, state_dim=2, length=4),
        model=model,
        train=dataclasses.replace(config.train, **sizes | train),
    )


def adamw_in_numpy(gradient, x, config: AdamW, steps: int):
    """Textbook AdamW with clipping, in float64."""
    m, v, path = np.zeros_like(x), np.zeros_like(x), []
    for step in range(steps):
        g = gradient(x)
        if config.clip is not None:
            norm = np.linalg.norm(g)
            g = (
                np.clip(g, -config.clip, config.clip)
                if config.clip_by == "entry"
                else g * min(1, config.clip / norm)
            )
        m = config.b1 * m + (1 - config.b1) * g
        v = config.b2 * v + (1 - config.b2) * g**2
        direction = (m / (1 - config.b1 ** (step + 1))) / (
            np.sqrt(v / (1 - config.b2 ** (step + 1))) + config.eps
        )
        x = x - float(config.rate(step)) * (direction + config.weight_decay * x)
        path.append(x)
    return x


@pytest.mark.parametrize("clip_by", ["entry", "global_norm"])
def test_optimize_is_textbook_adamw(clip_by):
    a = np.diag([1.0, 3.0, 10.0])
    config = AdamW(
        rate=WarmupCosine(peak=0.1, warmup=5, end=20, floor=0.01), weight_decay=0.1, clip=0.7, clip_by=clip_by
    )
    start = np.array([1.0, -2.0, 0.5])
    expected = adamw_in_numpy(lambda x: a @ x, start, config, steps=30)
    got, losses = optimize(
        lambda x, _: 0.5 * x @ jnp.asarray(a) @ x,
        jnp.asarray(start),
        lambda key: None,
        steps=30,
        optimizer=config,
        key=jax.random.key(0),
    )
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)
    assert losses.shape == (30,)
    assert losses[0] == 0.5 * start @ a @ start


def test_optimize_samples_anew_in_every_step():
    """Stochastic gradient descent on noisy regressions finds the mean of what the sampler draws."""
    got, _ = optimize(
        lambda mean, x: 0.5 * jnp.mean((x - mean) ** 2),
        jnp.zeros(()),
        lambda key: 3 + jax.random.normal(key, (64,)),
        steps=400,
        optimizer=optax.sgd(0.05),
        key=jax.random.key(1),
    )
    # The average of about 20 batches of 64: standard deviation .02.
    assert abs(float(got) - 3) < 0.15


def test_schedules():
    schedule = WarmupCosine(peak=8e-4, warmup=1000, end=30_000)
    known = optax.warmup_cosine_decay_schedule(0.0, 8e-4, 1000, 30_000, 1e-5)
    for step in (0, 1, 999, 1000, 1001, 12_345, 30_000, 50_000):
        np.testing.assert_allclose(float(schedule(step)), float(known(step)), rtol=1e-4)
    assert float(Constant(peak=1e-4)(7)) == np.float32(1e-4)
    with pytest.raises(ValueError, match="warmup: expected less than end = 100, got 1000"):
        WarmupCosine(end=100)


def test_the_loss_is_the_mean_of_half_squared_errors():
    trainer = Trainer(tiny())
    state = trainer.start()
    batch = trainer.config.examples(jax.random.key(5), 6)
    model = jax.tree.map(lambda leaf: leaf[0], state.models)
    error = np.asarray(model(batch.tokens)) - np.asarray(batch.targets)
    by_position = 0.5 * (error**2).sum(-1).mean(0)
    assert_close(trainer.loss_by_position(model, batch), by_position)
    assert_close(trainer._loss(model, batch), by_position.mean())


def test_seeds_side_by_side_are_seeds_alone():
    together = Trainer(tiny(seeds=3))
    state = together.advance(together.start(), 6).state
    for seed in range(3):
        alone = Trainer(tiny(seeds=1, first_seed=seed))
        one = alone.advance(alone.start(), 6).state
        for a, b in zip(jax.tree.leaves(state.models), jax.tree.leaves(one.models), strict=True):
            assert_close(a[seed], b[0], scale=10)
    leaf = jax.tree.leaves(state.models)[0]
    assert np.abs(leaf[0] - leaf[1]).max() > 1e-3


@pytest.mark.parametrize(("tokens", "parts"), [(1, 6), (9, 3), (13, 2), (1000, 1)])
def test_parts_of_a_batch_are_the_batch(monkeypatch, tokens, parts):
    """However a batch is cut to stay near the cores: the losses and gradients are those of all of it."""
    monkeypatch.setattr(training, "_TOKENS_IN_A_PART", tokens)
    trainer = Trainer(tiny(seeds=2))
    batch = jax.vmap(lambda key: trainer.config.examples(key, 6))(jax.random.split(jax.random.key(5)))
    assert training._parts(6, batch.tokens.shape[2]) == parts
    models = trainer.start().models
    found = trainer._slopes(models, batch)
    for seed in range(2):
        model, one = jax.tree.map(lambda leaf: leaf[seed], (models, batch))  # noqa: B023
        expected = jax.value_and_grad(trainer._loss)(model, one)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(a[seed], b, scale=10)


def test_no_number_of_steps_compiles_again_or_changes_a_bit(monkeypatch):
    traced = 0
    sample = Config.examples

    def counted(self, key, batch_size):
        nonlocal traced
        traced += 1
        return sample(self, key, batch_size)

    monkeypatch.setattr(Config, "examples", counted)
    trainer = Trainer(tiny())
    whole = trainer.advance(trainer.start(), 6).state
    after_first = traced
    state = trainer.start()
    for steps in (1, 3, 2):
        state = trainer.advance(state, steps).state
    assert traced == after_first
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(state), strict=True):
        assert np.array_equal(a, b)
    assert int(state.step) == 6


def test_training_lowers_the_held_out_loss():
    config = tiny(steps=300, batch_size=32, eval_batch_size=128, final_sequences=128)
    optimizer = AdamW(rate=Constant(peak=1e-2), weight_decay=0.0)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, optimizer=optimizer))
    trainer = Trainer(config)
    state = trainer.start()
    before = np.asarray(trainer.evaluate(state.models))
    state, _, failed = trainer.advance(state, 300)
    after = np.asarray(trainer.evaluate(state.models))
    assert (np.asarray(failed) == -1).all()
    assert before.shape == after.shape == (2, 4)
    # Nothing can be known about the first successor; later ones can be learned in context.
    assert (after[:, -1] < 0.8 * before[:, -1]).all()


def test_a_loss_that_is_not_finite_is_noticed_at_its_step():
    config = tiny()
    optimizer = AdamW(rate=Constant(peak=1e30), clip=None)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, optimizer=optimizer))
    trainer = Trainer(config)
    first = trainer.advance(trainer.start(), 1)
    # The first loss is finite and so are the weights after it (about 1e30); the second loss is not.
    assert (np.asarray(first.failed) == -1).all()
    assert (np.asarray(trainer.advance(first.state, 3).failed) == 1).all()


@pytest.mark.slow
def test_batches_are_cut_over_the_cores_unless_a_step_calls_lapack(tmp_path):
    """A process whose CPU is divided: the same losses as undivided, but for rounding."""
    program = """
import sys
import jax
import jax.numpy as jnp
from dataclasses import replace
from mesascope.runs import fit
from mesascope.tasks import Dynamics, dynamics
from mesascope.training import Trainer, divide_cpu, over_the_cores
from tests.test_training import tiny
divide_cpu()
assert len(jax.devices()) == 3
cut = over_the_cores(tiny(batch_size=6, eval_batch_size=6, final_sequences=6))
assert cut.mesh.size == 3
assert over_the_cores(tiny(batch_size=4, eval_batch_size=2, final_sequences=2)).mesh.size == 2
assert over_the_cores(tiny(batch_size=5, eval_batch_size=4, final_sequences=4)).mesh is None
sizes = dict(batch_size=6, eval_batch_size=6, final_sequences=6)
contracting = over_the_cores(replace(tiny(**sizes), task=Dynamics.contracting(state_dim=2, length=4)))
assert contracting.mesh.size == 3
for pair in zip((cut, contracting), (Trainer(cut.config), Trainer(contracting.config)), strict=True):
    for trainer in pair:
        state = trainer.advance(trainer.start(), 20).state
        print(*state.loss_sum, *trainer.measure(state.models)["eval_loss"])
by_lapack = lambda key, dim, count: jnp.linalg.qr(jax.random.normal(key, (count, dim, dim)))[0]
dynamics.haar = by_lapack
assert over_the_cores(replace(tiny(**sizes), task=Dynamics.linear(state_dim=2, length=3))).mesh is None
run = fit(cut.config, runs=sys.argv[1], max_minutes=0.0)
assert run.provenance["precision"] == "float32 on 3 devices"
"""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "3", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [np.array(line.split(), float) for line in done.stdout.splitlines()]
    for several, one in zip(lines[::2], lines[1::2], strict=True):
        np.testing.assert_allclose(several, one, rtol=1e-5)
