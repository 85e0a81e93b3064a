"""``lightning-resilience diagnose`` and ``watch``: the hangs of a run, and its ranks as they are now."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_resilience._files import matching, read_json
from lightning_resilience._formatting import duration, or_dash, table, timestamp
from lightning_resilience._processes import is_running
from lightning_resilience.detect.hangs.evidence import RankEvidence
from lightning_resilience.detect.hangs.process_probe import PYTHON, ask
from lightning_resilience.detect.hangs.progress import read_progress
from lightning_resilience.detect.hangs.rank_probe import own_directories
from lightning_resilience.detect.hangs.verdict import Finding, Verdict
from lightning_resilience.detect.hangs.watchdog import read_evidence
from lightning_resilience.launch.json_output import to_json
from lightning_resilience.launch.status import kept_lately, standing
from lightning_resilience.run.history import read_history
from lightning_resilience.run.run_directory import RunDirectory

_MAX_ROWS = 40


def diagnoses(run_dir: str | os.PathLike[str], number: int | None = None, as_json: bool = False) -> str:
    """The hangs of a run: a line for every hang, and one hang in full.

    Args:
        run_dir: The run directory.
        number: Which hang to show in full; 1 is the oldest. Default: the newest.
        as_json: Whether to return JSON for programs, see :data:`.json_output.KEYS`.
    """
    directory = RunDirectory(run_dir).path
    folders = [path for path in sorted((directory / "diagnostics").glob("*")) if path.is_dir()]
    if number is None:
        number = len(folders)
    is_there = 1 <= number <= len(folders)
    ranks, damage = _in_full(folders[number - 1]) if is_there else ([], None)
    hangs = [{"folder": str(folder), "line": _line(folder)} for folder in folders]
    if as_json:
        shown = number if is_there else None
        return to_json({"run_dir": str(directory), "hangs": hangs, "number": shown, "ranks": ranks, "damage": damage})
    if not folders:
        return f"No hang has been diagnosed in {directory}."
    if not is_there:
        return f"There is no hang number {number}; there are {len(folders)}."
    lines = [
        f"{index}. {folder.name}  {hang['line'] or 'no verdict was reached'}"
        for index, (folder, hang) in enumerate(zip(folders, hangs, strict=True), 1)
    ]
    return "\n".join([*lines, "", *_ranks_of_hang(folders[number - 1], ranks, damage)])


def _line(folder: Path) -> str | None:
    content = read_json(folder / "verdict.json")
    return None if content is None else " ".join(str(content.get("line")).split())


def _read_verdict(folder: Path) -> Verdict | None:
    content = read_json(folder / "verdict.json")
    try:
        return Verdict.from_json(content) if content is not None else None
    except (AttributeError, KeyError, TypeError, ValueError):  # it was no hang, or the file is damaged
        return None


def _in_full(folder: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The ranks of a hang, culprits first, and what is wrong with the files, if anything."""
    try:
        evidence, verdict = read_evidence(folder), _read_verdict(folder)
        findings: dict[int, tuple[str, Finding]] = {}
        if verdict is not None:
            findings |= {each.rank: ("victim", each) for each in verdict.victims}
            findings |= {each.rank: ("culprit", each) for each in verdict.culprits}
        ranks = [_rank_of_hang(each, findings.get(each.rank)) for each in evidence]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return [], str(error)
    return sorted(ranks, key=lambda each: (each["verdict"] != "culprit", each["rank"])), None


def _rank_of_hang(each: RankEvidence, finding: tuple[str, Finding] | None) -> dict[str, Any]:
    return {
        "rank": each.rank,
        "node": each.node,
        "pid": each.process.pid,
        "state": each.process.state,
        "section": each.section,
        "step": each.step,
        "stood_still": each.seconds,
        "verdict": finding[0] if finding else None,
        "what": finding[1].text if finding else None,
    }


def _ranks_of_hang(folder: Path, ranks: Sequence[dict[str, Any]], damage: str | None) -> list[str]:
    if damage is not None:
        return [f"The files in {folder} are damaged ({damage})."]
    rows = [
        [
            *(str(each[name]) for name in ("rank", "node", "pid", "state", "section", "step")),
            duration(each["stood_still"]),
            each["verdict"] or "",
            each["what"] or "",
        ]
        for each in ranks[:_MAX_ROWS]
    ]
    head = ["rank", "node", "pid", "state", "section", "step", "stood still", "verdict", "what"]
    more = [f"... and {len(ranks) - _MAX_ROWS} more"] if len(ranks) > _MAX_ROWS else []
    return [
        f"Ranks in {folder}",
        *table(head, rows),
        *more,
        "",
        f"Stacks of all threads: {folder}/rank-*.stacks.txt",
        f"Collectives: {folder}/rank-*.collectives.json",
    ]


