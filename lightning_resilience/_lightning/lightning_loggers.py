"""Loggers, and the files that they write. Loggers are recognized by the names of their classes, as callbacks are."""

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
    """Creates a ``WandbLogger`` of the Lightning package that the script uses: a Trainer accepts no other.

    If both packages are imported, the script has imported the first one; this package may have imported the other.
    """
    package = next(name for name in sys.modules if name in ("lightning.pytorch", "pytorch_lightning"))
    return importlib.import_module(f"{package}.loggers").WandbLogger(**settings)


def file_loggers(trainer: Trainer) -> list[Any]:
    """The loggers of ``trainer`` that write each version of an experiment to its own folder."""
    return [each for each in trainer.loggers if is_named(each, "TensorBoardLogger", "CSVLogger")]


def are_lightnings_own(loggers: list[Any]) -> bool:
    """Whether all these :func:`file_loggers` are Lightning's classes: a class of the user may write differently."""
    return all(type(each).__module__.startswith(("lightning.pytorch", "pytorch_lightning")) for each in loggers)


def why_others_cannot_log(trainer: Trainer) -> str | None:
    """The reason why another process cannot continue the logs of rank 0; ``None`` if it can."""
    known = file_loggers(trainer)
    if other := next((each for each in trainer.loggers if each not in known), None):
        return f"{type(other).__name__} logs from the process of rank 0"
    return None if are_lightnings_own(known) else "a logger defined by the script logs from the process of rank 0"


def set_logger_folder(logger: Any, save_dir: str, version: int | str | None) -> None:
    """Sets the folder and version of one of :func:`file_loggers`; version ``None``: the logger chooses it as usual.

    Publicly both can only be chosen when the logger is created, and no run is known then.
    """
    if version is not None and logger._experiment is not None:  # the script has already logged something
        logger.save()
        logger._experiment = None
    logger._root_dir = save_dir
    if hasattr(logger, "_save_dir"):  # the CSVLogger keeps the folder here too
        logger._save_dir = save_dir
    if version is not None:
        logger._version = version


def append_to_csv(logger: Any) -> None:
    """Opens the files of a ``CSVLogger`` without deleting what an earlier attempt has logged."""
    module = module_of(logger, "CSVLogger")
    if module is None or logger._experiment is not None:
        return
    patches = Patches()
    patches.set(module.ExperimentWriter, "_check_log_dir_exists", lambda _: None)  # it deletes the old file
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

    Lightning rewrites the file in place: if the process is killed then, the old content is lost.
    """
    patches.set(writer, "_rewrite_with_new_header", write)


def event_file(writer: Any) -> Any:
    """The file to which TensorBoard's ``SummaryWriter`` writes; opens it if needed. Lightning uses the same method."""
    return writer._get_file_writer()


def event_files(writer: Any) -> list[Any]:
    """The files to which torch's own ``SummaryWriter`` writes now; none for another writer, such as tensorboardX's."""
    is_known = type(writer).__module__ == "torch.utils.tensorboard.writer"
    return list((writer.all_writers or {}).values()) if is_known else []


def add_serialized_event(file: Any, event: bytes) -> None:
    """Writes a serialized event, which has its own step and time, to an :func:`event_file`."""
    parsed = importlib.import_module("tensorboard.compat.proto.event_pb2").Event.FromString(event)
    file.add_event(parsed, None, parsed.wall_time)


def unopened_csv(logger: Any) -> str | None:
    """The file that a so far unused ``CSVLogger`` would delete at its first use; ``None`` for any other logger."""
    is_unopened = is_named(logger, "CSVLogger") and logger._experiment is None
    return os.path.join(logger.log_dir, "metrics.csv") if is_unopened else None


def add_to_logged_steps(trainer: Trainer, patches: Patches, more: Callable[[], dict[str, float]]) -> None:
    """Adds metrics to each training step that Lightning logs, in the same row of the loggers.

    Lightning calls ``log_metrics`` every ``log_every_n_steps``, even if the module logs nothing; other steps cost
    nothing. The added metrics reach neither the progress bar, nor ``trainer.callback_metrics``, by which
    ``ModelCheckpoint`` chooses, nor ``trainer.logged_metrics``, which must be the same on all ranks.

    Args:
        trainer: The Trainer.
        patches: Undone after the fit.
        more: Called for each such step; returns the metrics to add.
    """
    connector = trainer._logger_connector
    log_metrics: Callable[[Any, int | None], None] = connector.log_metrics
    stage: Any = trainer.state.stage
    training = type(stage).TRAINING

    def log_more(metrics: Any, step: int | None = None) -> None:
        # Adds nothing in a validation or at the end of an epoch: a step has been logged right before.
        if trainer.state.stage is not training or connector._first_loop_iter is None:
            log_metrics(metrics, step)
            return
        added = more()
        log_metrics({**metrics, **added}, step)
        for name in added:
            connector._logged_metrics.pop(name, None)

    patches.set(connector, "log_metrics", log_more)


def log_metrics(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Logs metrics to all loggers, at the step at which Lightning logs now; on rank 0 only."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logged_step(trainer))
