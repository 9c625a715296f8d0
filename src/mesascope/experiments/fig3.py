"""What attends to what, and weights: figure 3, and the attention maps and weight products of the SI."""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mesascope.analysis.binding import AttentionMaps, attention_maps
from mesascope.analysis.circuits import (
    NAMES,
    ONE_LAYER,
    PROPOSITION_1,
    Blocks,
    Products,
    mesa_objective,
    products,
    products_of,
    read_off,
)
from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.common import EVALUATION
from mesascope.experiments.lab import Lab, Trained
from mesascope.experiments.panels import Curves, Line, Maps, Panel
from mesascope.experiments.results import Arrays, Named, Result
from mesascope.models import Transformer
from mesascope.theory.constructions import proposition_1

SEQUENCES = 2048
FIRST = 5
"""Context lengths from here on; before there are few tokens to choose from."""
SHOWN = (0, 2, 3)
"""Slots of [0, s_t, s_t, s_{t-1}] that a single layer uses: 30 of 40 rows and columns."""


# Attention -------------------------------------------------------------------------------------------------------


def _moments(model: Transformer, tokens: Array) -> Mapping[str, Array]:
    """First-layer attention a, its square, and the square of $a_{t,t'} + a_{t,t'-1}$."""
    a = model.trace(tokens)[1]["blocks.0.mixer.attention"]
    both = a + jnp.pad(a, [(0, 0)] * 3 + [(1, 0)])[..., :-1]
    return {"attention": a, "squared": a**2, "both_squared": both**2}


def _maps(lab: Lab, trained: Trained, sequences: int, paths: Sequence[str]) -> AttentionMaps:
    return attention_maps(
        trained.models,
        lambda key, count: trained.sample(key, count).tokens,
        activations=_moments,
        paths=paths,
        lags=2,
        sequences=min(lab.scale.sequences, sequences),
        key=jax.random.key(EVALUATION),
    )


def attention(lab: Lab, *, name: str) -> Arrays:
    """First-layer attention, averaged over sequences, and how much it varies between them.

    Returns:
        "_maps" of the first seed; by seed and head and for t ≥ 5, the mean attention to t and t-1 ("_by_lag"), the
        standard deviation over sequences of the sum of both ("_std"), and the larger of theirs ("_entry_std").
    """
    found = _maps(lab, lab.trained(name), SEQUENCES, ("attention", "squared", "both_squared"))
    mean, squared, both_squared = np.moveaxis(found.maps, 1, 0)

    def at(a: Float[np.ndarray, "seed head time time"], lag: int) -> Float[np.ndarray, "seed head time"]:
        return np.diagonal(a, -lag, -2, -1)[..., FIRST - 1 - lag :]

    def std(mean: np.ndarray, square: np.ndarray) -> Float[np.ndarray, "seed head"]:
        return np.sqrt(np.maximum(square - mean**2, 0)).mean(-1)

    by_lag = np.stack([at(mean, lag).mean(-1) for lag in (0, 1)], -1)
    entries = [std(at(mean, lag), at(squared, lag)) for lag in (0, 1)]
    return {
        f"{name}_maps": Named.of(found.maps[0, 0].astype(np.float32), "head", "time", "past"),
        f"{name}_by_lag": Named.of(by_lag, "seed", "head", "lag"),
        f"{name}_std": Named.of(std(at(mean, 0) + at(mean, 1), at(both_squared, 0)), "seed", "head"),
        f"{name}_entry_std": Named.of(np.maximum(*entries), "seed", "head"),
    }


def attention_checks(result: Result, name: str) -> tuple[tuple[Check, ...], Check]:
    """Of the two heads with the most attention to t and t-1: that share, its variation, and that of single weights."""
    mass = result[f"{name}_by_lag"].sum(-1)
    two = np.argsort(-mass, 1)[:, :2]

    def of_two(a: np.ndarray) -> np.ndarray:
        return np.take_along_axis(a, two, 1)

    return (
        Check(what="share of attention on t and t-1, two strongest heads, t ≥ 5",
              values=of_two(mass).mean(1), at_least=0.8),
        Check(what="its standard deviation over sequences, the larger of both heads",
              values=of_two(result[f"{name}_std"]).max(1), at_most=0.1),
    ), Check(what="standard deviation over sequences of a single weight, the largest of both heads and tokens",
             values=of_two(result[f"{name}_entry_std"]).max(1), at_most=0.1)  # fmt: skip


