"""Regular saves: when the state of a fit is saved to the run directory, and how many checkpoints are kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from lightning_resilience._lightning import lightning_strategies
from lightning_resilience.agreement_protocol import Event, Needs
from lightning_resilience.checkpoint import resume
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession

log = logging.getLogger("lightning_resilience.callbacks.auto_resume")  # users configure the callback's logger

_SAVE = "save"


@dataclass(frozen=True)
class RegularSaveOptions:
    """Options of ``AutoResume``, validated there."""

    every_n_train_steps: int | None
    train_time_interval: timedelta | None
    keep: int
    async_save: bool


class RegularSaves(Participant):
    """Has one fit resume from the checkpoints of the run, and saves them when they are due."""

    def __init__(self, session: FitSession, options: RegularSaveOptions) -> None:
        self.session = session
        self._options = options
        session.selector.use_global_tier()
        self.due = False
        self._saved_step = 0
        self._requested = False
        self._postponed = ""
        interval = options.train_time_interval
        # One clock decides for all ranks.
        self._interval_s = interval.total_seconds() if interval is not None and session.fit.rank == 0 else float("inf")
        self._next = float("inf")

    def start(self) -> None:
        """Logs how it saves, and starts the clock."""
        trainer = self.session.fit.trainer
        traits = lightning_strategies.traits_of(trainer.strategy)
        if self._options.async_save and trainer.is_global_zero and not traits.can_save_async:
            log.info("%s saves with collectives: training waits for its saves.", type(trainer.strategy).__name__)
        self.after_rollback()

    def after_rollback(self) -> None:
        """Forgets what was due before the rollback."""
        self.due = self._requested = False
        self._postponed = ""
        self._saved_step = self.session.fit.trainer.global_step
        self._next = time.monotonic() + self._interval_s

    def save_soon(self) -> None:
        """Saves at the next boundary, because ``ModelCheckpoint`` saves now."""
        self.due = True

    def at_boundary(self, step: int, may_save: Callable[[], bool]) -> None:
        """Saves if a save is due."""
        if time.monotonic() >= self._next and not self._requested:
            self._requested = True
            self.session.fit.agreement.request(_SAVE, {"reason": "interval"}, Needs.CLEAN | Needs.TRAINING)
        reason = self._postponed or ("follows ModelCheckpoint" if self.due else "")
        # If the state could not be saved at the very step, a later boundary saves it.
        if not reason and (n := self._options.every_n_train_steps) is not None and step // n > self._saved_step // n:
            reason = "every_n_train_steps"
        if reason and may_save():
            self.save(reason)

    def batch_done(self) -> None:
        """Waits for the copy in progress, so that hooks at the end of the batch cannot change its tensors."""
        self.session.saver.fence()

    def on_event(self, event: Event) -> None:
        """Saves because the interval is over, or a snapshot was invalidated."""
        if event.kind != _SAVE:
            return
        if self.session.fit.saves_paused:
            self._postponed = str(event.payload["reason"])
        else:
            self.save(str(event.payload["reason"]))

    def after_final_save(self) -> None:
        """Removes older checkpoints."""
        self.retain(self.session.fit.trainer.global_step)

    def save(self, reason: str) -> None:
        """Saves at this boundary, or at the first one after bad steps."""
        session = self.session
        if session.saver.waits():
            self._postponed = reason
            return
        self.due = self._requested = False
        self._postponed = ""
        self._saved_step = session.fit.trainer.global_step
        self._next = time.monotonic() + self._interval_s
        if self._options.async_save:
            session.saver.save_async(reason, partial(self.retain, self._saved_step), self._again)
        elif session.saver.save(reason) is not None and session.fit.trainer.is_global_zero:
            self.retain(self._saved_step)

    def retain(self, step: int) -> None:
        """Removes checkpoints up to this step, beyond ``keep``."""
        resume.retain(self.session.fit.folder.checkpoints, self._options.keep, step)

    def _again(self) -> None:
        self.session.fit.agreement.request(_SAVE, {"reason": "again"}, Needs.CLEAN | Needs.TRAINING)
