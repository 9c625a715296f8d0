r"""Change one thing inside a model and see what it does: to losses, and to predictions.

A case is a set of edits by path, as `trace(model, tokens, edit=...)` takes them. Its effect is

$$\Delta_j = L_j^{\text{edited}} - L_j, \qquad
  d_t = \frac{\mathbb E\lVert f_t^{\text{edited}} - f_t\rVert^2}{\mathbb E\lVert f_t\rVert^2}$$

on the same sequences j. Loss alone can stay where it is while predictions change; both are needed.

    cases = {"head 2 of layer 1": ablate("blocks.0.mixer.heads", head=1),
             "layer 3": ablate("blocks.2.mixer.out")}
    effects(models, config.examples, cases, key=key)

And `solver_from` asks whether the layers from ℓ on do what least squares would: what a linear decoder finds of $s_t$
and $s_{t-1}$ in the residual stream before layer ℓ is handed to exact least squares, whose predictions take the model's
place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from mesascope.analysis.linearize import Sample
from mesascope.analysis.results import (
    Estimate,
    Result,
    Trace,
    check_paths,
    draw_curve,
    draw_points,
    drawing,
    loss_of,
    relative_squares,
    rows_size,
    seeds_of,
)
from mesascope.models import Transformer
from mesascope.ops import mesa_attention
from mesascope.tasks import Examples
from mesascope.tasks.tokens import delayed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Edits = dict[str, Callable[[Array], Array]]
Case = Callable[[PyTree, Examples, Mapping[str, Array]], Edits]
"""From a model, the sequences and its activations on them to edits."""


def ablate(path: str, *, head: int | None = None, to: str = "zero") -> Case:
    """An activation, or one head's output, replaced by zero or by its mean over the sequences at each time.

    Args:
        head: which, where the activation is [..., head, time, value]; None for all of it.
        to: "zero" or "mean".
    """
    if to not in ("zero", "mean"):
        raise ValueError(f"to: expected 'zero' or 'mean', got {to!r}.")

    def edit(x: Array) -> Array:
        mean = jnp.mean(x, 0, keepdims=True)
        return _put(path, x, jnp.zeros_like(x) if to == "zero" else jnp.broadcast_to(mean, x.shape), head)

    return lambda model, examples, seen: {path: edit}


def patch(path: str, *, head: int | None = None) -> Case:
    """An activation, or one head's output, taken from another sequence: that of the neighbor in the batch.

    Everything is then as natural as can be, but belongs to another sequence. (What all sequences share, such as
    attention by position alone, is not changed by it.)
    """
    return lambda model, examples, seen: {path: lambda x: _put(path, x, jnp.roll(x, 1, 0), head)}


def replace(
    path: str,
    by: Callable[[Mapping[str, Array], Examples], Array],
    *,
    reads: Sequence[str],
    head: int | None = None,
) -> Case:
    """An activation, or one head's output, replaced by what theory says it should be.

    Args:
        by: from activations before it, as they are in the edited model, to this one; for one head [..., time, value].
        reads: the paths that `by` needs.
        head: as in `ablate`.
    """

    def case(model: PyTree, examples: Examples, seen: Mapping[str, Array]) -> Edits:
        noticed: dict[str, Array] = {}

        def notice(name: str) -> Callable[[Array], Array]:
            def keep(x: Array) -> Array:
                noticed[name] = x
                return x

            return keep

        def put(x: Array) -> Array:
            missing = [name for name in reads if name not in noticed]
            if missing:
                raise ValueError(
                    f"reads: {', '.join(missing)} come after {path}; expected activations before it."
                )
            new = by(noticed, examples)
            expected = x.shape if head is None else (*x.shape[:-3], *x.shape[-2:])
            if new.shape != expected:
                raise ValueError(f"by: {path} has shape {expected}, got {new.shape}.")
            new = new.astype(x.dtype)
            return _put(path, x, new if head is None else new[..., None, :, :], head)

        return {name: notice(name) for name in reads} | {path: put}

    return case


def _put(path: str, x: Array, new: Array, head: int | None) -> Array:
    """What is new, or x in which one head is new."""
    if head is None:
        return new
    heads = x.shape[-3] if x.ndim > 3 else 0
    if not -heads <= head < heads:
        raise ValueError(f"head: {path} has {heads}, counted from 0, got {head}.")
    return jnp.where((jnp.arange(heads) == head % heads)[:, None, None], new, x)


@dataclass(frozen=True, kw_only=True, eq=False)
class Effects(Result):
    """What each case does.

    Attributes:
        names: of the cases.
        loss: of the model as it is.
        edited: with each case.
        distance: of predictions from those of the model, squared and over their squares; not a number at times when
            the model predicts nothing.
    """

    names: tuple[str, ...]
    loss: Float[np.ndarray, "seed sequence"]
    edited: Float[np.ndarray, "seed sequence case"]
    distance: Estimate

    @property
    def difference(self) -> Estimate:
        """Loss with each case less that without, by case."""
        return Estimate.of(self.edited - self.loss[..., None], "case")

    @property
    def harmful(self) -> Bool[np.ndarray, " case"]:
        """Which cases raise the loss, whichever sequences and seeds had been drawn: the model needs what they take."""
        return self.difference.above(0)

    def plot(self, *, ax: "Axes | None" = None) -> "Axes":
        """Differences of losses, by case."""
        with drawing(ax, size=rows_size(len(self.names))) as ax:
            draw_points(ax, self.names, self.difference)
            ax.set_xlabel("loss less that of the model")
        return ax


def effects(
    models: PyTree,
    sample: Sample,
    cases: Mapping[str, Case],
    *,
    trace: Trace = Transformer.trace,
    sequences: int = 512,
    batch_size: int = 128,
    key: PRNGKeyArray,
) -> Effects:
    """Run every case on the same fresh sequences.

    Args:
        models: with a seed axis.
        sample: fresh sequences, `sample(key, batch_size)`.
        cases: by name.
        trace: `trace(model, tokens, edit={path: function})`, predictions and activations by path.
    """
    seeds_of(models)
    if not cases:
        raise ValueError("cases: expected at least one.")

    @jax.jit
    def batch(key: PRNGKeyArray) -> tuple[Array, Array, Array, Array]:
        examples = sample(key, batch_size)

        def one(model: PyTree) -> tuple[Array, Array, Array, Array]:
            base, seen = trace(model, examples.tokens)
            losses, distances = [], []
            for case in cases.values():
                edits = case(model, examples, seen)
                check_paths(list(edits), seen)
                changed, _ = trace(model, examples.tokens, edit=edits)
                losses.append(loss_of(changed, examples))
                distances.append(jnp.sum((changed - base) ** 2, -1))
            power = jnp.sum(base**2, -1)
            return loss_of(base, examples), jnp.stack(losses, -1), jnp.stack(distances, 1), power

        return jax.vmap(one)(models)

    keys = jax.random.split(key, -(-sequences // batch_size))
    parts = zip(*(jax.tree.map(np.asarray, batch(k)) for k in keys), strict=True)
    loss, edited, far, power = (np.concatenate(part, 1)[:, :sequences] for part in parts)
    distance = relative_squares(far, power[:, :, None], "case", "time")
    return Effects(names=tuple(cases), loss=loss, edited=edited, distance=distance)


@dataclass(frozen=True, kw_only=True, eq=False)
class SolverSwap(Result):
    """Layers from some depth on replaced by exact least squares.

    Attributes:
        paths: the residual stream from which the solver reads, by depth.
        lam: λ of the solver, which served best on the last batch that the decoders were fitted to.
        unexplained: by the decoders of $s_t$ and $s_{t-1}$, on other sequences (1 is no better than a constant zero).
        loss: of the models.
        solver: of least squares on the observations themselves.
        swapped: of least squares on what was decoded.
        distance: of predictions from those of the model, squared and over their squares.
        control: the same distance for the solver that reads the decoded sequence of the neighbor in the batch.
        tolerance: up to which distance two predictions count as the same.
    """

    paths: tuple[str, ...]
    lam: Float[np.ndarray, "seed depth"]
    unexplained: Float[np.ndarray, "seed depth decoder"]
    loss: Float[np.ndarray, "seed sequence"]
    solver: Float[np.ndarray, " sequence"]
    swapped: Float[np.ndarray, "seed sequence depth"]
    distance: Estimate
    control: Estimate
    tolerance: float

    @property
    def difference(self) -> Estimate:
        """Loss with the solver less that of the model, by depth: below zero, the solver does better."""
        return Estimate.of(self.swapped - self.loss[..., None], "depth")

    @property
    def equal(self) -> Bool[np.ndarray, "depth time"]:
        """Where the solver predicts what the model does up to the tolerance, and the control does not (99%)."""
        return self.distance.below(self.tolerance) & self.control.above(self.tolerance)

    def plot(self, *, ax: "Axes | None" = None) -> "Axes":
        """Loss by the depth from which on layers are replaced."""
        with drawing(ax) as ax:
            depth = np.arange(len(self.paths))
            draw_curve(ax, depth, Estimate.of(self.swapped, "depth"), label="solver from here on", marker="o")
            ax.axhline(self.loss.mean(), color="black", label="model")
            ax.axhline(self.solver.mean(), color="black", linestyle="--", label="solver on observations")
            ax.set_xticks(depth, self.paths, rotation=45, ha="right")
            ax.set(ylabel="loss", ylim=(0, None))
            ax.legend()
        return ax


LAMS = tuple(10.0 ** np.arange(-1, 4.5, 0.5))


def solver_from(
    models: PyTree,
    sample: Sample,
    paths: Sequence[str],
    *,
    trace: Trace = Transformer.trace,
    observation: Callable[[Examples], Float[Array, "batch time obs"]] | None = None,
    lams: Sequence[float] = LAMS,
    tolerance: float = 0.05,
    sequences: int = 512,
    batch_size: int = 128,
    key: PRNGKeyArray,
) -> SolverSwap:
    r"""Let exact least squares go on from the residual stream, at every path.

    Decoders $D_0, D_1$ from the stream $h_t$ to $s_t$ and $s_{t-1}$ are fitted by ridge regression, one of each for all
    times, to `sequences` sequences; on as many others, with $\hat s_t = D_0 h_t$ and $\hat k_t = D_1 h_t$,

    $$\hat s_{t+1} = \Big(\sum_{i\le t}\hat s_i\hat k_i^\top\Big)\Big(\sum_{i\le t}\hat k_i\hat k_i^\top
                     + \tfrac1\lambda I\Big)^{-1}\hat s_t .$$

    Args:
        paths: of the residual stream.
        trace: as in `effects`; nothing is edited.
        observation: $s_t$ from the sequences; None: the tokens themselves.
        lams: to choose λ from.
        tolerance: see `SolverSwap`.
        sequences: to fit, and as many to measure; whole batches, so perhaps a few more.
    """
    seeds_of(models)
    fit_key, test_key = jax.random.split(key)
    count = -(-sequences // batch_size)

    @jax.jit
    def record(key: PRNGKeyArray):
        examples = sample(key, batch_size)

        def one(model: PyTree) -> tuple[Array, Array]:
            predictions, seen = trace(model, examples.tokens)
            check_paths(paths, seen)
            return predictions[..., : examples.targets.shape[-1]], jnp.stack([seen[path] for path in paths])

        now = examples.tokens if observation is None else observation(examples)
        if now.shape != examples.targets.shape:
            raise ValueError(
                f"observation: expected s_t for every target, {examples.targets.shape}, got {now.shape}. Say where it "
                "stands: observation=lambda examples: examples.tokens[..., 10:20]."
            )
        return examples, now, *jax.vmap(one)(models)

    def records(key: PRNGKeyArray):
        return (jax.tree.map(np.asarray, record(k)) for k in jax.random.split(key, count))

    size = jax.eval_shape(record, key)[3].shape[-1]
    if count * batch_size < 2 * size:
        raise ValueError(
            f"sequences: decoders of {size} inputs need at least {2 * size}, got {count * batch_size}."
        )
    # Normal equations of all decoders, batch by batch.
    gram = cross = np.zeros(())
    now = before = stream = np.zeros(())
    for _, now, _, stream in records(fit_key):
        before = _before(now)
        wanted = np.concatenate([now, before], -1).astype(np.float64)
        h = stream.astype(np.float64)
        gram = gram + np.einsum("slbti,slbtj->slij", h, h, optimize=True)
        cross = cross + np.einsum("slbti,btj->slij", h, wanted, optimize=True)
    ridge = 1e-6 * np.trace(gram, axis1=-2, axis2=-1)[..., None, None] / size
    decoders = np.linalg.solve(gram + (ridge + 1e-30) * np.eye(size), cross)

    def decode(stream: Any) -> tuple[np.ndarray, np.ndarray]:
        both = np.einsum("slbti,slij->slbtj", stream, decoders.astype(stream.dtype), optimize=True)
        query, previous = np.split(both, 2, -1)
        return query, previous

    # λ by seed and depth, and that of the observations themselves, on the last of these batches.
    lam = _best_lam(*decode(stream), now, lams)
    exact = float(_best_lam(now, before, now, lams))

    loss, swapped, solver, far, wrong, power, left, total = ([] for _ in range(8))
    for examples, now, predictions, stream in records(test_key):
        query, previous = decode(stream)
        per_depth = jnp.asarray(lam, query.dtype)[..., None, None]
        guess = np.asarray(_least_squares(query, previous, per_depth))
        before = _before(now)
        own = np.asarray(_least_squares(now, before, jnp.full((1, 1), exact, now.dtype)))
        loss.append(np.asarray(loss_of(predictions, examples)))
        swapped.append(np.moveaxis(np.asarray(loss_of(guess, examples)), 1, 2))
        solver.append(np.asarray(loss_of(own, examples)))
        base, guess = predictions[:, :, None], np.moveaxis(guess, 1, 2)
        far.append(np.sum((guess - base) ** 2, -1))
        wrong.append(np.sum((np.roll(guess, 1, 1) - base) ** 2, -1))
        power.append(np.sum(base**2, -1))
        left.append(
            np.stack([np.sum((query - now) ** 2, (2, 3, 4)), np.sum((previous - before) ** 2, (2, 3, 4))], -1)
        )
        total.append(np.array([np.sum(now**2), np.sum(before**2)]))
    squares = np.concatenate(power, 1)
    return SolverSwap(
        paths=tuple(paths), lam=lam, unexplained=np.sum(left, 0) / np.sum(total, 0),
        loss=np.concatenate(loss, 1), solver=np.concatenate(solver), swapped=np.concatenate(swapped, 1),
        distance=relative_squares(np.concatenate(far, 1), squares, "depth", "time"),
        control=relative_squares(np.concatenate(wrong, 1), squares, "depth", "time"), tolerance=tolerance,
    )  # fmt: skip


def _before(now: Float[np.ndarray, "batch time obs"]) -> Float[np.ndarray, "batch time obs"]:
    return np.asarray(delayed(jnp.asarray(now), 1))


def _best_lam(query: np.ndarray, previous: np.ndarray, now: np.ndarray, lams: Sequence[float]) -> np.ndarray:
    """That with which pairs (previous, query) predict the next observation best, for each leading axis of theirs."""
    errors = []
    for lam in lams:
        spread = jnp.full((*query.shape[:-3], 1, 1), lam, query.dtype)
        guess = np.asarray(_least_squares(query, previous, spread))[..., :-1, :]
        errors.append(np.mean((guess - now[:, 1:]) ** 2, (-1, -2, -3)))
    return np.asarray(np.take(lams, np.argmin(np.where(np.isfinite(errors), errors, np.inf), 0)))


@jax.jit
def _least_squares(queries: Any, previous: Any, lam: Any) -> Any:
    """Predictions from pairs (previous, query)."""
    return mesa_attention(queries, previous, queries, lam)
