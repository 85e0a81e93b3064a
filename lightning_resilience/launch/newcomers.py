"""Ranks that are lost under ``launch --elastic --when-lost go-on``, and on their way back while the others go on.

A *newcomer* runs the script up to its first fit and waits there, at the *door*, until it is taken into a generation
(:mod:`~lightning_resilience.launch.loss_policy`). One that is killed before is started again, if the budget has a
restart left. What it raises itself gives its slot up, and so does a start that takes too long: others must not end
because of it. One whose node is lost is started when that is back, or another has come in its place.

Where groups of ranks hold the state together, a group is taken in when all its ranks are at the door. A rank that has
lost another one of its group goes back there with its process.
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
    """What can be done with the ranks, which are known by their slots: the numbers that they had in the first start."""

    def open_store(self) -> int:
        """Serves the store of another generation, beside that of the one before; returns its port."""

    def close_old_store(self) -> None:
        """Closes that of the generation before, if it is open: whoever is blocked there is free."""

    def close_stores(self) -> None:
        """Closes that of the present generation, too: nobody waits there for ranks that do not come."""

    def start(self, ranks: Collection[int], generation: int, is_newcomer: bool) -> None:
        """Starts processes for ranks whose last ones have ended; newcomers wait at the door."""

    def has_spare(self, rank: int) -> bool:
        """Whether a process waits for the place of this rank that has its imports done."""

    def lost_node(self, rank: int) -> str | None:
        """The name of the node of this rank, if it is lost and none has come in its place."""

    def dismiss(self, ranks: Collection[int]) -> None:
        """Has the nodes of these ranks end, which were told to stop: from here on they are lost."""

    def tell(self, ranks: Collection[int], kind: str, **fields: Any) -> None:
        """Sends ranks a message, see :mod:`~lightning_resilience.launch.channel`."""

    def send_signal(self, ranks: Collection[int], signum: signal.Signals) -> None:
        """Sends ranks a signal."""

    def restarts_left(self) -> int:
        """How many restarts there may be from now on, by what the run has recorded of its failures and its progress."""

    def record(
        self, lost: Mapping[int, str], generation: int, members: Collection[int] | None, kept: Collection[int]
    ) -> None:
        """Records a change of the ranks.

        Args:
            lost: How each rank that was lost has ended; empty: newcomers are taken in, or ranks leave.
            generation: The one that begins.
            members: Who is in it; ``None``: all ranks, always.
            kept: Who keeps its process.
        """


@dataclass
class Member:
    """A rank in its present life.

    Args:
        rank: Its slot.
        generation: The generation in which it is, as it says.
        since: When it was started; for the policy's clock.
        state: What it has said last; ``starting``: nothing since it was started.
        reason: Why it has refused.
        fewer: Why its fit cannot go on with fewer ranks; empty: it can; ``None``: neither it nor a process of its slot
            before it knows it.
        tasks: Why no other rank can take those of rank 0; said together.
        has_trained: Whether it has no batch any more, and only ends its fit.
        exit_code: How its process has ended, as ``subprocess`` gives it: of a signal the negative number.
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
        """It has said in which state it is."""
        self.state, self.generation = str(fields["state"]), int(fields["generation"])
        self.reason, self.has_trained = str(fields["reason"]), bool(fields.get("has_trained"))
        if self.state == "ready" and fields.get("fewer") is not None:
            self.fewer, self.tasks = (str(fields[name]) for name in ("fewer", "tasks"))


def is_replaceable(exit_code: int | None) -> bool:
    """Whether a rank that ended so was killed, or has made room; what an exception ends is the user's own."""
    return exit_code is not None and (exit_code < 0 or exit_code in (exit_codes.HUNG, exit_codes.TOO_SLOW))


