"""Small files that a crash cannot tear: written beside, synced, renamed, and the directory synced after."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Makes a rename inside ``directory`` survive a power loss (a file's own ``fsync`` does not cover its name)."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_path(path: str | os.PathLike[str]) -> Path:
    """A name beside ``path`` that no other writer uses and that no reader takes for a finished file."""
    path = Path(path)
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


def publish(path: str | os.PathLike[str], write: Callable[[BinaryIO], None]) -> None:
    """Calls ``write`` on a temporary file in the directory of ``path`` and renames it to ``path`` once it is on disk.

    A reader sees the old content or the new one, never a part. If ``write`` raises, ``path`` is untouched and the
    temporary file is removed.
    """
    temporary = temporary_path(path)
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(temporary.parent)


def _write_all(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def write_json(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Publishes ``content`` as JSON."""
    data = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    publish(path, lambda file: _write_all(file, data))


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The JSON object in ``path``, or ``None`` if the file is missing or holds anything else."""
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
