"""Three families of tasks: figure 7."""

from collections.abc import Callable
from functools import partial

import numpy as np
from jaxtyping import Float

from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.common import (
    LAM,
    Regressors,
    algorithm_losses,
    by_time,
    contexts,
    final,
    model_losses,
    proposition_2,
    relative_gap,
)
from mesascope.experiments.lab import Lab
from mesascope.experiments.panels import Curves, Panel
from mesascope.experiments.results import Arrays, Result
from mesascope.theory.solvers import Ridge

SOURCE = "Fig. 7"
STEPS = 6
"""Coefficients of Proposition 2: seven layers are six of each kind and the last product."""
FULL = ("softmax-3", "softmax-7", "softmax-12", "hybrid-mesa")
OTHERS = ("softmax-7", "hybrid-mesa")


def full(lab: Lab) -> Arrays:
    """Fully observed linear systems: losses by context length."""
    return {f"full_{name}": model_losses(lab, lab.trained(name)) for name in FULL}


def full_control(lab: Lab) -> Arrays:
    """Proposition 2 and exact least squares for them, with the newest pair and, as released, without."""
    task = lab.config("softmax-7").task
    found = proposition_2(lab, task, STEPS)
    arrays = {f"full_proposition_2_{name}": losses for name, losses in found.items()}
    for name, newest in (("newest", True), ("dropped", False)):
        sample = contexts(task, newest_pair=newest)
        arrays[f"full_least_squares_{name}"] = algorithm_losses(lab, Ridge(LAM), sample)
    return arrays


def partially_observed(lab: Lab) -> Arrays:
    """Partially observed linear systems."""
    return {f"partial_{name}": model_losses(lab, lab.trained(f"partial-{name}")) for name in OTHERS}


def partial_raw(lab: Lab) -> Arrays:
    """Proposition 2 on single observations."""
    found = proposition_2(lab, lab.config("partial-softmax-7").task, STEPS)
    return {f"partial_raw_{name}": losses for name, losses in found.items()}


def partial_stacked(lab: Lab) -> Arrays:
    """Proposition 2 on 16 observations at a time."""
    found = proposition_2(lab, lab.config("partial-softmax-7").task, STEPS, on="sixteen-tokens")
    return {f"partial_stacked_{name}": losses for name, losses in found.items()}


def nonlinear(lab: Lab) -> Arrays:
    """Nonlinear systems."""
    return {f"nonlinear_{name}": model_losses(lab, lab.trained(f"nonlinear-{name}")) for name in OTHERS}


def nonlinear_control(lab: Lab) -> Arrays:
    """Proposition 2 on observations and on the generator's own features of them."""
    task = lab.config("nonlinear-softmax-7").task
    arrays = {}
    on: dict[str, Regressors] = {"raw": "tokens", "features": "true-features"}
    for name, regressors in on.items():
        found = proposition_2(lab, task, STEPS, on=regressors)
        arrays |= {f"nonlinear_{name}_{newest}": losses for newest, losses in found.items()}
    return arrays


def panels(result: Result) -> list[Panel]:
    """A to C."""

    def curves(letter: str, title: str, *lines) -> Curves:
        return Curves(letter=letter, title=title, xlabel="context length t", ylabel="loss", log_y=True,
                      lines=tuple(by_time(result, *line, **style) for *line, style in lines))  # fmt: skip

    dashed, late = {"dashed": True}, "newest pair dropped (as released)"
    return [
        curves(
            "A", "fully observed",
            *((f"full_softmax-{n}", f"softmax-{n}", "softmax", {"shade": n / 12}) for n in (3, 7, 12)),
            ("full_hybrid-mesa", "hybrid-mesa, 2 layers", "mesa", {}),
            ("full_proposition_2_newest", "Proposition 2, seven steps", "theory", dashed),
            ("full_proposition_2_dropped", f"the same, {late}", "control", dashed),
            ("full_least_squares_newest", "least squares", "compressed", dashed),
        ),
        curves(
            "B", "partially observed",
            ("partial_softmax-7", "softmax-7", "softmax", {}),
            ("partial_hybrid-mesa", "hybrid-mesa, 2 layers", "mesa", {}),
            ("partial_raw_newest", "Proposition 2 on tokens", "theory", dashed),
            ("partial_stacked_newest", "on 16 stacked tokens", "features", dashed),
            ("partial_stacked_dropped", f"the same, {late}", "control", dashed),
        ),
        curves(
            "C", "nonlinear",
            ("nonlinear_softmax-7", "softmax-7", "softmax", {}),
            ("nonlinear_hybrid-mesa", "hybrid-mesa, 2 layers", "mesa", {}),
            ("nonlinear_raw_newest", "Proposition 2 on tokens", "theory", dashed),
            ("nonlinear_features_newest", "on true features", "features", dashed),
            ("nonlinear_features_dropped", f"the same, {late}", "control", dashed),
        ),
    ]  # fmt: skip


