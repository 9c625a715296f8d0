"""The scope on a model that is not ours: plain arrays, a plain function, and one line per activation.

All that the tools ask for is `trace(params, tokens, edit=...)`, which returns predictions and activations by name, and
which lets `edit` replace an activation on its way. Here it is two heads of softmax attention over tokens that hold an
observation and the one before it, trained to predict the next point of circles that turn at different speeds.

    python examples/linearize_your_own_model.py                # ratios and effects
    python examples/linearize_your_own_model.py effects.png    # and a figure (needs matplotlib)
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mesascope
from mesascope.analysis.binding import attention_maps
from mesascope.analysis.circuits import products
from mesascope.analysis.interventions import ablate, effects, patch
from mesascope.analysis.linearize import Site, linearize
from mesascope.tasks import Constructed, Examples

HEADS, KEY_DIM, TIME = 2, 4, 12


def sample(key: jax.Array, batch: int) -> Examples:
    """Points on circles; tokens [0, s_t, s_{t-1}]."""
    speed, start = jax.random.uniform(key, (2, batch, 1), minval=-3, maxval=3)
    angle = start + speed * jnp.arange(TIME + 1)
    return Constructed(slots=3)(jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1))


def trace(params, tokens, edit=None):
    """Your model: name what you compute, and pass it through `edit`."""
    seen = {}

    def tap(name, value):
        seen[name] = (edit or {}).get(name, lambda x: x)(value)
        return seen[name]

    def heads(a):
        return jnp.swapaxes(a.reshape(*a.shape[:-1], HEADS, KEY_DIM), -2, -3)

    x = tap("stream", tokens)
    q, k, v = (heads(x @ params[name]) for name in ("queries", "keys", "values"))
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[-2],) * 2, bool)), q @ jnp.swapaxes(k, -1, -2), -jnp.inf)
    maps = tap("maps", jax.nn.softmax(scores))
    mixed = jnp.swapaxes(tap("heads", maps @ v), -2, -3)
    out = tap("attention", mixed.reshape(*x.shape[:-1], -1) @ params["output"])
    return (x + out)[..., :2], seen


def start(key: jax.Array):
    inner, names = HEADS * KEY_DIM, ("queries", "keys", "values", "output")
    shapes = [(6, inner)] * 3 + [(inner, 6)]
    keys = jax.random.split(key, 4)
    return {n: 0.3 * jax.random.normal(k, s) for n, k, s in zip(names, keys, shapes, strict=True)}


def loss(all_params, batch: Examples):
    """Of two models side by side; every array has a seed axis first."""
    predictions = jax.vmap(lambda params: trace(params, batch.tokens)[0])(all_params)
    return jnp.mean(jnp.sum((predictions - batch.targets) ** 2, -1))


def main(figure: str | None = None, steps: int = 1500):
    """Train it, look inside. Returns the ratio of losses with the layer made linear, and the effects."""
    key = jax.random.key(0)
    models, losses = mesascope.optimize(
        loss, jax.vmap(start)(jax.random.split(key, 2)), lambda key: sample(key, 64),
        steps=steps, optimizer=optax.adam(1e-2), key=key,
    )  # fmt: skip
    print(f"trained: loss {losses[0]:.3f} to {losses[-1]:.3f}")

    site = Site(input="stream", output="attention")
    linear = linearize(
        models, sample, [site], trace=trace, heads=HEADS, key_dim=KEY_DIM, steps=steps, batch_size=64, key=key,
    )  # fmt: skip
    ratio = linear.ratio[0]
    print(f"made linear: {ratio} times the loss (95%)")

    cases = {f"no head {h + 1}": ablate("heads", head=h) for h in range(HEADS)}
    cases |= {"no attention": ablate("attention"), "another's attention": patch("attention")}
    found = effects(models, sample, cases, trace=trace, key=key)
    for i, name in enumerate(found.names):
        far = np.nanmean(found.distance.mean[i])
        print(
            f"{name:>20}: loss {found.difference.mean[i]:+.3f}, predictions {far:.2f} of their squares away"
        )

    maps = attention_maps(
        models, lambda key, batch: sample(key, batch).tokens, paths=["maps"], key=key,
        activations=lambda params, tokens: trace(params, tokens)[1],
    )  # fmt: skip
    print(maps.verdict())

    weights = products(models, heads=HEADS)
    read = np.abs(np.asarray(weights.read)).reshape(2, HEADS, 3, 2, 3, 2).sum((0, 1, 3, 5))
    row, column = np.unravel_index(np.argmax(read), read.shape)
    print(f"heads compare mostly slot {row + 1} of keys' tokens with slot {column + 1} of queries' tokens")
    if figure is not None:
        found.plot().figure.savefig(figure, dpi=150)
    return ratio, found


if __name__ == "__main__":
    main(*sys.argv[1:2])
