"""``Preemption``: a signal stops the run in order, on all ranks together, with nothing lost."""

from __future__ import annotations

import logging
import os
import signal
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_resilience import signals
from lightning_resilience._arguments import checked, duration, shown
from lightning_resilience._lightning import lightning_signals
from lightning_resilience.agreement import Event, Needs
from lightning_resilience.fit.joining import SessionCallback, session_of
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession
from lightning_resilience.launch.output import guard_streams
from lightning_resilience.launch.schedulers import current_scheduler
from lightning_resilience.run.events import FitInterrupted, SignalReceived
from lightning_resilience.run.history import read_history
from lightning_resilience.run.run_directory import NOT_SHOWN, RUN_DIR_VARIABLE

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)

_PREEMPT = "preempt"
_LOCAL_SHARE = 0.25  # of the time that is left; the rest is for the global save
_SAFETY_FACTOR = 1.5  # storage is slowest when many jobs are stopped at once


class Preemption(SessionCallback):
    """Saves and stops the run between two batches when a scheduler sends a signal.

    The signal may reach any rank, at any time: it is noticed at once, even while the main thread is blocked in a
    collective, and all ranks stop between the same two batches, in training or in validation. They save one checkpoint
    that counts the batches done, and end with :class:`~lightning_resilience.signals.Interrupted`, a ``SystemExit``: the
    script's own code after ``fit()`` does not run on an unfinished model. A signal before the training starts takes
    effect at its first boundary. A handler that the script has set itself is called as well and is in place again
    after the fit; what it raises during the fit does not come before the stop in order.

    A second signal (later than the double delivery that schedulers produce), or the end of the grace period, ends the
    process at once; the newest checkpoint published before stands.

    Lightning's own SIGTERM handler, which broadcasts inside the handler and can deadlock DDP, is not used; its
    requeuing of Slurm jobs (``SLURMEnvironment(auto_requeue=True)``) is done from the boundary instead of from inside
    the handler.

    Args:
        signals: The signals that stop the run: names, numbers or ``signal.Signals``. Default: SIGTERM.
        grace_period_s: Time from the signal to the end of the process: a ``timedelta`` or seconds; 0: no limit. A
            launcher that knows a shorter time sets it.
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
        grace_period_s: timedelta | float = signals.DEFAULT_GRACE_PERIOD_S,
        enable_exit_handler_for_data_loader: bool = True,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(signals, (str, int)) or not isinstance(signals, Iterable):
            raise TypeError(f"signals must be a list of signals, not {shown(signals)}: give signals=['SIGTERM'], say.")
        self.signals = tuple(dict.fromkeys(_to_signal(each) for each in signals))
        if not self.signals:
            raise ValueError("signals must not be empty: there is nothing to stop the run on.")
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
            log.warning("fit() does not run in the main thread, where alone Python notices signals: Preemption is off.")
            return None
        return _Stopping(self, session, listener, signals.uninstall if installed_here else listener.unsubscribe)

    def _stop_outside_of_fit(self) -> None:
        """There is no state to save: a process that has been told to stop (launched, so it listens) just ends."""
        listener = signals.installed()
        if listener is not None and listener.received is not None:
            raise signals.Interrupted(f"interrupted by signal {int(listener.received)} outside of a fit")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What ran since the last epoch may have taken the signals away."""
        _listen_again()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What ran in it may have taken the signals away."""
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

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves nothing behind."""
        if session_of(trainer, self):
            listener = signals.installed()
            super().teardown(trainer, pl_module, stage)
            if listener is None or listener.received is None or signals.installed() is not None:
                return
            # It came when nothing was left to stop in this fit: what handled it before decides about the rest.
            if listener.received not in listener.returned:
                signal.raise_signal(listener.received)


class _Stopping(Participant):
    """What ``Preemption`` does in one fit."""

    def __init__(
        self, settings: Preemption, session: FitSession, listener: signals.SignalListener, release: Callable[[], None]
    ) -> None:
        self.settings = settings
        self.session = session
        self.protects_workers = settings.enable_exit_handler_for_data_loader
        self._listener = listener
        self._release = release
        # The terminal may go away with the signal, or before it: no progress bar ends the run for that.
        is_launched = RUN_DIR_VARIABLE in os.environ  # the launcher sees what all ranks draw
        self._release_output = guard_streams(
            session.fit.run.path / NOT_SHOWN, others_draw=session.fit.rank > 0 and not is_launched
        )
        put_back = listener.take_over, listener.handle
        lightning_signals.keep_signal_handlers(session.fit.trainer, session.fit.patches, listener.signums, *put_back)
        requeue = lightning_signals.requeue_signal(session.fit.trainer)
        listener.subscribe(
            lambda signum: _request(session, signum, requeue=signum == requeue),
            before_exit=lambda reason: _end_now(session, reason),
        )

    def start(self) -> None:
        """Warns if the grace period is too short for a save."""
        if self.session.fit.trainer.is_global_zero:
            _check_grace_period(self.session, signals.grace_period(self.settings.grace_period_s))

    def on_event_known(self, event: Event) -> None:
        """This rank will stop too: its grace period begins."""
        if event.kind == _PREEMPT:
            self._listener.start_grace_period()

    def on_event(self, event: Event) -> None:
        """Saves, and ends the fit as interrupted."""
        if event.kind == _PREEMPT:
            _stop(self.session, event)

    def leave(self) -> None:
        """Puts handlers and output back."""
        self._release()
        # The process ends by this error, and how its output ends says nothing about it; unless a script catches it.
        if (interrupted := self.session.interrupted_by()) is not None:
            weakref.finalize(interrupted, self._release_output).atexit = False
        else:
            self._release_output()


