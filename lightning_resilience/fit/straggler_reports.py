"""Straggler reports: compare the step times of all ranks, and may end slow ranks, or the run because of them."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from lightning_resilience import _nvrx, wandb_panels
from lightning_resilience._lightning import (
    lightning_callbacks,
    lightning_loggers,
    lightning_progress,
)
from lightning_resilience.agreement_protocol import Event, Needs
from lightning_resilience.detect.device_id import DeviceId
from lightning_resilience.detect.hangs.comm_wait import CommWaitTimer
from lightning_resilience.detect.stragglers.step_timer import (
    CALLBACKS,
    COMPUTE,
    SECTIONS,
    DeviceStepTimer,
    HostStepTimer,
    SamplingWindow,
    timing_events,
)
from lightning_resilience.detect.stragglers.stragglers import (
    Comm,
    History,
    Kernels,
    Period,
    Report,
    Straggler,
    Streaks,
    make_report,
)
from lightning_resilience.fit.participant import Participant, Stateful
from lightning_resilience.fit.session import FitSession
from lightning_resilience.launch import membership
from lightning_resilience.launch.nodes import why_not_excluded
from lightning_resilience.run import exit_codes
from lightning_resilience.run.events import Stragglers, StragglersReplaced, StragglerStop
from lightning_resilience.run.history import read_history
from lightning_resilience.run.run_directory import REPLACES_STRAGGLERS_VARIABLE, is_started_again

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger("lightning_resilience.callbacks.straggler_detection")  # as documented

Backend = Literal["auto", "timer", "device_events", "cupti"]

_REPORT = "straggler report"
_STOP = "stop for stragglers"
_REPLACE = "replace stragglers"
_STATE_KEY = "stragglers"
_MIN_STEPS = 10  # in a report: typical times of fewer steps are noise
_ENDS_AFTER = 2  # reports in a row: one may have met a moment of the script's own work
_SAVES_WITHIN_S = 60.0
_MAX_NAMED = 100  # ranks that are named in one line or event


@dataclass(frozen=True)
class StragglerOptions:
    """Options of ``StragglerDetection``, validated there; ``report_time_interval`` in seconds."""

    report_time_interval: float
    calc_relative_gpu_perf: bool
    calc_individual_gpu_perf: bool
    num_gpu_perf_scores_to_print: int
    gpu_relative_perf_threshold: float
    gpu_individual_perf_threshold: float
    stop_if_detected: bool
    enable_logging: bool
    profiling_interval: int
    backend: Backend
    min_consecutive_reports: int


class StragglersFound(SystemExit):
    """The run ends, saved, because some ranks are too slow; it can continue without their nodes.

    The exit code is 1, as NeMo's. ``launch`` restarts the workers; with NVRx's launcher and several nodes, without the
    nodes of these ranks.

    Attributes:
        reason: Which ranks, where they run, and how slow they are.
        suspects_this_node: Why a launcher that can should continue without the node of this rank; empty if it need not.
    """

    def __init__(self, reason: str, suspects_this_node: str = "") -> None:
        super().__init__(1)
        self.reason = reason
        self.suspects_this_node = suspects_this_node

    def __str__(self) -> str:
        return self.reason


class StragglerReports(Participant):
    """Measures the steps of one fit, compares the ranks at intervals, and ends the run because of slow ones.

    Args:
        session: The fit.
        options: The options of the callback.
        on_report: Called on rank 0 with every report.
    """

    extra_state_matters = False

    def __init__(self, session: FitSession, options: StragglerOptions, on_report: Callable[[Report], None]) -> None:
        self.session = session
        self._options = options
        self._on_report = on_report
        device = session.fit.trainer.strategy.root_device
        self._device_ids = session.fit.devices
        self._nodes = len({each.node for each in self._device_ids})
        events = timing_events(device) if options.backend != "timer" else None
        self._profiler = self._choose(has_events=events is not None)
        sampling = SamplingWindow(options.profiling_interval, options.report_time_interval)
        self._time: HostStepTimer | DeviceStepTimer
        if events is None:
            self._comm_wait = CommWaitTimer()
            self._time = HostStepTimer(self._comm_wait, sampling)
        else:
            make, current_stream = events
            self._time = DeviceStepTimer(make, sampling, current_stream)
            self._comm_wait = CommWaitTimer(self._time.wait, streams=type(current_stream()))
        self._comm = _make_comm(session.fit.trainer) if session.fit.trainer.world_size > 1 else Comm()
        mine = self._device_ids[session.fit.rank]
        self._history = History(f"{mine}, {self.backend}, {session.fit.trainer.world_size} ranks")
        self._streaks = Streaks(options.min_consecutive_reports)
        self._lasting = Streaks(max(_ENDS_AFTER, options.min_consecutive_reports))
        self._panels = wandb_panels.Panels()
        self._stopped_for: set[str] = set()
        self._replaced: set[tuple[int, str]] = set()
        self._makes_room_behind = math.inf  # after this step no rank is in the agreement
        self._leaves = False
        self._logged: set[str] = set()
        self._due = math.inf
        self._is_cold = True
        self._period: Period | None = None

    def extra_state(self) -> Mapping[str, Stateful]:
        """The history of scores, and on rank 0 what the panels have shown."""
        panels: dict[str, Stateful] = {wandb_panels.STATE_KEY: self._panels} if self.session.fit.rank == 0 else {}
        return {_STATE_KEY: self._history, **panels}

    def on_event(self, event: Event) -> None:
        """Gathers the scores, ends slow ranks, or stops because of them."""
        if event.kind == _REPORT:
            self._report()
        elif event.kind == _REPLACE:
            self._agree_on_replacement(event)
        elif event.kind == _STOP:
            self._stop(event)

    def _choose(self, has_events: bool) -> _nvrx.KernelProfiler | None:
        """Decides on the backend, the same on all ranks; returns the profiler if there is one."""
        asked, device = self._options.backend, self.session.fit.trainer.strategy.root_device
        if asked == "device_events" and not has_events:
            raise ValueError(f"backend={asked!r} needs a device with timing events, not {device.type}.")
        if asked == "cupti" and device.type != "cuda":
            raise ValueError(f"backend={asked!r} measures CUDA devices, and this fit runs on {device.type}.")
        self.backend: Backend = "device_events" if has_events else "timer"
        if asked != "cupti":
            return None
        is_rank_0 = self.session.fit.rank == 0
        if lightning_callbacks.has_pytorch_profiler(self.session.fit.trainer):
            if is_rank_0:
                log.warning("Kernels are not profiled: CUPTI allows only one profiler, and the Trainer uses PyTorch's.")
            return None
        profiler, problem = _nvrx.kernel_profiler()
        problems = [each for each in self.session.fit.gather(problem) if each is not None]
        if profiler is None or problems:
            raise ValueError(f"backend='cupti' does not work here: {problems[0]}")
        steps, seconds = profiler.allow(self._options.report_time_interval)
        if is_rank_0:
            log.info("Kernels are profiled by CUPTI, in at most %d steps and %.3g s of each report.", steps, seconds)
        self.backend = "cupti"
        return profiler

    def start(self) -> None:
        """Called when training begins: reads which stragglers were acted on before, and starts the clock."""
        session, trainer = self.session, self.session.fit.trainer
        if trainer.world_size > 1:
            self._comm_wait.start()
        if session.fit.rank == 0:
            for event in read_history(session.fit.run.ledger).events:
                if isinstance(event, StragglerStop):
                    self._stopped_for.update(event.devices or ())
                elif isinstance(event, StragglersReplaced):
                    self._replaced.update(zip(event.ranks or (), event.devices or (), strict=False))
            self._due = time.monotonic() + self._options.report_time_interval

    def leave(self) -> None:
        """Called when the fit has ended."""
        self._comm_wait.stop()
        if self._profiler is not None:
            self._profiler.close()

    # -- every step ----------------------------------------------------------------------------------------------------

    def before_batch(self) -> None:
        """Called when a step begins and its state was noted; see :mod:`.last_boundary`."""
        if self._leaves:
            self._make_room()
        if self._is_cold:
            self._is_cold = False  # the first step is always slower
            self._period = None
        else:
            if self._period is None:
                self._period = Period(self.session.fit.trainer.global_step, self.session.fit.time.reached)
            self._period.batches += 1
            self._time.begin()
            self._comm_wait.counts = self._time.is_timed

    def enter(self, section: int) -> None:
        """Notes that the step enters another section."""
        self._time.enter(section)

    def after_rollback(self) -> None:
        """Does not time the next step, which is slower."""
        self._time.drop()
        self._is_cold = True

    def batch_ready(self) -> None:
        """Starts to time the hooks of callbacks before the step."""
        self._time.enter(CALLBACKS)

    def batch_begins(self) -> None:
        """Starts to time the forward pass, the backward pass and the optimizer steps."""
        self._time.enter(COMPUTE)
        if self._profiler is not None and self._time.is_timed:
            self._profiler.start()

    def batch_done(self) -> None:
        """Starts to time the hooks of callbacks after the optimizer steps."""
        if self._profiler is not None:
            self._profiler.stop()
        self._time.enter(CALLBACKS)

    def at_boundary(self, step: int, may_save: Callable[[], bool]) -> None:
        """Requests a report when it is due; on rank 0 only, as ``_due`` is infinite elsewhere."""
        self._leaves = step > self._makes_room_behind
        if time.monotonic() >= self._due and len(self._time) >= _MIN_STEPS:
            self._due = math.inf  # until the report is made
            self.session.fit.agreement.request(_REPORT, {}, Needs.TRAINING)

    # -- reports -------------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        session, kernels = self.session, None
        if self._profiler is not None:
            found = self._profiler.take()
            kernels = Kernels.of(found)
            self._profiler.allow(self._options.report_time_interval)
            if (problem := self._profiler.problem) is not None:  # perhaps on this rank alone
                self._warn_once(f"Kernels are no longer profiled on rank {session.fit.rank}: {problem}.")
            elif not found:  # CUPTI reports no problem
                self._warn_once(
                    f"CUPTI reports no kernels of rank {session.fit.rank}, so reports use its step times. Another "
                    "profiler, such as PyTorch's in an earlier fit, may have taken over CUPTI for good."
                )
        report = make_report(
            session.fit.trainer.global_step, self._device_ids, self._time.take(), kernels, self._history, self._comm
        )
        if report is not None:
            self._due = time.monotonic() + self._options.report_time_interval
            self._on_report(report)
            self._publish(report)
        self._period = None

    def _publish(self, report: Report) -> None:
        options, session = self._options, self.session
        began = time.perf_counter()
        slow: list[Straggler] = []
        if options.calc_relative_gpu_perf:
            slow += report.slow("relative", options.gpu_relative_perf_threshold)
        if options.calc_individual_gpu_perf:
            slow += report.slow("individual", options.gpu_individual_perf_threshold)
        stragglers, lasting = self._streaks.of(slow), self._lasting.of(slow)
        self._print(report, stragglers)
        if stragglers:
            slowest, waited = report.waiting(stragglers) or (None, 0.0)
            batches = 0.0 if self._period is None else self._period.new_batches(report.step)
            session.fit.ledger.record(
                Stragglers(
                    fit=session.fit.index,
                    step=report.step,
                    ranks=sorted({each.rank for each in stragglers})[:_MAX_NAMED],
                    devices=_devices(stragglers)[:_MAX_NAMED],
                    reason=_named(stragglers),
                    slowest=slowest,
                    waited=None if slowest is None else round(waited * batches, 3),
                )
            )
        if options.enable_logging:
            self._log(report, stragglers)
        took = f"Straggler report processing time: {report.elapsed + time.perf_counter() - began:.3f} sec."
        if stragglers:
            log.info("%s", took)
        else:  # in one line: most reports are of this kind
            log.info("No stragglers after step %d%s. %s", report.step, self._range(report), took)
        if lasting and not self._asks_for_replacement(lasting) and options.stop_if_detected:
            self._consider_stopping(lasting)

    def _print(self, report: Report, stragglers: Sequence[Straggler]) -> None:
        """Logs the words of NVRx's callback: users have programs that read them."""
        options = self._options
        for kind, words in (
            ("relative", "Some GPUs have worse relative performance."),
            ("individual", "Some GPUs performance dropped."),
        ):
            if affected := [each for each in stragglers if each.kind == kind]:
                ids = [f"StragglerId(rank={each.rank}, node={each.device_id.node!r})" for each in affected[:_MAX_NAMED]]
                more = [f"and {len(affected) - _MAX_NAMED} more"] if len(affected) > _MAX_NAMED else []
                log.warning("STRAGGLER DETECTION WARNING: %s Affected ranks: {%s}", words, ", ".join([*ids, *more]))
        if stragglers:
            log.warning("Slow after step %d: %s.", report.step, _named(stragglers))
        if report.missing:
            log.warning("No steps were measured on rank %s.", _some(report.missing))
        if stragglers and options.num_gpu_perf_scores_to_print > 0:
            for kind, scores in self._scores(report):
                if lines := _formatted(scores, report.device_ids, options.num_gpu_perf_scores_to_print):
                    log.info("\nGPU %s performance:\n%s", kind, lines)

    def _scores(self, report: Report) -> Iterator[tuple[str, torch.Tensor]]:
        if self._options.calc_relative_gpu_perf and len(report.device_ids) > 1:
            yield "relative", report.relative
        if self._options.calc_individual_gpu_perf:
            yield "individual", report.individual

    def _range(self, report: Report) -> str:
        """The worst score of each kind and its rank, to be appended to a log line."""
        if self._options.num_gpu_perf_scores_to_print == 0:
            return ""
        text = ""
        for kind, scores in self._scores(report):
            known = torch.isfinite(scores).nonzero().flatten()
            if len(known):
                rank = int(known[scores[known].argmin()])
                node = report.device_ids[rank].node
                text += f"; GPU {kind} performance: at least {float(scores[rank]):.2f} (Rank={rank} Node={node})"
        return text

    def _log(self, report: Report, stragglers: Sequence[Straggler]) -> None:
        trainer, options = self.session.fit.trainer, self._options
        metrics = {}
        if options.calc_relative_gpu_perf:
            metrics.update(_extremes("gpu_relative_perf", report.relative))
        if options.calc_individual_gpu_perf:
            metrics.update(_extremes("gpu_individual_perf", report.individual))
        try:
            if metrics:
                lightning_loggers.log_metrics(trainer, metrics)
            step = lightning_progress.logged_step(trainer)
            self._panels.show(trainer.loggers, report, stragglers, step, options.gpu_relative_perf_threshold)
        except Exception:  # a report must not end the training
            log.exception("A logger could not take the straggler report.")

    # -- replacing -----------------------------------------------------------------------------------------------------

    def _asks_for_replacement(self, stragglers: Sequence[Straggler]) -> bool:
        if REPLACES_STRAGGLERS_VARIABLE not in os.environ:
            return False
        line = membership.current()
        slots = range(len(self._device_ids)) if line is None else line.members
        places = {(slots[each.rank], str(each.device_id)): each for each in stragglers}
        new = {place: each for place, each in places.items() if place not in self._replaced}
        if not new:
            return False
        why = self.session.replaceability.why_not
        if _are_too_many(stragglers, len(self._device_ids)):
            why = "more than half of the ranks are slow"
        elif all(each.cause == SECTIONS[CALLBACKS] for each in new.values()):
            why = "the callbacks that make it slow would take as long in another process"
        if why is not None:
            self._warn_once(f"No slow rank is replaced: {why}.")
            return False
        self._replaced.update(new)
        payload = {
            "reason": _named(list(new.values())),
            "ranks": [each.rank for each in new.values()],
            "slots": [slot for slot, _ in new],
            "devices": [device for _, device in new],
        }
        self.session.fit.agreement.request(_REPLACE, payload, Needs.CLEAN | Needs.TRAINING)
        return True

    def _agree_on_replacement(self, event: Event) -> None:
        fit, what = self.session.fit, event.payload
        if fit.rank == 0:
            log.warning("Replacing stragglers: %s.", what["reason"])
            fit.ledger.record(
                StragglersReplaced(
                    fit=fit.index,
                    step=fit.trainer.global_step,
                    ranks=what["slots"],
                    devices=what["devices"],
                    reason=what["reason"],
                )
            )
        if fit.participants.train_apart and not fit.saves_paused:  # their work is saved first, not done again
            for save_locally in fit.participants.implement(Participant.save_locally):
                save_locally("replacement", _SAVES_WITHIN_S)
        if fit.rank in what["ranks"]:
            self._makes_room_behind = fit.trainer.global_step

    def _make_room(self) -> NoReturn:
        """Ends this process as if it were killed: the other ranks know how to recover from that."""
        with suppress(TimeoutError):
            self.session.saver.wait()  # for its part of a checkpoint
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(exit_codes.TOO_SLOW)

    # -- stopping ------------------------------------------------------------------------------------------------------

    def _consider_stopping(self, stragglers: Sequence[Straggler]) -> None:
        new = [each for each in stragglers if str(each.device_id) not in self._stopped_for]
        nodes = {each.device_id.node for each in new}
        if not new:
            why = "The run has already been stopped because of these devices, and continues with them."
        elif _are_too_many(stragglers, len(self._device_ids)):  # also those that are not new
            why = "The run is not stopped: more than half of the ranks are slow, so none counts as a straggler."
        elif not self.session.selector.uses_global:
            why = "The run is not stopped: without AutoResume it would begin anew."
        elif not is_started_again():
            why = "The run is not stopped: nothing would restart it, as lightning-resilience launch does."
        elif all(each.cause == SECTIONS[CALLBACKS] for each in new):
            why = "The run is not stopped: the callbacks that make it slow would take as long on any other node."
        elif reason := why_not_excluded(self.session.fit.run.path, nodes, self._nodes):
            why = f"The run is not stopped, and continues with its stragglers: {reason}."
        else:
            log.error("Detected stragglers. Terminating training...")
            payload = {
                "reason": _named(new),
                "devices": _devices(new),
                "ranks": sorted({each.rank for each in new}),
            }
            self.session.fit.agreement.request(_STOP, payload, Needs.CLEAN | Needs.TRAINING)
            return
        self._warn_once(why)

    def _warn_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            log.warning(line)

    def _stop(self, event: Event) -> None:
        session = self.session
        if session.saver.waits():  # a resume would not judge the saved steps again
            if session.fit.rank == 0:
                log.info("The run continues until the next report, because its last step was bad.")
            return
        path = session.saver.save("straggler")
        if path is None:  # on all ranks
            if session.fit.rank == 0:
                log.error("The run continues with its stragglers, because it cannot be saved.")
            return
        reason, ranks = str(event.payload["reason"]), event.payload["ranks"]
        if session.fit.rank == 0:
            session.fit.ledger.record(
                StragglerStop(
                    fit=session.fit.index,
                    step=session.fit.trainer.global_step,
                    ranks=ranks,
                    devices=event.payload["devices"],
                    reason=reason,
                )
            )
            log.error("Saved %s. A restarted run continues from it.", path)
        session.fit.gather(None)  # no rank leaves, and has the launcher end other ranks, before that
        nodes = {self._device_ids[rank].node for rank in ranks}
        is_suspect = 2 * len(nodes) <= self._nodes and session.fit.rank in ranks
        raise StragglersFound(f"too slow: {reason}", reason if is_suspect else "")


