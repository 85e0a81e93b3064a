"""``AutoResume``: saves the run's state and resumes from it, exactly."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_resilience._files import clean_temporaries
from lightning_resilience.agreement import Event, Needs
from lightning_resilience.checkpoint import durable, resume
from lightning_resilience.session import FitSession, SessionCallback, session_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)

_SAVE = "save"


class AutoResume(SessionCallback):
    """Makes ``trainer.fit()`` go on where the run stood, bitwise exactly, however its last process ended.

    State is saved into the run directory between batches, when all that was due after a batch (validation, scheduler
    steps, early stopping) has happened, and never in the middle of an accumulation window. It holds what Lightning
    saves and what it does not: the random states of every rank, the place in the data, the metrics of the epoch, the
    order in which DDP reduces. ``fit()`` then resumes from the newest checkpoint that can be verified; one that cannot
    is moved to ``quarantine`` with the reason, and the next older is taken. A fit that is finished is restored, not
    trained again, unless ``max_epochs`` or ``max_steps`` has been raised.

    An explicit ``fit(ckpt_path=...)`` wins. Only if the fit has begun with the same ``ckpt_path`` before, the run goes
    on from its own newer checkpoint: a restarted script must not fall back to where it once began.

    While this callback is in use, Lightning's own checkpoints (``ModelCheckpoint``, ``trainer.save_checkpoint``) are
    written atomically, to disk, and with a checksum too. Whenever ``ModelCheckpoint`` saves, the state to resume from
    is saved at the next boundary.

    Args:
        run_dir: The run directory on storage that all nodes share. Default: the launcher's, else ``resilience`` in the
            Trainer's ``default_root_dir``.
        every_n_train_steps: Also save whenever ``trainer.global_step`` is a multiple of this. Default: no.
        train_time_interval: Also save when this much time has passed since the last save; a number is in seconds, and
            YAML takes ``0:15:00``. Default: 15 minutes, as in NeMo's ``default_log`` recipe; ``None``: no.
        keep: How many checkpoints to keep; at least 2, so that one is left when the newest turns out to be damaged.

    Raises:
        ValueError: If an argument makes no sense.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | float | None = timedelta(minutes=15),
        keep: int = 2,
    ) -> None:
        super().__init__()
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(f"every_n_train_steps must be at least 1, not {every_n_train_steps}; None is off.")
        if isinstance(train_time_interval, (int, float)):
            train_time_interval = timedelta(seconds=train_time_interval)
        if train_time_interval is not None and train_time_interval <= timedelta(0):
            raise ValueError(f"train_time_interval must be positive, not {train_time_interval}; None is off.")
        if keep < 2:
            raise ValueError(f"keep must be at least 2, not {keep}: the newest checkpoint may turn out to be damaged.")
        self.run_dir = run_dir
        self.every_n_train_steps = every_n_train_steps
        self.train_time_interval = train_time_interval
        self.keep = keep

    def joined(self, session: FitSession) -> None:
        """Offers the checkpoint to resume from, and saves."""
        self._saving = _Saving(self, session)
        session.choose_checkpoint = self._saving.choose
        session.save_final = True
        session.handlers[_SAVE] = self._saving.save_for
        session.at_leave.append(lambda: delattr(self, "_saving"))

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to the fit in progress."""
        return {key: value for key, value in vars(self).items() if key != "_saving"}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Completes the resume and starts saving."""
        super().on_train_start(trainer, pl_module)
        if session_of(trainer, self):
            self._saving.start()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Somebody else saves: what the run resumes from follows at the next boundary."""
        if (session := session_of(trainer, self)) and not session.saving:
            self._saving.due = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes what the final state has made superfluous."""
        if (session := session_of(trainer, self)) and trainer.is_global_zero:
            resume.retain(session.fit.checkpoints, self.keep)


