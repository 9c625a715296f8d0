"""Three families of tasks: figure 7."""

from functools import partial

import numpy as np

from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.common import (
    CONTROLS,
    LAM,
    Regressors,
    algorithm_losses,
    by_time,
    contexts,
    described,
    final,
    model_losses,
    proposition_2,
    proposition_2_lines,
    relative_gap,
)
from mesascope.experiments.lab import Lab
from mesascope.experiments.panels import Curves, Line, Panel
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
    """Proposition 2 for them, and exact least squares with the newest pair and, as released, without."""
    task = lab.config("softmax-7").task
    found = proposition_2(lab, task, STEPS, beside="softmax-7")
    arrays = {f"full_proposition_2_{name}": losses for name, losses in found.items()}
    for name, newest in (("all_pairs", True), ("released", False)):
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
        arrays |= {f"nonlinear_{name}_{form}": losses for form, losses in found.items()}
    return arrays


def panels(result: Result) -> list[Panel]:
    """A to C."""

    def curves(letter: str, title: str, *lines: Line) -> Curves:
        return Curves(
            letter=letter, title=title, xlabel="context length t", ylabel="loss", log_y=True, lines=lines
        )

    line = partial(by_time, result)
    return [
        curves(
            "A", "fully observed",
            *(line(f"full_softmax-{n}", f"softmax-{n}", "softmax", shade=n / 12) for n in (3, 7, 12)),
            line("full_hybrid-mesa", "hybrid-mesa, 2 layers", "mesa"),
            *proposition_2_lines(result, "full_proposition_2", "Proposition 2, seven steps"),
            line("full_least_squares_all_pairs", "least squares", "compressed", dashed=True),
        ),
        curves(
            "B", "partially observed",
            line("partial_softmax-7", "softmax-7", "softmax"),
            line("partial_hybrid-mesa", "hybrid-mesa, 2 layers", "mesa"),
            line("partial_raw_best", "Proposition 2 on single tokens", "compressed", dashed=True),
            *proposition_2_lines(result, "partial_stacked", "Proposition 2 on 16 stacked tokens"),
        ),
        curves(
            "C", "nonlinear",
            line("nonlinear_softmax-7", "softmax-7", "softmax"),
            line("nonlinear_hybrid-mesa", "hybrid-mesa, 2 layers", "mesa"),
            line("nonlinear_raw_best", "Proposition 2 on tokens", "compressed", dashed=True),
            *proposition_2_lines(result, "nonlinear_features", "Proposition 2 on true features"),
        ),
    ]  # fmt: skip


def claims(result: Result) -> list[Claim]:
    """The paper's, panel by panel."""
    claim = partial(Claim, figure="fig7", source=SOURCE)

    def ratio(what: str, above: np.ndarray, below: np.ndarray, **more: float) -> Check:
        return Check(what=what, values=np.atleast_1d(above / below), **more)

    full = {name: result[f"full_{name}"] for name in FULL}
    mean = {name: final(losses) for name, losses in full.items()}
    found = [
        claim(
            id="fig7a-1", panel="A", claim="two layers, one of them a mesa-layer, beat seven softmax layers",
            checks=(
                ratio("mean loss of hybrid-mesa over that of softmax-7", mean["hybrid-mesa"], mean["softmax-7"],
                      at_most=1.0, authors=0.19836 / 0.230174),
                ratio("the same at the last t", full["hybrid-mesa"][:, -1], full["softmax-7"][:, -1], at_most=1.0,
                      authors=0.00227 / 0.01184),
            ),
        ),
        claim(
            id="fig7a-2", panel="A", claim="softmax Transformers approach it with depth",
            checks=(
                Check(what="|mean loss of softmax-12 over that of hybrid-mesa - 1|",
                      values=np.abs(mean["softmax-12"] / mean["hybrid-mesa"] - 1), at_most=0.1,
                      authors=0.199382 / 0.19836 - 1),
                ratio("mean loss of softmax-7 over that of softmax-3", mean["softmax-7"], mean["softmax-3"],
                      at_most=1.0, authors=0.230174 / 0.31532),
                ratio("mean loss of softmax-12 over that of softmax-7", mean["softmax-12"], mean["softmax-7"],
                      at_most=1.0, authors=0.199382 / 0.230174),
            ),
        ),
        *described(
            claim, "fig7a-3", "A", "seven softmax layers are about seven steps of Proposition 2", 0.1,
            full["softmax-7"], result, "full_proposition_2",
            released=abs(0.230174 / 0.231748 - 1), all_pairs=abs(0.230174 / 0.208214 - 1),
        ),
    ]  # fmt: skip

    softmax, hybrid = (result[f"partial_{name}"] for name in OTHERS)
    raw = result["partial_raw_best"]
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
        text = f"{name} is described by Proposition 2 on 16 stacked tokens"
        found += described(claim, f"fig7b-2{suffix}", "B", text, 0.3, losses, result, "partial_stacked")

    softmax, hybrid = (result[f"nonlinear_{name}"] for name in OTHERS)
    text = "nonlinear: the hybrid is no worse than softmax-7, and Proposition 2 describes softmax-7 on true "
    for form, (suffix, note) in CONTROLS.items():
        raw, features = (result[f"nonlinear_{name}_{form}"] for name in ("raw", "features"))
        found.append(
            claim(
                id=f"fig7c-1{suffix}", panel="C", claim=text + "features and not on tokens" + note,
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
