"""Small trainings for the checks."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader

from lightning_resilience.run.run_directory import RunDirectory
from tests.ledgers import read_ledger

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, 1e-3, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 1e-2),
    "SGD momentum fused": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9, fused=True),
}


def network(width: int, depth: int = 2, norm: bool = False, dropout: float = 0.0) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers.append(torch.nn.Linear(width, width))
        layers += [torch.nn.BatchNorm1d(width)] if norm else []
        layers.append(torch.nn.ReLU())
        layers += [torch.nn.Dropout(dropout)] if dropout else []
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))


class Module(L.LightningModule):
    """A network, whose loss is the mean of its squared outputs."""

    def __init__(self, net: torch.nn.Module, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def batches(
    count: int, width: int, bad: int | None = None, without: int | None = None, size: int = 16
) -> DataLoader[Any]:
    """The same batches every time, one of them NaN or left out."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(size, width, generator=generator) for _ in range(count)]
    if bad is not None:
        made[bad] *= float("nan")
    return DataLoader([batch for number, batch in enumerate(made) if number != without], batch_size=None)  # type: ignore


def tensors(trainer: L.Trainer) -> list[torch.Tensor]:
    """The model and what its optimizers keep."""
    module = trainer.lightning_module
    state = [value for each in trainer.optimizers for kept in each.state.values() for value in kept.values()]
    return [*module.parameters(), *module.buffers(), *(each for each in state if isinstance(each, torch.Tensor))]


def digest(trainer: L.Trainer) -> str:
    return sha(tensors(trainer))


def sha(found: Sequence[torch.Tensor]) -> str:
    content = hashlib.sha256()
    for each in found:
        content.update(each.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:16]


def events(folder: Path) -> list[dict[str, Any]]:
    """What the run in ``folder`` has recorded."""
    return list(read_ledger(RunDirectory(folder).ledger))


class Times(L.Callback):
    """Writes down when the first step of a process began, and at which step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step: int | None = None
        self.began_s = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        if self.step is None:
            self.step, self.began_s = trainer.global_step, time.time()
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps({"step": self.step, "began_s": self.began_s}))
            new.rename(self.path)  # whole for whoever waits for it
