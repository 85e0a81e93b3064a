"""Participants of a fit that tests add, and events without an agreement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_resilience.agreement_protocol import Event, Needs
from lightning_resilience.fit import joining
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession


class GoesBack(Participant):
    """Has the fit go back at an event named "back"; replaces the one before."""

    def __init__(self, active: FitSession, until: int | None, otherwise: Callable[[], None]) -> None:
        self.active, self.until, self.otherwise = active, until, otherwise
        for before in [each for each in active.fit.participants._all if isinstance(each, GoesBack)]:
            active.fit.participants.withdraw(before)

    def on_event(self, event: Event) -> None:
        if event.kind == "back":
            until = self.active.fit.trainer.global_step if self.until is None else self.until
            self.active.rollback(until, self.otherwise)


def act(kind: str, **payload: Any) -> None:
    """Has the participants of the fit in progress act on an event, on this rank, now."""
    assert joining._active is not None
    for on_event in joining._active.fit.participants.implement(Participant.on_event):
        on_event(Event(0, kind, 0, Needs.NOTHING, payload))