def claims(result: Result) -> list[Claim]:
    """The paper's, panel by panel."""
    claim = partial(Claim, figure="fig7", source=SOURCE)

    def ratio(what: str, above: np.ndarray, below: np.ndarray, **bound: float) -> Check:
        return Check(what=what, values=np.atleast_1d(above / below), **bound)

    full = {name: result[f"full_{name}"] for name in FULL}
    mean = {name: final(losses) for name, losses in full.items()}
    found = [
        claim(
            id="fig7a-1", panel="A", claim="two layers, one of them a mesa-layer, beat seven softmax layers",
            checks=(
                ratio("mean loss of hybrid-mesa over that of softmax-7", mean["hybrid-mesa"], mean["softmax-7"],
                      at_most=1.0),
                ratio("the same at the last t", full["hybrid-mesa"][:, -1], full["softmax-7"][:, -1], at_most=1.0),
            ),
            authors=0.19836 / 0.230174,
        ),
        claim(
            id="fig7a-2", panel="A", claim="softmax Transformers approach it with depth",
            checks=(
                Check(what="|mean loss of softmax-12 over that of hybrid-mesa - 1|",
                      values=np.abs(mean["softmax-12"] / mean["hybrid-mesa"] - 1), at_most=0.1),
                ratio("mean loss of softmax-7 over that of softmax-3", mean["softmax-7"], mean["softmax-3"],
                      at_most=1.0),
                ratio("mean loss of softmax-12 over that of softmax-7", mean["softmax-12"], mean["softmax-7"],
                      at_most=1.0),
            ),
            authors=0.199382 / 0.19836 - 1,
        ),
        *_described(
            claim, "fig7a-3", "A", "seven softmax layers are about seven steps of Proposition 2", 0.1,
            full["softmax-7"], result["full_proposition_2_newest"], result["full_proposition_2_dropped"],
            authors=(abs(0.230174 / 0.208214 - 1), abs(0.230174 / 0.231748 - 1)),
        ),
    ]  # fmt: skip

    softmax, hybrid = (result[f"partial_{name}"] for name in OTHERS)
    raw = result["partial_raw_newest"]
    found.append(
        claim(
            id="fig7b-1", panel="B",
            claim="partially observed: late in a sequence the hybrid is no worse than softmax-7, and both are far "
                  "better than Proposition 2 on single tokens",
            checks=(
                ratio("loss of hybrid-mesa over that of softmax-7, last t", hybrid[:, -1], softmax[:, -1],
                      at_most=1.0),
                ratio("loss of softmax-7 over that of Proposition 2, last t", softmax[:, -1], raw[-1], at_most=0.2),
                ratio("loss of hybrid-mesa over that of Proposition 2, last t", hybrid[:, -1], raw[-1], at_most=0.2),
            ),
        )
    )  # fmt: skip
    for suffix, name, losses in (("", "softmax-7", softmax), ("-hybrid", "hybrid-mesa", hybrid)):
        found += _described(
            claim, f"fig7b-2{suffix}", "B", f"{name} is described by Proposition 2 on 16 stacked tokens", 0.3,
            losses, result["partial_stacked_newest"], result["partial_stacked_dropped"],
        )  # fmt: skip

    softmax, hybrid = (result[f"nonlinear_{name}"] for name in OTHERS)
    described = (
        "nonlinear: the hybrid is no worse than softmax-7, and Proposition 2 describes softmax-7 on true "
    )
    for suffix, pairs, note in (("", "newest", ""), ("-as-run", "dropped", " (controls as released)")):
        raw, features = (result[f"nonlinear_{name}_{pairs}"] for name in ("raw", "features"))
        found.append(
            claim(
                id=f"fig7c-1{suffix}", panel="C", claim=described + "features and not on tokens" + note,
                checks=(
                    Check(what="|mean loss of softmax-7 over that of Proposition 2 on features - 1|",
                          values=relative_gap(softmax, features), at_most=0.25),
                    ratio("mean loss of Proposition 2 on tokens over that of softmax-7", raw.mean(), final(softmax),
                          at_least=1.8),
                    ratio("mean loss of hybrid-mesa over that of softmax-7", final(hybrid), final(softmax),
                          at_most=1.0),
                ),
            )
        )  # fmt: skip
    return found


def _described(
    claim: Callable[..., Claim],
    name: str,
    panel: str,
    text: str,
    within: float,
    model: Float[np.ndarray, "seed time"],
    newest: Float[np.ndarray, " time"],
    dropped: Float[np.ndarray, " time"],
    authors: tuple[float | None, float | None] = (None, None),
) -> list[Claim]:
    """A model's mean loss is that of an algorithm: with all pairs, and against the control as released."""
    what = "|mean loss over that of Proposition 2 - 1|"
    return [
        claim(
            id=name + suffix, panel=panel, claim=text + note, authors=number,
            checks=(Check(what=what, values=relative_gap(model, control), at_most=within),),
        )
        for suffix, note, control, number in (
            ("", "", newest, authors[0]),
            ("-as-run", " (control as released: newest pair dropped)", dropped, authors[1]),
        )
    ]  # fmt: skip


EXPERIMENTS = {
    "fig7": Experiment(
        id="fig7",
        shows="fully observed, partially observed and nonlinear systems: softmax-7, hybrid-mesa and Proposition 2",
        says=(
            "On three families of tasks seven softmax layers predict about as well as seven steps of Proposition 2, "
            "provided that these are given what the task needs: the observations themselves, several of them at a time "
            "where each shows only a part of the state, or the features that a nonlinear generator computes. Two "
            "layers, the second a mesa-layer, do as well or better."
        ),
        pieces={
            "full": full,
            "full_control": full_control,
            "partially_observed": partially_observed,
            "partial_raw": partial_raw,
            "partial_stacked": partial_stacked,
            "nonlinear": nonlinear,
            "nonlinear_control": nonlinear_control,
        },
        panels=panels,
        claims=claims,
    )
}
