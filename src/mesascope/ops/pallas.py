r"""Fused GPU kernels for the mesa operation: exact least squares on chip.

Recursive least squares reads each pair once. With $R = F F^\top$ in square-root form, pair t of weight β after a
forgetting factor γ does

    b = Fᵀk        s = 1 + (β/γ) bᵀb        n = F b / (γ √s)        f = (v - Φk) / √s
    F ← γ^{-1/2} (F - (β/γ)/(s + √s) · F b bᵀ)            Φ ← Φ + β f nᵀ

so that $R_t = R_{t-1}/\gamma - \beta\, n n^\top$. One program walks one head with F and Φ in registers, token by token
(`_walk`) or sixteen at a time (`_walk_blocks`). It touches memory only to read q, k, v and to write o and, for the
gradient, n, f, √s and $x_t = R_t q_t$.

The gradient walks back in blocks (`_walk_back_blocks`). With $\zeta_{it}$ the decay between i and t, and G the
triangular matrix of a block with $\beta_j k_j^\top n_i$ below its diagonal and $\sqrt{s_i}$ on it,

    z_t = Φ_tᵀ ō_t = Φᵀ ō_t + Σ_{i≤t} β_i (ō_tᵀ f_i) n_i
    α = G⁻ᵀ triu(N Qᵀ)              α_it = ζ_it k_iᵀ x_t
    ρ = G⁻ᵀ (ζ ∘ triu(f Ōᵀ))        ρ_it = ζ_it ō_tᵀ (v_i - Φ_t k_i)
    κ = ρ X - α Z,  ν = α Ō         ∂k_i = β_i κ_i,  ∂v_i = β_i ν_i,  ∂β_i = ½ (k_iᵀκ_i + v_iᵀν_i)

and later blocks add $\zeta (P v_i - W k_i)$ to κ and $\zeta P^\top k_i$ to ν, with the running sums
$W = \sum_t \zeta_t (x_t z_t^\top + z_t x_t^\top)$ and $P = \sum_t \zeta_t x_t \bar o_t^\top$. No factor here exceeds
one and nothing is divided by β or by a decay, so forgetting may be as strong and weights as small as they like. Where
a head is narrow and short, `_walk_back` takes one token at a time instead.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from mesascope.ops import chunked, pallas_prefix
from mesascope.ops.chunked import canonical, default_chunk_size, final_adjoint, whitened
from mesascope.ops.chunks import decay_since_start, sum_to_end
from mesascope.ops.factor import matmul, transpose
from mesascope.ops.gradients import with_closed_form
from mesascope.ops.kernels import (
    Shape,
    call,
    dot,
    indices,
    load,
    load_row,
    load_vector,
    loop,
    store,
    store_row,
    store_vector,
)
from mesascope.ops.sequence import Sequence

_BLOCK = 16  # tokens taken at once, and rows of a triangular matrix inverted by substitution


def _walk(shape: Shape, refs: dict[str, Any]) -> None:
    """One head, token by token. Every sum runs down columns, which stay within a thread; hence F and Fᵀ."""
    time, d, dv = shape.time, shape.key, shape.value
    rows, columns = indices(shape.key_tile), indices(shape.value_tile)
    root_lam = jnp.sqrt(load_vector(refs["lam"], rows, d))
    fresh = jnp.where(rows[:, None] == rows[None, :], root_lam[:, None], 0.0)
    factor = factor_t = fresh
    weights_t = shape.zeros(shape.key_tile, shape.value_tile)
    if "factor" in refs:
        factor = load(refs["factor"], rows, rows, (d, d))
        factor_t = load(refs["factor_t"], rows, rows, (d, d))
        weights_t = load(refs["weights_t"], rows, columns, (d, dv))

    def read(t: Any) -> tuple[Array, ...]:
        return (
            load_row(refs["q"], t, rows, d),
            load_row(refs["k"], t, rows, d),
            load_row(refs["v"], t, columns, dv),
        )

    def down(matrix: Array, vector: Array) -> Array:
        return jnp.sum(matrix * vector[:, None], 0)

    def step(t: Array, carry: tuple) -> tuple:
        factor, factor_t, weights_t, (q, k, v) = carry
        ahead = read(jnp.minimum(t + 1, time - 1))  # asked for early, used in the next step
        if "runs" in refs:
            starts = (t > 0) & (refs["runs"][t] != refs["runs"][jnp.maximum(t - 1, 0)])
            factor, factor_t = (jnp.where(starts, fresh, a) for a in (factor, factor_t))
            weights_t = jnp.where(starts, 0.0, weights_t)
        if "new_before" in refs:
            size = np.int32(_BLOCK)
            shown = jnp.where(lax.rem(t, size) == 0, rows, d)  # else none of them
            store(refs["new_before"], shown, columns, (d, dv), weights_t, number=lax.div(t, size))
        decay = jnp.exp(refs["log_decay"][t]) if "log_decay" in refs else 1.0
        beta = refs["beta"][t] if "beta" in refs else 1.0
        b, surprise = down(factor, k), v - down(weights_t, k)
        ratio = beta / decay
        s = 1 + ratio * jnp.sum(b * b)
        root = jnp.sqrt(s)
        fb = down(factor_t, b)
        n, f = fb / (decay * root), surprise / root
        weights_t = weights_t + n[:, None] * (beta * f)[None, :]
        change = ratio / (s + root) * fb
        factor = factor - change[:, None] * b[None, :]
        factor_t = factor_t - b[:, None] * change[None, :]
        if "log_decay" in refs:
            growth = lax.rsqrt(decay)
            factor, factor_t = growth * factor, growth * factor_t
        store_row(refs["new_out"], t, columns, dv, down(weights_t, q))
        if "new_n" in refs:
            store_row(refs["new_n"], t, rows, d, n)
            store_row(refs["new_f"], t, columns, dv, f)
            refs["new_root"][t] = root
        if "new_x" in refs:
            store_row(refs["new_x"], t, rows, d, down(factor_t, down(factor, q)))
        return factor, factor_t, weights_t, ahead

    first = read(np.int32(0))
    factor, _, weights_t, _ = loop(time, step, (factor, factor_t, weights_t, first))
    if "new_factor" in refs:
        store(refs["new_factor"], rows, rows, (d, d), factor)
        store(refs["new_weights_t"], rows, columns, (d, dv), weights_t)


def _walk_blocks(shape: Shape, refs: dict[str, Any]) -> None:
    """One head, `_BLOCK` tokens at a time: the same recursion with all products with F and Φ as matrix products.

    With p_i = F_iᵀk_i for the tokens i of a block, F_j = F (I - c_0 p_0p_0ᵀ) … (I - c_{j-1} p_{j-1}p_{j-1}ᵀ). So one
    loop over the block applies these factors to every FᵀK and FᵀQ, and their like to the values; a second applies
    them in reverse order, which yields F_i p_i. Both work on tiles whose upper rows are keys and lower rows queries.
    """
    time, d, dv = shape.time, shape.key, shape.value
    rows, columns = indices(shape.key_tile), indices(shape.value_tile)
    lines = indices(2 * _BLOCK)
    is_query = lines >= _BLOCK
    token = jnp.where(is_query, lines - _BLOCK, lines)
    root_lam = jnp.sqrt(load_vector(refs["lam"], rows, d))
    factor = jnp.where(rows[:, None] == rows[None, :], root_lam[:, None], 0.0)
    weights_t = shape.zeros(shape.key_tile, shape.value_tile)
    if "factor" in refs:
        factor = load(refs["factor"], rows, rows, (d, d))
        weights_t = load(refs["weights_t"], rows, columns, (d, dv))

    def block(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        factor, weights_t = carry
        at = index * _BLOCK + token
        # Lines that are not meant lie beyond the end, each elsewhere: interpreted, a store may not name a place twice.
        pairs, queries = jnp.where(is_query, time + lines, at), jnp.where(is_query, at, time + lines)
        kq = load(refs["k"], pairs, rows, (time, d)) + load(refs["q"], queries, rows, (time, d))
        if "beta" in refs:
            beta = load_vector(refs["beta"], pairs, time)
        else:
            beta = jnp.where(pairs < time, 1 + shape.zeros(2 * _BLOCK), 0.0)
        p = dot(kq, factor)
        u = load(refs["v"], pairs, columns, (time, dv)) - dot(kq, weights_t)

        def active(j: Array) -> Array:
            """The lines that come after pair j."""
            return (token > j) | (is_query & (token == j))

        def forwards(j: Array, carry: tuple) -> tuple:
            p, u, s = carry
            this = (lines == j)[:, None]
            pj, uj = (jnp.sum(jnp.where(this, a, 0.0), 0) for a in (p, u))
            products = jnp.sum(p * pj[None, :], 1)
            wj = jnp.sum(jnp.where(lines == j, beta, 0.0))
            sj = 1 + wj * jnp.sum(pj * pj)
            products = jnp.where(active(j), products, 0.0)
            p = p - (wj / (sj + jnp.sqrt(sj)) * products)[:, None] * pj[None, :]
            u = u - (wj / sj * products)[:, None] * uj[None, :]
            return p, u, jnp.where(lines == j, sj, s)

        p, u, s = loop(_BLOCK, forwards, (p, u, jnp.ones_like(beta)))
        root = jnp.sqrt(s)
        gain = beta / (s + root)

        def backwards(back: Array, y: Array) -> Array:
            j = _BLOCK - 1 - back
            pj = jnp.sum(jnp.where((lines == j)[:, None], p, 0.0), 0)
            cj = jnp.sum(jnp.where(lines == j, gain, 0.0))
            products = jnp.where(active(j), jnp.sum(y * pj[None, :], 1), 0.0)
            return y - (cj * products)[:, None] * pj[None, :]

        y = dot(loop(_BLOCK, backwards, p), factor, (1, 1))
        factor = factor - dot(y, gain[:, None] * p, (0, 0))
        weights_t = weights_t + dot(y, (beta / s)[:, None] * u, (0, 0))

        store(refs["new_out"], queries, columns, (time, dv), -u)
        if "new_n" in refs:
            store(refs["new_n"], pairs, rows, (time, d), y / root[:, None])
            store(refs["new_f"], pairs, columns, (time, dv), u / root[:, None])
            store_vector(refs["new_root"], pairs, time, root)
        if "new_x" in refs:
            store(refs["new_x"], queries, rows, (time, d), y)
        return factor, weights_t

    factor, weights_t = loop(shape.blocks(_BLOCK), block, (factor, weights_t))
    if "new_factor" in refs:
        store(refs["new_factor"], rows, rows, (d, d), factor)
        store(refs["new_weights_t"], rows, columns, (d, dv), weights_t)


class _Sight(NamedTuple):
    """Who sees whom within a block, and how much of it is left.

    Attributes:
        visible: [i, t]: i ≤ t, and of the same run.
        zeta: [i, t]: the decay between them, zero where i is not visible.
        carried: [t]: does t go on with the run that the block inherited.
        from_start: [t]: the decay since the block began, zero where another run began since.
        to_end: [i]: the decay to the end of the block, zero where the run ends before.
        through: the decay over the whole block, zero where a run ends.
    """

    visible: Array
    zeta: Array
    carried: Array
    from_start: Array
    to_end: Array
    through: Array | float


def _sight(shape: Shape, refs: dict[str, Any], start: Array) -> _Sight:
    tokens = start + indices(_BLOCK)
    visible = tokens[:, None] <= tokens[None, :]
    ones = 1 + shape.zeros(_BLOCK)
    zeta, from_start, to_end, through = visible.astype(shape.dtype), ones, ones, 1.0
    carried = ones > 0
    if "log_decay" in refs:
        g = load_vector(refs["log_decay"], tokens, shape.time, 0.0)
        c_row = jnp.sum(jnp.where(visible, g[:, None], 0.0), 0)
        c = jnp.sum(jnp.where(visible.T, g[None, :], 0.0), 1)
        zeta = jnp.where(visible, jnp.exp(jnp.minimum(c_row[None, :] - c[:, None], 0.0)), 0.0)
        total = jnp.sum(g)
        from_start, to_end = jnp.exp(c), jnp.exp(jnp.minimum(total - c, 0.0))
        through = jnp.exp(total)
    if "runs" in refs:
        run = load_vector(refs["runs"], tokens, shape.time, -1)
        # The first block inherits run 0, the one that an incoming state belongs to.
        inherited = jnp.where(start == 0, 0, refs["runs"][jnp.maximum(start - 1, 0)])
        final = refs["runs"][jnp.minimum(start + _BLOCK, shape.time) - 1]
        visible = visible & (run[:, None] == run[None, :])
        carried = run == inherited
        zeta = jnp.where(visible, zeta, 0.0)
        from_start, to_end = jnp.where(carried, from_start, 0.0), jnp.where(run == final, to_end, 0.0)
        through = jnp.where(inherited == final, through, 0.0)
    return _Sight(visible, zeta, carried, from_start, to_end, through)


def _lower_inverse(below: Array, root: Array) -> Array:
    """The inverse of the lower triangular matrix with these entries below its diagonal and on it."""
    n = below.shape[0]
    i, j = indices(n)[:, None], indices(n)[None, :]
    unit = below / root[None, :]
    inverse = (i == j).astype(below.dtype)
    for c in range(n - 1):
        column, row = jnp.sum(jnp.where(j == c, unit, 0.0), 1), jnp.sum(jnp.where(i == c, inverse, 0.0), 0)
        inverse = inverse - column[:, None] * row[None, :]
    return inverse / root[:, None]


def _walk_back_blocks(shape: Shape, refs: dict[str, Any]) -> None:
    """One head, block by block from the end, with W, P and Φᵀ in registers."""
    time, d, dv = shape.time, shape.key, shape.value
    rows, columns = indices(shape.key_tile), indices(shape.value_tile)

    def step(back: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        gram, moment, weights_t = carry
        index = shape.blocks(_BLOCK) - 1 - back
        start = index * _BLOCK
        tokens = start + indices(_BLOCK)
        see = _sight(shape, refs, start)
        q, k, n, x = (load(refs[name], tokens, rows, (time, d)) for name in ("q", "k", "n", "x"))
        v, f, g = (load(refs[name], tokens, columns, (time, dv)) for name in ("v", "f", "g"))
        root = load_vector(refs["root"], tokens, time, 1.0)
        beta = jnp.ones_like(root)
        if "beta" in refs:
            beta = load_vector(refs["beta"], tokens, time, 0.0)
        beta = beta[:, None]

        if "before" in refs:
            weights_t = load(refs["before"], rows, columns, (d, dv), number=index)
        else:
            weights_t = weights_t - dot(n, beta * f, (0, 0))
        fg = dot(f, g, (1, 1))
        z = jnp.where(see.carried[:, None], dot(g, weights_t, (1, 1)), 0.0)
        z = z + dot(beta * jnp.where(see.visible, fg, 0.0), n, (0, 0))

        past = see.visible.T & (tokens[:, None] > tokens[None, :])
        inverse = _lower_inverse(jnp.where(past, beta * dot(k, n, (1, 1)), 0.0), root)
        alpha = dot(inverse, jnp.where(see.visible, dot(n, q, (1, 1)), 0.0), (0, 0))
        rho = dot(inverse, see.zeta * fg, (0, 0))
        to_end = see.to_end[:, None]
        kappa = dot(rho, x) - dot(alpha, z) + to_end * (dot(v, moment, (1, 1)) - dot(k, gram))
        nu = dot(alpha, g) + to_end * dot(k, moment)

        store(refs["new_z"], tokens, rows, (time, d), z)
        store(refs["new_k_bar"], tokens, rows, (time, d), beta * kappa)
        store(refs["new_v_bar"], tokens, columns, (time, dv), beta * nu)
        if "new_pull" in refs:
            pull = jnp.sum(k * kappa, 1) + jnp.sum(v * nu, 1)
            store_vector(refs["new_pull"], tokens, time, pull)
        x = see.from_start[:, None] * x
        xz = dot(x, z, (0, 0))
        gram = see.through * gram + xz + xz.T
        return gram, see.through * moment + dot(x, g, (0, 0)), weights_t

    gram = shape.zeros(shape.key_tile, shape.key_tile)
    moment = shape.zeros(shape.key_tile, shape.value_tile)
    weights_t = moment
    if "gram" in refs:
        gram = load(refs["gram"], rows, rows, (d, d))
        moment = load(refs["moment"], rows, columns, (d, dv))
    if "weights_t" in refs:
        weights_t = load(refs["weights_t"], rows, columns, (d, dv))
    loop(shape.blocks(_BLOCK), step, (gram, moment, weights_t))


def _walk_back(shape: Shape, refs: dict[str, Any]) -> None:
    r"""One head, token by token from the end: the adjoints $\bar R$ and $\bar\Phi$ of the state, walked back.

    With h = R_t k = n/√s and e = v - Φ_t k = f/√s after the pair, and $\bar\Phi$ including this $\bar o q^\top$,

        u = Φ̄ᵀe - 2 R̄ h        κ = R_t u - Φ_tᵀ Φ̄ h        ν = Φ̄ h
        Φ̄ ← Φ̄ - β ν kᵀ         R̄ ← R̄ + k wᵀ + w kᵀ    w = ½β u + ½β² hᵀ(R̄h - Φ̄ᵀe) k

    and the state before the pair is R_{t-1} = R_t + β n nᵀ, Φ_{t-1} = Φ_t - β f nᵀ.
    """
    time, d, dv = shape.time, shape.key, shape.value
    rows, columns = indices(shape.key_tile), indices(shape.value_tile)

    def down(matrix: Array, vector: Array) -> Array:
        return jnp.sum(matrix * vector[:, None], 0)

    def read(t: Any) -> tuple[Array, ...]:
        keys = (load_row(refs[name], t, rows, d) for name in ("q", "k", "n"))
        return *keys, *(load_row(refs[name], t, columns, dv) for name in ("f", "g"))

    def step(back: Array, carry: tuple) -> tuple:
        r, phi, r_bar, phi_bar, phi_bar_t, lam_bar, (q, k, n, f, g) = carry
        t = time - 1 - back
        behind = read(jnp.maximum(t - 1, 0))  # asked for early, used in the next step
        beta = refs["beta"][t] if "beta" in refs else 1.0
        shrink = 1 / refs["root"][t]
        h, e = shrink * n, shrink * f
        z = down(phi, g)
        store_row(refs["new_z"], t, rows, d, z)
        lam_bar = lam_bar + down(r, q) * z
        phi_bar = phi_bar + g[:, None] * q[None, :]
        phi_bar_t = phi_bar_t + q[:, None] * g[None, :]
        nu, pe, rh = down(phi_bar_t, h), down(phi_bar, e), down(r_bar, h)
        u = pe - 2 * rh
        kappa = down(r, u) - down(phi, nu)
        store_row(refs["new_k_bar"], t, rows, d, beta * kappa)
        store_row(refs["new_v_bar"], t, columns, dv, beta * nu)
        if "new_pull" in refs:
            refs["new_pull"][t] = jnp.sum(k * kappa) + jnp.sum(load_row(refs["v"], t, columns, dv) * nu)
        phi_bar = phi_bar - (beta * nu)[:, None] * k[None, :]
        phi_bar_t = phi_bar_t - k[:, None] * (beta * nu)[None, :]
        w = 0.5 * beta * (u + beta * jnp.sum(h * (rh - pe)) * k)
        r_bar = r_bar + k[:, None] * w[None, :] + w[:, None] * k[None, :]
        r = r + (beta * n)[:, None] * n[None, :]
        phi = phi - (beta * f)[:, None] * n[None, :]
        return r, phi, r_bar, phi_bar, phi_bar_t, lam_bar, behind

    def square(name: str) -> Array:
        return load(refs[name], rows, rows, (d, d))

    r, phi = square("covariance"), load(refs["weights"], columns, rows, (dv, d))
    r_bar, phi_bar = jnp.zeros_like(r), jnp.zeros_like(phi)
    phi_bar_t = shape.zeros(shape.key_tile, shape.value_tile)
    if "covariance_bar" in refs:
        r_bar, phi_bar = square("covariance_bar"), load(refs["weights_bar"], columns, rows, (dv, d))
        phi_bar_t = load(refs["weights_bar_t"], rows, columns, (d, dv))
    lam_bar = shape.zeros(shape.key_tile)
    carry = (r, phi, r_bar, phi_bar, phi_bar_t, lam_bar, read(np.int32(time - 1)))
    _, _, r_bar, phi_bar, _, lam_bar, _ = loop(time, step, carry)
    store_vector(refs["new_lam_bar"], rows, d, lam_bar)
    if "new_first_covariance_bar" in refs:
        store(refs["new_first_covariance_bar"], rows, rows, (d, d), r_bar)
        store(refs["new_first_weights_bar"], columns, rows, (dv, d), phi_bar)


def _narrow(shape: Shape) -> bool:
    """Whether a head's matrices fit into the registers of one warp, where sums need no shared memory."""
    return shape.key_tile * max(shape.key_tile, shape.value_tile) <= 1024