def _head_label(result: Result, name: str, head: int) -> str:
    now, before = result[f"{name}_by_lag"][0, head]
    return f"head {head + 1}: {now:.2f} on t, {before:.2f} on t-1"


def _map_panel(result: Result, name: str, letter: str, title: str, maps: Mapping[str, np.ndarray]) -> Maps:
    return Maps(letter=letter, title=title, maps=maps, xlabel="attends to t'", ylabel="time t",
                origin=result.origin[f"{name}_maps"])  # fmt: skip


# Weights ---------------------------------------------------------------------------------------------------------


def one_layer(lab: Lab) -> Arrays:
    """Weight products of one linear layer, how much of them Proposition 1 is, and the objective that they descend."""
    trained = lab.trained("linear-1")
    width = trained.config.task.obs_dim
    of = products_of(trained.models)
    rows = np.concatenate([np.arange(width) + slot * width for slot in SHOWN])
    # A head is the same with both products negated.
    sign = np.sign(read_off(of, width=width, blocks=PROPOSITION_1).write[0, 0, :, 0, 2])[:, None, None]
    objective = mesa_objective(read_off(of, width=width, blocks=ONE_LAYER))
    built = proposition_1(width, float(objective.eta.mean())).model
    exact = products_of(jax.tree.map(lambda leaf: leaf[None], built))
    arrays: Arrays = {
        "objective": Named.of(objective.weights, "seed", "query", "value", "key"),
        "objective_share": Named.of(objective.share, "seed"),
    }
    for kind, ours, theirs in zip(("read", "write"), of, exact, strict=True):
        shown = np.asarray(ours)[0, 0][:, rows][:, :, rows] * sign
        arrays[kind] = Named.of(shown.astype(np.float32), "head", "row", "column")
        arrays[f"{kind}_proposition_1"] = Named.of(np.asarray(theirs)[0, 0, 0], "row", "column")
    arrays["together_share"] = Named.of(_together(of, width)[:, 0], "seed")
    for name, blocks in (("proposition_1", PROPOSITION_1), ("scalars", ONE_LAYER)):
        for kind, share in zip(("read", "write"), _shares(of, width, blocks), strict=True):
            arrays[f"{kind}_share_{name}"] = Named.of(share[:, 0], "seed")
    return arrays


def six_layers(lab: Lab) -> Arrays:
    """Weight products of six linear layers, and how much of them are multiples of the identity."""
    trained = lab.trained("linear-6")
    of = products_of(trained.models)
    read, write = _shares(of, trained.config.task.obs_dim, None)
    return {
        "six_read": Named.of(np.asarray(of.read[0], np.float32), "layer", "head", "row", "column"),
        "six_write": Named.of(np.asarray(of.write[0], np.float32), "layer", "head", "row", "column"),
        "six_read_share": Named.of(read, "seed", "layer"),
        "six_write_share": Named.of(write, "seed", "layer"),
    }