def how_ended(exit_code: int) -> str:
    """A clause on how a rank has ended."""
    if exit_code == exit_codes.HUNG:
        return "hung and was ended by its watchdog"
    death = Death(-exit_code if exit_code < 0 else exit_code << 8)
    return str(death).removesuffix(" in the middle of the fit")  # only a watchdog knows where it was


def named(ranks: Collection[int]) -> str:
    """These ranks, in a sentence."""
    *others, last = map(str, sorted(ranks))
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def in_whole_groups(slots: Iterable[int], group: int) -> list[int]:
    """Those of these slots of which the whole group is among them: groups are of slots one after the other."""
    here = sorted(slots)
    counts = Counter(slot // group for slot in here)
    return [slot for slot in here if counts[slot // group] == group]


class Newcomers:
    """Those that are on their way.

    Args:
        ranks: Starts and ends them.

    Attributes:
        coming: Those that were started and are in no generation yet, by slot.
        leaving: Those that are being ended.
        away: Slots whose node is lost: they are started when there is one.
        later: Slots that are started when the others are in their fit, on whose way there they would take cores.
        given_up: Slots for which none is started any more.
        group: How many ranks hold the state together, as they say.
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
        """Starts newcomers, as soon as their nodes are there."""
        away = {slot for slot in slots if self._ranks.lost_node(slot) is not None}
        self.away |= away
        if here := sorted({*slots} - away):
            self.coming.update({slot: Member(slot, generation, now) for slot in here})
            self._ranks.start(here, generation, is_newcomer=True)

    @property
    def waiting(self) -> list[int]:
        """The slots of those that are at the door."""
        return sorted(slot for slot, each in self.coming.items() if each.state == "waiting" and each.exit_code is None)

    @property
    def at_door(self) -> list[int]:
        """The slots of those that can be taken in: whole groups."""
        return in_whole_groups(self.waiting, self.group)

    def send_back(self, members: Mapping[int, Member], now: float) -> None:
        """These members have lost a rank of their group: they come to the door with their processes."""
        for slot, each in members.items():
            each.state, each.since = "starting", now
            self.coming[slot] = each

    @property
    def living(self) -> list[int]:
        """The slots of those whose processes have not ended."""
        return [each.rank for each in (*self.coming.values(), *self.leaving.values()) if each.exit_code is None]

    def opens_at(self, now: float) -> float | None:
        """When those at the door are taken in: at once if nobody else is on the way; ``None``: nobody is there."""
        if not (waiting := self.at_door):
            self._first_at_door = None
            return None
        if self._first_at_door is None:
            self._first_at_door = now
        broken = {slot // self.group for slot in self.given_up}
        is_last = all(slot in waiting or slot // self.group in broken for slot in self.coming)
        return now if is_last else self._first_at_door + deadlines.NEWCOMERS_GATHER_WITHIN_S

    def take(self, slots: Collection[int]) -> dict[int, Member]:
        """These are members from now on."""
        self._first_at_door = None
        return {slot: self.coming.pop(slot) for slot in slots}

    def end(self, now: float, members: Collection[Member] | None = None) -> None:
        """Ends them at once, since they have nothing to save.

        Args:
            now: Now.
            members: Which; default: all.
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
        """Whether none is left, or only processes that the kernel does not end."""
        return not any(
            each.exit_code is None and now < each.since + deadlines.LEFTOVERS_PATIENCE_S
            for each in self.leaving.values()
        )

    def look_after(self, now: float, generation: int, next_restart: Callable[[], int | None], are_in_fit: bool) -> None:
        """Starts those again that were killed, and gives up those that will not come.

        Args:
            now: Now.
            generation: The present one.
            next_restart: Counts a restart, and returns its number; ``None``: none is left.
            are_in_fit: Whether the others are in their fit.
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
            elif node is not None:  # nobody is disturbed, however often it comes and goes
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
        """All ranks are started again."""
        for each in (self.coming, self.leaving, self.away, self.later, self.given_up):
            each.clear()
        self._first_at_door = None
