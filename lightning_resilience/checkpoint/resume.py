"""Finds the checkpoint that a run resumes from: the newest, by its step, that passes verification."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_resilience.checkpoint import checkpoint_file, dcp
from lightning_resilience.run.run_directory import CHECKPOINT_NAME, RunDirectory

log = logging.getLogger(__name__)


def checkpoint_name(step: int, final: bool = False) -> str:
    """The name of the checkpoint of ``step``. Names sort by step; a final checkpoint is the last of its step."""
    return f"step-{step:012d}{'-final' if final else ''}.ckpt"


def checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """The published checkpoints in ``directory``, newest first by step, whether or not they can be read."""
    try:
        entries = list(Path(directory).iterdir())
    except FileNotFoundError:
        return []
    found = [(int(name[1]), bool(name[2]), path) for path in entries if (name := CHECKPOINT_NAME.fullmatch(path.name))]
    return [path for _, _, path in sorted(found, reverse=True)]


def step_of(path: str | os.PathLike[str]) -> int:
    """The step in a checkpoint's name.

    Raises:
        ValueError: If ``path`` is not named like a checkpoint of this package.
    """
    if (match := CHECKPOINT_NAME.fullmatch(Path(path).name)) is None:
        raise ValueError(f"{path} is not named like a checkpoint (step-000000000012.ckpt)")
    return int(match[1])


def is_final(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint's name marks it as the last state of a finished fit."""
    return (match := CHECKPOINT_NAME.fullmatch(Path(path).name)) is not None and match[2] is not None


def verify(
    path: Path, expected: dict[str, Any] | None = None, mine: Callable[[str], bool] = lambda name: True
) -> checkpoint_file.Stamp:
    """Verifies every byte of a checkpoint of this package, and refuses a directory if loading it would execute code.

    Args:
        path: A file, or the directory of a sharded checkpoint.
        expected: Metadata that it must have, such as ``{"fit": 0}``.
        mine: Which files of a directory to verify; see :func:`~.checkpoint_file.verify_directory`.

    Raises:
        checkpoint_file.CorruptCheckpoint: If it is damaged, was not written by this package, or has other metadata.
    """
    stamp = checkpoint_file.verify_directory(path, mine) if path.is_dir() else checkpoint_file.verify(path)
    if stamp is None:
        raise checkpoint_file.corrupt(path, "it has no checksum: it was not written by this package")
    for key, value in (expected or {}).items():
        if stamp.metadata.get(key) != value:
            raise checkpoint_file.corrupt(path, f"its {key} is {stamp.metadata.get(key)!r}, not {value!r}")
    if path.is_dir():
        dcp.check(path, mine)
    return stamp


def retain(directory: str | os.PathLike[str], keep: int, step: int) -> None:
    """Removes all but the newest ``keep`` checkpoints up to ``step``; a failed removal is only logged.

    Checkpoints of later steps are from a course that the fit has left, or were rejected and could not be moved. They
    are not counted: otherwise a fit that has rolled back would remove its own new checkpoints.
    """
    try:
        old = [path for path in checkpoints(directory) if step_of(path) <= step][keep:]
    except OSError as error:  # the next save tries again
        log.warning("Old checkpoints could not be listed: %s", error)
        return
    for path in old:
        try:
            checkpoint_file.remove(path)
        except OSError as error:
            log.warning("The old checkpoint %s could not be removed: %s", path, error)


def resolve_resume_path(run_dir: str | os.PathLike[str], fit: int | None = None) -> Path | None:
    """The checkpoint that a run would resume from now.

    Args:
        run_dir: A run directory, or a folder of checkpoints.
        fit: Number of the fit in the script; default: the newest fit that has a valid checkpoint.

    Returns:
        The newest checkpoint that verifies, or ``None``. Nothing is moved or changed.
    """
    run = RunDirectory(run_dir)
    directories = [run.path]
    if run.fits:
        directories = [each.checkpoints for each in (reversed(run.fits) if fit is None else [run.fit(fit)])]
    for directory in directories:
        for path in checkpoints(directory):
            with suppress(checkpoint_file.CorruptCheckpoint):
                verify(path)
                return path
    return None
