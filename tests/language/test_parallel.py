"""A language model over several devices and processes: the same as on one, and it survives them."""

import numpy as np
import pytest

from mesascope import parallel, runs
from tests.language.test_training import RECALL, contents, tiny
from tests.test_parallel import finished, kill_one_of_two, started, together

OPTIONS = (
    "lm-2-mesa --size cpu --model.width 8 --model.blocks.0.heads 1 --model.blocks.0.key-dim 4 --model.blocks.1.heads 1 "
    "--model.blocks.1.key-dim 4 --model.dropout 0.1 --task.length 16 --train.batch-size 16 --accumulate 2 "
    "--train.eval-batch-size 8 --train.eval-batches 2 --train.final-sequences 16 --seeds 2 --train.eval-every 20 "
    "--rate 1e-3 --save-seconds 0.05"
)


@pytest.fixture
def what(corpus):
    return ("lm", "train", *OPTIONS.split(), "--data", str(corpus.path))


def close(a, b):
    a, b = (runs.find("lm-2-mesa", runs=where) for where in (a, b))
    for name in ("eval_loss", "train_loss", "in_context", "accuracy"):
        np.testing.assert_allclose(a.metrics()[name], b.metrics()[name], rtol=1e-4, atol=1e-6)
    a, b = a.result, b.result
    np.testing.assert_allclose(a["loss_by_position"], b["loss_by_position"], rtol=1e-4)
    np.testing.assert_allclose(a["offsets"], b["offsets"], rtol=1e-4)
    assert a["parts"].keys() == b["parts"].keys() == {"birds", "code"}
    for part in a["parts"]:
        np.testing.assert_allclose(a["parts"][part]["loss"], b["parts"][part]["loss"], rtol=1e-4)
        assert a["parts"][part]["tokens"] == b["parts"][part]["tokens"]
    assert (a["sequences"], a["at"]) == (b["sequences"], b["at"])


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_one_device_is_one_device(corpus, tmp_path):
    for config, data in ((tiny(corpus.task(16)), corpus.path), (tiny(RECALL), None)):
        alone = runs.fit(config, data=data, runs=tmp_path / "alone")
        parallel.fit(config, data=data, runs=tmp_path / "parallel", max_minutes=0.0)
        run = parallel.fit(config, data=data, runs=tmp_path / "parallel")
        assert contents(run) == contents(alone)


@pytest.mark.slow
def test_eight_devices_and_two_processes_are_as_one(tmp_path, what):
    steps = ("--train.steps", "60")
    finished([started(tmp_path / "one", *steps, what=what)])
    finished([started(tmp_path / "eight", *steps, "--data-parallel", devices=8, what=what)])
    close(tmp_path / "one", tmp_path / "eight")
    told = finished(together(tmp_path / "two", *steps, devices=2, what=what))
    close(tmp_path / "one", tmp_path / "two")
    run = runs.find("lm-2-mesa", runs=tmp_path / "two")
    assert run.provenance["precision"].endswith("on 4 devices")
    assert "step 60/60" in told[0][0]
    assert "step" not in told[1][0], "only the first process tells and writes"
    # Asked for again, it is there, and both end.
    told = finished(together(tmp_path / "two", *steps, devices=2, what=what))
    assert "has already been trained" in told[0][0]


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_processes_is_killed(tmp_path, what, victim):
    kill_one_of_two(tmp_path, victim, what, "lm-2-mesa", ("--train.steps", "400"))
