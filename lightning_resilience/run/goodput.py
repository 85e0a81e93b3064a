"""Accounts for the time of a run: each second of each rank, over all restarts, in one category. No torch, no Lightning.

**What is accounted.** From the first launch to the end, a run has one *slot* per rank. Most of a slot's time is in the
accounts that processes keep themselves (:mod:`.time_account`). The rest is between two processes, where the events of
launcher and scheduler show what happened:

==================  ====================================================================================================
``queue``           the scheduler has the job, but no nodes for it yet
``launch``          launcher and job retries, from the start of the launch or of the allocation
``rendezvous``      nodes find each other, ended workers are cleaned up, new ones start; survivors wait for new ones
``imports``         imports of a worker, up to the callbacks, and with them torch and Lightning
``script``          the script, up to ``fit`` and between two fits
``setup``           setup of a fit: process group, strategy, sanity check
``restore``         the checkpoint is chosen and loaded
``fast_forward``    the data loaders are advanced to the position of the run
``first_step``      the first step of a process or after a rollback: workers start, kernels are compiled
``productive``      steps never done before; a step counts as done when the batch after it begins
``wasted_progress`` steps done again, and without a fault a step that was begun and did not end
``data_loading``    training waits for a batch; on an accelerator it is part of the step
``callbacks``       hooks and loggers between two steps, and the end of an epoch
``validation``      validation
``straggler_wait``  time of new steps in which a rank waited in collectives for a rank that a report found slow
``checkpoint_save`` training waits for a save
``detection``       in a fault: the step that a rank in a fit had begun, or its last other activity, until the verdict
``teardown``        from the verdict, or the end of the last fit, to the end of the launch or the next start of the job
``idle``            the run was not running: the launch had ended or was killed, and no scheduler had the job
``other``           unknown: all workers were killed before their account was kept; up to their last event
==================  ====================================================================================================

**Waiting for a straggler.** Only ``StragglerDetection`` distinguishes it from work, so without this callback there is
none. Its reports give how long the ranks that are not stragglers have waited for the slowest rank since the previous
report: in each new step the time by which it is slower than the slowest of these ranks, but no more than their measured
wait. Waits of equally fast ranks for each other are part of a step, as is the transfer. Waits that are in no report
stay ``productive``: for ranks that are slow but within the callback's threshold, or slow only for a while, and waits
after the last report. The wait is attributed to the node of the straggler.

The last sign of life of a node that went down is in its kept account, up to 30 s earlier. If no process is left to give
a verdict, its processes end at that time. If nothing was kept yet, its ranks are taken to have done the same as the
other ranks. For a run that is still running, the last kept account is extended until now.

Without a launcher an account ends with its fit, a fit that fails is an interruption, and the time between two accounts
is ``idle``. In an interactive session (a notebook) an account also begins with its fit: what a person does before is
not part of the run. If no watchdog reads the account of a rank and the rank is killed, its account is in node memory,
up to the last step that it had begun; the next start on the node finds it there. If node memory is gone, nothing is
known, and the time is ``idle``.

**On an accelerator** the time of a step runs from one training boundary to the next, by the clock of the host, minus
validation and saves. In this time the host waits for data and runs hooks while the device computes, or the device waits
for the host. Only the device's queue could distinguish these, and a query at every step would be a sync. So both are in
the category ``productive``. ``StragglerDetection`` measures with events how long the device was idle in the steps that
it times; its reports name ``data loading`` if a rank is slow because of that.

**Absent ranks.** While a run continues without a rank, no process has its place, and the rank's time is in no category
and no share. The time of the other ranks counts; their steps take longer if they also train on its data. Reports show
the absent time separately.

**Goodput** is the share of ``productive`` in all time but ``idle``. **ETTR**, the effective training time ratio of
Meta's "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (2024), has the same denominator (all
time in which the run is scheduled or waits for that) and counts all training proper: everything but repeated steps,
restarts and waits in a queue.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from lightning_resilience.run import time_account
from lightning_resilience.run.events import (
    AllocationEnd,
    AllocationStart,
    Event,
    Fault,
    FitInterrupted,
    Fresh,
    JobFailed,
    JobStart,
    Killed,
    LauncherKilled,
    LaunchExit,
    LaunchStart,
    RanksReplaced,
    Resumed,
    Stragglers,
    StragglersReplaced,
    StragglerStop,
    TimeSpent,
    WorkersStart,
)
from lightning_resilience.run.failures import faults_of, first_cause, is_of_watchdog

CATEGORIES = (
    "productive",
    "wasted_progress",
    "data_loading",
    "callbacks",
    "validation",
    "checkpoint_save",
    "straggler_wait",
    "queue",
    "launch",
    "rendezvous",
    "imports",
    "script",
    "setup",
    "restore",
    "fast_forward",
    "first_step",
    "detection",
    "teardown",
    "idle",
    "other",
)

TRAINING = ("productive", "data_loading", "callbacks", "validation", "checkpoint_save", "straggler_wait")
"""The categories that ETTR counts as training."""

START = ("launch", "rendezvous", "imports", "script", "setup", "restore", "fast_forward", "first_step")


class Loss(NamedTuple):
    """The key of a sum of time: a category, with the cause of the time and its node.

    Attributes:
        category: See the module.
        cause: Cause of the interruption that it belongs to: ``hang``, ``killed``, ...; empty if none. The time of a
            start, also after a rollback or for another fit, and steps done again belong to the previous interruption.
            Without an interruption, waiting for a straggler has the cause ``straggler``.
        node: Node of the rank, or of the straggler it waits for; empty: everywhere.
    """

    category: str
    cause: str
    node: str


_loss = functools.lru_cache(maxsize=None)(Loss)  # a run has some thousands, each used again and again

PARTS = ("detect", "end", "start", "restore", "redo")
"""The parts of an interruption in their order; ``redo`` is lost work that is done again."""

PART_OF = {
    **dict.fromkeys(("queue", *START), "start"),
    **{"detection": "detect", "teardown": "end", "restore": "restore", "fast_forward": "restore"},
}
"""The part to which a category belongs; the other categories belong to ``redo``."""

PHASES = ("detect", "end", "queue", *(each for each in START if each != "fast_forward"), "redo")
"""The parts, with ``start`` replaced by its categories."""


@dataclass
class InterruptionCost:
    """An end of a group of workers before the end of the run, and its costs.

    Attributes:
        time: When the fault was recorded, otherwise when the workers ended; in seconds since the epoch.
        cause: ``killed``, ``hang``, ``preempted``, ``NaN``, ``straggler``, ``disk``, ``script`` or ``crash``.
        reason: The recorded reason.
        node: The node where it began; empty if unknown, or everywhere.
        seconds: Rank-seconds by category, from the last sign of life until the next workers do steps never done before.
    """

    time: float
    cause: str
    reason: str = ""
    node: str = ""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def parts(self) -> dict[str, float]:
        """Rank-seconds by part, see :data:`PARTS`."""
        parts = dict.fromkeys(PARTS, 0.0)
        for category, seconds in self.seconds.items():
            parts[PART_OF.get(category, "redo")] += seconds
        return parts

    @property
    def phases(self) -> dict[str, float]:
        """Rank-seconds by phase, see :data:`PHASES`."""
        phases = dict.fromkeys(PHASES, 0.0)
        for category, seconds in self.seconds.items():
            part = PART_OF.get(category, "redo")
            phases[category if part == "start" else part] += seconds
        return phases


class Segment(NamedTuple):
    """The time of a rank from one moment to another.

    Attributes:
        node: Its node; empty if unknown.
        begin: In seconds since the epoch.
        end: In seconds since the epoch.
        seconds: Seconds by category: several alternating categories for steps, otherwise one.
    """

    node: str
    begin: float
    end: float
    seconds: Mapping[str, float]


@dataclass
class Life:
    """A group of workers, with the time since the end of the previous group.

    Attributes:
        began: When its first process began, in seconds since the epoch.
        ended: When its last process ended, in seconds since the epoch.
        interruption: Why it ended before the end of the run; ``None`` if it did not.
        seconds: Rank-seconds by category, including the time between the previous processes and its own.
    """

    began: float
    ended: float
    interruption: InterruptionCost | None
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass
class Goodput:
    """The account of a run.

    Attributes:
        began: When it was launched first, in seconds since the epoch.
        ended: When it ended, or the present time if it is running.
        seconds: Rank-seconds by category, cause and node.
        ranks: The largest number of ranks that it had.
        absent_s: Rank-seconds of absent ranks while the other ranks trained; in no category.
        interruptions: The ends of groups of workers before the end of the run, in the order of their starts.
        lives: All groups of workers, in the order of their starts.
        segments: The same seconds at their times; ``None`` if not requested. Only the sums of a process are known, not
            their order: here the start comes first, then the steps.
    """

    began: float = 0.0
    ended: float = 0.0
    seconds: defaultdict[Loss, float] = field(default_factory=lambda: defaultdict(float))
    ranks: int = 0
    absent_s: float = 0.0
    interruptions: list[InterruptionCost] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    segments: list[Segment] | None = None

    def add(self, category: str, seconds: float, due_to: InterruptionCost | None = None, node: str = "") -> None:
        """Adds time of a rank.

        Args:
            category: Its category.
            seconds: The seconds to add.
            due_to: The interruption that it belongs to.
            node: Its node.
        """
        cause = due_to.cause if due_to is not None else "straggler" if category == "straggler_wait" else ""
        self.seconds[_loss(category, cause, node)] += seconds
        if self.lives:
            self.lives[-1].seconds[category] += seconds
        if due_to is not None:
            due_to.seconds[category] += seconds

    def add_segment(
        self, category: str, begin: float, end: float, due_to: InterruptionCost | None = None, node: str = ""
    ) -> None:
        """Adds time of a rank with known begin and end.

        Args:
            category: Its category.
            begin: In seconds since the epoch.
            end: In seconds since the epoch.
            due_to: The interruption that it belongs to.
            node: Its node.
        """
        self.add(category, end - begin, due_to, node)
        if self.segments is not None:
            self.segments.append(Segment(node, begin, end, {category: end - begin}))

    @property
    def causes(self) -> Counter[str]:
        """The number of interruptions by cause."""
        return Counter(each.cause for each in self.interruptions)

    @property
    def by_category(self) -> dict[str, float]:
        """Rank-seconds of every category."""
        total: defaultdict[str, float] = defaultdict(float)
        for loss, seconds in self.seconds.items():
            total[loss.category] += seconds
        return {category: total[category] for category in CATEGORIES}

    @property
    def total(self) -> float:
        """All rank-seconds."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of the time that went into steps never done before; NaN if nothing has run."""
        return share_of(self.by_category, ("productive",))

    @property
    def ettr(self) -> float:
        """Effective training time ratio; NaN if nothing has run."""
        return share_of(self.by_category, TRAINING)


