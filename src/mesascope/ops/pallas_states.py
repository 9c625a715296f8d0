r"""What `pallas_prefix.py` needs of the pairs before and after every chunk: sums, and the factors of what is summed up.

    H = diag(1/λ) + Σ β k kᵀ,   Sᵀ = Σ β k vᵀ   over all pairs before a chunk        H = L Lᵀ,   W = L⁻¹
    P = K̃ K̃ᵀ,   c_j = column j of P / √s_j,   s_j = 1 + β_j P_jj,   P ← P - β_j c_j c_jᵀ        j = 0, 1, …
    G = tril(c, -1) diag(β) + diag(√s)            G⁻¹ = its inverse

What is factored must be known to more than float32: 1/λ drowns in the rounding of H, and 1 in that of P (README.md).
So H, P and their factors are in float64, which the matrix units of a data-center GPU do as fast as three TF32
products. A factorization is a chain of dependent steps. It is done by one warp per matrix, whose sums need no shared
memory, in tiles of 16 × 16 with all between them as matrix products, and with thousands of matrices side by side.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from mesascope.ops.kernels import (
    Shape,
    barrier,
    call_by_block,
    dot,
    indices,
    load,
    load_vector,
    loop,
    loop_between,
    store,
    store_vector,
)
from mesascope.ops.sequence import Sequence

CHUNK = 64
_TILE = 16
_COLUMNS = 64  # of a matrix that are taken at a time: registers hold a product of so many
_STRIP = 32  # rows of a running sum that one program holds
_PROGRAMS = 512  # so many fill the GPU

Refs = dict[str, Any]

# Which products of float32 are six of bfloat16: by default those in which TF32 needs a transposed copy of a factor.
SIX: tuple[tuple[int, int], ...] = ((1, 0), (0, 0), (0, 1))


def exact(shape: Shape, a: Array, b: Array, contract: tuple[int, int] = (1, 0)) -> Array:
    """A product as exact as inputs and outputs ask for."""
    return dot(a, b, contract, bits=shape.bits, six=contract in SIX)


def tokens_of(chunk: Any) -> Array:
    return chunk * CHUNK + indices(CHUNK)


def weights_of(shape: Shape, refs: Refs, tokens: Array) -> Array | None:
    return load_vector(refs["beta"], tokens, shape.time) if "beta" in refs else None


def _times(beta: Array | None, array: Array) -> Array:
    return array if beta is None else beta.astype(array.dtype) * array


def programs(tile: int) -> int:
    """By how many programs the columns of a chunk are shared."""
    return max(1, tile // _COLUMNS)


def share(tile: int, block: Any) -> tuple[Any, Array]:
    """A program's chunk, and its columns."""
    count, width = np.int32(programs(tile)), min(tile, _COLUMNS)
    if count == 1:
        return block, indices(width)
    return lax.div(block, count), piece(lax.rem(block, count), width)


def piece(index: Any, width: int) -> Array:
    return index * width + indices(width)


