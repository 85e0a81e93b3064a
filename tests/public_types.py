"""What users write, for the type checker (``make check``): it must find nothing in it. Never run."""

from __future__ import annotations

from datetime import timedelta

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping

from lightning_resilience import AutoResume, LocalCheckpoint, NaNGuard, Preemption, recipes


def with_a_recipe() -> L.Trainer:
    recipe = recipes.nemo("runs/gpt")
    L.Trainer(callbacks=[*recipe.callbacks, EarlyStopping("loss")])
    return L.Trainer(callbacks=recipe.callbacks, logger=recipe.wandb_logger(project="gpt"))


def with_callbacks() -> L.Trainer:
    return L.Trainer(
        callbacks=[
            Preemption(signals=["SIGTERM", "SIGUSR1"], grace_period_s=120, run_dir="runs/gpt"),
            AutoResume(every_n_train_steps=500, train_time_interval=timedelta(minutes=10)),
            LocalCheckpoint(),
            NaNGuard(),
        ]
    )
