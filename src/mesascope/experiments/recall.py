"""Multi-query associative recall by kind of attention and size of its state: no figure of the paper.

One layer with shifted keys: what it is to remember are pairs of neighbours, so that nothing but the memory is tested.
The state of linear attention and of the delta rule is a matrix of the width of a head squared; least squares has two of
them, one of keys and values and one of keys alone; softmax attention keeps every key and value. Each model is trained
at the best of the same learning rates (`rates.search_rates`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Claim
from mesascope.experiments.lab import Lab, NotReleasedError
from mesascope.experiments.language import less
from mesascope.experiments.panels import Curves, Line, Panel
from mesascope.experiments.rates import train_at_best
from mesascope.experiments.results import Arrays, Named, Result
from mesascope.language import LanguageConfig, LanguageModelConfig
from mesascope.language.presets import warmed_up
from mesascope.models import Block, Delta, Linear, Mesa, Mixer, Normalize, Softmax
from mesascope.tasks import AssociativeRecall
from mesascope.training import AdamW, TrainConfig

MIXERS: dict[str, Mixer] = {"softmax": Softmax(), "linear": Linear(), "delta": Delta(), "mesa": Mesa()}
COLORS = {"softmax": "softmax", "linear": "linear", "delta": "other", "mesa": "mesa"}


@dataclass(frozen=True, kw_only=True)
class _Scale:
    task: AssociativeRecall
    width: int
    key_dims: tuple[int, ...]
    steps: int
    batch_size: int
    seeds: int
    rate: float


SCALES = {
    "smoke": _Scale(task=AssociativeRecall(vocabulary=32, pairs=2, length=16), width=8, key_dims=(2, 4), steps=6,
                    batch_size=4, seeds=2, rate=1e-3),
    "quick": _Scale(task=AssociativeRecall(vocabulary=128, pairs=16, length=80), width=64, key_dims=(4, 8, 16, 32),
                    steps=1000, batch_size=64, seeds=2, rate=1e-2),
    "paper": _Scale(task=AssociativeRecall(vocabulary=8192, pairs=64, length=512), width=128,
                    key_dims=(8, 16, 32, 64), steps=10_000, batch_size=128, seeds=3, rate=3e-3),
}  # fmt: skip


def config_of(scale: str, mixer: str, key_dim: int) -> LanguageConfig:
    """The model of a kind and a size of state."""
    of = SCALES[scale]
    normalize = None if mixer == "softmax" else Normalize(of="features")
    block = Block(mixer=MIXERS[mixer], heads=1, key_dim=key_dim, normalize=normalize, shift_keys=True)
    rate = warmed_up(of.rate, of.steps)
    return LanguageConfig(
        name=f"recall-{mixer}-{key_dim}",
        task=of.task,
        model=LanguageModelConfig(
            vocabulary=of.task.vocabulary,
            width=of.width,
            blocks=(block,),
            dropout=0.0,
            init_std=of.width**-0.5,
        ),
        train=TrainConfig(
            steps=of.steps,
            batch_size=of.batch_size,
            seeds=of.seeds,
            optimizer=AdamW(rate=rate, weight_decay=0.1, clip=1.0, clip_by="global_norm", b2=0.95),
            eval_every=max(1, of.steps // 10),
            eval_batches=2,
            eval_batch_size=of.batch_size,
            final_sequences=8 * of.batch_size,
        ),
    )


def state_size(mixer: str, key_dim: int, length: int) -> int:
    """How many numbers a model remembers after so many tokens."""
    matrix = key_dim**2
    return {"softmax": 2 * length * key_dim, "linear": matrix, "delta": matrix, "mesa": 2 * matrix}[mixer]


def measured(lab: Lab, mixer: str) -> Arrays:
    """The part of queries that are answered, by size of the state."""
    if lab.scale.from_released:
        raise NotReleasedError("the weights of models of associative recall")
    of, accuracy, rates = SCALES[lab.scale.name], [], []
    for key_dim in of.key_dims:
        run, _ = train_at_best(lab, config_of(lab.scale.name, mixer, key_dim))
        accuracy.append(run.result["accuracy"])
        rates.append(run.config.train.optimizer.rate.peak)
    return {
        f"{mixer}_accuracy": Named.of(np.transpose(accuracy), "seed", "size"),
        f"{mixer}_width": Named.of(of.key_dims, "size"),
        f"{mixer}_state": Named.of([state_size(mixer, d, of.task.length) for d in of.key_dims], "size"),
        f"{mixer}_rate": Named.of(rates, "size"),
    }


def panels(result: Result) -> list[Panel]:
    """Accuracy by size of the state, and by width of keys."""

    def by(size: str) -> tuple[Line, ...]:
        return tuple(
            Line(label=mixer, x=result[f"{mixer}_{size}"], y=result[f"{mixer}_accuracy"], kind=COLORS[mixer],
                 markers=True, dashed=mixer == "softmax", origin=result.origin[f"{mixer}_accuracy"])
            for mixer in MIXERS
        )  # fmt: skip

    return [
        Curves(letter="A", title="recall by size of the state", xlabel="numbers in the state",
               ylabel="queries answered", lines=by("state"), log_x=True),
        Curves(letter="B", title="by width of keys, parameters being equal", xlabel="width of keys and values",
               ylabel="queries answered", lines=by("width"), log_x=True,
               x_ticks={float(width): f"{width:.0f}" for width in result["mesa_width"]}),
    ]  # fmt: skip


def claims(result: Result) -> list[Claim]:
    """Ours, not the paper's. At states as large as those of the mesa-layer, as far as there are others as large; what
    is between two sizes is interpolated, by the logarithm of the size."""
    state = result["mesa_state"]
    known = (state >= result["linear_state"].min()) & (state <= result["linear_state"].max())
    linear = np.stack([
        np.interp(np.log(state[known]), np.log(result["linear_state"]), row) for row in result["linear_accuracy"]
    ])  # fmt: skip
    what = "queries answered by linear attention minus those by mesa, mean over sizes of the state"
    return [
        Claim(
            id="recall-1", figure="recall", panel="A", source="ours; the task is that of Arora et al. (2023)",
            claim="as many numbers in a state answer more queries if least squares fits them than if Hebb's rule does",
            checks=less(what, linear.mean(-1), result["mesa_accuracy"][:, known].mean(-1)), seeds=2,
        ),
        Claim(
            id="recall-2", figure="recall", panel="B", source="ours; the task is that of Arora et al. (2023)",
            claim="with keys as wide, least squares answers more queries than Hebb's rule and than the delta rule",
            checks=tuple(
                check
                for mixer, name in (("linear", "linear attention"), ("delta", "the delta rule"))
                for check in less(f"queries answered by {name} minus those by mesa, mean over widths",
                                  result[f"{mixer}_accuracy"].mean(-1), result["mesa_accuracy"].mean(-1))
            ),
            seeds=2,
        ),
    ]  # fmt: skip


def _piece(mixer: str) -> Callable[[Lab], Arrays]:
    return partial(measured, mixer=mixer)


EXPERIMENTS = {
    "recall": Experiment(
        id="recall",
        shows="associative recall by kind of attention and size of its state",
        says=(
            "Not in the paper. A model reads pairs of tokens and is later asked for the second of each: how many it "
            "can answer measures what its state holds. Whether least squares holds more than Hebb's rule (linear "
            "attention) in as many numbers, half of which are about keys alone, and with keys as wide, is measured."
        ),
        pieces={mixer: _piece(mixer) for mixer in MIXERS},
        panels=panels,
        claims=claims,
    )
}
