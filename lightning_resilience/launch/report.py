"""``lightning-resilience report``: the timeline of a run and the cost of its interruptions, from the ledger alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning_resilience._formatting import or_dash, shortened, table, timestamp
from lightning_resilience.launch.allocations import allocations_of
from lightning_resilience.launch.budget import Event, Failure, faults_of, first_cause, recurrence
from lightning_resilience.run.ledger import read_ledger
from lightning_resilience.run.run_directory import RunDirectory

_COMMON = ("event", "time", "rank", "node", "step", "fit")
_LAST_WORDS = ("fault", "interrupted", "halted", "straggler_stop", "killed")
_TOO_LONG = (
    "slurm",
    "versions",
    "files",
    "budget",
    "elastic_run_id",
    "saved_at",
    "launch_id",
    "run_id",
    "attempt",
    "host",
    "pid",
)


@dataclass(frozen=True)
class Interruption:
    """One end of the workers that was not the end of the run.

    Args:
        time: When the last that belongs to it was recorded.
        kind: ``crash``, ``preempted`` or ``launcher killed``.
        reason: What was recorded about it.
        saved_step: Step of the last save before it.
        reached_step: The furthest step known of the workers it ended.
        resumed_step: The step from which their successors went on; 0 if from the beginning.
        seconds_lost: From the moment whose state was resumed until training went on from it.
        is_reached_known: Whether the workers have said at their end how far they were. Those that were killed have not,
            and got as far as ``reached_step`` at least.
    """

    time: float
    kind: str
    reason: str
    saved_step: int | None
    reached_step: int | None
    resumed_step: int | None
    seconds_lost: float | None
    is_reached_known: bool = True

    @property
    def steps_lost(self) -> int | None:
        """How many steps had to be done again, as far as is known."""
        if self.reached_step is None or self.resumed_step is None:
            return None
        return max(0, self.reached_step - self.resumed_step)


def interruptions(events: Iterable[Event]) -> list[Interruption]:
    """The interruptions in a ledger, oldest first: one for every group of workers that ended before the run had."""
    found = []
    past: list[Event] = []
    for before, after in pairwise([*_groups(events), []]):
        past += before
        if not _was_interrupted(before, after):
            continue
        began = next((event for event in after if event["event"] in ("resumed", "fresh")), None)
        resumed = None if began is None else (began.get("step") if began["event"] == "resumed" else 0)
        fit = None if began is None else began.get("fit")
        steps = [
            (event, step) for event in before if event.get("fit") == fit and (step := event.get("step")) is not None
        ]
        saves = [step for event, step in steps if event["event"] == "saved"]
        # What was resumed is the state of a save, or the one with which the interrupted workers had begun themselves.
        states = [event for event in past if event["event"] in ("saved", "resumed") and event.get("step") == resumed]
        saved_at = None if began is None else began.get("saved_at")
        lost_since = (states[-1] if states else before[0])["time"] if saved_at is None else saved_at
        kind, reason = _cause(before)
        found.append(
            Interruption(
                time=before[-1]["time"],
                kind=kind,
                reason=reason,
                saved_step=saves[-1] if saves else None,
                reached_step=max((step for _, step in steps), default=None),
                resumed_step=resumed,
                seconds_lost=None if began is None else max(0.0, began["time"] - lost_since),
                is_reached_known=any(event["event"] in _LAST_WORDS for event, _ in steps),
            )
        )
    return found


def _groups(events: Iterable[Event]) -> list[list[Event]]:
    """The events of each group of workers, the launcher's words on its end included."""
    groups: list[list[Event]] = []
    begun: set[Any] = set()
    for event in events:
        begins_fit = event["event"] in ("resumed", "fresh")
        # Without our launcher nobody records a start, but no process begins the same fit twice.
        if event["event"] == "start" or (begins_fit and (event.get("fit") in begun or not groups)):
            groups.append([])
            begun.clear()
        if begins_fit:
            begun.add(event.get("fit"))
        if groups:
            groups[-1].append(event)
    return groups


def _was_interrupted(before: list[Event], after: list[Event]) -> bool:
    """Whether a group of workers, of which these are the events and those of the next one, ended before the run had."""
    exits = [event for event in before if event["event"] == "exit"]
    if before[0]["event"] != "start":  # without our launcher nobody records the end of the script
        ends = ("finished", "fault", "interrupted")
        last = [event["event"] for event in before if event["event"] in ("fresh", "resumed", *ends)][-1]
        return last != "finished" and (bool(after) or last in ends)
    is_at_work = not after and not exits and not any(event["event"] == "failure" for event in before)
    return not is_at_work and not any(event.get("status") == "finished" for event in exits)


def _repeated(events: Iterable[Event]) -> list[str]:
    """What is to be said about the failures that came more than once."""
    times = Counter(
        Failure.of(before)
        for before, after in pairwise([*_groups(events), []])
        if _was_interrupted(before, after) and _cause(before)[0] == "crash"
    )
    return [f"{recurrence(failure, count)}." for failure, count in times.items() if count > 1]


