"""``lightning-resilience report --html``: the report as one page that needs neither server, network nor script.

Everything that comes from the ledger is escaped. Charts have a bounded number of columns, so a page of many ranks and
interruptions stays small. All text is HTML beside the charts, since it would shrink with a chart on a narrow screen.
"""

from __future__ import annotations

import bisect
import html
import math
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lightning_resilience._files import publish
from lightning_resilience._formatting import duration, or_dash, shortened, timestamp
from lightning_resilience.launch.report import (
    RunReport,
    extent,
    gain,
    interruption_counts,
    largest_losses,
    left_out,
    percent,
    phrase,
    read_run,
    sentence,
    steps_lost,
)
from lightning_resilience.run.events import (
    BadStep,
    Event,
    Fault,
    Finished,
    FitInterrupted,
    Fresh,
    Killed,
    RestoredInPlace,
    Resumed,
    Rollback,
    Saved,
    Stragglers,
    StragglersReplaced,
    StragglerStop,
    TimeSpent,
)
from lightning_resilience.run.goodput import PARTS, Goodput

GROUPS = {
    "new steps": {"productive": ("#0a9373", "#18a684")},
    "beside the steps": {
        "data_loading": ("#f0cd3c", "#f0d24a"),
        "callbacks": ("#e3c878", "#e2cb84"),
        "validation": ("#faeaa6", "#f9eeb4"),
        "checkpoint_save": ("#cdbf62", "#cfc35e"),
        "straggler_wait": ("#a8842c", "#b8964a"),
    },
    "faults and redone steps": {
        "wasted_progress": ("#d4480e", "#ee5a22"),
        "detection": ("#8f1f0e", "#b5301a"),
        "teardown": ("#f2a284", "#f6b3a0"),
    },
    "starting": {
        "launch": ("#0b2d5e", "#2a5598"),
        "rendezvous": ("#1f5aa6", "#3a6fc0"),
        "imports": ("#3a7fd0", "#4f8fe0"),
        "script": ("#6aa5e4", "#74aaf0"),
        "setup": ("#2f6db8", "#4580cc"),
        "restore": ("#154a8c", "#3463ac"),
        "fast_forward": ("#8fc0ee", "#98c4f5"),
        "first_step": ("#b9d9f5", "#bfdcfa"),
    },
    "waiting and unknown": {
        "queue": ("#a9b0bb", "#717986"),
        "idle": ("#e2e5e9", "#2e343b"),
        "other": ("#c6cbd2", "#535a64"),
    },
}
"""The categories of time, grouped by what they mean to a reader, in the order in which they are drawn from the bottom,
and their colors on a light and on a dark page. The groups also differ in lightness, for readers who see few colors."""

_COLOURS = {category: colours for group in GROUPS.values() for category, colours in group.items()}
_PART_COLOURS = dict(
    zip(PARTS, ("detection", "teardown", "rendezvous", "fast_forward", "wasted_progress"), strict=True)
)
_PART_WORDS = {
    "detect": "until found",
    "end": "until ended",
    "start": "to start again",
    "restore": "to restore",
    "redo": "steps done again",
}
COLUMNS = 1000
ROW_HEIGHT = 40
_CHART_HEIGHT = 200
_SAVES_HEIGHT = 60
_MAX_ROWS = 24
_MAX_LOSSES = 60
_OPEN_LOSSES = 10
_MAX_NODES = 3
_LARGE_GAIN = 0.01
_MAX_INTERRUPTIONS = 100
_MAX_REPORTS = 20
_LONGEST_PAUSE = 0.08
_LONGEST_PAUSES = 0.3  # of all of them together
_REASON_LENGTH = 400
_MARK_LANES = 3
_MAX_LINES = 20

_NOT_TEXT = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")


