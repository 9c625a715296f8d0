"""The Transformer against plain numpy loops, and what its users rely on."""

import itertools
import random

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from mesascope.models import (
    Block,
    Delta,
    FeedForward,
    Linear,
    Mesa,
    ModelConfig,
    Normalize,
    Positions,
    Softmax,
    Transformer,
)  # fmt: skip
from mesascope.parts import dpfp, positions
from tests.helpers import assert_close

MIXERS = {"softmax": Softmax(), "linear": Linear(), "mesa": Mesa(), "delta": Delta()}


def small(mixer, *, layers=2, **changes):
    block = {n: changes.pop(n) for n in tuple(changes) if n in Block.__dataclass_fields__}
    blocks = (Block(mixer=mixer, heads=2, key_dim=3, **block),) * layers
    return ModelConfig(**dict(token_dim=4, output_dim=4, model_dim=6, blocks=blocks, init_std=0.5) | changes)


run = jax.jit(lambda model, tokens: model(tokens))


def built(config, seed=0):
    return jax.jit(lambda key: Transformer(config, key=key))(jax.random.key(seed))


def tokens_like(config, *lead, time=7, seed=1):
    return jax.random.normal(jax.random.key(seed), (*lead, time, config.token_dim), jnp.float32)


def activation(x, name):
    if name == "relu":
        return np.maximum(x, 0)
    if name == "gelu_tanh":
        return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x * 0.5 * (1 + erf(x / np.sqrt(2)))


def in_numpy(model, tokens, begins=None):
    """The same model for one sequence, one position, one head at a time, in float64."""

    def norm(x, scale):
        if scale is None:
            return x
        x = x - x.mean(-1, keepdims=True)
        return np.asarray(scale) * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    def scaled(x, by):
        if by == "layer_norm":
            return norm(x, 1.0)
        size = x.sum(-1) + 1e-6 if by == "sum" else np.sqrt((x**2).sum(-1))
        return x / size[:, None]

    def features(x, nu):
        r = np.maximum(np.concatenate([x, -x], 1), 0)
        return np.concatenate([r * np.roll(r, i, 1) for i in range(1, nu + 1)], 1) if nu else x

    config = model.config
    x = np.asarray(tokens, np.float64)
    first_of = np.zeros(len(x), int)  # where the document of each token begins
    for t in range(len(x)):
        first_of[t] = t if begins is not None and begins[t] else first_of[max(t - 1, 0)]
    weights = jax.tree.map(lambda a: np.asarray(a, np.float64), model)
    time = len(x)
    codes = None
    if weights.embed is not None:
        x = x @ weights.embed
    if config.positions is not None:
        dim = config.positions.dim
        codes = np.array([
            [(np.sin, np.cos)[j % 2](t / 10000 ** ((j - j % 2) / dim)) for j in range(dim)] for t in range(time)
        ])  # fmt: skip
        if config.positions.at == "tokens":
            x = x + codes
    for i, (layer, block) in enumerate(zip(weights.layers, config.blocks, strict=True)):
        seen = norm(x, layer.mixer_norm).copy()
        seen[:, : config.masked] = 0
        bias = dict.fromkeys(("queries", "keys", "values", "output", "mlp_in", "mlp_out"), 0.0)
        if layer.biases is not None:
            bias = {name: getattr(layer.biases, name) for name in bias}
        first = i == 0 and codes is not None and config.positions.at != "tokens"
        inputs = np.concatenate([seen, codes], 1) if first and config.positions.at == "key_inputs" else seen
        heads = []
        for h in range(block.heads):
            part = slice(h * block.key_dim, (h + 1) * block.key_dim)
            q, k, v = (
                (inputs @ layer.queries + bias["queries"])[:, part],
                (inputs @ layer.keys + bias["keys"])[:, part],
                (seen @ layer.values + bias["values"])[:, part],
            )
            if first and config.positions.at == "keys":
                q, k = np.concatenate([q, codes], 1), np.concatenate([k, codes], 1)
            late = block.normalize is not None and block.normalize.of == "features"
            if late:
                q, k = features(q, block.dpfp), features(k, block.dpfp)
            if block.normalize is not None:
                q = scaled(q, block.normalize.by)
                if block.normalize.values:
                    v = scaled(v, block.normalize.by)
                else:
                    k = scaled(k, block.normalize.by)
            if not late:
                q, k = features(q, block.dpfp), features(k, block.dpfp)
            if block.shift_keys:
                k = np.concatenate([np.zeros_like(k[:1]), k[:-1]])
                k[first_of == np.arange(time)] = 0
            gamma = np.ones(time)
            if layer.forget is not None:
                gamma = 1 / (1 + np.exp(seen @ layer.forget[:, h] + layer.forget_bias[h]))
            out = np.zeros((time, v.shape[1]))
            phi = np.zeros((v.shape[1], k.shape[1]))
            for t in range(time):
                reach = np.array([np.prod(gamma[j + 1 : t + 1]) * (j >= first_of[t]) for j in range(t + 1)])
                if isinstance(block.mixer, Softmax):
                    score = np.exp(k[: t + 1] @ q[t] / np.sqrt(q.shape[1])) * reach
                    out[t] = score / score.sum() @ v[: t + 1]
                elif isinstance(block.mixer, Linear):
                    out[t] = (reach * (k[: t + 1] @ q[t])) @ v[: t + 1]
                elif isinstance(block.mixer, Mesa):
                    lam = layer.lam[h] if block.mixer.raw else np.log1p(np.exp(layer.lam[h]))
                    gram = np.eye(k.shape[1]) / lam * np.prod(gamma[first_of[t] : t + 1])
                    gram = gram + (k[: t + 1].T * reach) @ k[: t + 1]
                    out[t] = (v[: t + 1].T * reach) @ k[: t + 1] @ np.linalg.solve(gram, q[t])
                else:
                    rate = 1 / (1 + np.exp(-seen[t] @ layer.rate[:, h]))
                    phi = gamma[t] * phi * (first_of[t] < t)
                    phi = phi + rate * np.outer(v[t] - phi @ k[t], k[t])
                    out[t] = phi @ q[t]
            heads.append(out)
        x = x + np.concatenate(heads, 1) @ layer.output + bias["output"]
        if block.mlp is not None:
            hidden = norm(x, layer.mlp_norm) @ layer.mlp_in + bias["mlp_in"]
            x = x + activation(hidden, block.mlp.activation) @ layer.mlp_out + bias["mlp_out"]
        if config.clip is not None:
            x = np.clip(x, -config.clip, config.clip)
    x = norm(x, weights.final_norm)
    return x[:, : config.output_dim] if weights.unembed is None else x @ weights.unembed


