"""The interface to a batch system: what the launcher asks a scheduler. Imports only the standard library."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREEMPT_TIME_S = 60
"""Seconds from SIGTERM to the time limit; NeMo's ``preempt_time``."""

AFTER_GRACE_S = 10
"""Seconds that the launches and the job's script need after the workers have ended."""

SHORTEST_GRACE_S = 10
"""Seconds that the workers must have to save, at least."""

PORTS = range(20000, 32000)
"""The ports at which the nodes of a job meet: below the ports that Linux gives to connections."""

REQUEUE_EVERY_S = 10
"""Seconds between two attempts to requeue a job."""

REQUEUE_WITHIN_S = 600
"""Seconds after which a job that cannot be requeued ends, and how long a requeued one waits to be ended."""


@dataclass(frozen=True)
class JobStatus:
    """What the scheduler reports about the job of this process.

    Args:
        is_cancelled: Whether a person has cancelled the job. It must not be requeued.
        is_requeued: Whether the job has been requeued since this process started.
        is_preempted: Whether the job gives way to another one.
        ends_at: When the time limit ends it, in seconds since the epoch; ``None``: unknown, or there is no limit.
    """

    is_cancelled: bool = False
    is_requeued: bool = False
    is_preempted: bool = False
    ends_at: float | None = None


class Scheduler:
    """The answers without a scheduler; the class of a batch system overrides what it knows better.

    An instance is about the job of this process. A call that fails or does not answer within a minute counts as if
    nothing was known.

    Attributes:
        name: Its subcommand of ``lightning-resilience``, and the folder of its files in a run directory.
        title: Its name in sentences.
        job_id: The id of the job, the same after a requeue; ``None`` outside of a job.
        restart_count: How often the job has been requeued.
        num_nodes: How many nodes the job has.
        node_rank: The number of this node in the job; ``None``: its nodes are not numbered.
    """

    name = ""
    title = "the scheduler"
    job_id: str | None = None
    restart_count = 0
    num_nodes = 1
    node_rank: int | None = None

    # This job

    def job_info(self) -> dict[str, Any] | None:
        """The facts of the job, for the ledger; ``None`` outside of a job."""
        return None

    def node_names(self) -> list[str]:
        """The names of the job's nodes; empty if they are unknown."""
        return []

    def run_on_every_node(self) -> tuple[list[str], dict[str, str]]:
        """The words before a command that make it run once on every node of the job, and their environment."""
        return [], dict(os.environ)

    def status(self) -> JobStatus:
        """The job's status now."""
        return JobStatus()

    def lost_nodes(self) -> list[str]:
        """The nodes of the job that have failed."""
        return []

    def usable_nodes(self) -> list[str] | None:
        """The nodes that the job could be given; ``None``: unknown, or the job asks for certain nodes."""
        return None

    def excluded_nodes(self) -> list[str] | None:
        """The nodes that the job must not be given; ``None``: unknown."""
        return None

    def exclude(self, nodes: Sequence[str]) -> str | None:
        """Sets the nodes that the job must not be given; called after the job was requeued.

        Args:
            nodes: Their names.

        Returns:
            Why they could not be excluded, if so.
        """
        return "there is no scheduler"

    def requeue(self) -> str | None:
        """Requeues the job. The scheduler then ends this process, which must wait for that.

        Returns:
            Why the job could not be requeued, if so.
        """
        return "there is no scheduler"

    def show_comment(self, text: str) -> None:
        """Shows a line beside the job in the scheduler's own lists.

        Args:
            text: The line.
        """

    # Any job

    def is_at_work(self, job_id: str) -> bool:
        """Whether a job has nodes.

        Args:
            job_id: Its id.
        """
        return False

    def queue_state(self, job_id: str) -> str | None:
        """A line about a job from the scheduler's list of jobs; ``None`` if the list does not have it.

        Args:
            job_id: Its id.
        """
        return None

    # The batch script

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options that only this scheduler has to its subcommand.

        Args:
            parser: The parser of the subcommand.
        """

    def batch_script(
        self,
        options: argparse.Namespace,
        launch: Sequence[str],
        run_dir: Path,
        job_name: str,
        grace_period_s: float | None,
    ) -> str:
        """The script of a job that runs ``lightning_resilience.launch.batch_job``.

        Args:
            options: The command line.
            launch: The arguments of ``launch``, without run directory, nodes and grace period.
            run_dir: The run directory.
            job_name: The name of the job.
            grace_period_s: Seconds that the workers have to save; ``None``: as many as the scheduler leaves.

        Raises:
            ValueError: If the options cannot work together, with the reason.
        """
        raise NotImplementedError

    def submit(self, script: Path) -> str:
        """Submits a batch script.

        Args:
            script: Its path.

        Returns:
            The id of the job.

        Raises:
            OSError: If it is refused, with the reason.
        """
        raise NotImplementedError
