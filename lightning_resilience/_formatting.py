"""Formats tables, durations, sizes and times for people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

UNLIMITED_BYTES = 1 << 60
"""The number that stands for an unlimited size."""

_NUMBER = re.compile(r"(>=)?\d+(\.\d+)?( %)?|-")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with aligned columns; columns of numbers are aligned to the right.

    Args:
        head: The names of the columns.
        rows: The cells, the same number in every row.
    """
    columns = []
    for name, *cells in zip(head, *rows, strict=True):
        width = max(map(len, (name, *cells)))
        is_number = all(_NUMBER.fullmatch(cell) for cell in cells)
        columns.append([f"{cell:>{width}}" if is_number else f"{cell:<{width}}" for cell in (name, *cells)])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def fitted(head: Sequence[str], rows: Sequence[Sequence[str]], left_out_first: Sequence[str], width: int) -> list[str]:
    """A table that fits a terminal: in a narrow one it lacks some columns, and its first cells are shortened.

    Args:
        head: The names of the columns.
        rows: The cells, the same number in every row.
        left_out_first: Names of columns that may be left out, in this order.
        width: The terminal's width in characters.
    """
    shown = list(range(len(head)))

    def lines() -> list[str]:
        return table([head[index] for index in shown], [[row[index] for index in shown] for row in rows])

    for name in left_out_first:
        if max(map(len, lines())) <= width:
            return lines()
        shown.remove(head.index(name))
    over = max(map(len, lines())) - width
    if over > 0:  # keeps the end of a name, in which names differ
        longest = max(max(len(row[0]) for row in rows) - over, 4)
        rows = [[each if len(each) <= longest else f"...{each[3 - longest :]}", *rest] for each, *rest in rows]
    return lines()


def printable(line: str) -> str:
    """Escapes characters on which a terminal would act: file names, and texts in files, may contain anything."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def time_ago(seconds: float) -> str:
    """A time ago as text: ``8.3 s ago``, ``3 h 20 min ago``, ``12 days ago``.

    Args:
        seconds: How many seconds ago.
    """
    days = seconds / 86400
    return f"{days:.0f} days ago" if days >= 2 else f"{duration(max(0.0, seconds))} ago"


def duration(seconds: float) -> str:
    """A duration as text: ``8.3 s``, ``12 min 05 s``, ``3 h 20 min``.

    Args:
        seconds: The duration in seconds.
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def format_bytes(nbytes: float) -> str:
    """A size as text: ``1.2 GiB``.

    Args:
        nbytes: The size in bytes.
    """
    if nbytes >= UNLIMITED_BYTES:
        return "any amount"
    value, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.1f} {units[0]}" if units[0] != "bytes" else f"{nbytes:.0f} byte{'s' * (nbytes != 1)}"


def timestamp(seconds: float) -> str:
    """A time in this machine's time zone as text: ``2026-01-31 13:05:59``.

    Args:
        seconds: The time in seconds since the epoch.
    """
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def shortened(text: str, length: int) -> str:
    """Shortens a text to one line of limited length.

    Args:
        text: The text, with any white space.
        length: The maximum number of characters, including the three dots at the end.
    """
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


def or_dash(value: object) -> str:
    """The cell of a table: ``-`` for ``None``.

    Args:
        value: The value to show.
    """
    return "-" if value is None else str(value)


def node_range(nodes: Sequence[str]) -> str:
    """The names of nodes as text; of more than three nodes the first and the last.

    Args:
        nodes: The names, in the order of the scheduler.
    """
    return ",".join(nodes) if len(nodes) <= 3 else f"{nodes[0]}..{nodes[-1]} ({len(nodes)})"
