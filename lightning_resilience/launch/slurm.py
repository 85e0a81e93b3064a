"""What Slurm says about its jobs. Imports nothing but the standard library."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

_COMMAND_WITHIN_S = 60.0


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


def run_slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs one of Slurm's commands, and never waits for longer than a minute.

    Args:
        command: Its name and arguments.

    Returns:
        How it ended. One that is missing or does not answer counts as failed, with the reason as its error output.
    """
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_WITHIN_S,
            check=False,
            env=os.environ | {"SLURM_TIME_FORMAT": "standard"},  # which a user may have set to another
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def show_job(job_id: str) -> dict[str, str]:
    """What ``scontrol show job`` says about a job; empty if it says nothing.

    Args:
        job_id: Its id.
    """
    shown = run_slurm("scontrol", "--oneliner", "show", "job", job_id)
    return dict(re.findall(r"(?:^|\s)([A-Za-z]+)=(\S*)", shown.stdout)) if shown.returncode == 0 else {}


def node_names(node_list: str) -> list[str]:
    """The names of nodes in Slurm's own notation, in its order.

    Args:
        node_list: Such as ``node[01-04]``.
    """
    shown = run_slurm("scontrol", "show", "hostnames", node_list)
    return shown.stdout.split() if shown.returncode == 0 else []


def lost_nodes(node_list: str) -> list[str]:
    """Which of these nodes Slurm has lost.

    Args:
        node_list: In Slurm's own notation.
    """
    shown = run_slurm("sinfo", "--noheader", "--Node", f"--nodes={node_list}", "--states=down,fail", "--format=%N")
    return sorted(set(shown.stdout.split())) if shown.returncode == 0 else []


def usable_nodes(partition: str) -> list[str] | None:
    """The nodes of a partition that can be given to a job, now or once they are free; ``None`` if that is unknown.

    Args:
        partition: Its name.
    """
    states = "idle,alloc,mix,comp"
    shown = run_slurm("sinfo", "--noheader", "--Node", f"--partition={partition}", f"--states={states}", "--format=%N")
    return sorted(set(shown.stdout.split())) if shown.returncode == 0 else None
