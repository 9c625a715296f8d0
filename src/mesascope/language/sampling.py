"""Text from a model, token by token, in memory that does not grow (softmax layers take all of theirs at once)."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from mesascope.language.model import LanguageModel
from mesascope.models import DecodingState

CHUNK = 16


def generate(
    model: LanguageModel,
    prompt: Int[np.ndarray, " prompt"],
    *,
    count: int,
    temperature: float = 1.0,
    key: PRNGKeyArray,
) -> Iterator[Int[np.ndarray, " chunk"]]:
    """What comes after a prompt, in pieces, `count` tokens in all.

    Args:
        prompt: at least one token.
        temperature: logits are divided by it; 0 takes the likeliest token.
    """
    if len(prompt) < 1:
        raise ValueError("prompt: expected at least one token, such as the one that begins a document.")
    if temperature < 0:
        raise ValueError(f"temperature: expected at least 0, got {temperature}.")

    def choose(logits: Array, at: Array) -> Array:
        if temperature == 0:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        drawn = jax.random.categorical(jax.random.fold_in(key, at), logits / temperature)
        return drawn.astype(jnp.int32)

    @jax.jit
    def read(model: LanguageModel, tokens: Array, state: DecodingState) -> tuple[Array, DecodingState]:
        logits, state = model.decode(tokens, state)
        return choose(logits[-1], state.position), state

    @jax.jit
    def go_on(model: LanguageModel, token: Array, state: DecodingState):
        def step(carry, _):
            token, state = carry
            logits, state = model.decode(token[None], state)
            return (choose(logits[-1], state.position), state), token

        return jax.lax.scan(step, (token, state), length=CHUNK)

    pieces = -(-count // CHUNK)
    state = model.init_state(length=len(prompt) + pieces * CHUNK)
    token, state = read(model, jnp.asarray(prompt, jnp.int32), state)
    for piece in range(pieces):
        (token, state), written = go_on(model, token, state)
        yield np.asarray(written)[: count - piece * CHUNK]
