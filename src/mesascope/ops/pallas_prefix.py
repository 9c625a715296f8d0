r"""Fused GPU kernels for wide heads: every chunk of a sequence at once, from prefix sums.

With H and S the sums over all pairs before a chunk, $H = L L^\top$ and $W = L^{-1}$, and with the chunk's keys,
queries and the weights in its coordinates, $\tilde K = K W^\top$, $\tilde Q = Q W^\top$, $\tilde\Phi = S W^\top$,

    P = K̃ K̃ᵀ,   c_j = column j of P / √s_j,   s_j = 1 + β_j P_jj,   P ← P - β_j c_j c_jᵀ        j = 0, 1, …
    G = tril(c, -1) diag(β) + diag(√s)            G⁻¹ = its inverse
    N = G⁻¹ K̃        F = G⁻¹ (V - K̃ Φ̃ᵀ)        O = Q̃ Φ̃ᵀ + tril(Q̃ Nᵀ) β F

For β = 1 this is the Cholesky factor of I + P. Nothing is divided by β, and nothing waits for another chunk but sums.

What is factored must be known to more than float32: 1/λ drowns in the rounding of H, and 1 in that of P (README.md).
So H, P and their factors are in float64, which the matrix units of a data-center GPU do as fast as three TF32
products; all else is in the precision of the inputs. A factorization is a chain of dependent steps. It is done by one
warp per matrix, whose sums need no shared memory, in tiles of 16 × 16 with all between them as matrix products, and
with thousands of matrices side by side.

The gradient is that of `pallas.py` with the chunk for a block (there: N, f, α, ρ, κ, ν, W and P), again all chunks at
once, and then sums from the end.
"""

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
    call_by_block,
    dot,
    has_float64,
    indices,
    load,
    load_vector,
    loop,
    loop_between,
    store,
    store_vector,
)
from mesascope.ops.sequence import Sequence

_CHUNK = 64
_TILE = 16
_COLUMNS = 64  # of an output that one program computes, where they do not depend on each other

Refs = dict[str, Any]


def _tokens(chunk: Any) -> Array:
    return chunk * _CHUNK + indices(_CHUNK)


def _weights(shape: Shape, refs: Refs, tokens: Array) -> Array | None:
    return load_vector(refs["beta"], tokens, shape.time) if "beta" in refs else None


def _times(beta: Array | None, array: Array) -> Array:
    return array if beta is None else beta.astype(array.dtype) * array


def _whole(ref: Any, chunk: Any) -> Array:
    """A chunk's matrix."""
    return load(ref, indices(ref.shape[-2]), indices(ref.shape[-1]), number=chunk)


def _keep(ref: Any, chunk: Any, value: Array) -> None:
    store(ref, indices(ref.shape[-2]), indices(ref.shape[-1]), None, value, number=chunk)


