"""Training of language models against the plain formula; batches by step; runs that stop and go on."""

import dataclasses
import io
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from rich.console import Console

from mesascope import runs
from mesascope.experiments.lab import SCALES, Lab
from mesascope.language import LanguageConfig, LanguageModelConfig, LanguageTrainer, cross_entropy
from mesascope.language.training import _programs, by_offset, compared, in_context_score
from mesascope.models import Block, Linear, Mesa, Normalize, Softmax
from mesascope.presets import preset
from mesascope.runs import Run, fit, load
from mesascope.store import StoreError, digest, from_dict, to_dict
from mesascope.tasks import AssociativeRecall
from mesascope.tasks.text import _Stream
from mesascope.training import FINAL, HELD_OUT, AdamW, Constant, TrainConfig, WarmupCosine, with_train
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
    offsets, maps = np.array(result["offsets"]), np.array(result["maps"])
    assert offsets.shape == (2, 2, 16)
    assert maps.shape == (2, 8, 8)
    # Over all 16 final sequences, not over the first batch.
    tokens = np.concatenate([batch.tokens for batch in trainer.held_out(FINAL, 2)])
    assert len(tokens) == 16
    seen = jax.jit(lambda model, t: model.trace(t)[1]["blocks.0.mixer.attention"])
    attention = np.asarray(seen(jax.tree.map(lambda a: a[0], models), jnp.asarray(tokens)))
    np.testing.assert_allclose(maps, attention[:, :, 8:, 8:].mean(0), atol=2e-5)
    np.testing.assert_allclose(offsets[0, :, 1], attention[:, :, 15, 14].mean(0), rtol=1e-4)

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
    with pytest.raises(ValueError, match=r"name: expected letters.*names a folder"):
        dataclasses.replace(config, name="../elsewhere")


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


@pytest.mark.slow
def test_one_program_for_all_rates_and_seeds():
    """Of a model; nothing is traced again for another rate, seed or number of steps."""
    config = tiny(RECALL, accumulate=2)
    found = []
    for rate, seed, steps in ((1e-2, 0, 7), (3e-3, 5, 7), (1e-2, 5, 9)):
        schedule = WarmupCosine(peak=rate, warmup=1, end=steps, floor=rate / 2)
        optimizer = dataclasses.replace(config.train.optimizer, rate=schedule)
        train = dataclasses.replace(config.train, optimizer=optimizer, first_seed=seed, steps=steps)
        trainer = LanguageTrainer(dataclasses.replace(config, name=f"at-{rate}", train=train))
        state = trainer.advance(trainer.start(), 2).state
        trainer.measure(state.models)
        programs = trainer._programs
        found.append([
            f._cache_size() for f in (programs.start, programs.step, programs.failed, programs.sums)
        ])  # fmt: skip
        # And yet each has its own rate: Adam's first step is as long as that.
        state = trainer.start()
        before = np.asarray(state.models.embed)
        moved = trainer.advance(state, 1).state.models.embed
        assert np.abs(moved - before).max() == pytest.approx(float(schedule(0)), rel=0.2, abs=1e-8)
        assert np.abs(trainer.advance(trainer.start(), 2).state.models.embed - before).max() > 0.5 * rate
    assert found[0] == found[1] == found[2]


def test_only_matrices_decay():
    """With a gradient of zero nothing else moves: neither scales nor biases nor λ."""
    block = Block(mixer=Mesa(), heads=2, key_dim=4, normalize=Normalize(of="features"))
    optimizer = AdamW(rate=Constant(peak=0.1), weight_decay=0.5)
    config = tiny(RECALL, blocks=(block,), dropout=0.0, optimizer=optimizer)
    trainer = LanguageTrainer(config)
    state = trainer.start()
    before = jax.tree.map(np.asarray, state.models)
    batch = jax.tree.map(lambda a: np.stack([a, a]), trainer.batch(0, 0))
    zero = jnp.zeros(2, jnp.float32), jax.tree.map(jnp.zeros_like, before)
    _programs.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mesascope.language.training._gradient", lambda *_: lambda *_: zero)
        after = trainer.step(state, jnp.full(2, -1, jnp.int32), batch).state.models
    _programs.cache_clear()
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        expected = 0.95 * old if old.ndim > 2 else old  # the first axis is that of seeds
        np.testing.assert_allclose(new, expected, rtol=1e-6, err_msg=jax.tree_util.keystr(path))


def test_a_run_in_bfloat16_goes_on_with_the_same_bits(tmp_path):
    config = tiny(RECALL, blocks=BLOCKS[1:], compute="bfloat16", accumulate=2)
    whole = fit(config, runs=tmp_path / "a")
    run = fit(config, runs=tmp_path / "b", max_minutes=0.0)
    while not run.finished:
        run = fit(config, runs=tmp_path / "b", max_minutes=1e-4, save_seconds=0)
    assert contents(run) == contents(whole)
    assert {leaf.dtype for leaf in jax.tree.leaves(whole.models())} == {jnp.dtype(jnp.float32)}


