"""How far the loggers of a fit have logged, so that steps that run again appear in its logs once.

A kill loses rows that a logger has not written, and steps after the newest checkpoint are logged a second time. A
restore solves both: logs continue exactly after the restored state. Lightning has its loggers write at once whatever it
logs. Only rows that the script or a callback passes directly to a logger can be unwritten.
"""

from __future__ import annotations

import base64
import csv
import glob
import io
import logging
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_resilience._files import publish
from lightning_resilience._lightning import lightning_loggers, lightning_patches

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

_MOST_UNWRITTEN = 1000
"""How many rows a checkpoint holds, at most; a logger with more unwritten rows writes them before the save."""
_MOST_UNWRITTEN_BYTES = 1 << 20
"""How many bytes TensorBoard may have logged without writing them; with more, the rows are not known."""

_used: weakref.WeakSet[Any] = weakref.WeakSet()


class LogPosition(NamedTuple):
    """How far a logger has logged, in numbers that a ``float`` can hold.

    Attributes:
        written: How many of the counted rows are in its file.
        logged: How many rows were logged, with unwritten ones; NaN if these are not known.
        highest: The highest step; ``-inf`` if it is not known.
    """

    written: float
    logged: float
    highest: float = -math.inf

    def state(self, rows: Sequence[Any]) -> dict[str, Any]:
        """The state of the log at this position.

        Args:
            rows: The unwritten rows.
        """
        highest = None if self.highest == -math.inf else int(self.highest)
        return {"rows": int(self.written), "highest": highest, "unwritten": list(rows)}


