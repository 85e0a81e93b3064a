"""Folds a ledger into the history of a run: its checkpoints, workers, allocations and failures.

:class:`History` takes events one by one, so the ledger of a running run is folded only once; :class:`LiveHistory` does
that. The budget, the reports, the launcher, the workers, the scheduler's batch step and the fits query it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from lightning_resilience.run.events import (
    AllocationEnd,
    AllocationStart,
    BadStep,
    Event,
    Fault,
    Finished,
    FitInterrupted,
    Fresh,
    GiveUp,
    JobFailed,
    JobStart,
    LauncherKilled,
    LaunchExit,
    LaunchStart,
    MarkedBad,
    NotRestored,
    RanksReplaced,
    RestoredInPlace,
    Resumed,
    Saved,
    WorkersStart,
    WorkloadRequest,
)
from lightning_resilience.run.failures import Failure, RepeatedMistake, first_cause, growths, is_late, recurrence
from lightning_resilience.run.ledger import Ledger, Reader, reader_of
from lightning_resilience.run.run_directory import RunDirectory

Then = Literal["requeue", "end"]
"""What happens after an allocation."""

E = TypeVar("E", bound=Event)


class History:
    """The history of a run, folded from the events of its ledger.

    Args:
        events: The run's ledger, oldest first.

    Attributes:
        events: All events so far.
        allocations: The scheduler's allocations, and the launches without one.
        failures: The failures that count against the budget.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = []
        self.allocations: list[Allocation] = []
        self.failures = FailureCounts()
        self._mistake = RepeatedMistake()
        self._highest: dict[int, int] = {}  # verified step of each fit
        self._safe: dict[int, int] = {}  # the same, only from checkpoints in the run directory
        self._fits: set[int | None] = set()  # fits begun without a launcher; no process begins a fit twice
        self._run_id: str | None = None  # of the last job
        self._to_avoid: set[str] = set()
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Takes the next event into account."""
        self.events.append(event)
        before, verified, has_advanced = self.verified_step, verified_step(event), False
        if verified is not None:
            fit, step = verified
            if has_advanced := step > self._highest.get(fit, -1):
                self._highest[fit] = step
            if not isinstance(event, Resumed):
                self._safe[fit] = max(step, self._safe.get(fit, -1))
        self._allocate(event, before, has_advanced)
        self.failures.add(event, verified, has_advanced)
        self._mistake.add(event)
        match event:
            case JobStart():
                self._to_avoid.clear()
                self._run_id = event.run_id
            case WorkloadRequest(action="exclude_this_node"):
                self._to_avoid.add(str(event.node))

    # -- the events --------------------------------------------------------------------------------------------------

    def of(self, kind: type[E]) -> list[E]:
        """All events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def last(self, kind: type[E]) -> E | None:
        """The last event of a kind."""
        return next((event for event in reversed(self.events) if isinstance(event, kind)), None)

    def since(self, *kinds: type[Event]) -> list[Event]:
        """The last event of any of these kinds and all later events; empty if there is no such event."""
        found = (index for index in range(len(self.events) - 1, -1, -1) if isinstance(self.events[index], kinds))
        begin = next(found, None)
        return [] if begin is None else self.events[begin:]

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def verified_step(self) -> int | None:
        """The highest verified step of the last fit that has one; a local checkpoint counts after a resume from it."""
        return max(self._highest.items())[1] if self._highest else None

    def safe_step(self, run: RunDirectory | None = None, fit: int | None = None) -> int | None:
        """The step of the newest checkpoint in the run directory, of the last fit that has one.

        Args:
            run: The run directory, to check which checkpoints exist, even if the ledger was lost; default: trusts the
                ledger.
            fit: Number of the fit; default: the last fit that has a checkpoint.
        """
        known = self._safe if fit is None else {number: step for number, step in self._safe.items() if number == fit}
        if not known and run is not None:
            found = map(run.steps_saved, range(len(run.fits)) if fit is None else [fit])
            return next((max(steps) for steps in reversed([*found]) if steps), None)
        if not known:
            return None
        number, step = max(known.items())
        steps = run.steps_saved(number) if run is not None else None
        return step if steps is None else max(steps, default=None)

    @property
    def last_save_s(self) -> float | None:
        """How long the last global save took, in seconds."""
        took = (each.seconds for each in reversed(self.of(Saved)) if (each.tier or "global") == "global")
        return next((seconds for seconds in took if seconds is not None), None)

    @property
    def last_local_save(self) -> Saved | None:
        """The last local save that was recorded."""
        return next((each for each in reversed(self.of(Saved)) if each.tier == "local"), None)

    def not_restored(self, fit: int, attempts: int) -> NotRestored | None:
        """The failure to restore the same checkpoint in this many consecutive attempts, as the last one recorded it.

        Args:
            fit: Number of the fit.
            attempts: Number of attempts.

        Returns:
            ``None`` if there were fewer such attempts.
        """
        chosen: str | None = None
        tries: list[list[NotRestored]] = []  # for the last chosen checkpoint, by attempt
        for event in self.events:
            match event:
                case NotRestored() if event.fit == fit and (event.generation or event.path) == chosen and tries:
                    tries[-1].append(event)
                case Resumed() | RestoredInPlace() | Fresh() | MarkedBad() if event.fit == fit:
                    name = getattr(event, "generation", None) or getattr(event, "path", None)
                    failed_again = isinstance(event, Resumed) and name == chosen and tries and tries[-1]
                    tries = [*tries, []] if failed_again else [[]]
                    chosen = name
        causes = [cause for faults in tries if (cause := first_cause(faults)) is not None]
        return causes[-1] if len(causes) >= attempts else None

    # -- the workers ---------------------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """Whether all ranks had finished when the launch last ended, and no workers were started since."""
        ends = self.since(WorkersStart, LaunchExit)
        return bool(ends) and isinstance(ends[0], LaunchExit) and ends[0].status == "finished"

    @property
    def why_not_again(self) -> str | None:
        """Why another start of the script is useless; ``None`` if it is not. See :class:`.RepeatedMistake`."""
        return self._mistake.verdict

    def nodes_to_avoid(self, run_id: str | None) -> set[str]:
        """The nodes that one of their ranks has asked to exclude since the start of the job.

        Args:
            run_id: Id of the rendezvous of the job; for another job than the last one the result is empty.
        """
        return set(self._to_avoid) if run_id == self._run_id else set()

    def _allocate(self, event: Event, step_before: int | None, has_advanced: bool) -> None:
        current = last = self.allocations[-1] if self.allocations else None
        match event:
            case AllocationStart():
                job_id, nodes = str(event.slurm_job_id), list(event.node_list or ())
                excluded = list(current.excluded) if current is not None and current.job_id == job_id else []
                current = Allocation(event.time, job_id, event.restart_count, nodes, excluded=excluded)
            case LaunchStart():
                if current is None or current.job_id is None or current.launched or current.ended is not None:
                    current = Allocation(event.time, event.slurm_job_id, event.slurm_restart_count)
                current.launched = True
            case Fresh() | Resumed() if current is None or current.is_over_before(event.fit in self._fits):
                current = Allocation(event.time)  # a run without launcher
                self._fits.clear()
        if current is None:
            return
        if current is not last:
            current.step_before = step_before
            self.allocations.append(current)
        current.last_seen = event.time
        current.advanced |= has_advanced
        current.step_after = self.verified_step
        if isinstance(event, (Fresh, Resumed)):
            self._fits.add(event.fit)
        current.add(event)


