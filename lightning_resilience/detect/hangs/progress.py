"""Where a rank is: a record in shared memory, written by the rank and read by the watchdog of its node.

A healthy step writes a few bytes of memory and reads a clock: no message, no system call, no lock. The watchdog sees it
whatever state the process is in. Imports neither torch nor Lightning.
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
"""What a rank is doing. NVRx's sections, but ``validation`` is told apart from ``step``, because it takes its own time;
``left`` is a rank that has left the fit, and ``start`` a launched one before its first fit or after one."""

Position = tuple[int, int, int, int]
"""A place in the fit, see ``agreement_protocol.Position``; the parts are written as they are."""

_SECTIONS: tuple[Section, ...] = get_args(Section)
_NUMBER = {section: number for number, section in enumerate(_SECTIONS)}
_TICKS = struct.Struct("<Q")
_RECORD = struct.Struct("<QQddq4q")  # ticks, section, since, timeout, step, position
# Two records, written in turn, and the ticks of the valid one: a rank that is stopped in the middle of a write leaves
# the other.
_SIZE = _TICKS.size + 2 * _RECORD.size
_NOWHERE: Position = (0, 0, 0, 0)


@dataclass(frozen=True)
class ProgressRecord:
    """Where a rank is and since when.

    Args:
        ticks: Grows with every sign of progress.
        section: What the rank is doing.
        since: When it last made progress, in seconds of ``time.monotonic()``, which all processes of a node share.
        timeout: How many seconds it may take to the next sign of progress; infinite: no limit.
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
    """The rank's side of the record. Only its main thread writes.

    Args:
        path: The file, in node memory; it is created.
        timeouts: Seconds by section; a section that is missing has no limit.
    """

    def __init__(self, path: Path, timeouts: Mapping[Section, float]) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _SIZE)  # where memory is full this fails here, and not by SIGBUS in a step
            self._memory: mmap.mmap | bytearray = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
        _own.add(self)
        self.timeouts = dict(timeouts)
        self.longest: dict[Section, float] = {}
        """The longest that each section has taken from one sign of progress to the next."""
        self._ticks = 0
        self._step = 0
        self._position = _NOWHERE
        self._section: Section = "out_of_section"
        self._since = time.monotonic()
        self._timeout = math.inf
        self._longest_here = 0.0

    @property
    def section(self) -> Section:
        """Where the rank is."""
        return self._section

    def enter(self, section: Section) -> None:
        """The rank enters a section."""
        self._leave_section()
        self._section = section
        self._timeout = self.timeouts.get(section, math.inf)
        self._longest_here = self.longest.get(section, 0.0)
        self._since = time.monotonic()
        self._write()

    def at(self, section: Section, step: int, position: Position) -> None:
        """The rank has reached a boundary: the one call of a healthy step."""
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
        """Progress away from boundaries, such as the replay of data after a resume."""
        self.at(self._section, self._step, self._position)

    @contextmanager
    def during(self, section: Section) -> Iterator[None]:
        """The time of the block counts as ``section``; then the timeout of the interrupted section starts again."""
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
        """A fit begins."""
        self.timeouts = dict(timeouts)
        self.longest.clear()
        self._longest_here, self._since = 0.0, time.monotonic()
        self._section, self._step, self._position = "left", 0, _NOWHERE  # what was before is no part of it
        self.enter("setup")

    def set_timeouts(self, timeouts: Mapping[Section, float]) -> None:
        """Replaces the timeouts."""
        self.timeouts = dict(timeouts)
        self._timeout = self.timeouts.get(self._section, math.inf)
        self._write()

    def measured(self) -> dict[Section, float]:
        """The longest that each section has taken so far."""
        self._leave_section()
        return dict(self.longest)

    def close(self) -> None:
        """The rank leaves the fit; the record stays readable."""
        self.enter("left")
        if isinstance(self._memory, mmap.mmap):
            memory, self._memory = self._memory, bytearray(_SIZE)  # for a thread of the script that still ticks
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
    """A forked child shares its parent's memory, and would write there that it advances, or has left."""
    for progress in _own:
        progress._memory = bytearray(_SIZE)


os.register_at_fork(after_in_child=_after_fork_in_child)


def read_progress(path: Path) -> ProgressRecord | None:
    """The record at ``path``, or ``None`` if there is none."""
    try:
        with open(path, "rb", buffering=0) as file:
            return read_record(file)
    except OSError:
        return None


def read_record(file: FileIO) -> ProgressRecord | None:
    """The same from an open file, which stays readable when its name has gone."""
    for _ in range(100):  # the writer may be faster than this reader
        file.seek(0)
        data = file.read(_SIZE)
        if data is None or len(data) != _SIZE:
            return None
        valid = _TICKS.unpack_from(data)[0]
        record = _RECORD.unpack_from(data, _TICKS.size + (valid & 1) * _RECORD.size)
        ticks, section, since, timeout, step, a, b, c, d = record
        file.seek(0)
        # Else the writer may be at this half again, and the end of it is newer than its beginning.
        is_whole = file.read(_TICKS.size) == data[: _TICKS.size]
        if is_whole and ticks == valid > 0 and section < len(_SECTIONS):
            return ProgressRecord(ticks, _SECTIONS[section], since, timeout, step, (a, b, c, d))
    return None
