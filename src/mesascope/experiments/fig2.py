"""Which tokens can be read from which layer: figure 2, and the token probes of the SI."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from jaxtyping import Float

from mesascope.analysis.targets import Target, past_tokens, sampler, teacher_features
from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.common import probe_paths, probe_stream
from mesascope.experiments.lab import Lab
from mesascope.experiments.panels import Curves, Line, Panel
from mesascope.experiments.results import Arrays, Named, Result
from mesascope.tasks.dynamics import Dynamics
from mesascope.tasks.tokens import delayed

LAGS = 8
"""Positions 50 to 43, as the figure has them."""
TICKS = {-float(lag): f"t-{lag}" if lag else "t" for lag in range(LAGS)}
WIDTHS = (5, 10, 15, 20, 30, 50, 80)
KINDS = {"softmax-7": "softmax", "hybrid-mesa": "mesa"}
# Of the authors' models: mean squared error per dimension at t, t-1, t-2 and t-3; and the tokens' variance.
AUTHORS = {
    "softmax-7": (1.14857e-05, 0.000416103, 0.15069, 0.26105),
    "hybrid-mesa": (2.22505e-07, 0.00474608, 0.111096, 0.119035),
    "full-mesa": (0.000361039, 0.205981, 0.233033, 0.232229),
}
VARIANCE = 0.3394


def past(lab: Lab, *, name: str) -> Arrays:
    """Errors of probes of past tokens, from the last position's activations after layer 1."""
    trained = lab.trained(name)
    sample = sampler(trained.config.task, trained.config.tokens, past_tokens(range(LAGS)))
    found = probe_paths(lab, trained, sample, ("blocks.0.resid_post",))
    return {
        name: Named.of(found.relative.values[:, :, 0, -1], "seed", "lag"),
        f"{name}_untrained": Named.of(
            found.relative_controls["untrained"].values[:, :, 0, -1], "seed", "lag"
        ),
    }


def hidden(lab: Lab, *, name: str) -> Arrays:
    """Errors of probes of the generator's features of past tokens, by layer: MLP*, and scaled to unit norm."""
    trained = lab.trained(name)
    depth = len(trained.config.model.blocks)
    targets = {f"mlp[t-{lag}]": _features(trained.config.task, lag) for lag in range(LAGS)}
    targets |= {f"unit[t-{lag}]": teacher_features(lag) for lag in range(2)}
    sample = sampler(trained.config.task, trained.config.tokens, targets)
    errors = np.moveaxis(probe_stream(lab, trained, sample, depth).relative.values[..., -1], 1, 2)
    return {
        name: Named.of(errors[..., :LAGS], "seed", "layer", "lag"),
        f"{name}_unit": Named.of(errors[..., LAGS:], "seed", "layer", "lag"),
    }


def _features(task: Dynamics, lag: int) -> Target:
    """MLP* before it is scaled to unit norm."""
    assert task.nonlinearity is not None
    mlp = dataclasses.replace(task.nonlinearity, unit_norm=False)
    return lambda drawn: delayed(mlp(drawn.states[:, :-1]), lag)


def by_lag(
    result: Result, name: str, label: str, kind: str, *, layer: int | None = None, shade: float = 1.0,
    dashed: bool = False,
) -> Line:  # fmt: skip
    """A line over past tokens, the newest to the right."""
    y = result[name] if layer is None else result[name][:, layer]
    return Line(label=label, x=-np.arange(y.shape[-1], dtype=float), y=y, kind=kind, shade=shade, dashed=dashed,
                markers=True, origin=result.origin[name])  # fmt: skip


def lags_panel(letter: str, title: str, lines: Sequence[Line]) -> Curves:
    """Relative error of a probe by the token that it looks for."""
    return Curves(letter=letter, title=title, xlabel="token", ylabel="relative error", lines=tuple(lines),
                  x_ticks=TICKS)  # fmt: skip


def panels(result: Result) -> list[Panel]:
    """A, and B for both models."""
    lines = []
    for kind, color in KINDS.items():
        lines += [
            by_lag(result, f"binding-{kind}", f"{kind}, full observation", color),
            by_lag(result, f"partial-{kind}", f"{kind}, partial observation", color, dashed=True),
        ]
    untrained = by_lag(result, "binding-softmax-7_untrained", "softmax-7, untrained", "control", dashed=True)
    found: list[Panel] = [lags_panel("A", "past tokens read after layer 1", [*lines, untrained])]
    for kind, color in KINDS.items():
        name = f"nonlinear-{kind}"
        depth = result[name].shape[1] - 1
        found.append(
            lags_panel("B", f"hidden states MLP* read from {kind}", [
                by_lag(result, name, f"layer {i}", color, layer=i, shade=i / depth) for i in range(depth + 1)
            ])
        )  # fmt: skip
    return found


