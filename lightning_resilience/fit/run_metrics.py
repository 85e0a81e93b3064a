"""Metrics of the run in the loggers of its fits: scalars in all loggers, a page in Weights & Biases.

What happened before this process is folded from the ledger once, when training begins. From then on the account of this
process is added (:mod:`~.run.time_account`), as if all ranks spent their time as rank 0 does. So no step reads a file
or asks another rank, and only steps that Lightning logs cost anything.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_resilience import wandb_panels
from lightning_resilience._lightning import lightning_loggers, lightning_progress
from lightning_resilience.fit.context import FitContext
from lightning_resilience.fit.participant import Participant
from lightning_resilience.launch.report import all_interruptions
from lightning_resilience.run import time_account
from lightning_resilience.run.events import (
    Event,
    Fresh,
    RestoredInPlace,
    Resumed,
    Rollback,
    Saved,
    SaveFailed,
    Stragglers,
    StragglersReplaced,
    StragglerStop,
    TimeSpent,
    Unhealthy,
)
from lightning_resilience.run.goodput import START, TRAINING, Goodput, account, share_of
from lightning_resilience.run.interruptions import interruptions
from lightning_resilience.run.run_directory import RUN_DIR_VARIABLE

log = logging.getLogger(__name__)

PREFIX = "resilience"
"""Scalars are ``resilience/...``."""

_EVERY_S = 1.0
_NO_SCALARS = "The loggers get no scalars of the run."
_NOT_SHOWN = "Weights & Biases could not show something of the run."
_ALERTS = {
    Rollback: ("Rolled back", "WARN"),
    Stragglers: ("Stragglers", "WARN"),
    StragglersReplaced: ("Stragglers are replaced", "WARN"),
    StragglerStop: ("Stopped because of stragglers", "WARN"),
    SaveFailed: ("A checkpoint was not saved", "ERROR"),
    Unhealthy: ("A node failed its health check", "ERROR"),
}


class RunMetrics(Participant):
    """Gives the loggers of a fit the metrics of its run; on rank 0.

    Args:
        fit: The fit.
    """

    def __init__(self, fit: FitContext) -> None:
        self._fit = fit
        self._before: dict[str, float] | None = None
        """Seconds of a rank by category, without the seconds in this process's account."""
        self._interruptions: list[dict[str, Any]] = []
        self._steps_redone = 0
        self._restored_step = 0
        self._saves: dict[str, float] = {}
        self._logged_at = -math.inf
        self._panels = wandb_panels.RunPanels()

    def begin(self) -> None:
        """Training begins: from now on the scalars are logged."""
        fit = self._fit
        if fit.rank > 0 or not fit.trainer.loggers:
            return
        with _harmless(_NO_SCALARS):
            events = fit.ledger.events()
            self._fold(events)
            lightning_loggers.add_to_logged_steps(fit.trainer, fit.patches, self._scalars_if_due)
            with _harmless(_NOT_SHOWN):
                step = lightning_progress.logged_step(fit.trainer)
                self._panels.begin(fit.trainer.loggers, self._interruptions, fit.trainer.world_size, step)
                self._alert_of_interruptions(events)

    def _fold(self, events: Sequence[Event]) -> None:
        fit = self._fit
        spent = fit.time.read()
        own = fit.time_spent(dict.fromkeys(range(fit.trainer.world_size), spent))
        run = account_until_now(events, time_account.kept(fit.run.path), own, RUN_DIR_VARIABLE in os.environ)
        ranks = fit.trainer.world_size
        now = _until_now(spent)
        self._before = {name: seconds / ranks - now.get(name, 0.0) for name, seconds in run.by_category.items()}
        self._interruptions = all_interruptions(run.interruptions, interruptions(events))
        self._steps_redone = sum(each["steps_lost"] or 0 for each in self._interruptions)
        for event in events:
            self._note(event)

    # -- scalars -------------------------------------------------------------------------------------------------------

    def _scalars_if_due(self) -> dict[str, float]:
        now = time.monotonic()
        if now < self._logged_at + _EVERY_S:  # if every step is logged, a dozen scalars would be slow
            return {}
        self._logged_at = math.inf  # after a failure, no further attempt
        found: dict[str, float] = {}
        with _harmless(_NO_SCALARS):
            found = self._scalars()
            self._logged_at = now
        return found

    def _scalars(self) -> dict[str, float]:
        seconds = self._seconds()
        start = sum(seconds.get(name, 0.0) for name in START)
        groups = {"start": start, **{name: each for name, each in seconds.items() if name not in START}}
        found = {
            "goodput": share_of(seconds, ("productive",)),
            "ettr": share_of(seconds, TRAINING),
            "restarts": len(self._interruptions),
            "steps_redone": self._steps_redone,
            **self._saves,
            **{f"seconds/{name}": round(each, 3) for name, each in groups.items() if each >= 0.001},
        }
        return {f"{PREFIX}/{name}": float(value) for name, value in found.items()}

    def _seconds(self) -> dict[str, float]:
        """Seconds of a rank by category, from the start of the run until now."""
        assert self._before is not None
        seconds = dict(self._before)
        for name, value in _until_now(self._fit.time.read()).items():
            seconds[name] = seconds.get(name, 0.0) + value
        return {name: max(0.0, value) for name, value in seconds.items()}

    # -- events --------------------------------------------------------------------------------------------------------

    def on_record(self, event: Event) -> None:
        """Counts an event, and has W&B send an alert if it deserves one."""
        if self._before is None:
            return
        self._note(event)
        if (alert := _ALERTS.get(type(event))) is not None:
            title, level = alert
            step, reason = getattr(event, "step", None), getattr(event, "reason", None)
            self._alert(title, f"{'' if step is None else f'Step {step}: '}{reason}", level)

    def _note(self, event: Event) -> None:
        match event:
            case Saved(step=int(step)) if event.fit == self._fit.index:
                self._saves["last_save_step"] = max(step, self._saves.get("last_save_step", 0))
                if event.tier == "local":
                    figures = {"local_save_s": event.seconds, "local_save_stall_s": event.stall_s}
                else:
                    figures = {"save_s": event.seconds}
                self._saves |= {name: value for name, value in figures.items() if value is not None}
            case RestoredInPlace(step=int(step)):
                self._restored_step = self._saves["last_save_step"] = step
            case Rollback(step=int(step)):  # recorded after the restored checkpoint
                self._steps_redone += max(0, step - self._restored_step)

    def _alert_of_interruptions(self, events: Sequence[Event]) -> None:
        """Alerts about the interruptions since the last start of a fit, so that each one is reported once."""
        starts = [event.time for event in events if isinstance(event, (Fresh, Resumed))]
        last = starts[-2] if len(starts) > 1 else -math.inf  # the last start is this one
        new = [each for each in self._interruptions if each["time"] > last]
        if new:
            times = f"{len(new)} interruptions" if len(new) > 1 else "an interruption"
            step = self._fit.trainer.global_step
            self._alert(f"Continued at step {step} after {times}", "\n".join(map(wandb_panels.in_words, new)), "WARN")

    def _alert(self, title: str, text: str, level: str) -> None:
        with _harmless(_NOT_SHOWN):
            self._panels.alert(self._fit.trainer.loggers, title, text, level)

    # -- the end -------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Gives the summary of the run in W&B its last state; alerts if the run has given up."""
        fit = self._fit
        if self._before is None:
            return
        with _harmless(_NOT_SHOWN):
            outcome = fit.folder.outcome
            if outcome is not None and outcome.status == "halted" and outcome.attempt == fit.token:
                self._alert("The run gave up", outcome.reason, "ERROR")
            step = lightning_progress.logged_step(fit.trainer)
            self._panels.end(fit.trainer.loggers, self._scalars(), step)


