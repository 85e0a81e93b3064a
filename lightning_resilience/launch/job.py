"""One launch: starts the workers, reads how they ended, and decides what follows, until the run or its budget ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Literal

from lightning_resilience import _nvrx, signals
from lightning_resilience._files import Patience, read_json
from lightning_resilience._output import log_line, write_line
from lightning_resilience._processes import process_age
from lightning_resilience.detect.hangs.abandoned import remove_abandoned
from lightning_resilience.detect.hangs.timeouts import SECTION_TIMEOUTS_VARIABLE, SectionTimeouts
from lightning_resilience.launch import budget
from lightning_resilience.launch.budget import Budget
from lightning_resilience.launch.monitor import Monitor, MonitorSettings
from lightning_resilience.launch.naming import last_launch
from lightning_resilience.launch.nodes import BOARD, AnotherLaunch, Board, FirstNodeMissing, Plan, is_this_host
from lightning_resilience.launch.processes import LAUNCH_ID_VARIABLE, STOP_SIGNALS, Reaper, end_processes
from lightning_resilience.launch.rank_logs import LOGS
from lightning_resilience.launch.rank_output import OUTPUT_VARIABLE
from lightning_resilience.launch.record import InUse, LaunchRecord, Record, Spares, TakenOver, records
from lightning_resilience.launch.relay import Relay
from lightning_resilience.launch.schedulers import current_scheduler
from lightning_resilience.launch.spares import SPARES_VARIABLE
from lightning_resilience.launch.temporary import launch_folder
from lightning_resilience.launch.worker import (
    FIRST_LAUNCH_VARIABLE,
    JOB_ATTEMPT_VARIABLE,
    RESTARTS_SPENT,
)
from lightning_resilience.recipes import RECIPE_VARIABLE
from lightning_resilience.run import deadlines, exit_codes
from lightning_resilience.run.events import (
    FitInterrupted,
    GiveUp,
    JobFailed,
    JobStart,
    LauncherKilled,
    LaunchExit,
    LaunchStart,
    NodesExcluded,
    RunRefused,
    SignalReceived,
    WorkersStart,
)
from lightning_resilience.run.failures import cause_of_end
from lightning_resilience.run.history import History, LiveHistory, troubles
from lightning_resilience.run.ledger import Ledger, node_name
from lightning_resilience.run.run_directory import (
    LAUNCHED,
    LOCAL_DIR_VARIABLE,
    NOT_SHOWN,
    REPLACES_STRAGGLERS_VARIABLE,
    RUN_DIR_VARIABLE,
    Outcome,
    RunDirectory,
)
from lightning_resilience.run.settings import (
    CONTINUE_VARIABLE,
    GLOBAL_BATCH_VARIABLE,
    READ_AGAIN_VARIABLE,
    Change,
    changes,
    describe_changes,
    digests_of_files,
    identity_of_command,
    is_another_run,
    settings_of_command,
)
from lightning_resilience.run.wandb_runs import RUN_ID_VARIABLE, wandb_run_id

_POLL_S = 0.1


@dataclass(frozen=True)
class LaunchSettings:
    """The settings from the command line of ``launch``.

    Args:
        command: The script with its arguments, or ``-m``, a module and its arguments.
        run_dir: The run directory, the identity of the run.
        recipe: Name of the recipe whose callbacks the workers get.
        nproc_per_node: Workers for each node: a number or ``auto``.
        nnodes: Nodes: a number or ``MIN:MAX``.
        node_rank: The number of this node, if that is fixed.
        spare: Whether this node only waits until it replaces an excluded node.
        rdzv_endpoint: ``HOST:PORT`` of the rendezvous; needed with several nodes.
        budget: How often the run may fail.
        grace_period_s: How long the workers have to save and end when they are told to.
        section_timeouts: How long a worker may take in each section of the run until it counts as hung.
        makes_spares: Whether processes wait to replace workers at a restart inside the job.
        local_dir: Where every node keeps its local checkpoints; ``None``: in node memory.
        is_default_run_dir: Whether the command line has named no run directory.
        continue_anyway: Whether a run that has finished with other arguments is continued.
        retries_in_new_job: Whether to end as interrupted where the job must be retried or a node must be avoided. The
            scheduler or program that started this launch then starts a new job for it, perhaps on other nodes.
        monitoring: The settings for monitoring.
        elastic: Whether a lost rank is replaced while the other ranks keep their processes.
        when_lost: With ``elastic``, whether the other ranks wait for a replacement for which no spare is ready.
        min_ranks: With ``go_on``, the least number of ranks with which the run continues. It also needs the ranks of
            MIN nodes of ``nnodes``.
        replaces_stragglers: With ``elastic``, whether slow ranks are replaced.
        global_batch: What happens to the batches of absent ranks, see :data:`.GLOBAL_BATCHES`; ``None``: as the
            environment defines it.
        read_again: Whether data of an epoch are read again, see :data:`.READS_AGAIN`; ``None``: as the environment
            defines it.
    """

    command: list[str]
    run_dir: Path
    recipe: str = "nemo"
    nproc_per_node: str = "auto"
    nnodes: str = "1"
    node_rank: int | None = None
    spare: bool = False
    rdzv_endpoint: str | None = None
    budget: Budget = field(default_factory=Budget)
    grace_period_s: float = deadlines.DEFAULT_GRACE_PERIOD_S
    section_timeouts: SectionTimeouts = field(default_factory=SectionTimeouts)
    makes_spares: bool = True
    local_dir: Path | None = None
    is_default_run_dir: bool = False
    continue_anyway: bool = False
    retries_in_new_job: bool = False
    monitoring: MonitorSettings = field(default_factory=MonitorSettings)
    elastic: bool = False
    when_lost: Literal["hold", "go_on"] = "hold"
    min_ranks: int = 1
    replaces_stragglers: bool = False
    global_batch: str | None = None
    read_again: str | None = None

    @property
    def is_single_node(self) -> bool:
        """Whether this node is the whole job."""
        return self.nnodes in ("1", "1:1")

    @property
    def is_owner(self) -> bool:
        """Whether this node decides for the run: it hosts the rendezvous."""
        if self.spare:
            return False
        if self.is_single_node or self.node_rank is not None:
            return not self.node_rank
        return self.rdzv_endpoint is not None and is_this_host(self.rdzv_endpoint.rpartition(":")[0].strip("[]"))


Starter = Callable[[LaunchSettings, str, int], tuple[list[str], dict[str, str]]]
"""Makes the command that runs the workers under a given rendezvous id with a given number of restarts, and the
environment variables that this command needs."""


def elastic_command(
    settings: LaunchSettings, run_id: str, max_restarts: int, is_preview: bool = False
) -> tuple[list[str], dict[str, str]]:
    """The command that runs the workers: the supervisor's (``elastic``), NVRx's launcher, or torch's without NVRx."""
    if settings.elastic:
        command = [
            *(sys.executable, "-m", "lightning_resilience.launch.elastic"),
            f"--nproc-per-node={settings.nproc_per_node}",
            f"--max-restarts={max_restarts}",
            f"--term-timeout={settings.grace_period_s + deadlines.TERM_MARGIN_S:g}",
        ]
        if not settings.is_single_node:
            command += [f"--nnodes={settings.nnodes.rpartition(':')[2]}", f"--rdzv-endpoint={settings.rdzv_endpoint}"]
            command += [] if settings.is_owner else ["--follow"]
            command += [] if settings.node_rank is None else [f"--node-rank={settings.node_rank}"]
        if settings.when_lost == "go_on":
            command += ["--when-lost=go_on", f"--min-ranks={settings.min_ranks}"]
            command += [] if settings.is_single_node else [f"--min-nodes={settings.nnodes.partition(':')[0]}"]
        return [*command, "--", *settings.command], {_nvrx.RUN_ID_VARIABLE: run_id}
    command, environment = _nvrx.elastic_launcher(
        max_restarts,
        settings.grace_period_s + deadlines.TERM_MARGIN_S,
        settings.section_timeouts.by_section(),
        settings.run_dir,
        _nvrx.installed_version(),
        is_preview,
    )
    command += [f"--nnodes={settings.nnodes}", f"--nproc-per-node={settings.nproc_per_node}", "--rdzv-backend=c10d"]
    environment |= {_nvrx.RUN_ID_VARIABLE: run_id}
    if settings.node_rank is not None:
        command += [f"--node-rank={settings.node_rank}"]
    if settings.is_single_node:  # no other node must reach it, and the host's name need not resolve
        command += [f"--rdzv-endpoint={_nvrx.LOOPBACK}", "--local-addr=127.0.0.1"]
    else:
        command += [f"--rdzv-endpoint={settings.rdzv_endpoint}"]
        command += [f"--rdzv-conf=is_host={int(settings.is_owner)}"]  # so that the others depend on one node only
    return [*command, "-m", "lightning_resilience.launch.worker", *settings.command], environment


