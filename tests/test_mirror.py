"""Runs in a store at a URL: the same as in a directory, whatever happens to the machines and to the store."""

import dataclasses
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

import mesascope
from mesascope import mirror, runs, store
from mesascope.cli import main
from mesascope.experiments.lab import SCALES, Lab
from mesascope.runs import BusyError, Run, RunError, find, fit
from mesascope.show import list_runs
from mesascope.store import StoreError
from mesascope.sweep import TrainingRun, read_spec, status, sweep
from mesascope.sweep.pieces import Job
from mesascope.sweep.worker import DONE, work
from tests.test_faults import Stop
from tests.test_runs import ENVIRONMENT, command, contents, last_step
from tests.test_sweep import SPEC, Instant, wait_for
from tests.test_sweep import command as sweep_command
from tests.test_training import tiny

fsspec = pytest.importorskip("fsspec")
pytestmark = pytest.mark.usefixtures("standard_promotion")

CONFIG = tiny(steps=40, keep_every=20)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Go to a machine that has nothing yet. Waiting is shorter than it is outside of tests."""
    count = iter(range(1000))

    def go() -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine-{next(count)}"))

    go()
    monkeypatch.setattr(mirror, "SECONDS_BETWEEN_BEATS", 0.05)
    monkeypatch.setattr(mirror, "SECONDS_WITHOUT_A_BEAT", 0.5)
    return go


@pytest.fixture(scope="module")
def s3():
    """A server of this machine that speaks Amazon's protocol, and the environment of its clients."""
    if find_spec("s3fs") is None or find_spec("moto") is None:
        pytest.skip("s3fs and moto are not installed: pip install s3fs 'moto[server]'")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-p", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        for _ in range(300):
            time.sleep(0.1)
            with socket.socket() as client:
                if client.connect_ex(("localhost", port)) == 0:
                    break
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        yield dict.fromkeys(names, "test") | {"AWS_ENDPOINT_URL": f"http://localhost:{port}"}
        server.kill()


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def url(request, tmp_path, monkeypatch):
    if request.param == "s3":
        for name, value in request.getfixturevalue("s3").items():
            monkeypatch.setenv(name, value)
        bucket = tmp_path.name.replace("_", "-").lower()
        fsspec.filesystem("s3").mkdir(bucket)
        yield f"s3://{bucket}/runs"
    else:
        yield f"file://{tmp_path}/store" if request.param == "file" else "memory://store"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run in a directory."""
    with jax.numpy_dtype_promotion("standard"):
        return fit(CONFIG, runs=tmp_path_factory.mktemp("whole"))


def plain() -> Console:
    return Console(record=True, width=200, file=io.StringIO())


def there(url: str) -> set[str]:
    """The names of all files of the store."""
    fs, root = fsspec.url_to_fs(url)
    return {path.rpartition("/")[2] for path in fs.find(root)}


def stopped(url: str) -> Path:
    """A run that was ended at step 20, with two checkpoints before; its folder on this machine."""
    with pytest.raises(KeyboardInterrupt):
        fit(CONFIG, runs=url, save_seconds=0.0, sinks=[Stop])
    run = Run(runs.path_of(CONFIG, url))
    assert 0 < run.step < 20
    return run.path


def test_a_run_at_a_url(url, whole, elsewhere):
    run = fit(CONFIG, runs=url, save_seconds=0.0)
    assert contents(run) == contents(whole)
    assert there(url) == {path.name for path in whole.path.rglob("*") if path.is_file()} - {".lock"}
    # On another machine it is done, and has all its parts.
    elsewhere()
    console = plain()
    again = fit(CONFIG, runs=url, console=console)
    assert "has already been trained" in console.export_text()
    assert again.path != run.path
    assert contents(again) == contents(whole)
    elsewhere()
    for name in ("tiny", whole.path.name, f"{url}/{whole.path.name}"):
        found = find(name, runs=url)
        assert contents(found) == contents(whole)
        assert sorted(found.kept()) == sorted(whole.kept())
        model, config = mesascope.load(name, seed=1, runs=url)
        assert config == CONFIG
        assert all(map(np.array_equal, jax.tree.leaves(model), jax.tree.leaves(whole.model(1))))
    with pytest.raises(RunError, match=rf"no run 'nothing' in {url}. There are: tiny-"):
        find("nothing", runs=url)
    elsewhere()
    console = plain()
    list_runs(url, console)
    assert "40 of 40" in console.export_text()
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("weights.safetensors")), (
        "a list needs no weights"
    )
    # Begun afresh, it is the same; meanwhile nobody takes it for finished.
    fit(CONFIG, runs=url, fresh=True, max_minutes=0.0)
    assert not {"result.json", "weights.safetensors"} & there(url)
    elsewhere()
    assert contents(fit(CONFIG, runs=url)) == contents(whole)


@pytest.mark.faults
def test_a_store_that_cannot_copy(tmp_path, whole, monkeypatch):
    """As sftp, ftp and smb: what it has under another name is sent."""

    kind = fsspec.get_filesystem_class("file")
    copy, refused = kind.cp_file, []

    def cannot(self, source, target, **options):
        if str(source).startswith(f"{tmp_path}/store"):
            refused.append(source)
            raise NotImplementedError
        return copy(self, source, target, **options)  # to and from this machine

    monkeypatch.setattr(kind, "cp_file", cannot)
    monkeypatch.setattr(kind, "get_file", lambda self, source, target: shutil.copyfile(source, target))
    url = f"file://{tmp_path}/store"
    stopped(url)
    assert {"checkpoint.safetensors", "checkpoint.previous.safetensors"} <= there(url)
    assert contents(fit(CONFIG, runs=url)) == contents(whole)
    assert refused


def test_a_directory_and_its_url_are_one_store(tmp_path, whole):
    fit(CONFIG, runs=f"file://{tmp_path}/store")
    assert contents(find("tiny", runs=tmp_path / "store")) == contents(whole)
    config = dataclasses.replace(CONFIG, name="other")
    fit(config, runs=tmp_path / "store")
    assert find("other", runs=f"file://{tmp_path}/store").finished


def test_going_on_elsewhere(url, whole, elsewhere):
    stopped(url)
    elsewhere()
    console = plain()
    run = fit(CONFIG, runs=url, console=console)
    assert "going on at step" in console.export_text()
    assert contents(run) == contents(whole)


@pytest.mark.faults
@pytest.mark.parametrize("move", [True, False])
def test_a_checkpoint_that_was_cut(tmp_path, whole, elsewhere, move):
    """As by a store that does not put files in place as a whole."""
    url = f"file://{tmp_path}/store"
    path = tmp_path / "store" / stopped(url).name / "checkpoint.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    if move:
        elsewhere()
    console = plain()
    assert contents(fit(CONFIG, runs=url, console=console)) == contents(whole)
    assert "Going on from the one before it" in console.export_text()


@pytest.mark.faults
@pytest.mark.slow
def test_a_kill_at_every_write_to_the_store(tmp_path, whole, elsewhere, monkeypatch):
    """The store before every change is what a kill there would leave: go on from each, on another machine."""
    kind = fsspec.get_filesystem_class("file")
    left: list[Path] = []

    def photographed(change):
        def changed(self, path, *rest, **options):
            if not path.endswith(mirror.MARKER):
                left.append(tmp_path / f"{len(left):03}")
                shutil.copytree(tmp_path / "store", left[-1])
            return change(self, path, *rest, **options)

        return changed

    with monkeypatch.context() as patch:
        for name in ("put_file", "mv", "cp_file", "rm_file"):
            patch.setattr(kind, name, photographed(getattr(kind, name)))
        fit(CONFIG, runs=f"file://{tmp_path}/store", save_seconds=0.0)
    assert len(left) > 20
    for folder in left:
        elsewhere()
        torn = Run(folder / whole.path.name)
        assert not torn.finished or contents(torn) == contents(whole)
        run = fit(CONFIG, runs=f"file://{folder}")
        assert contents(run) == contents(whole), folder
        assert contents(torn) == contents(whole), folder
        assert not list(folder.rglob("*.tmp"))


@pytest.mark.faults
def test_a_store_that_is_out_of_reach(tmp_path, whole, elsewhere):
    """What could not be sent is here, and the same command sends it; elsewhere, one goes on from what was."""
    url = f"file://{tmp_path}/store"
    run = stopped(url)
    there = tmp_path / "store" / run.name

    class Disconnect:
        """As soon as training has begun."""

        def __init__(self, run, step):
            there.rename(tmp_path / "away")
            there.write_text("no folder")

        def log(self, step, metrics): ...
        def close(self): ...

    console = plain()
    with pytest.raises((StoreError, BusyError)):
        fit(CONFIG, runs=url, save_seconds=0.0, sinks=[Disconnect], console=console)
    assert (run / "result.json").exists()
    there.unlink()
    (tmp_path / "away").rename(there)
    assert not (there / "result.json").exists()
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    console = plain()
    fit(CONFIG, runs=url, console=console)
    assert "has already been trained" in console.export_text()
    assert contents(Run(there)) == contents(whole)
    elsewhere()
    assert contents(fit(CONFIG, runs=f"file://{tmp_path}/copy")) == contents(whole)


@pytest.mark.slow
@pytest.mark.faults
def test_interrupted_while_the_last_files_are_sent(tmp_path, whole, elsewhere, monkeypatch):
    """Ctrl-C at every file of the last upload, or a store that fails there: the same command sends what is here."""
    put, left = mirror._put, 0

    def cut(fs, source, target, twin=None):
        nonlocal left
        if (run / "result.json").exists():
            left -= 1
            if left < 0 and error is None:
                signal.raise_signal(signal.SIGINT)
            elif left < 0 and error is not None:
                raise error
        put(fs, source, target, twin)

    for error in (None, OSError("503 slow down")):
        for last in range(20):
            elsewhere()
            url = f"file://{tmp_path}/store-{last}-{error is None}"
            run, left = runs.path_of(CONFIG, url), last
            with monkeypatch.context() as patch:
                patch.setattr(mirror, "_put", cut)
                try:
                    fit(CONFIG, runs=url, save_seconds=0.0)
                except (KeyboardInterrupt, StoreError):
                    pass
                else:
                    break
            console = plain()
            assert contents(fit(CONFIG, runs=url, console=console)) == contents(whole), last
            assert "has already been trained" in console.export_text()
            elsewhere()
            assert contents(find("tiny", runs=url)) == contents(whole)
        assert last > 3


def hold(url: str):
    folder = runs.folder_of(CONFIG, url)
    return folder, folder.held(
        field="runs", doing="trained", error=RunError, busy=BusyError, note=lambda text: None
    )


@pytest.mark.faults
def test_one_of_two_machines_trains(url, elsewhere):
    folder, held = hold(url)
    with held, folder.mirrored():
        assert TrainingRun(config=CONFIG, runs=url).is_held
        elsewhere()
        assert TrainingRun(config=CONFIG, runs=url).is_held
        with pytest.raises(BusyError, match=f"{url}.* is being trained by another process"):
            fit(CONFIG, runs=url)
        assert "result.json" not in there(url)
    assert not TrainingRun(config=CONFIG, runs=url).is_held
    assert fit(CONFIG, runs=url).finished


@pytest.mark.faults
def test_a_run_that_was_taken_over(url, whole, elsewhere):
    """Its run was taken over, and it may not send anything any more."""

    def too_late() -> None:
        folder, held = hold(url)
        with held, folder.mirrored():
            fs, root = fsspec.url_to_fs(folder.where)
            fs.rm_file(f"{root}/{mirror.MARKER}")
            time.sleep(0.2)
            fs.pipe_file(f"{root}/{mirror.MARKER}", b"somebody else 0")
            store.write(folder.path / "result.json", b"{}")
            folder.push()

    with pytest.raises(BusyError, match="is being trained by another process"):
        too_late()
    assert "result.json" not in there(url)
    # Who took it over has ended too, without a word.
    elsewhere()
    console = plain()
    assert contents(fit(CONFIG, runs=url, console=console)) == contents(whole)
    assert "looking whether by a process that lives" in console.export_text()


def test_urls_that_cannot_be_opened(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main(["train", "linear-1", "--runs", "gopher://hole/runs"])
    assert "runs: cannot open gopher://hole/runs" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match=r"runs: s3://a/b/tiny.* needs `pip install mesascope\[remote\]`"):
        fit(CONFIG, runs="s3://a/b")


def test_passwords_are_not_kept(tmp_path, monkeypatch):
    words = ["mesascope", "train", "tiny", "--runs", "sftp://user:p@ss@host/runs"]
    monkeypatch.setattr(sys, "argv", words)
    run = fit(tiny(), runs=tmp_path)
    assert run.provenance["command"] == [*words[:-1], "sftp://host/runs"]


@pytest.mark.faults
def test_names_that_lead_elsewhere_are_not_followed(tmp_path, monkeypatch):
    """A store is as good as who writes to it."""
    url = f"file://{tmp_path}/store"
    name = stopped(url).name
    kind = fsspec.get_filesystem_class("file")
    find_all = kind.find
    monkeypatch.setattr(
        kind,
        "find",
        lambda self, path, **options: (
            find_all(self, path, **options) | {f"{path}/../../outside": {"size": 1}, f"{path}/.lock": {}}
        ),
    )
    assert (mirror.at(url, name).seen() / "config.json").exists()
    assert not list(tmp_path.rglob("outside"))


def test_programs_are_shared(url, elsewhere):
    """Files that never change: what either side lacks."""
    first = mirror.at(url, ".compiled")
    store.write(first.path / "a-cache", b"a")
    first.merge()
    elsewhere()
    second = mirror.at(url, ".compiled")
    store.write(second.path / "tuned" / "b-cache", b"b")
    second.merge()
    first.merge()
    for folder in (first, second):
        assert (folder.path / "a-cache").read_bytes() == b"a"
        assert (folder.path / "tuned" / "b-cache").read_bytes() == b"b"


def test_what_is_tuned_is_shared(url, elsewhere):
    found = []

    def find_it():
        found.append(1)
        return {"rate": np.float32([0.25])}

    for _ in range(2):
        lab = Lab(SCALES["smoke"], runs=url)
        assert lab.tuned("rate", find_it)["rate"] == 0.25
        elsewhere()
    assert len(found) == 1
    assert Lab(SCALES["smoke"], runs=url).still_holds(lab.about())


class StopAtFive(Stop):
    def log(self, step, metrics):
        if step == 5:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_sweep_at_a_url(url, elsewhere):
    """The driver on one machine, workers on others: what is done, how far the rest is, and why something failed."""
    done, late = (TrainingRun(config=tiny(steps=n), runs=url, save_seconds=0.0) for n in (12, 13))
    rate = 'train.optimizer.rate={"kind": "Constant", "peak": 1e30}'
    config = store.with_field(tiny(), rate, "train.optimizer.clip=null")
    failing = TrainingRun(config=config, runs=url)

    class Elsewhere(Instant):
        def start(self, job, avoid=""):
            here = os.environ["XDG_CACHE_HOME"]
            elsewhere()
            try:
                return super().start(job)
            finally:
                os.environ["XDG_CACHE_HOME"] = here

    with pytest.raises(KeyboardInterrupt):
        fit(late.config, runs=url, sinks=[StopAtFive])
    outcomes = sweep([done, failing], Elsewhere(), retries=0, console=plain())
    assert [outcome.state for outcome in outcomes] == ["done", "failed"]
    elsewhere()
    never = TrainingRun(config=tiny(steps=14), runs=url)
    outcomes = status([done, failing, late, never])
    assert [outcome.state for outcome in outcomes] == ["done", "failed", "waiting", "waiting"]
    assert "training diverged" in outcomes[1].told
    assert outcomes[2].told == "step 5 of 13"
    assert outcomes[3].told == "step 0 of 14"
    copies = {path.name for path in Path(os.environ["XDG_CACHE_HOME"]).rglob("*.safetensors")}
    assert not copies, "how far a run is can be told without its checkpoints"


@pytest.mark.faults
def test_the_log_is_sent_while_a_piece_is_done(url, monkeypatch):
    """A process that is killed sends nothing any more."""

    def wait(self, max_minutes, console):
        wait_for(lambda: "log" in there(url), seconds=20)
        return True

    monkeypatch.setattr(TrainingRun, "do", wait)
    assert work(Job(piece=TrainingRun(config=CONFIG, runs=url), attempt=1).to_text()) == DONE


@pytest.mark.faults
def test_a_sweep_whose_notes_cannot_be_sent(tmp_path, monkeypatch):
    """What is done is done, and told."""
    put, refused = mirror._put, []

    def refuse(fs, source, target, twin=None):
        if target.endswith("state.json"):
            refused.append(target)
            raise OSError("503 slow down")
        put(fs, source, target, twin)

    monkeypatch.setattr(mirror, "_put", refuse)
    console = plain()
    pieces = [TrainingRun(config=CONFIG, runs=f"file://{tmp_path}/store")]
    (outcome,) = sweep(pieces, Instant(), console=console)
    assert outcome.state == "done"
    assert len(refused) == 2
    assert "503 slow down" in console.export_text()


@pytest.mark.slow
def test_a_sweep_at_a_url_from_the_command_line(tmp_path):
    """Two workers, real processes; the runs are those of a directory."""
    path = tmp_path / "a.toml"
    path.write_text(SPEC.replace("STEPS", "600"))
    for where in (f"file://{tmp_path}/store", str(tmp_path / "plain")):
        words = sweep_command(path, "--runs", where, "--executor", "local:2")
        done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT | dict(os.environ))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 done, 0 running, 0 waiting, 0 failed" in done.stdout
    for piece in read_spec(path, runs=tmp_path / "plain"):
        a, b = (find(piece.name, runs=tmp_path / where) for where in ("store", "plain"))
        assert contents(a) == contents(b)


def started(where, *options):
    """Training, on the machine where one is."""
    environment = ENVIRONMENT | {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    words = [str(where) if word == "WHERE" else word for word in command(*options, where=Path("WHERE"))]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.faults
@pytest.mark.slow
def test_a_machine_that_was_silent_for_too_long(tmp_path, elsewhere):
    """SIGSTOP, until another machine has gone on with its run; then SIGCONT: it may not send anything any more."""
    url, options = f"file://{tmp_path}/store", ("--train.steps", "60000", "--save-seconds", "2")
    silent = started(url, *options)
    wait_for(lambda: last_step(tmp_path / "store") > 0 or silent.poll() is not None)
    time.sleep(1)  # so that it is not in the middle of sending
    silent.send_signal(signal.SIGSTOP)
    try:
        before = last_step(tmp_path / "store")
        elsewhere()
        other = started(url, *options)
        wait_for(lambda: last_step(tmp_path / "store") > before or other.poll() is not None)
    finally:
        silent.send_signal(signal.SIGCONT)
    out, err = silent.communicate(timeout=300)
    assert silent.returncode == 1, out + err
    assert "is being trained by another process" in err
    out, err = other.communicate(timeout=300)
    assert other.returncode == 0, out + err
    assert "looking whether by a process that lives" in out
    assert "going on at step" in out
    started(tmp_path / "whole", *options).communicate(timeout=300)
    a, b = (find("linear-1", runs=tmp_path / where) for where in ("store", "whole"))
    assert contents(a) == contents(b)


@pytest.mark.faults
@pytest.mark.slow
def test_killed_and_gone_on_with_elsewhere(tmp_path, elsewhere):
    """SIGKILL to a real process; another machine sees that it no longer lives, and goes on to the same bits."""
    options = ("--train.steps", "30000", "--save-seconds", "0.05")
    url = f"file://{tmp_path}/store"

    for kill in range(3):
        process, before = started(url, *options), last_step(tmp_path / "store")
        for _ in range(1800):
            time.sleep(0.1)
            if last_step(tmp_path / "store") > before:
                break
            assert process.poll() is None, process.communicate()
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        if kill != 1:  # the third goes on where the second was
            elsewhere()
    process = started(url, *options)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert "looking whether by a process that lives" in out
    assert "going on at step" in out
    alone = started(tmp_path / "whole", *options)
    alone.communicate(timeout=300)
    a, b = (find("linear-1", runs=tmp_path / where) for where in ("store", "whole"))
    assert contents(a) == contents(b)