@contextmanager
def _harmless(consequence: str) -> Iterator[None]:
    """Logs exceptions instead of raising them: showing a training must not end it."""
    try:
        yield
    except Exception:
        log.exception(consequence)


def account_until_now(
    events: Sequence[Event], running: Iterable[TimeSpent], own: TimeSpent, is_launched: bool
) -> Goodput:
    """The account of a run that is still running.

    Args:
        events: The events of its ledger.
        running: The kept accounts of ranks that are running, these or others (:func:`~.time_account.kept`).
        own: The time that these ranks have spent until now.
        is_launched: Whether these ranks are launched workers, whose watchdog began before their fit, with a token of
            its own.
    """

    def is_own(kept: TimeSpent) -> bool:
        is_of_group = (kept.elastic_run_id, kept.restart_count) == (own.elastic_run_id, own.restart_count)
        return kept.attempt == own.attempt or (is_launched and is_of_group)

    return account(events, [*(kept for kept in running if not is_own(kept)), own], time.time())


def _until_now(spent: time_account.Spent) -> dict[str, float]:
    """Seconds by category, including the present activity; a step in which the fit fails counts as detection."""
    seconds: dict[str, float] = dict(spent.seconds.items())
    seconds[spent.doing] += time.monotonic() - spent.since
    seconds["detection"] = seconds.pop("unfinished_step")
    return seconds
