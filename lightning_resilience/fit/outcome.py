"""The outcome of a fit: how it ended before, and how it ends now."""

from __future__ import annotations

import logging
from typing import Any

from lightning_resilience._lightning import lightning_limits
from lightning_resilience.fit.context import FitContext
from lightning_resilience.run.run_directory import Outcome, Status

log = logging.getLogger(__name__)

ENDS_APART = "ends_apart"
"""In an outcome: whether a longer fit would not pass through that end."""

END_IS_MISSING = "end_is_missing"
"""In an outcome: changes by ``on_train_end`` could not be saved."""

ASKED = "should_stop"
"""In an outcome: ``trainer.should_stop`` has ended the fit."""


class FitOutcome:
    """The recorded end of one fit."""

    def __init__(self, fit: FitContext) -> None:
        self.fit = fit
        self.has_trained = False
        """Whether this attempt has trained a batch."""

    @property
    def had_finished(self) -> bool:
        """Whether an earlier attempt has finished this fit, perhaps with a lower limit."""
        return self.fit.previous_outcome is not None and self.fit.previous_outcome.status == "finished"

    def finished_before(self) -> bool:
        """Whether an earlier attempt finished this fit, and its limit was not raised."""
        outcome = self.fit.previous_outcome
        if outcome is None or not self.had_finished or outcome.details.get(END_IS_MISSING):
            return False
        return self.ends_there(outcome.reason, outcome.details)

    def ends_there(self, by: str, limits: dict[str, Any]) -> bool:
        """Whether the fit, with its present limits, still ends where it ended before.

        Args:
            by: The limit that ended it.
            limits: The limits of that time.
        """
        if by == ASKED:  # the cause is unknown
            return not self.is_a_limit_raised(limits)
        return not _is_raised(limits.get(by), lightning_limits.limits(self.fit.trainer).get(by))

    def what_ended_it(self) -> str:
        """The limit that must be raised to train a finished fit further, in words."""
        reason = self.fit.previous_outcome.reason if self.fit.previous_outcome is not None else ASKED
        return "max_epochs, max_steps, max_time or a patience" if reason == ASKED else f"the {reason} that ended it"

    def is_a_limit_raised(self, before: dict[str, Any]) -> bool:
        """Whether a limit is larger now than ``before``."""
        return any(
            _is_raised(before.get(name), limit) for name, limit in lightning_limits.limits(self.fit.trainer).items()
        )

    def write(self, status: Status, reason: str, details: dict[str, Any] | None = None) -> None:
        """Writes how this fit ended, if this attempt still owns the run; logs errors."""
        if self.fit.run.attempt != self.fit.token:
            return
        before = self.fit.previous_outcome.details if self.fit.previous_outcome is not None else {}
        details = {name: before[name] for name in (ENDS_APART,) if name in before} | (details or {})
        outcome = Outcome(status, reason, self.fit.trainer.global_step, self.fit.token, details=details)
        try:
            if self.had_finished and status != "finished" and not self.has_trained:
                self.fit.folder.failed_start = outcome  # its final state still counts
            else:
                self.fit.folder.outcome = outcome
        except OSError as error:
            log.error("The outcome of this fit (%s: %s) could not be written: %s", status, reason, error)

    def is_halted(self) -> bool:
        """Whether a rank of this attempt has halted the run; the other ranks have only lost a peer."""
        outcomes = (self.fit.folder.outcome, self.fit.folder.failed_start)
        return any(each is not None and each.status == "halted" and each.attempt == self.fit.token for each in outcomes)


def _is_raised(before: Any, now: Any) -> bool:
    """Whether a limit is larger than before."""
    return isinstance(before, (int, float)) and before >= 0 and (now is None or now < 0 or now > before)
