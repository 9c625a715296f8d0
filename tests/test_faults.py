"""What may happen to a run and to the disk under it. docs/reliability.md has the list, with tests elsewhere."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mesascope import provenance, runs, store
from mesascope.cli import main
from mesascope.runs import Run, RunError, fit
from mesascope.sweep import read_spec, status
from mesascope.tasks.text import Corpus
from tests.test_runs import ENVIRONMENT, contents, finish, last_step, plain, start
from tests.test_runs import command as train_command
from tests.test_sweep import SPEC, command, spec, undisturbed, wait_for
from tests.test_training import tiny

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("standard_promotion")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run."""
    import jax

    with jax.numpy_dtype_promotion("standard"):
        return fit(tiny(steps=40, keep_every=20), runs=tmp_path_factory.mktemp("whole"))


CONFIG = tiny(steps=40, keep_every=20)


class Stop:
    """A sink that ends everything at step 20."""

    def __init__(self, run, step):
        pass

    def log(self, step, metrics):
        if step == 20:
            raise KeyboardInterrupt

    def close(self):
        pass


def halfway(where) -> Run:
    """A run that was ended at step 20, a while after its last checkpoint."""
    with pytest.raises(KeyboardInterrupt):
        fit(CONFIG, runs=where, save_seconds=0.0, sinks=[Stop])
    run = Run(runs.path_of(CONFIG, where))
    assert 0 < run.step < 20
    return run


@pytest.mark.slow
def test_a_kill_at_every_write(whole, tmp_path, monkeypatch):
    """The directory before every file that is put in place is what a kill there would leave: go on from each."""
    left: list[Path] = []
    replace = os.replace

    def photographed(source, target, **options):
        if Path(source).name.endswith(".tmp"):
            left.append(tmp_path / f"{len(left):03}")
            shutil.copytree(run.path, left[-1] / run.path.name)
        replace(source, target, **options)

    run = Run(runs.path_of(CONFIG, tmp_path / "run"))
    run.path.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", photographed)
        fit(CONFIG, runs=tmp_path / "run", save_seconds=0.0)
    assert contents(run) == contents(whole)
    written = {path.name.split(".")[1] for folder in left for path in folder.glob("*/.*.tmp")}
    assert written >= {"config", "provenance", "checkpoint", "metrics", "weights", "timing", "result"}
    for folder in left:
        torn = Run(folder / run.path.name)
        assert not torn.finished or contents(torn) == contents(whole), folder
        assert fit(CONFIG, runs=folder) == torn
        assert contents(torn) == contents(whole), folder
        assert not list(torn.path.glob("**/.*.tmp"))


@pytest.mark.parametrize("keep", [1, 30, -1])
def test_a_line_cut_in_the_middle(whole, tmp_path, keep):
    """What was logged after the checkpoint is logged again, a torn line among it."""
    run = halfway(tmp_path)
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 35, "eval_loss": [0.5, 0.25], "train_l'[:keep])
    assert contents(fit(CONFIG, runs=tmp_path)) == contents(whole)


DAMAGE = (b"", b"\xff" * 100, b'{"kind": "Config", "nam', b"null", b"{}")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_configuration(whole, tmp_path, damage):
    run = halfway(tmp_path)
    (run.path / "config.json").write_bytes(damage)
    console = plain()
    assert contents(fit(CONFIG, runs=tmp_path, console=console)) == contents(whole)
    assert "config.json" in console.export_text()
    assert (run.path / "config.json").read_bytes() == (whole.path / "config.json").read_bytes()


def finished_copy(whole, where) -> Run:
    shutil.copytree(whole.path, where / whole.path.name)
    return Run(where / whole.path.name)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_result(whole, tmp_path, damage):
    """The weights are there, so it is computed again from them."""
    run = finished_copy(whole, tmp_path)
    (run.path / "result.json").write_bytes(damage)
    console = plain()
    fit(CONFIG, runs=tmp_path, console=console)
    assert "computed again from the weights" in console.export_text().replace("\n", " ")
    assert contents(run) == contents(whole)


def test_damaged_weights(whole, tmp_path, monkeypatch):
    run = finished_copy(whole, tmp_path)
    path = run.path / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "source_hash", lambda: "another")
        with pytest.raises(RunError, match=r"damaged.*made by other source than this: go back"):
            fit(CONFIG, runs=tmp_path)
    console = plain()
    fit(CONFIG, runs=tmp_path, console=console)
    assert "does not fit its checksum" in console.export_text().replace("do not", "does not").replace(
        "\n", " "
    )
    assert contents(run) == contents(whole)


