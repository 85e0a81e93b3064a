"""The progress record of a rank: where the rank is, written by it into shared memory, and read by its node's watchdog.

A healthy step writes a few bytes of memory and reads a clock: no message, no system call, no lock. The watchdog can
read the record in whatever state the process is. Imports neither torch nor Lightning.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal, get_args

Section = Literal["setup", "step", "validation", "checkpointing", "out_of_section", "left", "start"]
"""What a rank is doing. These are NVRx's sections, with three more: ``validation`` is separate from ``step``, because
its batches take a different time. ``left``: the rank has left the fit. ``start``: a launched rank before its first fit
or after a fit."""

Position = tuple[int, int, int, int]
"""A place in the fit, see ``agreement_protocol.Position``; its parts are written unchanged."""

_SECTIONS: tuple[Section, ...] = get_args(Section)
_NUMBER = {section: number for number, section in enumerate(_SECTIONS)}
_TICKS = struct.Struct("<Q")
_RECORD = struct.Struct("<QQddq4q")  # ticks, section, since, timeout, step, position
# The ticks of the valid record, then two records that are written in turn: if a rank is stopped in the middle of a
# write, the other record is still valid.
_SIZE = _TICKS.size + 2 * _RECORD.size
_NOWHERE: Position = (0, 0, 0, 0)


@dataclass(frozen=True)
class ProgressRecord:
    """Where a rank is, and since when.

    Args:
        ticks: Grows with every sign of progress.
        section: What the rank is doing.
        since: When it last made progress, in seconds of ``time.monotonic()``, which all processes of a node share.
        timeout: How many seconds it may take until its next sign of progress; infinite: no limit.
        step: ``trainer.global_step``.
        position: The last boundary.
    """

    ticks: int
    section: Section
    since: float
    timeout: float
    step: int
    position: Position


class Progress:
    """The rank's side of the record. Only the rank's main thread writes.

    Args:
        path: The file in node memory, which is created.
        timeouts: Seconds by section; a missing section has no limit.
    """

    def __init__(self, path: Path, timeouts: Mapping[Section, float]) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _SIZE)  # full memory shows here as an error, and not as SIGBUS in a step
            self._memory: mmap.mmap | bytearray = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
        _own.add(self)
        self.timeouts = dict(timeouts)
        self.longest: dict[Section, float] = {}
        """The longest time in seconds that each section has taken from one sign of progress to the next."""
        self._ticks = 0
        self._step = 0
        self._position = _NOWHERE
        self._section: Section = "out_of_section"
        self._since = time.monotonic()
        self._timeout = math.inf
        self._longest_here = 0.0

    @property
    def section(self) -> Section:
        """The section in which the rank is."""
        return self._section

    def enter(self, section: Section) -> None:
        """Records that the rank enters a section."""
        self._leave_section()
        self._section = section
        self._timeout = self.timeouts.get(section, math.inf)
        self._longest_here = self.longest.get(section, 0.0)
        self._since = time.monotonic()
        self._write()

    def at(self, section: Section, step: int, position: Position) -> None:
        """Records that the rank has reached a boundary: the only call in a healthy step."""
        if section != self._section:
            self._step, self._position = step, position
            self.enter(section)
            return
        now = time.monotonic()
        if (elapsed := now - self._since) > self._longest_here:
            self._longest_here = elapsed
        self._since, self._step, self._position = now, step, position
        self._write()

    def tick(self) -> None:
        """Records progress between boundaries, such as the replay of data after a resume."""
        self.at(self._section, self._step, self._position)

    @contextmanager
    def during(self, section: Section) -> Iterator[None]:
        """Counts the time of the block as ``section``. After it the timeout of the interrupted section starts again."""
        before = self._section
        if before == section or before == "left":
            yield
            return
        self.enter(section)
        try:
            yield
        finally:
            self.enter(before)

    def begin(self, timeouts: Mapping[Section, float]) -> None:
        """Records that a fit begins."""
        self.timeouts = dict(timeouts)
        self.longest.clear()
        self._longest_here, self._since = 0.0, time.monotonic()
        self._section, self._step, self._position = "left", 0, _NOWHERE  # the time before it is no part of the fit
        self.enter("setup")

    def set_timeouts(self, timeouts: Mapping[Section, float]) -> None:
        """Replaces the timeouts."""
        self.timeouts = dict(timeouts)
        self._timeout = self.timeouts.get(self._section, math.inf)
        self._write()

    def measured(self) -> dict[Section, float]:
        """The longest time in seconds that each section has taken so far."""
        self._leave_section()
        return dict(self.longest)

    def close(self) -> None:
        """Records that the rank leaves the fit; the record stays readable."""
        self.enter("left")
        if isinstance(self._memory, mmap.mmap):
            memory, self._memory = self._memory, bytearray(_SIZE)  # a thread of the script may still call tick()
            memory.close()

    def _leave_section(self) -> None:
        elapsed = max(self._longest_here, time.monotonic() - self._since)
        if self._section != "left":
            self.longest[self._section] = max(elapsed, self.longest.get(self._section, 0.0))

    def _write(self) -> None:
        self._ticks = ticks = self._ticks + 1
        place = _TICKS.size + (ticks & 1) * _RECORD.size
        number, step, (a, b, c, d) = _NUMBER[self._section], self._step, self._position
        _RECORD.pack_into(self._memory, place, ticks, number, self._since, self._timeout, step, a, b, c, d)
        self._memory[:8] = _TICKS.pack(ticks)  # not pack_into, which writes zeros first


_own: weakref.WeakSet[Progress] = weakref.WeakSet()
"""The records that this process writes."""


def _after_fork_in_child() -> None:
    """Detaches a forked child from its parent's record: it shares the memory, and would write its progress there."""
    for progress in _own:
        progress._memory = bytearray(_SIZE)


os.register_at_fork(after_in_child=_after_fork_in_child)


def read_progress(path: Path) -> ProgressRecord | None:
    """The record at ``path``, or ``None`` if no record can be read there."""
    try:
        with open(path, "rb", buffering=0) as file:
            return read_record(file)
    except OSError:
        return None


def read_record(file: FileIO) -> ProgressRecord | None:
    """Reads the record from an open file, which stays readable after the file has been deleted."""
    for _ in range(100):  # the writer may be faster than this reader
        file.seek(0)
        data = file.read(_SIZE)
        if data is None or len(data) != _SIZE:
            return None
        valid = _TICKS.unpack_from(data)[0]
        record = _RECORD.unpack_from(data, _TICKS.size + (valid & 1) * _RECORD.size)
        ticks, section, since, timeout, step, a, b, c, d = record
        file.seek(0)
        # If the ticks have changed, the writer may be writing this half again: its end may be newer than its beginning.
        is_whole = file.read(_TICKS.size) == data[: _TICKS.size]
        if is_whole and ticks == valid > 0 and section < len(_SECTIONS):
            return ProgressRecord(ticks, _SECTIONS[section], since, timeout, step, (a, b, c, d))
    return None
