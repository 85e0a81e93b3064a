"""The important events of a launch that ``--on-event`` receives, each once, as JSON objects."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_resilience._formatting import shortened
from lightning_resilience.launch.metrics import all_recorded_until
from lightning_resilience.run.events import (
    Event,
    LauncherKilled,
    LaunchExit,
    LaunchStart,
    MarkedBad,
    NodesExcluded,
    Quarantined,
    RanksReplaced,
    Rollback,
    Saved,
    SaveFailed,
    SaveRefused,
    Stragglers,
    WorkersStart,
)
from lightning_resilience.run.failures import growths
from lightning_resilience.run.history import History

SCHEMA = 1
"""Version of the objects. New keys and events do not change it; another meaning of one would."""

LAST = "run_ended"

EVENTS = {
    "run_began": "the launch has begun",
    "interruption": "workers ended before the run did; reported when the next ones start, after 10 s at the latest",
    "restart": "the workers were started again",
    "rollback": "a fit has rolled back to a good checkpoint, because of bad steps or diverged replicas",
    "stragglers": "ranks are slow, and not the same ranks as last reported",
    "node_excluded": "nodes are excluded from the run",
    "save_failed": "a save to shared storage failed or was refused; only the first such save after a successful one",
    "checkpoint_bad": "a checkpoint failed verification, or training could not resume from it",
    LAST: "the launch has ended; the last event",
}
"""The events, and what they mean."""

KEYS = {
    "schema": "version of this format",
    "event": "one of the events above",
    "time": "when it was recorded, seconds since the epoch",
    "run_id": "id of the run; also its id at Weights & Biases",
    "run_dir": "the run directory",
    "attempt": "how often the workers have been started, by all launches of the run",
    "step": "furthest step of the script's last fit; `null`: no fit has begun",
    "node": "node on which it happened; `null`: not known, or several",
    "message": "what happened, in a line",
    "details": "for `interruption`, the object in `interruptions` of `report --json`; otherwise the [event of the "
    "ledger](ledger.md#on-disk)",
    "dropped": "events dropped before this one because the command was too slow",
}
"""The keys of an object, and what they mean."""

_INTERRUPTION_SETTLES_WITHIN_S = 10.0
_MESSAGE_LENGTH = 400


class Notices:
    """Finds events in the history of a run that were not reported yet.

    Args:
        launch_id: The id of the launch; earlier events are not reported.
        run_id: The id of the run.
        run_dir: The run directory.
    """

    def __init__(self, launch_id: str, run_id: str, run_dir: str) -> None:
        self._launch_id = launch_id
        self._run = {"run_id": run_id, "run_dir": run_dir}
        self._seen: set[tuple[float, str, int | None, str | None]] = set()
        self._told = 0  # number of interruptions that were reported
        self._slow: list[int] = []
        self._saves_fail = False
        self._bad: set[str] = set()

    def look(
        self, history: History, interruptions: Sequence[dict[str, Any]], step: int | None, now: float
    ) -> list[dict[str, Any]]:
        """The events to report, the oldest first: objects with :data:`KEYS`, except ``dropped``.

        Args:
            history: The run's history.
            interruptions: As :func:`.report.all_interruptions` returns them.
            step: The furthest step of the script's last fit.
            now: The time, in seconds since the epoch.
        """
        events = history.events
        begin = next((i for i, event in enumerate(events) if self._is_mine(event)), None)
        if begin is None:
            return []
        found = []
        for event in events[begin:]:
            key = (event.time, event.name, event.rank, event.node)
            if key not in self._seen:  # events of other hosts may turn up late, and further back
                self._seen.add(key)
                before = events[begin - 1] if begin and self._is_mine(event) else None
                found += [self._object(name, event, text) for name, text in self._of(event, before, history)]
        first = next((event.time for event in events[begin:] if isinstance(event, WorkersStart)), math.inf)
        own = [each for each in interruptions if each["time"] >= first]  # of this launch's workers
        settled_until = max(all_recorded_until(history), now - _INTERRUPTION_SETTLES_WITHIN_S)
        for each in own[self._told :]:
            if each["time"] >= settled_until:
                break
            self._told += 1
            where = f" on {each['node']}" if each["node"] else ""
            found.append(self._tell("interruption", each, f"{each['cause']}{where}: {each['reason']}", each))
        starts = sorted(event.time for event in history.of(WorkersStart))
        for each in found:
            each["step"] = step
            each["attempt"] = sum(time <= each["time"] for time in starts)
        return sorted(found, key=lambda each: (each["event"] == LAST, each["time"], each["event"] != "interruption"))

    def _is_mine(self, event: Event) -> bool:
        return isinstance(event, LaunchStart) and event.launch_id == self._launch_id

    def _of(self, event: Event, before: Event | None, history: History) -> Iterator[tuple[str, str]]:
        """The names under which an event is reported, with their messages."""
        match event:
            case LaunchStart():
                step = history.safe_step()
                killed = "; the launcher before was killed" if isinstance(before, LauncherKilled) else ""
                yield "run_began", ("new run" if step is None else f"continuing, step {step} is safe") + killed
            case WorkersStart() if event.restart_count in growths(history.of(RanksReplaced), event.elastic_run_id):
                pass  # no rank was lost
            case WorkersStart() if any(start.time < event.time for start in history.of(WorkersStart)):
                safe = (
                    "no checkpoint in the run directory yet"
                    if event.verified_step is None
                    else f"step {event.verified_step} is safe"
                )
                yield "restart", f"the workers were started again, {safe}"
            case Rollback():
                yield "rollback", f"rolled back: {event.reason}"
            case Stragglers():
                if self._slow != (ranks := sorted(event.ranks or ())):
                    self._slow = ranks
                    yield "stragglers", str(event.reason)
            case NodesExcluded():
                yield "node_excluded", f"{', '.join(event.excluded or ())}: {event.reason}"
            case SaveFailed() | SaveRefused():
                if not self._saves_fail:
                    self._saves_fail = True
                    yield "save_failed", str(event.reason)
            case Saved(tier="global" | None):
                self._saves_fail = False
            case Quarantined() | MarkedBad():
                if event.path not in self._bad:  # several ranks may record it
                    self._bad.add(str(event.path))
                    yield "checkpoint_bad", f"{event.path}: {event.reason}"
            case LaunchExit():
                yield LAST, f"{event.status}: {event.reason} (exit code {event.exit_code})"

    def _object(self, name: str, event: Event, message: str) -> dict[str, Any]:
        return self._tell(name, vars(event), message, event.to_json())

    def _tell(self, name: str, of: Mapping[str, Any], message: str, details: dict[str, Any]) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "event": name,
            "time": of["time"],
            **self._run,
            "attempt": 0,
            "step": None,
            "node": of.get("node"),
            "message": shortened(message, _MESSAGE_LENGTH),
            "details": details,
        }
