"""The batch script, what its one command decides, and the table of allocations: without Slurm.

``tests/slurm`` runs the same on a real one. Here ``srun`` and ``scontrol`` are small programs: every decision is taken
by the module that ships, in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience._formatting import duration
from lightning_resilience._processes import describe_process
from lightning_resilience.launch import batch_job, cli, status
from lightning_resilience.launch.allocations import (
    current_job_chain,
    nodes_to_exclude,
    why_it_must_end,
)
from lightning_resilience.launch.batch_job import COMMENT_EVERY_S, BatchJob, Comment, End
from lightning_resilience.launch.job import Launch, LaunchSettings
from lightning_resilience.launch.schedulers import slurm
from lightning_resilience.launch.schedulers.slurm import BatchScript, Slurm, seconds_of
from lightning_resilience.run.history import Allocation, read_history
from lightning_resilience.run.interruptions import interruptions
from lightning_resilience.run.ledger import node_name
from tests.ledgers import Ledger, history_of, read_ledger
from tests.test_launch import Launcher, launcher

__all__ = ["launcher"]  # a fixture

ROOT = Path(__file__).parents[1]
PATIENCE_S = 30.0


# The script


def render(tmp_path: Path, **changes: Any) -> str:
    given: dict[str, Any] = {"launch": ["train.py"], "run_dir": tmp_path / "run", "directory": tmp_path}
    return BatchScript(**given | changes).render()


def sbatch_options(script: str) -> list[str]:
    """The options as sbatch reads them."""
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return [word for line in lines for word in shlex.split(line)]


def test_the_script_holds_what_the_job_needs(tmp_path: Path) -> None:
    script = render(
        tmp_path, nodes=4, time="4:00:00", gpus_per_node=8, partition="gpu", account="me", sbatch=["--qos=high"]
    )
    assert {
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--time=4:00:00",
        "--partition=gpu",
        "--account=me",
        "--qos=high",
        "--requeue",
        "--open-mode=append",
        "--signal=TERM@60",
        f"--output={tmp_path}/run/slurm/%j.out",
        f"--chdir={tmp_path}",
    } <= set(sbatch_options(script))
    early = render(tmp_path, preempt_time_s=120)
    assert "--signal=TERM@120" in sbatch_options(early)
    assert "--lead=120 " in early


def test_whatever_is_put_into_the_script_comes_out_of_the_shell_again(tmp_path: Path) -> None:
    """With an interpreter that says what it was given, run by bash as Slurm does."""
    folder = tmp_path / "a user's $HOME; `x`"
    folder.mkdir()
    python = folder / "pyth on"
    python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    python.chmod(0o755)
    arguments = ["my train.py", "--name=it's", '{"a": "$HOME \\ `id`"}', "", "*", "--", "new\nline", "é"]
    script = BatchScript(
        launch=arguments, run_dir=folder / "run", directory=folder, python=str(python), env_setup=["export SEEN='a b'"]
    )
    done = subprocess.run(["bash", "-c", script.render()], capture_output=True, text=True, timeout=30, check=True)
    said = done.stdout.split("\0")[:-1]
    assert said[:2] == ["-m", "lightning_resilience.launch.batch_job"]
    assert said[2] == f"--run-dir={folder / 'run'}"
    assert said[said.index("--") + 2 :] == arguments
    assert f"--output={folder}/run/slurm/%j.out" in sbatch_options(script.render())


def test_a_percent_sign_in_the_path_is_no_pattern_of_slurms(tmp_path: Path) -> None:
    options = sbatch_options(render(tmp_path, run_dir=tmp_path / "lr%j"))
    assert f"--output={tmp_path}/lr%%j/slurm/%j.out" in options


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"preempt_time_s": 19}, "must be 20 to 65535"),
        ({"preempt_time_s": 70000}, "must be 20 to 65535"),
        ({"grace_period_s": 51.0}, "use --preempt-time 61"),
        ({"time": "2:00"}, "no time to train"),
        ({"sbatch": ["-t9:00:00"]}, "set by this command"),
        ({"time": "five"}, "hours:minutes:seconds"),
        ({"sbatch": ["--signal=B:USR1@30"]}, "set by this command"),
        ({"sbatch": ["--no-requeue"]}, "set by this command"),
        ({"sbatch": ["-N4"]}, "set by this command"),
        ({"sbatch": ["qos=high"]}, "is not an option"),
        ({"job_name": 'a"b'}, "#SBATCH line"),
        ({"job_name": "a\\b"}, "#SBATCH line"),
        ({"run_dir": Path("/runs/a\n#SBATCH -N9")}, "#SBATCH line"),
        ({"directory": Path("/code/a\n#SBATCH -N9")}, "#SBATCH line"),
        ({"sbatch": ["--comment=a\nrm -rf /"]}, "#SBATCH line"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:
        render(tmp_path, **changes)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"preempt_time_s": 20},
        {"preempt_time_s": 65535},
        {"time": "2:01"},
        {"sbatch": ["-wn1"]},  # which is not the beginning of --wrap
    ],
)
def test_what_just_fits_is_not_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert render(tmp_path, **changes)


SBATCH = """#!/bin/sh
test "$1" = --parsable && test -d "${2%/*}" || exit 2
test -e refuses && { echo "sbatch: error: no such partition" >&2; exit 1; }
echo "17;cluster"
"""


def test_the_script_is_submitted_or_it_is_said_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    submit = ["slurm", "--submit", "--run-dir=run", "train.py"]
    with pytest.raises(SystemExit) as refusal:
        cli.main(submit)
    assert refusal.value.code == 1
    assert "sbatch was not found" in capsys.readouterr().err
    (tmp_path / "bin" / "sbatch").write_text(SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    cli.main(submit)
    said = capsys.readouterr()
    assert said.out == "17\n"  # for a script that waits for the job
    assert f"status {tmp_path / 'run'}" in said.err
    cli.main([word for word in submit if word != "--submit"])
    assert capsys.readouterr().out == (tmp_path / "run/slurm/job.sbatch").read_text()
    (tmp_path / "refuses").touch()
    with pytest.raises(SystemExit) as refusal:
        cli.main(submit)
    assert refusal.value.code == 1
    assert "job.sbatch: sbatch: error: no such partition" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:30:00", 5400),
        ("2-3", 183600),
        ("2-03:30", 185400),
        ("2-03:30:10", 185410),
        ("UNLIMITED", None),
        ("INFINITE", None),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(time: str, seconds: int | None) -> None:
    assert seconds_of(time) == seconds


def test_the_command_line_gives_launch_what_was_given_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    options = ["--nodes=2", "--gpus-per-node=8", "--job-retries=0", "--local-dir=local", "--env-setup=module load x"]
    cli.main(["slurm", *options, "--read-again=if-changed", "train.py", "--job-retries", "5"])
    script = capsys.readouterr().out
    words = shlex.split(script[script.index("exec ") :])
    assert words[words.index("--") + 1 :] == [
        "--grace-period=50",
        "--nproc-per-node=8",
        "--job-retries=0",
        f"--local-dir={tmp_path}/local",
        "--read-again=if-changed",
        "train.py",
        "--job-retries",
        "5",
    ]
    assert "\nmodule load x\n" in script
    assert "#SBATCH --job-name=train\n" in script
    assert re.search(rf"#SBATCH --output={tmp_path}/runs/train-[0-9a-f]{{8}}/slurm/%j.out\n", script)
    assert list(tmp_path.glob("runs/train-*/slurm"))  # Slurm would not make it, and the job would end without a word


def test_what_is_given_goes_before_what_is_derived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    own = ["--nproc-per-node=4", "--grace-period=30", "--run-dir=run", "--job-name=gpt"]
    cli.main(["slurm", "--gpus-per-node=8", *own, "train.py"])
    script = capsys.readouterr().out
    words = shlex.split(script[script.index("exec ") :])
    assert words[words.index("--") + 1 :] == ["--grace-period=30", "--nproc-per-node=4", "train.py"]
    assert f"--run-dir={tmp_path}/run" in words
    assert "--job-name=gpt" in sbatch_options(script)
    with pytest.raises(SystemExit) as refusal:
        cli.main(["slurm", "--time=2:00", "train.py"])
    assert refusal.value.code == 2
    assert "no time to train" in capsys.readouterr().err


def test_a_fresh_run_has_a_script_and_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    Ledger(tmp_path / "run" / "ledger", rank=None).record("launch", command=["train.py"])
    cli.main(["slurm", "--fresh", "--run-dir=run", "train.py"])
    script = capsys.readouterr().out
    assert f"--run-dir={tmp_path}/run-2 " in script
    assert f"--output={tmp_path}/run-2/slurm/%j.out" in sbatch_options(script)
    assert (tmp_path / "run-2" / "slurm").is_dir()


def test_launch_reads_its_rank_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NODEID", "3")
    options = cli._parser().parse_args(["launch", "--node-rank=slurm", "train.py"])
    assert options.node_rank == 3
    monkeypatch.delenv("SLURM_NODEID")
    with pytest.raises(SystemExit):
        cli._parser().parse_args(["launch", "--node-rank=slurm", "train.py"])


# The batch step

SRUN = """#!{python}
import json, os, sys, time
sys.path.append({root!r})
from tests.ledgers import Ledger
ledger = Ledger({ledger!r}, rank=None)
json.dump(sys.argv[1:], open({folder!r} + "/srun", "w"))
json.dump(dict(os.environ), open({folder!r} + "/environment", "w"))
step = json.load(open({folder!r} + "/step"))
for event in step["events"]:
    ledger.record(**event)
