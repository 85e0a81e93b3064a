"""A stop in order and an exact resume under every launcher: Lightning's own, torchrun, and ours with unchanged code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_resilience.checkpoint import resume
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import PROGRAM, command, result
from tests.test_exact_resume import make, undisturbed

OPTIONS: dict[str, Any] = {"trainer": {"devices": 2}, "validation": True, "data": "shuffle", "workers": 1}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def lightnings_own(config: dict[str, Any]) -> list[str]:
    return command(config)


def torchrun(config: dict[str, Any]) -> list[str]:
    return [*TORCHRUN, *command(config)[1:]]


def ours(config: dict[str, Any]) -> list[str]:
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--nproc-per-node", "2"]
    return [*launch, "--run-dir", config["run_dir"], *command({**config, "callbacks": []})[1:]]


def start(arguments: list[str], output: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(PROGRAM.parent.parent)}
    with open(output, "a") as file:
        return subprocess.Popen(arguments, env=env, stdout=file, stderr=file, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str], output: Path) -> int:
    try:
        return process.wait(300)
    except subprocess.TimeoutExpired:
        for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            one.kill()
        raise AssertionError(f"deadlock:\n{output.read_text()}") from None


LAUNCHERS = {"own": (lightnings_own, 75), "torchrun": (torchrun, 0), "launch": (ours, 75)}
SIGNALS: dict[str, list[dict[str, Any]]] = {
    "rank 0": [{"at": "train", "step": 20, "rank": 0}],
    "rank 1": [{"at": "train", "step": 20, "rank": 1}],
    "both": [{"at": "train", "step": 20}],
    "skew": [{"at": "train", "step": 20, "rank": 0}, {"at": "batch_end", "step": 20, "rank": 1}],
    "validation": [{"at": "validation", "step": 16, "rank": 0}],
    "sanity check": [{"at": "sanity", "rank": 1}],
    "save": [{"at": "save", "step": 20, "rank": 0}],
}
ALWAYS = {("launch", "validation")}
"""A deadlock of plain Lightning; ``make test-kills`` runs all combinations."""


@pytest.mark.parametrize(
    ("launcher", "events", "code"),
    [
        pytest.param(
            *LAUNCHERS[name][:1],
            events,
            LAUNCHERS[name][1],
            id=f"{name}-{what}",
            marks=[
                *([] if (name, what) in ALWAYS else [pytest.mark.campaign]),
                *([pytest.mark.nvrx] if name == "launch" else []),
            ],
        )
        for name in LAUNCHERS
        for what, events in SIGNALS.items()
    ],
)
@pytest.mark.slow
def test_a_signal_to_some_rank(tmp_path: Path, launcher: Any, events: list[dict[str, Any]], code: int) -> None:
    config = make(tmp_path, "disturbed", events=[{"do": "SIGTERM", "once": True, **e} for e in events], **OPTIONS)
    if events[0]["at"] == "save":
        config["model_checkpoint"] = {"every_n_train_steps": 10, "dirpath": str(tmp_path / "own")}
    output = tmp_path / "output"
    assert finish(start(launcher(config), output), output) == code, output.read_text()
    assert not Path(config["out"]).exists()
    fit = RunDirectory(config["run_dir"]).fit(0)
    outcome = fit.outcome
    assert outcome is not None
    assert outcome.status == "interrupted"
    resume.verify(resume.checkpoints(fit.checkpoints)[0])
    assert finish(start(launcher(config), output), output) == 0, output.read_text()
    assert result(config) == undisturbed(tmp_path, **OPTIONS)[0]


@pytest.mark.campaign
@pytest.mark.nvrx
def test_launch_survives_a_crash_a_preemption_and_the_loss_of_the_launcher(tmp_path: Path) -> None:
    """The script itself is plain Lightning: the launcher alone makes it survive."""
    options = {**OPTIONS, "step_s": 0.05, "model_checkpoint": {"every_n_train_steps": 6, "save_top_k": -1}}
    config = make(
        tmp_path,
        "disturbed",
        events=[{"at": "train", "step": 15, "rank": 1, "do": "SIGKILL", "once": True}],
        **{**options, "model_checkpoint": {**options["model_checkpoint"], "dirpath": str(tmp_path / "c")}},
    )
    output = tmp_path / "output"
    process = start(ours(config), output)
    wait_for_step(config, 18, output)  # beyond the crash: restarted in the job
    process.send_signal(signal.SIGTERM)
    assert finish(process, output) == 75, output.read_text()
    process = start(ours(config), output)
    wait_for_step(config, 30, output)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, alive
    assert finish(start(ours(config), output), output) == 0, output.read_text()
    reference = {**options, "model_checkpoint": {**options["model_checkpoint"], "dirpath": str(tmp_path / "reference")}}
    assert result(config) == undisturbed(tmp_path, **reference)[0]
    outcome = RunDirectory(config["run_dir"]).outcome
    assert outcome is not None
    assert outcome.status == "finished"


def wait_for_step(config: dict[str, Any], step: int, output: Path) -> None:
    deadline = time.monotonic() + 90
    while True:
        found = resume.checkpoints(RunDirectory(config["run_dir"]).fit(0).checkpoints)
        if found and resume.step_of(found[0]) >= step:
            return
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)
