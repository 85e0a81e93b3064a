"""Copies rows that the loggers of rank 0 have not written yet to node memory, where they survive the process.

When a callback gives rows to a logger directly (a callback of the script, or Lightning's ``LearningRateMonitor``), the
rows stay in the memory of the process until the logger writes them: up to 100 steps, or two minutes. So each row that
is unwritten at a boundary is appended to a file as a line of JSON, with the number of its log and its own number in
that log. The :mod:`own part <.own_part>` of the rank has the number of rows at the boundary; later lines do not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_KEPT_BYTES = 1 << 16
_MOST_BYTES = 1 << 24


class RowsWriter:
    """Writes the file, on rank 0.

    Args:
        path: The file, in a folder of node memory that only this user may enter. An existing file is replaced.
        token: Token that all ranks of this start of the fit know.
        names: Names of the logs.

    Raises:
        OSError: If node memory is full or cannot be written.
    """

    def __init__(self, path: Path, token: str, names: Sequence[str]) -> None:
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = open(os.open(path, flags, 0o600), "wb", buffering=0)
        self._begin = self._size = 0
        self._append(json.dumps({"token": token, "names": list(names)}))
        self._begin = self._size

    def put(self, rows: Sequence[tuple[int, int, Any]], are_all_written: bool) -> None:
        """Adds rows.

        Args:
            rows: For each row the number of its log, its own number, and its content, JSON-serializable.
            are_all_written: Whether the loggers have written all rows; then a file of more than 64 KiB is emptied.

        Raises:
            OSError: If the file would exceed 16 MiB, or node memory is full.
        """
        if rows:
            self._append("\n".join(map(json.dumps, rows)))
        elif are_all_written and self._size > self._begin + _KEPT_BYTES:
            self._file.truncate(self._begin)
            self._size = self._begin

    def _append(self, text: str) -> None:
        data = text.encode() + b"\n"
        self._size += len(data)
        if self._size > _MOST_BYTES:
            raise OSError(f"the loggers have not written {self._size >> 20} MiB")
        if self._file.write(data) != len(data):
            raise OSError("node memory is full")

    def close(self) -> None:
        """Closes the file; it stays."""
        self._file.close()


def read_rows(path: Path, token: str) -> tuple[list[str], dict[tuple[int, int], Any]]:
    """The names of the logs, and the rows by log and number; of rows with the same number, the last one.

    Args:
        path: As given to :class:`RowsWriter`.
        token: As given to :class:`RowsWriter`.

    Raises:
        ValueError: If the file is of another start of the fit, or is damaged.
        OSError: If the file does not exist, or cannot be read.
    """
    first, *lines = path.read_bytes().split(b"\n")[:-1]  # after the last newline may be a line cut off by a kill
    begin = json.loads(first)
    if begin["token"] != token:
        raise ValueError(f"{path} is of another start of the fit")
    return begin["names"], {(log, number): row for log, number, row in map(json.loads, lines)}
