"""Many pieces of work: what a file asks for, where it is done, and what becomes of pieces that fail."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from rich.console import Console

from mesascope import runs, store
from mesascope.cli import main
from mesascope.presets import preset
from mesascope.runs import RunError
from mesascope.store import StoreError
from mesascope.sweep import FigurePiece, TrainingRun, driver, executor, read_spec, report, status, sweep
from mesascope.sweep.pieces import Job, figure_pieces, folder_of
from mesascope.sweep.worker import BUSY, DONE, FAILED, HOPELESS, OUT_OF_TIME, STOPPED, work
from tests.test_runs import contents
from tests.test_training import tiny

pytestmark = pytest.mark.usefixtures("standard_promotion")

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install mesascope[ray]"
)
needs_submitit = pytest.mark.skipif(
    find_spec("submitit") is None, reason="submitit is not installed: pip install mesascope[slurm]"
)


def plain():
    return Console(record=True, width=200, file=io.StringIO())


def spec(path, text):
    path.write_text(text)
    return path


def test_every_combination(tmp_path):
    path = spec(tmp_path / "a.toml", """
        presets = ["linear-1", "softmax-3"]
        seeds = 7
        at_once = 3
        [set]
        "train.steps" = 20
        [over]
        "train.optimizer.rate.peak" = [1e-3, 3e-4]
        "model.clip" = [1.5]
    """)  # fmt: skip
    pieces = read_spec(path, runs=tmp_path)
    assert len(pieces) == len({piece.name for piece in pieces}) == 2 * 2 * 3
    configs = [piece.config for piece in pieces]
    assert {config.name for config in configs} == {"linear-1", "softmax-3"}
    assert [(c.train.first_seed, c.train.seeds) for c in configs[:3]] == [(0, 3), (3, 3), (6, 1)]
    assert {c.train.optimizer.rate.peak for c in configs} == {1e-3, 3e-4}
    assert all(c.train.steps == 20 and c.model.clip == 1.5 for c in configs)
    # The same in JSON; kinds by name; a preset as it is.
    also = spec(
        tmp_path / "a.json", json.dumps({"presets": ["linear-1"], "over": {"model.blocks.0.mixer": ["Mesa"]}})
    )
    (piece,) = read_spec(also, runs=tmp_path)
    assert type(piece.config.model.blocks[0].mixer).__name__ == "Mesa"
    (piece,) = read_spec(spec(tmp_path / "b.toml", 'presets = ["mesa-1"]'), runs=tmp_path)
    assert piece.config == preset("mesa-1")
    assert store.from_dict(json.loads(Job(piece=piece, attempt=1).to_text()), Job).piece == piece


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("presets = 3", "expected a list"),
        ("", "'presets' is missing"),
        ("presets = [", "expected TOML"),
        ("a = " + "[" * 5000, "expected TOML"),
        ('presets = ["linear-9"]', "presets: there is no 'linear-9'"),
        ('presets = ["linear-1"]\nseed = 3', "there is no 'seed', only presets, variants, seeds"),
        ('presets = ["linear-1"]\nat_once = 3', "give both"),
        ('presets = ["linear-1"]\nseeds = 0', "expected at least 1"),
        ('presets = ["linear-1"]\nseeds = 1000000\nat_once = 1', "expected at most 10,000"),
        ('presets = ["linear-1"]\nvariants = ["as_meant"]', "variants: expected as_run or as_written"),
        ('presets = ["linear-1"]\n[set]\n"train.stepps" = 3', "has no field 'train.stepps'"),
        ('presets = ["linear-1"]\n[set]\n"train.steps" = nan', "not JSON compliant"),
        ('presets = ["linear-1"]\n[set]\n"train.optimizer.rate.peak" = "Infinity"', "expected float, got 'Infinity'"),
        ('presets = ["linear-1"]\n[set]\n"train.optimizer.rate.peak" = "1e999"', "expected float, got '1e999'"),
        ('presets = ["linear-1"]\n[set]\n"train.steps" = 2020-01-01', "date is not JSON serializable"),
        ('presets = ["linear-1"]\n[set]\n"name" = "../x"', "name: expected letters"),
        ('presets = ["lm-2-mesa"]', r'lm-2-mesa is a language model: say where its text lies, data = "FOLDER"'),
        ("presets = []", "expected 1 to 10,000 runs, got 0"),
    ],
)  # fmt: skip
def test_files_that_ask_for_nothing_sensible(text, told, tmp_path):
    with pytest.raises(StoreError, match=told):
        read_spec(spec(tmp_path / "a.toml", text), runs=tmp_path)


def test_places(tmp_path):
    assert executor("local:3", folder=tmp_path).slots == 3
    for bad in ("", "local:0", "local:x", "ray:8000", "slurm:gpu", "moon"):
        with pytest.raises(ValueError, match="executor: expected 'local'"):
            executor(bad, folder=tmp_path)


def test_places_that_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "submitit", None)
    for place in ("ray", "slurm"):
        with pytest.raises(RunError, match=rf"{place} needs `pip install mesascope\[{place}\]`"):
            executor(place, folder=tmp_path)


def small(where, **train):
    return TrainingRun(config=tiny(**train), runs=str(where), save_seconds=0.0)


def test_work(tmp_path):
    """In this process: a worker trains, goes on, finds it done; says what cannot succeed, and what is busy."""
    piece = small(tmp_path)
    folder = folder_of(piece).path

    def job(piece, attempt=1, max_minutes=None):
        return Job(piece=piece, attempt=attempt, max_minutes=max_minutes).to_text()

    assert work(job(piece, max_minutes=0.0)) == OUT_OF_TIME
    assert not piece.is_done
    assert work(job(piece, attempt=2)) == DONE
    assert piece.is_done
    log = (folder / "log").read_text()
    assert "--- attempt 1" in log
    assert "going on at step" in log.partition("--- attempt 2")[2]
    assert work(job(piece)) == DONE

    rate = {"kind": "Constant", "peak": 1e30}
    diverging = TrainingRun(
        config=store.with_field(
            store.with_field(tiny(), f"train.optimizer.rate={json.dumps(rate)}"), "train.optimizer.clip=null"
        ),
        runs=str(tmp_path),
    )
    assert work(job(diverging)) == HOPELESS
    assert "training diverged" in (folder_of(diverging).path / "log").read_text()
    other = small(tmp_path, steps=13)
    with store.locked(runs.path_of(other.config, tmp_path), field="runs", doing="trained"):
        assert work(job(other)) == BUSY
    with store.locked(folder_of(other).path, field="runs", doing="worked on"):
        assert work(job(other)) == BUSY
        assert status([other])[0].state == "running"
    assert status([other])[0].state == "waiting"


class Instant:
    """An executor whose jobs end as they are told to; what they leave behind is real."""

    slots: int | None = 2

    def __init__(self, *ends):
        self.ends, self.started = list(ends), []

    def start(self, job, avoid=""):
        self.started.append(json.loads(job))
        end = self.ends.pop(0) if self.ends else None
        return Ended(work(job) if end is None else end)

    def close(self):
        pass


class Ended:
    def __init__(self, status):
        self.status = status

    def ended(self):
        return self.status

    def why(self):
        return "the node is gone" if self.status == FAILED else ""

    def stop(self):
        pass


@pytest.mark.faults
def test_what_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "SECONDS_WHILE_BUSY", 0.0)
    monkeypatch.setattr(driver, "SECONDS_BEFORE_A_RETRY", 0.0)
    first, second, third = small(tmp_path), small(tmp_path, steps=13), small(tmp_path, steps=14)
    console = plain()
    # The first is killed once, is busy once and then done; the second cannot succeed; the third keeps being stopped.
    place = Instant(1, 2, STOPPED, BUSY, OUT_OF_TIME, None, 1)
    outcomes = sweep([first, second, third], place, retries=2, console=console)
    assert [(o.state, o.attempts) for o in outcomes] == [("done", 2), ("failed", 1), ("failed", 3)]
    told = console.export_text()
    assert "3 pieces, 0 of them done before" in told
    assert "another process is at it" in told
    assert told.count("failed; the rest goes on") == 2
    assert [job["attempt"] for job in place.started] == [1, 1, 1, 2, 2, 2, 3]
    assert "the node is gone" in (folder_of(first).path / "log").read_text(), "what only the executor knows"
    assert outcomes[2].told.endswith("the node is gone")
    console = plain()
    report(status([first, second, third]), console)
    told = console.export_text()
    assert "1 done, 0 running, 0 waiting, 2 failed" in told
    assert str(folder_of(second).path / "log") in told.replace("\n", "")
    # Asked for again, what is done stays, and what failed has all its attempts again.
    outcomes = sweep([first, third], Instant(2), console=plain())
    assert [(o.state, o.attempts) for o in outcomes] == [("done", 2), ("failed", 1)]


@pytest.mark.faults
def test_retries_wait_longer_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "SECONDS_BEFORE_A_RETRY", 0.5)
    began = []

    class Timed(Instant):
        def start(self, job, avoid=""):
            began.append(time.monotonic())
            return super().start(job)

    sweep([small(tmp_path)], Timed(1, 1, 1), retries=2, console=plain())
    assert began[1] - began[0] >= 0.5
    assert began[2] - began[1] >= 1.0


@pytest.mark.faults
def test_a_folder_that_one_machine_cannot_write_to(tmp_path, monkeypatch):
    """Another may: it is tried again."""
    monkeypatch.setattr(driver, "SECONDS_BEFORE_A_RETRY", 0.0)
    piece = small(tmp_path)
    path = runs.path_of(piece.config, tmp_path)
    path.write_text("no folder")

    class Elsewhere(Instant):
        def start(self, job, avoid=""):
            running = super().start(job)
            if path.is_file():
                path.unlink()
            return running

    (outcome,) = sweep([piece], Elsewhere(), console=plain())
    assert (outcome.state, outcome.attempts) == ("done", 2)
    assert f"cannot write to {path}" in (folder_of(piece).path / "log").read_text()


class Patient:
    """A job that ends when it is asked to, in the middle of its work."""

    asked = 0

    def ended(self):
        return OUT_OF_TIME if self.asked else None

    def stop(self):
        self.asked += 1

    def why(self):
        return ""


@pytest.mark.faults
def test_a_sweep_that_is_out_of_time(tmp_path):
    pieces = [small(tmp_path), small(tmp_path, steps=13), small(tmp_path, steps=14)]
    place = Instant()
    jobs = []

    def start(job, avoid=""):
        jobs.append(Patient())
        return jobs[-1]

    place.start = start
    outcomes = sweep(pieces, place, max_minutes=0.01, console=plain())
    assert [outcome.state for outcome in outcomes] == ["waiting"] * 3
    assert [job.asked for job in jobs] == [1, 1], "there are two slots, and each is asked once"


def test_which_gpu_a_process_has(tmp_path, monkeypatch):
    """Each has one to itself as far as they go; then the least busy, with memory taken as it is needed."""
    python = tmp_path / "python"
    seen = 'echo "$CUDA_VISIBLE_DEVICES $XLA_PYTHON_CLIENT_PREALLOCATE"'
    python.write_text(f"#!/bin/sh\n{seen} > {tmp_path}/$$\nread job\nexec sleep $job\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)

    def told(process):
        path = tmp_path / str(process.process.pid)
        wait_for(lambda: path.exists() and path.read_text())
        return path.read_text().split()

    for visible, slots in (("", 1), ("-1", 1), ("3", 1), ("0,GPU-5f", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert executor("local", folder=tmp_path).slots == slots
    place = executor("local:3", folder=tmp_path)
    started = [place.start("60\n") for _ in range(3)]
    try:
        assert [told(process) for process in started] == [["0", "false"], ["GPU-5f", "false"], ["0", "false"]]
        started[1].process.kill()
        wait_for(lambda: started[1].ended() is not None)
        started.append(place.start("60\n"))
        assert told(started[-1])[0] == "GPU-5f"
    finally:
        for process in started:
            process.stop()
            process.process.wait()
    assert [process.ended() for process in started] == [FAILED] * 4
    assert started[0].why() == "ended by the signal SIGTERM"


SPEC = """
presets = ["linear-1"]
seeds = 2
at_once = 1
[set]
"task.state_dim" = 2
"task.length" = 4
"model.token_dim" = 8
"model.output_dim" = 2
"model.masked" = 4
"model.blocks" = [{ kind = "Block", mixer = { kind = "Linear" }, heads = 1, key_dim = 2 }]
"train.batch_size" = 2
"train.eval_batch_size" = 4
"train.eval_batches" = 2
"train.final_sequences" = 8
"train.eval_every" = 500
"train.steps" = STEPS
"""
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
# Ray would write a token into the home directory.
ENVIRONMENT |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def command(*words):
    return [sys.executable, "-m", "mesascope", "sweep", *map(str, words)]


def finish(*words, **options):
    return subprocess.run(
        command(*words), capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=500, **options
    )


def test_a_sweep_from_the_command_line(tmp_path, capsys):
    path = spec(tmp_path / "a.toml", SPEC.replace("STEPS", "20").replace("seeds = 2", "seeds = 1"))
    done = finish(path, "--runs", tmp_path / "runs", "--executor", "local:2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 done, 0 running, 0 waiting, 0 failed" in done.stdout
    # A run of the store like any other; and a sweep over done pieces starts nothing.
    assert runs.find("linear-1", runs=tmp_path / "runs").finished
    main(["sweep", str(path), "--runs", str(tmp_path / "runs")])
    main(["sweep", "status", str(path), "--runs", str(tmp_path / "runs")])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["sweep", "status"])
    told = capsys.readouterr()
    assert "mesascope sweep status" in told.out + told.err
    assert "sweep-status" not in told.out + told.err
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "status", str(path), "--runs", str(tmp_path / "rums")])
    assert ended.value.code == 1
    assert "runs: there is no directory" in capsys.readouterr().err
    wrong = finish(path, "--executor", "moon")
    assert wrong.returncode == 1
    assert "executor: expected 'local'" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_figures_that_need_text_are_left_out_where_there_is_none(tmp_path):
    """Unless they are named, or there is: else one command for all figures would fail for those."""
    where = dict(scale="quick", out=tmp_path, run_directory=tmp_path)
    left = {piece.figure for piece in figure_pieces((), **where)}
    assert {"fig4", "si-noise", "recall"} <= left
    texts = {"lm-keyshift", "lm-two-layers", "lm-four-layers", "lm-attention"}
    assert {piece.figure for piece in figure_pieces((), **where, data=tmp_path)} - left == texts
    assert {piece.figure for piece in figure_pieces(("lm-attention",), **where)} == {"lm-attention"}
    (one,) = figure_pieces(("lm-two-layers/mesa",), **where)
    assert (one.figure, one.piece) == ("lm-two-layers", "mesa")


@pytest.mark.slow
def test_figures_are_placed_in_pieces(tmp_path):
    """fig1 needs no models and has one piece; the driver then finds it."""
    place = ["--preset", "smoke", "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    done = subprocess.run(
        [sys.executable, "-m", "mesascope", "reproduce", "fig1", *place, "--executor", "local"],
        capture_output=True, text=True, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 done, 0 running, 0 waiting, 0 failed" in done.stdout
    (piece,) = (tmp_path / "out" / "smoke" / "pieces" / "fig1").glob("*.json")
    made = FigurePiece(
        figure="fig1", piece=piece.stem, scale="smoke", out=str(tmp_path / "out"), runs=str(tmp_path / "runs")
    )
    assert made.is_done
    made.forget()
    assert not made.is_done
    with pytest.raises(SystemExit):
        main(["reproduce", "fig1", "--executor", "local", "--out", str(tmp_path / "out")])


@pytest.mark.faults
@pytest.mark.slow
def test_what_is_done_is_drawn_though_a_piece_failed(tmp_path):
    """One figure needs text, and there is none; the other is drawn, and the exit status tells."""
    where = ["--preset", "smoke", "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    done = subprocess.run(
        [sys.executable, "-m", "mesascope", "reproduce", "fig1", "lm-attention", *where, "--executor", "local:2"],
        capture_output=True, text=True, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 done" in done.stdout
    assert "0 failed" not in done.stdout
    assert "Traceback" not in done.stderr
    assert "fig1" in (tmp_path / "out" / "index.html").read_text()


def wait_for(condition, seconds=120):
    for _ in range(int(10 * seconds)):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen")


def worker_of(piece):
    """The process that is at a piece: the last that its log names."""
    try:
        lines = (folder_of(piece).path / "log").read_text().splitlines()
    except FileNotFoundError:
        return None
    starts = [line for line in lines if line.startswith("--- attempt")]
    return int(starts[-1].partition("process ")[2].split()[0]) if starts else None


def undisturbed(pieces, where):
    """The same runs, trained by a plain command each, in a process like a worker."""
    code = "import sys; from mesascope.sweep.worker import work; sys.exit(work(sys.stdin.read()))"
    for piece in pieces:
        alone = TrainingRun(config=piece.config, runs=str(where))
        job = Job(piece=alone, attempt=1).to_text()
        subprocess.run([sys.executable, "-c", code], input=job, text=True, env=ENVIRONMENT, check=True)
    return [contents(runs.Run(runs.path_of(piece.config, where))) for piece in pieces]


def kill_a_worker(where, tmp_path, *options, how=signal.SIGKILL):
    """A signal to a worker that has saved something; the sweep goes on to the bits of an undisturbed run."""
    path = spec(tmp_path / "a.toml", SPEC.replace("STEPS", "30000"))
    pieces = read_spec(path, runs=tmp_path / "runs")
    driving = subprocess.Popen(
        command(path, "--runs", tmp_path / "runs", "--executor", where, "--save-seconds", "0.05", *options),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    try:
        first = runs.Run(runs.path_of(pieces[0].config, tmp_path / "runs"))
        wait_for(lambda: first.path.exists() and first.step > 0)
        assert status(pieces)[0].state == "running"
        victim = worker_of(pieces[0])
        assert victim != driving.pid
        os.kill(victim, how)
        out, err = driving.communicate(timeout=500)
    finally:
        driving.kill()
    assert driving.returncode == 0, out + err
    assert "ended before its end; started again from its last checkpoint" in out
    assert "2 done" in out
    log = (folder_of(pieces[0]).path / "log").read_text()
    assert "going on at step" in log.partition("--- attempt 2")[2]
    found = [contents(runs.Run(runs.path_of(piece.config, tmp_path / "runs"))) for piece in pieces]
    assert found == undisturbed(pieces, tmp_path / "alone")


@pytest.mark.faults
@pytest.mark.slow
def test_a_killed_worker(tmp_path):
    kill_a_worker("local:2", tmp_path)


@pytest.mark.faults
@pytest.mark.slow
def test_a_worker_that_a_scheduler_stops(tmp_path):
    """It saves and ends. As long as there is time left, it is started again."""
    kill_a_worker("local:2", tmp_path, "--max-minutes", "60", how=signal.SIGTERM)


@pytest.mark.faults
@pytest.mark.slow
@needs_ray
def test_a_killed_ray_worker(tmp_path):
    kill_a_worker("ray", tmp_path)


@pytest.mark.faults
@pytest.mark.slow
@needs_ray
def test_a_killed_ray_worker_goes_on_elsewhere(tmp_path):
    """Two machines of a cluster, reached from outside of it; the second attempt is made on the other."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    code = (
        "import sys; from ray.cluster_utils import Cluster; "
        f"head = dict(num_cpus=2, include_dashboard=False, ray_client_server_port={port}); "
        "cluster = Cluster(initialize_head=True, head_node_args=head); cluster.add_node(num_cpus=2); "
        "print('ready', flush=True); sys.stdin.read(); cluster.shutdown()"
    )
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
    ) as cluster:  # fmt: skip
        assert cluster.stdout is not None
        wait_for(lambda: "ready" in cluster.stdout.readline())
        kill_a_worker(f"ray://localhost:{port}", tmp_path)
    (log,) = [path for path in (tmp_path / "runs").glob(".sweeps/*/log") if "attempt 2" in path.read_text()]
    starts = [line for line in log.read_text().splitlines() if line.startswith("--- attempt")]
    assert len(starts) == 2
    assert len({line.split()[-1] for line in starts}) == 2
    assert "WorkerCrashedError" in log.read_text()


