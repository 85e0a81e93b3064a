"""The end of a fit: the ranks meet after their last batch, save the final state and close the agreement."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress

from lightning_resilience import agreement_protocol
from lightning_resilience._lightning import lightning_limits, lightning_progress
from lightning_resilience.agreement_protocol import Event, Needs, PeerLost
from lightning_resilience.checkpoint import resume
from lightning_resilience.fit import checkpoint_io
from lightning_resilience.fit.checkpoint_selector import CheckpointSelector
from lightning_resilience.fit.context import FitContext
from lightning_resilience.fit.exact_state import ExactState
from lightning_resilience.fit.outcome import ASKED, END_IS_MISSING, ENDS_APART, FitOutcome
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.saving import Saver
from lightning_resilience.launch import membership
from lightning_resilience.run.events import Finished
from lightning_resilience.run.history import read_history, troubles
from lightning_resilience.run.run_directory import RUN_DIR_VARIABLE

log = logging.getLogger(__name__)

_TRAINED = "trained"  # the event with which ranks meet after their last batch


class EndOfFit(Participant):
    """Ends one fit that is not interrupted."""

    def __init__(
        self, fit: FitContext, outcome: FitOutcome, exact: ExactState, selector: CheckpointSelector, saver: Saver
    ) -> None:
        self.fit = fit
        self.outcome = outcome
        self.exact = exact
        self.selector = selector
        self.saver = saver
        self.is_over = False
        """Whether the end of the fit is recorded."""
        self._cut_short = False
        self._digest: str | None = None
        self._all_have_trained = threading.Event()
        self._left: list[Event] = []

    def on_event_known(self, event: Event) -> None:
        """Notes that all ranks have reached the end of their training."""
        if event.kind == _TRAINED:
            self._all_have_trained.set()

    def end_of_epoch(self, would_agree: bool) -> None:
        """Called when an epoch has ended, perhaps cut short by a limit.

        Args:
            would_agree: Whether all ranks would hold the same state here if the fit continued.
        """
        if lightning_limits.is_cut_short(self.fit.trainer):
            self._cut_short = True
            if would_agree:
                self.keep_before_the_end()

    def keep_before_the_end(self) -> None:
        """Saves a state from which a fit with a higher limit is exact, unless an older one exists.

        When a limit ends a fit in the middle of an epoch, Lightning ends the epoch early (hooks, a validation). A
        longer fit would do that later.
        """
        if not self._saves_final_state or not lightning_progress.accumulation_window_complete(self.fit.trainer):
            return
        if not self.saver.waits():
            checkpoint_io.on_every_rank(self.fit.trainer.strategy, self.saver.wait)
            saved = self.fit.from_rank_0(lambda: resume.checkpoints(self.fit.folder.checkpoints))
            if all(map(resume.is_final, saved)):
                self.saver.save("before the end")

    def before_epoch(self) -> None:
        """Completes the resume of a finished fit with a higher limit, before its next epoch."""
        if self.exact.is_final:
            before = self.fit.previous_outcome.details if self.fit.previous_outcome is not None else {}
            if self.fit.rank == 0 and (self.selector.ended or before).get(ENDS_APART):
                log.warning(
                    "Continuing this fit from its end is not exact: its last epoch was cut short, or a callback has "
                    "changed the weights at the end."
                )
            self.exact.complete_resume()

    def before_train_end(self) -> None:
        """Called when training has ended: saves the final state before any ``on_train_end``."""
        self.fit.stand_at("out_of_section", agreement_protocol.training(self.fit.steps_counted))
        if self.fit.trainer.world_size > 1:
            self._meet_after_training()
        if self.exact.is_final:  # an earlier attempt has saved it, and has not ended
            assert self.selector.loaded is not None
            self.fit.final_path = self.selector.loaded.path
            self.exact.complete_final()
        elif self._saves_final_state and lightning_limits.can_be_ended_again(self.fit.trainer) and not self._settle():
            self._save_final(is_over=False, apart=self._cut_short)
        if self.fit.final_path is not None and any(self.fit.gather(lightning_limits.acts_at_the_end(self.fit.trainer))):
            self._digest = self._digest_now()

    def _meet_after_training(self) -> None:
        """Waits outside of collectives until all ranks have trained; raises with the name of a rank that fails."""
        # Ranks that request the event have passed the first of these boundaries, so all ranks act at the second one.
        first, second = (agreement_protocol.training(self.fit.steps_counted + more) for more in (1, 2))
        self._left += self.fit.agreement.boundary(first, Needs.NOTHING)
        if not self._all_have_trained.is_set():
            self.fit.agreement.request(_TRAINED)
        while not self._all_have_trained.wait(0.01):
            self.fit.advanced()
            self._left += self.fit.agreement.boundary(first, Needs.NOTHING)
        events = self.fit.agreement.boundary(second, Needs.NOTHING)
        self._left += [event for event in events if event.kind != _TRAINED]
        self.fit.agreement.arrive(next(event for event in events if event.kind == _TRAINED))

    def _digest_now(self) -> str:
        with self.fit.saving():
            return self.saver.digest_at_end()

    def _settle(self) -> bool:
        """Waits for verdicts about the last steps; returns whether an event that they request is still open.

        That event is handled when the agreement is closed, and may end with another state than this one.
        """
        requests = [before_end() for before_end in self.fit.participants.implement(Participant.before_end)]
        self.fit.enter("out_of_section")
        return any(self.fit.gather(any(requests)))

    @property
    def _saves_final_state(self) -> bool:
        return bool(self.fit.participants.implement(Participant.after_final_save))

    def _save_final(self, is_over: bool, apart: bool) -> bool:
        if not self._saves_final_state:
            return True
        limits = lightning_limits.limits(self.fit.trainer)
        by = lightning_limits.limit_reached(self.fit.trainer) or ASKED
        self.fit.metadata["ended"] = {"by": by, "limits": limits, ENDS_APART: apart, "is_over": is_over}
        path = self.saver.save("finished", final=True)
        if path is not None:
            self.fit.final_path = path
            if self.fit.trainer.is_global_zero:
                for after_final_save in self.fit.participants.implement(Participant.after_final_save):
                    after_final_save()
        else:
            self._check_members()
        return path is not None

    def _check_members(self) -> None:
        """Raises if ranks came back at the very end: one of them owns the run, and all enter the fit to end it."""
        if membership.current() is not None and any(self.fit.gather(membership.is_replaced())):
            raise PeerLost("the ranks of this run have changed")

    def complete(self) -> None:
        """Called after every ``on_train_end``: closes the agreement and saves what these hooks have changed."""
        # This rank reports progress while it waits: another rank may be stuck.
        left = self._left + list(self.fit.agreement.close(self.fit.advanced))
        is_changed = self._digest is not None and any(self.fit.gather(self._digest_now() != self._digest))
        is_to_be_saved = self.fit.final_path is None or is_changed
        if is_to_be_saved:
            self._settle()
        for event in left:
            handled = [on_event(event) for on_event in self.fit.participants.implement(Participant.on_event_at_end)]
            if not any(handled) and event.payload:  # not a routine event
                log.info("Rank %d requested %s after the fit had ended; nothing is left to do.", event.rank, event.kind)
        apart = self._cut_short
        if self._digest is None:
            apart |= lightning_limits.changes_weights_at_the_end(self.fit.trainer)
        apart |= is_changed  # a longer fit would continue without that change
        is_missing = is_to_be_saved and not self._save_final(True, apart)
        self.fit.enter("out_of_section")
        for after_save in self.fit.participants.implement(Participant.after_save):
            after_save(True)
        step = self.fit.trainer.global_step
        self._check_members()
        if self.fit.trainer.is_global_zero:
            reason = lightning_limits.limit_reached(self.fit.trainer) or ASKED
            about = {ENDS_APART: apart, END_IS_MISSING: is_missing and self.fit.final_path is not None}
            self.outcome.write("finished", reason, {**lightning_limits.limits(self.fit.trainer), **about})
            self.fit.ledger.record(Finished(fit=self.fit.index, step=step, saved=False if is_missing else None))
            self._log_troubles()
        self.is_over = True

    def _log_troubles(self) -> None:
        """Logs the troubles of the fit if no launch does: a launch logs them in its last line."""
        if RUN_DIR_VARIABLE in os.environ:
            return
        with suppress(OSError):
            if trouble := troubles(read_history(self.fit.run.ledger).events, self.fit.index):
                log.warning("The fit has finished with trouble: %s.", trouble)

    def has_only_to_end(self) -> bool:
        """Whether only ``on_train_end`` is left to run: an attempt was interrupted in it."""
        ended = self.selector.ended
        if not self.exact.is_final or ended is None or self.outcome.finished_before():
            return False
        return not ended["is_over"] and self.outcome.ends_there(ended["by"], ended["limits"])
