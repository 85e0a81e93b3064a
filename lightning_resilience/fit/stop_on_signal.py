"""A signal stops a fit in order: all ranks save and stop between the same two batches."""

from __future__ import annotations

import logging
import os
import signal
import weakref
from collections.abc import Callable

from lightning_resilience import signals
from lightning_resilience._lightning import lightning_signals
from lightning_resilience._output import guard_streams
from lightning_resilience.agreement_protocol import Event, Needs
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession
from lightning_resilience.launch.schedulers import current_scheduler
from lightning_resilience.run.deadlines import DEFAULT_GRACE_PERIOD_S
from lightning_resilience.run.events import FitInterrupted, SignalReceived
from lightning_resilience.run.history import read_history
from lightning_resilience.run.run_directory import NOT_SHOWN, RUN_DIR_VARIABLE

log = logging.getLogger("lightning_resilience.callbacks.preemption")  # users configure the callback's logger

_PREEMPT = "preempt"
_LOCAL_SHARE = 0.25  # of the time that is left; the rest is for the global save
_SAFETY_FACTOR = 1.5  # storage is slowest when many jobs are stopped at once


class StopOnSignal(Participant):
    """Saves and ends one fit after a signal to any of its ranks.

    Args:
        session: The fit.
        listener: Notices the signals.
        release: Ends the subscription to the listener.
        grace_period_s: The grace period that the user set, in seconds.
        protects_workers: Whether data-loader workers ignore the signals.
    """

    def __init__(
        self,
        session: FitSession,
        listener: signals.SignalListener,
        release: Callable[[], None],
        grace_period_s: float,
        protects_workers: bool,
    ) -> None:
        self.session = session
        self.protects_workers = protects_workers
        self._grace_period_s = grace_period_s
        self._listener = listener
        self._release = release
        # The terminal may close with the signal or before it: a progress bar must not end the run.
        is_launched = RUN_DIR_VARIABLE in os.environ  # the launcher handles progress bars of all ranks
        self._release_output = guard_streams(
            session.fit.run.path / NOT_SHOWN, others_draw=session.fit.rank > 0 and not is_launched
        )
        restore = listener.take_over, listener.handle
        lightning_signals.keep_signal_handlers(session.fit.trainer, session.fit.patches, listener.signums, *restore)
        requeue = lightning_signals.requeue_signal(session.fit.trainer)
        listener.subscribe(
            lambda signum: _request(session, signum, requeue=signum == requeue),
            before_exit=lambda reason: _end_now(session, reason),
        )

    def start(self) -> None:
        """Warns if the grace period is too short for a save."""
        if self.session.fit.trainer.is_global_zero:
            _check_grace_period(self.session, signals.grace_period(self._grace_period_s))

    def on_event_known(self, event: Event) -> None:
        """Starts the grace period of this rank."""
        if event.kind == _PREEMPT:
            self._listener.start_grace_period()

    def on_event(self, event: Event) -> None:
        """Saves, and ends the fit as interrupted."""
        if event.kind == _PREEMPT:
            _stop(self.session, event)

    def leave(self) -> None:
        """Restores output and handlers."""
        try:
            # The process ends with this exception, unless the script catches it.
            if (interrupted := self.session.interrupted_by()) is not None:
                weakref.finalize(interrupted, self._release_output).atexit = False
            else:
                self._release_output()
        finally:
            self._release()


def _request(session: FitSession, signum: signal.Signals, requeue: bool) -> None:
    # First: the storage of the ledger may not respond.
    session.fit.agreement.request(_PREEMPT, {"signum": int(signum), "requeue": requeue}, Needs.CLEAN)
    session.fit.ledger.record(SignalReceived(fit=session.fit.index, signum=int(signum)))


def _stop(session: FitSession, event: Event) -> None:
    trainer = session.fit.trainer
    if trainer.is_global_zero:
        log.info("Preemption detected, saving checkpoint and exiting")  # NeMo's words
    if local := session.fit.participants.implement(Participant.save_locally):
        short = trainer.strategy.broadcast(trainer.is_global_zero and _is_short_of_time(session))
        listener = signals.installed()
        within_s = _LOCAL_SHARE * (listener.seconds_left if listener is not None else DEFAULT_GRACE_PERIOD_S)
        if short and local[0]("preemption", within_s) and trainer.is_global_zero:
            log.info("Saved step %d to the local checkpoints of all nodes.", trainer.global_step)
    path = session.saver.save("preemption")
    step = trainer.global_step
    reason = f"signal {event.payload['signum']} on rank {event.rank}"
    if trainer.is_global_zero:
        session.outcome.write("interrupted", reason)
        session.fit.ledger.record(FitInterrupted(fit=session.fit.index, step=step, reason=reason))
        saved = f"saved {path}" if path is not None else "no new checkpoint could be saved"
        log.info("Stopped at step %d because of %s; %s. Run the same command again to go on.", step, reason, saved)
        if event.payload["requeue"]:
            _requeue()
    raise signals.Interrupted(f"interrupted at step {step} by {reason}")


def _requeue() -> None:
    scheduler = current_scheduler()
    job = f"{scheduler.title} job {scheduler.job_id}"
    if (refusal := scheduler.requeue()) is None:
        log.info("%s is requeued.", job)
    else:
        log.error("%s could not be requeued (%s). Submit it again to resume.", job, refusal)


def _end_now(session: FitSession, reason: str) -> None:
    """The process ends without a stop in order."""
    session.fit.ledger.record(FitInterrupted(fit=session.fit.index, reason=reason))
    session.outcome.write("interrupted", reason)


def _is_short_of_time(session: FitSession) -> bool:
    """Whether a global save may take longer than the time left, so that a local one goes first."""
    listener = signals.installed()
    seconds = _last_save_s(session)
    # The duration of the first save is unknown.
    return listener is not None and (seconds is None or listener.seconds_left < _SAFETY_FACTOR * seconds)


def _last_save_s(session: FitSession) -> float | None:
    """How long the last global save of this run took."""
    try:
        return read_history(session.fit.run.ledger).last_save_s
    except OSError as error:  # the other ranks wait
        log.warning("Could not read the duration of the last save (%s).", error)
        return None


def _check_grace_period(session: FitSession, grace_period_s: float) -> None:
    seconds = _last_save_s(session)
    if seconds is not None and seconds > grace_period_s:
        times = f"The last save took {seconds:.0f} s, the grace period is {grace_period_s:.0f} s"
        log.warning("%s: too short for a save after a signal. Extend it, or save to faster storage.", times)
