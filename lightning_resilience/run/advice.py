"""Advises what to change in a run, each with its gain according to a replay of the run. No torch, no Lightning."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from lightning_resilience._formatting import duration
from lightning_resilience.run.events import Event, GiveUp, LaunchStart, Stragglers
from lightning_resilience.run.goodput import Goodput
from lightning_resilience.run.replay import NeverEnds, Replayed, RunFigures, replay
from lightning_resilience.run.what_if import changed

MOST = 5
LEAST_SHARE = 0.005
"""Share of the run's time: a change that gains less is not advised."""

_DRAWS = 12
_INTERVALS = 12
_SCORE = re.compile(r"(?:at|\w+) (\d\.\d+)")
_LOCAL_EVERY = "30s"
_HANG_FACTOR = 5  # as calculated timeouts are
_LEAST_HANG_LIMIT_S = 30.0
_START_HINTS = {
    "imports": "importing takes {each} of every start: keep the Python environment on node-local storage",
    "first_step": "the first step takes {each} of every start: keep compiled kernels in a cache that outlives the job",
    "setup": "setting up takes {each} of every start: look at what the script and its process groups do there",
    "script": "the script takes {each} of every start before fit: prepare data once, and not in every process",
    "restore": "loading a checkpoint takes {each} of every restart: use local checkpoints, or faster storage",
    "fast_forward": "finding the place in the data takes {each} of every restart: use a data loader that can jump to "
    "it, or launch with --read-again if-changed",
}


@dataclass(frozen=True)
class Advice:
    """A line of advice.

    Attributes:
        text: What to do, and why.
        saved_s: Seconds that every rank would have saved.
        share: ``saved_s`` as a share of all time.
        goodput: By how much the goodput would have been higher.
        what_if: The change as a setting of ``report --what-if``; ``None`` if there is no such setting.
        is_bound: Whether the gain is an upper bound.
    """

    text: str
    saved_s: float
    share: float
    goodput: float
    what_if: str | None = None
    is_bound: bool = False


def advice(figures: RunFigures | None, events: Sequence[Event], found: Goodput) -> list[Advice]:
    """What to change in a run, the largest gain first.

    Args:
        figures: Figures of the run; ``None`` if it has done no step.
        events: Its ledger.
        found: The account of its time.
    """
    every = [*_after_giving_up(events, found), *_stragglers(events, found)]
    if figures is not None:
        recorded = replay(figures)
        for each in (_interval, _local, _spares, _grace, _hangs, _starts, _data):
            every += each(figures, recorded)
    worth = [each for each in every if each.share >= LEAST_SHARE]
    return sorted(worth, key=lambda each: each.saved_s, reverse=True)[:MOST]


def _gain(text: str, before: Replayed, after: Replayed, what_if: str | None = None, is_bound: bool = False) -> Advice:
    saved_s = before.total_s - after.total_s
    return Advice(text, saved_s, saved_s / before.total_s, after.goodput - before.goodput, what_if, is_bound)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


# -- saves -------------------------------------------------------------------------------------------------------------


