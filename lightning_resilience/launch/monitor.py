"""The thread of a launch that shows the run to monitoring systems and reports events.

Only the launch that decides has it. Every 15 s the thread reads the new events of the ledger, computes the figures from
them and passes these on. In a run of months it does so less often, so that it takes at most 5 % of the time. Nothing
that fails or hangs here affects the run: each failure is logged once and tried again, and the end of the launch waits
for this thread a few seconds at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from lightning_resilience._output import log_line
from lightning_resilience.launch import otel, trainjob
from lightning_resilience.launch.budget import Budget
from lightning_resilience.launch.metrics import Figures, is_over, measure
from lightning_resilience.launch.notices import Notices
from lightning_resilience.launch.on_event import EventCommand
from lightning_resilience.launch.prometheus import Prometheus
from lightning_resilience.launch.report import all_interruptions
from lightning_resilience.run import time_account
from lightning_resilience.run.deadlines import KEEP_TIME_EVERY_S
from lightning_resilience.run.events import Fresh, Resumed
from lightning_resilience.run.goodput import account, reached_step
from lightning_resilience.run.history import History, LiveHistory
from lightning_resilience.run.interruptions import interruptions
from lightning_resilience.run.ledger import Ledger
from lightning_resilience.run.run_directory import RunDirectory

EVERY_S = 15.0
_PAUSE_PER_COST = 20
_ENDS_WITHIN_S = 5.0
_HURRIED_END_S = 3.0


class Exporter(Protocol):
    """Shows metrics somewhere.

    Attributes:
        name: Its name in log lines.
    """

    name: str

    def show(self, figures: Figures) -> None:
        """Shows the figures; an exception that this raises is logged once."""

    def end(self) -> None:
        """Ends the exporter."""


@dataclass(frozen=True)
class MonitorSettings:
    """The settings for monitoring from the command line.

    Args:
        prometheus: As :func:`.prometheus.checked_target` returns it.
        on_event: As :func:`.on_event.checked_command` returns it.
    """

    prometheus: str | None = None
    on_event: tuple[str, ...] = ()


class Monitor:
    """Monitoring from the start to the end of a ``with`` block, if any was asked for.

    Args:
        settings: The settings for monitoring; the environment may ask for more.
        run_directory: The run directory.
        run_id: The id of the run.
        launch_id: The id of the launch.
        budget: The limits of the launch.
        is_told_to_stop: Whether a signal has told the launch to stop.
        must_go: Whether a second signal has done so.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        run_directory: RunDirectory,
        run_id: str,
        launch_id: str,
        budget: Budget,
        is_told_to_stop: Callable[[], object] = lambda: False,
        must_go: Callable[[], object] = lambda: False,
    ) -> None:
        self._settings = settings
        self._run = run_directory
        self._run_id = run_id
        self._launch_id = launch_id
        self._budget = budget
        self._is_told_to_stop = is_told_to_stop
        self._must_go = must_go
        self._history = LiveHistory(Ledger(run_directory.ledger, rank=None, only_reads=True))
        self._exporters: list[Exporter] = []
        self._command: EventCommand | None = None
        self._said: set[str] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="monitor", daemon=True)

    def __enter__(self) -> None:
        is_asked_for = self._settings != MonitorSettings() or otel.endpoint() is not None or trainjob.server()
        if is_asked_for:
            self._attempt("monitoring", self._thread.start)  # a node may be out of threads

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread.ident is None:
            return

        def in_hurry() -> bool:
            return kind is not None or bool(self._is_told_to_stop())

        self._ending.set()
        deadline = time.monotonic() + (_HURRIED_END_S if in_hurry() else _ENDS_WITHIN_S)
        while self._thread.is_alive() and time.monotonic() < deadline and not self._must_go():
            self._thread.join(0.1)
        if self._command is not None:
            self._command.end(in_hurry, self._must_go)

    def _work(self) -> None:
        self._attempt("monitoring", self._begin)
        while True:
            is_last = self._ending.is_set()
            began = time.monotonic()
            self._attempt("monitoring", self._look)
            if is_last:
                break
            self._ending.wait(max(EVERY_S, _PAUSE_PER_COST * (time.monotonic() - began)))
        for exporter in self._exporters:
            self._attempt(exporter.name, exporter.end)

    def _attempt(self, who: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if who not in self._said:
                self._said.add(who)
                log_line(f"{who}: {error}. The run is not affected. Retrying; further failures will not be logged.")

    def _begin(self) -> None:
        path = str(self._run.path)
        if self._settings.on_event:
            self._notices = Notices(self._launch_id, self._run_id, path)
            self._command = EventCommand(self._settings.on_event)
        if self._settings.prometheus is not None:
            self._exporters.append(Prometheus(self._settings.prometheus, path))
        if (server := trainjob.server()) is not None:
            self._exporters.append(trainjob.TrainJob())
            log_line(f"Progress of this TrainJob goes to {server}.")
        if (endpoint := otel.endpoint()) is not None:
            try:
                self._exporters.append(otel.OpenTelemetry(path, self._run_id))
                log_line(f"Metrics go to {endpoint} by OpenTelemetry.")
            except ImportError as error:
                log_line(
                    f"OpenTelemetry's variables ask for metrics at {endpoint}, but {error}: pip install "
                    "'lightning-resilience[metrics]'."
                )

    def _look(self) -> None:
        history, now = self._history.now(), time.time()
        has_ended = is_over(history)
        kept = time_account.kept(self._run.path)
        goodput = account(history.events, kept, None if has_ended else now)
        recorded = all_interruptions(goodput.interruptions, interruptions(history.events))
        step, goal = self._steps(history)
        if self._command is not None:
            for content in self._notices.look(history, recorded, step, now):
                self._command.put(content)
        if self._exporters:
            alive_since = now - 3 * KEEP_TIME_EVERY_S
            alive = [event for event in kept if not has_ended and max(event.ended or (), default=0) > alive_since]
            figures = measure(history, goodput, recorded, alive, self._budget)
            figures |= {"run_info": {self._run_id: 1.0}, "update_timestamp": {"": now}}
            figures |= {name: {"": value} for name, value in (("step", step), ("goal_step", goal)) if value is not None}
            for exporter in self._exporters:
                self._attempt(exporter.name, lambda exporter=exporter: exporter.show(figures))  # type: ignore[misc]

    def _steps(self, history: History) -> tuple[int | None, int | None]:
        """The furthest step of the newest fit, and the step at which it ends."""
        fit = next((event.fit for event in reversed(history.events) if isinstance(event, (Fresh, Resumed))), None)
        if fit is None:
            return None, None
        goal = (self._run.fit(fit).goal or {}).get("step")
        return reached_step(self._run.path, history.events, fit), goal if type(goal) is int else None
