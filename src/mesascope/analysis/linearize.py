r"""Replace one attention layer at a time by linear attention, and see what it costs.

For the layer with inputs $x_t$ and outputs $y_t$, both recorded while the model reads fresh sequences,

$$\min_\theta\; \mathbb E\,\frac1T\sum_t
  \tfrac12\Big\lVert y_t - \sum_h P_h\sum_{i\le t} W_V^h x_i\,(W_K^h x_i)^\top W_Q^h x_t\Big\rVert^2,$$

then the linear layer takes its place, and the ratio of the losses with and without it is reported. All layers of all
models are distilled side by side. Learning rates are found: each is tried for a while on every layer, and each layer of
each model goes on with the one that served it best.

    models = run.models()
    linearize(models, run.config.examples, layer_sites(models), key=key)

Where queries and keys are given, the best values and outputs have a closed form (`best_write`): least squares of $y_t$
on $\sum_i x_i (k_i^\top q_t)$. It ends every distillation, within the width of the head's values, and without that
bound it is a check: a lower bound of what these queries and keys allow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.lax import Precision
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from mesascope.analysis.results import (
    Estimate,
    Result,
    Trace,
    check_paths,
    draw_points,
    drawing,
    loss_of,
    rows_size,
    seeds_of,
)
from mesascope.models import Transformer
from mesascope.ops import linear_attention
from mesascope.parts import layer_norm, positions
from mesascope.tasks import Examples
from mesascope.training import half_squared_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Sample = Callable[[PRNGKeyArray, int], Examples]
EXACT = Precision.HIGHEST


@dataclass(frozen=True, kw_only=True)
class Site:
    """An attention layer of somebody's model.

    Attributes:
        input: path of the activation that it reads, [..., time, model].
        output: path of what it adds to the stream, [..., time, model].
        prepare: from the activation to what the layer's matrices multiply (a normalization), for this model.
        codes: width of positional codes beside the inputs of queries and keys; 0 for none.
    """

    input: str
    output: str
    prepare: Callable[[PyTree, Array], Array] | None = None
    codes: int = 0


def layer_sites(model: Transformer) -> tuple[Site, ...]:
    """The attention layers of one of ours."""
    config = model.config
    if config.positions is not None and config.positions.at == "keys":
        raise ValueError(
            "positions: codes beside keys and queries themselves are no input of a linear layer; train with "
            "Positions(at='key_inputs')."
        )

    def prepare(i: int) -> Callable[[Any, Array], Array] | None:
        if not (config.layer_norm or config.masked):
            return None

        def prepared(model: Transformer, x: Array) -> Array:
            x = layer_norm(x, model.layers[i].mixer_norm)
            return jnp.where(jnp.arange(x.shape[-1]) < config.masked, 0, x)

        return prepared

    beside = 0 if config.positions is None or config.positions.at == "tokens" else config.positions.dim
    return tuple(
        Site(
            input="embedded" if i == 0 else f"blocks.{i - 1}.resid_post",
            output=f"blocks.{i}.mixer.out",
            prepare=prepare(i),
            codes=beside if i == 0 else 0,
        )
        for i in range(len(config.blocks))
    )


class LinearLayer(NamedTuple):
    """Linear attention: row vectors multiply these from the left; heads stand one after another."""

    queries: Float[Array, "*lead key_input heads*key"]
    keys: Float[Array, "*lead key_input heads*key"]
    values: Float[Array, "*lead model heads*key"]
    output: Float[Array, "*lead heads*key model"]


class Recorded(NamedTuple):
    """What layers read and gave back: the inputs of queries and keys, of values, and the outputs."""

    key_inputs: Float[Array, "*lead time key_input"]
    inputs: Float[Array, "*lead time model"]
    outputs: Float[Array, "*lead time model"]


def attend(
    layer: LinearLayer, heads: int, recorded: Recorded, *, precision: Precision = EXACT
) -> Float[Array, "*lead time model"]:
    """What the layer makes of these inputs."""
    mixed = _head_outputs(layer.queries, layer.keys, layer.values, heads, recorded, precision)
    return jnp.matmul(mixed, layer.output, precision=precision)


def best_write(
    queries: Float[Array, "key_input heads*key"],
    keys: Float[Array, "key_input heads*key"],
    recorded: Recorded,
    *,
    heads: int,
    ridge: float = 1e-9,
) -> LinearLayer:
    r"""The best products $P W_V$ for given queries and keys, in closed form; heads become as wide as the model.

    Args:
        recorded: [sequence, time, ...].
        ridge: of the normal equations, over their mean eigenvalue.
    """
    size, width = recorded.inputs.shape[-1], queries.shape[-1] // heads
    if width > size:
        raise ValueError(f"queries: expected heads at most as wide as the model, {size}, got {width}.")
    values = jnp.tile(jnp.eye(size, dtype=recorded.inputs.dtype), (1, heads))
    normal = _NormalEquations()
    normal.add(_head_outputs(queries, keys, values, heads, recorded), recorded.outputs)

    def padded(a: Array) -> Array:
        split = a.reshape(a.shape[0], heads, width)
        return jnp.pad(split, ((0, 0), (0, 0), (0, max(0, size - width)))).reshape(a.shape[0], -1)

    return LinearLayer(padded(queries), padded(keys), values, jnp.asarray(normal.solve(ridge), values.dtype))


@dataclass(frozen=True, kw_only=True, eq=False)
class Linearization(Result):
    """Linear layers, and models in which one takes the place of a layer.

    Attributes:
        paths: names along the axis "layer": where the layers' outputs stand.
        layers: the distilled layers.
        heads: of each.
        rate: the learning rate each was distilled with.
        residual: what is left of the layer's output, in squares over its squares, on sequences not trained on.
        least: the same for the closed form with the distilled queries and keys: no values and outputs do better (but
            for sampling, and up to the sequences it was solved on).
        loss: of the model as it is, by sequence.
        swapped: with one layer replaced.
        removed: with one layer left out, a control: what nothing depends on is replaced at no cost.
    """

    paths: tuple[str, ...]
    layers: LinearLayer
    heads: int
    rate: Float[np.ndarray, "seed layer"]
    residual: Float[np.ndarray, "seed layer"]
    least: Float[np.ndarray, "seed layer"]
    loss: Float[np.ndarray, "seed sequence"]
    swapped: Float[np.ndarray, "seed sequence layer"]
    removed: Float[np.ndarray, "seed sequence layer"]

    @property
    def ratio(self) -> Estimate:
        """Loss with the layer replaced over that of the model, by layer."""
        return Estimate.ratio(self.swapped, self.loss[..., None], "layer")

    @property
    def removed_ratio(self) -> Estimate:
        """Loss without the layer over that of the model, by layer."""
        return Estimate.ratio(self.removed, self.loss[..., None], "layer")

    @property
    def linear(self) -> Bool[np.ndarray, " layer"]:
        """Whether linear attention does what the layer does: the loss rises by less than 5%, and without the layer by
        more, whichever sequences and seeds had been drawn."""
        return self.ratio.below(1.05) & self.removed_ratio.above(1.05)

    def plot(self, *, ax: "Axes | None" = None) -> "Axes":
        """Ratios by layer."""
        with drawing(ax, size=rows_size(len(self.paths))) as ax:
            draw_points(ax, self.paths, self.ratio, zero=1.0)
            ax.set_xlabel("loss with the layer made linear, over that of the model")
        return ax


RATES = (1e-3, 3e-3, 1e-2, 3e-2)
FURTHER = 4  # rates beyond those asked for, at most
LOWER = 2  # times that a rate is lowered to a third, at most
# Batches on which outputs are solved for in closed form.
SOLVE = 8


def linearize(
    models: PyTree,
    sample: Sample,
    sites: Sequence[Site],
    *,
    trace: Trace = Transformer.trace,
    heads: int = 4,
    key_dim: int = 20,
    steps: int = 3000,
    batch_size: int = 64,
    rates: Sequence[float] = RATES,
    pilot: float = 0.1,
    test_sequences: int = 640,
    key: PRNGKeyArray,
) -> Linearization:
    """Distil every layer of every model, put each in its place and measure: `distil`, then `measure`.

    Args:
        models: with a seed axis (`stack([model])` for one).
        sample: fresh sequences, `sample(key, batch_size)`.
        sites: the layers; they must have one width.
        trace: `trace(model, tokens, edit={path: function})`, predictions and activations by path.
        heads, key_dim: of the linear layers.
        steps: of Adam, its rate falling to zero along a cosine.
        rates: to choose from, at first. Where the best of several is the smallest or the largest, further ones are
            tried beyond it.
        pilot: the part of `steps` for which each rate is tried.
        test_sequences: on which residuals and losses are measured, in batches.
    """
    distilled = distil(
        models, sample, sites, trace=trace, heads=heads, key_dim=key_dim, steps=steps, batch_size=batch_size,
        rates=rates, pilot=pilot, key=key,
    )  # fmt: skip
    return measure(
        models, sample, sites, distilled, trace=trace, heads=heads, batch_size=batch_size,
        test_sequences=test_sequences, key=key,
    )  # fmt: skip


class Distilled(NamedTuple):
    """Linear layers that give back what others do, as nearly as they can; see `Linearization`."""

    layers: LinearLayer
    rate: Float[np.ndarray, "seed layer"]
    least: Float[np.ndarray, "seed layer"]


def distil(
    models: PyTree,
    sample: Sample,
    sites: Sequence[Site],
    *,
    trace: Trace = Transformer.trace,
    heads: int = 4,
    key_dim: int = 20,
    steps: int = 3000,
    batch_size: int = 64,
    rates: Sequence[float] = RATES,
    pilot: float = 0.1,
    key: PRNGKeyArray,
) -> Distilled:
    """Distil every layer of every model, as `linearize` has it."""
    seeds, depth = seeds_of(models), len(sites)
    if not depth or steps < 10 or not rates:
        raise ValueError(
            f"expected sites, rates and at least 10 steps, got {depth}, {len(rates)} and {steps}."
        )
    record = _recorder(models, sites, trace)
    pilot_key, run_key, start_key, solve_key, test_key = jax.random.split(key, 5)

    # Layers differ a lot in the size of what they read and give back; in units of their own one set of rates fits all.
    first = jax.jit(lambda key: record(sample(key, batch_size).tokens))(solve_key)
    scale = jax.tree.map(lambda a: jnp.sqrt(jnp.mean(a * a, (2, 3, 4), keepdims=True)) + 1e-12, first)
    scale = scale._replace(key_inputs=scale.inputs)

    def draw(key: PRNGKeyArray) -> Recorded:
        return jax.tree.map(lambda a, s: a / s, record(sample(key, batch_size).tokens), scale)

    known = SOLVE * batch_size * first.inputs.shape[-2]
    if known < 2 * heads * first.inputs.shape[-1]:
        raise ValueError(
            f"batch_size: {heads} heads of outputs {first.inputs.shape[-1]} wide need at least twice as many positions "
            f"in {SOLVE} batches, got {known}."
        )

    # Sums over time grow with it: queries start small enough for outputs of order one.
    wide, size, time = first.key_inputs.shape[-1], first.inputs.shape[-1], first.inputs.shape[-2]
    inner, dtype = heads * key_dim, first.inputs.dtype

    def start(key: PRNGKeyArray) -> LinearLayer:
        keys = jax.random.split(key, 4)
        shapes = [(wide, inner), (wide, inner), (size, inner), (inner, size)]
        stds = [
            time**-0.5 * size**-0.5 * key_dim**-0.25,
            size**-0.5 * key_dim**-0.25,
            size**-0.5,
            0.1 * inner**-0.5,
        ]
        drawn = (
            s * jax.random.normal(k, shape, dtype) for k, shape, s in zip(keys, shapes, stds, strict=True)
        )
        return LinearLayer(*drawn)

    each = jax.vmap(jax.vmap(start))(jax.random.split(start_key, (seeds, depth)))

    rate, reached = _best_rates(each, draw, heads, max(10, int(pilot * steps)), rates, pilot_key)
    found, rate = _descend_surely(each, rate, reached, draw, heads, steps, run_key)
    solve_keys, test_keys = (jax.random.split(k, SOLVE) for k in (solve_key, test_key))
    found, least = _polish(found, heads, draw, solve_keys, test_keys)

    # Back to the units of the model.
    x, y = scale.inputs[..., 0], scale.outputs[..., 0]
    found = LinearLayer(found.queries / x, found.keys / x, found.values / x, found.output * y)
    return Distilled(found, rate, least)


def measure(
    models: PyTree,
    sample: Sample,
    sites: Sequence[Site],
    distilled: Distilled,
    *,
    trace: Trace = Transformer.trace,
    heads: int = 4,
    batch_size: int = 64,
    test_sequences: int = 640,
    key: PRNGKeyArray,
) -> Linearization:
    """Put each distilled layer in its place, as `linearize` has it."""
    test_key = jax.random.split(key, 5)[-1]
    layers, rate, least = distilled
    measured = _measure(models, sample, sites, trace, layers, heads, batch_size, test_sequences, test_key)
    paths = tuple(site.output for site in sites)
    return Linearization(paths=paths, layers=layers, heads=heads, rate=rate, least=least, **measured)


def swap(site: Site, model: PyTree, layer: LinearLayer, heads: int) -> dict[str, Callable[[Array], Array]]:
    """An edit that lets a linear layer take this one's place, whatever else is edited before it."""
    seen: list[Array] = []

    def notice(x: Array) -> Array:
        seen.append(x)
        return x

    def replace(out: Array) -> Array:
        recorded = _prepared(site, model, seen.pop(), layer.queries.shape[-2])
        return attend(layer, heads, recorded._replace(outputs=out))

    return {site.input: notice, site.output: replace}


