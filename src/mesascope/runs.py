"""Runs: training that survives its process, and what it leaves behind.

A run is a directory named by its configuration:

    runs/softmax-7-1f0c9a2b3d/
      config.json            what was asked for
      provenance.json        what it was made with
      metrics.jsonl          one line per evaluation
      checkpoint.safetensors where training stands; gone when it has finished
      kept/step-000100.safetensors   weights along training, where the configuration asks for them
      weights.safetensors    the trained models, seed axis first; of language models, if they were to be kept
      timing.json            how long it took, and how much of that the host cost
      result.json            losses on fresh sequences; written last, so a run that has it is finished

The same call goes on where an earlier one stopped, for whatever reason, and ends with the same bits. (On a GPU that
needs the compiled programs too: see `keep_compiled`.)
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from mesascope import mirror, provenance, released, store
from mesascope.journal import Clock, Log, LogError, finite_or_none, interrupts, read_lines
from mesascope.language.presets import LANGUAGE_PRESETS
from mesascope.language.training import LanguageConfig, LanguageTrainer
from mesascope.presets import PRESETS
from mesascope.progress import Progress, progress_on
from mesascope.store import StoreError
from mesascope.training import Config, Trainer, TrainState, over_the_cores
from mesascope.untrusted import check


class RunError(RuntimeError):
    """A run that cannot go on, with what to do about it."""


class DivergedError(RunError):
    """A training whose loss is not finite any more."""


class MissingRunError(RunError):
    """A run that is not there."""


class BusyError(RunError):
    """A run that another process is training."""


class Sink(Protocol):
    """Where metrics go besides `metrics.jsonl`. `fit` opens one with the run and the step at which it goes on."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of one evaluation."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


