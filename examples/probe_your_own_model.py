"""Probe a model that is not ours: a small recurrent network in plain JAX, trained here in seconds.

Every sequence follows its own random rotation, s_{t+1} = W s_t, and the network learns to predict what comes next. All
that mesascope has to know about it is a function that returns its activations by name. What does its memory hold?
Probes say: for the tokens that it has read, how far back it remembers, and for the next one, what it foresees. Next to
them stand three controls: the same network before training, targets of other sequences, and the token that it has just
read. Only what beats all three is news. Memory of the past is none: a random recurrent network has it as well.

    python examples/probe_your_own_model.py                # in the terminal
    python examples/probe_your_own_model.py horizon.png    # and as a figure (needs matplotlib)
"""

import sys

import jax
import jax.numpy as jnp
import optax

from mesascope import optimize
from mesascope.analysis.probes import Probes, probe
from mesascope.analysis.targets import next_token, past_tokens, sampler
from mesascope.tasks import Dynamics, Standard

OBS, HIDDEN, SEEDS = 2, 24, 3
TASK = Dynamics.linear(state_dim=OBS, length=16)


def initialize(key):
    keys = jax.random.split(key, 3)
    shapes = {"read": (OBS, HIDDEN), "keep": (HIDDEN, HIDDEN), "write": (HIDDEN, OBS)}
    return {
        name: jax.random.normal(k, shape, jnp.float32) / shape[0] ** 0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def activations(weights, tokens):
    """The whole interface: arrays [batch, time, width] by name."""

    def step(memory, token):
        memory = jnp.tanh(memory @ weights["keep"] + token @ weights["read"])
        return memory, memory

    start = jnp.zeros((tokens.shape[0], HIDDEN), tokens.dtype)
    _, memory = jax.lax.scan(step, start, jnp.swapaxes(tokens, 0, 1))
    memory = jnp.swapaxes(memory, 0, 1)
    return {"memory": memory, "predictions": memory @ weights["write"]}


def train(key, steps):
    def loss(weights, batch):
        return jnp.mean((activations(weights, batch.tokens)["predictions"] - batch.targets) ** 2)

    def batch(key):
        return Standard()(TASK.sample(key, 128).observations)

    start = initialize(key)
    trained, losses = optimize(loss, start, batch, steps=steps, optimizer=optax.adam(3e-3), key=key)
    return start, trained, losses


def main(figure: str | None = None, *, steps: int = 600) -> Probes:
    """Train, probe, print a horizon. Returns the probes."""
    keys = jax.random.split(jax.random.key(0), SEEDS)
    untrained, trained, losses = jax.vmap(lambda key: train(key, steps))(keys)
    print(f"loss: {losses[:, 0].mean():.3f} before training, {losses[:, -1].mean():.3f} after")

    sample = sampler(TASK, Standard(), {"s[t+1]": next_token, **past_tokens(range(6))})
    found = probe(
        trained, sample, untrained=untrained, activations=activations, paths=["memory"],
        sequences=2048, key=jax.random.key(99),
    )  # fmt: skip
    print("\nRelative error of reading a token from the memory at the last step (1: nothing to be read):\n")
    for i, name in enumerate(found.targets):
        error, fresh = found.relative.mean[i, 0, -1], found.relative_controls["untrained"].mean[i, 0, -1]
        news = "" if found.beats_controls[i, 0, -1] else "   (does not beat its controls)"
        print(f"  {name:7s} {'█' * round(40 * min(error, 1)):40s} {error:.3f}   untrained {fresh:.3f}{news}")
    if figure is not None:
        found.plot_targets("memory").figure.savefig(figure)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
