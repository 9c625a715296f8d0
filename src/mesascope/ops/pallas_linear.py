r"""Causal linear attention and the delta rule as kernels: a program walks the chunks of a head, for some columns of the
values.

    o_t = Σ_{i ≤ t} (q_t · k_i) v_i
    ∂q_t = Σ_{i ≤ t} (ō_t · v_i) k_i        ∂k_i = Σ_{t ≥ i} (v_i · ō_t) q_t        ∂v_i = Σ_{t ≥ i} (k_i · q_t) ō_t

So gradients are the same operation: of (ō, v, k), and backwards in time of (v, ō, q) and (k, q, ō). Nothing is kept for
them but what was given. The delta rule is linear attention of (q, β k, u), where with a = k and b = β k

    u_t = v_t - Σ_{i < t} (a_t · b_i) u_i        ∂v_i = y_i = ū_i - Σ_{t > i} (b_i · a_t) y_t
    ∂a_t = -Σ_{i < t} (y_t · u_i) b_i            ∂b_i = -Σ_{t > i} (u_i · y_t) a_t

are the same walk again: a chunk's own terms, a unit triangular matrix, are inverted beforehand, all chunks at once.
The state, Σ k_i v_iᵀ so far, lies in memory that stays close: registers cannot hold it too.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mesascope.ops.gradients import with_closed_form
from mesascope.ops.kernels import (
    barrier,
    call_by_block,
    dot,
    indices,
    load,
    loop,
    loop_between,
    padded,
    store,
)
from mesascope.ops.pallas_chunks import CHUNK, COLUMNS, NARROW, TILE, each, exact, total


def _chunks(time: int) -> tuple[int, int]:
    """How many of how many tokens."""
    size = min(CHUNK, padded(time))
    return -(-time // size), size


def _within(ref: Any) -> tuple[int, int] | None:
    """The shape of an array, if tiles go beyond it."""
    time, width = ref.shape
    return None if time % _chunks(time)[1] == 0 and width == padded(width) else (time, width)


def _walk(backwards: bool, strictly: bool, refs: dict[str, Any], block: Any) -> None:
    """Some columns of all outputs of a head; where `inverse` is given, of those that are their own values."""
    state, solves = refs["new_state"], "inverse" in refs
    values = refs["new_out" if solves else "v"]
    (count, size), tile = _chunks(len(refs["q"])), state.shape[0]
    width = min(COLUMNS, state.shape[1])
    columns = block * width + indices(width)
    i, j = indices(size)[:, None], indices(size)[None, :]
    earlier = i < j if backwards else i > j
    seen = earlier if strictly else earlier | (i == j)

    def read(ref: Any, start: Any, columns: Array, tokens: Array | None = None) -> Array:
        return load(ref, start + (indices(size) if tokens is None else tokens), columns, _within(ref))

    if count > 1:
        each(tile, lambda _, p: store(state, p, columns, None, jnp.zeros((len(p), width), state.dtype)))

    def step(index: Any, carry: Any) -> Any:
        number = count - 1 - index if backwards else index
        start = number * size

        def of_state(p: Array) -> Array:
            return exact(read(refs["q"], start, p), load(state, p, columns))

        def score(p: Array) -> Array:
            return exact(read(refs["q"], start, p), read(refs["k"], start, p), (1, 1))

        def add(_: Any, p: Array) -> None:
            def term(tokens: Array) -> Array:
                return exact(read(refs["k"], start, p, tokens), read(values, start, columns, tokens), (0, 0))

            met = total(size, term, width=NARROW)
            barrier()
            store(state, p, columns, None, load(state, p, columns) + met)

        barrier()
        before = total(tile, of_state, width=NARROW) if count > 1 else 0.0
        barrier()
        if solves:
            inverse = load(refs["inverse"], indices(size), indices(size), number=number)
            out = exact(inverse, read(refs["v"], start, columns) - before, (0 if backwards else 1, 0))
        else:
            scores = jnp.where(seen, total(tile, score, width=NARROW), 0.0)
            out = before + exact(scores, read(refs["v"], start, columns))
        store(refs["new_out"], start + indices(size), columns, _within(refs["new_out"]), out)
        if count > 1:
            barrier()
            each(tile, add)
        return carry

    loop(count, step, 0)


def _columns(backwards: bool, strictly: bool, q: Array, k: Array, v: Array, inverse: Array | None) -> Array:
    tiles = padded(q.shape[-1]), padded(v.shape[-1])
    shapes = dict(out=v.shape, state=(len(q), *tiles))
    outputs = {name: jax.ShapeDtypeStruct(shape, v.dtype) for name, shape in shapes.items()}
    kernel, blocks = partial(_walk, backwards, strictly), max(1, tiles[1] // COLUMNS)
    return call_by_block(kernel, dict(q=q, k=k, v=v, inverse=inverse), outputs, blocks=blocks, warps=4)["out"]


def _attend(backwards: bool, strictly: bool, q: Array, k: Array, v: Array) -> Array:
    return _columns(backwards, strictly, q, k, v, None)


def _attend_back(
    backwards: bool, strictly: bool, given: tuple[Array, Array, Array], g: Array
) -> tuple[Array, Array, Array]:
    q, k, v = given
    there, back = (partial(attend, way, strictly) for way in (backwards, not backwards))
    return there(g, v, k), back(v, g, q), back(k, q, g)


# Gradients are such operations again, and so are theirs.
attend = with_closed_form(_attend, lambda *given: (attend(*given), given[2:]), _attend_back, static=(0, 1))


def linear_fused(
    queries: Float[Array, "batch time key"],
    keys: Float[Array, "batch time key"],
    values: Float[Array, "batch time value"],
) -> Float[Array, "batch time value"]:
    """Outputs of causal linear attention, in float32, without a state before or after."""
    return attend(False, False, queries, keys, values)


def _invert(refs: dict[str, Any], number: Any) -> None:
    """The inverse of I and what is below the diagonal of a bᵀ, of one chunk: tile row by tile row, by one warp."""
    new = refs["new_inverse"]
    size, tile = new.shape[-1], padded(refs["a"].shape[-1])
    zero = jnp.zeros((TILE, TILE), new.dtype)

    def lines(i: Any) -> Array:
        return i * TILE + indices(TILE)

    def met(i: Any, j: Any) -> Array:
        def term(p: Array) -> Array:
            a, b = (
                load(refs[n], number * size + lines(x), p, _within(refs[n])) for n, x in (("a", i), ("b", j))
            )
            return dot(a, b, (1, 1))

        return total(tile, term, width=NARROW)

    def keep(i: Any, j: Any, value: Array) -> None:
        store(new, lines(i), lines(j), None, value, number=number)

    def row(i: Any, carry: Any) -> Any:
        corner = _corner(met(i, i))

        def across(j: Any, carry: Any) -> Any:
            def term(k: Any, sum: Array) -> Array:
                return sum + dot(met(i, k), load(new, lines(k), lines(j), number=number))

            keep(i, j, dot(-corner, loop_between(j, i, term, zero)))
            keep(j, i, zero)
            return carry

        loop_between(0, i, across, 0)
        keep(i, i, corner)
        barrier()
        return carry

    loop(size // TILE, row, 0)


def _corner(met: Array) -> Array:
    """That of one tile, by elimination."""
    i, j = indices(TILE)[:, None], indices(TILE)[None, :]

    def step(c: Any, x: Array) -> Array:
        column = jnp.sum(jnp.where((j == c) & (i > c), met, 0.0), 1)
        row = jnp.sum(jnp.where(i == c, x, 0.0), 0)
        return x - column[:, None] * row[None, :]

    return loop(TILE, step, jnp.where(i == j, 1.0, 0.0).astype(met.dtype))


def _inverses(a: Array, b: Array) -> Array:
    count, size = _chunks(a.shape[1])
    outputs = dict(inverse=jax.ShapeDtypeStruct((len(a), count, size, size), a.dtype))
    return call_by_block(_invert, dict(a=a, b=b), outputs, blocks=count, warps=1)["inverse"]


def _solve(backwards: bool, a: Array, b: Array, v: Array, inverses: Array) -> Array:
    """u; or backwards y, of (b, a, ū). The inverses are the same for both, and no input of their own."""
    return _columns(backwards, True, a, b, v, inverses)


def _solve_forward(backwards: bool, a: Array, b: Array, v: Array, inverses: Array) -> tuple[Array, tuple]:
    u = solve(backwards, a, b, v, inverses)
    return u, (a, b, u, inverses)


def _solve_back(backwards: bool, saved: tuple[Array, ...], g: Array) -> tuple[Array, ...]:
    a, b, u, inverses = saved
    y = solve(not backwards, b, a, g, inverses)
    of_a, of_b = attend(backwards, True, y, u, b), attend(not backwards, True, u, y, a)
    return -of_a, -of_b, y, jnp.zeros_like(inverses)


solve = with_closed_form(_solve, _solve_forward, _solve_back, static=(0,))


def innovations_fused(
    a: Float[Array, "batch time key"], b: Float[Array, "batch time key"], v: Float[Array, "batch time value"]
) -> Float[Array, "batch time value"]:
    """What of every value the pairs before it do not tell, in float32."""
    return solve(False, a, b, v, _inverses(*jax.lax.stop_gradient((a, b))))
