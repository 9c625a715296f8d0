"""Softmax layers that act linearly, and why: figure 5, its sweep over noise, and the weights of a distilled layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mesascope import store
from mesascope.analysis.circuits import Products, products, products_of
from mesascope.analysis.linearize import (
    Distilled,
    Linearization,
    LinearLayer,
    distil,
    layer_sites,
    measure,
)
from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.common import EVALUATION, TUNING
from mesascope.experiments.lab import Lab, Trained
from mesascope.experiments.panels import Curves, Line, Maps, Panel
from mesascope.experiments.results import Arrays, Named, Result
from mesascope.tasks.dynamics import Dynamics
from mesascope.theory.solvers import KernelRegression, Ridge, autoregressive, line_search, loss

DIMENSIONS = (4, 6, 10, 20, 40, 60)
NOISES = (0.001, 0.01, 0.1, 0.3)
"""Standard deviations of the state's noise. The paper does not say which; 0.01 is that of all other figures."""


def linearized(dim: int) -> Callable[[Lab], Arrays]:
    """Each of seven softmax layers replaced by linear attention, for observations of so many entries."""

    def piece(lab: Lab) -> Arrays:
        found = _linearize(lab, lab.trained(f"linearization-{dim}", halvings=3))
        as_it_is = found.loss.mean(1)
        return {
            f"ratio_{dim}": Named.of(found.swapped.mean(1) / as_it_is[:, None], "seed", "layer"),
            f"residual_{dim}": Named.of(found.residual, "seed", "layer"),
            f"rate_{dim}": Named.of(found.rate, "seed", "layer"),
            f"loss_{dim}": Named.of(as_it_is, "seed"),
        }

    return piece


