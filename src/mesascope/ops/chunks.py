"""Cutting time into chunks: padding, forgetting factors and restarts, shared by every chunk-parallel op."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mesascope.ops.gradients import with_closed_form


class Chunks(NamedTuple):
    """Where the tokens of each chunk stand with respect to decay and to segment boundaries.

    A *run* is a maximal stretch of equal segment ids; the state starts afresh at each run. With
    $c_t$ the sum of log decays since the later of (start of the chunk, start of the run):

    Attributes:
        decay: $c_t \\le 0$, or None without forgetting.
        total: $c$ at the chunk's last token, or None without forgetting.
        causal: may token t (row) see token i (column): i ≤ t and of the same run.
        carried: does the token continue the run that the chunk inherited; None without segments.
        last: does it belong to the run that the chunk hands on; None without segments.
        through: are these the same run; None without segments.
    """

    decay: Float[Array, "batch chunk size"] | None
    total: Float[Array, "batch chunk"] | None
    causal: Bool[Array, "*batch_chunk size size"]
    carried: Bool[Array, "batch chunk size"] | None
    last: Bool[Array, "batch chunk size"] | None
    through: Bool[Array, "batch chunk"] | None

    def step(self, like: Float[Array, "batch chunk ..."]) -> Float[Array, "batch chunk"]:
        """What a chunk multiplies the state it inherited with: e^total, or 0 where a run ended."""
        factor = jnp.ones((), like.dtype) if self.total is None else jnp.exp(self.total)
        factor = factor if self.through is None else jnp.where(self.through, factor, 0.0)
        return jnp.broadcast_to(factor, like.shape[:2])


def split(array: Array, size: int, *, mode: str = "constant") -> Array:
    """[batch, time, ...] → [batch, chunk, size, ...], padded at the end with zeros (or the last entry)."""
    batch, time = array.shape[:2]
    count = -(-time // size)
    if count * size != time:
        pad = [(0, 0), (0, count * size - time)] + [(0, 0)] * (array.ndim - 2)
        array = jnp.pad(array, pad, mode=mode)
    return array.reshape(batch, count, size, *array.shape[2:])


def join(chunks: Array, time: int) -> Array:
    """Inverse of `split`."""
    batch, count, size = chunks.shape[:3]
    return chunks.reshape(batch, count * size, *chunks.shape[3:])[:, :time]


def describe(
    log_decay: Float[Array, "batch time"] | None,
    runs: Int[Array, "batch time"] | None,
    size: int,
) -> Chunks:
    """Lay the decay and the run numbers (see `run_numbers`) of whole sequences over chunks of `size`."""
    triangle = jnp.tril(jnp.ones((size, size), bool))
    g = None if log_decay is None else split(log_decay, size)
    decay = None if g is None else jnp.cumsum(g, axis=-1)
    if runs is None:
        total = None if decay is None else decay[..., -1]
        return Chunks(decay, total, triangle, None, None, None)

    run = split(runs, size, mode="edge")
    # The first chunk inherits run 0, the one that an incoming state belongs to.
    inherited = jnp.pad(run[:, :-1, -1:], ((0, 0), (1, 0), (0, 0)))
    if g is not None and decay is not None:
        restarts = run != jnp.concatenate([inherited, run[..., :-1]], -1)
        # c never rises, so the latest restart has the lowest offset so far.
        decay = decay - lax.cummin(jnp.where(restarts, decay - g, 0.0), axis=2)
    return Chunks(
        decay=decay,
        total=None if decay is None else decay[..., -1],
        causal=triangle & (run[..., :, None] == run[..., None, :]),
        carried=run == inherited,
        last=run == run[..., -1:],
        through=run[..., -1] == inherited[..., 0],
    )


def run_numbers(segment_ids: Int[Array, "batch time"]) -> Int[Array, "batch time"]:
    """Number the stretches of equal ids 0, 1, 2, …, so that an id used again later does not join two."""
    change = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(jnp.cumsum(change, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def decay_since_start(
    log_decay: Float[Array, "batch time"], runs: Int[Array, "batch time"] | None
) -> Float[Array, "batch time"]:
    """The sum of log decays since the run began."""
    decay = describe(log_decay, runs, log_decay.shape[1]).decay
    assert decay is not None
    return decay[:, 0]


def sum_to_end(
    summand: Float[Array, "batch time"], runs: Int[Array, "batch time"] | None, end: Float[Array, " batch"]
) -> Float[Array, "batch time"]:
    """At each time, the sum over the rest of its run, plus `end` in the last run."""
    summand = summand.at[:, -1].add(end)
    if runs is None:
        return jnp.flip(jnp.cumsum(jnp.flip(summand, 1), 1), 1)
    keep_going = jnp.pad(runs[:, 1:] == runs[:, :-1], ((0, 0), (0, 1))).astype(summand.dtype)
    flipped = (jnp.flip(keep_going, 1), jnp.flip(summand, 1))
    sums = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), flipped, axis=1)[1]
    return jnp.flip(sums, 1)


def keep(mask: Bool[Array, "..."] | None, array: Array) -> Array:
    """Zero the rows of `array` where `mask` (over all axes but the last) is false."""
    return array if mask is None else jnp.where(mask[..., None], array, jnp.zeros((), array.dtype))


def scan_chunks(body: Callable, state: Any, chunks: Any, *, reverse: bool = False) -> tuple[Any, Any]:
    """`lax.scan` along axis 1 of [batch, chunk, ...] arrays, reading and writing in place.

    (A scan along the leading axis would first copy every array into another order, and back.)
    """
    count = jax.tree.leaves(chunks)[0].shape[1]

    def at(i: Array | int) -> Any:
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 1, keepdims=False), chunks)

    def step(j: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        i = count - 1 - j if reverse else j
        state, outputs = carry
        state, output = body(state, at(i))
        return state, jax.tree.map(
            lambda whole, part: lax.dynamic_update_index_in_dim(whole, part, i, 1), outputs, output
        )

    _, shapes = jax.eval_shape(body, state, jax.eval_shape(at, 0))
    outputs = jax.tree.map(lambda s: jnp.zeros((s.shape[0], count, *s.shape[1:]), s.dtype), shapes)
    return lax.fori_loop(0, count, step, (state, outputs))


def _recurrence(
    step: Float[Array, "batch chunk"],
    update: Float[Array, "batch chunk rows columns"],
    initial: Float[Array, "batch rows columns"],
    reverse: bool = False,
    parallel: bool = False,
) -> tuple[Float[Array, "batch chunk rows columns"], Float[Array, "batch rows columns"]]:
    """$s_{c+1} = a_c s_c + u_c$ over chunks, for matrices s and scalars a.

    Returns the state *before* each chunk (in the direction walked) and the state after all of them.
    `parallel` does it in logarithmic depth instead of a loop. Its gradient is the same recurrence walked
    the other way.
    """
    if parallel:
        factor = step[..., None, None]
        if reverse:
            factor, update = jnp.flip(factor, 1), jnp.flip(update, 1)
        update = jnp.concatenate([initial[:, None], update], 1)
        factor = jnp.concatenate([jnp.ones_like(factor[:, :1]), factor], 1)
        _, states = lax.associative_scan(
            lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (factor, update), axis=1
        )
        before = states[:, :-1]
        return jnp.flip(before, 1) if reverse else before, states[:, -1]
    if update.shape[1] == 1:
        return initial[:, None], step[:, 0, None, None] * initial + update[:, 0]

    def body(state: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        return x[0][:, None, None] * state + x[1], state

    final, before = scan_chunks(body, initial, (step, update), reverse=reverse)
    return before, final


def _recurrence_forward(step, update, initial, reverse, parallel):
    before, final = recurrence(step, update, initial, reverse, parallel)
    return (before, final), (step, before)


def _recurrence_backward(reverse, parallel, residuals, cotangents):
    step, before = residuals
    before_bar, final_bar = cotangents
    # s̄ after chunk c is what the chunks beyond it send back, plus what was read there.
    after_bar, initial_bar = recurrence(step, before_bar, final_bar, not reverse, parallel)
    return jnp.sum(after_bar * before, (-1, -2)), after_bar, initial_bar


recurrence = with_closed_form(_recurrence, _recurrence_forward, _recurrence_backward, static=(3, 4))