def _warps(shape: Shape) -> int:
    return 1 if _narrow(shape) else 4 if max(shape.key_tile, shape.value_tile) <= 64 else 8


class Plan(NamedTuple):
    """What is wanted of the forward pass, and which kernels do it (see `plan`)."""

    want_state: bool
    blocks: bool
    blocks_back: bool
    prefix: bool = False
    coarse: bool = False


def plan(seq: Sequence, want_state: bool, coarse: bool = False) -> Plan:
    """Choose the kernels; coarse, where queries, keys, values and outputs have the digits of bfloat16.

    Forward by blocks where a head is wide; but by tokens where it forgets, which knows no growth within a block, or
    starts afresh. Backward by tokens where a head is narrow and short: it rebuilds the state and walks its adjoint
    back, in which rounding errors add up over time, and blow up where the head forgets.
    """
    shape = Shape.of(seq)
    plain = seq.log_decay is None and seq.runs is None
    by_tokens = plain and (
        seq.factor is not None or (_narrow(shape) and shape.time <= 128 and not want_state)
    )
    return Plan(
        want_state,
        blocks=plain and not _narrow(shape),
        blocks_back=not by_tokens,
        prefix=not _narrow(shape) and pallas_prefix.applies(seq),
        coarse=coarse,
    )


def _call(
    kernel: Callable, shape: Shape, inputs: dict[str, Array | None], outputs: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, Array]:
    return call(partial(kernel, shape), inputs, outputs, warps=_warps(shape))