open({folder!r} + "/ready", "w").close()
time.sleep(step.get("takes", 0))
sys.exit(step["exit_code"])
"""

# Without site-packages, which take as long as the rest: a test asks it ten times.
SCONTROL = """#!{python} -IS
import json, os, signal, sys
words = sys.argv[1:]
with open({folder!r} + "/scontrol", "a") as file:
    file.write(json.dumps(words) + "\\n")
job = json.load(open({folder!r} + "/job"))
if words[0] == "show":
    first, last = words[2][2:-1].split("-")
    print("\\n".join(words[2][0] + str(n) for n in range(int(first), int(last) + 1)))
elif words[0] == "--oneliner":
    print(" ".join(f"{{k}}={{v}}" for k, v in job["says"].items()))
elif words[0] == "update" and words[2].startswith("ExcNodeList"):
    if len(open({folder!r} + "/scontrol").read().split("ExcNodeList")) < 3:
        os.kill(os.getpid(), signal.SIGTERM)  # Slurm ends all that the job runs
elif words[0] == "requeue":
    if job["silent"]:
        sys.exit()
    tries = open({folder!r} + "/scontrol").read().count('"requeue"')
    if tries <= job["refuses"]:
        os.kill(os.getppid(), signal.SIGTERM)
        sys.exit("no")
    os.kill(os.getppid(), signal.SIGTERM)
"""

SINFO = """#!{python} -IS
import json, sys
if any("down" in word for word in sys.argv):
    print(json.load(open({folder!r} + "/job"))["lost"])
else:
    print("n1\\nn2\\nn3\\nn4\\nn5")
"""


class Batch:
    """Batch steps of one job on four nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.ledger = Ledger(self.run_dir / "ledger", rank=None)
        (folder / "bin").mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "sinfo": SINFO}.items():
            program = folder / "bin" / name
            program.write_text(
                text.format(root=str(ROOT), python=sys.executable, folder=str(folder), ledger=str(self.ledger.path))
            )
            program.chmod(0o755)
        (folder / "train.py").touch()
        self.job(JobState="RUNNING")

    def job(self, refuses: int = 0, lost: str = "", silent: bool = False, **says: str) -> None:
        says = {"Restarts": "0", "ExcNodeList": "(null)", **says}
        job = {"says": says, "refuses": refuses, "lost": lost, "silent": silent}
        (self.folder / "job").write_text(json.dumps(job))

    def start(
        self,
        *events: dict[str, Any],
        exit_code: int = 0,
        restarts: int = 0,
        options: list[str] | None = None,
        launch: Sequence[str] = ("--grace-period=50", "train.py", "--lr", "a b"),
        **step: Any,
    ) -> subprocess.Popen[str]:
        (self.folder / "step").write_text(json.dumps({"events": events, "exit_code": exit_code, **step}))
        (self.folder / "ready").unlink(missing_ok=True)
        (self.folder / "scontrol").write_text("")
        job = {
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "n[1-4]",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURM_JOB_PARTITION": "gpu",
            "SLURM_CPUS_PER_TASK": "7",
        }
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "lightning_resilience.launch.batch_job", f"--run-dir={self.run_dir}"),
                *(options or []),
                *("--", *launch),
            ],
            env=os.environ | job | {"PATH": path},
            cwd=self.folder,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *events: dict[str, Any], **step: Any) -> tuple[int, str]:
        process = self.start(*events, **step)
        try:
            _, said = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        return process.returncode, said

    def asked(self, what: str) -> list[list[str]]:
        """What scontrol was asked for."""
        lines = [json.loads(line) for line in (self.folder / "scontrol").read_text().splitlines()]
        return [line for line in lines if line[0] == what]

    def comments(self) -> list[str]:
        words = [word for line in self.asked("update") for word in line]
        return [word.removeprefix("Comment=") for word in words if word.startswith("Comment=")]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


def exits(code: int, reason: str = "so it is", **fields: Any) -> dict[str, Any]:
    status = {0: "finished", 75: "interrupted"}.get(code, "failed")
    return {"event": "exit", "status": status, "exit_code": code, "reason": reason, **fields}


SAVED = {"event": "saved", "fit": 0, "step": 5}


