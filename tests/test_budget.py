from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import pytest

from lightning_resilience.launch.budget import Budget, Decision, allows_restart
from lightning_resilience.run.events import WorkersStart
from lightning_resilience.run.failures import Failure, normalised
from tests.ledgers import events_of, history_of

HOUR = 3600.0


class History:
    """A ledger on a clock that the test moves: what a launch and its workers would write."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.events: list[dict[str, Any]] = [{"event": "launch", "time": 1000.0, "budget": asdict(budget)}]
        self.now = 1000.0
        self.starts = 0

    def record(self, event: str, **fields: Any) -> None:
        self.now += 1.0
        self.events.append({"event": event, "time": self.now, **fields})

    def decide(self) -> Decision:
        return self.budget.decide(history_of(self.events), self.now)

    def job(self, groups: list[int | None]) -> Decision:
        """One run of the elastic launcher: each group of workers saves at a step (or not) and fails."""
        decision = self.decide()
        assert decision.action != "give_up"
        assert len(groups) <= decision.max_restarts + 1
        self.record("job_start", retry=decision.action == "retry")
        for restart_count, step in enumerate(groups):
            assert not restart_count or self.allows_restart(restart_count)
            self.starts += 1
            self.start(restart_count)
            if step is not None:
                self.record("saved", fit=0, step=step)
        self.record("failure")
        return self.decide()

    def allows_restart(self, restart_count: int, rank: int = 0) -> bool:
        """Whether workers that have been started again may begin."""
        fields = dict.fromkeys(("host", "pid", "world_size", "local_world_size", "nodes", "visible_devices"))
        fields |= {"slurm": None, "versions": None, "attempt": None, "job_attempt": None, "verified_step": None}
        start = WorkersStart(time=self.now + 1, rank=rank, elastic_run_id="job", restart_count=restart_count, **fields)
        history, then = history_of(self.events), history_of(self.events)
        allows = allows_restart(history, start)
        then.add(start)
        assert history.failures.in_job_with(start) == then.failures.in_job
        assert len(history.events) == len(self.events), "it is asked what would be, and the history stays"
        return allows

    def fail_until_denied(self, step: int | None = None) -> Decision:
        """One run of the elastic launcher whose workers save nothing, or always at the same step."""
        decision, restart_count = self.decide(), 0
        self.record("job_start", retry=decision.action == "retry")
        while not restart_count or (restart_count <= decision.max_restarts and self.allows_restart(restart_count)):
            self.starts += 1
            self.start(restart_count)
            restart_count += 1
            if step is not None:
                self.record("saved", fit=0, step=step)
        self.record("failure")
        return self.decide()

    @property
    def restarts_left(self) -> int:
        """How often the workers are restarted inside the next job if they save nothing."""
        then = copy.deepcopy(self)
        then.fail_until_denied()
        return then.starts - self.starts - 1

    def start(self, restart_count: int = 0) -> None:
        verified = history_of(self.events).verified_step
        self.record("start", restart_count=restart_count, world_size=2, elastic_run_id="job", verified_step=verified)

    def attempt(self, *events: dict[str, Any], restart_count: int = 0) -> Decision:
        """A group of workers, with a job of its own if it is the first: records some events, and fails."""
        if restart_count == 0:
            self.record("job_start", retry=self.decide().action == "retry")
        self.start(restart_count)
        for event in events:
            self.record(**event)
        self.record("failure")
        return self.decide()


def fail_until_given_up(history: History) -> Decision:
    while (decision := history.decide()).action != "give_up":
        history.fail_until_denied()
    return decision


def test_a_local_checkpoint_is_progress_once_it_was_resumed_from() -> None:
    """It may be lost with its node: that it could be read again shows that it was not."""
    history = History(Budget(in_job_restarts=1, job_retries=0))
    local = {"fit": 0, "tier": "local"}
    for step in (10, 20, 30):
        history.attempt({"event": "resumed", "step": step, **local}, {"event": "saved", "step": step + 5, **local})
        assert history_of(history.events).verified_step == step
        assert history.decide().action != "give_up"
    for _ in range(2):
        history.attempt({"event": "resumed", "step": 30, **local}, {"event": "saved", "step": 99, **local})
    assert history_of(history.events).verified_step == 30
    assert history.decide().action == "give_up"


def test_two_retries_are_three_jobs_of_four_groups_each() -> None:
    history = History(Budget(in_job_restarts=3, job_retries=2))
    decision = fail_until_given_up(history)
    assert history.starts == 12
    assert "3 jobs" in decision.reason


def test_one_elastic_launcher_restarts_the_workers_as_long_as_they_advance() -> None:
    history = History(Budget(in_job_restarts=3, job_retries=2))
    assert history.job([10, 20, None, None, 50, 60, None, 80, 90, 100, None]).action == "start"


def test_all_ranks_of_a_node_find_the_same_whether_rank_0_has_recorded_its_start_or_not() -> None:
    history = History(Budget(in_job_restarts=3, job_retries=2))
    history.record("job_start", retry=False)
    for restart_count in range(5):
        before = [restart_count == 0 or history.allows_restart(restart_count, rank) for rank in range(2)]
        assert before == [restart_count < 4] * 2
        history.start(restart_count)
        assert history.allows_restart(restart_count, rank=1) == (restart_count < 4)


def test_workers_that_ended_before_they_could_record_anything_count_when_others_have_come_further() -> None:
    history = History(Budget(in_job_restarts=3, job_retries=2))
    history.record("job_start", retry=False)
    history.start(0)
    assert history.allows_restart(3)
    assert not history.allows_restart(4)


def test_no_retries_at_all() -> None:
    history = History(Budget(in_job_restarts=0, job_retries=0))
    fail_until_given_up(history)
    assert history.starts == 1


def test_jobs_that_die_before_a_worker_could_record_anything_are_counted() -> None:
    history = History(Budget(in_job_restarts=3, job_retries=2))
    for expected in ("retry", "retry", "give_up"):
        assert history.job([]).action == expected


def test_progress_refills_and_the_failure_after_it_counts() -> None:
    history = History(Budget(in_job_restarts=3, job_retries=2))
    history.job([None] * 4)
    decision = history.job([None, 10, None])
    assert (decision.action, history.restarts_left, decision.job_attempt) == ("start", 1, 0)
    decision = history.job([None, None])
    assert (decision.action, decision.job_attempt) == ("retry", 1)


def test_the_last_group_of_a_job_made_progress() -> None:
    history = History(Budget(in_job_restarts=3, job_retries=2))
    decision = history.job([None, None, None, 10])
    assert (decision.action, history.restarts_left) == ("start", 2)


def test_saving_the_same_step_again_is_no_progress() -> None:
    history = History(Budget(in_job_restarts=1, job_retries=1))
    history.job([10])
    while history.decide().action != "give_up":
        history.fail_until_denied(step=10)
    assert history.starts == 1 + 1 + 2


def test_a_step_below_the_highest_ever_reached_is_no_progress() -> None:
    history = History(Budget(in_job_restarts=0, job_retries=1))
    assert history.job([100]).action == "retry"
    assert history.job([50]).action == "give_up"


def test_to_take_ranks_in_again_is_no_failure() -> None:
    history = History(Budget(in_job_restarts=1, job_retries=0))
    history.record("job_start", retry=False)
    history.start(0)
    history.record("replaced", ranks=[1], members=[0], elastic_run_id="job", restart_count=1)
    assert history.allows_restart(1)
    history.start(1)
    history.record("replaced", ranks=[], members=[0, 1], elastic_run_id="job", restart_count=2)
    assert history.allows_restart(2)
    history.start(2)
    assert history_of(history.events).failures.in_job == 1
    history.record("replaced", ranks=[1], members=[0], elastic_run_id="job", restart_count=3)
    assert not history.allows_restart(3)


def test_a_later_fit_begins_at_step_0_and_is_progress_all_the_same() -> None:
    history = History(Budget(in_job_restarts=1, job_retries=0))
    history.record("job_start", retry=False)
    history.record("saved", fit=0, step=100)
    history.record("finished", fit=0, step=100)
    history.record("start", restart_count=1)
    history.record("saved", fit=1, step=5)
    history.record("failure")
    assert history.decide().action == "start"
    assert history_of(history.events).verified_step == 5


def test_a_finished_fit_that_trains_on_is_progress() -> None:
    history = History(Budget(in_job_restarts=1, job_retries=0))
    for fit in (0, 1):
        history.record("finished", fit=fit, step=100)
    history.record("job_start", retry=False)
    history.record("saved", fit=0, step=150)
    history.record("failure")
    assert history.decide().action == "start"


def test_failures_per_day_hold_whatever_the_progress() -> None:
    history = History(Budget(in_job_restarts=3, job_retries=2, max_failures_per_day=5))
    step = 0
    while (decision := history.decide()).action != "give_up":
        groups: list[int | None] = [(step := step + 1) for _ in range(decision.max_restarts + 1)]
        history.job(groups)
    assert history.starts == 6
    assert "24 hours" in decision.reason


def test_the_day_slides() -> None:
    history = History(Budget(max_failures_per_day=1))
    history.job([1])
    history.job([2])
    assert history.decide().action == "give_up"
    history.now += 24 * HOUR - 3
    assert history.decide().action == "start"


def test_the_day_counts_across_launches_and_killed_launchers() -> None:
    history = History(Budget(max_failures_per_day=2))
    for _ in range(3):
        history.record("launcher_killed")
    assert history.decide().action == "give_up"


def test_a_preemption_neither_counts_nor_refills() -> None:
    history = History(Budget(in_job_restarts=3, job_retries=2))
    history.record("job_start", retry=False)
    for restart_count in range(3):
        history.record("start", restart_count=restart_count)
    history.record("exit", status="interrupted")
    decision = history.decide()
    assert (decision.action, history.restarts_left) == ("start", 1)


def test_launching_again_after_giving_up_is_a_fresh_budget() -> None:
    history = History(Budget(in_job_restarts=1, job_retries=0))
    fail_until_given_up(history)
    history.record("give_up")
    assert history.decide() == Decision("start", 1, 0, "starting the workers")


def test_the_day_begins_anew_with_it() -> None:
    history = History(Budget(max_failures_per_day=2))
    for _ in range(3):
        history.record("launcher_killed")
    history.record("give_up")
    assert history.decide().action == "start"


def test_a_node_that_joins_is_no_failure_but_one_that_leaves_is() -> None:
    history = History(Budget(in_job_restarts=3))
    history.record("job_start", retry=False)
    history.record("saved", step=1)
    for world_size in (4, 8, 8, 4):
        history.record("start", restart_count=0, world_size=world_size)
    assert history.restarts_left == 3 - 2


def test_events_that_say_less_do_no_harm() -> None:
    history = History(Budget())
    history.events = [
        {"time": 0.0, "event": "saved"},
        {"time": 0.0, "event": "saved", "step": 3, "fit": None},
        {"time": 0.0, "event": "start"},
        {"time": 0.0, "event": "start", "restart_count": None, "world_size": None},
        {"time": 0.0, "event": "failure"},
    ]
    assert history.decide().action in ("start", "retry")


# The same failure

RESUMED = {"event": "resumed", "fit": 0, "step": 30}
BOOM = {
    "event": "fault",
    "rank": 1,
    "fit": 0,
    "step": 37,
    "kind": "ValueError",
    "reason": "ValueError: row 8123 is bad",
}
BOOM_ENDS = {"event": "fault", "rank": 1, "kind": "ValueError", "place": "train.py:80", "reason": BOOM["reason"],
             "elastic_run_id": "job", "restart_count": 0}  # fmt: skip
PEER_LOST = {
    "event": "fault",
    "rank": 0,
    "fit": 0,
    "step": 37,
    "kind": "PeerLost",
    "reason": "PeerLost: rank 1 is gone",
}
PEER_ENDS = {**PEER_LOST, "place": "peer.py:1", "elastic_run_id": "job", "restart_count": 0}
CLAUSE = "the same failure for the {} time: ValueError at step 37 (train.py:80), each time after resuming from step 30"


def saved(fit: int, step: int) -> dict[str, Any]:
    return {"event": "saved", "fit": fit, "step": step}


def test_the_reason_says_that_it_was_always_the_same_failure() -> None:
    history = History(Budget(in_job_restarts=0, job_retries=3))
    while history.decide().action != "give_up":
        history.attempt(RESUMED, PEER_LOST, BOOM, BOOM_ENDS)
    assert history.decide().reason == f"no progress in 4 jobs with up to 0 restarts each, {CLAUSE.format('4th')}"


def test_what_advances_elsewhere_does_not_refill_the_budget_of_a_failure() -> None:
    history = History(Budget(in_job_restarts=1, job_retries=1))
    attempts = 0
    while (decision := history.decide()).action != "give_up":
        attempts += 1
        assert decision == Decision("start", 4 - attempts, 0, decision.reason)
        history.attempt(RESUMED, saved(1, 100 + attempts), BOOM, BOOM_ENDS)
    assert attempts == 4
    assert decision.reason == f"{CLAUSE.format('4th')}; the progress made in between has not prevented it"


def test_the_restarts_inside_a_job_keep_to_what_the_same_failure_has_left() -> None:
    history = History(Budget(in_job_restarts=3, job_retries=0))
    history.record("job_start", retry=False)
    for restart_count in range(2):
        history.start(restart_count)
        for event in (RESUMED, BOOM, BOOM_ENDS, saved(1, restart_count)):
            history.record(**event)
    history.record("failure")
    assert history.decide().max_restarts == 4 - 2 - 1


def test_a_step_verified_beyond_the_failure_overcomes_it() -> None:
    history = History(Budget(in_job_restarts=0, job_retries=1))
    for step in (38, 39, 40):  # that checkpoint is damaged every time: all begin again at 30
        assert history.attempt(RESUMED, BOOM, BOOM_ENDS).action == "retry"
        history.record("job_start", retry=True)
        history.start()
        for event in (RESUMED, saved(0, step), {"event": "exit", "status": "interrupted"}):
            history.record(**event)
    assert history_of(history.events).failures.recurrence == CLAUSE.format("3rd")


@pytest.mark.parametrize("step", [30, 37])
def test_a_step_verified_before_the_failure_does_not(step: int) -> None:
    history = History(Budget(in_job_restarts=1, job_retries=0))
    history.attempt(RESUMED, BOOM, BOOM_ENDS)
    assert history.attempt(RESUMED, saved(0, step), saved(1, 1), BOOM, BOOM_ENDS).action == "give_up"


def test_a_nearer_checkpoint_is_progress() -> None:
    history = History(Budget(in_job_restarts=1, job_retries=0))
    for step in range(30, 37):
        decision = history.attempt({**RESUMED, "step": step}, saved(0, step + 1), BOOM, BOOM_ENDS)
        assert (decision.action, history.restarts_left) == ("start", 0)
    history.attempt({**RESUMED, "step": 37}, BOOM, BOOM_ENDS)
    assert history.decide().action == "give_up"


def test_the_same_failure_is_known_across_launches_and_preemptions() -> None:
    history = History(Budget(in_job_restarts=1, job_retries=1))
    for _ in range(2):
        history.attempt(RESUMED, saved(1, history.starts), BOOM, BOOM_ENDS)
        history.starts += 1
        history.record("launch")
        history.record("job_start", retry=False)
        history.start()
        history.record("exit", status="interrupted")
        history.record("launch")
        history.record("job_start", retry=False)
        history.start()
        history.record("launcher_killed")
    assert history_of(history.events).failures.recurrence == CLAUSE.format("2nd")
    history.attempt(RESUMED, saved(1, 10), BOOM, BOOM_ENDS)
    assert history.attempt(RESUMED, saved(1, 11), BOOM, BOOM_ENDS).action == "give_up"


def test_whoever_launches_again_has_a_fresh_budget_but_is_told_the_whole_count() -> None:
    history = History(Budget(in_job_restarts=0, job_retries=1))
    for _ in range(2):
        assert history.attempt(RESUMED, BOOM, BOOM_ENDS).action == "retry"
        assert history.attempt(RESUMED, BOOM, BOOM_ENDS).action == "give_up"
        history.record("give_up")
    assert history_of(history.events).failures.recurrence == CLAUSE.format("4th")


def test_workers_that_never_start_are_not_taken_for_the_failure_before() -> None:
    history = History(Budget(in_job_restarts=0, job_retries=2))
    for _ in range(2):
        history.attempt(RESUMED, BOOM, BOOM_ENDS)
    history.record("job_start", retry=True)
    history.record("failure")
    assert history.decide().reason == "no progress in 3 jobs with up to 0 restarts each"


HANG = {"event": "fault", "rank": 2, "fit": 0, "step": 37, "kind": "hang", "elastic_run_id": "job", "restart_count": 0,
        "reason": "rank 2 is stuck in train.py:80; ranks 0, 1 and 3 wait for it in all_reduce"}  # fmt: skip
TIMED_OUT = {"event": "fault", "rank": 0, "fit": 0, "step": 37, "kind": "RuntimeError",
             "reason": "RuntimeError: Timed out waiting 9000ms for recv operation to complete"}  # fmt: skip


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (
            [RESUMED, PEER_LOST, BOOM, PEER_ENDS, BOOM_ENDS],
            "ValueError at step 37 (train.py:80) after resuming from step 30",
        ),
        ([{"event": "fresh", "fit": 0}, BOOM], "ValueError at step 37 from the beginning"),
        ([BOOM], "ValueError at step 37 before resuming"),
        ([BOOM_ENDS], "ValueError (train.py:80) with step 20 safe"),
        ([RESUMED, TIMED_OUT, PEER_LOST, HANG], "hang at step 37 after resuming from step 30"),
        ([RESUMED, TIMED_OUT], "RuntimeError at step 37 after resuming from step 30"),
        ([RESUMED, {**BOOM, "fit": 2}], "ValueError at step 37 in fit 2 before resuming"),
        ([RESUMED, PEER_LOST], "a worker was killed after resuming from step 30"),
        ([], "a worker was killed with step 20 safe"),
        # of a process of an earlier job that is late
        ([RESUMED, {**BOOM_ENDS, "elastic_run_id": "other"}], "a worker was killed after resuming from step 30"),
        # the script has caught what the first fit raised
        ([RESUMED, BOOM, {**RESUMED, "fit": 1, "step": 5}], "a worker was killed in fit 1 after resuming from step 5"),
    ],
)
def test_why_a_group_of_workers_ended(events: list[dict[str, Any]], expected: str) -> None:
    start = {"event": "start", "verified_step": 20, "elastic_run_id": "job"}
    failure = Failure.of(events_of([start, *events]))
    assert f"{failure} {failure.origin}" == expected


def test_a_hang_is_the_same_whatever_its_ranks_were_doing_when_they_were_looked_at() -> None:
    other = {**HANG, "rank": 0, "reason": "rank 0 (n7, pid 17) is stuck in train.py:80, busy on the CPU, at step 37"}
    assert Failure.of(events_of([RESUMED, HANG])) == Failure.of(events_of([RESUMED, other]))
    assert Failure.of(events_of([RESUMED, HANG])) != Failure.of(events_of([RESUMED, {**HANG, "step": 38}]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[rank3]: row 8123 of 1e6 is bad", "[rank12]: row 9 of 3.5e-02 is bad"),
        ("ranks 0, 1 and 3 wait", "ranks 2 and 3 wait"),
        ("CUDA error at 0x7fab12ce on cuda:0", "CUDA error at 0x11 on cuda:7"),
        ("No such file: '/tmp/a81f/x.bin'", "No such file: '../y/x.bin'"),
        ("key 3fa85f64-5717-4562-b3fc-2c963f66afa6", "key 0fa85f64-a717-b562-c3fc-2c963f66afa6"),
        ("store deadbeef01 is gone", "store 81aa00aa11 is gone"),
        ("two\n  lines", "two lines"),
    ],
)
def test_what_differs_between_two_of_a_kind_is_left_out(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"), [("a/b is bad", "a/c is bad"), ("defaced", "decade"), ("KeyError: 'x'", "KeyError: 'y'")]
)
def test_what_says_something_stays(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)
