"""What training writes down on its way (`metrics.jsonl`), what its host costs, and the signals that end it."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mesascope import store
from mesascope.store import StoreError
from mesascope.training import TrainConfig
from mesascope.untrusted import LONGEST_JSON, LONGEST_METRICS, check, parse_json, read_bytes


class LogError(StoreError):
    """Metrics that cannot be gone on with."""


class Clock:
    """Tells what the host costs. The first time that anything is done is not counted: it is compiled then."""

    def __init__(self):
        self.began = self.counted_from = time.monotonic()
        self.in_device = 0.0
        self.known: set[str] = set()

    @contextmanager
    def busy(self, what: str) -> Iterator[Callable[[], float]]:
        """While the device works; gives the time since it began to."""
        started = time.monotonic()
        yield lambda: time.monotonic() - started
        if what in self.known:
            self.in_device += time.monotonic() - started
        else:
            self.known.add(what)
            self.counted_from += time.monotonic() - started

    def account(self, steps: int) -> dict[str, float]:
        now = time.monotonic()
        # What passed before and between first times is start-up, but too little to matter.
        counted = max(now - self.counted_from, 1e-9)
        return {
            "seconds": now - self.began,
            "steps_per_second": steps / counted,
            "host_share": max(0.0, 1 - self.in_device / counted),
        }


class Log:
    """`metrics.jsonl`: what was written after the last checkpoint is cut off, for it will be written again.

    Raises:
        LogError: what should be there is not, or is damaged.
    """

    def __init__(self, path: Path, until: int, train: TrainConfig):
        self.path = path
        try:
            lines = [line for line in read_lines(path, train.seeds) if line["step"] <= until]
        except StoreError as error:
            raise LogError(str(error)) from error
        due = {*range(0, until + 1, train.eval_every), *([until] if until == train.steps else [])}
        if until and [line["step"] for line in lines] != sorted(due):
            raise LogError(f"{path}: expected every evaluation up to the checkpoint at step {until}.")
        self.last_step: int | None = lines[-1]["step"] if lines else None
        store.write(path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def add(self, line: dict[str, Any]) -> None:
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(f"could not write {self.path}: {error.strerror}.") from error
        self.last_step = line["step"]


def read_lines(path: Path, seeds: int) -> list[dict[str, Any]]:
    """Whole lines; a torn last one is left out."""
    if not path.exists():
        return []
    form = {"step": int, "eval_loss": [float], "train_loss": [(float, None)]}
    lines = []
    for number, content in enumerate(read_bytes(path, LONGEST_METRICS).split(b"\n")[:-1], start=1):
        where = f"{path}, line {number}"
        if len(content) > LONGEST_JSON:
            raise StoreError(f"{where}: expected at most {LONGEST_JSON:,} bytes, got {len(content):,}.")
        line = check(parse_json(content, where), form, where)
        by_seed = {name: value for name, value in line.items() if isinstance(value, list)}
        check(by_seed, {str: [(float, None)]}, where)
        if any(len(value) != seeds for value in by_seed.values()):
            raise StoreError(f"{where}: expected numbers of {seeds} seeds.")
        lines.append(line)
        if by_seed.keys() != {name for name, value in lines[0].items() if isinstance(value, list)}:
            raise StoreError(f"{where}: other numbers than in the first line.")
    return lines


def finite_or_none(values: np.ndarray) -> list[float | None]:
    """As JSON has it."""
    return [float(v) if np.isfinite(v) else None for v in values]


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that what runs can finish a step; a second one is obeyed at once."""
    caught: list[int] = []

    def catch(number: int, frame: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    try:
        before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # Not the main thread: there signals are somebody else's.
        before = {}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
