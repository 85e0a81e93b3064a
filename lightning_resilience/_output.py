"""Output that continues without its reader: with a closed terminal, a pipe without a reader, or a full disk.

A write to one of these raises wherever somebody happens to print: in a progress bar, and the training ends for it. Here
no write raises (:func:`guard_streams`). What cannot be shown is kept in a file of the run directory
(:class:`KeptOutput`). What workers of the launcher write is shown by a process of its own
(:mod:`~lightning_resilience.launch.relay`), so that no terminal is theirs to lose.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from lightning_resilience._formatting import timestamp

NAME = "[lightning-resilience]"

QUIET_VARIABLE = "LIGHTNING_RESILIENCE_QUIET"
"""Environment variable by which ``launch --quiet`` tells the workers to log warnings and errors only."""

_OURS = re.compile(rb"\[lightning-resilience[ \]]")
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # no reader comes back to these; a full disk may have room again
_TAKES_WITHIN_S = 5.0  # a terminal that is held (Ctrl-S), or a reader that pauses
_ENDS_WITHIN_S = 10.0
_CHUNK = 4096  # a pipe that has room takes this much without blocking (PIPE_BUF)
_LONGEST_LINE = 1 << 20


class KeptOutput:
    """A file for what could not be shown: whole lines, and of a line that was drawn again and again the last state.

    Args:
        path: The file; it is made when there is something to keep.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rest = b""
        self._lock = threading.RLock()  # the garbage collector may end it in the middle of a line

    def write(self, data: bytes) -> None:
        """Keeps ``data``; what no disk takes is lost."""
        with self._lock:
            lines, self._rest = whole_lines(self._rest + data)
            self._append(lines)

    def close(self) -> None:
        """Keeps the last line, too, which nothing has ended."""
        with self._lock:
            rest, self._rest = self._rest.rstrip(b"\r"), b""
            if rest.strip():
                self._append([rest])

    def _append(self, lines: list[bytes]) -> None:
        if lines:
            with suppress(OSError), open(self.path, "ab") as file:
                file.write(b"\n".join(lines) + b"\n")


def whole_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """The lines in ``data``, and the one that has not ended: of a line that was drawn again and again its last state.

    Args:
        data: From the beginning of a line on.
    """
    *lines, rest = data.split(b"\n")
    states = rest.rstrip(b"\r")
    goes_back = b"\r" if states != rest else b""  # what comes next is drawn over it
    rest = states.rpartition(b"\r")[2][-_LONGEST_LINE:] + goes_back
    return [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines], rest


class Line:
    """The line that is being written.

    Attributes:
        is_open: Whether anything stands in it.
        is_bar: Whether it is a progress bar: one that is drawn again from its beginning.
    """

    def __init__(self) -> None:
        self.is_open = self.is_bar = False

    def see(self, data: bytes) -> None:
        """Notes what is written as it is."""
        _, newline, last = data.rpartition(b"\n")
        if newline:
            self.is_open = self.is_bar = False
        if last.strip(b"\r"):
            self.is_open = True
            self.is_bar = self.is_bar or b"\r" in last

    def apart(self, data: bytes) -> bytes:
        """``data``, with a new line before each line of ours that would stand behind a progress bar."""
        pieces = []
        begin = 0
        for found in _OURS.finditer(data):
            self.see(data[begin : found.start()])
            pieces.append(data[begin : found.start()])
            if self.is_bar:
                pieces.append(b"\n")
                self.is_open = self.is_bar = False
            begin = found.start()
        self.see(data[begin:])
        return b"".join([*pieces, data[begin:]])


_speaker: str | None = None


def introduce(speaker: str) -> None:
    """Several processes speak here, and none of them by mistake for this one.

    Args:
        speaker: Who this is; default: a rank.
    """
    global _speaker
    _speaker = speaker


def signed(text: str, at: float | None = None, level: str = "") -> str:
    """A line of ours. Where several processes speak, it says when it was and whose it is.

    Args:
        text: What it says.
        at: When, in seconds since the epoch; default: now.
        level: How grave it is, if it is more than information.
    """
    if _speaker is None and os.environ.get("WORLD_SIZE", "1") == "1":
        return f"{NAME} {text}"
    # LOCAL_RANK: Lightning's own launcher.
    who = _speaker or "rank " + os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    return f"{NAME[:-1]} {timestamp(time.time() if at is None else at)[11:]} {who}{level and f' {level}'}] {text}"


class Formatter(logging.Formatter):
    """Our lines, as the ``logging`` module wants it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line.

        Args:
            record: What is said.
        """
        level = record.levelname if record.levelno > logging.INFO else ""
        return signed(super().format(record), record.created, level)


