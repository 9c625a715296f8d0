"""What several figures measure: losses by context length, tuned algorithms, probes by depth."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mesascope import store
from mesascope.analysis.probes import Probes, Sample, probe_each, residual_stream
from mesascope.analysis.scores import in_context_score
from mesascope.analysis.targets import (
    Target,
    next_token,
    preconditioned,
    sampler,
    stacked,
    teacher_features,
    without_outliers,
)
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.lab import Lab, Trained
from mesascope.experiments.panels import Curves, Line, Origin
from mesascope.experiments.results import Arrays, Named, Result
from mesascope.tasks.dynamics import Dynamics
from mesascope.theory.solvers import (
    Algorithm,
    Context,
    MesaOptimizer,
    autoregressive,
    loss_by_time,
    tune,
)

T = TypeVar("T", bound=eqx.Module)

# The same sequences for all models and algorithms of a task, and others for what is tuned or fitted.
EVALUATION, TUNING, PROBING = (2**31 - 3, 2**31 - 4, 2**31 - 5)
LAM = 1000.0
"""λ of all controls: the released code's ridge of 0.001."""

Regressors = Literal["tokens", "five-tokens", "sixteen-tokens", "true-features"]
REGRESSORS: dict[Regressors, Target | None] = {
    "tokens": None,
    "five-tokens": stacked(5),
    "sixteen-tokens": stacked(16),
    "true-features": teacher_features(),
}
"""What algorithms regress on: tokens; for partially observed systems as many as the paper's probes have, or as the
released control has; for nonlinear ones what the generator itself computes of the state."""


def model_losses(lab: Lab, trained: Trained) -> Named:
    """½‖error‖² by seed and time on fresh sequences."""
    found = in_context_score(
        trained.models, trained.sample, sequences=lab.scale.sequences, key=jax.random.key(EVALUATION)
    )
    return Named.estimate(found.loss)


def contexts(
    task: Dynamics, *, newest_pair: bool = True, on: Regressors = "tokens"
) -> Callable[[Array, int], Context]:
    """What an algorithm is given of fresh sequences."""
    features = REGRESSORS[on]

    def sample(key: Array, count: int) -> Context:
        drawn = task.sample(key, count)
        return autoregressive(
            drawn.observations,
            features=None if features is None else jnp.asarray(features(drawn)),
            newest_pair=newest_pair,
        )

    return sample


