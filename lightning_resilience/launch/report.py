"""``lightning-resilience report``: where the time of a run went, its worst interruptions and its timeline."""

from __future__ import annotations

import bisect
import json
import os
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from lightning_resilience._formatting import duration, or_dash, shortened, table, timestamp
from lightning_resilience.launch.status import goes_on
from lightning_resilience.run import time_account
from lightning_resilience.run.events import Event
from lightning_resilience.run.failures import recurrence
from lightning_resilience.run.goodput import PART_OF, PARTS, InterruptionCost, account
from lightning_resilience.run.history import History, read_history
from lightning_resilience.run.interruptions import Interruption, interruptions, repeated_failures
from lightning_resilience.run.run_directory import Outcome, RunDirectory

JSON_SCHEMA = 1
"""Version of what ``report --json`` prints. New keys keep it; another meaning of a key needs a new one."""

JSON_KEYS = {
    "schema": "version of this format",
    "run_dir": "the run directory",
    "began": "first launch, seconds since the epoch; `null`: nothing has run",
    "ended": "end of the run, or now, seconds since the epoch; `null`: nothing has run",
    "goes_on": "whether it waits for nodes or runs",
    "outcome": "`finished`, `interrupted`, `failed` or `halted`; `null`: none recorded",
    "ranks": "most ranks that it had at a time",
    "rank_seconds": "time of all ranks from `began` to `ended`",
    "goodput": "share of new steps in all time but `idle`, 0 to 1; `null`: nothing has run",
    "ettr": "the same with data, callbacks, validation and saves",
    "categories": "rank-seconds of every category",
    "losses": "what was lost, the largest first",
    "losses[].name": "cause of interruptions, or category; `first start`: what it takes to start without a cause",
    "losses[].interruptions": "how many; 0: it is none",
    "losses[].rank_seconds": "rank-seconds",
    "losses[].share": "share in all time but `idle`, 0 to 1",
    "losses[].node": "node to which more than half is due; `null`: none",
    "losses[].categories": "rank-seconds of the categories of which it consists",
    "interruptions": "interruptions, oldest first",
    "interruptions[].time": "when it was found, else when the workers ended, seconds since the epoch",
    "interruptions[].cause": "`killed`, `hang`, `preempted`, `NaN`, `straggler`, `disk`, `script` or `crash`",
    "interruptions[].reason": "what was recorded about it",
    "interruptions[].node": "node on which it began; `null`: not known, or all",
    "interruptions[].rank_seconds": "what it has cost",
    "interruptions[].detect": "rank-seconds from the last sign of life to the verdict",
    "interruptions[].end": "rank-seconds until the processes had ended",
    "interruptions[].start": "rank-seconds of queue, launch and start of their successors, up to the first step",
    "interruptions[].restore": "rank-seconds of choosing and loading the checkpoint and the position in the data",
    "interruptions[].redo": "rank-seconds of steps done again and of work that was not ended",
    "interruptions[].steps_lost": "steps done again, at least; `null`: not known",
    "interruptions[].resumed_step": "step from which the run went on; `null`: not known",
}
"""What each key of it means."""

_NOT_SHOWN = (
    *("event", "time", "rank", "node", "step", "fit"),  # in columns of their own
    *("slurm", "versions", "files", "budget", "elastic_run_id", "saved_at", "launch_id", "run_id", "attempt", "host"),
    *("pid", "began", "since", "ended"),
)
_PHRASES = {
    "data_loading": "waiting for batches",
    "callbacks": "callbacks and loggers",
    "checkpoint_save": "waiting for saves",
    "wasted_progress": "steps done again",
    "queue": "waiting for nodes",
    "teardown": "the end of processes",
    "other": "not known",
}
_FIRST_START = "first start"
_SHOWN_LOSSES = 3
_SHOWN_INTERRUPTIONS = 5
_SHOWN_SHARE = 0.001
_REASON_LENGTH = 80


@dataclass
class _Lost:
    """A loss over all nodes: of the interruptions with one cause, or of one category."""

    name: str
    interruptions: int = 0
    categories: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    nodes: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def seconds(self) -> float:
        """Rank-seconds."""
        return sum(self.categories.values())

    @property
    def node(self) -> str | None:
        """The node to which more than half is due."""
        return next((node for node, seconds in self.nodes.items() if node and seconds > self.seconds / 2), None)


