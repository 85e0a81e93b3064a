"""The rank's side of the watchdog: what a rank provides so that the watchdog can probe it when it does not advance.

The rank provides it in a folder of node memory that only this user may enter: its progress record; a file into which it
writes the Python stacks of all its threads on a signal; a socket at which torch's worker server answers; and its
registration. All of this works while the main thread is stuck, and while a thread holds the interpreter lock.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import platform
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_resilience._files import read_json, write_json
from lightning_resilience._processes import describe_process
from lightning_resilience.detect.hangs import terminal_input
from lightning_resilience.detect.hangs.device_probe import DeviceAnswers
from lightning_resilience.detect.hangs.progress import Progress, Section
from lightning_resilience.run import exit_codes, time_account

log = logging.getLogger(__name__)

_FIRST_REAL_TIME_SIGNAL = getattr(signal, "SIGRTMIN", 34)  # schedulers, launchers and libraries leave these alone

STACKS_SIGNAL: int = _FIRST_REAL_TIME_SIGNAL + 9
"""The signal on which a rank writes its stacks."""

EXIT_SIGNAL: int = exit_codes.HUNG
"""The signal on which a rank ends, in any state."""

_SOCKET_PATH_MAX = 107  # bytes, sockaddr_un
_SERVES_WITHIN_S = 5.0


def own_directories() -> list[Path]:
    """The folders of this user in node memory, the preferred one first; they need not exist.

    Each node of each attempt has a folder in the first of them that works.
    """
    return [Path(base) / f"lightning-resilience-{os.getuid()}" for base in ("/dev/shm", tempfile.gettempdir())]


def node_directory(token: str, node_rank: int) -> Path:
    """The folder in which the ranks of one node and their watchdog meet.

    Args:
        token: The token of the attempt that owns the run; all ranks have the same.
        node_rank: Distinguishes two nodes on one host.

    Raises:
        OSError: If no place for the folder can be used.
    """
    return node_folder(f"{token[:12]}-{node_rank}")


def node_folder(name: str) -> Path:
    """Creates a folder in the first of :func:`own_directories` that works.

    Args:
        name: The folder's name.

    Raises:
        OSError: If no place for the folder can be used.
    """
    for own in own_directories():
        with contextlib.suppress(OSError):
            own.mkdir(mode=0o700, exist_ok=True)
            status = own.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
                directory = own / name
                directory.mkdir(mode=0o700, exist_ok=True)
                return directory
    places = " nor ".join(map(str, own_directories()))
    raise OSError(f"neither {places} can be made a folder that only this user may enter")


def pids(directory: Path) -> list[int]:
    """The process ids of all ranks that have registered in ``directory``."""
    records = [read_json(path) for path in directory.glob("rank-*.json")]
    return [int(record["pid"]) for record in records if record is not None]


def describe_rank(
    run_dir: Path, fit: int | None, token: str, nodes: int, world_size: int, is_started_again: bool
) -> dict[str, Any]:
    """What a rank registers for the diagnosis and the ledger.

    Args:
        run_dir: The run directory.
        fit: Number of the fit; ``None``: before the first fit.
        token: The token of the attempt.
        nodes: The number of nodes.
        world_size: The number of ranks.
        is_started_again: Whether a launcher restarts ranks after they were ended.
    """
    return {
        "run_dir": str(run_dir),
        "fit": fit,
        "token": token,
        "node": platform.node(),
        "nodes": nodes,
        "world_size": world_size,
        "is_started_again": is_started_again,
        "elastic_run_id": os.environ.get("TORCHELASTIC_RUN_ID"),
        "restart_count": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    }


class RankProbe:
    """What a rank provides for its watchdog: progress record, stacks, worker server and registration.

    Args:
        directory: See :func:`node_directory`.
        rank: Global rank.
        timeouts: Seconds by section, for :class:`Progress`.
        about: See :func:`describe_rank`.
        is_workers: Whether the probe belongs to a launched worker: it then begins in section ``start``, before the
            first fit, and stays for all fits of the worker.

    Raises:
        OSError: If node memory is full or cannot be written; then no signal is handled and no server runs.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        timeouts: Mapping[Section, float],
        about: dict[str, Any],
        is_workers: bool = False,
    ) -> None:
        self.directory = directory
        self.rank = rank
        self.pid = os.getpid()
        self._is_workers = is_workers
        self._start_timeout = timeouts.get("start", math.inf)
        self._about = about
        self._path = directory / f"rank-{rank:05d}"
        self.progress_path = self._path.with_suffix(".progress")
        self._failed_path = self._path.with_suffix(".failed")
        self._failed_path.unlink(missing_ok=True)  # an earlier fit may have left it
        self.progress = Progress(self.progress_path, timeouts)
        self.progress.enter("start" if is_workers else "setup")
        self._stacks = open(self._path.with_suffix(".stacks"), "ab", buffering=0)
        self.handle_signals()
        self._server: Any | None = None
        self._device: DeviceAnswers | None = None
        try:
            time_account.OF_PROCESS.share(self._path.with_suffix(".time"))
            if not is_workers:  # the server needs torch
                self._server = _start_worker_server(self._path.with_suffix(".socket"))
            self._register()
        except BaseException:
            time_account.OF_PROCESS.unshare()  # without a watchdog the fit records the account
            self.close()
            raise
        _open.add(self)
        terminal_input.watch()
        if is_workers:  # it stays until the process ends, where a server that still runs logs an error
            atexit.register(self._end_server)

    def _register(self) -> None:
        registration = {
            **self._about,
            **describe_process(),
            "rank": self.rank,
            "main_thread": threading.get_ident(),  # the thread that runs the fit
            "has_server": self._server is not None,
        }
        write_json(self._path.with_suffix(".json"), registration)

    def begin_fit(self, timeouts: Mapping[Section, float], about: dict[str, Any]) -> None:
        """Begins a fit of a launched worker, which is watched already.

        Args:
            timeouts: Seconds by section.
            about: See :func:`describe_rank`. Its token is ignored: all nodes keep their first token.

        Raises:
            OSError: If node memory is full or cannot be written.
        """
        self._about = {**about, "token": self._about["token"]}
        self._failed_path.unlink(missing_ok=True)
        if self._server is None:
            self._server = _start_worker_server(self._path.with_suffix(".socket"))
        self._register()
        self.progress.begin(timeouts)

    def answer_for_device(self, has_work: Callable[[], bool]) -> None:
        """Answers the watchdog, until the end of the fit, whether the device has work left.

        Args:
            has_work: Asks the device; called in another thread.
        """
        self._answer_no_more()
        with contextlib.suppress(OSError):  # for a path that is too long, the worker server has logged a warning
            self._device = DeviceAnswers(self._path.with_suffix(".device"), has_work)

    def end_fit(self) -> None:
        """Records that the rank leaves the fit. The probe of a worker returns to section ``start``, others close."""
        self._answer_no_more()
        if self._is_workers:
            self.progress.timeouts["start"] = self._start_timeout  # the launcher's, whatever held for the fit
            self.progress.enter("start")
        else:
            self.close()

    def handle_signals(self) -> None:
        """Handles the watchdog's signals; call it again after other code has restored earlier handlers."""
        faulthandler.unregister(STACKS_SIGNAL)
        # Ignores them after the fit: by default these signals end a process, and the watchdog may send one late.
        for signum in (STACKS_SIGNAL, EXIT_SIGNAL):
            _set_c_handler(signum, _C_SIG_IGN)
        # faulthandler's handler is in C: it needs no interpreter lock, and restarts the interrupted system call.
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        # A Python handler would not run in a stuck rank. C's `_exit` gets the signal's number, which is the exit code.
        _set_c_handler(EXIT_SIGNAL, ctypes.cast(ctypes.CDLL(None)._exit, ctypes.c_void_p))

    def fail(self) -> None:
        """Records for the watchdog that the fit has failed on this rank, since the other ranks may not notice."""
        with contextlib.suppress(OSError):
            self._failed_path.touch()

    def close(self) -> None:
        """Ends the watching of this rank, which leaves the fit."""
        _open.discard(self)
        terminal_input.leave()
        if time_account.OF_PROCESS.is_shared:
            time_account.OF_PROCESS.close()  # before the watchdog sees that the rank has left
        self.progress.close()
        self._answer_no_more()
        faulthandler.unregister(STACKS_SIGNAL)
        _set_c_handler(EXIT_SIGNAL, _C_SIG_IGN)
        self._stacks.close()
        self._end_server()

    def _answer_no_more(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.close()

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None and self.pid == os.getpid():
            with _without_stderr():
                server.shutdown()


_open: set[RankProbe] = set()
"""The open probe of this process, if any."""


def probe_of_worker() -> RankProbe | None:
    """The probe of this launched worker, if it has one."""
    return next((each for each in _open if each._is_workers and each.pid == os.getpid()), None)


def handle_signals_again() -> None:
    """Handles the watchdog's signals again if this rank is watched."""
    for probe in _open:
        probe.handle_signals()


_C_SIG_IGN = ctypes.c_void_p(1)  # signal.h


def _set_c_handler(signum: int, handler: ctypes.c_void_p) -> None:
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signum, handler)


def _start_worker_server(path: Path) -> Any | None:
    """Starts torch's worker server at a UNIX socket; its C++ threads answer whatever the interpreter does."""
    try:
        from torch._C._distributed_c10d import _WorkerServer
    except ImportError:  # this torch was built without distributed, or has no such server
        log.warning("This torch has no worker server: a hang is diagnosed without collectives.")
        return None
    if len(os.fsencode(path)) > _SOCKET_PATH_MAX:
        log.warning("%s is too long for a socket: a hang is diagnosed without collectives.", path)
        return None
    path.unlink(missing_ok=True)
    try:
        with _without_stderr():
            server = _WorkerServer(os.fspath(path))
    except RuntimeError as error:
        log.warning("torch's worker server did not start (%s): a hang is diagnosed without collectives.", error)
        return None
    _await_answer(path)
    return server


def _await_answer(path: Path) -> None:
    """Waits until a worker server serves: a shutdown before its thread serves would never return."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_SERVES_WITHIN_S)
        client.connect(os.fspath(path))
        client.sendall(b"POST /handler/ping HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        while client.recv(1024):
            pass


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discards stderr for the block: each rank's server would announce its start and its end there as warnings."""
    try:
        saved = os.dup(2)
    except OSError:  # the process has no stderr
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
