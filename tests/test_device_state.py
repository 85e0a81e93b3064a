"""What a save gives to other processes, or writes, holds nothing that lies on a device."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from lightning_resilience import AutoResume
from lightning_resilience.checkpoint import checkpoint_file, resume
from lightning_resilience.checkpoint.safe_serialization import device_of, to_host
from lightning_resilience.fit.context import FitContext
from lightning_resilience.run.run_directory import RunDirectory


class OnDevice(torch.Tensor):
    """A tensor on a device that this machine has not: it can be copied to the host, and not be pickled."""

    content: torch.Tensor

    @staticmethod
    def __new__(cls, content: torch.Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(cls, content.shape, dtype=content.dtype, device="cuda:0")
        made.content = content
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [each.content if isinstance(each, OnDevice) else each for each in args]
        kwargs = dict(kwargs or {})
        to = kwargs.pop("device", None)
        result = function(*plain, **kwargs)
        stays = isinstance(result, torch.Tensor) and (to is None or torch.device(to).type != "cpu")
        return OnDevice(result) if stays else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("a tensor on a device is pickled")


class Predictions(Metric):
    """Keeps what it has seen, as metrics of detection do."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, value: torch.Tensor) -> None:
        self.seen.append(OnDevice(value.detach().clone()))

    def compute(self) -> torch.Tensor:
        return torch.zeros(())


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.predictions = Predictions()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.layer(batch[0])
        self.predictions.update(out)
        return out.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("async_save", [False, True])
def test_metrics_are_gathered_and_saved_from_the_host(tmp_path: Path, async_save: bool) -> None:
    module, run = Model(), tmp_path / "run"
    trainer = L.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[AutoResume(run, every_n_train_steps=2, async_save=async_save)],
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(6, 4)), 2))
    saved = RunDirectory(run).fit(0).checkpoints / resume.checkpoint_name(2)
    (own,) = checkpoint_file.load(saved)["lightning_resilience"]["ranks"]
    seen = own["metrics"]["modules"]["predictions"]["state"]["seen"]
    assert [type(each) for each in seen] == [torch.Tensor] * 2
    assert torch.equal(seen[1], module.predictions.seen[1]), "brought to the host by Lightning at the end"


def test_what_is_gathered_must_be_on_the_host() -> None:
    class Alone(FitContext):
        def __init__(self) -> None:
            self.rank, self.trainer = 0, L.Trainer(logger=False, enable_progress_bar=False)

    value = {"a": [1, (torch.ones(2), defaultdict(list, {"b": [OnDevice(torch.ones(3))]}))]}
    assert device_of(value) == torch.device("cuda:0")
    with pytest.raises(ValueError, match="rank 0 gathers a tensor that is on cuda:0"):
        Alone().gather(value)
    (there,) = Alone().gather(to_host(value))
    assert torch.equal(there["a"][1][1]["b"][0], torch.ones(3))
    assert there["a"][1][1]["new"] == []


def test_to_host_keeps_containers() -> None:
    value = OrderedDict(a=(1, {"x"}), b=None, c=torch.ones(1, device="meta"))
    moved = to_host(value)
    assert type(moved) is OrderedDict
    assert list(moved.items())[:2] == [("a", (1, {"x"})), ("b", None)]
    assert moved["c"].is_meta