VARIATIONS = {
    "plain": {},
    "no embedding": dict(model_dim=None, output_dim=2, masked=2, clip=1.0),
    "positions beside inputs": dict(positions=Positions(dim=6)),
    "positions beside keys": dict(positions=Positions(dim=6, at="keys")),
    "positions added": dict(positions=Positions(dim=6, at="tokens")),
    "everything else": dict(
        layer_norm=True, normalize=Normalize(), mlp=FeedForward(hidden=5), forgets=True, shift_keys=True
    ),
    "queries and values": dict(normalize=Normalize(values=True)),
    # (Of features, which are positive: other sums may be anything, zero too.)
    "divided by sums": dict(normalize=Normalize(by="sum", of="features"), dpfp=1),
    "mean zero, variance one": dict(normalize=Normalize(by="layer_norm")),
    "gelu by tanh": dict(mlp=FeedForward(hidden=5, activation="gelu_tanh")),
    "relu": dict(mlp=FeedForward(hidden=5, activation="relu")),
}


def combinations():
    """All mixers with everything, every variation with one mixer drawn at random; the rest is slow."""
    rng = random.Random(0)
    fast = {("everything else", m) for m in MIXERS} | {(v, rng.choice(list(MIXERS))) for v in VARIATIONS}
    for pair in itertools.product(VARIATIONS, MIXERS):
        yield pytest.param(*pair, marks=() if pair in fast else pytest.mark.slow)


@pytest.mark.parametrize(("variation", "mixer"), list(combinations()))
def test_against_numpy(variation, mixer):
    config = small(MIXERS[mixer], **VARIATIONS[variation])
    model = built(config)
    tokens = tokens_like(config, 2)
    out = run(model, tokens)
    assert_close(out, np.stack([in_numpy(model, t) for t in tokens]), scale=5, name=variation)


