"""Ranks lost under ``launch --elastic --when-lost go-on`` that are coming back while the other ranks keep training.

A *newcomer* runs the script up to its first fit and waits there (at the *door*) until it is admitted into a generation
(:mod:`~lightning_resilience.launch.loss_policy`). If it is killed before that, it is started again if the budget has a
restart left. If it raises an exception or its start takes too long, its slot is given up: the other ranks must not end
because of it. If its node is lost, it is started when the node is back or another one has taken its place.

Where groups of ranks hold the state together, a group is admitted when all its ranks are at the door. A rank that has
lost another rank of its group returns to the door with its process.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_resilience._output import log_line
from lightning_resilience.detect.hangs.deaths import Death
from lightning_resilience.run import deadlines, exit_codes


class Ranks(Protocol):
    """What can be done with the ranks. A rank is known by its slot: its number in the first generation."""

    def open_store(self) -> int:
        """Serves a store for another generation, beside the store of the generation before; returns its port."""

    def close_old_store(self) -> None:
        """Closes the store of the generation before, if it is open: this frees every rank that is blocked in it."""

    def close_stores(self) -> None:
        """Closes the store of the present generation, too: no rank waits there for ranks that do not come."""

    def start(self, ranks: Collection[int], generation: int, is_newcomer: bool) -> None:
        """Starts processes for ranks whose last processes have ended; newcomers wait at the door."""

    def has_spare(self, rank: int) -> bool:
        """Whether a spare process that has done its imports waits for the place of this rank."""

    def lost_node(self, rank: int) -> str | None:
        """The name of the node of this rank, if the node is lost and no other node has taken its place."""

    def dismiss(self, ranks: Collection[int]) -> None:
        """Makes the nodes of these ranks end, which were told to stop: from here on they are lost."""

    def tell(self, ranks: Collection[int], kind: str, **fields: Any) -> None:
        """Sends ranks a message, see :mod:`~lightning_resilience.launch.channel`."""

    def send_signal(self, ranks: Collection[int], signum: signal.Signals) -> None:
        """Sends ranks a signal."""

    def restarts_left(self) -> int:
        """How many restarts are left, from the failures and the progress that the run has recorded."""

    def record(
        self, lost: Mapping[int, str], generation: int, members: Collection[int] | None, kept: Collection[int]
    ) -> None:
        """Records a change of the ranks.

        Args:
            lost: How each lost rank has ended; empty: newcomers are admitted, ranks leave, or all ranks start again.
            generation: The generation that begins.
            members: The slots of its members; ``None``: all ranks, always.
            kept: The ranks that keep their processes.
        """


@dataclass
class Member:
    """A rank, from the start of its present process on.

    Args:
        rank: Its slot.
        generation: The generation in which it is, as it has reported.
        since: When it was started, by the policy's clock.
        state: The last state that it has reported; ``starting``: none since it was started.
        reason: Why it has refused.
        fewer: Why its fit cannot continue with fewer ranks; empty: it can; ``None``: neither this process nor an
            earlier one of its slot has reported it.
        tasks: Why no other rank can take the tasks of rank 0; reported together with ``fewer``.
        has_trained: Whether it has no batch left and only ends its fit.
        exit_code: How its process has ended, as ``subprocess`` gives it: the negative number for a signal.
    """

    rank: int
    generation: int
    since: float = 0.0
    state: str = "starting"
    reason: str = ""
    fewer: str | None = None
    tasks: str | None = None
    has_trained: bool = False
    exit_code: int | None = None

    def says(self, fields: Mapping[str, Any]) -> None:
        """Takes over the state that the rank has reported."""
        self.state, self.generation = str(fields["state"]), int(fields["generation"])
        self.reason, self.has_trained = str(fields["reason"]), bool(fields.get("has_trained"))
        if self.state == "ready" and fields.get("fewer") is not None:
            self.fewer, self.tasks = (str(fields[name]) for name in ("fewer", "tasks"))


def is_replaceable(exit_code: int | None) -> bool:
    """Whether a rank with this exit code was killed or too slow; an exception that ends a rank is the user's own."""
    return exit_code is not None and (exit_code < 0 or exit_code in (exit_codes.HUNG, exit_codes.TOO_SLOW))


def how_ended(exit_code: int) -> str:
    """A clause on how a rank has ended."""
    if exit_code == exit_codes.HUNG:
        return "hung and was ended by its watchdog"
    return str(Death(-exit_code if exit_code < 0 else exit_code << 8))