def test_damage_that_cannot_be_mended_is_named(whole, tmp_path):
    run = halfway(tmp_path)
    good = {name: (run.path / name).read_bytes() for name in ("provenance.json", "metrics.jsonl")}
    (run.path / "provenance.json").write_bytes(b"{}")
    with pytest.raises(RunError, match=r"'mesascope' is missing.*begin again with --fresh"):
        fit(CONFIG, runs=tmp_path)
    (run.path / "provenance.json").write_bytes(good["provenance.json"])
    lines = good["metrics.jsonl"].splitlines(keepends=True)
    for damaged in (b"\xff\n" + b"".join(lines[1:]), b"".join(lines[1:])):
        (run.path / "metrics.jsonl").write_bytes(damaged)
        with pytest.raises(RunError, match=r"metrics\.jsonl.*--fresh"):
            fit(CONFIG, runs=tmp_path)
    (run.path / "metrics.jsonl").write_bytes(good["metrics.jsonl"])
    assert contents(fit(CONFIG, runs=tmp_path)) == contents(whole)


@pytest.mark.parametrize("when", [0, 2**31, 2**33])
def test_files_from_another_time(whole, tmp_path, when):
    """From 1970, 2038 and 2242."""
    run = halfway(tmp_path)
    for path in [run.path, *run.path.rglob("*")]:
        os.utime(path, (when, when))
    (run.path / "config.json").touch()
    assert contents(fit(CONFIG, runs=tmp_path)) == contents(whole)


