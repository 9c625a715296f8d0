r"""Causal linear attention as one kernel: a program walks the chunks of a head, for some columns of the values.

    o_t = Σ_{i ≤ t} (q_t · k_i) v_i
    ∂q_t = Σ_{i ≤ t} (ō_t · v_i) k_i        ∂k_i = Σ_{t ≥ i} (v_i · ō_t) q_t        ∂v_i = Σ_{t ≥ i} (k_i · q_t) ō_t

So gradients are the same operation: of (ō, v, k), and backwards in time of (v, ō, q) and (k, q, ō). Nothing is kept for
them but what was given. The state, Σ k_i v_iᵀ so far, lies in memory that stays close: registers cannot hold it too.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mesascope.ops.gradients import with_closed_form
from mesascope.ops.kernels import barrier, call_by_block, indices, load, loop, padded, store
from mesascope.ops.pallas_states import CHUNK, COLUMNS, NARROW, each, exact, total


def _walk(backwards: bool, refs: dict[str, Any], block: Any) -> None:
    """Some columns of all outputs of a head."""
    (time, key), value, state = refs["q"].shape, refs["v"].shape[-1], refs["new_state"]
    size, tile = min(CHUNK, padded(time)), state.shape[0]
    count = -(-time // size)
    width = min(COLUMNS, state.shape[1])
    columns = block * width + indices(width)
    i, j = indices(size)[:, None], indices(size)[None, :]
    seen = i <= j if backwards else i >= j

    def within(wide: int) -> tuple[int, int] | None:
        """The shape of an array, if tiles go beyond it."""
        return None if time % size == 0 and wide == padded(wide) else (time, wide)

    each(tile, lambda _, p: store(state, p, columns, None, jnp.zeros((len(p), width), state.dtype)))

    def step(index: Any, carry: Any) -> Any:
        start = (count - 1 - index if backwards else index) * size

        def given(name: str, p: Array, tokens: Array | None = None) -> Array:
            lines = start + (indices(size) if tokens is None else tokens)
            return load(refs[name], lines, p, within(value if name == "v" else key))

        def of_state(p: Array) -> Array:
            return exact(given("q", p), load(state, p, columns))

        def add(_: Any, p: Array) -> None:
            def term(tokens: Array) -> Array:
                return exact(given("k", p, tokens), given("v", columns, tokens), (0, 0))

            met = total(size, term, width=NARROW)
            barrier()
            store(state, p, columns, None, load(state, p, columns) + met)

        barrier()
        out = total(tile, of_state, width=NARROW)
        barrier()
        scores = total(tile, lambda p: exact(given("q", p), given("k", p), (1, 1)), width=NARROW)
        out = out + exact(jnp.where(seen, scores, 0.0), given("v", columns))
        store(refs["new_out"], start + indices(size), columns, within(value), out)
        barrier()
        each(tile, add)
        return carry

    loop(count, step, 0)


def _attend(q: Array, k: Array, v: Array, *, backwards: bool = False) -> Array:
    tiles = padded(q.shape[-1]), padded(v.shape[-1])
    shapes = dict(out=v.shape, state=(len(q), *tiles))
    outputs = {name: jax.ShapeDtypeStruct(shape, v.dtype) for name, shape in shapes.items()}
    kernel, blocks = partial(_walk, backwards), max(1, tiles[1] // COLUMNS)
    return call_by_block(kernel, dict(q=q, k=k, v=v), outputs, blocks=blocks, warps=4)["out"]


def _linear_fused(
    queries: Float[Array, "batch time key"],
    keys: Float[Array, "batch time key"],
    values: Float[Array, "batch time value"],
) -> Float[Array, "batch time value"]:
    """Outputs of causal linear attention, in float32, without a state before or after."""
    return _attend(queries, keys, values)


def _forward(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _attend(q, k, v), (q, k, v)


def _backward(saved: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array, Array]:
    q, k, v = saved
    return _attend(g, v, k), _attend(v, g, q, backwards=True), _attend(k, q, g, backwards=True)


linear_fused = with_closed_form(_linear_fused, _forward, _backward)
