"""The allocations of a run, computed from the ledger alone.

An *allocation* is one start of a scheduler's job, or one call of ``launch`` without a scheduler. A *job chain* is the
allocations of one job since it was submitted, or since the run last ended for good. In the ledger an allocation is a
``slice``, and the job's id is ``slurm_job_id`` under any scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_resilience.run.history import Allocation

ALLOCATIONS_WITHOUT_PROGRESS = 10
"""A job chain ends after this many allocations in a row without a new verified step: something takes every job away
before the run can save, and would do so forever."""


def current_job_chain(allocations: Sequence[Allocation]) -> list[Allocation]:
    """The allocations of the same job chain as the last allocation."""
    if not allocations:
        return []
    # A job that a person has submitted, or a launch by hand, begins a chain of its own.
    job_id = allocations[-1].job_id
    apart = (index + 1 for index, each in enumerate(allocations[:-1]) if each.then == "end" or each.job_id != job_id)
    begin = max(apart, default=0)
    return list(allocations[begin:])


def why_it_must_end(job_chain: Sequence[Allocation], restart_count: int, max_requeues: int) -> str | None:
    """Why there must be no further allocation; ``None``: there may be one.

    Args:
        job_chain: The allocations of the chain so far, all of which have ended.
        restart_count: How often the job has been requeued, by the scheduler's count. This also includes allocations
            that ended before they could write a line to the ledger.
        max_requeues: How often the job may be requeued.
    """
    requeued = max(restart_count, len(job_chain) - 1)
    if requeued >= max_requeues:
        return f"the job has been requeued {requeued} times, and --max-requeues={max_requeues}"
    idle = 0
    for each in reversed(job_chain):
        if each.advanced:
            break
        idle += 1
    if idle >= ALLOCATIONS_WITHOUT_PROGRESS:
        return f"no new step has become safe in {idle} allocations in a row"
    return None


def nodes_to_exclude(last: Allocation, usable_nodes: int | None) -> list[str]:
    """The nodes that the job must not get again.

    At most a quarter of the nodes of the job, but at least one. If there are more, the nodes that were excluded first
    are used again. A single node is never excluded: there is no other node to compare it to.

    Args:
        last: The allocation that has just ended.
        usable_nodes: How many nodes the job could be given at all; ``None``: unknown; then no node is added.
    """
    count = len(last.nodes)
    suspects = [node for node in last.suspects if node in last.nodes]
    if count < 2 or not suspects:
        return last.excluded
    wanted = [*(node for node in last.excluded if node not in suspects), *suspects][-max(1, count // 4) :]
    if usable_nodes is None or usable_nodes - len(wanted) < count:
        return last.excluded  # otherwise the job would wait forever
    return wanted
