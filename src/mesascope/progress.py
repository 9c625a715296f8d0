"""How far training is: a bar on a terminal, plain lines elsewhere."""

import time
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 5.0


class Progress(Protocol):
    """What `fit` tells while it runs."""

    def start(self, step: int, steps: int) -> None: ...
    def advanced(self, step: int, loss: np.ndarray) -> None: ...
    def evaluated(self, step: int, loss: np.ndarray) -> None: ...
    def note(self, text: str) -> None: ...
    def finished(self, path: Path, loss: np.ndarray) -> None: ...
    def stop(self) -> None: ...


def progress_on(console: Console | None) -> Progress:
    if console is None:
        return Silent()
    return Bar(console) if console.is_terminal else Lines(console)


class Silent:
    """Says nothing."""

    def start(self, step: int, steps: int) -> None: ...
    def advanced(self, step: int, loss: np.ndarray) -> None: ...
    def evaluated(self, step: int, loss: np.ndarray) -> None: ...
    def note(self, text: str) -> None: ...
    def finished(self, path: Path, loss: np.ndarray) -> None: ...
    def stop(self) -> None: ...


class Lines:
    """One line every few seconds."""

    def __init__(self, console: Console):
        self.console = console
        self.steps = self.first = 0
        self.began = self.last_line = time.monotonic()

    def start(self, step: int, steps: int) -> None:
        self.steps, self.first = steps, step
        self.began = time.monotonic()

    def advanced(self, step: int, loss: np.ndarray) -> None:
        if time.monotonic() - self.last_line > 6 * SECONDS_BETWEEN_LINES:
            self.evaluated(step, loss, "training")

    def evaluated(self, step: int, loss: np.ndarray, what: str = "held-out") -> None:
        now = time.monotonic()
        if self.first < step < self.steps and now - self.last_line < SECONDS_BETWEEN_LINES:
            return
        self.last_line = now
        speed = (step - self.first) / max(now - self.began, 1e-9)
        left = f", {speed:.3g} steps/s, {duration((self.steps - step) / speed)} left" if speed else ""
        self._print(f"step {step}/{self.steps}: {what} loss {spread(loss)}{left}")

    def note(self, text: str) -> None:
        self._print(text)

    def finished(self, path: Path, loss: np.ndarray) -> None:
        self._print(f"{path}: loss on fresh sequences {spread(loss)}")

    def stop(self) -> None: ...

    def _print(self, text: str) -> None:
        self.console.print(escape(text), highlight=False, soft_wrap=True)


class Bar(Lines):
    """A bar with loss, speed and time left."""

    def __init__(self, console: Console):
        super().__init__(console)
        self.bar = RichProgress(
            BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"), TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self.task = None

    def start(self, step: int, steps: int) -> None:
        super().start(step, steps)
        self.task = self.bar.add_task("", total=steps, completed=step, loss="…", speed="compiling")
        self.bar.start()

    def advanced(self, step: int, loss: np.ndarray) -> None:
        if self.task is not None:
            speed = (step - self.first) / max(time.monotonic() - self.began, 1e-9)
            self.bar.update(self.task, completed=step, speed=f"{speed:.3g} steps/s")

    def evaluated(self, step: int, loss: np.ndarray, what: str = "held-out") -> None:
        if self.task is not None:
            self.bar.update(self.task, loss=spread(loss))

    def stop(self) -> None:
        self.bar.stop()


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
