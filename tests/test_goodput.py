"""The account of a run, folded from ledgers that say what the launcher, the scheduler and the processes have done."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience.launch.report import all_interruptions, report
from lightning_resilience.run import goodput, time_account
from lightning_resilience.run.events import (
    AllocationEnd,
    AllocationStart,
    Event,
    Fault,
    FitInterrupted,
    JobStart,
    Killed,
    LauncherKilled,
    LaunchExit,
    LaunchStart,
    RanksReplaced,
    Resumed,
    Saved,
    SignalReceived,
    Stragglers,
    StragglerStop,
    TimeSpent,
    WorkersStart,
    parse,
)
from lightning_resilience.run.goodput import CATEGORIES, PARTS, Goodput, Loss, account
from lightning_resilience.run.interruptions import interruptions


def launch(began: float, recorded: float) -> LaunchStart:
    fields: dict[str, Any] = dict.fromkeys(LaunchStart.own_fields)
    return LaunchStart(**fields | {"began": began, "time": recorded})


def job(time: float) -> JobStart:
    return JobStart(time=time, retry=False, job_attempt=0, run_id="job", max_restarts=3, reason=None)


def ended(time: float, new_job: bool | None = None) -> LaunchExit:
    return LaunchExit(time=time, status="finished", exit_code=0, reason="", new_job=new_job)


def spent(began: float, since: float, end: float, doing: str = "teardown", **fields: Any) -> TimeSpent:
    values: dict[str, Any] = {"fit": 0, "attempt": str(began), "world_size": 2, "ranks": [0, 1], "reached": 0}
    values |= {"began": [began] * 2, "since": [since] * 2, "ended": [end] * 2, "doing": [doing] * 2, "node": "n1"}
    seconds = fields.pop("seconds", {"productive": since - began})
    values["seconds"] = {name: [each, each] for name, each in seconds.items()}
    return TimeSpent(time=end, **values | {"elastic_run_id": "job"} | fields)


def of_one(found: Goodput) -> dict[str, float]:
    """What each of the two ranks has spent."""
    return {name: round(seconds / 2, 9) for name, seconds in found.by_category.items() if seconds}


def test_nothing_has_run() -> None:
    assert account([]).total == 0
    assert math.isnan(account([]).goodput)


def test_a_launch_without_workers() -> None:
    found = account([launch(10, 11), ended(15)])
    assert found.by_category["launch"] == 5


def test_a_healthy_run() -> None:
    seconds = {"imports": 3.0, "setup": 2.0, "productive": 80.0, "checkpoint_save": 5.0}
    found = account([launch(10, 11), job(12), spent(15, 105, 108, seconds=seconds), ended(110)])
    assert of_one(found) == {"launch": 2, "rendezvous": 3, "teardown": 5, **seconds}
    assert found.total == 2 * (110 - 10)
    assert found.goodput == 0.8
    assert found.ettr == 0.85
    assert not found.interruptions


def test_what_is_where_in_time() -> None:
    """Of a process what it takes to start, then the steps together, then its end."""
    seconds = {"imports": 3.0, "setup": 2.0, "productive": 80.0, "checkpoint_save": 5.0, "teardown": 1.0}
    found = account([launch(10, 11), job(12), spent(15, 106, 108, seconds=seconds), ended(110)], with_segments=True)
    assert found.segments is not None
    segments = [(each.begin, each.end, [*each.seconds]) for each in found.segments]
    assert sorted(segments) == sorted(
        2
        * [
            *((10, 12, ["launch"]), (12, 15, ["rendezvous"]), (15, 18, ["imports"]), (18, 20, ["setup"])),
            *((20, 105, ["productive", "checkpoint_save"]), (105, 106, ["teardown"]), (106, 108, ["teardown"])),
            (108, 110, ["teardown"]),
        ]
    )
    assert {each.node for each in found.segments} == {"n1"}


def assert_in_time(found: Goodput) -> None:
    """Segments have all of the account."""
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for loss, each in found.seconds.items():
        seconds["" if loss.category == "straggler_wait" else loss.node, loss.category] += each
    for segment in found.segments or ():
        assert sum(segment.seconds.values()) == pytest.approx(segment.end - segment.begin, abs=1e-3)
        for category, each in segment.seconds.items():
            seconds["" if category == "straggler_wait" else segment.node, category] -= each
    assert all(abs(each) < 1e-6 for each in seconds.values())


def test_segments_have_all_of_the_account() -> None:
    assert_in_time(account(HUNG, with_segments=True))


def test_a_hang_is_detected_and_its_cost_is_its_own() -> None:
    """Its detection, the end of its workers, their successors' start and the steps that these do again."""
    fault = Fault(time=70, rank=1, kind="hang", fit=0, step=6, reason="stuck")
    seconds = {"imports": 4.0, "productive": 16.0, "wasted_progress": 10.0}
    events = [
        *(launch(0, 0), job(0), spent(0, 50, 75, "productive"), fault),
        *(spent(80, 110, 110, seconds=seconds), ended(110)),
    ]
    found = account(events)
    expected = {"productive": 66, "wasted_progress": 10, "rendezvous": 5, "imports": 4, "detection": 20, "teardown": 5}
    assert of_one(found) == expected
    [hang] = found.interruptions
    assert (hang.time, hang.cause, hang.reason, hang.node) == (70, "hang", "stuck", "n1")
    assert {name: seconds / 2 for name, seconds in hang.seconds.items()} == {
        "detection": 20,
        "teardown": 5,
        "rendezvous": 5,
        "imports": 4,
        "wasted_progress": 10,
    }
    assert found.seconds[Loss("imports", "hang", "n1")] == 8


