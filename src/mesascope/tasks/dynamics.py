r"""Sequences from dynamical systems whose parameters are drawn anew for every sequence.

$$h_{t+1} = W^* f^*(h_t) + \epsilon_{h,t}, \qquad s_t = C^* h_t + \epsilon_{s,t}$$

The task is to predict $s_{t+1}$ from $s_1 \dots s_t$. Each family of tasks has the presets `as_written` (the paper's
text) and `as_run` (the authors' released code); every difference between them is a field. Keys are split in the order
of the released code: with `jax.threefry_partitionable(False)` and `as_run`, fully observed linear sequences are the
authors' own, seed for seed. Everything is float32, whatever the default; contracting systems, which make much of
its last digit, are rounded to it once (`steady.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from mesascope.store import check_numbers, later
from mesascope.tasks import steady


class Trajectories(NamedTuple):
    """Observations, one more than the task's length so that each has a successor, and what they came from."""

    observations: Float[Array, "batch time+1 obs"]
    states: Float[Array, "batch time+1 state"]
    transition: Float[Array, "batch state state"]
    readout: Float[Array, "batch obs state"] | None
    """$C^*$; None where states are observed."""
    features: Float[Array, "batch time+1 state"]
    """$f^*(h_t)$: the states themselves for linear systems."""


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Entries uniform in [-bound, bound]."""

    bound: float = 1.0

    def __post_init__(self):
        check_numbers(self, bound=0)

    def __call__(self, shape: tuple[int, ...], *, key: PRNGKeyArray, steadily: bool = False) -> Array:
        if steadily:
            return steady.uniform(shape, -self.bound, self.bound, key=key)
        return jax.random.uniform(key, shape, jnp.float32, minval=-self.bound, maxval=self.bound)


@dataclass(frozen=True, kw_only=True)
class Normal:
    """Entries normal with this standard deviation."""

    std: float = 1.0

    def __post_init__(self):
        check_numbers(self, std=0)

    def __call__(self, shape: tuple[int, ...], *, key: PRNGKeyArray, steadily: bool = False) -> Array:
        return self.std * _normal(key, shape, steadily)


Distribution = Uniform | Normal


def _normal(key: PRNGKeyArray, shape: tuple[int, ...], steadily: bool) -> Array:
    return steady.normal(shape, key=key) if steadily else jax.random.normal(key, shape, jnp.float32)


@dataclass(frozen=True)
class Orthogonal:
    """$W^*$ Haar-distributed over the orthogonal matrices, one per sequence."""

    def __call__(
        self, batch_size: int, dim: int, *, key: PRNGKeyArray, spectrum_key: PRNGKeyArray
    ) -> Float[Array, "batch state state"]:
        return haar(key, dim, batch_size)


@dataclass(frozen=True, kw_only=True)
class FixedOrthogonal:
    """One and the same orthogonal $W^*$ for all sequences, in training and evaluation.

    Attributes:
        seed: of the matrix. (Drawn with `jax.threefry_partitionable(False)`, whatever the setting.)
    """

    seed: int = 42

    def __call__(
        self, batch_size: int, dim: int, *, key: PRNGKeyArray, spectrum_key: PRNGKeyArray
    ) -> Float[Array, "batch state state"]:
        return jnp.broadcast_to(_fixed(jax.random.orthogonal, self.seed, dim), (batch_size, dim, dim))


@dataclass(frozen=True, kw_only=True)
class Contracting:
    r"""$W^* = M\,\mathrm{diag}(e)\,M^{-1}$, M standard normal and the eigenvalues e uniform in [low, high].

    M is far from orthogonal, so states can grow a great deal before they contract.

    Attributes:
        pin_largest: one eigenvalue, at a random place, is exactly `high` (released code).
    """

    low: float = 0.3
    high: float = 0.9
    pin_largest: bool = False

    def __post_init__(self):
        check_numbers(self, high=self.low)

    def __call__(
        self, batch_size: int, dim: int, *, key: PRNGKeyArray, spectrum_key: PRNGKeyArray
    ) -> Float[Array, "batch state state"]:
        basis = steady.normal((batch_size, dim, dim), key=key)
        eigenvalues = jax.vmap(lambda k: self._eigenvalues(dim, key=k))(
            jax.random.split(spectrum_key, batch_size)
        )
        return steady.similar(basis, eigenvalues)

    def _eigenvalues(self, dim: int, *, key: PRNGKeyArray) -> Float[Array, " state"]:
        draw_key, shuffle_key = jax.random.split(key)
        if not self.pin_largest:
            return steady.uniform((dim,), self.low, self.high, key=draw_key)
        drawn = steady.uniform((dim - 1,), self.low, self.high, key=draw_key)
        pinned = jnp.concatenate([drawn, jnp.full((1,), self.high, drawn.dtype)])
        return jax.random.permutation(shuffle_key, pinned)


Transition = Orthogonal | FixedOrthogonal | Contracting


@dataclass(frozen=True, kw_only=True)
class MLP:
    r"""$f^*(h) = B\,\mathrm{GELU}(A h)$, with A and B drawn once, shared by all sequences.

    Attributes:
        std: of the entries of A and B. The paper writes $\mathcal N(0, 1.1)$; the released code has 1.1 as the
            standard deviation.
        gelu: the Gaussian cumulative distribution itself, or its tanh approximation.
        unit_norm: divide $f^*(h)$ by its Euclidean norm. The paper's text does not say so, but without it states
            overflow float32 within fifty steps, so both presets have it.
        seeds: of A and B. (Drawn with `jax.threefry_partitionable(False)`, whatever the setting.)
    """

    hidden: int = 40
    std: float = 1.1**0.5
    gelu: Literal["exact", "tanh"] = "exact"
    unit_norm: bool = True
    seeds: tuple[int, int] = (421, 422)

    def __post_init__(self):
        check_numbers(self, hidden=1, std=0)

    def __call__(self, states: Float[Array, "*batch state"]) -> Float[Array, "*batch state"]:
        a, b = self.weights(states.shape[-1])
        hidden = jnp.matmul(states, a, precision=jax.lax.Precision.HIGHEST)
        hidden = jax.nn.gelu(hidden, approximate=self.gelu == "tanh")
        out = jnp.matmul(hidden, b, precision=jax.lax.Precision.HIGHEST)
        return out / jnp.linalg.norm(out, axis=-1, keepdims=True) if self.unit_norm else out

    def weights(self, dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Aᵀ, [state, hidden], and Bᵀ, [hidden, state]."""
        a = _fixed(jax.random.normal, self.seeds[0], (dim, self.hidden))
        b = _fixed(jax.random.normal, self.seeds[1], (self.hidden, dim))
        return np.float32(self.std) * a, np.float32(self.std) * b


