"""What the batch script of ``lightning-resilience slurm`` runs: one slice of a run, and the decision what follows.

It starts one ``launch`` on every node and waits for them. When they have ended it ends the job, or requeues it, by what
the first of them has recorded in the ledger. An exit code alone would not do: srun gives back the highest of all nodes,
and a launch that was killed leaves one too.

=========================================  =============================================================
``launch`` ended with                      then
=========================================  =============================================================
0: finished                                the job ends with 0
75: interrupted, or to be retried as a     the job is requeued
new job
1, 16, 17: failed for good                 the job ends with that, and is not requeued
nothing, because it was killed             the job is requeued
=========================================  =============================================================

Slurm keeps id, options and priority of a requeued job. A job that has ended before it was requeued counts as
completed, and never comes back; so this process waits until Slurm ends it. Slurm changes the list of excluded nodes of
a pending job only. This one is pending as soon as Slurm has agreed to requeue it, and its processes live for some time
after that.
"""

from __future__ import annotations

import argparse
import os
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
from datetime import datetime
from pathlib import Path
from types import FrameType

from lightning_resilience.launch.budget import Event
from lightning_resilience.launch.chain import (
    Slice,
    Then,
    current_chain,
    nodes_to_exclude,
    slices_of,
    why_it_must_end,
)
from lightning_resilience.launch.cli import launch_settings
from lightning_resilience.launch.output import introduce, say
from lightning_resilience.launch.slurm import (
    SlurmInfo,
    get_slurm_info,
    lost_nodes,
    node_names,
    run_slurm,
    show_job,
    usable_nodes,
)
from lightning_resilience.launch.slurm_script import seconds_of
from lightning_resilience.launch.status import compact, progress_line
from lightning_resilience.run.events import AllocationEnd, AllocationStart, ExclusionFailed
from lightning_resilience.run.ledger import Ledger
from lightning_resilience.run.run_directory import RunDirectory
from lightning_resilience.signals import EXIT_INTERRUPTED

COMMENT_EVERY_S = 30.0
"""squeue shows the comment; Slurm's controller serves everybody, and is asked no more often than this."""

_POLL_S = 1.0
_ASK_AGAIN_S = 10.0
_ASK_FOR_S = 600.0
_EXCLUDE_TRIES = 10
_COMMENT_LENGTH = 400
_LIMIT_IS_NEAR_S = 90.0  # Slurm looks at time limits only now and then: it warns up to 60 s too early
_EXIT_USAGE = 2  # argparse's
PORTS = range(20000, 32000)  # below those that Linux gives to connections


@dataclass(frozen=True)
class End:
    """How a slice has ended, and what follows.

    Args:
        how: In a few words, for a table.
        then: What follows.
        exit_code: That of the job, if it ends.
        reason: The same in a sentence.
    """

    how: str
    then: Then
    exit_code: int
    reason: str