class Logs:
    """The logs of all loggers of a fit that write files. For rank 0, the only one that writes.

    Args:
        trainer: The Trainer of the fit, after its loggers have chosen their folders.
        patches: Patches that are undone after the fit.
    """

    def __init__(self, trainer: Trainer, patches: lightning_patches.Patches) -> None:
        self._logs: dict[str, _Csv | _Events] = {}
        for logger in lightning_loggers.file_loggers(trainer):
            if "://" in logger.log_dir:
                continue
            writer = logger.experiment
            name = logger.log_dir if logger.log_dir not in self._logs else f"{type(logger).__name__} {logger.log_dir}"
            try:
                if hasattr(writer, "metrics_file_path"):
                    self._logs[name] = _Csv(writer, patches)
                elif hasattr(writer, "purge_step"):
                    self._logs[name] = _Events(writer, patches, logger.log_dir, logger in _used)
            except (OSError, ValueError, csv.Error) as error:
                _warn_not_restored(logger.log_dir, error)
            _used.add(logger)

    def state_dict(self) -> dict[str, Any]:
        """How far every logger has logged."""
        return {folder: each.state_dict() for folder, each in self._logs.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the logs from a saved state."""
        for name, each in self._logs.items():
            if name in state:
                try:
                    each.load_state_dict(state[name])
                except (OSError, ValueError, csv.Error) as error:
                    _warn_not_restored(name, error)

    def follow_rows(self) -> list[str]:
        """From now on :meth:`new_rows` returns unwritten rows. Returns the names of all logs."""
        for each in self._logs.values():
            if isinstance(each, _Events):
                each.follow_rows()
        return list(self._logs)

    def position(self) -> list[LogPosition]:
        """How far every logger has logged."""
        return [each.position() for each in self._logs.values()]

    def new_rows(self) -> list[tuple[int, int, Any]]:
        """Unwritten rows that were not returned before: log, number, and row; JSON-serializable."""
        return [(log, *row) for log, each in enumerate(self._logs.values()) for row in each.new_rows()]

    def go_back(self, positions: Sequence[LogPosition]) -> None:
        """Forgets what was logged since :meth:`position`, so that :meth:`state_dict` returns the state at that time."""
        for each, position in zip(self._logs.values(), positions, strict=True):
            each.go_back(position)


def _warn_not_restored(folder: str, error: Exception) -> None:
    log.warning("Steps that run again will appear twice in %s: %s", folder, error)


class _Csv:
    """A CSV log: rows in the file, and rows that are not written yet (up to 99 steps), which a kill would lose."""

    def __init__(self, writer: Any, patches: lightning_patches.Patches) -> None:
        self._writer = writer
        self._rows = len(self._read()[1])
        self._returned = 0
        self._save = writer.save
        # Functions, not methods: pickling or copying a Trainer leaves them out.
        patches.set(writer, "save", lambda: self._count())
        lightning_loggers.on_new_columns(writer, patches, lambda columns: self._write(columns, self._read()[1]))

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        try:
            with open(self._writer.metrics_file_path, newline="") as file:
                reader = csv.DictReader(file)
                rows = list(reader)
        except FileNotFoundError:
            return [], []
        return list(reader.fieldnames or []), rows

    def _write(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        text = _as_csv(columns, rows)
        publish(self._writer.metrics_file_path, lambda file: file.write(text.encode()))

    def _count(self) -> None:
        rows = len(self._writer.metrics)
        self._save()
        self._rows += rows

    def position(self) -> LogPosition:
        return LogPosition(self._rows, self._rows + len(self._writer.metrics))

    def new_rows(self) -> Iterator[tuple[int, Any]]:
        first = max(self._returned, self._rows)
        rows = self._writer.metrics[first - self._rows :]
        self._returned = first + len(rows)
        return enumerate(map(_plain_row, rows), first)

    def go_back(self, position: LogPosition) -> None:
        logged = int(position.logged)
        del self._writer.metrics[max(0, logged - self._rows) :]
        self._rows = min(self._rows, logged)

    def state_dict(self) -> dict[str, Any]:
        if len(self._writer.metrics) > _MOST_UNWRITTEN:
            with suppress(OSError):  # a log must not fail the save
                self._writer.save()
        return {"rows": self._rows, "unwritten": [_plain_row(row) for row in self._writer.metrics]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        columns, rows = self._read()
        # With fewer rows than saved, something else has changed the file; it stays as it is.
        kept, replaced = rows[: state["rows"]], rows[state["rows"] :]
        if replaced:
            beside = str(self._writer.metrics_file_path).removesuffix(".csv") + "-replaced.csv"
            with open(beside, "a", newline="") as file:
                file.write(_as_csv(columns, replaced))
            self._write(columns, kept)
        self._rows, self._returned = len(kept), 0
        self._writer.metrics_keys = columns
        self._writer.metrics = [dict(row) for row in state["unwritten"]]


def _as_csv(columns: list[str], rows: list[dict[str, str]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _plain_row(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    """A logged value for a checkpoint: numbers of NumPy as numbers of Python."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


class _Events:
    """A TensorBoard log: the highest step at which anything was logged, whatever its tag.

    TensorBoard's ``purge_step`` knows no tags: it hides everything in the folder from a step on. So it may only hide
    what comes after everything that was logged before, and nothing in a folder with other logs.
    """

    def __init__(self, writer: Any, patches: lightning_patches.Patches, folder: str, is_used: bool) -> None:
        self._writer = writer
        self._patches = patches
        self._folder = folder
        self._is_new = len(self._files()) <= 1 and not is_used
        self._highest: int | None = -1 if self._is_new else None
        self._follows_rows = False
        self._written = self._returned = self._size = 0
        self._unwritten: list[bytes] = []
        self._follow()

    def _files(self) -> list[str]:
        return glob.glob(os.path.join(glob.escape(self._folder), "events.out.tfevents.*"))

    def _follow(self) -> None:
        self._file = file = lightning_loggers.event_file(self._writer)
        add_event, flush = file.add_event, file.flush

        def note(event: Any, step: Any = None, *arguments: Any, **options: Any) -> None:
            if step is not None and self._highest is not None:
                self._highest = max(self._highest, int(step))
            add_event(event, step, *arguments, **options)
            if self._follows_rows:
                self._note_row(event.SerializeToString())

        def note_flush() -> None:
            count = len(self._unwritten)
            flush()
            self._written, self._size = self._written + count, 0
            del self._unwritten[:count]

        self._patches.set(file, "add_event", note)
        self._patches.set(file, "flush", note_flush)

    def _note_row(self, row: bytes) -> None:
        self._size += len(row)
        if self._size <= _MOST_UNWRITTEN_BYTES:
            self._unwritten.append(row)

    def follow_rows(self) -> None:
        self._writer.flush()
        self._follows_rows = True

    def position(self) -> LogPosition:
        is_known = self._size <= _MOST_UNWRITTEN_BYTES and self._is_only_writer()
        logged = self._written + len(self._unwritten) if is_known else math.nan
        return LogPosition(self._written, logged, -math.inf if self._highest is None else self._highest)

    def _is_only_writer(self) -> bool:
        """Whether this writer has only the one known file: ``add_scalars`` creates more."""
        return lightning_loggers.event_files(self._writer) == [self._file]

    def new_rows(self) -> Iterator[tuple[int, Any]]:
        first = max(self._returned, self._written)
        rows = self._unwritten[first - self._written :]
        self._returned = first + len(rows)
        return enumerate((base64.b64encode(row).decode() for row in rows), first)

    def go_back(self, position: LogPosition) -> None:
        self._highest = position.state([])["highest"]

    def state_dict(self) -> dict[str, Any]:
        with suppress(Exception):  # a log must not fail the save
            self._writer.flush()  # a kill would lose the buffer
        return {"highest": self._highest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        highest = state["highest"]
        nothing_after = self._is_new and self._highest is not None and highest is not None and self._highest <= highest
        if highest is not None and not nothing_after:
            self._highest, self._is_new = highest, False
            self._writer.close()
            self._writer.purge_step = highest + 1
            self._follow()
            self._writer.purge_step = None
        self._write_lost([base64.b64decode(row) for row in state.get("unwritten", ())])

    def _write_lost(self, rows: list[bytes]) -> None:
        """Writes the rows that are in no file of the folder: some may have been written before the kill."""
        if rows:
            self._writer.flush()
            wanted = set(rows)
            found = {row for path in self._files() for row in _rows_in(path) if row in wanted}
            for row in rows:
                if row not in found:
                    lightning_loggers.add_serialized_event(self._file, row)
            self._writer.flush()


def _rows_in(path: str) -> Iterator[bytes]:
    """The rows of a TensorBoard file, up to where a kill has cut it off."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        while len(head := file.read(12)) == 12:  # the length, and its checksum
            length = int.from_bytes(head[:8], "little")
            if file.tell() + length + 4 > size:
                return
            yield file.read(length)
            file.seek(4, os.SEEK_CUR)
