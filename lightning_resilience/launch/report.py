"""``lightning-resilience report``: the timeline of a run and the cost of its interruptions, from the ledger alone."""

from __future__ import annotations

import os

from lightning_resilience._formatting import or_dash, shortened, table, timestamp
from lightning_resilience.run.events import Event
from lightning_resilience.run.failures import recurrence
from lightning_resilience.run.history import read_history
from lightning_resilience.run.interruptions import Interruption, interruptions, repeated_failures
from lightning_resilience.run.run_directory import RunDirectory

_NOT_SHOWN = (
    *("event", "time", "rank", "node", "step", "fit"),  # in columns of their own
    *("slurm", "versions", "files", "budget", "elastic_run_id", "saved_at", "launch_id", "run_id", "attempt", "host"),
    "pid",
)


def report(run_dir: str | os.PathLike[str]) -> str:
    """The report on a run, as text.

    Args:
        run_dir: The run directory.
    """
    run_directory = RunDirectory(run_dir)
    history = read_history(run_directory.ledger)
    events = history.events
    if not events:
        return f"Nothing is recorded in {run_directory.ledger}: no run has been started here."
    lines = [f"Run {run_directory.path}", "", "Timeline"]
    lines += table(["time", "event", "who", "where", "step", "details"], [_timeline_row(event) for event in events])
    found = interruptions(events)
    lines += ["", "Interruptions" if found else "No interruption."]
    if found:
        head = ["time", "kind", "last save", "reached", "resumed from", "steps lost", "seconds lost", "reason"]
        lines += table(head, [_interruption_row(each) for each in found])
        again = (recurrence(failure, times) for failure, times in repeated_failures(events).items())
        lines += ["", *(f"{line[0].upper()}{line[1:]}." for line in again)]
    kinds = {kind: sum(1 for each in found if each.kind == kind) for kind in dict.fromkeys(each.kind for each in found)}
    steps = [each.steps_lost for each in found if each.steps_lost is not None]
    seconds = [each.seconds_lost for each in found if each.seconds_lost is not None]
    total = events[-1].time - events[0].time
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "0"
    at_least = "" if all(each.is_reached_known for each in found) else "at least "
    lines.append(
        f"Interruptions: {counts}. Steps lost: {at_least}{sum(steps)}. Seconds lost: {sum(seconds):.1f} of {total:.1f}."
    )
    outcome = run_directory.outcome
    last = history.allocations[-1:]
    if outcome is None and last and not last[0].launched and last[0].exit is not None and run_directory.fits:
        outcome = run_directory.fits[-1].outcome  # without our launcher only the fits have one
    lines.append(f"Outcome: {outcome.status} ({outcome.reason})" if outcome else "Outcome: none; running, or killed.")
    return "\n".join(lines)


def _timeline_row(event: Event) -> list[str]:
    fields = event.to_json()
    rank, step, fit = (fields.get(name) for name in ("rank", "step", "fit"))
    details = {name: value for name, value in fields.items() if name not in _NOT_SHOWN and value is not None}
    return [
        timestamp(event.time),
        event.name,
        "launcher" if rank is None else f"rank {rank}",
        event.node or "",
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
