"""Runs through what happens to them: killed, interrupted, damaged, diverging, out of disk."""

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

import mesascope
from mesascope import cli, provenance, runs, sinks, training
from mesascope.runs import MissingRunError, Run, RunError, find, fit, load
from mesascope.show import list_presets, list_runs, show_run
from mesascope.store import StoreError, locked, read_arrays, read_metadata
from mesascope.training import AdamW, Constant, Trainer
from tests.test_training import tiny

pytestmark = pytest.mark.usefixtures("standard_promotion")

FILES = ("weights.safetensors", "metrics.jsonl", "result.json")


def contents(run: Run) -> dict[str, bytes]:
    return {name: (run.path / name).read_bytes() for name in FILES}


def plain() -> Console:
    return Console(record=True, width=200, file=io.StringIO())


def test_what_a_run_leaves_behind(tmp_path):
    console = plain()
    config = tiny(keep_every=4)
    run = fit(config, runs=tmp_path, console=console)
    assert run.path.parent == tmp_path
    assert run.path.name.startswith("tiny-")
    assert run.finished
    assert run.config == config
    metrics = run.metrics()
    assert metrics["step"].tolist() == [0, 5, 10, 12]
    assert metrics["eval_loss"].shape == (4, 2)
    assert np.isnan(metrics["train_loss"][0]).all()
    assert np.isfinite(metrics["train_loss"][1:]).all()
    assert sorted(run.kept()) == [0, 4, 8, 12]
    last = run.kept()[12]
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (last, run.models())), strict=True))
    assert {
        "mesascope",
        "source",
        "git",
        "libraries",
        "device",
        "precision",
        "python",
    } <= run.provenance.keys()
    assert not list(run.path.glob("checkpoint*"))
    assert "step 12/12" in console.export_text()

    # The stored loss is that of the stored weights on sequences anybody can draw again.
    trainer = Trainer(config)
    by_position = np.asarray(trainer.evaluate_finally(run.models()))
    np.testing.assert_allclose(by_position, run.result["loss_by_position"], rtol=1e-6)
    np.testing.assert_allclose(by_position.mean(1), run.result["loss"], rtol=1e-6)

    # Found by directory, by name, by how the name begins; and a model is as it was trained.
    tokens = config.examples(jax.random.key(1), 3).tokens
    for name in (run.path, "tiny", run.path.name[:8]):
        model, loaded = mesascope.load(name, seed=1, runs=tmp_path)
        assert loaded == config
        expected = jax.tree.map(lambda leaf: leaf[1], run.models())(tokens)
        assert np.array_equal(model(tokens), expected)
    with pytest.raises(RunError, match=r"there is no run 'nothing' in .*There are: tiny-"):
        load("nothing", runs=tmp_path)
    with pytest.raises(ValueError, match="seed: this run has seeds 0 to 1, got 2"):
        load("tiny", seed=2, runs=tmp_path)

    # Asked for again, it is there; asked for afresh, it is the same.
    before = contents(run)
    again = plain()
    assert fit(config, runs=tmp_path, console=again) == run
    assert "has already been trained" in again.export_text()
    assert contents(fit(config, runs=tmp_path, fresh=True)) == before

    for table in (lambda c: list_runs(tmp_path, c), lambda c: show_run(run, c), list_presets):
        console = plain()
        table(console)
        printed = console.export_text()
        assert "tiny" in printed or "hybrid-mesa" in printed


def beginnings(where: Path, *names: str) -> None:
    """Runs that have just begun, by their names."""
    for name in names:
        (where / name).mkdir(parents=True)
        (where / name / "config.json").write_text("{}")


def test_the_name_of_a_preset_stands_for_no_other(tmp_path):
    beginnings(tmp_path, "linear-1-as-written-0123456789", "partial-softmax-7-5-0123456789")
    beginnings(tmp_path, "lm-2-mesa-forget-cpu-0123456789", "lm-4-mesa-cpu-0123456789")
    for name in ("linear-1", "partial-softmax-7", "lm-2-mesa"):
        with pytest.raises(
            MissingRunError, match=f"there is no run '{name}' in .*There are: linear-1-as-written"
        ):
            find(name, runs=tmp_path)
    model, config = load("linear-1", runs=tmp_path)
    assert config.name == "linear-1"
    assert model.config == config.model
    for name, whole in (
        ("linear-1-as-written", "linear-1-as-written-0123456789"),
        ("linear-1-as-written-01", "linear-1-as-written-0123456789"),
        ("partial-softmax-7-5", "partial-softmax-7-5-0123456789"),
        ("lm-4-mesa", "lm-4-mesa-cpu-0123456789"),
    ):
        assert find(name, runs=tmp_path).path.name == whole
    # Where a digest begins like the rest of a longer name.
    beginnings(tmp_path, "partial-softmax-7-1013456789")
    with pytest.raises(MissingRunError, match="there is no run 'partial-softmax-7-10'"):
        find("partial-softmax-7-10", runs=tmp_path)
    assert find("partial-softmax-7", runs=tmp_path).path.name == "partial-softmax-7-1013456789"


