"""``Preemption``: on a signal, all ranks save one checkpoint and stop together."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_resilience import signals
from lightning_resilience._arguments import checked, duration, shown
from lightning_resilience._lightning import lightning_signals
from lightning_resilience.fit.joining import SessionCallback, session_of
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession
from lightning_resilience.fit.stop_on_signal import StopOnSignal
from lightning_resilience.run.deadlines import DEFAULT_GRACE_PERIOD_S

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)


class Preemption(SessionCallback):
    """Saves and stops the run between two batches when a scheduler sends a signal.

    The signal may reach any rank, at any time, even while its main thread is blocked in a collective. All ranks stop
    between the same two batches, in training or in validation, save one checkpoint, and end with
    :class:`~lightning_resilience.signals.Interrupted`, a ``SystemExit``: the script's code after ``fit()`` does not run
    on an unfinished model. A signal before the training starts takes effect at its first boundary. A second signal,
    more than two seconds later, or the end of the grace period ends the process at once; the newest checkpoint remains.

    A handler that the script has set is called as well and is restored after the fit; an exception that it raises
    during the fit is held back until the run has stopped. Lightning's own SIGTERM handler, which broadcasts inside the
    handler and can deadlock DDP, is not used; its requeuing of Slurm jobs (``SLURMEnvironment(auto_requeue=True)``)
    happens at the boundary.

    Args:
        signals: The signals that stop the run: names, numbers or ``signal.Signals``. Default: SIGTERM.
        grace_period_s: Time from the signal to the end of the process: a ``timedelta`` or seconds; 0: no limit. Under
            ``launch`` its ``--grace-period`` applies, or a shorter time that is given here.
        enable_exit_handler_for_data_loader: Whether data-loader workers ignore the signals, so that a signal to the
            whole process group does not fail the step in progress (Megatron-Bridge's name).
        run_dir: The run directory, on storage that all nodes share. Default: ``resilience`` in the Trainer's
            ``default_root_dir``. Under ``launch``, its ``--run-dir`` takes precedence.

    Raises:
        ValueError: If an argument makes no sense.

    Example::

        callbacks = [Preemption(signals=["SIGTERM", "SIGUSR1"], grace_period_s=120), AutoResume(run_dir="runs/gpt")]
        trainer = Trainer(callbacks=callbacks, max_epochs=2)
        trainer.fit(model, data)  # SIGTERM to any rank: saved, and exit code 75 under launch
    """

    _same_as = ("PreemptionCallback",)

    @checked
    def __init__(
        self,
        signals: Sequence[signal.Signals | int | str] = (signal.SIGTERM,),
        grace_period_s: timedelta | float = DEFAULT_GRACE_PERIOD_S,
        enable_exit_handler_for_data_loader: bool = True,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(signals, (str, int)) or not isinstance(signals, Iterable):
            raise TypeError(f"signals must be a list of signals, not {shown(signals)}: e.g. signals=['SIGTERM'].")
        self.signals = tuple(dict.fromkeys(_to_signal(each) for each in signals))
        if not self.signals:
            raise ValueError("signals must not be empty: no signal would stop the run.")
        self.grace_period_s = duration("grace_period_s", grace_period_s).total_seconds()
        if self.grace_period_s < 0:
            raise ValueError(f"grace_period_s must not be negative, not {grace_period_s}; 0 is no limit.")
        self.enable_exit_handler_for_data_loader = enable_exit_handler_for_data_loader
        self.run_dir = run_dir

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Joins the fit's session."""
        super().setup(trainer, pl_module, stage)
        if session_of(trainer, self) is None:
            self._stop_outside_of_fit()

    def _participate(self, session: FitSession) -> Participant | None:
        """Starts to listen for signals."""
        requeue = lightning_signals.requeue_signal(session.fit.trainer)
        signums = {*self.signals, *([requeue] if requeue is not None else [])}
        installed_here = signals.installed() is None
        listener = signals.install(sorted(signums), signals.grace_period(self.grace_period_s))
        if listener is None:
            log.warning("fit() does not run in the main thread, which Python requires for signals: Preemption is off.")
            return None
        release = signals.uninstall if installed_here else listener.unsubscribe
        return StopOnSignal(
            session,
            listener,
            release,
            DEFAULT_GRACE_PERIOD_S if self._injected else self.grace_period_s,  # a launch has its own option
            protects_workers=self.enable_exit_handler_for_data_loader,
        )

    def _stop_outside_of_fit(self) -> None:
        """Ends the process after a signal: outside of a fit there is no state to save."""
        listener = signals.installed()
        if listener is not None and listener.received is not None:
            raise signals.Interrupted(f"interrupted by signal {int(listener.received)} outside of a fit")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listens again: other code may have replaced the wakeup descriptor."""
        _listen_again()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listens again, for the same reason."""
        _listen_again()

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Stops ``trainer.validate``; within a fit validation batches are boundaries."""
        if trainer.state.fn != "fit":
            self._stop_outside_of_fit()

    def on_test_batch_start(self, *args: Any) -> None:
        """Stops ``trainer.test``."""
        self._stop_outside_of_fit()

    def on_predict_batch_start(self, *args: Any) -> None:
        """Stops ``trainer.predict``."""
        self._stop_outside_of_fit()


def _listen_again() -> None:
    if (listener := signals.installed()) is not None:
        listener.listen_again()


_SENT_FOR_ERRORS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def _to_signal(value: signal.Signals | int | str) -> signal.Signals:
    try:
        if isinstance(value, bool):
            raise ValueError
        found = signal.Signals[value] if isinstance(value, str) else signal.Signals(value)
    except (KeyError, ValueError):
        raise ValueError(f"{value!r} is not a signal; give signal.SIGTERM, 'SIGTERM' or 15.") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"{found.name} cannot be caught by any process.")
    if found in _SENT_FOR_ERRORS:
        raise ValueError(
            f"{found.name} means that this process has failed, and then nothing can be saved: give another signal."
        )
    if found is signal.SIGCHLD:
        raise ValueError("SIGCHLD means that a child process has ended, such as a data worker: give another signal.")
    return found
