"""Where the experiments get their models from, and at which size they run.

lab = Lab(SCALES["quick"])
lab.trained("softmax-7").models       # trained, found trained, or released, as the scale has it
lab.tuned("gd-1", find)               # the same for numbers that something else than training found
"""

import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from rich.console import Console

from mesascope import mirror, provenance, released, store
from mesascope.models import Transformer
from mesascope.presets import Variant, preset
from mesascope.runs import DivergedError, Run, fit
from mesascope.store import StoreError
from mesascope.tasks import Examples
from mesascope.training import Config, Trainer, WarmupCosine, with_train
from mesascope.untrusted import check, is_plain_name, parse_json


class NotReleasedError(LookupError):
    """Something that does not come with the repository: its figures are drawn from stored arrays."""


class NoTextError(NotReleasedError):
    """Language models need text, and none was given."""


class OutOfTimeError(RuntimeError):
    """The time given is up. The same command goes on."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size at which experiments run.

    Attributes:
        seeds: models of each kind; None for the presets' five.
        steps: part of the presets' training steps.
        gflop: of training models of one kind, and again of distilling their layers, at most; None for as many as it
            takes. Large models are trained for fewer steps, so that those of one figure may not be comparable.
        batch_size: of training at most; None for the presets'.
        sequences: for losses, attention maps and distances.
        probe_sequences: for probes, half of them to fit.
        tune_steps: when an algorithm's coefficients are tuned on the task.
        prompt_steps: when tokens of a prompt are tuned.
        distill_steps: when a layer is distilled.
        trained: whether models have been trained to the end, so that claims about them can be tested.
        from_released: whether models come with the repository.
    """

    name: Literal["smoke", "quick", "released", "paper"]
    seeds: int | None
    steps: float = 1.0
    gflop: float | None = None
    batch_size: int | None = None
    sequences: int
    probe_sequences: int
    tune_steps: int
    prompt_steps: int
    distill_steps: int
    trained: bool = True
    from_released: bool = False


SCALES = {
    scale.name: scale
    for scale in (
        Scale(name="smoke", seeds=2, steps=0.0, batch_size=4, sequences=16, probe_sequences=512,
              tune_steps=2, prompt_steps=2, distill_steps=2, trained=False),
        Scale(name="quick", seeds=2, steps=0.1, gflop=1500, batch_size=16, sequences=1024, probe_sequences=2048,
              tune_steps=300, prompt_steps=200, distill_steps=500, trained=False),
        # As many sequences as for `paper`: one seed is put among those of that, and must fit.
        Scale(name="released", seeds=1, sequences=4096, probe_sequences=8192,
              tune_steps=600, prompt_steps=2000, distill_steps=2000, from_released=True),
        Scale(name="paper", seeds=None, sequences=4096, probe_sequences=8192,
              tune_steps=1500, prompt_steps=5000, distill_steps=3000),
    )
}  # fmt: skip

# What `released` trains before the reader's eyes.
LIVE = ("interpolation-1",)
EVALUATIONS = 20
"""Of models that are trained for fewer steps than their preset says, on the way."""


class Trained:
    """Models of one kind, and what is known about their training."""

    def __init__(self, config: Config, models: Transformer, run: Run | None):
        self.config, self.models, self.run = config, models, run

    @cached_property
    def untrained(self) -> Transformer:
        """As they were before training, at least two."""
        seeds = max(2, self.config.train.seeds)
        return Trainer(with_train(self.config, seeds=seeds)).start().models

    def metrics(self) -> tuple[Float[np.ndarray, " step"], Float[np.ndarray, "seed step"]]:
        """Steps, and the loss on held-out sequences at each.

        Raises:
            NotReleasedError: only the trained weights are here.
        """
        if self.run is None:
            raise NotReleasedError(f"the training curve of {self.config.name}")
        metrics = self.run.metrics()
        return metrics["step"], metrics["eval_loss"].T

    def kept(self) -> dict[int, Transformer]:
        """Models along training, by step.

        Raises:
            NotReleasedError: only the trained weights are here.
        """
        if self.run is None:
            raise NotReleasedError(f"the weights of {self.config.name} along training")
        return self.run.kept()

    @property
    def sample(self) -> Callable[[PRNGKeyArray, int], Examples]:
        """Fresh sequences of its task, as the models are shown them."""
        return self.config.examples

    @property
    def observations(self) -> Callable[[PRNGKeyArray, int], Float[Array, "batch time+1 obs"]]:
        """Fresh sequences of its task."""
        return lambda key, count: self.config.task.sample(key, count).observations


