"""The temporary folder of a launch, for its sockets; removed with the launch, as are the folders of dead launches."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SOCKET_PATH_BYTES = 107  # limit of the path of a Unix socket
_LONGEST_NAME = "/_ft_launcher4194304_to_rmon.socket"  # of NVRx's sockets


@contextmanager
def launch_folder() -> Iterator[Path | None]:
    """A new folder that only this user may enter, removed at the end; ``None`` if it cannot be created.

    Removes the folders that killed launches of this user have left on this node. A running launch holds a lock on its
    folder, which the kernel releases however the launch ends.
    """
    folder, lock = _make()
    try:
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def keep_sockets_in(folder: str) -> None:
    """Makes ``multiprocessing`` create its sockets in a folder, in this process and in its child processes.

    Each data-loader worker has such a socket, which nothing removes when the worker is killed.

    Args:
        folder: The folder of the launch, which is removed with the launch.
    """
    from multiprocessing.util import get_temp_dir  # torch imports it, but not every script does

    before, tempfile.tempdir = tempfile.tempdir, folder
    with suppress(OSError):
        get_temp_dir()  # made once, and known to all child processes
    tempfile.tempdir = before


def _make() -> tuple[Path | None, int]:
    prefix = _prefix()
    made = None
    try:
        where = _base(prefix)
        for folder in abandoned_folders():
            shutil.rmtree(folder, ignore_errors=True)
        while True:
            made = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
            if (lock := _lock(made)) >= 0:  # otherwise another launch that starts now has taken it for abandoned
                return made, lock
    except OSError:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        return None, -1


def _base(prefix: str) -> str:
    longest = f"{tempfile.gettempdir()}/{prefix}12345678{_LONGEST_NAME}"
    return tempfile.gettempdir() if len(os.fsencode(longest)) <= _SOCKET_PATH_BYTES else "/tmp"


def _lock(folder: Path) -> int:
    """Takes the lock of a folder. Returns its file descriptor, or -1 if another process has it or the folder is gone.

    Raises:
        OSError: If the file system has no such locks.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return -1
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.lstat(folder)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return -1


def abandoned_folders() -> Iterator[Path]:
    """The folders that killed launches of this user left on this node; each is locked until the next is asked for."""
    prefix = _prefix()
    for folder in Path(_base(prefix)).glob(f"{prefix}*"):
        with suppress(OSError):
            about = folder.lstat()
            if about.st_uid == os.getuid() and stat.S_ISDIR(about.st_mode) and (lock := _lock(folder)) >= 0:
                try:
                    yield folder
                finally:
                    os.close(lock)


def _prefix() -> str:
    return f"lightning-resilience-{os.getuid()}-"
