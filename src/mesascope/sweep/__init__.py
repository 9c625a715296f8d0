"""Many experiments: pieces of work that need nothing of each other, placed on processes, a Ray cluster or Slurm."""

from mesascope.sweep.driver import Outcome, report, status, sweep
from mesascope.sweep.executors import executor
from mesascope.sweep.pieces import FigurePiece, Piece, TrainingRun, figure_pieces, read_spec

__all__ = [
    "FigurePiece",
    "Outcome",
    "Piece",
    "TrainingRun",
    "executor",
    "figure_pieces",
    "read_spec",
    "report",
    "status",
    "sweep",
]
