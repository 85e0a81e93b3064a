"""A process that is known again later: by its number and its start, which do not depend on any clock."""

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
"""Environment variable of a process that a rank has started and that a restart leaves alone."""


def describe_process() -> dict[str, Any]:
    """This process, JSON-serialisable, so that :func:`is_running` knows it again."""
    return {"pid": os.getpid(), "process_started": _started(os.getpid()), "namespace": pid_namespace()}


_counted_from: float | None = None


def count_from(at: float) -> None:
    """Counts the age of this process from later than its start: until then it has only waited to be used.

    Args:
        at: When it was used, by ``CLOCK_BOOTTIME``.
    """
    global _counted_from
    _counted_from = at


def process_age() -> float:
    """For how many seconds this process has run, or was used (:func:`count_from`)."""
    return _seconds_since_start() - waited()


def waited() -> float:
    """For how many seconds this process has waited to be used, from its start on."""
    if _counted_from is None:
        return 0.0
    return max(0.0, _seconds_since_start() - (time.clock_gettime(time.CLOCK_BOOTTIME) - _counted_from))


def _seconds_since_start() -> float:
    if (stat := stat_of("self")) is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / os.sysconf("SC_CLK_TCK"))


def stat_of(pid: int | str) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` from the state on; ``None`` if there is no such process, or thread."""
    try:
        return _stat(pid)
    except OSError:
        return None


def _stat(pid: int | str) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


@functools.cache
def boot_id() -> str:
    """Names this start of the kernel; empty where there is no ``/proc``. What fails otherwise is asked again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return ""


def pid_namespace() -> str | None:
    """In which numbers of processes mean something; containers may share node memory, but not these."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def is_on_this_system(record: dict[str, Any]) -> bool:
    """Whether the number in :func:`describe_process` means something here: the same boot of a kernel, the same numbers.

    Without containers the numbers of all hosts are said to be the same ones.
    """
    here = describe_process()
    return record.get("namespace") == here["namespace"] and _boot(record) == _boot(here)


def _boot(record: dict[str, Any]) -> str:
    return str(record.get("process_started")).rpartition("-")[0]


def is_running(record: dict[str, Any]) -> bool:
    """Whether the process of :func:`describe_process` runs still, and not another one with its number."""
    try:
        pid = int(record["pid"])
        return record["process_started"] == _started(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except OSError as error:  # a node that is out of files, say, does not make it dead
        return error.errno not in (errno.ENOENT, errno.ESRCH)
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def is_being_killed(pid: int) -> bool:
    """Whether a process has been sent SIGKILL and is still there: stuck in the kernel, which it will never leave alive.

    Args:
        pid: Its number.
    """
    return has_signal(pid, signal.SIGKILL, "SigPnd:", "ShdPnd:")


def has_signal(pid: int, signum: int, *sets: str) -> bool:
    """Whether a signal is in one of the sets of signals that ``/proc/PID/status`` shows for a process.

    Args:
        pid: Its number.
        signum: The signal.
        sets: As they are named there, such as ``SigCgt:``, the signals that have a handler.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    masks = (int(line.split()[1], 16) for line in lines if line.startswith(sets))
    return any(mask >> (signum - 1) & 1 for mask in masks)


def _started(pid: int) -> str:
    """When a process was started: in ticks since this boot.

    Its start by the clock is that of the boot plus these, and moves whenever the clock is set.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        if boot := boot_id():
            return f"{boot}-{_stat(pid)[19]}"
    return str(psutil.Process(pid).create_time())  # where there is no /proc
