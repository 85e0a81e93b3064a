"""``lightning-resilience report``: where the time of a run went, its worst interruptions and its timeline."""

from __future__ import annotations

import bisect
import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Any

from lightning_resilience._formatting import duration, or_dash, shortened, table, timestamp
from lightning_resilience.launch.json_output import to_json
from lightning_resilience.launch.status import now
from lightning_resilience.run import time_account
from lightning_resilience.run.advice import Advice, advice
from lightning_resilience.run.events import BatchesLeftOut, Event, LaunchExit, TimeSpent, WorkersStart
from lightning_resilience.run.failures import recurrence
from lightning_resilience.run.figures import figures_of
from lightning_resilience.run.goodput import PART_OF, PARTS, Goodput, InterruptionCost, account
from lightning_resilience.run.history import History, read_history
from lightning_resilience.run.interruptions import Interruption, interruptions, repeated_failures
from lightning_resilience.run.ledger import reader_of
from lightning_resilience.run.replay import RunFigures
from lightning_resilience.run.run_directory import Outcome, RunDirectory
from lightning_resilience.run.what_if import predict

_NOT_SHOWN = (
    *("event", "time", "rank", "node", "step", "fit"),  # in columns of their own
    *("slurm", "versions", "files", "budget", "elastic_run_id", "saved_at", "launch_id", "run_id", "attempt", "host"),
    *("pid", "began", "noticed"),
)
_PHRASES = {
    "data_loading": "waiting for batches",
    "callbacks": "callbacks and loggers",
    "checkpoint_save": "waiting for saves",
    **dict.fromkeys(("straggler_wait", "straggler"), "waiting for a straggler"),
    "wasted_progress": "steps done again",
    "queue": "waiting for nodes",
    "teardown": "the end of processes",
    "fast_forward": "finding the place in the data",
    "other": "unrecorded time of killed workers",
}
_FIRST_START = "first start"
_ROUNDED_S = 0.001  # times of accounts are rounded to this
_SHOWN_LOSSES = 3
_SHOWN_INTERRUPTIONS = 5
_SHOWN_SHARE = 0.001
_REASON_LENGTH = 80
_MODEL_IS_OFF = 0.01
_ALIKE_IN_FULL = 3
"""How many consecutive events of one kind are shown at most between the first and the last of them."""
_OUTCOME_LENGTH = 140


def report(run_dir: str | os.PathLike[str], as_json: bool = False, what_if: str | None = None) -> str:
    """The report on a run.

    Args:
        run_dir: The run directory.
        as_json: Whether to return JSON for programs, see :data:`.json_output.KEYS`.
        what_if: Other settings, as :func:`~.what_if.predict` takes them: the report predicts what the run would have
            taken with them. As text, the report then has only this prediction.

    Raises:
        ValueError: If these settings make no sense for the run.
    """
    found = read_run(run_dir, what_if=what_if).content
    if as_json:
        return to_json(found)
    if not found["timeline"]:
        nothing = f"Nothing is recorded in {RunDirectory(run_dir).ledger}: no run has been started here."
        return "\n".join([nothing, *left_out(found)])
    if what_if is not None:
        return "\n".join(comparison(found))
    tables = (_worst(found), _restarts_table(found), _categories(found), _timeline(found))
    return "\n".join([*_verdict(found), *_advised(found), *(line for lines in tables for line in lines)])


# -- content -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunReport:
    """The content of a report, from which text, JSON or a page is made.

    Attributes:
        content: With the keys in :data:`.json_output.KEYS`.
        goodput: The time account of the run.
        events: The events of the ledger, and the time records of ranks that run or whose node went down.
    """

    content: dict[str, Any]
    goodput: Goodput
    events: list[Event]


def read_run(run_dir: str | os.PathLike[str], with_segments: bool = False, what_if: str | None = None) -> RunReport:
    """Reads a run and computes the content of its report.

    Args:
        run_dir: The run directory.
        with_segments: Whether to also compute at which times each rank spent its seconds.
        what_if: Other settings to predict.

    Raises:
        ValueError: If these settings make no sense for the run.
    """
    run_directory = RunDirectory(run_dir)
    history = read_history(run_directory.ledger)
    _, is_ongoing = now(history, run_directory.path) if history.allocations else ("", False)
    kept = time_account.kept(run_directory.path)
    goodput = account(history.events, kept, time.time() if is_ongoing else None, with_segments)
    content = _content(run_directory, history, goodput, is_ongoing)
    events = [*history.events, *kept]
    figures = figures_of(events, goodput)
    content["advice"] = [_advice(each, goodput) for each in advice(figures, events, goodput)]
    content["what_if"] = None if what_if is None else _what_if(figures, goodput, what_if)
    return RunReport(content, goodput, events)