class Refused(Exception):
    """The launch cannot begin.

    Args:
        reason: Why it cannot begin.
        then: What to do about it.
    """

    def __init__(self, reason: str, then: str) -> None:
        super().__init__(f"{reason}; {then}")
        self.reason = reason


@dataclass(frozen=True)
class Preview:
    """What a launch would do if it began now.

    Attributes:
        refusal: Why it would be refused; ``None``: it would not be.
        finished: How the run has finished, if there is nothing to do.
        decision: What the budget allows.
        history: What has happened so far.
        changes: What differs from the last start.
        watched: The launch on another host whose record this launch would watch first.
        command: The command line of the elastic launcher.
        environment: The variables for its processes, except ids that are made at the start.
    """

    refusal: str | None
    finished: Outcome | None
    decision: budget.Decision
    history: History
    changes: str
    watched: Record | None
    command: list[str]
    environment: dict[str, str]


_MADE_AT_START = (LAUNCH_ID_VARIABLE, FIRST_LAUNCH_VARIABLE, _nvrx.RUN_ID_VARIABLE)


class _StopRequest:
    """Records the signals by which a person or a scheduler asks the launch to stop."""

    def __init__(self) -> None:
        self.signum: signal.Signals | None = None
        self.now = False
        self._at = 0.0
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum, self._at = signal.Signals(signum), time.monotonic()
        elif time.monotonic() - self._at >= deadlines.SECOND_SIGNAL_AFTER_S:  # otherwise the same one, delivered twice
            self.now = True

    def __bool__(self) -> bool:
        return self.signum is not None


