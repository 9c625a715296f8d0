r"""Training: fresh sequences in every step, several seeds as one program.

$$\min_\theta\; \mathbb E\; \frac1T\sum_{t=1}^{T} \tfrac12\lVert s_{t+1} - f_\theta(s_{1:t})\rVert^2$$

`Trainer` turns a `Config` into three compiled functions: the state before the first step, any number of steps, and
losses on held-out sequences. It knows no files and no clock; `runs.fit` adds those. `optimize` is for everything else
that gradient descent tunes.
"""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, PyTree

from mesascope.models import ModelConfig, Transformer
from mesascope.store import check_numbers, later
from mesascope.tasks import Dynamics, Examples, Standard, Tokens
from mesascope.untrusted import is_plain_name

Params = TypeVar("Params")
Batch = TypeVar("Batch")
T = TypeVar("T")

# Held-out sequences are the same for all runs: keys far from those of any training seed.
HELD_OUT, FINAL = 2**31 - 1, 2**31 - 2


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One learning rate from beginning to end."""

    peak: float = 1e-4

    def __post_init__(self):
        check_numbers(self, peak=0)

    def __call__(self, step: ArrayLike) -> Float[Array, ""]:
        return jnp.full((), self.peak, jnp.float32)


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear from `start` to `peak`, then half a cosine down to `floor`.

    Attributes:
        warmup: steps to the peak.
        end: step at which the floor is reached, counted from the first; a run may well stop before it.
        start: instead of 0.
    """

    peak: float = 7e-4
    warmup: int = 1000
    end: int = 30_000
    floor: float = 1e-5
    start: float = later(0.0)

    def __post_init__(self):
        check_numbers(self, peak=0, floor=0, start=0)
        if not 0 <= self.warmup < self.end:
            raise ValueError(f"warmup: expected less than end = {self.end}, got {self.warmup}.")

    def __call__(self, step: ArrayLike) -> Float[Array, ""]:
        at = jnp.asarray(step).astype(jnp.float32)
        progress = jnp.clip((at - self.warmup) / (self.end - self.warmup), 0, 1)
        cosine = self.floor + (self.peak - self.floor) * 0.5 * (1 + jnp.cos(math.pi * progress))
        rise = self.start + (self.peak - self.start) * at / max(self.warmup, 1)
        return jnp.where(at < self.warmup, rise, cosine)


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay on all parameters, after gradient clipping.

    Attributes:
        rate: learning rate by step.
        clip: bound on gradients; None leaves them as they are.
        clip_by: bound every entry (released code), or the norm of all together.
    """

    rate: Constant | WarmupCosine = field(default_factory=WarmupCosine)
    weight_decay: float = 0.05
    clip: float | None = 1.0
    clip_by: Literal["entry", "global_norm"] = "entry"
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self):
        check_numbers(self, positive=("clip",), weight_decay=0, b1=0, b2=0, eps=0)
        for name in ("b1", "b2"):
            if not getattr(self, name) < 1:
                raise ValueError(f"{name}: expected less than 1, got {getattr(self, name)}.")

    def build(self) -> optax.GradientTransformation:
        """As optax has it."""
        adam = optax.adamw(self.rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay)
        if self.clip is None:
            return adam
        clip = optax.clip if self.clip_by == "entry" else optax.clip_by_global_norm
        return optax.chain(clip(self.clip), adam)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained and held to account.

    Attributes:
        steps: of the optimizer.
        batch_size: sequences per step, drawn afresh.
        seeds: how many models, trained side by side from seeds `first_seed`, `first_seed` + 1, …
        eval_every: steps between two evaluations on the same `eval_batches` batches of held-out sequences.
        keep_every: steps between two kept copies of the weights, for analyses over training; None keeps the last
            only.
        final_sequences: how many fresh sequences the finished models are measured on.
    """

    steps: int = 10_000
    batch_size: int = 256
    seeds: int = 5
    first_seed: int = 0
    optimizer: AdamW = field(default_factory=AdamW)
    eval_every: int = 100
    eval_batches: int = 10
    eval_batch_size: int = 256
    keep_every: int | None = None
    final_sequences: int = 4096

    def __post_init__(self):
        check_numbers(
            self, steps=1, batch_size=1, seeds=1, first_seed=0, eval_every=1, eval_batches=1, eval_batch_size=1,
            keep_every=1, final_sequences=1,
        )  # fmt: skip
        if self.first_seed + self.seeds > FINAL:
            raise ValueError(
                f"first_seed: expected seeds below {FINAL}, for those from there on are of held-out sequences; "
                f"got {self.first_seed}."
            )
        if self.final_sequences % self.eval_batch_size:
            raise ValueError(
                f"final_sequences: expected a multiple of eval_batch_size = {self.eval_batch_size}, "
                f"got {self.final_sequences}."
            )


