"""Metrics to TensorBoard and Weights & Biases, for those who have them: see `runs.Sink`."""

from collections.abc import Mapping
from pathlib import Path

from mesascope import store
from mesascope.runs import RunError
from mesascope.training import Config


class TensorBoard:
    """Events in the run's directory: `tensorboard --logdir runs`."""

    def __init__(self, path: Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise RunError("tensorboard: needs `pip install mesascope[tensorboard]`.") from error
        self.writer = SummaryWriter(str(path / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One point per metric."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


class WeightsAndBiases:
    """A run of the given project, under the name of ours; going on with ours goes on with it."""

    def __init__(self, project: str, path: Path, config: Config):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise RunError("wandb: needs `pip install mesascope[wandb]`.") from error
        path.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=project,
            name=path.name,
            id=path.name,
            resume="allow",
            dir=str(path),
            config=store.to_dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One point per metric."""
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Tell it that this is all."""
        self.run.finish()
