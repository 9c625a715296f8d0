r"""Scores: how well a model learns in context, and whether its predictions are those of an algorithm.

The in-context learning score is the loss late in a sequence minus the loss early in it: negative for a model that
learns from what it reads. It needs losses only, so that it is the same for vectors and for words. Equal losses do not
make equal predictions; `distance` compares these,

$$d_t = \frac{\mathbb E\lVert f_t - g_t\rVert^2}{\mathbb E\lVert g_t\rVert^2},$$

next to the distance of a pair that should differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from mesascope.analysis.results import (
    Estimate,
    Result,
    Running,
    batches,
    draw_curve,
    drawing,
    relative_squares,
    unstack,
)
from mesascope.training import half_squared_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True, eq=False)
class InContext(Result):
    """Loss by position, and how much of it reading takes away.

    Attributes:
        loss: mean over sequences, with the axis "time".
        score: mean loss over the `late` positions minus that over the `early` ones.
        over_chance: mean loss over the `late` positions minus that of predictions which know nothing of the sequence.
        early: positions, as a slice of indices.
        late: likewise.
    """

    loss: Estimate
    score: Estimate
    over_chance: Estimate
    early: slice
    late: slice

    @property
    def learns(self) -> bool:
        """Whether losses fall, and below chance, whichever sequences and seeds had been drawn (99%).

        The score alone does not say so. Untrained attention averages more and more tokens and so comes to predict
        next to nothing; who fits noise errs most where pairs are few. Both gain nothing from reading.
        """
        return bool(self.score.below(0) & self.over_chance.below(0))

    def plot(self, *, ax: "Axes | None" = None, **style: Any) -> "Axes":
        """Loss by position."""
        with drawing(ax) as ax:
            time = np.arange(1, self.loss.values.shape[-1] + 1)
            draw_curve(ax, time, self.loss, **style)
            for part, shade, name in ((self.early, "0.8", "early"), (self.late, "0.6", "late")):
                inside = time[part]
                ax.axvspan(
                    inside[0] - 0.5,
                    inside[-1] + 0.5,
                    color=shade,
                    alpha=0.5,
                    zorder=0,
                    linewidth=0,
                    label=name,
                )
            ax.set(xlabel="position", ylabel="loss", title=f"in-context score {self.score}")
            ax.legend()
        return ax


def in_context_score(
    models: PyTree,
    sample: Callable[[PRNGKeyArray, int], Any],
    *,
    losses: Callable[[Any, Any], Float[Array, "batch time"]] | None = None,
    chance: Callable[[Any], Float[Array, "batch time"]] | None = None,
    early: slice | None = None,
    late: slice | None = None,
    sequences: int = 2048,
    batch_size: int = 256,
    key: PRNGKeyArray,
) -> InContext:
    """Loss by position and the in-context learning score.

    Args:
        models: with a seed axis.
        sample: draws a batch, `Examples` or anything that `losses` understands.
        losses: of a model and a batch, for every sequence and position: cross-entropy for a language model. None is
            ½‖error‖² of `model(batch.tokens)` against `batch.targets`.
        chance: of a batch, losses of predictions that know nothing of the sequence, such as those of words by their
            frequencies; to be given with `losses`. None is predicting zero.
        early: positions as a slice; None for the first tenth.
        late: likewise; None for the last tenth.
        sequences: how many.
        key: for the sequences.
    """
    if losses is not None and chance is None:
        raise ValueError(
            "chance: expected with `losses`: the losses of predictions that know nothing of the sequence. (A model's "
            "own first loss will not do: untrained models err more there than later.)"
        )
    everyone, measure, known = unstack(models), jax.jit(losses or _squared), chance or _zero
    by_position, score, over_chance = Running(), Running(), Running()
    for i, size in enumerate(batches(sequences, batch_size)):
        batch = sample(jax.random.fold_in(key, i), size)
        found = np.stack([np.asarray(measure(model, batch), np.float64) for model in everyone])
        if found.ndim != 3:
            raise ValueError(f"losses: expected shape ('batch', 'time'), got {found.shape[1:]}.")
        tenth = max(1, found.shape[-1] // 10)
        early, late = early or slice(0, tenth), late or slice(found.shape[-1] - tenth, None)
        parts = found[..., late], found[..., early]
        if 0 in (parts[0].shape[-1], parts[1].shape[-1]):
            raise ValueError(f"early, late: {early} or {late} has none of the {found.shape[-1]} positions.")
        by_position.add(found)
        score.add(parts[0].mean(-1) - parts[1].mean(-1))
        over_chance.add(parts[0].mean(-1) - np.asarray(known(batch), np.float64)[:, late].mean(-1))
    assert early is not None
    assert late is not None
    return InContext(
        loss=by_position.estimate("time"), score=score.estimate(), over_chance=over_chance.estimate(),
        early=early, late=late,
    )  # fmt: skip


def _zero(batch: Any) -> Float[Array, "batch time"]:
    return half_squared_errors(jnp.zeros_like(batch.targets), batch.targets)


def _squared(model: Any, batch: Any) -> Float[Array, "batch time"]:
    return half_squared_errors(model(batch.tokens), batch.targets)


@dataclass(frozen=True, kw_only=True, eq=False)
class Distance(Result):
    """How far predictions are from an algorithm's, relative to their size.

    Attributes:
        model: $d_t$ of the models; not a number at times when the algorithm predicts nothing.
        control: $d_t$ of predictions that should differ.
        tolerance: up to which distance two predictions count as the same.
    """

    model: Estimate
    control: Estimate
    tolerance: float

    @property
    def equal(self) -> Bool[np.ndarray, " time"]:
        """Where the models' predictions are the algorithm's up to the tolerance, and the control's are not (99%)."""
        return self.model.below(self.tolerance) & self.control.above(self.tolerance)

    def plot(self, *, ax: "Axes | None" = None) -> "Axes":
        """Both by time, on a logarithmic scale."""
        with drawing(ax) as ax:
            time = np.arange(1, self.model.values.shape[-1] + 1)
            draw_curve(ax, time, self.model, label="model and algorithm")
            draw_curve(ax, time, self.control, linestyle="--", label="control pair")
            ax.axhline(self.tolerance, color="0.4", linewidth=0.8, label="tolerance")
            ax.set(xlabel="time t", ylabel="relative distance of predictions", yscale="log")
            ax.legend()
        return ax


