r"""What all tools of the scope share: means over sequences and seeds with their intervals, streaming, plots.

A tool reads models with a function `activations(model, tokens)` that returns arrays by name, and it reads several
models at once: `models` is one pytree whose leaves have a leading seed axis, as `run.models()` gives it and `stack`
makes it.
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import as_file, files
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Activations = Callable[[Any, Array], Mapping[str, Array]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    r"""A mean over sequences, of each of several models.

    With $m_j$ the mean for seed j, the interval of $\bar m = \frac1S\sum_j m_j$ has half-width

    $$\sqrt{\Big(t_{S-1}\frac{\mathrm{sd}(m)}{\sqrt S}\Big)^2 + \big(z\,\mathrm{se}\big)^2},$$

    where se is the standard error over sequences of the mean over models. All models read the same sequences, so that
    the first term alone would not know that other sequences would have given other numbers. For one model it is left
    out: then nothing is said about models trained from other seeds.

    Attributes:
        values: $m_j$.
        sequences_error: se.
        axes: names of the axes of `values`, the first is "seed".
    """

    values: Float[np.ndarray, "seed ..."]
    sequences_error: Float[np.ndarray, "*axes"]
    axes: tuple[str, ...]

    def __post_init__(self):
        if self.axes[:1] != ("seed",) or len(self.axes) != self.values.ndim:
            raise ValueError(
                f"axes: expected 'seed' and a name for each further axis of shape {self.values.shape}, "
                f"got {self.axes}."
            )

    @property
    def mean(self) -> Float[np.ndarray, "*axes"]:
        """Over seeds and sequences."""
        return self.values.mean(0)

    def interval(self, level: float = 0.95) -> tuple[Float[np.ndarray, "*axes"], Float[np.ndarray, "*axes"]]:
        """Lower and upper end of the mean's interval."""
        half = NormalDist().inv_cdf(0.5 + level / 2) * self.sequences_error
        seeds = self.values.shape[0]
        if seeds > 1:
            between = self.values.std(0, ddof=1) / math.sqrt(seeds)
            half = np.hypot(half, student_t(level, seeds - 1) * between)
        return self.mean - half, self.mean + half

    def scaled(self, factor: Float[np.ndarray, "*axes"] | float) -> "Estimate":
        """Every number times a known factor."""
        return Estimate(
            values=self.values * factor,
            sequences_error=self.sequences_error * np.abs(factor),
            axes=self.axes,
        )

    def __getitem__(self, index: Any) -> "Estimate":
        """A part, by integers and slices for the axes after the first."""
        index = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(i, int | np.integer | slice) for i in index) or len(index) >= len(self.axes):
            raise TypeError(f"index: expected integers and slices for {self.axes[1:]}, got {index}.")
        whole = (*index, *[slice(None)] * (len(self.axes) - 1 - len(index)))
        kept = (name for name, i in zip(self.axes[1:], whole, strict=True) if isinstance(i, slice))
        return Estimate(
            values=self.values[:, *whole],
            sequences_error=np.asarray(self.sequences_error[whole]),
            axes=("seed", *kept),
        )


@cache
def student_t(level: float, dof: int) -> float:
    r"""t with $P(\lvert T\rvert < t) = $ level. With $T = \sqrt\nu\tan\theta$ the density of θ is
    $\propto\cos^{\nu-1}\theta$."""
    angle = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angle) ** (dof - 1)
    cumulative = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(dof) * math.tan(float(np.interp(level, cumulative / cumulative[-1], angle)))


class Running:
    """Means over sequences that arrive in batches: per seed, and with a standard error for the mean over seeds."""

    def __init__(self):
        self.total: np.ndarray | float = 0.0
        self.squares: np.ndarray | float = 0.0
        self.count: np.ndarray | float = 0.0

    def add(
        self,
        samples: Float[np.ndarray, "seed batch ..."],
        keep: Bool[np.ndarray, "batch ..."] | None = None,
    ) -> None:
        """Another batch; `keep` says what counts, for all of it where it is None."""
        samples = np.asarray(samples, np.float64)
        if keep is not None:
            keep = np.broadcast_to(keep, samples.shape[1:])
            samples = np.where(keep, samples, 0)
        self.total = self.total + samples.sum(1)
        self.squares = self.squares + (samples.mean(0) ** 2).sum(0)
        self.count = self.count + (samples.shape[1] if keep is None else keep.sum(0))

    def estimate(self, *axes: str) -> Estimate:
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.asarray(self.total / self.count)
            variance = np.maximum(self.squares / self.count - values.mean(0) ** 2, 0)
            error = np.sqrt(variance / (self.count - 1))
        return Estimate(values=values, sequences_error=np.asarray(error), axes=("seed", *axes))


