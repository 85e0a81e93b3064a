"""``launch --elastic --when-lost go-on``: what the supervisor decides, and ranks that only talk to it."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resilience.launch import loss_policy, newcomers
from lightning_resilience.launch.elastic import Supervisor
from lightning_resilience.launch.loss_policy import LossPolicy
from lightning_resilience.launch.notices import Notices
from lightning_resilience.launch.report import report
from lightning_resilience.run import deadlines
from lightning_resilience.run.failures import cause_of_end
from lightning_resilience.run.history import History
from lightning_resilience.run.interruptions import interruptions
from tests import test_launchers as launchers
from tests.harness import command
from tests.ledgers import Ledger, events_of, read_ledger
from tests.test_absent_ranks import samples, state_at_the_end, undisturbed, with_ranks
from tests.test_exact_resume import make
from tests.test_launch import wait_until
from tests.test_replacement import RANK, devices, lives  # noqa: F401  (a fixture)

# -- decisions ---------------------------------------------------------------------------------------------------------


class Run:
    """Three ranks in their fit, and what the policy has done with them."""

    def __init__(self, max_restarts: int = 5, size: int = 3, fewer: str | None = "", **options: Any) -> None:
        self.now = 0.0
        self.spares: set[int] = set()
        self.away: set[int] = set()
        self.dismissed: list[list[int]] = []
        self.started: list[list[int]] = []
        self.told: list[tuple[list[int], Any]] = []
        self.signalled: list[tuple[list[int], int]] = []
        self.recorded: list[Any] = []
        self.left = 0
        self.is_old_store_open = False
        self.policy = LossPolicy(self, size, max_restarts, 60.0, "go_on", **options)  # type: ignore[arg-type]
        for rank in range(size):
            self.say(rank, "ready", fewer)
        self.policy.heard(None, "saved", {})

    def open_store(self) -> int:
        self.is_old_store_open = True
        return 4711

    def close_old_store(self) -> None:
        self.is_old_store_open = False

    def close_stores(self) -> None:
        self.is_old_store_open = False

    def start(self, ranks: Collection[int], generation: int, is_newcomer: bool) -> None:
        assert is_newcomer == (len(ranks) < len(self.policy._slots))
        assert not self.away.intersection(ranks) or not is_newcomer
        self.started.append(sorted(ranks))

    def restarts_left(self) -> int:
        return self.left

    def has_spare(self, rank: int) -> bool:
        return rank in self.spares - self.away

    def lost_node(self, rank: int) -> str | None:
        return "b" if rank in self.away else None

    def tell(self, ranks: Collection[int], kind: str, **fields: Any) -> None:
        if ranks:
            self.told.append((sorted(ranks), fields.get("members", kind)))

    def dismiss(self, ranks: Collection[int]) -> None:
        self.dismissed.append(sorted(ranks))
        self.away |= set(ranks)

    def send_signal(self, ranks: Collection[int], signum: signal.Signals) -> None:
        if ranks:
            self.signalled.append((sorted(ranks), signum))

    def record(self, lost: Mapping[int, str], generation: int, members: Any, kept: Collection[int]) -> None:
        self.recorded.append((sorted(lost), members, sorted(kept)))

    def say(
        self,
        rank: int,
        state: str,
        fewer: str | None = "",
        tasks: str = "",
        generation: int | None = None,
        group: int = 1,
        has_trained: bool = False,
    ) -> None:
        generation = self.policy.generation if generation is None else generation
        fields = {"state": state, "generation": generation, "reason": "", "fewer": fewer, "tasks": tasks}
        self.policy.heard(rank, "state", {**fields, "group": group, "has_trained": has_trained})

    def step(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.policy.step(self.now, all_is_heard=True)

    def lose(self, *ranks: int, code: int = -signal.SIGKILL) -> None:
        for rank in ranks:
            self.policy.ended(rank, code)
        self.step()
        self.step(0.3)

    def come_together(self, fewer: str | None = "", tasks: str = "") -> None:
        for rank in self.policy.members:
            self.say(rank, "ready", fewer, tasks)
        self.step()
        self.step(deadlines.IMPORTS_GO_ON_AFTER_S)  # newcomers are started
        self.told.clear()
        self.started.clear()
        self.now += deadlines.TRAINS_BEFORE_OTHERS_COME_S


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the person at the terminal reads."""
    found: list[str] = []
    for module in (loss_policy, newcomers):
        monkeypatch.setattr(module, "log_line", lambda text, is_detail=False: found.append(text))
    return found


def test_the_others_go_on_at_once_and_take_in_who_comes_back(lines: list[str]) -> None:
    run = Run()
    run.lose(1)
    assert run.told == [([0, 2], [0, 2])]
    run.come_together()
    run.step(1.0)
    assert not run.told
    run.say(1, "waiting")
    run.step()
    assert run.told == [([0, 1, 2], [0, 1, 2])]
    assert not run.started
    assert run.recorded == [([1], [0, 2], [0, 2]), ([], [0, 1, 2], [0, 2])]
    assert (run.policy.generation, run.policy.restarts) == (2, 1)
    assert lines == [
        "Rank 1 was killed by SIGKILL: continuing with 2 of 3 ranks (restart 1). Its replacement joins them when it is "
        "ready.",
        "Rank 1 is back: continuing with 3 of 3 ranks.",
    ]


def test_newcomers_are_started_when_the_others_are_in_their_fit() -> None:
    """To start needs the cores on which those that are left go back to it."""
    run = Run()
    run.lose(1)
    run.say(0, "ready")
    run.step(1.0)
    run.say(2, "ready")
    run.step()
    run.step(deadlines.IMPORTS_GO_ON_AFTER_S - 0.1)
    assert not run.started
    assert run.policy.wakes_at <= run.now + 0.11
    run.step(0.11)
    assert run.started == [[1]]
    run.step(1.0)
    assert run.started == [[1]], "once"


def test_newcomers_are_started_although_it_takes_the_others_long() -> None:
    run = Run()
    run.lose(1)
    run.step(deadlines.IMPORTS_STAND_STILL_FOR_S - 0.4)
    assert not run.started
    assert run.policy.wakes_at <= run.now + 0.41
    run.step(0.41)
    assert run.started == [[1]]


def test_a_newcomer_that_is_to_start_later_is_not_where_the_fit_is_over() -> None:
    run = Run()
    run.lose(1)
    run.say(0, "done")
    run.step()
    run.step(deadlines.IMPORTS_STAND_STILL_FOR_S)
    assert not run.started


def test_who_is_needed_at_once_is_not_started_later_too() -> None:
    run = Run(size=4)
    run.lose(1)
    run.spares = {1, 2}
    run.lose(2)
    assert run.started == [[1, 2]]
    for rank in range(4):
        run.say(rank, "ready")
    run.step()
    run.step(deadlines.IMPORTS_STAND_STILL_FOR_S)
    assert run.started == [[1, 2]]


