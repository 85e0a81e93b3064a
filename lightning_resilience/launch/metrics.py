"""The figures of a run for monitoring systems: one table, which Prometheus, OpenTelemetry and Kubeflow show.

The names are Prometheus': base units, ``_total`` for values that only grow. Time by category is no counter, although it
adds up: after a hang, time that was first counted as training is counted as lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_resilience.launch.budget import Budget
from lightning_resilience.run.events import (
    BadStep,
    Event,
    Fault,
    Fresh,
    JobFailed,
    JobStart,
    Killed,
    LaunchExit,
    LaunchStart,
    NodesExcluded,
    Resumed,
    Rollback,
    Saved,
    SaveFailed,
    SaveRefused,
    Stragglers,
    TimeSpent,
    WorkersStart,
)
from lightning_resilience.run.goodput import Goodput
from lightning_resilience.run.history import History

STATES = ("starting", "training", "restarting", "finished", "interrupted", "failed", "halted")
CAUSES = ("killed", "hang", "preempted", "NaN", "straggler", "disk", "script", "crash", "launcher killed")
TIERS = ("global", "local")
_MAX_RANKS = 20
"""How many ranks have a series of their own at most: the ranks that were named most often."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: Its name without its unit.
        kind: ``counter``: it only grows.
        help: What it is.
        unit: ``seconds``, ``ratio``, or empty.
        label: The label by which its series differ; empty: it has one series.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    unit: str = ""
    label: str = ""

    @property
    def prometheus_name(self) -> str:
        """The name by Prometheus' conventions."""
        parts = ["lightning_resilience", self.name, self.unit, "total" if self.kind == "counter" else ""]
        return "_".join(filter(None, parts))


METRICS = (
    Metric("run_info", "gauge", "Always 1; the label is the id of the run", label="run_id"),
    Metric(
        "state", "gauge", "1 for the state of the run: " + ", ".join(STATES) + "; 0 for the other states", label="state"
    ),
    Metric("goodput", "gauge", "Share of new steps in all time but idle", "ratio"),
    Metric("ettr", "gauge", "The same with data, callbacks, validation and saves", "ratio"),
    Metric("rank_time", "gauge", "Time of all ranks so far, by category", "seconds", "category"),
    Metric("lost_rank_time", "gauge", "Time of all ranks that interruptions have cost so far", "seconds", "cause"),
    Metric("interruptions", "counter", "Interruptions, counted when it is known what followed", label="cause"),
    Metric("lost_steps", "counter", "Steps that were done again after interruptions"),
    Metric("worker_starts", "counter", "How often the workers were started, by all launches of the run"),
    Metric("restarts_used", "gauge", "Restarts inside the job since the last progress"),
    Metric("restarts_left", "gauge", "Restarts inside the job that are left without progress"),
    Metric("job_retries_left", "gauge", "Retries of the job that are left without progress"),
    Metric("ranks", "gauge", "Ranks of the workers that were started last"),
    Metric("excluded_nodes", "gauge", "Nodes that this launch has excluded from the run"),
    Metric("step", "gauge", "Furthest step of the script's last fit, up to 30 s ago"),
    Metric("goal_step", "gauge", "Step at which that fit ends, where its Trainer knows"),
    Metric("safe_step", "gauge", "Step of the newest verified checkpoint on shared storage"),
    Metric("progress_age", "gauge", "Longest time of a rank without a new step or phase, up to 30 s ago", "seconds"),
    Metric("saves", "counter", "Saves, by tier: global (shared storage) or local (node memory)", label="tier"),
    Metric("failed_saves", "counter", "Saves to shared storage that failed, or were refused"),
    Metric("last_save_timestamp", "gauge", "When the last save was complete, since the epoch", "seconds", "tier"),
    Metric("last_save_step", "gauge", "Step of the last save", label="tier"),
    Metric("last_save_duration", "gauge", "How long the last save took", "seconds", "tier"),
    Metric("bad_steps", "counter", "Steps with a loss or gradients that were not finite, or with a spike"),
    Metric("rollbacks", "counter", "Rollbacks to a good checkpoint without a restart"),
    Metric("straggler_reports", "counter", "Reports that named a rank as slow; the most frequent ranks", label="rank"),
    Metric("update_timestamp", "gauge", "When these figures were computed, since the epoch", "seconds"),
)
"""All metrics. A series whose value is unknown is left out."""

Figures = dict[str, dict[str, float]]
"""Values by the name of the metric and the value of its label. The latter is empty for a metric without label."""