def report(run_dir: str | os.PathLike[str]) -> str:
    """The report on a run, as text.

    Args:
        run_dir: The run directory.
    """
    run_directory = RunDirectory(run_dir)
    events = list(read_ledger(run_directory.ledger))
    if not events:
        return f"Nothing is recorded in {run_directory.ledger}: no run has been started here."
    lines = [f"Run {run_directory.path}", "", "Timeline"]
    lines += table(["time", "event", "who", "where", "step", "details"], [_timeline_row(event) for event in events])
    found = interruptions(events)
    lines += ["", "Interruptions" if found else "No interruption."]
    if found:
        head = ["time", "kind", "last save", "reached", "resumed from", "steps lost", "seconds lost", "reason"]
        lines += table(head, [_interruption_row(each) for each in found])
        lines += ["", *(line[0].upper() + line[1:] for line in _repeated(events))]
    kinds = {kind: sum(1 for each in found if each.kind == kind) for kind in dict.fromkeys(each.kind for each in found)}
    steps = [each.steps_lost for each in found if each.steps_lost is not None]
    seconds = [each.seconds_lost for each in found if each.seconds_lost is not None]
    total = events[-1]["time"] - events[0]["time"]
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "0"
    at_least = "" if all(each.is_reached_known for each in found) else "at least "
    lines.append(
        f"Interruptions: {counts}. Steps lost: {at_least}{sum(steps)}. Seconds lost: {sum(seconds):.1f} of {total:.1f}."
    )
    outcome = run_directory.outcome
    last = allocations_of(events)[-1:]
    if outcome is None and last and not last[0].launched and last[0].exit is not None and run_directory.fits:
        outcome = run_directory.fits[-1].outcome  # without our launcher only the fits have one
    lines.append(f"Outcome: {outcome.status} ({outcome.reason})" if outcome else "Outcome: none; running, or killed.")
    return "\n".join(lines)


_TROUBLES = {
    "save_failed": ("{} save failed", "{} saves failed"),
    "save_refused": ("{} state was not fit to be saved", "{} states were not fit to be saved"),
    "bad_step": ("{} step was bad", "{} steps were bad"),
    "rollback": ("the run went back {} time", "the run went back {} times"),
    "quarantined": ("{} checkpoint was set aside", "{} checkpoints were set aside"),
}


def troubles(events: Iterable[Event]) -> str:
    """What went wrong in a run although it went on, as one clause for a person; empty if nothing did.

    Args:
        events: Its ledger, or a part of it.
    """
    # Each rank that knows of a bad step says so.
    found = {(event["event"], event.get("fit"), event.get("step"), _which(event)) for event in events}
    counts = Counter(name for name, *_ in found if name in _TROUBLES)
    return ", ".join(_TROUBLES[name][counts[name] > 1].format(counts[name]) for name in _TROUBLES if counts[name])


def _which(event: Event) -> Any:
    return None if event["event"] == "bad_step" else event["time"]


def _cause(before: list[Event]) -> tuple[str, str]:
    """Why the workers of these events ended."""
    kinds = {event["event"] for event in before}
    if "launcher_killed" in kinds:
        return "launcher killed", "the launcher was killed, and its workers with it"
    exits = [event for event in before if event["event"] == "exit"]
    if exits and exits[-1].get("status") == "interrupted" and not exits[-1].get("new_job"):
        return "preempted", str(exits[-1].get("reason", ""))
    faults = faults_of(before)
    failures = [event for event in before if event["event"] == "failure"]
    fault = next((event for event in (first_cause(faults), *faults, *failures) if event is not None), None)
    if fault is None and "interrupted" in kinds:
        return "preempted", "the workers were told to stop"
    killed = next((event for event in before if event["event"] == "killed"), None)
    return "crash", str((fault or killed or {}).get("reason", "a worker was killed"))


def _timeline_row(event: Event) -> list[str]:
    rank, step, fit = event.get("rank"), event.get("step"), event.get("fit")
    details = {name: value for name, value in event.items() if name not in (*_COMMON, *_TOO_LONG) and value is not None}
    return [
        timestamp(event["time"]),
        event["event"],
        "launcher" if rank is None else f"rank {rank}",
        str(event.get("node", "")),
        "" if step is None else (str(step) if fit is None else f"{fit}: {step}"),
        shortened(" ".join(f"{name}={value}" for name, value in details.items()), 100),
    ]


def _interruption_row(each: Interruption) -> list[str]:
    at_least = "" if each.is_reached_known else ">="
    numbers = [each.saved_step, each.reached_step, each.resumed_step, each.steps_lost]
    saved, reached, resumed, lost = map(or_dash, numbers)
    seconds = "-" if each.seconds_lost is None else f"{each.seconds_lost:.1f}"
    return [
        timestamp(each.time),
        each.kind,
        saved,
        reached if each.reached_step is None else at_least + reached,
        resumed,
        lost if each.steps_lost is None else at_least + lost,
        seconds,
        shortened(each.reason, 80),
    ]
