"""`mesascope`: the command line."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from mesascope.cli_language import LanguageModel, train_language_model

if TYPE_CHECKING:
    from rich.console import Console

    from mesascope.sweep import Piece
    from mesascope.training import Config


@dataclass(frozen=True, kw_only=True)
class BenchOps:
    """Speed, memory and accuracy of the mesa operation, as ratios within one run."""

    small: bool = False
    """Small shapes: about a minute."""
    gpu: bool = False
    """The fused kernels on a GPU, with flash-linear-attention beside them if it is installed; and the larger shapes."""
    repeats: int = 15
    """Timed rounds; each round times every op once."""
    out: Path | None = None
    """Also write the numbers to this JSON file."""

    def run(self) -> None:
        if self.gpu and self.small:
            raise ValueError("bench ops: --small is for a CPU; leave out one of --small and --gpu.")
        if self.gpu:
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peer needs memory too
            from mesascope.bench_kernels import bench_gpu

            bench_gpu(repeats=self.repeats, out=self.out)
        else:
            from mesascope.bench import bench_ops

            bench_ops(small=self.small, repeats=self.repeats, out=self.out)


@dataclass(frozen=True, kw_only=True)
class BenchAccuracy:
    """Errors of the exact methods in float32 against float64, beside the classical recursion's."""

    time: int = 1024
    width: int = 64
    draws: int = 4
    lam: tuple[float, ...] = (1e-2, 1.0, 10.0, 1e3)

    def run(self) -> None:
        from rich.console import Console

        from mesascope.bench import Report, accuracy_table

        accuracy_table(
            Console(), Report(), time_steps=self.time, width=self.width, draws=self.draws, lams=self.lam
        )


@dataclass(frozen=True, kw_only=True)
class BenchTrain:
    """Training steps per second, one seed and several; where PyTorch is installed, its eager step beside ours."""

    presets: tuple[str, ...] = ("softmax-7", "hybrid-mesa")
    """Which presets."""
    variant: Literal["as_run", "as_written"] = "as_written"
    """As the released code ran them, or as the paper's text has them (LayerNorm and MLPs)."""
    seeds: int = 5
    """How many at once."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Change a field of all of them: `--set model.tf32=true`."""
    repeats: int = 7
    """Timed rounds."""
    out: Path | None = None
    """Also write the numbers to this JSON file."""

    def run(self) -> None:
        from mesascope.bench_train import bench_train
        from mesascope.training import divide_cpu

        divide_cpu()
        bench_train(
            presets=self.presets,
            variant=self.variant,
            seeds=self.seeds,
            set=self.set,
            repeats=self.repeats,
            out=self.out,
        )


