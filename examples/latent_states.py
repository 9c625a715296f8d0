"""How many past observations does in-context least squares need? Loss against k, beside the best possible.

A system of fifteen hidden dimensions shows five of them at a time, so one observation does not tell the state, and
three would, were there no noise. Ridge regression on the last k observations learns every sequence from the sequence
itself; the Kalman filter below it is told the system's matrices. λ is chosen for each k on other sequences. Pairs
from the first k - 1 steps contain zeros for what came before the sequence and fit no linear law: counted, they help
early and hurt later; so both are shown.

Intervals are for the sequences measured on. They do not cover the choice of λ, which is made for the mean over all
steps: the loss of the last ten moves with it by more than its interval says.

    python examples/latent_states.py
"""

import jax
import jax.numpy as jnp
import numpy as np

from mesascope.tasks import Dynamics
from mesascope.theory.encoders import copying, with_best_lam
from mesascope.theory.latent import System

TASK = Dynamics.partially_observed()


def with_interval(x: np.ndarray) -> str:
    """Mean over sequences, and 1.96 standard errors."""
    return f"{x.mean():7.4f} ± {1.96 * x.std(ddof=1) / np.sqrt(len(x)):.4f}"


def main(
    ks: tuple[int, ...] = (1, 2, 3, 4, 5, 8), sequences: int = 512, seed: int = 0
) -> dict[str, np.ndarray]:
    """Print the table, and return for each row ½‖error‖² by sequence and time."""
    sample = jax.jit(lambda key: TASK.sample(key, sequences))
    tuning, test = (sample(key) for key in jax.random.split(jax.random.key(seed)))
    results = {}
    losses = jax.jit(lambda encoder, observations: encoder.losses(observations))
    for counted, weight in (("all pairs", 1.0), ("no padded pairs", 0.0)):
        for k in ks:
            encoder = with_best_lam(
                copying(TASK.obs_dim, k * TASK.obs_dim), tuning.observations, padded_weight=weight
            )
            results[f"k = {k:2d}, {counted}"] = np.asarray(losses(encoder, test.observations))

    # States start uniform in [-1, 1], with variance 1/3.
    covariance = jnp.eye(TASK.state_dim) / 3

    @jax.jit
    @jax.vmap
    def filtered(transition, readout, observations):
        system = System(transition, readout, TASK.state_noise, TASK.observation_noise)
        errors = system.kalman_predictions(observations[:-1], covariance) - observations[1:]
        return 0.5 * jnp.sum(errors**2, -1)

    results["Kalman filter"] = np.asarray(filtered(test.transition, test.readout, test.observations))

    print(f"{'½‖error‖²':26s}{'all steps':>18s}{'last ten':>18s}   last ten, log scale")
    for name, x in results.items():
        late = x[:, -10:].mean(1)
        bar = "█" * max(1, round(14 * np.log10(late.mean() / 1e-3)))
        print(f"{name:26s}{with_interval(x.mean(1)):>18s}{with_interval(late):>18s}   {bar}")
    return results


if __name__ == "__main__":
    main()
