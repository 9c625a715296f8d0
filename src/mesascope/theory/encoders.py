r"""In-context regression on past observations, and on encodings of them of limited width.

$$\hat s_{t+1} = \Phi_t u_t, \qquad u_t = E z_t^k, \qquad z_t^k = [s_t, s_{t-1}, \dots, s_{t-k+1}]$$

The regression $\Phi_t$ is the learner's own, from the sequence so far; E is the same for all sequences. With E the
identity this is least squares on k stacked observations. Which E of d rows is best is a bilevel problem: regression
inside, E outside (`optimize_encoder`). Keeping the last $d/n_s$ observations is one candidate (`copying`), what a
trained model's first layer computes is another (`compare_encoders`).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from mesascope.ops import mesa_attention
from mesascope.ops.factor import matmul
from mesascope.tasks import Dynamics, Stacked
from mesascope.tasks.tokens import delayed
from mesascope.training import AdamW, WarmupCosine, half_squared_errors, optimize


class Encoder(NamedTuple):
    r"""$u_t = E z_t^k$, and how the regression on it is done.

    Attributes:
        matrix: E. Columns are the entries of $z_t^k$, newest observation first; k is however many fit.
        lam: λ.
        padded_weight: weight $\beta_i$ of the pairs with $i < k$, where z still holds zeros for what came before the
            sequence. They obey no linear law. The paper counts them like all others (1), which helps early in a
            sequence and costs accuracy later; 0 leaves them out.
    """

    matrix: Float[Array, "code stack"]
    lam: float | Float[Array, ""]
    padded_weight: float | Float[Array, ""] = 1.0

    def predictions(self, observations: Float[Array, "batch time+1 obs"]) -> Float[Array, "batch time obs"]:
        r"""Predict $s_{t+1}$ from $u_t$ by ridge regression on all pairs $(u_i, s_{i+1})$ with $i < t$.

        $$\hat s_{t+1} = \Phi_t u_t, \qquad
          \Phi_t = \arg\min_\Phi \tfrac12\sum_{i<t}\beta_i\lVert s_{i+1} - \Phi u_i\rVert^2
                   + \tfrac{1}{2\lambda}\lVert\Phi\rVert_F^2$$

        Exact at every t at once, and differentiable in E and λ in closed form.

        Args:
            observations: $s_1 \dots s_{T+1}$, as tasks draw them; the last is only a target.
        """
        width, obs_dim = self.matrix.shape[1], observations.shape[-1]
        if width % obs_dim:
            raise ValueError(
                f"matrix: expected a multiple of {obs_dim} columns, the width of an observation, got {width}."
            )
        k = width // obs_dim
        codes = matmul(Stacked(k=k)(observations).tokens, self.matrix.T)
        # The pair that enters at time t is (u_{t-1}, s_t), the very first of them (0, s_1).
        padded = jnp.arange(codes.shape[1]) < k
        beta = jnp.where(padded, jnp.asarray(self.padded_weight, codes.dtype), jnp.ones((), codes.dtype))
        return mesa_attention(codes, delayed(codes, 1), observations[:, :-1], self.lam, beta=beta)

    def losses(self, observations: Float[Array, "batch time+1 obs"]) -> Float[Array, "batch time"]:
        """½‖error‖² of every prediction."""
        return half_squared_errors(self.predictions(observations), observations[:, 1:])


def copying(obs_dim: int, width: int, *, k: int | None = None) -> Float[Array, "code stack"]:
    r"""The E that keeps the first `width` numbers of $z_t^k$: the last `width / obs_dim` observations.

    Args:
        k: how many observations E sees; by default no more than it keeps, and E is the identity.
    """
    k = -(-width // obs_dim) if k is None else k
    if not 1 <= width <= k * obs_dim:
        raise ValueError(f"width: expected between 1 and the {k * obs_dim} numbers of z, got {width}.")
    return jnp.eye(width, k * obs_dim, dtype=jnp.float32)


# Decades, then ever smaller steps from the best of them. Below the range is linear attention; above it the
# regularizer is lost in the rounding errors of float32.
LAMS = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e4)
REFINEMENTS = tuple(10**step for size in (0.5, 0.25, 0.125) for step in (size, -size))


def with_best_lam(
    matrix: Float[Array, "code stack"],
    observations: Float[Array, "batch time+1 obs"],
    *,
    padded_weight: float = 1.0,
    lams: tuple[float, ...] = LAMS,
) -> Encoder:
    r"""An encoder with the λ that serves it best on these sequences: a line search.

    Args:
        padded_weight: see `Encoder`.
        lams: candidates, in units of $d / \mathbb E\lVert u_t\rVert^2$, so that scaling E changes nothing. The search
            goes on between them, down to an eighth of a decade.
    """
    return _line_search(matrix, observations, padded_weight, lams)[0]


@partial(jax.jit, static_argnames="lams")
def _line_search(
    matrix: Array, observations: Array, padded_weight: float = 1.0, lams: tuple[float, ...] = LAMS
) -> tuple[Encoder, Array]:
    """The best λ, and the loss with it."""
    dtype = matrix.dtype
    tokens = Stacked(k=matrix.shape[1] // observations.shape[-1])(observations).tokens
    unit = 1 / jnp.mean(matmul(tokens, matrix.T) ** 2)

    def attempt(
        best: tuple[Array, Array], candidate: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array], None]:
        (lam, loss), (value, refines) = best, candidate
        other = value * jnp.where(refines, lam, unit)
        other_loss = jnp.mean(Encoder(matrix, other, padded_weight).losses(observations))
        better = other_loss < loss
        return (jnp.where(better, other, lam), jnp.where(better, other_loss, loss)), None

    values = jnp.asarray((*lams, *REFINEMENTS), dtype)
    start = (unit, jnp.full((), jnp.inf, dtype))
    (lam, loss), _ = jax.lax.scan(attempt, start, (values, jnp.arange(len(values)) >= len(lams)))
    return Encoder(matrix, lam, jnp.asarray(padded_weight, dtype)), loss


def optimize_encoder(
    task: Dynamics,
    matrix: Float[Array, "code stack"],
    *,
    steps: int,
    batch_size: int = 64,
    optimizer: AdamW | None = None,
    validation: int = 1024,
    key: PRNGKeyArray,
) -> Encoder:
    r"""Find the encoding of past observations on which in-context regression predicts best.

    $$\min_{E, \lambda}\; \mathbb E\; \frac1T\sum_{t=1}^{T}
      \tfrac12\lVert s_{t+1} - \Phi_t(E, \lambda)\,E z_t^k\rVert^2$$

    with $\Phi_t$ the regression of `Encoder.predictions`, and the expectation over sequences, each from a system of
    its own. The gradient flows through the regression.

    The loss depends on E only up to a rotation of the code, $E \to QE$: compare row spaces (`overlap`).

    Args:
        matrix: where to start, for example `copying`.
        steps: of the optimizer, each on `batch_size` new sequences.
        optimizer: default: Adam with a peak rate of .02, brought down along half a cosine.
        validation: sequences for the choice of λ and for the last check: where the outcome is worse on them than the
            start, the start is returned.
    """
    if optimizer is None:
        rate = WarmupCosine(peak=2e-2, warmup=0, end=steps, floor=0.0)
        optimizer = AdamW(rate=rate, weight_decay=0.0, clip=None)
    check_key, key = jax.random.split(key)
    held_out = _observations(task, check_key, validation)
    start, before = _line_search(matrix, held_out)

    def loss(params: tuple[Array, Array], observations: Array) -> Array:
        matrix, log_lam = params
        return jnp.mean(Encoder(matrix, jnp.exp(log_lam)).losses(observations))

    (found, _), _ = optimize(
        loss,
        (start.matrix, jnp.log(start.lam)),
        lambda key: task.sample(key, batch_size).observations,
        steps=steps,
        optimizer=optimizer,
        key=key,
    )
    # λ by the same search as the start's, so that neither has an advantage.
    outcome, after = _line_search(found, held_out)
    return outcome if after < before else start


def overlap(one: Float[Array, "code stack"], other: Float[Array, "code_2 stack"]) -> Float[Array, ""]:
    r"""How much of the smaller row space lies in the larger: 1 for all of it, 0 for nothing.

    $$\frac{\mathrm{tr}\,P P'}{\min(d, d')} = \text{mean of the squared cosines of the principal angles}$$

    with P and P' the projections on the row spaces, and d their dimensions. A random space gives
    $\max(d, d') / k n_s$ in expectation. (Noise in measured weights makes every row space as large as it can be: take
    the `leading` directions of such an encoding first.)
    """
    (P, d), (P_other, d_other) = (_projection(m) for m in (one, other))
    return jnp.sum(P * P_other) / jnp.minimum(d, d_other)


def _projection(matrix: Float[Array, "code stack"]) -> tuple[Float[Array, "stack stack"], Float[Array, ""]]:
    """On the row space, and its dimension."""
    _, sizes, rows = jnp.linalg.svd(matrix, full_matrices=False)
    kept = (sizes > sizes[0] * max(matrix.shape) * jnp.finfo(matrix.dtype).eps).astype(matrix.dtype)
    return matmul(rows.T * kept[None], rows), jnp.sum(kept)


def leading(matrix: Float[Array, "rows stack"], width: int) -> Float[Array, "code stack"]:
    """The closest encoding (up to rotation) that is only `width` wide: the leading singular directions, with sizes.

    A residual stream is wider than what one layer writes into it; this is the part that matters.
    """
    _, sizes, rows = jnp.linalg.svd(matrix, full_matrices=False)
    return sizes[:width, None] * rows[:width]


class Comparison(NamedTuple):
    """An encoder beside others of its width, on sequences none of them has seen.

    Attributes:
        losses: of each sequence, averaged over time: of the encoder in question (`given`), of the one to compare it
            with (`reference`), of `copying`, and of encoders with independent normal entries (`random`, the mean over
            draws).
        overlaps: of the reference's row space with those of the same encoders.
    """

    losses: dict[str, Float[Array, " batch"]]
    overlaps: dict[str, Float[Array, ""]]

    def mean_and_error(self, name: str, minus: str | None = None) -> tuple[float, float]:
        """Mean loss and its standard error; of the difference to another, paired sequence by sequence."""
        x = np.asarray(self.losses[name], np.float64)
        x = x if minus is None else x - np.asarray(self.losses[minus], np.float64)
        return float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x)))


def compare_encoders(
    given: Float[Array, "code stack"],
    reference: Float[Array, "code stack"],
    task: Dynamics,
    *,
    sequences: int = 1024,
    random_encoders: int = 4,
    key: PRNGKeyArray,
) -> Comparison:
    """Hold an encoding, such as a trained model's first layer computes, against an optimized one.

    Every encoder gets its own best λ, found on other sequences than those it is measured on. A measured encoding has to
    be put as a matrix on $z_t^k$, newest observation first; its scale and basis do not matter for the overlap, its
    basis only through the regularizer for the loss.

    Args:
        given: the encoding in question.
        reference: of the same shape, for example from `optimize_encoder`.
        sequences: how many to measure on, and how many to choose λ on.
        random_encoders: how many the control is averaged over.
    """
    if given.shape != reference.shape:
        raise ValueError(f"given: expected the reference's shape {reference.shape}, got {given.shape}.")
    tune_key, test_key, random_key = jax.random.split(key, 3)
    tuning, test = (_observations(task, k, sequences) for k in (tune_key, test_key))
    draws = jax.random.normal(random_key, (random_encoders, *given.shape), given.dtype)
    matrices = dict(
        given=given,
        reference=reference,
        copying=copying(task.obs_dim, given.shape[0], k=given.shape[1] // task.obs_dim),
        **{f"random {i}": draw for i, draw in enumerate(draws)},
    )
    losses = {name: _by_sequence(with_best_lam(m, tuning), test) for name, m in matrices.items()}
    overlaps = {name: overlap(m, reference) for name, m in matrices.items()}
    return Comparison(_random_averaged(losses), _random_averaged(overlaps))


def _random_averaged(by_name: dict[str, Array]) -> dict[str, Array]:
    controls = [x for name, x in by_name.items() if name.startswith("random")]
    others = {name: x for name, x in by_name.items() if not name.startswith("random")}
    return others | {"random": jnp.mean(jnp.stack(controls), 0)}


@jax.jit
def _by_sequence(encoder: Encoder, observations: Array) -> Float[Array, " batch"]:
    return jnp.mean(encoder.losses(observations), 1)


@partial(jax.jit, static_argnums=(0, 2))
def _observations(task: Dynamics, key: PRNGKeyArray, sequences: int) -> Float[Array, "batch time+1 obs"]:
    return task.sample(key, sequences).observations
