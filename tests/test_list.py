"""``lightning-resilience list``: the runs below a folder, also damaged ones, and large ledgers read once."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience._formatting import fitted
from lightning_resilience._processes import describe_process
from lightning_resilience.launch import listing
from lightning_resilience.launch.cli import main
from lightning_resilience.launch.listing import list_runs, runs_below
from lightning_resilience.run import time_account
from lightning_resilience.run.events import AllocationEnd, AllocationStart, LaunchExit
from tests.test_goodput import HUNG, job, launch, run_with, spent
from tests.test_json_output import parsed


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    return tmp_path / ".cache"


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    [found] = parsed("list", list_runs(folder, as_json=True))
    return {os.path.relpath(each["run_dir"], folder): each for each in found["runs"]}


def alive(run: Path, **fields: Any) -> None:
    """The record of a launch that is this process."""
    process = {"uid": os.getuid(), "host": platform.node(), **describe_process(), **fields}
    (run / "launches").mkdir(exist_ok=True)
    (run / "launches" / "first.000001.json").write_text(json.dumps(process))


def test_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most recently active runs come first."""
    now = time.time()
    exit_of = {name: LaunchExit(time=130, status=name, exit_code=1, reason="") for name in ("failed", "interrupted")}
    begin = [launch(100, 101), job(102), spent(105, 115, 120)]
    run_with(tmp_path / "finished", *HUNG)
    run_with(tmp_path / "failed", *begin, exit_of["failed"])
    (tmp_path / "deep" / "er").mkdir(parents=True)
    run_with(tmp_path / "deep" / "er" / "stopped", *begin, exit_of["interrupted"])
    run_with(tmp_path / "unknown", *begin)
    alive(run_with(tmp_path / "killed", *begin), pid=2**22 + 1)
    alive(run_with(tmp_path / "running", launch(now - 90, now - 90)))
    time_account.keep(tmp_path / "running", "n1", spent(now - 90, now - 12, now - 10, "productive", reached=700))
    start: dict[str, Any] = dict.fromkeys(AllocationStart.own_fields)
    over: dict[str, Any] = dict.fromkeys(AllocationEnd.own_fields)
    requeued = [
        AllocationStart(**start | {"time": 100, "slurm_job_id": "7"}),
        AllocationEnd(**over | {"time": 140, "how": "time limit", "then": "requeue"}),
    ]
    run_with(tmp_path / "queued", *requeued)
    monkeypatch.setattr(
        "lightning_resilience.launch.status._queue_state", lambda job_id: f"job {job_id} is PENDING (Resources)"
    )
    found = listed(tmp_path)
    states = {Path(name).name: each["state"] for name, each in found.items()}
    assert states == {
        **{name: name for name in ("finished", "failed", "stopped", "unknown", "running", "queued")},
        "killed": "stopped",
    }
    assert next(iter(found)) == "running"
    assert (found["running"]["step"], found["queued"]["job_id"]) == (700, "7")
    assert (found["finished"]["interruptions"], found["failed"]["goodput"]) == (1, pytest.approx(1 / 3))
    times = [each["last_active"] for each in found.values()]
    assert times == sorted(times, reverse=True)


