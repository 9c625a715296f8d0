"""Language models in a sweep."""

import pytest

from mesascope.store import StoreError, from_dict
from mesascope.sweep import read_spec
from mesascope.sweep.pieces import Job
from mesascope.sweep.worker import DONE, work
from mesascope.untrusted import parse_json

SPEC = """
presets = ["lm-2-mesa"]
data = "DATA"
size = "cpu"
seeds = 2
at_once = 1
[set]
"model.width" = 8
"model.blocks.0.heads" = 1
"model.blocks.0.key_dim" = 4
"model.blocks.1.heads" = 1
"model.blocks.1.key_dim" = 4
"task.length" = 16
"train.batch_size" = 4
"train.eval_batch_size" = 4
"train.eval_batches" = 1
"train.final_sequences" = 8
"train.eval_every" = 2
"train.steps" = 3
"""


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_language_models_are_pieces_too(corpus, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(SPEC.replace("DATA", str(corpus.path)))
    pieces = read_spec(path, runs=tmp_path / "runs")
    assert [piece.config.train.first_seed for piece in pieces] == [0, 1]
    job = Job(piece=pieces[0], attempt=1)
    assert from_dict(parse_json(job.to_text(), "job"), Job) == job
    assert work(job.to_text()) == DONE
    assert pieces[0].is_done
    assert not pieces[1].is_done
    path.write_text(SPEC.replace("DATA", str(corpus.path)).replace('"cpu"', '"tpu"'))
    with pytest.raises(StoreError, match="size: expected one of paper, gpu, cpu"):
        read_spec(path, runs=tmp_path / "runs")
    path.write_text(SPEC.replace("DATA", str(tmp_path)))
    with pytest.raises(StoreError, match=str(tmp_path)):
        read_spec(path, runs=tmp_path / "runs")