@dataclass(frozen=True, kw_only=True)
class BenchLanguage:
    """Training steps of language models, as ratios to the first preset's; tokens per second and FLOP utilization."""

    presets: tuple[str, ...] = ("lm-2-linear", "lm-2-mesa", "lm-2-softmax")
    """Which; the first is what the others are compared with."""
    size: Literal["paper", "gpu", "cpu"] = "gpu"
    """As of `mesascope lm train`."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Change a field of all of them: `--set accumulate=1`."""
    repeats: int = 15
    """Timed rounds; each round times every model once."""
    peak_tflops: float = 989.0
    """What the device can do at most, for the utilization: that of an H100 or H200 in bfloat16."""
    out: Path | None = None
    """Also write the numbers to this JSON file."""

    def run(self) -> None:
        from mesascope.bench_language import bench_language

        bench_language(
            presets=self.presets,
            size=self.size,
            set=self.set,
            repeats=self.repeats,
            peak_tflops=self.peak_tflops,
            out=self.out,
        )


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Benchmarks."""

    what: (
        Annotated[BenchTrain, tyro.conf.subcommand("train")]
        | Annotated[BenchLanguage, tyro.conf.subcommand("language")]
        | Annotated[BenchOps, tyro.conf.subcommand("ops")]
        | Annotated[BenchAccuracy, tyro.conf.subcommand("accuracy")]
    )

    def run(self) -> None:
        self.what.run()


DIFFERS = 3
"""Exit status where everything was computed, and is not what is committed. (2 is that of wrong options.)"""


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Regenerate figures of the paper and hold them to its claims.

    Exit status: 0, all is as committed (or nothing is, to be held to); 3, a number or a verdict is not; 1, something
    could not be computed; 75, the time was up, and the same command goes on.
    """

    figures: tyro.conf.Positional[tuple[str, ...]] = ()
    """Which, such as `fig4 fig7`; all of them unless given. A panel, `fig7b`, is computed with its figure. Of language
    models also some: `lm-two-layers/mesa`."""
    preset: Literal["smoke", "released", "quick", "paper"] = "released"
    """From released weights; or trained here: `quick` at reduced scale, `paper` with five seeds (a GPU), `smoke` to
    see that it runs."""
    out: Path = Path("report")
    """Directory of the page, figures, arrays and claims."""
    runs: str = "runs"
    """Directory of trained models, or a URL (extra: remote)."""
    data: Path | None = None
    """Folder of a prepared corpus, for language models."""
    fresh: bool = False
    """Compute finished pieces again; trained models stay."""
    max_minutes: float | None = None
    """Stop cleanly after so many minutes, with exit status 75; the same command goes on later."""
    publish: Path | None = None
    """Also write arrays, figures and claims into this directory (`results`)."""
    executor: str | None = None
    """First train and compute, piece by piece, in processes of their own: `local`, `local:4`, `ray`,
    `ray://HOST:PORT`, `slurm`. (They share the directories `out` and `runs`.)"""

    def run(self) -> None:
        import jax
        from rich.console import Console

        from mesascope.experiments.lab import SCALES
        from mesascope.experiments.reproduce import OutOfTimeError, against_committed, publish, reproduce
        from mesascope.report import write_page
        from mesascope.runs import keep_compiled
        from mesascope.training import divide_cpu

        console = Console()
        fresh, figures, failed = self.fresh, self.figures, False
        if self.executor is not None:
            if self.preset == "released":
                raise ValueError(
                    "executor: figures from released weights are computed in this process: leave it out, or choose "
                    "--preset quick or --preset paper."
                )
            fresh, (figures, failed) = False, self._place(self.executor, console)
            if failed and not figures:
                sys.exit(1)
        divide_cpu()
        keep_compiled(self.runs)
        # Smoke is to see that it runs: compiling takes most of its time.
        jax.config.update("jax_disable_most_optimizations", self.preset == "smoke")
        try:
            outcomes = reproduce(
                figures,
                scale=SCALES[self.preset],
                out=self.out,
                run_directory=self.runs,
                data=self.data,
                fresh=fresh,
                max_minutes=self.max_minutes,
                console=console,
            )
        except OutOfTimeError as stopped:
            console.print(f"{stopped} The same command goes on from here.", highlight=False)
            sys.exit(75)
        compared = self.publish is None and self.preset in ("released", "paper")
        same = self.preset == "released"
        different = against_committed(outcomes, same_models=same) if compared else None
        page = write_page(outcomes, self.out / "index.html", scale=SCALES[self.preset], differences=different)
        console.print(f"the page: {page}", highlight=False, soft_wrap=True)
        if self.publish is not None:
            publish(outcomes, self.publish, self.runs)
        for line in different or ():
            console.print(line, style="red", highlight=False)
        if different or failed:
            sys.exit(1 if failed else DIFFERS)

    def _place(self, place: str, console: "Console") -> tuple[tuple[str, ...], bool]:
        """Compute all pieces; the figures that can be drawn then, and whether some cannot."""
        from mesascope.mirror import absolute
        from mesascope.sweep import figure_pieces

        out, runs = self.out.absolute(), absolute(self.runs)
        data = None if self.data is None else self.data.absolute()
        pieces = figure_pieces(self.figures, scale=self.preset, out=out, run_directory=runs, data=data)
        if self.fresh:
            for piece in pieces:
                piece.forget()
        status = _sweep(pieces, place, runs, self.max_minutes, 2, console)
        if status == 75:
            sys.exit(75)
        if status == 0:
            return self.figures, False
        missing = {piece.figure for piece in pieces if not piece.is_done}
        return tuple(dict.fromkeys(piece.figure for piece in pieces if piece.figure not in missing)), True


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw figures and the page again from what `mesascope reproduce` computed."""

    figures: tyro.conf.Positional[tuple[str, ...]] = ()
    """Which; all of them unless given."""
    preset: Literal["smoke", "released", "quick", "paper"] = "released"
    """The preset that they were computed with."""
    out: Path = Path("report")
    """Directory of the page, figures and arrays."""
    runs: str = "runs"
    """Directory of trained models, or a URL (extra: remote): what was tuned for figures is published from there."""
    publish: Path | None = None
    """Also write arrays, figures and claims into this directory (`results`)."""

    def run(self) -> None:
        from rich.console import Console

        from mesascope.experiments.lab import SCALES
        from mesascope.experiments.reproduce import publish, redraw
        from mesascope.report import write_page

        console, scale = Console(), SCALES[self.preset]
        outcomes = redraw(self.figures, scale=scale, out=self.out, console=console)
        page = write_page(outcomes, self.out / "index.html", scale=scale)
        console.print(f"the page: {page}", highlight=False, soft_wrap=True)
        if self.publish is not None:
            publish(outcomes, self.publish, self.runs)


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a preset, or go on with it. `mesascope train PRESET --help` lists every field that can be set."""

    preset: tyro.conf.Positional[str]
    """A name that `mesascope list` shows."""
    variant: Literal["as_run", "as_written"] = "as_run"
    """As the authors' released code ran it, or as the paper's text has it."""
    seeds: int | None = None
    """How many models to train side by side (train.seeds)."""
    runs: str = "runs"
    """Directory of runs, or a URL such as s3://BUCKET/runs (extra: remote)."""
    fresh: bool = False
    """Forget what there is of this run and begin again."""
    max_minutes: float | None = None
    """Stop cleanly after so many minutes, with exit status 75; the same command goes on later."""
    save_seconds: float = 30.0
    """Time between checkpoints; the result does not depend on it."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run's directory (extra: tensorboard)."""
    wandb: str | None = None
    """Also send metrics to this Weights & Biases project (extra: wandb)."""
    data_parallel: bool = False
    """Cut every batch over all devices; of all processes, where they were started by srun or mpirun. Where each has
    JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID, that is so without asking."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Change the kind of something: `--set model.blocks.1.mixer=Linear`, or `PATH={"kind": "Mesa", "lam_init": 2}`.
    The help of a preset begins with all kinds."""

    def run(self, config: "Config | None" = None) -> None:
        from rich.console import Console

        from mesascope import parallel, sinks
        from mesascope.presets import preset
        from mesascope.runs import Run, Sink, fit, keep_compiled
        from mesascope.store import with_field
        from mesascope.training import divide_cpu

        config = preset(self.preset, self.variant) if config is None else config
        config = with_field(config, *self.set)
        if self.seeds is not None:
            if any(given.partition("=")[0] == "train.seeds" for given in self.set):
                raise ValueError("seeds: --seeds and --set train.seeds are the same field: give one of them.")
            config = replace(config, train=replace(config.train, seeds=self.seeds))
        chosen: list[Callable[[Run, int], Sink]] = [sinks.TensorBoard] if self.tensorboard else []
        if self.wandb is not None:
            chosen.append(partial(sinks.WeightsAndBiases, self.wandb))
        together = self.data_parallel or parallel.is_asked_for()
        if together:
            parallel.join()
        else:
            divide_cpu()
        keep_compiled(self.runs)
        began = time.monotonic()
        run = (parallel.fit if together else fit)(
            config,
            runs=self.runs,
            fresh=self.fresh,
            max_minutes=self.max_minutes,
            save_seconds=self.save_seconds,
            sinks=chosen,
            console=Console(),
        )
        if not run.finished:
            out_of_time = self.max_minutes is not None and time.monotonic() - began >= 60 * self.max_minutes
            sys.exit(75 if out_of_time else 128 + (run.stopped_by or signal.SIGINT))


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Train many: presets, changes to them and seeds, each with each, as a file asks for them.

    `mesascope sweep status SPEC` says what is done, running and failed. The same command goes on with what is not done.
    Exit status 1: some failed."""

    spec: tyro.conf.Positional[Path]
    """A TOML or JSON file: `presets`, and if wanted `variants`, `seeds`, `at_once`, `set` and `over`."""
    executor: str = "local"
    """Where: `local` or `local:4` (processes of this machine), `ray` or `ray://HOST:PORT`, `slurm`."""
    runs: str = "runs"
    """Directory of runs, or a URL (extra: remote); of all machines, where there are several."""
    retries: int = 2
    """How often a run is started again whose process died; it goes on from its last checkpoint."""
    max_minutes: float | None = None
    """Stop cleanly after so many minutes, with exit status 75; the same command goes on later."""
    save_seconds: float = 30.0
    """Time between checkpoints; the result does not depend on it."""

    def run(self) -> None:
        from rich.console import Console

        from mesascope.mirror import absolute
        from mesascope.sweep import read_spec

        if self.retries < 0:
            raise ValueError(f"retries: expected 0 or more, got {self.retries}.")
        runs = absolute(self.runs)
        pieces = read_spec(self.spec, runs=runs, save_seconds=self.save_seconds)
        if status := _sweep(pieces, self.executor, runs, self.max_minutes, self.retries, Console()):
            sys.exit(status)


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    """How far a sweep is, whoever is at it. Exit status 1: some failed."""

    spec: tyro.conf.Positional[Path]
    """The file that it was started with."""
    runs: str = "runs"
    """Directory of runs, or a URL such as s3://BUCKET/runs (extra: remote)."""

    def run(self) -> None:
        from rich.console import Console

        from mesascope.mirror import absolute, is_url
        from mesascope.sweep import read_spec, report, status

        if not is_url(self.runs) and not Path(self.runs).is_dir():
            raise ValueError(f"runs: there is no directory {self.runs}: nothing was started there.")
        outcomes = status(read_spec(self.spec, runs=absolute(self.runs)))
        report(outcomes, Console())
        if any(outcome.state == "failed" for outcome in outcomes):
            sys.exit(1)