def softmax_layers(lab: Lab) -> Arrays:
    r"""Weight products of layers 2 to 7 of softmax-7, as the tokens see them that layer 1 has bound.

    After layer 1 the residual stream is $r_t \approx B_0 s_t + B_1 s_{t-1}$ with
    $B_l = 1_{l=0}E + \sum_h \bar a_{h,l}\,P^h W_V^h E$: E is the embedding and $\bar a_{h,l}$ the mean attention to
    t - l. So a later head reads $B^\top W_K^\top W_Q B$ and writes $U P W_V B$ to the prediction, U being the
    unembedding: slots of n entries, as for constructed tokens.
    """
    trained = lab.trained("softmax-7")
    models, block = trained.models, trained.config.model.blocks[0]
    assert models.embed is not None
    assert models.unembed is not None
    embed, unembed = np.asarray(models.embed, np.float64), np.asarray(models.unembed, np.float64)
    first, later = models.layers[0], models.layers[1:]
    # What heads attend to hardly depends on the data: see `attention`.
    share = _maps(lab, trained, 128, ("attention",)).shares[:, 0]
    values = np.reshape(first.values, (len(embed), -1, block.heads, block.key_dim))
    output = np.reshape(first.output, (len(embed), block.heads, block.key_dim, -1))
    heads = np.einsum("sthd,shdm->shtm", np.einsum("stm,smhd->sthd", embed, values), output)
    bound = np.einsum("shl,shtm->sltm", share, heads)
    bound[:, 0] += embed
    seeds, slots, width, dim = bound.shape
    bound = bound.reshape(seeds, slots * width, dim)
    of = products([{n: getattr(layer, n) for n in NAMES} for layer in later], heads=block.heads)
    read = np.einsum("sam,slhmn,sbn->slhab", bound, of.read, bound)
    write = np.einsum("smp,slhmn,sbn->slhpb", unembed, of.write, bound)
    square = np.concatenate([write, np.zeros_like(write)], -2)
    read_share, write_share = _shares(Products(jnp.asarray(read), jnp.asarray(square)), width, None)
    return {
        "seven_read": Named.of(read[0].astype(np.float32), "layer", "head", "row", "column"),
        "seven_write": Named.of(write[0].astype(np.float32), "layer", "head", "row", "column"),
        "seven_read_share": Named.of(read_share, "seed", "layer"),
        "seven_write_share": Named.of(write_share, "seed", "layer"),
    }


def _shares(of: Products, width: int, blocks: Blocks | None) -> list[Float[np.ndarray, "seed layer"]]:
    """Energy of multiples of the identity in blocks over that of all, for reads and writes, heads together."""
    scalars = read_off(of, width=width, blocks=blocks)
    energies = [np.sum(np.asarray(p, np.float64) ** 2, (-1, -2)) for p in of]
    return [
        (share * energy).sum(-1) / energy.sum(-1)
        for share, energy in zip((scalars.read_share, scalars.write_share), energies, strict=True)
    ]


def _together(of: Products, width: int) -> Float[np.ndarray, "seed layer"]:
    r"""Energy of the blocks of Proposition 1 in $\sum_h P^h W_V^h \otimes W_K^{h\top} W_Q^h$, over all of it.

    This tensor is what a layer of linear attention computes. Heads are not: they may be mixed and what they have in
    common may cancel, and the layer is the same. Its energy is
    $\sum_{hk}\langle P^hW_V^h, P^kW_V^k\rangle\langle W_K^{h\top}W_Q^h, W_K^{k\top}W_Q^k\rangle$.
    """
    scalars = read_off(of, width=width, blocks=PROPOSITION_1)

    def energy(read: np.ndarray, write: np.ndarray) -> np.ndarray:
        grams = [np.einsum("slhab,slkab->slhk", a, a) for a in (read, write)]
        return np.sum(grams[0] * grams[1], (-1, -2))

    whole = energy(*(np.asarray(a, np.float64) for a in of))
    return width**2 * energy(scalars.read, scalars.write) / whole


def sheet(
    read: Float[np.ndarray, "head row column"], write: Float[np.ndarray, "head row2 column"]
) -> Float[np.ndarray, "row column"]:
    """Heads side by side, reads above writes, each divided by its largest entry; a line of zeros between them."""

    def normalized(a: np.ndarray) -> np.ndarray:
        return a / (np.abs(a).max() or 1.0)

    parts = [
        np.concatenate([normalized(r), np.zeros_like(r[:1]), normalized(w)])
        for r, w in zip(read, write, strict=True)
    ]
    gap = np.zeros_like(parts[0][:, :1])
    return np.concatenate([part for head in parts for part in (head, gap)], 1)[:, :-1]


def _products_panels(result: Result, letters: tuple[str, str]) -> list[Panel]:
    """Both products of linear-1, head by head, next to those of Proposition 1."""
    found: list[Panel] = []
    for letter, kind, formula in zip(letters, ("read", "write"), ("W_Kᵀ W_Q", "P W_V"), strict=True):
        maps = {f"{formula}, head {i + 1}": of for i, of in enumerate(result[kind])}
        maps[f"{formula}, Proposition 1"] = result[f"{kind}_proposition_1"]
        title = f"{formula} of one trained layer, and of Proposition 1"
        found.append(Maps(letter=letter, title=title, maps=maps, diverging=True, origin=result.origin[kind]))
    return found


