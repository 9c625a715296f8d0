"""Every configuration of the paper can be built, tells itself apart and has the size it should."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mesascope.models import Linear, Mesa, Softmax, Transformer
from mesascope.presets import PRESETS, preset
from mesascope.show import parameters
from mesascope.store import StoreError, digest, from_dict, to_dict, with_field
from mesascope.training import Config, WarmupCosine

COUNTS = {
    "linear-1": 6_400,
    "mesa-1": 12_804,
    "linear-6": 76_800,
    "softmax-7": 96_800,
    "hybrid-mesa": 32_804,
    "partial-softmax-7": 576_800,
    "nonlinear-softmax-7": 397_200,
    "nonlinear-hybrid-mesa": 121_204,
}
NAMED = (
    "linear-1 linear-2 linear-4 linear-6 mesa-1 interpolation-1 interpolation-6 constructed-softmax softmax-3 "
    "softmax-7 softmax-12 hybrid-mesa full-mesa binding-softmax-7 binding-hybrid-mesa binding-full-mesa "
    "sensitivity-softmax-7 sensitivity-hybrid-mesa sensitivity-full-mesa partial-softmax-7 partial-softmax-7-5 "
    "partial-hybrid-mesa nonlinear-softmax-7 nonlinear-hybrid-mesa icl-softmax-7 icl-hybrid-mesa linearization "
    "linearization-60 contracting-linear-4 contracting-mesa-1 fixed-teacher-linear-1 fixed-teacher-mesa-1"
)


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    assert parameters(preset(name)) == COUNTS[name]


@pytest.mark.parametrize("variant", ["as_run", "as_written"])
def test_every_preset(variant):
    """Builds, survives JSON with its digest, and its model reads its task's tokens."""
    for name in PRESETS:
        config = preset(name, variant)
        again = from_dict(to_dict(config), Config)
        assert again == config
        assert digest(again) == digest(config)

        def shapes(key, config=config):
            batch = config.examples(key, 2)
            model = Transformer(config.model, key=key)
            assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(model))
            return model(batch.tokens), batch.targets

        predictions, targets = jax.eval_shape(shapes, jax.random.key(0))
        assert predictions.shape[:2] == targets.shape[:2] == (2, config.task.length)
    assert set(NAMED.split()) <= set(PRESETS)


def test_where_text_and_code_differ():
    run, written = preset("hybrid-mesa"), preset("hybrid-mesa", "as_written")
    assert (run.model.layer_norm, run.model.clip, run.model.blocks[0].mlp) == (False, 1.0, None)
    assert (written.model.layer_norm, written.model.clip) == (True, None)
    assert written.model.blocks[0].mlp is not None
    assert run.train.optimizer.clip_by == "entry"
    assert written.train.optimizer.clip_by == "global_norm"
    kinds = {
        v: tuple(type(b.mixer) for b in preset("full-mesa", v).model.blocks) for v in ("as_run", "as_written")
    }
    assert kinds == {"as_run": (Linear, Mesa), "as_written": (Mesa, Mesa)}
    blocks = preset("nonlinear-hybrid-mesa").model.blocks
    assert blocks[0].normalize is None
    assert blocks[1].normalize is not None
    assert blocks[1].normalize.values


