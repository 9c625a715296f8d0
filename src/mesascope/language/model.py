r"""A Transformer between a vocabulary's vectors and its logits.

$$x_t = \sqrt d\, E_{w_t} + p_t, \qquad \mathrm{logits}_t = U\, \mathrm{LayerNorm}(\mathrm{blocks}(x)_t)$$

The blocks are those of `models.Transformer`, and so are addresses of activations, edits and decoding.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from mesascope.models import Block, DecodingState, Edit, ModelConfig, Transformer
from mesascope.ops.gradients import with_closed_form
from mesascope.ops.log_sum import log_sum_and_entry
from mesascope.parts import matmul, positions
from mesascope.store import check_numbers

ALIGNED = 128
"""Sizes of products in bfloat16 are filled up to multiples of this."""


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """What a language model is made of.

    Vectors of tokens are multiplied by the square root of their width before sinusoidal codes of positions are added,
    as where these codes come from: drawn with a small `init_std` they would be lost beside them.

    Attributes:
        vocabulary: how many tokens there are.
        width: of their vectors and of the residual stream.
        dropout: part of the entries of $x$ that is zero in training (the others grow accordingly).
        resets_at: a token that begins a document: nothing but its position comes with it from before. None: everything
            reaches everywhere.
        compute: dtype of the residual stream and of matrix products. Parameters, LayerNorms, logits and whatever is
            fitted in context are float32.
        init_std: of all weight matrices at the start.
        residual_init: so many times as large for those whose products are added to the stream.
    """

    vocabulary: int
    width: int
    blocks: tuple[Block, ...]
    dropout: float = 0.1
    resets_at: int | None = None
    compute: Literal["float32", "bfloat16"] = "float32"
    init_std: float = 0.02
    residual_init: float = 1.0

    def __post_init__(self):
        if self.vocabulary < 2:
            raise ValueError(f"vocabulary: expected at least 2 tokens, got {self.vocabulary}.")
        check_numbers(self, width=1, init_std=0, residual_init=0)
        if self.compute not in ("float32", "bfloat16"):
            raise ValueError(f"compute: expected 'float32' or 'bfloat16', got {self.compute!r}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected a part of 1, less than 1, got {self.dropout}.")
        if self.resets_at is not None and not 0 <= self.resets_at < self.vocabulary:
            raise ValueError(
                f"resets_at: expected one of the {self.vocabulary} tokens or None, got {self.resets_at}."
            )
        if not self.blocks:
            raise ValueError("blocks: expected at least one.")

    @property
    def body(self) -> ModelConfig:
        """What is between vectors and logits."""
        return ModelConfig(
            token_dim=self.width,
            output_dim=self.width,
            blocks=self.blocks,
            layer_norm=True,
            init_std=self.init_std,
            biases=True,
            residual_init=self.residual_init,
        )


class LanguageModel(eqx.Module):
    """Reads tokens, predicts the next one after each of them. Every leaf is a float32 array, as of a `Transformer`."""

    embed: Float[Array, "vocabulary model"]
    body: Transformer
    unembed: Float[Array, "model vocabulary"]
    config: LanguageModelConfig = eqx.field(static=True)

    def __init__(self, config: LanguageModelConfig, *, key: PRNGKeyArray):
        """Draw the weights."""
        in_key, out_key, body_key = jax.random.split(key, 3)
        shape, std = (config.vocabulary, config.width), config.init_std
        self.embed = std * jax.random.normal(in_key, shape, jnp.float32)
        self.unembed = std * jax.random.normal(out_key, shape[::-1], jnp.float32)
        self.body = Transformer(config.body, key=body_key)
        self.config = config

    def __call__(
        self, tokens: Int[Array, "*batch time"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "*batch time vocabulary"]:
        """Logits of the next token after every token.

        Args:
            key: for dropout, one for each sequence (`[*batch]`); None: nothing is dropped.
        """
        return self._logits(self.body(self._embedded(tokens, key=key), begins=self._begins(tokens)))

    def losses(
        self,
        tokens: Int[Array, "*batch time"],
        targets: Int[Array, "*batch asked"],
        *,
        at: Int[Array, "*batch asked"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*batch asked"]:
        """`cross_entropy` of the logits at some tokens, or at all: for training, where logits are too many to be
        written down more often than they have to be.

        Args:
            at: which tokens, by their places; None: all.
            key: for dropout, as above.
        """
        x = self.body(self._embedded(tokens, key=key), begins=self._begins(tokens))
        if at is not None:
            x = jnp.take_along_axis(x, at[..., None], -2)
        return cross_entropy(self._logits(x, aligned=True), targets, self.config.vocabulary)

    def trace(
        self, tokens: Int[Array, "*batch time"], *, edit: Mapping[str, Edit] | None = None
    ) -> tuple[Float[Array, "*batch time vocabulary"], dict[str, Array]]:
        """Logits, and every activation under its address, as in `Transformer.trace`."""
        x, seen = self.body.trace(self._embedded(tokens), edit=edit, begins=self._begins(tokens))
        return self._logits(x), seen

    def init_state(self, *batch: int, length: int | None = None) -> DecodingState:
        """The state before the first token, for `decode`; `length` tokens are what softmax layers have room for."""
        return self.body.init_state(*batch, length=length)

    def decode(
        self, tokens: Int[Array, "*batch time"], state: DecodingState
    ) -> tuple[Float[Array, "*batch time vocabulary"], DecodingState]:
        """Read on: logits after each of these tokens, and the state after the last; see `Transformer.decode`."""
        x = self._embedded(tokens, start=state.position)
        x, state = self.body.decode(x, state, begins=self._begins(tokens))
        return self._logits(x), state

    def _begins(self, tokens: Array) -> Bool[Array, "*batch time"] | None:
        return None if self.config.resets_at is None else tokens == self.config.resets_at

    def _embedded(self, tokens: Array, *, start: Array | None = None, key: Array | None = None) -> Array:
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens: expected integers [..., time], got dtype {tokens.dtype}.")
        width, drop = self.config.width, self.config.dropout
        x = math.sqrt(width) * self.embed[tokens] + positions(tokens.shape[-1], width, start=start)
        if key is not None and drop > 0:
            # A mask of its own for each sequence, so that it does not matter how a batch is divided.
            one = lambda key: jax.random.bernoulli(key, 1 - drop, x.shape[-2:])  # noqa: E731
            kept = jax.vmap(one)(key.reshape(-1)).reshape(x.shape)
            x = jnp.where(kept, x / (1 - drop), 0)
        return x.astype(self.config.compute)

    def _logits(self, x: Array, *, aligned: bool = False) -> Array:
        half, matrix = x.dtype == jnp.bfloat16, self.unembed
        if aligned and half:
            # Fast kernels want sizes like this; logits of tokens that there are not do not count.
            more = [-size % ALIGNED for size in matrix.shape]
            matrix = jnp.pad(matrix, [(0, n) for n in more])
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more[0])])
        precision = jax.lax.Precision.DEFAULT if half else jax.lax.Precision.HIGHEST
        return matmul(x, matrix, precision, jnp.dtype(jnp.float32))


def cross_entropy(
    logits: Float[Array, "*batch time padded"],
    targets: Int[Array, "*batch time"],
    vocabulary: int | None = None,
) -> Float[Array, "*batch time"]:
    """$-\\log p(\\mathrm{target})$ of each prediction, in nats.

    Args:
        vocabulary: how many of the logits count, the first ones; None: all.
    """
    return _cross_entropy(logits, targets, logits.shape[-1] if vocabulary is None else vocabulary)


def _entropy_forward(logits: Array, targets: Array, vocabulary: int) -> tuple[Array, tuple[Array, ...]]:
    # Only the logits as they are get written down.
    total, chosen = log_sum_and_entry(logits, targets, vocabulary)
    return total - chosen, (logits, targets, total)


def _entropy_backward(vocabulary: int, saved: tuple[Array, ...], bar: Array) -> tuple[Array, None]:
    logits, targets, total = saved
    token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    p = jnp.where(token < vocabulary, jnp.exp(logits - total[..., None]), 0)
    right = (token == targets.astype(jnp.int32)[..., None]).astype(p.dtype)
    return bar[..., None] * (p - right), None


_cross_entropy = with_closed_form(
    lambda logits, targets, vocabulary: _entropy_forward(logits, targets, vocabulary)[0],
    _entropy_forward,
    _entropy_backward,
    static=(2,),
)
