"""Output that outlives who reads it: a terminal that is closed, a pipe without a reader, a disk that is full.

A write to one of these raises wherever somebody happens to print: in a progress bar, and the training ends for it. Here
no write raises. What cannot be shown is kept in a file of the run directory (:class:`KeptOutput`). The launcher reads
what its workers write and passes it on (:class:`Relay`), so that no terminal is theirs to lose; a process that nobody
has launched guards its own streams while it trains (:func:`guard_streams`).

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import select
import signal
import stat
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from lightning_resilience._formatting import timestamp

NAME = "[lightning-resilience]"

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
            *lines, rest = (self._rest + data).split(b"\n")
            drawn, _, newest = rest.rstrip(b"\r").rpartition(b"\r")
            self._rest = newest[-_LONGEST_LINE:] if drawn else rest[-_LONGEST_LINE:]
            self._append(lines)

    def close(self) -> None:
        """Keeps the last line, too, which nothing has ended."""
        with self._lock:
            rest, self._rest = self._rest, b""
            if rest.strip():
                self._append([rest])

    def _append(self, lines: list[bytes]) -> None:
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        if shown:
            with suppress(OSError), open(self.path, "ab") as file:
                file.write(b"\n".join(shown) + b"\n")


class _Line:
    """Whether the line that is being written is a progress bar: one that is drawn again from its beginning."""

    def __init__(self) -> None:
        self.is_bar = False

    def see(self, data: bytes) -> None:
        _, newline, last = data.rpartition(b"\n")
        if newline:
            self.is_bar = False
        if last.strip(b"\r"):
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
                self.is_bar = False
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


def write_line(text: str) -> None:
    """Writes a line to stderr; never raises.

    Args:
        text: Without its end.
    """
    if _relay is not None and _relay.show_line(text):
        return
    stream = sys.stderr
    if stream is None:
        return
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):
        _forget(stream)


def log_line(line: str) -> None:
    """One readable line of ours; never raises: nobody may be there to read it.

    Args:
        line: Without our name.
    """
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


# -- the launcher ------------------------------------------------------------------------------------------------------


class _Channel:
    """What processes write, on its way to an output of this one.

    Args:
        reader: Where it comes from.
        target: Where it is shown.
        kept: Takes what cannot be shown.
    """

    def __init__(self, reader: int, target: int, kept: KeptOutput) -> None:
        self._reader = reader
        self._target = _without_blocking(target)
        self._kept = kept
        self._line = _Line()
        self._is_held = False
        self._is_terminal = os.isatty(target)

    def pass_on(self) -> bool:
        """Passes on what comes next; whether anything can come after it."""
        try:
            data = os.read(self._reader, 65536)
        except OSError:  # of a terminal: nobody has it open any more
            data = b""
        if self._is_terminal:
            _copy_size(self._target, self._reader)
        if data:
            self._show(self._line.apart(data))
        elif self._line.is_bar:  # whatever is written next does not stand behind a progress bar
            self._show(b"\n")
        return bool(data)

    def _show(self, data: bytes) -> None:
        for begin in range(0, len(data), _CHUNK):
            piece = data[begin : begin + _CHUNK]
            try:
                while piece and self._has_room():
                    piece = piece[os.write(self._target, piece) :]
            except OSError:
                pass
            if piece:
                self._kept.write(piece)

    def _has_room(self) -> bool:
        """Waits for a while, and not again before there is some: training does not wait for a terminal."""
        poll = select.poll()
        poll.register(self._target, select.POLLOUT)
        self._is_held = not poll.poll(0 if self._is_held else _TAKES_WITHIN_S * 1000)
        return not self._is_held


def _without_blocking(target: int) -> int:
    """A descriptor of one's own, whose writes never wait; the shell's is left as it is."""
    with suppress(OSError):
        if not stat.S_ISREG(os.fstat(target).st_mode):
            return os.open(f"/proc/self/fd/{target}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    return target


def _copy_size(of: int, to: int) -> None:
    with suppress(OSError):
        size = fcntl.ioctl(of, termios.TIOCGWINSZ, bytes(8))
        if size != fcntl.ioctl(to, termios.TIOCGWINSZ, bytes(8)):
            fcntl.ioctl(to, termios.TIOCSWINSZ, size)


def _pair(target: int) -> tuple[int, int]:
    """Two ends: what is written to the second is read from the first. A terminal where the target is one."""
    if not os.isatty(target):
        return os.pipe()
    reader, writer = os.openpty()  # a progress bar asks for its width, and Python writes every line at once
    modes = termios.tcgetattr(writer)
    modes[1] &= ~termios.OPOST  # the terminal does that
    termios.tcsetattr(writer, termios.TCSANOW, modes)
    _copy_size(target, reader)
    return reader, writer


_relay: Relay | None = None


class Relay:
    """Has a process of its own read what child processes write, and show it where this process writes.

    Where this process writes to a terminal, the children do so too, to one of their own that no window takes away. The
    process that reads is in a session of its own: neither Ctrl-C nor Ctrl-Z reaches it, and it outlives this one.

    Args:
        path: A file for what cannot be shown.
        without: Variables that its environment has not.

    Attributes:
        stdout: For ``subprocess.Popen``.
        stderr: The same.
    """

    def __init__(self, path: Path, without: Collection[str] = ()) -> None:
        pairs: dict[tuple[int, int], tuple[int, int, int]] = {}  # one stream is one pair, or lines would be mixed up
        for fd in (1, 2):
            if (file := _file_of(fd)) is not None and file not in pairs:
                pairs[file] = (*_pair(fd), fd)
        self.stdout, self.stderr = (None if (file := _file_of(fd)) is None else pairs[file][1] for fd in (1, 2))
        self._writers = [writer for _, writer, _ in pairs.values()]
        readers = [reader for reader, _, _ in pairs.values()]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from lightning_resilience import _output; _output.main()"),
                *(os.fspath(path), *(f"{reader}:{target}" for reader, _, target in pairs.values())),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=readers,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in without},
        )
        for reader in readers:
            os.close(reader)

    def __enter__(self) -> Relay:
        """From here on :func:`write_line` goes the same way."""
        global _relay
        _relay = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        """The children have ended: what they have still written is shown."""
        global _relay
        _relay = None
        for writer in self._writers:
            os.close(writer)
        try:
            self._process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:  # somebody whom nobody knows holds the other end
            self._process.kill()
            self._process.wait()

    def show_line(self, line: str) -> bool:
        """A line of this process's own; whether it is on its way."""
        if self.stderr is None:
            return False
        poll = select.poll()
        poll.register(self.stderr, select.POLLOUT)
        try:
            if poll.poll(_TAKES_WITHIN_S * 1000):
                os.write(self.stderr, f"{line}\n".encode(errors="backslashreplace"))
                return True
        except OSError:
            pass
        return False