def _programs(tile: int) -> int:
    """By how many programs the columns of a chunk are shared."""
    return max(1, tile // _COLUMNS)


def _share(tile: int, block: Any) -> tuple[Any, Array]:
    """A program's chunk, and its columns."""
    count, width = np.int32(_programs(tile)), min(tile, _COLUMNS)
    if count == 1:
        return block, indices(width)
    return lax.div(block, count), lax.rem(block, count) * width + indices(width)


def _inside(ref: Any, tile: int) -> tuple[int, int] | None:
    """The shape of an array where the columns of a share may lie beyond it."""
    return None if ref.shape[-1] == tile else ref.shape[-2:]


def _sums(shape: Shape, refs: Refs, block: Any) -> None:
    """What a chunk adds to some columns of H and Sᵀ. By half chunks: registers are few."""
    chunk, columns = _share(shape.widest, block)
    gram = jnp.zeros((shape.key_tile, len(columns)), jnp.float64)
    moment = jnp.zeros((shape.key_tile, len(columns)), shape.dtype)
    for half in range(2):
        tokens = chunk * _CHUNK + half * _CHUNK // 2 + indices(_CHUNK // 2)
        k, beta = shape.keys(refs["k"], tokens), _weights(shape, refs, tokens)
        beta = None if beta is None else beta[:, None]
        part = load(refs["k"], tokens, columns, (shape.time, shape.key)).astype(jnp.float64)
        v = load(refs["v"], tokens, columns, (shape.time, shape.value))
        gram = gram + dot(k.astype(jnp.float64), _times(beta, part), (0, 0))
        moment = moment + dot(k, _times(beta, v), (0, 0))
    rows = indices(shape.key_tile)
    for ref, value in ((refs["new_gram"], gram), (refs["new_moment"], moment)):
        store(ref, rows, columns, _inside(ref, shape.widest), value, number=chunk)


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
        chunk = shape.blocks(_CHUNK) - 1 - index if backwards else index
        new = [load(refs[name], rows, indices(refs[name].shape[-1]), number=chunk) for name in names]
        write(chunk, totals)
        return [a + b for a, b in zip(totals, new, strict=True)]

    totals = loop(shape.blocks(_CHUNK), step, totals)
    if refs["new_gram"].shape[0] > shape.blocks(_CHUNK):
        write(np.int32(shape.blocks(_CHUNK)), totals)
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
        weights = _weights(shape, refs, chunk * _CHUNK + lines(i))
        return None if weights is None else weights.astype(jnp.float64)

    def matrix(i: Any, j: Any) -> Array:
        return loop(
            shape.key_tile // _TILE,
            lambda k, sum: sum + dot(white(i, k), white(j, k), (1, 1)),
            jnp.zeros((_TILE, _TILE), jnp.float64),
        )

    _factor(matrix, refs, chunk, 1.0, lambda i: jnp.ones((_TILE,), jnp.float64), beta)


def _whiten(shape: Shape, refs: Refs, block: Any) -> None:
    """Some columns of K̃."""
    chunk, columns = _share(shape.key_tile, block)
    root = load(refs["root"], columns, indices(shape.key_tile), number=chunk)
    white = dot(shape.keys(refs["k"], _tokens(chunk)), root, (1, 1))
    store(refs["new_white"], indices(_CHUNK), columns, None, white, number=chunk)


def _causal() -> Array:
    lines = indices(_CHUNK)
    return lines[:, None] >= lines[None, :]


def _attend(shape: Shape, refs: Refs, chunk: Any) -> None:
    """Φ̃ᵀ, N, F and the outputs. What was stored is loaded again where it is needed: registers are few."""
    tokens = _tokens(chunk)
    white = _whole(refs["white"], chunk)
    phi_t = dot(_whole(refs["root"], chunk), _whole(refs["moment"], chunk))
    barrier()  # outputs may take the place of what was loaded
    _keep(refs["new_phi_t"], chunk, phi_t)
    surprise = shape.values(refs["v"], tokens) - dot(white, phi_t)
    inverse = _whole(refs["inverse"], chunk)
    _keep(refs["new_f"], chunk, dot(inverse, surprise))
    _keep(refs["new_n"], chunk, dot(inverse, white))
    barrier()
    q = dot(shape.keys(refs["q"], tokens), _whole(refs["root"], chunk), (1, 1))
    beta = _weights(shape, refs, tokens)
    beta = None if beta is None else beta[None, :]
    scores = jnp.where(_causal(), _times(beta, dot(q, _whole(refs["new_n"], chunk), (1, 1))), 0.0)
    out = dot(q, _whole(refs["new_phi_t"], chunk)) + dot(scores, _whole(refs["new_f"], chunk))
    store(refs["new_out"], tokens, indices(shape.value_tile), (shape.time, shape.value), out)


def _unweighted(refs: Refs, chunk: Any, beta: Array | None) -> Array:
    """The inverse of diag(β) G diag(β)⁻¹, without that division."""
    inverse = _whole(refs["inverse"], chunk)
    if beta is None:
        return inverse
    i, j = indices(_CHUNK)[:, None], indices(_CHUNK)[None, :]
    scale = jnp.sum(jnp.where(i == j, inverse, 0.0), 0)
    met = dot(_whole(refs["white"], chunk), _whole(refs["n"], chunk), (1, 1))
    met = dot(inverse, jnp.where(i > j, met, 0.0))
    return (jnp.where(i == j, 1.0, 0.0) - beta[:, None] * met) * scale[None, :]


def _attend_back(shape: Shape, refs: Refs, chunk: Any) -> None:
    """z, what κ and ν owe to the chunk itself, and what it adds to W and P; x on the way."""
    tokens = _tokens(chunk)
    beta = _weights(shape, refs, tokens)
    by_column = None if beta is None else beta[None, :]

    def read(name: str) -> Array:
        return _whole(refs[name], chunk)

    q = dot(shape.keys(refs["q"], tokens), read("root"), (1, 1))
    qn = jnp.where(_causal(), dot(q, read("n"), (1, 1)), 0.0)
    inverse = _unweighted(refs, chunk, beta)
    alpha = dot(inverse, qn, (0, 1))
    _keep(refs["new_nu"], chunk, dot(alpha, shape.values(refs["g"], tokens)))
    _keep(refs["new_x"], chunk, dot(q - dot(_times(by_column, qn), read("n")), read("root")))
    barrier()
    g = shape.values(refs["g"], tokens)
    gf = jnp.where(_causal(), dot(g, read("f"), (1, 1)), 0.0)
    z = dot(dot(g, read("phi_t"), (1, 1)) + dot(_times(by_column, gf), read("n")), read("root"))
    _keep(refs["new_z"], chunk, z)
    kappa = dot(alpha, z)
    barrier()
    rho = dot(read("inverse") if beta is None else inverse, gf, (0, 1))
    _keep(refs["new_kappa"], chunk, dot(rho, read("new_x")) - kappa)
    barrier()
    x = read("new_x")
    _keep(refs["new_moment"], chunk, dot(x, shape.values(refs["g"], tokens), (0, 0)))
    gram = dot(x, read("new_z"), (0, 0))
    _keep(refs["new_gram"], chunk, gram + gram.T)


def _add_later(shape: Shape, refs: Refs, block: Any) -> None:
    """What some columns of κ and ν owe to later chunks, with the sums W and P over those."""
    chunk, columns = _share(shape.widest, block)
    tokens, lines, rows = _tokens(chunk), indices(_CHUNK), indices(shape.key_tile)

    def part(name: str, rows: Array) -> Array:
        return load(refs[name], rows, columns, _inside(refs[name], shape.widest), number=chunk)

    def keep(name: str, value: Array) -> None:
        ref = refs["new_" + name]
        store(ref, lines, columns, _inside(ref, shape.widest), value, number=chunk)

    k = shape.keys(refs["k"], tokens)
    keep("nu", part("nu", lines) + dot(k, part("moment", rows)))
    kappa = part("kappa", lines) - dot(k, part("gram", rows))
    barrier()
    inside = None if shape.key_tile == shape.widest else refs["moment"].shape[-2:]
    moment = load(refs["moment"], columns, indices(shape.value_tile), inside, number=chunk)
    keep("kappa", kappa + dot(shape.values(refs["v"], tokens), moment, (1, 1)))


def applies(seq: Sequence) -> bool:
    """Nothing forgets, restarts or goes on with an earlier state; and a tile of keys fills several warps."""
    plain = seq.log_decay is None and seq.runs is None and seq.factor is None
    return plain and has_float64() and Shape.of(seq).key_tile >= 32


def forward(seq: Sequence, want_state: bool) -> dict[str, Array]:
    """Outputs and what the backward pass needs; if wanted, `factor` and `weights_t` of the final state."""
    shape = Shape.of(seq)
    count, key, value = shape.blocks(_CHUNK), shape.key_tile, shape.value_tile
    states = count + want_state

    def empty(*dims: int, dtype: Any = shape.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((shape.batch, *dims), dtype)

    def pair(count: int, size: int) -> dict[str, jax.ShapeDtypeStruct]:
        return dict(inverse=empty(count, size, size), scratch=empty(count, size, size, dtype=jnp.float64))

    run = partial(_call, shape)
    with jax.enable_x64(True):
        added = run(
            _sums,
            dict(k=seq.keys, v=seq.values, beta=seq.beta),
            dict(gram=empty(count, key, key, dtype=jnp.float64), moment=empty(count, key, value)),
            blocks=count * _programs(shape.widest),
        )
        gram, moment = run(
            _before,
            added | dict(lam=seq.lam),
            dict(gram=empty(states, key, key, dtype=jnp.float64), moment=empty(states, key, value)),
            blocks=key // _TILE,
            in_place={} if want_state else dict(gram="gram", moment="moment"),
        ).values()
        roots = run(
            _factor_states,
            dict(gram=gram, lam=seq.lam),
            pair(states, key),
            blocks=states,
            in_place=dict(gram="scratch"),
        )
        root = roots["inverse"]
        white = run(
            _whiten,
            dict(k=seq.keys, root=root),
            dict(white=empty(count, _CHUNK, key)),
            blocks=count * _programs(key),
        )["white"]
        factors = run(_factor_chunks, dict(white=white, beta=seq.beta), pair(count, _CHUNK), blocks=count)
    kept = dict(root=root, inverse=factors["inverse"])
    in_place = {}
    if seq.beta is None:
        in_place |= dict(white="n")
    if not want_state:
        in_place |= dict(moment="phi_t")
    results = run(
        _attend,
        dict(q=seq.queries, v=seq.values, beta=seq.beta, moment=moment, white=white) | kept,
        dict(
            out=empty(shape.time, shape.value),
            n=empty(count, _CHUNK, key), f=empty(count, _CHUNK, value), phi_t=empty(count, key, value),
        ),
        blocks=count, in_place=in_place,
    )  # fmt: skip
    if seq.beta is not None:
        kept |= dict(white=white)
    if want_state:
        last = root[:, -1, : shape.key, : shape.key]
        met = matmul(last, moment[:, -1, : shape.key, : shape.value])
        kept |= dict(factor=transpose(last), weights_t=matmul(transpose(last), met))
    return results | kept


def backward(
    seq: Sequence, saved: dict[str, Array], out_bar: Array, ahead: tuple[Array, Array] | None
) -> dict[str, Array]:
    """Gradients.

    Args:
        ahead: the sums W and P that the cotangent of the final state begins with, if there is one.
    """
    shape = Shape.of(seq)
    run = partial(_call, shape)
    timed, wide = (jax.ShapeDtypeStruct(saved[name].shape, shape.dtype) for name in ("n", "f"))
    given = {name: saved.get(name) for name in ("root", "inverse", "n", "f", "phi_t", "white")}
    matrices = {
        name: jax.ShapeDtypeStruct((shape.batch, shape.blocks(_CHUNK), shape.key_tile, width), shape.dtype)
        for name, width in (("gram", shape.key_tile), ("moment", shape.value_tile))
    }
    in_place = dict(n="kappa", phi_t="moment")
    if timed.shape == wide.shape:
        in_place |= dict(f="z")
    if saved["root"].shape == matrices["gram"].shape:  # without the final state
        in_place |= dict(root="gram")
    near = run(
        _attend_back,
        dict(q=seq.queries, g=out_bar, beta=seq.beta) | given,
        dict(x=timed, z=timed, kappa=timed, nu=wide) | matrices,
        blocks=shape.blocks(_CHUNK),
        in_place=in_place,
    )
    first = dict(first_gram=ahead[0], first_moment=ahead[1]) if ahead is not None else {}
    later = run(
        _after,
        {name: near[name] for name in matrices} | first,
        matrices | dict(diagonal=jax.ShapeDtypeStruct(seq.lam.shape, shape.dtype)),
        blocks=shape.key_tile // _TILE,
        in_place={name: name for name in matrices},
    )
    far = run(
        _add_later,
        dict(
            k=seq.keys,
            v=seq.values,
            kappa=near["kappa"],
            nu=near["nu"],
            gram=later["gram"],
            moment=later["moment"],
        ),
        dict(kappa=timed, nu=wide),
        blocks=shape.blocks(_CHUNK) * _programs(shape.widest),
        in_place=dict(kappa="kappa", nu="nu"),
    )

    def joined(chunks: Array, like: Array) -> Array:
        whole = chunks.reshape(shape.batch, -1, chunks.shape[-1])
        return whole[:, : shape.time, : like.shape[-1]]

    z, kappa, nu = (
        joined(near["z"], seq.keys),
        joined(far["kappa"], seq.keys),
        joined(far["nu"], seq.values),
    )
    gradients = dict(z=z, k_bar=kappa, v_bar=nu, lam_bar=0.5 * later["diagonal"])
    if seq.beta is not None:
        beta = seq.beta[..., None]
        pull = jnp.sum(seq.keys * kappa, -1) + jnp.sum(seq.values * nu, -1)
        gradients |= dict(k_bar=beta * kappa, v_bar=beta * nu, pull=pull)
    return gradients


def _call(shape: Shape, kernel: Any, inputs: dict, outputs: dict, **settings: Any) -> dict[str, Array]:
    # Of those numbers of warps that `scripts/inspect_kernels.py static` tried, what spills the fewest registers.
    warps = 4 if max(shape.key_tile, shape.value_tile) <= 64 else 8
    warps = 1 if kernel in (_factor_states, _factor_chunks) else warps
    return call_by_block(partial(kernel, shape), inputs, outputs, warps=warps, **settings)