def _are_too_many(stragglers: Sequence[Straggler], world_size: int) -> bool:
    return 2 * len({each.rank for each in stragglers}) > world_size


def _named(stragglers: Sequence[Straggler]) -> str:
    shown = "; ".join(map(str, stragglers[:5]))
    return shown if len(stragglers) <= 5 else f"{shown}; and {len(stragglers) - 5} more"


def _devices(stragglers: Sequence[Straggler]) -> list[str]:
    return sorted({str(each.device_id) for each in stragglers})


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:10]))
    return shown if len(ranks) <= 10 else f"{shown} and {len(ranks) - 10} more"


def _formatted(scores: torch.Tensor, devices: Sequence[DeviceId], count: int) -> str:
    """The worst and the best scores, in the layout of NVRx's callback."""
    known = torch.isfinite(scores).nonzero().flatten()
    order = known[scores[known].argsort(stable=True)].tolist()

    def lines(ranks: Sequence[int]) -> str:
        return "".join(f"  Rank={rank} Node={devices[rank].node} Score={float(scores[rank]):.2f}\n" for rank in ranks)

    if len(order) <= 2 * count:
        return lines(order)
    return (
        f" Worst performing {count}/{len(order)} ranks:\n{lines(order[:count])}"
        f" Best performing {count}/{len(order)} ranks:\n{lines(order[: -count - 1 : -1])}"
    )


def _extremes(prefix: str, scores: torch.Tensor) -> dict[str, float]:
    known = scores[torch.isfinite(scores)]
    names = ("min", "median", "max") if len(known) else ()
    return {f"{prefix}/{name}": float(getattr(known, name)()) for name in names}


def _make_comm(trainer: Trainer) -> Comm:
    """Communication by the process group of the training, on its device."""
    device = trainer.strategy.root_device

    def on_device(send: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        def sent(tensor: torch.Tensor) -> torch.Tensor:
            there = tensor.to(device, copy=True)
            send(there)
            return there.cpu()

        return sent

    def gather(tensor: torch.Tensor) -> torch.Tensor | None:
        there = tensor.to(device)
        if not trainer.is_global_zero:
            torch.distributed.gather(there)
            return None
        matrix = there.new_empty(trainer.world_size, len(there))
        torch.distributed.gather(there, list(matrix.unbind()))
        return matrix.cpu()

    return Comm(
        on_device(lambda tensor: torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MIN)),
        gather,
        on_device(lambda tensor: torch.distributed.broadcast(tensor, 0)),
    )
