"""Few-shot regression by models trained to predict sequences: figure 8, and the same for the hybrid model."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mesascope.analysis.few_shot import (
    Curve,
    Vectors,
    control_curve,
    early_ascent,
    regression_curve,
    tune_eos,
    tune_prefix,
)
from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.common import EVALUATION, LAM, TUNING, final
from mesascope.experiments.lab import Lab, Trained
from mesascope.experiments.panels import Curves, Line, Panel
from mesascope.experiments.results import Arrays, Named, Result
from mesascope.presets import Variant
from mesascope.tasks.few_shot import FewShot
from mesascope.theory.solvers import NewtonSchulz, Ridge

PREFIX = 20
SHOWN = 68
"""Pairs of one task that every kind of prompt has room for."""
SWITCH = 80
"""Where the second task begins, so that there is room for a prefix and for the pairs of `BOTH` in every prompt."""
BOTH = (20, 40)
"""Pairs shown of the first and of the second task. (Prompts without a prefix have seen more of the first by then.)"""
PROMPTS = ("base", "eos", "prefix")
CONTROLS = ("least_squares", "newton_schulz", "true_pairs")


def tasks(variant: Variant = "as_run", **changes) -> dict[str, FewShot]:
    """Prompts of pairs alone, with EOS after each, and with a prefix as well."""
    return {
        "base": FewShot.preset(variant, **changes),
        "eos": FewShot.preset(variant, eos=True, **changes),
        "prefix": FewShot.preset(variant, eos=True, prefix=PREFIX, **changes),
    }


def prompted(name: str) -> Callable[[Lab], Arrays]:
    """EOS and prefix tuned for models that are frozen, and errors by pair with and without them."""

    def piece(lab: Lab) -> Arrays:
        trained = lab.trained(name)
        found = lab.tuned(f"prompt_{trained.config.name}", partial(_tuned, lab, trained), by_seed=True)
        eos, prefix = found["eos"], found["prefix"]
        end, begin = jnp.asarray(eos), jnp.asarray(prefix)
        vectors = {"base": Vectors(), "eos": Vectors(eos=end), "prefix": Vectors(eos=end, prefix=begin)}
        arrays = {
            "eos_vector": Named.of(eos, "seed", "entry"),
            "prefix_vectors": Named.of(prefix, "seed", "number", "entry"),
        }
        run = partial(regression_curve, trained.models, **_sizes(_sequences(lab)))
        for prompt, task in tasks(lab.variant).items():
            curve = run(task, vectors=vectors[prompt])
            arrays[prompt] = Named.of(_by_pair(curve), "seed", "pair")
            arrays[f"{prompt}_rise"] = Named.of(_rise(curve), "seed", "end")
        for prompt, task in tasks(lab.variant, switch=SWITCH).items():
            arrays[f"two_{prompt}"] = Named.of(_by_pair(run(task, vectors=vectors[prompt])), "seed", "pair")
        return arrays

    return piece


def controls(lab: Lab) -> Arrays:
    """Least squares: on all pairs of tokens, by six steps of Newton's iteration as released, on true pairs only."""
    return dict(_controls(lab.variant, _sequences(lab)))


@cache
def _controls(variant: Variant, sequences: int) -> Arrays:
    """The same for both figures."""
    arrays: Arrays = {}
    for name, run in {
        "least_squares": partial(control_curve, Ridge(LAM)),
        "newton_schulz": partial(control_curve, NewtonSchulz(LAM), newest_pair=False),
        "true_pairs": partial(control_curve, Ridge(LAM), true_pairs_only=True),
    }.items():
        both = tasks(variant), tasks(variant, switch=SWITCH)
        one, two = (run(task["base"], **_sizes(sequences)) for task in both)
        arrays[name] = Named.of(_by_pair(one)[0], "pair")
        arrays[f"{name}_rise"] = Named.of(_rise(one)[0], "end")
        arrays[f"two_{name}"] = Named.of(_by_pair(two)[0], "pair")
    return arrays


