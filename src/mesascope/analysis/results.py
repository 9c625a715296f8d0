r"""What all tools of the scope share: means over sequences and seeds with their intervals, streaming, figures.

A tool reads several models at once: `models` is one pytree whose arrays begin with a seed axis, as `run.models()` gives
it and `stack` makes it. What it measures is $x_{ij}$, of model (seed) i on sequence j. Both are samples, and all models
read the same sequences, so an error of the mean has a part from each.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from mesascope.store import unknown
from mesascope.tasks import Examples
from mesascope.training import half_squared_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Activations = Callable[[Any, Array], Mapping[str, Array]]
"""`activations(model, tokens)`: arrays by path."""
Predict = Callable[[Any, Any], Any]
"""`predict(model, tokens)`: predictions after every token, as `Transformer.__call__` has it."""
Trace = Callable[..., tuple[Any, dict[str, Any]]]
"""`trace(model, tokens, edit={path: function})`: predictions and activations by path, as `Transformer.trace` has it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    r"""A mean over sequences, of each of several models.

    With $m_i$ the mean for seed i, the interval of $\bar m = \frac1S\sum_i m_i$ has half-width

    $$\sqrt{\Big(t_{S-1}\frac{\mathrm{sd}(m)}{\sqrt S}\Big)^2 + \big(t_{N-1}\,\mathrm{se}\big)^2},$$

    where se is the standard error over N sequences of the mean over models. The first term alone would not know that
    other sequences would have given other numbers. For one model it is left out: then nothing is said about models
    trained from other seeds.

    Attributes:
        values: $m_i$.
        sequences_error: se; zero for what depends on no sequences, such as weights.
        sequences: N, the smallest where entries differ.
        axes: names of the axes of `values`, the first is "seed".
    """

    values: Float[np.ndarray, "seed ..."]
    sequences_error: Float[np.ndarray, "..."]
    sequences: int
    axes: tuple[str, ...]

    def __post_init__(self):
        if self.axes[:1] != ("seed",) or len(self.axes) != self.values.ndim:
            raise ValueError(
                f"axes: expected 'seed' and a name for each further axis of shape {self.values.shape}, "
                f"got {self.axes}."
            )

    @classmethod
    def of(cls, samples: Float[np.ndarray, "seed sequence ..."], *axes: str) -> "Estimate":
        """From every number; `axes` names those after seed and sequence."""
        running = Running()
        running.add(samples)
        return running.estimate(*axes)

    @classmethod
    def over_seeds(cls, values: Float[np.ndarray, "seed ..."], *axes: str) -> "Estimate":
        """Of numbers that depend on no sequences."""
        values = np.asarray(values, np.float64)
        nothing = np.zeros(values.shape[1:])
        return cls(values=values, sequences_error=nothing, sequences=1, axes=("seed", *axes))

    @classmethod
    def ratio(
        cls,
        above: Float[np.ndarray, "seed sequence ..."],
        below: Float[np.ndarray, "seed sequence ..."],
        *axes: str,
    ) -> "Estimate":
        r"""Of $r_i = \bar x_i/\bar y_i$, both measured on the same sequences.

        To first order it differs from the true one by the mean of $(x_{ij} - r_i y_{ij})/\bar y_i$.
        """
        x, y = np.asarray(above, np.float64), np.asarray(below, np.float64)
        bottom = y.mean(1, keepdims=True)
        r = x.mean(1, keepdims=True) / bottom
        return dataclasses.replace(cls.of((x - r * y) / bottom, *axes), values=r[:, 0])

    @property
    def mean(self) -> Float[np.ndarray, "..."]:
        """Over seeds and sequences."""
        return self.values.mean(0)

    @property
    def low(self) -> Float[np.ndarray, "..."]:
        """Lower end of the mean's 95% interval."""
        return self.interval()[0]

    @property
    def high(self) -> Float[np.ndarray, "..."]:
        """Upper end of the mean's 95% interval."""
        return self.interval()[1]

    def interval(self, level: float = 0.95) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
        """Lower and upper end of the mean's interval."""
        half = np.zeros(())
        if self.sequences > 1:
            half = student_t(level, self.sequences - 1) * self.sequences_error
        seeds = self.values.shape[0]
        if seeds > 1:
            between = self.values.std(0, ddof=1) / math.sqrt(seeds)
            half = np.hypot(half, student_t(level, seeds - 1) * between)
        return self.mean - half, self.mean + half

    def above(self, bound: float) -> Bool[np.ndarray, "..."]:
        """Whether the mean is larger, whichever sequences and seeds had been drawn: one-sided, at 1%."""
        return np.asarray(self.interval(0.98)[0] > bound)

    def below(self, bound: float) -> Bool[np.ndarray, "..."]:
        """Whether the mean is smaller; see `above`."""
        return np.asarray(self.interval(0.98)[1] < bound)

    def scaled(self, factor: Float[np.ndarray, "..."] | float) -> "Estimate":
        """Every number times a known factor."""
        return dataclasses.replace(
            self, values=self.values * factor, sequences_error=self.sequences_error * np.abs(factor)
        )

    def __getitem__(self, index: Any) -> "Estimate":
        """A part, by integers and slices for the axes after the first."""
        index = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(i, int | np.integer | slice) for i in index) or len(index) >= len(self.axes):
            raise TypeError(f"index: expected integers and slices for {self.axes[1:]}, got {index}.")
        whole = (*index, *[slice(None)] * (len(self.axes) - 1 - len(index)))
        kept = (name for name, i in zip(self.axes[1:], whole, strict=True) if isinstance(i, slice))
        return dataclasses.replace(
            self,
            values=self.values[:, *whole],
            sequences_error=np.asarray(self.sequences_error[whole]),
            axes=("seed", *kept),
        )

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.mean:.3g} [{low:.3g}, {high:.3g}]" if len(self.axes) == 1 else repr(self)


