"""What a sweep is made of: runs to be trained, pieces of figures to be computed; each can be done anywhere."""

import itertools
import json
import math
import reprlib
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from rich.console import Console

from mesascope import experiments, mirror, store
from mesascope.experiments import results
from mesascope.experiments.lab import SCALES, Lab
from mesascope.experiments.reproduce import asked_for, compute_piece, is_kept, piece_path
from mesascope.language.presets import LANGUAGE_PRESETS, language_preset
from mesascope.language.training import LanguageConfig
from mesascope.presets import PRESETS, Variant, preset
from mesascope.runs import Run, fit
from mesascope.runs import folder_of as run_folder
from mesascope.tasks.text import Corpus
from mesascope.training import Config
from mesascope.untrusted import LONGEST_JSON, StoreError, check, read_bytes, read_json

MOST_PIECES = 10_000
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A configuration to be trained.

    Attributes:
        runs: directory or URL of runs.
        save_seconds: time between checkpoints.
        data: folder of a prepared corpus, for a language model.
    """

    config: Config | LanguageConfig
    runs: str
    save_seconds: float = 30.0
    data: str | None = None

    @property
    def name(self) -> str:
        """That of the run's directory."""
        return self._folder.path.name

    @property
    def is_done(self) -> bool:
        return self._folder.has("result.json")

    @property
    def is_held(self) -> bool:
        """Whether a process is at it, on any machine."""
        return self._folder.is_held()

    @property
    def stands_at(self) -> str:
        """How far it is: by its last checkpoint, or at a URL, for those are large, by its last evaluation."""
        step = self._last_evaluation if mirror.is_url(self.runs) else Run(self._folder.path).step
        return f"step {step:,} of {self.config.train.steps:,}"

    @property
    def _last_evaluation(self) -> int:
        log = self._folder.fetch("metrics.jsonl")
        self._folder.fetch("config.json")
        try:
            return int(Run(log.parent).metrics()["step"][-1])
        except (StoreError, LookupError):  # none yet, or damaged, which whoever goes on with it is told
            return 0

    def do(self, max_minutes: float | None, console: Console) -> bool:
        """Train, or go on; False if it was stopped before the end."""
        run = fit(
            self.config,
            data=self.data,
            runs=self.runs,
            max_minutes=max_minutes,
            save_seconds=self.save_seconds,
            console=console,
        )
        return run.finished

    @property
    def _folder(self) -> mirror.Folder:
        return run_folder(self.config, self.runs)


@dataclass(frozen=True, kw_only=True)
class FigurePiece:
    """A piece of a figure, with the models that it needs.

    Attributes:
        scale: a name in `SCALES`.
        out: directory of what is made; each scale has its own folder in it.
        data: folder of a prepared corpus, for language models.
    """

    figure: str
    piece: str
    scale: str
    out: str
    runs: str
    data: str | None = None

    @property
    def name(self) -> str:
        return f"{self.scale}-{self.figure}-{self.piece}"

    @property
    def is_done(self) -> bool:
        return is_kept(experiments.experiment(self.figure), self.piece, self._lab(), self._folder)

    @property
    def is_held(self) -> bool:
        return False  # the folder of its lock tells more

    @property
    def stands_at(self) -> str:
        return ""

    def do(self, max_minutes: float | None, console: Console) -> bool:
        """Compute it, unless that has been done; False if the time was up before."""
        lab = self._lab(max_minutes, console)
        compute_piece(experiments.experiment(self.figure), self.piece, lab, self._folder)
        return True

    def forget(self) -> None:
        """Have it computed again."""
        results.files(piece_path(self.figure, self.piece, self._folder))[1].unlink(missing_ok=True)

    @property
    def _folder(self) -> Path:
        return Path(self.out) / self.scale

    def _lab(self, max_minutes: float | None = None, console: Console | None = None) -> Lab:
        deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        data = None if self.data is None else Path(self.data)
        return Lab(SCALES[self.scale], runs=self.runs, data=data, deadline=deadline, console=console)


Piece = TrainingRun | FigurePiece


@dataclass(frozen=True, kw_only=True)
class Job:
    """A piece to be done now, once.

    Attributes:
        attempt: which this is, from 1.
        max_minutes: stop cleanly after so many.
    """

    piece: Piece
    attempt: int
    max_minutes: float | None = None

    def to_text(self) -> str:
        return json.dumps(store.to_dict(self), allow_nan=False)


def folder_of(piece: Piece) -> mirror.Folder:
    """Where a piece's lock, log and state are: beside the runs."""
    return mirror.at(piece.runs, f".sweeps/{piece.name}")


def figure_pieces(
    names: Sequence[str], *, scale: str, out: Path, run_directory: str | Path, data: Path | None = None
) -> list[FigurePiece]:
    """Every piece of these figures, or those named; if none are, of all, but without text not of those that need it."""
    text = None if data is None else str(data)
    return [
        FigurePiece(figure=name, piece=piece, scale=scale, out=str(out), runs=str(run_directory), data=text)
        for name, named in asked_for(names).items()
        if names or data is not None or not experiments.experiment(name).needs_text
        for piece in named or experiments.experiment(name).pieces
    ]


