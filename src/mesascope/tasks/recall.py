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
        keys_key, values_key, gaps_key, filler_key = jax.random.split(key, 4)
        n, half, shape = self.pairs, self.vocabulary // 2, (batch_size, self.length)
        keys = 1 + _without_replacement(np.zeros(half - 1), n, batch_size, key=keys_key)
        values = half + _without_replacement(np.zeros(self.vocabulary - half), n, batch_size, key=values_key)
        log_p = (self.power - 1) * np.log(np.arange(1, self.length // 2 - n + 1))
        gaps = _without_replacement(log_p, n, batch_size, key=gaps_key)

        blank = jnp.zeros(shape, jnp.int32)
        if self.filler == "random":
            tokens = jax.random.randint(filler_key, shape, 0, self.vocabulary, jnp.int32)
        else:
            tokens = blank
        queries = np.arange(batch_size)[:, None], 2 * n + 2 * gaps
        pairs = jnp.stack([keys, values], 2).reshape(batch_size, 2 * n)
        tokens = tokens.at[:, : 2 * n].set(pairs).at[queries].set(keys)
        return Passages(
            tokens=tokens,
            targets=blank.at[queries].set(values),
            predicts=jnp.zeros(shape, bool).at[queries].set(True),
            segments=blank,
        )


def _without_replacement(
    log_p: np.ndarray, count: int, batch_size: int, *, key: PRNGKeyArray
) -> Int[Array, "batch count"]:
    """Draw one number after the other, each with probabilities proportional to those of the numbers left.

    The largest entries of log p + Gumbel noise, in their order, are distributed just so.
    """
    noise = jax.random.gumbel(key, (batch_size, len(log_p)), jnp.float32)
    return jax.lax.top_k(jnp.asarray(log_p, jnp.float32) + noise, count)[1].astype(jnp.int32)