def _content(run_directory: RunDirectory, history: History, goodput: Goodput, is_ongoing: bool) -> dict[str, Any]:
    seconds = goodput.by_category
    active = goodput.total - seconds["idle"]
    is_known = active > 0 and goodput.ranks > 0
    outcome = None if is_ongoing else _outcome(run_directory, history)  # not that of earlier workers
    every = all_interruptions(goodput.interruptions, interruptions(history.events))
    batches = {each.fit: each.left_out or 0 for each in history.of(BatchesLeftOut)}  # the last event of each fit
    return {
        "run_dir": str(run_directory.path),
        "began": goodput.began if goodput.seconds else None,
        "ended": goodput.ended if goodput.seconds else None,
        "is_ongoing": is_ongoing,
        "outcome": None if outcome is None else outcome.status,
        "reason": None if outcome is None else outcome.reason,
        "ranks": goodput.ranks,
        "absent_rank_seconds": goodput.absent_s,
        "rank_seconds": goodput.total,
        "goodput": goodput.goodput if is_known else None,
        "ettr": goodput.ettr if is_known else None,
        "losses": _losses(goodput, active),
        "interruptions": every,
        "restarts": _restarts(every),
        "repeated": [recurrence(*item) for item in repeated_failures(history.events).items()],
        "categories": _sorted(seconds),
        "left_out_batches": sum(batches.values()),
        "skipped_lines": reader_of(run_directory.ledger).skipped,
        "timeline": [event.to_json() for event in history.events],
    }


def _outcome(run_directory: RunDirectory, history: History) -> Outcome | None:
    outcome, last = run_directory.outcome, history.allocations[-1:]
    if outcome is None and last and not last[0].launched and last[0].exit is not None and run_directory.fits:
        return run_directory.fits[-1].outcome  # without our launcher only the fits have an outcome
    exits = history.since(WorkersStart, LaunchExit) if outcome is None else []
    if exits and isinstance(exits[0], LaunchExit):  # the workers could not record it
        return Outcome.of({"status": exits[0].status, "reason": exits[0].reason or ""})
    return outcome


def _losses(goodput: Goodput, active: float) -> list[dict[str, Any]]:
    """The losses, the largest first: one for each cause of interruptions, and one for each category of other time."""
    categories: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    nodes: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    has_nodes = len({loss.node for loss in goodput.seconds}) > 1
    for loss, seconds in goodput.seconds.items():
        if loss.category not in ("productive", "idle") and seconds:
            is_start = PART_OF.get(loss.category) in ("start", "restore") and loss.category != "queue"
            name = loss.cause or (_FIRST_START if is_start else loss.category)
            categories[name][loss.category] += seconds
            if has_nodes and (not loss.cause or loss.category == "straggler_wait"):
                nodes[name][loss.node] += seconds
    for each in goodput.interruptions:
        nodes[each.cause][each.node] += sum(each.seconds.values())
    found = []
    for name, of_all in categories.items():
        total = sum(of_all.values())
        found.append(
            {
                "name": name,
                "interruptions": goodput.causes[name],
                "rank_seconds": total,
                "share": total / active,
                "node": next((node for node, own in nodes[name].items() if node and own > total / 2), None),
                "categories": _sorted(of_all),
            }
        )
    return sorted(found, key=itemgetter("rank_seconds"), reverse=True)


def _sorted(seconds: Mapping[str, float]) -> dict[str, float]:
    """The same, the largest first."""
    return dict(sorted(seconds.items(), key=itemgetter(1), reverse=True))


def all_interruptions(costs: Sequence[InterruptionCost], recorded: Sequence[Interruption]) -> list[dict[str, Any]]:
    """The interruptions of the time account, with their steps from the ledger, and others that only the ledger has.

    Args:
        costs: The interruptions of the account.
        recorded: The interruptions of the ledger.
    """
    times = [cost.time for cost in costs]
    of: dict[int, Interruption] = {}
    found = []
    for each in recorded:
        index = bisect.bisect_right(times, each.time + _ROUNDED_S) - 1
        if index < 0 or index in of:
            found.append(_interruption(None, each))
        else:
            of[index] = each
    found += [_interruption(cost, of.get(index)) for index, cost in enumerate(costs)]
    return sorted(found, key=itemgetter("time"))