def test_who_leaves_with_its_node_is_started_with_that_only() -> None:
    run = Run(size=4)
    for rank in range(4):
        run.say(rank, "ready")
    run.policy.ask_to_leave([2, 3])
    run.step()
    run.step(deadlines.STOP_REACHES_ALL_WITHIN_S - 0.1)
    run.lose(3)
    for rank in (0, 1, 2):
        run.say(rank, "ready")
    run.step()
    run.step()
    for rank in (0, 1):
        run.say(rank, "ready")
    run.step()
    assert run.dismissed == [[2, 3]]
    run.policy.ask_to_leave([])
    run.away = set()  # there is a node again
    for _ in range(100):
        run.step(0.1)
    assert run.started == [[2, 3]], "once"


def test_behind_a_restart_of_all_no_newcomer_is_started() -> None:
    run = Run()
    run.lose(1)
    run.lose(0, code=1)
    run.policy.ended(2, 1)
    run.step()
    assert run.started == [[0, 1, 2]]
    for rank in range(3):
        run.say(rank, "ready")
    run.step()
    run.step(deadlines.IMPORTS_STAND_STILL_FOR_S)
    assert run.started == [[0, 1, 2]]


def test_nobody_is_taken_in_before_ranks_have_come_together_and_trained() -> None:
    run = Run()
    run.lose(1)
    run.step(deadlines.IMPORTS_STAND_STILL_FOR_S)
    run.say(1, "waiting")
    run.step()
    run.say(0, "ready")
    run.step(1.0)
    assert run.told == [([0, 2], [0, 2])]
    run.say(2, "ready")
    run.step()
    run.step(deadlines.TRAINS_BEFORE_OTHERS_COME_S - 0.1)
    assert run.told == [([0, 2], [0, 2])]
    assert run.policy.wakes_at <= run.now + 0.11
    run.step(0.11)
    assert run.told[1:] == [([0, 1, 2], [0, 1, 2])]


def test_who_is_at_the_door_waits_a_little_for_others_on_the_way() -> None:
    run = Run(size=4)
    run.lose(1, 3)
    run.come_together()
    run.say(3, "waiting")
    run.step()
    run.step(deadlines.NEWCOMERS_GATHER_WITHIN_S - 0.1)
    assert not run.told
    assert run.policy.wakes_at <= run.now + 0.11
    run.step(0.1)
    assert run.told == [([0, 2, 3], [0, 2, 3])]
    run.come_together()
    run.say(1, "waiting")
    run.step()
    assert run.told == [([0, 1, 2, 3], [0, 1, 2, 3])]


