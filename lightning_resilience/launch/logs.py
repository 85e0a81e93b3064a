"""``lightning-resilience logs``: the output of ranks, also while they run and across their restarts."""

from __future__ import annotations

import heapq
import os
import re
import sys
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Literal

from lightning_resilience._files import read_json
from lightning_resilience._formatting import timestamp
from lightning_resilience.launch.rank_logs import LogReader, attempts, folder_of, log_of, ranks
from lightning_resilience.launch.status import now
from lightning_resilience.run.events import LaunchExit, LaunchStart
from lightning_resilience.run.history import LiveHistory
from lightning_resilience.run.ledger import Ledger
from lightning_resilience.run.run_directory import RunDirectory

_POLL_S = 0.3
_SETTLES_S = 2.0
_LOOK_FOR_END_EVERY_S = 15.0
_CHUNK = 1 << 14  # for each rank; there may be a thousand ranks
_TIME = re.compile(
    rb"(?:\[lightning-resilience |(?:\[rank\d+\]:)?\[[A-Z]\d{4} )(\d\d:\d\d:\d\d)\b"
)  # ours, and torch's in C++
_DAY_S = 24 * 3600

Rank = int | Literal["all"]


class NoLog(Exception):
    """There is no such log."""


def show_logs(
    run_dir: str | os.PathLike[str], rank: Rank | None = None, attempt: int | None = None, follow: bool = False
) -> None:
    """Writes the log of one rank to stdout, or of all ranks with the rank before each line; names the log on stderr.

    Args:
        run_dir: The run directory.
        rank: The rank, or ``"all"``; default: 0, or the lowest rank that has written anything.
        attempt: The number of the attempt; default: the newest.
        follow: Whether to continue with new output, across restarts unless ``attempt`` is given, until the run ends or
            the user presses Ctrl-C.

    Raises:
        NoLog: If there is no such log, and none will follow.
    """
    directory = RunDirectory(run_dir).path
    try:
        if follow:
            _follow(directory, rank, attempt)
        else:
            number = _newest(directory) if attempt is None else attempt
            _open(directory, number, rank).print_new(is_last=True)
    except KeyboardInterrupt:
        print(file=sys.stderr)


def _newest(directory: Path) -> int:
    if not (numbers := attempts(directory)):
        raise NoLog(f"there are no logs in {directory}: no rank that launch has started has written anything")
    return numbers[-1]


def _open(directory: Path, attempt: int, rank: Rank | None) -> _Log | _AllLogs:
    """Opens the log of a rank or of all ranks, and prints a line about it.

    Raises:
        NoLog: If there is none.
    """
    folder, numbers = folder_of(directory, attempt), attempts(directory)
    if attempt not in numbers:
        raise NoLog(
            f"there is no log of attempt {attempt} in {directory}; there are logs of attempts {_range(numbers)}"
        )
    found = ranks(directory, attempt)
    if rank is None:
        rank = found[0] if found else 0
    if rank != "all" and rank not in found:
        raise NoLog(f"rank {rank} has no log in {folder}; ranks with one: {_range(found)}")
    began = (read_json(folder / "attempt.json") or {}).get("began")
    since = f", began {timestamp(began)}" if isinstance(began, float) else ""
    others = [f"ranks {_range(found)}"] * (len(found) > 1) + [f"attempts {_range(numbers)}"] * (len(numbers) > 1)
    also = f"; see also {' and '.join(others)}" if others else ""
    what = f"all ranks: {folder}" if rank == "all" else f"rank {rank}: {log_of(folder, rank)}"
    print(f"==> attempt {attempt}{since}, {what}{also} <==", file=sys.stderr, flush=True)
    return _AllLogs(directory, attempt) if rank == "all" else _Log(LogReader(folder, rank))