def ranks_now(run_dir: str | os.PathLike[str], as_json: bool = False) -> str:
    """The state of the ranks of a run: on this node now, on other nodes as their watchdogs have recorded it last.

    Asks the worker servers of this node; a healthy rank does not wait for that.

    Args:
        run_dir: The run directory.
        as_json: Whether to return JSON for programs, see :data:`.json_output.KEYS`.
    """
    directory = RunDirectory(run_dir).path
    here = [_rank_here(about, path) for about, path in _registered(directory)]
    by_rank = {each["rank"]: each for each in [*_ranks_elsewhere(directory), *here] if each is not None}
    ranks = [by_rank[rank] for rank in sorted(by_rank)]
    now = time.time()
    if as_json:
        return to_json({"run_dir": str(directory), "time": now, "ranks": ranks})
    clock = timestamp(now)[11:]
    if not ranks:
        history = read_history(RunDirectory(run_dir).ledger)
        found = standing(history.allocations[-1], directory) if history.allocations else None
        if found is not None and not found.is_ongoing:
            return f"{clock}  No rank of {run_dir} is in a fit; {found.text}."
        return f"{clock}  No rank of {run_dir} is in a fit, or none is watched (FaultTolerance)."
    head = ["rank", "node", "pid", "section", "step", "since progress", "limit", "answers", "runs Python", "seen"]
    return "\n".join([clock, *table(head, [_rank_row(each, now) for each in ranks])])


def _rank_row(each: dict[str, Any], now: float) -> list[str]:
    is_here = each["pid"] is not None
    return [
        str(each["rank"]),
        str(each["node"]),
        or_dash(each["pid"]),
        each["section"],
        or_dash(each["step"]),
        duration(each["since_progress"]),
        f"{each['limit']:g} s" if is_here else "-",
        ("no" if is_here else "-") if each["answer_ms"] is None else f"in {each['answer_ms']:.1f} ms",
        {True: "yes", False: "no", None: "-"}[each["runs_python"]],
        "now" if is_here else f"{duration(max(0.0, now - each['seen']))} ago",
    ]


def _rank_here(about: dict[str, Any], path: Path) -> dict[str, Any] | None:
    progress = read_progress(path.with_suffix(".progress"))
    if progress is None:
        return None
    began = time.monotonic()
    answers = about["has_server"] and ask(path, "ping") is not None
    answer_ms = (time.monotonic() - began) * 1000
    return {
        "rank": int(about["rank"]),
        "node": about["node"],
        "pid": about["pid"],
        "section": progress.section,
        "step": progress.step,
        "since_progress": max(0.0, began - progress.since),
        "limit": progress.timeout,
        "answer_ms": answer_ms if answers else None,
        "runs_python": bool(answers) and ask(path, PYTHON) is not None,
        "seen": time.time(),
    }


def _ranks_elsewhere(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The recent records of ranks, the newest last."""
    for event in sorted(kept_lately(run_dir), key=lambda event: event.time):
        with suppress(IndexError, TypeError):  # a record that this package would not write
            for index, rank in enumerate(event.ranks or ()):
                since, seen = (event.since or ())[index], (event.ended or ())[index]
                yield {
                    "rank": rank,
                    "node": event.node,
                    "pid": None,
                    "section": (event.doing or ())[index],
                    "step": event.reached,
                    "since_progress": seen - since,
                    "limit": None,
                    "answer_ms": None,
                    "runs_python": None,
                    "seen": seen,
                }


def _registered(run_dir: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    for directory in own_directories():
        for path in matching(directory, "*/rank-*.json"):
            about = read_json(path)
            same = about is not None and os.path.realpath(str(about.get("run_dir"))) == os.path.realpath(run_dir)
            if about is not None and same and is_running(about):
                yield about, path.with_suffix("")


def watch(run_dir: str | os.PathLike[str], interval_s: float, as_json: bool = False) -> None:
    """Prints :func:`ranks_now` until interrupted.

    Args:
        run_dir: The run directory.
        interval_s: Seconds between two prints.
        as_json: Whether to print JSON for programs, one object per line.
    """
    redraw = sys.stdout.isatty() and not as_json
    try:
        while True:
            text = ranks_now(run_dir, as_json)
            print(("\33[H\33[2J" if redraw else "") + text, flush=True)
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return