def claims(result: Result) -> list[Claim]:
    """The paper's, panel by panel."""
    claim = partial(Claim, figure="fig2")
    full = {kind: result[f"binding-{kind}"] for kind in KINDS}
    part = {kind: result[f"partial-{kind}"] for kind in KINDS}
    deep = {kind: result[f"nonlinear-{kind}"] for kind in KINDS}
    unit = {kind: result[f"nonlinear-{kind}_unit"] for kind in KINDS}

    def for_both(
        what: str,
        values: dict[str, Float[np.ndarray, " seed"]],
        theirs: Callable[[Sequence[float]], float] | None = None,
        **threshold: float,
    ) -> list[Check]:
        authors = {kind: None if theirs is None else theirs(AUTHORS[kind]) for kind in values}
        return [
            Check(what=f"{kind}: {what}", values=of, authors=authors[kind], **threshold)
            for kind, of in values.items()
        ]

    def early(errors: dict[str, Float[np.ndarray, "seed layer lag"]], lag: int, layers: int) -> dict:
        """The best of the first layers over layer 0."""
        return {k: e[:, 1 : layers + 1, lag].min(1) / e[:, 0, lag] for k, e in errors.items()}

    return [
        claim(
            id="fig2a-1", panel="A", source="Fig. 2A",
            claim="after layer 1 the current and the previous token can be read linearly",
            checks=(
                *for_both("relative error at t-1", {k: e[:, 1] for k, e in full.items()},
                          lambda of: of[1] / VARIANCE, at_most=0.05),
                *for_both("relative error at t", {k: e[:, 0] for k, e in full.items()},
                          lambda of: of[0] / VARIANCE, at_most=0.01),
            ),
        ),
        claim(
            id="fig2a-2", panel="A", source="Fig. 2A", claim="and none further back",
            checks=(
                *for_both("error at t-2 over that at t-1", {k: e[:, 2] / e[:, 1] for k, e in full.items()},
                          lambda of: of[2] / of[1], at_least=5.0),
                *for_both("error at t-3 over that at t-1", {k: e[:, 3] / e[:, 1] for k, e in full.items()},
                          lambda of: of[3] / of[1], at_least=5.0),
            ),
        ),
        claim(
            id="fig2a-3", panel="A", source="Fig. 2A", claim="when observation is partial the horizon grows",
            checks=(
                *for_both("relative error at t-3", {k: e[:, 3] for k, e in part.items()}, at_most=0.1),
                *for_both("past tokens with an error below 0.2",
                          {k: np.sum(e[:, 1:] < 0.2, -1).astype(float) for k, e in part.items()}, at_least=3.0),
                *for_both("smallest error beyond t-5", {k: e[:, 6:].min(-1) for k, e in part.items()},
                          at_least=0.5),
            ),
        ),
        claim(
            id="fig2a-4", panel="A", source="Fig. 2A", claim="a model that was not trained binds nothing",
            checks=tuple(
                for_both("relative error at t-1, untrained",
                         {k: result[f"binding-{k}_untrained"][:, 1] for k in KINDS}, at_least=0.5)
            ),
            needs="nothing",
        ),
        claim(
            id="fig2b-1", panel="B", source="Fig. 2B",
            claim="nonlinear systems: the generator's features of the current token can be read after layer 1",
            checks=tuple(for_both("error after layer 1 over that of layer 0, t", early(deep, 0, 1), at_most=0.1)),
        ),
        claim(
            id="fig2b-2", panel="B", source="Fig. 2B",
            claim="and those of the previous token from one of layers 1 to 3",
            checks=tuple(
                for_both("best error of layers 1 to 3 over that of layer 0, t-1", early(deep, 1, 3), at_most=0.5)
            ),
        ),
        claim(
            id="fig2b-1-unit", panel="B", source="Fig. 2B",
            claim="the same as fig2b-1 for features of unit norm, which are what the generator multiplies",
            checks=tuple(for_both("error after layer 1 over that of layer 0, t", early(unit, 0, 1), at_most=0.1)),
        ),
        claim(
            id="fig2b-2-unit", panel="B", source="Fig. 2B", claim="the same as fig2b-2 for features of unit norm",
            checks=tuple(
                for_both("best error of layers 1 to 3 over that of layer 0, t-1", early(unit, 1, 3), at_most=0.5)
            ),
        ),
    ]  # fmt: skip


