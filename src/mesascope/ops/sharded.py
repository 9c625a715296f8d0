r"""One sequence over many devices: each has a stretch of time, and the mesa operation is what it would be on one.

Least squares hands on a state of fixed size, whose information is a sum over pairs (README.md beside this file):

$$H_{p+1} = a_p H_p + X_p, \qquad S_{p+1} = a_p S_p + Y_p, \qquad
  X_p = \sum_{i} \omega_i k_i k_i^\top + \pi_p\,\mathrm{diag}(1/\lambda), \quad Y_p = \sum_{i} \omega_i v_i k_i^\top$$

over the pairs of stretch p, with $a_p$ what its decay leaves of the past (nothing, where a document ends), $\omega_i$
the weight that pair i has at its end, and $\pi_p$ that of a regularizer that began within it. So every device sums up
its own pairs, all exchange $(a, X, Y)$, d² numbers each, and then every device works on its stretch alone, from the
state before it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, ArrayLike, Float

from mesascope.ops.chunked import cast, largest_covariance, state_of
from mesascope.ops.chunks import decay_since_start
from mesascope.ops.factor import matmul, transpose
from mesascope.ops.gradients import broadcasting, with_closed_form
from mesascope.ops.mesa import MesaState, mesa_attention
from mesascope.ops.methods import Method
from mesascope.ops.validate import prepare


def mesa_attention_sharded(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    lam: ArrayLike,
    *,
    mesh: Mesh | AbstractMesh,
    axis: str = "time",
    log_decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    method: str | Method = "auto",
) -> Array:
    """`mesa_attention` with the time axis of its inputs and outputs cut over the devices of a mesh.

    Equal to it up to rounding, in values and gradients; a device holds and computes on its part of the time only. (For
    batches cut over other axes of the mesh as well, call `mesa_attention_shard` in a `jax.shard_map` of your own.)

    Args:
        lam: λ > 0, the same for all times, so not cut.
        mesh: of devices.
        axis: its axis that time is cut over; the length must be a multiple of its size.

    Raises:
        ValueError: the time cannot be cut so.
    """
    if axis not in mesh.shape:
        raise ValueError(f"axis: the mesh has {', '.join(map(repr, mesh.axis_names))}, got {axis!r}.")
    time, count = jnp.shape(keys)[-2], mesh.shape[axis]
    if time % count:
        raise ValueError(
            f"keys: expected a length that is a multiple of the {count} devices, got {time}. Fill up with pairs whose "
            "beta is 0."
        )
    gates = {"log_decay": log_decay, "beta": beta, "segment_ids": segment_ids}
    gates = {name: jnp.asarray(gate) for name, gate in gates.items() if gate is not None}
    q, k, v = (jnp.asarray(a) for a in (queries, keys, values))

    def cut(array: Array, after: int) -> PartitionSpec:
        return PartitionSpec(*[None] * (array.ndim - 1 - after), axis, *[None] * after)

    def local(q: Array, k: Array, v: Array, lam: Array, gates: dict[str, Array]) -> Array:
        return mesa_attention_shard(q, k, v, lam, axis=axis, method=method, **gates)

    specs = (
        cut(q, 1),
        cut(k, 1),
        cut(v, 1),
        PartitionSpec(),
        {name: cut(gate, 0) for name, gate in gates.items()},
    )
    leading = max((a.ndim - 2 for a in (q, k, v)), default=0)
    for gate in gates.values():
        leading = max(leading, gate.ndim - 1)
    leading = max(leading, jnp.ndim(lam) - 1)
    out = PartitionSpec(*[None] * leading, axis, None)
    # (Loops over chunks start from constants, which are not of any one device; hence no check of that.)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return mapped(q, k, v, jnp.asarray(lam, jnp.result_type(k)), gates)


@broadcasting
def mesa_attention_shard(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    lam: ArrayLike,
    *,
    axis: str = "time",
    log_decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    method: str | Method = "auto",
) -> Array:
    """What one device does, within a `jax.shard_map` (with `check_vma=False`) over an axis of that name.

    Arguments as in `mesa_attention`, each the device's own stretch of time; stretches follow each other in the order of
    the devices.
    """
    inputs = prepare(queries, keys, values, lam, log_decay, beta, segment_ids)
    k, v = inputs.keys, inputs.values
    # As in the whole sequence: a λ too large for any of its keys is lowered for all.
    largest = jnp.min(jax.lax.all_gather(largest_covariance(k, inputs.beta), axis), 0)
    ridge = jnp.minimum(inputs.lam, largest[:, None])

    dtype = k.dtype
    ones = jnp.ones(k.shape[:2], dtype)
    through = continues = jnp.ones(k.shape[:1], bool)
    last = jnp.ones(k.shape[:2], bool)
    if inputs.runs is not None and segment_ids is not None:
        runs = inputs.runs
        through, last = runs[:, -1] == 0, runs == runs[:, -1:]
        ids = jnp.broadcast_to(jnp.asarray(segment_ids), (*inputs.leading, k.shape[1])).reshape(k.shape[:2])
        continues = _next(ids[:, 0], axis) == ids[:, -1]
    decay = None if inputs.log_decay is None else decay_since_start(inputs.log_decay, inputs.runs)
    faded = ones if decay is None else jnp.exp(decay[:, -1:] - decay)
    left = ones[:, 0] if decay is None else jnp.exp(decay[:, -1])
    stretch = _Stretch(
        keys=k,
        values=v,
        lam=ridge,
        weight=jnp.where(last & continues[:, None], faded if inputs.beta is None else inputs.beta * faded, 0),
        carry=jnp.where(through & continues, left, 0),
        prior=jnp.where(continues, jnp.where(through, 0, left), 1),
    )
    state = MesaState(*_state_before(axis, decay is None, stretch))
    out = mesa_attention(
        inputs.queries, k, v, ridge, log_decay=inputs.log_decay, beta=inputs.beta,
        segment_ids=inputs.runs, state=state, method=method,
    )  # fmt: skip
    return out.reshape(*inputs.leading, *out.shape[1:]).astype(inputs.out_dtype)


def _next(array: Array, axis: str) -> Array:
    """That of the next device; the last gets the first's."""
    count = jax.lax.axis_size(axis)
    return jax.lax.ppermute(array, axis, [((i + 1) % count, i) for i in range(count)])


