"""A run ends in order while its device is busy."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from lightning_resilience import AutoResume, FaultTolerance, LocalCheckpoint, Preemption
from lightning_resilience.detect.hangs.rank_probe import EXIT_SIGNAL
from tests.gpu.device import Device
from tests.gpu.runner import Bench, check, text, wait
from tests.gpu.training import Module, Times, batches, network

STEPS, BUSY_AT = 14, 6


class Waits(L.Callback):
    """In one step the host waits for a device that is busy for long."""

    def __init__(self, device: Device, seconds: float, path: Path) -> None:
        self.device, self.seconds, self.path = device, seconds, path

    def on_train_batch_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        if trainer.global_step == BUSY_AT and not self.path.exists():
            self.device.busy(self.seconds)
            self.path.write_text(str(time.time()))
            self.device.load().synchronize()


def train(rank: int, device: Device, folder: Path, busy_s: float, attempt: int) -> None:
    L.seed_everything(1, verbose=False)
    run_dir = folder / "run"
    callbacks = [
        FaultTolerance(run_dir=run_dir),
        Preemption(run_dir=run_dir),
        LocalCheckpoint(dir=folder / "local", every_n_train_steps=2, run_dir=run_dir),
        AutoResume(run_dir),
        Times(folder / f"{attempt}.began"),
        *([Waits(device, busy_s, folder / "busy")] if attempt == 0 else []),
    ]
    trainer = device.trainer(callbacks, folder)
    trainer.fit(Module(network(64), "AdamW fused"), batches(STEPS, 64))


def appears(path: Path, within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} did not appear"
        time.sleep(0.01)


@check(
    "SIGTERM while the host waits for the device: the step is saved and resumed; the watchdog's signal ends it at once",
    limit_s=150,
)
def exit_busy(bench: Bench) -> None:
    folder, busy_s = bench.folder, 1.0 if bench.quick else 5.0
    process = bench.start(train, 0, bench.device, folder, busy_s, 0)
    appears(folder / "busy")
    time.sleep(0.2)
    began = time.time()
    os.kill(process.pid, signal.SIGTERM)
    (code,) = wait([process], 60)
    bench.figure(f"s from SIGTERM to the end, the device busy for {busy_s - 0.2:g} of them", time.time() - began)
    bench.figure("exit code", code)
    bench.expect(code not in (0, -signal.SIGKILL), f"ended with {code}: {text([process])[-200:]}")
    process = bench.start(train, 0, bench.device, folder, 0.0, 1)
    appears(folder / "1.began")
    step = json.loads((folder / "1.began").read_text())["step"]
    bench.figure("resumed at step", step)
    bench.expect(step == BUSY_AT + 1, f"resumed at step {step}: SIGTERM came in that after {BUSY_AT}")
    (code,) = wait([process], 60)
    bench.expect(code == 0, f"the resumed run ended with {code}: {text([process])[-200:]}")
    (folder / "again").mkdir()
    process = bench.start(train, 0, bench.device, folder / "again", 600.0, 0)
    appears(folder / "again" / "busy")
    began = time.time()
    os.kill(process.pid, EXIT_SIGNAL)
    wait([process], 60)
    bench.figure("s from the watchdog's signal to the end", time.time() - began)
    bench.expect(time.time() - began < 30, "the watchdog's signal does not end it")


def fails(rank: int, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    torch.distributed.all_reduce(torch.ones(3, device="cuda"))
    torch.cuda._sleep(2_000_000_000)
    torch.distributed.all_reduce(torch.ones(3, device="cuda"), async_op=True)
    (folder / "failing").write_text(str(time.time()))
    raise RuntimeError("planted")


@check("a process with NCCL that fails while the device is busy ends by itself", limit_s=90, needs_gpu="NCCL")
def exit_nccl(bench: Bench) -> None:
    process = bench.start(fails, 0, bench.folder)
    (code,) = wait([process], 60)
    bench.figure("s from the exception to the end", time.time() - float((bench.folder / "failing").read_text()))
    bench.figure("exit code", code)
    bench.expect(code == 1, f"ended with {code}")
