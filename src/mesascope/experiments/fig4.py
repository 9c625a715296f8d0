"""Linear attention learns gradient descent: figure 4."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from mesascope import store
from mesascope.analysis.circuits import ONE_LAYER, Blocks, interpolate, products_of, read_off
from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.common import (
    EVALUATION,
    TUNING,
    algorithm_losses,
    by_time,
    contexts,
    depth_claims,
    depth_panels,
    depth_probes,
    described,
    final,
    model_losses,
    proposition_2,
    proposition_2_lines,
    relative_gap,
    tuned,
    worst_gap,
)
from mesascope.experiments.lab import Lab, Trained
from mesascope.experiments.panels import Curves, Line, Panel
from mesascope.experiments.results import Arrays, Named, Result
from mesascope.theory.solvers import GradientStep, autoregressive, line_search, nearest_step
from mesascope.training import half_squared_errors

LAYERS = (1, 2, 4, 6)
SOURCE = "Fig. 4"
TIME = "context length t"
AUTHORS = {
    "linear-1": 0.89416,
    "linear-2": 0.43022,
    "linear-4": 0.23613,
    "linear-6": 0.21573,
    "mesa-1": 0.1899,
}
"""Mean losses of their models."""


def one_layer(lab: Lab) -> Arrays:
    """One linear layer while it is trained, and halfway to its own twelve scalars."""
    return _interpolation(lab, lab.trained("interpolation-1"), ONE_LAYER, "one")


def six_layers(lab: Lab) -> Arrays:
    """Six of them, and halfway to their 768 scalars."""
    return _interpolation(lab, lab.trained("interpolation-6"), None, "six")


def _interpolation(lab: Lab, trained: Trained, blocks: Blocks | None, name: str) -> Arrays:
    examples = trained.sample(jax.random.key(EVALUATION), min(lab.scale.sequences, 2560))
    width = trained.config.task.obs_dim
    scalars = read_off(products_of(trained.models), width=width, blocks=blocks)
    kept = {step: models for step, models in trained.kept().items() if step > 0}
    found = interpolate(kept, scalars, examples)
    return {
        f"{name}_steps": Named.of(found.steps, "step"),
        f"{name}_trained": Named.of(found.trained.mean(1), "seed", "step"),
        f"{name}_halfway": Named.of(found.halfway.mean(1), "seed", "step"),
        f"{name}_compressed": Named.of(found.compressed.mean(1), "seed"),
    }


def mesa_training(lab: Lab) -> Arrays:
    """The mesa-layer's test loss while it is trained."""
    steps, losses = lab.trained("mesa-1").metrics()
    return {"mesa_steps": Named.of(steps, "step"), "mesa_trained": Named.of(losses, "seed", "step")}


def losses(lab: Lab) -> Arrays:
    """Losses by context length of all constructed models."""
    names = [f"linear-{layers}" for layers in LAYERS] + ["mesa-1"]
    return {name: model_losses(lab, lab.trained(name)) for name in names}


def gradient_descent(lab: Lab) -> Arrays:
    """One gradient step: best rate, and rate and initial parameters tuned on the task; how far linear-1's predictions
    are from the latter."""
    trained = lab.trained("linear-1")
    task = trained.config.task
    sample = contexts(task)
    rate, _ = line_search(GradientStep, sample(jax.random.key(TUNING), 16 * lab.scale.sequences), 0.01, 0.1)
    start = GradientStep(rate, np.zeros((task.obs_dim, task.obs_dim), np.float32))
    learned = tuned(lab, f"gd-1_{store.digest(task)}", start, lambda key: sample(key, 256), rate=1e-3)
    hybrid = lab.trained("hybrid-mesa")
    observations = _observations(lab, EVALUATION)
    wanted = jax.jit(lambda algorithm, context: algorithm(context))(learned, autoregressive(observations))
    return {
        "gd_rate": Named.of(np.asarray(rate)),
        "gd": algorithm_losses(lab, GradientStep(rate), sample),
        "gd_tuned": algorithm_losses(lab, learned, sample),
        "distance_to_gd": Named.of(_apart(_predictions(trained, observations), wanted), "seed"),
        "distance_of_hybrid": Named.of(_apart(_predictions(hybrid, observations), wanted), "seed"),
    }


def fitted(name: str, suffix: str = "") -> Callable[[Lab], Arrays]:
    """One gradient step whose rate and initial parameters are fitted to the predictions of a model, of each training
    seed by itself; and how far these are from it, on other sequences."""

    def piece(lab: Lab) -> Arrays:
        trained = lab.trained(name)
        to_fit, to_score = (_observations(lab, key) for key in (TUNING, EVALUATION))
        context = autoregressive(to_score)
        steps = [nearest_step(autoregressive(to_fit), p) for p in _predictions(trained, to_fit)]
        wanted = np.stack([np.asarray(step(context)) for step in steps])
        return {
            f"fitted_distance{suffix}": Named.of(_apart(_predictions(trained, to_score), wanted), "seed"),
            f"fitted_rate{suffix}": Named.of([float(step.eta) for step in steps], "seed"),
        }

    return piece


