"""Hangs of real ranks: found, the right rank and place named, ended, and survived bitwise exactly.

The diagnosis is not told what was done to which rank; it reads stacks, process states and collective records only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_resilience.detect.hangs.verdict import Finding, Verdict
from lightning_resilience.run import exit_codes
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import Ranks, result, run, samples
from tests.ledgers import read_ledger
from tests.test_exact_resume import make, undisturbed

LIMITS = "setup:60,step:2.5,checkpointing:2.5,out_of_section:2.5"
FOREVER = 600


def hanging(tmp: Path, world_size: int, event: dict[str, Any], **options: Any) -> tuple[dict[str, Any], Any]:
    """The config of a run in which something happens once, and the result of the same run without."""
    nodes = options.pop("nodes", 1)
    trainer = {"devices": world_size // nodes, "num_nodes": nodes}
    options = {"trainer": trainer, "callbacks": ["preemption", "auto_resume", "user"], **options}
    reference = undisturbed(tmp, **options)
    options["callbacks"] = ["fault_tolerance", *options["callbacks"]]
    fault_tolerance = {"section_timeouts": LIMITS, "calculate_timeouts": False, **options.pop("fault_tolerance", {})}
    events = [{"once": True, **event}]
    return make(tmp, "hanging", events=events, fault_tolerance=fault_tolerance, **options), reference


def verdict_of(config: dict[str, Any]) -> Verdict:
    folders = sorted(Path(config["run_dir"], "diagnostics").glob("*/verdict.json"))
    assert len(folders) == 1, folders
    return Verdict.from_json(json.loads(folders[0].read_text()))


def the_culprit(config: dict[str, Any]) -> Finding:
    verdict = verdict_of(config)
    assert len(verdict.culprits) == 1, verdict.line
    return verdict.culprits[0]


def stacks_of(config: dict[str, Any], rank: int) -> str:
    (path,) = Path(config["run_dir"], "diagnostics").glob(f"*/rank-{rank:05d}.stacks.txt")
    return path.read_text()


def nothing_left(config: dict[str, Any]) -> None:
    """The watchdogs have gone, and their folders with them."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and watchdogs_of(config):
        time.sleep(0.1)
    assert not watchdogs_of(config)


def watchdogs_of(config: dict[str, Any]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if "lightning_resilience.detect.hangs.watchdog" in process.cmdline():
                directory = Path(process.cmdline()[-1])
                records = [json.loads(path.read_text()) for path in directory.glob("rank-*.json")]
                if any(record.get("run_dir") == config["run_dir"] for record in records):  # others write what is none
                    found.append(process)
        except (psutil.Error, OSError, ValueError):
            continue
    return found


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], str, str]] = {
    # ranks, what happens, options of the program, kind of the verdict, where
    "stopped": (4, {"at": "train", "step": 20, "rank": 2, "do": "SIGSTOP"}, {}, "stopped", "SIGSTOP"),
    "training_step": (2, {"at": "train", "step": 20, "rank": 1, "do": "sleep"}, {}, "stuck", "training_step"),
    "callback": (2, {"at": "callback", "step": 20, "rank": 0, "do": "sleep"}, {}, "stuck", "on_train_batch_end"),
    "data_loader": (2, {"at": "data", "step": 50, "rank": 1, "do": "sleep"}, {"workers": 1}, "data_loader", "do"),
    "validation": (
        2,
        {"at": "validation", "step": 16, "rank": 1, "do": "sleep"},
        {"validation": True},
        "stuck",
        "validation_step",
    ),
    "skipped_collective": (
        4,
        {"at": "all_reduce", "step": 20, "rank": 3, "do": "skip"},
        {"second_group": True},
        "waiting",
        "without",
    ),
    "gil_held": (2, {"at": "train", "step": 20, "rank": 1, "do": "hold_gil"}, {}, "gil_held", "do"),
    "save": (2, {"at": "save", "step": 20, "rank": 0, "do": "sleep"}, {}, "stuck", "on_save_checkpoint"),
    "end_of_epoch": (2, {"at": "epoch_end", "step": 1, "rank": 1, "do": "sleep"}, {}, "stuck", "on_train_epoch_end"),
    "other_node": (4, {"at": "train", "step": 20, "rank": 3, "do": "SIGSTOP"}, {"nodes": 2}, "stopped", "SIGSTOP"),
    "single": (1, {"at": "train", "step": 20, "rank": 0, "do": "sleep"}, {}, "stuck", "training_step"),
}


LONG = ("training_step", "callback", "validation", "end_of_epoch", "save", "other_node", "skipped_collective", "single")
"""Much like others, or long."""