# Rate, steps, batch size, weight decay, standard deviation at the start, activation clipping.
AS_RUN = {
    "linear-1": (1e-4, 5000, 256, 0.1, 2e-4, 4.0),
    "linear-2": (1e-4, 5000, 256, 0.1, 2e-4, 4.0),
    "linear-4": (1e-4, 10_000, 256, 0.1, 2e-4, 4.0),
    "linear-6": (1e-4, 15_000, 256, 0.1, 2e-4, 4.0),
    "mesa-1": (4e-4, 5000, 256, 0.1, 2e-4, 4.0),
    "interpolation-1": (2e-4, 3500, 256, 0.05, 2e-4, 4.0),
    "interpolation-6": (1e-4, 4500, 512, 0.1, 2e-4, 4.0),
    "softmax-3": (8e-4, 10_000, 256, 0.05, 0.05, None),
    "softmax-7": (8e-4, 10_000, 256, 0.05, 0.05, None),
    "hybrid-mesa": (3e-4, 20_000, 256, 0.05, 0.05, 1.0),
    "full-mesa": (3e-4, 3500, 256, 0.05, 0.05, None),
    "binding-softmax-7": (8e-4, 20_000, 256, 0.05, 0.05, None),
    "binding-hybrid-mesa": (8e-4, 12_000, 256, 0.05, 0.05, 1.0),
    "binding-full-mesa": (3e-4, 3500, 256, 0.05, 0.05, None),
    "sensitivity-softmax-7": (7e-4, 3000, 256, 0.05, 0.05, None),
    "sensitivity-hybrid-mesa": (7e-4, 3000, 256, 0.05, 0.05, 1.0),
    "sensitivity-full-mesa": (3e-4, 3000, 256, 0.05, 0.05, None),
    "constructed-softmax": (7e-4, 10_000, 256, 0.05, 2e-4, None),
    "partial-softmax-7": (4e-4, 20_000, 256, 0.05, 0.05, None),
    "partial-hybrid-mesa": (4e-4, 12_000, 256, 0.05, 0.05, 1.0),
    **{f"partial-softmax-7-{w}": (4e-4, 20_000, 256, 0.05, 0.05, None) for w in (5, 10, 15, 20, 30, 50)},
    **{f"partial-hybrid-mesa-{w}": (4e-4, 12_000, 256, 0.05, 0.05, 1.0) for w in (5, 10, 15, 20, 30, 50)},
    "nonlinear-softmax-7": (1e-3, 40_000, 256, 0.05, 0.05, None),
    "nonlinear-hybrid-mesa": (4e-4, 40_000, 256, 0.05, 0.05, 15.0),
    "icl-softmax-7": (8e-4, 15_000, 128, 0.05, 0.05, None),
    **{f"linearization-{n}": (4e-3, 5000, 64, 0.05, 0.05, None) for n in (4, 6, 10)},
    "linearization-20": (9e-3, 8000, 64, 0.05, 0.05, None),
    "linearization-40": (7e-3, 2000, 64, 0.05, 0.05, None),
    "linearization-60": (3e-3, 3000, 64, 0.05, 0.05, None),
    **{f"contracting-linear-{n}": (1e-4, 5000, 256, 0.1, 2e-4, 4.0) for n in (1, 2, 6)},
    "contracting-linear-4": (1e-4, 10_000, 256, 0.1, 2e-4, 4.0),
    "contracting-mesa-1": (4e-4, 5000, 256, 0.1, 2e-4, 4.0),
    "fixed-teacher-linear-1": (4e-4, 10_000, 512, 0.1, 2e-4, 4.0),
    "fixed-teacher-linear-2": (1e-4, 10_000, 512, 0.1, 2e-4, 4.0),
    **{f"fixed-teacher-linear-{n}": (1e-4, 5000, 512, 0.1, 2e-4, 4.0) for n in (4, 6)},
    "fixed-teacher-mesa-1": (4e-4, 3000, 512, 0.1, 2e-4, 4.0),
}
# Layers, heads, key size, width of the residual stream, masked entries; MLP; as run.
ONE, DEEP = (1, 2, 20, 40, 20, None), (4, 20, 40, 0, None)
SIZES = {
    **dict.fromkeys(("linear-1", "interpolation-1", "contracting-linear-1", "fixed-teacher-linear-1"), ONE),
    **dict.fromkeys(("mesa-1", "contracting-mesa-1", "fixed-teacher-mesa-1"), (1, 4, 20, 40, 20, None)),
    **{
        f"{family}linear-{n}": (n, *DEEP)
        for family in ("", "contracting-", "fixed-teacher-")
        for n in (2, 4, 6)
    },
    "interpolation-6": (6, 4, 40, 40, 0, None),
    "constructed-softmax": (2, 1, 40, 80, 0, None),
    **{f"softmax-{n}": (n, *DEEP) for n in (3, 7, 12)},
    **dict.fromkeys(("binding-softmax-7", "sensitivity-softmax-7", "icl-softmax-7"), (7, *DEEP)),
    **{
        f"{use}{kind}-mesa": (2, *DEEP)
        for use in ("", "binding-", "sensitivity-")
        for kind in ("hybrid", "full")
    },
    "icl-hybrid-mesa": (2, *DEEP),
    "partial-softmax-7": (7, 12, 20, 80, 0, None),
    "partial-hybrid-mesa": (2, 12, 20, 80, 0, None),
    **{f"partial-softmax-7-{w}": (7, 12, min(20, w), w, 0, None) for w in (5, 10, 15, 20, 30, 50)},
    **{f"partial-hybrid-mesa-{w}": (2, 12, min(20, w), w, 0, None) for w in (5, 10, 15, 20, 30, 50)},
    "nonlinear-softmax-7": (7, 4, 20, 60, 0, 300),
    "nonlinear-hybrid-mesa": (2, 4, 20, 60, 0, 300),
    **{f"linearization-{n}": (7, 4, 2 * n, 4 * n, 0, None) for n in (4, 6, 10, 20, 40, 60)},
}
SMALL, WIDE = 2e-4**0.5, 0.05**0.5
AS_WRITTEN = {
    "linear-1": (1e-4, 5000, 256, 0.1, SMALL, 4.0),
    "linear-6": (1e-4, 10_000, 256, 0.1, SMALL, 4.0),
    "mesa-1": (1e-4, 5000, 256, 0.1, SMALL, None),
    "interpolation-1": (1e-4, 3500, 256, 0.1, SMALL, 4.0),
    "interpolation-6": (1e-4, 4500, 256, 0.1, SMALL, 4.0),
    "constructed-softmax": (1e-4, 10_000, 256, 0.1, SMALL, None),
    "softmax-7": (7e-4, 10_000, 256, 0.05, 0.05, None),
    "hybrid-mesa": (7e-4, 10_000, 256, 0.05, 0.05, None),
    "partial-softmax-7": (4e-4, 20_000, 256, 0.05, WIDE, None),
    "nonlinear-softmax-7": (1e-3, 40_000, 256, 0.05, WIDE, None),
    "nonlinear-hybrid-mesa": (4e-4, 40_000, 256, 0.05, WIDE, None),
    "icl-softmax-7": (7e-4, 40_000, 128, 0.05, 0.05, None),
    "fixed-teacher-linear-1": (1e-4, 10_000, 256, 0.1, SMALL, 4.0),
}
ENDS = {
    "softmax-7": (30_000, 31_000),
    "nonlinear-softmax-7": (50_000, 51_000),
    "icl-softmax-7": (30_000, 61_000),
}


