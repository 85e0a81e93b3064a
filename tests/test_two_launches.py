"""Of two launches of one run one goes on, and the other ends without having touched what is the first one's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lightning_resilience.launch.nodes import meet_alike
from lightning_resilience.launch.processes import LAUNCH_ID_VARIABLE, processes_of
from lightning_resilience.launch.record import FIRST, LaunchRecord, newest
from tests.test_kubernetes import why_no_pods
from tests.test_launch import FAKE, PATIENCE_S, STOPS_WHEN_TOLD, Launcher, wait_until

HERE = (
    "from lightning_resilience.launch import nodes, record\nnodes.BEAT_INTERVAL_S = record.BEAT_INTERVAL_S = 0.3\n"
    + FAKE
)
ELSEWHERE = "import platform\nplatform.node = lambda: 'elsewhere'\n" + HERE
NODES = ["--nnodes=2", "--in-job-restarts=0"]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.clean_up()


def test_of_launches_that_begin_together_one_is_accepted(tmp_path: Path) -> None:
    """As ``srun --ntasks-per-node=8 lightning-resilience launch`` starts them."""
    code = """
import os, signal, sys
from pathlib import Path
from lightning_resilience.launch.job import Launch, LaunchSettings, Refused
reader, writer = os.pipe()
def starter(settings, run_id, max_restarts):
    return ["sleep", "1000"], {}
for _ in range(8):
    if os.fork() == 0:
        os.close(writer)
        os.dup2(2, 1)
        os.read(reader, 1)
        try:
            Launch(LaunchSettings(["train.py"], Path(sys.argv[1])), starter).run()
        except Refused:
            os._exit(7)
        os._exit(0)