def test_lam_itself_is_learned():
    """In released models the parameter is λ, of each head its own."""
    model = built(small(Mesa(raw=True, lam_init=0.5)))
    lam = [jnp.array([0.2, 3.0], jnp.float32), jnp.array([1.5, 0.05], jnp.float32)]
    model = eqx.tree_at(lambda m: [layer.lam for layer in m.layers], model, lam)
    tokens = tokens_like(model.config, 2)
    assert_close(run(model, tokens), np.stack([in_numpy(model, t) for t in tokens]), scale=5)
    # Where training drives it below zero, it is used as 1e-6.
    sunk, least = (
        eqx.tree_at(lambda m: [layer.lam for layer in m.layers], model, [jnp.full(2, at, jnp.float32)] * 2)
        for at in (-0.3, 1e-6)
    )
    assert np.array_equal(run(sunk, tokens), run(least, tokens))


def test_lam_that_goes_to_zero():
    """Its gradient stays finite, and where λ is not small nothing changes by what keeps it from zero."""
    model = built(small(Mesa()))
    tokens = tokens_like(model.config, 2)
    assert_close(run(model, tokens), np.stack([in_numpy(model, t) for t in tokens]), scale=5)
    slope = jax.jit(jax.grad(lambda model: jnp.sum(model(tokens) ** 2)))
    for raw in (-20.0, -50.0, -110.0, -1e4):
        sunk = eqx.tree_at(lambda m: m.layers[1].lam, model, jnp.full(2, raw, jnp.float32))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((run(sunk, tokens), slope(sunk)))), raw
    for lam in (1e-3, 1.0, 30.0, 1000.0):
        start = built(small(Mesa(lam_init=lam))).layers[0].lam
        np.testing.assert_allclose(np.logaddexp(0, np.asarray(start, np.float64)), lam, rtol=1e-5)


# In the fast tier: attention with and without a map of its own. The other two share all of their code.
TWO = [pytest.param(m, marks=() if m in ("softmax", "mesa") else pytest.mark.slow) for m in MIXERS]


@pytest.mark.parametrize("mixer", TWO)
def test_traces_and_edits(mixer):
    config = small(MIXERS[mixer], mlp=FeedForward(hidden=5), positions=Positions(dim=6))
    model = built(config)
    tokens = tokens_like(config, 2)
    out, seen = jax.jit(lambda t: model.trace(t))(tokens)
    assert_close(out, run(model, tokens))
    assert seen["blocks.1.mixer.queries"].shape == (2, 2, 7, 3)
    # The residual stream adds up, and every head's output is its attention map times its values.
    total = seen["embedded"] + sum(seen[f"blocks.{i}.{p}.out"] for i in range(2) for p in ("mixer", "mlp"))
    assert_close(total, seen["blocks.1.resid_post"])
    for i in range(2):
        attention = seen[f"blocks.{i}.mixer.attention"]
        assert np.abs(np.triu(attention, 1)).max() < 1e-6
        assert_close(attention @ seen[f"blocks.{i}.mixer.values"], seen[f"blocks.{i}.mixer.heads"], scale=5)
    # An edit acts from its place on, and nowhere before.
    cut, after = jax.jit(lambda t: model.trace(t, edit={"blocks.1.mixer.out": jnp.zeros_like}))(tokens)
    assert_close(after["blocks.0.resid_post"], seen["blocks.0.resid_post"])
    assert not np.any(after["blocks.1.mixer.out"])
    assert np.abs(cut - out).max() > 1e-3
    with pytest.raises(KeyError, match=r"no activation 'blocks\.7\.mixer\.out'.*blocks\.1\.mixer\.queries"):
        model.trace(tokens, edit={"blocks.7.mixer.out": jnp.zeros_like})


@pytest.mark.parametrize("mixer", TWO)
def test_causal_and_differentiable_for_many_seeds_at_once(mixer):
    config = small(MIXERS[mixer], forgets=True, dpfp=1)
    models = jax.vmap(lambda key: Transformer(config, key=key))(jax.random.split(jax.random.key(0), 3))
    tokens = tokens_like(config, 2)

    @jax.jit
    def slopes(models, tokens):
        def loss(model, tokens):
            return jnp.sum(model(tokens)[:, 4] ** 2)

        return jax.vmap(jax.grad(loss, (0, 1)), (0, None))(models, tokens)

    model_bar, token_bar = slopes(models, tokens)
    assert not np.any(token_bar[:, :, 5:])
    assert np.all(np.abs(token_bar[:, :, 4]).max(-1) > 0)
    for leaf in jax.tree.leaves(model_bar):
        assert np.isfinite(leaf).all()
        assert np.any(leaf)