# Figures ---------------------------------------------------------------------------------------------------------


def panels(result: Result) -> list[Panel]:
    """A: heads that look at t-1 and at t, and all heads together; B: one layer next to Proposition 1."""
    by_lag, maps = result["softmax-7_by_lag"][0], result["softmax-7_maps"]
    shown = [int(by_lag[:, lag].argmax()) for lag in (1, 0)]
    heads = {_head_label(result, "softmax-7", head): maps[head] for head in shown}
    title = "first-layer attention of softmax-7, averaged over sequences"
    return [
        _map_panel(result, "softmax-7", "A", title, heads | {"mean of all heads": maps.mean(0)}),
        *_products_panels(result, ("B", "B")),
    ]


def claims(result: Result) -> list[Claim]:
    """The paper's, panel by panel."""
    checks, single = attention_checks(result, "softmax-7")

    def energy(name: str) -> tuple[Check, ...]:
        return tuple(
            Check(
                what=f"part of the energy of {formula}", values=result[f"{kind}_share_{name}"], at_least=0.9
            )
            for kind, formula in (("read", "W_Kᵀ W_Q"), ("write", "P W_V"))
        )

    return [
        Claim(
            id="fig3a-1", figure="fig3", panel="A", source="Fig. 3A",
            claim="the first layer attends to t and t-1, whatever the data", checks=checks,
        ),
        Claim(
            id="fig3a-1-single", figure="fig3", panel="A", source="Fig. 3A",
            claim="not only the attention to both together is independent of data, but also that to each",
            checks=(single,),
        ),
        Claim(
            id="fig3b-1", figure="fig3", panel="B", source="Fig. 3B",
            claim="the two blocks of Proposition 1 are nearly all of a trained layer", checks=energy("proposition_1"),
        ),
        Claim(
            id="fig3b-1-together", figure="fig3", panel="B", source="Fig. 3B",
            claim="the same of what the layer computes, for single heads are not determined by it: two of them may "
                  "have more in common than the layer has",
            checks=(Check(what="part of the energy of the sum over heads of P W_V ⊗ W_Kᵀ W_Q",
                          values=result["together_share"], at_least=0.9),),
        ),
        Claim(
            id="fig3b-1-scalars", figure="fig3", panel="B", source="Fig. 3B",
            claim="the blocks that Proposition 1 may use, twelve multiples of the identity, are nearly all of it",
            checks=energy("scalars"),
        ),
    ]  # fmt: skip


def attention_panels(result: Result) -> list[Panel]:
    """All heads of the first layer of both models."""
    found: list[Panel] = []
    for letter, name in (("A", "softmax-7"), ("B", "hybrid-mesa")):
        maps = {_head_label(result, name, head): of for head, of in enumerate(result[f"{name}_maps"])}
        found.append(_map_panel(result, name, letter, f"first layer of {name}", maps))
    return found


def attention_claims(result: Result) -> list[Claim]:
    """As figure 3A, for both models."""
    return [
        Claim(
            id=f"si-attention-{i}", figure="si-attention", panel=panel, source="SI, attention maps",
            claim=f"the first layer of {name} attends to t and t-1, whatever the data",
            checks=attention_checks(result, name)[0],
        )
        for i, panel, name in ((1, "A", "softmax-7"), (2, "B", "hybrid-mesa"))
    ]  # fmt: skip


