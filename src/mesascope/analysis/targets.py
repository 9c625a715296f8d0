r"""What probes look for in sequences from dynamical systems: functions of `Trajectories`, a vector for every position.

sample = sampler(config.task, config.tokens, {"next": next_token, **past_tokens(range(8))})
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from mesascope.analysis.probes import Batch, Sample
from mesascope.tasks.dynamics import Dynamics, Trajectories
from mesascope.tasks.tokens import Stacked, Tokens, delayed
from mesascope.theory.solvers import Context, MesaOptimizer, autoregressive

Target = Callable[[Trajectories], Array | np.ndarray]


def sampler(
    task: Dynamics,
    tokens: Tokens,
    targets: Mapping[str, Target],
    *,
    keep: Callable[[Trajectories], np.ndarray] | None = None,
) -> Sample:
    """Fresh sequences of a task, as a model is shown them, with these targets; `keep` as in `without_outliers`."""

    def sample(key: PRNGKeyArray, batch_size: int) -> Batch:
        drawn = task.sample(key, batch_size)
        shown = tokens(drawn.observations).tokens
        found = {name: target(drawn) for name, target in targets.items()}
        return Batch(shown, found, None if keep is None else keep(drawn))

    return sample


def next_token(drawn: Trajectories) -> Array:
    r"""$s_{t+1}$."""
    return drawn.observations[:, 1:]


def past_token(lag: int) -> Target:
    r"""$s_{t-\text{lag}}$, zero before the first."""
    return lambda drawn: delayed(drawn.observations[:, :-1], lag)


def past_tokens(lags: Sequence[int]) -> dict[str, Target]:
    """A horizon: `past_token` for each lag, by name."""
    return {f"s[t-{lag}]" if lag else "s[t]": past_token(lag) for lag in lags}


def hidden_state(lag: int = 0) -> Target:
    r"""$h_{t-\text{lag}}$ of the generator."""
    return lambda drawn: delayed(drawn.states[:, :-1], lag)


def teacher_features(lag: int = 0) -> Target:
    r"""$f^*(h_{t-\text{lag}})$; for nonlinear systems $\mathrm{MLP}^*$ of the state."""
    return lambda drawn: delayed(drawn.features[:, :-1], lag)


def stacked(k: int) -> Target:
    r"""$z_t^k = [s_t, \dots, s_{t-k+1}]$."""
    return lambda drawn: Stacked(k=k)(drawn.observations).tokens


def preconditioned(by: float | MesaOptimizer, *, inputs: Target | None = None) -> Target:
    r"""$(X_{t-1}X_{t-1}^\top + \tfrac1\lambda I)^{-1} x_t$, where the columns of $X_{t-1}$ are $x_1 \dots x_{t-1}$.

    Args:
        by: λ, for the exact solution; or an iteration, for its last iterate, such as
            `MesaOptimizer.chebyshev(low, high, steps=6)`.
        inputs: x: the observations unless given; `stacked(k)` or `teacher_features()`.
    """

    def target(drawn: Trajectories) -> Array | np.ndarray:
        context = autoregressive(
            drawn.observations, features=None if inputs is None else jnp.asarray(inputs(drawn))
        )
        if isinstance(by, MesaOptimizer):
            return _last_iterate(by, context)
        return exact_solution(np.asarray(context.queries), np.asarray(context.keys), by)

    return target


def without_outliers(
    target: Target, deviations: float = 2.0
) -> Callable[[Trajectories], Bool[np.ndarray, "batch time"]]:
    """Keep what is not much larger than usual: norms less than so many standard deviations above their batch's mean.

    Solutions of badly conditioned systems are rare and huge, and a mean of squares sees nothing else. The released code
    leaves them out of its probes of preconditioned inputs, with 2 deviations.
    """

    def keep(drawn: Trajectories) -> Bool[np.ndarray, "batch time"]:
        norms = np.linalg.norm(np.asarray(target(drawn), np.float64), axis=-1)
        return norms - norms.mean(0) <= deviations * norms.std(0)

    return keep


def exact_solution(
    queries: Float[np.ndarray, "batch time key"], keys: Float[np.ndarray, "batch time key"], lam: float
) -> Float[np.ndarray, "batch time key"]:
    r"""$(\sum_{i\le t} k_i k_i^\top + \tfrac1\lambda I)^{-1} x_t$ for all t, in float64 and on the host."""
    q, k = queries.astype(np.float64), keys.astype(np.float64)
    system = np.broadcast_to(np.eye(k.shape[-1]) / lam, (k.shape[0], k.shape[-1], k.shape[-1])).copy()
    out = np.empty(q.shape)
    for t in range(k.shape[1]):
        system += k[:, t, :, None] * k[:, t, None, :]
        out[:, t] = np.linalg.solve(system, q[:, t, :, None])[..., 0]
    return out


@jax.jit
def _last_iterate(by: MesaOptimizer, context: Context) -> Array:
    return by.preconditioned(context)[-1]