class Lab:
    """Models for the experiments.

    Attributes:
        variant: of all presets.
        data: folder of a prepared corpus, for language models.
        inputs: digests of all that was asked for, by name.
    """

    variant: Variant = "as_run"

    def __init__(
        self,
        scale: Scale,
        *,
        runs: str | Path = "runs",
        data: Path | None = None,
        deadline: float | None = None,
        console: Console | None = None,
    ):
        self.scale, self.runs, self.deadline, self.console = scale, runs, deadline, console
        self.data = data
        self.inputs: dict[str, str] = {}

    def as_written(self) -> "Lab":
        """This lab, with presets as the paper's text has them."""
        other = copy.copy(self)
        other.variant = "as_written"
        return other

    def config(self, name: str) -> Config:
        """A preset at this scale."""
        return _at_scale(preset(name, self.variant), self.scale)

    def trained(self, name: str, *, halvings: int = 0) -> Trained:
        """The models of a preset: trained now, found trained, or released.

        Args:
            halvings: how often the learning rate may be halved, if the training of one of the models diverges.

        Raises:
            DivergedError: so did the last one.
            OutOfTimeError: training has been stopped and goes on with the next call.
            NotReleasedError: at the scale "released", of a model that is not.
        """
        self.check_time()
        config = self.config(name)
        if self.scale.from_released and config.name not in LIVE:
            path = released.weights_path(config.name)
            if not path.exists():
                raise NotReleasedError(f"the weights of {config.name}")
            self._note(f"released/{path.stem}")
            models, config = released.read_model(path)
            return Trained(config, models, None)
        run = self._fit(config, halvings)
        if not run.finished:
            raise OutOfTimeError(f"stopped while training {config.name}.")
        self.used(run)
        return Trained(run.config, run.models(), run)

    def _fit(self, config: Config, halvings: int) -> Run:
        try:
            return fit(config, runs=self.runs, max_minutes=self.minutes_left, console=self.console)
        except DivergedError:
            if not halvings:
                raise
        half = config.train.optimizer.rate.peak / 2
        return self._fit(store.with_field(config, f"train.optimizer.rate.peak={half}"), halvings - 1)

    def tuned(
        self, name: str, find: Callable[[], Mapping[str, Any]], *, by_seed: bool = False
    ) -> dict[str, np.ndarray]:
        """What a search or a descent found that is no training of a model: found once, shared by figures, released.

        Args:
            name: tells it from all else that is tuned.
            find: the arrays by name.
            by_seed: tuned for the models asked for so far, of which all arrays have an axis, their first. Such are not
                tuned again at the scale "released", and only those of the first model are released.

        Raises:
            NotReleasedError: at the scale "released", of what belongs to a model and is not.
            StoreError: what is released was tuned for other weights than are.
        """
        self.check_time()
        path = self._tuned_path(name)
        if by_seed and path == released.tuned_path(name):
            self._check_weights(path)
        models = dict(self.inputs) if by_seed else {}
        about = {"scale": _record(self.scale), "by_seed": by_seed, "models": models}
        if path != released.tuned_path(name) and not self._is_about(path, name, about):
            if self.scale.from_released and by_seed:
                raise NotReleasedError(f"what was tuned as {name}")
            folder = tuned_folder(self.runs, self.scale.name)
            found = {n: np.asarray(a) for n, a in find().items()}
            store.write_arrays(folder.path / path.name, found, about=json.dumps(about))
            folder.send(path.name)
            path = self._tuned_path(name)
        self._note(f"tuned/{name}")
        return store.read_named(path)

    def steps_within_limits(self, config: Config, steps: int, batch_size: int) -> int:
        """So many steps of something that costs what training does, or as many as the scale allows of that."""
        if self.scale.gflop is None:
            return steps
        return min(steps, int(self.scale.gflop / _gflop_per_step(with_train(config, batch_size=batch_size))))

    def sequences_within_limits(self, config: Config) -> int:
        """The scale's; where it limits training, fewer of more than ten entries, which are longer too."""
        fewer = 1.0 if self.scale.gflop is None else max(1.0, (config.task.obs_dim / 10) ** 2)
        return max(16, int(self.scale.sequences / fewer))

    def about(self) -> dict[str, Any]:
        """What a result depends on: the scale, and all that has been asked for."""
        return {"scale": _record(self.scale), "inputs": dict(self.inputs)}

    def still_holds(self, about: Mapping[str, Any]) -> bool:
        """Whether something was made at this scale, and from what is there now; of released models, by this source."""
        inputs = about.get("inputs", {})
        same = _same(about.get("scale"), _record(self.scale), inputs)
        if self.scale.from_released:  # takes seconds, and is to show what this source makes of the weights
            source = provenance.source_hash(provenance.OF_FIGURES)
            same = same and about.get("made", {}).get("figures") == source
        return same and all(self.digest(name) == value for name, value in inputs.items())

    def _is_about(self, path: Path, name: str, about: Mapping[str, Any]) -> bool:
        try:
            if not path.exists():
                return False
            known = parse_json(store.read_metadata(path).get("about", "{}"), str(path))
            store.read_named(path)
        except StoreError:  # damaged: found again
            return False
        if isinstance(known, dict):
            known.pop("weights", None)  # of what was released, and then copied
        return isinstance(known, dict) and (
            _same(known.pop("scale", None), about["scale"], [f"tuned/{name}"])
            and known == {what: value for what, value in about.items() if what != "scale"}
        )

    def _check_weights(self, path: Path) -> None:
        """That what was tuned belongs to the weights beside it, as it was when it was published."""
        about = parse_json(store.read_metadata(path).get("about", "{}"), str(path))
        weights = check(about, {"weights?": {str: str}}, path).get("weights", {})
        if not weights:
            raise StoreError(f"{path} does not say which weights it was tuned for: publish its figure again.")
        for model, digest in weights.items():
            if self.digest(f"released/{model}") != digest:
                raise StoreError(
                    f"{path} was tuned for other weights than are in {released.weights_path(model)}: release the model "
                    "and publish the figure from the same run."
                )

    def _tuned_path(self, name: str) -> Path:
        path = released.tuned_path(name)
        if self.scale.from_released and path.exists():
            return path
        return tuned_folder(self.runs, self.scale.name).fetch(f"{name}.safetensors")

    def digest(self, name: str) -> str | None:
        """Of a model's weights or of what was tuned, by its name in `inputs`; None if there is none. Of a language
        model, whose weights need not be kept: of what it is and what was measured."""
        where, _, name = name.partition("/")
        if not is_plain_name(name):  # from a file that anybody may have written
            return None
        paths = {"released": released.weights_path, "tuned": self._tuned_path}
        if where in paths:
            path = paths[where](name)
        else:
            folder = mirror.at(self.runs, name)
            if (measured := _measured(folder.fetch("config.json"), folder.fetch("result.json"))) is not None:
                return measured
            path = folder.fetch("weights.safetensors")
        return store.read_metadata(path)["sha256"] if path.exists() else None

    def used(self, run: Run) -> None:
        """Remember that something was computed from its models."""
        self._note(f"runs/{run.path.name}")

    def _note(self, name: str) -> None:
        self.inputs[name] = self.digest(name) or ""

    @property
    def minutes_left(self) -> float | None:
        return None if self.deadline is None else max(0.0, (self.deadline - time.monotonic()) / 60)

    def check_time(self) -> None:
        """Between two things that take a while.

        Raises:
            OutOfTimeError: the time given is up.
        """
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise OutOfTimeError("the time given is up.")