def _prepared(site: Site, model: PyTree, x: Array, wide: int) -> Recorded:
    """What the layer's matrices multiply; codes of zeros for layers that have none, so that all have one width."""
    x = x if site.prepare is None else site.prepare(model, x)
    room = wide - x.shape[-1]
    codes = jnp.zeros((x.shape[-2], room), x.dtype)
    if site.codes:
        codes = codes.at[:, : site.codes].set(positions(x.shape[-2], site.codes, dtype=x.dtype))
    beside = jnp.concatenate([x, jnp.broadcast_to(codes, (*x.shape[:-1], room))], -1)
    return Recorded(beside, x, x)


def _recorder(models: PyTree, sites: Sequence[Site], trace: Trace) -> Callable[[Array], Recorded]:
    """From tokens to what all layers of all models read and gave back, [seed, layer, batch, time, width]."""
    most = max(site.codes for site in sites)

    def one(model: PyTree, tokens: Array) -> Recorded:
        _, seen = trace(model, tokens)
        check_paths([path for site in sites for path in (site.input, site.output)], seen)
        widths = {seen[site.input].shape[-1] for site in sites}
        if len(widths) > 1:
            raise ValueError(f"sites: expected layers of one width, got {sorted(widths)}.")
        layers = [
            _prepared(s, model, seen[s.input], seen[s.input].shape[-1] + most)._replace(
                outputs=seen[s.output]
            )
            for s in sites
        ]
        return jax.tree.map(lambda *a: jnp.stack(a), *layers)

    return lambda tokens: jax.lax.stop_gradient(jax.vmap(one, (0, None))(models, tokens))


