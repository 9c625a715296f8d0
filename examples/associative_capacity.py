"""How many associations a matrix can hold: least squares > delta rule > Hebb.

Pairs of random signs are written into a memory one after the other, then each key is asked for its value. Hebb's rule,
which is linear attention, adds up outer products, and every pair disturbs every other. The delta rule corrects the
memory's error on each new pair, at the cost of older ones. Least squares, the mesa-layer, corrects for all at once, and
holds as many pairs as there are neurons.

    python examples/associative_capacity.py                 # in the terminal
    python examples/associative_capacity.py capacity.png    # and as a figure (needs matplotlib)
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mesascope.theory.solvers import Algorithm, DeltaRule, GradientStep, Ridge, recall

WIDTH, MEMORIES = 64, 32
PAIRS = tuple(range(8, 81, 2))
# Any rate is as good for Hebb's signs. For the delta rule a half is better than 1, which forgets more.
RULES = {"Hebb": GradientStep(1.0), "delta rule": DeltaRule(0.5), "least squares": Ridge(1e4)}


def wrong_signs(rule: Algorithm, seed: int = 0) -> Float[Array, " counts"]:
    """The share of signs recalled wrongly, for each number of pairs."""
    rng, most = np.random.default_rng(seed), max(PAIRS)
    keys = jnp.asarray(rng.choice([-1, 1], (MEMORIES, most, WIDTH)) / np.sqrt(WIDTH), jnp.float32)
    values = jnp.asarray(rng.choice([-1.0, 1.0], (MEMORIES, most, WIDTH)), jnp.float32)

    def share(pairs: Array) -> Array:
        real = jnp.arange(most) < pairs
        context = recall(jnp.where(real[:, None], keys, 0), values)
        missed = (rule(context) * context.targets <= 0)[:, most:] & real[:, None]
        return jnp.sum(missed) / (pairs * WIDTH * MEMORIES)

    return jax.jit(lambda counts: jax.lax.map(share, counts))(jnp.asarray(PAIRS))


def main(figure: str | None = None) -> dict[str, int]:
    """Print, and draw, how recall fails. Returns each rule's capacity: pairs with at most 1% of signs wrong."""
    curves = {name: np.asarray(wrong_signs(rule)) for name, rule in RULES.items()}
    capacity = {name: int(np.array(PAIRS)[curve <= 0.01].max()) for name, curve in curves.items()}
    print(
        f"{WIDTH} neurons, {MEMORIES} memories; pairs held with at most 1% of signs wrong, and wrong at 32 pairs:\n"
    )
    for name, curve in curves.items():
        bar = "█" * round(50 * capacity[name] / max(PAIRS))
        print(f"  {name:14s} {bar} {capacity[name]:2d}   {curve[PAIRS.index(32)]:.1%}")
    if figure is not None:
        draw(curves, figure)
    return capacity


def draw(curves: dict[str, np.ndarray], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(np.array(PAIRS) / WIDTH, 100 * curve, label=name)
    axes.set_xlabel("pairs per neuron")
    axes.set_ylabel("signs recalled wrongly, %")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:2])