@pytest.mark.parametrize(("variant", "table"), [("as_run", AS_RUN), ("as_written", AS_WRITTEN)])
def test_hyperparameters(variant, table):
    for name, expected in table.items():
        config = preset(name, variant)
        train, model = config.train, config.model
        got = (train.optimizer.rate.peak, train.steps, train.batch_size, train.optimizer.weight_decay)
        assert (*got, model.init_std, model.clip) == expected, name
    for name, ends in ENDS.items():
        rate = preset(name, variant).train.optimizer.rate
        assert isinstance(rate, WarmupCosine)
        assert (rate.warmup, rate.end, rate.floor) == (1000, ends[variant == "as_written"], 1e-5)


def test_sizes_as_run():
    for name, expected in SIZES.items():
        config = preset(name)
        model = config.model
        (heads,) = {block.heads for block in model.blocks}
        (key_dim,) = {block.key_dim for block in model.blocks}
        (mlp,) = {None if block.mlp is None else block.mlp.hidden for block in model.blocks}
        width = model.model_dim or model.token_dim
        assert (len(model.blocks), heads, key_dim, width, model.masked, mlp) == expected, name
        # Codes of positions beside the inputs of queries and keys, where tokens are not constructed.
        places = None if model.positions is None else (model.positions.at, model.positions.dim)
        assert places == (None if model.model_dim is None else ("key_inputs", width)), name
        assert not model.layer_norm, name
    same = {
        "linearization",
        *(name for name in PRESETS if name.startswith(("sensitivity-partial", "sensitivity-non"))),
    }
    assert SIZES.keys() == PRESETS.keys() - same
    for name in same - {"linearization"}:  # their tasks' models, trained for less
        alike = preset(name.removeprefix("sensitivity-"))
        assert (preset(name).model, preset(name).task) == (alike.model, alike.task)
        assert (preset(name).train.steps, preset(name).train.keep_every) == (3000, 100)


def test_wrong_names():
    with pytest.raises(ValueError, match=r"there is no 'softmax-8'\. The nearest are: softmax-7"):
        preset("softmax-8")
    with pytest.raises(ValueError, match="variant: expected 'as_run' or 'as_written', got 'as_told'"):
        preset("softmax-7", "as_told")  # pyright: ignore


