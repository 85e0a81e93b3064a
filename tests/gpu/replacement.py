"""``launch --elastic`` replaces a killed rank whose peer waits for it in the device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_resilience import AutoResume, FaultTolerance
from tests.gpu.device import Device
from tests.gpu.runner import Bench, check
from tests.gpu.training import Module, digest, events, network

STEPS, SAVE_EVERY, DIES_AT = 20, 5, 13
ROOT = Path(__file__).parents[2]


class Dies(L.Callback):
    """The last rank, once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == DIES_AT and not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(device: Device, folder: Path, dies: bool) -> None:
    """One rank of two."""
    L.seed_everything(1, verbose=False)
    callbacks = [FaultTolerance(), AutoResume(every_n_train_steps=SAVE_EVERY), *([Dies(folder / "died")] * dies)]
    if device.is_gpu and device.count < 2:  # NCCL refuses two ranks on one GPU
        strategy = DDPStrategy(parallel_devices=[device.at()] * 2, process_group_backend="gloo")
        trainer = L.Trainer(
            accelerator="gpu",
            strategy=strategy,
            callbacks=callbacks,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=folder,
        )
    else:
        trainer = device.trainer(callbacks, folder, ranks=2)
    samples = torch.randn(16 * STEPS, 64, generator=torch.Generator().manual_seed(1))
    module = Module(network(64, norm=True, dropout=0.1), "AdamW fused")
    trainer.fit(module, DataLoader(samples, 8, shuffle=True))  # type: ignore
    end = {"pid": os.getpid(), "step": trainer.global_step, "digest": digest(trainer)}
    (folder / f"{trainer.global_rank}.end").write_text(json.dumps(end))


def launch(bench: Bench, name: str, dies: bool) -> list[dict[str, Any]]:
    """How the ranks have ended."""
    folder = bench.folder / name
    folder.mkdir()
    command = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--elastic", "--recipe", "none"]
    command += ["--nproc-per-node", "2", "--run-dir", str(folder / "run"), "-m", "tests.gpu.replacement"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(bench.folder / f"output-{name}", "w") as output:
        code = subprocess.run(
            [*command, bench.device.name, str(folder), str(int(dies))],
            env=environment,
            stdout=output,
            stderr=output,
            check=False,
        ).returncode
    assert code == 0, f"{name} ended with {code}"
    return [json.loads((folder / f"{rank}.end").read_text()) for rank in range(2)]


@check("a killed rank is replaced while its peer, which waits for it in the device, keeps its process", limit_s=300)
def replaced_rank(bench: Bench) -> None:
    reference, found = launch(bench, "reference", False), launch(bench, "killed", True)
    recorded = events(bench.folder / "killed" / "run")
    replaced = [event["ranks"] for event in recorded if event["event"] == "replaced"]
    starts = {event["pid"] for event in recorded if event["event"] == "start"}
    bench.figure("replaced", replaced)
    bench.expect(replaced == [[1]] and starts == {found[0]["pid"]}, f"all ranks were restarted: {replaced}, {starts}")
    same = [each["digest"] for each in found] == [each["digest"] for each in reference]
    bench.figure("bitwise equal", same)
    bench.expect(same, "it ended elsewhere")


if __name__ == "__main__":
    train(Device(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1")
