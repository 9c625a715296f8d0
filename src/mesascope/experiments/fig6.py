"""Softmax Transformers take steps of Proposition 2: figure 6, and the same for other tasks (SI)."""

from functools import partial

from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.common import (
    LAM,
    Regressors,
    by_time,
    depth_claims,
    depth_panels,
    depth_probes,
    model_losses,
    proposition_2,
    relative_gap,
    worst_gap,
)
from mesascope.experiments.lab import Lab
from mesascope.experiments.panels import Curves, Panel
from mesascope.experiments.results import Arrays, Result

LAYERS = (3, 7, 12)
# The released probes of partially observed systems look for five tokens, with this λ.
PARTIAL_LAM = 0.1
LATE = 15
"""From this context length on curves are compared point by point."""
# The authors' mean loss over that of their control, minus 1. Their control with all pairs was recomputed from its
# coefficients.
AUTHORS_AS_RUN = {3: abs(0.315315 / 0.304682 - 1), 12: abs(0.199382 / 0.218892 - 1)}
AUTHORS = abs(0.315315 / 0.286568 - 1)


def losses(lab: Lab) -> Arrays:
    """Losses by context length of 3, 7 and 12 layers."""
    return {f"softmax-{layers}": model_losses(lab, lab.trained(f"softmax-{layers}")) for layers in LAYERS}


def steps(lab: Lab, *, name: str, layers: int, on: Regressors = "tokens") -> Arrays:
    """As many tuned steps of Proposition 2 as layers: coefficients for all but the last, which is a gradient step."""
    found = proposition_2(lab, lab.config(name).task, layers - 1, on=on)
    return {f"proposition_2_{layers}_{which}": of for which, of in found.items()}


def task_losses(lab: Lab, *, name: str) -> Arrays:
    """Losses by context length of seven layers."""
    return {"softmax-7": model_losses(lab, lab.trained(name))}


def probes(lab: Lab, *, name: str = "softmax-7", lam: float = LAM, on: Regressors = "tokens") -> Arrays:
    """Probes of seven layers by layer and context length."""
    return depth_probes(lab, lab.trained(name), lam=lam, on=on)


def _gaps(result: Result, layers: tuple[int, ...], which: str, mean: float) -> tuple[Check, ...]:
    """How far models are from as many steps as they have layers: on average, and late at every context length."""
    pairs = [(n, result[f"softmax-{n}"], result[f"proposition_2_{n}_{which}"]) for n in layers]
    return (
        *(
            Check(what=f"{n} layers: |mean loss over that of {n} tuned steps - 1|",
                  values=relative_gap(ours, theirs), at_most=mean)
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
            by_time(result, f"proposition_2_{n}_newest", f"Proposition 2, {n} steps", "theory", shade=shade,
                    dashed=True),
            by_time(result, f"proposition_2_{n}_dropped", f"{n} steps, newest pair dropped (as released)", "control",
                    shade=shade, dashed=True),
        ]  # fmt: skip
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
        *depth_claims(result, "fig6", "Fig. 6", ("fig6a-1", "fig6b-1"), ("A", "B")),
        claim(id="fig6c-1", claim="3 and 7 layers are about 3 and 7 steps of Proposition 2, tuned on the task",
              checks=_gaps(result, (3, 7), "newest", 0.1), authors=AUTHORS),
        claim(id="fig6c-1-as-run", claim="the same against the control as released (newest pair dropped)",
              checks=_gaps(result, (3, 7), "dropped", 0.1), authors=AUTHORS_AS_RUN[3]),
        claim(id="fig6c-12", claim="the same as fig6c-1 for 12 layers",
              checks=_gaps(result, (12,), "newest", 0.1)),
        claim(id="fig6c-12-as-run", claim="12 layers against the control as released",
              checks=_gaps(result, (12,), "dropped", 0.1), authors=AUTHORS_AS_RUN[12]),
    ]  # fmt: skip


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
            claim(id=f"{prefix}-3", claim=f"seven layers are about seven steps of Proposition 2 on {what}",
                  checks=_gaps(result, (7,), "newest", 0.3)),
            claim(id=f"{prefix}-3-as-run", claim="the same against the control as released (newest pair dropped)",
                  checks=_gaps(result, (7,), "dropped", 0.3)),
        ]  # fmt: skip

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
            **{f"steps_{n}": partial(steps, name=f"softmax-{n}", layers=n) for n in LAYERS},
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
        steps=partial(steps, name="partial-softmax-7", layers=7, on="sixteen-tokens"),
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
