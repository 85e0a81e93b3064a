"""Exact also with callbacks that change what is trained, in float64, with other batches, and past a raised limit.

In this process: every start makes all anew, from the same seed, as a process of its own does.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ModelPruning, StochasticWeightAveraging, Timer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AutoResume, LocalCheckpoint
from lightning_resilience.checkpoint import checkpoint_file, resume
from lightning_resilience.fit import context
from lightning_resilience.run.run_directory import RunDirectory

BATCHES = 12  # of an epoch, of 4 samples


class Killed(BaseException):
    pass


class Net(L.LightningModule):
    def __init__(self, norm: bool, batch_size: int, dies_at: int | None) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8) if norm else torch.nn.Identity()
        self.second = torch.nn.Linear(8, 1)
        self.batch_size, self.dies_at = batch_size, dies_at
        self.seen: dict[int, list[int]] = {}

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2, self.training))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == self.dies_at:
            raise Killed
        self.seen.setdefault(self.trainer.current_epoch, []).extend(batch[1].tolist())
        return (self(batch[0]) - 1).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch[0]).pow(2).mean() * 0 + 1)  # it does not improve
        torch.rand(3)

    def data(self) -> TensorDataset:
        size = 4 * BATCHES
        return TensorDataset(torch.randn(size, 6, generator=torch.Generator().manual_seed(3)), torch.arange(size))

    def train_dataloader(self) -> Any:
        return DataLoader(self.data(), self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data(), 24)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


@dataclass
class Script:
    """A program that may be started again and again.

    Args:
        tmp: Where it runs.
        callbacks: What makes the user's callbacks.
        norm: Whether its module has a BatchNorm.
        options: Of the Trainer.
        saving: Of ``AutoResume``.
    """

    tmp: Path
    callbacks: Callable[[], list[Any]] = list
    norm: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    saving: dict[str, Any] = field(default_factory=lambda: {"every_n_train_steps": 5, "async_save": False})

    def plain(self, **options: Any) -> str:
        """What the weights are in the end where nothing of ours takes part."""
        return self._fit([], None, options, None).digest

    def start(
        self,
        dies_at: int | None = None,
        batch_size: int = 4,
        ckpt_path: Any = None,
        local: bool = False,
        **options: Any,
    ) -> End:
        """Starts it, as in a new process, until ``dies_at`` or its end."""
        context.fits_begun.clear()
        own: list[Any] = [AutoResume(self.tmp / "run", **self.saving)]
        if local:
            own = [AutoResume(self.tmp / "run"), LocalCheckpoint(str(self.tmp / "node"), every_n_train_steps=3)]
        return self._fit(own, dies_at, options, ckpt_path, batch_size)

    def _fit(
        self, own: list[Any], dies_at: int | None, options: dict[str, Any], ckpt_path: Any, batch_size: int = 4
    ) -> End:
        L.seed_everything(1, verbose=False)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(
            callbacks=[*self.callbacks(), *own],
            accelerator="cpu",
            default_root_dir=str(self.tmp),
            **{"enable_checkpointing": False, "limit_val_batches": 0, "max_epochs": 4, **self.options, **options},
            **quiet,
        )
        module = Net(self.norm, batch_size, dies_at)
        try:
            trainer.fit(module, ckpt_path=ckpt_path)
        except Killed:
            pass
        return End(trainer, module)

    @property
    def checkpoints(self) -> list[Path]:
        return resume.checkpoints(RunDirectory(self.tmp / "run").fit(0).checkpoints)


@dataclass
class End:
    """How a start ended."""

    trainer: L.Trainer
    module: Net

    @property
    def digest(self) -> str:
        """Weights and what the optimizer keeps, by name."""
        state = self.module.state_dict()
        tensors = [state[name] for name in sorted(state)]
        tensors += [each for state in self.trainer.optimizers[0].state.values() for each in state.values()]
        rates = repr([group["lr"] for group in self.trainer.optimizers[0].param_groups])
        return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors) + rates.encode()).hexdigest()[:12]


def averaged() -> list[Any]:
    return [StochasticWeightAveraging(0.02, swa_epoch_start=2)]


def pruned_at_validation() -> list[Any]:
    """Of some layers only the weight, so that the order of the parameters changes."""
    settings: dict[str, Any] = {"parameter_names": ["weight"], "prune_on_train_epoch_end": False}
    return [ModelPruning("l1_unstructured", amount=0.3, verbose=0, **settings)]


def pruned_for_good() -> list[Any]:
    return [
        ModelPruning("random_unstructured", use_global_unstructured=False, amount=0.3, make_pruning_permanent=False)
    ]


CHANGES: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "averaged": (averaged, {}),
    "pruned": (pruned_at_validation, {"limit_val_batches": 1.0}),
    "pruned, and masks that are kept": (pruned_for_good, {}),
    "float64": (list, {"precision": "64-true"}),
    "float64, averaged": (averaged, {"precision": "64-true"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("local", [False, True], ids=["run directory", "node"])
def test_what_is_trained_changes_on_the_way(tmp_path: Path, change: str, local: bool) -> None:
    """Killed twice in one epoch, and again in the last."""
    callbacks, options = CHANGES[change]
    script = Script(tmp_path, callbacks, norm=change == "averaged", options=options)
    for dies_at in (20, 23, 45):
        assert script.start(dies_at, local=local).module.seen
    end = script.start(local=local)
    assert end.digest == script.plain()
    again = script.start(local=local)
    assert not again.module.seen  # it had finished
    assert again.module.state_dict().keys() == end.module.state_dict().keys()
    assert again.digest == end.digest


@pytest.mark.slow
def test_the_last_epoch_of_averaging_is_begun_anew(tmp_path: Path) -> None:
    """It only reads, and ends in a step of the gradients from before it: a save in it would not have them."""
    saving = {"every_n_train_steps": 1, "async_save": False}
    script = Script(tmp_path, averaged, norm=True, saving=saving)
    for dies_at in (48, 55):
        script.start(dies_at)
        assert resume.step_of(script.checkpoints[0]) == 47
    assert script.start().digest == script.plain()


class Stops(L.Callback):
    """Stops the training by itself at ``step``."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop |= trainer.global_step == self.step


