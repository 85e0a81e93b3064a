"""``NaNGuard``: a step that would spoil the model does not happen, the run goes back if it must, and always ends."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from lightning_resilience import _lightning
from lightning_resilience._arguments import checked
from lightning_resilience.agreement import Event, Needs
from lightning_resilience.detect.device_id import Place
from lightning_resilience.detect.numerics.numerics import ChangingBuffers, SpikeReference, all_finite, nonfinite_names
from lightning_resilience.detect.numerics.reruns import Suspect, faulty, weigh
from lightning_resilience.detect.numerics.rollback_history import Troubles, Window
from lightning_resilience.detect.numerics.step_guard import Reruns, StepGuard, Verdict, can_skip, on_host
from lightning_resilience.fit import checkpoint_io
from lightning_resilience.fit.participant import Participant, Stateful
from lightning_resilience.fit.session import FitSession, SessionCallback, session_of
from lightning_resilience.run.events import BadStep, RerunVerdict, Rollback
from lightning_resilience.run.exit_codes import FAILED, RERUN_FAILED, TRY_ELSEWHERE

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)

Action = Literal["skip", "rollback", "stop", "warn"]
Rerun = Literal["disabled", "validate_results", "report_determinism_stats"]

_ROLL_BACK = "rollback"
_STOP = "stop after a bad step"
_HOLD = "hold saves"
_RERUN = "rerun"
_NOWHERE = "there is no checkpoint to go back to, but from its beginning the run would pass these batches over"
_STATE = "NaNGuard"
_T = TypeVar("_T")
_COUNTS = ("skipped_steps", "steps_run_again", "differing_steps")


class TrainingDiverged(RuntimeError):
    """The training cannot go on: its numbers are not finite, or spike, and all that was allowed against it was done.

    Attributes:
        exit_code: What ``launch`` ends with; 17 after a rerun (Megatron's: a result that has been validated).
        is_final: Whether to try again would end the same way. Not where there was no checkpoint to go back to: from its
            beginning, the run passes the bad batches over.
    """

    exit_code = FAILED
    is_final = True


class RerunElsewhere(SystemExit):
    """A bad step came again on the same devices: the run ends here, to be resumed on others.

    With Megatron's exit code 16. ``launch`` restarts the workers, and ends with this code when it gives up; others
    restart what ends with it.

    Attributes:
        reason: What was bad.
        suspects_this_node: Why a launcher that can should go on without the node of this rank, one of several, where it
            began (:class:`~lightning_resilience.FaultTolerance` asks it to); empty: it need not.
    """

    suspects_this_node = ""

    def __init__(self, reason: str) -> None:
        super().__init__(TRY_ELSEWHERE)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}: to be tried on others"


class NaNGuard(SessionCallback):
    """Keeps losses and gradients that are not finite, and loss spikes, from spoiling the model.

    The verdict is that of all ranks, and comes before the optimizer changes anything. A step that is skipped is no
    step: parameters, moments, weight decay and the running statistics of batch normalisation stay bitwise what they
    were. ``trainer.global_step`` and learning-rate schedules go on, as where a gradient scaler skips a step.

    What does not end by skipping is answered by going back to the newest verified checkpoint
    (:class:`~lightning_resilience.LocalCheckpoint`, :class:`~lightning_resilience.AutoResume`), in the same processes,
    bitwise as a restart would; the batches of the bad steps are passed over from then on, also after a restart. A
    checkpoint from which the training goes wrong within its first steps is condemned, and an older one is taken.

    Where reading a number costs the host nothing (CPU) all of this happens at once. On an accelerator the host waits
    for nothing: an optimizer with ``fused=True`` skips the step on the device, and the host counts it some steps later.
    With any other a bad step has happened by then, and the run goes back, whatever ``action`` says but ``"stop"``.
    So it is where sharded gradients are not clipped by their norm: ranks could agree in time only by a collective in
    every step. Which of these holds is said at the start.

    Args:
        action: What follows a bad step. ``"skip"``: the step is skipped; after ``max_consecutive`` in a row the run
            rolls back. ``"rollback"``: the run rolls back at once. ``"stop"``: the step is skipped, the state is saved
            and the run ends. ``"warn"``: the step is logged and happens.
        max_consecutive: Number of steps in a row that may be skipped (KempnerForge's name and default).
        max_rollbacks: Number of rollbacks for the same bad steps, restarts included; if the last one was to a local
            checkpoint, as many to checkpoints of the run directory. Then the run ends and is not retried.
        check_grads: Whether gradients are checked. Losses always are.
        spiky_loss_factor: A loss of this many times the reference is a bad step too; Megatron uses 10. ``None``: no
            limit.
        spike_window: The reference is the mean of this many accepted losses of the rank. Default: the largest of the
            first 100 losses, as in Megatron.
        rerun: ``"validate_results"``: run a bad step again, with the same random numbers, and if it is bad again, after
            a restart on other devices: this tells a hardware fault from bad data (Megatron's rerun machine).
            ``"report_determinism_stats"``: run every batch twice and count steps with different results. Both make the
            host wait in every step, and need automatic optimization without accumulation.
        max_reruns: Number of restarts for the same batch where there are no other devices.
        run_dir: The run directory, on storage that all nodes share. Default: ``resilience`` in the Trainer's
            ``default_root_dir``. Under ``launch``, its ``--run-dir`` takes precedence.

    Raises:
        ValueError: If an argument makes no sense, or the optimizer or the strategy does not allow what is asked.

    Example::

        guard = NaNGuard(max_consecutive=5, spiky_loss_factor=10)
        trainer = Trainer(callbacks=[guard, AutoResume(run_dir="runs/gpt")], max_epochs=2)
        trainer.fit(model, data)
        print(guard.skipped_steps)
    """

    @checked
    def __init__(
        self,
        action: Action = "skip",
        max_consecutive: int = 10,
        max_rollbacks: int = 2,
        check_grads: bool = True,
        spiky_loss_factor: float | None = None,
        spike_window: int | None = None,
        rerun: Rerun = "disabled",
        max_reruns: int = 2,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if max_consecutive < 1:
            raise ValueError(f"max_consecutive must be at least 1, not {max_consecutive}.")
        if max_rollbacks < 0:
            raise ValueError(f"max_rollbacks must not be negative, not {max_rollbacks}.")
        if spiky_loss_factor is not None and not 1 < spiky_loss_factor < math.inf:
            raise ValueError(f"spiky_loss_factor must be above 1, not {spiky_loss_factor}; None is off.")
        if spike_window is not None and spike_window < 2:
            raise ValueError(f"spike_window must be at least 2, not {spike_window}.")
        if spike_window is not None and spiky_loss_factor is None:
            raise ValueError("spike_window says what spiky_loss_factor is a multiple of: give that too.")
        if rerun == "validate_results" and action == "warn":
            raise ValueError(
                "rerun='validate_results' decides what follows a bad step, and action='warn' lets it happen."
            )
        if max_reruns < 1:
            raise ValueError(f"max_reruns must be at least 1, not {max_reruns}.")
        self.action: Action = action
        self.max_consecutive = max_consecutive
        self.max_rollbacks = max_rollbacks
        self.check_grads = check_grads
        self.spiky_loss_factor = spiky_loss_factor
        self.spike_window = spike_window
        self.rerun: Rerun = rerun
        self.max_reruns = max_reruns
        self.run_dir = run_dir
        self.skipped_steps = 0
        """Bad steps of this fit so far."""
        self.steps_run_again = 0
        """Steps whose batch was run twice."""
        self.differing_steps = 0
        """Those of them whose second run had another result than the first."""
        self._spikes = SpikeReference(spiky_loss_factor, spike_window) if spiky_loss_factor is not None else None

    def _participate(self, session: FitSession) -> Participant | None:
        """Says what is done about a bad step."""
        if (problem := _why_not(self, session.trainer)) is not None:
            if not self._injected:
                raise ValueError(problem)
            if session.rank == 0:
                log.warning("NaNGuard is off: %s", problem)
            return None
        for name in _COUNTS:
            setattr(self, name, 0)
        if self.spiky_loss_factor is not None:
            self._spikes = SpikeReference(self.spiky_loss_factor, self.spike_window)
        return _Guarding(self, session)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Looks at the loss."""
        if isinstance(guarding := self._participant, _Guarding) and guarding.session.trainer is trainer:
            guarding.look_at(loss)

    # Not as the state of a callback: a Trainer may hold several of this class, of which one acts, and Lightning refuses
    # two that have a state.

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """What was counted so far."""
        if session_of(trainer, self):
            checkpoint[_STATE] = {name: getattr(self, name) for name in _COUNTS}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Goes on from there."""
        if session_of(trainer, self) and (state := checkpoint.get(_STATE)) is not None:
            for name in _COUNTS:
                setattr(self, name, int(state[name]))


def _why_not(settings: NaNGuard, trainer: Trainer) -> str | None:
    if _lightning.has_grad_scaler(trainer) and settings.spiky_loss_factor is not None:
        return "in precision 16-mixed losses are scaled, and spikes cannot be seen; use bf16-mixed."
    if settings.rerun != "disabled":
        if _lightning.accumulates(trainer) or not trainer.lightning_module.automatic_optimization:
            return "rerun needs automatic optimization without accumulation; use rerun='disabled'."
        if _lightning.has_grad_scaler(trainer):
            return (
                "with a gradient scaler (16-mixed) infinite gradients are normal; use rerun='disabled', or bf16-mixed."
            )
        sharded = trainer.world_size > 1 and _lightning.traits_of(trainer.strategy).all_ranks_write
        if settings.rerun == "validate_results" and sharded and not _lightning.clips_by_norm(trainer):
            return (
                "a batch is run again by all ranks or by none, and with sharded gradients they all know of a bad step "
                "only if gradients are clipped by their norm: rerun='validate_results' needs gradient_clip_val (inf "
                "changes nothing)."
            )
    if trainer.strategy.handles_gradient_accumulation:
        return f"{type(trainer.strategy).__name__} steps its optimizers in a way of its own, which cannot be guarded."
    return None


class _Guarding(Participant):
    """What ``NaNGuard`` does in one fit."""

    def __init__(self, settings: NaNGuard, session: FitSession) -> None:
        self.settings = settings
        self.session = session
        self._file = session.fit.path / "nan_guard.json"
        self._troubles = Troubles(session.trainer.world_size)
        """Rank 0's, read once: what cannot be written holds at least until the process ends."""
        self._prevents = settings.action != "warn"
        self._guard: StepGuard | None = None
        self._window = Window(0, 0, 0, 0)
        self._samples = _lightning.SampleIds(session.trainer)
        self._logged: _lightning.LoggedValues | None = None
        self._consecutive = 0
        self._troubled: list[Window] = []
        self._asked_to_hold = False
        self._loss: float | None = None
        """Of the last bad step, on this rank."""
        self._is_mine = False
        """Whether the last bad step is known to have begun on this rank."""
        self._say: Callable[[], None] = lambda: None
        self._late = settings.rerun == "disabled" and not _reads_cost_nothing(session.trainer.strategy.root_device)
        """Whether verdicts come some steps later, since the host must not wait for them."""
        self._lost: Window | None = None
        """The first window whose step was bad and has happened, on this rank."""
        self._waiting = False
        """Whether the fit will go back: what was good before must not be lost until then."""
        self._went_back_at = 0
        self._asked = -1
        self._answered = -1
        self._rollbacks = 0
        self._born: set[str] = set()
        """What was not finite from the beginning, and is meant so: masks of attention, say."""
        self._dropped: dict[int, list[tuple[int, int]]] = {}
        self._devices: list[str] = []
        """Of all ranks."""
        self._suspect: Suspect | None = None
        """The batch whose step was bad twice on the same devices, and is to be tried on others."""
        self._is_paused = False

    def extra_state(self) -> Mapping[str, Stateful]:
        """What losses were like, of each rank its own."""
        return {} if self.settings._spikes is None else {"losses": self.settings._spikes}

    def on_event(self, event: Event) -> None:
        """Goes back, stops, decides what a bad second run means, or pauses saves."""
        if event.kind == _ROLL_BACK:
            self._roll_back(event)
        elif event.kind == _STOP:
            self._stop(event)
        elif event.kind == _RERUN:
            self._decide(event)
        elif event.kind == _HOLD:
            self._hold_as_asked(event)

    def on_event_at_end(self, event: Event) -> bool:
        """The same for what a bad second run means; what else was asked for is nothing at the end."""
        if event.kind != _RERUN:
            return False
        self._decide(event, is_end=True)
        return True

    def start(self) -> None:
        """The training begins."""
        session, trainer, settings = self.session, self.session.trainer, self.settings
        if self._prevents and any(isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers):
            problem = (
                "LBFGS changes the parameters while it evaluates them, and a step of it cannot be skipped: "
                "NaNGuard(action='warn') only reports."
            )
            if not settings._injected:
                raise ValueError(problem)
            if session.rank == 0:
                log.warning("NaNGuard is off: %s", problem)
            session.participants.withdraw(self)
            return
        several = trainer.world_size > 1
        sharded = several and _lightning.traits_of(trainer.strategy).all_ranks_write
        self._guard = StepGuard(
            lambda: trainer.optimizers,
            trainer.lightning_module.named_parameters,
            ChangingBuffers(trainer.lightning_module),
            trainer.strategy.root_device,
            prevents=self._prevents,
            late=self._late,
            tells=several and not sharded,
            sharded=sharded,
            checks_grads=settings.check_grads,
            spikes=settings._spikes,
            judges=not _lightning.has_grad_scaler(trainer),
            reruns=self._reruns(),
        )
        if sharded:
            _lightning.on_clipping_by_norm(trainer, session.patches, self._guard.before_norm, self._guard.take_norm)
        if settings.rerun == "validate_results":
            self._devices = session.gather(str(Place.of(trainer.strategy.root_device)))
        if self._prevents:
            self._logged = _lightning.LoggedValues(trainer, session.patches)
        _lightning.on_batch_done(trainer, session.patches, self._batch_done)
        self._born = self._unfit_from_birth()
        _lightning.on_save(trainer, session.save_patches, self._may_save)
        self._read()
        if session.rank == 0 and self._prevents:
            self._say_what_is_special(sharded)

    def _say_what_is_special(self, sharded: bool) -> None:
        """Where a bad step is not simply skipped."""
        trainer = self.session.trainer
        scaler = _lightning.has_grad_scaler(trainer)
        if scaler:
            log.info(
                "NaNGuard leaves infinite gradients to the gradient scaler, which skips such steps in its normal work: "
                "bad are losses and running statistics that are not finite."
            )
        elif sharded and not _lightning.clips_by_norm(trainer):
            log.warning(
                "NaNGuard: sharded gradients are not clipped by their norm, so no rank can know of another's bad ones "
                "before the step: the run goes back instead of skipping it. %s, which changes nothing, has it skipped, "
                "for one reduction in every step.",
                "Trainer(gradient_clip_val=float('inf'))"
                if trainer.lightning_module.automatic_optimization
                else "clip_gradients(optimizer, float('inf')) before a step",
            )
        elif self._late and (names := self._unable_to_skip()):
            log.warning(
                "NaNGuard: %s cannot skip a step on %s; by the time that a bad one is known it has happened, and the "
                "run goes back. With fused=True it is skipped (Adam, AdamW, SGD, Adagrad).",
                names,
                trainer.strategy.root_device.type,
            )
        if self._late and _lightning.callbacks_named(trainer, ("WeightAveraging",)):
            log.info("WeightAveraging averages the same weights once more in a step that NaNGuard skips on the device.")

    def _unable_to_skip(self) -> str:
        """The optimizers that cannot leave out a step on their device, by their names."""
        trainer = self.session.trainer
        device = trainer.strategy.root_device
        names = {type(each).__name__ for each in trainer.optimizers if not can_skip(each) and not on_host(each, device)}
        return " and ".join(sorted(names))

    def _unfit_from_birth(self) -> set[str]:
        """What is not finite when the fit begins for the first time: a checkpoint may bring along what should be."""
        session = self.session
        now = {name for name, tensor in _lightning.named_state(session.trainer) if not bool(all_finite([tensor]))}
        names = sorted(set().union(*session.gather(now)))

        def recorded() -> list[str]:
            self._troubles = Troubles.read(self._file, session.trainer.world_size)
            if self._troubles.unfit_from_birth is None:
                self._troubles.unfit_from_birth = names
                self._write()
            return self._troubles.unfit_from_birth

        return set(session.from_rank_0(recorded))

    def _reruns(self) -> Reruns | None:
        if self.settings.rerun == "disabled":
            return None
        always = self.settings.rerun == "report_determinism_stats"
        return Reruns(self.session.get_random_state, self.session.set_random_state, always)

    def after_save(self, is_end: bool) -> None:
        """Says how deterministic the training was, when it has ended."""
        settings = self.settings
        if is_end and self.session.rank == 0 and settings.rerun == "report_determinism_stats":
            again, differing = settings.steps_run_again, settings.differing_steps
            log.info("%d of %d steps had another result when their batch was run again.", differing, again)

    def leave(self) -> None:
        """The fit has ended, one way or another."""
        if self._guard is not None:
            self._guard.remove()

    # -- every step ----------------------------------------------------------------------------------------------------

    def look_at(self, loss: torch.Tensor) -> None:
        """Before a backward pass."""
        if self._guard is not None:
            automatic = self.session.module.automatic_optimization
            self._guard.look_at(loss, self.session.trainer.accumulate_grad_batches if automatic else 1)

    def _batch_done(self) -> None:
        assert self._guard is not None
        trainer = self.session.trainer
        self._window.end = _lightning.batches_begun(trainer)
        if not _lightning.accumulation_window_complete(trainer):
            return
        if not self.session.module.automatic_optimization:  # there may be a step to come in the hook of the batch's end
            self._guard.settle()
        elif self._guard.end() and self._prevents:
            _lightning.hold_weight_averaging(trainer)

    def at_end_of_epoch(self) -> None:
        """The hooks to come look at the metrics of the whole epoch."""
        if self._prevents:
            self._learn()

    def after_batch(self, window_complete: bool) -> None:
        """A step has ended, and the next one begins."""
        if not window_complete:
            return
        assert self._guard is not None
        trainer = self.session.trainer
        self._guard.end()
        self._learn(wait=False)
        self._samples.look()
        begun = _lightning.batches_begun(trainer)
        self._window = Window(trainer.current_epoch, begun, begun, trainer.global_step)
        self._guard.begin(self._window)

    def _learn(self, wait: bool = True) -> None:
        """Takes note of what has become of the windows so far; waits for what is still on its way if that is asked."""
        assert self._guard is not None
        if self._window.end > self._window.begin:  # the next one may have begun
            self._guard.end()
        for verdict in self._guard.verdicts(wait):
            self._judge(verdict)

    def looks_bad(self) -> bool:
        """Whether the last steps of this rank were bad."""
        if not self._prevents:
            return False
        self._learn()
        return self._consecutive > 0

    def before_end(self) -> bool:
        """There is no boundary any more at which the fit could go back."""
        session = self.session
        self._learn()
        windows, is_lost = self._troubled_anywhere()
        if is_lost:
            if session.rank == 0:
                self._count(windows[-1].step, windows, True)
            self._end("a step of the last ones was bad; started again, the run passes its batches over", is_final=False)
        if self._prevents and not session.saver.may_save(session.fit.checkpoints):
            self._end("the final state is not finite; started again, the run goes on from an older one", is_final=False)
        return self._waiting and self.settings.rerun == "validate_results"

    def skips_batch(self) -> bool:
        """Whether the next batch has made a step bad before."""
        if not self._dropped:
            return False
        trainer = self.session.trainer
        batch = _lightning.batches_begun(trainer)
        return any(begin <= batch < end for begin, end in self._dropped.get(trainer.current_epoch, ()))

    # -- bad steps -----------------------------------------------------------------------------------------------------

    def _judge(self, verdict: Verdict) -> None:
        settings, session, window = self.settings, self.session, verdict.tag
        if settings.rerun != "disabled" or self._suspect is not None:
            self._note_rerun(verdict)
        if self._logged is not None:
            if verdict.problem is not None and not verdict.has_happened:
                self._logged.leave_out(window.epoch, window.begin, window.end)
            self._logged.forget(window.epoch, window.end)
        if verdict.problem is None:
            if self._consecutive and not self._waiting:
                self._have_held(False, verdict)
                self._consecutive = 0
                self._troubled.clear()
            return
        if self._lost is not None:
            return  # the weights are bad since then, and no batch is to blame
        if verdict.has_happened:
            self._lost = window
        if not self._consecutive:
            self._have_held(True, verdict)
        self._consecutive += 1
        self._troubled.append(window)
        self._is_mine, self._loss = verdict.is_here, verdict.loss
        settings.skipped_steps += 1
        prevented = self._prevents and not verdict.has_happened
        action = "is skipped" if prevented else "has happened"
        if session.rank == 0 or verdict.is_here:
            log.warning("Rank %d: %s; the step after step %d %s.", session.rank, verdict.problem, window.step, action)
            session.ledger.record(
                BadStep(
                    fit=session.index,
                    step=window.step,
                    epoch=window.epoch,
                    batches=[window.begin, window.end],
                    reason=verdict.problem,
                    skipped=prevented,
                    samples=self._samples.of(range(window.begin, window.end)),
                    loss=_written(verdict.loss),
                    grad_norm=_written(verdict.grad_norm),
                )
            )
        self._report({} if verdict.grad_norm is None else {"nan_guard/grad_norm": verdict.grad_norm})
        if settings.rerun == "validate_results":
            self._waiting = True
            self._ask(_RERUN, verdict)
        elif (follows := self._follows(verdict.has_happened)) is not None:
            self._waiting = True
            self._ask(follows, verdict)

    def _follows(self, has_happened: bool = False) -> str | None:
        """What the policy has all ranks do now."""
        settings = self.settings
        if settings.action == "stop":
            return _STOP
        if settings.action == "warn":
            return None
        too_many = self._consecutive >= settings.max_consecutive
        return _ROLL_BACK if settings.action == "rollback" or has_happened or too_many else None

    def _have_held(self, hold: bool, verdict: Verdict) -> None:
        """While steps are bad nothing is saved: soon there would be no state left from before the first of them."""
        if not self._prevents:
            return
        if verdict.is_common:
            self._hold(hold)
        elif self.session.rank == 0 or verdict.is_here or self._asked_to_hold:
            self._asked_to_hold = hold
            payload = {"hold": hold, "asked_at": self.session.steps_counted}
            self.session.agreement.request(_HOLD, payload, Needs.CLEAN | Needs.TRAINING)

    def _hold_as_asked(self, event: Event) -> None:
        if int(event.payload["asked_at"]) >= self._went_back_at:  # not because of what has been undone meanwhile
            self._hold(bool(event.payload["hold"]))

    def _hold(self, hold: bool) -> None:
        self._is_paused = hold

    def pauses_saves(self) -> bool:
        """Whether the last steps were bad."""
        return self._is_paused

    def _report(self, more: Mapping[str, float] | None = None) -> None:
        trainer = self.session.trainer
        if trainer.is_global_zero:
            metrics = {
                "nan_guard/skipped_steps": float(self.settings.skipped_steps),
                "nan_guard/rollbacks": float(self._rollbacks),
                "nan_guard/differing_steps": float(self.settings.differing_steps),
                **(more or {}),
            }
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=_lightning.logged_step(trainer))

    def _ask(self, kind: str, verdict: Verdict) -> None:
        # All ranks have the same verdict. Should one of them alone have a bad one after all, its word counts too.
        if self._asked > self._answered or not (self.session.rank == 0 or verdict.is_here):
            return
        self._asked = self.session.steps_counted
        payload = {"reason": verdict.problem, "step": verdict.tag.step, "asked_at": self._asked}
        self.session.agreement.request(kind, payload, Needs.CLEAN | Needs.TRAINING)

    def _is_news(self, event: Event) -> bool:
        """Whether an event is not answered yet: several ranks may have asked."""
        if int(event.payload["asked_at"]) <= self._answered:
            return False
        self._answered = self.session.steps_counted
        return True

    def _stop(self, event: Event) -> None:
        if self._is_news(event):
            self._save_and_end(f"{event.payload['reason']}, after step {event.payload['step']}")

    def _save_and_end(self, reason: str) -> None:
        self.session.saver.save("bad step")
        self._end(reason)

    def _roll_back(self, event: Event) -> None:
        if self._is_news(event):
            self._go_back(str(event.payload["reason"]), int(event.payload["step"]))

    def _go_back(self, reason: str, step: int) -> None:
        session, settings = self.session, self.settings
        self._learn()  # what the others know may still be on its way to this rank
        windows, _ = self._troubled_anywhere()
        if not windows or any(blames() for blames in session.participants.implement(Participant.blames_replicas)):
            return
        begun_at = session.tiers.loaded.step if session.tiers.loaded is not None else 0
        is_suspect = session.tiers.is_suspect(windows[0].step) and self._from_rank_0(
            lambda: self._troubles.is_first(windows[0], begun_at)
        )
        # Where the checkpoint is to blame, the batches are not.
        times = self._from_rank_0(lambda: self._count(step, windows, not is_suspect))
        losses = session.gather(self._loss)
        why = f"{reason}, after step {step}"
        if times > settings.max_rollbacks:
            if not self._turns_to_global(windows[0].step):
                self._end(f"{why}; the run has gone back {settings.max_rollbacks} times because of it")
            times = 1
        self._read()
        if is_suspect and (too_many := session.tiers.mark_bad_together(why, windows[0].step)) is not None:
            self._end(too_many)
        only_global = self._from_rank_0(lambda: self._troubles.of_global)
        session.go_back(windows[0].step, lambda: self._stay(f"{why}; {_NOWHERE}"), only_global)

        def say() -> None:
            log.warning(
                "Gone back to the newest good checkpoint (%d of %d times): %s. Batches passed over, of each rank: %d.",
                times,
                settings.max_rollbacks,
                why,
                0 if is_suspect else sum(each.end - each.begin for each in windows),
            )
            session.ledger.record(
                Rollback(fit=session.index, step=step, reason=reason, times=times, losses=[*map(_written, losses)])
            )

        self._say = say

    def _turns_to_global(self, step: int) -> bool:
        """Whether a global checkpoint from before ``step`` is left that the local ones have not let have its turn."""
        tiers = self.session.tiers
        was_local = self.settings.max_rollbacks > 0 and tiers.loaded is not None and tiers.loaded.path is None

        def decide() -> bool:
            if self._troubles.of_global or not was_local or not tiers.has_global(step):
                return False
            self._troubles.turn_to_global()
            self._write()
            return True

        return self.session.from_rank_0(decide)

    def _stay(self, why: str) -> None:
        """There is nowhere to go back to."""
        if self._lost is not None or self._consecutive >= self.settings.max_consecutive:
            self._end(why, is_final=False)
        self._waiting = False  # the bad step was skipped, and that has to do
        self._consecutive = 0
        self._troubled.clear()
        self._hold(False)

    def _from_rank_0(self, decide: Callable[[], _T]) -> _T:
        """What rank 0, which alone knows the file, decides for all."""
        return checkpoint_io.from_rank_zero(self.session.trainer.strategy, decide)

    def _troubled_anywhere(self) -> tuple[list[Window], bool]:
        """The windows whose steps were bad, in order, of all ranks; and whether one of them has happened.

        None after that one: where only one rank has seen it, the others have seen what became of their losses.
        """
        everywhere = self.session.gather((self._troubled, self._lost))
        lost = min((lost for _, lost in everywhere if lost is not None), default=None)
        windows = sorted({each for troubled, _ in everywhere for each in troubled})
        return [each for each in windows if lost is None or each <= lost], lost is not None

    def _count(self, step: int, windows: Sequence[Window], pass_over: bool) -> int:
        """Writes down that the run goes back; returns how many times it has because of this trouble."""
        self._troubles.count(step, windows, pass_over)
        self._write()
        return self._troubles.rollbacks

    def _write(self) -> None:
        try:
            self.session.check_owner()
            self._troubles.write(self._file)
        except OSError as error:
            log.error("What a restart must know of bad steps could not be written (%s).", error)

    def _read(self) -> None:
        """On all ranks, what rank 0 knows."""
        troubles: Troubles = self.session.trainer.strategy.broadcast(self._troubles)
        self._rollbacks, self._suspect = troubles.rollbacks, troubles.suspect
        self._dropped = {}
        for window in troubles.passed_over:
            self._dropped.setdefault(window.epoch, []).append((window.begin, window.end))

    def check_state(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What is not finite, and was so from the beginning, may be saved."""
        tensors = [(name, tensor) for name, tensor in named if name not in self._born]
        if not bool(all_finite(tensor for _, tensor in tensors)):
            raise ValueError(f"it is not finite: {', '.join(nonfinite_names(tensors))}")

    def _may_save(self, path: str) -> bool:
        trainer = self.session.trainer
        if self.session.saver.may_save(path):
            return True
        checkpoint_io.keep_all(trainer)
        return False

    def after_rollback(self) -> None:
        """Nothing is bad any more."""
        assert self._guard is not None
        self._guard.forget()
        self._consecutive = 0
        if self.session.rank == 0:
            self._say()
        self._waiting, self._lost, self._asked_to_hold = False, None, False
        self._went_back_at = self.session.steps_counted
        self._troubled.clear()
        self._hold(False)
        self._report()

    def _end(self, reason: str, exit_code: int = FAILED, is_final: bool = True) -> None:
        diverged = TrainingDiverged(reason)
        diverged.exit_code, diverged.is_final = exit_code, is_final
        raise diverged

    # -- reruns --------------------------------------------------------------------------------------------------------

    def _note_rerun(self, verdict: Verdict) -> None:
        """What a second run, here or elsewhere, has shown."""
        session, window = self.session, verdict.tag
        if verdict.first is not None:  # and then it was good
            self._write_verdict("transient fault", window, f"{verdict.first}; not so when the batch was run again")
        if verdict.reproducible is not None:
            self.settings.steps_run_again += 1
        if verdict.reproducible is False:
            self.settings.differing_steps += 1
            self._report()
        suspect, batch = self._suspect, (window.epoch, window.begin)
        if suspect is None or suspect.batch != batch or verdict.problem is not None:
            return
        self._suspect = None
        if devices := faulty(suspect, self._devices):
            self._write_verdict("faulty device", window, f"{suspect.reason}, twice; not so on others", devices)
        else:
            self._write_verdict("transient fault", window, f"{suspect.reason}; not so after a restart")
        if session.rank == 0:
            self._troubles.suspect = None
            self._write()

    def _write_verdict(self, verdict: str, window: Window, reason: str, devices: Sequence[str] = ()) -> None:
        session = self.session
        if session.rank == 0:
            log.warning(
                "After reruns of the step after step %d: %s%s (%s).",
                window.step,
                verdict,
                f", {', '.join(devices)}" if devices else "",
                reason,
            )
            session.ledger.record(
                RerunVerdict(fit=session.index, step=window.step, verdict=verdict, reason=reason, devices=list(devices))
            )

    def _decide(self, event: Event, is_end: bool = False) -> None:
        """A step was bad twice on the same devices.

        At the end of the fit there is nothing to go back to without a restart, and a step that is skipped is done with.
        """
        if not self._is_news(event):
            return
        session = self.session
        window = self._troubled_anywhere()[0][0]
        reason, step = str(event.payload["reason"]), int(event.payload["step"])
        decision = self._from_rank_0(lambda: self._weigh(window, reason))
        why = f"{reason}, after step {step}, twice on the same devices"
        if decision == "elsewhere":
            elsewhere = RerunElsewhere(why)
            log.warning("%s (exit code %d).", elsewhere, TRY_ELSEWHERE)
            nodes = {device.split(" ")[0] for device in self._devices}
            if len(nodes) > 1 and self._is_mine:
                elsewhere.suspects_this_node = "a bad step came again on this node, and is tried on others"
            raise elsewhere
        if decision == "older":
            loaded = session.tiers.loaded
            if loaded is None or session.tiers.mark_bad_together(why, loaded.step) is not None:
                self._end(f"{why}, and there are no others", RERUN_FAILED)
            if is_end:
                self._end(
                    f"{why}; started again, the run goes on from an older checkpoint",
                    RERUN_FAILED,
                    is_final=False,
                )
            session.go_back(
                window.step,
                lambda: self._end(f"{why}, and from no older checkpoint is it better", RERUN_FAILED),
            )
        elif decision == "end":
            self._end(f"{why}, from an older checkpoint too, and there are no others", RERUN_FAILED)
        else:
            self._write_verdict("correct result", window, f"{reason}, on other devices too")
            follows = None if is_end else self._follows()
            if follows == _STOP:
                session.saver.save("bad step")
                self._end(f"{reason}, after step {step}, on other devices too", RERUN_FAILED)
            elif follows == _ROLL_BACK:
                self._go_back(reason, step)
            else:
                self._waiting = False

    def _weigh(self, window: Window, reason: str) -> str:
        """Decides, and writes down what must be known after a restart."""
        troubles, batch = self._troubles, (window.epoch, window.begin)
        if any((each.epoch, each.begin) == batch for each in troubles.validated):
            return "correct"
        decision, troubles.suspect = weigh(troubles.suspect, batch, self._devices, reason, self.settings.max_reruns)
        if decision == "correct":
            troubles.validated.append(window)
        self._write()
        return decision

    def on_failure(self, exception: BaseException) -> str | None:
        """A training that has diverged for good halts the run."""
        return str(exception) if isinstance(exception, TrainingDiverged) and exception.is_final else None


def _written(number: float | None) -> str | None:
    """In the ledger, since JSON knows no NaN."""
    return None if number is None else f"{number:.6g}"


def _reads_cost_nothing(device: torch.device) -> bool:
    """Whether a number on ``device`` can be read without waiting for work that the host is ahead of."""
    return device.type == "cpu"
