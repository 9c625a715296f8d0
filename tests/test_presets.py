"""Every configuration of the paper can be built, tells itself apart and has the size it should."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mesascope.models import Linear, Mesa, Softmax, Transformer
from mesascope.presets import PRESETS, preset
from mesascope.show import parameters
from mesascope.store import StoreError, digest, from_dict, to_dict, with_field
from mesascope.training import Config

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
    """Builds, survives JSON, has a digest of its own, and its model reads its task's tokens."""
    seen = {}
    for name in PRESETS:
        config = preset(name, variant)
        assert from_dict(to_dict(config), Config) == config
        assert digest(config) not in seen, f"{name} and {seen[digest(config)]}"
        seen[digest(config)] = name

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


def test_wrong_names():
    with pytest.raises(ValueError, match=r"there is none called 'softmax-8'\. There are: linear-1"):
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


def test_setting_fields_by_name():
    config = preset("softmax-3")
    changed = with_field(config, "model.blocks.1.mixer=Linear")
    assert [type(b.mixer) for b in changed.model.blocks] == [Softmax, Linear, Softmax]
    changed = with_field(config, 'model.blocks.1.mixer={"kind": "Mesa", "lam_init": 2.0}')
    assert changed.model.blocks[1].mixer == Mesa(lam_init=2.0)
    assert with_field(config, "model.clip=3.0").model.clip == 3.0
    with pytest.raises(ValueError, match=r"no field 'model\.blocks\.7\.mixer'"):
        with_field(config, "model.blocks.7.mixer=Linear")
    with pytest.raises(StoreError, match="no kind 'Quadratic' is known"):
        with_field(config, 'model.blocks.1.mixer={"kind": "Quadratic"}')
    with pytest.raises(StoreError, match="Block has no field 'hats'"):
        from_dict({"kind": "Block", "hats": 3}, type(config.model.blocks[0]))
