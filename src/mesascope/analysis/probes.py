r"""Linear probes: what can be read from activations, layer by layer and time by time, next to what it takes to be news.

$$\min_D\; \sum_b\lVert y_{b,t} - D\,a_{b,t}\rVert^2 + \rho\,\lVert D\rVert_F^2$$

for every target y, every path a (an address of activations), every time t and every model, in closed form and one call:

    from mesascope.analysis.targets import next_token, past_tokens, preconditioned, sampler

    targets = {"next": next_token, "preconditioned": preconditioned(1000.0), **past_tokens(range(8))}
    found = probe(
        run.models(), sampler(config.task, config.tokens, targets), untrained=trainer.start().models,
        paths=residual_stream(7), key=key,
    )
    found.relative.mean[0, 3]     # by time: error of "next" after three blocks, 1 is what predicting zero gives
    print(found.verdict())
    found.plot("next")

Half of the sequences fit the probes, the other half scores them. Sequences stream by: of the first half only Gram
matrices and cross moments are kept, in float64, of the second half only sums of errors. There is no intercept; whoever
wants one appends a column of ones to the activations.

Every probe comes with three controls on the same sequences: the same probe on models that were not trained, the probe
of targets that belong to other sequences, and the probe of the input token itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from mesascope.analysis.results import (
    Activations,
    Estimate,
    Result,
    Running,
    activations_of,
    batches,
    check_paths,
    draw_curve,
    drawing,
    join,
    legend_beside,
    reader,
    seeds_of,
    shades,
    student_t,
    unstack,
)
from mesascope.store import unknown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of a one-sided test, for each of the two kinds of chance: which sequences, and which seeds.
ALPHA = 0.005


class Batch(NamedTuple):
    """Sequences, and what probes look for at each of their positions.

    Attributes:
        targets: by name; zero where there is nothing to look for.
        keep: which positions of which sequences count; None for all.
    """

    tokens: Float[Array, "batch time token"]
    targets: Mapping[str, Float[Array | np.ndarray, "batch time ?target"]]
    keep: Bool[Array | np.ndarray, "batch time"] | None = None


Sample = Callable[[PRNGKeyArray, int], Batch]


@dataclass(frozen=True, kw_only=True, eq=False)
class Probes(Result):
    r"""Errors of probes, and of their controls.

    Attributes:
        targets: names along the axis "target".
        paths: names along the axis "path".
        error: mean of $\tfrac12\lVert y - Da\rVert^2$ over sequences that no probe was fitted to.
        size: mean of $\tfrac12\lVert y\rVert^2$ over these sequences, the error of predicting zero.
        in_sample: mean error over the sequences that the probes were fitted to; always the more flattering number.
        in_sample_size: `size` there.
        untrained: as `error`, for untrained models.
        shuffled: as `error`, for targets that belong to other sequences.
        input: as `error`, for the token itself in place of the activation.
        margin: what part of a control's error a probe has to take away to beat it.
        beats: for each control, whether the probe beats it: beyond the margin, and beyond what other sequences and
            other seeds could have given (one-sided tests at 0.5% each).
    """

    targets: tuple[str, ...]
    paths: tuple[str, ...]
    error: Estimate
    size: Float[np.ndarray, "target time"]
    in_sample: Float[np.ndarray, "seed target path time"]
    in_sample_size: Float[np.ndarray, "target time"]
    untrained: Estimate
    shuffled: Estimate
    input: Estimate
    margin: float
    beats: Mapping[str, Bool[np.ndarray, "target path time"]]

    @property
    def relative(self) -> Estimate:
        r"""$\mathbb E\lVert y - Da\rVert^2 / \mathbb E\lVert y\rVert^2$; NaN where the target is zero.

        Intervals take `size` as known; what beats its controls is decided on `error`.
        """
        return self.error.scaled(self._per_size)

    @property
    def relative_in_sample(self) -> Float[np.ndarray, "seed target path time"]:
        """The same on the sequences that the probes were fitted to."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.in_sample / np.where(self.in_sample_size > 0, self.in_sample_size, np.nan)[:, None]

    @property
    def relative_controls(self) -> dict[str, Estimate]:
        """`untrained`, `shuffled` and `input` by name, relative."""
        return {
            "untrained": self.untrained.scaled(self._per_size),
            "shuffled": self.shuffled.scaled(self._per_size),
            "input": self.input.scaled(self._per_size),
        }

    @property
    def _per_size(self) -> Float[np.ndarray, "target 1 time"]:
        with np.errstate(divide="ignore"):
            return (1 / np.where(self.size > 0, self.size, np.nan))[:, None]

    @property
    def beats_controls(self) -> Bool[np.ndarray, "target path time"]:
        """Whether a probe beats all of them; where it does not, it is no evidence."""
        return np.all(list(self.beats.values()), 0)

    def at(self, target: str, path: str | None = None) -> tuple[int, ...]:
        """Index of a target, and of a path: `found.relative[found.at("next", "blocks.2.resid_post")]`."""
        if target not in self.targets:
            raise KeyError(unknown("target", target, self.targets))
        if path is None:
            return (self.targets.index(target),)
        if path not in self.paths:
            raise KeyError(unknown("path", path, self.paths))
        return self.targets.index(target), self.paths.index(path)

    def verdict(self) -> str:
        """A line for each target and path: its error, and which controls it does not beat at most times."""
        lines, relative = [], self.relative.mean
        for i, target in enumerate(self.targets):
            there = self.size[i] > 0
            for j, path in enumerate(self.paths):
                found = np.mean(relative[i, j, there]) if there.any() else np.nan
                lost = [n for n, b in self.beats.items() if not there.any() or b[i, j, there].mean() <= 0.5]
                said = f"does not beat: {', '.join(lost)}" if lost else "beats its controls"
                lines.append(f"{target} from {path}: relative error {found:.3g}, {said}")
        return "\n".join(lines)

    def plot(self, target: str | None = None, *, ax: "Axes | None" = None) -> "Axes":
        """Relative error of a target (the first unless named) by time, a line for each path, dark where it is deep;
        dashed the best of the controls."""
        with drawing(ax) as ax:
            target = self.targets[0] if target is None else target
            (i,) = self.at(target)
            time = np.arange(1, self.size.shape[1] + 1)
            for j, (path, color) in enumerate(zip(self.paths, shades(len(self.paths)), strict=True)):
                draw_curve(ax, time, self.relative[i, j], color=color, label=path)
            best = np.min([c.mean[i].min(0) for c in self.relative_controls.values()], 0)
            ax.plot(time, best, "--", color="0.4", label="best control")
            ax.set(xlabel="time t", ylabel="relative error", title=target, ylim=(0, None))
            legend_beside(ax)
        return ax

    def plot_targets(self, path: str, time: int = -1, *, ax: "Axes | None" = None) -> "Axes":
        """Relative error of all targets at one path and time (an index), with controls: a horizon curve."""
        with drawing(ax) as ax:
            j = self.at(self.targets[0], path)[1]
            x = np.arange(len(self.targets))
            draw_curve(ax, x, self.relative[:, j, time], marker="o", label=path)
            for name, control in self.relative_controls.items():
                column = 0 if name == "input" else j
                draw_curve(ax, x, control[:, column, time], linestyle="--", label=name)
            ax.set_xticks(x, self.targets, rotation=45, ha="right")
            ax.set(ylabel="relative error", ylim=(0, None))
            ax.legend()
        return ax


