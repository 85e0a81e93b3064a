"""Notices signals that ask a run to stop at once, even while the main thread is blocked in a collective.

A Python signal handler runs only when the main thread returns to the interpreter, which it does not while blocked in a
collective. The interpreter's C handler, however, writes the signal's number to a file descriptor at once
(``signal.set_wakeup_fd``), and a listener thread reads it. The handler does no work, takes no lock and touches no file.

Imports neither torch nor Lightning: ``lightning-resilience launch`` installs the listener before the script's first
import. A signal that comes before the first subscriber is delivered to it later.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import logging
import math
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

from lightning_resilience._daemon import in_daemon_thread
from lightning_resilience._output import flush, signed, write_line
from lightning_resilience.run import exit_codes
from lightning_resilience.run.deadlines import (
    DATA_WORKERS_END_WITHIN_S,
    DEFAULT_GRACE_PERIOD_S,
    EXITS_WITHIN_S,
    LAST_WORDS_WITHIN_S,
    SECOND_SIGNAL_AFTER_S,
)

log = logging.getLogger(__name__)

GRACE_PERIOD_VARIABLE = "LIGHTNING_RESILIENCE_GRACE_PERIOD_S"
"""Environment variable in which a launcher gives its workers the real grace period, in seconds."""

_TERMINALS = (signal.SIGHUP, signal.SIGINT)
_FROM_PYTHON = 0x80  # flag in a byte of the listener's socket: sent by the Python handler; signals end at 64
_PAUSE_AFTER_ERROR_S = 0.1
_LONGEST_POLL_S = 3600.0
_LOGS_WITHIN_S = 0.5


class Interrupted(SystemExit):
    """Ends the process of a run that was stopped on purpose and can be resumed.

    A ``SystemExit``, because libraries wrap ``trainer.fit`` in ``except Exception`` and would turn a preemption into
    success.
    """

    def __init__(self, message: str) -> None:
        super().__init__(exit_code())
        self.message = message

    def __str__(self) -> str:
        return self.message


def exit_code() -> int:
    """The exit code of an interrupted process: 75, or 0 for a worker, whose launcher would restart any other code."""
    is_worker = "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("LOCAL_RANK", "0")) != 0
    return exit_codes.FINISHED if is_worker else exit_codes.INTERRUPTED


def grace_period(requested: float = DEFAULT_GRACE_PERIOD_S) -> float:
    """Seconds from a signal to the end of the process: ``requested`` (0: no limit) or a launcher's limit if shorter."""
    requested = requested or math.inf
    try:
        return min(requested, float(os.environ[GRACE_PERIOD_VARIABLE]))
    except (KeyError, ValueError):
        return requested


