"""Signals that ask a run to stop, noticed at once, even while the main thread is blocked in a collective.

A Python signal handler runs only when the main thread comes back to the interpreter, which a thread blocked in a
collective does not do. The interpreter's C handler, however, writes the signal's number to a file descriptor at once
(``signal.set_wakeup_fd``). A listener thread reads it there: the handler itself does no work, takes no lock and touches
no file.

Imports neither torch nor Lightning: ``lightning-resilience launch`` installs this before the script's first import. A
signal that arrives before anyone listens is kept and delivered to the first subscriber.
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
"""Environment variable in which a launcher that knows the real limit tells it to the workers."""

_TERMINALS = (signal.SIGHUP, signal.SIGINT)
_FROM_PYTHON = 0x80  # in a byte of the listener's socket: noted by the handler in Python; signals end at 64
_PAUSE_AFTER_ERROR_S = 0.1
_LONGEST_POLL_S = 3600.0
_SPEAKS_WITHIN_S = 0.5


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
    """The exit code of an interrupted process: 75, or 0 for a worker, whose launcher would restart anything else."""
    is_worker = "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("LOCAL_RANK", "0")) != 0
    return exit_codes.FINISHED if is_worker else exit_codes.INTERRUPTED


def grace_period(requested: float = DEFAULT_GRACE_PERIOD_S) -> float:
    """The seconds between a signal and the end of the process: ``requested`` (0: no limit), or a launcher's fewer."""
    requested = requested or math.inf
    try:
        return min(requested, float(os.environ[GRACE_PERIOD_VARIABLE]))
    except (KeyError, ValueError):
        return requested