def test_a_released_model_takes_the_place_of_no_run(tmp_path):
    with pytest.raises(MissingRunError, match=r"There is none\. Released models: .*linear-1, .*softmax-7"):
        load("linear-5", runs=tmp_path)
    with pytest.raises(
        ValueError, match=r"seed: the released linear-1 is one model, seed 0; got 1\. `mesascope train"
    ):
        load("linear-1", seed=1, runs=tmp_path)
    beginnings(tmp_path, "linear-1-0123456789", "linear-1-9876543210")
    with pytest.raises(
        RunError, match=r"'linear-1' is one of several runs: linear-1-0123456789, linear-1-9876543210"
    ):
        load("linear-1", runs=tmp_path)


@pytest.mark.faults
def test_stopping_and_going_on_changes_nothing(tmp_path):
    config = tiny(steps=23, eval_every=4)
    undisturbed = fit(config, runs=tmp_path / "a")
    for _ in range(3):
        run = fit(config, runs=tmp_path / "b", max_minutes=0.0)
        assert not run.finished
    with pytest.raises(RunError, match=r"has not finished: step 0 of 23"):
        run.models()
    steps = []
    while not run.finished:
        run = fit(config, runs=tmp_path / "b", max_minutes=1e-4, save_seconds=0.0)
        steps.append(run.step)
    assert contents(run) == contents(undisturbed)


TINY = (
    "linear-1 --task.state-dim 2 --task.length 4 --model.token-dim 8 --model.output-dim 2 --model.masked 4 "
    "--model.blocks.0.heads 1 --model.blocks.0.key-dim 2 --train.batch-size 2 --train.eval-batch-size 4 "
    "--train.eval-batches 2 --train.final-sequences 8 --seeds 2 --train.eval-every 500"
)


def command(*extra: str, where: Path, what: str = TINY) -> list[str]:
    return [sys.executable, "-m", "mesascope", "train", *what.split(), "--runs", str(where), *extra]


ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def start(*extra: str, where: Path, **options) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command(*extra, where=where), stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT, **options
    )


def finish(*extra: str, where: Path, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*extra, where=where), capture_output=True, text=True, env=ENVIRONMENT, check=False, **options
    )


def last_step(where: Path) -> int:
    """Of the last checkpoint, or -1."""
    return max(
        (int(read_metadata(path)["step"]) for path in where.glob("*/checkpoint.safetensors")), default=-1
    )


def run_for_a_while(*options: str, where: Path) -> subprocess.Popen:
    """A process that has gone beyond the checkpoint it found."""
    before, process = last_step(where), start(*options, where=where)
    for _ in range(1200):
        time.sleep(0.1)
        if last_step(where) > before:
            return process
        assert process.poll() is None, process.communicate()
    raise AssertionError("no checkpoint after two minutes")


@pytest.mark.faults
@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_killed_at_any_moment(tmp_path, kills):
    """SIGKILL to a real process, and more than once; the bits of the end are those of an undisturbed run."""
    options = ("--train.steps", "30000", "--save-seconds", "0.05")
    rng = np.random.default_rng(0)
    for _ in range(kills):
        process = run_for_a_while(*options, where=tmp_path / "killed")
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    # Ctrl-C is answered: saved, and how to go on.
    process = run_for_a_while(*options, where=tmp_path / "killed")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "interrupted at step" in out
    assert "the same command goes on from here" in out
    done = finish(*options, where=tmp_path / "killed")
    assert done.returncode == 0, done.stderr
    assert "going on at step" in done.stdout
    finish(*options, where=tmp_path / "whole")
    assert contents(find("linear-1", runs=tmp_path / "killed")) == contents(
        find("linear-1", runs=tmp_path / "whole")
    )


