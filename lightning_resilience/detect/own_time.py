"""What a rank's own work in a step has taken, by section: what it has waited for others does not count. No Trainer.

The sections tell a slow data loader, a slow callback and slow computing apart.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from lightning_resilience.detect.waiting import Waiting

SECTIONS = ("data loading", "compute", "callbacks")
"""``compute``: forward and backward pass and optimizer. ``callbacks``: whatever else happens between two batches."""

DATA, COMPUTE, CALLBACKS = range(len(SECTIONS))

_LIMIT = 8192
"""Steps that are remembered until the next report; as many entries as NVRx keeps of a section."""


@dataclass(frozen=True)
class Sample:
    """What the steps since the last report were like.

    Attributes:
        medians: Seconds of one step, by section; NaN: there was none.
        weights: Seconds of all of them: the median times their number, so that a long validation between two steps does
            not outweigh what happens in every step.
        steps: How many they are.
    """

    medians: torch.Tensor
    weights: torch.Tensor
    steps: int

    @staticmethod
    def of(steps: torch.Tensor) -> Sample:
        """The sample of seconds by step and section, of shape ``(steps, sections)``."""
        if not len(steps):
            return Sample(steps.new_full(steps.shape[1:], torch.nan), steps.new_zeros(steps.shape[1:]), 0)
        medians = steps.quantile(0.5, dim=0)  # not median(), which of two takes the smaller
        return Sample(medians, medians * len(steps), len(steps))


class HostTime:
    """Times the sections of each step by a clock that stands still while the rank waits for others.

    Args:
        waiting: Whose time does not count.
        every: Every how many steps one is timed.
        clock: Gives seconds; the same as that of ``waiting``.
    """

    def __init__(self, waiting: Waiting, every: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self._waiting = waiting
        self._every = every
        self._clock = clock
        self._steps: deque[tuple[float, ...]] = deque(maxlen=_LIMIT)
        self._count = 0
        self._section = DATA
        self._since = 0.0
        self._spent: list[float] | None = None

    def begin(self) -> None:
        """A step begins, with its data; the one before it is complete."""
        now = self._clock() - self._waiting.seconds
        if (spent := self._spent) is not None:
            spent[self._section] += now - self._since
            self._steps.append(tuple(spent))
        self._section, self._since = DATA, now
        self._count += 1
        self._spent = [0.0] * len(SECTIONS) if self._count % self._every == 0 else None

    def enter(self, section: int) -> None:
        """The step goes on to one of :data:`SECTIONS`."""
        if (spent := self._spent) is not None:
            now = self._clock() - self._waiting.seconds
            spent[self._section] += now - self._since
            self._section, self._since = section, now

    def drop(self) -> None:
        """The step under way does not count: the first one of a fit, say, which is slow in its own way."""
        self._spent = None

    def __len__(self) -> int:
        """How many steps are known since they were taken last."""
        return len(self._steps)

    def take(self) -> Sample:
        """The steps since the last call."""
        return _take(self._steps)


class DeviceTime:
    """Times the sections of each step on an accelerator, by events in its stream, for which the host never waits.

    What the host does counts only as far as the device has nothing to do meanwhile: data that are loaded while it
    computes cost nothing.

    Args:
        event: Makes an event that keeps its time, such as ``torch.cuda.Event(enable_timing=True)``.
        every: Every how many steps one is timed.
    """

    _UNDER_WAY = 64
    """Steps whose events may not have happened yet. A host that is further ahead loses the oldest."""

    def __init__(self, event: Callable[[], Any], every: int = 1) -> None:
        self._make = event
        self._every = every
        self._count = 0
        self._marks: list[tuple[Any, int]] = []
        self._section = DATA
        self._waits = 0
        self._under_way: deque[list[tuple[Any, int]]] = deque(maxlen=self._UNDER_WAY)
        self._steps: deque[tuple[float, ...]] = deque(maxlen=_LIMIT)

    def begin(self) -> None:
        """A step begins, with its data; the one before it is complete."""
        self._count += 1
        is_timed = self._count % self._every == 0
        if self._marks or is_timed:
            event = self._event()
            if self._marks:
                self._under_way.append([*self._marks, (event, DATA)])
            self._marks = [(event, DATA)] if is_timed else []
        self._section, self._waits = DATA, 0
        self._look()

    def enter(self, section: int) -> None:
        """The step goes on to one of :data:`SECTIONS`."""
        self._section = section
        if self._marks:
            self._marks.append((self._event(), section))

    def wait(self, begins: bool) -> None:
        """The device begins to wait for others, or has waited; waits may lie within each other."""
        before = self._waits
        self._waits += 1 if begins else -1
        if self._marks and bool(before) != bool(self._waits):
            self._marks.append((self._event(), _WAITING if begins else self._section))

    def drop(self) -> None:
        """The step under way does not count."""
        self._marks = []

    def __len__(self) -> int:
        """How many steps are known since they were taken last."""
        return len(self._steps)

    def take(self) -> Sample:
        """The steps since the last call whose events have happened."""
        self._look()
        return _take(self._steps)

    def _event(self) -> Any:
        event = self._make()
        event.record()
        return event

    def _look(self) -> None:
        while self._under_way and self._under_way[0][-1][0].query():
            marks = self._under_way.popleft()
            spent = [0.0] * (len(SECTIONS) + 1)  # the last one is waiting
            for (begin, section), (end, _) in pairwise(marks):
                spent[section] += begin.elapsed_time(end) / 1000
            self._steps.append(tuple(spent[:-1]))


_WAITING = -1


def _take(steps: deque[tuple[float, ...]]) -> Sample:
    sample = Sample.of(torch.tensor(list(steps), dtype=torch.float64).reshape(-1, len(SECTIONS)))
    steps.clear()
    return sample
