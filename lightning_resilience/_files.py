"""Writes small files that a crash cannot tear: writes a temporary file, syncs it, renames it, syncs the directory."""

from __future__ import annotations

import errno
import glob
import json
import logging
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import psutil

from lightning_resilience._processes import pid_namespace

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 60.0
"""How many seconds failing reads are retried at a start before the start fails."""

_LASTING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""Errors that do not go away by waiting."""
OF_A_PATH = (*_LASTING, errno.ENOENT, errno.EEXIST, errno.ELOOP)
"""Errors that concern a path rather than the storage, or that the storage may report for a while by mistake."""
_SAID_EVERY_S = 15.0
_LONGEST_PAUSE_S = 2.0

_TEMPORARY_NAME = re.compile(r"\..+\.(?P<host>[0-9a-f]{8})-(?P<pid>[0-9]+)-[0-9a-f]{8}\.tmp")
_ABANDONED_AFTER_S = 24 * 3600


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Makes a rename inside ``directory`` survive a power loss (a file's own ``fsync`` does not cover its name)."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems can sync files only
            raise
    finally:
        os.close(fd)


def make_directory(directory: str | os.PathLike[str]) -> None:
    """Creates ``directory`` and its parents, so that they survive a power loss."""
    directory = Path(directory)
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)


def matching(directory: str | os.PathLike[str], *patterns: str) -> list[Path]:
    """The matching paths in ``directory``; unlike ``Path.glob`` it works while other processes remove folders there."""
    return [Path(directory, name) for pattern in patterns for name in glob.glob(pattern, root_dir=directory)]


def _host() -> str:
    # Containers on one host may share the host's name, but not the process ids.
    return f"{zlib.crc32(f'{os.uname().nodename} {pid_namespace()}'.encode()):08x}"


def temporary_path(path: str | os.PathLike[str]) -> Path:
    """A name beside ``path`` that no other writer uses and that no reader takes for a finished file."""
    path = Path(path)
    # Shortened, because a name has 255 bytes at most, and checkpoint names contain metrics.
    return path.with_name(f".{path.name[:50]}.{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


def is_temporary(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` has a name made by :func:`temporary_path`."""
    return _TEMPORARY_NAME.fullmatch(Path(path).name) is not None


def is_abandoned(path: Path) -> bool:
    """Whether ``path`` is a temporary file that no writer will finish.

    A writer may still finish the file in two cases: its process lives on this host, or it ran on another host (where
    nothing is known of it) and the file is younger than a day.

    Raises:
        OSError: If the file does not exist any more.
    """
    if (name := _TEMPORARY_NAME.fullmatch(path.name)) is None:
        return False
    is_old = path.lstat().st_mtime < time.time() - _ABANDONED_AFTER_S
    return is_old or (name["host"] == _host() and not psutil.pid_exists(int(name["pid"])))


def clean_temporaries(directory: str | os.PathLike[str]) -> list[Path]:
    """Removes the temporary files of killed writers in ``directory`` (:func:`is_abandoned`); returns their paths."""
    removed = []
    for path in sorted(Path(directory).glob(".*.tmp")):
        try:
            if not is_abandoned(path):
                continue
            if path.is_dir() and not path.is_symlink():  # A killed process was about to remove this folder.
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(path)
        except FileNotFoundError:  # Finished or removed by another process in the meantime.
            continue
    return removed


@contextmanager
def _errors_name(path: str | os.PathLike[str], temporary: Path) -> Iterator[None]:
    """Makes errors about a temporary file name the final file instead."""
    try:
        yield
    except OSError as error:
        if error.filename == os.fspath(temporary):
            error.filename = os.fspath(path)
        raise


@contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path, which is renamed to ``path`` at the end of the block, or removed if the block raises."""
    temporary = temporary_path(path)
    try:
        with _errors_name(path, temporary):
            yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # this fails too if the storage has become read-only; the first error counts
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(temporary.parent)


def publish(
    path: str | os.PathLike[str], write: Callable[[BinaryIO], T], before_publish: Callable[[], None] | None = None
) -> T:
    """Calls ``write`` on a temporary file in the directory of ``path`` and renames it to ``path`` once it is on disk.

    A reader sees the old content or the new content, never a part. If anything raises, ``path`` is unchanged and the
    temporary file is removed.

    Args:
        path: The file to write or to replace.
        write: Writes the content; may read it back. Its result is returned.
        before_publish: Called when the content is on disk, right before the rename. If it raises, there is no rename.
    """
    with _replacing(path) as temporary:
        with open(temporary, "x+b") as file:
            result = write(file)
            file.flush()
            os.fsync(file.fileno())
        if before_publish is not None:
            before_publish()
    return result


def publish_link(path: str | os.PathLike[str], target: str) -> None:
    """Makes ``path`` a symbolic link to ``target`` in one step: ``path`` is never missing in between."""
    with _replacing(path) as temporary:
        os.symlink(target, temporary)


def write_json(
    path: str | os.PathLike[str], content: dict[str, Any], before_publish: Callable[[], None] | None = None
) -> None:
    """Publishes ``content`` as JSON."""
    data = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    publish(path, lambda file: file.write(data), before_publish)


def create_json(path: str | os.PathLike[str], content: dict[str, Any]) -> bool:
    """Publishes ``content`` as JSON, unless the file exists.

    Returns:
        Whether this call has published it; true for only one of several writers.
    """
    path, written = Path(path), temporary_path(path)
    with _errors_name(path, written):
        write_json(written, content)
    try:
        os.link(written, path)
    except FileExistsError:
        return False
    except OSError:  # storage without hard links: then the last writer counts
        write_json(path, content)
        return read_json(path) == content
    finally:
        written.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def load_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The JSON object in ``path``, or ``None`` if the file is missing or holds anything else.

    Raises:
        OSError: If the storage fails, so that the content of the file is unknown.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Like :func:`load_json`, but returns ``None`` also if the storage fails."""
    try:
        return load_json(path)
    except OSError:
        return None


def _lasts(error: OSError) -> bool:
    # A file in /proc exists or does not; elsewhere a file may seem missing because a server shows it late.
    is_kernels = error.errno == errno.ENOENT and os.path.realpath(str(error.filename)).startswith("/proc/")
    return error.errno in _LASTING or is_kernels


class Patience:
    """Retries calls that fail because of the storage, for about a minute in all.

    Such failures are common right after a fault of a node: stale handles, missing mounts. Only the time spent on
    failures counts, over all calls.

    Args:
        waiting: Called between retries.
    """

    def __init__(self, waiting: Callable[[], None] = lambda: None) -> None:
        self._waiting = waiting
        self.left_s = PATIENCE_S

    def __call__(self, action: Callable[[], T], who: str = "") -> T:
        """Calls ``action`` until it succeeds, and returns its result.

        Args:
            action: Called again after an ``OSError``.
            who: Prefix of log lines, such as ``Rank 3 on n7``.

        Raises:
            OSError: The last error, when no patience is left or waiting does not help.
        """
        failed_s, said_s, pause_s = 0.0, -_SAID_EVERY_S, 0.1
        prefix = f"{who}: " if who else ""
        while True:
            begun = time.monotonic()
            try:
                result = action()
            except OSError as error:
                if self.left_s <= 0 or _lasts(error):
                    raise
                if failed_s - said_s >= _SAID_EVERY_S:
                    said_s = failed_s
                    log.warning("%sstorage is failing (%s); retrying for %.0f s.", prefix, error, self.left_s)
            else:
                if failed_s:
                    log.info("%sstorage works again after %.0f s.", prefix, failed_s)
                return result
            self._waiting()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            spent_s = time.monotonic() - begun
            failed_s += spent_s
            self.left_s -= spent_s
