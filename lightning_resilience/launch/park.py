"""The worker's end of its channel, and the spare: a process that waits to become a worker.

A spare has the command line and the environment of its rank. It imports what the rank's last worker had imported,
prints nothing, and holds neither a device nor pinned memory. When it gets a message, it continues as if it had just
been started. If it then turns out to be unusable, it executes its program anew in the same process: the launcher would
take a spare that ends for a worker that has ended.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lightning_resilience import _processes
from lightning_resilience._output import flush
from lightning_resilience.launch import channel as channels
from lightning_resilience.launch import imports, standstill
from lightning_resilience.launch.channel import CHANNEL_VARIABLE, Channel, Message
from lightning_resilience.launch.job_info import versions
from lightning_resilience.run import time_account
from lightning_resilience.run.history import read_history
from lightning_resilience.run.run_directory import JOINS_VARIABLE, RUN_DIR_VARIABLE, RunDirectory

PLAIN, RECORDS, SPARE = "plain", "records", "spare"
"""Purpose of a process: a worker, a worker that reports what it imports, a spare."""

CHANGES_FROM_START_TO_START = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"),
        *("NVRX_CURRENT_CYCLE_INFO", "FT_LAUNCHER_IPC_SOCKET", "FT_RANK_MONITOR_IPC_SOCKET", JOINS_VARIABLE),
    }
)
"""Environment variables of a rank that differ from one start to the next and that no library reads when imported."""

_TOLD_AFTER_S = 0.5
_LOOKS_FOR_PARENT_EVERY_S = 5.0
_IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_KILLED_RATHER = 500

has_frozen = False
"""Whether this process was a spare, so that the garbage collector leaves out what it had imported."""

_records = False
_before: dict[str, Any] | None = None
_recorder: imports.Recorder | None = None
_has_begun = False


def enter() -> None:
    """Sets up the channel; must be called first of all in a worker. A spare returns only as a worker."""
    global _records
    if (value := os.environ.pop(CHANNEL_VARIABLE, None)) is None:
        return
    fd, gate, kind, *started = value.split(",")
    channel = Channel(socket.socket(fileno=int(fd)))
    standstill.mind(int(gate))
    if started:
        _processes.count_from(float(started[0]))
        time_account.OF_PROCESS.begin()
    channels.set_of_worker(channel)
    _records = kind != PLAIN
    if kind == SPARE:
        _Spare(channel).wait()


def record_imports() -> None:
    """Starts to record what the script imports, if the launcher has asked for that."""
    global _recorder
    if _records:
        _recorder = imports.Recorder(_before)


def begun() -> None:
    """Reports to the launcher that this worker is at its first boundary, and a moment later what it has imported."""
    global _has_begun, _recorder
    if _has_begun or (channel := channels.of_worker()) is None:
        return
    _has_begun = True
    recorder, _recorder = _recorder, None
    channel.send("begun")
    if recorder is not None:
        recorder.end()
        # Not during the first step, for which other ranks may wait: it takes the interpreter for some 20 ms.
        timer = threading.Timer(_TOLD_AFTER_S, lambda: channel.send("begun", **recorder.noted()))
        timer.daemon = True
        timer.start()


class _Spare:
    """This process while it is a spare.

    Args:
        channel: The worker's end of the channel.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._environment = dict(os.environ)
        self._argv = list(sys.argv)
        self._handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in _IGNORED}
        self._outputs = {fd: saved for fd in (1, 2) if (saved := _mute(fd)) is not None}
        self._oom_score: str | None = None
        with suppress(OSError, ValueError):
            score = _OOM_SCORE.read_text()
            _OOM_SCORE.write_text(str(min(1000, int(score) + _KILLED_RATHER)))
            self._oom_score = score
        self._parent = os.getppid()

    def wait(self) -> None:
        """Imports and waits; returns when this process is a worker."""
        global _before, has_frozen
        order = self._receive("import")
        self._parent = order.fields["parent"]
        noted = order.fields
        command = self._argv[1:]
        sys.argv = command[1:] if command[:1] == ["-m"] else command
        problem = imports.import_all(noted, self._channel.is_readable)
        standstill.leave()
        if problem is None and _has_device_context():
            problem = "a library takes hold of a device when it is imported"
        sys.argv = self._argv
        _read_ahead(self._environment)
        gc.freeze()  # a collection would look at all that was imported: 0.2 s, at the worker's first steps
        has_frozen = True
        self._channel.send("ready", problem=problem, memory=_own_memory())
        go = self._receive("go")
        self._channel.send("going")
        self._redirect(go)
        with suppress(OSError):  # the folder may have been removed: a worker would be started in it, too
            os.chdir(go.fields["cwd"])
        differ = {*self._environment.items()} ^ {*go.fields["env"].items()}
        others = {name for name, _ in differ} - CHANGES_FROM_START_TO_START
        if problem is not None or others or imports.why_changed(noted) is not None:
            self._start_anew(go.fields["env"])
        imports.set_environment(go.fields["env"])
        importlib.invalidate_caches()  # for files that were added to folders meanwhile
        _before = noted
        _processes.count_from(time.clock_gettime(time.CLOCK_BOOTTIME))
        time_account.OF_PROCESS.begin()

    def _receive(self, kind: str) -> Message:
        while not self._channel.is_readable(_LOOKS_FOR_PARENT_EVERY_S):
            if os.getppid() != self._parent:  # other processes may have inherited the launcher's end of the channel
                os._exit(1)  # with 0 it would have finished
        message = self._channel.receive()
        if message is None or message.kind != kind:
            os._exit(1)  # with 0 it would have finished
        return message

    def _redirect(self, go: Message) -> None:
        """Restores what was set aside in this process: outputs, signal handlers, and its score for the OOM killer."""
        flush()
        ctypes.CDLL(None).fflush(None)  # the buffers of C code: to nowhere
        for fd, saved in self._outputs.items():
            os.dup2(saved, fd)
            os.close(saved)
        for fd, received in zip(go.fields["redirected"], go.fds, strict=True):
            os.dup2(received, fd)
            os.close(received)
        for signum, handler in self._handlers.items():
            if signal.getsignal(signum) is signal.SIG_IGN:
                signal.signal(signum, handler)
        if self._oom_score is not None:
            with suppress(OSError):
                _OOM_SCORE.write_text(self._oom_score)

    def _start_anew(self, env: dict[str, str]) -> NoReturn:
        """Becomes a worker that has just been started, with the same process id."""
        fd, now = self._channel.fileno(), time.clock_gettime(time.CLOCK_BOOTTIME)
        os.set_inheritable(fd, True)
        value = f"{fd},{standstill.NO_GATE},{RECORDS},{now}"
        try:
            os.execve(sys.executable, sys.orig_argv, env | {CHANNEL_VARIABLE: value})
        finally:
            os._exit(1)


