"""The process that shows the workers' output where the launch writes, and keeps it in the run's logs.

It has a session of its own: neither Ctrl-C nor Ctrl-Z reaches it, and it outlives a launcher that is killed. Ranks
write to files (see :mod:`~lightning_resilience.launch.rank_output`), which it reads. A rank that has a terminal writes
to a pseudo-terminal, which stays open if the window of the real one is closed.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import subprocess
import sys
import termios
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from lightning_resilience._files import matching
from lightning_resilience._output import KeptOutput, Line, file_of, log_line, send_lines
from lightning_resilience.launch.rank_logs import LogKeeper
from lightning_resilience.launch.rank_output import NodeOutput

_TAKES_WITHIN_S = 5.0  # a terminal that is held (Ctrl-S), or a reader that pauses
_ENDS_WITHIN_S = 10.0
_KEPT_WITHIN_S = 5.0
_LEFT_BYTES = 8 << 20  # of each rank
_LOOK_EVERY_S = 0.1
_CHUNK = 4096  # a pipe that has room takes this much without blocking (PIPE_BUF)


class _Channel:
    """An output of this process, and what child processes write on its way to it.

    Args:
        reader: The descriptor from which the output is read.
        target: The descriptor to which it is shown.
        kept: Takes what comes from the reader and cannot be shown.
    """

    def __init__(self, reader: int, target: int, kept: KeptOutput) -> None:
        self._reader = reader
        self._target = _without_blocking(target)
        self._kept = kept
        self._line = Line()
        self._speaker: object = None
        self._is_held = False
        self._is_terminal = os.isatty(target)

    def pass_on(self) -> bytes:
        """Reads the next output, shows it and returns it; returns nothing at the end."""
        try:
            data = os.read(self._reader, 65536)
        except OSError:  # of a terminal: no process has it open any more
            data = b""
        if self._is_terminal:
            _copy_size(self._target, self._reader)
        if data:
            self.show(data, None)
        elif self._line.is_bar:  # so that the next output does not follow a progress bar on the same line
            self._show(b"\n", None)
        return data

    def show(self, data: bytes, speaker: object) -> None:
        """Shows output; first ends a line that another speaker has left open, such as a progress bar.

        Args:
            data: The output.
            speaker: Where it comes from; ``None``: from the reader. Output of other speakers is in a log.
        """
        if speaker != self._speaker and self._line.is_open:
            self._show(b"\n", None)
            self._line = Line()
        self._speaker = speaker
        self._show(self._line.apart(data), self._kept if speaker is None else None)

    def _show(self, data: bytes, kept: KeptOutput | None) -> None:
        for begin in range(0, len(data), _CHUNK):
            piece = data[begin : begin + _CHUNK]
            try:
                while piece and self._has_room():
                    piece = piece[os.write(self._target, piece) :]
            except OSError:
                pass
            if piece and kept is not None:
                kept.write(piece)

    def _has_room(self) -> bool:
        """Whether there is room. Waits a few seconds, then not again before there was some: training must not wait."""
        poll = select.poll()
        poll.register(self._target, select.POLLOUT)
        self._is_held = not poll.poll(0 if self._is_held else _TAKES_WITHIN_S * 1000)
        return not self._is_held


def _without_blocking(target: int) -> int:
    """A descriptor of this process's own, whose writes never block; the shell's descriptor stays unchanged."""
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
    """Two ends: what is written to the second is read from the first. A pseudo-terminal if the target is a terminal."""
    if not os.isatty(target):
        return os.pipe()
    reader, writer = os.openpty()  # a progress bar asks for its width, and Python writes every line at once
    modes = termios.tcgetattr(writer)
    modes[1] &= ~termios.OPOST  # the real terminal does that
    termios.tcsetattr(writer, termios.TCSANOW, modes)
    _copy_size(target, reader)
    return reader, writer


class Relay:
    """Starts a process that reads what child processes write, and shows it where this process writes.

    If this process writes to a terminal, the children do so too, to one of their own.

    Args:
        run_dir: The run directory, for the logs.
        not_shown: A file in it for output that cannot be shown and is in no log.
        folder: A folder on this node for what ranks write; ``None``: they have no files of their own, and no logs.
        without: Environment variables that the process does not get.

    Attributes:
        stdout: For ``subprocess.Popen``.
        stderr: For ``subprocess.Popen``.
    """

    def __init__(
        self, run_dir: Path, not_shown: str, folder: Path | None = None, without: Collection[str] = ()
    ) -> None:
        pairs: dict[tuple[int, int], tuple[int, int, int]] = {}  # one stream is one pair, or lines would be mixed up
        for fd in (1, 2):
            if (file := file_of(fd)) is not None and file not in pairs:
                pairs[file] = (*_pair(fd), fd)
        self.stdout, self.stderr = (None if (file := file_of(fd)) is None else pairs[file][1] for fd in (1, 2))
        self._writers = [writer for _, writer, _ in pairs.values()]
        self._not_shown, self._folder = run_dir / not_shown, folder
        self._closing = threading.RLock()
        self._is_closed = False
        readers = [reader for reader, _, _ in pairs.values()]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", __name__, os.fspath(run_dir), not_shown, os.fspath(folder or "")),
                *(f"{reader}:{target}" for reader, _, target in pairs.values()),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=readers,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in without},
        )
        for reader in readers:
            os.close(reader)

    def __enter__(self) -> Relay:
        """Sends the lines of :func:`~._output.write_line` the same way from here on."""
        send_lines(self.show_line)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Waits until the remaining output of the children, which have ended, is shown."""
        send_lines(None)
        with self._closing:
            self._is_closed = True
            for writer in self._writers:
                os.close(writer)
        try:
            if self._process.wait(_ENDS_WITHIN_S) != 0:
                self._keep_what_is_left()
        except subprocess.TimeoutExpired:  # an unknown process holds the other end
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # it may wait for storage that does not answer
                self._process.wait(1.0)

    def _keep_what_is_left(self) -> None:
        """Keeps the tail of what ranks have written: the process was killed, and how much it had read is not known."""
        kept = KeptOutput(self._not_shown)
        for path in matching(self._folder, "*") if self._folder is not None else []:
            with suppress(OSError), open(path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LEFT_BYTES))
                kept.write(file.read().strip(b"\0").rstrip(b"\n") + b"\n")  # a hole is what had been read
        log_line(
            f"The process that displays worker output was killed; the tail of that output is in {kept.path}.", True
        )

    def show_line(self, line: str) -> bool:
        """Passes on a line of this process's own; returns whether that has succeeded."""
        if self.stderr is None:
            return False
        poll = select.poll()
        poll.register(self.stderr, select.POLLOUT)
        try:
            if poll.poll(_TAKES_WITHIN_S * 1000):
                with self._closing:  # other threads log as well; once closed, the number may belong to another file
                    if not self._is_closed:
                        os.write(self.stderr, f"{line}\n".encode(errors="backslashreplace"))
                        return True
        except OSError:
            pass
        return False


