"""``FaultTolerance``: finds hangs, logs their cause, and ends the ranks for a restart."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_resilience._arguments import checked
from lightning_resilience._lightning import lightning_callbacks
from lightning_resilience.callbacks.auto_resume import AutoResume
from lightning_resilience.detect.hangs.rank_probe import handle_signals_again
from lightning_resilience.detect.hangs.timeouts import SectionTimeouts
from lightning_resilience.faults import SimulatedFault
from lightning_resilience.fit.hang_watch import Engine, HangWatch, HangWatchOptions
from lightning_resilience.fit.joining import SessionCallback, session_of
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class FaultTolerance(SessionCallback):
    """Finds a rank that makes no progress, logs which one and where it is stuck, and has the run restarted.

    Every rank records in shared memory which section of the run it is in, and increments a counter at every boundary
    between two batches, of training and of validation. A watchdog, one process per node, reads that: it needs neither
    the help of a rank nor its interpreter lock. The sections cover the whole fit:

    ==================  ==================================================================================
    ``setup``           from ``setup`` to the end of the first batch: restoring, position in the data, compilers
    ``step``            a whole batch: fetching it, forward, backward, collectives, optimizer, every callback
    ``validation``      the same for a validation batch
    ``checkpointing``   every save, and waiting for saves in the background
    ``out_of_section``  the rest: the ends of epochs and validations, new data-loader iterators
    ==================  ==================================================================================

    Under ``launch`` a rank is watched from its first line on. Before and after a fit it is in section ``start``, which
    counts the time in which the rank and its child processes neither compute nor read nor write.

    When a rank is overdue, the watchdog collects evidence of all ranks (Python stacks, the state in the kernel, torch's
    Flight Recorder) in ``RUN_DIR/diagnostics``, logs which rank is stuck and how, and ends the ranks. The launcher that
    started them (``lightning-resilience launch``, ``ft_launcher``, ``torchrun``) restarts them. A rank that a debugger
    holds, or that is still writing a checkpoint, is not ended. Under ``ft_launcher`` NVRx's rank monitors get the same
    sections with slightly longer timeouts: they end ranks that the watchdog could not end.

    Args:
        autoresume: When the fit has finished, create the file named in ``FAULT_TOL_FINISHED_FLAG_FILE``, if any; warn
            if the Trainer has no ``AutoResume`` (NVRx's and NeMo's name).
        calculate_timeouts: Calculate the timeouts from measured section times, as NVRx does (see
            :func:`~lightning_resilience.detect.hangs.timeouts.calculate`), and keep them in ``ft_state.json`` for the
            next job of the same size. Only where a launcher restarts ended workers: elsewhere a timeout that is too
            short would cost the run.
        simulated_fault_params: A fault to inject: a :class:`~lightning_resilience.faults.SimulatedFault`, a mapping, or
            NVRx's ``SimulatedFaultParams``.
        exp_dir: The folder of ``ft_state.json``. Default: the run directory.
        exc_handling_policy: Called with the exception that ends the fit on a rank. Returns ``"exclude_this_node"``,
            ``"shutdown_workload"``, NVRx's ``WorkloadControlRequest``, or ``None`` for the usual handling.
        section_timeouts: The timeouts: a :class:`~lightning_resilience.detect.hangs.timeouts.SectionTimeouts`, a
            mapping, or text such as ``"setup:600,step:180"`` in seconds. Default: the launcher's, otherwise
            Megatron-Bridge's values. The timeout of ``start`` is always the launcher's.
        engine: What ends hung ranks besides the watchdog: ``"nvrx"`` (NVRx's rank monitors; needs ``ft_launcher``),
            ``"watchdog"`` (nothing else), ``"auto"`` (NVRx's monitors where they run).
        health_check_interval_steps: Number of steps between two small collectives of all ranks, with a deadline
            (KempnerForge's ``nccl_health_check_interval``); 0: never.
        run_dir: The run directory, on storage that all nodes share. Default: ``resilience`` in the Trainer's
            ``default_root_dir``. Under ``launch``, its ``--run-dir`` takes precedence.

    Raises:
        ValueError: If an argument makes no sense.

    Example::

        timeouts = {"step": 300, "checkpointing": 900}
        trainer = Trainer(callbacks=[FaultTolerance(section_timeouts=timeouts), AutoResume()], max_epochs=2)
        trainer.fit(model, data)
    """

    _same_as = ("FaultToleranceCallback", "FaultToleranceSectionsCallback")

    @checked
    def __init__(
        self,
        autoresume: bool = True,
        calculate_timeouts: bool = True,
        simulated_fault_params: SimulatedFault | Mapping[str, Any] | None = None,
        exp_dir: str | os.PathLike[str] | None = None,
        exc_handling_policy: Callable[[BaseException], Any] | None = None,
        section_timeouts: SectionTimeouts | Mapping[str, timedelta | float | None] | str | None = None,
        engine: Engine = "auto",
        health_check_interval_steps: int = 0,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if health_check_interval_steps < 0:
            raise ValueError(f"health_check_interval_steps must not be negative, not {health_check_interval_steps}.")
        if section_timeouts is not None:
            section_timeouts = SectionTimeouts.of(section_timeouts)
        self.autoresume = autoresume
        self.calculate_timeouts = calculate_timeouts
        self.simulated_fault_params = SimulatedFault.parse(simulated_fault_params)
        self.exp_dir = exp_dir
        self.exc_handling_policy = exc_handling_policy
        self.section_timeouts = section_timeouts
        self.engine = engine
        self.health_check_interval_steps = health_check_interval_steps
        self.run_dir = run_dir
        if self.simulated_fault_params is None:
            self._skip_hooks(["on_before_backward"])

    def _participate(self, session: FitSession) -> Participant:
        """Checks this rank's node and starts to watch."""
        callbacks = lightning_callbacks.callbacks(session.fit.trainer)
        has_auto_resume = any(isinstance(each, AutoResume) for each in callbacks)
        return HangWatch(session, self._options(HangWatchOptions, has_auto_resume=has_auto_resume))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """The set-up of this fit has loaded a checkpoint, so its time counts for the timeouts."""
        if session_of(trainer, self) and isinstance(watch := self._participant, HangWatch):
            watch.has_loaded = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Handles the watchdog's signals again: a Trainer outside of a fit restores only Python's handlers."""
        super().teardown(trainer, pl_module, stage)
        handle_signals_again()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Injects a simulated NaN."""
        if session_of(trainer, self) and isinstance(watch := self._participant, HangWatch):
            watch.spoil_loss(loss)
