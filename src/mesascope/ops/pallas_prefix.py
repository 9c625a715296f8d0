r"""Fused GPU kernels for wide heads: a sequence in legs side by side, each of which is walked chunk by chunk.

With R and Φ before a chunk, and the chunk's keys, values and queries,

    B = K R        P = B Kᵀ        M = G⁻¹ B        E = G⁻¹ (V - K Φᵀ)        O = Q Φᵀ + tril(Q Mᵀ) β E
    R ← R - Mᵀ β M        Φ ← Φ + Eᵀ β M

where G is for β = 1 the Cholesky factor of I + P. R and Φ before a leg come from the sums over all earlier pairs
(`pallas_states.py`). Where there are heads enough there is one leg, and no sums but for a final state. These sums and
what follows from them, P, G⁻¹ and the products with it are in float64: what is in float32 then loses less than the
classical recursion does (benchmarks/kernels.md). Nothing is divided by β.

The gradient is that of `pallas.py` with the chunk for a block (there: N for M, f for E, α, ρ, κ, ν, W and P), all
chunks at once, and then sums from the end.

Where queries, keys, values and outputs are in bfloat16 they are read and written as such. Then all is in float32 but
the sums before legs, and products that are not multiplied further take 16 digits of their factors, but for long keys.

A kernel is a list of products of 64 × 64 × 64. What goes into one is loaded for it, and what comes out is stored, also
where the next one takes it up: a thread then never holds more than one of them, and nothing is spilled.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from mesascope.ops.kernels import Shape, barrier, has_float64, indices, load, only, store
from mesascope.ops.pallas_chunks import (
    CHUNK,
    COLUMNS,
    NARROW,
    Refs,
    at,
    chunks,
    each,
    empty,
    exact,
    given,
    legs,
    like,
    piece,
    programs,
    run,
    share,
    states,
    tokens_of,
    total,
    weights_of,
)
from mesascope.ops.pallas_states import after_chunks, before_legs, inverted
from mesascope.ops.sequence import Sequence

_UNROLLED = 8  # turns, beyond which they are a loop


class _Chunk(NamedTuple):
    """One chunk's matrices, piece by piece."""

    shape: Shape
    refs: Refs
    number: Any

    def read(self, name: str, columns: Array | None = None, rows: Array | None = None) -> Array:
        """Of a matrix of the chunk; by default all tokens."""
        rows, columns = (indices(CHUNK) if a is None else a for a in (rows, columns))
        return load(self.refs[name], rows, columns, number=self.number)

    def latest(self, name: str, columns: Array) -> Array:
        """The same of what this kernel may have written."""
        lines, new = indices(CHUNK), self.refs.get("new_" + name)
        return load(self.refs[name] if new is None else new, lines, columns, number=self.number)

    def keep(self, name: str, value: Array, columns: Array | None = None, rows: Array | None = None) -> None:
        """Store it, after all threads have loaded what may have been there, and before any of them loads it."""
        rows, columns = (indices(CHUNK) if a is None else a for a in (rows, columns))
        barrier()
        store(self.refs["new_" + name], rows, columns, None, value, number=self.number)
        barrier()

    def given(self, name: str, columns: Array, tile: int | None = None) -> Array:
        """Columns of q, k, v or g; of a wider tile than their own, there may be some beyond."""
        own = self.shape.key_tile if name in "qk" else self.shape.value_tile
        return given(self.refs[name], self.number, columns, indices(CHUNK), tile or own)

    def product(self, a: Array, b: Array, contract: tuple[int, int] = (1, 0)) -> Array:
        """As exact as inputs and outputs are; `exact` is for what is multiplied further."""
        return exact(a, b, contract, bits=self.shape.bits)

    def weighted(self, array: Array) -> Array:
        """Columns times β."""
        beta = weights_of(self.shape, self.refs, tokens_of(self.number))
        return array if beta is None else beta[None, :] * array


def _in_parts(shape: Shape) -> bool:
    """Whether the columns of a chunk are shared by several programs: where there are many, and legs are few."""
    return shape.widest > 2 * COLUMNS