class Launch:
    """One call of ``lightning-resilience launch``.

    Args:
        settings: What to run and how.
        starter: Makes the command that runs the workers.
    """

    def __init__(self, settings: LaunchSettings, starter: Starter = elastic_command) -> None:
        self.settings = settings
        self.launch_id = uuid.uuid4().hex
        self._starter = starter
        self._run_directory = RunDirectory(settings.run_dir)
        self._ledger = Ledger(self._run_directory.ledger, rank=None)
        self._history = LiveHistory(self._ledger)
        self._board = Board(self._run_directory.path / BOARD, self.launch_id, settings.rdzv_endpoint or "")
        self._launches = self._run_directory.path / "launches"
        node = f"spare-{self.launch_id[:8]}" if settings.spare else str(settings.node_rank)
        self._record = LaunchRecord(
            self._launches, self.launch_id, None if settings.is_owner else node, is_spare=settings.spare
        )
        self._nnodes = settings.nnodes  # without excluded nodes
        self._excluded: list[str] = []
        self._kept: set[str] = set()
        self._workers_run = False
        self._has_said_blind = False
        self._replacements: dict[str, str] = {}  # launch ids of spares that have a place, and their nodes
        self._spares = Spares(self._launches)
        self._waits_because = ""
        self._folder: Path | None = None  # for files that are removed with this launch
        self._is_resumed = False
        self._over_since: float | None = None  # when this node saw that the first node has ended the run

    def run(self) -> int:
        """Runs to the end and returns the exit code: 0 finished, 75 interrupted, 1 failed, or the code of a verdict.

        Raises:
            Refused: If the run directory is in use.
        """
        self._stop = _StopRequest()
        self._identity = Patience()(self._run_directory.identity)  # first: detects a copied run directory
        try:
            if not self._register():
                log_line(f"Interrupted: nothing was started (exit code {exit_codes.INTERRUPTED})")
                return exit_codes.INTERRUPTED
            reaper = Reaper(self.launch_id)
            with launch_folder() as self._folder:
                try:
                    return self._own() if self.settings.is_owner else self._follow()
                finally:
                    end_processes(self.launch_id, deadlines.LEFTOVERS_PATIENCE_S)
                    reaper.dismiss()
        except Refused as refused:
            self._ledger.record(RunRefused(reason=refused.reason))
            raise
        except TakenOver as lost:
            # Not even an exit is recorded: the ledger and the run directory belong to the other launch now.
            self._ledger.record(RunRefused(reason=str(lost)))
            log_line(f"Ended: {lost}; this launch has ended its workers (exit code 1)")
            return 1
        finally:
            self._record.release()

    def preview(self) -> Preview:
        """What :meth:`run` would do now. This method writes, starts and waits for nothing."""
        history = self._now()
        if self._launch_was_killed(history):
            history = History([*history.events, LauncherKilled(time=time.time())])
        decision = self.settings.budget.decide(history, time.time())
        record = read_json(self._run_directory.path / "run.json") or {}
        self._identity = str(record.get("id", ""))
        refusal, finished = None, None
        try:
            finished = self._finished_before()
            if (holder := self._record.held_by) is not None and holder.is_here:
                raise self._in_use(f"{holder} runs {self._run_directory.path} already")
            self._check_run_directory()
        except Refused as refused:
            refusal = str(refused)
        self._is_resumed = self._asks_for_nothing_new()
        plan = self._plan("", decision)
        command, environment = elastic_command(self.settings, "", decision.max_restarts, is_preview=True)
        environment |= self._environment(plan)
        if self._identity:
            environment |= {name: os.environ.get(name, value) for name, value in self._defaults().items()}
        found, edited = self._changed()
        return Preview(
            refusal,
            finished,
            decision,
            history,
            _describe_all(found, edited),
            holder if refusal is None else None,
            command,
            {name: value for name, value in environment.items() if name not in _MADE_AT_START},
        )

    # The first node, which decides

    def _own(self) -> int:
        if (outcome := self._finished_before()) is not None:
            log_line(
                f"The run in {self._run_directory.path} has finished already ({outcome.reason}); nothing to do. To "
                "train further, raise its limit (max_epochs, max_steps, max_time); --fresh begins a new run beside it."
            )
            return self._end(Outcome("finished", "it had finished already"))
        self._describe()
        settings, run, stop = self.settings, self._run_directory, self._stop
        with Monitor(
            settings.monitoring, run, self._identity, self.launch_id, settings.budget, lambda: stop, lambda: stop.now
        ):
            return self._start_until_over()

    def _start_until_over(self) -> int:
        while True:
            decision = self._decide()
            if decision.action == "give_up":
                self._ledger.record(GiveUp(reason=decision.reason))
                said = self._run_directory.outcome
                is_verdict = said is not None and said.details.get("exit_code") == exit_codes.TRY_ELSEWHERE
                details = {"exit_code": exit_codes.TRY_ELSEWHERE} if is_verdict else {}
                last = self._now().last(JobFailed)
                after = "" if last is None else f"; last failure: {last.reason}"
                return self._end(Outcome("failed", decision.reason + after, details=details))
            run_id = uuid.uuid4().hex[:12]
            self._ledger.record(
                JobStart(
                    retry=decision.action == "retry",
                    job_attempt=decision.job_attempt,
                    run_id=run_id,
                    max_restarts=decision.max_restarts,
                    reason=decision.reason,
                )
            )
            if not any(event.run_id == run_id for event in self._now().of(JobStart)):
                # Failures that are not recorded are not counted: the restarts would never end.
                return self._end(Outcome("failed", f"the ledger {self._ledger.path} cannot be written"))
            plan = self._plan(run_id, decision)
            if not self.settings.is_single_node:
                self._board.publish(plan)
            exit_code = self._run_workers(plan, self._watch_nodes)
            if exit_code != 0 and self._has_stopped(run_id):
                exit_code = 0  # it was this launch that ended its elastic launcher
            if exit_code == 0 and not self.settings.is_single_node and not self.settings.elastic:
                exit_code = self._wait_for_nodes(run_id)
            outcome = self._verdict(exit_code, run_id)
            if outcome.status != "failed":
                return self._end(outcome)
            self._ledger.record(JobFailed(run_id=run_id, exit_code=exit_code, reason=outcome.reason))
            following = self._decide()
            if (reason := self._why_in_a_new_job(following, run_id)) is not None:
                return self._end(Outcome("interrupted", f"{reason} ({outcome.reason})", details={"new_job": True}))
            if following.action != "give_up":
                log_line(f"Failed: {outcome.reason}. Next: {following.reason}.")
                self._exclude(run_id)

    def _plan(self, run_id: str, decision: budget.Decision) -> Plan:
        """What this launch publishes to all nodes."""
        return Plan(
            owner=self.launch_id,
            run_id=run_id,
            max_restarts=decision.max_restarts,
            job_attempt=decision.job_attempt,
            nnodes=self._nnodes,
            endpoint=self.settings.rdzv_endpoint or "",
            node=node_name(),
            excluded=self._excluded,
            replacements=list(self._replacements),
            spares=sorted(self._waiting().values()),
            ends_for_new_job=self.settings.retries_in_new_job,
        )

    def _waiting(self) -> dict[str, str]:
        """The spares that have no place yet: their launch ids and nodes."""
        if self.settings.is_single_node:
            return {}
        return {launch: node for launch, node in self._spares.look().items() if launch not in self._replacements}

    def _nodes_to_exclude(self, run_id: str) -> list[str]:
        """The nodes that a rank has asked to exclude and that can be excluded. Logs those that cannot."""
        able: list[str] = []
        count = self._count_nodes(run_id)
        plan = self._plan(run_id, budget.Decision("start", 0, 0, ""))
        for node in self._nodes_to_avoid(run_id):
            if (reason := plan.why_not_excluded([*able, node], count)) is None:
                able.append(node)
                continue
            self._kept.add(node)
            log_line(f"Keeping node {node}, which a rank asked to exclude: {reason}.")
        return able

    def _exclude(self, run_id: str) -> None:
        """Replaces nodes by spares, or continues with fewer nodes."""
        for node in self._nodes_to_exclude(run_id):
            self._excluded = [*self._excluded, node]
            if waiting := self._waiting():
                launch, name = min(waiting.items())
                self._replacements[launch] = name
                then = f"spare {name} replaces it"
            elif ":" not in self._nnodes:  # the spare has gone since it was counted on
                self._kept.add(node)
                continue
            else:
                least, _, most = self._nnodes.partition(":")
                self._nnodes = f"{least}:{int(most) - 1}"
                then = "the run continues with fewer nodes"
            log_line(f"Excluding node {node}: {then}.")
            self._ledger.record(NodesExcluded(excluded=[node], reason=then))

    def _count_nodes(self, run_id: str) -> int:
        """On how many nodes the workers have started."""
        starts = [start for start in self._now().of(WorkersStart) if start.elastic_run_id == run_id]
        return starts[-1].nodes or 1 if starts else int(self._nnodes.rpartition(":")[2])

    def _why_in_a_new_job(self, following: budget.Decision, run_id: str) -> str | None:
        """Why the workers must be started again in a new job; ``None``: they are started in this one, or not at all."""
        if not self.settings.retries_in_new_job or following.action == "give_up":
            return None
        if following.action == "retry":
            return f"retry {following.job_attempt} of {self.settings.budget.job_retries} in a new job"
        nodes = self._nodes_to_avoid(run_id)
        return f"to be started again in a new job, without {', '.join(nodes)}" if nodes else None

    def _nodes_to_avoid(self, run_id: str) -> list[str]:
        """The nodes that one of their ranks has asked to exclude since these workers were started."""
        if self.settings.is_single_node:
            return []  # there is no other node to compare it to
        return sorted(self._now().nodes_to_avoid(run_id) - {*self._excluded, *self._kept})

    def _finished_before(self) -> Outcome | None:
        """The outcome, if the whole run has finished and this command asks for nothing else.

        Raises:
            Refused: If this command asks for a different run.
        """
        if (outcome := self._finished()) is None:
            return None
        found, edited = self._changed()
        if not found:
            return None if edited else outcome
        if is_another_run(found) and not self.settings.continue_anyway:
            raise Refused(
                f"the run in {self._run_directory.path} has finished with other arguments: {describe_changes(found)}",
                "give this command another --run-dir, or --fresh for a new run beside the old one; --continue-anyway "
                "runs the script again in the same run directory, where finished fits stay as they are",
            )
        return None

    def _changed(self) -> tuple[list[Change], list[str]]:
        """The arguments that differ from the last start, and the files of the command that were edited since."""
        last = self._now().last(LaunchStart)
        if last is None or last.command is None:
            return [], []
        found = changes(settings_of_command(last.command), settings_of_command(self.settings.command))
        before = last.files or {}
        now = digests_of_files(self.settings.command)
        return found, [name for name, digest in now.items() if before.get(name, digest) != digest]

    def _finished(self) -> Outcome | None:
        outcome = self._run_directory.outcome
        if outcome is None or outcome.status != "finished":
            return None
        if not self._now().is_finished:
            return None  # rank 0 had finished, but not every rank
        fits = [fit.outcome for fit in self._run_directory.fits]
        return outcome if all(fit is not None and fit.status == "finished" for fit in fits) else None

    def _asks_for_nothing_new(self) -> bool:
        """Whether this is the same command again, for example started by a scheduler."""
        return bool(self._now().events) and not (any(self._changed()) or self._finished())

    def _launch_was_killed(self, history: History) -> bool:
        """Whether the last launch has not recorded its end."""
        return isinstance(next(iter(history.since(LaunchStart, LaunchExit)), None), LaunchStart)

    def _describe(self) -> None:
        history = self._now()
        events, step = list(history.events), history.safe_step(self._run_directory)  # before this launch
        found, edited = self._changed()
        self._is_resumed = self._asks_for_nothing_new()
        if self._launch_was_killed(history):
            self._ledger.record(LauncherKilled())
        scheduler = current_scheduler()
        self._ledger.record(
            LaunchStart(
                launch_id=self.launch_id,
                began=time.time() - process_age(),
                command=self.settings.command,
                files=digests_of_files(self.settings.command),
                changed=[*map(str, found), *edited] or None,
                recipe=self.settings.recipe,
                nnodes=self.settings.nnodes,
                nproc_per_node=self.settings.nproc_per_node,
                slurm_job_id=scheduler.job_id,
                slurm_restart_count=scheduler.restart_count if scheduler.job_id is not None else None,
                budget=asdict(self.settings.budget),
            )
        )
        safe = "no checkpoint in the run directory yet" if step is None else f"step {step} is safe"
        state = f"continuing, {safe}" if events or self._run_directory.fits else "new run"
        log_line(
            f"Run directory {self._run_directory.path} ({state}). The same command again resumes it.", is_detail=True
        )
        log_line(f"Logs: {self._run_directory.path / LOGS} (lightning-resilience logs shows them).", is_detail=True)
        if found or edited:
            log_line(f"Changed since the last start: {_describe_all(found, edited)}.", is_detail=True)
        with suppress(OSError):  # helps to find a run among many
            (self._run_directory.path / "command.txt").write_text(shlex.join(self.settings.command) + "\n")
        if _nvrx.installed_version() is None:
            log_line(
                "nvidia-resiliency-ext is not installed: torchrun starts the workers, without NVRx's rank monitors.",
                is_detail=True,
            )

    def _verdict(self, exit_code: int, run_id: str) -> Outcome:
        """How the workers ended: the outcome that rank 0 has recorded, unless the exit code contradicts it."""
        said = self._run_directory.outcome
        if said is not None and said.details.get("elastic_run_id") != run_id:
            said = None  # the outcome of earlier workers
        if said is not None and (said.status == "halted" or (said.status == "finished" and exit_code == 0)):
            return said
        if self._stop.signum is not None:
            return Outcome("interrupted", f"the launcher received {self._stop.signum.name}")
        history = self._now()
        is_spent = said is not None and RESTARTS_SPENT in said.details
        if (exit_code != 0 or is_spent) and (reason := history.why_not_again) is not None:
            return Outcome("halted", reason)
        if exit_code == 0 and not is_spent:
            if said is not None and said.status == "interrupted":
                return said
            last_events = history.since(JobStart, WorkersStart)
            if any(isinstance(event, (SignalReceived, FitInterrupted)) for event in last_events):
                return Outcome("interrupted", "the workers were told to stop and ended before they could report more")
            return Outcome(
                "failed",
                "the workers ended with exit code 0 without reporting an outcome; does the script call os._exit?",
            )
        if fault := cause_of_end(history.events, run_id):
            return Outcome("failed", fault)
        if is_spent:
            return Outcome("failed", "a worker was killed")
        how = f"exit code {exit_code}" if exit_code > 0 else signal.Signals(-exit_code).name
        return Outcome("failed", f"a worker was killed, or never started (the elastic launcher ended with {how})")

    def _watch_nodes(self, run_id: str) -> bool:
        """Whether the workers must be ended. Only with several nodes: on one node they end on their own."""
        if self.settings.is_single_node:
            return False
        self._board.beat()
        self._board.note_spares(sorted(self._waiting().values()))
        if ":" not in self._nnodes and any(exit_code != 0 for exit_code in self._other_nodes(run_id)):
            return True  # with a fixed number of nodes the other nodes would wait for that one in vain
        if self._has_stopped(run_id):
            return True  # otherwise this node's elastic launcher would wait five minutes for a stopped node's
        if self._nodes_to_exclude(run_id):
            return True  # its elastic launcher would start the workers on the same nodes
        said = self._run_directory.outcome
        if said is not None and RESTARTS_SPENT in said.details and said.details.get("elastic_run_id") == run_id:
            return True
        return self._now().why_not_again is not None or self._decide().action != "start"

    def _now(self) -> History:
        """What is recorded so far. Right after a fault of a node the storage may fail for a while."""
        return self._history.now() if self._workers_run else Patience()(self._history.now)

    def _decide(self) -> budget.Decision:
        return self.settings.budget.decide(self._now(), time.time())

    def _has_stopped(self, run_id: str) -> bool:
        """Whether the ranks have stopped together and saved, and the other nodes have nothing left to do."""
        said = self._run_directory.outcome
        if said is None or said.status != "interrupted" or said.details.get("elastic_run_id") != run_id:
            return False
        others = self._other_nodes(run_id)
        return self._nnodes == str(len(others) + 1) and len(others) > 0 and not any(others)

    def _wait_for_nodes(self, run_id: str) -> int:
        """The exit code of the other nodes' workers, once they have ended: elastic launchers do not share it."""
        others = self._count_nodes(run_id) - 1
        deadline = time.monotonic() + deadlines.OTHERS_END_WITHIN_S
        while len(ended := self._other_nodes(run_id)) < others and not self._stop:
            if time.monotonic() > deadline:
                log_line(f"Only {len(ended)} of {others} other nodes have reported the end of their workers.")
                return 1
            self._board.beat()
            time.sleep(_POLL_S)
        return next((exit_code for exit_code in ended if exit_code != 0), 0)

    def _other_nodes(self, run_id: str) -> list[int]:
        """The exit codes of the other nodes' elastic launchers that have ended."""
        ends = [record.content.get("ended") or {} for record in records(self._launches)]
        return [int(end["exit_code"]) for end in ends if end.get("run_id") == run_id]

    def _end(self, outcome: Outcome) -> int:
        ends_with = {"finished": exit_codes.FINISHED, "interrupted": exit_codes.INTERRUPTED}
        exit_code = ends_with.get(outcome.status, exit_codes.FAILED)
        if outcome.status in ("halted", "failed") and outcome.details.get("exit_code") in exit_codes.OF_VERDICT:
            exit_code = outcome.details["exit_code"]
        new_job = True if outcome.details.get("new_job") else None
        self._ledger.record(
            LaunchExit(status=outcome.status, exit_code=exit_code, reason=outcome.reason, new_job=new_job)
        )
        if not self.settings.is_single_node:
            self._board.finish(exit_code)
        is_safe = outcome.status == "failed" and self._now().verified_step is not None
        then = {
            "finished": "",
            "interrupted": " Run the same command again to resume.",
            "failed": " Once the cause is removed, the same command "
            + ("resumes from the newest checkpoint." if is_safe else "starts over: nothing was saved yet."),
            "halted": " Trying again would not change this.",
        }
        reason = outcome.reason.removeprefix(f"{outcome.status} ").removesuffix(".")
        if trouble := troubles(self._now().events):
            reason += f" ({trouble})"
        log_line(f"{outcome.status.capitalize()}: {reason}.{then[outcome.status]} (exit code {exit_code})")
        return exit_code

    # The other nodes, which follow

    def _follow(self) -> int:
        if self._finished_before() is not None:
            log_line("The run has finished already; nothing to do.")
            return 0
        try:
            plan = self._board.wait_for(None, deadlines.FIRST_NODE_WITHIN_S, lambda: bool(self._stop))
            while plan is not None and plan.exit_code is None:
                if not self._has_place(plan):
                    plan = self._board.wait_for(plan, deadlines.OWNER_LOST_AFTER_S, lambda: bool(self._stop))
                    continue
                exit_code = self._run_workers(plan, self._is_superseded)
                if self._stop and self.settings.when_lost == "go_on":
                    # Whether or not the other nodes have stopped, too.
                    then = f"The same command joins the run again. (exit code {exit_codes.INTERRUPTED})"
                    log_line(f"Interrupted: {node_name()} was told to stop. {then}")
                    return exit_codes.INTERRUPTED
                self._record.update(ended={"run_id": plan.run_id, "exit_code": exit_code})
                plan = self._board.wait_for(plan, deadlines.OWNER_LOST_AFTER_S, lambda: self._stop.now)
        except AnotherLaunch as other:
            raise Refused(str(other), "wait for it, stop it, or use another --run-dir") from None
        except FirstNodeMissing as missing:
            # Only the first node can report that the run has failed. With a new first node the run continues.
            log_line(f"Interrupted: {missing} (exit code {exit_codes.INTERRUPTED})")
            return exit_codes.INTERRUPTED
        if plan is None or plan.exit_code is None:
            return exit_codes.INTERRUPTED
        log_line(f"The first node ended the run (exit code {plan.exit_code}).")
        return plan.exit_code

    def _has_place(self, plan: Plan) -> bool:
        """Whether this node takes part in the run; if not, it waits."""
        if node_name() in plan.excluded:
            why = f"{node_name()} is excluded from the run. This launch ends when the run does"
        elif self.settings.spare and self.launch_id not in plan.replacements:
            why = f"{node_name()} waits as a spare"
        else:
            why = ""
        if why != self._waits_because:
            self._waits_because = why
            log_line(f"{why or f'{node_name()} replaces an excluded node'}.")
        return not why

    def _is_superseded(self, run_id: str) -> bool:
        plan = self._board.read()
        if plan is None or plan.run_id != run_id:
            return plan is not None
        if plan.exit_code is None:
            return False
        if self._over_since is None:
            self._over_since = time.monotonic()
        return time.monotonic() - self._over_since > deadlines.OTHERS_END_WITHIN_S

    # Every node

    def _register(self) -> bool:
        """Refuses a run directory in use, leaves a record, and ends processes that a killed launch has left here.

        Returns:
            Whether the launch can begin; not if it was told to stop meanwhile.
        """
        try:
            if not self._record.take(lambda: self._stop, log_line):
                return False
        except InUse as in_use:
            raise self._in_use(str(in_use)) from None
        self._check_run_directory()
        for record in records(self._launches):
            if record.is_dead and (count := end_processes(record.launch_id)):
                log_line(f"Terminated {count} remaining processes of a dead launch.", is_detail=True)
            if record.is_dead or self._record.follows(record):
                record.path.unlink(missing_ok=True)
        return True

    def _check_run_directory(self) -> None:
        """Refuses the run directory of another command, and one in which a process trains that no launch started."""
        if self.settings.is_default_run_dir and (other := other_command(self.settings)) is not None:
            raise Refused(*other)
        if (pid := self._run_directory.trained_by(LAUNCHED)) is not None:
            raise self._in_use(
                f"process {pid} on this host, which no launch has started, is training in {self._run_directory.path}"
            )

    def _in_use(self, reason: str) -> Refused:
        return Refused(reason, "wait for it, stop it with SIGTERM, or use another --run-dir")

    def _run_workers(self, plan: Plan, must_go: Callable[[str], bool]) -> int:
        """Runs the workers to their end and returns the exit code of their launcher.

        Raises:
            TakenOver: If another launch has taken the run over; this one has then ended its workers.
        """
        self._record.check()
        if self._stop:
            return 0
        self._over_since = None
        command, environment = self._starter(replace(self.settings, nnodes=plan.nnodes), plan.run_id, plan.max_restarts)
        environment |= self._environment(plan)
        output = None
        if self._folder is not None:
            with suppress(OSError):  # on a full disk there are no logs
                output = self._folder / plan.run_id
                output.mkdir()
                environment[OUTPUT_VARIABLE] = str(output)
        log = _nvrx.elastic_log(self._run_directory.path)
        begin = 0
        with suppress(OSError):  # no log exists yet, or the storage fails for a while
            begin = log.stat().st_size
        with Relay(self._run_directory.path, NOT_SHOWN, output, without=[LAUNCH_ID_VARIABLE]) as relay:
            exit_code = self._wait_for_workers(command, environment, relay, plan.run_id, must_go)
        self._record.check()
        if exit_code != 0 and not self._stop:
            self._show_failed_start(plan.run_id, log, begin)
        return exit_code

    def _environment(self, plan: Plan) -> dict[str, str]:
        """The environment variables by which this launch configures its workers."""
        environment = {
            RUN_DIR_VARIABLE: str(self._run_directory.path),
            RECIPE_VARIABLE: self.settings.recipe,
            signals.GRACE_PERIOD_VARIABLE: str(self.settings.grace_period_s),
            SECTION_TIMEOUTS_VARIABLE: str(self.settings.section_timeouts),
            LAUNCH_ID_VARIABLE: self.launch_id,
            JOB_ATTEMPT_VARIABLE: str(plan.job_attempt),
            FIRST_LAUNCH_VARIABLE: plan.owner,
        }
        if self._folder is not None:
            environment[_nvrx.FOLDER_VARIABLE] = str(self._folder)
        if self.settings.continue_anyway or self._is_resumed:
            environment[CONTINUE_VARIABLE] = "1"
        if self.settings.makes_spares:
            environment[SPARES_VARIABLE] = "auto"
        if self.settings.global_batch is not None:
            environment[GLOBAL_BATCH_VARIABLE] = self.settings.global_batch
        if self.settings.read_again is not None:
            environment[READ_AGAIN_VARIABLE] = self.settings.read_again
        if self.settings.replaces_stragglers:
            environment[REPLACES_STRAGGLERS_VARIABLE] = "1"
        if self.settings.local_dir is not None:
            environment[LOCAL_DIR_VARIABLE] = str(self.settings.local_dir)
        return environment

    def _show_failed_start(self, run_id: str, log: Path, begin: int) -> None:
        """Shows the last lines of the elastic launcher's log, but only if no rank started that could report more."""
        if any(start.elastic_run_id == run_id for start in self._now().of(WorkersStart)):
            return
        if words := _nvrx.last_words(log, begin):
            log_line(f"The workers were not started. The elastic launcher reported, in {log}:")
            for line in words:
                write_line(f"  {line}")

    def _wait_for_workers(
        self,
        command: list[str],
        environment: dict[str, str],
        relay: Relay,
        run_id: str,
        must_go: Callable[[str], bool],
    ) -> int:
        # In a session of its own: Ctrl-C at the terminal reaches only this process, which passes it on once.
        process = subprocess.Popen(
            command,
            env=self._defaults() | os.environ | environment,
            start_new_session=True,
            stdout=relay.stdout,
            stderr=relay.stderr,
        )
        deadline = None
        nodes_checked_at = time.monotonic()
        exit_code: int | None
        while (exit_code := process.poll()) is None:
            now = time.monotonic()
            if self._stop.signum is not None and deadline is None:
                deadline = now + self.settings.grace_period_s + deadlines.KILL_MARGIN_S
                process.send_signal(signal.SIGTERM)
                log_line(
                    f"Received {self._stop.signum.name}: the workers have {self.settings.grace_period_s:g} s to "
                    "save and stop. A second signal ends them at once."
                )
            if self._stop.now or (deadline is not None and now > deadline):
                end_processes(self.launch_id)
                log_line("Ending the workers now: " + ("a second signal." if self._stop.now else "their time is up."))
            elif self._record.is_lost:
                end_processes(self.launch_id)
            elif now - nodes_checked_at >= deadlines.CHECK_NODES_EVERY_S and deadline is None:
                nodes_checked_at = now
                if self._ask(must_go, run_id):
                    end_processes(self.launch_id)
            time.sleep(_POLL_S)
        end_processes(self.launch_id, deadlines.LEFTOVERS_PATIENCE_S)
        if not self._record.is_lost:
            remove_abandoned(run_dir=self._run_directory.path)  # of a watchdog that had to be killed
        return exit_code

    def _ask(self, must_go: Callable[[str], bool], run_id: str) -> bool:
        """Whether the workers must be ended; not because the storage fails, since they may train without it."""
        self._workers_run = True
        try:
            return must_go(run_id)
        except OSError as error:
            if not self._has_said_blind:
                self._has_said_blind = True
                log_line(f"Cannot check on other nodes because storage is failing ({error}). The workers keep running.")
            return False
        finally:
            self._workers_run = False

    def _defaults(self) -> dict[str, str]:
        """Variables that the user's own environment overrides: W&B continues one W&B run over all restarts."""
        return {RUN_ID_VARIABLE: wandb_run_id(self._identity), "WANDB_RESUME": "allow"}


def _describe_all(found: list[Change], edited: list[str]) -> str:
    edits = f"edited: {', '.join(edited)}" if edited else ""
    return "; ".join(filter(None, (describe_changes(found), edits)))


def other_command(settings: LaunchSettings) -> tuple[str, str] | None:
    """What is wrong if the run directory holds the run of another command, and what to do about it."""
    launch, here = last_launch(settings.run_dir), Path.cwd()
    if launch is None or launch.command is None:
        return None
    last = launch.command
    if identity_of_command(last, here) == identity_of_command(settings.command, here):
        return None
    theirs, ours = shlex.join(last), shlex.join(settings.command)
    return (
        f"{settings.run_dir} holds the run of `{theirs}`, but this command is `{ours}`",
        "give a --run-dir: that one to continue its run, or another one for a separate run",
    )
