"""Every configuration of the paper.

    config = mesascope.preset("hybrid-mesa")                        # as the released code ran it
    config = mesascope.preset("hybrid-mesa", variant="as_written")  # as the paper's text and tables have it

They differ in more than numbers. *As run*: no LayerNorm anywhere, MLPs for the nonlinear task only, codes of positions
beside the inputs of the first layer's queries and keys, gradients clipped entry by entry, activations clipped in hybrid
models, λ without a constraint. *As written*: blocks of GPT-2's kind with LayerNorm and MLPs (four times as wide as the
model, where no width is given), codes beside the queries and keys themselves, gradients clipped by their norm.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from mesascope.models import (
    Block,
    FeedForward,
    Linear,
    Mesa,
    Mixer,
    ModelConfig,
    Normalize,
    Positions,
    Softmax,
)
from mesascope.store import unknown
from mesascope.tasks import Constructed, Dynamics
from mesascope.training import AdamW, Config, Constant, TrainConfig, WarmupCosine

Variant = Literal["as_run", "as_written"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One named experiment.

    Attributes:
        shows: what it is for, in a line.
        build: its configuration in a variant.
        reference: the loss of the authors' released model, where they stored one: ½‖error‖², mean over sequences and
            positions.
    """

    shows: str
    build: Callable[[Variant], Config]
    reference: float | None = None


def preset(name: str, variant: Variant = "as_run") -> Config:
    """The configuration of that name; `PRESETS` has them all."""
    if name not in PRESETS:
        raise ValueError(unknown("preset", name, PRESETS))
    if variant not in ("as_run", "as_written"):
        raise ValueError(f"variant: expected 'as_run' or 'as_written', got {variant!r}.")
    config = PRESETS[name].build(variant)
    return replace(config, name=name if variant == "as_run" else f"{name}-as-written")


def _optimizer(variant: Variant, rate: Constant | WarmupCosine, weight_decay: float) -> AdamW:
    by = "entry" if variant == "as_run" else "global_norm"
    return AdamW(rate=rate, weight_decay=weight_decay, clip=1.0, clip_by=by)


def _mesa(variant: Variant) -> Mesa:
    return Mesa(raw=variant == "as_run")


def _constructed(
    variant: Variant,
    *,
    mixer: Literal["linear", "mesa"] = "linear",
    layers: int = 1,
    heads: int | None = None,
    key_dim: int = 20,
    task: Dynamics | None = None,
    rate: float,
    steps: int,
    weight_decay: float = 0.1,
    batch_size: int = 256,
    keep_every: int | None = None,
) -> Config:
    """Tokens that already hold the previous observation; predictions are read from the first slot.

    The text has one recipe for all of them: rate 1e-4, weight decay 0.1, batches of 256, at most 10,000 steps.
    """
    as_run = variant == "as_run"
    if not as_run:
        rate, weight_decay, batch_size, steps = 1e-4, 0.1, 256, min(steps, 10_000)
    task = Dynamics.linear(variant) if task is None else task
    tokens = Constructed(slots=4)
    # The text gives every single-layer model two heads; the released mesa-layer has four.
    heads = (2 if layers == 1 and (mixer == "linear" or not as_run) else 4) if heads is None else heads
    block = Block(mixer=Linear() if mixer == "linear" else _mesa(variant), heads=heads, key_dim=key_dim)
    model = ModelConfig(
        token_dim=tokens.width(task.obs_dim),
        output_dim=task.obs_dim,
        blocks=(block,) * layers,
        clip=4.0 if as_run or mixer == "linear" else None,
        masked=2 * task.obs_dim if as_run and layers == 1 else 0,
        init_std=2e-4 if as_run else 2e-4**0.5,
    )
    train = TrainConfig(
        steps=steps,
        batch_size=batch_size,
        optimizer=_optimizer(variant, Constant(peak=rate), weight_decay),
        keep_every=keep_every,
    )
    return Config(name="", task=task, tokens=tokens, model=model, train=train)


