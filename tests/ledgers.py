"""A ledger as what it is on disk: names of events and fields that need not be those of the schema."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_resilience.run import ledger
from lightning_resilience.run.events import Event, Unknown, parse
from lightning_resilience.run.history import History


class Ledger(ledger.Ledger):
    """Records any event."""

    def record(self, event: Event | str, **fields: Any) -> None:
        super().record(Unknown(event=event, extra=fields) if isinstance(event, str) else event)


def read_ledger(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    return (event.to_json() for event in ledger.read_ledger(path))


def events_of(lines: Iterable[dict[str, Any]]) -> list[Event]:
    """What a ledger with these lines holds."""
    return [event for line in lines if (event := parse(line)) is not None]


def history_of(lines: Iterable[dict[str, Any]]) -> History:
    return History(events_of(lines))
