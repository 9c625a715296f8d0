"""The examples run as printed, and learn."""

import importlib.util
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

OPTIMIZED = True

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "package", "factor"), [("equinox_training", "equinox", 3), ("flax_training", "flax", 5)]
)
def test_loss_falls(name, package, factor, capsys):
    pytest.importorskip(package)
    module = load(name)
    assert capsys.readouterr().out == "", "importing an example must not run it"
    # As a user's process has it, not as strict as the tests'.
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        first, last = module.main(steps=150)
    assert last < first / factor
    # Less than half of what the best guess that ignores the past of a sequence would pay.
    assert last < 0.5
    assert "loss" in capsys.readouterr().out


def test_theory_as_weights(capsys, tmp_path):
    """Errors fall to that of least squares, layer by layer, and the forward pass is least squares."""
    module = load("theory_as_weights")
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        errors, exact, difference = module.main(str(tmp_path / "by_layer.png"))
    assert (tmp_path / "by_layer.png").stat().st_size > 10_000
    assert len(errors) == module.STEPS + 1
    assert errors[0] > 3 * exact
    assert abs(errors[-1] - exact) < 0.01 * exact
    assert difference < 0.05
    assert capsys.readouterr().out.count("█") > 60


@pytest.mark.slow
def test_probe_your_own_model(capsys, tmp_path):
    """A network that is not ours remembers, and what is no news is said to be none."""
    pytest.importorskip("matplotlib").use("Agg")
    module = load("probe_your_own_model")
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        found = module.main(str(tmp_path / "horizon.png"), steps=300)
    assert (tmp_path / "horizon.png").stat().st_size > 10_000
    # Tokens that it has read are in the memory, and are no news: a random network remembers too. The next one is news.
    error, news = found.relative.mean[:, 0, -1], found.beats_controls[:, 0, -1]
    assert error[1] < 0.1
    assert news[0]
    assert not news[1:].any()
    said = capsys.readouterr().out
    assert said.count("does not beat its controls") == 6
    assert ": learns while it reads" in said
    assert "early ascent: False" in said


@pytest.mark.slow
def test_linearize_your_own_model(capsys, tmp_path):
    """Plain arrays and a plain function: a layer made linear, heads ablated, weights multiplied."""
    pytest.importorskip("matplotlib").use("Agg")
    module = load("linearize_your_own_model")
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        ratio, found = module.main(str(tmp_path / "effects.png"), steps=400)
    assert (tmp_path / "effects.png").stat().st_size > 5_000
    # Two models only, so that the interval is wide.
    assert 1.1 < ratio.mean < 3
    assert np.all(found.difference.mean > 0.1), "attention is needed, and so is each head"
    assert "times the loss" in capsys.readouterr().out
