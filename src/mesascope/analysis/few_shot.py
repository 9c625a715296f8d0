r"""How well a sequence model does regression that it is shown in its context.

Prompts are $[x_1, y_1, x_2, y_2, \dots]$ (`mesascope.tasks.FewShot`), and what is measured is the error at each $x_i$,

$$\mathcal L_i = \mathbb E\,\tfrac12\lVert y_i - f(x_1, y_1, \dots, x_i)\rVert^2 .$$

A model needs to be no more than a function from tokens to predictions. It stays as it is; an EOS token after every pair
and a prefix before them may be tuned for it. Controls read the same sequences: least squares, as in an autoregressive
learner, on all pairs of consecutive tokens, of which every second, $(y_i, x_{i+1})$, is spurious.

    task = FewShot.preset(eos=True)
    eos = tune_eos(Transformer.__call__, models, task, key=key)
    curve = regression_curve(Transformer.__call__, models, task, vectors=eos, key=key)
    early_ascent(curve)
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from mesascope.analysis.intervals import Interval, Predict, canvas, draw_curve, interval, seeds_of
from mesascope.tasks.few_shot import FewShot, Regression
from mesascope.theory import solvers
from mesascope.training import half_squared_errors, optimize


class Vectors(NamedTuple):
    """What is put between and before the pairs, for each model; None where a prompt has none."""

    eos: Float[Array, "seed obs"] | None = None
    prefix: Float[Array, "seed prefix obs"] | None = None


@dataclass(frozen=True)
class Curve:
    """Errors at the inputs of a prompt. Axes: `axes`.

    Attributes:
        losses: ½‖error‖².
        pair: which pair of its task, from 1 on.
        task: 0, or 1 from where the second task begins.
    """

    losses: Float[np.ndarray, "seed sequence pair"]
    pair: Int[np.ndarray, " pair"]
    task: Int[np.ndarray, " pair"]
    axes: tuple[str, ...] = ("seed", "sequence", "pair")

    @property
    def loss(self) -> Interval:
        """Mean over models and sequences, by pair."""
        return interval(self.losses)

    def plot(self, axes: Any = None, **style: Any) -> Any:
        """Errors over pairs seen; tasks one after the other."""
        axes = canvas(axes)
        draw_curve(axes, np.arange(1, len(self.pair) + 1), self.loss, **style)
        for switch in np.flatnonzero(np.diff(self.task)):
            axes.axvline(switch + 1.5, color="black", linewidth=0.5)
        axes.set_xlabel("pair")
        axes.set_ylabel("loss")
        return axes


def regression_curve(
    predict: Predict,
    models: PyTree,
    task: FewShot,
    *,
    vectors: Vectors | None = None,
    sequences: int = 512,
    batch_size: int = 128,
    key: PRNGKeyArray,
) -> Curve:
    """Errors of models that are shown a task's prompts.

    Args:
        predict: `predict(model, tokens)`, predictions after every token.
        models: arrays with a seed axis first.
        task: prompts, with EOS, prefix or a second task or without.
        vectors: for EOS and prefix, if the prompts have them.
        key: of the sequences; the same key and distribution give the same pairs, whatever stands between them.
    """
    vectors = _checked(task, Vectors() if vectors is None else vectors, seeds_of(models))

    @jax.jit
    def batch(key: PRNGKeyArray) -> Array:
        regression = _pairs(task, key, batch_size)
        return _losses(predict, models, task, regression, vectors)

    losses = [np.asarray(batch(k)) for k in jax.random.split(key, -(-sequences // batch_size))]
    return _curve(task, np.concatenate(losses, 1)[:, :sequences])


def control_curve(
    algorithm: solvers.Algorithm,
    task: FewShot,
    *,
    true_pairs_only: bool = False,
    newest_pair: bool = True,
    sequences: int = 512,
    batch_size: int = 128,
    key: PRNGKeyArray,
) -> Curve:
    """Errors of an in-context algorithm on the same sequences as those of `regression_curve` with the same key.

    Args:
        algorithm: of `theory.solvers`, such as `Ridge(1000.0)` or `NewtonSchulz(1000.0)`.
        task: its EOS and prefix are left out; the pairs are those that it has with them.
        true_pairs_only, newest_pair: as in `solvers.few_shot`.
    """
    bare = dataclasses.replace(task, eos=False, prefix=0)

    @jax.jit
    def batch(key: PRNGKeyArray) -> Array:
        prompt = bare.prompt(_pairs(bare, key, batch_size))
        context = solvers.few_shot(
            prompt, bare.layout, true_pairs_only=true_pairs_only, newest_pair=newest_pair
        )
        return half_squared_errors(algorithm(context), prompt.targets)[:, bare.layout.predicts]

    losses = [np.asarray(batch(k)) for k in jax.random.split(key, -(-sequences // batch_size))]
    return _curve(bare, np.concatenate(losses)[None, :sequences])


def controls(
    task: FewShot, *, lam: float = 1000.0, sequences: int = 512, batch_size: int = 128, key: PRNGKeyArray
) -> dict[str, Curve]:
    """The usual ones: exact least squares, six steps of Newton's iteration for it (what the released code draws as
    least squares), and least squares that is told which pairs are true."""
    run = partial(control_curve, task=task, sequences=sequences, batch_size=batch_size, key=key)
    return {
        "least squares": run(solvers.Ridge(lam)),
        "Newton–Schulz": run(solvers.NewtonSchulz(lam), newest_pair=False),
        "least squares, true pairs": run(solvers.Ridge(lam), true_pairs_only=True),
    }


@dataclass(frozen=True)
class Ascent:
    """Whether errors first rise.

    Attributes:
        pair: where the error is largest, on the first half of the sequences.
        rise: the error there less that of the first pair, on the second half.
        seed_pair, seed_rise: the same for every model by itself, over sequences only.
    """

    pair: int
    rise: Interval
    seed_pair: Int[np.ndarray, " seed"]
    seed_rise: Interval
    axes: tuple[str, ...] = ("seed",)

    @property
    def present(self) -> bool:
        """The interval lies above zero."""
        return bool(self.rise.low > 0)

    def plot(self, axes: Any = None) -> Any:
        """The rise of every model."""
        axes = canvas(axes)
        rise = self.seed_rise
        errors = np.stack([rise.mean - rise.low, rise.high - rise.mean])
        axes.errorbar(range(len(rise.mean)), rise.mean, yerr=errors, fmt="o")
        axes.axhline(0, color="black", linewidth=0.5)
        axes.set_xlabel("seed")
        axes.set_ylabel("rise of the loss")
        return axes


def early_ascent(curve: Curve, *, within: int = 20, level: float = 0.98) -> Ascent:
    """The rise of the error from the first pair of the first task to its highest point.

    The highest point of a noisy curve is above the first by luck alone, so the two halves of the sequences share the
    work: one says where, the other how much.

    Args:
        within: so many pairs are early.
        level: of the intervals; with 0.98, one in a hundred curves that do not rise is said to.
    """
    if curve.losses.shape[1] < 4 or within < 2:
        raise ValueError(
            f"expected at least 4 sequences and 2 pairs, got {curve.losses.shape[1]} and {within}."
        )
    early = curve.losses[..., curve.task == 0][..., :within]
    half = early.shape[1] // 2
    where, measured = early[:, :half].mean(1), early[:, half:]
    peak = 1 + int(np.argmax(where.mean(0)[1:]))
    rise = interval(measured[..., peak] - measured[..., 0], level=level)
    own = 1 + np.argmax(where[:, 1:], 1)
    by_seed = [interval((m[:, p] - m[:, 0])[None], level=level) for m, p in zip(measured, own, strict=True)]
    return Ascent(peak + 1, rise, own + 1, Interval(*(np.stack(part) for part in zip(*by_seed, strict=True))))


@dataclass(frozen=True)
class Tuned:
    """Vectors tuned for every model, and the loss before each step (mean over models)."""

    vectors: Vectors
    losses: Float[np.ndarray, " step"]
    axes: tuple[str, ...] = ("seed",)

    def plot(self, axes: Any = None) -> Any:
        """The loss over tuning steps."""
        axes = canvas(axes)
        axes.plot(self.losses)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        return axes


def tune_eos(
    predict: Predict,
    models: PyTree,
    task: FewShot,
    *,
    steps: int = 5000,
    rate: float = 1e-3,
    batch_size: int = 64,
    key: PRNGKeyArray,
) -> Tuned:
    """Tune the EOS token by Adam on the regression loss; the models are frozen.

    Args:
        task: one task, with EOS and without a prefix.
        key: of the start, which is standard normal, and of the sequences.
    """
    if not task.eos or task.prefix:
        raise ValueError(f"task: expected prompts with EOS and without a prefix, got {task}.")
    return _tune(predict, models, task, Vectors(), steps, rate, batch_size, key)


def tune_prefix(
    predict: Predict,
    models: PyTree,
    task: FewShot,
    *,
    eos: Float[Array, "seed obs"] | None = None,
    steps: int = 5000,
    rate: float = 1e-3,
    batch_size: int = 128,
    key: PRNGKeyArray,
) -> Tuned:
    """Tune the prefix, as `tune_eos` does with EOS.

    Args:
        task: one task, with a prefix (the paper's has 20 tokens).
        eos: tuned before and kept, where the prompts have EOS.
    """
    if not task.prefix or task.eos != (eos is not None):
        raise ValueError(
            f"task: expected prompts with a prefix, and `eos` where they have EOS, got {task} and "
            f"{'no ' if eos is None else ''}eos."
        )
    return _tune(predict, models, task, Vectors(eos=eos), steps, rate, batch_size, key)


def _tune(
    predict: Predict, models: PyTree, task: FewShot, fixed: Vectors, steps: int, rate: float, batch_size: int,
    key: PRNGKeyArray,
) -> Tuned:  # fmt: skip
    seeds = seeds_of(models)
    start_key, data_key = jax.random.split(key)
    what = "prefix" if task.prefix else "eos"
    shape = (seeds, task.prefix, task.dim) if task.prefix else (seeds, task.dim)
    start = jax.random.normal(start_key, shape, jnp.float32)

    def loss(vector: Array, regression: Regression) -> Array:
        # A sum over models: Adam works entry by entry, so that each is tuned as if alone.
        losses = _losses(predict, models, task, regression, fixed._replace(**{what: vector}))
        return jnp.sum(jnp.mean(losses, (1, 2)))

    with jax.numpy_dtype_promotion("standard"):
        tuned, losses = optimize(
            loss, start, lambda key: _pairs(task, key, batch_size),
            steps=steps, optimizer=optax.adam(rate), key=data_key,
        )  # fmt: skip
    return Tuned(fixed._replace(**{what: tuned}), np.asarray(losses) / seeds)


def plot_curves(curves: Mapping[str, Curve], axes: Any = None) -> Any:
    """Several curves, by name."""
    axes = canvas(axes)
    for name, curve in curves.items():
        curve.plot(axes, label=name)
    axes.legend()
    return axes


def _pairs(task: FewShot, key: PRNGKeyArray, batch_size: int) -> Regression:
    """As many pairs as the longest prompt could show, so that EOS and prefix do not change which are drawn."""
    bare = dataclasses.replace(task, eos=False, prefix=0)
    return bare.sample(key, batch_size)


def _losses(
    predict: Predict, models: PyTree, task: FewShot, regression: Regression, vectors: Vectors
) -> Float[Array, "seed batch pair"]:
    def one(model: PyTree, vectors: Vectors) -> Array:
        prompt = task.prompt(regression, eos=vectors.eos, prefix=vectors.prefix)
        predictions = predict(model, prompt.tokens)
        if predictions.shape[:-1] != prompt.targets.shape[:-1] or predictions.shape[-1] < task.dim:
            raise ValueError(
                f"predict: expected predictions for every token, [..., {task.length}, at least {task.dim}], got "
                f"shape {predictions.shape}."
            )
        return half_squared_errors(predictions, prompt.targets)[:, task.layout.predicts]

    return jax.vmap(one)(models, vectors)


def _checked(task: FewShot, vectors: Vectors, seeds: int) -> Vectors:
    for name, vector, needed in (
        ("eos", vectors.eos, task.eos),
        ("prefix", vectors.prefix, task.prefix > 0),
    ):
        if (vector is not None) != needed:
            raise ValueError(
                f"vectors.{name}: the prompts have {'one' if needed else 'none'}, got "
                f"{'none' if vector is None else 'one'}."
            )
        if vector is not None and vector.shape[0] != seeds:
            raise ValueError(
                f"vectors.{name}: tuned for {vector.shape[0]} models, but there are {seeds}: the seeds do not match."
            )
    return vectors


def _curve(task: FewShot, losses: np.ndarray) -> Curve:
    predicts = task.layout.predicts
    return Curve(losses, task.layout.number[predicts] + 1, task.layout.task[predicts])
