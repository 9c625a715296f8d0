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

Refs = dict[str, Any]


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


def inside(ref: Any, tile: int) -> tuple[int, int] | None:
    """The shape of an array where the columns of a share may lie beyond it."""
    return None if ref.shape[-1] == tile else ref.shape[-2:]


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


def _sums(shape: Shape, refs: Refs, block: Any) -> None:
    """What a chunk adds to some columns of H and Sᵀ. By half chunks: registers are few."""
    chunk, columns = share(shape.widest, block)

    def part(_: Any, rows: Array) -> None:
        gram = jnp.zeros((len(rows), len(columns)), jnp.float64)
        moment = jnp.zeros((len(rows), len(columns)), shape.dtype)
        for half in range(2):
            tokens = chunk * CHUNK + half * CHUNK // 2 + indices(CHUNK // 2)
            beta = weights_of(shape, refs, tokens)
            beta = None if beta is None else beta[:, None]
            k, other = (load(refs["k"], tokens, a, (shape.time, shape.key)) for a in (rows, columns))
            v = load(refs["v"], tokens, columns, (shape.time, shape.value))
            gram = gram + dot(k.astype(jnp.float64), _times(beta, other.astype(jnp.float64)), (0, 0))
            if beta is not None:  # neither factor is rounded to bfloat16
                k, v = k.astype(shape.dtype), _times(beta, v.astype(shape.dtype))
            moment = moment + dot(k.astype(v.dtype), v, (0, 0))
        for ref, value in ((refs["new_gram"], gram), (refs["new_moment"], moment)):
            store(ref, rows, columns, inside(ref, shape.widest), value, number=chunk)

    each(shape.key_tile, part)


def _accumulate(shape: Shape, backwards: bool, refs: Refs, piece: Any) -> None:
    """Some rows of running sums of two matrices: before every chunk (or after it), and of all where there is room.

    They begin with diag(1/λ) and zero, or with what is given, or with zeros.
    """
    rows, columns = piece * _TILE + indices(_TILE), indices(shape.key_tile)
    names = ("gram", "moment")
    totals = [jnp.zeros((_TILE, refs[name].shape[-1]), refs[name].dtype) for name in names]
    if "lam" in refs:
        penalty = 1 / load_vector(refs["lam"], columns, shape.key, 1.0).astype(jnp.float64)
        totals[0] = jnp.where(rows[:, None] == columns[None, :], penalty[None, :], 0.0)
    if "first_gram" in refs:
        first = (refs["first_" + name] for name in names)
        totals = [
            load(ref, rows, indices(a.shape[-1]), ref.shape) for ref, a in zip(first, totals, strict=True)
        ]

    def write(chunk: Any, totals: Any) -> None:
        for name, total in zip(names, totals, strict=True):
            store(refs["new_" + name], rows, indices(total.shape[-1]), None, total, number=chunk)

    def step(index: Array, totals: Any) -> Any:
        chunk = shape.blocks(CHUNK) - 1 - index if backwards else index
        new = [load(refs[name], rows, indices(refs[name].shape[-1]), number=chunk) for name in names]
        barrier()  # what is written may be in the same place, and other threads' to load
        write(chunk, totals)
        return [a + b for a, b in zip(totals, new, strict=True)]

    totals = loop(shape.blocks(CHUNK), step, totals)
    if refs["new_gram"].shape[0] > shape.blocks(CHUNK):
        write(np.int32(shape.blocks(CHUNK)), totals)
    if "new_diagonal" in refs:
        diagonal = jnp.sum(jnp.where(rows[:, None] == columns[None, :], totals[0], 0.0), 1)
        store_vector(refs["new_diagonal"], rows, shape.key, diagonal)


def _before(shape: Shape, refs: Refs, piece: Any) -> None:
    _accumulate(shape, False, refs, piece)


def _after(shape: Shape, refs: Refs, piece: Any) -> None:
    _accumulate(shape, True, refs, piece)


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
    zero = jnp.zeros((_TILE, _TILE), jnp.float64)

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
        return 1 / load_vector(refs["lam"], lines(i), shape.key, 1.0).astype(jnp.float64)

    def matrix(i: Any, j: Any) -> Array:
        return load(refs["gram"], lines(i), lines(j), number=chunk)

    _factor(matrix, refs, chunk, 0.0, least, lambda i: None)


def _factor_chunks(shape: Shape, refs: Refs, chunk: Any) -> None:
    """G⁻¹ for P = K̃ K̃ᵀ."""

    def lines(i: Any) -> Array:
        return i * _TILE + indices(_TILE)

    def white(i: Any, j: Any) -> Array:
        return load(refs["white"], lines(i), lines(j), number=chunk).astype(jnp.float64)

    def beta(i: Any) -> Array | None:
        weights = weights_of(shape, refs, chunk * CHUNK + lines(i))
        return None if weights is None else weights.astype(jnp.float64)

    def matrix(i: Any, j: Any) -> Array:
        return loop(
            shape.key_tile // _TILE,
            lambda k, sum: sum + dot(white(i, k), white(j, k), (1, 1)),
            jnp.zeros((_TILE, _TILE), jnp.float64),
        )

    _factor(matrix, refs, chunk, 1.0, lambda i: jnp.ones((_TILE,), jnp.float64), beta)


def before_chunks(shape: Shape, seq: Sequence, want_state: bool) -> tuple[Array, Array]:
    """W and Sᵀ before every chunk, and after the last if wanted."""
    count, key, value = shape.blocks(CHUNK), shape.key_tile, shape.value_tile
    states = count + want_state

    def both(count: int) -> dict[str, jax.ShapeDtypeStruct]:
        gram = empty(shape, count, key, key, dtype=jnp.float64)
        return dict(gram=gram, moment=empty(shape, count, key, value))

    with jax.enable_x64(True):
        added = run(
            shape,
            _sums,
            # Keys in float32: of what is loaded in 16 bits and cast to float64, Triton makes wrong products (triton
            # pull request 11664; jaxlib 0.11.2 has the fault, and no interpreter shows it).
            dict(k=seq.keys.astype(shape.dtype), v=seq.values, beta=seq.beta),
            both(count),
            blocks=count * programs(shape.widest),
        )
        sums = run(
            shape,
            _before,
            added | dict(lam=seq.lam),
            both(states),
            blocks=key // _TILE,
            in_place={} if want_state else dict(gram="gram", moment="moment"),
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
    shape: Shape, added: dict[str, Array], lam: Array, ahead: tuple[Array, Array] | None
) -> dict[str, Array]:
    """Sums from the end of `gram` and `moment`, and the diagonal of all of the first."""
    first = dict(first_gram=ahead[0], first_moment=ahead[1]) if ahead is not None else {}
    outputs = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in added.items()}
    outputs |= dict(diagonal=jax.ShapeDtypeStruct(lam.shape, shape.dtype))
    in_place = {name: name for name in added}
    return run(shape, _after, added | first, outputs, blocks=shape.key_tile // _TILE, in_place=in_place)


def _factors(shape: Shape, count: int, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    scratch = empty(shape, count, size, size, dtype=jnp.float64)
    return dict(inverse=empty(shape, count, size, size), scratch=scratch)


def empty(shape: Shape, *dims: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((shape.batch, *dims), shape.dtype if dtype is None else dtype)


def run(shape: Shape, kernel: Any, inputs: dict, outputs: dict, **settings: Any) -> dict[str, Array]:
    warps = 1 if kernel in (_factor_states, _factor_chunks) else 4
    return call_by_block(partial(kernel, shape), inputs, outputs, warps=warps, **settings)
