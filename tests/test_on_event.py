"""``--on-event``: which events are told, and a command that misbehaves does not disturb the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_resilience._formatting import shortened
from lightning_resilience.launch import on_event
from lightning_resilience.launch.notices import EVENTS, KEYS, SCHEMA, Notices
from lightning_resilience.launch.on_event import EventCommand, checked_command
from lightning_resilience.launch.report import all_interruptions
from lightning_resilience.run.goodput import account
from lightning_resilience.run.history import History
from lightning_resilience.run.interruptions import interruptions
from tests.ledgers import events_of

# -- which events ------------------------------------------------------------------------------------------------------

START = {"event": "start", "elastic_run_id": "job", "world_size": 2, "rank": 0}
FAULT = {"event": "fault", "kind": "died", "elastic_run_id": "job", "restart_count": 0, "node": "n2"}
LOST = FAULT | {"kind": "PeerLost", "reason": "Connection closed by peer"}
RUN: list[dict[str, Any]] = [
    {"event": "launch", "time": 0.0, "launch_id": "before"},
    {**START, "time": 1.0, "restart_count": 0},
    {"event": "saved", "time": 2.0, "step": 10},
    {"event": "launcher_killed", "time": 10.0},
    {"event": "launch", "time": 10.0, "launch_id": "mine"},
    {**START, "time": 12.0, "restart_count": 0, "verified_step": 10},
    *({"event": "save_failed", "time": 13.0 + each, "step": 20, "reason": "no space"} for each in (0.0, 0.1)),
    {"event": "saved", "time": 14.0, "step": 20},
    {"event": "save_refused", "time": 15.0, "step": 25, "reason": "not finite"},
    *({"event": "stragglers", "time": 16.0 + each, "ranks": [1], "reason": "rank 1 is slow"} for each in (0.0, 0.1)),
    {"event": "rollback", "time": 17.0, "step": 27, "reason": "NaN"},
    *({"event": "quarantined", "time": 18.0, "rank": rank, "path": "a.ckpt", "reason": "torn"} for rank in (0, 1)),
    {**LOST, "time": 20.0, "rank": 0},
    {**FAULT, "time": 20.1, "rank": 1, "reason": "rank 1 was killed by SIGKILL", "step": 30, "fit": 0},
    {"event": "left_out", "time": 21.0, "excluded": ["n2"], "reason": "the run continues with fewer nodes"},
    {**START, "time": 25.0, "restart_count": 1, "verified_step": 20},
    {"event": "resumed", "time": 26.0, "fit": 0, "step": 20},
    {"event": "exit", "time": 40.0, "status": "finished", "exit_code": 0, "reason": "the script ended"},
]
TOLD = [
    *("run_began", "restart", "save_failed", "save_failed", "stragglers", "rollback", "checkpoint_bad"),
    *("interruption", "node_excluded", "restart", "run_ended"),
]


def look(notices: Notices, lines: list[dict[str, Any]], now: float = 0.0, begin: int = 0) -> list[dict[str, Any]]:
    history = History([*events_of(lines[begin:])])
    found = all_interruptions(account(history.events).interruptions, interruptions(history.events))
    return notices.look(history, found, 33, now)


def notices() -> Notices:
    return Notices("mine", "0123", "/runs/gpt")


def test_what_is_told_of_a_run() -> None:
    found = look(notices(), RUN)
    assert [each["event"] for each in found] == TOLD
    assert set(TOLD) == EVENTS.keys()
    assert all({*each, "dropped"} == KEYS.keys() for each in found)
    assert all((each["schema"], each["run_id"], each["run_dir"]) == (SCHEMA, "0123", "/runs/gpt") for each in found)
    messages = {each["event"]: each["message"] for each in found}
    assert messages["run_began"].endswith("; the launcher before was killed")
    assert messages["run_ended"] == "finished: the script ended (exit code 0)"
    [interruption] = [each for each in found if each["event"] == "interruption"]
    assert interruption["message"].endswith("rank 1 was killed by SIGKILL")
    assert (interruption["attempt"], interruption["details"]["steps_lost"]) == (2, 10)
    json.dumps(found)


def test_each_event_is_told_once_also_if_it_turns_up_late() -> None:
    """At whatever line monitoring looks in between; and as a file of another host that is shown late."""
    for end in range(len(RUN)):
        told = notices()
        first, second = look(told, RUN[:end], now=0.0), look(told, RUN)
        assert sorted(each["event"] for each in first + second) == sorted(TOLD), end
        assert look(told, RUN) == []
    late = [line for line in RUN if line["event"] not in ("rollback", "left_out")]
    told = notices()
    look(told, late)
    assert [each["event"] for each in look(told, RUN)] == ["rollback", "node_excluded"]


def test_an_interruption_after_which_nothing_starts_is_told_too() -> None:
    until_fault = RUN[
        : RUN.index({"event": "left_out", "time": 21.0, "excluded": ["n2"], **{"reason": RUN[-4]["reason"]}})
    ]
    failed = [*until_fault, {"event": "failure", "time": 21.0, "run_id": "job", "reason": "given up"}]
    told = notices()
    assert "interruption" not in [each["event"] for each in look(told, failed, now=22.0)]
    assert [each["event"] for each in look(told, failed, now=40.0)] == ["interruption"]


def test_what_was_before_the_launch_is_not_told() -> None:
    assert look(notices(), RUN[:4]) == []


# -- the command -------------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def logged() -> list[str]:
    return []


@pytest.fixture
def command(logged: list[str], tmp_path: Path) -> Any:
    """Makes a command of a shell script."""
    made: list[EventCommand] = []

    def make(script: str, limit_s: float = 30.0) -> EventCommand:
        path = tmp_path / "command.sh"
        path.write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
        path.chmod(0o755)
        made.append(EventCommand([str(path)], limit_s, logged.append))
        return made[-1]

    yield make
    for each in made:
        assert not each._thread.is_alive()


def content(event: str = "interruption", **fields: Any) -> dict[str, Any]:
    return {"event": event, **fields}


def test_it_gets_the_events_in_order(command: Any, logged: list[str], tmp_path: Path) -> None:
    told = command("cat >> told; echo thanks")
    for number in range(3):
        told.put(content(number=number, text="ä" * 100_000))  # more than a pipe holds
    told.put(content("run_ended"))
    told.end()
    lines = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [each.get("number") for each in lines] == [0, 1, 2, None]
    assert [each["dropped"] for each in lines] == [0] * 4
    assert logged[0] == "--on-event interruption: thanks"


def test_one_that_hangs_is_killed_with_what_it_has_started(command: Any, logged: list[str], tmp_path: Path) -> None:
    """Also what ignores signals, and a child that holds its output open."""
    told = command("trap '' TERM; sleep 1000 & echo $! >> pids; echo $$ >> pids; echo hung; wait; sleep 1000", 0.5)
    told.put(content(text="x" * 1_000_000))  # more than a pipe holds, and it reads nothing
    told.put(content("run_ended"))
    told.end()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4
    wait_until(lambda: not any(map(runs, pids)))
    killed = "--on-event: the command has exceeded its time and was killed, at interruption: hung. "
    assert logged == [f"{killed}This is not logged again."]


def test_one_that_ends_leaves_nothing_behind(command: Any, tmp_path: Path) -> None:
    told = command("sleep 1000 & echo $! > pid")
    told.put(content("run_ended"))
    told.end()
    wait_until(lambda: not runs(int((tmp_path / "pid").read_text())))


def test_one_that_writes_without_end_is_cut_short(
    command: Any, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr(on_event, "shortened", lambda text, length: kept.append(len(text)) or shortened(text, length))
    told = command("yes", 0.3)
    told.put(content("run_ended"))
    told.end()
    assert logged[0].startswith("--on-event: the command has exceeded its time and was killed, at run_ended: y y y")
    assert len(logged[0]) < 400
    assert kept == [4096]


def test_one_that_fails_is_said_once(command: Any, logged: list[str]) -> None:
    told = command("echo no network >&2; exit 1")
    for _ in range(3):
        told.put(content())
    told.end()
    failed = "--on-event: the command has failed with exit code 1, at interruption: no network."
    assert logged == [f"{failed} This is not logged again."]


def test_one_that_is_removed_meanwhile(command: Any, logged: list[str], tmp_path: Path) -> None:
    told = command("true")
    (tmp_path / "command.sh").unlink()
    told.put(content())
    told.put(content())
    told.end()
    assert len(logged) == 1
    assert "could not be run ([Errno 2] No such file or directory" in logged[0]


def test_of_too_many_events_the_oldest_are_dropped_and_counted(command: Any, logged: list[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    told = command("read line; echo $line >> told; [ -e went ] || { touch went; cat go; }")
    told.put(content(number=0))
    wait_until((tmp_path / "went").exists)
    for number in range(1, 26):
        told.put(content(number=number))
    (tmp_path / "go").write_text("")
    told.end()
    lines = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [each["number"] for each in lines] == [0, *range(6, 26)]
    assert [each["dropped"] for each in lines] == [0, *[5] * 20]
    assert logged == ["--on-event: the command was too slow; events dropped: 5."]


def test_the_end_of_the_run_is_told_although_those_before_hang(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_event, "HURRIED_OTHERS_END_WITHIN_S", 0.1)
    told = command("read line; case $line in *run_ended*) echo $line > told;; *) sleep 1000;; esac")
    for _ in range(3):
        told.put(content())
    told.put(content("run_ended"))
    told.end(in_hurry=lambda: True)
    assert json.loads((tmp_path / "told").read_text()) == {"event": "run_ended", "dropped": 2}


def test_a_signal_while_the_last_command_runs_hurries_it(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_event, "HURRIED_LIMIT_S", 0.1)
    told = command("sleep 1000", 1000)
    told.put(content("run_ended"))
    wait_until(lambda: told._process is not None)
    signals = iter([False])  # when the end begins, and from then on
    told.end(in_hurry=lambda: next(signals, True))
    assert not told._thread.is_alive()


def test_what_is_told_is_json_also_of_numbers_that_are_not_finite(command: Any, tmp_path: Path) -> None:
    told = command("cat > told")
    told.put(content(details={"limit": float("inf")}))
    told.end()
    assert "Infinity" not in (tmp_path / "told").read_text()


def test_a_second_signal_ends_the_waiting(command: Any) -> None:
    told = command("sleep 1000", 1000.0)
    told.put(content("run_ended"))
    told.end(must_go=lambda: told._process is not None)
    told._thread.join()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no-such-program --x", "there is no program no-such-program that can be run$"),
        ("notify.sh", r"there is no program notify\.sh that can be run; for the one in this folder give \./notify\.sh"),
        ("./plain.txt", r"there is no program \./plain\.txt that can be run$"),
        ("say 'hello", "No closing quotation"),
        (" ", "it is empty"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused(
    text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.txt").touch()
    Path("notify.sh").touch(0o755)
    with pytest.raises(ValueError, match=problem):
        checked_command(text)
    assert checked_command("./notify.sh 'a b'") == ("./notify.sh", "a b")
