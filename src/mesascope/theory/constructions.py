r"""The algorithms of `solvers` as ordinary Transformers, with weights written by hand.

    built = proposition_2(10, 12, alphas, betas, lam=1000.0, eta=0.02)
    built(observations)                      # predictions after every observation
    built.stream(observations, "solution")   # a slot of the residual stream after every layer
    built.model, built.tokens(observations)  # the Transformer itself, and what it reads

The residual stream is divided into named slots. A head is four block matrices: it reads its queries, keys and values
from slots and writes to slots. Matrices in docstrings act on column vectors, as in the paper: $W_K^\top W_Q$ couples
slots of a key's token (rows) to slots of the query's (columns), and $P W_V$ maps slots of a key's token (columns) to
what is written (rows). In exact arithmetic a forward pass *is* the algorithm, after every layer and at every time; the
tests hold it to 1e-10 in float64.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float

from mesascope.models import (
    Block,
    FeedForward,
    Linear,
    Mesa,
    Mixer,
    ModelConfig,
    Positions,
    Softmax,
    Transformer,
)
from mesascope.tasks.tokens import delayed

Matrix = Float[np.ndarray, "rows columns"]


class Construction(NamedTuple):
    """A Transformer written by hand.

    Attributes:
        model: the Transformer.
        tokens: the map from observations to the tokens it expects.
        slots: where in the residual stream each quantity stands.
        padding: how many of the tokens come before the first observation.
    """

    model: Transformer
    tokens: Callable[[Float[Array, "*batch time obs"]], Float[Array, "*batch padding+time token"]]
    slots: Mapping[str, slice]
    padding: int = 0

    def __call__(self, observations: Float[Array, "*batch time obs"]) -> Float[Array, "*batch time output"]:
        """Predictions after every observation."""
        return self.model(self.tokens(observations))[..., self.padding :, :]

    def stream(
        self, observations: Float[Array, "*batch time obs"], slot: str
    ) -> Float[Array, "layer+1 *batch time slot"]:
        """What stands in a slot before the first layer and after each."""
        if slot not in self.slots:
            raise KeyError(f"slot: there is no {slot!r}. There are: {', '.join(self.slots)}.")
        seen = self.model.trace(self.tokens(observations))[1]
        depth = len(self.model.config.blocks)
        paths = ["embedded", *(f"blocks.{i}.resid_post" for i in range(depth))]
        return jnp.stack([seen[path][..., self.padding :, self.slots[slot]] for path in paths])


def proposition_1(
    n: int, eta: float, phi_0: ArrayLike | None = None, *, dtype: DTypeLike = jnp.float32
) -> Construction:
    r"""One linear layer is one step of gradient descent: `solvers.GradientStep`.

    Tokens $e_t = [\Phi_0 s_t,\ s_t,\ s_{t-1}]$, one head:

    $$W_K^\top W_Q = \begin{bmatrix}0&0&0\\0&0&0\\0&I&0\end{bmatrix}, \qquad
      P W_V = \begin{bmatrix}0&\eta I&-\eta\Phi_0\\0&0&0\\0&0&0\end{bmatrix}$$

    Args:
        n: width of an observation.
        eta: η.
        phi_0: $\Phi_0$; None is zero.
    """
    phi = np.zeros((n, n)) if phi_0 is None else np.asarray(phi_0, np.float64)
    if phi.shape != (n, n):
        raise ValueError(f"phi_0: expected shape {(n, n)}, got {phi.shape}.")
    eye = np.eye(n)
    slots = _slots(prediction=n, input=n, previous_input=n)
    value = {"input": eta * eye, "previous_input": -eta * phi.T}
    head = Head({"input": eye}, {"previous_input": eye}, value, {"prediction": eye})
    transposed = jnp.asarray(phi.T, dtype)

    def tokens(s: Array) -> Array:
        start = jnp.matmul(s, transposed, precision=jax.lax.Precision.HIGHEST)
        return jnp.concatenate([start, s, delayed(s, 1)], -1)

    return Construction(_transformer(slots, [Layer(Linear(), [head])], n, dtype=dtype), tokens, slots)


def stacked_proposition_1(n: int, etas: Sequence[float], *, dtype: DTypeLike = jnp.float32) -> Construction:
    r"""Layers of Proposition 1 on top of each other: `solvers.StackedGradientSteps`, which is biased.

    Tokens $e_t = [0,\ s_t,\ s_t,\ s_{t-1}]$ are $[\hat y_t,\ r_t,\ s_t,\ s_{t-1}]$. Both heads of layer l take the
    residuals $r$ as values and $s_{t-1}$ as keys. The first asks with $s_t$ and adds $\eta_l$ times the result to
    $\hat y_t$; the second asks with $s_{t-1}$ and takes it from $r_t$:

    $$\text{first: } W_K^\top W_Q = I \text{ at } (4, 3),\ P W_V = \eta_l I \text{ at } (1, 2); \qquad
      \text{second: } I \text{ at } (4, 4),\ -\eta_l I \text{ at } (2, 2)$$
    """
    eye = np.eye(n)

    def layer(eta: float) -> "Layer":
        key = {"previous_input": eye}
        predict = Head({"input": eye}, key, {"working": eye}, {"prediction": eta * eye})
        correct = Head({"previous_input": eye}, key, {"working": eye}, {"working": -eta * eye})
        return Layer(Linear(), [predict, correct])

    return _four_slots(n, [layer(eta) for eta in etas], dtype)


def gradient_descent(n: int, etas: Sequence[float], *, dtype: DTypeLike = jnp.float32) -> Construction:
    r"""As many steps of gradient descent as layers, without bias and by attention alone: `solvers.GradientDescent`.

    The tokens are those of `stacked_proposition_1`, $[\hat y_t,\ u_t,\ s_t,\ s_{t-1}]$, but what is worked on is the
    query $u_t$ and not the residual. Both heads of layer l ask with $u$ and take $s_{t-1}$ as keys:

    $$\text{first: } W_K^\top W_Q = I \text{ at } (4, 2),\ P W_V = \eta_l I \text{ at } (1, 3); \qquad
      \text{second: } I \text{ at } (4, 2),\ -\eta_l I \text{ at } (2, 4)$$

    A query belongs to one time only, so nothing has to be known about the past under the present model. With
    $1/\eta_l$ the roots of a Chebyshev polynomial this converges as fast as Proposition 2 does.
    """
    eye = np.eye(n)

    def layer(eta: float) -> "Layer":
        query, key = {"working": eye}, {"previous_input": eye}
        predict = Head(query, key, {"input": eye}, {"prediction": eta * eye})
        contract = Head(query, key, {"previous_input": eye}, {"working": -eta * eye})
        return Layer(Linear(), [predict, contract])

    return _four_slots(n, [layer(eta) for eta in etas], dtype)


def proposition_2(
    n: int,
    steps: int,
    alphas: ArrayLike,
    betas: ArrayLike,
    lam: float,
    eta: float = 1.0,
    *,
    dtype: DTypeLike = jnp.float32,
) -> Construction:
    r"""Precondition the query layer by layer, then one gradient step: `solvers.MesaOptimizer` with fixed coefficients.

    Tokens $e_t = [y_t,\ \tilde s_t^l,\ \tilde s_t^{l-1},\ s_t,\ s_{t-1}]$, at the start $[0, s_t, s_t, s_t, s_{t-1}]$.
    Each of the first `steps` layers has one head, which leaves $y_t = -\eta S_{t-1}S_{t-1}^\top\tilde s_t^l$ in the
    first slot,

    $$W_K^\top W_Q = \begin{bmatrix}0&0&0&0&0\\0&0&0&0&0\\0&0&0&0&0\\0&0&0&0&0\\0&I&0&0&0\end{bmatrix}, \qquad
      P W_V = \begin{bmatrix}0&0&0&0&-\eta I\\0&0&0&0&0\\0&0&0&0&0\\0&0&0&0&0\\0&0&0&0&0\end{bmatrix},$$

    and an MLP that adds $M_l e_t$ to the token,

    $$M_l = \begin{bmatrix}-I&0&0&0&0\\
            \alpha_l I&(\beta_l-\alpha_l\eta/\lambda)I&-\beta_l I&\alpha_l I&0\\
            0&I&-I&0&0\\0&0&0&0&0\\0&0&0&0&0\end{bmatrix}, \qquad
      \tilde s^{l+1} = \tilde s^l + \alpha_l(s - \tfrac\eta\lambda\tilde s^l + y)
                        + \beta_l(\tilde s^l - \tilde s^{l-1}).$$

    (An MLP is linear, exactly, in the form $Mx = \mathrm{relu}(Mx) - \mathrm{relu}(-Mx)$.) The last layer is
    Proposition 1 with $\tilde s$ as query: $W_K^\top W_Q = I$ at (5, 2), $P W_V = \eta I$ at (1, 4).

    Against the paper's matrices: keys and values are $s_{t-1}$ and queries $\tilde s^l$, so the two blocks change
    places; $-\alpha$ may stand in one of them only; and the token needs $s_t$ itself, both as right-hand side and as
    target.

    Args:
        n: width of an observation.
        steps: how many layers before the last.
        alphas: $\alpha_l$, one for all or one each.
        betas: $\beta_l$, likewise.
        lam: λ; infinity for no regularization.
        eta: η, by which the loss is scaled; 1 is the paper's form.
    """
    slots = _slots(prediction=n, solution=n, previous_solution=n, input=n, previous_input=n)
    layers = _mesa_optimizer(n, n, steps, alphas, betas, lam, eta)

    def tokens(s: Array) -> Array:
        return jnp.concatenate([jnp.zeros_like(s), s, s, s, delayed(s, 1)], -1)

    return Construction(_transformer(slots, layers, n, dtype=dtype), tokens, slots)


def copying(
    n: int, k: int, sharpness: float, *, codes: int = 40, dtype: DTypeLike = jnp.float32
) -> Construction:
    r"""One softmax layer that gathers the last k observations, $z_t^k = [s_t, s_{t-1}, \dots, s_{t-k+1}]$.

    Head j looks j tokens back. With codes $c_t = (\sin\omega_m t, \cos\omega_m t)_m$ beside the inputs of queries and
    keys and the rotation $R_j c_t = c_{t-j}$, logits are
    $\beta\,c_{t'}^\top R_j c_t = \beta\sum_m\cos\omega_m(t - j - t')$, largest at $t' = t - j$. β is such that those of
    the tokens beside it are lower by `sharpness`: the weight that goes astray falls as $2e^{-\text{sharpness}}$.

    Tokens are observations, and before them as many zeros as the layer looks back: $s_t = 0$ for $t < 1$.
    """
    slots = _slots(prediction=k * n)
    heads = _copy_heads(n, k - 1, sharpness, codes, "prediction", lambda j: {"prediction": _place(n, k, j)})
    model = _transformer(
        slots,
        [Layer(Softmax(), heads)],
        k * n,
        embed={"prediction": _place(n, k, 0)},
        codes=codes,
        dtype=dtype,
    )
    return Construction(model, _padded(k - 1), slots, k - 1)


def copying_then_proposition_2(
    n: int,
    k: int,
    steps: int,
    alphas: ArrayLike,
    betas: ArrayLike,
    lam: float,
    eta: float = 1.0,
    *,
    sharpness: float,
    codes: int = 40,
    dtype: DTypeLike = jnp.float32,
) -> Construction:
    r"""Observations as tokens: a softmax layer makes Proposition 2's tokens of $z_t^k$, the others solve for $s_{t+1}$.

    The residual stream is $[y_t,\ \tilde z_t^l,\ \tilde z_t^{l-1},\ z_t^k,\ z_{t-1}^k]$; layers after the first are
    those of `proposition_2` with pairs $(z_{i}^k, s_{i+1})$. Arguments as there and in `copying`.
    """
    wide = k * n
    slots = _slots(prediction=wide, solution=wide, previous_solution=wide, input=wide, previous_input=wide)
    now: list[str] = ["solution", "previous_solution", "input"]

    def write(j: int) -> dict[str, Matrix]:
        here = dict.fromkeys(now, _place(n, k, j)) if j < k else {}
        return here | {"previous_input": _place(n, k, j - 1)}

    copies = Layer(Softmax(), _copy_heads(n, k, sharpness, codes, "input", write))
    layers = [copies, *_mesa_optimizer(wide, n, steps, alphas, betas, lam, eta)]
    embed = dict.fromkeys(now, _place(n, k, 0))
    model = _transformer(slots, layers, n, embed=embed, codes=codes, dtype=dtype)
    return Construction(model, _padded(k), slots, k)


def copying_then_mesa(
    n: int, k: int, lam: float, *, sharpness: float, codes: int = 40, dtype: DTypeLike = jnp.float32
) -> Construction:
    r"""One softmax layer that copies and one mesa-layer are recursive least squares on $z_t^k$: `solvers.Ridge`.

    The residual stream is $[\hat y_t,\ z_t^k,\ z_{t-1}^k]$; the mesa-layer has $z_t^k$ as query, $z_{t-1}^k$ as key and
    $s_t$ as value. Arguments as in `copying`.
    """
    wide, eye = k * n, np.eye(k * n)
    slots = _slots(prediction=n, input=wide, previous_input=wide)

    def write(j: int) -> dict[str, Matrix]:
        here = {"input": _place(n, k, j)} if j < k else {}
        return here | {"previous_input": _place(n, k, j - 1)}

    copies = Layer(Softmax(), _copy_heads(n, k, sharpness, codes, "input", write))
    fit = Head(
        {"input": eye}, {"previous_input": eye}, {"input": _place(n, k, 0).T}, {"prediction": np.eye(n)}
    )
    model = _transformer(
        slots, [copies, Layer(Mesa(raw=True), [fit], lam=lam)], n,
        embed={"input": _place(n, k, 0)}, codes=codes, dtype=dtype,
    )  # fmt: skip
    return Construction(model, _padded(k), slots, k)


def key_shift(n: int, lam: float, *, dtype: DTypeLike = jnp.float32) -> Construction:
    r"""One mesa-layer with shifted keys is recursive least squares on observations, without a layer that copies.

    The operator puts $k_{t-1}$ in the place of $k_t$, so that queries, keys and values may all be $s_t$.
    """
    eye = np.eye(n)
    slots = _slots(prediction=n, input=n)
    fit = Head({"input": eye}, {"input": eye}, {"input": eye}, {"prediction": eye})
    layer = Layer(Mesa(raw=True), [fit], lam=lam, shift_keys=True)
    return Construction(_transformer(slots, [layer], n, embed={"input": eye}, dtype=dtype), _padded(0), slots)


def induction_head(
    n: int, beta: float, *, sharpness: float, codes: int = 40, dtype: DTypeLike = jnp.float32
) -> Construction:
    r"""Two softmax layers are kernel regression: `solvers.KernelRegression`, for large β the nearest neighbor.

    Tokens $[s_t, 1]$ after one token of zeros. The first layer copies $[s_{t-1}, 1]$, which is zero for t = 1. The
    second has the query $[\beta s_t, g]$, the key $[s_{t-1},\ 2\cdot 1_{t-1} - 1_t]$ and the value $s_t$, where g is
    `sharpness`: the logit $\beta s_{t'-1}^\top s_t$ of a pair is raised by g, the first observation, which has no
    predecessor, is lowered by g, and the token of zeros stays at 0. So it predicts zero before the first pair; then
    pairs win as long as g is well above $\beta\lvert s_{t'-1}^\top s_t\rvert$.
    """
    both = np.eye(n + 1)
    eye, one = both[:, :n], both[:, n:]
    slots = _slots(prediction=n, input=n + 1, previous_input=n + 1)
    copy = _copy_heads(n + 1, 1, sharpness, codes, "input", lambda j: {"previous_input": both})
    root = math.sqrt(max(codes, n + 1))
    attend = Head(
        {"input": root * np.concatenate([beta * eye, sharpness * one], 1)},
        {"previous_input": np.concatenate([eye, 2 * one], 1), "input": np.concatenate([0 * eye, -one], 1)},
        {"input": eye},
        {"prediction": np.eye(n)},
    )
    layers = [Layer(Softmax(), copy), Layer(Softmax(), [attend], key_dim=max(codes, n + 1))]
    model = _transformer(slots, layers, n, embed={"input": both}, codes=codes, dtype=dtype)

    def tokens(s: Array) -> Array:
        return _padded(1)(jnp.concatenate([s, jnp.ones((*s.shape[:-1], 1), s.dtype)], -1))

    return Construction(model, tokens, slots, 1)


class Head(NamedTuple):
    """A head's four block matrices: slot to key space three times, and back to slots. They act on row vectors."""

    queries: Mapping[str, Matrix]
    keys: Mapping[str, Matrix]
    values: Mapping[str, Matrix]
    output: Mapping[str, Matrix]


class Layer(NamedTuple):
    """A block of a Transformer.

    Attributes:
        local: (from, to) slots and factors: what the MLP adds to `to` is `factor` times `from`.
        key_dim: where it has to be wider than the matrices are.
    """

    mixer: Mixer
    heads: Sequence[Head]
    local: Mapping[tuple[str, str], float] | None = None
    lam: float | None = None
    shift_keys: bool = False
    key_dim: int = 0


def _slots(**widths: int) -> dict[str, slice]:
    ends = np.cumsum(list(widths.values())).tolist()
    return {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends, strict=True)}


def _place(n: int, k: int, j: int) -> Matrix:
    """One observation to the j-th place of a stack of k."""
    return np.eye(k)[[j]].repeat(n, 0).repeat(n, 1) * np.tile(np.eye(n), (1, k))


def _padded(count: int) -> Callable[[Array], Array]:
    """The sequence after `count` zeros."""
    return lambda s: jnp.pad(s, [(0, 0)] * (s.ndim - 2) + [(count, 0), (0, 0)])


def _four_slots(n: int, layers: Sequence[Layer], dtype: DTypeLike) -> Construction:
    slots = _slots(prediction=n, working=n, input=n, previous_input=n)

    def tokens(s: Array) -> Array:
        return jnp.concatenate([jnp.zeros_like(s), s, s, delayed(s, 1)], -1)

    return Construction(_transformer(slots, layers, n, dtype=dtype), tokens, slots)


def _mesa_optimizer(
    wide: int, n: int, steps: int, alphas: ArrayLike, betas: ArrayLike, lam: float, eta: float
) -> list[Layer]:
    """The layers of Proposition 2 for inputs of some width whose first n entries are the next target."""
    eye = np.eye(wide)
    try:
        alphas = np.broadcast_to(np.asarray(alphas, np.float64), (steps,))
        betas = np.broadcast_to(np.asarray(betas, np.float64), (steps,))
    except ValueError:
        shapes = np.shape(alphas), np.shape(betas)
        raise ValueError(f"alphas, betas: expected one number or {steps}, got shapes {shapes}.") from None
    query, key = {"solution": eye}, {"previous_input": eye}
    apply_gram = Head(query, key, {"previous_input": eye}, {"prediction": -eta * eye})
    layers = []
    for alpha, beta in zip(alphas.tolist(), betas.tolist(), strict=True):
        local = {
            ("prediction", "prediction"): -1.0,
            ("prediction", "solution"): alpha,
            ("solution", "solution"): beta - alpha * eta / lam,
            ("previous_solution", "solution"): -beta,
            ("input", "solution"): alpha,
            ("solution", "previous_solution"): 1.0,
            ("previous_solution", "previous_solution"): -1.0,
        }
        layers.append(Layer(Linear(), [apply_gram], local))
    target = np.eye(wide, n)
    step = Head(query, key, {"input": target}, {"prediction": eta * target.T})
    return [*layers, Layer(Linear(), [step])]


def _copy_heads(
    n: int,
    count: int,
    sharpness: float,
    codes: int,
    source: str,
    write: Callable[[int], Mapping[str, Matrix]],
) -> list[Head]:
    """Heads that look 1 to `count` tokens back; the observation is the first n entries of the slot `source`."""
    if codes < 2 or codes % 2:
        raise ValueError(f"codes: expected an even number of sines and cosines, got {codes}.")
    rates = 10000.0 ** (-np.arange(0, codes, 2) / codes)
    # What the logits of the right token and of one beside it differ by, before scaling.
    gap = np.sum(1 - np.cos(rates))
    scale = sharpness / gap * math.sqrt(max(n, codes))
    heads = []
    for j in range(1, count + 1):
        rotation = np.zeros((codes, codes))
        sine, cosine = np.arange(0, codes, 2), np.arange(1, codes, 2)
        rotation[sine, sine] = rotation[cosine, cosine] = np.cos(j * rates)
        rotation[cosine, sine], rotation[sine, cosine] = -np.sin(j * rates), np.sin(j * rates)
        heads.append(
            Head({"codes": scale * rotation}, {"codes": np.eye(codes)}, {source: np.eye(n)}, write(j))
        )
    return heads


def _transformer(
    slots: Mapping[str, slice],
    layers: Sequence[Layer],
    output_dim: int,
    *,
    embed: Mapping[str, Matrix] | None = None,
    codes: int = 0,
    dtype: DTypeLike,
) -> Transformer:
    """Put the blocks into a model; without `embed` tokens are the residual stream and predictions its first entries."""
    width = max(s.stop for s in slots.values())
    with_codes = dict(slots) | {"codes": slice(width, width + codes)}

    def inner(layer: Layer) -> int:
        # All four matrices of all heads of a block share one width.
        widths = [m.shape[1] for head in layer.heads for part in head[:3] for m in part.values()]
        return max(layer.key_dim, *widths)

    blocks = tuple(
        Block(
            mixer=layer.mixer,
            heads=len(layer.heads),
            key_dim=inner(layer),
            shift_keys=layer.shift_keys,
            mlp=None if layer.local is None else FeedForward(hidden=2 * width, activation="relu"),
        )
        for layer in layers
    )
    config = ModelConfig(
        token_dim=width if embed is None else next(iter(embed.values())).shape[0],
        output_dim=output_dim,
        model_dim=None if embed is None else width,
        blocks=blocks,
        positions=Positions(at="key_inputs", dim=codes) if codes else None,
    )
    shapes = jax.eval_shape(lambda key: Transformer(config, key=key), jax.random.key(0))
    model = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), shapes)
    if embed is not None:
        matrix = np.zeros((config.token_dim, width))
        for slot, block in embed.items():
            matrix[:, slots[slot]][:, : block.shape[1]] = block
        model = _replace(model, lambda m: m.embed, matrix)
        model = _replace(model, lambda m: m.unembed, np.eye(width, output_dim))
    for i, layer in enumerate(layers):
        rows = width + (codes if i == 0 else 0)
        size = blocks[i].key_dim
        queries, keys = (
            np.concatenate([_assemble(with_codes, head[part], rows, size) for head in layer.heads], 1)
            for part in (0, 1)
        )
        values = np.concatenate([_assemble(slots, head.values, width, size) for head in layer.heads], 1)
        output = np.concatenate([
            _assemble(slots, {s: m.T for s, m in head.output.items()}, width, size).T for head in layer.heads
        ])  # fmt: skip
        for name, matrix in (("queries", queries), ("keys", keys), ("values", values), ("output", output)):
            model = _replace(model, lambda m, i=i, name=name: getattr(m.layers[i], name), matrix)
        if layer.lam is not None:
            model = _replace(model, lambda m, i=i: m.layers[i].lam, np.full(len(layer.heads), layer.lam))
        if layer.local is not None:
            added = np.zeros((width, width))
            for (source, target), factor in layer.local.items():
                size = slots[source].stop - slots[source].start
                added[slots[source], slots[target]] += factor * np.eye(size)
            both = np.concatenate([added, -added], 1)
            model = _replace(model, lambda m, i=i: m.layers[i].mlp_in, both)
            signs = np.concatenate([np.eye(width), -np.eye(width)])
            model = _replace(model, lambda m, i=i: m.layers[i].mlp_out, signs)
    return model


def _assemble(slots: Mapping[str, slice], parts: Mapping[str, Matrix], rows: int, columns: int) -> Matrix:
    """A matrix with these blocks at the rows of their slots, filled up with zeros."""
    matrix = np.zeros((rows, columns))
    for slot, block in parts.items():
        start = slots[slot].start
        matrix[start : start + block.shape[0], : block.shape[1]] = block
    return matrix


def _replace(model: Transformer, where: Callable[[Transformer], Array | None], matrix: Matrix) -> Transformer:
    old = where(model)
    assert old is not None
    assert old.shape == matrix.shape
    return eqx.tree_at(where, model, jnp.asarray(matrix, old.dtype))