def _observations(lab: Lab, key: int) -> Float[Array, "batch time+1 obs"]:
    """Of linear-1's task."""
    return (
        lab.config("linear-1").task.sample(jax.random.key(key), min(lab.scale.sequences, 2048)).observations
    )


def _predictions(trained: Trained, observations: Float[Array, "batch time+1 obs"]) -> Array:
    tokens = trained.config.tokens(observations).tokens
    return jax.jit(jax.vmap(lambda model: model(tokens)))(trained.models)


def _apart(predictions: Array, wanted: Any) -> Float[np.ndarray, " seed"]:
    """How far predictions are from those of an algorithm, in squares over the squares of the latter."""
    far = half_squared_errors(predictions, wanted).mean((1, 2))
    return np.asarray(far / half_squared_errors(wanted, 0 * wanted).mean((-2, -1)))


def mesa_optimizer(lab: Lab) -> Arrays:
    """Six steps of Proposition 2: tuned on the task; as released; and that with the pair it leaves out."""
    found = proposition_2(lab, lab.config("linear-6").task, 6, beside="linear-6")
    return {f"proposition_2_{name}": losses for name, losses in found.items()}


def probes(lab: Lab) -> Arrays:
    """Probes of linear-6 by layer and context length."""
    return depth_probes(lab, lab.trained("linear-6"))


def panels(result: Result) -> list[Panel]:
    """A to F."""

    def training(letter: str, name: str, layers: int, compressed: str) -> Curves:
        steps = result[f"{name}_steps"]
        origin = result.origin[f"{name}_trained"]
        flat = np.repeat(result[f"{name}_compressed"][:, None], len(steps), 1)
        mesa_steps = result["mesa_steps"]
        shown = (mesa_steps > 0) & (mesa_steps <= steps[-1])
        lines = (
            Line(label=f"linear attention, {layers} layer{'s' * (layers > 1)}", x=steps, y=result[f"{name}_trained"],
                 kind="linear", origin=origin),
            Line(label="halfway to its scalars", x=steps, y=result[f"{name}_halfway"], kind="other", dashed=True,
                 origin=origin),
            Line(label=compressed, x=steps, y=flat, kind="compressed", dashed=True, origin=origin),
            Line(label="one mesa-layer", x=mesa_steps[shown], y=result["mesa_trained"][:, shown], kind="mesa",
                 origin=result.origin["mesa_trained"]),
        )  # fmt: skip
        return Curves(letter=letter, title=f"{layers} layer{'s' * (layers > 1)}, test loss while training",
                      xlabel="training step", ylabel="loss", lines=lines)  # fmt: skip

    one = Curves(
        letter="C", title="one layer is one gradient step", xlabel=TIME, ylabel="loss",
        lines=(
            by_time(result, "linear-1", "linear-1", "linear"),
            by_time(result, "gd", "one gradient step, best rate", "theory", dashed=True),
            by_time(result, "gd_tuned", "with learned initial parameters", "features", dashed=True),
            by_time(result, "mesa-1", "mesa-1", "mesa"),
        ),
    )  # fmt: skip
    depth = Curves(
        letter="D", title="six layers are six steps of Proposition 2", log_y=True, xlabel=TIME, ylabel="loss",
        lines=(
            *(by_time(result, f"linear-{n}", f"linear-{n}", "linear", shade=n / 6) for n in LAYERS),
            by_time(result, "mesa-1", "mesa-1", "mesa"),
            *proposition_2_lines(result, "proposition_2", "Proposition 2, six steps"),
        ),
    )  # fmt: skip
    return [
        training("A", "one", 1, "twelve scalars alone (Proposition 1)"),
        training("B", "six", 6, "768 scalars alone (CompressedAlg-6)"),
        one, depth, *depth_panels(result, "linear"),
    ]  # fmt: skip