@pytest.mark.parametrize("mixer", TWO)
def test_nothing_is_computed_that_is_not_read(mixer):
    config = small(MIXERS[mixer])
    model, tokens = built(config), tokens_like(config)

    def operations(function):
        return jax.jit(function).lower(tokens).compile().cost_analysis()["flops"]

    def first(t):
        out, seen = model.trace(t)
        return out, seen["blocks.0.mixer.attention"]

    whole = operations(lambda t: model(t))
    assert operations(lambda t: model.trace(t)[0]) == whole
    assert operations(first) > whole
    # What lies behind is not computed either.
    assert operations(lambda t: model.trace(t)[1]["blocks.0.resid_post"]) < 0.6 * whole


def test_attention_maps_can_be_edited():
    """Those of softmax, which outputs are computed from; they lie on the way to the output only then."""
    model = built(small(Softmax()))
    tokens = tokens_like(model.config)
    cut, seen = model.trace(tokens, edit={"blocks.0.mixer.attention": jnp.zeros_like})
    assert not np.any(seen["blocks.0.mixer.heads"])
    assert np.abs(cut - model(tokens)).max() > 1e-3
    for mixer, there in ((Softmax(), True), (Linear(), False)):
        model = built(small(mixer))
        with pytest.raises(KeyError) as error:
            jax.eval_shape(lambda t, m=model: m.trace(t, edit={"nothing": jnp.zeros_like}), tokens)
        assert ("blocks.1.mixer.attention" in str(error.value)) == there


def test_features_and_codes():
    x = np.random.default_rng(0).standard_normal((5, 4))
    r = np.maximum(np.concatenate([x, -x], 1), 0)
    expected = np.concatenate([r * np.roll(r, i, 1) for i in (1, 2, 3)], 1)
    assert_close(dpfp(jnp.asarray(x), 3), expected)
    assert dpfp(jnp.zeros((2, 64)), 3).shape == (2, 384)
    code = np.asarray(positions(50, 40))
    assert_close(code[7, 4:6], np.array([np.sin(7 / 10000 ** (4 / 40)), np.cos(7 / 10000 ** (4 / 40))]))


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match=r"tokens: expected \[..., time, 4\], got shape \(7, 5\)"):
        built(small(Linear()))(jnp.zeros((7, 5)))
    with pytest.raises(ValueError, match="blocks: expected at least one"):
        ModelConfig(token_dim=4, output_dim=4, blocks=())
    with pytest.raises(ValueError, match="output_dim"):
        ModelConfig(token_dim=4, output_dim=5, blocks=(Block(),))
    with pytest.raises(ValueError, match="masked"):
        small(Linear(), masked=6)
    with pytest.raises(ValueError, match=r"positions\.dim: expected the width 6, got 40"):
        small(Linear(), positions=Positions(at="tokens"))


def places():
    """All places of the codes with all mixers; each place once in the fast tier."""
    fast = {("softmax", "keys"), ("linear", "tokens"), ("mesa", "key_inputs")}
    for pair in itertools.product(MIXERS, ("key_inputs", "keys", "tokens")):
        yield pytest.param(*pair, marks=() if pair in fast else pytest.mark.slow)


@pytest.mark.parametrize(("mixer", "at"), list(places()))
def test_decoding_equals_the_parallel_pass(mixer, at):
    """However the sequence is cut; and what is remembered does not grow."""
    changes = VARIATIONS["everything else"] | dict(positions=Positions(dim=6, at=at))
    config = small(MIXERS[mixer], **changes)
    model, tokens = built(config), tokens_like(config, 2)
    expected = run(model, tokens)
    decode = jax.jit(lambda model, tokens, state: model.decode(tokens, state))
    start = model.init_state(2, length=7)
    for cuts in ([1] * 7, [4, 1, 2], [7]):
        state, at_token, parts = start, 0, []
        for size in cuts:
            out, state = decode(model, tokens[:, at_token : at_token + size], state)
            parts, at_token = [*parts, out], at_token + size
        assert_close(jnp.concatenate(parts, 1), expected, scale=5, name=f"cut {cuts}")
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, start)
    assert state.position == 7


