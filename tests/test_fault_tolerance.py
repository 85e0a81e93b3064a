"""``FaultTolerance`` around a hang: what restarts the ranks, what it must not take for one, limits, health, drills.

How each kind of hang is found and explained is in ``test_hangs.py``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import psutil
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_resilience import FaultTolerance
from lightning_resilience.callbacks import fault_tolerance
from lightning_resilience.detect import watchdog
from lightning_resilience.detect.timeouts import SectionTimeouts
from lightning_resilience.detect.witness import EXIT_HUNG, own_directory
from lightning_resilience.ledger import read_ledger
from lightning_resilience.run_directory import RunDirectory
from tests.harness import Ranks, command, result, run, samples
from tests.test_exact_resume import make, undisturbed
from tests.test_hangs import FOREVER, LIMITS, nothing_left, stacks_of, the_culprit, verdict_of, watchdogs_of
from tests.test_launchers import finish, lightnings_own, start, torchrun

CALLBACKS = ["fault_tolerance", "preemption", "auto_resume", "user"]
HANG = {"at": "train", "step": 20, "do": "sleep", "seconds": FOREVER, "once": True}


def watched(tmp: Path, name: str = "run", limits: str = LIMITS, **options: Any) -> dict[str, Any]:
    """The config of a run with the callback."""
    settings = {"section_timeouts": limits, "calculate_timeouts": False, **options.pop("fault_tolerance", {})}
    return make(tmp, name, **{"callbacks": CALLBACKS, "fault_tolerance": settings, **options})


def runs(config: dict[str, Any], **kwargs: Any) -> str:
    """Runs it to its end, which must be a good one; returns what it printed."""
    codes, output = run(config, Path(config["run_dir"]).parent, **kwargs)
    assert set(codes) == {0}, output
    return output


def fails(config: dict[str, Any], **kwargs: Any) -> str:
    codes, output = run(config, Path(config["run_dir"]).parent, **kwargs)
    assert set(codes) != {0}, output
    return output


def events(config: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_ledger(RunDirectory(config["run_dir"]).ledger) if event["event"] in kinds]


def hangs(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [fault for fault in events(config, "fault") if fault["kind"] == "hang"]


def no_alarm(config: dict[str, Any], output: str) -> None:
    assert not list(Path(config["run_dir"]).glob("diagnostics/*")), output
    assert not events(config, "fault"), output


# -- who restarts it ---------------------------------------------------------------------------------------------------


def ours(config: dict[str, Any], *options: str) -> list[str]:
    limits = ["--section-timeouts", "setup:60,step:3,checkpointing:30", "--out-of-section-timeout", "30"]
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--run-dir", config["run_dir"]]
    return [*launch, *limits, "--nproc-per-node", "2", *options, *command(config)[1:]]


def command_line(action: str, config: dict[str, Any]) -> str:
    arguments = [sys.executable, "-m", "lightning_resilience.launch.cli", action, config["run_dir"]]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True).stdout


def folders_of(config: dict[str, Any]) -> list[Path]:
    """The folders in node memory of a run."""
    records = [path for path in own_directory().glob("*/rank-*.json") if config["run_dir"] in path.read_text()]
    return [path.parent for path in records]


def test_a_hang_under_launch_is_restarted_inside_the_job(tmp_path: Path) -> None:
    """The script itself is plain Lightning, and the limits come from the command line."""
    options = {"trainer": {"devices": 2}, "callbacks": [], "model_checkpoint": {"every_n_train_steps": 6}}
    reference = undisturbed(tmp_path, **{**options, "callbacks": ["preemption", "auto_resume"]})
    config = make(tmp_path, "hanging", events=[{**HANG, "rank": 1}], **options)
    output = tmp_path / "output"
    assert finish(start(ours(config), output), output) == 0, output.read_text()
    assert (result(config), samples(config)) == reference
    assert the_culprit(config).rank == 1
    assert verdict_of(config).culprits[0].seconds < 30, "the limit of the command line did not hold"
    assert len(events(config, "job_start")) == 1
    assert [event["restart_count"] for event in events(config, "start")] == [0, 1]
    assert [fault["kind"] for fault in events(config, "fault")] == ["hang"]
    assert "Restart 1 inside the job" in output.read_text()
    assert "hang" in command_line("report", config)
    assert "training_step" in command_line("diagnose", config)
    nothing_left(config)
    assert not folders_of(config)


@pytest.mark.campaign
def test_a_hang_under_torchrun_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"trainer": {"devices": 2}}
    config = watched(tmp_path, events=[{**HANG, "rank": 0}], **options)
    output = tmp_path / "output"
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with_restarts = torchrun(config)
    with_restarts.insert(with_restarts.index("--nproc-per-node"), "--max-restarts=1")
    assert finish(start(with_restarts, output), output) == 0, output.read_text()
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)
    assert [fault["kind"] for fault in hangs(config)] == ["hang"]
    assert "stale" not in output.read_text()
    nothing_left(config)


@pytest.mark.campaign
def test_a_hang_under_lightnings_own_launcher_ends_with_its_code(tmp_path: Path) -> None:
    options = {"trainer": {"devices": 2}}
    config = watched(tmp_path, events=[{**HANG, "rank": 1}], **options)
    output = tmp_path / "output"
    assert finish(start(lightnings_own(config), output), output) == EXIT_HUNG, output.read_text()
    assert finish(start(lightnings_own(config), output), output) == 0, output.read_text()
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)
    assert len(hangs(config)) == 1
    nothing_left(config)


# -- what is no hang ---------------------------------------------------------------------------------------------------


def test_soak_with_everything_slow_and_tight_calculated_limits(tmp_path: Path) -> None:
    """5,000 steps of about a millisecond, of which the calculated limit of a step is 1.5 s: more is slow elsewhere."""
    steps = [2500, 5000]
    slow = [{"at": "validation", "step": step, "do": "sleep", "seconds": 2.0} for step in steps]
    slow += [{"at": "save", "step": step, "do": "sleep", "seconds": 2.0} for step in steps]
    config = watched(
        tmp_path,
        limits="setup:8,step:5,checkpointing:6,out_of_section:5",
        events=[{"at": "train", "step": 0, "do": "sleep", "seconds": 2.5}, *slow],
        fault_tolerance={"calculate_timeouts": True},
        floor_s=1.5,
        save_every=2500,
        batches=100,
        augment=False,
        validation=True,
        trace=str(tmp_path / "trace"),
        trainer={"max_epochs": -1, "max_steps": 5000, "check_val_every_n_epoch": None, "val_check_interval": 2500},
    )
    output = runs(config)
    no_alarm(config, output)
    assert result(config)[0]["step"] == 5000
    limits = traced(config)[-1][1]
    assert limits["step"] == 1.5, "the limit was not tight, and so the test has shown nothing"
    assert limits["checkpointing"] >= 10


# -- sections ----------------------------------------------------------------------------------------------------------


def traced(config: dict[str, Any], rank: int = 0) -> list[Any]:
    return [json.loads(line) for line in Path(f"{config['trace']}.{rank}").read_text().splitlines()]


def in_section(config: dict[str, Any], rank: int = 0) -> list[tuple[str, str]]:
    """What happened, and in which section."""
    section, found = "", []
    for name, *_ in traced(config, rank):
        if name.startswith("["):
            section = name.strip("[]")
        else:
            found.append((name, section))
    return found