def test_the_steps_get_the_same_command_line_on_all_nodes(batch: Batch) -> None:
    assert batch.run(exits(0))[0] == 0
    words = json.loads((batch.folder / "srun").read_text())
    assert {"--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0"} <= set(words)
    assert {"--export=ALL", "--cpu-bind=none"} <= set(words)
    assert json.loads((batch.folder / "environment").read_text())["SRUN_CPUS_PER_TASK"] == "7"
    launch = words[words.index("launch") :]
    assert launch[1:3] == ["--nnodes=4", "--node-rank=slurm"]
    assert launch[3].startswith("--rdzv-endpoint=")
    assert launch[4:] == [
        *("--retries-in-new-job", f"--run-dir={batch.run_dir}", "--grace-period=50", "train.py", "--lr", "a b")
    ]


def test_a_single_node_meets_nobody() -> None:
    scheduler = Slurm({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1"})
    words = BatchJob(scheduler, Path("run"), ["train.py"], 100, 60.0).launch_command()
    assert words[words.index("launch") :] == ["launch", "--nnodes=1", "--retries-in-new-job", "train.py"]


@pytest.mark.slow
def test_squeue_shows_how_far_the_run_is(batch: Batch) -> None:
    process = batch.start(SAVED, exits(0), takes=2.0)
    try:
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
    assert any("allocation 1" in comment for comment in batch.comments()[:-1])


@pytest.mark.slow_but_for("finished")
@pytest.mark.parametrize(
    ("events", "srun", "code", "requeued", "how"),
    [
        pytest.param([exits(0)], 0, 0, False, "finished", id="finished"),
        pytest.param([exits(0)], 1, 0, False, "finished", id="finished, and then another node's trouble"),
        pytest.param([exits(75)], 75, 75, True, "told to stop", id="told to stop"),
        pytest.param([exits(75, new_job=True)], 75, 75, True, "failed", id="to be tried in a new job"),
        pytest.param([exits(1)], 1, 1, False, "failed, exit code 1", id="failed"),
        pytest.param([exits(1) | {"exit_code": None}], 1, 1, False, "failed, exit code 1", id="no exit code"),
        pytest.param([exits(16)], 16, 16, False, "failed, exit code 16", id="16"),
        pytest.param([exits(17)], 17, 17, False, "failed, exit code 17", id="17"),
        pytest.param([], 137, 75, True, "launch lost", id="launch lost"),
        pytest.param([], 1, 75, True, "launch lost", id="launch lost, 1"),
        pytest.param([], 0, 75, True, "launch lost", id="launch lost, and srun says that all is well"),
        pytest.param([], 2, 75, True, "launch lost", id="launch lost, 2, as where the interpreter is missing"),
        pytest.param(
            [{"event": "refused", "reason": "process 1 runs it already"}], 1, 1, False, "refused", id="refused"
        ),
    ],
)
def test_what_follows_is_decided_by_what_launch_has_recorded(
    batch: Batch, events: list[dict[str, Any]], srun: int, code: int, requeued: bool, how: str
) -> None:
    returned, said = batch.run(*events, exit_code=srun)
    assert returned == code, said
    assert bool(batch.asked("requeue")) is requeued
    assert read_history(batch.ledger.path).allocations[-1].how == how
    if not requeued and code:
        assert batch.comments()[-1].startswith(how)


@pytest.mark.slow_but_for("launch0")
@pytest.mark.parametrize("launch", [["--grace-perod=5", "train.py"], ["gone.py"], ["--job-retries=x", "train.py"]])
def test_a_command_line_that_launch_refuses_starts_nothing(batch: Batch, launch: list[str]) -> None:
    code, said = batch.run(launch=launch)
    assert code == 2
    assert "error: " in said
    assert not (batch.folder / "srun").exists()
    assert not batch.asked("requeue")
    assert read_history(batch.ledger.path).allocations[-1:] == []
    assert batch.comments()[-1].startswith("refused: ")


@pytest.mark.slow
def test_an_earlier_allocations_end_is_not_taken_for_this_ones(batch: Batch) -> None:
    batch.ledger.record(**exits(1))
    assert batch.run(exit_code=137)[0] == 75
    assert batch.asked("requeue")


@pytest.mark.slow
@pytest.mark.parametrize(
    "says",
    [
        {"JobState": "CANCELLED"},
        {
            "JobState": "COMPLETING",  # all that Slurm says as long as this process is there
            "StartTime": "2026-01-01T10:00:00",
            "EndTime": "2026-01-01T10:30:00",
            "TimeLimit": "01:00:00",
        },
        {
            "JobState": "COMPLETING",
            "StartTime": "2026-01-01T10:00:00",
            "EndTime": "2026-01-01T10:30:00",
            "TimeLimit": "UNLIMITED",
        },
    ],
    ids=["cancelled", "completing before its limit", "completing without a limit"],
)
def test_a_cancelled_job_is_not_requeued(batch: Batch, says: dict[str, str]) -> None:
    batch.job(**says)
    assert batch.run(exits(75), exit_code=75)[0] == 75
    assert not batch.asked("requeue")
    assert read_history(batch.ledger.path).allocations[-1].how == "cancelled"
    assert batch.run(exits(0))[0] == 0  # unless it has finished all the same


@pytest.mark.slow_but_for("at its end")
@pytest.mark.parametrize(
    ("says", "how"),
    [
        ({"PreemptTime": "2026-01-01T10:30:00"}, "preempted"),
        ({"PreemptTime": "2026-01-01T10:30:00", "JobState": "COMPLETING"}, "preempted"),
        ({"EndTime": "2026-01-01T10:30:00"}, "time limit"),
        (
            {
                "JobState": "COMPLETING",
                "StartTime": "2026-01-01T10:00:00",
                "EndTime": "2026-01-01T11:00:05",
                "TimeLimit": "01:00:00",
            },
            "time limit",
        ),
        ({"EndTime": "2126-01-01T10:30:00"}, "told to stop"),
    ],
    ids=["preempted", "preempted and completing", "at its end", "completing at its limit", "neither"],
)
def test_it_says_who_has_stopped_the_run(batch: Batch, says: dict[str, str], how: str) -> None:
    batch.job(**{"JobState": "RUNNING", **says})
    batch.run(exits(75), exit_code=75)
    assert batch.asked("requeue")
    assert read_history(batch.ledger.path).allocations[-1].how == how


@pytest.mark.slow
def test_it_says_how_near_the_time_limit_was_or_which_node_is_lost(batch: Batch) -> None:
    """SIGTERM comes ``--lead`` seconds before the limit, and up to a minute and a half earlier."""
    hows = []
    for ends_in, lost in ((120.0, ""), (600.0, ""), (120.0, "n3\nn3")):
        ends = datetime.fromtimestamp(time.time() + ends_in).isoformat(timespec="seconds")
        batch.job(JobState="RUNNING", EndTime=ends, lost=lost)
        batch.run(SAVED, exits(75), exit_code=75, options=["--lead=60"])
        hows.append(read_history(batch.ledger.path).allocations[-1].how)
    assert hows == ["time limit", "told to stop", "n3 lost"]


def test_a_job_that_slurm_has_requeued_is_not_requeued_again(batch: Batch) -> None:
    batch.job(JobState="COMPLETING", Restarts="1")
    process = batch.start(exits(75), exit_code=75)
    try:
        while not any(event["event"] == "slice_end" for event in read_ledger(batch.ledger.path)):
            time.sleep(0.05)
        time.sleep(0.5)
        assert process.poll() is None  # a job that has ended before Slurm takes it back counts as completed
        process.send_signal(signal.SIGTERM)  # Slurm's
        assert process.wait(PATIENCE_S) == 75
    finally:
        process.kill()
    assert not batch.asked("requeue")
    assert read_history(batch.ledger.path).allocations[-1].how == "requeued by Slurm"


@pytest.mark.slow
def test_a_sigterm_before_the_requeue_is_not_taken_for_that_which_takes_the_job_back(batch: Batch) -> None:
    batch.job(JobState="RUNNING", silent=True)
    process = batch.start(exits(75), exit_code=75, takes=1.0)
    try:
        while not (batch.folder / "ready").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)  # for the steps
        while not batch.asked("requeue"):
            time.sleep(0.05)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 75
    finally:
        process.kill()


@pytest.mark.slow
def test_a_controller_that_says_nothing_about_the_job_is_asked_to_requeue_it(batch: Batch) -> None:
    says = {"says": {}, "refuses": 0, "lost": "", "silent": False}
    (batch.folder / "job").write_text(json.dumps(says))
    code, said = batch.run(suspect("n3"), exits(75, new_job=True), exit_code=75)
    assert code == 75, said
    assert batch.asked("requeue")
    assert "without n3" not in said  # the list that its user has given is not known


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_does_not_end_the_batch_step_before_its_steps(batch: Batch, signum: signal.Signals) -> None:
    process = batch.start(exits(0), takes=1.0)
    try:
        while not (batch.folder / "ready").exists():
            time.sleep(0.05)
        process.send_signal(signum)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()


@pytest.mark.slow
def test_a_job_is_requeued_so_often_and_not_more(batch: Batch) -> None:
    for restarts in range(3):
        assert batch.run({**SAVED, "step": restarts}, exits(75), exit_code=75, restarts=restarts)[0] == 75
        assert batch.asked("requeue")
    code, said = batch.run({**SAVED, "step": 9}, exits(75), exit_code=75, restarts=3, options=["--max-requeues=3"])
    assert code == 1
    assert read_history(batch.ledger.path).allocations[-1].how == "told to stop"  # the last that is allowed has run
    assert not batch.asked("requeue")
    assert "--max-requeues=3" in said
    assert "--max-requeues=3" in batch.comments()[-1]


@pytest.mark.slow
def test_a_job_that_slurm_requeues_itself_is_not_started_too_often(batch: Batch) -> None:
    """One that is killed before it can say anything is never asked at its end."""
    for restarts in range(10):
        batch.ledger.record("slice_start", slurm_job_id="17", restart_count=restarts, node_list=["n1"])
    code, said = batch.run(exits(0), restarts=10)
    assert code == 1
    assert not (batch.folder / "srun").exists()
    assert "10 allocations in a row" in said
    assert batch.run(exits(0))[0] == 0  # whoever submits it again has decided to


def test_requeues_that_left_no_line_are_counted_by_slurm(batch: Batch) -> None:
    code, said = batch.run(SAVED, exits(75), exit_code=75, restarts=3, options=["--max-requeues=3"])
    assert code == 1
    assert "requeued 3 times" in said


@pytest.mark.slow
def test_what_an_earlier_job_has_failed_to_do_is_not_held_against_this_one(batch: Batch) -> None:
    batch.job(JobState="NODE_FAIL")
    for restarts in range(10):
        batch.ledger.record("slice_start", slurm_job_id="16", restart_count=restarts, node_list=["n1"])
    code, said = batch.run(exits(0))
    assert code == 0, said


@pytest.mark.slow
def test_ten_allocations_without_a_new_step_are_the_end(batch: Batch) -> None:
    batch.run(SAVED, exits(75), exit_code=75)
    for _ in range(9):
        batch.ledger.record("slice_start", slurm_job_id="17", restart_count=1, node_list=["n1"])
        batch.ledger.record("saved", fit=0, step=5)  # the same again
        batch.ledger.record("slice_end", how="preempted", then="requeue")
    code, said = batch.run(exits(75), exit_code=75, restarts=9)
    assert code == 1
    assert "10 allocations in a row" in said


def test_ten_allocations_with_progress_are_not(batch: Batch) -> None:
    for step in range(12):
        batch.ledger.record("slice_start", slurm_job_id="17", restart_count=step, node_list=["n1"])
        batch.ledger.record("saved", fit=0, step=step)
        batch.ledger.record("slice_end", how="preempted", then="requeue")
    assert batch.run(exits(75), exit_code=75, restarts=12)[0] == 75
    assert batch.asked("requeue")


@pytest.mark.slow_but_for("False-100-1-False")
@pytest.mark.parametrize(("restarts", "code", "requeued"), [(0, 1, False), (1, 75, True), (100, 1, False)])
@pytest.mark.parametrize("readable", [True, False])
def test_a_ledger_that_cannot_be_used(batch: Batch, restarts: int, code: int, requeued: bool, readable: bool) -> None:
    """At first that is a mistake of the user's. Later it is a node that has lost the shared storage."""
    if readable:
        batch.run_dir.mkdir()
        batch.ledger.path.symlink_to("missing")
    else:
        batch.run_dir.mkdir()
        batch.ledger.path.touch()
    returned, said = batch.run(exits(75), exit_code=75, restarts=restarts)
    assert returned == code, said
    assert str(batch.ledger.path) in said
    assert bool(batch.asked("requeue")) is requeued
    assert not (batch.folder / "srun").exists()


@pytest.mark.slow
def test_what_another_node_has_recorded_in_an_earlier_allocation_may_turn_up_in_this_one(batch: Batch) -> None:
    """Over a network file system. It says nothing about how this one has ended."""
    batch.ledger.record("slice_start", slurm_job_id="17", restart_count=0, node_list=["n1"])
    batch.ledger.record("launch")
    batch.ledger.record(**exits(0))
    batch.ledger.record("slice_end", how="preempted", then="requeue")
    process = batch.start(exit_code=1, restarts=1, takes=1.0)
    try:
        while not (batch.folder / "ready").exists():
            time.sleep(0.05)
        late = json.dumps({"event": "fault", "order": 1.0, "reason": "late"}) + "\n"
        (batch.ledger.path / "n2-01234567.jsonl").write_text(4 * late)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert (process.returncode, "launch lost" in said) == (75, True), said


@pytest.mark.slow
@pytest.mark.parametrize("empty", [True, False])
def test_a_ledger_that_is_lost_while_the_run_is_at_work(batch: Batch, empty: bool) -> None:
    """Another node may have it."""
    process = batch.start(exits(75), exit_code=75, takes=1.0)
    try:
        while not (batch.folder / "ready").exists():
            time.sleep(0.05)
        shutil.rmtree(batch.ledger.path)
        if not empty:
            batch.ledger.path.touch()
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 75, said
    assert batch.asked("requeue")
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_controller_that_does_not_answer_is_asked_again(batch: Batch) -> None:
    batch.job(refuses=1, JobState="RUNNING")
    assert batch.run(exits(75), exit_code=75)[0] == 75
    assert len(batch.asked("requeue")) == 2


def suspect(node: str) -> dict[str, Any]:
    return {"event": "workload_request", "action": "exclude_this_node", "node": node}


@pytest.mark.slow
def test_a_node_that_is_to_blame_is_excluded_beside_the_users_own(batch: Batch) -> None:
    batch.job(JobState="RUNNING", ExcNodeList="x[1-2]")
    batch.ledger.record("slice_start", slurm_job_id="17", restart_count=0, node_list=["n1"])
    batch.ledger.record("slice_end", how="failed", then="requeue", excluded=["x2"])
    code, said = batch.run(suspect("n3"), exits(75, new_job=True), exit_code=75)
    assert code == 75
    assert ["update", "JobId=17", "ExcNodeList=x1,n3"] in batch.asked("update")
    assert "without n3" in said
    assert (
        len([line for line in batch.asked("update") if line[2].startswith("ExcNodeList")]) == 2
    )  # the first was ended
    assert not any(event["event"] == "exclusion_failed" for event in read_ledger(batch.ledger.path))
    requeued = [line[0] for line in map(json.loads, (batch.folder / "scontrol").read_text().splitlines())]
    assert requeued.index("requeue") < len(requeued) - 1  # only a pending job's list can be changed
    assert read_history(batch.ledger.path).allocations[-1].excluded == ["n3"]
    batch.ledger.record("slice_start", slurm_job_id="17", restart_count=2, node_list=["n1"])
    assert read_history(batch.ledger.path).allocations[-1].excluded == ["n3"]
    batch.ledger.record("slice_start", slurm_job_id="18", restart_count=0, node_list=["n1"])
    assert read_history(batch.ledger.path).allocations[-1].excluded == []  # Slurm knows nothing of it there


def test_a_job_that_is_cancelled_while_its_requeue_is_refused_is_not_asked_for_again(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [{"JobState": "RUNNING", "Restarts": "0"}] * 2 + [{"JobState": "CANCELLED by 0", "Restarts": "0"}]
    asked: list[str] = []
    monkeypatch.setattr(slurm, "show_job", lambda job_id: states.pop(0) if len(states) > 1 else states[0])
    monkeypatch.setattr(batch_job, "REQUEUE_EVERY_S", 0.01)

    def refuse(*command: str) -> subprocess.CompletedProcess[str]:
        asked.append(command[1])
        return subprocess.CompletedProcess(command, 1, "", "busy")

    monkeypatch.setattr(slurm, "run_slurm", refuse)
    step = BatchJob(Slurm({"SLURM_JOB_ID": "17"}), batch.run_dir, [], 100, 60.0)
    assert step._requeue(End("preempted", "requeue", 1, "told to"), [], []) == 75
    assert asked.count("requeue") == 1
    assert read_history(batch.ledger.path).allocations == []


def test_a_job_that_cannot_be_requeued_says_what_to_do(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{batch.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(batch_job, "REQUEUE_WITHIN_S", 0.0)
    refuses = '#!/bin/sh\ntest "$1" = requeue && echo "Access denied" >&2\nexit 1\n'
    (batch.folder / "bin" / "scontrol").write_text(refuses)
    step = BatchJob(Slurm({"SLURM_JOB_ID": "17"}), batch.run_dir, [], 100, 60.0)
    assert step._requeue(End("preempted", "requeue", 1, "told to"), [], []) == 75
    [end] = read_ledger(batch.ledger.path)
    assert end["then"] == "end"
    assert end["reason"] == "the job could not be requeued (Access denied); submit it again to continue the run"


def test_an_exclusion_that_slurm_refuses_is_recorded(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{batch.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (batch.folder / "bin" / "scontrol").write_text("#!/bin/sh\necho no >&2\nexit 1\n")
    BatchJob(Slurm({"SLURM_JOB_ID": "17"}), batch.run_dir, [], 100, 60.0)._exclude(["n3"])
    [event] = read_ledger(batch.ledger.path)
    assert (event["event"], event["node_list"], event["reason"]) == ("exclusion_failed", ["n3"], "no")


@pytest.mark.slow
@pytest.mark.parametrize("own", [["n5"], []], ids=["a node of its own", "none"])
def test_a_node_that_the_user_excludes_is_none_to_fall_back_on(batch: Batch, own: list[str]) -> None:
    """Four of the five nodes are needed; one that this job had excluded by itself comes back for the next."""
    batch.job(JobState="RUNNING", ExcNodeList="n[5-5]")
    batch.ledger.record("slice_start", slurm_job_id="17", restart_count=0, node_list=["n1"])
    batch.ledger.record("slice_end", how="failed", then="requeue", excluded=own)
    assert batch.run(suspect("n3"), exits(75, new_job=True), exit_code=75)[0] == 75
    updates = [line[2] for line in batch.asked("update") if line[2].startswith("ExcNodeList")]
    assert updates[-1:] == (["ExcNodeList=n3"] if own else [])
    assert read_history(batch.ledger.path).allocations[-1].excluded == (["n3"] if own else [])


@pytest.mark.parametrize("field", ["ReqNodeList", "Features"])
@pytest.mark.slow_but_for("Features")
def test_no_node_is_excluded_from_a_job_that_asks_for_certain_ones(batch: Batch, field: str) -> None:
    batch.job(JobState="RUNNING", ExcNodeList="(null)", **{field: "n3"})
    code, said = batch.run(suspect("n3"), exits(75, new_job=True), exit_code=75)
    assert code == 75
    assert "without n3" not in said


# What the ledger says


def allocation_on(nodes: list[str], suspects: list[str], excluded: list[str] | None = None) -> Allocation:
    return Allocation(0.0, nodes=nodes, suspects=suspects, excluded=excluded or [])


EIGHT = [f"n{number}" for number in range(8)]


@pytest.mark.parametrize(
    ("last", "usable", "excluded"),
    [
        (allocation_on(["n1", "n2"], ["n2"]), 3, ["n2"]),
        (allocation_on(["n1", "n2"], ["n2"]), 2, []),  # there would never be two nodes again
        (allocation_on(["n1", "n2"], ["n2"]), None, []),
        (allocation_on(["n1"], ["n1"]), 9, []),
        (allocation_on(["n1", "n2"], ["n9"]), 9, []),
        (allocation_on(["n1", "n2"], ["n2"], ["n3"]), 9, ["n2"]),  # a quarter, and one at least
        (allocation_on(EIGHT, ["n2"], ["n9"]), 99, ["n9", "n2"]),
        (allocation_on(EIGHT, ["n2", "n3", "n4"]), 99, ["n3", "n4"]),
        (allocation_on(EIGHT, [], ["n9"]), 99, ["n9"]),
    ],
)
def test_nodes_are_excluded_within_bounds(last: Allocation, usable: int | None, excluded: list[str]) -> None:
    assert nodes_to_exclude(last, usable) == excluded


def told(*events: dict[str, Any]) -> list[Allocation]:
    return history_of({"time": float(time), **event} for time, event in enumerate(events)).allocations


BEGINS = {"event": "slice_start", "slurm_job_id": "17", "restart_count": 0, "node_list": ["n1", "n2"]}


def test_what_is_safe_is_the_highest_step_of_the_last_fit() -> None:
    [found] = told(BEGINS, {**SAVED, "step": 100}, {**SAVED, "step": 80})
    assert (found.step_after, found.last_seen) == (100, 2.0)
    [found] = told(BEGINS, {**SAVED, "step": 100}, {**SAVED, "fit": 1, "step": 5})
    assert found.step_after == 5


def test_a_launch_in_a_job_that_runs_something_else_is_a_allocation_of_its_own() -> None:
    launch = {"event": "launch", "slurm_job_id": "17", "slurm_restart_count": 0}
    assert len(told(launch, launch)) == 2  # by hand, in a job for the shell
    assert len(told(BEGINS, launch)) == 1
    assert len(told(BEGINS, {"event": "slice_end", "how": "cancelled", "then": "end"}, launch)) == 2


def test_a_script_without_launcher_that_fits_twice_begins_anew_with_its_first_fit() -> None:
    fits = [{"event": "fresh", "fit": 0}, {"event": "fresh", "fit": 1}]
    assert len(told(*fits)) == 1
    assert len(told(*fits, *fits)) == 2
    end = {"event": "slice_end", "how": "launch lost", "then": "end"}
    assert [each.job_id for each in told(BEGINS, end, *fits)] == ["17", None]


def test_the_nodes_of_a_job_are_those_that_slurm_names() -> None:
    assert told(BEGINS, {"event": "start", "node": "n1"})[0].nodes == ["n1", "n2"]
    assert told({"event": "launch"}, {"event": "start", "node": "here"})[0].nodes == ["here"]


def test_a_launch_that_was_lost_after_its_script_had_finished_a_fit_has_not_ended() -> None:
    [found] = told(BEGINS, {"event": "launch"}, {"event": "finished", "fit": 0, "step": 9})
    assert found.exit is None


def test_the_node_that_is_asked_to_leave_again_comes_last_and_once() -> None:
    other = {**suspect("n4"), "action": "restart"}
    assert told(BEGINS, suspect("n1"), suspect("n2"), suspect("n1"), other)[0].suspects == ["n2", "n1"]


def test_idle_allocations_count_in_a_row_only() -> None:
    idle, advanced = [Allocation(0.0)] * 9, Allocation(0.0, advanced=True)
    assert why_it_must_end([*idle, advanced, *idle], 0, 100) is None
    assert why_it_must_end([advanced, *idle, Allocation(0.0)], 0, 100) is not None


def test_a_job_chain_begins_where_the_run_had_ended() -> None:
    allocations = [Allocation(0.0, then=then) for then in ("requeue", "end", "requeue", None, "end")]
    assert len(current_job_chain(allocations)) == 3
    assert current_job_chain([]) == []


def test_what_other_jobs_and_people_have_made_is_no_part_of_a_job_chain(batch: Batch) -> None:
    allocations = [Allocation(0.0, job_id=job_id) for job_id in (None, None, "16", "17", "17")]
    assert current_job_chain(allocations) == allocations[3:]
    assert current_job_chain(allocations[:2]) == allocations[:2]
    batch.job(JobState="NODE_FAIL")
    for number in range(12):  # by hand, or jobs that have never said how they end
        batch.ledger.record("slice_start", slurm_job_id=str(number), restart_count=0, node_list=["n1"])
    code, said = batch.run(exits(0))
    assert code == 0, said


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--comment=a b", '--comment="a b"'),
        ("--comment=a #b", '--comment="a #b"'),
        ("--qos=high", "--qos=high"),
        ("-C big", "-C big"),
        ("--exclusive", "--exclusive"),
    ],
)
def test_other_options_of_sbatch_are_quoted(tmp_path: Path, option: str, line: str) -> None:
    assert f"#SBATCH {line}" in render(tmp_path, sbatch=[option]).splitlines()


@pytest.mark.parametrize("option", ["-oout.txt", "--sig=USR1@9", "--time=1", "-t1", "--node=4"])
def test_what_is_ours_in_another_spelling_is_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(ValueError, match="is set by this command"):
        render(tmp_path, sbatch=[option])


@pytest.mark.parametrize("field", ["account", "partition"])
def test_a_line_break_makes_no_option_of_its_own(tmp_path: Path, field: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        render(tmp_path, **{field: "a\n#SBATCH --nodes=9"})


def test_no_time_limit(tmp_path: Path) -> None:
    assert "#SBATCH --time=0" in render(tmp_path, time="0").splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_two_jobs_in_one_run_directory_are_one_too_many(batch: Batch, state: str) -> None:
    batch.job(JobState=state)
    batch.ledger.record("slice_start", slurm_job_id="16", restart_count=0, node_list=["n1"])
    code, said = batch.run(exits(0))
    assert code == 1
    assert "job 16 is already running in" in said
    assert "job 16 is already running in" in batch.comments()[-1]
    assert len(read_history(batch.ledger.path).allocations) == 1
    batch.ledger.record("slice_end", how="preempted", then="requeue", reason="told to")
    assert batch.run(exits(0))[0] == 0


def test_a_command_of_slurms_that_fails_or_is_missing_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    for exit_code in (None, 1, 0):
        for name in ("scontrol", "sinfo") if exit_code is not None else ():
            (tmp_path / name).write_text(f'#!/bin/sh\necho " EndTime=$SLURM_TIME_FORMAT"\nexit {exit_code}\n')
            (tmp_path / name).chmod(0o755)
        said = (
            slurm.show_job("17"),
            slurm.node_names("n[1-2]"),
            slurm.lost_nodes("n[1-2]"),
            slurm.usable_nodes("gpu"),
        )
        if exit_code != 0:
            assert said == ({}, [], [], None)
    assert said[0] == {"EndTime": "standard"}  # as it can be read


def test_requeues_that_left_no_line_count() -> None:
    assert why_it_must_end([Allocation(0.0, advanced=True)], 100, 100) is not None
    assert why_it_must_end([Allocation(0.0, advanced=True)], 99, 100) is None
    assert why_it_must_end([Allocation(0.0, advanced=True)], 0, 1) is None  # one requeue is allowed


def test_a_comment_is_set_when_it_is_new_and_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    clock = [1000.0]
    monkeypatch.setattr(slurm, "run_slurm", lambda *words: shown.append(words[-1]))
    monkeypatch.setattr("lightning_resilience.launch.batch_job.time.monotonic", lambda: clock[0])
    comment = Comment(Slurm({"SLURM_JOB_ID": "17"}))
    for text in ("a", "a", "b"):
        comment.show(text)
    assert shown == ["Comment=a"]
    clock[0] += COMMENT_EVERY_S
    comment.show("b")
    comment.show("the\nend", now=True)
    assert shown == ["Comment=a", "Comment=b", "Comment=the end"]
    comment.show("x" * 5000, now=True)  # more than Slurm takes
    assert len(shown[-1]) < 500


def test_slurms_name_of_a_node_goes_before_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-17")
    assert node_name() == "gpu-17"


def test_the_table_of_allocations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    ledger = Ledger(tmp_path / "ledger", rank=None)
    budget = {"in_job_restarts": 3, "job_retries": 2, "max_failures_per_day": 50}
    nodes = ["n1", "n2"]
    ledger.record("slice_start", slurm_job_id="17", restart_count=0, node_list=nodes)
    ledger.record("launch", slurm_job_id="17", budget=budget)
    ledger.record("job_start", run_id="a")
    ledger.record("start", elastic_run_id="a")
    ledger.record("saved", fit=0, step=120)
    ledger.record(**suspect("n2"))
    ledger.record(**exits(75, new_job=True))
    ledger.record("slice_end", how="failed", then="requeue", excluded=["n2"], reason="slow")
    ledger.record("slice_start", slurm_job_id="17", restart_count=1, node_list=["n1", "n3"])
    ledger.record("launch", slurm_job_id="17", budget=budget)  # and here Slurm lost the node
    ledger.record("slice_start", slurm_job_id="17", restart_count=2, node_list=["n1", "n3"])
    ledger.record("launch", slurm_job_id="17", budget=budget)
    ledger.record("job_start", run_id="b")
    ledger.record("start", elastic_run_id="b")
    ledger.record("failure", run_id="b")
    shown = status.status(tmp_path)
    rows = [line.split() for line in shown.splitlines()[3:6]]
    assert [row[1] for row in rows] == ["17", "17.1", "17.2"]
    assert shown.splitlines()[3].endswith("failed  requeued without n2")
    assert "- -> 120" in shown.splitlines()[3]
    assert shown.splitlines()[4].endswith("killed  requeued by scheduler")
    assert "step 120" in shown
    assert "2 of 3 restarts and 2 of 2 job retries left" in shown
    assert "Excluded  n2" in shown
    assert max(map(len, shown.splitlines())) <= 120
    assert status.progress_line(read_history(ledger.path)) == "step 120 safe, restart 1 of 3, allocation 3"


def test_the_table_of_a_run_without_slurm(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", rank=None)
    assert "no run has been launched" in status.status(tmp_path)
    for code in (75, 0):
        ledger.record("launch", slurm_job_id=None)
        ledger.record("start", elastic_run_id="a")
        ledger.record(**exits(code))
    rows = status.status(tmp_path).splitlines()[3:5]
    assert rows[0].endswith("interrupted  launched again")
    assert rows[1].endswith("finished     -")


SQUEUE = """#!/bin/sh
test "$*" = "--noheader --jobs=17 --format=%T|%r|%N|%k" && cat squeue
"""


def test_the_state_of_a_job_is_what_slurm_says_as_long_as_it_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "ledger", rank=None)
    ledger.record("slice_start", slurm_job_id="17", restart_count=0, node_list=["n1", "n2", "n3", "n4"])
    ledger.record("slice_end", how="preempted", then="requeue", reason="told to " + "x" * 200)
    (tmp_path / "squeue").write_text(SQUEUE)
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    for said, shown in (
        ("PENDING|BeginTime||step 5 safe", "job 17 is PENDING (BeginTime): step 5 safe"),
        ("RUNNING|None|n[1-4]|(null)", "job 17 is RUNNING on n[1-4]"),
        ("", "requeued 0.0 s ago"),
    ):
        Path("squeue").write_text(said)
        monkeypatch.setattr(status.time, "time", lambda: read_history(ledger.path).allocations[-1].last_seen)
        lines = status.status(tmp_path).splitlines()
        assert f"Now       {shown}" in lines
    assert "n1..n4 (4)" in lines[3]
    assert lines[-1].startswith("Last exit told to xxx")
    assert len(lines[-1]) <= 120


def test_the_table_says_what_has_followed_each_slice(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", rank=None)
    ledger.record("slice_start", time=1000.0, slurm_job_id="17", restart_count=0, node_list=["n1", "n2"])
    ledger.record(**suspect("n2"))
    ledger.record("slice_end", time=1090.0, how="failed", then="requeue", excluded=["n2"])
    ledger.record("slice_start", slurm_job_id="17", restart_count=1, node_list=["n1", "n3"])
    ledger.record("slice_end", how="preempted", then="requeue", excluded=["n2"])
    ledger.record("slice_start", slurm_job_id="17", restart_count=2, node_list=["n1", "n3"])
    ledger.record("slice_start", slurm_job_id="18", restart_count=0, node_list=[])
    ledger.record("slice_end", how="cancelled", then="end", reason="because")
    ledger.record("launch", slurm_job_id=None)
    ledger.record(**exits(75, "the last"))
    lines = status.status(tmp_path).splitlines()
    rows = [re.split("  +", line.strip()) for line in lines[3:8]]
    assert rows[0][4] == "1 min 30 s"
    assert [row[-2:] for row in rows] == [
        ["failed", "requeued without n2"],  # which it was from then on
        ["preempted", "requeued"],
        ["killed", "launched again"],
        ["cancelled", "-"],
        ["interrupted", "-"],
    ]
    assert rows[3][2] == "-"
    assert lines[-1] == "Last exit the last"


def test_a_launch_at_work_is_told_from_one_that_is_lost(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", rank=None)
    ledger.record("launch", slurm_job_id=None)
    assert status.status(tmp_path).splitlines()[3].split()[-2:] == ["-", "-"]
    record = tmp_path / "launches" / "first.000001.json"
    record.parent.mkdir()
    described = {**describe_process(), "launch_id": "a", "uid": os.getuid()}
    record.write_text(json.dumps({**described, "host": "elsewhere"}))
    assert "Now       running on another node, or killed" in status.status(tmp_path)
    record.write_text(json.dumps({**described, "host": os.uname().nodename}))
    assert f"Now       running on this node ({node_name()})" in status.status(tmp_path)
    ledger.record(**exits(75, new_job=True))
    assert "Now       ended: interrupted" in status.status(tmp_path)
    ledger.record("launch", slurm_job_id=None)
    assert status.status(tmp_path).splitlines()[3].endswith("retry  launched again")


def test_what_is_left_is_counted_by_the_last_launch(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", rank=None)
    for budget in ({"in_job_restarts": 9, "job_retries": 9}, {"in_job_restarts": 1, "job_retries": 3, "other": 1}):
        ledger.record("launch", slurm_job_id=None, budget=budget)
    ledger.record("job_start", retry=True)
    for _ in range(3):
        ledger.record("failure")
    assert "0 of 1 restarts and 2 of 3 job retries left" in status.status(tmp_path)
    assert "restart 3 of 1, retry 1 of 3, allocation 2" in status.progress_line(read_history(ledger.path))


@pytest.mark.parametrize(
    ("seconds", "shown"), [(59.94, "59.9 s"), (60.0, "1 min 00 s"), (3599.0, "59 min 59 s"), (3600.0, "1 h 00 min")]
)
def test_durations_are_for_a_person(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


# Retries as new jobs


@pytest.mark.slow
def test_two_retries_in_new_jobs_are_three_runs(launcher: Launcher) -> None:
    launcher.script('ledger.record("ran"); raise ConnectionError("boom")')
    options = ["--retries-in-new-job", "--in-job-restarts=1", "--job-retries=2", "script.py"]
    assert [launcher.run(*options) for _ in range(3)] == [75, 75, 1]
    assert [event["retry"] for event in launcher.events("job_start")] == [False, True, True]
    assert len(launcher.events("ran")) == 6
    assert "retry 1 of 2 in a new job" in launcher.stderr(0)
    assert "no progress in 3 jobs" in launcher.stderr(2)
    assert [event.get("new_job") for event in launcher.events("exit")] == [True, True, None]
    kinds = [each.kind for each in interruptions(read_history(launcher.run_directory.ledger).events)]
    assert set(kinds) == {"crash"}  # and not preemptions, although the launch has ended with 75


@pytest.mark.slow
def test_interruptions_between_retries_spend_none(launcher: Launcher) -> None:
    launcher.script(
        """
        if os.path.exists("fails"): raise ConnectionError("boom")
        raise signals.Interrupted("told to")
        """
    )
    options = ["--retries-in-new-job", "--in-job-restarts=0", "--job-retries=1", "script.py"]
    (launcher.folder / "fails").touch()
    assert launcher.run(*options) == 75
    (launcher.folder / "fails").unlink()
    for _ in range(3):
        assert launcher.run(*options) == 75
        assert launcher.events("exit")[-1].get("new_job") is None
    (launcher.folder / "fails").touch()
    assert launcher.run(*options) == 1  # the one retry has begun with the second launch
    assert [event["retry"] for event in launcher.events("job_start")] == [False, True, False, False, False]


@pytest.mark.parametrize("new_job", [True, False])
def test_a_node_to_avoid_is_avoided_in_a_new_job_only(tmp_path: Path, new_job: bool) -> None:
    ledger = Ledger(tmp_path / "ledger", rank=None)
    settings = LaunchSettings(
        ["train.py"], tmp_path, nnodes="2", node_rank=0, rdzv_endpoint="n1:1", retries_in_new_job=new_job
    )
    launch = Launch(settings)
    ledger.record(**suspect("n9"))  # of an earlier start of the workers
    ledger.record("job_start", run_id="a")
    following = settings.budget.decide(read_history(ledger.path), time.time())
    assert launch._why_in_a_new_job(following, "a") is None
    assert launch._watch_nodes("a") is False
    ledger.record(**SAVED)
    ledger.record(**suspect("n2"))
    ledger.record("failure", run_id="a")
    following = settings.budget.decide(read_history(ledger.path), time.time())
    reason = launch._why_in_a_new_job(following, "a")
    assert (reason is not None and "without n2" in reason) is new_job
    assert launch._watch_nodes("a") is new_job


def test_the_table_of_a_run_without_launcher(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    for event, step in (("fresh", 0), ("saved", 13), ("interrupted", 13), ("resumed", 13), ("finished", 48)):
        ledger.record(event, fit=0, step=step)
    ledger.record("fresh", fit=1)  # the script's next fit
    rows = status.status(tmp_path).splitlines()[3:]
    assert re.split("  +", rows[0])[-4:] == ["- -> 13", "-", "interrupted", "launched again"]
    assert "13 ->" in rows[1]
    assert rows[2] == ""
    assert "Budget    none" in "\n".join(rows)
    ledger.record("launch", slurm_job_id=None)
    assert len(read_history(ledger.path).allocations) == 3
    assert "3 of 3 restarts" in status.status(tmp_path)


@pytest.mark.parametrize(
    "end",
    [exits(75), {"event": "slice_end", "how": "cancelled", "then": "end"}],
    ids=["the launch has ended", "the job has ended"],
)
@pytest.mark.slow_but_for("the launch has ended")
def test_a_run_that_goes_on_without_launcher(tmp_path: Path, end: dict[str, Any]) -> None:
    ledger = Ledger(tmp_path / "ledger", rank=None)
    ledger.record("slice_start", slurm_job_id="17", restart_count=0, node_list=["n1"])
    ledger.record("launch", slurm_job_id="17")
    ledger.record("resumed", fit=0, step=0)
    ledger.record(**end)
    ledger.record("resumed", fit=0, step=5)
    assert [each.job_id for each in read_history(ledger.path).allocations] == ["17", None]
    assert "ended: " not in status.status(tmp_path)


# The page


def test_the_page_has_the_script_that_is_rendered() -> None:
    page = (ROOT / "docs" / "slurm.md").read_text()
    script = BatchScript(
        launch=["--nproc-per-node=8", "train.py", "--lr", "3e-4"],
        run_dir=Path("/shared/runs/gpt"),
        directory=Path("/home/me/gpt"),
        nodes=2,
        job_name="gpt",
        time="4:00:00",
        gpus_per_node=8,
        partition="gpu",
        python="/shared/venv/bin/python",
    )
    assert script.render().splitlines()[2:] == page.split("```bash\n")[1].split("```")[0].splitlines()[2:]


@pytest.mark.parametrize(("task", "asked"), [("2", "100_2"), ("", "102"), ("none", "102")])
def test_a_task_of_a_job_array_is_requeued_alone(monkeypatch: pytest.MonkeyPatch, task: str, asked: str) -> None:
    commands: list[tuple[str, ...]] = []

    def run_slurm(*command: str) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(slurm, "run_slurm", run_slurm)
    job = {"SLURM_JOB_ID": "102", "SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": task}
    assert slurm.Slurm(job).requeue() is None
    assert commands == [("scontrol", "requeue", asked)]
