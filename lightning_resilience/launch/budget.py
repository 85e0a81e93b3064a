"""How often a run may fail: computed from the ledger alone, so that a launcher that starts again knows it too.

Two limits hold at once. *Successive failures without progress* are counted since the highest verified step ever reached
last advanced: a worker group is restarted inside the job ``in_job_restarts`` times, then the job is retried
``job_retries`` times, then the run gives up. *Failures per day* are counted whatever progress there was, so that a leak
that crashes every minute and saves in between does not restart for ever. A preemption is not a failure, and it refills
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

_DAY_S = 24 * 3600.0


def verified_step(event: dict[str, Any]) -> tuple[int, int] | None:
    """The number of the fit and the step up to which nothing can be lost from this event on, if it says so."""
    step = event.get("step")
    if event["event"] not in ("saved", "finished") or not isinstance(step, int):
        return None
    digits = re.search(r"[0-9]+$", str(event.get("fit")))
    return (int(digits[0]) if digits else 0), step


def highest_verified_step(events: Iterable[dict[str, Any]]) -> int | None:
    """The highest verified step of the last fit that has one."""
    return max((verified for event in events if (verified := verified_step(event))), default=(0, None))[1]


@dataclass(frozen=True)
class Decision:
    """What to do next.

    Args:
        action: ``start`` the workers (again) as the same job, ``retry`` as a new job, or ``give_up``.
        max_restarts: How many restarts inside the job the budget has left after that.
        job_attempt: Number of the job retry: 0 is the first job since the last progress.
        reason: One clause for a person.
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

    def decide(self, events: Iterable[dict[str, Any]], now: float) -> Decision:
        """What the history of a run allows next.

        Args:
            events: The run's ledger, oldest first.
            now: Seconds since the epoch.
        """
        history = _History()
        for event in events:
            history.add(event)
        today = sum(1 for time in history.failure_times if time > now - _DAY_S)
        if today > self.max_failures_per_day:
            reason = (
                f"{today} failures within 24 hours are more than --max-failures-per-day={self.max_failures_per_day}"
            )
            return Decision("give_up", 0, history.job_retries, reason)
        left_today = self.max_failures_per_day - today
        failures = history.failures_in_job
        if not history.job_spent and failures <= self.in_job_restarts:
            max_restarts = min(self.in_job_restarts - failures, left_today)
            used = f" again, restart {failures} of {self.in_job_restarts} without progress" if failures else ""
            reason = f"starting the workers{used}"
            return Decision("start", max_restarts, history.job_retries, reason)
        if history.job_retries < self.job_retries:
            retry = history.job_retries + 1
            max_restarts = min(self.in_job_restarts, left_today)
            reason = f"starting the job again, retry {retry} of {self.job_retries}: the last one made no progress"
            return Decision("retry", max_restarts, retry, reason)
        reason = f"no progress in {history.job_retries + 1} jobs with up to {self.in_job_restarts} restarts each"
        return Decision("give_up", 0, history.job_retries, reason)


class _History:
    """What counts against the budget, event by event."""

    def __init__(self) -> None:
        self.failure_times: list[float] = []
        self.failures_in_job = 0  # since the last progress
        self.job_retries = 0  # since the last progress
        self.job_spent = False  # the launcher gave the workers up although nothing had advanced since it started them
        self._highest: dict[int, int] = {}  # verified step of each fit
        self._advanced = False  # since the launcher last started the workers
        self._previous_start: dict[str, Any] | None = None

    def add(self, event: dict[str, Any]) -> None:
        fit, step = verified_step(event) or (0, -1)
        if step > self._highest.get(fit, -1):
            self._highest[fit] = step
            self._advanced = True
            self._refill()
        match event["event"]:
            case "job_start":
                self._advanced = False
                self._previous_start = None
                if event.get("retry"):
                    self.job_retries += 1
                    self.failures_in_job = 0
                    self.job_spent = False
            case "start":
                self._fail(event, _failed_before(event, self._previous_start))
                self._previous_start = event
            case "failure":
                self._fail(event, 1)
                self.job_spent = not self._advanced
            case "launcher_killed":  # by a person or with its node: counts per day only
                self.failure_times.append(float(event.get("time", 0.0)))
            case "give_up":  # whoever launches the run again after that has decided to
                self._refill()

    def _refill(self) -> None:
        self.failures_in_job = 0
        self.job_retries = 0
        self.job_spent = False

    def _fail(self, event: dict[str, Any], count: int) -> None:
        self.failures_in_job += count
        self.failure_times.extend([float(event.get("time", 0.0))] * count)


def _failed_before(start: dict[str, Any], previous: dict[str, Any] | None) -> int:
    """How many worker groups of the same job failed between two starts; those that got far enough have recorded one.

    The elastic launcher's restart count says so, but it counts per node: with several nodes any start after the first
    is a failure, unless a node has merely joined.
    """
    restarts = int(start.get("restart_count") or 0)
    if previous is None:
        return restarts
    more_restarts = restarts - int(previous.get("restart_count") or 0)
    joined = int(start.get("world_size") or 1) > int(previous.get("world_size") or 1)
    return 0 if more_restarts <= 0 and joined else max(1, more_restarts)