def main() -> None:
    """The program of the process that reads: a file for what cannot be shown, and ``READER:TARGET`` of each stream."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # a scheduler signals everybody, but this process ends after all others
    kept = KeptOutput(Path(sys.argv[1]))
    poll = select.poll()
    channels = {}
    for argument in sys.argv[2:]:
        reader, target = map(int, argument.split(":"))
        channels[reader] = _Channel(reader, target, kept)
        poll.register(reader, select.POLLIN)
    while channels:
        for fd, _ in poll.poll():
            if not channels[fd].pass_on():
                poll.unregister(fd)
                del channels[fd]
    kept.close()


def _file_of(fd: int) -> tuple[int, int] | None:
    """What is open under a number, if anything."""
    with suppress(OSError):
        status = os.fstat(fd)
        return status.st_dev, status.st_ino
    return None


# -- a process that trains ---------------------------------------------------------------------------------------------


class _GuardedStream:
    """stdout or stderr, whose ``write`` and ``flush`` do not raise. In place: loggers and progress bars hold it."""

    def __init__(self, stream: Any, line: _Line, kept: KeptOutput, others_draw: bool) -> None:
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
    lines: dict[Any, _Line] = {}
    guarded: list[_GuardedStream] = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, or no file: a notebook's, say
            line = lines.setdefault(_file_of(stream.fileno()), _Line())
            guarded.append(_GuardedStream(stream, line, kept, others_draw))

    def release() -> None:
        for each in guarded:
            each.release()
        kept.close()

    return release
