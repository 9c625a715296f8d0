"""The sweep itself: what is started, what is tried again, what is told."""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mesascope import mirror, store
from mesascope.journal import interrupts
from mesascope.sweep.executors import Executor, Running
from mesascope.sweep.pieces import Job, Piece, folder_of
from mesascope.sweep.worker import BUSY, DONE, FAILED, HOPELESS, OUT_OF_TIME, STOPPED
from mesascope.untrusted import StoreError, check, read_json

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_WHILE_BUSY = 5.0
# Before the second attempt; before each further one twice as long.
SECONDS_BEFORE_A_RETRY, MOST_SECONDS_BEFORE_A_RETRY = 2.0, 60.0
SECONDS_TO_SAVE = 60.0
LINES_OF_LOG = 12
LOOKS_AT_ONCE = 32

State = Literal["done", "running", "waiting", "failed"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a piece stands.

    Attributes:
        attempts: how often it was started.
        told: how far it is; or of one that failed, the last lines of its log.
    """

    piece: Piece
    state: State
    attempts: int = 0
    told: str = ""


@dataclass
class _Placed:
    piece: Piece
    attempt: int
    running: Running
    asked: bool = False

    def stop(self) -> None:
        """Ask it to save and end: once, for whoever is asked again ends without saving."""
        if not self.asked:
            self.asked = True
            self.running.stop()


def sweep(
    pieces: Sequence[Piece],
    executor: Executor,
    *,
    retries: int = 2,
    max_minutes: float | None = None,
    console: Console | None = None,
) -> list[Outcome]:
    """Do all pieces that are not done yet.

    A piece whose process dies or is stopped, on whatever machine, is started again up to `retries` times, each time
    after a longer pause, and goes on from its last checkpoint. One that cannot succeed (training diverges, say) or
    keeps failing is reported, and the rest goes on. One that another process is at is looked at again later.

    Args:
        max_minutes: stop cleanly after so many.

    Returns:
        How each piece stands: all are done or have failed, unless the time was up (then some are waiting).

    Raises:
        KeyboardInterrupt: the user wanted to stop; everything was saved first.
    """
    console = console or Console(quiet=True)
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    done = _of_each(lambda piece: piece.is_done, pieces)
    waiting = deque((piece, 1, 0.0) for piece, ready in zip(pieces, done, strict=True) if not ready)
    _tell(console, f"{len(pieces)} pieces, {len(pieces) - len(waiting)} of them done before")
    placed: list[_Placed] = []
    failed: dict[str, Outcome] = {}
    stopping = False
    with interrupts() as interrupted:
        try:
            while waiting or placed:
                now = time.monotonic()
                if (interrupted or _is_over(deadline)) and not stopping:
                    stopping = True
                    waiting.clear()
                    for at in placed:
                        at.stop()
                while waiting and not stopping and (executor.slots is None or len(placed) < executor.slots):
                    ready = next((entry for entry in waiting if entry[2] <= now), None)
                    if ready is None:
                        break
                    waiting.remove(ready)
                    placed.append(_start(*ready[:2], executor, deadline, console))
                for at in list(placed):
                    if (ended := at.running.ended()) is None:
                        continue
                    placed.remove(at)
                    if stopping:  # whoever is asked to stop may be killed by it
                        ended = DONE if ended == DONE else STOPPED
                    elif ended in (STOPPED, OUT_OF_TIME) and not _is_over(deadline):
                        ended = FAILED  # by somebody else: a scheduler, say
                    again = _settle(at, ended, retries, failed, console)
                    waiting.extend([] if again is None else [again])
                if waiting or placed:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
        except BaseException:
            _abandon(placed)
            raise
    if interrupted:
        raise KeyboardInterrupt
    return _of_each(lambda piece: failed.get(piece.name) or _status_if_known(piece), pieces)


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _abandon(placed: Sequence[_Placed]) -> None:
    """A second Ctrl-C, or an error of ours: what runs is asked to save, and not waited for longer than that takes."""
    for at in placed:
        at.stop()
    until = time.monotonic() + SECONDS_TO_SAVE
    while time.monotonic() < until and any(at.running.ended() is None for at in placed):
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _start(
    piece: Piece, attempt: int, executor: Executor, deadline: float | None, console: Console
) -> _Placed:
    _write(folder_of(piece), "started", attempt, console)
    left = None if deadline is None else max(0.0, (deadline - time.monotonic()) / 60)
    job = Job(piece=piece, attempt=attempt, max_minutes=left)
    _tell(console, f"{piece.name}: started" + (f", attempt {attempt}" if attempt > 1 else ""))
    avoid = _last_machine(folder_of(piece)) if attempt > 1 else ""
    return _Placed(piece, attempt, executor.start(job.to_text(), avoid))


def _settle(
    at: _Placed, ended: int, retries: int, failed: dict[str, Outcome], console: Console
) -> tuple[Piece, int, float] | None:
    """What became of a piece; and if it is to be started again, which attempt that is and not before when."""
    piece, folder, now = at.piece, folder_of(at.piece), time.monotonic()
    try:
        done = ended in (DONE, OUT_OF_TIME, STOPPED) and piece.is_done
        stands_at = piece.stands_at if ended in (OUT_OF_TIME, STOPPED) else ""
    except StoreError as error:
        _tell(console, f"{piece.name}: {error}")
        if ended == DONE:  # whoever looks next will know
            return piece, at.attempt, now + SECONDS_WHILE_BUSY
        done, stands_at = False, "how far is not known"
    if done:
        _write(folder, "done", at.attempt, console)
        _tell(console, f"{piece.name}: done")
        return None
    if ended in (OUT_OF_TIME, STOPPED):
        _write(folder, "stopped", at.attempt, console)
        _tell(console, f"{piece.name}: stopped, and saved ({stands_at})")
        return None
    if ended == BUSY:
        _tell(console, f"{piece.name}: another process is at it; looking again later")
        return piece, at.attempt, now + SECONDS_WHILE_BUSY
    if why := at.running.why():
        _add_to_log(folder, why, console)
    if ended == HOPELESS or at.attempt > retries:
        _write(folder, "failed", at.attempt, console)
        log = _log_of(folder)
        told = _end_of(log)
        failed[piece.name] = Outcome(piece=piece, state="failed", attempts=at.attempt, told=told)
        _tell(console, f"{piece.name}: failed; the rest goes on. {log} ends with")
        _tell(console, told, style="red")
        return None
    pause = min(SECONDS_BEFORE_A_RETRY * 2 ** (at.attempt - 1), MOST_SECONDS_BEFORE_A_RETRY)
    _tell(console, f"{piece.name}: ended before its end; started again from its last checkpoint")
    return piece, at.attempt + 1, now + pause


def status(pieces: Sequence[Piece]) -> list[Outcome]:
    """How pieces stand, whoever is at them."""
    return _of_each(_status, pieces)


def _of_each(ask: Callable[[Piece], T], pieces: Sequence[Piece]) -> list[T]:
    """Many at once: at a URL most of the time is waiting."""
    with ThreadPoolExecutor(LOOKS_AT_ONCE) as pool:
        return list(pool.map(ask, pieces))


def _status(piece: Piece) -> Outcome:
    folder = folder_of(piece)
    told, attempts = _read(folder)
    if piece.is_done:
        return Outcome(piece=piece, state="done", attempts=attempts)
    if store.is_locked(folder.path) or piece.is_held:
        return Outcome(piece=piece, state="running", attempts=attempts, told=piece.stands_at)
    if told == "failed":
        return Outcome(piece=piece, state="failed", attempts=attempts, told=_end_of(_log_of(folder)))
    return Outcome(piece=piece, state="waiting", attempts=attempts, told=piece.stands_at)


def _status_if_known(piece: Piece) -> Outcome:
    """At the end of a sweep, the rest is to be told whatever has become of the store."""
    try:
        return _status(piece)
    except StoreError as error:
        return Outcome(piece=piece, state="waiting", told=str(error))


def report(outcomes: Sequence[Outcome], console: Console) -> None:
    """A table of what is not done, and how many are."""
    table = Table("piece", "state", "attempts", "")
    for outcome in outcomes:
        if outcome.state != "done":
            last = outcome.told.rstrip().rpartition("\n")[2]
            table.add_row(escape(outcome.piece.name), outcome.state, str(outcome.attempts), escape(last))
    if table.row_count:
        console.print(table)
    for outcome in outcomes:
        if outcome.state == "failed":
            _tell(console, f"log: {_log_of(folder_of(outcome.piece))}")
    states = [outcome.state for outcome in outcomes]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("done", "running", "waiting", "failed"))
    _tell(console, counts)


def _tell(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _write(folder: mirror.Folder, state: str, attempts: int, console: Console) -> None:
    """For whoever asks how a sweep stands. The sweep itself does not need it."""
    try:
        store.write_json(folder.path / "state.json", {"state": state, "attempts": attempts})
        folder.send("state.json")
    except StoreError as error:
        _tell(console, str(error), style="red")


def _add_to_log(folder: mirror.Folder, text: str, console: Console) -> None:
    """What a process that has ended could not write there itself."""
    log = _log_of(folder)
    try:
        with log.open("a") as file:
            file.write(f"{text}\n")
        folder.send("log")
    except (OSError, StoreError) as error:
        _tell(console, f"{text} ({error})", style="red")


def _log_of(folder: mirror.Folder) -> Path:
    try:
        return folder.grown("log")
    except StoreError:
        return folder.path / "log"


def _read(folder: mirror.Folder) -> tuple[str, int]:
    path = folder.fetch("state.json")
    if not path.exists():
        return "", 0
    try:
        found = check(read_json(path), {"state": str, "attempts": int}, path)
    except StoreError:  # it says nothing that the run does not say better
        return "", 0
    return found["state"], found["attempts"]


def _last_machine(folder: mirror.Folder) -> str:
    """Where the last attempt was made, as the log has it."""
    starts = [line for line in _lines(_log_of(folder)) if line.startswith("--- attempt")]
    return starts[-1].rpartition(" ")[2] if starts else ""


def _end_of(log: Path) -> str:
    return "\n".join(line[:500] for line in _lines(log)[-LINES_OF_LOG:]) or "(there is no log)"


def _lines(log: Path) -> list[str]:
    """The last of them."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 2**14))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