def share_of(seconds: Mapping[str, float], categories: Iterable[str]) -> float:
    """The share of some categories in all time but ``idle``; NaN if nothing has run.

    Args:
        seconds: Seconds by category.
        categories: The categories that count, such as :data:`TRAINING` for ETTR.
    """
    active = sum(each for name, each in seconds.items() if name != "idle")
    return sum(seconds.get(each, 0.0) for each in categories) / active if active > 0 else float("nan")


def reached_step(run_dir: Path, events: Iterable[Event], fit: int) -> int:
    """The furthest step that a fit has reached in any earlier process.

    Args:
        run_dir: The run directory.
        events: The run's ledger.
        fit: Number of the fit.
    """
    steps = [event.reached for event in time_account.kept(run_dir) if event.fit == fit]
    for event in events:
        if getattr(event, "fit", None) == fit:
            steps.append(event.reached if isinstance(event, TimeSpent) else getattr(event, "step", None))
    return max((step for step in steps if step is not None), default=0)


# -- groups ------------------------------------------------------------------------------------------------------------


_CLOCKS_DIFFER_S = 1.0
"""How much later a report may appear to be than a step that begins after it on another node."""


@dataclass
class _Process:
    """A rank of one group of workers."""

    node: str
    began: float
    since: float
    ended: float
    doing: str
    seconds: dict[str, float]
    is_kept: bool
    """Whether this is an account that was kept while the process ran, not its final one."""
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds that it has waited for stragglers, by their node; no longer included in ``productive``."""


@dataclass
class _Group:
    """The workers of one start, on all nodes."""

    processes: dict[int, _Process] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    elastic_run_id: str | None = None
    world_size: int = 0
    since: float = 0.0
    """When joining ranks were admitted, whose processes are older than the group."""
    killed: list[int] = field(default_factory=list)
    """Ranks without a watchdog that were killed, as the next start has recorded."""

    @property
    def began(self) -> float:
        return max(self.since, min(each.began for each in self.processes.values()))

    @property
    def ended(self) -> float:
        return max(each.ended for each in self.processes.values())

    def is_of_same_job(self, before: _Group) -> bool:
        """Whether an elastic launcher has started these workers to replace the workers of ``before``."""
        return self.elastic_run_id is not None and self.elastic_run_id == before.elastic_run_id

    @functools.cached_property
    def faults(self) -> list[Fault]:
        """The faults that have ended the group; not those of a fit whose failure the script has caught."""
        return faults_of(self.events)

    def extend(self, now: float | None) -> None:
        """Extends kept accounts of processes to the end of the processes.

        Args:
            now: The present time, if the processes may be running.
        """
        ends = [each.ended for each in self.processes.values() if not each.is_kept]
        if now is not None and not (ends and self.interruption):
            ends = [now]
        for process in self.processes.values():
            if process.is_kept:
                process.ended = max([process.ended, *ends])

    def find_waits(self) -> None:
        """Moves the time that ranks have waited for stragglers from their productive time to ``waits``."""
        for event in self.events:
            if not isinstance(event, Stragglers) or event.slowest not in self.processes:
                continue
            node = self.processes[event.slowest].node
            for rank, process in self.processes.items():
                productive = process.seconds.get("productive", 0.0)
                if process.is_kept and event.time > process.since + _CLOCKS_DIFFER_S:
                    continue  # the kept account is older than the report
                if rank not in (event.ranks or ()) and (waited := min(event.waited or 0.0, productive)) > 0:
                    process.seconds["productive"] = productive - waited
                    process.waits[node] = process.waits.get(node, 0.0) + waited

    @property
    def interruption(self) -> InterruptionCost | None:
        """Why the group ended before the end of the run; ``None`` if it did not."""
        faults = self.faults
        ranks: Sequence[int | None] = ()
        reason = "the launcher was killed, and its workers with it"
        first = {type(event): event for event in reversed(self.events)}
        stop: Event | None = first.get(StragglerStop) or first.get(StragglersReplaced)
        if isinstance(stop, (StragglerStop, StragglersReplaced)):
            cause, ranks = "straggler", stop.ranks or ()
        elif faults:
            culprit = first_cause(faults)
            cause = "killed" if culprit is None else _kind_of(culprit)  # a killed rank records nothing, its peers do
            stop, ranks = culprit or faults[0], () if culprit is None else [culprit.rank]
        elif (stop := first.get(Killed) or first.get(LauncherKilled)) is not None:
            cause = "killed"
        elif (stop := first.get(FitInterrupted)) is not None:
            cause = "preempted"
        elif self.killed:
            cause, ranks, reason = "killed", self.killed, "its processes were killed"
        else:
            return None
        nodes = {self.processes[rank].node for rank in ranks if rank in self.processes}
        return InterruptionCost(
            time=stop.time if faults and stop is not None else self.ended,
            cause=cause,
            reason=str(getattr(stop, "reason", None) or reason),
            node=nodes.pop() if len(nodes) == 1 else "",
        )


def account(
    events: Sequence[Event],
    running: Iterable[TimeSpent] = (),
    now: float | None = None,
    with_segments: bool = False,
) -> Goodput:
    """The account of a run.

    Args:
        events: Its ledger.
        running: Kept accounts of ranks that are running, or whose node went down (:func:`.time_account.kept`).
        now: The present time in seconds since the epoch if the run is running; otherwise it ended with its last event.
        with_segments: Whether to fill :attr:`Goodput.segments`.
    """
    segments: list[Segment] | None = [] if with_segments else None
    groups = _groups(events, running)
    launcher = sorted(((_time(event), event) for event in events if isinstance(event, _LAUNCHER)), key=itemgetter(0))
    begins = [*(time for time, _ in launcher[:1]), *(group.began for group in groups[:1])]
    if not begins:
        return Goodput(segments=segments)
    ends = [*(event.time for event in events), *(group.ended for group in groups)]
    found = Goodput(began=min(begins), ended=max(ends) if now is None else now, segments=segments)
    gaps = _Gaps(found, launcher)
    if not groups:
        gaps.add(found.began, found.ended, "launch")
        return found
    for group in groups:
        is_over = group is not groups[-1] or any(isinstance(event, (JobFailed, LaunchExit)) for event in group.events)
        group.extend(None if is_over else now)
        group.find_waits()
    due_to: InterruptionCost | None = None
    of_job: set[int] = set()
    for before, group in zip([None, *groups], groups, strict=False):
        interruption = group.interruption
        verdict = min((fault.time for fault in group.faults), default=None)
        found.ranks = max(found.ranks, len(group.processes))
        found.lives.append(Life(group.began, group.ended, interruption))
        if before is not None and group.is_of_same_job(before):
            found.absent_s += len(of_job - group.processes.keys()) * (group.ended - before.ended)
        else:
            of_job.clear()
        of_job |= group.processes.keys()
        for rank, process in group.processes.items():
            if before is None:
                gaps.add(found.began, process.began, "launch", node=process.node)
            else:
                same = before.processes.get(rank)
                doing = "rendezvous" if group.is_of_same_job(before) else "idle"
                gaps.add(before.ended if same is None else same.ended, process.began, doing, due_to, process.node)
            _add_process(found, process, due_to, interruption, verdict)
        if (due_to := interruption) is not None:
            found.interruptions.append(due_to)
    is_restarting = now is not None and due_to is not None and groups[-1].elastic_run_id is not None
    for process in groups[-1].processes.values():
        doing = "rendezvous" if is_restarting else "teardown"
        gaps.add(process.ended, found.ended, doing, due_to, process.node)
    return found


def _time(event: Event) -> float:
    """When an event happened; a launch begins before it can record that."""
    return event.began if isinstance(event, LaunchStart) and event.began is not None else event.time


def _groups(events: Iterable[Event], running: Iterable[TimeSpent]) -> list[_Group]:
    """The groups of workers in the order of their starts, with their events."""
    recorded = [event for event in events if isinstance(event, TimeSpent)]
    known = {(event.attempt, event.node) for event in recorded}
    kept = [event for event in running if (event.attempt, event.node) not in known]
    groups: defaultdict[object, _Group] = defaultdict(_Group)
    of_processes = [(event.attempt or number, event) for number, event in enumerate([*recorded, *kept])]
    for number, (key, event) in enumerate(of_processes):
        group = groups[key]
        group.elastic_run_id = event.elastic_run_id
        group.world_size = max(group.world_size, event.world_size or 0)
        is_kept = number >= len(recorded)
        group.killed += event.ranks or () if event.killed else ()
        with suppress(LookupError, TypeError, ValueError):  # not in the form that this package writes
            group.processes |= {rank: _process(event, index, is_kept) for index, rank in enumerate(event.ranks or ())}
    of_start: dict[object, _Group] = {
        (each.elastic_run_id, each.restart_count, each.node): groups[key]
        for key, each in of_processes
        if each.elastic_run_id is not None  # without a launcher all starts would have the same key
    }
    for change in events:
        if isinstance(change, RanksReplaced) and change.ranks == []:
            grown = of_start.get((change.elastic_run_id, change.restart_count, change.node))
            if grown is not None:
                grown.since = change.time
    found = sorted((group for group in groups.values() if group.processes), key=lambda group: group.began)
    for group in found:
        lost = set(range(group.world_size)) - group.processes.keys()  # their node went down before anything was kept
        mean = _mean(list(group.processes.values()))
        group.processes |= {rank: replace(mean, seconds=dict(mean.seconds), waits={}) for rank in lost}
    found = sorted([*found, *_unaccounted(events, found)], key=lambda group: group.began)
    starts = [group.began for group in found]
    for each in events:
        if not isinstance(each, _OF_GROUP):
            continue
        start = is_of_watchdog(each) and of_start.get((each.elastic_run_id, each.restart_count, each.node))
        if start:
            start.events.append(each)
        elif (index := bisect.bisect_right(starts, each.time) - 1) >= 0:
            found[index].events.append(each)
    return found


def _mean(processes: Sequence[_Process]) -> _Process:
    """An estimate for a killed rank without an account: ranks train in step, and most end in the same way."""
    within = [each for each in processes if each.doing != "teardown"]
    [(doing, _)] = Counter(each.doing for each in within or processes).most_common(1)
    processes = [each for each in processes if each.doing == doing]

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(processes)

    return _Process(
        node="",
        began=mean(each.began for each in processes),
        since=mean(each.since for each in processes),
        ended=mean(each.ended for each in processes),
        doing=doing,
        seconds={
            category: mean(each.seconds.get(category, 0.0) for each in processes)
            # In an order that does not depend on hashes, since sums depend on it.
            for category in dict.fromkeys(category for each in processes for category in each.seconds)
        },
        is_kept=all(each.is_kept for each in processes),
    )


def _unaccounted(events: Iterable[Event], groups: Sequence[_Group]) -> Iterator[_Group]:
    """Groups that were killed before their accounts were kept, if others followed; they end with their last event."""
    begins = [group.began for group in groups]
    start: WorkersStart | None = None
    last = 0.0
    for event in events:
        if not isinstance(event, WorkersStart):
            last = last if event.rank is None else max(last, event.time)
            continue
        if start is not None and groups:
            index = bisect.bisect_right(begins, start.time) - 1
            if index < 0 or start.time > groups[index].ended:
                process = _Process("", start.time, start.time, last, "other", {}, is_kept=False)
                ranks = groups[max(index, 0)].processes  # the same number as in the previous group
                yield _Group({rank: replace(process) for rank in ranks}, [], start.elastic_run_id)
        start, last = event, event.time


def _process(event: TimeSpent, index: int, is_kept: bool) -> _Process:
    began, since, ended = (float((times or ())[index]) for times in (event.began, event.since, event.ended))
    seconds = {name: float(by_rank[index]) for name, by_rank in (event.seconds or {}).items()}
    if not math.isfinite(began + since + ended + sum(seconds.values())):
        raise TypeError("not finite")
    return _Process(event.node or "", began, since, ended, (event.doing or ())[index], seconds, is_kept)


_ENDS = (Fault, Killed, FitInterrupted, StragglerStop, StragglersReplaced, LauncherKilled, JobFailed, LaunchExit)
_OF_GROUP = (WorkersStart, Fresh, Resumed, Stragglers, *_ENDS)
_NAN = ("TrainingDiverged", "RerunElsewhere")
_DISK = ("StorageFails",)


def _kind_of(fault: Fault) -> str:
    kind = fault.kind or ""
    if kind == "hang":
        return "hang"
    if kind == "died":
        return "killed"
    if kind in _NAN:
        return "NaN"
    if kind in _DISK or "No space left" in str(fault.reason):
        return "disk"
    return "script" if fault.mistake else "crash"


def _add_process(
    found: Goodput,
    process: _Process,
    before: InterruptionCost | None,
    interruption: InterruptionCost | None,
    verdict: float | None,
) -> None:
    """Adds the account of a process.

    Args:
        found: The account of the run, to which it is added.
        process: The process.
        before: The interruption before it, to which the costs of its start belong.
        interruption: The interruption that ended it.
        verdict: When a fault was found.
    """
    due_to = {**dict.fromkeys((*START, "wasted_progress"), before), "teardown": interruption}
    unfinished = "wasted_progress" if verdict is None else "detection"
    for category, seconds in process.seconds.items():
        if category == "unfinished_step":
            found.add(unfinished, seconds, interruption, process.node)
        else:
            found.add(category, seconds, due_to.get(category), process.node)
    for node, seconds in process.waits.items():
        found.add("straggler_wait", seconds, node=node)
    if found.segments is not None:
        found.segments += _segments(process, unfinished)
    if process.ended <= process.since:
        return
    if process.doing in ("imports", "script", "teardown", "other") or interruption is None:
        found.add_segment(process.doing, process.since, process.ended, due_to.get(process.doing), process.node)
        return
    stopped = process.ended if verdict is None else min(max(verdict, process.since), process.ended)
    if verdict is None and process.doing != "productive":
        unfinished = process.doing
    found.add_segment(unfinished, process.since, stopped, interruption, process.node)
    found.add_segment("teardown", stopped, process.ended, interruption, process.node)


_STEPS = ("productive", "wasted_progress", *TRAINING[1:])
_IN_ORDER = (
    *(("imports",), ("script",), ("rendezvous",), ("setup",), ("restore",), ("fast_forward",), ("first_step",)),
    *(_STEPS, ("unfinished_step",), ("teardown",)),
)


def _segments(process: _Process, unfinished: str) -> Iterator[Segment]:
    """The account of a process as consecutive segments.

    Args:
        process: The process.
        unfinished: The category of a step that was begun and did not end.
    """
    begin, spent_on = process.began, process.seconds | {"straggler_wait": sum(process.waits.values())}
    for names in _IN_ORDER:
        seconds = {
            unfinished if name == "unfinished_step" else name: spent for name in names if (spent := spent_on.get(name))
        }
        if seconds:
            end = begin + sum(seconds.values())
            yield Segment(process.node, begin, end, seconds)
            begin = end


# -- between two processes ---------------------------------------------------------------------------------------------


_LAUNCHER = (LaunchStart, JobStart, JobFailed, LauncherKilled, LaunchExit, AllocationStart, AllocationEnd)


class _Gaps:
    """The time in which a slot has no process."""

    def __init__(self, found: Goodput, launcher: Sequence[tuple[float, Event]]) -> None:
        self._found = found
        self._launcher = launcher
        self._times = [time for time, _ in launcher]

    def add(self, begin: float, end: float, doing: str, due_to: InterruptionCost | None = None, node: str = "") -> None:
        """Adds the time between two processes.

        Args:
            begin: The end of the first, in seconds since the epoch.
            end: The start of the second, in seconds since the epoch.
            doing: The category if no event of the launcher lies between.
            due_to: The interruption before.
            node: The node of the second.
        """
        within = self._launcher[bisect.bisect_left(self._times, begin) : bisect.bisect_right(self._times, end)]
        before: Event | None = None
        for time, after in [*within, (end, None)]:
            if time > begin:
                happens = _between(before, after, doing)
                self._found.add_segment(happens, begin, time, None if happens == "idle" else due_to, node)
                begin = time
            before = after


def _between(before: Event | None, after: Event | None, otherwise: str) -> str:
    """The category of the time between two events of the launcher; ``None`` stands for an end or start of a process."""
    match before, after:
        case LaunchExit(), AllocationEnd():
            return "teardown"
        case ((LaunchExit(new_job=True) | AllocationEnd(then="requeue")), _):
            return "queue"
        case _, AllocationStart():
            return "queue" if after.restart_count else "idle"  # requeued, without a record of the reason
        case ((LaunchExit() | AllocationEnd()), _):
            return "idle"
        case AllocationStart(), _:
            return "launch"
        case (_, LaunchStart()) | (None, LauncherKilled()):
            return "idle"
        case (JobStart(), _) | (None, JobStart()):
            return "rendezvous"
        case None, None:
            return otherwise
        case None, _:
            return "teardown"
    return "launch"
