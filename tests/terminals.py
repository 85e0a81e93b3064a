"""A real terminal: a pty whose session runs one command, and of which every byte is kept."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PATIENCE_S = 120.0


class Terminal:
    """The window that somebody has open: the command is the leader of its session and in its foreground.

    Args:
        command: What runs in it.
        cwd: Where.
        env: With which environment.
    """

    def __init__(self, command: Sequence[str], cwd: Path, env: dict[str, str]) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self._seen = b""
        self._wake_reader, self._wake_writer = os.pipe()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env=env,
            start_new_session=True,
            preexec_fn=_as_in_a_terminal,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._master, self._wake_reader], [], [])
            if self._wake_reader in ready:
                break
            try:
                data = os.read(self._master, 65536)
            except OSError:  # all who had it open have ended
                break
            self._seen += data
        os.close(self._master)

    @property
    def text(self) -> str:
        """What has been written so far."""
        return self._seen.decode(errors="replace").replace("\r\n", "\n")

    def type(self, data: bytes) -> None:
        os.write(self._master, data)

    def press_ctrl_c(self) -> None:
        """The kernel sends SIGINT to everybody in the foreground."""
        os.write(self._master, b"\3")

    def close(self) -> None:
        """The window is closed: the kernel sends SIGHUP, and every read and write fails from here on."""
        if not self._reader.is_alive():
            return
        os.write(self._wake_writer, b".")
        self._reader.join()

    def wait(self) -> int:
        """How the command ended."""
        return self.process.wait(PATIENCE_S)

    def clean_up(self) -> None:
        self.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._wake_reader)
        os.close(self._wake_writer)


def _as_in_a_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):  # the tests may run in the background, by nohup
        signal.signal(signum, signal.SIG_DFL)


def until(condition: Callable[[], object], explain: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)


def those_left(folder: Path) -> list[int]:
    """The processes whose working directory is ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "cwd") == str(folder):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
