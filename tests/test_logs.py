"""The logs of a fit that was killed are those of one that was not: no step is missing, and none is there twice."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_resilience import AutoResume
from lightning_resilience._lightning.lightning_patches import Patches
from lightning_resilience.fit.logger_files import Logs
from tests import harness
from tests.test_outputs import Worsens

KILLED_AT = [3, 17, 27]  # before anything is saved, and twice after steps that were saved


class OwnAxis(Worsens):
    """Logs, beside the steps, by samples, and by epochs; a new column comes late."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step = self.trainer.global_step
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger) and self.trainer.is_global_zero:
                logger.experiment.add_scalar("by samples", step, 100 * (step + 1))
        return super().training_step(batch, batch_idx)


class Killed(L.Callback):
    """Kills rank 0, once at each of some steps."""

    def __init__(self, folder: Path, steps: list[int]) -> None:
        self.marks = {step: folder / f"killed-at-{step}" for step in steps}

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        mark = self.marks.get(trainer.global_step)
        if mark is not None and trainer.is_global_zero and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main(config: dict[str, Any]) -> None:
    """The program whose processes are killed."""
    folder, devices = Path(config["folder"]), config["trainer"]["devices"]
    kinds: list[Any] = [CSVLogger] + [TensorBoardLogger] * config["tensorboard"]
    trainer = L.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        logger=[kind(folder, name=kind.__name__, version=config["version"]) for kind in kinds],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=[
            Killed(folder, config["killed_at"]),
            AutoResume(config["run_dir"], every_n_train_steps=5, async_save=False, train_time_interval=None),
        ],
    )
    trainer.fit(OwnAxis() if config["own_axis"] else Worsens())


def logged(tmp: Path, killed_at: list[int], **options: Any) -> Path:
    """Starts the program until it gets through."""
    defaults = {"tensorboard": False, "version": None, "own_axis": False, "trainer": {"devices": 1}}
    folder = tmp / ("killed" if killed_at else "undisturbed")
    folder.mkdir()
    config = {
        **defaults,
        **options,
        "program": "tests.test_logs",
        "folder": str(folder),
        "run_dir": str(folder / "run"),
        "killed_at": killed_at,
    }
    for _ in range(len(killed_at)):
        codes, text = harness.run(config, folder)
        assert -signal.SIGKILL in codes, text
    codes, text = harness.run(config, folder)
    assert set(codes) == {0}, text
    return folder


def rows(folder: Path) -> list[dict[str, str]]:
    (file,) = (folder / "CSVLogger").glob("*/metrics.csv")
    with open(file, newline="") as opened:
        return [of_the_training(row) for row in csv.DictReader(opened)]


def of_the_training(logged: dict[str, Any]) -> dict[str, Any]:
    """Without what is logged of the run, which is about time."""
    return {name: value for name, value in logged.items() if not name.startswith("resilience/")}


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "version"), [(1, 0), (2, None)], ids=["fixed version", "2 ranks"])
def test_the_csv_of_a_killed_fit_is_that_of_one_that_was_not(tmp_path: Path, devices: int, version: int | None) -> None:
    options = {"version": version, "trainer": {"devices": devices}}
    killed, undisturbed = (logged(tmp_path, steps, **options) for steps in (KILLED_AT, []))
    assert rows(killed) == rows(undisturbed)


def shown(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """What TensorBoard shows."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (version,) = (folder / "TensorBoardLogger").iterdir()
    events = event_accumulator.EventAccumulator(str(version), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    scalars = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    others = events.Tags()["histograms"]
    return scalars | {tag: [(each.step, each.histogram_value) for each in events.Histograms(tag)] for tag in others}


def assert_of_one_run(folder: Path) -> None:
    """What is logged of the run goes on over its interruptions."""
    run = {tag.removeprefix("resilience/"): points for tag, points in shown(folder).items() if "resilience/" in tag}
    assert {"goodput", "ettr", "restarts", "steps_redone", "seconds/start"} <= run.keys()
    for name, points in run.items():
        steps, values = zip(*points, strict=True)
        assert list(steps) == sorted(set(steps)), "each step once"
        if name in ("restarts", "steps_redone"):
            assert list(values) == sorted(values)
    assert run["restarts"][-1][1] == len(KILLED_AT)
    assert all(0 <= value < 1 for _, value in run["goodput"])


def test_tensorboard_shows_each_step_once_and_nothing_is_hidden(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    killed, undisturbed = (logged(tmp_path, steps, tensorboard=True) for steps in (KILLED_AT, []))
    assert len(shown(undisturbed)["loss"]) == 32
    assert of_the_training(shown(killed)) == of_the_training(shown(undisturbed))
    assert_of_one_run(killed)


def test_steps_on_another_axis_are_not_hidden(tmp_path: Path) -> None:
    """A hundred samples a step: what is logged by samples lies behind every step, and is not to be purged by them."""
    pytest.importorskip("tensorboard")
    found = shown(logged(tmp_path, KILLED_AT[1:2], tensorboard=True, own_axis=True))
    assert [step for step, _ in found["by samples"]] == [100 * step for step in range(1, 33)]
    assert {step for step, _ in found["loss"]} == set(range(32))


def test_two_loggers_of_one_folder_are_both_restored(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    loggers = [kind(tmp_path, version=0) for kind in (TensorBoardLogger, CSVLogger)]
    logs = Logs(SimpleNamespace(loggers=loggers), Patches())  # type: ignore[arg-type]
    states = []
    for step in (5, 6):
        for logger in loggers:
            logger.log_metrics({"loss": 1.0}, step)
        states.append(logs.state_dict())
    logs.load_state_dict(states[0])
    assert logs.state_dict() == states[0] != states[1]
    assert [each["highest"] for each in states[0].values() if "highest" in each] == [5]


def test_rows_that_are_not_written_are_returned_once_and_again_after_a_restore(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for kind in (CSVLogger, TensorBoardLogger):
        logger = kind(tmp_path / kind.__name__)
        logs = Logs(SimpleNamespace(loggers=[logger]), Patches())  # type: ignore[arg-type]
        logs.follow_rows()

        def new(*steps: int, logger: Any = logger, logs: Logs = logs) -> list[int]:
            for step in steps:
                logger.log_metrics({"loss": 1.0}, step)
            return [number for _, number, _ in logs.new_rows()]

        assert [new(1, 2), new(), new(3)] == [[0, 1], [], [2]]
        state = logs.state_dict()
        logger.save()
        assert [new(), new(4)] == [[], [3]]
        logs.load_state_dict(state)
        assert [new(), new(4)] == ([[0, 1, 2], [3]] if kind is CSVLogger else [[], [4]])


def fit(folder: Path, run: Path, version: int | None = 0) -> CSVLogger:
    logger = CSVLogger(folder, version=version)
    options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    L.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        callbacks=[AutoResume(run)],
        **options,
    ).fit(Worsens())
    return logger


def test_a_fixed_version_does_not_delete_what_another_run_has_logged(tmp_path: Path) -> None:
    folder = Path(fit(tmp_path, tmp_path / "one").log_dir)
    before = []
    for run in ("two", "three"):
        before.append((folder / "metrics.csv").read_text())
        fit(tmp_path, tmp_path / run)
    assert [(folder / f"metrics-{number}.csv").read_text() for number in (1, 2)] == before
    assert (folder / "metrics.csv").exists()