def _listen_again() -> None:
    if (listener := signals.installed()) is not None:
        listener.listen_again()


def _to_signal(value: signal.Signals | int | str) -> signal.Signals:
    try:
        found = signal.Signals[value] if isinstance(value, str) else signal.Signals(value)
    except (KeyError, ValueError):
        raise ValueError(f"{value!r} is not a signal; give signal.SIGTERM, 'SIGTERM' or 15.") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"{found.name} cannot be caught by any process.")
    return found


def _request(session: FitSession, signum: signal.Signals, requeue: bool) -> None:
    # First of all: the storage on which the ledger lies may not answer.
    session.fit.agreement.request(_PREEMPT, {"signum": int(signum), "requeue": requeue}, Needs.CLEAN)
    session.fit.ledger.record(SignalReceived(fit=session.fit.index, signum=int(signum)))


def _stop(session: FitSession, event: Event) -> None:
    trainer = session.fit.trainer
    if trainer.is_global_zero:
        log.info("Preemption detected, saving checkpoint and exiting")  # NeMo's words
    if local := session.fit.participants.implement(Participant.save_locally):
        short = trainer.strategy.broadcast(trainer.is_global_zero and _is_short_of_time(session))
        listener = signals.installed()
        within_s = _LOCAL_SHARE * (listener.seconds_left if listener is not None else signals.DEFAULT_GRACE_PERIOD_S)
        if short and local[0]("preemption", within_s) and trainer.is_global_zero:
            log.info("The state of step %d is safe in the local checkpoints of all nodes.", trainer.global_step)
    path = session.saver.save("preemption")
    step = trainer.global_step
    reason = f"signal {event.payload['signum']} on rank {event.rank}"
    if trainer.is_global_zero:
        session.outcome.write("interrupted", reason)
        session.fit.ledger.record(FitInterrupted(fit=session.fit.index, step=step, reason=reason))
        log.info(
            "Stopped at step %d because of %s; %s. Run the same command again to go on.",
            step,
            reason,
            f"saved {path}" if path is not None else "no new checkpoint could be saved",
        )
        if event.payload["requeue"]:
            _requeue()
    raise signals.Interrupted(f"interrupted at step {step} by {reason}")


def _requeue() -> None:
    scheduler = current_scheduler()
    job = f"{scheduler.title} job {scheduler.job_id}"
    if (refusal := scheduler.requeue()) is None:
        log.info("%s is requeued.", job)
    else:
        log.error("%s could not be requeued (%s). Submit it again: it resumes.", job, refusal)


def _end_now(session: FitSession, reason: str) -> None:
    """The process is about to end without having been able to stop in order."""
    session.fit.ledger.record(FitInterrupted(fit=session.fit.index, reason=reason))
    session.outcome.write("interrupted", reason)


def _is_short_of_time(session: FitSession) -> bool:
    """Whether a global save may not end before the process does: what is faster to save to goes first."""
    listener = signals.installed()
    seconds = _last_save_s(session)
    # Nobody knows how long the first one takes.
    return listener is not None and (seconds is None or listener.seconds_left < _SAFETY_FACTOR * seconds)


def _last_save_s(session: FitSession) -> float | None:
    """How long the last global save of this run took."""
    try:
        return read_history(session.fit.run.ledger).last_save_s
    except OSError as error:  # after a signal the others wait for what rank 0 makes of it
        log.warning("It cannot be read how long the last save has taken (%s).", error)
        return None


def _check_grace_period(session: FitSession, grace_period_s: float) -> None:
    seconds = _last_save_s(session)
    if seconds is not None and seconds > grace_period_s:
        log.warning(
            "The last save took %.0f s, the grace period is %.0f s: after a signal there will be no time for a save, "
            "and the run will go back to its last one%s. Give it more time, or save to faster storage.",
            seconds,
            grace_period_s,
            "" if session.selector.local is None else ", unless the same nodes still have their local checkpoints",
        )