def test_a_step_that_was_begun_and_not_ended_is_wasted() -> None:
    interrupted = FitInterrupted(time=55, fit=0, reason="SIGTERM")
    found = account([launch(0, 0), job(0), spent(0, 50, 60, "productive"), interrupted, ended(60)])
    assert of_one(found) == {"productive": 50, "wasted_progress": 10}
    assert found.causes == {"preempted": 1}


def test_a_step_in_which_a_fit_failed_is_of_the_interruption() -> None:
    """Of a fault it is the detection; ended from outside, the step was in vain. So is one whose failure was caught."""
    seconds = {"productive": 50, "unfinished_step": 10, "teardown": 0}
    workers = spent(0, 60, 60, seconds=seconds)
    for event, category, cause in (
        (Fault(time=60, rank=1, kind="ValueError", fit=0, step=3, reason=""), "detection", "crash"),
        (FitInterrupted(time=60, fit=0, reason="SIGINT"), "wasted_progress", "preempted"),
        (Saved(time=60, fit=0, step=3, seconds=0, reason="", tier=None), "wasted_progress", ""),
    ):
        found = account([launch(0, 0), job(0), workers, event, ended(60)])
        assert found.seconds[Loss(category, cause, "n1")] == 20, event
        assert found.total == 2 * 60


def reported(time: float, ranks: list[int], slowest: int | None, waited: float | None) -> Stragglers:
    return Stragglers(time=time, fit=0, step=3, ranks=ranks, devices=[], reason="", slowest=slowest, waited=waited)


def test_what_ranks_wait_for_a_straggler_is_due_to_its_node() -> None:
    """As far as it was reported, and no more than there is; the straggler itself does not wait."""
    ranks = [
        spent(0, 50, 60, ranks=[2 * node, 2 * node + 1], node=f"n{node}", attempt="1", world_size=4) for node in (0, 1)
    ]
    reports = [reported(20, [3], 3, 12.0), reported(40, [2, 3], 2, 6.0), reported(45, [1], None, None)]
    found = account([launch(0, 0), job(0), *ranks, *reports, ended(60)], with_segments=True)
    assert found.seconds[Loss("straggler_wait", "straggler", "n1")] == 12 * 3 + 6 * 2
    assert found.by_category["productive"] == 4 * 50 - 48
    assert (found.total, found.ettr, found.interruptions) == (240, 200 / 240, [])
    assert_in_time(found)
    most = account([launch(0, 0), job(0), *ranks, reported(20, [3], 3, 1e6), ended(60)])
    assert most.by_category["straggler_wait"] == 3 * 50
    assert most.by_category["productive"] == 50


