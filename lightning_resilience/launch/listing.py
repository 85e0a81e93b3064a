"""``lightning-resilience list``: the runs below a folder, one line each.

Most of 200 runs have ended, and a ledger may have 45 MB. So a ledger is folded only once. The result is kept in the
user's cache folder, with names, sizes and times of the files from which it was made, and is valid while these stay the
same. An ongoing run is folded again when the last fold is older than a hundredth of the run's time; a newer fold would
change its goodput by less than a point. For every other run, only three folders are listed. Several runs are read in
parallel.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_resilience._files import make_directory, read_json, write_json
from lightning_resilience._formatting import fitted, or_dash, printable, shortened, time_ago
from lightning_resilience.launch.json_output import to_json
from lightning_resilience.launch.schedulers import KINDS
from lightning_resilience.launch.status import Standing, standing
from lightning_resilience.run import time_account
from lightning_resilience.run.events import LaunchStart, parse
from lightning_resilience.run.goodput import account, reached_step
from lightning_resilience.run.history import Allocation, History
from lightning_resilience.run.ledger import is_ledger, read_ledger
from lightning_resilience.run.run_directory import RunDirectory

_DEPTH = 3
_READ_AT_ONCE = 16
_KEPT_FROM_BYTES = 1 << 16  # smaller ledgers are folded in a few milliseconds
_KEPT_RUNS = 5000
_STALE_AFTER = 0.01  # of the time that a run has taken so far
_VERSION = 1  # of the format of the cache
_OTHERS_SHOWN = 5
_NOTE_LENGTH = 160
_COMMAND_LENGTH = 60


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory, even before anything has run in it.

    Args:
        path: The folder.
    """
    made = ("launches", *(os.path.join(kind.name, "job.sbatch") for kind in KINDS))
    return is_ledger(path / "ledger") or any((path / name).exists() for name in made)


def runs_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """The run directories in a folder, up to three levels down, and the folders directly in it that contain none.

    Hidden folders and links are skipped. If the folder itself is a run directory, it is the only one.

    Args:
        folder: The folder.
    """
    if is_run(folder):
        return [folder], []
    found: list[Path] = []
    others = []
    for child in _folders(folder):
        before = len(found)
        found += _runs_in(child, _DEPTH - 1)
        if len(found) == before:
            others.append(child)
    return found, others


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        for child in _folders(folder):
            yield from _runs_in(child, depth - 1)


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            return [folder / name for name in sorted(names) if not name.startswith(".")]
    except OSError:
        return []


def list_runs(folder: str | os.PathLike[str], as_json: bool = False, width: int = 1000) -> str:
    """The runs below a folder, the most recently active first.

    Args:
        folder: The folder, or one run directory.
        as_json: Whether to return JSON for programs, see :data:`.json_output.KEYS`.
        width: Columns of the terminal. If they are too few, columns of the table are left out.
    """
    path = Path(folder).absolute()
    paths, others = runs_below(path)
    cache = _Cache()
    with ThreadPoolExecutor(_READ_AT_ONCE) as readers:
        runs = list(readers.map(lambda each: _line(each, cache), paths))
    cache.save()
    runs.sort(key=lambda each: (-(each["last_active"] or 0), each["run_dir"]))
    if as_json:
        return to_json({"folder": str(path), "runs": runs, "others": list(map(str, others))})
    return "\n".join(_text(path, runs, others, width))


# -- content -----------------------------------------------------------------------------------------------------------


def _line(path: Path, cache: _Cache) -> dict[str, Any]:
    """The entry of a run; for a damaged run, why it cannot be read."""
    found: dict[str, Any] = {"run_dir": str(path), "state": "unknown", "now": None, "problem": None}
    found |= dict.fromkeys(("step", "safe_step", "goodput", "ettr", "interruptions", "last_active", "job_id"))
    found["command"] = None
    try:
        facts, how = _facts(path, cache)
        found |= {name: facts[name] for name in found if name in facts}
        if how is not None:
            found |= {"state": how.state, "now": how.text}
            if how.state == "running":
                kept = time_account.kept(path)
                reached = (each.reached for each in kept if each.fit == facts["fit"] and each.reached is not None)
                found["step"] = max(filter(None, (found["step"], *reached)), default=found["step"])
                found["last_active"] = time.time()
    except Exception as error:  # of files that are damaged, or of another program: the other runs are shown
        found["problem"] = f"cannot be read: {error}"
    return found


def _facts(path: Path, cache: _Cache) -> tuple[dict[str, Any], Standing | None]:
    """The facts from the ledger of a run, and the run's state."""
    ledger, kept = _signature(path / "ledger"), _signature(path / "time")
    facts = cache.get(path)
    if facts is not None and facts["ledger"] == ledger:
        how = _standing(facts, path)
        is_ongoing = how is not None and how.is_ongoing
        age = time.time() - facts["folded"]
        is_recent = abs(age) < _STALE_AFTER * (facts["folded"] - facts["began"])
        if is_ongoing == facts["is_ongoing"] and (is_recent if is_ongoing else facts["kept"] == kept):
            return facts, how
    facts = {"ledger": ledger, "kept": kept, **_folded(path)}
    if sum(size for _, size, _ in ledger) >= _KEPT_FROM_BYTES:
        cache.put(path, facts)
    return facts, _standing(facts, path)