@pytest.mark.parametrize(
    ("rank", "options", "said", "spares"),
    [
        pytest.param(1, {}, {}, {1}, id="a spare is ready"),
        pytest.param(0, {}, {"tasks": "it logs"}, set(), id="rank 0"),
        pytest.param(1, {"min_ranks": 3}, {}, set(), id="min_ranks"),
        pytest.param(1, {}, {"fewer": "it has no DDP"}, set(), id="cannot"),
    ],
)
def test_the_others_wait_for_a_replacement(
    rank: int, options: dict[str, Any], said: dict[str, str], spares: set[int], lines: list[str]
) -> None:
    run = Run(**options)
    run.spares = spares
    run.come_together(**said)
    run.lose(rank)
    others = [each for each in range(3) if each != rank]
    assert run.told == [(others, [0, 1, 2]), ([rank], [0, 1, 2])]  # it is told as soon as it is started
    assert run.started == [[rank]]
    assert ("They wait for it" in lines[0]) == (not spares)
    assert all(reason in lines[0] for reason in said.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_go_on_without_rank_0_if_they_can_log(rank: int) -> None:
    run = Run()
    run.come_together(tasks="" if rank == 0 else "it logs")
    run.lose(rank)
    others = [each for each in range(3) if each != rank]
    assert run.told == [(others, others)]


def test_a_fit_that_does_not_know_yet_whether_it_can_waits() -> None:
    run = Run(fewer=None)
    run.lose(1)
    assert run.told == [([0, 2], [0, 1, 2]), ([1], [0, 1, 2])]


@pytest.mark.parametrize("known", ["", "it has no DDP"])
def test_what_was_known_holds_while_the_next_process_does_not_know_it_yet(known: str) -> None:
    run = Run()
    run.come_together(fewer=known)
    run.spares = {1}
    run.lose(1)
    run.spares = set()
    run.come_together(fewer=None)
    run.lose(2)
    assert run.told[0] == (([0, 1], [0, 1, 2]) if known else ([0, 1], [0, 1]))


def test_newcomers_that_are_on_their_way_are_in_the_generation_of_all() -> None:
    run = Run()
    run.lose(1)
    run.come_together(tasks="it logs")
    run.lose(0)
    assert run.told == [([1, 2], [0, 1, 2]), ([0], [0, 1, 2])]
    assert run.started == [[0]]


def test_a_spare_and_who_is_at_the_door_are_ready() -> None:
    run = Run(size=4)
    run.lose(1)
    run.come_together()
    run.spares = {3}
    run.policy.heard(1, "state", {"state": "waiting", "generation": 1, "reason": ""})
    run.lose(3)
    assert run.told == [([0, 1, 2], [0, 1, 2, 3]), ([3], [0, 1, 2, 3])]


def test_a_newcomer_that_is_lost_while_ranks_come_together_is_taken_out() -> None:
    run = Run()
    run.lose(1)
    run.come_together()
    run.say(1, "waiting")
    run.step()
    run.told.clear()
    run.lose(1)
    assert run.told == [([0, 2], [0, 2])]
    run.step(deadlines.IMPORTS_STAND_STILL_FOR_S)
    assert run.started == [[1]]
    assert (run.policy.generation, run.policy.restarts) == (3, 2)


def test_a_newcomer_that_is_killed_is_started_again_as_long_as_there_are_restarts(lines: list[str]) -> None:
    run = Run(max_restarts=2)
    run.lose(1)
    run.come_together()
    for _ in range(3):
        run.lose(1)
    assert run.started == [[1]]
    assert (run.policy.generation, run.policy.restarts, run.policy.result) == (1, 2, None)
    assert lines[1:] == [
        "The replacement of rank 1 was killed by SIGKILL: starting another one (restart 2).",
        "The replacement of rank 1 was killed by SIGKILL, and no restart inside the job is left: the others go on "
        "without it.",
    ]


@pytest.mark.parametrize("has_come", [False, True])
def test_more_restarts_are_left_where_the_ranks_have_advanced(has_come: bool) -> None:
    """Else 12 losses in a launch, however far apart, would end all ranks."""
    run = Run(max_restarts=1)
    run.lose(1)
    run.come_together()
    for left, restarts in ((1, 2), (2, 4)):
        run.left = left
        for _ in range(left):
            if has_come:
                run.say(1, "waiting")
                run.step()
                run.come_together()
            run.lose(1)
            run.come_together()
            run.left = 0  # what it says is for all that follow
        assert (run.policy.restarts, run.policy.result) == (restarts, None)
    run.lose(0)
    assert run.told == [([1, 2], "restart")]
    run.lose(1, 2)
    assert run.policy.result == 1


def test_a_newcomer_that_fails_is_given_up_and_the_others_go_on(lines: list[str]) -> None:
    run = Run()
    run.lose(1)
    run.come_together()
    run.lose(1, code=1)
    run.lose(2)  # and its slot is not one for which anybody waits
    assert run.told == [([0], [0])]
    run.step(deadlines.IMPORTS_STAND_STILL_FOR_S)
    assert run.started == [[2]]
    assert lines[1] == "The replacement of rank 1 ended with exit code 1 before its fit: the others go on without it."


def test_a_slot_that_was_given_up_gets_another_chance_where_all_are_needed() -> None:
    run = Run()
    run.lose(1)
    run.come_together()
    run.lose(1, code=1)
    run.come_together("it has no DDP")
    run.lose(2)
    assert run.told == [([0], [0, 1, 2]), ([1, 2], [0, 1, 2])]


def test_a_newcomer_that_does_not_come_is_given_up(lines: list[str]) -> None:
    run = Run()
    run.lose(1)
    run.come_together()
    run.step(deadlines.REPLACED_WITHIN_S + 1)
    assert run.signalled == [([1], signal.SIGKILL)]
    run.step(1000.0)
    run.lose(1)
    assert not run.started
    assert run.policy.result is None
    assert len(lines) == 2
    assert "300 s" in lines[1]


def test_newcomers_end_with_the_fit_and_do_not_change_the_result() -> None:
    run = Run()
    run.lose(1)
    run.come_together()
    run.say(0, "done")
    run.step()
    assert run.signalled == [([1], signal.SIGKILL)]
    run.say(1, "waiting")
    for rank in (0, 2):
        run.say(rank, "done")
        run.policy.ended(rank, 0)
    run.step()
    assert run.policy.result is None  # its process is there
    run.policy.ended(1, -signal.SIGKILL)
    run.step()
    assert run.policy.result == 0
    assert not run.told


def test_nobody_is_taken_in_by_ranks_that_have_trained_unless_another_one_is_lost() -> None:
    run = Run(size=4)
    run.lose(1)
    run.come_together()
    run.say(2, "ready", has_trained=True)
    run.say(1, "waiting")
    run.step()
    run.step(deadlines.NEWCOMERS_GATHER_WITHIN_S)
    assert not run.told
    run.lose(3)  # while it saves the final state: the others go back to their last one
    run.come_together()
    run.step()
    run.step(deadlines.NEWCOMERS_GATHER_WITHIN_S)
    assert [members for _, members in run.told] == [[0, 1, 2]]


def test_a_process_that_the_kernel_does_not_end_does_not_hold_up_the_end() -> None:
    run = Run()
    run.lose(1)
    run.come_together()
    for rank in (0, 2):
        run.say(rank, "done")
        run.policy.ended(rank, 0)
    run.step()
    assert run.policy.result is None
    run.step(deadlines.LEFTOVERS_PATIENCE_S + 1)
    assert run.policy.result == 0


def test_newcomers_are_ended_when_a_stop_is_asked_for() -> None:
    run = Run()
    run.lose(1)
    run.come_together()
    run.policy.ask_to_stop()
    run.step()
    assert run.signalled[0] == ([1], signal.SIGKILL)
    assert ([0, 2], signal.SIGTERM) in [
        ([rank for rank in ranks if rank != 1], signum) for ranks, signum in run.signalled
    ]
    for rank, code in ((0, 0), (1, -9), (2, 0)):
        run.policy.ended(rank, code)
    run.step()
    assert run.policy.result == 0


def test_newcomers_that_are_taken_in_when_the_fit_is_over_are_turned_away() -> None:
    run = Run()
    run.lose(1)
    run.come_together()
    run.say(1, "waiting")
    run.step()
    assert run.told == [([0, 1, 2], [0, 1, 2])]
    for rank in (0, 2):  # they had ended the fit when they were told
        run.say(rank, "done", generation=1)
    run.step(1.0)
    assert not run.signalled  # one of them may enter it again yet
    run.step(deadlines.SURVIVORS_LEAVE_WITHIN_S)
    assert run.signalled == [([1], signal.SIGKILL)]
    for rank, code in ((0, 0), (1, -9), (2, 0)):
        run.policy.ended(rank, code)
    run.step()
    assert (run.policy.result, run.policy.restarts) == (0, 1)
    assert run.started == [], "nobody is started again"


def test_nobody_is_started_on_a_node_that_is_back_when_the_fit_is_over() -> None:
    run = Run(size=4)
    run.away = {2, 3}
    run.lose(2, 3)
    run.come_together()
    for rank in (0, 1):
        run.say(rank, "done")
    run.step()
    run.away = set()
    run.step(1.0)
    assert not run.started


def test_a_restart_of_all_begins_with_all_ranks() -> None:
    run = Run()
    run.lose(1)
    run.come_together()
    run.lose(2, code=1)
    assert run.told == [([0, 1], "restart")]
    for rank in (0, 1):
        run.policy.ended(rank, 1)
    run.step()
    assert run.started == [[0, 1, 2]]
    assert sorted(run.policy.members) == [0, 1, 2]
    assert (run.policy.generation, run.policy.restarts) == (2, 2)


def needs_all(run: Run, rank: int, generation: int = 1) -> None:
    run.policy.heard(rank, "state", {"state": "needs_all", "generation": generation, "reason": "another fit begins"})


def test_all_are_restarted_when_all_that_are_left_need_all_for_another_fit(lines: list[str]) -> None:
    run = Run()
    run.lose(1)
    run.come_together()
    for rank in (0, 2):
        run.say(rank, "done")
    run.step()
    needs_all(run, 2)
    run.step()
    assert not run.told, "the other one may do something else alone"
    needs_all(run, 0)
    run.step()
    assert run.told[-1] == ([0, 1, 2], "restart")
    assert lines[-1] == "Restarting all ranks: another fit begins."
    for rank in range(3):
        run.policy.ended(rank, 0)
    run.step()
    assert run.started == [[0, 1, 2]]
    assert run.recorded[-1] == ([], [0, 1, 2], []), "no failure"
    assert run.policy.result is None


def test_a_restart_for_another_fit_needs_no_budget() -> None:
    run = Run(max_restarts=1)
    run.lose(1)
    run.come_together()
    for rank in (0, 2):
        run.say(rank, "done")
        needs_all(run, rank)
    run.step()
    assert run.told[-1] == ([0, 1, 2], "restart")
    for rank in range(3):
        run.policy.ended(rank, 0)
    run.step()
    assert run.started == [[0, 1, 2]]
    assert (run.policy.result, run.policy.restarts) == (None, 1)


def test_who_needs_all_has_ended_its_fit(lines: list[str]) -> None:
    """Before the supervisor has seen that all had come together, or without having heard that others came back."""
    run = Run()
    run.lose(1)
    for rank in (0, 2):
        run.say(rank, "ready")
        run.say(rank, "done")
        needs_all(run, rank)
    run.step()
    run.step()
    assert run.told[-1] == ([0, 2], "restart")
    run = Run()
    run.lose(1)
    run.come_together()
    run.say(1, "waiting")
    run.step()
    for rank in (0, 2):
        needs_all(run, rank)
    run.step(deadlines.SURVIVORS_LEAVE_WITHIN_S + 1)
    run.step()
    assert run.told[-1] == ([0, 1, 2], "restart")
    assert lines[-1] == "Restarting all ranks: another fit begins."


def test_who_has_nothing_to_go_back_to_waits_for_a_lost_node(lines: list[str]) -> None:
    """What it has saved may be in the memory of that node: without it the run would begin anew, with fewer ranks."""
    for is_usable in (True, False):
        run = Run()
        run.away = {1}
        run.lose(1)
        for rank in (0, 2):
            run.policy.heard(rank, "saved", {"is_usable": is_usable})
            run.say(rank, "refused")
        run.step()
        for rank in (0, 2):
            run.policy.ended(rank, 0)
        run.step()
        assert run.started[-1] == ([0, 2] if is_usable else [0, 1, 2])
    reasons = [line for line in lines if line.startswith("Not continuing")]
    assert reasons == ["Not continuing with 2 of 3 ranks: no state was saved that they can go back to."]


def test_the_others_go_on_without_a_lost_node_and_take_its_ranks_in_when_it_is_back(lines: list[str]) -> None:
    run = Run(size=4)
    run.away = {2, 3}
    run.lose(2, 3)
    assert run.told == [([0, 1], [0, 1])]
    assert not run.started
    run.come_together()
    run.step(1000.0)
    assert not run.started, "it may take as long as it likes"
    run.away = set()
    run.step()
    assert run.started == [[2, 3]]
    run.say(2, "waiting")
    run.say(3, "waiting")
    run.step()
    assert run.told == [([0, 1, 2, 3], [0, 1, 2, 3])]
    assert (run.policy.generation, run.policy.restarts) == (2, 1)
    assert lines == [
        "Ranks 2 and 3 were lost with b: continuing with 2 of 4 ranks (restart 1). Replacements join them when they "
        "are ready.",
        "A node has joined for ranks 2 and 3: starting them there.",
        "Ranks 2 and 3 are back: continuing with 4 of 4 ranks.",
    ]


def test_all_are_restarted_where_they_cannot_go_on_without_a_lost_node(lines: list[str]) -> None:
    run = Run(size=4, min_ranks=3)
    run.away = {2, 3}
    run.lose(2, 3)
    assert run.told == [([0, 1], "restart")]
    run.policy.ended(0, 1)
    run.policy.ended(1, 1)
    run.step()
    assert run.started == [[0, 1, 2, 3]], "the supervisor waits for a node"
    assert lines[-1] == "Not continuing with 2 of 4 ranks: --min-ranks requires at least 3 ranks."


def test_the_others_go_on_without_a_node_that_is_told_to_stop(lines: list[str]) -> None:
    run = Run(size=4)
    run.policy.ask_to_leave(range(2, 4))
    run.step()
    assert not run.told, "the others may be told to stop, too"
    run.step(deadlines.STOP_REACHES_ALL_WITHIN_S)
    assert run.told == [([0, 1, 2, 3], [0, 1])], "all leave the fit at one boundary"
    assert (run.policy.restarts, run.recorded) == (0, [([], [0, 1], [0, 1])])
    assert lines == ["The node of ranks 2 and 3 was told to stop: continuing with 2 of 4 ranks."]
    run.say(0, "left")
    run.step()
    assert not run.dismissed, "rank 1 is still in the fit, and may need them"
    run.say(1, "left")
    run.step()
    assert run.dismissed == [[2, 3]]
    run.policy.ask_to_leave([])
    run.come_together()
    run.away = set()
    run.step()
    assert run.started == [[2, 3]]


def test_a_node_that_has_come_in_the_place_of_one_that_was_told_to_stop_stays() -> None:
    run = Run(size=4)
    run.policy.ask_to_leave([2, 3])
    run.lose(2, 3)  # before the others went on without it
    run.policy.ask_to_leave([])
    run.come_together()
    run.step(deadlines.STOP_REACHES_ALL_WITHIN_S)
    run.step(1.0)
    assert not run.dismissed


def test_a_node_that_leaves_when_the_fit_is_over_restarts_nothing() -> None:
    run = Run(size=4)
    run.policy.ask_to_leave([2, 3])
    run.step()
    run.step(deadlines.STOP_REACHES_ALL_WITHIN_S)
    for rank in (0, 1):  # they had ended the fit when they were told
        run.say(rank, "done", generation=0)
    run.step(deadlines.NEXT_BOUNDARY_WITHIN_S + 1)
    assert run.dismissed == [[2, 3]]
    run.policy.ask_to_leave([])
    run.step(deadlines.SURVIVORS_LEAVE_WITHIN_S + 1)
    run.step(1.0)
    for rank in (0, 1):
        run.policy.ended(rank, 0)
    run.step()
    assert (run.policy.result, run.policy.restarts) == (0, 0)


def test_a_fit_that_cannot_be_mended_stops_with_the_node_that_is_told_to() -> None:
    run = Run(size=4)
    for rank in range(4):
        run.say(rank, "refused")
    run.policy.ask_to_leave([2, 3])
    run.step()
    assert run.signalled == [([0, 1, 2, 3], signal.SIGTERM)]


def leaving() -> Run:
    """The node of ranks 2 and 3 was told to stop, and no rank has come to a boundary since."""
    run = Run(size=4)
    run.policy.ask_to_leave([2, 3])
    run.step()
    run.step(deadlines.STOP_REACHES_ALL_WITHIN_S)
    assert [members for _, members in run.told] == [[0, 1]]
    run.told.clear()
    return run


def test_a_node_leaves_although_the_others_come_to_no_boundary() -> None:
    run = leaving()
    run.step(deadlines.NEXT_BOUNDARY_WITHIN_S + 0.1)
    assert (run.dismissed, run.is_old_store_open) == ([[2, 3]], False)


def test_ranks_that_have_come_to_the_boundary_have_time_to_save() -> None:
    run = leaving()
    for rank in range(4):
        run.say(rank, "leaving", generation=0)
    run.step(deadlines.NEXT_BOUNDARY_WITHIN_S + 0.1)
    run.step(deadlines.SURVIVORS_LEAVE_WITHIN_S)
    assert (run.dismissed, run.is_old_store_open, run.told) == ([], True, [])
    for rank in (0, 1):
        run.say(rank, "left")
    run.step()
    assert (run.dismissed, run.is_old_store_open) == ([[2, 3]], False)
    late = leaving()
    for rank in (0, 1):
        late.say(rank, "leaving", generation=0)
    late.step(deadlines.NEXT_BOUNDARY_WITHIN_S + deadlines.SAVED_TOGETHER_WITHIN_S + 1)
    assert (late.told, late.dismissed) == ([([0, 1], [0, 1])], [[2, 3]]), "they are cut off"
    late.step(1.0)
    assert len(late.told) == 1
    late.step(deadlines.REPLACED_WITHIN_S)
    assert late.told[1:] == [([0, 1], "restart")], "not for ever"


def test_a_rank_that_is_lost_where_all_save_before_a_node_leaves_is_replaced() -> None:
    run = leaving()
    for rank in range(4):
        run.say(rank, "leaving", generation=0)
    run.lose(1)
    assert run.told == [([0], [0])]


def test_a_node_that_ends_before_the_boundary_is_not_waited_for() -> None:
    run, told = leaving(), []
    for rank in range(4):
        run.say(rank, "leaving", generation=0)
    run.say(0, "left")
    run.tell = lambda ranks, kind, **fields: told.append((ranks, fields))  # type: ignore[method-assign]
    run.lose(3)
    assert [(ranks, fields["members"], fields["together"]) for ranks, fields in told] == [([1], [0, 1], False)]
    assert (run.dismissed, run.is_old_store_open, run.policy.restarts) == ([[2, 3]], False, 0)
    run.step(1.0)
    assert len(told) == 1


def test_a_restart_names_the_node_that_is_missing(lines: list[str]) -> None:
    run = Run(size=4, fewer="it must have all of them")
    run.away = {2, 3}
    run.spares = {1}
    run.lose(1, 2, 3)
    assert "rank 1 was killed by SIGKILL, ranks 2 and 3 were lost with b, and b has not been replaced." in lines[-1]


@pytest.mark.parametrize("spares", [set(), {1, 2, 3}], ids=["no spare", "spares, also on the node that leaves"])
def test_a_node_leaves_although_another_rank_is_lost_meanwhile(spares: set[int]) -> None:
    run = leaving()
    run.spares = spares
    run.lose(1)
    assert run.dismissed == [[2, 3]]
    assert [members for _, members in run.told] == [[0]], "rank 1 is not replaced before those of that node"


def test_a_node_that_leaves_is_not_waited_for_where_all_ranks_stop() -> None:
    run = leaving()
    run.lose(1)
    run.policy.ask_to_stop()
    run.policy.ended(0, 1)
    run.step()
    run.step(1.0)
    assert (run.dismissed, run.policy.result) == ([[2, 3]], 1)


def test_a_stop_that_has_to_wait_for_a_replacement_says_so_once(lines: list[str]) -> None:
    run = Run()
    run.spares = {1}
    run.lose(1)
    for rank in (0, 2):
        run.say(rank, "ready")
    run.policy.ask_to_stop()
    for _ in range(3):
        run.step(0.5)
    assert lines[1:] == ["Stopping as soon as rank 1 has entered the fit; nothing can be saved before."]
    assert not run.signalled
    run.say(1, "ready")
    run.step()
    run.step()
    assert run.signalled == [([0, 1, 2], signal.SIGTERM)]


def test_a_node_that_comes_in_the_place_of_one_that_leaves_is_not_dismissed() -> None:
    run = leaving()
    run.policy.ask_to_leave([])  # its connection has closed, and another node has connected
    for rank in (0, 1):
        run.say(rank, "left")
    run.step()
    assert (run.dismissed, run.started) == ([], [[2, 3]])


def test_a_rank_that_only_ends_its_fit_is_not_waited_for_at_a_boundary() -> None:
    run, told = Run(size=4), []
    run.tell = lambda ranks, kind, **fields: told.append(fields["together"])  # type: ignore[method-assign]
    run.say(1, "ready", has_trained=True)
    run.policy.ask_to_leave([2, 3])
    run.step()
    run.step(deadlines.STOP_REACHES_ALL_WITHIN_S)
    assert told == [False]


def restarted_without_a_node() -> Run:
    """Rank 3 is lost with its node, and all others end, because one of them has failed."""
    run = Run(size=4)
    run.away = {3}
    run.lose(3)
    run.come_together()
    run.lose(1, code=1)
    for rank in (0, 2):
        run.policy.ended(rank, 1)
    return run


def test_a_restart_without_a_node_has_a_deadline() -> None:
    run = restarted_without_a_node()
    run.step()
    run.told.clear()
    run.step(deadlines.REPLACED_WITHIN_S + 1)
    assert run.told == [([0, 1, 2], "restart")]


@pytest.mark.parametrize(("min_ranks", "asks_all"), [(3, False), (1, True)], ids=["too few are left", "all are told"])
def test_all_stop(min_ranks: int, asks_all: bool) -> None:
    run = Run(size=4, min_ranks=min_ranks)
    run.policy.ask_to_leave(range(2, 4))
    run.step()
    if asks_all:
        run.policy.ask_to_stop()
        run.step()
    assert run.signalled == [([0, 1, 2, 3], signal.SIGTERM)]
    assert not run.dismissed


def test_a_restart_does_not_wait_for_a_lost_node(lines: list[str]) -> None:
    run = restarted_without_a_node()
    run.told.clear()
    run.step()
    assert run.started == [[0, 1, 2]]
    assert run.told == [([0, 1, 2], [0, 1, 2])]
    assert len(run.recorded) == 1, "it is no growth"
    run.come_together()
    run.away = set()
    run.step()
    assert run.started == [[3]]


def test_a_restart_does_not_wait_although_a_rank_was_started_again() -> None:
    run = Run()
    run.come_together(tasks="it logs")
    run.lose(0)  # for which the others wait
    run.away = {1, 2}
    run.lose(1, 2)
    run.started.clear()
    run.lose(0)
    run.step()
    assert run.started == [[0]], "those that have said what the fit can are gone"


def test_a_restart_does_not_wait_although_a_rank_was_not_among_those_that_went_on() -> None:
    run = Run()
    run.lose(0)
    run.away = {1, 2}
    run.lose(1, 2)
    run.step()
    run.lose(0)
    run.step()
    assert run.started == [[0], [0]]


def test_a_restart_does_not_wait_although_only_a_lost_rank_had_said_what_the_fit_can() -> None:
    run = Run(fewer=None)
    run.say(2, "ready")
    run.away = {2}
    run.lose(0, 1, 2)
    run.step()
    run.lose(0, 1)
    run.step()
    assert run.started == [[0, 1], [0, 1]]


def test_a_newcomer_that_is_lost_with_its_node_is_started_when_that_is_back(lines: list[str]) -> None:
    run = Run()
    run.lose(2)
    run.come_together()
    run.away = {2}
    run.lose(2)
    assert not run.started
    assert lines[-1] == "The replacement of rank 2 was lost with b: starting another one when its node is back."
    run.away = set()
    run.step()
    assert run.started == [[2]]


def of_groups(size: int = 6, group: int = 2, **options: Any) -> Run:
    """Ranks that hold the state in groups."""
    run = Run(size=size, **options)
    for rank in range(size):
        run.say(rank, "ready", group=group)
    return run


def test_whole_groups_go_on_and_who_has_lost_a_rank_of_its_group_waits_with_its_process(lines: list[str]) -> None:
    run = of_groups()
    run.lose(3)
    assert run.told == [([0, 1, 2, 4, 5], [0, 1, 4, 5])]
    run.come_together()
    run.say(2, "waiting", generation=1)
    run.step()
    run.step(deadlines.NEWCOMERS_GATHER_WITHIN_S + 1)
    assert not run.told, "half a group is taken in"
    run.say(3, "waiting", generation=1)
    run.step()
    run.step(deadlines.NEWCOMERS_GATHER_WITHIN_S)
    assert run.told == [([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])]
    assert not run.started
    assert (run.policy.generation, run.policy.restarts) == (2, 1)
    assert lines == [
        "Rank 3 was killed by SIGKILL: continuing with 4 of 6 ranks (restart 1). Its replacement joins them when it is "
        "ready. Rank 2 has shards of its group and waits for it.",
        "Ranks 2 and 3 are back: continuing with 6 of 6 ranks.",
    ]


@pytest.mark.parametrize("is_in_time", [True, False])
@pytest.mark.parametrize("are_groups", [True, False])
def test_the_store_in_which_ranks_agree_where_they_leave_is_there_until_they_have(
    are_groups: bool, is_in_time: bool
) -> None:
    run = of_groups(size=4) if are_groups else Run(size=4)
    run.lose(3)
    run.come_together()
    assert not run.is_old_store_open
    for rank in (2, 3) if are_groups else (3,):
        run.say(rank, "waiting", generation=1)
    run.step()
    assert run.told == [([0, 1, 2, 3], [0, 1, 2, 3])]
    for rank in (1, 2, 3):
        run.say(rank, "left")
    run.step(deadlines.NEXT_BOUNDARY_WITHIN_S)
    assert run.is_old_store_open
    if is_in_time:
        run.say(0, "left")
    run.step(0.0 if is_in_time else 0.5)
    assert not run.is_old_store_open


def test_a_whole_group_at_the_door_waits_a_little_for_another_one() -> None:
    run = of_groups()
    run.lose(1, 3)
    assert run.told == [([0, 2, 4, 5], [4, 5])]
    run.come_together()
    for rank in (0, 2, 1):
        run.say(rank, "waiting", generation=1)
    run.step()
    assert not run.told
    run.step(deadlines.NEWCOMERS_GATHER_WITHIN_S)
    assert run.told == [([0, 1, 4, 5], [0, 1, 4, 5])]


def test_a_node_that_leaves_with_a_part_of_a_group_leaves_whole_groups_behind() -> None:
    run = of_groups(size=4)
    run.policy.ask_to_leave([3])
    run.step()
    run.step(deadlines.STOP_REACHES_ALL_WITHIN_S)
    assert run.told == [([0, 1, 2, 3], [0, 1])]
    for rank in (0, 1):
        run.say(rank, "left")
    run.step()
    assert run.dismissed == [[3]]
    alone = of_groups(size=2)
    alone.policy.ask_to_leave([1])
    alone.step()
    assert alone.signalled == [([0, 1], signal.SIGTERM)], "no group is left: all save"


def test_the_others_wait_for_a_replacement_where_no_group_is_whole(lines: list[str]) -> None:
    run = of_groups(size=4)
    run.lose(1, 2)
    assert run.told == [([0, 3], [0, 1, 2, 3]), ([1, 2], [0, 1, 2, 3])]
    assert "They wait for them: no group of ranks that hold the whole state is left." in lines[0]


def test_who_waits_at_the_door_and_a_spare_are_a_whole_group() -> None:
    run = of_groups()
    run.lose(3)
    run.come_together()
    run.say(2, "waiting", generation=1)
    run.spares = {1, 3}
    run.lose(3)  # it is on its way: no spare takes a newcomer's place, and it is started again
    assert run.started == [[3]]
    run.say(3, "waiting", generation=1)
    run.told.clear()
    run.lose(1)
    assert run.told == [([0, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]), ([1], [0, 1, 2, 3, 4, 5])]


def test_a_group_whose_replacement_fails_is_given_up_and_holds_nobody_up() -> None:
    run = of_groups()
    run.lose(3)
    run.come_together()
    run.say(2, "waiting", generation=1)
    run.lose(3, code=1)
    run.lose(5)
    assert run.told == [([0, 1, 4], [0, 1])]
    run.come_together()
    for rank in (4, 5):
        run.say(rank, "waiting", generation=2)
    run.step()
    assert run.told == [([0, 1, 4, 5], [0, 1, 4, 5])], "it does not wait for rank 2"


def test_who_waits_at_the_door_is_ended_with_the_run() -> None:
    run = of_groups(size=4)
    run.lose(3)
    run.come_together()
    run.say(2, "waiting", generation=1)
    run.say(0, "done")
    run.step()
    assert run.signalled == [([2], signal.SIGKILL), ([3], signal.SIGKILL)]


def test_who_does_not_come_to_the_door_is_ended() -> None:
    run = of_groups(size=4)
    run.lose(3)
    run.come_together()
    run.say(3, "waiting", generation=1)
    run.step(deadlines.REPLACED_WITHIN_S + 1)
    assert run.signalled == [([2], signal.SIGKILL)]


# -- the supervisor, with ranks that only talk to it -------------------------------------------------------------------

# Rank 1 dies when the others are in the fit. They go on, and take it in; or it ends as {newcomer} says.
GOING_ON = """
import select
def ready():
    tell(kind="state", state="ready", generation=generation, reason="", fewer="", tasks="")
    tell(kind="saved")
    print(file=open(f"{{log}}.{{rank}}.{{generation}}", "w"))
def hear():
    message = json.loads(line.read(struct.unpack("!I", line.read(4))[0]))
    if message["kind"] == "restart": sys.exit(1)
    print(json.dumps([rank, message["lost"], message["members"]]), file=open(f"{{log}}.told", "a"))
    return message["generation"]
if "LIGHTNING_RESILIENCE_JOINS" in os.environ:
    probe = socket.socket()
    assert probe.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"])))  # nobody is there
    {newcomer}
    say("waiting")
    generation = hear()
ready()
if rank == 1 and life == 0:
    others()
    die()
while generation < {last}:
    generation = hear()
    say("left")
    ready()
while not any(each.startswith("1 1 ") for each in open(log)): time.sleep(0.01)
say("done")
"""


@pytest.mark.parametrize(
    ("newcomer", "last", "code"),
    [
        pytest.param("", 2, 0, id="comes back"),
        pytest.param("sys.exit(3)", 1, 0, id="fails"),
        pytest.param("time.sleep(1000)", 1, 0, id="is on its way"),
    ],
)
@pytest.mark.slow_but_for("comes back")
def test_two_ranks_go_on_without_the_third(tmp_path: Path, newcomer: str, last: int, code: int) -> None:
    program, log = tmp_path / "rank.py", tmp_path / "log"
    program.write_text(RANK + GOING_ON.format(newcomer=newcomer, last=last))
    (tmp_path / "run").mkdir()
    ledger = Ledger(tmp_path / "run", rank=None)
    command = [sys.executable, "-IS", str(program), str(log)]
    supervisor = Supervisor(command, 3, 3, "abc", 5.0, ledger, when_lost="go_on")
    assert supervisor.run() == code
    started = [[int(word) for word in each.split()] for each in log.read_text().splitlines()]
    assert lives(started) == {(0, 0), (1, 0), (2, 0), (1, 1)}
    told = Path(f"{log}.told").read_text().splitlines()
    lost = '{"1": "was killed by SIGKILL"}'
    assert set(told) == {f"[{rank}, {lost}, [0, 2]]" for rank in (0, 2)} | (
        {f"[{rank}, {{}}, [0, 1, 2]]" for rank in range(3)} if last == 2 else set()
    )
    wait_until(lambda: len(changes(tmp_path / "run")) == last, lambda: "not all changes were recorded")
    assert changes(tmp_path / "run") == [([1], [0, 2], 2, 1), ([], [0, 1, 2], 2, 2)][:last]


def changes(run_dir: Path) -> list[tuple[Any, ...]]:
    names = ("ranks", "members", "kept", "restart_count")
    return [tuple(each[name] for name in names) for each in read_ledger(run_dir) if each["event"] == "replaced"]


def test_to_take_ranks_in_is_no_interruption() -> None:
    job: dict[str, Any] = {"elastic_run_id": "job", "node": "n1"}
    died = {"kind": "died", "reason": "killed", "signal": "SIGKILL", "step": 4, "fit": 0, "rank": 1, "restart_count": 0}
    lines: list[dict[str, Any]] = [
        {"event": "start", "restart_count": 0, "rank": 0},
        {"event": "fresh", "fit": 0},
        {"event": "replaced", "restart_count": 1, "ranks": [1], "members": [0, 2]},
        {"event": "start", "restart_count": 1, "rank": 0},
        {"event": "fault", **died},
        {"event": "resumed", "fit": 0, "step": 3},
        {"event": "replaced", "restart_count": 2, "ranks": [], "members": [0, 1, 2]},
        {"event": "start", "restart_count": 2, "rank": 0},
        {"event": "resumed", "fit": 0, "step": 5},
        {"event": "finished", "fit": 0, "step": 9},
        {"event": "exit", "status": "finished"},
    ]
    events = events_of({**job, "time": float(time), **line} for time, line in enumerate(lines))
    assert [(each.kind, each.reason, each.resumed_step) for each in interruptions(events)] == [("crash", "killed", 3)]
    assert cause_of_end(events[:8], "job") is None
    run = History(events)
    assert sum(run.failures.at.values()) == 1
    told = Notices("launch", "run", "")
    assert [name for event in events for name, _ in told._of(event, None, run)] == ["restart", "run_ended"]


# -- real ranks --------------------------------------------------------------------------------------------------------


def gone_on(tmp: Path, config: dict[str, Any], ranks: int, *arguments: str) -> str:
    """Runs ``launch --elastic --when-lost go-on``; returns what it has printed."""
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--elastic", "--when-lost=go-on"]
    launch += ["--section-timeouts=step:none"]  # a rank waits in a step until others are back
    launch += [*arguments, f"--nproc-per-node={ranks}", "--run-dir", config["run_dir"], *command(config)[1:]]
    process = launchers.start(launch, tmp / "output")
    try:
        code = launchers.finish(process, tmp / "output")
    finally:
        process.kill()
    output = (tmp / "output").read_text()
    assert code == 0, output
    return output


def is_back(run_dir: str | Path, losses: int = 1) -> dict[str, Any]:
    """Waits for the attempt behind that of all and, for each loss, those of who is left and of who comes back."""
    file = f"{run_dir}/logs/attempt-{2 + 2 * losses}/*"
    wait = {"do": "sleep", "seconds": 0.0, "after_file": file, "within_s": 120}
    return {"at": "train", "step": 30, "rank": 0, **wait, "once": True}


@pytest.mark.usefixtures("devices")
@pytest.mark.slow
def test_no_step_of_a_device_is_done_again_when_a_rank_comes_back(tmp_path: Path) -> None:
    """Nothing is aborted then, as it is for a loss: the state is known."""
    options: dict[str, Any] = {"trainer": {"max_epochs": 3}, "keeps_nothing": True, "as_on_gpu": {}}
    config = with_ranks(make(tmp_path, "disturbed", **options), 3)
    kill = {"at": "train", "step": 13, "rank": 1, "do": "SIGKILL", "once": True}
    config["events"] = [kill, is_back(config["run_dir"])]
    output = gone_on(tmp_path, config, 3, "--spares=off")
    ledger = Path(config["run_dir"]) / "ledger"
    assert [each[:2] for each in changes(ledger)] == [([1], [0, 2]), ([], [0, 1, 2])], output
    events = [*read_ledger(ledger)]
    (saved,) = [each["step"] for each in events if each.get("reason") == "the ranks change"]
    assert [each["step"] for each in events if each["event"] == "resumed"][-1] == saved, output
    made = Counter(json.loads(line)[1] for line in Path(f"{config['log']}.0").read_text().splitlines())
    assert {made[step] for step in made if step >= saved} == {1}, output
    wanted, steps = undisturbed(tmp_path, 3, **options)
    assert samples(config["log"]) == steps
    torch.testing.assert_close(state_at_the_end(config), state_at_the_end(wanted), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        pytest.param("the module uses manual optimization", {"manual": True}, id="manual"),
        pytest.param("an iterable dataset divides its own samples", {"data": "iterable"}, id="iterable"),
        pytest.param(
            "DDP has static_graph=True", {"ddp": {"static_graph": True}}, id="static graph", marks=pytest.mark.campaign
        ),
    ],
)
@pytest.mark.slow
def test_ranks_that_could_not_train_for_a_lost_one_wait_for_its_replacement(
    tmp_path: Path, reason: str, options: dict[str, Any]
) -> None:
    config = with_ranks(make(tmp_path, "disturbed", trainer={"max_epochs": 2}, **options), 2)
    config["events"] = [{"at": "train", "step": 13, "rank": 1, "do": "SIGKILL", "once": True}]
    output = gone_on(tmp_path, config, 2, "--spares=off")
    assert output.count(f"If a rank is lost, the others wait for its replacement: {reason}") == 1, output
    assert f"The other ranks keep their processes. They wait for it: {reason}." in output
    assert [each[:2] for each in changes(Path(config["run_dir"]) / "ledger")] == [([1], [0, 1])], output
    assert "Restarting all ranks" not in output