@dataclass(frozen=True)
class Run:
    """A run's directory.

    Attributes:
        path: of the directory.
        stopped_by: the signal that ended the call of `fit` which returned it.
    """

    path: Path
    stopped_by: int | None = field(default=None, compare=False, repr=False)

    @cached_property
    def config(self) -> Any:
        """What was asked for: a `Config`, or a `LanguageConfig`."""
        path = self.path / "config.json"
        data = store.read_json(path)
        language = isinstance(data, dict) and data.get("kind") == "LanguageConfig"
        try:
            return store.from_dict(data, LanguageConfig if language else Config)
        except StoreError as error:
            raise StoreError(f"{path}: {error}") from error

    @property
    def finished(self) -> bool:
        """Whether it has been trained to the end."""
        return (self.path / "result.json").exists()

    @property
    def result(self) -> dict[str, Any]:
        """Losses on fresh sequences: `loss` by seed, `loss_by_position` by seed and position; of language models also
        what `LanguageTrainer.result` adds."""
        self._must_be_finished()
        form: dict[str, Any] = {"loss": [float], "sequences": int}
        if isinstance(self.config, Config):
            form["loss_by_position"] = [[float]]
        path = self.path / "result.json"
        return check(store.read_json(path), form, path)

    @property
    def timing(self) -> dict[str, float]:
        """`seconds` of the call that finished it, its `steps_per_second`, and `host_share`: which part of the time,
        once everything had been compiled, went by outside of steps and evaluations."""
        self._must_be_finished()
        path = self.path / "timing.json"
        return check(store.read_json(path), {str: float}, path)

    @property
    def provenance(self) -> dict[str, Any]:
        """What it was made with."""
        path = self.path / "provenance.json"
        names = ("mesascope", "source", "python", "device", "started", "precision")
        form = dict.fromkeys(names, str) | {"git": (str, None), "libraries": {str: str}, "command": [str]}
        return check(store.read_json(path), form, path)

    @property
    def step(self) -> int:
        """How far it is, by what its last checkpoint says."""
        if self.finished:
            return self.config.train.steps
        for path in self._checkpoints:
            try:
                return _step_of(store.read_metadata(path), path)
            except StoreError:
                continue
        return 0

    def metrics(self) -> dict[str, np.ndarray]:
        """`step`, and by step and seed `eval_loss` and `train_loss` (since the evaluation before; NaN at first); of
        language models also what `LanguageTrainer.measure` adds."""
        lines = read_lines(self.path / "metrics.jsonl", self.config.train.seeds)
        names = [name for name, value in (lines[0] if lines else {}).items() if isinstance(value, list)]
        return {
            name: np.array([line[name] for line in lines], float if name != "step" else int)
            for name in dict.fromkeys(("step", "eval_loss", "train_loss", *names))
        }

    def models(self) -> Any:
        """The trained models, seed axis first."""
        self._must_be_finished()
        return self._read_models(self.path / "weights.safetensors")

    def model(self, seed: int = 0) -> Any:
        """One of the trained models."""
        seeds = self.config.train.seeds
        if not 0 <= seed < seeds:
            raise ValueError(f"seed: this run has seeds 0 to {seeds - 1}, got {seed}.")
        return jax.tree.map(lambda leaf: leaf[seed], self.models())

    def kept(self) -> dict[int, Any]:
        """The models along training, by step."""
        paths = sorted((self.path / "kept").glob("step-*.safetensors"))
        return {int(path.stem.removeprefix("step-")): self._read_models(path) for path in paths}

    def _read_models(self, path: Path) -> Any:
        return jax.tree.map(jnp.asarray, store.read_arrays(path, released.shapes(_alone(self.config)).models))

    def _must_be_finished(self) -> None:
        if not self.finished:
            raise RunError(
                f"{self.path} has not finished: step {self.step} of {self.config.train.steps}. "
                "The command that began it goes on with it."
            )

    @property
    def _checkpoints(self) -> list[Path]:
        paths = (self.path / "checkpoint.safetensors", self.path / "checkpoint.previous.safetensors")
        return [path for path in paths if path.exists()]

    def _clear(self) -> None:
        # What would make the rest look finished goes first, should this be cut short.
        first = ("result.json", "checkpoint.safetensors", "checkpoint.previous.safetensors")
        for path in sorted(self.path.iterdir(), key=lambda path: path.name not in first):
            if path.is_dir():
                shutil.rmtree(path)
            elif not path.name.startswith("."):  # the lock, and what is known of copies
                path.unlink()

    def _save(self, state: TrainState) -> None:
        current = self.path / "checkpoint.safetensors"
        if current.exists():
            # Beside it, so that there is a good checkpoint at every moment.
            store.keep_as(current, self.path / "checkpoint.previous.safetensors")
        store.write_arrays(current, state, step=str(int(state.step)), config=store.digest(self.config))

    def _restore(self, shapes: TrainState, progress: Progress) -> TrainState | None:
        """The newest checkpoint that is whole, or None before the first."""
        problems = []
        for path in self._checkpoints:
            try:
                written_for = store.read_metadata(path).get("config")
                if written_for != store.digest(self.config):
                    raise RunError(
                        f"{path} is the checkpoint of another configuration ({str(written_for)[:20]}). "
                        "Nothing was changed: move it away, or start anew with --fresh."
                    )
                state = store.read_arrays(path, shapes)
            except StoreError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                progress.note(f"{problem} Going on from the one before it.")
                # Out of the way, lest it be taken for a good one when the next is written.
                os.replace(path, self._checkpoints[0])
            return state
        if problems:
            raise RunError(f"{' '.join(problems)} No good one is left: start anew with --fresh.")
        return None