class SignalListener:
    """Notices signals in a thread of its own and ends the process when its time is up.

    The process ends at once, by ``os._exit``, when the grace period after the first signal has run out or when a second
    signal arrives (see :data:`~.deadlines.SECOND_SIGNAL_AFTER_S`). Whoever subscribes is told about the first
    signal only.

    A handler that the script has set itself is called too, as Python calls it, and put back at the end. What it raises
    does not end the training in the middle of a step: the run stops at its next boundary in any case.

    Args:
        signums: The signals to notice.
        grace_period_s: Seconds from the first signal to the end of the process.
    """

    def __init__(self, signums: Collection[signal.Signals], grace_period_s: float) -> None:
        self.signums = tuple(signums)
        self.grace_period_s = grace_period_s
        self.received: signal.Signals | None = None
        self.returned: set[int] = set()
        """The signals whose own handler has been called and has returned."""
        self._subscriber: Callable[[signal.Signals], None] | None = None
        self._before_exit: Callable[[str], None] | None = None
        self._deadline: float | None = None
        self._first_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self._scripts: dict[signal.Signals, Any] = {}  # handlers that have been set over this listener's
        self._calling: set[int] = set()
        self._held_back: deque[str] = deque()  # what they have raised; a handler must not write
        self._unanswered: set[int] = set()  # written by the interpreter's C handler; Python's has not been called yet
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._others_fd: _OthersDescriptor | None = None
        self._closing = threading.Event()
        self._has_stumbled = False
        self._thread = threading.Thread(target=self._listen, name="resilience-signals", daemon=True)

    def start(self) -> None:
        """Installs the handlers. Only the main thread may do this."""
        self.add(self.signums)
        self._thread.start()

    def add(self, signums: Collection[signal.Signals]) -> None:
        """Notices ``signums`` too. Only the main thread may do this.

        What a terminal sends is left alone where whoever started this process has it ignored, as ``nohup`` does.
        """
        for signum in signums:
            if signum in _TERMINALS and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            if signum not in self._previous:
                self._previous[signum] = signal.signal(signum, self._note)
        self.signums = tuple(self._previous)
        self.take_over()

    def take_over(self) -> None:
        """Handles the signals that the script has set handlers for since, which are called from here then."""
        for signum in self.signums:
            current = signal.getsignal(signum)
            if not self._is_own(current):
                if current not in (None, signal.SIG_DFL):
                    self._scripts[signum] = current
                signal.signal(signum, self._note)
        self.listen_again()

    def handle(self) -> None:
        """Puts the handlers back in place after something else (Lightning, at the start of a fit) has replaced them."""
        for signum in self.signums:
            signal.signal(signum, self._note)
        self.listen_again()

    def listen_again(self) -> None:
        """Takes the wakeup descriptor back: whoever closes an asyncio loop that had a signal handler has removed it.

        Without it a signal is noticed only when the main thread comes back to the interpreter. Does nothing in others.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        current = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if current != self._writer.fileno():
            self._others_fd = _OthersDescriptor.of(current)

    def give_back(self) -> None:
        """Puts the script's own handlers back, where it has set any."""
        for signum, handler in self._scripts.items():
            if self._is_own(signal.getsignal(signum)):
                signal.signal(signum, handler)
        self._scripts.clear()

    def stop(self) -> None:
        """Restores what was there before; a signal that was received has then been dealt with."""
        self._restore()
        others = self._others_fd
        current = signal.set_wakeup_fd(others.fd if others is not None and others.is_open else -1)
        if current != self._writer.fileno():
            signal.set_wakeup_fd(current)  # somebody else has taken it over since: leave theirs
        self._closing.set()
        self._wake()
        self._thread.join()
        self._reader.close()
        self._writer.close()
        self._disarm()

    @property
    def seconds_left(self) -> float:
        """Until the process ends; infinite before the first signal."""
        deadline = self._deadline
        return float("inf") if deadline is None else max(0.0, deadline - time.monotonic())

    def subscribe(
        self, subscriber: Callable[[signal.Signals], None], before_exit: Callable[[str], None] | None = None
    ) -> None:
        """Has ``subscriber`` called from the listener's thread at the first signal; at once if that has come already.

        Args:
            subscriber: Told which signal it was.
            before_exit: Called with the reason when the process ends without having been able to stop in order. It gets
                a few seconds.
        """
        with self._lock:
            self._subscriber, self._before_exit = subscriber, before_exit
            received = self.received
        if received is not None:
            subscriber(received)

    def unsubscribe(self) -> None:
        """Drops the subscriber and gives back the script's own handlers. The grace period goes on."""
        with self._lock:
            self._subscriber = self._before_exit = None
        self.give_back()

    def start_grace_period(self) -> None:
        """Starts the grace period on a rank that got no signal itself but stops because a peer did."""
        with self._lock:
            if self._deadline is None:
                self._deadline = time.monotonic() + self.grace_period_s
                # Only C code ends a process whose main thread holds the interpreter lock; it comes second.
                if sys.__stderr__ is not None:
                    with suppress(OSError, ValueError, RuntimeError, OverflowError):  # it may be closed
                        faulthandler.dump_traceback_later(
                            self.grace_period_s + EXITS_WITHIN_S, exit=True, file=sys.__stderr__
                        )
        self._wake()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """A handler must exist for the interpreter to write the wake-up byte; the listener does the work.

        It is told once more from here: the wakeup descriptor may be somebody else's now, or nobody's.
        """
        with suppress(OSError):
            self._writer.send(bytes([signum | _FROM_PYTHON]))
        handler = self._scripts.get(signal.Signals(signum), self._previous.get(signal.Signals(signum)))
        if handler is None or not _is_of_the_script(handler):
            return
        if signum in self._calling:  # it calls what it has replaced, which is this
            return
        self._calling.add(signum)
        try:
            handler(signum, frame)
            self.returned.add(signum)
        except BaseException as error:
            if self._subscriber is None:
                raise
            self._held_back.append(f"{signal.Signals(signum).name} has raised {error!r}")
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
        poll = select.poll()  # not select, which takes no descriptor from 1024 on
        poll.register(self._reader, select.POLLIN)
        while not self._closing.is_set():
            try:
                self._listen_once(poll)
            except BaseException:  # whatever it is: without this thread the process would be deaf
                self._say_error()
                time.sleep(_PAUSE_AFTER_ERROR_S)

    def _say_error(self) -> None:
        if not self._has_stumbled:
            self._has_stumbled = True
            text = f"The listener for signals goes on after an error of its own:\n{traceback.format_exc()}"
            _within(_SPEAKS_WITHIN_S, log.error, text)

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
                if number in self._unanswered:  # Python's handler comes second, and perhaps long after C's
                    self._unanswered.discard(number)
                    continue
            elif number:
                self._unanswered.add(number)
                if self._others_fd is not None:
                    self._others_fd.write(number)
            if number in self.signums:
                self._on_signal(signal.Signals(number))
        while self._held_back:
            line = f"The script's own handler of {self._held_back.popleft()}: the fit stops at its next boundary first."
            _within(_SPEAKS_WITHIN_S, log.warning, line)

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
                self._say_error()
        # NeMo's words, so that what watches its logs keeps working.
        _within(_SPEAKS_WITHIN_S, _say, signed(f"Received signal {int(signum)}, initiating graceful stop"))

    def _exit(self, reason: str) -> None:
        try:
            line = signed(f"Ending now: {reason}. The newest published checkpoint stands.")
            _within(_SPEAKS_WITHIN_S, _say, line)
            if (before_exit := self._before_exit) is not None:
                _within(LAST_WORDS_WITHIN_S, before_exit, reason)  # it writes to storage, which may not answer
            _within(_SPEAKS_WITHIN_S, _say, "")
        finally:
            os._exit(exit_code())

    def _leave_child_alone(self) -> None:
        """In a forked child: it inherits handlers and file descriptor, and would speak in its parent's name."""
        signal.set_wakeup_fd(-1)
        self._restore()

    def _restore(self) -> None:
        self.give_back()
        for signum, previous in self._previous.items():
            if self._is_own(signal.getsignal(signum)):
                signal.signal(signum, previous if previous is not None else signal.SIG_DFL)


