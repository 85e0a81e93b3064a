"""What one rank raises is raised on all, and no rank waits for another that has gone on to raise."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_resilience import AutoResume
from lightning_resilience.fit import context
from lightning_resilience.fit.checkpoint_io import from_rank_zero, on_every_rank
from tests.harness import CONTEXT, free_port, run
from tests.test_exact_resume import make


def _meet(rank: int, port: int, said: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=20))

    class Strategy(SimpleNamespace):
        def broadcast(self, value: Any) -> Any:
            values = [value]
            torch.distributed.broadcast_object_list(values)
            return values[0]

    strategy = Strategy(is_global_zero=rank == 0, global_rank=rank, world_size=2)

    def fail(on: int) -> None:
        if rank == on:
            raise OSError("the disk is full")

    heard = []
    for meet in (
        lambda: from_rank_zero(strategy, lambda: fail(0)),
        lambda: on_every_rank(strategy, lambda: fail(1)),
        lambda: on_every_rank(strategy, lambda: fail(2)),
    ):
        try:
            heard.append(repr(meet()))
        except Exception as error:
            heard.append(f"{type(error).__name__}: {error}")
    said.put((rank, heard))
    torch.distributed.barrier()


def test_what_one_rank_raises_is_raised_on_all_and_none_waits() -> None:
    said, port = CONTEXT.Queue(), free_port()
    ranks = [CONTEXT.Process(target=_meet, args=(rank, port, said)) for rank in range(2)]
    for each in ranks:
        each.start()
    heard = dict(said.get(timeout=60) for _ in ranks)
    for each in ranks:
        each.join(30)
    assert heard == {
        0: ["OSError: the disk is full", "RuntimeError: rank 1: OSError: the disk is full", "None"],
        1: ["RuntimeError: rank 0: the disk is full", "OSError: the disk is full", "None"],
    }


def test_a_run_directory_that_cannot_be_made_fails_every_rank_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = {**make(tmp_path, "run", trainer={"devices": 2}), "run_dir": str(tmp_path / "file" / "run")}
    codes, text = run(config, tmp_path)
    assert 0 not in codes
    assert text.count("StorageFails: Rank 0 on ") >= 2  # on each of them


def test_a_run_directory_that_cannot_be_read_ends_no_fit_at_the_save_of_another_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(context, "_READS_OWNER_AGAIN_AFTER_S", (0.01,))

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            (tmp_path / "run" / "attempt.json").write_bytes(b"")
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    theirs = ModelCheckpoint(tmp_path / "theirs", every_n_train_steps=1, save_top_k=-1)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        callbacks=[theirs, AutoResume(tmp_path / "run")],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(3, 1)))
    assert len(list((tmp_path / "theirs").iterdir())) == 3
    assert caplog.text.count("are saved anyway") == 1
