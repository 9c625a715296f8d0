"""What kernels over chunks share: how a sequence is cut, pieces of tiles, and what they load.

A thread holds one product of 64 × 64 numbers at a time: wide tiles are taken piece by piece.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from mesascope.ops.kernels import Shape, barrier, call_by_block, dot, indices, load, load_vector, loop

CHUNK = 64
TILE = 16
COLUMNS = 64  # of a matrix that are taken at a time: registers hold a product of so many
NARROW = 32  # where that is too much: of float64, and of running sums, which registers hold too
# Chunks that are taken at once, by the widest tile that it holds for: so many hide the steps in which each is factored.
_ABREAST = {64: 1536, 128: 1024, 384: 192}

Refs = dict[str, Any]

# Which products of float32 are six of bfloat16. In these TF32 needs a factor transposed, a number at a time.
SIX: tuple[tuple[int, int], ...] = ((1, 0), (0, 0))


def exact(a: Array, b: Array, contract: tuple[int, int] = (1, 0), *, bits: int = 24) -> Array:
    return dot(a, b, contract, bits=bits, six=contract in SIX)


def legs(shape: Shape) -> tuple[int, int]:
    """Into how many legs of how many chunks a sequence is cut, which are walked side by side."""
    count = shape.blocks(CHUNK)
    abreast = next(count for widest, count in _ABREAST.items() if shape.widest <= widest)
    size = -(-count // min(count, -(-abreast // shape.batch)))
    return -(-count // size), size


def chunks(shape: Shape) -> int:
    """Those of all legs; the last may be beyond the end."""
    count, size = legs(shape)
    return count * size


def tokens_of(chunk: Any) -> Array:
    return chunk * CHUNK + indices(CHUNK)


def given(ref: Any, chunk: Any, columns: Array, lines: Array, tile: int) -> Array:
    """Lines and columns of a chunk of what was given, whose width may be less than a tile's."""
    whole = ref.shape[-1] == tile
    return load(ref, lines, columns, None if whole else ref.shape[-2:], number=chunk)


def weights_of(shape: Shape, refs: Refs, tokens: Array) -> Array | None:
    return load_vector(refs["beta"], tokens, shape.time) if "beta" in refs else None


def times(beta: Array | None, array: Array) -> Array:
    return array if beta is None else beta.astype(array.dtype) * array


def programs(tile: int) -> int:
    """By how many programs the columns of a chunk are shared."""
    return max(1, tile // COLUMNS)


def share(tile: int, block: Any) -> tuple[Any, Array]:
    """A program's chunk, and its columns."""
    count, width = np.int32(programs(tile)), min(tile, COLUMNS)
    if count == 1:
        return block, indices(width)
    return lax.div(block, count), piece(lax.rem(block, count), width)


def piece(index: Any, width: int) -> Array:
    return index * width + indices(width)


def each(tile: int, body: Callable[[Any, Array], None], *, width: int = COLUMNS) -> None:
    """Do something with every piece of a tile's rows or columns."""
    width = min(tile, width)
    if tile == width:
        body(np.int32(0), indices(width))
        return

    def step(index: Any, carry: Any) -> Any:
        body(index, piece(index, width))
        return carry

    loop(tile // width, step, 0)


def total(
    tile: int, term: Callable[[Array], Array], start: Array | None = None, *, width: int = COLUMNS
) -> Array:
    """The sum of a term over the pieces of a tile."""
    width = min(tile, width)

    def step(index: Any, sum: Array | None) -> Array:
        barrier()  # nothing is loaded before it is needed: registers are few
        return term(piece(index, width)) if sum is None else sum + term(piece(index, width))

    if tile == width:
        return step(np.int32(0), start)
    if start is None:
        like = jax.eval_shape(term, jax.ShapeDtypeStruct((width,), jnp.int32))
        start = jnp.zeros(like.shape, like.dtype)
    return loop(tile // width, step, start)


def at(shape: Shape, refs: Refs, leg: Any) -> Any:
    """The chunk of a leg whose turn it is."""
    return leg * legs(shape)[1] + refs["turn"][0]


def states(shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """R and Φ before every chunk."""
    key, value = shape.key_tile, shape.value_tile
    return dict(r=empty(shape, chunks(shape), key, key), phi=empty(shape, chunks(shape), value, key))


def empty(shape: Shape, *dims: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((shape.batch, *dims), shape.dtype if dtype is None else dtype)


def like(array: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype if dtype is None else dtype)


def run(
    shape: Shape, kernel: Any, inputs: dict, outputs: dict, *, warps: int = 4, **settings: Any
) -> dict[str, Array]:
    return call_by_block(partial(kernel, shape), inputs, outputs, warps=warps, **settings)