class _Stretch(NamedTuple):
    """What a device knows about its own pairs: their weights ω at its end, a and π."""

    keys: Float[Array, "batch time key"]
    values: Float[Array, "batch time value"]
    lam: Float[Array, "batch key"]
    weight: Float[Array, "batch time"]
    carry: Float[Array, " batch"]
    prior: Float[Array, " batch"]


class _Information(NamedTuple):
    """H and S, in units of √λ: there diag(1/λ) is the identity, and a fresh H at least that."""

    h: Array
    s: Array


def _before(axis: str, mine: _Stretch) -> tuple[_Information, Array]:
    """H and S before each device (first axis), and what each leaves of the past."""
    kn = mine.keys * jnp.sqrt(mine.lam)[:, None]
    weighted = transpose(mine.weight[..., None] * kn)
    eye = jnp.eye(kn.shape[-1], dtype=kn.dtype)
    x = matmul(weighted, kn) + mine.prior[:, None, None] * eye
    y = transpose(matmul(weighted, mine.values))
    a, x, y = (jax.lax.all_gather(part, axis) for part in (mine.carry, x, y))

    def step(at: _Information, part: tuple[Array, Array, Array]) -> tuple[_Information, _Information]:
        a, x, y = part
        a = a[:, None, None]
        return _Information(a * at.h + x, a * at.s + y), at

    start = _Information(jnp.broadcast_to(eye, x.shape[1:]), jnp.zeros_like(y[0]))
    return jax.lax.scan(step, start, (a, x, y))[1], a


def _at(axis: str, tree: _Information) -> _Information:
    here = jax.lax.axis_index(axis)
    return _Information(*(jax.lax.dynamic_index_in_dim(a, here, 0, keepdims=False) for a in tree))


