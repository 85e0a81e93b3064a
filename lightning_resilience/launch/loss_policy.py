"""What follows under ``launch --elastic`` when ranks end: decisions alone, without processes, sockets or a clock.

The supervisor (:mod:`~lightning_resilience.launch.elastic`) says what has happened, and does what it is asked for.

A death is mended by a replacement if the rank was killed (by a signal, or by its watchdog for a hang), all others are
in a fit and have agreed to be rejoined (see ``fit/reentry.py``), a state was saved, and the budget has a restart left.
An exception that ends a rank is the user's own, and restarts all ranks. So does a replacement that is refused or takes
too long. Every wait has a deadline (:mod:`~lightning_resilience.run.deadlines`).
"""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_resilience._output import log_line
from lightning_resilience.detect.hangs.deaths import Death
from lightning_resilience.run import deadlines, exit_codes

_POLL_S = 0.5
_HEARD_WITHIN_S = 0.5
_HEARD_POLL_S = 0.001


class Ranks(Protocol):
    """What can be done with the ranks."""

    def open_store(self) -> int:
        """Serves the store of another generation, beside that of the one before; returns its port."""

    def close_old_store(self) -> None:
        """Closes that of the generation before: whoever is blocked there is free."""

    def start(self, ranks: Collection[int], generation: int) -> None:
        """Starts processes for ranks whose last ones have ended."""

    def tell(self, ranks: Collection[int], kind: str, **fields: Any) -> None:
        """Sends ranks a message, see :mod:`~lightning_resilience.launch.channel`."""

    def send_signal(self, ranks: Collection[int], signum: signal.Signals) -> None:
        """Sends ranks a signal."""

    def record(self, lost: Mapping[int, str], generation: int) -> None:
        """Records that ranks are replaced, and how each has ended."""


@dataclass
class Member:
    """A rank in its present life.

    Args:
        rank: Its global rank.
        generation: The generation in which it is, as it says.
        state: What it has said last; ``starting``: nothing since it was started.
        reason: Why it has refused.
        exit_code: How its process has ended, as ``subprocess`` gives it: of a signal the negative number.
    """

    rank: int
    generation: int
    state: str = "starting"
    reason: str = ""
    exit_code: int | None = None


def is_replaceable(exit_code: int | None) -> bool:
    """Whether a rank that ended so was killed; what an exception ends is the user's own."""
    return exit_code is not None and (exit_code < 0 or exit_code == exit_codes.HUNG)