def _range(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + ("" if len(numbers) <= 8 else ", ...")


class _Log:
    """The log of one rank."""

    def __init__(self, log: LogReader) -> None:
        self._log = log

    def print_new(self, is_last: bool = False) -> None:
        """Prints everything that was not printed yet.

        Args:
            is_last: Whether nothing comes after it.
        """
        while data := self._log.read():
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


class _AllLogs:
    """The logs of all ranks of an attempt: the lines of each rank in their order, those of different ranks by time.

    Lines of this package and of torch's C++ contain their time. Any other line counts as written right after the last
    one with a time.
    """

    def __init__(self, directory: Path, attempt: int) -> None:
        self._directory, self._attempt = directory, attempt
        self._logs: dict[int, _TimedLog] = {}
        began = (read_json(folder_of(directory, attempt) / "attempt.json") or {}).get("began")
        self._began = _time_of_day(timestamp(began)[11:]) if isinstance(began, float) else 0

    def print_new(self, is_last: bool = False) -> None:
        """Prints everything that was not printed yet, as :meth:`_Log.print_new` does."""
        folder, found = folder_of(self._directory, self._attempt), ranks(self._directory, self._attempt)
        for rank in found:  # a rank may write its first line later
            self._logs.setdefault(rank, _TimedLog(LogReader(folder, rank, _CHUNK), rank, self._began))
        width = len(str(max(found, default=0)))
        for _, rank, line in heapq.merge(*(log.lines(is_last) for log in self._logs.values()), key=itemgetter(0)):
            sys.stdout.buffer.write(b"rank %*d | %s\n" % (width, rank, line))
        sys.stdout.buffer.flush()


class _TimedLog:
    """The log of one of several ranks."""

    def __init__(self, log: LogReader, rank: int, began: int) -> None:
        self._log, self._rank = log, rank
        self._rest = b""
        self._time = began

    def lines(self, is_last: bool) -> Iterator[tuple[int, int, bytes]]:
        """New lines, each with its time and the rank."""
        while data := self._log.read():
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from map(self._timed, lines)
        if is_last and self._rest:
            rest, self._rest = self._rest, b""
            yield self._timed(rest)

    def _timed(self, line: bytes) -> tuple[int, int, bytes]:
        if (found := _TIME.match(line)) is not None:
            time_of_day = _time_of_day(found[1].decode())
            days = (self._time - time_of_day + _DAY_S // 2) // _DAY_S  # the line may have been written after midnight
            self._time = max(self._time, time_of_day + days * _DAY_S)
        return self._time, self._rank, line


def _time_of_day(text: str) -> int:
    hours, minutes, seconds = map(int, text.split(":"))
    return 3600 * hours + 60 * minutes + seconds


def _follow(directory: Path, rank: Rank | None, attempt: int | None) -> None:
    end, number, has_said = _End(directory), attempt, False
    log: _Log | _AllLogs | None = None
    while True:
        over = end.reason()  # before the log is read, which is complete then
        later = [each for each in attempts(directory) if number is not None and each > number]
        try:
            number = _newest(directory) if number is None else number
            log = log or _open(directory, number, 0 if rank is None else rank)
        except NoLog as error:
            if over and not later:
                raise
            if not has_said:
                print(f"Waiting: {error}.", file=sys.stderr, flush=True)
                has_said = True
        if log is not None:
            log.print_new(is_last=bool(over))
        if later and log is not None:  # the last lines of one node may come a little later than those of another
            time.sleep(_SETTLES_S)
            log.print_new(is_last=True)
        if later and attempt is None:
            number, log = later[0], None
        elif later or over:
            print(f"==> {f'attempt {later[0]} has begun' if later else over} <==", file=sys.stderr)
            return
        else:
            time.sleep(_POLL_S)


class _End:
    """Checks whether a run continues. A launch records its end; a killed one does not, and is checked less often."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._history = LiveHistory(Ledger(RunDirectory(directory).ledger, rank=None))
        self._looked_at: float | None = None

    def reason(self) -> str | None:
        """The state of the run, if no launch or job works on it any more."""
        history = self._history.now()
        last = next(iter(history.since(LaunchStart, LaunchExit)), None)
        if isinstance(last, LaunchExit) and history.allocations[-1].job_id is None and not last.new_job:
            return f"the launch has ended: {last.status} ({last.reason})"
        if self._looked_at is not None and time.monotonic() - self._looked_at < _LOOK_FOR_END_EVERY_S:
            return None
        self._looked_at = time.monotonic()
        if not history.allocations:
            return None
        text, is_ongoing = now(history, self._directory)
        return None if is_ongoing else text
