"""The hang watch of a fit: has its ranks watched, sets their time limits, and asks the launcher to act on failures."""

from __future__ import annotations

import functools
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from lightning_resilience import _nvrx
from lightning_resilience._lightning import lightning_checkpoint_io, lightning_loops, lightning_strategies
from lightning_resilience._processes import is_running
from lightning_resilience.checkpoint import devices
from lightning_resilience.detect import health
from lightning_resilience.detect.hangs import timeouts, watchdog
from lightning_resilience.detect.hangs.progress import Section
from lightning_resilience.detect.hangs.rank_probe import (
    RankProbe,
    describe_rank,
    handle_signals_again,
    node_directory,
    pids,
    probe_of_worker,
)
from lightning_resilience.detect.hangs.timeouts import SECTION_TIMEOUTS_VARIABLE, SectionTimeouts
from lightning_resilience.faults import FaultInjector, SimulatedFault
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession
from lightning_resilience.launch import membership
from lightning_resilience.run import deadlines, exit_codes
from lightning_resilience.run.events import Fault, Unhealthy, WorkloadRequest
from lightning_resilience.run.history import read_history
from lightning_resilience.run.run_directory import RUN_DIR_VARIABLE, is_started_again

log = logging.getLogger("lightning_resilience.callbacks.fault_tolerance")  # as documented

Engine = Literal["auto", "nvrx", "watchdog"]

FINISHED_FLAG_VARIABLE = "FAULT_TOL_FINISHED_FLAG_FILE"
"""Environment variable of NeMo-Run's and NVRx's job scripts: they requeue a job until this file exists."""


@dataclass(frozen=True)
class HangWatchOptions:
    """Options of ``FaultTolerance``, validated there.

    Attributes:
        has_auto_resume: Whether the Trainer has an ``AutoResume``.
    """

    autoresume: bool
    calculate_timeouts: bool
    simulated_fault_params: SimulatedFault | None
    exp_dir: str | os.PathLike[str] | None
    exc_handling_policy: Callable[[BaseException], Any] | None
    section_timeouts: SectionTimeouts | None
    engine: Engine
    health_check_interval_steps: int
    has_auto_resume: bool


