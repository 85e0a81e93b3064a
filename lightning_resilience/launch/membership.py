"""What a rank knows of the ranks that ``launch --elastic`` replaces, by its channel to the supervisor.

The messages are those of :mod:`~lightning_resilience.launch.channel`. A generation is one start of a process group. It
is known by the restart count and has a store, hence a port, of its own, like each restart by torch's elastic launcher.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lightning_resilience.launch.channel import Channel, Message, of_worker
from lightning_resilience.run.deadlines import LOSS_CONFIRMED_WITHIN_S, OWN_ERROR_RAISED_AFTER_S
from lightning_resilience.run.run_directory import ELASTIC_VARIABLE

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


class Membership:
    """The part of this process in the ranks of ``launch --elastic``.

    Args:
        channel: To the supervisor.
        generation: The generation that this process was started for.

    Attributes:
        generation: The generation in which this process is.
        started_in: The generation that it was started for.
        cut: Called in the thread of the channel when a rank was lost: frees a main thread that waits for it.
        begin_generation: Called in the main thread when a generation begins.
    """

    def __init__(self, channel: Channel, generation: int) -> None:
        self.generation = self.started_in = generation
        self.cut: Callable[[], None] = lambda: None
        self.begin_generation: Callable[[], None] = lambda: None
        self._pid = os.getpid()
        self._channel = channel
        self._news = threading.Condition()
        self._replacement: Replacement | None = None
        self._restarts = False
        self._announced = generation
        channel.listen(self._take)

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process is the rank, and not a forked child of it."""
        return self._pid == os.getpid()

    @property
    def is_over(self) -> bool:
        """Whether the generation of this process has lost a rank."""
        return self._announced > self.generation

    def say(self, state: str, reason: str = "") -> None:
        """Tells the supervisor the state of this rank; for any thread."""
        self._channel.send("state", state=state, generation=self.generation, reason=reason)

    def say_saved(self) -> None:
        """Tells the supervisor that there is a state to go back to; for any thread."""
        self._channel.send("saved")

    def _take(self, message: Message) -> None:
        self._announced = message.fields.get("generation", sys.maxsize)
        self.cut()  # before the main thread can know of it, and open the next group
        with self._news:
            if message.kind == "replace":
                lost = {} if self._replacement is None else self._replacement.lost  # of a generation that none begins
                lost = lost | {int(rank): str(how) for rank, how in message.fields["lost"].items()}
                self._replacement = Replacement(message.fields["generation"], message.fields["port"], lost)
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


_of_process: Membership | None = None


def join() -> Membership | None:
    """Has this process take part from here on; ``None`` without ``launch --elastic``."""
    global _of_process
    if ELASTIC_VARIABLE in os.environ and (channel := of_worker()) is not None:
        _of_process = Membership(channel, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    return _of_process


def current() -> Membership | None:
    """The part of this process; ``None`` without ``launch --elastic``, and in child processes of a rank."""
    return _of_process if _of_process is not None and _of_process.is_of_this_process else None
