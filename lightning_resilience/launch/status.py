"""``lightning-resilience status``: the allocations of a run and its state now, from the ledger and the scheduler."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from lightning_resilience._formatting import duration, node_range, or_dash, shortened, table, timestamp
from lightning_resilience.launch.allocations import current_job_chain
from lightning_resilience.launch.budget import Budget
from lightning_resilience.launch.record import records
from lightning_resilience.launch.schedulers import KINDS
from lightning_resilience.run.deadlines import KEEP_TIME_EVERY_S
from lightning_resilience.run.events import AllocationEnd, Fault, LaunchExit, LaunchStart, TimeSpent
from lightning_resilience.run.history import Allocation, History, read_history
from lightning_resilience.run.ledger import is_ledger, node_name
from lightning_resilience.run.run_directory import RunDirectory

_REASON_LENGTH = 110
_LIMITS = [field.name for field in fields(Budget)]


def status(run_dir: str | os.PathLike[str]) -> str:
    """The state of a run, as text of up to 120 columns.

    Args:
        run_dir: The run directory.
    """
    run_directory = RunDirectory(run_dir)
    history = read_history(run_directory.ledger)
    allocations = history.allocations
    if not allocations:
        return f"Nothing is recorded in {run_directory.ledger}: no run has been launched here."
    lines = [f"Run {run_directory.path}", ""]
    rows = [_row(number, allocations) for number in range(len(allocations))]
    lines += table(["allocation", "job", "nodes", "began", "lasted", "safe steps", "starts", "ended", "then"], rows)
    job_chain = current_job_chain(allocations)
    lines += ["", f"Safe      {_safe(history)}"]
    budget = _budget_left(history) if allocations[-1].has_launcher else "none: nothing starts this run again"
    lines += [f"Budget    {budget}"]
    lines += [f"Job chain {len(job_chain)} allocations" if len(job_chain) != 1 else "Job chain 1 allocation"]
    if allocations[-1].excluded:
        lines.append(f"Excluded  {', '.join(allocations[-1].excluded)}")
    lines += [f"Now       {_now(allocations, run_directory.path)}"]
    if reason := _last_reason(history):
        lines.append(f"Last word {reason}")
    return "\n".join(lines)


def runs_in(folder: Path) -> list[Path]:
    """The run directories in a folder that is none itself, such as ``runs``; those begun last come last.

    Args:
        folder: The folder.
    """
    if not folder.is_dir() or is_ledger(RunDirectory(folder).ledger):
        return []
    found = [path for path in folder.iterdir() if is_ledger(RunDirectory(path).ledger)]
    return sorted(found, key=lambda path: (path.stat().st_mtime, path.name))


def overview(runs: Sequence[Path]) -> str:
    """What each of several runs is, and how it stands, as a table.

    Args:
        runs: Their directories.
    """
    rows = []
    for path in runs:
        history = read_history(RunDirectory(path).ledger)
        launch, allocations = history.last(LaunchStart), history.allocations
        command = shlex.join(launch.command) if launch is not None and launch.command is not None else "-"
        rows.append([path.name, _safe(history), _now(allocations, path) if allocations else "-", command])
    return "\n".join(table(["run", "safe", "now", "command"], rows))


def progress_line(history: History) -> str:
    """Where a run is, in a few words: ``step 1200 safe, restart 1 of 3, allocation 4``.

    Args:
        history: The run's history.
    """
    step, failures, retries = history.verified_step, history.failures.in_job, history.failures.job_retries
    words = ["no step safe yet" if step is None else f"step {step} safe"]
    budget = _budget(history)
    if failures:
        words.append(f"restart {failures} of {budget.in_job_restarts}")
    if retries:
        words.append(f"retry {retries} of {budget.job_retries}")
    words.append(f"allocation {len(current_job_chain(history.allocations))}")
    return ", ".join(words)


def _budget(history: History) -> Budget:
    """The limits that the last launch has been given."""
    launch = history.last(LaunchStart)
    given = (launch.budget if launch is not None else None) or {}
    limits = {name: each for name, each in given.items() if name in _LIMITS and type(each) is int}
    return Budget(**limits)  # another version may have had other ones


def _safe(history: History) -> str:
    step = history.verified_step
    return "no checkpoint yet" if step is None else f"step {step}"


def _budget_left(history: History) -> str:
    budget = _budget(history)
    restarts = max(0, budget.in_job_restarts - history.failures.in_job)
    again = max(0, budget.job_retries - history.failures.job_retries)
    return f"{restarts} of {budget.in_job_restarts} restarts and {again} of {budget.job_retries} job retries left"


def _row(number: int, allocations: Sequence[Allocation]) -> list[str]:
    each = allocations[number]
    following = allocations[number + 1] if number + 1 < len(allocations) else None
    job = or_dash(each.job_id)
    if each.restart_count:
        job += f".{each.restart_count}"
    return [
        str(number + 1),
        job,
        node_range(each.nodes) or "-",
        timestamp(each.began)[5:],
        duration(each.last_seen - each.began),
        f"{or_dash(each.step_before)} -> {or_dash(each.step_after)}",
        str(each.worker_groups) if each.has_launcher else "-",
        _how(each, following),
        _then(each, following),
    ]


def _how(each: Allocation, following: Allocation | None) -> str:
    if each.how is not None:
        return each.how
    if each.exit is not None:
        is_retry = isinstance(each.exit, LaunchExit) and each.exit.new_job
        return "retry" if is_retry else str(each.exit_status)
    return "-" if following is None else "killed"


def _then(each: Allocation, following: Allocation | None) -> str:
    if each.then == "requeue":
        return "requeued" + (f" without {', '.join(each.excluded)}" if each.suspects and each.excluded else "")
    if following is None or each.then == "end":
        return "-"
    if each.how is None and each.job_id is not None and following.job_id == each.job_id:
        return "requeued by scheduler"
    return "launched again"


def _now(allocations: Sequence[Allocation], run_dir: Path) -> str:
    last = allocations[-1]
    if last.job_id is not None and (queued := _queue_state(last.job_id)):
        return queued
    if last.then == "end" or (last.exit is not None and last.then is None):
        how = last.how or str(last.exit_status)
        if isinstance(last.exit, Fault):
            how += f" ({shortened(str(last.exit.reason), _REASON_LENGTH)})"
        return f"ended: {how}"
    if any(record.is_here and not record.is_dead for record in records(run_dir / "launches")):
        return f"running on this node ({node_name()})"
    ago = duration(max(0.0, time.time() - last.last_seen))
    if last.then == "requeue":
        return f"requeued {ago} ago"
    return f"running on another node, or killed: nothing was recorded for {ago}"


def is_ongoing(history: History, run_dir: Path, kept: Sequence[TimeSpent]) -> bool:
    """Whether a run waits for nodes, or a launcher or ranks of it live.

    Args:
        history: Its history.
        run_dir: The run directory.
        kept: What was kept of its ranks.
    """
    last = history.allocations[-1:]
    if not last:
        return False
    if last[0].job_id is not None and _queue_state(last[0].job_id):
        return True
    if last[0].then == "end" or (last[0].exit is not None and last[0].then is None):
        return False
    if any(record.is_here and not record.is_dead for record in records(run_dir / "launches")):
        return True
    alive_since = time.time() - 3 * KEEP_TIME_EVERY_S  # also on other nodes
    return any(ended > alive_since for event in kept for ended in event.ended or ())


def _queue_state(job_id: str) -> str | None:
    """What a scheduler of this machine says about a job that is not over."""
    return next((state for kind in KINDS if (state := kind().queue_state(job_id)) is not None), None)


def _last_reason(history: History) -> str | None:
    end = next((event for event in reversed(history.events) if isinstance(event, (AllocationEnd, LaunchExit))), None)
    return None if end is None else shortened(str(end.reason), _REASON_LENGTH)
