"""``AutoResume``: saves the state of the run, and resumes exactly from it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_resilience._arguments import checked, duration
from lightning_resilience.fit.joining import SessionCallback, session_of
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.regular_saves import RegularSaveOptions, RegularSaves
from lightning_resilience.fit.session import FitSession

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class AutoResume(SessionCallback):
    """Saves the state of a run and resumes ``fit()`` exactly where it left off, however the last process ended.

    The state is saved into the run directory between batches, when everything due after a batch (validation, scheduler
    steps, early stopping) has happened, and never within an accumulation window. It holds what Lightning saves, and the
    random states of every rank, the position in the data, the metrics of the epoch and the order in which DDP reduces.
    ``fit()`` resumes from the newest checkpoint that verifies; a checkpoint that does not is moved to ``quarantine``
    with the reason. A finished fit is restored, not trained again, unless the limit that ended it has been raised:
    ``max_epochs``, ``max_steps``, ``max_time`` or the patience of an ``EarlyStopping``.

    An explicit ``fit(ckpt_path=...)`` takes precedence, and earlier checkpoints of the run are set aside in
    ``quarantine``. If it is the path from which the fit was last started, or the newest file that a ``ModelCheckpoint``
    of this fit has saved in its folder, the run resumes from its own newest checkpoint instead.

    While this callback is in use, Lightning's own checkpoints (``ModelCheckpoint``, ``trainer.save_checkpoint``) are
    also written atomically, to disk, and with a checksum. Whenever ``ModelCheckpoint`` saves, the state to resume from
    is saved at the next boundary.

    Args:
        run_dir: The run directory, on storage that all nodes share. Default: ``resilience`` in the Trainer's
            ``default_root_dir``. Under ``launch``, its ``--run-dir`` takes precedence.
        every_n_train_steps: Also save whenever ``trainer.global_step`` is a multiple of this.
        train_time_interval: Also save when this much time has passed since the last save: a ``timedelta`` or seconds,
            in YAML ``0:15:00``; ``None``: no such saves. Default: 15 minutes, as in NeMo's ``default_log`` recipe.
        keep: Number of checkpoints to keep, at least 2: the newest may turn out to be damaged.
        async_save: Write in the background, from a copy made while the next batch is computed. ``False``: the training
            waits until the checkpoint is on disk. Needs memory for one copy of the state on rank 0, or of its shards on
            every rank (``ModelParallelStrategy``); where there is too little, the training waits, and a log line says
            so.

    Raises:
        ValueError: If an argument makes no sense.

    Example::

        trainer = Trainer(callbacks=[AutoResume(run_dir="runs/gpt", every_n_train_steps=500)], max_epochs=2)
        trainer.fit(model, data)  # started again with the same run_dir, it resumes
    """

    @checked
    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | float | None = timedelta(minutes=15),
        keep: int = 2,
        async_save: bool = True,
    ) -> None:
        super().__init__()
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(f"every_n_train_steps must be at least 1, not {every_n_train_steps}; None is off.")
        if train_time_interval is not None:
            train_time_interval = duration("train_time_interval", train_time_interval)
            if train_time_interval <= timedelta(0):
                raise ValueError(
                    f"train_time_interval must be positive, not {train_time_interval.total_seconds():g} s; None is off."
                )
        if keep < 2:
            raise ValueError(f"keep must be at least 2, not {keep}: the newest checkpoint may turn out to be damaged.")
        self.run_dir = run_dir
        self.every_n_train_steps = every_n_train_steps
        self.train_time_interval = train_time_interval
        self.keep = keep
        self.async_save = async_save

    def _participate(self, session: FitSession) -> Participant:
        return RegularSaves(session, self._options(RegularSaveOptions))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Has the run's own checkpoint follow at the next boundary when another callback saves."""
        session, saves = session_of(trainer, self), self._participant
        if session and not session.saver.is_dumping and isinstance(saves, RegularSaves):
            saves.save_soon()
