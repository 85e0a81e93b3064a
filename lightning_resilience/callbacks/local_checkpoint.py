"""``LocalCheckpoint``: saves the state of every rank to its own node every few seconds, in the background."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from lightning_resilience._arguments import checked, duration
from lightning_resilience._lightning import lightning_callbacks
from lightning_resilience.callbacks.auto_resume import AutoResume
from lightning_resilience.fit.joining import SessionCallback, session_of
from lightning_resilience.fit.local_saves import LocalSaveOptions, LocalSavePolicy, Unusable
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)


class LocalCheckpoint(SessionCallback):
    """Saves the state of every rank to memory or storage of its own node every few seconds.

    Parameters and optimizer state are copied while the next batch is computed, then verified, written and replicated in
    the background. On a restart ``fit()`` resumes from the newest state that all ranks can verify, local or global.
    A file that does not verify is quarantined; its copy, an older local checkpoint or the newest global one is used.

    In DDP a node keeps one copy of the state that all ranks share, split among its ranks, and the state that only one
    rank has. A checkpoint counts only if the digests of the shared state agree (if they do not,
    :class:`~lightning_resilience.ReplicaCheck` rolls the run back). Strategies that shard (FSDP2, tensor parallelism)
    save the shards; nothing is gathered. With several nodes each rank's own file is also copied to another node.

    A local checkpoint can be used only by the strategy that saved it and by the same number of ranks, unless steps can
    stay the same with another number (plain DDP). Otherwise the run resumes from its newest global checkpoint
    (:class:`~lightning_resilience.AutoResume`). Local checkpoints are removed when the run's final state is saved.

    Args:
        dir: Folder on storage of the node, in which ``local_ckpt-<user id>/<host>`` is created. Default: the folder of
            ``launch --local-dir``, otherwise node memory (``/dev/shm``), which survives the processes but not the node.
        every_n_train_steps: Save whenever ``trainer.global_step`` is a multiple of this.
        train_time_interval: Save when this much time has passed since the last save: a ``timedelta`` or seconds.
            Default: chosen from the measured cost of a save and the rate of failures (arXiv 2410.18124), unless
            ``every_n_train_steps`` is given; the first save comes after three steps, then intervals double up to the
            chosen one.
        keep: Number of complete local checkpoints to keep, at least 2: the newest may turn out to be damaged. Storage
            must hold one more, which is being written.
        replication: Whether to keep copies on other nodes; ``"auto"``: if there are several nodes.
        replication_factor: Number of nodes that hold a rank's files, its own included.
        replication_jump: Distance in ranks between two ranks that hold copies of each other's files. Default: the
            number of ranks of a node.
        probation_steps: Number of optimizer steps after a resume. If training diverges within them (as ``NaNGuard``
            finds), this counts against the checkpoint that was loaded.
        async_save: Write in the background. ``False``: the training waits until the checkpoint is complete on all
            nodes. ``"auto"``: as the ``AutoResume`` of the same Trainer does.
        run_dir: The run directory, on storage that all nodes share. Default: ``resilience`` in the Trainer's
            ``default_root_dir``. Under ``launch``, its ``--run-dir`` takes precedence.

    Raises:
        ValueError: If an argument makes no sense, or the checkpoints do not fit into the storage.

    Example::

        callbacks = [LocalCheckpoint(train_time_interval=timedelta(seconds=30)), AutoResume(run_dir="runs/gpt")]
        trainer = Trainer(callbacks=callbacks, max_epochs=2)
        trainer.fit(model, data)
    """

    _same_as = ("LocalCheckpointCallback",)

    @checked
    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | float | None = None,
        keep: int = 2,
        replication: bool | Literal["auto"] = "auto",
        replication_factor: int = 2,
        replication_jump: int | None = None,
        probation_steps: int = 10,
        async_save: bool | Literal["auto"] = True,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if every_n_train_steps is not None and train_time_interval is not None:
            raise ValueError("every_n_train_steps and train_time_interval are mutually exclusive: give only one.")
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(f"every_n_train_steps must be at least 1, not {every_n_train_steps}.")
        if train_time_interval is not None:
            train_time_interval = duration("train_time_interval", train_time_interval)
            if train_time_interval <= timedelta(0):
                raise ValueError(
                    f"train_time_interval must be positive, not {train_time_interval.total_seconds():g} s."
                )
        if keep < 2:
            raise ValueError(f"keep must be at least 2, not {keep}: the newest state may turn out to be damaged.")
        if replication_factor < 2:
            raise ValueError(
                f"replication_factor must be at least 2 (it counts the original), not {replication_factor}."
            )
        if replication_jump is not None and replication_jump < 1:
            raise ValueError(f"replication_jump must be at least 1, not {replication_jump}.")
        if probation_steps < 0:
            raise ValueError(f"probation_steps must not be negative, not {probation_steps}.")
        self.dir = dir
        self.every_n_train_steps = every_n_train_steps
        self.train_time_interval = train_time_interval
        self.keep = keep
        self.replication = replication
        self.replication_factor = replication_factor
        self.replication_jump = replication_jump
        self.probation_steps = probation_steps
        self.async_save = async_save
        self.run_dir = run_dir

    def _participate(self, session: FitSession) -> Participant | None:
        """Finds the place for the local states, and offers the existing ones for the resume."""
        waits = self._waits(session.fit.trainer)
        options = self._options(LocalSaveOptions, waits=waits, optional=self._injected)
        try:
            return LocalSavePolicy(session, options)
        except Unusable as problem:  # on every rank
            if not self._injected:
                raise ValueError(str(problem)) from None
            if session.fit.rank == 0:
                log.warning("LocalCheckpoint is off: %s.", problem)
            return None

    def _waits(self, trainer: Trainer) -> bool:
        if self.async_save != "auto":
            return not self.async_save
        return any(
            isinstance(each, AutoResume) and not each.async_save for each in lightning_callbacks.callbacks(trainer)
        )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes the local states of a finished fit."""
        if session_of(trainer, self) and isinstance(policy := self._participant, LocalSavePolicy):
            policy.clear()
