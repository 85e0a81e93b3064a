"""The course of one fit: start, boundaries, rollback and end; see :mod:`.participant` for the order."""

from __future__ import annotations

import logging
import os
import signal
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lightning_resilience import _native_threads, agreement_protocol, signals
from lightning_resilience._files import Patience
from lightning_resilience._lightning import (
    lightning_checkpoints,
    lightning_data,
    lightning_limits,
    lightning_loops,
    lightning_progress,
    lightning_steps,
)
from lightning_resilience.agreement_protocol import Event, Needs
from lightning_resilience.checkpoint import data_position
from lightning_resilience.detect.hangs import rank_probe
from lightning_resilience.fit import checkpoint_io
from lightning_resilience.fit.checkpoint_selector import CheckpointSelector, Choice
from lightning_resilience.fit.context import FitContext
from lightning_resilience.fit.end_of_fit import EndOfFit
from lightning_resilience.fit.exact_state import ExactState
from lightning_resilience.fit.identity import FitIdentity
from lightning_resilience.fit.last_boundary import LastBoundary
from lightning_resilience.fit.outcome import FitOutcome
from lightning_resilience.fit.own_account import OwnAccount, record_killed
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.reentry import Replaceability
from lightning_resilience.fit.restore import Restorer
from lightning_resilience.fit.run_metrics import RunMetrics
from lightning_resilience.fit.saving import Saver
from lightning_resilience.launch import park
from lightning_resilience.run import time_account
from lightning_resilience.run.events import Fault, RunRefused
from lightning_resilience.run.failures import says_peer_is_lost
from lightning_resilience.run.goodput import reached_step
from lightning_resilience.run.run_directory import RUN_DIR_VARIABLE, AnotherFit, StaleAttempt
from lightning_resilience.run.wandb_runs import begin_another, wandb_run_id

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)

_CLEAN_TRAINING = Needs.TRAINING | Needs.CLEAN  # made once: an operation on flags costs a microsecond


class _Rollback(Exception):
    """Leaves the loops of a fit, which then run again from an older state."""

    def __init__(self, choice: Choice | None) -> None:
        super().__init__()  # a later error would print the whole state
        self.choice = choice