def join(estimates: Sequence[Estimate], axis: str, *, at: int = 1) -> Estimate:
    """Estimates of the same models on the same sequences, along a new axis; `at` counts from the seed axis."""
    first = estimates[0]
    return Estimate(
        values=np.stack([e.values for e in estimates], at),
        sequences_error=np.stack([e.sequences_error for e in estimates], at - 1),
        sequences=min(e.sequences for e in estimates),
        axes=(*first.axes[:at], axis, *first.axes[at:]),
    )


@cache
def student_t(level: float, dof: int) -> float:
    r"""t with $P(\lvert T\rvert < t) = $ level. With $T = \sqrt\nu\tan\theta$ the density of θ is
    $\propto\cos^{\nu-1}\theta$."""
    if not 0 < level < 1:
        raise ValueError(f"level: expected between 0 and 1, got {level}.")
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
        # Squares are taken about the first sequence: a mean that is large beside its spread would swallow them.
        self.origin: np.ndarray | None = None

    def add(
        self,
        samples: Float[np.ndarray, "seed batch ..."],
        keep: Bool[np.ndarray, "batch ..."] | None = None,
    ) -> None:
        """Another batch; `keep` says what counts, for all of it where it is None."""
        samples = np.asarray(samples, np.float64)
        if samples.ndim < 2:
            raise ValueError(f"samples: expected axes for seed and sequence, got shape {samples.shape}.")
        if self.origin is None:
            self.origin = samples[:, 0]
        samples = samples - self.origin[:, None]
        if keep is not None:
            keep = np.broadcast_to(keep, samples.shape[1:])
            samples = np.where(keep, samples, 0)
        self.total = self.total + samples.sum(1)
        self.squares = self.squares + (samples.mean(0) ** 2).sum(0)
        self.count = self.count + (samples.shape[1] if keep is None else keep.sum(0))

    def estimate(self, *axes: str) -> Estimate:
        assert self.origin is not None
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = np.asarray(self.total / self.count)
            variance = np.maximum(self.squares / self.count - moved.mean(0) ** 2, 0)
            error = np.sqrt(variance / (self.count - 1))
        return Estimate(
            values=moved + self.origin,
            sequences_error=np.asarray(error),
            sequences=int(np.min(self.count)),
            axes=("seed", *axes),
        )


class Result(abc.ABC):
    """What a tool returns: a frozen dataclass of arrays, of which `axes` has the names of the axes, with `plot`."""

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """Of every array, by field."""
        found = {}
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            if isinstance(value, Estimate):
                found[field.name] = value.axes
            elif isinstance(value, np.ndarray):
                found[field.name] = tuple(field.type.dim_str.split())  # pyright: ignore
        return found

    @abc.abstractmethod
    def plot(self, *, ax: "Axes | None" = None) -> "Axes":
        """The finding as a figure, on these axes or on new ones in the house style."""


def stack(models: Sequence[PyTree]) -> PyTree:
    """Models of one kind as one pytree, seed axis first; `stack([model])` for one."""
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


def seeds_of(models: PyTree, name: str = "models") -> int:
    """How many models there are.

    Raises:
        ValueError: arrays that do not agree on it.
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
    return count


def unstack(models: PyTree, name: str = "models") -> list[PyTree]:
    """The models of a pytree with a seed axis."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], models) for i in range(seeds_of(models, name))]


def loss_of(predictions: Any, examples: Examples) -> Float[Array, "*lead batch"]:
    """½‖error‖² of every sequence, mean over the positions that predict."""
    weight = jnp.asarray(examples.predicts).astype(examples.targets.dtype)
    errors = half_squared_errors(jnp.asarray(predictions), jnp.asarray(examples.targets))
    return errors @ (weight / jnp.sum(weight))


