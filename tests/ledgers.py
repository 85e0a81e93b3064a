"""A ledger as what it is on disk: names of events and fields that need not be those of the schema."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from lightning_resilience.run import ledger
from lightning_resilience.run.events import Event, Unknown


class Ledger(ledger.Ledger):
    """Records any event."""

    def record(self, event: Event | str, **fields: Any) -> None:
        super().record(Unknown(event=event, extra=fields) if isinstance(event, str) else event)


def read_ledger(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    yield from ledger.read_ledger(path)
