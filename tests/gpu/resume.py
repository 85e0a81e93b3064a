"""A DDP job is resumed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader

from lightning_resilience import AutoResume, FaultTolerance, LocalCheckpoint, NaNGuard
from tests.gpu.device import Device
from tests.gpu.runner import Bench, check, text, wait
from tests.gpu.training import Module, Times, digest, network

STEPS, SAVE_EVERY, DIES_AT = 20, 5, 13


class Dies(L.Callback):
    def __init__(self, at: int | None, rank: int) -> None:
        self.at, self.rank = at, rank

    def on_train_batch_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        if trainer.global_step == self.at and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, device: Device, ranks: int, folder: Path, run: str, dies_at: int | None, attempt: int) -> None:
    """One rank of a job with all that draws random numbers, or depends on the order of sums."""
    L.seed_everything(1, verbose=False)
    run_dir = folder / run
    callbacks = [
        FaultTolerance(run_dir=run_dir),
        LocalCheckpoint(dir=folder / "local", every_n_train_steps=4, run_dir=run_dir),
        NaNGuard(run_dir=run_dir),
        AutoResume(run_dir, every_n_train_steps=SAVE_EVERY),
        Times(folder / f"{run}-{attempt}-{rank}.began"),
        Dies(dies_at, ranks - 1),
    ]
    trainer = device.trainer(callbacks, folder, ranks=ranks)
    samples = torch.randn(8 * ranks * STEPS, 64, generator=torch.Generator().manual_seed(1))
    module = Module(network(64, norm=True, dropout=0.1), "AdamW fused")
    trainer.fit(module, DataLoader(samples, 8, shuffle=True))  # type: ignore
    (folder / f"{run}-{rank}.end").write_text(json.dumps([trainer.global_step, digest(trainer)]))


@check("a DDP job whose rank dies resumes, and ends bitwise as without it", limit_s=300)
def ddp_resume(bench: Bench) -> None:
    device, folder = bench.device, bench.folder
    at_most = 2 if not device.is_gpu or device.count > 1 else 1
    for ranks in range(2 if bench.quick else 1, at_most + 1):

        def attempt(run: str, dies_at: int | None, number: int, ranks: int = ranks) -> list[int | None]:
            processes = bench.ranks(ranks, train, device, ranks, folder, f"{run}-{ranks}", dies_at, number)
            codes = wait(processes, 90)
            if set(codes) != {0} and dies_at is None:
                last = text(processes).strip().splitlines()[-1:]
                raise AssertionError(f"{run} with {ranks} ranks ended with {codes}: {''.join(last)}")
            return codes

        attempt("reference", None, 0)
        codes = attempt("run", DIES_AT, 0)
        bench.expect(-signal.SIGKILL in codes, f"{ranks} ranks: none died ({codes})")
        began = time.time()
        attempt("run", None, 1)
        first = json.loads((folder / f"run-{ranks}-1-0.began").read_text())
        bench.figure(f"{ranks} ranks: steps done again", DIES_AT - first["step"])
        bench.figure(f"{ranks} ranks: s from start to first step", first["began_s"] - began)
        bench.expect(first["step"] > 0, f"{ranks} ranks began anew")
        ends = {
            run: [(folder / f"{run}-{ranks}-{rank}.end").read_text() for rank in range(ranks)]
            for run in ("reference", "run")
        }
        bench.figure(f"{ranks} ranks: bitwise equal", ends["run"] == ends["reference"])
        bench.expect(ends["run"] == ends["reference"], f"{ranks} ranks ended elsewhere: {ends}")
