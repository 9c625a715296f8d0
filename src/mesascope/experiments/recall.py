"""Multi-query associative recall by kind of attention and size of its state: no figure of the paper.

One layer with shifted keys: what it is to remember are pairs of neighbours, so that nothing but the memory is tested.
The state of linear attention, the delta rule and least squares is a matrix of the width of a head squared; softmax
attention keeps everything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.lab import Lab, NotReleasedError, OutOfTimeError
from mesascope.experiments.panels import Curves, Line, Panel
from mesascope.experiments.results import Arrays, Named, Result
from mesascope.language import LanguageConfig, LanguageModelConfig
from mesascope.language.presets import warmed_up
from mesascope.models import Block, Delta, Linear, Mesa, Mixer, Normalize, Softmax
from mesascope.runs import fit
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
    "quick": _Scale(task=AssociativeRecall(vocabulary=64, pairs=8, length=40), width=32, key_dims=(4, 8, 16, 32),
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


def measured(lab: Lab, mixer: str) -> Arrays:
    """The part of queries that are answered, by size of the state."""
    if lab.scale.from_released:
        raise NotReleasedError("the weights of models of associative recall")
    accuracy = []
    for key_dim in SCALES[lab.scale.name].key_dims:
        lab.check_time()
        config = config_of(lab.scale.name, mixer, key_dim)
        run = fit(config, runs=lab.runs, max_minutes=lab.minutes_left, console=lab.console)
        if not run.finished:
            raise OutOfTimeError(f"stopped while training {config.name}.")
        lab.used(run)
        accuracy.append(run.result["accuracy"])
    return {
        f"{mixer}_accuracy": Named.of(np.transpose(accuracy), "seed", "size"),
        f"{mixer}_key_dims": Named.of(SCALES[lab.scale.name].key_dims, "size"),
    }


def panels(result: Result) -> list[Panel]:
    """Accuracy by size of the state."""
    lines = tuple(
        Line(label=mixer, x=result[f"{mixer}_key_dims"], y=result[f"{mixer}_accuracy"], kind=COLORS[mixer],
             markers=True, dashed=mixer == "softmax", origin=result.origin[f"{mixer}_accuracy"])
        for mixer in MIXERS
    )  # fmt: skip
    ticks = {float(d): f"{int(d)}" for d in result["mesa_key_dims"]}
    return [
        Curves(letter="A", title="multi-query associative recall", xlabel="width of the head (state: its square)",
               ylabel="queries answered", lines=lines, log_x=True, x_ticks=ticks)
    ]  # fmt: skip


def claims(result: Result) -> list[Claim]:
    """Ours, not the paper's."""
    accuracy = {mixer: result[f"{mixer}_accuracy"] for mixer in MIXERS}

    def gain(over: str) -> Check:
        return Check(
            what=f"queries answered by mesa minus those by {over}, mean over sizes of the state",
            values=(accuracy["mesa"] - accuracy[over]).mean(-1),
            at_least=0.0,
        )

    return [
        Claim(
            id="recall-1", figure="recall", panel="A", source="ours; the task is that of Arora et al. (2023)",
            claim="a state of the same size answers more queries if least squares fits it than if Hebb's rule does",
            checks=(gain("linear"),),
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
            "can answer measures what its state holds. Least squares holds more in a state of the same size than "
            "Hebb's rule (linear attention)."
        ),
        pieces={mixer: _piece(mixer) for mixer in MIXERS},
        panels=panels,
        claims=claims,
    )
}
