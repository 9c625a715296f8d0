r"""What a linear attention layer computes, read from its weights.

A head of linear attention depends on its four matrices only through two products. On column vectors,

$$o_t = \sum_{i\le t} (P W_V\, e_i)\,(e_i^\top W_K^\top W_Q\, e_t),$$

so one layer is known when $W_K^\top W_Q$ ("read") and $P W_V$ ("write") of each head are. Tokens are made of slots, n
entries each, and training leaves blocks that are multiples of the identity: $c_{ab} I$ at slots (a, b). CompressedAlg
keeps nothing but the means of these diagonals, $c_{ab} = \frac1n\mathrm{tr}\,M_{ab}$: the orthogonal projection on such
matrices.

    models = run.models()
    products = products_of(models)                 # or products({"queries": ..., ...}, heads=4) for anybody's weights
    scalars = read_off(products, width=10)         # 16 per product: 32 per head and layer
    compressed = from_products(models, scalars.products())
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mesascope.analysis.results import (
    Estimate,
    Result,
    draw_curve,
    draw_points,
    draw_tiles,
    drawing,
    loss_of,
    rows_size,
    seeds_of,
    tiles_size,
)
from mesascope.models import Linear, Transformer
from mesascope.tasks import Examples

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = ("queries", "keys", "values", "output")


class Products(NamedTuple):
    r"""Both products of every head, acting on column vectors.

    Attributes:
        read: $W_K^\top W_Q$: slots of the key's token by slots of the query's.
        write: $P W_V$: slots that are written by slots of the value's token.
    """

    read: Float[Array, "seed layer head model model"]
    write: Float[Array, "seed layer head model model"]

    def plot(self, *, seed: int = 0, ax: "Axes | None" = None) -> "Axes":
        """Both products of every head of one model."""
        return _heat_map(self.read[seed], self.write[seed], ax)


class Blocks(NamedTuple):
    """Which blocks of the two products may differ from zero, slots by slots."""

    read: Bool[np.ndarray, "slot slot"]
    write: Bool[np.ndarray, "slot slot"]

    @property
    def scalars(self) -> int:
        """Scalars per head and layer."""
        return int(self.read.sum() + self.write.sum())


def all_blocks(slots: int) -> Blocks:
    """Every block: 32 scalars per head and layer for four slots."""
    return Blocks(np.ones((slots, slots), bool), np.ones((slots, slots), bool))


def blocks_at(slots: int, read: Sequence[tuple[int, int]], write: Sequence[tuple[int, int]]) -> Blocks:
    """Those named (row, column), counted from 0."""
    chosen = Blocks(np.zeros((slots, slots), bool), np.zeros((slots, slots), bool))
    for mask, places in zip(chosen, (read, write), strict=True):
        for row, column in places:
            if not (0 <= row < slots and 0 <= column < slots):
                raise ValueError(f"blocks: there are {slots} slots, counted from 0, got {(row, column)}.")
            mask[row, column] = True
    return chosen


# Tokens [0, s_t, s_t, s_{t-1}], of which one layer reads the last two and writes the first.
ONE_LAYER = blocks_at(4, [(2, 2), (2, 3), (3, 2), (3, 3)], [(0, 2), (0, 3)])
"""Six scalars per head, 12 for two heads."""
PROPOSITION_1 = blocks_at(4, [(3, 2)], [(0, 2)])
"""One gradient step from zero: keys from s_{t-1}, queries and values from s_t."""


def products(layers: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, heads: int) -> Products:
    """Of anybody's weights, one dictionary of named arrays per layer.

    Args:
        layers: `queries`, `keys` and `values`, [seed, model, heads × key] (tokens are rows and multiply from the left;
            heads one after another), and `output`, [seed, heads × key, model]. The seed axis may be left out.
        heads: how many heads these widths are divided into.
    """
    layers = [layers] if isinstance(layers, Mapping) else list(layers)
    if not layers:
        raise ValueError("layers: expected at least one.")
    both = [_one_layer(named, heads, i) for i, named in enumerate(layers)]
    shapes = {(read.shape, write.shape) for read, write in both}
    if len(shapes) > 1:
        raise ValueError(
            f"layers: expected products of one shape, got {sorted(shapes)}. (A layer that reads positions beside its "
            "tokens has a larger one.) Take those layers one at a time."
        )
    return Products(*(jnp.stack(column, 1) for column in zip(*both, strict=True)))


def products_of(models: Transformer) -> Products:
    """Of every layer of our models, with a seed axis."""
    heads = {block.heads for block in models.config.blocks}
    if len(heads) > 1:
        raise ValueError(f"models: expected one number of heads in all layers, got {sorted(heads)}.")
    seeds_of(models)
    return products([{n: getattr(layer, n) for n in NAMES} for layer in models.layers], heads=heads.pop())


def _one_layer(named: Mapping[str, Any], heads: int, index: int) -> tuple[Array, Array]:
    missing = [name for name in NAMES if name not in named]
    if missing:
        raise KeyError(
            f"layers[{index}]: no {', '.join(missing)}. Expected the names {', '.join(NAMES)}, got {', '.join(named)}."
        )
    q, k, v, o = (jnp.asarray(named[name]) for name in NAMES)
    if {a.ndim for a in (q, k, v, o)} == {2}:
        q, k, v, o = (a[None] for a in (q, k, v, o))
    shapes = f"queries {q.shape}, keys {k.shape}, values {v.shape}, output {o.shape}"
    if {a.ndim for a in (q, k, v, o)} != {3} or len({a.shape[0] for a in (q, k, v, o)}) > 1:
        raise ValueError(
            f"layers[{index}]: expected [seed, rows, columns] with equal seeds or no seed axis, got {shapes}."
        )
    if q.shape != k.shape or v.shape[-1] != o.shape[-2] or any(a % heads for a in (q.shape[-1], v.shape[-1])):
        raise ValueError(
            f"layers[{index}]: expected queries and keys of one shape, an output with a row for every column of the "
            f"values, and widths that {heads} heads divide, got {shapes}."
        )

    def split(a: Array) -> Array:
        return a.reshape(*a.shape[:-1], heads, -1)

    def product(rows: str, a: Array, b: Array) -> Array:
        return jnp.einsum(rows, a, b, precision=jax.lax.Precision.HIGHEST)

    per_head = o.reshape(o.shape[0], heads, -1, o.shape[-1])
    return (
        product("sahd,sbhd->shab", split(k), split(q)),
        product("sbhd,shda->shab", split(v), per_head),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Scalars(Result):
    """Multiples of the identity, and how much of the products they are.

    Attributes:
        width: n, entries of a slot.
        read, write: $c_{ab}$ of both products, zero where no block was asked for.
        read_share, write_share: squared Frobenius norm of the scalars' matrices over that of the products.
        blocks: what was asked for.
    """

    width: int
    blocks: Blocks
    read: Float[np.ndarray, "seed layer head slot slot"]
    write: Float[np.ndarray, "seed layer head slot slot"]
    read_share: Float[np.ndarray, "seed layer head"]
    write_share: Float[np.ndarray, "seed layer head"]

    @property
    def count(self) -> int:
        """Scalars of one model."""
        return self.blocks.scalars * self.read.shape[1] * self.read.shape[2]

    @property
    def share(self) -> tuple[Estimate, Estimate]:
        """Of reads and writes by layer, mean over heads."""
        read, write = (Estimate.over_seeds(a.mean(-1), "layer") for a in (self.read_share, self.write_share))
        return read, write

    @property
    def structured(self) -> Bool[np.ndarray, " layer"]:
        """Whether scalars are more than half of both products, whichever seeds had been drawn."""
        read, write = self.share
        return read.above(0.5) & write.above(0.5)

    def products(self) -> Products:
        """The block matrices that these scalars are."""
        eye = np.eye(self.width)
        read, write = (jnp.asarray(np.kron(a, eye), jnp.zeros(()).dtype) for a in (self.read, self.write))
        return Products(read, write)

    def plot(self, *, seed: int = 0, ax: "Axes | None" = None) -> "Axes":
        """The scalars of every head of one model."""
        return _heat_map(self.read[seed], self.write[seed], ax)


def _heat_map(read: Any, write: Any, ax: "Axes | None") -> "Axes":
    """Products, or their scalars: a row for each layer, in which each is in units of its largest entry."""
    both = [np.asarray(a, np.float64) for a in (read, write)]
    scaled = [a / np.maximum(np.max(np.abs(a), (1, 2, 3), keepdims=True), 1e-300) for a in both]
    layers, heads = both[0].shape[:2]
    columns = [f"{name}\nhead {h}" for name in (r"$W_K^\top W_Q$", r"$P\,W_V$") for h in range(heads)]
    with drawing(ax, size=tiles_size(layers, 2 * heads)) as ax:
        draw_tiles(
            ax, np.concatenate(scaled, 1), rows=[f"layer {l}" for l in range(layers)], columns=columns,
            signed=True, label="over the largest entry",
        )  # fmt: skip
    return ax


def read_off(products: Products, *, width: int, blocks: Blocks | None = None) -> Scalars:
    r"""CompressedAlg: $c_{ab} = \frac1n\mathrm{tr}\,M_{ab}$ for every block asked for.

    Args:
        width: n, entries of a slot.
        blocks: which; None for all of them.
    """
    size = products.read.shape[-1]
    if products.write.shape[-2:] != (size, size) or size % width:
        raise ValueError(
            f"width: expected square products that slots of {width} divide, got {products.read.shape[-2:]} and "
            f"{products.write.shape[-2:]}."
        )
    slots = size // width
    blocks = all_blocks(slots) if blocks is None else blocks
    if blocks.read.shape != (slots, slots):
        raise ValueError(
            f"blocks: these products have {slots} slots of {width}, got blocks for {len(blocks.read)}."
        )
    read, write = (
        np.einsum("...aibi->...ab", np.asarray(p, np.float64).reshape(*p.shape[:-2], slots, width, slots, width))
        / width * mask
        for p, mask in zip(products, blocks, strict=True)
    )  # fmt: skip
    shares = (
        width * np.sum(c**2, (-1, -2)) / np.maximum(np.sum(np.asarray(p, np.float64) ** 2, (-1, -2)), 1e-300)
        for c, p in zip((read, write), products, strict=True)
    )
    read_share, write_share = shares
    return Scalars(
        width=width, blocks=blocks, read=read, write=write, read_share=read_share, write_share=write_share
    )


def from_products(models: Transformer, products: Products) -> Transformer:
    """Our models with these products in all layers: $W_K = P = I$, so each head is as wide as the model.

    Everything else (masking, clipping) stays. Only linear attention depends on the products alone.
    """
    config = models.config
    for i, block in enumerate(config.blocks):
        plain = block.normalize is None and not block.dpfp
        if not isinstance(block.mixer, Linear) or not plain or (i == 0 and config.positions is not None):
            raise ValueError(
                f"models: block {i} is not linear attention between tokens alone ({block.mixer}), so that its products "
                "do not determine it."
            )
    read, write = products
    seeds, depth, heads, size, _ = read.shape
    expected = (seeds_of(models), len(models.layers), config.width)
    if (seeds, depth, size) != expected:
        raise ValueError(
            f"products: expected (seed, layer, model) = {expected}, got {(seeds, depth, size)}. Are these the same "
            "seeds?"
        )
    dtype = models.layers[0].queries.dtype
    eyes = np.broadcast_to(np.eye(size), (seeds, heads, size, size))

    def beside(a: Any) -> Array:
        """[seed, head, in, key] to [seed, in, heads × key]."""
        return jnp.asarray(jnp.swapaxes(jnp.asarray(a), 1, 2).reshape(seeds, size, -1), dtype)

    layers = []
    for i, layer in enumerate(models.layers):
        new = (
            beside(jnp.swapaxes(read[:, i], -1, -2)),
            beside(eyes),
            beside(jnp.swapaxes(write[:, i], -1, -2)),
            jnp.asarray(eyes.reshape(seeds, -1, size), dtype),
        )
        layers.append(eqx.tree_at(lambda m: tuple(getattr(m, n) for n in NAMES), layer, new))
    blocks = tuple(dataclasses.replace(b, key_dim=size, heads=heads) for b in config.blocks)
    changed = dataclasses.replace(config, blocks=blocks)
    swapped = eqx.tree_at(lambda m: m.layers, models, tuple(layers))
    # The configuration is part of the structure and not a leaf.
    structure = jax.tree.structure(
        jax.eval_shape(lambda key: Transformer(changed, key=key), jax.random.key(0))
    )
    return jax.tree.unflatten(structure, jax.tree.leaves(swapped))


def compress(models: Transformer, *, width: int, blocks: Blocks | None = None) -> Transformer:
    """The models rebuilt from their scalars."""
    return from_products(models, read_off(products_of(models), width=width, blocks=blocks).products())


def between(first: Products, second: Products, weight: float = 0.5) -> Products:
    """(1 - weight) times the first and weight times the second: products are averaged, not matrices.

    (Many matrices have the same product. For linear attention this is also what the released code averages: attention
    maps, and then the outputs of both kinds of values.)
    """
    if first.read.shape != second.read.shape:
        raise ValueError(
            f"products: expected the same seeds, layers and heads in both, got {first.read.shape} and "
            f"{second.read.shape}."
        )
    return Products(*(
        (1 - weight) * a + weight * jnp.asarray(b, a.dtype) for a, b in zip(first, second, strict=True)
    ))  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Interpolation(Result):
    """Losses along a training run.

    Attributes:
        trained: of the models as they stood.
        halfway: of models with the average of their products and of those of the scalars.
        compressed: of the scalars alone.
    """

    steps: Int[np.ndarray, " step"]
    trained: Float[np.ndarray, "seed sequence step"]
    halfway: Float[np.ndarray, "seed sequence step"]
    compressed: Float[np.ndarray, "seed sequence"]

    def plot(self, *, ax: "Axes | None" = None) -> "Axes":
        """Losses over training steps."""
        flat = np.repeat(self.compressed[..., None], len(self.steps), -1)
        with drawing(ax) as ax:
            for losses, label in ((self.trained, "trained"), (self.halfway, "halfway to the scalars")):
                draw_curve(ax, self.steps, Estimate.of(losses, "step"), label=label)
            of_scalars = Estimate.of(flat, "step")
            draw_curve(ax, self.steps, of_scalars, label="scalars alone", color="black", linestyle="--")
            ax.set(xlabel="training step", ylabel="loss")
            ax.legend()
        return ax


def interpolate(kept: Mapping[int, Transformer], scalars: Scalars, examples: Examples) -> Interpolation:
    """Halfway between the models of every kept step and scalars read off at the end of an earlier run.

    Args:
        kept: models by step (`run.kept()`), all seeds, trained from the initialization of the run that the scalars are
            from: only then do heads with the same number do the same thing.
        scalars: of the finished models.
        examples: sequences to measure losses on.
    """
    if not kept:
        raise ValueError("kept: expected models by step, got none. Set `keep_every` in TrainConfig.")
    target = scalars.products()
    steps = sorted(kept)
    run = jax.jit(lambda models: sequence_losses(models, examples))
    mixed = jax.jit(
        lambda models: sequence_losses(from_products(models, between(products_of(models), target)), examples)
    )
    trained = np.stack([np.asarray(run(kept[step])) for step in steps], -1)
    halfway = np.stack([np.asarray(mixed(kept[step])) for step in steps], -1)
    compressed = np.asarray(run(from_products(kept[steps[-1]], target)))
    return Interpolation(steps=np.array(steps), trained=trained, halfway=halfway, compressed=compressed)


def sequence_losses(models: Transformer, examples: Examples) -> Float[Array, "seed batch"]:
    """½‖error‖² of every sequence, mean over the positions that predict."""
    return jax.vmap(lambda model: loss_of(model(examples.tokens), examples))(models)


@dataclass(frozen=True, kw_only=True, eq=False)
class MesaObjective(Result):
    r"""What one layer descends, from its 12 scalars.

    With tokens $[0, s_t, s_t, s_{t-1}]$ and $g_{acb} = \sum_h p_c^h m_{ba}^h$ (p writes slot c to the prediction; m
    couples the key's slot b with the query's slot a; a, b, c are 0 for $s_t$ and 1 for $s_{t-1}$), the layer predicts

    $$\hat s_{t+1} = \Phi_t^0 s_t + \Phi_t^1 s_{t-1}, \qquad
      \Phi_t^a = \sum_{i\le t}\sum_{c,b} g_{acb}\,s_{i-c}s_{i-b}^\top = -\nabla L_t^a(0), \qquad
      L_t^a(\Phi) = \sum_{i\le t}\sum_{c,b} \tfrac{g_{acb}}2\lVert s_{i-c} - \Phi s_{i-b}\rVert^2 .$$

    $g_{001} = \eta$ is next-token prediction, all of Proposition 1 from $\Phi_0 = 0$. The faint rest modifies the
    objective: $g_{010}$ adds prediction backward in time, $g_{000}$ and $g_{011}$ (un)learning of the identity.
    $g_{011} = -\eta\varphi$ is also what a step from $\Phi_0 = \varphi I$ has, up to the $\Phi_0 s_t$ that tokens would
    have to bring along. And $g_{1cb}$ are a second model, of $s_{t-1}$.

    Attributes:
        weights: $g_{acb}$: query, value, key.
    """

    weights: Float[np.ndarray, "seed query value key"]

    @property
    def eta(self) -> Float[np.ndarray, " seed"]:
        """η."""
        return self.weights[:, 0, 0, 1]

    @property
    def phi_0(self) -> Float[np.ndarray, " seed"]:
        """φ of the initial model φI."""
        return -self.weights[:, 0, 1, 1] / self.eta

    @property
    def share(self) -> Float[np.ndarray, " seed"]:
        """Of next-token prediction in the sum of all squared weights; 1 is Proposition 1."""
        return self.eta**2 / np.sum(self.weights**2, (1, 2, 3))

    @property
    def relative(self) -> Estimate:
        """Weights over η."""
        return Estimate.over_seeds(self.weights / self.eta[:, None, None, None], "query", "value", "key")

    @property
    def descends(self) -> bool:
        """Whether next-token prediction is more than half of the objective, whichever seeds had been drawn."""
        return bool(Estimate.over_seeds(self.share).above(0.5))

    @property
    def present(self) -> Bool[np.ndarray, "query value key"]:
        """Which weights differ from zero in the same direction whichever seeds had been drawn (99%)."""
        low, high = self.relative.interval(0.99)
        return (low > 0) | (high < 0)

    def predictions(
        self, observations: Float[Array, "batch time+1 obs"], *, only_next_token: bool = False
    ) -> Float[Array, "seed batch time obs"]:
        """What the gradient step predicts, in closed form and without the layer.

        Args:
            only_next_token: with η alone.
        """
        now = jnp.asarray(observations)[:, :-1]
        past = jnp.pad(now, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        weights = np.zeros_like(self.weights) if only_next_token else self.weights.copy()
        weights[:, 0, 0, 1] = self.weights[:, 0, 0, 1]
        both = jnp.stack([now, past])
        causal = jnp.tril(jnp.ones((now.shape[1],) * 2, now.dtype))
        similar = jnp.einsum("abtn,kbin->akbti", both, both, precision="highest") * causal
        mixed = jnp.einsum("sack,akbti->sbtic", jnp.asarray(weights, now.dtype), similar, precision="highest")
        return jnp.einsum("sbtic,cbin->sbtn", mixed, both, precision="highest")

    def plot(self, *, ax: "Axes | None" = None) -> "Axes":
        """Weights over η, by what is predicted from what and for which query."""
        names = ("s_t", "s_{t-1}")
        labels = [f"${names[c]}$ from ${names[b]}$, for ${names[a]}$" for a, c, b in np.ndindex(2, 2, 2)]
        flat = Estimate.over_seeds(self.relative.values.reshape(len(self.weights), -1), "weight")
        with drawing(ax, size=rows_size(len(labels))) as ax:
            draw_points(ax, labels, flat)
            ax.set_xlabel("weight in the objective, over η")
        return ax


def mesa_objective(
    scalars: Scalars, *, now: int = 2, previous: int = 3, prediction: int = 0
) -> MesaObjective:
    """Read one layer's scalars as an objective.

    Args:
        now, previous, prediction: the slots of $s_t$, $s_{t-1}$ and of what is predicted, counted from 0.
    """
    if scalars.read.shape[1] != 1:
        raise ValueError(
            f"scalars: one layer is one gradient step; expected 1 layer, got {scalars.read.shape[1]}."
        )
    slots = [now, previous]
    if max(*slots, prediction) >= scalars.read.shape[-1]:
        raise ValueError(
            f"slots: there are {scalars.read.shape[-1]}, counted from 0, got {(*slots, prediction)}."
        )
    m = scalars.read[:, 0][:, :, slots][..., slots]
    p = scalars.write[:, 0, :, prediction][..., slots]
    return MesaObjective(weights=np.einsum("shc,shba->sacb", p, m))