def fit(
    config: Config | LanguageConfig,
    *,
    data: str | Path | None = None,
    runs: str | Path = "runs",
    fresh: bool = False,
    max_minutes: float | None = None,
    save_seconds: float = 30.0,
    weights: bool = True,
    sinks: Sequence[Callable[[Run, int], Sink]] = (),
    console: Console | None = None,
    trainer: Trainer | LanguageTrainer | None = None,
) -> Run:
    """Train what a configuration describes, or go on with it, or return it if that has been done.

    Args:
        data: folder of the prepared corpus, where a configuration reads one.
        runs: directory of runs, or a URL that fsspec knows (see `mirror`).
        fresh: forget what there is of this run and begin again.
        max_minutes: stop cleanly after so many; the same call goes on later.
        save_seconds: time between checkpoints. It has no influence on the result.
        weights: keep those of the trained models. Language models, of gigabytes, may do without: what is measured of
            them is measured before.
        sinks: further places for metrics, such as `sinks.TensorBoard`: called with the run and the step it is at.
        console: where progress is shown: a bar on a terminal, lines elsewhere. None is silent.
        trainer: what makes the steps; this process alone unless given (see `parallel.fit`).

    Returns:
        The run; `run.finished` is False if it was stopped.

    Raises:
        RunError: it diverged, is damaged, or was begun by other source. The message says what to do.
        BusyError: another process is training it.
        StoreError: a file could not be written.
    """
    if not weights and not isinstance(config, LanguageConfig):
        raise ValueError("weights: only language models may do without them.")
    folder = folder_of(config, runs)
    run = Run(folder.path)
    progress = progress_on(console)
    held = folder.held(field="runs", doing="trained", error=StoreError, busy=BusyError, note=progress.note)
    with held, folder.mirrored():
        if fresh:
            run._clear()
            folder.push()
        for torn in run.path.glob("**/.*.tmp"):  # of a process that was killed while it wrote
            torn.unlink()
        _check_source(run, progress)
        _check_config(run, config, progress)
        alone = _trainer(config, None if data is None else str(data))
        if run.finished:
            _mend(run, alone, progress)
        if run.finished:
            progress.note(f"{folder.where} has already been trained.")
            if sinks:
                progress.note(
                    "metrics are sent while it is trained: none were now. To train it anew: --fresh."
                )
            return run
        trainer = trainer or alone
        state = run._restore(trainer.shapes, progress)
        if state is None:
            # Remains of an earlier beginning that never came to a checkpoint.
            (run.path / "metrics.jsonl").unlink(missing_ok=True)
            store.write_json(run.path / "provenance.json", provenance.of(config, trainer.devices))
            state = trainer.start()
        else:
            state = trainer.place(state)
            progress.note(f"going on at step {int(state.step)} of {folder.where}")
            _note_changes(run, int(state.step), trainer.devices, progress)
        opened: list[Sink] = []
        try:
            for sink in sinks:
                opened.append(sink(run, int(state.step)))
            send = partial(_send, folder, runs, progress)
            stopped_by = _train(
                run, send, trainer, state, progress, max_minutes, save_seconds, opened, weights
            )
        finally:
            progress.stop()
            for sink in opened:
                sink.close()
    if run.finished:
        progress.finished(folder.where, np.array(run.result["loss"]))
    return replace(run, stopped_by=stopped_by)


def keep_compiled(runs: str | Path) -> None:
    """Let JAX keep its compiled programs beside the runs, where the device is a GPU.

    There the compiler times several kernels and takes the fastest, so that two processes that compile the same program
    may round differently. What one of them kept, the other loads: a run that goes on makes the very same steps. It
    also begins sooner. A cache that has been set up already (`JAX_COMPILATION_CACHE_DIR`) is used as it is.
    """
    if jax.default_backend() == "gpu" and jax.config.jax_compilation_cache_dir is None:  # pyright: ignore
        jax.config.update("jax_compilation_cache_dir", _compiled(runs))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        _share_compiled(runs)


def _compiled(runs: str | Path) -> str:
    return str(mirror.directory(runs).absolute() / ".compiled")


def _share_compiled(runs: str | Path) -> None:
    """Programs that other machines have compiled, and ours for them."""
    if jax.config.jax_compilation_cache_dir == _compiled(runs):  # pyright: ignore
        mirror.at(runs, ".compiled").merge()