@pytest.mark.faults
@pytest.mark.slow
@needs_submitit
def test_a_killed_job_of_submitit(tmp_path):
    kill_a_worker("slurm:local", tmp_path)


@pytest.mark.faults
@pytest.mark.slow
def test_a_killed_driver(tmp_path):
    """Its workers save and end by themselves; the same command goes on."""
    path = spec(tmp_path / "a.toml", SPEC.replace("STEPS", "30000"))
    options = (path, "--runs", tmp_path / "runs", "--executor", "local:2", "--save-seconds", "0.05")
    pieces = read_spec(path, runs=tmp_path / "runs")
    driving = subprocess.Popen(command(*options), env=ENVIRONMENT)
    wait_for(lambda: [outcome.state for outcome in status(pieces)] == ["running"] * 2)
    wait_for(lambda: all(runs.Run(runs.path_of(p.config, p.runs)).step > 0 for p in pieces))
    driving.kill()
    driving.wait()
    wait_for(lambda: "running" not in {outcome.state for outcome in status(pieces)})
    assert [outcome.state for outcome in status(pieces)] == ["waiting"] * 2
    done = finish(*options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [contents(runs.Run(runs.path_of(piece.config, tmp_path / "runs"))) for piece in pieces]
    assert found == undisturbed(pieces, tmp_path / "alone")


@pytest.mark.faults
def test_a_worker_whose_driver_died_before_it_began(tmp_path):
    """It does not train on for nobody."""
    piece = small(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    orphan = subprocess.run(
        [sys.executable, "-c", "from mesascope.sweep.worker import main; main()", str(gone.pid)],
        input=Job(piece=piece, attempt=1).to_text(), text=True, env=ENVIRONMENT, check=False, timeout=120,
    )  # fmt: skip
    assert orphan.returncode == -signal.SIGTERM
    assert not piece.is_done


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupted", "out of time"])
def test_a_sweep_that_is_stopped(tmp_path, how):
    """Ctrl-C, and `--max-minutes`: its workers save and end, and the same command goes on."""
    path = spec(tmp_path / "a.toml", SPEC.replace("STEPS", "100000"))
    options = (path, "--runs", tmp_path / "runs", "--executor", "local:2", "--save-seconds", "1000")
    pieces = read_spec(path, runs=tmp_path / "runs")
    time_given = () if how == "interrupted" else ("--max-minutes", "0.2")
    driving = subprocess.Popen(
        command(*options, *time_given),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    if how == "interrupted":
        began = [runs.path_of(piece.config, tmp_path / "runs") / "metrics.jsonl" for piece in pieces]
        wait_for(lambda: all(log.exists() and log.read_text().count("step") > 1 for log in began))
        driving.send_signal(signal.SIGINT)
    out, err = driving.communicate(timeout=500)
    assert driving.returncode == (130 if how == "interrupted" else 75), out + err
    assert "stopped, and saved (step" in out
    outcomes = status(pieces)
    assert "running" not in {outcome.state for outcome in outcomes}
    if how == "interrupted":
        assert all(outcome.state == "done" or "step 0" not in outcome.told for outcome in outcomes)
        assert any(outcome.state == "waiting" for outcome in outcomes)
    done = finish(*options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [contents(runs.Run(runs.path_of(piece.config, tmp_path / "runs"))) for piece in pieces]
    assert found == undisturbed(pieces, tmp_path / "alone")


@pytest.mark.faults
@pytest.mark.slow
def test_two_sweeps_at_once(tmp_path):
    """Nothing is trained twice: the second finds each run being trained, and then trained."""
    path = spec(tmp_path / "a.toml", SPEC.replace("STEPS", "20000"))
    options = (path, "--runs", tmp_path / "runs", "--executor", "local:2")
    both = [
        subprocess.Popen(command(*options), stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=500)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    pieces = read_spec(path, runs=tmp_path / "runs")
    for piece in pieces:
        assert (folder_of(piece).path / "log").read_text().count("step 20000/20000") == 1
    found = [contents(runs.Run(runs.path_of(piece.config, tmp_path / "runs"))) for piece in pieces]
    assert found == undisturbed(pieces, tmp_path / "alone")