def _sweep(
    pieces: "Sequence[Piece]",
    place: str,
    runs: str,
    max_minutes: float | None,
    retries: int,
    console: "Console",
) -> int:
    """All pieces; the exit status: 0 if they are done, 1 if some failed, 75 if the time was up."""
    from mesascope.mirror import directory
    from mesascope.sweep import executor, report, sweep

    where = executor(place, folder=directory(runs) / ".sweeps")
    try:
        outcomes = sweep(pieces, where, retries=retries, max_minutes=max_minutes, console=console)
    finally:
        where.close()
    report(outcomes, console)
    states = {outcome.state for outcome in outcomes}
    return 0 if states <= {"done"} else 1 if "failed" in states else 75


@dataclass(frozen=True, kw_only=True)
class List:
    """The figures, the presets, and the runs there are."""

    runs: str = "runs"
    """Directory of runs, or a URL such as s3://BUCKET/runs (extra: remote)."""

    def run(self) -> None:
        from mesascope.show import list_experiments, list_language_presets, list_presets, list_runs

        list_experiments()
        list_presets()
        list_language_presets()
        list_runs(self.runs)


@dataclass(frozen=True, kw_only=True)
class Show:
    """One run: what it is, what made it, how it went."""

    run_or_name: tyro.conf.Positional[str]
    """Its directory, or its name (or how that begins)."""
    runs: str = "runs"
    """Directory of runs, or a URL such as s3://BUCKET/runs (extra: remote)."""

    def run(self) -> None:
        from mesascope.runs import find
        from mesascope.show import show_run

        show_run(find(self.run_or_name, runs=self.runs))


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Plot, tyro.conf.subcommand("plot")]
    | Annotated[LanguageModel, tyro.conf.subcommand("lm")]
    | Annotated[Sweep, tyro.conf.subcommand("sweep")]
)


