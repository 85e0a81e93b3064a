"""The connection between the first node and a follower, under ``launch --elastic`` with several nodes.

Each end proves to the other one that it has read a secret in the run directory, a file that only the user can read.
Messages are those of :class:`~lightning_resilience.launch.channel.Channel`:

=========== ========================= ==================================================================================
kind        from -> to                meaning, and its other fields
=========== ========================= ==================================================================================
``who``     first node -> follower    ``nonce``
``join``    follower -> first node    ``nonce``, ``proof``, its name ``node``, ``node_rank`` or null, ``count`` of
                                      ranks, ``process``
``welcome`` first node -> follower    ``proof``
``start``   first node -> follower    start the local ``rank``, as the process with number ``life``: ``environment``
``clear``   first node -> follower    these ``ranks`` have ended; if they are started again, the other ranks continue
``tell``    first node -> follower    pass a message to a ``rank``: ``message``, its ``fields``
``signal``  first node -> follower    send ``signum`` to the process with number ``life``
``settle``  first node -> follower    pass on what ranks have reported and how they ended before the answer,
                                      ``settled``, with the same ``number``
``end``     first node -> follower    the run is over, with ``code``
``said``    follower -> first node    the rank with number ``life`` has sent ``message``, with ``fields``
``ended``   follower -> first node    the process with number ``life`` has ended with ``code``
``settled`` follower -> first node    the answer to ``settle``; ``spares``: the local ranks for which a spare is ready
``stop``    follower -> first node    its launcher was told to stop
``beat``    both                      the sender is alive
=========== ========================= ==================================================================================

A connection that is closed, or silent for 30 s, counts as a lost node. Its follower ends its ranks and joins again.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_resilience.launch.channel import Channel, Message
from lightning_resilience.run import deadlines
from lightning_resilience.run.ledger import node_name

_LARGEST = 1 << 20
_SECRET_BYTES = 32


def secret_path(run_dir: Path, run_id: str) -> Path:
    """Where the secret of a job lies.

    Args:
        run_dir: The run directory.
        run_id: Id of the rendezvous.
    """
    return run_dir / "elastic" / f"secret-{run_id}"


def make_secret(path: Path) -> bytes:
    """Creates the secret; called on the first node.

    Args:
        path: See :func:`secret_path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    secret = secrets.token_bytes(_SECRET_BYTES)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(secret)
    return secret


def read_secret(path: Path) -> bytes | None:
    """Reads the secret; called on the other nodes. ``None``: it does not exist yet.

    Args:
        path: See :func:`secret_path`.

    Raises:
        PermissionError: If another user may know it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise PermissionError(f"{path} is not a file that only this user may read")
        secret = file.read(_SECRET_BYTES + 1)
    return secret if len(secret) == _SECRET_BYTES else None


def _proof(secret: bytes, *said: object) -> str:
    return hmac.new(secret, repr(said).encode(), hashlib.sha256).hexdigest()


class Line:
    """One end of the connection between the first node and a follower.

    Args:
        connection: The socket; this object owns it.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channel = Channel(connection, largest=_LARGEST)
        self._heard_at = time.monotonic()
        self._over = threading.Event()
        self.send, self.receive = self._channel.send, self._channel.receive

    def listen(self, take: Callable[[Message], None], end: Callable[[], None]) -> None:
        """Receives in a thread from here on, and sends signs of life.

        Args:
            take: Called with every message.
            end: Called when the other end is gone.
        """

        def heard(message: Message) -> None:
            self._heard_at = time.monotonic()
            if message.kind != "beat":
                take(message)

        def over() -> None:
            self._over.set()
            end()

        def beat() -> None:
            while not self._over.wait(deadlines.NODE_BEAT_S):
                self.send("beat")

        self._heard_at = time.monotonic()
        self._channel.listen(heard, over)
        threading.Thread(target=beat, name="resilience-beat", daemon=True).start()

    @contextmanager
    def limited(self, within_s: float) -> Iterator[None]:
        """Closes the connection if the code in the ``with`` block takes too long.

        Args:
            within_s: How long it may take.
        """
        too_late = threading.Timer(within_s, self.close)
        too_late.daemon = True
        too_late.start()
        try:
            yield
        finally:
            too_late.cancel()

    def close_if_silent(self) -> None:
        """Closes the connection if nothing was received for too long."""
        if time.monotonic() - self._heard_at > deadlines.NODE_SILENT_AFTER_S:
            self._channel.close()

    def wait_for_end(self, within_s: float) -> None:
        """Waits until the other end is gone."""
        self._over.wait(within_s)

    def close(self) -> None:
        """Closes this end."""
        self._channel.close()


def _is_same(said: Any, proof: str) -> bool:
    return hmac.compare_digest(str(said).encode(errors="replace"), proof.encode())  # it accepts only ASCII as str


def greet(line: Line, secret: bytes) -> dict[str, Any] | None:
    """Lets a follower introduce itself to the first node; returns its message; ``None``: it does not know the secret.

    Args:
        line: The connection to it.
        secret: The secret, see :func:`make_secret`.
    """
    with line.limited(deadlines.NODE_JOINS_WITHIN_S):
        ours = secrets.token_hex()
        line.send("who", nonce=ours)
        if (said := line.receive()) is None or said.kind != "join":
            return None
        values = [said.fields.get(name) for name in ("nonce", "node", "node_rank", "count", "process")]
        if not _is_same(said.fields.get("proof"), _proof(secret, "follower", ours, *values)):
            return None
        line.send("welcome", proof=_proof(secret, "first node", ours, said.fields["nonce"]))
        return said.fields


def introduce(line: Line, secret: bytes, node_rank: int | None, count: int, process: str = "") -> bool:
    """Introduces a follower; returns whether the other end is the first node.

    Args:
        line: The connection to it.
        secret: The secret, see :func:`read_secret`.
        node_rank: The number of this node, if it was given one.
        count: How many ranks it has.
        process: Distinguishes this process from others with the same number.
    """
    with line.limited(deadlines.NODE_JOINS_WITHIN_S):
        if (who := line.receive()) is None or who.kind != "who":
            return False
        ours, theirs, node = secrets.token_hex(), who.fields.get("nonce"), node_name()
        proof = _proof(secret, "follower", theirs, ours, node, node_rank, count, process)
        line.send("join", nonce=ours, node=node, node_rank=node_rank, count=count, process=process, proof=proof)
        said = line.receive()
        expected = _proof(secret, "first node", theirs, ours)
        return said is not None and said.kind == "welcome" and _is_same(said.fields.get("proof"), expected)