def each(tile: int, body: Callable[[Any, Array], None], first: Any = 0) -> None:
    """Do something with every piece of a tile's rows or columns, from the first one given."""
    width = min(tile, _COLUMNS)
    if tile == width:
        body(np.int32(0), indices(width))
        return

    def step(index: Any, carry: Any) -> Any:
        body(index, piece(index, width))
        return carry

    loop_between(first, np.int32(tile // width), step, 0)


def total(
    tile: int, term: Callable[[Array], Array], start: Array | None = None, *, first: Any = 0, last: Any = None
) -> Array:
    """The sum of a term over the pieces of a tile, or over those from the first to the last given."""
    width = min(tile, _COLUMNS)

    def step(index: Any, sum: Array | None) -> Array:
        barrier()  # nothing is loaded before it is needed: registers are few
        return term(piece(index, width)) if sum is None else sum + term(piece(index, width))

    if tile == width:
        return step(np.int32(0), start)
    if start is None:
        like = jax.eval_shape(term, jax.ShapeDtypeStruct((width,), jnp.int32))
        start = jnp.zeros(like.shape, like.dtype)
    return loop_between(first, np.int32(tile // width) if last is None else last + 1, step, start)


def _sums(shape: Shape, refs: Refs, block: Any, **walk: Any) -> None:
    """H and S before every chunk. By half chunks: registers are few."""

    def summands(chunk: Any, rows: Array, sums: _Sums) -> _Sums:
        gram, moment = sums
        for half in range(2):
            tokens = chunk * CHUNK + half * CHUNK // 2 + indices(CHUNK // 2)
            beta = weights_of(shape, refs, tokens)
            k, some = (
                load(refs["k"], tokens, a, (shape.time, shape.key)) for a in (indices(shape.key_tile), rows)
            )
            v = load(refs["v"], tokens, indices(shape.value_tile), (shape.time, shape.value))
            weighted = some if beta is None else beta[:, None] * some.astype(shape.dtype)
            if shape.coarse:
                gram = gram + dot(weighted, k, (0, 0))
            else:
                gram = gram + dot(weighted.astype(gram.dtype), k.astype(gram.dtype), (0, 0))
            moment = moment + dot(weighted, v, (0, 0), six=(0, 0) in SIX)
        return gram, moment

    _run_over(shape, refs, block, summands, backwards=False, **walk)


def _after(shape: Shape, refs: Refs, block: Any, **walk: Any) -> None:
    """W and P over all tokens after every chunk."""

    def summands(chunk: Any, rows: Array, sums: _Sums) -> _Sums:
        tokens, keys = indices(CHUNK), indices(shape.key_tile)
        gram, moment = sums
        for one, other in (("x", "z"), ("z", "x")):
            a = load(refs[one], tokens, rows, number=chunk)
            gram = gram + exact(shape, a, load(refs[other], tokens, keys, number=chunk), (0, 0))
            barrier()  # nothing is loaded before it is needed: registers are few
        g = load(refs["g"], tokens_of(chunk), indices(shape.value_tile), (shape.time, shape.value))
        x = load(refs["x"], tokens, rows, number=chunk)
        return gram, moment + exact(shape, x, g, (0, 0))

    _run_over(shape, refs, block, summands, backwards=True, **walk)


_Sums = tuple[Array, Array]


def _run_over(
    shape: Shape,
    refs: Refs,
    block: Any,
    summands: Callable[[Any, Array, _Sums], _Sums],
    *,
    backwards: bool,
    stretch: int,
    alone: bool,
) -> None:
    """Some rows of two running sums over a stretch of chunks, written before every chunk (or after it).

    They begin with diag(1/λ) and zero, or with what is given, or with zeros. The first is symmetric: below the
    diagonal it is enough. The second is transposed in memory.

    Args:
        alone: write no more than what the stretch adds.
    """
    strips, count = np.int32(shape.key_tile // _STRIP), shape.blocks(CHUNK)
    part = lax.div(block, strips)
    rows = piece(lax.rem(block, strips), _STRIP)
    columns, values = indices(shape.key_tile), indices(shape.value_tile)
    lower = (shape.key_tile, (lax.rem(block, strips) + 1) * _STRIP) if not backwards else None

    def write(number: Any, sums: _Sums, shown: Any = None) -> None:
        gram, moment = sums
        height = None if shown is None else (shown.astype(jnp.int32) * shape.widest, shape.widest)
        store(refs["new_gram"], rows, columns, lower if height is None else height, gram, number=number)
        store(refs["new_moment"], values, rows, height, moment.T, number=number)

    gram = jnp.zeros((_STRIP, shape.key_tile), shape.state if not backwards else shape.dtype)
    moment = jnp.zeros((_STRIP, shape.value_tile), shape.dtype)
    if "first_gram" in refs:
        gram = load(refs["first_gram"], rows, columns, number=part)
        moment = load(refs["first_moment"], values, rows, number=part).T
    elif "lam" in refs and not alone:
        penalty = 1 / load_vector(refs["lam"], columns, shape.key, 1.0).astype(gram.dtype)
        gram = jnp.where(rows[:, None] == columns[None, :], penalty[None, :], 0.0)
    first = part * stretch
    last = jnp.minimum(first + stretch, count)

    def step(index: Any, sums: _Sums) -> _Sums:
        chunk = first + last - 1 - index if backwards else index
        if not alone:
            write(chunk, sums)
        return summands(chunk, rows, sums)

    sums = loop_between(first, last, step, (gram, moment))
    if alone:
        write(part, sums)
    elif refs["new_gram"].shape[0] > count:
        write(np.int32(count), sums, last == count)
    if "new_diagonal" in refs:
        diagonal = jnp.sum(jnp.where(rows[:, None] == columns[None, :], sums[0], 0.0), 1)
        store_vector(refs["new_diagonal"], rows, (first == 0).astype(jnp.int32) * shape.key, diagonal)


def _running(
    shape: Shape,
    kernel: Callable,
    inputs: dict[str, Array | None],
    outputs: dict[str, jax.ShapeDtypeStruct],
    start: Callable[[], _Sums],
    *,
    known: bool,
    in_place: dict[str, str],
) -> dict[str, Array]:
    """Running sums by one of these two kernels; where heads are few, over stretches of time side by side.

    Args:
        start: makes what the sums begin with.
        known: the kernel begins with the same by itself.
    """
    count, strips, backwards = shape.blocks(CHUNK), shape.key_tile // _STRIP, kernel is _after
    stretch = -(-count // -(-_PROGRAMS // (shape.batch * strips)))
    parts, first = -(-count // stretch), {}
    kernel = partial(kernel, stretch=stretch)
    if parts > 1:
        added = {
            n: empty(shape, parts, *outputs[n].shape[2:], dtype=outputs[n].dtype) for n in ("gram", "moment")
        }
        added = run(shape, partial(kernel, alone=True), inputs, added, blocks=parts * strips)
        for begin, (name, array) in zip(start(), added.items(), strict=True):
            ends = [array, begin[:, None]] if backwards else [begin[:, None], array]
            sums = lax.cumsum(jnp.concatenate(ends, 1), 1, reverse=backwards)
            first["first_" + name] = sums[:, 1:] if backwards else sums[:, :-1]
    elif not known:
        first = {"first_" + n: a[:, None] for n, a in zip(("gram", "moment"), start(), strict=True)}
    kernel = partial(kernel, alone=False)
    return run(shape, kernel, inputs | first, outputs, blocks=parts * strips, in_place=in_place)


def _eliminated(p: Array, ridge: float, least: Array, beta: Array | None) -> Array:
    """G⁻¹ of one tile P; pivots are `ridge` + β P_jj, and at least so much.

    All sums run along rows, which few threads share: hence the transposed inverse, and P by its columns alone.
    """
    lines = indices(_TILE)
    i, j = lines[:, None], lines[None, :]

    def step(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        p, inverse_t = carry
        column, line = (jnp.sum(jnp.where(j == c, a, 0.0), 1) for a in carry)
        pivots = jnp.maximum(ridge + _times(beta, column), least)
        scale = lax.rsqrt(jnp.sum(jnp.where(lines == c, pivots, 0.0)))
        column, line = jnp.where(lines > c, scale * column, 0.0), scale * line
        weighted = column if beta is None else jnp.sum(jnp.where(lines == c, beta, 0.0)) * column
        p = p - column[:, None] * weighted[None, :]
        return p, jnp.where(j == c, line[:, None], inverse_t - line[:, None] * weighted[None, :])

    # A sum with P, so that threads share its rows in the same way.
    return loop(_TILE, step, (p, jnp.where(i == j, 1.0, 0.0) + 0.0 * p))[1].T


def _factor(matrix: Any, refs: Refs, chunk: Any, ridge: float, least: Any, beta: Any) -> None:
    """G⁻¹ of a matrix P, tile row by tile row through memory.

    Args:
        matrix: of (i, j), tile (i, j) of P for i ≥ j.
        least, beta: of i, the least pivots and the weights of its columns.

    What was done so far is in `scratch`: c below the diagonal; on it and above, tile (i, j) of G⁻¹ at (j, i).
    """
    scratch, inverse = refs["new_scratch"], refs["new_inverse"]
    tiles = inverse.shape[-1] // _TILE
    zero = jnp.zeros((_TILE, _TILE), scratch.dtype)

    def lines(i: Any) -> Array:
        return i * _TILE + indices(_TILE)

    def tile(i: Any, j: Any) -> Array:
        return load(scratch, lines(i), lines(j), number=chunk)

    def keep(i: Any, j: Any, value: Array) -> None:
        store(scratch, lines(i), lines(j), None, value, number=chunk)
        barrier()

    def weigh(i: Any, value: Array) -> Array:
        weights = beta(i)
        return value if weights is None else value * weights[None, :]

    def less(i: Any, j: Any) -> Array:
        """Tile (i, j) of P less what the columns before tile j take from it."""
        taken = loop_between(
            np.int32(0), j, lambda k, sum: sum + dot(weigh(k, tile(i, k)), tile(j, k), (1, 1)), zero
        )
        return matrix(i, j) - taken

    def publish(i: Any, j: Any, value: Array) -> None:
        store(inverse, lines(i), lines(j), None, value.astype(inverse.dtype), number=chunk)

    def row(i: Array, carry: Any) -> Any:
        def below(j: Array, carry: Any) -> Any:
            keep(i, j, dot(less(i, j), tile(j, j), (1, 1)))
            return carry

        loop_between(np.int32(0), i, below, 0)
        corner = _eliminated(less(i, i), ridge, least(i), beta(i))
        keep(i, i, corner)
        publish(i, i, corner)

        def across(j: Array, carry: Any) -> Any:
            met = loop_between(j, i, lambda k, sum: sum + dot(weigh(k, tile(i, k)), tile(j, k)), zero)
            value = -dot(tile(i, i), met)
            keep(j, i, value)
            publish(i, j, value)
            publish(j, i, zero)
            return carry

        loop_between(np.int32(0), i, across, 0)
        return carry

    loop(tiles, row, 0)


def _factor_states(shape: Shape, refs: Refs, chunk: Any) -> None:
    """W = L⁻¹ for H = L Lᵀ."""

    def lines(i: Any) -> Array:
        return i * _TILE + indices(_TILE)

    def least(i: Any) -> Array:
        return 1 / load_vector(refs["lam"], lines(i), shape.key, 1.0).astype(shape.state)

    def matrix(i: Any, j: Any) -> Array:
        return load(refs["gram"], lines(i), lines(j), number=chunk)

    _factor(matrix, refs, chunk, 0.0, least, lambda i: None)


def _factor_chunks(shape: Shape, refs: Refs, chunk: Any) -> None:
    """G⁻¹ for P = K̃ K̃ᵀ."""

    def lines(i: Any) -> Array:
        return i * _TILE + indices(_TILE)

    def white(i: Any, j: Any) -> Array:
        return load(refs["white"], lines(i), lines(j), number=chunk).astype(shape.state)

    def beta(i: Any) -> Array | None:
        weights = weights_of(shape, refs, chunk * CHUNK + lines(i))
        return None if weights is None else weights.astype(shape.state)

    def matrix(i: Any, j: Any) -> Array:
        return loop(
            shape.key_tile // _TILE,
            lambda k, sum: sum + dot(white(i, k), white(j, k), (1, 1)),
            jnp.zeros((_TILE, _TILE), shape.state),
        )

    _factor(matrix, refs, chunk, 1.0, lambda i: jnp.ones((_TILE,), shape.state), beta)


def before_chunks(shape: Shape, seq: Sequence, want_state: bool) -> tuple[Array, Array]:
    """W and S before every chunk, and after the last if wanted."""
    key, value = shape.key_tile, shape.value_tile
    states = shape.blocks(CHUNK) + want_state

    def start() -> _Sums:
        lam = jnp.pad(seq.lam, ((0, 0), (0, key - shape.key)), constant_values=1.0)
        gram = jnp.eye(key, dtype=shape.state) / lam[:, None].astype(shape.state)
        return gram, jnp.zeros((shape.batch, value, key), shape.dtype)

    with jax.enable_x64(True):
        sums = _running(
            shape,
            _sums,
            dict(k=seq.keys, v=seq.values, beta=seq.beta, lam=seq.lam),
            dict(
                gram=empty(shape, states, key, key, dtype=shape.state),
                moment=empty(shape, states, value, key),
            ),
            start,
            known=True,
            in_place={},
        )
        root = run(
            shape,
            _factor_states,
            dict(gram=sums["gram"], lam=seq.lam),
            _factors(shape, states, key),
            blocks=states,
            in_place=dict(gram="scratch"),
        )["inverse"]
    return root, sums["moment"]


def within_chunks(shape: Shape, white: Array, beta: Array | None) -> Array:
    """G⁻¹ of every chunk."""
    count = shape.blocks(CHUNK)
    with jax.enable_x64(True):
        given = dict(white=white, beta=beta)
        return run(shape, _factor_chunks, given, _factors(shape, count, CHUNK), blocks=count)["inverse"]


def after_chunks(
    shape: Shape,
    given: dict[str, Array],
    lam: Array,
    ahead: tuple[Array, Array] | None,
    in_place: dict[str, str],
) -> dict[str, Array]:
    """Sums W (`gram`) and Pᵀ (`moment`) from the end, over all tokens after every chunk; the diagonal of all of W.

    Args:
        given: x and z by chunk, g over all time, and what `in_place` names.
        ahead: the sums W and P that the cotangent of the final state begins with, if there is one.
    """
    count, key, value = shape.blocks(CHUNK), shape.key_tile, shape.value_tile

    def start() -> _Sums:
        zeros = (
            jnp.zeros((shape.batch, key, key), shape.dtype),
            jnp.zeros((shape.batch, value, key), shape.dtype),
        )
        if ahead is None:
            return zeros
        gram, moment = ahead[0], ahead[1].swapaxes(-1, -2)
        return tuple(
            a.at[:, : b.shape[1], : b.shape[2]].set(b) for a, b in zip(zeros, (gram, moment), strict=True)
        )

    outputs = dict(gram=empty(shape, count, key, key), moment=empty(shape, count, value, key))
    outputs |= dict(diagonal=jax.ShapeDtypeStruct(lam.shape, shape.dtype))
    return _running(shape, _after, given, outputs, start, known=ahead is None, in_place=in_place)


def _factors(shape: Shape, count: int, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    scratch = empty(shape, count, size, size, dtype=shape.state)
    return dict(inverse=empty(shape, count, size, size), scratch=scratch)


def empty(shape: Shape, *dims: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((shape.batch, *dims), shape.dtype if dtype is None else dtype)


def run(shape: Shape, kernel: Any, inputs: dict, outputs: dict, **settings: Any) -> dict[str, Array]:
    warps = 1 if kernel in (_factor_states, _factor_chunks) else 4
    return call_by_block(partial(kernel, shape), inputs, outputs, warps=warps, **settings)