def state_of(history: History) -> str:
    """The state of a run, one of :data:`STATES`.

    Args:
        history: The history of a run that is launched.
    """
    for event in reversed(history.since(LaunchStart)):
        match event:
            case LaunchExit():
                return event.status if event.status in STATES else "failed"
            case Fault() if event.has_ended_workers or event.kind in ("hang", "died"):
                return "restarting"
            case Killed() | JobFailed():
                return "restarting"
            case Fresh() | Resumed() | Saved():
                return "training"
            case JobStart() | WorkersStart():
                return "starting"
    return "starting"


def measure(
    history: History,
    goodput: Goodput,
    interruptions: Sequence[dict[str, Any]],
    kept: Iterable[TimeSpent],
    budget: Budget,
) -> Figures:
    """The metrics that follow from the ledger and the time account of a run.

    Args:
        history: The run's history.
        goodput: The run's time account.
        interruptions: As :func:`.report.all_interruptions` returns them.
        kept: Time records that watchdogs have kept of living ranks.
        budget: The run's limits.
    """
    state, failures = state_of(history), history.failures
    settled_until = all_recorded_until(history)
    settled = [each for each in interruptions if each["time"] < settled_until]
    lost = dict.fromkeys(CAUSES, 0.0)
    for each in interruptions:
        lost[each["cause"]] = lost.get(each["cause"], 0.0) + (each["rank_seconds"] or 0.0)
    starts = history.of(WorkersStart)
    ages = [end - since for event in kept for since, end in zip(event.since or (), event.ended or (), strict=False)]
    found: Figures = {
        "state": {each: float(each == state) for each in STATES},
        "rank_time": dict(goodput.by_category),
        "lost_rank_time": lost,
        "interruptions": _by_label(CAUSES, (each["cause"] for each in settled)),
        "lost_steps": {"": sum(each["steps_lost"] or 0 for each in settled)},
        "worker_starts": {"": len(starts)},
        "restarts_used": {"": failures.in_job},
        "restarts_left": {"": max(0, budget.in_job_restarts - failures.in_job)},
        "job_retries_left": {"": max(0, budget.job_retries - failures.job_retries)},
        **_saves(history.events),
        **_troubles(history),
    }
    known: dict[str, float | None] = {
        "goodput": goodput.goodput if goodput.ranks else math.nan,
        "ettr": goodput.ettr if goodput.ranks else math.nan,
        "ranks": starts[-1].world_size if starts else None,
        "safe_step": history.safe_step(),
        "progress_age": max(ages, default=None),
    }
    return found | {name: {"": value} for name, value in known.items() if value is not None and math.isfinite(value)}


def is_over(history: History) -> bool:
    """Whether the last launch has recorded its end."""
    return isinstance(next(iter(history.since(LaunchStart, LaunchExit)), None), LaunchExit)


def all_recorded_until(history: History) -> float:
    """The time before which interruptions are fully recorded: the newest start of workers, or infinity after the end.

    Args:
        history: The run's history.
    """
    last = history.last(WorkersStart)
    return math.inf if is_over(history) else 0.0 if last is None else last.time


def _by_label(known: Iterable[str], found: Iterable[str]) -> dict[str, float]:
    """Counts by label. Known labels begin with 0: in a series that begins with 1, monitoring sees no growth."""
    return dict.fromkeys(known, 0.0) | Counter(found)


def _saves(events: Iterable[Event]) -> Figures:
    counts: Counter[str] = Counter(dict.fromkeys(TIERS, 0))
    found: Figures = {"last_save_timestamp": {}, "last_save_step": {}, "last_save_duration": {}}
    for event in events:
        if isinstance(event, Saved):
            tier = event.tier or "global"
            counts[tier] += event.count or 1
            last = {"timestamp": event.time, "step": event.step, "duration": event.seconds}
            for name, value in last.items():
                if value is not None:
                    found[f"last_save_{name}"][tier] = value
    return {"saves": dict(counts), **found}


def _troubles(history: History) -> Figures:
    steps, named, failed, rollbacks = set(), Counter[str](), 0, 0
    for event in history.events:
        match event:
            case BadStep():  # several ranks may record the same one
                steps.add((event.fit, event.step, event.epoch, *(event.batches or ())))
            case Rollback():
                rollbacks += 1
            case SaveFailed() | SaveRefused():
                failed += 1
            case Stragglers():
                named.update(map(str, event.ranks or ()))
    excluded = [event for event in history.since(LaunchStart) if isinstance(event, NodesExcluded)]
    return {
        "bad_steps": {"": len(steps)},
        "rollbacks": {"": rollbacks},
        "failed_saves": {"": failed},
        "straggler_reports": dict(named.most_common(_MAX_RANKS)),
        "excluded_nodes": {"": sum(len(event.excluded or ()) for event in excluded)},
    }