def _sequences(lab: Lab) -> int:
    """224 tokens are many for a processor: a quarter, where models are trained on one. (Intervals over sequences must
    not depend on whether models are trained or released.)"""
    return lab.scale.sequences // (4 if lab.scale.name == "quick" else 1)


def _sizes(sequences: int) -> dict:
    return dict(sequences=sequences, batch_size=min(128, sequences), key=jax.random.key(EVALUATION))


def _tuned(lab: Lab, trained: Trained) -> dict[str, Any]:
    """EOS first, then the prefix before it, both on single tasks."""
    steps, key = lab.scale.prompt_steps, jax.random.key(TUNING)
    few: dict[str, Any] = dict(batch_size=4) if lab.scale.name == "smoke" else {}
    one = tasks(lab.variant)
    eos = tune_eos(trained.models, one["eos"], steps=steps, key=key, **few).vectors.eos
    assert eos is not None
    lab.check_time()
    found = tune_prefix(trained.models, one["prefix"], eos=eos, steps=steps, key=key, **few)
    return {"eos": eos, "prefix": found.vectors.prefix}


def _by_pair(curve: Curve) -> Float[np.ndarray, "seed pair"]:
    """Mean over sequences: of one task `SHOWN` pairs, of two those of `BOTH`, one after the other."""
    losses = curve.losses.mean(1)
    counts = (SHOWN,) if curve.task.max() == 0 else BOTH
    return np.concatenate([losses[:, curve.task == i][:, :n] for i, n in enumerate(counts)], 1)