def test_ranks_of_which_nothing_is_known_have_waited_as_long_as_the_others() -> None:
    known = spent(0, 50, 60, ranks=[0, 1], attempt="1", world_size=5)
    found = account([launch(0, 0), job(0), known, reported(20, [1], 1, 12.0), ended(60)])
    assert found.by_category["straggler_wait"] == 12 * 4
    assert found.by_category["productive"] == 5 * 50 - 48


def test_of_what_was_kept_only_older_reports_are_a_part() -> None:
    kept = [spent(0, 30, 30, "productive", ranks=[rank], node=f"n{rank}", attempt="1") for rank in (0, 1)]
    reports = [reported(20, [1], 1, 3.0), reported(40, [1], 1, 4.0)]
    found = account([launch(0, 0), job(0), *reports], kept, now=50)
    assert found.seconds[Loss("straggler_wait", "straggler", "n1")] == 3


def test_stragglers_of_several_nodes_are_of_none() -> None:
    ranks = [spent(0, 50, 60, ranks=[rank], node=f"n{rank}", attempt="1") for rank in range(2)]
    stop = StragglerStop(time=56, fit=0, step=3, ranks=[0, 1], devices=[], reason="slow")
    [found] = account([launch(0, 0), job(0), *ranks, stop, spent(90, 99, 99), ended(99)]).interruptions
    assert (found.cause, found.node) == ("straggler", "")


def test_why_workers_were_ended() -> None:
    """A killed rank records nothing; its peers record that it is gone."""
    step = {"fit": 0, "step": 3}
    lost = Fault(time=55, rank=0, kind="RuntimeError", reason="Connection closed by peer", **step)
    full = Fault(time=55, rank=1, kind="OSError", reason="OSError: [Errno 28] No space left on device", **step)
    stop = StragglerStop(time=56, ranks=[1], devices=[], reason="slow", **step)
    for event, cause, node in (
        (lost, "killed", ""),
        (full, "disk", "n1"),
        (Fault(time=55, rank=1, kind="TrainingDiverged", reason="", **step), "NaN", "n1"),
        (Fault(time=55, rank=1, kind="KeyError", mistake="code", reason="", **step), "script", "n1"),
        (Fault(time=55, rank=None, kind="died", reason="", **step), "killed", ""),
        (stop, "straggler", "n1"),
        (LauncherKilled(time=80), "killed", ""),
    ):
        events = [launch(0, 0), job(0), spent(0, 50, 60, "productive"), event, spent(90, 99, 99), ended(99)]
        [found] = account(events).interruptions
        assert (found.cause, found.node) == (cause, node), event


def test_a_verdict_that_comes_when_the_next_workers_have_begun_is_of_those_before() -> None:
    def workers(began: float, count: int) -> TimeSpent:
        return spent(began, began + 9.0, began + 9.9, attempt=str(count), restart_count=count)

    died = Fault(time=10.2, rank=1, node="n1", kind="died", reason="killed", elastic_run_id="job", restart_count=0)
    lost = Fault(time=9.5, rank=0, node="n1", fit=0, kind="RuntimeError", reason="Connection closed by peer")
    found = account([launch(0.0, 0.0), workers(0.0, 0), workers(10.0, 1), lost, died, ended(20.0)])
    assert [(each.cause, each.reason, each.node) for each in found.interruptions] == [("killed", "killed", "n1")]