def probe(
    models: PyTree,
    sample: Sample,
    *,
    untrained: PyTree,
    activations: Activations = activations_of,
    paths: Sequence[str] | None = None,
    sequences: int = 8192,
    batch_size: int = 256,
    ridge: float = 1e-8,
    margin: float = 0.1,
    key: PRNGKeyArray,
) -> Probes:
    r"""Fit and score a probe for every target, path, time and model.

    Args:
        models: with a seed axis, as `run.models()` or `stack([...])` give them.
        sample: draws sequences with their targets; see `targets.sampler`.
        untrained: at least two models as they were before training, with a seed axis. How much they differ from each
            other says what an initialization may do by chance.
        activations: of a model and tokens, arrays by path.
        paths: which of them, each `[batch, time, width]`; None for all that have this shape.
        sequences: in all; half of them fit, half of them score.
        batch_size: sequences at a time. Memory grows with it, and with `sequences` not at all; and there is one Gram
            matrix of the width for every model, path and time.
        ridge: ρ, in units of the mean eigenvalue of the activations' Gram matrix.
        margin: see `Probes`.
        key: for the sequences.

    Raises:
        ValueError: fewer sequences to fit than twice the width of an activation: such a probe fits anything.
    """
    return probe_each(
        models, {"": sample}, untrained=untrained, activations=activations, paths=paths, sequences=sequences,
        batch_size=batch_size, ridge=ridge, margin=margin, key=key,
    )[""]  # fmt: skip