class _Report:
    """What there is to say of a run.

    Args:
        run_directory: The run directory.
        history: Its history.
    """

    def __init__(self, run_directory: RunDirectory, history: History) -> None:
        self.run_directory = run_directory
        self.history = history
        kept = time_account.kept(run_directory.path)
        self.goes_on = goes_on(history, run_directory.path, kept)
        self.goodput = account(history.events, kept, time.time() if self.goes_on else None)
        self.recorded = interruptions(history.events)
        self._active = self.goodput.total - self.goodput.by_category["idle"]

    def share(self, seconds: float) -> float:
        """The share in all time but ``idle``."""
        return seconds / self._active if self._active > 0 else 0.0

    @property
    def outcome(self) -> Outcome | None:
        """How it ended."""
        outcome, last = self.run_directory.outcome, self.history.allocations[-1:]
        if outcome is None and last and not last[0].launched and last[0].exit is not None and self.run_directory.fits:
            return self.run_directory.fits[-1].outcome  # without our launcher only the fits have one
        return outcome

    def losses(self) -> list[_Lost]:
        """What was lost, the largest first."""
        found: dict[str, _Lost] = {}
        several_nodes = len({loss.node for loss in self.goodput.seconds}) > 1
        for loss, seconds in self.goodput.seconds.items():
            if loss.category in ("productive", "idle"):
                continue
            is_start = PART_OF.get(loss.category) in ("start", "restore") and loss.category != "queue"
            name = loss.cause or (_FIRST_START if is_start else loss.category)
            lost = found.setdefault(name, _Lost(name))
            lost.categories[loss.category] += seconds
            if not loss.cause and several_nodes:
                lost.nodes[loss.node] += seconds
        for each in self.goodput.interruptions:
            lost = found.setdefault(each.cause, _Lost(each.cause))
            lost.interruptions += 1
            lost.nodes[each.node] += sum(each.seconds.values())
        return sorted(found.values(), key=lambda lost: lost.seconds, reverse=True)

    def recorded_of(self) -> list[Interruption | None]:
        """What the ledger says about the steps of each interruption of the account."""
        times = [each.time for each in self.goodput.interruptions]
        found: list[Interruption | None] = [None] * len(times)
        for each in reversed(self.recorded):
            if (index := bisect.bisect_right(times, each.time) - 1) >= 0:
                found[index] = each
        return found

    def to_json(self) -> dict[str, Any]:
        """As :data:`JSON_KEYS` describes it."""
        goodput, has_run = self.goodput, self._active > 0
        return {
            "schema": JSON_SCHEMA,
            "run_dir": str(self.run_directory.path),
            "began": goodput.began if goodput.seconds else None,
            "ended": goodput.ended if goodput.seconds else None,
            "goes_on": self.goes_on,
            "outcome": None if self.outcome is None else self.outcome.status,
            "ranks": goodput.ranks,
            "rank_seconds": goodput.total,
            "goodput": goodput.goodput if has_run else None,
            "ettr": goodput.ettr if has_run else None,
            "categories": goodput.by_category,
            "losses": [
                {
                    "name": lost.name,
                    "interruptions": lost.interruptions,
                    "rank_seconds": lost.seconds,
                    "share": self.share(lost.seconds),
                    "node": lost.node,
                    "categories": dict(lost.categories),
                }
                for lost in self.losses()
            ],
            "interruptions": [
                {
                    "time": each.time,
                    "cause": each.cause,
                    "reason": each.reason,
                    "node": each.node or None,
                    "rank_seconds": sum(each.seconds.values()),
                    **each.parts,
                    "steps_lost": None if recorded is None else recorded.steps_lost,
                    "resumed_step": None if recorded is None else recorded.resumed_step,
                }
                for each, recorded in zip(goodput.interruptions, self.recorded_of(), strict=True)
            ],
        }

    # -- text ----------------------------------------------------------------------------------------------------------

    def verdict(self) -> list[str]:
        """Goodput, the largest losses and the number of interruptions."""
        goodput = self.goodput
        lines = [f"Run {self.run_directory.path}", ""]
        if goodput.ranks:
            idle = goodput.by_category["idle"] / goodput.ranks
            of = f"{goodput.ranks} rank{'s' * (goodput.ranks > 1)} x {_lasted(goodput.total / goodput.ranks)}"
            if idle >= 1:
                of += f"; not counted: {_lasted(idle)} in which nothing ran it"
            so_far = " so far" if self.goes_on else ""
            lines.append(
                f"Goodput{so_far} {_percent(goodput.goodput)} (time in new steps), ETTR {_percent(goodput.ettr)} "
                f"(with data, validation and saves), of {of}."
            )
            losses = [each for each in self.losses() if self.share(each.seconds) >= _SHOWN_SHARE]
            lines += map(self._loss, losses[:_SHOWN_LOSSES])
        else:
            lines.append("Goodput is not known: no process has recorded what it spent its time on.")
        kinds = goodput.causes if goodput.ranks else Counter(each.kind for each in self.recorded)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        steps = [each.steps_lost for each in self.recorded if each.steps_lost is not None]
        at_least = "" if all(each.is_reached_known for each in self.recorded) else "at least "
        lost = f"Steps lost: {at_least}{sum(steps)}."
        if not goodput.ranks:
            seconds = sum(each.seconds_lost or 0.0 for each in self.recorded)
            lost += f" Seconds lost: {seconds:.1f} of {self.history.events[-1].time - self.history.events[0].time:.1f}."
        return [*lines, f"Interruptions: {counts}. {lost}" if counts else "No interruption."]

    def _loss(self, lost: _Lost) -> str:
        what = _PHRASES.get(lost.name, lost.name)
        if lost.interruptions:
            what += f" ({lost.interruptions})"
        largest = sorted(lost.categories.items(), key=lambda item: item[1], reverse=True)[:2]
        shown = [f"{name} {_percent(self.share(seconds))}" for name, seconds in largest if seconds > 0]
        if len(lost.categories) > 1:
            what += f", mostly {', '.join(shown)}"
        where = "" if lost.node is None else f", {lost.node}"
        return f"Lost {_percent(self.share(lost.seconds))}: {what}{where}."

    def categories(self) -> list[str]:
        """The table of categories."""
        shown = [
            (category, seconds)
            for category, seconds in self.goodput.by_category.items()
            if seconds > _SHOWN_SHARE * self.goodput.total
        ]
        rows = [
            [category, f"{seconds:.1f}", _lasted(seconds), "" if category == "idle" else _percent(self.share(seconds))]
            for category, seconds in sorted(shown, key=lambda item: item[1], reverse=True)
        ]
        return ["", "Time of all ranks", *table(["category", "rank-seconds", "", "share"], rows)] if rows else []

    def interruptions(self) -> list[str]:
        """The table of the worst interruptions; without an account, of all that the ledger knows."""
        goodput = self.goodput
        if goodput.ranks:
            found = [*zip(goodput.interruptions, self.recorded_of(), strict=True)]
            worst = sorted(found, key=lambda each: sum(each[0].seconds.values()), reverse=True)[:_SHOWN_INTERRUPTIONS]
            rows = [self._row(each, recorded) for each, recorded in worst]
            title = f"Worst interruptions ({len(rows)} of {len(found)}), in seconds of each rank"
        else:
            rows = [_recorded_row(each) for each in self.recorded]
            title = "Interruptions"
        if not rows:
            return []
        again = (recurrence(*item) for item in repeated_failures(self.history.events).items())
        head = ["time", "cause", "node", *PARTS, "sum", "steps lost", "resumed from", "reason"]
        return ["", title, *table(head, rows), *(f"{line[0].upper()}{line[1:]}." for line in again)]

    def _row(self, each: InterruptionCost, recorded: Interruption | None) -> list[str]:
        ranks = self.goodput.ranks
        parts = [*each.parts.values(), sum(each.seconds.values())]
        return [
            timestamp(each.time),
            each.cause,
            each.node or "-",
            *(f"{seconds / ranks:.1f}" for seconds in parts),
            *_steps(recorded),
            shortened(each.reason, _REASON_LENGTH),
        ]

    def timeline(self) -> list[str]:
        """All events."""
        rows = [_timeline_row(event) for event in self.history.events]
        return ["", "Timeline", *table(["time", "event", "who", "where", "step", "details"], rows)]


