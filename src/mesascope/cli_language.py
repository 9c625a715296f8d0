"""`mesascope lm`: the part of the command line that is about text."""

import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from mesascope.language import LanguageConfig


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Tokenize a corpus, once. The same command goes on after an interruption, and repairs what is damaged."""

    data: tyro.conf.Positional[tuple[Path, ...]]
    """Files (*.jsonl.zst as of the Pile, *.jsonl, *.txt) or folders of them. Those called val…, validation…, dev… are
    for validation, test… for tests, the others for training."""
    bpe: int | Path = 16384
    """A folder with GPT-2's encoder.json and vocab.bpe; or how many tokens a vocabulary trained on DATA is to have."""
    out: Path = Path("corpora")
    """Directory of prepared corpora."""
    shard_tokens: int = 2**24
    """Tokens per file."""

    def run(self) -> None:
        from rich.console import Console

        from mesascope.show import show_corpus
        from mesascope.tasks.text import prepare

        console = Console()
        corpus = prepare(
            self.data, bpe=self.bpe, out=self.out, shard_tokens=self.shard_tokens, console=console
        )
        show_corpus(corpus, console)


@dataclass(frozen=True, kw_only=True)
class ShowCorpus:
    """What is in a prepared corpus. Exit status 1: some of it is damaged."""

    corpus: tyro.conf.Positional[Path]
    """Its directory."""

    def run(self) -> None:
        from rich.console import Console

        from mesascope.show import show_corpus
        from mesascope.tasks.text import Corpus

        corpus = Corpus(self.corpus)
        show_corpus(corpus)
        corpus.verify(Console())


