"""The output of the ranks of a node: each rank writes to files of its own on this node, which other processes read.

A write to such a file never waits: neither for a terminal, nor for the process that shows it, nor for the storage of
the run directory. Only the first rank of a node keeps a terminal, if there is one: progress bars are drawn there.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_resilience._output import NAME, file_of
from lightning_resilience.launch.worker_group import worker_group

OUTPUT_VARIABLE = "LIGHTNING_RESILIENCE_OUTPUT"
"""Environment variable with the folder on this node for the output of ranks."""

_FILE = re.compile(r"([0-9a-f]{16})-([0-9]+)-([12])\.(out|terminal)")
_CHUNK = 1 << 16
_AT_A_TIME = 4 << 20
_BEHIND = 256 << 20  # how far behind the process that shows output may be
_NOT_KEPT = 32 << 20  # how far behind the thread that keeps output may be
_LEAVES_OUT = 8 << 20  # of more than this, only the end is kept
_REMOVED_AFTER_S = 30.0
_PUNCH_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


# What torch's C++ code writes on a rank that has lost the connection to rank 0's store, each with a stack of 20 lines.
_OF_LOST_STORE = re.compile(
    rb"(\[rank\d+\]:)?\[[WE]\d{4} [\d:.]+ \w+\.cpp:\d+\] \[c10d\] .*(reset by peer|likely closed|pipe)"
)
_OF_STACK = re.compile(rb"Exception raised from |frame #\d+: |<omitting python frames>")

_folder: str | None = None


def redirect_streams() -> None:
    """Makes this rank write to files of its own, if its launcher has a folder for them; ignores errors.

    Must be called again when this process enters the next group of ranks.
    """
    global _folder
    if (folder := os.environ.pop(OUTPUT_VARIABLE, _folder)) is None:
        return
    _folder = folder
    group, rank = worker_group()[:16], os.environ.get("RANK", "0")
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    streams: dict[tuple[int, int], list[int]] = {}
    for fd in (1, 2):
        if (found := file_of(fd)) is not None:
            streams.setdefault(found, []).append(fd)
    for fds in streams.values():
        keeps_terminal = is_first and os.isatty(fds[0])
        path = f"{folder}/{group}-{rank}-{fds[0]}.{'terminal' if keeps_terminal else 'out'}"
        with suppress(OSError):  # then the output goes where the launcher's goes, and is in no log
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            for fd in fds if not keeps_terminal else []:
                os.dup2(file, fd)
            os.close(file)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # last words are not left in a buffer


class RankFile:
    """What one rank writes to a stream. Two threads read it: one shows it, and one keeps it.

    Args:
        path: The file, named by :func:`redirect_streams`.
        found: The parts of its name.

    Attributes:
        group: The start of the workers to which the rank belongs; the same on all nodes.
        rank: The rank.
        target: The descriptor of the launcher on which the output is shown.
        is_terminal: Whether the rank writes to a terminal, so that another process writes the output to this file.
    """

    def __init__(self, path: Path, found: re.Match[str]) -> None:
        self.path = path
        self.group, self.rank, self.target = found[1], int(found[2]), int(found[3])
        self.is_terminal = found[4] == "terminal"
        self._shown = self._kept = self._freed = self._size_before = 0
        self._is_in_stack = False

    def show(self, write: Callable[[bytes], None], is_last: bool = False) -> bool:
        """Passes on output that was not shown yet, by whole lines unless the rank pauses within a line.

        Messages of torch's C++ code about a store that has gone are left out: the cause is reported elsewhere.

        Args:
            write: Shows it.
            is_last: Whether nothing comes after it.

        Returns:
            Whether there is more.
        """
        size = self._size()
        if self.is_terminal:
            self._shown = size
        if size - self._shown > _BEHIND:
            write(f"{NAME} {(size - self._shown) >> 20} MB of output of rank {self.rank} are not shown.\n".encode())
            self._shown = size - _CHUNK
        until = min(size, self._shown + _AT_A_TIME)
        while self._shown < until and (data := self._read(self._shown, _CHUNK)):
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if is_last or size == self._size_before or len(data) == _CHUNK > end == 0:
                end = len(data)
            if end == 0:
                break
            if data := self._without_stacks(data[:end]):
                write(data)
            self._shown += end
        self._size_before = size
        self._free(min(self._shown, max(self._kept, size - _NOT_KEPT)))
        return self._shown < size and until < size

    def _without_stacks(self, data: bytes) -> bytes:
        """Whole lines, without lines that only the log has."""
        if not self._is_in_stack and b"[c10d]" not in data:
            return data
        shown = []
        for line in data.splitlines(keepends=True):
            is_of_stack = self._is_in_stack and (not line.strip() or _OF_STACK.match(line) is not None)
            is_head = _OF_LOST_STORE.match(line) is not None
            self._is_in_stack = is_head or (is_of_stack and bool(line.strip()))  # an empty line ends it
            if not (is_head or is_of_stack):
                shown.append(line)
        return b"".join(shown)

    def keep(self, write: Callable[[bytes], None]) -> bool:
        """Passes on output that was not kept yet.

        Args:
            write: Keeps it. If it raises an exception, this method does, too, and passes the same on again next time.

        Returns:
            Whether there was anything.
        """
        size = self._size()
        begin = self._kept
        if (left_out := size - begin - _LEAVES_OUT) > 0:
            begin = size - _LEAVES_OUT
            write(f"\n{NAME} {left_out} bytes are left out here.\n".encode())
            self._kept = begin
        while self._kept < size and (data := self._read(self._kept, _CHUNK)):
            write(data)
            self._kept += len(data)
        return self._kept > begin

    def add(self, data: bytes) -> None:
        """Appends what the rank has written to a terminal."""
        with suppress(OSError), open(self.path, "ab") as file:
            file.write(data)

    def remove_if_over(self) -> bool:
        """Removes the file of a rank that has ended, once all of it is shown and kept; returns whether it is gone."""
        with suppress(OSError):
            about = self.path.stat()
            if min(self._shown, self._kept) < about.st_size or time.time() - about.st_mtime < _REMOVED_AFTER_S:
                return False
            self.path.unlink()
        return True

    def _size(self) -> int:
        with suppress(OSError):
            return self.path.stat().st_size
        return 0

    def _read(self, begin: int, size: int) -> bytes:
        with suppress(OSError), open(self.path, "rb", buffering=0) as file:
            file.seek(begin)
            return file.read(size)
        return b""

    def _free(self, until: int) -> None:
        """Frees disk space of what both threads have read: makes a hole in the file; the rank writes on after it."""
        if until - self._freed < _AT_A_TIME:
            return
        with suppress(OSError, AttributeError), open(self.path, "r+b", buffering=0) as file:  # AttributeError: no glibc
            offset, size = ctypes.c_int64(0), ctypes.c_int64(until)
            ctypes.CDLL(None).fallocate(file.fileno(), _PUNCH_HOLE, offset, size)
        self._freed = until


class NodeOutput:
    """The files of all ranks of this node.

    Args:
        folder: The folder with the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, RankFile] = {}

    @property
    def files(self) -> list[RankFile]:
        """The files that exist, oldest first."""
        return list(self._files.values())

    def look(self) -> None:
        """Finds new files, and removes files that are complete, shown and kept."""
        with suppress(OSError):
            names = [name for name in os.listdir(self._folder) if name not in self._files]
            found = [(self._folder / name, match) for name in names if (match := _FILE.fullmatch(name))]
            for path, match in sorted(found, key=lambda each: each[0].stat().st_mtime_ns):
                self._files[path.name] = RankFile(path, match)
        newest = {file.rank: file.group for file in self.files}
        for name, file in list(self._files.items()):
            # A rank without a newer file may still write: with launch --elastic, ranks outlive the end of other ranks.
            if file.group != newest[file.rank] and file.remove_if_over():
                del self._files[name]

    def add_from_terminal(self, target: int, data: bytes) -> None:
        """Appends what was read from a terminal to the file of the rank that has it.

        Args:
            target: The descriptor of the launcher on which it is shown.
            data: The output that was read.
        """
        self.look()  # a rank creates its file before it writes anything to the terminal
        if theirs := [file for file in self.files if file.is_terminal and file.target == target]:
            theirs[-1].add(data)
