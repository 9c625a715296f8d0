"""What comes with the repository: one trained model of each kind, the arrays behind the figures, the claims."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mesascope import store
from mesascope.models import Transformer
from mesascope.store import StoreError
from mesascope.training import Config, Trainer, TrainState, with_train
from mesascope.untrusted import parse_json

PACKAGE = Path(__file__).parent


@cache
def directory() -> Path:
    """`results/` of the checkout, or its copy in an installed package."""
    checkout = PACKAGE.parents[1] / "results"
    return checkout if checkout.is_dir() else PACKAGE / "results"


def weights_path(name: str) -> Path:
    """Where a released model's weights are, whether or not there are any."""
    return directory() / "weights" / f"{name}.safetensors"


def tuned_path(name: str) -> Path:
    """Where numbers that were tuned are, whether or not there are any."""
    return directory() / "tuned" / f"{name}.safetensors"


def names() -> list[str]:
    """The released models."""
    return sorted(path.stem for path in (directory() / "weights").glob("*.safetensors"))


def write_model(
    path: Path,
    models: Transformer,
    config: Config,
    *,
    made: Mapping[str, Any],
    seed: int = 0,
    half: bool = False,
) -> None:
    """One of the trained models, without the others.

    Args:
        made: what the models were made with (`run.provenance`); its command, which names files, is left out.
        half: as bfloat16, half the size.
    """
    kind = ml_dtypes.bfloat16 if half else np.float32
    one = jax.tree.map(lambda leaf: np.asarray(leaf[seed : seed + 1]).astype(kind), models)
    config = with_train(config, seeds=1, first_seed=config.train.first_seed + seed)
    made = {name: value for name, value in made.items() if name != "command"}
    store.write_arrays(path, one, config=json.dumps(store.to_dict(config)), made=json.dumps(made))


def read_model(path: Path) -> tuple[Transformer, Config]:
    """A released model, with a seed axis of one, and its configuration."""
    config = store.from_dict(parse_json(store.read_metadata(path).get("config", "null"), path), Config)
    arrays = store.read_arrays(path, shapes(Trainer(config)).models, any_float=True)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), arrays), config


MOST_BLOCKS = 1000


def shapes(trainer: Any) -> TrainState:
    """Shapes of a state of training, of a configuration that somebody else may have written.

    Raises:
        StoreError: there is no such model.
    """
    config = trainer.config
    if len(config.model.blocks) > MOST_BLOCKS:
        raise StoreError(f"model.blocks: expected at most {MOST_BLOCKS}, got {len(config.model.blocks)}.")
    try:
        return trainer.shapes
    except Exception as error:  # absurd sizes fail in many ways
        raise StoreError(
            f"{config.name}: there is no model of this configuration ({str(error)[:500]})."
        ) from error