MOMENT = timedelta(microseconds=1)
VALIDATES = {"limit_val_batches": 1.0}
RAISED: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], Callable[[], list[Any]], dict[str, Any]]] = {
    "max_steps": (list, {"max_steps": 17, "max_epochs": -1}, list, {"max_steps": 30, "max_epochs": -1}),
    "max_steps, while gradients accumulate": (
        list,
        {"max_steps": 5, "accumulate_grad_batches": 2},
        list,
        {"max_steps": 9, "accumulate_grad_batches": 2},
    ),
    "max_steps, behind a validation": (
        list,
        {"max_steps": 18, "val_check_interval": 6, **VALIDATES},
        list,
        {"max_steps": 30, "val_check_interval": 6, **VALIDATES},
    ),
    "max_time": (list, {"max_time": MOMENT, **VALIDATES}, list, {"max_time": timedelta(days=1), **VALIDATES}),
    "max_time, and now none": (list, {"max_time": MOMENT}, list, {}),
    "a timer that looks at epochs": (
        lambda: [Timer(MOMENT, "epoch")],
        VALIDATES,
        lambda: [Timer(timedelta(days=1), "epoch")],
        VALIDATES,
    ),
    "patience": (
        lambda: [EarlyStopping("val", patience=1)],
        VALIDATES,
        lambda: [EarlyStopping("val", patience=2)],
        VALIDATES,
    ),
    "patience, in the middle of an epoch": (
        lambda: [EarlyStopping("val", patience=2, check_on_train_epoch_end=False)],
        {"val_check_interval": 5, **VALIDATES},
        lambda: [EarlyStopping("val", patience=4, check_on_train_epoch_end=False)],
        {"val_check_interval": 5, **VALIDATES},
    ),
    "the script's own wish": (lambda: [Stops(16)], {"max_epochs": 2, **VALIDATES}, list, VALIDATES),
}


