"""The watchdog by itself: ranks without a training, of one node and of two, in what goes wrong around them."""

from __future__ import annotations

import errno
import faulthandler
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience import _processes
from lightning_resilience._files import read_json, write_json
from lightning_resilience._processes import describe_process, is_running
from lightning_resilience.detect.hangs import watchdog
from lightning_resilience.detect.hangs.abandoned import remove_abandoned
from lightning_resilience.detect.hangs.deaths import is_stopped
from lightning_resilience.detect.hangs.process_probe import probe_process
from lightning_resilience.detect.hangs.progress import ProgressRecord
from lightning_resilience.detect.hangs.rank_probe import (
    STACKS_SIGNAL,
    RankProbe,
    node_directory,
    own_directories,
)
from lightning_resilience.detect.hangs.verdict import diagnose
from lightning_resilience.launch.view import diagnoses, ranks_now
from lightning_resilience.run import deadlines, exit_codes, time_account
from lightning_resilience.run.events import Fault
from lightning_resilience.run.run_directory import RunDirectory
from tests.ledgers import Ledger, read_ledger
from tests.test_json_output import parsed

_FORK = multiprocessing.get_context("fork")
LIMIT_S = 2.0


class Job:
    """Ranks that do nothing but advance, each of which may do something else once.

    Args:
        run_dir: Their run directory.
        nodes: How many nodes of one rank each.
    """

    def __init__(self, run_dir: Path, nodes: int = 1) -> None:
        self.run_dir, self.nodes = run_dir, nodes
        self.token = uuid.uuid4().hex
        self.log = run_dir.with_suffix(".log")
        self.processes: list[Any] = []

    def start(self, rank: int, pause_s: float = 0.0, seconds: float = 6.0, **options: Any) -> None:
        process = _FORK.Process(target=_rank, args=(self, rank, pause_s, seconds, options))
        process.start()
        self.processes.append(process)

    def wait(self) -> list[int | None]:
        for process in self.processes:
            process.join(60)
        return [process.exitcode for process in self.processes]

    def directory(self, rank: int = 0) -> Path:
        return node_directory(self.token, rank)


