"""Without the launcher: one task for each device, as Lightning's own environment expects, and our callbacks."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from tests import harness
from tests.slurm.jobs import Chain

pytestmark = pytest.mark.slurm

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=1:00:00 --requeue --open-mode=append --output="{folder}/%j.out"
srun --kill-on-bad-exit=0 --wait=0 {command}
code=$?
echo "srun ended with $code"
if [ $code -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60
fi
exit $code
"""


@pytest.mark.parametrize("signum", ["TERM", "USR1"])
def test_a_signal_saves_on_all_ranks_and_the_run_goes_on_exactly(chain: Chain, signum: str) -> None:
    """SIGUSR1 is what Lightning requeues a job on, from inside its handler; the callback does it at the boundary."""
    command = [sys.executable, str(harness.PROGRAM), json.dumps(chain.config(step_s=0.2))]
    path = chain.folder / "job.sbatch"
    path.write_text(SCRIPT.format(folder=chain.folder, command=shlex.join(command)))
    job_id = chain.cluster.submit(script=str(path))
    chain.jobs.append(job_id)
    chain.wait_for("saved", step=10)
    chain.cluster.call("scancel", f"--signal={signum}", job_id)
    job = chain.wait_for_end(job_id, "COMPLETED")
    output = (chain.folder / f"{job_id}.out").read_text()
    assert job["Restarts"] == "1", output
    chain.check_weights()
    stopped = chain.events("interrupted")[-1]["step"]
    assert chain.events("resumed")[-1]["step"] == stopped
    assert chain.events("saved")[-1]["step"] >= stopped
    assert not list(chain.folder.glob("hpc_ckpt*"))  # Lightning's own
    if signum == "TERM":
        assert "srun ended with 75" in output
        assert output.count("Exited with exit code 75") == 2  # srun says so for each node
    chain.note(f"plain srun, SIG{signum}")