def _folded(path: Path) -> dict[str, Any]:
    history = History(read_ledger(RunDirectory(path).ledger))  # not cached: there are many runs
    events, launch = history.events, history.last(LaunchStart)
    last = history.allocations[-1] if history.allocations else None
    is_ongoing = last is not None and standing(last, path).is_ongoing
    now = time.time()
    goodput = account(events, time_account.kept(path), now if is_ongoing else None)
    fit = max((number for event in events if type(number := getattr(event, "fit", None)) is int), default=0)
    reached = max(reached_step(path, events, fit), history.verified_step or 0)
    is_known = goodput.ranks > 0 and not math.isnan(goodput.goodput)
    return {
        "folded": now,
        "began": goodput.began if goodput.seconds else now,
        "is_ongoing": is_ongoing,
        "fit": fit,
        "step": reached or history.verified_step,
        "safe_step": history.safe_step(RunDirectory(path)),
        "goodput": goodput.goodput if is_known else None,
        "ettr": goodput.ettr if is_known else None,
        "interruptions": len(goodput.interruptions),
        "last_active": max((event.time for event in events), default=None),
        "job_id": None if last is None else last.job_id,
        "command": None if launch is None else launch.command,
        "allocation": None if last is None else _of_allocation(last),
    }


def _of_allocation(last: Allocation) -> dict[str, Any]:
    names = ("began", "job_id", "ended", "how", "then", "last_seen")
    exit_event = None if last.exit is None else last.exit.to_json()
    return {**{name: getattr(last, name) for name in names}, "exit": exit_event}


def _standing(facts: dict[str, Any], path: Path) -> Standing | None:
    if (fields := facts["allocation"]) is None:
        return None
    exit_event: Any = fields["exit"] and parse(fields["exit"])
    return standing(Allocation(**{**fields, "exit": exit_event}), path)


def _signature(folder: Path) -> list[list[Any]]:
    """Names, sizes and times of the files in a folder; empty if the folder does not exist."""
    found: list[list[Any]] = []
    before = folder.with_suffix(".jsonl")  # of earlier versions
    with suppress(FileNotFoundError, NotADirectoryError):
        about = before.stat()
        found.append([before.name, about.st_size, about.st_mtime_ns])
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                about = entry.stat()
                found.append([entry.name, about.st_size, about.st_mtime_ns])
    return sorted(found)


class _Cache:
    """The facts from ledgers, by run directory, in the user's cache folder."""

    def __init__(self) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._path = Path(base) / "lightning-resilience" / "runs.json"
        content = read_json(self._path) or {}
        runs = content.get("runs") if content.get("version") == _VERSION else None
        self._runs: dict[str, Any] = runs if isinstance(runs, dict) else {}
        self._has_changed = False

    def get(self, path: Path) -> dict[str, Any] | None:
        found = self._runs.get(os.path.realpath(path))
        return found if isinstance(found, dict) else None

    def put(self, path: Path, facts: dict[str, Any]) -> None:
        name = os.path.realpath(path)
        self._runs.pop(name, None)  # the newest last
        self._runs[name] = facts
        self._has_changed = True

    def save(self) -> None:
        """Writes the cache if it has changed. If home is full or read-only, only the next call takes longer."""
        if self._has_changed:
            newest = dict(list(self._runs.items())[-_KEPT_RUNS:])
            with suppress(OSError):
                make_directory(self._path.parent)
                write_json(self._path, {"version": _VERSION, "runs": newest})


# -- text --------------------------------------------------------------------------------------------------------------

_HEAD = ["run", "state", "step", "goodput", "interruptions", "active", "job", "command"]
_LEFT_OUT_FIRST = ["command", "job", "interruptions", "goodput", "active", "step"]


def _text(folder: Path, runs: Sequence[dict[str, Any]], others: Sequence[Path], width: int) -> list[str]:
    lines = []
    if runs:
        lines = fitted(_HEAD, [_row(folder, each) for each in runs], _LEFT_OUT_FIRST, width)
    else:
        lines.append(f"There is no run in {folder} or in its subfolders.")
    notes = [f"{_name(folder, each)} {each['problem']}" for each in runs if each["problem"]]
    if others:
        names = [printable(path.name) for path in others]
        more = f" and {len(names) - _OTHERS_SHOWN} more" if len(names) > _OTHERS_SHOWN else ""
        notes.append(f"No runs in: {', '.join(names[:_OTHERS_SHOWN])}{more}")
    return lines + [shortened(note, min(width, _NOTE_LENGTH)) for note in notes]


def _name(folder: Path, each: dict[str, Any]) -> str:
    name = os.path.relpath(each["run_dir"], folder)
    return printable(os.path.basename(each["run_dir"]) if name == "." else name)


def _row(folder: Path, each: dict[str, Any]) -> list[str]:
    is_running, active = each["state"] == "running", each["last_active"]
    return [
        _name(folder, each),
        "damaged" if each["problem"] else each["state"],
        or_dash(each["step"]),
        "-" if each["goodput"] is None else f"{100 * each['goodput']:.0f} %",
        or_dash(each["interruptions"]),
        "-" if active is None else "now" if is_running else time_ago(time.time() - active),
        or_dash(each["job_id"]),
        "-" if each["command"] is None else shortened(shlex.join(each["command"]), _COMMAND_LENGTH),
    ]
