"""Metrics to TensorBoard and Weights & Biases, for those who have them: see `runs.Sink`."""

from collections.abc import Mapping

from mesascope import store
from mesascope.runs import Run, RunError


class TensorBoard:
    """Events in the run's directory: `tensorboard --logdir runs`."""

    def __init__(self, run: Run, step: int):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise RunError("tensorboard: needs `pip install mesascope[tensorboard]`.") from error
        self.writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One point per metric."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


class WeightsAndBiases:
    """A run of the given project, under the name of ours; going on with ours goes on with it."""

    def __init__(self, project: str, run: Run, step: int):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise RunError("wandb: needs `pip install mesascope[wandb]`.") from error
        # A run begun afresh is another run there: steps cannot go back.
        begun = run.provenance["started"].replace(":", "").replace("+", "_")
        self.run = wandb.init(
            project=project,
            name=run.path.name,
            id=f"{run.path.name}-{begun}",
            resume="allow",
            dir=str(run.path),
            config=store.to_dict(run.config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One point per metric."""
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Tell it that this is all."""
        self.run.finish()
