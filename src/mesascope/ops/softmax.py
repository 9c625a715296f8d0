"""Causal softmax attention with its gradient in closed form, and as fused GPU kernels."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mesascope.ops.gradients import with_closed_form
from mesascope.ops.methods import has_kernels

HIGHEST = jax.lax.Precision.HIGHEST
_BLOCK = 64  # tokens that one program of the fused kernels takes at once
_WIDEST = 64  # up to which they are chosen
IN_PLACE = True
"""Whether kernels read and write queries, keys and values side by side, where a matrix product leaves them, instead of
copies head by head: a fifth less memory traffic in a training step (measured: benchmarks/kernels.md)."""


def causal_softmax(
    queries: Float[Array, "*batch time key"],
    keys: Float[Array, "*batch time key"],
    values: Float[Array, "*batch time value"],
    starts: Int[Array, "*batch time"] | None = None,
) -> Float[Array, "*batch time value"]:
    r"""$o_t = \sum_{i\le t} p_{ti} v_i / \sum_{i\le t} p_{ti}$ with $p_{ti} = e^{q_t^\top k_i/\sqrt d - m_t}$.

    $m_t$ is the largest exponent of row t. Outputs are divided by the sums instead of the $T \times T$ weights, and
    with $\hat o_t = \bar o_t / \sum_i p_{ti}$ the gradient takes one pass over them:
    $\bar s_{ti} = p_{ti}(\hat o_t^\top v_i - \hat o_t^\top o_t)$.

    bfloat16 is multiplied as such and summed up in float32; exponentials are taken in float32 and kept in bfloat16.

    Args:
        starts: where the document of each token begins; sums are from there on.
    """
    fits = _fits(max(queries.shape[-1], values.shape[-1]), queries.dtype)
    return (fused_softmax if fits else plain_softmax)(queries, keys, values, starts)


def causal_softmax_joined(
    joined: Float[Array, "*batch time 3*heads*key"],
    heads: int,
    starts: Int[Array, "*batch time"] | None = None,
) -> Float[Array, "*batch time heads*key"]:
    """The same for all heads of a layer, whose queries, keys and values are side by side for each token, as one matrix
    product leaves them."""
    if IN_PLACE and _fits(joined.shape[-1] // (3 * heads), joined.dtype):
        return fused_softmax_joined(joined, heads, starts)
    return _joined(causal_softmax, heads, joined, starts)


def _fits(width: int, dtype: Any) -> bool:
    return width <= _WIDEST and dtype != jnp.float64 and has_kernels()


def _plain(q: Array, k: Array, v: Array, starts: Array | None = None) -> Array:
    return _plain_forward(q, k, v, starts)[0]


def _einsum(equation: str, a: Array, b: Array) -> Array:
    """In the dtype of what is multiplied, summed up in float32 at least."""
    out = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    return jnp.einsum(equation, a, b, precision=HIGHEST, preferred_element_type=out)


def _plain_forward(
    q: Array, k: Array, v: Array, starts: Array | None = None
) -> tuple[Array, tuple[Array | None, ...]]:
    time = q.shape[-2]
    q = q * (1 / math.sqrt(q.shape[-1]))
    s = _einsum("...td,...id->...ti", q, k)
    visible = jnp.tril(jnp.ones((time, time), bool))
    if starts is not None:
        visible = visible & (jnp.arange(time, dtype=starts.dtype) >= starts[..., None])
    s = jnp.where(visible, s, -jnp.inf)
    p = jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True)))
    total = jnp.sum(p, -1, keepdims=True)
    p = p.astype(v.dtype)
    out = _einsum("...ti,...iv->...tv", p, v) / total
    return out.astype(v.dtype), (q, k, v, starts, p, total, out)


def _plain_backward(saved: tuple[Array, ...], out_bar: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, _, p, total, out = saved
    pulled = out_bar.astype(out.dtype) / total
    offset = jnp.sum(pulled * out, -1, keepdims=True)
    pulled = pulled.astype(v.dtype)
    s_bar = p.astype(out.dtype) * (_einsum("...tv,...iv->...ti", pulled, v) - offset)
    s_bar = s_bar.astype(q.dtype)
    v_bar = _einsum("...ti,...tv->...iv", p, pulled)
    q_bar = _einsum("...ti,...id->...td", s_bar, k) * (1 / math.sqrt(q.shape[-1]))
    k_bar = _einsum("...ti,...td->...id", s_bar, q)
    return q_bar.astype(q.dtype), k_bar.astype(k.dtype), v_bar.astype(v.dtype), None


plain_softmax = with_closed_form(_plain, _plain_forward, _plain_backward)


def _joined(softmax: Any, heads: int, joined: Array, starts: Array | None) -> Array:
    """Head by head, of what is side by side."""
    q, k, v = (
        jnp.swapaxes(part.reshape(*part.shape[:-1], heads, -1), -2, -3) for part in jnp.split(joined, 3, -1)
    )
    out = softmax(q, k, v, None if starts is None else starts[..., None, :])
    return jnp.swapaxes(out, -2, -3).reshape(*joined.shape[:-1], -1)


def plain_softmax_joined(joined: Array, heads: int, starts: Array | None = None) -> Array:
    return _joined(plain_softmax, heads, joined, starts)


# Fused. What is given is (q, k, v) with None for heads, or one array of them side by side with how many there are.

Given = tuple[Array, ...]


def _plainly(heads: int | None, given: Given, starts: Array | None) -> Array:
    if heads is None:
        q, k, v = given
        return plain_softmax(q, k, v, starts)
    return plain_softmax_joined(given[0], heads, starts)


def _by_head(heads: int | None, given: Given, starts: Array | None) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The leading axes, heads among them, and the arrays with one axis in their place, apart from "qkv"."""
    if heads is None:
        leading = jnp.broadcast_shapes(*(a.shape[:-2] for a in given))
        flat: dict[str, Any] = {
            name: jnp.broadcast_to(a, (*leading, *a.shape[-2:])).reshape(-1, *a.shape[-2:])
            for name, a in zip("qkv", given, strict=True)
        }
    else:
        (joined,) = given
        leading = (*joined.shape[:-2], heads)
        flat = {"qkv": joined.reshape(-1, joined.shape[-2], 3, heads, joined.shape[-1] // (3 * heads))}
        starts = None if starts is None else starts[..., None, :]
    if starts is not None:
        all_of_them = jnp.broadcast_to(starts.astype(jnp.int32), (*leading, starts.shape[-1]))
        flat["starts"] = all_of_them.reshape(-1, starts.shape[-1])
    return leading, flat


class _Tiles:
    """How the kernels cut a head into blocks of tokens, and how they read one.

    Attributes:
        size: tokens of a block.
        blocks: of a head; a program is one of them, and loops over those that it sees or is seen by.
        sums: dtype of sums.
    """

    def __init__(self, arrays: dict[str, Any]):
        from mesascope.ops import kernels  # its compiler is not everywhere

        self.kernels = kernels
        self.joined = "qkv" in arrays
        some = arrays["qkv" if self.joined else "q"]
        self.time, self.key = some.shape[1], some.shape[-1]
        self.value = self.key if self.joined else arrays["v"].shape[-1]
        self.size = min(_BLOCK, kernels.padded(self.time))
        self.blocks = -(-self.time // self.size)
        self.sums = jnp.float64 if some.dtype == jnp.float64 else jnp.float32

    # Made within a kernel, which may not bring constants along.

    @property
    def rows(self) -> Array:
        return self.kernels.indices(self.kernels.padded(self.key))

    @property
    def columns(self) -> Array:
        return self.kernels.indices(self.kernels.padded(self.value))

    def zeros(self, *shape: int) -> Array:
        return jnp.zeros(shape, self.sums)

    def call(
        self, kernel: Any, inputs: dict[str, Any], outputs: dict[str, Any], **in_place: str
    ) -> dict[str, Array]:
        warps = 4 if max(self.key, self.value) <= 32 or self.blocks == 1 else 8
        heads_at = {"qkv": 3, "begun": 3, "out": 2, "bar": 2} if self.joined else {}
        return self.kernels.call_by_block(
            kernel, inputs, outputs, blocks=self.blocks, warps=warps, in_place=in_place, heads_at=heads_at
        )

    def tokens(self, block: Any) -> Array:
        return block * self.size + self.kernels.indices(self.size)

    def load(self, refs: dict[str, Any], name: str, tokens: Array) -> Array:
        ref, columns, part = self._place(refs, name, "")
        return self.kernels.load(ref, tokens, columns, (self.time, ref.shape[-1]), part=part)

    def store(self, refs: dict[str, Any], name: str, tokens: Array, value: Array) -> None:
        ref, columns, part = self._place(refs, name, "new_")
        shape = (self.time, ref.shape[-1])
        self.kernels.store(ref, tokens, columns, shape, value.astype(ref.dtype), part=part)

    def _place(self, refs: dict[str, Any], name: str, before: str) -> tuple[Any, Array, int | None]:
        columns = self.rows if name in ("q", "k") else self.columns
        if self.joined and name in ("q", "k", "v"):
            return refs[f"{before}qkv"], columns, "qkv".index(name)
        return refs[before + name], columns, None

    def queries(self, refs: dict[str, Any], tokens: Array) -> Array:
        return self.load(refs, "q", tokens) * (1 / math.sqrt(self.key))

    def scores(self, refs: dict[str, Any], queries: Array, seeing: Array, keys: Array, seen: Array) -> Array:
        visible = seeing[:, None] >= seen[None, :]
        if "starts" in refs:
            starts = self.kernels.load_vector(refs["starts"], seeing, self.time, 0)
            visible = visible & (seen[None, :] >= starts[:, None])
        return jnp.where(visible, self.kernels.dot(queries, keys, (1, 1)), -jnp.inf)

    def over(self, start: Any, stop: Any, body: Any, carry: Any) -> Any:
        """A loop over blocks, or what is left of it where there is only one."""
        return body(0, carry) if self.blocks == 1 else self.kernels.loop_between(start, stop, body, carry)


def _remembering(heads: int | None, given: Given, starts: Array | None = None) -> tuple[Array, Array]:
    """Outputs, and the logarithm of each row's sum of exponentials.

    Sums run over blocks of keys, relative to the largest exponent so far: they shrink when a larger one appears.
    """
    leading, arrays = _by_head(heads, given, starts)
    tiles = _Tiles(arrays)
    batch, time, dv = math.prod(leading), tiles.time, tiles.value
    dot = tiles.kernels.dot

    def kernel(refs: dict[str, Any], block: Any) -> None:
        tokens = tiles.tokens(block)
        q = tiles.queries(refs, tokens)

        def visit(other: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            out, total, largest = carry
            seen = tiles.tokens(other)
            s = tiles.scores(refs, q, tokens, tiles.load(refs, "k", seen), seen)
            new_largest = jnp.maximum(largest, jnp.max(s, 1))
            p, shrunk = jnp.exp(s - new_largest[:, None]), jnp.exp(largest - new_largest)
            v = tiles.load(refs, "v", seen)
            out = shrunk[:, None] * out + dot(p.astype(v.dtype), v)
            return out, shrunk * total + jnp.sum(p, 1), new_largest

        nothing = tiles.zeros(tiles.size)
        # Finite, so that a block in which a token sees nothing leaves no NaN.
        lowest = nothing + float(jnp.finfo(tiles.sums).min)
        start = (tiles.zeros(tiles.size, len(tiles.columns)), nothing, lowest)
        out, total, largest = tiles.over(0, block + 1, visit, start)
        tiles.store(refs, "out", tokens, out / total[:, None])
        tiles.kernels.store_vector(refs["new_log_sum"], tokens, time, largest + jnp.log(total))

    shape = (batch, time, dv) if heads is None else (batch // heads, time, heads, dv)
    outputs = dict(
        out=jax.ShapeDtypeStruct(shape, given[0].dtype),
        log_sum=jax.ShapeDtypeStruct((batch, time), tiles.sums),
    )
    results = tiles.call(kernel, arrays, outputs)
    log_sum = results["log_sum"].reshape(*leading, time)
    if heads is None:
        return results["out"].reshape(*leading, time, dv), log_sum
    return results["out"].reshape(*leading[:-1], time, heads * dv), log_sum


def _gradients(
    heads: int | None, given: Given, starts: Array | None, log_sum: Array, out: Array, out_bar: Array
) -> Given:
    """From the outputs' cotangents to those of q, k and v: a sum over the past for q, over the future for k and v."""
    leading, arrays = _by_head(heads, given, starts)
    tiles = _Tiles(arrays)
    batch, time, d, dv = math.prod(leading), tiles.time, tiles.key, tiles.value
    alone = tiles.blocks == 1
    dot = tiles.kernels.dot

    def pulled(refs: dict[str, Any], seeing: Array, q: Array, k: Array, v: Array, seen: Array):
        """The weights p, their logits' cotangent, and the outputs' cotangent."""
        bar = tiles.load(refs, "bar", seeing)
        log_sum = tiles.kernels.load_vector(refs["log_sum"], seeing, time)
        p = jnp.exp(tiles.scores(refs, q, seeing, k, seen) - log_sum[:, None])
        p_bar = dot(bar, v, (1, 1))
        # Σ_i p_ti p̄_ti = ō_tᵀo_t
        offset = jnp.sum(p * p_bar, 1) if alone else tiles.kernels.load_vector(refs["offset"], seeing, time)
        return p.astype(q.dtype), (p * (p_bar - offset[:, None])).astype(q.dtype), bar

    def kernel_of_keys(refs: dict[str, Any], block: Any) -> None:
        seen = tiles.tokens(block)
        k, v = tiles.load(refs, "k", seen), tiles.load(refs, "v", seen)

        def visit(other: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            k_bar, v_bar = carry
            seeing = tiles.tokens(other)
            q = tiles.queries(refs, seeing)
            p, s_bar, bar = pulled(refs, seeing, q, k, v, seen)
            if alone:
                tiles.store(refs, "q", seeing, dot(s_bar, k) * (1 / math.sqrt(d)))
            return k_bar + dot(s_bar, q, (0, 0)), v_bar + dot(p, bar, (0, 0))

        k_bar, v_bar = tiles.over(block, tiles.blocks, visit, (tiles.zeros(*k.shape), tiles.zeros(*v.shape)))
        tiles.store(refs, "k", seen, k_bar)
        tiles.store(refs, "v", seen, v_bar)

    def kernel_of_queries(refs: dict[str, Any], block: Any) -> None:
        seeing = tiles.tokens(block)
        q = tiles.queries(refs, seeing)

        def visit(other: Any, q_bar: Array) -> Array:
            seen = tiles.tokens(other)
            k, v = tiles.load(refs, "k", seen), tiles.load(refs, "v", seen)
            return q_bar + dot(pulled(refs, seeing, q, k, v, seen)[1], k)

        q_bar = tiles.over(0, block + 1, visit, tiles.zeros(*q.shape))
        tiles.store(refs, "q", seeing, q_bar * (1 / math.sqrt(d)))

    shape = (batch, time, dv) if heads is None else (batch // heads, time, heads, dv)
    inputs = arrays | dict(bar=out_bar.reshape(shape), log_sum=log_sum.reshape(batch, time))
    if not alone:
        offset = jnp.sum((out_bar * out).astype(tiles.sums).reshape(shape), -1)
        inputs |= dict(offset=offset if heads is None else jnp.swapaxes(offset, 1, 2).reshape(batch, time))
    names = ("qkv",) if tiles.joined else tuple("qkv")
    outputs = {name: jax.ShapeDtypeStruct(arrays[name].shape, given[0].dtype) for name in names}
    if alone:
        results = tiles.call(kernel_of_keys, inputs, outputs)
    elif tiles.joined:  # one array, to which both kernels contribute
        begun = tiles.call(kernel_of_keys, inputs, outputs)["qkv"]
        results = tiles.call(kernel_of_queries, inputs | dict(begun=begun), outputs, begun="qkv")
    else:
        results = tiles.call(kernel_of_keys, inputs, {name: outputs[name] for name in "kv"})
        results |= tiles.call(kernel_of_queries, inputs, {"q": outputs["q"]})
    if tiles.joined:
        return (results["qkv"].reshape(given[0].shape),)
    return tuple(results[name].reshape(*leading, *results[name].shape[1:]) for name in names)


def _fused(heads: int | None, given: Given, starts: Array | None = None) -> Array:
    return remembering(heads, given, starts)[0]


def _fused_forward(heads: int | None, given: Given, starts: Array | None = None):
    out, log_sum = remembering(heads, given, starts)
    return out, (given, starts, log_sum, out)


def _fused_backward(heads: int | None, saved, out_bar: Array):
    given, starts, log_sum, out = saved
    return gradients_of(heads, given, starts, log_sum, out, out_bar), None


# Second derivatives are left to XLA, with respect to the inputs and not by way of what was saved of them.


def _pull(heads: int | None, given: Given, starts: Array | None, out_bar: Array) -> Given:
    return jax.vjp(lambda given: _plainly(heads, given, starts), given)[1](out_bar)[0]


def _gradients_forward(heads: int | None, *rest):
    return _gradients(heads, *rest), rest


def _gradients_backward(heads: int | None, saved, bars):
    given, starts, log_sum, out, out_bar = saved
    twice = jax.vjp(lambda given, bar: _pull(heads, given, starts, bar), given, out_bar)[1]
    given_bar, out_bar_bar = twice(bars)
    return given_bar, None, jnp.zeros_like(log_sum), jnp.zeros_like(out), out_bar_bar


def _remembering_forward(heads: int | None, given: Given, starts: Array | None = None):
    return _remembering(heads, given, starts), (given, starts)


def _remembering_backward(heads: int | None, saved, bars):
    given, starts = saved
    return _pull(heads, given, starts, bars[0]), None


remembering = with_closed_form(_remembering, _remembering_forward, _remembering_backward, static=(0,))
gradients_of = with_closed_form(_gradients, _gradients_forward, _gradients_backward, static=(0,))
fused = with_closed_form(_fused, _fused_forward, _fused_backward, static=(0,))


def fused_softmax(q: Array, k: Array, v: Array, starts: Array | None = None) -> Array:
    return fused(None, (q, k, v), starts)


def fused_softmax_joined(joined: Array, heads: int, starts: Array | None = None) -> Array:
    return fused(heads, (joined,), starts)