@pytest.mark.parametrize("mixer", TWO)
def test_decoding_in_float64(mixer):
    changes = VARIATIONS["everything else"] | dict(positions=Positions(dim=6))
    config = small(MIXERS[mixer], **changes)
    model, tokens = built(config), tokens_like(config, 2).astype(jnp.float64)
    state, parts = model.init_state(2, length=7, dtype=jnp.float64), []
    decode = jax.jit(lambda tokens, state: model.decode(tokens, state))
    for part in jnp.split(tokens, [4, 5], 1):
        out, state = decode(part, state)
        parts.append(out)
    out = jnp.concatenate(parts, 1)
    assert out.dtype == jnp.float64
    assert_close(out, np.stack([in_numpy(model, t) for t in tokens]), scale=5)
    with pytest.raises(
        TypeError, match=r"tokens: of dtype float64, and the state is for float32: .*dtype=float64\)"
    ):
        model.decode(tokens, model.init_state(2, length=7))
    with pytest.raises(TypeError, match="tokens: of dtype float32, and the state is for float64"):
        model.decode(tokens.astype(jnp.float32), state)


@pytest.mark.parametrize("forgets", [False, True])
def test_decoding_beyond_the_length(forgets):
    """Said where it can be; elsewhere nothing that there is room for is spoiled."""
    config = small(Softmax(), forgets=forgets)
    model, tokens = built(config), tokens_like(config, 2)
    expected = run(model, tokens)
    start = model.init_state(2, length=6)
    _, state = model.decode(tokens[:, :4], start)
    with pytest.raises(
        ValueError, match=r"tokens: 3 after 4 do not fit .* room for 6\. .*init_state\(length=…\)"
    ):
        model.decode(tokens[:, 4:], state)
    decode = jax.jit(lambda tokens, state: model.decode(tokens, state))
    with pytest.raises(ValueError, match="tokens: 7 after 0 do not fit"):
        decode(tokens, start)
    one, state = decode(tokens[:, :4], start)
    two, state = decode(tokens[:, 4:], state)
    assert_close(jnp.concatenate([one, two], 1)[:, :6], expected[:, :6], scale=5)
    # What is remembered is what was when the room was full.
    _, full = decode(tokens[:, 4:6], decode(tokens[:, :4], start)[1])
    assert all(map(np.array_equal, *map(jax.tree.leaves, (state.layers, full.layers))))
    assert state.position == 7


def test_softmax_decoding_needs_a_length():
    with pytest.raises(ValueError, match="length: softmax layers keep every token"):
        built(small(Softmax())).init_state(2)
    sizes = [x.size for x in jax.tree.leaves(built(small(Mesa())).init_state(2))]
    assert sum(sizes) == 1 + 2 + 2 * 2 * 2 * (9 + 9)


def test_gradients_are_the_slopes_of_the_numpy_model():
    mlp = FeedForward(hidden=5)
    config = small(Softmax(), mlp=mlp, layer_norm=True, positions=Positions(at="key_inputs", dim=2))
    model, tokens = built(config), tokens_like(config, 2, time=5)
    target = np.asarray(tokens_like(config, 2, time=5, seed=2), np.float64)

    def loss(model):
        return sum(np.sum(t * in_numpy(model, x)) for t, x in zip(target, tokens, strict=True))

    weigh = jax.jit(jax.grad(lambda m: jnp.sum(jnp.asarray(target, jnp.float32) * m(tokens))))
    slopes, structure = jax.tree.flatten(weigh(model))
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(model)]
    rng = np.random.default_rng(0)
    for i, slope in enumerate(slopes):
        # Partly along the gradient, lest everything cancel.
        along, other = np.asarray(slope, np.float64), rng.standard_normal(slope.shape)
        direction = along / np.linalg.norm(along) + other / np.linalg.norm(other)

        def moved(by, i=i, direction=direction):
            changed = [leaf + by * direction if j == i else leaf for j, leaf in enumerate(leaves)]
            return loss(jax.tree.unflatten(structure, changed))

        measured = (moved(1e-5) - moved(-1e-5)) / 2e-5
        assert_close(np.float32(np.sum(along * direction)), np.float32(measured), name=f"leaf {i}")
