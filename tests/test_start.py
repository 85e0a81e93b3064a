"""A launched rank that never comes to its fit, or never leaves the script after it, is found as one in a fit is."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_resilience import AutoResume, FaultTolerance, _torch
from lightning_resilience._files import read_json
from lightning_resilience.detect.hangs import watchdog
from lightning_resilience.detect.hangs.evidence import Frame, ProcessEvidence, RankEvidence, Thread
from lightning_resilience.detect.hangs.progress import read_progress
from lightning_resilience.detect.hangs.rank_probe import RankProbe, node_directory, probe_of_worker
from lightning_resilience.detect.hangs.verdict import diagnose
from lightning_resilience.launch.view import ranks_now
from lightning_resilience.launch.worker_group import worker_group
from lightning_resilience.run import exit_codes
from tests.harness import free_port
from tests.test_launch import Launcher
from tests.test_launch import launcher as launcher
from tests.test_signals import Module
from tests.test_watchdog import _FORK, Job, hangs
from tests.test_watchdog import run_dir as run_dir

LIMIT_S = 1.5


def _rank(job: Job, rank: int, does: str, limit_s: float) -> None:
    fd = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 2)
    about = {"run_dir": str(job.run_dir), "fit": None, "token": job.token, "node": "node-0", "nodes": 1}
    about |= {"world_size": 2, "elastic_run_id": None, "restart_count": 0}
    # Rank 1 is there before rank 0 waits for it, and until it has waited, however busy the machine is.
    is_there, has_waited = job.run_dir.with_suffix(".there"), job.run_dir.with_suffix(".waited")
    while rank == 0 and not is_there.exists():
        time.sleep(0.01)
    probe = RankProbe(job.directory(), rank, {"start": limit_s, "setup": 60.0}, about, is_workers=True)
    if rank == 0:
        watchdog.start(job.directory())
    if does == "fits":
        probe.begin_fit({"start": LIMIT_S, "setup": 60.0}, {**about, "fit": 0, "token": "another"})
    is_there.touch()
    if does == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif does == "computes in a child":
        while not has_waited.exists():
            subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    elif does == "fits":
        while not has_waited.exists():
            time.sleep(0.01)
        probe.end_fit()
    elif does == "waits for ever":
        time.sleep(30)
    else:
        time.sleep(4 * LIMIT_S)
        probe.close()
        has_waited.touch()
    os._exit(0)


def run(run_dir: Path, *do: str, limit_s: float = LIMIT_S) -> list[int | None]:
    job = Job(run_dir)
    for rank, does in enumerate(do):
        process = _FORK.Process(target=_rank, args=(job, rank, does, limit_s))
        process.start()
        job.processes.append(process)
    return job.wait()


def test_one_that_is_stopped_before_its_first_fit_is_found(run_dir: Path) -> None:
    assert run(run_dir, "waits", "stops") == [exit_codes.HUNG] * 2
    (fault,) = hangs(run_dir)
    assert (fault["kind"], fault["rank"], fault["section"], fault["limit"]) == ("hang", 1, "start", LIMIT_S)
    assert "is stopped (SIGSTOP) before the first fit" in fault["reason"]
    assert "start:SECONDS" in run_dir.with_suffix(".log").read_text()


@pytest.mark.slow
def test_one_that_waits_while_another_is_at_work_is_left_alone(run_dir: Path) -> None:
    assert run(run_dir, "waits", "computes in a child") == [0, 0]
    assert not hangs(run_dir)


@pytest.mark.slow
def test_one_that_waits_while_another_is_in_its_fit_is_left_alone(run_dir: Path) -> None:
    assert run(run_dir, "waits", "fits") == [0, 0]
    assert not hangs(run_dir)


@pytest.mark.slow
def test_one_that_nobody_waits_for_is_found_late(run_dir: Path) -> None:
    assert run(run_dir, "waits for ever", "waits for ever", limit_s=0.5) == [exit_codes.HUNG] * 2
    (fault,) = hangs(run_dir)
    assert fault["section"] == "start"
    assert "No hang: " in run_dir.with_suffix(".log").read_text()


IN_RENDEZVOUS = Frame("/x/site-packages/torch/distributed/rendezvous.py", 189, "_create_c10d_store")
IN_DOWNLOAD = Frame("/home/user/data.py", 7, "fetch")


def start_of(rank: int, frame: Frame, seconds: float, **process: Any) -> RankEvidence:
    threads = [Thread(1, True, [frame, Frame("/home/user/train.py", 3, "main")])]
    return RankEvidence(
        rank=rank,
        node="node-0",
        process=ProcessEvidence(pid=100 + rank, state="sleeping", threads=threads, **process),
        section="start",
        step=0,
        position=(0, 0, 0, 0),
        seconds=seconds,
        timeout=600.0,
    )


@pytest.mark.parametrize(
    ("evidence", "is_hang", "says"),
    [
        ([start_of(0, IN_RENDEZVOUS, 601), start_of(1, IN_DOWNLOAD, 601)], True, "rank 1 (node-0, pid 101) is stuck"),
        ([start_of(0, IN_RENDEZVOUS, 601), start_of(1, IN_DOWNLOAD, 20)], False, "rank 1"),
        ([start_of(0, IN_RENDEZVOUS, 601)], True, "rank 1 is silent"),
        ([start_of(0, IN_DOWNLOAD, 601), start_of(1, IN_DOWNLOAD, 601)], False, "ranks 0 and 1 are waiting for"),
        ([start_of(0, IN_DOWNLOAD, 3601), start_of(1, IN_DOWNLOAD, 3601)], True, "ranks 0 and 1 are stuck"),
    ],
    ids=["one is awaited", "one advances", "one never came", "nobody is awaited", "nobody is awaited for an hour"],
)
def test_the_verdict_about_a_start(evidence: list[RankEvidence], is_hang: bool, says: str) -> None:
    verdict = diagnose(evidence, 2)
    assert verdict.is_hang is is_hang
    assert verdict.line.startswith(says)
    assert "silent" in says or "before the first fit" in verdict.line


@pytest.mark.slow
def test_launch_survives_one(launcher: Launcher) -> None:
    launcher.script("if restart_count == 0: os.kill(os.getpid(), signal.SIGSTOP)")
    assert launcher.run("--section-timeouts=start:1", "script.py") == 0
    (fault,) = (event for event in launcher.events("fault") if event["kind"] == "hang")
    assert (fault["section"], fault["limit"], fault["fit"]) == ("start", 1.0, None)
    assert [event["restart_count"] for event in launcher.events("start")] == [0, 1]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RankProbe]:
    """What a launched worker has when its script begins."""
    directory = node_directory(os.urandom(8).hex(), 0)
    about = {"run_dir": str(tmp_path / "run"), "fit": None, "token": "launch", "node": "here", "nodes": 1}
    about |= {"world_size": 1, "elastic_run_id": "1", "restart_count": 0}
    probe = RankProbe(directory, 0, {"start": 60.0}, about, is_workers=True)
    yield probe
    probe.close()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.slow_but_for("False")
@pytest.mark.parametrize("watched", [True, False])
def test_the_fits_of_a_launched_worker_are_watched_by_the_same_watchdog(
    tmp_path: Path, worker: RankProbe, watched: bool
) -> None:
    seen: list[tuple[str, Any]] = []

    def look() -> None:
        about, stay = read_json(worker.progress_path.with_suffix(".json")), read_progress(worker.progress_path)
        assert about is not None
        assert stay is not None
        assert about["token"] == "launch"
        seen.append((stay.section, about["fit"]))

    assert probe_of_worker() is worker
    run_dir = tmp_path / "run"
    for _ in range(2):
        module = Module()
        module.at_step[1] = look
        callbacks = [FaultTolerance(run_dir=run_dir), AutoResume(run_dir=run_dir)][not watched :]
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        trainer = L.Trainer(max_epochs=1, callbacks=callbacks, accelerator="cpu", **quiet)  # type: ignore[arg-type]
        look()
        trainer.fit(module, DataLoader(torch.ones(4, 1)))
    look()
    first, last = (0, 1) if watched else (None, None)
    fits = ["step", "step"] if watched else ["left", "left"]
    expected = [("start", None), (fits[0], first), ("start", first), (fits[1], last), ("start", last)]
    assert seen == expected
    assert " start " in ranks_now(run_dir)


def test_all_nodes_mean_the_same_start_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The elastic launcher does not count on a node what has failed on another one only."""

    def token(restart_count: int, port: int, nodes: int = 2) -> str:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart_count))
        monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
        monkeypatch.setenv("MASTER_PORT", str(port))
        return worker_group()

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("MASTER_ADDR", "n1")
    assert token(0, port=2000) == token(1, port=2000)
    assert len({token(0, port=1000), token(0, port=2000), token(1, port=3000)}) == 3
    assert token(0, port=1000, nodes=1) != token(1, port=1000, nodes=1)


def test_a_rank_connects_when_the_store_of_rank_0_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    happened: list[str] = []
    servers: list[socket.socket] = []
    port = free_port()

    def sleep(seconds: float) -> None:
        happened.append("looked")
        if len(happened) == 3:
            servers.append(socket.create_server(("127.0.0.1", port)))

    def create(hostname: str, port: int, rank: int, *rest: Any) -> None:
        happened.append(f"rank {rank} creates its store")

    monkeypatch.setattr(rendezvous, "_create_c10d_store", create)
    monkeypatch.setattr(_torch, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    _torch.connect_when_rank_0_listens.__wrapped__()
    for rank in range(2):
        next(rendezvous.rendezvous(f"tcp://127.0.0.1:{port}", rank=rank, world_size=2))
    assert happened == ["rank 0 creates its store", "looked", "looked", "rank 1 creates its store"]
    servers[0].close()
    happened.clear()
    monkeypatch.setattr(_torch, "_LISTENS_WITHIN_S", 0.0)
    next(rendezvous.rendezvous(f"tcp://127.0.0.1:{port}", rank=1, world_size=2))
    assert happened == ["rank 1 creates its store"], "torch says that nobody listens"
