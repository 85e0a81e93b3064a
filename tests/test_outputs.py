"""What Lightning itself writes goes on where it was when a fit is restarted: logs, best checkpoints, configurations."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AutoResume, Preemption, signals
from lightning_resilience.fit import context
from lightning_resilience.recipes import RECIPE_VARIABLE
from lightning_resilience.run.run_directory import RUN_DIR_VARIABLE, RunDirectory


class Worsens(L.LightningModule):
    """Its first epoch is its best; asks the process to stop at a step."""

    def __init__(self, stops_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 1)
        self.stops_at = stops_at
        self.tested: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.stops_at:
            os.kill(os.getpid(), signal.SIGTERM)
            while (listener := signals.installed()) is not None and listener.received is None:
                time.sleep(0.001)  # a busy machine must not end the fit first: then the signal would end pytest
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss)
        if self.trainer.global_step > 20:
            self.log("late", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.trainer.current_epoch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.tested = [float(each) for each in self.layer.weight.flatten()]

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(64.0).reshape(16, 4) / 64), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(2, 4)))

    test_dataloader = val_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(module: Worsens, run: Path | None, callbacks: list[Any], **options: Any) -> L.Trainer:
    """A Trainer as in a new process."""
    context.fits_begun.clear()
    ours = [Preemption(run_dir=run), AutoResume(every_n_train_steps=5, async_save=False)] if run else []
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    return L.Trainer(callbacks=[*callbacks, *ours], **{"max_epochs": 4, "accelerator": "cpu", **quiet, **options})


def stopped(start: Callable[[], Any]) -> None:
    with pytest.raises(SystemExit) as stop:
        start()
    assert stop.value.code == 75


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if not name.startswith("resilience/")} for row in rows]


def best() -> ModelCheckpoint:
    return ModelCheckpoint(monitor="val", save_top_k=2, save_last=True)


SETUPS: dict[str, Callable[[Path, int], tuple[list[Any], dict[str, Any]]]] = {
    "version_N": lambda folder, start: ([best()], {"default_root_dir": folder}),
    "no logger, the folder has the time in its name": lambda folder, start: (
        [best()],
        {"default_root_dir": folder / f"{start}", "logger": False},
    ),
    "logs and checkpoints in a folder with the time in its name": lambda folder, start: (
        [ModelCheckpoint(folder / f"{start}" / "kept", monitor="val", save_top_k=2, save_last=True)],
        {"logger": CSVLogger(folder / f"{start}", name="csv", version=""), "default_root_dir": folder / f"{start}"},
    ),
    "a relative path and another working directory": lambda folder, start: (
        [best()],
        {"logger": CSVLogger("logs", name="mine")},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
def test_a_restart_ends_with_the_best_checkpoints_of_the_whole_fit(
    here: Path, setup: Callable[[Path, int], tuple[list[Any], dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(folder: Path, start: int, run: Path | None, stops_at: int = -1) -> tuple[L.Trainer, Worsens]:
        working = folder / f"cwd-{start}"
        working.mkdir(parents=True)
        monkeypatch.chdir(working)
        callbacks, options = setup(folder, start)
        module = Worsens(stops_at)
        trainer = make(module, run, callbacks, **options)
        trainer.fit(module)
        return trainer, module

    def came_to(folder: Path, trainer: L.Trainer, module: Worsens) -> Any:
        state = trainer.checkpoint_callback.state_dict()  # type: ignore[union-attr]
        trainer.test(module, ckpt_path="best", verbose=False)
        files = {path.name for path in folder.rglob("*.ckpt")}
        relative = json.loads(json.dumps(state, default=str).replace(f"{folder}/", "").replace("cwd-0/", ""))
        return relative, files, module.tested

    expected = came_to(here / "plain", *fit(here / "plain", 0, None))
    assert expected[0]["best_model_path"].endswith("epoch=0-step=8.ckpt")
    stopped(lambda: fit(here / "ours", 0, here / "run", stops_at=21))
    # A second time, so that what was found in the first restart is recorded in its turn.
    stopped(lambda: fit(here / "ours", 1, here / "run", stops_at=27))
    assert came_to(here / "ours", *fit(here / "ours", 2, here / "run")) == expected


class DiesAfterASave(L.Callback):
    """When the epoch's checkpoint has been saved, and before the next batch is begun."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 2 and (pl_module.stops_at or 0) > 0:
            raise RuntimeError("on purpose")