@pytest.mark.slow_but_for("max_steps", "patience")
@pytest.mark.parametrize("case", RAISED)
def test_a_larger_limit_trains_on(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    """As if it had always been the larger one; nothing was saved before the first end."""
    callbacks, options, later_callbacks, later_options = RAISED[case]
    never = {"train_time_interval": None}
    short = Script(tmp_path, callbacks, options=options, saving=never)
    first = short.start()
    with caplog.at_level(logging.INFO):
        assert not short.start().module.seen
    assert f"already finished at step {first.trainer.global_step}:" in caplog.text
    longer = Script(tmp_path, later_callbacks, options=later_options, saving=never)
    end = longer.start()
    assert end.trainer.global_step > first.trainer.global_step
    assert end.digest == longer.plain()
    assert "not exact" not in caplog.text


def test_another_limit_than_the_one_that_ended_it_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(tmp_path, lambda: [EarlyStopping("val", patience=1)], options=VALIDATES)
    first = script.start()
    with caplog.at_level(logging.INFO):
        again = script.start(max_epochs=9)
    assert (again.module.seen, again.digest) == ({}, first.digest)
    assert "raise the patience of EarlyStopping" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("callbacks", [averaged, pruned_at_validation], ids=["averaged", "pruned"])
def test_more_epochs_where_the_end_has_changed_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, callbacks: Callable[[], list[Any]]
) -> None:
    script = Script(tmp_path, callbacks, options=VALIDATES)
    script.start()
    assert script.start(max_epochs=6).digest == script.plain(max_epochs=6)
    short = Script(tmp_path / "short", callbacks, options=VALIDATES, saving={"train_time_interval": None})
    short.start()
    assert "not exact" not in caplog.text
    short.start(max_epochs=6)
    assert "Continuing this fit from its end is not exact" in caplog.text


@pytest.mark.slow_but_for("5-trained on twice")
@pytest.mark.parametrize(("size", "said"), [(2, "trained on once"), (8, "trained on once"), (5, "trained on twice")])
def test_another_batch_size_goes_on_behind_the_same_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int, said: str
) -> None:
    saving = {"every_n_train_steps": 6, "async_save": False}
    order = Script(tmp_path / "whole", saving=saving).start().module.seen[0]
    script = Script(tmp_path, saving=saving)
    assert script.start(8).module.seen[0] == order[: 8 * 4]
    resumed = script.start(batch_size=size)
    behind = 6 * 4 // size * size
    assert resumed.module.seen[0] == order[behind:]
    assert [len(ids) for ids in resumed.module.seen.values()] == [len(order) - behind, *[len(order)] * 3]
    assert said in caplog.text


def test_accumulation_that_the_script_has_changed_holds_at_once(tmp_path: Path) -> None:
    """As it does beside smaller batches, when memory was short."""
    script = Script(tmp_path, saving={"every_n_train_steps": 2, "async_save": False})
    script.start(9, accumulate_grad_batches=2)
    end = script.start(batch_size=2, accumulate_grad_batches=4)
    assert end.trainer.accumulate_grad_batches == 4
    assert end.trainer.global_step == 4 * 6


def newest_of(folder: Path) -> Path | None:
    """What scripts pass as ``ckpt_path``."""
    return max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)


@pytest.mark.slow
def test_the_newest_own_file_of_a_model_checkpoint_means_to_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "own"

    def callbacks() -> list[Any]:
        return [ModelCheckpoint(own, "{step}", every_n_train_steps=4, save_top_k=-1)]

    script = Script(tmp_path, callbacks, options={"enable_checkpointing": True})
    for dies_at in (14, 22, 31):
        script.start(dies_at, ckpt_path=newest_of(own))
    with caplog.at_level(logging.INFO):
        end = script.start(ckpt_path=newest_of(own))
    assert "is the newest file of this fit's ModelCheckpoint" in caplog.text
    assert "Resuming from step 30" in caplog.text
    assert end.digest == Script(tmp_path / "other").plain()
    assert not RunDirectory(tmp_path / "run").fit(0).quarantine.exists()
    # An older one is a choice.
    caplog.clear()
    with caplog.at_level(logging.INFO):
        script.start(ckpt_path=own / "step=8.ckpt")
    assert "wins" in caplog.text
    # So is another run's.
    caplog.clear()
    other = Script(tmp_path / "other")
    other.start(8)
    with caplog.at_level(logging.INFO):
        other.start(ckpt_path=newest_of(own))
    assert "wins" in caplog.text


@pytest.mark.parametrize("name", ["last.ckpt", "last_of_pretraining.ckpt"])
def test_the_last_checkpoint_of_another_run_is_a_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Only this Trainer's own is what ``ckpt_path="last"`` stands for."""
    theirs, own = tmp_path / "theirs", tmp_path / "own"
    saves: dict[str, Any] = {"options": {"enable_checkpointing": True}}
    other = Script(tmp_path / "other", lambda: [ModelCheckpoint(theirs, every_n_train_steps=4)], **saves)
    other.start(14)
    (newest,) = theirs.iterdir()
    chosen = shutil.copy(newest, tmp_path / name)
    script = Script(tmp_path, lambda: [ModelCheckpoint(own, save_last=True, every_n_train_steps=4)], **saves)
    script.start(22)
    with caplog.at_level(logging.INFO):
        script.start(23, ckpt_path="last")
        script.start(23, ckpt_path=own / "last.ckpt")
    assert "wins" not in caplog.text
    with caplog.at_level(logging.INFO):
        script.start(ckpt_path=chosen)
    assert "wins" in caplog.text


