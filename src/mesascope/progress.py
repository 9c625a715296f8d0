"""How far training is: a bar on a terminal, plain lines elsewhere."""

import time
from typing import Protocol, Self, final

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 5.0
SECONDS_WITHOUT_A_LINE = 30.0


class Progress(Protocol):
    """What `fit` tells while it runs."""

    def start(self, step: int, steps: int) -> None: ...
    def advanced(self, step: int, loss: np.ndarray) -> None: ...
    def evaluated(self, step: int, loss: np.ndarray) -> None: ...
    def note(self, text: str) -> None: ...
    def finished(self, where: str, loss: np.ndarray) -> None: ...
    def stop(self) -> None: ...


def progress_on(console: Console | None) -> Progress:
    if console is None:
        return Lines(Console(quiet=True))
    return Bar(console) if console.is_terminal else Lines(console)


class _Pace:
    """Steps per second and time left. Counted from the end of the first steps: they are compiled before they run."""

    def __init__(self):
        self.first: tuple[int, float] | None = None

    def at(self, step: int) -> float | None:
        """Steps per second so far, as soon as that means something."""
        now = time.monotonic()
        if self.first is None:
            self.first = step, now
        done, seconds = step - self.first[0], now - self.first[1]
        return done / seconds if done and seconds > 0 else None


@final
class Lines:
    """One line every few seconds."""

    def __init__(self, console: Console):
        self.console, self.pace = console, _Pace()
        self.steps = self.first = 0
        self.last_line = time.monotonic()

    def start(self, step: int, steps: int) -> None:
        self.steps, self.first = steps, step

    def advanced(self, step: int, loss: np.ndarray) -> None:
        self.pace.at(step)
        if time.monotonic() - self.last_line > SECONDS_WITHOUT_A_LINE:
            self._tell(step, f"training loss {spread(loss)}")

    def evaluated(self, step: int, loss: np.ndarray) -> None:
        recently = time.monotonic() - self.last_line < SECONDS_BETWEEN_LINES
        if step in (self.first, self.steps) or not recently:
            self._tell(step, f"held-out loss {spread(loss)}")

    def _tell(self, step: int, what: str) -> None:
        self.last_line = time.monotonic()
        speed = self.pace.at(step) if step > self.first else None
        left = f", {speed:.3g} steps/s, {duration((self.steps - step) / speed)} left" if speed else ""
        self.note(f"step {step}/{self.steps}: {what}{left}")

    def note(self, text: str) -> None:
        _print(self.console, text)

    def finished(self, where: str, loss: np.ndarray) -> None:
        self.note(f"{where}: loss on fresh sequences {spread(loss)}")

    def stop(self) -> None: ...


@final
class Bar:
    """A bar with loss, speed and time left."""

    def __init__(self, console: Console):
        self.console, self.pace = console, _Pace()
        self.bar = RichProgress(
            BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"), TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=None, loss="…", speed="compiling")

    def start(self, step: int, steps: int) -> None:
        self.bar.update(self.task, total=steps, completed=step)
        self.bar.start()

    def advanced(self, step: int, loss: np.ndarray) -> None:
        speed = self.pace.at(step)
        self.bar.update(self.task, completed=step, speed=f"{speed:.3g} steps/s" if speed else "")

    def evaluated(self, step: int, loss: np.ndarray) -> None:
        self.bar.update(self.task, loss=spread(loss))

    def note(self, text: str) -> None:
        _print(self.console, text)

    def finished(self, where: str, loss: np.ndarray) -> None:
        self.bar.stop()
        self.note(f"{where}: loss on fresh sequences {spread(loss)}")

    def stop(self) -> None:
        self.bar.stop()


def _print(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)
    console.file.flush()  # so that a log file is as far as the run


def spread(loss: np.ndarray) -> str:
    """Mean and range over seeds."""
    if len(loss) == 1:
        return f"{loss[0]:.4f}"
    return f"{loss.mean():.4f} ({loss.min():.4f} to {loss.max():.4f}, {len(loss)} seeds)"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


@final
class Amount:
    """How much of something is done, such as bytes of files, for as long as that takes."""

    def __init__(self, console: Console | None, what: str, total: int):
        self.console, self.what, self.total = console or Console(quiet=True), what, max(total, 1)
        self.done, self.last_line = 0, time.monotonic()
        self.first: tuple[int, float] | None = None
        self.bar: RichProgress | None = None
        if self.console.is_terminal:
            self.bar = RichProgress(
                TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TransferSpeedColumn(),
                TimeRemainingColumn(), console=self.console, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task(escape(what), total=self.total)

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, more: int) -> None:
        """So much more."""
        self.reached(self.done + more)

    def reached(self, done: int) -> None:
        """So much in all. What an earlier process had done comes with the first call."""
        self.done = max(done, self.done)
        if self.first is None:
            self.first = self.done, time.monotonic()
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            speed = (self.done - self.first[0]) / max(self.last_line - self.first[1], 1e-9)
            left = f", {duration((self.total - self.done) / speed)} left" if speed else ""
            _print(self.console, f"{self.what}: {self.done / self.total:.0%}{left}")