def _linearize(lab: Lab, trained: Trained) -> Linearization:
    block = trained.config.model.blocks[0]
    sequences = lab.sequences_within_limits(trained.config)
    given = (trained.models, trained.sample, layer_sites(trained.models))
    same: Any = dict(
        heads=block.heads, batch_size=min(64, max(2, sequences // 8)), key=jax.random.key(EVALUATION)
    )

    def find() -> dict[str, Any]:
        steps = max(10, lab.steps_within_limits(trained.config, lab.scale.distill_steps, same["batch_size"]))
        layers, rate, least = distil(*given, key_dim=block.key_dim, steps=steps, **same)
        return layers._asdict() | {"rate": rate, "least": least}

    found = lab.tuned(f"distilled_{trained.config.name}", find, by_seed=True)
    layers = LinearLayer(*(jnp.asarray(found[name]) for name in LinearLayer._fields))
    return measure(*given, Distilled(layers, found["rate"], found["least"]), test_sequences=sequences, **same)


def algorithms(lab: Lab) -> Arrays:
    """Least squares and softmax-kernel regression by dimension."""
    return _by_dimension(lab, 0.01)


def _noise_level(noise: float) -> Callable[[Lab], Arrays]:
    """The same at another level of noise."""
    return lambda lab: {f"{name}_{noise:g}": array for name, array in _by_dimension(lab, noise).items()}


def _by_dimension(lab: Lab, noise: float) -> Arrays:
    """Losses per dimension; λ and β are each the best for their dimension."""
    columns = [_both(lab, dim, noise) for dim in DIMENSIONS]
    return {name: Named.of([column[name] for column in columns], "dimension") for name in columns[0]}


def _both(lab: Lab, dim: int, noise: float) -> dict[str, float]:
    """In so many dimensions, with contexts four times as long.

    λ and β are found on other sequences than losses are measured on. (The released code takes the best of 40 on the
    very sequences it reports, and leaves out the newest pair from least squares alone.) Sequences have the more numbers
    the higher their dimension, of which there are about as many in all from ten dimensions on.
    """
    task = Dynamics.linear(lab.variant, state_dim=dim, length=4 * dim, state_noise=noise)
    fewer = max(1.0, (dim / 10) ** 2)
    size = min(lab.scale.sequences, max(32, int(128 / fewer)))
    keys = [
        jax.random.fold_in(jax.random.key(EVALUATION), i)
        for i in range(max(1, int(lab.scale.sequences / fewer) // size))
    ]
    batches = [task.sample(key, size).observations for key in keys]
    found = {"zero": float(np.mean([0.5 * np.mean(np.asarray(batch)[:, 1:] ** 2) for batch in batches]))}
    choices = {
        "ridge": (Ridge, (0.01, 1e6), partial(autoregressive, newest_pair=True)),
        "ridge_dropped": (Ridge, (0.01, 1e6), partial(autoregressive, newest_pair=False)),
        "kernel": (KernelRegression, (0.01, 1e2), partial(autoregressive, newest_pair=True)),
    }

    def search() -> dict[str, float]:
        tuning = task.sample(jax.random.key(TUNING), size).observations
        return {
            name: line_search(build, context(tuning), *bounds, points=7, rounds=4)[0]
            for name, (build, bounds, context) in choices.items()
        }

    best = lab.tuned(f"regression_{store.digest(task)}", search)
    for name, (build, _, context) in choices.items():
        number = float(best[name])
        found[name] = float(np.mean([loss(build(number), context(batch)) for batch in batches])) / dim
        found[f"{name}_tuned"] = number
    return found


def _by_dimension_panel(result: Result, letter: str, title: str, suffix: str = "") -> Curves:
    def line(name: str, label: str, kind: str, *, dashed: bool = False) -> Line:
        name += suffix
        return Line(label=label, x=np.array(DIMENSIONS, float), y=result[name][None], kind=kind, dashed=dashed,
                    markers=True, origin=result.origin[name])  # fmt: skip

    return Curves(
        letter=letter, title=title, xlabel="dimension of observations", ylabel="loss per dimension", log_x=True,
        x_ticks={n: str(n) for n in DIMENSIONS},
        lines=(
            line("kernel", "softmax-kernel regression, best β", "softmax"),
            line("ridge", "least squares, best λ", "theory"),
            line("ridge_dropped", "the same, newest pair dropped (as released)", "control", dashed=True),
        ),
    )  # fmt: skip


def panels(result: Result) -> list[Panel]:
    """A, of the dimensions that there are, and B."""
    found: list[Panel] = []
    if dimensions := _linearized_there(result):
        found.append(_replaced_panel(result, dimensions))
    if "ridge" in result:
        found.append(_by_dimension_panel(result, "B", "least squares does not mind dimension"))
    return found


def _linearized_there(result: Result) -> tuple[int, ...]:
    return tuple(n for n in DIMENSIONS if f"ratio_{n}" in result)


def _replaced_panel(result: Result, dimensions: tuple[int, ...]) -> Curves:
    ratios = [result[f"ratio_{n}"] for n in dimensions]
    layers, seeds = ratios[0].shape[1], min(len(ratio) for ratio in ratios)
    stored = any(result.origin[f"ratio_{n}"] == "stored" for n in dimensions)
    lines = tuple(
        Line(
            label=f"layer {i + 1}", x=np.array(dimensions, float), markers=True,
            y=np.stack([ratio[:seeds, i] for ratio in ratios], 1),
            kind="other" if i == 0 else "softmax", shade=i / max(1, layers - 1) if i else 1.0,
            origin="stored" if stored else result.origin[f"ratio_{dimensions[0]}"],
        )
        for i in range(layers)
    )  # fmt: skip
    return Curves(
        letter="A", title="one softmax layer made linear", xlabel="dimension of observations",
        ylabel="loss over that of the model", log_x=True, log_y=True, lines=lines,
        x_ticks={n: str(n) for n in dimensions},
    )  # fmt: skip


def claims(result: Result) -> list[Claim]:
    """The paper's, panel by panel; those of panel A speak of all dimensions, and wait for them."""
    found = _linearity_claims(result) if _linearized_there(result) == DIMENSIONS else []
    return found + (_scaling_claims(result) if "ridge" in result else [])


def _linearity_claims(result: Result) -> list[Claim]:
    claim = partial(Claim, figure="fig5", source="Fig. 5", panel="A")
    first, last = DIMENSIONS[0], DIMENSIONS[-1]
    at_last = result[f"ratio_{last}"][:, 1:]
    trend = at_last.mean() / result[f"ratio_{first}"][:, 1:].mean()
    return [
        claim(
            id="fig5a-1", claim=f"from the second on, layers are nearly linear in {last} dimensions",
            checks=(Check(what=f"largest loss ratio of layers ≥ 2, n_s = {last}", values=at_last.max(-1),
                          at_most=1.2),),
        ),
        claim(
            id="fig5a-2", claim="layers become more linear as dimension grows",
            # Models of different dimensions are not paired, so this is one number.
            checks=(Check(what=f"mean ratio of layers ≥ 2 at n_s = {last} over that at n_s = {first}",
                          values=np.array([trend]), at_most=1.0),),
        ),
        claim(
            id="fig5a-3", claim="the first layer is not linear",
            checks=tuple(Check(what=f"loss ratio of layer 1, n_s = {n}", values=result[f"ratio_{n}"][:, 0],
                               at_least=1.5) for n in DIMENSIONS),
        ),
    ]  # fmt: skip


def _scaling_claims(result: Result) -> list[Claim]:
    claim = partial(Claim, figure="fig5", source="Fig. 5", panel="B", needs="nothing")
    least, kernel = _dimension_checks(result)
    dropped, dropped_kernel = _dimension_checks(result, dropped=True)
    return [
        claim(id="fig5b-1", claim="least squares does not suffer from dimension", checks=least),
        claim(id="fig5b-1-as-run", claim="the same with the newest pair dropped, as released", checks=dropped),
        claim(id="fig5b-2", claim="softmax-kernel regression does, and is worse in every dimension", checks=kernel),
        claim(id="fig5b-2-as-run", claim="the same beside least squares as released", checks=dropped_kernel),
    ]  # fmt: skip


def _dimension_checks(
    result: Result, suffix: str = "", *, dropped: bool = False
) -> tuple[tuple[Check, ...], tuple[Check, ...]]:
    """Of least squares, and of kernel regression."""
    first, last = DIMENSIONS[0], DIMENSIONS[-1]
    ridge = result[f"ridge{'_dropped' * dropped}{suffix}"]
    kernel = result[f"kernel{suffix}"]
    at = f" (noise {suffix[1:]})" if suffix else ""
    growth = f"at n_s = {last} over that at n_s = {first}{at}"
    least = Check(what=f"loss of least squares {growth}", values=ridge[-1:] / ridge[:1], at_most=1.0)
    return (least,), (
        Check(what=f"loss of kernel regression {growth}", values=kernel[-1:] / kernel[:1], at_least=1.2),
        Check(what=f"smallest over n_s of its loss over that of least squares{at}",
              values=np.min(kernel / ridge, keepdims=True), at_least=1.0),
    )  # fmt: skip


def noise_panels(result: Result) -> list[Panel]:
    """One for each level of noise."""
    return [
        _by_dimension_panel(result, letter, f"noise {noise:g}", f"_{noise:g}")
        for letter, noise in zip("ABCDEFGH", NOISES, strict=False)
    ]


def noise_claims(result: Result) -> list[Claim]:
    """Those of figure 5B at all levels, and at each."""
    claim = partial(Claim, figure="si-noise", source="SI, noise sweep of Fig. 5B", needs="nothing")
    each = [sum(_dimension_checks(result, f"_{noise:g}"), ()) for noise in NOISES]
    letters = "abcdefgh"[: len(NOISES)]
    everywhere = claim(
        id="si-noise-1", panel=f"A–{letters[-1].upper()}", checks=sum(each, ()),
        claim="at every level of noise, dimension hurts kernel regression and not least squares",
    )  # fmt: skip
    # Noise adds up along a sequence, and sequences are longer in more dimensions: so are the states in them.
    relative = [
        Check(what=f"the same over the loss of predicting zero (noise {noise:g})", at_most=1.0,
              values=(shares := result[f"ridge_{noise:g}"] / result[f"zero_{noise:g}"])[-1:] / shares[:1])
        for noise in NOISES
    ]  # fmt: skip
    return [
        everywhere,
        claim(id="si-noise-1-relative", panel=everywhere.panel, checks=tuple(relative),
              claim="the share of the observations that least squares leaves unexplained does not grow with dimension"),
    ] + [
        claim(id=f"si-noise-1{letter}", panel=letter.upper(), checks=checks,
              claim=f"dimension hurts kernel regression and not least squares, noise {noise:g}")
        for letter, noise, checks in zip(letters, NOISES, each, strict=True)
    ]  # fmt: skip


PAIRS = ("read", "write")


def distilled(lab: Lab) -> Arrays:
    """Weight products of two softmax layers and of the linear layers distilled from them.

    Tokens [0, s_t, s_t, s_{t-1}] never reach most directions of the first layer's inputs, where weights stay as they
    were drawn; so products are also compared between the directions that inputs have.
    """
    trained = lab.trained("constructed-softmax")
    found = _linearize(lab, trained)
    theirs, ours = products_of(trained.models), _products(found.layers, found.heads)
    paths = [site.input for site in layer_sites(trained.models)]
    tokens = trained.sample(jax.random.key(TUNING), min(lab.scale.sequences, 512)).tokens
    inputs = jax.jit(
        jax.vmap(lambda model: [seen[path] for seen in [model.trace(tokens)[1]] for path in paths])
    )(trained.models)
    reached = np.stack([_directions(np.asarray(x, np.float64)) for x in inputs], 1)[:, :, None]
    as_it_is = found.loss.mean(1)
    arrays: Arrays = {
        "left": Named.of(found.least, "seed", "layer"),
        "ratio": Named.of(found.swapped.mean(1) / as_it_is[:, None], "seed", "layer"),
    }
    for kind, (soft, linear) in {
        "": (theirs, ours),
        "_reached": (_between(theirs, reached), _between(ours, reached)),
    }.items():
        similar = _cosines(soft, linear)
        arrays[f"cosine{kind}"] = Named.of(similar, "seed", "layer", "product")
    for name, of in (("softmax", theirs), ("linear", ours)):
        for product, values in zip(PAIRS, _between(of, reached), strict=True):
            # Of one model: no more is shown.
            shown = values[:1, :, 0].astype(np.float32)
            arrays[f"{name}_{product}"] = Named.of(shown, "seed", "layer", "row", "column")
    return arrays


def _products(layers: LinearLayer, heads: int) -> Products:
    """Of layers that have rows for positional codes, of which there are none here."""
    depth = layers.queries.shape[1]
    return products([{n: a[:, i] for n, a in layers._asdict().items()} for i in range(depth)], heads=heads)


def _directions(inputs: Float[np.ndarray, "seed batch time model"]) -> Float[np.ndarray, "seed model model"]:
    """Projections onto the directions in which inputs differ from zero."""
    flat = inputs.reshape(len(inputs), -1, inputs.shape[-1])
    values, vectors = np.linalg.eigh(np.einsum("sna,snb->sab", flat, flat))
    kept = values > 1e-6 * values[:, -1:]
    return np.einsum("sak,sk,sbk->sab", vectors, kept, vectors)


def _between(of: Products, reached: Float[np.ndarray, "seed layer 1 model model"]) -> Products:
    """Products without the directions that no input has. What is written may go anywhere."""
    read, write = (np.asarray(a, np.float64) for a in of)
    return Products(reached @ read @ reached, write @ reached)  # pyright: ignore[reportArgumentType]


def _cosines(first: Products, second: Products) -> Float[np.ndarray, "seed layer product"]:
    """Of both products, for layers of one head. A head whose products both change sign is the same head."""
    both = []
    for a, b in zip(first, second, strict=True):
        a, b = (np.asarray(x, np.float64).reshape(*x.shape[:2], -1) for x in (a, b))
        both.append(
            np.sum(a * b, -1) / np.maximum(np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1), 1e-300)
        )
    similar = np.stack(both, -1)
    return similar * np.where(similar.sum(-1, keepdims=True) < 0, -1, 1)


def distilled_panels(result: Result) -> list[Panel]:
    """Both products of both layers, side by side, of the first model; each scaled to its largest entry."""

    def one(letter: str, product: str) -> Maps:
        title = "keys by queries" if product == "read" else "written by values"
        maps, layers = {}, result[f"softmax_{product}"].shape[1]
        for layer in range(layers):
            soft, linear = (result[f"{name}_{product}"][0, layer] for name in ("softmax", "linear"))
            sign = np.sign(np.sum(soft * linear)) or 1.0
            maps[f"{title}: softmax layer {layer + 1}"] = soft / max(np.abs(soft).max(), 1e-300)
            maps[f"{title}: made linear, layer {layer + 1}"] = (
                sign * linear / max(np.abs(linear).max(), 1e-300)
            )
        return Maps(letter=letter, title=f"weight products: {title}", maps=maps, diverging=True,
                    xlabel="token entry", ylabel="token entry", origin=result.origin[f"softmax_{product}"])  # fmt: skip

    return [one(letter, product) for letter, product in zip("AB", PAIRS, strict=True)]


def distilled_claims(result: Result) -> list[Claim]:
    """Distilled weights resemble those they were distilled from."""
    claim = partial(Claim, figure="si-distilled", panel="A, B", source="SI, weights of a distilled layer")

    def checks(similar: np.ndarray) -> tuple[Check, ...]:
        return tuple(
            Check(what=f"cosine of {'W_K^T W_Q' if product == 0 else 'P W_V'}, layer {layer + 1}",
                  values=similar[:, layer, product], at_least=0.8)
            for layer, product in np.ndindex(similar.shape[1:])
        )  # fmt: skip

    return [
        claim(id="si-distil-1", checks=checks(result["cosine"]),
              claim="weights of distilled linear layers resemble the softmax layers'"),
        claim(id="si-distil-1-reached", checks=checks(result["cosine_reached"]),
              claim="the same, between the directions that tokens reach"),
        claim(
            id="si-distil-2", claim="linear attention gives back most of what the softmax layers do",
            checks=tuple(
                Check(what=f"part of the squares of its outputs that is left, layer {layer + 1}",
                      values=result["left"][:, layer], at_most=0.5)
                for layer in range(result["left"].shape[1])
            ),
        ),
    ]  # fmt: skip


EXPERIMENTS = {
    "fig5": Experiment(
        id="fig5",
        shows="softmax layers after the first act linearly, and least squares scales with dimension",
        says=(
            "When one softmax layer of a trained Transformer is replaced by a linear one that was trained to imitate "
            "it, the loss hardly changes, the less so the larger the dimension of observations; only the first layer, "
            "which binds tokens, cannot be replaced. Least squares reaches the same loss per dimension in any "
            "dimension, while regression with a softmax kernel, which an induction head computes, gets worse."
        ),
        pieces={**{f"linearized_{n}": linearized(n) for n in DIMENSIONS}, "algorithms": algorithms},
        panels=panels,
        claims=claims,
        in_parts=True,
    ),
    "si-noise": Experiment(
        id="si-noise",
        shows="figure 5B at several levels of noise",
        says=(
            "Least squares keeps its loss per dimension, and softmax-kernel regression loses with dimension, at other "
            "levels of noise in the state as well."
        ),
        pieces={f"noise_{noise:g}": _noise_level(noise) for noise in NOISES},
        panels=noise_panels,
        claims=noise_claims,
    ),
    "si-distilled": Experiment(
        id="si-distilled",
        shows="weights of a distilled linear layer beside the softmax layer's",
        says=(
            "The linear layers distilled from a two-layer softmax Transformer on constructed tokens have nearly the "
            "weight products of the softmax layers themselves."
        ),
        pieces={"distilled": distilled},
        panels=distilled_panels,
        claims=distilled_claims,
    ),
}
