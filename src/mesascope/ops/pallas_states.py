r"""What `pallas_prefix.py` needs besides products: sums over pairs before and after chunks, and two factorizations.

    H = diag(1/λ) + Σ β k kᵀ,   S = Σ β v kᵀ   over all pairs before a leg          H = L Lᵀ,   R = L⁻ᵀ L⁻¹,   Φ = S R
    P = K R Kᵀ of a chunk,   c_j = column j of P / √s_j,   s_j = 1 + β_j P_jj,   P ← P - β_j c_j c_jᵀ     j = 0, 1, …
    G = tril(c, -1) diag(β) + diag(√s)            G⁻¹ = its inverse

What is factored must be known to more than float32: 1/λ drowns in the rounding of H, and 1 in that of P (README.md);
and what S R is off by, where keys are few, R multiplies. So H, S, P and the factors are in float64, which the matrix
units of a data-center GPU do as fast as three TF32 products; with inputs in bfloat16, P and its factor in float32. A
factorization is a chain of dependent steps. It is done by one warp per matrix, whose sums need no shared memory, in
tiles of 16 × 16 with all between them as matrix products, and with thousands of matrices side by side. Running sums
stay in registers over chunks: one program walks a piece of them, and where heads are few, a stretch of time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from mesascope.ops.factor import matmul, transpose
from mesascope.ops.kernels import (
    Shape,
    barrier,
    dot,
    indices,
    load,
    load_vector,
    loop,
    loop_between,
    only,
    store,
    store_vector,
)
from mesascope.ops.pallas_chunks import (
    CHUNK,
    COLUMNS,
    NARROW,
    TILE,
    Refs,
    at,
    chunks,
    empty,
    exact,
    given,
    legs,
    like,
    piece,
    run,
    states,
    times,
    total,
    weights_of,
)

# Whether sums before legs read keys and values of 16 bits as such. Off until it has run on a GPU: of what is
# loaded in 16 bits and cast to float64, Triton makes wrong products (triton pull request 11664; jaxlib 0.11.2 has the
# fault, and no interpreter shows it), but these are made in float32.
_SUMS_IN_16_BITS = False

_PROGRAMS = 256  # fewer leave much of a GPU idle


def _pairs_before(shape: Shape, refs: Refs, block: Any, **over: Any) -> None:
    """A piece of H before every leg, or of S if there are values."""
    name, tile = ("v", shape.value_tile) if "v" in refs else ("k", shape.key_tile)

    def add(sum: Array, chunk: Any, rows: Array, columns: Array) -> Array:
        def term(p: Array) -> Array:
            beta = weights_of(shape, refs, chunk * CHUNK + p)
            a, k = (
                given(refs[name], chunk, rows, p, tile),
                given(refs["k"], chunk, columns, p, shape.key_tile),
            )
            if (
                k.dtype == jnp.bfloat16
            ):  # their products are exact, and so few of them lose nothing that counts
                a = a if beta is None else beta[:, None] * a.astype(shape.dtype)
                return exact(a, k, (0, 0)).astype(sum.dtype)
            a, k = a.astype(sum.dtype), k.astype(sum.dtype)
            return dot(times(None if beta is None else beta[:, None], a), k, (0, 0))

        narrow = TILE if refs["k"].dtype == jnp.bfloat16 else NARROW
        return total(CHUNK, term, sum, width=narrow)

    _over_chunks(shape, refs, block, add, **over)


def _grams_after(shape: Shape, refs: Refs, block: Any, **over: Any) -> None:
    """A piece of W over all tokens after every chunk."""

    def add(sum: Array, chunk: Any, rows: Array, columns: Array) -> Array:
        def product(one: str, other: str, start: Array | None = None) -> Array:
            def term(p: Array) -> Array:
                a, b = (load(refs[n], p, some, number=chunk) for n, some in ((one, rows), (other, columns)))
                return exact(a, b, (0, 0))

            return total(CHUNK, term, start, width=NARROW)

        if len(columns) == shape.key_tile:
            met = product("x", "z")
            return sum + (met + met.T)
        return product("z", "x", product("x", "z", sum))

    _over_chunks(shape, refs, block, add, backwards=True, **over)


def _moments_after(shape: Shape, refs: Refs, block: Any, **over: Any) -> None:
    """A piece of Pᵀ over all tokens after every chunk."""

    def add(sum: Array, chunk: Any, rows: Array, columns: Array) -> Array:
        def term(p: Array) -> Array:
            x = load(refs["x"], p, columns, number=chunk)
            return exact(given(refs["g"], chunk, rows, p, shape.value_tile), x, (0, 0), bits=shape.bits)

        return total(CHUNK, term, sum, width=NARROW)

    _over_chunks(shape, refs, block, add, backwards=True, **over)


def _over_chunks(
    shape: Shape,
    refs: Refs,
    block: Any,
    add: Callable[[Array, Any, Array, Array], Array],
    *,
    count: int,
    stretch: int,
    alone: bool,
    every: int = 1,
    rows: int = COLUMNS,
    columns: int = COLUMNS,
    symmetric: bool = False,
    backwards: bool = False,
) -> None:
    """A piece of a running sum over a stretch of chunks, written before every chunk (or after it), or before some.

    It begins with what is given, or with diag(1/λ), or with zeros.

    Args:
        add: adds some rows and columns of what a chunk has.
        count: of chunks that are summed up.
        alone: write no more than what the stretch adds.
        every: write it before every so many chunks.
        rows, columns: the size of a piece.
        symmetric: pieces are squares, and what is above the diagonal is written with what is below it.
    """
    ref = refs["new_sum"]
    sides = min(rows, ref.shape[-2]), min(columns, ref.shape[-1])
    down, across = (np.int32(n // side) for n, side in zip(ref.shape[-2:], sides, strict=True))
    part = lax.div(block, down * across)
    at = lax.rem(block, down), lax.rem(lax.div(block, down), across)
    row, column = (piece(i, side) for i, side in zip(at, sides, strict=True))
    diagonal = row[:, None] == column[None, :]

    def write(number: Any, sum: Array, shown: Any = None) -> None:
        end = None if shown is None else (shown.astype(jnp.int32) * ref.shape[-2], ref.shape[-1])
        store(ref, row, column, end, sum, number=number)
        if symmetric and down > 1:
            only(at[0] > at[1], lambda: store(ref, column, row, end, sum.T, number=number))

    def work() -> None:
        sum = jnp.zeros(sides, ref.dtype)
        if "first" in refs:
            sum = load(refs["first"], row, column, number=part)
        elif "lam" in refs and not alone:
            penalty = 1 / load_vector(refs["lam"], column, shape.key, 1.0).astype(ref.dtype)
            sum = jnp.where(diagonal, penalty[None, :], 0.0)
        first = part * stretch
        last = jnp.minimum(first + stretch, count)

        def step(index: Any, sum: Array) -> Array:
            chunk = first + last - 1 - index if backwards else index
            if not alone:
                shown = None if every == 1 else lax.rem(chunk, np.int32(every)) == 0
                write(lax.div(chunk, np.int32(every)), sum, shown)
            return add(sum, chunk, row, column)

        sum = loop_between(first, last, step, sum)
        if alone:
            write(part, sum)
        elif ref.shape[0] * every > count:
            write(np.int32(count // every), sum, last == count)
        if "new_diagonal" in refs:
            shown = ((first == 0) & (at[0] == at[1])).astype(jnp.int32)
            found = jnp.sum(jnp.where(diagonal, sum, 0.0), 1)
            store_vector(refs["new_diagonal"], row, shown * shape.key, found)

    only(at[0] >= at[1], work) if symmetric and down > 1 else work()


def _running(
    shape: Shape,
    kernel: Callable,
    inputs: dict[str, Array | None],
    outputs: dict[str, jax.ShapeDtypeStruct],
    begin: Array,
    *,
    count: int,
    known: bool,
    in_place: dict[str, str] | None = None,
    rows: int = COLUMNS,
    columns: int = COLUMNS,
    **over: Any,
) -> dict[str, Array]:
    """Running sums of one kind; where heads are few, over stretches of time side by side.

    Args:
        begin: what they begin with.
        known: the kernel begins so by itself.
    """
    sum = outputs["sum"]
    pieces = max(1, sum.shape[-2] // rows) * max(1, sum.shape[-1] // columns)
    stretch = -(-count // -(-_PROGRAMS // (shape.batch * pieces)))
    parts, backwards = -(-count // stretch), kernel in (_grams_after, _moments_after)
    kernel = partial(kernel, count=count, stretch=stretch, rows=rows, columns=columns, **over)
    if parts > 1:
        added = dict(sum=empty(shape, parts, *sum.shape[2:], dtype=sum.dtype))
        added = run(shape, partial(kernel, alone=True), inputs, added, blocks=parts * pieces)["sum"]
        ends = [added, begin[:, None]] if backwards else [begin[:, None], added]
        sums = lax.cumsum(jnp.concatenate(ends, 1), 1, reverse=backwards)
        inputs = inputs | dict(first=sums[:, 1:] if backwards else sums[:, :-1])
    elif not known:
        inputs = inputs | dict(first=begin[:, None])
    kernel = partial(kernel, alone=False)
    return run(shape, kernel, inputs, outputs, blocks=parts * pieces, in_place=in_place)


def _eliminated(p: Array, ridge: float, least: Array, beta: Array | None) -> Array:
    """G⁻¹ of one tile P; pivots are `ridge` + β P_jj, and at least so much.

    In one array: what is left of P, from the row of the pivot on, and above it the inverse, transposed. All sums run
    along rows, which few threads share.
    """
    lines = indices(TILE)
    i, j = lines[:, None], lines[None, :]

    def step(c: Array, both: Array) -> Array:
        column = jnp.sum(jnp.where(j == c, both, 0.0), 1)
        pivots = jnp.maximum(ridge + times(beta, column), least)
        scale = lax.rsqrt(jnp.sum(jnp.where(lines == c, pivots, 0.0)))
        column = scale * jnp.where(lines == c, 1.0, column)
        weighted = jnp.where(lines > c, column, 0.0)
        if beta is not None:
            weighted = jnp.sum(jnp.where(lines == c, beta, 0.0)) * weighted
        rest = jnp.where(i == c, 0.0, both) - column[:, None] * weighted[None, :]
        return jnp.where(j == c, column[:, None], rest)

    # A product leaves its rows to four threads each; what was loaded may lie otherwise.
    p = dot(p, jnp.where(i == j, 1.0, 0.0).astype(p.dtype if p.dtype == jnp.float64 else jnp.bfloat16))
    return jnp.where(i <= j, loop(TILE, step, p), 0.0).T


def _factor(refs: Refs, number: Any, ridge: float, least: Any, beta: Any) -> None:
    """G⁻¹ of the matrix P called `gram`, tile row by tile row; c takes the place of what is below P's diagonal.

    Args:
        least, beta: of i, the least pivots and the weights of its columns.
    """
    gram, c, inverse = refs["gram"], refs["new_c"], refs["new_inverse"]
    zero = jnp.zeros((TILE, TILE), inverse.dtype)

    def lines(i: Any) -> Array:
        return i * TILE + indices(TILE)

    def tile(ref: Any, i: Any, j: Any) -> Array:
        return load(ref, lines(i), lines(j), number=number)

    def keep(ref: Any, i: Any, j: Any, value: Array) -> None:
        barrier()
        store(ref, lines(i), lines(j), None, value, number=number)

    def weighted(i: Any, j: Any) -> Array:
        weights = beta(j)
        return tile(c, i, j) if weights is None else tile(c, i, j) * weights[None, :]

    def less(i: Any, j: Any) -> Array:
        """Tile (i, j) of P less what the columns before tile j take from it."""
        barrier()
        return loop_between(
            0, j, lambda k, sum: sum + dot(-weighted(i, k), tile(c, j, k), (1, 1)), tile(gram, i, j)
        )

    def row(i: Any, carry: Any) -> Any:
        def below(j: Any, carry: Any) -> Any:
            keep(c, i, j, dot(less(i, j), tile(inverse, j, j), (1, 1)))
            return carry

        def across(j: Any, carry: Any) -> Any:
            met = loop_between(j, i, lambda k, sum: sum + dot(weighted(i, k), tile(inverse, k, j)), zero)
            keep(inverse, i, j, dot(-corner, met))
            keep(inverse, j, i, zero)
            return carry

        loop_between(0, i, below, 0)
        corner = _eliminated(less(i, i), ridge, least(i), beta(i))
        loop_between(0, i, across, 0)
        keep(inverse, i, i, corner)
        barrier()
        return carry

    loop(inverse.shape[-1] // TILE, row, 0)


def _factor_states(shape: Shape, refs: Refs, leg: Any) -> None:
    """L⁻¹ for H = L Lᵀ. Before the first leg there is nothing."""

    def lines(i: Any) -> Array:
        return i * TILE + indices(TILE)

    def least(i: Any) -> Array:
        return 1 / load_vector(refs["lam"], lines(i), shape.key, 1.0).astype(jnp.float64)

    only(leg > 0, lambda: _factor(refs, leg, 0.0, least, lambda i: None))


def _factor_chunks(shape: Shape, refs: Refs, leg: Any) -> None:
    """G⁻¹ of the P of one chunk of every leg."""
    dtype = refs["new_inverse"].dtype

    def lines(i: Any) -> Array:
        return i * TILE + indices(TILE)

    def beta(i: Any) -> Array | None:
        weights = weights_of(shape, refs, at(shape, refs, leg) * CHUNK + lines(i))
        return None if weights is None else weights.astype(dtype)

    _factor(refs, leg, 1.0, lambda i: jnp.ones((TILE,), dtype), beta)


def _pieces(of: jax.ShapeDtypeStruct) -> int:
    """In how many pieces R or Φ begins."""
    return max(1, of.shape[-2] // COLUMNS) * max(1, of.shape[-1] // NARROW)


def _piece_of(ref: Any, block: Any) -> tuple[Any, Any, Any]:
    """A program's leg, and where the rows and the columns of its piece start."""
    rows, columns = _sides(ref)
    down, across = np.int32(ref.shape[-2] // rows), np.int32(ref.shape[-1] // columns)
    row, column = lax.rem(block, down), lax.rem(lax.div(block, down), across)
    return lax.div(block, down * across), row * rows, column * columns


def _sides(ref: Any) -> tuple[int, int]:
    return min(COLUMNS, ref.shape[-2]), min(NARROW, ref.shape[-1])


def _begin_covariances(shape: Shape, refs: Refs, block: Any) -> None:
    """A piece of R before the first chunk of a leg: from the factor of H, in float64, or of no pairs."""
    leg, down, across = _piece_of(refs["new_r"], block)
    number, (rows, columns) = leg * legs(shape)[1], _sides(refs["new_r"])
    row, column = down + indices(rows), across + indices(columns)

    def keep(value: Array) -> None:
        store(refs["new_r"], row, column, None, value.astype(shape.dtype), number=number)

    def unpaired() -> None:
        lam = load_vector(refs["lam"], row, shape.key, 1.0)
        keep(jnp.where(row[:, None] == column[None, :], lam[:, None], 0.0))

    def paired() -> None:
        def add(index: Any, sum: Array) -> Array:
            barrier()
            p = piece(index, NARROW)
            a, b = (load(refs["root"], p, some, number=leg) for some in (row, column))
            return sum + dot(a, b, (0, 0))

        # What is above the diagonal of the factor is zero.
        first = lax.div(jnp.maximum(down, across), np.int32(NARROW))
        zero = jnp.zeros((rows, columns), jnp.float64)
        met = loop_between(first, shape.key_tile // NARROW, add, zero)
        store(refs["new_wide"], row, column, None, met, number=leg)
        keep(met)

    if "root" not in refs:
        unpaired()
        return
    only(leg == 0, unpaired)
    only(leg > 0, paired)


def _begin_weights(shape: Shape, refs: Refs, block: Any) -> None:
    """A piece of Φ before the first chunk of a leg."""
    leg, down, across = _piece_of(refs["new_phi"], block)
    rows, columns = _sides(refs["new_phi"])
    row, column = down + indices(rows), across + indices(columns)

    def keep(value: Array) -> None:
        number = leg * legs(shape)[1]
        store(refs["new_phi"], row, column, None, value.astype(shape.dtype), number=number)

    def unpaired() -> None:
        keep(shape.zeros(rows, columns))

    def paired() -> None:
        def term(p: Array) -> Array:
            moment = load(refs["moment"], row, p, number=leg)
            return dot(moment, load(refs["wide"], p, column, number=leg))

        keep(total(shape.key_tile, term, width=NARROW))

    if "wide" not in refs:
        unpaired()
        return
    only(leg == 0, unpaired)
    only(leg > 0, paired)


def _begun(shape: Shape, given: dict[str, Array], moment: Array | None) -> dict[str, Array]:
    """R and Φ of every chunk, so far only at the beginning of legs."""
    of = states(shape)
    blocks = {name: legs(shape)[0] * _pieces(array) for name, array in of.items()}
    outputs, phi = dict(r=of["r"]), dict(phi=of["phi"])
    if moment is None:
        begun = run(shape, _begin_covariances, given, outputs, blocks=blocks["r"])
        return begun | run(shape, _begin_weights, given, phi, blocks=blocks["phi"])
    outputs |= dict(wide=like(given["wide"]))
    begun = run(shape, _begin_covariances, given, outputs, blocks=blocks["r"], in_place=dict(wide="wide"))
    given = dict(moment=moment, wide=begun.pop("wide"))
    return begun | run(shape, _begin_weights, given, phi, blocks=blocks["phi"])


def before_legs(
    shape: Shape, keys: Array, values: Array, lam: Array, beta: Array | None, want_state: bool
) -> tuple[dict[str, Array], dict[str, Array] | None]:
    """R and Φ of every chunk, so far only at the beginning of legs; and the final state."""
    key, value = shape.key_tile, shape.value_tile
    count, size = legs(shape)
    ends = count + want_state
    with jax.enable_x64(True):
        if ends == 1:
            return _begun(shape, dict(lam=lam), None), None
        wide = partial(empty, shape, ends, dtype=jnp.float64)

        def read(array: Array) -> Array:
            return array if _SUMS_IN_16_BITS else array.astype(shape.dtype)

        pairs = dict(k=read(keys), beta=beta)

        def sums(given: dict[str, Array], begin: Array, **over: Any) -> Array:
            outputs = dict(sum=wide(*begin.shape[-2:]))
            over |= dict(count=(ends - 1) * size, every=size, rows=NARROW)
            return _running(shape, _pairs_before, pairs | given, outputs, begin, known=True, **over)["sum"]

        penalty = 1 / jnp.pad(lam, ((0, 0), (0, key - shape.key)), constant_values=1.0).astype(jnp.float64)
        gram = sums(dict(lam=lam), jnp.eye(key) * penalty[:, None], columns=NARROW, symmetric=True)
        moment = sums(dict(v=read(values)), jnp.zeros((shape.batch, value, key)))
        found = run(
            shape,
            _factor_states,
            dict(gram=gram, lam=lam),
            dict(inverse=wide(key, key), c=wide(key, key)),
            blocks=ends,
            in_place=dict(gram="c"),
            warps=1,
        )
        root = found["inverse"]
        begun = _begun(shape, dict(root=root, lam=lam, wide=found["c"]), moment)
        if not want_state:
            return begun, None
        last = root[:, -1]
        met = matmul(transpose(last), matmul(last, transpose(moment[:, -1])))
        factor = transpose(last)[:, : shape.key, : shape.key]
        final = dict(factor=factor, weights_t=met[:, : shape.key, : shape.value])
        return begun, {name: a.astype(shape.dtype) for name, a in final.items()}


def inverted(shape: Shape, gram: Array, now: dict[str, Array | None]) -> Array:
    """G⁻¹ of one chunk of every leg, as exact as P is given; whose memory is taken."""
    given = dict(gram=gram) | now
    settings: Any = dict(blocks=legs(shape)[0], in_place=dict(gram="c"), warps=1)
    return run(shape, _factor_chunks, given, dict(inverse=like(gram), c=like(gram)), **settings)["inverse"]


def after_chunks(
    shape: Shape,
    given: dict[str, Array],
    lam: Array,
    ahead: tuple[Array, Array] | None,
    over: tuple[Array, Array],
) -> tuple[Array, Array, Array]:
    """W and Pᵀ over all tokens after every chunk, and the diagonal of all of W.

    Args:
        given: x and z by chunk, g over all time.
        ahead: the sums W and P that the cotangent of the final state begins with, if there is one.
        over: arrays of the sums' sizes, whose memory these take over.
    """
    count, key, value = chunks(shape), shape.key_tile, shape.value_tile
    begin = [jnp.zeros((shape.batch, side, key), shape.dtype) for side in (key, value)]
    if ahead is not None:
        sums = ahead[0], ahead[1].swapaxes(-1, -2)
        begin = [a.at[:, : b.shape[1], : b.shape[2]].set(b) for a, b in zip(begin, sums, strict=True)]
    outputs = dict(sum=empty(shape, count, key, key), diagonal=like(lam, shape.dtype))
    same: Any = dict(count=count, known=ahead is None, in_place=dict(over="sum"))
    grams = _running(
        shape,
        _grams_after,
        dict(x=given["x"], z=given["z"], over=over[0]),
        outputs,
        begin[0],
        symmetric=True,
        **same,
    )
    moments = _running(
        shape,
        _moments_after,
        # After z, when nothing else needs Φ any more.
        dict(x=given["x"], g=given["g"], after=given["z"], over=over[1]),
        dict(sum=empty(shape, count, value, key)),
        begin[1],
        **same,
    )
    return grams["sum"], moments["sum"], grams["diagonal"]