class Comment:
    """The job's comment, which ``squeue -o %k`` shows. Nothing depends on whether it can be set.

    Args:
        job_id: The job's.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._shown = ""
        self._due = 0.0

    @property
    def is_due(self) -> bool:
        """Whether enough time has passed."""
        return time.monotonic() >= self._due

    def show(self, text: str, now: bool = False) -> None:
        """Sets it, if it says something new and some time has passed.

        Args:
            text: What it shall say.
            now: Do not wait for that time: it is the last word.
        """
        text = " ".join(text.split())[:_COMMENT_LENGTH]
        if not (self.is_due or now):
            return
        self._due = time.monotonic() + COMMENT_EVERY_S
        if text == self._shown:
            return
        self._shown = text
        run_slurm("scontrol", "update", f"JobId={self._job_id}", f"Comment={text}")


class BatchStep:
    """One slice.

    Args:
        slurm: The job.
        run_dir: The run directory.
        arguments: Those of ``launch``, without what only the job knows: nodes and where they meet.
        max_requeues: How often the job may be requeued.
        lead_s: How long before the time limit Slurm sends SIGTERM, at least.
    """

    def __init__(
        self, slurm: SlurmInfo, run_dir: Path, arguments: Sequence[str], max_requeues: int, lead_s: float
    ) -> None:
        self.slurm = slurm
        self.arguments = list(arguments)
        self.max_requeues = max_requeues
        self.lead_s = lead_s
        self._ledger = Ledger(RunDirectory(run_dir).ledger, rank=None)
        self._comment = Comment(slurm.job_id)
        self._terms = 0
        self._has_run = False

    def run(self) -> int:
        """Runs the slice and returns the exit code of the job, unless Slurm ends this process before."""
        # These are for the steps. Handlers, because what is ignored would be ignored by srun too.
        signal.signal(signal.SIGTERM, self._on_term)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda signum, frame: None)
        try:
            return self._run()
        except OSError as error:
            return self._without_ledger(f"this slice cannot go on: {error}")

    def _run(self) -> int:
        before = slices_of(self._events())
        if (other := self._other_job(before)) is not None:
            refusal = f"job {other} is at work in {self._ledger.path.parent}; cancel one of the two"
            say(f"Refused: {refusal}.")  # and nothing is recorded: the slice there is the other one's
            self._comment.show(refusal, now=True)
            return 1
        if reason := self._why_not(before):
            return self._end(End("not started", "end", 1, reason))
        try:
            launch_settings(self.arguments)
        except SystemExit:
            reason = "launch has refused its command line; see the output above"
            return self._end(End("refused", "end", _EXIT_USAGE, reason))
        nodes = node_names(self.slurm.node_list or "")
        self._ledger.record(
            AllocationStart(slurm_job_id=self.slurm.job_id, restart_count=self.slurm.restart_count, node_list=nodes)
        )
        if len(slices_of(self._events())) == len(before):
            # What is not recorded is not counted: there would be no end of it.
            return self._without_ledger(f"{self._ledger.path} cannot be written")
        command = self.command()
        say(f"Slice {len(before) + 1} on {', '.join(nodes) or self.slurm.node_list}.")
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=_environment())
        self._has_run = True
        while (exit_code := process.poll()) is None:
            self._show_progress()
            time.sleep(_POLL_S)
        job = show_job(self.slurm.job_id)
        # Not by their number: what another node has recorded before may have turned up meanwhile.
        events = self._events()
        begun = [index for index, event in enumerate(events) if event["event"] == "slice_start"]
        end = self._how_it_ended(exit_code, events[begun[-1] :] if begun else [], job)
        if end.then == "requeue" and self._is_cancelled(job):
            end = End("cancelled", "end", EXIT_INTERRUPTED, "the job was cancelled")
        return self._follow(end)

    def command(self) -> list[str]:
        """The command that starts ``launch`` on every node."""
        nodes = self.slurm.num_nodes or 1
        # No node is ended because another one has: the launches tell each other. Each may use all cores of the job.
        command = ["srun", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--label", "--cpu-bind=none"]
        command += [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        command += [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", f"--nnodes={nodes}"]
        if nodes > 1:
            command += ["--node-rank=slurm", f"--rdzv-endpoint={_this_node()}:{_free_port()}"]
        return [*command, "--retries-in-new-job", *self.arguments]

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        self._terms += 1

    def _events(self) -> list[Event]:
        return self._ledger.events()

    def _other_job(self, before: Sequence[Slice]) -> str | None:
        """Another job that works in this run directory now."""
        last = before[-1].job_id if before and before[-1].ended is None else None
        if last in (None, self.slurm.job_id):
            return None
        return last if show_job(str(last)).get("JobState") in ("RUNNING", "COMPLETING", "SUSPENDED") else None

    def _why_not(self, before: Sequence[Slice]) -> str | None:
        """Why this slice must not begin: those that Slurm has requeued itself have not been asked at their end."""
        chain = current_chain(before)
        if not chain or chain[-1].then == "end" or chain[-1].job_id != self.slurm.job_id:
            return None
        return why_it_must_end(chain, 0, self.max_requeues)

    def _without_ledger(self, reason: str) -> int:
        """Ends the job before anything has run: a mistake. Later a node has lost the storage, another may have it."""
        if (self._has_run or self.slurm.restart_count > 0) and self.slurm.restart_count < self.max_requeues:
            return self._requeue(End("storage lost", "requeue", 1, reason), [], [])
        say(f"The job ends with 1: {reason}.")
        self._comment.show(reason, now=True)
        return 1

    def _show_progress(self) -> None:
        if self._comment.is_due:
            with suppress(Exception):  # a comment is not worth the run
                self._comment.show(progress_line(self._events()))

    def _how_it_ended(self, srun_exit_code: int, events: Sequence[Event], job: dict[str, str]) -> End:
        exits = [event for event in events if event["event"] == "exit"]
        if not exits:
            if refusals := [event for event in events if event["event"] == "refused"]:
                return End("refused", "end", 1, str(refusals[-1].get("reason")))
            reason = f"the launch was lost, and has recorded nothing (srun ended with {srun_exit_code})"
            return End("launch lost", "requeue", 1, reason)
        reason, exit_code = str(exits[-1].get("reason")), exits[-1].get("exit_code")
        if not isinstance(exit_code, int):
            exit_code = 1
        if exit_code == 0:
            return End("finished", "end", 0, reason)
        if exit_code != EXIT_INTERRUPTED:
            return End(f"failed, exit code {exit_code}", "end", exit_code, reason)
        if exits[-1].get("new_job"):
            return End("failed", "requeue", 1, reason)
        return End(self._who_has_stopped_it(job), "requeue", 1, reason)

    def _is_cancelled(self, job: dict[str, str]) -> bool:
        """Whether a person has cancelled the job. It must not come back, and Slurm would requeue it if it was asked.

        While its processes are still there, Slurm says of every job that it ends only that it is completing.
        """
        if job.get("JobState") != "COMPLETING" or self._is_requeued(job) or _time_of(job.get("PreemptTime")):
            return job.get("JobState", "").startswith("CANCELLED")
        return not _has_reached_its_limit(job)

    def _is_requeued(self, job: dict[str, str]) -> bool:
        """Whether Slurm has requeued the job meanwhile: because a node is lost, or because a person wants it."""
        return job.get("Restarts", "").isdecimal() and int(job["Restarts"]) > self.slurm.restart_count

    def _who_has_stopped_it(self, job: dict[str, str]) -> str:
        if lost := lost_nodes(self.slurm.node_list or ""):
            return f"{compact(lost)} lost"
        if self._is_requeued(job):
            return "requeued by Slurm"
        if _time_of(job.get("PreemptTime")) is not None:
            return "preempted"
        limit = _time_of(job.get("EndTime"))
        is_near = limit is not None and time.time() > limit - self.lead_s - _LIMIT_IS_NEAR_S
        return "time limit" if is_near else "told to stop"

    def _follow(self, end: End) -> int:
        """Does what follows, and returns the exit code of the job, unless Slurm ends this process before."""
        slices = slices_of(self._events())
        if not slices:
            raise OSError(f"{self._ledger.path} has lost what was in it")
        excluded = slices[-1].excluded
        if end.then == "requeue":
            stop = why_it_must_end(current_chain(slices), self.slurm.restart_count, self.max_requeues)
            if stop is not None:
                end = End(end.how, "end", 1, f"{stop}; the last one: {end.reason}")
            elif slices[-1].suspects:
                excluded = nodes_to_exclude(slices[-1], self._usable_nodes(excluded))
        if end.then == "end":
            return self._end(end)
        self._ledger.record(AllocationEnd(how=end.how, then="requeue", reason=end.reason, excluded=list(excluded)))
        self._comment.show(f"{progress_line(self._events())}; {end.how}, requeued", now=True)
        return self._requeue(end, slices[-1].excluded, excluded)

    def _usable_nodes(self, excluded: Sequence[str]) -> int | None:
        """How many nodes the job could be given, without those that its user excludes; ``None``: that is unknown."""
        job = show_job(self.slurm.job_id)
        kept, usable = _nodes_in(job, "ExcNodeList"), usable_nodes(self.slurm.partition or "")
        is_picky = any(job.get(field, "(null)") != "(null)" for field in ("ReqNodeList", "Features"))
        if usable is None or kept is None or is_picky:
            return None
        return len(set(usable) - (set(kept) - set(excluded)))

    def _end(self, end: End) -> int:
        self._ledger.record(AllocationEnd(how=end.how, then="end", exit_code=end.exit_code, reason=end.reason))
        self._comment.show(f"{end.how}: {end.reason}" if end.exit_code else f"finished: {end.reason}", now=True)
        say(f"The job ends with {end.exit_code} ({end.how}): {end.reason}.")
        return end.exit_code

    def _requeue(self, end: End, before: Sequence[str], excluded: Sequence[str]) -> int:
        """Requeues the job, which has excluded the nodes ``before`` so far, beside those that its user excludes."""
        is_new = list(excluded) != list(before)
        without = f", without {', '.join(excluded)}" if is_new else ""
        say(f"Requeuing the job{without} ({end.how}): {end.reason}.")
        deadline = time.monotonic() + _ASK_FOR_S
        job_id = self.slurm.job_id
        kept = _nodes_in(show_job(job_id), "ExcNodeList")
        while not self._is_requeued(job := show_job(job_id)):
            if self._is_cancelled(job):
                return self._end(End("cancelled", "end", EXIT_INTERRUPTED, "the job was cancelled"))
            self._terms = 0
            asked = run_slurm("scontrol", "requeue", job_id)
            if asked.returncode == 0:
                break
            if time.monotonic() > deadline:
                reason = f"the job could not be requeued ({asked.stderr.strip()}); submit it again, and it goes on"
                return self._end(End(end.how, "end", EXIT_INTERRUPTED, reason))
            self._wait_for_term(min(deadline, time.monotonic() + _ASK_AGAIN_S))  # it may have ended scontrol, too
        if is_new and kept is not None:  # else its user's own would be forgotten
            self._exclude([*(node for node in kept if node not in before), *excluded])
        self._wait_for_term(deadline)  # Slurm's, which has taken the job back
        return EXIT_INTERRUPTED

    def _wait_for_term(self, deadline: float) -> None:
        while not self._terms and time.monotonic() < deadline:
            time.sleep(0.1)

    def _exclude(self, nodes: Sequence[str]) -> None:
        """Says which nodes the job must not get, which is pending by now."""
        update = ("scontrol", "update", f"JobId={self.slurm.job_id}", f"ExcNodeList={','.join(nodes)}")
        for _ in range(_EXCLUDE_TRIES):  # the SIGTERM that takes the job back may end scontrol, too
            asked = run_slurm(*update)
            if asked.returncode == 0:
                return
            time.sleep(0.2)
        say(f"Slurm does not exclude {', '.join(nodes)}: {asked.stderr.strip()}")
        self._ledger.record(ExclusionFailed(node_list=list(nodes), reason=asked.stderr.strip()))


def _nodes_in(job: dict[str, str], field: str) -> list[str] | None:
    """The nodes in a field of what scontrol shows of a job; ``None``: it cannot be told."""
    listed = job.get(field)
    if listed == "(null)":
        return []
    return (node_names(listed) or None) if listed else None


def _this_node() -> str:
    """A name by which the other nodes find this one, on which the batch script runs: the first."""
    name = os.environ.get("SLURMD_NODENAME", "")
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return platform.node()
    return name if name else platform.node()


def _free_port() -> int:
    """A port that nothing on this node listens on now."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no free port among {PORTS.start} to {PORTS.stop - 1} on {platform.node()}")