def _full(
    variant: Variant,
    *,
    mixers: tuple[Mixer, ...],
    task: Dynamics | None = None,
    width: int = 40,
    heads: int = 4,
    key_dim: int = 20,
    output_dim: int | None = None,
    mlp: int | None = None,
    normalize: tuple[Normalize | None, ...] | None = None,
    clip: float | None = None,
    init_std: float = 0.05,
    rate: WarmupCosine,
    steps: int,
    batch_size: int = 256,
    eval_batch_size: int = 256,
    keep_every: int | None = None,
) -> Config:
    """Observations as tokens, embeddings in and out, positions in the first layer."""
    as_run = variant == "as_run"
    task = Dynamics.linear(variant) if task is None else task
    if mlp is None and not as_run:
        mlp = 4 * width
    activation = "gelu_tanh" if as_run else "gelu"
    blocks = tuple(
        Block(
            mixer=mixer,
            heads=heads,
            key_dim=key_dim,
            normalize=None if normalize is None else normalize[i],
            mlp=None if mlp is None else FeedForward(hidden=mlp, activation=activation),
        )
        for i, mixer in enumerate(mixers)
    )
    model = ModelConfig(
        token_dim=task.obs_dim,
        output_dim=task.obs_dim if output_dim is None else output_dim,
        model_dim=width,
        blocks=blocks,
        positions=Positions(at="key_inputs" if as_run else "keys", dim=width),
        layer_norm=not as_run,
        clip=clip if as_run else None,
        init_std=init_std,
        tf32=True,
    )
    train = TrainConfig(
        steps=steps,
        batch_size=batch_size,
        optimizer=_optimizer(variant, rate, 0.05),
        keep_every=keep_every,
        eval_batch_size=eval_batch_size,
    )
    return Config(name="", task=task, model=model, train=train)


def _hybrid(variant: Variant) -> tuple[Mixer, ...]:
    return (Softmax(), _mesa(variant))


def _full_mesa(variant: Variant) -> tuple[Mixer, ...]:
    """The released first layer is linear attention: a switch that was never passed on."""
    return (Linear() if variant == "as_run" else _mesa(variant), _mesa(variant))


def _kind(kind: str, variant: Variant) -> tuple[Mixer, ...]:
    if kind.startswith("softmax-"):
        return (Softmax(),) * int(kind.removeprefix("softmax-"))
    return _hybrid(variant) if kind == "hybrid-mesa" else _full_mesa(variant)


def _rate(variant: Variant, as_run: float, *, end: int = 30_000, as_written: float = 7e-4) -> WarmupCosine:
    """The text counts the cosine's steps from the peak, the released code from the first step."""
    if variant == "as_run":
        return WarmupCosine(peak=as_run, end=end)
    return WarmupCosine(peak=as_written, end=end + 1000)


def _linear_task(
    variant: Variant, *, kind: str, rate: float, steps: int, keep_every: int | None = None
) -> Config:
    return _full(
        variant,
        mixers=_kind(kind, variant),
        clip=1.0 if kind == "hybrid-mesa" else None,
        rate=_rate(variant, rate),
        steps=steps if variant == "as_run" else 10_000,
        keep_every=keep_every,
    )


def _partial(
    variant: Variant, *, kind: str, width: int = 80, steps: int, keep_every: int | None = None
) -> Config:
    as_run = variant == "as_run"
    return _full(
        variant,
        mixers=_kind(kind, variant),
        task=Dynamics.partially_observed(variant),
        width=width,
        heads=12 if as_run else 4,
        key_dim=min(20, width),
        clip=1.0 if kind == "hybrid-mesa" else None,
        init_std=0.05 if as_run else 0.05**0.5,
        rate=_rate(variant, 4e-4, as_written=4e-4),
        steps=steps,
        keep_every=keep_every,
    )


def _nonlinear(variant: Variant, *, kind: str, steps: int = 40_000, keep_every: int | None = None) -> Config:
    """The text has sums, its table LayerNorm of queries and keys in every layer (here: the table); as run, Euclidean
    norms from the second layer on, and of values instead of keys in the mesa-layer."""
    mixers = _kind(kind, variant)
    if variant == "as_run":
        later = [Normalize(by="l2", values=isinstance(mixer, Mesa)) for mixer in mixers[1:]]
        normalize = (None, *later)
    else:
        normalize = (Normalize(by="layer_norm"),) * len(mixers)
    rate = 4e-4 if kind == "hybrid-mesa" else 1e-3
    return _full(
        variant,
        mixers=mixers,
        task=Dynamics.nonlinear(variant),
        width=60,
        mlp=300,
        normalize=normalize,
        clip=15.0 if kind == "hybrid-mesa" else None,
        init_std=0.05 if variant == "as_run" else 0.05**0.5,
        rate=_rate(variant, rate, end=50_000, as_written=rate),
        steps=steps,
        keep_every=keep_every,
    )