@pytest.mark.faults
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax-7", "hybrid-mesa"])
def test_killed_on_a_gpu(tmp_path, name):
    """Models of the paper at their own size. The third process compiles nothing that the first has compiled."""
    what = f"{name} --train.steps 1500 --train.eval-every 300 --save-seconds 0.2"

    # Programs are kept beside the runs, whatever is set here.
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}

    def process(where: Path) -> subprocess.Popen:
        return subprocess.Popen(command(where=where, what=what), env=environment)

    killed = process(tmp_path / "killed")
    for _ in range(1800):
        time.sleep(0.1)
        if last_step(tmp_path / "killed") > 300:
            break
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert process(tmp_path / "killed").wait() == 0
    shutil.copytree(tmp_path / "killed" / ".compiled", tmp_path / "whole" / ".compiled")
    assert process(tmp_path / "whole").wait() == 0
    ends = [find(name, runs=tmp_path / where) for where in ("killed", "whole")]
    assert "(gpu)" in ends[0].provenance["device"]
    assert contents(ends[0]) == contents(ends[1])


@pytest.mark.faults
def test_a_full_disk(tmp_path):
    """No file may grow beyond 2 KiB: the checkpoint does not fit, and says so; with room again it goes on."""
    options = ("--train.steps", "1500", "--save-seconds", "0")
    stuck = subprocess.run(
        ["bash", "-c", 'ulimit -f 2; exec "$@"', "bash", *command(*options, where=tmp_path)],
        capture_output=True, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert stuck.returncode == 1
    assert "could not write" in stuck.stderr
    assert "File too large" in stuck.stderr
    assert "Traceback" not in stuck.stderr
    run = find("linear-1", runs=tmp_path)
    assert not list(run.path.glob(".checkpoint*")), "a torn file was left behind"
    freed = finish(*options, where=tmp_path)
    assert freed.returncode == 0, freed.stderr
    assert run.finished


def stopped(config, where) -> Run:
    """A run with two checkpoints."""
    fit(config, runs=where, max_minutes=0.0)
    return fit(config, runs=where, max_minutes=2e-4, save_seconds=0.0)


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[-20] ^= 1
    elif how == "cut":
        content = content[: len(content) // 2]
    else:
        content = bytearray(b"not a checkpoint")
    path.write_bytes(content)


@pytest.mark.faults
@pytest.mark.parametrize(
    "how", ["flipped", *(pytest.param(h, marks=pytest.mark.slow) for h in ("cut", "foreign"))]
)
def test_a_damaged_checkpoint(tmp_path, how):
    config = tiny(steps=40)
    undisturbed = fit(config, runs=tmp_path / "a")
    run = stopped(config, tmp_path / "b")
    current, previous = (run.path / f"checkpoint{x}.safetensors" for x in ("", ".previous"))
    good = previous.read_bytes()
    damage(current, how)
    damage(previous, how)
    with pytest.raises(RunError, match=r"damaged.*No good one is left: start anew with --fresh"):
        fit(config, runs=tmp_path / "b")
    previous.write_bytes(good)
    console = plain()
    fit(config, runs=tmp_path / "b", max_minutes=0.0, console=console)
    assert "Going on from the one before it" in console.export_text()
    # The damaged one does not take the place of the good one when the next is written.
    assert previous.read_bytes() == good
    run = fit(config, runs=tmp_path / "b")
    assert contents(run) == contents(undisturbed)


@pytest.mark.faults
def test_a_checkpoint_of_something_else(tmp_path):
    config, other = tiny(steps=40), tiny(steps=41)
    run, foreign = stopped(config, tmp_path), stopped(other, tmp_path)
    checkpoint = run.path / "checkpoint.safetensors"
    checkpoint.write_bytes((foreign.path / "checkpoint.safetensors").read_bytes())
    with pytest.raises(RunError, match="checkpoint of another configuration"):
        fit(config, runs=tmp_path)
    with pytest.raises(StoreError, match=r"'models\.layers\.0\.\w+' is .* expected .*another model"):
        read_arrays(checkpoint, Trainer(tiny(steps=40, seeds=3)).shapes)
    (run.path / "config.json").write_text('{"kind": "Config", "nam')
    with pytest.raises(StoreError, match="damaged"):
        find(run.path).config  # noqa: B018


@pytest.mark.faults
def test_other_source(tmp_path, monkeypatch):
    config = tiny(steps=40)
    run = stopped(config, tmp_path)
    finished = fit(tiny(steps=3), runs=tmp_path)
    monkeypatch.setattr(provenance, "source_hash", lambda: "another")
    with pytest.raises(RunError, match=r"made by other source.*Begin again with --fresh"):
        fit(config, runs=tmp_path)
    assert fit(config, runs=tmp_path, fresh=True).finished
    console = plain()
    assert fit(tiny(steps=3), runs=tmp_path, console=console) == finished
    assert "made by other source" in console.export_text()
    assert run.provenance["source"] == "another"


@pytest.mark.faults
def test_divergence_names_seed_step_and_checkpoint(tmp_path):
    config = tiny(steps=40)
    optimizer = AdamW(rate=Constant(peak=1e30), clip=None)
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, optimizer=optimizer, first_seed=7)
    )
    with pytest.raises(
        RunError, match=r"loss of seeds 7, 8 is not finite at step 1\. The last good checkpoint is .*, step"
    ):
        fit(config, runs=tmp_path, save_seconds=0.0)
    (checkpoint,) = tmp_path.glob("*/checkpoint.safetensors")
    assert int(read_metadata(checkpoint)["step"]) <= 1