def _interval(figures: RunFigures, _: Replayed) -> Iterator[Advice]:
    """The best interval of saves for random interruptions that are as frequent as the run's."""
    saves, mtbf_s = figures.saves, figures.recorded_mtbf_s
    if saves is None or mtbf_s is None:
        return
    at_random = changed(figures, {"mtbf": f"{mtbf_s:f}"})
    least_s = max(saves.write_s, 2 * saves.blocked_s, figures.step_s, 1.0)
    longest_s = max(figures.trained_s, 2 * least_s)
    young_s = math.sqrt(2 * max(saves.blocked_s, 1e-3) * mtbf_s)
    grid = [least_s * (longest_s / least_s) ** (number / (_INTERVALS - 1)) for number in range(_INTERVALS)]
    by_formula = _round(max(young_s, least_s))
    try:
        before = replay(at_random, _DRAWS)
        tried = {by_formula: replay(_saving_every(at_random, by_formula), _DRAWS)}
    except NeverEnds:
        return
    for each_s in map(_round, grid):
        with suppress(NeverEnds):
            tried[each_s] = replay(_saving_every(at_random, each_s), _DRAWS)
    best_s = min(tried, key=lambda each_s: tried[each_s].total_s)
    if tried[by_formula].total_s - tried[best_s].total_s < LEAST_SHARE * before.total_s:
        best_s = by_formula
    every_s = saves.every_s if saves.every_steps is None else saves.every_steps * figures.step_s
    text = (
        f"save every {duration(best_s)}, not every {duration(every_s)}: a save costs "
        f"{duration(saves.blocked_s)}, and the run is interrupted every {duration(mtbf_s)} "
        f"(Young's formula: {duration(young_s)})"
    )
    yield _gain(text, before, tried[best_s], f"save_every={best_s:.12g}")


def _saving_every(figures: RunFigures, every_s: float) -> RunFigures:
    return changed(figures, {"save_every": f"{every_s:.12g}"})


def _round(seconds: float) -> float:
    """``seconds`` rounded to two digits, as a user would choose it."""
    digits = 1 - math.floor(math.log10(seconds))
    return round(seconds, digits) if digits > 0 else float(round(seconds, digits))


def _local(figures: RunFigures, recorded: Replayed) -> Iterator[Advice]:
    if figures.local_saves is not None:
        text = "stop saving to the nodes: that costs more time than it has saved"
        yield _gain(text, recorded, replay(changed(figures, {"local": "off"})), "local=off")
        if figures.local_saves.first_steps is None:
            text = "let LocalCheckpoint choose how often it saves (no every_n_train_steps, no train_time_interval)"
            yield _gain(text, recorded, replay(changed(figures, {"local": "auto"})), "local=auto")
    elif figures.strikes:
        every = f"local={_LOCAL_EVERY}"
        text = "save to the nodes too (LocalCheckpoint), for example every 30 s: interruptions then repeat fewer steps"
        yield _gain(text, recorded, replay(changed(figures, {"local": _LOCAL_EVERY})), every)


def _grace(figures: RunFigures, recorded: Replayed) -> Iterator[Advice]:
    """More time for preemptions, if the state was not saved in time."""
    preempted = (each for each in figures.interruptions if each.cause == "preempted")
    late = [each for each in preempted if not each.is_orderly and not each.is_damaged]
    if late and figures.saves is not None:
        saved = [replace(each, is_orderly=True, lost_steps=0.0) if each in late else each for each in figures.strikes]
        took_s = max(figures.saves.write_s, figures.saves.blocked_s)
        text = (
            f"give a preempted run more time: {_times(len(late))} it ended before its state was saved, and a save "
            f"takes {duration(took_s)} (--grace-period, and the notice of the scheduler)"
        )
        yield _gain(text, recorded, replay(replace(figures, strikes=saved)))


# -- restarts ----------------------------------------------------------------------------------------------------------


def _spares(figures: RunFigures, recorded: Replayed) -> Iterator[Advice]:
    waited = [each.seconds.get("queue", 0.0) for each in figures.interruptions]
    if any(waited):
        times = sum(map(bool, waited))
        text = (
            f"keep spare nodes (launch --spare): the run waited in a queue {_times(times)}, for {duration(sum(waited))}"
        )
        yield _gain(text, recorded, replay(changed(figures, {"spares": "on"})), "spares=on")


