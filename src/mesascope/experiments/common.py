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
    loss,
    loss_by_time,
    tune,
)

T = TypeVar("T", bound=eqx.Module)

# The same sequences for all models and algorithms of a task, and others for what is tuned or fitted.
EVALUATION, TUNING, PROBING = (2**31 - 3, 2**31 - 4, 2**31 - 5)
LAM = 1000.0
"""λ of the released controls, whose ridge is 0.001."""
LAM_STARTS = (LAM, 1.0)
"""Where the tuning of λ begins; the better end is taken. Where keys are long and noisy, the first alone ends in a
valley far above the other."""
AUTHORS_COEFFICIENTS = {
    "linear-6": (
        (1.02577, 3.25084, 3.25837, 3.21229, 2.69441, 1.27272),
        (0.0, 0.67878, 0.307481, 0.744707, 1.83604, 2.3438),
    ),
    "softmax-3": ((1.23158, 8.19961), (0.0, 4.94994)),
    "softmax-7": (
        (1.0292, 3.8551, 3.74691, 3.38279, 2.98815, 2.09344),
        (0.0, 0.640213, 0.479813, 0.814354, 1.66803, 2.4196),
    ),
}
"""α and β of the authors' control, by the model that they drew it beside; for fully observed linear systems."""

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


def best_optimizer(
    lab: Lab,
    task: Dynamics,
    steps: int,
    *,
    on: Regressors = "tokens",
    near: "OnlySteps | None" = None,
    beside: str | None = None,
) -> MesaOptimizer:
    """Proposition 2 on all pairs with everything tuned: α and β, λ and η.

    Args:
        near: where one more tuning begins.
        beside: which model of the authors these coefficients were drawn beside, if they are theirs.
    """
    tries = [tuned_optimizer(lab, task, steps, newest_pair=True, on=on, lam=lam) for lam in LAM_STARTS]
    if near is not None:
        sample = contexts(task, on=on)
        start = MesaOptimizer(near.alphas, near.betas, near.lam, normalized=True)
        name = f"proposition-2_{store.digest(task)}_{on}_near-{beside or 'released'}_{near.lam:g}_{steps}"
        tries.append(tuned(lab, name, start, lambda key: sample(key, 128), rate=1e-2))
    context = contexts(task, on=on)(jax.random.key(TUNING), min(lab.scale.sequences, 1024))
    return min(tries, key=lambda algorithm: float(loss(algorithm, context)))


class OnlySteps(eqx.Module):
    """Proposition 2 (normalized), of which α and β are tuned and nothing else."""

    alphas: Float[Array, " step"]
    betas: Float[Array, " step"]
    lam: float = eqx.field(static=True)

    def __call__(self, context: Context) -> Float[Array, "*batch time value"]:
        return MesaOptimizer(self.alphas, self.betas, self.lam, normalized=True)(context)


def released_optimizer(
    lab: Lab,
    task: Dynamics,
    steps: int,
    *,
    on: Regressors,
    beside: str | None,
    lam: float,
    batch_size: int = 128,
) -> OnlySteps:
    """Proposition 2 as the authors have it, λ and η given: with their coefficients where they are known; else with
    such as theirs, tuned on the task without the newest pair."""
    if beside is not None:
        alphas, betas = AUTHORS_COEFFICIENTS[beside]
        return OnlySteps(jnp.asarray(alphas), jnp.asarray(betas), lam)
    sample = contexts(task, newest_pair=False, on=on)
    return tuned(
        lab,
        f"proposition-2_{store.digest(task)}_{on}_released_{lam:g}_{steps}",
        OnlySteps(jnp.ones(steps), jnp.zeros(steps), lam),
        lambda key: sample(key, batch_size),
        rate=3e-2,
    )


