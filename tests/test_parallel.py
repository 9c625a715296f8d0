"""One run over several devices and processes: the same as on one, and it survives them."""

import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from jax.sharding import AbstractMesh

from mesascope import runs
from mesascope.parallel import join
from mesascope.training import Trainer
from tests.test_runs import ENVIRONMENT, contents, last_step
from tests.test_training import tiny

OPTIONS = (
    "linear-1 --task.state-dim 2 --task.length 4 --model.token-dim 8 --model.output-dim 2 --model.masked 4 "
    "--model.blocks.0.heads 1 --model.blocks.0.key-dim 2 --train.batch-size 16 --train.eval-batch-size 16 "
    "--train.eval-batches 2 --train.final-sequences 32 --seeds 2 --train.eval-every 500 --save-seconds 0.05"
)
TRAIN = ("train", *OPTIONS.split())


def started(where, *extra, number=0, count=1, port=0, devices=1, what=TRAIN):
    environment = ENVIRONMENT | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    if count > 1:
        environment |= {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(number),
        }
    return subprocess.Popen(
        [sys.executable, "-m", "mesascope", *what, "--runs", str(where), *extra],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def together(where, *extra, devices=1, what=TRAIN):
    """Two processes, which know of each other by their environment."""
    port = free_port()
    return [
        started(where, *extra, number=i, count=2, port=port, devices=devices, what=what) for i in range(2)
    ]


def finished(processes):
    told = [process.communicate(timeout=900) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), told
    return told


def close(a, b):
    a, b = (runs.find("linear-1", runs=where) for where in (a, b))
    for name in ("eval_loss", "train_loss"):
        np.testing.assert_allclose(a.metrics()[name], b.metrics()[name], rtol=1e-4)
    np.testing.assert_allclose(a.result["loss_by_position"], b.result["loss_by_position"], rtol=1e-4)


@pytest.mark.slow
def test_eight_devices_and_two_processes_are_as_one(tmp_path):
    steps = ("--train.steps", "1000")
    finished([started(tmp_path / "one", *steps)])
    finished([started(tmp_path / "eight", *steps, "--data-parallel", devices=8)])
    close(tmp_path / "one", tmp_path / "eight")
    told = finished(together(tmp_path / "two", *steps, devices=2))
    close(tmp_path / "one", tmp_path / "two")
    assert "step 1000/1000" in told[0][0]
    assert "step" not in told[1][0], "only the first process tells and writes"
    # Asked for again, it is there, and both end.
    told = finished(together(tmp_path / "two", *steps, devices=2))
    assert "has already been trained" in told[0][0]


@pytest.mark.slow
def test_processes_that_share_no_disk(tmp_path):
    """Only the first has the run; all know whether it was trained to its end, the second time too."""
    for minutes, ends in (("0", [75, 75]), ("60", [0, 0]), ("60", [0, 0])):
        port = free_port()
        both = [
            started(
                tmp_path / str(i), "--train.steps", "500", "--max-minutes", minutes, "--data-parallel",
                number=i, count=2, port=port,
            )
            for i in range(2)
        ]  # fmt: skip
        told = [process.communicate(timeout=900) for process in both]
        assert [process.returncode for process in both] == ends, told
    assert runs.find("linear-1", runs=tmp_path / "0").finished
    assert not list((tmp_path / "1").glob("linear-1*/result.json"))


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_processes_is_killed(tmp_path, victim):
    """The other ends by itself, and the same command goes on: the bits are those of two undisturbed processes."""
    kill_one_of_two(tmp_path, victim, TRAIN, "linear-1", ("--train.steps", "6000"))


def kill_one_of_two(tmp_path, victim, what, name, steps):
    processes = together(tmp_path / "killed", *steps, what=what)
    for _ in range(3000):
        time.sleep(0.1)
        if last_step(tmp_path / "killed") > 0:
            break
        assert processes[0].poll() is None, processes[0].communicate()
    processes[victim].kill()
    processes[victim].communicate()
    processes[1 - victim].communicate(timeout=300)
    assert processes[1 - victim].returncode != 0
    told = finished(together(tmp_path / "killed", *steps, what=what))
    assert "going on at step" in told[0][0]
    finished(together(tmp_path / "whole", *steps, what=what))
    a, b = (runs.find(name, runs=tmp_path / where) for where in ("killed", "whole"))
    assert contents(a) == contents(b)


def test_batches_that_cannot_be_cut():
    with pytest.raises(ValueError, match=r"train\.batch_size: expected a multiple of the 2 devices, got 3"):
        Trainer(tiny(batch_size=3), AbstractMesh((2,), ("data",)))


def test_processes_without_a_number(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ValueError, match="expected numbers in JAX_NUM_PROCESSES and JAX_PROCESS_ID"):
        join()
