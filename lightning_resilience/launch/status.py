"""The slices of a run and where it is now, for a person. Reads the ledger, and asks Slurm where there is one."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path

from lightning_resilience.launch.budget import Budget, Event, highest_verified_step, spent
from lightning_resilience.launch.chain import Slice, current_chain, slices_of
from lightning_resilience.launch.record import records
from lightning_resilience.launch.report import table
from lightning_resilience.launch.slurm import run_slurm
from lightning_resilience.run.ledger import is_ledger, node_name, read_ledger
from lightning_resilience.run.run_directory import RunDirectory

_REASON_LENGTH = 110
_LIMITS = [field.name for field in fields(Budget)]


def status(run_dir: str | os.PathLike[str]) -> str:
    """The state of a run, as text of up to 120 columns.

    Args:
        run_dir: The run directory.
    """
    run_directory = RunDirectory(run_dir)
    events = list(read_ledger(run_directory.ledger))
    slices = slices_of(events)
    if not slices:
        return f"Nothing is recorded in {run_directory.ledger}: no run has been launched here."
    lines = [f"Run {run_directory.path}", ""]
    rows = [_row(number, slices) for number in range(len(slices))]
    lines += table(["slice", "job", "nodes", "began", "lasted", "safe steps", "starts", "ended", "then"], rows)
    chain = current_chain(slices)
    lines += ["", f"Safe      {_safe(events)}"]
    lines += [f"Budget    {_budget_left(events) if slices[-1].has_launcher else 'none: nothing starts this run again'}"]
    lines += [f"Chain     {len(chain)} slices" if len(chain) != 1 else "Chain     1 slice"]
    if slices[-1].excluded:
        lines.append(f"Excluded  {', '.join(slices[-1].excluded)}")
    lines += [f"Now       {_now(slices, run_directory.path)}"]
    if reason := _last_reason(events):
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
        events = list(read_ledger(RunDirectory(path).ledger))
        launched = [event.get("command") for event in events if event["event"] == "launch"]
        command = shlex.join(map(str, launched[-1])) if launched and isinstance(launched[-1], list) else "-"
        slices = slices_of(events)
        rows.append([path.name, _safe(events), _now(slices, path) if slices else "-", command])
    return "\n".join(table(["run", "safe", "now", "command"], rows))


def progress_line(events: Sequence[Event]) -> str:
    """Where a run is, in a few words: ``step 1200 safe, restart 1 of 3, slice 4``.

    Args:
        events: The run's ledger, oldest first.
    """
    step = highest_verified_step(events)
    words = ["no step safe yet" if step is None else f"step {step} safe"]
    budget, (failures, retries) = _budget(events), spent(events)
    if failures:
        words.append(f"restart {failures} of {budget.in_job_restarts}")
    if retries:
        words.append(f"retry {retries} of {budget.job_retries}")
    words.append(f"slice {len(current_chain(slices_of(events)))}")
    return ", ".join(words)


def _budget(events: Sequence[Event]) -> Budget:
    """The limits that the last launch has been given."""
    given = next((event.get("budget") for event in reversed(events) if event["event"] == "launch"), None)
    limits = {name: each for name, each in (given or {}).items() if name in _LIMITS and type(each) is int}
    return Budget(**limits)  # another version may have had other ones


def _safe(events: Sequence[Event]) -> str:
    step = highest_verified_step(events)
    return "no checkpoint yet" if step is None else f"step {step}"


def _budget_left(events: Sequence[Event]) -> str:
    budget, (failures, retries) = _budget(events), spent(events)
    restarts = max(0, budget.in_job_restarts - failures)
    again = max(0, budget.job_retries - retries)
    return f"{restarts} of {budget.in_job_restarts} restarts and {again} of {budget.job_retries} job retries left"


def _row(number: int, slices: Sequence[Slice]) -> list[str]:
    each = slices[number]
    following = slices[number + 1] if number + 1 < len(slices) else None
    job = "-" if each.job_id is None else each.job_id
    if each.restart_count:
        job += f".{each.restart_count}"
    end = each.last_seen
    steps = f"{_step(each.step_before)} -> {_step(each.step_after)}"
    return [
        str(number + 1),
        job,
        compact(each.nodes) or "-",
        datetime.fromtimestamp(each.began).strftime("%m-%d %H:%M:%S"),
        duration(end - each.began),
        steps,
        str(each.worker_groups) if each.has_launcher else "-",
        _how(each, following),
        _then(each, following),
    ]


def _how(each: Slice, following: Slice | None) -> str:
    if each.how is not None:
        return each.how
    if each.exit is not None:
        return "retry" if each.exit.get("new_job") else str(each.exit.get("status"))
    return "-" if following is None else "killed"


def _then(each: Slice, following: Slice | None) -> str:
    if each.then == "requeue":
        return "requeued" + (f" without {', '.join(each.excluded)}" if each.suspects and each.excluded else "")
    if following is None or each.then == "end":
        return "-"
    if each.how is None and each.job_id is not None and following.job_id == each.job_id:
        return "requeued by Slurm"
    return "launched again"


def _now(slices: Sequence[Slice], run_dir: Path) -> str:
    last = slices[-1]
    if last.job_id is not None and (queued := _queued(last.job_id)):
        return queued
    if last.then == "end" or (last.exit is not None and last.then is None):
        how = last.how or str(last.exit and last.exit.get("status"))
        if last.exit is not None and last.exit["event"] == "fault":
            how += f" ({_shortened(last.exit.get('reason'))})"
        return f"ended: {how}"
    if any(record.is_here and not record.is_dead for record in records(run_dir / "launches")):
        return f"running on this node ({node_name()})"
    ago = duration(max(0.0, time.time() - last.last_seen))
    if last.then == "requeue":
        return f"requeued {ago} ago"
    return f"running on another node, or killed: nothing was recorded for {ago}"


def _queued(job_id: str) -> str | None:
    """What squeue says about a job that is not over."""
    if shutil.which("squeue") is None:
        return None
    shown = run_slurm("squeue", "--noheader", f"--jobs={job_id}", "--format=%T|%r|%N|%k")
    if shown.returncode != 0 or "|" not in shown.stdout:
        return None
    state, reason, nodes, comment = shown.stdout.splitlines()[0].split("|", 3)
    where = f" on {nodes}" if nodes else f" ({reason})"
    said = f": {comment}" if comment not in ("", "(null)") else ""
    return f"job {job_id} is {state}{where}{said}"


def _last_reason(events: Sequence[Event]) -> str | None:
    ends = [event for event in events if event["event"] in ("slice_end", "exit")]
    if not ends:
        return None
    return _shortened(ends[-1].get("reason"))


def _shortened(reason: object) -> str:
    text = " ".join(str(reason).split())
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 3] + "..."


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)


def duration(seconds: float) -> str:
    """A time for a person: ``8.3 s``, ``12 min 05 s``, ``3 h 20 min``.

    Args:
        seconds: How long.
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def compact(nodes: Sequence[str]) -> str:
    """The names of nodes, or the first and the last of many.

    Args:
        nodes: In Slurm's order.
    """
    return ",".join(nodes) if len(nodes) <= 3 else f"{nodes[0]}..{nodes[-1]} ({len(nodes)})"
