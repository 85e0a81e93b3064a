"""Finds out why groups of workers ended, and which failures are the same: pure functions over a ledger's events.

A *group* is the ranks of one start. Its events are all events from one ``start`` to the next.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

from lightning_resilience.run.events import (
    Event,
    Fault,
    Fresh,
    JobInfo,
    Killed,
    LaunchStart,
    NotRestored,
    RanksReplaced,
    Resumed,
    WorkersStart,
)

F = TypeVar("F", Fault, NotRestored)

REFUSED_ARGUMENTS = "the script ended by sys.exit(2)"  # argparse's

_LOST_PEER = re.compile(r"PeerLost|Connection (closed|reset) by peer|ncclRemoteError|NCCL communicator was aborted")
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w.])\.{0,2}/[^\s'\"`,;:()<>\[\]]+")
_HEX = re.compile(
    r"\b(0x[0-9a-f]+|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{8,})\b",
    re.IGNORECASE,
)
_NUMBERS = re.compile(r"\d+([.,]?\d+|e[-+]?\d+|(, and|,| and) \d+)*")  # also lists of ranks, which vary in length


@dataclass(frozen=True)
class Failure:
    """What identifies the end of a group of workers: two equal ones are recurrences of the same failure.

    Args:
        kind: Name of the exception's class, ``hang``, or ``a worker was killed``.
        message: The error message without parts that vary when it recurs: numbers, addresses, paths. Empty for a hang,
            whose ranks are in another state each time.
        place: The user's innermost line, ``train.py:80``, if it is known.
        fit: Number of the fit in which it occurred; ``None`` if outside of every fit, or unknown.
        step: ``trainer.global_step`` at which it occurred, if known.
        origin: Where the workers had begun, as a clause: ``after resuming from step 30``.
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
        """Why a group of workers ended.

        Args:
            group: Its events, oldest first, with the ``start`` if one was recorded.
        """
        group = list(group)
        verified = fit = None
        origins: dict[int | None, str] = {}
        for event in group:
            match event:
                case WorkersStart():
                    verified = event.verified_step
                case Resumed() | Fresh():
                    fit = event.fit
                    origins[fit] = f"after resuming from step {event.step}" if event.step else "from the beginning"
        origins.setdefault(None, "before the first checkpoint" if verified is None else f"with step {verified} safe")
        faults = faults_of(group)
        cause = first_cause(faults)
        if cause is None:
            return Failure("a worker was killed", fit=fit, origin=origins[fit])
        kind, fit = cause.kind or "failure", cause.fit
        return Failure(
            kind=kind,
            message="" if kind == "hang" else normalised(str(cause.reason)),
            place=next((fault.place for fault in faults if fault.rank == cause.rank and fault.place), None),
            fit=fit,
            step=cause.step,
            origin=origins.get(fit, "before resuming"),
        )


def is_late(event: Event, start: Event | None) -> bool:
    """Whether a watchdog recorded this end of workers only after their successors on the same node had begun.

    Args:
        event: The event.
        start: The last start recorded before it, if there is one.
    """
    return (
        is_of_watchdog(event)
        and isinstance(start, WorkersStart)
        and (event.elastic_run_id, event.node) == (start.elastic_run_id, start.node)
        and event.restart_count is not None
        and event.restart_count < (start.restart_count or 0)
    )


def is_of_watchdog(event: Event) -> TypeGuard[Fault | Killed]:
    """Whether a watchdog has recorded the event, which gives why ranks have ended. It may do so after their end.

    Args:
        event: The event.
    """
    return isinstance(event, Killed) or (isinstance(event, Fault) and event.kind in ("died", "hang"))


def says_peer_is_lost(reason: str) -> bool:
    """Whether a rank failed because another rank was gone.

    Args:
        reason: Class and message of its exception.
    """
    return _LOST_PEER.search(reason) is not None


def faults_of(group: Iterable[Event]) -> list[Fault]:
    """The faults that may have ended a group of workers.

    Args:
        group: Its events, oldest first, with the ``start`` if one was recorded.
    """
    run_id = None
    start: WorkersStart | None = None
    faults: list[Fault] = []
    for event in group:
        match event:
            case WorkersStart():
                run_id, start = event.elastic_run_id, event
            case Fault() if is_late(event, start):
                pass
            case Resumed() | Fresh():  # the script has caught the exception of an earlier fit and continued
                faults = [fault for fault in faults if fault.has_ended_workers or fault.fit == event.fit]
            case Fault() if run_id is None or not event.has_ended_workers or event.elastic_run_id == run_id:
                faults.append(event)  # otherwise it is a late fault of another job
    return faults


def first_cause(faults: Iterable[F]) -> F | None:
    """The first fault of a group that is not a consequence of another rank's; ``None`` if all are consequences.

    A killed worker records nothing: if all faults are lost peers, a worker was killed. A diagnosed hang explains the
    timeouts of its peers.
    """
    faults = list(faults)
    hung = any(fault.kind == "hang" for fault in faults)
    for fault in faults:
        reason = str(fault.reason)
        if fault.kind == "hang" or not (says_peer_is_lost(reason) or (hung and _TIMED_OUT.search(reason))):
            return fault
    return None