def algorithm_losses(
    lab: Lab, algorithm: Algorithm, sample: Callable[[Array, int], Context], batch_size: int = 256
) -> Named:
    """½‖error‖² of an algorithm by time, on the sequences of `model_losses`."""
    count = max(1, lab.scale.sequences // batch_size)
    size = min(batch_size, lab.scale.sequences)
    keys = [jax.random.fold_in(jax.random.key(EVALUATION), i) for i in range(count)]
    losses = [np.asarray(loss_by_time(algorithm, sample(key, size)), np.float64) for key in keys]
    return Named.of(np.mean(losses, 0), "time")


def tuned(lab: Lab, name: str, start: T, draw: Callable[[Array], Context], *, rate: float) -> T:
    """An algorithm whose coefficients, beginning with these, are tuned on a task."""

    def find() -> dict[str, Any]:
        found, _ = tune(start, draw, steps=lab.scale.tune_steps, rate=rate, key=jax.random.key(TUNING))
        return {f"{i:02d}": leaf for i, leaf in enumerate(jax.tree.leaves(found))}

    leaves = lab.tuned(name, find)
    return jax.tree.unflatten(jax.tree.structure(start), [jnp.asarray(leaves[n]) for n in sorted(leaves)])


def tuned_optimizer(
    lab: Lab,
    task: Dynamics,
    steps: int,
    *,
    newest_pair: bool,
    on: Regressors = "tokens",
    lam: float = LAM,
    batch_size: int = 128,
) -> MesaOptimizer:
    """Proposition 2 (normalized), its coefficients tuned on the task: k layers are k - 1 steps and the last product.

    Args:
        steps: coefficients of each kind.
    """
    pairs = "newest" if newest_pair else "dropped"
    sample = contexts(task, newest_pair=newest_pair, on=on)
    return tuned(
        lab,
        f"proposition-2_{store.digest(task)}_{on}_{pairs}_{lam:g}_{steps}",
        MesaOptimizer.neumann(steps=steps, lam=lam),
        lambda key: sample(key, batch_size),
        rate=3e-2,
    )


def proposition_2(lab: Lab, task: Dynamics, steps: int, *, on: Regressors = "tokens") -> dict[str, Named]:
    """Losses of tuned Proposition 2 by time: "newest" with all pairs, "dropped" without the newest, as released."""
    losses = {}
    for name, newest in (("newest", True), ("dropped", False)):
        algorithm = tuned_optimizer(lab, task, steps, newest_pair=newest, on=on)
        losses[name] = algorithm_losses(lab, algorithm, contexts(task, newest_pair=newest, on=on))
    return losses


def depth_probes(lab: Lab, trained: Trained, *, lam: float = LAM, on: Regressors = "tokens") -> Arrays:
    """Probes of the next token and of preconditioned inputs, by layer and time.

    Inputs are preconditioned by six tuned steps of Proposition 2, as released; and by the exact inverse.

    Returns:
        "next", "preconditioned", "exact": errors on sequences that the probes were not fitted to, by seed, layer and
        time, relative to predicting zero; the same with "_untrained", and in-sample with "_in_sample".
    """
    task, depth = trained.config.task, len(trained.config.model.blocks)
    inputs = REGRESSORS[on]
    six_steps = tuned_optimizer(lab, task, 6, newest_pair=True, on=on, lam=lam)
    wanted: dict[str, Target] = {
        "next": next_token,
        "preconditioned": preconditioned(six_steps, inputs=inputs),
        "exact": preconditioned(lam, inputs=inputs),
    }
    samples = {
        name: sampler(
            task,
            trained.config.tokens,
            {name: target},
            keep=None if name == "next" else without_outliers(target),
        )
        for name, target in wanted.items()
    }
    arrays: Arrays = {}
    for name, found in _probe_each(lab, trained, samples, residual_stream(depth)).items():
        arrays[name] = Named.of(found.relative.values[:, 0], "seed", "layer", "time")
        arrays[f"{name}_in_sample"] = Named.of(found.relative_in_sample[:, 0], "seed", "layer", "time")
        untrained = found.relative_controls["untrained"].values[:, 0]
        arrays[f"{name}_untrained"] = Named.of(untrained.mean(0), "layer", "time")
    return arrays


def probe_stream(lab: Lab, trained: Trained, sample: Sample, depth: int) -> Probes:
    """Probes of the residual stream: of the embedding (layer 0) and after each block."""
    return probe_paths(lab, trained, sample, residual_stream(depth))


def probe_paths(lab: Lab, trained: Trained, sample: Sample, paths: Sequence[str]) -> Probes:
    """Probes of activations, on the same sequences for all models of a task."""
    return _probe_each(lab, trained, {"": sample}, paths)[""]


def _probe_each(
    lab: Lab, trained: Trained, samples: Mapping[str, Sample], paths: Sequence[str]
) -> dict[str, Probes]:
    return probe_each(
        trained.models,
        samples,
        untrained=trained.untrained,
        paths=paths,
        sequences=lab.scale.probe_sequences,
        key=jax.random.key(PROBING),
    )


def rank_correlation(errors: Float[np.ndarray, "seed layer"]) -> Float[np.ndarray, " seed"]:
    """Spearman's, of errors with depth."""
    ranks = errors.argsort(-1).argsort(-1).astype(float)
    depth = np.arange(errors.shape[-1], dtype=float)
    ranks, depth = ranks - ranks.mean(-1, keepdims=True), depth - depth.mean()
    return ranks @ depth / np.sqrt((ranks**2).sum(-1) * (depth**2).sum())


def over_layer_0(errors: Float[np.ndarray, "seed layer time"]) -> Float[np.ndarray, "seed layer"]:
    """Errors over those of layer 0, mean over t ≥ 10."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nanmean((errors / errors[:, :1])[..., 9:], -1)


def depth_claims(
    result: Result, figure: str, source: str, ids: Sequence[str], panels: Sequence[str] = ("E", "F")
) -> list[Claim]:
    """Probes improve with depth; `ids` and `panels` for the next token and for preconditioned inputs. The third is for
    inputs preconditioned exactly."""
    following = result["next"]
    found = [
        Claim(
            id=ids[0], figure=figure, panel=panels[0], source=source,
            claim="the next token can be read better from deeper layers and with more context",
            checks=(
                Check(what="error after the last layer over that of layer 0, last t",
                      values=following[:, -1, -1] / following[:, 0, -1], at_most=0.1),
                Check(what="rank correlation of error and depth, last t",
                      values=rank_correlation(following[..., -1]), at_most=-0.8),
            ),
        ),
    ]  # fmt: skip
    for name, suffix, by in (
        ("preconditioned", "", "six tuned steps of Proposition 2, as released"),
        ("exact", "-exact", "the exact inverse"),
    ):
        ratio = over_layer_0(result[name])
        found.append(
            Claim(
                id=ids[1] + suffix, figure=figure, panel=panels[1], source=source,
                claim=f"inputs preconditioned by {by} appear with depth",
                checks=(
                    Check(what="error of the best layer over that of layer 0, mean over t ≥ 10",
                          values=ratio[:, 1:].min(-1), at_most=0.5),
                    Check(what="rank correlation of error and depth, t ≥ 10",
                          values=rank_correlation(ratio), at_most=-0.5),
                ),
            )
        )  # fmt: skip
    return found


def depth_panels(result: Result, kind: str, letters: Sequence[str] = ("E", "F")) -> list[Curves]:
    """Errors of both probes by time, a line for each layer, darker the deeper."""
    panels = []
    for letter, name, title in (
        (letters[0], "next", "next token read from layers"),
        (letters[1], "preconditioned", "preconditioned input read from layers"),
    ):
        errors = result[name]
        layers = errors.shape[1]
        time = np.arange(1, errors.shape[-1] + 1)
        lines = [
            Line(label=f"layer {i}", x=time, y=errors[:, i], kind=kind, shade=i / (layers - 1),
                 origin=result.origin[name])
            for i in range(layers)
        ]  # fmt: skip
        lines.append(
            Line(label="untrained, last layer", x=time, y=result[f"{name}_untrained"][-1:], kind="control",
                 dashed=True, origin=result.origin[name])
        )  # fmt: skip
        if name == "preconditioned":
            exact = result["exact"][:, -1]
            lines.append(
                Line(label="exactly preconditioned, last layer", x=time, y=exact, kind="theory", dashed=True,
                     origin=result.origin["exact"])
            )  # fmt: skip
        panels.append(
            Curves(letter=letter, title=title, xlabel="context length t", ylabel="relative error",
                   lines=tuple(lines))
        )  # fmt: skip
    return panels


def by_time(
    result: Result, name: str, label: str, kind: str, *, shade: float = 1.0, dashed: bool = False
) -> Line:
    """A line of losses by context length."""
    y = np.atleast_2d(result[name])
    origin: Origin = result.origin[name]
    time = np.arange(1, y.shape[-1] + 1)
    return Line(label=label, x=time, y=y, kind=kind, shade=shade, dashed=dashed, origin=origin)


def relative_gap(
    ours: Float[np.ndarray, "seed time"], theirs: Float[np.ndarray, " time"]
) -> Float[np.ndarray, " seed"]:
    """|mean over t of ours / mean over t of theirs - 1|, by seed."""
    return np.abs(ours.mean(-1) / theirs.mean() - 1)


def worst_gap(
    ours: Float[np.ndarray, "seed time"], theirs: Float[np.ndarray, " time"], first: int
) -> Float[np.ndarray, " seed"]:
    """The largest |ours / theirs - 1| from time `first` (counted from 1) on, by seed."""
    return np.max(np.abs(ours / theirs - 1)[:, first - 1 :], -1)


def final(losses: Any) -> Float[np.ndarray, " seed"]:
    """Mean over time, by seed."""
    return np.asarray(losses).mean(-1)
