"""Language models: the same blocks on numbers of a vocabulary, trained through the same runs."""

from mesascope.language.model import LanguageModel, LanguageModelConfig, cross_entropy
from mesascope.language.presets import LANGUAGE_PRESETS, language_preset, with_rate
from mesascope.language.sampling import generate
from mesascope.language.training import LanguageConfig, LanguageTrainer

__all__ = [
    "LANGUAGE_PRESETS",
    "LanguageConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "LanguageTrainer",
    "cross_entropy",
    "generate",
    "language_preset",
    "with_rate",
]
