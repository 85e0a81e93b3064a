"""The launches of a run: a record file for each, and a role that only one launch can have.

The role is that of the launch that decides. The first launch to create the file has it, and a counter in that file
moves while the launch lives. So a launch on another host, or in another container, is known to live without a shared
clock or process number: its record is watched.
"""

from __future__ import annotations

import os
import platform
import re
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_resilience._files import create_json, read_json, write_json
from lightning_resilience._processes import describe_process, is_on_this_system, is_running, pid_namespace
from lightning_resilience.run.deadlines import BEAT_INTERVAL_S, DEAD_AFTER_BEATS
from lightning_resilience.run.ledger import node_name

FIRST = "first"
"""The role of the launch that decides."""


_POLL_S = 0.1
_FILE = re.compile(r"(?P<role>.+)\.(?P<number>[0-9]{6,})\.json")


class InUse(Exception):
    """A live launch has the role."""


class TakenOver(Exception):
    """Another launch has taken the role of this launch, which seemed to be dead."""


@dataclass(frozen=True)
class Record:
    """The record of a launch.

    Args:
        path: The file.
        role: Its role in the run.
        number: Counts the launches that have had the role; the highest has it now.
        content: ``launch_id``, ``host``, the process, and what the launch has added. Empty if it cannot be read.
    """

    path: Path
    role: str
    number: int
    content: dict[str, Any]

    @property
    def launch_id(self) -> str:
        """Whose it is; empty if it says nothing."""
        return str(self.content.get("launch_id", ""))

    @property
    def is_here(self) -> bool:
        """Whether its process would be found here if it lived: that of this user, this kernel and this container.

        The name of a host does not say so: a container may have that of its host.
        """
        is_mine = self.content.get("uid") == os.getuid() and self.content.get("host") == platform.node()
        return is_mine and is_on_this_system(self.content)

    @property
    def is_dead(self) -> bool:
        """Whether its launch is known here to be killed."""
        return self.is_here and not is_running(self.content)

    def __str__(self) -> str:
        where = "this host" if self.is_here else f"host {self.content.get('host')}"
        if not self.is_here and self.content.get("host") == platform.node():
            where = "this host, or one of the same name, in another container or of another user"
        return f"process {self.content.get('pid')} on {where}"


def records(folder: Path) -> list[Record]:
    """All records, with those of killed launches.

    Args:
        folder: ``launches`` in the run directory.
    """
    return [_read(folder, role, number) for role, numbers in _numbers(folder).items() for number in sorted(numbers)]


def newest(folder: Path, role: str) -> Record | None:
    """The record of the launch that has a role.

    Args:
        folder: ``launches`` in the run directory.
        role: The role.
    """
    numbers = _numbers(folder).get(role)
    return _read(folder, role, max(numbers)) if numbers else None


