"""What the processes of a launch leave on a node: other processes, sockets and ports."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lightning_resilience._processes import OUTLIVES_RANKS_VARIABLE
from lightning_resilience.launch import temporary
from lightning_resilience.launch.processes import LAUNCH_ID_VARIABLE, end_processes, processes_of
from tests.test_launch import PATIENCE_S, REAL, Launcher, launcher

__all__ = ["launcher"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


HOLDS_A_PORT = """
    import multiprocessing, signal, socket
    port = int(sys.argv[1])
    if restart_count == 0 and os.environ["RANK"] == "0":
        server = f"import signal, socket; server = socket.create_server(('127.0.0.1', {port})); print(flush=True); "
        holder = [sys.executable, "-c", server + "signal.pause()"]
        holder = subprocess.Popen(holder, stdout=subprocess.PIPE, start_new_session=True)
        assert holder.stdout.readline() == b"\\n"
        watchdogs = []
        while not watchdogs:
            import psutil
            watchdogs = [each.pid for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"]
                         and "lightning_resilience.detect.hangs.watchdog" in each.info["cmdline"]
                         and each.environ().get("TORCHELASTIC_RUN_ID") == os.environ["TORCHELASTIC_RUN_ID"]
                         and each.ppid() != os.getpid()]
        os.kill(watchdogs[0], signal.SIGSTOP)  # else it ends by itself
        open("watchdog", "w").write(str(watchdogs[0]))
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["RANK"] == "0":
        os.kill(int(open("watchdog").read()), signal.SIGCONT)
        socket.create_server(("127.0.0.1", port)).close()
    ledger.record("bound")
"""


def test_what_a_killed_rank_had_started_is_gone_when_it_is_started_again(launcher: Launcher) -> None:
    launcher.script(HOLDS_A_PORT)
    assert launcher.run("--in-job-restarts=1", "--job-retries=0", "script.py", str(free_port())) == 0, launcher.stderr()
    assert "Terminated 1 remaining processes of earlier ranks on" in launcher.stderr()


WAITS = """
    ledger.record("ready")
    while not os.path.exists("go"): time.sleep(0.02)
    if restart_count == 0 and os.environ["RANK"] == "1": os.kill(os.getpid(), 9)
"""


def listening(launch_id: str) -> set[str]:
    found = set()
    for process in processes_of(launch_id):
        with suppress(psutil.NoSuchProcess):
            found |= {each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.nvrx
@pytest.mark.slow
def test_real_a_launch_leaves_no_socket_and_can_be_reached_from_this_machine_only(launcher: Launcher) -> None:
    where = Path(tempfile.mkdtemp(prefix="lr-", dir="/tmp"))  # a path of a socket is short
    try:
        abandoned = where / f"lightning-resilience-{os.getuid()}-killed00"
        abandoned.mkdir()
        (abandoned / "_ft_launcher1.socket").touch()
        launcher.script(WAITS)
        launch = launcher.start("--nproc-per-node=2", "script.py", program=REAL, TMPDIR=str(where))
        launcher.wait_for("ready", 2)
        [launch_id] = launcher.launch_ids
        [folder] = where.glob("lightning-resilience-*")
        assert folder != abandoned, "what a dead launch has left is removed"
        assert {path.parent for path in where.rglob("*.socket")} == {folder}
        assert (folder.stat().st_mode & 0o777) == 0o700
        assert listening(launch_id) == {"127.0.0.1"}
        [job] = launcher.events("job_start")
        assert not [each for each in processes_of(launch_id) if job["run_id"] in " ".join(each.cmdline())]
        (launcher.folder / "go").touch()
        assert launch.wait(PATIENCE_S) == 0, launcher.stderr()
        assert [(each["restart_count"], each["world_size"]) for each in launcher.events("start")] == [(0, 2), (1, 2)]
        assert not list(where.rglob("*.socket"))
        assert not list(where.glob("lightning-resilience-*"))
    finally:
        shutil.rmtree(where)


def test_sockets_of_killed_data_loader_workers_lie_in_the_folder_of_the_launch() -> None:
    where = Path(tempfile.mkdtemp(prefix="lr-", dir="/tmp"))  # a path of a socket is short
    try:
        check_sockets_lie_in_a_folder(where)
    finally:
        shutil.rmtree(where)


def check_sockets_lie_in_a_folder(where: Path) -> None:
    for name in ("launch", "other"):
        (where / name).mkdir()
    program = """
    import multiprocessing, os, signal, sys
    from lightning_resilience.launch.temporary import keep_sockets_in
    keep_sockets_in(sys.argv[1])
    def work():
        from multiprocessing.resource_sharer import DupFd
        DupFd(0)
        os.kill(os.getpid(), signal.SIGKILL)
    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(where / "launch")]
    environment = os.environ | {"TMPDIR": str(where / "other")}
    assert subprocess.run(command, check=False, env=environment).returncode == -signal.SIGKILL
    assert len(list((where / "launch").glob("pymp-*/listener-*"))) == 1
    assert not list((where / "other").iterdir())


