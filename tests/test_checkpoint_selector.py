"""What comes first when there is more than one state to resume from, and what is the user's choice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AutoResume, LocalCheckpoint
from lightning_resilience.checkpoint.snapshot import optimizer_tensors
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import result, run, samples
from tests.ledgers import read_ledger
from tests.test_exact_resume import make, undisturbed


def resumed(config: dict[str, Any]) -> list[tuple[str, int]]:
    events = read_ledger(RunDirectory(config["run_dir"]).ledger)
    return [(event["tier"], event["step"]) for event in events if event["event"] == "resumed"]


def kill(step: int) -> dict[str, Any]:
    return {"at": "train", "step": step, "do": "SIGKILL", "once": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    "callbacks", [["preemption", "auto_resume", "local_checkpoint"], ["preemption", "auto_resume"]]
)
def test_stopped_in_the_middle_of_a_validation(tmp_path: Path, callbacks: list[str]) -> None:
    """The state that a preemption saves is then that of the beginning of the validation, in either tier."""
    options = {
        "validation": True, "plateau": True, "save_every": None,
        "trainer": {"val_check_interval": 4, "max_epochs": 2},
    }  # fmt: skip
    stop = {"at": "validation", "step": 12}
    config = make(
        tmp_path,
        "disturbed",
        callbacks=callbacks,
        local={"dir": str(tmp_path / "local"), "every_n_train_steps": 1000},
        events=[{**stop, "do": "SIGTERM", "once": True}, {**stop, "do": "sleep", "seconds": 0.3}],
        **options,
    )
    for _ in range(2):
        codes, text = run(config, tmp_path / "disturbed")
    assert codes == [0], text
    assert resumed(config) == [("local" if len(callbacks) == 3 else "global", 12)]
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)


MODEL_CHECKPOINT = {"save_last": True, "every_n_train_steps": 8, "save_top_k": 1}


@pytest.mark.slow
def test_last_means_the_newest_local_state_too(tmp_path: Path) -> None:
    config = make(
        tmp_path,
        "run",
        numpy=False,
        callbacks=["local_checkpoint"],
        local={"dir": str(tmp_path / "local"), "every_n_train_steps": 5},
        model_checkpoint={**MODEL_CHECKPOINT, "dirpath": str(tmp_path / "theirs")},
        ckpt_path="last",
        save_every=None,
        step_s=0.03,
        events=[kill(15)],
    )
    for _ in range(2):
        codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    [(tier, step)] = resumed(config)
    assert tier == "local"
    assert step > 8, "where last.ckpt is"  # 10, or what came next if the writer was busy then
    assert samples(config) == undisturbed(tmp_path, numpy=False, save_every=None)[1]


@pytest.mark.slow_but_for("False")
@pytest.mark.parametrize("local", [True, False])
def test_a_run_continued_from_a_chosen_path_goes_on_from_there_after_a_fault(tmp_path: Path, local: bool) -> None:
    """Whatever it had saved before, with more steps, is another course of the training."""
    config = make(
        tmp_path,
        "run",
        numpy=False,
        callbacks=["auto_resume", *(["local_checkpoint"] if local else [])],
        local={"dir": str(tmp_path / "local"), "every_n_train_steps": 4},
        model_checkpoint={**MODEL_CHECKPOINT, "dirpath": str(tmp_path / "theirs")},
        save_every=10,
        events=[kill(25), kill(14), kill(21)],
    )
    run(config, tmp_path / "run")  # killed at 14
    chosen = tmp_path / "chosen.ckpt"
    shutil.copy(next((tmp_path / "theirs").glob("epoch*.ckpt")), chosen)  # of step 8
    run(config, tmp_path / "run")  # killed at 21
    before = len(resumed(config))
    config = {**config, "ckpt_path": str(chosen), "model_checkpoint": None}
    for _ in range(2):  # from 8 on, killed at 25; and again
        codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    [(_, step)] = resumed(config)[before:]
    assert step >= 20, "what was saved since, and not the chosen path again"
    assert "is set aside" in (tmp_path / "run" / "output").read_text()
    quarantined = {path.name for path in (RunDirectory(config["run_dir"]).fit(0).quarantine).iterdir()}
    assert any(name.startswith("step-000000000020.ckpt") for name in quarantined), "and nothing is deleted"


def test_going_back_to_an_older_checkpoint_of_its_own(tmp_path: Path) -> None:
    config = make(tmp_path, "run", save_every=5, events=[kill(24)])
    run(config, tmp_path / "run")
    fit = RunDirectory(config["run_dir"]).fit(0)
    codes, text = run({**config, "ckpt_path": str(fit.checkpoints / "step-000000000015.ckpt")}, tmp_path / "run")
    assert codes == [0], text
    assert any(path.name.startswith("step-000000000020") for path in fit.quarantine.iterdir())
    assert not any(path.name.startswith("step-000000000015") for path in fit.quarantine.iterdir())
    assert (result(config), samples(config)) == undisturbed(tmp_path, save_every=5)


class SearchInTheMiddle(L.callbacks.LearningRateFinder):
    """Lightning's own example: the search is repeated at the start of some epochs."""

    def on_fit_start(self, *args: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


class Searched(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)


def test_a_search_in_the_middle_of_a_fit_is_not_its_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    callbacks = [
        AutoResume(run_dir, async_save=False, every_n_train_steps=3),
        LocalCheckpoint(tmp_path / "local", every_n_train_steps=1, run_dir=run_dir),
        SearchInTheMiddle(num_training_steps=5),
    ]
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(Searched(), DataLoader(TensorDataset(torch.randn(16, 4)), 2))
    events = list(read_ledger(RunDirectory(run_dir).ledger))
    saved = [event for event in events if event["event"] == "saved" and event["tier"] == "global"]
    assert [event["step"] for event in saved if event["reason"] == "every_n_train_steps"] == list(range(3, 24, 3))
    assert [event["step"] for event in saved if event["reason"] == "finished"] == [24]
    assert [event["step"] for event in events if event["event"] == "finished"] == [24]
    assert not RunDirectory(run_dir).fit(0).quarantine.exists(), "what the search puts back is nobody's choice"


def test_a_layer_that_is_not_initialized_yet_fails_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Lazy(Searched):
        def __init__(self) -> None:
            super().__init__()
            self.never_used = torch.nn.LazyLinear(3)

    run_dir = tmp_path / "run"
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
        callbacks=[LocalCheckpoint(tmp_path / "local", every_n_train_steps=2, async_save=False, run_dir=run_dir)],
    )  # fmt: skip
    trainer.fit(Lazy(), DataLoader(TensorDataset(torch.randn(16, 4)), 2))
    assert trainer.global_step == 8
    assert "could not be saved" not in caplog.text
    assert "never_used.weight (torch.nn.parameter.UninitializedParameter)" in caplog.text


def test_what_ddp_does_not_reduce_is_each_ranks_own() -> None:
    """A parameter that was frozen when DDP was set up, and trained later, differs from rank to rank."""
    trained, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = torch.optim.Adam([trained, frozen])
    frozen.requires_grad_()
    for parameter in (trained, frozen):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    shapes = [tuple(tensor.shape) for tensor in optimizer_tensors([optimizer], [trained])]
    assert sorted(shapes) == [(), (2,), (2,)]
    assert len(list(optimizer_tensors([optimizer]))) == 6
