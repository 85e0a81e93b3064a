"""The log files of a run, ``RUN_DIR/logs/attempt-K/rank-R.log``: written while it runs, bounded, and read again.

An attempt is one start of the workers on all nodes; attempts are numbered from 1 on. A log is text without control
sequences. Of a progress bar it has the last state, and once a minute the state at that time. A thread of the launcher's
process that shows the output (see :mod:`~lightning_resilience.launch.relay`) writes it, so that no rank waits for the
storage of the run directory. After its first 4 MB a log continues in ``rank-R.log.2`` and so on; only the newest two of
these are kept.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_resilience._files import create_json, read_json
from lightning_resilience._output import NAME, Line, whole_lines
from lightning_resilience.launch.rank_output import RankFile

LOGS = "logs"
"""The folder of the log files in a run directory."""

_PART_BYTES = 4 << 20
_ATTEMPTS = 20
_KEEP_EVERY_S = 1.0
_PAUSE_S = 5.0
_SHOW_BAR_EVERY_S = 60.0
_CONTROL = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])|[\x00\x08]")


def attempts(run_dir: Path) -> list[int]:
    """The numbers of the attempts that have logs, in order.

    Args:
        run_dir: The run directory.
    """
    names = (re.fullmatch(r"attempt-([0-9]+)", path.name) for path in (run_dir / LOGS).glob("attempt-*"))
    return sorted(int(name[1]) for name in names if name)


def ranks(run_dir: Path, attempt: int) -> list[int]:
    """The ranks that have written anything in an attempt, in order.

    Args:
        run_dir: The run directory.
        attempt: The number of the attempt.
    """
    names = (re.fullmatch(r"rank-([0-9]+)\.log", path.name) for path in folder_of(run_dir, attempt).glob("rank-*"))
    return sorted(int(name[1]) for name in names if name)


def folder_of(run_dir: Path, attempt: int) -> Path:
    """The folder with the logs of an attempt.

    Args:
        run_dir: The run directory.
        attempt: The number of the attempt.
    """
    return run_dir / LOGS / f"attempt-{attempt}"


def log_of(folder: Path, rank: int, part: int = 1) -> Path:
    """The file with a part of a rank's log; 1 is the first.

    Args:
        folder: The folder of an attempt.
        rank: The rank.
        part: The number of the part.
    """
    return folder / (f"rank-{rank}.log" if part == 1 else f"rank-{rank}.log.{part}")


class LogReader:
    """Reads a rank's log from its beginning on, also while it is written.

    Args:
        folder: The folder of an attempt.
        rank: The rank.
        at_a_time: About how many bytes are read at once.
    """

    def __init__(self, folder: Path, rank: int, at_a_time: int = 1 << 20) -> None:
        self._folder, self._rank, self._at_a_time = folder, rank, at_a_time
        self._part, self._offset = 1, 0

    def read(self) -> bytes:
        """The next bytes; empty if there are none yet."""
        following = self._following()  # before this part is read: if there is a next part, this one is complete
        if data := self._rest_of_part():
            return data
        if following is None:
            return b""
        removed = following - self._part - 1
        self._part, self._offset = following, 0
        note = f"{NAME} {removed * (_PART_BYTES >> 20)} MB are left out here.\n".encode() if removed else b""
        return note + self._rest_of_part()

    def _rest_of_part(self) -> bytes:
        with suppress(OSError), open(log_of(self._folder, self._rank, self._part), "rb") as file:
            file.seek(self._offset)
            data = file.read(self._at_a_time)
            self._offset += len(data)
            return data
        return b""

    def _following(self) -> int | None:
        numbers = (path.suffix[1:] for path in self._folder.glob(f"rank-{self._rank}.log.*"))
        return min((int(each) for each in numbers if each.isdigit() and int(each) > self._part), default=None)


class _Log:
    """One log that is written.

    Args:
        folder: The folder of the attempt.
        rank: The rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._part, self._size = 1, 0

    def append(self, lines: list[bytes]) -> None:
        """Appends lines; raises if the storage does not take them, and then none of them is in the log."""
        data = b"".join(line + b"\n" for line in lines)
        if self._size and self._size + len(data) > _PART_BYTES:
            self._part, self._size = self._part + 1, 0
            if self._part > 3:
                log_of(self._folder, self._rank, self._part - 2).unlink(missing_ok=True)
        path = log_of(self._folder, self._rank, self._part)
        try:
            with open(path, "ab", buffering=0) as file:
                left = memoryview(data)
                while left:  # a disk that is nearly full takes a part, and fails with the next one
                    left = left[file.write(left[:_PART_BYTES]) :]
        except OSError:
            with suppress(OSError):
                os.truncate(path, self._size)
            raise
        self._size += len(data)


