"""Times the sections of a step on one rank, without the time it waits for other ranks. No Trainer.

The sections distinguish a slow data loader, a slow callback and slow computing.
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
"""``compute``: forward and backward pass and optimizer. ``callbacks``: everything else between two batches."""

DATA, COMPUTE, CALLBACKS = range(len(SECTIONS))

NO_SECTION = -1
"""The time of a validation, which counts for no section."""

_WAITING = -2
"""Waiting for other ranks, in any section."""

_PLACES = len(SECTIONS) + 2

_BLOCK = 32
_MIN_BLOCKS = 5

_MAX_STEPS = 8192
"""Steps kept until the next report, as many as NVRx keeps of a section."""


@dataclass(frozen=True)
class Sample:
    """Statistics of the steps since the last report.

    Attributes:
        typical: Seconds of a typical step by section; NaN without steps.
        error: Standard error of the mean of a whole step, in seconds.
        steps: Number of steps.
        waited: Seconds of waiting for other ranks in a step, on average; NaN if unknown.
    """

    typical: torch.Tensor
    error: torch.Tensor
    steps: int
    waited: float = math.nan

    @property
    def total(self) -> torch.Tensor:
        """Seconds of a typical step, all sections together."""
        return self.typical.sum()

    @staticmethod
    def of(steps: torch.Tensor, waits: torch.Tensor | None = None) -> Sample:
        """Computes the statistics of ``steps``, seconds of shape ``(steps, sections)``.

        Args:
            steps: Seconds of the rank's own work, by step and section.
            waits: Seconds of waiting for other ranks, of each step.

        The typical step is the lower quartile of the means of blocks of consecutive steps. The median of single steps
        would miss a data loader of several workers that is late once in several steps. It is the lower quartile, not
        the median, because other work on the node makes a rank slower now and then, but nothing makes it faster.
        """
        count = len(steps)
        if not count:
            return Sample(steps.new_full(steps.shape[1:], torch.nan), steps.new_tensor(torch.nan), 0)
        blocks = steps.tensor_split(min(count, max(_MIN_BLOCKS, count // _BLOCK)))
        means = torch.stack([block.mean(dim=0) for block in blocks])
        means = means[means.sum(dim=1).argsort(stable=True)]  # keeps sections of a step together
        totals = steps.sum(dim=1)
        error = totals.std() / count**0.5 if count > 1 else totals[0]  # unknown for one step
        waited = math.nan if waits is None else float(waits.mean())
        return Sample(means[(len(means) - 1) // 4], error, count, waited)


class SamplingWindow:
    """Selects the steps to time: all steps, or windows of consecutive steps if steps are short.

    Single steps at regular distances would meet the one slow worker of a data loader always or never.

    Args:
        every: One in this many steps of a window is timed.
        until_report: Seconds between reports, each of at most 256 windows; 0: all steps are in a window.
        clock: Returns seconds.
    """

    def __init__(
        self, every: int = 1, until_report: float = 0.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._every = every
        self._distance = until_report / (_MAX_STEPS // _BLOCK)
        self._clock = clock
        self._began = -math.inf
        self._left = 0

    def samples_next(self) -> bool:
        """Whether to time the step that begins now."""
        if not self._left:
            now = self._clock()
            if now < self._began + self._distance:
                return False
            self._began, self._left = now, _BLOCK * self._every
        self._left -= 1
        return self._left % self._every == 0


class HostStepTimer:
    """Times the sections of steps on the host; time spent waiting for other ranks does not count.

    Args:
        comm_wait: Timer of these waits.
        sampling: Selects the steps to time.
        clock: Returns seconds; the same as that of ``comm_wait``.
    """

    def __init__(
        self, comm_wait: CommWaitTimer, sampling: SamplingWindow, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._comm_wait = comm_wait
        self._sampling = sampling
        self._clock = clock
        self._steps: deque[tuple[float, ...]] = deque(maxlen=_MAX_STEPS)
        self._section = DATA
        self._since = self._waited = 0.0
        self._spent: list[float] | None = None

    def begin(self) -> None:
        """Ends a step and begins the next, with :data:`DATA`."""
        if (spent := self._spent) is not None:
            self.enter(DATA)
            self._steps.append(tuple(spent[:-1]))
            self._spent = None
        if self._sampling.samples_next():
            self._waited = self._comm_wait.seconds
            self._section, self._since = DATA, self._clock() - self._waited
            self._spent = [0.0] * _PLACES

    def enter(self, section: int) -> None:
        """Enters one of :data:`SECTIONS`, by its index, or :data:`NO_SECTION`."""
        if (spent := self._spent) is not None:
            waited = self._comm_wait.seconds
            now = self._clock() - waited
            spent[self._section] += now - self._since
            if self._section != NO_SECTION:
                spent[_WAITING] += waited - self._waited
            self._section, self._since, self._waited = section, now, waited

    def drop(self) -> None:
        """Discards the current step, for example the first one after a rollback."""
        self._spent = None

    def __len__(self) -> int:
        """Number of timed steps since the last :meth:`take`."""
        return len(self._steps)

    @property
    def is_timed(self) -> bool:
        """Whether the current step is timed."""
        return self._spent is not None

    def take(self) -> Sample:
        """Returns and clears the statistics of the timed steps."""
        return _drain(self._steps)


def timing_events(device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """Two functions: create a timed event of a device, and return its current stream; ``None`` without such events."""
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    event, stream = getattr(module, "Event", None), getattr(module, "current_stream", None)
    return (partial(event, enable_timing=True), stream) if event and stream else None


class DeviceStepTimer:
    """Times the sections of steps on an accelerator, by events in its stream; the host never waits for these events.

    Work of the host counts only while the device is idle: data loading that overlaps with computing is free.

    Args:
        event: Creates a timed event; see :func:`timing_events`.
        sampling: Selects the steps to time.
        stream: Returns the current stream. Waits in other streams than the step's do not count.
    """

    _MAX_IN_FLIGHT = 64
    """Number of steps whose events may be pending. If the host is further ahead, the oldest steps are lost."""

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
        self._uses_side_streams = False
        self._in_flight: deque[list[tuple[Any, int]]] = deque(maxlen=self._MAX_IN_FLIGHT)
        self._steps: deque[tuple[float, ...]] = deque(maxlen=_MAX_STEPS)

    def begin(self) -> None:
        """Ends a step and begins the next, with :data:`DATA`."""
        is_timed = self._sampling.samples_next()
        if self._marks or is_timed:
            event = self._event()
            if self._marks:
                self._in_flight.append([*self._marks, (event, DATA)])
            self._marks = [(event, DATA)] if is_timed else []
            if is_timed:
                self._stream = self._get_stream()
        self._section, self._waits = DATA, 0
        self._collect()

    def enter(self, section: int) -> None:
        """Enters one of :data:`SECTIONS`, by its index, or :data:`NO_SECTION`."""
        self._section = section
        if self._marks:
            self._marks.append((self._event(), section))

    def wait(self, begins: bool, stream: Any = None) -> None:
        """Marks the begin or end of a wait for other ranks; waits may be nested.

        Args:
            begins: Whether the wait begins or ends.
            stream: Stream that waits for an event of another stream; ``None``: the current stream waits in a
                collective. An event counts as a wait for other ranks only in :data:`COMPUTE`, and only if there are
                collectives in side streams (FSDP).
        """
        if stream is None and self._get_stream() != self._stream:
            self._uses_side_streams = True
            return
        if stream is not None and not (self._uses_side_streams and self._section == COMPUTE and stream == self._stream):
            return
        before = self._waits
        self._waits += 1 if begins else -1
        if self._marks and bool(before) != bool(self._waits):
            waiting = _WAITING if self._section != NO_SECTION else NO_SECTION
            self._marks.append((self._event(stream), waiting if begins else self._section))

    def drop(self) -> None:
        """Discards the current step."""
        self._marks = []

    def __len__(self) -> int:
        """Number of timed steps since the last :meth:`take`."""
        return len(self._steps)

    @property
    def is_timed(self) -> bool:
        """Whether the current step is timed."""
        return bool(self._marks)

    def take(self) -> Sample:
        """Returns and clears the statistics of the timed steps whose events have completed."""
        self._collect()
        return _drain(self._steps)

    def _event(self, stream: Any = None) -> Any:
        event = self._make()
        event.record(*(() if stream is None else (stream,)))
        return event

    def _collect(self) -> None:
        while self._in_flight and self._in_flight[0][-1][0].query():
            marks = self._in_flight.popleft()
            spent = [0.0] * _PLACES
            try:
                for (begin, section), (end, _) in pairwise(marks):
                    spent[section] += max(begin.elapsed_time(end), 0.0) / 1000
            except RuntimeError:
                continue  # a pending event of another stream
            self._steps.append(tuple(spent[:-1]))


def _drain(steps: deque[tuple[float, ...]]) -> Sample:
    table = torch.tensor(list(steps), dtype=torch.float64, device="cpu").reshape(-1, _PLACES - 1)
    steps.clear()
    return Sample.of(table[:, : len(SECTIONS)], table[:, _WAITING + 1])
