"""How often a run may fail: computed from the ledger alone, so that a launcher that starts again knows it too.

Three limits hold at once. *Successive failures without progress* are counted since the highest verified step ever
reached last advanced: a worker group is restarted inside the job ``in_job_restarts`` times, then the job is retried
``job_retries`` times, then the run gives up. *The same failure* (see :class:`Failure`) may come as often as that
makes together: if it is back at the same step from the same checkpoint, then whatever advanced meanwhile (another fit,
or a checkpoint that could not be read again) has not helped against it. That count starts anew when a step of its fit
beyond the one at which it came is verified. A checkpoint nearer to that step is progress: from there it is another
failure. *Failures per day* are counted whatever progress there was, so that a leak that crashes every minute and saves
in between does not restart for ever. A preemption is not a failure, and it refills nothing. Whoever launches a run
again that was given up starts with a fresh budget.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from lightning_resilience.run.ledger import Ledger

Event = dict[str, Any]

_DAY_S = 24 * 3600.0
_LOST_PEER = re.compile(r"PeerLost|Connection (closed|reset) by peer|ncclRemoteError|NCCL communicator was aborted")
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w.])\.{0,2}/[^\s'\"`,;:()<>\[\]]+")
_HEX = re.compile(
    r"\b(0x[0-9a-f]+|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{8,})\b",
    re.IGNORECASE,
)
_NUMBERS = re.compile(r"\d+([.,]?\d+|e[-+]?\d+|(, and|,| and) \d+)*")  # a list of ranks is as long as it happens to be


def verified_step(event: Event) -> tuple[int, int] | None:
    """The number of the fit and the step up to which nothing can be lost from this event on, if it says so."""
    # What lies on the nodes is progress when it was resumed from, and not before: it may be lost with a node.
    local = (event.get("tier") or "global") != "global"
    step = event.get("step")
    if event["event"] not in (("resumed",) if local else ("saved", "finished")) or step is None:
        return None
    if event.get("saved") is False:  # it has finished, and there was no room for its final state, say
        return None
    return event.get("fit") or 0, step


def highest_verified_step(events: Iterable[Event]) -> int | None:
    """The highest verified step of the last fit that has one."""
    return max((verified for event in events if (verified := verified_step(event))), default=(0, None))[1]


@dataclass(frozen=True)
class Failure:
    """What identifies the end of a group of workers: two that are equal are the same failure come again.

    Args:
        kind: Name of the exception's class, ``hang``, or ``a worker was killed``.
        message: What was said about it, without what differs between two of a kind: numbers, addresses, paths. Empty
            for a hang, since in which state its ranks are found is a matter of the moment.
        place: The user's innermost line, ``train.py:80``, if one is known.
        fit: Number of the fit in which it came; ``None`` if outside of every fit, or not known.
        step: ``trainer.global_step`` at which it came, if known.
        origin: Where the workers had begun, for a person: ``after resuming from step 30``.
    """

    kind: str
    message: str = ""
    place: str | None = None
    fit: int | None = None
    step: int | None = None
    origin: str = ""

    def __str__(self) -> str:
        step = "" if self.step is None else f" at step {self.step}"
        fit = f" in fit {self.fit}" if self.fit else ""
        place = f" ({self.place})" if self.place else ""
        return f"{self.kind}{step}{fit}{place}"

    @staticmethod
    def of(group: Iterable[Event]) -> Failure:
        """Why a group of workers ended, from all that was recorded since it started.

        Args:
            group: Its events, oldest first, with the ``start`` if one was recorded.
        """
        group = list(group)
        verified = fit = None
        origins: dict[int | None, str] = {}
        for event in group:
            if event["event"] == "start":
                verified = event.get("verified_step")
            elif event["event"] in ("resumed", "fresh"):
                fit, step = event.get("fit"), event.get("step")
                origins[fit] = f"after resuming from step {step}" if step else "from the beginning"
        origins.setdefault(None, "before the first checkpoint" if verified is None else f"with step {verified} safe")
        faults = faults_of(group)
        cause = first_cause(faults)
        if cause is None:
            return Failure("a worker was killed", fit=fit, origin=origins[fit])
        kind, fit = str(cause.get("kind", "failure")), cause.get("fit")
        places = (fault["place"] for fault in faults if fault.get("rank") == cause.get("rank") and fault.get("place"))
        return Failure(
            kind=kind,
            message="" if kind == "hang" else normalised(str(cause.get("reason"))),
            place=next(map(str, places), None),
            fit=fit,
            step=cause.get("step"),
            origin=origins.get(fit, "before resuming"),
        )


def faults_of(group: Iterable[Event]) -> list[Event]:
    """The faults recorded in a group of workers that may have ended it.

    Args:
        group: Its events, oldest first, with the ``start`` if one was recorded.
    """
    run_id = None
    faults: list[Event] = []
    for event in group:
        match event["event"]:
            case "start":
                run_id = event.get("elastic_run_id")
            case "resumed" | "fresh":  # the script has caught what a fit before this one raised, and gone on
                fit = event.get("fit")
                faults = [fault for fault in faults if "elastic_run_id" in fault or fault.get("fit") == fit]
            case "fault" if run_id is None or event.get("elastic_run_id", run_id) == run_id:  # else a late one
                faults.append(event)
    return faults


def first_cause(faults: Iterable[Event]) -> Event | None:
    """Of the faults of one group of workers the first that is no mere consequence of another rank's, if there is one.

    A worker that was killed says nothing: if all that is known is that peers were lost, it is that one that failed. A
    diagnosed hang explains why peers ran into timeouts.
    """
    faults = list(faults)
    hung = any(fault.get("kind") == "hang" for fault in faults)
    for fault in faults:
        reason = str(fault.get("reason"))
        if fault.get("kind") == "hang" or not (_LOST_PEER.search(reason) or (hung and _TIMED_OUT.search(reason))):
            return fault
    return None


def normalised(message: str) -> str:
    """A message without what differs when the same thing happens again: paths, addresses, numbers, ranks among them."""
    for pattern, name in ((_PATH, "<path>"), (_HEX, "<hex>"), (_NUMBERS, "<n>")):
        message = pattern.sub(name, message)
    return " ".join(message.split())


def recurrence(failure: Failure, times: int) -> str:
    """One clause for a person about a failure that has come again.

    Args:
        failure: The failure.
        times: How often it has come.
    """
    suffix = "th" if times % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(times % 10, "th")
    return f"the same failure for the {times}{suffix} time: {failure}, each time {failure.origin}"


def last_recurrence(events: Iterable[Event]) -> str | None:
    """The same about the last failure in a ledger; ``None`` if it came for the first time, or if there is none."""
    return History(events).recurrence()


def spent(events: Iterable[Event]) -> tuple[int, int]:
    """How many failures without progress the last job has had, and how often the job was retried after such.

    Args:
        events: The run's ledger, oldest first.
    """
    history = History(events)
    return history.failures_in_job, history.job_retries


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

    def decide(self, history: History | Iterable[Event], now: float) -> Decision:
        """What the history of a run allows next.

        Args:
            history: It, or the run's ledger, oldest first.
            now: Seconds since the epoch.
        """
        if not isinstance(history, History):
            history = History(history)
        again = history.recurrence()
        again = f", {again}" if again else ""
        today = sum(count for time, count in history.failures.items() if time > now - _DAY_S)
        if today > self.max_failures_per_day:
            reason = (
                f"{today} failures within 24 hours are more than --max-failures-per-day={self.max_failures_per_day}"
            )
            return Decision("give_up", 0, history.job_retries, reason + again)
        failures = history.failures_in_job
        job_spent = history.job_spent or failures > self.in_job_restarts
        if job_spent and history.job_retries >= self.job_retries:
            reason = f"no progress in {history.job_retries + 1} jobs with up to {self.in_job_restarts} restarts each"
            return Decision("give_up", 0, history.job_retries, reason + again)
        tries = (self.in_job_restarts + 1) * (self.job_retries + 1)
        tried = history.tries[history.last] if history.last is not None else 0
        if tried >= tries:
            reason = f"{history.recurrence()}; what has advanced meanwhile has not helped against it"
            return Decision("give_up", 0, history.job_retries, reason)
        left = min(self.max_failures_per_day - today, tries - tried - 1)
        if not job_spent:
            max_restarts = min(self.in_job_restarts - failures, left)
            used = f" again, restart {failures} of {self.in_job_restarts} without progress" if failures else ""
            reason = f"starting the workers{used}"
            return Decision("start", max_restarts, history.job_retries, reason)
        retry = history.job_retries + 1
        reason = f"starting the job again, retry {retry} of {self.job_retries}: the last one made no progress"
        return Decision("retry", min(self.in_job_restarts, left), retry, reason)


class History:
    """What counts against the budget.

    Args:
        events: The run's ledger, oldest first.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.failures: Counter[float] = Counter()  # how many came when
        self.failures_in_job = 0  # since the last progress
        self.job_retries = 0  # since the last progress
        self.job_spent = False  # the launcher gave the workers up although nothing had advanced since it started them
        self.tries: Counter[Failure] = Counter()  # how often a failure that is not overcome has come
        self.times: Counter[Failure] = Counter()  # how often a failure has come at all
        self.last: Failure | None = None
        self._highest: dict[int, int] = {}  # verified step of each fit
        self._advanced = False  # since the launcher last started the workers
        self._previous_start: Event | None = None
        self._group: list[Event] | None = None  # since workers of this job last said that they have started
        for event in events:
            self.add(event)

    def recurrence(self) -> str | None:
        """What is to be said about the last failure if it was not the first of its kind."""
        if self.last is None or self.times[self.last] < 2:
            return None
        return recurrence(self.last, self.times[self.last])

    def add(self, event: Event) -> None:
        """Counts what happened next."""
        if (verified := verified_step(event)) is not None:
            self._verify(*verified)
        match event["event"]:
            case "job_start":
                self._advanced = False
                self._previous_start = None
                self._group = None
                if event.get("retry"):
                    self.job_retries += 1
                    self.failures_in_job = 0
                    self.job_spent = False
            case "start":
                self._fail(event, _failed_before(event, self._previous_start))
                self._previous_start = event
                self._group = []
            case "failure":
                self._fail(event, 1)
                self.job_spent = not self._advanced
            case "launcher_killed":  # by a person or with its node: counts per day only
                self.failures[event["time"]] += 1
            case "give_up":  # whoever launches the run again after that has decided to
                self._refill()
                self.tries.clear()
                self.failures.clear()
        if self._group is not None:
            self._group.append(event)

    def _verify(self, fit: int, step: int) -> None:
        if step > self._highest.get(fit, -1):
            self._highest[fit] = step
            self._advanced = True
            self._refill()
        for failure in list(self.tries):
            if failure.fit == fit and failure.step is not None and failure.step < step:
                del self.tries[failure]

    def _refill(self) -> None:
        self.failures_in_job = 0
        self.job_retries = 0
        self.job_spent = False

    def _fail(self, event: Event, count: int) -> None:
        self.failures_in_job += count
        self.failures[event["time"]] += count
        if not count:
            return
        # If it is more than one, the others were gone before they could record anything.
        self.last = Failure.of(self._group) if self._group is not None else None
        if self.last is not None:
            self.tries[self.last] += 1
            self.times[self.last] += 1


class LiveHistory:
    """The history of a run that goes on: each event is counted once.

    Args:
        ledger: Where it is recorded.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._history = History()
        self._counted = self._insertions = 0

    def now(self) -> History:
        """What there is by now.

        Raises:
            OSError: If the ledger cannot be read.
        """
        events = self._ledger.events()
        if self._insertions != self._ledger.insertions:  # something has turned up that belongs further back
            self._history, self._counted, self._insertions = History(), 0, self._ledger.insertions
        for event in events[self._counted :]:
            self._history.add(event)
        self._counted = len(events)
        return self._history


def _failed_before(start: Event, previous: Event | None) -> int:
    """How many worker groups of the same job failed between two starts; those that got far enough have recorded one.

    The elastic launcher's restart count says so, but it counts per node: with several nodes any start after the first
    is a failure, unless a node has merely joined.
    """
    restarts = start.get("restart_count") or 0
    if previous is None:
        return restarts
    more_restarts = restarts - (previous.get("restart_count") or 0)
    joined = (start.get("world_size") or 1) > (previous.get("world_size") or 1)
    return 0 if more_restarts <= 0 and joined else max(1, more_restarts)
