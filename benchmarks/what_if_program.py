"""What a drill of ``what_if.py`` trains: steps that sleep, and faults at the same times of training in every run.

lightning-resilience launch --recipe none --run-dir DIR benchmarks/what_if_program.py '{"steps": 1000, ...}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AutoResume, FaultTolerance, LocalCheckpoint, NaNGuard, Preemption
from lightning_resilience.run.run_directory import RUN_DIR_VARIABLE


class Sleeper(LightningModule):
    """A model whose steps take as long as they are told, and its saves too.

    Args:
        drill: The settings of the run.
    """

    def __init__(self, drill: dict[str, Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.drill = drill
        self.spoil_at = set(drill.get("nan_at", ()))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(self.drill["step_s"])
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        if self.global_step in self.spoil_at:
            self.spoil_at.discard(self.global_step)  # after the rollback it is right
            loss = loss * float("nan")
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(self.drill.get("save_s", 0.0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Faults(Callback):
    """Faults that strike when the run has trained for so long, over all restarts, on the last rank.

    Args:
        faults: Seconds of training, and ``kill``, ``hang`` or ``sigterm``.
        path: Where it is kept how far the run is.
    """

    def __init__(self, faults: list[tuple[float, str]], path: Path) -> None:
        self._faults = faults
        self._path = path
        self._done, self._trained_s = json.loads(path.read_text()) if path.exists() else (0, 0.0)
        self._began = 0.0
        self._batches = 0

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        """The first step is not training proper: it belongs to the start."""
        self._batches += 1
        if self._batches == 2:
            self._began = time.monotonic()
        if self._batches < 2 or trainer.global_rank != trainer.world_size - 1 or self._done == len(self._faults):
            return
        trained_s = self._trained_s + time.monotonic() - self._began
        due, kind = self._faults[self._done]
        if trained_s < due:
            return
        self._done += 1
        self._path.write_text(json.dumps([self._done, trained_s]))
        if kind == "hang":
            time.sleep(3600)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "sigterm": signal.SIGTERM}[kind])


def main(drill: dict[str, Any]) -> None:
    """Trains.

    Args:
        drill: ``steps``, ``step_s``, ``save_every_s``, ``local_every_s`` or ``None``, ``save_s``, ``async_save``,
            ``faults`` and ``nan_at``.
    """
    seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    callbacks: list[Callback] = [
        AutoResume(train_time_interval=drill["save_every_s"], async_save=drill.get("async_save", True)),
        FaultTolerance(calculate_timeouts=False),
        Preemption(),
        Faults(drill["faults"], Path(os.environ[RUN_DIR_VARIABLE]) / "faults.json"),
    ]
    if drill.get("local_every_s"):
        callbacks.append(LocalCheckpoint(train_time_interval=drill["local_every_s"]))
    if "nan_at" in drill:
        callbacks.append(NaNGuard(action="rollback"))
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=drill["steps"],
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.randn(100_000, 8)), batch_size=1)
    trainer.fit(Sleeper(drill), data)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