def _in_context(variant: Variant, *, kind: str, rate: float, steps: int) -> Config:
    return _full(
        variant,
        mixers=_kind(kind, variant),
        task=Dynamics.linear(variant, length=224),
        clip=1.0 if kind == "hybrid-mesa" else None,
        rate=_rate(variant, rate, end=30_000 if variant == "as_run" else 60_000),
        steps=steps if variant == "as_run" else 40_000,
        batch_size=128,
        eval_batch_size=128,
    )


# Learning rates and steps by dimension: the authors chose them by hand for each seed; these are the middle ones.
# Figure 5 halves a rate with which a model diverges.
LINEARIZATION = {
    4: (4e-3, 5000),
    6: (4e-3, 5000),
    10: (4e-3, 5000),
    20: (9e-3, 8000),
    40: (7e-3, 2000),
    60: (3e-3, 3000),
}


def _linearization(variant: Variant, *, dim: int) -> Config:
    rate, steps = LINEARIZATION[dim]
    return _full(
        variant,
        mixers=(Softmax(),) * 7,
        task=Dynamics.linear(variant, state_dim=dim, length=4 * dim),
        width=4 * dim,
        key_dim=2 * dim,
        output_dim=4 * dim,
        rate=_rate(variant, rate),
        steps=steps if variant == "as_run" else 10_000,
        batch_size=64,
        eval_batch_size=64,
    )


def _constructed_softmax(variant: Variant) -> Config:
    task, tokens = Dynamics.linear(variant, state_dim=20, length=80), Constructed(slots=4)
    model = ModelConfig(
        token_dim=80,
        output_dim=20,
        blocks=(Block(mixer=Softmax(), heads=1, key_dim=40),) * 2,
        init_std=2e-4 if variant == "as_run" else 2e-4**0.5,
    )
    optimizer = _optimizer(variant, _rate(variant, 7e-4), 0.05)
    if variant == "as_written":
        optimizer = _optimizer(variant, Constant(peak=1e-4), 0.1)
    return Config(
        name="", task=task, tokens=tokens, model=model, train=TrainConfig(steps=10_000, optimizer=optimizer)
    )


def _other_task(variant: Variant, *, family: str, **recipe) -> Config:
    task = Dynamics.contracting(variant) if family == "contracting" else Dynamics.fixed_teacher(variant)
    return _constructed(variant, task=task, **recipe)


