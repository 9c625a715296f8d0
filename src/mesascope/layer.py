"""The mesa operation as a layer to put where attention was."""

import math
from functools import partial
from typing import Literal, NamedTuple, final, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from mesascope.ops import mesa_attention, mesa_init, mesa_step
from mesascope.ops.mesa import Regularizer, State
from mesascope.ops.methods import Chunked, Method, Pallas, Prefix, Recursive, resolve
from mesascope.parts import inverse_softplus, positive_lam, wide

# Under the square root of a norm: a token whose key is zero then has a finite gradient.
NORM_FLOOR = 1e-6


class _Pairs(NamedTuple):
    """What the operation takes, in its precision: `[time, head, width]`, and gates `[time, head]`."""

    queries: Array
    keys: Array
    values: Array
    log_decay: Array | None
    beta: Array | None


@final
class MesaLayer(eqx.Module):
    r"""In-context least squares, several heads of it.

    $$y_t = W_o\,\big[\Phi^h_t q^h_t\big]_h, \qquad \Phi^h_t = \arg\min_\Phi
            \tfrac12\sum_{i\le t}\zeta^h_{it}\beta^h_i\lVert v^h_i - \Phi k^h_i\rVert^2
            + \tfrac12\,\zeta^h_{0t}\,\mathrm{tr}\,\Phi\,\mathrm{diag}(1/\lambda^h)\,\Phi^\top$$

    with $q^h_t = W^h_q x_t$ and $k^h_t = W^h_k x_t$ (by default scaled to unit length), $v^h_t = W^h_v x_t$,
    $\zeta_{it} = \prod_{i<j\le t}\gamma_j$; `mesa_attention` tells more of the operation. There is no
    residual connection inside, and no normalization of $x$.

    One call sees one example, `[time, model]`; a batch is `jax.vmap(layer)(batch)`. Every leaf is a
    floating-point array, so plain `jax.jit`, `jax.grad` and optax take the layer as it is. Projections are
    computed in the dtype of `x`, whatever the dtype of the parameters; gates, λ and the regression in float32
    (float64 for float64 inputs).

    Attributes:
        query_proj: $W_q$, all heads.
        key_proj: $W_k$.
        value_proj: $W_v$.
        output_proj: $W_o$.
        raw_lam: $\lambda = \mathrm{softplus}$ of this, `[heads, 1]` or `[heads, key]`.
        decay_gate: $\log\gamma_t = -\mathrm{softplus}(w^\top x_t + b)$ for each head, or None.
        beta_gate: $\beta_t = \mathrm{sigmoid}(w^\top x_t + b)$ for each head, or None.
    """

    query_proj: eqx.nn.Linear
    key_proj: eqx.nn.Linear
    value_proj: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    raw_lam: Float[Array, "head lam_channel"]
    decay_gate: eqx.nn.Linear | None
    beta_gate: eqx.nn.Linear | None
    model_dim: int = eqx.field(static=True)
    heads: int = eqx.field(static=True)
    key_dim: int = eqx.field(static=True)
    value_dim: int = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    regularizer: Regularizer = eqx.field(static=True)
    method: str | Method = eqx.field(static=True)

    def __init__(
        self,
        model_dim: int,
        *,
        heads: int,
        key_dim: int | None = None,
        value_dim: int | None = None,
        lam_init: float = 1.0,
        per_channel: bool = False,
        decay_init: float | None = None,
        beta_init: float | None = None,
        normalize: bool = True,
        use_bias: bool = False,
        regularizer: Regularizer = "decayed",
        method: str | Method = "auto",
        dtype: DTypeLike = jnp.float32,
        key: PRNGKeyArray,
    ):
        r"""Draw the projections; λ and the gates start as the constants asked for.

        Args:
            model_dim: width of `x`.
            heads: number of independent regressions.
            key_dim: width of queries and keys; by default `model_dim // heads`.
            value_dim: width of values; by default `key_dim`.
            lam_init: λ at the start. It is learned, and stays positive.
            per_channel: one λ per head and key channel instead of one per head.
            decay_init: forgetting factor γ at the start, say 0.99; then learned and dependent on the input.
                None: nothing is forgotten. With the decayed regularizer, directions that no key excites grow
                as $\lambda/\prod\gamma$, which overflows float32 after about $88/(1-\gamma)$ tokens: for
                longer sequences start nearer to 1, or take `regularizer="constant"`.
            beta_init: weight β of a pair at the start, say 0.95; then learned and dependent on the input.
                None: every pair weighs 1.
            normalize: scale queries and keys to unit length. The conditioning of the regression is then set
                by λ alone, and float32 is accurate for every λ that training reaches. False keeps the layer
                the plain least squares of the theory, for which lengths matter.
            use_bias: give the four projections a bias.
            regularizer: `"decayed"` or `"constant"`; they differ only with `decay_init`.
            method: how to compute it; see `mesa_attention`. Decoding with `step` is always exact.
            dtype: of the parameters.
            key: draws the projections.

        Raises:
            ValueError: a size, λ, gate or method that cannot be.
        """
        if key_dim is None:
            if heads < 1 or model_dim % heads:
                raise ValueError(
                    f"heads: expected a divisor of model_dim = {model_dim}, got {heads}. "
                    "Choose one, or give key_dim."
                )
            key_dim = model_dim // heads
        value_dim = key_dim if value_dim is None else value_dim
        sizes = {"model_dim": model_dim, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}.")
        if not 0 < lam_init < math.inf:
            raise ValueError(f"lam_init: expected a finite λ > 0 (the ridge penalty is 1/λ), got {lam_init}.")
        for name, start in (("decay_init", decay_init), ("beta_init", beta_init)):
            if start is not None and not 0 < start < 1:
                raise ValueError(
                    f"{name}: expected a number strictly between 0 and 1, got {start}. "
                    "For a constant 1, pass None."
                )
        if regularizer not in ("decayed", "constant"):
            raise ValueError(f"regularizer: expected 'decayed' or 'constant', got {regularizer!r}.")
        constant = regularizer == "constant" and decay_init is not None
        chosen = resolve(method, whitening_applies=not constant, kernels_apply=False)
        if constant and isinstance(chosen, Chunked | Prefix | Pallas | Recursive):
            raise ValueError(
                f"method: {method!r} needs the regularizer to decay with the pairs. With a constant one "
                "and decay_init, use 'auto', 'cg' or 'reference'."
            )

        keys = jax.random.split(key, 6)
        inner = heads * key_dim, heads * key_dim, heads * value_dim
        self.query_proj, self.key_proj, self.value_proj = (
            eqx.nn.Linear(model_dim, width, use_bias=use_bias, dtype=dtype, key=k)
            for width, k in zip(inner, keys[:3], strict=True)
        )
        self.output_proj = eqx.nn.Linear(
            heads * value_dim, model_dim, use_bias=use_bias, dtype=dtype, key=keys[3]
        )
        self.raw_lam = jnp.full((heads, key_dim if per_channel else 1), inverse_softplus(lam_init), dtype)
        self.decay_gate = self.beta_gate = None
        if decay_init is not None:
            start = inverse_softplus(-math.log(decay_init))
            self.decay_gate = _constant_gate(model_dim, heads, start, dtype, key=keys[4])
        if beta_init is not None:
            start = math.log(beta_init) - math.log1p(-beta_init)
            self.beta_gate = _constant_gate(model_dim, heads, start, dtype, key=keys[5])
        self.model_dim, self.heads, self.key_dim, self.value_dim = model_dim, heads, key_dim, value_dim
        self.normalize, self.regularizer, self.method = normalize, regularizer, method

    @property
    def lam(self) -> Float[Array, "head lam_channel"]:
        """λ > 0, `[heads, 1]` or `[heads, key]`, in float32 or wider."""
        return positive_lam(self.raw_lam.astype(wide(self.raw_lam.dtype)))

    @overload
    def __call__(
        self,
        x: Float[Array, "time model"],
        *,
        segment_ids: Int[Array, " time"] | None = None,
        state: State | None = None,
        return_state: Literal[False] = False,
    ) -> Float[Array, "time model"]: ...

    @overload
    def __call__(
        self,
        x: Float[Array, "time model"],
        *,
        segment_ids: Int[Array, " time"] | None = None,
        state: State | None = None,
        return_state: Literal[True],
    ) -> tuple[Float[Array, "time model"], State]: ...

    def __call__(
        self,
        x: Float[Array, "time model"],
        *,
        segment_ids: Int[Array, " time"] | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> Float[Array, "time model"] | tuple[Float[Array, "time model"], State]:
        """Mix over time, causally.

        Args:
            x: one example.
            segment_ids: several documents in one row: the regression starts afresh wherever they change.
            state: where an earlier call (or `step`) stopped; it continues into the first segment.
            return_state: also return the state after the last token, for `step` or the next call.

        Returns:
            The output in the dtype of `x`, and the state.
        """
        self._check(x, "[time, model]", 2)
        # Heads first: the operation takes any leading axes, and time is the last but one.
        pairs = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), self._project(x))
        attend = partial(
            mesa_attention,
            pairs.queries,
            pairs.keys,
            pairs.values,
            self.lam,
            log_decay=pairs.log_decay,
            beta=pairs.beta,
            regularizer=self.regularizer,
            segment_ids=segment_ids,
            state=state,
            method=self.method,
        )
        # Asked for only when wanted: the final state costs work in both passes.
        out, final_state = attend(return_state=True) if return_state else (attend(), None)
        y = self._merge(jnp.moveaxis(out, 0, 1), x.dtype)
        return y if final_state is None else (y, final_state)

    def init_state(self) -> State:
        """The state before the first token: one regression per head, nothing seen."""
        gram = self.regularizer == "constant" and self.decay_gate is not None
        return mesa_init(
            self.lam,
            self.value_dim,
            key_dim=self.key_dim,
            regularizer="constant" if gram else "decayed",
            dtype=self.lam.dtype,
        )

    def step(self, state: State, x: Float[Array, " model"]) -> tuple[State, Float[Array, " model"]]:
        """One more token, in constant memory.

        To scan, wrap it: `jax.lax.scan(lambda state, x: layer.step(state, x), state, tokens)`. (JAX hashes
        what it scans, and the bare bound method of an Equinox module has no hash.)

        Args:
            state: from `init_state`, `__call__(..., return_state=True)` or an earlier step.
            x: the token.

        Returns:
            The state after the token, and its output in the dtype of `x`.
        """
        self._check(x, "[model]", 1)
        pair = jax.tree.map(lambda a: a[0], self._project(x[None]))
        state, out = mesa_step(
            state, pair.queries, pair.keys, pair.values, log_decay=pair.log_decay, beta=pair.beta
        )
        return state, self._merge(out[None], x.dtype)[0]

    def _check(self, x: Array, axes: str, rank: int) -> None:
        if x.ndim != rank or x.shape[-1] != self.model_dim:
            raise ValueError(
                f"x: expected one example {axes} with model = {self.model_dim}, got shape {x.shape}. "
                "For a batch, jax.vmap over it."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"x: expected a floating-point array {axes}, got dtype {x.dtype}.")

    def _project(self, x: Array) -> _Pairs:
        precise = wide(x.dtype)
        queries, keys, values = (
            _apply(linear, x).astype(precise).reshape(x.shape[0], self.heads, -1)
            for linear in (self.query_proj, self.key_proj, self.value_proj)
        )
        if self.normalize:
            queries, keys = _unit(queries), _unit(keys)
        # Not in bfloat16: rounding b ≈ -7 there moves the rate of forgetting by percents.
        x = x.astype(precise)
        log_decay = None if self.decay_gate is None else -jax.nn.softplus(_apply(self.decay_gate, x))
        beta = None if self.beta_gate is None else jax.nn.sigmoid(_apply(self.beta_gate, x))
        return _Pairs(queries, keys, values, log_decay, beta)

    def _merge(self, out: Array, dtype: jnp.dtype) -> Array:
        return _apply(self.output_proj, out.reshape(out.shape[0], -1).astype(dtype))


def _apply(linear: eqx.nn.Linear, x: Array) -> Array:
    """The linear map over time, in the dtype of x."""
    return jax.vmap(jax.tree.map(lambda a: a.astype(x.dtype), linear))(x)


def _unit(vectors: Array) -> Array:
    return vectors * jax.lax.rsqrt(jnp.sum(vectors**2, -1, keepdims=True) + NORM_FLOOR)


def _constant_gate(
    model_dim: int, heads: int, start: float, dtype: DTypeLike, *, key: PRNGKeyArray
) -> eqx.nn.Linear:
    """A gate that does not look at its input yet: zero weights, and the bias that gives the start."""
    gate = eqx.nn.Linear(model_dim, heads, dtype=dtype, key=key)
    constant = jnp.zeros((heads, model_dim), dtype), jnp.full((heads,), start, dtype)
    return eqx.tree_at(lambda g: (g.weight, g.bias), gate, constant)
