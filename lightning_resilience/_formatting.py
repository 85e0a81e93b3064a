"""Tables, durations, sizes and times as a person reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

UNLIMITED_BYTES = 1 << 60
"""What stands for a size without a limit."""

_NUMBER = re.compile(r"(>=)?\d+(\.\d+)?( %)?|-")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with its columns aligned, those of numbers to the right.

    Args:
        head: The names of the columns.
        rows: The cells, as many in every row.
    """
    columns = []
    for name, *cells in zip(head, *rows, strict=True):
        width = max(map(len, (name, *cells)))
        is_number = all(_NUMBER.fullmatch(cell) for cell in cells)
        columns.append([f"{cell:>{width}}" if is_number else f"{cell:<{width}}" for cell in (name, *cells)])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def fitted(head: Sequence[str], rows: Sequence[Sequence[str]], left_out_first: Sequence[str], width: int) -> list[str]:
    """A table for a terminal: without some of its columns, and with short first cells, where it has few columns.

    Args:
        head: The names of the columns.
        rows: The cells, as many in every row.
        left_out_first: Names of columns that may be left out, in this order.
        width: Columns of the terminal.
    """
    shown = list(range(len(head)))

    def lines() -> list[str]:
        return table([head[index] for index in shown], [[row[index] for index in shown] for row in rows])

    for name in left_out_first:
        if max(map(len, lines())) <= width:
            return lines()
        shown.remove(head.index(name))
    over = max(map(len, lines())) - width
    if over > 0:  # the end of a name tells it from others
        longest = max(max(len(row[0]) for row in rows) - over, 4)
        rows = [[each if len(each) <= longest else f"...{each[3 - longest :]}", *rest] for each, *rest in rows]
    return lines()


def printable(line: str) -> str:
    """A line without what a terminal would act on: names of files, and texts in them, may be anything."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def time_ago(seconds: float) -> str:
    """How long ago something was: ``8.3 s ago``, ``3 h 20 min ago``, ``12 days ago``.

    Args:
        seconds: How long.
    """
    days = seconds / 86400
    return f"{days:.0f} days ago" if days >= 2 else f"{duration(max(0.0, seconds))} ago"


def duration(seconds: float) -> str:
    """A duration: ``8.3 s``, ``12 min 05 s``, ``3 h 20 min``.

    Args:
        seconds: How long.
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def format_bytes(nbytes: float) -> str:
    """A size: ``1.2 GiB``.

    Args:
        nbytes: How many bytes.
    """
    if nbytes >= UNLIMITED_BYTES:
        return "any amount"
    value, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.1f} {units[0]}" if units[0] != "bytes" else f"{nbytes:.0f} byte{'s' * (nbytes != 1)}"


def timestamp(seconds: float) -> str:
    """A time of this machine's zone: ``2026-01-31 13:05:59``.

    Args:
        seconds: Since the epoch.
    """
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def shortened(text: str, length: int) -> str:
    """A text in one line of limited length.

    Args:
        text: With any white space.
        length: Characters, the three dots at the end included.
    """
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


def or_dash(value: object) -> str:
    """The cell of a table: ``-`` for ``None``.

    Args:
        value: What is shown.
    """
    return "-" if value is None else str(value)


def node_range(nodes: Sequence[str]) -> str:
    """The names of nodes, or the first and the last of more than three.

    Args:
        nodes: In the order of the scheduler.
    """
    return ",".join(nodes) if len(nodes) <= 3 else f"{nodes[0]}..{nodes[-1]} ({len(nodes)})"