def _parts(shape: Shape, width: int = COLUMNS) -> int:
    """How many programs share a chunk of every leg: one for each piece of its keys' columns and of its values'."""
    return (shape.key_tile + max(width, shape.value_tile)) // width if _in_parts(shape) else 1


def _part(shape: Shape, block: Any, width: int = COLUMNS) -> tuple[Any, Any]:
    """A program's leg, and which piece of it is its own."""
    count = np.int32(_parts(shape, width))
    return (block, np.int32(0)) if count == 1 else (lax.div(block, count), lax.rem(block, count))


def _each(shape: Shape, number: Any, of_keys: Callable, of_values: Callable, *, width: int = COLUMNS) -> None:
    """Do something with the piece of this number of the keys' or of the values' columns, or with all of both."""
    if not _in_parts(shape):
        each(shape.key_tile, of_keys, width=width)
        each(shape.value_tile, of_values, width=width)
        return
    before = np.int32(shape.key_tile // width)
    only(number < before, lambda: of_keys(number, piece(number, width)))
    only(number >= before, lambda: of_values(number, piece(number - before, min(width, shape.value_tile))))


def _meet(shape: Shape, refs: Refs, block: Any) -> None:
    """What a chunk finds: B in the place of M, V - K Φᵀ in that of E, and P."""
    leg, number = _part(shape, block)
    chunk, key = _Chunk(shape, refs, at(shape, refs, leg)), shape.key_tile

    def of_keys(_: Any, columns: Array) -> None:
        chunk.keep(
            "m", total(key, lambda p: exact(chunk.given("k", p), chunk.read("r", columns, p))), columns
        )

    def of_values(_: Any, columns: Array) -> None:
        def term(p: Array) -> Array:
            return exact(chunk.given("k", p), chunk.read("phi", p, columns), (1, 1))

        met = total(key, term)
        barrier()
        chunk.keep("e", chunk.given("v", columns).astype(met.dtype) - met, columns)

    _each(shape, number, of_keys, of_values)
    if not _in_parts(shape):
        _overlap(shape, refs, leg)


def _overlap(shape: Shape, refs: Refs, leg: Any) -> None:
    """P, when B is there."""
    chunk, wide = _Chunk(shape, refs, at(shape, refs, leg)), refs["new_gram"].dtype

    def term(p: Array) -> Array:
        k = chunk.given("k", p)
        return exact(chunk.latest("m", p).astype(wide), k if shape.coarse else k.astype(wide), (1, 1))

    met = total(shape.key_tile, term, width=NARROW)
    store(refs["new_gram"], indices(CHUNK), indices(CHUNK), None, met, number=leg)


def _solve(shape: Shape, refs: Refs, block: Any) -> None:
    """M and E."""
    leg, number = _part(shape, block, NARROW)
    chunk, lines = _Chunk(shape, refs, at(shape, refs, leg)), indices(CHUNK)

    def of(name: str, _: Any, columns: Array) -> None:
        inverse = load(refs["solve"], lines, lines, number=leg)
        met = exact(inverse, chunk.read(name, columns).astype(inverse.dtype))
        chunk.keep(name, met.astype(shape.dtype), columns)

    _each(shape, number, partial(of, "m"), partial(of, "e"), width=NARROW)


def _update(shape: Shape, refs: Refs, block: Any) -> None:
    """R and Φ for the next chunk of the leg; and G⁻¹ as gradients need it, of diag(β) G diag(β)⁻¹."""
    leg, number = _part(shape, block)
    at_chunk, lines, key = at(shape, refs, leg), indices(CHUNK), shape.key_tile
    chunk, beta = _Chunk(shape, refs, at_chunk), weights_of(shape, refs, tokens_of(at_chunk))

    def weighted(array: Array) -> Array:
        return array if beta is None else beta[:, None] * array

    def invert() -> None:
        kept = load(refs["solve"], lines, lines, number=leg).astype(shape.dtype)
        if beta is not None:
            i, j = lines[:, None], lines[None, :]
            met = total(key, lambda p: exact(chunk.given("k", p), chunk.latest("m", p), (1, 1)))
            met = exact(kept, jnp.where(i > j, met, 0.0))
            scale = jnp.sum(jnp.where(i == j, kept, 0.0), 0)
            kept = (jnp.where(i == j, 1.0, 0.0) - beta[:, None] * met) * scale[None, :]
        chunk.keep("inverse", kept)

    def change(state: str, name: str, sign: float, _: Any, row: Array) -> None:
        def columns(_: Any, column: Array) -> None:
            met = exact(chunk.latest(name, row), weighted(chunk.latest("m", column)), (0, 0))
            barrier()
            before = chunk.read(state, column, row)
            store(refs["new_" + state], row, column, None, before + sign * met, number=at_chunk + 1)

        each(key, columns)

    def go_on() -> None:
        _each(shape, number, partial(change, "r", "m", -1.0), partial(change, "phi", "e", 1.0))

    only(number == 0, invert) if _in_parts(shape) else invert()
    only(refs["turn"][0] + 1 != legs(shape)[1], go_on)


def _move(shape: Shape, refs: Refs, leg: Any) -> None:
    """Both at once."""
    _solve(shape, refs, leg)
    barrier()
    _update(shape, refs, leg)


def _causal(array: Array) -> Array:
    lines = indices(CHUNK)
    return jnp.where(lines[:, None] >= lines[None, :], array, 0.0)


def _attend(shape: Shape, refs: Refs, number: Any) -> None:
    """The outputs."""
    chunk, key = _Chunk(shape, refs, number), shape.key_tile
    met = total(key, lambda p: chunk.product(chunk.given("q", p), chunk.read("m", p), (1, 1)))
    scores = chunk.weighted(_causal(met))

    def part(_: Any, columns: Array) -> None:
        def term(p: Array) -> Array:
            return chunk.product(chunk.given("q", p), chunk.read("phi", p, columns), (1, 1))

        out = total(key, term, chunk.product(scores, chunk.read("e", columns)))
        chunk.keep("out", out.astype(refs["new_out"].dtype), columns)

    each(shape.value_tile, part)


def _duals_of_queries(shape: Shape, refs: Refs, number: Any) -> None:
    """α and x."""
    chunk, key = _Chunk(shape, refs, number), shape.key_tile
    met = _causal(total(key, lambda p: exact(chunk.given("q", p), chunk.read("m", p), (1, 1))))
    chunk.keep("alpha", exact(chunk.read("inverse"), met, (0, 1)))
    weighted = chunk.weighted(met)

    def part(_: Any, columns: Array) -> None:
        def term(p: Array) -> Array:
            return exact(chunk.given("q", p), chunk.read("r", columns, p))

        chunk.keep("x", total(key, term, exact(-weighted, chunk.read("m", columns))), columns)

    each(key, part)


def _replaces(shape: Shape) -> bool:
    """Whether x takes the place of R, which has the same sides."""
    return shape.key_tile == CHUNK


def _duals_of_outputs(shape: Shape, refs: Refs, number: Any) -> None:
    """ρ and z."""
    chunk, value = _Chunk(shape, refs, number), shape.value_tile
    met = _causal(total(value, lambda p: exact(chunk.given("g", p), chunk.read("e", p), (1, 1))))
    chunk.keep("rho", exact(chunk.read("inverse"), met, (0, 1)))
    weighted = chunk.weighted(met)

    def part(_: Any, columns: Array) -> None:
        def term(p: Array) -> Array:
            return exact(chunk.given("g", p), chunk.read("phi", columns, p))

        chunk.keep("z", total(value, term, exact(weighted, chunk.read("m", columns))), columns)

    each(shape.key_tile, part)


def _pull(shape: Shape, refs: Refs, block: Any) -> None:
    """Some columns of κ and ν: what they owe to the chunk itself, and to later ones, by the sums W and Pᵀ."""
    number, columns = share(shape.widest, block)
    chunk, lines = _Chunk(shape, refs, number), indices(CHUNK)

    def part(name: str, rows: Array, across: Array) -> Array:
        return load(refs[name], rows, across, within(refs[name]), number=number)

    def within(ref: Any) -> tuple[int, int] | None:
        """The shape of an array where columns of the wider one may lie beyond it."""
        return None if shape.key_tile == shape.value_tile else ref.shape[-2:]

    def keep(name: str, value: Array) -> None:
        barrier()
        ref = refs["new_" + name]
        store(ref, lines, columns, within(ref), value.astype(ref.dtype), number=number)

    def of_values(p: Array) -> Array:
        return chunk.product(chunk.given("v", p), part("moment", p, columns))

    def of_keys(p: Array) -> Array:  # W is symmetric
        return chunk.product(-chunk.given("k", p), part("gram", columns, p), (1, 1))

    def of_targets(p: Array) -> Array:
        return chunk.product(chunk.given("k", p), part("moment", columns, p), (1, 1))

    kappa = chunk.product(chunk.read("rho"), part("x", lines, columns))
    barrier()
    kappa = kappa + chunk.product(-chunk.read("alpha"), part("z", lines, columns))
    kappa = total(shape.value_tile, of_values, kappa)
    keep("kappa", total(shape.key_tile, of_keys, kappa))
    g = chunk.given("g", columns, shape.widest)
    keep("nu", total(shape.key_tile, of_targets, chunk.product(chunk.read("alpha"), g)))


def applies(seq: Sequence) -> bool:
    """Nothing forgets, restarts or goes on with an earlier state; and a tile of keys fills several warps."""
    plain = seq.log_decay is None and seq.runs is None and seq.factor is None
    return plain and has_float64() and Shape.of(seq).key_tile >= 32


def _cut(shape: Shape, array: Array) -> Array:
    """In chunks, of the dtype that kernels read: the last with zeros at its end if need be, which copies all."""
    missing = chunks(shape) * CHUNK - shape.time
    array = array.astype(jnp.bfloat16 if shape.coarse else shape.dtype)
    array = jnp.pad(array, ((0, 0), (0, missing), (0, 0))) if missing else array
    return array.reshape(shape.batch, -1, CHUNK, array.shape[-1])


def _joined(shape: Shape, array: Array, width: int) -> Array:
    whole = array.reshape(shape.batch, -1, array.shape[-1])
    return whole[:, : shape.time, :width].astype(shape.dtype)


def _walk(shape: Shape, k: Array, v: Array, beta: Array | None, begun: dict[str, Array]) -> dict[str, Array]:
    """R, Φ, M, E and G⁻¹ of every chunk: of the first chunk of every leg, then of the second, and so on."""
    count, size = legs(shape)
    wide = shape.dtype if shape.coarse else jnp.float64
    gram = empty(shape, count, CHUNK, CHUNK, dtype=wide)
    arrays = states(shape) | {
        name: empty(shape, chunks(shape), CHUNK, width)
        for name, width in dict(m=shape.key_tile, e=shape.value_tile, inverse=CHUNK).items()
    }

    def step(turn: Any, found: dict[str, Array]) -> dict[str, Array]:
        now = dict(turn=jnp.full((shape.batch, 1), turn, jnp.int32), beta=beta)

        def taken(kernel: Any, inputs: dict, places: tuple[str, ...], parts: int = 1, **others: Any) -> None:
            """Have a kernel write into arrays of all chunks, which the first turn makes, and into others."""
            outputs = {name: arrays[name] for name in places} | others
            settings: Any = dict(
                blocks=count * parts, in_place={name: name for name in places if name in found}
            )
            found.update(run(shape, kernel, now | inputs | found, outputs, **settings))

        found = dict(found)
        if _in_parts(shape):
            taken(_meet, dict(k=k, v=v), ("m", "e"), _parts(shape))
            taken(_overlap, dict(k=k), (), gram=gram)
        else:
            taken(_meet, dict(k=k, v=v), ("m", "e"), gram=gram)
        solve = inverted(shape, found.pop("gram"), now)
        if _in_parts(shape):
            taken(_solve, dict(solve=solve), ("m", "e"), _parts(shape, NARROW))
            taken(_update, dict(k=k, solve=solve), ("inverse", "r", "phi"), _parts(shape))
        else:
            taken(_move, dict(k=k, solve=solve), ("m", "e", "inverse", "r", "phi"))
        return found

    with jax.enable_x64(True):  # the same program in any case
        found = step(np.int32(0), begun)
        if size > _UNROLLED:
            return lax.fori_loop(np.int32(1), np.int32(size), step, found)
        for turn in range(1, size):
            found = step(np.int32(turn), found)
        return found


def forward(seq: Sequence, want_state: bool, coarse: bool) -> dict[str, Array]:
    """Outputs and what the backward pass needs; if wanted, `factor` and `weights_t` of the final state."""
    shape = Shape.of(seq, coarse)
    q, k, v = (_cut(shape, a) for a in (seq.queries, seq.keys, seq.values))
    count, value = chunks(shape), shape.value_tile
    begun, final = before_legs(shape, k, v, seq.lam, seq.beta, want_state)
    kept = _walk(shape, k, v, seq.beta, begun)
    read = {name: kept[name] for name in ("phi", "m", "e")}
    # These come out as they go in: what takes over their memory then has to wait for this.
    done = run(
        shape,
        _attend,
        dict(q=q, beta=seq.beta) | read,
        dict(out=empty(shape, count, CHUNK, value, dtype=q.dtype)) | {n: like(a) for n, a in read.items()},
        blocks=count,
        in_place={name: name for name in read},
    )
    out = done.pop("out")
    kept |= done
    return kept | (final or {}) | dict(out=_joined(shape, out, shape.value))


def backward(
    seq: Sequence, saved: dict[str, Array], out_bar: Array, ahead: tuple[Array, Array] | None, coarse: bool
) -> dict[str, Array]:
    """Gradients.

    Args:
        ahead: the sums W and P that the cotangent of the final state begins with, if there is one.
    """
    shape = Shape.of(seq, coarse)
    q, k, v, g = (_cut(shape, a) for a in (seq.queries, seq.keys, seq.values, out_bar))
    count, key, value = chunks(shape), shape.key_tile, shape.value_tile
    timed, wide, square = (empty(shape, count, CHUNK, n) for n in (key, value, CHUNK))

    def duals(kernel: Any, given: dict, names: tuple[str, ...], outputs: dict, **settings: Any) -> dict:
        read = given | dict(beta=seq.beta) | {name: saved[name] for name in names}
        return run(shape, kernel, read, outputs, blocks=count, **settings)

    of_queries = duals(
        _duals_of_queries,
        dict(q=q),
        ("r", "inverse", "m"),
        dict(x=timed, alpha=square),
        in_place=dict(r="x") if _replaces(shape) else {},
    )
    of_outputs = duals(
        _duals_of_outputs,
        dict(g=g, after=of_queries["x"]),  # when nothing else needs M any more
        ("phi", "inverse", "m", "e"),
        dict(z=timed, rho=square),
        in_place=dict(m="z") | (dict(e="rho") if value == CHUNK else {}),
    )
    within = of_queries | of_outputs
    both = dict(x=within["x"], z=within["z"], g=g)
    # With weights, κ and ν are multiplied by β below, and summed up for ∂β.
    kept = g.dtype if seq.beta is None else shape.dtype
    over = saved["inverse" if _replaces(shape) else "r"], saved["phi"]
    gram, moment, diagonal = after_chunks(shape, both, seq.lam, ahead, over)
    pairs = run(
        shape,
        _pull,
        dict(k=k, v=v) | both | {n: within[n] for n in ("alpha", "rho")}
        | dict(gram=gram, moment=moment),
        {n: like(a, kept) for n, a in dict(kappa=timed, nu=wide).items()},
        blocks=count * programs(shape.widest),
        in_place=dict(x="kappa") if kept == shape.dtype else {},
    )  # fmt: skip

    z, kappa, nu = (
        _joined(shape, array, width)
        for array, width in (
            (within["z"], shape.key),
            (pairs["kappa"], shape.key),
            (pairs["nu"], shape.value),
        )
    )
    gradients = dict(z=z, k_bar=kappa, v_bar=nu, lam_bar=0.5 * diagonal)
    if seq.beta is not None:
        beta = seq.beta[..., None]
        pull = jnp.sum(seq.keys * kappa, -1) + jnp.sum(seq.values * nu, -1)
        gradients |= dict(k_bar=beta * kappa, v_bar=beta * nu, pull=pull)
    return gradients
