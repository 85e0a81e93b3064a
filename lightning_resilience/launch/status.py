"""``lightning-resilience status``: the allocations of a run and its state now, from the ledger and the scheduler."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_resilience._formatting import duration, node_range, or_dash, shortened, table, timestamp
from lightning_resilience.launch.allocations import current_job_chain
from lightning_resilience.launch.budget import budget_of
from lightning_resilience.launch.json_output import to_json
from lightning_resilience.launch.record import records
from lightning_resilience.launch.schedulers import KINDS
from lightning_resilience.run import time_account
from lightning_resilience.run.deadlines import KEEP_TIME_EVERY_S
from lightning_resilience.run.events import AllocationEnd, Fault, LaunchExit, LaunchStart, TimeSpent
from lightning_resilience.run.history import Allocation, History, read_history
from lightning_resilience.run.ledger import node_name
from lightning_resilience.run.run_directory import RunDirectory

_REASON_LENGTH = 110


def status(run_dir: str | os.PathLike[str], as_json: bool = False) -> str:
    """The state of a run, as text of up to 120 columns.

    Args:
        run_dir: The run directory.
        as_json: Whether to return JSON for programs, see :data:`.json_output.KEYS`.
    """
    run_directory = RunDirectory(run_dir)
    found = _content(run_directory.path)
    if as_json:
        return to_json(found)
    if not found["allocations"]:
        return f"Nothing is recorded in {run_directory.ledger}: no run has been launched here."
    return "\n".join(_text(found))


def progress_line(history: History) -> str:
    """How far a run is, in a few words: ``step 1200 safe, restart 1 of 3, allocation 4``.

    Args:
        history: The run's history.
    """
    step, failures, retries = history.safe_step(), history.failures.in_job, history.failures.job_retries
    words = ["no step safe yet" if step is None else f"step {step} safe"]
    budget = budget_of(history)
    if failures:
        words.append(f"restart {failures} of {budget.in_job_restarts}")
    if retries:
        words.append(f"retry {retries} of {budget.job_retries}")
    words.append(f"allocation {len(current_job_chain(history.allocations))}")
    return ", ".join(words)


State = Literal["running", "queued", "finished", "failed", "stopped", "unknown"]
"""The state of a run. ``queued``: a scheduler has its job, but no nodes for it. ``stopped``: interrupted, or killed."""

_WAITS = ("PENDING", "REQUEUED", "REQUEUE_HOLD")  # Slurm's names of states without nodes
_STATES: dict[str | None, State] = {"finished": "finished", "failed": "failed", "halted": "failed"}


class Standing(NamedTuple):
    """The state of a run.

    Attributes:
        state: In one word.
        text: In a few words.
    """

    state: State
    text: str

    @property
    def is_ongoing(self) -> bool:
        """Whether it runs or waits for nodes."""
        return self.state in ("running", "queued")


def now(history: History, run_dir: Path) -> tuple[str, bool]:
    """The state of a run with allocations in words, and whether it runs or waits for nodes.

    Args:
        history: The run's history.
        run_dir: The run directory.
    """
    found = standing(history.allocations[-1], run_dir)
    return found.text, found.is_ongoing


def standing(last: Allocation, run_dir: Path) -> Standing:
    """The state of a run.

    Args:
        last: The run's last allocation.
        run_dir: The run directory.
    """
    is_over = last.then == "end" or (last.exit_status == "finished" and last.then is None)
    if last.job_id is not None and not is_over and (queued := _queue_state(last.job_id)):
        return Standing("queued" if any(f" is {state} " in queued for state in _WAITS) else "running", queued)
    if last.then == "end" or (last.exit is not None and last.then is None):
        how = last.how or str(last.exit_status)
        if isinstance(last.exit, Fault):
            how += f" ({shortened(str(last.exit.reason), _REASON_LENGTH)})"
        return Standing(_STATES.get(last.exit_status or last.how, "stopped"), f"ended: {how}")
    every = records(run_dir / "launches")
    here = [record for record in every if record.is_here]
    if not all(record.is_dead for record in here):
        return Standing("running", f"running on this node ({node_name()})")
    nodes = {str(event.node) for event in kept_lately(run_dir)}
    if nodes := nodes - {node_name()} if here else nodes:
        return Standing("running", f"running on {node_range(sorted(nodes))}")
    ago = duration(max(0.0, time.time() - last.last_seen))
    if last.then == "requeue":
        return Standing("unknown", f"requeued {ago} ago")
    elsewhere = "" if here and here == every else "running on another node, or "
    text = f"{elsewhere}killed: nothing was recorded for {ago}"
    return Standing("stopped" if here else "unknown", text)


def kept_lately(run_dir: Path) -> list[TimeSpent]:
    """Recent time records that watchdogs have kept of living ranks, on any node.

    Args:
        run_dir: The run directory.
    """
    alive_since = time.time() - 3 * KEEP_TIME_EVERY_S
    return [event for event in time_account.kept(run_dir) if any(ended > alive_since for ended in event.ended or ())]


def _queue_state(job_id: str) -> str | None:
    """What a scheduler of this machine reports about a job that is not over; ``None``: nothing."""
    return next((state for kind in KINDS if (state := kind().queue_state(job_id)) is not None), None)


# -- content -----------------------------------------------------------------------------------------------------------


def _content(run_dir: Path) -> dict[str, Any]:
    history = read_history(RunDirectory(run_dir).ledger)
    allocations, launch, failures = history.allocations, history.last(LaunchStart), history.failures
    budget = budget_of(history) if allocations and allocations[-1].has_launcher else None
    state, is_ongoing = now(history, run_dir) if allocations else (None, False)
    ends = [event for event in history.events if isinstance(event, (AllocationEnd, LaunchExit))]
    return {
        "run_dir": str(run_dir),
        "command": None if launch is None else launch.command,
        "is_ongoing": is_ongoing,
        "now": state,
        "safe_step": history.safe_step(RunDirectory(run_dir)),
        "local_saves": _local_saves(history),
        "restarts": budget and budget.in_job_restarts,
        "restarts_left": budget and max(0, budget.in_job_restarts - failures.in_job),
        "job_retries": budget and budget.job_retries,
        "job_retries_left": budget and max(0, budget.job_retries - failures.job_retries),
        "job_chain": len(current_job_chain(allocations)),
        "excluded": allocations[-1].excluded if allocations else [],
        "last_reason": str(ends[-1].reason) if ends else None,
        "allocations": [
            _allocation(each, following) for each, following in zip(allocations, [*allocations, None][1:], strict=True)
        ],
    }


def _local_saves(history: History) -> dict[str, Any] | None:
    saved = history.last_local_save
    return None if saved is None else {name: getattr(saved, name) for name in ("every_s", "stall_s", "seconds")}


def _allocation(each: Allocation, following: Allocation | None) -> dict[str, Any]:
    return {
        "job_id": each.job_id,
        "restart_count": each.restart_count,
        "nodes": each.nodes,
        "began": each.began,
        "last_seen": each.last_seen,
        "step_before": each.step_before,
        "step_after": each.step_after,
        "starts": each.worker_groups if each.has_launcher else None,
        "ended": _how(each, following),
        "then": _then(each, following),
    }


def _how(each: Allocation, following: Allocation | None) -> str | None:
    if each.how is not None:
        return each.how
    if each.exit is not None:
        is_retry = isinstance(each.exit, LaunchExit) and each.exit.new_job
        return "retry" if is_retry else str(each.exit_status)
    return None if following is None else "killed"


def _then(each: Allocation, following: Allocation | None) -> str | None:
    if each.then == "requeue":
        return "requeued" + (f" without {', '.join(each.excluded)}" if each.suspects and each.excluded else "")
    if following is None or each.then == "end":
        return None
    if each.how is None and each.job_id is not None and following.job_id == each.job_id:
        return "requeued by scheduler"
    return "launched again"


# -- text --------------------------------------------------------------------------------------------------------------


def _text(found: dict[str, Any]) -> list[str]:
    head = ["allocation", "job", "nodes", "began", "lasted", "safe steps", "starts", "ended", "then"]
    rows = [_row(number, each) for number, each in enumerate(found["allocations"], 1)]
    budget, chain = "none: nothing starts this run again", found["job_chain"]
    if found["restarts"] is not None:
        budget = (
            f"{found['restarts_left']} of {found['restarts']} restarts and "
            f"{found['job_retries_left']} of {found['job_retries']} job retries left"
        )
    lines = [f"Run {found['run_dir']}", "", *table(head, rows), "", f"Safe      {_safe(found)}", f"Budget    {budget}"]
    if found["local_saves"] is not None:
        lines.insert(-1, f"Local     {_local(**found['local_saves'])}")
    lines.append(f"Job chain {chain} allocation{'s' * (chain != 1)}")
    if found["excluded"]:
        lines.append(f"Excluded  {', '.join(found['excluded'])}")
    lines.append(f"Now       {found['now']}")
    if found["last_reason"] is not None:
        lines.append(f"Last exit {shortened(found['last_reason'], _REASON_LENGTH)}")
    return lines


def _safe(found: dict[str, Any]) -> str:
    return "no checkpoint yet" if found["safe_step"] is None else f"step {found['safe_step']}"


def _local(every_s: float | None, stall_s: float | None, seconds: float | None) -> str:
    often = "" if every_s is None else f"every {duration(every_s)} after the first ones: "
    costs = f"stops the training for {1000 * (stall_s or 0):.1f} ms, and is complete after {seconds or 0:.2f} s"
    return f"{often}a save {costs}"


def _row(number: int, each: dict[str, Any]) -> list[str]:
    return [
        str(number),
        or_dash(each["job_id"]) + (f".{each['restart_count']}" if each["restart_count"] else ""),
        node_range(each["nodes"]) or "-",
        timestamp(each["began"])[5:],
        duration(max(0.0, each["last_seen"] - each["began"])),
        f"{or_dash(each['step_before'])} -> {or_dash(each['step_after'])}",
        or_dash(each["starts"]),
        or_dash(each["ended"]),
        or_dash(each["then"]),
    ]
