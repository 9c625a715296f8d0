"""`mesascope`: the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class BenchOps:
    """Speed, memory and accuracy of the mesa operation, as ratios within one run."""

    small: bool = False
    """Small shapes: about a minute."""
    gpu: bool = False
    """The larger shapes, on a GPU."""
    repeats: int = 15
    """Timed rounds; each round times every op once."""
    out: Path | None = None
    """Also write the numbers to this JSON file."""

    def run(self) -> None:
        from mesascope.bench import bench_ops

        bench_ops(small=self.small, gpu=self.gpu, repeats=self.repeats, out=self.out)


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
class Bench:
    """Benchmarks."""

    what: (
        Annotated[BenchOps, tyro.conf.subcommand("ops")]
        | Annotated[BenchAccuracy, tyro.conf.subcommand("accuracy")]
    )

    def run(self) -> None:
        self.what.run()


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Regenerate what the project claims. For now: the operation's speed and accuracy at small shapes."""

    def run(self) -> None:
        BenchOps(small=True, repeats=7).run()


Command = (
    Annotated[Bench, tyro.conf.subcommand("bench")] | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
)


def main() -> None:
    tyro.cli(Command, prog="mesascope", description=__doc__, config=(tyro.conf.OmitSubcommandPrefixes,)).run()


if __name__ == "__main__":
    main()
