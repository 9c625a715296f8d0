"""What the fused kernels share: tiles, exact products, and one program per head or per block of its tokens.

They are written in JAX Pallas and compiled by its Triton backend, which jax 0.11 calls deprecated. Nothing imports this
module until a kernel runs, and every operation that has one has another way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from mesascope.ops.sequence import Sequence


def interpreted() -> bool:
    """Without a GPU, kernels are run operation by operation: slow, for tests."""
    return jax.default_backend() != "gpu"


def has_float64() -> bool:
    """Whether a kernel has it: interpreted, only where the user has enabled it."""
    return not interpreted() or jnp.result_type(float) == jnp.float64


def padded(width: int) -> int:
    """Tiles have powers of two on their sides, and matrix products want 16; wide ones are taken by 64 columns."""
    return max(16, 1 << (width - 1).bit_length()) if width <= 128 else -(-width // 64) * 64


def indices(n: int) -> Array:
    return lax.iota(jnp.int32, n)


class Shape(NamedTuple):
    """Sizes of a problem of the mesa operation: what arrays have, and what tiles have."""

    batch: int
    time: int
    key: int
    value: int
    dtype: Any
    coarse: bool = False
    """Inputs and outputs have no more digits than bfloat16."""

    @classmethod
    def of(cls, seq: Sequence, coarse: bool = False) -> "Shape":
        batch, time, key = seq.keys.shape
        return cls(batch, time, key, seq.values.shape[-1], seq.keys.dtype, coarse)

    @property
    def bits(self) -> int:
        """How many digits of its factors count in a product that is not multiplied further. Long keys cancel more."""
        return 16 if self.coarse and self.key_tile <= 128 else 24

    @property
    def key_tile(self) -> int:
        return padded(self.key)

    @property
    def value_tile(self) -> int:
        return padded(self.value)

    @property
    def widest(self) -> int:
        return max(self.key_tile, self.value_tile)

    def blocks(self, size: int) -> int:
        """How many of so many tokens there are."""
        return -(-self.time // size)

    def zeros(self, *sides: int) -> Array:
        return jnp.zeros(sides, self.dtype)

    def keys(self, ref: Any, tokens: Array) -> Array:
        return load(ref, tokens, indices(self.key_tile), (self.time, self.key))

    def values(self, ref: Any, tokens: Array) -> Array:
        return load(ref, tokens, indices(self.value_tile), (self.time, self.value))


def loop(count: int, body: Callable, carry: Any) -> Any:
    return loop_between(0, count, body, carry)


def loop_between(start: Any, stop: Any, body: Callable, carry: Any) -> Any:
    """Counted in 32 bits, whatever the user has enabled."""
    return lax.fori_loop(jnp.asarray(start, jnp.int32), jnp.asarray(stop, jnp.int32), body, carry)


def only(condition: Any, body: Callable[[], None]) -> None:
    """Do something where it holds."""

    def step(_: Any, carry: Any) -> Any:
        body()
        return carry

    loop_between(np.int32(0), condition.astype(jnp.int32), step, np.int32(0))


def dot(
    a: Array, b: Array, contract: tuple[int, int] = (1, 0), *, bits: int = 24, six: bool = False
) -> Array:
    """A product, summed up in float32, or in float64 if that is what both factors are in.

    Args:
        bits: how many digits of the factors count. 24 are all of float32: on tensor cores three TF32 products, or six
            of bfloat16. For 16, three of bfloat16 will do. A factor in bfloat16 has 8, which saves products.
        six: rather six products of bfloat16 than three of TF32.
    """
    if a.dtype == jnp.float64:
        return _product(a, b, contract, lax.Precision.HIGHEST)
    if bits < 24 or jnp.bfloat16 in (a.dtype, b.dtype) or (six and not interpreted()):
        return _by_parts(a, b, contract, 3 if bits == 24 else 2)
    preset = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return _product(a, b, contract, lax.Precision.HIGHEST if interpreted() else preset)


def _product(a: Array, b: Array, contract: tuple[int, int], precision: Any = None) -> Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    out = jnp.float32 if a.dtype == jnp.bfloat16 else a.dtype
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=out)


def _by_parts(a: Array, b: Array, contract: tuple[int, int], count: int) -> Array:
    """As products of bfloat16, of factors in so many parts.

    Two products of bfloat16 take as long as one of TF32 and need no transposed copies on the way. Of three parts each,
    six products leave out less than 2⁻²³ of the whole; three of TF32 up to 2⁻²². Of two parts, three leave out 2⁻¹⁶.
    """
    a_parts, b_parts = parts_of(a, count), parts_of(b, count)
    terms = [
        _product(x, y, contract)
        for order in reversed(range(count))  # the smallest first
        for i, x in enumerate(a_parts)
        for j, y in enumerate(b_parts)
        if i + j == order
    ]
    return sum(terms[1:], start=terms[0])


def parts_of(a: Array, count: int) -> list[Array]:
    """An array as a sum of so many in bfloat16, of 8 digits each: of three, all that float32 has.

    (By integers: conversions one at a time are slow, and two at a time not what the compiler finds by itself.)
    """
    if a.dtype == jnp.bfloat16:
        return [a]
    parts = []
    for _ in range(count - 1):
        parts.append(_rounded(a, 16))
        a = a - parts[-1]
    return [x.astype(jnp.bfloat16) for x in (*parts, a)]


def _rounded(x: Array, bits: int) -> Array:
    """Without the last so many bits of float32."""
    whole = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((whole + (1 << (bits - 1))) & -(1 << bits), jnp.float32)


def barrier() -> None:
    """What this program has stored so far, all of its threads may load."""
    if not interpreted():
        plt.debug_barrier()


def load(
    ref: Any,
    rows: Array,
    columns: Array,
    shape: tuple[int, int] | None = None,
    *,
    number: Any = None,
    part: int | None = None,
) -> Array:
    """Rows and columns of a matrix (the one of this number, where there are several one after the other; this part,
    where there are several row by row), zero beyond its shape.

    Without a shape none of them may lie beyond it: cheaper.
    """
    place, mask = _place(ref, rows, columns, shape, number, part)
    return plt.load(place) if mask is None else plt.load(place, mask=mask, other=0.0)


def store(
    ref: Any,
    rows: Array,
    columns: Array,
    shape: tuple[int, int] | None,
    value: Array,
    *,
    number: Any = None,
    part: int | None = None,
) -> None:
    place, mask = _place(ref, rows, columns, shape, number, part)
    plt.store(place, value, mask=mask)


def _place(
    ref: Any, rows: Array, columns: Array, shape: tuple[int, int] | None, number: Any, part: int | None
) -> tuple[Any, Array | None]:
    at = (rows[:, None], columns[None, :]) if part is None else (rows[:, None], part, columns[None, :])
    place = ref.at[at if number is None else (number, *at)]
    if shape is None:
        return place, None
    return place, (rows < shape[0])[:, None] & (columns < shape[1])[None, :]


def load_row(ref: Any, row: Any, columns: Array, width: int) -> Array:
    return plt.load(ref.at[row, columns], mask=columns < width, other=0.0)


def store_row(ref: Any, row: Any, columns: Array, width: int, value: Array) -> None:
    plt.store(ref.at[row, columns], value, mask=columns < width)


def load_vector(ref: Any, places: Array, length: int, other: float | int = 0.0) -> Array:
    return plt.load(ref.at[places], mask=places < length, other=other)


def store_vector(ref: Any, places: Array, length: Any, value: Array) -> None:
    plt.store(ref.at[places], value, mask=places < length)


def call(
    kernel: Callable[[dict[str, Any]], None],
    inputs: dict[str, Array | None],
    outputs: dict[str, jax.ShapeDtypeStruct],
    *,
    warps: int,
    in_place: dict[str, str] | None = None,
) -> dict[str, Array]:
    """Run one program per entry of the leading axis, which all arrays share.

    Args:
        kernel: takes a dictionary of references, without that axis: the inputs that are not None by their names, the
            outputs by theirs with `new_` before them.
        in_place: inputs whose memory an output may take over.
    """

    def alone(refs: dict[str, Any], _: Any) -> None:
        kernel(refs)

    alone.__name__ = _name(kernel)
    return call_by_block(alone, inputs, outputs, blocks=1, warps=warps, in_place=in_place)


def _name(kernel: Callable) -> str:
    """What profilers call it."""
    return kernel.func.__name__ if isinstance(kernel, partial) else kernel.__name__


def call_by_block(
    kernel: Callable[[dict[str, Any], Any], None],
    inputs: dict[str, Array | None],
    outputs: dict[str, jax.ShapeDtypeStruct],
    *,
    blocks: int,
    warps: int,
    in_place: dict[str, str] | None = None,
    heads_at: dict[str, int] | None = None,
) -> dict[str, Array]:
    """The same with so many programs per entry, side by side: `kernel` also takes the number of its block.

    Args:
        in_place: inputs whose memory an output may take over.
        heads_at: the axis of the heads, for arrays [batch, …, heads, …]; a name means the input and the output that
            have it. All other arrays have one axis for both.
    """
    given = {name: array for name, array in inputs.items() if array is not None}

    def spec(name: str, array: Any) -> pl.BlockSpec:
        axis = (heads_at or {}).get(name, 0)
        block = [None if j in (0, axis) else n for j, n in enumerate(array.shape)]
        if axis == 0:
            return pl.BlockSpec(block, lambda i, _: (i, *(0,) * (len(block) - 1)))
        count = np.int32(array.shape[axis])

        def place(i: Any, _: Any) -> tuple[Any, ...]:
            rest = (lax.rem(i, count) if j == axis else 0 for j in range(1, len(block)))
            return lax.div(i, count), *rest

        return pl.BlockSpec(block, place)

    def programs(name: str, array: Any) -> int:
        axis = (heads_at or {}).get(name, 0)
        return array.shape[0] * (array.shape[axis] if axis else 1)

    names = [*given, *("new_" + name for name in outputs)]

    def program(*refs: Any) -> None:
        kernel(dict(zip(names, refs, strict=True)), pl.program_id(1))

    program.__name__ = _name(kernel)
    results = pl.pallas_call(
        program,
        grid=(programs(*next(iter(outputs.items()))), blocks),
        in_specs=[spec(*item) for item in given.items()],
        out_specs=[spec(*item) for item in outputs.items()],
        out_shape=list(outputs.values()),
        input_output_aliases={
            list(given).index(i): list(outputs).index(o) for i, o in (in_place or {}).items()
        },
        interpret=interpreted(),
        compiler_params=None if interpreted() else plt.CompilerParams(num_warps=warps, num_stages=1),
    )(*given.values())
    return dict(zip(outputs, results, strict=True))