class _Saving:
    """What ``AutoResume`` does in one fit."""

    def __init__(self, settings: AutoResume, session: FitSession) -> None:
        self.settings = settings
        self.session = session
        self.due = False
        self._saved_step = 0
        self._asked = False
        interval = settings.train_time_interval
        # One clock decides for all ranks.
        self._interval_s = interval.total_seconds() if interval is not None and session.rank == 0 else float("inf")
        self._next = float("inf")

    def start(self) -> None:
        self._saved_step = self.session.trainer.global_step
        self._next = time.monotonic() + self._interval_s
        self.session.at_boundary.append(self.at_boundary)

    def at_boundary(self, clean: bool) -> None:
        if time.monotonic() >= self._next and not self._asked:
            self._asked = True
            self.session.agreement.request(_SAVE, {"reason": "interval"}, Needs.CLEAN | Needs.TRAINING)
        if not clean:
            return
        if self.due:
            self.save("follows ModelCheckpoint")
        elif (n := self.settings.every_n_train_steps) is not None:
            step = self.session.trainer.global_step
            if step % n == 0 and step != self._saved_step:
                self.save("every_n_train_steps")

    def save_for(self, event: Event) -> None:
        self.save(str(event.payload["reason"]))

    def save(self, reason: str) -> None:
        session = self.session
        self.due = self._asked = False
        self._saved_step = session.trainer.global_step
        self._next = time.monotonic() + self._interval_s
        if session.save(reason) is not None and session.trainer.is_global_zero:
            resume.retain(session.fit.checkpoints, self.settings.keep)

    def choose(self, explicit: str | None) -> tuple[Path, dict[str, Any] | None] | None:
        """The checkpoint that all ranks have verified and loaded, newest first."""
        session = self.session
        trainer = session.trainer
        zero = trainer.is_global_zero
        if explicit is not None and self._is_users_choice(explicit):
            if zero and resume.checkpoints(session.fit.checkpoints):
                log.info("The checkpoints in %s are not used: fit(ckpt_path=%r) wins.", session.fit.path, explicit)
            return None
        if zero:
            clean_temporaries(session.fit.checkpoints)
        finished = session.finished_before()
        candidates = self._candidates(finished) if zero else iter(())
        while True:
            path = trainer.strategy.broadcast(next(candidates, None))
            if path is None:
                break
            loaded, error = self._load(path)
            if trainer.strategy.reduce_boolean_decision(error is None, all=True):
                # Without its final state a finished fit is resumed from an older one, and finished again.
                self._restored(path, finished and resume.is_final(path))
                return path, loaded
            if error is not None:
                log.warning("Rank %d cannot read %s (%s).", session.rank, path, error)
            if zero:
                self._quarantine(path, error or durable.CorruptCheckpoint(f"{path}: a rank could not read it"))
        if zero:
            if finished or session.previous_outcome is not None:
                log.warning("No checkpoint in %s can be used; this fit starts from the beginning.", session.fit.path)
            else:
                log.info("Nothing to resume from in %s: a fresh start.", session.fit.path)
            session.ledger.record("fresh", fit=session.index)
        return None

    def _is_users_choice(self, explicit: str) -> bool:
        if (self.session.fit.fingerprint or {}).get("ckpt_path") == explicit:
            return False  # where this fit once began: it goes on from its own newer checkpoint
        # ckpt_path="last" and "hpc" mean "resume": Lightning has made paths of them before it calls us.
        means_resume = Path(explicit).stem.startswith(("last", "hpc_ckpt_"))
        return not (means_resume and resume.checkpoints(self.session.fit.checkpoints))

    def _candidates(self, finished: bool) -> Iterator[Path]:
        """The checkpoints that verify, best first."""
        directory, outcome = self.session.fit.checkpoints, self.session.previous_outcome
        expected = {"fit": self.session.index}
        # max_steps may end a fit in the middle of an epoch, whose end Lightning then makes up. When max_steps has been
        # raised, the longer run goes on exactly from a state before that end; from the end itself only if there is
        # none.
        last = not finished and outcome is not None and outcome.reason == "max_steps"
        later = []
        for path in resume.newest_verified(directory, expected, self._quarantine):
            if last and resume.is_final(path):
                later.append(path)
            else:
                yield path
        yield from later

    def _load(self, path: Path) -> tuple[dict[str, Any] | None, durable.CorruptCheckpoint | None]:
        if path.is_dir():
            return None, None  # the strategy loads its own shards
        try:
            return durable.load(path), None
        except durable.CorruptCheckpoint as error:
            return None, error
        except OSError as error:
            return None, durable.CorruptCheckpoint(f"{path} cannot be read: {error}")

    def _quarantine(self, path: Path, error: durable.CorruptCheckpoint) -> None:
        log.warning("Checkpoint rejected: %s. The next older one is tried.", error)
        self.session.ledger.record("quarantined", fit=self.session.index, path=str(path), reason=str(error))
        try:
            durable.quarantine(path, self.session.fit.quarantine, str(error))
        except OSError as failure:
            log.warning("%s could not be moved to quarantine (%s); it is left where it is.", path, failure)

    def _restored(self, path: Path, finished: bool) -> None:
        session = self.session
        step = resume.step_of(path)
        if session.trainer.is_global_zero:
            session.ledger.record("resumed", fit=session.index, step=step, path=str(path), tier="global")
            if finished:
                log.info(
                    "This fit finished at step %d before; its final state is restored and it is not trained again. "
                    "To train more, raise the max_epochs or max_steps that ended it; to train anew, use another run "
                    "directory.",
                    step,
                )
            else:
                log.info("Resuming from step %d (%s).", step, path)
        if finished:
            session.trainer.should_stop = True