SPEC: dict[Any, Any] = {
    "presets": [str],
    "variants?": [str],
    "seeds?": int,
    "at_once?": int,
    "set?": {str: object},
    "over?": {str: [object]},
    "data?": str,
    "size?": str,
}


def read_spec(path: Path, *, runs: str | Path, save_seconds: float = 30.0) -> list[TrainingRun]:
    """The runs that a file asks for: every combination of its presets, variants, values and seeds.

        presets = ["linear-1", "softmax-7"]
        variants = ["as_run"]                         # unless given
        seeds = 20                                    # models of each kind; else as many as the preset has
        at_once = 5                                   # how many of them a run trains side by side; else all

        [set]                                         # for all of them
        "train.steps" = 2000
        [over]                                        # each with each
        "train.optimizer.rate.peak" = [1e-3, 3e-4]
        "model.blocks.0.mixer" = ["Linear", "Mesa"]

    Of language models also

        data = "corpora/NAME"                         # folder of a prepared corpus
        size = "gpu"                                  # unless given

    A TOML file, or JSON of the same form. Values are what `mesascope train --set FIELD=VALUE` takes.
    """
    spec = check(_parsed(path), SPEC, path)
    names = [name.removesuffix("?") for name in SPEC]
    if unknown := sorted(spec.keys() - set(names)):
        raise StoreError(f"{path}: there is no {reprlib.repr(unknown[0])}, only {', '.join(names)}.")
    presets, variants = (list(dict.fromkeys(spec.get(name, ["as_run"]))) for name in ("presets", "variants"))
    over = {
        name: list({repr(value): value for value in values}.values())
        for name, values in spec.get("over", {}).items()
    }
    count = len(presets) * len(variants) * math.prod(map(len, over.values()))
    total, at_once = spec.get("seeds"), spec.get("at_once")
    if at_once is not None and total is None:
        raise StoreError(f"{path}: at_once says how many of `seeds` are trained at once; give both.")
    if any(n is not None and n < 1 for n in (total, at_once)):
        raise StoreError(f"{path}: seeds and at_once: expected at least 1.")
    groups = _groups(total, at_once or total)
    if not 0 < count * len(groups) <= MOST_PIECES:
        raise StoreError(f"{path}: expected 1 to {MOST_PIECES:,} runs, got {count * len(groups):,}.")
    found = {}
    for name, variant, *values in itertools.product(presets, variants, *over.values()):
        if variant not in get_args(Variant):
            told = " or ".join(get_args(Variant))
            raise StoreError(f"{path}: variants: expected {told}, got {reprlib.repr(variant)}.")
        fields = spec.get("set", {}) | dict(zip(over, values, strict=True))
        config, data = _preset(name, variant, spec, path)
        config = _with_fields(config, fields, path)
        for first, seeds in groups:
            if seeds is not None:
                config = replace(config, train=replace(config.train, first_seed=first, seeds=seeds))
            piece = TrainingRun(config=config, runs=str(runs), save_seconds=save_seconds, data=data)
            found[piece.name] = piece
    return list(found.values())


def _preset(
    name: str, variant: Variant, spec: Mapping[str, Any], path: Path
) -> tuple[Config | LanguageConfig, str | None]:
    """A configuration, and where its text is, if it has any."""
    if name in PRESETS:
        return preset(name, variant), None
    if name not in LANGUAGE_PRESETS:
        raise StoreError(
            f"{path}: presets: there is no {reprlib.repr(name)}; `mesascope list` shows those there are."
        )
    if "data" not in spec:
        raise StoreError(
            f'{path}: {name} is a language model: say where its text lies, data = "FOLDER"; `mesascope lm prepare` '
            "makes such a folder."
        )
    data = Path(spec["data"]).absolute()
    try:
        return language_preset(name, Corpus(data).task, spec.get("size", "gpu")), str(data)
    except ValueError as error:
        raise StoreError(f"{path}: {error}") from error


def _parsed(path: Path) -> Any:
    if path.suffix == ".json":
        return read_json(path)
    if path.suffix != ".toml":
        raise StoreError(f"{path}: expected a file that ends in .toml or .json.")
    try:
        return tomllib.loads(read_bytes(path, LONGEST_JSON).decode())
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: expected TOML ({str(error)[:500]}).") from error


def _groups(total: int | None, at_once: int | None) -> list[tuple[int, int | None]]:
    """First seed and number of seeds of each run."""
    if total is None or at_once is None:
        return [(0, None)]
    if -(-total // at_once) > MOST_PIECES:
        raise StoreError(f"seeds: expected at most {MOST_PIECES:,} runs.")
    return [(first, min(at_once, total - first)) for first in range(0, total, at_once)]


def _with_fields(config: T, fields: Mapping[str, Any], path: Path) -> T:
    try:
        texts = [
            f"{name}={value if isinstance(value, str) else json.dumps(value, allow_nan=False)}"
            for name, value in fields.items()
        ]
        return store.with_field(config, *texts)
    except (TypeError, ValueError, StoreError) as error:
        raise StoreError(f"{path}: {str(error)[:500]}") from error