def test_a_bad_combination_says_what_to_do():
    config = preset("softmax-7")
    with pytest.raises(ValueError, match=r"model\.token_dim: the task's tokens are 4 wide, got 10"):
        dataclasses.replace(config, task=dataclasses.replace(config.task, state_dim=4))
    with pytest.raises(
        ValueError, match="final_sequences: expected a multiple of eval_batch_size = 256, got 100"
    ):
        dataclasses.replace(config.train, final_sequences=100)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("model.blocks.0.heads", "0", "heads: expected at least 1, got 0"),
        ("model.blocks.0.key_dim", "-3", "key_dim: expected at least 1, got -3"),
        ("model.blocks.0.dpfp", "-1", "dpfp: expected at least 0, got -1"),
        ("model.blocks.1.mixer.lam_init", "0", "lam_init: expected more than 0, got 0"),
        ("model.blocks.1.mixer.lam_init", "-1.0", "lam_init: expected more than 0, got -1.0"),
        ("model.init_std", "NaN", "init_std: expected float, got 'NaN'"),
        ("model.model_dim", "0", "model_dim: expected at least 1, got 0"),
        ("model.clip", "0.0", "clip: expected more than 0, got 0.0"),
        ("model.positions.dim", "0", "dim: expected at least 1, got 0"),
        ("task.state_noise", "-1", "state_noise: expected at least 0, got -1"),
        ("task.initial.bound", "Infinity", "bound: expected float, got 'Infinity'"),
        ("train.first_seed", "-1", "first_seed: expected at least 0, got -1"),
        ("train.first_seed", "2147483645", "first_seed: expected seeds below 2147483646"),
        ("train.keep_every", "0", "keep_every: expected at least 1, got 0"),
        ("train.optimizer.weight_decay", "-0.1", "weight_decay: expected at least 0, got -0.1"),
        ("train.optimizer.b2", "1.0", "b2: expected less than 1, got 1.0"),
        ("train.optimizer.rate.peak", "NaN", "peak: expected float, got 'NaN'"),
    ],
)
def test_numbers_that_cannot_be(path, value, expected):
    with pytest.raises(StoreError) as error:
        with_field(preset("hybrid-mesa"), f"{path}={value}")
    assert expected in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(value):
    config = preset("hybrid-mesa")
    for part, name in (
        (config.model, "init_std"),
        (config.task.initial, "bound"),
        (config.train.optimizer.rate, "peak"),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected a finite number, got {value}"):
            dataclasses.replace(part, **{name: value})  # pyright: ignore


def test_setting_fields_by_name():
    config = preset("softmax-3")
    changed = with_field(config, "model.blocks.1.mixer=Linear")
    assert [type(b.mixer) for b in changed.model.blocks] == [Softmax, Linear, Softmax]
    changed = with_field(config, 'model.blocks.1.mixer={"kind": "Mesa", "lam_init": 2.0}')
    assert changed.model.blocks[1].mixer == Mesa(lam_init=2.0)
    assert with_field(config, "model.clip=3.0").model.clip == 3.0
    assert digest(with_field(config, "model.clip=3")) == digest(with_field(config, "model.clip=3.0"))
    for wrong in ("train.steps=1e1", "model.clip=high", "model.layer_norm=1", "tokens=3"):
        with pytest.raises(StoreError, match=r"expected .*, got "):
            with_field(config, wrong)
    with pytest.raises(ValueError, match=r"no field 'model\.blocks\.7\.mixer'"):
        with_field(config, "model.blocks.7.mixer=Linear")
    with pytest.raises(StoreError, match="no kind 'Quadratic' is known"):
        with_field(config, 'model.blocks.1.mixer={"kind": "Quadratic"}')
    with pytest.raises(StoreError, match="Block has no field 'hats'"):
        from_dict({"kind": "Block", "hats": 3}, type(config.model.blocks[0]))


def test_fields_added_later_rename_no_run():
    """Digests from before these fields: runs that people have are found by them."""
    known = {
        "linear-1": ("405d664f58", "9ab890bd05"),
        "hybrid-mesa": ("962aca47b4", "1c769ae54f"),
        "nonlinear-hybrid-mesa": ("8ab2448bb9", "e289147e3e"),
    }
    for name, digests in known.items():
        assert (digest(preset(name)), digest(preset(name, "as_written"))) == digests
    config = preset("linear-1")
    changed = dataclasses.replace(config, model=dataclasses.replace(config.model, biases=True))
    assert digest(changed) != digest(config)
    assert from_dict(to_dict(changed), Config) == changed
