"""How far the loggers of a fit have logged, so that steps that run again are in its logs once.

A kill loses rows that a logger has not written, and steps after the last checkpoint are logged a second time. A restore
solves both: logs continue exactly after the restored state.
"""

from __future__ import annotations

import csv
import glob
import io
import logging
import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning_resilience._files import publish
from lightning_resilience._lightning import lightning_loggers, lightning_patches

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

_MOST_UNWRITTEN = 1000
"""Rows in a checkpoint; a logger with more writes them before the save."""

_used: weakref.WeakSet[Any] = weakref.WeakSet()


class Logs:
    """The logs of all loggers of a fit that write files. For rank 0, the only one that writes.

    Args:
        trainer: The Trainer of the fit, when its loggers have their folders.
        patches: Undone after the fit.
    """

    def __init__(self, trainer: Trainer, patches: lightning_patches.Patches) -> None:
        self._logs: dict[str, _Csv | _Events] = {}
        for logger in lightning_loggers.file_loggers(trainer):
            if "://" in logger.log_dir:
                continue
            writer = logger.experiment
            try:
                if hasattr(writer, "metrics_file_path"):
                    self._logs[logger.log_dir] = _Csv(writer, patches)
                elif hasattr(writer, "purge_step"):
                    self._logs[logger.log_dir] = _Events(writer, patches, logger.log_dir, logger in _used)
            except (OSError, ValueError, csv.Error) as error:
                _warn_not_restored(logger.log_dir, error)
            _used.add(logger)

    def state_dict(self) -> dict[str, Any]:
        """How far every logger has logged."""
        return {folder: each.state_dict() for folder, each in self._logs.items()}

    def position(self) -> list[Any]:
        """How far every logger has logged, as far as that is known at once. Compared by ``==``."""
        return [each.position() for each in self._logs.values()]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the logs there."""
        for folder, each in self._logs.items():
            if folder in state:
                try:
                    each.load_state_dict(state[folder])
                except (OSError, ValueError, csv.Error) as error:
                    _warn_not_restored(folder, error)


def _warn_not_restored(folder: str, error: Exception) -> None:
    log.warning("Steps that run again will be in %s twice: %s", folder, error)


class _Csv:
    """Rows in the file, and rows that are not written yet: up to 99 steps, which a kill would lose."""

    def __init__(self, writer: Any, patches: lightning_patches.Patches) -> None:
        self._writer = writer
        self._rows = len(self._read()[1])
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

    def position(self) -> Any:
        return self._rows, len(self._writer.metrics)

    def state_dict(self) -> dict[str, Any]:
        if len(self._writer.metrics) > _MOST_UNWRITTEN:
            with suppress(OSError):  # a log must not fail the save
                self._writer.save()
        unwritten = [{name: _plain(value) for name, value in row.items()} for row in self._writer.metrics]
        return {"rows": self._rows, "unwritten": unwritten}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        columns, rows = self._read()
        # With fewer rows than saved, the file was changed otherwise; it stays as it is.
        kept, replaced = rows[: state["rows"]], rows[state["rows"] :]
        if replaced:
            beside = str(self._writer.metrics_file_path).removesuffix(".csv") + "-replaced.csv"
            with open(beside, "a", newline="") as file:
                file.write(_as_csv(columns, replaced))
            self._write(columns, kept)
        self._rows = len(kept)
        self._writer.metrics_keys = columns
        self._writer.metrics = [dict(row) for row in state["unwritten"]]


def _as_csv(columns: list[str], rows: list[dict[str, str]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _plain(value: Any) -> Any:
    """A logged value for a checkpoint: numbers of NumPy as those of Python."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


class _Events:
    """The highest step at which anything was logged, on whatever axis: TensorBoard's ``purge_step`` knows no tags.

    It hides everything in the folder from a step on. So it may only hide what is after everything that was logged
    before, and nothing in a folder with logs of something else.
    """

    def __init__(self, writer: Any, patches: lightning_patches.Patches, folder: str, is_used: bool) -> None:
        self._writer = writer
        self._patches = patches
        files = glob.glob(os.path.join(glob.escape(folder), "events.out.tfevents.*"))
        self._is_new = len(files) <= 1 and not is_used
        self._highest: int | None = -1 if self._is_new else None
        self._follow()

    def _follow(self) -> None:
        file = lightning_loggers.event_file(self._writer)
        add_event = file.add_event

        def note(event: Any, step: Any = None, *arguments: Any, **options: Any) -> None:
            if step is not None and self._highest is not None:
                self._highest = max(self._highest, int(step))
            add_event(event, step, *arguments, **options)

        self._patches.set(file, "add_event", note)

    def position(self) -> Any:
        return self._highest

    def state_dict(self) -> dict[str, Any]:
        with suppress(Exception):  # a log must not fail the save
            self._writer.flush()  # a kill would lose it
        return {"highest": self._highest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        highest = state["highest"]
        nothing_after = self._is_new and self._highest is not None and highest is not None and self._highest <= highest
        if highest is None or nothing_after:
            return
        self._highest, self._is_new = highest, False
        self._writer.close()
        self._writer.purge_step = highest + 1
        self._follow()
        self._writer.purge_step = None
