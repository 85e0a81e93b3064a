"""``NaNGuard``: skips steps with bad numbers, and rolls back or ends the run if that does not help."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_resilience._arguments import checked
from lightning_resilience._lightning import (
    lightning_callbacks,
    lightning_progress,
    lightning_steps,
    lightning_strategies,
)
from lightning_resilience.detect.numerics.numerics import SpikeReference
from lightning_resilience.fit.joining import SessionCallback, session_of
from lightning_resilience.fit.numerics_policy import Action, NumericsOptions, NumericsPolicy, Rerun, StepCounts
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)

_STATE = "NaNGuard"


class NaNGuard(SessionCallback):
    """Skips steps with non-finite losses or gradients, or loss spikes, and rolls back if necessary.

    All ranks reach the same verdict before the optimizer changes anything. A skipped step leaves parameters, moments,
    weight decay and the running statistics of batch normalization bitwise unchanged. ``trainer.global_step`` and
    learning-rate schedules advance, as they do when a gradient scaler skips a step.

    After too many skipped steps in a row the run rolls back to the newest verified checkpoint
    (:class:`~lightning_resilience.LocalCheckpoint`, :class:`~lightning_resilience.AutoResume`), in the same processes,
    bitwise as a restart would. From then on the batches of the bad steps are skipped, also after a restart. If training
    diverges within the first steps after a checkpoint, that checkpoint is marked bad, and an older one is used.

    On an accelerator the host does not wait: an optimizer with ``fused=True`` skips the step on the device, and the
    host counts it some steps later. With any other optimizer the bad step has happened by then, and the run rolls back
    for every ``action`` except ``"stop"``. The same holds where sharded gradients are not clipped by norm. The start of
    the fit logs which case applies.

    Args:
        action: What follows a bad step. ``"skip"``: the step is skipped; after ``max_consecutive`` in a row the run
            rolls back. ``"rollback"``: the run rolls back at once. ``"stop"``: the step is skipped, the state is saved
            and the run ends. ``"warn"``: the step is logged and applied.
        max_consecutive: Number of steps in a row that may be skipped (KempnerForge's name and default).
        max_rollbacks: Number of rollbacks for the same bad steps, restarts included. If the last one was to a local
            checkpoint, the same number of rollbacks to checkpoints of the run directory follows. Then the run ends and
            is not retried.
        check_grads: Whether gradients are checked. Losses always are.
        spiky_loss_factor: A loss of this many times the reference is a bad step too; Megatron uses 10. ``None``: no
            limit.
        spike_window: The reference is the mean of this many accepted losses of the rank. Default: the largest of the
            first 100 losses, as in Megatron.
        rerun: ``"validate_results"``: run a bad step again, with the same random numbers. If it is bad again, run it
            after a restart on other devices. This tells a hardware fault from bad data (Megatron's rerun machine).
            ``"report_determinism_stats"``: run every batch twice and count steps with different results. Both make the
            host wait in every step, and need automatic optimization without accumulation.
        max_reruns: Number of restarts for the same batch if there are no other devices.
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
            raise ValueError("spike_window defines the reference of spiky_loss_factor: set spiky_loss_factor, too.")
        if rerun == "validate_results" and action == "warn":
            raise ValueError(
                "rerun='validate_results' decides what follows a bad step, but action='warn' lets the step happen."
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
        self._counts = StepCounts()

    @property
    def skipped_steps(self) -> int:
        """Bad steps of this fit so far."""
        return self._counts.skipped_steps

    @property
    def steps_run_again(self) -> int:
        """Steps whose batch was run twice."""
        return self._counts.steps_run_again

    @property
    def differing_steps(self) -> int:
        """Steps whose second run had another result than the first."""
        return self._counts.differing_steps

    def _participate(self, session: FitSession) -> Participant | None:
        """The policy for bad steps."""
        if (problem := _why_not(self, session.fit.trainer)) is not None:
            if not self._injected:
                raise ValueError(problem)
            if session.fit.rank == 0:
                log.warning("NaNGuard is off: %s", problem)
            return None
        self._counts = StepCounts()
        options = self._options(NumericsOptions, optional=self._injected)
        factor = self.spiky_loss_factor
        spikes = SpikeReference(factor, self.spike_window) if factor is not None else None
        return NumericsPolicy(session, options, self._counts, spikes)

    # Saved here, not as the state of a callback: a Trainer may hold several callbacks of this class, one of which acts,
    # and Lightning refuses two that have a state.

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the counts."""
        if session_of(trainer, self):
            checkpoint[_STATE] = asdict(self._counts)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restores the counts."""
        if session_of(trainer, self) and (state := checkpoint.get(_STATE)) is not None:
            for name in asdict(self._counts):
                setattr(self._counts, name, int(state[name]))


def _why_not(settings: NaNGuard, trainer: Trainer) -> str | None:
    if lightning_steps.has_grad_scaler(trainer) and settings.spiky_loss_factor is not None:
        return "in precision 16-mixed losses are scaled, and spikes cannot be seen; use bf16-mixed."
    if settings.rerun != "disabled":
        if lightning_callbacks.callbacks_named(trainer, "LocalSGD"):
            return "rerun needs ranks that train in lockstep, and with LocalSGD they do not; use rerun='disabled'."
        if lightning_progress.accumulates(trainer) or not trainer.lightning_module.automatic_optimization:
            return "rerun needs automatic optimization without accumulation; use rerun='disabled'."
        if lightning_steps.has_grad_scaler(trainer):
            return (
                "with a gradient scaler (16-mixed) infinite gradients are normal; use rerun='disabled', or bf16-mixed."
            )
        sharded = trainer.world_size > 1 and lightning_strategies.traits_of(trainer.strategy).all_ranks_write
        if settings.rerun == "validate_results" and sharded and not lightning_steps.clips_by_norm(trainer):
            return (
                "all ranks must run a batch again together. With sharded gradients they all learn of a bad step only "
                "if gradients are clipped by norm: rerun='validate_results' needs gradient_clip_val (inf changes "
                "nothing)."
            )
    if trainer.strategy.handles_gradient_accumulation:
        return f"{type(trainer.strategy).__name__} steps its optimizers in its own way, which cannot be guarded."
    return None