def main() -> None:
    """Arguments: run directory, file in it for unshown output, folder on this node or "", ``READER:TARGET`` pairs."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # a scheduler signals all processes, but this one must end last
    run_dir, not_shown, folder, *pairs = sys.argv[1:]
    kept = KeptOutput(Path(run_dir, not_shown))
    poll = select.poll()
    channels = {}
    outputs = {}
    for pair in pairs:
        reader, target = map(int, pair.split(":"))
        channels[reader] = outputs[target] = _Channel(reader, target, kept)
        poll.register(reader, select.POLLIN)
    target_of = {channel: target for target, channel in outputs.items()}
    ranks = NodeOutput(Path(folder)) if folder else None
    keeper = None
    if ranks is not None:
        keeper = LogKeeper(Path(run_dir), lambda: ranks.files)
        keeper.start()
    is_behind = False
    while channels:
        ready = poll.poll(None if ranks is None else 0 if is_behind else _LOOK_EVERY_S * 1000)
        if ranks is not None:  # output that ranks wrote before a line of the launcher is shown before it
            is_behind = _show(ranks, outputs)
        for fd, _ in ready:
            channel = channels[fd]
            if not (data := channel.pass_on()):
                poll.unregister(fd)
                del channels[fd]
            elif ranks is not None:
                ranks.add_from_terminal(target_of[channel], data)
    if ranks is not None and keeper is not None:
        while _show(ranks, outputs, is_last=True):
            pass
        keeper.end(_KEPT_WITHIN_S)
    kept.close()


def _show(ranks: NodeOutput, outputs: dict[int, _Channel], is_last: bool = False) -> bool:
    """Shows what ranks have written to files; returns whether there is more."""
    ranks.look()
    more = False
    for file in ranks.files:
        if file.target in outputs:
            channel = outputs[file.target]
            more |= file.show(lambda data, file=file, channel=channel: channel.show(data, file), is_last)  # type: ignore[misc]
    return more


if __name__ == "__main__":
    main()
