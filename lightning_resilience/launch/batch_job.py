"""The program in a scheduler's batch script: runs one allocation of a run and decides what follows it.

It starts one ``launch`` on every node and waits for them. When they have ended, it ends the job or requeues it, by what
the first node's launch has recorded in the ledger. An exit code alone would not do: the exit code of the whole step is
the highest of all nodes, and a launch that was killed leaves one, too. :data:`.exit_codes.BATCH_JOB` holds the rules.

A job whose script ends before it was requeued counts as completed, and never comes back. So after a requeue this
process waits until the scheduler ends it.
"""

from __future__ import annotations

import argparse
import platform
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from lightning_resilience._formatting import node_range
from lightning_resilience._output import introduce, log_line
from lightning_resilience.launch.allocations import (
    current_job_chain,
    nodes_to_exclude,
    why_it_must_end,
)
from lightning_resilience.launch.cli import launch_settings
from lightning_resilience.launch.schedulers import current_scheduler
from lightning_resilience.launch.schedulers.base import (
    PORTS,
    PREEMPT_TIME_S,
    REQUEUE_EVERY_S,
    REQUEUE_WITHIN_S,
    JobStatus,
    Scheduler,
)
from lightning_resilience.launch.status import progress_line
from lightning_resilience.run import exit_codes
from lightning_resilience.run.events import (
    AllocationEnd,
    AllocationStart,
    Event,
    ExclusionFailed,
    LaunchExit,
    RunRefused,
)
from lightning_resilience.run.history import Allocation, LiveHistory, Then
from lightning_resilience.run.ledger import Ledger, node_name
from lightning_resilience.run.run_directory import RunDirectory

COMMENT_EVERY_S = 30.0
"""Seconds between two comments: the scheduler's controller serves all users."""

_POLL_S = 1.0
_EXCLUDE_TRIES = 10
_COMMENT_LENGTH = 400
_LIMIT_IS_NEAR_S = 90.0  # schedulers check time limits only now and then: Slurm warns up to 60 s too early


@dataclass(frozen=True)
class End:
    """How an allocation has ended, and what follows.

    Args:
        how: How it has ended, in a few words, for a table.
        then: What follows.
        exit_code: The exit code of the job, if the job ends.
        reason: How it has ended, as a clause for a sentence.
    """

    how: str
    then: Then
    exit_code: int
    reason: str


