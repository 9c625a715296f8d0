"""The paper's language models, at three sizes.

    corpus = Corpus("corpora/NAME")
    config = language_preset("lm-2-mesa", corpus.task, size="gpu")

*Attention only, one layer with shifted keys* (`lm-keyshift-…`), *two layers* (`lm-2-…`), and *four layers with MLPs*
(`lm-4-…`). Of several layers the first is softmax attention; the others are `softmax`, `linear`, `mesa`, `delta`,
`mesa-forget`, a mesa-layer with forgetting factors, or `mesa-cg`, one solved approximately, by conjugate gradients. All
but softmax have DPFP features (ν = 3 unless the name says otherwise), whose length is 1.

Sizes: `paper` has the values of the paper's table. (Tokens of 756 entries meet 12 heads of 64 there: projections are
756 × 768, since nothing here asks for heads that divide the width.) `gpu` is the same model on 100 million tokens,
less than an hour on one GPU; `cpu` is a small one that learns something within minutes. At these two the warm-up is 5%
of the steps, and the rate falls to two thirds of its peak like the paper's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from mesascope.language.model import LanguageModelConfig
from mesascope.language.training import LanguageConfig
from mesascope.models import Block, Delta, FeedForward, Linear, Mesa, Mixer, Normalize, Softmax
from mesascope.store import unknown
from mesascope.tasks.text import Text
from mesascope.training import AdamW, TrainConfig, WarmupCosine

Size = Literal["paper", "gpu", "cpu"]
MIXERS: dict[str, Mixer] = {
    "softmax": Softmax(),
    "linear": Linear(),
    "mesa": Mesa(),
    "delta": Delta(),
    "mesa-forget": Mesa(),
    "mesa-cg": Mesa(method="cg"),
}
NUS = (0, 1, 2, 3)
PAPER_TOKENS = 300_000_000_000


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    width: int
    heads: int
    key_dim: int
    length: int
    batch_size: int
    accumulate: int
    steps: int
    rate: WarmupCosine
    seeds: int
    eval_every: int
    eval_sequences: int
    final_sequences: int
    eval_batch_size: int
    half: bool


def warmed_up(peak: float, steps: int) -> WarmupCosine:
    """The paper's schedule for so many steps: its warm-up (from a three-hundredth) for 5% of them, then down to 2/3."""
    warmup = max(1, steps // 20)
    return WarmupCosine(
        peak=peak, start=peak / 300, warmup=warmup, end=max(steps, warmup + 1), floor=2 / 3 * peak
    )


_PAPER_STEPS = PAPER_TOKENS // (256 * 1024)
SIZES: dict[Size, _Sizes] = {
    "paper": _Sizes(
        width=756, heads=12, key_dim=64, length=1024, batch_size=256, accumulate=16, steps=8000 + _PAPER_STEPS,
        rate=WarmupCosine(peak=3e-4, start=1e-6, warmup=8000, end=8000 + _PAPER_STEPS, floor=2e-4),
        seeds=1, eval_every=1000, eval_sequences=256, final_sequences=1024, eval_batch_size=16, half=True,
    ),
    "gpu": _Sizes(
        width=756, heads=12, key_dim=64, length=1024, batch_size=32, accumulate=2, steps=3052,
        rate=warmed_up(1e-3, 3052), seeds=3, eval_every=218, eval_sequences=256, final_sequences=1024,
        eval_batch_size=16, half=True,
    ),
    "cpu": _Sizes(
        width=64, heads=4, key_dim=16, length=128, batch_size=16, accumulate=1, steps=600,
        rate=warmed_up(3e-3, 600), seeds=2, eval_every=60, eval_sequences=64, final_sequences=256,
        eval_batch_size=16, half=False,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LanguagePreset:
    """One kind of language model.

    Attributes:
        shows: what it is, in a line.
        blocks: its layers, by heads, width of a head and width of the model.
    """

    shows: str
    blocks: Callable[[int, int, int], tuple[Block, ...]]


def language_preset(name: str, task: Callable[[int], Text], size: Size = "gpu") -> LanguageConfig:
    """The configuration of that name.

    Args:
        task: text in windows of a given length: `Corpus(path).task`.
    """
    if name not in LANGUAGE_PRESETS:
        raise ValueError(unknown("preset", name, LANGUAGE_PRESETS))
    if size not in SIZES:
        raise ValueError(f"size: expected one of {', '.join(SIZES)}, got {size!r}.")
    of = SIZES[size]
    text = task(of.length)
    blocks = LANGUAGE_PRESETS[name].blocks(of.heads, of.key_dim, of.width)
    model = LanguageModelConfig(
        vocabulary=text.vocabulary,
        width=of.width,
        blocks=blocks,
        compute="bfloat16" if of.half else "float32",
        residual_init=1 / (2 * len(blocks) ** 0.5),
    )
    train = TrainConfig(
        steps=of.steps,
        batch_size=of.batch_size,
        seeds=of.seeds,
        optimizer=AdamW(rate=of.rate, weight_decay=0.1, clip=1.0, clip_by="global_norm", b2=0.95),
        eval_every=of.eval_every,
        eval_batches=of.eval_sequences // of.eval_batch_size,
        eval_batch_size=of.eval_batch_size,
        final_sequences=of.final_sequences,
    )
    return LanguageConfig(
        name=f"{name}-{size}", task=text, model=model, train=train, accumulate=of.accumulate
    )


def with_rate(
    config: LanguageConfig, peak: float | None = None, *, steps: int | None = None, warmup: int | None = None
) -> LanguageConfig:
    """The same with another learning rate, from beginning to end, and for another number of steps, to which the
    schedule is stretched. None: as it is.

    Args:
        warmup: steps of it that are not stretched but given.
    """
    steps = config.train.steps if steps is None else steps
    rate, part = config.train.optimizer.rate, steps / config.train.steps
    times = 1.0 if peak is None else peak / rate.peak
    peak = rate.peak if peak is None else peak
    if isinstance(rate, WarmupCosine):
        warmup = max(1, round(part * rate.warmup)) if warmup is None else warmup
        end = max(warmup + 1, round(part * rate.end))
        rate = WarmupCosine(
            peak=peak, start=times * rate.start, warmup=warmup, end=end, floor=times * rate.floor
        )
    else:
        rate = replace(rate, peak=peak)
    optimizer = replace(config.train.optimizer, rate=rate)
    every = min(config.train.eval_every, steps)
    return replace(config, train=replace(config.train, steps=steps, optimizer=optimizer, eval_every=every))


def _mixing(mixer: str, heads: int, key_dim: int, nu: int) -> Block:
    block = Block(mixer=MIXERS[mixer], heads=heads, key_dim=key_dim, forgets=mixer == "mesa-forget")
    return block if mixer == "softmax" else replace(block, dpfp=nu, normalize=Normalize(of="features"))


def _key_shift(mixer: str, nu: int) -> Callable[[int, int, int], tuple[Block, ...]]:
    return lambda heads, key_dim, width: (replace(_mixing(mixer, heads, key_dim, nu), shift_keys=True),)


def _layers(mixer: str, layers: int) -> Callable[[int, int, int], tuple[Block, ...]]:
    def build(heads: int, key_dim: int, width: int) -> tuple[Block, ...]:
        blocks = (_mixing("softmax", heads, key_dim, 0),) + (_mixing(mixer, heads, key_dim, 3),) * (
            layers - 1
        )
        mlp = FeedForward(hidden=4 * width, activation="relu") if layers > 2 else None
        return tuple(replace(block, mlp=mlp) for block in blocks)

    return build


def _table() -> dict[str, LanguagePreset]:
    table = {}
    for mixer in MIXERS:
        for nu in NUS:
            name = "lm-keyshift-softmax" if mixer == "softmax" else f"lm-keyshift-{mixer}-nu{nu}"
            features = "" if mixer == "softmax" or nu == 0 else f", DPFP with ν = {nu}"
            table[name] = LanguagePreset(
                shows=f"one layer of {mixer} attention with shifted keys{features}",
                blocks=_key_shift(mixer, nu),
            )
    for layers in (2, 4):
        for mixer in MIXERS:
            others = "all softmax" if mixer == "softmax" else f"softmax, then {mixer}"
            table[f"lm-{layers}-{mixer}"] = LanguagePreset(
                shows=f"{layers} layers{' with MLPs' if layers > 2 else ''}, {others}",
                blocks=_layers(mixer, layers),
            )
    return table


LANGUAGE_PRESETS = _table()
