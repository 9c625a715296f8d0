"""`mesascope lm` from text to samples, and through a kill."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from mesascope.cli import main
from mesascope.language import LanguageModel, generate
from mesascope.models import Softmax
from mesascope.runs import find
from mesascope.store import read_metadata
from tests.language.test_model import small

pytestmark = pytest.mark.usefixtures("standard_promotion")

TINY = [
    "lm-keyshift-linear-nu1",
    "--size",
    "cpu",
    "--model.width",
    "8",
    "--model.blocks.0.heads",
    "1",
    "--model.blocks.0.key-dim",
    "4",
    "--task.length",
    "16",
    "--train.batch-size",
    "4",
    "--train.eval-batch-size",
    "4",
    "--train.eval-batches",
    "1",
    "--train.final-sequences",
    "8",
    "--seeds",
    "1",
]


def run(capsys, *arguments) -> str:
    main(["lm", *map(str, arguments)])
    return " ".join(capsys.readouterr().out.split())


def test_from_text_to_samples(corpus, tmp_path, capsys):
    given = ("--data", corpus.path, "--runs", tmp_path)
    steps = ("--train.steps", 4, "--train.eval-every", 2)
    shown = run(capsys, "train", *TINY, *steps, *given)
    assert "loss on fresh sequences" in shown
    assert "loss at token 8 minus token 1 (tokens 50 and 500 of 1024, in 16)" in shown
    assert "birds" in shown
    assert "tokens/s in training" in shown
    config = find("lm-keyshift-linear-nu1-cpu", runs=tmp_path).config
    # The schedule is as long as the training.
    assert (config.train.optimizer.rate.end, config.train.optimizer.rate.peak) == (4, 3e-3)
    assert (config.model.width, config.model.resets_at) == (8, None)
    assert "has already been trained" in run(capsys, "train", *TINY, *steps, *given)

    shown = run(capsys, "eval", "lm-keyshift", *given, "--out", tmp_path / "eval.json")
    assert "perplexity" in shown
    written = json.loads((tmp_path / "eval.json").read_text())
    assert set(written["parts"]) == {"birds", "code"}
    assert sum(p["tokens"] for p in written["parts"].values()) == corpus.tokens("validation") - 2

    shown = run(capsys, "sample", "lm-keyshift", *given, "--prompt", "The heron", "--tokens", 40)
    assert shown.startswith("The heron")
    assert "tokens/s" in shown

    resets = run(capsys, "train", *TINY, *given, "--train.steps", 1, "--train.eval-every", 1, "--resets")
    assert "loss on fresh sequences" in resets
    assert {find(p, runs=tmp_path).config.model.resets_at for p in tmp_path.glob("lm-*")} == {
        None, corpus.tokenizer.eos,
    }  # fmt: skip


def test_a_rate_is_that_of_the_search(corpus, tmp_path, capsys):
    """`--rate` trains the schedule that was searched with, and leaves no weights if they are not wanted."""
    given = ("--data", corpus.path, "--runs", tmp_path, "--train.eval-every", 2, "--no-weights")
    run(capsys, "train", *TINY, *given, "--train.steps", 40, "--rate", 1e-3)
    found = find("lm-keyshift", runs=tmp_path)
    rate = found.config.train.optimizer.rate
    assert (rate.peak, rate.warmup, rate.end) == (1e-3, 2, 40)
    assert (rate.start, rate.floor) == (pytest.approx(1e-3 / 300), pytest.approx(2e-3 / 3))
    assert not list(found.path.glob("*.safetensors"))
    with pytest.raises(SystemExit):
        run(capsys, "train", *TINY, *given, "--train.optimizer.rate.peak", 1e-3)
    assert "`--rate` and `with_rate` change all three" in " ".join(capsys.readouterr().err.split())


def test_errors_are_sentences(corpus, tmp_path, capsys):
    for arguments, expected in (
        (["train", "lm-2-mesa", "--size", "cpu"], "data: say where the prepared corpus lies"),
        (["train", "lm-9", "--size", "cpu", "--data", corpus.path], "there is no 'lm-9'"),
        (["train", "lm-2-mesa", "--data", tmp_path], "is no prepared corpus"),
        (["sample", "nothing", "--data", corpus.path, "--runs", tmp_path], "there is no run 'nothing'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["lm", *map(str, arguments)])
        assert stopped.value.code == 1
        assert expected in " ".join(capsys.readouterr().err.split())


def test_samples_are_those_of_the_whole_model():
    """The likeliest token after everything so far, by the parallel pass."""
    config = small(Softmax(), resets_at=None)
    model = jax.jit(lambda key: LanguageModel(config, key=key))(jax.random.key(0))
    prompt = np.array([3, 1, 4])
    pieces = list(generate(model, prompt, count=20, temperature=0.0, key=jax.random.key(1)))
    assert [len(p) for p in pieces] == [16, 4]
    text = np.concatenate([prompt, *pieces])
    logits = np.asarray(jax.jit(lambda t: model(t))(jax.numpy.asarray(text, jax.numpy.int32)))
    assert np.array_equal(logits.argmax(-1)[2:-1], text[3:])
    drawn = [
        np.concatenate(list(generate(model, prompt, count=16, key=jax.random.key(k)))) for k in (1, 1, 2)
    ]
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])
    with pytest.raises(ValueError, match="prompt: expected at least one token"):
        next(generate(model, prompt[:0], count=1, key=jax.random.key(0)))


@pytest.mark.slow
def test_rates(corpus, tmp_path, capsys):
    given = ("--data", corpus.path, "--runs", tmp_path, "--size", "cpu", "--part", 0.004)
    shown = run(capsys, "rates", "lm-keyshift-linear-nu0", *given, "--rates", 1e-6, 1e-2, 10)
    assert "best: mesascope lm train lm-keyshift-linear-nu0 --rate 0.01" in shown
    assert not list(tmp_path.glob("*/*.safetensors"))


@pytest.mark.slow
def test_killed_at_any_moment(corpus, tmp_path):
    """SIGKILL to a real process; the bits of the end are those of an undisturbed run."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

    def process(where) -> subprocess.Popen:
        options = ("--train.steps", "3000", "--train.eval-every", "500", "--save-seconds", "0.05")
        given = ("--data", str(corpus.path), "--runs", str(tmp_path / where))
        command = [sys.executable, "-m", "mesascope", "lm", "train", *TINY, *options, *given]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    killed = process("killed")
    for _ in range(3000):
        time.sleep(0.1)
        steps = [int(read_metadata(p)["step"]) for p in tmp_path.glob("killed/*/checkpoint.safetensors")]
        if max(steps, default=0) > 20:
            break
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    for where in ("killed", "whole"):
        assert process(where).wait() == 0
    ends = [find("lm-keyshift", runs=tmp_path / where) for where in ("killed", "whole")]
    for name in ("weights.safetensors", "metrics.jsonl", "result.json"):
        assert (ends[0].path / name).read_bytes() == (ends[1].path / name).read_bytes()