@cache
def _fixed(draw: Callable[..., Array], seed: int, shape: int | tuple[int, ...]) -> np.ndarray:
    """A draw that is the same for everybody, whatever the settings and however this is being traced."""
    with jax.ensure_compile_time_eval(), jax.threefry_partitionable(False):
        return np.asarray(draw(jax.random.PRNGKey(seed), shape, dtype=jnp.float32))


@dataclass(frozen=True, kw_only=True)
class Readout:
    """$C^*$ with independent normal entries, one per sequence.

    Attributes:
        std: the paper writes $\\mathcal N(0, 0.5)$; the released code has 0.5 as the standard deviation.
    """

    obs_dim: int = 5
    std: float = 0.5**0.5

    def __post_init__(self):
        check_numbers(self, obs_dim=1, std=0)


@dataclass(frozen=True, kw_only=True)
class Dynamics:
    """A distribution over sequences from dynamical systems; see the module's equation.

    Attributes:
        length: T, tokens that a model reads. T+1 are drawn: the last is only a target.
        readout: None observes the state itself.
        nonlinearity: None is a linear system.
        state_noise: standard deviation of $\\epsilon_h$. (The paper's text gives no value, so both presets have
            the released code's; likewise `observation_noise`.)
        clip: states are clipped to [-clip, clip], entry by entry.
        clip_feeds_back: the clipped state is what the system goes on from; otherwise only the result is clipped.
        clip_only_above: only sequences with an entry beyond this are clipped; None: all of them.
    """

    state_dim: int = 10
    length: int = 50
    transition: Transition = field(default_factory=Orthogonal)
    readout: Readout | None = None
    nonlinearity: MLP | None = None
    initial: Distribution = field(default_factory=Normal)
    state_noise: float = 0.01
    observation_noise: float = 0.0
    clip: float | None = None
    clip_feeds_back: bool = True
    clip_only_above: float | None = later(None)

    def __post_init__(self):
        positive = ("clip", "clip_only_above")
        check_numbers(self, positive=positive, state_dim=1, length=1, state_noise=0, observation_noise=0)
        if self.nonlinearity is not None and self.readout is not None:
            raise ValueError("readout: nonlinear systems are fully observed; leave it None.")
        if self.clip_only_above is not None and (self.clip is None or self.clip_feeds_back):
            raise ValueError(
                "clip_only_above: which sequences these are is known when they are drawn: "
                "give clip, and clip_feeds_back=False; or leave it None."
            )

    @property
    def obs_dim(self) -> int:
        return self.state_dim if self.readout is None else self.readout.obs_dim

    def sample(self, key: PRNGKeyArray, batch_size: int) -> Trajectories:
        """Independent sequences. The same key gives the same bytes."""
        return _compiled(self, key, batch_size)

    def _sample(self, key: PRNGKeyArray, batch_size: int) -> Trajectories:
        if self.nonlinearity is None:
            # The seventh exists only for spectra: splitting in seven would change the other six.
            count = 7 if isinstance(self.transition, Contracting) else 6
            _, w_key, h_key, noise_key, obs_key, c_key, *rest = jax.random.split(key, count)
            spectrum_key = rest[0] if rest else key
        else:
            _, w_key, h_key, noise_key = jax.random.split(key, 4)
            spectrum_key = obs_key = c_key = key
        n, steps = self.state_dim, self.length + 1
        w = self.transition(batch_size, n, key=w_key, spectrum_key=spectrum_key)
        first = self.initial((batch_size, n), key=h_key, steadily=self._steady)
        noise = _noise(noise_key, batch_size, steps, n, self._steady)
        if self._steady:
            states = self._steadily_rolled_out(w, first, noise[: steps - 1])
        else:
            noise = self.state_noise * noise
            states = self._roll_out(w, first, noise[: steps - 1])
        observations, c = states, None
        if self.readout is not None:
            c = self.readout.std * jax.random.normal(c_key, (batch_size, self.obs_dim, n), jnp.float32)
            observations = matvec(c[:, None], states)
        if self.observation_noise:
            noise = jax.random.normal(obs_key, observations.shape, jnp.float32)
            observations = observations + self.observation_noise * noise
        return Trajectories(observations, states, w, c, self.features(states))

    def features(self, states: Float[Array, "*batch state"]) -> Float[Array, "*batch state"]:
        """$f^*(h)$."""
        return states if self.nonlinearity is None else self.nonlinearity(states)

    def _clipped(self, states: Array) -> Array:
        if self.clip is None:
            return states
        clipped = jnp.clip(states, -self.clip, self.clip)
        if self.clip_only_above is None:
            return clipped
        # Also where a sequence is not finite.
        small = jnp.max(jnp.abs(states), (-2, -1), keepdims=True) <= self.clip_only_above
        return jnp.where(small, states, clipped)

    @property
    def _steady(self) -> bool:
        """Whether states may become much of a last digit: such are the same bits on every machine."""
        return isinstance(self.transition, Contracting) and self.nonlinearity is None

    def _roll_out(self, w: Array, first: Array, noise: Array) -> Float[Array, "batch time state"]:
        def step(h, noise):
            h = matvec(w, self.features(h)) + noise.T
            h = self._clipped(h) if self.clip_feeds_back else h
            return h, h

        # Unrolled for GPUs, on which a step is shorter than the loop around it.
        _, later = jax.lax.scan(step, first, noise, unroll=10)
        return self._clipped(jnp.moveaxis(jnp.concatenate([first[None], later]), 0, 1))

    def _steadily_rolled_out(self, w: Array, first: Array, noise: Array) -> Float[Array, "batch time state"]:
        clip = self.clip if self.clip_feeds_back else None
        return self._clipped(steady.roll_out(w, first, noise, std=self.state_noise, clip=clip))

    # The paper's families of tasks.

    @classmethod
    def linear(cls, variant: Literal["as_run", "as_written"] = "as_run", **changes) -> Self:
        """Fully observed, a new orthogonal matrix for every sequence."""
        return cls(**by_variant(variant, dict(initial=Uniform(bound=1.0)), {}) | changes)

    @classmethod
    def partially_observed(cls, variant: Literal["as_run", "as_written"] = "as_run", **changes) -> Self:
        """Fifteen hidden dimensions, of which five linear combinations are seen."""
        common = dict(state_dim=15, observation_noise=0.01)
        as_run = common | dict(initial=Uniform(bound=1.0), readout=Readout(std=0.5))
        return cls(**by_variant(variant, as_run, common | dict(readout=Readout())) | changes)

    @classmethod
    def nonlinear(cls, variant: Literal["as_run", "as_written"] = "as_run", **changes) -> Self:
        """$h_{t+1} = W^*\\,\\mathrm{MLP}^*(h_t)$."""
        as_run = dict(initial=Uniform(bound=0.25), nonlinearity=MLP(std=1.1, gelu="tanh"))
        return cls(**by_variant(variant, as_run, dict(nonlinearity=MLP())) | changes)

    @classmethod
    def contracting(cls, variant: Literal["as_run", "as_written"] = "as_run", **changes) -> Self:
        """Eigenvalues between 0.3 and 0.9.

        The paper's text clips the values of those sequences, about 2%, that "lead to very large values"; it does not
        say how large. Here: beyond 40, which 2.2% of them do. The released code clips every state of every sequence.
        """
        as_run = dict(initial=Uniform(bound=1.0), transition=Contracting(pin_largest=True), clip=2.0)
        as_written = dict(transition=Contracting(), clip=2.0, clip_feeds_back=False, clip_only_above=40.0)
        return cls(**by_variant(variant, as_run, as_written) | changes)

    @classmethod
    def fixed_teacher(cls, variant: Literal["as_run", "as_written"] = "as_run", **changes) -> Self:
        """One matrix for all sequences: nothing to learn in context."""
        fixed = dict(transition=FixedOrthogonal())
        return cls(**by_variant(variant, fixed | dict(initial=Uniform(bound=1.0)), fixed) | changes)