class SignalListener:
    """Notices signals in a thread and ends the process when the grace period is over.

    The process ends at once, by ``os._exit``, when the grace period after the first signal is over or a second signal
    arrives (see :data:`~.deadlines.SECOND_SIGNAL_AFTER_S`). Subscribers are notified of the first signal only.

    Handlers of the script are called too, and restored at the end. Their exceptions do not end the training in the
    middle of a step: the run stops at its next boundary.

    Args:
        signums: The signals to notice.
        grace_period_s: Seconds from the first signal to the end of the process.
    """

    def __init__(self, signums: Collection[signal.Signals], grace_period_s: float) -> None:
        self.signums = tuple(signums)
        self.grace_period_s = grace_period_s
        self.received: signal.Signals | None = None
        self.returned: set[int] = set()
        """The signals for which the script's handler was called and has returned."""
        self._subscriber: Callable[[signal.Signals], None] | None = None
        self._before_exit: Callable[[str], None] | None = None
        self._deadline: float | None = None
        self._first_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self._scripts: dict[signal.Signals, Any] = {}  # handlers that have replaced this listener's
        self._calling: set[int] = set()
        self._raised: deque[str] = deque()  # errors of the script's handlers; the thread logs them, a handler must not
        self._unanswered: set[int] = set()  # sent by the C handler, not yet by the Python handler
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._others_fd: _OthersDescriptor | None = None
        self._closing = threading.Event()
        self._has_logged_error = False
        self._thread = threading.Thread(target=self._listen, name="resilience-signals", daemon=True)

    def start(self) -> None:
        """Installs the handlers. Only the main thread may do this."""
        self.add(self.signums)
        self._thread.start()

    def add(self, signums: Collection[signal.Signals]) -> None:
        """Notices ``signums`` too. Only the main thread may do this.

        Signals of a terminal stay ignored where the parent process ignores them, as ``nohup`` does.
        """
        for signum in signums:
            if signum in _TERMINALS and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            if signum not in self._previous:
                self._previous[signum] = signal.signal(signum, self._note)
        self.signums = tuple(self._previous)
        self.take_over()

    def take_over(self) -> None:
        """Takes over signals for which the script has set handlers since; the listener calls these handlers."""
        for signum in self.signums:
            current = signal.getsignal(signum)
            if not self._is_own(current):
                if current not in (None, signal.SIG_DFL):
                    self._scripts[signum] = current
                signal.signal(signum, self._note)
        self.listen_again()

    def handle(self) -> None:
        """Sets the handlers again after Lightning has replaced them at the start of a fit."""
        for signum in self.signums:
            signal.signal(signum, self._note)
        self.listen_again()

    def listen_again(self) -> None:
        """Takes the wakeup descriptor back, which closing an asyncio loop with a signal handler removes.

        Without it a signal is noticed only when the main thread returns to the interpreter. Does nothing in other
        threads.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        current = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if current != self._writer.fileno():
            self._others_fd = _OthersDescriptor.of(current)

    def give_back(self) -> None:
        """Restores the handlers of the script."""
        for signum, handler in self._scripts.items():
            if self._is_own(signal.getsignal(signum)):
                signal.signal(signum, handler)
        self._scripts.clear()

    def stop(self) -> None:
        """Stops listening and restores the previous handlers and wakeup descriptor."""
        self._restore()
        others = self._others_fd
        current = signal.set_wakeup_fd(others.fd if others is not None and others.is_open else -1)
        if current != self._writer.fileno():
            signal.set_wakeup_fd(current)  # other code has set it meanwhile: keep that one
        self._closing.set()
        self._wake()
        self._thread.join()
        self._reader.close()
        self._writer.close()
        self._disarm()

    @property
    def seconds_left(self) -> float:
        """Seconds until the process ends; infinite before the first signal."""
        deadline = self._deadline
        return float("inf") if deadline is None else max(0.0, deadline - time.monotonic())

    def subscribe(
        self, subscriber: Callable[[signal.Signals], None], before_exit: Callable[[str], None] | None = None
    ) -> None:
        """Calls ``subscriber`` in the listener's thread at the first signal; at once if it has already come.

        Args:
            subscriber: Called with the signal.
            before_exit: Called with the reason, for at most 3 s, before the process ends without an orderly stop.
        """
        with self._lock:
            self._subscriber, self._before_exit = subscriber, before_exit
            received = self.received
        if received is not None:
            subscriber(received)

    def unsubscribe(self) -> None:
        """Drops the subscriber and restores the handlers of the script. The grace period continues."""
        with self._lock:
            self._subscriber = self._before_exit = None
        self.give_back()

    def await_another(self) -> None:
        """Makes the next signal count as the first, after other code has taken over the received one.

        The grace period has already begun.
        """
        with self._lock:
            self.received = None

    def start_grace_period(self) -> None:
        """Starts the grace period, also on a rank that stops because another rank got the signal."""
        with self._lock:
            if self._deadline is None:
                self._deadline = time.monotonic() + self.grace_period_s
                # Only C code can end a process whose main thread holds the interpreter lock.
                if sys.__stderr__ is not None:
                    with suppress(OSError, ValueError, RuntimeError, OverflowError):  # it may be closed
                        faulthandler.dump_traceback_later(
                            self.grace_period_s + EXITS_WITHIN_S, exit=True, file=sys.__stderr__
                        )
        self._wake()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """The Python handler, without which the interpreter writes no wake-up byte.

        Sends the signal to the listener again, because the wakeup descriptor may belong to other code.
        """
        with suppress(OSError):
            self._writer.send(bytes([signum | _FROM_PYTHON]))
        handler = self._scripts.get(signal.Signals(signum), self._previous.get(signal.Signals(signum)))
        if handler is None or not _is_of_the_script(handler):
            return
        if signum in self._calling:  # the script's handler calls the handler that it has replaced: this one
            return
        self._calling.add(signum)
        try:
            handler(signum, frame)
            self.returned.add(signum)
        except BaseException as error:
            if self._subscriber is None:
                raise
            self._raised.append(f"{signal.Signals(signum).name} has raised {error!r}")
            self._wake()
        finally:
            self._calling.discard(signum)

    def _is_own(self, handler: Any) -> bool:
        return getattr(handler, "__self__", None) is self

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline = None
            faulthandler.cancel_dump_traceback_later()

    def _wake(self) -> None:
        with suppress(OSError):
            self._writer.send(b"\0")

    def _listen(self) -> None:
        poll = select.poll()  # not select, which does not accept descriptors from 1024 on
        poll.register(self._reader, select.POLLIN)
        while not self._closing.is_set():
            try:
                self._listen_once(poll)
            except BaseException:  # without this thread no signal is noticed
                self._log_error()
                time.sleep(_PAUSE_AFTER_ERROR_S)

    def _log_error(self) -> None:
        if not self._has_logged_error:
            self._has_logged_error = True
            text = f"The signal listener continues after an internal error:\n{traceback.format_exc()}"
            _within(_LOGS_WITHIN_S, log.error, text)

    def _listen_once(self, poll: select.poll) -> None:
        deadline = self._deadline
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        poll.poll(None if seconds is None else min(seconds, _LONGEST_POLL_S) * 1000)
        if self._closing.is_set():
            return
        if (deadline := self._deadline) is not None and time.monotonic() >= deadline:
            self._exit(f"the grace period of {self.grace_period_s:g} s has run out")
        try:
            noted = self._reader.recv(4096)
        except BlockingIOError:
            return
        for byte in noted:
            number = byte & ~_FROM_PYTHON
            if byte & _FROM_PYTHON:
                if number in self._unanswered:  # the C handler has sent it before, perhaps long ago
                    self._unanswered.discard(number)
                    continue
            elif number:
                self._unanswered.add(number)
                if self._others_fd is not None:
                    self._others_fd.write(number)
            if number in self.signums:
                self._on_signal(signal.Signals(number))
        while self._raised:
            line = f"The script's handler of {self._raised.popleft()}; the fit first stops at its next boundary."
            _within(_LOGS_WITHIN_S, log.warning, line)

    def _on_signal(self, signum: signal.Signals) -> None:
        now = time.monotonic()
        with self._lock:
            is_first = self.received is None
            if is_first:
                self.received, self._first_at = signum, now
            subscriber = self._subscriber
        if not is_first:
            if now - self._first_at >= SECOND_SIGNAL_AFTER_S:
                self._exit(f"signal {int(signum)} was received a second time")
            return
        self.start_grace_period()
        if subscriber is not None:
            try:
                subscriber(signum)
            except BaseException:
                self._log_error()
        # NeMo's wording, for tools that watch its logs.
        _within(_LOGS_WITHIN_S, _write, signed(f"Received signal {int(signum)}, initiating graceful stop"))

    def _exit(self, reason: str) -> None:
        try:
            line = signed(f"Ending now: {reason}. The newest published checkpoint remains.")
            _within(_LOGS_WITHIN_S, _write, line)
            if (before_exit := self._before_exit) is not None:
                _within(LAST_WORDS_WITHIN_S, before_exit, reason)  # storage may not respond
            _within(_LOGS_WITHIN_S, _write, "")
        finally:
            os._exit(exit_code())

    def _leave_child_alone(self) -> None:
        """Resets a forked child, which inherits handlers and file descriptor: it must not act for its parent."""
        signal.set_wakeup_fd(-1)
        self._restore()

    def _restore(self) -> None:
        self.give_back()
        for signum, previous in self._previous.items():
            if self._is_own(signal.getsignal(signum)):
                signal.signal(signum, previous if previous is not None else signal.SIG_DFL)


@dataclass(frozen=True)
class _OthersDescriptor:
    """The wakeup descriptor of other code, such as an asyncio loop, which gets all signals too."""

    fd: int
    file: tuple[int, int]

    @classmethod
    def of(cls, fd: int) -> _OthersDescriptor | None:
        with suppress(OSError):
            status = os.fstat(fd)
            return cls(fd, (status.st_dev, status.st_ino))
        return None

    @property
    def is_open(self) -> bool:
        """Whether the descriptor still belongs to the same file."""
        return _OthersDescriptor.of(self.fd) == self

    def write(self, number: int) -> None:
        with suppress(OSError):
            if self.is_open:
                os.write(self.fd, bytes([number]))


def _is_of_the_script(handler: Any) -> bool:
    """Whether a handler is the user's: not Python's for SIGINT, nor Lightning's, which broadcasts inside of it."""
    if not callable(handler) or handler is signal.default_int_handler:
        return False
    return type(handler).__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")


