"""Whether the device of a rank has work left, asked from outside.

A host that waits for a GPU does not sleep: it looks again and again, and uses a core as one that computes does. The
device knows which it is. So each rank with a device has a thread that sleeps until the watchdog asks. It needs the
interpreter lock, which torch gives up while it waits for a device.
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
    """The rank's side: answers for its device.

    Args:
        path: Of the socket.
        has_work: Asks the device; called in a thread of its own.

    Raises:
        OSError: If there can be no such socket.
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
        """Answers no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread
        self._listener.close()


def _serve(listener: socket.socket, has_work: Callable[[], bool]) -> None:
    while True:
        try:
            asked, _ = listener.accept()
        except OSError:
            return
        with asked, contextlib.suppress(Exception):  # of a device in distress as well: no answer says nothing
            asked.sendall(_HAS_WORK if has_work() else _IS_IDLE)


def has_work(path: Path) -> bool | None:
    """What a rank answers for its device.

    Args:
        path: Of the socket.

    Returns:
        Whether the device has work left; ``None``: nobody answers.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(ANSWER_WITHIN_S)
        client.connect(os.fspath(path))
        answer = client.recv(1)
        return answer == _HAS_WORK if answer else None
    return None
