"""mesascope: the optimizer inside a Transformer, as a layer, a lab and a scope."""

import importlib
from typing import TYPE_CHECKING, Any

from mesascope.layer import MesaLayer
from mesascope.ops import (
    GramState,
    MesaState,
    delta_attention,
    intention,
    linear_attention,
    mesa_attention,
    mesa_init,
    mesa_step,
    methods,
)

if TYPE_CHECKING:
    from mesascope.models import Transformer
    from mesascope.presets import preset
    from mesascope.runs import fit, load
    from mesascope.training import optimize

__version__ = "0.1.0"

__all__ = [
    "GramState",
    "MesaLayer",
    "MesaState",
    "Transformer",
    "delta_attention",
    "fit",
    "intention",
    "linear_attention",
    "load",
    "mesa_attention",
    "mesa_init",
    "mesa_step",
    "methods",
    "optimize",
    "preset",
]

# The lab is imported when it is first asked for: whoever wants the layer need not wait for optax and safetensors.
_LAB = {"Transformer": "models", "preset": "presets", "fit": "runs", "load": "runs", "optimize": "training"}


def __getattr__(name: str) -> Any:
    if name in _LAB:
        return getattr(importlib.import_module(f"mesascope.{_LAB[name]}"), name)
    raise AttributeError(f"module 'mesascope' has no attribute {name!r}")
