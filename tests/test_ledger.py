from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience.launch.budget import Budget
from lightning_resilience.launch.cli import main
from lightning_resilience.launch.job_info import log_job_info
from lightning_resilience.launch.report import report
from lightning_resilience.launch.schedulers.slurm import get_slurm_info
from lightning_resilience.launch.status import progress_line, status
from lightning_resilience.run import history
from lightning_resilience.run import ledger as module
from lightning_resilience.run.failures import cause_of_end
from lightning_resilience.run.history import read_history, troubles
from lightning_resilience.run.interruptions import Interruption, interruptions
from lightning_resilience.run.run_directory import Outcome, RunDirectory
from tests.ledgers import Ledger, events_of, read_ledger

ROOT = Path(__file__).parents[1]


def write_many(path: Path, rank: int, count: int) -> None:
    ledger = Ledger(path, rank)
    for index in range(count):
        ledger.record("saved", step=index, padding="x" * 300)


def test_events_come_back_in_order_with_who_and_where(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "new" / "run" / "ledger", rank=3)
    ledger.record("saved", step=7, path=Path("/somewhere"))
    ledger.record("finished")
    first, second = read_ledger(ledger.path)
    assert (first["event"], first["rank"], first["step"], first["path"]) == ("saved", 3, 7, "/somewhere")
    assert first["node"] == os.uname().nodename
    assert first["time"] <= second["time"]
    assert second["event"] == "finished"


def test_what_is_only_read_moves_no_order(tmp_path: Path) -> None:
    """Another thread of the process records meanwhile, and has its own view of the order."""
    ahead = time.time() + 1e6
    (tmp_path / "other.jsonl").write_text(json.dumps({"event": "saved", "time": ahead, "order": ahead}) + "\n")
    assert len(Ledger(tmp_path, only_reads=True).events()) == 1
    writer = Ledger(tmp_path)
    writer.record("before")  # of the other host's clock nothing is known here yet
    assert [event.name for event in writer.events()] == ["before", "saved"]
    writer.record("after")
    assert [event.name for event in writer.events()] == ["before", "saved", "after"]


def test_a_missing_ledger_is_empty(tmp_path: Path) -> None:
    assert list(read_ledger(tmp_path / "missing")) == []


