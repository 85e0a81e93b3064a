"""Finds out how another process ended, as far as the kernel shows this to a process that is not its parent. Linux only.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_resilience._processes import is_being_killed, stat_of
from lightning_resilience.run import exit_codes

_PF_EXITING = 0x4  # linux/sched.h
_PIDFD_INFO_EXIT = 0x8  # linux/pidfd.h, since Linux 6.15
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO = struct.Struct("<Q52xi")  # the mask, unused fields, and the wait status

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FROM_OUTSIDE = (signal.SIGKILL, *_STOPS)


@dataclass(frozen=True)
class Death:
    """How a process ended.

    Args:
        status: As ``os.wait`` gives it. ``None``: unknown, because its parent reaped it first and the kernel is too
            old to show the status after that.
        out_of_memory: Whether the kernel killed processes of its cgroup at that time because memory was short.
    """

    status: int | None
    out_of_memory: bool = False

    @property
    def signal(self) -> str | None:
        """The name of the signal that killed the process; ``None`` if no signal is known to have killed it."""
        if self.status is None or not os.WIFSIGNALED(self.status):
            return None
        number = os.WTERMSIG(self.status)
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"

    @property
    def exit_code(self) -> int | None:
        """The exit code with which the process ended; ``None`` if a signal killed it, or if the status is unknown."""
        return os.WEXITSTATUS(self.status) if self.status is not None and os.WIFEXITED(self.status) else None

    @property
    def is_from_outside(self) -> bool:
        """Whether a user, a launcher or a scheduler may have ended the process on purpose."""
        number = None if self.status is None else os.WTERMSIG(self.status)
        return not self.out_of_memory and (self.status is None or number in _FROM_OUTSIDE)

    @property
    def is_loss(self) -> bool:
        """Whether the process is known to have ended neither as intended nor on a request to stop.

        After such an end a launcher ends the other ranks.
        """
        return self.status is not None and self.exit_code != 0 and os.WTERMSIG(self.status) not in _STOPS

    def __str__(self) -> str:
        if self.signal is not None:
            memory = self.out_of_memory and self.signal == "SIGKILL"
            return f"was killed by {self.signal}" + (": the kernel was out of memory" if memory else "")
        if self.exit_code == exit_codes.TOO_SLOW:
            return "was too slow"
        if self.exit_code is not None:
            return f"ended with exit code {self.exit_code}"
        return "died" + (": the kernel was out of memory" if self.out_of_memory else "")


class ExitWatcher:
    """Waits for the ends of processes.

    A parent that polls, as elastic launchers do, reaps an ended process late. A process that the kernel wakes at that
    end can still read the exit status.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._pidfds: dict[int, int] = {}

    def add(self, pid: int) -> None:
        """Waits for this process too; has no effect where the kernel does not allow that."""
        with suppress(OSError, AttributeError):
            self._pidfds[pid] = pidfd = os.pidfd_open(pid)
            self._poll.register(pidfd, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Returns when another one of the processes has ended since the last call, or after so many seconds."""
        for pidfd, _ in self._poll.poll(seconds * 1000):
            self._poll.unregister(pidfd)  # an ended process would wake each later call too

    def status(self, pid: int) -> int | None:
        """How an added process ended, as ``os.wait`` gives it; ``None``: not known."""
        fields = stat_of(pid)
        if fields is not None and fields[0] == "Z":
            return int(fields[49])
        if (pidfd := self._pidfds.get(pid)) is None:
            return None
        info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
        try:
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        except OSError:
            return None
        mask, status = _PIDFD_INFO.unpack(info)
        return int(status) if mask & _PIDFD_INFO_EXIT else None


def is_ending(pid: int) -> bool:
    """Whether a process is ending. This takes seconds if it has much memory, or if a driver holds it."""
    fields = stat_of(pid)
    return fields is None or fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING) or is_being_killed(pid)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, such as by Ctrl-Z at its terminal."""
    fields = stat_of(pid)
    return fields is not None and fields[0] == "T"


def has_active_thread(pid: int) -> bool:
    """Whether a thread of a process runs, wants to run, or waits for storage."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            fields = stat_of(f"{pid}/task/{thread}")
            if fields is not None and fields[0] in "RD":
                return True
    return False


class MemoryShortage:
    """Notices when the kernel kills processes because memory is short, in a process's cgroup or anywhere on this host.

    Args:
        pid: The process whose cgroup is watched. Without a counter for it, the counter of the host is watched.
        root: The root of the file system, for tests.
    """

    _RECENT_S = 60.0  # the end of a process with much memory takes its time

    def __init__(self, pid: int, root: Path = Path("/")) -> None:
        self._file = next((file for file in _counters(pid, root) if _oom_kills(file) is not None), None)
        self._kills = self._count()
        self._rose: float | None = None

    def update(self) -> None:
        """Reads the counter; call it regularly."""
        kills = self._count()  # None: the kernel removes a cgroup with its last process
        if kills is not None and kills != self._kills:
            self._kills, self._rose = kills, time.monotonic()

    def is_recent(self) -> bool:
        """Whether the kernel has killed a process for lack of memory within the last minute."""
        self.update()
        return self._rose is not None and time.monotonic() - self._rose < self._RECENT_S

    def _count(self) -> int | None:
        return None if self._file is None else _oom_kills(self._file)


def _counters(pid: int, root: Path) -> list[Path]:
    """The files that count kills for lack of memory; the file that counts the fewest other processes comes first."""
    own = []
    with suppress(OSError):
        for line in (root / f"proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                own.append(root / "sys/fs/cgroup" / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                own.append(root / "sys/fs/cgroup/memory" / path.lstrip("/") / "memory.oom_control")
    return [*own, root / "proc/vmstat"]


def _oom_kills(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None