class HangWatch(Participant):
    """Has this rank watched for one fit, from its set-up on, and asks the failure policy when the fit fails.

    Raises:
        RuntimeError: If this rank's node is not fit to train.
    """

    def __init__(self, session: FitSession, options: HangWatchOptions) -> None:
        self.session = session
        self._options = options
        self._calculates = options.calculate_timeouts and is_started_again()
        self.has_loaded = False
        self._ping_at = 0
        self._steps_before = 0
        trainer = session.fit.trainer
        self._monitor = _monitor(options.engine)
        self._node_check: Callable[[], health.HealthReport] | None = self._begin_node_check()
        if not self._is_restarted:
            self._judge_node()
        self._distrusted: set[Section] = set()
        self._state = Path(options.exp_dir or session.fit.run.path) / "ft_state.json"
        self._layout = {
            "world_size": trainer.world_size,
            "nodes": trainer.num_nodes,
            "strategy": type(trainer.strategy).__name__,
            "device": trainer.strategy.root_device.type,
        }
        self.timeouts = self._load_timeouts()
        self._directory: Path | None = None
        self._watchdog: dict[str, Any] | None = None
        self._has_failed_to_start = False
        self.probe = self._begin()
        self._reporter = self._start_reporter()
        self._faults = self._prepare_fault()
        for owner, name in (
            (trainer, "save_checkpoint"),
            (trainer.strategy, "remove_checkpoint"),
            (trainer.strategy.checkpoint_io, "teardown"),  # where AsyncCheckpointIO waits when training has ended
            (trainer.strategy.checkpoint_io, "maybe_finalize_save_checkpoint"),  # NeMo's asynchronous saves
        ):
            if hasattr(owner, name):
                self._count_as_checkpointing(owner, name)
        if trainer.is_global_zero:
            self._set_finished_flag(False)
        # A watchdog process takes a quarter of a second to start.
        self._must_start = threading.Event()
        self._starter = threading.Thread(target=self._start_watchdog, name="resilience-watchdog", daemon=True)
        self._starter.start()

    def _begin(self) -> RankProbe | None:
        """Has this rank watched; an obstacle must not end a healthy training."""
        session, trainer = self.session, self.session.fit.trainer
        probe = launched = None
        try:
            if sys.platform != "linux":
                raise OSError("hangs are detected on Linux only")
            if (launched := probe_of_worker()) is not None:
                self._directory = launched.directory
                launched.begin_fit(self.timeouts.by_section(), self._about())
                probe = launched
            else:
                self._directory = node_directory(session.fit.token, trainer.node_rank)
                probe = RankProbe(self._directory, session.fit.rank, self.timeouts.by_section(), self._about())
            session.fit.progress = probe.progress
            if (device := trainer.strategy.root_device).type != "cpu":
                probe.answer_for_device(functools.partial(devices.has_work, device))
        except OSError as error:
            log.error("Rank %d is not watched, so its hangs will not be found (%s).", session.fit.rank, error)
            is_alone = launched is None and trainer.num_devices == 1
            if is_alone and self._directory is not None:  # no other rank of this node needs it
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = None
        lightning_loops.on_other_trainers(trainer, session.fit.patches, session.fit.advanced, handle_signals_again)
        return probe

    def _start_watchdog(self) -> None:
        self._must_start.wait(watchdog.put_off_s())
        self._keep_watchdog()
        if self.session.fit.trainer.is_global_zero and self.session.fit.index == 0:
            self._log_watchers()

    def _keep_watchdog(self) -> None:
        """Starts the watchdog of this node unless it is running; if that fails, the training continues without it."""
        if self._directory is None or self.session.fit.trainer.local_rank != 0:
            return
        if self._watchdog is not None:
            if watchdog.is_alive(self._directory, self._watchdog):
                return
            state = "does not respond" if is_running(self._watchdog) else "has exited"
            log.warning("The watchdog of %s %s; restarting it.", platform.node(), state)
            self._watchdog = None
        try:
            self._watchdog = watchdog.start(self._directory)
            self._has_failed_to_start = False
        except (OSError, subprocess.SubprocessError) as error:
            if not self._has_failed_to_start:  # each save tries again; the failure is logged once
                self._has_failed_to_start = True
                log.error(
                    "The watchdog of %s does not start (%s): hangs on this node will not be found.",
                    platform.node(),
                    error,
                )

    def _about(self) -> dict[str, Any]:
        fit, trainer = self.session.fit, self.session.fit.trainer
        # The Trainer does not know nodes with different numbers of ranks.
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", trainer.num_nodes))
        return describe_rank(fit.run.path, fit.index, fit.token, nodes, trainer.world_size, is_started_again())

    def _start_reporter(self) -> _nvrx.SectionReporter | None:
        if self._monitor is None or self.probe is None:
            return None
        reporter = _nvrx.SectionReporter(self.probe.progress_path, self._monitor)
        reporter.start()
        return reporter

    def _count_as_checkpointing(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.session.fit.saving():
                return call(*args, **kwargs)

        self.session.fit.save_patches.set(owner, name, counted)

    def start(self) -> None:
        """Called when training begins."""
        self._judge_node()
        session = self.session
        self._steps_before = session.fit.steps_counted
        if self._faults is not None:
            self._faults.arm(session.fit.trainer.global_step)

    def before_training_data(self, loaders: list[Any]) -> None:
        """Has the data loaders inject faults that are to happen in their workers."""
        if (injector := self._faults) is not None:
            for loader in loaders:
                if isinstance(loader, DataLoader):
                    self.session.fit.patches.set(loader, "collate_fn", injector.collate(loader.collate_fn))

    def at_boundary(self, step: int, may_save: Callable[[], bool]) -> None:
        """Injects the fault that is due, and checks that all ranks respond."""
        if self._faults is not None:
            self._faults.at_step(step)
        is_asked = self._options.health_check_interval_steps and self.session.fit.trainer.world_size > 1
        # Ranks that train independently arrive at different times; they meet for exchanges.
        if is_asked and not self.session.fit.participants.train_apart:
            self._ping()

    def on_raised(self) -> None:
        """Shows the watchdog that this rank has failed, since the watchdog may find its peers waiting."""
        if self.probe is not None:
            self.probe.fail()

    def on_failure(self, exception: BaseException) -> str | None:
        """Asks the failure policy."""
        self.on_raised()
        if not self.session.fit.peer_is_lost:
            with suppress(RuntimeError):
                self._judge_node()  # the node may be the cause
        return self._ask_policy(exception)

    def left(self) -> None:
        """The rank leaves the fit; if a launcher started it, it is still watched outside of the fit."""
        if self.probe is not None:
            self.probe.end_fit()

    def leave(self) -> None:
        """Stops the threads that run beside the training."""
        self._must_start.set()
        if not self.session.fit.peer_is_lost:  # otherwise ranks wait for this process, or for its next start of the fit
            self._starter.join(deadlines.WATCHDOG_STARTS_WITHIN_S)
        if self._faults is not None:
            self._faults.disarm()
        if self._reporter is not None:
            self._reporter.stop()

    # -- limits -------------------------------------------------------------------------------------------------------

    def _load_timeouts(self) -> SectionTimeouts:
        in_environment = os.environ.get(SECTION_TIMEOUTS_VARIABLE, "")
        configured = self._options.section_timeouts or SectionTimeouts.parse(in_environment)
        if not self._calculates:
            return configured
        self._layout["configured"] = str(configured)  # calculated timeouts are valid only with the same configured ones

        def read() -> tuple[SectionTimeouts | None, set[Section]]:
            found, problem = timeouts.load(self._state, self.session.fit.index, self._layout, configured)
            if problem is not None:
                is_known = (line := membership.current()) is not None and line.generation > 0  # ranks come and go
                log.log(logging.DEBUG if is_known else logging.WARNING, "%s Timeouts are calculated anew.", problem)
            return found, self._ended_too_early(configured)

        found, self._distrusted = self.session.fit.from_rank_0(read)  # the ranks must not differ
        if found is None:
            return configured
        calculated = {name: s for name, s in found.calculated.items() if name not in self._distrusted}
        return replace(configured, calculated=calculated)

    def _ended_too_early(self, configured: SectionTimeouts) -> set[Section]:
        """Sections whose calculated limit has ended this fit before: it may have been too short, and would be again."""
        limits = configured.by_section()
        return {
            section
            for event in read_history(self.session.fit.run.ledger).events
            if isinstance(event, Fault) and event.kind == "hang" and event.fit == self.session.fit.index
            for section, limit in limits.items()
            if section == event.section and event.limit is not None and event.limit < limit
        }

    def after_save(self, is_end: bool) -> None:
        """Starts the watchdog again if needed, and calculates timeouts: all ranks meet after a save, and have time."""
        trainer = self.session.fit.trainer
        if is_end and trainer.is_global_zero:
            self._set_finished_flag(True)
        if not (watchdog.put_off_s() and self._starter.is_alive()):  # otherwise it starts soon
            self._starter.join(deadlines.WATCHDOG_STARTS_WITHIN_S)
            self._keep_watchdog()
        if self._calculates:
            self._calculate_timeouts(is_end)

    def _calculate_timeouts(self, is_end: bool) -> None:
        trainer, progress = self.session.fit.trainer, self.session.fit.progress
        everywhere = self.session.fit.gather((progress.measured() if progress is not None else {}, self.has_loaded))
        # All ranks must get the same result, whatever each has measured.
        longest: dict[Section, float] = {}
        for measured, _ in everywhere:
            for section, seconds in measured.items():
                longest[section] = max(seconds, longest.get(section, 0.0))
        selected = timeouts.selectable(
            has_loaded=any(has_loaded for _, has_loaded in everywhere),
            train_iterations=self.session.fit.steps_counted - self._steps_before,
            has_validated="validation" in longest,
            has_saved="checkpointing" in longest,
            saves_in_background=(
                lightning_checkpoint_io.is_async_checkpoint_io(trainer.strategy.checkpoint_io)
                or self.session.saver.has_saved_async
            ),
            is_end=is_end,
        )
        new = timeouts.calculate(self.timeouts, longest, selected - self._distrusted)
        if new == self.timeouts:
            return
        self.timeouts = new
        if progress is not None:
            progress.set_timeouts(new.by_section())
        if trainer.is_global_zero:
            log.debug("Calculated section timeouts: %s", new)
            try:
                timeouts.save(self._state, self.session.fit.index, new, self._layout)
            except OSError as error:
                log.warning("The calculated timeouts cannot be saved for the next job: %s", error)

    # -- faults, health and policy ------------------------------------------------------------------------------------

    def _prepare_fault(self) -> FaultInjector | None:
        fault, session = self._options.simulated_fault_params, self.session
        if fault is None:
            return None
        injector = FaultInjector(
            fault,
            rank=session.fit.rank,
            world_size=session.fit.trainer.world_size,
            ledger=session.fit.ledger,
            seed=session.fit.token,
            device=session.fit.trainer.strategy.root_device,
            node_pids=lambda: pids(self.probe.directory) if self.probe is not None else [],
        )

        if injector.fault_type == "nan_loss":
            training_step = session.fit.trainer.strategy.training_step

            def spoiled(*args: Any, **kwargs: Any) -> Any:
                output = training_step(*args, **kwargs)
                injector.spoil_loss(output)  # here too: Lightning copies the loss for the hooks before the backward
                return output

            session.fit.patches.set(session.fit.trainer.strategy, "training_step", spoiled)
        return injector

    def spoil_loss(self, loss: Any) -> None:
        """Called before a backward pass."""
        if self._faults is not None:
            self._faults.spoil_loss(loss)

    def _ping(self) -> None:
        step, every = self.session.fit.trainer.global_step, self._options.health_check_interval_steps
        if step % every == 0 and step != self._ping_at:
            self._ping_at = step
            # A rank may arrive as late as in any step, and a device must first finish all work before the ping.
            limit = min(self.timeouts.by_section()["step"], deadlines.LONGEST_PING_S)
            check = health.check_collective(self.session.fit.trainer.strategy.root_device, limit)
            if not check.ok:
                raise RuntimeError(f"The health check at step {step} failed: {check.detail}.")

    @property
    def _is_restarted(self) -> bool:
        """Whether this node's elastic launcher has started ranks before, which have trained here."""
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    def _begin_node_check(self) -> Callable[[], health.HealthReport]:
        """Begins to check storage, clock and device.

        Restarted ranks are set up meanwhile and judged before their first step. If they train on the CPU, it is not
        exercised: it has just shown that it computes.
        """
        fit = self.session.fit
        # The storage is checked once for each node: the check writes and syncs files.
        run_dir = fit.run.path if fit.trainer.local_rank == 0 and fit.index == 0 else None
        device = fit.trainer.strategy.root_device
        return health.begin_node_check(run_dir, device, exercises_cpu=not self._is_restarted)

    def _judge_node(self) -> None:
        """Raises an error that names the node if a check failed, rather than have a step of all ranks fail later."""
        finish, self._node_check = self._node_check, None
        if finish is None:
            return
        session, report = self.session, finish()
        # Slow storage fails nothing here. A device that does not answer would hang in the first step.
        failed = [
            check for check in report.failed if check.name != "clock" and (check.answered or check.name == "device")
        ]
        for check in report.failed:
            if check not in failed:
                log.warning("Rank %d on %s: %s", session.fit.rank, platform.node(), check.detail)
        if not failed:
            return
        reason = (
            f"rank {session.fit.rank} on {platform.node()} is not fit to train: {health.HealthReport(tuple(failed))}"
        )
        session.fit.ledger.record(Unhealthy(fit=session.fit.index, reason=reason))
        # A full shared storage is as full on another node; and a node that is cold or busy is not broken.
        if any(check.answered and check.name != "free space" for check in failed):
            self._request(_nvrx.EXCLUDE_THIS_NODE, reason)
        raise RuntimeError(reason)

    def _ask_policy(self, exception: BaseException) -> str | None:
        policy = self._options.exc_handling_policy
        if reason := getattr(exception, "suspects_this_node", ""):  # set by another callback's verdict
            return self._request(_nvrx.EXCLUDE_THIS_NODE, reason)
        if policy is None:
            return None
        try:
            return self._request(policy(exception), f"{type(exception).__name__}: {exception}")
        except Exception:  # the failure itself matters more, and is being raised
            log.exception("exc_handling_policy has failed. The error that ends the fit is handled as usual.")
            return None

    def _request(self, request: Any, reason: str) -> str | None:
        """Has the launcher act on the policy's request. Returns why the whole run is to be halted, or ``None``."""
        action, description = _nvrx.parse_request(request, reason)
        if action == "continue":
            return None
        session = self.session
        session.fit.ledger.record(WorkloadRequest(fit=session.fit.index, action=action, reason=description))
        # launch reads the request in the ledger. ft_launcher would end the rendezvous of all nodes, or readmit this.
        is_read = action == _nvrx.EXCLUDE_THIS_NODE and RUN_DIR_VARIABLE in os.environ
        if self._monitor is not None and not is_read:
            self._monitor.send(action, description)
        elif action == _nvrx.EXCLUDE_THIS_NODE and not is_read:
            log.warning("No launcher of this rank can exclude %s from the next attempt.", platform.node())
        if action != "shutdown_workload":
            return None
        log.warning("The run is halted: %s", description)
        self._set_finished_flag(True)  # as NVRx does: job scripts must not requeue it
        return description

    # -- log and flag file --------------------------------------------------------------------------------------------

    def _set_finished_flag(self, finished: bool) -> None:
        name = os.environ.get(FINISHED_FLAG_VARIABLE)
        if not name or not self._options.autoresume:
            return
        try:
            if finished:
                Path(name).touch()
            else:
                Path(name).unlink(missing_ok=True)
        except OSError as error:
            log.error(
                "The flag file %s could not be updated (%s): job scripts see the old state of the run.", name, error
            )

    def _log_watchers(self) -> None:
        trainer = self.session.fit.trainer
        is_restarted = "TORCHELASTIC_RUN_ID" in os.environ
        watching = ["a watchdog on every node"] if self.probe is not None and self._watchdog is not None else []
        watching += ["NVRx's rank monitors"] if self._reporter is not None else []
        if watching:
            log.info("Hangs are found by %s; seconds allowed: %s.", " and ".join(watching), self.timeouts)
            if not is_restarted:
                log.info(
                    "A hung run ends with exit code %d, and nothing restarts it. lightning-resilience launch would.",
                    exit_codes.HUNG,
                )
        if is_restarted and self._monitor is None and trainer.world_size > 1 and _shares_the_rendezvous_store():
            log.warning(
                "Restarted gloo ranks may connect to addresses of the previous attempt, and hang. Set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, or use lightning-resilience launch."
            )
        gives_up, limit = lightning_strategies.collective_timeout(trainer), self.timeouts.by_section()["step"]
        if watching and gives_up is not None and gives_up <= limit:
            log.warning(
                "torch aborts a collective after %g s (the strategy's timeout), before a step counts as hung (%g s), "
                "so a hang ends without a diagnosis. Give the strategy a longer timeout, or the step a shorter one.",
                gives_up,
                limit,
            )
        if self._options.autoresume and not self._options.has_auto_resume:
            log.warning(
                "This Trainer has no AutoResume: a restarted fit begins from scratch, unless the script resumes it. "
                "FaultTolerance(autoresume=False) silences this warning."
            )


def _shares_the_rendezvous_store() -> bool:
    """Whether this attempt's ranks meet in a store that holds keys of an earlier attempt."""
    return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1" and torch.distributed.get_backend() == "gloo"


def _monitor(engine: Engine) -> _nvrx.RankMonitor | None:
    """NVRx's rank monitor of this rank, if it is to be used."""
    if engine == "watchdog":
        return None
    if not _nvrx.rank_monitor_available():
        if engine == "nvrx":
            raise RuntimeError(
                "FaultTolerance(engine='nvrx') needs nvidia-resiliency-ext and ranks that its ft_launcher has started: "
                "use lightning-resilience launch or ft_launcher, or engine='auto'."
            )
        return None
    return _nvrx.RankMonitor()