def _head_outputs(
    queries: Array, keys: Array, values: Array, heads: int, recorded: Recorded, precision: Precision = EXACT
) -> Float[Array, "*lead time heads*value"]:
    matmul = partial(jnp.matmul, precision=precision)

    def split(a: Array) -> Array:
        return jnp.swapaxes(a.reshape(*a.shape[:-1], heads, -1), -2, -3)

    q, k = (split(matmul(recorded.key_inputs, w)) for w in (queries, keys))
    out = linear_attention(q, k, split(matmul(recorded.inputs, values)))
    assert not isinstance(out, tuple)
    out = jnp.swapaxes(out, -2, -3)
    return out.reshape(*out.shape[:-2], -1)


def _squares(layer: LinearLayer, heads: int, recorded: Recorded) -> Float[Array, ""]:
    """What is descended. On a GPU projections are single TF32 products, as where models are trained."""
    made = attend(layer, heads, recorded, precision=Precision.DEFAULT)
    return jnp.mean(half_squared_errors(made, recorded.outputs))


def _best_rates(
    layers: LinearLayer,
    draw: Callable[[PRNGKeyArray], Recorded],
    heads: int,
    steps: int,
    rates: Sequence[float],
    key: PRNGKeyArray,
) -> tuple[Float[np.ndarray, "seed layer"], Float[np.ndarray, "seed layer"]]:
    """For each layer, the rate with which it comes furthest in so many steps, and how far."""
    new, known = sorted(rates), dict[float, np.ndarray]()
    while True:
        # All new ones at once.
        many = jax.tree.map(lambda *copies: jnp.stack(copies), *[layers] * len(new))
        shape = (len(new), *layers.queries.shape[:2])
        tried = jnp.broadcast_to(jnp.asarray(new, layers.queries.dtype)[:, None, None], shape)
        _, late = _descend(many, tried, draw, heads, steps, key)
        known |= dict(zip(new, late, strict=True))
        order = sorted(known)
        losses = np.stack([known[rate] for rate in order])
        best = np.argmin(losses, 0)
        new = []
        if len(rates) > 1 and len(known) < len(rates) + FURTHER:
            new += [order[0] ** 2 / order[1]] * bool((best == 0).any())
            new += [order[-1] ** 2 / order[-2]] * bool((best == len(order) - 1).any())
        if not new:
            return np.asarray(order)[best], losses.min(0)


