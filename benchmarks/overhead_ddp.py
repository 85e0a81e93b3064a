"""Ratio of a step of two DDP ranks with the whole ``nemo`` recipe to one of plain Lightning, within one run.

The callbacks, everything that they have replaced and Lightning's broadcast of SIGTERM (which ``Preemption`` makes
unnecessary) are switched every 10 steps, on both ranks at the same step. Threads run all the time: the agreement's
watchers, and local saves, which the recipe takes every few seconds.

    PYTHONPATH=. python benchmarks/overhead_ddp.py [--steps 4000] [--width 256]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import warnings
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.overhead import Toggle, ours_on
from lightning_resilience import recipes
from lightning_resilience.fit import joining
from lightning_resilience.fit.straggler_reports import StragglerReports


class Model(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(4)]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))
        self.width = width

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def recipe_on(trainer: L.Trainer, on: bool) -> None:
    """As for one rank, and what measures waits and takes the broadcast out."""
    ours_on(trainer, on)
    session = joining._active
    if session is None:
        return
    loop = trainer.fit_loop.epoch_loop
    patch = vars(session).setdefault("_benchmark_broadcast", vars(loop).get("_broadcast_sigterm_tensor"))
    assert patch is not None, "Lightning's broadcast is not taken out"
    vars(loop).pop("_broadcast_sigterm_tensor", None)
    if on:
        loop._broadcast_sigterm_tensor = patch
    for participant in session.fit.participants._all:
        if isinstance(participant, StragglerReports):
            for owner, name, original, own in participant._comm_wait._replaced:
                setattr(owner, name, own if on else original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning_resilience"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        callbacks = recipes.nemo(directory).callbacks
        toggle = Toggle(callbacks, recipe_on)
        data = DataLoader(TensorDataset(torch.randn(arguments.steps * 2 * 4, arguments.width)), 4)
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            callbacks=[toggle, *callbacks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
        )
        trainer.fit(Model(arguments.width), data)
    if trainer.is_global_zero:
        for what, times in (("step", toggle.wall), ("CPU time of the training thread", toggle.cpu)):
            for share, value in (("median", statistics.median), ("fastest fifth", fifth)):
                plain, ours = value(times[False]) * 1e6, value(times[True]) * 1e6
                print(f"{what}, {share}: plain {plain:.0f} µs, nemo {ours:.0f} µs, ratio {ours / plain:.3f}")


def fifth(values: list[float]) -> float:
    """What a fifth of the steps are faster than: of a busy machine the median says less."""
    return statistics.quantiles(values, n=5)[0]


if __name__ == "__main__":
    main()
