"""Bars of the tables in ``benchmarks/README.md``, drawn from the tables themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from svg import card, text

PAGE = Path(__file__).parents[2] / "benchmarks" / "README.md"

_WIDTH, _MARGIN, _LABELS, _VALUES = 720, 18, 316, 100


@dataclass(frozen=True)
class Chart:
    """A picture of columns of a table.

    Attributes:
        heading: Above the table, which is the first below it.
        title: What is shown, with its unit.
        columns: Numbers of the columns that are drawn, by what they are called; those of this package are ``ours``.
        ours: The rows of this package, or with several columns the names of those.
        number: The pattern of the number in a cell.
        baseline: The row whose value is marked in all others, or a value and its name.
        skipped: Lines of the head that stand among the rows.
        rows: What the rows are, if their names are numbers.
        labels: How much room there is for the names of the rows.
    """

    heading: str
    title: str
    columns: Mapping[str, int]
    ours: str
    number: str = r"([\d.,]+)"
    baseline: str | tuple[float, str] | None = None
    skipped: int = 0
    rows: str = ""
    labels: int = _LABELS


CHARTS = {
    "overhead": Chart(
        "Overhead per step",
        "Added to a step by a callback, µs (CPU)",
        {"": 2},
        r"^(?!NVRx|an empty)",
        baseline="an empty Callback",
    ),
    "ddp": Chart(
        "Two DDP ranks",
        "A step with all callbacks, as a multiple of plain Lightning's",
        {"": 0, " ": 1, "  ": 2},
        "",
        baseline=(1.0, "plain Lightning"),
    ),
    "hangs": Chart(
        "Time to find a hang",
        "Time until a hang is found, s (5 s are allowed for a step)",
        {"FaultTolerance": 1, "NVRx": 3},
        "FaultTolerance",
    ),
    "saves": Chart(
        "What a checkpoint costs",
        "How long a save of 1.2 GB stops the training",
        {"to node memory": 1, "to a disk": 5},
        r"^(LocalCheckpoint|AutoResume)",
        number=r"([\d.]+)x",
        baseline=(1.0, "a copy in memory"),
        skipped=1,
    ),
    "stragglers": Chart(
        "Stragglers",
        "CPU time of a report on rank 0, ms",
        {"StragglerDetection": 2, "NVRx": 7},
        "StragglerDetection",
        rows="ranks",
        labels=120,
    ),
}


@dataclass(frozen=True)
class Bar:
    """A bar, as the table has it."""

    row: str
    column: str
    value: float
    words: str


def table(page: str, heading: str) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the first table below a heading, as plain text."""
    section = re.split(rf"^#+ {re.escape(heading)}$", page, maxsplit=1, flags=re.MULTILINE)[1]
    found = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"There is no table below {heading}.")
    plain = re.sub(r"\*\*|`", "", found[0]).strip().splitlines()
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in plain]
    return head, rows


def bars(chart: Chart, page: str) -> list[Bar]:
    """What a chart shows."""
    head, rows = table(page, chart.heading)
    is_row = all(not name.strip() for name in chart.columns) and len(chart.columns) > 1
    found = []
    for row in rows[chart.skipped :]:
        for name, column in chart.columns.items():
            if (number := re.search(chart.number, row[column])) is not None:
                value = float(number[1].replace(",", ""))
                found.append(Bar(head[column] if is_row else row[0], name.strip(), value, row[column]))
    return found


def draw(chart: Chart, page: str) -> str:
    """The picture of a chart."""
    found = bars(chart, page)
    baseline = chart.baseline
    if isinstance(baseline, str):
        [value] = [bar.value for bar in found if bar.row == baseline]
        baseline = value, baseline
    left = _MARGIN + chart.labels
    scale = (_WIDTH - _MARGIN - _VALUES - left) / max(bar.value for bar in found)
    shapes = [text(_MARGIN, 32, chart.title, "title")]
    y = 62
    names = [name for name in chart.columns if name.strip()]
    if len(names) > 1 or baseline:
        x = _MARGIN
        for index, name in enumerate(names if len(names) > 1 else []):
            shapes.append(
                f'<rect class="{_colour(chart, "", name, index)}" x="{x}" y="{y - 12}" width="14" height="14"/>'
            )
            shapes.append(text(x + 20, y, name, "soft"))
            x += 46 + round(8.6 * len(name))
        if baseline:
            shapes.append(f'<path class="base" d="M{x + 4} {y - 14}v18"/>' + text(x + 14, y, baseline[1], "soft"))
        y += 24
    top, before = y - 14, None
    for bar in found:
        if bar.row != before:
            y += 8 if before is not None and len(names) > 1 else 0
            alike = sum(other.row == bar.row for other in found)
            words = f"{bar.row} {chart.rows}".strip()
            shapes.append(text(left - 12, y + 2 + (alike > 1) * 9, words, anchor="end"))
            before = bar.row
        index = names.index(bar.column) if bar.column else 0
        colour = _colour(chart, bar.row, bar.column, index)
        width = max(bar.value * scale, 1.5)
        shapes.append(f'<rect class="{colour} bar" x="{left}" y="{y - 11}" width="{width:.1f}" height="14" rx="2"/>')
        end = left + width + 8
        if baseline and end < (mark := left + baseline[0] * scale + 8) < end + 60:
            end = mark
        shapes.append(text(end, y + 2, bar.words, "soft"))
        y += 19 if len(names) > 1 else 26
    if baseline:
        shapes.append(f'<path class="base" d="M{left + baseline[0] * scale:.1f} {top}V{y - 12}"/>')
    style = "text{font-size:15px}.base{stroke:var(--ink);stroke-dasharray:4 3;fill:none}"
    style += ".pale{fill:var(--good)}.pale,.paler{opacity:.55}"
    said = "; ".join(f"{bar.row}{bar.column and ', '}{bar.column}: {bar.words}" for bar in found)
    return card(_WIDTH, y + 4, f"{chart.title}. {said}", "\n".join(shapes), style)


def _colour(chart: Chart, row: str, column: str, index: int) -> str:
    if chart.ours in chart.columns:
        return "good" if column == chart.ours else "other"
    if row and not re.search(chart.ours, row):
        return "other paler" if index else "other"
    return "pale" if index else "good"


def pictures() -> dict[str, str]:
    """All of them, by the names of their files."""
    page = PAGE.read_text()
    return {f"bars-{name}.svg": draw(chart, page) for name, chart in CHARTS.items()}