@pytest.mark.faults
def test_what_a_killed_writer_left_is_swept(tmp_path):
    """And files can be read by whom the user's mask lets read."""
    run = stopped(tiny(steps=40), tmp_path)
    torn = run.path / ".checkpoint.safetensors.12345.tmp"
    torn.write_bytes(b"half of a")
    torn.chmod(0o600)
    fit(tiny(steps=40), runs=tmp_path)
    assert not torn.exists()
    (tmp_path / "ordinary").touch()
    assert (run.path / "weights.safetensors").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


@pytest.mark.faults
def test_two_processes_do_not_train_one_run(tmp_path):
    run = stopped(tiny(steps=40), tmp_path)
    with (
        locked(run.path, field="runs", doing="trained"),
        pytest.raises(RunError, match="is being trained by another process"),
    ):
        fit(tiny(steps=40), runs=tmp_path)


def test_progress_on_a_terminal(tmp_path):
    console = Console(record=True, width=120, force_terminal=True, file=io.StringIO())
    fit(tiny(), runs=tmp_path, console=console)
    printed = console.export_text()
    assert "12/12" in printed
    assert "loss" in printed
    assert "steps/s" in printed


def test_tensorboard(tmp_path):
    config = tiny()
    for _ in range(2):
        run = fit(config, runs=tmp_path, fresh=True, sinks=[sinks.TensorBoard])
    (events,) = (run.path / "tensorboard").iterdir()
    assert b"eval_loss/seed_1" in events.read_bytes()
    assert b"train_loss" in events.read_bytes()