def weight_panels(result: Result) -> list[Panel]:
    """A, B: one layer; C: its objective; D: six linear layers; E: layers 2 to 7 of softmax-7."""
    weights = result["objective"]
    relative = weights / weights[:, :1, :1, 1:]
    tokens = ("s_t", "s_t-1")
    objective = Curves(
        letter="C", title="objective that one layer descends, over its rate η", xlabel="what is predicted from what",
        ylabel="weight",
        lines=tuple(
            Line(label=f"for the query {tokens[a]}", x=np.arange(4.0), y=relative[:, a].reshape(-1, 4), kind="linear",
                 shade=1.0 - a / 2, dashed=a > 0, markers=True, origin=result.origin["objective"])
            for a in range(2)
        ),
        x_ticks={float(2 * c + b): f"{tokens[c]} ← {tokens[b]}" for c in range(2) for b in range(2)},
    )  # fmt: skip

    def layers(letter: str, name: str, title: str, first: int) -> Maps:
        pairs = zip(result[f"{name}_read"], result[f"{name}_write"], strict=True)
        maps = {f"layer {i}": sheet(*pair) for i, pair in enumerate(pairs, start=first)}
        return Maps(
            letter=letter, title=title, maps=maps, diverging=True, origin=result.origin[f"{name}_read"]
        )

    return [
        *_products_panels(result, ("A", "B")), objective,
        layers("D", "six", "six linear layers: W_Kᵀ W_Q above P W_V, head by head", 1),
        layers("E", "seven", "softmax-7, read from and written to bound tokens, head by head", 2),
    ]  # fmt: skip


def weight_claims(result: Result) -> list[Claim]:
    """What the SI says of its pictures; the thresholds are ours."""
    claim = partial(Claim, figure="si-weights", source="SI, weights")

    def energy(name: str, at_least: float) -> tuple[Check, ...]:
        return tuple(
            Check(what=f"part of the energy of {what}, mean over layers",
                  values=result[f"{name}_{kind}_share"].mean(1), at_least=at_least)
            for kind, what in (("read", "what is read"), ("write", "what is written"))
        )  # fmt: skip

    return [
        claim(
            id="si-weights-1", panel="A", claim="twelve multiples of the identity are nearly all of one layer",
            checks=tuple(
                Check(what=f"part of the energy of {formula}", values=result[f"{kind}_share_scalars"], at_least=0.9)
                for kind, formula in (("read", "W_Kᵀ W_Q"), ("write", "P W_V"))
            ),
        ),
        claim(
            id="si-weights-2", panel="C",
            claim="the objective is next-token prediction, and the faint rest modifies it little",
            checks=(Check(what="part of η² in the sum of all squared weights", values=result["objective_share"],
                          at_least=0.9),),
        ),
        claim(id="si-weights-3", panel="D", claim="six layers are made of multiples of the identity too",
              checks=energy("six", 0.9)),
        claim(id="si-weights-4", panel="E", claim="and so are those of softmax-7, as bound tokens see them",
              checks=energy("seven", 0.5)),
    ]  # fmt: skip


EXPERIMENTS = {
    "fig3": Experiment(
        id="fig3",
        shows="the first layer copies; one linear layer is Proposition 1",
        says=(
            "Averaged over 2048 sequences, heads of the first layer of a softmax Transformer attend to the current and "
            "to the previous token and to nothing else. And the weight products of one trained layer of linear "
            "attention look like those that make it a step of gradient descent."
        ),
        pieces={"attention": partial(attention, name="softmax-7"), "one_layer": one_layer},
        panels=panels,
        claims=claims,
    ),
    "si-attention": Experiment(
        id="si-attention",
        shows="attention maps of all heads of the first layer",
        says=(
            "In a softmax Transformer and in the hybrid with a mesa-layer, heads of the first layer attend to the "
            "current and to the previous token."
        ),
        pieces={name: partial(attention, name=name) for name in ("softmax-7", "hybrid-mesa")},
        panels=attention_panels,
        claims=attention_claims,
    ),
    "si-weights": Experiment(
        id="si-weights",
        shows="weight products of one and six linear layers and of seven softmax layers",
        says=(
            "The dominant pattern in the weights of one trained layer is the construction of Proposition 1; the faint "
            "rest modifies the objective that it descends. Weights of deeper models are structured and sparse too. For "
            "softmax-7 we look at them through the tokens that its first layer binds."
        ),
        pieces={"one_layer": one_layer, "six_layers": six_layers, "softmax_layers": softmax_layers},
        panels=weight_panels,
        claims=weight_claims,
    ),
}