def check_name(name: str) -> None:
    """Of an experiment.

    Raises:
        ValueError: no folder can be named after it.
    """
    if name and not is_plain_name(name):
        raise ValueError(
            f"name: expected letters, digits and any of .+-_, for it names a folder; got {name!r}."
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment: where sequences come from, how they are shown, what reads them and how it is trained.

    Attributes:
        name: what people call it; part of the run's directory name.
    """

    name: str
    task: Dynamics
    tokens: Tokens = field(default_factory=Standard)
    model: ModelConfig
    train: TrainConfig

    def __post_init__(self):
        check_name(self.name)
        width, obs_dim = self.tokens.width(self.task.obs_dim), self.task.obs_dim
        if self.model.token_dim != width:
            raise ValueError(
                f"model.token_dim: the task's tokens are {width} wide, got {self.model.token_dim}."
            )
        if self.model.output_dim < obs_dim:
            raise ValueError(
                f"model.output_dim: expected at least the {obs_dim} dimensions of an observation, "
                f"got {self.model.output_dim}."
            )

    def examples(self, key: PRNGKeyArray, batch_size: int) -> Examples:
        """Fresh sequences, as the model is shown them."""
        return self.tokens(self.task.sample(key, batch_size).observations)


def with_train(config: Config, **changes: Any) -> Config:
    """The configuration with some of its training fields changed."""
    return replace(config, train=replace(config.train, **changes))


def half_squared_errors(
    predictions: Float[Array, "*batch output"], targets: Float[Array, "*batch obs"]
) -> Float[Array, "*batch"]:
    """½‖error‖² of each prediction; entries beyond the target's width do not count."""
    return 0.5 * jnp.sum((predictions[..., : targets.shape[-1]] - targets) ** 2, -1)


def optimize(
    loss: Callable[[Params, Batch], Float[Array, ""]],
    params: Params,
    sampler: Callable[[PRNGKeyArray], Batch],
    *,
    steps: int,
    optimizer: AdamW | optax.GradientTransformation,
    key: PRNGKeyArray,
) -> tuple[Params, Float[Array, " step"]]:
    """Tune anything by gradient descent, as one compiled program.

    Args:
        loss: of parameters and a batch.
        params: where to start.
        sampler: draws a batch; called with a new key in every step.
        steps: how many.
        optimizer: ours or any of optax.
        key: for the batches.

    Returns:
        The parameters after the last step, and the loss before each.
    """
    chosen = optimizer.build() if isinstance(optimizer, AdamW) else optimizer

    @jax.jit
    def run(params: Params) -> tuple[Params, Array]:
        def body(carry: tuple[Any, PyTree], i: Array):
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params, sampler(jax.random.fold_in(key, i)))
            updates, state = chosen.update(gradient, state, params)
            new: Any = optax.apply_updates(params, updates)
            return (new, state), value

        start: Any = (params, chosen.init(params))  # pyright: ignore[reportArgumentType]
        (found, _), values = jax.lax.scan(body, start, jnp.arange(steps, dtype=jnp.uint32))
        return found, values

    return run(params)


