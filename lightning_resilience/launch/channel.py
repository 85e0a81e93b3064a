"""The channel between the launcher of a node and each of its workers: a pair of sockets that nobody else has.

Whoever can write to the run directory, or to node memory, has no say here. Every worker has one, from its start to its
end. A message is a JSON object, preceded by its length in 4 bytes; ``kind`` says what it is:

=========== =========================== =======================================================================
kind        from -> to                  meaning, and its other fields
=========== =========================== =======================================================================
``begun``   worker -> launcher          it is at its first boundary; once more with what it has imported (``modules``,
                                        ``changes``, ``files``, see :mod:`~lightning_resilience.launch.imports`), where
                                        the launcher has asked for that
``import``  launcher -> spare           what to import: the fields of ``begun``; ``parent``: the launcher's pid
``ready``   spare -> launcher           it has; ``problem``: why it cannot be used, or null; ``memory``: its own bytes
``go``      launcher -> spare           it is a worker now: ``env``, ``cwd``, ``redirected``: which of descriptors 1 and
                                        2 come with the message
``going``   worker that was a spare ->  it has read that
``state``   rank -> ``--elastic``       ``state``: ``ready`` (the loss of another rank can be mended; ``fewer``: why its
                                        fit cannot go on with fewer ranks, "", or null: not known yet; ``tasks``: why no
                                        other rank can take those of rank 0, or ""; ``group``: how many ranks hold the
                                        state together, of which others have copies; ``has_trained``: whether it only
                                        ends its fit), ``refused`` (it cannot; ``reason``), ``left`` (it has left the
                                        fit, to enter it again), ``waiting`` (at the door, to be taken into a
                                        generation), ``done``, ``needs_all`` (it begins another fit, and ranks are
                                        absent; ``reason``); ``generation``: in which
``saved``   rank -> ``--elastic``       there is a state to go back to; ``is_usable``: or none that all can verify
``stop``    ``--elastic`` -> rank       all ranks save and end; of several nodes, and SIGTERM follows
``replace`` ``--elastic`` -> rank       another generation begins: ``lost``: how each rank that was lost has ended;
                                        ``generation``: its number; ``port``: of its store; ``members``: who is in it;
                                        ``together``: whether all leave the present one at a boundary that they agree
                                        on; ``is_start``: whether all were started for it
``restart`` ``--elastic`` -> rank       all ranks are ended and started again
=========== =========================== =======================================================================

A *generation* is one start of a process group under ``launch --elastic``
(:mod:`~lightning_resilience.launch.elastic`, :mod:`~lightning_resilience.launch.membership`).

A worker gets its end by :func:`~lightning_resilience.launch.park.enter` and finds it with :func:`of_worker`. The
launcher's ends are those of :class:`~lightning_resilience.launch.spares.Workers`.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

CHANNEL_VARIABLE = "LIGHTNING_RESILIENCE_CHANNEL"
"""Environment variable of a worker with its end: the numbers of its descriptor and of that of the gate of
:mod:`~lightning_resilience.launch.standstill`, or -1, and what the process is for."""

_TAKES_WITHIN_S = 10.0
_LARGEST = 1 << 26
_HEADER = struct.Struct("!I")


class Message(NamedTuple):
    """A message.

    Attributes:
        kind: What it is.
        fields: What it says.
        fds: The descriptors that have come with it; the receiver closes them.
    """

    kind: str
    fields: dict[str, Any]
    fds: list[int]


class Channel:
    """One end.

    Args:
        connection: The socket; it is this object's from here on, and is not inherited by what is executed.
        takes_within_s: How long the other end may take until it has read enough.
        largest: How many bytes a message that is received may have.
    """

    def __init__(
        self, connection: socket.socket, takes_within_s: float = _TAKES_WITHIN_S, largest: int = _LARGEST
    ) -> None:
        self._connection = connection
        self._largest = largest
        self._pid = os.getpid()
        self._sending = threading.Lock()
        connection.set_inheritable(False)
        connection.setblocking(True)
        # Who is stopped must not stop the other: SO_SNDTIMEO holds for sending only.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(takes_within_s))

    def send(self, kind: str, fds: Sequence[int] = (), **fields: Any) -> bool:
        """Sends a message; never raises.

        Args:
            kind: What it is.
            fds: Descriptors that the other end gets with it.
            fields: What it says.

        Returns:
            Whether it was sent. The other end may be gone, or not read for 10 s; then nothing more can be sent.
        """
        if self._pid != os.getpid():
            return False  # a forked child does not speak for its parent
        data = json.dumps({"kind": kind, **fields}).encode()
        with self._sending:
            try:
                header = _HEADER.pack(len(data))
                if fds:
                    socket.send_fds(self._connection, [header], fds)
                else:
                    self._connection.sendall(header)
                self._connection.sendall(data)
                return True
            except OSError:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)  # half a message may have been sent
                return False

    def receive(self) -> Message | None:
        """Waits for a message; ``None``: the other end is gone, or says what is no message."""
        fds: list[int] = []
        with suppress(OSError, ValueError, RecursionError):
            header, fds, _, _ = socket.recv_fds(self._connection, _HEADER.size, 2)
            header += self._exactly(_HEADER.size - len(header)) if header else b""
            if len(header) == _HEADER.size and (size := _HEADER.unpack(header)[0]) <= self._largest:
                fields = json.loads(self._exactly(size))
                if isinstance(fields, dict) and isinstance(kind := fields.pop("kind", None), str):
                    return Message(kind, fields, list(fds))
        for fd in fds:
            os.close(fd)
        return None

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not (piece := self._connection.recv(size - len(data))):
                raise ConnectionResetError
            data += piece
        return bytes(data)

    def is_readable(self, within_s: float = 0.0) -> bool:
        """Whether :meth:`receive` would return at once.

        Args:
            within_s: How long to wait until it would.
        """
        poll = select.poll()  # not select, which takes no descriptor from 1024 on
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def listen(self, take: Callable[[Message], None], end: Callable[[], None] = lambda: None) -> None:
        """Receives in a thread from here on.

        Args:
            take: Called in it with every message.
            end: Called in it when the other end is gone.
        """

        def run() -> None:
            try:
                while (message := self.receive()) is not None:
                    take(message)
            finally:  # an error must not leave the other end with one that does not hear any more
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
                end()

        threading.Thread(target=run, name="resilience-channel", daemon=True).start()

    def fileno(self) -> int:
        """The number of its descriptor."""
        return self._connection.fileno()

    def close(self) -> None:
        """Ends it; a thread that listens ends, too."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


_of_worker: Channel | None = None


def set_of_worker(channel: Channel) -> None:
    """This process is a worker and has this channel.

    Args:
        channel: Its end.
    """
    global _of_worker
    _of_worker = channel


def of_worker() -> Channel | None:
    """The channel of this worker to its launcher, if this is a worker that has one."""
    return _of_worker
