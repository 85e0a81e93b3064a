"""The allocations of a run, computed from the ledger alone.

An *allocation* is one start of a scheduler's job, or one call of ``launch`` without a scheduler. A *job chain* is the
allocations of one job since it was submitted, or since the run last ended for good. In the ledger an allocation is a
``slice``, and the job's id is ``slurm_job_id`` under any scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_resilience.launch.budget import Event, verified_step

ALLOCATIONS_WITHOUT_PROGRESS = 10
"""After so many allocations in a row without a new verified step a job chain ends: something takes every job away
before the run can save, and does so for ever."""

Then = Literal["requeue", "end"]
"""What follows an allocation."""


@dataclass
class Allocation:
    """One allocation.

    Attributes:
        began: Seconds since the epoch.
        job_id: The scheduler's id of the job; ``None`` without a scheduler.
        restart_count: How often it had been requeued.
        nodes: The names of its nodes, as far as they are known.
        step_before: Up to which step of its fit nothing could be lost when it began; ``None``: no checkpoint yet.
        step_after: The same now, or when the next one began.
        advanced: Whether a step was verified that never was before.
        launched: Whether ``launch`` has come up in it.
        worker_groups: How often workers were started in it.
        ended: When it said that it ends; ``None`` if it never did.
        how: How it ended, in a few words.
        then: What it said would follow.
        suspects: The nodes that a rank on them has asked to go on without.
        excluded: The nodes that the job must not get from here on.
        last_seen: When anything was recorded in it last.
        exit: What ``launch`` has recorded about its end.
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
    exit: Event | None = None

    @property
    def has_launcher(self) -> bool:
        """Whether somebody starts the workers again when they fail; a script that was started by itself has nobody."""
        return self.launched or self.job_id is not None


def allocations_of(events: Iterable[Event]) -> list[Allocation]:
    """Folds a ledger into allocations.

    Args:
        events: The run's ledger, oldest first.
    """
    allocations: list[Allocation] = []
    highest: dict[int, int] = {}
    begun: set[Any] = set()  # the fits of a run without launcher; no process begins the same one twice
    safe: int | None = None
    for event in events:
        time = event["time"]
        current = allocations[-1] if allocations else None
        match event["event"]:
            case "slice_start":
                job_id, nodes = str(event.get("slurm_job_id")), list(event.get("node_list") or [])
                excluded = list(current.excluded) if current is not None and current.job_id == job_id else []
                current = Allocation(time, job_id, event.get("restart_count"), nodes, safe, safe, excluded=excluded)
                allocations.append(current)
            case "launch":
                if current is None or current.job_id is None or current.launched or current.ended is not None:
                    current = Allocation(time, event.get("slurm_job_id"), event.get("slurm_restart_count"))
                    current.step_before = current.step_after = safe
                    allocations.append(current)
                current.launched = True
            case "fresh" | "resumed" if current is None or _has_ended(current, event.get("fit") in begun):
                current = Allocation(time, step_before=safe, step_after=safe)  # of a run without launcher
                allocations.append(current)
                begun = set()
        if current is None:
            continue
        current.last_seen = time
        if (verified := verified_step(event)) is not None:
            fit, step = verified
            if step > highest.get(fit, -1):
                highest[fit] = step
                current.advanced = True
            safe = current.step_after = max(highest.items())[1]
        match event["event"]:
            case "start":
                current.worker_groups += 1
                if not current.nodes and isinstance(event.get("node"), str):
                    current.nodes = [event["node"]]
            case "fresh" | "resumed":
                begun.add(event.get("fit"))
                if not current.launched:
                    current.exit = None  # the script goes on with another fit
            case "interrupted" | "finished" | "fault" if not current.launched:
                current.exit = event | {"status": "failed" if event["event"] == "fault" else event["event"]}
            case "workload_request" if event.get("action") == "exclude_this_node":
                node = str(event.get("node"))
                current.suspects = [*(each for each in current.suspects if each != node), node]
            case "exit":
                current.exit = event
            case "slice_end":
                current.ended, current.how = time, str(event.get("how"))
                current.then = "requeue" if event.get("then") == "requeue" else "end"
                current.excluded = list(event.get("excluded") or [])
    return allocations


def _has_ended(allocation: Allocation, is_fit_begun: bool) -> bool:
    """Whether an allocation was over when a fit began, which thus is of a run that was started without launcher."""
    if allocation.launched:
        return allocation.ended is not None or allocation.exit is not None
    return allocation.ended is not None or is_fit_begun


def current_job_chain(allocations: Sequence[Allocation]) -> list[Allocation]:
    """Those that belong together with the last one."""
    if not allocations:
        return []
    # A job that a person has submitted, or a launch by hand, has a count of its own.
    job_id = allocations[-1].job_id
    apart = (index + 1 for index, each in enumerate(allocations[:-1]) if each.then == "end" or each.job_id != job_id)
    begin = max(apart, default=0)
    return list(allocations[begin:])


def why_it_must_end(job_chain: Sequence[Allocation], restart_count: int, max_requeues: int) -> str | None:
    """Why there must be no further allocation, if so.

    Args:
        job_chain: Its allocations so far, all of which have ended.
        restart_count: How often the scheduler says that the job has been requeued: a job that does not come far enough
            to write a line counts, too.
        max_requeues: How often it may be.
    """
    requeued = max(restart_count, len(job_chain) - 1)
    if requeued >= max_requeues:
        return f"the job has been requeued {requeued} times, and --max-requeues={max_requeues}"
    idle = 0
    for each in reversed(job_chain):
        if each.advanced:
            break
        idle += 1
    if idle >= ALLOCATIONS_WITHOUT_PROGRESS:
        return f"no new step has become safe in {idle} allocations in a row"
    return None


def nodes_to_exclude(last: Allocation, usable_nodes: int | None) -> list[str]:
    """The nodes that the job must not get again.

    Never more than a quarter of the nodes of the job, but one at least; the oldest come back first. A single node is
    never excluded: with nothing to compare it to, nobody knows whether it is to blame.

    Args:
        last: The allocation that has just ended.
        usable_nodes: How many nodes the job could be given at all; ``None`` if unknown, then nothing is added.
    """
    count = len(last.nodes)
    suspects = [node for node in last.suspects if node in last.nodes]
    if count < 2 or not suspects:
        return last.excluded
    wanted = [*(node for node in last.excluded if node not in suspects), *suspects][-max(1, count // 4) :]
    if usable_nodes is None or usable_nodes - len(wanted) < count:
        return last.excluded  # or the job would wait for ever
    return wanted