class Comment:
    """The comment that the scheduler shows beside the job. Nothing depends on whether it can be set.

    Args:
        scheduler: The scheduler of the job.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._shown = ""
        self._due = 0.0

    @property
    def is_due(self) -> bool:
        """Whether enough time has passed since the last one."""
        return time.monotonic() >= self._due

    def show(self, text: str, now: bool = False) -> None:
        """Sets the comment, if it has changed and is due.

        Args:
            text: The new comment.
            now: Whether to set it even if it is not due.
        """
        text = " ".join(text.split())[:_COMMENT_LENGTH]
        if not (self.is_due or now):
            return
        self._due = time.monotonic() + COMMENT_EVERY_S
        if text == self._shown:
            return
        self._shown = text
        self._scheduler.show_comment(text)


class BatchJob:
    """One allocation.

    Args:
        scheduler: The scheduler in whose job this process runs.
        run_dir: The run directory.
        arguments: The arguments of ``launch``, except its nodes and where they meet: only the job knows these.
        max_requeues: How often the job may be requeued.
        lead_s: Minimum number of seconds from the scheduler's SIGTERM to the time limit.
    """

    def __init__(
        self, scheduler: Scheduler, run_dir: Path, arguments: Sequence[str], max_requeues: int, lead_s: float
    ) -> None:
        self.scheduler = scheduler
        self.arguments = list(arguments)
        self.max_requeues = max_requeues
        self.lead_s = lead_s
        self._ledger = Ledger(RunDirectory(run_dir).ledger, rank=None)
        self._history = LiveHistory(self._ledger)
        self._comment = Comment(scheduler)
        self._terms = 0
        self._has_run = False

    def run(self) -> int:
        """Runs to the end and returns the exit code of the job, unless the scheduler ends this process earlier."""
        # These signals are for the steps. Handlers, because the steps would inherit ignored signals.
        signal.signal(signal.SIGTERM, self._on_term)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda signum, frame: None)
        try:
            return self._run()
        except OSError as error:
            return self._without_ledger(f"this allocation cannot continue: {error}")

    def _run(self) -> int:
        before = list(self._history.now().allocations)
        if (other := self._other_job(before)) is not None:
            refusal = f"job {other} is already running in {self._ledger.path.parent}; cancel one of the two jobs"
            log_line(f"Refused: {refusal}.")  # not recorded: the allocation in the ledger is the other job's
            self._comment.show(refusal, now=True)
            return 1
        if reason := self._why_not(before):
            return self._end(End("not started", "end", 1, reason))
        try:
            launch_settings(self.arguments)
        except SystemExit:
            reason = "launch has refused its command line; see the output above"
            return self._end(End("refused", "end", exit_codes.USAGE, reason))
        nodes = self.scheduler.node_names()
        start = AllocationStart(
            slurm_job_id=self.scheduler.job_id, restart_count=self.scheduler.restart_count, node_list=nodes
        )
        self._ledger.record(start)
        if len(self._history.now().allocations) == len(before):
            # An allocation that is not recorded is not counted, and the job would be requeued forever.
            return self._without_ledger(f"{self._ledger.path} cannot be written")
        on_every_node, environment = self.scheduler.run_on_every_node()
        command = [*on_every_node, *self.launch_command()]
        log_line(f"Allocation {len(before) + 1} on {', '.join(nodes) or 'unknown nodes'}.")
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        self._has_run = True
        while (exit_code := process.poll()) is None:
            self._show_progress()
            time.sleep(_POLL_S)
        status = self.scheduler.status()
        # By their type, not by their number: an event that another node recorded before may have turned up meanwhile.
        end = self._how_it_ended(exit_code, self._history.now().since(AllocationStart), status)
        if end.then == "requeue" and status.is_cancelled:
            end = End("cancelled", "end", exit_codes.INTERRUPTED, "the job was cancelled")
        return self._follow(end)

    def launch_command(self) -> list[str]:
        """The command to run on every node."""
        nodes = self.scheduler.num_nodes
        command = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", f"--nnodes={nodes}"]
        if nodes > 1:
            command += [f"--node-rank={self.scheduler.name}", f"--rdzv-endpoint={_this_node()}:{_free_port()}"]
        return [*command, "--retries-in-new-job", *self.arguments]

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        self._terms += 1

    def _other_job(self, before: Sequence[Allocation]) -> str | None:
        """The id of another job that works in this run directory now, if any."""
        last = before[-1].job_id if before and before[-1].ended is None else None
        if last is None or last == self.scheduler.job_id:
            return None
        return last if self.scheduler.is_at_work(last) else None

    def _why_not(self, before: Sequence[Allocation]) -> str | None:
        """Why this allocation must not begin; needed where the scheduler itself has requeued the job."""
        job_chain = current_job_chain(before)
        if not job_chain or job_chain[-1].then == "end" or job_chain[-1].job_id != self.scheduler.job_id:
            return None
        return why_it_must_end(job_chain, 0, self.max_requeues)

    def _without_ledger(self, reason: str) -> int:
        """Ends the job if nothing has run yet; later requeues it, since only this node may have lost the storage."""
        restarts = self.scheduler.restart_count
        if (self._has_run or restarts > 0) and restarts < self.max_requeues:
            return self._requeue(End("storage lost", "requeue", 1, reason), [], [])
        log_line(f"The job ends with 1: {reason}.")
        self._comment.show(reason, now=True)
        return 1

    def _show_progress(self) -> None:
        if self._comment.is_due:
            with suppress(Exception):  # a comment is not worth the run
                self._comment.show(progress_line(self._history.now()))

    def _how_it_ended(self, exit_code: int, events: Sequence[Event], status: JobStatus) -> End:
        """How this allocation has ended: by its events; if they do not show it, by exit code and status."""
        exits = [event for event in events if isinstance(event, LaunchExit)]
        if not exits:
            if refusals := [event for event in events if isinstance(event, RunRefused)]:
                return End("refused", "end", 1, str(refusals[-1].reason))
            reason = f"the launch was lost and has recorded nothing (its job step ended with exit code {exit_code})"
            return End("launch lost", "requeue", 1, reason)
        reason, recorded = str(exits[-1].reason), exits[-1].exit_code
        if recorded is None:
            recorded = 1
        if recorded == 0:
            return End("finished", "end", 0, reason)
        if recorded != exit_codes.INTERRUPTED:
            return End(f"failed, exit code {recorded}", "end", recorded, reason)
        if exits[-1].new_job:
            return End("failed", "requeue", 1, reason)
        return End(self._why_stopped(status), "requeue", 1, reason)

    def _why_stopped(self, status: JobStatus) -> str:
        if lost := self.scheduler.lost_nodes():
            return f"{node_range(lost)} lost"
        if status.is_requeued:
            return f"requeued by {self.scheduler.title}"
        if status.is_preempted:
            return "preempted"
        is_near = status.ends_at is not None and time.time() > status.ends_at - self.lead_s - _LIMIT_IS_NEAR_S
        return "time limit" if is_near else "told to stop"

    def _follow(self, end: End) -> int:
        """Ends or requeues the job; returns its exit code, unless the scheduler ends this process earlier."""
        allocations = self._history.now().allocations
        if not allocations:
            raise OSError(f"{self._ledger.path} has lost its content")
        last = allocations[-1]
        before = excluded = last.excluded  # the allocation changes with the ledger
        if end.then == "requeue":
            job_chain = current_job_chain(allocations)
            stop = why_it_must_end(job_chain, self.scheduler.restart_count, self.max_requeues)
            if stop is not None:
                end = End(end.how, "end", 1, f"{stop}; the last allocation: {end.reason}")
            elif last.suspects:
                excluded = nodes_to_exclude(last, self._count_usable_nodes(excluded))
        if end.then == "end":
            return self._end(end)
        self._ledger.record(AllocationEnd(how=end.how, then="requeue", reason=end.reason, excluded=list(excluded)))
        self._comment.show(f"{progress_line(self._history.now())}; {end.how}, requeued", now=True)
        return self._requeue(end, before, excluded)

    def _count_usable_nodes(self, excluded: Sequence[str]) -> int | None:
        """How many nodes the job could be given, without the nodes that its user excludes; ``None``: unknown."""
        listed, usable = self.scheduler.excluded_nodes(), self.scheduler.usable_nodes()
        if usable is None or listed is None:
            return None
        return len(set(usable) - (set(listed) - set(excluded)))

    def _end(self, end: End) -> int:
        self._ledger.record(AllocationEnd(how=end.how, then="end", exit_code=end.exit_code, reason=end.reason))
        self._comment.show(f"{end.how}: {end.reason}" if end.exit_code else f"finished: {end.reason}", now=True)
        log_line(f"The job ends with {end.exit_code} ({end.how}): {end.reason}.")
        return end.exit_code

    def _requeue(self, end: End, before: Sequence[str], excluded: Sequence[str]) -> int:
        """Requeues the job, which excludes the nodes ``before`` so far, besides the nodes that its user excludes."""
        is_new = list(excluded) != list(before)
        without = f", without {', '.join(excluded)}" if is_new else ""
        log_line(f"Requeuing the job{without} ({end.how}): {end.reason}.")
        deadline = time.monotonic() + REQUEUE_WITHIN_S
        listed = self.scheduler.excluded_nodes()
        while not (status := self.scheduler.status()).is_requeued:
            if status.is_cancelled:
                return self._end(End("cancelled", "end", exit_codes.INTERRUPTED, "the job was cancelled"))
            self._terms = 0
            if (refusal := self.scheduler.requeue()) is None:
                break
            if time.monotonic() > deadline:
                reason = f"the job could not be requeued ({refusal}); submit it again to continue the run"
                return self._end(End(end.how, "end", exit_codes.INTERRUPTED, reason))
            # The SIGTERM with which the scheduler takes the job back may have ended the scheduler's command, too.
            self._wait_for_term(min(deadline, time.monotonic() + REQUEUE_EVERY_S))
        if is_new and listed is not None:  # otherwise the nodes that the user excludes would be forgotten
            self._exclude([*(node for node in listed if node not in before), *excluded])
        self._wait_for_term(deadline)  # from the scheduler, which has taken the job back
        return exit_codes.INTERRUPTED

    def _wait_for_term(self, deadline: float) -> None:
        while not self._terms and time.monotonic() < deadline:
            time.sleep(0.1)

    def _exclude(self, nodes: Sequence[str]) -> None:
        """Sets the nodes that the job must not get; the job is pending by now."""
        refusal = None
        for _ in range(_EXCLUDE_TRIES):  # the SIGTERM that takes the job back may end the scheduler's command, too
            if (refusal := self.scheduler.exclude(nodes)) is None:
                return
            time.sleep(0.2)
        log_line(f"{self.scheduler.title} does not exclude {', '.join(nodes)}: {refusal}")
        self._ledger.record(ExclusionFailed(node_list=list(nodes), reason=refusal))


def _this_node() -> str:
    """A name by which the other nodes find this one. It is the first node, on which the batch script runs."""
    try:
        socket.getaddrinfo(node_name(), None)
    except OSError:
        return platform.node()
    return node_name()


def _free_port() -> int:
    """A port on which nothing on this node listens now."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no free port among {PORTS.start} to {PORTS.stop - 1} on {platform.node()}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The program of the batch script.

    Args:
        arguments: The command line; default: this process's.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_resilience.launch.batch_job",
        description="Runs one allocation of a run in a batch job; for the scripts of lightning-resilience slurm.",
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="as launch's")
    parser.add_argument("--max-requeues", type=int, default=100, help="how often the job may be requeued")
    parser.add_argument(
        "--lead",
        type=float,
        default=float(PREEMPT_TIME_S),
        help="minimum number of seconds from SIGTERM to the time limit",
    )
    parser.add_argument("launch", nargs=argparse.REMAINDER, metavar="-- ...", help="the arguments of launch")
    options = parser.parse_args(arguments)
    scheduler = current_scheduler()
    if scheduler.job_id is None:
        parser.error("this is not a batch job; submit the script that lightning-resilience slurm makes")
    launch = options.launch[1:] if options.launch[:1] == ["--"] else options.launch
    job = BatchJob(
        scheduler, options.run_dir, [f"--run-dir={options.run_dir}", *launch], options.max_requeues, options.lead
    )
    introduce(scheduler.name)
    sys.exit(job.run())


if __name__ == "__main__":
    main()