class LossPolicy:
    """Decides for all ranks, which have been started.

    Args:
        ranks: Does what is decided.
        world_size: How many ranks there are.
        max_restarts: How many generations may follow the first.
        term_timeout_s: How long the ranks may take to end when a stop was asked for.

    Attributes:
        members: The ranks.
        generation: Number of the present generation.
        result: When all is over: 0 if all ranks have ended with 0, else 1.
        lost_nodes: Names of nodes that are lost, with all their ranks; a restart is to begin when others are there.
        wakes_at: When :meth:`step` is to be called at the latest, by its clock; earlier when something has happened.
    """

    def __init__(self, ranks: Ranks, world_size: int, max_restarts: int, term_timeout_s: float) -> None:
        self.members = {rank: Member(rank, 0) for rank in range(world_size)}
        self.generation = 0
        self.result: int | None = None
        self.lost_nodes: list[str] = []
        self.wakes_at = math.inf
        self._ranks = ranks
        self._max_restarts = max_restarts
        self._term_timeout_s = term_timeout_s
        self._has_saved = False
        self._lost_at: float | None = None
        self._replacing_since: float | None = None
        self._ending: list[tuple[float, signal.Signals | None]] = []  # until when, and what is sent then
        self._is_last = self._stop_asked = False
        self._stops_until: float | None = None

    # -- what has happened ---------------------------------------------------------------------------------------------

    def ended(self, rank: int, exit_code: int) -> None:
        """The process of a rank has ended."""
        self.members[rank].exit_code = exit_code

    def heard(self, rank: int | None, kind: str, fields: Mapping[str, Any]) -> None:
        """A rank has said something.

        Args:
            rank: Which one; ``None``: its process was ended before it was heard.
            kind: See :mod:`~lightning_resilience.launch.channel`.
            fields: The same.
        """
        if kind == "saved":
            self._has_saved = True
        if kind == "state" and rank is not None:
            member = self.members[rank]
            member.state, member.generation = str(fields["state"]), int(fields["generation"])
            member.reason = str(fields["reason"])

    def ask_to_stop(self) -> None:
        """The ranks are to save and end."""
        self._stop_asked = True

    @property
    def is_stopping(self) -> bool:
        """Whether that was asked for."""
        return self._stop_asked

    # -- what follows --------------------------------------------------------------------------------------------------

    def step(self, now: float, all_is_heard: bool) -> None:
        """Has done what follows.

        Args:
            now: In seconds, monotonic.
            all_is_heard: Whether all was passed on that ranks had said before those ended that have.
        """
        self.wakes_at = now + _POLL_S
        codes = [member.exit_code for member in self.members.values()]
        if self._ending:
            self._go_on_ending(now)
        elif None not in codes and (self._stops_until is not None or not any(codes)):
            self.result = 1 if any(codes) else 0
        elif self._stops_until is not None:
            if now > self._stops_until:
                self._ranks.send_signal(self._living(), signal.SIGKILL)
        elif any(codes):
            if self._stop_asked:  # it had no time to save, and the others cannot without it
                self._stop(now)
            elif self._are_all_lost_that_will(now, all_is_heard):
                self._mend(now)
        elif self._replacing_since is not None:
            self._check_replacement(now, now - self._replacing_since)
        elif self._stop_asked:  # not while ranks are replaced: they could not save
            self._stop(now)

    def _living(self) -> list[int]:
        return [member.rank for member in self.members.values() if member.exit_code is None]

    def _stop(self, now: float) -> None:
        self._stops_until = now + self._term_timeout_s
        self._ranks.send_signal(self._living(), signal.SIGTERM)

    def _are_all_lost_that_will(self, now: float, all_is_heard: bool) -> bool:
        """Whether those were heard that have ended, and ranks that die together had the time."""
        if self._lost_at is None:
            self._lost_at = now
        are_hung = any(member.exit_code == exit_codes.HUNG for member in self.members.values())
        together_s = deadlines.HUNG_DIE_TOGETHER_WITHIN_S if are_hung else deadlines.DIE_TOGETHER_WITHIN_S
        until = self._lost_at + together_s
        self.wakes_at = max(until, now + _HEARD_POLL_S)
        return now >= until and (all_is_heard or now >= self._lost_at + _HEARD_WITHIN_S)

    def _check_replacement(self, now: float, seconds: float) -> None:
        """Looks whether the ranks of a new generation have come together, or never will."""
        members = self.members.values()
        if refusal := next((member for member in members if member.state == "refused"), None):
            self._restart(now, f"rank {refusal.rank} cannot go back: {refusal.reason}")
        elif all(member.state in ("ready", "done") and member.generation == self.generation for member in members):
            self._replacing_since = None
            self.wakes_at = now
        elif seconds > deadlines.REPLACED_WITHIN_S:
            self._restart(now, f"the replacement has not begun to train within {seconds:.0f} s")
        elif seconds > deadlines.SURVIVORS_LEAVE_WITHIN_S:
            for member in members:
                is_behind = member.generation < self.generation
                if member.exit_code is not None or (member.state == "done" and is_behind):
                    return self._restart(now, f"rank {member.rank} has ended instead of joining the others")
                if member.state == "ready" and is_behind:
                    return self._restart(now, f"rank {member.rank} has not left the fit within {seconds:.0f} s")
        return None

    def _mend(self, now: float) -> None:
        """Replaces the ranks that have ended, or restarts all."""
        self._lost_at = None
        dead = [member for member in self.members.values() if member.exit_code]
        how = {member.rank: _how(member.exit_code or 0) for member in dead}
        who = ", ".join(f"rank {rank} {what}" for rank, what in sorted(how.items()))
        if self.generation >= self._max_restarts:
            log_line(f"{who[0].upper()}{who[1:]}; no restart inside the job is left.")
            return self._end_all(now)
        if (reason := self._why_not(dead)) is not None:
            return self._restart(now, f"{who}, and {reason}")
        self.generation += 1
        log_line(
            f"{who[0].upper()}{who[1:]}: starting a replacement (restart {self.generation}). The other ranks keep "
            "their processes."
        )
        port = self._ranks.open_store()
        others = [rank for rank in self.members if rank not in how]
        self._ranks.tell(others, "replace", generation=self.generation, port=port, lost=how)
        self._ranks.close_old_store()
        self._start(how)
        self._replacing_since = self.wakes_at = now
        return self._ranks.record(how, self.generation)

    def _start(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self.members[rank] = Member(rank, self.generation)
        self._ranks.start(ranks, self.generation)

    def _why_not(self, dead: list[Member]) -> str | None:
        """Why a loss is not mended by a replacement."""
        if self.lost_nodes:
            return f"node {self.lost_nodes[0]} is lost"
        if not all(is_replaceable(member.exit_code) for member in dead):
            return "what an exception ends is not replaced"
        if not self._has_saved:
            return "nothing was saved yet"
        others = [member for member in self.members.values() if member not in dead]
        if not others:
            return "there is no other rank"
        for member in others:
            is_starting = self._replacing_since is not None and member.state in ("starting", "left")
            if member.state != "ready" and not is_starting:
                return f"rank {member.rank} is not in a fit" + (f": {member.reason}" if member.reason else "")
        return None

    def _restart(self, now: float, reason: str) -> None:
        """Ends all ranks and starts them again."""
        if self.generation >= self._max_restarts:
            log_line(f"All ranks end: {reason}; no restart inside the job is left.")
        else:
            log_line(f"Restarting all ranks: {reason}.", is_detail=True)
        self._end_all(now)

    def _end_all(self, now: float) -> None:
        self._replacing_since = None
        until = now
        for within_s, signum in (
            (deadlines.PEERS_RAISE_WITHIN_S, signal.SIGTERM),
            (deadlines.WORKERS_STOP_TIMEOUT_S, signal.SIGKILL),
            (deadlines.LEFTOVERS_PATIENCE_S, None),
        ):
            until += within_s
            self._ending.append((until, signum))
        self._ranks.tell(self._living(), "restart")
        self.wakes_at = now

    def _go_on_ending(self, now: float) -> None:
        """Waits for their end, and goes on from it."""
        until, signum = self._ending[0]
        if living := self._living():
            self.wakes_at = until
            if now < until:
                return
            if signum is not None:
                del self._ending[0]
                self.wakes_at = now
                return self._ranks.send_signal(living, signum)
        self._ending = []
        if self.generation >= self._max_restarts or self._stop_asked:
            self.result = 1
            return
        self.generation += 1
        self._ranks.open_store()
        self._ranks.close_old_store()
        self._start(tuple(self.members))


def _how(exit_code: int) -> str:
    if exit_code == exit_codes.HUNG:
        return "hung and was ended by its watchdog"
    return str(Death(-exit_code if exit_code < 0 else exit_code << 8))
