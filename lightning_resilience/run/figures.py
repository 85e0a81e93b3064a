"""Derives a run's figures for a replay from its ledger and the account of its time. No torch, no Lightning."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from lightning_resilience.run.events import (
    Event,
    Fault,
    Finished,
    Fresh,
    RestoredInPlace,
    Resumed,
    Rollback,
    Saved,
    TimeSpent,
)
from lightning_resilience.run.goodput import TRAINING, Goodput, Life
from lightning_resilience.run.replay import RunFigures, Saves, Strike

REGULAR = ("interval", "every_n_train_steps", "follows ModelCheckpoint", "again")
"""Reasons of regular saves, by the clock or by steps; a save for another reason precedes an end of the workers."""

_NEVER = math.inf
_ORDERLY = ("preemption", "straggler")
_ASKED_FOR = (Finished, Fresh, RestoredInPlace, Resumed, Rollback, TimeSpent)
_BETWEEN_STEPS = ("data_loading", "callbacks", "validation")
_TRAINED = (*TRAINING, "wasted_progress")


def figures_of(events: Sequence[Event], found: Goodput) -> RunFigures | None:
    """The figures of a run; ``None`` if it has done no step with a known time.

    Args:
        events: Its ledger, and the kept time accounts of running ranks.
        found: The account of its time.
    """
    events = sorted((event for event in events if _tells_something(event)), key=lambda event: event.time)
    seconds = {category: each / max(found.ranks, 1) for category, each in found.by_category.items()}
    seconds["productive"] += seconds["straggler_wait"]  # this wait is a part of a step
    seconds["straggler_wait"] = 0.0
    steps = sum(_reached(events).values())
    new_steps = steps - _new_first_steps(events)
    if new_steps <= 0 or seconds["productive"] <= 0 or not found.lives:
        return None
    step_s = seconds["productive"] / new_steps
    done = new_steps + seconds["wasted_progress"] / step_s
    saves, local_saves, ends_s = _costs(events, seconds["checkpoint_save"])
    strikes = _strikes(events, found, ends_s, step_s)
    # Costs that occur once: the first start and the end.
    once = {category: each for category, each in seconds.items() if category not in (*_TRAINED, "idle")}
    once["checkpoint_save"] = sum(ends_s.values())
    for strike in strikes:
        for category, each in strike.seconds.items():
            once[category] = max(once[category] - each, 0.0)
    return RunFigures(
        ranks=found.ranks,
        steps=steps,
        step={"productive": step_s, **{category: seconds[category] / done for category in _BETWEEN_STEPS}},
        once=once,
        strikes=strikes,
        saves=saves,
        local_saves=local_saves,
        trained_s=sum(seconds[category] for category in _TRAINED),
    )


def _tells_something(event: Event) -> bool:
    """Whether the figures use this event. Many ranks may record a fault at once; only hangs of a step are used."""
    if isinstance(event, Fault):
        return event.kind == "hang" and event.section in (None, "step") and math.isfinite(event.limit or 0.0)
    if isinstance(event, Saved):
        return event.step is not None and math.isfinite((event.seconds or 0.0) + (event.stall_s or 0.0))
    return isinstance(event, _ASKED_FOR)


def _reached(events: Iterable[Event]) -> dict[int, int]:
    """The furthest step of each fit."""
    found: defaultdict[int, int] = defaultdict(int)
    for event in events:
        step = event.reached if isinstance(event, TimeSpent) else None
        if isinstance(event, (Saved, Finished, Resumed)):
            step = event.step
        fit = getattr(event, "fit", None)
        if step is not None and fit is not None:
            found[fit] = max(found[fit], step)
    return found


def _new_first_steps(events: Iterable[Event]) -> int:
    """How often the first step of a process, or the first after a rollback, was one never done before."""
    found = 0
    furthest: defaultdict[int | None, int] = defaultdict(int)
    for event in events:
        fit, step = getattr(event, "fit", None), getattr(event, "step", None)
        if isinstance(event, Fresh):
            found += furthest[fit] == 0
        elif isinstance(event, (Resumed, RestoredInPlace)):
            found += (step or 0) >= furthest[fit]
        elif isinstance(event, TimeSpent):
            step = event.reached
        furthest[fit] = max(furthest[fit], step or 0)
    return found


# -- interruptions -----------------------------------------------------------------------------------------------------


def _strikes(events: Sequence[Event], account: Goodput, ends_s: Mapping[float, float], step_s: float) -> list[Strike]:
    """The interruptions and rollbacks of a run, in the order of time.

    Args:
        events: Its ledger.
        account: The account of its time.
        ends_s: Seconds that each save before an end of workers has cost, by the time of the save.
        step_s: Seconds of a step.
    """
    ranks = max(account.ranks, 1)
    times = [event.time for event in events]
    found: list[Strike] = []
    trained_s = 0.0
    for life, after in pairwise([*account.lives, None]):
        assert life is not None
        trained_s += sum(life.seconds.get(category, 0.0) for category in _TRAINED) / ranks
        until = bisect.bisect_left(times, _NEVER if after is None else after.began)
        own = events[bisect.bisect_left(times, life.began) : until]
        rollbacks = _rollbacks(own, life, ranks)
        if found and found[-1].at_step is None:  # its cost includes the costs of these rollbacks
            cost = found[-1].seconds
            for each in rollbacks:
                cost = {name: max(seconds - each.seconds.get(name, 0.0), 0.0) for name, seconds in cost.items()}
            found[-1] = replace(found[-1], seconds=cost)
        found += rollbacks
        if life.interruption is None or after is None:
            continue
        resumed = next((each for each in events[until:] if isinstance(each, (Resumed, Fresh))), None)
        step = (resumed.step if isinstance(resumed, Resumed) else None) or 0
        in_order = [each for each in _saved(own, "global") if each.reason in _ORDERLY]
        saved = next((each for each in in_order if each.step == step), None)
        began = next((each for each in own if isinstance(each, (Resumed, Fresh))), None)
        reached = step if began is None else (getattr(began, "step", None) or 0) + 1 + len(rollbacks)
        reached += (
            sum(life.seconds[each] for each in ("productive", "straggler_wait", "wasted_progress")) / ranks / step_s
        )
        reached -= sum(each.lost_steps or 0 for each in rollbacks)
        seconds = {name: each / ranks for name, each in life.interruption.seconds.items() if name not in _TRAINED}
        if saved is not None:
            seconds["checkpoint_save"] = ends_s[saved.time]
            trained_s -= ends_s[saved.time]
        found.append(
            Strike(
                trained_s,
                cause=life.interruption.cause,
                is_orderly=saved is not None,
                is_damaged=bool(in_order) and saved is None,
                lost_steps=max(reached - step, 0),
                keeps_local=all((each.step or 0) <= step for each in _saved(own, "local")),
                limit_s=next((each.limit for each in own if isinstance(each, Fault)), None),
                seconds=seconds,
            )
        )
    return found


def _rollbacks(events: Iterable[Event], life: Life, ranks: int) -> list[Strike]:
    """The rollbacks of a group of workers; in each category, start and rollbacks are taken to cost the same."""
    resumes = sum(isinstance(event, Resumed) for event in events)
    found = [event.step for event in events if isinstance(event, Rollback) and event.step is not None]
    number = len(found)
    seconds = {"first_step": life.seconds["first_step"] / ranks / (number + 1)}
    for category in ("restore", "fast_forward"):
        seconds[category] = life.seconds[category] / ranks / max(number + (resumes > 0), 1)
    to = [event.step or 0 for event in events if isinstance(event, RestoredInPlace)]
    lost = [max(step - back, 0) for step, back in zip(found, to, strict=False)]
    return [
        Strike(_NEVER, at_step=step, cause="NaN", lost_steps=steps, seconds=seconds)
        for step, steps in zip_longest(found, lost)
    ]


# -- saves -------------------------------------------------------------------------------------------------------------


def _saved(events: Iterable[Event], tier: str) -> Iterator[Saved]:
    """The saves of a tier."""
    for event in events:
        if isinstance(event, Saved) and (event.tier or "global") == tier:
            yield event


def _costs(events: Sequence[Event], waited_s: float) -> tuple[Saves | None, Saves | None, dict[float, float]]:
    """The costs of saves: regular saves to the run directory, local saves, and by time the saves before an end.

    Args:
        events: The ledger.
        waited_s: Seconds for which the training has waited for all saves.
    """
    saves, local_saves = _saves(events, "global"), _saves(events, "local")
    if local_saves is not None:
        for event in _saved(events, "local"):
            waited_s -= (event.stall_s or 0.0) + ((event.count or 1) - 1) * local_saves.blocked_s
    of_all = [*_saved(events, "global")]
    ends_s = {event.time: event.seconds or 0.0 for event in of_all if event.reason not in REGULAR}
    number = len(of_all) - len(ends_s)
    if saves is None or not number:
        return saves, local_saves, ends_s
    each_s = max(waited_s - sum(ends_s.values()), 0.0) / number
    short_s = [each for each in ends_s.values() if each < each_s]  # of such a save only the time to write it is known
    each_s = max(waited_s - sum(ends_s.values()) + sum(short_s), 0.0) / (number + len(short_s))
    ends_s = {time: max(each, each_s) for time, each in ends_s.items()}
    return replace(saves, blocked_s=each_s), local_saves, ends_s


def _saves(events: Sequence[Event], tier: str) -> Saves | None:
    """How often a tier is saved to, and the costs; ``None`` if no save is recorded."""
    intervals: list[tuple[float, int]] = []
    first: list[float] = []
    first_steps: list[int] = []
    chosen: list[float] = []
    saves: list[Saved] = []
    before: Event | None = None
    for event in events:
        if isinstance(event, (Fresh, Resumed, RestoredInPlace)):
            before = event
        elif isinstance(event, Saved) and (event.tier or "global") == tier:
            if tier == "global" and event.reason not in REGULAR:
                continue
            saves.append(event)
            if isinstance(before, Saved):
                passed_s = _start(event) - _start(before)
                intervals.append((passed_s / (event.count or 1), (event.step or 0) - (before.step or 0)))
                chosen += [event.every_s] if event.every_s is not None else []
            elif before is not None:
                first.append(_start(event) - before.time)
            if isinstance(before, (Fresh, Resumed)):
                first_steps.append((event.step or 0) - (getattr(before, "step", None) or 0))
            before = event
    if not intervals and not first:
        return None
    every_s = statistics.median([each for each, _ in intervals] or first)
    by_steps = {event.reason for event in saves} == {"every_n_train_steps"}
    apart = [steps for _, steps in intervals if steps > 0]
    # At the first save of a process the costs of saves are not known yet, so it is used only if there are no others.
    chosen = chosen or [event.every_s for event in saves if event.every_s is not None]
    if chosen:
        every_s = statistics.median(chosen)
    return Saves(
        every_s=max(every_s, 1e-3),
        every_steps=min(apart) if by_steps and apart else None,
        blocked_s=statistics.median(event.stall_s or 0.0 for event in saves),
        write_s=statistics.median(event.seconds or 0.0 for event in saves),
        first_steps=statistics.median(first_steps) if chosen and first_steps else None,
    )


def _start(event: Saved) -> float:
    return event.time - (event.seconds or 0.0)
