"""Does one piece of work, in the process that an executor gave it."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesascope.mirror import Folder

DONE, FAILED, HOPELESS, BUSY, OUT_OF_TIME, STOPPED = 0, 1, 2, 69, 75, 130
"""How a piece ended. `HOPELESS`: it would fail again. `BUSY`: another process is at it."""
SECONDS_BETWEEN_LOGS = 10.0


def work(text: str, machine: str | None = None) -> int:
    """Do the job that is written here; the status says how it ended, the log why.

    Args:
        machine: what the executor calls this one, for the log.

    Raises:
        StoreError: the job cannot be read, or there can be no log.
        OSError: the log cannot be written.
    """
    from mesascope import store
    from mesascope.experiments.lab import OutOfTimeError
    from mesascope.runs import BusyError, RunError, keep_compiled
    from mesascope.sweep.pieces import Job, folder_of
    from mesascope.untrusted import StoreError, parse_json

    job = store.from_dict(parse_json(text, "job"), Job)
    folder = folder_of(job.piece)
    try:
        with (
            store.locked(folder.path, field="runs", doing="worked on", busy=BusyError),
            _told_to(folder.grown("log")),
            _sent(folder),
        ):
            now = datetime.now(UTC).isoformat(timespec="seconds")
            print(
                f"--- attempt {job.attempt}, {now}, process {os.getpid()} on {machine or os.uname().nodename}",
                flush=True,
            )
            try:
                from rich.console import Console

                keep_compiled(job.piece.runs)
                finished = job.piece.do(job.max_minutes, Console(width=120))
                return DONE if finished else OUT_OF_TIME if job.max_minutes is not None else STOPPED
            except OutOfTimeError:
                return OUT_OF_TIME
            except BusyError as error:
                print(error)
                return BUSY
            except (RunError, ValueError, LookupError) as error:
                print(f"{type(error).__name__}: {error}")
                return HOPELESS
            except StoreError as error:  # another machine, or a later time, may have room
                print(error)
                return FAILED
            except KeyboardInterrupt:
                return STOPPED
            except BaseException:
                traceback.print_exc()
                return FAILED
    except BusyError:
        return BUSY


@contextmanager
def _sent(folder: "Folder") -> Iterator[None]:
    """The log, to the store: now and then, for a process that is killed sends nothing any more; and at the end."""
    over = threading.Event()

    def send() -> None:
        before = -1
        while not over.wait(SECONDS_BETWEEN_LOGS if before >= 0 else 0.1):
            if (size := (folder.path / "log").stat().st_size) != before:
                with suppress(Exception):  # the next time will tell
                    folder.send("log")
                before = size

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        try:
            folder.send("log")
        except Exception as error:  # the piece is what it is without
            print(f"the log was not sent: {error}")


@contextmanager
def _told_to(log: Path) -> Iterator[None]:
    """Whatever this process prints, from wherever, goes to the end of that file."""
    kept = [os.dup(number) for number in (1, 2)]
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in (1, 2):
        os.dup2(file, number)
    try:
        with os.fdopen(file, "w", buffering=1) as text, redirect_stdout(text), redirect_stderr(text):
            yield
    finally:
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)


def _end_with(parent: int) -> None:
    """Nobody would be told how this ends once the process that started it is gone. So save, and end."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """The job comes on the standard input; the only argument is the process that started this one."""
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    from mesascope.untrusted import StoreError

    try:
        sys.exit(work(sys.stdin.read()))
    except (StoreError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(FAILED)