def test_a_finished_fit_that_is_restored_was_not_stopped(tmp_path: Path) -> None:
    """What scripts ask afterwards, to know whether EarlyStopping has acted."""
    script = Script(tmp_path)
    assert not script.start().trainer.should_stop
    restored = script.start()
    assert not restored.module.seen, "it is not trained"
    assert not restored.trainer.should_stop


def test_a_fit_behind_a_failed_one_of_the_process_is_said_to_be_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A retry in the script, or a cell that is run again."""
    script = Script(tmp_path)
    script.start(8)
    with caplog.at_level(logging.WARNING):
        L.seed_everything(1, verbose=False)
        script._fit([AutoResume(tmp_path / "run", **script.saving)], None, {"max_epochs": 1}, None)
    assert "The last fit of this process (fit-000) has failed" in caplog.text
    assert "the next fit of the script (fit-001)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        script._fit([AutoResume(tmp_path / "run", **script.saving)], None, {"max_epochs": 1}, None)
    assert "has failed" not in caplog.text


def test_a_fit_whose_end_could_not_be_saved_goes_on_with_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is restored as the result of other settings then."""
    script = Script(tmp_path)
    with monkeypatch.context() as full:
        save = checkpoint_file.save

        def fails(content: Any, path: Path, *args: Any) -> None:
            if "final" in path.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            save(content, path, *args)

        full.setattr(checkpoint_file, "save", fails)
        script.start()
    assert not [path for path in script.checkpoints if "final" in path.name]
    end = script.start(batch_size=8)
    assert end.trainer.state.finished


class AsksEarly(BoringModel):  # type: ignore[misc]
    fails = False

    def setup(self, stage: str) -> None:
        self.asked = self.trainer.estimated_stepping_batches
        if self.fails:
            raise ValueError("on purpose")


@pytest.mark.parametrize("saves", [False, True])
def test_how_data_were_divided_holds_only_where_there_is_something_to_resume_from(tmp_path: Path, saves: bool) -> None:
    """And not for a fit that follows in the same Trainer, if this one fails before it has read a checkpoint."""

    def trainer(**options: Any) -> L.Trainer:
        context.fits_begun.clear()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        own = AutoResume(tmp_path / "run", every_n_train_steps=2, async_save=False)
        limits = {"max_epochs": 1, "limit_val_batches": 0, "enable_checkpointing": False, **options}
        return L.Trainer(callbacks=[own], accelerator="cpu", default_root_dir=tmp_path, **quiet, **limits)

    trainer(max_steps=5 if saves else 1, max_epochs=-1).fit(AsksEarly())
    fit = RunDirectory(tmp_path / "run").fit(0)
    for path in [] if saves else fit.checkpoints.iterdir():
        path.unlink()
    assert fit.fingerprint is not None
    fit.fingerprint = {**fit.fingerprint, "division": {"places": 2, "share": "1", "batch_sizes": [1]}}
    failing, again, module = trainer(), AsksEarly(), AsksEarly()
    again.fails = True
    with pytest.raises(ValueError, match="on purpose"):
        failing.fit(again)
    assert again.asked == (32 if saves else 64)
    assert "_prepare_dataloader" not in vars(failing._data_connector)
    trainer().fit(module)
    assert module.asked == again.asked


@pytest.mark.parametrize("dies_at", [12 + 5, 12 + 9, 12 + 8 + 12 + 7])
def test_an_epoch_that_the_module_cuts_short_does_not_move_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    """Steps are logged under the same numbers, although Lightning counts the batch that was left out as begun."""

    def leave_out(self: Net, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == (1, 7) else None

    monkeypatch.setattr(Net, "on_train_batch_start", leave_out)
    script = Script(tmp_path)
    undisturbed = script._fit([], None, {}, None)
    script.start(dies_at=dies_at)
    resumed = script.start()
    assert resumed.digest == undisturbed.digest
    logged = [end.trainer.fit_loop.epoch_loop._batches_that_stepped for end in (resumed, undisturbed)]
    assert logged[0] == logged[1] == undisturbed.trainer.global_step
