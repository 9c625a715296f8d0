r"""Fused GPU kernels for wide heads: every chunk of a sequence at once, from prefix sums.

With H and S the sums over all pairs before a chunk, $H = L L^\top$ and $W = L^{-1}$, and with the chunk's keys,
queries and the weights in its coordinates, $\tilde K = K W^\top$, $\tilde Q = Q W^\top$, $\tilde\Phi = S W^\top$,

    N = G⁻¹ K̃        F = G⁻¹ (V - K̃ Φ̃ᵀ)        O = Q̃ Φ̃ᵀ + tril(Q̃ Nᵀ) β F

where G is for β = 1 the Cholesky factor of I + K̃ K̃ᵀ. Sums, W and G⁻¹ are those of `pallas_states.py`. Nothing is
divided by β, and nothing waits for another chunk but sums.

The gradient is that of `pallas.py` with the chunk for a block (there: N, f, α, ρ, κ, ν, W and P), again all chunks at
once, and then sums from the end.

Where queries, keys, values and outputs are in bfloat16 they are read and written as such. H stays in float64, all else
is in float32, and products that are not multiplied further take 16 digits of their factors (benchmarks/kernels.md).

A kernel is a list of products of 64 × 64 × 64. What goes into one is loaded for it, and what comes out is stored, also
where the next one takes it up: a thread then never holds more than one of them, and nothing is spilled.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from mesascope.ops.factor import matmul, transpose
from mesascope.ops.kernels import Shape, barrier, has_float64, indices, load, store
from mesascope.ops.pallas_states import (
    CHUNK,
    Refs,
    after_chunks,
    before_chunks,
    each,
    empty,
    exact,
    given,
    programs,
    run,
    share,
    tokens_of,
    total,
    weights_of,
    within_chunks,
)
from mesascope.ops.sequence import Sequence


class _Chunk(NamedTuple):
    """One chunk's matrices, piece by piece."""

    shape: Shape
    refs: Refs
    number: Any

    def read(self, name: str, columns: Array | None = None, rows: Array | None = None) -> Array:
        """Of a matrix of the chunk; by default all tokens."""
        rows, columns = (indices(CHUNK) if a is None else a for a in (rows, columns))
        return load(self.refs[name], rows, columns, number=self.number)

    def keep(self, name: str, value: Array, columns: Array | None = None, rows: Array | None = None) -> None:
        """Store it, after all threads have loaded what may have been there, and before any of them loads it."""
        rows, columns = (indices(CHUNK) if a is None else a for a in (rows, columns))
        barrier()
        store(self.refs["new_" + name], rows, columns, None, value, number=self.number)
        barrier()

    def given(self, name: str, columns: Array, tile: int = 0) -> Array:
        return given(self.refs[name], self.number, columns, tile=tile)

    def product(self, a: Array, b: Array, contract: tuple[int, int] = (1, 0)) -> Array:
        """As exact as inputs and outputs are; `exact` is for what is multiplied further."""
        return exact(a, b, contract, bits=self.shape.bits)

    def weights(self) -> Array | None:
        return weights_of(self.shape, self.refs, tokens_of(self.number))

    def weighted(self, name: str) -> Array:
        """Columns times β."""
        beta, array = self.weights(), self.read(name)
        return array if beta is None else beta[None, :] * array

    def causal(self, name: str, array: Array) -> None:
        lines = indices(CHUNK)
        self.keep(name, jnp.where(lines[:, None] >= lines[None, :], array, 0.0))

    def whiten(self, name: str, place: str) -> None:
        """q̃ = q Wᵀ. W is triangular."""

        def part(i: Any, rows: Array) -> None:
            def term(p: Array) -> Array:
                return exact(self.given(name, p), self.read("root", p, rows), (1, 1))

            self.keep(place, total(self.shape.key_tile, term, last=i), rows)

        each(self.shape.key_tile, part)

    def restore(self, name: str) -> None:
        """x = x̃ W in its place: no column of x needs an earlier one of x̃."""

        def part(i: Any, columns: Array) -> None:
            def term(p: Array) -> Array:
                return exact(self.read("new_" + name, p), self.read("root", columns, p))

            self.keep(name, total(self.shape.key_tile, term, first=i), columns)

        each(self.shape.key_tile, part)


def _whiten(shape: Shape, refs: Refs, number: Any) -> None:
    """K̃."""
    _Chunk(shape, refs, number).whiten("k", "white")


