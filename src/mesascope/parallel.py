"""One run over all devices of all processes: every batch is cut over them, and each holds all weights.

The first process leads: it alone reads and writes the run and decides when to evaluate, save and stop. Before each of
its calls it says which; the others follow, so that all run the same programs at the same time. With the variables

    JAX_COORDINATOR_ADDRESS=host:1234 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 mesascope train PRESET

(or with `--data-parallel` started by Slurm's `srun`, or by the `mpirun` of Open MPI up to 4, which set their own) in
every process, `join` makes them one; without, a process has its own devices only. Only the first needs the directory of
runs. The result is that of one device with the same batches, but for the order of sums over them. If any process dies,
the others end, and the same command goes on from the last checkpoint. `mesascope lm train` is the same; each process
reads from its copy of the corpus what its own devices work on.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from mesascope.journal import interrupts
from mesascope.language.training import LanguageConfig, LanguageTrainer
from mesascope.runs import Run, folder_of
from mesascope.runs import fit as fit_alone
from mesascope.training import Advanced, Config, Trainer, TrainState, everywhere

END, START, PLACE, ADVANCE, EVALUATE, EVALUATE_FINALLY = range(6)
# What JAX itself looks for.
CLUSTERS = ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri")
SECONDS_WITHOUT_A_SIGN = 100


def is_asked_for() -> bool:
    """Whether the environment makes this process one of several by JAX's own variables."""
    return "JAX_COORDINATOR_ADDRESS" in os.environ


def join() -> None:
    """Make this process one of several, if the environment says so. Before anything else asks JAX for devices."""
    if is_asked_for():
        try:
            number, count = (int(os.environ[name]) for name in ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"))
        except (KeyError, ValueError) as error:
            raise ValueError(
                "data_parallel: with JAX_COORDINATOR_ADDRESS, expected numbers in JAX_NUM_PROCESSES and JAX_PROCESS_ID."
            ) from error
        jax.distributed.initialize(
            num_processes=count,
            process_id=number,
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=SECONDS_WITHOUT_A_SIGN,
        )
    elif any(name in os.environ for name in CLUSTERS):
        jax.distributed.initialize(heartbeat_timeout_seconds=SECONDS_WITHOUT_A_SIGN)


def fit(
    config: Config | LanguageConfig,
    *,
    data: str | Path | None = None,
    runs: str | Path = "runs",
    **options: Any,
) -> Run:
    """`runs.fit` over all devices of all processes, each of which must call this with the same configuration."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    trainer = (
        LanguageTrainer(config, data, mesh) if isinstance(config, LanguageConfig) else Trainer(config, mesh)
    )
    if jax.process_index() != 0:
        return Followed(folder_of(config, runs).path, to_its_end=_follow(trainer))
    leader, finished = Leader(trainer), False
    try:
        run = fit_alone(config, data=data, runs=runs, trainer=cast(Trainer, leader), **options)
        finished = run.finished
    finally:
        leader.end(finished)
    return run


@final
@dataclass(frozen=True)
class Followed(Run):
    """A run that another process led and wrote: this machine need not have its files.

    Attributes:
        to_its_end: whether it was trained so.
    """

    to_its_end: bool = False

    @property
    def finished(self) -> bool:
        return self.to_its_end


@final
class Leader:
    """A trainer that tells the other processes what it does. See `Trainer`."""

    def __init__(self, trainer: Trainer | LanguageTrainer):
        self.trainer = trainer

    @property
    def config(self) -> Config | LanguageConfig:
        return self.trainer.config

    @property
    def devices(self) -> int:
        return self.trainer.devices

    @property
    def shapes(self) -> TrainState:
        return self.trainer.shapes

    def start(self) -> TrainState:
        self._tell(START)
        return self.trainer.start()

    def place(self, state: TrainState) -> TrainState:
        self._tell(PLACE)
        return self.trainer.place(multihost_utils.broadcast_one_to_all(jax.tree.map(np.asarray, state)))

    def advance(self, state: TrainState, steps: int) -> Advanced:
        # What `fit` keeps book of itself; all else is with every process as the last call left it.
        loss_sum = np.asarray(state.loss_sum)
        self._tell(ADVANCE, steps, loss_sum)
        return self.trainer.advance(_with_sum(self.trainer, state, loss_sum), steps)

    def measure(self, models: Any) -> dict[str, np.ndarray]:
        self._tell(EVALUATE)
        return self.trainer.measure(models)

    def result(self, models: Any) -> dict[str, Any]:
        self._tell(EVALUATE_FINALLY)
        return self.trainer.result(models)

    def end(self, finished: bool) -> None:
        """The others may go, and know whether the run has been trained to its end."""
        self._tell(END, int(finished))

    def _tell(self, what: int, steps: int = 0, loss_sum: np.ndarray | None = None) -> None:
        _heard(self.config, what, steps, loss_sum)


def _heard(
    config: Config | LanguageConfig, what: int = END, steps: int = 0, loss_sum: np.ndarray | None = None
) -> tuple[int, int, np.ndarray]:
    """What the leader says; the arguments are what it says, and nobody else's."""
    loss_sum = np.zeros(config.train.seeds, np.float32) if loss_sum is None else loss_sum
    order, loss_sum = multihost_utils.broadcast_one_to_all((np.array([what, steps], np.int32), loss_sum))
    return int(order[0]), int(order[1]), np.asarray(loss_sum)


def _with_sum(trainer: Trainer | LanguageTrainer, state: TrainState, loss_sum: np.ndarray) -> TrainState:
    return state._replace(loss_sum=everywhere(loss_sum, trainer._everywhere))


def _follow(trainer: Trainer | LanguageTrainer) -> bool:
    """Do as the leader does, until it ends; whether the run has then been trained to its end."""
    nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), trainer.shapes)
    state: TrainState | None = None
    # Ctrl-C reaches every process; the leader decides what then.
    with interrupts():
        while True:
            what, steps, loss_sum = _heard(trainer.config)
            if what == END:
                return bool(steps)
            if what == START:
                state = trainer.start()
            elif what == PLACE:
                state = trainer.place(multihost_utils.broadcast_one_to_all(nothing))
            elif what == ADVANCE:
                assert state is not None
                state = trainer.advance(_with_sum(trainer, state, loss_sum), steps).state
            else:
                assert state is not None
                measure = trainer.measure if what == EVALUATE else trainer.result
                measure(state.models)