class LiveHistory:
    """The history of a running run: each event is folded once. For any thread.

    Args:
        ledger: The run's ledger, or a reader of it.
    """

    def __init__(self, ledger: Ledger | Reader) -> None:
        self._ledger = ledger
        self._history = History()
        self._order: object = None
        self._lock = threading.Lock()

    def now(self) -> History:
        """The history so far.

        Raises:
            OSError: If the ledger cannot be read.
        """
        with self._lock:
            events, order = self._ledger.read()
            if self._order is not order:  # a new event belongs before known ones
                self._history = History()
            self._order = None  # if a signal's handler raises, all is folded again
            for event in events[len(self._history.events) :]:
                self._history.add(event)
            self._order = order
            return self._history


def read_history(path: str | os.PathLike[str]) -> History:
    """The history in a ledger. Do not change it: the next call in this process continues with the same object.

    Args:
        path: As for :func:`~.ledger.read_ledger`.

    Raises:
        OSError: If the ledger cannot be read.
    """
    reader = reader_of(path)
    return _histories.setdefault(os.fspath(reader.path), LiveHistory(reader)).now()


_histories: dict[str, LiveHistory] = {}


def verified_step(event: Event) -> tuple[int, int] | None:
    """Number of the fit, and the step up to which nothing can be lost after this event; ``None`` for other events."""
    match event:
        # A state in node memory counts as progress only once it was resumed from: it may be lost with its node.
        case Resumed(tier="local" | "replica", step=int(step)):
            return event.fit or 0, step
        case Saved(tier=None | "" | "global", step=int(step)):
            return event.fit or 0, step
        case Finished(step=int(step)) if event.saved is not False:  # false if, for example, the disk was full
            return event.fit or 0, step
    return None