# Compiled once for each task and size, whoever asks; part of whatever is compiled around it.
_compiled = jax.jit(Dynamics._sample, static_argnums=(0, 2), inline=True)


def by_variant(variant: str, as_run: dict, as_written: dict) -> dict:
    if variant not in ("as_run", "as_written"):
        raise ValueError(f"variant: expected 'as_run' or 'as_written', got {variant!r}.")
    return as_run if variant == "as_run" else as_written


def haar(key: PRNGKeyArray, dim: int, count: int) -> Float[Array, "count dim dim"]:
    """Orthogonal matrices, independent and uniform."""
    return jax.lax.platform_dependent(
        key,
        # In one row: several times as fast on a CPU as in rows of a few entries, and the same numbers.
        cpu=lambda key: _orthonormal(
            jax.random.normal(key, (count * dim * dim,), jnp.float32).reshape(count, dim, dim)
        ),
        default=lambda key: jax.random.orthogonal(key, dim, (count,), jnp.float32),
    )


def _orthonormal(matrices: Float[Array, "count row column"]) -> Float[Array, "count row column"]:
    """Their columns made orthonormal one after the other, each twice against those before it.

    That is Q of QR with a positive diagonal, as `jax.random.orthogonal` has it, without LAPACK: several devices of one
    CPU that call it at the same time may wait for each other forever.
    """
    columns = jnp.swapaxes(matrices, 1, 2)

    def add(j: Array, found: Array) -> Array:
        new = jax.lax.dynamic_index_in_dim(columns, j, 1, keepdims=False)
        for _ in range(2):
            new = new - jnp.einsum("cj,cji->ci", jnp.einsum("cji,ci->cj", found, new), found)
        new = new / jnp.linalg.norm(new, axis=-1, keepdims=True)
        return jax.lax.dynamic_update_index_in_dim(found, new, j, 1)

    return jnp.swapaxes(jax.lax.fori_loop(0, columns.shape[1], add, jnp.zeros_like(columns)), 1, 2)


def matvec(matrix: Float[Array, "*batch out in"], vector: Float[Array, "*batch in"]) -> Array:
    """Matrix times vector, in full precision on every device: what is drawn must not depend on it."""
    return jnp.einsum("...ij,...j->...i", matrix, vector, precision=jax.lax.Precision.HIGHEST)


def _noise(
    key: PRNGKeyArray, batch_size: int, steps: int, dim: int, steadily: bool
) -> Float[Array, "time state batch"]:
    """One key per sequence, then one per step, the last of them unused. (Where a CPU makes normal numbers in rows of a
    state's few entries it takes longer than in rows of a batch's.)"""
    keys = jax.vmap(lambda k: jax.random.split(k, steps))(jax.random.split(key, batch_size))
    drawn = jax.vmap(jax.vmap(lambda k: _normal(k, (dim,), steadily)))(keys.T)
    return jnp.swapaxes(drawn, 1, 2)
