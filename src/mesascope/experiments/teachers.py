"""Other teachers: contracting systems, and one and the same system for all sequences (the negative result)."""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jaxtyping import Float

from mesascope.analysis.circuits import PROPOSITION_1, Products, products_of, read_off
from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.common import (
    LAM,
    TUNING,
    algorithm_losses,
    best_optimizer,
    by_time,
    contexts,
    depth_claims,
    depth_panels,
    depth_probes,
    final,
    model_losses,
    over_layer_0,
    relative_gap,
    worst_gap,
)
from mesascope.experiments.fig4 import LAYERS, TIME
from mesascope.experiments.lab import Lab
from mesascope.experiments.panels import Curves, Maps, Panel
from mesascope.experiments.results import Arrays, Named, Result
from mesascope.theory.solvers import GradientStep, NewtonSchulz, line_search

NAMES = (*(f"linear-{layers}" for layers in LAYERS), "mesa-1")
LAMS = {"contracting": 1 / 1.33339, "fixed-teacher": LAM}
"""λ of the controls as released."""


def losses(family: str) -> Callable[[Lab], Arrays]:
    """Losses by context length of all constructed models."""
    return lambda lab: {name: model_losses(lab, lab.trained(f"{family}-{name}")) for name in NAMES}


def controls(family: str) -> Callable[[Lab], Arrays]:
    """One gradient step with the best rate; Proposition 2, tuned; and what the released code draws in its place."""

    def piece(lab: Lab) -> Arrays:
        task = lab.config(f"{family}-linear-1").task
        sample = contexts(task)
        rate, _ = line_search(
            GradientStep,
            sample(jax.random.key(TUNING), lab.scale.sequences),
            1e-5,
            1.0,
        )
        late = contexts(task, newest_pair=False)
        return {
            "proposition_2": algorithm_losses(lab, best_optimizer(lab, task, 6), sample),
            "gd_rate": Named.of(np.asarray(rate)),
            "gd": algorithm_losses(lab, GradientStep(rate), sample),
            "newton_schulz": algorithm_losses(lab, NewtonSchulz(LAMS[family]), late),
        }

    return piece


def probes(family: str) -> Callable[[Lab], Arrays]:
    """Probes of six linear layers by layer and context length."""
    return lambda lab: depth_probes(lab, lab.trained(f"{family}-linear-6"), lam=LAMS[family])


def weights(family: str) -> Callable[[Lab], Arrays]:
    """Weight products of one layer, and how much of them Proposition 1 has."""

    def piece(lab: Lab) -> Arrays:
        trained = lab.trained(f"{family}-linear-1")
        products = products_of(trained.models)
        return {
            "read": Named.of(products.read[:, 0], "seed", "head", "row", "column"),
            "write": Named.of(products.write[:, 0], "seed", "head", "row", "column"),
            "share": Named.of(expected_share(products, trained.config.task.obs_dim), "seed", "product"),
        }

    return piece


def expected_share(products: Products, width: int) -> Float[np.ndarray, "seed product"]:
    """Energy of both products, over all heads, in the multiples of the identity that Proposition 1 consists of."""
    scalars = read_off(products, width=width, blocks=PROPOSITION_1)
    shares = []
    for product, share in zip(products, (scalars.read_share, scalars.write_share), strict=True):
        energy = np.sum(np.asarray(product, np.float64) ** 2, (-1, -2))
        shares.append(np.sum(share * energy, (1, 2)) / np.sum(energy, (1, 2)))
    return np.stack(shares, -1)


def panels(result: Result) -> list[Panel]:
    """A to D."""
    one = Curves(
        letter="A", title="one layer and one gradient step", xlabel=TIME, ylabel="loss",
        lines=(
            by_time(result, "linear-1", "linear-1", "linear"),
            by_time(result, "gd", "one gradient step, best rate", "theory", dashed=True),
        ),
    )  # fmt: skip
    depth = Curves(
        letter="C", title="depth", xlabel=TIME, ylabel="loss", log_y=True,
        lines=(
            *(by_time(result, f"linear-{n}", f"linear-{n}", "linear", shade=n / 6) for n in LAYERS),
            by_time(result, "mesa-1", "mesa-1", "mesa"),
            by_time(result, "proposition_2", "Proposition 2, six steps", "theory", dashed=True),
            by_time(result, "newton_schulz", "six Newton–Schulz steps (as released)", "control", dashed=True),
        ),
    )  # fmt: skip
    _, preconditioning = depth_panels(result, "linear", ("", "B"))
    # Slots that a single layer reads or writes; the second, a copy of s_t, is masked.
    slot = result["read"].shape[-1] // 4
    used = np.r_[:slot, 2 * slot : 4 * slot]
    maps = {
        f"{label}, head {head + 1}": result[name][0, head][np.ix_(used, used)]
        for name, label in (("read", "keys by queries"), ("write", "written by values"))
        for head in range(result[name].shape[1])
    }
    shown = Maps(letter="D", title="weight products of one layer", maps=maps, diverging=True, xlabel="token entry",
                 ylabel="token entry", origin=result.origin["read"])  # fmt: skip
    return [one, preconditioning, depth, shown]


