"""The channel between the launcher of a node and each of its workers: a pair of sockets that no other process has.

So a process that can only write to the run directory or to node memory cannot send messages. Every worker has a channel
from its start to its end. A message is a JSON object, preceded by its length in 4 bytes; ``kind`` is its type:

=========== =========================== =======================================================================
kind        from -> to                  meaning, and its other fields
=========== =========================== =======================================================================
``begun``   worker -> launcher          it is at its first boundary; sent again with what it has imported (``modules``,
                                        ``changes``, ``files``, see :mod:`~lightning_resilience.launch.imports`), where
                                        the launcher has asked for that
``import``  launcher -> spare           what to import: the fields of ``begun``; ``parent``: the launcher's pid
``ready``   spare -> launcher           it has imported that; ``problem``: why it cannot be used, or null; ``memory``:
                                        bytes of memory that it shares with no other process
``go``      launcher -> spare           it is a worker now: ``env``, ``cwd``, ``redirected``: which of descriptors 1 and
                                        2 come with the message
``going``   worker that was a spare ->  it has received ``go``
``state``   rank -> ``--elastic``       ``state``: ``ready`` (in a fit; the loss of another rank can be repaired;
                                        ``fewer``: why its fit cannot continue with fewer ranks, "" if it can, null if
                                        that is not known yet; ``tasks``: why no other rank can take the tasks of rank
                                        0, or ""; ``group``: how many ranks hold the state together, of which other
                                        groups have copies; ``has_trained``: whether it only ends its fit), ``refused``
                                        (a loss cannot be repaired without a restart of all ranks; ``reason``),
                                        ``leaving`` (all ranks are at the boundary where they leave the fit),
                                        ``left`` (it has left the fit, to enter it again), ``waiting`` (to be admitted
                                        into a generation), ``done`` (its fit has ended), ``needs_all`` (it begins
                                        another fit, and ranks are absent; ``reason``); ``generation``: its generation
``saved``   rank -> ``--elastic``       a state to resume from exists; ``is_usable`` is false: no such state exists that
                                        all ranks can verify
``stop``    ``--elastic`` -> rank       all ranks of several nodes must save and end; SIGTERM follows
``replace`` ``--elastic`` -> rank       another generation begins: ``lost``: how each lost rank has ended;
                                        ``generation``: its number; ``port``: of its store; ``members``: its slots;
                                        ``together``: whether all ranks leave the present generation at a boundary that
                                        they agree on; ``is_start``: whether all members were started for it
``restart`` ``--elastic`` -> rank       all ranks (of a follower that has lost the first node: the ranks of its node)
                                        are ended. They are started again, unless no restart is left or the run is over
=========== =========================== =======================================================================

A *generation* is one start of a process group under ``launch --elastic``
(:mod:`~lightning_resilience.launch.elastic`, :mod:`~lightning_resilience.launch.membership`).

:func:`~lightning_resilience.launch.park.enter` gives a worker its end of the channel; :func:`of_worker` returns it.
The class :class:`~lightning_resilience.launch.spares.Workers` has the launcher's ends.

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
"""Environment variable of a worker: the number of the descriptor of its end, the number of the descriptor of the gate
of :mod:`~lightning_resilience.launch.standstill` (or -1), and what the process is for."""

_TAKES_WITHIN_S = 10.0
_LARGEST = 1 << 26
_HEADER = struct.Struct("!I")


class Message(NamedTuple):
    """A message.

    Attributes:
        kind: Its type.
        fields: Its content.
        fds: The descriptors that have come with it; the receiver closes them.
    """

    kind: str
    fields: dict[str, Any]
    fds: list[int]


class Channel:
    """One end of the channel.

    Args:
        connection: The socket. This object owns it, and programs that this process executes do not inherit it.
        takes_within_s: How long a send may wait until the other end has read enough.
        largest: How many bytes a received message may have.
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
        # A process that is stopped must not block the other one. SO_SNDTIMEO holds for sending only.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(takes_within_s))

    def send(self, kind: str, fds: Sequence[int] = (), **fields: Any) -> bool:
        """Sends a message; a connection that fails raises nothing.

        Args:
            kind: The type of the message.
            fds: Descriptors that the other end gets with it.
            fields: Its content.

        Returns:
            Whether the message was sent. If the other end is gone, or does not read for ``takes_within_s``, nothing
            more can be sent. A forked child sends nothing.

        Raises:
            TypeError: If a field has a type that JSON does not know.
        """
        if self._pid != os.getpid():
            return False  # a forked child does not send in the name of its parent
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
        """Waits for a message; ``None``: the other end is gone, or has sent something that is no message."""
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
            within_s: How long to wait for that.
        """
        poll = select.poll()  # not select, which accepts no descriptor above 1023
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def listen(self, take: Callable[[Message], None], end: Callable[[], None] = lambda: None) -> None:
        """Receives in a thread from here on.

        Args:
            take: Called in that thread with every message.
            end: Called in that thread when the other end is gone.
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
        """The number of the descriptor of this end."""
        return self._connection.fileno()

    def close(self) -> None:
        """Closes this end; the thread of :meth:`listen` ends, too."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


_of_worker: Channel | None = None


def set_of_worker(channel: Channel) -> None:
    """Makes this process a worker with this channel.

    Args:
        channel: The worker's end.
    """
    global _of_worker
    _of_worker = channel


def of_worker() -> Channel | None:
    """The channel of this worker to its launcher; ``None``: this process has none."""
    return _of_worker