def proposition_2(
    lab: Lab,
    task: Dynamics,
    steps: int,
    *,
    on: Regressors = "tokens",
    beside: str | None = None,
    lam: float = LAM,
) -> dict[str, Named]:
    """Losses of Proposition 2 by time.

    Args:
        beside: a model of `AUTHORS_COEFFICIENTS`: with these, as released; else with such as theirs.
        lam: λ as released.

    Returns:
        "best": on all pairs, with everything tuned; "released": as the authors have it, which leaves out the newest
        pair; "all_pairs": the same algorithm with that pair.
    """
    theirs = released_optimizer(lab, task, steps, on=on, beside=beside, lam=lam)
    every, dropped = (contexts(task, newest_pair=newest, on=on) for newest in (True, False))
    return {
        "best": algorithm_losses(
            lab, best_optimizer(lab, task, steps, on=on, near=theirs, beside=beside), every
        ),
        "released": algorithm_losses(lab, theirs, dropped),
        "all_pairs": algorithm_losses(lab, theirs, every),
    }


def depth_probes(lab: Lab, trained: Trained, *, lam: float = LAM, on: Regressors = "tokens") -> Arrays:
    """Probes of the next token and of preconditioned inputs, by layer and time.

    Inputs are preconditioned by six steps of Proposition 2, tuned on the task, and by the exact inverse.

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
    result: Result,
    figure: str,
    source: str,
    ids: Sequence[str],
    panels: Sequence[str] = ("E", "F"),
    authors: Sequence[float | None] = (None, None),
) -> list[Claim]:
    """Probes improve with depth; `ids`, `panels` and the authors' numbers for the next token and for preconditioned
    inputs. The third is for inputs preconditioned exactly."""
    following = result["next"]
    found = [
        Claim(
            id=ids[0], figure=figure, panel=panels[0], source=source,
            claim="the next token can be read better from deeper layers and with more context",
            checks=(
                Check(what="error after the last layer over that of layer 0, last t",
                      values=following[:, -1, -1] / following[:, 0, -1], at_most=0.1, authors=authors[0]),
                Check(what="rank correlation of error and depth, last t",
                      values=rank_correlation(following[..., -1]), at_most=-0.8),
            ),
        ),
    ]  # fmt: skip
    for name, suffix, by, theirs in (
        ("preconditioned", "", "six tuned steps of Proposition 2", authors[1]),
        ("exact", "-exact", "the exact inverse", None),
    ):
        ratio = over_layer_0(result[name])
        found.append(
            Claim(
                id=ids[1] + suffix, figure=figure, panel=panels[1], source=source,
                claim=f"inputs preconditioned by {by} appear with depth",
                checks=(
                    Check(what="error of the best layer over that of layer 0, mean over t ≥ 10",
                          values=ratio[:, 1:].min(-1), at_most=0.5, authors=theirs),
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


CONTROLS = {
    "best": ("", ""),
    "released": ("-as-run", " (control as released: without the newest pair)"),
    "all_pairs": ("-as-run-all-pairs", " (control as released, with the newest pair)"),
}
"""What `proposition_2` returns: how the ids and the texts of claims about it end."""


def described(
    claim: Callable[..., Claim],
    name: str,
    panel: str,
    text: str,
    within: float,
    model: Float[np.ndarray, "seed time"],
    result: Result,
    control: str,
    **authors: float,
) -> list[Claim]:
    """A model's mean loss is that of Proposition 2, in each of its forms.

    Args:
        control: what the names of its arrays begin with.
        authors: their number, by the form of the control.
    """
    return [
        claim(
            id=name + suffix, panel=panel, claim=text + note,
            checks=(Check(what="|mean loss over that of Proposition 2 - 1|", authors=authors.get(form),
                          values=relative_gap(model, result[f"{control}_{form}"]), at_most=within),),
        )
        for form, (suffix, note) in CONTROLS.items()
    ]  # fmt: skip


def proposition_2_lines(
    result: Result, control: str, label: str, *, again: str = "", shade: float = 1.0
) -> list[Line]:
    """Its losses in each form.

    Args:
        again: what tells it from the others of a panel, for the second and third.
    """
    released = f"{again} as released".strip()
    labels = {
        "best": (label, "theory"),
        "released": (f"{released} (newest pair left out)", "control"),
        "all_pairs": (f"{released}, but all pairs", "features"),
    }
    return [
        by_time(result, f"{control}_{form}", text, kind, shade=shade, dashed=True)
        for form, (text, kind) in labels.items()
    ]
