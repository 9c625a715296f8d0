"""Language models: one layer with shifted keys, two layers, four layers with MLPs; what the first layer attends to.

The authors kept nothing of these, so that there is nothing of theirs to compare with. All models of a figure see the
same text; each is trained at the best of the same four learning rates (`rates.search_rates`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.lab import Lab, NoTextError, NotReleasedError, OutOfTimeError
from mesascope.experiments.panels import Curves, Line, Maps, Panel
from mesascope.experiments.rates import SAVE_SECONDS, best, search_rates
from mesascope.experiments.results import Arrays, Named, Result
from mesascope.language import LanguageConfig, LanguageTrainer, language_preset, with_rate
from mesascope.language.presets import NUS, Size
from mesascope.runs import Run, fit
from mesascope.tasks.text import Corpus
from mesascope.training import FINAL

SOURCE = "Appendix, Language modeling"
SIZES: dict[str, Size] = {"smoke": "cpu", "quick": "cpu", "paper": "gpu"}
BLOCK = 64
"""Attention maps show so many tokens, from this one on: all of them have as many before them."""

KEY_SHIFT = ("softmax", *(f"{mixer}-nu{nu}" for mixer in ("linear", "mesa") for nu in NUS))
MIXERS = ("softmax", "linear", "mesa", "delta", "mesa-forget")
COMPARED = MIXERS[:3]
LAYERS = {"two": 2, "four": 4}
COLORS = {"softmax": "softmax", "linear": "linear", "mesa": "mesa", "delta": "other", "mesa-forget": "theory"}


def trained(lab: Lab, name: str) -> tuple[Run, dict[float, float]]:
    """A language model at the lab's scale, and the losses of the rates that were tried for it.

    Raises:
        NotReleasedError: at the scale "released".
        NoTextError: no corpus was given.
        OutOfTimeError: it goes on with the next call.
    """
    lab.check_time()
    if lab.scale.from_released:
        raise NotReleasedError(f"the weights of {name}")
    if lab.data is None:
        raise NoTextError(name)
    config = _scaled(lab, language_preset(name, Corpus(lab.data).task, SIZES[lab.scale.name]))
    losses = {1e-3: np.nan}
    if lab.scale.name != "smoke":
        minutes = lab.minutes_left
        losses = search_rates(config, data=lab.data, runs=lab.runs, max_minutes=minutes, console=lab.console)
        config = with_rate(config, best(losses))
        lab.check_time()
    run = fit(
        config,
        data=lab.data,
        runs=lab.runs,
        max_minutes=lab.minutes_left,
        save_seconds=SAVE_SECONDS,
        console=lab.console,
    )
    if not run.finished:
        raise OutOfTimeError(f"stopped while training {name}.")
    lab.used(run)
    return run, losses


def _scaled(lab: Lab, config: LanguageConfig) -> LanguageConfig:
    if lab.scale.name != "smoke":
        return config
    changes = dict(steps=6, batch_size=2, eval_every=3, eval_batches=1, eval_batch_size=2, final_sequences=2)
    config = with_rate(config, 1e-3, steps=6)
    return replace(config, train=replace(config.train, **changes))


def measured(lab: Lab, preset: str, name: str) -> Arrays:
    """What is known of a model along training and at its end."""
    run, losses = trained(lab, preset)
    config, metrics, result = run.config, run.metrics(), run.result
    tokens = metrics["step"] * config.train.batch_size * config.task.length
    arrays = {
        "tokens": Named.of(tokens, "step"),
        "loss": Named.of(metrics["eval_loss"].T, "seed", "step"),
        "in_context": Named.of(metrics["in_context"].T, "seed", "step"),
        "final_loss": Named.of(result["loss"], "seed"),
        "final_in_context": Named.of(result["in_context"], "seed"),
        "by_position": Named.of(result["loss_by_position"], "seed", "time"),
        "rates": Named.of([list(losses), list(losses.values())], "row", "rate"),
        "at": Named.of(result["at"], "place"),
    }
    if "offsets" in result:
        arrays["offsets"] = Named.of(result["offsets"], "seed", "head", "offset")
    return {f"{name}_{what}": array for what, array in arrays.items()}


def _pieces(presets: Mapping[str, str]) -> dict[str, Callable[[Lab], Arrays]]:
    """One for each model."""
    return {name: partial(measured, preset=preset, name=name) for name, preset in presets.items()}


def _copying(lab: Lab, preset: str, name: str) -> Arrays:
    run, _ = trained(lab, preset)
    return {f"{name}_offsets": Named.of(run.result["offsets"], "seed", "head", "offset")}


def attention_maps(lab: Lab) -> Arrays:
    """The first layer of two softmax layers, mean over validation text: a block beside the diagonal."""
    run, _ = trained(lab, "lm-2-softmax")
    batch = next(LanguageTrainer(run.config, lab.data).held_out(FINAL, 1))
    model = run.model(0)
    block = min(BLOCK, run.config.task.length // 2)

    @jax.jit
    def one(tokens: Array) -> Float[Array, "head row column"]:
        attention = model.trace(tokens)[1]["blocks.0.mixer.attention"]
        return attention[:, block : 2 * block, block : 2 * block]

    maps = np.mean([np.asarray(one(jnp.asarray(tokens))) for tokens in batch.tokens], 0)
    return {"maps": Named.of(maps, "head", "row", "column")}


# Panels.


def _over_training(result: Result, letters: str, lines: list[tuple[str, str, str, float]]) -> list[Curves]:
    """Perplexity and in-context score by tokens read; `lines` are name, label, kind and shade."""

    def curves(letter: str, title: str, ylabel: str, what: str, change: Callable, **style) -> Curves:
        drawn = tuple(
            Line(label=label, x=result[f"{name}_tokens"][1:] / 1e6, y=change(result[f"{name}_{what}"][:, 1:]),
                 kind=kind, shade=shade, origin=result.origin[f"{name}_{what}"])
            for name, label, kind, shade in lines
        )  # fmt: skip
        xlabel = "million tokens read"
        return Curves(letter=letter, title=title, xlabel=xlabel, ylabel=ylabel, lines=drawn, **style)

    early, late = (int(t) for t in result[f"{lines[0][0]}_at"])
    by_position = tuple(
        Line(label=label, x=np.arange(1, result[f"{name}_by_position"].shape[-1] + 1),
             y=_smooth(result[f"{name}_by_position"]), kind=kind, shade=shade,
             origin=result.origin[f"{name}_by_position"])
        for name, label, kind, shade in lines
    )  # fmt: skip
    return [
        curves(letters[0], "perplexity", "validation perplexity", "loss", np.exp, log_y=True),
        curves(letters[1], "in-context score", f"loss at token {late} minus token {early}", "in_context", lambda y: y),
        Curves(letter=letters[2], title="trained models", xlabel="token", ylabel="loss (mean of 16 tokens around)",
               lines=by_position, log_x=True),
    ]  # fmt: skip


def _smooth(loss: Float[np.ndarray, "seed time"], width: int = 16) -> Float[np.ndarray, "seed time"]:
    """The mean over neighbours, fewer at the ends."""
    kernel = np.ones(min(width, loss.shape[-1]))
    count = np.convolve(np.ones(loss.shape[-1]), kernel, "same")
    return np.stack([np.convolve(row, kernel, "same") / count for row in loss])


def key_shift_panels(result: Result) -> list[Panel]:
    """A and B as in the paper; C by position."""
    lines = [("softmax", "softmax", "softmax", 1.0)]
    for mixer in ("linear", "mesa"):
        lines += [(f"{mixer}-nu{nu}", f"{mixer}, ν = {nu}", mixer, (1 + nu) / len(NUS)) for nu in NUS]
    return [*_over_training(result, "ABC", lines)]


def layers_panels(result: Result) -> list[Panel]:
    """Perplexity, in-context score, loss by position."""
    return [*_over_training(result, "ABC", [(mixer, mixer, COLORS[mixer], 1.0) for mixer in MIXERS])]


def attention_panels(result: Result) -> list[Panel]:
    """Maps of one model; how far back the heads of all models look."""
    maps = {f"head {i}": values for i, values in enumerate(result["maps"])}
    title = "two softmax layers: attention of the first, mean over text"
    panels: list[Panel] = [
        Maps(
            letter="A",
            title=title,
            maps=maps,
            xlabel="attended token",
            ylabel="token",
            origin=result.origin["maps"],
        )
    ]
    for letter, depth in zip("BC", LAYERS, strict=True):
        lines = []
        for mixer in COMPARED:
            mass = result[f"{depth}-{mixer}_offsets"]
            # The head that looks most at one earlier token, by seed.
            chosen = mass[np.arange(len(mass)), mass[..., 1:].max(-1).argmax(-1)]
            lines.append(
                Line(label=mixer, x=np.arange(mass.shape[-1]), y=chosen, kind=COLORS[mixer],
                     origin=result.origin[f"{depth}-{mixer}_offsets"])
            )  # fmt: skip
        panels.append(
            Curves(letter=letter, title=f"{depth} layers: the clearest head of the first", xlabel="tokens back",
                   ylabel="part of its attention", lines=tuple(lines))
        )  # fmt: skip
    return panels


# Claims.


def _less(what: str, ours: np.ndarray, theirs: np.ndarray) -> tuple[Check, Check]:
    """One is lower than the other, and the interval over seeds, which saw the same text, leaves zero out."""
    difference = Check(what=what, values=ours - theirs, at_most=0.0)
    interval = difference.interval()
    upper = np.array([np.nan if interval is None else interval[1]])
    return difference, Check(what="upper end of its 95% interval over seeds", values=upper, at_most=0.0)


def _beats_linear(
    result: Result, claim: Callable[..., Claim], suffix: str, where: str, pairs: list[tuple[str, str, str]]
) -> Iterator[Claim]:
    """lm-1 and lm-2 for one configuration; `pairs` are names of mesa and linear models, and what to add."""
    for number, array, panel, text in (
        (1, "final_loss", "A", "perplexity"),
        (2, "final_in_context", "B", "in-context score"),
    ):
        what = "log perplexity" if number == 1 else text
        checks = tuple(
            check
            for mesa, linear, note in pairs
            for check in _less(
                f"{what} of mesa minus that of linear{note}",
                result[f"{mesa}_{array}"],
                result[f"{linear}_{array}"],
            )
        )
        yield claim(
            id=f"lm-{number}{suffix}", panel=panel, checks=checks,
            claim=f"{where}: mesa-layers have a lower {text} than linear attention",
        )  # fmt: skip


def key_shift_claims(result: Result) -> list[Claim]:
    """lm-1, lm-2 for every ν; lm-3 and lm-6."""
    claim = partial(Claim, figure="lm-keyshift", source=SOURCE)
    loss = {name: result[f"{name}_final_loss"] for name in KEY_SHIFT}
    score = {name: result[f"{name}_final_in_context"] for name in KEY_SHIFT}
    pairs = [(f"mesa-nu{nu}", f"linear-nu{nu}", f", ν = {nu}") for nu in NUS]
    return [
        *_beats_linear(result, claim, "", "shifted keys", pairs),
        claim(
            id="lm-3", panel="A", claim="features of higher order (DPFP) help linear attention and mesa-layers",
            checks=tuple(
                Check(what=f"{mixer}: perplexity with ν = 3 over that without features",
                      values=np.exp(loss[f"{mixer}-nu3"] - loss[f"{mixer}-nu0"]), at_most=1.0)
                for mixer in ("mesa", "linear")
            ),
        ),
        claim(
            id="lm-6", panel="B", claim="with shifted keys a mesa-layer's in-context score is that of softmax",
            checks=(
                Check(what="|score of mesa, ν = 3, over that of softmax - 1|",
                      values=np.abs(score["mesa-nu3"] / score["softmax"] - 1), at_most=0.1),
            ),
        ),
    ]  # fmt: skip


def layers_claims(result: Result, figure: str, depth: str) -> list[Claim]:
    """lm-1, lm-2; lm-4 for two layers, lm-5 for four."""
    claim = partial(Claim, figure=figure, source=SOURCE)
    softmax, linear, mesa = (result[f"{mixer}_final_loss"] for mixer in COMPARED)
    suffix, where = f"-{depth}-layers", f"{depth} layers"
    found = list(_beats_linear(result, claim, suffix, where, [("mesa", "linear", "")]))
    if depth == "two":
        found.append(
            claim(
                id="lm-4", panel="A", claim="two layers: mesa is about as good as softmax",
                checks=(
                    Check(what="|perplexity of mesa over that of softmax - 1|",
                          values=np.abs(np.exp(mesa - softmax) - 1), at_most=0.03),
                ),
            )
        )  # fmt: skip
    else:
        found.append(
            claim(
                id="lm-5", panel="A",
                claim="four layers with MLPs: mesa is between linear attention and softmax, or better",
                checks=(
                    Check(what="perplexity of mesa over that of linear attention", values=np.exp(mesa - linear),
                          at_most=1.0),
                ),
            )
        )  # fmt: skip
    return found


def attention_claims(result: Result) -> list[Claim]:
    """lm-7, for all models."""
    checks = []
    for depth in LAYERS:
        for mixer in COMPARED:
            mass = result[f"{depth}-{mixer}_offsets"][..., 1:].max((-1, -2))
            what = f"{depth} layers, {mixer}: largest part of a head's attention on one earlier token"
            checks.append(Check(what=what, values=mass, at_least=0.5))
    return [
        Claim(
            id="lm-7", figure="lm-attention", panel="A, B, C", source=SOURCE, checks=tuple(checks),
            claim="the first softmax layer of all models has heads that copy the token at a fixed distance",
        )
    ]  # fmt: skip


def _layers(depth: str) -> Experiment:
    count, figure = LAYERS[depth], f"lm-{depth}-layers"
    mlps = " with MLPs" if count > 2 else " without MLPs"
    close = (
        "they essentially match softmax."
        if count == 2
        else "they come closer to softmax than linear attention does."
    )
    return Experiment(
        id=figure,
        shows=f"language models of {depth} layers{mlps}: softmax first, then each kind of attention",
        says=(
            f"On the Pile, Transformers of {depth} layers{mlps} whose first layer is softmax attention have a lower "
            "perplexity and a better in-context score with mesa-layers after it than with linear attention, and "
            f"{close} Delta rule and forgetting factors are ours: the paper leaves them to future work."
        ),
        pieces=_pieces({mixer: f"lm-{count}-{mixer}" for mixer in MIXERS}),
        panels=layers_panels,
        claims=partial(layers_claims, figure=figure, depth=depth),
        needs_text=True,
    )


EXPERIMENTS = {
    "lm-keyshift": Experiment(
        id="lm-keyshift",
        shows="language models of one layer with shifted keys, by features ν",
        says=(
            "One layer whose keys are those of the token before already learns in context on the Pile. Mesa-layers do "
            "so better than linear attention at every number of features, and catch up with softmax; features of "
            "higher order help both."
        ),
        pieces=_pieces({name: f"lm-keyshift-{name}" for name in KEY_SHIFT}),
        panels=key_shift_panels,
        claims=key_shift_claims,
        needs_text=True,
    ),
    "lm-two-layers": _layers("two"),
    "lm-four-layers": _layers("four"),
    "lm-attention": Experiment(
        id="lm-attention",
        shows="language models: which tokens the first softmax layer attends to",
        says=(
            "In all models some heads of the first softmax layer attend to a token at a fixed, small distance, "
            "whatever the text: they bring together the tokens that later layers learn from."
        ),
        pieces={
            "maps": attention_maps,
            **{
                f"{depth}-{mixer}": partial(_copying, preset=f"lm-{count}-{mixer}", name=f"{depth}-{mixer}")
                for depth, count in LAYERS.items()
                for mixer in COMPARED
            },
        },
        panels=attention_panels,
        claims=attention_claims,
        needs_text=True,
    ),
}