def probe_each(
    models: PyTree,
    samples: Mapping[str, Sample],
    *,
    untrained: PyTree,
    activations: Activations = activations_of,
    paths: Sequence[str] | None = None,
    sequences: int = 8192,
    batch_size: int = 256,
    ridge: float = 1e-8,
    margin: float = 0.1,
    key: PRNGKeyArray,
) -> dict[str, Probes]:
    """`probe` for several samplers that draw the same sequences and differ in what they look for and which positions
    count. Activations, which take most of the time, are computed once; Gram matrices are kept for each."""
    if not samples:
        raise ValueError("samples: expected at least one.")
    trained, fresh = unstack(models), unstack(untrained, "untrained")
    if len(fresh) < 2:
        raise ValueError(
            "untrained: expected at least 2 models. One says nothing about what initializations do by chance."
        )
    if jax.tree.structure(models) != jax.tree.structure(untrained):
        raise ValueError("untrained: these models are built differently from those that are probed.")
    sizes = [*batches(sequences // 2, batch_size), *batches(sequences - sequences // 2, batch_size)]
    to_fit = len(sizes) // 2

    def draw(i: int) -> dict[str, Batch]:
        drawn = {name: sample(jax.random.fold_in(key, i), sizes[i]) for name, sample in samples.items()}
        (one, first), *others = drawn.items()
        for name, batch in others:
            if not np.array_equal(batch.tokens, first.tokens, equal_nan=True):
                raise ValueError(f"samples: {name!r} draws other sequences than {one!r}.")
        return drawn

    drawn = draw(0)
    chosen, *_ = [_choose(paths, batch, activations, trained[0], sequences // 2) for batch in drawn.values()]
    read = reader(activations, chosen)
    ongoing = {name: _Ongoing(batch, chosen, len(trained), len(fresh)) for name, batch in drawn.items()}
    for i in range(len(sizes)):
        drawn = drawn if i == 0 else draw(i)
        tokens = next(iter(drawn.values())).tokens
        seen = [read(model, tokens) for model in (*trained, *fresh)]
        for name, batch in drawn.items():
            if i == to_fit:
                ongoing[name].solve(ridge)
            if i < to_fit:
                ongoing[name].fit(batch, seen)
            else:
                ongoing[name].score(batch, seen, margin)
    return {name: of.result(margin) for name, of in ongoing.items()}


class _Ongoing:
    """Probes of one sampler's targets, while sequences stream by: first `fit`, then `solve`, then `score`.

    Slots are (model, path), the models before the untrained ones; the input is (-1, -1).
    """

    def __init__(self, batch: Batch, paths: tuple[str, ...], trained: int, fresh: int):
        self.targets, self.paths = tuple(batch.targets), paths
        self.trained, self.slots = trained, trained + fresh
        widths = [np.shape(y)[-1] for y in batch.targets.values()]
        self.parts = np.concatenate([[0], np.cumsum(widths)])[:-1]
        self.dim = sum(widths)
        self.moments: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self.squares = self.count = np.zeros(())
        names = ("error", "untrained", "shuffled", "over_untrained", "over_shuffled", "over_input")
        self.tracks = {name: [Running() for _ in paths] for name in names}
        self.on_input, self.on_size = Running(), Running()
        self.decoders: dict[tuple[int, int], np.ndarray] = {}
        self.in_sample = np.zeros(())

    def _regressors(
        self, batch: Batch, seen: Sequence[Mapping[str, Array]]
    ) -> Iterator[tuple[tuple[int, int], Float[np.ndarray, "time batch width"]]]:
        for p, path in enumerate(self.paths):
            for m in range(self.slots):
                yield (m, p), _time_first(seen[m][path], batch.keep)
        yield (-1, -1), _time_first(batch.tokens, batch.keep)

    def _outcomes(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Targets, and for trained models beside them those of the sequence before; and targets alone."""
        y = _time_first(np.concatenate([np.asarray(y) for y in batch.targets.values()], -1), batch.keep)
        return np.concatenate([y, _shuffled(y, batch.keep)], -1), y

    def fit(self, batch: Batch, seen: Sequence[Mapping[str, Array]]) -> None:
        pairs, plain = self._outcomes(batch)
        self.squares = self.squares + _by_target(plain, self.parts).sum(-1)
        self.count = self.count + _count(batch)
        for slot, x in self._regressors(batch, seen):
            cross = _moments(x, pairs if 0 <= slot[0] < self.trained else plain)
            before = self.moments.get(slot, (0, 0))
            self.moments[slot] = before[0] + _moments(x, x), before[1] + cross

    def solve(self, ridge: float) -> None:
        moments = self.moments
        if self.count.min() < 2 * max(gram.shape[-1] for gram, _ in moments.values()):
            raise ValueError(
                f"keep: leaves {self.count.min():.0f} sequences to fit at some time, fewer than twice a width."
            )
        self.decoders = {slot: _solve(gram, cross, ridge) for slot, (gram, cross) in moments.items()}

        def residual(m: int, p: int) -> Float[np.ndarray, "target time"]:
            return _residual(*moments[m, p], self.decoders[m, p], self.squares, self.parts, self.dim)

        models, paths = range(self.trained), range(len(self.paths))
        self.in_sample = np.stack([np.stack([residual(m, p) for p in paths], 1) for m in models]) / self.count
        self.moments = {}

    def score(self, batch: Batch, seen: Sequence[Mapping[str, Array]], margin: float) -> None:
        kept = None if batch.keep is None else np.asarray(batch.keep)[:, None]
        parts, dim, tracks = self.parts, self.dim, self.tracks
        pairs, plain = self._outcomes(batch)
        self.on_size.add(_score(plain, parts)[None], kept)
        rest = plain - _decode(_time_first(batch.tokens, batch.keep), self.decoders[-1, -1])
        from_input = _score(rest, parts)[None]
        self.on_input.add(from_input, kept)
        errors: list[np.ndarray] = []
        chance: list[np.ndarray] = []
        for (m, p), x in self._regressors(batch, seen):
            if m < 0:
                continue
            rest = (pairs if m < self.trained else plain) - _decode(x, self.decoders[m, p])
            errors.append(_score(rest[..., :dim], parts))
            if m < self.trained:
                chance.append(_score(rest[..., dim:], parts))
            if m == self.slots - 1:
                found, null = np.stack(errors[: self.trained]), np.stack(errors[self.trained :])
                others = np.stack(chance)
                mean, keep = found.mean(0), 1 - margin
                tracks["error"][p].add(found, kept)
                tracks["untrained"][p].add(null, kept)
                tracks["shuffled"][p].add(others, kept)
                tracks["over_untrained"][p].add((keep * null.mean(0) - mean)[None], kept)
                tracks["over_shuffled"][p].add((keep * others.mean(0) - mean)[None], kept)
                tracks["over_input"][p].add((keep * from_input[0] - mean)[None], kept)
                errors, chance = [], []

    def result(self, margin: float) -> Probes:
        gathered = {
            name: join([track.estimate("target", "time") for track in by_path], "path", at=2)
            for name, by_path in self.tracks.items()
        }
        input_error = join([self.on_input.estimate("target", "time")], "path", at=2)
        controls = {
            "untrained": gathered["untrained"],
            "shuffled": gathered["shuffled"],
            "input": input_error,
        }
        size = self.on_size.estimate("target", "time").values[0]
        smallest = 1e-12 * size[:, None]
        beats = {
            name: _beats(
                gathered["error"].values, (1 - margin) * control.values, gathered[f"over_{name}"], smallest
            )
            & (size > 0)[:, None]
            for name, control in controls.items()
        }
        return Probes(
            targets=self.targets, paths=self.paths, error=gathered["error"], size=size,
            in_sample=self.in_sample, in_sample_size=0.5 * self.squares / self.count, margin=margin, beats=beats,
            **controls,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Course(Result):
    """Probes of the same models at several steps of their training.

    Attributes:
        steps: of the optimizer.
        probes: one for each.
    """

    steps: tuple[int, ...]
    probes: tuple[Probes, ...]

    @property
    def relative(self) -> Estimate:
        """With the axis "step" after "seed"."""
        return join([p.relative for p in self.probes], "step")

    def plot(self, target: str | None = None, time: int = -1, *, ax: "Axes | None" = None) -> "Axes":
        """Relative error of a target (the first unless named) by step of training, at one time (an index), a line for
        each path."""
        with drawing(ax) as ax:
            first, relative = self.probes[0], self.relative
            target = first.targets[0] if target is None else target
            (i,) = first.at(target)
            for j, (path, color) in enumerate(zip(first.paths, shades(len(first.paths)), strict=True)):
                draw_curve(ax, self.steps, relative[:, i, j, time], color=color, label=path)
            ax.set(xlabel="step of training", ylabel="relative error", title=target, ylim=(0, None))
            legend_beside(ax)
        return ax


def probe_checkpoints(models_by_step: Mapping[int, PyTree], sample: Sample, **arguments: Any) -> Course:
    """`probe` for each of several copies of the models, as `run.kept()` has them, on the same sequences."""
    if not models_by_step:
        raise ValueError("models_by_step: expected at least one step; was the run trained with keep_every?")
    counts = {step: seeds_of(models) for step, models in models_by_step.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"models_by_step: expected the same seeds at every step, got {counts} by step.")
    steps = tuple(sorted(models_by_step))
    return Course(
        steps=steps, probes=tuple(probe(models_by_step[step], sample, **arguments) for step in steps)
    )


def residual_stream(depth: int) -> tuple[str, ...]:
    """Paths of a `mesascope` Transformer: the embedded tokens, and the stream after each of its blocks."""
    return ("embedded", *(f"blocks.{i}.resid_post" for i in range(depth)))


def _choose(
    paths: Sequence[str] | None, batch: Batch, activations: Activations, model: Any, to_fit: int
) -> tuple[str, ...]:
    """The paths to be probed, after looking at every shape."""
    if not batch.targets:
        raise ValueError("sample: the batch has no targets.")
    lead = tuple(batch.tokens.shape[:2])
    for name, y in batch.targets.items():
        if np.ndim(y) != 3 or np.shape(y)[:2] != lead:
            raise ValueError(
                f"target {name!r}: expected shape {(*lead, 'width')}, as the tokens have it, got {np.shape(y)}."
            )
    order: list[str] = []

    def seen(model: Any, tokens: Array) -> dict[str, Array]:
        found = activations(model, tokens)
        order.extend(found)
        return dict(found)

    shapes = jax.eval_shape(seen, model, batch.tokens)
    fitting = [path for path in order if shapes[path].ndim == 3 and shapes[path].shape[:2] == lead]
    check_paths(paths or (), shapes)
    for path in paths or ():
        if path not in fitting:
            raise ValueError(
                f"path {path!r}: expected shape {(*lead, 'width')}, got {shapes[path].shape}. Have `activations` bring "
                "it into this shape, for heads by joining them."
            )
    chosen = tuple(fitting if paths is None else paths)
    if not chosen:
        raise ValueError(f"activations: none of {', '.join(order)} has the shape {(*lead, 'width')}.")
    widths = {repr(path): shapes[path].shape[-1] for path in chosen} | {"a token": batch.tokens.shape[-1]}
    for name, width in widths.items():
        if to_fit < 2 * width:
            raise ValueError(
                f"sequences: {name} is {width} wide, and a probe of that rank fits anything to too few sequences. "
                f"Expected at least {4 * width} (half of them to fit, half to score), got {2 * to_fit}."
            )
    return chosen


def _time_first(
    x: Array | np.ndarray, keep: Array | np.ndarray | None
) -> Float[np.ndarray, "time batch width"]:
    """In float64, and zero where nothing counts."""
    x = np.ascontiguousarray(np.swapaxes(np.asarray(x), 0, 1), np.float64)
    return x if keep is None else np.where(np.asarray(keep).T[..., None], x, 0)


def _shuffled(
    y: Float[np.ndarray, "time batch dim"], keep: Array | np.ndarray | None
) -> Float[np.ndarray, "time batch dim"]:
    """Every target at the next sequence that counts."""
    if keep is None:
        return np.roll(y, 1, 1)
    out = np.zeros_like(y)
    for t, kept in enumerate(np.asarray(keep).T):
        at = np.flatnonzero(kept)
        out[t, at] = y[t, np.roll(at, 1)]
    return out


def _by_target(y: Float[np.ndarray, "time batch dim"], parts: np.ndarray) -> np.ndarray:
    """Squared norms: [target, time, batch]."""
    return np.stack([np.einsum("tbi,tbi->tb", part, part) for part in np.split(y, parts[1:], -1)])


# OpenBLAS spreads a larger product over threads that spin while they wait: on cores that others use too that takes a
# hundred times as long as computing it.
_PRODUCT = 350_000


def _moments(x: np.ndarray, y: np.ndarray) -> Float[np.ndarray, "time width dim"]:
    r"""$\sum_b x_b y_b^\top$ at every time."""
    step = max(8, _PRODUCT // (x.shape[-1] * y.shape[-1]))
    starts = range(0, x.shape[1], step)
    return sum(np.swapaxes(x[:, i : i + step], 1, 2) @ y[:, i : i + step] for i in starts)  # pyright: ignore


def _decode(x: np.ndarray, decoder: Float[np.ndarray, "time width dim"]) -> np.ndarray:
    step = max(8, _PRODUCT // (decoder.shape[-2] * decoder.shape[-1]))
    return np.concatenate([x[:, i : i + step] @ decoder for i in range(0, x.shape[1], step)], 1)


def _score(
    rest: Float[np.ndarray, "time batch dim"], parts: np.ndarray
) -> Float[np.ndarray, "batch target time"]:
    return 0.5 * np.moveaxis(_by_target(rest, parts), -1, 0)


def _count(batch: Batch) -> Float[np.ndarray, " time"]:
    """How many sequences count at each time."""
    size, time = batch.tokens.shape[:2]
    return np.full(time, float(size)) if batch.keep is None else np.asarray(batch.keep).sum(0).astype(float)


def _solve(
    gram: Float[np.ndarray, "time width width"], cross: Float[np.ndarray, "time width dim"], ridge: float
) -> Float[np.ndarray, "time width dim"]:
    width = gram.shape[-1]
    mean = np.trace(gram, axis1=1, axis2=2) / width
    # Activations that are all zero have a decoder that is zero.
    rho = np.where(mean > 0, ridge * mean, 1.0)
    return np.linalg.solve(gram + rho[:, None, None] * np.eye(width), cross)


def _residual(
    gram: np.ndarray, cross: np.ndarray, decoder: np.ndarray, squares: np.ndarray, parts: np.ndarray, dim: int
) -> Float[np.ndarray, "target time"]:
    r"""Half of $\sum\lVert y\rVert^2 - 2\langle D, \sum y a^\top\rangle + \langle D, D\sum a a^\top\rangle$."""
    d, c = decoder[..., :dim], cross[..., :dim]
    per_column = np.sum(d * (gram @ d - 2 * c), 1)
    return 0.5 * np.maximum(squares + np.add.reduceat(per_column, parts, -1).T, 0)


def _beats(
    found: Float[np.ndarray, "seed target path time"],
    control: Float[np.ndarray, "other target #path time"],
    difference: Estimate,
    smallest: Float[np.ndarray, "target 1 time"],
) -> Bool[np.ndarray, "target path time"]:
    """Whether errors are lower than a control's, whichever sequences and whichever seeds had been drawn.

    Seeds: a two-sample t-test with pooled variance, which needs only one of the two to have several seeds; of
    logarithms, because errors of different models differ by factors. Sequences: the difference on each sequence, which
    takes away what is hard for both.
    """
    # Below the smallest errors there is nothing but rounding to beat.
    beyond = (difference.interval(1 - 2 * ALPHA)[0] > 0) & (control.mean(0) > smallest)
    with np.errstate(divide="ignore", invalid="ignore"):
        x, y = (np.log(np.maximum(errors, smallest)) for errors in (found, control))
        n, m = x.shape[0], y.shape[0]
        dof = n + m - 2
        if dof > 0:
            pooled = ((n - 1) * _variance(x) + (m - 1) * _variance(y)) / dof
            # The input is no model: it has no seeds to differ in.
            needed = student_t(1 - 2 * ALPHA, dof) * np.sqrt(pooled * (1 / n + (1 / m if m > 1 else 0)))
            beyond = beyond & (y.mean(0) - x.mean(0) > needed)
    return beyond


def _variance(x: np.ndarray) -> np.ndarray:
    return x.var(0, ddof=1) if x.shape[0] > 1 else np.zeros(x.shape[1:])