@pytest.mark.parametrize("filename", ["{epoch}", pytest.param("{step}", marks=pytest.mark.campaign), None])
@pytest.mark.slow_but_for("None")
def test_a_checkpoint_that_was_saved_after_what_is_resumed_is_saved_over(here: Path, filename: str | None) -> None:
    """And no other: with ``{epoch}`` each epoch has two files, of which the second is a ``-v1`` anyway."""

    def fit(folder: Path, run: Path | None, stops_at: int = -1) -> Any:
        module = Worsens(stops_at)
        checkpoint = ModelCheckpoint(folder, filename, every_n_train_steps=4, save_top_k=-1, save_last=True)
        callbacks = [checkpoint, DiesAfterASave()]
        context.fits_begun.clear()
        ours = [AutoResume(run, every_n_train_steps=15, async_save=False, train_time_interval=None)] if run else []
        L.Trainer(max_epochs=4, accelerator="cpu", callbacks=[*callbacks, *ours], logger=False).fit(module)
        state = json.dumps({**checkpoint.state_dict(), "kth_value": None}, default=str).replace(str(folder), "")
        return state, sorted(path.name for path in folder.iterdir())

    expected = fit(here / "plain", None)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(here / "ours", here / "run", stops_at=1000)
    for path in (here / "run" / "fit-000" / "checkpoints").iterdir():
        if "000000000015" not in path.name:
            path.unlink()
    stranger = here / "ours" / "of-another-run.ckpt"
    shutil.copy(next((here / "plain").iterdir()), stranger)
    assert fit(here / "ours", here / "run") == (expected[0], sorted([*expected[1], stranger.name]))


@pytest.mark.slow
@pytest.mark.parametrize("version", [None, pytest.param(3, marks=pytest.mark.campaign)])
def test_a_csv_file_holds_the_log_of_all_attempts(here: Path, version: int | None) -> None:
    def fit(folder: Path, run: Path | None, stops_at: int = -1) -> None:
        module = Worsens(stops_at)
        make(module, run, [], logger=CSVLogger(folder, version=version), enable_checkpointing=False).fit(module)

    fit(here / "plain", None)
    stopped(lambda: fit(here / "ours", here / "run", stops_at=19))  # before there is another column
    file = here / "ours" / "lightning_logs" / f"version_{version or 0}" / "metrics.csv"
    with open(file, "a") as torn:
        torn.write("0,,0.25")  # as a kill in the middle of a write leaves it
    stopped(lambda: fit(here / "ours", here / "run", stops_at=27))
    fit(here / "ours", here / "run")
    assert [path.name for path in file.parents[1].iterdir()] == [file.parent.name]
    assert rows(file) == rows(here / "plain" / "lightning_logs" / f"version_{version or 0}" / "metrics.csv")


@pytest.mark.slow
def test_a_new_run_begins_a_new_version(here: Path) -> None:
    for number in range(2):
        module = Worsens()
        make(module, here / f"run-{number}", [], default_root_dir=here).fit(module)
    assert sorted(path.name for path in (here / "lightning_logs").iterdir()) == ["version_0", "version_1"]


def test_a_copy_of_a_run_leaves_the_logs_of_the_original_alone(here: Path) -> None:
    def fit(run: Path, stops_at: int = -1) -> None:
        module = Worsens(stops_at)
        make(module, run, [best()], default_root_dir=here).fit(module)

    stopped(lambda: fit(here / "run", stops_at=21))
    shutil.copytree(here / "run", here / "copy")
    (here / "copy" / "run.json").write_text('{"id": "0123456789abcdef"}')
    fit(here / "copy")
    assert sorted(path.name for path in (here / "lightning_logs").iterdir()) == ["version_0", "version_1"]


def test_another_logger_than_before_is_left_alone(here: Path) -> None:
    def fit(logger: Any, stops_at: int = -1) -> None:
        module = Worsens(stops_at)
        make(module, here / "run", [], logger=logger, enable_checkpointing=False).fit(module)

    stopped(lambda: fit(CSVLogger(here / "logs", name="one"), stops_at=21))
    fit(CSVLogger(here / "logs", name="another"))
    assert (here / "logs" / "another" / "version_0" / "metrics.csv").exists()