def stack(models: Sequence[PyTree]) -> PyTree:
    """Models of one kind as one pytree, seed axis first."""
    first, *others = models
    for i, other in enumerate(others, start=1):
        if jax.tree.structure(other) != jax.tree.structure(first) or (
            [jnp.shape(leaf) for leaf in jax.tree.leaves(other)]
            != [jnp.shape(leaf) for leaf in jax.tree.leaves(first)]
        ):
            raise ValueError(
                f"models: model {i} is built differently from model 0: they cannot be seeds of one model."
            )
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)


def unstack(models: PyTree, name: str = "models") -> list[PyTree]:
    """The models of a pytree with a seed axis.

    Raises:
        ValueError: leaves that do not agree on the number of seeds.
    """
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(models)}
    if len(counts) != 1 or counts == {()}:
        found = (
            ", ".join(str(count[0]) if count else "none" for count in sorted(counts)) or "no arrays at all"
        )
        raise ValueError(
            f"{name}: expected a pytree whose arrays all begin with one seed axis, as run.models() or "
            f"stack([model, ...]) gives it; got leading axes of {found}."
        )
    ((count,),) = counts
    return [jax.tree.map(lambda leaf, i=i: leaf[i], models) for i in range(count)]


def trace(model: Any, tokens: Array) -> Mapping[str, Array]:
    """The activations of a `mesascope` Transformer."""
    return model.trace(tokens)[1]


@lru_cache(maxsize=8)
def reader(
    activations: Activations, paths: tuple[str, ...] | None
) -> Callable[[Any, Array], dict[str, Array]]:
    """Compiled activations at these paths (None: all); nothing is computed for others.

    Raises:
        KeyError: an unknown path; the nearest known ones are listed.
    """

    @jax.jit
    def read(model: Any, tokens: Array) -> dict[str, Array]:
        seen = activations(model, tokens)
        if paths is None:
            return dict(seen)
        for path in paths:
            if path not in seen:
                raise KeyError(unknown("path", path, seen))
        return {path: seen[path] for path in paths}

    return read


def unknown(what: str, name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """What to say about a name that is not among those known."""
    near = difflib.get_close_matches(name, list(known), n=4, cutoff=0.3)
    if near:
        return f"{what}: there is no {name!r}. The nearest are: {', '.join(near)}."
    return f"{what}: there is no {name!r}. There are: {', '.join(known)}."


def batches(sequences: int, batch_size: int) -> list[int]:
    """Sizes, as equal as can be and at most `batch_size`, of the batches that make up so many sequences."""
    if sequences < 2 or batch_size < 2:
        raise ValueError(
            f"sequences, batch_size: expected at least 2 of each, got {sequences} and {batch_size}."
        )
    count = -(-sequences // batch_size)
    return [sequences // count + (i < sequences % count) for i in range(count)]


def house_style() -> AbstractContextManager[None]:
    """The style of all figures, as a context."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'mesascope[figures]'.") from error
    with as_file(files("mesascope.analysis") / "house.mplstyle") as path:
        return plt.style.context(path)


def axes_for(ax: "Axes | None") -> "Axes":
    """These axes, or new ones in the house style."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots()[1]


def draw_curve(
    ax: "Axes", x: Sequence[float] | np.ndarray, estimate: Estimate, *, level: float = 0.95, **style: Any
) -> None:
    """A mean with its interval, for an estimate with one axis."""
    low, high = estimate.interval(level)
    (line,) = ax.plot(x, estimate.mean, **style)
    ax.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
