"""What happens to a run on a real Slurm: whole chains of jobs on two nodes.

The oracle is the same everywhere: the weights in the end are bitwise those of a run that nothing happened to.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import wait_until
from tests.slurm.jobs import Chain

pytestmark = pytest.mark.slurm

SLOW = {"step_s": 0.2}  # so that there is time to do something to it


def ends(chain: Chain) -> list[str | None]:
    return [each.how for each in chain.allocations()]


def retries(chain: Chain) -> list[bool]:
    return [event["retry"] for event in chain.events("job_start")]


def test_a_crash_is_restarted_inside_the_job(chain: Chain) -> None:
    job_id = chain.submit(events=[{"at": "train", "step": 23, "rank": 1, "do": "SIGKILL", "once": True}])
    chain.wait_for_end(job_id, "COMPLETED")
    chain.check_weights()
    chain.check_account("killed")
    assert ends(chain) == ["finished"]
    assert len(chain.events("start")) == 2
    chain.note("a rank is killed")


def test_a_hang_is_found_and_restarted_inside_the_job(chain: Chain) -> None:
    job_id = chain.submit(
        "--section-timeouts=setup:60,step:4,checkpointing:30,out_of_section:30",
        events=[{"at": "train", "step": 23, "rank": 1, "do": "SIGSTOP", "once": True}],
    )
    chain.wait_for_end(job_id, "COMPLETED")
    chain.check_weights()
    chain.check_account("hang")
    assert ends(chain) == ["finished"]
    assert "hang" in {event.get("kind") for event in chain.events("fault")}
    chain.note("a rank hangs (limit 4 s)")


@pytest.mark.parametrize("signum", ["TERM", "USR1"])
def test_a_signal_to_the_job_saves_and_requeues(chain: Chain, signum: str) -> None:
    job_id = chain.submit(**SLOW)
    chain.wait_for("saved", step=10)
    chain.cluster.call("scancel", f"--signal={signum}", job_id)
    job = chain.wait_for_end(job_id, "COMPLETED")
    chain.check_weights()
    chain.check_account("preempted")
    assert ends(chain) == ["told to stop", "finished"]
    assert retries(chain) == [False, False]
    assert job["Restarts"] == "1"
    assert job["Comment"].startswith("finished")
    chain.note(f"scancel --signal={signum}")


def test_a_preempted_run_goes_on_when_its_nodes_are_free_again(chain: Chain) -> None:
    job_id = chain.submit(**SLOW)
    chain.wait_for("saved", step=10)
    other = chain.cluster.submit("--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", wrap="sleep 1")
    chain.jobs.append(other)
    chain.wait_for_end(job_id, "COMPLETED")
    chain.check_weights()
    chain.check_account("preempted")
    assert ends(chain) == ["preempted", "finished"]
    assert retries(chain) == [False, False]
    chain.note("preemption")


def test_a_run_that_keeps_failing_is_retried_in_new_jobs_and_given_up_as_failed(chain: Chain) -> None:
    job_id = chain.submit(
        "--job-retries=2", "--in-job-restarts=0", events=[{"at": "train", "step": 3, "rank": 1, "do": "raise"}]
    )
    job = chain.wait_for_end(job_id, "FAILED")
    assert job["ExitCode"] == "1:0"
    assert len(chain.events("start")) == 3
    assert ends(chain) == ["failed", "failed", "failed, exit code 1"]
    assert retries(chain) == [False, True, True]
    assert "no progress in 3 jobs" in job["Comment"]
    assert "on purpose" in job["Comment"]
    chain.check_account("crash", "crash", "crash")


@pytest.mark.parametrize("number", [1, pytest.param(0, marks=pytest.mark.campaign)])  # 0 runs the batch script
def test_a_lost_node_costs_what_was_done_since_the_last_save(chain: Chain, number: int) -> None:
    job_id = chain.submit(**SLOW)
    chain.wait_for("saved", step=10)
    lost = chain.allocations()[0].nodes[number]
    chain.cluster.lose_node(lost)
    try:
        wait_until(lambda: chain.cluster.job(job_id)["Restarts"] == "1", chain.output)
        chain.wait_for_end(job_id, "COMPLETED")
    finally:
        chain.cluster.start_node(lost)
        wait_until(lambda: lost in chain.cluster.call("sinfo", "-h", "-N", "-t", "idle"), chain.cluster.logs)
    chain.check_weights()
    chain.check_account("killed")
    assert ends(chain) == [f"{lost} lost" if number else None, "finished"]
    assert retries(chain) == [False, False]
    assert lost not in chain.allocations()[-1].nodes
    chain.note(f"node {number} is lost (SlurmdTimeout 10 s)")


def test_a_slow_node_is_not_given_to_the_run_again(chain: Chain) -> None:
    slow = [{"at": "train", "step": step, "node": "n2", "do": "sleep", "seconds": 0.2} for step in range(48)]
    job_id = chain.submit(
        callbacks=["preemption", "auto_resume", "fault_tolerance", "straggler_detection"],
        straggler_detection={"report_time_interval": 1.0, "stop_if_detected": True},
        step_s=0.05,
        events=slow,
    )
    job = chain.wait_for_end(job_id, "COMPLETED")
    chain.check_weights()
    chain.check_account("straggler")
    assert chain.allocations()[0].nodes == ["n1", "n2"]
    assert chain.allocations()[0].excluded == ["n2"]
    assert chain.allocations()[-1].nodes == ["n1", "n3"]
    assert job["ExcNodeList"] == "n2"
    assert retries(chain) == [False, False]
    assert "without n2" in chain.status()
    chain.note("a node is slow")


def test_the_example(chain: Chain) -> None:
    page = (Path(__file__).parents[2] / "examples" / "README.md").read_text()
    submit, status = page.split("## On Slurm")[1].split("```")[1].strip().splitlines()
    chain.folder.joinpath("examples").symlink_to(Path(__file__).parents[2] / "examples")
    small = ["--steps=40", "--layers=1", "--width=32", "--batch-size=2", "--accelerator=cpu"]
    chain.jobs.append(chain.call(*shlex.split(submit)[1:], *small).strip())
    chain.run_dir = chain.folder / "runs" / "slurm"
    chain.wait_for_end(chain.jobs[0], "COMPLETED")
    assert status == "lightning-resilience status runs/slurm"
    assert ends(chain) == ["finished"]
    assert "allocation  job  nodes" in chain.status()


def test_a_job_that_a_person_cancels_saves_and_stays_cancelled(chain: Chain) -> None:
    job_id = chain.script("--submit", **SLOW).strip()
    chain.jobs.append(job_id)
    chain.wait_for("saved", step=10)
    assert f"job {job_id} is RUNNING on n[1-2]" in chain.status()
    chain.cluster.call("scancel", job_id)
    chain.wait_for_end(job_id, "CANCELLED")
    wait_until(lambda: not chain.cluster.call("squeue", "-h", f"--jobs={job_id}", check=False).strip(), chain.output)
    stopped = chain.events("interrupted")[-1]["step"]
    assert chain.events("saved")[-1]["step"] == stopped
    assert ends(chain) == ["cancelled"]
    job_id = chain.submit(**SLOW)
    chain.wait_for_end(job_id, "COMPLETED")
    chain.check_weights()
    assert chain.events("resumed")[-1]["step"] == stopped


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_the_time_limit_cuts_a_run_into_allocations(chain: Chain) -> None:
    job_id = chain.submit("--time=2", "--preempt-time=40", step_s=3.0)
    chain.wait_for_end(job_id, "COMPLETED", within_s=500.0)
    chain.check_weights()
    chain.check_account(*["preempted"] * (len(ends(chain)) - 1))
    assert set(ends(chain)[:-1]) == {"time limit"}
    assert ends(chain)[-1] == "finished"
    assert retries(chain) == [False] * len(ends(chain))
    chain.note("time limit (2 minutes, SIGTERM 40 s before)")


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_ten_preemptions_spend_no_retry(chain: Chain) -> None:
    job_id = chain.submit("--job-retries=0", "--in-job-restarts=0", **SLOW)
    for number in range(10):
        wait_for_progress(chain, number)
        chain.jobs.append(
            chain.cluster.submit("--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", wrap="true")
        )
        wait_until(lambda number=number: chain.cluster.job(job_id)["Restarts"] == str(number + 1), chain.output)
    chain.wait_for_end(job_id, "COMPLETED")
    chain.check_weights()
    chain.check_account(*["preempted"] * 10)
    assert ends(chain) == ["preempted"] * 10 + ["finished"]
    assert retries(chain) == [False] * 11


def wait_for_progress(chain: Chain, allocations: int) -> None:
    """Until the workers of the allocation that comes after so many have made a step."""

    def has_begun() -> bool:
        events = chain.events("slice_start", "resumed", "fresh")
        return len([each for each in events if each["event"] != "slice_start"]) > allocations

    wait_until(has_begun, chain.output)
    time.sleep(0.5)
