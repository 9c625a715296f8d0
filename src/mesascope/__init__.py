"""mesascope: the optimizer inside a Transformer, as a layer, a lab and a scope."""

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

__version__ = "0.1.0"

__all__ = [
    "GramState",
    "MesaLayer",
    "MesaState",
    "delta_attention",
    "intention",
    "linear_attention",
    "mesa_attention",
    "mesa_init",
    "mesa_step",
    "methods",
]
