r"""In-context algorithms: what a mesa-optimizer may compute, at every time step at once.

An algorithm maps a `Context` to predictions. At time t it has a query $x_t$ and the pairs $(k_i, v_i)$, $i \le t$, and
it predicts with a model $\Phi_t$ that it fitted to these pairs,

$$\hat y_t = \Phi_t x_t, \qquad L_t(\Phi) = \tfrac12\sum_{i\le t}\lVert v_i - \Phi k_i\rVert^2 .$$

With $A_t = \sum_{i\le t} k_i k_i^\top$ and $B_t = \sum_{i\le t} v_i k_i^\top$, nearly all of them apply a polynomial in
$A_t$ to $x_t$ and then $B_t$ to the result. Both products are causal linear attention, so nothing loops over time:

    context = autoregressive(task.sample(key, 256).observations)
    loss(Ridge(lam=1000.0), context)
    tuned, losses = tune(MesaOptimizer.chebyshev(0.3, 40.0, steps=6), sample, steps=2000, key=key)

Algorithms are values whose leaves are float arrays, so `jit`, `grad` and `vmap` apply. Numbers: `tests/theory`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Self, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, PRNGKeyArray

from mesascope.ops import delta_attention, linear_attention, mesa_attention
from mesascope.tasks.few_shot import Layout, Prompt, Y
from mesascope.tasks.tokens import delayed
from mesascope.training import AdamW, half_squared_errors, optimize


class Context(NamedTuple):
    """What an algorithm may use at every time step, and what it is held to.

    Attributes:
        queries: $x_t$.
        keys: $k_t$, the input of the pair that becomes known at time t; zero where there is none.
        values: $v_t$, its target.
        present: at which times a pair becomes known.
        targets: what is to be predicted from the query.
        predicts: at which times the prediction counts.
    """

    queries: Float[Array, "*batch time key"]
    keys: Float[Array, "*batch time key"]
    values: Float[Array, "*batch time value"]
    present: Bool[Array, " time"]
    targets: Float[Array, "*batch time value"]
    predicts: Bool[Array, " time"]


def autoregressive(
    observations: Float[Array, "*batch time+1 obs"],
    *,
    features: Float[Array, "*batch time key"] | None = None,
    newest_pair: bool = True,
) -> Context:
    r"""Predict $s_{t+1}$ from $x_t$, having seen the pairs $(x_i, s_{i+1})$ for $i < t$.

    Args:
        observations: $s_1 \dots s_{T+1}$.
        features: $x_1 \dots x_T$: the observations themselves unless given. `Stacked(k=k)(observations).tokens` has k
            of them each, and `trajectories.features[:, :-1]` is $\mathrm{MLP}^*(s_t)$.
        newest_pair: whether $(x_{t-1}, s_t)$ is known at time t. The released control leaves it out.
    """
    now = observations[..., :-1, :]
    x = now if features is None else features
    if x.shape[:-1] != now.shape[:-1]:
        raise ValueError(
            f"features: expected one for each of the {now.shape[-2]} observations that have a successor, so "
            f"{(*now.shape[:-1], 'key')}, got shape {x.shape}."
        )
    late = 0 if newest_pair else 1
    time = jnp.arange(x.shape[-2], dtype=jnp.int32)
    targets = observations[..., 1:, :]
    return Context(
        x, delayed(x, 1 + late), delayed(now, late), time > late, targets, jnp.ones(time.shape, bool)
    )


def few_shot(
    prompt: Prompt, layout: Layout, *, true_pairs_only: bool = False, newest_pair: bool = True
) -> Context:
    r"""Predict $y_i$ from $x_i$ in the prompt $[x_1, y_1, x_2, y_2, \dots]$.

    An autoregressive learner fits all pairs of consecutive tokens. Every second, $(y_i, x_{i+1})$, is spurious.

    Args:
        prompt: its tokens, as `FewShot.prompt` gives them.
        layout: `FewShot.layout`.
        true_pairs_only: fit $(x_i, y_i)$ and nothing else.
        newest_pair: as in `autoregressive`; at $x_i$ the newest pair is the spurious $(y_{i-1}, x_i)$.
    """
    late = 0 if newest_pair else 1
    tokens = prompt.tokens
    present = np.arange(tokens.shape[-2]) > late
    if true_pairs_only:
        is_label = layout.part == Y
        present = present & np.concatenate([np.zeros(late, bool), is_label[: len(is_label) - late]])
    keys = jnp.where(present[:, None], delayed(tokens, 1 + late), 0)
    values = delayed(tokens, late)
    return Context(tokens, keys, values, jnp.asarray(present), prompt.targets, prompt.predicts)


def recall(keys: Float[Array, "*batch pair key"], values: Float[Array, "*batch pair value"]) -> Context:
    """An associative memory: all pairs are written, then each key is asked for its value."""
    nothing, pairs = jnp.zeros_like(keys), keys.shape[-2]
    second = jnp.arange(2 * pairs, dtype=jnp.int32) >= pairs
    twice = jnp.concatenate([values, values], -2)
    return Context(
        jnp.concatenate([nothing, keys], -2),
        jnp.concatenate([keys, nothing], -2),
        twice, ~second, twice, second,
    )  # fmt: skip


Algorithm = Callable[[Context], Float[Array, "*batch time value"]]
Tunable = TypeVar("Tunable", bound=eqx.Module)


@eqx.filter_jit
def loss_by_time(algorithm: Algorithm, context: Context) -> Float[Array, " time"]:
    """Mean over sequences of ½‖error‖², zero where nothing is predicted. Compiled once for each kind of algorithm and
    shape."""
    errors = half_squared_errors(algorithm(context), context.targets)
    return jnp.where(context.predicts, jnp.mean(errors.reshape(-1, errors.shape[-1]), 0), 0)


@eqx.filter_jit
def loss(algorithm: Algorithm, context: Context) -> Float[Array, ""]:
    """Mean over sequences and predicted times of ½‖error‖². Compiled as `loss_by_time` is."""
    by_time = loss_by_time(algorithm, context)
    return jnp.sum(by_time) / jnp.sum(context.predicts.astype(by_time.dtype))


def tune(
    algorithm: Tunable,
    sample: Callable[[PRNGKeyArray], Context],
    *,
    steps: int,
    rate: float = 1e-2,
    optimizer: AdamW | optax.GradientTransformation | None = None,
    key: PRNGKeyArray,
) -> tuple[Tunable, Float[Array, " step"]]:
    """Tune an algorithm's numbers by gradient descent on the task.

    Args:
        sample: draws a batch; called with a new key in every step.
        rate: Adam's, falling to zero along a cosine.
        optimizer: instead of that.
        key: for the batches.

    Returns:
        The tuned algorithm, and the loss before each step.
    """
    chosen = optax.adam(optax.cosine_decay_schedule(rate, steps)) if optimizer is None else optimizer

    def on_batch(algorithm: Tunable, context: Context) -> Float[Array, ""]:
        assert callable(algorithm)
        return loss(algorithm, context)

    return optimize(on_batch, algorithm, sample, steps=steps, optimizer=chosen, key=key)


def line_search(
    build: Callable[[Float[Array, ""]], Algorithm],
    context: Context,
    low: float,
    high: float,
    *,
    points: int = 9,
    rounds: int = 4,
) -> tuple[float, float]:
    """The positive number for which `build(number)` has the smallest loss, and that loss.

    A logarithmic grid from low to high, refined around its best point in every further round: right where there is one
    valley.

        lam, best = line_search(Ridge, context, 1.0, 1e5)
    """
    if not 0 < low < high:
        raise ValueError(f"low, high: expected 0 < low < high, got {low} and {high}.")
    best, lowest = low, math.inf
    for _ in range(rounds):
        grid = np.geomspace(low, high, points)
        found = [float(loss(build(x), context)) for x in _float(grid)]
        at = int(np.nanargmin(found))
        best, lowest = float(grid[at]), float(found[at])
        low, high = grid[max(at - 1, 0)], grid[min(at + 1, points - 1)]
    return best, lowest


class Ridge(eqx.Module):
    r"""Regularized least squares: $\hat y_t = B_t(A_t + \tfrac1\lambda I)^{-1} x_t$, exactly, by `mesa_attention`."""

    log_lam: Float[Array, ""]

    def __init__(self, lam: ArrayLike):
        self.log_lam = jnp.log(_float(lam))

    def __call__(self, context: Context) -> Float[Array, "*batch time value"]:
        q, k, v = context[:3]
        return mesa_attention(q, k, v, jnp.exp(self.log_lam).astype(q.dtype))


class GradientStep(eqx.Module):
    r"""One step of gradient descent (Proposition 1): $\hat y_t = (\Phi_0 - \eta\nabla L_t(\Phi_0))\,x_t$.

    Attributes:
        eta: η.
        phi_0: $\Phi_0$; None is zero, and is not tuned.
    """

    eta: Float[Array, ""]
    phi_0: Float[Array, "value key"] | None

    def __init__(self, eta: ArrayLike, phi_0: ArrayLike | None = None):
        self.eta, self.phi_0 = _float(eta), None if phi_0 is None else _float(phi_0)

    def __call__(self, context: Context) -> Float[Array, "*batch time value"]:
        start, residual = _before(context, self.phi_0)
        return start + _like(self.eta, start) * _attend(context.queries, context.keys, residual)


def nearest_step(
    context: Context, predictions: Float[ArrayLike, "*batch time value"], *, rounds: int = 10
) -> GradientStep:
    r"""The gradient step that is nearest to given predictions: that they are *fitted* by.

    $$\min_{\eta,\,\Phi_0}\ \sum\lVert \hat y_t - \Phi_0 x_t - \eta (B_t - \Phi_0 A_t) x_t\rVert^2$$

    This is least squares in η for a given $\Phi_0$, and in $\Phi_0$ for a given η: they are found in turns, from
    $\Phi_0 = 0$. (For models of the paper's tasks three rounds are enough.)

    Args:
        predictions: $\hat y_t$, say a model's.
    """
    once = GradientStep(1.0)
    x, moved, pulled, wanted = (
        np.asarray(array, np.float64).reshape(-1, array.shape[-1])
        for array in (
            context.queries,
            once(context._replace(values=context.keys)),  # A x
            once(context),  # B x
            jnp.asarray(predictions),
        )
    )
    eta, phi_0 = 0.0, np.zeros((wanted.shape[-1], x.shape[-1]))
    for _ in range(rounds):
        step = pulled - moved @ phi_0.T
        eta = np.sum(step * (wanted - x @ phi_0.T)) / np.sum(step**2)
        phi_0 = np.linalg.lstsq(x - eta * moved, wanted - eta * pulled, rcond=None)[0].T
    return GradientStep(eta, phi_0)


class GradientDescent(eqx.Module):
    r"""As many steps of gradient descent as there are rates, on each $L_t$ by itself.

    $$\Phi_t^{l+1} = \Phi_t^l - \eta_l\nabla L_t(\Phi_t^l) \quad\Longleftrightarrow\quad
      \hat y_t^{l+1} = \hat y_t^l + \eta_l (B_t - \Phi_0 A_t)\,u_t^l, \quad u_t^{l+1} = u_t^l - \eta_l A_t u_t^l, \quad
      u_t^0 = x_t$$

    The right-hand side transforms *queries*, which belong to one t only. Compare `StackedGradientSteps`.
    """

    etas: Float[Array, " step"]
    phi_0: Float[Array, "value key"] | None

    def __init__(self, etas: ArrayLike, phi_0: ArrayLike | None = None):
        self.etas, self.phi_0 = _float(etas), None if phi_0 is None else _float(phi_0)

    def __call__(self, context: Context) -> Float[Array, "*batch time value"]:
        return self.by_step(context)[-1]

    def by_step(self, context: Context) -> Float[Array, "step+1 *batch time value"]:
        """Predictions before the first step and after each."""
        q, k = context[:2]
        start, residual = _before(context, self.phi_0)

        def step(carry, eta):
            y, u = carry
            y, u = y + eta * _attend(u, k, residual), u - eta * _attend(u, k, k)
            return (y, u), y

        return _with_start(start, jax.lax.scan(step, (start, q), _like(self.etas, q))[1])


class StackedGradientSteps(eqx.Module):
    r"""Layers of Proposition 1 on top of each other: the biased algorithm that causality makes of gradient descent.

    $$\hat y_t^{l+1} = \hat y_t^l + \eta_l\sum_{i\le t} r_i^l k_i^\top x_t, \qquad
      r_t^{l+1} = r_t^l - \eta_l\sum_{i\le t} r_i^l k_i^\top k_t, \qquad r_t^0 = v_t - \Phi_0 k_t$$

    A step of gradient descent at time t would need the residuals of *all* pairs under $\Phi_t^l$. What stands in token
    i is its residual under $\Phi_i^l$, fitted to the pairs up to i only. The first step is right, later ones are not.
    """

    etas: Float[Array, " step"]
    phi_0: Float[Array, "value key"] | None

    def __init__(self, etas: ArrayLike, phi_0: ArrayLike | None = None):
        self.etas, self.phi_0 = _float(etas), None if phi_0 is None else _float(phi_0)

    def __call__(self, context: Context) -> Float[Array, "*batch time value"]:
        return self.by_step(context)[-1]

    def by_step(self, context: Context) -> Float[Array, "step+1 *batch time value"]:
        """Predictions before the first step and after each."""
        q, k = context[:2]
        start, residual = _before(context, self.phi_0)

        def step(carry, eta):
            y, r = carry
            y, r = y + eta * _attend(q, k, r), r - eta * _attend(k, k, r)
            return (y, r), y

        return _with_start(start, jax.lax.scan(step, (start, residual), _like(self.etas, q))[1])


class MesaOptimizer(eqx.Module):
    r"""The multi-layer mesa-optimizer (Proposition 2): precondition the query, then one gradient step.

    $$\hat y_t = \eta\,B_t\,\tilde x_t^K, \qquad \eta\,\tilde x_t^K \approx (A_t + \tfrac1\lambda I)^{-1} x_t$$

    With fixed coefficients, second-order Richardson iteration from $\tilde x^0 = \tilde x^{-1} = x$,

    $$\tilde x^{l+1} = \tilde x^l + \alpha_l\big(x - \eta(A_t + \tfrac1\lambda I)\tilde x^l\big)
                       + \beta_l(\tilde x^l - \tilde x^{l-1}).$$

    With η = 1 the limit is the paper's $H_t^* x_t$; another η scales the loss, so that x is a fair start for it. For
    α = 1 and β = 0 this is the truncated Neumann series, and the prediction that of K + 1 steps of gradient descent
    with rate η. (The paper's formula lacks x: what it iterates does not tend to the solution.) Fixed coefficients suit
    spectra up to some bound; beyond it the error grows with the K-th power, so that rare sequences dominate a mean.

    Normalized, as the released code has it, with $F_t = \lVert A_t + \frac1\lambda I\rVert_F$ and
    $M_t = (A_t + \frac1\lambda I)/F_t$,

    $$\tau^{l+1} = (I - \alpha_l M_t)\,\tau^l, \qquad
      \xi^{l+1} = \xi^l + \tau^{l+1} + \beta_l(\xi^l - \xi^{l-1}), \qquad \tilde x^l = \xi^l / F_t,
      \qquad \xi^0 = \xi^{-1} = \tau^0 = x$$

    The first β does nothing in either. "k layers" or "k steps" of the paper's figures are k - 1 coefficients of each
    kind and the gradient step. A norm depends on the data, so only the fixed form is also a linear Transformer
    (`constructions.proposition_2`).

    Attributes:
        normalized: which of the two.
    """

    alphas: Float[Array, " step"]
    betas: Float[Array, " step"]
    log_lam: Float[Array, ""]
    log_eta: Float[Array, ""]
    normalized: bool = eqx.field(static=True)

    def __init__(
        self,
        alphas: ArrayLike,
        betas: ArrayLike,
        lam: ArrayLike = 1000.0,
        eta: ArrayLike = 1.0,
        *,
        normalized: bool = False,
    ):
        self.alphas, self.betas = _float(alphas), _float(betas)
        self.log_lam, self.log_eta, self.normalized = jnp.log(_float(lam)), jnp.log(_float(eta)), normalized
        if self.alphas.ndim != 1 or self.alphas.shape != self.betas.shape:
            raise ValueError(
                f"alphas, betas: expected one of each per step, got shapes {self.alphas.shape} and {self.betas.shape}."
            )

    @classmethod
    def chebyshev(cls, low: float, high: float, *, steps: int, lam: float = 1000.0) -> Self:
        r"""Coefficients for spectra of $A_t + \frac1\lambda I$ in [low, high]: see `chebyshev_coefficients`."""
        eta = 2 / (low + high)
        return cls(*chebyshev_coefficients(eta * low, eta * high, steps), lam, eta)

    @classmethod
    def neumann(cls, *, steps: int, lam: float = 1000.0) -> Self:
        r"""The truncated Neumann series of the normalized matrix."""
        return cls(np.ones(steps), np.zeros(steps), lam, normalized=True)

    @property
    def lam(self) -> Float[Array, ""]:
        return jnp.exp(self.log_lam)

    @property
    def eta(self) -> Float[Array, ""]:
        return jnp.exp(self.log_eta)

    def __call__(self, context: Context) -> Float[Array, "*batch time value"]:
        return self.predict(context, self.preconditioned(context)[-1])

    def predict(
        self, context: Context, preconditioned: Float[Array, "*lead time key"]
    ) -> Float[Array, "*lead time value"]:
        r"""The gradient step: $\eta B_t\tilde x_t$."""
        return _like(self.eta, preconditioned) * _attend(preconditioned, context.keys, context.values)

    def preconditioned(self, context: Context) -> Float[Array, "step+1 *batch time key"]:
        r"""$\tilde x_t^0$ to $\tilde x_t^K$."""
        q, k = context[:2]
        lam, eta = _like(self.lam, q), _like(self.eta, q)

        def system(x: Array) -> Array:
            return _attend(x, k, k) + x / lam

        def richardson(carry, coefficients):
            x, before = carry
            alpha, beta = coefficients
            after = x + alpha * (q - eta * system(x)) + beta * (x - before)
            return (after, x), after

        scale = _frobenius(k, 1 / lam) if self.normalized else jnp.ones((), q.dtype)

        def as_run(carry, coefficients):
            x, before, term = carry
            alpha, beta = coefficients
            term = term - alpha * system(term) / scale
            after = x + term + beta * (x - before)
            return (after, x, term), after

        coefficients = _like(self.alphas, q), _like(self.betas, q)
        if self.normalized:
            iterates = jax.lax.scan(as_run, (q, q, q), coefficients)[1]
        else:
            iterates = jax.lax.scan(richardson, (q, q), coefficients)[1]
        return _with_start(q, iterates) / scale


def chebyshev_coefficients(
    low: float, high: float, steps: int
) -> tuple[Float[np.ndarray, " step"], Float[np.ndarray, " step"]]:
    r"""$\alpha_l, \beta_l$ of `MesaOptimizer` that are best for all spectra of its system (η included) in [low, high].

    After l steps the error is at most $2\rho^l/(1+\rho^{2l})$ times that at the start, with
    $\rho = (\sqrt\kappa - 1)/(\sqrt\kappa + 1)$, $\kappa = $ high / low. (Richardson with a constant rate has
    $(\kappa-1)/(\kappa+1)$ in place of ρ.)
    """
    if not 0 < low < high:
        raise ValueError(f"low, high: expected 0 < low < high, got {low} and {high}.")
    center, half = (high + low) / 2, (high - low) / 2
    alphas, betas, ratio = [1 / center], [0.0], half / center
    for _ in range(steps - 1):
        new = 1 / (2 * center / half - ratio)
        alphas.append(2 * new / half)
        betas.append(new * ratio)
        ratio = new
    return np.array(alphas[:steps]), np.array(betas[:steps])


class NewtonSchulz(eqx.Module):
    r"""$\hat y_t = B_t X_t x_t$ with Newton's iteration for the inverse of $H_t = A_t + \tfrac1\lambda I$.

    $$X^{l+1} = X^l(2I - H_t X^l), \qquad X^0 = I/\mathrm{tr}\,H_t$$

    Each step squares the error $I - H_t X$, so K steps are a Neumann series of $2^K$ terms. Six are what the released
    code draws as least squares for in-context regression, and as Proposition 2 in its ablations.
    """

    log_lam: Float[Array, ""]
    steps: int = eqx.field(static=True)

    def __init__(self, lam: ArrayLike = 1000.0, *, steps: int = 6):
        self.log_lam, self.steps = jnp.log(_float(lam)), steps

    def __call__(self, context: Context) -> Float[Array, "*batch time value"]:
        q, k, v = context[:3]
        eye = jnp.eye(q.shape[-1], dtype=q.dtype)
        h = jnp.cumsum(k[..., :, None] * k[..., None, :], -3) + eye / _like(jnp.exp(self.log_lam), q)
        trace = jnp.trace(h, axis1=-2, axis2=-1)[..., None, None]
        x = jax.lax.fori_loop(0, self.steps, lambda _, x: _matmul(x, 2 * eye - _matmul(h, x)), eye / trace)
        return _attend(_matmul(x, q[..., None])[..., 0], k, v)


class KernelRegression(eqx.Module):
    r"""Softmax-kernel regression, the full induction head; zero as long as there is no pair.

    $$\hat y_t = \sum_{i\le t}\mathrm{softmax}_i(\beta\,k_i^\top x_t)\,v_i$$
    """

    log_beta: Float[Array, ""]

    def __init__(self, beta: ArrayLike):
        self.log_beta = jnp.log(_float(beta))

    def __call__(self, context: Context) -> Float[Array, "*batch time value"]:
        similar, usable = _similarities(context)
        logits = jnp.where(usable, _like(jnp.exp(self.log_beta), similar) * similar, -jnp.inf)
        any_pair = jnp.any(usable, -1, keepdims=True)
        weights = jax.nn.softmax(jnp.where(any_pair, logits, 0), -1)
        return jnp.where(any_pair, _matmul(weights, context.values), 0)


class NearestNeighbor(eqx.Module):
    r"""The limit β → ∞ of `KernelRegression`: the value whose key has the largest inner product with the query."""

    def __call__(self, context: Context) -> Float[Array, "*batch time value"]:
        similar, usable = _similarities(context)
        nearest = jnp.argmax(jnp.where(usable, similar, -jnp.inf), -1)[..., None]
        return jnp.where(
            jnp.any(usable, -1, keepdims=True), jnp.take_along_axis(context.values, nearest, -2), 0
        )


class DeltaRule(eqx.Module):
    r"""One gradient step per pair, on that pair only: $\Phi_t = \Phi_{t-1} + \eta\,(v_t - \Phi_{t-1}k_t)\,k_t^\top$."""

    eta: Float[Array, ""]

    def __init__(self, eta: ArrayLike):
        self.eta = _float(eta)

    def __call__(self, context: Context) -> Float[Array, "*batch time value"]:
        q, k, v = context[:3]
        out = delta_attention(q, k, v, jnp.broadcast_to(_like(self.eta, q), k.shape[:-1]))
        assert not isinstance(out, tuple)
        return out


def _float(x: ArrayLike) -> Array:
    return jnp.asarray(x, jnp.zeros(()).dtype)


def _like(parameter: Array, data: Array) -> Array:
    """A parameter in the precision of the data."""
    return parameter.astype(data.dtype)


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _attend(queries: Array, keys: Array, values: Array) -> Array:
    out = linear_attention(queries, keys, values)
    assert not isinstance(out, tuple)
    return out


def _with_start(start: Array, later: Array) -> Array:
    return jnp.concatenate([start[None], later])


def _before(context: Context, phi_0: Array | None) -> tuple[Array, Array]:
    r"""$\Phi_0 x_t$ and the residuals $v_t - \Phi_0 k_t$."""
    q, k, v = context[:3]
    if phi_0 is None:
        return jnp.zeros_like(v), v
    transposed = _like(phi_0, q).T
    return _matmul(q, transposed), v - _matmul(k, transposed)


def _frobenius(keys: Float[Array, "*batch time key"], ridge: Array) -> Float[Array, "*batch time 1"]:
    r"""$\lVert A_t + \text{ridge}\,I\rVert_F$ for all t, from
    $\lVert A_t\rVert_F^2 = \sum_{i,j\le t}(k_i^\top k_j)^2$ and $\mathrm{tr} A_t = \sum_{i\le t}\lVert k_i\rVert^2$."""
    products = _matmul(keys, jnp.swapaxes(keys, -1, -2)) ** 2
    squares = jnp.diagonal(jnp.cumsum(jnp.cumsum(products, -1), -2), axis1=-2, axis2=-1)
    trace = jnp.cumsum(jnp.sum(keys * keys, -1), -1)
    return jnp.sqrt(squares + 2 * ridge * trace + keys.shape[-1] * ridge**2)[..., None]


def _similarities(context: Context) -> tuple[Array, Bool[Array, "time time"]]:
    """Inner products of queries (rows) and keys, and which of them count."""
    time = context.queries.shape[-2]
    usable = jnp.tril(jnp.ones((time, time), bool)) & context.present
    return _matmul(context.queries, jnp.swapaxes(context.keys, -1, -2)), usable
