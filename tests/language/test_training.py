"""Training of language models against the plain formula; batches by step; runs that stop and go on."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope import runs
from mesascope.language import LanguageConfig, LanguageModelConfig, LanguageTrainer, cross_entropy
from mesascope.language.training import by_offset, compared, in_context_score
from mesascope.models import Block, Linear, Mesa, Normalize, Softmax
from mesascope.runs import Run, fit, load
from mesascope.store import StoreError, digest, from_dict, to_dict
from mesascope.tasks import AssociativeRecall
from mesascope.training import AdamW, Constant, TrainConfig
from tests.helpers import assert_close

pytestmark = pytest.mark.usefixtures("standard_promotion")

BLOCKS = (Block(mixer=Softmax(), heads=2, key_dim=4), Block(mixer=Linear(), heads=1, key_dim=4, dpfp=1))


def tiny(task, *, accumulate=1, dropout=0.2, blocks=BLOCKS, compute="float32", **train) -> LanguageConfig:
    sizes = dict(steps=7, batch_size=8, seeds=2, eval_every=3, eval_batches=2, eval_batch_size=8,
                 final_sequences=16)  # fmt: skip
    return LanguageConfig(
        name="tiny-lm",
        task=task,
        model=LanguageModelConfig(
            vocabulary=task.vocabulary, width=8, blocks=blocks, dropout=dropout, init_std=0.2, compute=compute
        ),
        train=TrainConfig(**sizes | dict(optimizer=AdamW(rate=Constant(peak=1e-2), b2=0.95)) | train),
        accumulate=accumulate,
    )


RECALL = AssociativeRecall(vocabulary=16, pairs=2, length=12)


def slopes(config, **changes):
    config = dataclasses.replace(config, **changes)
    trainer = LanguageTrainer(config)
    models = trainer.start().models
    batches = [trainer.batch(3, seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *a: np.stack(a), *batches)
    seeds, step = jnp.arange(2, dtype=jnp.uint32), jnp.full((), 3, jnp.int32)
    return trainer, models, stacked, jax.jit(trainer.gradient)(models, seeds, step, stacked)


def flat(tree):
    """As one vector: the gradient of a bias of keys is zero, and relative to that every rounding error is large."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_gradients_are_those_of_the_formula_however_a_batch_is_divided():
    """Four passes over a batch, with dropout, against one."""
    _, models, batches, (loss, found) = slopes(tiny(RECALL), accumulate=4)

    def plain(models):
        losses = []
        for i in range(2):
            model, batch = jax.tree.map(lambda a, i=i: a[i], (models, batches))
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(i), 1), 3)  # in step 3
            keys = jnp.stack([jax.random.fold_in(key, n) for n in range(8)])
            errors = cross_entropy(model(batch.tokens, key=keys), batch.targets)
            losses.append(jnp.sum(errors * batch.predicts) / jnp.sum(batch.predicts))
        return jnp.sum(jnp.stack(losses)), jnp.stack(losses)

    (_, expected), bars = jax.jit(jax.value_and_grad(plain, has_aux=True))(models)
    assert_close(loss, expected)
    assert_close(flat(found), flat(bars), scale=5)


SHARDED = """
import jax, numpy as np, jax.numpy as jnp
from mesascope.models import Block, Mesa
from tests.language.test_training import BLOCKS, RECALL, flat, slopes, tiny
jax.config.update("jax_numpy_dtype_promotion", "standard")
assert jax.local_device_count() == {devices}
config = tiny(RECALL, blocks=(BLOCKS[0], Block(mixer=Mesa(), heads=1, key_dim=4)))
trainer, models, batches, (loss, bars) = slopes(config, accumulate={accumulate})
state = trainer.advance(trainer.start(), 3).state
np.savez({out!r}, loss, flat(bars), *trainer.measure(state.models).values())
"""


@pytest.mark.slow
def test_eight_devices_are_as_good_as_one(tmp_path):
    found = []
    for devices, accumulate in ((1, 4), (8, 1)):
        out = str(tmp_path / f"{devices}.npz")
        code = SHARDED.format(devices=devices, accumulate=accumulate, out=out)
        flags = f"--xla_force_host_platform_device_count={devices}"
        env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        subprocess.run([sys.executable, "-c", code], check=True, env=env)
        with np.load(out) as file:
            found.append([file[name] for name in file.files])
    assert found[0][1].size > 1000
    for one, eight in zip(*found, strict=True):
        assert_close(eight.astype(np.float32), one.astype(np.float32), scale=10)


def test_a_batch_that_devices_cannot_share(monkeypatch):
    device = jax.local_devices()[0]
    monkeypatch.setattr(jax, "local_devices", lambda: [device] * 3)
    with pytest.raises(
        ValueError, match=r"train\.batch_size / accumulate: expected a multiple of the 3 devices"
    ):
        LanguageTrainer(tiny(RECALL)).gradient  # noqa: B018