_other_way: Callable[[str], bool] | None = None


def send_lines(way: Callable[[str], bool] | None) -> None:
    """Has :func:`write_line` hand over what it writes.

    Args:
        way: Takes a line, and returns whether it has; ``None``: to stderr again.
    """
    global _other_way
    _other_way = way


def write_line(text: str) -> None:
    """Writes a line to stderr; never raises.

    Args:
        text: Without its end.
    """
    if _other_way is not None and _other_way(text):
        return
    stream = sys.stderr
    if stream is None:
        return
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):
        _forget(stream)


def is_quiet() -> bool:
    """Whether ``launch --quiet`` has started this process, or is it."""
    return bool(os.environ.get(QUIET_VARIABLE))


def log_line(line: str, is_detail: bool = False) -> None:
    """One readable line of ours; never raises: nobody may be there to read it.

    Args:
        line: Without our name.
        is_detail: Whether ``--quiet`` leaves it out.
    """
    if not (is_detail and is_quiet()):
        write_line(signed(line))


def flush() -> None:
    """Writes out what stdout and stderr have buffered; never raises."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            _forget(stream)


class _Unguarded(NamedTuple):
    fd: int
    flush: Callable[[], None]

    def fileno(self) -> int:
        return self.fd


def _forget(stream: TextIO | _Unguarded, for_good: bool = False) -> None:
    """Empties a stream's buffer into nowhere: it would fail every later write, and at its end the process's exit code.

    Args:
        stream: The stream.
        for_good: Whether what comes later goes there as well, also that of C code.
    """
    with suppress(OSError, ValueError):  # also of what is no file
        fd = stream.fileno()
        saved, nowhere = os.dup(fd), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, fd)
            stream.flush()
        finally:
            if not for_good:
                os.dup2(saved, fd)
            os.close(saved)
            os.close(nowhere)


def file_of(fd: int) -> tuple[int, int] | None:
    """What is open under a number, if anything.

    Args:
        fd: The number.
    """
    with suppress(OSError):
        status = os.fstat(fd)
        return status.st_dev, status.st_ino
    return None


# -- a process that trains ---------------------------------------------------------------------------------------------


class _GuardedStream:
    """stdout or stderr, whose ``write`` and ``flush`` do not raise. In place: loggers and progress bars hold it."""

    def __init__(self, stream: Any, line: Line, kept: KeptOutput, others_draw: bool) -> None:
        self._stream = stream
        self._line = line
        self._kept = kept
        self._is_gone = False
        self._before = {name: vars(stream).get(name) for name in ("write", "flush")}  # somebody else's (W&B)
        self._inner_write, self._inner_flush = stream.write, stream.flush
        self._clears = "\r\33[K" if others_draw and stream.isatty() else ""
        stream.write, stream.flush = self._write, self._flush

    def _write(self, text: str) -> int:
        shown = text
        if NAME[:-1] in text:
            shown = self._clears + self._line.apart(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")
        else:
            self._line.see(text.encode(errors="surrogatepass"))
        try:
            self._inner_write(shown)
        except OSError as error:
            self._lose(error)
            self._kept.write(text.encode(errors="backslashreplace"))
        else:
            if self._is_gone:
                self._kept.write(text.encode(errors="backslashreplace"))
        return len(text)

    def _flush(self) -> None:
        try:
            self._inner_flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self._is_gone = self._is_gone or error.errno in _GONE
        _forget(_Unguarded(self._stream.fileno(), self._inner_flush), for_good=self._is_gone)

    def release(self) -> None:
        for name, ours in (("write", self._write), ("flush", self._flush)):
            if vars(self._stream).get(name) == ours:
                if self._before[name] is None:
                    delattr(self._stream, name)
                else:
                    setattr(self._stream, name, self._before[name])


def guard_streams(path: Path, others_draw: bool = False) -> Callable[[], None]:
    """Has no write to stdout or stderr raise because a terminal, a pipe's reader or the room on a disk is gone.

    Errors of all other files are raised as ever.

    Args:
        path: A file for what cannot be shown.
        others_draw: Whether another rank may have drawn a progress bar on the same terminal.

    Returns:
        What ends it.
    """
    kept = KeptOutput(path)
    lines: dict[Any, Line] = {}
    guarded: list[_GuardedStream] = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, or no file: a notebook's, say
            line = lines.setdefault(file_of(stream.fileno()), Line())
            guarded.append(_GuardedStream(stream, line, kept, others_draw))

    def release() -> None:
        for each in guarded:
            each.release()
        kept.close()

    return release