def _hangs(figures: RunFigures, recorded: Replayed) -> Iterator[Advice]:
    """A lower hang limit, if it was much longer than the slowest healthy step (the first step of a process)."""
    limits = [each.limit_s for each in figures.interruptions if each.limit_s]
    firsts_s = [each.seconds.get("first_step", 0.0) for each in figures.strikes]
    slowest_s = max(figures.step_s, figures.once.get("first_step", 0.0), *firsts_s, 0.0)
    limit_s = max(_LEAST_HANG_LIMIT_S, math.ceil(_HANG_FACTOR * slowest_s))
    if limits and limit_s < min(limits):
        text = (
            f"find hangs sooner: no healthy step took more than {duration(slowest_s)}, and the limit was "
            f"{duration(min(limits))} (calculated timeouts, or --section-timeouts step:{limit_s:g})"
        )
        yield _gain(
            text, recorded, replay(changed(figures, {"hang_limit": f"{limit_s:.12g}"})), f"hang_limit={limit_s:.12g}"
        )


def _starts(figures: RunFigures, recorded: Replayed) -> Iterator[Advice]:
    """The longest part of a restart that the user can shorten."""
    if not figures.interruptions:
        return
    of_all = {
        category: sum(each.seconds.get(category, 0.0) for each in figures.interruptions) for category in _START_HINTS
    }
    category = max(of_all, key=lambda each: of_all[each])
    least_s = figures.step_s if category == "first_step" else 0.0
    without = [
        replace(each, seconds={**each.seconds, category: min(each.seconds.get(category, 0.0), least_s)})
        for each in figures.strikes
    ]
    each_s = of_all[category] / len(figures.interruptions)
    text = _START_HINTS[category].format(each=duration(each_s))
    yield _gain(text, recorded, replay(replace(figures, strikes=without)), is_bound=True)


def _after_giving_up(events: Iterable[Event], found: Goodput) -> Iterator[Advice]:
    """A larger budget, if nobody started the run again for a while after its budget was spent."""
    spent, idle_s, times = None, 0.0, 0
    for event in events:
        if isinstance(event, GiveUp):
            spent = event.time
        elif isinstance(event, LaunchStart) and spent is not None:
            idle_s, times, spent = idle_s + event.time - spent, times + 1, None
    if times and found.ranks:
        wall_s = found.total / found.ranks
        text = (
            f"allow more restarts (--in-job-restarts, --job-retries): the budget was spent {_times(times)}, and the "
            f"run was not started again for {duration(idle_s)}"
        )
        yield Advice(text, idle_s, idle_s / wall_s, 0.0)


def _stragglers(events: Iterable[Event], found: Goodput) -> Iterator[Advice]:
    """Slow devices: from the first report to the last, all ranks are taken to be as slow as the slowest rank."""
    reports = [event for event in events if isinstance(event, Stragglers)]
    worst = [
        min(scores) for event in reports if (scores := [float(each) for each in _SCORE.findall(event.reason or "")])
    ]
    active_s = (found.total - found.by_category["idle"]) / max(found.ranks, 1)
    if len(worst) < 2 or active_s <= 0:
        return
    score = statistics.median(worst)
    slow_s = min(reports[-1].time - reports[0].time, found.by_category["productive"] / max(found.ranks, 1))
    saved_s = slow_s * max(1 - score, 0.0)
    named = Counter(device for event in reports for device in event.devices or ())
    names = ", ".join(name for name, _ in named.most_common(3))
    text = (
        f"exclude or repair slow devices (StragglerDetection can stop the run for this): {len(reports)} reports name "
        f"devices with {score:.0%} of their speed, most often {names or 'none by name'}"
    )
    yield Advice(text, saved_s, saved_s / active_s, 0.0, is_bound=True)


# -- steps -------------------------------------------------------------------------------------------------------------


def _data(figures: RunFigures, recorded: Replayed) -> Iterator[Advice]:
    share = figures.step.get("data_loading", 0.0) / figures.step_s
    text = (
        f"load data faster: steps wait {100 * share:.1f} % of their time for batches (more workers of the DataLoader, "
        "prefetch_factor, persistent_workers, data on faster storage)"
    )
    yield _gain(text, recorded, replay(replace(figures, step={**figures.step, "data_loading": 0.0})), is_bound=True)