def _write(line: str) -> None:
    if line:
        write_line(line)
    flush()


def _within(seconds: float, function: Callable[[str], None], argument: str) -> None:
    """Calls ``function`` in a thread and waits for at most ``seconds``: a pipe or storage may be stuck."""
    with suppress(Exception):  # also if no thread can be started
        in_daemon_thread(functools.partial(function, argument), "writes").result(seconds)


_installed: SignalListener | None = None


def install(
    signums: Collection[signal.Signals] = (signal.SIGTERM,), grace_period_s: float | None = None
) -> SignalListener | None:
    """Installs the listener of this process, or makes the installed one notice ``signums`` too.

    Args:
        signums: The signals to notice.
        grace_period_s: See :class:`SignalListener`; default: :func:`grace_period`.

    Returns:
        The listener; ``None`` outside of the main thread, where Python allows no signal handlers.
    """
    global _installed
    if threading.current_thread() is not threading.main_thread():
        return None
    if _installed is not None:
        _installed.add(signums)
        return _installed
    listener = SignalListener(signums, grace_period() if grace_period_s is None else grace_period_s)
    listener.start()
    _installed = listener
    return listener


def installed() -> SignalListener | None:
    """The listener of this process, if it is installed."""
    return _installed


def uninstall() -> None:
    """Stops the listener of this process, if it is installed."""
    global _installed
    if _installed is not None:
        listener, _installed = _installed, None
        listener.stop()


