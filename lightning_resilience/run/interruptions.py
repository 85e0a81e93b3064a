"""Finds the interruptions of a run and their costs: pure functions over a ledger's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from lightning_resilience.run.events import (
    Event,
    Fault,
    Finished,
    FitHalted,
    FitInterrupted,
    Fresh,
    JobFailed,
    Killed,
    LauncherKilled,
    LaunchExit,
    RanksReplaced,
    Resumed,
    Saved,
    ScriptOutcome,
    StragglersReplaced,
    StragglerStop,
    WorkersStart,
)
from lightning_resilience.run.failures import Failure, faults_of, first_cause, growths, is_late

_SAY_HOW_FAR = (Fault, FitInterrupted, FitHalted, StragglerStop, StragglersReplaced, Killed)
_FIT_STATES = (Fresh, Resumed, Finished, Fault, FitInterrupted)


@dataclass(frozen=True)
class Interruption:
    """An end of the workers that was not the end of the run.

    Args:
        time: When the last event that belongs to it was recorded, in seconds since the epoch.
        kind: ``crash``, ``preempted`` or ``launcher killed``.
        reason: The recorded reason.
        reached_step: The furthest known step of the workers that it ended.
        resumed_step: The step from which the next workers resumed; 0 if from the beginning.
        seconds_lost: From the time of the resumed state until training continued from it.
        is_reached_known: Whether the workers have recorded their step at their end. Killed workers have not, and
            reached at least ``reached_step``.
    """

    time: float
    kind: str
    reason: str
    reached_step: int | None
    resumed_step: int | None
    seconds_lost: float | None
    is_reached_known: bool = True

    @property
    def steps_lost(self) -> int | None:
        """How many steps had to be done again; ``None`` if unknown."""
        if self.reached_step is None or self.resumed_step is None:
            return None
        return max(0, self.reached_step - self.resumed_step)


def interruptions(events: Iterable[Event]) -> list[Interruption]:
    """The interruptions in a ledger, oldest first: one for each group of workers that ended before the run did."""
    found = []
    states: dict[int | None, float] = {}
    for before, after in pairwise([*_groups(events), []]):
        states |= {event.step: event.time for event in before if isinstance(event, (Saved, Resumed))}
        if not _was_interrupted(before, after):
            continue
        interrupted = [event.fit for event in before if isinstance(event, (Resumed, Fresh))][-1:]
        starts = [event for event in after if isinstance(event, (Resumed, Fresh))]
        # A script with several fits goes through the earlier fits first.
        began = next((event for event in starts if event.fit in interrupted), starts[0] if starts else None)
        resumed = (began.step if isinstance(began, Resumed) else 0) if began is not None else None
        fit = None if began is None else began.fit
        steps = [(event, step) for event, step in _with_steps(before) if getattr(event, "fit", None) == fit]
        # The resumed state is from a save, or the state with which the interrupted workers themselves had begun.
        lost_since = states.get(resumed, before[0].time)
        if isinstance(began, Resumed) and began.saved_at is not None:
            lost_since = began.saved_at
        kind, reason = _cause(before)
        found.append(
            Interruption(
                time=before[-1].time,
                kind=kind,
                reason=reason,
                reached_step=max((step for _, step in steps), default=None),
                resumed_step=resumed,
                seconds_lost=None if began is None else max(0.0, began.time - lost_since),
                is_reached_known=any(isinstance(event, _SAY_HOW_FAR) for event, _ in steps),
            )
        )
    return found


def repeated_failures(events: Iterable[Event]) -> dict[Failure, int]:
    """The failures that occurred more than once, and how often."""
    times = Counter(
        Failure.of(before)
        for before, after in pairwise([*_groups(events), []])
        if _was_interrupted(before, after) and _cause(before)[0] == "crash"
    )
    return {failure: count for failure, count in times.items() if count > 1}


def _with_steps(events: Iterable[Event]) -> Iterator[tuple[Event, int]]:
    for event in events:
        if (step := getattr(event, "step", None)) is not None:
            yield event, step


def _groups(events: Iterable[Event]) -> list[list[Event]]:
    """The events of each group of workers, including the launcher's records of its end."""
    groups: list[list[Event]] = []
    begun: set[int | None] = set()
    changes: list[RanksReplaced] = []
    for event in events:
        if isinstance(event, RanksReplaced):
            changes.append(event)
        if groups and isinstance(event, WorkersStart) and event.restart_count in growths(changes, event.elastic_run_id):
            begun.clear()
            groups[-1].append(event)  # no rank had ended
            continue
        # Without our launcher no start is recorded, but no process begins the same fit twice.
        begins_fit_again = isinstance(event, (Resumed, Fresh)) and (event.fit in begun or not groups)
        if isinstance(event, WorkersStart) or begins_fit_again:
            groups.append([])
            begun.clear()
        if isinstance(event, (Resumed, Fresh)):
            begun.add(event.fit)
        if groups:
            its = (group for group in reversed(groups) if not group or not is_late(event, group[0]))
            next(its, groups[-1]).append(event)
    return groups


def _was_interrupted(before: list[Event], after: list[Event]) -> bool:
    """Whether a group of workers with these events, and with those of the next one, ended before the run had."""
    exits = [event for event in before if isinstance(event, LaunchExit)]
    if not isinstance(before[0], WorkersStart):  # without our launcher the end of the script is not recorded
        last = [event for event in before if isinstance(event, _FIT_STATES)][-1]
        return not isinstance(last, Finished) and (bool(after) or isinstance(last, (Fault, FitInterrupted)))
    is_halted = any(isinstance(event, ScriptOutcome) and event.status == "halted" for event in before)
    if is_halted and not any(isinstance(event, (Fault, FitHalted, Fresh, Resumed)) for event in before):
        return False  # the elastic launcher started it, and it only reported that a start is useless
    is_running = not after and not exits and not any(isinstance(event, JobFailed) for event in before)
    return not is_running and not any(event.status == "finished" for event in exits)


def _cause(before: list[Event]) -> tuple[str, str]:
    """Why the workers with these events ended."""
    if any(isinstance(event, LauncherKilled) for event in before):
        return "launcher killed", "the launcher was killed, and its workers with it"
    exits = [event for event in before if isinstance(event, LaunchExit)]
    if exits and exits[-1].status == "interrupted" and not exits[-1].new_job:
        return "preempted", exits[-1].reason or ""
    faults = faults_of(before)
    failures = [event for event in before if isinstance(event, JobFailed)]
    fault = next((event for event in (first_cause(faults), *faults, *failures) if event is not None), None)
    if fault is None and any(isinstance(event, FitInterrupted) for event in before):
        return "preempted", "the workers were told to stop"
    killed = next((event for event in before if isinstance(event, Killed)), None)
    last_word = fault if fault is not None else killed
    return "crash", (None if last_word is None else last_word.reason) or "a worker was killed"
