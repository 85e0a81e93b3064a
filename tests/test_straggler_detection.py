"""Ranks that are slow, in real fits: who is named, at what, and what becomes of the run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_resilience import StragglerDetection, session
from lightning_resilience.agreement import Needs
from lightning_resilience.callbacks import straggler_detection
from tests.harness import CONTEXT, free_port

RANKS = 4
STEPS = 16
PACE = {"data": 0.002, "compute": 0.002, "callback": 0.002}
SLOWED = 0.02
CAUSES = {"data": "data loading", "compute": "compute", "callback": "callbacks"}

# -- the program of one rank: paced by sleeps, since the ranks share the cores ------------------------------------------


class Paced:
    """Knows the window of steps between two reports, and how fast this rank is in it."""

    def __init__(self, scenario: dict[str, Any], rank: int) -> None:
        self.scenario, self.rank = scenario, rank
        self.window = 0

    def work(self, place: str) -> None:
        """Takes its time."""
        at = self.scenario["at"]
        seconds = SLOWED if place == at else PACE[place]
        if place == at and self.scenario["who"] != "stopped" and self.rank in slow_ranks(self.scenario, self.window):
            seconds *= 2
        if self.window in self.scenario.get("uniformly", ()):
            seconds *= 2
        if self.scenario["who"] != "stopped":
            time.sleep(seconds)
        else:
            for _ in range(round(seconds / 0.001)):
                time.sleep(0.001)  # one long sleep would go on while the process is stopped


def slow_ranks(scenario: dict[str, Any], window: int) -> list[int]:
    """Which ranks a window has been planned to be slow for."""
    chosen = random.Random(f"{scenario.get('seed', 0)} {window}").randrange(RANKS)
    if scenario["who"] == "node":
        return [0, 1] if chosen < 2 else [2, 3]
    return [] if scenario["who"] == "nobody" else [chosen]


class Data(Dataset):
    def __init__(self, paced: Paced) -> None:
        self.paced = paced

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.paced.work("data")
        return torch.ones(8)


class Model(L.LightningModule):
    def __init__(self, paced: Paced) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 8)
        self.paced = paced

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.paced.work("compute")
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Windows(L.Callback):
    """Asks for a report after every window of steps; all ranks change their pace where it is made."""

    def __init__(self, paced: Paced, detection: StragglerDetection, folder: Path, pids: Any) -> None:
        self.paced, self.detection, self.folder, self.pids = paced, detection, folder, pids
        self.steps = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        report = session._active.handlers["straggler report"]

        def counted(event: Any) -> None:
            report(event)
            self.paced.window += 1
            self.steps = 0
            if trainer.is_global_zero:
                self._write()
            trainer.should_stop = self.paced.window == self.paced.scenario["windows"]
            self.pids[RANKS] = self.paced.window

        session._active.handlers["straggler report"] = counted
        self.pids[self.paced.rank] = os.getpid()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.paced.work("callback")
        self.steps += 1
        if trainer.is_global_zero and self.steps == STEPS:
            session._active.agreement.request("straggler report", {}, Needs.TRAINING)

    def _write(self) -> None:
        report = self.detection.report
        assert report is not None
        found = {
            kind: {each.rank: [each.cause, each.place.node, each.score] for each in report.slow(kind, 0.7)}
            for kind in ("relative", "individual")
        }
        numbers = {name: getattr(report, name).tolist() for name in ("relative", "individual", "seconds")}
        with open(self.folder / "reports", "a") as file:
            file.write(json.dumps({**found, "scores": numbers}) + "\n")


def rank_main(rank: int, scenario: dict[str, Any], folder: str, port: int, pids: Any) -> None:
    nodes = scenario.get("nodes", 1)
    per_node = RANKS // nodes
    node = rank // per_node
    os.environ.update(
        OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(per_node),
        RANK=str(rank),
        LOCAL_RANK=str(rank % per_node),
        GROUP_RANK=str(node),
        TORCHELASTIC_RUN_ID="test",
    )
    fd = os.open(f"{folder}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    torch.set_num_threads(1)
    platform.node = lambda: f"node-{node}"
    paced = Paced(scenario, rank)
    detection = StragglerDetection(1e6, stop_if_detected=False, run_dir=f"{folder}/run", **scenario.get("settings", {}))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=per_node,
        num_nodes=nodes,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Windows(paced, detection, Path(folder), pids), detection],
    )
    trainer.fit(Model(paced), DataLoader(Data(paced)))


def stop_for_a_while(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)


def reports(scenario: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Runs a scenario; what rank 0 has reported of every window."""
    pids, port = CONTEXT.Array("i", RANKS + 1), free_port()
    ranks = [CONTEXT.Process(target=rank_main, args=(rank, scenario, str(folder), port, pids)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    deadline = time.monotonic() + 250
    try:
        while any(each.is_alive() for each in ranks):
            assert time.monotonic() < deadline, (folder / "output").read_text()
            if any(each.exitcode for each in ranks):
                break
            if scenario["who"] == "stopped" and all(pids[:RANKS]):
                stop_for_a_while(pids[slow_ranks(scenario, pids[RANKS])[0]])
            else:
                time.sleep(0.05)
    finally:
        for each in ranks:
            if any(other.exitcode != 0 for other in ranks):
                each.kill()
            each.join()
    assert [each.exitcode for each in ranks] == [0] * RANKS, (folder / "output").read_text()
    return [json.loads(line) for line in (folder / "reports").read_text().splitlines()]
