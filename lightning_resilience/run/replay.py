"""What a run would have taken under another setting: its own figures, replayed. Pure functions; no torch, no Lightning.

**The model.** A run has a number of steps to do. Its workers start, go back to the last complete save, and train, which
saves interrupt, until an interruption strikes or the steps are done. An interruption costs what was recorded of it
(until it was found, the workers had ended, new ones trained), and the steps since the save are done again.

**Recorded interruptions** strike after the time of training (steps and saves, over all restarts) after which they did;
rollbacks at the step at which they were found. As long as nothing about saves is changed, as many steps are done again
as were. With a mean time between interruptions given, they come at random
instead (a Poisson process of that time), each at the cost of a recorded one, and the result is the mean of many draws.
Steps are alike, and validation is spread over all of them.

Seconds are those of a rank: the mean of all.
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
        every_s: Seconds from the start of a save to that of the next.
        every_steps: Steps from one to the next, which are multiples of this; ``None``: it goes by ``every_s``.
        blocked_s: For how long the training waits.
        write_s: From its start until it is complete.
        first_steps: Steps from a start to the first save, after which intervals double up to ``every_s``; ``None``: the
            first interval is as long as all others.
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
        after_s: Seconds of training before it, over all restarts; infinite: it comes at a step.
        at_step: The step at which it comes; ``None``: it comes after a time.
        cause: As in the account.
        is_orderly: Whether the state was saved because of it.
        is_damaged: Whether it was, and could not be loaded.
        keeps_local: Whether local saves outlive it.
        lost_steps: How many steps were done again because of it; ``None``: to be found out, by when saves are.
        limit_s: The timeout of a step that found a hang; ``None``: not known, or no hang of a step.
        seconds: What it has cost by category, without the steps done again.
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
    """What a run consists of, in seconds of a rank.

    Attributes:
        ranks: How many it has.
        steps: How many it has done, each counted once.
        step: Seconds of a step by category; ``productive`` is the step proper.
        once: What comes once, by category: the first start and the end.
        strikes: What has interrupted it, in the order of time.
        saves: To the run directory; ``None``: none.
        local_saves: To each node; ``None``: none.
        trained_s: Seconds of training, over all restarts; the interruptions are those of this time.
        mtbf_s: Mean seconds of training between two interruptions, which come at random then, each as one of those in
            ``strikes``; ``None``: when they did.
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
        """Seconds of a step with all that comes between two."""
        return sum(self.step.values())

    @property
    def interruptions(self) -> list[Strike]:
        """Those after which workers were started."""
        return [each for each in self.strikes if each.at_step is None]

    @property
    def recorded_mtbf_s(self) -> float | None:
        """Mean seconds of training between two interruptions; ``None``: it had none."""
        return self.trained_s / len(self.interruptions) if self.interruptions else None

    @property
    def rollbacks(self) -> list[Strike]:
        """Those in the same processes, in the order of their steps."""
        return sorted((each for each in self.strikes if each.at_step is not None), key=lambda each: each.at_step or 0)


@dataclass(frozen=True)
class Replayed:
    """What a run takes.

    Attributes:
        seconds: Of a rank, by category; of several draws, the mean.
        interruptions: How many there are; the mean.
        spread: Standard deviation of the ETTR over the draws; 0 for a single one.
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
        """All seconds of a rank."""
        return sum(self.seconds.values())


class NeverEnds(ValueError):
    """The run would not get to its end: interruptions come before it advances."""


def replay(figures: RunFigures, draws: int = 200) -> Replayed:
    """What the run takes.

    Args:
        figures: Of the run, changed as it is asked.
        draws: How often it is done with interruptions at random times, the same times in each call.

    Raises:
        NeverEnds: If it would be interrupted more than 10,000 times.
    """
    if figures.mtbf_s is None:
        return _play(figures, iter(figures.interruptions))
    mtbf_s = figures.mtbf_s
    drawn = [_play(figures, _at_random(figures, mtbf_s, random.Random(number))) for number in range(draws)]
    names = dict.fromkeys(name for each in drawn for name in each.seconds)  # not a set: sums differ by the order
    return Replayed(
        {name: statistics.fmean(each.seconds.get(name, 0.0) for each in drawn) for name in names},
        statistics.fmean(each.interruptions for each in drawn),
        statistics.stdev(each.ettr for each in drawn),
    )


def _at_random(figures: RunFigures, mtbf_s: float, chance: random.Random) -> Iterator[Strike]:
    """Interruptions at random times, each as a recorded one."""
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
        figures: Of the run.
        position: The step from which it goes on.

    Attributes:
        first: The step after the first one.
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
        """For how long saves to the run directory have held it up."""
        if length_s < self._begin_s:
            return 0.0
        assert self._figures.saves is not None
        before, since_s = divmod(length_s - self._begin_s, self._period_s)
        blocked_s = self._figures.saves.blocked_s
        return before * blocked_s + min(since_s, blocked_s)

    def step_after(self, length_s: float) -> float:
        """The step after so many seconds."""
        return self.first + (length_s - self._blocked_s(length_s)) / self._step_s

    def seconds_to(self, step: float) -> float:
        """How long it takes to a step."""
        work_s = max(step - self.first, 0.0) * self._step_s
        if self._figures.saves is None or work_s <= self._begin_s:
            return work_s
        blocked_s = self._figures.saves.blocked_s
        saves = math.ceil((work_s - self._begin_s) / (self._period_s - blocked_s))
        return work_s + saves * blocked_s

    def saved(self, length_s: float) -> float:
        """The step of the last complete save to the run directory after so many seconds; 0: none."""
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
        """When the first saves begin, until intervals are as long as all others."""
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
        """Adds what it takes.

        Args:
            seconds: By category; get it.
            length_s: How long it goes on.
            reached: The step that it gets to.
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
