r"""Training of language models, with the functions that `runs.fit` asks for.

$$\min_\theta\; -\frac1T\sum_t \log p_\theta(w_{t+1} \mid w_{1:t})$$

Batches come from the host, by step and seed, so that a run that goes on sees what it would have seen. Seeds are trained
one after the other within a step; the sequences of a batch are divided among devices, and on each of them among
`accumulate` passes. A process reads only those sequences that its own devices work on.

Weight decay is for matrices (vectors of tokens included): scales of LayerNorms, biases and λ do not decay. A step is
compiled without its learning rate and its seeds, so that one program serves all rates that are tried for a model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from mesascope.language.model import LanguageModel, LanguageModelConfig, cross_entropy
from mesascope.models import Softmax
from mesascope.tasks import AssociativeRecall, Passages
from mesascope.tasks.text import ALL, Corpus, Text
from mesascope.training import (
    FINAL,
    HELD_OUT,
    AdamW,
    Advanced,
    Constant,
    TrainConfig,
    TrainState,
    WarmupCosine,
    check_name,
    everywhere,
)

EARLY, LATE, OF = 50, 500, 1024
"""The in-context score is the loss at token 500 minus that at token 50; in a shorter context than 1024, at the tokens
that are as far along. Tokens are counted from 1, and the loss at one is that of the prediction made there, after
reading it: of the next token."""
AROUND = 25
"""A second score, with less noise, compares means over so many tokens on both sides of these."""
OFFSETS = 32
"""Attention of the first layer is told by distance up to this."""
ATTENTION_SEQUENCES = 256
"""It is a mean over so many, as in the paper."""
BLOCK = 64
"""Its maps show so many tokens, from this one on: all of them have as many before them."""


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """One experiment with a language model.

    Attributes:
        name: what people call it; part of the run's directory name.
        accumulate: passes over a batch whose gradients are summed up: so many times less memory.
        measured_on: "validation" is for what models are compared by. "train": sequences that come next in training
            after those that were trained on (new ones, as long as these are less than an epoch), for choices to be
            made, such as of a learning rate, without a look at what models are compared on.
    """

    name: str
    task: Text | AssociativeRecall
    model: LanguageModelConfig
    train: TrainConfig
    accumulate: int = 1
    measured_on: Literal["validation", "train"] = "validation"

    def __post_init__(self):
        check_name(self.name)
        if self.measured_on not in ("validation", "train"):
            raise ValueError(f"measured_on: expected 'validation' or 'train', got {self.measured_on!r}.")
        rate = self.train.optimizer.rate
        if isinstance(rate, WarmupCosine) and not max(rate.start, rate.floor) <= rate.peak:
            raise ValueError(
                f"train.optimizer.rate: it is to end (floor = {rate.floor:g}) and to start ({rate.start:g}) at no more "
                f"than its peak, {rate.peak:g}. `--rate` and `with_rate` change all three."
            )
        if self.model.vocabulary != self.task.vocabulary:
            raise ValueError(
                f"model.vocabulary: the task has {self.task.vocabulary} tokens, got {self.model.vocabulary}."
            )
        if self.accumulate < 1 or self.train.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate: expected a divisor of train.batch_size = {self.train.batch_size}, "
                f"got {self.accumulate}."
            )


class Sums(NamedTuple):
    """Over sequences, by position: losses, right guesses, and how many predictions there were."""

    loss: Float[Array | np.ndarray, "*seed time"]
    right: Float[Array | np.ndarray, "*seed time"]
    predictions: Float[Array | np.ndarray, "*seed time"]

    def mean(self, values: Array | np.ndarray) -> Float[np.ndarray, " *seed"]:
        """Over all predictions."""
        return np.sum(values, -1) / np.sum(self.predictions, -1)

    @property
    def loss_by_position(self) -> Float[np.ndarray, "*seed time"]:
        """NaN where nothing is predicted."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.loss) / np.asarray(self.predictions)