def _interruption(cost: InterruptionCost | None, recorded: Interruption | None) -> dict[str, Any]:
    """The entry of an interruption, from the account, the ledger or both."""
    if cost is None:
        assert recorded is not None
        cost = InterruptionCost(recorded.time, recorded.kind, recorded.reason)
    return {
        "time": cost.time,
        "cause": cost.cause,
        "reason": cost.reason,
        "node": cost.node or None,
        "rank_seconds": sum(cost.seconds.values()) if cost.seconds else None,
        **(cost.parts if cost.seconds else dict.fromkeys(PARTS)),
        "phases": cost.phases if cost.seconds else None,
        "steps_lost": None if recorded is None else recorded.steps_lost,
        "is_lower_bound": recorded is not None and not recorded.is_reached_known,
        "resumed_step": None if recorded is None else recorded.resumed_step,
        "seconds_lost": None if recorded is None else recorded.seconds_lost,
    }


def _restarts(every: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The time from a fault to the first new step, by phase; only of interruptions after which the run has trained."""
    phases = [each["phases"] for each in every if each["phases"] is not None and each["phases"]["first_step"]]
    if not phases:
        return None
    found = [{**each, "sum": sum(each.values())} for each in phases]
    return {
        "count": len(found),
        "median": {name: median(each[name] for each in found) for name in found[0]},
        "longest": max(found, key=itemgetter("sum")),
    }


def _advice(found: Advice, goodput: Goodput) -> dict[str, Any]:
    return {
        "text": found.text,
        "rank_seconds": found.saved_s * goodput.ranks,
        "share": found.share,
        "goodput": found.goodput,
        "what_if": found.what_if,
        "is_bound": found.is_bound,
    }


def _what_if(figures: RunFigures | None, goodput: Goodput, what_if: str) -> dict[str, Any]:
    if figures is None:
        raise ValueError("the run has not done a step with a known time yet")
    found = predict(figures, what_if)
    return {
        "settings": found.changes,
        "replayed_ettr": found.replayed.ettr,
        "replayed_rank_seconds": found.replayed.total_s * goodput.ranks,
        "ettr": found.predicted.ettr,
        "ettr_spread": found.predicted.spread,
        "goodput": found.predicted.goodput,
        "rank_seconds": found.predicted.total_s * goodput.ranks,
        "interruptions": found.predicted.interruptions,
        "categories": _sorted({name: each * goodput.ranks for name, each in found.predicted.seconds.items()}),
    }


# -- text --------------------------------------------------------------------------------------------------------------


def _verdict(found: dict[str, Any]) -> list[str]:
    """Goodput, the largest losses and the number of interruptions."""
    lines = [f"Run {found['run_dir']}", ""]
    if found["goodput"] is not None:
        so_far = " so far" if found["is_ongoing"] else ""
        lines.append(
            f"Goodput{so_far} {percent(found['goodput'])} (time in new steps), ETTR {percent(found['ettr'])} "
            f"(with data, callbacks, validation and saves), of {extent(found)}."
        )
        lines += largest_losses(found)
    else:
        lines.append(f"Goodput is not known{' yet' * found['is_ongoing']}: no process has recorded its time.")
    return [*lines, interruption_counts(found), *left_out(found)]


def extent(found: dict[str, Any]) -> str:
    """Ranks times wall time, of which goodput is a share."""
    ranks = found["ranks"]
    of = f"{ranks} rank{'s' * (ranks > 1)} x {duration(found['rank_seconds'] / ranks)}"
    idle, absent = found["categories"]["idle"] / ranks, found["absent_rank_seconds"]
    left_out = [f"{duration(idle)} in which no launch ran"] * (idle >= 1)
    left_out += [f"{duration(absent)} of ranks that were absent"] * (absent >= 1)
    return f"{of}, without {' and '.join(left_out)}" if left_out else of


def largest_losses(found: dict[str, Any]) -> list[str]:
    """A sentence for each of the largest losses."""
    return [_loss(loss) for loss in found["losses"] if loss["share"] >= _SHOWN_SHARE][:_SHOWN_LOSSES]


def _loss(loss: dict[str, Any]) -> str:
    name, count, node = loss["name"], loss["interruptions"], loss["node"]
    what = f"{count} {name}" if count else phrase(name)
    if node is not None:
        what += f" on {node}"
    if len(loss["categories"]) > 1:
        largest = [*loss["categories"].items()][:2]
        shares = [f"{phrase(each)} {percent(loss['share'] * own / loss['rank_seconds'])}" for each, own in largest]
        what += f", mostly {' and '.join(shares)}"
    return f"Lost {percent(loss['share'])}: {what}."


def interruption_counts(found: dict[str, Any]) -> str:
    """How many interruptions of each kind there were, and the steps lost."""
    if not (recorded := found["interruptions"]):
        return "No interruption."
    causes = Counter(each["cause"] for each in recorded)
    at_least = "at least " if any(each["is_lower_bound"] for each in recorded) else ""
    steps = sum(each["steps_lost"] or 0 for each in recorded)
    counts = ", ".join(f"{count} {cause}" for cause, count in causes.items())
    return f"Interruptions: {counts}. Steps lost: {at_least}{steps}."


def left_out(found: dict[str, Any]) -> list[str]:
    """Sentences on the batches that the training has left out and the ledger lines that this report has ignored."""
    batches, lines = found["left_out_batches"], found["skipped_lines"]
    sentences = [f"{batches} batch{'es' * (batches > 1)} of absent ranks were left out."] * bool(batches)
    if lines:
        are = "line of the ledger is not an event" if lines == 1 else "lines of the ledger are not events"
        sentences.append(f"{lines} {are} (torn by a kill, damaged, or of another version) and ignored here.")
    return sentences


def steps_lost(interruption: dict[str, Any]) -> str:
    """How many steps an interruption has cost, as far as is known."""
    at_least = ">=" if interruption["is_lower_bound"] and interruption["steps_lost"] is not None else ""
    return at_least + or_dash(interruption["steps_lost"])


def _worst(found: dict[str, Any]) -> list[str]:
    """The table of the worst interruptions."""
    ranks = found["ranks"]

    def seconds_of(each: dict[str, Any]) -> float | None:
        """The lost seconds of each rank."""
        lost: float | None = each["seconds_lost"]
        return lost if each["rank_seconds"] is None else each["rank_seconds"] / ranks

    every = found["interruptions"]
    worst = sorted(every, key=lambda each: seconds_of(each) or 0.0, reverse=True)[:_SHOWN_INTERRUPTIONS]
    rows = [
        [
            timestamp(each["time"]),
            each["cause"],
            or_dash(each["node"]),
            *(_seconds(None if each[part] is None else each[part] / ranks) for part in PARTS),
            _seconds(seconds_of(each)),
            steps_lost(each),
            or_dash(each["resumed_step"]),
            shortened(each["reason"], _REASON_LENGTH),
        ]
        for each in worst
    ]
    if not rows:
        return []
    head = ["time", "cause", "node", *PARTS, "sum", "steps lost", "resumed from", "reason"]
    again = [f"{text[0].upper()}{text[1:]}." for text in found["repeated"]]
    return ["", f"Worst interruptions ({len(rows)} of {len(every)}), in seconds per rank", *table(head, rows), *again]


def _restarts_table(found: dict[str, Any]) -> list[str]:
    """The table of the time that restarts took, by phase."""
    if (restarts := found["restarts"]) is None:
        return []
    names = [name for name, seconds in restarts["longest"].items() if seconds or restarts["median"][name]]
    of = {f"median of {restarts['count']}": restarts["median"]} if restarts["count"] > 1 else {}
    of["longest"] = restarts["longest"]
    rows = [[what, *(_seconds(phases[name] / found["ranks"]) for name in names)] for what, phases in of.items()]
    head = ["", *(name.replace("_", " ") for name in names)]
    return ["", "From a fault to the first new step, in seconds per rank", *table(head, rows)]


def _categories(found: dict[str, Any]) -> list[str]:
    """The table of categories."""
    total, idle = found["rank_seconds"], found["categories"]["idle"]
    rows = [
        [category, f"{seconds / found['ranks']:.1f}", "-" if category == "idle" else percent(seconds / (total - idle))]
        for category, seconds in found["categories"].items()
        if found["goodput"] is not None and seconds > _SHOWN_SHARE * total
    ]
    return ["", "Time of the run, in seconds per rank", *table(["category", "seconds", "share"], rows)] if rows else []


def _timeline(found: dict[str, Any]) -> list[str]:
    """The table of events, without events that only the time account uses, and the outcome."""
    rows: list[list[str]] = []
    events = (event for event in found["timeline"] if event["event"] != TimeSpent.kind_name)
    for _, alike in groupby(events, key=lambda event: (event["event"], event.get("kind"))):
        first, *others = alike
        rows.append(_timeline_row(first))
        if (more := len(others) - 1) > _ALIKE_IN_FULL:  # a month has 40,000 saves
            rows.append(["", f"... {more} more", *[""] * 4])
            others = others[-1:]
        rows += map(_timeline_row, others)
    status = "none; running, or killed."
    if found["outcome"] is not None:
        status = f"{found['outcome']} ({shortened(found['reason'], _OUTCOME_LENGTH)})"
    head = ["time", "event", "who", "where", "step", "details"]
    return ["", "Timeline", *table(head, rows), f"Outcome: {status}"]


def _timeline_row(event: dict[str, Any]) -> list[str]:
    rank, step, fit = (event.get(name) for name in ("rank", "step", "fit"))
    details = {name: value for name, value in event.items() if name not in _NOT_SHOWN and value is not None}
    return [
        timestamp(event["time"]),
        event["event"],
        "launcher" if rank is None else f"rank {rank}",
        event["node"] or "",
        "" if step is None else (str(step) if fit is None else f"{fit}: {step}"),
        shortened(" ".join(f"{name}={value}" for name, value in details.items()), 100),
    ]


def phrase(category: str) -> str:
    """A category of time in words."""
    return _PHRASES.get(category, category.replace("_", " "))


def _advised(found: dict[str, Any]) -> list[str]:
    """The lines of advice."""
    if found["goodput"] is None:
        return []
    lines = [line for each in found["advice"] for line in (f"Advice: {sentence(each)}", f"        {gain(each)}")]
    return [
        "",
        *(lines or ["No advice: no known setting would have saved half a percent of the time."]),
    ]


def sentence(advice: dict[str, Any]) -> str:
    """The advice itself, as a sentence.

    Args:
        advice: An entry of the content.
    """
    text: str = advice["text"]
    return f"{text[0].upper()}{text[1:]}."


def gain(advice: dict[str, Any]) -> str:
    """What the advice would have saved, as a sentence.

    Args:
        advice: An entry of the content.
    """
    saved = f"{'up to ' * advice['is_bound']}{percent(advice['share'])} of the time ({hours(advice['rank_seconds'])})"
    points = 100 * advice["goodput"]
    return f"Would have saved {saved}{f', goodput {points:+.1f} points' if points >= 0.05 else ''}."


def hours(rank_seconds: float) -> str:
    """Rank-hours as text."""
    return f"{rank_seconds / 3600:.{1 if rank_seconds >= 36000 else 2}f} rank-hours"


def comparison(found: dict[str, Any]) -> list[str]:
    """The table that compares a run as it was with the prediction.

    Args:
        found: The content of the report, with a prediction.
    """
    what, ranks = found["what_if"], max(found["ranks"], 1)
    spread = f" +- {100 * what['ettr_spread']:.1f}" if what["ettr_spread"] else ""
    recorded_s = found["rank_seconds"] - found["categories"]["idle"]
    rows = [
        ["ETTR", percent(found["ettr"]), percent(what["ettr"]), f"{100 * (what['ettr'] - found['ettr']):+.1f}{spread}"],
        [
            "goodput",
            percent(found["goodput"]),
            percent(what["goodput"]),
            f"{100 * (what['goodput'] - found['goodput']):+.1f}",
        ],
        _row("seconds per rank", recorded_s / ranks, what["rank_seconds"] / ranks),
    ]
    least_s = _SHOWN_SHARE * recorded_s / ranks
    for category, seconds in found["categories"].items():
        after_s = what["categories"].get(category, 0.0) / ranks
        if category != "idle" and abs(after_s - seconds / ranks) > least_s:
            rows.append(_row(f"  {category}", seconds / ranks, after_s))
    settings = " ".join(f"{name}={value}" for name, value in what["settings"].items())
    lines = [f"Run {found['run_dir']}", "", f"If it had been {settings}, with the same work to do:", ""]
    lines += table(["", "recorded", "predicted", "change"], rows)
    if spread:
        number = len([each for each in found["interruptions"] if each["rank_seconds"]])
        lines += [
            "",
            f"Interruptions: {number} recorded, {what['interruptions']:.1f} predicted (mean of 200 random courses).",
        ]
    if abs(what["replayed_ettr"] - found["ettr"]) > _MODEL_IS_OFF:
        lines += [
            "",
            f"The same model gives {percent(what['replayed_ettr'])} for the run as it was: compare with that.",
        ]
    return lines


def _row(name: str, before: float, after: float) -> list[str]:
    return [name, f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}"]


def percent(share: float) -> str:
    """A share as text."""
    return f"{100 * share:.1f} %"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"
