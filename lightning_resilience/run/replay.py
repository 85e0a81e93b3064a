"""Replays a run's figures to find the time it takes with other settings. Pure functions; no torch, no Lightning.

**The model.** A run has a number of steps to do. Its workers start, resume from the last complete save, and train,
delayed by saves, until an interruption strikes or the steps are done. An interruption costs the recorded time (until it
was found, the workers had ended and new workers trained), and the steps since the save are done again.

**Recorded interruptions** strike after the same time of training (steps and saves, over all restarts) as in the run,
and rollbacks at the step at which they were found. If nothing about saves is changed, as many steps are done again as
in the run. If a mean time between interruptions is given, they come at random instead (a Poisson process with that
mean), each with the cost of a recorded interruption, and the result is the mean of many draws. All steps take the same
time, and validation is spread over them.

Seconds are per rank: the mean of all ranks.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_resilience.run.goodput import TRAINING, share_of
from lightning_resilience.run.save_interval import growing_interval_s

_MOST_INTERRUPTIONS = 10_000
_NEVER = math.inf


@dataclass(frozen=True)
class Saves:
    """How often a run saves to one tier, and what it costs.

    Attributes:
        every_s: Seconds from the start of a save to the start of the next.
        every_steps: Saves are at multiples of this number of steps; ``None``: ``every_s`` decides.
        blocked_s: Seconds for which the training waits.
        write_s: Seconds from the start of a save until it is complete.
        first_steps: Steps from a start to the first save, after which intervals double up to ``every_s``; ``None``: the
            first interval is as long as the other intervals.
    """

    every_s: float
    every_steps: int | None = None
    blocked_s: float = 0.0
    write_s: float = 0.0
    first_steps: float | None = None


@dataclass(frozen=True)
class Strike:
    """An interruption, or a rollback in the same processes.

    Attributes:
        after_s: Seconds of training before it, over all restarts; infinite for one that comes at a step.
        at_step: The step at which it comes (a rollback); ``None`` for one that comes after a time.
        cause: As in :class:`~.goodput.InterruptionCost`.
        is_orderly: Whether the state was saved because of it.
        is_damaged: Whether the state was saved because of it, but could not be loaded.
        keeps_local: Whether local saves survive it.
        lost_steps: How many steps were done again because of it; ``None``: computed from the times of saves.
        limit_s: The timeout of a step by which a hang was found; ``None`` if unknown, or for no hang of a step.
        seconds: Its cost in seconds by category, without the steps done again.
    """

    after_s: float
    at_step: float | None = None
    cause: str = ""
    is_orderly: bool = False
    is_damaged: bool = False
    keeps_local: bool = True
    lost_steps: float | None = None
    limit_s: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFigures:
    """The parts of a run's time, in seconds per rank.

    Attributes:
        ranks: Number of ranks.
        steps: Number of steps done, each counted once.
        step: Seconds of a step by category; ``productive`` is the step proper.
        once: Seconds of costs that occur once (the first start and the end), by category.
        strikes: Its interruptions and rollbacks, in the order of time.
        saves: Regular saves to the run directory; ``None`` if there are none.
        local_saves: Local saves; ``None`` if there are none.
        trained_s: Seconds of training, over all restarts, in which the interruptions came.
        mtbf_s: Mean seconds of training between two interruptions, which then come at random with the costs of those in
            ``strikes``; ``None``: the recorded interruptions strike at their times.
    """

    ranks: int
    steps: float
    step: Mapping[str, float]
    once: Mapping[str, float] = field(default_factory=dict)
    strikes: Sequence[Strike] = ()
    saves: Saves | None = None
    local_saves: Saves | None = None
    trained_s: float = 0.0
    mtbf_s: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step, including everything between two steps."""
        return sum(self.step.values())

    @property
    def interruptions(self) -> list[Strike]:
        """The strikes after which new workers were started."""
        return [each for each in self.strikes if each.at_step is None]

    @property
    def recorded_mtbf_s(self) -> float | None:
        """Mean seconds of training between two interruptions; ``None`` if it had none."""
        return self.trained_s / len(self.interruptions) if self.interruptions else None

    @property
    def rollbacks(self) -> list[Strike]:
        """The strikes in the same processes (rollbacks), in the order of their steps."""
        return sorted((each for each in self.strikes if each.at_step is not None), key=lambda each: each.at_step or 0)


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Attributes:
        seconds: Seconds per rank, by category; the mean of several draws.
        interruptions: Number of interruptions; the mean of several draws.
        spread: Standard deviation of the ETTR over the draws; 0 for a single draw.
    """

    seconds: Mapping[str, float]
    interruptions: float
    spread: float = 0.0

    @property
    def ettr(self) -> float:
        """Effective training time ratio."""
        return share_of(self.seconds, TRAINING)

    @property
    def goodput(self) -> float:
        """Share of steps never done before."""
        return share_of(self.seconds, ("productive",))

    @property
    def total_s(self) -> float:
        """Total seconds per rank."""
        return sum(self.seconds.values())


class NeverEnds(ValueError):
    """The run would not reach its end: interruptions come before it advances."""


def replay(figures: RunFigures, draws: int = 200) -> Replayed:
    """Replays a run.

    Args:
        figures: The figures of the run, with any changes.
        draws: Number of draws for interruptions at random times; each call uses the same times.

    Raises:
        NeverEnds: If it would be interrupted more than 10,000 times.
    """
    if figures.mtbf_s is None:
        return _play(figures, iter(figures.interruptions))
    mtbf_s = figures.mtbf_s
    drawn = [_play(figures, _at_random(figures, mtbf_s, random.Random(number))) for number in range(draws)]
    names = dict.fromkeys(name for each in drawn for name in each.seconds)  # not a set: sums depend on the order
    return Replayed(
        {name: statistics.fmean(each.seconds.get(name, 0.0) for each in drawn) for name in names},
        statistics.fmean(each.interruptions for each in drawn),
        statistics.stdev(each.ettr for each in drawn),
    )


def _at_random(figures: RunFigures, mtbf_s: float, chance: random.Random) -> Iterator[Strike]:
    """Interruptions at random times, each with the costs of a recorded one."""
    kinds, at = figures.interruptions, 0.0
    for _ in range(_MOST_INTERRUPTIONS):
        at += chance.expovariate(1 / mtbf_s)
        yield replace(chance.choice(kinds), after_s=at)
    raise NeverEnds(f"it would be interrupted more than {_MOST_INTERRUPTIONS:,} times")


def _play(figures: RunFigures, strikes: Iterator[Strike]) -> Replayed:
    """Replays a run from its first step to its last."""
    seconds: defaultdict[str, float] = defaultdict(float, figures.once)
    strike = next(strikes, None)
    rollbacks = figures.rollbacks
    trained_s = position = furthest = saved = saved_locally = 0.0
    interruptions = 0
    while True:
        course = _Course(figures, position)
        goal = min(rollbacks[0].at_step or 0, figures.steps) if rollbacks else figures.steps
        left_s = _NEVER if strike is None else max(strike.after_s - trained_s, 0.0)
        goal_s = course.seconds_to(goal)
        is_there = goal_s <= left_s
        length_s = goal_s if is_there else left_s
        reached = max(goal, course.first) if is_there else course.step_after(length_s)
        course.add_to(seconds, length_s, reached, furthest)
        trained_s += length_s
        furthest = max(furthest, reached)
        saved = max(saved, course.saved(length_s))
        saved_locally = max(saved_locally, course.saved_locally(length_s))
        if is_there and reached >= figures.steps:
            return Replayed(seconds, interruptions)
        if is_there:
            struck = rollbacks.pop(0)
        else:
            assert strike is not None
            struck, strike = strike, next(strikes, None)
            interruptions += 1
        for category, each in struck.seconds.items():
            seconds[category] += each
        saved = reached if struck.is_orderly else saved
        saved_locally = saved_locally if struck.keeps_local else 0.0
        position = max(saved, saved_locally) if struck.lost_steps is None else max(reached - struck.lost_steps, 0.0)


class _Course:
    """Training from a checkpoint on, without interruption. Its first step belongs to the start.

    Args:
        figures: Figures of the run.
        position: The step from which it resumes.

    Attributes:
        first: The number of steps done after its first step.
    """

    def __init__(self, figures: RunFigures, position: float) -> None:
        self._figures = figures
        self.first = min(position + 1, figures.steps)
        local, saves = figures.local_saves, figures.saves
        self._local_share = 0.0 if local is None else min(local.blocked_s / local.every_s, 0.99)
        self._step_s = figures.step_s / (1 - self._local_share)
        if saves is None:
            self._begin_s = self._period_s = _NEVER
            return
        first_step_s = figures.once.get("first_step", 0.0)  # clocks of saves run from the start of training
        if saves.every_steps is None:
            every_s = saves.every_s
            self._begin_s = max(every_s - first_step_s, 0.0)
        else:
            every_s = saves.every_steps * self._step_s + saves.blocked_s
            next_multiple = (position // saves.every_steps + 1) * saves.every_steps
            self._begin_s = max(next_multiple - self.first, 0.0) * self._step_s
        self._period_s = max(every_s, saves.write_s, saves.blocked_s + self._step_s)

    def _blocked_s(self, length_s: float) -> float:
        """Seconds for which saves to the run directory have delayed it."""
        if length_s < self._begin_s:
            return 0.0
        assert self._figures.saves is not None
        before, since_s = divmod(length_s - self._begin_s, self._period_s)
        blocked_s = self._figures.saves.blocked_s
        return before * blocked_s + min(since_s, blocked_s)

    def step_after(self, length_s: float) -> float:
        """The step reached after ``length_s`` seconds."""
        return self.first + (length_s - self._blocked_s(length_s)) / self._step_s

    def seconds_to(self, step: float) -> float:
        """Seconds until ``step`` is reached."""
        work_s = max(step - self.first, 0.0) * self._step_s
        if self._figures.saves is None or work_s <= self._begin_s:
            return work_s
        blocked_s = self._figures.saves.blocked_s
        saves = math.ceil((work_s - self._begin_s) / (self._period_s - blocked_s))
        return work_s + saves * blocked_s

    def saved(self, length_s: float) -> float:
        """The step of the last complete save to the run directory after ``length_s`` seconds; 0 if there is none."""
        if self._figures.saves is None:
            return 0.0
        return self._last(length_s, self._figures.saves, self._begin_s, self._period_s)

    def saved_locally(self, length_s: float) -> float:
        """The same for saves to the nodes."""
        local = self._figures.local_saves
        if local is None:
            return 0.0
        every_s = max(local.every_s, local.write_s)
        if local.first_steps is None:
            return self._last(length_s, local, every_s, every_s)
        first = self._first_saves(local, every_s)
        complete = [at_s for at_s in first if at_s <= length_s - max(local.write_s, local.blocked_s)]
        last = self.step_after(complete[-1]) if complete else 0.0
        return max(last, self._last(length_s, local, first[-1], every_s))

    def _first_saves(self, saves: Saves, every_s: float) -> list[float]:
        """The times at which saves begin while intervals are still growing."""
        at_s, interval_s = max((saves.first_steps or 0) - 1, 0.0) * self._step_s, 0.0
        found = [at_s]
        while interval_s < every_s:
            interval_s = growing_interval_s(interval_s, saves.blocked_s, saves.write_s, every_s)
            at_s += interval_s
            found.append(at_s)
        return found

    def _last(self, length_s: float, saves: Saves, begin_s: float, period_s: float) -> float:
        complete = math.floor((length_s - begin_s - max(saves.write_s, saves.blocked_s)) / period_s)
        return self.step_after(begin_s + complete * period_s) if complete >= 0 else 0.0

    def add_to(self, seconds: defaultdict[str, float], length_s: float, reached: float, furthest: float) -> None:
        """Adds the time of this course.

        Args:
            seconds: Sums by category, to which it is added.
            length_s: Length of the course.
            reached: The step that it reaches.
            furthest: The step up to which steps are done again.
        """
        steps = reached - self.first
        again = min(max(furthest - self.first, 0.0), steps)
        for category, each in self._figures.step.items():
            seconds[category] += steps * each
        redone_s = again * self._figures.step.get("productive", 0.0)
        seconds["productive"] -= redone_s
        seconds["wasted_progress"] += redone_s
        seconds["checkpoint_save"] += length_s - steps * self._figures.step_s
