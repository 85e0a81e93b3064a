"""Keeps output working when a terminal is closed, the reader of a pipe ends, or a disk is full.

In these cases a write raises wherever code happens to print, for example in a progress bar, and that ends the training.
With :func:`guard_streams` no write raises, and a file of the run directory keeps what cannot be shown
(:class:`KeptOutput`). A separate process shows the output of the launcher's workers
(:mod:`~lightning_resilience.launch.relay`), so workers do not depend on a terminal.

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
"""Environment variable by which ``launch --quiet`` makes the workers log warnings and errors only."""

_OURS = re.compile(rb"\[lightning-resilience[ \]]")
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # these are permanent; a full disk may have room again
_TAKES_WITHIN_S = 5.0  # a terminal may be held (Ctrl-S), or a reader may pause
_ENDS_WITHIN_S = 10.0
_CHUNK = 4096  # a pipe that has room takes this much without blocking (PIPE_BUF)
_LONGEST_LINE = 1 << 20


class KeptOutput:
    """A file for output that could not be shown: whole lines, and only the last state of a line that was redrawn.

    Args:
        path: The file, which is created when there is something to keep.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rest = b""
        self._lock = threading.RLock()  # the garbage collector may end it in the middle of a line

    def write(self, data: bytes) -> None:
        """Keeps ``data``; it is lost if the file cannot be written either."""
        with self._lock:
            lines, self._rest = whole_lines(self._rest + data)
            self._append(lines)

    def close(self) -> None:
        """Keeps the last line too, which has no line end."""
        with self._lock:
            rest, self._rest = self._rest.rstrip(b"\r"), b""
            if rest.strip():
                self._append([rest])

    def _append(self, lines: list[bytes]) -> None:
        if lines:
            with suppress(OSError), open(self.path, "ab") as file:
                file.write(b"\n".join(lines) + b"\n")


def whole_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """The complete lines in ``data``, and the rest after the last line end; of a redrawn line only the last state.

    Args:
        data: The output, from the beginning of a line on.
    """
    *lines, rest = data.split(b"\n")
    states = rest.rstrip(b"\r")
    goes_back = b"\r" if states != rest else b""  # the next output overwrites it
    rest = states.rpartition(b"\r")[2][-_LONGEST_LINE:] + goes_back
    return [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines], rest


class Line:
    """The line that is being written at present.

    Attributes:
        is_open: Whether the line contains anything.
        is_bar: Whether the line is a progress bar, which is redrawn from its beginning.
    """

    def __init__(self) -> None:
        self.is_open = self.is_bar = False

    def see(self, data: bytes) -> None:
        """Takes note of output that is written unchanged."""
        _, newline, last = data.rpartition(b"\n")
        if newline:
            self.is_open = self.is_bar = False
        if last.strip(b"\r"):
            self.is_open = True
            self.is_bar = self.is_bar or b"\r" in last

    def apart(self, data: bytes) -> bytes:
        """``data`` with a line break before each line of this package that would follow a progress bar in its line."""
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
    """Gives this process a name for its lines where several processes write.

    Args:
        speaker: The name; without this call it is the rank.
    """
    global _speaker
    _speaker = speaker


def signed(text: str, at: float | None = None, level: str = "") -> str:
    """A log line of this package. Where several processes write, it contains the time and the name of the process.

    Args:
        text: The message.
        at: The time in seconds since the epoch; default: now.
        level: The log level if it is above information, otherwise empty.
    """
    if _speaker is None and os.environ.get("WORLD_SIZE", "1") == "1":
        return f"{NAME} {text}"
    # LOCAL_RANK: Lightning's own launcher.
    who = _speaker or "rank " + os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    return f"{NAME[:-1]} {timestamp(time.time() if at is None else at)[11:]} {who}{level and f' {level}'}] {text}"


class Formatter(logging.Formatter):
    """A formatter of the ``logging`` module for this package's lines."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a log record.

        Args:
            record: The log record.
        """
        level = record.levelname if record.levelno > logging.INFO else ""
        return signed(super().format(record), record.created, level)


_other_way: Callable[[str], bool] | None = None


def send_lines(way: Callable[[str], bool] | None) -> None:
    """Makes :func:`write_line` pass its lines to a function.

    Args:
        way: Takes a line, and returns whether it has taken it; ``None``: lines go to stderr again.
    """
    global _other_way
    _other_way = way


def write_line(text: str) -> None:
    """Writes a line to stderr; never raises.

    Args:
        text: The line without its line end.
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
    """Whether this process is ``launch --quiet``, or was started by it."""
    return bool(os.environ.get(QUIET_VARIABLE))


def log_line(line: str, is_detail: bool = False) -> None:
    """Writes one log line of this package; never raises, because stderr may have no reader.

    Args:
        line: The line without this package's name.
        is_detail: Whether ``--quiet`` omits it.
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
    """Discards a stream's buffer, which would make every later write fail, and at process exit change the exit code.

    Args:
        stream: The stream.
        for_good: Whether to discard all later output as well, including output of C code.
    """
    with suppress(OSError, ValueError):  # the stream may be no file
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
    """Identifies the open file of a descriptor by device and inode; ``None`` if it is not open.

    Args:
        fd: The file descriptor.
    """
    with suppress(OSError):
        status = os.fstat(fd)
        return status.st_dev, status.st_ino
    return None


# -- a process that trains ---------------------------------------------------------------------------------------------


class _GuardedStream:
    """Makes ``write`` and ``flush`` of stdout or stderr not raise; in place, since loggers and bars hold the stream."""

    def __init__(self, stream: Any, line: Line, kept: KeptOutput, others_draw: bool) -> None:
        self._stream = stream
        self._line = line
        self._kept = kept
        self._is_gone = False
        self._before = {name: vars(stream).get(name) for name in ("write", "flush")}  # another patch (W&B)
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
    """Prevents writes to stdout and stderr from raising when a terminal or a pipe's reader is gone or a disk is full.

    Errors of all other files are raised as usual.

    Args:
        path: A file for output that cannot be shown.
        others_draw: Whether another rank may have drawn a progress bar on the same terminal.

    Returns:
        A function that ends the guarding.
    """
    kept = KeptOutput(path)
    lines: dict[Any, Line] = {}
    guarded: list[_GuardedStream] = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # no stream, or no file, such as a notebook's
            line = lines.setdefault(file_of(stream.fileno()), Line())
            guarded.append(_GuardedStream(stream, line, kept, others_draw))

    def release() -> None:
        for each in guarded:
            each.release()
        kept.close()

    return release