def test_batches_depend_on_step_and_seed_alone(corpus):
    for config, data in ((tiny(corpus.task(16)), corpus.path), (tiny(RECALL), None)):
        one, other = LanguageTrainer(config, data), LanguageTrainer(config, data)
        for step in (0, 5, 1):
            one.batch(step, 0)
        a, b = one.batch(9, 1), other.batch(9, 1)
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        assert not np.array_equal(a.tokens, one.batch(9, 0).tokens)
        assert not np.array_equal(a.tokens, one.batch(8, 1).tokens)
        rows = one.batch(9, 1, slice(2, 5))
        assert all(np.array_equal(x[2:5], y) for x, y in zip(a, rows, strict=True))
        held_out = list(one.held_out(7, 2))
        assert 1 <= len(held_out) <= 2


def contents(run: Run) -> dict[str, bytes]:
    return {
        name: (run.path / name).read_bytes()
        for name in ("weights.safetensors", "metrics.jsonl", "result.json")
    }


def test_a_run_on_text(corpus, tmp_path):
    """What it leaves behind; stopped again and again or not at all, it ends with the same bits."""
    config = tiny(corpus.task(16), blocks=BLOCKS[:1])
    assert from_dict(to_dict(config), LanguageConfig) == config
    whole = fit(config, data=corpus.path, runs=tmp_path / "a")
    assert whole.finished
    assert whole.config == config
    assert str(corpus.path) not in (whole.path / "config.json").read_text()
    run = fit(config, data=corpus.path, runs=tmp_path / "b", max_minutes=0.0)
    assert not run.finished
    while not run.finished:
        run = fit(config, data=corpus.path, runs=tmp_path / "b", max_minutes=1e-4, save_seconds=0)
    assert contents(run) == contents(whole)

    metrics, result = whole.metrics(), whole.result
    assert metrics["step"].tolist() == [0, 3, 6, 7]
    assert metrics["eval_loss"].shape == metrics["in_context"].shape == metrics["accuracy"].shape == (4, 2)
    assert (metrics["eval_loss"][0] > metrics["eval_loss"][-1]).all()

    # The stored numbers are those of the stored weights.
    trainer, models = runs._trainer(config, str(corpus.path)), whole.models()
    loss = jax.jit(lambda model, b: cross_entropy(model(b.tokens), b.targets))
    everything = trainer.result(models, whole=True)
    assert set(result["parts"]) == set(everything["parts"]) == {"birds", "code"}
    for part, about in everything["parts"].items():
        errors = []
        for batch in corpus.in_order(4, 16, part=part):
            errors.append(np.asarray(loss(jax.tree.map(lambda a: a[1], models), batch))[batch.predicts])
        errors = np.concatenate(errors)
        assert about["tokens"] == len(errors) == corpus.parts()[part] - 1
        assert about["loss"][1] == pytest.approx(errors.mean(), rel=1e-5)
    early, late = result["at"]
    assert (early, late) == (1, 8)
    by_position = np.array(result["loss_by_position"])
    assert by_position.shape == (2, 16)
    np.testing.assert_allclose(result["in_context"], by_position[:, 7] - by_position[:, 0])
    np.testing.assert_allclose(result["loss"], by_position.mean(1))
    offsets = np.array(result["offsets"])
    assert offsets.shape == (2, 2, 16)

    model, again = load("tiny-lm", seed=1, runs=tmp_path / "a")
    assert again == config
    assert np.array_equal(model.embed, models.embed[1])


def test_the_corpus_is_meant_not_its_place(corpus, tmp_path):
    task = corpus.task(16)
    config = tiny(task)
    with pytest.raises(StoreError, match=f"needs the corpus {task.corpus}"):
        fit(config, runs=tmp_path)
    with pytest.raises(StoreError, match="another corpus than the one meant"):
        fit(tiny(dataclasses.replace(task, corpus="0123456789")), data=corpus.path, runs=tmp_path)
    assert digest(config) != digest(tiny(dataclasses.replace(task, corpus="0123456789")))
    with pytest.raises(ValueError, match=r"model\.vocabulary: the task has"):
        dataclasses.replace(config, task=RECALL)
    with pytest.raises(ValueError, match="accumulate: expected a divisor"):
        dataclasses.replace(config, accumulate=3)


@pytest.mark.slow
def test_recall_is_learned(tmp_path):
    """Two pairs of a small vocabulary, by a layer that shifts keys and a mesa-layer of one: well above chance."""
    block = Block(mixer=Mesa(), heads=2, key_dim=8, shift_keys=True, normalize=Normalize(of="features"))
    config = tiny(
        dataclasses.replace(RECALL, filler="blank"), blocks=(block,), dropout=0.0, steps=300, batch_size=32,
        eval_every=300, seeds=1,
    )  # fmt: skip
    run = fit(config, runs=tmp_path)
    assert run.metrics()["accuracy"][0] < 0.4
    assert run.result["accuracy"][0] > 0.8


def test_scores():
    assert compared(1024) == compared(2048) == (50, 500)
    assert compared(128) == (6, 62)
    loss = np.arange(2048.0)[None] * np.array([[-1.0], [2.0]])
    np.testing.assert_array_equal(in_context_score(loss), [-450, 900])
    attention = np.zeros((2, 5, 5), np.float32)
    attention[0] += np.eye(5, k=-1)
    attention[1] = np.tril(np.full((5, 5), 0.2))
    np.testing.assert_allclose(by_offset(jnp.asarray(attention), 3), [[0, 1, 0], [0.2, 0.2, 0.2]], atol=1e-6)
