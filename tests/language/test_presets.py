"""Every language model of the paper can be built, with as many parameters as the others it is compared with."""

import dataclasses

import pytest

from mesascope.language import LANGUAGE_PRESETS, LanguageConfig, language_preset, with_rate
from mesascope.language.presets import NUS, SIZES
from mesascope.models import Delta, FeedForward, Linear, Mesa, Softmax
from mesascope.show import parameters
from mesascope.store import digest, from_dict, to_dict
from mesascope.tasks.text import Text
from mesascope.training import WarmupCosine


def gpt2(length):
    return Text(corpus="0123456789", vocabulary=50257, eos=50256, length=length)


@pytest.mark.parametrize("size", SIZES)
def test_every_preset(size):
    digests = set()
    for name in LANGUAGE_PRESETS:
        config = language_preset(name, gpt2, size)
        assert from_dict(to_dict(config), LanguageConfig) == config
        digests.add(digest(config))
        assert config.name == f"{name}-{size}"
    assert len(digests) == len(LANGUAGE_PRESETS) == 1 + 5 * len(NUS) + 2 * 6


def test_parameters_are_as_many_for_every_mixer():
    """A mesa-layer has one λ more per head, a delta layer a rate (w·x) and a forgetting factor (w·x + b) per head."""
    heads, width = 12, 756
    extra = {"linear": 0, "mesa": heads, "delta": width * heads, "mesa-forget": heads + (width + 1) * heads}
    extra["mesa-cg"] = extra["mesa"]
    for layers in (2, 4):
        softmax = parameters(language_preset(f"lm-{layers}-softmax", gpt2, "paper"))
        for mixer, more in extra.items():
            count = parameters(language_preset(f"lm-{layers}-{mixer}", gpt2, "paper"))
            assert count == softmax + (layers - 1) * more
            assert count < 1.001 * softmax
    softmax = parameters(language_preset("lm-keyshift-softmax", gpt2, "paper"))
    for nu in NUS:  # features have no parameters
        for mixer, more in extra.items():
            assert parameters(language_preset(f"lm-keyshift-{mixer}-nu{nu}", gpt2, "paper")) == softmax + more
    vocabulary, inner = 50257 * width, heads * 64
    assert softmax == 2 * vocabulary + 4 * width * inner + 3 * inner + width + 2 * width


def test_the_paper_s_table():
    config = language_preset("lm-4-mesa", gpt2, "paper")
    model, train, optimizer = config.model, config.train, config.train.optimizer
    assert (model.width, model.dropout, model.init_std, model.residual_init) == (756, 0.1, 0.02, 0.25)
    assert (model.vocabulary, config.task.length, train.batch_size) == (50257, 1024, 256)
    assert (optimizer.b1, optimizer.b2, optimizer.eps, optimizer.weight_decay) == (0.9, 0.95, 1e-8, 0.1)
    assert (optimizer.clip, optimizer.clip_by) == (1.0, "global_norm")
    rate = optimizer.rate
    assert isinstance(rate, WarmupCosine)
    assert (rate.start, rate.peak, rate.warmup, rate.floor) == (1e-6, 3e-4, 8000, 2e-4)
    assert (rate.end - rate.warmup) * 256 * 1024 == pytest.approx(300e9, rel=1e-5)
    assert float(rate(0)) == pytest.approx(1e-6)
    assert float(rate(8000)) == pytest.approx(3e-4)
    assert [type(b.mixer) for b in model.blocks] == [Softmax, Mesa, Mesa, Mesa]
    assert all((b.heads, b.key_dim) == (12, 64) for b in model.blocks)
    assert all(b.mlp == FeedForward(hidden=4 * 756, activation="relu") for b in model.blocks)
    assert [b.dpfp for b in model.blocks] == [0, 3, 3, 3]
    assert model.blocks[0].normalize is None
    assert model.blocks[1].mixer.lam_init == 1.0
    (block,) = language_preset("lm-keyshift-delta-nu2", gpt2, "paper").model.blocks
    assert (block.mixer, block.shift_keys, block.dpfp, block.mlp) == (Delta(), True, 2, None)
    first, second = language_preset("lm-2-linear", gpt2, "paper").model.blocks
    assert (first.mixer, second.mixer, second.mlp) == (Softmax(), Linear(), None)


def test_another_rate_keeps_the_shape_of_the_schedule():
    config = with_rate(language_preset("lm-2-mesa", gpt2, "gpu"), 2e-3, steps=300)
    rate = config.train.optimizer.rate
    assert (config.train.steps, rate.warmup, rate.end) == (300, 15, 300)
    assert rate.floor / rate.peak == pytest.approx(2 / 3)
    assert config.train.eval_every <= 300
    assert rate.start / rate.peak == pytest.approx(1 / 300)
    paper = language_preset("lm-2-mesa", gpt2, "paper")
    other = with_rate(paper, 6e-4).train.optimizer.rate
    assert (other.warmup, other.end) == (8000, paper.train.optimizer.rate.end)
    assert (other.start, other.peak, other.floor) == (2e-6, 6e-4, 4e-4)
    assert with_rate(paper) == paper
    again = with_rate(config, 2e-3)
    assert dataclasses.replace(again, name="x") == dataclasses.replace(config, name="x")


def test_wrong_names():
    with pytest.raises(ValueError, match=r"there is no 'lm-3-mesa'\. The nearest are: lm-4-mesa"):
        language_preset("lm-3-mesa", gpt2)
    with pytest.raises(ValueError, match="size: expected one of paper, gpu, cpu, got 'tpu'"):
        language_preset("lm-2-mesa", gpt2, "tpu")  # pyright: ignore
