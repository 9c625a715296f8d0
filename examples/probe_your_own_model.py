"""Probe a model that is not ours: a small recurrent network in plain JAX, trained here in seconds.

Every sequence follows its own random rotation, s_{t+1} = W s_t, and the network learns to predict what comes next. All
that mesascope has to know about it is a function that returns its activations by name. What does its memory hold?
Probes say: for the tokens that it has read, how far back it remembers, and for the next one, what it foresees. Next to
them stand three controls: the same network before training, targets of other sequences, and the token that it has just
read. Only what beats all three is news. Memory of the past is none: a random recurrent network has it as well.

The same function is all that the other tools need: does the network learn while it reads, does it predict what least
squares predicts, which tokens is its memory sensitive to, and does it learn from pairs [x, y, x, y, ...] that it was
never trained on?

    python examples/probe_your_own_model.py                # in the terminal
    python examples/probe_your_own_model.py horizon.png    # and as a figure (needs matplotlib)
"""

import sys

import jax
import jax.numpy as jnp
import optax

from mesascope import optimize
from mesascope.analysis.binding import sensitivity
from mesascope.analysis.few_shot import control_curve, early_ascent, regression_curve
from mesascope.analysis.probes import Probes, probe
from mesascope.analysis.scores import distance, in_context_score
from mesascope.analysis.targets import next_token, past_tokens, sampler
from mesascope.tasks import Dynamics, FewShot, Standard
from mesascope.theory.solvers import Ridge, autoregressive

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


def predict(weights, tokens):
    return activations(weights, tokens)["predictions"]


def errors(weights, batch):
    return jnp.sum((predict(weights, batch.tokens) - batch.targets) ** 2, -1) / 2


def chance(batch):
    """What it costs to know nothing, and to predict zero."""
    return jnp.sum(batch.targets**2, -1) / 2


def observations(key, size):
    return TASK.sample(key, size).observations


def batch(key, size):
    return Standard()(observations(key, size))


def train(key, steps):
    def loss(weights, batch):
        return jnp.mean(errors(weights, batch))

    start = initialize(key)
    trained, losses = optimize(
        loss, start, lambda key: batch(key, 128), steps=steps, optimizer=optax.adam(3e-3), key=key
    )
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

    key = jax.random.key(7)
    score = in_context_score(trained, batch, losses=errors, chance=chance, key=key)
    print(
        f"\nin-context score {score.score}: {'learns' if score.learns else 'does not learn'} while it reads"
    )
    near = distance(
        trained, observations, predict=lambda weights, s: predict(weights, s[:, :-1]),
        algorithm=lambda s: Ridge(100.0)(autoregressive(s)), control=lambda s: s[:, :-1], key=key,
    )  # fmt: skip
    print(f"distance of its last prediction from that of least squares: {near.model[-1]}")
    print(f"and of saying again what it has just read: {near.control[-1]}")
    depends = sensitivity(
        trained, lambda key, size: batch(key, size).tokens, activations=activations, path="memory",
        times=[8], key=key,
    )  # fmt: skip
    shares = ", ".join(f"{share:.2f}" for share in depends.shares.mean[0, 8:3:-1])
    print(f"its memory depends on tokens t, t-1, ... by {shares} of the whole")
    pairs = FewShot(dim=OBS, length=16)
    shown = regression_curve(trained, pairs, predict=predict, key=key)
    control = control_curve(Ridge(100.0), pairs, key=key)
    print("regression from pairs, loss of the network and of least squares:")
    for i in (0, 3, 7):
        print(f"  pair {i + 1}: {shown.loss[i]}, {control.loss[i]}")
    print(f"early ascent: {early_ascent(shown).present}")
    if figure is not None:
        found.plot_targets("memory").figure.savefig(figure)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
