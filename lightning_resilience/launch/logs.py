"""``lightning-resilience logs``: what a rank has written, also while it runs and over its restarts."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

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


class NoLog(Exception):
    """There is no such log."""


def show_logs(
    run_dir: str | os.PathLike[str], rank: int | None = None, attempt: int | None = None, follow: bool = False
) -> None:
    """Writes the log of a rank to stdout, and to stderr which one it is.

    Args:
        run_dir: The run directory.
        rank: The rank; default: 0, or the lowest that has written anything.
        attempt: The number of the attempt; default: the newest.
        follow: Whether to go on with what comes, over restarts unless ``attempt`` is given, until the run ends or
            somebody presses Ctrl-C.

    Raises:
        NoLog: If there is no such log, and none is waited for.
    """
    directory = RunDirectory(run_dir).path
    try:
        if follow:
            _follow(directory, rank, attempt)
        else:
            number = _newest(directory) if attempt is None else attempt
            _print_all(_open(directory, number, rank))
    except KeyboardInterrupt:
        print(file=sys.stderr)


def _newest(directory: Path) -> int:
    if not (numbers := attempts(directory)):
        raise NoLog(f"there are no logs in {directory}: no rank that launch has started has written anything")
    return numbers[-1]


def _open(directory: Path, attempt: int, rank: int | None) -> LogReader:
    """The log of a rank, after a line about it.

    Raises:
        NoLog: If there is none.
    """
    folder, numbers = folder_of(directory, attempt), attempts(directory)
    if attempt not in numbers:
        raise NoLog(f"there is no log of attempt {attempt} in {directory}; there are those of {_range(numbers)}")
    found = ranks(directory, attempt)
    if rank is None:
        rank = found[0] if found else 0
    if rank not in found:
        raise NoLog(f"rank {rank} has no log in {folder}; ranks with one: {_range(found)}")
    began = (read_json(folder / "attempt.json") or {}).get("began")
    since = f", began {timestamp(began)}" if isinstance(began, float) else ""
    others = [f"ranks {_range(found)}"] * (len(found) > 1) + [f"attempts {_range(numbers)}"] * (len(numbers) > 1)
    also = f"; there are {' and '.join(others)}" if others else ""
    print(f"==> attempt {attempt}{since}, rank {rank}: {log_of(folder, rank)}{also} <==", file=sys.stderr, flush=True)
    return LogReader(folder, rank)


def _range(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + ("" if len(numbers) <= 8 else ", ...")


def _print_all(log: LogReader) -> bool:
    """Whether there was anything new."""
    found = False
    while data := log.read():
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        found = True
    return found


def _follow(directory: Path, rank: int | None, attempt: int | None) -> None:
    end, number, log, has_said = _End(directory), attempt, None, False
    while True:
        over = end.reason()  # before the log is read, which is complete then
        later = [each for each in attempts(directory) if number is not None and each > number]
        try:
            number = _newest(directory) if number is None else number
            log = log or _open(directory, number, rank or 0)
        except NoLog as error:
            if over and not later:
                raise
            if not has_said:
                print(f"Waiting: {error}.", file=sys.stderr, flush=True)
                has_said = True
        if log is not None:
            _print_all(log)
        if later and log is not None:  # one node may be a little behind another one with the last words
            time.sleep(_SETTLES_S)
            _print_all(log)
        if later and attempt is None:
            number, log = later[0], None
        elif later or over:
            print(f"==> {f'attempt {later[0]} has begun' if later else over} <==", file=sys.stderr)
            return
        else:
            time.sleep(_POLL_S)


class _End:
    """Whether a run goes on: its launch records its end; one that was killed does not, and is looked for less often."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._history = LiveHistory(Ledger(RunDirectory(directory).ledger, rank=None))
        self._looked_at: float | None = None

    def reason(self) -> str | None:
        """How the run stands, if nobody works on it."""
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