@pytest.mark.parametrize("at", ["the end of the last epoch", "the end of the fit"])
@pytest.mark.slow
def test_ranks_that_come_back_when_the_others_have_trained(tmp_path: Path, at: str) -> None:
    """One of them owns the run by then: the others end the fit together with them, and once."""
    options: dict[str, Any] = {"trainer": {"max_epochs": 2}}
    config = with_ranks(make(tmp_path, "disturbed", **options), 3)
    kill = {"at": "train", "step": 13, "rank": 0, "do": "SIGKILL", "once": True}
    where = {"at": "epoch_end", "step": 1} if at == "the end of the last epoch" else {"at": "train_end", "step": 32}
    config["events"] = [kill, {**is_back(config["run_dir"]), "within_s": 20, **where}]
    output = gone_on(tmp_path, config, 3, "--spares=off")
    assert "could not be saved" not in output, output
    assert "without reporting an outcome" not in output
    assert "saves failed" not in output
    assert output.count("Finished: the script ended") == 1
    wanted, _ = undisturbed(tmp_path, 3, **options)
    torch.testing.assert_close(state_at_the_end(config), state_at_the_end(wanted), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_who_is_absent_at_the_end_of_a_fit_is_not_needed_to_evaluate_and_is_for_the_next_fit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"trainer": {"max_epochs": 2}, "fits": 2, "validation": True, "evaluates_after": True}
    options["validation_draws"] = False
    config = with_ranks(make(tmp_path, "disturbed", **options), 3)
    kill = {"at": "train", "step": 8, "rank": 1, "do": "SIGKILL", "once": True, "fit": 0}
    config["events"] = [kill, {"at": "between", "step": 0, "rank": 1, "life": 1, "do": "sleep", "seconds": 600}]
    output = gone_on(tmp_path, config, 3, "--spares=off")
    changed = [each[:2] for each in changes(Path(config["run_dir"]) / "ledger")]
    assert changed == [([1], [0, 2]), ([], [0, 1, 2])], output
    assert output.count("another fit begins") == 1, output
    assert "Before: a worker was killed" not in output
    wanted, _ = undisturbed(tmp_path, 3, **options)
    for fit in range(2):
        found, expected = (state_at_the_end(each, fit) for each in (config, wanted))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("global_batch", "data"),
    [
        pytest.param("constant", {}, id="constant"),
        pytest.param("constant", {"workers": 1}, id="constant, and nothing is read again"),
        pytest.param("constant", {"one_cycle": True}, id="constant, and a schedule that needs the data early"),
        pytest.param("shrink", {}, id="shrink"),
    ],
)
@pytest.mark.slow
def test_steps_have_the_samples_of_all_ranks_or_of_those_that_are_there_while_one_is_away(
    tmp_path: Path, global_batch: str, data: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"trainer": {"max_epochs": 3}, **data}
    config = with_ranks(make(tmp_path, "disturbed", **options), 3)
    kill = {"at": "train", "step": 13, "rank": 1, "do": "SIGKILL", "once": True}
    config["events"] = [kill, is_back(config["run_dir"])]
    arguments = f"--global-batch={global_batch}", "--read-again=if-changed", "--spares=off"
    output = gone_on(tmp_path, config, 3, *arguments)
    changed = [each[:2] for each in changes(Path(config["run_dir"]) / "ledger")]
    assert changed == [([1], [0, 2]), ([], [0, 1, 2])], output
    assert "Changed since the last start" not in output, "the launcher has said it"
    assert "calculated anew" not in output
    assert ("Fetching the first" not in output) == ("workers" in data), output
    # Its state is not known after a loss, since the module saves one of its own. Where all leave together, it is.
    events = [*read_ledger(Path(config["run_dir"]) / "ledger")]
    (saved,) = [each["step"] for each in events if each.get("reason") == "the ranks change"]
    assert [each["step"] for each in events if each["event"] == "resumed"][-1] == saved, output
    made = Counter(json.loads(line)[1] for line in Path(f"{config['log']}.0").read_text().splitlines())
    assert {made[step] for step in made if step >= saved} == {1}, output
    wanted, steps = undisturbed(tmp_path, 3, **options)
    assert "Restart 2" not in output
    if global_batch == "constant":
        assert samples(config["log"]) == steps
        torch.testing.assert_close(state_at_the_end(config), state_at_the_end(wanted), rtol=1e-4, atol=1e-6)
        return
    of_two = samples(wanted["log"], range(2))
    found = samples(config["log"])
    end = max(step for step in found if found[step] != steps[step])
    assert end == saved - 1
    assert end >= 30  # the step in which the first rank waits for the others
    resumed = [each for each in read_ledger(Path(config["run_dir"]) / "ledger") if each["event"] == "resumed"]
    begin = min(each["step"] for each in resumed)
    for step in range(begin, 14):  # the three had done it, or begun
        assert {*of_two[step]} <= {*found.pop(step)} <= {*steps.pop(step)}
    assert found == {step: of_two[step] if 13 < step <= end else steps[step] for step in steps}
    left_out = end + 1 - begin
    assert f"{left_out} batches of absent ranks were left out." in report(config["run_dir"])