def distance(
    models: PyTree,
    sample: Callable[[PRNGKeyArray, int], Any],
    *,
    predict: Callable[[Any, Any], Float[Array, "batch time output"]],
    algorithm: Callable[[Any], Float[Array, "batch time output"]],
    control: Callable[[Any], Float[Array, "batch time output"]],
    tolerance: float = 0.05,
    sequences: int = 2048,
    batch_size: int = 256,
    key: PRNGKeyArray,
) -> Distance:
    """Whether models predict what an algorithm predicts.

    Args:
        models: with a seed axis.
        sample: draws a batch of whatever the next three read.
        predict: of a model and a batch; entries beyond the algorithm's width do not count.
        algorithm: of a batch, as `Ridge(lam)(autoregressive(...))`.
        control: of a batch, predictions that should not be the algorithm's: another algorithm, an untrained model.
        tolerance: see `Distance`.
        sequences: how many.
        key: for the sequences.
    """
    everyone = unstack(models)
    run, right, other = jax.jit(predict), jax.jit(algorithm), jax.jit(control)
    near, far, size = [], [], []
    for i, count in enumerate(batches(sequences, batch_size)):
        batch = sample(jax.random.fold_in(key, i), count)
        wanted, differing = (np.asarray(f(batch), np.float64) for f in (right, other))
        if wanted.shape != differing.shape:
            raise ValueError(
                f"control: expected predictions of shape {wanted.shape} as the algorithm's, got {differing.shape}."
            )
        found = np.stack([np.asarray(run(model, batch), np.float64) for model in everyone])
        if found.shape[1:-1] != wanted.shape[:-1] or found.shape[-1] < wanted.shape[-1]:
            raise ValueError(
                f"predict: expected predictions of shape {wanted.shape} as the algorithm's, got {found.shape[1:]}."
            )
        near.append(np.sum((found[..., : wanted.shape[-1]] - wanted) ** 2, -1))
        far.append(np.sum((differing - wanted) ** 2, -1)[None])
        size.append(np.sum(wanted**2, -1)[None])
    power = np.concatenate(size, 1)
    return Distance(
        model=relative_squares(np.concatenate(near, 1), power, "time"),
        control=relative_squares(np.concatenate(far, 1), power, "time"),
        tolerance=tolerance,
    )
