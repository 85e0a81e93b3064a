"""A rank's connection to the supervisor of ``launch --elastic``, by which it learns who is replaced.

The supervisor listens on a Unix socket in the folder of the launch, which only this user may enter. Lines of JSON go
both ways. A rank says who it is, and in which state: ``ready`` for a replacement, ``refused`` with the reason,
``left`` (it has left the fit, to enter it again), ``done``. The supervisor says ``replace``, with the new generation,
or ``restart``: this loss ends all ranks, as without ``--elastic``.

A generation is one start of a process group. It is known by the restart count and has a store, hence a port, of its
own, like each restart by torch's elastic launcher.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightning_resilience.run.deadlines import LOSS_CONFIRMED_WITHIN_S, OWN_ERROR_RAISED_AFTER_S

CHANNEL_VARIABLE = "LIGHTNING_RESILIENCE_ELASTIC"
"""Environment variable with the path of the supervisor's socket."""

_OF_PEERS = re.compile(r"gloo|connect|peer|socket|recv|broken pipe|timed? ?out|store|rank", re.IGNORECASE)
_JUDGED = "lightning_resilience_is_own"


@dataclass(frozen=True)
class Replacement:
    """Ranks were lost and are replaced.

    Args:
        generation: Number of the generation that begins.
        port: Of its store.
        lost: The ranks, and how each has ended.
    """

    generation: int
    port: int
    lost: dict[int, str]

    def __str__(self) -> str:
        return ", ".join(f"rank {rank} ({how})" for rank, how in sorted(self.lost.items()))


def lines_of(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """The messages that come, until the other end has closed."""
    rest = b""
    while True:
        try:
            data = connection.recv(1 << 16)
        except OSError:
            return
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a message; one that cannot be sent is dropped, since the process at the other end has ended."""
    with suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


class Channel:
    """The connection of this process.

    Args:
        connection: Connected to the supervisor.
        rank: Global rank.
        generation: The generation that this process was started for.

    Attributes:
        rank: Global rank.
        generation: The generation in which this process is.
        started_in: The generation that it was started for.
        cut: Called in the thread of this connection when a rank was lost: frees a main thread that waits for it.
        begin_generation: Called in the main thread when a generation begins.
    """

    def __init__(self, connection: socket.socket, rank: int, generation: int) -> None:
        self.rank = rank
        self.generation = self.started_in = generation
        self.cut: Callable[[], None] = lambda: None
        self.begin_generation: Callable[[], None] = lambda: None
        self._pid = os.getpid()
        self._connection = connection
        self._news = threading.Condition()
        self._replacement: Replacement | None = None
        self._restarts = False
        send(connection, {"rank": rank, "pid": self._pid, "generation": generation})
        threading.Thread(target=self._listen, name="elastic-channel", daemon=True).start()

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process has connected, and is not a forked child of the one that has."""
        return self._pid == os.getpid()

    def say(self, state: str, reason: str = "") -> None:
        """Tells the supervisor the state of this rank; for any thread."""
        message = {"state": state, "generation": self.generation}
        send(self._connection, message | ({"reason": reason} if reason else {}))

    def _listen(self) -> None:
        for message in lines_of(self._connection):
            self.cut()  # before the main thread can know of it, and open the next group
            with self._news:
                if message["kind"] == "replace":
                    lost = {int(rank): str(how) for rank, how in message["lost"].items()}
                    self._replacement = Replacement(message["generation"], message["port"], lost)
                else:
                    self._restarts = True
                self._news.notify_all()

    def replacement(self, within_s: float = 0.0) -> Replacement | None:
        """The replacement that is due, if there is one; returns at once when the supervisor restarts all ranks.

        Args:
            within_s: How long to wait for it.
        """
        with self._news:
            self._news.wait_for(lambda: self._replacement is not None or self._restarts, within_s)
            return None if self._restarts else self._replacement

    def await_restart(self, within_s: float) -> None:
        """Returns when the supervisor restarts all ranks."""
        with self._news:
            self._news.wait_for(lambda: self._restarts, within_s)

    def replacement_behind(self, error: Exception) -> Replacement | None:
        """The replacement that is due if ``error`` may come from the loss of a rank; ``None`` if it is the user's own.

        The supervisor notices a death within milliseconds. An error that does not look like communication waits only
        that long for its word.
        """
        if getattr(error, _JUDGED, False):
            return None
        is_of_peers = isinstance(error, (OSError, RuntimeError)) and bool(_OF_PEERS.search(str(error)))
        found = self.replacement(LOSS_CONFIRMED_WITHIN_S if is_of_peers else OWN_ERROR_RAISED_AFTER_S)
        if found is None:
            with suppress(AttributeError, TypeError):
                setattr(error, _JUDGED, True)  # it passes here again on its way out
        return found

    def begin(self, replacement: Replacement) -> None:
        """This process is in the new generation from now on, and so is what it starts."""
        with self._news:
            if self._replacement == replacement:
                self._replacement = None
        self.generation = replacement.generation
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(replacement.generation)
        os.environ["MASTER_PORT"] = str(replacement.port)
        self.begin_generation()
        self.say("left")


_channel: Channel | None = None


def connect(rank: int) -> Channel | None:
    """Connects this process to the supervisor; ``None`` where there is none.

    Args:
        rank: Global rank.

    Raises:
        OSError: If the supervisor does not answer.
    """
    global _channel
    if (path := os.environ.get(CHANNEL_VARIABLE)) is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    _channel = Channel(connection, rank, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    return _channel


def current() -> Channel | None:
    """The connection of this process; ``None`` without ``launch --elastic``, and in its child processes."""
    return _channel if _channel is not None and _channel.is_of_this_process else None