# Each second it is 1996, today or 2056, for all that a process calls.
JUMPING_CLOCK = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    struct timespec steady;
    int failed = syscall(SYS_clock_gettime, clock, now);
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &steady);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += (steady.tv_sec % 3 - 1) * 946684800L;
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
@pytest.mark.parametrize("url", [False, True])
def test_a_clock_that_jumps(tmp_path, url):
    """While a run goes on, is killed and goes on again; in a directory and at a URL."""
    (tmp_path / "clock.c").write_text(JUMPING_CLOCK)
    library = str(tmp_path / "clock.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(tmp_path / "clock.c")], check=True)
    jumping = ENVIRONMENT | {"LD_PRELOAD": library, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    told = subprocess.run(
        [sys.executable, "-c", "import time; a = time.time(); time.sleep(1); print(abs(time.time() - a))"],
        capture_output=True, text=True, env=jumping, check=True,
    )  # fmt: skip
    assert float(told.stdout) > 1e8, "it jumps"
    options = ("--train.steps", "60000", "--save-seconds", "0.05")
    where = f"file://{tmp_path}/store" if url else str(tmp_path / "store")
    words = [where if word == "WHERE" else word for word in train_command(*options, where=Path("WHERE"))]
    killed = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=jumping)
    wait_for(lambda: last_step(tmp_path / "store") > 0 or killed.poll() is not None)
    killed.kill()
    out, err = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, out + err
    done = subprocess.run(words, capture_output=True, text=True, env=jumping, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on at step" in done.stdout
    assert finish(*options, where=tmp_path / "whole").returncode == 0
    a, b = (runs.find("linear-1", runs=tmp_path / name) for name in ("store", "whole"))
    assert contents(a) == contents(b)


def test_whoever_looks_is_in_nobodys_way(tmp_path):
    """Asking whether a run is being trained, again and again, while one starts."""
    over = threading.Event()

    def look():
        while not over.is_set():
            store.is_locked(tmp_path)

    looking = [threading.Thread(target=look) for _ in range(2)]
    for thread in looking:
        thread.start()
    try:
        for _ in range(500):
            with store.locked(tmp_path, field="runs", doing="trained"):
                pass
    finally:
        over.set()
        for thread in looking:
            thread.join()


def test_a_checkpoint_that_is_kept_twice(tmp_path):
    """As after a write of the next one that failed: nothing is left behind."""
    a, b = tmp_path / "a", tmp_path / "b"
    store.write(a, b"x")
    for _ in range(2):
        store.keep_as(a, b)
    assert sorted(tmp_path.iterdir()) == [a, b]
    assert b.read_bytes() == b"x"


@pytest.mark.slow
def test_two_processes_start_one_run(tmp_path):
    options = ("--train.steps", "20000")
    both = [start(*options, where=tmp_path / "both") for _ in range(2)]
    told = [process.communicate(timeout=500) for process in both]
    codes = sorted(process.returncode for process in both)
    # One may be done before the other looks.
    assert codes in ([0, 1], [0, 0]), told
    if codes == [0, 1]:
        assert any("is being trained by another process" in err for _, err in told)
    assert sum("step 20000/20000" in out for out, _ in told) == 1
    assert finish(*options, where=tmp_path / "alone").returncode == 0
    assert contents(runs.find("linear-1", runs=tmp_path / "both")) == contents(
        runs.find("linear-1", runs=tmp_path / "alone")
    )


def limited(bytes_per_file, command):
    """The command in a process in which no file may grow beyond this. (What a full disk looks like, without a mount.)

    Not by `preexec_fn`, which forks this process: JAX has threads, and warns.
    """
    code = (
        "import os, resource, sys; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes_per_file}, {bytes_per_file})); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", code, *map(str, command)]


@pytest.mark.slow
def test_a_sweep_on_a_full_disk(tmp_path):
    """Every piece is tried again, then reported; with room again, the same command does them all."""
    path = spec(tmp_path / "a.toml", SPEC.replace("STEPS", "1500"))
    options = (path, "--runs", tmp_path / "runs", "--executor", "local:2", "--save-seconds", "0")
    stuck = subprocess.run(
        limited(2048, command(*options, "--retries", "1")),
        capture_output=True, text=True, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert stuck.returncode == 1, stuck.stdout + stuck.stderr
    assert "could not write" in stuck.stdout
    assert "0 done, 0 running, 0 waiting, 2 failed" in stuck.stdout
    pieces = read_spec(path, runs=tmp_path / "runs")
    assert [(outcome.state, outcome.attempts) for outcome in status(pieces)] == [("failed", 2)] * 2
    freed = subprocess.run(command(*options), capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert freed.returncode == 0, freed.stdout + freed.stderr
    found = [contents(Run(runs.path_of(piece.config, tmp_path / "runs"))) for piece in pieces]
    assert found == undisturbed(pieces, tmp_path / "alone")


def can_mount():
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/mnt"]
    return shutil.which("unshare") is not None and not subprocess.run(command, capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="this user may not mount anything")
def test_a_sweep_on_a_disk_without_room_for_its_own_notes(tmp_path):
    """A disk of 64 KiB: every piece is reported all the same, as failed, and by no traceback."""
    path = spec(tmp_path / "a.toml", SPEC.replace("STEPS", "1500"))
    (tmp_path / "runs").mkdir()
    options = (path, "--runs", tmp_path / "runs", "--executor", "local:2", "--retries", "1")
    mount = (
        'mount -t tmpfs -o size=64k none "$0" && dd if=/dev/zero of="$0/full" bs=4k count=FULL && exec "$@"'
    )
    for full in (8, 16):  # some room, none at all
        words = ["unshare", "-m", "sh", "-c", mount.replace("FULL", str(full)), tmp_path / "runs"]
        stuck = subprocess.run(
            [*map(str, words), *command(*options)],
            capture_output=True, text=True, env=ENVIRONMENT, check=False,
        )  # fmt: skip
        told = stuck.stdout + stuck.stderr
        assert stuck.returncode == 1, told
        assert "could not write" in told
        assert "0 done, 0 running, 0 waiting, 2 failed" in stuck.stdout, told
        assert "Traceback" not in told


@pytest.mark.slow
def test_preparing_a_corpus_on_a_full_disk(tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"text": f"some words and {i}"}) + "\n" for i in range(2000)))

    def prepare(where, limit=None):
        words = ["lm", "prepare", data, "--bpe", "300", "--out", where, "--shard-tokens", "4000"]
        command = [sys.executable, "-m", "mesascope", *map(str, words)]
        command = command if limit is None else limited(limit, command)
        return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)

    stuck = prepare(tmp_path / "a", limit=8192)
    assert stuck.returncode == 1
    assert "could not write" in stuck.stderr
    assert "Traceback" not in stuck.stderr
    (folder,) = (tmp_path / "a").iterdir()
    assert not (folder / "index.json").exists()
    for where in ("a", "b"):
        done = prepare(tmp_path / where)
        assert done.returncode == 0, done.stderr
    (other,) = (tmp_path / "b").iterdir()
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        p.name: p.read_bytes() for p in other.iterdir()
    }

    # A damaged index is made again, and nothing else is.
    index = (folder / "index.json").read_bytes()
    (folder / "index.json").write_bytes(index[:-30])
    with pytest.raises(store.StoreError, match="damaged"):
        Corpus(folder).splits  # noqa: B018
    with pytest.raises(SystemExit):
        main(["lm", "show", str(folder)])
    assert prepare(tmp_path / "a").returncode == 0
    assert (folder / "index.json").read_bytes() == index