@lru_cache(maxsize=4)
def _trainer(config: Config | LanguageConfig, data: str | None = None) -> Trainer | LanguageTrainer:
    """So that going on within one process does not compile again."""
    return LanguageTrainer(config, data) if isinstance(config, LanguageConfig) else over_the_cores(config)


def _alone(config: Config | LanguageConfig) -> Trainer | LanguageTrainer:
    """Only to know shapes."""
    return LanguageTrainer(config) if isinstance(config, LanguageConfig) else Trainer(config)


def _train(
    run: Run,
    send: Callable[[], None],
    trainer: Trainer | LanguageTrainer,
    state: TrainState,
    progress: Progress,
    max_minutes: float | None,
    save_seconds: float,
    sinks: Sequence[Sink],
    weights: bool,
) -> int | None:
    """To the end; or until a signal, which is returned, or for as long as it may take."""
    train = trainer.config.train
    began = last_save = time.monotonic()
    clock, first = Clock(), int(state.step)
    try:
        log = Log(run.path / "metrics.jsonl", int(state.step), train)
    except LogError as error:
        raise RunError(f"{error} Start anew with --fresh.") from error
    step, stride = int(state.step), 1
    progress.start(step, train.steps)
    with interrupts() as interrupted:
        while True:
            if (step % train.eval_every == 0 or step == train.steps) and log.last_step != step:
                with clock.busy("evaluate"):
                    measured = trainer.measure(state.models)
                losses = measured.pop("eval_loss")
                if not np.isfinite(losses).all():
                    raise _diverged(run, trainer, np.where(np.isfinite(losses), -1, step))
                since = step - (log.last_step or 0)
                mean = np.asarray(state.loss_sum) / since if since else np.full(train.seeds, np.nan)
                rate = float(train.optimizer.rate(step))
                others = {name: finite_or_none(values) for name, values in measured.items()}
                log.add(
                    dict(step=step, eval_loss=losses.tolist(), train_loss=finite_or_none(mean), rate=rate)
                    | others
                )
                for sink in sinks:
                    named = {f"eval_loss/seed_{i}": float(x) for i, x in enumerate(losses)}
                    named |= {"eval_loss": float(losses.mean()), "rate": rate}
                    named |= {name: float(values.mean()) for name, values in measured.items()}
                    sink.log(step, named | ({"train_loss": float(mean.mean())} if since else {}))
                state = state._replace(loss_sum=jnp.zeros_like(state.loss_sum))
                progress.evaluated(step, losses)
            if train.keep_every is not None and step % train.keep_every == 0:
                store.write_arrays(run.path / "kept" / f"step-{step:06d}.safetensors", state.models)
            if step == train.steps:
                break
            now = time.monotonic()
            out_of_time = max_minutes is not None and now - began > 60 * max_minutes
            if interrupted or out_of_time or now - last_save > save_seconds:
                run._save(state)
                send()
                last_save = now
            if interrupted or out_of_time:
                why = "interrupted" if interrupted else f"stopped after {max_minutes:g} minutes"
                progress.note(f"{why} at step {step} and saved; the same command goes on from here.")
                return interrupted[0] if interrupted else None
            # Short enough for a bar that moves and an answer to Ctrl-C, long enough not to matter.
            target = min(stride, train.eval_every - step % train.eval_every, train.steps - step)
            if train.keep_every is not None:
                target = min(target, train.keep_every - step % train.keep_every)
            with clock.busy("advance") as elapsed:
                state, loss, failed = trainer.advance(state, target)
                failed = np.asarray(failed)
            if (failed >= 0).any():
                raise _diverged(run, trainer, failed)
            step += target
            stride = 2 * stride if elapsed() < 0.5 else max(1, stride // 2) if elapsed() > 2 else stride
            progress.advanced(step, np.asarray(loss))
    timing = clock.account(train.steps - first)
    if not isinstance(
        trainer.config, LanguageConfig
    ):  # of those it takes longer than the steps since the last one
        run._save(state)
    if weights:
        store.write_arrays(run.path / "weights.safetensors", state.models, config=store.digest(run.config))
    store.write_json(run.path / "timing.json", timing)
    _conclude(run, trainer, state.models)
    for path in run._checkpoints:
        path.unlink()


def _send(folder: mirror.Folder, runs: str | Path, progress: Progress) -> None:
    """What is saved here need not be at a URL at once."""
    try:
        _share_compiled(runs)
        folder.push()
    except StoreError as error:
        progress.note(f"{error} Training goes on, and this is sent with the next checkpoint.")


def _conclude(run: Run, trainer: Trainer | LanguageTrainer, models: Any) -> None:
    store.write_json(run.path / "result.json", trainer.result(models))


def _mend(run: Run, trainer: Trainer | LanguageTrainer, progress: Progress) -> None:
    """What is damaged of a finished run is made again: its losses from its weights, its weights by training. Weights of
    a language model may be missing."""
    weights = run.path / "weights.safetensors"
    without = isinstance(run.config, LanguageConfig) and not weights.exists()
    try:
        run.result if without else store.read_arrays(weights, trainer.shapes.models)
    except StoreError as error:
        if run.provenance["source"] != provenance.source_hash():
            raise RunError(
                f"{error} It was made by other source than this: go back to that source, or train it anew with --fresh."
            ) from error
        progress.note(f"{error} It is trained again.")
        run._clear()
        store.write_json(run.path / "config.json", store.to_dict(run.config))
        return
    if without:
        progress.note(f"{run.path} has no weights, only what was measured of them. To have them: --fresh.")
        return
    try:
        run.result  # noqa: B018
    except StoreError as error:
        progress.note(f"{error} It is computed again from the weights.")
        _conclude(run, trainer, run.models())


def _check_config(run: Run, config: Config | LanguageConfig, progress: Progress) -> None:
    """The directory is named after its configuration, so one that cannot be read can be written again."""
    path = run.path / "config.json"
    try:
        if path.exists() and run.config == config:
            return
    except StoreError as error:
        progress.note(f"{error} It is written again.")
    else:
        if path.exists():
            raise RunError(f"{path} is not the configuration asked for: start anew with --fresh.")
    store.write_json(path, store.to_dict(config))


def _diverged(run: Run, trainer: Trainer | LanguageTrainer, failed: np.ndarray) -> DivergedError:
    step = int(failed[failed >= 0].min())
    seeds = [str(trainer.config.train.first_seed + i) for i in np.flatnonzero(failed == step)]
    seed = ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(seeds)
    saved = run._checkpoints
    kept = (
        f"The last good checkpoint is {saved[0]}, step {run.step}."
        if saved
        else "There was no checkpoint yet."
    )
    rate = "--rate" if isinstance(trainer.config, LanguageConfig) else "--train.optimizer.rate.peak"
    clipping = "" if isinstance(trainer.config, LanguageConfig) else " or activation clipping (--model.clip)"
    return DivergedError(
        f"training diverged: the loss of {seed} is not finite at step {step}. {kept} "
        f"A smaller learning rate ({rate}){clipping} may help."
    )


def _step_of(metadata: Mapping[str, str], path: Path) -> int:
    step = metadata.get("step", "")
    if not step.isdecimal() or len(step) > 15:
        raise StoreError(f"{path} does not say which step it is of.")
    return int(step)


def _check_source(run: Run, progress: Progress) -> None:
    """Half of a run by one program and half by another would be neither's."""
    if not (run.path / "provenance.json").exists():
        return
    try:
        before, now = run.provenance["source"], provenance.source_hash()
    except StoreError as error:
        if run.finished or not run._checkpoints:
            progress.note(f"{error} What made this run is not known.")
            return
        raise RunError(
            f"{error} So it is not known what it was begun with: begin again with --fresh."
        ) from error
    if before == now:
        return
    what = f"{run.path} was made by other source than this ({before}, now {now})"
    if not run.finished and run._checkpoints:
        raise RunError(
            f"{what}, and it is not finished. Begin again with --fresh, or go back to that source."
        )
    progress.note(f"{what}. To train it anew: --fresh.")


def _note_changes(run: Run, step: int, devices: int, progress: Progress) -> None:
    """A run that goes on elsewhere is still a run, but not one whose bits can be had again: it says so."""
    made, now = run.provenance, provenance.of(run.config, devices)
    changed = [name for name in ("device", "precision", "python", "libraries") if made.get(name) != now[name]]
    if changed:
        progress.note(f"not as it was begun: {', '.join(changed)} changed; recorded in provenance.json.")
        made.setdefault("resumed", []).append({"step": step} | {name: now[name] for name in changed})
        store.write_json(run.path / "provenance.json", made)


def folder_of(config: Config | LanguageConfig, runs: str | Path = "runs") -> mirror.Folder:
    """The folder of a configuration's run, in a directory or at a URL."""
    return mirror.at(runs, f"{config.name}-{store.digest(config)}")


def path_of(config: Config | LanguageConfig, runs: str | Path = "runs") -> Path:
    """The directory of a configuration's run, on this machine."""
    return folder_of(config, runs).path


def find(run_or_name: str | Path, *, runs: str | Path = "runs") -> Run:
    """The run in that directory or at that URL, of that preset, or the one run whose name begins so.

    Raises:
        MissingRunError: there is none.
        RunError: there are several.
    """
    if mirror.is_url(run_or_name):
        runs, _, run_or_name = str(run_or_name).rstrip("/").rpartition("/")
    elif (Path(run_or_name) / "config.json").exists():
        return Run(Path(run_or_name))
    there, asked = mirror.names(runs), str(run_or_name)
    exact = [name for name in there if asked in (name, name.rpartition("-")[0])]
    found = exact or [name for name in there if asked and _stands_for(asked, name)]
    if len(found) == 1:
        return Run(mirror.at(runs, found[0]).seen())
    if found:
        raise RunError(f"{asked!r} is one of several runs: {', '.join(found)}. Which one?")
    raise MissingRunError(
        f"there is no run {asked!r} in {runs}. There {'are: ' + ', '.join(there) if there else 'is none'}."
    )


def _stands_for(asked: str, name: str) -> bool:
    """Whether the beginning of a run's name tells it. That of a preset stands for no other preset, be it longer."""
    if asked.removesuffix("-as-written") in PRESETS:
        return False
    if asked in LANGUAGE_PRESETS:  # PRESET-SIZE-DIGEST
        return name.rsplit("-", 2)[0] == asked
    return name.startswith(asked)


def load(run_or_name: str | Path, seed: int = 0, *, runs: str | Path = "runs") -> tuple[Any, Any]:
    """A trained model and its configuration: a `Transformer` and a `Config`, or a `LanguageModel` and a
    `LanguageConfig`.

    Args:
        run_or_name: a run's directory or URL, or its name (or how it begins) in `runs`; if there is none, the model of
            that name that comes with the repository.
        seed: which of its models.
    """
    try:
        run = find(run_or_name, runs=runs)
    except MissingRunError as error:
        name, known = str(run_or_name), released.names()
        if name not in known:
            raise MissingRunError(f"{error} Released models: {', '.join(known)}.") from None
        if seed != 0:
            raise ValueError(
                f"seed: the released {name} is one model, seed 0; got {seed}. `mesascope train {name}` trains more."
            ) from error
        models, config = released.read_model(released.weights_path(name))
        return jax.tree.map(lambda leaf: leaf[0], models), config
    return run.model(seed), run.config
