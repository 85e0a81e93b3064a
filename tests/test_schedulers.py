"""Another batch system needs a class and its entry in ``KINDS``, and no other change of the launcher."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_resilience.launch import batch_job, cli, schedulers
from lightning_resilience.launch import status as status_module
from lightning_resilience.launch.batch_job import BatchJob
from lightning_resilience.launch.job_info import job_info
from lightning_resilience.launch.schedulers import current_scheduler, slurm
from lightning_resilience.launch.schedulers.base import JobStatus, Scheduler
from lightning_resilience.launch.status import status
from lightning_resilience.run.run_directory import RunDirectory
from tests.ledgers import Ledger, read_ledger


class Lsf(Scheduler):
    """A batch system of which this package knows nothing."""

    name = "lsf"
    title = "LSF"
    asked: list[str] = []

    def __init__(self) -> None:
        self.job_id = os.environ.get("LSB_JOBID")
        self.node_rank = 3

    def run_on_every_node(self) -> tuple[list[str], dict[str, str]]:
        return ["true"], dict(os.environ)

    def status(self) -> JobStatus:
        return JobStatus(is_preempted=True)

    def requeue(self) -> str | None:
        self.asked.append("requeue")
        return None

    def queue_state(self, job_id: str) -> str | None:
        return f"job {job_id} is PEND"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--queue")

    def batch_script(
        self,
        options: argparse.Namespace,
        launch: Sequence[str],
        run_dir: Path,
        job_name: str,
        grace_period_s: float | None,
    ) -> str:
        return f"#BSUB -q {options.queue} -J {job_name}\n{run_dir} {' '.join(launch)} {grace_period_s}\n"

    def submit(self, script: Path) -> str:
        self.asked.append(f"submit {script.name}")
        return "7"


@pytest.fixture
def lsf(monkeypatch: pytest.MonkeyPatch) -> Lsf:
    monkeypatch.setattr(schedulers, "KINDS", (*schedulers.KINDS, Lsf))
    monkeypatch.setattr("lightning_resilience.launch.status.KINDS", (Lsf,))
    monkeypatch.setattr(cli, "_SCHEDULERS", {**cli._SCHEDULERS, "lsf": Lsf()})
    monkeypatch.setattr(Lsf, "asked", [])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("LSB_JOBID", "7")
    return Lsf()


def test_another_scheduler_has_a_command(
    lsf: Lsf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    command = ["lsf", "--queue=gpu", "--run-dir=run", "--job-retries=0", "--grace-period=20", "train.py", "--lr=1"]
    cli.main(command)
    script = f"#BSUB -q gpu -J run\n{tmp_path}/run --job-retries=0 train.py --lr=1 20.0\n"
    assert capsys.readouterr().out == script
    cli.main([*command[:1], "--submit", *command[1:]])
    assert capsys.readouterr().out == "7\n"
    assert (tmp_path / "run" / "lsf" / "job.sbatch").read_text() == script
    assert lsf.asked == ["submit job.sbatch"]
    several = ["--nnodes=4", "--rdzv-endpoint=first:29500"]
    assert cli.launch_settings([*several, "--node-rank=lsf", "train.py"]).node_rank == 3


def test_another_scheduler_requeues_its_jobs(lsf: Lsf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_job, "REQUEUE_WITHIN_S", 0)
    monkeypatch.setattr(batch_job, "_POLL_S", 0.01)
    monkeypatch.setattr(batch_job.signal, "signal", lambda signum, handler: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert isinstance(current_scheduler(), Lsf)
    assert BatchJob(current_scheduler(), tmp_path / "run", ["train.py"], 100, 60.0).run() == 75
    assert lsf.asked == ["requeue"]
    [start, end] = read_ledger(tmp_path / "run" / "ledger")
    assert (start["event"], start["slurm_job_id"], end["then"]) == ("slice_start", "7", "requeue")
    assert "Now       job 7 is PEND" in status(tmp_path / "run")


def test_without_a_scheduler_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_JOBID", raising=False)
    here = current_scheduler()
    assert type(here) is Scheduler
    assert (here.job_id, here.restart_count, here.node_rank, job_info()["slurm"]) == (None, 0, None, None)
    assert here.requeue() == "there is no scheduler"


def test_what_slurm_says_may_be_written_in_anything() -> None:
    shown = slurm.run_slurm("printf", r"caf\351 \n")
    assert (shown.returncode, shown.stdout) == (0, "caf\ufffd \n")


def test_a_comment_says_nothing_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "JobId=7 JobName=gpt JobState=RUNNING Restarts=0 Comment=lost n1: JobState=CANCELLED Restarts=9 StdErr=/a\n"
    monkeypatch.setattr(slurm, "run_slurm", lambda *words: subprocess.CompletedProcess(words, 0, shown, ""))
    found = slurm.show_job("7")
    assert (found["JobState"], found["Restarts"]) == ("RUNNING", "0")


def test_a_run_that_has_ended_asks_no_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(status_module, "_queue_state", lambda job_id: asked.append(job_id))
    ledger = Ledger(RunDirectory(tmp_path).ledger)
    ledger.record("launch", launch_id="1", slurm_job_id="7")
    ledger.record("exit", status="failed", exit_code=1, reason="boom")
    status(tmp_path)
    assert asked == ["7"], "it may be requeued"
    ledger.record("exit", status="finished", exit_code=0, reason="the script ended")
    assert "ended: finished" in status(tmp_path)
    assert asked == ["7"]
