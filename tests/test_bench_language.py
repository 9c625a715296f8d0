"""The benchmark of language models measures what it says."""

import io
import json

import pytest
from rich.console import Console

from mesascope.bench_language import bench_language, model_flops, on_random_tokens, random_batch, step_seconds
from tests.language.test_training import RECALL, tiny

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_steps_and_flops(tmp_path):
    config = tiny(RECALL, seeds=1)
    seconds = step_seconds({"one": config}, repeats=2)
    assert seconds["one"].shape == (2,)
    assert (seconds["one"] > 0).all()
    # Unembedding; two layers' projections with biases; their norms and the last.
    size = 8 * 16 + (4 * 8 * 8 + 3 * 8 + 8) + (4 * 8 * 4 + 3 * 4 + 8) + 3 * 8
    assert model_flops(config) == 6 * size * 8 * 12


@pytest.mark.slow
def test_the_table(tmp_path):
    console, out = Console(record=True, width=160, file=io.StringIO()), tmp_path / "bench.json"
    small = ("task.length=8", "train.batch_size=2", "accumulate=1")
    presets = ("lm-keyshift-linear-nu0", "lm-keyshift-mesa-nu0")
    config = on_random_tokens(presets[0], "cpu", small)
    assert config.train.batch_size == 2
    assert random_batch(config).predicts.shape == (1, 2, 8)
    assert random_batch(config).predicts.all(), "as many logits as of text"
    bench_language(
        presets=presets, size="cpu", set=small, repeats=2, peak_tflops=1.0, out=out, console=console
    )
    printed, written = console.export_text(), json.loads(out.read_text())
    for row in written["speed"]:
        assert row["preset"] in printed
        assert f"{row['tokens_per_second']:,.0f}" in printed
    assert written["speed"][0]["ratio"] == 1.0