class FitSession:
    """Calls the participants of one ``trainer.fit``, and restores, saves and ends it.

    Args:
        trainer: The Trainer, in the ``setup`` of its fit.
        module: The module that is fitted.
        run_dir: The run directory; default: the launcher's, or without a launcher ``resilience`` in the Trainer's
            ``default_root_dir``.

    Attributes:
        fit: The run directory of the fit, its ranks and ledger.
        outcome: The outcome of the fit, also of earlier attempts.
        exact: What an exact resume needs besides Lightning's own state.
        saver: Saves checkpoints.
        selector: Chooses the checkpoint to resume from.
        last_boundary: Notes and saves the state of the last boundary; ``None`` without ``launch --elastic``.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, run_dir: str | os.PathLike[str] | None) -> None:
        self._pid = os.getpid()
        self.fit = fit = FitContext(trainer, module, run_dir)
        self.outcome = FitOutcome(fit)
        self.exact = ExactState(fit, self.outcome, self._guard_workers)
        self.saver = Saver(fit, self.exact)
        self.selector = CheckpointSelector(fit, self.outcome)
        self._identity = FitIdentity(fit, self.outcome, self.exact)
        self._restorer = Restorer(fit, self._identity, self.exact, self.selector, self.saver)
        self._ending = EndOfFit(fit, self.outcome, self.exact, self.selector, self.saver)
        self._metrics = RunMetrics(fit)
        self.replaceability = Replaceability(fit)
        for participant in (self._ending, self._metrics, self.replaceability):
            fit.participants.add(participant)
        self.last_boundary = LastBoundary(self) if self.replaceability.is_possible else None
        if self.last_boundary is not None:
            fit.participants.add(self.last_boundary)
        self.members: list[Any] = []
        """The callbacks that take part."""
        self.interrupted_by: Callable[[], BaseException | None] = lambda: None
        """Returns the exception that has stopped the fit in order, if it still exists (a weak reference)."""
        self.when_left: Callable[[], None] = lambda: None
        """Called last, when everything is released."""
        self._has_restored = False
        self.has_left = False
        self._guarded: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._running = False
        self._rollback_request: tuple[int, Callable[[], None], bool] | None = None
        self._own_callbacks: Any = None
        self._behind_step = lightning_progress.BehindStep(trainer)
        self._warm = False
        self._clean = False
        self._in_batch = False
        self._train_apart = False
        self._unwatched: rank_probe.RankProbe | None = None
        """The launcher's probe of this rank, if no participant has one."""
        self._own_account = OwnAccount(fit)
        if trainer.local_rank == 0:
            record_killed(fit)
        self._install()
        _native_threads.guard()

    def _install(self) -> None:
        trainer, patches = self.fit.trainer, self.fit.patches
        checkpoint_io.make_durable(trainer, self.fit.check_owner_if_known, self.fit.metadata)
        lightning_loops.before_strategy_setup(trainer, patches, self._identity.describe)
        lightning_loops.on_optimizers(trainer, patches, self._identity.note_optimizers)
        lightning_checkpoints.on_restore(trainer, patches, self._restore)
        lightning_checkpoints.on_restore_training_state(trainer, patches, self._restorer.restoring_training_state)
        lightning_data.on_request(trainer, patches, self.exact.make_loaders)
        self.exact.expect_division(self.fit.from_rank_0(self._identity.recorded_division), self.selector.has_saved)
        lightning_data.on_train_data(trainer, patches, self._before_first_iterator, self._before_iterator)
        lightning_loops.on_fit_run(trainer, patches, self._run)
        lightning_loops.on_fit_loop(
            trainer, patches, self._before_epoch, self._end_of_epoch, self._before_train_end, self._complete
        )
        lightning_loops.on_training_boundary(trainer, patches, self._training_boundary)
        during = self._guard_workers, self._evaluation_boundary, self._evaluation_end
        lightning_loops.on_evaluation(trainer, patches, self._evaluation_start, *during, self._leave_evaluation)

    # -- the start -----------------------------------------------------------------------------------------------------

    def _restore(self, explicit: str | None, weights_only: bool | None) -> None:
        if self._is_search():  # a search restores its own checkpoint
            found = lightning_checkpoints.load_checkpoint(self.fit.trainer, explicit, weights_only)
            lightning_checkpoints.restore_checkpoint(self.fit.trainer, explicit, found)
        else:
            self.exact.end_early_data()
            with self.fit.time.during(time_account.RESTORE):
                self._restorer.restore(explicit, weights_only)
                self.replaceability.check_has_state(self.selector.loaded is not None)
        self._has_restored = True
        lightning_data.forget(self.fit.trainer)

    def _before_first_iterator(self, load_loader_states: Callable[[], None]) -> None:
        loaders = lightning_data.train_loaders(self.fit.trainer)
        if self._is_search() or not self._has_restored:
            load_loader_states()
            return
        self.exact.workers.watch(loaders)
        for before_training_data in self.fit.participants.implement(Participant.before_training_data):
            before_training_data(loaders)
        self._identity.check_data(loaders)
        self._restorer.check_settings()
        if self.fit.trainer.is_global_zero:
            for reason in data_position.inexact_loaders(loaders, self.exact.workers.are_kept(loaders)):
                log.warning("A resume may not be exact: %s", reason)
        self.exact.begin_data(loaders, load_loader_states)
        self._identity.record_division()

    def _before_iterator(self) -> None:
        if not self._is_search():
            self.exact.note_epoch()

    def _guard_workers(self, loaders: list[Any]) -> None:
        listener = signals.installed()
        signums = listener.signums if listener is not None and self.fit.participants.protect_workers() else ()
        for loader in loaders:
            if isinstance(loader, DataLoader) and loader.num_workers > 0:
                init = loader.worker_init_fn
                if not isinstance(init, signals.WorkerGuard):
                    self._guarded[loader] = init  # weak: an epoch may create new loaders
                    loader.worker_init_fn = signals.WorkerGuard(init, signums)

    def start(self) -> None:
        """Called in ``on_train_start``: boundaries begin."""
        if self._running:
            return
        self._running = True
        fit = self.fit
        if fit.progress is None and (launched := rank_probe.probe_of_worker()) is not None:
            fit.time.close()  # the watchdog, which ends when all ranks have left, records no more
            launched.progress.enter("left")  # no participant reports sections
            self._unwatched = launched
        if not fit.has_rolled_back and not fit.time.is_shared:  # otherwise a watchdog records it
            self._own_account.keep()
        fit.patience = Patience(fit.advanced)
        self.selector.begin()
        if not fit.has_rolled_back:
            self._install_in_steps()
            # before a callback of the user can change it
            self._optimizer_layout = lightning_loops.optimizer_layout(fit.trainer)
        with fit.time.during(time_account.FAST_FORWARD):
            self.exact.start(is_first=not fit.has_rolled_back)
        if not fit.has_rolled_back:
            self._metrics.begin()
        self._begin_training_time()

    def _begin_training_time(self) -> None:
        fit = self.fit

        def look() -> int:
            with suppress(OSError):  # for monitoring only
                fit.folder.goal = {"step": lightning_limits.last_step(fit.trainer)}
            return reached_step(fit.run.path, fit.ledger.events(), fit.index)

        reached = fit.from_rank_0(look)
        fit.time.begin_training(reached, self._splits_steps)

    def _install_in_steps(self) -> None:
        """Installs calls within a batch, if a participant implements them: each costs a step microseconds."""
        trainer, patches, calls = self.fit.trainer, self.fit.patches, self.fit.participants.in_step()
        ready = self._batch_ready if calls.batch_ready else None
        begins = self._batch_begins if calls.batch_begins else None
        if ready or begins or calls.batch_done or calls.before_batch_end:
            lightning_steps.on_batch(trainer, patches, ready, begins, self._batch_done)
        self._train_apart = self.fit.participants.train_apart
        if self._splits_steps:
            lightning_steps.on_batch_work(trainer, patches, self.fit.time.batch_ready, self.fit.time.batch_done)

    @property
    def _splits_steps(self) -> bool:
        """Whether the time of a step is the time of the host."""
        return bool(self.fit.trainer.strategy.root_device.type == "cpu")

    def start_sanity_check(self) -> None:
        """Called in ``on_sanity_check_start``: its batches are boundaries too."""
        self._running = True

    def end_sanity_check(self) -> None:
        """Called in ``on_sanity_check_end``."""
        self._running = False

    # -- boundaries ----------------------------------------------------------------------------------------------------

    def _is_search(self) -> bool:
        # A learning-rate search inside the fit runs the same loops with the callbacks taken out of the Trainer.
        callbacks = vars(self.fit.trainer)["callbacks"]
        if callbacks is self._own_callbacks:
            return False
        if any(callback in self.members for callback in callbacks):
            self._own_callbacks = callbacks
            return False
        return True

    @property
    def _is_training(self) -> bool:
        """Whether the loops are training this fit, not in a search."""
        # The first half of _is_search is repeated here: a healthy step checks once.
        return self._running and (vars(self.fit.trainer)["callbacks"] is self._own_callbacks or not self._is_search())

    def _training_boundary(self) -> bool:
        if not self._is_training:
            self.fit.advanced()  # a search
            return True
        if self.last_boundary is not None:
            self.replaceability.check()
        fit = self.fit
        step, position = fit.trainer.global_step, agreement_protocol.training(fit.steps_counted)
        if fit.progress is not None:
            # The first batch is slow: compilers, caches, workers that start.
            fit.progress.at("step" if self._warm else "setup", step, position)
        if self.exact.resumed is not None and self.exact.complete_resume():
            return False
        is_first, self._warm = not self._warm, True
        if is_first:
            park.begun()
        self.exact.at_boundary()
        is_whole = clean = lightning_progress.accumulation_window_complete(fit.trainer) and (
            fit.module.automatic_optimization or self._behind_step.at(step)
        )
        self._clean = clean = clean and (not self._train_apart or fit.participants.ranks_agree())
        if (last_boundary := self.last_boundary) is not None:
            last_boundary.notes_early = is_whole
        try:
            agreed = fit.agreement.boundary(position, _CLEAN_TRAINING if clean else Needs.TRAINING)
            if agreed and last_boundary is not None:
                last_boundary.before_save()  # to act on them may take long, and change the state
            for event in agreed:
                self._act(event)
            if self._rollback_request is not None:
                self._roll_back()
            if agreed and last_boundary is not None:
                last_boundary.notes_early = is_whole  # what they have changed
            calls = fit.participants.in_step()
            for after_batch in calls.after_batch:
                after_batch(is_whole)
            for at_boundary in calls.at_boundary:
                at_boundary(step, self._may_save)
            self.saver.at_boundary()
        except Exception:
            # Perhaps a rank was lost: other ranks that were faster than this one have noted this boundary.
            if last_boundary is not None:
                last_boundary.before_save()
            raise
        finally:
            if last_boundary is not None:
                last_boundary.notes_early = False
        self.exact.before_fetch()
        for skips_batch in calls.skips_batch:
            if skips_batch():
                before = self.exact.get_random_state()
                lightning_loops.skip_batch(fit.trainer)
                self.exact.set_random_state(before)  # as if this process had never had the batch
                return False
        for before_batch in calls.before_batch:
            before_batch()
        if self.last_boundary is not None:
            if self.replaceability.leaves:
                self.last_boundary.save_together(self.replaceability.not_in_next)
            self.replaceability.check_members()
        if not is_first:
            fit.time.begin_batch(step)
        self.outcome.has_trained = self._in_batch = True
        return True

    def _batch_ready(self) -> None:
        if self._in_batch:  # otherwise it is a batch of a search
            for batch_ready in self.fit.participants.in_step().batch_ready:
                batch_ready()

    def _batch_begins(self) -> None:
        if self._in_batch:
            for batch_begins in self.fit.participants.in_step().batch_begins:
                batch_begins()

    def _batch_done(self) -> None:
        if self._in_batch:
            self._in_batch = False
            calls = self.fit.participants.in_step()
            for batch_done in calls.batch_done:
                batch_done()
            for before_batch_end in calls.before_batch_end:
                before_batch_end()

    def _may_save(self) -> bool:
        return self._clean and not self.fit.saves_paused

    def _before_epoch(self) -> None:
        if self._is_training:
            self._ending.before_epoch()
            lightning_loops.continue_progress_bar(self.fit.trainer)

    def _end_of_epoch(self) -> None:
        if self._is_training:
            would_agree = self.fit.participants.ranks_agree()  # also if the epoch continued
            for at_end_of_epoch in self.fit.participants.implement(Participant.at_end_of_epoch):
                at_end_of_epoch()
            self.fit.time.enter(time_account.CALLBACKS)
            self.saver.fence()
            self._ending.end_of_epoch(would_agree)
            self.fit.enter("out_of_section")

    def _evaluation_start(self) -> None:
        if self._is_training:
            trainer = self.fit.trainer
            self.fit.enter("setup" if trainer.sanity_checking else "out_of_section")
            if not trainer.sanity_checking:
                self.fit.time.enter(time_account.VALIDATION)
                would_agree = self.fit.participants.ranks_agree()
                for before_evaluation in self.fit.participants.implement(Participant.before_evaluation):
                    before_evaluation()
            self.exact.evaluation_starts()
            if not trainer.sanity_checking and would_agree and lightning_limits.is_cut_short(trainer):
                self._ending.keep_before_the_end()

    def _evaluation_boundary(self, loader: int, index: int) -> None:
        if self._is_training:
            self._boundary_in_evaluation(agreement_protocol.evaluation(self.fit.steps_counted, loader, index))

    def _evaluation_end(self) -> None:
        if self._is_training:
            self._boundary_in_evaluation(agreement_protocol.end_of_evaluation(self.fit.steps_counted))
            self._leave_evaluation()

    def _leave_evaluation(self) -> None:
        """Ends an evaluation; also called for one without batches, which has no end of its own."""
        if self._is_training and self.exact.before_evaluation is not None:
            self.exact.evaluation_ends()
            if not self.fit.trainer.sanity_checking:
                self.fit.enter("out_of_section")
                self.fit.time.enter(time_account.CALLBACKS)

    def _boundary_in_evaluation(self, position: agreement_protocol.Position) -> None:
        self.replaceability.check()
        self.fit.stand_at("setup" if self.fit.trainer.sanity_checking else "validation", position)
        # In the sanity check there is no state to save, and the first training boundary follows soon.
        clean = not self.fit.trainer.sanity_checking and lightning_progress.accumulation_window_complete(
            self.fit.trainer
        )
        for event in self.fit.agreement.boundary(position, Needs.CLEAN if clean else Needs.NOTHING):
            self._act(event, in_evaluation=True)

    def _act(self, event: Event, in_evaluation: bool = False) -> None:
        # Ranks that train independently may be far apart, and a rank that waits is not stuck.
        self.fit.agreement.arrive(event, self.fit.advanced if self._train_apart else lambda: None)
        saves_in_evaluation = in_evaluation and bool(event.needs & Needs.CLEAN)
        if saves_in_evaluation and any(self.fit.gather(self.exact.evaluation_has_changed_weights())):
            if self.fit.rank == 0:
                log.info("The stop waits for the end of the validation, because its hooks have changed the weights.")
                self.fit.agreement.request(event.kind, event.payload, event.needs | Needs.TRAINING)
            return
        for on_event in self.fit.participants.implement(Participant.on_event):
            on_event(event)

    # -- rollback ------------------------------------------------------------------------------------------------------

    def rollback(self, until: int, otherwise: Callable[[], None], only_global: bool = False) -> None:
        """Rolls the fit back to its newest checkpoint that verifies, without a restart.

        All ranks must call this in ``on_event``; other events of the boundary are handled first.

        Args:
            until: The largest ``trainer.global_step`` of that checkpoint.
            otherwise: Called on all ranks if no such checkpoint exists.
            only_global: Whether to ignore local checkpoints.
        """
        self._rollback_request = until, otherwise, only_global

    def _roll_back(self) -> None:
        assert self._rollback_request is not None
        (until, otherwise, only_global), self._rollback_request = self._rollback_request, None
        if lightning_loops.optimizer_layout(self.fit.trainer) != self._optimizer_layout:
            raise RuntimeError(
                "A callback has changed optimizers, schedulers or initial weights of the fit, and only a restart can "
                "recreate them. Restart the run; it resumes."
            )
        for before_rollback in self.fit.participants.implement(Participant.before_rollback):
            before_rollback()
        checkpoint_io.on_every_rank(self.fit.trainer.strategy, self.saver.wait)
        self.fit.patience = Patience(self.fit.advanced)
        choice = self.selector.newest(until, self._restorer.explicit is not None, only_global)
        if choice is None and self._restorer.explicit is None:
            otherwise()
        else:
            raise _Rollback(choice)

    def _run(self, loop: Callable[[], None]) -> None:
        begun = self.exact.get_random_state()  # a new process creates its loaders with it
        self.replaceability.begin(self)
        while True:
            try:
                lightning_loops.rerun_end_of_fit(self.fit.trainer) if self._ending.has_only_to_end() else loop()
                return self.replaceability.end()
            except _Rollback as rollback:
                choice = rollback.choice
            except signals.Interrupted:
                self.replaceability.end()  # a rank that comes back now is too late
                raise
            except StaleAttempt:
                raise
            except BaseException as error:
                if os.getpid() == self._pid and not self.replaceability.is_loss(error):
                    for on_raised in self.fit.participants.implement(Participant.on_raised):
                        on_raised()
                raise
            self._restore_older(choice)
            del choice
            self.exact.set_random_state(begun)

    def _restore_older(self, choice: Choice | None) -> None:
        fit = self.fit
        counted = fit.steps_counted
        self._running = False
        fit.enter("setup")
        fit.time.enter(time_account.RESTORE)
        self.exact.loading.undo()
        lightning_loops.reset_loops(fit.trainer, fit.module)
        self.exact.reset()
        self._behind_step.close()
        self._behind_step = lightning_progress.BehindStep(fit.trainer)
        self._restorer.restore_from(choice)
        lightning_checkpoints.restore_training_state(fit.trainer)
        fit.counted_before += counted + 1 - fit.steps_counted
        fit.has_rolled_back, self._warm = True, False
        for after_rollback in fit.participants.implement(Participant.after_rollback):
            after_rollback()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _before_train_end(self) -> None:
        if self._is_training:
            self._ending.before_train_end()

    def _complete(self) -> None:
        if self._is_training:  # otherwise it is the loop of a search
            self._ending.complete()
            self._running = False

    def fail(self, exception: BaseException) -> None:
        """Called in ``on_exception``: notifies the other ranks, writes the outcome and leaves."""
        if os.getpid() != self._pid:
            return  # a forked child must not act for its parent
        self.fit.failing = True
        if isinstance(exception, signals.Interrupted):
            self.interrupted_by = weakref.ref(exception)
        listener = signals.installed()
        is_ours = listener is not None and signal.SIGINT in listener.signums
        if isinstance(exception, KeyboardInterrupt) and self.fit.rank == 0 and not is_ours:
            log.warning("Ctrl-C: this step is not saved. With Preemption(signals=[..., 'SIGINT']) it would be.")
        try:
            if not isinstance(exception, (signals.Interrupted, StaleAttempt)):
                self._record_failure(exception)
        finally:
            self.leave()

    def _record_failure(self, exception: BaseException) -> None:
        kind = type(exception).__name__
        reason = f"{kind}: {exception}"
        # An OSError comes from another connection, such as one to storage.
        self.fit.peer_is_lost = says_peer_is_lost(reason) and not isinstance(exception, OSError)
        # A launch counts faults; without one, a refused run is unchanged.
        is_refused = isinstance(exception, AnotherFit) and RUN_DIR_VARIABLE not in os.environ
        event = RunRefused if is_refused else Fault
        self.fit.ledger.record(event(kind=kind, fit=self.fit.index, step=self.fit.trainer.global_step, reason=reason))
        asked = [self.selector.verdict, *self.fit.participants.implement(Participant.on_failure)]
        verdicts = [verdict for on_failure in asked if (verdict := on_failure(exception)) is not None]
        if isinstance(exception, AnotherFit):
            verdicts.append(str(exception))
        if verdicts:
            # Before the other ranks learn of the failure: they must not retry.
            self.outcome.write("halted", verdicts[0], {"exit_code": getattr(exception, "exit_code", 1)})
        self.fit.agreement.abort(reason, self.fit.peer_is_lost)
        if not verdicts and not self._ending.is_over and not self.outcome.is_halted():
            self.outcome.write("failed", reason)

    def leave(self) -> None:
        """Called in ``teardown`` and after an exception: releases everything."""
        self.has_left = True
        fit = self.fit
        fit.time.end_fit(fit.failing)
        with ExitStack() as steps:  # in reverse order, also if one raises
            steps.callback(lambda: self.when_left())
            if self._own_account.is_kept or not fit.time.is_shared:  # otherwise the watchdog records it
                steps.callback(self._own_account.record)
            if fit.rank == 0:
                steps.callback(fit.run.left)
            steps.callback(begin_another, *(wandb_run_id(fit.run_id, fit.index + more) for more in (0, 1)))
            if self._unwatched is not None:
                steps.callback(self._unwatched.end_fit)
            steps.callback(_each, fit.participants.implement(Participant.left))
            steps.callback(self.exact.stop)
            steps.callback(self._release)
            steps.callback(fit.agreement.stop)
            steps.callback(self.exact.restore_after_finished)
            steps.callback(self.saver.close)
            steps.callback(_each, fit.participants.implement(Participant.leave))

    def _release(self) -> None:
        self._behind_step.close()
        self.exact.loading.undo()
        self.exact.undo_early_division()
        self.fit.patches.undo()
        self.exact.workers.leave()
        for loader, init in self._guarded.items():
            loader.worker_init_fn = init
        if self.fit.failing:
            lightning_loops.after_exception_hooks(self.fit.trainer, self.fit.save_patches, self._release_saves)
        else:
            self._release_saves()

    def _release_saves(self) -> None:
        self.fit.save_patches.undo()  # in reverse order of their making
        with self.fit.saving():
            checkpoint_io.undo(self.fit.trainer)  # waits for saves in the background


def _each(methods: Sequence[Callable[[], None]]) -> None:
    """Calls all methods in order, also if one raises."""
    with ExitStack() as calls:
        for method in reversed(methods):
            calls.callback(method)
