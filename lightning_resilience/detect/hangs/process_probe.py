"""Probes a rank from outside: the kernel's view of its process, its Python stacks, its torch worker server's answers.

No probe needs the help of the rank's main thread, and only the last one (:data:`PYTHON`) needs its interpreter lock.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from lightning_resilience._processes import has_signal, is_running
from lightning_resilience.detect.hangs import device_probe
from lightning_resilience.detect.hangs.evidence import ProcessEvidence, RankEvidence
from lightning_resilience.detect.hangs.flight_recorder import merge
from lightning_resilience.detect.hangs.progress import ProgressRecord
from lightning_resilience.detect.hangs.rank_probe import STACKS_SIGNAL
from lightning_resilience.detect.hangs.stacks import parse_stacks
from lightning_resilience.run.deadlines import ANSWER_WITHIN_S, BUSY_OVER_S, STACKS_WITHIN_S, WRITES_OVER_S

PYTHON = "dump_traceback"
"""The worker server's handler that needs the interpreter. A handler of this package's own would crash the process at
its end, because torch frees the handler after the interpreter has ended."""

# The recorders of gloo and of NCCL. gloo's takes no arguments. NCCL's refuses arguments that it does not know, and
# leaves out stacks in any case: torch needs seconds to look up the names in its first stacks.
_RECORDERS = ("fr_trace_json", "dump_nccl_trace_json?includecollectives=true&onlyactive=false")

_MAX_WORKERS_ASKED = 16


class Usage(NamedTuple):
    """What a process has used since its start: CPU seconds, and bytes read and written."""

    cpu_s: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0


def probe_process(about: dict[str, Any], path: Path, record: ProgressRecord | None, seconds: float) -> RankEvidence:
    """Collects the evidence about a rank of this node.

    Args:
        about: The rank's registration.
        path: The path of the rank's files, without their endings.
        record: The rank's progress record.
        seconds: How many seconds ago it last made progress.
    """
    pid, main_thread = int(about["pid"]), int(about["main_thread"])
    worked = device_probe.has_work(path.with_suffix(".device"))
    began = time.monotonic()
    before = usage_of_tree(pid) if is_running(about) else {}
    state = _state(pid) if pid in before else "gone"
    if before:  # measures before any question: an answer takes CPU time, and stacks are written to a file
        # The kernel counts written bytes when the write call returns, which may be late where storage is slow.
        time.sleep(WRITES_OVER_S if record is not None and record.section == "checkpointing" else BUSY_OVER_S)
    after = usage_of_tree(pid) if before else {}
    watched_s = time.monotonic() - began
    works = None if worked is None else device_probe.has_work(path.with_suffix(".device"))
    answers = python_answers = None
    collectives: dict[str, Any] | None = None
    stacks = ""
    workers: list[ProcessEvidence] = []
    if state in ("running", "sleeping", "uninterruptible"):
        if about["has_server"] and (answers := ask(path, "ping") is not None):
            collectives = merge(_parse_json(ask(path, recorder)) for recorder in _RECORDERS)
        stacks = _stacks(pid, path)
        if answers:
            python_answers = ask(path, PYTHON) is not None
        workers = _workers(pid, path, main_thread)
    own_before = before.get(pid, Usage())
    own_after = after.get(pid, own_before)
    process = ProcessEvidence(
        pid=pid,
        state=state,
        cpu_s=own_after.cpu_s - own_before.cpu_s,
        watched_s=watched_s,
        written_bytes=own_after.written_bytes - own_before.written_bytes,
        threads=parse_stacks(stacks, main_thread),
        children_cpu_s=max(0.0, _children_cpu_s(pid, after) - _children_cpu_s(pid, before)),
        device_works=works and worked,
    )
    return RankEvidence(
        rank=int(about["rank"]),
        node=str(about["node"]),
        process=process,
        section=record.section if record is not None else "setup",
        step=record.step if record is not None else 0,
        position=record.position if record is not None else (0, 0, 0, 0),
        seconds=seconds,
        timeout=record.timeout if record is not None else 0.0,
        answers=answers,
        python_answers=python_answers,
        collectives=collectives,
        workers=workers,
    )


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(os.fspath(self._path))


def ask(path: Path, handler: str, timeout_s: float = ANSWER_WITHIN_S) -> bytes | None:
    """The answer of a rank's worker server, or ``None`` if it does not answer."""
    connection = _UnixConnection(path.with_suffix(".socket"), timeout_s)
    try:
        connection.request("POST", f"/handler/{handler}")
        response = connection.getresponse()
        content = response.read()
        return content if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _state(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "gone"
    return {
        psutil.STATUS_STOPPED: "stopped",
        psutil.STATUS_TRACING_STOP: "traced",
        psutil.STATUS_DISK_SLEEP: "uninterruptible",
        psutil.STATUS_RUNNING: "running",
        psutil.STATUS_ZOMBIE: "gone",
        psutil.STATUS_DEAD: "gone",
    }.get(status, "sleeping")


def usage(pid: int) -> Usage | None:
    """What a process has used since its start; ``None`` if it has ended."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        cpu_s = times.user + times.system
        with suppress(psutil.AccessDenied):
            counters = process.io_counters()
            return Usage(cpu_s, counters.read_chars, counters.write_chars)
        return Usage(cpu_s)
    except psutil.Error:
        return None


def usage_of_tree(pid: int) -> dict[int, Usage]:
    """The usage of a process and of each of its descendants, by process id; empty if the process has ended."""
    pids = [pid]
    with suppress(psutil.Error):
        pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return {each: found for each in pids if (found := usage(each)) is not None}


def _children_cpu_s(pid: int, used: Mapping[int, Usage]) -> float:
    return sum(each.cpu_s for child, each in used.items() if child != pid)


def _stacks(pid: int, path: Path) -> str:
    """Makes a process write its stacks into the file of its rank, and returns them."""
    file = path.with_suffix(".stacks")
    if not _handles(pid, STACKS_SIGNAL) or not file.exists():
        return ""
    with suppress(OSError):  # the process ends or its files vanish: the rest of the evidence still counts
        before = file.stat().st_size
        with suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
        sizes = [before, before]
        deadline = time.monotonic() + STACKS_WITHIN_S
        while time.monotonic() < deadline and not sizes[-1] == sizes[-2] > before:
            time.sleep(0.02)
            sizes.append(file.stat().st_size)
        with open(file, "rb") as stacks:
            stacks.seek(before)
            return stacks.read().decode(errors="replace")
    return ""


def _handles(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal: the signal would kill a process without a handler."""
    return has_signal(pid, signum, "SigCgt:")


def _workers(pid: int, path: Path, main_thread: int) -> list[ProcessEvidence]:
    """The rank's data-loader workers: its child processes that have inherited the handler that writes stacks."""
    found = []
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True)[:_MAX_WORKERS_ASKED]:
            if not _handles(child.pid, STACKS_SIGNAL):
                continue
            state = _state(child.pid)
            stacks = _stacks(child.pid, path) if state not in ("stopped", "traced", "gone") else ""
            threads = parse_stacks(stacks, main_thread)
            found.append(ProcessEvidence(pid=child.pid, state=state, threads=threads))
    return found


def _parse_json(content: bytes | None) -> dict[str, Any] | None:
    try:
        found = json.loads(content) if content is not None else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