def _table() -> dict[str, Preset]:
    table: dict[str, Preset] = {}

    def add(
        name: str, shows: str, build: Callable[..., Config], reference: float | None = None, **recipe
    ) -> None:
        table[name] = Preset(shows=shows, build=partial(build, **recipe), reference=reference)

    references = {1: 0.894, 2: 0.430, 4: 0.236, 6: 0.216}
    steps = {1: 5000, 2: 5000, 4: 10_000, 6: 15_000}
    for layers in (1, 2, 4, 6):
        shows = f"{layers} layer{'s' if layers > 1 else ''} of linear attention on constructed tokens"
        add(f"linear-{layers}", shows, _constructed, references[layers],
            layers=layers, rate=1e-4, steps=steps[layers])  # fmt: skip
    add(
        "mesa-1",
        "one mesa-layer on constructed tokens",
        _constructed,
        0.190,
        mixer="mesa",
        rate=4e-4,
        steps=5000,
    )
    add("interpolation-1", "one linear layer, weights kept along training: its 12 scalars", _constructed,
        rate=2e-4, weight_decay=0.05, steps=3500, keep_every=100)  # fmt: skip
    add("interpolation-6", "six linear layers, weights kept along training: their 768 scalars", _constructed,
        layers=6, key_dim=40, rate=1e-4, steps=4500, batch_size=512, keep_every=100)  # fmt: skip
    add(
        "constructed-softmax",
        "two softmax layers of one head on constructed tokens, to be distilled",
        _constructed_softmax,
    )

    for layers, reference in ((3, 0.315), (7, 0.230), (12, 0.199)):
        add(f"softmax-{layers}", f"{layers} softmax layers on raw tokens", _linear_task, reference,
            kind=f"softmax-{layers}", rate=8e-4, steps=10_000)  # fmt: skip
    add("hybrid-mesa", "a softmax and a mesa-layer on raw tokens", _linear_task, 0.198,
        kind="hybrid-mesa", rate=3e-4, steps=20_000)  # fmt: skip
    add("full-mesa", "two mesa-layers (as run: linear attention and a mesa-layer)", _linear_task,
        kind="full-mesa", rate=3e-4, steps=3500)  # fmt: skip
    for kind, rate, count in (
        ("softmax-7", 8e-4, 20_000),
        ("hybrid-mesa", 8e-4, 12_000),
        ("full-mesa", 3e-4, 3500),
    ):
        add(f"binding-{kind}", f"{kind}, trained for the token probes of figure 2", _linear_task,
            kind=kind, rate=rate, steps=count)  # fmt: skip
    for kind, rate in (("softmax-7", 7e-4), ("hybrid-mesa", 7e-4), ("full-mesa", 3e-4)):
        add(f"sensitivity-{kind}", f"{kind}, weights kept along training: which tokens layer 1 depends on",
            _linear_task, kind=kind, rate=rate, steps=3000, keep_every=100)  # fmt: skip

    for kind, count in (("softmax-7", 20_000), ("hybrid-mesa", 12_000)):
        add(f"partial-{kind}", f"{kind} on partially observed dynamics", _partial, kind=kind, steps=count)
        for width in (5, 10, 15, 20, 30, 50):
            add(f"partial-{kind}-{width}", f"the same with embeddings {width} wide", _partial,
                kind=kind, width=width, steps=count)  # fmt: skip
        add(f"sensitivity-partial-{kind}", "the same, weights kept along a short training", _partial,
            kind=kind, steps=3000, keep_every=100)  # fmt: skip
    for kind in ("softmax-7", "hybrid-mesa"):
        add(f"nonlinear-{kind}", f"{kind} with MLPs on nonlinear dynamics", _nonlinear, kind=kind)
        add(f"sensitivity-nonlinear-{kind}", "the same, weights kept along a short training", _nonlinear,
            kind=kind, steps=3000, keep_every=100)  # fmt: skip
    for kind, rate, count in (("softmax-7", 8e-4, 15_000), ("hybrid-mesa", 3e-4, 20_000)):
        add(f"icl-{kind}", f"{kind} on 224 tokens, for few-shot regression", _in_context,
            kind=kind, rate=rate, steps=count)  # fmt: skip
    add(
        "linearization",
        "seven softmax layers, 10 dimensions, to be replaced by linear ones",
        _linearization,
        dim=10,
    )
    for dim in LINEARIZATION:
        add(f"linearization-{dim}", f"the same in {dim} dimensions", _linearization, dim=dim)

    for layers, count in ((1, 5000), (2, 5000), (4, 10_000), (6, 5000)):
        add(f"contracting-linear-{layers}", f"linear-{layers} on contracting dynamics", _other_task,
            family="contracting", layers=layers, rate=1e-4, steps=count)  # fmt: skip
    add("contracting-mesa-1", "mesa-1 on contracting dynamics", _other_task,
        family="contracting", mixer="mesa", rate=4e-4, steps=5000)  # fmt: skip
    # Rate times steps is known from the stored weights, how it splits is not.
    for layers, rate, count in ((1, 4e-4, 10_000), (2, 1e-4, 10_000), (4, 1e-4, 5000), (6, 1e-4, 5000)):
        add(f"fixed-teacher-linear-{layers}", f"linear-{layers} with one teacher for all sequences", _other_task,
            family="fixed_teacher", layers=layers, rate=rate, steps=count, batch_size=512)  # fmt: skip
    add("fixed-teacher-mesa-1", "mesa-1 with one teacher for all sequences", _other_task,
        family="fixed_teacher", mixer="mesa", rate=4e-4, steps=3000, batch_size=512)  # fmt: skip
    return table


PRESETS = _table()
