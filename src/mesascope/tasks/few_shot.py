r"""Regression shown to a model in its context: $[x_1, y_1, x_2, y_2, \dots]$ with $y_i = W^* x_i$.

Pairs may be followed by an EOS token, prompts may begin with a learned prefix, and a second task may follow the
first. Where each token comes from and what is predicted there is data: see `Layout`.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from mesascope.tasks.dynamics import Distribution, Normal, Uniform, by_variant, haar, matvec


class Layout(NamedTuple):
    """For every position of a prompt, which token stands there.

    Attributes:
        part: what it is: `X`, `Y`, `EOS` or `PREFIX`.
        number: which pair of its task, or which vector of the prefix.
        task: 0, or 1 from where the second task begins.
    """

    part: Int[np.ndarray, " time"]
    number: Int[np.ndarray, " time"]
    task: Int[np.ndarray, " time"]

    @property
    def predicts(self) -> Bool[np.ndarray, " time"]:
        """A model that has read $x_i$ is asked for $y_i$."""
        return self.part == X


X, Y, EOS, PREFIX = range(4)


class Regression(NamedTuple):
    """Pairs of every task of every sequence, and the matrix behind them."""

    inputs: Float[Array, "batch task pair obs"]
    labels: Float[Array, "batch task pair obs"]
    transition: Float[Array, "batch task obs obs"]


class Prompt(NamedTuple):
    """Tokens, and at the positions that predict the labels to be predicted (elsewhere zeros)."""

    tokens: Float[Array, "batch time obs"]
    targets: Float[Array, "batch time obs"]
    predicts: Bool[Array, " time"]


@dataclass(frozen=True, kw_only=True)
class FewShot:
    """A distribution over regression prompts.

    Attributes:
        length: tokens in all.
        eos: an EOS token after every pair.
        prefix: how many learned vectors come first; again before the second task.
        switch: where the second task begins; None for one task.
        inputs: distribution of $x_i$.
        noise: standard deviation added to labels.
        noise_shared: the same noise for every sequence of a batch (released code).
    """

    dim: int = 10
    length: int = 224
    eos: bool = False
    prefix: int = 0
    switch: int | None = None
    inputs: Distribution = field(default_factory=Normal)
    noise: float = 0.0
    noise_shared: bool = False

    def __post_init__(self):
        if self.dim < 1 or self.prefix < 0:
            raise ValueError(f"dim and prefix: expected at least 1 and 0, got {self.dim} and {self.prefix}.")
        names = ("length",) if self.switch is None else ("switch", "length")
        for name, tokens in zip(names, self._shares, strict=True):
            if tokens <= self.prefix:
                raise ValueError(
                    f"{name}: leaves {tokens} tokens to a task, and {self.prefix} of them to the prefix."
                )

    @classmethod
    def preset(cls, variant: Literal["as_run", "as_written"] = "as_run", **changes) -> Self:
        """The paper's prompts: as its text has them, or as the released code drew them."""
        as_run = dict(inputs=Uniform(bound=1.0), noise=0.01, noise_shared=True)
        return cls(**by_variant(variant, as_run, {}) | changes)

    @property
    def _shares(self) -> tuple[int, ...]:
        """Tokens of each task."""
        return (self.length,) if self.switch is None else (self.switch, self.length - self.switch)

    @cached_property
    def layout(self) -> Layout:
        """Which token stands where; the last pair may be cut off."""
        cycle = [X, Y, EOS] if self.eos else [X, Y]
        tasks = []
        for task, share in enumerate(self._shares):
            position = np.arange(share - self.prefix)
            part = np.concatenate([np.full(self.prefix, PREFIX), np.array(cycle)[position % len(cycle)]])
            number = np.concatenate([np.arange(self.prefix), position // len(cycle)])
            tasks.append((part, number, np.full(share, task)))
        return Layout(*(np.concatenate(column) for column in zip(*tasks, strict=True)))

    @property
    def pairs(self) -> int:
        """Pairs that the longer task shows, the last one perhaps without its label."""
        return int(self.layout.number[self.layout.predicts].max()) + 1

    def sample(self, key: PRNGKeyArray, batch_size: int) -> Regression:
        """Independent tasks. The same key gives the same bytes."""
        tasks = [
            self._task(jax.random.fold_in(key, i) if i else key, batch_size) for i in range(len(self._shares))
        ]
        return Regression(*(jnp.stack(column, 1) for column in zip(*tasks, strict=True)))

    def _task(self, key: PRNGKeyArray, batch_size: int) -> tuple[Array, Array, Array]:
        w_key, x_key = jax.random.split(key)
        w = haar(w_key, self.dim, batch_size)
        x = self.inputs((batch_size, self.pairs, self.dim), key=x_key)
        noise = jax.random.normal(key, x.shape[1:] if self.noise_shared else x.shape, jnp.float32)
        return x, matvec(w[:, None], x) + self.noise * noise, w

    def prompt(
        self,
        regression: Regression,
        *,
        eos: Float[Array, " obs"] | None = None,
        prefix: Float[Array, "prefix obs"] | None = None,
    ) -> Prompt:
        """The tokens a model reads.

        Args:
            eos: the vector that stands for EOS, if the prompt has any.
            prefix: the learned vectors, if it has any.
        """
        dim = self.dim
        for name, given, wanted in (("eos", eos, (dim,)), ("prefix", prefix, (self.prefix, dim))):
            needed = self.eos if name == "eos" else self.prefix > 0
            shape = None if given is None else jnp.shape(given)
            if shape != (wanted if needed else None):
                expected = f"an array of shape {wanted}" if needed else "nothing: this prompt has none"
                raise ValueError(f"{name}: expected {expected}, got {shape or 'nothing'}.")
        part, number, task = self.layout
        pair = np.where(part == PREFIX, 0, number)
        x, y = (a[:, task, pair] for a in regression[:2])
        tokens = jnp.where((part == Y)[:, None], y, x)
        if eos is not None:
            tokens = jnp.where((part == EOS)[:, None], eos, tokens)
        if prefix is not None:
            tokens = jnp.where((part == PREFIX)[:, None], prefix[np.where(part == PREFIX, number, 0)], tokens)
        predicts = self.layout.predicts
        return Prompt(tokens, jnp.where(predicts[:, None], y, 0), jnp.asarray(predicts))
