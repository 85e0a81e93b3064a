"""Answers, from outside a rank's process, whether the device of the rank has work left.

A host that waits for a GPU does not sleep: it polls, and uses as much of a core as a host that computes. Only the
device knows whether it has work. So each rank with a device has a thread that sleeps until the watchdog asks. This
thread needs the interpreter lock, which torch releases while it waits for a device.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from lightning_resilience.run.deadlines import ANSWER_WITHIN_S

_HAS_WORK, _IS_IDLE = b"1", b"0"


class DeviceAnswers:
    """The rank's side: answers the watchdog's questions about the rank's device.

    Args:
        path: The path of the socket.
        has_work: Asks the device; called in a separate thread.

    Raises:
        OSError: If the socket cannot be created.
    """

    def __init__(self, path: Path, has_work: Callable[[], bool]) -> None:
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(os.fspath(path))
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        threading.Thread(target=_serve, args=(self._listener, has_work), name="answers-for-device", daemon=True).start()

    def close(self) -> None:
        """Stops answering."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread
        self._listener.close()


def _serve(listener: socket.socket, has_work: Callable[[], bool]) -> None:
    while True:
        try:
            asked, _ = listener.accept()
        except OSError:
            return
        with asked, contextlib.suppress(Exception):  # also errors of a broken device: the watchdog gets no answer then
            asked.sendall(_HAS_WORK if has_work() else _IS_IDLE)


def has_work(path: Path) -> bool | None:
    """Asks a rank about its device.

    Args:
        path: The path of the socket.

    Returns:
        Whether the device has work left; ``None`` if the rank does not answer.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(ANSWER_WITHIN_S)
        client.connect(os.fspath(path))
        answer = client.recv(1)
        return answer == _HAS_WORK if answer else None
    return None