def main(arguments: list[str] | None = None) -> None:
    """Run one command; errors that a user can do something about come without a traceback."""
    from mesascope.runs import RunError
    from mesascope.store import StoreError

    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["train"] and (name := _preset_among(arguments[1:])) is not None:
            at = arguments.index(name)
            _train(name, [*arguments[1:at], *arguments[at + 1 :]])
        elif arguments[:2] == ["lm", "train"] and len(arguments) > 2 and not arguments[2].startswith("-"):
            train_language_model(arguments[2], arguments[3:])
        elif arguments[:2] == ["sweep", "status"]:
            tyro.cli(SweepStatus, prog="mesascope sweep status", args=arguments[2:]).run()
        else:
            options = (tyro.conf.OmitSubcommandPrefixes,)
            tyro.cli(Command, prog="mesascope", description=__doc__, args=arguments, config=options).run()
    except KeyboardInterrupt:
        sys.exit(130)
    except (RunError, StoreError, ValueError) as error:
        from rich.console import Console
        from rich.markup import escape

        Console(stderr=True).print(
            f"[bold red]mesascope:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(1)


def _preset_among(arguments: list[str]) -> str | None:
    """The preset that a command names, first or (if it is a known one) anywhere; None if it only asks for help."""
    if not arguments or not arguments[0].startswith("-"):
        return arguments[0] if arguments else None
    from mesascope.presets import PRESETS

    found = [argument for argument in arguments if argument in PRESETS]
    if len(found) == 1:
        return found[0]
    if {"-h", "--help"} & set(arguments):
        return None
    raise ValueError(
        "preset: expected one, and before all options: mesascope train PRESET --seeds 2 … "
        "(`mesascope list` shows them)."
    )


def _train(name: str, arguments: list[str]) -> None:
    """The preset decides which fields there are, so it is read before them."""
    from dataclasses import make_dataclass

    from mesascope.presets import preset
    from mesascope.training import Config

    ahead, _ = tyro.cli(
        _Variant, args=[a for a in arguments if a not in ("-h", "--help")], return_unknown_args=True
    )
    default = preset(name, ahead.variant)
    options = make_dataclass(
        "Options",
        [
            ("command", Annotated[Train, tyro.conf.arg(name="")]),
            ("config", Annotated[Config, tyro.conf.arg(name="")]),
        ],
    )
    given = tyro.cli(
        options,
        prog=f"mesascope train {name}",
        description=f"{Train.__doc__}\n\nKinds that --set can choose: {'; '.join(_kinds(default))}.",
        args=[name, *arguments],
        default=options(command=Train(preset=name, variant=ahead.variant), config=default),
        config=(tyro.conf.AvoidSubcommands,),
    )
    twice = any(argument.partition("=")[0] == "--train.seeds" for argument in arguments)
    if twice and given.command.seeds not in (None, given.config.train.seeds):
        raise ValueError(
            f"seeds: --seeds {given.command.seeds} and --train.seeds {given.config.train.seeds} are the same field: "
            "give one of them."
        )
    given.command.run(given.config)


def _kinds(config: "Config") -> list[str]:
    """What can be chosen where something may be of several kinds, or nothing (null)."""
    from mesascope.store import choices

    return [f"{path}={'|'.join(kinds)}" for path, kinds in choices(config).items()]


@dataclass(frozen=True, kw_only=True)
class _Variant:
    variant: Literal["as_run", "as_written"] = "as_run"