@pytest.mark.slow
@pytest.mark.also_as_on_gpu
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.campaign if name in LONG else ()) for name in CASES]
)
def test_hang_is_found_explained_and_survived(tmp_path: Path, name: str) -> None:
    world_size, event, options, kind, where = CASES[name]
    config, reference = hanging(tmp_path, world_size, {**event, "seconds": FOREVER}, **options)
    codes, output = run(config, tmp_path / "hanging")
    assert set(codes) <= {exit_codes.HUNG, -signal.SIGKILL}, output
    culprit = the_culprit(config)
    assert (culprit.rank, culprit.kind) == (event["rank"], kind), output
    assert where in culprit.text or where in stacks_of(config, culprit.rank), output
    if world_size > 1:
        assert len(verdict_of(config).victims) == world_size - 1
        assert f"rank {culprit.rank}" in output
    faults = [e for e in read_ledger(RunDirectory(config["run_dir"]).ledger) if e["event"] == "fault"]
    assert [fault["kind"] for fault in faults] == ["hang"]
    assert faults[0]["reason"] == verdict_of(config).line
    codes, output = run(config, tmp_path / "hanging")
    assert set(codes) == {0}, output
    assert (result(config), samples(config)) == reference
    nothing_left(config)


def await_line(ranks: Ranks, words: str, times: int = 1) -> None:
    """Returns when it was said as often."""
    deadline = time.monotonic() + 100
    while ranks.text().count(words) < times and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ranks.text().count(words) >= times, ranks.text()


SLOW = {"section_timeouts": "setup:60,step:1.5,checkpointing:60,out_of_section:60", "calculate_timeouts": False}


@pytest.mark.slow
def test_a_healthy_run_that_nobody_starts_again_is_not_ended(tmp_path: Path) -> None:
    """One step computes, one asks a person, and in one somebody stops it (Ctrl-Z), each for longer than it may."""
    reference = undisturbed(tmp_path, callbacks=["auto_resume"])
    until, stdin = tmp_path / "enough", tmp_path / "stdin"
    os.mkfifo(stdin)
    events = [
        {"at": "train", "step": 6, "do": "spin", "until": str(until)},
        {"at": "train", "step": 12, "do": "input", "stdin": str(stdin)},
        {"at": "train", "step": 18, "do": "SIGSTOP"},  # a group of processes without a parent ignores SIGTSTP
    ]
    callbacks = ["fault_tolerance", "auto_resume"]
    config = make(tmp_path, "slow", events=events, callbacks=callbacks, fault_tolerance=SLOW)
    ranks = Ranks(config, tmp_path / "slow")
    await_line(ranks, "s in total, because nothing would restart this run.")
    assert allowed_s(ranks) >= 3
    until.touch()
    with open(stdin, "w") as typed:
        await_line(ranks, "is waiting for a person in")
        typed.write("\n")
    process = psutil.Process(ranks.processes[0].pid)
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.05)
    time.sleep(2.5)  # of which none counts
    ranks.kill(signal.SIGCONT)
    assert ranks.wait() == [0], ranks.text()
    assert (result(config), samples(config)) == reference
    nothing_left(config)


def allowed_s(ranks: Ranks) -> int:
    """How long a slow step may take at first: twice as long as it had taken when it was looked at."""
    [found, *_] = re.findall(r"Slow rather than hung: it gets (\d+) s in total", ranks.text())
    return int(found)


@pytest.mark.slow
def test_who_was_ended_in_vain_for_being_slow_gets_more_time(tmp_path: Path) -> None:
    """Where somebody starts again, a busy rank is ended once at the same place, and that counts once."""
    reference = undisturbed(tmp_path, callbacks=["auto_resume"])
    until = tmp_path / "enough"
    events = [{"at": "train", "step": 6, "do": "spin", "until": str(until)}]
    callbacks = ["fault_tolerance", "auto_resume"]
    config = make(tmp_path, "slow", events=events, callbacks=callbacks, fault_tolerance=SLOW)
    again = {"TORCHELASTIC_MAX_RESTARTS": "3"}
    codes, output = run(config, tmp_path / "slow", environment=again)
    assert codes == [exit_codes.HUNG], output
    assert "section step allows 1.5 s, and more with FaultTolerance(section_timeouts=" in output
    ranks = Ranks(config, tmp_path / "slow", again)
    await_line(ranks, "s in total, because it was ended here before while it was just as busy.")
    assert allowed_s(ranks) >= 3
    until.touch()
    assert ranks.wait() == [0], ranks.text()
    assert (result(config), samples(config)) == reference
    faults = [e for e in read_ledger(RunDirectory(config["run_dir"]).ledger) if e["event"] == "fault"]
    assert [(fault["kind"], fault["busy"]) for fault in faults] == [("hang", True)]
