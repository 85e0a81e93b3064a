"""The nodes of a run as tasks of an array: one is preempted, the others train on, and it is back."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import harness, test_absent_ranks
from tests.harness import free_port, state_at_the_end
from tests.slurm.cluster import wait_until
from tests.slurm.jobs import Chain
from tests.test_exact_resume import make

pytestmark = pytest.mark.slurm

PATIENT = {
    "callbacks": ["preemption", "auto_resume", "fault_tolerance"],
    "fault_tolerance": {"section_timeouts": "step:300", "calculate_timeouts": False},
}
FILE = Path(__file__).parents[2] / "recipes" / "slurm" / "elastic-array.sbatch"


def batch_script(chain: Chain, config: dict[str, Any]) -> str:
    """That of the recipe, for this cluster and the test program."""
    program = shlex.join([str(harness.PROGRAM), json.dumps(config)])
    text = FILE.read_text()
    for what, here in (
        ("#SBATCH --gpus-per-node=8\n", "#SBATCH --exclusive\n"),
        ("#SBATCH --chdir=/shared/code/gpt\n", ""),
        ("--array=0-3", "--array=0-2"),
        ("--output=/shared/runs/gpt/slurm/%A_%a.out", f'--output="{chain.folder}/%A_%a.out"'),
        ("python -m", f"{sys.executable} -m"),
        ("--nnodes=2:4", "--nnodes=2:3 --spares=off"),
        (":29500", f":{free_port()}"),
        ("--nproc-per-node=8", "--nproc-per-node=1"),
        ("--run-dir=/shared/runs/gpt train.py", f"--run-dir={shlex.quote(str(chain.run_dir))} {program}"),
    ):
        assert what in text
        text = text.replace(what, here)
    return text


def test_one_is_preempted_and_comes_back(chain: Chain) -> None:
    options: dict[str, Any] = {"trainer": {"max_epochs": 3}}
    is_lost, is_back = chain.folder / "lost", chain.folder / "back"
    wait = {"at": "train", "rank": 0, "do": "sleep", "seconds": 0.0, "within_s": 200, "once": True}
    events = [
        {**wait, "step": 13, "after_file": str(is_lost)},
        {**wait, "step": 30, "after_file": str(is_back), "after_s": 15.0},
    ]
    config = test_absent_ranks.with_ranks(make(chain.folder, "array", events=events, **PATIENT, **options), 3)
    config["trainer"] = {**config["trainer"], "devices": 1, "num_nodes": 3}
    chain.run_dir = Path(config["run_dir"])
    path = chain.folder / "array.sbatch"
    path.write_text(batch_script(chain, config))
    cluster = chain.cluster
    chain.jobs.append(array := cluster.submit(script=str(path)))

    def output() -> str:
        return "\n".join(each.read_text() for each in sorted(chain.folder.glob("*.out")))

    def task(number: int) -> dict[str, str]:
        return cluster.job(f"{array}_{number}")

    wait_until(lambda: any(each["step"] == 10 for each in chain.events("saved")), output, 150.0)
    node = task(1)["NodeList"]
    options_of_more = "--partition=high", f"--nodelist={node}", "--exclusive"
    chain.jobs.append(more := cluster.submit(*options_of_more, wrap="sleep 5", cwd=chain.folder))
    wait_until(lambda: "was told to stop" in output(), output, 60.0)
    is_lost.touch()
    chain.wait_for("replaced", members=[0, 2])
    cluster.wait_for_state(more, "COMPLETED")
    wait_until(lambda: re.search(r"A node has joined for rank 1", output()), output, 150.0)
    is_back.touch()
    wait_until(lambda: all(task(each)["JobState"] == "COMPLETED" for each in range(3)), output, 150.0)
    assert [each["members"] for each in chain.events("replaced")] == [[0, 2], [0, 1, 2]], output()
    assert task(1)["Restarts"] == "1"
    wanted, steps = test_absent_ranks.undisturbed(chain.folder.parent, 3, **options)
    assert test_absent_ranks.samples(config["log"]) == steps
    torch.testing.assert_close(state_at_the_end(config), state_at_the_end(wanted), rtol=1e-4, atol=1e-6)
