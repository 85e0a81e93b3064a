"""Signals that ask a run to stop, noticed at once, even while the main thread is blocked in a collective.

A Python signal handler runs only when the main thread comes back to the interpreter, which a thread blocked in a
collective does not do. The interpreter's C handler, however, writes the signal's number to a file descriptor at once
(``signal.set_wakeup_fd``). A listener thread reads it there: no handler does any work, takes a lock or touches a file.

Imports neither torch nor Lightning: ``lightning-resilience launch`` installs this before the script's first import. A
signal that arrives before anyone listens is kept and delivered to the first subscriber.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

SECOND_SIGNAL_AFTER_S = 2.0
"""A repetition within this time is the same request delivered twice: under Slurm both the scheduler and the launcher
send SIGTERM to a worker. A later one means "now"."""

GRACE_PERIOD_VARIABLE = "LIGHTNING_RESILIENCE_GRACE_PERIOD_S"
"""Environment variable in which a launcher that knows the real limit tells it to the workers."""

_WORKERS_END_WITHIN_S = 5.0  # torch's own patience with a worker that has nothing left to do

DEFAULT_GRACE_PERIOD_S = 600.0
"""KempnerForge's shutdown deadline."""

EXIT_INTERRUPTED = 75
"""``EX_TEMPFAIL`` of sysexits.h: interrupted, run me again."""


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
    return 0 if is_worker else EXIT_INTERRUPTED


def grace_period(requested: float = DEFAULT_GRACE_PERIOD_S) -> float:
    """The seconds between a signal and the end of the process: ``requested``, or less where a launcher knows better."""
    try:
        return min(requested, float(os.environ[GRACE_PERIOD_VARIABLE]))
    except (KeyError, ValueError):
        return requested


class SignalListener:
    """Notices signals in a thread of its own and ends the process when its time is up.

    The process ends at once, by ``os._exit``, when the grace period after the first signal has run out or when a second
    signal arrives (see :data:`SECOND_SIGNAL_AFTER_S`). Whoever subscribes is told about the first signal only.

    Args:
        signums: The signals to notice.
        grace_period_s: Seconds from the first signal to the end of the process.
    """

    def __init__(self, signums: Collection[signal.Signals], grace_period_s: float) -> None:
        self.signums = tuple(signums)
        self.grace_period_s = grace_period_s
        self.received: signal.Signals | None = None
        self._subscriber: Callable[[signal.Signals], None] | None = None
        self._before_exit: Callable[[str], None] | None = None
        self._deadline: float | None = None
        self._first_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._previous_fd = -1
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="resilience-signals", daemon=True)

    def start(self) -> None:
        """Installs the handlers. Only the main thread may do this."""
        self.add(self.signums)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def add(self, signums: Collection[signal.Signals]) -> None:
        """Notices ``signums`` too. Only the main thread may do this."""
        for signum in signums:
            if signum not in self._previous:
                self._previous[signum] = signal.signal(signum, self._ignore)
        self.signums = tuple(self._previous)

    def handle(self) -> None:
        """Puts the handlers back in place after something else (Lightning, at the start of a fit) has replaced them."""
        for signum in self.signums:
            signal.signal(signum, self._ignore)

    def stop(self) -> None:
        """Restores what was there before; a signal that was received has then been dealt with."""
        for signum, previous in self._previous.items():
            self._give_back(signum, previous)
        if (current := signal.set_wakeup_fd(self._previous_fd)) != self._writer.fileno():
            signal.set_wakeup_fd(current)  # somebody else has taken it over since: leave theirs
        self._closing.set()
        self._wake()
        self._thread.join()
        self._reader.close()
        self._writer.close()
        self._disarm()

    @property
    def previous_handlers(self) -> dict[signal.Signals, Any]:
        """What handled each signal before this listener."""
        return dict(self._previous)

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
                little time and must not block.
        """
        with self._lock:
            self._subscriber, self._before_exit = subscriber, before_exit
            received = self.received
        if received is not None:
            subscriber(received)

    def unsubscribe(self) -> None:
        """Drops the subscriber. The grace period goes on."""
        with self._lock:
            self._subscriber = self._before_exit = None

    def start_grace_period(self) -> None:
        """Starts the grace period on a rank that got no signal itself but stops because a peer did."""
        with self._lock:
            if self._deadline is None:
                self._deadline = time.monotonic() + self.grace_period_s
                # Only C code ends a process whose main thread holds the interpreter lock; it comes second.
                if sys.__stderr__ is not None:
                    faulthandler.dump_traceback_later(self.grace_period_s + 5.0, exit=True, file=sys.__stderr__)
        self._wake()

    def _ignore(self, signum: int, frame: FrameType | None) -> None:
        """A handler must exist for the interpreter to write the wake-up byte; the listener does the work."""

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline = None
            faulthandler.cancel_dump_traceback_later()

    def _wake(self) -> None:
        try:
            self._writer.send(b"\0")
        except OSError:
            pass

    def _listen(self) -> None:
        while not self._closing.is_set():
            deadline = self._deadline
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._reader], [], [], timeout)
            if self._closing.is_set():
                return
            if not ready and deadline is not None and time.monotonic() >= deadline:
                self._exit(f"the grace period of {self.grace_period_s:g} s has run out")
            if ready:
                for number in self._reader.recv(4096):
                    if number in self.signums:
                        self._on_signal(signal.Signals(number))
                    elif number and self._previous_fd >= 0:
                        os.write(self._previous_fd, bytes([number]))

    def _on_signal(self, signum: signal.Signals) -> None:
        now = time.monotonic()
        with self._lock:
            if self.received is not None:
                if now - self._first_at >= SECOND_SIGNAL_AFTER_S:
                    self._exit(f"signal {int(signum)} was received a second time")
                return
            self.received, self._first_at = signum, now
            subscriber = self._subscriber
        # NeMo's words, so that what watches its logs keeps working.
        print(f"Received signal {int(signum)}, initiating graceful stop", file=sys.stderr, flush=True)
        self.start_grace_period()
        if subscriber is not None:
            try:
                subscriber(signum)
            except Exception:
                log.exception("The request to stop could not be passed on; the grace period goes on.")

    def _exit(self, reason: str) -> None:
        print(f"[lightning-resilience] Ending now: {reason}. The newest published checkpoint stands.", file=sys.stderr)
        try:
            if self._before_exit is not None:
                self._before_exit(reason)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(exit_code())

    def _leave_child_alone(self) -> None:
        """In a forked child: it inherits handlers and file descriptor, and would speak in its parent's name."""
        signal.set_wakeup_fd(-1)
        for signum, previous in self._previous.items():
            self._give_back(signum, previous)

    def _give_back(self, signum: signal.Signals, previous: Any) -> None:
        if getattr(signal.getsignal(signum), "__self__", None) is self:
            signal.signal(signum, previous if previous is not None else signal.SIG_DFL)


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


