"""The slices of a run: what it has made of each job that it was given, computed from the ledger alone.

A *slice* is one start of a Slurm job, or one call of ``launch`` outside of Slurm. The *chain* is what the last job has
made since it was submitted, or since the run last ended for good.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_resilience.launch.budget import Event, verified_step

SLICES_WITHOUT_PROGRESS = 10
"""After so many slices in a row in which no new step was verified, a chain ends: something takes every job away before
the run can save, and does so for ever."""

Then = Literal["requeue", "end"]
"""What follows a slice."""


@dataclass
class Slice:
    """One slice.

    Attributes:
        began: Seconds since the epoch.
        job_id: Slurm's id of the job; ``None`` outside of Slurm.
        restart_count: How often Slurm had requeued it.
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


def slices_of(events: Iterable[Event]) -> list[Slice]:
    """The slices that a ledger tells of.

    Args:
        events: The run's ledger, oldest first.
    """
    slices: list[Slice] = []
    highest: dict[int, int] = {}
    begun: set[Any] = set()  # the fits of a run without launcher; no process begins the same one twice
    safe: int | None = None
    for event in events:
        time = event["time"]
        current = slices[-1] if slices else None
        match event["event"]:
            case "slice_start":
                job_id, nodes = str(event.get("slurm_job_id")), list(event.get("node_list") or [])
                excluded = list(current.excluded) if current is not None and current.job_id == job_id else []
                current = Slice(time, job_id, event.get("restart_count"), nodes, safe, safe, excluded=excluded)
                slices.append(current)
            case "launch":
                if current is None or current.job_id is None or current.launched or current.ended is not None:
                    current = Slice(time, event.get("slurm_job_id"), event.get("slurm_restart_count"))
                    current.step_before = current.step_after = safe
                    slices.append(current)
                current.launched = True
            case "fresh" | "resumed" if current is None or _has_ended(current, event.get("fit") in begun):
                current = Slice(time, step_before=safe, step_after=safe)  # of a run that was started without launcher
                slices.append(current)
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
    return slices


def _has_ended(slice_: Slice, is_fit_begun: bool) -> bool:
    """Whether a slice was over when a fit began, which thus is of a run that was started without launcher."""
    if slice_.launched:
        return slice_.ended is not None or slice_.exit is not None
    return slice_.ended is not None or is_fit_begun


def current_chain(slices: Sequence[Slice]) -> list[Slice]:
    """Those that belong together with the last one."""
    if not slices:
        return []
    # A job that a person has submitted, or a launch by hand, has a count of its own.
    job_id = slices[-1].job_id
    apart = (index + 1 for index, each in enumerate(slices[:-1]) if each.then == "end" or each.job_id != job_id)
    begin = max(apart, default=0)
    return list(slices[begin:])


def why_it_must_end(chain: Sequence[Slice], restart_count: int, max_requeues: int) -> str | None:
    """Why there must be no further slice, if so.

    Args:
        chain: The slices so far, all of which have ended.
        restart_count: How often Slurm says that the job has been requeued: a job that does not come far enough to write
            a line counts, too.
        max_requeues: How often it may be.
    """
    requeued = max(restart_count, len(chain) - 1)
    if requeued >= max_requeues:
        return f"the job has been requeued {requeued} times, and --max-requeues={max_requeues}"
    idle = 0
    for each in reversed(chain):
        if each.advanced:
            break
        idle += 1
    if idle >= SLICES_WITHOUT_PROGRESS:
        return f"no new step has become safe in {idle} slices in a row"
    return None


def nodes_to_exclude(last: Slice, usable_nodes: int | None) -> list[str]:
    """The nodes that the job must not get again.

    Never more than a quarter of the nodes of the job, but one at least; the oldest come back first. A single node is
    never excluded: with nothing to compare it to, nobody knows whether it is to blame.

    Args:
        last: The slice that has just ended.
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