class TrainState(NamedTuple):
    """All that training goes on from. Every array has a seed axis, except `step`.

    Attributes:
        models: a `Transformer` or a `LanguageModel`.
        loss_sum: of training losses since the last evaluation.
    """

    models: Any
    optimizer: PyTree
    step: Int[Array, ""]
    loss_sum: Float[Array, " seed"]


class Advanced(NamedTuple):
    """After some steps.

    Attributes:
        failed: for each seed the first step whose loss is not finite, -1 for none.
    """

    state: TrainState
    loss: Float[Array, " seed"]
    failed: Int[Array, " seed"]


def everywhere(array: ArrayLike, sharding: NamedSharding | None) -> Array:
    """The same array on every device of a sharding, of which each process has some."""
    assert sharding is not None
    local = np.asarray(array)
    return jax.make_array_from_callback(local.shape, sharding, lambda index: local[index])


# Whose activations stay near a CPU's cores (benchmarks/README.md).
_TOKENS_IN_A_PART = 800


def _parts(sequences: int, length: int) -> int:
    """How many equal parts a batch is cut into on a CPU."""
    most = max(1, _TOKENS_IN_A_PART // length)
    return next(n for n in range(-(-sequences // most), sequences + 1) if sequences % n == 0)


def over_the_cores(config: Config) -> "Trainer":
    """A trainer that cuts every batch over the devices that this CPU was divided into, if it was (`divide_cpu`).

    As many of them as batches can be cut over; one, where a step calls LAPACK, which several would wait for forever.
    """
    trainer, devices = Trainer(config), jax.local_devices()
    if jax.default_backend() != "cpu" or len(devices) == 1 or trainer.calls_lapack:
        return trainer
    share = math.gcd(config.train.batch_size, config.train.eval_batch_size)
    count = max(n for n in range(1, len(devices) + 1) if share % n == 0)
    return trainer if count == 1 else Trainer(config, Mesh(np.array(devices[:count]), ("data",)))


def divide_cpu() -> None:
    """Make each core of a CPU a device of its own, unless their number has been set; before JAX is asked for devices.

    One device keeps little more than one and a half cores busy with the steps of small models. Sums over a batch are
    rounded by how it is cut; so workers of a sweep, whose runs must not depend on how many there are, do not do this.
    """
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not forced and jax.config.jax_num_cpu_devices < 1:  # pyright: ignore
        with suppress(RuntimeError):  # it has been asked: this process keeps the devices it has
            jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))


class Trainer:
    """The compiled functions of one experiment. None of them is compiled twice, whatever the number of steps.

    Attributes:
        mesh: devices to cut every batch over, along its axis "data"; each holds all weights. The steps are those of one
            device, but for the order of sums over the batch. None: JAX's default device.
    """

    def __init__(self, config: Config, mesh: Mesh | None = None):
        self.config, self.mesh = config, mesh
        for name in ("batch_size", "eval_batch_size"):
            size = getattr(config.train, name)
            if mesh is not None and size % mesh.shape["data"]:
                raise ValueError(
                    f"train.{name}: expected a multiple of the {mesh.shape['data']} devices, got {size}."
                )

    @property
    def devices(self) -> int:
        """How many work on a batch."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def _seed_keys(self) -> PRNGKeyArray:
        first, count = self.config.train.first_seed, self.config.train.seeds
        return jax.vmap(jax.random.key)(jnp.arange(first, first + count, dtype=jnp.uint32))

    def _start(self) -> TrainState:
        optimizer = self.config.train.optimizer.build()

        def one(key: PRNGKeyArray) -> tuple[Transformer, PyTree]:
            model = Transformer(self.config.model, key=jax.random.split(key)[0])
            return model, optimizer.init(model)  # pyright: ignore[reportArgumentType]

        models, state = jax.vmap(one)(self._seed_keys)
        return TrainState(
            models, state, jnp.zeros((), jnp.int32), jnp.zeros(self.config.train.seeds, jnp.float32)
        )

    def start(self) -> TrainState:
        """Before the first step."""
        # Weights are drawn once, and a program that does it fast takes seconds to compile.
        hastily = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        return jax.jit(self._start, out_shardings=self._everywhere, compiler_options=hastily)()

    def place(self, state: TrainState) -> TrainState:
        """A state from elsewhere, on the devices that train it."""
        if self._everywhere is None:
            return jax.tree.map(jnp.asarray, state)
        return jax.tree.map(lambda leaf: everywhere(leaf, self._everywhere), state)

    @property
    def _everywhere(self) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    @property
    def shapes(self) -> TrainState:
        """Shapes and dtypes of a state, without computing one."""
        return jax.eval_shape(self._start)

    def loss_by_position(self, model: Transformer, batch: Examples) -> Float[Array, " time"]:
        """Mean over a batch of ½‖error‖² after each token, zero where nothing is predicted."""
        return jnp.where(
            batch.predicts, jnp.mean(half_squared_errors(model(batch.tokens), batch.targets), 0), 0
        )

    def _loss(self, model: Transformer, batch: Examples) -> Float[Array, ""]:
        return jnp.sum(self.loss_by_position(model, batch)) / jnp.sum(batch.predicts)

    def _over_devices(
        self, measure: Callable[[Transformer, Examples], T]
    ) -> Callable[[Transformer, Examples], T]:
        """The same for a batch that is cut over the devices. What is measured are means over its sequences."""
        if self.mesh is None:
            return measure

        def on_one(models: Transformer, batch: Examples) -> T:
            return jax.lax.pmean(measure(models, batch), "data")

        def on_all(models: Transformer, batch: Examples) -> T:
            cut = PartitionSpec(*[None] * (batch.tokens.ndim - 3), "data")
            whole: Any = PartitionSpec()
            specs = (whole, batch._replace(tokens=cut, targets=cut, predicts=whole))  # pyright: ignore
            return jax.shard_map(on_one, mesh=self.mesh, in_specs=specs, out_specs=whole, check_vma=False)(
                models, batch
            )

        return on_all

    def _slopes(self, models: Transformer, batch: Examples) -> tuple[Float[Array, " seed"], Transformer]:
        """Losses and their gradients; on a CPU in parts whose activations stay near its cores."""
        slopes = jax.vmap(jax.value_and_grad(self._loss))
        seeds, sequences, length = batch.tokens.shape[:3]
        parts = 1 if jax.default_backend() != "cpu" else _parts(sequences, length)
        if parts == 1:
            return slopes(models, batch)

        def add(total, part: tuple[Array, Array]):
            one = slopes(models, batch._replace(tokens=part[0], targets=part[1]))
            return jax.tree.map(jnp.add, total, one), None

        nothing = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(slopes, models, batch)
        )
        cut: Any = tuple(
            jnp.moveaxis(a.reshape(seeds, parts, -1, *a.shape[2:]), 1, 0)
            for a in (batch.tokens, batch.targets)
        )
        total, _ = jax.lax.scan(add, nothing, cut)
        return jax.tree.map(lambda leaf: leaf / parts, total)

    def step(
        self, models: Transformer, state: PyTree, batch: Examples
    ) -> tuple[Transformer, PyTree, Float[Array, " seed"]]:
        """One step on given sequences, which have an axis of seeds too: models and their optimizer's state after it,
        and the losses before it."""
        optimizer = self.config.train.optimizer.build()
        losses, gradients = self._over_devices(self._slopes)(models, batch)

        def descend(model: Any, state: PyTree, gradient: Any) -> tuple[Any, PyTree]:
            updates, state = optimizer.update(gradient, state, model)
            return optax.apply_updates(model, updates), state

        models, state = jax.vmap(descend)(models, state, gradients)
        return models, state, losses

    @property
    def advance(self) -> Callable[[TrainState, int], Advanced]:
        """Some steps more, for all seeds. The given state is used up."""
        return lambda state, steps: self._many_steps(state, jnp.asarray(steps, jnp.int32))

    @cached_property
    def _many_steps(self) -> Any:
        config = self.config

        def one_step(i: Array, carry: Advanced) -> Advanced:
            models, optimizer, at, loss_sum = carry.state

            def draw(key: PRNGKeyArray) -> Examples:
                train_key = jax.random.split(key)[1]
                return config.examples(jax.random.fold_in(train_key, at), config.train.batch_size)

            models, optimizer, loss = self.step(models, optimizer, jax.vmap(draw)(self._seed_keys))
            failed = jnp.where((carry.failed < 0) & ~jnp.isfinite(loss), at, carry.failed)
            return Advanced(TrainState(models, optimizer, at + 1, loss_sum + loss), loss, failed)

        @partial(jax.jit, donate_argnums=0, out_shardings=self._everywhere)
        def many_steps(state: TrainState, steps: Int[Array, ""]) -> Advanced:
            nothing = jnp.zeros(config.train.seeds, jnp.float32), jnp.full(config.train.seeds, -1, jnp.int32)
            done = jax.lax.fori_loop(0, steps, one_step, Advanced(state, *nothing))
            sound = jnp.stack([
                jnp.all(jnp.isfinite(leaf), tuple(range(1, leaf.ndim)))
                for leaf in jax.tree.leaves(done.state.models)
            ]).all(0)  # fmt: skip
            # Weights that are not finite make the next loss so.
            return done._replace(failed=jnp.where((done.failed < 0) & ~sound, done.state.step, done.failed))

        return many_steps

    @property
    def calls_lapack(self) -> bool:
        """Whether a step does, where the device is a CPU."""
        text = self._many_steps.lower(self.shapes, jax.ShapeDtypeStruct((), jnp.int32)).as_text()
        return "@lapack_" in text or "@blas_" in text

    @cached_property
    def evaluate(self) -> Callable[[Transformer], Float[Array, "seed time"]]:
        """Loss by position on the held-out sequences that every evaluation uses."""
        return self._measure(HELD_OUT, self.config.train.eval_batches)

    @cached_property
    def evaluate_finally(self) -> Callable[[Transformer], Float[Array, "seed time"]]:
        """Loss by position on `final_sequences` sequences that nothing else uses."""
        train = self.config.train
        return self._measure(FINAL, train.final_sequences // train.eval_batch_size)

    def _measure(self, seed: int, batches: int) -> Callable[[Transformer], Float[Array, "seed time"]]:
        losses = self._over_devices(
            lambda models, batch: jax.vmap(lambda model: self.loss_by_position(model, batch))(models)
        )

        def measure(models: Transformer) -> Array:
            def one_batch(total: Array, key: PRNGKeyArray) -> tuple[Array, None]:
                batch = self.config.examples(key, self.config.train.eval_batch_size)
                return total + losses(models, batch), None

            start = jnp.zeros((self.config.train.seeds, self.config.task.length), jnp.float32)
            total, _ = jax.lax.scan(one_batch, start, jax.random.split(jax.random.key(seed), batches))
            return total / batches

        return jax.jit(measure, out_shardings=self._everywhere)

    def measure(self, models: Transformer) -> dict[str, Float[np.ndarray, " seed"]]:
        """What is told of models along training, by seed."""
        return {"eval_loss": np.asarray(self.evaluate(models)) @ self.predicts}

    def result(self, models: Transformer) -> dict[str, Any]:
        """What is told of models when they are trained, as JSON."""
        by_position = np.asarray(self.evaluate_finally(models))
        return dict(
            loss=(by_position @ self.predicts).tolist(),
            loss_by_position=by_position.tolist(),
            sequences=self.config.train.final_sequences,
        )

    @cached_property
    def predicts(self) -> Float[np.ndarray, " time"]:
        """Weights of the positions in the mean loss: equal where something is predicted, else zero."""
        # Compiled, so that the sequences themselves, which nobody reads, are not drawn.
        read = jax.jit(lambda: self.config.examples(jax.random.key(0), 1).predicts)
        predicts = np.asarray(read(), np.float32)
        return predicts / predicts.sum()
