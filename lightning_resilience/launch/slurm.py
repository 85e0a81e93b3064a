"""What Slurm says about the job this process runs in. Imports nothing but the standard library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SlurmInfo:
    """The Slurm job of this process; what Slurm did not say, or said in a way that can't be read, is ``None``.

    Args:
        job_id: The job's id; a requeued job keeps it.
        job_name: The job's name.
        node_list: The nodes in Slurm's own notation, such as ``node[01-04]``.
        num_nodes: How many nodes.
        ntasks_per_node: Tasks on this node.
        node_rank: Which of the nodes this is.
        restart_count: How often the job has been requeued.
        partition: Its partition.
        array_job_id: The id of the job array it belongs to.
        array_task_id: Its index in that array.
    """

    job_id: str
    job_name: str | None
    node_list: str | None
    num_nodes: int | None
    ntasks_per_node: int | None
    node_rank: int | None
    restart_count: int
    partition: str | None
    array_job_id: str | None
    array_task_id: int | None

    @property
    def is_requeued(self) -> bool:
        """Whether this is not the job's first start."""
        return self.restart_count > 0


def get_slurm_info(environment: Mapping[str, str] | None = None) -> SlurmInfo | None:
    """Reads the ``SLURM_*`` variables.

    Args:
        environment: Where to read; default: this process's environment.

    Returns:
        The job's facts, or ``None`` outside a Slurm job.
    """
    variables = os.environ if environment is None else environment

    def text(*names: str) -> str | None:
        return next((value for name in names if (value := variables.get(f"SLURM_{name}", "").strip())), None)

    def number(*names: str) -> int | None:
        return next((int(value) for name in names if (value := text(name)) and re.fullmatch(r"[0-9]+", value)), None)

    job_id = text("JOB_ID", "JOBID")
    if job_id is None:
        return None
    node_rank = number("NODEID")
    return SlurmInfo(
        job_id=job_id,
        job_name=text("JOB_NAME"),
        node_list=text("JOB_NODELIST", "NODELIST"),
        num_nodes=number("JOB_NUM_NODES", "NNODES"),
        ntasks_per_node=_on_node(text("NTASKS_PER_NODE", "STEP_TASKS_PER_NODE", "TASKS_PER_NODE"), node_rank or 0),
        node_rank=node_rank,
        restart_count=number("RESTART_COUNT") or 0,
        partition=text("JOB_PARTITION"),
        array_job_id=text("ARRAY_JOB_ID"),
        array_task_id=number("ARRAY_TASK_ID"),
    )


def _on_node(counts: str | None, node_rank: int) -> int | None:
    """What ``counts`` says about one node. Slurm writes ``2(x3),1`` for 2, 2, 2 and 1."""
    first = 0
    for part in (counts or "").split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        if match is None:
            return None
        first += int(match[2] or 1)
        if node_rank < first:
            return int(match[1])
    return None