def relative_squares(
    far: Float[np.ndarray, "seed sequence ..."], power: Float[np.ndarray, "#seed sequence ..."], *axes: str
) -> Estimate:
    """Squared distances over the squares of what they are distances from, for axes that end with time; not a number at
    times when these are nothing."""
    size = power.mean(1, keepdims=True, dtype=np.float64)
    nothing = size <= 1e-9 * np.mean(size, -1, keepdims=True)
    return Estimate.ratio(far, np.where(nothing, np.nan, power), *axes)


def activations_of(model: Any, tokens: Array) -> Mapping[str, Array]:
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
        check_paths(paths, seen)
        return {path: seen[path] for path in paths}

    return read


def check_paths(paths: Sequence[str], known: Mapping[str, Any]) -> None:
    """Raises KeyError for one that is not known."""
    for path in paths:
        if path not in known:
            raise KeyError(unknown("path", path, known))


def batches(sequences: int, batch_size: int) -> list[int]:
    """Sizes, as equal as can be and at most `batch_size`, of the batches that make up so many sequences."""
    if sequences < 2 or batch_size < 2:
        raise ValueError(
            f"sequences, batch_size: expected at least 2 of each, got {sequences} and {batch_size}."
        )
    count = -(-sequences // batch_size)
    return [sequences // count + (i < sequences % count) for i in range(count)]


@contextmanager
def house_style() -> Iterator[None]:
    """The style of all figures, as a context."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'mesascope[figures]'.") from error
    with as_file(files("mesascope.analysis") / "house.mplstyle") as path, plt.style.context(path):
        yield


@contextmanager
def drawing(ax: "Axes | None", *, size: tuple[float, float] | None = None) -> Iterator["Axes"]:
    """These axes, or new ones, in the house style; `size` of a new figure in inches, where it is not the usual."""
    with house_style():
        import matplotlib.pyplot as plt

        yield plt.subplots(figsize=size)[1] if ax is None else ax


def shades(count: int) -> list[Any]:
    """A color for each depth, dark where it is deep."""
    import matplotlib as mpl

    return list(mpl.colormaps["cividis_r"](np.linspace(0.1, 1, count)))


def legend_beside(ax: "Axes") -> None:
    """A legend that covers no curve, however many there are."""
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def rows_size(rows: int) -> tuple[float, float]:
    """Of a figure with so many rows of points."""
    return 5.5, 1.2 + 0.4 * rows


def tiles_size(rows: int, columns: int) -> tuple[float, float]:
    """Of a figure with so many tiles."""
    return 1.8 + 1.0 * columns, 1.2 + 1.0 * rows


def draw_curve(ax: "Axes", x: Sequence[float] | np.ndarray, estimate: Estimate, **style: Any) -> None:
    """A mean with its interval, for an estimate with one axis."""
    (line,) = ax.plot(x, estimate.mean, **style)
    ax.fill_between(x, estimate.low, estimate.high, color=line.get_color(), alpha=0.2, linewidth=0)


def draw_points(ax: "Axes", names: Sequence[str], estimate: Estimate, *, zero: float = 0.0) -> None:
    """One mean with its interval in each row, a dot for every seed, and a line where nothing would have happened."""
    rows = np.arange(len(names))
    ax.axvline(zero, color="0.4", linewidth=0.8, zorder=0)
    for values in estimate.values if len(estimate.values) > 1 else ():
        ax.plot(values, rows, ".", color="0.7", zorder=1)
    errors = np.stack([estimate.mean - estimate.low, estimate.high - estimate.mean])
    ax.errorbar(estimate.mean, rows, xerr=errors, fmt="o", capsize=3)
    ax.set_yticks(rows, names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)


def draw_tiles(
    ax: "Axes",
    tiles: Float[np.ndarray, "row column height width"],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    signed: bool,
    label: str,
) -> None:
    """Matrices side by side, on one scale: from zero, or symmetric about it where they are signed."""
    height, width = tiles.shape[2:]
    gap = max(1, round(0.08 * width))
    ax.set_facecolor("white")
    bound = float(np.max(np.abs(tiles))) or 1.0
    scale = dict(cmap="RdBu", vmin=-bound, vmax=bound) if signed else dict(vmin=0, vmax=bound)
    image = None
    for r, c in np.ndindex(*tiles.shape[:2]):
        left, top = c * (width + gap), r * (height + gap)
        place = (left - 0.5, left + width - 0.5, top + height - 0.5, top - 0.5)
        image = ax.imshow(tiles[r, c], extent=place, **scale)  # pyright: ignore[reportArgumentType]
    ax.set_xlim(-0.5, len(columns) * (width + gap) - gap - 0.5)
    ax.set_ylim(len(rows) * (height + gap) - gap - 0.5, -0.5)
    ax.set_xticks([(width - 1) / 2 + c * (width + gap) for c in range(len(columns))], columns)
    ax.set_yticks([(height - 1) / 2 + r * (height + gap) for r in range(len(rows))], rows)
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    assert image is not None
    ax.figure.colorbar(image, ax=ax, label=label)