def _numbers(folder: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    with suppress(FileNotFoundError):
        for match in map(_FILE.fullmatch, os.listdir(folder)):
            if match:
                found.setdefault(match["role"], []).append(int(match["number"]))
    return found


def _path(folder: Path, role: str, number: int) -> Path:
    return folder / f"{role}.{number:06d}.json"


def _read(folder: Path, role: str, number: int) -> Record:
    path = _path(folder, role, number)
    return Record(path, role, number, read_json(path) or {})


class Spares:
    """The spares: launches whose records move and that wait to replace another.

    Args:
        folder: ``launches`` in the run directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._moved: dict[str, tuple[int, float | None]] = {}  # the last beat, and when it was seen to move

    def look(self) -> dict[str, str]:
        """Their launch ids, and their nodes; to be called often."""
        now = time.monotonic()
        waiting = {}
        for record in records(self._folder):
            beat = record.content.get("beat", 0)
            if not record.content.get("spare"):
                continue
            last, at = self._moved.get(record.launch_id, (beat, None))
            if beat != last:
                at = now
            self._moved[record.launch_id] = beat, at
            if at is not None and now - at < DEAD_AFTER_BEATS * BEAT_INTERVAL_S:
                waiting[record.launch_id] = str(record.content.get("node"))
        return waiting


class LaunchRecord:
    """This launch's own.

    Args:
        folder: ``launches`` in the run directory.
        launch_id: Its name.
        node: Which node of the run this is, for one that does not decide: several may have the same, but not in one
            container. ``None``: the one that decides.
        is_spare: Whether this launch waits as a spare.
    """

    def __init__(self, folder: Path, launch_id: str, node: str | None = None, is_spare: bool = False) -> None:
        self._folder, self._number = folder, 0
        here = f"{zlib.crc32(f'{platform.node()} {pid_namespace()}'.encode()):08x}"
        self._role = FIRST if node is None else f"node-{node}-{here}"
        self._beats = node is None or is_spare  # what others watch
        self._content: dict[str, Any] = {
            "launch_id": launch_id,
            "host": platform.node(),
            "node": node_name(),
            "spare": is_spare,
            "uid": os.getuid(),
            **describe_process(),
            "beat": 0,
        }
        self._writing = threading.Lock()
        self._stopping = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="launch-record", daemon=True)
        self._taken_over_by: Record | None = None

    @property
    def _path(self) -> Path:
        return _path(self._folder, self._role, self._number)

    def take(self, stop: Callable[[], object], log_line: Callable[[str], None]) -> bool:
        """Takes the role and keeps it until :meth:`release`.

        A record of which it cannot be seen here whether its launch lives is watched until its counter would have moved
        twice.

        Args:
            stop: Ends the watching.
            log_line: Called with a line if there is another record to watch.

        Returns:
            Whether it was taken: not if ``stop`` said so.

        Raises:
            InUse: If a launch that lives has it.
            OSError: If nothing can be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        while not stop():
            found = newest(self._folder, self._role)
            is_free = found is None or found.is_dead or self._stands_still(found, stop, log_line)
            if is_free and self._create(1 if found is None else found.number + 1):
                if self._beats:
                    self._beating.start()
                return True
            time.sleep(_POLL_S)
        return False

    @property
    def held_by(self) -> Record | None:
        """The launch that has the role now, if it is not known to be dead."""
        found = newest(self._folder, self._role)
        return None if found is None or found.is_dead else found

    def _stands_still(self, found: Record, stop: Callable[[], object], log_line: Callable[[str], None]) -> bool:
        if found.is_here:
            raise InUse(f"{found} runs {self._folder.parent} already")
        wait_s = DEAD_AFTER_BEATS * BEAT_INTERVAL_S
        log_line(f"{found} may still run here: watching its record for {wait_s:g} s.")
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            if stop():
                return False
            time.sleep(_POLL_S)
            seen = newest(self._folder, self._role)
            if seen is None:
                return False  # it has ended meanwhile
            if seen.content and seen.content != found.content:
                if found.content:
                    raise InUse(f"{seen} runs {self._folder.parent} already: its record is still being updated")
                return False  # only now can it be read
        return True

    def _create(self, number: int) -> bool:
        path = _path(self._folder, self._role, number)
        # A server of files whose answer was lost is asked again, and then says that there is something already.
        if not create_json(path, self._content) and read_json(path) != self._content:
            return False
        numbers = _numbers(self._folder).get(self._role, [])
        if max(numbers, default=number) > number:  # others have come since it was free
            path.unlink(missing_ok=True)
            return False
        self._number = number
        return True

    def follows(self, other: Record) -> bool:
        """Whether it has the role that the other launch had."""
        return other.role == self._role and other.number < self._number

    def update(self, **fields: Any) -> None:
        """Adds to what it says. What cannot be written now is with the next beat.

        Args:
            **fields: What to add, JSON-serialisable.
        """
        with self._writing:
            self._content |= fields
            with suppress(OSError):
                write_json(self._path, self._content)

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT_INTERVAL_S):
            with suppress(OSError):
                self._look()
            if self.is_lost:
                return
            with self._writing:
                self._content["beat"] += 1
                if not self._stopping.is_set():
                    with suppress(OSError):
                        write_json(self._path, self._content)

    def _look(self) -> None:
        found = newest(self._folder, self._role)
        if found is None:
            return
        has_changed = found.content and found.launch_id != self._content["launch_id"]  # where links cannot be made
        if found.number > self._number or (found.number == self._number and has_changed):
            self._taken_over_by = found

    @property
    def is_lost(self) -> bool:
        """Whether it was seen, at the last beat, that another launch has the role."""
        return self._taken_over_by is not None

    def check(self) -> None:
        """Looks whether this launch has its role still.

        Raises:
            TakenOver: If another has it.
        """
        with suppress(OSError):
            self._look()
        if self._taken_over_by is not None:
            raise TakenOver(f"{self._taken_over_by} has taken over {self._folder.parent} and continues the run")

    def release(self) -> None:
        """Gives the role back."""
        self._stopping.set()
        if self._number and not self.is_lost and self._writing.acquire(timeout=BEAT_INTERVAL_S):  # storage may be stuck
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._writing.release()