def _innovate(shape: Shape, refs: Refs, number: Any) -> None:
    """Φ̃ᵀ, F and N; and G⁻¹ as gradients need it: of diag(β) G diag(β)⁻¹, without that division."""
    chunk, key = _Chunk(shape, refs, number), shape.key_tile

    def of_values(_: Any, values: Array) -> None:
        def phi(i: Any, columns: Array) -> None:
            back = (
                key // len(columns) - 1 - i
            )  # from the last on: what was summed up may be in the same place
            columns = back * len(columns) + indices(len(columns))

            def term(p: Array) -> Array:
                return exact(chunk.read("moment", p, values), chunk.read("root", p, columns), (1, 1))

            chunk.keep("phi", total(key, term, last=back), columns, values)

        each(key, phi)
        met = total(key, lambda p: exact(chunk.read("white", p), chunk.read("new_phi", p, values), (1, 1)))
        barrier()
        surprise = chunk.given("v", values).astype(met.dtype) - met
        chunk.keep("f", exact(chunk.read("inverse"), surprise), values)

    def of_keys(_: Any, columns: Array) -> None:
        chunk.keep("n", exact(chunk.read("inverse"), chunk.read("white", columns)), columns)

    each(shape.value_tile, of_values)
    each(key, of_keys)
    beta = chunk.weights()
    if beta is not None:
        i, j = indices(CHUNK)[:, None], indices(CHUNK)[None, :]
        met = total(key, lambda p: exact(chunk.read("white", p), chunk.read("new_n", p), (1, 1)))
        met = exact(chunk.read("inverse"), jnp.where(i > j, met, 0.0))
        scale = jnp.sum(jnp.where(i == j, chunk.read("inverse"), 0.0), 0)
        chunk.keep("inverse", (jnp.where(i == j, 1.0, 0.0) - beta[:, None] * met) * scale[None, :])


def _attend(shape: Shape, refs: Refs, number: Any) -> None:
    """The outputs, by way of q̃."""
    chunk, key = _Chunk(shape, refs, number), shape.key_tile
    chunk.whiten("q", "white_q")
    chunk.causal(
        "scores",
        total(key, lambda p: chunk.product(chunk.read("new_white_q", p), chunk.read("n", p), (1, 1))),
    )

    def part(_: Any, columns: Array) -> None:
        def term(p: Array) -> Array:
            return chunk.product(chunk.read("new_white_q", p), chunk.read("phi", p, columns), (1, 1))

        out = total(key, term, chunk.product(chunk.weighted("new_scores"), chunk.read("f", columns)))
        chunk.keep("out", out.astype(refs["new_out"].dtype), columns)

    each(shape.value_tile, part)


def _duals_of_queries(shape: Shape, refs: Refs, number: Any) -> None:
    """α and x."""
    chunk, key = _Chunk(shape, refs, number), shape.key_tile
    chunk.whiten("q", "x")
    chunk.causal("alpha", total(key, lambda p: exact(chunk.read("new_x", p), chunk.read("n", p), (1, 1))))

    def part(_: Any, columns: Array) -> None:
        met = exact(chunk.weighted("new_alpha"), chunk.read("n", columns))
        barrier()
        chunk.keep("x", chunk.read("new_x", columns) - met, columns)

    each(key, part)
    chunk.keep("alpha", exact(chunk.read("inverse"), chunk.read("new_alpha"), (0, 1)))
    chunk.restore("x")


def _duals_of_outputs(shape: Shape, refs: Refs, number: Any) -> None:
    """ρ and z."""
    chunk, value = _Chunk(shape, refs, number), shape.value_tile
    chunk.causal("rho", total(value, lambda p: exact(chunk.given("g", p), chunk.read("f", p), (1, 1))))

    def part(_: Any, columns: Array) -> None:
        def term(p: Array) -> Array:
            return exact(chunk.given("g", p), chunk.read("phi", columns, p))

        z = total(value, term, exact(chunk.weighted("new_rho"), chunk.read("n", columns)))
        chunk.keep("z", z, columns)

    each(shape.key_tile, part)
    chunk.keep("rho", exact(chunk.read("inverse"), chunk.read("new_rho"), (0, 1)))
    chunk.restore("z")


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
    missing = shape.blocks(CHUNK) * CHUNK - shape.time
    array = array.astype(jnp.bfloat16 if shape.coarse else shape.dtype)
    array = jnp.pad(array, ((0, 0), (0, missing), (0, 0))) if missing else array
    return array.reshape(shape.batch, -1, CHUNK, array.shape[-1])