def _rank(job: Job, rank: int, pause_s: float, seconds: float, options: dict[str, Any]) -> None:
    fd = os.open(options.get("stderr", job.log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 2)
    about = {"run_dir": str(job.run_dir), "fit": 0, "token": job.token, "node": f"node-{rank}", "nodes": job.nodes}
    about |= {"world_size": job.nodes, "elastic_run_id": None, "restart_count": 0}
    probe = RankProbe(job.directory(rank), rank, {"step": LIMIT_S}, about)
    if options.get("beside_a_container"):  # whose numbers of processes mean nothing here
        record = read_json(job.directory(rank) / f"rank-{rank:05d}.json")
        shutil.copy(probe.progress_path, job.directory(rank) / "rank-00001.progress")
        there = {"rank": 1, "pid": 2**22 + 1, "process_started": "then", "namespace": "pid:[1]"}
        write_json(job.directory(rank) / "rank-00001.json", {**record, **there})
    if options.get("watched", True):
        watchdog.start(job.directory(rank))
    began, step = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        step += 1
        probe.progress.at("step", step, (step, 1, 0, 0))
        time.sleep(0.05)
        if step == 20:
            if options.get("dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            if options.get("unlink"):
                shutil.rmtree(job.directory(rank))
            time.sleep(pause_s)
    probe.close()
    os._exit(0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    yield run_dir
    for directory in own_directories():
        for record in map(Path, glob(f"{directory}/*/rank-*.json")):  # other runs' folders come and go meanwhile
            if (read_json(record) or {}).get("run_dir") == str(run_dir):
                shutil.rmtree(record.parent, ignore_errors=True)


def await_that(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def hangs(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read_ledger(RunDirectory(run_dir).ledger) if event["event"] == "fault"]


def test_a_rank_that_advances_is_left_alone(run_dir: Path) -> None:
    job = Job(run_dir)
    job.start(0, pause_s=LIMIT_S / 2, seconds=3)
    assert job.wait() == [0]
    assert not hangs(run_dir)


def test_a_rank_in_another_container_is_not_taken_for_dead(run_dir: Path) -> None:
    job = Job(run_dir)
    job.start(0, seconds=3, beside_a_container=True)
    assert job.wait() == [0]
    assert not hangs(run_dir)


def test_a_rank_that_does_not_is_ended(run_dir: Path) -> None:
    job = Job(run_dir)
    job.start(0, pause_s=60)
    assert job.wait() == [exit_codes.HUNG]
    (hang,) = hangs(run_dir)
    assert (hang["kind"], hang["section"], hang["limit"], hang["step"]) == ("hang", "step", LIMIT_S, 20)
    assert "_rank (test_watchdog.py" in hang["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stderr", ["full pipe", *(pytest.param(each, marks=pytest.mark.campaign) for each in ("/dev/full", "closed pipe"))]
)
def test_a_log_that_takes_nothing_changes_nothing(run_dir: Path, tmp_path: Path, stderr: str) -> None:
    job = Job(run_dir)
    if stderr != "/dev/full":
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        if stderr == "full pipe":
            writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            with suppress(BlockingIOError):
                while True:
                    os.write(writer, b"x" * 4096)
        job.start(0, pause_s=60, stderr=fifo)
        if stderr == "closed pipe":
            time.sleep(0.5)
            os.close(reader)
    else:
        job.start(0, pause_s=60, stderr=stderr)
    assert job.wait() == [exit_codes.HUNG]


@pytest.mark.slow
def test_node_memory_that_is_cleaned_up_is_no_hang(run_dir: Path) -> None:
    job = Job(run_dir)
    job.start(0, unlink=True, seconds=LIMIT_S + 2)
    assert job.wait() == [0]


def _watch(job: Job) -> list[dict[str, Any]]:
    """Watches the rank of a job to its end; returns what was recorded."""
    here = watchdog.Watchdog(job.directory())
    here.register()
    here.run()
    job.wait()
    return list(read_ledger(RunDirectory(job.run_dir).ledger))


def test_a_death_is_recorded_while_slow_storage_keeps_the_time(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = time_account.keep

    def slowly(*args: Any) -> None:
        time.sleep(0.5)
        keep(*args)

    monkeypatch.setattr(time_account, "keep", slowly)
    monkeypatch.setattr(deadlines, "KEEP_TIME_EVERY_S", 0.0)
    job = Job(run_dir)
    job.start(0, watched=False, dies=True)
    assert [event["event"] for event in _watch(job)] == ["killed", "time_spent"]
    assert not time_account.kept(run_dir)


def test_what_is_kept_of_a_node_that_may_go_down_has_its_name(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, kept = time_account.keep, []

    def look(*args: Any) -> None:
        keep(*args)
        kept.extend(time_account.kept(run_dir))

    monkeypatch.setattr(time_account, "keep", look)
    job = Job(run_dir)
    job.start(0, watched=False, seconds=2)
    (recorded,) = _watch(job)
    assert {(each.attempt, each.node) for each in kept} == {(job.token, recorded["node"])}, "counted twice, or nowhere"


@pytest.mark.slow
def test_a_hang_ends_where_the_storage_hangs_too(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the run directory is looked at but with a deadline, not even whether it is there."""
    answers, isfile = threading.Event(), os.path.isfile

    def wait(path: Any) -> bool:
        if str(path).startswith(str(run_dir)):
            answers.wait()
        return isfile(path)

    monkeypatch.setattr(os.path, "isfile", wait)
    job = Job(run_dir)
    job.start(0, watched=False, pause_s=30, seconds=3)
    watching = threading.Thread(target=_watch, args=(job,), daemon=True)
    watching.start()
    codes = job.wait()
    answers.set()
    watching.join()
    assert codes == [exit_codes.HUNG]


def test_the_end_of_a_rank_of_another_version_wakes_the_watchdog(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watchdog that is started again may be newer than its ranks, which keep no account of their time."""
    awaited: list[int] = []

    class Exits(watchdog.ExitWatcher):
        def add(self, pid: int) -> None:
            awaited.append(pid)
            super().add(pid)

    monkeypatch.setattr(watchdog, "ExitWatcher", Exits)
    job = Job(run_dir)
    job.start(0, watched=False, seconds=1)
    await_that((job.directory() / "rank-00000.json").exists)
    (job.directory() / "rank-00000.time").unlink()
    _watch(job)
    assert awaited == [job.processes[0].pid]


def test_two_nodes_one_hangs(run_dir: Path) -> None:
    job = Job(run_dir, nodes=2)
    job.start(0, pause_s=0.5, seconds=20)
    job.start(1, pause_s=60)
    assert job.wait() == [exit_codes.HUNG, exit_codes.HUNG]
    (hang,) = hangs(run_dir)
    assert "rank 1 (node-1" in hang["reason"]


@pytest.mark.slow
def test_a_node_that_comes_late_to_a_hang_does_not_judge_it_again(run_dir: Path) -> None:
    job = Job(run_dir, nodes=2)
    job.start(1, pause_s=60)
    beat = job.directory(1) / "watchdog.beat"
    await_that(beat.exists)
    first = beat.read_bytes()
    await_that(lambda: beat.read_bytes() != first)  # it has looked for cases once
    folder = run_dir / "diagnostics" / "judged"
    folder.mkdir(parents=True)
    write_json(folder / "verdict.json", {"is_hang": True, "line": "rank 0 hangs"})
    write_json(folder.parent / f".{job.token}-0.json", {"folder": folder.name})
    assert job.wait() == [exit_codes.HUNG]
    assert list(folder.parent.glob("*/verdict.json")) == [folder / "verdict.json"]
    assert not hangs(run_dir), "the node that has judged it has recorded it"


@pytest.mark.slow
def test_a_hang_before_a_restart_that_keeps_the_token_ends_nobody(run_dir: Path) -> None:
    job = Job(run_dir, nodes=2)
    folder = run_dir / "diagnostics" / "judged"
    folder.mkdir(parents=True)
    write_json(folder / "verdict.json", {"is_hang": True, "line": "rank 0 hangs"})
    write_json(folder.parent / f".{job.token}-0.json", {"folder": folder.name})
    job.start(1, seconds=4)
    assert job.wait() == [0]


def _never_begins(job: Job) -> None:
    about = {"run_dir": str(job.run_dir), "fit": None, "token": job.token, "node": "node-0", "nodes": 1}
    about |= {"world_size": 1, "elastic_run_id": "launch", "restart_count": 0}
    RankProbe(job.directory(), 0, {"start": 1.0}, about, is_workers=True)
    time.sleep(60)


@pytest.mark.slow
def test_a_rank_that_takes_long_to_die_is_judged_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(run_dir)
    rank = _FORK.Process(target=_never_begins, args=(job,))
    rank.start()
    await_that((job.directory() / "rank-00000.json").exists)
    kill, kills = os.kill, []

    def kill_late(pid: int, signum: int) -> None:
        if signum == signal.SIGKILL:
            kills.append(pid)
            if len(kills) > 1:
                kill(pid, signum)
        elif signum != exit_codes.HUNG:
            kill(pid, signum)

    monkeypatch.setattr(os, "kill", kill_late)
    watchdog.Watchdog(job.directory()).run()
    rank.join(60)
    assert kills == [rank.pid] * 2
    verdicts = [read_json(path) or {} for path in (run_dir / "diagnostics").glob("*/verdict.json")]
    assert sum(verdict["is_hang"] for verdict in verdicts) == 1
    assert len(hangs(run_dir)) == 1


def _computes(job: Job, is_started_again: bool) -> None:
    about = {"run_dir": str(job.run_dir), "fit": 0, "token": job.token, "node": "node-0", "nodes": 1, "world_size": 1}
    about |= {"elastic_run_id": None, "restart_count": 0, "is_started_again": is_started_again}
    probe = RankProbe(job.directory(), 0, {"step": 1.0}, about)
    probe.progress.at("step", 7, (7, 1, 0, 0))
    verdicts: list[dict[str, Any]] = []
    while not any(verdict.get("is_hang") is False for verdict in verdicts):  # longer than a step may take
        verdicts = [read_json(path) or {} for path in glob(f"{job.run_dir}/diagnostics/*/verdict.json")]
    probe.close()
    os._exit(0)


BUSY: dict[str, tuple[bool, bool, float, int]] = {
    # whether it is started again, and was ended there before; how many times its limit it may take; how it ends
    "started again": (True, False, 16, exit_codes.HUNG),
    "was ended there in vain": (True, True, 16, 0),
    "not started again": (False, False, 16, 0),
    "much too slow": (False, False, 1, exit_codes.HUNG),
}


@pytest.mark.parametrize("case", BUSY)
@pytest.mark.slow_but_for("much too slow", "started again")
def test_a_busy_rank_gets_more_time_where_its_end_would_help_nobody(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    is_started_again, was_ended, may_take, code = BUSY[case]
    if was_ended:
        Ledger(RunDirectory(run_dir).ledger).record(
            Fault(kind="hang", busy=True, fit=0, section="step", step=7, reason="stuck, busy on the CPU")
        )
    monkeypatch.setattr(watchdog, "_BUSY_FOR", may_take)
    job = Job(run_dir)
    rank = _FORK.Process(target=_computes, args=(job, is_started_again), daemon=True)
    rank.start()
    await_that((job.directory() / "rank-00000.json").exists)
    watchdog.Watchdog(job.directory()).run()
    rank.join(60)
    assert rank.exitcode == code
    assert len(hangs(run_dir)) == was_ended + (code == exit_codes.HUNG)


def _busy_answering(directory: Path) -> None:
    stacks = open(directory / "rank-00000.stacks", "wb", buffering=0)

    def dump(*_: Any) -> None:
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
        stacks.write(b"x" * 1_000_000)
        faulthandler.dump_traceback(stacks)

    signal.signal(STACKS_SIGNAL, dump)
    (directory / "ready").touch()
    time.sleep(60)


def test_a_rank_that_answers_is_not_busy_for_that(tmp_path: Path) -> None:
    rank = _FORK.Process(target=_busy_answering, args=(tmp_path,))
    rank.start()
    await_that((tmp_path / "ready").exists)
    about = {"pid": rank.pid, "process_started": _processes._started(rank.pid or 0), "rank": 0, "node": "here"}
    about |= {"main_thread": threading.get_ident(), "has_server": False}
    found = probe_process(about, tmp_path / "rank-00000", None, 1.0)
    await_that(lambda: (tmp_path / "rank-00000.stacks").stat().st_size > 1_000_000)  # it was asked
    rank.kill()
    rank.join()
    assert not (verdict := diagnose([found], 1)).is_busy, verdict.line


def _fails() -> bool:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _spins(job: Job, has_work: Callable[[], bool] | None) -> None:
    about = {"run_dir": str(job.run_dir), "fit": 0, "token": job.token, "node": "here", "nodes": 1, "world_size": 1}
    probe = RankProbe(job.directory(), 0, {"step": 60.0}, about)
    if has_work is not None:
        probe.answer_for_device(has_work)
        probe.end_fit()  # and the next one
        probe = RankProbe(job.directory(), 0, {"step": 60.0}, about)
        probe.answer_for_device(has_work)
    (job.run_dir / "ready").touch()
    while True:
        pass


@pytest.mark.parametrize(
    ("has_work", "is_busy", "said"),
    [
        pytest.param(lambda: True, False, "while its device has work left", id="waits for its device"),
        pytest.param(lambda: False, True, "busy on the CPU", id="its device is idle"),
        pytest.param(_fails, True, "busy on the CPU", id="its device is in distress"),
        pytest.param(None, True, "busy on the CPU", id="no device"),
    ],
)
def test_a_rank_that_waits_for_its_device_is_not_busy(
    run_dir: Path, has_work: Callable[[], bool] | None, is_busy: bool, said: str
) -> None:
    """On GPUs the host looks again and again whether the device has finished, and uses a core for that."""
    job = Job(run_dir)
    rank = _FORK.Process(target=_spins, args=(job, has_work))
    rank.start()
    await_that((run_dir / "ready").exists)
    about = read_json(job.directory() / "rank-00000.json")
    assert about is not None
    found = probe_process(about, job.directory() / "rank-00000", None, 1.0)
    rank.kill()
    rank.join()
    shutil.rmtree(job.directory())
    verdict = diagnose([found], 1)
    assert (verdict.is_busy, said in verdict.line) == (is_busy, True), verdict.line


def test_a_rank_that_saves_is_watched_for_longer_than_one_slow_write(tmp_path: Path) -> None:
    """The kernel counts what is written when the call returns."""
    code = "import sys, time; f = open(sys.argv[1], 'wb', 0); print(flush=True); time.sleep(0.4); "
    command = [sys.executable, "-c", code + "f.write(bytes(1 << 24)); time.sleep(60)", str(tmp_path / "file")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            about = {"pid": process.pid, "process_started": _processes._started(process.pid), "rank": 0, "node": "here"}
            about |= {"main_thread": 0, "has_server": False}
            saves = ProgressRecord(1, "checkpointing", 0.0, 1.0, 0, (0, 0, 0, 0))
            assert probe_process(about, tmp_path / "rank-00000", saves, 1.0).process.written_bytes >= 1 << 24
        finally:
            process.kill()


def test_two_nodes_a_rank_of_one_dies(run_dir: Path) -> None:
    job = Job(run_dir, nodes=2)
    job.start(0, seconds=20)  # it may go on for a while, but not for ever
    job.start(1, dies=True)
    assert job.wait() == [exit_codes.HUNG, -signal.SIGKILL]
    (death,) = hangs(run_dir)
    assert (death["kind"], death["rank"], death["step"]) == ("died", 1, 20)
    deadline = time.monotonic() + 20  # it is said when the ranks have gone
    while "blocked without rank 1 of node-1, which was killed by SIGKILL" not in (said := job.log.read_text()):
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def _catch_a_failure(job: Job, rank: int) -> None:
    about = {"run_dir": str(job.run_dir), "token": job.token, "node": "node-0", "nodes": 1, "world_size": 2}
    about |= {"elastic_run_id": None, "restart_count": 0}
    for fit in (0, 1):
        probe = RankProbe(job.directory(), rank, {"step": 60.0}, about | {"fit": fit})
        if rank == 0:
            watchdog.start(job.directory())
        time.sleep(9.0 if rank == 0 and fit else 1.0)  # it waits for the other in its next fit
        if fit == 0:
            probe.fail()
        probe.close()
        time.sleep(8.0 if rank == 1 and not fit else 0.0)
    os._exit(0)


@pytest.mark.campaign
def test_a_script_that_has_caught_the_failure_of_all_ranks_goes_on(run_dir: Path) -> None:
    job = Job(run_dir)
    for rank in (0, 1):
        job.processes.append(_FORK.Process(target=_catch_a_failure, args=(job, rank)))
        job.processes[-1].start()
    assert job.wait() == [0, 0]


@pytest.mark.slow
def test_a_case_that_nobody_has_closed_ends_no_healthy_job(run_dir: Path) -> None:
    job = Job(run_dir, nodes=2)
    (run_dir / "diagnostics").mkdir()
    write_json(run_dir / "diagnostics" / f".{job.token}-0.json", {"folder": "left-open"})
    for rank in (0, 1):
        job.start(rank, seconds=5)
    assert job.wait() == [0, 0]
    assert not hangs(run_dir)


@pytest.mark.campaign
def test_a_rank_that_recovers_while_other_nodes_are_awaited_is_not_ended(run_dir: Path) -> None:
    job = Job(run_dir, nodes=2)
    job.start(0, pause_s=LIMIT_S + 1.5, seconds=10)
    job.start(1, seconds=10, watched=False)  # its watchdog has been killed
    assert job.wait() == [0, 0]
    assert not hangs(run_dir)


@pytest.mark.campaign
def test_the_second_hang_of_an_attempt_is_a_case_of_its_own(run_dir: Path) -> None:
    job = Job(run_dir)
    job.start(0, pause_s=LIMIT_S + 0.3, seconds=4)  # slow, and excused
    job.start(1, pause_s=60, seconds=4)
    codes = job.wait()
    assert codes[1] == exit_codes.HUNG


def test_one_whose_ranks_have_gone_before_it_watches_ends_without_a_word(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "lightning_resilience.detect.hangs.watchdog", str(tmp_path / "gone")]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_only_dead_ranks_of_this_namespace_are_cleaned_away(run_dir: Path) -> None:
    job = Job(run_dir)
    own = job.directory()
    folders = {name: own.parent / f"{uuid.uuid4().hex[:12]}-0" for name in ("dead", "alive", "elsewhere", "empty")}
    dead = {**describe_process(), "process_started": "another boot"}
    for name, folder in folders.items():
        folder.mkdir()
        record = {
            "dead": dead,
            "alive": describe_process(),
            "elsewhere": {**dead, "namespace": "pid:[1]"},
            "empty": None,
        }[name]
        if record is not None:
            write_json(folder / "rank-00000.json", {**record, "run_dir": str(run_dir)})
    remove_abandoned(own)
    assert [name for name, folder in folders.items() if not folder.exists()] == ["dead"]
    for folder in (own, *folders.values()):
        shutil.rmtree(folder, ignore_errors=True)


def test_what_ranks_spent_whose_watchdog_was_killed_with_them_is_recorded_by_who_comes_next(run_dir: Path) -> None:
    job = Job(run_dir)
    RunDirectory(run_dir).identity()
    job.start(0, seconds=60)
    record = job.directory() / "watchdog.json"
    await_that(lambda: (read_json(record) or {}).get("pid") is not None)
    watcher, [rank] = read_json(record), job.processes
    assert watcher is not None
    remove_abandoned(run_dir=run_dir)  # they run
    assert job.directory().exists()
    os.kill(watcher["pid"], signal.SIGKILL)
    rank.kill()
    rank.join()
    await_that(lambda: not is_running(watcher))
    remove_abandoned(run_dir=run_dir / "another")
    remove_abandoned(own=record.parent)
    assert list(read_ledger(RunDirectory(run_dir).ledger)) == []
    remove_abandoned(run_dir=run_dir)
    [event] = read_ledger(RunDirectory(run_dir).ledger)
    assert (event["event"], event["ranks"], event["attempt"]) == ("time_spent", [0], job.token)
    assert event["began"][0] <= event["since"][0] <= event["ended"][0] <= time.time()
    assert not record.parent.exists()


def test_storage_of_another_run_that_hangs_leaves_that_of_this_run_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(watchdog, "remove_abandoned", lambda own: answers.wait(60))
    monkeypatch.setattr(deadlines, "FIRST_RANK_WITHIN_S", 0.0)
    own = watchdog.Watchdog(tmp_path / "own")
    own.run()
    try:
        assert own._store(lambda: "recorded") == "recorded"
    finally:
        answers.set()


@pytest.mark.parametrize(
    "spoiled", ["rank-00000.time", "watchdog.beat", "rank-00000.json", "the run", "the run directory", ""]
)
def test_what_was_left_and_cannot_be_read_is_removed(run_dir: Path, spoiled: str) -> None:
    job = Job(run_dir)
    RunDirectory(run_dir).ledger.mkdir()
    RunDirectory(run_dir).identity()
    if spoiled == "the run":  # another one has begun in its place
        later = time.time() + 60
        os.utime(run_dir / "run.json", (later, later))
    elif spoiled == "the run directory":  # that of something else is there
        (run_dir / "run.json").unlink()
    dead = {**describe_process(), "process_started": "another boot"}
    about = {"run_dir": str(run_dir), "rank": 0, "token": job.token, "world_size": 1, "node": "n"}
    about |= {"fit": 0, "elastic_run_id": None, "restart_count": 0}
    write_json(job.directory() / "rank-00000.json", {**dead, **about})
    time_account.TimeAccount().share(job.directory() / "rank-00000.time")
    (job.directory() / "watchdog.beat").write_bytes(bytes(8))
    folder = job.directory()
    if spoiled.endswith("json"):
        write_json(folder / spoiled, {**dead, "rank": "x", "run_dir": str(run_dir)})
    elif spoiled and not spoiled.startswith("the run"):
        (folder / spoiled).write_bytes(b"x")
    remove_abandoned(run_dir=run_dir)
    assert not folder.exists()
    assert len(list(read_ledger(RunDirectory(run_dir).ledger))) == (not spoiled)


def test_a_process_is_known_by_its_start() -> None:
    mine = describe_process()
    assert is_running(mine)
    assert not is_running({**mine, "process_started": "something else"})
    child = _FORK.Process(target=time.sleep, args=(60,))
    child.start()
    child.kill()
    child.join()
    for nonsense in ({}, {"pid": child.pid}, {"pid": "x", "process_started": "y"}, {**mine, "pid": child.pid}):
        assert not is_running(nonsense)


DAMAGE = {
    "no verdict": {},
    "not JSON": {"verdict.json": "{"},
    "no object": {"verdict.json": "[1, 2]"},
    "nothing in it": {"verdict.json": "{}", "evidence-00000-1.json": "{}"},
    "other types": {
        "verdict.json": '{"culprits": 3, "victims": null, "line": 5}',
        "evidence-00000-1.json": '{"ranks": 7}',
    },
    "nested": {"verdict.json": "[" * 100_000, "evidence-00000-1.json": "[" * 100_000},
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_diagnosis_is_shown_as_far_as_it_goes(run_dir: Path, name: str) -> None:
    folder = run_dir / "diagnostics" / "2026-01-01T00-00-00-abcdef"
    folder.mkdir(parents=True)
    for file, content in DAMAGE[name].items():
        (folder / file).write_text(content)
    assert folder.name in diagnoses(run_dir)
    assert json.loads(diagnoses(run_dir, as_json=True))["hangs"][0]["folder"] == str(folder)


def test_nothing_to_show(run_dir: Path) -> None:
    assert "No hang has been diagnosed" in diagnoses(run_dir)
    assert "or none is watched" in ranks_now(run_dir)
    ledger = Ledger(RunDirectory(run_dir).ledger)
    ledger.record("launch", launch_id="1")
    ledger.record("exit", status="finished", exit_code=0, reason="the script ended")
    assert ranks_now(run_dir).endswith(" is in a fit; ended: finished.")


def test_what_is_shown(run_dir: Path, tmp_path: Path) -> None:
    job = Job(run_dir)
    job.start(0, pause_s=60)
    link = tmp_path / "link"
    link.symlink_to(run_dir)
    await_that(lambda: '"section": "step"' in ranks_now(link, as_json=True))
    assert "runs Python" in ranks_now(link)
    [found] = parsed("watch", ranks_now(link, as_json=True))
    [rank] = found["ranks"]
    assert (rank["rank"], rank["section"], rank["limit"], rank["runs_python"]) == (0, "step", LIMIT_S, True)
    assert rank["answer_ms"] > 0
    job.wait()
    [found] = parsed("diagnose", diagnoses(run_dir, as_json=True))
    assert [(each["rank"], each["verdict"]) for each in found["ranks"]] == [(0, "culprit")]
    assert (found["number"], found["hangs"][0]["line"] is None) == (1, False)
    text = diagnoses(run_dir)
    assert "1. " in text
    assert "culprit" in text
    assert "There is no hang number 7" in diagnoses(run_dir, 7)
    stacks = next((run_dir / "diagnostics").glob("*/rank-00000.stacks.txt")).read_text()
    assert "_rank" in stacks
    evidence = json.loads(next((run_dir / "diagnostics").glob("*/evidence-*.json")).read_text())
    assert evidence["ranks"][0]["seconds"] > LIMIT_S


def test_late_signals_of_the_watchdog_are_ignored(run_dir: Path) -> None:
    probe = RankProbe(Job(run_dir).directory(), 0, {}, {"run_dir": str(run_dir)})
    directory = probe.directory
    probe.close()
    os.kill(os.getpid(), exit_codes.HUNG)  # the signal has the number of the exit code
    os.kill(os.getpid(), exit_codes.HUNG - 1)
    shutil.rmtree(directory)
    for signum in (exit_codes.HUNG, exit_codes.HUNG - 1):
        signal.signal(signum, signal.SIG_DFL)


def test_a_name_that_is_cut_in_a_character_blinds_nobody() -> None:
    """The kernel keeps 15 bytes of a process's name."""
    name = "open('/proc/self/comm', 'wb').write('abcdefghijklmn\u00e9'.encode()); print(); import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", name], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert _processes._started(process.pid)
            assert not _processes.has_signal(process.pid, signal.SIGKILL, "SigPnd:", "ShdPnd:")
            assert not is_stopped(process.pid)
        finally:
            process.kill()


def test_a_process_is_not_taken_for_dead_because_this_one_cannot_look(monkeypatch: pytest.MonkeyPatch) -> None:
    record = describe_process()

    def no_more_files(*args: Any, **options: Any) -> str:
        raise OSError(errno.ENFILE, "Too many open files in system")

    monkeypatch.setattr(Path, "read_text", no_more_files)
    assert is_running(record)


def test_a_watchdog_that_sees_nothing_does_not_stay_as_one_that_watches(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = node_directory(uuid.uuid4().hex, 0)
    (directory / "rank-00000.json").write_text("{}")  # as a file that somebody else has spoilt
    monkeypatch.setattr(deadlines, "WATCHDOG_FAILS_FOR_S", 0.5)
    monkeypatch.setattr(deadlines, "FIRST_RANK_WITHIN_S", 10.0)
    blind = watchdog.Watchdog(directory)
    blind.register()
    began = time.monotonic()
    blind.run()
    assert time.monotonic() - began < 8, "it has gone on until nobody came"
    assert directory.is_dir(), "the ranks are there still, and the next watchdog needs their files"
    assert "hangs on this node are not found" in capfd.readouterr().err
    shutil.rmtree(directory)


def test_a_watchdog_that_stands_still_is_replaced(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = node_directory(uuid.uuid4().hex, 0)
    write_json(directory / "rank-00000.json", describe_process())  # else any other watchdog may remove the folder
    first = watchdog.start(directory)
    assert first is not None
    assert watchdog.is_alive(directory, first)
    os.kill(first["pid"], signal.SIGSTOP)
    monkeypatch.setattr(deadlines, "WATCHDOG_STALLED_AFTER_S", 0.3)
    time.sleep(0.5)
    second = watchdog.start(directory)
    assert second is not None
    assert second["pid"] != first["pid"]
    assert not is_running(first)
    os.kill(second["pid"], signal.SIGKILL)
    shutil.rmtree(directory)
