"""``lightning-resilience diagnose`` and ``watch``: the hangs of a run, and its ranks as they are now."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_resilience._files import read_json
from lightning_resilience._formatting import duration, table, timestamp
from lightning_resilience._processes import is_running
from lightning_resilience.detect.hangs.evidence import RankEvidence
from lightning_resilience.detect.hangs.process_probe import PYTHON, ask
from lightning_resilience.detect.hangs.progress import read_progress
from lightning_resilience.detect.hangs.rank_probe import own_directories
from lightning_resilience.detect.hangs.verdict import Finding, Verdict
from lightning_resilience.detect.hangs.watchdog import read_evidence
from lightning_resilience.run.run_directory import RunDirectory

_MAX_ROWS = 40


def diagnoses(run_dir: str | os.PathLike[str], number: int | None = None) -> str:
    """The hangs of a run: a line for every hang, and one hang in full.

    Args:
        run_dir: The run directory.
        number: The hang in full, 1 is the oldest; default: the newest.
    """
    directory = RunDirectory(run_dir).path / "diagnostics"
    folders = [path for path in sorted(directory.glob("*")) if path.is_dir()]
    if not folders:
        return f"No hang has been diagnosed in {directory.parent}."
    if number is not None and not 1 <= number <= len(folders):
        return f"There is no hang number {number}; there are {len(folders)}."
    lines = []
    for index, folder in enumerate(folders, 1):
        lines.append(f"{index}. {folder.name}  {_line(folder)}")
    chosen = folders[(number or len(folders)) - 1]
    try:
        return "\n".join([*lines, "", *_in_full(chosen)])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return "\n".join([*lines, "", f"What is in {chosen} is damaged ({error})."])


def _line(folder: Path) -> str:
    content = read_json(folder / "verdict.json")
    return "no verdict was reached" if content is None else " ".join(str(content.get("line")).split())


def _read_verdict(folder: Path) -> Verdict | None:
    content = read_json(folder / "verdict.json")
    try:
        return Verdict.from_json(content) if content is not None else None
    except (AttributeError, KeyError, TypeError, ValueError):  # it was no hang, or the file is damaged
        return None


def _in_full(folder: Path) -> list[str]:
    evidence, verdict = read_evidence(folder), _read_verdict(folder)
    findings: dict[int, tuple[str, Finding]] = {}
    if verdict is not None:
        findings |= {each.rank: ("victim", each) for each in verdict.victims}
        findings |= {each.rank: ("culprit", each) for each in verdict.culprits}
    shown = sorted(evidence, key=lambda each: (findings.get(each.rank, ("", None))[0] != "culprit", each.rank))
    rows = [_rank_row(each, findings.get(each.rank)) for each in shown[:_MAX_ROWS]]
    lines = [f"Ranks in {folder}"]
    lines += table(["rank", "node", "pid", "state", "section", "step", "stood still", "verdict", "what"], rows)
    if len(shown) > _MAX_ROWS:
        lines.append(f"... and {len(shown) - _MAX_ROWS} more")
    lines += [
        "",
        f"Stacks of all threads: {folder}/rank-*.stacks.txt",
        f"Collectives: {folder}/rank-*.collectives.json",
    ]
    return lines


def _rank_row(each: RankEvidence, finding: tuple[str, Finding] | None) -> list[str]:
    return [
        str(each.rank),
        each.node,
        str(each.process.pid),
        each.process.state,
        each.section,
        str(each.step),
        duration(each.seconds),
        finding[0] if finding else "",
        finding[1].text if finding else "",
    ]


def ranks_now(run_dir: str | os.PathLike[str]) -> str:
    """The current state of the ranks of a run on this node. Asks their worker servers; a healthy rank does not wait.

    Args:
        run_dir: The run directory.
    """
    now = time.monotonic()
    rows = []
    for about, path in sorted(_registered(RunDirectory(run_dir).path), key=lambda found: int(found[0]["rank"])):
        progress = read_progress(path.with_suffix(".progress"))
        if progress is None:
            continue
        began = time.monotonic()
        answers = about["has_server"] and ask(path, "ping") is not None
        milliseconds = (time.monotonic() - began) * 1000
        python = bool(answers) and ask(path, PYTHON) is not None
        rows.append(
            [
                str(about["rank"]),
                str(about["node"]),
                str(about["pid"]),
                progress.section,
                str(progress.step),
                duration(max(0.0, now - progress.since)),
                f"{progress.timeout:g} s",
                f"in {milliseconds:.1f} ms" if answers else "no",
                "yes" if python else "no",
            ]
        )
    clock = timestamp(time.time())[11:]
    if not rows:
        return f"{clock}  No rank of {run_dir} is in a fit on this node, or none is watched (FaultTolerance)."
    head = ["rank", "node", "pid", "section", "step", "since progress", "limit", "answers", "runs Python"]
    return "\n".join([clock, *table(head, rows)])


def _registered(run_dir: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    for directory in own_directories():
        for path in directory.glob("*/rank-*.json"):
            about = read_json(path)
            same = about is not None and os.path.realpath(str(about.get("run_dir"))) == os.path.realpath(run_dir)
            if about is not None and same and is_running(about):
                yield about, path.with_suffix("")


def watch(run_dir: str | os.PathLike[str], interval_s: float) -> None:
    """Prints :func:`ranks_now` until interrupted.

    Args:
        run_dir: The run directory.
        interval_s: Seconds between two prints.
    """
    redraw = sys.stdout.isatty()
    try:
        while True:
            text = ranks_now(run_dir)
            print(("\33[H\33[2J" if redraw else "") + text, flush=True)
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return
