"""Language models: one layer with shifted keys, two layers, four layers with MLPs; what the first layer attends to.

The authors kept nothing of these, so that there is nothing of theirs to compare with. All models of a figure see the
same text; each is trained at the best of the same four learning rates (`rates.search_rates`), or at half of that, a
quarter, … where it diverges. Weights are not kept: all that figures show is measured when a model has been trained.

A model that has not been trained yet is left out of panels, and a claim about it is not made.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from jaxtyping import Float

from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.lab import Lab, NoTextError, NotReleasedError
from mesascope.experiments.panels import Curves, Line, Maps, Panel
from mesascope.experiments.rates import train_at_best
from mesascope.experiments.results import Arrays, Named, Result
from mesascope.language import LanguageConfig, language_preset, with_rate
from mesascope.language.presets import NUS, Size
from mesascope.runs import Run
from mesascope.tasks.text import Corpus

SOURCE = "Appendix, Language modeling"
SIZES: dict[str, Size] = {"smoke": "cpu", "quick": "cpu", "paper": "gpu"}
SEEDS = 2
"""Models of each kind that a claim takes at least."""

KEY_SHIFT = ("softmax", *(f"{mixer}-nu{nu}" for mixer in ("linear", "mesa") for nu in NUS))
MIXERS = ("softmax", "linear", "mesa", "delta", "mesa-forget")
SMOOTH = "in-context score, of means over 51 tokens (ours)"
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
    return train_at_best(lab, config)


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
    in_a_step = config.train.batch_size * config.task.length
    parts = result["parts"]
    arrays = {
        "tokens": Named.of(metrics["step"] * in_a_step, "step"),
        "loss": Named.of(metrics["eval_loss"].T, "seed", "step"),
        "train_loss": Named.of(metrics["train_loss"].T, "seed", "step"),
        "in_context": Named.of(metrics["in_context"].T, "seed", "step"),
        "final_loss": Named.of(result["loss"], "seed"),
        "final_in_context": Named.of(result["in_context"], "seed"),
        "by_position": Named.of(result["loss_by_position"], "seed", "time"),
        "final_in_context_smooth": Named.of(result["in_context_smooth"], "seed"),
        "parts_loss": Named.of(np.transpose([part["loss"] for part in parts.values()]), "seed", "part"),
        "parts_tokens": Named.of([part["tokens"] for part in parts.values()], "part"),
        "parts_names": Named.of(np.frombuffer("\n".join(parts).encode(), np.uint8), "byte"),
        "rates": Named.of([list(losses), list(losses.values())], "row", "rate"),
        "rate": Named.of([config.train.optimizer.rate.peak], "one"),
        "tokens_per_second": Named.of(
            [run.timing["steps_per_second"] * in_a_step * config.train.seeds], "one"
        ),
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


def _maps(lab: Lab) -> Arrays:
    """The first layer of two softmax layers, mean over validation text: a block beside the diagonal."""
    run, _ = trained(lab, "lm-2-softmax")
    return {"maps": Named.of(run.result["maps"], "head", "row", "column")}


# Panels.


def _over_training(result: Result, lines: list[tuple[str, str, str, float]]) -> list[Panel]:
    """By tokens read, by token, by part and by rate; `lines` are name, label, kind and shade of models."""
    lines = [line for line in lines if f"{line[0]}_final_loss" in result]
    if not lines:
        return []

    def drawn(what: str, x: Callable, y: Callable, **style) -> tuple[Line, ...]:
        return tuple(
            Line(label=label, x=x(name), y=y(name), kind=kind, shade=shade,
                 origin=result.origin[f"{name}_{what}"], **style)
            for name, label, kind, shade in lines
        )  # fmt: skip

    def of(what: str) -> Callable[[str], np.ndarray]:
        return lambda name: result[f"{name}_{what}"]

    def read(name: str) -> np.ndarray:
        return result[f"{name}_tokens"][1:] / 1e6

    def tried(name: str) -> np.ndarray:
        return np.where(np.isfinite(of("rates")(name)[1:]), of("rates")(name)[1:], np.nan)

    early, late = (int(t) for t in result[f"{lines[0][0]}_at"])
    parts = bytes(result[f"{lines[0][0]}_parts_names"].astype(np.uint8)).decode().split("\n")
    numbers = np.arange(len(parts))
    xlabel, perplexity = "million tokens read", "validation perplexity"
    panels: list[Panel] = [
        Curves(letter="A", title="perplexity", xlabel=xlabel, ylabel=perplexity, log_y=True,
               lines=drawn("loss", read, lambda name: np.exp(of("loss")(name)[:, 1:]))),
        Curves(letter="B", title="in-context score", xlabel=xlabel, ylabel=f"loss at token {late} minus token {early}",
               lines=drawn("in_context", read, lambda name: of("in_context")(name)[:, 1:])),
        Curves(letter="C", title="trained models", xlabel="token", ylabel="loss (mean of 16 tokens around)", log_x=True,
               lines=drawn("by_position", lambda name: np.arange(1, of("by_position")(name).shape[-1] + 1),
                           lambda name: _smooth(of("by_position")(name)))),
        Curves(letter="D", title="perplexity in training", xlabel=xlabel, ylabel="training perplexity", log_y=True,
               lines=drawn("train_loss", read, lambda name: np.exp(of("train_loss")(name)[:, 1:]))),
        Curves(letter="E", title="perplexity by part of the corpus", xlabel="", ylabel=perplexity, log_y=True,
               x_ticks=dict(zip(numbers.astype(float).tolist(), parts, strict=True)),
               lines=drawn("parts_loss", lambda name: numbers, lambda name: np.exp(of("parts_loss")(name)),
                           markers=True)),
    ]  # fmt: skip
    if any(np.isfinite(tried(name)).any() for name, *_ in lines):  # else there was no search
        panels.append(
            Curves(letter="F", title="search for a learning rate", xlabel="largest learning rate", log_x=True,
                   ylabel="loss after a tenth of the training",
                   lines=drawn("rates", lambda name: of("rates")(name)[0], tried, markers=True))
        )  # fmt: skip
    return panels


def _smooth(loss: Float[np.ndarray, "seed time"], width: int = 16) -> Float[np.ndarray, "seed time"]:
    """The mean over neighbours, fewer at the ends."""
    kernel = np.ones(min(width, loss.shape[-1]))
    count = np.convolve(np.ones(loss.shape[-1]), kernel, "same")
    return np.stack([np.convolve(row, kernel, "same") / count for row in loss])


def key_shift_panels(result: Result) -> list[Panel]:
    """A and B as in the paper."""
    lines = [("softmax", "softmax", "softmax", 1.0)]
    for mixer in ("linear", "mesa"):
        lines += [(f"{mixer}-nu{nu}", f"{mixer}, ν = {nu}", mixer, (1 + nu) / len(NUS)) for nu in NUS]
    return _over_training(result, lines)


def layers_panels(result: Result) -> list[Panel]:
    """The same, by mixer."""
    return _over_training(result, [(mixer, mixer, COLORS[mixer], 1.0) for mixer in MIXERS])


def attention_panels(result: Result) -> list[Panel]:
    """Maps of one model; how far back the heads of all models look."""
    panels: list[Panel] = []
    if "maps" in result:
        panels.append(
            Maps(letter="A", title="two softmax layers: attention of the first, mean over text",
                 maps={f"head {i}": values for i, values in enumerate(result["maps"])}, xlabel="attended token",
                 ylabel="token", origin=result.origin["maps"])
        )  # fmt: skip
    for letter, depth in zip("BC", LAYERS, strict=True):
        lines = []
        for mixer in COMPARED:
            if f"{depth}-{mixer}_offsets" not in result:
                continue
            mass = result[f"{depth}-{mixer}_offsets"]
            # The head that looks most at one earlier token, by seed.
            chosen = mass[np.arange(len(mass)), mass[..., 1:].max(-1).argmax(-1)]
            lines.append(
                Line(label=mixer, x=np.arange(mass.shape[-1]), y=chosen, kind=COLORS[mixer],
                     origin=result.origin[f"{depth}-{mixer}_offsets"])
            )  # fmt: skip
        if lines:
            panels.append(
                Curves(letter=letter, title=f"{depth} layers: the clearest head of the first", xlabel="tokens back",
                       ylabel="part of its attention", lines=tuple(lines))
            )  # fmt: skip
    return panels


# Claims.


def less(what: str, ours: np.ndarray, theirs: np.ndarray) -> tuple[Check, Check]:
    """One is lower than the other, and the interval over seeds, which saw the same text, leaves zero out."""
    difference = Check(what=what, values=ours - theirs, at_most=0.0)
    interval = difference.interval()
    upper = np.array([np.nan if interval is None else interval[1]])
    return difference, Check(what="upper end of its 95% interval over seeds", values=upper, at_most=0.0)


def _there(result: Result, *names: str) -> bool:
    return all(f"{name}_final_loss" in result for name in names)


def _beats_linear(
    result: Result, claim: Callable[..., Claim], suffix: str, where: str, pairs: list[tuple[str, str, str]]
) -> Iterator[Claim]:
    """lm-1 and lm-2 for one configuration; `pairs` are names of mesa and linear models, and what to add."""
    for number, array, panel, text in (
        ("1", "final_loss", "A", "perplexity"),
        ("2", "final_in_context", "B", "in-context score"),
        ("2-smooth", "final_in_context_smooth", "B", SMOOTH),
    ):
        what = "log perplexity" if number == "1" else text
        there = [pair for pair in pairs if _there(result, *pair[:2])]
        checks = tuple(
            check
            for mesa, linear, note in there
            for check in less(
                f"{what} of mesa minus that of linear{note}",
                result[f"{mesa}_{array}"],
                result[f"{linear}_{array}"],
            )
        )
        if checks:
            yield claim(
                id=f"lm-{number}{suffix}", panel=panel, checks=checks,
                claim=f"{where}: mesa-layers have a lower {text} than linear attention",
                missing=tuple(pair[2].removeprefix(", ") for pair in pairs if pair not in there),
            )  # fmt: skip


def key_shift_claims(result: Result) -> list[Claim]:
    """lm-1, lm-2 for every ν; lm-3 and lm-6."""
    claim = partial(Claim, figure="lm-keyshift", source=SOURCE, seeds=SEEDS)
    pairs = [(f"mesa-nu{nu}", f"linear-nu{nu}", f", ν = {nu}") for nu in NUS]
    found = list(_beats_linear(result, claim, "", "shifted keys", pairs))
    compared = {mixer: _there(result, f"{mixer}-nu3", f"{mixer}-nu0") for mixer in ("mesa", "linear")}
    helped = tuple(
        Check(what=f"{mixer}: perplexity with ν = 3 over that without features",
              values=np.exp(result[f"{mixer}-nu3_final_loss"] - result[f"{mixer}-nu0_final_loss"]), at_most=1.0)
        for mixer, there in compared.items() if there
    )  # fmt: skip
    if helped:
        text = "features of higher order (DPFP) help linear attention and mesa-layers"
        missing = tuple(mixer for mixer, there in compared.items() if not there)
        found.append(claim(id="lm-3", panel="A", claim=text, checks=helped, missing=missing))
    if _there(result, "mesa-nu3", "softmax"):
        for number, array, text in (
            ("6", "final_in_context", "in-context score"),
            ("6-smooth", "final_in_context_smooth", SMOOTH),
        ):
            ratio = result[f"mesa-nu3_{array}"] / result[f"softmax_{array}"]
            what = "|score of mesa, ν = 3, over that of softmax - 1|"
            found.append(
                claim(id=f"lm-{number}", panel="B", claim=f"with shifted keys a mesa-layer's {text} is that of softmax",
                      checks=(Check(what=what, values=np.abs(ratio - 1), at_most=0.1),))
            )  # fmt: skip
    return found


def layers_claims(result: Result, figure: str, depth: str) -> list[Claim]:
    """lm-1, lm-2; lm-4 for two layers, lm-5 for four."""
    claim = partial(Claim, figure=figure, source=SOURCE, seeds=SEEDS)
    suffix, where = f"-{depth}-layers", f"{depth} layers"
    found = list(_beats_linear(result, claim, suffix, where, [("mesa", "linear", "")]))
    if depth == "two" and _there(result, "mesa", "softmax"):
        ratio = np.exp(result["mesa_final_loss"] - result["softmax_final_loss"])
        found.append(
            claim(
                id="lm-4", panel="A", claim="two layers: mesa is about as good as softmax",
                checks=(
                    Check(what="|perplexity of mesa over that of softmax - 1|", values=np.abs(ratio - 1), at_most=0.03),
                ),
            )
        )  # fmt: skip
    if depth == "four" and _there(result, *COMPARED):
        softmax, linear, mesa = (result[f"{mixer}_final_loss"] for mixer in COMPARED)
        found.append(
            claim(
                id="lm-5", panel="A",
                claim="four layers with MLPs: mesa is between linear attention and softmax, or better",
                checks=(
                    Check(what="perplexity of mesa over the higher one of linear attention and softmax",
                          values=np.exp(mesa - np.maximum(linear, softmax)), at_most=1.0),
                ),
            )
        )  # fmt: skip
    return found


def attention_claims(result: Result) -> list[Claim]:
    """lm-7, for all models."""
    checks, missing = [], []
    for depth in LAYERS:
        for mixer in COMPARED:
            if f"{depth}-{mixer}_offsets" not in result:
                missing.append(f"{depth} layers, {mixer}")
                continue
            mass = result[f"{depth}-{mixer}_offsets"][..., 1:].max((-1, -2))
            what = f"{depth} layers, {mixer}: largest part of a head's attention on one earlier token"
            checks.append(Check(what=what, values=mass, at_least=0.5))
    if not checks:
        return []
    return [
        Claim(
            id="lm-7", figure="lm-attention", panel="A, B, C", source=SOURCE, checks=tuple(checks), seeds=SEEDS,
            claim="the first softmax layer of all models has heads that copy the token at a fixed distance",
            missing=tuple(missing),
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
        in_parts=True,
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
        in_parts=True,
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
            "maps": _maps,
            **{
                f"{depth}-{mixer}": partial(_copying, preset=f"lm-{count}-{mixer}", name=f"{depth}-{mixer}")
                for depth, count in LAYERS.items()
                for mixer in COMPARED
            },
        },
        panels=attention_panels,
        claims=attention_claims,
        needs_text=True,
        in_parts=True,
    ),
}
