"""Identifies a process so that it can be recognized later: by its id and its start, independent of any clock."""

from __future__ import annotations

import errno
import functools
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

OUTLIVES_RANKS_VARIABLE = "LIGHTNING_RESILIENCE_OUTLIVES_RANKS"
"""Environment variable of a process that a rank has started and that a restart does not end."""


def describe_process() -> dict[str, Any]:
    """A JSON-serializable description of this process, by which :func:`is_running` recognizes it."""
    return {"pid": os.getpid(), "process_started": _started(os.getpid()), "namespace": pid_namespace()}


_counted_from: float | None = None


def count_from(at: float) -> None:
    """Counts the age of this process from a time after its start: before that it has only waited to be used.

    Args:
        at: When it began to be used, by ``CLOCK_BOOTTIME``.
    """
    global _counted_from
    _counted_from = at


def process_age() -> float:
    """For how many seconds this process has run or, after :func:`count_from`, has been used."""
    return _seconds_since_start() - waited()


def waited() -> float:
    """For how many seconds after its start this process has waited to be used."""
    if _counted_from is None:
        return 0.0
    return max(0.0, _seconds_since_start() - (time.clock_gettime(time.CLOCK_BOOTTIME) - _counted_from))


def _seconds_since_start() -> float:
    if (stat := stat_of("self")) is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / os.sysconf("SC_CLK_TCK"))


def stat_of(pid: int | str) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` from the state on; ``None`` if the process or thread does not exist."""
    try:
        return _stat(pid)
    except OSError:
        return None


def _stat(pid: int | str) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


@functools.cache
def boot_id() -> str:
    """The id of this boot of the kernel; empty without ``/proc``. After any other error the next call asks again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return ""


def pid_namespace() -> str | None:
    """The namespace in which process ids are valid; containers may share node memory, but not this namespace."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def is_on_this_system(record: dict[str, Any]) -> bool:
    """Whether the process id of a :func:`describe_process` is valid here: the same boot and the same PID namespace.

    The namespace alone is not enough: without containers all hosts report the same one.
    """
    here = describe_process()
    return record.get("namespace") == here["namespace"] and _boot(record) == _boot(here)


def _boot(record: dict[str, Any]) -> str:
    return str(record.get("process_started")).rpartition("-")[0]


def is_running(record: dict[str, Any]) -> bool:
    """Whether the process of a :func:`describe_process` still runs, and not another process with its id."""
    try:
        pid = int(record["pid"])
        return record["process_started"] == _started(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except OSError as error:  # other errors do not show that it has ended, such as a node out of file descriptors
        return error.errno not in (errno.ENOENT, errno.ESRCH)
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def is_being_killed(pid: int) -> bool:
    """Whether a process has a pending SIGKILL: it is stuck in the kernel, and never runs its own code again.

    Args:
        pid: The process id.
    """
    return has_signal(pid, signal.SIGKILL, "SigPnd:", "ShdPnd:")


def has_signal(pid: int, signum: int, *sets: str) -> bool:
    """Whether a signal is in one of the sets of signals that ``/proc/PID/status`` shows for a process.

    Args:
        pid: The process id.
        signum: The signal.
        sets: The names of the sets there, such as ``SigCgt:``, the signals that have a handler.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    masks = (int(line.split()[1], 16) for line in lines if line.startswith(sets))
    return any(mask >> (signum - 1) & 1 for mask in masks)


def _started(pid: int) -> str:
    """When a process was started: the boot and ticks since this boot.

    Its start by the clock would be the time of the boot plus these ticks, which moves whenever the clock is set.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        if boot := boot_id():
            return f"{boot}-{_stat(pid)[19]}"
    return str(psutil.Process(pid).create_time())  # without /proc
