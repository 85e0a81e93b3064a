"""What a global save of FSDP2 costs the training: written behind it, and waited for, in turn within the same run.

Two ranks train on CPU. Every few steps the whole state is saved: blocking, behind the training, and to node memory
(``LocalCheckpoint``), each in turn. *Blocked* is what the training thread spends between two batches more than where
nothing is saved, and what it then waits at the optimizer's step for the copy; medians, of the slower rank. x is a
multiple of a plain copy of the same bytes (those of one rank) into warm memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AutoResume, LocalCheckpoint
from lightning_resilience._torch import local
from lightning_resilience.checkpoint.snapshot import Fence, optimizer_tensors

EVERY = 8


class Model(L.LightningModule):
    def __init__(self, width: int, layers: int, step_s: float) -> None:
        super().__init__()
        self.width, self.layers, self.step_s = width, layers, step_s

    def configure_model(self) -> None:
        self.net = torch.nn.Sequential(*(torch.nn.Linear(self.width, self.width) for _ in range(self.layers)))
        for layer in self.net:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.step_s)  # as a device would: it leaves the processor alone
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-4)


class Clock(L.Callback):
    """Measures what lies between two batches, and changes the way in which the next save is done."""

    def __init__(self, auto_resume: AutoResume) -> None:
        self.auto_resume = auto_resume
        self.blocked: list[float] = []  # after step 1, 2, ...
        self.ways: dict[int, str] = {}
        self._ended = time.perf_counter()
        now = Fence.now

        def timed(fence: Fence) -> None:
            begun = time.perf_counter()
            now(fence)
            self.blocked[-1] += time.perf_counter() - begun

        Fence.now = timed  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.blocked.append(time.perf_counter() - self._ended)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step % EVERY == EVERY // 2:
            is_async = (step // EVERY) % 2 == 1
            saves: Any = self.auto_resume._participant
            saves._options = replace(saves._options, async_save=is_async)
            self.ways[step] = "AutoResume" if is_async else "AutoResume(async_save=False)"
            self.auto_resume.on_save_checkpoint(trainer, module, {})  # as if ModelCheckpoint had saved: it follows
        elif step % EVERY == 0:
            self.ways[step] = "LocalCheckpoint"
        torch.distributed.barrier()
        self._ended = time.perf_counter()


def train(rounds: int, width: int, layers: int, step_s: float, out: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=out.parent))
    auto_resume = AutoResume(folder / "run", train_time_interval=None)
    clock = Clock(auto_resume)
    callbacks: list[Any] = [auto_resume, clock, LocalCheckpoint(folder / "memory", every_n_train_steps=EVERY)]
    model = Model(width, layers, step_s)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(2, 1),
        max_steps=EVERY * (2 * rounds + 3) + 3,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(100_000, width)), 2))
    live = [local(each).detach() for each in [*model.parameters(), *optimizer_tensors(trainer.optimizers)]]
    warm = [each.clone() for each in live]
    copies = []
    for _ in range(5):
        begun = time.perf_counter()
        for source, destination in zip(live, warm, strict=True):
            destination.copy_(source)
        copies.append(time.perf_counter() - begun)
    both: list[Any] = [None, None]
    torch.distributed.all_gather_object(both, clock.blocked)
    blocked = [max(each) for each in zip(*both, strict=True)]  # [n]: after step n
    plain = statistics.median(each for step, each in enumerate(blocked) if step > 0 and step not in clock.ways)
    found: dict[str, list[float]] = {}
    for step, way in clock.ways.items():
        if 3 * EVERY < step < len(blocked):  # before, memory is new
            found.setdefault(way, []).append(blocked[step] - plain)
    if not trainer.is_global_zero:
        return
    out.write_text(
        json.dumps(
            {
                "bytes": sum(each.nbytes for each in live),
                "copy": statistics.median(copies),
                "plain": plain,
                "ways": {way: [statistics.median(times), len(times)] for way, times in found.items()},
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--step-s", type=float, default=0.5, help="what a step takes beside the computation")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        torch.set_num_threads(1)
        train(arguments.rounds, arguments.width, arguments.layers, arguments.step_s, Path(arguments.out))
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        subprocess.run([sys.executable, *sys.argv, "--out", str(out)], check=True)
        result = json.loads(out.read_text())
    size = f"{result['bytes'] / 1e6:.0f} MB per rank"
    print(f"{size}; the copy: {result['copy']:.3f} s; without a save: {result['plain']:.4f} s\n")
    print("| | blocked | of the copy | saves |\n|---|---|---|---|")
    for way, (blocked, saves) in sorted(result["ways"].items()):
        print(f"| `{way}` | {blocked:.3f} s | {blocked / result['copy']:.2f}x | {saves} |")


if __name__ == "__main__":
    main()
