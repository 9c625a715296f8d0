"""Many pieces of work: what a file asks for, where it is done, and what becomes of pieces that fail."""

import io
import json
import os
import signal
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
from mesascope.sweep.worker import BUSY, DONE, HOPELESS, OUT_OF_TIME, STOPPED, work
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
        ('presets = ["linear-1"]\n[set]\n"train.steps" = 2020-01-01', "date is not JSON serializable"),
        ('presets = ["linear-1"]\n[set]\n"name" = "../x"', "name: expected letters"),
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

    def start(self, job):
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

    def stop(self):
        pass


@pytest.mark.faults
def test_what_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "SECONDS_WHILE_BUSY", 0.0)
    first, second, third = small(tmp_path), small(tmp_path, steps=13), small(tmp_path, steps=14)
    console = plain()
    # The first is killed once, is busy once and then done; the second cannot succeed; the third keeps being stopped.
    place = Instant(1, 2, STOPPED, BUSY, 1, None, 1)
    outcomes = sweep([first, second, third], place, retries=2, console=console)
    assert [(o.state, o.attempts) for o in outcomes] == [("done", 2), ("failed", 1), ("failed", 3)]
    told = console.export_text()
    assert "3 pieces, 0 of them done before" in told
    assert "another process is at it" in told
    assert told.count("failed; the rest goes on") == 2
    assert [job["attempt"] for job in place.started] == [1, 1, 1, 2, 2, 2, 3]
    console = plain()
    report(status([first, second, third]), console)
    told = console.export_text()
    assert "1 done, 0 running, 0 waiting, 2 failed" in told
    assert str(folder_of(second).path / "log") in told.replace("\n", "")
    # Asked for again, what is done stays, and what failed has all its attempts again.
    outcomes = sweep([first, third], Instant(2), console=plain())
    assert [(o.state, o.attempts) for o in outcomes] == [("done", 2), ("failed", 1)]


def test_a_sweep_that_is_out_of_time(tmp_path):
    pieces = [small(tmp_path), small(tmp_path, steps=13)]
    outcomes = sweep(pieces, Instant(), max_minutes=0.0, console=plain())
    assert [outcome.state for outcome in outcomes] == ["waiting"] * 2


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
    return [sys.executable, "-m", "mesascope.cli", "sweep", *map(str, words)]


def finish(*words, **options):
    return subprocess.run(
        command(*words), capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=500, **options
    )


def test_a_sweep_from_the_command_line(tmp_path):
    path = spec(tmp_path / "a.toml", SPEC.replace("STEPS", "20").replace("seeds = 2", "seeds = 1"))
    done = finish(path, "--runs", tmp_path / "runs", "--executor", "local:2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 done, 0 running, 0 waiting, 0 failed" in done.stdout
    # A run of the store like any other; and a sweep over done pieces starts nothing.
    assert runs.find("linear-1", runs=tmp_path / "runs").finished
    main(["sweep", str(path), "--runs", str(tmp_path / "runs")])
    main(["sweep", "status", str(path), "--runs", str(tmp_path / "runs")])
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


@pytest.mark.slow
def test_figures_are_placed_in_pieces(tmp_path):
    """fig1 needs no models and has one piece; the driver then finds it."""
    place = ["--preset", "smoke", "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    done = subprocess.run(
        [sys.executable, "-m", "mesascope.cli", "reproduce", "fig1", *place, "--executor", "local"],
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


def kill_a_worker(where, tmp_path):
    """SIGKILL to a worker that has saved something; the sweep goes on, and the bits are those of an undisturbed run."""
    path = spec(tmp_path / "a.toml", SPEC.replace("STEPS", "30000"))
    pieces = read_spec(path, runs=tmp_path / "runs")
    driving = subprocess.Popen(
        command(path, "--runs", tmp_path / "runs", "--executor", where, "--save-seconds", "0.05"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    try:
        first = runs.Run(runs.path_of(pieces[0].config, tmp_path / "runs"))
        wait_for(lambda: first.path.exists() and first.step > 0)
        assert status(pieces)[0].state == "running"
        victim = worker_of(pieces[0])
        assert victim != driving.pid
        os.kill(victim, signal.SIGKILL)
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
@needs_ray
def test_a_killed_ray_worker(tmp_path):
    kill_a_worker("ray", tmp_path)


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
