"""The policy for bad steps: skip, rerun, rollback, or the end of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal, NoReturn

import torch

from lightning_resilience._lightning import (
    lightning_callbacks,
    lightning_checkpoints,
    lightning_data,
    lightning_loggers,
    lightning_metrics,
    lightning_progress,
    lightning_steps,
    lightning_strategies,
)
from lightning_resilience.agreement_protocol import Event, Needs
from lightning_resilience.detect.numerics.numerics import ChangingBuffers, SpikeReference, all_finite, nonfinite_names
from lightning_resilience.detect.numerics.reruns import PendingRerun, blamed_devices, decide_rerun
from lightning_resilience.detect.numerics.rollback_history import RollbackHistory, Window
from lightning_resilience.detect.numerics.step_guard import Reruns, StepGuard, StepResult, can_skip, on_host
from lightning_resilience.fit import checkpoint_io
from lightning_resilience.fit.participant import Participant, Stateful
from lightning_resilience.fit.session import FitSession
from lightning_resilience.run.events import BadStep, RerunVerdict, Rollback
from lightning_resilience.run.exit_codes import FAILED, RERUN_FAILED, TRY_ELSEWHERE

log = logging.getLogger("lightning_resilience.callbacks.nan_guard")  # users configure the callback's logger

Action = Literal["skip", "rollback", "stop", "warn"]
Rerun = Literal["disabled", "validate_results", "report_determinism_stats"]

_ROLL_BACK = "rollback"
_STOP = "stop after a bad step"
_PAUSE = "hold saves"
_RERUN = "rerun"
_NOWHERE = "there is no checkpoint to go back to, but from its beginning the run would skip these batches"


@dataclass(frozen=True)
class NumericsOptions:
    """Options of ``NaNGuard``, validated there.

    Attributes:
        optional: Whether an optimizer that cannot be guarded turns the policy off instead of raising an error.
    """

    action: Action
    max_consecutive: int
    max_rollbacks: int
    check_grads: bool
    rerun: Rerun
    max_reruns: int
    optional: bool


@dataclass
class StepCounts:
    """Steps of one fit, restarts included.

    Attributes:
        skipped_steps: Bad steps.
        steps_run_again: Steps whose batch was run twice.
        differing_steps: Steps run twice whose second run had another result than the first.
    """

    skipped_steps: int = 0
    steps_run_again: int = 0
    differing_steps: int = 0


class TrainingDiverged(RuntimeError):
    """The training cannot continue: its numbers are not finite, or spike, although all allowed measures were taken.

    Attributes:
        exit_code: The exit code of ``launch``; 17 after a rerun (Megatron's code for a validated result).
        is_final: Whether another attempt would end the same way. False if there was no checkpoint to roll back to:
            started again from its beginning, the run skips the bad batches.
    """

    def __init__(self, reason: str, exit_code: int = FAILED, is_final: bool = True) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.is_final = is_final


class RerunElsewhere(SystemExit):
    """A step was bad again on the same devices: the run ends here, to be resumed on other devices.

    The exit code is Megatron's 16. ``launch`` restarts the workers, and ends with this code when it gives up. Other
    launchers restart jobs that end with this code.

    Attributes:
        reason: What was bad.
        suspects_this_node: Why the launcher should continue without the node of this rank, if it can: the bad step
            began there, and there are several nodes (:class:`~lightning_resilience.FaultTolerance` asks for it). Empty
            if it need not.
    """

    suspects_this_node = ""

    def __init__(self, reason: str) -> None:
        super().__init__(TRY_ELSEWHERE)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}: to be tried on others"


class NumericsPolicy(Participant):
    """The policy for bad steps of one fit: skip, rerun, rollback, or the end of the run."""

    def __init__(
        self, session: FitSession, options: NumericsOptions, counts: StepCounts, spikes: SpikeReference | None
    ) -> None:
        self.session = session
        self._options = options
        self._counts = counts
        self._spikes = spikes
        trainer = session.fit.trainer
        self._file = session.fit.folder.path / "nan_guard.json"
        self._history = RollbackHistory(trainer.world_size)
        """Rank 0's history, read once: an entry that cannot be written is kept at least until the process ends."""
        self._skips = options.action != "warn"
        self._guard: StepGuard | None = None
        self._window = Window(0, 0, 0, 0)
        self._samples = lightning_data.SampleIds(trainer)
        self._logged: lightning_metrics.LoggedValues | None = None
        self._late = options.rerun == "disabled" and not _reads_cost_nothing(trainer.strategy.root_device)
        """Whether results arrive some steps later, since the host must not wait for them."""
        self._consecutive = 0
        self._bad: list[Window] = []
        self._last: StepResult | None = None
        """The last bad step, as this rank knows it."""
        self._lost: Window | None = None
        """The first window on this rank whose step was bad and was applied."""
        self._unanswered = set[Window]()
        """Windows with bad steps that await an action, as this rank knows: earlier good states must not be lost."""
        self._answered = set[Window]()
        """Windows for which all ranks have decided on the action; several ranks may request it for the same one."""
        self._requested_pause = False
        self._saves_paused = False
        self._rolled_back_at = 0
        self._log_rollback: Callable[[], None] = lambda: None
        self._rollbacks = 0
        self._skipped: dict[int, list[tuple[int, int]]] = {}
        self._initially_nonfinite: set[str] = set()
        """Names of tensors that were not finite from the beginning, on purpose: attention masks, for example."""
        self._devices = [str(each) for each in session.fit.devices]
        """The devices of all ranks."""
        self._pending_rerun: PendingRerun | None = None
        """The batch whose step was bad twice on the same devices, to be tried on other devices."""

    def extra_state(self) -> Mapping[str, Stateful]:
        """The losses that this rank has seen."""
        return {} if self._spikes is None else {"losses": self._spikes}

    def on_event(self, event: Event) -> None:
        """Rolls back, stops, decides what a bad second run means, or pauses saves."""
        payload = event.payload
        if event.kind in (_ROLL_BACK, _STOP, _RERUN):
            self._answer(event)
        elif event.kind == _PAUSE and self._still_holds(event):
            self._saves_paused = bool(payload["hold"])

    def on_event_at_end(self, event: Event) -> bool:
        """Decides what a bad second run means; the other events have no meaning at the end."""
        if event.kind != _RERUN:
            return False
        self._answer(event, is_end=True)
        return True

    def start(self) -> None:
        """Installs the guard when training begins."""
        session, trainer, options = self.session, self.session.fit.trainer, self._options
        if self._skips and any(isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers):
            problem = (
                "LBFGS changes the parameters while it evaluates them, and a step of it cannot be skipped: "
                "NaNGuard(action='warn') only reports."
            )
            if not options.optional:
                raise ValueError(problem)
            if session.fit.rank == 0:
                log.warning("NaNGuard is off: %s", problem)
            session.fit.participants.withdraw(self)
            return
        several = trainer.world_size > 1
        sharded = several and lightning_strategies.traits_of(trainer.strategy).all_ranks_write
        alone = session.fit.participants.train_apart  # each rank makes its own steps
        exact, patches = session.exact, session.fit.patches
        reruns = Reruns(exact.get_state_of_batch, exact.set_state_of_batch, options.rerun == "report_determinism_stats")
        self._guard = StepGuard(
            lambda: trainer.optimizers,
            trainer.lightning_module.named_parameters,
            ChangingBuffers(trainer.lightning_module),
            trainer.strategy.root_device,
            skips=self._skips,
            late=self._late,
            replicated=several and not sharded and not alone,
            sharded=sharded,
            alone=alone,
            check_grads=options.check_grads,
            spikes=self._spikes,
            has_scaler=lightning_steps.has_grad_scaler(trainer),
            reruns=None if options.rerun == "disabled" else reruns,
        )
        # The norm of 16-bit floats soon overflows its type, and then shows nothing.
        has_halves = any(each.dtype is torch.float16 for each in trainer.lightning_module.parameters())
        if sharded or (options.check_grads and not has_halves and lightning_steps.norm_is_last(trainer)):
            lightning_steps.on_clipping_by_norm(trainer, patches, self._guard.before_norm, self._guard.take_norm)
        if self._skips:
            self._logged = lightning_metrics.LoggedValues(trainer, patches)
        lightning_steps.on_backward(trainer, patches, self._check_loss)
        self._begin_history()
        lightning_checkpoints.on_save(trainer, session.fit.save_patches, self._may_save)
        if session.fit.rank == 0 and self._skips:
            self._log_exceptions_to_skipping(sharded)

    def _log_exceptions_to_skipping(self, sharded: bool) -> None:
        """Logs in which cases a bad step is not simply skipped."""
        trainer = self.session.fit.trainer
        scaler = lightning_steps.has_grad_scaler(trainer)
        if scaler:
            log.info(
                "NaNGuard leaves infinite gradients to the gradient scaler, which skips such steps in its normal work: "
                "bad are losses and running statistics that are not finite."
            )
        elif sharded and not lightning_steps.clips_by_norm(trainer):
            log.warning(
                "NaNGuard: sharded gradients are not clipped by their norm, so no rank can know of another's bad ones "
                "before the step: the run goes back instead of skipping it. %s, which changes nothing, has it skipped, "
                "for one reduction in every step.",
                "Trainer(gradient_clip_val=float('inf'))"
                if trainer.lightning_module.automatic_optimization
                else "clip_gradients(optimizer, float('inf')) before a step",
            )
        elif self._late:
            device = trainer.strategy.root_device
            unable = {
                type(each).__name__ for each in trainer.optimizers if not (can_skip(each) or on_host(each, device))
            }
            if unable:
                log.warning(
                    "NaNGuard: %s cannot skip a step on %s; by the time that a bad one is known it has happened, and "
                    "the run goes back. With fused=True it is skipped (Adam, AdamW, SGD, Adagrad).",
                    " and ".join(sorted(unable)),
                    device.type,
                )
        if self._late and lightning_callbacks.callbacks_named(trainer, "WeightAveraging"):
            log.info("WeightAveraging averages the same weights once more in a step that NaNGuard skips on the device.")

    def _begin_history(self) -> None:
        """Reads the recorded history; the very first start records which tensors are not finite, on purpose."""
        fit = self.session.fit

        def recorded() -> RollbackHistory:
            # Batches keep their numbers only if they are divided among the same number of ranks.
            self._history = RollbackHistory.read(self._file, self.session.exact.begun_with)
            return self._history

        names = self._take_over(fit.from_rank_0(recorded)).initially_nonfinite
        if names is None:
            state = lightning_strategies.named_state(fit.trainer)
            now = {name for name, tensor in state if not bool(all_finite([tensor]))}
            names = sorted(set().union(*fit.gather(now)))
            if fit.rank == 0:
                self._history.initially_nonfinite = names
                self._write()
        self._initially_nonfinite = set(names)

    def after_save(self, is_end: bool) -> None:
        """Logs how deterministic the training was, when it has ended."""
        if is_end and self.session.fit.rank == 0 and self._options.rerun == "report_determinism_stats":
            again, differing = self._counts.steps_run_again, self._counts.differing_steps
            log.info("%d of %d steps had another result when their batch was run again.", differing, again)

    def leave(self) -> None:
        """Called when the fit has ended, in any way."""
        if self._guard is not None:
            self._guard.remove()

    # -- every step ----------------------------------------------------------------------------------------------------

    def _check_loss(self, loss: torch.Tensor) -> None:
        assert self._guard is not None
        trainer, exact = self.session.fit.trainer, self.session.exact
        if exact.is_in_vain:
            return
        accumulated = trainer.accumulate_grad_batches if self.session.fit.module.automatic_optimization else 1
        self._guard.check_loss(loss, accumulated / exact.share)

    def batch_done(self) -> None:
        """Called when the optimizer steps of the batch have been made or skipped."""
        assert self._guard is not None
        trainer = self.session.fit.trainer
        self._window.end = lightning_progress.batches_begun(trainer)
        if not lightning_progress.accumulation_window_complete(trainer):
            return
        if not self.session.fit.module.automatic_optimization:
            self._guard.settle()  # a step may follow in a hook at the end of the batch
        elif self._guard.end() and self._skips:
            lightning_callbacks.skip_weight_averaging(trainer)

    def at_end_of_epoch(self) -> None:
        """Collects results, since the hooks that follow use the metrics of the whole epoch."""
        if self._skips:
            self._collect_results()

    def after_batch(self, window_complete: bool) -> None:
        """Judges the step that has ended, and begins the next window."""
        if not window_complete:
            return
        assert self._guard is not None
        trainer = self.session.fit.trainer
        self._guard.end()
        for result in self._guard.results():
            self._judge(result)
        self._samples.look()
        begun = lightning_progress.batches_begun(trainer)
        self._window = Window(trainer.current_epoch, begun, begun, trainer.global_step)
        self._guard.begin(self._window)

    def _collect_results(self) -> None:
        """Judges the windows so far; waits for pending results."""
        assert self._guard is not None
        if self._window.end > self._window.begin:  # the next window may have begun
            self._guard.end()
        for result in self._guard.results(wait=True):
            self._judge(result)

    def looks_bad(self) -> bool:
        """Whether the last steps of this rank were bad."""
        if not self._skips:
            return False
        self._collect_results()
        return self._consecutive > 0

    def before_end(self) -> bool:
        """Ends the run if its last steps were bad: no boundary is left at which the fit could roll back."""
        session = self.session
        self._collect_results()
        windows, is_lost = self._bad_windows()
        goes_back = self._options.action in ("skip", "rollback") and self._options.rerun != "validate_results"
        if is_lost or (goes_back and len(windows) >= self._options.max_consecutive):
            times = session.fit.from_rank_0(lambda: self._count(windows[-1].step, windows, True))
            if times > self._options.max_rollbacks:
                self._end(f"the last steps were bad; the run has gone back {self._options.max_rollbacks} times")
            what = "a step of the last ones was" if is_lost else f"the last {len(windows)} steps were"
            self._end(f"{what} bad; started again, the run skips its batches", is_final=False)
        if self._skips and not session.saver.may_save(session.fit.folder.checkpoints):
            self._end("the final state is not finite; started again, the run goes on from an older one", is_final=False)
        return bool(self._unanswered) and self._options.rerun == "validate_results"

    def skips_batch(self) -> bool:
        """Whether the next batch has caused a bad step before."""
        if not self._skipped:
            return False
        trainer = self.session.fit.trainer
        batch = lightning_progress.batches_begun(trainer)
        return any(begin <= batch < end for begin, end in self._skipped.get(trainer.current_epoch, ()))

    # -- bad steps -----------------------------------------------------------------------------------------------------

    def _judge(self, result: StepResult) -> None:
        session, window, options = self.session, result.tag, self._options
        if options.rerun != "disabled" or self._pending_rerun is not None:
            self._note_rerun(result)
        if self._logged is not None:
            if result.problem is not None and not result.has_happened:
                self._logged.leave_out(window.epoch, window.begin, window.end)
            self._logged.forget(window.epoch, window.end)
        if result.problem is None:
            if self._consecutive and not self._unanswered:
                self._request_pause(False, result)
                self._consecutive = 0
                self._bad.clear()
            return
        if self._lost is not None:
            return  # the weights are bad since then, and no batch is to blame
        if result.has_happened:
            self._lost = window
        if not self._consecutive:
            self._request_pause(True, result)
        self._consecutive += 1
        self._bad.append(window)
        self._last = result
        self._counts.skipped_steps += 1
        skipped = self._skips and not result.has_happened
        if session.fit.rank == 0 or result.is_here:
            what = "is skipped" if skipped else "was applied"
            log.warning("Rank %d: %s; the step after step %d %s.", session.fit.rank, result.problem, window.step, what)
            session.fit.ledger.record(
                BadStep(
                    fit=session.fit.index,
                    step=window.step,
                    epoch=window.epoch,
                    batches=[window.begin, window.end],
                    reason=result.problem,
                    skipped=skipped,
                    samples=self._samples.of(range(window.begin, window.end)),
                    loss=_written(result.loss),
                    grad_norm=_written(result.grad_norm),
                )
            )
        self._log_metrics({} if result.grad_norm is None else {"nan_guard/grad_norm": result.grad_norm})
        action = _RERUN if options.rerun == "validate_results" else self._follows(result.has_happened)
        if action is not None:
            self._unanswered.add(window)
            self._request(action, result)

    def _follows(self, has_happened: bool = False) -> str | None:
        """The event that the policy requests now; ``None`` if none."""
        if self._options.action == "stop":
            return _STOP
        if self._options.action == "warn":
            return None
        too_many = self._consecutive >= self._options.max_consecutive
        return _ROLL_BACK if self._options.action == "rollback" or has_happened or too_many else None

    def _request_pause(self, hold: bool, result: StepResult) -> None:
        """Pauses or resumes saves: while steps are bad, saves would soon remove every state from before them."""
        if not self._skips:
            return
        if result.is_common:
            self._saves_paused = hold
        elif self.session.fit.rank == 0 or result.is_here or self._requested_pause:
            self._requested_pause = hold
            payload = {"hold": hold, "asked_at": self.session.fit.steps_counted}
            self.session.fit.agreement.request(_PAUSE, payload, Needs.CLEAN | Needs.TRAINING)

    def pauses_saves(self) -> bool:
        """Whether the last steps were bad."""
        return self._saves_paused

    def _log_metrics(self, more: Mapping[str, float]) -> None:
        metrics = {
            "nan_guard/skipped_steps": float(self._counts.skipped_steps),
            "nan_guard/rollbacks": float(self._rollbacks),
            "nan_guard/differing_steps": float(self._counts.differing_steps),
            **more,
        }
        lightning_loggers.log_metrics(self.session.fit.trainer, metrics)

    def _request(self, kind: str, result: StepResult) -> None:
        # All ranks have the same result. If a single rank has a bad one nevertheless, its request counts too.
        if self.session.fit.rank == 0 or result.is_here:
            asked_at = self.session.fit.steps_counted
            payload = {"reason": result.problem, "window": astuple(result.tag), "asked_at": asked_at}
            self.session.fit.agreement.request(kind, payload, Needs.CLEAN | Needs.TRAINING)

    def _still_holds(self, event: Event) -> bool:
        """Whether no rollback has undone the cause of an event."""
        return int(event.payload["asked_at"]) >= self._rolled_back_at

    def _answer(self, event: Event, is_end: bool = False) -> None:
        """Acts on a bad step."""
        reason, window = str(event.payload["reason"]), Window(*event.payload["window"])
        if not self._still_holds(event) or window in self._answered:
            return
        self._answered.add(window)
        if event.kind == _ROLL_BACK:
            self._rollback(reason, window.step)
        elif event.kind == _STOP:
            self._save_and_end(f"{reason}, after step {window.step}")
        else:
            self._answer_rerun(reason, window, is_end)

    def _save_and_end(self, reason: str, exit_code: int = FAILED) -> None:
        self.session.saver.save("bad step")
        self._end(reason, exit_code)

    def _rollback(self, reason: str, step: int) -> None:
        session = self.session
        self._collect_results()  # results that other ranks know may not have arrived here
        windows, _ = self._bad_windows()
        if not windows or any(blames() for blames in session.fit.participants.implement(Participant.blames_replicas)):
            return
        begun_at = session.selector.loaded.step if session.selector.loaded is not None else 0
        is_suspect = session.selector.is_suspect(windows[0].step) and session.fit.from_rank_0(
            lambda: self._history.is_first(windows[0], begun_at)
        )
        # If the checkpoint is to blame, the batches are not.
        times = session.fit.from_rank_0(lambda: self._count(step, windows, not is_suspect))
        losses = session.fit.gather(None if self._last is None else self._last.loss)
        why = f"{reason}, after step {step}"
        if times > self._options.max_rollbacks:
            if not self._turns_to_global(windows[0].step):
                self._end(f"{why}; the run has gone back {self._options.max_rollbacks} times because of it")
            times = 1
        only_global = self._take_over(session.fit.from_rank_0(lambda: self._history)).of_global
        if is_suspect and (too_many := session.selector.mark_bad(why, windows[0].step)) is not None:
            self._end(too_many)
        session.rollback(windows[0].step, lambda: self._keep_going(why), only_global)

        def say() -> None:
            log.warning(
                "Rolled back to the last good checkpoint (%d of %d times): %s. Skipped batches per rank: %d.",
                times,
                self._options.max_rollbacks,
                why,
                0 if is_suspect else sum(each.end - each.begin for each in windows),
            )
            session.fit.ledger.record(
                Rollback(fit=session.fit.index, step=step, reason=reason, times=times, losses=[*map(_written, losses)])
            )

        self._log_rollback = say

    def _turns_to_global(self, step: int) -> bool:
        """Turns to global checkpoints when rollbacks to local ones are used up; returns whether it did."""
        tiers = self.session.selector
        was_local = self._options.max_rollbacks > 0 and tiers.loaded is not None and tiers.loaded.path is None

        def decide() -> bool:
            if self._history.of_global or not was_local or not tiers.has_global(step):
                return False
            self._history.turn_to_global()
            self._write()
            return True

        return self.session.fit.from_rank_0(decide)

    def _keep_going(self, why: str) -> None:
        """Called when there is no checkpoint to roll back to: ends the run, unless skipping the bad step was enough."""
        if self._lost is not None or self._consecutive >= self._options.max_consecutive:
            self._end(f"{why}; {_NOWHERE}", is_final=False)
        if self.session.fit.rank == 0:
            log.warning("%s; there is no checkpoint to go back to. Its step was skipped, and training goes on.", why)
        self._reset()

    def _reset(self) -> None:
        self._requested_pause = self._saves_paused = False
        self._consecutive, self._lost = 0, None
        self._bad.clear()
        self._unanswered.clear()

    def _bad_windows(self) -> tuple[list[Window], bool]:
        """The windows of all ranks whose steps were bad, in order; and whether one of these steps was applied.

        Windows after an applied one are left out: a rank that has not seen it has only seen its effect on the loss.
        """
        everywhere = self.session.fit.gather((self._bad, self._lost))
        lost = min((lost for _, lost in everywhere if lost is not None), default=None)
        windows = sorted({each for troubled, _ in everywhere for each in troubled})
        return [each for each in windows if lost is None or each <= lost], lost is not None

    def _count(self, step: int, windows: Sequence[Window], skip: bool) -> int:
        """Records a rollback; returns the number of rollbacks because of this problem."""
        self._history.count(step, windows, skip)
        self._write()
        return self._history.rollbacks

    def _write(self) -> None:
        try:
            self.session.fit.check_owner()
            self._history.write(self._file)
        except OSError as error:
            log.error("The history of bad steps could not be written for a restart (%s).", error)

    def _take_over(self, history: RollbackHistory) -> RollbackHistory:
        """Takes over rank 0's history on all ranks; returns it."""
        self._rollbacks, self._pending_rerun = history.rollbacks, history.suspect
        self._skipped = {}
        for window in history.skipped:
            self._skipped.setdefault(window.epoch, []).append((window.begin, window.end))
        return history

    def check_state(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises if a tensor is not finite, except for those that were not finite from the beginning."""
        tensors = [(name, tensor) for name, tensor in named if name not in self._initially_nonfinite]
        if not bool(all_finite(tensor for _, tensor in tensors)):
            raise ValueError(f"it is not finite: {', '.join(nonfinite_names(tensors))}")

    def _may_save(self, path: str) -> bool:
        trainer = self.session.fit.trainer
        if self.session.saver.may_save(path):
            return True
        checkpoint_io.keep_all(trainer)
        return False

    def after_rollback(self) -> None:
        """Forgets the bad steps from before the rollback."""
        assert self._guard is not None
        self._guard.forget()
        if self.session.fit.rank == 0:
            self._log_rollback()
        self._reset()
        self._answered.clear()  # the same steps may be bad again
        self._rolled_back_at = self.session.fit.steps_counted
        self._log_metrics({})

    def _end(self, reason: str, exit_code: int = FAILED, is_final: bool = True) -> NoReturn:
        raise TrainingDiverged(reason, exit_code, is_final)

    # -- reruns --------------------------------------------------------------------------------------------------------

    def _note_rerun(self, result: StepResult) -> None:
        """Records the result of a second run, on these devices or after a restart."""
        session, window = self.session, result.tag
        if result.first is not None:  # the second run was good
            self._write_verdict("transient fault", window, f"{result.first}; not so when the batch was run again")
        if result.reproducible is not None:
            self._counts.steps_run_again += 1
        if result.reproducible is False:
            self._counts.differing_steps += 1
            self._log_metrics({})
        pending = self._pending_rerun
        if pending is None or pending.batch != (window.epoch, window.begin) or result.problem is not None:
            return
        self._pending_rerun = None
        if devices := blamed_devices(pending, self._devices):
            self._write_verdict("faulty device", window, f"{pending.reason}, twice; not so on others", devices)
        else:
            self._write_verdict("transient fault", window, f"{pending.reason}; not so after a restart")
        if session.fit.rank == 0:
            self._history.suspect = None
            self._write()

    def _write_verdict(self, verdict: str, window: Window, reason: str, devices: Sequence[str] = ()) -> None:
        session = self.session
        if session.fit.rank == 0:
            log.warning(
                "After reruns of the step after step %d: %s%s (%s).",
                window.step,
                verdict,
                f", {', '.join(devices)}" if devices else "",
                reason,
            )
            session.fit.ledger.record(
                RerunVerdict(
                    fit=session.fit.index, step=window.step, verdict=verdict, reason=reason, devices=list(devices)
                )
            )

    def _answer_rerun(self, reason: str, window: Window, is_end: bool) -> None:
        """Decides what follows a step that was bad twice on the same devices.

        At the end of the fit, a rollback is not possible without a restart, and a skipped step needs no further action.
        """
        session, step = self.session, window.step
        decision = session.fit.from_rank_0(lambda: self._decide_rerun(window, reason))
        why = f"{reason}, after step {step}, twice on the same devices"
        if decision == "elsewhere":
            elsewhere = RerunElsewhere(why)
            log.warning("%s (exit code %d).", elsewhere, TRY_ELSEWHERE)
            nodes = {device.split(" ")[0] for device in self._devices}
            if len(nodes) > 1 and self._last is not None and self._last.is_here:
                elsewhere.suspects_this_node = "a bad step came again on this node, and is tried on others"
            raise elsewhere
        if decision == "older":
            loaded = session.selector.loaded
            if loaded is None or session.selector.mark_bad(why, loaded.step) is not None:
                self._end(f"{why}, and there are no others", RERUN_FAILED)
            if is_end:
                self._end(
                    f"{why}; started again, the run goes on from an older checkpoint", RERUN_FAILED, is_final=False
                )
            session.rollback(
                window.step, lambda: self._end(f"{why}, and from no older checkpoint is it better", RERUN_FAILED)
            )
        elif decision == "end":
            self._end(f"{why}, from an older checkpoint too, and there are no others", RERUN_FAILED)
        else:
            self._write_verdict("correct result", window, f"{reason}, on other devices too")
            follows = None if is_end else self._follows()
            if follows == _STOP:
                self._save_and_end(f"{reason}, after step {step}, on other devices too", RERUN_FAILED)
            elif follows == _ROLL_BACK:
                self._rollback(reason, step)
            else:
                self._unanswered.discard(window)

    def _decide_rerun(self, window: Window, reason: str) -> str:
        """Decides, and records what must be known after a restart."""
        history, batch = self._history, (window.epoch, window.begin)
        if any((each.epoch, each.begin) == batch for each in history.validated):
            return "correct"
        decision, history.suspect = decide_rerun(
            history.suspect, batch, self._devices, reason, self._options.max_reruns
        )
        if decision == "correct":
            history.validated.append(window)
        self._write()
        return decision

    def on_failure(self, exception: BaseException) -> str | None:
        """Halts the run if the training has diverged for good."""
        return str(exception) if isinstance(exception, TrainingDiverged) and exception.is_final else None


def _written(number: float | None) -> str | None:
    """A number for the ledger, as text: JSON has no NaN."""
    return None if number is None else f"{number:.6g}"


def _reads_cost_nothing(device: torch.device) -> bool:
    """Whether a number on ``device`` can be read without waiting for work that the host has queued."""
    return device.type == "cpu"
