r"""Means with confidence intervals, over models and sequences at once.

What a tool measures is $x_{ij}$, of model (seed) i on sequence j. Both are samples, and every model reads the same
sequences, so the error of the mean has a part from either:

$$x_{ij} = \mu + a_i + b_j + e_{ij}, \qquad
  \mathrm{var}(\bar x) = \frac{\sigma_a^2}{S} + \frac{\sigma_b^2}{N} + \frac{\sigma_e^2}{SN}$$
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import betainc
from jaxtyping import Array, Float, PyTree


class Interval(NamedTuple):
    """A mean and the ends of its confidence interval; infinite where there is too little to tell."""

    mean: Float[np.ndarray, "*rest"]
    low: Float[np.ndarray, "*rest"]
    high: Float[np.ndarray, "*rest"]

    def at(self, index: Any) -> "Interval":
        """The same index into all three."""
        return Interval(self.mean[index], self.low[index], self.high[index])

    def __str__(self) -> str:
        return f"{self.mean} [{self.low}, {self.high}]"


def interval(values: Float[np.ndarray, "seed sequence *rest"], *, level: float = 0.95) -> Interval:
    """Of the mean over the first two axes, entry by entry.

    The parts are estimated by the analysis of variance of a crossed design, and Student's distribution has the degrees
    of freedom of Satterthwaite. With one model the interval is over sequences only: it says nothing of other models.
    """
    x = np.asarray(values, np.float64)
    if x.ndim < 2:
        raise ValueError(f"values: expected axes for seed and sequence, got shape {x.shape}.")
    seeds, sequences = x.shape[:2]
    mean = x.mean((0, 1))
    # Squared standard errors from each set of means, with their degrees of freedom.
    parts: list[tuple[np.ndarray, int]] = []
    by_seed, by_sequence = x.mean(1), x.mean(0)
    if seeds > 1:
        parts.append((by_seed.var(0, ddof=1) / seeds, seeds - 1))
    if sequences > 1:
        parts.append((by_sequence.var(0, ddof=1) / sequences, sequences - 1))
    if not parts:
        return Interval(mean, np.full_like(mean, -np.inf), np.full_like(mean, np.inf))
    variance = np.sum([v for v, _ in parts], axis=0)
    if len(parts) == 2:
        # Both contain the interaction: once is enough, but less than either alone it cannot be.
        rest = x - by_seed[:, None] - by_sequence[None] + mean
        twice = np.sum(rest**2, (0, 1)) / ((seeds - 1) * (sequences - 1)) / (seeds * sequences)
        variance = np.maximum(variance - twice, np.maximum(parts[0][0], parts[1][0]))
    spread = np.sum([v**2 / d for v, d in parts], axis=0)
    total = np.sum([v for v, _ in parts], axis=0)
    freedom = np.where(spread > 0, total**2 / np.where(spread > 0, spread, 1), 1.0)
    half = student(0.5 + level / 2, freedom) * np.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def ratio_interval(
    above: Float[np.ndarray, "seed sequence *rest"],
    below: Float[np.ndarray, "seed sequence *rest"],
    *,
    level: float = 0.95,
) -> Interval:
    r"""Of $\bar x/\bar y$, where both are measured on the same models and sequences.

    To first order the ratio r differs from the true one by the mean of $(x_{ij} - r\,y_{ij})/\bar y$.
    """
    x, y = np.asarray(above, np.float64), np.asarray(below, np.float64)
    bottom = y.mean((0, 1))
    r = x.mean((0, 1)) / bottom
    _, low, high = interval((x - r * y) / bottom, level=level)
    return Interval(r, r + low, r + high)


def student(probability: float, freedom: Float[np.ndarray, "*rest"]) -> Float[np.ndarray, "*rest"]:
    """Quantiles above ½ of Student's distribution, by bisection."""
    if not 0.5 < probability < 1:
        raise ValueError(f"level: expected between 0 and 1, got {2 * probability - 1}.")
    with jax.enable_x64(True):
        return np.asarray(_quantile(np.asarray(freedom, np.float64), np.float64(1 - probability)))


@jax.jit
def _quantile(nu: Array, tail: Array) -> Array:
    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        t = (low + high) / 2
        beyond = 0.5 * betainc(nu / 2, jnp.full_like(nu, 0.5), nu / (nu + t * t))
        return jnp.where(beyond > tail, t, low), jnp.where(beyond > tail, high, t)

    low, high = jax.lax.fori_loop(0, 60, halve, (jnp.zeros_like(nu), jnp.full_like(nu, 1e4)))
    return (low + high) / 2


def seeds_of(models: PyTree) -> int:
    """How many models there are: the length of the first axis, which all arrays must share."""
    shapes = {np.shape(leaf) for leaf in jax.tree.leaves(models)}
    if not shapes:
        raise ValueError("models: expected arrays with a seed axis first, got none.")
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            "models: expected every array to have the same seed axis first, got lengths "
            f"{sorted({shape[0] if shape else 0 for shape in shapes})}. `single(model)` adds it to one model."
        )
    return next(iter(shapes))[0]


def single(model: PyTree) -> PyTree:
    """One model as a family of one: a seed axis of length 1 before every array."""
    return jax.tree.map(lambda leaf: leaf[None], model)


def canvas(axes: Any = None) -> Any:
    """Axes to draw on: those given, or those of a new figure. matplotlib is imported here and nowhere else."""
    if axes is not None:
        return axes
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot: figures need matplotlib: pip install mesascope[figures].") from error
    return Figure(figsize=(5, 3), layout="constrained").subplots()


def draw_curve(axes: Any, x: Any, curve: Interval, **style: Any) -> None:
    """A line and a band."""
    (line,) = axes.plot(x, curve.mean, **style)
    axes.fill_between(x, curve.low, curve.high, color=line.get_color(), alpha=0.25, linewidth=0)


Trace = Callable[..., tuple[Any, dict[str, Any]]]
"""`trace(model, tokens, edit={path: function})`: predictions and activations by path, as `Transformer.trace` has it."""
Predict = Callable[[Any, Any], Any]
"""`predict(model, tokens)`: predictions after every token, as `Transformer.__call__` has it."""
