"""The mesa operation: one contract, several implementations."""

from mesascope.ops.mesa import (
    GramState,
    MesaState,
    delta_attention,
    intention,
    linear_attention,
    mesa_attention,
    mesa_init,
    mesa_step,
)

__all__ = [
    "GramState",
    "MesaState",
    "delta_attention",
    "intention",
    "linear_attention",
    "mesa_attention",
    "mesa_init",
    "mesa_step",
]