def test_a_choice_is_not_made_on_what_models_are_compared_on(corpus, monkeypatch):
    """Measured on what comes next in training: none of it was trained on, none is validation text."""
    read, windows = [], _Stream.windows
    monkeypatch.setattr(
        _Stream,
        "windows",
        lambda self, numbers, length: read.extend(numbers) or windows(self, numbers, length),
    )
    config = dataclasses.replace(
        tiny(corpus.task(16), first_seed=1000, seeds=1, steps=5), measured_on="train"
    )
    trainer = LanguageTrainer(config, corpus.path)
    assert (corpus.tokens("train") - 1) // 16 >= 5 * 8 + 4 * 8, "less than an epoch"
    for step in range(5):
        trainer.batch(step, 1000)
    list(trainer.held_out(HELD_OUT, 2))
    held_out = list(trainer.held_out(FINAL, 2))
    assert len(read) == len(set(read)) == 5 * 8 + 4 * 8
    expected = corpus.batch(7, 8, 16, seed=1000, split="train")
    assert np.array_equal(held_out[0].tokens, expected.tokens)

    config = dataclasses.replace(tiny(RECALL, first_seed=1000, seeds=1), measured_on="train")
    compared = LanguageTrainer(dataclasses.replace(config, measured_on="validation"))
    trainer = LanguageTrainer(config)
    (a, b), (c, d) = trainer.held_out(FINAL, 2), compared.held_out(FINAL, 2)
    assert len({p.tokens.tobytes() for p in (a, b, c, d, *(trainer.batch(i, 1000) for i in range(9)))}) == 13


def test_a_rate_that_would_rise_is_refused():
    optimizer = AdamW(rate=WarmupCosine(peak=1e-3, warmup=1, end=7, floor=2e-3))
    with pytest.raises(ValueError, match=r"train\.optimizer\.rate: it is to end \(floor = 0\.002\)"):
        tiny(RECALL, optimizer=optimizer)


def test_a_language_model_may_leave_its_weights_behind(corpus, tmp_path):
    """A run that has none, or has lost them, is finished all the same; one whose numbers are lost too is trained."""
    config = tiny(corpus.task(16), blocks=BLOCKS[:1])
    told = io.StringIO()
    console = Console(file=told, width=1000)
    run = fit(config, data=corpus.path, runs=tmp_path, weights=False)
    assert not list(run.path.glob("*.safetensors"))
    written = (run.path / "result.json").read_bytes()
    lab = Lab(SCALES["quick"], runs=tmp_path)
    lab.used(run)
    assert lab.still_holds(lab.about())
    fit(config, data=corpus.path, runs=tmp_path, console=console)
    assert "has no weights, only what was measured" in told.getvalue()
    assert (run.path / "result.json").read_bytes() == written
    with pytest.raises(StoreError):
        run.models()
    (run.path / "result.json").write_text("{")
    assert not lab.still_holds(lab.about())
    run = fit(config, data=corpus.path, runs=tmp_path, console=console)
    assert "It is trained again" in told.getvalue()
    assert (run.path / "result.json").read_bytes() == written
    assert (run.path / "weights.safetensors").exists()
    assert lab.still_holds(lab.about()), "of the same numbers, weights or not"
    with pytest.raises(ValueError, match="weights: only language models"):
        fit(with_train(preset("linear-1"), steps=1), runs=tmp_path, weights=False)


def test_the_whole_split_is_the_sum_of_its_parts(corpus):
    config = tiny(corpus.task(16), blocks=BLOCKS[1:], seeds=1)
    trainer = LanguageTrainer(config, corpus.path)
    found = trainer.result(trainer.start().models, whole=True)
    tokens = [part["tokens"] for part in found["parts"].values()]
    losses = [part["loss"][0] for part in found["parts"].values()]
    assert sum(tokens) == corpus.tokens("validation") - len(tokens)
    assert found["loss"][0] == pytest.approx(np.dot(tokens, losses) / sum(tokens), rel=1e-9)


def test_processes_read_disjoint_rows(monkeypatch):
    """Two processes of four devices each: together all rows of a batch, each once."""
    trainer = LanguageTrainer(tiny(RECALL))
    halves = []
    for process in range(2):
        indices = {i: (slice(2 * i, 2 * i + 2),) for i in range(4 * process, 4 * process + 4)}
        monkeypatch.setattr(
            NamedSharding, "addressable_devices_indices_map", lambda self, shape, found=indices: found
        )
        halves.append(trainer._rows(16))
    assert [*range(16)[halves[0]], *range(16)[halves[1]]] == list(range(16))


def test_smooth_scores():
    """Means of tokens 475 to 525 and 25 to 75; the loss at token t is at index t - 1, of the token after it."""
    loss = np.random.default_rng(0).standard_normal((2, 1024))
    expected = loss[:, 474:525].mean(-1) - loss[:, 24:75].mean(-1)
    np.testing.assert_allclose(in_context_score(loss, smooth=True), expected)
    np.testing.assert_allclose(in_context_score(loss[:, :8], smooth=True), loss[:, 3] - loss[:, 0])
