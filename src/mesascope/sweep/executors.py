"""Where pieces of work are done: processes of this machine, a Ray cluster, Slurm.

An executor starts jobs and says how they ended; what is retried, and when, is the driver's business. A job is text, and
what it makes lies in directories that all machines share.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol, final

from mesascope.runs import RunError
from mesascope.sweep.worker import FAILED, work


class Running(Protocol):
    """A job that was started."""

    def ended(self) -> int | None:
        """How it ended (see `worker`), or None. A process that was killed has failed."""
        ...

    def why(self) -> str:
        """If it ended without a word: what is known about that."""
        ...

    def stop(self) -> None:
        """Ask it to save and end."""
        ...


class Executor(Protocol):
    """Somewhere to work.

    Attributes:
        slots: how many jobs may be started at once; None if it has a queue of its own.
    """

    slots: int | None

    def start(self, job: str, avoid: str = "") -> Running:
        """Begin with a job, or put it into the queue; if there is a choice, not on that machine."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


def executor(place: str, *, folder: Path) -> Executor:
    """`local`, or `local:4` for four processes; `ray`, or `ray://HOST:PORT`; `slurm`, or `slurm:local` to try that out.

    Args:
        folder: for files that an executor needs, on a disk that all machines share.
    """
    kind, _, rest = place.partition(":")
    if kind == "local" and (not rest or (rest.isdecimal() and 1 <= int(rest) <= 1024)):
        return Local(int(rest) if rest else max(1, len(_gpus())))
    if kind == "ray" and (not rest or rest.startswith("//")):
        return Ray(place if rest else None)
    if kind == "slurm" and rest in ("", "local"):
        return Slurm("local" if rest else "slurm", folder)
    raise ValueError(
        "executor: expected 'local', 'local:N' (N processes), 'ray', 'ray://HOST:PORT', 'slurm' or 'slurm:local', "
        f"got {place!r}."
    )


def _gpus() -> list[str]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them. (Asking JAX would take memory on each.)"""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name not in ("", "-1")]
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    there = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(there.iterdir())))] if there.is_dir() else []


@final
class Local:
    """Processes of this machine. Where it has GPUs, each process has one to itself, as far as they go."""

    def __init__(self, slots: int):
        self.slots: int | None = slots
        self.gpus = _gpus()
        # JAX takes most of a GPU's memory when it starts, unless several processes are to share it.
        self.shares = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if 0 < len(self.gpus) < slots else {}
        self.started: list[_Process] = []

    def start(self, job: str, avoid: str = "") -> "_Process":
        self.started = [process for process in self.started if process.ended() is None]
        busy = [process.gpu for process in self.started]
        gpu = min(self.gpus, key=busy.count, default=None)
        self.started.append(_Process(job, gpu, self.shares))
        return self.started[-1]

    def close(self) -> None:
        pass


@final
class _Process:
    def __init__(self, job: str, gpu: str | None, shares: dict[str, str]):
        self.gpu = gpu
        environment = shares | dict(os.environ) | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from mesascope.sweep.worker import main; main()", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=environment,
            # Ctrl-C is for the driver, which then asks.
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(job)
        self.process.stdin.close()

    def ended(self) -> int | None:
        status = self.process.poll()
        return FAILED if status is not None and status < 0 else status

    def why(self) -> str:
        status = self.process.poll() or 0
        return f"ended by the signal {signal.Signals(-status).name}" if status < 0 else ""

    def stop(self) -> None:
        self.process.terminate()


@final
class Ray:
    """A Ray cluster: one GPU for each job, where the cluster has any. Its machines share the directories."""

    slots: int | None = None

    def __init__(self, address: str | None):
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise RunError("executor: ray needs `pip install mesascope[ray]`.") from error
        self.ray: Any = ray
        try:
            ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise RunError(f"executor: cannot reach the Ray cluster ({error}).") from error
        # A process for each job: what JAX allocated goes with it. Retries are the driver's.
        self.task: Any = ray.remote(max_calls=1, max_retries=0, num_cpus=1)(_work_in_ray)

    def start(self, job: str, avoid: str = "") -> "_RayTask":
        from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
            NodeLabelSchedulingStrategy,
            NotIn,
        )

        # Each time, for machines come and go.
        options: dict[str, Any] = {"num_gpus": 1 if self.ray.cluster_resources().get("GPU", 0) else 0}
        if avoid:
            elsewhere = {"ray.io/node-id": NotIn(avoid)}
            options["scheduling_strategy"] = NodeLabelSchedulingStrategy({}, soft=elsewhere)
        return _RayTask(self.ray, self.task.options(**options).remote(job))

    def close(self) -> None:
        self.ray.shutdown()


def _work_in_ray(job: str) -> int:
    import ray  # pyright: ignore[reportMissingImports]

    return work(job, machine=ray.get_runtime_context().get_node_id())


@final
class _RayTask:
    def __init__(self, ray: Any, reference: Any):
        self.ray, self.reference = ray, reference
        self.error = ""

    def ended(self) -> int | None:
        ready, _ = self.ray.wait([self.reference], timeout=0)
        if not ready:
            return None
        try:
            return self.ray.get(self.reference)
        except self.ray.exceptions.RayError as error:
            self.error = _told(error)
            return FAILED

    def why(self) -> str:
        return self.error

    def stop(self) -> None:
        self.ray.cancel(self.reference, recursive=False)


@final
class Slurm:
    """Slurm, through submitit. What sbatch needs it takes from the environment: SBATCH_PARTITION, SBATCH_GPUS, …"""

    slots: int | None = None

    def __init__(self, cluster: str, folder: Path):
        try:
            import submitit  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise RunError("executor: slurm needs `pip install mesascope[slurm]`.") from error
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise RunError(
                "executor: there is no `sbatch` on this machine. 'slurm:local' does the same without."
            )
        self.submitit: Any = submitit.AutoExecutor(folder=folder / "slurm", cluster=cluster)
        # (Its own default is five minutes.) SBATCH_TIMELIMIT has precedence; what it ends goes on from its checkpoint.
        self.submitit.update_parameters(name="mesascope", timeout_min=24 * 60)

    def start(self, job: str, avoid: str = "") -> "_SlurmJob":
        # Slurm itself puts a machine that is down aside; --exclude would wait for ever where there is no other.
        return _SlurmJob(self.submitit.submit(work, job))

    def close(self) -> None:
        pass


@final
class _SlurmJob:
    def __init__(self, job: Any):
        self.job = job
        self.error = ""

    def ended(self) -> int | None:
        if not self.job.done():
            return None
        try:
            return self.job.result()
        except Exception as error:  # whatever it was, the job is not done
            self.error = _told(error)
            return FAILED

    def why(self) -> str:
        return self.error

    def stop(self) -> None:
        self.job.cancel()


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:4000]}"
