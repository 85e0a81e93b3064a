"""Numbers that travel from a device to the host for a while, as a test says."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Travelling:
    """In the place of what sends a number: it arrives so many batches later, and to read it before is an error.

    Attributes:
        now: Counts the batches; to be counted up by whoever trains.
        waits: How many numbers were waited for.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.now = 0
        self.waits = 0

    class Arrival:
        def __init__(self, travelling: Travelling) -> None:
            self.travelling, self.sent, self.waited = travelling, travelling.now, False

        def query(self) -> bool:
            return self.waited or self.travelling.now >= self.sent + self.travelling.batches

        def synchronize(self) -> None:
            self.travelling.waits += not self.query()
            self.waited = True

    class Number:
        def __init__(self, value: Tensor, arrival: Travelling.Arrival) -> None:
            self.value, self.arrival = float(value), arrival

        def __float__(self) -> float:
            assert self.arrival.query(), "read before it is there"
            return self.value

    def __call__(self, tensor: Tensor) -> tuple[Any, Any]:
        arrival = self.Arrival(self)
        return self.Number(tensor, arrival), arrival