def test_ranks_that_are_taken_in_again_interrupt_nothing_though_their_processes_are_older() -> None:
    first = spent(0.0, 9.0, 10.0, attempt="a", restart_count=0)
    died = Fault(time=10.0, rank=1, node="n1", kind="died", reason="killed", elastic_run_id="job", restart_count=0)
    fewer = spent(10.5, 15.0, 15.0, attempt="b", restart_count=1, world_size=1, ranks=[0])
    change: dict[str, Any] = {"elastic_run_id": "job", "kept": 1, "reason": None, "node": "n1"}
    grown = RanksReplaced(time=15.0, ranks=[], members=[0, 1], restart_count=2, **change)
    # The newcomer was started before those that are left began again.
    again = spent(15.0, 20.0, 20.0, attempt="c", restart_count=2)
    again.began = [15.0, 10.1]
    found = account([launch(0.0, 0.0), first, died, fewer, grown, again, ended(20.0)])
    assert [each.cause for each in found.interruptions] == ["killed"]
    assert [life.began for life in found.lives] == [0.0, 10.5, 15.0]


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ([ended(60), launch(90, 91)], {"idle": 30, "launch": 5, "rendezvous": 5}),
        ([ended(60, new_job=True), launch(90, 91)], {"queue": 30, "launch": 5, "rendezvous": 5}),
        ([LauncherKilled(time=91), launch(90, 91)], {"idle": 30, "launch": 5, "rendezvous": 5}),
        (
            [
                ended(60, new_job=True),
                AllocationEnd(time=61, how="", then="requeue", reason=""),
                AllocationStart(time=80, slurm_job_id="1", restart_count=1, node_list=[]),
                launch(90, 91),
            ],
            {"teardown": 1, "queue": 19, "launch": 15, "rendezvous": 5},
        ),
        (
            [AllocationStart(time=80, slurm_job_id="1", restart_count=1, node_list=[]), launch(90, 91)],
            {"queue": 20, "launch": 15, "rendezvous": 5},
        ),
    ],
    ids=["started again by hand", "a new job", "launcher killed", "requeued", "the node went down"],
)
def test_time_between_two_launches(between: list[Event], expected: dict[str, float]) -> None:
    begin, end = [launch(0, 0), job(0), spent(0, 60, 60)], [job(95), spent(100, 140, 140), ended(140)]
    found = account([*begin, *between, *end])
    assert of_one(found) == {"productive": 100, **expected}
    assert found.goodput == pytest.approx(100 / (140 - expected.get("idle", 0)))


def test_without_launcher_nobody_knows_what_was_between() -> None:
    found = account([spent(0, 60, 60, elastic_run_id=None), spent(100, 140, 140, elastic_run_id=None)])
    assert of_one(found) == {"productive": 100, "idle": 40}


def test_without_launcher_who_was_killed_has_died_where_it_was_recorded() -> None:
    first, second = (spent(at, at + 40, at + 40, elastic_run_id=None) for at in (0, 100))
    of_none = dict.fromkeys(("fit", "elastic_run_id", "restart_count", "step", "worker", "signal"))
    killed = Killed(time=41, rank=0, node="n1", reason="rank 0 was killed by SIGKILL", **of_none)
    found = account([first, killed, second])
    assert [(each.time < 100, each.cause) for each in found.interruptions] == [(True, "killed")]


def test_the_elastic_launcher_alone() -> None:
    assert of_one(account([spent(0, 60, 60), spent(100, 140, 140)])) == {"productive": 100, "rendezvous": 40}


def test_a_run_that_goes_on() -> None:
    kept = spent(0, 50, 60, "validation")
    assert of_one(account([launch(0, 0), job(0)], [kept], now=75)) == {"productive": 50, "validation": 25}
    recorded = spent(0, 62, 62)
    assert of_one(account([launch(0, 0), job(0), recorded], [kept])) == {"productive": 62}


def test_a_node_that_went_down_has_what_was_kept_of_it() -> None:
    """Of the other one the watchdog has recorded all; the run went on 20 s later."""
    first, second = spent(0, 50, 50, ranks=[0]), spent(0, 40, 40, ranks=[1], node="n2")
    fault = Fault(time=60, rank=None, reason="lost")
    found = account([launch(0, 0), job(0), first, fault, spent(70, 100, 100), ended(100)], [second])
    assert found.total == 200
    assert found.by_category["productive"] == 50 + 40 + 60
    assert found.by_category["teardown"] == 10
    assert found.by_category["rendezvous"] == 20 + 20


