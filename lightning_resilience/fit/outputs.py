"""The folders of Lightning's own outputs: loggers' files, ``ModelCheckpoint``'s files, ``LightningCLI``'s config.

By default every start of a script creates new folders: the next ``version_N``, or one named after the time (Hydra).
Then ``best_model_path`` and the best k checkpoints cover only the last start, and the logs are split. A fit that has
begun before reuses its folders.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_resilience._lightning import lightning_callbacks, lightning_loggers, lightning_patches
from lightning_resilience.checkpoint import checkpoint_file
from lightning_resilience.fit import checkpoint_io

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)


def record(trainer: Trainer, run: str) -> dict[str, Any]:
    """The folders of a fit, for :func:`reuse`; called on all ranks after the set-up.

    Args:
        trainer: The Trainer of the fit.
        run: The identity of the run: a copy of its directory does not reuse the folders of the original.
    """
    return {
        "run": run,
        "loggers": [_location(logger) for logger in lightning_loggers.file_loggers(trainer)],
        "checkpoints": {each.state_key: str(each.dirpath) for each in _checkpoints(trainer) if each.dirpath},
        "configs": {str(path): _digest(path) for _, path in _configs(trainer)},
    }


class Folders(NamedTuple):
    """The folders of an earlier attempt of a fit that still exist; see :func:`folders`.

    Attributes:
        is_first: Whether there was no earlier attempt.
        loggers: The folder and version of each file logger; ``None`` for a logger that begins anew.
        checkpoints: The folders of ``ModelCheckpoint``, by the callbacks' state keys.
        configs: The configurations that were written, with their digests.
    """

    is_first: bool
    loggers: list[tuple[str, int | str] | None]
    checkpoints: dict[str, str]
    configs: dict[str, str]


def reuse(trainer: Trainer, before: Folders) -> None:
    """Has a fit write into the folders of an earlier attempt; called on all ranks before the set-up.

    Args:
        trainer: The Trainer of the fit.
        before: The folders of that attempt, as rank 0 sees them.
    """
    loggers = lightning_loggers.file_loggers(trainer)
    for number, logger in enumerate(loggers):
        folder = before.loggers[number]
        if folder is not None:
            lightning_loggers.set_logger_folder(logger, *folder)
            if trainer.is_global_zero:
                log.info("Continuing the logs of this fit in %s.", logger.log_dir)
                lightning_loggers.append_to_csv(logger)
        elif "://" not in logger.save_dir and not logger.save_dir.startswith(("~", "$")):
            # Resolved now: the next attempt may run in another directory.
            lightning_loggers.set_logger_folder(logger, os.path.abspath(logger.save_dir), None)
        if folder is None and trainer.is_global_zero:
            _keep_csv_of_another_run(logger)
    for callback in _checkpoints(trainer):
        began = before.checkpoints.get(callback.state_key)
        if began is not None and callback.dirpath not in (None, began) and trainer.is_global_zero:
            log.info("ModelCheckpoint continues in %s, where this fit began, not in %s.", began, callback.dirpath)
        callback.dirpath = began or callback.dirpath
    if not before.is_first:
        _allow_overwriting(trainer, before.configs)


def _keep_csv_of_another_run(logger: Any) -> None:
    """Renames the log of another run, which a ``CSVLogger`` with a fixed version would delete."""
    path = lightning_loggers.unopened_csv(logger)
    if path is None or not os.path.isfile(path):
        return
    stem = path.removesuffix(".csv")
    aside = next(name for n in itertools.count(1) if not os.path.exists(name := f"{stem}-{n}.csv"))
    os.rename(path, aside)
    log.warning("%s belonged to another run; renamed it to %s.", path, os.path.basename(aside))


def overwrite_lost(trainer: Trainer, patches: lightning_patches.Patches, metadata: dict[str, Any]) -> None:
    """Has ``ModelCheckpoint`` overwrite its files from after the restored state.

    Lightning would save beside such a file (``-v1``) and never remove it.

    Args:
        trainer: The Trainer of a fit whose state was restored.
        patches: Patches that are undone after the fit.
        metadata: Identifies the files of the fit.
    """
    for callback, last_saved in lightning_callbacks.last_saves(trainer):
        lost: set[str] = set()
        if trainer.is_global_zero and os.path.isdir(callback.dirpath):
            files = Path(callback.dirpath).rglob(f"*{callback.FILE_EXTENSION}")
            lost = {str(file) for file in files if file.is_file() and _is_lost(file, last_saved, metadata)}
        lightning_callbacks.overwrite(callback, patches, lost)


def _is_lost(file: Path, last_saved: int, metadata: dict[str, Any]) -> bool:
    try:
        stamp = checkpoint_file.read_stamp(file)
    except (OSError, checkpoint_file.CorruptCheckpoint):
        return False
    saved = stamp.metadata if stamp is not None else {}
    own = all(saved.get(key) == metadata[key] for key in ("id", "fit"))
    return own and int(saved.get("step", -1)) > last_saved


def folders(trainer: Trainer, recorded: dict[str, Any] | None) -> Folders:
    """The recorded folders that still exist, for the loggers and callbacks that the Trainer has now; on rank 0.

    Args:
        trainer: The Trainer of the fit.
        recorded: The result of :func:`record` in an earlier attempt; ``None`` if there was none.
    """
    loggers = lightning_loggers.file_loggers(trainer)
    before = (recorded or {}).get("loggers", [])
    same = [(type(each).__name__, each.name) for each in loggers] == [(each["kind"], each["name"]) for each in before]
    found = [(each["save_dir"], each["version"]) if os.path.isdir(each["log_dir"]) else None for each in before]
    checkpoints = (recorded or {}).get("checkpoints", {})
    return Folders(
        recorded is None,
        found if same else [None] * len(loggers),
        {key: path for key, path in checkpoints.items() if os.path.isdir(path)},
        (recorded or {}).get("configs", {}),
    )


def _location(logger: Any) -> dict[str, Any]:
    return {
        "kind": type(logger).__name__,
        "name": logger.name,
        "save_dir": logger.save_dir,
        "version": logger.version,
        "log_dir": logger.log_dir,
    }


def _checkpoints(trainer: Trainer) -> list[Any]:
    return lightning_callbacks.callbacks_named(trainer, "ModelCheckpoint")


def _configs(trainer: Trainer) -> Iterator[tuple[Any, Path]]:
    """The callbacks with which a ``LightningCLI`` saves its configuration, with the paths of the files."""
    for callback in lightning_callbacks.callbacks_named(trainer, "SaveConfigCallback"):
        if callback.save_to_log_dir and trainer.log_dir is not None:
            yield callback, Path(trainer.log_dir, callback.config_filename)


def _allow_overwriting(trainer: Trainer, written: dict[str, Any]) -> None:
    """Has a ``LightningCLI`` overwrite the configuration of an earlier attempt instead of refusing to."""
    for callback, path in _configs(trainer):
        own = checkpoint_io.from_rank_zero(trainer.strategy, partial(_is_own, callback, path, written))
        callback.overwrite = own or callback.overwrite


def _is_own(callback: Any, path: Path, written: dict[str, str]) -> bool:
    if (digest := _digest(path)) is None:
        return False
    # An attempt may have been killed before it recorded its configuration.
    return written.get(str(path)) == digest or bool(
        path.read_text() == callback.parser.dump(callback.config, skip_none=False)
    )


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    except OSError:  # the result of rank 0 counts
        return None
