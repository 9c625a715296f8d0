"""How a model is shown a sequence of observations: tokens, targets, and which positions predict.

All of them read observations $s_1 \\dots s_{T+1}$ and give T tokens whose targets are $s_2 \\dots s_{T+1}$.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Examples(NamedTuple):
    """What a model reads and what it is held to.

    Attributes:
        predicts: positions whose prediction counts.
    """

    tokens: Float[Array, "batch time token"]
    targets: Float[Array, "batch time obs"]
    predicts: Bool[Array, " time"]


class Passages(NamedTuple):
    """The same where tokens are numbers of a vocabulary. Arrays are of numpy where they come from files.

    Attributes:
        predicts: positions whose prediction counts.
        segments: which document each token is of, counted from 0 in every sequence: what does not reach across
            documents is reset where this changes.
    """

    tokens: Int[Array | np.ndarray, "batch time"]
    targets: Int[Array | np.ndarray, "batch time"]
    predicts: Bool[Array | np.ndarray, "batch time"]
    segments: Int[Array | np.ndarray, "batch time"]


@dataclass(frozen=True)
class Standard:
    """$e_t = s_t$."""

    def width(self, obs_dim: int) -> int:
        return obs_dim

    def __call__(self, observations: Float[Array, "batch time+1 obs"]) -> Examples:
        return _examples(observations[:, :-1], observations)


@dataclass(frozen=True, kw_only=True)
class Constructed:
    """$e_t = [0, s_t, s_{t-1}]$ with $s_0 = 0$, or with four slots $[0, s_t, s_t, s_{t-1}]$ (released code).

    The first slot is where a prediction is built up.
    """

    slots: int = 4

    def __post_init__(self):
        if self.slots not in (3, 4):
            raise ValueError(f"slots: expected 3 or 4, got {self.slots}.")

    def width(self, obs_dim: int) -> int:
        return self.slots * obs_dim

    def __call__(self, observations: Float[Array, "batch time+1 obs"]) -> Examples:
        now = observations[:, :-1]
        now_twice = (now,) * (self.slots - 2)
        return _examples(
            jnp.concatenate([jnp.zeros_like(now), *now_twice, delayed(now, 1)], -1), observations
        )


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """$z_t^k = [s_t, s_{t-1}, \\dots, s_{t-k+1}]$, zeros before the first."""

    k: int

    def __post_init__(self):
        if self.k < 1:
            raise ValueError(f"k: expected at least 1, got {self.k}.")

    def width(self, obs_dim: int) -> int:
        return self.k * obs_dim

    def __call__(self, observations: Float[Array, "batch time+1 obs"]) -> Examples:
        now = observations[:, :-1]
        return _examples(jnp.concatenate([delayed(now, i) for i in range(self.k)], -1), observations)


Tokens = Standard | Constructed | Stacked


def delayed(sequence: Float[Array, "*batch time width"], steps: int) -> Float[Array, "*batch time width"]:
    """The sequence `steps` earlier, zeros before its beginning."""
    steps = min(steps, sequence.shape[-2])
    pad = [(0, 0)] * (sequence.ndim - 2) + [(steps, 0), (0, 0)]
    return jnp.pad(sequence, pad)[..., : sequence.shape[-2], :]


def _examples(tokens: Array, observations: Array) -> Examples:
    return Examples(tokens, observations[:, 1:], jnp.ones(tokens.shape[1], bool))