def named(ranks: Collection[int]) -> str:
    """These ranks, as part of a sentence."""
    *others, last = map(str, sorted(ranks))
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def in_whole_groups(slots: Iterable[int], group: int) -> list[int]:
    """The slots whose whole group is among the given slots. A group has consecutive slots."""
    here = sorted(slots)
    counts = Counter(slot // group for slot in here)
    return [slot for slot in here if counts[slot // group] == group]


class Newcomers:
    """The newcomers, until they are members.

    Args:
        ranks: Starts and ends them.

    Attributes:
        coming: Newcomers that were started and are in no generation yet, by slot.
        leaving: Newcomers that are being ended, by slot.
        away: Slots whose node is lost: their newcomers are started when there is a node.
        later: Slots whose newcomers are started when the other ranks are in their fit: until then they would take CPU
            cores from these.
        given_up: Slots for which no newcomer is started any more.
        group: How many ranks hold the state together, as the ranks have reported.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.coming: dict[int, Member] = {}
        self.leaving: dict[int, Member] = {}
        self.away: set[int] = set()
        self.later: set[int] = set()
        self.given_up: set[int] = set()
        self.group = 1
        self._ranks = ranks
        self._first_at_door: float | None = None

    def start(self, slots: Collection[int], generation: int, now: float) -> None:
        """Starts newcomers; a newcomer whose node is lost is started as soon as there is a node for it."""
        away = {slot for slot in slots if self._ranks.lost_node(slot) is not None}
        self.away |= away
        if here := sorted({*slots} - away):
            self.coming.update({slot: Member(slot, generation, now) for slot in here})
            self._ranks.start(here, generation, is_newcomer=True)

    @property
    def waiting(self) -> list[int]:
        """The slots of the newcomers at the door."""
        return sorted(slot for slot, each in self.coming.items() if each.state == "waiting" and each.exit_code is None)

    @property
    def at_door(self) -> list[int]:
        """The slots of the newcomers that can be admitted: whole groups at the door."""
        return in_whole_groups(self.waiting, self.group)

    def send_back(self, members: Mapping[int, Member], now: float) -> None:
        """Makes newcomers of these members, which have lost a rank of their group and keep their processes."""
        for slot, each in members.items():
            each.state, each.since = "starting", now
            self.coming[slot] = each

    @property
    def living(self) -> list[int]:
        """The slots of the newcomers whose processes have not ended."""
        return [each.rank for each in (*self.coming.values(), *self.leaving.values()) if each.exit_code is None]

    def opens_at(self, now: float) -> float | None:
        """When the newcomers at the door are admitted: at once if no other one is coming; ``None``: there are none."""
        if not (waiting := self.at_door):
            self._first_at_door = None
            return None
        if self._first_at_door is None:
            self._first_at_door = now
        broken = {slot // self.group for slot in self.given_up}
        is_last = all(slot in waiting or slot // self.group in broken for slot in self.coming)
        return now if is_last else self._first_at_door + deadlines.NEWCOMERS_GATHER_WITHIN_S

    def take(self, slots: Collection[int]) -> dict[int, Member]:
        """Takes these newcomers out, as members from now on."""
        self._first_at_door = None
        return {slot: self.coming.pop(slot) for slot in slots}

    def end(self, now: float, members: Collection[Member] | None = None) -> None:
        """Kills newcomers at once, since they have nothing to save.

        Args:
            now: By the policy's clock.
            members: Which ones; default: all newcomers.
        """
        if members is None:
            self.later.clear()
            self.away.clear()
        for each in list(self.coming.values()) if members is None else members:
            self.coming.pop(each.rank, None)
            each.since = now
            self.leaving[each.rank] = each
            if each.exit_code is None:
                self._ranks.send_signal([each.rank], signal.SIGKILL)

    def have_left(self, now: float) -> bool:
        """Whether no ended newcomer is left; a process that the kernel does not end counts as gone after a while."""
        return not any(
            each.exit_code is None and now < each.since + deadlines.LEFTOVERS_PATIENCE_S
            for each in self.leaving.values()
        )

    def look_after(self, now: float, generation: int, next_restart: Callable[[], int | None], are_in_fit: bool) -> None:
        """Starts killed newcomers again, and gives up newcomers that will not come.

        Args:
            now: By the policy's clock.
            generation: The present generation.
            next_restart: Counts a restart and returns its number; ``None``: none is left.
            are_in_fit: Whether the other ranks are in their fit, or have had enough time to enter it.
        """
        if self.later and are_in_fit:
            slots = sorted(self.later)
            self.later.clear()
            self.start(slots, generation, now)
        self.leaving = {slot: each for slot, each in self.leaving.items() if each.exit_code is None}
        if back := sorted(slot for slot in self.away if self._ranks.lost_node(slot) is None):
            self.away.difference_update(back)
            log_line(f"A node has joined for {named(back)}: starting {'it' if len(back) == 1 else 'them'} there.")
            self.start(back, generation, now)
        for slot, each in sorted(self.coming.items()):
            who = f"The replacement of rank {slot}"
            if each.exit_code is None:
                if each.state != "waiting" and now > each.since + deadlines.REPLACED_WITHIN_S:
                    self._give_up(slot, f"{who} has not come to its fit within {deadlines.REPLACED_WITHIN_S:.0f} s")
                    self.end(now, [each])
                continue
            del self.coming[slot]
            node = self._ranks.lost_node(slot)
            how = f"{who} {how_ended(each.exit_code) if node is None else f'was lost with {node}'}"
            if not is_replaceable(each.exit_code):
                self._give_up(slot, f"{who} ended with exit code {each.exit_code} before its fit")
            elif node is not None:  # this disturbs no other rank, however often the node comes and goes
                log_line(f"{how}: starting another one when its node is back.")
                self.start([slot], generation, now)
            elif (number := next_restart()) is None:
                self._give_up(slot, f"{how}, and no restart inside the job is left")
            else:
                log_line(f"{how}: starting another one (restart {number}).")
                self.start([slot], generation, now)

    def _give_up(self, slot: int, reason: str) -> None:
        self.given_up.add(slot)
        log_line(f"{reason}: the others go on without it.")

    def forget(self) -> None:
        """Forgets all newcomers, since all ranks are started again."""
        for each in (self.coming, self.leaving, self.away, self.later, self.given_up):
            each.clear()
        self._first_at_door = None