def _descend_surely(
    layers: LinearLayer,
    rates: Float[np.ndarray, "seed layer"],
    reached: Float[np.ndarray, "seed layer"],
    draw: Callable[[PRNGKeyArray], Recorded],
    heads: int,
    steps: int,
    key: PRNGKeyArray,
) -> tuple[LinearLayer, Float[np.ndarray, "seed layer"]]:
    """All steps; and where they lead less far than a few of them did, which a rate that was good for a while may do,
    again with lower rates. Returns the layers, and the rate of each."""
    flat, goal, trying = (
        jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), x) for x in (layers, reached, rates.copy())
    )

    def attempt(which: Int[np.ndarray, " some"]) -> tuple[LinearLayer, Float[np.ndarray, " some"]]:
        def batch(key: PRNGKeyArray) -> Recorded:
            return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[which][None], draw(key))

        start = jax.tree.map(lambda a: a[which][None, None], flat)
        pace = jnp.asarray(trying[which], layers.queries.dtype)[None, None]
        new, late = _descend(start, pace, batch, heads, steps, key)
        return jax.tree.map(lambda a: a[0, 0], new), late[0, 0]

    found, lowest, used, left = flat, np.full(trying.shape, np.inf), trying.copy(), np.arange(trying.size)
    for _ in range(1 + LOWER):
        new, late = attempt(left)
        better = late < lowest[left]
        at = left[better]
        found = LinearLayer(*(a.at[at].set(b[better]) for a, b in zip(found, new, strict=True)))
        lowest[at], used[at] = late[better], trying[at]
        left = np.flatnonzero(lowest > 1.02 * goal)  # other sequences
        if not left.size:
            break
        trying[left] /= 3
    return jax.tree.map(lambda a, b: a.reshape(b.shape), found, layers), used.reshape(rates.shape)