def test_a_node_that_went_down_before_anything_was_kept_of_it() -> None:
    """Its rank has done what the other one has."""
    found = account([launch(0, 0), job(0), spent(0, 50, 50, ranks=[0]), ended(60)])
    assert found.by_category["productive"] == 50 + 50
    assert found.by_category["other"] == 0
    assert found.total == 120


def test_the_order_of_sums_is_that_of_the_categories_whatever_the_seed_of_hashes() -> None:
    """Else the last digits of a report are others each time."""
    seconds = dict.fromkeys(time_account.CATEGORIES, 0.1)
    found = account([spent(0, 50, 50, ranks=[0], seconds=seconds)])
    by_node = [[loss.category for loss in found.seconds if loss.node == node] for node in ("n1", "")]
    assert by_node[0] == by_node[1]


@pytest.mark.parametrize(
    "spoiled",
    [
        {"ranks": [0, 1, 2]},
        {"began": []},
        {"seconds": {"productive": [1.0]}},
        {"ended": None},
        {"ended": [float("inf")] * 2},
        {"seconds": {"productive": [float("nan")] * 2}},
        {"doing": [], "ranks": [7]},
    ],
)
def test_what_another_version_has_recorded_otherwise(spoiled: dict[str, Any]) -> None:
    line = spent(0, 50, 50).to_json() | spoiled
    event = parse(line)
    assert event is not None
    assert account([launch(0, 0), event, ended(60)]).by_category["launch"] == 60


def test_of_workers_that_were_killed_before_anything_was_kept_of_them_the_events_are_known() -> None:
    """Their launch was killed with them; what the next one records about that is no matter of those before."""
    start: dict[str, Any] = dict.fromkeys(WorkersStart.own_fields) | {"rank": 0, "world_size": 2}
    stopped = FitInterrupted(time=48, rank=0, fit=0, step=3, reason="signal 15")
    events: list[Event] = [
        *(launch(0, 0), job(0), WorkersStart(time=4, **start), stopped, spent(2, 48, 50), ended(50)),
        *(launch(60, 60), job(60), WorkersStart(time=65, **start | {"elastic_run_id": "killed"})),
        *(SignalReceived(time=80, rank=0, fit=0, signum=15), LauncherKilled(time=91), launch(90, 91), job(91)),
        *(WorkersStart(time=96, **start), spent(95, 100, 120), ended(120)),
    ]
    found = account(events)
    assert [each.cause for each in found.interruptions] == ["preempted", "killed"]
    spent_on = of_one(found)
    assert spent_on["other"] == 15
    assert spent_on["idle"] == 10 + 10


def test_every_category_has_a_meaning() -> None:
    """In the head of the module, from which the documentation takes it."""
    assert set(re.findall(r"^``(\w+)`` +\w", goodput.__doc__ or "", flags=re.MULTILINE)) == set(CATEGORIES)


# The report


FAULT = Fault(time=70, rank=1, kind="hang", fit=0, step=6, reason="stuck")
HUNG = [
    *(launch(0, 0), job(0), spent(0, 50, 75, "productive"), FAULT),
    spent(80, 110, 110, seconds={"imports": 4.0, "productive": 16.0, "wasted_progress": 10.0}),
    *(ended(110), launch(150, 150), job(150)),
    spent(150, 190, 190, seconds={"imports": 10.0, "productive": 29.0, "checkpoint_save": 1.0}),
    ended(190),
]


def run_with(path: Path, *events: Event) -> Path:
    path.mkdir(exist_ok=True)
    (path / "ledger.jsonl").write_text("".join(f"{json.dumps(event.to_json())}\n" for event in events))
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return run_with(tmp_path, *HUNG)