@dataclass
class Allocation:
    """One start of a scheduler's job, or one call of ``launch`` without a scheduler.

    Attributes:
        began: Seconds since the epoch.
        job_id: The scheduler's id of the job; ``None`` without a scheduler.
        restart_count: How often it had been requeued.
        nodes: The names of its nodes, as far as they are known.
        step_before: :attr:`History.verified_step` when it began; ``None``: no checkpoint yet.
        step_after: The same now, or when the next allocation began.
        advanced: Whether a higher step was verified than ever before.
        launched: Whether ``launch`` has started in it.
        worker_groups: How often workers were started in it.
        ended: When it recorded its end; ``None`` if it never did.
        how: How it ended, in a few words.
        then: What it recorded as the next action.
        suspects: The nodes that one of their ranks has asked to exclude.
        excluded: The nodes that the job must not get from here on.
        last_seen: Time of its last event.
        exit: The event in which ``launch`` has recorded its end; without launcher, the last fit's.
    """

    began: float
    job_id: str | None = None
    restart_count: int | None = None
    nodes: list[str] = field(default_factory=list)
    step_before: int | None = None
    step_after: int | None = None
    advanced: bool = False
    launched: bool = False
    worker_groups: int = 0
    ended: float | None = None
    how: str | None = None
    then: Then | None = None
    suspects: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    last_seen: float = 0.0
    exit: LaunchExit | FitInterrupted | Finished | Fault | None = None

    @property
    def has_launcher(self) -> bool:
        """Whether failed workers are started again; a script that was started without a launcher is not."""
        return self.launched or self.job_id is not None

    @property
    def exit_status(self) -> str | None:
        """How ``launch``, or without it the last fit, has ended."""
        if isinstance(self.exit, LaunchExit):
            return self.exit.status
        return {FitInterrupted: "interrupted", Finished: "finished", Fault: "failed"}.get(type(self.exit))

    def is_over_before(self, is_fit_begun: bool) -> bool:
        """Whether it was over when a fit began, so that the fit belongs to a run started without launcher."""
        if self.launched:
            return self.ended is not None or self.exit is not None
        return self.ended is not None or is_fit_begun

    def add(self, event: Event) -> None:
        """Takes the next event in it into account."""
        match event:
            case WorkersStart():
                self.worker_groups += 1
                if not self.nodes and event.node is not None:
                    self.nodes = [event.node]
            case Fresh() | Resumed():
                if not self.launched:
                    self.exit = None  # the script continues with another fit
            case FitInterrupted() | Finished() | Fault() if not self.launched:
                self.exit = event
            case WorkloadRequest(action="exclude_this_node"):
                node = str(event.node)
                self.suspects = [*(each for each in self.suspects if each != node), node]
            case LaunchExit():
                self.exit = event
            case AllocationEnd():
                self.ended, self.how = event.time, str(event.how)
                self.then = "requeue" if event.then == "requeue" else "end"
                self.excluded = list(event.excluded or ())


