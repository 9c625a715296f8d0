r"""Token binding: does a layer bring each token together with the one before it?

Two views of the same question. `attention_maps` averages what queries take from earlier tokens, over many sequences:
what remains does not depend on the data. `sensitivity` differentiates activations by inputs,

$$\Big\lVert\frac{\partial f_t^{(1)}}{\partial s_{t'}}\Big\rVert, \qquad t' \le t,$$

and asks no layer for maps, so that it works for models without attention too.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from mesascope.analysis.results import (
    Activations,
    Estimate,
    Result,
    Running,
    activations_of,
    batches,
    draw_curve,
    draw_tiles,
    drawing,
    reader,
    tiles_size,
    unstack,
)
from mesascope.store import unknown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Tokens = Callable[[PRNGKeyArray, int], Float[Array, "batch time token"]]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMaps(Result):
    r"""Attention averaged over sequences, and how much of it goes how far back.

    Attributes:
        paths: names along the axis "path".
        maps: mean over sequences of $a_{t,t'}$.
        shares: mean over sequences and over $t >$ lag of
            $\lvert a_{t,t-\text{lag}}\rvert / \sum_{t'}\lvert a_{t,t'}\rvert$, for lags 0, 1, …
        best: the largest of these over heads. (Which head that is differs from seed to seed.)
        uniform: what they would be if every token attended to all tokens so far alike.
    """

    paths: tuple[str, ...]
    maps: Float[np.ndarray, "seed path head time input"]
    shares: Float[np.ndarray, "seed path head lag"]
    best: Estimate
    uniform: Float[np.ndarray, " lag"]

    @property
    def attends(self) -> Bool[np.ndarray, "path lag"]:
        """Whether a head gives one token more than all others together, whichever sequences and seeds were drawn."""
        return self.best.above(0.5)

    @property
    def binds(self) -> Bool[np.ndarray, " path"]:
        """Whether a layer puts t-1 into token t; t itself is in its residual stream."""
        return self.attends[:, 1]

    def verdict(self) -> str:
        """A line for each path."""
        lines = []
        for path, binds, share in zip(self.paths, self.binds, self.best.mean, strict=True):
            said = "binds t and t-1" if binds else "does not bind t and t-1"
            lines.append(f"{path}: {said}; the best heads give {share[0]:.2f} to t and {share[1]:.2f} to t-1")
        return "\n".join(lines)

    def plot(self, path: str | None = None, *, seed: int = 0, ax: "Axes | None" = None) -> "Axes":
        """The averaged map of every head of a layer, the first unless named, of one model."""
        if path is not None and path not in self.paths:
            raise KeyError(unknown("path", path, self.paths))
        maps = self.maps[seed, 0 if path is None else self.paths.index(path)]
        with drawing(ax, size=tiles_size(1, len(maps))) as ax:
            draw_tiles(
                ax, maps[None], rows=[""], columns=[f"head {h}" for h in range(len(maps))],
                signed=bool((maps < 0).any()), label="attention",
            )  # fmt: skip
            ax.set(xlabel="attends to t'", ylabel="time t", title=path or self.paths[0])
        return ax


def attention_maps(
    models: PyTree,
    sample: Tokens,
    *,
    activations: Activations = activations_of,
    paths: Sequence[str] = ("blocks.0.mixer.attention",),
    lags: int = 4,
    sequences: int = 2048,
    batch_size: int = 128,
    key: PRNGKeyArray,
) -> AttentionMaps:
    """Average attention over sequences.

    Args:
        models: with a seed axis.
        sample: draws tokens.
        activations: of a model and tokens, arrays by path.
        paths: where the maps are, each `[batch, head, time, time]` with rows for queries. Layers may differ in
            nothing but weights.
        lags: how many shares, from lag 0 on; at least 2.
        sequences: how many.
        key: for the sequences.
    """
    if lags < 2:
        raise ValueError(f"lags: expected at least 2, those of t and t-1, got {lags}.")
    everyone, read = unstack(models), reader(activations, tuple(paths))
    total: Any = 0.0
    shares = [Running() for _ in everyone]
    time = 0
    for i, size in enumerate(batches(sequences, batch_size)):
        tokens = sample(jax.random.fold_in(key, i), size)
        seen = [read(model, tokens) for model in everyone]
        found = []
        for maps in seen:
            stacked = [np.asarray(maps[path]) for path in paths]
            for path, a in zip(paths, stacked, strict=True):
                if a.ndim != 4 or a.shape[0] != size or a.shape[-1] != a.shape[-2]:
                    raise ValueError(
                        f"path {path!r}: expected attention of shape {(size, 'head', 'time', 'time')}, got {a.shape}."
                    )
            found.append(np.stack(stacked, 1))
        a = np.stack(found)
        time = a.shape[-1]
        total = total + a.sum(1, dtype=np.float64)
        for running, of_seed in zip(shares, _shares(np.abs(a), lags), strict=True):
            running.add(of_seed[None])
    found = [running.estimate("path", "head", "lag") for running in shares]
    values = np.stack([estimate.values[0] for estimate in found])
    errors = np.stack([estimate.sequences_error for estimate in found])
    at = values.argmax(2)[:, :, None]
    best = Estimate(
        values=np.take_along_axis(values, at, 2)[:, :, 0],
        # Not less than that of their mean.
        sequences_error=np.take_along_axis(errors, at, 2)[:, :, 0].mean(0),
        sequences=sequences,
        axes=("seed", "path", "lag"),
    )
    uniform = np.array([np.mean(1 / np.arange(lag + 1, time + 1)) for lag in range(values.shape[-1])])
    return AttentionMaps(
        paths=tuple(paths), maps=total / sequences, shares=values, best=best, uniform=uniform
    )


def _shares(weights: Float[np.ndarray, "*lead time time"], lags: int) -> Float[np.ndarray, "*lead lag"]:
    rows = weights.sum(-1)
    rows = np.where(rows > 0, rows, 1)
    columns = []
    for lag in range(min(lags, weights.shape[-1])):
        diagonal = np.diagonal(weights, -lag, -2, -1)
        columns.append(np.mean(diagonal / rows[..., lag:], -1))
    return np.stack(columns, -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sensitivity(Result):
    r"""How much activations at some times depend on each input.

    Attributes:
        times: indices t along the axis "time".
        frobenius: mean over sequences of $\lVert\partial f_t/\partial s_{t'}\rVert_F$.
        by_entry: mean over sequences and entries c of $\lVert\partial f_{t,c}/\partial s_{t'}\rVert$ (released code).
        lead: of $s_{t-1}$ over all tokens before it together, as a part of the sensitivity to all inputs; mean over
            times that have three inputs or more, NaN where there are none.
    """

    times: tuple[int, ...]
    frobenius: Estimate
    by_entry: Estimate
    lead: Estimate

    @property
    def binds(self) -> bool:
        """Whether activations hold t-1 next to t: it leads by a tenth, whichever sequences and seeds were drawn."""
        return bool(self.lead.above(0.1))

    @property
    def shares(self) -> Estimate:
        """`frobenius` divided by its sum over inputs: what part of a time's sensitivity each input has. Intervals take
        the sum as known."""
        total = self.frobenius.values.sum(-1, keepdims=True)
        total = np.where(total > 0, total, 1)
        return dataclasses.replace(
            self.frobenius,
            values=self.frobenius.values / total,
            sequences_error=self.frobenius.sequences_error / total.mean(0),
        )

    def plot(self, *, ax: "Axes | None" = None) -> "Axes":
        """A line for each time, by input."""
        with drawing(ax) as ax:
            inputs = np.arange(1, self.frobenius.values.shape[-1] + 1)
            for i, time in enumerate(self.times):
                upto = slice(0, time + 1)
                draw_curve(ax, inputs[upto], self.frobenius[i, upto], label=f"t = {time + 1}")
            ax.set(xlabel="input t'", ylabel="sensitivity", ylim=(0, None))
            ax.legend()
        return ax


def sensitivity(
    models: PyTree,
    sample: Tokens,
    *,
    activations: Activations = activations_of,
    path: str = "blocks.0.resid_post",
    times: Sequence[int] | None = None,
    sequences: int = 64,
    batch_size: int = 16,
    key: PRNGKeyArray,
) -> Sensitivity:
    r"""$\lVert\partial f_t/\partial s_{t'}\rVert$ for all $t' \le t$, by vector-Jacobian products side by side.

    Args:
        models: with a seed axis.
        sample: draws what is differentiated by. For tokens built from observations, draw these and have `activations`
            build the tokens.
        activations: of a model and tokens, arrays by path.
        path: f, `[batch, time, width]`.
        times: indices t; None for all. Negative ones count from the end.
        sequences: how many.
        key: for the sequences.
    """
    models = jax.device_put(models)
    read = reader(activations, (path,))
    first = sample(jax.random.fold_in(key, 0), batches(sequences, batch_size)[0])
    one = jax.eval_shape(lambda models: unstack(models)[0], models)
    length, shape = first.shape[1], jax.eval_shape(read, one, first)[path].shape
    if len(shape) != 3 or shape[1] != length:
        raise ValueError(f"path {path!r}: expected shape {(*first.shape[:2], 'width')}, got {shape}.")
    asked = range(length) if times is None else times
    for t in asked:
        if not -length <= t < length:
            raise ValueError(f"times: expected indices of {length} positions, got {t}.")
    chosen = tuple(t % length for t in asked)
    norms = _norms(activations, path)
    frobenius, by_entry, lead = Running(), Running(), Running()
    for i, size in enumerate(batches(sequences, batch_size)):
        inputs = first if i == 0 else sample(jax.random.fold_in(key, i), size)
        norm, of_entries = map(np.asarray, norms(models, inputs, jnp.asarray(chosen, jnp.int32)))
        frobenius.add(norm)
        by_entry.add(of_entries)
        lead.add(_lead(norm, chosen))
    return Sensitivity(
        times=chosen,
        frobenius=frobenius.estimate("time", "input"),
        by_entry=by_entry.estimate("time", "input"),
        lead=lead.estimate(),
    )


def _lead(
    norm: Float[np.ndarray, "seed batch time input"], times: Sequence[int]
) -> Float[np.ndarray, "seed batch"]:
    leads = [
        (norm[:, :, i, t - 1] - norm[:, :, i, : t - 1].sum(-1)) / np.maximum(norm[:, :, i].sum(-1), 1e-300)
        for i, t in enumerate(times)
        if t >= 2
    ]
    return np.mean(leads, 0) if leads else np.full(norm.shape[:2], np.nan)


@lru_cache(maxsize=8)
def _norms(activations: Activations, path: str) -> Callable[[Any, Array, Array], tuple[Array, Array]]:
    def at_all_times(model: Any, inputs: Float[Array, "time token"]) -> Float[Array, "time width"]:
        return activations(model, inputs[None])[path][0]

    def one_sequence(model: Any, inputs: Array, times: Array) -> tuple[Array, Array]:
        f, pull_back = jax.vjp(lambda x: at_all_times(model, x), inputs)

        def at(t: Array) -> tuple[Array, Array]:
            # One product per entry of the activation, all entries at once; times one after the other, for memory.
            def entry(unit: Array) -> Array:
                return pull_back(jnp.zeros_like(f).at[t].set(unit))[0]

            jacobian = jax.vmap(entry)(jnp.eye(f.shape[-1], dtype=f.dtype))
            squares = jnp.sum(jacobian**2, -1)
            return jnp.sqrt(jnp.sum(squares, 0)), jnp.mean(jnp.sqrt(squares), 0)

        return jax.lax.map(at, times)

    # All models in one program, one after the other: a program for each would be handed its weights every time.
    @jax.jit
    def all_models(models: Any, inputs: Array, times: Array) -> tuple[Array, Array]:
        return jax.lax.map(
            lambda model: jax.vmap(one_sequence, (None, 0, None))(model, inputs, times), models
        )

    return all_models