def width_name(kind: str, width: int) -> str:
    """The preset of partially observed systems with that embedding."""
    return f"partial-{kind}" if width == WIDTHS[-1] else f"partial-{kind}-{width}"


def token_panels(result: Result) -> list[Panel]:
    """A: all models; B and C: by embedding. Of models that there are."""
    colors = {**KINDS, "full-mesa": "linear"}
    there = {kind: color for kind, color in colors.items() if f"binding-{kind}" in result}
    lines = [by_lag(result, f"binding-{kind}", kind, color) for kind, color in there.items()]
    lines += [
        by_lag(result, f"binding-{kind}_untrained", f"{kind}, untrained", color, dashed=True, shade=0.3)
        for kind, color in there.items()
    ]
    found: list[Panel] = []
    if lines:
        found.append(lags_panel("A", "past tokens read after layer 1, full observation", lines))
    for letter, (kind, color) in zip("BC", KINDS.items(), strict=True):
        lines = [
            by_lag(result, width_name(kind, width), f"{width} wide", color, shade=i / (len(WIDTHS) - 1))
            for i, width in enumerate(WIDTHS)
            if width_name(kind, width) in result
        ]
        if len(lines) > 1:
            found.append(lags_panel(letter, f"{kind}, partial observation, by embedding", lines))
    return found


def token_claims(result: Result) -> list[Claim]:
    """The SI's, of which each waits for all its models."""

    def smallest_gain(kind: str) -> Float[np.ndarray, " seed"]:
        counts = [np.sum(result[width_name(kind, width)] < 0.2, -1) for width in WIDTHS]
        return np.diff(np.stack(counts, 1), axis=1).min(1).astype(float)

    found = []
    if "binding-softmax-7" in result and "binding-full-mesa" in result:
        softmax, full_mesa = result["binding-softmax-7"], result["binding-full-mesa"]
        found.append(
            Claim(
                id="si-fullmesa-1", figure="si-tokens", panel="A", source="SI, token probing, full observation",
                claim="a model without softmax binds more weakly",
                checks=(Check(what="error of full-mesa at t-1 over that of softmax-7",
                              values=full_mesa[:, 1] / softmax[:, 1], at_least=3.0,
                              authors=AUTHORS["full-mesa"][1] / AUTHORS["softmax-7"][1]),),
            )
        )  # fmt: skip
    if all(width_name(kind, width) in result for kind in KINDS for width in WIDTHS):
        found.append(
            Claim(
                id="si-embed-1", figure="si-tokens", panel="B", source="SI, token probing, partial observation",
                claim="wider embeddings copy more tokens",
                checks=tuple(
                    Check(what=f"{kind}: smallest gain of tokens with an error below 0.2 from one width to the next",
                          values=smallest_gain(kind), at_least=0.0)
                    for kind in KINDS
                ),
            )
        )  # fmt: skip
    return found


EXPERIMENTS = {
    "fig2": Experiment(
        id="fig2",
        shows="early layers bind neighboring tokens",
        says=(
            "After training, the previous token can be read almost without error from the current position's "
            "activations after the first layer, and tokens before it cannot. When states are observed only in part the "
            "horizon grows to several tokens. For nonlinear systems early layers hold the generator's features of the "
            "current and of the previous token."
        ),
        pieces={
            **{
                f"{task}_{kind}": partial(past, name=f"{task}-{kind}")
                for task in ("binding", "partial")
                for kind in KINDS
            },
            **{f"nonlinear_{kind}": partial(hidden, name=f"nonlinear-{kind}") for kind in KINDS},
        },
        panels=panels,
        claims=claims,
    ),
    "si-tokens": Experiment(
        id="si-tokens",
        shows="token probes of all models, and by the width of embeddings",
        says=(
            "Without softmax in its first layer a model of two layers binds the previous token less clearly. Of "
            "partially observed sequences, models with wider embeddings hold more past tokens: they use the room that "
            "they have."
        ),
        pieces={
            **{kind: partial(past, name=f"binding-{kind}") for kind in (*KINDS, "full-mesa")},
            **{
                f"{kind}_{width}": partial(past, name=width_name(kind, width))
                for kind in KINDS
                for width in WIDTHS
            },
        },
        panels=token_panels,
        claims=token_claims,
        shared={
            **{kind: ("fig2", f"binding_{kind}") for kind in KINDS},
            **{f"{kind}_{WIDTHS[-1]}": ("fig2", f"partial_{kind}") for kind in KINDS},
        },
        in_parts=True,
    ),
}