def _rise(curve: Curve, normal: float = 1.96) -> Float[np.ndarray, "seed 3"]:
    """From the first pair to the peak of each model: lower end of the 95% interval over sequences, mean, upper end.

    Where the peak is, the first half of the sequences says; how high it is, the second.
    """
    peaks = early_ascent(curve).seed_pair
    later = curve.losses[:, curve.losses.shape[1] // 2 :]
    difference = np.stack([own[:, p - 1] - own[:, 0] for own, p in zip(later, peaks, strict=True)])
    mean = difference.mean(1)
    half = normal * difference.std(1, ddof=1) / np.sqrt(difference.shape[1])
    return np.stack([mean - half, mean, mean + half], -1)


def panels(result: Result, kind: str, name: str) -> list[Panel]:
    """A: one task. B: two in a row."""

    def curves(letter: str, title: str, before: str) -> Curves:
        def line(array: str, label: str, kind: str, shade: float = 1.0, *, dashed: bool = False) -> Line:
            array = before + array
            y = np.atleast_2d(result[array])
            return Line(label=label, x=np.arange(1, y.shape[-1] + 1), y=y, kind=kind, shade=shade, dashed=dashed,
                        origin=result.origin[array])  # fmt: skip

        return Curves(
            letter=letter, title=title, xlabel="pair", ylabel="loss",
            # Exact least squares on as many pairs as it has dimensions has errors far off the scale.
            y_max=1.2 * max(float(np.mean(result[before + p], 0).max()) for p in PROMPTS),
            lines=(
                line("base", name, kind, 0.2),
                line("eos", "with EOS tuned", kind, 0.55),
                line("prefix", "with EOS and prefix tuned", kind),
                line("least_squares", "least squares, all pairs of tokens", "theory"),
                line("newton_schulz", "six Newton–Schulz steps (as released)", "control", dashed=True),
                line("true_pairs", "least squares, true pairs only", "features", dashed=True),
            ),
        )  # fmt: skip

    return [
        curves("A", "a regression task in context", ""),
        curves("B", f"{BOTH[0]} pairs of one task, {BOTH[1]} of another", "two_"),
    ]


def claims(result: Result, figure: str, source: str, ids: tuple[str, str, str, str, str]) -> list[Claim]:
    """The paper's; `ids` for loss falls, early ascent, EOS, prefix, second task."""
    claim = partial(Claim, figure=figure, source=source)
    base, eos, prefix = (result[prompt] for prompt in PROMPTS)
    early, late = slice(1, 10), slice(-10, None)

    def rises(what: str, rise: np.ndarray) -> Check:
        return Check(what=f"lower end of the rise of {what} from the first pair to the peak",
                     values=np.atleast_2d(rise)[:, 0], at_least=0.0)  # fmt: skip

    flat = Check(what="lower end of that of least squares on true pairs",
                 values=result["true_pairs_rise"][None, 0], at_most=0.0)  # fmt: skip
    found = [
        claim(
            id=ids[0], panel="A", claim="the error falls with the examples shown",
            checks=(Check(what="loss of the last pair over the largest", values=base[:, -1] / base.max(-1),
                          at_most=0.6),),
        ),
        claim(
            id=ids[1], panel="A",
            claim="errors first rise, as they do for least squares on all pairs of tokens and not on the true ones",
            checks=(rises("the loss", result["base_rise"]),
                    rises("least squares on all pairs", result["least_squares_rise"]), flat),
        ),
        claim(
            id=f"{ids[1]}-as-run", panel="A", claim="the same beside least squares as released",
            checks=(rises("the loss", result["base_rise"]),
                    rises("six Newton–Schulz steps", result["newton_schulz_rise"]), flat),
        ),
        claim(
            id=ids[2], panel="A", claim="tuning the token between pairs helps",
            checks=(Check(what="loss with EOS over that without, last 10 pairs",
                          values=final(eos[:, late]) / final(base[:, late]), at_most=0.9),),
        ),
        claim(
            id=ids[3], panel="A", claim="a tuned prefix helps early",
            checks=(Check(what="loss with prefix and EOS over that with EOS, pairs 2 to 10",
                          values=final(prefix[:, early]) / final(eos[:, early]), at_most=0.95),),
        ),
    ]  # fmt: skip
    for suffix, prompt, note in (
        ("", "base", ""),
        ("-eos", "eos", ", with EOS tuned"),
        ("-prefix", "prefix", ", with EOS and prefix tuned"),
    ):
        second = result[f"two_{prompt}"][:, BOTH[0] :]
        found.append(
            claim(
                id=ids[4] + suffix, panel="B", claim="a second task is learned in context" + note,
                checks=(Check(what="loss of task 2, last 10 pairs over first 5",
                              values=final(second[:, late]) / final(second[:, :5]), at_most=0.7),),
            )
        )  # fmt: skip
    return found


def _experiment(
    figure: str, name: str, kind: str, source: str, ids: tuple[str, str, str, str, str]
) -> Experiment:
    models = "Seven softmax layers" if kind == "softmax" else "A softmax and a mesa-layer"
    return Experiment(
        id=figure,
        shows=f"{name} learns regression from examples in its context",
        says=(
            f"{models} trained to predict sequences solve regression tasks that are shown to them as pairs of "
            "input and label, without further training. Errors first rise, as for least squares fitted to all pairs of "
            "neighboring tokens, of which every second is no example. A tuned token between pairs and a tuned prefix "
            "help. A second task after the first is learned too."
        ),
        pieces={"prompted": prompted(f"icl-{name}"), "controls": controls},
        panels=partial(panels, kind=kind, name=name),
        claims=partial(claims, figure=figure, source=source, ids=ids),
    )


EXPERIMENTS = {
    "fig8": _experiment(
        "fig8", "softmax-7", "softmax", "Fig. 8", ("fig8a-1", "fig8a-2", "fig8a-3", "fig8a-4", "fig8b-1")
    ),
    "si-icl-mesa": _experiment(
        "si-icl-mesa",
        "hybrid-mesa",
        "mesa",
        "SI, few-shot learning of the hybrid model",
        ("si-icl-mesa-1", "si-icl-mesa-2", "si-icl-mesa-3", "si-icl-mesa-4", "si-icl-mesa-5"),
    ),
}