def write_page(run_dir: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Writes the report on a run as a page.

    Args:
        run_dir: The run directory.
        path: The file; an existing one is replaced. Links to diagnoses are relative to its folder.

    Raises:
        OSError: If the file cannot be written.
    """
    path = Path(path).expanduser().absolute()
    text = page(read_run(run_dir, with_segments=True), path.parent)
    publish(path, lambda file: file.write(text.encode()))


def page(run: RunReport, folder: Path) -> str:
    """The report as a page.

    Args:
        run: The report, with segments.
        folder: The folder in which the page will be.
    """
    found = run.content
    axis = Axis(run.goodput)
    sections = [*_head(found), *_verdict(found)]
    if not found["timeline"] and not run.goodput.seconds:
        sections.append("<p>Nothing is recorded: no run has been started here.</p>")
    sections += _advice(found)
    if axis.is_known:
        sections += _strip(run, axis)
    if found["goodput"] is not None:
        sections += _losses(run)
    if axis.is_known:
        sections += _steps(run, axis)
    sections += [*_straggler_reports(run.events), *_stories(run, folder)]
    colours = {
        scheme: ";".join(f"--{name}:{both[index]}" for name, both in _COLOURS.items())
        for index, scheme in enumerate(("light", "dark"))
    }
    fills = "".join(f".{name}{{fill:var(--{name});background:var(--{name})}}" for name in _COLOURS)
    body = "\n".join(sections)
    nodes = {loss.node for loss in run.goodput.seconds}
    label = 8 * min(max(6 if len(nodes) <= _MAX_ROWS else 10, *map(len, nodes), 0), 20)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<title>{_text(Path(found["run_dir"]).name)}: report</title>
<style>:root{{{colours["light"]};--label:min({label}px,24vw)}}
@media (prefers-color-scheme:dark){{:root{{{colours["dark"]}}}}}
{_STYLE}{fills}</style></head>
<body>
{body}
<footer>Written {_text(_moment(time.time()))}. The same for programs: <code>lightning-resilience report --json</code>.
</footer>
</body></html>
"""


def _text(value: object) -> str:
    """Any value, as text of a page or in the quotes of an attribute."""
    return html.escape(_NOT_TEXT.sub("\ufffd", str(value)))


def _moment(seconds: float) -> str:
    return f"{timestamp(seconds)} {time.strftime('%Z', time.localtime(seconds))}"


def _share(share: float) -> str:
    """A length or position in a style."""
    return f"{100 * share:.2f}%"


# -- the verdict -------------------------------------------------------------------------------------------------------


def _head(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"<header><h1>{_text(Path(found['run_dir']).name)}</h1><p class='path'>{_text(found['run_dir'])}</p>"
    if found["began"] is not None:
        state = "runs" if found["is_ongoing"] else found["outcome"] or "no outcome is recorded"
        reason = f": {shortened(found['reason'], _REASON_LENGTH)}" if found["reason"] else ""
        yield f"<p>{_text(_moment(found['began']))} to {_text(timestamp(found['ended']))}. "
        yield f"<strong>{_text(state)}</strong>{_text(reason)}</p>"
    yield "</header>"


def _verdict(found: dict[str, Any]) -> Iterator[str]:
    """Goodput, the largest losses and the number of interruptions."""
    yield "<section class='verdict'>"
    if found["goodput"] is None:
        yield f"<p>Goodput is not known{' yet' * found['is_ongoing']}: no process has recorded its time.</p>"
    else:
        so_far = " so far" if found["is_ongoing"] else ""
        yield f"<p class='number'><b>{percent(found['goodput'])}</b> goodput{so_far}</p>"
        yield f"<p>Time in new steps, of {_text(extent(found))}. "
        yield f"<b>ETTR {percent(found['ettr'])}</b>: with data, callbacks, validation and saves.</p>"
        seconds = {name: each for name, each in found["categories"].items() if name != "idle"}
        yield _bar({name: seconds.get(name, 0.0) for name in _COLOURS}, sum(seconds.values()))
        yield "<p class='parts'>"
        yield from (
            f"<span><i class='{colour}'></i>{group} <b>{percent(share)}</b></span>"
            for group, colour, share in group_shares(found)
        )
        yield "</p><ul>"
        yield from (f"<li>{_text(sentence)}</li>" for sentence in largest_losses(found))
        yield "</ul>"
    yield f"<p>{_text(' '.join([interruption_counts(found), *left_out(found)]))}</p>"
    yield from (f"<p>{_text(text[0].upper() + text[1:])}.</p>" for text in found["repeated"])
    yield "</section>"


def _advice(found: Mapping[str, Any]) -> Iterator[str]:
    """What to change; entries with a small gain are folded, except for the first."""
    if not found["advice"]:
        return
    lines = [f"<li>{_text(sentence(each))} <small>{_text(gain(each))}</small></li>" for each in found["advice"]]
    large = max(sum(each["share"] >= _LARGE_GAIN for each in found["advice"]), 1)
    yield f"<section><h2>What to change</h2><ul>{''.join(lines[:large])}</ul>"
    if smaller := lines[large:]:
        yield f"<details><summary>{len(smaller)} with a smaller gain</summary>"
        yield f"<ul>{''.join(smaller)}</ul></details>"
    yield "</section>"


def group_shares(found: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """The groups of categories, each with the category whose color stands for it and its share of the time.

    Args:
        found: The content of the report.
    """
    seconds = {name: each for name, each in found["categories"].items() if name != "idle" and each > 0}
    total = sum(seconds.values())
    shares = []
    for group, categories in GROUPS.items():
        if own := {name: seconds[name] for name in categories if name in seconds}:
            shares.append((group, max(own, key=own.__getitem__), sum(own.values()) / total))
    return shares


def _bar(seconds: Mapping[str, float], total: float) -> str:
    """A bar that shows the parts of a sum, by category."""
    parts = (
        f"<i class='{name}' style='width:{_share(each / total)}' title='{_text(phrase(name))} {percent(each / total)}'>"
        "</i>"
        for name, each in seconds.items()
        if math.isfinite(total) and each > 0.0005 * total
    )
    return f"<div class='bar'>{''.join(parts)}</div>"


# -- time --------------------------------------------------------------------------------------------------------------


class Axis:
    """Maps moments to positions from 0 to 1. Long pauses, in which nothing ran, are drawn short.

    Args:
        goodput: The time account of the run.
    """

    def __init__(self, goodput: Goodput) -> None:
        segments = goodput.segments or []
        busy = sorted(
            (each.begin, each.end) for each in segments if "idle" not in each.seconds and each.end > each.begin
        )
        self.is_known = bool(segments) and goodput.ended > goodput.began
        if not self.is_known:
            return
        pauses: list[tuple[float, float]] = []
        at = goodput.began
        for begin, end in [*busy, (goodput.ended, goodput.ended)]:
            if begin > at:
                pauses.append((at, begin))
            at = max(at, end)
        whole = goodput.ended - goodput.began
        part = min(_LONGEST_PAUSE, _LONGEST_PAUSES / max(len(pauses), 1))
        longest = part * (whole - sum(end - begin for begin, end in pauses)) or whole
        self.cuts = [(begin, end) for begin, end in pauses if end - begin > longest]
        bounds = sorted({goodput.began, goodput.ended, *(each for cut in self.cuts for each in cut)})
        widths = [longest if pair in self.cuts else pair[1] - pair[0] for pair in pairwise(bounds)]
        self._bounds = bounds
        self._places = [each / sum(widths) for each in accumulate(widths, initial=0.0)]
        self._shown = sum(widths)

    def place(self, moment: float) -> float:
        """The position of a moment."""
        index = min(max(bisect.bisect_right(self._bounds, moment) - 1, 0), len(self._bounds) - 2)
        (begin, end), (left, right) = self._bounds[index : index + 2], self._places[index : index + 2]
        return min(max(left + (right - left) * (moment - begin) / (end - begin), 0.0), 1.0)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Positions of round times, and their texts."""
        every: float = next((each for each in _ROUND_SECONDS if self._shown / each <= 6), self._shown / 6)
        first, last = self._bounds[0], self._bounds[-1]
        pattern = "%H:%M:%S" if every < 60 else "%H:%M" if last - first < 20 * 3600 else "%d. %H:%M"
        pattern = pattern if every < 86400 else "%b %d" if last - first < 300 * 86400 else "%b %Y"
        shift = time.localtime(first).tm_gmtoff  # so that the times are round in the local time zone
        after = -1.0
        for index, (begin, end) in enumerate(pairwise(self._bounds)):
            if (begin, end) in self.cuts:
                continue
            moment = begin if index else math.ceil((begin + shift) / every) * every - shift  # where a pause ends
            while moment <= end:
                if (place := self.place(moment)) > after + 0.13 and place < 0.95:
                    after = place
                    yield place, time.strftime(pattern, time.localtime(moment))
                moment = (math.floor((moment + shift) / every) + 1) * every - shift


_ROUND_SECONDS = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 2 * 3600, 3 * 3600, 6 * 3600, 12 * 3600),
    *(86400 * days for days in (1, 2, 5, 10, 20, 50)),
)


def _marks(found: Mapping[str, Any], axis: Axis) -> Iterator[str]:
    """Lines at the interruptions, and marks at pauses that are drawn short.

    Args:
        found: The content of the report.
        axis: The axis of the chart.
    """
    for begin, end in axis.cuts:
        left, right = axis.place(begin), axis.place(end)
        label = _text(f"{duration(end - begin)} without launch, drawn short")
        yield f"<i class='cut' style='left:{_share(left)};width:{_share(right - left)}' title='{label}'></i>"
    places: set[int] = set()
    for number, each in enumerate(found["interruptions"], 1):
        place = axis.place(each["time"])
        if (column := int(place * COLUMNS / 2)) not in places:
            places.add(column)
            kind = "line" if len(found["interruptions"]) <= _MAX_LINES else "line behind"
            yield f"<i class='{kind}' style='left:{_share(place)}' title='{_about(number, each)}'></i>"


def _labels(found: Mapping[str, Any], axis: Axis) -> Iterator[str]:
    """Labels above a chart with number and cause of each interruption.

    At the right edge a label has only the number. Where too many labels meet, some are left out.

    Args:
        found: The content of the report.
        axis: The axis of the chart.
    """
    ends: list[float] = []
    labels = []
    for number, each in enumerate(found["interruptions"], 1):
        place, text = axis.place(each["time"]), f" <span>{_text(each['cause'])}</span>"
        width = 0.009 * len(f"{number} {each['cause']}") + 0.02
        free = next((lane for lane, end in enumerate([*ends, -1.0]) if end <= place))
        if place + width > 1.0:
            text, width = "", 0.035
        if free < _MARK_LANES:
            ends[free : free + 1] = [place + width]
            style = f"left:{_share(min(place, 0.97))};bottom:{free * 1.3}em"
            about = _about(number, each)
            labels.append(f"<a class='mark' style='{style}' href='#i{number}' title='{about}'>{number}{text}</a>")
    yield f"<div class='marks' style='height:{max(len(ends) * 1.3, 0.3)}em'>{''.join(labels)}</div>"


def _about(number: int, interruption: Mapping[str, Any]) -> str:
    return _text(f"{number} {interruption['cause']}: {shortened(interruption['reason'], 200)}")


def _time_labels(axis: Axis) -> str:
    labels = "".join(f"<span style='left:{_share(place)}'>{_text(text)}</span>" for place, text in axis.ticks())
    return f"<div class='times'>{labels}</div>"


# -- the strip ---------------------------------------------------------------------------------------------------------


class StripRow:
    """What the ranks of one row (a node or several) do in each column of the strip."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * (COLUMNS + 1))
        self._changes: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * (COLUMNS + 2))

    def add(self, left: float, right: float, shares: Iterable[tuple[str, float]]) -> None:
        """Adds a segment.

        Args:
            left: Its beginning, in columns.
            right: Its end, in columns.
            shares: The shares of the categories.
        """
        first, last = int(left), int(right)
        for category, share in shares:
            parts = self._parts[category]
            if first == last:
                parts[first] += share * (right - left)
                continue
            parts[first] += share * (first + 1 - left)
            parts[last] += share * (right - last)
            changes = self._changes[category]
            changes[first + 1] += share
            changes[last] -= share

    def shapes(self) -> dict[str, str]:
        """The path of each category; consecutive columns that look the same are drawn as one."""
        categories = [name for name in _COLOURS if name in self._parts]
        weights = [
            [own + whole for own, whole in zip(self._parts[name], accumulate(self._changes[name]), strict=False)]
            for name in categories
        ]
        found: dict[str, list[str]] = {name: [] for name in categories}
        begin, before = 0, [0] * (len(categories) + 1)
        for column in range(COLUMNS + 1):
            total = sum(each[column] for each in weights) if column < COLUMNS else 0.0
            tops = [0] * (len(categories) + 1)
            if total > 1e-6:
                sums = accumulate((each[column] for each in weights), initial=0.0)
                tops = [round(ROW_HEIGHT * min(each / total, 1.0)) for each in sums]
            if tops != before:
                for name, (low, high) in zip(categories, pairwise(before), strict=True):
                    if high > low:
                        width = column - begin
                        found[name].append(f"M{begin} {ROW_HEIGHT - high}h{width}v{high - low}h-{width}z")
                begin, before = column, tops
        return {name: "".join(shapes) for name, shapes in found.items() if shapes}


def strip_rows(run: RunReport, axis: Axis) -> dict[str, StripRow]:
    """What each node did when; with many nodes, the nodes with the largest losses and one row for all other nodes.

    Args:
        run: The report, with segments.
        axis: The axis of the chart.
    """
    names, others = _shown_nodes(run.goodput.seconds.items())
    rows = {name: StripRow() for name in names}
    for segment in run.goodput.segments or ():
        total = sum(segment.seconds.values())
        left, right = (COLUMNS * axis.place(each) for each in (segment.begin, segment.end))
        if right > left and total > 0:
            name = segment.node if segment.node in rows else others
            shares = ((each, seconds / total) for each, seconds in segment.seconds.items() if each in _COLOURS)
            rows[name].add(left, right, shares)
    return rows


def _strip(run: RunReport, axis: Axis) -> Iterator[str]:
    """The chart of what each node did when."""
    rows = strip_rows(run, axis)
    yield "<section><h2>What the nodes did</h2>"
    yield from _labels(run.content, axis)
    height = 44 if len(rows) < 4 else 28 if len(rows) < 10 else 20
    yield f"<div class='chart' style='--row:{height}px'><div class='labels'>"
    yield from (f"<span title='{_text(each)}'>{_text(_node(each))}</span>" for each in rows)
    yield "</div><div class='plot'>"
    for name, row in rows.items():
        shapes = (
            f"<path class='{category}' d='{path}'><title>{_text(_node(name))}: {_text(phrase(category))}</title></path>"
            for category, path in row.shapes().items()
        )
        box = f"viewBox='0 0 {COLUMNS} {ROW_HEIGHT}' preserveAspectRatio='none'"
        yield f"<svg class='row' {box}>{''.join(shapes)}</svg>"
    yield from _marks(run.content, axis)
    yield f"</div></div>{_time_labels(axis)}"
    yield from _legend(run.content)
    yield "<p class='note'>Height is the share of a node's ranks; within steps, the share of the time. "
    yield "Within a process the order is schematic: its start first, then its steps.</p></section>"


def _node(name: str) -> str:
    return name or "not known"


def _shown_nodes(seconds: Iterable[tuple[Any, float]]) -> tuple[list[str], str]:
    """The names of the rows, and the name of the row for the other nodes.

    Args:
        seconds: Losses with their seconds.
    """
    lost: Counter[str] = Counter()
    for loss, each in seconds:
        lost[loss.node] += each if loss.category not in ("productive", "idle") else 0.0  # type: ignore[assignment]
    if len(lost) <= _MAX_ROWS:
        return sorted(lost, key=_by_number), ""
    worst = [name for name, _ in lost.most_common(_MAX_ROWS - 1)]
    rest = f"{len(lost) - len(worst)} others"
    return [*sorted(worst, key=_by_number), rest], rest


def _by_number(name: str) -> list[tuple[int, str]]:
    """A sort key that puts ``n10`` after ``n9``."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d{0,9})", name)]


def _legend(found: Mapping[str, Any]) -> Iterator[str]:
    """The categories that occur, with their seconds per rank."""
    yield "<dl class='legend'>"
    ranks = max(found["ranks"], 1)
    for group, categories in GROUPS.items():
        entries = [
            f"<dd title='{category}'><i class='{category}'></i>{_text(phrase(category))} "
            f"<small>{duration(found['categories'][category] / ranks)}</small></dd>"
            for category in categories
            if found["categories"][category] > 0
        ]
        if entries:
            yield f"<div><dt>{group}</dt>{''.join(entries)}</div>"
    yield "</dl>"


# -- losses ------------------------------------------------------------------------------------------------------------


def _losses(run: RunReport) -> Iterator[str]:
    """The table of losses by category, cause and node."""
    found, ranks = run.content, run.content["ranks"]
    of: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for loss, seconds in run.goodput.seconds.items():
        if loss.category not in ("productive", "idle"):
            of[loss.category, loss.cause][loss.node] += seconds  # type: ignore[assignment]
    active = found["rank_seconds"] - found["categories"]["idle"]
    rows = sorted(((sum(nodes.values()), *key, nodes) for key, nodes in of.items()), key=itemgetter(0), reverse=True)
    rows = [row for row in rows if row[0] > 0.0005 * active]
    if not rows:
        return
    rest = sum(row[0] for row in rows[_MAX_LOSSES:])
    lines = []
    for seconds, category, cause, nodes in rows[:_MAX_LOSSES]:
        lines.append(
            f"<tr><td title='{_text(category)}'>{_text(phrase(category))}</td><td>{_text(cause or '-')}</td>"
            f"<td>{_where(nodes, seconds)}</td><td class='n'>{duration(seconds / ranks)}</td>"
            f"<td class='n'>{percent(seconds / active)}</td><td class='b'>"
            f"<i class='{_text(category)}' style='width:{_share(seconds / rows[0][0])}'></i></td></tr>"
        )
    head = "<th>time in</th><th>due to</th><th>node</th><th class='n'>of each rank</th><th class='n'>share</th>"
    table = f"<div class='wide'><table><thead><tr>{head}<th class='b'></th></tr></thead><tbody>"
    yield f"<section><h2>What was lost</h2>{table}"
    yield from lines[:_OPEN_LOSSES]
    yield "</tbody></table></div>"
    if more := lines[_OPEN_LOSSES:]:
        yield f"<details><summary>{len(more)} more</summary>{table}{''.join(more)}</tbody></table></div></details>"
    yield f"{f'<p>Another {percent(rest / active)} in smaller losses.</p>' if rest else ''}</section>"


def _where(nodes: Mapping[str, float], total: float) -> str:
    """The nodes with most of a loss."""
    if len(nodes) == 1:
        return _text(_node(next(iter(nodes))))
    shown = sorted(nodes.items(), key=itemgetter(1), reverse=True)
    if shown[0][1] < 1.5 * total / len(nodes):
        return f"<span title='{len(nodes)} nodes alike'>all {len(nodes)}</span>"
    texts = [f"{_text(_node(name))} {percent(each / total)}" for name, each in shown[:_MAX_NODES]]
    more = len(shown) - len(texts)
    return ", ".join(texts) + (f", {more} more" if more else "")


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass
class _Life:
    """A fit, from its beginning or a restoration to its next restoration or its end.

    Attributes:
        points: Moments and steps.
        from_step: The furthest step before this life.
    """

    fit: int
    from_step: int
    points: list[tuple[float, int]] = field(default_factory=list)


def _lives(events: Iterable[Event]) -> list[_Life]:
    """How far the fits were at which time."""
    lives: list[_Life] = []
    current: dict[int, _Life] = {}
    furthest: Counter[int] = Counter()
    for event in events:
        fit = getattr(event, "fit", None)
        if not isinstance(fit, int):
            continue
        if isinstance(event, (Fresh, Resumed, RestoredInPlace)):
            current[fit] = _Life(fit, furthest[fit])
            lives.append(current[fit])
        step, moment = getattr(event, "step", None), event.time
        if isinstance(event, Fresh):
            step = step or 0
        elif isinstance(event, TimeSpent):
            # This is the furthest step of all processes so far. It is of this life only if it is beyond `from_step`.
            step = event.reached if fit in current and (event.reached or 0) > current[fit].from_step else None
            moment = max(event.since or [moment])
        if step is None or fit not in current or not math.isfinite(moment):
            continue
        current[fit].points.append((moment, step))
        furthest[fit] = max(furthest[fit], step)
    for life in lives:
        life.points.sort()
    return lives


_DOTS = {
    "fault": ("fault", (Fault, Killed)),
    "stop": ("stopped", (FitInterrupted, StragglerStop, StragglersReplaced)),
    "rollback": ("rollback", (Rollback, RestoredInPlace)),
    "bad": ("bad step", (BadStep,)),
    "slow": ("stragglers found", (Stragglers,)),
    "end": ("finished", (Finished,)),
}


def _steps(run: RunReport, axis: Axis) -> Iterator[str]:
    """The chart of steps and saves over time."""
    lives = _lives(run.events)
    highest = max((step for life in lives for _, step in life.points), default=0)
    if highest == 0:
        return
    top, every = _round_up(highest)

    def point(moment: float, step: float) -> tuple[float, float]:
        return round(COLUMNS * axis.place(moment), 1), round(_CHART_HEIGHT * (1 - step / top), 1)

    shapes: defaultdict[str, list[str]] = defaultdict(list)
    ends: dict[int, tuple[float, float]] = {}
    for life in lives:
        again = [*_up_to(life.points, life.from_step)]
        new = [*_from(life.points, life.from_step)]
        for name, points in (("again", again), ("new", new)):
            places = _thinned([point(*each) for each in points])
            if len(places) > 1:
                shapes[name].append("M" + "L".join(f"{x:g} {y:g}" for x, y in places))
        if life.points:
            start = point(*life.points[0])
            if (end := ends.get(life.fit)) is not None:
                shapes["back"].append(f"M{end[0]:g} {end[1]:g}L{start[0]:g} {start[1]:g}")
            ends[life.fit] = point(*life.points[-1])
    dots = [*_dots(run.events, point)]
    yield "<section><h2>Steps</h2><div class='chart'><div class='labels scale'>"
    yield "".join(f"<span style='top:{_share(1 - each / top)}'>{each}</span>" for each in range(0, top + 1, every))
    yield f"</div><div class='plot'><svg style='height:{_CHART_HEIGHT}px' viewBox='0 0 {COLUMNS} {_CHART_HEIGHT}' "
    yield "preserveAspectRatio='none'>"
    for each in range(0, top + 1, every):
        y = _CHART_HEIGHT * (1 - each / top)
        yield f"<path class='grid' d='M0 {y:g}h{COLUMNS}'/>"
    yield from (f"<path class='steps {name}' d='{''.join(paths)}'/>" for name, paths in shapes.items())
    yield from (
        f"<path class='dot {name}' d='M{x:g} {y:g}h0'><title>{about}</title></path>" for name, x, y, about in dots
    )
    yield "</svg>"
    yield from _marks(run.content, axis)
    yield "</div></div>"
    yield from _saves(run, axis)
    yield f"{_time_labels(axis)}<dl class='legend'><div>"
    words = {"new": "new steps", "again": "steps done again", "back": "where it resumed"}
    keys = [(f"steps {name}", "M0 5h20", words[name]) for name in shapes]
    keys += [(f"dot {name}", "M10 5h0", _DOTS[name][0]) for name in dict.fromkeys(each[0] for each in dots)]
    for kind, path, text in keys:
        yield f"<dd><svg class='key' viewBox='0 0 20 10'><path class='{kind}' d='{path}'/></svg>{text}</dd>"
    for tier in dict.fromkeys(_tier(event) for event in run.events if isinstance(event, Saved) and event.seconds):
        yield f"<dd><i class='save {tier}'></i>save, {tier}</dd>"
    yield "</div></dl></section>"


def _round_up(highest: int) -> tuple[int, int]:
    """The end of a scale, and the distance of its lines."""
    power = 10 ** max(len(str(highest)) - 2, 0)
    every = next(each * power for each in (1, 2, 5, 10, 20, 50, 100) if highest <= 5 * each * power)
    return math.ceil(highest / every) * every, every


def _up_to(points: Sequence[tuple[float, int]], step: int) -> Iterator[tuple[float, float]]:
    """The part of a line up to a step."""
    yield from (each for each in points if each[1] <= step)
    yield from _crossing(points, step)


def _from(points: Sequence[tuple[float, int]], step: int) -> Iterator[tuple[float, float]]:
    """The part of a line above a step."""
    yield from _crossing(points, step)
    yield from (each for each in points if each[1] > step)


def _crossing(points: Sequence[tuple[float, int]], step: int) -> Iterator[tuple[float, float]]:
    for (begin, low), (end, high) in pairwise(points):
        if low <= step < high:
            yield begin + (end - begin) * (step - low) / (high - low), step
            return


def _thinned(places: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points, without points that cannot be distinguished from their neighbors in the chart."""
    found: list[tuple[float, float]] = []
    for place in places:
        if len(found) < 2 or abs(place[0] - found[-2][0]) >= 1 or abs(place[1] - found[-2][1]) >= 1:
            found.append(place)
        else:
            found[-1] = place
    return found


def _dots(events: Iterable[Event], point: Any) -> Iterator[tuple[str, float, float, str]]:
    """Marks for what happened at which step; of marks at the same place, the first."""
    seen = set()
    for event in events:
        name = next((name for name, (_, kinds) in _DOTS.items() if isinstance(event, kinds)), None)
        step = getattr(event, "step", None)
        if name is None or step is None:
            continue
        x, y = point(event.time, step)
        if (key := (name, int(x / 4), int(y / 4))) not in seen:
            seen.add(key)
            about = f"{_DOTS[name][0]} at step {step}: {shortened(str(getattr(event, 'reason', None) or ''), 200)}"
            yield name, x, y, _text(about)


def _tier(event: Saved) -> str:
    return event.tier if event.tier in ("local", "replica") else "global"


def _saves(run: RunReport, axis: Axis) -> Iterator[str]:
    """The chart of how long saves took; of the saves in a column, the longest."""
    longest: dict[tuple[int, str], Saved] = {}
    for event in run.events:
        if isinstance(event, Saved) and event.seconds is not None and math.isfinite(event.seconds):
            key = int(COLUMNS / 2 * axis.place(event.time)), _tier(event)
            if key not in longest or (longest[key].seconds or 0.0) < event.seconds:
                longest[key] = event
    top = max((each.seconds or 0.0 for each in longest.values()), default=0.0)
    if top <= 0:
        return
    yield f"<div class='chart saves'><div class='labels scale'><span style='top:0'>{duration(top)}</span></div>"
    yield f"<div class='plot'><svg style='height:{_SAVES_HEIGHT}px' viewBox='0 0 {COLUMNS} {_SAVES_HEIGHT}' "
    yield "preserveAspectRatio='none'>"
    for (column, tier), event in sorted(longest.items(), key=lambda item: -(item[1].seconds or 0.0)):
        seconds = event.seconds or 0.0
        height = max(_SAVES_HEIGHT * seconds / top, 1)
        about = _text(f"step {event.step}, {tier}: {seconds:.2f} s ({shortened(event.reason or '', 80)})")
        yield f"<path class='save {tier}' d='M{2 * column} {_SAVES_HEIGHT}v-{height:.1f}'><title>{about}</title></path>"
    yield "</svg></div></div>"


def _straggler_reports(events: Iterable[Event]) -> Iterator[str]:
    reports = [event for event in events if isinstance(event, Stragglers)]
    if not reports:
        return
    yield "<section><h2>Slow ranks</h2><div class='wide'><table><thead><tr><th>time</th><th class='n'>step</th>"
    yield "<th>scores</th></tr></thead><tbody>"
    for event in reports[-_MAX_REPORTS:]:
        reason = shortened(event.reason or "", _REASON_LENGTH)
        yield f"<tr><td>{timestamp(event.time)}</td><td class='n'>{_text(or_dash(event.step))}</td>"
        yield f"<td>{_text(reason)}</td></tr>"
    more = len(reports) - _MAX_REPORTS
    yield f"</tbody></table></div>{f'<p>And {more} earlier reports.</p>' if more > 0 else ''}</section>"


# -- interruptions -----------------------------------------------------------------------------------------------------


def _stories(run: RunReport, folder: Path) -> Iterator[str]:
    """What each interruption has cost."""
    found = run.content
    every = found["interruptions"]
    if not every:
        return
    costs = [each["rank_seconds"] or 0.0 for each in every]
    least = sorted(costs, reverse=True)[:_MAX_INTERRUPTIONS][-1]
    links = _diagnoses(run, folder)
    yield "<section><h2>Interruptions</h2>"
    if len(every) > _MAX_INTERRUPTIONS:
        yield f"<p>The {_MAX_INTERRUPTIONS} with the highest cost, of {len(every)}.</p>"
    if (restarts := found["restarts"]) is not None:
        phases = [(name, seconds / found["ranks"]) for name, seconds in restarts["median"].items() if seconds]
        spans = " ".join(f"<span>{name.replace('_', ' ')} {duration(seconds)}</span>" for name, seconds in phases)
        yield f"<p class='parts'><b>From a fault to the first new step</b> (median of {restarts['count']}): {spans}</p>"
    shown = 0
    for number, (each, cost) in enumerate(zip(every, costs, strict=True), 1):
        if cost < least or shown == _MAX_INTERRUPTIONS:
            continue
        shown += 1
        node = f" on {_text(each['node'])}" if each["node"] else ""
        yield f"<article id='i{number}'><h3><b>{number}</b> {_text(each['cause'])}{node}"
        yield f"<small>{_text(timestamp(each['time']))}</small></h3>"
        yield f"<p class='reason'>{_text(shortened(each['reason'], _REASON_LENGTH))}</p>"
        if cost and found["ranks"]:
            ranks = found["ranks"]
            seconds = {_PART_COLOURS[part]: each[part] for part in PARTS}
            yield f"<div style='width:{_share(max(cost / max(costs), 0.02))}'>{_bar(seconds, cost)}</div>"
            texts = [
                f"<span><i class='{_PART_COLOURS[part]}'></i>{_PART_WORDS[part]} {duration(each[part] / ranks)}</span>"
                for part in PARTS
                if each[part] > 0
            ]
            yield f"<p class='parts'><b>{duration(cost / ranks)} of each rank</b> {' '.join(texts)}</p>"
        yield f"<p>Steps lost: {_text(steps_lost(each))}; resumed from step {_text(or_dash(each['resumed_step']))}."
        yield from (f" <a href='{link}'>Diagnosis</a>" for link in links.get(number - 1, ()))
        yield "</p></article>"
    yield "</section>"


def _diagnoses(run: RunReport, folder: Path) -> dict[int, list[str]]:
    """Links to the diagnoses that exist, by the index of the interruption."""
    times = [each["time"] for each in run.content["interruptions"]]
    found: defaultdict[int, list[str]] = defaultdict(list)
    faults = [event for event in run.events if isinstance(event, Fault) and event.diagnostics]
    for name, moment in {Path(event.diagnostics or "").name: event.time for event in faults}.items():
        path = Path(run.content["run_dir"], "diagnostics", name)  # the run directory may have been moved since
        if times and path.is_dir():
            nearest = min(range(len(times)), key=lambda index: abs(times[index] - moment))
            found[nearest].append(_text("./" + quote(os.fsencode(os.path.relpath(path, folder)))))
    return found


_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1a1d21;--soft:#5c636d;--rule:#d5d9df;--panel:#f5f6f8}
@media (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e8eaed;--soft:#9aa3ae;--rule:#343a42;--panel:#1e2227}}
*{box-sizing:border-box;print-color-adjust:exact;-webkit-print-color-adjust:exact}
body{margin:0 auto;padding:1.2em clamp(.7em,3vw,2em);max-width:72em;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.15em;margin:0}h2{font-size:1.05em;margin:1.8em 0 .6em}h3{font-size:1em;margin:0}p{margin:.35em 0}
a{color:inherit}i{font-style:normal}
header p,.note,footer,small,dt,.times,.labels{color:var(--soft);font-size:.85em}
header strong{color:var(--ink)}
.verdict{margin-top:1em}section ul{padding-left:1.2em;margin:.5em 0}
.number{font-size:1.3em;margin:0}.number b{font-size:2.6em;line-height:1.1;letter-spacing:-.02em}
.bar{display:flex;height:14px;border-radius:3px;overflow:hidden;min-width:3px}.bar i{display:block}
.verdict .bar{height:18px;margin:.6em 0}
.chart{display:grid;grid-template-columns:var(--label) minmax(0,1fr);column-gap:10px;margin-top:.4em}
.saves{margin-top:16px}
.labels{position:relative;text-align:right}
.labels span{display:block;height:var(--row);line-height:var(--row);margin-bottom:3px;overflow:hidden;
text-overflow:ellipsis;white-space:nowrap}
.scale span{position:absolute;right:0;margin:0;transform:translateY(-50%)}
.plot{position:relative}
.plot svg{display:block;width:100%;overflow:visible}
.plot .row{height:var(--row);margin-bottom:3px;background:var(--panel)}
.line{position:absolute;top:-4px;bottom:0;border-left:1.5px dashed var(--ink);opacity:.65}
.line.behind{z-index:-1;opacity:.35}
.marks{position:relative;margin:.6em 0 -.2em calc(var(--label) + 10px);font-size:.82em}
.mark{position:absolute;white-space:nowrap;text-decoration:none;font-weight:600;line-height:1.3}
.cut{position:absolute;top:0;bottom:0;
background:repeating-linear-gradient(135deg,var(--rule) 0 3px,var(--paper) 3px 8px)}
.times{position:relative;height:1.5em;margin:.2em 0 0 calc(var(--label) + 10px)}
.times span{position:absolute;white-space:nowrap;border-left:1px solid var(--soft);padding-left:3px}
.legend{display:flex;flex-wrap:wrap;gap:.3em 1.6em;margin:.8em 0 .4em;font-size:.88em}
.legend div{display:flex;flex-wrap:wrap;gap:0 1em;align-items:baseline}
.legend dt{font-weight:600}.legend dd{margin:0;white-space:nowrap}
.legend i,.parts i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:.35em}
.key{width:20px;height:10px;margin-right:.35em;overflow:visible}
.grid{stroke:var(--rule);vector-effect:non-scaling-stroke}
.steps,.dot{fill:none;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.new{stroke:var(--productive);stroke-width:2.5px}.again{stroke:var(--wasted_progress);stroke-width:2.5px}
.back{stroke:var(--soft);stroke-width:1.2px;stroke-dasharray:3 3}
.dot{stroke-width:9px;stroke-linecap:round}
.dot.fault{stroke:var(--detection)}.dot.stop{stroke:var(--queue)}.dot.rollback{stroke:var(--wasted_progress)}
.dot.bad{stroke:var(--checkpoint_save)}.dot.slow{stroke:var(--imports)}.dot.end{stroke:var(--productive)}
.save{stroke-width:2px;vector-effect:non-scaling-stroke;stroke:var(--restore);background:var(--restore)}
.save.local,.save.replica{stroke:var(--fast_forward);background:var(--fast_forward)}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.92em}
th{text-align:left;color:var(--soft);font-weight:500}
th,td{padding:.25em .7em .25em 0;border-bottom:1px solid var(--rule);vertical-align:top;overflow-wrap:normal}
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}.b{width:28%}
.b i{display:block;height:12px;margin-top:.3em;border-radius:2px;min-width:2px}
article{background:var(--panel);border-radius:6px;padding:.7em .9em;margin:.6em 0}
h3 small{font-weight:400;margin-left:.8em}.reason{color:var(--soft)}.parts>*{margin-right:.9em;white-space:nowrap}
footer{margin-top:2.5em;border-top:1px solid var(--rule);padding-top:.6em}
@media (max-width:40em){body{font-size:14px}.b,.mark span{display:none}.times span:nth-child(even){display:none}}
"""
