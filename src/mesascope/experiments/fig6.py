"""Softmax Transformers take steps of Proposition 2: figure 6, and the same for other tasks (SI)."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.common import (
    CONTROLS,
    LAM,
    Regressors,
    by_time,
    depth_claims,
    depth_panels,
    depth_probes,
    model_losses,
    proposition_2,
    proposition_2_lines,
    relative_gap,
    worst_gap,
)
from mesascope.experiments.lab import Lab
from mesascope.experiments.panels import Curves, Panel
from mesascope.experiments.results import Arrays, Result

LAYERS = (3, 7, 12)
# λ of the released controls and probes (of five tokens) of partially observed systems.
PARTIAL_LAM = 0.1
LATE = 15
"""From this context length on curves are compared point by point."""
# The authors' mean loss over that of their control, minus 1, by layers and form of the control. That with all pairs was
# recomputed from its coefficients; those for 12 layers are not known.
AUTHORS = {
    (3, "released"): abs(0.315315 / 0.304682 - 1),
    (3, "all_pairs"): abs(0.315315 / 0.286568 - 1),
    (7, "released"): abs(0.230174 / 0.231748 - 1),
    (7, "all_pairs"): abs(0.230174 / 0.208214 - 1),
    (12, "released"): abs(0.199382 / 0.218892 - 1),
}


def losses(lab: Lab) -> Arrays:
    """Losses by context length of 3, 7 and 12 layers."""
    return {f"softmax-{layers}": model_losses(lab, lab.trained(f"softmax-{layers}")) for layers in LAYERS}


def steps(
    lab: Lab,
    *,
    name: str,
    layers: int,
    on: Regressors = "tokens",
    beside: str | None = None,
    lam: float = LAM,
) -> Arrays:
    """As many steps of Proposition 2 as layers: coefficients for all but the last, which is a gradient step."""
    found = proposition_2(lab, lab.config(name).task, layers - 1, on=on, beside=beside, lam=lam)
    return {f"proposition_2_{layers}_{which}": of for which, of in found.items()}


def task_losses(lab: Lab, *, name: str) -> Arrays:
    """Losses by context length of seven layers."""
    return {"softmax-7": model_losses(lab, lab.trained(name))}


def probes(lab: Lab, *, name: str = "softmax-7", lam: float = LAM, on: Regressors = "tokens") -> Arrays:
    """Probes of seven layers by layer and context length."""
    return depth_probes(lab, lab.trained(name), lam=lam, on=on)


def _gaps(
    result: Result,
    layers: tuple[int, ...],
    which: str,
    mean: float,
    authors: Mapping[tuple[int, str], float] = MappingProxyType({}),
) -> tuple[Check, ...]:
    """How far models are from as many steps as they have layers: on average, and late at every context length."""
    pairs = [(n, result[f"softmax-{n}"], result[f"proposition_2_{n}_{which}"]) for n in layers]
    return (
        *(
            Check(what=f"{n} layers: |mean loss over that of {n} tuned steps - 1|",
                  values=relative_gap(ours, theirs), at_most=mean, authors=authors.get((n, which)))
            for n, ours, theirs in pairs
        ),
        *(
            Check(what=f"{n} layers: largest |loss over that of {n} tuned steps - 1|, t ≥ {LATE}",
                  values=worst_gap(ours, theirs, LATE), at_most=0.3)
            for n, ours, theirs in pairs
        ),
    )  # fmt: skip


def _steps_panel(result: Result, letter: str, title: str, layers: tuple[int, ...]) -> Curves:
    lines = []
    for n in layers:
        shade = n / layers[-1]
        lines += [
            by_time(result, f"softmax-{n}", f"softmax, {n} layers", "softmax", shade=shade),
            *proposition_2_lines(
                result, f"proposition_2_{n}", f"Proposition 2, {n} steps", again=f"{n} steps", shade=shade
            ),
        ]
    return Curves(letter=letter, title=title, log_y=True, xlabel="context length t", ylabel="loss",
                  lines=tuple(lines))  # fmt: skip


def panels(result: Result) -> list[Panel]:
    """A to C."""
    return [
        *depth_panels(result, "softmax", ("A", "B")),
        _steps_panel(result, "C", "as many steps of Proposition 2 as layers", LAYERS),
    ]


def claims(result: Result) -> list[Claim]:
    """The paper's, panel by panel."""
    claim = partial(Claim, figure="fig6", panel="C", source="Fig. 6C")
    return [
        *depth_claims(result, "fig6", "Fig. 6", ("fig6a-1", "fig6b-1"), ("A", "B"), authors=(0.005666, 0.3397)),
        *_steps_claims(claim, "fig6c-1", "3 and 7 layers are about 3 and 7 steps of Proposition 2, tuned on the task",
                       result, (3, 7), 0.1, AUTHORS),
        *_steps_claims(claim, "fig6c-12", "12 layers are about 12 steps", result, (12,), 0.1, AUTHORS),
    ]  # fmt: skip


