"""The policy of ``launch --elastic`` when ranks end: decisions only, without processes, sockets or a clock.

The supervisor (:mod:`~lightning_resilience.launch.elastic`) reports what has happened, and does what the policy asks.

A death is repaired by a replacement if four conditions hold: the rank was killed (by a signal, or by its watchdog for a
hang) or made room because it was too slow; all other ranks are in a fit and can enter it again (see
``fit/reentry.py``); a state was saved; and the budget has a restart left. An exception that ends a rank is the user's
own, and restarts all ranks. So does a replacement that is refused or takes too long. Every wait has a deadline
(:mod:`~lightning_resilience.run.deadlines`).

The other ranks wait for the replacement (``hold``), or keep training with fewer ranks if it is not ready to take over
at once (``go_on``). In that case the replacement is a *newcomer* (:mod:`~lightning_resilience.launch.newcomers`): it
waits before its fit until it is admitted. Each such change begins a *generation* with other members. A loss counts as
a restart; admitting newcomers does not.

Groups of ranks may hold the state together, as the ranks report. Then the ranks of complete groups keep training. The
other ranks of a group that has lost a rank leave the fit, too. Their processes wait until the whole group can be
admitted.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from lightning_resilience._output import log_line
from lightning_resilience.launch.newcomers import (
    Member,
    Newcomers,
    Ranks,
    how_ended,
    in_whole_groups,
    is_replaceable,
    named,
)
from lightning_resilience.run import deadlines, exit_codes

_OVER = ("done", "needs_all")
"""States of a rank whose fit has ended."""
_ON_THE_WAY = ("leaving", "left", "starting", "waiting")
"""States of a rank that has left its fit, or begins it."""
_POLL_S = 0.5
_HEARD_POLL_S = 0.001

WhenLost = Literal["hold", "go_on"]
"""Whether the other ranks wait for the replacement of a rank, or meanwhile keep training without it."""


class LossPolicy:
    """Decides for all ranks, which have been started.

    A rank is known by its *slot*: its number in the first generation. Its number in a later generation is the position
    of its slot among the slots of the members.

    Args:
        ranks: Carries out the decisions.
        world_size: How many ranks there are.
        max_restarts: How many restarts are allowed before ``ranks`` is asked how many are left.
        term_timeout_s: How long the ranks may take to end after a stop was asked for.
        when_lost: Whether the other ranks wait for a replacement for which no spare is ready.
        min_ranks: With ``go_on``, the other ranks also wait if fewer ranks than this would keep training.

    Attributes:
        members: The ranks of the present generation.
        generation: The number of the present generation.
        restarts: How many restarts have happened: one for each loss, for each newcomer that was lost without its node,
            and for each restart of all ranks after a failure.
        result: Set when everything is over: 0 if all members have ended with exit code 0, otherwise 1.
        wakes_at: When :meth:`step` must be called at the latest, by its clock; earlier when something has happened.
    """

    def __init__(
        self,
        ranks: Ranks,
        world_size: int,
        max_restarts: int,
        term_timeout_s: float,
        when_lost: WhenLost = "hold",
        min_ranks: int = 1,
    ) -> None:
        self.members = {rank: Member(rank, 0) for rank in range(world_size)}
        self.generation = self.restarts = 0
        self.result: int | None = None
        self.wakes_at = math.inf
        self._ranks = ranks
        self._slots = list(range(world_size))
        self._goes_on, self._min_ranks = when_lost == "go_on", min_ranks
        self._newcomers = Newcomers(ranks)
        self._leaving: set[int] = set()
        self._leaving_since: float | None = None
        self._dismissed_soon: set[int] = set()  # slots of nodes that end when the other ranks have left the fit
        self._departing: dict[int, Member] = {}  # the processes of these slots, which leave the fit, too
        self._change: dict[str, Any] = {}  # the message about the present generation
        self._joining: set[int] = set()  # in the present generation, if no rank was lost
        self._has_lost_nobody = False  # before the present generation
        self._max_restarts = max_restarts
        self._term_timeout_s = term_timeout_s
        self._has_saved = False
        self._is_for_all = False
        self._lost_at: float | None = None
        self._replacing_since: float | None = None
        self._in_fit_since = -math.inf  # in the present generation
        self._ending: list[tuple[float, signal.Signals | None]] = []  # deadlines, and the signal at each of them
        self._stop_asked = self._stop_is_late = False
        self._stops_until: float | None = None

    # -- what has happened ---------------------------------------------------------------------------------------------

    def ended(self, rank: int, exit_code: int) -> None:
        """Records that the process of a rank has ended."""
        if (member := self._life_of(rank)) is not None:
            member.exit_code = exit_code

    def heard(self, rank: int | None, kind: str, fields: Mapping[str, Any]) -> None:
        """Records a message of a rank.

        Args:
            rank: Which rank; ``None``: no present process has sent it.
            kind: The type of the message, see :mod:`~lightning_resilience.launch.channel`.
            fields: Its content, see there.
        """
        if kind == "saved":
            self._has_saved = bool(fields.get("is_usable", True))
        if kind == "state" and rank is not None and (member := self._life_of(rank)) is not None:
            member.says(fields)
            self._newcomers.group = max(self._newcomers.group, int(fields.get("group", 1)))

    def _life_of(self, rank: int) -> Member | None:
        lives = (self.members, self._departing, self._newcomers.coming, self._newcomers.leaving)
        return next((each[rank] for each in lives if rank in each), None)

    def ask_to_stop(self) -> None:
        """Asks all ranks to save and end."""
        self._stop_asked = True

    def ask_to_leave(self, slots: Collection[int]) -> None:
        """Only the nodes of these ranks must stop: the other ranks continue without them, or all ranks save and end."""
        self._leaving = set(slots)
        if not slots:
            self._leaving_since = None
            return
        left = self._in_whole_groups(slot for slot in self._slots if slot not in self._leaving)
        if not self._goes_on or self._why_not_without(left) is not None:
            self.ask_to_stop()

    @property
    def is_stopping(self) -> bool:
        """Whether all ranks were asked to save and end."""
        return self._stop_asked

    # -- what follows --------------------------------------------------------------------------------------------------

    def step(self, now: float, all_is_heard: bool) -> None:
        """Decides what follows from what has happened, and has it done.

        Args:
            now: In seconds, monotonic.
            all_is_heard: Whether every message that ranks had sent before they ended was passed on.
        """
        self.wakes_at = now + _POLL_S
        codes = [member.exit_code for member in self.members.values()]
        if self._ending or self._replacing_since is None or any(codes) or None not in codes:
            self._dismiss(now)  # the others do not come to a boundary any more
        if not self._ending and self._stops_until is None:
            self._look_after_newcomers(now)
        if self._ending:
            self._go_on_ending(now)
        elif None not in codes and (self._stops_until is not None or not any(codes)):
            self._newcomers.end(now)
            if self._newcomers.have_left(now):
                self.result = 1 if any(codes) else 0
        elif self._stops_until is not None:
            if now > self._stops_until:
                self._ranks.send_signal(self._living(), signal.SIGKILL)
        elif any(codes) and not self._ends_without_newcomers():
            if self._stop_asked:  # the lost rank had no time to save, and the other ranks cannot save without it
                self._stop(now)
            elif self._are_all_lost_that_will(now, all_is_heard):
                self._mend(now)
        elif self._replacing_since is not None:
            self._check_replacement(now, now - self._replacing_since)
            self._report_late_stop()
        elif self._stop_asked:  # not while ranks are replaced: they could not save
            self._stop(now)
        elif self._need_all():
            self._is_for_all = True
            reason = next(each.reason for each in self.members.values() if each.state == "needs_all")
            log_line(f"Restarting all ranks: {reason}.", is_detail=True)
            self._end_all(now)
        elif self._leaving and any(each.state in ("refused", *_OVER) for each in self.members.values()):
            self.ask_to_stop()
            self._stop(now)
        elif self._leaving and self._are_in_fit():
            # A scheduler that stops all nodes does not reach them at once.
            self._leaving_since = now if self._leaving_since is None else self._leaving_since
            leaves_at = self._leaving_since + deadlines.STOP_REACHES_ALL_WITHIN_S
            self.wakes_at = min(self.wakes_at, leaves_at)
            if now >= leaves_at:
                self._shrink(now)
        elif self._take_part_in_steps() and (opens_at := self._newcomers.opens_at(now)) is not None:
            opens_at = max(opens_at, self._in_fit_since + deadlines.TRAINS_BEFORE_OTHERS_COME_S)
            self.wakes_at = min(self.wakes_at, opens_at)
            if now >= opens_at:
                self._grow(now)

    def _living(self) -> list[int]:
        members = [member.rank for member in self.members.values() if member.exit_code is None]
        return [*members, *self._newcomers.living]

    def _stop(self, now: float) -> None:
        self._stops_until = now + self._term_timeout_s
        self._newcomers.end(now)
        self._ranks.send_signal(self._living(), signal.SIGTERM)

    def _report_late_stop(self) -> None:
        """Reports once if a stop must wait until the ranks are together again."""
        awaited = [each.rank for each in self.members.values() if each.state not in ("ready", *_OVER)]
        if self._stop_asked and not self._stop_is_late and awaited and self._replacing_since is not None:
            self._stop_is_late = True
            have = "has" if len(awaited) == 1 else "have"
            log_line(f"Stopping as soon as {named(awaited)} {have} entered the fit; nothing can be saved before.")

    def _look_after_newcomers(self, now: float) -> None:
        if self._stop_asked or any(member.state in _OVER for member in self.members.values()):
            self._newcomers.end(now)  # no fit is left that they could join
        since, within_s = self._in_fit_since, deadlines.IMPORTS_GO_ON_AFTER_S
        if self._replacing_since is not None:
            since, within_s = self._replacing_since, deadlines.IMPORTS_STAND_STILL_FOR_S
        self._newcomers.look_after(now, self.generation, self._next_restart, now >= since + within_s)
        if self._newcomers.later:
            self.wakes_at = min(self.wakes_at, max(now, since + within_s))

    def _need_all(self) -> bool:
        """Whether every living member begins another fit; before, one of them may still do something else alone."""
        states = [each.state for each in self.members.values() if each.exit_code is None]
        return bool(states) and all(state == "needs_all" for state in states)

    def _are_in_fit(self) -> bool:
        return all(each.state == "ready" and each.generation == self.generation for each in self.members.values())

    def _take_part_in_steps(self) -> bool:
        """Whether newcomers can be admitted: all members are in the fit, and none of them only ends it."""
        return self._are_in_fit() and not any(each.has_trained for each in self.members.values())

    def _are_all_lost_that_will(self, now: float, all_is_heard: bool) -> bool:
        """Whether ranks that die together have had time to end, and messages of the lost ranks were read."""
        if self._lost_at is None:
            self._lost_at = now
        if any(each.exit_code is None and self._ranks.lost_node(each.rank) for each in self.members.values()):
            return False  # the supervisor is about to learn that these have ended, too
        are_hung = any(member.exit_code == exit_codes.HUNG for member in self.members.values())
        together_s = deadlines.HUNG_DIE_TOGETHER_WITHIN_S if are_hung else deadlines.DIE_TOGETHER_WITHIN_S
        until = self._lost_at + together_s
        self.wakes_at = max(until, now + _HEARD_POLL_S)
        return now >= until and (all_is_heard or now >= self._lost_at + deadlines.WORDS_HEARD_WITHIN_S)

    def _check_replacement(self, now: float, seconds: float) -> None:
        """Checks whether the ranks of a new generation have come together, or never will."""
        members = self.members.values()
        # If no rank was lost, the ranks agree in the old store at which boundary they leave, and save there.
        are_saving = any(each.state == "leaving" for each in members)
        are_late = seconds > deadlines.NEXT_BOUNDARY_WITHIN_S + are_saving * deadlines.SAVED_TOGETHER_WITHIN_S
        behind = [each.rank for each in members if each.generation < self.generation]
        has_died = any(each.exit_code for each in self._departing.values())
        if behind and self._change.get("together") and (has_died or (are_saving and are_late)):
            # Not all ranks would notice that they cannot come to the boundary, or save there.
            self._change["together"] = False
            self._ranks.tell(behind, "replace", **self._change)
        if are_late or has_died or not behind:
            self._ranks.close_old_store()
            self._dismiss(now)
        if refusal := next((member for member in members if member.state == "refused"), None):
            self._restart(now, f"rank {refusal.rank} cannot go back: {refusal.reason}")
        elif all(member.state in ("ready", *_OVER) and member.generation == self.generation for member in members):
            self._joining, self._replacing_since = set(), None
            self._in_fit_since = self.wakes_at = now
        elif self._are_too_late(seconds):
            self._turn_away(now)
        elif seconds > deadlines.REPLACED_WITHIN_S:
            self._restart(now, f"the replacement has not begun to train within {seconds:.0f} s")
        elif seconds > deadlines.SURVIVORS_LEAVE_WITHIN_S:
            for member in members:
                is_behind = member.generation < self.generation
                if member.exit_code is not None or (member.state in _OVER and is_behind):
                    return self._restart(now, f"rank {member.rank} has ended instead of joining the others")
                if member.state == "ready" and is_behind:
                    return self._restart(now, f"rank {member.rank} has not left the fit within {seconds:.0f} s")
        return None

    def _ends_without_newcomers(self) -> bool:
        """Whether only newly admitted ranks are lost, and another rank had ended its fit before it knew of them."""
        lost = {each.rank for each in self.members.values() if each.exit_code}
        return lost <= self._joining and any(map(self._has_missed, self.members.values()))

    def _has_missed(self, member: Member) -> bool:
        """Whether a rank has ended its fit before it could learn that newcomers are admitted."""
        is_behind = member.generation < self.generation and member.rank not in self._joining
        return member.state in _OVER and is_behind and not member.exit_code

    def _are_too_late(self, seconds: float) -> bool:
        """Whether all other ranks have ended their fit like that, so that none of them can enter it again."""
        others = [each for each in self.members.values() if each.rank not in self._joining]
        is_late = seconds > deadlines.SURVIVORS_LEAVE_WITHIN_S or all(each.exit_code == 0 for each in others)
        return self._has_lost_nobody and is_late and all(map(self._has_missed, others))

    def _turn_away(self, now: float) -> None:
        self._newcomers.end(now, [self.members.pop(slot) for slot in sorted(self._joining)])
        self._joining, self._replacing_since, self._lost_at = set(), None, None
        self.wakes_at = now

    def _mend(self, now: float) -> None:
        """Replaces the ranks that have ended, continues without them, or restarts all ranks."""
        self._lost_at = None
        dead = [member for member in self.members.values() if member.exit_code]
        failed = {each.rank for each in dead if each.rank in self._joining and not is_replaceable(each.exit_code)}
        nodes = {member.rank: self._ranks.lost_node(member.rank) for member in dead}
        how = {
            each.rank: how_ended(each.exit_code or 0) if (node := nodes[each.rank]) is None else f"was lost with {node}"
            for each in dead
        }
        # A lost node is reported in one sentence, however many ranks it has.
        whole = {node: [rank for rank, its in nodes.items() if its == node] for node in nodes.values() if node}
        who = ", ".join(
            [f"rank {rank} {what}" for rank, what in sorted(how.items()) if nodes[rank] is None]
            + [f"{named(its)} {'was' if len(its) == 1 else 'were'} lost with {node}" for node, its in whole.items()]
        )
        if not self._may_restart():
            log_line(f"{who[0].upper()}{who[1:]}; no restart inside the job is left.")
            return self._end_all(now)
        left = [rank for rank in self.members if rank not in how]
        self._newcomers.given_up |= failed
        members, able = self._members_after(left), self._in_whole_groups(left)
        if (reason := self._why_not([each for each in dead if each.rank not in failed], members)) is not None:
            return self._restart(now, f"{who}, and {reason}")
        self.restarts += 1
        goes_on = members == able
        who, is_one = f"{who[0].upper()}{who[1:]}", len(how) == 1
        if goes_on:
            then = ""
            if how.keys() - failed:
                then = " Its replacement joins them when it is" if is_one else " Replacements join them when they are"
                then += " ready."
            if apart := [slot for slot in left if slot not in able]:
                what = "has shards of its group and waits" if len(apart) == 1 else "have shards of its group and wait"
                then += f" R{named(apart)[1:]} {what} for {'it' if is_one else 'them'}."
            log_line(f"{who}: continuing with {self._count(members)} (restart {self.restarts}).{then}")
        else:
            waits = self._why_not_without(able) if self._goes_on else None
            then = "" if waits is None else f" They wait for {'it' if is_one else 'them'}: {waits}."
            what = f"{'a replacement' if is_one else 'replacements'} (restart {self.restarts})"
            log_line(f"{who}: starting {what}. The other ranks keep their processes.{then}")
        self._begin_generation(now, members, how)
        if goes_on:
            self._newcomers.later |= how.keys() - failed
        return None

    def _count(self, members: Collection[int]) -> str:
        return f"{len(members)} of {len(self._slots)} ranks"

    def _members_after(self, left: list[int]) -> list[int]:
        """The members of the generation after a loss: the ranks that are left, with replacements or without them."""
        given_up, able = self._newcomers.given_up, self._in_whole_groups(left)
        members = self._in_whole_groups(slot for slot in self._slots if slot not in given_up)
        if given_up and self._why_not_without(members) is not None:
            members = self._slots
        ready = [*left, *self._newcomers.waiting]
        is_ready = all(slot in ready or self._ranks.has_spare(slot) for slot in members) if self._goes_on else True
        return members if is_ready or self._why_not_without(able) is not None else able

    def _in_whole_groups(self, slots: Iterable[int]) -> list[int]:
        return in_whole_groups(slots, self._newcomers.group)

    def _why_not_without(self, left: Collection[int]) -> str | None:
        """Why these ranks cannot continue without the other ranks; ``None``: they can."""
        if not left:
            return "no group of ranks that hold the whole state is left"
        if len(left) < self._min_ranks:
            return f"--min-ranks requires at least {self._min_ranks} ranks"
        said = [(each.fewer, each.tasks) for each in self.members.values() if each.fewer is not None]
        if not said:
            return "it is not known yet whether the fit can go on with fewer ranks"
        of_tasks = [tasks for _, tasks in said] if 0 not in left else []
        return next(filter(None, (*(fewer for fewer, _ in said), *of_tasks)), None)

    def _grow(self, now: float) -> None:
        """Admits the newcomers that are waiting."""
        who = self._newcomers.at_door
        members = sorted([*self.members, *who])
        are = f"R{named(who)[1:]} {'is' if len(who) == 1 else 'are'}"
        log_line(f"{are} back: continuing with {self._count(members)}.")
        self._begin_generation(now, members, {})

    def _shrink(self, now: float) -> None:
        """Continues without the ranks whose nodes must stop."""
        leaving, self._leaving_since = self._leaving, None
        left = self._in_whole_groups(slot for slot in self.members if slot not in leaving)
        if self._why_not_without(left) is not None:  # fewer ranks are left than when the nodes were told to stop
            return self.ask_to_stop()
        self._newcomers.later -= leaving
        self._newcomers.end(now, [each for slot, each in self._newcomers.coming.items() if slot in leaving])
        log_line(f"The node of {named(leaving)} was told to stop: continuing with {self._count(left)}.")
        self._dismissed_soon = {*leaving}
        if len(left) < len(self.members):
            return self._begin_generation(now, left, {}, leaving)
        return self._dismiss(now)

    def _dismiss(self, now: float) -> None:
        """Has the nodes end that were told to stop, as soon as no other rank needs their ranks."""
        if slots := self._dismissed_soon:
            self._dismissed_soon, self._departing = set(), {}
            if nodes := slots & self._leaving:  # none that has come in the place of one of them
                self._ranks.dismiss(nodes)
            self._newcomers.start(sorted(slots - self._newcomers.given_up), self.generation, now)

    def _begin_generation(
        self, now: float, members: list[int], lost: Mapping[int, str], leaving: Collection[int] = ()
    ) -> None:
        """Begins a generation with these members: starts members without a process, and makes other ranks wait.

        Args:
            now: See :meth:`step`.
            members: The slots of its members.
            lost: The ranks that were lost, and how each of them has ended.
            leaving: The ranks that end with their node.
        """
        self.generation += 1
        gone = {*members, *lost, *leaving}
        apart = {slot: each for slot, each in self.members.items() if slot not in gone}
        kept = [rank for rank in self.members if rank in members and rank not in lost]
        record = (lost, self.generation, members if self._goes_on else None, kept)
        if not lost:  # recorded first: the ranks look in the ledger whether the generation counts as a restart
            self._ranks.record(*record)
        change = {"generation": self.generation, "port": self._ranks.open_store(), "lost": lost, "members": members}
        # A rank that only ends its fit comes to no boundary any more.
        change["together"] = together = not lost and not any(each.has_trained for each in self.members.values())
        self._departing, self._change = {slot: each for slot, each in self.members.items() if slot in leaving}, change
        there = {rank: self.members[rank] for rank in kept}
        there |= self._newcomers.take([slot for slot in members if slot in self._newcomers.coming])
        self._ranks.tell(sorted([*there, *apart, *self._departing]), "replace", **change)
        self._newcomers.send_back(apart, now)
        if not together:
            self._ranks.close_old_store()
        new = [rank for rank in members if rank not in there]
        self.members = {rank: there[rank] if rank in there else self._begin_life(rank, now) for rank in members}
        if new:
            self._ranks.start(new, self.generation, is_newcomer=self._goes_on)
        if new and self._goes_on:
            self._ranks.tell(new, "replace", **change)
        self._newcomers.given_up.difference_update(members)
        self._newcomers.later.difference_update(members)
        self._joining, self._has_lost_nobody = set() if lost else {*members}.difference(kept), not lost
        self._replacing_since = self.wakes_at = now
        if lost:
            self._ranks.record(*record)

    def _begin_life(self, rank: int, now: float) -> Member:
        """A rank whose process is started; what its fit can do is known from its last process, or from another rank."""
        of_all = [*filter(None, [self.members.get(rank)]), *self.members.values()]
        known = next((each for each in of_all if each.fewer is not None), Member(rank, self.generation))
        return Member(rank, self.generation, now, fewer=known.fewer, tasks=known.tasks)

    def _why_not(self, dead: list[Member], members: Collection[int]) -> str | None:
        """Why a loss is not repaired by a generation of these members; ``None``: it is."""
        if nodes := {*filter(None, map(self._ranks.lost_node, members))}:
            return f"{' and '.join(sorted(nodes))} {'has' if len(nodes) == 1 else 'have'} not been replaced"
        if not all(is_replaceable(member.exit_code) for member in dead):
            return "what an exception ends is not replaced"
        if not self._has_saved:
            return "nothing was saved yet"
        others = [member for member in self.members.values() if not member.exit_code]
        if not others:
            return "there is no other rank"
        for member in others:
            is_starting = self._replacing_since is not None and member.state in _ON_THE_WAY
            if member.state != "ready" and not is_starting:
                return f"rank {member.rank} is not in a fit" + (f": {member.reason}" if member.reason else "")
        if leaving := self._newcomers.leaving.keys() & set(members):
            return f"the last process of rank {min(leaving)} has not ended yet"
        return None

    def _may_restart(self) -> bool:
        if self.restarts >= self._max_restarts:  # as many as were left at the start; ranks may have advanced since
            self._max_restarts = self.restarts + self._ranks.restarts_left()
        return self.restarts < self._max_restarts

    def _next_restart(self) -> int | None:
        """Counts one restart and returns its number; ``None``: none is left."""
        if not self._may_restart():
            return None
        self.restarts += 1
        return self.restarts

    def _restart(self, now: float, reason: str) -> None:
        """Ends all ranks, and starts them again if a restart is left."""
        if not self._may_restart():
            log_line(f"All ranks end: {reason}; no restart inside the job is left.")
        else:
            log_line(f"Restarting all ranks: {reason}.", is_detail=True)
        self._end_all(now)

    def _end_all(self, now: float) -> None:
        self._ranks.tell(self._living(), "restart")
        if self._replacing_since is not None:
            self._ranks.close_stores()
        self._joining, self._replacing_since = set(), None
        until = now
        for within_s, signum in (
            (deadlines.PEERS_RAISE_WITHIN_S, signal.SIGTERM),
            (deadlines.WORKERS_STOP_TIMEOUT_S, signal.SIGKILL),
            (deadlines.LEFTOVERS_PATIENCE_S, None),
        ):
            until += within_s
            self._ending.append((until, signum))
        self.wakes_at = now

    def _go_on_ending(self, now: float) -> None:
        """Waits until all ranks have ended; then starts them again, or sets the result."""
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
        is_free = self._is_for_all  # no rank was lost
        if self._stop_asked or not (is_free or self.restarts < self._max_restarts):
            self.result = 1
            return
        self.generation += 1
        self.restarts += not is_free
        self._newcomers.forget()
        port = self._ranks.open_store()
        self._ranks.close_old_store()
        members = self._members_after_restart()
        if is_free:  # recorded first: the ranks look in the ledger whether the generation counts as a restart
            self._is_for_all = False
            self._ranks.record({}, self.generation, members, [])
        self._start_all(now, members, port)

    def begin_with(self, now: float, members: list[int], port: int) -> None:
        """Begins with some of the ranks: a state to resume from exists, and the nodes of the other ranks are absent.

        Args:
            now: See :meth:`step`.
            members: The slots of the ranks that are present.
            port: The port of the store of the first generation.
        """
        self._has_saved = True
        self._start_all(now, members, port)

    def _start_all(self, now: float, members: list[int], port: int) -> None:
        self.members = {rank: self._begin_life(rank, now) for rank in members}
        is_without = members != self._slots
        self._ranks.start(members, self.generation, is_newcomer=is_without)
        if is_without:
            change = {"generation": self.generation, "port": port, "lost": {}, "members": members, "together": False}
            self._ranks.tell(members, "replace", **change, is_start=True)
            self._replacing_since = now
            self._newcomers.start([slot for slot in self._slots if slot not in members], self.generation, now)

    def _members_after_restart(self) -> list[int]:
        """The slots to start again: those whose nodes are present, if they can continue alone; otherwise all slots."""
        there = self._in_whole_groups(slot for slot in self._slots if self._ranks.lost_node(slot) is None)
        if not self._goes_on or there == self._slots:
            return self._slots
        why_not = self._why_not_without(there) if self._has_saved else "no state was saved that they can go back to"
        if why_not is None:
            return there
        log_line(f"Not continuing with {self._count(there)}: {why_not}.")
        return self._slots
