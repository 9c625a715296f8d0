r"""In-context regression on past observations, and on encodings of them of limited width.

$$\hat s_{t+1} = \Phi_t u_t, \qquad u_t = E z_t^k, \qquad z_t^k = [s_t, s_{t-1}, \dots, s_{t-k+1}]$$

The regression $\Phi_t$ is the learner's own, from the sequence so far; E is the same for all sequences. With E the
identity this is least squares on k stacked observations. Which E of d rows is best is a bilevel problem: regression
inside, E outside (`optimize_encoder`). Keeping the last $d/n_s$ observations is one candidate (`copying`), what a
trained model's first layer computes is another (`compare_encoders`).
"""

from collections.abc import Sequence
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
    r"""$u_t = E z_t^k$, and the λ of the regression on it.

    Attributes:
        matrix: E. Columns are the entries of $z_t^k$, newest observation first; k is however many fit.
    """

    matrix: Float[Array, "code stack"]
    lam: Float[Array, ""]

    def predictions(self, observations: Float[Array, "batch time+1 obs"]) -> Float[Array, "batch time obs"]:
        r"""Predict $s_{t+1}$ from $u_t$ by ridge regression on all pairs $(u_i, s_{i+1})$ with $i < t$.

        $$\hat s_{t+1} = \Phi_t u_t, \qquad
          \Phi_t = \arg\min_\Phi \tfrac12\sum_{i<t}\lVert s_{i+1} - \Phi u_i\rVert^2
                   + \tfrac{1}{2\lambda}\lVert\Phi\rVert_F^2$$

        Exact at every t at once, and differentiable in E and λ in closed form. Before the first observation z
        holds zeros.

        Args:
            observations: $s_1 \dots s_{T+1}$, as tasks draw them; the last is only a target.
        """
        width, obs_dim = self.matrix.shape[1], observations.shape[-1]
        if width % obs_dim:
            raise ValueError(
                f"matrix: expected a multiple of {obs_dim} columns, the width of an observation, got {width}."
            )
        tokens = Stacked(k=width // obs_dim)(observations).tokens
        codes = matmul(tokens, self.matrix.T)
        return mesa_attention(codes, delayed(codes, 1), observations[:, :-1], self.lam)

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


# Half decades. λ below the range is linear attention, above it numerically unregularized in float32.
LAMS = tuple(float(x) for x in 10 ** np.arange(-3, 4.1, 0.5))


@partial(jax.jit, static_argnames="lams")
def with_best_lam(
    matrix: Float[Array, "code stack"],
    observations: Float[Array, "batch time+1 obs"],
    *,
    lams: Sequence[float] = LAMS,
) -> Encoder:
    r"""An encoder with the λ that serves it best on these sequences: a line search.

    Args:
        lams: candidates, in units of $d / \mathbb E\lVert u_t\rVert^2$, so that scaling E changes nothing.
    """
    tokens = Stacked(k=matrix.shape[1] // observations.shape[-1])(observations).tokens
    scaled = jnp.asarray(lams, matrix.dtype) / jnp.mean(matmul(tokens, matrix.T) ** 2)
    losses = jax.lax.map(lambda lam: jnp.mean(Encoder(matrix, lam).losses(observations)), scaled)
    return Encoder(matrix, scaled[jnp.argmin(losses)])


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
    start = with_best_lam(matrix, held_out)

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
    # λ by the same search as the start's: neither has an advantage.
    candidates = start, with_best_lam(found, held_out)
    mean = jax.jit(lambda encoder: jnp.mean(encoder.losses(held_out)))
    return min(candidates, key=lambda encoder: float(mean(encoder)))


def overlap(one: Float[Array, "code stack"], other: Float[Array, "code_2 stack"]) -> Float[Array, ""]:
    r"""How much of the smaller row space lies in the larger: 1 for all of it, 0 for nothing.

    $$\frac{\mathrm{tr}\,P P'}{\min(d, d')} = \text{mean of the squared cosines of the principal angles}$$

    with P and P' the projections on the row spaces, and d their dimensions. A random space gives
    $\max(d, d') / k n_s$ in expectation. (Noise in measured weights makes every row space as large as it can be: cut
    such an encoding down to its leading singular directions first.)
    """
    (P, d), (P_other, d_other) = (_projection(m) for m in (one, other))
    return jnp.sum(P * P_other) / jnp.minimum(d, d_other)


def _projection(matrix: Float[Array, "code stack"]) -> tuple[Float[Array, "stack stack"], Float[Array, ""]]:
    """On the row space, and its dimension."""
    _, sizes, rows = jnp.linalg.svd(matrix, full_matrices=False)
    kept = (sizes > sizes[0] * max(matrix.shape) * jnp.finfo(matrix.dtype).eps).astype(matrix.dtype)
    return matmul(rows.T * kept[None], rows), jnp.sum(kept)


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
    measure = jax.jit(lambda encoder: jnp.mean(encoder.losses(test), 1))
    losses = {name: measure(with_best_lam(m, tuning)) for name, m in matrices.items()}
    overlaps = {name: overlap(m, reference) for name, m in matrices.items()}
    return Comparison(_random_averaged(losses), _random_averaged(overlaps))


def _random_averaged(by_name: dict[str, Array]) -> dict[str, Array]:
    controls = [x for name, x in by_name.items() if name.startswith("random")]
    others = {name: x for name, x in by_name.items() if not name.startswith("random")}
    return others | {"random": jnp.mean(jnp.stack(controls), 0)}


@partial(jax.jit, static_argnums=(0, 2))
def _observations(task: Dynamics, key: PRNGKeyArray, sequences: int) -> Float[Array, "batch time+1 obs"]:
    return task.sample(key, sequences).observations
