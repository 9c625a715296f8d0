"""One Transformer for every model of the paper.

What mixes tokens is a union, `Softmax | Linear | Mesa | Delta`; what may be added to it (embeddings, LayerNorm, MLPs,
positions, normalization, features, forgetting, clipping) is a field that works the same way for all of them. Arrays
are `[..., time, width]`, leading axes are free. Every activation has an address:

    predictions, activations = model.trace(tokens)
    activations["blocks.2.mixer.queries"]
    model.trace(tokens, edit={"blocks.0.resid_post": jnp.zeros_like})

And a model decodes: `decode` goes on from a state, one token or many at a time.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from mesascope.architecture import (
    Block,
    Delta,
    FeedForward,
    Linear,
    Mesa,
    Mixer,
    ModelConfig,
    Normalize,
    Positions,
    Softmax,
)
from mesascope.ops import MesaState, delta_attention, linear_attention, mesa_attention, mesa_init, mesa_step
from mesascope.ops.softmax import causal_softmax, causal_softmax_joined
from mesascope.parts import (
    ACTIVATIONS,
    beside_codes,
    dpfp,
    inverse_softplus,
    join_heads,
    layer_norm,
    matmul,
    normalized,
    positions,
    positive_lam,
    split_heads,
    wide,
)
from mesascope.taps import Edit, Tap

__all__ = [
    "Biases",
    "Block",
    "Cache",
    "DecodingState",
    "Delta",
    "Edit",
    "FeedForward",
    "Layer",
    "LayerState",
    "Linear",
    "Mesa",
    "Mixer",
    "ModelConfig",
    "Normalize",
    "Positions",
    "Softmax",
    "Transformer",
]


class Cache(NamedTuple):
    """What softmax attention remembers: everything, up to a length fixed in advance.

    Attributes:
        log_decay: its running sum $c_t$, where the block forgets.
    """

    keys: Float[Array, "*batch head length key"]
    values: Float[Array, "*batch head length value"]
    log_decay: Float[Array, "*batch head length"] | None


class LayerState(NamedTuple):
    """What one layer remembers.

    Attributes:
        memory: for linear attention and the delta rule one matrix per head.
        last_key: where keys are shifted.
    """

    memory: Cache | MesaState | Float[Array, "*batch head value key"]
    last_key: Float[Array, "*batch head 1 key"] | None


class DecodingState(NamedTuple):
    """What a model remembers of the tokens that it has read.

    Attributes:
        position: how many there were.
        began: at which of them the current document began.
    """

    position: Int[Array, ""]
    began: Int[Array, "*batch"]
    layers: tuple[LayerState, ...]


class _Documents(NamedTuple):
    """Where documents begin, for what does not reach across them.

    Attributes:
        begins: which tokens are the first of one; None if none of these is.
        starts: for each token the position of the first of its document.
    """

    begins: Bool[Array, "*batch time"] | None
    starts: Int[Array, "*batch time"]

    @property
    def segments(self) -> Int[Array, "*batch 1 time"] | None:
        """Numbers that change where a document begins, for all heads."""
        return None if self.begins is None else self.starts[..., None, :]


def _documents(
    begins: Bool[Array, "*batch time"] | None, time: int, state: DecodingState | None
) -> _Documents | None:
    if state is None:
        if begins is None:
            return None
        position, began = jnp.zeros((), jnp.int32), jnp.zeros(begins.shape[:-1], jnp.int32)
    else:
        position, began = state.position, state.began
    if begins is None:
        return _Documents(None, jnp.broadcast_to(began[..., None], (*began.shape, time)))
    at = position + jnp.arange(time, dtype=jnp.int32)
    first = jnp.where(begins, at, began[..., None])
    return _Documents(begins, jax.lax.cummax(first, first.ndim - 1))


class Biases(eqx.Module):
    """What one `Block` adds to its products."""

    queries: Float[Array, " heads*key"]
    keys: Float[Array, " heads*key"]
    values: Float[Array, " heads*key"]
    output: Float[Array, " model"]
    mlp_in: Float[Array, " hidden"] | None
    mlp_out: Float[Array, " model"] | None

    def __init__(self, block: Block, width: int):
        def zeros(size: int) -> Array:
            return jnp.zeros(size, jnp.float32)

        inner = block.heads * block.key_dim
        self.queries, self.keys, self.values = zeros(inner), zeros(inner), zeros(inner)
        self.output = zeros(width)
        self.mlp_in = None if block.mlp is None else zeros(block.mlp.hidden)
        self.mlp_out = None if block.mlp is None else zeros(width)


class Layer(eqx.Module):
    """The weights of one `Block`."""

    queries: Float[Array, "key_input heads*key"]
    keys: Float[Array, "key_input heads*key"]
    values: Float[Array, "model heads*key"]
    output: Float[Array, "heads*key model"]
    lam: Float[Array, " head"] | None
    forget: Float[Array, "model head"] | None
    forget_bias: Float[Array, " head"] | None
    rate: Float[Array, "model head"] | None
    mlp_in: Float[Array, "model hidden"] | None
    mlp_out: Float[Array, "hidden model"] | None
    mixer_norm: Float[Array, " model"] | None
    mlp_norm: Float[Array, " model"] | None
    biases: Biases | None

    def __init__(self, block: Block, config: ModelConfig, *, first: bool, key: PRNGKeyArray):
        keys = iter(jax.random.split(key, 8))
        width, inner = config.width, block.heads * block.key_dim
        codes = config.positions if first else None
        beside = codes.dim if codes is not None and codes.at == "key_inputs" else 0

        def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
            return scale * config.init_std * jax.random.normal(next(keys), (rows, columns), jnp.float32)

        self.queries, self.keys = matrix(width + beside, inner), matrix(width + beside, inner)
        self.values, self.output = matrix(width, inner), matrix(inner, width, config.residual_init)
        self.lam = self.forget = self.forget_bias = self.rate = self.mlp_in = self.mlp_out = None
        if isinstance(block.mixer, Mesa):
            lam = block.mixer.lam_init
            start = lam if block.mixer.raw else inverse_softplus(lam)
            self.lam = jnp.full((block.heads,), start, jnp.float32)
        if isinstance(block.mixer, Delta):
            self.rate = matrix(width, block.heads)
        if block.forgets:
            # γ starts near 0.99.
            self.forget, self.forget_bias = (
                matrix(width, block.heads),
                jnp.full((block.heads,), -4.6, jnp.float32),
            )
        if block.mlp is not None:
            self.mlp_in = matrix(width, block.mlp.hidden)
            self.mlp_out = matrix(block.mlp.hidden, width, config.residual_init)
        self.mixer_norm = jnp.ones(width, jnp.float32) if config.layer_norm else None
        self.mlp_norm = jnp.ones(width, jnp.float32) if config.layer_norm and block.mlp is not None else None
        self.biases = Biases(block, width) if config.biases else None


class Transformer(eqx.Module):
    """Reads tokens, predicts what comes next after each of them.

    Every leaf is a float array and all else is static, so that plain `jit`, `vmap`, `grad` and optax apply. It computes
    in the dtype of the tokens, whatever that of its weights; for bfloat16, LayerNorms, features, gates and everything
    that is fitted in context stay in float32.
    """

    embed: Float[Array, "token model"] | None
    unembed: Float[Array, "model output"] | None
    layers: tuple[Layer, ...]
    final_norm: Float[Array, " model"] | None
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        """Draw the weights."""
        in_key, out_key, *keys = jax.random.split(key, 2 + len(config.blocks))
        self.config = config
        self.embed = self.unembed = None
        if config.model_dim is not None:
            std, dim = config.init_std, config.model_dim
            self.embed = std * jax.random.normal(in_key, (config.token_dim, dim), jnp.float32)
            self.unembed = std * jax.random.normal(out_key, (dim, config.output_dim), jnp.float32)
        self.layers = tuple(
            Layer(block, config, first=i == 0, key=k)
            for i, (block, k) in enumerate(zip(config.blocks, keys, strict=True))
        )
        self.final_norm = jnp.ones(config.width, jnp.float32) if config.layer_norm else None

    def __call__(
        self,
        tokens: Float[Array, "*batch time token"],
        *,
        begins: Bool[Array, "*batch time"] | None = None,
    ) -> Float[Array, "*batch time output"]:
        """Predictions after every token.

        Args:
            begins: several documents in one sequence: which tokens are the first of one. Nothing that came before it
                has an influence on a document, apart from the positions of its tokens.
        """
        return self._run(tokens, None, Tap({}, record=False), begins)[0]

    def trace(
        self,
        tokens: Float[Array, "*batch time token"],
        *,
        edit: Mapping[str, Edit] | None = None,
        begins: Bool[Array, "*batch time"] | None = None,
    ) -> tuple[Float[Array, "*batch time output"], dict[str, Array]]:
        """Predictions, and every activation under its address.

        Under `jit` nothing is computed for activations that are not read.

        Args:
            edit: functions that replace activations on their way, by address.
            begins: first tokens of documents.
        """
        tap = Tap(edit or {}, record=True)
        predictions, _ = self._run(tokens, None, tap, begins)
        tap.check()
        return predictions, tap.seen

    def init_state(
        self, *batch: int, length: int | None = None, dtype: DTypeLike = jnp.float32
    ) -> DecodingState:
        """The state before the first token, for `decode`.

        Args:
            batch: sizes of the leading axes of the tokens.
            length: how many tokens softmax layers have room for; no other layer needs it.
            dtype: of the tokens. (What is remembered of bfloat16 is float32.)
        """
        layers = []
        for i, block in enumerate(self.config.blocks):
            if isinstance(block.mixer, Softmax) and length is None:
                raise ValueError("length: softmax layers keep every token; say how many there will be.")
            shape = (*batch, block.heads, 1, self._key_dim(i))
            last_key = jnp.zeros(shape, wide(dtype)) if block.shift_keys else None
            layers.append(LayerState(self._nothing_read(i, batch, length or 0, wide(dtype)), last_key))
        return DecodingState(jnp.zeros((), jnp.int32), jnp.zeros(batch, jnp.int32), tuple(layers))

    def _key_dim(self, i: int) -> int:
        """Width of what meets in a layer."""
        block, codes = self.config.blocks[i], self.config.positions
        beside = codes.dim if i == 0 and codes is not None and codes.at == "keys" else 0
        return (block.key_dim + beside) * (2 * block.dpfp or 1)

    def _nothing_read(
        self, i: int, batch: tuple[int, ...], length: int, dtype: jnp.dtype
    ) -> Cache | MesaState | Array:
        """The memory of a layer before the first token."""
        layer, block, key_dim = self.layers[i], self.config.blocks[i], self._key_dim(i)
        heads = (*batch, block.heads)
        if isinstance(block.mixer, Softmax):
            return Cache(
                jnp.zeros((*heads, length, key_dim), dtype),
                jnp.zeros((*heads, length, block.key_dim), dtype),
                jnp.zeros((*heads, length), dtype) if block.forgets else None,
            )
        if isinstance(block.mixer, Mesa):
            lam = jnp.broadcast_to(_lam(layer, block.mixer), (*heads, key_dim))
            memory = mesa_init(lam, block.key_dim, dtype=dtype)
            assert isinstance(memory, MesaState)
            return memory
        return jnp.zeros((*heads, block.key_dim, key_dim), dtype)

    def decode(
        self,
        tokens: Float[Array, "*batch time token"],
        state: DecodingState,
        *,
        begins: Bool[Array, "*batch time"] | None = None,
    ) -> tuple[Float[Array, "*batch time output"], DecodingState]:
        """Read on: predictions after each of these tokens, and the state after the last.

        However a sequence is cut into calls, the predictions are those of `model(tokens)`. Memory does not grow with
        what has been read; softmax layers allocate it all in `init_state`. Tokens for which they have no room are an
        error, but under `jit`, where nobody knows how many have been read: there they are not remembered. Predictions
        after those that came before them are right, and after them not.

        Args:
            begins: first tokens of documents. Without, the current document goes on.

        Raises:
            ValueError: the state has no room for so many.
            TypeError: the state is for tokens of another dtype.
        """
        self._check_state(tokens, state)
        predictions, after = self._run(tokens, state, Tap({}, record=False), begins)
        assert after is not None
        return predictions, after

    @staticmethod
    def _check_state(tokens: Array, state: DecodingState) -> None:
        made_for = jax.tree.leaves(state.layers)[0].dtype
        if wide(tokens.dtype) != made_for:
            raise TypeError(
                f"tokens: of dtype {tokens.dtype}, and the state is for {made_for}: "
                f"expected one of init_state(…, dtype={tokens.dtype})."
            )
        time, read = tokens.shape[-2] if tokens.ndim > 1 else 0, state.position
        known = 0 if isinstance(read, Tracer) else int(read)
        for layer in state.layers:
            room = layer.memory.keys.shape[-2] if isinstance(layer.memory, Cache) else None
            if room is not None and known + time > room:
                raise ValueError(
                    f"tokens: {time} after {known} do not fit into a state that has room for {room}. "
                    "Say how many there will be: init_state(length=…)."
                )

    def _run(
        self, tokens: Array, state: DecodingState | None, tap: Tap, begins: Array | None = None
    ) -> tuple[Array, DecodingState | None]:
        config = self.config
        if tokens.ndim < 2 or tokens.shape[-1] != config.token_dim:
            raise ValueError(f"tokens: expected [..., time, {config.token_dim}], got shape {tokens.shape}.")
        x = tokens if self.embed is None else self._project(tokens, self.embed)
        time, start = tokens.shape[-2], None if state is None else state.position
        codes = None
        if config.positions is not None:
            dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
            codes = positions(time, config.positions.dim, start=start, dtype=dtype)
            if config.positions.at == "tokens":
                x, codes = x + codes, None
        x = tap("embedded", x)
        documents = _documents(begins, time, state)
        after = []
        for i, (layer, block) in enumerate(zip(self.layers, config.blocks, strict=True)):
            path = f"blocks.{i}"
            before = None if state is None else state.layers[i]
            if before is not None and begins is not None:
                before = before._replace(memory=self._forgotten(i, before.memory, begins))
            shown = codes if i == 0 else None
            mixed, memory = self._mix(layer, block, x, shown, before, start, documents, path, tap)
            after.append(memory)
            x = x + tap(f"{path}.mixer.out", mixed)
            if block.mlp is not None:
                x = tap(f"{path}.resid_mid", x)
                x = x + tap(f"{path}.mlp.out", self._mlp(layer, block.mlp, x))
            if config.clip is not None:
                x = jnp.clip(x, -config.clip, config.clip)
            x = tap(f"{path}.resid_post", x)
        x = layer_norm(x, self.final_norm)
        x = x[..., : config.output_dim] if self.unembed is None else self._project(x, self.unembed)
        if state is not None:
            assert documents is not None
            state = DecodingState(state.position + time, documents.starts[..., -1], tuple(after))
        return tap("predictions", x), state

    def _forgotten(self, i: int, memory: Cache | MesaState | Array, begins: Array) -> Any:
        """Nothing, where the next token is the first of a document. (Softmax layers do not look back that far.)"""
        if isinstance(memory, Cache):
            return memory
        dtype = jax.tree.leaves(memory)[0].dtype
        fresh = self._nothing_read(i, begins.shape[:-1], 0, dtype)
        return jax.tree.map(lambda new, old: jnp.where(begins[..., :1, None, None], new, old), fresh, memory)

    def _project(self, x: Array, matrix: Array, bias: Array | None = None) -> Array:
        precision = jax.lax.Precision.DEFAULT if self.config.tf32 else jax.lax.Precision.HIGHEST
        product = matmul(x, matrix, precision, x.dtype)
        return product if bias is None else product + bias.astype(x.dtype)

    def _mlp(self, layer: Layer, mlp: FeedForward, x: Array) -> Array:
        assert layer.mlp_in is not None
        assert layer.mlp_out is not None
        bias_in, bias_out = (
            (None, None) if layer.biases is None else (layer.biases.mlp_in, layer.biases.mlp_out)
        )
        hidden = self._project(layer_norm(x, layer.mlp_norm), layer.mlp_in, bias_in)
        return self._project(ACTIVATIONS[mlp.activation](hidden), layer.mlp_out, bias_out)

    def _mix(
        self, layer: Layer, block: Block, x: Array, codes: Array | None,
        before: LayerState | None, start: Array | None, documents: _Documents | None, path: str, tap: Tap,
    ) -> tuple[Array, LayerState | None]:  # fmt: skip
        config, biases = self.config, layer.biases
        x = layer_norm(x, layer.mixer_norm)
        if config.masked:
            x = jnp.where(jnp.arange(config.width) < config.masked, 0, x)
        beside = None if config.positions is None else config.positions.at
        key_input = x if codes is None or beside != "key_inputs" else beside_codes(x, codes)
        # As few and as wide matrix products as there can be.
        if key_input is x:
            joined = self._project(x, jnp.concatenate([layer.queries, layer.keys, layer.values], 1))
            if before is None and codes is None and biases is None and block.is_plain and not tap.record:
                heads = causal_softmax_joined(
                    joined, block.heads, None if documents is None else documents.starts
                )
                return self._project(heads, layer.output), None
            q, k, v = jnp.split(joined, 3, -1)
        else:
            q, k = jnp.split(self._project(key_input, jnp.concatenate([layer.queries, layer.keys], 1)), 2, -1)
            v = self._project(x, layer.values)
        if biases is not None:
            q, k, v = (
                a + bias.astype(x.dtype)
                for a, bias in ((q, biases.queries), (k, biases.keys), (v, biases.values))
            )
        q, k, v = (split_heads(a, block.heads).astype(wide(x.dtype)) for a in (q, k, v))
        if codes is not None and beside == "keys":
            q, k = beside_codes(q, codes), beside_codes(k, codes)
        if block.dpfp and (block.normalize is None or block.normalize.of == "features"):
            q, k = dpfp(q, block.dpfp), dpfp(k, block.dpfp)
        if block.normalize is not None:
            q = normalized(q, block.normalize.by)
            if block.normalize.values:
                v = normalized(v, block.normalize.by)
            else:
                k = normalized(k, block.normalize.by)
            if block.dpfp and block.normalize.of == "projections":
                q, k = dpfp(q, block.dpfp), dpfp(k, block.dpfp)
        last_key = None
        if block.shift_keys:
            previous = jnp.zeros_like(k[..., :1, :]) if before is None else before.last_key
            assert previous is not None
            last_key, k = k[..., -1:, :], jnp.concatenate([previous, k[..., :-1, :]], -2)
            if documents is not None and documents.begins is not None:
                k = jnp.where(documents.begins[..., None, :, None], 0, k)
        log_decay = rate = None
        if layer.forget is not None and layer.forget_bias is not None:
            gate = self._project(x.astype(wide(x.dtype)), layer.forget)
            log_decay = -jax.nn.softplus(gate + layer.forget_bias.astype(gate.dtype))
            log_decay = tap(f"{path}.mixer.log_decay", jnp.swapaxes(log_decay, -1, -2))
        if layer.rate is not None:
            rate = jax.nn.sigmoid(self._project(x.astype(wide(x.dtype)), layer.rate))
            rate = tap(f"{path}.mixer.rate", jnp.swapaxes(rate, -1, -2))
        q, k, v = (tap(f"{path}.mixer.{n}", a) for n, a in (("queries", q), ("keys", k), ("values", v)))
        memory = None if before is None else before.memory
        if isinstance(block.mixer, Softmax):
            assert memory is None or isinstance(memory, Cache)
            place = f"{path}.mixer.attention"
            if memory is None and log_decay is None and place not in tap.edit:
                # The map beside the output and not on the way to it, so that it costs nothing where it is not read.
                times = jnp.arange(q.shape[-2], dtype=jnp.int32)
                tap.note(place, lambda: _attention(q, k, None, None, times, documents), editable=True)
                starts = None if documents is None else documents.starts[..., None, :]
                queries, keys, values = (a.astype(x.dtype) for a in (q, k, v))
                heads = causal_softmax(queries, keys, values, starts)
            else:
                heads, memory = _softmax(
                    q, k, v, log_decay, memory, start, documents, lambda a: tap(place, a)
                )
        else:
            mixer, segments = block.mixer, None if documents is None else documents.segments

            def attention() -> Array:
                """What each output takes from each value: the outputs for values that are unit vectors."""
                eye = jnp.broadcast_to(jnp.eye(q.shape[-2], dtype=v.dtype), (*v.shape[:-1], q.shape[-2]))
                return _regress(layer, mixer, q, k, eye, log_decay, rate, segments)[0]

            tap.note(f"{path}.mixer.attention", attention)
            heads, memory = _regress(layer, mixer, q, k, v, log_decay, rate, segments, memory)
        heads = tap(f"{path}.mixer.heads", heads)
        after = None if memory is None else LayerState(memory, last_key)
        bias = None if biases is None else biases.output
        return self._project(join_heads(heads).astype(x.dtype), layer.output, bias), after


def _softmax(
    q: Array, k: Array, v: Array, log_decay: Array | None,
    cache: Cache | None, start: Array | None, documents: _Documents | None, tap: Callable[[Array], Array],
) -> tuple[Array, Cache | None]:  # fmt: skip
    """Attention to these tokens, and to those of the cache, which they are added to."""
    times = jnp.arange(q.shape[-2], dtype=jnp.int32)
    running = None if log_decay is None else jnp.cumsum(log_decay, -1)
    if cache is not None:
        assert start is not None
        times = times + start
        if running is not None:
            assert cache.log_decay is not None
            so_far = jnp.where(start > 0, cache.log_decay[..., jnp.maximum(start - 1, 0)], 0)
            running = running + so_far[..., None]

        # Token by token: a slice that does not fit would be moved back, over those that came before.
        keys, values = (
            old.at[..., times, :].set(new, mode="drop", unique_indices=True)
            for old, new in ((cache.keys, k), (cache.values, v))
        )
        sums = cache.log_decay
        if running is not None and sums is not None:
            sums = sums.at[..., times].set(running, mode="drop", unique_indices=True)
        cache = Cache(keys, values, sums)
        k, v = keys, values
    past = running if cache is None else cache.log_decay
    weights = tap(_attention(q, k, running, past, times, documents))
    return jnp.einsum("...ti,...id->...td", weights, v, precision=jax.lax.Precision.HIGHEST), cache


def _attention(
    q: Array, k: Array, running: Array | None, past: Array | None, times: Array, documents: _Documents | None
) -> Float[Array, "*batch head time length"]:
    """How much each of the tokens at these times takes from each token; running and past are $c_t$ and $c_i$."""
    logits = jnp.einsum("...td,...id->...ti", q, k, precision=jax.lax.Precision.HIGHEST)
    logits = logits / math.sqrt(q.shape[-1])
    if running is not None and past is not None:
        logits = logits + running[..., :, None] - past[..., None, :]
    index = jnp.arange(k.shape[-2], dtype=jnp.int32)
    visible = index <= times[:, None]
    if documents is not None:
        visible = visible & (index >= documents.starts[..., None, :, None])
    return jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), -1)


def _regress(
    layer: Layer, mixer: Linear | Mesa | Delta, q: Array, k: Array, v: Array,
    log_decay: Array | None, rate: Array | None, segments: Array | None,
    memory: Cache | MesaState | Array | None = None,
) -> tuple[Array, MesaState | Array | None]:  # fmt: skip
    """Attention through a matrix fitted to the pairs so far."""
    if isinstance(mixer, Mesa):
        attend = partial(
            mesa_attention,
            q, k, v, _lam(layer, mixer), log_decay=log_decay, segment_ids=segments, method=mixer.method,
        )  # fmt: skip
        if memory is None:
            return attend(), None
        assert isinstance(memory, MesaState)
        if q.shape[-2] > 1:
            out, after = attend(state=memory, return_state=True)
        else:
            log_decay = None if log_decay is None else log_decay[..., 0]
            after, out = mesa_step(memory, q[..., 0, :], k[..., 0, :], v[..., 0, :], log_decay=log_decay)
            out = out[..., None, :]
        assert isinstance(after, MesaState)
        return out, after
    assert memory is None or isinstance(memory, Array)
    if isinstance(mixer, Linear):
        out, after = linear_attention(
            q, k, v, log_decay=log_decay, segment_ids=segments, state=memory, return_state=True
        )
    else:
        assert rate is not None
        out, after = delta_attention(
            q, k, v, rate, log_decay=log_decay, segment_ids=segments, state=memory, return_state=True
        )
    return out, None if memory is None else after


def _lam(layer: Layer, mixer: Mesa) -> Float[Array, "head 1"]:
    assert layer.lam is not None
    return (jnp.maximum(layer.lam, 1e-6) if mixer.raw else positive_lam(layer.lam))[:, None]