def test_weights_and_biases(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = fit(tiny(), runs=tmp_path, sinks=[partial(sinks.WeightsAndBiases, "test")])
    assert list(run.path.glob("wandb/offline-run-*/*.wandb"))


def test_a_sink_that_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(RunError, match=r"tensorboard: needs `pip install mesascope\[tensorboard\]`"):
        fit(tiny(), runs=tmp_path, sinks=[sinks.TensorBoard])


def test_command_line_errors_are_sentences(tmp_path):
    for arguments, expected in (
        (["train", "softmax-8"], "there is no 'softmax-8'"),
        (["train", "linear-1", "--task.state-dim", "3"], "model.token_dim"),
        (["show", "nothing", "--runs", str(tmp_path)], "there is no run 'nothing'"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "mesascope", *arguments],
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
        )
        assert done.returncode != 0
        assert expected in " ".join((done.stderr + done.stdout).split())
        assert "Traceback" not in done.stderr


@pytest.fixture
def asked(monkeypatch):
    """What the command line would have trained."""
    configs = []

    def fit(config, **options):
        configs.append(config)
        return Run(Path("nowhere"), stopped_by=signal.SIGTERM)

    monkeypatch.setattr(runs, "fit", fit)
    monkeypatch.setattr(training, "divide_cpu", lambda: None)

    def ask(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", *arguments])
        return ended.value.code

    ask.configs = configs
    return ask


def test_fields_are_set_together(asked):
    fields = ("task.state_dim=3", "model.token_dim=12", "model.output_dim=3", "model.masked=6")
    asked("linear-1", *(word for field in fields for word in ("--set", field)))
    assert asked.configs[0].model.masked == 6


def test_the_preset_anywhere_among_the_arguments(asked, capsys):
    # A signal ends a command with 128 and its number.
    assert asked("--seeds", "2", "linear-1", "--train.steps", "20") == 143
    assert (asked.configs[0].name, asked.configs[0].train.seeds, asked.configs[0].train.steps) == (
        "linear-1",
        2,
        20,
    )
    assert asked("--seeds", "2", "linear-0", "--train.steps", "20") == 1
    assert "preset: expected one, and before all options" in capsys.readouterr().err


def test_seeds_are_said_once(asked, capsys):
    assert asked("linear-1", "--seeds", "2", "--train.seeds", "3") == 1
    assert "--seeds 2 and --train.seeds 3 are the same field" in capsys.readouterr().err
    assert asked("linear-1", "--seeds", "2", "--set", "train.seeds=3") == 1
    assert "--seeds and --set train.seeds are the same field" in capsys.readouterr().err
    assert asked("linear-1", "--seeds", "3", "--train.seeds", "3") == 143


def test_help_tells_all_kinds(asked, capsys):
    assert asked("hybrid-mesa", "--help") == 0
    printed = " ".join(capsys.readouterr().out.split())
    for choice in (
        "task.transition=Orthogonal|FixedOrthogonal|Contracting",
        "task.readout=Readout|null",
        "task.nonlinearity=MLP|null",
        "model.positions=Positions|null",
        "model.blocks.N.mixer=Softmax|Linear|Mesa|Delta",
        "model.blocks.N.normalize=Normalize|null",
        "model.blocks.N.mlp=FeedForward|null",
        "train.optimizer.rate=Constant|WarmupCosine",
    ):
        assert choice in printed


class Recorder:
    """A sink that remembers what became of it, and sends this process a signal if it is to."""

    def __init__(self, run, step, *, kill=None):
        self.open, self.kill = True, kill

    def log(self, step, metrics):
        if self.kill is not None:
            os.kill(os.getpid(), self.kill)

    def close(self):
        self.open = False


def test_a_signal_is_told(tmp_path):
    for number in (signal.SIGTERM, signal.SIGINT):
        run = fit(tiny(), runs=tmp_path, sinks=[partial(Recorder, kill=number)])
        assert not run.finished
        assert run.stopped_by == number
    run = fit(tiny(), runs=tmp_path)
    assert run.finished
    assert run.stopped_by is None


def test_sinks_of_a_finished_run_and_sinks_that_fail(tmp_path):
    opened = []

    def first(run, step):
        opened.append(Recorder(run, step))
        return opened[-1]

    def second(run, step):
        raise RunError("wandb: needs something")

    with pytest.raises(RunError, match="needs something"):
        fit(tiny(), runs=tmp_path, sinks=[first, second])
    assert [sink.open for sink in opened] == [False]
    fit(tiny(), runs=tmp_path)
    console = plain()
    fit(tiny(), runs=tmp_path, sinks=[first], console=console)
    assert len(opened) == 1
    assert "metrics are sent while it is trained: none were now" in console.export_text()
    # And a narrow table has whole names.
    fit(dataclasses.replace(tiny(), name="a-name-that-is-longer-than-its-column"), runs=tmp_path)
    console = Console(record=True, width=60, file=io.StringIO())
    list_runs(tmp_path, console)
    cells = [line.split("│")[1].strip() for line in console.export_text().splitlines() if "│" in line]
    assert all(path.name in "".join(cells) for path in tmp_path.iterdir())


@pytest.mark.faults
def test_a_configuration_that_was_changed_by_hand(tmp_path):
    config = tiny(steps=40)
    run = stopped(config, tmp_path)
    path = run.path / "config.json"
    path.write_text(path.read_text().replace('"steps": 40', '"steps": 50'))
    with pytest.raises(RunError, match="is not the configuration asked for"):
        fit(config, runs=tmp_path)


@pytest.mark.faults
def test_going_on_with_other_libraries_is_recorded(tmp_path, monkeypatch):
    config = tiny(steps=40)
    run = stopped(config, tmp_path)
    made = provenance.of
    monkeypatch.setattr(provenance, "of", lambda *given: made(*given) | {"device": "abacus"})
    console = plain()
    assert fit(config, runs=tmp_path, console=console).finished
    assert "not as it was begun: device changed" in console.export_text()
    assert run.provenance["resumed"][0]["device"] == "abacus"


def test_metrics_are_json(tmp_path):
    """Also where there is no number yet: before the first step there is no training loss."""
    run = fit(tiny(), runs=tmp_path)
    text = (run.path / "metrics.jsonl").read_text()
    strictly = json.JSONDecoder(parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    lines = [strictly.decode(line) for line in text.splitlines()]
    assert lines[0]["train_loss"] == [None, None]
    assert all(np.isfinite(line["train_loss"]).all() for line in lines[1:])
    assert all(np.isfinite(line["eval_loss"]).all() for line in lines)
