"""Where sequences come from: frozen dataclasses with `sample(key, batch_size)`, observations and ground truth."""

from mesascope.tasks.dynamics import (
    MLP,
    Contracting,
    Dynamics,
    FixedOrthogonal,
    Normal,
    Orthogonal,
    Readout,
    Trajectories,
    Uniform,
)
from mesascope.tasks.few_shot import FewShot, Layout, Prompt, Regression
from mesascope.tasks.recall import AssociativeRecall
from mesascope.tasks.tokens import Constructed, Examples, Passages, Stacked, Standard, Tokens

__all__ = [
    "MLP",
    "AssociativeRecall",
    "Constructed",
    "Contracting",
    "Dynamics",
    "Examples",
    "FewShot",
    "FixedOrthogonal",
    "Layout",
    "Normal",
    "Orthogonal",
    "Passages",
    "Prompt",
    "Readout",
    "Regression",
    "Stacked",
    "Standard",
    "Tokens",
    "Trajectories",
    "Uniform",
]
