"""How often a run may fail: computed from the ledger alone, so that a launcher that starts again knows it, too.

Three limits hold at once:

- *Successive failures without progress* are counted since the highest verified step ever reached last advanced. A
  worker group is restarted inside the job ``in_job_restarts`` times, then the job is retried ``job_retries`` times,
  then the run gives up. The elastic launcher cannot know what has advanced: it gets all restarts that the other limits
  leave, and the workers check this limit before they begin (:func:`allows_restart`).
- *The same failure* (see :class:`~.failures.Failure`) may happen as often as these two numbers allow together. If it is
  back at the same step from the same checkpoint, then the progress in between (in another fit, or by a checkpoint that
  could not be read again) has not helped against it. Its count starts anew when a step of its fit beyond the step of
  the failure is verified. A checkpoint nearer to that step is progress: from there it is another failure.
- *Failures per day* are counted whatever progress was made, so that a leak that crashes every minute and saves in
  between does not restart forever.

A preemption is not a failure, and it refills nothing. A new launch of a run that was given up or halted starts with a
fresh budget.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from lightning_resilience._arguments import check_fields
from lightning_resilience.run.events import LaunchStart, WorkersStart
from lightning_resilience.run.history import FailureCounts, History

_DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class Decision:
    """What to do next.

    Args:
        action: ``start`` the workers (again) as the same job, ``retry`` as a new job, or ``give_up``.
        max_restarts: How often the elastic launcher may restart the workers after that if they advance in between.
        job_attempt: Number of the job retry; 0 is the first job since the last progress.
        reason: A clause for the log.
    """

    action: Literal["start", "retry", "give_up"]
    max_restarts: int
    job_attempt: int
    reason: str


@dataclass(frozen=True)
class Budget:
    """The limits of a run.

    Args:
        in_job_restarts: Successive failures without progress after which the workers are restarted inside the job.
        job_retries: How often the job is retried after those.
        max_failures_per_day: Failures within 24 hours that are recovered from, with or without progress.
    """

    in_job_restarts: int = 3
    job_retries: int = 2
    max_failures_per_day: int = 50

    def __post_init__(self) -> None:
        check_fields(self)

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
        job_spent = not self._allows(counts, counts.in_job)
        if job_spent and counts.job_retries >= self.job_retries:
            jobs, restarts = counts.job_retries + 1, self.in_job_restarts
            reason = f"no progress in {jobs} job{'s' * (jobs > 1)} with up to {restarts} "
            reason += f"restart{'s' * (restarts != 1)}{' each' * (jobs > 1)}"
            return Decision("give_up", 0, counts.job_retries, reason + again)
        tries = (self.in_job_restarts + 1) * (self.job_retries + 1)
        tried = counts.tries[counts.last] if counts.last is not None else 0
        if tried >= tries:
            reason = f"{counts.recurrence}; the progress made in between has not prevented it"
            return Decision("give_up", 0, counts.job_retries, reason)
        left = min(self.max_failures_per_day - today, tries - tried - 1) if self.in_job_restarts else 0
        if not job_spent:
            failures = counts.in_job
            used = f" again, restart {failures} of {self.in_job_restarts} without progress" if failures else ""
            reason = f"starting the workers{used}"
            return Decision("start", left, counts.job_retries, reason)
        retry = counts.job_retries + 1
        reason = f"starting the job again, retry {retry} of {self.job_retries}: the last one made no progress"
        return Decision("retry", left, retry, reason)

    def _allows(self, counts: FailureCounts, in_job: int) -> bool:
        return not counts.job_spent and in_job <= self.in_job_restarts


def allows_restart(history: History, start: WorkersStart) -> bool:
    """Whether workers that the elastic launcher has started again may begin.

    All ranks of a node get the same result: it depends neither on the clock nor on why the last workers ended, which
    their watchdog may be recording meanwhile. The elastic launcher enforces the other two limits.

    Args:
        history: The run's history.
        start: The event that rank 0 would record. For another ``rank``, rank 0 may have recorded it already.
    """
    last, counts = history.last(WorkersStart), history.failures
    is_same = last and (last.elastic_run_id, last.restart_count) == (start.elastic_run_id, start.restart_count)
    in_job = counts.in_job if is_same and start.rank != 0 else counts.in_job_with(start)
    return budget_of(history)._allows(counts, in_job)


def budget_of(history: History) -> Budget:
    """The budget that the last launch has recorded."""
    launch = history.last(LaunchStart)
    given = (launch.budget if launch is not None else None) or {}
    known = {field.name for field in fields(Budget)}  # another version may have had other limits
    return Budget(**{name: each for name, each in given.items() if name in known and type(each) is int})


def failures_today(history: History, now: float) -> int:
    """How many failures a run has had within the last 24 hours.

    Args:
        history: The run's history.
        now: Seconds since the epoch.
    """
    return sum(count for time, count in history.failures.at.items() if time > now - _DAY_S)
