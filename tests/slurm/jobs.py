"""A training on two nodes of the cluster, as a person would start it there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lightning_resilience.run.goodput import account
from lightning_resilience.run.history import Allocation, read_history
from lightning_resilience.run.interruptions import interruptions
from lightning_resilience.run.time_account import kept
from tests import harness
from tests.ledgers import read_ledger
from tests.slurm.cluster import Cluster, wait_until

COMMAND = [sys.executable, "-m", "lightning_resilience.launch.cli"]
TABLE_VARIABLE = "SLURM_TEST_TABLE"
"""Environment variable with a file to which every scenario appends what it has cost, for the documentation."""


class Chain:
    """One run, from its submission to its end.

    Args:
        cluster: Where.
        folder: For its files. It has a blank in its name, as people's folders have.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder / "a user's folder"
        self.folder.mkdir()
        self.run_dir = self.folder / "run"
        self.jobs: list[str] = []
        self.step_s = 0.0

    def config(self, **changes: Any) -> dict[str, Any]:
        self.step_s = changes.get("step_s", self.step_s)
        return config(self.folder, **changes)

    def script(self, *options: str, **changes: Any) -> str:
        """The batch script for the test program."""
        config = json.dumps(self.config(**changes))
        return self.call("slurm", *self._options(*options), str(harness.PROGRAM), config)

    def call(self, *arguments: str) -> str:
        """Calls our command line, and returns what it prints."""
        done = subprocess.run(
            [*COMMAND, *arguments],
            env=self.cluster.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *options: str, **changes: Any) -> str:
        """Submits a run of the test program, and returns the id of its job."""
        path = self.folder / "job.sbatch"
        path.write_text(self.script(*options, **changes))
        self.jobs.append(self.cluster.submit(script=str(path)))
        return self.jobs[-1]

    def _options(self, *options: str) -> list[str]:
        return ["--nodes=2", "--time=1:00:00", f"--run-dir={self.run_dir}", "--nproc-per-node=1", *options]

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [each for each in read_ledger(self.run_dir / "ledger") if not names or each["event"] in names]

    def allocations(self) -> list[Allocation]:
        return read_history(self.run_dir / "ledger").allocations

    def wait_for(self, event: str, count: int = 1, within_s: float = 120.0, **fields: Any) -> None:
        wait_until(
            lambda: sum(fields.items() <= each.items() for each in self.events(event)) >= count,
            lambda: self.output(),
            within_s,
        )

    def wait_for_end(self, job_id: str, state: str, within_s: float = 150.0) -> dict[str, str]:
        """Waits until the chain is over, and checks how."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

        def is_over() -> bool:
            return self.cluster.job(job_id)["JobState"] in ends

        wait_until(is_over, self.output, within_s)
        job = self.cluster.job(job_id)
        assert job["JobState"] == state, f"{job}\n{self.output()}"
        return job

    def output(self) -> str:
        files = sorted((self.run_dir / "slurm").glob("*.out"))
        return "\n".join(path.read_text(errors="replace")[-6000:] for path in files)

    def status(self) -> str:
        return self.call("status", str(self.run_dir))

    def check_weights(self) -> None:
        """The oracle: what came out is bitwise what comes out when nothing happens."""
        assert harness.weights(self.config()) == undisturbed(self.folder.parent), self.output()

    def check_account(self, *causes: str) -> None:
        """At least 99 % of the rank-seconds are explained, interruptions have their causes, and steps what they take.

        Args:
            causes: Of the interruptions, in their order.
        """
        found = account(read_history(self.run_dir / "ledger").events, kept(self.run_dir))
        seconds = found.by_category
        explained = found.total - seconds["other"] - seconds["idle"]
        slots = found.ranks * (found.ended - found.began)
        told = f"{found.ranks} ranks, {slots:.1f} s: { {name: round(each, 2) for name, each in seconds.items()} }"
        assert found.ranks == 2, told
        assert abs(found.total - slots) <= 0.01 * slots, told
        assert explained >= 0.99 * slots, told
        assert [each.cause for each in found.interruptions] == list(causes), told
        step_s, steps = self.step_s, self.steps()
        assert seconds["productive"] >= found.ranks * step_s * (len(set(steps)) - 1), told
        if step_s and len(steps) == len(set(steps)):
            assert seconds["wasted_progress"] < found.ranks * step_s, told

    def steps(self) -> list[int]:
        """The steps that rank 0 has done, those done again too."""
        return [json.loads(line)[1] for line in Path(f"{self.config()['log']}.0").read_text().splitlines()]

    def note(self, scenario: str) -> None:
        """Writes down what an interruption has cost."""
        if (path := os.environ.get(TABLE_VARIABLE)) is None:
            return
        steps = self.steps()
        found = interruptions(read_history(self.run_dir / "ledger").events)
        seconds = " + ".join(f"{each.seconds_lost:.0f}" for each in found if each.seconds_lost is not None)
        with open(path, "a") as file:
            file.write(f"| {scenario} | {len(steps) - len(set(steps))} | {seconds} |\n\n{self.status()}\n\n")

    def clean_up(self) -> None:
        for job_id in self.jobs:
            self.cluster.call("scancel", "--full", "--signal=KILL", job_id, check=False)
            self.cluster.call("scancel", job_id, check=False)
        if self.jobs:
            jobs = f"--jobs={','.join(self.jobs)}"
            wait_until(lambda: not self.cluster.call("squeue", "-h", jobs, check=False).strip(), self.cluster.logs)


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "run_dir": str(folder / "run"),
        "out": str(folder / "out"),
        "log": str(folder / "log"),
        "trainer": {"devices": 1, "num_nodes": 2, "max_epochs": 3},
        **changes,
    }


_undisturbed: list[str] = []


def undisturbed(folder: Path) -> list[str]:
    """The weights of an undisturbed run, without Slurm and without callbacks of ours."""
    if not _undisturbed:
        own = folder / "undisturbed"
        own.mkdir()
        codes, output = harness.run(config(own), own)
        assert codes == [0, 0], output
        _undisturbed.extend(harness.weights(config(own)))
    return _undisturbed
