"""A program that trains with callbacks that Lightning ships, and says everything that it has come to."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch import callbacks as shipped
from torch.utils.data import DataLoader, Dataset
from torchmetrics.aggregation import RunningMean

sys.path.append(str(Path(__file__).parents[1]))  # also where it is started as a program

EPOCHS, BATCHES = 3, 16


class Freezes(shipped.BaseFinetuning):
    """The smallest that can be made of the base class."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


class Bar(shipped.ProgressBar):
    def disable(self) -> None:
        pass

    def enable(self) -> None:
        pass


class Writes(shipped.BasePredictionWriter):
    pass


def average(step: int) -> Callable[[int | None, int | None], bool]:
    return lambda step_idx=None, epoch_idx=None: step_idx is not None and step_idx >= step


class Averages(shipped.WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 0


MAKE: dict[str, Callable[[Path], L.Callback]] = {
    "BackboneFinetuning": lambda _: shipped.BackboneFinetuning(1, lambda epoch: 1.5, verbose=False),
    "BaseFinetuning": lambda _: Freezes(),
    "BasePredictionWriter": lambda _: Writes(),
    "BatchSizeFinder": lambda _: shipped.BatchSizeFinder(max_trials=2, steps_per_trial=2, init_val=3),
    "Callback": lambda _: shipped.Callback(),
    "Checkpoint": lambda _: shipped.Checkpoint(),
    "DeviceStatsMonitor": lambda _: shipped.DeviceStatsMonitor(cpu_stats=True),
    "EMAWeightAveraging": lambda _: shipped.EMAWeightAveraging(decay=0.9),
    "EarlyStopping": lambda _: shipped.EarlyStopping("val_loss", min_delta=0.05, patience=4),
    "GradientAccumulationScheduler": lambda _: shipped.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3}),
    "LambdaCallback": lambda _: shipped.LambdaCallback(on_train_epoch_end=lambda trainer, module: module.seen.add_(1)),
    "LearningRateFinder": lambda _: shipped.LearningRateFinder(num_training_steps=20, max_lr=0.1),
    "LearningRateMonitor": lambda _: shipped.LearningRateMonitor("step"),
    "ModelCheckpoint": lambda _: shipped.ModelCheckpoint(
        monitor="val_loss", save_top_k=2, save_last="link", filename="{epoch}-{step}"
    ),
    "ModelPruning": lambda _: shipped.ModelPruning("l1_unstructured", amount=0.2),
    "ModelSummary": lambda _: shipped.ModelSummary(),
    "OnExceptionCheckpoint": lambda folder: shipped.OnExceptionCheckpoint(folder / "exception"),
    "ProgressBar": lambda _: Bar(),
    "RichModelSummary": lambda _: shipped.RichModelSummary(),
    "RichProgressBar": lambda _: shipped.RichProgressBar(),
    "SpikeDetection": lambda _: shipped.SpikeDetection(rtol=100.0),
    "StochasticWeightAveraging": lambda _: shipped.StochasticWeightAveraging(0.02, 1, annealing_epochs=1),
    "TQDMProgressBar": lambda _: shipped.TQDMProgressBar(refresh_rate=1000),
    "ThroughputMonitor": lambda _: shipped.ThroughputMonitor(len, window_size=4),
    "Timer": lambda _: shipped.Timer("01:00:00:00"),
    "WeightAveraging": lambda _: Averages(),
}
"""How each is made so that it does something in a short training."""


class Data(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


class Module(L.LightningModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.lr, self.batch_size = 1e-2, 4
        self.backbone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU())
        self.head = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
        self.register_buffer("seen", torch.zeros(()))
        self.running = RunningMean(5)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        die(self.config, self.trainer)
        loss = (self.head(self.backbone(batch)) - batch.sum(1, keepdim=True)).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.running.update(loss.detach())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = (self.head(self.backbone(batch)) - batch.sum(1, keepdim=True)).pow(2).mean()
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam([each for each in self.parameters() if each.requires_grad], self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def train_dataloader(self) -> Any:
        return DataLoader(Data(4 * BATCHES * self.trainer.world_size), self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Data(8 * self.trainer.world_size), 4)


def die(config: dict[str, Any], trainer: L.Trainer) -> None:
    """Kills its process, once in a run."""
    dies, marker = config.get("dies"), Path(config["folder"], "died")
    searching = trainer.max_steps != -1  # a finder's limit
    if dies is None or searching or trainer.global_rank != trainer.world_size - 1 or marker.exists():
        return
    if trainer.fit_loop.epoch_loop.total_batch_idx == dies:
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(config: dict[str, Any]) -> None:
    from lightning_resilience import AutoResume, Preemption

    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    folder = Path(config["folder"])
    callbacks = [MAKE[name](folder) for name in config["callbacks"]]
    if config.get("ours"):
        callbacks += [Preemption(run_dir=config["run_dir"]), AutoResume(every_n_train_steps=5, async_save=False)]
    module = Module(config)
    trainer = L.Trainer(
        callbacks=callbacks,
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=config.get("trainer", {}).get("devices", 1),
        enable_progress_bar=any(isinstance(each, shipped.ProgressBar) for each in callbacks),
        enable_model_summary=False,
        default_root_dir=folder / "made",
        log_every_n_steps=1,
    )
    trainer.fit(module)
    Path(f"{config['out']}.{trainer.global_rank}").write_text(json.dumps(came_to(trainer, module, folder)))


def came_to(trainer: L.Trainer, module: Module, folder: Path) -> dict[str, Any]:
    """Everything that somebody may look at when the training is over, without what lies in the run directory."""
    own = [each for each in trainer.callbacks if not type(each).__module__.startswith("lightning_resilience")]
    said = {
        "weights": digest(module.state_dict()),
        "optimizers": [digest(each.state_dict()) for each in trainer.optimizers],
        "schedulers": [digest(each.scheduler.state_dict()) for each in trainer.lr_scheduler_configs],
        "lr": [group["lr"] for each in trainer.optimizers for group in each.param_groups],
        "set by searches": [module.lr, module.batch_size],
        "trained": [name for name, each in module.named_parameters() if each.requires_grad],
        "step": [trainer.global_step, trainer.current_epoch, trainer.accumulate_grad_batches],
        "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "running": module.running.compute().item(),
        "random": torch.rand(()).item(),
        "callbacks": {type(each).__name__: plain(state_of(each)) for each in own},
    }
    if trainer.is_global_zero:
        files = {str(each.relative_to(folder)) for each in (folder / "made").rglob("*") if each.is_file()}
        said["files"] = sorted(each for each in files if "events.out.tfevents" not in each)  # one for each start
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        said["best"] = digest(torch.load(best, weights_only=False)["state_dict"]) if best else None
    text: str = json.dumps(said).replace(str(folder), "FOLDER")
    result: dict[str, Any] = json.loads(text)
    return result


def state_of(callback: Any) -> Any:
    if isinstance(callback, shipped.Timer):
        return sorted(callback.state_dict())  # of how long it has taken nothing is exact
    metrics = {name: each for name, each in vars(callback).items() if isinstance(each, torch.nn.Module)}
    computed = {name: each.compute() for name, each in metrics.items() if hasattr(each, "compute")}
    return [callback.state_dict(), computed]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else repr(value)


def digest(state: Any) -> str:
    return hashlib.sha256(json.dumps(plain(state)).encode()).hexdigest()[:12]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
