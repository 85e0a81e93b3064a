"""Progress counters of the loops, read and set."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from lightning_resilience._lightning.lightning_callbacks import callbacks
from lightning_resilience._lightning.lightning_patches import Patches

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def steps_counted(trainer: Trainer) -> int:
    """A count, the same on all ranks, that grows with every training batch begun and with every epoch begun."""
    fit_loop = trainer.fit_loop
    return fit_loop.epoch_loop.batch_progress.total.ready + fit_loop.epoch_progress.total.ready


def batches_in_all(trainer: Trainer) -> int:
    """How many training batches of all epochs have been begun."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def batches_begun(trainer: Trainer) -> int:
    """How many training batches of this epoch have been begun; between two batches the number of the next one."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def logged_step(trainer: Trainer) -> int:
    """The step at which Lightning logs what belongs to now."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def accumulates(trainer: Trainer) -> bool:
    """Whether an optimizer's step is for more than one batch, now or in an epoch to come.

    A ``GradientAccumulationScheduler`` sets the Trainer's number when its epoch begins.
    """
    schedules = (getattr(each, "going_to_accumulate_grad_batches", None) for each in callbacks(trainer))
    return trainer.accumulate_grad_batches != 1 or any(schedule() for schedule in schedules if schedule is not None)


def accumulation_window_complete(trainer: Trainer) -> bool:
    """Whether no gradients wait for the rest of their accumulation window.

    In its last epoch, which only reads data for BatchNorm, ``StochasticWeightAveraging`` leaves those of the step
    before, and Lightning makes a step of them at the end.
    """
    if trainer.accumulate_grad_batches == 1:
        return True
    return not trainer.fit_loop.epoch_loop._should_accumulate() and not trainer.fit_loop._skip_backward


class BehindStep:
    """Knows whether the last batch has made a step: manual optimization may accumulate gradients."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._are_seen = False

    def at(self, step: int) -> bool:
        """To be asked before the first batch and behind each one, with ``trainer.global_step``.

        Optimizers without Lightning's wrapper are not counted: until a step was seen, any batch may have made one.
        """
        before, self._before = self._before, step
        self._are_seen |= step != (before or 0)
        return before != step or not self._are_seen


def evaluation_progress(trainer: Trainer) -> dict[str, Any]:
    """The progress of the fit's validation loop, by its keys in a checkpoint."""
    state: dict[str, Any] = {}
    trainer.fit_loop.epoch_loop.val_loop.state_dict(state, "epoch_loop.val_loop.")
    return state


def silence_resume_warning(trainer: Trainer, patches: Patches) -> None:
    """Silences Lightning's warning that a plain data loader can't be resumed in mid-epoch: here it can."""
    loop = trainer.fit_loop.epoch_loop
    reset = loop.reset

    def wrapper() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            reset()

    patches.set(loop, "reset", wrapper)


def count_replayed(trainer: Trainer) -> None:
    """Subtracts the replayed batches from the fetcher's count, to which Lightning adds them again."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    fetcher.fetched -= trainer.fit_loop.epoch_loop.batch_progress.current.ready


def end_restart(trainer: Trainer) -> None:
    """Ends the restarting state of all loops.

    From here on our checkpoints say exactly what is done and what is due. Lightning guesses it from its counters while
    ``_restarting`` is set, for the rest of the epoch, and skips validations and scheduler steps; with ``max_steps`` the
    public setter cannot even unset it.
    """

    def clear(loop: Any) -> None:
        loop._restarting = False
        for child in vars(loop).values():
            if hasattr(child, "_restarting"):
                clear(child)

    clear(trainer.fit_loop)
    trainer.fit_loop._resuming_from_checkpoint = False


def count_batches_done(trainer: Trainer, batches: int) -> int:
    """Continues this epoch after its first ``batches`` batches; after all of them if it was over.

    Returns:
        How many are done.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if progress.is_last_batch and trainer.num_training_batches != float("inf"):
        batches = int(trainer.num_training_batches)
    for key in ("ready", "started", "processed", "completed"):
        setattr(progress.current, key, batches)
    return batches


def epoch_loop_batches(trainer: Trainer) -> int:
    """How many training batches of this epoch are done."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.completed
