"""The tools on a model that is not ours, as the example has it."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

OPTIMIZED = True

EXAMPLE = Path(__file__).parents[2] / "examples" / "linearize_your_own_model.py"


@pytest.mark.slow
def test_linearize_your_own_model(capsys, tmp_path):
    spec = importlib.util.spec_from_file_location("linearize_your_own_model", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert capsys.readouterr().out == "", "importing an example must not run it"
    # As a user's process has it, not as strict as the tests'.
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        ratio, found = module.main(str(tmp_path / "effects.png"), steps=400)
    assert (tmp_path / "effects.png").stat().st_size > 5_000
    # Two models only, so that the interval is wide.
    assert 1.1 < ratio.mean < 3
    assert np.all(found.difference().mean > 0.1), "attention is needed, and so is each head"
    assert "times the loss" in capsys.readouterr().out