os.close(reader)
os.close(writer)  # all begin
signal.alarm(30)
refused = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(7)]
print(refused, flush=True)
"""
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert first.stdout is not None
        assert json.loads(first.stdout.readline() or "[]") == [7] * 7
        first.stdout.close()
        record = newest(tmp_path / "launches", FIRST)
        assert record is not None
        [accepted] = [process for process in psutil.process_iter() if process.pid == record.content["pid"]]
        accepted.terminate()
        wait_until(lambda: newest(tmp_path / "launches", FIRST) is None)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()


@pytest.mark.slow
def test_a_launch_on_another_host_is_refused_as_long_as_the_first_lives(launcher: Launcher) -> None:
    launcher.script(STOPS_WHEN_TOLD)
    first = launcher.start(program=HERE)
    launcher.wait_for("ready")
    assert launcher.run(program=ELSEWHERE) == 1
    assert f"Refused: process {first.pid} on host {os.uname().nodename} runs" in launcher.stderr()
    assert "its record is still being updated; wait for it" in launcher.stderr()
    assert len(launcher.events("launch")) == len(launcher.events("start")) == 1
    assert not launcher.events("launcher_killed")

    first.kill()  # and now it does not live any more
    launcher.script("")
    assert launcher.run(program=ELSEWHERE) == 0, launcher.stderr()
    assert len(launcher.events("launcher_killed")) == 1
    assert list((launcher.run_directory.path / "launches").iterdir()) == []


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_a_launch_that_was_taken_for_dead_ends_and_does_not_take_the_run_back(launcher: Launcher) -> None:
    launcher.script('ledger.record("ready")\nwhile not os.path.exists("fail"): time.sleep(0.01)\nsys.exit("late")')
    launcher.script(STOPS_WHEN_TOLD, "again.py")
    first = launcher.start(program=HERE)
    launcher.wait_for("ready")
    [launch_id] = launcher.launch_ids
    first.send_signal(signal.SIGSTOP)  # as a host does that is suspended

    second = launcher.start("again.py", program=ELSEWHERE)
    launcher.wait_for("ready", 2)
    attempt = launcher.run_directory.attempt
    (launcher.folder / "fail").touch()  # the workers of the first fail, and are restarted inside its job
    wait_until(lambda: len(launcher.events("fault")) == 1)
    wait_until(lambda: all(map(has_ended, processes_of(launch_id))))
    first.send_signal(signal.SIGCONT)
    assert first.wait(PATIENCE_S) == 1
    assert f"elsewhere has taken over {launcher.run_directory.path}" in launcher.stderr(0)
    assert not processes_of(launch_id)

    assert launcher.run_directory.attempt == attempt
    assert len(launcher.events("start")) == 2
    second.terminate()
    assert second.wait(PATIENCE_S) == 75
    assert [event["exit_code"] for event in launcher.events("exit")] == [75]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_pods()), reason=why_no_pods())
def test_a_launch_in_a_container_with_the_name_of_its_host_is_left_alive(launcher: Launcher) -> None:
    launcher.script(STOPS_WHEN_TOLD)
    options = [f"--run-dir={launcher.run_directory.path}", "script.py"]
    container = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", HERE, "launch", *options],
        cwd=launcher.folder,
        env={name: value for name, value in os.environ.items() if name != LAUNCH_ID_VARIABLE},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        launcher.wait_for("ready")
        assert launcher.run(program=HERE) == 1
        assert "in another container" in launcher.stderr()
        assert "Ended" not in launcher.stderr()
        assert container.poll() is None
        [inside] = psutil.Process(container.pid).children()
        inside.terminate()
        assert "] Interrupted: " in container.communicate(timeout=PATIENCE_S)[1].splitlines()[-1]
        assert container.returncode == 75
    finally:
        container.kill()
        container.wait()


@pytest.mark.slow
def test_nodes_of_another_job_do_not_join(launcher: Launcher) -> None:
    launcher.script(
        """
        if os.environ["RANK"] == "1": sys.exit(0)
        ledger.record("ready")
        while not os.path.exists("end"): time.sleep(0.01)
        """
    )
    mine, others = (["--rdzv-endpoint=127.0.0.1:1"], ["--rdzv-endpoint=127.0.0.1:2"])
    ranks = ("0", "1")
    first = [
        launcher.start(*NODES, *mine, f"--node-rank={rank}", "script.py", program=HERE, RANK=rank, GROUP_WORLD_SIZE="2")
        for rank in ranks
    ]
    launcher.wait_for("ready")
    second = [
        launcher.start(*NODES, *others, f"--node-rank={rank}", "script.py", program=ELSEWHERE, RANK=rank)
        for rank in ranks
    ]
    assert [node.wait(PATIENCE_S) for node in second] == [1, 1]
    assert "Refused: process" in launcher.stderr(2)
    assert "Refused: other nodes, with rendezvous 127.0.0.1:1 instead of 127.0.0.1:2, run" in launcher.stderr(3)
    (launcher.folder / "end").touch()
    assert [node.wait(PATIENCE_S) for node in first] == [0, 0], launcher.stderr(0) + launcher.stderr(1)
    assert len(launcher.events("start")) == len(launcher.events("job_start")) == 1


@pytest.mark.parametrize(
    ("endpoint", "other", "alike"),
    [
        ("gpu-01:29500", "gpu-01:29500", True),
        ("gpu-01:29500", "gpu-01:29501", False),
        ("192.0.2.1:29500", "192.0.2.2:29500", False),
        ("192.0.2.1:29500", "[::ffff:192.0.2.1]:29500", False),
        ("localhost:29500", "192.0.2.2:29500", True),  # the first node may call itself so
        ("no-such-host.invalid:29500", "192.0.2.2:29500", True),
        ("", "192.0.2.2:29500", True),
    ],
)
def test_nodes_meet_unless_it_is_certain_that_they_do_not(endpoint: str, other: str, alike: bool) -> None:
    assert meet_alike(endpoint, other) == meet_alike(other, endpoint) == alike


def test_a_record_that_cannot_be_read_is_watched_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_resilience.launch import record

    monkeypatch.setattr(record, "BEAT_INTERVAL_S", 0.1)
    (tmp_path / f"{FIRST}.000003.json").write_text("{")
    said: list[str] = []
    mine = LaunchRecord(tmp_path, "mine")
    assert mine.take(lambda: False, said.append)
    assert len(said) == 1
    found = newest(tmp_path, FIRST)
    assert found is not None
    assert (found.number, found.launch_id) == (4, "mine")
    mine.release()


@pytest.mark.slow
def test_a_default_run_directory_is_not_shared_by_other_arguments(launcher: Launcher) -> None:
    """A sweep would end with the first one's weights, again and again."""
    launcher.script("open('said', 'a').write(sys.argv[-1][-1])")

    def run(*arguments: str, action: str = "launch") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", FAKE, action, *arguments]
        return subprocess.run(command, cwd=launcher.folder, capture_output=True, text=True, timeout=60, check=False)

    runs = launcher.folder / "runs"
    before_there_were_names = ["--run-dir=runs/script", "script.py", "1"]
    assert run(*before_there_were_names).returncode == 0
    assert "has finished already" in run("script.py", "1").stderr, "what had begun there goes on there"
    assert run("script.py", "2").returncode == 0
    assert run("script.py", "2").returncode == 0
    assert run("script.py").returncode == 0
    assert run("./script.py", "2", "--max_epochs", "3").returncode == 0, "a raised end is the same run"
    assert (launcher.folder / "said").read_text() == "12y3"
    of_2, without = sorted(path for path in runs.iterdir() if path.name != "script")
    commands = {(path / "command.txt").read_text() for path in (of_2, without)}
    assert commands == {"./script.py 2 --max_epochs 3\n", "script.py\n"}
    listed = run("runs", action="status").stdout
    assert all(words in listed for words in ("script.py 1", "./script.py 2 --max_epochs 3", of_2.name, "finished"))
    second = next(path for path in (of_2, without) if " 2 " in (path / "command.txt").read_text())
    assert f"--run-dir={second}" in run("script.py", "2", action="slurm").stdout