def _descend(
    layers: LinearLayer,
    rates: Float[Array, "rate seed layer"],
    draw: Callable[[PRNGKeyArray], Recorded],
    heads: int,
    steps: int,
    key: PRNGKeyArray,
) -> tuple[LinearLayer, Float[np.ndarray, "rate seed layer"]]:
    """Adam with a rate of its own for every layer, all on the same fresh sequences; and the mean loss of the last fifth
    of the steps, infinite where they diverged."""
    adam = optax.scale_by_adam()

    def total(layers: LinearLayer, batch: Recorded) -> tuple[Array, Array]:
        over_layers = jax.vmap(jax.vmap(lambda layer, r: _squares(layer, heads, r)))
        losses = jax.vmap(lambda some: over_layers(some, batch))(layers)
        return jnp.sum(losses), losses

    def step(carry: tuple[LinearLayer, PyTree], i: Int[Array, ""]):
        layers, state = carry
        gradient, losses = jax.grad(total, has_aux=True)(layers, draw(jax.random.fold_in(key, i)))
        # Entry by entry, and scaled by Adam, so that layers do not feel each other.
        direction, state = adam.update(gradient, state)
        falling = 0.5 * (1 + jnp.cos(jnp.pi * i.astype(rates.dtype) / steps))
        pace = (falling * rates)[..., None, None]
        return (jax.tree.map(lambda w, d: w - pace * d, layers, direction), state), losses

    @jax.jit
    def run(layers: LinearLayer) -> tuple[LinearLayer, Array]:
        (layers, _), curve = jax.lax.scan(
            step, (layers, adam.init(layers)), jnp.arange(steps, dtype=jnp.int32)
        )
        return layers, curve

    with jax.numpy_dtype_promotion("standard"):
        found, curve = run(layers)
    late = np.asarray(jnp.mean(curve[-max(1, steps // 5) :], 0))
    return found, np.where(np.isfinite(late), late, np.inf)


class _NormalEquations:
    """Least squares in float64 and numpy: no gradient is needed, and LAPACK stays out of compiled programs."""

    def __init__(self):
        self.gram = self.cross = np.zeros(())

    def add(self, features: Any, targets: Any) -> None:
        f, y = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (features, targets))
        self.gram, self.cross = self.gram + f.T @ f, self.cross + f.T @ y

    def solve(self, ridge: float) -> np.ndarray:
        size = len(self.gram)
        return np.linalg.solve(self.gram + ridge * np.trace(self.gram) / size * np.eye(size), self.cross)


def _polish(
    layers: LinearLayer,
    heads: int,
    draw: Callable[[PRNGKeyArray], Recorded],
    solve_keys: PRNGKeyArray,
    test_keys: PRNGKeyArray,
    ridge: float = 1e-9,
) -> tuple[LinearLayer, Float[np.ndarray, "seed layer"]]:
    """Outputs solved for, and the residual that `best_write` leaves on other sequences. Batches go by one at a time."""
    seeds, depth, size, _ = layers.values.shape
    # Heads wider than the model have values that are as good as free.
    free = layers.queries.shape[-1] // heads <= size
    eyes = jnp.tile(jnp.eye(size, dtype=layers.values.dtype), (1, heads))
    given = jax.tree.map(np.asarray, layers)
    features, drawn = jax.jit(_head_outputs, static_argnums=3), jax.jit(draw)

    def both(keys: PRNGKeyArray):
        """For every batch and layer: which, what its heads give with its own values and with free ones, what they
        should."""
        for key in keys:
            batch = jax.tree.map(np.asarray, drawn(key))
            for at in np.ndindex(seeds, depth):
                layer, here = (jax.tree.map(lambda a, at=at: a[at], x) for x in (given, batch))
                own = features(layer.queries, layer.keys, layer.values, heads, here)
                wide = features(layer.queries, layer.keys, eyes, heads, here) if free else own
                yield at, own, wide, here.outputs

    normal = {(at, kind): _NormalEquations() for at in np.ndindex(seeds, depth) for kind in ("own", "wide")}
    for at, own, wide, outputs in both(solve_keys):
        normal[at, "own"].add(own, outputs)
        normal[at, "wide"].add(wide, outputs)
    solved = {which: equations.solve(ridge) for which, equations in normal.items()}
    left, total = np.zeros((2, seeds, depth))
    for at, _, wide, outputs in both(test_keys):
        left[at] += np.sum((np.asarray(wide, np.float64) @ solved[at, "wide"] - np.asarray(outputs)) ** 2)
        total[at] += np.sum(np.asarray(outputs, np.float64) ** 2)
    output = np.reshape([solved[at, "own"] for at in np.ndindex(seeds, depth)], layers.output.shape)
    return layers._replace(output=jnp.asarray(output, layers.output.dtype)), left / total


def _measure(
    models: PyTree,
    sample: Sample,
    sites: Sequence[Site],
    trace: Trace,
    layers: LinearLayer,
    heads: int,
    batch_size: int,
    sequences: int,
    key: PRNGKeyArray,
) -> dict[str, np.ndarray]:
    """Residuals, and losses as they are, with each layer replaced and without it."""

    @jax.jit
    def batch(key: PRNGKeyArray) -> tuple[Array, ...]:
        examples = sample(key, batch_size)

        def one(model: PyTree, layers: LinearLayer) -> tuple[Array, ...]:
            predictions, seen = trace(model, examples.tokens)
            columns = []
            for i, site in enumerate(sites):
                layer = jax.tree.map(lambda a, i=i: a[i], layers)
                swapped, after = trace(model, examples.tokens, edit=swap(site, model, layer, heads))
                removed, _ = trace(model, examples.tokens, edit={site.output: jnp.zeros_like})
                error = jnp.sum((after[site.output] - seen[site.output]) ** 2)
                losses = loss_of(swapped, examples), loss_of(removed, examples)
                columns.append((*losses, error, jnp.sum(seen[site.output] ** 2)))
            of_layers = (jnp.stack(column, -1) for column in zip(*columns, strict=True))
            return loss_of(predictions, examples), *of_layers

        return jax.vmap(one)(models, layers)

    keys = jax.random.split(key, -(-sequences // batch_size))
    *losses, error, power = zip(*(jax.tree.map(np.asarray, batch(k)) for k in keys), strict=True)
    loss, swapped, removed = (np.concatenate(part, 1)[:, :sequences] for part in losses)
    return dict(residual=np.sum(error, 0) / np.sum(power, 0), loss=loss, swapped=swapped, removed=removed)
