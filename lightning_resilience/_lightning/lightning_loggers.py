"""Loggers, and the files they write. They are recognised by the names of their classes, as callbacks are."""

from __future__ import annotations

import csv
import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_resilience._lightning.lightning_callbacks import is_named, module_of
from lightning_resilience._lightning.lightning_patches import Patches
from lightning_resilience._lightning.lightning_progress import logged_step

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def wandb_logger(**settings: Any) -> Any:
    """A ``WandbLogger`` of the Lightning package that the script uses: a Trainer takes no other's.

    Of two that were imported, the script has imported the first one; this file may have imported the other.
    """
    package = next(name for name in sys.modules if name in ("lightning.pytorch", "pytorch_lightning"))
    return importlib.import_module(f"{package}.loggers").WandbLogger(**settings)


def file_loggers(trainer: Trainer) -> list[Any]:
    """The loggers of ``trainer`` that write each version of an experiment to a folder of its own."""
    return [each for each in trainer.loggers if is_named(each, "TensorBoardLogger", "CSVLogger")]


def are_lightnings_own(loggers: list[Any]) -> bool:
    """Whether these :func:`file_loggers` write as is known: a class of the user's may write otherwise."""
    return all(type(each).__module__.startswith(("lightning.pytorch", "pytorch_lightning")) for each in loggers)


def why_others_cannot_log(trainer: Trainer) -> str | None:
    """Why another process cannot go on with the logs of rank 0; ``None``: it can."""
    known = file_loggers(trainer)
    if other := next((each for each in trainer.loggers if each not in known), None):
        return f"{type(other).__name__} logs from the process of rank 0"
    return None if are_lightnings_own(known) else "a logger defined by the script logs from the process of rank 0"


def set_logger_folder(logger: Any, save_dir: str, version: int | str | None) -> None:
    """Sets the folder and version of one of :func:`file_loggers`; ``None``: the version that it would take anyway.

    Both are read-only for others, and are to be chosen before the logger is made, where no run is known.
    """
    if version is not None and logger._experiment is not None:  # the script has already logged something
        logger.save()
        logger._experiment = None
    logger._root_dir = save_dir
    if hasattr(logger, "_save_dir"):  # by which the CSVLogger has the same
        logger._save_dir = save_dir
    if version is not None:
        logger._version = version


def append_to_csv(logger: Any) -> None:
    """Opens the files of a ``CSVLogger`` without deleting what an earlier attempt has logged."""
    module = module_of(logger, "CSVLogger")
    if module is None or logger._experiment is not None:
        return
    patches = Patches()
    patches.set(module.ExperimentWriter, "_check_log_dir_exists", lambda _: None)  # which deletes
    try:
        writer = logger.experiment
    finally:
        patches.undo()
    try:
        with open(writer.metrics_file_path, "rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)  # a kill may have cut its last line
    except FileNotFoundError:
        return
    writer.metrics_keys = next(csv.reader(content.decode().splitlines()), [])


def on_new_columns(writer: Any, patches: Patches, write: Callable[[list[str]], None]) -> None:
    """Calls ``write`` to rewrite a ``CSVLogger``'s file when it gets more columns.

    Lightning does so in place: who is killed then has nothing left of it.
    """
    patches.set(writer, "_rewrite_with_new_header", write)


def event_file(writer: Any) -> Any:
    """The file to which TensorBoard's ``SummaryWriter`` writes; opened if it is not. Lightning asks for it likewise."""
    return writer._get_file_writer()


def event_files(writer: Any) -> list[Any]:
    """The files to which TensorBoard's own ``SummaryWriter`` writes now; none of another one's, as tensorboardX's."""
    is_known = type(writer).__module__ == "torch.utils.tensorboard.writer"
    return list((writer.all_writers or {}).values()) if is_known else []


def add_serialized_event(file: Any, event: bytes) -> None:
    """Writes an event with its own step and time to an :func:`event_file`."""
    parsed = importlib.import_module("tensorboard.compat.proto.event_pb2").Event.FromString(event)
    file.add_event(parsed, None, parsed.wall_time)


def unopened_csv(logger: Any) -> str | None:
    """The file that a ``CSVLogger`` would delete when it is first used, which it has not been yet."""
    is_unopened = is_named(logger, "CSVLogger") and logger._experiment is None
    return os.path.join(logger.log_dir, "metrics.csv") if is_unopened else None


def add_to_logged_steps(trainer: Trainer, patches: Patches, more: Callable[[], dict[str, float]]) -> None:
    """Gives loggers more metrics of each training step that Lightning logs, in the same row.

    Lightning calls ``log_metrics`` every ``log_every_n_steps``, also if the module logs nothing; other steps cost
    nothing. What is added reaches neither the progress bar, nor ``trainer.callback_metrics``, by which
    ``ModelCheckpoint`` chooses, nor ``trainer.logged_metrics``, which are the same on all ranks.

    Args:
        trainer: The Trainer.
        patches: What undoes it.
        more: Called for each such step.
    """
    connector = trainer._logger_connector
    log_metrics: Callable[[Any, int | None], None] = connector.log_metrics
    stage: Any = trainer.state.stage
    training = type(stage).TRAINING

    def log_more(metrics: Any, step: int | None = None) -> None:
        # Of a validation and of the end of an epoch nothing is added: a step has been logged right before.
        if trainer.state.stage is not training or connector._first_loop_iter is None:
            log_metrics(metrics, step)
            return
        added = more()
        log_metrics({**metrics, **added}, step)
        for name in added:
            connector._logged_metrics.pop(name, None)

    patches.set(connector, "log_metrics", log_more)


def log_metrics(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Gives metrics to all loggers, at the step at which Lightning logs now; on rank 0 only."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logged_step(trainer))
