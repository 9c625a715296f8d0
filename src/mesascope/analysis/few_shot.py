r"""How well a sequence model does regression that it is shown in its context.

Prompts are $[x_1, y_1, x_2, y_2, \dots]$ (`mesascope.tasks.FewShot`), and what is measured is the error at each $x_i$,

$$\mathcal L_i = \mathbb E\,\tfrac12\lVert y_i - f(x_1, y_1, \dots, x_i)\rVert^2 .$$

A model needs to be no more than a function from tokens to predictions. It stays as it is; an EOS token after every pair
and a prefix before them may be tuned for it. Controls read the same sequences: least squares, as in an autoregressive
learner, on all pairs of consecutive tokens, of which every second, $(y_i, x_{i+1})$, is spurious.

    task = FewShot.preset(eos=True)
    tuned = tune_eos(models, task, key=key)
    curve = regression_curve(models, task, vectors=tuned.vectors, key=key)
    early_ascent(curve)
    gain(regression_curve(models, FewShot.preset(), key=key), curve)
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from mesascope.analysis.results import (
    Estimate,
    Predict,
    Result,
    draw_curve,
    draw_points,
    drawing,
    rows_size,
    seeds_of,
)
from mesascope.models import Transformer
from mesascope.tasks.few_shot import FewShot, Regression
from mesascope.theory import solvers
from mesascope.training import half_squared_errors, optimize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW = 8
"""Prompts at a time."""


class Vectors(NamedTuple):
    """What is put between and before the pairs, for each model; None where a prompt has none."""

    eos: Float[Array, "seed obs"] | None = None
    prefix: Float[Array, "seed prefix obs"] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve(Result):
    """Errors at the inputs of a prompt.

    Attributes:
        losses: ½‖error‖².
        pair: which pair of its task, from 1 on.
        task: 0, or 1 from where the second task begins.
    """

    losses: Float[np.ndarray, "seed sequence pair"]
    pair: Int[np.ndarray, " pair"]
    task: Int[np.ndarray, " pair"]

    @property
    def loss(self) -> Estimate:
        """By pair."""
        return Estimate.of(self.losses, "pair")

    def plot(self, *, ax: "Axes | None" = None, **style: Any) -> "Axes":
        """Errors over pairs seen; tasks one after the other."""
        with drawing(ax) as ax:
            draw_curve(ax, np.arange(1, len(self.pair) + 1), self.loss, **style)
            for switch in np.flatnonzero(np.diff(self.task)):
                ax.axvline(switch + 1.5, color="0.4", linewidth=0.8)
            ax.set(xlabel="pair", ylabel="loss")
            ax.set_ylim(bottom=0, auto=True)
        return ax


def regression_curve(
    models: PyTree,
    task: FewShot,
    *,
    predict: Predict = Transformer.__call__,
    vectors: Vectors | None = None,
    sequences: int = 512,
    batch_size: int = 128,
    key: PRNGKeyArray,
) -> Curve:
    """Errors of models that are shown a task's prompts.

    Args:
        models: with a seed axis.
        task: prompts, with EOS, prefix or a second task or without.
        predict: `predict(model, tokens)`, predictions after every token.
        vectors: for EOS and prefix, if the prompts have them.
        key: of the sequences; the same key and distribution give the same pairs, whatever stands between them.
    """
    vectors = _checked(task, Vectors() if vectors is None else vectors, seeds_of(models))

    @jax.jit
    def batch(key: PRNGKeyArray) -> Array:
        regression = _pairs(task, key, batch_size)
        few = partial(_few_at_a_time, predict)
        return jax.vmap(lambda model, own: _losses(model, task, few, regression, own))(models, vectors)

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Ascent(Result):
    """Whether errors first rise.

    Attributes:
        pair: where the error is largest, on the first half of the sequences.
        rise: on the second half, the error of each model less that of its first pair, at the pair where the error of
            the other models is largest on the first half.
        seed_pair, seed_rise: where, and by how much, for every model by itself, along the axis "model".
    """

    pair: int
    rise: Estimate
    seed_pair: Int[np.ndarray, " seed"]
    seed_rise: Estimate

    @property
    def present(self) -> bool:
        """Whether they do, whichever sequences and seeds had been drawn."""
        return bool(self.rise.above(0))

    def plot(self, *, ax: "Axes | None" = None) -> "Axes":
        """The rise of every model."""
        with drawing(ax, size=rows_size(len(self.seed_pair))) as ax:
            draw_points(ax, [f"seed {i}" for i in range(len(self.seed_pair))], self.seed_rise)
            ax.set_xlabel("loss at its highest less that of the first pair")
        return ax


def early_ascent(curve: Curve, *, within: int = 20) -> Ascent:
    """The rise of the error from the first pair of the first task to its highest point.

    The highest point of a noisy curve is above the first by luck alone, so the two halves of the sequences share the
    work: one says where, the other how much. And where there are several models, the others say where.

    Args:
        within: so many pairs are early.
    """
    early = curve.losses[..., curve.task == 0][..., :within]
    if early.shape[1] < 4 or early.shape[2] < 2:
        raise ValueError(
            f"curve: expected at least 4 sequences and 2 early pairs, got {early.shape[1]} and {early.shape[2]}."
        )
    half = early.shape[1] // 2
    where, measured = early[:, :half].mean(1), early[:, half:]

    def peak(curves: Float[np.ndarray, "*seed pair"]) -> Int[np.ndarray, "*seed"]:
        return 1 + np.argmax(curves[..., 1:], -1)

    def rises(at: Int[np.ndarray, " seed"]) -> Float[np.ndarray, "seed sequence"]:
        return np.stack([m[:, p] - m[:, 0] for m, p in zip(measured, at, strict=True)])

    own = peak(where)
    others = peak(where.sum(0) - where) if len(where) > 1 else own
    return Ascent(
        pair=int(peak(where.mean(0))) + 1,
        rise=Estimate.of(rises(others)),
        seed_pair=own + 1,
        seed_rise=Estimate.of(rises(own).T[None], "model"),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Gain(Result):
    """What a change of prompts does to errors, on the same pairs.

    Attributes:
        difference: loss after less loss before, by pair.
        total: mean over pairs.
    """

    difference: Estimate
    total: Estimate

    @property
    def helps(self) -> bool:
        """Whether errors are lower, whichever sequences and seeds had been drawn."""
        return bool(self.total.below(0))

    def plot(self, *, ax: "Axes | None" = None) -> "Axes":
        """The difference by pair."""
        with drawing(ax) as ax:
            ax.axhline(0, color="0.4", linewidth=0.8)
            draw_curve(ax, np.arange(1, self.difference.values.shape[-1] + 1), self.difference)
            ax.set(xlabel="pair", ylabel="loss after less loss before")
        return ax


def gain(before: Curve, after: Curve) -> Gain:
    """Compare two curves of the same models, made with the same key; pairs that only one of them has do not count.

    Raises:
        ValueError: curves of other seeds, sequences or tasks.
    """
    first, second = before.losses.shape[:2], after.losses.shape[:2]
    count = min(len(before.pair), len(after.pair))
    same = np.array_equal(before.pair[:count], after.pair[:count])
    if first != second or not same:
        raise ValueError(
            f"curves: expected the same seeds, sequences and tasks in both, got (seed, sequence) = {first} and "
            f"{second}{'' if same else ', and pairs numbered differently'}."
        )
    difference = after.losses[..., :count] - before.losses[..., :count]
    return Gain(difference=Estimate.of(difference, "pair"), total=Estimate.of(difference.mean(-1)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned(Result):
    """Vectors tuned for every model, and the loss before each step."""

    vectors: Vectors
    losses: Float[np.ndarray, "seed step"]

    def plot(self, *, ax: "Axes | None" = None) -> "Axes":
        """The loss over tuning steps."""
        with drawing(ax) as ax:
            steps = np.arange(self.losses.shape[1])
            draw_curve(ax, steps, Estimate.over_seeds(self.losses, "step"))
            ax.set(xlabel="step of tuning", ylabel="loss", ylim=(0, None))
        return ax


def tune_eos(
    models: PyTree,
    task: FewShot,
    *,
    predict: Predict = Transformer.__call__,
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
    return _tune(models, task, predict, Vectors(), steps, rate, batch_size, key)


def tune_prefix(
    models: PyTree,
    task: FewShot,
    *,
    predict: Predict = Transformer.__call__,
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
    return _tune(models, task, predict, Vectors(eos=eos), steps, rate, batch_size, key)


def _tune(
    models: PyTree, task: FewShot, predict: Predict, fixed: Vectors, steps: int, rate: float, batch_size: int,
    key: PRNGKeyArray,
) -> Tuned:  # fmt: skip
    seeds = seeds_of(models)
    start_key, data_key = jax.random.split(key)
    what = "prefix" if task.prefix else "eos"
    shape = (seeds, task.prefix, task.dim) if task.prefix else (seeds, task.dim)
    start = jax.random.normal(start_key, shape, jnp.float32)

    def one(model: PyTree, start: Array, fixed: Vectors) -> tuple[Array, Array]:
        def loss(vector: Array, regression: Regression) -> Array:
            return jnp.mean(_losses(model, task, predict, regression, fixed._replace(**{what: vector})))

        return optimize(
            loss, start, lambda key: _pairs(task, key, batch_size),
            steps=steps, optimizer=optax.adam(rate), key=data_key,
        )  # fmt: skip

    with jax.numpy_dtype_promotion("standard"):
        tuned, losses = jax.vmap(one)(models, start, fixed)
    return Tuned(vectors=fixed._replace(**{what: tuned}), losses=np.asarray(losses))


def plot_curves(curves: Mapping[str, Curve], *, ax: "Axes | None" = None) -> "Axes":
    """Several curves, by name. (Least squares with as many pairs as entries may err without bound: cut off.)"""
    with drawing(ax) as ax:
        for name, curve in curves.items():
            curve.plot(ax=ax, label=name)
        highest = 4 * max(curve.loss.mean[0] for curve in curves.values())
        ax.set_ylim(0, min(highest, ax.get_ylim()[1]))
        ax.legend()
    return ax


def _few_at_a_time(predict: Predict, model: PyTree, tokens: Array) -> Array:
    """The same, in 0.55 to 0.67 of the time on a CPU, whose caches hold the attention of a few prompts."""
    if jax.default_backend() != "cpu" or len(tokens) % FEW:
        return predict(model, tokens)
    parts = tokens.reshape(-1, FEW, *tokens.shape[1:])
    predictions = jax.lax.map(partial(predict, model), parts)
    return predictions.reshape(len(tokens), *predictions.shape[2:])


def _pairs(task: FewShot, key: PRNGKeyArray, batch_size: int) -> Regression:
    """As many pairs as the longest prompt could show, so that EOS and prefix do not change which are drawn."""
    bare = dataclasses.replace(task, eos=False, prefix=0)
    return bare.sample(key, batch_size)


def _losses(
    model: PyTree, task: FewShot, predict: Predict, regression: Regression, vectors: Vectors
) -> Float[Array, "batch pair"]:
    """Of one model, with its own vectors."""
    prompt = task.prompt(regression, eos=vectors.eos, prefix=vectors.prefix)
    predictions = predict(model, prompt.tokens)
    if predictions.shape[:-1] != prompt.targets.shape[:-1] or predictions.shape[-1] < task.dim:
        raise ValueError(
            f"predict: expected predictions for every token, [..., {task.length}, at least {task.dim}], got "
            f"shape {predictions.shape}."
        )
    return half_squared_errors(predictions, prompt.targets)[:, task.layout.predicts]


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
    return Curve(losses=losses, pair=task.layout.number[predicts] + 1, task=task.layout.task[predicts])