def _after_fork_in_child() -> None:
    global _installed
    if _installed is not None:
        _installed._leave_child_alone()
        _installed = None


def _at_fork(signums: Callable[[], Collection[signal.Signals]], in_child: Callable[[], None]) -> None:
    """Calls ``in_child`` in every forked child, with ``signums`` blocked until it has set its handlers."""
    masks: list[set[Any]] = []

    def before() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, signums()))

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def after_in_child() -> None:
        try:
            in_child()
        finally:
            after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


_at_fork(lambda: () if _installed is None else _installed.signums, _after_fork_in_child)


class WorkerGuard:
    """A ``worker_init_fn`` with which a data-loader worker neither ends before its trainer nor outlives it.

    A signal to the process group reaches workers too, and a worker that dies fails the step in progress. A worker whose
    trainer was killed can hang forever on a pipe that its siblings hold open, and such orphans fill the memory of the
    node.

    Args:
        inner: The loader's own ``worker_init_fn``.
        signums: The signals that the worker ignores until its trainer ends.
    """

    def __init__(self, inner: Callable[[int], None] | None, signums: Collection[signal.Signals]) -> None:
        self.inner = inner
        self.signums = tuple(signums)
        self.trainer_pid = os.getpid()
        self.trainer_ends = _trainer_ends()[1]
        # The kernel watches the thread that starts the worker, not the process.
        self._dies_with_trainer = threading.current_thread() is threading.main_thread()

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker, before the loader's own function."""
        if self._dies_with_trainer:
            _die_with(self.trainer_pid)
        if self.signums:
            _ignore_until(self.trainer_ends, self.signums)
        if self.inner is not None:
            self.inner(worker_id)


@functools.cache
def _trainer_ends() -> tuple[int, str]:
    """A byte that is set when the trainer ends: the descriptor of its file, and a path by which workers can read it."""
    Finalize(None, _end_workers, exitpriority=0)  # before multiprocessing waits for them
    if sys.platform != "linux":
        return -1, ""
    fd = os.memfd_create("trainer-ends")
    os.truncate(fd, 1)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


os.register_at_fork(after_in_child=_trainer_ends.cache_clear)  # a child is no worker of this trainer


def _end_workers() -> None:
    """Ends the remaining workers when the trainer's process ends.

    multiprocessing waits for them without a timeout: forever if a worker never returns to the interpreter to handle
    SIGTERM.
    """
    with suppress(OSError):
        os.pwrite(_trainer_ends()[0], b"\1", 0)
    workers = [process for process in multiprocessing.active_children() if process.daemon]
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + DATA_WORKERS_END_WITHIN_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()


def _ignore_until(trainer_ends: str, signums: Collection[signal.Signals]) -> None:
    """Ignores these signals in this process until its trainer ends.

    This is done by a handler, because child processes would inherit a mask or ``SIG_IGN``, and then a reader such as
    ffmpeg could not be terminated. The handler replaces torch's own, which ends the worker at once.
    """
    try:
        flag = os.open(trainer_ends, os.O_RDONLY)
    except OSError:  # then the trainer must kill this worker
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # all files may be closed
            if os.pread(flag, 1, 0) != b"\0":
                os._exit(0)

    def leave_child_alone() -> None:
        for signum in signums:
            if signal.getsignal(signum) is handle:
                signal.signal(signum, signal.SIG_DFL)

    for signum in signums:
        signal.signal(signum, handle)
        signal.siginterrupt(signum, False)  # C code of a data set may not expect EINTR
    _at_fork(lambda: signums, leave_child_alone)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with(trainer: int) -> None:
    """Makes the kernel kill this process when its parent ends, on Linux.

    The parent is the trainer, or the trainer's fork server, which ends with the trainer.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(trainer, 0)
    except ProcessLookupError:  # the trainer ended before the call
        os._exit(1)