def _empty(shape: Shape, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((shape.batch, *dims), shape.dtype)


def _run(plan: Plan, seq: Sequence, for_gradient: bool) -> dict[str, Array]:
    if plan.prefix:
        return pallas_prefix.forward(seq, plan.want_state, plan.coarse)
    shape = Shape.of(seq)
    time, d, dv = shape.time, shape.key, shape.value
    inputs = dict(
        q=seq.queries, k=seq.keys, v=seq.values, lam=seq.lam,
        log_decay=seq.log_decay, beta=seq.beta, runs=seq.runs, factor=seq.factor,
        factor_t=None if seq.factor is None or plan.blocks else transpose(seq.factor),
        weights_t=None if seq.weights is None else transpose(seq.weights),
    )  # fmt: skip
    outputs = dict(out=_empty(shape, time, dv))
    if for_gradient:
        outputs |= dict(n=_empty(shape, time, d), f=_empty(shape, time, dv), root=_empty(shape, time))
        if plan.blocks_back:
            outputs |= dict(x=_empty(shape, time, d))
            if seq.runs is not None:
                outputs |= dict(before=_empty(shape, shape.blocks(_BLOCK), d, dv))
    if for_gradient or plan.want_state:
        outputs |= dict(factor=_empty(shape, d, d), weights_t=_empty(shape, d, dv))
    return _call(_walk_blocks if plan.blocks else _walk, shape, inputs, outputs)


Outputs = tuple[Array, tuple[Array, Array] | None]


def _finish(plan: Plan, results: dict[str, Array]) -> Outputs:
    if not plan.want_state:
        return results["out"], None
    return results["out"], (canonical(results["factor"]), transpose(results["weights_t"]))


def _fused(plan: Plan, seq: Sequence) -> Outputs:
    """Outputs at every time, and the final state (F, Φ) if the plan wants it."""
    return _finish(plan, _run(plan, seq, for_gradient=False))


def _remembering(plan: Plan, seq: Sequence) -> tuple[Outputs, dict[str, Array]]:
    """The same, and what the backward pass needs."""
    results = _run(plan, seq, for_gradient=True)
    return _finish(plan, results), {n: a for n, a in results.items() if n != "out"}


def _fused_forward(plan: Plan, seq: Sequence):
    (out, state), saved = remembering(plan, seq)
    return (out, state), (seq, saved, state)


def _by_xla(plan: Plan, parallel: bool, seq: Sequence, cotangents: Any) -> Sequence:
    """The gradients by the chunked or the prefix method."""
    time, d = seq.keys.shape[1:]
    size = min(default_chunk_size(time, d, seq.log_decay is not None, parallel), time)
    pull = jax.vjp(partial(whitened, chunked.Plan(size, parallel, plan.want_state)), seq)[1]
    return pull(cotangents)[0]._replace(runs=None)


def _gradients(plan: Plan, seq: Sequence, saved: dict[str, Array], state: Any, cotangents: Any) -> Sequence:
    if seq.factor is not None and plan.blocks_back:  # whose sums do not reach the gradient of a state; rare
        return _by_xla(plan, False, seq, cotangents)
    out_bar, state_bar = cotangents
    shape = Shape.of(seq)
    time, d, dv = shape.time, shape.key, shape.value
    ahead, scaling = final_adjoint(seq, state, state_bar)
    inputs = dict(q=seq.queries, k=seq.keys, g=out_bar, log_decay=seq.log_decay, beta=seq.beta, runs=seq.runs)
    inputs |= {name: saved.get(name) for name in ("n", "f", "root", "x", "before")}
    outputs = dict(z=_empty(shape, time, d), k_bar=_empty(shape, time, d), v_bar=_empty(shape, time, dv))
    if seq.beta is not None or seq.log_decay is not None:
        outputs |= dict(pull=_empty(shape, time))
    # What is left of the regularizer at each time.
    left = None if seq.log_decay is None else jnp.exp(decay_since_start(seq.log_decay, seq.runs))
    if plan.prefix:
        beyond = (ahead.gram, ahead.moment) if plan.want_state else None
        results = pallas_prefix.backward(seq, saved, out_bar, beyond, plan.coarse)
        lam_bar = results["lam_bar"]
    elif plan.blocks_back:
        inputs |= dict(v=seq.values, weights_t=saved["weights_t"])
        if plan.want_state:
            inputs |= dict(gram=ahead.gram, moment=ahead.moment)
        results = _call(_walk_back_blocks, shape, inputs, outputs)
        share = saved["x"] * results["z"]
        at_end = 0.5 * jnp.diagonal(ahead.gram, axis1=-2, axis2=-1)
        if left is not None:
            share, at_end = left[..., None] * share, left[:, -1:] * at_end
        lam_bar = jnp.sum(share, 1) + at_end
    else:
        inputs |= dict(
            v=seq.values if "pull" in outputs else None,
            covariance=matmul(saved["factor"], transpose(saved["factor"])),
            weights=transpose(saved["weights_t"]),
        )  # fmt: skip
        outputs |= dict(lam_bar=_empty(shape, d))
        if ahead.covariance is not None and ahead.weights is not None:
            inputs |= dict(
                covariance_bar=ahead.covariance,
                weights_bar=ahead.weights,
                weights_bar_t=transpose(ahead.weights),
            )
            outputs |= dict(first_covariance_bar=_empty(shape, d, d), first_weights_bar=_empty(shape, dv, d))
        results = _call(_walk_back, shape, inputs, outputs)
        lam_bar = results["lam_bar"]
    gradients = Sequence(
        results["z"], results["k_bar"], results["v_bar"], lam_bar / seq.lam**2,
        log_decay=None, beta=None, runs=None, factor=None, weights=None,
    )  # fmt: skip
    if seq.beta is not None:
        gradients = gradients._replace(beta=0.5 * results["pull"])
    if seq.log_decay is not None:
        pull = results["pull"] if seq.beta is None else seq.beta * results["pull"]
        gradients = gradients._replace(log_decay=sum_to_end(-0.5 * pull, seq.runs, -scaling))
    if seq.factor is not None:
        gradients = gradients._replace(
            lam=jnp.zeros_like(seq.lam),
            factor=2 * matmul(results["first_covariance_bar"], seq.factor),
            weights=results["first_weights_bar"],
        )
    return gradients


# Second derivatives are left to XLA. They are taken with respect to the sequence as a whole, not by way of what the
# forward pass saved of it: hence the zeros.


def _gradients_forward(plan: Plan, seq: Sequence, saved: dict[str, Array], state: Any, cotangents: Any):
    return _gradients(plan, seq, saved, state, cotangents), (seq, saved, state, cotangents)


def _gradients_backward(plan: Plan, residuals, bars):
    seq, saved, state, cotangents = residuals
    twice = partial(_by_xla, plan, seq.log_decay is not None)  # with decay, `chunked` cannot
    seq_bar, cotangents_bar = jax.vjp(twice, seq, cotangents)[1](bars)
    return seq_bar, *jax.tree.map(jnp.zeros_like, (saved, state)), cotangents_bar


def _remembering_backward(plan: Plan, seq: Sequence, bars):
    cotangents, _ = bars
    return (_by_xla(plan, seq.log_decay is not None, seq, cotangents),)


remembering = with_closed_form(
    _remembering, lambda plan, seq: (_remembering(plan, seq), seq), _remembering_backward, static=(0,)
)
gradients_of = with_closed_form(_gradients, _gradients_forward, _gradients_backward, static=(0,))


def _fused_backward(plan: Plan, residuals, cotangents):
    seq, saved, state = residuals
    return (gradients_of(plan, seq, saved, state, cotangents),)


fused = with_closed_form(_fused, _fused_forward, _fused_backward, static=(0,))