class _Text:
    """What a rank writes to a stream, as lines of its log."""

    def __init__(self, append: Callable[[list[bytes]], None]) -> None:
        self._append = append
        self._line = Line()
        self._rest = self._noted = b""
        self._changed_at = self._noted_at = time.monotonic()

    def write(self, data: bytes) -> None:
        lines, rest = whole_lines(self._rest + self._line.apart(data))
        if lines:
            self._append([_CONTROL.sub(b"", line) for line in lines])
            self._noted, self._noted_at = b"", time.monotonic()
        self._rest, self._changed_at = rest, time.monotonic()

    def note_rest(self, is_last: bool) -> None:
        """Writes the line that has not ended, if the rank pauses there, or draws it again and again."""
        now = time.monotonic()
        pauses = now - self._changed_at > _PAUSE_S
        text = _CONTROL.sub(b"", self._rest).rstrip(b"\r")
        if text.strip() and self._rest != self._noted:
            if not (is_last or pauses or now - self._noted_at > _SHOW_BAR_EVERY_S):
                return
            self._append([text])
            self._noted, self._noted_at = self._rest, now
        if pauses and self._rest == self._noted:
            self._rest = b""


class LogKeeper(threading.Thread):
    """The thread that writes the output of this node's ranks to the logs of their attempts, until it is told to end.

    If the storage fails, it tries again; meanwhile the output of a rank stays in the rank's own file.

    Args:
        run_dir: The run directory.
        files: Returns the files of the ranks' output that exist now.
    """

    def __init__(self, run_dir: Path, files: Callable[[], list[RankFile]]) -> None:
        super().__init__(name="log-keeper", daemon=True)
        self._run_dir, self._files = run_dir, files
        self._folders: dict[str, Path] = {}
        self._logs: dict[tuple[str, int], _Log] = {}
        self._texts: dict[Path, _Text] = {}
        self._ending = threading.Event()

    def run(self) -> None:
        """Writes the logs until the end."""
        while not self._ending.wait(_KEEP_EVERY_S):
            self._keep()
        self._keep(is_last=True)

    def end(self, within_s: float) -> None:
        """Writes the rest and ends, if the storage takes it soon enough.

        Args:
            within_s: How long to wait for that.
        """
        self._ending.set()
        self.join(within_s)

    def _keep(self, is_last: bool = False) -> None:
        files = self._files()
        for file in files:
            with suppress(OSError):
                if file.group not in self._folders:
                    self._folders[file.group] = _folder_of_group(self._run_dir, file.group)
                name = file.group, file.rank
                if name not in self._logs:
                    self._logs[name] = _Log(self._folders[file.group], file.rank)
                text = self._texts.setdefault(file.path, _Text(self._logs[name].append))
                file.keep(text.write)
                text.note_rest(is_last or file.group != files[-1].group)  # a rank that has ended ends its line, too
        for path in self._texts.keys() - {file.path for file in files}:
            del self._texts[path]


def _folder_of_group(run_dir: Path, group: str) -> Path:
    """The folder of the attempt of a group of ranks; the group's first node creates it, and removes old folders."""
    numbers = attempts(run_dir)
    number = next(iter(numbers[-_ATTEMPTS:]), 1)
    for each in reversed(numbers[-_ATTEMPTS:]):
        if (found := read_json(folder_of(run_dir, each) / "attempt.json")) is not None:
            if found.get("group") == group:
                return folder_of(run_dir, each)
            number = max(number, each + 1)
    while True:  # a folder without a group in it may be one that another node is creating now
        folder = folder_of(run_dir, number)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "attempt.json"
        if create_json(path, {"group": group, "began": time.time()}):
            for old in [each for each in numbers if each <= number - _ATTEMPTS]:
                shutil.rmtree(folder_of(run_dir, old), ignore_errors=True)
            return folder
        if (read_json(path) or {}).get("group") == group:
            return folder
        number += 1