def _joined(shape: Shape, chunks: Array, width: int) -> Array:
    whole = chunks.reshape(shape.batch, -1, chunks.shape[-1])
    return whole[:, : shape.time, :width].astype(shape.dtype)


def _by_chunk(
    shape: Shape, kernels: dict[Any, dict], inputs: Mapping[str, Array | None], in_place: dict[str, str]
) -> dict[str, Array]:
    """Outputs of kernels, one after the other: each reads what was given and what those before it wrote.

    Args:
        in_place: inputs that nothing needs once the output named has been written, which takes their memory over.
    """
    results: dict[str, Array] = {}
    for kernel, outputs in kernels.items():
        here = {name: place for name, place in in_place.items() if place in outputs}
        results |= run(
            shape, kernel, {**inputs, **results}, outputs, blocks=shape.blocks(CHUNK), in_place=here
        )
        inputs = {name: array for name, array in inputs.items() if name not in here}
    return results


def forward(seq: Sequence, want_state: bool, coarse: bool) -> dict[str, Array]:
    """Outputs and what the backward pass needs; if wanted, `factor` and `weights_t` of the final state."""
    shape = Shape.of(seq, coarse)
    q, k, v = (_cut(shape, a) for a in (seq.queries, seq.keys, seq.values))
    count, key, value = shape.blocks(CHUNK), shape.key_tile, shape.value_tile
    timed, square = empty(shape, count, CHUNK, key), empty(shape, count, CHUNK, CHUNK)
    root, moment = before_chunks(shape, k, v, seq.lam, seq.beta, want_state)
    with jax.enable_x64(True):  # the same program in any case
        white = run(shape, _whiten, dict(k=k, root=root), dict(white=timed), blocks=count)["white"]
    kept = dict(root=root, inverse=within_chunks(shape, white, seq.beta))
    states = dict(n=timed, f=empty(shape, count, CHUNK, value), phi=empty(shape, count, value, key))
    in_place = {} if want_state else dict(moment="phi")
    if seq.beta is None:
        in_place |= dict(white="n")
    else:
        states, in_place = states | dict(inverse=square), in_place | dict(inverse="inverse")
    out = empty(shape, count, CHUNK, value, dtype=q.dtype)
    results = _by_chunk(
        shape,
        {_innovate: states, _attend: dict(out=out, white_q=timed, scores=square)},
        dict(q=q, v=v, beta=seq.beta, moment=moment, white=white) | kept,
        in_place,
    )
    kept |= {name: results[name] for name in states}
    if want_state:
        last = root[:, -1, : shape.key, : shape.key]
        met = matmul(last, transpose(moment[:, -1, : shape.value, : shape.key]))
        kept |= dict(factor=transpose(last), weights_t=matmul(transpose(last), met))
    return kept | dict(out=_joined(shape, results["out"], shape.value))


def backward(
    seq: Sequence, saved: dict[str, Array], out_bar: Array, ahead: tuple[Array, Array] | None, coarse: bool
) -> dict[str, Array]:
    """Gradients.

    Args:
        ahead: the sums W and P that the cotangent of the final state begins with, if there is one.
    """
    shape = Shape.of(seq, coarse)
    q, k, v, g = (_cut(shape, a) for a in (seq.queries, seq.keys, seq.values, out_bar))
    count, key, value = shape.blocks(CHUNK), shape.key_tile, shape.value_tile
    timed, wide, square = (empty(shape, count, CHUNK, n) for n in (key, value, CHUNK))
    within = _by_chunk(
        shape,
        {_duals_of_queries: dict(x=timed, alpha=square), _duals_of_outputs: dict(z=timed, rho=square)},
        dict(q=q, g=g, beta=seq.beta) | {name: saved[name] for name in ("root", "inverse", "n", "f", "phi")},
        dict(n="z"),
    )
    both = dict(x=within["x"], z=within["z"], g=g)
    root = saved["root"] if saved["root"].shape[1] == count else None  # else that of the final state is in it
    gram, moment, diagonal = after_chunks(shape, both, seq.lam, ahead, (root, saved["phi"]))
    pairs = run(
        shape,
        _pull,
        dict(k=k, v=v) | both | {n: within[n] for n in ("alpha", "rho")}
        | dict(gram=gram, moment=moment),
        {n: jax.ShapeDtypeStruct(a.shape, g.dtype) for n, a in dict(kappa=timed, nu=wide).items()},
        blocks=count * programs(shape.widest),
        in_place={} if coarse else dict(x="kappa"),
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
