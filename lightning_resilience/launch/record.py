"""The launches of a run: a record file for each, and a role that only one launch can have.

A role belongs to one launch at a time. The launch that decides has the role :data:`FIRST`. The first launch to create
the next file of a role has it. In the records of the launch that decides, and of spares, a counter moves while the
launch lives. So a launch on another host or in another container is known to live without a shared clock or process
number: its record is watched.
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
        role: The launch's role in the run.
        number: Counts the launches that have had the role; the one with the highest number has it now.
        content: ``launch_id``, ``host``, the process, and what the launch has added. Empty if it cannot be read.
    """

    path: Path
    role: str
    number: int
    content: dict[str, Any]

    @property
    def launch_id(self) -> str:
        """The id of the launch; empty if the record has none."""
        return str(self.content.get("launch_id", ""))

    @property
    def is_here(self) -> bool:
        """Whether its process would be found here if it lived: same user, same kernel and same container.

        The host name does not show this: a container may have the name of its host.
        """
        is_mine = self.content.get("uid") == os.getuid() and self.content.get("host") == platform.node()
        return is_mine and is_on_this_system(self.content)

    @property
    def is_dead(self) -> bool:
        """Whether its launch is known to be dead; known only on this host, in this container, for this user."""
        return self.is_here and not is_running(self.content)

    def __str__(self) -> str:
        where = "this host" if self.is_here else f"host {self.content.get('host')}"
        if not self.is_here and self.content.get("host") == platform.node():
            where = "this host, or one of the same name, in another container or of another user"
        return f"process {self.content.get('pid')} on {where}"


def records(folder: Path) -> list[Record]:
    """All records, including those of killed launches.

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
    """The spares: launches that wait to replace a node and whose records move.

    Args:
        folder: ``launches`` in the run directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._moved: dict[str, tuple[int, float | None]] = {}  # the last beat, and when it was seen to move

    def look(self) -> dict[str, str]:
        """The launch ids of the waiting spares, and their nodes; must be called often."""
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
    """The record of this launch.

    Args:
        folder: ``launches`` in the run directory.
        launch_id: The id of this launch.
        node: The name of this node in the run, if it does not decide; several nodes may have the same name, but not in
            one container. ``None``: this node decides.
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

        If it cannot be checked here whether the launch of an existing record lives, that record is watched for as long
        as its counter would take to move twice.

        Args:
            stop: Whether to stop watching.
            log_line: Called with a line if an existing record is watched.

        Returns:
            Whether the role was taken; ``False`` if ``stop`` has returned true.

        Raises:
            InUse: If a living launch has the role.
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
        """The record of the launch that has the role now, unless it is known to be dead."""
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
                return False  # the record can be read only now
        return True

    def _create(self, number: int) -> bool:
        path = _path(self._folder, self._role, number)
        # After a lost answer, a file server is asked again, and then reports that the file exists already.
        if not create_json(path, self._content) and read_json(path) != self._content:
            return False
        numbers = _numbers(self._folder).get(self._role, [])
        if max(numbers, default=number) > number:  # other launches have come since the role was free
            path.unlink(missing_ok=True)
            return False
        self._number = number
        return True

    def follows(self, other: Record) -> bool:
        """Whether this launch has the role that the other launch had."""
        return other.role == self._role and other.number < self._number

    def update(self, **fields: Any) -> None:
        """Adds fields to the record. If they cannot be written now, the next beat writes them.

        Args:
            **fields: What to add, JSON-serializable.
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
        """Whether another launch was seen to have the role, at the last look."""
        return self._taken_over_by is not None

    def check(self) -> None:
        """Checks whether this launch still has its role.

        Raises:
            TakenOver: If another launch has it.
        """
        with suppress(OSError):
            self._look()
        if self._taken_over_by is not None:
            raise TakenOver(f"{self._taken_over_by} has taken over {self._folder.parent} and continues the run")

    def release(self) -> None:
        """Gives up the role and removes the record."""
        self._stopping.set()
        if self._number and not self.is_lost and self._writing.acquire(timeout=BEAT_INTERVAL_S):  # storage may be stuck
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._writing.release()