def test_the_folder_of_a_launch_that_lives_is_not_taken_for_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temporary, "_SOCKET_PATH_BYTES", 1000)
    with temporary.launch_folder() as first:
        assert first is not None
        (first / "socket").touch()
        with temporary.launch_folder() as second:
            assert second is not None
            assert (first / "socket").exists()
            assert second != first
    assert not list(tmp_path.iterdir())


def test_a_socket_has_a_short_path_wherever_temporary_files_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (deep := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with temporary.launch_folder() as folder, socket.socket(socket.AF_UNIX) as server:
        assert folder is not None
        server.bind(f"{folder}/_ft_launcher4194304_to_rmon.socket")


# Two starts of ranks under one launcher, without what else a launch does.
GROUPS = """
import os, subprocess, sys
def rank(count, program):
    environment = os.environ | {"TORCHELASTIC_RESTART_COUNT": str(count), "MASTER_PORT": f"2900{count}"}
    return subprocess.Popen([sys.executable, "-c", START + program], env=environment, stdin=subprocess.PIPE)
START = '''
import os, subprocess, sys
def start(name, **environment):
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True, env=os.environ | environment)
    print(name, process.pid, flush=True)
'''
asks = "from lightning_resilience.launch import processes; import time; "
asks += "print('left', *[each.pid for each in processes.left_by_earlier_ranks()], flush=True)"
uses = "from lightning_resilience import _processes; input(); import time; "
uses += "_processes.count_from(time.clock_gettime(time.CLOCK_BOOTTIME)); "
spare = rank(1, uses + asks)
dead = "start('child'); start('of another port', MASTER_PORT='1'); start('watchdog', %s='1'); os._exit(9)"
rank(0, dead % sys.argv[1]).wait()
rank(1, "start('daemon of the living')").wait()
living = rank(1, "start('child of the living', MASTER_PORT='1'); print('.', flush=True); input()")
living_is_ready = sys.stdin.readline()
rank(1, asks).wait()
spare.communicate(b'\\\\n')
living.communicate(b'\\\\n')
"""


@pytest.fixture
def mark() -> Iterator[str]:
    mark = f"test-{os.getpid()}-{free_port()}"
    yield mark
    end_processes(mark)


def test_only_what_dead_ranks_have_left_counts(mark: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(GROUPS), OUTLIVES_RANKS_VARIABLE],
        env=os.environ | {LAUNCH_ID_VARIABLE: mark, "TORCHELASTIC_RUN_ID": mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    started: dict[str, str] = {}
    answers = 0
    for line in process.stdout:
        name, _, pids = line.strip().rpartition(" ")
        if line.strip() == ".":
            process.stdin.write("\n")
            process.stdin.flush()
        elif line.startswith("left"):
            assert set(line.split()[1:]) == {started["child"], started["of another port"]}
            answers += 1
            if answers == 2:  # of one that has just started, and of one that was used now
                break
        else:
            started[name] = pids
    else:
        pytest.fail("it has not answered")
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0
