"""The mechanism, drawn, and written as weights: figure 1."""

from functools import partial
from importlib.resources import files

import jax
import numpy as np

from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.common import EVALUATION
from mesascope.experiments.lab import Lab
from mesascope.experiments.panels import Curves, Drawing, Line, Panel
from mesascope.experiments.results import Arrays, Named, Result
from mesascope.theory.constructions import copying_then_mesa, copying_then_proposition_2
from mesascope.theory.solvers import GradientStep, MesaOptimizer, Ridge, autoregressive, loss_by_time
from mesascope.training import half_squared_errors

# λ = 1 keeps systems within reach of a few fixed steps.
STEPS, LAM, SHARPNESS = 12, 1.0, 20.0


def mechanism(lab: Lab) -> Arrays:
    """A Transformer with weights written by hand reads raw tokens: its predictions, and what each layer knows."""
    task = lab.config("softmax-7").task
    observations = task.sample(jax.random.key(EVALUATION), min(lab.scale.sequences, 512)).observations
    context = autoregressive(observations)
    read = np.asarray(context.queries, np.float64)
    gram = np.einsum("bti,btj->bij", read, read)
    # All spectra lie between these.
    algorithm = MesaOptimizer.chebyshev(
        1 / LAM, float(np.linalg.eigvalsh(gram).max()) + 1 / LAM, steps=STEPS, lam=LAM
    )
    eta = float(algorithm.eta)
    built = copying_then_proposition_2(
        task.obs_dim, 1, STEPS, algorithm.alphas, algorithm.betas, LAM, eta, sharpness=SHARPNESS
    )
    two_layers = copying_then_mesa(task.obs_dim, 1, LAM, sharpness=SHARPNESS)
    ridge = Ridge(LAM)

    def apart(ours, theirs):
        return half_squared_errors(ours, theirs).mean() / half_squared_errors(theirs, 0 * theirs).mean()

    # Queries after layers 1 to STEPS + 1; layer 1 copies.
    queries = jax.jit(lambda s: built.stream(s, "solution"))(context.queries)[1:-1]
    by_layer = [
        np.asarray(loss_by_time(GradientStep(eta), context._replace(queries=x)), np.float64) for x in queries
    ]
    wanted = jax.jit(lambda: algorithm(context))()
    exact = jax.jit(lambda: ridge(context))()
    return {
        "by_layer": Named.of(np.stack(by_layer), "layer", "time"),
        "least_squares": Named.of(loss_by_time(ridge, context), "time"),
        "distance": Named.of(jax.jit(lambda: apart(built(context.queries), wanted))()),
        "distance_mesa": Named.of(jax.jit(lambda: apart(two_layers(context.queries), exact))()),
    }


def panels(result: Result) -> list[Panel]:
    """A drawing, and the same written as weights."""
    by_layer = result["by_layer"]
    time, origin = np.arange(1, by_layer.shape[-1] + 1), result.origin["by_layer"]
    shown = range(0, len(by_layer), 3)
    lines = [
        Line(label=f"with the query of layer {i + 1}", x=time, y=by_layer[i : i + 1], kind="theory",
             shade=i / (len(by_layer) - 1), origin=origin)
        for i in shown
    ]  # fmt: skip
    exact = Line(label="least squares", x=time, y=result["least_squares"][None], kind="mesa", dashed=True,
                 origin=origin)  # fmt: skip
    return [
        Drawing(
            letter="A",
            title="a Transformer that learns a model of the sequence it reads",
            svg=(files("mesascope.experiments") / "fig1.svg").read_text("utf-8"),
        ),
        Curves(letter="B", title="the drawing as weights, none of them trained", xlabel="context length t",
               ylabel="loss", lines=(*lines, exact)),
    ]  # fmt: skip


def claims(result: Result) -> list[Claim]:
    """That the drawing is a Transformer."""
    claim = partial(Claim, figure="fig1", source="Fig. 1, Propositions 1 and 2", needs="nothing")
    losses = result["by_layer"].mean(-1)
    return [
        claim(
            id="fig1-1", panel="A",
            claim="softmax attention that copies and linear attention that iterates are Proposition 2 on raw tokens",
            checks=(Check(what="relative distance of the predictions", values=result["distance"][None],
                          at_most=1e-4),),
        ),
        claim(
            id="fig1-2", panel="A", claim="one layer that copies and one mesa-layer are least squares on raw tokens",
            checks=(Check(what="relative distance of the predictions", values=result["distance_mesa"][None],
                          at_most=1e-4),),
        ),
        claim(
            id="fig1-3", panel="B", claim="with every layer the prediction approaches that of least squares",
            checks=(
                Check(what="|loss with the last query over that of least squares - 1|",
                      values=np.abs(losses[-1:] / result["least_squares"].mean() - 1), at_most=0.05),
                Check(what="loss with the last query over that with the first", values=losses[-1:] / losses[0],
                      at_most=0.5),
            ),
        ),
    ]  # fmt: skip


EXPERIMENTS = {
    "fig1": Experiment(
        id="fig1",
        shows="the mechanism: bind tokens to pairs, fit a model to the pairs, apply it",
        says=(
            "A Transformer that predicts the next token of sequences with a rule of their own can learn that rule "
            "while it reads. An early layer copies the previous token beside each one, which makes pairs of an input "
            "and its target; later layers take steps that fit a linear model to all pairs so far; the last one applies "
            "the model to the newest token. Panel A is our drawing of it, panel B the same with weights written by "
            "hand."
        ),
        pieces={"mechanism": mechanism},
        panels=panels,
        claims=claims,
    )
}
