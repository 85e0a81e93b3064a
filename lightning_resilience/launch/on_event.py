"""``--on-event CMD``: runs a user's command for each important event, without stopping or delaying the run.

The commands run one at a time, each in a session of its own, with a time limit; all processes in this session end with
the command. If too many events wait, the oldest is dropped.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lightning_resilience._formatting import shortened
from lightning_resilience._output import log_line
from lightning_resilience.launch.json_output import without_nan
from lightning_resilience.launch.notices import LAST

LIMIT_S = 30.0
"""How long a command may take."""

OTHERS_END_WITHIN_S = 5.0
"""How long the commands before the last one may take once the run has ended."""

HURRIED_LIMIT_S = 4.0
"""How long the last command may take if a signal has ended the run: the job may be killed soon."""

HURRIED_OTHERS_END_WITHIN_S = 1.0
"""How long the commands before it may take in that case."""

_MAX_WAITING = 20
_SHOWN = 200  # characters of output
_READ = 4096
_POLL_S = 0.1
_KILLED_WITHIN_S = 1.0  # otherwise it is stuck in the kernel


def checked_command(text: str) -> tuple[str, ...]:
    """Splits a command into words, and checks that its program exists.

    Args:
        text: As a shell splits it; no shell runs it.

    Raises:
        ValueError: If there is no such program.
    """
    words = shlex.split(text)
    if not words:
        raise ValueError("it is empty")
    if shutil.which(words[0]) is None:
        hint = f"; for the one in this folder give ./{words[0]}" if os.access(words[0], os.X_OK) else ""
        raise ValueError(f"there is no program {words[0]} that can be run{hint}")
    return tuple(words)


class EventCommand:
    """Runs a command for each of the objects that it is given, in a thread of its own.

    Args:
        words: The command.
        limit_s: How long it may take.
        log: Called with each log line.
    """

    def __init__(self, words: Sequence[str], limit_s: float = LIMIT_S, log: Callable[[str], None] = log_line) -> None:
        self._words = list(words)
        self._limit_s = limit_s
        self._log = log
        self._waiting: deque[dict[str, Any]] = deque()
        self._dropped = 0
        self._ending: tuple[float, float] | None = None  # deadline of earlier commands, and time limit of the last one
        self._changed = threading.Condition()
        self._said: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="on-event", daemon=True)
        self._thread.start()

    def put(self, content: dict[str, Any]) -> None:
        """Runs the command with this object on its standard input, as soon as the commands before have ended.

        Args:
            content: The object, JSON-serializable.
        """
        with self._changed:
            self._waiting.append(content)
            if len(self._waiting) > _MAX_WAITING:
                self._drop()
            self._changed.notify()

    def end(
        self, in_hurry: Callable[[], object] = lambda: False, must_go: Callable[[], object] = lambda: False
    ) -> None:
        """Waits for the remaining commands, within limits.

        Args:
            in_hurry: Whether a signal has ended the run, which shortens the limits; it may come during the wait.
            must_go: Whether to stop waiting.
        """
        is_hurried = bool(in_hurry())
        deadline = self._begin_to_end(is_hurried)
        while self._thread.is_alive() and time.monotonic() < deadline and not must_go():
            if not is_hurried and in_hurry():
                is_hurried, deadline = True, self._begin_to_end(True)
            self._thread.join(_POLL_S)
        if self._process is not None and self._process.returncode is None and self._thread.is_alive():
            _kill(self._process)
        if self._dropped:
            self._log(f"--on-event: the command was too slow; events dropped: {self._dropped}.")

    def _begin_to_end(self, is_hurried: bool) -> float:
        """Sets the limits for the end, and returns the deadline."""
        others_s = HURRIED_OTHERS_END_WITHIN_S if is_hurried else OTHERS_END_WITHIN_S
        last_s = min(self._limit_s, HURRIED_LIMIT_S) if is_hurried else self._limit_s
        now = time.monotonic()
        with self._changed:
            self._ending = now + others_s, last_s
            self._changed.notify()
        return now + others_s + last_s + _KILLED_WITHIN_S

    def _drop(self) -> None:
        self._waiting.popleft()
        self._dropped += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._ending is not None:
                        return
                    self._changed.wait()
                if self._ending is not None and time.monotonic() > self._ending[0]:
                    while len(self._waiting) > 1:
                        self._drop()
                content = self._waiting.popleft()
            try:
                self._call({**content, "dropped": self._dropped})
            except Exception as error:  # it continues with the next one
                self._say_once(f"--on-event: the command could not be run ({error})")

    def _is_late(self, began: float, event: str) -> bool:
        now, ending = time.monotonic(), self._ending
        if ending is not None and event == LAST:
            return now > began + ending[1]
        return now > began + self._limit_s or (ending is not None and now > ending[0])

    def _call(self, content: dict[str, Any]) -> None:
        began, said = time.monotonic(), b""
        self._process = process = subprocess.Popen(
            self._words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        left = memoryview(json.dumps(without_nan(content), default=str).encode() + b"\n")
        stdin, stdout = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(stdin, False)
        os.set_blocking(stdout, False)
        is_late = False
        # The process is not reaped yet, so its number, which is that of its process group, is not given to another one.
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and not is_late:
            poll = select.poll()
            poll.register(stdout, select.POLLIN)
            if left:
                poll.register(stdin, select.POLLOUT)
            ready = dict(poll.poll(_POLL_S * 1000))
            if stdin in ready:
                left = _write(stdin, left)
                if not left:
                    process.stdin.close()
            if stdout in ready and not (more := _read(stdout)):
                time.sleep(_POLL_S / 10)  # it has closed its output, and usually ends soon
            elif stdout in ready:
                said = (said + more)[:_READ]
            is_late = self._is_late(began, content["event"])
        said = (said + _read(stdout))[:_READ]
        _kill(process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_WITHIN_S)
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        self._report(content["event"], process.returncode, said, is_late)

    def _report(self, event: str, exit_code: int | None, said: bytes, is_late: bool) -> None:
        text = shortened(said.decode(errors="replace"), _SHOWN)
        if is_late:
            self._say_once("--on-event: the command has exceeded its time and was killed", event, text)
        elif exit_code:
            self._say_once(f"--on-event: the command has failed with exit code {exit_code}", event, text)
        elif text:
            self._log(f"--on-event {event}: {text}")

    def _say_once(self, what: str, event: str = "", text: str = "") -> None:
        if what not in self._said:
            self._said.add(what)
            self._log(f"{what}{event and f', at {event}'}{text and f': {text}'}. This is not logged again.")


def _write(fd: int, data: memoryview) -> memoryview:
    """Writes what the command accepts now, and returns the rest; the rest is empty if the command reads no more."""
    try:
        return data[os.write(fd, data) :]
    except BlockingIOError:
        return data
    except OSError:
        return data[len(data) :]


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _READ)
    except OSError:
        return b""


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