def test_the_json_says_what_was_lost(run_dir: Path) -> None:
    found = json.loads(report(run_dir, as_json=True))
    assert (found["goodput"], found["ettr"]) == (95 / 150, 96 / 150)
    assert (found["ranks"], found["rank_seconds"], found["categories"]["idle"]) == (2, 380, 80)
    assert (found["began"], found["ended"], found["is_ongoing"]) == (0, 190, False)
    assert found["categories"].keys() == set(CATEGORIES)
    [hang] = found["interruptions"]
    assert [hang[part] for part in PARTS] == [40, 10, 18, 0, 20]
    assert {name: seconds for name, seconds in hang["phases"].items() if seconds} == {
        **{"detect": 40, "end": 10, "rendezvous": 10, "imports": 8, "redo": 20}
    }
    assert found["restarts"] is None, "it came to no first step"
    assert (hang["rank_seconds"], hang["cause"], hang["node"], hang["reason"]) == (88, "hang", "n1", "stuck")
    assert [(each["name"], each["rank_seconds"], each["node"]) for each in found["losses"]] == [
        ("hang", 88, "n1"),
        ("first start", 20, None),
        ("checkpoint_save", 2, None),
    ]
    assert found["losses"][0]["share"] == 88 / 300


def test_the_report_begins_with_the_verdict(run_dir: Path) -> None:
    lines = report(run_dir).splitlines()[2:]
    assert re.findall(r"[\d.]+ (?:%|s|ranks|min \d+ s)", lines[0]) == [
        "63.3 %",
        "64.0 %",
        "2 ranks",
        "3 min 10 s",
        "40.0 s",
    ]
    assert [re.findall(r"[\d.]+ %", line) for line in lines[1:4]] == [
        ["29.3 %", "13.3 %", "6.7 %"],
        ["6.7 %"],
        ["0.7 %"],
    ]
    [hang] = [line.split() for line in lines if "stuck" in line and " hang " in line and "fault" not in line]
    assert hang[3:10] == ["n1", "20.0", "5.0", "9.0", "0.0", "10.0", "44.0"]


def test_what_a_restart_takes_is_shown_by_phase(tmp_path: Path) -> None:
    """The median of each phase, and those of the longest; what never came back to a step does not count."""
    events = [launch(0, 0), job(0), spent(0, 10, 10, seconds={"productive": 10.0})]
    began = 10.0
    for imports, redone in ((4.0, 3.0), (20.0, 1.0), (6.0, 2.0), (50.0, 0.0)):
        killed = Fault(time=began, rank=1, kind="died", fit=0, step=6, reason="gone")
        seconds = {"imports": imports, "setup": 1.0, "first_step": 0.5, "wasted_progress": redone, "productive": 9.0}
        if not redone:
            seconds = {"imports": imports}
        end = began + 2.0 + sum(seconds.values())
        events += [killed, spent(began + 2.0, end, end, seconds=seconds)]
        began = end
    run_with(tmp_path, *events)
    found = json.loads(report(tmp_path, as_json=True))
    assert [each["phases"]["imports"] for each in found["interruptions"]] == [8, 40, 12, 100]
    restarts = found["restarts"]
    assert restarts["count"] == 3
    shown = {"rendezvous": 4, "imports": 12, "setup": 2, "first_step": 1, "redo": 4, "sum": 23}
    assert {name: seconds for name, seconds in restarts["median"].items() if seconds} == shown
    assert (restarts["longest"]["imports"], restarts["longest"]["redo"], restarts["longest"]["sum"]) == (40, 2, 49)
    lines = report(tmp_path).splitlines()
    begin = lines.index("From a fault to the first new step, in seconds per rank")
    assert [line.split() for line in lines[begin + 1 : begin + 4]] == [
        ["rendezvous", "imports", "setup", "first", "step", "redo", "sum"],
        ["median", "of", "3", "2.0", "6.0", "1.0", "0.5", "2.0", "11.5"],
        ["longest", "2.0", "20.0", "1.0", "0.5", "1.0", "24.5"],
    ]


