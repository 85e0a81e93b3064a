"""Whom a session calls: participants that come and go, also while another thread asks, and what they are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_resilience.agreement_protocol import Event, Needs, PeerLost
from lightning_resilience.fit import context
from lightning_resilience.fit.joining import SessionCallback
from lightning_resilience.fit.participant import Participant, Participants
from lightning_resilience.fit.session import FitSession
from lightning_resilience.fit.stop_on_signal import StopOnSignal

EVENT = Event(0, "event", 0, Needs.NOTHING, {})


class Hears(Participant):
    def __init__(self) -> None:
        self.heard = 0

    def on_event_known(self, event: Event) -> None:
        self.heard += 1


class Meanwhile(Hears):
    """While the agreement's thread looks for what it has to call, something happens in the main thread."""

    def __init__(self, happens: Any) -> None:
        super().__init__()
        self.happens = happens

    def __getattribute__(self, name: str) -> Any:
        if name == "on_event_known":
            happens, self.happens = super().__getattribute__("happens"), lambda: None
            happens()
        return super().__getattribute__(name)


def test_who_joins_or_leaves_while_an_event_comes_is_known_for_the_next_one() -> None:
    participants, late, gone = Participants(), Hears(), Hears()

    def happens() -> None:
        participants.withdraw(gone)
        participants.add(late)

    for each in (gone, Meanwhile(happens)):
        participants.add(each)
    for _ in range(2):
        before = gone.heard
        for on_event_known in participants.implement(Participant.on_event_known):
            on_event_known(EVENT)
    assert gone.heard == before
    assert late.heard >= 1


class FindsBadSteps(Participant):
    """At the third boundary, where it was about to save."""

    def __init__(self) -> None:
        self.boundaries = 0

    def at_boundary(self, step: int, may_save: Callable[[], bool]) -> None:
        self.boundaries += 1

    def pauses_saves(self) -> bool:
        return self.boundaries >= 3


class Saves(Participant):
    def __init__(self) -> None:
        self.told: list[bool] = []

    def at_boundary(self, step: int, may_save: Callable[[], bool]) -> None:
        self.told.append(may_save())


class Joins(SessionCallback):
    def __init__(self, run_dir: Path, *participants: Participant) -> None:
        self.run_dir = run_dir
        self.participants = participants

    def _participate(self, session: FitSession) -> Participant:
        *others, last = self.participants
        for each in others:
            session.fit.participants.add(each)
        return last


def test_bad_steps_that_one_finds_keep_the_next_one_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "fits_begun", {})
    first, last = Saves(), Saves()
    trainer = L.Trainer(
        max_steps=4,
        accelerator="cpu",
        callbacks=[Joins(tmp_path, first, FindsBadSteps(), last)],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    assert (first.told[:4], last.told[:4]) == ([True, True, True, False], [True, True, False, False])


@pytest.mark.parametrize("fails", [False, True])
def test_output_is_put_back_before_the_handlers_of_signals(fails: bool) -> None:
    calls: list[str] = []

    def output() -> None:
        calls.append("output")
        if fails:
            raise OSError("on purpose")

    stop: Any = SimpleNamespace(
        session=SimpleNamespace(interrupted_by=lambda: None),
        _release=lambda: calls.append("handlers"),
        _release_output=output,
        _line=None,
        _timer=None,
        _listener=SimpleNamespace(grace_period_s=7.0),
        _before_s=60.0,
    )
    if fails:
        with pytest.raises(OSError, match="on purpose"):
            StopOnSignal.leave(stop)
    else:
        StopOnSignal.leave(stop)
    assert calls == ["output", "handlers"]


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.1.1]:4242"), True),
        (PeerLost("rank 0 lost contact with the other ranks"), True),
        (ConnectionResetError(104, "Connection reset by peer"), False),  # of object storage, say
        (RuntimeError("boom"), False),
    ],
)
def test_a_failure_says_whether_others_are_to_be_waited_for(error: Exception, is_lost: bool) -> None:
    told: list[bool] = []
    fit = SimpleNamespace(
        index=0,
        trainer=SimpleNamespace(global_step=1),
        ledger=SimpleNamespace(record=lambda event: None),
        participants=Participants(),
        agreement=SimpleNamespace(abort=lambda reason, peer_is_lost: told.append(peer_is_lost)),
    )
    outcome = SimpleNamespace(is_halted=lambda: True)
    selector, ending = SimpleNamespace(verdict=lambda error: None), SimpleNamespace(is_over=False)
    session: Any = SimpleNamespace(fit=fit, outcome=outcome, selector=selector, _ending=ending)
    FitSession._record_failure(session, error)
    assert [fit.peer_is_lost, *told] == [is_lost] * 2
