"""The ways to compute the mesa operation, each with the options that are its own."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp


def has_kernels() -> bool:
    """Whether kernels can be compiled here: on a GPU, unless this version of jax has dropped their compiler."""
    return jax.default_backend() == "gpu" and find_spec("jax.experimental.pallas.triton") is not None


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One dense solve per time step: the definition.

    Where keys are wide it may hang on a CPU of few cores: batched LAPACK calls that XLA runs side by side can wait for
    each other (seen with jax 0.10: with `return_state` beyond 128, and in the gradient from 96 on).
    """


@dataclass(frozen=True, kw_only=True)
class Recursive:
    """The paper's Sherman–Morrison scan.

    Attributes:
        backward: `"closed_form"` solves the adjoint problem with the same scan. `"reverse_time"` is the
            paper's: it stores only the last inverse and runs the recursion backwards. Its error grows with
            λ‖k‖² (float32: useless beyond about 100), and it takes neither `beta` nor `segment_ids`.
    """

    backward: Literal["closed_form", "reverse_time"] = "closed_form"


@dataclass(frozen=True, kw_only=True)
class Chunked:
    """Whitened keys and innovations, walking over chunks with a square-root state: the default.

    Attributes:
        chunk_size: tokens per chunk; by default up to 32 on CPUs, 64 on GPUs, 16 with `log_decay`. More than a
            few times the key width costs accuracy.
    """

    chunk_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The same with every chunk's initial state from prefix sums: no loop over chunks.

    More work, but all of it parallel, and sequences can be sharded over devices. The sums and their inverses are in
    float64, whatever the inputs are: in float32, 1/λ would drown in them. With `log_decay`, keep the decay within a
    chunk moderate (a smaller `chunk_size`): there is no fallback here.

    Attributes:
        chunk_size: tokens per chunk; by default up to twice the key width, at most 128, and 16 with `log_decay`.
    """

    chunk_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Neumann:
    """The paper's truncated series, scaled so that it converges; approximate.

    Attributes:
        steps: terms beyond the first.
        precompute: form every H_t once (T·d² numbers) instead of applying K Kᵀ anew each step.
    """

    steps: int = 32
    precompute: bool = False


@dataclass(frozen=True, kw_only=True)
class Chebyshev:
    """The truncated Chebyshev iteration: approximate, and better than `Neumann` at equal steps."""

    steps: int = 32
    precompute: bool = False


@dataclass(frozen=True, kw_only=True)
class ConjugateGradients:
    """Conjugate gradients for all time steps at once, to a tolerance.

    Attributes:
        tolerance: relative residual at which to stop; by default 1e-6 in float32, 1e-12 in float64.
        max_steps: by default twice the key width plus 20.
    """

    tolerance: float | None = None
    max_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Pallas:
    """Fused GPU kernels: float32 or bfloat16, keys and values up to 128 wide. Without a GPU interpreted: slow.

    Plain sequences, where nothing is forgotten, nothing starts afresh and no state goes on, may have keys up to 384.

    A compiler that shards arrays by itself cannot see into a kernel, and would gather its inputs on every device:
    there, use `jax.shard_map`, or another method.
    """

    WIDEST: ClassVar[int] = 128
    WIDEST_KEYS: ClassVar[int] = 384
    FEW: ClassVar[int] = 64
    MANY: ClassVar[int] = 256

    @classmethod
    def takes(cls, key: int, value: int, *, plain: bool) -> bool:
        """Whether there is a kernel for such heads."""
        return value <= cls.WIDEST and key <= (cls.WIDEST_KEYS if plain else cls.WIDEST)

    @classmethod
    def is_fastest(cls, key: int, value: int, dtype: Any, *, plain: bool) -> bool:
        """Whether to prefer it to `Chunked` on a GPU (measured: benchmarks/kernels.md).

        Sequences that are not plain are walked one block after the other, which wins up to widths of 64.
        """
        wins = cls.takes(key, value, plain=True) if plain else max(key, value) <= 64
        return has_kernels() and dtype == jnp.float32 and wins

    @classmethod
    def steps(cls, key: int, value: int, dtype: Any) -> bool:
        """Whether a decoding step is one kernel."""
        return has_kernels() and dtype == jnp.float32 and max(key, value) <= cls.WIDEST

    @classmethod
    def corrects(cls, heads: int, key: int, value: int, dtype: Any) -> bool:
        """Whether the delta rule is kernels that walk every head: where there are some."""
        return cls.steps(key, value, dtype) and heads >= cls.FEW

    @classmethod
    def attends(cls, heads: int, time: int, key: int, value: int, dtype: Any) -> bool:
        """Whether causal linear attention is: where they walk far, and are enough to fill a GPU."""
        walks = heads * -(-value // 64)
        return cls.corrects(heads, key, value, dtype) and time > 64 and walks >= cls.MANY

    @classmethod
    def check(cls, key: int, value: int, dtype: Any, *, plain: bool) -> None:
        """Refuse what it cannot do, naming what can."""
        if not cls.takes(key, value, plain=plain):
            raise ValueError(
                f"method 'pallas' takes keys and values up to {cls.WIDEST} wide (keys up to {cls.WIDEST_KEYS} without "
                f"log_decay, segment_ids and state), got {key} and {value}. Use method='chunked'."
            )
        if dtype != jnp.float32 and jax.default_backend() == "gpu":
            raise TypeError(f"method 'pallas' computes in float32, got {dtype}. Use method='chunked'.")


Method = Reference | Recursive | Chunked | Prefix | Pallas | Neumann | Chebyshev | ConjugateGradients

NAMED: dict[str, Method] = {
    "reference": Reference(),
    "recursive": Recursive(),
    "chunked": Chunked(),
    "prefix": Prefix(),
    "pallas": Pallas(),
    "neumann": Neumann(),
    "chebyshev": Chebyshev(),
    "cg": ConjugateGradients(),
}


def resolve(method: str | Method, *, whitening_applies: bool, kernels_apply: bool) -> Method:
    """Turn a name into a method; `"auto"` picks the fastest exact one for the problem."""
    if isinstance(method, Method):
        return method
    if method == "auto":
        if not whitening_applies:
            return ConjugateGradients()
        return Pallas() if kernels_apply else Chunked()
    if isinstance(method, str) and method in NAMED:
        return NAMED[method]
    raise ValueError(f"method: expected 'auto', {', '.join(map(repr, NAMED))} or a Method, got {method!r}.")