def test_damaged_and_foreign_folders_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(tmp_path / "good", *HUNG)
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    run_with(tmp_path / ".git", *HUNG)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "ledger").touch()
    (tmp_path / "torn" / "ledger").mkdir(parents=True)
    (tmp_path / "torn" / "ledger" / "host.jsonl").write_bytes(b'{"event": "launch", "ti\n\0\xff\n[]\n{"time": 1}\n')
    (tmp_path / "new" / "slurm").mkdir(parents=True)
    (tmp_path / "new" / "slurm" / "job.sbatch").touch()
    os.symlink("good", tmp_path / "link")
    main(["list", str(tmp_path)])
    text = capsys.readouterr().out
    assert re.search(r"(?m)^good +finished ", text)
    assert re.search(r"(?m)^damaged +damaged ", text)
    assert re.search(r"(?m)^torn +unknown ", text)
    assert re.search(r"(?m)^new +unknown ", text)
    assert "No runs in: data" in text
    assert "link" not in text
    found = json.loads(list_runs(tmp_path, as_json=True))
    assert {os.path.basename(each["run_dir"]): each["problem"] is not None for each in found["runs"]} == {
        **dict.fromkeys(("good", "torn", "new"), False),
        "damaged": True,
    }
    main(["status", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["others"] == [str(tmp_path / "data")]
    main(["list", str(tmp_path / "data")])
    assert "no run" in capsys.readouterr().out


def test_names_are_shown_without_what_a_terminal_would_do(tmp_path: Path) -> None:
    run_with(tmp_path / "a\n\x1b[31mb\u202ec", *HUNG)
    text = list_runs(tmp_path)
    assert "a\\n\\x1b[31mb\\u202ec" in text
    assert len(text.splitlines()) == 2


def test_a_watch_needs_time_between_two_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["watch", "--interval=0", str(run_with(tmp_path / "run", *HUNG))])
    assert "'0' is not a number of seconds above 0" in capsys.readouterr().err


def test_a_folder_that_cannot_be_read_hides_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(tmp_path / "good", *HUNG)
    (tmp_path / "a" / "b").mkdir(parents=True)

    def scandir(path: Path, real: Any = os.scandir) -> Any:
        if os.path.basename(path) == "a":
            raise PermissionError(13, "no", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert runs_below(tmp_path) == ([tmp_path / "good"], [tmp_path / "a"])


def test_a_large_ledger_is_folded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Until something is appended; a run that goes on is folded again when the fold is old."""
    monkeypatch.setattr(listing, "_KEPT_FROM_BYTES", 1)
    folds = []

    def read_ledger(path: Path, real: Any = listing.read_ledger) -> Any:
        folds.append(path.parent.name)
        return real(path)

    monkeypatch.setattr(listing, "read_ledger", read_ledger)
    began = time.time() - 1000
    run_with(tmp_path / "over", *HUNG)
    alive(
        run_with(tmp_path / "running", launch(began, began), job(began + 1), spent(began + 2, began + 50, began + 60))
    )
    first = listed(tmp_path)
    assert sorted(folds) == ["over", "running"]
    again = listed(tmp_path)
    assert len(folds) == 2
    again["running"]["last_active"] = first["running"]["last_active"]
    assert again == first
    run_with(tmp_path / "over", launch(300, 301))
    assert listed(tmp_path)["over"]["state"] == "unknown"
    assert folds[2:] == ["over"]
    time_now = time.time()
    monkeypatch.setattr(time, "time", lambda: time_now + 30)
    assert listed(tmp_path)["running"]["goodput"] < (first["running"]["goodput"] or 0)
    assert folds[3:] == ["running"]
    (tmp_path / "running" / "launches" / "first.000001.json").unlink()
    assert listed(tmp_path)["running"]["state"] == "unknown"
    assert folds[4:] == ["running"]
    for content in ("{", '{"version": 1, "runs": [1]}', '{"version": 1, "runs": {"a": 1}}'):
        (cache / "lightning-resilience" / "runs.json").write_text(content)
        assert listed(tmp_path)["over"]["state"] == "unknown"


def test_small_ledgers_leave_nothing(tmp_path: Path, cache: Path) -> None:
    run_with(tmp_path / "a", *HUNG)
    assert listed(tmp_path)["a"]["state"] == "finished"
    assert not cache.exists()


def test_a_narrow_terminal(tmp_path: Path) -> None:
    rows = [["run-with-a-long-name-1", "running", "12", "train.py --lr 1"]]
    head = ["run", "state", "step", "command"]
    assert fitted(head, rows, ["command", "step"], 100)[0].split() == head
    assert fitted(head, rows, ["command", "step"], 40)[0].split() == head[:3]
    assert fitted(head, rows, ["command", "step"], 20)[1] == "...g-name-1  running"
    run_with(tmp_path / "a-run-with-quite-a-long-name", *HUNG)
    for width in (19, 30, 45, 80):
        assert all(len(line) <= width for line in list_runs(tmp_path, width=width).splitlines()), width
