"""Which tokens the first layer depends on while it is trained (SI)."""

from functools import partial

import jax
import numpy as np
from jaxtyping import Float

from mesascope.analysis.binding import sensitivity
from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.common import EVALUATION
from mesascope.experiments.lab import Lab
from mesascope.experiments.panels import Curves, Line, Panel
from mesascope.experiments.results import Arrays, Named, Result

SEQUENCES = 64
POSITIONS = (2, 25, 50)
"""Counted from 1, as the released code has them."""
MOMENTS = 8
"""Of training, evenly spaced from its start to its end."""
# By task: presets, and up to which lag the first layer should depend on tokens, how much more than on older ones.
TASKS = {
    "full": ("sensitivity", ("softmax-7", "hybrid-mesa", "full-mesa"), 1, 10.0),
    "partial": ("sensitivity-partial", ("softmax-7", "hybrid-mesa"), 3, 10.0),
    "nonlinear": ("sensitivity-nonlinear", ("softmax-7", "hybrid-mesa"), 1, 5.0),
}
COLORS = {"softmax-7": "softmax", "hybrid-mesa": "mesa", "full-mesa": "linear"}


def over_training(lab: Lab, *, name: str) -> Arrays:
    """Sensitivity of activations after layer 1 at three positions to all tokens, at moments of training."""
    trained = lab.trained(name)
    kept = trained.kept()
    steps = np.array(sorted(kept))
    steps = steps[np.unique(np.linspace(0, len(steps) - 1, MOMENTS).round().astype(int))]
    # All moments beside each other as if they were seeds, so that one program does for all.
    models = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(kept[int(step)] for step in steps))
    found = sensitivity(
        models,
        lambda key, count: trained.sample(key, count).tokens,
        times=[position - 1 for position in POSITIONS],
        sequences=min(SEQUENCES, lab.scale.sequences),
        key=jax.random.key(EVALUATION),
    ).by_entry.values
    by_step = found.reshape(len(steps), -1, *found.shape[1:]).swapaxes(0, 1)
    return {
        f"{name}_steps": Named.of(steps, "step"),
        name: Named.of(by_step.astype(np.float32), "seed", "step", "position", "input"),
    }


def over_older(
    result: Result, name: str, lag: int, step: int = -1, position: int = 25
) -> Float[np.ndarray, " seed"]:
    """Sensitivity to the token at a lag over the mean of that to all older ones."""
    values = result[name][:, step, POSITIONS.index(position)]
    return values[:, position - 1 - lag] / values[:, : position - 1 - lag].mean(-1)


def panels(result: Result) -> list[Panel]:
    """A panel for each model that there is, a line for each moment of training, at position 25."""
    found: list[Panel] = []
    letters = iter("ABCDEFGH")
    position = 25
    lags = np.arange(12)
    ticks = {-float(lag): f"t-{lag}" if lag else "t" for lag in lags if lag % 2 == 0}
    for task, (prefix, kinds, _, _) in TASKS.items():
        for kind in kinds:
            name, letter = f"{prefix}-{kind}", next(letters)
            if name not in result:
                continue
            values = result[name][:, :, POSITIONS.index(position)]
            steps = result[f"{name}_steps"]
            lines = [
                Line(label=f"step {step:.0f}", x=-lags.astype(float), y=values[:, i, position - 1 - lags],
                     kind=COLORS[kind], shade=i / max(1, len(steps) - 1), markers=True, origin=result.origin[name])
                for i, step in enumerate(steps)
            ]  # fmt: skip
            found.append(
                Curves(letter=letter, title=f"{kind}, {task} task, at t = {position}", xlabel="token",
                       ylabel="sensitivity", lines=tuple(lines), x_ticks=ticks)
            )  # fmt: skip
    return found


def claims(result: Result) -> list[Claim]:
    """The SI's, of tasks whose models are all there. "full-mesa" has no softmax, and only the last is about it."""
    statements = {
        "full": "layer 1 comes to depend on t and t-1",
        "partial": "layer 1 comes to depend on several past tokens when observation is partial",
        "nonlinear": "layer 1 comes to depend on few past tokens when systems are nonlinear",
    }
    found = []
    for i, (task, (prefix, kinds, lag, factor)) in enumerate(TASKS.items(), start=1):
        names = {kind: f"{prefix}-{kind}" for kind in kinds if kind != "full-mesa"}
        if not all(name in result for name in names.values()):
            continue
        at_end = {kind: over_older(result, name, lag) for kind, name in names.items()}
        shown = {"full": "A", "partial": "D", "nonlinear": "F"}[task]
        about = partial(Claim, figure="si-sensitivity", panel=shown, source="SI, sensitivity")
        found += [
            about(
                id=f"si-sens-{i}", claim=statements[task],
                checks=tuple(
                    Check(what=f"{kind}: sensitivity to t-{lag} over the mean of older tokens", values=of,
                          at_least=factor)
                    for kind, of in at_end.items()
                ),
            ),
            about(
                id=f"si-sens-{i}-rise", claim="and did not before training",
                checks=tuple(
                    Check(what=f"{kind}: that ratio over what it was before training",
                          values=of / over_older(result, names[kind], lag, step=0), at_least=2.0)
                    for kind, of in at_end.items()
                ),
            ),
        ]  # fmt: skip
    if "sensitivity-softmax-7" in result and "sensitivity-full-mesa" in result:
        softmax, full_mesa = (
            over_older(result, f"sensitivity-{kind}", 1) for kind in ("softmax-7", "full-mesa")
        )
        found.append(
            Claim(
                id="si-sens-fullmesa", figure="si-sensitivity", panel="C", source="SI, sensitivity",
                claim="a model without softmax depends less clearly on t-1",
                checks=(Check(what="ratio of softmax-7 over that of full-mesa", values=softmax / full_mesa,
                              at_least=2.0),),
            )
        )  # fmt: skip
    return found


EXPERIMENTS = {
    "si-sensitivity": Experiment(
        id="si-sensitivity",
        shows="which tokens activations after layer 1 depend on, over training",
        says=(
            "The gradient of first-layer activations with respect to input tokens is spread over the past before "
            "training. Over training it concentrates on the current and the previous token, on several of them when "
            "observation is partial and on few for nonlinear systems. Without softmax it concentrates less."
        ),
        pieces={
            f"{task}_{kind}": partial(over_training, name=f"{prefix}-{kind}")
            for task, (prefix, kinds, _, _) in TASKS.items()
            for kind in kinds
        },
        panels=panels,
        claims=claims,
        in_parts=True,
    )
}
