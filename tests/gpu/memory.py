"""No rank takes memory on the devices of others."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torchmetrics

from lightning_resilience import AutoResume, LocalCheckpoint
from tests.gpu.device import Device, nvml
from tests.gpu.runner import Bench, check, text, wait
from tests.gpu.training import Module, batches, network

GATHERING = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


class Metered(Module):
    """Has metrics on the device, of its own and of ``self.log``."""

    def __init__(self) -> None:
        super().__init__(network(64, norm=True), "AdamW fused")
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return loss


class Devices(pickle.Pickler):
    """Pickles as ``torch.distributed`` does, and notes which devices the tensors in it are on."""

    def __init__(self, found: dict[str, int]) -> None:
        super().__init__(io.BytesIO(), protocol=4)
        self.found = found

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.found[value.device.type] = self.found.get(value.device.type, 0) + 1
        return NotImplemented


def watch_gathering(found: dict[str, int]) -> None:
    """Notes the devices of all tensors that this process gives others as objects."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            for each in (*arguments, *options.values()):
                if isinstance(each, (dict, list, tuple)) or hasattr(each, "__dict__"):
                    try:
                        Devices(found).dump(each)
                    except Exception:  # a process group, which is no part of what is given
                        continue
            return function(*arguments, **options)

        return call

    for name in GATHERING:
        setattr(torch.distributed, name, watched(getattr(torch.distributed, name)))


class MemoryByProcess(L.Callback):
    """On rank 0 at the end: the processes that NVML knows on each GPU."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        trainer.strategy.barrier()
        with nvml() as library:
            if library is not None and trainer.is_global_zero:
                found = []
                for index in range(library.nvmlDeviceGetCount()):
                    handle = library.nvmlDeviceGetHandleByIndex(index)
                    running = library.nvmlDeviceGetComputeRunningProcesses(handle)
                    found.append([round((each.usedGpuMemory or 0) / 2**20) for each in running])
                self.path.write_text(json.dumps(found))
        trainer.strategy.barrier()


def train(rank: int, device: Device, folder: Path) -> None:
    given: dict[str, int] = {}
    watch_gathering(given)
    found: dict[str, Any] = {}
    for name, callback in (
        ("LocalCheckpoint", LocalCheckpoint(dir=folder / "local", every_n_train_steps=2, run_dir=folder / "by local")),
        ("AutoResume", AutoResume(folder / "by auto", every_n_train_steps=2)),
    ):
        L.seed_everything(1, verbose=False)
        by_process = MemoryByProcess(folder / f"{name}.nvml")
        trainer = device.trainer([callback, by_process], folder, ranks=2, use_distributed_sampler=False)
        trainer.fit(Metered(), batches(8, 64))
        found[name] = device.contexts()
    own = trainer.strategy.root_device.index
    (folder / f"rank-{rank}").write_text(json.dumps({"contexts": found, "own": own, "given": given}))


@check("nothing that ranks give each other is on a device; a rank has a context on its own device only", limit_s=180)
def gathered_state(bench: Bench) -> None:
    processes = bench.ranks(2, train, bench.device, bench.folder)
    codes = wait(processes, 120)
    assert set(codes) == {0}, f"ranks ended with {codes}: {''.join(text(processes).strip().splitlines()[-1:])}"
    ranks = [json.loads((bench.folder / f"rank-{rank}").read_text()) for rank in range(2)]
    given: dict[str, int] = {}
    for each in ranks:
        for kind, count in each["given"].items():
            given[kind] = given.get(kind, 0) + count
    bench.figure("tensors given to others, by device", given)
    bench.expect(not given.keys() - {"cpu"}, f"ranks give each other tensors on a device: {given}")
    for name in ("LocalCheckpoint", "AutoResume"):
        contexts = [each["contexts"][name] for each in ranks]
        bench.figure(f"contexts by rank after {name}", contexts)
        strangers = [rank for rank, each in enumerate(ranks) if set(each["contexts"][name]) - {each["own"]}]
        bench.expect(not strangers, f"after {name} ranks {strangers} have contexts on devices of others: {contexts}")
        if (path := bench.folder / f"{name}.nvml").exists():
            bench.figure(f"MiB of each process by GPU with {name}", json.loads(path.read_text()))
    if bench.device.count < 2:
        bench.figure("note", "one device only: contexts on others need two")
