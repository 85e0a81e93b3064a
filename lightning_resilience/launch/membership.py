"""A rank's own view of its generation under ``launch --elastic``, from its channel to the supervisor.

The messages are those of :mod:`~lightning_resilience.launch.channel`. A generation is one start of a process group. Its
number is the restart count, and it has a store, hence a port, of its own, like each restart by torch's elastic
launcher.

With ``--when-lost go-on`` a generation may be without some of the ranks, even without ranks whose processes live. The
*slot* of a process is the rank that it had, or would have had, in the first generation. Its rank in a generation is the
position of its slot among the slots of the members.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from lightning_resilience.agreement_protocol import PeerLost
from lightning_resilience.launch import standstill
from lightning_resilience.launch.channel import Channel, Message, of_worker
from lightning_resilience.run.deadlines import (
    LOSS_CONFIRMED_WITHIN_S,
    NEXT_BOUNDARY_WITHIN_S,
    OWN_ERROR_RAISED_AFTER_S,
)
from lightning_resilience.run.run_directory import ELASTIC_VARIABLE, JOINS_VARIABLE

_OF_PEERS = re.compile(r"gloo|connect|peer|socket|recv|broken pipe|timed? ?out|store|rank", re.IGNORECASE)
_JUDGED = "lightning_resilience_is_own"


@dataclass(frozen=True)
class Replacement:
    """Another generation begins: ranks were lost, or come back.

    Args:
        generation: Its number.
        port: The port of its store.
        lost: The slots of the lost ranks, and how each of them has ended; empty: ranks come back, or leave with their
            node.
        members: The slots of its members, in the order of their ranks.
        is_start: Whether all members are started for it.
    """

    generation: int
    port: int
    lost: dict[int, str]
    members: tuple[int, ...]
    is_start: bool = False

    def __str__(self) -> str:
        return ", ".join(f"rank {rank} ({how})" for rank, how in sorted(self.lost.items()))


class Membership:
    """This process as one of the ranks of ``launch --elastic``.

    Args:
        channel: The channel to the supervisor.
        generation: The generation that this process was started for.

    Attributes:
        generation: The generation in which this process is.
        slot: The slot of this process.
        slots: The slots of all ranks.
        members: The slots of the members of its generation, in the order of their ranks.
        is_start: Whether all members were started for it.
        cut: Called in the thread of the channel when a rank was lost or all ranks are ended: frees a main thread that
            waits for other ranks.
        leave_together: Called in the thread of the channel when no rank was lost: makes all ranks leave the fit at one
            boundary. If they do not reach it in time, :attr:`cut` is called. ``None``: :attr:`cut` is called at once.
        is_leaving: Whether all ranks have reached that boundary.
        why_not_fewer: Why other ranks cannot train on the data of lost ranks; empty: they can; ``None``: not known yet.
        stop: Called in the thread of the channel when all ranks must save and end.
        is_stopping: Whether all ranks must save and end.
        begin_generation: Called in the main thread when a generation begins.
    """

    def __init__(self, channel: Channel, generation: int) -> None:
        self.generation, self.is_start = generation, True
        self.slot = int(os.environ.get("RANK", "0"))
        self.slots = self.members = tuple(range(int(os.environ.get("WORLD_SIZE", "1"))))
        self._on_a_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(len(self.slots))))
        self.cut: Callable[[], None] = lambda: None
        self.leave_together: Callable[[], None] | None = None
        self.is_leaving = False
        self.why_not_fewer: str | None = None
        self.stop: Callable[[], None] = lambda: None
        self.is_stopping = False
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
        """Whether the generation of this process is over: a rank was lost, or all ranks are ended."""
        return self._announced > self.generation

    @property
    def is_at_door(self) -> bool:
        """Whether this process is in no generation yet and waits to be admitted into one."""
        return JOINS_VARIABLE in os.environ

    @property
    def is_without_some(self) -> bool:
        """Whether ranks are absent in the generation of this process."""
        return len(self.members) < len(self.slots)

    def ranks(self, slots: Iterable[int]) -> set[int]:
        """The ranks that these slots have in the generation of this process, if they are members of it."""
        return {self.members.index(slot) for slot in slots if slot in self.members}

    def gone(self, replacement: Replacement) -> set[int]:
        """The ranks of this generation that are not in the next one: lost, ended, or waiting for their group."""
        apart = [slot for slot in self.members if slot not in replacement.members]
        return self.ranks([*replacement.lost, *apart])

    @property
    def nodes(self) -> list[list[int]]:
        """For each node with members: the local ranks that these had at first, in the order of their present ranks."""
        return [[local for _, local in its] for _, its in groupby(map(self._place, self.members), itemgetter(0))]

    @property
    def node(self) -> int:
        """The position of the node of this process in :attr:`nodes`."""
        return sorted({self._place(slot)[0] for slot in self.members}).index(self._place(self.slot)[0])

    def _place(self, slot: int) -> tuple[int, int]:
        return divmod(slot, self._on_a_node)

    def _environment(self) -> dict[str, int]:
        """The environment variables that define the rank of this process."""
        rank, world_size, nodes = self.members.index(self.slot), len(self.members), self.nodes
        here = nodes[self.node]
        return {
            **dict.fromkeys(("RANK", "ROLE_RANK"), rank),
            **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), world_size),
            "LOCAL_RANK": here.index(self._place(self.slot)[1]),
            "LOCAL_WORLD_SIZE": len(here),
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": len(nodes),
        }

    def say(
        self,
        state: str,
        reason: str = "",
        fewer: str | None = None,
        tasks: str = "",
        group: int = 1,
        has_trained: bool = False,
    ) -> None:
        """Reports the state of this rank to the supervisor; can be called in any thread."""
        what: dict[str, Any] = {"reason": reason, "fewer": fewer, "tasks": tasks, "group": group}
        what["has_trained"] = has_trained
        self._channel.send("state", state=state, generation=self.generation, **what)

    def reach_boundary(self) -> None:
        """Notes that all ranks have reached the boundary where they leave the fit: they have time to save there."""
        self.is_leaving = True
        self.say("leaving")

    @property
    def goes_on(self) -> bool:
        """Whether the other ranks keep training when a rank is lost."""
        return os.environ.get(ELASTIC_VARIABLE) == "go_on"

    @property
    def is_told_who_stops(self) -> bool:
        """Whether a signal may be for this rank's node alone, so that the other nodes continue without it.

        A scheduler sends its signal to all processes of a node. The supervisor knows which nodes were told to stop. It
        then reports that all ranks stop, or this node leaves and its ranks end.
        """
        is_ending = self.is_stopping or self.is_over or self._restarts
        return self.goes_on and len(self.slots) > self._on_a_node and not is_ending

    def stop_if_untold(self) -> None:
        """Stops all ranks if the supervisor has not reported who stops: then the signal was for this rank alone."""
        if not self.is_stopping and not self.is_at_door and not self._is_left_out:
            self.is_stopping = True
            self.stop()

    def say_saved(self, is_usable: bool = True) -> None:
        """Reports to the supervisor whether a state to resume from exists; can be called in any thread."""
        self._channel.send("saved", is_usable=is_usable)

    def _take(self, message: Message) -> None:
        if message.kind == "stop":
            self.is_stopping = True
            return self.stop()
        generation, leave = message.fields.get("generation", sys.maxsize), self.leave_together
        if generation <= self.generation and not self.is_at_door:
            return None  # this rank has begun it before it was told that another rank could not leave the last one
        if not message.fields.get("together", False) or (leave is None and not self.is_leaving):
            self._end_generation(generation)  # before the main thread can learn of it and open the next group
        elif leave is not None and not self.is_leaving:  # otherwise the other ranks have learned of it earlier
            leave()
            late = threading.Timer(NEXT_BOUNDARY_WITHIN_S, self._end_late, (generation, leave))
            late.daemon = True
            late.start()
        with self._news:
            if message.kind == "replace":
                lost = {} if self._replacement is None else self._replacement.lost  # of one that no rank begins
                lost = lost | {int(rank): str(how) for rank, how in message.fields["lost"].items()}
                members = tuple(message.fields["members"])
                generation, port = message.fields["generation"], message.fields["port"]
                is_start = bool(message.fields.get("is_start", False))
                self._replacement = Replacement(generation, port, lost, members, is_start)
            else:
                self._restarts = True
            self._news.notify_all()
        return None

    def _end_generation(self, next_one: int) -> None:
        self._announced = next_one
        self.cut()

    def _end_late(self, next_one: int, leave: Callable[[], None]) -> None:
        """Ends the generation if this process is still in the fit: not all ranks have come to one boundary in time."""
        with self._news:  # this process does not open the next group meanwhile
            if self.leave_together is leave and not self.is_leaving and not self.is_over:
                self._end_generation(next_one)

    def replacement(self, within_s: float | None = 0.0) -> Replacement | None:
        """The replacement that is due, if any; ``None``, without a wait, when the supervisor ends all ranks.

        Args:
            within_s: How long to wait for a replacement; ``None``: without limit.
        """
        with self._news:
            self._news.wait_for(lambda: self._replacement is not None or self._restarts, within_s)
            return None if self._restarts and not self._is_left_out else self._replacement

    @property
    def _is_left_out(self) -> bool:
        """Whether another generation begins without this rank; that its node ends then is no failure."""
        return self._replacement is not None and self.slot not in self._replacement.members

    def await_admission(self) -> Replacement | None:
        """Waits until this process is admitted into a generation; ``None`` when the supervisor ends all ranks."""
        standstill.leave()
        self.say("waiting")
        return self.replacement(None)

    def _settle(self, replacement: Replacement) -> None:
        with self._news:
            if self._replacement == replacement:
                self._replacement = None
            self.generation, self.leave_together, self.is_leaving = replacement.generation, None, False
            self.is_start = replacement.is_start

    def step_back(self, replacement: Replacement) -> None:
        """Takes this process out of its generation, since a rank of its group is lost: it must be admitted again."""
        self._settle(replacement)
        os.environ[JOINS_VARIABLE] = "1"

    def await_restart(self, within_s: float) -> bool:
        """Waits until the supervisor ends all ranks; returns whether it does."""
        with self._news:
            return self._news.wait_for(lambda: self._restarts, within_s)

    def replacement_behind(self, error: Exception) -> Replacement | None:
        """The replacement that is due if ``error`` may come from the loss of a rank; ``None`` if it is the user's own.

        The supervisor notices a death within milliseconds. An error that does not look like communication waits only
        that long for its message.
        """
        if getattr(error, _JUDGED, False):
            return None
        is_of_peers = isinstance(error, (OSError, RuntimeError)) and bool(_OF_PEERS.search(str(error)))
        found = self.replacement(LOSS_CONFIRMED_WITHIN_S if is_of_peers else OWN_ERROR_RAISED_AFTER_S)
        if found is None:
            with suppress(AttributeError, TypeError):
                setattr(error, _JUDGED, True)  # the error passes here again on its way out
        return found

    def begin(self, replacement: Replacement) -> None:
        """Takes this process, and the processes that it starts, into the new generation."""
        self._settle(replacement)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(replacement.generation)
        os.environ["MASTER_PORT"] = str(replacement.port)
        if replacement.members != self.members:
            self.members = replacement.members
            os.environ.update({name: str(value) for name, value in self._environment().items()})
        os.environ.pop(JOINS_VARIABLE, None)
        self.begin_generation()
        self.say("left")


_of_process: Membership | None = None


def join() -> Membership | None:
    """Makes this process take part in the generations; ``None`` without ``launch --elastic``."""
    global _of_process
    if ELASTIC_VARIABLE in os.environ and (channel := of_worker()) is not None:
        _of_process = Membership(channel, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    return _of_process


def is_replaced() -> bool:
    """Whether another generation has begun, as far as this rank knows."""
    return (line := current()) is not None and line.replacement() is not None


def check_is_of_generation() -> None:
    """Called where another rank has visibly begun the next generation: waits for the supervisor's message about it.

    Raises:
        PeerLost: If the message has come.
    """
    if (line := current()) is not None and line.replacement(LOSS_CONFIRMED_WITHIN_S) is not None:
        raise PeerLost("the ranks of this run have changed")


def current() -> Membership | None:
    """The membership of this process; ``None`` without ``launch --elastic``, and in child processes of a rank."""
    return _of_process if _of_process is not None and _of_process.is_of_this_process else None