def _local_state(axis: str, undecayed: bool, mine: _Stretch) -> tuple[Array, Array]:
    """F and Φ before this device's first pair. Sums in float64, for the reason given in `chunked`."""
    dtype = mine.keys.dtype
    with jax.enable_x64(True):
        mine = cast(mine, jnp.float64)
        at = _at(axis, _before(axis, mine)[0])
        state = state_of(at.h, at.s, jnp.sqrt(mine.lam), contains_prior=undecayed)
        state = cast(state, dtype)
    return state.factor, transpose(state.weights_t)


def _forward(axis: str, undecayed: bool, mine: _Stretch) -> tuple[tuple[Array, Array], _Stretch]:
    return _local_state(axis, undecayed, mine), mine


def _backward(axis: str, undecayed: bool, mine: _Stretch, bar: tuple[Array, Array]) -> tuple[_Stretch]:
    r"""The same sums backwards in time.

    What depends on F depends on $R = FF^\top$ alone, so
    $\bar H = -\tfrac12 F F^\top\bar F F^\top - \Phi^\top\bar\Phi R$ (symmetrized) and
    $\bar S = \bar\Phi R$; then $\hat H_p = \bar H_p + a_p \hat H_{p+1}$.
    """
    dtype = mine.keys.dtype
    with jax.enable_x64(True):
        mine, (factor_bar, weights_bar) = cast(mine, jnp.float64), cast(bar, jnp.float64)
        before, a = _before(axis, mine)
        at = _at(axis, before)
        scale = jnp.sqrt(mine.lam)
        factor, weights_t = state_of(at.h, at.s, scale, contains_prior=undecayed)
        covariance = matmul(factor, transpose(factor))
        h_bar = -0.5 * matmul(matmul(factor, matmul(transpose(factor), factor_bar)), transpose(factor))
        h_bar = h_bar - matmul(weights_t, matmul(weights_bar, covariance))
        h_bar = 0.5 * (h_bar + transpose(h_bar))
        bars = _Information(h_bar, matmul(weights_bar, covariance))
        bars = _Information(*(jax.lax.all_gather(b, axis) for b in bars))

        def step(ahead: _Information, part: tuple[Array, _Information]) -> tuple[_Information, _Information]:
            a, bar = part
            a = a[:, None, None]
            return _Information(bar.h + a * ahead.h, bar.s + a * ahead.s), ahead

        nothing = _Information(*(jnp.zeros_like(b[0]) for b in bars))
        start, after = jax.lax.scan(step, nothing, (a, bars), reverse=True)
        x_bar, y_bar = _at(axis, after)
        # Back to units of 1: X = Σ ω k kᵀ + π diag(1/λ).
        unscaled = _Information(at.h / (scale[:, :, None] * scale[:, None]), at.s / scale[:, None])
        wk, wv = (mine.weight[..., None] * part for part in (mine.keys, mine.values))
        k_bar = 2 * matmul(wk, x_bar) + matmul(wv, y_bar)
        kx, ky = matmul(mine.keys, x_bar), matmul(mine.keys, transpose(y_bar))
        penalty_bar = mine.prior[:, None] * jnp.diagonal(x_bar, axis1=-2, axis2=-1)
        first = jax.lax.axis_index(axis) == 0
        penalty_bar = penalty_bar + jnp.where(first, jnp.diagonal(start.h, axis1=-2, axis2=-1), 0)
        gradients = _Stretch(
            keys=k_bar,
            values=matmul(wk, transpose(y_bar)),
            lam=-penalty_bar / mine.lam**2,
            weight=jnp.sum(mine.keys * kx, -1) + jnp.sum(mine.values * ky, -1),
            carry=jnp.sum(x_bar * unscaled.h, (-1, -2)) + jnp.sum(y_bar * unscaled.s, (-1, -2)),
            prior=jnp.sum(jnp.diagonal(x_bar, axis1=-2, axis2=-1) / mine.lam, -1),
        )
        return (cast(gradients, dtype),)


_state_before = with_closed_form(_local_state, _forward, _backward, static=(0, 1))

__all__ = ["mesa_attention_shard", "mesa_attention_sharded"]