class FailureCounts:
    """Counts the failures that count against the budget.

    Attributes:
        at: Number of failures by time, in seconds since the epoch.
        in_job: Failures in the last job since the last progress.
        job_retries: Job retries since the last progress.
        job_spent: Whether the last job failed without any progress since the launcher started its workers.
        tries: How often each failure that is not overcome has occurred.
        times: How often each failure has occurred in total.
        last: The last failure.
    """

    def __init__(self) -> None:
        self.at: Counter[float] = Counter()
        self.in_job = 0
        self.job_retries = 0
        self.job_spent = False
        self.tries: Counter[Failure] = Counter()
        self.times: Counter[Failure] = Counter()
        self.last: Failure | None = None
        self._advanced = False  # since the launcher last started the workers
        self._previous_start: WorkersStart | None = None
        self._changes: list[RanksReplaced] = []  # of this job
        self._group: list[Event] | None = None  # events since workers of this job last recorded their start
        self._ended: list[Event] | None = None  # events of the group whose end was counted as the last failure

    @property
    def recurrence(self) -> str | None:
        """A clause about the last failure if it was not the first of its kind."""
        if self.last is None or self.times[self.last] < 2:
            return None
        return recurrence(self.last, self.times[self.last])

    def add(self, event: Event, verified: tuple[int, int] | None, has_advanced: bool) -> None:
        """Counts the next event.

        Args:
            event: The event.
            verified: The result of :func:`verified_step` for it.
            has_advanced: Whether that step is higher than ever before.
        """
        if has_advanced:
            self._advanced = True
            self._refill()
        if verified is not None:
            fit, step = verified
            for failure in list(self.tries):
                if failure.fit == fit and failure.step is not None and failure.step < step:
                    del self.tries[failure]
        if is_late(event, self._previous_start):
            self._say_why(event)
            return
        match event:
            case JobStart():
                self._advanced = False
                self._previous_start = None
                self._changes.clear()
                self._group = None
                if event.retry:
                    self.job_retries += 1
                    self.in_job = 0
                    self.job_spent = False
            case RanksReplaced():
                self._changes.append(event)
            case WorkersStart():
                grown = growths(self._changes, event.elastic_run_id)
                self._fail(event, _failed_before(event, self._previous_start, grown))
                self._previous_start = event
                self._group = []
            case JobFailed():
                self._fail(event, 1)
                self.job_spent = not self._advanced
            case LauncherKilled():  # by a person or with its node: counts only for the limit per day
                self.at[event.time] += 1
            case GiveUp() | LaunchExit(status="halted"):  # a launch after that begins with a fresh budget
                self._refill()
                self.tries.clear()
                self.at.clear()
        if self._group is not None:
            self._group.append(event)

    def in_job_with(self, start: WorkersStart) -> int:
        """The value that :attr:`in_job` would have if these workers were the next to start."""
        grown = growths(self._changes, start.elastic_run_id)
        return self.in_job + _failed_before(start, self._previous_start, grown)

    def _refill(self) -> None:
        self.in_job = 0
        self.job_retries = 0
        self.job_spent = False

    def _fail(self, event: Event, count: int) -> None:
        self.in_job += count
        self.at[event.time] += count
        if not count:
            return
        # If more than one group failed, the other groups ended before they could record anything.
        self._ended = self._group
        self._count_last()

    def _count_last(self) -> None:
        self.last = Failure.of(self._ended) if self._ended is not None else None
        if self.last is not None:
            self.tries[self.last] += 1
            self.times[self.last] += 1

    def _say_why(self, event: Event) -> None:
        """Takes an event of the last failure into account that was recorded after the next workers had begun."""
        if self._ended is None or self.last is None or is_late(event, self._ended[0]):
            return
        self.times[self.last] -= 1
        self.tries = self.tries - Counter([self.last])
        self._ended.append(event)
        self._count_last()


def _failed_before(start: WorkersStart, previous: WorkersStart | None, grown: Collection[int]) -> int:
    """How many worker groups of the same job failed between two recorded starts; some fail before they record a start.

    The elastic launcher's restart count gives it, but per node: with several nodes any start after the first is a
    failure, unless a node has merely joined. ``launch --elastic`` also counts admissions of joining ranks (``grown``).
    """
    restarts = start.restart_count or 0
    before = -1 if previous is None else previous.restart_count or 0
    taken_in = sum(before < each <= restarts for each in grown)
    if previous is None:
        return restarts - taken_in
    more_restarts = restarts - before - taken_in
    joined = taken_in > 0 or (start.world_size or 1) > (previous.world_size or 1)
    return 0 if more_restarts <= 0 and joined else max(1, more_restarts)


_TROUBLES = {
    "save_failed": ("{} save failed", "{} saves failed"),
    "save_refused": ("{} state was not fit to be saved", "{} states were not fit to be saved"),
    "bad_step": ("{} step was bad", "{} steps were bad"),
    "rollback": ("the run rolled back {} time", "the run rolled back {} times"),
    "quarantined": ("{} checkpoint was set aside", "{} checkpoints were set aside"),
}


def troubles(events: Iterable[Event], fit: int | None = None) -> str:
    """The problems that a run has had and survived, as a clause; empty if there were none.

    Args:
        events: Its ledger.
        fit: Only this fit; default: all fits.
    """
    found = set()
    for event in events:
        where = getattr(event, "fit", None)
        if event.name in _TROUBLES and fit in (None, where):  # several ranks may record the same bad step
            when = None if isinstance(event, BadStep) else event.time
            found.add((event.name, where, getattr(event, "step", None), when))
    counts = Counter(name for name, *_ in found)
    return ", ".join(_TROUBLES[name][counts[name] > 1].format(counts[name]) for name in _TROUBLES if counts[name])