def report(run_dir: str | os.PathLike[str]) -> str:
    """The report on a run, as text.

    Args:
        run_dir: The run directory.
    """
    run_directory = RunDirectory(run_dir)
    history = read_history(run_directory.ledger)
    if not history.events:
        return f"Nothing is recorded in {run_directory.ledger}: no run has been started here."
    found = _Report(run_directory, history)
    lines = [*found.verdict(), *found.categories(), *found.interruptions(), *found.timeline()]
    outcome = found.outcome
    lines.append(f"Outcome: {outcome.status} ({outcome.reason})" if outcome else "Outcome: none; running, or killed.")
    return "\n".join(lines)


def report_json(run_dir: str | os.PathLike[str]) -> str:
    """Goodput, losses and interruptions of a run as JSON, see :data:`JSON_KEYS`.

    Args:
        run_dir: The run directory.
    """
    run_directory = RunDirectory(run_dir)
    return json.dumps(_Report(run_directory, read_history(run_directory.ledger)).to_json(), indent=1)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _lasted(seconds: float) -> str:
    days, rest = divmod(seconds, 86400)
    return f"{days:.0f} d {rest / 3600:.0f} h" if days else duration(seconds)


def _steps(recorded: Interruption | None) -> list[str]:
    """How many were lost, and where it went on."""
    if recorded is None:
        return ["-", "-"]
    at_least = "" if recorded.is_reached_known or recorded.steps_lost is None else ">="
    return [at_least + or_dash(recorded.steps_lost), or_dash(recorded.resumed_step)]


def _recorded_row(each: Interruption) -> list[str]:
    unknown = ["-"] * (len(PARTS) + 2)  # the node and the sum
    return [timestamp(each.time), each.kind, *unknown, *_steps(each), shortened(each.reason, _REASON_LENGTH)]


def _timeline_row(event: Event) -> list[str]:
    fields = event.to_json()
    rank, step, fit = (fields.get(name) for name in ("rank", "step", "fit"))
    details = {name: value for name, value in fields.items() if name not in _NOT_SHOWN and value is not None}
    return [
        timestamp(event.time),
        event.name,
        "launcher" if rank is None else f"rank {rank}",
        event.node or "",
        "" if step is None else (str(step) if fit is None else f"{fit}: {step}"),
        shortened(" ".join(f"{name}={value}" for name, value in details.items()), 100),
    ]
