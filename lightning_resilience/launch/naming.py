"""The run directory of a command: one for each script with its arguments, and the newest of those begun afresh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from lightning_resilience._files import load_json, sync_directory, write_json
from lightning_resilience.run.events import LaunchStart
from lightning_resilience.run.history import History
from lightning_resilience.run.ledger import read_ledger
from lightning_resilience.run.run_directory import RunDirectory
from lightning_resilience.run.settings import has_arguments, identity_of_command

FOLDER = "runs"
"""Folder of the run directories of commands that do not name one."""


def last_launch(path: Path) -> LaunchStart | None:
    """The last launch in a run directory.

    Args:
        path: The run directory.
    """
    return History(read_ledger(RunDirectory(path).ledger)).last(LaunchStart)


def script_name(command: Sequence[str]) -> str:
    """The name of a command's module or script, without folder and ending.

    Args:
        command: The script with its arguments, or ``-m``, a module and its arguments.
    """
    return command[1] if command[0] == "-m" else Path(command[0]).stem


def default_directory(command: Sequence[str]) -> Path:
    """The run directory of a command that names none.

    It is ``runs/SCRIPT`` where there are no arguments, and ``runs/SCRIPT-1a2b3c4d`` where there are, or where
    ``runs/SCRIPT`` holds the run of another command. A run that has begun in ``runs/SCRIPT`` continues there.

    Args:
        command: The script with its arguments, or ``-m``, a module and its arguments.
    """
    here = Path.cwd()
    plain = here / FOLDER / script_name(command)
    identity = identity_of_command(command, here)
    held = last_launch(plain)
    if held is None:
        is_ours = not has_arguments(command)
    else:
        is_ours = held.command is not None and identity_of_command(held.command, here) == identity
    return plain if is_ours else plain.with_name(f"{plain.name}-{identity}")


def newest(path: Path) -> Path:
    """The run directory in which a command continues: the newest that was begun afresh beside its own, or its own.

    Args:
        path: The run directory that the command has or names.
    """
    begun = [path.with_name(name) for name in _fresh(path)]
    return next((beside for beside in reversed(begun) if beside.is_dir()), path)


def next_afresh(path: Path) -> Path:
    """The run directory that :func:`begin_afresh` would make now.

    Args:
        path: The run directory that the command has or names; returned unchanged if no run has begun in it.
    """
    if not _fresh(path) and last_launch(path) is None:
        return path
    return next(beside for number in count(2) if not (beside := path.with_name(f"{path.name}-{number}")).exists())


def begin_afresh(path: Path) -> Path:
    """Makes a new run directory beside one in which a run has begun: ``runs/gpt-2`` beside ``runs/gpt``.

    Args:
        path: As for :func:`next_afresh`.
    """
    while (beside := next_afresh(path)) != path:
        path.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            beside.mkdir()
            write_json(_index(path), {"fresh": [*_fresh(path), beside.name]})
            sync_directory(path.parent)
            break
    return beside


def _index(path: Path) -> Path:
    return path / "fresh.json"


def _fresh(path: Path) -> list[str]:
    names = (load_json(_index(path)) or {}).get("fresh")
    names = names if isinstance(names, list) else []
    return [name for name in names if isinstance(name, str) and os.path.basename(name) == name]