def test_an_interruption_that_only_the_ledger_knows_is_shown_as_well(run_dir: Path) -> None:
    """Its workers were ended before their times were kept."""
    start: dict[str, Any] = dict.fromkeys(WorkersStart.own_fields)
    saved: dict[str, Any] = dict.fromkeys(Saved.own_fields) | {"fit": 0, "step": 8}
    resumed: dict[str, Any] = dict.fromkeys(Resumed.own_fields) | {"fit": 0, "step": 6}
    killed = [WorkersStart(time=200, **start), Saved(time=210, **saved), WorkersStart(time=220, **start)]
    run_with(run_dir, WorkersStart(time=1, **start), *HUNG[:4], *killed, Resumed(time=230, **resumed))
    hang, crash = json.loads(report(run_dir, as_json=True))["interruptions"]
    assert (hang["cause"], hang["detect"], hang["resumed_step"]) == ("hang", 40, None)
    assert (crash["cause"], crash["rank_seconds"], crash["redo"]) == ("crash", None, None)
    assert (crash["steps_lost"], crash["is_lower_bound"], crash["resumed_step"]) == (2, True, 6)
    assert "Interruptions: 1 hang, 1 crash. Steps lost: at least 2." in report(run_dir)


def test_an_interruption_is_shown_once_though_times_of_accounts_are_rounded() -> None:
    resumed: dict[str, Any] = dict.fromkeys(Resumed.own_fields) | {"fit": 0, "step": 6}
    stop = FitInterrupted(time=9.9, fit=0, step=6, reason="signal 15")
    before = [Resumed(time=1, **resumed), stop, spent(0, 10, 10.001, attempt="one")]
    before[-1].time = 10.0006  # when it is recorded; rounded, it has ended later
    events = [*before, Resumed(time=20, **resumed), spent(11, 30, 30, attempt="two")]
    (shown,) = all_interruptions(account(events).interruptions, interruptions(events))
    assert (shown["cause"], shown["steps_lost"]) == ("preempted", 0)


def test_a_run_that_is_killed_ends_with_its_last_sign_of_life(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one whose ranks live, on whatever node, ends now."""
    run_with(run_dir, launch(0, 0))
    time_account.keep(run_dir, "n1", spent(10, 60, 60, "productive"))
    assert json.loads(report(run_dir, as_json=True))["ended"] == 60
    monkeypatch.setattr("time.time", lambda: 80.0)
    found = json.loads(report(run_dir, as_json=True))
    assert (found["ended"], found["is_ongoing"], found["categories"]["productive"]) == (80, True, 140)
    assert "so far" in report(run_dir)


def test_nothing_was_launched(tmp_path: Path) -> None:
    found = json.loads(report(tmp_path, as_json=True))
    assert (found["began"], found["goodput"], found["interruptions"]) == (None, None, [])


def test_ranks_that_are_absent_while_the_others_go_on_are_in_no_share() -> None:
    first = spent(0.0, 9.0, 10.0, attempt="a", restart_count=0)
    died = Fault(time=10.0, rank=1, node="n1", kind="died", reason="killed", elastic_run_id="job", restart_count=0)
    one: dict[str, Any] = {"world_size": 1, "ranks": [0]}
    fewer = [spent(10.0, 20.0, 20.0, attempt="b", restart_count=1, **one)]
    fewer += [spent(20.0, 40.0, 40.0, attempt="c", restart_count=2, **one)]
    again = spent(40.0, 50.0, 50.0, attempt="d", restart_count=3)
    found = account([launch(0.0, 0.0), first, died, *fewer, again, ended(50.0)])
    assert found.absent_s == pytest.approx(30.0)
    assert found.total == pytest.approx(100.0 - 30.0)
    another_job = [spent(10.0, 20.0, 20.0, attempt="b", elastic_run_id="next", **one)]
    assert account([launch(0.0, 0.0), first, *another_job, ended(20.0)]).absent_s == 0, "it was never to have them"


@pytest.mark.parametrize("seconds", [{"productive": ["x"]}, {"productive": {"a": 1}}, {"productive": []}])
def test_accounts_that_are_none_are_passed_over(seconds: dict[str, Any]) -> None:
    bad = spent(0.0, 9.0, 10.0)
    bad.seconds = seconds
    assert account([launch(0.0, 0.0), bad, spent(10.0, 20.0, 20.0), ended(20.0)]).by_category["productive"] == 20.0