@cache
def _at_scale(config: Config, scale: Scale) -> Config:
    changes: dict[str, Any] = {}
    if scale.seeds is not None:
        changes["seeds"] = scale.seeds
    if scale.batch_size is not None:
        changes["batch_size"] = min(scale.batch_size, config.train.batch_size)
    if scale.steps < 1 or scale.gflop is not None:
        changes |= _shortened(with_train(config, **changes), scale)
    if scale.name == "smoke":
        changes |= {"eval_batches": 1, "eval_batch_size": 4, "final_sequences": 4}
    return with_train(config, **changes)


def _shortened(config: Config, scale: Scale) -> dict[str, Any]:
    """Fewer steps, the rate's schedule shortened as much, and fewer evaluations on fewer sequences."""
    train = config.train
    steps = scale.steps * train.steps
    if scale.gflop is not None:
        steps = min(steps, scale.gflop / _gflop_per_step(config))
    steps = max(6, round(steps))
    part, rate = steps / train.steps, train.optimizer.rate
    if isinstance(rate, WarmupCosine):
        warmup = max(1, round(part * rate.warmup))
        rate = replace(rate, warmup=warmup, end=max(warmup + 1, round(part * rate.end)))
    return {
        "steps": steps,
        "optimizer": replace(train.optimizer, rate=rate),
        "eval_every": max(2, steps // EVALUATIONS),
        "eval_batches": 1,
        "keep_every": None if train.keep_every is None else max(2, round(part * train.keep_every)),
        "final_sequences": min(scale.sequences, train.final_sequences),
    }


def _gflop_per_step(config: Config) -> float:
    """Roughly: six for each parameter and token, and for what each token has to do with every other. No matter where:
    a run's name follows from it."""
    model, train, length = config.model, config.train, config.task.length
    shapes = jax.eval_shape(lambda: Transformer(model, key=jax.random.key(0)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    attention = sum(2 * length * block.heads * block.key_dim for block in model.blocks)
    return 6e-9 * train.seeds * train.batch_size * length * (parameters + attention)


def _measured(config: Path, result: Path) -> str | None:
    """Of these files of a language model; None of any other."""
    if not (config.exists() and result.exists()):
        return None
    about = store.read_json(config)
    if not isinstance(about, dict) or about.get("kind") != "LanguageConfig":
        return None
    return hashlib.sha256(config.read_bytes() + result.read_bytes()).hexdigest()


def _record(scale: Scale) -> dict[str, Any]:
    """A scale as results have it, which does not change when it gets a new limit that it does not set."""
    record = asdict(scale)
    if scale.gflop is None:
        del record["gflop"]
    return record


def _same(recorded: Any, now: dict[str, Any], inputs: Iterable[str]) -> bool:
    """Whether two scales are one to what was made of these: how layers are distilled matters where some were."""
    if not isinstance(recorded, Mapping):
        return False
    other = set() if any(name.startswith("tuned/distilled_") for name in inputs) else {"distill_steps"}
    return {k: v for k, v in recorded.items() if k not in other} == {
        k: v for k, v in now.items() if k not in other
    }


def tuned_folder(runs: str | Path, scale: str) -> mirror.Folder:
    """Where numbers lie that were tuned at a scale: beside the runs."""
    return mirror.at(runs, f".tuned/{scale}")