def claims(result: Result) -> list[Claim]:
    """The paper's, panel by panel."""
    claim = partial(Claim, figure="fig4", source=SOURCE)
    loss = {name: final(result[name]) for name in (*(f"linear-{n}" for n in LAYERS), "mesa-1")}
    best_gd = result["gd"].mean()
    order = [loss[f"linear-{n}"] for n in LAYERS] + [loss["mesa-1"]]

    def apart(
        of: Callable[[Any], np.ndarray], linear: str, hybrid: str, kind: str = ""
    ) -> tuple[Check, Check]:
        """The hybrid is the control: what gradient descent does not describe."""
        what = f"relative {kind}distance of"
        return (
            Check(what=f"{what} linear-1's predictions", values=of(result[linear]), at_most=0.1),
            Check(what=f"{what} the hybrid's predictions", values=of(result[hybrid]), at_least=0.3),
        )

    found = [
        claim(
            id="fig4a-1", panel="A", claim="one linear layer converges to one step of gradient descent",
            checks=(Check(what="|loss of linear-1 over that of the best gradient step - 1|",
                          values=np.abs(loss["linear-1"] / best_gd - 1), at_most=0.02,
                          authors=abs(0.89416 / 0.90039 - 1)),),
        ),
        claim(
            id="fig4a-2", panel="A", claim="halfway to its twelve scalars nothing is lost",
            checks=(Check(what="loss halfway over that of the trained layer",
                          values=result["one_halfway"][:, -1] / result["one_trained"][:, -1], at_most=1.01,
                          authors=0.892107 / 0.892437),),
        ),
        claim(
            id="fig4a-3", panel="A", claim="one mesa-layer is far better",
            checks=(Check(what="loss of mesa-1 over that of linear-1", values=loss["mesa-1"] / loss["linear-1"],
                          at_most=0.3, authors=0.1899 / 0.89416),),
        ),
        claim(
            id="fig4b-1", panel="B", claim="six layers are described by their 768 scalars",
            checks=(
                Check(what="|loss of the scalars over that of the trained layers - 1|",
                      values=np.abs(result["six_compressed"] / result["six_trained"][:, -1] - 1), at_most=0.1),
                Check(what="|loss halfway over that of the trained layers - 1|",
                      values=np.abs(result["six_halfway"][:, -1] / result["six_trained"][:, -1] - 1), at_most=0.05),
            ),
        ),
        claim(
            id="fig4c-1", panel="C", claim="one layer behaves as one gradient step at every context length",
            checks=(
                Check(what="largest |loss over the gradient step's - 1|, t ≥ 5",
                      values=worst_gap(result["linear-1"], result["gd"], 5), at_most=0.05, authors=0.0246),
                Check(what="|mean loss over the gradient step's - 1|",
                      values=relative_gap(result["linear-1"], result["gd"]), at_most=0.02,
                      authors=abs(0.89416 / 0.90039 - 1)),
            ),
        ),
        claim(
            id="fig4c-2", panel="C",
            claim="its predictions are fitted by one gradient step with learned rate and initial parameters",
            checks=apart(np.sqrt, "fitted_distance", "fitted_distance_of_hybrid"),
        ),
        claim(
            id="fig4c-2-tuned", panel="C",
            claim="its predictions are those of one gradient step with rate and initial parameters learned on the task",
            checks=apart(np.sqrt, "distance_to_gd", "distance_of_hybrid"),
        ),
        claim(
            id="fig4c-2-squared", panel="C",
            claim="the same as fig4c-2-tuned, by the part of the squares that is not gradient descent's",
            checks=apart(np.asarray, "distance_to_gd", "distance_of_hybrid", "squared "),
        ),
        *described(
            claim, "fig4d-1", "D", "six layers are about six steps of Proposition 2", 0.1,
            result["linear-6"], result, "proposition_2",
            released=abs(0.215727 / 0.233938 - 1), all_pairs=abs(0.215727 / 0.21055 - 1),
        ),
        claim(
            id="fig4d-2", panel="D", claim="depth helps, and one mesa-layer stays ahead",
            checks=tuple(
                Check(what=f"loss of {b} over that of {a}", values=y / x, at_most=1.0, authors=AUTHORS[b] / AUTHORS[a])
                for a, b, x, y in zip(AUTHORS, list(AUTHORS)[1:], order, order[1:], strict=False)
            ),
        ),
    ]  # fmt: skip
    return found + depth_claims(result, "fig4", SOURCE, ("fig4e-1", "fig4f-1"), authors=(0.004909, 0.0846))


EXPERIMENTS = {
    "fig4": Experiment(
        id="fig4",
        shows="linear attention on constructed tokens learns gradient descent",
        says=(
            "Trained on constructed tokens, a single layer of linear attention reaches the loss of one step of "
            "gradient descent, and its weights are twelve numbers; six layers are described by 768 numbers and by "
            "six steps of a preconditioned gradient method. Deeper layers hold better predictions and the "
            "preconditioned input. One layer that solves least squares exactly, the mesa-layer, is better than all."
        ),
        pieces={
            "six_layers": six_layers,
            "one_layer": one_layer,
            "mesa_training": mesa_training,
            "losses": losses,
            "gradient_descent": gradient_descent,
            "fitted": fitted("linear-1"),
            "fitted_control": fitted("hybrid-mesa", "_of_hybrid"),
            "mesa_optimizer": mesa_optimizer,
            "probes": probes,
        },
        panels=panels,
        claims=claims,
    )
}