os.register_at_fork(after_in_child=_after_fork_in_child)


class WorkerGuard:
    """A ``worker_init_fn`` that ties a data-loader worker to its trainer: it neither ends before it nor outlives it.

    A signal to the whole process group reaches the workers too; one that dies of it fails the step in progress. And a
    worker whose trainer was killed can hang for ever, blocked on a pipe that its siblings hold open: after a few
    restarts such orphans fill the memory of the node.

    Args:
        inner: The loader's own ``worker_init_fn``.
        signums: The signals that it ignores from anyone but its trainer.
    """

    def __init__(self, inner: Callable[[int], None] | None, signums: Collection[signal.Signals]) -> None:
        self.inner = inner
        self.signums = tuple(signums)
        self.trainer_pid = os.getpid()
        Finalize(None, _end_workers, exitpriority=0)  # before multiprocessing waits for them

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker, before the loader's own function."""
        _die_with(self.trainer_pid)
        if self.signums:
            _obey_only(self.trainer_pid, self.signums)
        if self.inner is not None:
            self.inner(worker_id)


def _end_workers() -> None:
    """Ends the workers that are left when the trainer's process ends.

    torch has asked them to by SIGTERM, and multiprocessing waits for them without a limit: for ever if one is stuck in
    code that holds the interpreter lock, which it needs to learn who has sent the signal.
    """
    workers = [process for process in multiprocessing.active_children() if process.daemon]
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + _WORKERS_END_WITHIN_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()


def _obey_only(trainer: int, signums: Collection[signal.Signals]) -> None:
    """Has these signals end this process if they come from its trainer, and do nothing if they come from elsewhere.

    The trainer ends its workers by SIGTERM when it exits, and waits for them. A handler is not told who sent a signal,
    and torch's own, in place by now, ends the worker in any case.
    """
    if not hasattr(signal, "sigwaitinfo"):  # macOS
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, signums)

    def wait() -> None:
        while True:
            if signal.sigwaitinfo(signums).si_pid == trainer:
                os._exit(0)

    threading.Thread(target=wait, name="resilience-worker-signals", daemon=True).start()


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
