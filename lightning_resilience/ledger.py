"""What happened to a run: one append-only file of JSON lines, and its readers. Imports neither torch nor Lightning.

Every line is one event: ``{"event": ..., "time": seconds since the epoch, "rank": ..., "node": ..., ...}``. A line is
written by a single ``write`` to a file opened for appending, so processes that write at once do not mix their lines,
and a ``kill -9`` costs at most the line being written. A torn line is skipped by the reader.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("time", "saved_at", "seconds", "limit"), (int, float)),
    **dict.fromkeys(("fit", "step", "verified_step", "rank", "world_size", "nodes"), int),
    **dict.fromkeys(("restart_count", "slurm_restart_count", "job_attempt"), int),
    **dict.fromkeys(("node", "elastic_run_id", "run_id", "slurm_job_id", "tier", "kind", "place", "section"), str),
    **dict.fromkeys(("reason", "action", "status", "how", "then"), str),
    **dict.fromkeys(("node_list", "excluded", "devices"), list),
    **dict.fromkeys(("budget", "fault"), dict),
}
"""What the readers rely on; any of them may be missing or null."""
_LAST_TIME = datetime(9999, 1, 1).timestamp()


class Ledger:
    """Appends events to a run's ledger.

    Writing never ends a training: if the storage is full or gone, the event is logged instead and training goes on.

    Args:
        path: The ledger's file; its directory is created.
        rank: Written into every event; ``None`` for the launcher, which is no rank.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int | None = 0) -> None:
        self.path = Path(path)
        self.rank = rank
        self._warned = False

    def record(self, event: str, **fields: Any) -> None:
        """Appends one event.

        Args:
            event: What happened, one word or two joined by an underscore: ``start``, ``resumed``, ``saved``...
            **fields: What else is known, JSON-serialisable.
        """
        line = {"event": event, "time": time.time(), "rank": self.rank, "node": node_name(), **fields}
        data = json.dumps(line, default=str).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                # A process killed in the middle of its line left no newline: begin a fresh line, or two events are
                # lost.
                size = os.fstat(fd).st_size
                torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
                os.write(fd, (b"\n" if torn else b"") + data + b"\n")
            finally:
                os.close(fd)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "The ledger %s cannot be written (%s); events are only logged from here on.", self.path, error
                )
            log.warning("Ledger event: %s", data.decode())


def node_name() -> str:
    """The name of this node: in a Slurm job that which Slurm knows it by, else that of the host."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def read_ledger(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events of a ledger in the order in which they were written; torn and foreign lines are skipped.

    Args:
        path: The ledger's file. A missing file has no events.

    Raises:
        OSError: If it cannot be read.
    """
    try:
        file = open(path, "rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if _is_event(event):
                yield event | {"time": float(event.get("time") or 0.0)}


def _is_event(line: Any) -> bool:
    """Whether a line is an event as :class:`Ledger` writes them, in what the readers rely on."""
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        return False
    known = {name: value for name, value in line.items() if name in _TYPES and value is not None}
    return (
        all(isinstance(value, _TYPES[name]) and not isinstance(value, bool) for name, value in known.items())
        and all(value >= 0 for value in known.values() if isinstance(value, (int, float)))
        and all(isinstance(each, str) for name in ("node_list", "excluded", "devices") for each in known.get(name, ()))
        and known.get("time", 0) <= _LAST_TIME
    )
