"""The language model against plain numpy, and what its users rely on: documents, decoding, precision, sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.language.model import LanguageModel, LanguageModelConfig, cross_entropy
from mesascope.models import Block, Delta, FeedForward, Linear, Mesa, Normalize, Softmax
from tests.helpers import assert_close
from tests.test_models import in_numpy

EOS = 3
MIXERS = {"softmax": Softmax(), "linear": Linear(), "mesa": Mesa(), "delta": Delta()}
FEATURES = Normalize(of="features")
TWO = [pytest.param(m, marks=() if m in ("softmax", "mesa") else pytest.mark.slow) for m in MIXERS]


def small(mixer, **changes):
    """A softmax layer with an MLP, and one that shifts keys and forgets."""
    first = Block(mixer=Softmax(), heads=2, key_dim=4, mlp=FeedForward(hidden=6, activation="relu"))
    second = Block(mixer=mixer, heads=2, key_dim=4, normalize=FEATURES, dpfp=2, forgets=True, shift_keys=True)
    sizes = dict(vocabulary=11, width=8, blocks=(first, second), init_std=0.3, dropout=0.0, resets_at=EOS)
    return LanguageModelConfig(**sizes | changes)


def built(config, seed=0):
    """With biases that are not zero, lest nobody notice them."""
    model = jax.jit(lambda key: LanguageModel(config, key=key))(jax.random.key(seed))
    leaves, structure = jax.tree.flatten(model)
    rng = np.random.default_rng(seed)
    moved = [
        a + jnp.asarray(0.1 * rng.standard_normal(a.shape), a.dtype) if a.ndim == 1 else a for a in leaves
    ]
    return jax.tree.unflatten(structure, moved)


TOKENS = (
    jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 12)), jnp.int32)
    .at[0, 5]
    .set(EOS)
    .at[0, 0]
    .set(1)
)
run = jax.jit(lambda model, tokens: model(tokens))


@pytest.mark.parametrize("mixer", TWO)
@pytest.mark.parametrize("resets_at", [EOS, None])
def test_against_numpy(mixer, resets_at):
    config = small(MIXERS[mixer], resets_at=resets_at)
    model = built(config)
    out = run(model, TOKENS)
    embed, unembed = (np.asarray(a, np.float64) for a in (model.embed, model.unembed))
    codes = np.array([
        [(np.sin, np.cos)[j % 2](t / 10000 ** ((j - j % 2) / 8)) for j in range(8)] for t in range(12)
    ])  # fmt: skip
    for tokens, logits in zip(np.asarray(TOKENS), out, strict=True):
        begins = None if resets_at is None else tokens == resets_at
        expected = in_numpy(model.body, np.sqrt(8) * embed[tokens] + codes, begins) @ unembed
        assert_close(logits, expected, scale=20)


@pytest.mark.parametrize("mixer", TWO)
def test_documents_do_not_reach_across(mixer):
    """What came before its first token has no influence on a document; without resets it has."""
    other = TOKENS.at[:, :5].set((TOKENS[:, :5] + 4) % 11)
    for resets_at, same in ((EOS, True), (None, False)):
        model = built(small(MIXERS[mixer], resets_at=resets_at))
        a, b = run(model, TOKENS)[0, 5:], run(model, other)[0, 5:]
        assert np.allclose(a, b, atol=1e-5) == same
    slope = jax.grad(lambda x, model: jnp.sum(model.body(x, begins=TOKENS == EOS)[0, 7] ** 2))
    x = jax.random.normal(jax.random.key(0), (2, 12, 8), jnp.float32)
    bar = jax.jit(slope)(x, built(small(MIXERS[mixer])))
    assert not np.any(bar[0, :5])
    assert np.all(np.abs(bar[0, 5:8]).max(-1) > 0)
    assert not np.any(bar[0, 8:])


@pytest.mark.parametrize("mixer", TWO)
def test_decoding_equals_the_parallel_pass(mixer):
    model = built(small(MIXERS[mixer]))
    expected = run(model, TOKENS)
    decode = jax.jit(lambda tokens, state: model.decode(tokens, state))
    start = model.init_state(2, length=12)
    for cuts in ([1] * 12, [4, 1, 7], [5, 7]):
        state, at, parts = start, 0, []
        for size in cuts:
            out, state = decode(TOKENS[:, at : at + size], state)
            parts, at = [*parts, out], at + size
        assert_close(jnp.concatenate(parts, 1), expected, scale=20, name=f"cut {cuts}")
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, start)


def test_traces_and_edits():
    model = built(small(Mesa()))
    out, seen = jax.jit(lambda t: model.trace(t))(TOKENS)
    assert_close(out, run(model, TOKENS), scale=5)
    attention = seen["blocks.0.mixer.attention"]
    assert_close(attention.sum(-1), np.ones((2, 2, 12), np.float32))
    assert not np.any(attention[0, :, 5:, :5])
    assert_close(seen["blocks.1.mixer.attention"] @ seen["blocks.1.mixer.values"], seen["blocks.1.mixer.heads"],
                 scale=20)  # fmt: skip
    cut, _ = jax.jit(lambda t: model.trace(t, edit={"blocks.1.mixer.out": jnp.zeros_like}))(TOKENS)
    assert np.abs(cut - out).max() > 1e-3


@pytest.mark.parametrize("mixer", TWO)
def test_bfloat16_is_near_float32(mixer):
    """Values and gradients; weights and their gradients stay float32."""
    config = small(MIXERS[mixer], init_std=0.2)
    half = dataclasses.replace(config, compute="bfloat16")
    model = built(config)
    targets = jnp.roll(TOKENS, -1, 1)

    def slopes(config):
        def loss(weights):
            like = jax.tree.structure(jax.eval_shape(lambda: LanguageModel(config, key=jax.random.key(0))))
            return jnp.mean(cross_entropy(jax.tree.unflatten(like, weights)(TOKENS), targets))

        return jax.jit(jax.value_and_grad(loss))(jax.tree.leaves(model))

    (value, bars), (value_half, bars_half) = slopes(config), slopes(half)
    assert value == pytest.approx(float(value_half), rel=5e-3)
    flat, flat_half = (np.concatenate([np.ravel(b) for b in bs]) for bs in (bars, bars_half))
    assert {b.dtype for b in bars_half} == {jnp.dtype(jnp.float32)}
    assert np.linalg.norm(flat - flat_half) < 0.05 * np.linalg.norm(flat)


def test_dropout_is_drawn_for_each_sequence():
    model = built(small(Linear(), dropout=0.5, blocks=(Block(mixer=Linear(), heads=1, key_dim=2),)))
    keys = jax.random.split(jax.random.key(0), 2)
    drop = jax.jit(lambda t, k: model(t, key=k))
    both = drop(TOKENS, keys)
    assert_close(drop(TOKENS[1:], keys[1:]), both[1:])
    assert np.abs(both - run(model, TOKENS)).max() > 1e-3
    # On average nothing changes.
    x = model._embedded(TOKENS)
    many = jax.vmap(lambda k: model._embedded(TOKENS, key=jax.random.split(k, 2)))(
        jax.random.split(keys[0], 500)
    )
    assert np.abs(np.mean(many, 0) - x).max() < 0.3 * np.abs(x).max()
    assert np.mean(np.asarray(many) == 0) == pytest.approx(0.5, abs=0.02)


def test_cross_entropy_is_that_of_the_definition():
    logits = np.random.default_rng(0).standard_normal((2, 5, 7))
    targets = np.random.default_rng(1).integers(0, 7, (2, 5))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(p, targets[..., None], -1))[..., 0]
    assert_close(cross_entropy(jnp.asarray(logits), jnp.asarray(targets)), expected)


def test_wrong_configurations_are_named():
    for wrong, message in (
        (dict(vocabulary=1), "vocabulary: expected at least 2"),
        (dict(dropout=1.0), "dropout: expected a part of 1"),
        (dict(resets_at=11), "resets_at: expected one of the 11 tokens"),
        (dict(blocks=()), "blocks: expected at least one"),
        (dict(compute="float16"), "compute: expected 'float32' or 'bfloat16', got 'float16'"),
        (dict(init_std=-0.1), "init_std: "),
        (dict(width=0), "width: "),
    ):
        with pytest.raises(ValueError, match=message):
            small(Linear(), **wrong)
    with pytest.raises(TypeError, match="tokens: expected integers"):
        built(small(Linear()))(jnp.zeros((2, 3)))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_losses_are_the_cross_entropy_of_the_logits(compute):
    """At all tokens or at some, with gradients; in bfloat16 sizes are filled up."""
    block = Block(mixer=Linear(), heads=1, key_dim=2)
    model = built(small(Linear(), blocks=(block,), compute=compute, init_std=0.2))
    targets = jnp.roll(TOKENS, -1, 1)

    def plain(model):
        logits = model(TOKENS)
        return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]

    def slope(losses):
        value, bars = jax.jit(jax.value_and_grad(lambda m: jnp.sum(jnp.sin(losses(m)))))(model)
        return value.astype(compute), jnp.concatenate([jnp.ravel(b) for b in jax.tree.leaves(bars)]).astype(
            compute
        )

    for one, other in zip(slope(lambda m: m.losses(TOKENS, targets)), slope(plain), strict=True):
        assert_close(one, other, scale=5)
    at = jnp.asarray([[1, 7], [11, 0]], jnp.int32)
    some = jax.jit(lambda m: m.losses(TOKENS, jnp.take_along_axis(targets, at, 1), at=at))(model)
    assert_close(some.astype(compute), jnp.take_along_axis(plain(model), at, 1).astype(compute), scale=5)


@pytest.mark.parametrize("mixer", ["linear", pytest.param("mesa", marks=pytest.mark.slow)])
def test_keys_as_wide_as_those_of_the_paper(mixer):
    """DPFP with ν = 3 makes 384 features of 64."""
    block = Block(mixer=MIXERS[mixer], heads=1, key_dim=64, normalize=FEATURES, dpfp=3, shift_keys=True)
    config = LanguageModelConfig(vocabulary=11, width=8, blocks=(block,), init_std=0.3, dropout=0.0)
    model = built(config)
    embed, unembed = (np.asarray(a, np.float64) for a in (model.embed, model.unembed))
    codes = np.array([
        [(np.sin, np.cos)[j % 2](t / 10000 ** ((j - j % 2) / 8)) for j in range(8)] for t in range(12)
    ])  # fmt: skip
    expected = in_numpy(model.body, np.sqrt(8) * embed[np.asarray(TOKENS[1])] + codes, None) @ unembed
    assert_close(run(model, TOKENS)[1], expected, scale=20)


def test_weights_are_drawn_as_the_configuration_says():
    first = Block(mixer=Softmax(), heads=4, key_dim=32, mlp=FeedForward(hidden=256, activation="relu"))
    config = LanguageModelConfig(vocabulary=512, width=128, blocks=(first, first), residual_init=0.25)
    model = jax.jit(lambda key: LanguageModel(config, key=key))(jax.random.key(0))
    for layer in model.body.layers:
        for weights, std in (
            (layer.queries, 0.02), (layer.keys, 0.02), (layer.values, 0.02), (layer.mlp_in, 0.02),
            (layer.output, 0.005), (layer.mlp_out, 0.005),
        ):  # fmt: skip
            assert float(np.std(weights)) == pytest.approx(std, rel=0.03)
    for weights in (model.embed, model.unembed):
        assert float(np.std(weights)) == pytest.approx(0.02, rel=0.03)
