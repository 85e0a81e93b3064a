from __future__ import annotations

from typing import Any

from lightning_resilience.launch.budget import Budget, Decision, highest_verified_step

HOUR = 3600.0


class History:
    """A ledger on a clock that the test moves: what a launch and its workers would write."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.events: list[dict[str, Any]] = []
        self.now = 1000.0
        self.starts = 0

    def record(self, event: str, **fields: Any) -> None:
        self.now += 1.0
        self.events.append({"event": event, "time": self.now, **fields})

    def decide(self) -> Decision:
        return self.budget.decide(self.events, self.now)

    def job(self, groups: list[int | None]) -> Decision:
        """One run of the elastic launcher: each group of workers saves at a step (or not) and fails."""
        decision = self.decide()
        assert decision.action != "give_up"
        assert len(groups) <= decision.max_restarts + 1
        self.record("job_start", retry=decision.action == "retry")
        for restart_count, step in enumerate(groups):
            self.starts += 1
            self.record("start", restart_count=restart_count, world_size=2)
            if step is not None:
                self.record("saved", fit=0, step=step)
        self.record("failure")
        return self.decide()


def fail_until_given_up(history: History) -> Decision:
    while (decision := history.decide()).action != "give_up":
        history.job([None] * (decision.max_restarts + 1))
    return decision


def test_two_retries_are_three_jobs_of_four_groups_each() -> None:
    history = History(Budget(in_job_restarts=3, job_retries=2))
    decision = fail_until_given_up(history)
    assert history.starts == 12
    assert "3 jobs" in decision.reason


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
    assert (decision.action, decision.max_restarts, decision.job_attempt) == ("start", 1, 0)
    decision = history.job([None, None])
    assert (decision.action, decision.job_attempt) == ("retry", 1)


def test_the_last_group_of_a_job_made_progress() -> None:
    history = History(Budget(in_job_restarts=3, job_retries=2))
    decision = history.job([None, None, None, 10])
    assert (decision.action, decision.max_restarts) == ("start", 2)


def test_saving_the_same_step_again_is_no_progress() -> None:
    history = History(Budget(in_job_restarts=1, job_retries=1))
    history.job([10])
    while history.decide().action != "give_up":
        history.job([10] * (history.decide().max_restarts + 1))
    assert history.starts == 1 + 1 + 2


def test_a_step_below_the_highest_ever_reached_is_no_progress() -> None:
    history = History(Budget(in_job_restarts=0, job_retries=1))
    assert history.job([100]).action == "retry"
    assert history.job([50]).action == "give_up"


def test_a_later_fit_begins_at_step_0_and_is_progress_all_the_same() -> None:
    history = History(Budget(in_job_restarts=1, job_retries=0))
    history.record("job_start", retry=False)
    history.record("saved", fit=0, step=100)
    history.record("finished", fit=0, step=100)
    history.record("start", restart_count=1)
    history.record("saved", fit=1, step=5)
    history.record("failure")
    assert history.decide().action == "start"
    assert highest_verified_step(history.events) == 5


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
    assert (decision.action, decision.max_restarts) == ("start", 1)


def test_launching_again_after_giving_up_is_a_fresh_budget() -> None:
    history = History(Budget(in_job_restarts=1, job_retries=0))
    fail_until_given_up(history)
    history.record("give_up")
    assert history.decide() == Decision("start", 1, 0, "starting the workers")


def test_a_node_that_joins_is_no_failure_but_one_that_leaves_is() -> None:
    history = History(Budget(in_job_restarts=3))
    history.record("job_start", retry=False)
    history.record("saved", step=1)
    for world_size in (4, 8, 8, 4):
        history.record("start", restart_count=0, world_size=world_size)
    assert history.decide().max_restarts == 3 - 2


def test_what_a_foreign_or_torn_ledger_may_hold_does_no_harm() -> None:
    history = History(Budget())
    history.events = [
        {"event": "saved"},
        {"event": "saved", "step": "many", "fit": None},
        {"event": "start"},
        {"event": "start", "restart_count": None, "world_size": None},
        {"event": "failure"},
    ]
    assert history.decide().action in ("start", "retry")
