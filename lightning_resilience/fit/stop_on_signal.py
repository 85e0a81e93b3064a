"""Stops a fit after a signal: all ranks save and stop between the same two batches."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import weakref
from collections.abc import Callable
from functools import partial

from lightning_resilience import signals
from lightning_resilience._lightning import lightning_signals
from lightning_resilience._output import guard_streams
from lightning_resilience.agreement_protocol import Event, Needs
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession
from lightning_resilience.launch import membership
from lightning_resilience.launch.schedulers import current_scheduler
from lightning_resilience.run.deadlines import DEFAULT_GRACE_PERIOD_S, STOP_IS_DECIDED_WITHIN_S
from lightning_resilience.run.events import FitInterrupted, SignalReceived
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
        self._before_s = listener.grace_period_s
        if self._asks_for_time:  # a launch has set its own time
            listener.grace_period_s = min(self._before_s, grace_period_s or math.inf)
        # The terminal may close with the signal or before it: a progress bar must not end the run.
        is_launched = RUN_DIR_VARIABLE in os.environ  # the launcher handles progress bars of all ranks
        self._release_output = guard_streams(
            session.fit.run.path / NOT_SHOWN, others_draw=session.fit.rank > 0 and not is_launched
        )
        restore = listener.take_over, listener.handle
        lightning_signals.keep_signal_handlers(session.fit.trainer, session.fit.patches, listener.signums, *restore)
        self._requeue_signal = lightning_signals.requeue_signal(session.fit.trainer)
        self._line = membership.current()
        session.when_left = self._decide_about_late_signal
        listener.subscribe(self._on_signal, before_exit=self._end_now)
        if self._line is not None:
            self._line.stop = partial(self._request, signal.SIGTERM)
            if self._line.is_stopping:
                self._line.stop()

    def start(self) -> None:
        """Warns if the grace period is too short for a save."""
        if self.session.fit.rank > 0:
            return
        seconds, grace_period_s = self.session.saver.last_save_s(), self._listener.grace_period_s
        if self._asks_for_time and self._grace_period_s > grace_period_s:
            log.warning(
                "The launch allows %.0f s after a signal, not the %.0f s of grace_period_s: raise its --grace-period.",
                grace_period_s,
                self._grace_period_s,
            )
        if seconds is not None and seconds > grace_period_s:
            times = f"The last save took {seconds:.0f} s, the grace period is {grace_period_s:.0f} s"
            log.warning("%s: too short for a save after a signal. Extend it, or save to faster storage.", times)

    @property
    def _asks_for_time(self) -> bool:
        return self._grace_period_s != DEFAULT_GRACE_PERIOD_S

    def on_event_known(self, event: Event) -> None:
        """Starts the grace period of this rank."""
        if event.kind == _PREEMPT:
            if self._line is not None:
                self._line.is_stopping = True  # if a rank is lost before the stop, the next start of the fit stops
            self._listener.start_grace_period()
            for hurry in self.session.fit.participants.implement(Participant.hurry):
                hurry(self._listener.seconds_left)

    def on_event(self, event: Event) -> None:
        """Saves, and ends the fit as interrupted."""
        if event.kind != _PREEMPT:
            return
        session, trainer = self.session, self.session.fit.trainer
        is_first, step = trainer.is_global_zero, trainer.global_step
        is_bad = session.saver.waits()  # a resume would not judge the saved steps again
        if is_first:
            log.info("Preemption detected, saving checkpoint and exiting")  # NeMo's words
        local = session.fit.participants.implement(Participant.save_locally)
        resumes = session.selector.uses_global or (is_bad and bool(local))
        if local and not is_bad:
            # Without AutoResume, a resume uses only local checkpoints.
            first = not resumes or trainer.strategy.broadcast(is_first and self._is_short_of_time())
            if first and local[0]("preemption", _LOCAL_SHARE * self._listener.seconds_left):
                resumes = True
                if is_first:
                    log.info("Saved step %d to the local checkpoints of all nodes.", step)
        path = None if is_bad else session.saver.save("preemption")
        reason = f"signal {event.payload['signum']} on rank {event.rank}"
        if is_first:
            session.outcome.write("interrupted", reason)
            session.fit.ledger.record(FitInterrupted(fit=session.fit.index, step=step, reason=reason))
            saved = f"saved {path}" if path is not None else "no new checkpoint could be saved"
            if is_bad:
                saved = "nothing was saved because the last step was bad: a resume begins before that step"
            then = "Run the same command again to continue."
            if not resumes and is_bad:
                then = "Without AutoResume a restart begins anew."
            elif not resumes:
                then = "Without AutoResume a restart does not use it automatically: pass it to fit(ckpt_path=...)."
            log.info("Stopped at step %d because of %s; %s. %s", step, reason, saved, then)
            if event.payload["requeue"]:
                _requeue()
        raise signals.Interrupted(f"interrupted at step {step} by {reason}")

    def leave(self) -> None:
        """Restores output and handlers."""
        self._listener.grace_period_s = self._before_s
        if self._line is not None:
            self._line.stop = lambda: None
        try:
            # The process ends with this exception, unless the script catches it.
            if (interrupted := self.session.interrupted_by()) is not None:
                weakref.finalize(interrupted, self._release_output).atexit = False
            else:
                self._release_output()
        finally:
            self._release()

    def _decide_about_late_signal(self) -> None:
        """Has the previous handler act on a signal that came too late for this fit."""
        received = self._listener.received
        if received is None or received in self._listener.returned or signals.installed() is not None:
            return
        if not self.session.fit.failing:
            signal.raise_signal(received)

    def _on_signal(self, signum: signal.Signals) -> None:
        if self._line is None or not self._line.is_told_who_stops or signum not in (signal.SIGTERM, signal.SIGINT):
            return self._request(signum)
        self._listener.await_another()  # the signal of the launch
        # The timer outlasts this fit: if another rank is lost meanwhile, the next start of the fit stops.
        timer = threading.Timer(STOP_IS_DECIDED_WITHIN_S, self._line.stop_if_untold)
        timer.daemon = True
        timer.start()

    def _request(self, signum: signal.Signals) -> None:
        fit, payload = self.session.fit, {"signum": int(signum), "requeue": signum == self._requeue_signal}
        fit.agreement.request(_PREEMPT, payload, Needs.CLEAN)  # first: the storage of the ledger may not respond
        fit.ledger.record(SignalReceived(fit=fit.index, signum=int(signum)))

    def _end_now(self, reason: str) -> None:
        """Records that the process ends without an orderly stop."""
        self.session.fit.ledger.record(FitInterrupted(fit=self.session.fit.index, reason=reason))
        self.session.outcome.write("interrupted", reason)

    def _is_short_of_time(self) -> bool:
        """Whether a global save may take longer than the time left, so that a local one goes first."""
        seconds = self.session.saver.last_save_s()
        # The duration of the first save is unknown.
        return seconds is None or self._listener.seconds_left < _SAFETY_FACTOR * seconds


def _requeue() -> None:
    scheduler = current_scheduler()
    job = f"{scheduler.title} job {scheduler.job_id}"
    if (refusal := scheduler.requeue()) is None:
        log.info("%s is requeued.", job)
    else:
        log.error("%s could not be requeued (%s). Submit it again to resume.", job, refusal)
