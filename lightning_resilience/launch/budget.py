"""How often a run may fail: computed from the ledger alone, so that a launcher that starts again knows it too.

Three limits hold at once. *Successive failures without progress* are counted since the highest verified step ever
reached last advanced: a worker group is restarted inside the job ``in_job_restarts`` times, then the job is retried
``job_retries`` times, then the run gives up. *The same failure* (see :class:`~.failures.Failure`) may come as often as
that makes together: if it is back at the same step from the same checkpoint, then whatever advanced meanwhile (another
fit, or a checkpoint that could not be read again) has not helped against it. That count starts anew when a step of its
fit beyond the one at which it came is verified. A checkpoint nearer to that step is progress: from there it is another
failure. *Failures per day* are counted whatever progress there was, so that a leak that crashes every minute and saves
in between does not restart for ever. A preemption is not a failure, and it refills nothing. A new launch of a run
that was given up starts with a fresh budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_resilience.run.history import History

_DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class Decision:
    """What to do next.

    Args:
        action: ``start`` the workers (again) as the same job, ``retry`` as a new job, or ``give_up``.
        max_restarts: How many restarts inside the job the budget has left after that.
        job_attempt: Number of the job retry: 0 is the first job since the last progress.
        reason: A clause for the log.
    """

    action: Literal["start", "retry", "give_up"]
    max_restarts: int
    job_attempt: int
    reason: str


@dataclass(frozen=True)
class Budget:
    """The limits.

    Args:
        in_job_restarts: Successive failures without progress after which the workers are restarted inside the job.
        job_retries: How often the job is retried after those.
        max_failures_per_day: Failures within 24 hours that are recovered from, with or without progress.
    """

    in_job_restarts: int = 3
    job_retries: int = 2
    max_failures_per_day: int = 50

    def decide(self, history: History, now: float) -> Decision:
        """What the history of a run allows next.

        Args:
            history: The history.
            now: Seconds since the epoch.
        """
        counts = history.failures
        again = f", {counts.recurrence}" if counts.recurrence else ""
        today = failures_today(history, now)
        if today > self.max_failures_per_day:
            reason = (
                f"{today} failures within 24 hours are more than --max-failures-per-day={self.max_failures_per_day}"
            )
            return Decision("give_up", 0, counts.job_retries, reason + again)
        failures = counts.in_job
        job_spent = counts.job_spent or failures > self.in_job_restarts
        if job_spent and counts.job_retries >= self.job_retries:
            reason = f"no progress in {counts.job_retries + 1} jobs with up to {self.in_job_restarts} restarts each"
            return Decision("give_up", 0, counts.job_retries, reason + again)
        tries = (self.in_job_restarts + 1) * (self.job_retries + 1)
        tried = counts.tries[counts.last] if counts.last is not None else 0
        if tried >= tries:
            reason = f"{counts.recurrence}; what has advanced meanwhile has not helped against it"
            return Decision("give_up", 0, counts.job_retries, reason)
        left = min(self.max_failures_per_day - today, tries - tried - 1)
        if not job_spent:
            max_restarts = min(self.in_job_restarts - failures, left)
            used = f" again, restart {failures} of {self.in_job_restarts} without progress" if failures else ""
            reason = f"starting the workers{used}"
            return Decision("start", max_restarts, counts.job_retries, reason)
        retry = counts.job_retries + 1
        reason = f"starting the job again, retry {retry} of {self.job_retries}: the last one made no progress"
        return Decision("retry", min(self.in_job_restarts, left), retry, reason)


def failures_today(history: History, now: float) -> int:
    """How many failures a run has had within 24 hours.

    Args:
        history: Its history.
        now: Seconds since the epoch.
    """
    return sum(count for time, count in history.failures.at.items() if time > now - _DAY_S)