def cause_of_end(events: Iterable[Event], elastic_run_id: str | None) -> str | None:
    """Why the last group of workers of a job ended, in a few words; ``None`` if nothing was recorded about it.

    Args:
        events: The run's ledger, oldest first.
        elastic_run_id: Id of the rendezvous.
    """
    group: list[WorkersStart | JobInfo | Fault | Killed] = []
    restarts: dict[str | None, int] = {}  # by node, since each node counts its own
    replaced: RanksReplaced | None = None  # the last loss; there may be no other record of it yet
    for event in events:
        if isinstance(event, RanksReplaced) and event.elastic_run_id == elastic_run_id and event.ranks != []:
            replaced = event
        if isinstance(event, (WorkersStart, JobInfo, Fault, Killed)) and event.elastic_run_id == elastic_run_id:
            count = event.restart_count or 0
            if isinstance(event, WorkersStart):
                group.clear()
                restarts.clear()
                replaced = None
            elif count > restarts.get(event.node, count):  # a group that died before it could record its start
                group.clear()
            restarts[event.node] = max(count, restarts.get(event.node, 0))
            if count == restarts[event.node]:
                group.append(event)
    faults = [event for event in group if isinstance(event, Fault)]
    if not faults:
        reasons = (str(event.reason) for event in (*group, replaced) if isinstance(event, (Killed, RanksReplaced)))
        return next(reasons, None)
    cause = first_cause(faults)
    if replaced is not None and (cause is None or str(cause.reason).endswith(" died")):
        return str(replaced.reason)  # the parent process of the ranks has reaped them and knows how they ended
    if cause is not None:
        return _described(cause)
    starts = [event for event in group if isinstance(event, (WorkersStart, JobInfo))]
    world_size = max((event.world_size or 1 for event in starts), default=1)
    silent = set(range(world_size)) - {event.rank for event in faults}
    who = f"rank {silent.pop()}" if len(silent) == 1 else "a worker"
    return f"{who} was killed ({_described(faults[0])})"


def growths(events: Iterable[Event], elastic_run_id: str | None) -> set[int]:
    """The restart counts of starts that were no restarts: no rank was lost, and joining ranks were admitted.

    Args:
        events: The run's ledger.
        elastic_run_id: Id of the rendezvous.
    """
    return {
        event.restart_count
        for event in events
        if isinstance(event, RanksReplaced)
        and event.ranks == []
        and event.elastic_run_id == elastic_run_id
        and event.restart_count is not None
    }


def _described(fault: Fault) -> str:
    if fault.kind == "died":  # recorded by another process; the reason names the rank
        return str(fault.reason)
    who = "hang" if fault.kind == "hang" else f"rank {fault.rank}"  # a hang's reason names the rank
    return f"{who}: {fault.reason}".removesuffix(".")  # more of the sentence follows


@functools.lru_cache(maxsize=1000)  # all ranks of a group often record the same
def normalised(message: str) -> str:
    """A message without the parts that vary when the same failure recurs: paths, addresses, numbers (also ranks)."""
    for pattern, name in ((_PATH, "<path>"), (_HEX, "<hex>"), (_NUMBERS, "<n>")):
        message = pattern.sub(name, message)
    return " ".join(message.split())


def recurrence(failure: Failure, times: int) -> str:
    """A clause about a failure that has recurred.

    Args:
        failure: The failure.
        times: How often it has occurred.
    """
    suffix = "th" if times % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(times % 10, "th")
    return f"the same failure for the {times}{suffix} time: {failure}, each time {failure.origin}"


class RepeatedMistake:
    """Decides whether another start of the script is useless: it failed twice by the same mistake with no step between.

    All ranks must come to the same answer when a group of workers starts. With several nodes the first node's launch
    decides, since other nodes may not see yet what a node has just written.

    Attributes:
        verdict: Why another start is useless; ``None`` if it is not.
    """

    def __init__(self) -> None:
        self.verdict: str | None = None
        self._command: list[str] | None = None
        self._has_begun = False  # whether this command has begun a training
        self._group = 0  # number of the group of workers
        self._steps: dict[int | None, int] = {}  # step at which each fit of this group began
        self._has_advanced = False  # whether this group has done a step
        self._found: dict[tuple[str, str | None, str], set[int]] = {}

    def add(self, event: Event) -> None:
        """Takes the next event into account."""
        match event:
            case LaunchStart():
                self.verdict = None
                self._found.clear()
                self._has_begun = self._has_begun and event.command == self._command
                self._command = event.command
            case WorkersStart():
                self._group += 1
                self._steps.clear()
                self._has_advanced = False
            case Fresh() | Resumed():
                self._steps[event.fit] = event.step or 0
                self._has_begun = True
            case Fault() if event.has_ended_workers:
                self._judge(event)
            case _:
                fit, step = getattr(event, "fit", None), getattr(event, "step", None)
                if step is not None and fit in self._steps and step > self._steps[fit]:
                    self._has_advanced = True

    def _judge(self, fault: Fault) -> None:
        reason = str(fault.reason)
        groups = self._found.setdefault((str(fault.kind), fault.place, normalised(reason)), set())
        if self._has_advanced:
            groups.clear()
        groups.add(self._group)
        is_mistake = fault.mistake == "code" or (fault.mistake == "file" and not self._has_begun)
        if reason == REFUSED_ARGUMENTS:
            self.verdict = f"{reason}, which means that it was called with wrong arguments"
        elif len(groups) > 1 and is_mistake:
            where = f" ({fault.place})" if fault.place else ""
            self.verdict = f"{reason}{where}, twice with no step between"
