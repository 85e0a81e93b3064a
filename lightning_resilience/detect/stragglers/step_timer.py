"""What a rank's own work in a step has taken, by section: what it has waited for others does not count. No Trainer.

The sections tell a slow data loader, a slow callback and slow computing apart.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from lightning_resilience.detect.hangs.comm_wait import CommWaitTimer

SECTIONS = ("data loading", "compute", "callbacks")
"""``compute``: forward and backward pass and optimizer. ``callbacks``: whatever else happens between two batches."""

DATA, COMPUTE, CALLBACKS = range(len(SECTIONS))

NO_PART = -1
"""What counts for no section: a validation, and on a device waiting for others."""

_BLOCK = 32
_LEAST_BLOCKS = 5

_LIMIT = 8192
"""Steps that are remembered until the next report; as many entries as NVRx keeps of a section."""


@dataclass(frozen=True)
class Sample:
    """What the steps since the last report were like.

    Attributes:
        typical: Seconds of one step, by section; NaN: there was none.
        error: By how many seconds a whole step would differ in another sample as large: the standard error of the mean.
        steps: How many they are.
    """

    typical: torch.Tensor
    error: torch.Tensor
    steps: int

    @property
    def total(self) -> torch.Tensor:
        """Seconds of one step, all sections together."""
        return self.typical.sum()

    @staticmethod
    def of(steps: torch.Tensor) -> Sample:
        """The sample of seconds by step and section, of shape ``(steps, sections)``.

        Of blocks of consecutive steps the means, and of those the one that a quarter of them are faster than. With
        several workers a data loader is late once in several steps, of which the median of single steps would not know.
        A quarter, and not half: what else the node has to do now and then makes a rank slower, but nothing faster.
        """
        count = len(steps)
        if not count:
            return Sample(steps.new_full(steps.shape[1:], torch.nan), steps.new_tensor(torch.nan), 0)
        blocks = steps.tensor_split(min(count, max(_LEAST_BLOCKS, count // _BLOCK)))
        means = torch.stack([block.mean(dim=0) for block in blocks])
        means = means[means.sum(dim=1).argsort(stable=True)]  # as whole steps, so that the sections belong together
        totals = steps.sum(dim=1)
        error = totals.std() / count**0.5 if count > 1 else totals[0]  # nothing is known of one
        return Sample(means[(len(means) - 1) // 4], error, count)


class SamplingWindow:
    """Says which steps are timed: with short steps not all of them, but always some in a row.

    Single ones at regular distances would know nothing of, or nothing but, what comes back at that distance: the one
    slow worker of a data loader.

    Args:
        every: Every how many steps one is timed within a burst.
        until_report: Seconds until the next report, which is to be made of at most 256 bursts; 0: all steps are timed.
        clock: Gives seconds.
    """

    def __init__(
        self, every: int = 1, until_report: float = 0.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._every = every
        self._distance = until_report / (_LIMIT // _BLOCK)
        self._clock = clock
        self._began = -math.inf
        self._left = 0

    def takes_next(self) -> bool:
        """Whether the step that begins now is timed."""
        if not self._left:
            now = self._clock()
            if now < self._began + self._distance:
                return False
            self._began, self._left = now, _BLOCK * self._every
        self._left -= 1
        return self._left % self._every == 0


class HostTime:
    """Times the sections of each step by a clock that stands still while the rank waits for others.

    Args:
        waiting: Whose time does not count.
        sampling: Which steps are timed.
        clock: Gives seconds; the same as that of ``waiting``.
    """

    def __init__(
        self, waiting: CommWaitTimer, sampling: SamplingWindow, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._waiting = waiting
        self._sampling = sampling
        self._clock = clock
        self._steps: deque[tuple[float, ...]] = deque(maxlen=_LIMIT)
        self._section = DATA
        self._since = 0.0
        self._spent: list[float] | None = None

    def begin(self) -> None:
        """A step begins, with its data; the one before it is complete."""
        if (spent := self._spent) is not None:
            self.enter(DATA)
            self._steps.append(tuple(spent[:-1]))
            self._spent = None
        if self._sampling.takes_next():
            self._section, self._since = DATA, self._clock() - self._waiting.seconds
            self._spent = [0.0] * (len(SECTIONS) + 1)

    def enter(self, section: int) -> None:
        """The step goes on to one of :data:`SECTIONS`, or to what is :data:`NO_PART` of it."""
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

    @property
    def is_timed(self) -> bool:
        """Whether the step under way is."""
        return self._spent is not None

    def take(self) -> Sample:
        """The steps since the last call."""
        return _take(self._steps)


def timing_events(device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """What makes events of a device that keep their time, and what gives its current stream; if it has them."""
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    event, stream = getattr(module, "Event", None), getattr(module, "current_stream", None)
    return (partial(event, enable_timing=True), stream) if event and stream else None


class DeviceTime:
    """Times the sections of each step on an accelerator, by events in its stream, for which the host never waits.

    What the host does counts only as far as the device has nothing to do meanwhile: data that are loaded while it
    computes cost nothing.

    Args:
        event: Makes an event that keeps its time, see :func:`timing_events`.
        sampling: Which steps are timed.
        stream: Gives the stream of this moment. Waits of others than that of the step do not hold it up.
    """

    _UNDER_WAY = 64
    """Steps whose events may not have happened yet. A host that is further ahead loses the oldest."""

    def __init__(
        self, event: Callable[[], Any], sampling: SamplingWindow, stream: Callable[[], Any] = lambda: None
    ) -> None:
        self._make = event
        self._get_stream = stream
        self._stream: Any = None
        self._sampling = sampling
        self._marks: list[tuple[Any, int]] = []
        self._section = DATA
        self._waits = 0
        self._has_others = False
        self._under_way: deque[list[tuple[Any, int]]] = deque(maxlen=self._UNDER_WAY)
        self._steps: deque[tuple[float, ...]] = deque(maxlen=_LIMIT)

    def begin(self) -> None:
        """A step begins, with its data; the one before it is complete."""
        is_timed = self._sampling.takes_next()
        if self._marks or is_timed:
            event = self._event()
            if self._marks:
                self._under_way.append([*self._marks, (event, DATA)])
            self._marks = [(event, DATA)] if is_timed else []
        self._section, self._waits, self._stream = DATA, 0, self._get_stream()
        self._look()

    def enter(self, section: int) -> None:
        """The step goes on to one of :data:`SECTIONS`, or to what is :data:`NO_PART` of it."""
        self._section = section
        if self._marks:
            self._marks.append((self._event(), section))

    def wait(self, begins: bool, stream: Any = None) -> None:
        """The device begins to wait for others, or has waited; waits may lie within each other.

        Args:
            begins: Which of these.
            stream: That waits for an event of another; ``None``: the stream of this moment, for other ranks. Such an
                event means other ranks only while computing, and where there are collectives in other streams (FSDP).
        """
        if stream is None and self._get_stream() != self._stream:
            self._has_others = True
            return
        if stream is not None and not (self._has_others and self._section == COMPUTE and stream == self._stream):
            return
        before = self._waits
        self._waits += 1 if begins else -1
        if self._marks and bool(before) != bool(self._waits):
            self._marks.append((self._event(stream), NO_PART if begins else self._section))

    def drop(self) -> None:
        """The step under way does not count."""
        self._marks = []

    def __len__(self) -> int:
        """How many steps are known since they were taken last."""
        return len(self._steps)

    @property
    def is_timed(self) -> bool:
        """Whether the step under way is."""
        return bool(self._marks)

    def take(self) -> Sample:
        """The steps since the last call whose events have happened."""
        self._look()
        return _take(self._steps)

    def _event(self, stream: Any = None) -> Any:
        event = self._make()
        event.record(*(() if stream is None else (stream,)))
        return event

    def _look(self) -> None:
        while self._under_way and self._under_way[0][-1][0].query():
            marks = self._under_way.popleft()
            spent = [0.0] * (len(SECTIONS) + 1)  # the last one for what is no part
            try:
                for (begin, section), (end, _) in pairwise(marks):
                    spent[section] += max(begin.elapsed_time(end), 0.0) / 1000
            except RuntimeError:
                continue  # an event of another stream, which has not happened yet
            self._steps.append(tuple(spent[:-1]))


def _take(steps: deque[tuple[float, ...]]) -> Sample:
    sample = Sample.of(torch.tensor(list(steps), dtype=torch.float64, device="cpu").reshape(-1, len(SECTIONS)))
    steps.clear()
    return sample