def _read_ahead(env: Mapping[str, str]) -> None:
    """Reads ahead what each start needs: package versions, and the ledger, which after a month takes a second."""
    versions()
    if (run_dir := env.get(RUN_DIR_VARIABLE)) is not None:
        with suppress(OSError):
            read_history(RunDirectory(run_dir).ledger)


def _mute(fd: int) -> int | None:
    """Sends what is written to a descriptor to nowhere; returns a descriptor of the old target, if it had one."""
    try:
        saved = os.dup(fd)
    except OSError:
        return None
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)
    return saved


def _own_memory() -> int:
    """How many bytes of memory this process shares with no other one."""
    with suppress(OSError):
        text = Path("/proc/self/smaps_rollup").read_text()
        return sum(int(kb) << 10 for kb in re.findall(r"^Private_\w+: +(\d+) kB", text, re.MULTILINE))
    return 0


def _has_device_context() -> bool:
    """Whether this process has a context on a GPU: it would hold GPU memory, and restarts wait for that to be free."""
    with suppress(OSError, AttributeError):
        if "libcuda.so" not in Path("/proc/self/maps").read_text():
            return False
        cuda = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        if cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return False  # CUDA was not even initialized
        for device in range(count.value):
            flags, is_active = ctypes.c_uint(), ctypes.c_int()
            cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
            if is_active.value:
                return True
    return False
