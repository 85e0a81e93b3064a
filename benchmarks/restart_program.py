"""What ``restart.py`` trains: a tiny model, the demo's or a large one, with a note of each step that a rank has made.

Its argument has the options of :func:`main` as JSON.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

STEP_S = 0.05
SAVE_EVERY = {"tiny": 5, "gpt": 2, "large": 10}
"""How many steps are between two saves: about a third of a second, or some steps of the large model."""
WIDTH = 10_000
"""Of the large model: 100 million parameters, 1.2 GB with what AdamW keeps of them."""


class Marks(L.Callback):
    """Notes when this rank has begun a step, when it has made which one, and in which process.

    Args:
        folder: Where the notes of all ranks are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        """One line for each step that is begun."""
        self._note("begun", trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        """One line for each step."""
        self._note("rank", trainer)

    def _note(self, name: str, trainer: L.Trainer) -> None:
        if name not in self._files:
            self._files[name] = open(self._folder / f"{name}-{trainer.global_rank}", "ab", buffering=0)
        self._files[name].write(f"{time.monotonic()!r} {trainer.global_step} {os.getpid()}\n".encode())


class Tiny(L.LightningModule):
    """A model whose steps take 50 ms."""

    rows = 20_000

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(STEP_S)
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Large(Tiny):
    """A model that has a large state, and computes little with it."""

    rows = 1_000

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]


def strategy(ranks: int, gpu: bool) -> DDPStrategy | str:
    """That of so many ranks; where there are fewer GPUs they share the first one, which NCCL refuses."""
    if gpu and torch.cuda.device_count() < ranks:
        return DDPStrategy(parallel_devices=[torch.device("cuda", 0)] * ranks, process_group_backend="gloo")
    return "ddp" if ranks > 1 else "auto"


def train_small(kind: type[Tiny], steps: int, out: Path, callbacks: list[L.Callback], gpu: bool) -> None:
    """Trains a model of one layer."""
    L.seed_everything(1, verbose=False)
    module = kind()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    saves = ModelCheckpoint(out / "checkpoints", every_n_train_steps=SAVE_EVERY["tiny"], save_last="link")
    trainer = L.Trainer(
        accelerator="gpu" if gpu else "cpu",
        devices=processes,
        strategy=strategy(processes, gpu),
        max_steps=steps,
        callbacks=[*callbacks, saves] if not any(map(is_ours, callbacks)) else callbacks,
        enable_checkpointing=not any(map(is_ours, callbacks)),
        default_root_dir=out,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(module.rows, module.layer.in_features))
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True))


def is_ours(callback: L.Callback) -> bool:
    """Whether it is one of this package."""
    return type(callback).__module__.startswith("lightning_resilience")


def main(options: dict[str, Any]) -> None:
    """Trains.

    Args:
        options: ``model`` (``tiny``, ``gpt`` or ``large``), ``marks``, ``steps``, ``ours``: whether with this package's
            callbacks, or with Lightning's own checkpoints and ``ckpt_path="last"``, and ``gpu``: whether on GPUs.
    """
    marks = Path(options["marks"])
    callbacks: list[L.Callback] = [Marks(marks)]
    save_every = SAVE_EVERY[options["model"]]
    if options["ours"]:
        from lightning_resilience import FaultTolerance, LocalCheckpoint

        callbacks += [FaultTolerance(calculate_timeouts=False), LocalCheckpoint(every_n_train_steps=save_every)]
    else:
        L.Trainer.fit = functools.partialmethod(L.Trainer.fit, ckpt_path="last")  # type: ignore[assignment]
    if options["model"] != "gpt":
        train_small(
            {"tiny": Tiny, "large": Large}[options["model"]], options["steps"], marks, callbacks, options["gpu"]
        )
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import gpt

    lengths = ("--steps", str(options["steps"]), "--validate-every", str(options["steps"]))
    gpt.main(
        [
            *lengths,
            "--save-every",
            str(10**9 if options["ours"] else save_every),
            "--out",
            str(marks),
            "--print-every",
            "1000000",
        ],
        callbacks,
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