def _steps_claims(
    claim: Callable[..., Claim],
    name: str,
    text: str,
    result: Result,
    layers: tuple[int, ...],
    mean: float,
    authors: Mapping[tuple[int, str], float] = MappingProxyType({}),
) -> list[Claim]:
    """Models are as many steps as they have layers, with each form of the control."""
    return [
        claim(
            id=name + suffix,
            claim=text + note,
            checks=_gaps(result, layers, form, mean, authors),
        )
        for form, (suffix, note) in CONTROLS.items()
    ]


def _task(
    name: str, figure: str, prefix: str, what: str, shows: str, says: str, **pieces: partial
) -> Experiment:
    """Figure 6 with seven layers on another task."""
    source = f"SI, {shows}"

    def panels(result: Result) -> list[Panel]:
        return [
            *depth_panels(result, "softmax", ("A", "B")),
            _steps_panel(result, "C", f"seven steps on {what}", (7,)),
        ]

    def claims(result: Result) -> list[Claim]:
        claim = partial(Claim, figure=figure, panel="C", source=source)
        return [
            *depth_claims(result, figure, source, (f"{prefix}-1", f"{prefix}-2"), ("A", "B")),
            *_steps_claims(
                claim,
                f"{prefix}-3",
                f"seven layers are about seven steps of Proposition 2 on {what}",
                result,
                (7,),
                0.3,
                {},
            ),
        ]

    return Experiment(
        id=figure,
        shows=shows,
        says=says,
        pieces={
            "probes": pieces["probes"],
            "losses": partial(task_losses, name=name),
            "steps": pieces["steps"],
        },
        panels=panels,
        claims=claims,
    )


EXPERIMENTS = {
    "fig6": Experiment(
        id="fig6",
        shows="softmax Transformers on raw tokens take steps of Proposition 2",
        says=(
            "In a Transformer with seven layers of softmax attention, trained on raw tokens, the next token can be "
            "read better from deeper layers and with more context, and so can the preconditioned input that "
            "Proposition 2 computes. Models with 3 and 7 layers have the loss of 3 and 7 steps of that method, whose "
            "coefficients were tuned on the task and not to match."
        ),
        pieces={
            "probes": probes,
            "losses": losses,
            "steps_3": partial(steps, name="softmax-3", layers=3, beside="softmax-3"),
            "steps_7": partial(steps, name="softmax-7", layers=7, beside="softmax-7"),
            "steps_12": partial(steps, name="softmax-12", layers=12),
        },
        panels=panels,
        claims=claims,
    ),
    "si-partial": _task(
        "partial-softmax-7",
        "si-partial",
        "si-partial",
        "16 tokens at a time",
        "probes and steps of Proposition 2, partial observation",
        (
            "When states are observed only in part, the method of Proposition 2 has to regress on several past tokens. "
            "Layer by layer, predictions and the preconditioned stack of five tokens can be read better, and the loss "
            "is close to that of seven steps."
        ),
        probes=partial(probes, name="partial-softmax-7", lam=PARTIAL_LAM, on="five-tokens"),
        # The released control has the coefficients of fully observed systems.
        steps=partial(
            steps,
            name="partial-softmax-7",
            layers=7,
            on="sixteen-tokens",
            beside="softmax-7",
            lam=PARTIAL_LAM,
        ),
    ),
    "si-nonlinear": _task(
        "nonlinear-softmax-7",
        "si-nonlinear",
        "si-nonlin",
        "the generator's features",
        "probes and steps of Proposition 2, nonlinear systems",
        (
            "Nonlinear systems are linear in the generator's features. Layer by layer, predictions and the "
            "preconditioned features can be read better, and the loss is that of seven steps of Proposition 2 on true "
            "features."
        ),
        probes=partial(probes, name="nonlinear-softmax-7", on="true-features"),
        steps=partial(steps, name="nonlinear-softmax-7", layers=7, on="true-features"),
    ),
}