def _environment() -> dict[str, str]:
    """That of srun, which since Slurm 22.05 must be told how many cores the job's tasks have."""
    cores = os.environ.get("SLURM_CPUS_PER_TASK")
    return os.environ | ({"SRUN_CPUS_PER_TASK": cores} if cores else {})


def _has_reached_its_limit(job: dict[str, str]) -> bool:
    began, ended = _time_of(job.get("StartTime")), _time_of(job.get("EndTime"))
    try:
        limit = seconds_of(job.get("TimeLimit", ""))
    except ValueError:
        return False
    return began is not None and ended is not None and limit is not None and ended - began >= limit


def _time_of(text: str | None) -> float | None:
    """A time as scontrol writes it, in seconds since the epoch; ``None`` for Unknown, None and the like."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return None


def main(arguments: Sequence[str] | None = None) -> None:
    """The program of the batch step.

    Args:
        arguments: The command line; default: this process's.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_resilience.launch.slurm_job",
        description="Runs one slice of a run in a Slurm batch job. lightning-resilience slurm makes the script for it.",
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="as launch's")
    parser.add_argument("--max-requeues", type=int, default=100, help="how often the job may be requeued")
    parser.add_argument("--lead", type=float, default=60.0, help="seconds from SIGTERM to the time limit, at least")
    parser.add_argument("launch", nargs=argparse.REMAINDER, metavar="-- ...", help="the arguments of launch")
    options = parser.parse_args(arguments)
    slurm = get_slurm_info()
    if slurm is None:
        parser.error("this is no Slurm job; submit the script that lightning-resilience slurm makes with sbatch")
    launch = options.launch[1:] if options.launch[:1] == ["--"] else options.launch
    step = BatchStep(
        slurm, options.run_dir, [f"--run-dir={options.run_dir}", *launch], options.max_requeues, options.lead
    )
    introduce("slurm")
    sys.exit(step.run())


if __name__ == "__main__":
    main()