@dataclass(frozen=True, kw_only=True)
class TrainLanguageModel:
    """Train a language model, or go on with it. `mesascope lm train PRESET --data DIR --help` lists every field."""

    preset: tyro.conf.Positional[str]
    """A name that `mesascope list` shows."""
    data: Path
    """Folder of a prepared corpus."""
    size: Literal["paper", "gpu", "cpu"] = "gpu"
    """The paper's, one for a GPU-hour, or a small one for a CPU."""
    seeds: int | None = None
    """How many models to train (train.seeds)."""
    rate: float | None = None
    """The largest learning rate; it starts and ends in proportion. (`--train.steps` stretches its schedule.)"""
    resets: bool = False
    """Nothing reaches from one document into the next."""
    runs: str = "runs"
    """Directory of runs, or a URL (extra: remote)."""
    fresh: bool = False
    """Forget what there is of this run and begin again."""
    max_minutes: float | None = None
    """Stop cleanly after so many minutes, with exit status 75; the same command goes on later."""
    save_seconds: float = 300.0
    """Time between checkpoints; the result does not depend on it."""
    weights: bool = True
    """Keep them. What is measured of a model does not need them, only `mesascope lm eval` and `sample` do."""
    data_parallel: bool = False
    """Cut every batch over all devices of all processes that srun or mpirun started, and not only over those of this
    one. Where each has JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID, that is so without
    asking."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Change the kind of something: `--set model.blocks.1.mixer=Delta`, or `PATH={"kind": "Mesa", "method": "cg"}`."""

    def run(self, config: "LanguageConfig | None" = None) -> None:
        import jax
        from rich.console import Console

        from mesascope import parallel
        from mesascope.language import language_preset, with_rate
        from mesascope.runs import fit, keep_compiled
        from mesascope.show import show_run
        from mesascope.store import with_field
        from mesascope.tasks.text import Corpus

        config = language_preset(self.preset, Corpus(self.data).task, self.size) if config is None else config
        config = with_field(config, *self.set)
        if self.resets:
            config = replace(config, model=replace(config.model, resets_at=config.task.eos))  # pyright: ignore
        if self.seeds is not None:
            config = replace(config, train=replace(config.train, seeds=self.seeds))
        if self.rate is not None:
            config = with_rate(config, self.rate)
        together = self.data_parallel or parallel.is_asked_for()
        if together:
            parallel.join()
        keep_compiled(self.runs)
        began = time.monotonic()
        run = (parallel.fit if together else fit)(
            config,
            data=self.data,
            runs=self.runs,
            fresh=self.fresh,
            max_minutes=self.max_minutes,
            save_seconds=self.save_seconds,
            weights=self.weights,
            console=Console(),
        )
        if not run.finished:
            out_of_time = self.max_minutes is not None and time.monotonic() - began >= 60 * self.max_minutes
            sys.exit(75 if out_of_time else 128 + (run.stopped_by or signal.SIGINT))
        if jax.process_index() == 0:
            show_run(run)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Try learning rates for a part of the steps, the same for every model, with a seed of their own."""

    preset: tyro.conf.Positional[str]
    """A name that `mesascope list` shows."""
    data: Path
    """Folder of a prepared corpus."""
    size: Literal["paper", "gpu", "cpu"] = "gpu"
    """The paper's, one for a GPU-hour, or a small one for a CPU."""
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    """Which."""
    part: float = 0.1
    """Of the steps."""
    runs: str = "runs"
    """Directory of runs, or a URL (extra: remote)."""
    max_minutes: float | None = None
    """Stop cleanly after so many minutes, with exit status 75; the same command goes on later."""

    def run(self) -> None:
        from rich.console import Console

        from mesascope.experiments.lab import OutOfTimeError
        from mesascope.experiments.rates import best, search_rates
        from mesascope.language import language_preset
        from mesascope.runs import keep_compiled
        from mesascope.tasks.text import Corpus

        keep_compiled(self.runs)
        console = Console()
        config = language_preset(self.preset, Corpus(self.data).task, self.size)
        deadline = None if self.max_minutes is None else time.monotonic() + 60 * self.max_minutes
        try:
            losses = search_rates(
                config,
                rates=self.rates,
                part=self.part,
                data=self.data,
                runs=self.runs,
                deadline=deadline,
                console=console,
            )
        except OutOfTimeError as stopped:
            console.print(f"{stopped} The same command goes on from here.", highlight=False)
            sys.exit(75)
        for rate, loss in losses.items():
            console.print(f"{rate:g}: loss {loss:.4f} on what comes next in training", highlight=False)
        command = (
            f"mesascope lm train {self.preset} --rate {best(losses):g} --data {self.data} --size {self.size}"
        )
        console.print(f"best: {command} --runs {self.runs}", highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure trained language models on the whole validation split, part by part."""

    run_or_name: tyro.conf.Positional[str]
    """A run's directory, or its name (or how that begins)."""
    data: Path
    """Folder of the corpus it was trained on."""
    runs: str = "runs"
    """Directory of runs, or a URL (extra: remote)."""
    out: Path | None = None
    """Also write the numbers to this JSON file."""

    def run(self) -> None:
        from rich.console import Console

        from mesascope.language import LanguageConfig, LanguageTrainer
        from mesascope.runs import find
        from mesascope.show import show_language
        from mesascope.store import write_json

        run = find(self.run_or_name, runs=self.runs)
        config = run.config
        if not isinstance(config, LanguageConfig):
            raise ValueError(f"{run.path} is no language model: `mesascope show` tells about it.")
        trainer = LanguageTrainer(config, self.data)
        models = run.models()
        result = trainer.result(models, whole=True)
        show_language(result, None, config, Console())
        if self.out is not None:
            write_json(self.out, result)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Let a trained language model go on with a text."""

    run_or_name: tyro.conf.Positional[str]
    """A run's directory, or its name (or how that begins)."""
    data: Path
    """Folder of the corpus it was trained on, for its vocabulary."""
    prompt: str = ""
    """How the text begins."""
    tokens: int = 128
    """How many to write."""
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    seed: int = 0
    """Of the drawing of tokens."""
    model: int = 0
    """Which of the run's models."""
    runs: str = "runs"
    """Directory of runs, or a URL (extra: remote)."""

    def run(self) -> None:
        import jax
        import numpy as np
        from rich.console import Console

        from mesascope.language import LanguageConfig, generate
        from mesascope.runs import find

        console = Console()
        run = find(self.run_or_name, runs=self.runs)
        if not isinstance(run.config, LanguageConfig):
            raise ValueError(f"{run.path} is no language model.")
        tokenizer = run.config.task.open(self.data).tokenizer  # pyright: ignore
        prompt = np.concatenate([[tokenizer.eos], tokenizer.encode(self.prompt)])
        pieces = generate(
            run.model(self.model),
            prompt,
            count=self.tokens,
            temperature=self.temperature,
            key=jax.random.key(self.seed),
        )
        written, timed = [], 0.0
        began = time.monotonic()
        for piece in pieces:
            # The first piece is compiled before it is written.
            timed += time.monotonic() - began if written else 0.0
            written.append(piece)
            began = time.monotonic()
        text = tokenizer.decode(np.concatenate(written)) if written else ""
        console.print(self.prompt + text, markup=False, highlight=False, soft_wrap=True)
        counted = sum(len(piece) for piece in written[1:])
        if counted:
            console.print(f"{counted / timed:.0f} tokens/s", style="dim", highlight=False)


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """Language models on text."""

    what: (
        Annotated[Prepare, tyro.conf.subcommand("prepare")]
        | Annotated[ShowCorpus, tyro.conf.subcommand("show")]
        | Annotated[TrainLanguageModel, tyro.conf.subcommand("train")]
        | Annotated[Rates, tyro.conf.subcommand("rates")]
        | Annotated[Evaluate, tyro.conf.subcommand("eval")]
        | Annotated[Sample, tyro.conf.subcommand("sample")]
    )

    def run(self) -> None:
        self.what.run()


def train_language_model(name: str, arguments: list[str]) -> None:
    """Preset and corpus decide which fields there are, so they are read before them."""
    from dataclasses import make_dataclass

    from mesascope.language import LanguageConfig, language_preset, with_rate
    from mesascope.tasks.text import Corpus

    ahead, _ = tyro.cli(
        _Corpus, args=[a for a in arguments if a not in ("-h", "--help")], return_unknown_args=True
    )
    if ahead.data is None:
        raise ValueError(
            "data: say where the prepared corpus lies (--data DIR); `mesascope lm prepare` makes one."
        )
    default = language_preset(name, Corpus(ahead.data).task, ahead.size)
    options = make_dataclass(
        "Options",
        [
            ("command", Annotated[TrainLanguageModel, tyro.conf.arg(name="")]),
            ("config", Annotated[LanguageConfig, tyro.conf.arg(name="")]),
        ],
    )
    command = TrainLanguageModel(preset=name, data=ahead.data, size=ahead.size)
    given = tyro.cli(
        options,
        prog=f"mesascope lm train {name}",
        description=TrainLanguageModel.__doc__,
        args=[name, *arguments],
        default=options(command=command, config=default),
        config=(tyro.conf.AvoidSubcommands,),
    )
    config, train = given.config, given.config.train
    if train.steps != default.train.steps and train.optimizer.rate == default.train.optimizer.rate:
        stretched = with_rate(default, steps=train.steps).train.optimizer.rate
        optimizer = replace(train.optimizer, rate=stretched)
        config = replace(config, train=replace(train, optimizer=optimizer))
    given.command.run(config)


@dataclass(frozen=True, kw_only=True)
class _Corpus:
    data: Path | None = None
    size: Literal["paper", "gpu", "cpu"] = "gpu"
