"""A healthy step never makes the host wait for the device."""

from __future__ import annotations

import os
import threading
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from lightning_resilience import (
    AutoResume,
    FaultTolerance,
    LocalCheckpoint,
    NaNGuard,
    Preemption,
    StragglerDetection,
)
from tests.gpu.device import Device
from tests.gpu.runner import Bench, check
from tests.gpu.training import OPTIMIZERS, Module, batches, network

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
FIRST, LAST = 10, 30
TORCH = os.path.dirname(torch.__file__) + os.sep


def all_callbacks(folder: Path) -> list[L.Callback]:
    """All of ours; none has anything to save or to report within the checks."""
    run_dir = folder / "run"
    return [
        FaultTolerance(run_dir=run_dir),
        Preemption(run_dir=run_dir),
        LocalCheckpoint(dir=folder / "local", train_time_interval=3600, run_dir=run_dir),
        NaNGuard(run_dir=run_dir),
        StragglerDetection(report_time_interval=3600, run_dir=run_dir),
        AutoResume(run_dir, train_time_interval=3600),
    ]


class Audit(L.Callback):
    """Counts in some steps how often the host waits for the device, by who has it wait."""

    def __init__(self, device: Device, last: int = LAST) -> None:
        self.device, self.last = device, last
        self.found: Counter[str] = Counter()
        self.before = 0
        self.showwarning: Any = None

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            self.begin()
        elif batch_idx == self.last:
            self.end()

    def begin(self) -> None:
        if not self.device.is_gpu:
            self.before = self.device.load().waits_of_the_host()
            return
        self.showwarning = warnings.showwarning
        warnings.simplefilter("always")
        warnings.showwarning = self._seen  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")

    def _seen(self, message: Any, *arguments: Any, **options: Any) -> None:
        if "called a synchronizing" not in str(message) or threading.current_thread() is not threading.main_thread():
            return  # what another thread waits for does not hold up the training
        # Our wrappers are in every stack: who has asked for it is the last one before torch.
        frames = [
            each.filename for each in traceback.extract_stack() if each.filename not in (__file__, warnings.__file__)
        ]
        who = next((each for each in reversed(frames) if not each.startswith(TORCH)), frames[-1])
        self.found[f"{'ours ' if '/lightning_resilience/' in who else ''}{'/'.join(who.split('/')[-2:])}"] += 1

    def end(self) -> None:
        if self.device.is_gpu:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = self.showwarning
        else:
            self.found["somebody"] = self.device.load().waits_of_the_host() - self.before


@check("healthy steps never wait for the device: 3 precisions, 4 optimizers, all callbacks", limit_s=400)
def host_syncs(bench: Bench) -> None:
    last = FIRST + 5 if bench.quick else LAST
    cells = [(precision, name) for precision in PRECISIONS for name in OPTIMIZERS]
    if bench.quick:  # each precision and each optimizer once
        cells = list(
            zip((*PRECISIONS, PRECISIONS[0]), ("AdamW", "AdamW fused", "SGD momentum fused", "SGD"), strict=True)
        )
    for precision, optimizer in cells:
        found = []
        for ours in (False, True):
            audit = Audit(bench.device, last)
            folder = bench.folder / f"{precision} {optimizer}"
            L.seed_everything(1, verbose=False)
            callbacks = [*(all_callbacks(folder) if ours else []), audit]
            trainer = bench.device.trainer(callbacks, folder, precision=precision)
            trainer.fit(Module(network(64, norm=True), optimizer), batches(last + 2, 64))
            found.append(audit.found)
        without, with_ours = found
        more = sum(with_ours.values()) - sum(without.values())
        places = {where: count for where, count in with_ours.items() if where.startswith("ours ")}
        title = f"{precision} {optimizer}"
        bench.figure(title, f"{sum(without.values())} -> {sum(with_ours.values())} in {last - FIRST} steps")
        bench.expect(more <= 0 and not places, f"{title}: {more} more waits {places or ''}")