@dataclass(frozen=True)
class _OthersDescriptor:
    """The wakeup descriptor of somebody else, such as an asyncio loop, which is told what this listener is told."""

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
        """Whether it still is what it was: a number is given to another file when the one before is closed."""
        return _OthersDescriptor.of(self.fd) == self

    def write(self, number: int) -> None:
        with suppress(OSError):
            if self.is_open:
                os.write(self.fd, bytes([number]))


def _is_of_the_script(handler: Any) -> bool:
    """Whether a handler is a user's: not Python's for SIGINT, nor Lightning's, which broadcasts from inside of it."""
    if not callable(handler) or handler is signal.default_int_handler:
        return False
    return type(handler).__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")


def _say(line: str) -> None:
    if line:
        write_line(line)
    flush()


def _within(seconds: float, function: Callable[[str], None], argument: str) -> None:
    """Calls ``function`` in a thread of its own and waits no longer than that: a pipe or a storage may be stuck."""

    def call() -> None:
        with suppress(Exception):
            function(argument)

    thread = threading.Thread(target=call, daemon=True)
    with suppress(RuntimeError):  # no thread can be started
        thread.start()
        thread.join(seconds)


_installed: SignalListener | None = None


def install(
    signums: Collection[signal.Signals] = (signal.SIGTERM,), grace_period_s: float | None = None
) -> SignalListener | None:
    """Installs the process's one listener, or has the one that is installed notice ``signums`` too.

    Args:
        signums: The signals to notice.
        grace_period_s: See :class:`SignalListener`; default: :func:`grace_period`.

    Returns:
        The listener, or ``None`` in any thread but the main one, where Python allows no signal handling.
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
    """The process's listener, if there is one."""
    return _installed


def uninstall() -> None:
    """Removes the process's listener, if there is one, and restores what was there before."""
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
    """Has ``in_child`` called in every forked child; signals wait for that, and find the handlers that it has set."""
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
    """A ``worker_init_fn`` that ties a data-loader worker to its trainer: it neither ends before it nor outlives it.

    A signal to the whole process group reaches the workers too; one that dies of it fails the step in progress. And a
    worker whose trainer was killed can hang for ever, blocked on a pipe that its siblings hold open: after a few
    restarts such orphans fill the memory of the node.

    Args:
        inner: The loader's own ``worker_init_fn``.
        signums: The signals that it ignores until its trainer ends.
    """

    def __init__(self, inner: Callable[[int], None] | None, signums: Collection[signal.Signals]) -> None:
        self.inner = inner
        self.signums = tuple(signums)
        self.trainer_pid = os.getpid()
        self.trainer_ends = _trainer_ends().path
        Finalize(None, _end_workers, exitpriority=0)  # before multiprocessing waits for them

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker, before the loader's own function."""
        _die_with(self.trainer_pid)
        if self.signums:
            _ignore_until(self.trainer_ends, self.signums)
        if self.inner is not None:
            self.inner(worker_id)


class _TrainerEnds:
    """Whether the trainer's process ends: a byte that its workers can read, however they were started."""

    def __init__(self) -> None:
        self._fd, self.path = -1, ""
        if sys.platform == "linux":
            self._fd = os.memfd_create("trainer-ends")
            os.truncate(self._fd, 1)
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def set(self) -> None:
        with suppress(OSError):
            os.pwrite(self._fd, b"\1", 0)


@functools.cache
def _trainer_ends() -> _TrainerEnds:
    return _TrainerEnds()


os.register_at_fork(after_in_child=_trainer_ends.cache_clear)  # which is a trainer itself, if it is any


def _end_workers() -> None:
    """Ends the workers that are left when the trainer's process ends.

    torch has asked them to by SIGTERM, and multiprocessing waits for them without a limit: for ever if one is stuck in
    code that never comes back to the interpreter.
    """
    _trainer_ends().set()
    workers = [process for process in multiprocessing.active_children() if process.daemon]
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + DATA_WORKERS_END_WITHIN_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()


def _ignore_until(trainer_ends: str, signums: Collection[signal.Signals]) -> None:
    """Has these signals do nothing in this process until its trainer ends, and end it then.

    By a handler, which what this process starts does not inherit, as it would a mask or signals that are ignored: a
    reader such as ffmpeg could not be terminated. torch's own handler, in place by now, ends the worker in any case.
    """
    try:
        flag = os.open(trainer_ends, os.O_RDONLY)
    except OSError:  # it would have to be killed
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # somebody has closed all files
            if os.pread(flag, 1, 0) != b"\0":
                os._exit(0)

    def leave_child_alone() -> None:
        for signum in signums:
            if signal.getsignal(signum) is handle:
                signal.signal(signum, signal.SIG_DFL)

    for signum in signums:
        signal.signal(signum, handle)
        signal.siginterrupt(signum, False)  # C code of a data set need not know of system calls that are interrupted
    _at_fork(lambda: signums, leave_child_alone)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with(trainer: int) -> None:
    """Has the kernel kill this process when its parent ends; only Linux knows how.

    The parent is the trainer, or its fork server, which ends with it.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(trainer, 0)
    except ProcessLookupError:  # it ended before that
        os._exit(1)
