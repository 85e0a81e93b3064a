"""What ``--json`` prints: every key is documented, and every documented key printed."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience._processes import describe_process
from lightning_resilience.launch.cli import main
from lightning_resilience.launch.json_output import KEYS, SCHEMA, to_json
from lightning_resilience.launch.report import report
from lightning_resilience.launch.status import status
from lightning_resilience.launch.view import ranks_now
from lightning_resilience.run import time_account
from lightning_resilience.run.events import Saved
from lightning_resilience.run.ledger import node_name
from lightning_resilience.run.run_directory import Outcome, RunDirectory
from tests.test_goodput import HUNG, launch, run_with, spent
from tests.test_goodput_simulation import of
from tests.test_what_if import Course, Played


def keys_of(value: dict[str, Any], documented: dict[str, str], prefix: str = "") -> set[str]:
    """All keys; not those of an object whose own are not documented, such as an event."""
    found = set()
    for key, each in value.items():
        name = prefix + key
        found.add(name)
        for inner, entries in ((f"{name}[].", each), (f"{name}.", [each])):
            if any(other.startswith(inner) for other in documented):
                found |= {own for entry in entries or [] if entry for own in keys_of(entry, documented, inner)}
    return found


def parsed(action: str, *texts: str) -> list[dict[str, Any]]:
    """What a command has printed: together, these have all documented keys and no other."""
    found: list[dict[str, Any]] = [json.loads(text) for text in texts]
    assert all(len(text.splitlines()) == 1 for text in texts)
    assert {each["schema"] for each in found} == {SCHEMA}
    assert {key for each in found for key in keys_of(each, KEYS[action])} == KEYS[action].keys()
    return found


def test_report(tmp_path: Path) -> None:
    course = Course(2)
    predicted = run_with(tmp_path / "other", *Played(course, course.options).events)
    texts = [report(run_with(tmp_path, *HUNG), as_json=True), report(predicted, as_json=True, what_if="save_every=9")]
    found, _ = parsed("report", *texts)
    assert [event["event"] for event in found["timeline"]] == [event.name for event in HUNG]


def test_status(tmp_path: Path) -> None:
    saved = of(Saved, fit=0, time=90.0, step=8, tier="local", stall_s=0.002, seconds=0.1, every_s=4.2)
    [found] = parsed("status", status(run_with(tmp_path, *HUNG, saved), as_json=True))
    assert (found["now"], found["is_ongoing"], found["job_chain"]) == ("ended: finished", False, 2)
    assert [each["ended"] for each in found["allocations"]] == ["finished", "finished"]
    assert found["restarts_left"] == found["restarts"] == 3
    often = "Local     every 4.2 s after the first ones: a save stops the training for 2.0 ms"
    assert f"{often}, and is complete after 0.10 s" in status(tmp_path).splitlines()


def test_what_other_nodes_do(tmp_path: Path) -> None:
    """As their watchdogs have kept it, if that is not long ago."""
    now = time.time()
    time_account.keep(tmp_path, "z-before", spent(now - 90, now - 70, now - 60, "first_step", reached=0))
    time_account.keep(tmp_path, "other", spent(now - 90, now - 12, now - 10, "productive", reached=7))
    time_account.keep(tmp_path, "down", spent(now - 9999, now - 9000, now - 9000, ranks=[2, 3]))
    [found] = parsed("watch", ranks_now(tmp_path, as_json=True))
    first, second = found["ranks"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert (first["node"], first["section"], first["step"], first["pid"]) == ("n1", "productive", 7, None)
    assert first["since_progress"] == pytest.approx(2)
    assert " ago" in ranks_now(tmp_path)


def test_a_run_is_ongoing_where_its_ranks_live(tmp_path: Path) -> None:
    """After its launch was killed here, what was kept here a moment ago says nothing."""
    now = time.time()
    run_with(tmp_path, launch(now - 90, now - 90))
    process = {"uid": os.getuid(), "host": platform.node(), **describe_process(), "pid": 2**22 + 1}
    (tmp_path / "launches").mkdir()
    (tmp_path / "launches" / "first.000001.json").write_text(json.dumps(process))
    time_account.keep(tmp_path, "here", spent(now - 90, now - 12, now - 10, node=node_name()))
    assert not json.loads(status(tmp_path, as_json=True))["is_ongoing"]
    time_account.keep(tmp_path, "there", spent(now - 90, now - 12, now - 10))
    RunDirectory(tmp_path).outcome = Outcome("failed", "of the workers before")
    assert json.loads(status(tmp_path, as_json=True))["now"] == "running on n1"
    found = json.loads(report(tmp_path, as_json=True))
    assert (found["is_ongoing"], found["outcome"], found["reason"]) == (True, None, None)


@pytest.mark.parametrize("action", ["report", "status", "diagnose", "watch"])
def test_the_command_line(action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where there is nothing to show."""
    (tmp_path / "launches").mkdir()
    main([action, str(tmp_path), "--json", *["--once"] * (action == "watch")])
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {key for key in KEYS[action] if "[]" not in key and "." not in key}


def test_json_has_no_nan() -> None:
    found = json.loads(to_json({"a": [math.nan], "b": {"c": math.inf, "d": 1.5}}))
    assert found == {"schema": SCHEMA, "a": [None], "b": {"c": None, "d": 1.5}}