def test_torn_and_foreign_lines_are_skipped_and_the_next_event_is_not_lost_with_them(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.record("start")
    with open(own_file(ledger.path), "ab") as file:
        file.write(b'[1]\n"text"\n{"no": "event"}\n{"event": 1}\n\xff\xfe\n\n{"event": "sav')
    ledger.record("resumed", step=1)
    ledger.record("saved", step=2)
    assert [event["event"] for event in read_ledger(ledger.path)] == ["start", "resumed", "saved"]


def test_each_line_is_read_once_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a month there are tens of thousands, and the start of a rank asks for them ten times."""
    parsed, parse = [], module._parse
    monkeypatch.setattr(module, "_parse", lambda line: (parsed.append(line), parse(line))[1])
    ledger = Ledger(tmp_path / "ledger")
    for step in range(3):
        ledger.record("saved", step=step)
        assert [event.step for event in ledger.events()] == list(range(step + 1))
        assert read_history(tmp_path).safe_step() == read_history(ledger.path).safe_step() == step
        assert read_history(tmp_path).events == ledger.events()
        ledger.catch_up()
    assert len(parsed) == 3
    assert module.read_ledger(tmp_path) == ledger.events(), "what a user reads, and may change, is another copy"
    assert len(parsed) == 6


def test_a_ledger_that_has_taken_the_place_of_another_is_read_anew(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.record("saved", step=1)
    assert read_history(ledger.path).safe_step() == 1
    file = own_file(ledger.path)
    os.truncate(file, 0)  # the same file as far as the system knows, as where its number is given to the next one
    for step in (2, 3):
        ledger.record("resumed", tier="local", step=step, padding="it is longer than the other one was")
    assert [event.step for event in ledger.events()] == [2, 3]
    assert read_history(ledger.path).safe_step() is None
    assert read_history(ledger.path).verified_step == 3


@pytest.mark.parametrize(("owner", "name"), [(module, "_parse"), (module, "_POSITION"), (history.FailureCounts, "add")])
def test_a_handler_that_raises_in_the_middle_of_a_read_costs_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.record("start", restart_count=0)
    assert len(read_history(ledger.path).events) == 1
    for step in range(4):
        ledger.record("saved", step=step)
    ledger.record("start", restart_count=1)
    real, calls = getattr(owner, name), iter(range(100))

    def interrupted(*args: Any) -> Any:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            read_history(ledger.path)
    assert [event.name for event in ledger.events()] == ["start", *["saved"] * 4, "start"]
    assert read_history(ledger.path).events == ledger.events()
    assert read_history(ledger.path).failures.in_job == 1


def test_threads_that_read_at_once_lose_nothing(tmp_path: Path) -> None:
    ledger, found = Ledger(tmp_path / "ledger"), []

    def read() -> None:
        steps: list[int | None] = []
        while len(steps) < 300:
            for events in (read_history(ledger.path).events, ledger.events()):
                found.append(steps := [event.step for event in events])

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(300):
        ledger.record("saved", step=step)
    for thread in threads:
        thread.join(60)
    assert all(steps == list(range(len(steps))) for steps in found)
    assert max(map(len, found)) == 300


def own_file(path: Path) -> Path:
    [file] = path.iterdir()
    return file


def test_processes_that_write_at_once_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, rank, 200)) for rank in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = [
        line for line in own_file(path).read_bytes().splitlines() if line
    ]  # a writer may see half of another's line
    assert len(lines) == 800
    steps: dict[int, list[int]] = {}
    for event in map(json.loads, lines):
        steps.setdefault(event["rank"], []).append(event["step"])
    assert steps == {rank: list(range(200)) for rank in range(4)}


WRITES = """
import itertools, sys
sys.path.append({root!r})
from tests.ledgers import Ledger
ledger = Ledger({path!r})
print(flush=True)
for step in itertools.count():
    ledger.record("saved", step=step)
"""


def test_a_killed_writer_costs_at_most_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITES.format(root=str(ROOT), path=str(path))], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        while not path.exists() or not list(path.iterdir()):
            pass
        size = own_file(path).stat().st_size
        while own_file(path).stat().st_size < size + 20_000:
            pass
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    events = list(read_ledger(path))
    lines = own_file(path).read_bytes().splitlines()
    assert len(lines) - len(events) <= 3
    before = [event["step"] for event in events]
    runs = before.count(0)
    assert runs == 3
    assert all(after in (step + 1, 0) for step, after in pairwise(before))


def test_storage_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    ledger = Ledger(tmp_path / "file" / "ledger")
    with caplog.at_level(logging.WARNING):
        ledger.record("saved", step=1)
        ledger.record("saved", step=2)
    assert sum("cannot be written" in message for message in caplog.messages) == 1
    assert sum("Ledger event" in message for message in caplog.messages) == 2


# Slurm and the job's facts


def test_no_slurm_outside_a_job() -> None:
    assert get_slurm_info({"SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": " "}) is None


def test_a_requeued_array_job() -> None:
    info = get_slurm_info(
        {
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NAME": "train",
            "SLURM_JOB_NODELIST": "n[1-4]",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_TASKS_PER_NODE": "2(x3),1",
            "SLURM_NODEID": "3",
            "SLURM_RESTART_COUNT": "2",
            "SLURM_JOB_PARTITION": "gpu",
            "SLURM_ARRAY_JOB_ID": "15",
            "SLURM_ARRAY_TASK_ID": "0",
        }
    )
    assert info is not None
    assert (info.job_id, info.job_name, info.node_list, info.num_nodes) == ("17", "train", "n[1-4]", 4)
    assert (info.ntasks_per_node, info.node_rank, info.partition) == (1, 3, "gpu")
    assert (info.restart_count, info.array_job_id, info.array_task_id) == (2, "15", 0)


def test_the_first_start_of_a_job_on_an_older_slurm() -> None:
    info = get_slurm_info({"SLURM_JOBID": " 17\n", "SLURM_NODELIST": "n1", "SLURM_NNODES": "1"})
    assert info is not None
    assert (info.job_id, info.node_list, info.num_nodes) == ("17", "n1", 1)
    assert info.restart_count == 0


def test_the_tasks_of_a_step_go_before_those_of_the_job() -> None:
    tasks = {"SLURM_NTASKS_PER_NODE": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "3"}
    for expected in (1, 2, 3):
        info = get_slurm_info({"SLURM_JOB_ID": "1", **tasks})
        assert info is not None
        assert info.ntasks_per_node == expected
        tasks.pop(next(iter(tasks)))


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [
        ("2", "0", 2),
        ("2(x3)", "2", 2),
        ("2(x3)", "3", None),
        ("4,2(x2),1", "0", 4),
        ("4,2(x2),1", "2", 2),
        ("4, 2(x2) ,1", "3", 1),
        ("two", "0", None),
        ("2(x", "0", None),
        ("", "0", None),
    ],
)
def test_tasks_per_node(tasks: str, node: str, expected: int | None) -> None:
    info = get_slurm_info({"SLURM_JOB_ID": "1", "SLURM_TASKS_PER_NODE": tasks, "SLURM_NODEID": node})
    assert info is not None
    assert info.ntasks_per_node == expected


def test_garbage_is_none_not_an_error() -> None:
    names = ("JOB_NUM_NODES", "NNODES", "NODEID", "RESTART_COUNT", "ARRAY_TASK_ID", "NTASKS_PER_NODE")
    info = get_slurm_info({"SLURM_JOB_ID": "x", **{f"SLURM_{name}": "-1.5 garbage" for name in names}})
    assert info is not None
    assert (info.num_nodes, info.node_rank, info.restart_count, info.array_task_id) == (None, None, 0, None)
    assert info.ntasks_per_node is None


def test_the_facts_of_a_job_are_logged_recorded_and_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("WORLD_SIZE", "8")
    ledger = Ledger(tmp_path / "ledger")
    with caplog.at_level(logging.INFO):
        info = log_job_info(ledger)
    assert (info["world_size"], info["slurm"]["job_id"]) == (8, "17")
    assert info["versions"]["torch"]
    [event] = read_ledger(ledger.path)
    assert info.items() <= event.items()
    assert len(caplog.messages) == 1


# The report


def ledger_of(tmp_path: Path, *events: dict[str, Any]) -> Path:
    with open(tmp_path / "ledger.jsonl", "w") as file:
        for number, event in enumerate(events):
            file.write(json.dumps({"time": 1000.0 + 10 * number, "rank": 0, "node": "n1"} | event) + "\n")
    return tmp_path


STORY: tuple[dict[str, Any], ...] = (
    {"event": "launch", "rank": None, "command": ["train.py"]},
    {"event": "job_start", "rank": None},
    {"event": "start"},  # 1020
    {"event": "fresh", "fit": 0},
    {"event": "saved", "fit": 0, "step": 10},
    {"event": "saved", "fit": 0, "step": 20},  # 1050
    {"event": "fault", "fit": 0, "step": 27, "rank": 1, "reason": "RuntimeError: boom"},
    {"event": "start", "restart_count": 1},
    {"event": "quarantined", "fit": 0, "path": "step-20.ckpt", "reason": "checksum"},
    {"event": "resumed", "fit": 0, "step": 10},  # 1090
    {"event": "signal", "signum": 15},
    {"event": "interrupted", "fit": 0, "step": 15},
    {"event": "saved", "fit": 0, "step": 15},  # 1120
    {"event": "exit", "rank": None, "status": "interrupted", "reason": "the launcher received SIGTERM"},
    {"event": "launch", "rank": None},
    {"event": "start"},
    {"event": "resumed", "fit": 0, "step": 15},  # 1160
    {"event": "launcher_killed", "rank": None},
    {"event": "launch", "rank": None},
    {"event": "start"},
    {"event": "resumed", "fit": 0, "step": 15},  # 1200
    {"event": "finished", "fit": 0, "step": 30},
    {"event": "exit", "rank": None, "status": "finished"},
)


def test_what_each_interruption_cost(tmp_path: Path) -> None:
    crash, preempted, killed = interruptions(read_history(ledger_of(tmp_path, *STORY) / "ledger").events)
    assert crash == Interruption(1060.0, "crash", "RuntimeError: boom", 27, 10, 1090.0 - 1040.0)
    assert crash.steps_lost == 17
    assert (preempted.kind, preempted.reason) == ("preempted", "the launcher received SIGTERM")
    assert (preempted.reached_step, preempted.resumed_step) == (15, 15)
    assert (preempted.steps_lost, preempted.seconds_lost) == (0, 1160.0 - 1120.0)
    assert (killed.kind, killed.resumed_step, killed.seconds_lost) == (
        "launcher killed",
        15,
        1200.0 - 1160.0,
    )


def test_what_was_lost_since_a_local_save(tmp_path: Path) -> None:
    """Of which there was no event: the resume says when it was."""
    story = [
        {**event, "tier": "local", "saved_at": 1055.0} if event["event"] == "resumed" else event for event in STORY
    ]
    crash, preempted, killed = interruptions(read_history(ledger_of(tmp_path, *story) / "ledger").events)
    assert crash.seconds_lost == 1090.0 - 1055.0
    assert (preempted.seconds_lost, killed.seconds_lost) == (1160.0 - 1055.0, 1200.0 - 1055.0)


def test_the_end_says_what_went_wrong_on_the_way() -> None:
    failed = {"event": "save_failed", "fit": 0, "step": 8}
    bad = {"event": "bad_step", "fit": 0, "step": 5}
    events = [{**failed, "time": 1.0}, {**failed, "time": 2.0}, {**bad, "time": 3.0, "rank": 0}]
    events += [{**bad, "time": 3.1, "rank": 1}, {"event": "quarantined", "fit": 0, "time": 4.0}]
    assert troubles(events_of(events)) == "2 saves failed, 1 step was bad, 1 checkpoint was set aside"
    assert troubles(events_of([{"event": "saved", "fit": 0, "step": 8, "time": 1.0}])) == ""


def test_a_report_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = ledger_of(tmp_path, *STORY)
    RunDirectory(run_dir).outcome = Outcome("finished", "the script ended")
    main(["report", str(run_dir)])
    text = capsys.readouterr().out
    assert "Interruptions: 1 crash, 1 preempted, 1 launcher killed. Steps lost: at least 17." in text
    assert "Outcome: finished (the script ended)" in text
    assert "reason=RuntimeError: boom" in text
    assert "path=step-20.ckpt reason=checksum" in text
    assert any(line.split()[2:] == ["saved", "rank", "0", "n1", "0:", "20"] for line in text.splitlines())
    killed = next(line for line in text.splitlines() if "launcher killed  " in line)
    assert killed.split("launcher killed")[1].split()[:9] == [*["-"] * 6, "40.0", ">=0", "15"]


def test_of_many_events_alike_a_report_shows_the_first_and_the_last(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"event": "saved", "time": 10 + step, "node": "n1", "rank": 0, "fit": 0, "step": step} for step in range(1, 90)
    ]
    events.insert(84, {"event": "fault", "time": 94.5, "node": "n1", "rank": 1, "kind": "hang", "reason": "stuck"})
    run_dir = ledger_of(tmp_path, *events)
    text = report(run_dir)
    steps = [int(line.rpartition(" 0: ")[2]) for line in text.splitlines() if " saved " in line and " 0: " in line]
    assert steps == [1, 84, 85, 86, 87, 88, 89]
    assert "... 82 more" in text
    assert sum("stuck" in line for line in text.partition("Timeline")[2].splitlines()) == 1


def test_the_lines_of_a_report_stay_short(tmp_path: Path) -> None:
    fault = {"event": "fault", "fit": 0, "step": 1, "reason": "no\\n" * 900}
    again = {"event": "start", "elastic_run_id": "x" * 200}
    text = report(ledger_of(tmp_path, again, fault, again))
    assert max(map(len, text.splitlines())) < 200
    assert "elastic_run_id" not in text


def test_the_first_steps_of_a_fit_are_lost_as_well(tmp_path: Path) -> None:
    """And those of the fit before it are not."""
    fit = [{"event": "fresh", "fit": 1, "step": 3}, {"event": "fault", "fit": 1, "step": 7, "reason": "boom"}]
    first = [{"event": "start"}, {"event": "fresh", "fit": 0}, {"event": "saved", "fit": 0, "step": 100}]
    events = [*first, *fit, {"event": "start"}, fit[0]]
    [crash] = interruptions(read_history(ledger_of(tmp_path, *events) / "ledger").events)
    assert (crash.reached_step, crash.resumed_step, crash.steps_lost) == (7, 0, 7)
    assert crash.seconds_lost == 1060.0 - 1000.0


def test_nothing_is_lost_to_a_copy_that_is_further_than_the_last_word_of_the_workers(tmp_path: Path) -> None:
    """Nor to a node whose clock is ahead."""
    copy = {"event": "resumed", "fit": 0, "step": 15, "tier": "local", "saved_at": 2000.0}
    events = [{"event": "start"}, {"event": "saved", "fit": 0, "step": 10}, {"event": "start"}, copy]
    [killed] = interruptions(read_history(ledger_of(tmp_path, *events) / "ledger").events)
    assert (killed.reached_step, killed.resumed_step, killed.steps_lost, killed.seconds_lost) == (10, 15, 0, 0.0)


def test_a_run_that_was_given_up_or_is_at_work(tmp_path: Path) -> None:
    at_work = STORY[:6]
    assert interruptions(read_history(ledger_of(tmp_path, *at_work) / "ledger").events) == []
    given_up = ledger_of(tmp_path, *STORY[:7], {"event": "failure", "rank": None, "reason": "rank 1: boom"})
    [crash] = interruptions(read_history(given_up / "ledger").events)
    assert (crash.kind, crash.resumed_step, crash.seconds_lost) == ("crash", None, None)
    assert "crash" in report(given_up)


def test_a_run_that_was_stopped_and_is_not_resumed_yet(tmp_path: Path) -> None:
    found = interruptions(read_history(ledger_of(tmp_path, *STORY[:14]) / "ledger").events)
    assert [(each.kind, each.resumed_step) for each in found] == [("crash", 10), ("preempted", None)]


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ([{"event": "interrupted"}], "preempted"),
        ([{"event": "fault", "reason": "boom"}, {"event": "interrupted", "rank": 1}], "crash"),
        ([], "crash"),
    ],
)
def test_who_was_stopped_without_our_launcher_was_preempted(
    tmp_path: Path, end: list[dict[str, Any]], kind: str
) -> None:
    begin = {"event": "fresh", "fit": 0}
    [found] = interruptions(read_history(ledger_of(tmp_path, begin, *end, begin) / "ledger").events)
    assert found.kind == kind


@pytest.mark.parametrize(("last", "is_known"), [("halted", True), ("straggler_stop", True), ("saved", False)])
def test_workers_that_ended_in_order_have_said_how_far_they_were(tmp_path: Path, last: str, is_known: bool) -> None:
    begin = {"event": "resumed", "fit": 0, "step": 3}
    events = [begin, {"event": last, "fit": 0, "step": 7}, begin]
    [found] = interruptions(read_history(ledger_of(tmp_path, *events) / "ledger").events)
    assert (found.steps_lost, found.is_reached_known) == (4, is_known)


def test_the_outcome_of_a_run_without_our_launcher_is_that_of_its_last_fit(tmp_path: Path) -> None:
    run_dir = ledger_of(tmp_path, {"event": "fresh", "fit": 0}, {"event": "finished", "fit": 0, "step": 9})
    assert "Outcome: none; running, or killed." in report(run_dir)
    (run_dir / "fit-000").mkdir()
    RunDirectory(run_dir).fit(0).outcome = Outcome("finished", "all epochs are done")
    assert "Outcome: finished (all epochs are done)" in report(run_dir)


def test_a_launch_says_how_a_run_has_ended_whose_workers_could_not(tmp_path: Path) -> None:
    ended = {"event": "exit", "rank": None, "status": "interrupted", "exit_code": 75, "reason": "told to stop twice"}
    begun = {"event": "start", "elastic_run_id": "a", "restart_count": 0}
    assert "Outcome: interrupted (told to stop twice)" in report(ledger_of(tmp_path, begun, ended))
    assert "Outcome: none; running, or killed." in report(ledger_of(tmp_path, begun, ended, begun))


def test_a_start_that_only_says_that_it_is_in_vain_is_no_interruption(tmp_path: Path) -> None:
    fault = {"event": "fault", "rank": 0, "kind": "ValueError", "reason": "ValueError: on purpose"}
    start = {"event": "start", "elastic_run_id": "job"}
    halted = {"event": "outcome", "rank": 0, "status": "halted", "reason": "ValueError: on purpose, twice"}
    events = [
        *({**start, "restart_count": 0}, fault, {**start, "restart_count": 1}, fault, {**start, "restart_count": 2}),
        *(halted, {"event": "exit", "rank": None, "status": "halted", "reason": "ValueError: on purpose, twice"}),
    ]
    found = interruptions(read_history(ledger_of(tmp_path, *events) / "ledger").events)
    assert [each.reason for each in found] == ["ValueError: on purpose"] * 2


def test_a_run_without_our_launcher_has_interruptions_too(tmp_path: Path) -> None:
    events = [event for event in STORY if event["event"] in ("fresh", "saved", "fault", "resumed", "finished")]
    found = interruptions(read_history(ledger_of(tmp_path, *events) / "ledger").events)
    assert [each.resumed_step for each in found] == [10, 15, 15]


def test_the_steps_of_a_fit_that_others_come_before_are_counted(tmp_path: Path) -> None:
    """The script goes through those first, and restores what they have finished with."""
    events = [
        *({"event": "start"}, {"event": "fresh", "fit": 0}, {"event": "saved", "fit": 0, "step": 100}),
        *({"event": "finished", "fit": 0, "step": 100}, {"event": "fresh", "fit": 1}),
        {"event": "fault", "fit": 1, "step": 45, "reason": "rank 1 was killed by SIGKILL"},
        *({"event": "start"}, {"event": "resumed", "fit": 0, "step": 100}, {"event": "fresh", "fit": 1}),
    ]
    (found,) = interruptions(read_history(ledger_of(tmp_path, *events) / "ledger").events)
    assert (found.resumed_step, found.reached_step, found.steps_lost) == (0, 45, 45)


def attempt(restart_count: int, *events: dict[str, Any]) -> list[dict[str, Any]]:
    start = {"event": "start", "elastic_run_id": "job", "restart_count": restart_count, "verified_step": 30}
    return [start, {"event": "resumed", "fit": 0, "step": 30}, *events]


PEER_LOST = {"event": "fault", "fit": 0, "step": 37, "rank": 0, "kind": "PeerLost", "reason": "PeerLost: rank 1 left"}
HANG = {"event": "fault", "fit": 0, "step": 37, "rank": 1, "kind": "hang", "reason": "rank 1 stuck in train.py:80",
        "elastic_run_id": "job", "restart_count": 1}  # fmt: skip


def bad_row(number: int) -> list[dict[str, Any]]:
    fault = {"event": "fault", "rank": 1, "kind": "ValueError", "reason": f"ValueError: row {number} is bad"}
    ends = {"place": "train.py:80", "elastic_run_id": "job", "restart_count": 0}
    return [{**fault, "fit": 0, "step": 37}, {**fault, **ends}]


def test_the_report_says_which_failure_came_again(tmp_path: Path) -> None:
    preempted = [{"event": "interrupted"}, {"event": "exit", "rank": None, "status": "interrupted"}]
    events = [
        *attempt(0, *bad_row(8123)),
        *attempt(1, *preempted),
        *attempt(0, *preempted),
        *attempt(0, PEER_LOST, HANG),
        *attempt(1, PEER_LOST, *bad_row(17)),
        *attempt(2, *bad_row(9)),
        {"event": "failure", "rank": None, "reason": "rank 1: ValueError: row 9 is bad"},
        {"event": "exit", "rank": None, "status": "failed"},
    ]
    text = report(ledger_of(tmp_path, *events))
    again = (
        "The same failure for the 3rd time: ValueError at step 37 (train.py:80), each time after resuming from step 30."
    )
    assert [line for line in text.splitlines() if "same failure" in line] == [again]
    assert "Interruptions: 4 crash, 2 preempted." in text
    reasons = [found.reason for found in interruptions(read_history(tmp_path / "ledger").events)]
    assert reasons[3:] == ["rank 1 stuck in train.py:80", "ValueError: row 17 is bad", "ValueError: row 9 is bad"]


def test_a_run_at_work_and_failures_of_different_kinds_are_no_repetition(tmp_path: Path) -> None:
    events = [
        *attempt(0, *bad_row(1)),
        *attempt(1, PEER_LOST, HANG),
        *attempt(2, {"event": "saved", "fit": 0, "step": 37}),
    ]
    assert "same failure" not in report(ledger_of(tmp_path, *events, *attempt(3, *bad_row(1))))


@pytest.mark.parametrize("content", [b"", b"\x00\xff\n{", b'{"event": "start"}\n{"event": "start", "time": "x"}\n'])
def test_an_empty_or_torn_ledger_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(content)
    assert report(tmp_path)


def test_a_report_says_what_it_could_not_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('no JSON\n\n{"event": "of a later version"\n')
    assert report(tmp_path).endswith(
        "2 lines of the ledger are not events (torn by a kill, damaged, or of another version) and ignored here."
    )
    path.write_text('{"event": "start", "time": 1.0}\n\n{"event": "sav')
    assert "no event" not in report(tmp_path), "what is being written is none that was left out"
    with open(path, "a") as file:
        file.write('\n{"event": "saved", "time": 2.0, "step": 1}\n')
    assert "1 line of the ledger is not an event" in report(tmp_path)
    assert json.loads(report(tmp_path, as_json=True))["skipped_lines"] == 1


ODD = [None, True, -1, 1.5, 1e20, 10**30, float("nan"), float("inf"), "abc", "", [], [[1]], [None], {}, {"a": []}]
MORE: tuple[dict[str, Any], ...] = (
    {"event": "slice_start", "slurm_job_id": "7", "restart_count": 1, "node_list": ["n1", "n2"]},
    {"event": "launch", "slurm_job_id": "7", "slurm_restart_count": 1, "budget": {"in_job_restarts": 1}},
    {"event": "job_start", "run_id": "a", "retry": True, "max_restarts": 3},
    {"event": "start", "elastic_run_id": "a", "restart_count": 0, "world_size": 2, "nodes": 2, "verified_step": 3},
    {"event": "resumed", "fit": 0, "step": 10, "tier": "global", "saved_at": 1000.5},
    {"event": "saved", "fit": 0, "step": 20, "tier": "local", "seconds": 0.5},
    {"event": "workload_request", "action": "exclude_this_node", "reason": "slow"},
    {"event": "straggler_stop", "fit": 0, "step": 21, "devices": ["a"], "reason": "slow"},
    {"event": "fault", "kind": "hang", "place": "a.py:1", "section": "step", "limit": 3.0, "reason": "no"},
    {"event": "fault", "elastic_run_id": "a", "restart_count": 0, "reason": "no", "rank": 1},
    {"event": "start", "elastic_run_id": "a", "restart_count": 1, "world_size": 3},
    {"event": "failure", "run_id": "a", "exit_code": 1, "reason": "no"},
    {"event": "exit", "status": "interrupted", "exit_code": 75, "new_job": True, "reason": "no"},
    {"event": "slice_end", "how": "failed", "then": "requeue", "excluded": ["n2"], "reason": "no"},
    {"event": "slice_start", "slurm_job_id": "7", "restart_count": 2, "node_list": ["n1"]},
)


def test_no_odd_line_keeps_a_reader_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_resilience.launch.status._queue_state", lambda job_id: None)  # no real scheduler
    story = [*STORY, *MORE]
    reports = set()
    for number, event in enumerate(story):
        for name in ("time", "node", *event):
            odd = [event | {name: odd} for odd in ODD]
            ledger_of(tmp_path, *story[:number], *odd, *story[number + 1 :])
            history = read_history(tmp_path / "ledger")
            assert len(history.events) >= len(story) - 1
            Budget().decide(history, time.time())
            cause_of_end(history.events, "a")
            history.not_restored(0, 1)
            reports.add(report(tmp_path))
            assert status(tmp_path)
            assert progress_line(history)
    assert len(reports) > 100


@pytest.mark.parametrize("line", ["[" * 100_000, '{"event": "saved", "step": 1' + "0" * 5000 + "}"])
def test_a_line_that_cannot_be_parsed_is_skipped(tmp_path: Path, line: str) -> None:
    (tmp_path / "ledger.jsonl").write_text(f'{line}\n{{"event": "start"}}\n')
    assert [event["event"] for event in read_ledger(tmp_path / "ledger")] == ["start"]


def test_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no run has been started here" in report(tmp_path)
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "missing")])
    assert "is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["report", "diagnose", "watch"])
def test_a_folder_of_runs_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str) -> None:
    Ledger(tmp_path / "runs" / "gpt" / "ledger").record("start")
    with pytest.raises(SystemExit) as ended:
        main([action, str(tmp_path / "runs")])
    assert ended.value.code == 2
    assert f"it contains no ledger; run directories below it: {tmp_path / 'runs' / 'gpt'}" in capsys.readouterr().err


def test_nothing_to_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tmp_path / "missing")])
    assert ended.value.code == 2
    assert "missing does not exist" in capsys.readouterr().err


def test_an_event_of_which_only_a_part_is_written_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a disk that becomes full within the line."""
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
        Ledger(tmp_path).record("fault", reason="boom")
    assert "cannot be written" in caplog.text
    assert "boom" in caplog.text
    Ledger(tmp_path).record("fault", reason="later")
    assert [each["reason"] for each in read_ledger(tmp_path)] == ["later"]
