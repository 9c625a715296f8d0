r"""Multi-query associative recall: $[k_1, v_1, \dots, k_n, v_n]$, and later every key once more.

Whoever reads $k_i$ again is asked for $v_i$. The benchmark of Arora et al., "Zoology: Measuring and Improving Recall in
Efficient Language Models" (2023): a model has to hold n pairs in its state, so that the number of pairs it masters
measures how much that state can hold.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from mesascope.tasks.tokens import Passages


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall:
    r"""A distribution over sequences of pairs and queries.

    Token 0 is blank, tokens 1 to V/2 - 1 are keys, the others are values; in a sequence every key and every value is
    drawn once. After the 2n tokens of the pairs, every second position can hold a query. That of pair i stands at
    $2n + 2g_i$, where the gaps are drawn one after the other without replacement from

    $$p(g) \propto (g + 1)^{a - 1}, \qquad g = 0, \dots, \lfloor T/2\rfloor - n - 1.$$

    Attributes:
        vocabulary: V.
        pairs: n.
        length: T, tokens in all.
        power: a. Close to 0 most queries come soon after the pairs, as in text; 1 places them uniformly.
        filler: what stands where nothing is asked: any token at random, or blanks.
    """

    vocabulary: int = 8192
    pairs: int = 8
    length: int = 64
    power: float = 0.01
    filler: Literal["random", "blank"] = "random"

    def __post_init__(self):
        if self.pairs < 1 or 4 * self.pairs > self.length:
            raise ValueError(
                f"pairs: expected 1 to {self.length // 4}, for a pair and its query take four of the "
                f"{self.length} tokens; got {self.pairs}."
            )
        if self.vocabulary // 2 <= self.pairs:
            raise ValueError(
                f"vocabulary: expected at least {2 * self.pairs + 2}, for half of it are keys (and the blank); "
                f"got {self.vocabulary}."
            )
        if self.filler not in ("random", "blank"):
            raise ValueError(f"filler: expected 'random' or 'blank', got {self.filler!r}.")

    def sample(self, key: PRNGKeyArray, batch_size: int) -> Passages:
        """Independent sequences. The same key gives the same bytes."""
        sequences = jax.vmap(self._sequence)(jax.random.split(key, batch_size))
        return Passages(*sequences, jnp.zeros((batch_size, self.length), jnp.int32))

    def _sequence(self, key: PRNGKeyArray) -> tuple[Array, Array, Array]:
        keys_key, values_key, gaps_key, filler_key = jax.random.split(key, 4)
        n, half = self.pairs, self.vocabulary // 2
        keys = 1 + _without_replacement(np.zeros(half - 1), n, key=keys_key)
        values = half + _without_replacement(np.zeros(self.vocabulary - half), n, key=values_key)
        places = self.length // 2 - n
        log_p = (self.power - 1) * np.log(np.arange(1, places + 1))
        asked_at = 2 * n + 2 * _without_replacement(log_p, n, key=gaps_key)

        if self.filler == "random":
            tokens = jax.random.randint(filler_key, (self.length,), 0, self.vocabulary, jnp.int32)
        else:
            tokens = jnp.zeros(self.length, jnp.int32)
        tokens = tokens.at[: 2 * n].set(jnp.stack([keys, values], 1).ravel()).at[asked_at].set(keys)
        targets = jnp.zeros(self.length, jnp.int32).at[asked_at].set(values)
        return tokens, targets, jnp.zeros(self.length, bool).at[asked_at].set(True)


def _without_replacement(log_p: np.ndarray, count: int, *, key: PRNGKeyArray) -> Int[Array, " count"]:
    """Draw one number after the other, each with probabilities proportional to those of the numbers left.

    The largest entries of log p + Gumbel noise, in their order, are distributed just so.
    """
    noise = jax.random.gumbel(key, log_p.shape, jnp.float32)
    return jax.lax.top_k(jnp.asarray(log_p, jnp.float32) + noise, count)[1].astype(jnp.int32)