def contracting_claims(result: Result) -> list[Claim]:
    """What holds for orthogonal teachers holds for contracting ones."""
    claim = partial(Claim, figure="si-contracting", source="SI, contracting dynamics")
    order = [final(result[name]) for name in NAMES]
    linear_6 = result["linear-6"]

    def described(control: str) -> Check:
        return Check(what="|mean loss of linear-6 over that of six steps - 1|",
                     values=relative_gap(linear_6, result[control]), at_most=0.1)  # fmt: skip

    _, *preconditioning = depth_claims(
        result, "si-contracting", "SI, contracting dynamics", ("", "si-contracting-3"), ("", "B")
    )
    return [
        claim(
            id="si-contracting-1", panel="A", claim="one layer behaves as one gradient step",
            checks=(
                Check(what="|mean loss over the gradient step's - 1|",
                      values=relative_gap(result["linear-1"], result["gd"]), at_most=0.05),
                Check(what="largest |loss over the gradient step's - 1|, t ≥ 5",
                      values=worst_gap(result["linear-1"], result["gd"], 5), at_most=0.05),
            ),
        ),
        claim(id="si-contracting-2", panel="C", claim="six layers are about six steps of Proposition 2",
              checks=(described("proposition_2"),)),
        claim(id="si-contracting-2-as-run", panel="C", claim="the same against what is drawn in the released figure",
              checks=(described("newton_schulz"),)),
        claim(
            id="si-contracting-2b", panel="C", claim="depth helps, and one mesa-layer stays ahead",
            checks=tuple(
                Check(what=f"loss of {b} over that of {a}", values=y / x, at_most=1.0)
                for a, b, x, y in zip(NAMES, NAMES[1:], order, order[1:], strict=False)
            ),
        ),
        *preconditioning,
        claim(id="si-contracting-4", panel="D", claim="one layer has the structure of Proposition 1",
              checks=_structure(result, at_least=0.9)),
    ]  # fmt: skip


def _structure(result: Result, **bound: float) -> tuple[Check, ...]:
    return tuple(
        Check(what=f"energy of {name} in the blocks of Proposition 1", values=result["share"][:, i], **bound)
        for i, name in enumerate(("W_K^T W_Q", "P W_V"))
    )


def fixed_claims(result: Result) -> list[Claim]:
    """Where there is nothing to learn in context, nothing is."""
    claim = partial(Claim, figure="si-fixed-teacher", source="SI, fixed teacher")
    ratio = over_layer_0(result["preconditioned"])
    best = np.min([final(result[name]) for name in NAMES[1:]], 0)
    return [
        claim(
            id="si-fixed-1", panel="A", claim="one layer is far better than one gradient step",
            checks=(Check(what="loss of linear-1 over that of the best gradient step",
                          values=final(result["linear-1"]) / result["gd"].mean(), at_most=0.3),),
        ),
        claim(
            id="si-fixed-1b", panel="C", claim="deeper models are far better than least squares in context",
            checks=(Check(what="smallest loss of the others over that of six steps of Proposition 2",
                          values=best / result["proposition_2"].mean(), at_most=0.3),),
        ),
        claim(
            id="si-fixed-2", panel="B", claim="preconditioned inputs do not appear",
            checks=(Check(what="error of the best layer over that of layer 0, mean over t ≥ 10",
                          values=ratio[:, 1:].min(-1), at_least=0.7),),
        ),
        claim(
            id="si-fixed-3", panel="D", claim="the weights lack the structure of Proposition 1",
            checks=_structure(result, at_most=0.7),
        ),
    ]  # fmt: skip


def _experiment(
    figure: str,
    family: str,
    shows: str,
    says: str,
    claims: Callable[[Result], list[Claim]],
) -> Experiment:
    pieces = {"losses": losses, "controls": controls, "probes": probes, "weights": weights}
    return Experiment(
        id=figure,
        shows=shows,
        says=says,
        pieces={name: piece(family) for name, piece in pieces.items()},
        panels=panels,
        claims=claims,
    )


EXPERIMENTS = {
    "si-contracting": _experiment(
        "si-contracting",
        "contracting",
        "linear attention on contracting systems learns gradient descent too",
        "With systems that contract, instead of orthogonal ones, the findings are the same: one layer is one gradient "
        "step, six layers are about six steps of Proposition 2, preconditioned inputs appear with depth, and the "
        "weights have the structure of Proposition 1.",
        contracting_claims,
    ),
    "si-fixed-teacher": _experiment(
        "si-fixed-teacher",
        "fixed-teacher",
        "with one system for all sequences there is no mesa-optimizer",
        "When all sequences come from one and the same system, that system can be learned in the weights. Models are "
        "then much better than any in-context algorithm, preconditioned inputs cannot be read from them, and their "
        "weights lack the structure of Proposition 1.",
        fixed_claims,
    ),
}