class LanguageTrainer:
    """The functions of one experiment, as `training.Trainer` has them.

    Args:
        data: folder of the corpus, for experiments on text. It is opened when it is first read.
        mesh: devices to divide every batch among, along its axis "data", those of one process side by side; each holds
            all weights. None: all devices of this process.
    """

    def __init__(self, config: LanguageConfig, data: str | Path | None = None, mesh: Mesh | None = None):
        self.config, self._data, self._given = config, data, mesh

    @cached_property
    def corpus(self) -> Corpus:
        """What is read, if that is text."""
        assert isinstance(self.config.task, Text)
        return self.config.task.open(self._data)

    @cached_property
    def _mesh(self) -> Mesh:
        mesh = self._given or Mesh(np.array(jax.local_devices()), ("data",))
        devices, train = mesh.shape["data"], self.config.train
        for name, size in (
            ("train.batch_size / accumulate", train.batch_size // self.config.accumulate),
            ("train.eval_batch_size", train.eval_batch_size),
        ):
            if size % devices:
                raise ValueError(
                    f"{name}: expected a multiple of the {devices} devices, which share a batch; got {size}."
                )
        return mesh

    @property
    def devices(self) -> int:
        """How many work on a batch."""
        return self._mesh.size

    @property
    def _everywhere(self) -> NamedSharding:
        return NamedSharding(self._mesh, _P())

    def _rows(self, size: int) -> slice:
        """Of a batch of that size, what the devices of this process work on."""
        here = NamedSharding(self._mesh, _P("data")).addressable_devices_indices_map((size,)).values()
        bounds = [index[0].indices(size)[:2] for index in here if index is not None]
        rows = slice(min(first for first, _ in bounds), max(end for _, end in bounds))
        assert rows.stop - rows.start == sum(end - first for first, end in bounds)
        return rows

    def _cut(self, spec: PartitionSpec, batch: Passages) -> Passages:
        """This process's rows of a batch as a part of all."""
        sharding = NamedSharding(self._mesh, spec)
        return jax.tree.map(lambda a: jax.make_array_from_process_local_data(sharding, np.asarray(a)), batch)

    @property
    def _seeds(self) -> Int[np.ndarray, " seed"]:
        first, count = self.config.train.first_seed, self.config.train.seeds
        return np.arange(first, first + count, dtype=np.uint32)

    @property
    def _programs(self) -> "_Programs":
        task = self.config.task
        asked = None if isinstance(task, Text) else task.pairs
        at_any_rate = replace(self.config.train.optimizer, rate=Constant())
        return _programs(self._mesh, at_any_rate, self.config.accumulate, asked)

    def start(self) -> TrainState:
        """Before the first step."""
        return self._programs.start(self.config.model, everywhere(self._seeds, self._everywhere))

    def place(self, state: TrainState) -> TrainState:
        """A state from elsewhere, on the devices that train it."""
        return jax.tree.map(lambda leaf: everywhere(leaf, self._everywhere), state)

    @property
    def shapes(self) -> TrainState:
        """Shapes and dtypes of a state, without computing one."""
        optimizer = _adam(self.config.train.optimizer)
        return jax.eval_shape(partial(_started, self.config.model, optimizer), self._seeds)

    # Batches.

    def batch(self, step: int, seed: int, rows: slice = ALL) -> Passages:
        """What the model of a seed is trained on in a step, whatever was asked for before; or `rows` of it."""
        task, size = self.config.task, self.config.train.batch_size
        if isinstance(task, Text):
            return self.corpus.batch(step, size, task.length, seed=seed, rows=rows)
        return self._drawn(seed, step, size, rows)

    def held_out(self, seed: int, batches: int, rows: slice = ALL) -> Iterator[Passages]:
        """Batches that are not trained on, or `rows` of them; of validation text at most all of it."""
        task, train, split = self.config.task, self.config.train, self.config.measured_on
        size, first = train.eval_batch_size, 0
        if split == "train":
            after = max(train.steps, -(-train.steps * train.batch_size // size))
            first, seed = after + (train.eval_batches if seed == FINAL else 0), train.first_seed
        elif isinstance(task, Text):
            windows = max(self.corpus.tokens("validation") - 1, 0) // task.length
            batches = min(batches, max(1, windows // size))
        for i in range(first, first + batches):
            if isinstance(task, Text):
                yield self.corpus.batch(i, size, task.length, seed=seed, split=split, rows=rows)
            else:
                yield self._drawn(seed, i, size, rows)

    @cached_property
    def _drawn(self) -> Callable[[int, int, int, slice], Passages]:
        task = self.config.task
        assert isinstance(task, AssociativeRecall)

        @partial(jax.jit, static_argnums=2)
        def draw(seed: Array, step: Array, size: int) -> Passages:
            # Not the key that draws the weights.
            key = jax.random.fold_in(jax.random.split(jax.random.key(seed))[1], step)
            return task.sample(key, size)

        def rows_of(seed: int, step: int, size: int, rows: slice) -> Passages:
            return jax.tree.map(lambda a: np.asarray(a)[rows], draw(np.uint32(seed), np.uint32(step), size))

        return rows_of

    # Steps.

    @property
    def gradient(self) -> Callable[..., tuple[Float[Array, " seed"], LanguageModel]]:
        """Losses and their gradients, by seed: of (models, seeds, step, a batch for each seed)."""
        return self._programs.gradient

    @cached_property
    def _rates(self) -> Float[np.ndarray, " step"]:
        """Of all steps, at once: what is computed otherwise may be rounded otherwise."""
        return np.asarray(
            jax.jit(jax.vmap(self.config.train.optimizer.rate))(np.arange(self.config.train.steps))
        )

    def step(self, state: TrainState, failed: Array, batches: Passages, *, at: int | None = None) -> Advanced:
        """One step: of a state, which is used up, which seeds have failed and where, a batch for each seed.

        Args:
            at: number of the step, where that is known: to ask the state is to wait for it.
        """
        rate = self._rates[int(state.step) if at is None else at]
        given = (everywhere(a, self._everywhere) for a in (rate, self._seeds))
        return self._programs.step(state, failed, *given, batches)

    def advance(self, state: TrainState, steps: int) -> Advanced:
        """Some steps more, for all seeds. The given state is used up.

        The host gathers the next batch while devices work on the last.
        """
        at, seeds = int(state.step), self.config.train.seeds
        rows = self._rows(self.config.train.batch_size)
        nothing = np.zeros(seeds, np.float32), np.full(seeds, -1, np.int32)
        done = Advanced(
            jax.device_put(state, self._everywhere), *(everywhere(a, self._everywhere) for a in nothing)
        )
        for step in range(at, at + steps):
            batches = [self.batch(step, int(seed), rows) for seed in self._seeds]
            stacked = jax.tree.map(lambda *a: np.stack(a), *batches)
            done = self.step(done.state, done.failed, self._cut(_P(None, "data"), stacked), at=step)
        return done._replace(failed=self._programs.failed(done.state, done.failed))

    # Evaluation.

    @property
    def sums(self) -> Callable[[LanguageModel, Passages], Sums]:
        """Of one batch, for all models."""
        return self._programs.sums

    def total(self, models: LanguageModel, batches: Iterator[Passages]) -> Sums:
        """Over many batches, of which each process gives its rows; by seed, in float64."""
        models = jax.device_put(models, self._everywhere)
        total: Any = None
        for batch in batches:
            cut = self._cut(_P("data"), batch)
            found = Sums(*(np.asarray(a, np.float64) for a in self.sums(models, cut)))
            total = found if total is None else Sums(*(a + b for a, b in zip(total, found, strict=True)))
        if total is None:
            raise ValueError("batches: expected at least one.")
        return total

    def measure(self, models: LanguageModel) -> dict[str, Float[np.ndarray, " seed"]]:
        """Held-out loss, part of right guesses and, of text, the in-context score; by seed."""
        train = self.config.train
        rows = self._rows(train.eval_batch_size)
        found = self.total(models, self.held_out(HELD_OUT, train.eval_batches, rows))
        measured = {"eval_loss": found.mean(found.loss), "accuracy": found.mean(found.right)}
        if isinstance(self.config.task, Text):
            measured["in_context"] = in_context_score(found.loss_by_position)
        return measured

    def result(self, models: LanguageModel, *, whole: bool = False) -> dict[str, Any]:
        """`loss` in nats and `accuracy` on held-out sequences, by seed. Of text also `loss_by_position`, `in_context`
        and `at` (the tokens it compares), `in_context_smooth`, `parts` with the loss on each part of the corpus, and,
        if the first layer is a softmax layer, `offsets`: how much of the attention of each of its heads goes how far
        back, and `maps`: a block of it, of the first seed.

        Args:
            whole: all of the validation split, part by part, not `train.final_sequences` windows of it and of each
                part. `loss` is then that of the parts by their tokens.
        """
        train, task = self.config.train, self.config.task
        parts: dict[str, Sums] = {}
        if isinstance(task, Text) and self.config.measured_on == "validation":
            parts = self.parts(models, None if whole else train.final_sequences)
        if whole and parts:
            found = Sums(*(np.sum(values, 0) for values in zip(*parts.values(), strict=True)))
        else:
            batches = train.final_sequences // train.eval_batch_size
            found = self.total(models, self.held_out(FINAL, batches, self._rows(train.eval_batch_size)))
        result = {"loss": found.mean(found.loss).tolist(), "accuracy": found.mean(found.right).tolist()}
        result["sequences"] = train.final_sequences
        if not isinstance(task, Text):
            return result
        result["sequences"] = int(np.max(found.predictions))
        result["loss_by_position"] = found.loss_by_position.tolist()
        result["in_context"] = in_context_score(found.loss_by_position).tolist()
        result["in_context_smooth"] = in_context_score(found.loss_by_position, smooth=True).tolist()
        result["at"] = list(compared(task.length))
        if self.config.measured_on == "train":
            return result
        result["parts"] = {
            name: {"loss": sums.mean(sums.loss).tolist(), "tokens": int(np.sum(sums.predictions[0]))}
            for name, sums in parts.items()
        }
        some = min(ATTENTION_SEQUENCES, train.final_sequences) // train.eval_batch_size
        attention = self.first_attention(models, self.held_out(FINAL, max(1, some)))
        if attention is not None:
            offsets, maps = attention
            result["offsets"] = offsets.tolist()
            result["maps"] = [[[round(float(x), 5) for x in row] for row in head] for head in maps[0]]
        return result

    def parts(self, models: LanguageModel, sequences: int | None = None) -> dict[str, Sums]:
        """Losses on each part of the validation split, of at most so many windows of it."""
        task, size = self.config.task, self.config.train.eval_batch_size
        assert isinstance(task, Text)
        found = {}
        for part, tokens in self.corpus.parts().items():
            if tokens < 2:  # nothing to predict
                continue
            windows = self.corpus.in_order(size, task.length, part=part, rows=self._rows(size))
            if sequences is not None:
                windows = (batch for _, batch in zip(range(-(-sequences // size)), windows, strict=False))
            found[part] = self.total(models, windows)
        return found

    def first_attention(
        self, models: LanguageModel, batches: Iterator[Passages]
    ) -> tuple[Float[np.ndarray, "seed head offset"], Float[np.ndarray, "seed head row column"]] | None:
        """Where heads of the first layer look, mean over sequences: their attention 0, 1, … tokens before (mean over
        tokens that have so many before them), and a block of it beside the diagonal. None unless that layer's
        attention is a distribution."""
        if not isinstance(self.config.model.blocks[0].mixer, Softmax):
            return None
        models = jax.tree.map(lambda a: a.addressable_data(0), models)  # no other process is asked
        tokens = np.concatenate([batch.tokens for batch in batches])
        found = []
        for i in range(len(self._seeds)):
            total: Any = None
            for sequence in tokens:
                one = _attention(models, np.int32(i), sequence)
                total = one if total is None else jax.tree.map(jnp.add, total, one)
            found.append([np.asarray(a) / len(tokens) for a in total])
        offsets, maps = (np.stack(a) for a in zip(*found, strict=True))
        return offsets, maps


class _Programs(NamedTuple):
    """What is compiled once for all experiments that differ in rates, seeds and numbers of steps alone."""

    start: Callable[[LanguageModelConfig, Any], TrainState]
    gradient: Callable[..., tuple[Float[Array, " seed"], LanguageModel]]
    step: Callable[..., Advanced]
    failed: Callable[[TrainState, Array], Array]
    sums: Callable[[LanguageModel, Passages], Sums]


@lru_cache(maxsize=8)
def _programs(mesh: Mesh, optimizer: AdamW, accumulate: int, asked: int | None) -> _Programs:
    """Whatever the optimizer's rate.

    Args:
        asked: how many tokens of a sequence are predicted; None: all, or any number.
    """
    copied = NamedSharding(mesh, _P())
    adam, decay = _adam(optimizer), optimizer.weight_decay
    gradient = _gradient(mesh, accumulate, asked)

    @partial(jax.jit, static_argnums=0, out_shardings=copied)
    def start(config: LanguageModelConfig, seeds: Array) -> TrainState:
        return _started(config, adam, seeds)

    @partial(jax.jit, donate_argnums=0, out_shardings=copied)
    def step(state: TrainState, failed: Array, rate: Array, seeds: Array, batches: Passages) -> Advanced:
        def moved(leaf: Array, update: Array) -> Array:
            return leaf - rate * (update + decay * leaf if leaf.ndim > 1 else update)

        def descend(
            model: LanguageModel, inner: PyTree, slope: LanguageModel
        ) -> tuple[LanguageModel, PyTree]:
            update, inner = adam.update(slope, inner)  # pyright: ignore[reportArgumentType]
            return jax.tree.map(moved, model, update), inner

        loss, slopes = gradient(state.models, seeds, state.step, batches)
        models, inner = jax.vmap(descend)(state.models, state.optimizer, slopes)
        failed = jnp.where((failed < 0) & ~jnp.isfinite(loss), state.step, failed)
        return Advanced(TrainState(models, inner, state.step + 1, state.loss_sum + loss), loss, failed)

    @partial(jax.jit, out_shardings=copied)
    def failed(state: TrainState, failed: Array) -> Array:
        leaves = jax.tree.leaves(state.models)
        sound = jnp.stack([jnp.all(jnp.isfinite(a), tuple(range(1, a.ndim))) for a in leaves]).all(0)
        # Weights that are not finite make the next loss so.
        return jnp.where((failed < 0) & ~sound, state.step, failed)

    def one_model(batch: Passages, model: LanguageModel) -> Sums:
        logits = model(batch.tokens)  # pyright: ignore[reportArgumentType]
        errors = cross_entropy(logits, batch.targets)  # pyright: ignore[reportArgumentType]
        right = jnp.argmax(logits, -1) == batch.targets
        found = (errors, right.astype(jnp.float32), jnp.ones_like(errors))
        return Sums(*(jnp.sum(jnp.where(batch.predicts, a, 0), 0) for a in found))

    def all_models(models: LanguageModel, batch: Passages) -> Sums:
        return jax.lax.psum(jax.lax.map(partial(one_model, batch), models), "data")

    sums = jax.jit(
        jax.shard_map(all_models, mesh=mesh, in_specs=(_P(), _P("data")), out_specs=_P(), check_vma=False)
    )
    return _Programs(start, gradient, step, failed, sums)


def _gradient(
    mesh: Mesh, accumulate: int, asked: int | None
) -> Callable[..., tuple[Float[Array, " seed"], LanguageModel]]:
    """See `LanguageTrainer.gradient`."""

    def loss(model: LanguageModel, batch: Passages, keys: Array, count: Array) -> Array:
        targets, counted, at = jnp.asarray(batch.targets), jnp.asarray(batch.predicts), None
        if asked is not None:
            # What nobody asks for is not multiplied with all of the vocabulary.
            counted, at = jax.lax.top_k(counted.astype(jnp.int32), asked)
            targets = jnp.take_along_axis(targets, at, -1)
        errors = model.losses(batch.tokens, targets, at=at, key=keys)  # pyright: ignore[reportArgumentType]
        return jnp.sum(jnp.where(counted > 0, errors, 0)) / count

    def one_seed(step: Array, model: LanguageModel, seed: Array, numbers: Array, batch: Passages):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), step)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        count = jax.lax.psum(jnp.sum(batch.predicts, dtype=jnp.float32), "data")

        def one_pass(total, part):
            here = jax.value_and_grad(loss)(model, *part, count)
            return jax.tree.map(jnp.add, total, here), None

        parts = jax.tree.map(lambda a: a.reshape(accumulate, -1, *a.shape[1:]), (batch, keys))
        nothing = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, model)
        total, _ = jax.lax.scan(one_pass, nothing, parts)
        return jax.lax.psum(total, "data")

    def all_seeds(models: LanguageModel, seeds: Array, step: Array, numbers: Array, batches: Passages):
        return jax.lax.map(lambda of: one_seed(step, of[0], of[1], numbers, of[2]), (models, seeds, batches))

    divided = jax.shard_map(
        all_seeds,
        mesh=mesh,
        in_specs=(_P(), _P(), _P(), _P("data"), _P(None, "data")),
        out_specs=(_P(), _P()),
        check_vma=False,
    )
    return lambda models, seeds, step, batches: divided(
        models, seeds, step, jnp.arange(batches.tokens.shape[1], dtype=jnp.uint32), batches
    )


def _adam(optimizer: AdamW) -> optax.GradientTransformation:
    """Where to go, before weights decay and a rate says how far."""
    adam = optax.scale_by_adam(optimizer.b1, optimizer.b2, optimizer.eps)
    if optimizer.clip is None:
        return adam
    clip = optax.clip if optimizer.clip_by == "entry" else optax.clip_by_global_norm
    return optax.chain(clip(optimizer.clip), adam)


def _started(config: LanguageModelConfig, adam: optax.GradientTransformation, seeds: Array) -> TrainState:
    def one(seed: Array) -> tuple[LanguageModel, PyTree]:
        model = LanguageModel(config, key=jax.random.split(jax.random.key(seed))[0])
        return model, adam.init(model)  # pyright: ignore[reportArgumentType]

    models, state = jax.vmap(one)(seeds)
    return TrainState(models, state, jnp.zeros((), jnp.int32), jnp.zeros(seeds.shape, jnp.float32))


@jax.jit
def _attention(models: LanguageModel, seed: Array, sequence: Array) -> tuple[Array, Array]:
    model = jax.tree.map(lambda a: a[seed], models)
    attention = model.trace(sequence)[1]["blocks.0.mixer.attention"]
    block = min(BLOCK, attention.shape[-1] // 2)
    return by_offset(attention, OFFSETS), attention[:, block : 2 * block, block : 2 * block]


def by_offset(attention: Float[Array, "head time time"], offsets: int) -> Float[Array, "head offset"]:
    """The mean of each of the first diagonals, over rows that have all of them."""
    time = attention.shape[-1]
    offsets = min(offsets, time)
    rows = jnp.arange(offsets - 1, time)
    return jnp.stack([jnp.mean(attention[:, rows, rows - i], -1) for i in range(offsets)], -1)


def compared(length: int) -> tuple[int, int]:
    """The tokens (counted from 1) whose losses the in-context score compares: 50 and 500 of 1024 or more; of fewer,
    those that are as far along."""
    scale = min(1.0, length / OF)
    return max(1, round(EARLY * scale)), max(1, round(LATE * scale))


def in_context_score(
    loss: Float[np.ndarray, "*seed time"], *, smooth: bool = False
) -> Float[np.ndarray, " *seed"]:
    """How much lower the loss is late than early, as a negative number: `compared` says where.

    Args:
        smooth: compare means over `AROUND` tokens on both sides, or in a shorter context as many as are as far.
    """
    length = loss.shape[-1]
    early, late = compared(length)
    around = round(AROUND * min(1.0, length / OF)) if smooth else 0
    at = lambda token: loss[..., max(0, token - 1 - around) : token + around].mean(-1)  # noqa: E731
    return at(late) - at(early)


_P = PartitionSpec