def test_what_was_removed_is_begun_anew(here: Path) -> None:
    def fit(start: int, stops_at: int = -1) -> Any:
        module = Worsens(stops_at)
        trainer = make(module, here / "run", [best()], default_root_dir=here / f"{start}")
        trainer.fit(module)
        return trainer.checkpoint_callback

    stopped(lambda: fit(0, stops_at=21))
    shutil.rmtree(here / "0")
    assert fit(1).dirpath == str(here / "1" / "lightning_logs" / "version_0" / "checkpoints")
    assert not (here / "0").exists()


def test_a_logger_that_was_used_before_the_fit_goes_on_as_well(here: Path) -> None:
    def fit(stops_at: int = -1) -> None:
        logger = CSVLogger(here)
        logger.log_hyperparams({"depth": 3})  # makes its folder
        module = Worsens(stops_at)
        make(module, here / "run", [], logger=logger, enable_checkpointing=False).fit(module)

    stopped(lambda: fit(stops_at=21))
    fit()
    steps = {int(row["step"]) for row in rows(here / "lightning_logs" / "version_0" / "metrics.csv")}
    assert steps == set(range(32))


# -- LightningCLI -----------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(here: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """An environment as ``launch`` makes it: callbacks are put behind those of the script."""
    monkeypatch.setenv(RECIPE_VARIABLE, "workstation")
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(here / "run"))
    return RunDirectory(here / "run")


def cli(*arguments: str) -> None:
    context.fits_begun.clear()
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.accelerator=cpu"]
    LightningCLI(Worsens, seed_everything_default=1, args=["fit", *quiet, "--trainer.max_epochs=4", *arguments])  # type: ignore[no-untyped-call]


LOGS = {
    "no logger": ["--trainer.logger=false"],
    "version_N": ["--trainer.logger=true"],
    "always the same folder": [
        "--trainer.logger=CSVLogger",
        "--trainer.logger.save_dir=.",
        "--trainer.logger.version=0",
    ],
}


@pytest.mark.parametrize("arguments", LOGS.values(), ids=LOGS.keys())
@pytest.mark.slow_but_for("version_N")
def test_a_program_with_lightning_cli_survives_restarts(launched: RunDirectory, arguments: list[str]) -> None:
    stopped(lambda: cli(*arguments, "--model.stops_at=11"))
    stopped(lambda: cli(*arguments, "--model.stops_at=22"))  # with another configuration, as a resubmitted job may be
    cli(*arguments, "--trainer.max_epochs=5")
    outcome = launched.fit(0).outcome
    assert outcome is not None
    assert (outcome.status, outcome.step) == ("finished", 40)
    (config,) = launched.path.parent.rglob("config.yaml")
    assert "max_epochs: 5" in config.read_text()


@pytest.mark.slow
def test_a_process_that_was_killed_right_after_it_had_saved_its_configuration(launched: RunDirectory) -> None:
    stopped(lambda: cli("--trainer.logger=false", "--model.stops_at=11"))
    (launched.fit(0).path / "outputs.json").unlink()
    cli("--trainer.logger=false", "--model.stops_at=11")


@pytest.mark.slow
def test_another_runs_configuration_is_not_overwritten(launched: RunDirectory) -> None:
    config = launched.path.parent / "config.yaml"
    config.write_text("of another run")
    with pytest.raises(RuntimeError, match="to NOT exist"):
        cli("--trainer.logger=false")
    config.unlink()
    stopped(lambda: cli("--trainer.logger=false", "--model.stops_at=11"))
    config.write_text("of another run")
    with pytest.raises(RuntimeError, match="to NOT exist"):
        cli("--trainer.logger=false")
    assert config.read_text() == "of another run"


class Shown(L.callbacks.TQDMProgressBar):
    """A progress bar, and what it shows before and after the first batch."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=1)
        self.seen: list[tuple[str, int, float | None]] = []

    def look(self) -> None:
        bar = self.train_progress_bar
        self.seen.append((bar.desc, bar.n, bar.total))

    def on_train_batch_start(self, *args: Any) -> None:
        self.look()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        self.look()


def test_the_progress_bar_goes_on_where_it_was(here: Path) -> None:
    stopped(lambda: make(Worsens(), here / "run", []).fit(Worsens(stops_at=11)))
    bar = Shown()
    make(Worsens(), here / "run", [bar], enable_progress_bar=True).fit(Worsens())
    assert bar.seen[:2] == [("Epoch 1: ", 4, 8), ("Epoch 1: ", 5, 8)]
    assert bar.seen[8:10] == [("Epoch 2: ", 0, 8), ("Epoch 2: ", 1, 8)]
