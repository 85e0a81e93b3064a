"""What StragglerDetection says of a step, against delays that are known."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader

from lightning_resilience import StragglerDetection
from tests.gpu.device import Device
from tests.gpu.runner import Bench, check, text, wait
from tests.gpu.training import Module, network


class Delays(L.Callback):
    """The device computes for so long in each step; one rank's for longer."""

    def __init__(self, device: Device, seconds: float, slow_rank: int | None = None) -> None:
        self.device, self.seconds, self.slow_rank = device, seconds, slow_rank

    def on_before_backward(self, trainer: L.Trainer, *arguments: Any) -> None:
        self.device.busy(self.seconds * (3 if trainer.global_rank == self.slow_rank else 1))


class Sleepy(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.count:
            raise IndexError
        time.sleep(self.seconds)
        return torch.ones(16, 64)


class Reports(L.Callback):
    """Stops after some reports, of which the last one counts."""

    def __init__(self, straggler: StragglerDetection, count: int) -> None:
        self.straggler, self.left, self.last = straggler, count, None

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        if self.straggler.report is not self.last:
            self.last = self.straggler.report  # type: ignore
            self.left -= 1
            trainer.should_stop = self.left <= 0


@check("a slow loader counts only as far as the device waits for it", limit_s=120)
def device_time(bench: Bench) -> None:
    device = bench.device
    steps = 200 if bench.quick else 150  # quick: it ends with the first report
    for compute_ms, load_ms in ((50, 20), (5, 20)) if not bench.quick else ((5, 2),):
        run_dir = bench.folder / str(compute_ms)
        straggler = StragglerDetection(report_time_interval=0.02 if bench.quick else 2.0, run_dir=run_dir)
        trainer = device.trainer(
            [straggler, Delays(device, compute_ms / 1000), Reports(straggler, 1 if bench.quick else 2)], bench.folder
        )
        trainer.fit(Module(network(64)), DataLoader(Sleepy(steps, load_ms / 1000), batch_size=None))
        title = f"{load_ms} ms of loading at {compute_ms} ms of computing"
        if straggler.report is None:
            bench.expect(False, f"{title}: there was no report")
            continue
        loading, computing, _ = (1000 * float(each) for each in straggler.report.seconds[0])
        bench.figure(f"{title}: loading", loading)
        bench.figure(f"{title}: computing", computing)
        expected = max(0, load_ms - compute_ms)
        bench.expect(abs(loading - expected) < 5, f"{title}: {loading:.1f} ms, not {expected}", timing=True)
        bench.expect(abs(computing - compute_ms) < 5, f"{title}: {computing:.1f} ms are computing", timing=True)


def train(rank: int, device: Device, folder: Path, quick: bool) -> None:
    L.seed_everything(1, verbose=False)
    straggler = StragglerDetection(
        report_time_interval=0.05 if quick else 2.0, stop_if_detected=False, run_dir=folder / "run"
    )
    delays = Delays(device, 0.002 if quick else 0.02, slow_rank=1)
    data = DataLoader(Sleepy(60 if quick else 250, 0), batch_size=None)
    trainer = device.trainer([straggler, delays], folder, ranks=2, use_distributed_sampler=False)
    trainer.fit(Module(network(64)), data)
    if rank == 0 and straggler.report is not None:
        named = sorted({each.rank for each in straggler.report.slow("relative", 0.7)})
        seconds = straggler.report.seconds.tolist()
        (folder / "report").write_text(json.dumps({"named": named, "seconds": seconds}))


@check("of two ranks the one whose device is slow is named, and no other", limit_s=150)
def slow_device(bench: Bench) -> None:
    if bench.device.is_gpu and bench.device.count < 2:
        bench.skip("needs 2 GPUs: on one, both ranks wait for the same device")
    processes = bench.ranks(2, train, bench.device, bench.folder, bench.quick)
    codes = wait(processes, 120)
    assert set(codes) == {0}, f"ended with {codes}: {''.join(text(processes).strip().splitlines()[-1:])}"
    assert (bench.folder / "report").exists(), "there was no report"
    found = json.loads((bench.folder / "report").read_text())
    bench.figure("named", found["named"])
    bench.figure("ms by rank", [round(1000 * sum(each), 1) for each in found["seconds"]])
    bench.expect(found["named"] == [1], f"ranks {found['named']} are named, and rank 1 is slow", timing=True)
